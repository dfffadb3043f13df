"""Text for transformer encoders: what a model folder says about its tokens, and rows as token ids.

Shared by embedders and classifiers, whatever runs the network. Only the `tokenizers` library is used, so that a model
in ONNX needs neither torch nor transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.topython import to_plain
from gristmill.errors import BadModel
from gristmill.fingerprint.modelfiles import read_json
from gristmill.models.columns import check_columns, is_text
from gristmill.models.contract import Prepared, Refusal
from gristmill.process.extras import installed, require
from gristmill.values import dataclass

# Models whose positions begin after the padding id, so that `max_position_embeddings` counts two more than fit
# (transformers: create_position_ids_from_input_ids).
_OFFSET_POSITIONS = frozenset({
    "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "longformer", "mpnet",
    "data2vec-text", "ibert", "esm", "luke", "xmod",
})  # fmt: skip
# transformers writes this for "no limit" (VERY_LARGE_INTEGER is 1e30); nothing real is as long.
_NO_LIMIT = 1 << 30
# Characters of text that are tokenised at a time: the tokenizer holds about 100 bytes per token until it is read out.
_CHUNK_CHARS = 1 << 20
_CHUNK_ROWS = 1024
# A long text is first cut to this many characters per token that the model takes. English has 4 to 5 per token.
_CHARS_A_TOKEN = 16
# If the model truncates, no more characters of a text than this are ever looked at (or 64 per token that the model
# takes, if that is more): a million characters that do not make up the few hundred tokens that are kept are not text.
_MOST_CHARS = 1 << 20


@dataclass(frozen=True)
class TokenRules:
    """How a folder's model wants its text: at most `max_length` tokens (None: no limit), padded with `pad_id`.

    `left` pads before the text. `lowercase` is what sentence-transformers adds to the tokenizer's own normalisation.
    """

    tokenizer: Path
    max_length: int | None
    pad_id: int
    left: bool = False
    truncate_left: bool = False
    lowercase: bool = False


def token_rules(folder: Path, name: str, max_length: int | None, sentence: dict[str, Any] | None = None) -> TokenRules:
    """The rules of a Hugging Face folder. `sentence` is sentence_bert_config.json, `max_length` the user's own limit.

    Raises BadModel if there is no tokenizer, or if the model has fewer positions than `max_length`.
    """
    config = read_json(folder / "config.json", name)
    tokens = read_json(folder / "tokenizer_config.json", name)
    sentence = sentence or {}
    path = folder / "tokenizer.json"
    if not path.is_file() and not (folder / "vocab.txt").is_file() and not any(folder.glob("*.model")):
        raise BadModel(f"{name}: {folder} has no tokenizer.json: copy it there from where the model was saved")
    positions = _positions(config)
    own = sentence.get("max_seq_length") or _finite(tokens.get("model_max_length")) or positions
    if max_length is not None:
        if max_length < 1 or (positions is not None and max_length > positions):
            raise BadModel(
                f"{name}: max_length is {max_length}; the model has {positions or 'any number of'} positions"
            )
        own = max_length
    if own is not None and positions is not None:
        own = min(int(own), positions)
    return TokenRules(
        path,
        None if own is None else int(own),
        _pad_id(config, tokens, folder, name),
        tokens.get("padding_side") == "left",
        tokens.get("truncation_side") == "left",
        bool(sentence.get("do_lower_case")),
    )


def _finite(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and 0 < value < _NO_LIMIT else None


def _positions(config: dict[str, Any]) -> int | None:
    most = _finite(config.get("max_position_embeddings"))
    if most is not None and config.get("model_type") in _OFFSET_POSITIONS:
        pad = config.get("pad_token_id")
        return most - (1 if pad is None else int(pad)) - 1
    return most


def _pad_id(config: dict[str, Any], tokens: dict[str, Any], folder: Path, name: str) -> int:
    content = tokens.get("pad_token")
    content = content.get("content") if isinstance(content, dict) else content
    if content is not None:
        for number, added in (tokens.get("added_tokens_decoder") or {}).items():
            if isinstance(added, dict) and added.get("content") == content:
                return int(number)
        for added in read_json(folder / "tokenizer.json", name).get("added_tokens") or ():
            if added.get("content") == content:
                return int(added["id"])
    # What is under the mask changes nothing; it only has to be a token.
    pad = config.get("pad_token_id")
    return pad if isinstance(pad, int) and pad >= 0 else 0


# ---------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Tokens:
    """Token ids of many rows, one after the other: row i is `ids[offsets[i]:offsets[i + 1]]` (int32, int64).

    `types` are token types if the tokenizer gives others than 0. `prompt` is how many tokens the prompt takes up at the
    start of each row.
    """

    ids: np.ndarray
    offsets: np.ndarray
    types: np.ndarray | None = None
    prompt: int = 0

    def padded(self, index: np.ndarray, pad_id: int, left: bool) -> Batch:
        """The rows at `index` as a rectangle no wider than the longest of them."""
        starts = self.offsets[index]
        lengths = self.offsets[index + 1] - starts
        width = max(1, int(lengths.max(initial=0)))
        column = np.arange(width, dtype=np.int64)
        if left:
            column = column - (width - lengths)[:, None]
            mask = column >= 0
        else:
            mask = column < lengths[:, None]
            column = np.broadcast_to(column, mask.shape)
        places = (starts[:, None] + column)[mask]
        ids = np.full(mask.shape, pad_id, dtype=np.int64)
        ids[mask] = self.ids[places]
        types = None
        if self.types is not None:
            types = np.zeros(mask.shape, dtype=np.int64)
            types[mask] = self.types[places]
        return Batch(ids, mask, types, self.prompt)


@dataclass(frozen=True)
class Batch:
    """Padded tokens for one call of a network: `ids` int64 [rows, width], `mask` bool of that shape, True on tokens."""

    ids: np.ndarray
    mask: np.ndarray
    types: np.ndarray | None = None
    prompt: int = 0


class TextTokens:
    """Rows of a text column as token ids, ready for any encoder."""

    def __init__(self, rules: TokenRules, name: str, column: str, prompt: str = "", keep_nulls: bool = False) -> None:
        self._keep_nulls = keep_nulls
        self._rules = rules
        self._name = name
        self._column = column
        self._prompt = prompt
        self._tokenizer = _tokenizer(rules, name)
        # encode_batch_fast leaves out offsets into the text, which are not needed here (tokenizers 0.20.1 and later).
        self._encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        self._typed = any(self._tokenizer.encode("a").type_ids)
        self._prompt_tokens = self._count_prompt() if prompt else 0

    def prepare(self, rows: pa.Table) -> Prepared:
        """Token ids and their counts; a null is refused as such, or is an empty text if nulls are kept; bytes that are
        not UTF-8 are refused as invalid.
        """
        texts, refused = text_rows(rows, self._column, self._name)
        if self._keep_nulls:
            for null in (r for r in refused if r.kind == "null"):
                texts[null.row] = ""
            refused = [r for r in refused if r.kind != "null"]
        for row, text in enumerate(texts):
            if text is not None and self._prompt:
                texts[row] = self._prompt + text
        tokens = self.tokens(texts)
        return Prepared(len(texts), tokens, np.diff(tokens.offsets).astype(np.int32), tuple(refused))

    def padded(self, tokens: Tokens, index: np.ndarray) -> Batch:
        """The rows at `index` as the model wants them."""
        return tokens.padded(index, self._rules.pad_id, self._rules.left)

    def tokens(self, texts: Sequence[str | None]) -> Tokens:
        """Token ids of texts; no tokens for None."""
        ids: list[np.ndarray] = []
        types: list[np.ndarray] = []
        lengths = np.zeros(len(texts), dtype=np.int64)
        for rows in _chunks(texts):
            encodings = self._encoded([texts[row] or "" for row in rows])
            lengths[rows] = [len(e) for e in encodings]
            ids.append(_flat((e.ids for e in encodings), int(lengths[rows].sum())))
            if self._typed:
                types.append(_flat((e.type_ids for e in encodings), int(lengths[rows].sum())))
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return Tokens(_joined(ids), offsets, _joined(types) if self._typed else None, self._prompt_tokens)

    def _encoded(self, texts: list[str]) -> list[Any]:
        most = self._rules.max_length
        if most is None or self._rules.truncate_left:
            return list(self._encode(texts))
        look, limit = max(2048, _CHARS_A_TOKEN * most), max(_MOST_CHARS, 4 * _CHARS_A_TOKEN * most)
        if all(len(t) <= look for t in texts):
            return list(self._encode(texts))
        encodings = list(self._encode([_head(t, look, limit) for t in texts]))
        # A cut text that fills the model is done: its first tokens are those of the whole text. Others get more.
        while look < limit:
            short = [i for i, t in enumerate(texts) if len(t) > look and len(encodings[i]) < most]
            if not short:
                break
            look = min(look * 8, limit)
            for i, encoding in zip(short, self._encode([_head(texts[i], look, limit) for i in short]), strict=True):
                encodings[i] = encoding
        return encodings

    def _count_prompt(self) -> int:
        # As sentence-transformers counts it: without the special token that ends a text.
        ids = self._tokenizer.encode(self._prompt).ids
        special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return len(ids) - 1 if ids and ids[-1] in special else len(ids)


def _tokenizer(rules: TokenRules, name: str) -> Any:
    tokenizers = require("tokenizers", "text", name)
    if rules.tokenizer.is_file():
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(rules.tokenizer))
        except Exception as e:  # the library raises bare Exception
            raise BadModel(f"{name}: {rules.tokenizer} cannot be read as a tokenizer: {e}") from e
        _configured(tokenizer, read_json(rules.tokenizer.parent / "tokenizer_config.json", name))
    else:
        if not installed("transformers"):
            raise BadModel(
                f"{name}: {rules.tokenizer} is missing; to make it from the vocabulary: pip install 'gristmill[hf]'"
            )
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(rules.tokenizer.parent)).backend_tokenizer
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if rules.max_length is not None:
        tokenizer.enable_truncation(rules.max_length, direction="left" if rules.truncate_left else "right")
    if rules.lowercase and "Lowercase" not in str(tokenizer.normalizer):
        lower = tokenizers.normalizers.Lowercase()
        own = tokenizer.normalizer
        tokenizer.normalizer = lower if own is None else tokenizers.normalizers.Sequence([lower, own])
    return tokenizer


# Keys of tokenizer_config.json with which transformers overrides tokenizer.json, and their names there.
_OF_BERT = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}

# Classes of transformers that take tokenizer.json as it is.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


def _configured(tokenizer: Any, config: dict[str, Any]) -> None:
    import tokenizers

    if config.get("tokenizer_class") in _GENERIC:
        return
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    if isinstance(normalizer, tokenizers.normalizers.BertNormalizer):
        for key, name in _OF_BERT.items():
            if key in config and getattr(normalizer, name) != config[key]:
                setattr(normalizer, name, config[key])
        tokenizer.normalizer = normalizer
    if isinstance(splitter, tokenizers.pre_tokenizers.ByteLevel) and isinstance(config.get("add_prefix_space"), bool):
        splitter.add_prefix_space = config["add_prefix_space"]
        tokenizer.pre_tokenizer = splitter


def _chunks(texts: Sequence[str | None]) -> list[np.ndarray]:
    """Row numbers of the texts that are there, in order, in chunks of a bounded number of rows and characters."""
    chunks: list[np.ndarray] = []
    held: list[int] = []
    chars = 0
    for row, text in enumerate(texts):
        if text is None:
            continue
        held.append(row)
        chars += len(text)
        if chars >= _CHUNK_CHARS or len(held) >= _CHUNK_ROWS:
            chunks.append(np.array(held, dtype=np.int64))
            held, chars = [], 0
    if held:
        chunks.append(np.array(held, dtype=np.int64))
    return chunks


def _flat(lists: Any, count: int) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(lists), dtype=np.int32, count=count)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def _head(text: str, chars: int, limit: int) -> str:
    """The start of a text, up to a space: words, and so tokens, before it do not depend on what follows."""
    if len(text) <= chars:
        return text
    for space in (" ", "\n"):
        at = text.rfind(space, chars // 2, chars)
        if at > 0:
            return text[:at].rstrip()
    # No space to cut at: more of the text is needed, up to where a cut in the middle of a word is as good as any.
    return _head(text, chars * 2, limit) if chars < limit else text[:limit]


# ---------------------------------------------------------------- rows


def text_rows(rows: pa.Table, column: str, name: str) -> tuple[list[str | None], list[Refusal]]:
    """The texts of a column, None if not to be scored, and why. Raises BadModel for a column that is not text."""
    check_columns(rows.schema, [column], name)
    values = rows.column(column)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if not is_text(values.type):
        raise BadModel(f"{name} reads column {column!r} as text, but it is {values.type}: make it text in a step")
    texts: list[Any] = to_plain(values)
    refused = []
    for row, value in enumerate(texts):
        if value is None:
            refused.append(Refusal(row, "null", "NullText", f"column {column!r} is null"))
        elif isinstance(value, bytes):
            try:
                texts[row] = value.decode("utf-8")
            except UnicodeDecodeError as e:
                texts[row] = None
                refused.append(
                    Refusal(row, "invalid", "NotText", f"column {column!r} holds bytes that are not valid UTF-8: {e}")
                )
    return texts, refused

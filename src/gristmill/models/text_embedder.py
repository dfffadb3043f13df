"""Text to vectors: sentence-transformers folders, run without sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from gristmill.errors import BadModel
from gristmill.fingerprint.modelfiles import Digests, digests_of, inside, read_json
from gristmill.job.specs import TextEmbedder
from gristmill.models.columns import check_text
from gristmill.models.contract import ModelInfo, Place, Prepared
from gristmill.models.conversion import from_array
from gristmill.models.encoder import EncoderFiles, check_graph, check_packages, covered, find_encoder, model_root
from gristmill.models.gpulibraries import library_of, without_gpu
from gristmill.models.network import open_encoder
from gristmill.models.pooling import (
    Dense,
    Layer,
    Pooling,
    check_dense,
    check_mode,
    dense_weights,
    normalized,
    read_dense,
    read_pooling,
)
from gristmill.models.text import TextTokens, TokenRules, token_rules
from gristmill.process import machine
from gristmill.values import dataclass

TASK: Literal["embed", "classify"] = "embed"


@dataclass(frozen=True)
class EmbedderFolder:
    """What a sentence-transformers folder says: where the transformer is, and what comes after it, in order.

    Each item of `after` is "normalize" or the folder of a Dense module. `dimension` is the vectors', None if not known.
    """

    root: Path
    transformer: Path
    sentence: Mapping[str, Any]
    pooling: Pooling
    after: tuple[str | Path, ...]
    dimension: int | None
    prompts: Mapping[str, str | None]
    default_prompt: str | None


def read_folder(root: Path, name: str) -> EmbedderFolder:
    """Reads modules.json and what it names. Raises BadModel for modules that are not supported.

    A plain Hugging Face folder gets what sentence-transformers gives it: the mean of the token vectors (the last
    token's for causal models).
    """
    modules = read_json(root / "modules.json", name).get("list") or []
    transformer: Path = root
    pooling: Pooling | None = None
    after: list[str | Path] = []
    dimension: int | None = None
    for place, module in enumerate(modules):
        kind = str(module.get("type", "")).rpartition(".")[2]
        folder = inside(root, str(module.get("path", "")), name)
        if kind == "Transformer" and place == 0:
            transformer = folder
        elif kind == "Pooling" and place == 1:
            pooling = read_pooling(folder, name)
        elif kind == "Dense" and pooling is not None:
            dimension = check_dense(folder, name)
            after.append(folder)
        elif kind == "Normalize" and pooling is not None:
            _check_normalize(folder, name)
            after.append("normalize")
        elif kind != "Dropout":
            raise BadModel(
                f"{name}: module {place} of {root / 'modules.json'} is {module.get('type')!r}, which is not supported "
                "here: use sentence-transformers in a function of your own (--fn)"
            )
    config = read_json(transformer / "config.json", name)
    if pooling is None:
        if modules:
            raise BadModel(f"{name}: {root / 'modules.json'} has no Pooling module after the transformer")
        pooling = Pooling(("lasttoken" if _causal(config) else "mean",))
    if dimension is None:
        width = next(
            (config[k] for k in ("hidden_size", "d_model", "dim", "n_embd") if isinstance(config.get(k), int)), None
        )
        dimension = None if width is None else width * len(pooling.modes)
    sentence = read_json(transformer / "sentence_bert_config.json", name)
    task = sentence.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise BadModel(f"{name}: {transformer / 'sentence_bert_config.json'} says {task!r}, which gives no embeddings")
    own = read_json(root / "config_sentence_transformers.json", name)
    return EmbedderFolder(
        root,
        transformer,
        sentence,
        pooling,
        tuple(after),
        dimension,
        own.get("prompts") or {},
        own.get("default_prompt_name"),
    )


def _check_normalize(folder: Path, name: str) -> None:
    config = read_json(folder / "config.json", name)
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise BadModel(f"{name}: {folder.name} has {key}={config[key]!r}, which is not supported")


def _causal(config: Mapping[str, Any]) -> bool:
    named = config.get("architectures") or [""]
    return str(named[0]).endswith("ForCausalLM") and bool(config.get("is_causal", True))


# ---------------------------------------------------------------- in the driver


@dataclass(frozen=True)
class _Parts:
    folder: EmbedderFolder
    files: EncoderFiles
    rules: TokenRules
    prompt: str


def _parts(spec: TextEmbedder) -> _Parts:
    root, named = model_root(spec.model, code=spec.trust_remote_code)
    folder = read_folder(root, spec.name)
    if spec.pooling is not None:
        check_mode(spec.pooling, spec.name)
        if any(isinstance(layer, Path) for layer in folder.after):
            raise BadModel(
                f"{spec.name}: pooling={spec.pooling!r} does not fit a folder with a Dense module after pooling"
            )
        modes = len(folder.pooling.modes)
        width = None if folder.dimension is None else folder.dimension // modes
        folder = replace(folder, pooling=replace(folder.pooling, modes=(spec.pooling,)), dimension=width)
    files = find_encoder(root, folder.transformer, named, spec.backend, spec.dtype, spec.device, spec.name)
    rules = token_rules(folder.transformer, spec.name, spec.max_length, dict(folder.sentence))
    return _Parts(folder, files, rules, _prompt(spec, folder))


def _prompt(spec: TextEmbedder, folder: EmbedderFolder) -> str:
    if spec.prompt is not None:
        if spec.prompt_name is not None:
            raise BadModel(f"{spec.name}: prompt and prompt_name are both given: give one")
        return spec.prompt
    name = spec.prompt_name or folder.default_prompt
    if name is None:
        return ""
    if name not in folder.prompts:
        raise BadModel(
            f"{spec.name}: there is no prompt named {name!r}; the folder has {', '.join(folder.prompts) or 'none'}"
        )
    return folder.prompts[name] or ""


def resolve(spec: TextEmbedder) -> TextEmbedder:
    """The spec with backend and dtype made explicit. Raises BadModel."""
    files = _parts(spec).files
    return replace(spec, backend=files.backend, dtype=files.dtype)


def remarks(spec: TextEmbedder) -> tuple[str, ...]:
    """Warnings about the folder, for a spec as it was given. Raises BadModel."""
    return tuple(f"{spec.name}: {note}" for note in _parts(spec).files.remarks)


def describe(spec: TextEmbedder, schema: pa.Schema | None) -> ModelInfo:
    """Checks the folder and the column; digests what the result depends on. Raises BadModel, MissingExtra."""
    parts = _parts(spec)
    check_text(schema, spec.text, spec.name)
    check_packages(parts.files, spec.name)
    _check_pooling(spec, parts)
    digests = _digests(parts, spec)
    field = _field(spec, parts.folder.dimension)
    return ModelInfo(
        spec.name,
        columns=(spec.text,),
        outputs=(spec.output,),
        schema=None if field is None else pa.schema([field]),
        digest=digests.all,
        digests=digests.by_file,
        keeps_columns=True,
        filled=(spec.text,),
        weight_bytes=parts.files.bytes,
        flops_a_token=parts.files.flops_a_token(spec.name),
        by_tokens=True,
        library=library_of(parts.files.backend),
        exportable=True,
    )


def _check_pooling(spec: TextEmbedder, parts: _Parts) -> None:
    """Raises BadModel for a graph that does not suit the task, and for options of pooling that it ignores."""
    output = check_graph(parts.files, TASK, spec.name)
    if output is None or output.shape is None or len(output.shape) != 2:
        return
    asked = f"pooling={spec.pooling!r}" if spec.pooling is not None else "normalize=False"
    if spec.pooling is not None or spec.normalize is False:
        raise BadModel(
            f"{spec.name}: {asked} has no effect: {parts.files.graph} does its own pooling; leave it out, or use "
            "backend torch"
        )


def _field(spec: TextEmbedder, dimension: int | None) -> pa.Field | None:
    if spec.truncate_dim is not None:
        if spec.truncate_dim < 1 or (dimension is not None and spec.truncate_dim > dimension):
            raise BadModel(
                f"{spec.name}: truncate_dim is {spec.truncate_dim}, but the vectors have {dimension or 'no known'} "
                "values"
            )
        dimension = spec.truncate_dim
    return None if dimension is None else pa.field(spec.output, pa.list_(pa.float32(), dimension))


def files_of(spec: TextEmbedder) -> EncoderFiles:
    """The files that will be loaded. Raises BadModel."""
    return _parts(spec).files


def compared(spec: TextEmbedder) -> TextEmbedder:
    """The spec as it is: vectors are all that it writes."""
    return spec


def _digests(parts: _Parts, spec: TextEmbedder) -> Digests:
    root = parts.folder.root
    found = [
        root / str(m.get("path", "")) / "config.json"
        for m in read_json(root / "modules.json", spec.name).get("list") or ()
    ]
    found += [w for layer in parts.folder.after if isinstance(layer, Path) and (w := dense_weights(layer)) is not None]
    files = [p for p in found if p.is_file()] + covered(parts.files, code=spec.trust_remote_code)
    return digests_of(root, files, spec.sha256, spec.name)


# ---------------------------------------------------------------- in a worker


def open_model(spec: TextEmbedder, place: Place) -> LoadedEmbedder:
    """Loads tokenizer and network."""
    return LoadedEmbedder(spec, place)


def open_preparer(spec: TextEmbedder, place: Place) -> TextTokens:
    """The tokenizer alone."""
    return _tokens(_parts(spec), spec, place)


def _tokens(parts: _Parts, spec: TextEmbedder, place: Place) -> TextTokens:
    return TextTokens(parts.rules, spec.name, spec.text, parts.prompt, place.keep_nulls)


class LoadedEmbedder:
    """A `TextEmbedder` at work. Lengths are tokens, special ones and the prompt's included."""

    def __init__(self, spec: TextEmbedder, place: Place) -> None:
        parts = _parts(spec)
        if spec.sha256 is not None:
            _digests(parts, spec)  # the files may have changed since the driver looked
        self._field = _field(spec, parts.folder.dimension)
        self._output = spec.output
        self._truncate = spec.truncate_dim
        self._pooling = parts.folder.pooling
        self._layers = _layers(parts.folder.after, spec)
        self._tokens = _tokens(parts, spec, place)
        self._encoder = open_encoder(parts.files, TASK, place, spec.name, code=spec.trust_remote_code)
        self.about = self._encoder.about

    def prepare(self, rows: pa.Table) -> Prepared:
        """Tokenises; nulls are refused."""
        return self._tokens.prepare(rows)

    def predict(self, prepared: Prepared, index: np.ndarray) -> pa.Table:
        """One vector for each row at `index`: a fixed-size list of float32."""
        vectors = self.vectors(prepared, index)
        column = from_array(np.ascontiguousarray(vectors, dtype=np.float32))
        return pa.table({self._output: column})

    def close(self) -> None:
        """Nothing is held open."""

    @property
    def width(self) -> int | None:
        """The width of the vectors, if the folder gives it."""
        return None if self._field is None else int(self._field.type.list_size)

    def vectors(self, prepared: Prepared, index: np.ndarray) -> np.ndarray:
        """The vectors for the rows at `index` as an array [rows, width]."""
        batch = self._tokens.padded(prepared.inputs, index)
        found = self._encoder.vectors(batch)
        pooled = isinstance(found, np.ndarray)  # a graph that pools has its Dense layers in it too
        vectors = found if isinstance(found, np.ndarray) else self._pooling(found, batch)
        for layer in self._layers:
            if not (pooled and isinstance(layer, Dense)):
                vectors = layer(vectors)
        return vectors


QUERIES = 32  # texts in one call: sorted by length, they pad little


class Queries:
    """A `TextEmbedder` loaded in this process, for texts that are not worth a job: queries to what a job has embedded.
    Its vectors equal those of the job to 1e-5. Use it in one thread; `close`, or leave its `with` block, when done.
    """

    def __init__(self, spec: TextEmbedder) -> None:
        if spec.device == "auto":
            library = library_of(resolve(spec).backend)
            spec = replace(spec, device="cuda" if machine.gpus() and without_gpu(library) is None else "cpu")
        self._spec = resolve(spec)
        parts = _parts(self._spec)
        check_packages(parts.files, spec.name)
        _check_pooling(self._spec, parts)
        place = Place(spec.device, self._spec.dtype, machine.cores(), self._spec.backend)
        self._model = open_model(self._spec, place)

    def encode(self, texts: str | Sequence[str]) -> np.ndarray:
        """float32 [texts, width], or [width] for one text. Raises TypeError for anything that is not text."""
        every: list[Any] = [texts] if isinstance(texts, str) else list(texts)
        if wrong := [t for t in every if not isinstance(t, str)]:
            raise TypeError(f"{wrong[0]!r} is not text")
        prepared = self._model.prepare(pa.table({self._spec.text: pa.array(every, pa.string())}))
        assert prepared.lengths is not None
        order = np.argsort(-prepared.lengths, kind="stable")
        parts = [self._model.vectors(prepared, order[at : at + QUERIES]) for at in range(0, len(every), QUERIES)]
        if not parts:
            return np.empty((0, self._model.width or 0), dtype=np.float32)
        found = np.concatenate(parts).astype(np.float32, copy=False)
        found[order] = found.copy()
        return found[0] if isinstance(texts, str) else found

    def close(self) -> None:
        """Let go of the model."""
        self._model.close()

    def __enter__(self) -> Queries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _layers(after: tuple[str | Path, ...], spec: TextEmbedder) -> list[Layer]:
    layers: list[Layer] = []
    for module in after:
        if isinstance(module, Path):
            layers.append(read_dense(module, spec.name))
        elif spec.normalize is not False:
            layers.append(normalized)
    if spec.truncate_dim is not None:
        layers.append(lambda vectors: vectors[:, : spec.truncate_dim])
    if spec.normalize:
        layers.append(normalized)
    return layers

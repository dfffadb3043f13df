"""Text to labels: any Hugging Face sequence classifier, with the scores of transformers' own pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa

from gristmill.errors import BadModel
from gristmill.fingerprint.modelfiles import Digests, digests_of, read_json
from gristmill.job.specs import TextClassifier
from gristmill.models.columns import check_text
from gristmill.models.contract import ModelInfo, Place, Prepared
from gristmill.models.conversion import from_array
from gristmill.models.encoder import EncoderFiles, check_graph, check_packages, covered, find_encoder, model_root
from gristmill.models.gpulibraries import library_of
from gristmill.models.network import open_encoder
from gristmill.models.text import TextTokens, TokenRules, token_rules
from gristmill.values import dataclass

TASK: Literal["embed", "classify"] = "classify"

Scores = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _Parts:
    files: EncoderFiles
    rules: TokenRules
    labels: tuple[str, ...]
    problem: str | None


def _parts(spec: TextClassifier) -> _Parts:
    root, named = model_root(spec.model, code=spec.trust_remote_code)
    files = find_encoder(root, root, named, spec.backend, spec.dtype, spec.device, spec.name)
    config = read_json(root / "config.json", spec.name)
    architectures = [str(a) for a in config.get("architectures") or ()]
    if architectures and not any(a.endswith("ForSequenceClassification") for a in architectures):
        raise BadModel(
            f"{spec.name}: {root / 'config.json'} is of a {', '.join(architectures)}, which is not a sequence "
            "classifier; for vectors, use embed"
        )
    rules = token_rules(root, spec.name, spec.max_length)
    return _Parts(files, rules, _labels(config, spec.name), config.get("problem_type"))


def _labels(config: dict[str, object], name: str) -> tuple[str, ...]:
    """Labels in the order of their ids; transformers' own names for them if the configuration has none."""
    given = config.get("id2label")
    if isinstance(given, dict) and given:
        by_id = {int(k): str(v) for k, v in given.items()}
        if sorted(by_id) != list(range(len(by_id))):
            raise BadModel(f"{name}: id2label of config.json has ids {sorted(by_id)}, not 0 to {len(by_id) - 1}")
        return tuple(by_id[i] for i in range(len(by_id)))
    count = config.get("num_labels")
    return tuple(f"LABEL_{i}" for i in range(count if isinstance(count, int) else 2))


def columns_of(spec: TextClassifier) -> tuple[str, str, str | None]:
    """Names of the columns for label, score and (None unless asked for) all scores."""
    prefix = "" if spec.output is None else f"{spec.output}_"
    return spec.output or "label", f"{prefix}score", f"{prefix}scores" if spec.all_scores else None


def _schema(spec: TextClassifier, labels: tuple[str, ...]) -> pa.Schema:
    label, score, scores = columns_of(spec)
    fields = [pa.field(label, pa.string()), pa.field(score, pa.float32())]
    if scores is not None:
        metadata = {"labels": json.dumps(labels, ensure_ascii=False)}
        fields.append(pa.field(scores, pa.list_(pa.float32(), len(labels)), metadata=metadata))
    return pa.schema(fields)


# ---------------------------------------------------------------- in the driver


def resolve(spec: TextClassifier) -> TextClassifier:
    """The spec with backend and dtype made explicit. Raises BadModel."""
    files = _parts(spec).files
    return replace(spec, backend=files.backend, dtype=files.dtype)


def remarks(spec: TextClassifier) -> tuple[str, ...]:
    """Warnings about the folder, for a spec as it was given. Raises BadModel."""
    return tuple(f"{spec.name}: {note}" for note in _parts(spec).files.remarks)


def describe(spec: TextClassifier, schema: pa.Schema | None) -> ModelInfo:
    """Checks the folder and the column; digests what the result depends on. Raises BadModel, MissingExtra."""
    parts = _parts(spec)
    check_text(schema, spec.text, spec.name)
    check_packages(parts.files, spec.name)
    logits = check_graph(parts.files, TASK, spec.name)
    if logits is not None and logits.shape is not None and logits.shape[-1] not in (None, len(parts.labels)):
        raise BadModel(
            f"{spec.name}: the ONNX file has {logits.shape[-1]} logits, but config.json has {len(parts.labels)} labels"
        )
    digests = _digests(parts, spec)
    known = _schema(spec, parts.labels)
    return ModelInfo(
        spec.name,
        columns=(spec.text,),
        outputs=tuple(known.names),
        schema=known,
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


def files_of(spec: TextClassifier) -> EncoderFiles:
    """The files that will be loaded. Raises BadModel."""
    return _parts(spec).files


def compared(spec: TextClassifier) -> TextClassifier:
    """The spec with the scores of all labels."""
    return replace(spec, all_scores=True)


def _digests(parts: _Parts, spec: TextClassifier) -> Digests:
    files = covered(parts.files, code=spec.trust_remote_code)
    return digests_of(parts.files.root, files, spec.sha256, spec.name)


# ---------------------------------------------------------------- in a worker


def open_model(spec: TextClassifier, place: Place) -> LoadedClassifier:
    """Loads tokenizer and network."""
    return LoadedClassifier(spec, place)


def open_preparer(spec: TextClassifier, place: Place) -> TextTokens:
    """The tokenizer alone."""
    return _tokens(_parts(spec), spec, place)


def _tokens(parts: _Parts, spec: TextClassifier, place: Place) -> TextTokens:
    return TextTokens(parts.rules, spec.name, spec.text, keep_nulls=place.keep_nulls)


class LoadedClassifier:
    """A `TextClassifier` at work. Lengths are tokens, special ones included."""

    def __init__(self, spec: TextClassifier, place: Place) -> None:
        parts = _parts(spec)
        if spec.sha256 is not None:
            _digests(parts, spec)  # the files may have changed since the driver looked
        self._name = spec.name
        self._schema = _schema(spec, parts.labels)
        self._labels = pa.array(parts.labels, pa.string())
        self._scores = scoring(parts.problem, len(parts.labels))
        self._tokens = _tokens(parts, spec, place)
        self._encoder = open_encoder(parts.files, TASK, place, spec.name, code=spec.trust_remote_code)
        self.about = self._encoder.about

    def prepare(self, rows: pa.Table) -> Prepared:
        """Tokenises; nulls are refused."""
        return self._tokens.prepare(rows)

    def predict(self, prepared: Prepared, index: np.ndarray) -> pa.Table:
        """For each row at `index` the label of the highest score, that score, and all of them if asked for."""
        logits = self._encoder.logits(self._tokens.padded(prepared.inputs, index))
        if logits.shape != (len(index), len(self._labels)):
            raise BadModel(
                f"{self._name}: the model gives logits of shape {logits.shape} for {len(self._labels)} labels"
            )
        scores = self._scores(logits)
        best = scores.argmax(axis=1)
        columns = [self._labels.take(from_array(best)), from_array(scores[np.arange(len(best)), best])]
        if len(self._schema) == 3:
            columns.append(from_array(scores))
        return pa.table(columns, schema=self._schema)

    def close(self) -> None:
        """Nothing is held open."""


def scoring(problem: str | None, labels: int) -> Scores:
    """From logits to scores, as transformers' TextClassificationPipeline.postprocess chooses."""
    if problem == "regression":
        return lambda logits: logits
    if problem == "multi_label_classification" or labels == 1:
        return _sigmoid
    return _softmax


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) of a very negative logit is infinite, and the score 0
        return np.asarray(1 / (1 + np.exp(-logits)))


def _softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))

"""Which module makes which spec live. The driver resolves and describes, a worker opens."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, TypeVar

import pyarrow as pa

from gristmill.errors import BadModel
from gristmill.plan.contracts import Model, ModelInfo, Place
from gristmill.plan.specs import (
    FunctionModel,
    OnnxModel,
    SklearnModel,
    TextClassifier,
    TextEmbedder,
    TorchScriptModel,
)

Spec = TypeVar("Spec")

# Each module has describe(spec, schema) -> ModelInfo and open_model(spec, place) -> Model, and may have resolve(spec).
_HOMES: dict[type, str] = {
    FunctionModel: "function",
    TextEmbedder: "text_embedder",
    TextClassifier: "text_classifier",
    OnnxModel: "onnx_model",
    TorchScriptModel: "torchscript",
    SklearnModel: "sklearn",
}


def resolve(spec: Spec) -> Spec:
    """The spec with every "auto" that shapes the output (backend, dtype) made explicit, so that it can be recorded.

    Depends on the model's files and on which packages are installed here, nothing else. Raises BadModel, MissingExtra.
    """
    home = _home(spec)
    return home.resolve(spec) if hasattr(home, "resolve") else spec


def describe(spec: Any, schema: pa.Schema | None) -> ModelInfo:
    """What is known of a model without loading it, after checking that it is one and fits the source's columns.

    `schema` is what the model will see; None where steps before it may change the columns. Raises BadModel and
    MissingExtra, in one line with the value, what was looked for and the way out.
    """
    return _home(spec).describe(spec, schema)  # type: ignore[no-any-return]


def open(spec: Any, place: Place) -> Model:
    """The model, loaded at a place: the place says device and threads, the spec backend and dtype. Slow."""
    return _home(spec).open_model(spec, place)  # type: ignore[no-any-return]


def encoder_files(spec: Any) -> Any:
    """The files of a transformer that a text model will load. Raises BadModel."""
    return _home(spec).files_of(spec)


def open_preparer(spec: Any) -> Any:
    """What makes rows ready for the model (`prepare`, as the Model's) without its weights; None where that takes the
    model itself, or is no work.
    """
    home = _home(spec)
    return home.open_preparer(spec) if hasattr(home, "open_preparer") else None


def _home(spec: Any) -> ModuleType:
    name = _HOMES.get(type(spec))
    if name is None:
        raise BadModel(f"{spec!r:.80} is no model: give a function, a class, or one of the model kinds of gristmill")
    return importlib.import_module(f"gristmill.models.{name}")

"""Which module makes which spec live. The driver resolves and describes, a worker opens."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pyarrow as pa

from gristmill.errors import BadModel, PlanChanged
from gristmill.models.files import OtherFiles
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


def open_planned(spec: Any, place: Place) -> Model:
    """As `open`, of a spec that has the digest found at plan time. Raises PlanChanged where its files are others."""
    try:
        return open(spec, place)
    except BadModel:
        check_planned(spec)
        raise


def check_planned(spec: Any) -> None:
    """Raises PlanChanged where a model's files are not those of the digest found at plan time, or make no model."""
    if getattr(spec, "sha256", None) is None:
        return
    try:
        describe(spec, None)
    except BadModel as e:
        if isinstance(e, OtherFiles) or Path(spec.model).exists():  # else it may never have been on this machine
            raise PlanChanged(
                f"{spec.name}: its files were changed after the run was planned, with {spec.sha256[:12]}: put those "
                f"back and run again, or --restart (restart=True) with what is there now ({e})"
            ) from e
        raise


def encoder_files(spec: Any) -> Any:
    """The files of a transformer that a text model will load. Raises BadModel."""
    return _home(spec).files_of(spec)


def open_preparer(spec: Any, place: Place) -> Any:
    """What makes rows ready for the model (`prepare`, as the Model's) without its weights; None where that takes the
    model itself, or is no work.
    """
    home = _home(spec)
    return home.open_preparer(spec, place) if hasattr(home, "open_preparer") else None


def _home(spec: Any) -> ModuleType:
    name = _HOMES.get(type(spec))
    if name is None:
        raise BadModel(f"{spec!r:.80} is no model: give a function, a class, or one of the model kinds of gristmill")
    return importlib.import_module(f"gristmill.models.{name}")

"""Opens specs through the modules that they name. The driver resolves and describes, a worker opens."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from gristmill.errors import BadModel, PlanChanged
from gristmill.fingerprint.modelfiles import Opened, OtherFiles, opening
from gristmill.job.specs import ModelSpec, TextSpec, head_of
from gristmill.models.contract import Model, ModelInfo, Place, Preparer, Transformer

Spec = TypeVar("Spec")


def resolve(spec: Spec) -> Spec:
    """See Transformer; a spec of another kind is unchanged. Raises BadModel, MissingExtra."""
    home = _home(spec)
    found: Spec = home.resolve(spec) if hasattr(home, "resolve") else spec
    return found


def remarks(spec: ModelSpec) -> tuple[str, ...]:
    """Warnings about a model's files before they are used, for a spec as it was given, before `resolve`."""
    home = _home(spec)
    return home.remarks(spec) if hasattr(home, "remarks") else ()


def describe(spec: ModelSpec, schema: pa.Schema | None) -> ModelInfo:
    """See ModelKind."""
    info: ModelInfo = _home(spec).describe(spec, schema)
    return info


def loads_to_describe(spec: ModelSpec) -> bool:
    """Whether `describe` loads the model, and with it the libraries that its spec imports."""
    return bool(getattr(_home(spec), "LOADS_TO_DESCRIBE", False))


def estimates(spec: ModelSpec) -> bool:
    """Whether what its rows will take can be estimated."""
    return hasattr(_home(spec), "estimate")


def estimate(spec: ModelSpec, rows: pa.Table) -> Mapping[str, float]:
    """What these rows will take (contract.USED), about."""
    found: Mapping[str, float] = _home(spec).estimate(spec, rows)
    return found


def open(spec: ModelSpec, place: Place) -> Model:
    """See ModelKind."""
    model: Model = _home(spec).open_model(spec, place)
    return model


def open_planned(spec: ModelSpec, place: Place) -> tuple[Model, Sequence[Opened]]:
    """As `open`, for a spec that has the digest found at plan time, with its files as they were compared before it was
    loaded. Raises PlanChanged if they have changed.
    """
    try:
        with opening() as files:
            return open(spec, place), files
    except BadModel:
        check_planned(spec)
        raise


def check_planned(spec: ModelSpec) -> Sequence[Opened]:
    """A model's files as they were compared. Raises PlanChanged if they do not have the digest found at plan time, or
    no longer make a model.
    """
    digest = getattr(spec, "sha256", None)
    if digest is None:
        return ()
    try:
        with opening() as files:
            describe(spec, None)
            return files
    except BadModel as e:
        named = getattr(spec, head_of(type(spec)))  # the folder may never have been on this machine
        if isinstance(e, OtherFiles) or (isinstance(named, str) and Path(named).exists()):
            raise PlanChanged(
                f"{spec.name}: its files have changed since the run was planned (digest {digest[:12]}): put the "
                f"planned ones back and run again, or use --restart (restart=True) with what is there now ({e})"
            ) from e
        raise


def open_function(spec: ModelSpec) -> Any:
    """The function that opens a model, so that its code can be compared."""
    return _home(spec).open_model


def transformer(spec: TextSpec) -> Transformer:
    """The kind of a text model."""
    kind: Transformer = _home(spec)
    return kind


def open_preparer(spec: ModelSpec, place: Place) -> Preparer | None:
    """What makes rows ready for the model (`prepare`, as the Model's) without its weights; None if that takes the model
    itself, or needs no work.
    """
    home = _home(spec)
    return home.open_preparer(spec, place) if hasattr(home, "open_preparer") else None


def _home(spec: Any) -> Any:
    if not hasattr(spec, "home"):
        raise BadModel(f"{spec!r:.80} is not a model: give a function, a class, or one of the model kinds of gristmill")
    return importlib.import_module(spec.home)

"""Models and steps as a job names them: frozen, picklable, nothing loaded. `gristmill.models` makes them live."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gristmill.errors import BadJob, BadModel
from gristmill.plan.keywords import fields_named

BatchFormat = Literal["numpy", "rows", "arrow", "pandas", "polars"]
BATCH_FORMATS = ("numpy", "rows", "arrow", "pandas", "polars")


@dataclass(frozen=True)
class Call:
    """A user's function, or a class built once per worker with `args`; `target` may be "module:name".

    For a function, `args` are passed with every call. `takes` declares the columns it reads, with their types
    ("float32", "string not null", "any"): it is then given these alone, and a source that does not have them so is
    refused before anything runs. A null in a column that is not null is for `on_null` to decide.
    """

    target: Any
    args: Mapping[str, Any] = field(default_factory=dict)
    batch_format: BatchFormat = "numpy"
    takes: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.batch_format not in BATCH_FORMATS:
            raise BadJob(f"batch_format is {self.batch_format!r}: it is one of {', '.join(BATCH_FORMATS)}")
        if isinstance(self.target, str):
            module, _, name = self.target.rpartition(":")
            if not module or not name:
                raise BadJob(
                    f"callable {self.target!r}: write it as MODULE:NAME or FILE.py:NAME, for example scoring:Scorer"
                    f"{_saved(self.target)}"
                )
        elif not callable(self.target):
            raise BadModel(f"{self.target!r} cannot be called: give a function, a class, or 'module:name'")
        elif not _function_or_class(self.target):
            kind = type(self.target).__name__
            raise BadModel(
                f"an instance of {kind} was given: every worker builds its own, so pass the class and its arguments: "
                f"gm.model({kind}, …)"
            )

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        if isinstance(self.target, str):
            return self.target
        return getattr(self.target, "__qualname__", None) or type(self.target).__name__


def _function_or_class(target: Any) -> bool:
    import functools

    if isinstance(target, functools.partial):
        return _function_or_class(target.func)
    return inspect.isroutine(target) or inspect.isclass(target)


@dataclass(frozen=True)
class Step:
    """A CPU step on a batch, before or after the model. `kind`: "map" keeps the rows, "flat_map" makes one row many
    (per-row function returning a list of rows), "filter" drops rows (`expression`, or one bool a row).
    """

    kind: Literal["map", "flat_map", "filter"]
    call: Call | None = None
    expression: str | None = None

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        if self.call is not None:
            return self.call.name
        return f"filter({self.expression!r})"


# ---------------------------------------------------------------- models


@dataclass(frozen=True)
class FunctionModel:
    """A user's function or class as the model. `returns` fixes output columns and types ("float32", "list<float>",
    …).
    """

    call: Call
    returns: Mapping[str, str] | None = None
    output: str | None = None

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return self.call.name


@fields_named
@dataclass(frozen=True)
class TextEmbedder:
    """Text to vectors: a sentence-transformers folder or a hub id. Adds `output`, a fixed-size list of float32.

    Pooling, normalisation, prompts and length are what the folder's own configuration says unless given here.
    `prompt` is put before every text; `prompt_name` picks one of the folder's. `backend`: "torch", "onnx", "auto".
    `sha256` pins the model's files. Raises BadModel, before a run, where the folder is not such a model.
    """

    model: str
    text: str
    output: str = "embedding"
    prompt: str | None = None
    prompt_name: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    truncate_dim: int | None = None
    max_length: int | None = None
    backend: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    sha256: str | None = None

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return f"embed {self.model}"


@fields_named
@dataclass(frozen=True)
class TextClassifier:
    """Text to a label: any Hugging Face sequence classifier. Adds `label` and `score`; with `all_scores` also `scores`.

    `output` names the label column; the others are then `<output>_score` and `<output>_scores`.
    """

    model: str
    text: str
    output: str | None = None
    all_scores: bool = False
    max_length: int | None = None
    backend: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    sha256: str | None = None

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return f"classify {self.model}"


@fields_named
@dataclass(frozen=True)
class OnnxModel:
    """An ONNX graph over feature columns. `inputs` maps graph inputs to a column or a list of columns (stacked).

    Without `inputs`, each graph input is fed the column of its name, or one 2-D input the `features` in order.
    """

    model: str
    features: tuple[str, ...] | None = None
    inputs: Mapping[str, Any] | None = None
    outputs: Mapping[str, str] | None = None
    output: str | None = None
    device: str = "auto"
    sha256: str | None = None

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return f"onnx {self.model}"


@fields_named
@dataclass(frozen=True)
class TorchScriptModel:
    """A TorchScript file over feature columns, stacked to float32 [rows, features] or one tensor an input."""

    model: str
    features: tuple[str, ...] | None = None
    inputs: tuple[Any, ...] | None = None
    output: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    sha256: str | None = None

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return f"torchscript {self.model}"


@fields_named
@dataclass(frozen=True)
class SklearnModel:
    """A scikit-learn estimator, saved with skops or (with `allow_pickle` and `sha256`) joblib or pickle.

    The features it was fitted with are compared with the source's columns by name before anything runs. `method` is
    "predict", "predict_proba", "decision_function" or "transform".
    """

    model: str
    features: tuple[str, ...] | None = None
    method: str = "predict"
    output: str | None = None
    allow_pickle: bool = False
    sha256: str | None = None

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return f"sklearn {self.model}"


ModelSpec = FunctionModel | TextEmbedder | TextClassifier | OnnxModel | TorchScriptModel | SklearnModel


def _saved(target: str) -> str:
    """What is to be said of a file that a model was saved to, where code was asked for; "" of any other."""
    kinds = {"skops": "sklearn", "joblib": "sklearn", "pkl": "sklearn", "onnx": "onnx", "pt": "torchscript"}
    if (kind := kinds.get(target.rpartition(".")[2])) is None:
        return ""
    named = {"sklearn": "SklearnModel", "onnx": "OnnxModel", "torchscript": "TorchScriptModel"}[kind]
    return f"; a saved model is said in a job file, model: {{{kind}: {target}}}, or gm.{named}({target!r})"


# ---------------------------------------------------------------- how a user writes them


def model(
    target: Any,
    *,
    batch_format: BatchFormat = "numpy",
    takes: Mapping[str, str] | None = None,
    returns: Mapping[str, str] | None = None,
    output: str | None = None,
    **args: Any,
) -> FunctionModel:
    """Your own model: a function on a batch, or a class built once per worker with `args`.

    It gets a batch as `batch_format` says ("numpy": a dict of arrays) and returns one row for each it was given, as any
    of these kinds. `takes` and `returns` declare its columns and types, for example `takes={"x": "float32 not null"}`
    and `returns={"score": "float32"}`: what does not fit is refused before anything runs. Raises BadModel for an
    instance, and at run time BadOutput for another number of rows.

    Values are given exactly, whatever rows stand beside them. Null is NaN in arrays of floats, NaT in those of times
    and else None: where whole numbers have nulls, "numpy" gives Python's ints and None, "pandas" its Int64, and
    `takes={"x": "float64"}` floats with NaN (a number that a float would round is a dead letter). Times with a zone are
    UTC in "numpy". Lists of numbers without nulls are arrays, other nested values lists and dicts. What Python cannot
    hold ("rows": years beyond 9999, nanoseconds in a time of day) is a numpy scalar. A column that comes back as it was
    given stays the column it was. Answers of pandas are taken by their index where it is the one given in another order
    (0, 1, … of the batch, as after sort_values), by position where it has labels of its own; BadOutput where neither
    can be meant.
    """
    return FunctionModel(Call(target, dict(args), batch_format, takes), returns, output)


def flat_map(
    target: Any, *, batch_format: BatchFormat = "rows", takes: Mapping[str, str] | None = None, **args: Any
) -> Step:
    """A step that makes one row many (or none): the function gets one row as a dict and returns a list of dicts.

    Columns that it does not return are copied from the row it was given.
    """
    return Step("flat_map", Call(target, dict(args), batch_format, takes))


def filter(
    condition: Any, *, batch_format: BatchFormat = "numpy", takes: Mapping[str, str] | None = None, **args: Any
) -> Step:
    """A step that keeps the rows for which `condition` holds: an SQL expression, or a function giving a bool a row."""
    if isinstance(condition, str):
        return Step("filter", None, condition)
    return Step("filter", Call(condition, dict(args), batch_format, takes))


def step(
    target: Any, *, batch_format: BatchFormat = "numpy", takes: Mapping[str, str] | None = None, **args: Any
) -> Step:
    """A step on a batch that keeps the row count: what it returns is added to the columns, or replaces them by name.

    It is given batches as `model` says; columns that it hands back unchanged keep their type, zone and nulls.
    """
    return Step("map", Call(target, dict(args), batch_format, takes))


def as_step(value: Any) -> Step:
    """A step from whatever a job lists: a Step, or a bare function or class."""
    return value if isinstance(value, Step) else step(value)


def as_model(value: Any) -> ModelSpec:
    """A model spec from whatever a job gives: a spec, or a bare function or class."""
    if isinstance(value, (FunctionModel, TextEmbedder, TextClassifier, OnnxModel, TorchScriptModel, SklearnModel)):
        return value
    return model(value)

"""Models and steps as a job names them: frozen, picklable, nothing loaded. `gristmill.models` makes them live."""

import dataclasses
import importlib
import inspect
import os
from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from gristmill.errors import BadJob, BadModel
from gristmill.job.annotations import Help, refuse_estimator, whole
from gristmill.job.endpoints import (
    AT_ONCE,
    HOW_ASKED,
    APIKey,
    BaseURL,
    Cache,
    Concurrency,
    Dedupe,
    MaxCost,
    Price,
    Request,
    RequestsPerMinute,
    Timeout,
    TokensPerMinute,
    check_cost,
    check_request,
)
from gristmill.job.keywords import option_fields
from gristmill.job.registry import Registry
from gristmill.values import dataclass

if TYPE_CHECKING:
    from gristmill.models.text_embedder import Queries

S = TypeVar("S")

BatchFormat = Literal["numpy", "rows", "row", "arrow", "pandas", "polars"]


@option_fields()
@dataclass(frozen=True)
class Call:
    """A user's function, or a class built once per worker with `args`; `target` may be "module:name".

    For a function, `args` are passed with every call. `takes` declares the columns it reads, with their types
    ("float32", "string not null", "any"): it is then given only these, and a source whose columns do not fit is refused
    before anything runs. A null in a column that is not null is handled by `on_null`.
    """

    not_shaping: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("target", "args", "batch_format", "takes"), "compared as code, with all that it refers to"
    )

    target: Annotated[
        Any, Help("Your function on a batch, or a class built once per worker, as MODULE:NAME", flag=None)
    ]
    args: Annotated[
        Mapping[str, Any],
        Help("Arguments of the function, or of the class when it is built", flag="--arg", usual=True),
    ] = field(default_factory=dict)
    batch_format: Annotated[
        BatchFormat,
        Help("How it gets a batch: a dict of arrays, a list of dicts, or a table; row: it gets one row, as a dict"),
    ] = "numpy"
    takes: Annotated[
        Mapping[str, str] | None,
        Help("Columns it reads and their types, for example {x: float32 not null}; it gets only these", flag=None),
    ] = None

    def __post_init__(self) -> None:
        if isinstance(self.target, str):
            module, _, name = self.target.rpartition(":")
            if not module or not name:
                raise BadJob(
                    f"callable {self.target!r}: write it as MODULE:NAME or FILE.py:NAME, for example scoring:Scorer"
                    f"{_saved(self.target)}"
                )
        elif not callable(self.target):
            refuse_estimator(self.target, "the model")
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

    not_shaping: ClassVar[Mapping[str, str]] = {}

    kind: Literal["map", "flat_map", "filter"]
    call: Call | None = None
    expression: str | None = None

    def __post_init__(self) -> None:
        if self.call is not None and self.call.batch_format == "row":
            way = "its function gets one row anyway" if self.kind == "flat_map" else "use rows, a list of dicts"
            raise BadJob(f"step {self.name}: batch_format row is for models: {way}")

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        if self.call is not None:
            return self.call.name
        return f"filter({self.expression!r})"


# ---------------------------------------------------------------- models


class ModelSpec(Protocol):
    """What a job declares of a model: a frozen dataclass of plain values, of a kind that `MODELS` names.

    Its first field is stored under the kind's name in a job file (`embed: FOLDER`), the others beside it; `help` in a
    field's metadata (in ours, `Help` in its annotation) is its line in the JSON Schema. `home` names the module that
    describes and opens it (models.contract.ModelKind). All fields count in the fingerprint except those in
    `not_shaping`, which gives the reasons. Fields of these names mean the same in every kind, and are optional:
    `output`, `device`, `dtype`, `backend`, `sha256`, to which the digest of the model's files is fixed, and
    `keep_prompt`, which a preview sets. So is `imports`: modules that a worker of it needs, which start no thread
    when they are imported, so that workers can be forked from a process that has them.
    """

    home: ClassVar[str]
    not_shaping: ClassVar[Mapping[str, str]]

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        ...


class TextSpec(ModelSpec, Protocol):
    """A transformer over a column of text, run by torch or ONNX Runtime."""

    @property
    def text(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def dtype(self) -> str: ...


# The backends that run an export of weights, and what a spec calls them then.
EXPORTED = {"onnx": "export", "openvino": "export-openvino"}
FILES = "its files are compared by their digests"
_PLACE = "where a model runs does not change what it answers"

# What fields of these names mean, in every kind of model.
_TEXT = Help("The column that holds the text", "COLUMN")
OUTPUT = Help("The name of the result column", "NAME", group="Output")
RETURNS = Help(
    "Output columns and their types, for example {score: float32}; of prompts also a JSON Schema (@FILE), or your "
    "pydantic class (MODULE:NAME)",
    "NAME=TYPE",
    usual=True,
)
_FEATURES = Help("The feature columns, in the model's order")
_INPUTS = Help("Graph inputs and the columns that feed them", flag=None)
_MAX_LENGTH = Help("Cut texts after N tokens (default: as the folder says)")
BACKEND = Help("What runs the model: torch, onnx or openvino (of text), genai or vllm (of prompts), or auto", "NAME")
_DTYPE = Help("The precision: float32, bfloat16, float16, int8, or auto, which never changes it", "NAME")
_DEVICE = Help("The device: cpu, cuda, cuda:0, mps, or auto", "NAME")
_TRUST = Help("Let the model's folder run its own code")
SHA256 = Help("The digest that the model's files must have", "DIGEST")


@option_fields()
@dataclass(frozen=True)
class FunctionModel:
    """A user's function or class as the model."""

    home: ClassVar[str] = "gristmill.models.function"
    not_shaping: ClassVar[Mapping[str, str]] = {"concurrency": "how many rows are asked for at a time"}

    call: Call
    returns: Annotated[Mapping[str, str] | None, RETURNS] = None
    output: Annotated[str | None, OUTPUT] = None
    concurrency: Annotated[
        int | None,
        whole(1),
        AT_ONCE,
    ] = None

    def __post_init__(self) -> None:
        if self.concurrency is None:
            return
        if self.call.batch_format not in ("numpy", "row"):
            raise BadJob(
                f"concurrency is {self.concurrency}: the function is then called with one row as a dict: leave out "
                f"batch_format ({self.call.batch_format!r})"
            )
        object.__setattr__(self, "call", replace(self.call, batch_format="row"))

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return self.call.name


_OF_ENDPOINTS = ("dimensions", "request", "dedupe", *(n for n in HOW_ASKED if n not in ("base_url", "batch_api")))
_OF_FOLDERS = (*("prompt_name", "pooling", "max_length", "backend", "dtype", "device", "trust_remote_code", "sha256"),)
MOST_OF_VECTORS = 64  # requests in flight, each of many texts, if nobody says how many


def _check_default(spec: Any, option: dataclasses.Field[Any], there: bool) -> None:
    """Raises BadJob for an option of models here, or of those at endpoints, that a model of the other kind has."""
    default = option.default if option.default is not dataclasses.MISSING else {}
    if getattr(spec, option.name) == default:
        return
    if not there:
        raise BadJob(f"{option.name} is for endpoints: give base_url, or leave it out")
    way = ", or cut them in a step" if option.name == "max_length" else ""
    raise BadJob(
        f"{option.name} is for models on this machine, and {spec.model} is one behind base_url: leave it out{way}"
    )


@option_fields()
@dataclass(frozen=True)
class TextEmbedder:
    """Text to vectors: a sentence-transformers folder or a hub id. Adds `output`, a fixed-size list of float32.

    Pooling, normalisation, prompts and length are as in the folder's own configuration unless given here. Raises
    BadModel, before a run, if the folder is not such a model.

    With `base_url`, `model` is a name at that endpoint, which speaks OpenAI's form of embeddings: many texts are sent
    in one request (`batch_rows` at most), and a text that is refused is a dead letter alone. Vectors are as the
    endpoint gives them, unless `truncate_dim` or `normalize` say otherwise.
    """

    home: ClassVar[str] = "gristmill.models.text_embedder"
    not_shaping: ClassVar[Mapping[str, str]] = {
        **{name: why for name, why in HOW_ASKED.items() if name != "batch_api"},
        "model": "its files are compared by their digests, and a name at an endpoint as it is",
        "sha256": FILES,
        "device": _PLACE,
    }
    ordered: ClassVar[tuple[str, ...]] = ("request",)

    model: Annotated[
        str, Help("A sentence-transformers folder or a hub id, or with base_url a name at an endpoint", flag=None)
    ]
    text: Annotated[str, _TEXT]
    output: Annotated[str, OUTPUT] = "embedding"
    prompt: Annotated[str | None, Help("Text put before every text", "TEXT")] = None
    prompt_name: Annotated[str | None, Help("One of the model folder's own prompts", "NAME")] = None
    pooling: Annotated[
        str | None,
        Help("How token vectors are pooled: mean, cls, max, … (default: as the model's folder says)", "NAME"),
    ] = None
    normalize: Annotated[bool | None, Help("Scale vectors to length 1 (default: as the folder says)")] = None
    truncate_dim: Annotated[
        int | None,
        Help(
            "Keep only the first N dimensions, after the folder's own normalization: vectors of length 1 are then "
            "shorter, unless normalize is given"
        ),
    ] = None
    max_length: Annotated[int | None, _MAX_LENGTH] = None
    backend: Annotated[str, BACKEND] = "auto"
    dtype: Annotated[str, _DTYPE] = "auto"
    device: Annotated[str, _DEVICE] = "auto"
    trust_remote_code: Annotated[bool, _TRUST] = False
    sha256: Annotated[str | None, SHA256] = None
    base_url: BaseURL = None
    dimensions: Annotated[int | None, whole(1), Help("Ask the endpoint for vectors of so many dimensions")] = None
    request: Request = field(default_factory=dict)
    api_key: APIKey = None
    concurrency: Concurrency = "auto"
    requests_per_minute: RequestsPerMinute = None
    tokens_per_minute: TokensPerMinute = None
    dedupe: Dedupe = False
    cache: Cache = None
    price: Price = None
    max_cost: MaxCost = None
    timeout: Timeout = 120.0

    def __post_init__(self) -> None:
        there = self.base_url is not None
        for option in dataclasses.fields(self):
            of_endpoint = option.name in _OF_ENDPOINTS
            if (of_endpoint or option.name in _OF_FOLDERS) and of_endpoint != there:
                _check_default(self, option, there)
        if not there:
            return
        check_request(self.request)
        if self.price is not None:  # vectors are no tokens
            object.__setattr__(self, "price", {"output": "0/token", **self.price})
        check_cost(self.price, self.max_cost)
        object.__setattr__(self, "home", "gristmill.models.embeddings")

    @property
    def most(self) -> int:
        """Requests in flight at most, of an endpoint."""
        return MOST_OF_VECTORS if self.concurrency == "auto" else self.concurrency

    @property
    def batch_api(self) -> None:
        """Vectors are not asked for in bulk."""
        return None

    @property
    def batches(self) -> int:
        """See `batch_api`."""
        return 0

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return f"embed {self.model}"

    def open(self) -> "Queries":
        """The model loaded in this process: `encode(texts)` gives float32 [texts, width], for queries. Raises BadModel,
        MissingExtra.
        """
        registry: Any = importlib.import_module("gristmill.models.registrations")  # which names it, perhaps
        found: Queries = importlib.import_module(self.home).Queries(registry.as_files(self))
        return found


@option_fields()
@dataclass(frozen=True)
class TextClassifier:
    """Text to a label: any Hugging Face sequence classifier. Adds `label` and `score`; with `all_scores` also `scores`.

    `output` names the label column; the others are then `<output>_score` and `<output>_scores`.
    """

    home: ClassVar[str] = "gristmill.models.text_classifier"
    not_shaping: ClassVar[Mapping[str, str]] = {"model": FILES, "sha256": FILES, "device": _PLACE}

    model: Annotated[str, Help("A Hugging Face sequence classifier: a folder or a hub id", flag=None)]
    text: Annotated[str, _TEXT]
    output: Annotated[str | None, OUTPUT] = None
    all_scores: Annotated[bool, Help("Also write the scores of all labels")] = False
    max_length: Annotated[int | None, _MAX_LENGTH] = None
    backend: Annotated[str, BACKEND] = "auto"
    dtype: Annotated[str, _DTYPE] = "auto"
    device: Annotated[str, _DEVICE] = "auto"
    trust_remote_code: Annotated[bool, _TRUST] = False
    sha256: Annotated[str | None, SHA256] = None

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return f"classify {self.model}"


@option_fields()
@dataclass(frozen=True)
class OnnxModel:
    """An ONNX graph over feature columns. `inputs` maps graph inputs to a column or a list of columns (stacked).

    Without `inputs`, each graph input is fed the column of its name, or one 2-D input the `features` in order.
    """

    home: ClassVar[str] = "gristmill.models.onnx_model"
    suffixes: ClassVar[tuple[str, ...]] = (".onnx",)  # of files that are such models, as `predict` takes them
    not_shaping: ClassVar[Mapping[str, str]] = {"model": FILES, "sha256": FILES, "device": _PLACE}

    model: Annotated[str, Help("An ONNX file over feature columns", flag=None)]
    features: Annotated[tuple[str, ...] | None, _FEATURES] = None
    inputs: Annotated[Mapping[str, Any] | None, _INPUTS] = None
    outputs: Annotated[Mapping[str, str] | None, Help("Graph outputs and the columns that they become", flag=None)] = (
        None
    )
    output: Annotated[str | None, OUTPUT] = None
    device: Annotated[str, _DEVICE] = "auto"
    sha256: Annotated[str | None, SHA256] = None

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return f"onnx {self.model}"


@option_fields()
@dataclass(frozen=True)
class TorchScriptModel:
    """A TorchScript file over feature columns, stacked to float32 [rows, features] or one tensor per input."""

    home: ClassVar[str] = "gristmill.models.torchscript"
    suffixes: ClassVar[tuple[str, ...]] = (".pt", ".pth")  # of files that are such models, as `predict` takes them
    not_shaping: ClassVar[Mapping[str, str]] = {"model": FILES, "sha256": FILES, "device": _PLACE}

    model: Annotated[str, Help("A TorchScript file over feature columns", flag=None)]
    features: Annotated[tuple[str, ...] | None, _FEATURES] = None
    inputs: Annotated[tuple[Any, ...] | None, _INPUTS] = None
    output: Annotated[str | None, OUTPUT] = None
    dtype: Annotated[str, replace(_DTYPE, flag=None)] = "auto"
    device: Annotated[str, _DEVICE] = "auto"
    sha256: Annotated[str | None, SHA256] = None

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return f"torchscript {self.model}"

    @property
    def imports(self) -> tuple[str, ...]:
        """See ModelSpec."""
        return ("torch",)


@option_fields()
@dataclass(frozen=True)
class SklearnModel:
    """A scikit-learn estimator, saved with skops or (with `allow_pickle` and `sha256`) joblib or pickle.

    The features it was fitted with are compared with the source's columns by name before anything runs.
    """

    home: ClassVar[str] = "gristmill.models.sklearn"
    suffixes: ClassVar[tuple[str, ...]] = (".skops", ".joblib", ".pkl", ".pickle")  # as `predict` takes them
    not_shaping: ClassVar[Mapping[str, str]] = {
        "model": FILES,
        "sha256": FILES,
        "allow_pickle": "whether a file may be opened: it is compared",
    }

    model: Annotated[
        str, Help("A saved scikit-learn estimator (skops; joblib or pickle with allow_pickle and sha256)", flag=None)
    ]
    features: Annotated[tuple[str, ...] | None, _FEATURES] = None
    method: Annotated[str, Help("predict, predict_proba, decision_function or transform", "NAME", usual=True)] = (
        "predict"
    )
    label: Annotated[
        str | int | float | bool | None,
        Help("With predict_proba: write the probability of this class alone, as one number", "CLASS"),
    ] = None
    output: Annotated[str | None, OUTPUT] = None
    allow_pickle: Annotated[bool, Help("Allow a file that can run code when it is loaded; needs sha256")] = False
    sha256: Annotated[str | None, SHA256] = None

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return f"sklearn {self.model}"

    @property
    def imports(self) -> tuple[str, ...]:
        """See ModelSpec: skops imports every kind of estimator that it knows, which takes seconds."""
        return ("sklearn.base", *(["gristmill.models.skopsfile"] if self.model.endswith(".skops") else []))


# By the key of a job file's `model:` that gives its kind.
MODELS: Registry[type[Any]] = Registry(
    "model kind",
    "gristmill.models",
    {
        "embed": f"{__name__}:TextEmbedder",
        "classify": f"{__name__}:TextClassifier",
        "onnx": f"{__name__}:OnnxModel",
        "torchscript": f"{__name__}:TorchScriptModel",
        "sklearn": f"{__name__}:SklearnModel",
        "prompt": "gristmill.job.prompts:Prompt",
        "score": "gristmill.job.scores:Score",
        "requests": "gristmill.job.requests:Requests",
        "call": f"{__name__}:FunctionModel",
    },
    needs=("__dataclass_fields__", "home", "not_shaping", "name"),
)


def kind_in(section: Mapping[str, Any]) -> str | None:
    """The kind of a mapping, such as a job file's `model:`, by one of its keys; None if no key names one. Other
    packages' kinds are searched only if none of ours fits.
    """
    ours = next((key for key in MODELS.ours if key in section), None)  # `embed` may have a `prompt`
    return ours if ours is not None else next((key for key in section if key in MODELS), None)


def head_of(kind: type[Any]) -> str:
    """The field that appears under the kind's name in a job file: the first one."""
    return dataclasses.fields(kind)[0].name


def of_call(kind: type[Any]) -> bool:
    """Whether models of a kind are a user's callable: a job file then has its `Call`'s fields beside the others."""
    return dataclasses.fields(kind)[0].type in (Call, "Call")


def changed(spec: S, **fields: Any) -> S:
    """A spec with other values of some fields."""
    found: Any = spec
    made: S = dataclasses.replace(found, **fields)
    return made


def saved_model(file: str, at: str | None = None, **options: Any) -> Any:
    """The model in a file that it was saved to, by the suffix: an `SklearnModel`, `OnnxModel` or `TorchScriptModel`
    with its options. `at` is the file's path, if a registry names it. Raises BadJob for other suffixes, and for options
    that this kind does not have.
    """
    suffix = os.path.splitext(at or file)[1].lower()
    kinds = _by_suffix()
    if suffix not in kinds:
        way = "embed and classify are for the folders of text models, " if os.path.isdir(file) else ""
        raise BadJob(
            f"model {file}: not the suffix of a saved model: it must be one of {', '.join(kinds)}; {way}"
            "apply is for functions of your own"
        )
    return MODELS.get(kinds[suffix])(file, **options)


def _by_suffix() -> dict[str, str]:
    return {suffix: name for name in MODELS.ours for suffix in getattr(MODELS.get(name), "suffixes", ())}


def _saved(target: str) -> str:
    """A hint for a file that a model was saved to, given where code was asked for; "" for any other text."""
    if (kind := _by_suffix().get(os.path.splitext(target)[1].lower())) is None:
        return ""
    named = MODELS.get(kind).__name__
    return f"; for a saved model write model: {{{kind}: {target}}} in a job file, or gm.{named}({target!r})"


# ---------------------------------------------------------------- how a user writes them


def model(
    target: Any,
    *,
    batch_format: BatchFormat = "numpy",
    takes: Mapping[str, str] | None = None,
    returns: Mapping[str, str] | None = None,
    output: str | None = None,
    concurrency: int | None = None,
    **args: Any,
) -> FunctionModel:
    """Your own model: a function on a batch, or a class built once per worker with `args`.

    It is given a batch in `batch_format` ("numpy": a dict of arrays), and returns one row for each row it was given, in
    any of these formats. `takes` and `returns` declare its columns and types, for example `takes={"x": "float32 not
    null"}` and `returns={"score": "float32"}`; a source that does not fit is refused before anything runs. Raises
    BadModel for an instance, and at run time BadOutput for a wrong number of rows.

    A coroutine function (`async def`) is called with one row as a dict and returns its answer, a dict of columns or one
    value; so is a plain one, in threads, with `concurrency` or `batch_format="row"`. Up to `concurrency` rows (32) are
    in flight in the whole run, whatever batches and shards they belong to; one that raises is a dead letter alone.

    A value is given exactly, whatever other rows are in the batch. Null is NaN in arrays of floats, NaT in arrays of
    times, and otherwise None. Whole numbers with nulls are Python's ints and None in "numpy", Int64 in "pandas", and
    floats with NaN if `takes={"x": "float64"}` asks for them (a number that a float would round is a dead letter).
    Times with a zone are UTC in "numpy". Lists of numbers without nulls are arrays; other nested values are lists and
    dicts. What Python cannot hold in "rows" (years beyond 9999, nanoseconds in a time of day) is a numpy scalar.

    A column that is returned unchanged keeps its type. Answers in pandas are matched by index if that is the given one
    (0, 1, …) in another order, as after sort_values, and by position if it has labels of its own; BadOutput is raised
    if it is neither.
    """
    return FunctionModel(Call(target, dict(args), batch_format, takes), returns, output, concurrency)


def flat_map(
    target: Any, *, batch_format: BatchFormat = "rows", takes: Mapping[str, str] | None = None, **args: Any
) -> Step:
    """A step that turns one row into many (or none): the function gets one row as a dict and returns a list of dicts.

    Columns that it does not return are copied from the row it was given.
    """
    return Step("flat_map", Call(target, dict(args), batch_format, takes))


def filter(
    condition: Any, *, batch_format: BatchFormat = "numpy", takes: Mapping[str, str] | None = None, **args: Any
) -> Step:
    """A step that keeps the rows for which `condition` holds: an SQL expression, or a function with a bool per row."""
    if isinstance(condition, str):
        return Step("filter", None, condition)
    return Step("filter", Call(condition, dict(args), batch_format, takes))


def step(
    target: Any, *, batch_format: BatchFormat = "numpy", takes: Mapping[str, str] | None = None, **args: Any
) -> Step:
    """A step on a batch that keeps the row count: what it returns is added to the columns, or replaces them by name.

    Batches are given as described in `model`; columns that are returned unchanged keep their type, zone and nulls.
    """
    return Step("map", Call(target, dict(args), batch_format, takes))


def as_step(value: Any) -> Step:
    """A step from whatever a job lists: a Step, or a bare function or class."""
    return value if isinstance(value, Step) else step(value)


def as_model(value: Any, **options: Any) -> ModelSpec:
    """A model spec from whatever a job gives: a spec, or a bare function or class, with options as for `model`. Raises
    BadModel for a spec of an unregistered kind.
    """
    kind = type(value)
    if not (dataclasses.is_dataclass(kind) and hasattr(kind, "home")):
        return model(value, **options)
    if MODELS.name_of(kind) is None:
        raise BadModel(
            f"{kind.__module__}.{kind.__qualname__} is not a registered model kind: its package must have an "
            "entry point of the group gristmill.models that names it (docs/extending.md)"
        )
    spec: ModelSpec = value
    return spec

"""Keyword arguments of public functions: typed for checkers and editors; errors for wrong names suggest others."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast

from gristmill.errors import BadJob, after_main_thread, nearest
from gristmill.job.annotations import bare, checked, is_of
from gristmill.job.synonyms import meant, said

if TYPE_CHECKING:
    from gristmill.job.options import Auto, EngineSpec, Gates, Running, Update
    from gristmill.observe.events import Observer

    Names = Sequence[str] | str

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# ---------------------------------------------------------------- names


def unknown(where: str, name: str, names: Iterable[str]) -> BadJob:
    """The error for an unknown option, with the one that was probably meant, or all that there are."""
    known = sorted(names)
    near = meant(name, known)
    instead = None if near else _inside(name, known) or said(name)
    near = near or (None if instead else nearest(name, known))
    if near:
        hint = f"did you mean {near!r}?"
    elif name in names_of(JobOptions):
        hint = f"it is an option of the job: gm.Job(…, {name}=…)"
    else:
        hint = instead or f"it has {', '.join(known) or 'none'}"
        if "args" in known and not instead:
            hint = f"an argument of your function goes into args={{{name!r}: …}}; {hint}"
    return BadJob(f"{where} has no option {name!r}: {hint}")


_INSIDE: dict[str, list[str]] = {}  # by an option, the names inside it, from the prefix of its class


def _inside(name: str, known: Sequence[str]) -> str | None:
    """Where to write what is an option of one of these; None of any other name."""
    of = next((one for one in known if name in _INSIDE.get(one, ())), None)
    return None if of is None else f"it is one of {of}: {of}={{{name!r}: …}}"


def check_names(where: str, given: Iterable[str], names: Iterable[str]) -> None:
    """Raises BadJob for the first given name that is not in `names`."""
    known = set(names)
    for name in given:
        if name not in known:
            raise unknown(where, name, known)


def named(where: str, *others: type) -> Callable[[F], F]:
    """A decorator: a keyword that the function does not have is a BadJob that names the right one. `where` is how
    errors call the function, `others` have the keys of its `**options`.
    """

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
        names += [name for kind in others for name in names_of(kind)]
        flags = {p.name for p in parameters if p.annotation == "bool"}
        flags |= {n for kind in others for n, hint in kind.__annotations__.items() if _text_of(hint) == "bool"}

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            check_names(where, options, names)
            for name in flags.intersection(options):
                if not is_of(options[name], bool) and not isinstance(options[name], int):
                    raise BadJob(f"{where}: {name} is {options[name]!r}: give True or False")
                options[name] = bool(options[name])
            try:
                return function(*args, **options)
            except RuntimeError as e:
                if (told := after_main_thread(e, where)) is None:
                    raise
                raise told from e

        return cast(F, call)

    return decorate


def _text_of(hint: Any) -> Any:
    return getattr(hint, "__forward_arg__", hint)


def option_fields(of: str = "") -> Callable[[type[T]], type[T]]:
    """A decorator for dataclasses of options: an unknown field name is reported as by `named`, and a value that its
    field does not accept is a BadJob, in which `of` precedes the name of the field.
    """

    def decorate(cls: type[T]) -> type[T]:
        made: Any = cls.__init__
        cls._shown = staticmethod(bare)  # type: ignore[attr-defined]  # of hints, by the signature of the class
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        if of.endswith("."):
            _INSIDE[of.removesuffix(".")] = names

        @functools.wraps(made)
        def __init__(self: Any, *args: Any, **options: Any) -> None:
            check_names(cls.__name__, options, names)
            held = checked(cls, {**dict(zip(names, args, strict=False)), **options}, of)
            made(self, *map(held.get, names[: len(args)]), *args[len(names) :], **{n: held[n] for n in options})

        cls.__init__ = __init__  # type: ignore[method-assign]
        return cls

    return decorate


# ---------------------------------------------------------------- types


class RowOptions(TypedDict, total=False):
    """Which rows of a source, and which of their columns. See `Source`."""

    columns: Names | None
    query: str | None
    where: str | None
    limit: int | None
    sample: int | None
    seed: int
    types: Mapping[str, str] | None
    on_bad_file: Literal["fail", "skip"]


class SourceOptions(RowOptions, total=False):
    """The fields of `Source`, except where the rows are."""

    format: str | None
    options: Mapping[str, Any]
    storage: Mapping[str, Any]


class OutputOptions(TypedDict, total=False):
    """What is written with the answers, and how. See `Sink`."""

    format: str | None
    keep: Names | None
    drop: Names
    row_id: str | None
    key: Names
    partition_by: Names
    sort_by: Names
    files: int | None
    merge: bool
    index: Names
    model_version: str | None
    overwrite: bool
    evolve: bool
    dead_payload: int


class SinkOptions(OutputOptions, total=False):
    """The fields of `Sink`, except where it is."""

    options: Mapping[str, Any]
    storage: Mapping[str, Any]


class DeliveryOptions(TypedDict, total=False):
    """The fields of `Delivery`, except where it goes."""

    mode: Literal["replace", "append", "upsert"]
    key: Names
    index: Mapping[str, Any]
    evolve: bool
    delete: bool
    options: Mapping[str, Any]


class EngineOptions(TypedDict, total=False):
    """Options that all engines take. See `EngineSpec`."""

    workers: int | Auto | tuple[int, int]
    gpus: int | Auto
    threads: int | Auto
    steps_workers: int


class OfLocal(EngineOptions, total=False):
    """Options of the local engine. See `LocalOptions`."""

    gpus_per_worker: float | None
    grace: float


class OfRay(EngineOptions, total=False):
    """Options of the Ray engine. See `RayOptions`."""

    address: str | None
    cpus_per_worker: float
    gpus_per_worker: float | None
    memory_per_worker: int | None
    resources: Mapping[str, float]
    accelerator_type: str | None
    runtime_env: Mapping[str, Any] | None
    split: bool
    preparers_per_worker: int


class OfSpark(EngineOptions, total=False):
    """Options of the Spark engine. See `SparkOptions`."""

    master: str | None
    session: Any
    cpus_per_task: int
    conf: Mapping[str, Any]
    app_name: str


class JobOptions(EngineOptions, total=False):
    """How a job runs, and what happens to rows that cannot be scored. See `JobSpec`, `Running` and `EngineSpec`."""

    on_null: Literal["dead", "skip", "keep"] | None
    on_nan: Literal["dead", "keep"]
    on_new_files: Literal["refuse", "append"]
    update: bool | Update | Mapping[str, Any] | None
    gates: Gates | Mapping[str, Any] | None
    audit: Any
    reduce: Any
    deliver: Any
    schedule: Any
    deadline: str | None
    on_deadline: Literal["publish", "stop"]
    alerts: Any
    metrics: Any
    lineage: Any
    running: Running | Mapping[str, Any] | None
    engine: str | EngineSpec | None
    batch_tokens: int | Auto
    batch_rows: int | Auto
    shard_rows: int | Auto
    window_bytes: int
    batch_timeout: float
    worker_memory: int | None
    log: str | None
    hour_price: float | None


class Verbs(TypedDict, total=False):
    """What to do with a sink that already has a result, and who is told how the run progresses."""

    restart: bool
    append: bool
    accept: bool
    observer: Observer | None


class ScoreOptions(RowOptions, OutputOptions, JobOptions, Verbs, total=False):
    """Options that `embed`, `classify` and `apply` have in common."""

    steps: Sequence[Any]
    post: Sequence[Any]


class TextOptions(ScoreOptions, total=False):
    """What text models have in common: how their files are run."""

    max_length: int | None
    backend: str
    dtype: str
    device: str
    trust_remote_code: bool
    sha256: str | None


class EmbedOptions(TextOptions, total=False):
    """Options of `embed`. See `TextEmbedder`."""

    prompt: str | None
    prompt_name: str | None
    pooling: str | None
    normalize: bool | None
    truncate_dim: int | None
    base_url: str | None
    dimensions: int | None
    request: Mapping[str, Any]
    api_key: str | None
    concurrency: int | Literal["auto"]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    dedupe: bool
    cache: str | None
    price: Mapping[str, str] | None
    max_cost: float | None
    timeout: float


class ClassifyOptions(TextOptions, total=False):
    """Options of `classify`. See `TextClassifier`."""

    output: str | None
    all_scores: bool


class PredictOptions(ScoreOptions, total=False):
    """Options of `predict`. See `SklearnModel`, `OnnxModel` and `TorchScriptModel`."""

    features: Names | None
    method: str
    label: str | int | float | bool | None
    inputs: Mapping[str, Any] | Sequence[Any] | None
    outputs: Mapping[str, str] | None
    output: str | None
    device: str
    dtype: str
    allow_pickle: bool
    sha256: str | None


class PromptOptions(ScoreOptions, total=False):
    """Options of `prompt`. See `Prompt`."""

    base_url: str | None
    system: str | None
    messages: str | Callable[[dict[str, Any]], Any] | None
    examples: str | Sequence[Mapping[str, Any]] | None
    images: Names | None
    api: Literal["chat", "completions", "responses", "messages"]
    returns: Mapping[str, Any] | type[Any] | str | None
    choices: Names | None
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    request: Mapping[str, Any]
    output: str
    keep_usage: bool
    keep_score: bool
    keep_reasoning: bool
    keep_prompt: bool
    backend: Literal["auto", "genai", "vllm"]
    vllm: Mapping[str, Any]
    api_key: str | None
    concurrency: int | Literal["auto"]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    dedupe: bool
    cache: str | None
    price: Mapping[str, str] | None
    max_cost: float | None
    timeout: float
    batch_api: Literal["openai", "anthropic"] | None
    sha256: str | None


class ScoringOptions(ScoreOptions, total=False):
    """Options of `score`. See `Score`."""

    continuations: Names | None
    continuations_from: str | None
    output: str
    base_url: str | None
    request: Mapping[str, Any]
    api_key: str | None
    concurrency: int | Literal["auto"]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    dedupe: bool
    cache: str | None
    price: Mapping[str, str] | None
    max_cost: float | None
    timeout: float
    sha256: str | None


class RunBatchOptions(JobOptions, Verbs, total=False):
    """Options of `run_batch`. See `Requests`."""

    base_url: str | None
    api_key: str | None
    concurrency: int | Literal["auto"]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    dedupe: bool
    cache: str | None
    price: Mapping[str, str] | None
    max_cost: float | None
    timeout: float
    batch_api: Literal["openai", "anthropic"] | None


class ApplyOptions(ScoreOptions, total=False):
    """Options of `apply`. See `gm.model`."""

    batch_format: Literal["numpy", "rows", "row", "arrow", "pandas", "polars"]
    takes: Mapping[str, str] | None
    returns: Mapping[str, str] | None
    output: str | None
    concurrency: int | None


def names_of(kind: type) -> frozenset[str]:
    """The keys of one of the types above."""
    return frozenset(kind.__required_keys__ | kind.__optional_keys__)  # type: ignore[attr-defined]

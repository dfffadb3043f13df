"""Keyword arguments of public functions: typed for checkers and editors, and a wrong name told with the right one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast

from gristmill.errors import BadJob

if TYPE_CHECKING:
    from gristmill.observe.events import Observer
    from gristmill.plan.options import Auto, EngineSpec, Gates

    Names = Sequence[str] | str

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# ---------------------------------------------------------------- names


_WORKERS = {"worker", "workers", "n_workers", "max_workers", "n_jobs", "jobs", "processes", "concurrency"}  # elsewhere


def unknown(where: str, name: str, names: Iterable[str]) -> BadJob:
    """The error for an option that is not there, with the one that was probably meant, or all that there are."""
    import difflib

    known = sorted(names)
    by_fold = {n.casefold(): n for n in known}
    near = difflib.get_close_matches(name.casefold(), by_fold, 1)
    if name.casefold() in _WORKERS and "max_parallelism" in known:
        near = ["max_parallelism"]
    hint = f"did you mean {by_fold[near[0]]!r}?" if near else f"it has {', '.join(known)}"
    if name in names_of(JobOptions) and not near:
        hint = f"it is an option of the job: gm.Job(…, {name}=…)"
    return BadJob(f"{where} has no option {name!r}: {hint}")


def check_names(where: str, given: Iterable[str], names: Iterable[str]) -> None:
    """Raises BadJob for the first of the names given that is none of `names`."""
    known = set(names)
    for name in given:
        if name not in known:
            raise unknown(where, name, known)


def named(where: str) -> Callable[[F], F]:
    """A decorator: a keyword that the function does not have is a BadJob that names the right one. `where` is how
    errors call the function.
    """

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            check_names(where, options, names)
            return function(*args, **options)

        return cast(F, call)

    return decorate


def fields_named(cls: type[T]) -> type[T]:
    """As `named`, for the constructor of a dataclass."""
    made = cls.__init__
    names = list(cls.__dataclass_fields__)  # type: ignore[attr-defined]

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        check_names(cls.__name__, options, names)
        if not isinstance(output := options.get("output"), str | None):
            raise BadJob(f"{cls.__name__}: output={output!r} is no text: it names the one column that the model adds")
        made(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


# ---------------------------------------------------------------- types


class RowOptions(TypedDict, total=False):
    """Which rows of a source, and which of their columns. See `Source`."""

    columns: Names | None
    where: str | None
    limit: int | None
    sample: int | None
    seed: int
    types: Mapping[str, str] | None
    on_bad_file: Literal["fail", "skip"]


class SourceOptions(RowOptions, total=False):
    """The fields of `Source` beside where the rows are."""

    format: str | None
    options: Mapping[str, Any]
    storage: Mapping[str, Any]


class OutputOptions(TypedDict, total=False):
    """What is written beside the answers, and how. See `Sink`."""

    format: str | None
    keep: Names | None
    drop: Names
    row_id: str | None
    key: Names
    partition_by: Names
    merge: bool
    model_version: str | None
    overwrite: bool
    evolve: bool
    dead_payload: int


class SinkOptions(OutputOptions, total=False):
    """The fields of `Sink` beside where it is."""

    options: Mapping[str, Any]
    storage: Mapping[str, Any]


class JobOptions(TypedDict, total=False):
    """How a job runs, and what becomes of rows that cannot be scored. See `JobSpec`, `Running` and `EngineSpec`."""

    on_null: Literal["dead", "skip", "keep"] | None
    on_nan: Literal["dead", "keep"]
    on_new_files: Literal["refuse", "append"]
    gates: Gates | Mapping[str, Any] | None
    audit: Any
    engine: str | EngineSpec | None
    workers: int | Auto | tuple[int, int]
    gpus: int | Auto
    threads: int | Auto
    steps_workers: int
    batch_tokens: int | Auto
    batch_rows: int | Auto
    shard_rows: int | Auto
    window_bytes: int
    batch_timeout: float
    worker_memory: int | None
    log: str | None


class Verbs(TypedDict, total=False):
    """What to do with a sink that holds something already, and who is told how the run goes."""

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


class ClassifyOptions(TextOptions, total=False):
    """Options of `classify`. See `TextClassifier`."""

    output: str | None
    all_scores: bool


class ApplyOptions(ScoreOptions, total=False):
    """Options of `apply`. See `gm.model`."""

    batch_format: Literal["numpy", "rows", "arrow", "pandas", "polars"]
    takes: Mapping[str, str] | None
    returns: Mapping[str, str] | None
    output: str | None


def names_of(kind: type) -> frozenset[str]:
    """The keys of one of the types above."""
    return frozenset(kind.__required_keys__ | kind.__optional_keys__)  # type: ignore[attr-defined]

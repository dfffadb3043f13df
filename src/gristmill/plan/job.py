"""The whole description of a job: source, steps, model, post, sink and options. Immutable; nothing is opened here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gristmill.errors import BadJob
from gristmill.plan.keywords import JobOptions, check_names, fields_named, names_of
from gristmill.plan.options import EngineSpec, Gates, Running
from gristmill.plan.specs import ModelSpec, Step, as_model, as_step

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gristmill.plan.keywords import SinkOptions, SourceOptions


HELD = "table://"  # before the digest of a table in memory, which is its path wherever its copy lies


@fields_named
@dataclass(frozen=True)
class Source:
    """Where rows come from: URIs (a file, a folder, a glob, several) or `data` in memory, and which rows of it.

    `limit` is the first N rows for which `where` holds; `sample` N of them, drawn with `seed`. `types` fixes column
    types of text formats. `options` go to the format (delimiter, …) and `storage` to the file system.
    """

    uri: tuple[str, ...] = ()
    data: Any = field(default=None, compare=False)
    format: str | None = None
    columns: tuple[str, ...] | None = None
    where: str | None = None
    limit: int | None = None
    sample: int | None = None
    seed: int = 0
    types: Mapping[str, str] | None = None
    on_bad_file: Literal["fail", "skip"] = "fail"
    options: Mapping[str, Any] = field(default_factory=dict)
    storage: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("limit", "sample"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise BadJob(f"source {name} is {value!r}: give a whole number of at least 1")
        if self.limit is not None and self.sample is not None:
            raise BadJob("source has both limit and sample: give one of them")
        if self.on_bad_file not in ("fail", "skip"):
            raise BadJob(f"on_bad_file is {self.on_bad_file!r}: it is 'fail' or 'skip'")
        if not self.uri and self.data is None:
            raise BadJob("the source names nothing: give a file, a folder, a glob or a table")


@fields_named
@dataclass(frozen=True)
class Sink:
    """Where answers go. `keep` carries source columns over (None: the model's own default, see Job.kept_columns);
    `drop` leaves columns out of the output row, whatever made them: source, model or steps.

    `row_id` names a column for a stable id of the row (from the `key` columns and the copy number, else from the
    source position). `model_version` names a column that holds the model's digest. `dead_payload` is the most bytes of
    a dead row's payload that are kept (0: none). With `evolve`, rows that are added to a result may widen the types of
    its columns and bring columns of their own, which are null for the others; else they must fit its columns.
    """

    uri: str
    format: str | None = None
    keep: tuple[str, ...] | None = None
    row_id: str | None = None
    key: tuple[str, ...] = ()
    partition_by: tuple[str, ...] = ()
    merge: bool = False
    model_version: str | None = None
    overwrite: bool = False
    evolve: bool = False
    dead_payload: int = 1 << 20
    options: Mapping[str, Any] = field(default_factory=dict)
    storage: Mapping[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.key and not self.row_id:
            raise BadJob(f"sink has key={list(self.key)} but no row_id: name the column that the id is written to")
        needed: dict[str, Any] = {"keep": self.keep or (), "partition_by": self.partition_by}
        needed |= {"row_id": (self.row_id,), "model_version": (self.model_version,)}
        for what, names in needed.items():
            for name in self.drop:
                if name in names:
                    raise BadJob(f"sink has column {name!r} in drop and in {what}: leave it out of one of them")
        if self.merge and self.partition_by:
            raise BadJob("sink has merge and partition_by: one file cannot be in many folders; leave one of them out")


@dataclass(frozen=True)
class JobSpec:
    """A job, ready to be planned. `sink` None means that the answers are returned.

    `audit` are functions, or their names as "module:name", that are given the staged result (`gating.Staged`) before it
    is published; one that returns False, or raises, refuses it. `on_null` None is "dead", for models that refuse nulls;
    where it is given there must be columns that it can be about (planning).
    """

    source: Source
    model: ModelSpec
    sink: Sink | None = None
    steps: tuple[Step, ...] = ()
    post: tuple[Step, ...] = ()
    on_null: Literal["dead", "skip", "keep"] | None = None
    on_nan: Literal["dead", "keep"] = "dead"
    on_new_files: Literal["refuse", "append"] = "refuse"
    running: Running = field(default_factory=Running)
    gates: Gates = field(default_factory=Gates)
    engine: EngineSpec = field(default_factory=EngineSpec)
    audit: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        hooks: Any = self.audit
        several = hooks if isinstance(hooks, (list, tuple)) else () if hooks is None else (hooks,)
        object.__setattr__(self, "audit", tuple(several))
        for hook in self.audit:
            if not (callable(hook) or (isinstance(hook, str) and all(hook.partition(":")))):
                raise BadJob(
                    f"audit has {hook!r}, which cannot be called: give functions of the staged result, or their names, "
                    "MODULE:NAME"
                )
        for name, allowed in (
            ("on_null", (None, "dead", "skip", "keep")),
            ("on_nan", ("dead", "keep")),
            ("on_new_files", ("refuse", "append")),
        ):
            if getattr(self, name) not in allowed:
                raise BadJob(f"{name} is {getattr(self, name)!r}: it is one of {', '.join(a for a in allowed if a)}")
        for step in self.post:
            if step.kind != "map":
                raise BadJob(f"post step {step.name} is a {step.kind}: after the model, steps keep the row count")

    @property
    def nulls(self) -> str:
        """What becomes of a row that the model refuses for a null: dead, skip or keep."""
        return self.on_null or "dead"


def as_source(value: Any, **options: Unpack[SourceOptions]) -> Source:
    """A Source from what a person writes: a string, a path, a list of them, or a table, data frame or list of dicts."""
    import os

    if isinstance(value, Source):
        return value
    if isinstance(value, (str, os.PathLike)):
        return source(os.fspath(value), **options)
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, (str, os.PathLike)) for v in value):
        return source(*[os.fspath(v) for v in value], **options)
    return Source(data=value, **_tuples(options))


def as_sink(value: Any, **options: Unpack[SinkOptions]) -> Sink | None:
    """A Sink from what a person writes: None, a string, a path, or a Sink."""
    import os

    if value is None or isinstance(value, Sink):
        return value
    return sink(os.fspath(value), **options)


def source(*uri: str | Sequence[str], **options: Unpack[SourceOptions]) -> Source:
    """A source with options: `gm.source("docs/**/*.md", format="text", limit=100)`. Fields as in `Source`. Several
    paths are given one by one, or as a list.

    A file is read once, however many names lead to it, with a note that says which: symbolic links, hard links in a
    folder or glob, paths that overlap. Only hard links that are each named outright are files of their own.

    Folders `name=value` below the folder that is given, or from a glob's first wildcard on, are columns, as in pyarrow
    and Spark: text, unless all values are whole numbers (`types` gives others); null where the value is
    `__HIVE_DEFAULT_PARTITION__`.
    """
    paths = [path for given in uri for path in (given if isinstance(given, (list, tuple)) else [given])]
    return Source(uri=tuple(map(str, paths)), **_tuples(options))


def sink(uri: str, **options: Unpack[SinkOptions]) -> Sink:
    """A sink with options: `gm.sink("out/", keep=["id"], row_id="id")`. Fields as in `Sink`."""
    return Sink(uri=str(uri), **_tuples(options))


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    listed = ("columns", "keep", "drop", "key", "partition_by")
    out = dict(options)
    for name in listed:
        value = out.get(name)
        if isinstance(value, str):
            out[name] = (value,)
        elif isinstance(value, list):
            out[name] = tuple(value)
    return out


def describe(
    source: Any,
    model: Any,
    sink: Any = None,
    steps: Any = (),
    post: Any = (),
    **options: Any,
) -> JobSpec:
    """A JobSpec from the values a person writes (strings, bare functions, dicts for options). Raises BadJob."""
    check_names("Job", options, names_of(JobOptions) | {"running"})
    running = {k: options.pop(k) for k in list(options) if k in Running.__dataclass_fields__}
    engine = {k: options.pop(k) for k in list(options) if k in ("workers", "gpus", "threads", "steps_workers")}
    named = options.pop("engine", None)
    spec = named if isinstance(named, EngineSpec) else EngineSpec(name=named or "local")
    if engine:
        from dataclasses import replace

        spec = replace(spec, **engine)
    gates = options.pop("gates", None)
    return JobSpec(
        source=as_source(source),
        model=as_model(model),
        sink=as_sink(sink),
        steps=tuple(as_step(s) for s in steps),
        post=tuple(as_step(s) for s in post),
        running=options.pop("running", None) or Running(**running),
        gates=gates if isinstance(gates, Gates) else Gates(**(gates or {})),
        engine=spec,
        **options,
    )

"""The whole description of a job: source, steps, model, post, sink and options. Immutable; nothing is opened here."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from gristmill.errors import BadJob, BadSource
from gristmill.job.annotations import Help, Key, options_of, whole
from gristmill.job.delivery import STAGING, Delivery, as_deliveries, is_housed, is_store, of_sink, staging_of
from gristmill.job.keywords import JobOptions, check_names, names_of, option_fields
from gristmill.job.options import EngineSpec, Gates, Running, Update, as_engine, as_update
from gristmill.job.recipients import Alert, Lineage, Metrics, as_told
from gristmill.job.schedule import Schedule, as_schedule, due
from gristmill.job.specs import ModelSpec, Step, as_model, as_step
from gristmill.job.uris import file_formats, file_named, is_local, local_path, refuse_empty
from gristmill.values import dataclass

_NOT_WRITTEN = (".csv", ".tsv", ".json", ".xlsx", ".arrow", ".feather", ".ipc", ".orc", ".avro", ".txt")

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gristmill.job.keywords import SinkOptions, SourceOptions


T = TypeVar("T")

_TABLES = ("__arrow_c_stream__", "schema", "columns", "iloc")  # what tables and frames have, or some of it
COPY = ".snapshot"  # ends the name of the folder, after HELD, of rows that were copied from a store
HELD = "table://"  # before the digest of a table in memory, which is its path wherever its copy is stored


@option_fields("source ")
@dataclass(frozen=True)
class Source:
    """Where rows come from: URIs (a file, a folder, a glob, several) or `data` in memory, and which rows of it."""

    not_shaping: ClassVar[Mapping[str, str]] = {  # what does not change the answers, and why: all else counts
        "uri": "the files that it stands for are compared one by one",
        "data": "compared as the file that it is written to",
        "query": "the rows that it gives are compared",
        "on_bad_file": "the files that are left are compared one by one",
        "storage": "how to reach the files, which are compared one by one; credentials change from night to night",
    }

    uri: Annotated[
        tuple[str, ...],
        Help(
            "Files, folders or globs, relative to the current folder; or URIs that pyarrow or fsspec opens", flag=None
        ),
    ] = ()
    data: Any = field(default=None, compare=False)
    format: Annotated[
        str | None,
        Help(
            "How the source is read: parquet, jsonl, openai-batch, csv, text or binary (default: by its suffix)",
            "NAME",
            "--source-format",
        ),
    ] = None
    columns: Annotated[tuple[str, ...] | None, Help("Read only these columns")] = None
    query: Annotated[
        str | None,
        Help("The rows are what this query of the database gives that the source names", "SQL"),
    ] = None
    where: Annotated[
        str | None,
        Help("Only rows for which this SQL condition holds, for example \"lang = 'en'\"", "SQL", usual=True),
    ] = None
    limit: Annotated[int | None, whole(1), Help("Only the first N rows for which the condition holds", usual=True)] = (
        None
    )
    sample: Annotated[int | None, whole(1), Help("Only N rows, drawn at random with the seed")] = None
    seed: Annotated[int, Help("The seed of the sample")] = 0
    types: Annotated[
        Mapping[str, str] | None,
        Help("Column types for text formats, instead of those found in the first rows: {price: float64}", flag=None),
    ] = None
    on_bad_file: Annotated[
        Literal["fail", "skip"],
        Help(
            "What to do with a file that cannot be read: fail the job, or skip and count it (damaged rows inside a "
            "Parquet file then become dead letters)"
        ),
    ] = "fail"
    options: Annotated[
        Mapping[str, Any],
        Help("Options of the format, for example {delimiter: ';'}", flag=None),
        Key(
            "delimiter",
            Help(
                "The CSV delimiter: one character, or tab (default: a comma, or if the header has none, the delimiter "
                "that it shows)",
                "CHAR",
            ),
        ),
    ] = field(default_factory=dict)
    storage: Annotated[
        Mapping[str, Any], Help("Options of the file system, for example {region: eu-west-1}", flag=None)
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        base = self.options.get("relative_to")
        if isinstance(base, (str, os.PathLike)) and is_local(os.fspath(base)):
            # The folder that is meant now, wherever the job is run again from.
            object.__setattr__(self, "options", {**self.options, "relative_to": local_path(os.fspath(base))})
        if self.limit is not None and self.sample is not None:
            raise BadJob("source has both limit and sample: give one of them")
        for uri in self.uri:
            refuse_empty(uri, "source")
        if not self.uri and self.data is None:
            raise BadJob("the source names nothing: give a file, a folder, a glob or a table")


@option_fields("sink ")
@dataclass(frozen=True)
class Sink:
    """Where answers go, which columns are written with them, and how they are written.

    A row's id is built from the `key` columns and the copy number, else from the source position. Without `evolve`,
    rows that are added to a result must fit its columns.
    """

    not_shaping: ClassVar[Mapping[str, str]] = {
        "uri": "the sink that is looked at",
        "storage": "how to reach the sink; credentials change from night to night",
        "evolve": "whether a later run may widen the schema, which the plan stores",
        "overwrite": "whether files of others may stand beside the result",
        "index": "what stands beside the result, to find its rows by",
    }

    uri: Annotated[
        str,
        Help(
            "The folder that the answers are published in, relative to the current folder, or a URI; or one file, "
            "named .parquet or .jsonl",
            flag=None,
        ),
    ]
    format: Annotated[
        str | None, Help("What is written: parquet (default), jsonl, npy or openai-batch", "NAME", usual=True)
    ] = None
    keep: Annotated[
        tuple[str, ...] | None,
        Help("Source columns carried over (default: all but the model's text; none for functions)", usual=True),
    ] = None
    row_id: Annotated[
        str | None,
        Help("Write a stable id for each row into this column; with key, it is only as unique as the key", "NAME"),
    ] = None
    key: Annotated[
        tuple[str, ...],
        Help(
            "The columns that the row id is made from, which should be unique together (default: the row's place in "
            "the source)"
        ),
    ] = ()
    partition_by: Annotated[
        tuple[str, ...],
        Help(
            "Write hive folders by these columns, with about one file in each; they are carried over as if listed in "
            "keep"
        ),
    ] = ()
    merge: Annotated[
        bool, Help("Publish one file instead of parts, in the order of the source; each append adds another")
    ] = False
    index: Annotated[
        tuple[str, ...],
        Help("The columns that rows are looked up by (gristmill lookup), of which an index is made beside the parts"),
    ] = ()
    model_version: Annotated[str | None, Help("Write the model's digest into this column", "NAME")] = None
    overwrite: Annotated[bool, Help("Allow a folder that holds other files")] = False
    evolve: Annotated[
        bool, Help("Let appended rows widen types and add columns, which are null for the earlier rows")
    ] = False
    dead_payload: Annotated[
        int, whole(0), Help("How many bytes of a dead row's content are kept with it, at most (0: none)", flag=None)
    ] = 1 << 20
    options: Annotated[Mapping[str, Any], Help("Options of the format, for example {compression: zstd}", flag=None)] = (
        field(default_factory=dict)
    )
    storage: Annotated[Mapping[str, Any], Help("Options of the file system", flag=None)] = field(default_factory=dict)
    drop: Annotated[
        tuple[str, ...],
        Help("Columns left out of the output row, whatever made them: source, model or steps"),
    ] = ()
    sort_by: Annotated[
        tuple[str, ...],
        Help(
            "Sort the rows of each file by these columns, ascending, nulls last; they are carried over as if listed in "
            "keep"
        ),
    ] = ()
    files: Annotated[
        int | None,
        whole(1),
        Help(
            "Publish at most so many files (in each folder of partition_by) instead of a part for each shard; each "
            "append adds as many (default for partition_by: one for each 512 MB)"
        ),
    ] = None

    def __post_init__(self) -> None:
        refuse_empty(self.uri, "sink")
        if self.key and not self.row_id:
            raise BadJob(f"sink has key={list(self.key)} but no row_id: name the column that the id is written to")
        needed: dict[str, Any] = {
            "keep": self.keep or (), "partition_by": self.partition_by, "sort_by": self.sort_by,
        }  # fmt: skip
        needed |= {"row_id": (self.row_id,), "model_version": (self.model_version,)}
        for what, names in needed.items():
            for name in self.drop:
                if name in names:
                    raise BadJob(f"sink has column {name!r} in both drop and {what}: leave it out of one of them")
        for what in ("row_id", "model_version"):
            if getattr(self, what) == "":
                raise BadJob(f"sink {what} is '': name the column that it is written to, or leave it out")
        if self.uri.lower().endswith(_NOT_WRITTEN) and not (is_local(self.uri) and os.path.isdir(local_path(self.uri))):
            raise BadJob(
                f"sink {self.uri}: files of this kind are not written: give one named .parquet or .jsonl, or a folder "
                f"({self.uri}/ is one)"
            )
        if self.uri.lower().endswith(".npy") and self.format is None and is_local(self.uri):
            folder = self.uri[:-4]
            raise BadJob(
                f"sink {self.uri}: vectors are written as a folder of npy files: sink {folder}/ with --format npy "
                "(format='npy')"
            )
        if file_named(self.uri):
            self._one_file()
        if self.merge and self.partition_by:
            raise BadJob("sink has merge and partition_by: one file cannot be in many folders; leave one of them out")
        if self.merge and self.files is not None:
            raise BadJob(f"sink has merge, which is one file, and files={self.files}: leave one of them out")

    @property
    def joins(self) -> bool:
        """Whether what shards wrote is joined to larger files before it is published."""
        return self.merge or self.files is not None or bool(self.partition_by)

    def _one_file(self) -> None:
        form, *others = file_formats(self.uri)
        if not is_local(self.uri):
            raise BadJob(f"sink {self.uri}: one file is for local disks: give a folder ({self.uri}/ is one)")
        if self.format not in (None, form, *others):
            raise BadJob(f"sink {self.uri}: format is {self.format!r}: give a file named .{self.format}, or a folder")
        if given := [name for name in ("partition_by", "evolve", "files") if getattr(self, name)]:
            raise BadJob(
                f"sink {self.uri}: {given[0]} is for folders, and this name is that of one file: give a folder"
            )
        if form == "jsonl" and str(self.options.get("compression") or "none").lower() != "none":
            raise BadJob(
                f"sink {self.uri}: compression is {self.options['compression']!r}, and files of this name are not "
                "compressed: give a folder"
            )
        object.__setattr__(self, "format", self.format or form)
        object.__setattr__(self, "merge", True)


@option_fields()
@dataclass(frozen=True)
class JobSpec:
    """A job, ready to be planned. `sink` None means that the answers are returned.

    `audit` are functions, or their names as "module:name", that are given the staged result (`commit.gates.Staged`)
    before it is published; one that returns False, or raises, refuses it. `reduce` is a function, or its name, that is
    given the result's rows (a pyarrow.RecordBatchReader) and a folder (str), and writes files that are published with
    them. `on_null` None means "dead", for models that refuse nulls; if it is given there must be columns that it can
    apply to (planning).
    """

    not_shaping: ClassVar[Mapping[str, str]] = {
        "on_new_files": "what the next run does about files that are new",
        "update": "which answers are kept, that still hold",
        "audit": "looks at the staged result, and may only refuse it",
        "reduce": "reads what is about to be published; it may be mended and run again without scoring anything",
        "deliver": "where the published result is brought afterwards",
        **dict.fromkeys(("schedule", "deadline", "on_deadline"), "when the job runs, not what it answers"),
        **dict.fromkeys(("alerts", "metrics", "lineage"), "who is told of the run, which does not wait for them"),
    }

    source: Annotated[
        Source, Help("Where rows come from: a path, a list of paths, or a mapping with uri and options", flag=None)
    ]
    model: Annotated[
        ModelSpec,
        Help(
            "What scores the rows: one of embed, classify, prompt, score, onnx, torchscript, sklearn or call, and its "
            "options",
            flag=None,
        ),
    ]
    sink: Annotated[
        Sink | None, Help("Where the answers go: a folder, or a mapping with uri and options", flag=None)
    ] = None
    steps: Annotated[tuple[Step, ...], Help("CPU steps before the model, in order", flag=None)] = ()
    post: Annotated[
        tuple[Step, ...],
        Help(
            "Steps after the model: they get the source columns and the model's answers, and keep the row count",
            flag=None,
        ),
    ] = ()
    on_null: Annotated[
        Literal["dead", "skip", "keep"] | None,
        Help(
            "What to do with a row whose model input is null: make it a dead letter, leave it out, or pass it to the "
            "model (a text model reads it as empty text). For a function: null in a column that takes= declares not "
            "null (default: dead)"
        ),
    ] = None
    on_nan: Annotated[
        Literal["dead", "keep"],
        Help("What to do with a row whose answer is NaN or infinite: make it a dead letter, or keep it"),
    ] = "dead"
    on_new_files: Annotated[
        Literal["refuse", "append"],
        Help("What a later run does if the source has new files: refuse to run, or append them", group="Source"),
    ] = "refuse"
    update: Annotated[
        Update | None,
        Help(
            "Let a later run score only rows that are new or changed, keep the answers of the others, and leave out "
            "rows that are gone: a mapping with `key`, or true to go by a row's place in its file",
            flag=None,
        ),
    ] = None
    running: Annotated[
        Running,
        Help("How the job runs; nothing here changes an answer beyond its last bits", flag=None),
    ] = field(default_factory=Running)
    gates: Annotated[
        Gates,
        Help(
            "What must hold before anything is published, besides the exact row accounting that is always on", flag=None
        ),
    ] = field(default_factory=Gates)
    engine: Annotated[
        EngineSpec, Help("What runs the job: local, ray or spark, with the engine's own options", flag=None)
    ] = field(default_factory=EngineSpec)
    audit: Annotated[
        tuple[Any, ...],
        Help(
            "MODULE:NAME of a function, or several, that may refuse the staged result before it is published: each is "
            "given an object with counts, dataset(), paths, schema, and raises or returns something false",
            flag=None,
        ),
    ] = ()

    reduce: Annotated[
        Any,
        Help(
            "MODULE:NAME or FILE.py:NAME of a function (rows, folder) that makes the one final file, index or report: "
            "it reads all rows as a stream and writes into the folder, before anything is published",
            "FILE.py:NAME",
            group="Output",
        ),
    ] = None
    deliver: Annotated[
        tuple[Delivery, ...],
        Help(
            "Stores that the published result is delivered to: addresses, or mappings with `to` and options (mode, "
            "key, index, evolve, delete)",
            flag=None,
        ),
    ] = ()
    schedule: Annotated[
        Schedule | None,
        Help(
            "When `gristmill up` runs the job: an expression of cron, or a mapping with cron and timezone, with after, "
            "or with files",
            flag=None,
        ),
    ] = None
    deadline: Annotated[
        str | None,
        Help(
            "By when it must be done: a time of day in the schedule's time zone (06:00), or a length of time from when "
            "it was to begin (7h)",
            "TIME",
            group="How it runs",
        ),
    ] = None
    on_deadline: Annotated[
        Literal["publish", "stop"],
        Help(
            "What to do once the deadline has passed: go on and publish late, or stop without publishing (exit 3; "
            "the same with --accept goes on and publishes late)",
            group="How it runs",
        ),
    ] = "publish"
    alerts: Annotated[
        tuple[Alert, ...],
        Help("Who is told of incidents: addresses of webhooks, or mappings with webhook, email or command", flag=None),
    ] = ()
    metrics: Annotated[
        tuple[Metrics, ...],
        Help("Where figures go: FILE.prom, a push gateway (http://…), or a collector (otlp://HOST:4318)", flag=None),
    ] = ()
    lineage: Annotated[
        tuple[Lineage, ...],
        Help("Where OpenLineage events go: an address, or a file that gets a line each", flag=None),
    ] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", as_schedule(self.schedule))
        if self.deadline is not None:
            due(self.deadline, datetime(2000, 1, 1, tzinfo=timezone.utc), timezone.utc)
        given = as_deliveries(self.deliver)
        object.__setattr__(self, "update", as_update(self.update))
        if self.update is not None:
            self._check_update()
        if self.sink is not None and is_store(self.sink.uri):
            first, sink = _in_folder(self.sink)
            if sink.uri != self.sink.uri or first.shown not in [one.shown for one in given]:
                given = as_deliveries([first, *given])
            object.__setattr__(self, "sink", sink)
        object.__setattr__(self, "deliver", given)
        if self.update is not None and (one := next((one for one in given if one.mode == "append"), None)):
            raise BadJob(
                f"the job has update, and deliver {one.shown} mode append, which adds the rows that an update keeps "
                "again each night: let the mode be upsert with a key, or replace"
            )
        for name in ("alerts", "metrics", "lineage"):
            object.__setattr__(self, name, as_told(name, getattr(self, name)))
        if given and self.sink is None:
            raise BadJob("the job has deliver but no sink, from which the stores are filled: give it one (sink=…)")
        hooks: Any = self.audit
        several = hooks if isinstance(hooks, (list, tuple)) else () if hooks is None else (hooks,)
        object.__setattr__(self, "audit", tuple(several))
        for hook in self.audit:
            if not (callable(hook) or (isinstance(hook, str) and all(hook.partition(":")))):
                raise BadJob(
                    f"audit has {hook!r}, which cannot be called: give functions that take the staged result, or their "
                    "names, MODULE:NAME"
                )
        if self.reduce is not None:
            if not (callable(self.reduce) or (isinstance(self.reduce, str) and all(self.reduce.rpartition(":")))):
                raise BadJob(
                    f"reduce is {self.reduce!r}, which cannot be called: give a function (rows, folder), or its name, "
                    "MODULE:NAME or FILE.py:NAME"
                )
            if self.sink is None:
                raise BadJob("the job has reduce but no sink, beside whose rows its files are published: give it one")
        for step in self.post:
            if step.kind != "map":
                raise BadJob(f"post step {step.name} is a {step.kind}: after the model, steps must keep the row count")

    def _check_update(self) -> None:
        if self.sink is None:
            raise BadJob("the job has update but no sink, whose answers would be kept: give it one (sink=…)")
        if self.on_new_files == "append":
            raise BadJob(
                "the job has update and on_new_files append: an update scores new files, and what changed in the "
                "others besides; leave one of them out"
            )

    @property
    def update_key(self) -> tuple[str, ...]:
        """The columns that rows are matched by; () for their places."""
        if self.update is None:
            return ()
        return self.update.key or (() if self.sink is None else self.sink.key)

    @property
    def nulls(self) -> str:
        """What happens to a row that the model refuses because of a null: dead, skip or keep."""
        return self.on_null or "dead"


def _in_folder(sink: Sink) -> tuple[Delivery, Sink]:
    """A sink that is a store, as a delivery and the sink of its runs. Where a store is to be asked for the folder, the
    address stays until a run begins: a job is made in places that start nothing.
    """
    options: Any = dict(sink.options)
    housed = is_housed(sink.uri)
    if housed and STAGING not in sink.storage:
        return of_sink(Delivery(sink.uri, **options)), replace(sink, options={})
    if housed:
        options["options"] = {STAGING: sink.storage[STAGING], **options.get("options", {})}
    storage = {name: value for name, value in sink.storage.items() if name != STAGING}
    folder = replace(sink, uri=staging_of(sink.uri, sink.storage), options={}, storage=storage)
    return of_sink(Delivery(sink.uri, **options)), folder


def as_source(value: Any, **options: "Unpack[SourceOptions]") -> Source:
    """A Source from what a person writes: a string, a path, a list of them, or a table, data frame or list of dicts."""
    import os

    if isinstance(value, Source):
        return value
    if isinstance(value, (str, os.PathLike)):
        return source(os.fspath(value), **options)
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, (str, os.PathLike)) for v in value):
        return source(*[os.fspath(v) for v in value], **options)
    fields: Mapping[str, Any] = options  # the class turns single names into tuples
    if value is None or isinstance(value, (list, tuple, Mapping)) or _is_table(value):
        return Source(data=value, **fields)
    raise no_source(value)


def _is_table(value: Any) -> bool:
    """Whether it has what tables and frames have. Its type is asked: a lazy frame would work out its own."""
    return any(hasattr(type(value), name) for name in _TABLES) and type(value).__name__ != "LazyFrame"


def no_source(value: Any) -> BadSource:
    """What is said of a value in which there are no rows."""
    shown = repr(value) if isinstance(value, (int, float, complex)) else f"a {type(value).__name__}"
    way = {"LazyFrame": "give its rows, .collect()", "generator": "give its rows, list(…)"}.get(type(value).__name__)
    return BadSource(
        f"source is {shown}: {way or 'give a path, a list of paths, a DataFrame, an Arrow table, or a list of dicts'}"
    )


def as_sink(value: Any, **options: "Unpack[SinkOptions]") -> Sink | None:
    """A Sink from what a person writes: None, a string, a path, or a Sink."""
    import os

    if value is None or isinstance(value, Sink):
        return value
    if not isinstance(value, (str, os.PathLike)):
        raise BadJob(f"sink is {value!r}: give a folder or a URI, as text, or gm.sink(…)")
    return sink(os.fspath(value), **options)


def source(*uri: str | Sequence[str], **options: "Unpack[SourceOptions]") -> Source:
    """A source with options: `gm.source("docs/**/*.md", format="text", limit=100)`. Fields as in `Source`. Several
    paths are given one by one, or as a list. Raises BadSource for what is neither a path nor a table.

    A file is read once, however many names lead to it, with a note that says which: symbolic links, hard links in a
    folder or glob, paths that overlap. Hard links that are each named outright count as separate files, and so do those
    that make other rows, in other `name=value` folders or of files that are one row each.

    Folders `name=value` below the given folder, or from a glob's first wildcard on, are columns, as in pyarrow and
    Spark: text, unless all values are whole numbers (`types` gives others); null if the value is
    `__HIVE_DEFAULT_PARTITION__`.
    """
    paths = [path for given in uri for path in (given if isinstance(given, (list, tuple)) else [given])]
    others = [path for path in paths if not isinstance(path, (str, os.PathLike))]
    if others and len(uri) == 1:
        return as_source(uri[0], **options)
    if others:
        raise no_source(others[0])
    fields: Mapping[str, Any] = options
    return Source(uri=tuple(map(str, paths)), **fields)


def sink(uri: str, **options: "Unpack[SinkOptions]") -> Sink:
    """A sink with options: `gm.sink("out/", keep=["id"], row_id="id")`. Fields as in `Sink`."""
    fields: Mapping[str, Any] = options
    return Sink(uri=str(uri), **fields)


def describe(
    source: Any,
    model: Any,
    sink: Any = None,
    steps: Any = (),
    post: Any = (),
    **options: Any,
) -> JobSpec:
    """A JobSpec from the values a person writes (strings, bare functions, dicts for options). Raises BadJob."""
    check_names("Job", options, names_of(JobOptions))
    running = {k: options.pop(k) for k in list(options) if k in options_of(Running)}
    chosen = _section("running", Running, options.pop("running", None))
    engine = {k: options.pop(k) for k in list(options) if k in options_of(EngineSpec)}
    spec = as_engine(options.pop("engine", None))
    for name, given in (("steps", steps), ("post", post)):
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise BadJob(f"{name} is {given!r}: give a list of steps")
    return JobSpec(
        source=as_source(source),
        model=as_model(model),
        sink=as_sink(sink),
        steps=tuple(as_step(s) for s in steps),
        post=tuple(as_step(s) for s in post),
        running=replace(chosen, **running) if running else chosen,
        gates=_section("Gates", Gates, options.pop("gates", None)),
        engine=replace(spec, **engine) if engine else spec,
        **options,
    )


def _section(name: str, kind: type[T], given: Any) -> T:
    """Options of a kind from a mapping, as a job file has it. Raises BadJob."""
    if isinstance(given, kind):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise BadJob(f"{name.lower()} is {given!r}: give a mapping of its options: {', '.join(options_of(kind))}")
    check_names(name, given or {}, options_of(kind))
    return kind(**(given or {}))

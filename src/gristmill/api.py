"""What a person writes in Python: Job and its verbs, and the twins of the commands."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

from gristmill.errors import BadJob, BadSource, GateFailed, GristmillError
from gristmill.observe.events import Observer
from gristmill.observe.report import Report
from gristmill.plan.job import JobSpec, as_sink, as_source, describe
from gristmill.plan.keywords import (
    ApplyOptions,
    ClassifyOptions,
    EmbedOptions,
    JobOptions,
    OutputOptions,
    RowOptions,
    Verbs,
    check_names,
    named,
    names_of,
)
from gristmill.plan.options import Gates, default_engine
from gristmill.plan.specs import FunctionModel, TextClassifier, TextEmbedder, as_model
from gristmill.plan.specs import model as function_model

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Unpack

    from gristmill.commit.verify import Verdict
    from gristmill.plan.job import Sink

    Place = str | os.PathLike[str] | Sink


# What one column comes in.
_COLUMNS = (
    ("numpy", "ndarray"),
    ("pandas", "Series"),
    ("pandas", "Index"),
    ("polars", "Series"),
    ("pyarrow", "Array"),
    ("pyarrow", "ChunkedArray"),
)


class Job:
    """A job: source, steps, model, post, sink and options. Immutable; nothing is opened until it runs.

    Options are those of JobSpec, Running and EngineSpec (workers=, batch_tokens=, gates=, on_null=, …). Without engine=
    it is the one that the environment variable GRISTMILL_ENGINE names, or "local". Raises BadJob.
    """

    def __init__(
        self,
        source: Any,
        model: Any,
        sink: Any = None,
        steps: Sequence[Any] = (),
        post: Sequence[Any] = (),
        **options: Unpack[JobOptions],
    ) -> None:
        if options.get("engine") is None:
            options["engine"] = default_engine(os.environ)
        self.spec = describe(source, model, sink, steps, post, **options)

    @classmethod
    def of(cls, spec: JobSpec) -> Job:
        """A Job around a description made elsewhere."""
        job = cls.__new__(cls)
        job.spec = spec
        return job

    @named("Job.run")
    def run(
        self,
        *,
        engine: Any = None,
        restart: bool = False,
        append: bool = False,
        accept: bool = False,
        observer: Observer | None = None,
    ) -> Report:
        """Score every row and publish. Running again resumes, or says "nothing to do". See errors.py for what it
        raises: GateFailed where more rows are dead letters than `gates` allows (1 %, and one in any case). Those that
        it allows are told of by a GristmillWarning.
        """
        spec = self.spec
        if engine is not None:
            named = spec.engine.named(engine) if isinstance(engine, str) else engine
            spec = replace(spec, engine=named)
        from gristmill.running import run

        verb = functools.partial(run, restart=restart, append=append, accept=accept)
        return _ran(spec, observer, _dead_letters, verb)

    @named("Job.preview")
    def preview(self, rows: int = 20) -> Any:
        """The output of the first rows as an Arrow table; leaves nothing in the sink. Rows that fail are told of by a
        GristmillWarning; raises RunFailed, with the first one's traceback, where none is left.
        """
        from gristmill.observe.logging import logged
        from gristmill.observe.warned import Warned
        from gristmill.plan.secret import secrets_in
        from gristmill.viewing import preview

        warned = Warned(_watching(bar=False))
        with logged(warned, None, list(secrets_in(self.spec))) as heard:
            found = preview(self.spec, rows, heard)
        if (failure := found.failure()) is not None:
            raise failure
        for row in found.dead.slice(0, 3).to_pylist():
            warned.warn(
                f"row {row['position']} of {row['source']} failed ({row['stage']}): {row['error']}: {row['message']}"
            )
        if found.dead.num_rows > 3:
            warned.warn(f"{found.dead.num_rows} of the rows previewed failed, of which the first 3 were told")
        warned.settle()
        return found.rows

    def plan(self) -> Any:
        """What would run: shards, rows, bytes, null counts."""
        from gristmill.viewing import plan

        return plan(self.spec)

    @named("Job.tune")
    def tune(self, budgets: Sequence[int] | None = None, *, rounds: int = 3) -> Any:
        """Measure throughput over batch budgets on the job's own rows: a value with .knee, .rates, .best, .budgets and
        .arrangements. Later runs on this machine use the knee; `gristmill tune` shows it as a table and a curve.
        """
        from gristmill.tuning.sweeping import tune

        return tune(self.spec, budgets, rounds=rounds)

    def stream(self) -> Iterator[Any]:
        """Finished output tables in the order of the source, as they are ready; memory stays bounded.

        Nothing is written to the sink, whose `keep` and other options count. Dead letters are not in the tables: `run`
        keeps those. Raises GateFailed as soon as there are more of them than `gates` allows; the others are told of by
        a GristmillWarning. Leaving the loop early stops the job.
        """
        from gristmill.plan.processes import of_this_process

        return of_this_process(self._streamed(), "a stream")

    def _streamed(self) -> Generator[Any, None, None]:
        from gristmill.gating import told
        from gristmill.observe.logging import logged
        from gristmill.observe.warned import Warned
        from gristmill.plan.secret import secrets_in
        from gristmill.viewing import stream

        warned = Warned(_watching(bar=False))
        with logged(warned, self.spec.running.log, list(secrets_in(self.spec))) as heard:
            report = yield from stream(self.spec, heard)
        if report.rows_dead:
            warned.warn(f"{told(report.counts, report.errors)}; they are in none of the tables; run() keeps them")
        warned.settle()

    def __repr__(self) -> str:
        s = self.spec
        return f"Job({', '.join(s.source.uri) or 'data'} -> {s.model.name} -> {s.sink.uri if s.sink else 'a table'})"


@overload
def embed(
    source: Any,
    sink: None = None,
    *,
    text: str | None = None,
    model: str,
    output: str = "embedding",
    **options: Unpack[EmbedOptions],
) -> pa.Table: ...
@overload
def embed(
    source: Any,
    sink: Place,
    *,
    text: str | None = None,
    model: str,
    output: str = "embedding",
    **options: Unpack[EmbedOptions],
) -> Report: ...
def embed(
    source: Any,
    sink: Place | None = None,
    *,
    text: str | None = None,
    model: str,
    output: str = "embedding",
    **options: Unpack[EmbedOptions],
) -> Any:
    """Embed a text column: adds `output`, a vector. With a sink a Report; without one, the result as an Arrow table.

    In both forms GateFailed is raised where more rows fail than `gates` allows (1 %, and one in any case), and a
    GristmillWarning tells of the others. Of rows in memory, without a sink, none may fail unless `gates` says so or
    `keep` (or `row_id`) has the table tell which row an answer is of: they stand beside the rows, one for each.

    The index of a DataFrame, where it is not 0, 1, …, stands in the table as pyarrow keeps one: `to_pandas()` has it
    back. Where rows have no answer, or the job has steps, there is none, and a GristmillWarning.

    A list of strings, a Series or an array of them is the texts themselves, in a column `text` ("text" where it is not
    said); lists of paths are what `gm.source` is for.

    Options: those of TextEmbedder (prompt=, backend=, …), of the source (where=, limit=, …), the sink (keep=, …) and
    Job. Raises BadJob for others.
    """
    check_names("embed", options, names_of(EmbedOptions))
    given: dict[str, Any] = dict(options)
    names = _fields(TextEmbedder) - {"output"}
    rows, text = _texts("embed", source, text)
    spec = TextEmbedder(model, text, output, **{k: given.pop(k) for k in list(given) if k in names})
    return _run(rows, sink, spec, given, of=source)


@overload
def classify(
    source: Any, sink: None = None, *, text: str | None = None, model: str, **options: Unpack[ClassifyOptions]
) -> pa.Table: ...
@overload
def classify(
    source: Any, sink: Place, *, text: str | None = None, model: str, **options: Unpack[ClassifyOptions]
) -> Report: ...
def classify(
    source: Any, sink: Place | None = None, *, text: str | None = None, model: str, **options: Unpack[ClassifyOptions]
) -> Any:
    """Classify a text column: adds `label` and `score` (`scores` with all_scores=True). As `embed` otherwise."""
    check_names("classify", options, names_of(ClassifyOptions))
    given: dict[str, Any] = dict(options)
    names = _fields(TextClassifier)
    rows, text = _texts("classify", source, text)
    spec = TextClassifier(model, text, **{k: given.pop(k) for k in list(given) if k in names})
    return _run(rows, sink, spec, given, of=source)


@overload
def apply(
    source: Any, sink: None = None, *, fn: Any, args: Mapping[str, Any] | None = None, **options: Unpack[ApplyOptions]
) -> pa.Table: ...
@overload
def apply(
    source: Any, sink: Place, *, fn: Any, args: Mapping[str, Any] | None = None, **options: Unpack[ApplyOptions]
) -> Report: ...
def apply(
    source: Any,
    sink: Place | None = None,
    *,
    fn: Any,
    args: Mapping[str, Any] | None = None,
    **options: Unpack[ApplyOptions],
) -> Any:
    """Run a function, or a class built once a worker, over batches; the row is what it returns, plus `keep`.

    With a sink a Report; without one, the result as an Arrow table, as for `embed`.
    """
    check_names("apply", options, names_of(ApplyOptions))
    given: dict[str, Any] = dict(options)
    chosen = {k: given.pop(k) for k in ("batch_format", "takes", "returns", "output") if k in given}
    spec = fn if isinstance(fn, FunctionModel) else function_model(fn, **chosen, **dict(args or {}))
    return _run(source, sink, spec, given)


def run(job: Any, **verbs: Unpack[Verbs]) -> Report:
    """Run a Job, or a job file, FILE.py[:NAME] or MODULE:NAME."""
    made = job if isinstance(job, Job) else load_job(os.fspath(job))
    return made.run(**verbs)


@named("load_job")
def load_job(
    ref: str, *, variables: Mapping[str, str] | None = None, profile: str | None = None, sets: Sequence[str] = ()
) -> Job:
    """A job from job.yaml, FILE.py[:NAME] or MODULE:NAME. Raises BadJob, naming the key and the place."""
    from gristmill.plan.jobfile import load

    return Job.of(load(ref, variables=variables or {}, profile=profile, sets=sets, environ=os.environ))


@named("read")
def read(sink: Any, storage: Mapping[str, Any] | None = None) -> Any:
    """A pyarrow Dataset of exactly the published parts, in the order of the source, that has `.to_pandas()`,
    `.to_polars()` and `.to_numpy("embedding")`, too. `sink` is the place, the job that writes there (or its file), or
    a run's Report.

    Rows retried or appended later stand after the others; with partition_by the order is that of the source within each
    part, and rows of a partition stand together. A Dataset goes on reading the result that it was made of when
    a run publishes another one; the run after that removes it. Raises BadSource where nothing is published or the
    sink's format is npy (read its manifest.parquet). `storage` holds options of an object store, as those of a sink.
    """
    from gristmill.commit.reading import read as of_root

    return of_root(*_place(sink, storage, BadSource))


@named("dead")
def dead(sink: Any, storage: Mapping[str, Any] | None = None, generation: int | None = None) -> pa.Table:
    """The dead letters of a sink, a row each; `payload` is JSON text. Where nothing is published yet, those that the
    unfinished run has committed, and also where that is the `generation` that is asked for. `sink` as in `read`.
    """
    from gristmill.commit.reading import dead as of_root

    if isinstance(sink, Report) and generation is None:
        generation = sink.generation
    return of_root(*_place(sink, storage, BadSource), generation=generation)


@named("retry_dead")
def retry_dead(job: Any, *, accept_code_change: bool = False, observer: Observer | None = None) -> Report:
    """Score the dead letters of a job's sink again, usually after a fix: those that now succeed join the published
    rows, after the others. `job` is the one that wrote the sink, or its file.

    Raises PlanChanged where the code is another and that was not accepted, BadJob for a job without a sink.
    """
    from gristmill.running import retry_dead as retried

    made = job if isinstance(job, Job) else load_job(os.fspath(job))
    return _ran(made.spec, observer, _dead_letters, functools.partial(retried, accept_code_change=accept_code_change))


@named("status")
def status(sink: Any, storage: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """How far the run on a sink is, or was: a dict with state, counts, shards; needs nothing but the sink's files.
    `sink` as in `read`.

    `storage` says how to reach a sink in an object store, as in `gm.sink(…)`; a job brings its own.
    """
    from gristmill.viewing import status as of_root

    return of_root(*_place(sink, storage))


@named("verify")
def verify(sink: Any, storage: Mapping[str, Any] | None = None, *, deep: bool = False, source: bool = False) -> Verdict:
    """Recount and re-hash what is published, and hold it against plans, receipts and dead letters. The verdict has .ok,
    .lines and .as_dict(); `sink` and `storage` as in `read`. With `deep` all values are read again, as `gm.read` reads
    them.

    With `source` the source is read again, and must hold what every shard read; give the job where reaching it needs
    options or secrets.
    """
    from gristmill.viewing import verify as of_root

    job = _job(sink)
    of_job = job.spec.source if job and source else source
    return of_root(*_place(job or sink, storage), deep=deep, source=of_job)


# ---------------------------------------------------------------- inside


@dataclass(frozen=True)
class _Split:
    source: dict[str, Any] = field(default_factory=dict)
    sink: dict[str, Any] = field(default_factory=dict)
    verbs: dict[str, Any] = field(default_factory=dict)


def _texts(verb: str, source: Any, column: str | None) -> tuple[Any, str]:
    """The source, texts alone made a table, and the column that they stand in. Raises BadJob where none is named."""
    from gristmill.io.values import is_from

    if isinstance(source, (list, tuple)):
        alone = bool(source) and all(text is None or isinstance(text, str) for text in source)
    else:
        alone = getattr(source, "ndim", 1) == 1 and any(is_from(package, source, kind) for package, kind in _COLUMNS)
    if alone:
        import pyarrow as pa

        name, values = column or "text", source.to_arrow() if is_from("polars", source, "Series") else source
        made = values if isinstance(values, (pa.Array, pa.ChunkedArray)) else pa.array(values)
        return pa.table({name: made}), name
    if column is None:
        if isinstance(source, (list, tuple)) and not source:
            raise BadJob(f"{verb}: the list of texts is empty")
        if isinstance(source, Iterator):
            raise BadJob(f"{verb}: texts come as a {type(source).__name__}: make it a list")
        raise BadJob(f"{verb} needs text=: the column that holds the texts, for example text='body'")
    return source, column


def _run(source: Any, sink: Any, model: Any, options: dict[str, Any], of: Any = None) -> Any:
    """`of` is what a source of texts alone was made of."""
    split = _Split()
    for name in list(options):
        for group, kind in ((split.source, RowOptions), (split.sink, OutputOptions), (split.verbs, Verbs)):
            if name in names_of(kind):
                group[name] = options.pop(name)
    if sink is None and "format" in split.sink:
        raise BadJob("format is that of a sink, and there is none: give one; a table needs no format")
    made = as_source(source, **split.source)
    if sink is not None:
        return Job(made, model, as_sink(sink, **split.sink), **options).run(**split.verbs)
    from gristmill.io.memory import with_index
    from gristmill.running import run

    observer = split.verbs.pop("observer", None)
    if made.data is not None and not _told_apart(model, made.data, split.sink):
        options.setdefault("gates", Gates(min_ok=1))
    with tempfile.TemporaryDirectory(prefix="gristmill-") as folder:
        job = Job(made, as_model(model), as_sink(os.path.join(folder, "out"), **split.sink), **options)
        try:
            report = _ran(job.spec, observer, _lost, functools.partial(run, **split.verbs))
            table = report.read().to_table()
            return with_index(table, source if of is None else of, bool(job.spec.steps))
        except GateFailed as e:
            if e.report is None or not e.report.rows_dead:
                raise
            way = "keep= columns that tell which row an answer is of, or gates= how many may be missing"
            raise GateFailed(f"{_dead_rows(e.report)}; say with {way}", report=e.report) from None


def _told_apart(model: Any, rows: Any, sink: Mapping[str, Any]) -> bool:
    """Whether the answers without a sink have something of the rows in memory beside them, which tells whose they are:
    what is kept, where that is said, and what a text model keeps anyway. A function says itself what its rows are, so
    that nobody knows.
    """
    if sink.get("row_id") or sink.get("keep") is not None:
        return bool(sink.get("row_id") or sink["keep"])
    columns = getattr(rows, "column_names", None) or list(getattr(rows, "columns", ()))
    return isinstance(model, (TextEmbedder, TextClassifier)) and len(columns) > 1


def _ran(
    spec: JobSpec, observer: Observer | None, told: Callable[[Report], str], verb: Callable[..., Report]
) -> Report:
    """Run a job, under the observer given or the one that fits; `told` puts its dead rows into words."""
    from gristmill.observe.logging import logged
    from gristmill.observe.warned import Warned
    from gristmill.plan.secret import secrets_in

    warned = Warned(observer or _watching(bar=True))
    with logged(observer or warned, spec.running.log, list(secrets_in(spec))) as heard:
        report = verb(spec, observer=heard)
    if report.rows_dead:
        warned.warn(told(report))
    warned.settle()
    return report


def _dead_letters(report: Report) -> str:
    from gristmill.gating import told

    return f"{report.sink}: {told(report.counts, report.errors)}; report.dead(), gristmill dead {report.sink} show them"


def _lost(report: Report) -> str:
    return f"{_dead_rows(report)}; they are not in the table, and a sink would keep them as dead letters"


def _dead_rows(report: Report) -> str:
    """How many there are and why: there is no sink in which a person could look."""
    kinds = ", ".join(f"{name}: {count}" for name, count in report.errors.items())
    text = f"{report.rows_dead} of {report.rows_in} rows could not be scored{f' ({kinds})' if kinds else ''}"
    for row in report.dead().slice(0, 1).to_pylist():
        text += f"; the first is at position {row['position']}: {row['error']}: {row['message']}"
    return text


def _fields(spec: type) -> set[str]:
    import dataclasses

    return {f.name for f in dataclasses.fields(spec)} - {"model", "text"}


def _watching(*, bar: bool) -> Observer:
    """What shows a run: with `bar` the progress bar where a person is watching, at a terminal or in a notebook. Its
    notes and what the user's code prints are shown wherever stderr goes.
    """
    from gristmill.observe.events import Silent
    from gristmill.observe.notebook import in_notebook
    from gristmill.observe.progress import Notes, make_observer
    from gristmill.observe.streams import is_terminal

    if in_notebook():
        from gristmill.observe.notebook import Cell, NotebookBar

        return NotebookBar() if bar else Cell()
    if sys.stderr is None:
        return Silent()
    return make_observer("auto", sys.stderr) if bar and is_terminal(sys.stderr) else Notes(sys.stderr)


def _job(sink: Any) -> Job | None:
    """The job that is given or named; None for a sink."""
    from gristmill.plan.jobfile import is_job

    if isinstance(sink, Job):
        return sink
    if not isinstance(sink, (str, os.PathLike)):
        return None
    text = os.fspath(sink)
    return load_job(text) if not os.path.isdir(text) and is_job(text) else None


def _place(
    sink: Any, storage: Mapping[str, Any] | None = None, missing: type[GristmillError] = BadJob
) -> tuple[str, Any]:
    from gristmill.commit.places import opened
    from gristmill.plan.job import Sink
    from gristmill.running import sink_place

    job = _job(sink)
    if job is not None:
        if job.spec.sink is None:
            raise BadJob(f"{job!r} has no sink")
        return sink_place(job.spec.sink)
    if isinstance(sink, Sink):
        return sink_place(sink)
    if isinstance(sink, Report):
        return sink.opened or opened(sink.sink, storage)
    text: str = os.fspath(sink)
    if "://" in text:
        return opened(text, storage)
    if os.path.isdir(text):
        return opened(text)
    raise missing(f"{text}: no result, as there is no such sink or job: give the folder a job writes to, or the job")

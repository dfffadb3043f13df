"""What a person writes in Python: Job and its verbs, and counterparts of the commands."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, overload

from gristmill.errors import BadJob, BadSource, GateFailed, GristmillError
from gristmill.job.annotations import options_of, whole
from gristmill.job.job import JobSpec, as_sink, as_source, describe
from gristmill.job.keywords import (
    ApplyOptions,
    ClassifyOptions,
    DeliveryOptions,
    EmbedOptions,
    JobOptions,
    OutputOptions,
    PredictOptions,
    PromptOptions,
    RowOptions,
    RunBatchOptions,
    ScoringOptions,
    Verbs,
    named,
    names_of,
)
from gristmill.job.options import Gates, as_engine, default_engine
from gristmill.job.prompts import Prompt
from gristmill.job.requests import Requests, batch_ends
from gristmill.job.scores import Score
from gristmill.job.specs import (
    OnnxModel,
    SklearnModel,
    TextClassifier,
    TextEmbedder,
    TorchScriptModel,
    as_model,
    saved_model,
)
from gristmill.observe.events import Observer
from gristmill.observe.report import Report
from gristmill.process.scratch import passing
from gristmill.values import dataclass

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Unpack

    from gristmill.commit.documents import Delivered
    from gristmill.comparison.comparison import Comparison
    from gristmill.comparison.diff import Diff
    from gristmill.comparison.side import Side
    from gristmill.files.contract import Files
    from gristmill.job.job import Sink
    from gristmill.proof.proof import Proof
    from gristmill.result.verify import Verdict
    from gristmill.stores.lookup import Lookup

    Path = str | os.PathLike[str]
    Place = Path | Sink


_OF_FILES = ("format", "partition_by", "sort_by", "files", "merge", "index")  # options that a table cannot have
# Types in which a single column may come.
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

    Options say what happens to rows that fail (on_null=, on_nan=, gates=, audit=), to new files (on_new_files=), and
    how the job runs (engine=, workers=, batch_tokens=, …). Without engine=, it is the one that the environment variable
    GRISTMILL_ENGINE names, or "local". Raises BadJob for an option that does not exist, or a value that it cannot have.
    """

    @named("Job", JobOptions)
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
        """A Job for a description built elsewhere."""
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
        """Score every row and publish. Running again resumes, or finds nothing to do.

        Raises BadJob if the job cannot run as it is written, RunFailed if it stopped and can be resumed, GateFailed if
        more rows are dead letters than `gates` allows (1 %, but always one), PlanChanged if input, model or code differ
        from those of the answers that the sink holds, and SinkBusy if another run holds the sink. Dead rows that the
        gates allow are reported by a GristmillWarning.
        """
        spec = self.spec
        if engine is not None:
            spec = replace(spec, engine=spec.engine.named(engine) if isinstance(engine, str) else as_engine(engine))
        from gristmill.driver import warmup

        warmup.start(spec)
        from gristmill.driver.run import run  # which is slow

        verb = functools.partial(run, restart=restart, append=append, accept=accept)
        return _ran(spec, observer, _dead_letters, verb)

    @named("Job.preview")
    def preview(self, rows: int = 20) -> Any:
        """The output of the first rows, as an Arrow table. Leaves nothing in the sink.

        Rows that fail are reported by a GristmillWarning. Raises RunFailed, with the first row's traceback, if all
        fail.
        """
        from gristmill.driver.views import preview
        from gristmill.job.secret import secrets_in
        from gristmill.observe.observers import logged
        from gristmill.observe.warnings import Warned

        if not (count := whole(1)).holds(rows):
            raise BadJob(f"preview rows is {rows!r}: {count.words}")
        warned = Warned(_watching(bar=False))
        with logged(warned, None, list(secrets_in(self.spec))) as heard:
            found = preview(self.spec, int(rows), heard)
        if (failure := found.failure()) is not None:
            raise failure
        for row in found.dead.slice(0, 3).to_pylist():
            warned.warn(
                f"row {row['position']} of {row['source']} failed ({row['stage']}): {row['error']}: {row['message']}"
            )
        if found.dead.num_rows > 3:
            warned.warn(f"{found.dead.num_rows} of the rows previewed failed; the first 3 are shown")
        if found.filtered and not found.rows.num_rows and not found.dead.num_rows:
            warned.warn(f"filters left out all {found.filtered:,} rows that were read: the model was not called")
        warned.settle()
        return found.rows

    @named("Job.plan")
    def plan(self) -> Any:
        """What would run: shards, rows, bytes, null counts."""
        from gristmill.driver.views import plan

        return plan(self.spec)

    @named("Job.tune")
    def tune(self, budgets: Sequence[int] | None = None, *, rounds: int = 3) -> Any:
        """Measure throughput over batch sizes on the job's own rows; later runs on this machine use what was found.

        The result has .knee, .rates, .best, .budgets and .arrangements; `gristmill tune` shows them as a table and a
        curve.
        """
        from gristmill.tuning.sweep import tune

        return tune(self.spec, budgets, rounds=rounds)

    @named("Job.stream")
    def stream(self) -> Iterator[Any]:
        """Yield finished output tables in the order of the source, in bounded memory.

        Nothing is written to the sink, but its options such as `keep` apply. Dead letters are in none of the tables;
        `run` keeps them. Raises GateFailed as soon as there are more of them than `gates` allows; fewer are reported by
        a GristmillWarning. Leaving the loop early stops the job.
        """
        from gristmill.process.startup import of_this_process

        return of_this_process(self._streamed(), "a stream")

    def _streamed(self) -> Generator[Any, None, None]:
        from gristmill.commit.gates import told
        from gristmill.driver.apart import check_files
        from gristmill.driver.views import stream
        from gristmill.job.secret import secrets_in
        from gristmill.observe.observers import logged
        from gristmill.observe.warnings import Warned

        check_files(self.spec)
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
@named("embed", EmbedOptions)
def embed(
    source: Any,
    sink: Place | None = None,
    *,
    text: str | None = None,
    model: str,
    output: str = "embedding",
    **options: Unpack[EmbedOptions],
) -> Any:
    """Embed a text column: adds the vector column `output`. Returns a Report if there is a sink, else an Arrow table.

    `source` is a path or pattern, a `gm.source`, a DataFrame, an Arrow table or a list of dicts. A list, Series or
    array of strings is taken as the texts themselves, in a column named `text` ("text" by default); for a list of
    paths, use `gm.source`.

    Raises GateFailed if more rows fail than `gates` allows (1 %, but always one); fewer are reported by a
    GristmillWarning. For rows in memory and no sink, no row may fail, unless `gates` is given, or `keep` or `row_id`
    give the table a column that tells its rows apart.

    The index of a DataFrame is kept in the table as pyarrow keeps it, so that `to_pandas()` restores it, unless some
    rows have no answer or the job has steps, which is reported by a GristmillWarning.

    Options are those of TextEmbedder (prompt=, backend=, …), the source (where=, limit=, …), the sink (keep=, …) and
    the job. Raises BadJob for any other.
    """
    given: dict[str, Any] = dict(options)
    names = options_of(TextEmbedder).keys() - {"model", "text", "output"}
    rows, text = _texts("embed", source, text)
    spec = TextEmbedder(model, text, output, **{k: given.pop(k) for k in list(given) if k in names})
    return _run(rows, sink, spec, given, of=source, keeps=True)


@overload
def classify(
    source: Any, sink: None = None, *, text: str | None = None, model: str, **options: Unpack[ClassifyOptions]
) -> pa.Table: ...
@overload
def classify(
    source: Any, sink: Place, *, text: str | None = None, model: str, **options: Unpack[ClassifyOptions]
) -> Report: ...
@named("classify", ClassifyOptions)
def classify(
    source: Any, sink: Place | None = None, *, text: str | None = None, model: str, **options: Unpack[ClassifyOptions]
) -> Any:
    """Classify a text column: adds `label` and `score`, and `scores` with all_scores=True. Otherwise like `embed`."""
    given: dict[str, Any] = dict(options)
    names = options_of(TextClassifier).keys() - {"model", "text"}
    rows, text = _texts("classify", source, text)
    spec = TextClassifier(model, text, **{k: given.pop(k) for k in list(given) if k in names})
    return _run(rows, sink, spec, given, of=source, keeps=True)


@overload
def predict(source: Any, sink: None = None, *, model: Path, **options: Unpack[PredictOptions]) -> pa.Table: ...
@overload
def predict(source: Any, sink: Place, *, model: Path, **options: Unpack[PredictOptions]) -> Report: ...
@named("predict", PredictOptions)
def predict(source: Any, sink: Place | None = None, *, model: Path, **options: Unpack[PredictOptions]) -> Any:
    """Run a saved model over feature columns: a scikit-learn estimator (.skops, .joblib, .pkl), an ONNX graph (.onnx)
    or a TorchScript file (.pt, .pth). Without `features`, the columns are those that it was fitted with, or that the
    graph's inputs name. Otherwise like `embed`; the options are those of `SklearnModel`, `OnnxModel` or
    `TorchScriptModel`.
    """
    given: dict[str, Any] = dict(options)
    names = {name for kind in (SklearnModel, OnnxModel, TorchScriptModel) for name in options_of(kind)}
    chosen = {k: given.pop(k) for k in list(given) if k in names}
    from gristmill.models.registrations import file_of

    options_of(SklearnModel)["model"].check(model)
    file = os.fspath(model)
    return _run(source, sink, saved_model(file, file_of(file), **chosen), given, keeps=True)


@overload
def prompt(
    source: Any, sink: None = None, *, prompt: str | None = None, model: str, **options: Unpack[PromptOptions]
) -> pa.Table: ...
@overload
def prompt(
    source: Any, sink: Place, *, prompt: str | None = None, model: str, **options: Unpack[PromptOptions]
) -> Report: ...
@named("prompt", PromptOptions)
def prompt(
    source: Any, sink: Place | None = None, *, prompt: str | None = None, model: str, **options: Unpack[PromptOptions]
) -> Any:
    """Ask a language model a prompt for each row: adds `answer`, or the columns of `returns`. Otherwise like `embed`;
    the options are those of `Prompt`.
    """
    given: dict[str, Any] = dict(options)
    names = options_of(Prompt).keys() - {"prompt", "llm"}
    spec = Prompt(prompt, model, **{k: given.pop(k) for k in list(given) if k in names})
    return _run(_texts("prompt", source, "text")[0], sink, spec, given, of=source, keeps=True)


@overload
def score(
    source: Any, sink: None = None, *, prompt: str, model: str, **options: Unpack[ScoringOptions]
) -> pa.Table: ...
@overload
def score(source: Any, sink: Place, *, prompt: str, model: str, **options: Unpack[ScoringOptions]) -> Report: ...
@named("score", ScoringOptions)
def score(source: Any, sink: Place | None = None, *, prompt: str, model: str, **options: Unpack[ScoringOptions]) -> Any:
    """Score continuations of a prompt by a language model: adds `score` and `score_tokens`, and for several
    `score_best`. Otherwise like `embed`; the options are those of `Score`.
    """
    given: dict[str, Any] = dict(options)
    names = options_of(Score).keys() - {"prompt", "llm"}
    spec = Score(prompt, model, **{k: given.pop(k) for k in list(given) if k in names})
    return _run(_texts("score", source, "text")[0], sink, spec, given, of=source, keeps=True)


@named("run_batch", RunBatchOptions)
def run_batch(input_file: Path, output_file: Path, *, model: str, **options: Unpack[RunBatchOptions]) -> Report:
    """Send every request of a file in OpenAI's batch form, and write what became of each, in the same order, to a file
    named .jsonl or a folder. The options are those of `Requests` and of the job.
    """
    given: dict[str, Any] = dict(options)
    names = options_of(Requests).keys() - {"llm"}
    spec = Requests(model, **{k: given.pop(k) for k in list(given) if k in names})
    ends = batch_ends(os.fspath(input_file), os.fspath(output_file))
    found: Report = _run(ends["source"], ends["sink"], spec, {"gates": ends["gates"], **given})
    return found


@overload
def apply(
    source: Any, sink: None = None, *, fn: Any, args: Mapping[str, Any] | None = None, **options: Unpack[ApplyOptions]
) -> pa.Table: ...
@overload
def apply(
    source: Any, sink: Place, *, fn: Any, args: Mapping[str, Any] | None = None, **options: Unpack[ApplyOptions]
) -> Report: ...
@named("apply", ApplyOptions)
def apply(
    source: Any,
    sink: Place | None = None,
    *,
    fn: Any,
    args: Mapping[str, Any] | None = None,
    **options: Unpack[ApplyOptions],
) -> Any:
    """Run a function on batches of rows, or a class that each worker builds once with `args`.

    An output row is what it returns for the row, plus the columns in `keep`. Returns a Report if there is a sink, else
    an Arrow table, like `embed`.
    """
    given: dict[str, Any] = dict(options)
    chosen = {k: given.pop(k) for k in ("batch_format", "takes", "returns", "output", "concurrency") if k in given}
    return _run(source, sink, as_model(fn, **chosen, **dict(args or {})), given)


@named("run", Verbs)
def run(job: Any, **verbs: Unpack[Verbs]) -> Report:
    """Run a Job, or a job file, FILE.py[:NAME] or MODULE:NAME."""
    return _made(job).run(**verbs)


@named("load_job")
def load_job(
    ref: str, *, variables: Mapping[str, str] | None = None, profile: str | None = None, sets: Sequence[str] = ()
) -> Job:
    """A job from job.yaml, FILE.py[:NAME] or MODULE:NAME. Raises BadJob, naming the key and the place."""
    from gristmill.jobfile.jobfile import load

    return Job.of(load(ref, variables=variables or {}, profile=profile, sets=sets, environ=os.environ))


@named("plan")
def plan(job: Any) -> Any:
    """What a Job, a job file, FILE.py[:NAME] or MODULE:NAME would do: shards, rows, bytes, null counts."""
    return _made(job).plan()


@named("tune")
def tune(job: Any, budgets: Sequence[int] | None = None, *, rounds: int = 3) -> Any:
    """Measure which batch sizes are fastest for a Job, a job file, FILE.py[:NAME] or MODULE:NAME, on its own rows, as
    `Job.tune` does.
    """
    return _made(job).tune(budgets, rounds=rounds)


@named("schema")
def schema() -> dict[str, Any]:
    """The JSON Schema of job files, as `gristmill schema` prints it."""
    from gristmill.jobfile.sections import json_schema

    return json_schema()


def _made(job: Any) -> Job:
    if not isinstance(job, (Job, str, os.PathLike)):
        raise BadJob(f"job is {job!r:.60}: give a gm.Job, or, as text, a job file, FILE.py[:NAME] or MODULE:NAME")
    return job if isinstance(job, Job) else load_job(os.fspath(job))


@named("read")
def read(sink: Any, storage: Mapping[str, Any] | None = None) -> Any:
    """A pyarrow Dataset of exactly what is published, in the order of the source. It also has `.to_pandas()`,
    `.to_polars()` and `.to_numpy("embedding")`.

    `sink` is a folder or URI, the job that writes there (or its file), or a run's Report. `storage` has the options of
    an object store, as for a sink. Rows that were retried or appended come after the others; with partition_by, the
    rows of a partition are together. If a run publishes another result, the Dataset continues to read the one that it
    was created from, until the run after that. `"scores/@3"` is what generation 3 of a sink had published, and
    `"scores/@staged"` what a gate holds back, as it would be published. Raises BadSource if nothing is published, or if
    the sink's format is npy (read its manifest.parquet).
    """
    from gristmill.commit.staged import result_named
    from gristmill.job.uris import generation_named
    from gristmill.result.reading import rows_of

    at, generation = generation_named(os.fspath(sink)) if isinstance(sink, (str, os.PathLike)) else (sink, None)
    return rows_of(result_named(*_place(at, storage, BadSource), generation))


@named("dead")
def dead(sink: Any, storage: Mapping[str, Any] | None = None, generation: int | None = None) -> pa.Table:
    """The dead letters of a sink as an Arrow table, one row each; `payload` is JSON text. `sink` is as in `read`.

    If nothing is published yet, or `generation` is that of an unfinished run, they are those it has committed so far.
    """
    from gristmill.result.reading import dead as of_root

    if isinstance(sink, Report) and generation is None:
        generation = sink.generation
    return of_root(*_place(sink, storage, BadSource), generation=generation)


@named("reduced")
def reduced(sink: Any, storage: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The files that the job's `reduce` made of the published result, by name: their paths. `sink` is as in `read`.

    Raises BadSource if nothing is published.
    """
    from gristmill.commit.publication import published
    from gristmill.result.reduction import files_of

    return files_of(published(*_place(sink, storage, BadSource)))


@named("retry_dead")
def retry_dead(job: Any, *, accept_code_change: bool = False, observer: Observer | None = None) -> Report:
    """Score the dead letters of a job's sink again, usually after a fix. Rows that now succeed are added to the result,
    after the others. `job` is the job that wrote the sink, or its file.

    Raises PlanChanged if the code has changed and `accept_code_change` is not set, BadJob for a job without a sink.
    """
    from gristmill.driver.run import retry_dead as retried
    from gristmill.jobfile.jobfile import is_job

    if isinstance(job, (str, os.PathLike)) and not is_job(os.fspath(job)):
        raise BadJob(
            f"job is {os.fspath(job)!r}, which is no job: give the gm.Job that wrote the sink, or its file; only the "
            "command takes the sink itself: gristmill retry-dead SINK"
        )
    return _ran(
        _made(job).spec, observer, _dead_letters, functools.partial(retried, accept_code_change=accept_code_change)
    )


@named("status")
def status(sink: Any, storage: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """How far the run on a sink is, as a dict with state, counts and shards, from the sink's files alone.

    `sink` is as in `read`. `storage` has the options of an object store, as in `gm.sink(…)`; a job brings its own.
    """
    from gristmill.driver.views import stands as of_root

    return of_root(*_place(sink, storage))


@named("verify")
def verify(sink: Any, storage: Mapping[str, Any] | None = None, *, deep: bool = False, source: bool = False) -> Verdict:
    """Recount and re-hash what is published, and compare it with plans, receipts and dead letters.

    The verdict has .ok, .lines and .as_dict(). `sink` and `storage` are as in `read`. With `deep`, all values are read
    again, as `gm.read` reads them. With `source`, the source is read again and must hold what every shard read; give
    the job if reaching the source needs options or secrets.
    """
    from gristmill.driver.views import verify as of_root

    job = _job(sink)
    of_job = job.spec.source if job and source else source
    stores = job.spec.deliver if job else ()
    return of_root(*_place(job or sink, storage), deep=deep, source=of_job, deliver=stores)


@named("deliver", DeliveryOptions)
def deliver(
    sink: Any,
    to: Any,
    *,
    take_over: bool = False,
    storage: Mapping[str, Any] | None = None,
    **options: Unpack[DeliveryOptions],
) -> Delivered:
    """Bring what a sink has published to a store, in one step for its readers; nothing is scored. If the store has it
    already, nothing happens. `sink` and `storage` are as in `read`; `to` is an address or `gm.to(…)`, and the options
    are those of `gm.to`. If the store has a later result of a copy of the sink, as after one of the two was restored
    from a backup, `take_over=True` brings this one nevertheless.

    Returns the receipt: .to, .mode, .rows, .generation. Raises BadJob for a store that cannot be reached or does not
    fit, BadSource if nothing is published, SinkBusy if a run is at work, RunFailed.
    """
    from gristmill.driver.delivering import deliver as delivered
    from gristmill.job.delivery import as_deliveries
    from gristmill.job.delivery import to as delivery_to

    if options and not isinstance(to, (str, os.PathLike)):
        raise BadJob(f"deliver: {next(iter(options))}= goes into gm.to(…), which is given")
    wanted = as_deliveries([delivery_to(to, **options) if options else to])
    root, files = _place(sink, storage, BadSource)
    return delivered(root, files, _name_of(sink), wanted, _told, _watching(bar=True), take_over)[0]


def _told(text: str) -> None:
    """Messages of a verb that has no observer."""
    from gristmill.observe.events import Note

    _watching(bar=False).note(Note("info", text))


@named("lookup")
def lookup(at: Any, key: Sequence[str] | str | None = None, *, storage: Mapping[str, Any] | None = None) -> Lookup:
    """Look rows up by key, where a result was delivered or in a sink: `.get(key)` is the row as a dict, or None;
    `.get_many(keys)` a list of them, all of one published generation. When a next one is published, it is used.
    `.nearest(vector, k)` are the rows whose vectors are nearest, with their `_distance`.

    `at` is a store's address (`lmdb:///FILE`, `redis://HOST/0#prefix`, `duckdb:///FILE#table`, …), a `gm.to(…)`, or a
    sink, as in `read`. `key` names the columns to look up by: by default those of the delivery, or of the sink. Several
    threads may use it; close it, or use it in a `with` statement. Raises BadSource if nothing is published there.
    """
    from gristmill.job.delivery import Delivery, is_store
    from gristmill.stores.lookup import in_store
    from gristmill.stores.sinkrows import in_sink

    columns = (key,) if isinstance(key, str) else tuple(key or ())
    if isinstance(at, Delivery) or (isinstance(at, str) and is_store(at)):
        return in_store(at, columns)
    return in_sink(*_place(at, storage, BadSource), columns)


@named("compare")
def compare(
    a: Any,
    b: Any,
    on: Sequence[str] | str | None = None,
    columns: Sequence[str] | str | None = None,
    *,
    tolerance: float = 1e-5,
    examples: int = 5,
    min_agreement: float | None = None,
    storage: Mapping[str, Any] | None = None,
) -> Comparison:
    """Where two results differ: two prompts, models or nights over the same rows.

    `a`, `b` and `storage` are as in `read`. `on` are the columns that tell rows apart in both; without it, the `row_id`
    column, the `key` columns or the key of `update` of both jobs, if these are the same and were kept. `columns` are
    compared: without it, those in which both models answered. Labels (texts, whole numbers, true and false) are counted
    in pairs; numbers are compared by their absolute difference, the same within `tolerance`; vectors by their cosine;
    all other values for equality. Of each column up to `examples` rows that differ are kept, those furthest apart
    first.

    Memory is bounded: keys and row numbers are joined by DuckDB, and rows that are in another order in `b` are put in
    that of `a` on disk, in the temporary folder (TMPDIR).

    The comparison has .matched, .only_a, .only_b, .columns, ["label"] and .as_dict(); printed, it is the command's
    tables. Raises BadJob for columns that cannot be compared and for keys that repeat in a result, BadSource if nothing
    is published, and, with `min_agreement` (0 to 1), GateFailed with the comparison as its `.report` if the agreement
    of a column is less, or if no row is in both.
    """
    from gristmill.comparison.compare import check
    from gristmill.comparison.compare import compare as compared

    one, other = (_side(sink, storage) for sink in (a, b))
    keys, names = ((given,) if isinstance(given, str) else given for given in (on, columns))
    found = compared(one, other, keys, names, tolerance=tolerance, examples=examples, min_agreement=min_agreement)
    check(found, min_agreement)
    return found


@named("diff")
def diff(
    a: Any,
    b: Any,
    on: Sequence[str] | str | None = None,
    columns: Sequence[str] | str | None = None,
    *,
    tolerance: float = 1e-5,
    examples: int = 5,
    storage: Mapping[str, Any] | None = None,
) -> Diff:
    """What changed from one result to another, such as two nights: rows that are new in `b`, gone from `a`, or answered
    otherwise, and what differs of columns, model, code and input.

    `a`, `b` and `storage` are as in `read`; `"scores/@3"` is what generation 3 of a sink had published, as long as its
    files are kept, until the next but one is published, and `"scores/@staged"` what a gate holds back. `on` and
    `columns` are as in `compare`. Numbers, also in vectors, are the same answer within `tolerance`. Memory is bounded
    as that of `compare` is.

    The diff has .new, .gone, .changed, .same, .columns, .about, up to `examples` rows of each sort, and .as_dict().
    Raises BadJob for columns that cannot be compared and for keys that repeat, BadSource if nothing is published, or
    the files of a generation are gone.
    """
    from gristmill.comparison.diff import diff as changes

    keys, names = ((given,) if isinstance(given, str) else given for given in (on, columns))
    return changes(_side(a, storage), _side(b, storage), keys, names, tolerance=tolerance, examples=examples)


@named("prove")
def prove(
    sink: Any,
    row: Any,
    key: Sequence[str] | str | None = None,
    *,
    root: str | None = None,
    source: bool = False,
    storage: Mapping[str, Any] | None = None,
) -> Proof:
    """Which input, model, code and run made the answer of a row, and the proof: the row's file, the receipt of its
    shard and the plan are hashed again, and have to lead to the root of the result.

    `sink` and `storage` are as in `read`. `row` is a row's id or key, of the columns `key` (by default those of the
    job; of several a tuple), or "FILE:POSITION", as dead letters tell it. With `root`, the result has to have that one,
    which you have kept elsewhere; with `source`, the source is read again, and has to hold what the shard read.

    The proof has .ok, .row, .inputs, .model, .code, .run, .checks and .as_dict(). Raises BadKey if there is no such
    row, BadSource if nothing is published, and PlanChanged if a file that is needed cannot be read.
    """
    from gristmill.commit.staged import result_named
    from gristmill.job.uris import generation_named
    from gristmill.proof.prove import Asked
    from gristmill.proof.prove import prove as proved

    at, generation = generation_named(os.fspath(sink)) if isinstance(sink, (str, os.PathLike)) else (sink, None)
    place = _place(at, storage, BadSource)
    result = result_named(*place, generation)
    columns = (key,) if isinstance(key, str) else tuple(key or ())
    job = _job(sink)
    of_job = job.spec.source if job and source else source
    return proved(result, _name_of(sink), Asked(row, columns, root, of_job))


def _side(sink: Any, storage: Mapping[str, Any] | None) -> Side:
    from gristmill.comparison.side import Side
    from gristmill.job.uris import generation_named

    at, generation = generation_named(os.fspath(sink)) if isinstance(sink, (str, os.PathLike)) else (sink, None)
    place = _place(at, storage, BadSource)
    return Side.at(_name_of(sink), *place, generation)


def _name_of(sink: Any) -> str:
    """How messages call a place."""
    from gristmill.job.uris import redact

    if (job := _job(sink)) is not None:
        return repr(job) if job.spec.sink is None else redact(job.spec.sink.uri)
    return redact(str(getattr(sink, "uri", None) or getattr(sink, "sink", None) or os.fspath(sink)))


# ---------------------------------------------------------------- inside


@dataclass(frozen=True)
class _Split:
    source: dict[str, Any] = field(default_factory=dict)
    sink: dict[str, Any] = field(default_factory=dict)
    verbs: dict[str, Any] = field(default_factory=dict)


def _texts(verb: str, source: Any, column: str | None) -> tuple[Any, str]:
    """The source, with bare texts turned into a table, and their column. Raises BadJob if none is named."""
    from gristmill.arrow.frompython import is_from

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
        if isinstance(source, str) and " " in source and not (set(source) & set("/*?[") or os.path.exists(source)):
            raise BadJob(
                f"{verb}: {source!r:.60} is no file: texts are given as a list, [{source!r:.40}], and of a file text= "
                "names the column that holds them"
            )
        raise BadJob(f"{verb} needs text=: the column that holds the texts, for example text='body'")
    return source, column


def _run(source: Any, sink: Any, model: Any, options: dict[str, Any], of: Any = None, keeps: bool = False) -> Any:
    """`of` is what a source of bare texts was built from; `keeps`, that the model keeps the columns that it does not
    read.
    """
    split = _Split()
    for name in list(options):
        for group, kind in ((split.source, RowOptions), (split.sink, OutputOptions), (split.verbs, Verbs)):
            if name in names_of(kind):
                group[name] = options.pop(name)
    if sink is None and (given := [n for n in _OF_FILES if split.sink.get(n)]):
        raise BadJob(
            f"{given[0]}= is an option of a sink's files, and no sink is given: give a sink, or leave {given[0]}= out"
        )
    made = as_source(source, **split.source)
    if sink is not None:
        return Job(made, model, as_sink(sink, **split.sink), **options).run(**split.verbs)
    from gristmill.driver.run import run
    from gristmill.sources.memory import with_index

    observer = split.verbs.pop("observer", None)
    if made.data is not None and not _told_apart(keeps, made.data, split.sink):
        options.setdefault("gates", Gates(min_ok=1))
    with passing() as folder:
        job = Job(made, as_model(model), as_sink(os.path.join(folder, "out"), **split.sink), **options)
        try:
            report = _ran(job.spec, observer, _lost, functools.partial(run, **split.verbs))
            table = report.read().to_table()
            return with_index(table, source if of is None else of, job.spec)
        except GateFailed as e:
            if e.report is None or not e.report.rows_dead:
                raise
            way = "keep= which columns identify a row, or with gates= how many answers may be missing"
            raise GateFailed(f"{_dead_rows(e.report)}; say with {way}", report=e.report) from None


def _told_apart(keeps: bool, rows: Any, sink: Mapping[str, Any]) -> bool:
    """Whether answers without a sink are accompanied by columns of the rows in memory that identify them: those named
    to be kept, and those that a model `keeps` anyway. A function decides itself what its rows are, so for it this is
    unknown.
    """
    if sink.get("row_id") or sink.get("keep") is not None:
        return bool(sink.get("row_id") or sink["keep"])
    columns = getattr(rows, "column_names", None) or list(getattr(rows, "columns", ()))
    return keeps and len(columns) > 1


def _ran(
    spec: JobSpec, observer: Observer | None, told: Callable[[Report], str], verb: Callable[..., Report]
) -> Report:
    """Run a job, under the given observer or one that fits; `told` puts its dead rows into words."""
    from gristmill.driver.apart import check_files
    from gristmill.job.secret import secrets_in
    from gristmill.observe.observers import check, logged
    from gristmill.observe.warnings import Warned

    if observer is not None:
        check(observer)
    check_files(spec)
    warned = Warned(observer or _watching(bar=True))
    with logged(observer or warned, spec.running.log, list(secrets_in(spec))) as heard:
        report = verb(spec, observer=heard)
    if report.rows_dead:
        warned.warn(told(report))
    warned.settle()
    return report


def _dead_letters(report: Report) -> str:
    from gristmill.commit.gates import told

    return f"{report.sink}: {told(report.counts, report.errors)}; report.dead(), gristmill dead {report.sink} show them"


def _lost(report: Report) -> str:
    return f"{_dead_rows(report)}; they are not in the table, and a sink would keep them as dead letters"


def _dead_rows(report: Report) -> str:
    """How many dead rows there are and why: there is no sink in which a person could look."""
    kinds = ", ".join(f"{name}: {count}" for name, count in report.errors.items())
    text = f"{report.rows_dead} of {report.rows_in} rows could not be scored{f' ({kinds})' if kinds else ''}"
    for row in report.dead().slice(0, 1).to_pylist():
        text += f"; the first is at position {row['position']}: {row['error']}: {row['message']}"
    return text


def _watching(*, bar: bool) -> Observer:
    """The observer that shows a run: with `bar` the progress bar if a person is watching, at a terminal or in a
    notebook. Notes and prints of the user's code are shown wherever stderr goes.
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
    """The given or named job; None for a sink."""
    from gristmill.jobfile.jobfile import is_job

    if isinstance(sink, Job):
        return sink
    if not isinstance(sink, (str, os.PathLike)):
        return None
    text = os.fspath(sink)
    return load_job(text) if not os.path.isdir(text) and is_job(text) else None


def _place(
    sink: Any, storage: Mapping[str, Any] | None = None, missing: type[GristmillError] = BadJob
) -> tuple[str, Files]:
    from gristmill.driver.opening import sink_place
    from gristmill.files.roots import opened
    from gristmill.job.delivery import is_store, staging_of
    from gristmill.job.job import Sink
    from gristmill.job.uris import file_named, local_path, records_of, redact

    job = _job(sink)
    if job is not None:
        if job.spec.sink is None:
            raise BadJob(f"{job!r} has no sink")
        return sink_place(job.spec.sink)
    if isinstance(sink, Sink):
        return sink_place(sink)
    if isinstance(sink, Report):
        return sink.opened or opened(sink.sink, storage)
    if not isinstance(sink, (str, os.PathLike)):
        raise missing(f"sink is {sink!r:.60}: give a folder or a URI, as text, a gm.Job or its file, or a gm.Report")
    text = os.fsdecode(sink)
    shown = redact(text)
    if is_store(text):
        text = staging_of(text, storage or {})
    if "://" in text:
        return opened(text, storage)
    if os.path.isdir(local_path(text)) or (file_named(text) and os.path.isdir(records_of(text))):
        return opened(text)
    raise missing(f"{shown}: no result: there is no such sink or job; give the folder a job writes to, or the job")

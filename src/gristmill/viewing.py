"""Looking at jobs and sinks without changing them: plan, preview, stream, status, verify."""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
import time
import weakref
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pyarrow as pa

from gristmill import backends, planning, rereading, tables
from gristmill.choosing import Held
from gristmill.commit import generation as generations
from gristmill.commit import publication, receipt
from gristmill.commit import verify as verifying
from gristmill.commit.store import LOCAL
from gristmill.errors import GateFailed, RunFailed
from gristmill.io.registry import sink_format
from gristmill.observe import units
from gristmill.observe.events import Observer
from gristmill.observe.report import Report
from gristmill.plan import shard
from gristmill.plan.contracts import Files, ModelInfo
from gristmill.plan.counts import Counts
from gristmill.plan.job import JobSpec, Sink, Source
from gristmill.plan.options import Gates
from gristmill.plan.processes import starting
from gristmill.plan.scratch import Folder
from gristmill.running import Run

COUNTED = 10_000  # receipts that are read to tell how far an unfinished run is: half a second
UNGATED = Gates(min_ok=0.0, allow_empty=True)  # for those who only look


@dataclass(frozen=True)
class PlanView:
    """What would run. `rows` and `shards` are estimates where said; sizes in bytes. `schema` and `nulls` are of the
    columns that are read. `problems` would stop the run.
    """

    files: int
    rows: int | None
    rows_estimated: bool
    bytes: int
    shards: int
    shards_estimated: bool
    workers: int
    nulls: dict[str, int]
    schema: list[tuple[str, str]]
    output: list[tuple[str, str | None]]
    model: ModelInfo
    backend: str = ""
    notes: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)


def plan(spec: JobSpec) -> PlanView:
    """What would run, from metadata alone. Raises BadJob where the job cannot run at all; broken gates are
    `problems`.
    """
    problems = []
    with tempfile.TemporaryDirectory(prefix="gristmill-") as folder, _of_files(spec) as spec:
        try:
            r = planning.resolve(spec, folder)
        except GateFailed as e:
            problems.append(str(e))
            r = planning.resolve(replace(spec, gates=UNGATED), folder)
    rows = r.rows
    table = shard.cut(r.files, r.selection, planning.shard_rows(r, None), max(1, r.workers))
    given = r.schema.names if r.columns is None else r.columns
    read = {*given, *(r.condition.columns if r.condition is not None else ())}
    kept = r.keep if r.keep is not None else [n for n in given if n not in (r.info.columns or ())]
    output: list[tuple[str, str | None]] = [
        (n, str(r.schema.field(n).type) if n in r.schema.names else None) for n in kept
    ]
    known = r.info.schema
    output += [(n, str(known.field(n).type) if known is not None else None) for n in r.info.outputs or ()]
    output = [(n, kind) for n, kind in output if spec.sink is None or n not in spec.sink.drop]
    timed = r.bytes > planning.UNTIMED_BYTES and spec.running.shard_rows == "auto"
    return PlanView(
        len(r.files), rows if rows is not None else round(r.estimated_rows), rows is None, r.bytes, shard.count(table),
        timed or rows is None, r.workers, {n: count for n, count in r.nulls.items() if n in read},
        [(f.name, str(f.type)) for f in r.schema if f.name in read], output, r.info,
        backends.foreseen(r), (*r.warnings, *([r.nulls_given] if r.nulls_given else [])), problems,
    )  # fmt: skip


@dataclass(frozen=True)
class Previewed:
    """What became of the first rows: those that were scored, as they would be written, and the dead letters of the
    others.
    """

    rows: pa.Table
    dead: pa.Table

    def failure(self) -> RunFailed | None:
        """What a run would make of a job that scores none of them; None where some were scored, or none failed."""
        if self.rows.num_rows or not self.dead.num_rows:
            return None
        first = self.dead.slice(0, 1).to_pylist()[0]
        which = f"the first is {first['source']}:{first['position']}, stage {first['stage']}"
        why = f"{first['error']}: {first['message']}\n{first['traceback'] or ''}".rstrip()
        return RunFailed(f"none of {units.plural(self.dead.num_rows, 'row')} was scored ({which}): {why}")


def preview(spec: JobSpec, rows: int, observer: Observer | None = None) -> Previewed:
    """What becomes of the first `rows` rows (for which `where` holds), scored by the job itself into a folder that
    goes. No gate holds for them. Raises RunFailed where the run itself stops.
    """
    starting("a preview")
    with _of_files(spec) as files:
        return _preview(files, rows, observer)


def _preview(spec: JobSpec, rows: int, observer: Observer | None) -> Previewed:
    limit = min(rows, spec.source.limit or rows)
    source = replace(spec.source, limit=None if spec.source.sample else limit)
    if spec.source.sample:
        source = replace(source, sample=min(rows, spec.source.sample))
    with tempfile.TemporaryDirectory(prefix="gristmill-") as folder:
        target = replace(
            spec.sink or Sink(folder),
            uri=os.path.join(folder, "preview"),
            format=None,
            options=_parquet_options(spec.sink),
            merge=False,
            partition_by=(),
            storage={},
        )
        workers = 0 if spec.engine.workers == 0 else 1
        small = replace(
            spec,
            source=source,
            sink=target,
            gates=UNGATED,
            audit=(),
            engine=replace(spec.engine, name="local", workers=workers, options={}),
        )
        report = Run(small, observer=observer).run()
        scored = report.read().to_table()
        if spec.sink is not None and scored.num_rows:  # what the job's own sink refuses, a run would
            form, options = sink_format(planning.sink_name(spec)), spec.sink.options
            form.writer(LOCAL, folder, "part", "preview", form.stored(scored, options), options).abort()
        return Previewed(scored, report.dead())


def _parquet_options(sink: Sink | None) -> Mapping[str, Any]:
    """Those of a sink where rows that are only looked at stand as Parquet: its own where it is one."""
    return sink.options if sink is not None and sink_format(sink.format or "parquet").name == "parquet" else {}


_open: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # streams, and the process that they are of


@atexit.register
def _close_all() -> None:
    """Streams that were left in the middle end before the interpreter does: later, nothing can be said or removed."""
    for left, process in list(_open.items()):
        if process == os.getpid():
            with contextlib.suppress(ValueError):  # another thread is inside
                left.close()


def stream(spec: JobSpec, observer: Observer | None = None) -> Generator[pa.Table, None, Report]:
    """See `_stream`; it ends before the interpreter does."""
    found = _stream(spec, observer)
    _open[found] = os.getpid()
    return found


def _stream(spec: JobSpec, observer: Observer | None) -> Generator[pa.Table, None, Report]:
    """Output tables, one a shard, in plan order, and at last the report. Parts are written to a folder of their own and
    removed as they are read, so that disk and memory hold only what is on its way. Raises GateFailed as soon as
    `min_ok` can no longer hold.
    """
    import pyarrow.parquet as pq

    starting("a job")
    with contextlib.ExitStack() as stack:
        made = Folder("gristmill-stream-", tempfile.gettempdir())
        stack.callback(made.remove)
        spec = stack.enter_context(_of_files(spec))
        root = os.path.join(made.path, "out")
        target = replace(
            spec.sink or Sink(root),
            uri=root,
            format="parquet",
            options=_parquet_options(spec.sink),
            merge=False,
            partition_by=(),
            storage={},
        )
        gates = replace(spec.gates, allow_empty=True)
        run = Run(replace(spec, sink=target, gates=gates), observer=observer, stream=True)
        for done in run.shards():
            for part in done.parts:
                if part.role == "rows":
                    yield pq.read_table(os.path.join(run.root, part.work), partitioning=None)
        return run.report


@contextlib.contextmanager
def _of_files(spec: JobSpec) -> Iterator[JobSpec]:
    """The job with files in the place of Spark tables in its source."""
    with tables.opened(replace(spec, sink=None)) as job:
        yield replace(job.spec, sink=spec.sink)


def status(root: str, files: Files = LOCAL) -> dict[str, Any]:
    """The state of a sink from its files alone: "running", "unfinished", "done" or "empty", with counts."""
    held = Held.by(root, files)
    body = None if held.latest is None else held.latest.body
    out: dict[str, Any] = {"sink": root, "published_generation": None if body is None else body["generation"]}
    if held.unfinished is not None:
        out.update(_unfinished(root, held.unfinished, files))
    else:
        out["state"] = "done" if body is not None else "empty"
    if body is not None:
        names = ("rows_in", "rows_ok", "rows_dead", "rows_filtered", "shards", "published", "model", "errors")
        out["published"] = {**{n: body[n] for n in names}, "skipped": body.get("skipped", [])}
        out.update({n: body[n] for n in ("rows_in", "rows_ok", "rows_dead", "rows_filtered") if out["state"] == "done"})
        if out["state"] == "done":
            out.update(shards_done=body["shards"], shards_total=body["shards"], share=1.0)
            out["skipped"] = body.get("skipped", [])
            out["counts"] = asdict(Counts(*body["counts_list"]))
    return out


def _unfinished(root: str, latest: generations.Generation, files: Files) -> dict[str, Any]:
    holder = files.holder(generations.meta(root))
    progress = generations.read_progress(latest) or {}
    out: dict[str, Any] = {
        **dict.fromkeys(("rows_ok", "rows_dead", "rows_filtered"), 0),
        **progress,
        "state": "running" if holder is not None else "unfinished",
        "generation": latest.number,
    }
    out["sink"] = root
    if holder is not None:
        out["held_by"] = holder
    else:
        out.update(rows_per_second=0.0, eta=None, workers=0)
    if latest.planned:
        out["shards_total"] = len(generations.read_plan(latest).shards)
        done = receipt.listed(latest.receipts, files)
        out["shards_done"] = len(done)
        if holder is None and len(done) <= COUNTED:  # exact, where the last that was said of it is a little older
            read = [found for paths in done.values() if (found := receipt.valid(paths, files)) is not None]
            counts = sum((Counts(*r.counts) for r in read), Counts())
            out.update(rows_done=counts.rows_in, rows_ok=counts.ok, rows_filtered=counts.all_filtered)
            out.update(rows_dead=counts.all_dead, shards_resumed=0)
        out["share"] = out["shards_done"] / max(1, out["shards_total"])
    if "at" in progress:
        out["seconds_ago"] = round(max(0.0, time.time() - progress["at"]), 1)
    return out


def verify(root: str, files: Files = LOCAL, *, deep: bool = False, source: Source | bool = False) -> verifying.Verdict:
    """Recount and re-hash every published file; see `commit.verify`. With `source` (True, or that of the job, which has
    the credentials) what every shard read is read again, too.
    """
    body = publication.published(root, files).body
    verdict = verifying.verify(root, sink_format(body["sink_format"]), files, deep=deep)
    if skipped := body.get("skipped"):
        verdict = replace(
            verdict, lines=(*verdict.lines, f"source: lacks what could not be read: {'; '.join(skipped)}")
        )
    if source is False:
        return verdict
    wrong = rereading.verify(Held.by(root, files).members(), source if isinstance(source, Source) else None)
    if not wrong:
        return replace(verdict, lines=(*verdict.lines, "source: holds what every shard read"))
    return replace(verdict, ok=False, lines=(*(() if verdict.ok else verdict.lines), *wrong))

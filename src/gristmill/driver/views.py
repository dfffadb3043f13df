"""Looking at jobs and sinks without changing them: plan, preview, stream, status, verify."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import tempfile
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa

from gristmill.commit import gates as gating
from gristmill.commit import generation as generations
from gristmill.commit import journal, onefile, publication, receipt
from gristmill.commit.documents import Described, ModelRecord
from gristmill.commit.ledger import Ledger
from gristmill.driver import (
    backends,
    budgets,
    delivering,
    drifting,
    opening,
    paces,
    pinning,
    planning,
    runrecord,
    selection,
    shipping,
    sizes,
    sourcecheck,
    tally,
    updating,
)
from gristmill.driver.deadline import Deadline
from gristmill.driver.estimate import estimate
from gristmill.driver.forecast import Forecast, by_rate
from gristmill.driver.planview import PlanView
from gristmill.driver.previewcheck import refuse_unfit, refuse_unready
from gristmill.driver.progressnote import last_said
from gristmill.driver.resolved import Resolved
from gristmill.driver.run import finish, streamed
from gristmill.driver.selection import Held
from gristmill.errors import GateFailed, PlanChanged, RunFailed
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL
from gristmill.job.delivery import Delivery
from gristmill.job.job import JobSpec, Sink, Source
from gristmill.job.options import EngineSpec, Gates
from gristmill.job.specs import Call, Step, changed
from gristmill.job.uris import file_of
from gristmill.observe import units
from gristmill.observe.events import Observer
from gristmill.observe.observers import Unpublished
from gristmill.observe.report import Report
from gristmill.observe.standing import standing
from gristmill.process import lasting
from gristmill.process.scratch import Folder, passing
from gristmill.process.startup import starting
from gristmill.result import verify as verifying
from gristmill.shards import shard
from gristmill.shards.counts import Counts, summed
from gristmill.sinks.formats import DEFAULT, sink_format
from gristmill.stores import sinkindex
from gristmill.values import dataclass

COUNTED = 10_000  # most receipts read to tell how far an unfinished run is: half a second
COPIED = 10_000  # rows of a store that are copied to be looked at, where the rest can be counted
FILTERED = 10_000  # most rows that a preview reads to find one that no filter drops
UNGATED = Gates(min_ok=0.0, allow_empty=True)  # for views that only look


def plan(spec: JobSpec) -> PlanView:
    """What would run, from metadata alone, for prompts also from some rows. Raises BadJob if the job cannot run at all;
    what else would stop a run is in `problems`: broken gates, a sink that holds a result of another job, stores.
    """
    gates: list[str] = []
    with lasting.during(spec.engine), passing() as folder:
        if spec.sink is not None:
            opening.look_at_sink(spec)
        held = _held(spec)
        pinned = None if held is None else pinning.looked_at(spec, held.root, held.files, folder, COPIED)

        def resolved(spec: JobSpec) -> Resolved:
            if held is None:
                return planning.resolve(spec, folder, first=COPIED)
            return opening.resolved(spec, held.root, held.files, folder, pinned, first=COPIED)

        try:
            r = resolved(spec)
        except GateFailed as e:
            gates.append(str(e))
            r = resolved(replace(spec, gates=UNGATED))
        drifting.foreseen(r)
        append = spec.on_new_files == "append"
        sink = "" if held is None else selection.outlook(held, r, append)
        refused = "" if held is None else selection.refusal(held, held.root, r, append)
        anew = updating.foreseen(held, r) if refused and held is not None and spec.update is not None else ""
        if anew:  # what differs is what an update is for
            refused, sink = "", anew
        elif held is not None and not refused:
            gates += _held_back(spec, held)
        stores = _stores(spec, held, r, refused)
        most: float | None = None
        left = 0.0 if held is None or refused else selection.left(held, r, append)
        idle = held is not None and not refused and not left and "nothing to do" in sink
        if spec.update is not None and held is not None and "which a run updates" in sink:
            most = updating.rows_at_most(held, r)
        takes = {} if idle or most == 0 else estimate(r, most or left or None)
        if held is not None and spec.update is not None:
            gates += filter(None, [updating.missed(held, r, lambda: 0)])  # rows are not read yet
            sink = "; ".join(filter(None, [sink, updating.at_most(held, r) if "which a run updates" in sink else ""]))
    before = [(store.problem, store.exit_code) for store in stores if store.problem and store.before]
    after = [(store.problem, store.exit_code) for store in stores if store.problem and not store.before]
    stopped = [(refused, PlanChanged.exit_code)] if refused else []
    problems = [*before, *((line, GateFailed.exit_code) for line in gates), *stopped, *after]  # as a run meets them
    rows = r.rows
    shards, settled = _shards(r, None if refused else held, idle, bool(anew))
    given = r.schema.names if r.columns is None else r.columns
    read = {*given, *(r.condition.columns if r.condition is not None else ())}
    kept = r.keep if r.keep is not None else [n for n in given if n not in (r.info.columns or ())]
    output: list[tuple[str, str | None]] = [
        (n, str(r.schema.field(n).type) if n in r.schema.names else None) for n in kept
    ]
    known = r.info.schema
    output += [(n, str(known.field(n).type) if known is not None else None) for n in r.info.outputs or ()]
    output = [(n, kind) for n, kind in output if spec.sink is None or n not in spec.sink.drop]
    if spec.sink is not None:
        output = [(n, "string") for n in [spec.sink.row_id] if n] + output
        output += [(n, "string") for n in [spec.sink.model_version] if n]
    notes = [*r.warnings, *([r.nulls_given] if r.nulls_given else [])]
    notes += [f"{one.asked} is {one}" for one in r.registered]
    if r.more:
        notes.append(
            f"the store's rows were counted; bytes, shards and nulls are by the first {COPIED:,} of them, and a run "
            "copies all"
        )
    return PlanView(
        len(r.files), rows if rows is not None else round(r.estimated_rows), rows is None, r.bytes, shards,
        bool(settled), r.workers, {n: count for n, count in r.nulls.items() if n in read},
        [(f.name, str(f.type)) for f in r.schema if f.name in read], output, r.info,
        backends.foreseen(r), tuple(notes), [line for line, _ in problems], sink, takes, tuple(stores),
        problems[0][1] if problems else 0, _forecast(spec, held, r, append), Deadline.of(spec, None), idle, settled,
        bool(spec.source.where) or any(s.kind == "filter" for s in spec.steps),
        bool(spec.source.where) or spec.source.limit is not None or spec.source.sample is not None,
    )  # fmt: skip


def _shards(r: Resolved, held: Held | None, idle: bool, anew: bool) -> tuple[int, str]:
    """How many shards a run has, and what will tell that exactly; "" if that is it. `held` is the sink unless a run is
    refused there; an update that begins `anew` keeps answers of what it holds.
    """
    if held is not None and held.unfinished is not None and held.unfinished.planned:
        return len(generations.read_plan(held.unfinished).shards), ""
    if idle and held is not None and held.latest is not None:
        return held.latest.body.shards, ""
    each = sizes.shard_rows(r, None)
    if r.more:
        return -(-(r.rows or 0) // each), "settled once all rows are copied"
    found = shard.count(shard.cut(r.files, r.selection, each, max(1, r.workers)))
    if anew or (held is not None and held.latest is not None):
        return found, "in the whole source; a run divides what it has to score"
    if sizes.is_timed(r) and (found > 1 or r.bytes > sizes.UNTIMED_BYTES):
        return found, "settled once the model is timed"
    return found, "by the rows that are estimated" if r.rows is None else ""


def _forecast(spec: JobSpec, held: Held | None, r: Resolved, append: bool) -> Forecast | None:
    """How long a run would take, over the rows that the sink has not; None if that is not known."""
    if spec.sink is None or spec.source.data is not None:
        return None
    updates = spec.update is not None and held is not None and held.latest is not None
    left = r.estimated_rows if held is None else selection.left(held, r, append)
    if spec.update is not None and held is not None and selection.refusal(held, held.root, r, append):
        left = r.estimated_rows if updating.foreseen(held, r) else left  # what differs is what an update is for
    if not left:
        return None
    place = opening.sink_place(spec.sink)
    if updates and held is not None and updating.differing(held.members()[-1], held.known(r), held):
        updates = False  # no answer is kept
    found = paces.forecast(r, left, *place, updates)
    if found is None and updates and (whole := paces.forecast(r, left, *place)) is not None:
        found = replace(whole, bound=True)
    if found is None and not updates and (measured := budgets.rate(r)) is not None:
        found = by_rate(left, measured, "the rates that tune found").priced(spec.running.hour_price)
    return found


def _held_back(spec: JobSpec, held: Held) -> list[str]:
    """Why an unfinished run that has scored all its rows would not be published."""
    begun = held.unfinished
    if begun is None or not begun.planned or begun.kind == "retry-dead":
        return []
    done = Ledger.of(begun)
    if len(done) < len(generations.read_plan(begun).shards):
        return []
    look = f"gristmill dead {shlex.quote(held.root)} shows them"
    try:
        gating.final(spec.gates, done.counts, done.sums.errors, look, begun.kind == "append")
    except GateFailed as e:
        return [str(e)]
    plan = generations.read_plan(begun).about
    found = drifting.compared(drifting.Staged.of(spec, begun, done, plan, held.latest))
    return [drifting.refused(found, begun)] if found.failed else []


def _stores(spec: JobSpec, held: Held | None, r: Resolved, refused: str) -> list[delivering.Foreseen]:
    """What the job's deliveries would find; `refused` tells that the sink's rows are not those of this job."""
    if not spec.deliver or spec.sink is None:
        return []
    root, files = (held.root, held.files) if held is not None else opening.sink_place(spec.sink)
    number = 1 + max([0, *(g.number for g in held.claims)] if held is not None else [0])
    generation = generations.Generation(root, number, "planned", "new", files=files)
    about = _written(spec, r)
    if about is None and held is not None and held.latest is not None and not refused:
        about = held.latest.body
    base = held.latest if held is not None and spec.on_new_files == "append" and not refused else None
    members = (*(() if base is None else base.generations), number)
    return delivering.foreseen(spec.deliver, spec.source, generation, members, about)


def _written(spec: JobSpec, r: Resolved) -> Described | None:
    """What a plan would record of the rows; None if only running the code can tell their columns."""
    if spec.sink is None or not shipping.foreknown(r):
        return None
    rows = r.sink_format.stored(shipping.schema_without_rows(r).empty_table(), spec.sink.options)
    model = ModelRecord(spec.model.name, r.info.digest, "")
    schema = generations.encode_schema(rows)
    return Described(
        fingerprint=r.fingerprint.stored(), output_schema=schema, answers={}, made={}, sink_format=r.sink_format.name,
        partition_by=tuple(spec.sink.partition_by), model=model,
    )  # fmt: skip


def _held(spec: JobSpec) -> Held | None:
    """What the job's sink holds; None if that is nothing, or the rows are in memory."""
    if spec.sink is None or spec.source.data is not None:
        return None
    root, files = opening.sink_place(spec.sink)
    return Held.by(root, files) if files.holds(generations.meta(root)) else None


@dataclass(frozen=True)
class Previewed:
    """The outcome of the first rows: those that were scored, as they would be written, the dead letters of the others,
    and how many were filtered out. `rate` is rows a second in the model, of the one worker.
    """

    rows: pa.Table
    dead: pa.Table
    filtered: int = 0
    rate: float | None = None

    def failure(self) -> RunFailed | None:
        """The error of a run that scores none of these rows; None if some were scored, or none failed."""
        if self.rows.num_rows or not self.dead.num_rows:
            return None
        first = self.dead.slice(0, 1).to_pylist()[0]
        which = f"the first is {first['source']}:{first['position']}, stage {first['stage']}"
        why = f"{first['error']}: {first['message']}\n{first['traceback'] or ''}".rstrip()
        return RunFailed(f"none of {units.plural(self.dead.num_rows, 'row')} was scored ({which}): {why}")


def preview(spec: JobSpec, rows: int, observer: Observer | None = None) -> Previewed:
    """The outcome of the first `rows` rows (that satisfy `where`), scored by the job itself into a temporary folder; of
    more, up to FILTERED, if filters leave none of them. No gate applies. Raises RunFailed if the run itself stops, and
    BadJob for what a run would refuse.
    """
    starting("a preview")
    refuse_unready(spec)
    read = rows
    with lasting.during(spec.engine):
        while True:
            found = _preview(spec, read, rows, observer)
            there = spec.source.limit or spec.source.sample or FILTERED
            if found.rows.num_rows or found.dead.num_rows or found.filtered < read or read >= min(there, FILTERED):
                break
            read = min(16 * read, FILTERED)
    return replace(found, dead=found.dead[:rows]) if read > rows else found


class First:
    """A filter that keeps only the first rows left by the steps before it, so that the model is given no more."""

    def __init__(self, rows: int) -> None:
        self._left = rows

    def __call__(self, rows: pa.Table) -> pa.Array:
        """For each row, whether it is among the first."""
        taken = min(self._left, rows.num_rows)
        self._left -= taken
        return pa.array([True] * taken + [False] * (rows.num_rows - taken))


def _preview(spec: JobSpec, read: int, rows: int, observer: Observer | None) -> Previewed:
    limit = min(read, spec.source.limit or read)
    source = replace(spec.source, limit=None if spec.source.sample else limit)
    if spec.source.sample:
        source = replace(source, sample=min(read, spec.source.sample))
    first = [Step("filter", Call(First, {"rows": rows}, "arrow"))] if spec.steps else []
    with passing() as folder:
        target = replace(
            spec.sink or Sink(folder),
            uri=os.path.join(folder, "preview"),
            format=None,
            options=_parquet_options(spec.sink),
            merge=False,
            files=None,
            index=(),
            storage={},
        )
        workers = 0 if spec.engine.workers == 0 else 1
        model = changed(spec.model, keep_prompt=True) if hasattr(spec.model, "keep_prompt") else spec.model
        small = replace(
            spec,
            source=source,
            steps=(*spec.steps, *first),
            model=model,
            sink=target,
            gates=replace(UNGATED, drift=spec.gates.drift),  # of which the columns are looked at
            audit=(),
            reduce=None,
            deliver=(),
            deadline=None,
            alerts=(),
            metrics=(),
            lineage=(),
            engine=replace(spec.engine, name=EngineSpec.name, workers=workers, options={}),
        )
        report = finish(small, observer=None if observer is None else Unpublished(observer)).report
        scored = report.read().to_table()
        if spec.sink is not None and scored.num_rows:  # what the job's own sink would refuse
            form, options = planning.laid_out(planning.sink_format_of(spec), spec.sink), spec.sink.options
            form.writer(LOCAL, folder, "part", "preview", form.stored(scored, options), options).abort()
            refuse_unfit(spec, target.uri)
        rate = report.rows_run / report.model_seconds if report.model_seconds else None
        return Previewed(scored, report.dead(), report.rows_filtered, rate)


def _parquet_options(sink: Sink | None) -> Mapping[str, Any]:
    """The sink's options for rows that are written as Parquet only to be viewed: empty unless it is a Parquet sink."""
    return sink.options if sink is not None and sink_format(sink.format or DEFAULT).name == DEFAULT else {}


_open: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # streams, and the process each belongs to


@atexit.register
def _close_all() -> None:
    """Close unfinished streams before the interpreter exits: later, nothing can be reported or removed."""
    for left, process in list(_open.items()):
        if process == os.getpid():
            with contextlib.suppress(ValueError):  # another thread is iterating it
                left.close()


def stream(spec: JobSpec, observer: Observer | None = None) -> Generator[pa.Table, None, Report]:
    """As `_stream`, but closed at the latest when the interpreter exits."""
    found = _stream(spec, observer)
    _open[found] = os.getpid()
    return found


def _stream(spec: JobSpec, observer: Observer | None) -> Generator[pa.Table, None, Report]:
    """Output tables, one per shard, in plan order, and finally the report. Parts are written to a folder of their own
    and removed as they are read, so that disk and memory hold only what is in transit. Raises GateFailed as soon as
    `min_ok` can no longer hold.
    """
    import pyarrow.parquet as pq

    starting("a job")
    with contextlib.ExitStack() as stack:
        made = Folder("gristmill-stream-", tempfile.gettempdir())
        stack.callback(made.remove)
        root = os.path.join(made.path, "out")
        target = replace(
            spec.sink or Sink(root),
            uri=root,
            format=DEFAULT,
            options=_parquet_options(spec.sink),
            merge=False,
            files=None,
            partition_by=(),
            index=(),
            sort_by=(),
            storage={},
        )
        gates = replace(spec.gates, allow_empty=True)
        run = streamed(replace(spec, sink=target, gates=gates, reduce=None), observer)
        stack.callback(run.close)
        while True:
            try:
                done = next(run)
            except StopIteration as e:
                report: Report = e.value.report
                return report
            for part in done.parts:
                if part.role == "rows":
                    yield pq.read_table(os.path.join(root, part.work), partitioning=None)


def stands(root: str, files: Files = LOCAL) -> dict[str, Any]:
    """The state of a sink, as `status` has it, with how things stand, why, and what to do."""
    now = status(root, files)
    return {**now, "standing": asdict(standing(now, runrecord.last(root, files, str(now["state"]))))}


def status(root: str, files: Files = LOCAL) -> dict[str, Any]:
    """The state of a sink from its files alone: "running", "unfinished", "done" or "empty", with counts."""
    held = Held.by(root, files)
    body = None if held.latest is None else held.latest.body
    out: dict[str, Any] = {
        "sink": file_of(root) or root,
        "published_generation": None if body is None else body.generation,
    }
    if held.unfinished is not None:
        out.update(_unfinished(root, held.unfinished, files))
    else:
        out["state"] = "done" if body is not None else "empty"
    if held.latest is not None and (told := delivering.state(root, files, held.latest)):
        out["deliveries"] = told
    if body is not None:
        rows = {n: getattr(body, n) for n in ("rows_in", "rows_ok", "rows_dead", "rows_filtered")}
        also = {"shards": body.shards, "published": body.published, "model": vars(body.model), "errors": body.errors}
        out["published"] = {**rows, **also, "skipped": list(body.skipped)}
        out.update(rows if out["state"] == "done" else {})
        if out["state"] == "done":
            if harmed := _harmed(held.latest):
                out["harmed"] = harmed
            out.update(shards_done=body.shards, shards_total=body.shards, share=1.0)
            out["skipped"] = list(body.skipped)
            out.update({"used": dict(body.used)} if body.used else {})
            out["counts"] = asdict(Counts(*body.counts_list))
    return out


def _harmed(result: publication.Publication | None) -> list[str]:
    """The files of a result that are gone or not as long as they were written, if they are on a disk, and so few that
    a stat of each takes no time.
    """
    if result is None or result.body.files is None or not result.files.free_links:
        return []
    live = result.live().but("manifest", "dead")  # readers may clear away dead letters
    whole = result.files.as_long(result.root, live.tuples("name", "bytes"))
    if (file := file_of(result.root)) is not None and not os.path.exists(file):
        return [os.path.basename(file)]
    return [name for (name,), same in zip(live.tuples("name"), whole, strict=True) if not same]


def _unfinished(root: str, latest: generations.Generation, files: Files) -> dict[str, Any]:
    holder = files.holder(generations.meta(root))
    said = last_said(latest)
    out: dict[str, Any] = {
        **dict.fromkeys(("rows_ok", "rows_dead", "rows_filtered"), 0),
        **({} if said is None else vars(said)),
        "state": "running" if holder is not None else "unfinished",
        "generation": latest.number,
    }
    out["sink"] = file_of(root) or root
    if holder is not None:
        out["held_by"] = {n: getattr(holder, n) for n in ("pid", "host", "started")} if holder.pid else {}
    else:
        out.update(rows_per_second=0.0, eta=None, workers=0)
    if latest.planned:
        out["shards_total"] = len(generations.read_plan(latest).shards)
        done = receipt.listed(latest.receipts, files)
        out["shards_done"] = len(done)
        if holder is None and len(done) <= COUNTED:  # exact, while the last note is a little older
            read = [found for paths in done.values() if (found := receipt.valid(paths, files)) is not None]
            counts = sum((Counts(*r.counts) for r in read), Counts())
            asked = journal.answered(latest.folder, files, done)
            out["used"] = summed([tally.used(r.figures for r in read), asked])
            out.update(rows_done=counts.rows_in, rows_ok=counts.ok, rows_filtered=counts.all_filtered)
            out.update(rows_dead=counts.all_dead, shards_resumed=0)
        out["share"] = out["shards_done"] / max(1, out["shards_total"])
    elif holder is None:  # what the first rows took
        out["used"] = journal.answered(latest.folder, files, ())
    if said is not None and said.at is not None:
        out["seconds_ago"] = round(max(0.0, time.time() - said.at), 1)
    return out


def verify(
    root: str,
    files: Files = LOCAL,
    *,
    deep: bool = False,
    source: Source | bool = False,
    deliver: Sequence[Delivery] = (),
) -> verifying.Verdict:
    """Recount and re-hash every published file; see `result.verify`. With `source` (True, or the job's, which has the
    credentials), what every shard read is read again, too. Rows are counted in the stores that the result was delivered
    to; `deliver` are the job's deliveries, which have their credentials.
    """
    result = publication.published(root, files)
    body = result.body
    verdict = verifying.verify(root, sink_format(body.sink_format), files, deep=deep)
    if (wrong := onefile.differs(root)) is not None:
        verdict = replace(verdict, ok=False, lines=(*(() if verdict.ok else verdict.lines), wrong))
    if skipped := body.skipped:
        verdict = replace(
            verdict, lines=(*verdict.lines, f"source: without the files that could not be read: {'; '.join(skipped)}")
        )
    with lasting.during():
        bad, good = delivering.wrong(root, files, result, deliver)
    bad = [*bad, *sinkindex.misfits(result)]
    if deep and verdict.ok and not bad:
        bad = [*bad, *sinkindex.differences(result)]
    if bad or good:
        verdict = replace(verdict, ok=verdict.ok and not bad, lines=(*verdict.lines, *good, *bad))
    if source is False:
        return verdict
    members = Held.by(root, files).members()
    changed, unknown = sourcecheck.verify(members, source if isinstance(source, Source) else None)
    if changed:
        return replace(verdict, ok=False, lines=(*(() if verdict.ok else verdict.lines), *changed, *unknown))
    same = [] if unknown else ["source: unchanged, it holds what every shard read"]
    return replace(verdict, lines=(*verdict.lines, *unknown, *same))

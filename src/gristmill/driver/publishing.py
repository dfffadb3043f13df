"""The last phase of a run: the gates are checked, and what is committed becomes the sink's result."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gristmill.commit import drift, gates, nights, onefile, publication, publish, seals
from gristmill.commit.documents import Described, ResultRecord
from gristmill.commit.generation import generations, pending, sink_of
from gristmill.commit.live import LiveFiles
from gristmill.commit.publication import live_of
from gristmill.commit.receipt import Receipt
from gristmill.driver import budgets, delivering, drifting, indexing, jobfingerprint, summary, updatecounts, updating
from gristmill.driver.choice import tell_written
from gristmill.driver.drifting import Compared, Staged
from gristmill.driver.opening import Opened
from gristmill.driver.scoring import Scored
from gristmill.driver.selection import Held
from gristmill.driver.summary import Whole
from gristmill.driver.tally import all_committed, used
from gristmill.errors import BadJob, BadSource, CorruptStore, GateFailed
from gristmill.files.disk import sizes_of
from gristmill.job.uris import file_named
from gristmill.observe import units
from gristmill.observe.report import Report
from gristmill.result import ids, reading
from gristmill.shards.counts import Counts, summed
from gristmill.values import dataclass

if TYPE_CHECKING:
    from gristmill.result.reduction import Reducer


@dataclass(frozen=True)
class Published:
    """What is in the sink when the run has ended; `later` are files that appeared since it was planned, for a run
    that follows at once. `spent` are the dollars that the run has spent of its model's max_cost.
    """

    report: Report
    later: tuple[str, ...] = ()
    spent: float = 0.0


def untouched(at: Opened) -> Published:
    """The outcome of a run that had nothing to do."""
    indexing.again(at)
    onefile.settle(at.root, at.resolved.sink_format, at.sink.options, at.sink.overwrite, at.files)
    _reduced_anew(at)
    publish.sweep(at.root, at.files)
    report = summary.untouched(at)
    at.log.say(phase="done")
    return Published(report)


def published(s: Scored) -> Published:
    """Make what was scored the sink's result. Raises GateFailed, and SinkBusy if another run has the sink now."""
    log = s.log
    if s.later and not s.goes_on:
        files = f"{len(s.later)} files" if len(s.later) > 1 else s.later[0]
        text = f"{files} appeared after this run was planned and are not in its result"
        log.note("warning", f"{text}: run again with --append (append=True)")
    s.watch.look()
    tell_written(log, s.watch)
    counts, own = s.receipts.counts, s.receipts.parts
    log.say(phase="publishing", **all_committed(s.plan.shards, counts))
    with log.gate():
        _gates(s, counts)
        compared = _compared(s)
        whole = _whole(s, counts)
        _deliverable(s, whole)
        _audited(s, whole)
    s.refuse_late()
    joined: list[Receipt] | None = None
    if s.sink.joins:
        from gristmill.commit.merge import Joining

        joining = Joining(s.files, s.generation, s.resolved.sink_format, s.plan.schema, s.sink, _nights(s))
        joined = joining.receipts(tuple(s.receipts.values()))
        own = live_of(s.generation, joined)
    rows = whole.live + own
    index = indexing.made(s, s.plan.about, rows, whole.generations)
    reducer = jobfingerprint.reducer(s.spec)
    if reducer is not None:
        from gristmill.result.reduction import Reduction

        own += live_of(s.generation, [Reduction(s.generation, rows, s.plan.about, reducer, log.warn).receipt()])
    s.refuse_late()
    try:
        more = () if index is None else live_of(s.generation, [index.receipt])
        publish.link_parts(s.files, s.generation, own + more)
    except CorruptStore:
        s.refuse_late()  # whoever gave up this generation has removed its files
        raise
    live = whole.live.but("manifest", "index") + own
    if not s.resolved.sink_format.tables:
        done = s.receipts.values() if joined is None else joined
        live += [publish.manifest(s.generation, done, whole.live)]
    whole = replace(whole, live=live)
    compared.keep(s.generation)
    updated = updatecounts.counted(s)
    record = _sealed(s, _record(s, whole, reducer, updated))
    publish.publish(s.generation, record, whole.live, None if index is None else index.index)
    onefile.settle(s.root, s.resolved.sink_format, s.sink.options, s.sink.overwrite, s.files)
    _tell(s, counts)
    report = summary.finished(s, replace(whole, live=live + (() if index is None else index.index.files)))
    report = replace(report, drift=compared.drift, updated=updated)
    log.say(phase="done")
    budgets.remember(s.resolved, s.batch, s.sums.figures)
    return Published(report, s.later if s.goes_on else ())


def _nights(s: Scored) -> list[int]:
    """The night that each shard of a retry is of; none for other generations, which are of their own."""
    if not s.retries or s.base is None:
        return []
    numbers = s.base.generations
    return nights.of_shards(s.generation, [g for g in generations(s.root, s.files) if g.number in numbers])


def _reduced_anew(at: Opened) -> None:
    """Where the job's `reduce` is not what the published result was reduced by, or a file that it made is lost: run it
    on that, and publish the same rows with its files. Raises SinkBusy if another run publishes meanwhile.
    """
    reducer, result = jobfingerprint.reducer(at.spec), publication.published(at.root, at.files)
    made_before = result.live().of("reduced")
    there = sizes_of(at.root, {f.name for f in made_before}, at.files)
    lost = [f.name for f in made_before if there.get(f.name) != f.bytes]
    if reducer is None:
        if lost:
            at.log.warn(
                f"{lost[0]}, which reduce {result.body.reduced_by.get('name')} made, is gone: run the job with it"
            )
        return
    if result.body.reduced_by == reducer.said() and not lost:
        return
    claims = generations(at.root, at.files)
    own = next((g for g in claims if g.number == result.generation and not g.lost), None)
    if own is None or pending(claims, result.number) is not None:
        why = "its claim is lost" if own is None else "an unfinished run stands on it"
        at.log.note("warning", f"reduce {reducer.name} was not run on the result that is published: {why}")
        return
    from gristmill.result.reduction import Reduction

    rows = result.live().but("reduced", "index")
    at.refuse_late()
    made = live_of(own, [Reduction(own, rows, result.body, reducer, at.log.warn).receipt()])
    at.refuse_late()
    publish.link_parts(at.files, own, made)
    fields = {f.name: getattr(result.body, f.name) for f in dataclasses.fields(ResultRecord)}
    about = ResultRecord(**{**fields, "reduced_by": reducer.said()})
    publish.publish(replace(own, predecessor=result.number), about, rows + made, result.body.index)
    at.log.tell(f"nothing was scored; reduce {reducer.name} was run on the result that is published")


def _gates(s: Scored, counts: Counts) -> None:
    gates.account(counts, None if s.retries else s.plan.shards.rows())
    errors = s.receipts.sums.errors
    if warning := gates.warning(s.spec.gates, counts, errors):
        s.log.note("warning", warning, rows_dead=counts.dead + counts.derived_dead)
    replaces = s.spec.update is not None and s.base is None  # whatever the verb: a restart loses rows, too
    if replaces and (why := updating.missed(Held.by(s.root, s.files), s.resolved, lambda: _gone(s))):
        if not s.verbs.accept:
            raise GateFailed(why, gates=[f"unread {path}" for path in s.resolved.unread])
        s.log.note("warning", f"without the rows of {', '.join(s.resolved.unread[:3])}, which was accepted")
    if not s.verbs.accept and not s.retries:
        gates.final(s.spec.gates, counts, errors, s.look, s.generation.kind == "append")


def _gone(s: Scored) -> int | None:
    """How many rows of the result before are gone; 0 where a restart counts none."""
    return updatecounts.counted(s).get("gone") if s.generation.kind == "update" else 0


def _compared(s: Scored) -> Compared:
    """Hold what was scored against the result before. Raises GateFailed, unless that was accepted."""
    found = drifting.compared(Staged.of(s.spec, s.generation, s.receipts, s.plan.about, s.base))
    if found.failed and not s.verbs.accept:
        report = replace(summary.held_back(s), drift=found.drift)
        named = [gate for one in found.findings if one.failed for gate in one.gates]
        raise GateFailed(drifting.refused(found, s.generation), report=report, gates=named)
    drifted = {"alert": "drift", "about": drift.warned(found.drift)}
    for finding in found.findings:
        s.log.note(
            "warning",
            f"{finding.text}{', which was accepted' if finding.failed else ''}",
            **(drifted if finding.drifts else {}),
        )
    return found


def _deliverable(s: Scored, whole: Whole) -> None:
    """Raises GateFailed if a delivery by key would be refused for the keys of the rows, unless that was accepted. Rows
    of a retry are those of a result that stands: that is told.
    """
    if not s.spec.deliver:
        return
    new = s.receipts.parts
    try:
        delivering.refuse_repeated(s, s.plan.about, whole.generations, new, whole.live + new)
    except BadSource:  # a file that is gone
        raise
    except BadJob as e:
        if s.retries:
            s.log.note(
                "warning", f"{e} (a retry is published all the same; of rows with one key the last scored counts)"
            )
            return
        if not s.verbs.accept:
            ways = "--accept, accept=True, publishes them, and they are not delivered"
            raise GateFailed(
                f"{e}; nothing new was published (its rows are staged in {s.generation.work}; {ways})",
                gates=["keys of a delivery"],
            ) from e
        s.log.note("warning", f"{e}: that was accepted, and is not delivered")


def _whole(s: Scored, new: Counts) -> Whole:
    """The live result: the base's counts with this generation's added, but without this generation's files."""
    errors, shards = s.receipts.sums.errors, len(s.plan.shards)
    if s.base is None or s.generation.base is None:
        return Whole(new, errors, shards, [s.generation.number], LiveFiles())
    body, live = s.base.body, s.base.live().but("reduced")  # which were made of fewer rows
    before = Counts(*body.counts_list)
    numbers, shards = [*body.generations, s.generation.number], body.shards + shards
    if not s.retries:
        return Whole(before + new, summed([body.errors, errors]), shards, numbers, live)
    from gristmill.driver import retrydead as retrying

    letters = reading.dead_letters(reading.letters_of(s.root, live, s.files), s.files)
    # All of the base's dead letters were scored again: those still dead are this generation's own.
    counts = retrying.combined(before, letters, new)
    return Whole(counts, errors, shards, numbers, live.but("dead"))


def _audited(s: Scored, whole: Whole) -> None:
    """Run the audits on the whole result with its new files. Raises GateFailed if one refuses it, unless that was
    accepted.
    """
    if not s.spec.audit:
        return
    root, files, about = s.root, s.files, s.plan.about
    live = whole.live + s.receipts.parts
    parts, beside = live.of("rows"), live.of("ids")
    staged = gates.Staged(
        whole.counts,
        tuple(reading.readable(root, parts, files)),
        tuple(reading.readable(root, beside, files)),
        s.plan.schema,
        about.sink_format,
        reading.opener(root, live, files),
        lambda: reading.dataset_of(root, files, parts, about),
    )
    for refused in gates.refusals(jobfingerprint.audits(s.spec), staged):
        if not s.verbs.accept:
            ways = "the same job again with --accept (accept=True) publishes it anyway"
            named = [refused.partition(":")[0]]
            raise GateFailed(f"{refused}; nothing new was published ({ways})", gates=named)
        s.log.note("warning", f"{refused}, which was accepted")


def _record(s: Scored, whole: Whole, reducer: Reducer | None, updated: Mapping[str, int]) -> ResultRecord:
    plan, total = s.plan.about, whole.counts
    return ResultRecord(
        **{f.name: getattr(plan, f.name) for f in dataclasses.fields(Described)},
        generations=tuple(whole.generations),
        counts=total,
        counts_list=total.values(),
        rows_in=total.rows_in,
        rows_ok=total.ok,
        rows_dead=total.all_dead,
        rows_filtered=total.all_filtered,
        shards=whole.shards,
        published=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        seconds=round(s.log.seconds, 3),
        errors={k: int(v) for k, v in whole.errors.items()},
        skipped=tuple(s.resolved.skipped),
        reduced_by={} if reducer is None else reducer.said(),
        sink=s.generation.sink or sink_of(generations(s.root, s.files)),
        updated=updated,
        used=used([s.receipts.sums.figures]),
    )


def _sealed(s: Scored, record: ResultRecord) -> ResultRecord:
    """The record with the root over plans and receipts; without one if some of its base's are lost since."""
    members = [g for g in generations(s.root, s.files) if g.number in record.generations]
    try:
        roots, root = seals.whole(members, s.base, seals.sealed(s.generation, s.receipts))
    except (CorruptStore, FileNotFoundError) as e:
        s.log.note("warning", f"the result has no root, and nothing can be proved of its rows: {e}")
        return record
    return dataclasses.replace(record, sealed=roots, root=root)


def _tell(s: Scored, counts: Counts) -> None:
    """Notes for the user on the published result."""
    if (repeated := ids.said(publication.published(s.root, s.files))) is not None:
        s.log.note("warning", repeated)
    if s.generation.kind == "append":
        added = units.plural(counts.rows_in, "row"), units.plural(len(s.plan.shards.files), "new file")
        s.log.tell(f"added {added[0]} of {added[1]}; the rows and files in this report are those of the whole result")
    if s.retries and counts.ok:
        rows = units.plural(counts.ok, "retried row stands", "retried rows stand")
        where = "" if file_named(s.sink.uri) else ", in files of their own"
        s.log.tell(f"{rows} after the others{where}")

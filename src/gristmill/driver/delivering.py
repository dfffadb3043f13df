"""Deliveries of a run: looked at before anything is scored, and made once the result is published. How a delivery is
made is the stores' own (stores/delivery.py); here it is decided when, and what follows from one that fails.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gristmill.commit import generation as generations
from gristmill.commit import publish as publishing
from gristmill.commit.documents import Asked, Delivered, Described, Live, PlanDocument
from gristmill.commit.generation import Generation
from gristmill.commit.publication import Publication, published
from gristmill.driver.choice import Chosen
from gristmill.driver.opening import Command, Opened
from gristmill.driver.progressnote import last_said
from gristmill.driver.runlog import RunLog
from gristmill.errors import BadJob, BadSource, CorruptStore, GristmillError, Interrupted, RunFailed, SinkBusy
from gristmill.files.contract import Files
from gristmill.files.disk import join
from gristmill.job import snapshots
from gristmill.job.delivery import Delivery
from gristmill.job.job import HELD, Source
from gristmill.observe import units
from gristmill.observe.events import Loaded, Observer, Progress, Silent
from gristmill.observe.report import Report
from gristmill.observe.standing import NOT_DELIVERED
from gristmill.process import lasting
from gristmill.process.away import is_away, says_away
from gristmill.stores import delivery as deliveries
from gristmill.stores.contract import StoreBusy, StoreUnavailable
from gristmill.stores.homes import refuse_lost
from gristmill.stores.receipts import receipts, renewed
from gristmill.stores.results import Result, identity
from gristmill.stores.sametable import is_read
from gristmill.values import dataclass

ASKED = "deliver.json"


def reached(c: Command) -> None:
    """Before anything is scored, see that each store can be opened, or is busy, and that no delivery takes away what
    the job reads, or is of a sink whose folder was lost. Raises BadJob, MissingExtra, RunFailed for a store that is not
    there now.
    """
    for delivery in () if c.stream else c.spec.deliver:
        if (why := _takes_away(delivery, c.spec.source)) is not None:
            raise BadJob(why)
        with _before(c.log), contextlib.closing(deliveries.opened(delivery)) as store:
            if not c.verbs.restart:
                refuse_lost(delivery, c.root, c.files, store)


def _takes_away(delivery: Delivery, source: Source) -> str | None:
    """Why a delivery would leave nothing of what its job reads, and the way out; None if it does not."""
    if delivery.mode != "replace" and not delivery.delete:
        return None
    if source.data is not None or source.uri[0].startswith(HELD) or not snapshots.is_snapshot(source):
        return None
    if not any(is_read(asked, delivery.place) for asked in snapshots.wanted(source)):
        return None
    how = "mode replace" if delivery.mode == "replace" else "delete"
    return (
        f"deliver {delivery.shown}: is the table that the job reads, and {how} would leave only the rows and columns "
        "of the result there: use mode='upsert' with its key (and evolve=True for new columns), or another table"
    )


def fitting(at: Chosen, about: PlanDocument) -> None:
    """Once the schema of the rows is known, see that each store holds them. Raises BadJob, RunFailed."""
    for delivery in () if at.stream else at.spec.deliver:
        with _before(at.log), contextlib.closing(deliveries.opened(delivery)) as store:
            members = (*(at.base.generations if at.base is not None else ()), at.generation.number)
            result = Result(at.generation, members, about, identity(at.root, at.files))
            deliveries.check(delivery, result, store, at.verbs.restart)


def refuse_repeated(
    at: Chosen, about: PlanDocument, members: Sequence[int], new: Sequence[Live], live: Sequence[Live]
) -> None:
    """Before what is scored is published: see that no delivery by key would be refused for its keys, as it would be
    each night. `new` are the files of this run among all `live` ones, those of the generations `members`. Raises
    BadJob, for a retry also if a row of the same night has the key of one that was dead then.
    """
    result = Result(at.generation, tuple(members), about, identity(at.root, at.files))
    for delivery in {d.key: d for d in reversed(() if at.stream else at.spec.deliver)}.values():
        deliveries.refuse_repeated(delivery, result, new, live, at.retries)


@contextlib.contextmanager
def _before(log: RunLog | None = None) -> Any:
    """A store that cannot be used is told before rows are scored for it. One that is busy may be free by then: that is
    noted in the `log`, if there is one.
    """
    try:
        yield
    except StoreBusy as e:
        if log is None:
            raise
        log.note("warning", f"deliver {e}; the rows are scored, and brought there once they are published")
    except StoreUnavailable as e:
        if _away(e):
            raise RunFailed(_problem(e)) from e
        raise BadJob(f"deliver {e}") from e


def _away(error: GristmillError) -> bool:
    """Whether a store is not there now, by its client's error, or by the words of one that has these alone, without the
    address, in which there are names of the user's.
    """
    return isinstance(error, StoreUnavailable) and (is_away(error) or says_away(str(error.__cause__ or error)))


@dataclass(frozen=True)
class Foreseen:
    """What a delivery would find: how many rows there are in the store now, the generation of this sink that they are
    of (None: of none), and the `problem` that would stop a run, with its `exit_code`, `before` it looks at the sink or
    after.
    """

    to: str
    mode: str
    rows: int | None = None
    generation: int | None = None
    problem: str = ""
    before: bool = False
    exit_code: int = BadJob.exit_code

    def __str__(self) -> str:
        """As a line: `lmdb://s.lmdb: replaces 40 rows of generation 1`."""
        if self.rows is None:
            return f"{self.to}: {self.mode}"
        if not self.rows:
            return f"{self.to}: {self.mode}, nothing is there yet"
        whose = "" if self.generation is None else f" of generation {self.generation}"
        done = {"replace": "replaces", "append": "appends to", "upsert": "upserts into"}[self.mode]
        return f"{self.to}: {done} {units.plural(self.rows, 'row')}{whose}"


def foreseen(
    wanted: Sequence[Delivery],
    source: Source,
    generation: Generation,
    members: tuple[int, ...],
    about: Described | None,
) -> list[Foreseen]:
    """What each delivery of rows of a source would find. `about` describes those that a `generation` would have; None
    if that is not known before it runs. Nothing is changed.
    """
    out: list[Foreseen] = []
    for delivery in wanted:
        found = Foreseen(delivery.shown, delivery.mode)
        if (why := _takes_away(delivery, source)) is not None:
            out.append(replace(found, problem=why, before=True))
            continue
        try:
            store = deliveries.opened(delivery)
        except GristmillError as e:
            out.append(replace(found, problem=_problem(e), before=True, exit_code=_code(e)))
            continue
        with contextlib.closing(store):
            try:
                sink = identity(generation.root, generation.files)
                mark = store.live(sink.name)
                found = replace(found, rows=store.count(None), generation=None if mark is None else mark.generation)
                if about is not None:
                    deliveries.check(delivery, Result(generation, members, about, sink), store)
            except GristmillError as e:
                found = replace(found, problem=_problem(e), exit_code=_code(e))
        out.append(found)
    return out


def _problem(error: GristmillError) -> str:
    """What stops a run before it scores anything."""
    if _away(error):
        return f"deliver {error}; nothing was scored: check the address, or run again once the store is there"
    return f"deliver {error}" if isinstance(error, StoreUnavailable) else str(error)


def _code(error: GristmillError) -> int:
    return RunFailed.exit_code if _away(error) or isinstance(error, StoreBusy) else BadJob.exit_code


def delivered(at: Opened, report: Report) -> Report:
    """Deliver the published result to each store of the job that does not have it. All are tried; one that fails scores
    nothing again. Raises RunFailed, with the report, if one failed, SinkBusy if a later result was delivered meanwhile.
    """
    if at.stream:
        return report
    _note(at.root, at.files, at.spec.deliver)
    if not at.spec.deliver:
        return report
    begun = at.log.seconds

    def timed(report: Report) -> Report:
        took = at.log.seconds - begun
        return replace(report, seconds=at.log.seconds, delivering=took, notes=tuple(at.log.notes))

    try:
        result, warn = published(at.root, at.files), functools.partial(at.log.note, "warning")
        found = _made(result, at.spec.deliver, warn, at.log.say, take_over=at.verbs.restart)
    except (GristmillError, Interrupted) as e:
        at.log.say(phase="failed")
        e.report = timed(replace(report, state=NOT_DELIVERED))
        raise
    at.log.say(phase="done", delivery=None)
    return timed(replace(report, deliveries=tuple(found)))


def _made(
    result: Publication,
    wanted: Sequence[Delivery],
    warn: Callable[[str], None],
    say: Callable[..., None],
    asked: bool = False,
    take_over: bool = False,
) -> list[Delivered]:
    """The receipts; `say` is told how far that is. What is missing in a store is brought again where its rows are this
    sink's alone, or if that is `asked` for: rows of others may have been taken out on purpose. `take_over` is as in
    `Loading`. Raises BadJob if there is no use in trying again, as no rows fit a store.
    """

    def watched(shown: str) -> deliveries.Watch:
        return lambda step, rows, of: say(phase="delivering", delivery=Loaded(shown, step, rows, of))

    done: list[Delivered] = []
    failed: list[GristmillError] = []
    for delivery in wanted:
        try:
            anew = asked or delivery.mode == "replace"
            done.append(deliveries.deliver(result, delivery, anew, warn, watched(delivery.shown), take_over))
        except GristmillError as e:
            failed.append(e)
            continue
        if (mode := done[-1].mode) != delivery.mode:
            warn(
                f"{delivery.shown}: the rows of generation {done[-1].generation} are there already, brought with mode "
                f"{mode} at {done[-1].at}, so that mode {delivery.mode} adds none of them again; it adds those of "
                "later generations (to have the rows once more, deliver to another table)"
            )
    if not failed:
        return done
    told = ";\n".join(map(str, failed))
    if all(isinstance(e, SinkBusy) for e in failed):
        raise SinkBusy(told) from failed[0]
    if all(isinstance(e, BadJob) and not isinstance(e, BadSource) for e in failed):
        useless = "the result is published; to run again delivers nothing until that is mended"
        raise BadJob(f"{told};\n{useless}") from failed[0]
    again = "the result is published, nothing is scored again: the same command, or gristmill deliver, delivers it"
    raise RunFailed(f"{told};\n{again}") from failed[0]


def deliver(
    root: str,
    files: Files,
    sink: str,
    wanted: Sequence[Delivery],
    tell: Callable[[str], None],
    observer: Observer | None = None,
    take_over: bool = False,
) -> list[Delivered]:
    """Deliver what a sink has published, with `take_over` also in place of a later result of a copy of it. Raises
    BadSource if nothing is, SinkBusy if a run is at work, BadJob for a store that cannot be opened or does not fit,
    RunFailed.
    """
    with lasting.during(), files.lease(sink, generations.meta(root), tell):
        with contextlib.suppress(CorruptStore):
            publishing.settle(root, files)
        result = published(root, files)
        for delivery in wanted:
            with _before(), contextlib.closing(deliveries.opened(delivery)) as store:
                deliveries.check(delivery, Result.of(result), store, take_over)
        begun, seen = time.monotonic(), Silent() if observer is None else observer

        def say(**changes: Any) -> None:
            seen.progress(Progress(sink=sink, elapsed=time.monotonic() - begun, **changes))

        with contextlib.closing(seen):
            done = _made(result, wanted, tell, say, asked=True, take_over=take_over)
            rows = sum(receipt.rows for receipt in done)
            say(phase="done", rows_done=rows, rows_total=rows)
            return done


def _note(root: str, files: Files, wanted: Sequence[Delivery]) -> None:
    """Note for `status` which stores the sink's job delivers to."""
    path, note = join(generations.meta(root), ASKED), Asked(tuple(d.shown for d in wanted))
    if asked(root, files) == note.to:
        return
    if wanted:
        files.write_over(path, note.dump())
    else:
        files.remove(path)


def asked(root: str, files: Files) -> tuple[str, ...]:
    """The stores that the last run on a sink was to deliver to."""
    try:
        return Asked.load_from(join(generations.meta(root), ASKED), files).to
    except (FileNotFoundError, CorruptStore):
        return ()


def state(root: str, files: Files, result: Publication) -> list[dict[str, Any]]:
    """For each store that was delivered to, or was to be, the generation that it has, by the receipts; and how far a
    run is that delivers to it now.
    """
    members: list[Generation] = [g for g in generations.generations(root, files) if not g.lost]
    last: dict[str, Delivered] = {}
    newest: set[str] = set()  # what has a receipt of this result, also of one whose rows an earlier one had brought
    for generation in members:
        found = {receipt.to: receipt for receipt in receipts(generation)}
        last.update(found)
        newest.update(found if generation.number == result.generation else ())
    told = ("mode", "generation", "rows", "at", "seconds", "beyond")
    under_way = _under_way(root, files, members, result)
    out: list[dict[str, Any]] = []
    for to in dict.fromkeys([*asked(root, files), *last]):
        receipt = last.get(to)
        about = {} if receipt is None else {n: getattr(receipt, n) for n in told}
        if under_way is not None and under_way.to == to:
            about["delivering"] = vars(under_way)
        now = to in newest
        out.append(
            {"to": to, "state": "delivered" if now else "not delivered" if receipt is None else "behind", **about}
        )
    return out


def _under_way(root: str, files: Files, members: Sequence[Generation], result: Publication) -> Loaded | None:
    """What the run that has the sink is delivering."""
    generation = next((g for g in members if g.number == result.generation), None)
    if generation is None or files.holder(generations.meta(root)) is None:
        return None
    said = last_said(generation)
    return said.delivery if said is not None and said.phase == "delivering" else None


def _delivered(receipt: Delivered, asked_for: Delivery | None) -> str:
    rows = f"{units.plural(receipt.rows, 'row')} of generation {receipt.generation}, as delivered"
    if receipt.older:
        rows += f", without {receipt.older:,} earlier ones of the same keys"
    if asked_for is None or asked_for.mode == receipt.mode:
        return rows
    return f"{rows} (with mode {receipt.mode}; the job's mode {asked_for.mode} is for later generations)"


def wrong(root: str, files: Files, result: Publication, given: Sequence[Delivery] = ()) -> tuple[list[str], list[str]]:
    """What is wrong in the stores, and what else there is to say: a line each. `given` have their secrets."""
    known = {d.shown: d for d in given}
    newest = {g.number: g for g in generations.generations(root, files)}.get(result.generation)
    found = {} if newest is None or newest.lost else {r.to: r for r in receipts(newest)}
    bad: list[str] = []
    good: list[str] = []
    wanted = asked(root, files)
    for about in state(root, files, result):
        to, receipt = about["to"], found.get(about["to"])
        if receipt is None:
            has = f"has generation {about['generation']}" if "generation" in about else "has nothing of it"
            line = f"{to}: generation {result.generation} is not delivered ({has}): gristmill deliver does it"
            (bad if to in wanted else good).append(line)  # what was delivered once, by hand, may stay as it is
            continue
        try:
            lines = deliveries.differences(result, known.get(to) or renewed(receipt), receipt)
        except GristmillError as e:
            lines = [f"{to}: could not be looked at: {e}"]
        bad += lines
        if not lines:
            good.append(f"{to}: {_delivered(receipt, known.get(to))}")
    return bad, good

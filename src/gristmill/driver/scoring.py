"""The fourth phase of a run: drives an engine with a feed until every shard of the plan has a receipt."""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import replace

from gristmill.commit import gates, publication
from gristmill.commit import generation as generations
from gristmill.commit import receipt as receipts
from gristmill.commit.allowance import Allowance
from gristmill.commit.ledger import Ledger
from gristmill.commit.receipt import Receipt
from gristmill.driver import keeping, paces, probe, selection, shipping, sourcecheck, warmup
from gristmill.driver.beside import Beside
from gristmill.driver.choice import Chosen
from gristmill.driver.deadline import Deadline, OnTime
from gristmill.driver.forecast import by_rate
from gristmill.driver.probe import Planned
from gristmill.driver.shardfeed import ShardFeed
from gristmill.driver.tally import Tallied, Tally
from gristmill.engines.registry import open_engine
from gristmill.errors import (
    BadJob,
    BadOutput,
    BadSource,
    CorruptStore,
    GateFailed,
    GristmillError,
    PlanChanged,
    RunFailed,
    SourceChanged,
)
from gristmill.files.disk import join
from gristmill.fingerprint.loadedmodules import BUILT, changed
from gristmill.job.job import JobSpec
from gristmill.job.secret import reveal
from gristmill.observe import units
from gristmill.observe.events import Note
from gristmill.process import machine
from gristmill.process.failure import Unstacked
from gristmill.process.messages import Event, Printed, Waiting
from gristmill.process.startup import import_path
from gristmill.shards.numbers import Numbers
from gristmill.values import dataclass
from gristmill.worker.recipe import Task
from gristmill.worker.stages import ShardStages

MOST_TOUCHED = 3  # times that a run continues after its source was touched: something may be writing to it all the time
UNSEEN = 15.0  # seconds until a receipt written by another machine must be visible on a shared disk
LEASE_LOOK = 2.0  # seconds between checks that this run still holds its sink


@dataclass(frozen=True)
class Scored(Planned):
    """A plan whose shards are all committed, with their receipts; `sums` are of this run's part."""

    receipts: Ledger
    sums: Tallied


class Scoring:
    """The state of a run while it scores: `at` is the planned run, or the chosen one until the plan is made; `receipts`
    are those found at the last reading.
    """

    def __init__(self, chosen: Chosen, stops: machine.Stops) -> None:
        self.at = chosen if chosen.plan is None else Planned.made(chosen, chosen.plan)
        self.tally = Tally()
        self.receipts: Ledger | None = None
        self._stops = stops
        self._voided: set[int] = set()  # shards scored again because their files were gone
        self._warned: set[str] = set()  # the workers' warnings
        self._unstacked = Unstacked()
        self.on_time = OnTime(chosen.log, _deadline(chosen), chosen.verbs.accept)
        self._beside = Beside()
        self._run_name = secrets.token_hex(6)
        self._looked = 0.0
        self._sampled_rows = functools.cache(lambda: chosen.resolved.estimated_rows)

    @property
    def planned(self) -> Planned:
        """The planned run, once there is a plan."""
        assert isinstance(self.at, Planned)
        return self.at

    def run(self) -> Generator[Receipt, None, Scored]:
        """Score every shard that has no receipt; yields receipts in plan order for a stream, and nothing otherwise."""
        try:
            return (yield from self._run())
        finally:
            self._beside.stop()
            for failed in self._beside.failed:
                self.at.log.tell(f"loading beside the run: {failed}; tried again when the result is published")

    def _run(self) -> Generator[Receipt, None, Scored]:
        if before := min(self.at.verbs.spent, max_cost(self.at.spec) or 0.0):
            self._allowance().begin(before)
        if (update := keeping.planned(self.at)) is not None:
            self.at = update
        at, feed = self.at, self._feed()
        if isinstance(at, Planned):
            keeping.adopt(at)
            shards = at.plan.shards
            whole = self._all_read()  # refuses receipts of a later version, before any work
            at.log.say(**self.tally.begin(shards, self._ledger))
            if whole and not at.stream:
                return self._scored()
            self._check_early()
            missing = self._missing()
            self._tell_lost(self._ledger.torn)
            self._foresee(at, missing, None)
            feed.begin(at.task, missing, _inside(at))
        else:
            feed.probe = probe.probe(at, probe.first_rows(at))
        touched = 0
        while True:
            try:
                yield from self._driven(feed)
            except SourceChanged as e:
                touched += 1
                if at.stream or touched > MOST_TOUCHED or not self._as_planned():
                    raise self._changed(e) from e
                at.log.note("warning", f"{e}: it still holds what was read of it, so the run goes on")
            if self._all_read():
                return self._scored()
            self._refuse_unshared(feed.committed)
            missing = self._missing()
            if not touched:
                self._tell_lost(missing)
            feed = self._feed()
            feed.begin(self.planned.task, missing, _inside(self.planned))

    @property
    def spent(self) -> float:
        """Dollars of the model's max_cost that the run has spent, in an earlier part, too; 0 if it has none."""
        return 0.0 if max_cost(self.at.spec) is None else self._allowance().spent()

    def _allowance(self) -> Allowance:
        return Allowance(self.at.generation.folder, self._run_name, self.at.files)

    def _scored(self) -> Scored:
        return Scored(**vars(self.planned), receipts=self._ledger, sums=self.tally.sums())

    @property
    def _ledger(self) -> Ledger:
        assert self.receipts is not None
        return self.receipts

    def _changed(self, error: SourceChanged) -> GristmillError:
        """What a run ends with as its source changed, with the way out. An update goes on with the source as it is."""
        if self.at.spec.update is not None and self.at.generation.kind != "retry-dead":
            way = "run again without --restart" if self.at.verbs.restart else "run again"
            kept = "what is other now is scored, and all other rows keep their answers, those of this run, too"
            return RunFailed(f"{error}: {way}: {kept}")
        if "--restart" in str(error):
            return error
        return SourceChanged(f"{error}: put the planned file back and run again, or use {selection.RESTART}")

    def _as_planned(self) -> bool:
        """Whether there is a plan and the source files touched during the run are there and still hold what was read of
        them: then the run continues with them as they are now.
        """
        at = self.at
        if not isinstance(at, Planned):
            return False
        try:
            r = sourcecheck.looked_again(at.resolved)
            stored = generations.stored_inputs(at.generation)
            now = sourcecheck.reconciled(r, [at.generation], stored, at.log.tell)
        except (BadSource, SourceChanged):  # what the run ends with is the change that was met first
            return False
        if now != {path: r.fingerprint.inputs.get(path) for path in now}:
            return False
        self.at = replace(at, resolved=r, plan=sourcecheck.with_files(at.plan, r))
        return True

    # ------------------------------------------------ the engine

    def _feed(self) -> ShardFeed:
        at, r = self.at, self.at.resolved
        # A function over little input is done before a second worker has started: one should try first.
        small = r.info.call is not None and r.bytes < warmup.SMALL
        feed = ShardFeed(
            r.workers or 1, careful_start=small, out_of_memory=machine.OutOfMemory(), run=secrets.token_hex(6)
        )
        feed.sink = at.sink.uri
        feed.remote = r.info.at_once > 0
        feed.proof = self._proof
        feed.most_ahead = 4 * max(1, r.workers) if at.stream else None
        return feed

    def _proof(self, scored: int | None) -> Task:
        return probe.proof(self.at, None if scored is None else self.planned.plan.shards[scored])

    def _driven(self, feed: ShardFeed) -> Iterator[Receipt]:
        """Run the engine until the feed is done. Raises what stops the run, once nothing of it is left running."""
        at, r = self.at, self.at.resolved
        stages = _shipped(at, self._run_name)
        spec = replace(at.spec.engine, options=reveal(at.spec.engine.options))
        events = open_engine(spec, r.workers, import_path(), r.place.gpu).run(stages, feed)
        at.log.say(phase="running" if isinstance(at, Planned) else "loading", workers_wanted=r.workers)
        streamed = committed = 0
        try:
            for event in events:
                self._heard(event, feed)
                if time.monotonic() - self._looked > LEASE_LOOK:
                    self._looked = time.monotonic()
                    at.refuse_late()
                    self.on_time.look(at.log.now.share, at.log.now.eta)
                if feed.probed is not None and not isinstance(self.at, Planned):
                    self._plan(feed)
                self._check_early()
                if len(feed.committed) > committed and isinstance(self.at, Planned):
                    committed = len(feed.committed)
                    self._beside.wake(self.at)
                while at.stream and streamed in feed.committed:
                    yield self._one(streamed)
                    feed.consumed(streamed)
                    streamed += 1
                if self._stops.number is not None or feed.fatal is not None:
                    break
        except BaseException as e:
            if not isinstance(e, GateFailed):
                if isinstance(e, (PlanChanged, BadJob)) and not isinstance(self.at, Planned):
                    generations.refuse(at.generation)
                at.log.say(phase="failed")
            raise
        finally:
            feed.stopped = True
            events.close()
        if self._stops.number is not None:
            at.log.say(phase="stopped")
            raise self._stops.interrupted()
        if feed.fatal is not None:
            if isinstance(feed.fatal, BadOutput) and self.at.generation.kind == "retry-dead":
                self._give_up_retry()
            at.log.say(phase="failed")
            raise feed.fatal

    def _give_up_retry(self) -> None:
        """Answers that do not fit the result will not when the retry is resumed, which every later night would do."""
        self.at.refuse_late()
        generations.refuse(self.at.generation)
        self.at.log.note("warning", "this retry-dead is given up: its rows stay dead letters, and other runs go on")

    def _heard(self, event: Event, feed: ShardFeed) -> None:
        feed.on(event)
        log = self.at.log
        for note in feed.notes:
            log.observer.note(note)
        feed.notes.clear()
        if isinstance(event, Printed) and event.stream == "warning":
            if event.text not in self._warned:
                self._warned.add(event.text)
                log.note("warning", event.text)
        elif isinstance(event, Printed):
            for line in self._unstacked.lines(event.worker, log.scrubbed(event.text)):
                log.observer.note(Note("print", line, {"worker": event.worker}))
        elif isinstance(event, Waiting):
            log.say(waiting=log.scrubbed(event.reason))
        elif changes := self.tally.hear(event):
            log.say(**changes)

    def _plan(self, feed: ShardFeed) -> None:
        """After the probe has answered: make the plan, or probe more rows if none was scored."""
        answer, asked = feed.probed, feed.probe
        assert asked is not None and asked.rows is not None
        self.tally.tried(answer["figures"])
        if (more := probe.further(self.at, asked, answer)) is not None:
            feed.probe_further(more)
            return
        self.at = at = probe.planned(self.at, answer)
        feed.begin(at.task, range(len(at.plan.shards)), _inside(at))
        at.log.say(**self.tally.begin(at.plan.shards, None))
        self._foresee(at, range(len(at.plan.shards)), probe.sure_rate(at.resolved, answer))

    def _foresee(self, at: Planned, missing: Sequence[int], rate: float | None) -> None:
        """Say how long the shards that are missing take: by earlier runs, else by the rate of a worker on its first
        rows, if these took long enough.
        """
        if at.retries or at.stream:
            return
        shards, r = at.plan.shards, at.resolved
        rows = shards.rows()
        share = shards.weight_of(missing) / (shards.total_weight() or 1)
        left = share * (r.estimated_rows if rows is None else rows)
        updates = at.plan.about.updates is not None  # of which the first rows tell nothing: most are kept
        found = paces.forecast(r, left, at.root, at.files, updates)
        if found is None and rate and not updates:
            per_second = rate * max(1, r.workers)
            found = by_rate(left, per_second, "the first rows", at.log.seconds).priced(r.job.running.hour_price)
        self.on_time.begun(left, len(missing) < len(shards), found)

    def _check_early(self) -> None:
        at, so_far = self.at, self.tally.counts
        if not isinstance(at, Planned) or (rows := self.tally.rows_at_most(self._sampled_rows)) is None:
            return
        expanding = so_far.derived > so_far.expanded or any(s.kind == "flat_map" for s in at.spec.steps)
        if not (expanding or at.retries or at.verbs.accept):
            with at.log.gate():
                exact, maps = self.tally.total is not None, any(s.kind == "map" for s in at.spec.steps)
                if exact and maps:  # which may return rows more than once, in later shards only, too
                    exact, rows = False, gates.MARGIN * rows
                gates.early(at.spec.gates, so_far, rows, self.tally.errors, at.look, exact=exact)

    # ------------------------------------------------ receipts

    def _missing(self) -> list[int]:
        found: list[int] = self._ledger.missing(len(self.planned.plan.shards)).tolist()
        return found

    def _tell_lost(self, lost: Sequence[int]) -> None:
        if lost:
            which = units.plural(len(lost), "shard has", "shards have")
            lack = f"no readable receipt, or files that it names are missing ({list(lost[:5])})"
            self.at.log.note("warning", f"{which} {lack}: done again")

    def _all_read(self) -> bool:
        """Read all receipts. Returns whether every shard has a valid one whose files are all there."""
        at = self.planned
        self.receipts = Ledger.of(at.generation, self.receipts)
        if not at.stream:  # a stream removes what was read
            cut = self.receipts.cut_as_read
            if self._void_cut(at, self.receipts.cut() if cut is None else cut):
                self.receipts = Ledger.of(at.generation)
        return len(self.receipts) == len(at.plan.shards)

    def _void_cut(self, at: Planned, cut: Sequence[int]) -> Sequence[int]:
        """Void the receipts of shards whose files have been truncated or removed since. Raises CorruptStore the second
        time.
        """
        g = at.generation
        if cut:
            at.refuse_late()  # whoever gave up this generation has removed its files
        for shard in cut:
            if shard in self._voided:
                raise CorruptStore(
                    f"{g.work}: the files of shard {shard} were cut or removed right after they were written: "
                    "find out what does that, and run again"
                )
            self._voided.add(shard)
            publication.revoke(g, g.receipts, self._ledger[shard])
        return cut

    def _refuse_unshared(self, committed: Collection[int]) -> None:
        """Raises RunFailed if none of the shards that workers have committed has a receipt here, even a little later,
        as on network file systems: if each machine had a folder of its own, shards would be scored again and again.
        """
        until = time.monotonic() + UNSEEN
        while committed and not self._voided and not any(shard in self._ledger for shard in committed):
            if time.monotonic() > until:
                what = units.plural(len(committed), "shard was", "shards were")
                raise RunFailed(
                    f"{what} committed, but no receipt of theirs is in {self.at.generation.receipts} on this machine "
                    f"({socket.gethostname()}): the sink is not shared with the machines that the workers are on: give "
                    "a sink in a folder that all of them mount, or in an object store"
                )
            time.sleep(0.5)
            self._all_read()

    def _one(self, number: int) -> Receipt:
        files, folder = self.at.files, self.at.generation.receipts
        with contextlib.suppress(CorruptStore, FileNotFoundError):
            return Receipt.load_from(join(folder, receipts.name(number)), files)
        found = receipts.valid(receipts.listed(folder, files).get(number, []), files)
        if found is None:
            raise RunFailed(f"shard {number}: its receipt does not read back: run again")
        return found


def _deadline(at: Chosen) -> Deadline | None:
    return None if at.retries else Deadline.of(at.spec, at.verbs.tick)


def max_cost(spec: JobSpec) -> float | None:
    """What a run of a job may cost, if it says that."""
    return getattr(spec.model, "max_cost", None)


def _shipped(at: Chosen, run: str) -> ShardStages:
    """What an engine is given to ship to workers of a run."""
    r = at.resolved
    before = [] if at.base is None else selection.Held.by(at.root, at.files).members(at.base)
    loaded = selection.noted(at.generation, before)
    if at.verbs.accept_code_change:
        others = [entry for entry in loaded if entry.startswith(BUILT) or changed({entry: loaded[entry]})]
        loaded = {entry: told for entry, told in loaded.items() if entry not in others}
    recipe = replace(shipping.recipe(r, at.sink, at.files, at.batch, run), loaded=loaded)
    if r.workers == 0:
        recipe = shipping.as_sent(recipe)
    beside = at.spec.engine.steps_workers if r.workers > 0 else 0
    return ShardStages(recipe, max(1, r.place.threads), r.gpus, timed=r.workers > 0, beside=beside)


def _inside(at: Planned) -> Numbers:
    """The shards that are cheap only for the worker that has read the one before."""
    return at.plan.shards.inside(at.resolved.files)

"""A run: drives an engine with a feed until every shard has a receipt, checks the gates, publishes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shlex
import socket
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from gristmill import (
    ahead,
    backends,
    budgets,
    choosing,
    gating,
    machine,
    planning,
    reporting,
    rereading,
    retrying,
    shipping,
    tables,
)
from gristmill.commit import generation as generations
from gristmill.commit import ids, inspections, publication, reading
from gristmill.commit import publish as publishing
from gristmill.commit import receipt as receipts
from gristmill.commit.generation import Generation, Plan
from gristmill.commit.places import opened
from gristmill.commit.publication import Live, Publication, live_of
from gristmill.commit.receipt import Receipt
from gristmill.commit.store import LOCAL, join
from gristmill.engines.interpreter import SPARES
from gristmill.engines.registry import open_engine
from gristmill.errors import (
    BadJob,
    CorruptStore,
    GateFailed,
    GristmillError,
    Interrupted,
    PlanChanged,
    RunFailed,
    SinkBusy,
    SourceChanged,
)
from gristmill.feeding import MOST_PROBED, ShardFeed
from gristmill.io.patience import StoreAway
from gristmill.models.loaded import BUILT, changed
from gristmill.models.watching import Watch
from gristmill.observe import units
from gristmill.observe.events import Note, Observer, Progress, Silent
from gristmill.observe.report import Report
from gristmill.plan import shard
from gristmill.plan.contracts import Event, Files, Lease, Printed, Waiting
from gristmill.plan.counts import Counts
from gristmill.plan.failing import Unstacked
from gristmill.plan.job import JobSpec, Sink
from gristmill.plan.options import BatchPlan
from gristmill.plan.processes import import_path, starting
from gristmill.plan.secret import reveal, scrub, secrets_in
from gristmill.plan.shard import Selection, Shard
from gristmill.plan.specs import FunctionModel, TextClassifier, TextEmbedder
from gristmill.planning import Resolved
from gristmill.tally import Tally
from gristmill.worker.recipe import Task
from gristmill.worker.work import ShardStages

MOST_TOUCHED = 3  # times that a run goes on after its source was touched: something may be writing to it all the time
PROBE_ROWS = 64  # what comes of them tells the schema of the output
UNSEEN = 15.0  # seconds after which a receipt that another machine has written is seen on a shared disk
LEASE_LOOK = 2.0  # seconds between two looks whether this run still holds its sink
TIMED_ROWS = 16  # where that is known, only the pace is to be found, while the other workers wait


def run(
    spec: JobSpec,
    *,
    restart: bool = False,
    append: bool = False,
    accept: bool = False,
    observer: Observer | None = None,
) -> Report:
    """Run a job to its end, or go on where it stopped. Returns the report of what is published.

    Raises BadJob (nothing was run), PlanChanged, SinkBusy, GateFailed, RunFailed, Interrupted; those raised after rows
    were scored carry `.report`.
    """
    return _through_tables(spec, Verbs(restart, append, accept), observer)


def retry_dead(spec: JobSpec, *, accept_code_change: bool = False, observer: Observer | None = None) -> Report:
    """Score the dead letters of a job's live result again. Those that succeed stand after the others' rows, in files
    of their own, also where the result was one file.

    Raises PlanChanged where the code is another and that was not accepted, where anything else is another, and where
    the steps make other rows of a source row than they did, so that a dead one of them is not found again.
    """
    return _through_tables(spec, Verbs(retry=True, accept_code_change=accept_code_change), observer)


def _through_tables(spec: JobSpec, verbs: Verbs, observer: Observer | None) -> Report:
    starting("a job")
    with tables.opened(spec) as job:
        first = Run(job.spec, verbs, observer)
        report = first.run()
        if first.later and first.appends:  # an unfinished plan was finished as it was made; now what came since
            report = Run(job.spec, replace(verbs, restart=False, append=True), observer).run()
        job.settle()
    return report


def sink_root(sink: Sink) -> str:
    """The sink's root: a folder as an absolute path, or a place in an object store. Raises BadJob for anything else."""
    return sink_place(sink)[0]


def sink_place(sink: Sink) -> tuple[str, Files]:
    """The sink's root, which has no secrets in it, and the file layer that opens it."""
    if sink.uri.startswith(tables.SCHEME):
        return tables.folder_of(sink), LOCAL
    return opened(sink.uri, sink.storage)


@dataclass(frozen=True)
class Verbs:
    """What a person said about a sink that holds something already."""

    restart: bool = False
    append: bool = False
    accept: bool = False
    retry: bool = False
    accept_code_change: bool = False


# What a publication has of its plan.
_COPIED = ("model", "fingerprint", "output_schema", "answers", "made", "sink_format", "partition_by")


class Run:
    """One run of one job on one sink. A `stream` yields the receipts of committed shards in plan order."""

    def __init__(
        self,
        spec: JobSpec,
        verbs: Verbs | None = None,
        observer: Observer | None = None,
        *,
        stream: bool = False,
        files: Files | None = None,
    ) -> None:
        if spec.sink is None:
            raise BadJob(
                "the job has no sink: give one (sink=…), take answers as they come with job.stream(), or use "
                "gm.apply(data, fn=…), gm.embed(data, …) or gm.classify(data, …) to get a table back"
            )
        self.spec = spec
        self.sink = spec.sink
        self.root, opened_files = sink_place(spec.sink)
        if opened_files is not LOCAL:
            self.sink = replace(spec.sink, uri=self.root, storage={})
        self.report: Report
        self._verbs = verbs or Verbs()
        self._observer = observer or Silent()
        self._files: Files = files or opened_files
        self._begun = time.monotonic()
        self._stops = machine.Stops()
        self._stream = stream
        self._tally = Tally()
        self._now = Progress(sink=self.sink.uri, model=spec.model.name)
        self._said = 0.0
        self._warned: set[str] = set()  # of what workers warn
        self._unstacked = Unstacked()
        self._notes: list[str] = []
        self._secrets = tuple(secrets_in(spec))
        self._plan: Plan | None = None
        self._generation: Generation | None = None
        self._base: Publication | None = None
        self._looked = 0.0
        self.later: tuple[str, ...] = ()
        self._lease: Lease
        self._batch: BatchPlan
        self._look: str
        self._receipts: dict[int, Receipt] = {}
        self._voided: set[int] = set()  # shards that were scored again, as their files had gone

    @property
    def plan(self) -> Plan:
        """The plan, once it stands."""
        assert self._plan is not None
        return self._plan

    @property
    def generation(self) -> Generation:
        """The generation that this run works on."""
        assert self._generation is not None
        return self._generation

    def run(self) -> Report:
        """See the module's `run`."""
        for _ in self.shards():
            pass
        return self.report

    def shards(self) -> Iterator[Receipt]:
        """The run, step by step: yields receipts in plan order where this is a stream, and nothing otherwise. Between
        them signals are the program's, which may ask for the next one in another thread.
        """
        shards = self._shards()
        try:
            while True:
                with self._stops.caught():
                    done = next(shards, None)
                if done is None:
                    return
                yield done
        finally:
            with self._stops.caught():
                shards.close()

    def _shards(self) -> Generator[Receipt, None, None]:
        try:
            self._say(phase="planning")
            ahead.start(self.spec)
            self._look_at_sink()
            # Before the sink's folder is made, so that a job that cannot run leaves nothing behind.
            claims = generations.generations(self.root, self._files)
            written = generations.written(self.root, self._files)
            known = inspections.of_generations(claims)
            # What is there may be a plan that goes on, or is done: whether files differ is asked where one is begun.
            r = None
            if self.spec.source.data is None:
                texts = next((g.fingerprint.get("texts", ()) for g in reversed(claims) if not g.lost), ())
                r = planning.resolve(self._plannable(), None, known, begins=not claims, texts=texts, written=written)
            self._open_sink()
            folder = generations.meta(self.root)
            with self._files.lease(self.sink.uri, folder, self._tell) as self._lease:
                yield from self._held(r)
        except (GristmillError, Interrupted) as e:
            if e.report is None and self._plan is not None:
                e.report = self._partial_report(e)
            raise
        except OSError as e:  # a full or failing disk; what the workers meet of it comes as an outcome
            if isinstance(e, StoreAway):
                text = f"{e}: nothing that was committed is lost; run again when it does"
            else:
                where = "store answers" if "://" in self.sink.uri else "disk is well"
                way = f"nothing that was committed is lost; run again when the {where}"
                if isinstance(e, FileNotFoundError) and str(e.filename).startswith(generations.meta(self.root)):
                    way = (
                        f"a file of the sink's own is gone, verify tells which: put it back, or use {choosing.RESTART}"
                    )
                text = f"{self.sink.uri}: {e}: {way}"
            report = self._partial_report(None) if self._plan is not None else None
            raise RunFailed(text, report=report) from e
        finally:
            SPARES.end()
            if not (self.later and self.appends):
                self._observer.close()

    def _held(self, r: Resolved | None) -> Iterator[Receipt]:
        if r is None:
            r = self._with_data()
        for note in r.warnings:
            self._note("warning", note)
        if r.nulls_given:
            self._note("info", r.nulls_given)
        with contextlib.suppress(CorruptStore):  # of a result that cannot be read; --restart replaces that
            publishing.settle(self.root, self._files)  # where a run was stopped after it had published
        choice = self._chosen(r)
        self.resolved, self._base = choice.resolved, choice.base
        if choice.warning:
            self._note("warning", choice.warning)
        opened = (self.root, self._files)
        # Of a result that stays live; one that is replaced may have gone.
        if (choice.generation is None or choice.base is not None) and (restored := publishing.put_back(*opened)):
            what = units.plural(
                len(restored), "published file had gone or was cut", "published files had gone or were cut"
            )
            self._note("warning", f"{what}: put back, as their rows were still kept")
        if choice.generation is None:
            seconds, engine = time.monotonic() - self._begun, self.spec.engine.name
            self.report = reporting.untouched(self.sink.uri, opened, seconds, engine, self._notes)
            self._say(phase="done")
            return
        self._generation = choice.generation
        self._say(generation=self.generation.number)
        self._look = self._how_to_look()
        if choice.resumed:
            self._plan = rereading.with_files(generations.read_plan(self.generation), r)
            self.resolved = rereading.as_planned(self.resolved, self._plan)
        watch = Watch(self.resolved.fingerprint.looked, self._note_written)
        try:
            with watch:
                self._settle()
                with self._stops.heeded():
                    yield from self._score()
                self._tell_later(choice.later)
                watch.look()
                self._tell_written(watch)
                self._publish()
        finally:
            self._tell_written(watch)
        budgets.remember(self.resolved, self._batch, self._tally.figures)
        self.later = choice.later

    def _with_data(self) -> Resolved:
        """A job over a table in memory, which is written down beside the plan, or on this machine only where that is
        an object store: there the job must give the same table again to go on.
        """
        opened = (self.root, self._files)
        return planning.resolve(
            self._plannable(), generations.held_inputs(*opened), written=generations.written(*opened)
        )

    def _note_written(self, paths: list[str]) -> None:
        """Files that arguments name have come during this run: the code writes them, unless another run has begun."""
        if self._lease.held():
            generations.note_written(self.root, self._files, paths)

    def _tell_written(self, watch: Watch) -> None:
        """What has come, once: a person may have put it there."""
        if watch.seen:
            files = f"{', '.join(watch.seen[:5])}{' …' if len(watch.seen) > 5 else ''}"
            self._note("info", f"came during this run, taken for written by the code, and not compared: {files}")
            watch.seen.clear()

    def _settle(self) -> None:
        """The backend: that of the plan that this run goes on with, or joins; else chosen now. And the batch budget."""
        told = self.plan.about if self._plan is not None else self._base_about()
        if told is not None:
            self.resolved = backends.stored(self.resolved, told.get("runs_on", {}).get("backend"))
        else:
            chosen = backends.settle(self.resolved)
            self.resolved = chosen.resolved
            for note in chosen.notes:
                self._note("info", note)
        self._batch = budgets.chosen(self.resolved, None if self._plan is None else self.plan.about["batch"])

    def _base_about(self) -> dict[str, Any] | None:
        """The plan of the generation whose live files stay live beside this one's."""
        base = self.generation.base
        known = [g for g in generations.generations(self.root, self._files) if g.number == base]
        return generations.read_plan(known[0]).about if known else None

    def _plannable(self) -> JobSpec:
        """The job as planning checks it: what a person has accepted must not be refused for its null counts again."""
        if not self._verbs.accept:
            return self.spec
        return replace(self.spec, gates=replace(self.spec.gates, min_ok=0.0))

    # ------------------------------------------------ the sink

    def _look_at_sink(self) -> None:
        try:
            npy = self.sink.format == "npy"
            publishing.refuse_foreign(self.root, self.sink.overwrite, self._files, manifest=npy)
        except OSError as e:
            raise BadJob(f"sink {self.sink.uri}: cannot be looked at ({e.strerror})") from e

    def _open_sink(self) -> None:
        """Fails before anything is loaded where the sink cannot be written (fault 6)."""
        try:
            self._files.prove(generations.meta(self.root))
        except OSError as e:
            raise BadJob(f"sink {self.sink.uri}: cannot be written ({e.strerror}): give another folder") from e

    def _chosen(self, r: Resolved) -> choosing.Choice:
        v, uri = self._verbs, self.sink.uri
        if v.retry:
            code = v.accept_code_change
            return retrying.choose(self._files, self.root, uri, r, accept_code_change=code, tell=self._tell)
        verbs = {"restart": v.restart, "append": self.appends, "accept": v.accept}
        return choosing.choose(self._files, self.root, uri, r, **verbs, tell=self._tell)

    # ------------------------------------------------ scoring

    def _score(self) -> Iterator[Receipt]:
        feed = self._feed()
        if self._plan is None:
            feed.probe = self._probe_task(self._first_rows())
        else:
            done = receipts.listed(self.generation.receipts, self._files)
            self._say(**self._tally.begin(self.plan.shards, set(done)))
            if len(done) == len(self.plan.shards) and not self._stream and self._all_read():
                return
            feed.begin(self._task, (n for n in range(len(self.plan.shards)) if n not in done))
        touched = 0
        while True:
            try:
                yield from self._driven(self.resolved, feed)
            except SourceChanged as e:
                touched += 1
                if self._stream or self._plan is None or touched > MOST_TOUCHED or not self._as_planned():
                    raise
                self._note("warning", f"{e}: it holds what was read of it, so that the run goes on")
            if self._all_read():
                return
            self._refuse_unshared(feed.committed)
            missing = [n for n in range(len(self.plan.shards)) if n not in self._receipts]
            if not touched:
                which = units.plural(len(missing), "shard has", "shards have")
                lack = f"no readable receipt, or not the files that it names ({missing[:5]})"
                self._note("warning", f"{which} {lack}: done again")
            feed = self._feed()
            feed.begin(self._task, missing)

    def _as_planned(self) -> bool:
        """Whether source files that were touched during the run still hold what was read of them: then the plan goes on
        with them as they are now.
        """
        r = rereading.looked_again(self.resolved)
        stored = generations.stored_inputs(self.generation)
        now = rereading.reconciled(r, [self.generation], stored, self._tell)
        if now != {path: r.fingerprint.inputs.get(path) for path in now}:
            return False
        self.resolved, self._plan = r, rereading.with_files(self.plan, r)
        return True

    def _feed(self) -> ShardFeed:
        r = self.resolved
        feed = ShardFeed(
            r.workers or 1, careful_start=_small(r), out_of_memory=machine.OutOfMemory(), run=secrets.token_hex(6)
        )
        retry = self.generation.kind == "retry-dead"
        feed.proof = None if self._plan is None and not retry else self._proof()
        feed.most_ahead = 4 * max(1, r.workers) if self._stream else None
        return feed

    def _driven(self, r: Resolved, feed: ShardFeed) -> Iterator[Receipt]:
        """Run the engine until the feed is done. Raises what stops the run, after nothing of it is left running."""
        base = self._base
        before = [] if base is None else choosing.Held.by(self.root, self._files).members(base)
        loaded = choosing.noted(self.generation, before)
        if self._verbs.accept_code_change:
            others = [entry for entry in loaded if entry.startswith(BUILT) or changed({entry: loaded[entry]})]
            loaded = {entry: told for entry, told in loaded.items() if entry not in others}
        shipped = replace(shipping.recipe(r, self.sink, self._files, self._batch), loaded=loaded)
        beside = self.spec.engine.steps_workers if r.workers > 0 else 0
        stages = ShardStages(shipped, max(1, r.place.threads), r.gpus, timed=r.workers > 0, beside=beside)
        spec = replace(self.spec.engine, options=reveal(self.spec.engine.options))
        engine = open_engine(spec, r.workers, import_path(), r.place.device == "cuda")
        events = engine.run(stages, feed)
        self._say(phase="loading" if self._plan is None else "running", workers_wanted=r.workers)
        streamed = 0
        try:
            for event in events:
                self._heard(event, feed)
                if time.monotonic() - self._looked > LEASE_LOOK:
                    self._looked = time.monotonic()
                    self._refuse_late()
                if feed.probed is not None and self._plan is None:
                    self._planned(r, feed)
                self._check_early()
                while self._stream and streamed in feed.committed:
                    yield self._one(streamed)
                    feed.consumed(streamed)
                    streamed += 1
                if self._stops.number is not None or feed.fatal is not None:
                    break
        except BaseException as e:
            if not isinstance(e, GateFailed):
                if self._plan is None and isinstance(e, (PlanChanged, BadJob)):
                    generations.refuse(self.generation)
                self._say(phase="failed")
            raise
        finally:
            feed.stopped = True
            events.close()
        if self._stops.number is not None:
            self._say(phase="stopped")
            raise self._stops.interrupted()
        if feed.fatal is not None:
            self._say(phase="failed")
            raise feed.fatal

    def _refuse_unshared(self, committed: Collection[int]) -> None:
        """Raises RunFailed where none of the shards that workers have committed has a receipt here, also not a little
        later, as with network file systems: a folder of each machine's own would be filled again and again.
        """
        until = time.monotonic() + UNSEEN
        while committed and not self._voided and self._receipts.keys().isdisjoint(committed):
            if time.monotonic() > until:
                what = units.plural(len(committed), "shard was", "shards were")
                raise RunFailed(
                    f"{what} committed, but no receipt of theirs is in {self.generation.receipts} on this machine "
                    f"({socket.gethostname()}): the sink is not shared with the machines that the workers are on: give "
                    "a sink in a folder that all of them mount, or in an object store"
                )
            time.sleep(0.5)
            self._all_read()

    def _all_read(self) -> bool:
        """Read all receipts; whether every shard has one whose checksum holds, and the files that it names."""
        self._receipts = receipts.standing(self.generation.receipts, self._files)
        if not self._stream:  # which removes what was read
            self._void_cut()
        return len(self._receipts) == len(self.plan.shards)

    def _void_cut(self) -> None:
        """Receipts of files that were cut since, or have gone, count no more. Raises CorruptStore the second time."""
        g = self.generation
        cut = receipts.cut(self._files, g.work, self._receipts.values())
        if cut:
            self._refuse_late()  # whoever has given this generation up has removed its files
        for receipt in cut:
            if receipt.shard in self._voided:
                raise CorruptStore(
                    f"{g.work}: the files of shard {receipt.shard} were cut or removed as soon as they were written: "
                    "find out what does that, and run again"
                )
            self._voided.add(receipt.shard)
            receipts.void(self._files, self.root, g.receipts, receipt)
            del self._receipts[receipt.shard]

    def _one(self, number: int) -> Receipt:
        found = receipts.valid(receipts.listed(self.generation.receipts, self._files).get(number, []), self._files)
        if found is None:
            raise RunFailed(f"shard {number}: its receipt does not read back: run again")
        return found

    def _task(self, number: int) -> Task:
        g = self.generation
        schema, about = self.plan.schema, self.plan.about
        made = {step: generations.decode_schema(text) for step, text in about["made"].items()}
        told = tuple(about["answers"]), made
        return Task("score", self.plan.shards[number], g.number, g.folder, self.root, schema, *told, only=self._only())

    def _only(self) -> retrying.Only | None:
        name = self.plan.about.get("only")
        return retrying.Only(join(self.generation.folder, name), self._files) if name else None

    # ------------------------------------------------ the plan

    def _first_rows(self) -> int:
        """How many a probe scores: one batch at most."""
        known = isinstance(self.resolved.model, (TextEmbedder, TextClassifier)) and not (
            self.spec.steps or self.spec.post
        )
        return min(TIMED_ROWS if known else PROBE_ROWS, self._batch.rows)

    def _proof(self) -> Task:
        """Rows from elsewhere, for when the model fails on all that was tried: of a retry also such as lived."""
        r, g = self.resolved, self.generation
        rows, everything = self._first_rows(), Selection.everything(r.files)
        pieces = shipping.pieces(replace(r, selection=everything), rows * 64)
        return Task("proof", Shard(0, pieces), g.number, g.folder, self.root, rows=rows)

    def _probe_task(self, rows: int) -> Task:
        r, g = self.resolved, self.generation
        base = None if g.schema is None or self.sink.evolve else generations.decode_schema(g.schema)
        first = Shard(0, shipping.pieces(r, rows * 64))
        # Those that the rows before may lack: what each of them had is wanted of these, too.
        fields = {step: generations.decode_schema(text) for step, text in self._made({}).items()}
        made = {step: pa.schema([f for f in schema if f.nullable]) for step, schema in fields.items()}
        told = tuple(name for name, optional in self._answers({}).items() if optional), made
        return Task("probe", first, g.number, g.folder, self.root, None, *told, base, rows=rows, only=r.only)

    def _planned(self, r: Resolved, feed: ShardFeed) -> None:
        """The probe has answered: fix schema and shards, write the plan; or look at more rows if none was scored."""
        answer, asked = feed.probed, feed.probe
        assert asked is not None and asked.rows is not None
        self._tally.tried(answer["figures"])
        # Rows that are all filtered cost little: the next ones are looked at, however many that takes.
        # Rows that are added to a result have its schema, whether any of these can be scored or not.
        more = self.generation.schema is None and (asked.rows < MOST_PROBED or not answer["dead"])
        if answer["schema"] is None and answer["rows"] >= asked.rows and more:
            feed.probe_further(self._probe_task(asked.rows * 16))
            return
        shipping.check_columns(r, self.sink, answer)
        # The slower stage sets the pace: without steps the model, as opening a file must not be taken for work.
        stages = ("model_seconds", "prepare_seconds") if self.spec.steps else ("model_seconds",)
        seconds = max(answer["figures"].get(stage, 0.0) for stage in stages)
        rate = answer["ok"] / seconds if seconds > 0 and answer["ok"] else None
        table = shard.cut(r.files, r.selection, planning.shard_rows(r, rate), max(1, r.workers))
        about = {
            "fingerprint": r.fingerprint.as_dict(),
            "output_schema": self._schema(answer["schema"]),
            "answers": self._answers(answer["answers"]),
            "made": self._made(answer["made"]),
            "reads": rereading.described(shipping.reader(r)),
            "sink_format": r.sink_format.name,
            "partition_by": list(self.sink.partition_by),
            "model": {"name": self.spec.model.name, "digest": r.info.digest, "version": shipping.model_version(r)},
            "batch": budgets.stored(self._batch),
            "runs_on": shipping.runs_on(r),
            "workers": r.workers,
            "everything": r.whole and r.only is None,
            "only": None if r.only is None else os.path.basename(r.only.path),
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        inspected = inspections.as_table(r.files, r.looked_at)
        self._plan = generations.write_plan(self._files, self.generation, about, list(r.files), table, inspected)
        feed.begin(self._task, range(len(self.plan.shards)))
        self._say(**self._tally.begin(self.plan.shards, set()))

    def _answers(self, probed: Mapping[str, bool]) -> dict[str, bool]:
        """The columns that the model answered in, for the first rows or those of the result that this one adds to, and
        whether some of these had null there.
        """
        before: dict[str, bool] = {} if self._base is None else self._base.body["answers"]
        return {name: before.get(name, False) or probed.get(name, False) for name in (*before, *probed)}

    def _made(self, probed: Mapping[str, Sequence[pa.Field]]) -> dict[str, str]:
        """The columns that dicts of steps added, likewise, by step."""
        before = {} if self._base is None else self._base.body["made"]
        found = {step: {f.name: f for f in generations.decode_schema(text)} for step, text in before.items()}
        for step, fields in probed.items():
            found[step] = {**{f.name: f for f in fields}, **found.get(step, {})}
        return {step: generations.encode_schema(pa.schema(list(fields.values()))) for step, fields in found.items()}

    def _schema(self, probed: str | None) -> str:
        """The output schema of this generation's plan: its base's, where it has one, which the first rows must fit."""
        base = self.generation.schema
        if base is None:
            form, known = self.resolved.sink_format, shipping.schema_without_rows(self.resolved)
            return probed or generations.encode_schema(form.stored(known.empty_table(), self.sink.options))
        if probed is None:
            return base
        found = generations.decode_schema(base), generations.decode_schema(probed)
        schema = shipping.added_schema(*found, self.sink)
        if self._base is not None:
            shipping.check_exact(self._base, schema, self.sink.uri)
        return generations.encode_schema(schema)

    # ------------------------------------------------ events

    def _heard(self, event: Event, feed: ShardFeed) -> None:
        feed.on(event)
        for note in feed.notes:
            self._observer.note(note)
        feed.notes.clear()
        if isinstance(event, Printed) and event.stream == "warning":
            if event.text not in self._warned:
                self._warned.add(event.text)
                self._note("warning", scrub(event.text, self._secrets))
        elif isinstance(event, Printed):
            for line in self._unstacked.lines(event.worker, scrub(event.text, self._secrets)):
                self._observer.note(Note("print", line, {"worker": event.worker}))
        elif isinstance(event, Waiting):
            self._say(waiting=scrub(event.reason, self._secrets))
        elif changes := self._tally.hear(event):
            self._say(**changes)

    def _check_early(self) -> None:
        rows = None if self._plan is None else self.plan.shards.rows()
        so_far = self._tally.counts
        expanding = so_far.derived > so_far.expanded or any(s.kind == "flat_map" for s in self.spec.steps)
        retry = self._plan is not None and self.generation.kind == "retry-dead"
        if rows is not None and not (expanding or retry or self._verbs.accept):
            with self._gate_noted():
                gating.early(self.spec.gates, so_far, rows, self._tally.errors, self._look)

    def _say(self, **changes: Any) -> None:
        phase = self._now.phase
        self._now = replace(self._now, elapsed=time.monotonic() - self._begun, **changes)
        if self._now.phase == phase and time.monotonic() - self._said < 0.1:
            return
        self._said = time.monotonic()
        self._observer.progress(self._now)
        if self._generation is not None:
            line = {**dataclasses.asdict(self._now), "at": time.time(), "pid": os.getpid()}
            with contextlib.suppress(OSError):  # status is a courtesy: a full disk is found where it matters
                self._lease.say(generations.progress_path(self.generation), json.dumps(line).encode())

    def _tell_later(self, later: tuple[str, ...]) -> None:
        """The source has files that the plan which this run went on with did not know."""
        if later and not self.appends:
            files = f"{len(later)} files" if len(later) > 1 else later[0]
            text = f"{files} came after this run was planned and are not in its result"
            self._note("warning", f"{text}: run again with --append (append=True)")

    @property
    def appends(self) -> bool:
        """Whether a person has said that new files are to be appended."""
        return self._verbs.append or self.spec.on_new_files == "append"

    def _tell(self, text: str) -> None:
        self._note("info", text)

    def _note(self, level: Any, text: str, **fields: Any) -> None:
        text = scrub(text, self._secrets)
        self._notes.append(text)
        self._observer.note(Note(level, text, fields))

    # ------------------------------------------------ publishing

    def _publish(self) -> None:
        done = [self._receipts[n] for n in sorted(self._receipts)]
        counts = sum((Counts(*x.counts) for x in done), Counts())
        self._say(phase="publishing", **self._tally.ended(counts))
        with self._gate_noted():
            self._gates(counts, done)
            whole = self._whole(counts, done)
            self._audited(whole, live_of(self.generation, done))
        if self.sink.merge:
            from gristmill.commit.merge import merge

            form, options = self.resolved.sink_format, self.sink.options
            done = merge(self._files, self.generation, done, form, self.plan.schema, options)
        self._refuse_late()
        try:
            publishing.link_parts(self._files, self.generation, done)
        except CorruptStore:
            self._refuse_late()  # whoever has given this generation up has removed its files
            raise
        live = [*(f for f in whole.live if f.role != "manifest"), *live_of(self.generation, done)]
        if self.plan.about["sink_format"] == "npy":
            live.append(publishing.manifest(self.generation, done, whole.live))
        whole = replace(whole, live=live)
        publishing.publish(self.generation, self._about(whole), whole.live)
        if (repeated := ids.said(publication.published(self.root, self._files))) is not None:
            self._note("warning", repeated)
        if self.generation.kind == "append":
            added = units.plural(counts.rows_in, "row"), units.plural(len(self.plan.shards.files), "new file")
            self._note(
                "info", f"added {added[0]} of {added[1]}; rows and files of the report are those of the whole result"
            )
        if self.generation.kind == "retry-dead" and counts.ok:
            rows = units.plural(counts.ok, "retried row stands", "retried rows stand")
            self._note("info", f"{rows} after the others, in files of their own")
        self.report = self._report(whole, done)
        self._say(phase="done")

    def _refuse_late(self) -> None:
        """Raises SinkBusy where another run has taken this sink over while this one stood still."""
        if not self._lease.held():
            raise SinkBusy(
                f"{self.sink.uri}: another run has taken over this sink while this one stood still: what is committed "
                "is kept; run again when the other one has ended"
            )

    def _whole(self, new: Counts, done: Sequence[Receipt]) -> reporting.Whole:
        """The live result with what this generation adds to its base's, but for this one's files."""
        errors, shards = gating.summed(x.errors for x in done), len(self.plan.shards)
        if self._base is None or self.generation.base is None:
            return reporting.Whole(new, errors, shards, [self.generation.number], [])
        body, live = self._base.body, self._base.live()
        before = Counts(*body["counts_list"])
        numbers, shards = [*body["generations"], self.generation.number], body["shards"] + shards
        if self.generation.kind != "retry-dead":
            errors = gating.summed([body.get("errors", {}), errors])
            return reporting.Whole(before + new, errors, shards, numbers, live)
        letters = reading.dead_letters(reading.letters_of(self.root, live, self._files), self._files)
        # All of the base's letters were scored again: those that are still dead are this generation's own.
        counts = retrying.combined(before, letters, new)
        return reporting.Whole(counts, errors, shards, numbers, [f for f in live if f.role != "dead"])

    def _gates(self, counts: Counts, done: Sequence[Receipt]) -> None:
        retry = self.generation.kind == "retry-dead"
        gating.account(counts, None if retry else self.plan.shards.rows())
        errors = gating.summed(x.errors for x in done)
        if warning := gating.warning(self.spec.gates, counts, errors):
            self._note("warning", warning, rows_dead=counts.dead + counts.derived_dead)
        if not self._verbs.accept and not retry:
            gating.final(self.spec.gates, counts, errors, self._look, self.generation.kind == "append")

    def _audited(self, whole: reporting.Whole, new: Sequence[Live]) -> None:
        """Ask the audits about the whole result with its `new` files. Raises GateFailed where one refuses it, unless
        that was accepted.
        """
        if not self.spec.audit:
            return
        root, files, about = self.root, self._files, self.plan.about
        live = [*whole.live, *new]
        parts, ids = ([f for f in live if f.role == role] for role in ("rows", "ids"))
        staged = gating.Staged(
            whole.counts,
            tuple(reading.readable(root, parts, files)),
            tuple(reading.readable(root, ids, files)),
            self.plan.schema,
            about["sink_format"],
            reading.opener(root, live, files),
            lambda: reading.dataset_of(root, files, parts, about),
        )
        for refused in gating.refusals(planning.audits(self.spec), staged):
            if not self._verbs.accept:
                ways = "the same job again with --accept (accept=True) publishes it all the same"
                raise GateFailed(f"{refused}; nothing new was published ({ways})")
            self._note("warning", f"{refused}, which was accepted")

    def _how_to_look(self) -> str:
        """How to read the dead letters before they are published; a stream's go with its folder."""
        if self._stream:
            return "job.run() keeps them to be looked at"
        return f"gristmill dead {shlex.quote(self.sink.uri)} shows them"

    @contextlib.contextmanager
    def _gate_noted(self) -> Iterator[None]:
        """Notes a gate that does not hold, while the lease is held, for `gristmill status`."""
        try:
            yield
        except GateFailed as e:
            self._say(phase="gate failed", gate=scrub(str(e), self._secrets))
            raise

    def _about(self, whole: reporting.Whole) -> dict[str, Any]:
        plan, total = self.plan.about, whole.counts
        return {
            "generations": list(whole.generations),
            "counts": dataclasses.asdict(total),
            "counts_list": list(total.values()),
            "rows_in": total.rows_in,
            "rows_ok": total.ok,
            "rows_dead": total.dead + total.derived_dead,
            "rows_filtered": total.filtered + total.derived_filtered,
            **{name: plan[name] for name in _COPIED},
            "shards": whole.shards,
            "published": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": round(time.monotonic() - self._begun, 3),
            "errors": {k: int(v) for k, v in whole.errors.items()},
            "skipped": list(self.resolved.skipped),
        }

    # ------------------------------------------------ reports

    def _report(self, whole: reporting.Whole, done: Sequence[Receipt]) -> Report:
        return reporting.finished(self._partial_report(None), whole, done, self._tally)

    def _partial_report(self, error: BaseException | None) -> Report:
        counts = self._tally.counts
        if self._receipts and error is not None:
            counts = sum((Counts(*x.counts) for x in self._receipts.values()), Counts())
        r = self.resolved
        return Report(
            sink=self.sink.uri,
            opened=(self.root, self._files),
            state=self._now.phase,
            generation=self.generation.number,
            counts=counts,
            shards=len(self.plan.shards),
            shards_done=self._tally.shards_done,
            shards_resumed=self._tally.resumed,
            seconds=time.monotonic() - self._begun,
            model=self.spec.model.name,
            digest=r.info.digest,
            workers=r.workers,
            engine=self.spec.engine.name,
            rows_run=self._tally.counts.rows_in,
            per_worker=self._tally.per_worker(),
            notes=tuple(self._notes),
            skipped=r.skipped,
            format=r.sink_format.name,
            details={"runs_on": shipping.runs_on(r), "batch": budgets.stored(self._batch)},
        )


# ---------------------------------------------------------------- pieces of a run


def _small(r: Resolved) -> bool:
    """Whether one worker should look first: a function over little input is done before a second one has started."""
    return isinstance(r.model, FunctionModel) and r.bytes < ahead.SMALL

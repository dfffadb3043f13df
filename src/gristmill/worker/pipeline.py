"""A worker: the three stages as one pipeline of threads with bounded queues between them. The model never waits for
disk or tokeniser while there is anything to predict.
"""

from __future__ import annotations

import contextlib
import math
import queue
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from gristmill.commit import generation as generations
from gristmill.commit import receipt as receipts
from gristmill.commit.allowance import Allowance
from gristmill.commit.journal import Journal
from gristmill.commit.once import Once
from gristmill.errors import BadOutput
from gristmill.files.disk import LocalFiles, join
from gristmill.models.contract import Bulk, BulkModel, RowModel
from gristmill.process.liveness import LOADING
from gristmill.process.messages import Alive, Elsewhere, Emit, Item, Left, Outcome, Printed, Tick, Took, Waiting
from gristmill.process.ownstderr import say
from gristmill.shards.counts import summed
from gristmill.values import dataclass
from gristmill.worker.bisection import ModelBroken, Stage
from gristmill.worker.clock import WAITING, Clock
from gristmill.worker.heap import resident
from gristmill.worker.identity import Identity
from gristmill.worker.predict import Predict, Scored
from gristmill.worker.prepare import Prepare, Window
from gristmill.worker.recipe import Task, most_begun
from gristmill.worker.sentahead import SentAhead
from gristmill.worker.shardcommit import ShardCommit, fitting, output_rows
from gristmill.worker.steps import Applied, LoadedStep, post_step
from gristmill.worker.suspects import Suspects, killer, of_task

if TYPE_CHECKING:
    from gristmill.worker.stages import ShardStages
from gristmill.worker.notes import note_loaded, note_written
from gristmill.worker.outcome import classified, scrubbed
from gristmill.worker.watch import Watch

T = TypeVar("T")

UNPROBED: dict[str, Any] = {"schema": None, "rows": 0, "ok": 0, "dead": 0, "failed": 0, "answers": {}, "made": {}}
AHEAD = 1  # windows waiting between two stages: with one in each stage, five are in memory
BEGUN_BYTES = 4  # times `window_bytes`: rows in flight hold no more


@dataclass(frozen=True)
class _End:
    """The end of a shard's windows, or the failure that ended them."""

    failure: BaseException | None = None


@dataclass(frozen=True)
class _Parcel:
    item: Item
    body: Any
    answered: threading.Event | None = None  # set once the body is written; a careful attempt waits for that
    suspects: Suspects | None = None


class Stopped(Exception):
    """The driver asked the worker to stop."""


class ShardWorker:
    """Scores shards, one after the other, preparing the next while the model is busy with this one."""

    def __init__(self, stages: ShardStages, name: str) -> None:
        from gristmill.fingerprint import pins
        from gristmill.fingerprint.loadedmodules import Loaded
        from gristmill.models.kinds import open_planned

        self._recipe = stages.recipe
        self._name = name
        self._watch = Watch(stages.recipe.running.batch_timeout if stages.timed else None)
        self._watch.load()
        self._looking = threading.Lock()
        self._trouble = ""  # what keeps answers away, as it was told
        self._used: dict[str, float] = {}  # what proofs took of an endpoint, and is in no shard's figures yet
        self._planned = pins.Planned(stages.recipe.pins, stages.recipe.named)
        self._loaded = Loaded(stages.recipe.pins, stages.recipe.named)
        place = replace(stages.recipe.place, run=stages.recipe.run)
        self._model, opened = open_planned(stages.recipe.model, place)
        self._planned.watch(opened)
        self._rows = self._model if isinstance(self._model, RowModel) else None
        if self._rows is not None:
            self._watch.patience = 2.0  # a row that takes too long is ended alone, before that
        self._loaded.built("worker")  # steps may be built here, in step processes, or later
        self._clocks = {"reading": Clock(), "predicting": Clock(), "writing": Clock()}  # of its three threads
        self._prepare = Prepare(stages.recipe, self._model, self._clocks["reading"])
        self._predict = Predict(stages.recipe, self._model)
        # Whether what gives answers may be another by the time they come.
        self._may_change = self._predict.by_user or bool(opened)
        self._planned.look()  # after all imports: what changed since planning is refused, too
        self._watch.rest()
        self._files = stages.recipe.files
        self._folder = ""  # of the generation in which a shard was last committed
        self._stopping = threading.Event()
        self._answers: dict[str, Any] = {}  # answers to probes
        self._dropped: set[str] = set()
        self._ticked = time.monotonic()
        # What is scored of the current item: its key, source rows, and piece and position of the last one.
        self._behind: tuple[str, int, tuple[int, int] | None] = ("", 0, None)
        self._waits = {
            "rows": 0.0,
            "writing": 0.0,
        }  # seconds in which the model was idle, by what it waited for
        self._at_hand = 0  # items being read now
        self._writing: float | None = None  # since when a write has been going on
        self._most = stages.recipe.running.worker_memory if stages.timed else None
        self._leaving = ""
        self._room = threading.Condition()
        self._begun = 0  # bytes of windows whose rows are in flight
        self._journals: dict[str, Journal] = {}  # of shards that are in flight, by item
        self._bulks: dict[str, Bulk] = {}  # of those whose rows are answered in bulk
        self._noted: dict[str, Suspects] = {}  # of careful ones that were read ahead
        self._ahead = False  # whether an item is being read ahead now
        self._allowances: dict[str, Allowance] = {}
        self._beside = None
        if stages.beside:
            from gristmill.worker.stepprocesses import Beside

            self._beside = Beside(stages, name, stages.beside)

    def stop(self) -> None:
        """Finish the current batch, then leave."""
        self._stopping.set()

    def silence(self) -> float | None:
        """See messages.Worker. Current work has its limit from the watch; a write that does not return, which nothing
        can end, has the limit of loading.
        """
        self._watch.enforce()
        since = self._writing
        stuck = since is not None and time.monotonic() - since > max(self._watch.limit, LOADING)
        return None if stuck else self._watch.limit

    def work(self, items: Iterator[Item], emit: Emit) -> None:
        """Run items to their outcomes. The calling thread predicts; two others prepare and write."""
        self._watch.say = lambda limit: emit(Alive(self._name, limit))
        prepared: queue.Queue[_Parcel | None] = queue.Queue(self._most_begun() if self._rows is not None else AHEAD)
        scored: queue.Queue[_Parcel | None] = queue.Queue(AHEAD)
        if self._beside is not None:
            items = self._beside.ahead(items)
        if isinstance(self._model, BulkModel) and self._recipe.place.bulk:
            items = SentAhead(_Sending(self, self._model, emit)).items(items)
        reading = threading.Thread(target=self._read, args=(items, prepared), daemon=True)
        writing = threading.Thread(target=self._write, args=(scored, emit), daemon=True)
        for clock in self._clocks.values():
            clock.start()
        reading.start()
        writing.start()
        try:
            while (parcel := self._awaited(prepared)) is not None:
                answer = self._answer(parcel, emit)
                if answer is not None:
                    self._handed_on(answer, scored)
                elif parcel.answered is not None:
                    parcel.answered.set()
                if self._wants_to_leave(parcel.body):
                    break
        except Stopped:
            self._watch.rest()
            if self._rows is not None:
                self._rows.leave()
            _let_go(reading, prepared)
            return
        finally:
            scored.put(None)
            writing.join()
            self._watch.rest()
            if self._beside is not None:
                self._beside.close()
            self._prepare.close()
        for name, clock in self._clocks.items():  # their threads have ended
            clock.lap("waiting for writing" if name == "predicting" else WAITING)
        emit(Took(self._name, {name: dict(clock.took) for name, clock in self._clocks.items()}))
        if self._leaving:
            emit(Left(self._name, reason=self._leaving))
        self._closed(emit)

    def _most_begun(self) -> int:
        """How many windows of a model that answers row by row are in flight."""
        return max(2, most_begun(self._recipe.place.at_once) // self._recipe.batch.window)

    def _closed(self, emit: Emit) -> None:
        """Close the model. A failing `close` does not affect its rows: the error goes to stderr. If it does not return,
        the process is killed at the limit of a call or, in the calling process, the call is abandoned; a warning comes
        first.
        """
        limit, how = self._watch.limit, "is killed at its"
        if limit == math.inf:
            limit, how = self._recipe.running.batch_timeout, "is not waited for beyond the"
            emit(Alive(self._name, limit))
        hangs = (
            f"the model's close() does not return: worker {self._name} {how} limit of {limit:g} s; its rows are done"
        )
        told = threading.Timer(0.9 * limit, lambda: emit(Printed(self._name, hangs, "warning")))
        told.daemon = True
        if limit < math.inf:
            told.start()
        self._watch.beat()
        try:
            self._model.close()
        except KeyboardInterrupt:
            raise
        except BaseException:  # also SystemExit
            say(f"{self._name}: the model's close() failed; its rows are done:\n{traceback.format_exc()}")
        finally:
            told.cancel()
            self._watch.rest()
            if self._folder:
                note_written(self._loaded, self._recipe, self._folder)

    def _wants_to_leave(self, done: Any) -> bool:
        """Whether a fresh process should take over: after a shard, because of memory; at once if the model is sick."""
        if isinstance(done, _End):
            self._judge(done.failure)
            if self._most is not None and (held := resident()) > self._most:
                self._leaving = f"it uses {held >> 20} MB, over worker_memory of {self._most >> 20} MB"
        return bool(self._leaving)

    def _judge(self, failure: BaseException | None) -> None:
        if isinstance(failure, ModelBroken) and failure.failure.kind == "sick":
            self._leaving = (
                f"a row that was scored before now fails ({failure.failure.type}: {failure.failure.message})"
            )

    # ------------------------------------------------ threads

    def _read(self, items: Iterator[Item], out: queue.Queue[_Parcel | None]) -> None:
        clock = self._clocks["reading"]
        for item in items:
            clock.lap(WAITING)
            if self._stopping.is_set():
                break
            here = item.portions is None  # else portions are awaited, which is not timed
            self._at_hand += here
            try:
                if here:
                    self._watch.beat()
                suspects = self._noted.pop(item.key, None)
                if suspects is None and item.value.careful:
                    suspects = of_task(item.value, self._files, self._watch.beat)
                for window in self._windows(item, suspects):
                    parcel = _Parcel(item, window, None if suspects is None else threading.Event(), suspects)
                    if self._in_flight(parcel):
                        self._begin(item, window, suspects is not None)
                    self._handed(parcel, out)
                    while parcel.answered is not None and not parcel.answered.wait(0.5):
                        if self._stopping.is_set():  # a careful attempt waits here, one window at a time
                            break
                    if item.key in self._dropped or self._stopping.is_set():
                        break
                self._handed(_Parcel(item, _End()), out)
            except BaseException as e:  # crosses to the outcome of this item, where the driver decides
                self._handed(_Parcel(item, _End(e)), out)
            self._at_hand -= here
        self._handed(None, out)

    def _in_flight(self, parcel: _Parcel) -> bool:
        """Whether a window's rows are answered row by row."""
        return self._rows is not None and parcel.body.prepared.rows > 0

    def _begin(self, item: Item, window: Window, careful: bool) -> None:
        """Ask for a window's rows, once those in flight leave room in memory; a careful attempt asks for some of them
        when it is their turn.
        """
        size, most = window.rows.nbytes, BEGUN_BYTES * self._recipe.running.window_bytes
        with self._room:
            while self._begun and self._begun + size > most and not self._stopping.is_set():
                self._room.wait(0.5)
            self._begun += size
        task: Task = item.value
        try:
            # A probe's rows are the first ones of shard 0, which perhaps another worker scores.
            if task.kind != "proof":
                self._opened(item)
            self._predict.begin(task, window, self._watch.beat, self._journals.get(item.key), careful)
        except BaseException:
            self._ended(window)
            raise

    def _opened(self, item: Item) -> Journal:
        """The journal of an item."""
        if item.key not in self._journals:
            task: Task = item.value
            stands = partial(self._stands, task) if self._may_change else None
            shard = task.shard.number if task.kind == "score" else None
            run, allowance = self._recipe.run, self._allowed(task.folder)
            attempt, secret, holds = secrets.token_hex(6), self._recipe.secrets, task.shard.holding()
            journal = Journal(
                task.folder, shard, run, attempt, self._files, stands, allowance, holds, secret,
                self._once(task.folder), task.inherits, task.inherited,
            )  # fmt: skip
            journal.ready()
            self._journals[item.key] = journal
        return self._journals[item.key]

    def _allowed(self, folder: str) -> Allowance:
        """What this run may spend, in one folder."""
        if folder not in self._allowances:
            self._allowances = {folder: Allowance(folder, self._recipe.run, self._files)}
        return self._allowances[folder]

    def _once(self, folder: str) -> Callable[[], Once] | None:
        """Opens what equal requests are asked once by, which takes a disk."""
        if not isinstance(self._files, LocalFiles):
            return None
        return partial(Once, join(folder, "once"), self._recipe.run)

    def _ended(self, window: Window) -> None:
        """A window's rows are no longer in flight."""
        with self._room:
            self._begun -= window.rows.nbytes
            self._room.notify()

    def _handed(self, parcel: _Parcel | None, out: queue.Queue[_Parcel | None]) -> None:
        """Hand a parcel to the predicting thread, which is gone if the worker is stopping."""
        self._clocks["reading"].lap("gather")
        try:
            while not self._stopping.is_set():
                with contextlib.suppress(queue.Full):
                    return out.put(parcel, timeout=0.5)
        finally:
            self._clocks["reading"].lap(WAITING)

    def _windows(self, item: Item, suspects: Suspects | None) -> Iterator[Window]:
        if item.portions is None:
            return self._watch.over(self._prepare.windows(item.value, suspects))
        from gristmill.worker.firststage import unpacked

        return (unpacked(body, self._model) for body in item.portions)

    def _awaited(self, prepared: queue.Queue[_Parcel | None]) -> _Parcel | None:
        begun = time.perf_counter()
        self._clocks["predicting"].lap("place")
        parcel = self._get(prepared)
        self._waits["rows"] += time.perf_counter() - begun
        self._clocks["predicting"].lap("waiting for rows")
        return parcel

    def _handed_on(self, answer: _Parcel, scored: queue.Queue[_Parcel | None]) -> None:
        """Hand an answer to the writing thread, with the model's waits since the last window."""
        if isinstance(answer.body, Scored):
            for what, seconds in self._waits.items():
                answer.body.figures[f"waited:{what}"] = seconds
                self._waits[what] = 0.0
        calls = answer.body.figures["model_seconds"] if isinstance(answer.body, Scored) else 0.0
        self._clocks["predicting"].lap("place", ("call", calls))
        begun = time.perf_counter()
        scored.put(answer)
        self._waits["writing"] += time.perf_counter() - begun
        self._clocks["predicting"].lap("waiting for writing")

    def _get(self, prepared: queue.Queue[_Parcel | None]) -> _Parcel | None:
        while True:
            if self._stopping.is_set():
                raise Stopped
            try:
                return prepared.get(timeout=0.5)
            except queue.Empty:
                if not self._at_hand and not self._ahead:
                    self._watch.rest()

    def _answer(self, parcel: _Parcel, emit: Emit) -> _Parcel | None:
        """What the predicting thread makes of a parcel: a scored window, an end, or nothing for a shard that failed."""
        item, body = parcel.item, parcel.body
        if isinstance(body, _End):
            return None if item.key in self._dropped else parcel
        try:
            return self._answer_of(parcel, emit)
        finally:
            if self._in_flight(parcel):
                self._ended(body)

    def _answer_of(self, parcel: _Parcel, emit: Emit) -> _Parcel | None:
        item, body = parcel.item, parcel.body
        if item.key in self._dropped:
            if self._rows is not None and self._in_flight(parcel):
                self._rows.drop(body.prepared)
            return None
        try:
            return _Parcel(item, self._scored(item, body, parcel.suspects, emit), parcel.answered)
        except Stopped:
            raise
        except BaseException as e:
            self._judge(e)
            self._dropped.add(item.key)
            return _Parcel(item, _End(e), parcel.answered)

    def _scored(self, item: Item, window: Window, suspects: Suspects | None, emit: Emit) -> Scored:
        task: Task = item.value
        key, behind, last = self._behind if self._behind[0] == item.key else (item.key, 0, None)
        scored, who = 0, window.identity
        end = (int(who.piece[-1]), int(who.position[-1])) if len(who.piece) else last

        def tick(rows: int, alive: bool = True) -> None:
            nonlocal scored
            if alive:
                self._watch.beat(calling=False)
            scored += rows
            if time.monotonic() - self._ticked > 0.2:
                share = scored / max(scored, window.rows.num_rows)  # steps may have changed the number of rows
                before, until = task.shard.passed(last), task.shard.passed(end)
                passed = before + int(share * (until - before))
                emit(Tick(self._name, key, behind + int(share * window.counts.rows_in), passed))
                self._ticked = time.monotonic()
            if self._stopping.is_set():
                raise Stopped

        self._watch.beat()
        if suspects is None:
            seconds = 0.0
            if self._rows is not None and window.prepared.rows:
                seconds = self._waited(self._rows, window, tick, emit)
            scored = 0  # these rows' share is told again as they are scored
            with self._calls_end():
                done = self._predict.score(task, window, self._before, tick)
            done.figures["model_seconds"] += seconds
        else:
            with self._calls_end():
                done = CarefulScore(self._predict, task, window, self._before, suspects).score(tick)
        if self._rows is not None:
            self._count_used(item, self._rows.used(window.prepared), done)
            self._tell_news(self._rows, emit)
        self._behind = (key, behind + window.counts.rows_in, end)
        return done

    def _count_used(self, item: Item, used: Mapping[str, float], done: Scored) -> None:
        """Put what a window's rows took into its figures, and with the first of an attempt what earlier ones took. What
        the first rows took is in the journal of shard 0; proofs have none.
        """
        if item.value.kind == "proof":
            self._used = summed([self._used, used])
        if item.value.kind != "score":
            return
        before: Mapping[str, float] = {}
        if (journal := self._journals.get(item.key)) is not None:
            before, journal.before = journal.before, {}
        done.figures.update(summed([self._used, before, used]))
        self._used = {}

    def _waited(self, model: RowModel, window: Window, tick: Callable[[int, bool], None], emit: Emit) -> float:
        """Wait for the answers to a window's rows, and tell what keeps them away; the seconds that this took."""
        begun = time.perf_counter()
        left = window.rows.num_rows
        while now := model.waiting(window.prepared, 0.2):
            self._tell(model.trouble, emit)
            self._tell_news(model, emit)
            # A sign of life comes with each answer, of any window, and not while there is none.
            tick(0 if self._trouble else max(0, left - now), False)
            left = min(left, now)
        self._tell("", emit)
        return time.perf_counter() - begun

    def _tell(self, trouble: str, emit: Emit) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            emit(Waiting(self._name, trouble))

    def _tell_news(self, model: RowModel, emit: Emit) -> None:
        while model.news:
            emit(Printed(self._name, model.news.pop(0), "warning"))

    def _before(self, rows: np.ndarray) -> None:
        # The limit of a row that somebody is asked for is its own, and answers are signs of life.
        self._watch.beat(calling=self._rows is None)

    @contextlib.contextmanager
    def _calls_end(self) -> Iterator[None]:
        """No call of the model is under way after this, also where one has raised."""
        try:
            yield
        finally:
            self._watch.beat(calling=False)

    def _write(self, scored: queue.Queue[_Parcel | None], emit: Emit) -> None:
        commits: dict[str, ShardCommit] = {}
        failed: set[str] = set()  # attempts whose outcome is already reported; the rest of them is dropped
        while (parcel := scored.get()) is not None:
            self._clocks["writing"].lap(WAITING)
            self._writing = time.monotonic()
            if parcel.item.key not in failed and (error := self._written(parcel, commits, emit)) is not None:
                key = parcel.item.key
                failed.add(key)
                self._dropped.add(key)
                if (broken := commits.pop(key, None)) is not None:
                    broken.abort()
                self._done_with(key)
                if (journal := self._journals.pop(key, None)) is not None:
                    # First rows of which no column can be made would end each later run, too. Once the columns are
                    # known, an answer that fits none is its row's failure, and is not kept.
                    unfit = isinstance(error, BadOutput) and parcel.item.value.kind != "score"
                    (journal.spoil if unfit else journal.close)()
                if not isinstance(error, Elsewhere) or error.failure is not None:
                    emit(Outcome(self._name, key, None, scrubbed(classified(error), self._recipe.secrets)))
            self._writing = None
            if parcel.answered is not None:
                parcel.answered.set()
        self._clocks["writing"].lap(WAITING)
        for commit in commits.values():
            commit.abort()

    def _written(self, parcel: _Parcel, commits: dict[str, ShardCommit], emit: Emit) -> BaseException | None:
        """Write a window, or end its shard. Returns the failure that ends the attempt, if any."""
        item, body = parcel.item, parcel.body
        task: Task = item.value
        try:
            if isinstance(body, _End) and body.failure is not None:
                raise body.failure
            if task.kind != "score":
                self._probed(item, body, emit)
                return None
            commit = commits.get(item.key) or ShardCommit(
                self._recipe, self._prepare, task, self._files, self._clocks["writing"]
            )
            commits[item.key] = commit
            if isinstance(body, Scored):
                commit.add(body)
            else:
                self._stands(task)  # includes what the function imported or read for these rows
                self._folder = task.folder
                del commits[item.key]
                commit.count(self._unasked(item))
                flying, off = (0, 0) if self._rows is None else (self._rows.most_flying, self._rows.put_off)
                found = {**receipts.plain(commit.finish()), "flying": flying, "put_off": off}
                emit(Outcome(self._name, item.key, found))
                self._forget(item.key)
        except BaseException as e:  # crosses to the outcome, where the driver decides
            return e
        return None

    def _unasked(self, item: Item) -> Mapping[str, float]:
        """What the first rows took, if shard 0, in whose figures that is, has none that is asked for."""
        if self._rows is None or item.key in self._journals or item.value.shard.number != 0:
            return {}
        return self._opened(item).before

    def _stands(self, task: Task) -> None:
        """Note what the code loaded, so that later attempts are compared with it. Raises PlanChanged if something is
        not as planned, or as other workers have it.
        """
        with self._looking:
            self._planned.look()
            note_loaded(self._loaded, self._recipe, task)

    def _forget(self, key: str) -> None:
        """Remove the answers of a shard that is committed. If that fails, publishing removes them."""
        self._done_with(key)
        if (journal := self._journals.pop(key, None)) is None:
            return
        try:
            journal.remove()
        except Exception as e:
            say(f"{self._name}: answers of a committed shard could not be removed ({e})")

    def _done_with(self, key: str) -> None:
        """Nothing of a shard's bulk is needed any more."""
        if (bulk := self._bulks.pop(key, None)) is not None:
            bulk.close()

    def _probed(self, item: Item, body: Scored | _End, emit: Emit) -> None:
        """Build the answer to a probe or a proof: the schema of its output rows, and how long they took."""
        if isinstance(body, Scored):
            if item.value.kind == "probe":
                self._predict.keep(item.value, body, anew=item.key not in self._answers)
            rows = output_rows(body, self._recipe.output, item.value)
            answer = self._answers.setdefault(item.key, {**UNPROBED, "results": [], "figures": {}})
            counts, figures = body.counts, {**body.figures, "prepare_seconds": body.window.seconds}
            answer["rows"] += counts.rows_in
            answer["dead"] += counts.dead + counts.derived_dead
            answer["ok"] += rows.num_rows
            answer["failed"] += body.failed
            answer["figures"] = {k: v + answer["figures"].get(k, 0.0) for k, v in figures.items()}
            if answer["schema"] is None and rows.num_rows:
                schema, base = self._recipe.sink_format.stored(rows, self._recipe.sink.options), item.value.base
                if base is not None and not self._recipe.sink.evolve:
                    schema = fitting(rows, schema, base)
                answer.update(schema=generations.encode_schema(schema), results=list(body.results))
                answer["answers"] = body.answers
                answer["columns"] = body.rows.column_names
            answer["made"] = {**body.window.made, **self._predict.post.made()}
            for text in self._predict.post.remarks:
                emit(Printed(self._name, text, "warning"))
            self._predict.post.remarks.clear()
            return
        if (journal := self._journals.pop(item.key, None)) is not None:
            journal.close()
        emit(Outcome(self._name, item.key, self._answers.pop(item.key, {**UNPROBED, "results": [], "figures": {}})))


class _Sending:
    """A worker, as SentAhead has it."""

    def __init__(self, worker: ShardWorker, model: BulkModel, emit: Emit) -> None:
        self.stopping = worker._stopping
        self._worker = worker
        self._model = model
        self._emit = emit

    def windows(self, item: Item) -> Iterator[Window]:
        """See Sending; its time is limited as that of items whose turn it is."""
        worker, suspects = self._worker, None
        if item.value.careful:
            suspects = worker._noted[item.key] = of_task(item.value, worker._files, worker._watch.beat)
        worker._ahead = True
        try:
            yield from worker._windows(item, suspects)
        finally:
            worker._ahead = False

    def alive(self, item: Item, window: Window) -> Iterator[np.ndarray]:
        """See Sending; of a careful attempt they are noted before user code gets them."""
        rows = self._worker._predict.alive(item.value, window)
        if (suspects := self._worker._noted.get(item.key)) is None:
            yield rows
            return
        for first, last, killed in suspects.runs("model", window.identity):
            if killed is None:
                yield rows[(rows >= first) & (rows < last)]

    def bulk(self, item: Item) -> Bulk | None:
        """See Sending."""
        found = self._model.bulk(self._worker._opened(item), item.value.proven)
        if found is not None:
            self._worker._bulks[item.key] = found
        return found

    def waits(self, reason: str) -> None:
        """See Sending."""
        self._emit(Waiting(self._worker._name, reason))


class CarefulScore:
    """Scores a window of a shard that killed a worker: suspects first and separately, each call noted beforehand."""

    def __init__(self, predict: Predict, task: Task, window: Window, before: Any, suspects: Suspects) -> None:
        self._predict = predict
        self._task = task
        self._window = window
        self._before = before
        self._suspects = suspects

    def score(self, tick: Any) -> Scored:
        """As Predict.score; rows that alone have killed two workers become dead letters without another try."""
        who, known = self._window.identity, self._suspects
        refused = {r.row for r in self._window.prepared.refused}
        place = {row: i for i, row in enumerate(known.places(who)) if i not in refused}
        here = ([place[r] for r in g.rows if r in place] for g in known.open("model"))
        apart = [np.array(rows, dtype=np.int64) for rows in here if rows]
        dead = [killer(place[g.rows[0]], Stage.MODEL, g) for g in known.dead("model") if g.rows[0] in place]

        def before(rows: np.ndarray) -> None:
            known.note("model", who, rows) if len(rows) else known.clear()
            self._before(rows)

        def post(number: int, step: LoadedStep, rows: pa.Table, who: Identity) -> Applied:
            known.clear()  # the note about the model's calls
            return known.apart(f"post {number}", step, who, rows, partial(post_step, step))

        scored = self._predict.score(self._task, self._window, before, tick, apart=apart, doomed=dead, run=post)
        known.clear()
        return scored


def _let_go(reading: threading.Thread, prepared: queue.Queue[_Parcel | None]) -> None:
    """Let the reading thread end although nobody takes its windows: a thread still inside Arrow's code can keep the
    process from exiting. Waits no longer than a step of user code should take.
    """
    until = time.monotonic() + 2.0
    while reading.is_alive() and time.monotonic() < until:
        with contextlib.suppress(queue.Empty):
            parcel = prepared.get(timeout=0.05)
            if parcel is not None and parcel.answered is not None:
                parcel.answered.set()

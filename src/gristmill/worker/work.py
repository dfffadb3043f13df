"""A worker: the three stages as one pipeline of threads with bounded queues between them. The model never waits for
the disk or the tokeniser while there is anything to predict.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from gristmill.commit import generation as generations
from gristmill.commit import receipt as receipts
from gristmill.errors import BadModel, BadOutput, GristmillError, MissingExtra, PlanChanged, SourceChanged
from gristmill.plan.beats import LOADING
from gristmill.plan.contracts import Alive, Elsewhere, Emit, Failure, Item, Left, Outcome, Printed, Tick
from gristmill.plan.failing import LATE_BY, failure_of
from gristmill.plan.processes import thread_variables
from gristmill.plan.secret import Secret, scrub
from gristmill.worker.commit import ShardCommit, Uncounted, fitting, output_rows
from gristmill.worker.failures import ModelBroken, Stage
from gristmill.worker.identity import Identity
from gristmill.worker.memory import resident, use_jemalloc
from gristmill.worker.predict import Predict, Scored
from gristmill.worker.prepare import Prepare, Window
from gristmill.worker.recipe import Recipe, Task
from gristmill.worker.steps import Applied, LoadedStep, post_step
from gristmill.worker.suspects import Suspects, killer, of_task

if TYPE_CHECKING:
    from gristmill.models.loaded import Loaded

T = TypeVar("T")

UNPROBED: dict[str, Any] = {"schema": None, "rows": 0, "ok": 0, "dead": 0, "answers": {}, "made": {}}
AHEAD = 1  # windows waiting between two stages: with one in each stage, five are in memory
MONTH = 2_592_000.0  # seconds: no platform's timers take any number
LONGEST_LOAD = 1800.0  # seconds: what loads for longer hangs, unless `batch_timeout` is more
SLOWEST = 20  # design §4: a model call may take this many times the slowest one seen


@dataclass(frozen=True)
class ShardStages:
    """What an engine ships: the recipe, opened in each worker. `threads` are the cores one worker may use, `beside` the
    processes for steps that each has below it.
    """

    recipe: Recipe
    threads: int = 1
    gpus: tuple[str, ...] = ()
    timed: bool = True
    beside: int = 0

    @property
    def ahead(self) -> int:
        """As in Stages: one in each process."""
        return max(1, self.beside)

    def environment(self, index: int) -> Mapping[str, str]:
        """Thread counts and the one GPU of worker `index`, for libraries that read them when they are loaded."""
        more = {"ARROW_IO_THREADS": str(self.threads), "TOKENIZERS_PARALLELISM": "false"}
        variables = {**thread_variables(self.threads), **more}
        if self.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = self.gpus[index % len(self.gpus)]
        return variables

    def open(self, name: str, emit: Emit) -> ShardWorker:
        """Load the model."""
        if self.timed:
            use_jemalloc()
        worker = ShardWorker(self, name)
        warn_of_values(self.recipe, name, emit)
        return worker

    def first(self) -> Any:
        """Stages of workers that read, run steps and tokenise, and nothing else."""
        from gristmill.worker.apart import PrepareStages

        return PrepareStages(self)

    def apart(self, item: Item) -> bool:
        """Careful attempts stay in one process, where notes tell what killed it; so does the probe, which is short."""
        return item.value.kind == "score" and not item.value.careful


@dataclass(frozen=True)
class _End:
    """The end of a shard's windows, or the failure that ended them."""

    failure: BaseException | None = None


@dataclass(frozen=True)
class _Parcel:
    item: Item
    body: Any
    answered: threading.Event | None = None  # set when the body was written, which a careful attempt waits for
    suspects: Suspects | None = None


def warn_of_values(recipe: Recipe, name: str, emit: Emit) -> None:
    """Tell of values of the user's modules that are others here than where the run was planned; see `pins.unlike`."""
    from gristmill.models.pins import unlike

    for text in unlike(recipe.held, recipe.pins) if recipe.held else ():
        emit(Printed(name, text, "warning"))


def note_loaded(loaded: Loaded, recipe: Recipe, task: Task) -> None:
    """Note, before a shard is committed, what code has loaded as it ran. Raises PlanChanged where another worker, or a
    run that this one adds to, has loaded it otherwise.
    """
    if not (found := loaded.look()):
        return
    from gristmill.models.loaded import contradicted
    from gristmill.models.pins import AGAIN, changed_meanwhile

    folder, accepted = task.folder, ", or --accept-code-change (accept_code_change=True) to score the dead rows with it"

    def refuse_others() -> None:
        noted = {entry: set(tellings) for entry, tellings in recipe.loaded.items()}
        for entry, tellings in generations.loaded(folder, recipe.files).items():
            noted.setdefault(entry, set()).update(tellings)
        for entry, told in found.items():
            noted.setdefault(entry, set()).add(told)
        for entry, told in found.items():
            if other := contradicted(entry, told, noted):
                way = AGAIN + (accepted if task.only is not None else "")
                raise changed_meanwhile(f"{other}, which the code loads as it runs,", way)

    refuse_others()
    path = generations.note_loaded(recipe.files, folder, found)
    try:
        refuse_others()  # who noted something else at the same moment sees this note, or is seen
    except PlanChanged:
        recipe.files.remove(path)
        raise
    loaded.noted(found)


def note_written(loaded: Loaded, recipe: Recipe, folder: str) -> None:
    """Note what code has written after its last shard was committed, as it was closed."""
    found = loaded.written()
    with contextlib.suppress(OSError):  # it may not be counted as its own then
        if found and recipe.files.names(folder):
            generations.note_loaded(recipe.files, folder, found)


class Stopped(Exception):
    """The driver asked for an end."""


class ShardWorker:
    """Scores shards, one after the other, preparing the next while the model is busy with this one."""

    def __init__(self, stages: ShardStages, name: str) -> None:
        from gristmill.models import pins
        from gristmill.models.loaded import Loaded
        from gristmill.models.registry import open_planned

        self._recipe = stages.recipe
        self._name = name
        self._watch = Watch(stages.recipe.running.batch_timeout if stages.timed else None)
        self._watch.load()
        self._planned = pins.Planned(stages.recipe.pins, stages.recipe.named)
        self._loaded = Loaded(stages.recipe.pins, stages.recipe.named)
        self._model = open_planned(stages.recipe.model, stages.recipe.place)
        self._loaded.built("worker")  # steps may be made here, or beside, or later
        self._prepare = Prepare(stages.recipe, self._model)
        self._predict = Predict(stages.recipe, self._model)
        self._planned.look()  # after all was imported: what was changed since is refused, too
        self._watch.rest()
        self._files = stages.recipe.files
        self._folder = ""  # of the generation in which a shard was committed last
        self._stopping = threading.Event()
        self._answers: dict[str, Any] = {}  # to probes
        self._dropped: set[str] = set()
        self._ticked = time.monotonic()
        # What is scored of the item at hand: its key, source rows, and piece and position of the last one.
        self._behind: tuple[str, int, tuple[int, int] | None] = ("", 0, None)
        self._waits = {
            "rows": 0.0,
            "writing": 0.0,
        }  # seconds in which the model had nothing to do, by what it waited for
        self._at_hand = 0  # items being read now
        self._writing: float | None = None  # since when
        self._most = stages.recipe.running.worker_memory if stages.timed else None
        self._leaving = ""
        self._beside = None
        if stages.beside:
            from gristmill.worker.beside import Beside

            self._beside = Beside(stages, name, stages.beside)

    def stop(self) -> None:
        """Let the batch at hand end, then leave."""
        self._stopping.set()

    def silence(self) -> float | None:
        """See contracts.Worker. What is at hand has its limit from the watch; a write that does not come back, which
        nothing can end, has that of loading.
        """
        since = self._writing
        stuck = since is not None and time.monotonic() - since > max(self._watch.limit, LOADING)
        return None if stuck else self._watch.limit

    def work(self, items: Iterator[Item], emit: Emit) -> None:
        """Run items to their outcomes. The calling thread predicts; two others prepare and write."""
        self._watch.say = lambda limit: emit(Alive(self._name, limit))
        prepared: queue.Queue[_Parcel | None] = queue.Queue(AHEAD)
        scored: queue.Queue[_Parcel | None] = queue.Queue(AHEAD)
        if self._beside is not None:
            items = self._beside.ahead(items)
        reading = threading.Thread(target=self._read, args=(items, prepared), daemon=True)
        writing = threading.Thread(target=self._write, args=(scored, emit), daemon=True)
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
            _let_go(reading, prepared)
            return
        finally:
            scored.put(None)
            writing.join()
            self._watch.rest()
            if self._beside is not None:
                self._beside.close()
        if self._leaving:
            emit(Left(self._name, reason=self._leaving))
        self._closed(emit)

    def _closed(self, emit: Emit) -> None:
        """A model whose `close` fails has scored its rows all the same: that is told where its own output goes. One
        that does not come back is ended as a call would be, or left where it is no process, which is told before.
        """
        limit, how = self._watch.limit, "is ended at its"
        if limit == math.inf:
            limit, how = self._recipe.running.batch_timeout, "is not waited for beyond the"
            emit(Alive(self._name, limit))
        hangs = f"the model's close() hangs: worker {self._name} {how} limit of {limit:g} s; its rows are done"
        told = threading.Timer(0.9 * limit, lambda: emit(Printed(self._name, hangs, "warning")))
        told.daemon = True
        if limit < math.inf:
            told.start()
        self._watch.beat()
        try:
            self._model.close()
        except Exception:
            print(f"{self._name}: the model's close() failed; its rows are done:", file=sys.stderr)
            traceback.print_exc()
        finally:
            told.cancel()
            self._watch.rest()
            if self._folder:
                note_written(self._loaded, self._recipe, self._folder)

    def _wants_to_leave(self, done: Any) -> bool:
        """Whether a fresh process should go on: at the end of a shard, for its memory; at once if the model is sick."""
        if isinstance(done, _End):
            self._judge(done.failure)
            if self._most is not None and (held := resident()) > self._most:
                self._leaving = f"it holds {held >> 20} MB, over worker_memory of {self._most >> 20} MB"
        return bool(self._leaving)

    def _judge(self, failure: BaseException | None) -> None:
        if isinstance(failure, ModelBroken) and failure.failure.kind == "sick":
            self._leaving = f"a row that worked fails now ({failure.failure.type}: {failure.failure.message})"

    # ------------------------------------------------ threads

    def _read(self, items: Iterator[Item], out: queue.Queue[_Parcel | None]) -> None:
        for item in items:
            if self._stopping.is_set():
                break
            here = item.portions is None  # else there is nothing to time while portions are waited for
            self._at_hand += here
            try:
                if here:
                    self._watch.beat()
                suspects = of_task(item.value, self._files) if item.value.careful else None
                for window in self._windows(item, suspects):
                    parcel = _Parcel(item, window, None if suspects is None else threading.Event(), suspects)
                    self._handed(parcel, out)
                    while parcel.answered is not None and not parcel.answered.wait(0.5):
                        if self._stopping.is_set():  # a careful attempt does one thing at a time
                            break
                    if item.key in self._dropped or self._stopping.is_set():
                        break
                self._handed(_Parcel(item, _End()), out)
            except BaseException as e:  # crosses to the outcome of this item, where the driver decides
                self._handed(_Parcel(item, _End(e)), out)
            self._at_hand -= here
        self._handed(None, out)

    def _handed(self, parcel: _Parcel | None, out: queue.Queue[_Parcel | None]) -> None:
        """To the predicting thread, which has gone where the worker is to stop."""
        while not self._stopping.is_set():
            with contextlib.suppress(queue.Full):
                return out.put(parcel, timeout=0.5)

    def _windows(self, item: Item, suspects: Suspects | None) -> Iterator[Window]:
        if item.portions is None:
            return self._watch.over(self._prepare.windows(item.value, suspects))
        from gristmill.worker.apart import unpacked

        return (unpacked(body, self._model) for body in item.portions)

    def _awaited(self, prepared: queue.Queue[_Parcel | None]) -> _Parcel | None:
        begun = time.perf_counter()
        parcel = self._get(prepared)
        self._waits["rows"] += time.perf_counter() - begun
        return parcel

    def _handed_on(self, answer: _Parcel, scored: queue.Queue[_Parcel | None]) -> None:
        """To the writing thread, with what the model has waited for since the last window."""
        if isinstance(answer.body, Scored):
            for what, seconds in self._waits.items():
                answer.body.figures[f"waited:{what}"] = seconds
                self._waits[what] = 0.0
        begun = time.perf_counter()
        scored.put(answer)
        self._waits["writing"] += time.perf_counter() - begun

    def _get(self, prepared: queue.Queue[_Parcel | None]) -> _Parcel | None:
        while True:
            if self._stopping.is_set():
                raise Stopped
            try:
                return prepared.get(timeout=0.5)
            except queue.Empty:
                if not self._at_hand:
                    self._watch.rest()

    def _answer(self, parcel: _Parcel, emit: Emit) -> _Parcel | None:
        """What the predicting thread makes of a parcel: a scored window, an end, or nothing for a shard that failed."""
        item, body = parcel.item, parcel.body
        if isinstance(body, _End):
            return None if item.key in self._dropped else parcel
        if item.key in self._dropped:
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

        def tick(rows: int) -> None:
            nonlocal scored
            self._watch.beat()
            scored += rows
            if time.monotonic() - self._ticked > 0.2:
                share = scored / max(scored, window.rows.num_rows)  # steps may have made more rows, or fewer, of these
                before, until = task.shard.passed(last), task.shard.passed(end)
                passed = before + int(share * (until - before))
                emit(Tick(self._name, key, behind + int(share * window.counts.rows_in), passed))
                self._ticked = time.monotonic()
            if self._stopping.is_set():
                raise Stopped

        self._watch.beat()
        if suspects is None:
            done = self._predict.score(task, window, self._before, tick)
        else:
            done = CarefulScore(self._predict, task, window, self._before, suspects).score(tick)
        self._behind = (key, behind + window.counts.rows_in, end)
        return done

    def _before(self, rows: np.ndarray) -> None:
        self._watch.beat()

    def _write(self, scored: queue.Queue[_Parcel | None], emit: Emit) -> None:
        commits: dict[str, ShardCommit] = {}
        failed: set[str] = set()  # attempts whose outcome is said already; what follows of them is dropped
        while (parcel := scored.get()) is not None:
            self._writing = time.monotonic()
            if parcel.item.key not in failed and (error := self._written(parcel, commits, emit)) is not None:
                key = parcel.item.key
                failed.add(key)
                self._dropped.add(key)
                if (broken := commits.pop(key, None)) is not None:
                    broken.abort()
                if not isinstance(error, Elsewhere) or error.failure is not None:
                    emit(Outcome(self._name, key, None, scrubbed(classified(error), self._recipe.secrets)))
            self._writing = None
            if parcel.answered is not None:
                parcel.answered.set()
        for commit in commits.values():
            commit.abort()

    def _written(self, parcel: _Parcel, commits: dict[str, ShardCommit], emit: Emit) -> BaseException | None:
        """Write a window, or end its shard; the failure that ends the attempt, if any."""
        item, body = parcel.item, parcel.body
        task: Task = item.value
        try:
            if isinstance(body, _End) and body.failure is not None:
                raise body.failure
            if task.kind != "score":
                self._probed(item, body, emit)
                return None
            commit = commits.get(item.key) or ShardCommit(self._recipe, self._prepare, task, self._files)
            commits[item.key] = commit
            if isinstance(body, Scored):
                commit.add(body)
            else:
                self._planned.look()  # at what these rows made the function import or read
                note_loaded(self._loaded, self._recipe, task)
                self._folder = task.folder
                del commits[item.key]
                emit(Outcome(self._name, item.key, receipts.plain(commit.finish())))
        except BaseException as e:  # crosses to the outcome, where the driver decides
            return e
        return None

    def _probed(self, item: Item, body: Scored | _End, emit: Emit) -> None:
        """The answer to a probe or a proof: the schema of its output rows, and how long they took."""
        if isinstance(body, Scored):
            if item.value.kind == "probe":
                self._predict.keep(item.value, body, anew=item.key not in self._answers)
            rows = output_rows(body, self._recipe.output, item.value)
            answer = self._answers.setdefault(item.key, {**UNPROBED, "results": [], "figures": {}})
            counts, figures = body.counts, {**body.figures, "prepare_seconds": body.window.seconds}
            answer["rows"] += counts.rows_in
            answer["dead"] += counts.dead + counts.derived_dead
            answer["ok"] += rows.num_rows
            answer["figures"] = {k: v + answer["figures"].get(k, 0.0) for k, v in figures.items()}
            if answer["schema"] is None and rows.num_rows:
                schema, base = self._recipe.sink_format.stored(rows, self._recipe.sink.options), item.value.base
                schema = schema if base is None else fitting(rows, schema, base)
                answer.update(schema=generations.encode_schema(schema), results=list(body.results))
                answer["answers"] = body.answers
                answer["columns"] = body.rows.column_names
            answer["made"] = {**body.window.made, **self._predict.made()}
            for column, step in self._predict.unwritten.items():
                text = f"{step} changes column {column!r} of the rows, which is not written: name it in keep"
                emit(Printed(self._name, text, "warning"))
            self._predict.unwritten.clear()
            return
        emit(Outcome(self._name, item.key, self._answers.pop(item.key, {**UNPROBED, "results": [], "figures": {}})))


class CarefulScore:
    """Scores a window of a shard that killed a worker: suspects first and apart, each call noted before it is made."""

    def __init__(self, predict: Predict, task: Task, window: Window, before: Any, suspects: Suspects) -> None:
        self._predict = predict
        self._task = task
        self._window = window
        self._before = before
        self._suspects = suspects

    def score(self, tick: Any) -> Scored:
        """As Predict.score; rows that killed two workers alone are dead letters without being tried again."""
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
            known.clear()  # of what the model was given
            return known.apart(f"post {number}", step, who, rows, partial(post_step, step))

        scored = self._predict.score(self._task, self._window, before, tick, apart=apart, doomed=dead, post=post)
        known.clear()
        return scored


def _let_go(reading: threading.Thread, prepared: queue.Queue[_Parcel | None]) -> None:
    """Let the reading thread end although nobody takes its windows: a thread that is still in Arrow's code when the
    calling process ends can keep it from ending. Not waited for longer than a step of user code should take.
    """
    until = time.monotonic() + 2.0
    while reading.is_alive() and time.monotonic() < until:
        with contextlib.suppress(queue.Empty):
            parcel = prepared.get(timeout=0.05)
            if parcel is not None and parcel.answered is not None:
                parcel.answered.set()


def classified(error: BaseException) -> Failure:
    """An item's failure with the kind of decision that it asks the driver for."""
    import errno

    if isinstance(error, (ModelBroken, Elsewhere)) and error.failure is not None:
        return error.failure
    kind = "other"
    if isinstance(error, BadOutput):
        kind = "output"
    elif isinstance(error, SourceChanged):
        kind = "source"
    elif isinstance(error, (BadModel, MissingExtra)):
        kind = "load"
    elif isinstance(error, Uncounted):
        kind = "uncounted"
    elif isinstance(error, GristmillError):
        kind = "job"
    elif isinstance(error, OSError):
        full = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
        kind = "space" if error.errno in full else "io"
    elif isinstance(error, MemoryError):
        kind = "memory"
    return failure_of(error, kind)


def scrubbed(failure: Failure, secrets: tuple[Secret, ...]) -> Failure:
    """The failure without the values of secrets, which a library may have put into its message."""
    if not secrets:
        return failure
    return replace(failure, message=scrub(failure.message, secrets), traceback=scrub(failure.traceback, secrets))


def _unheard(limit: float) -> None:
    pass


def _end_after(seconds: float) -> None:
    faulthandler.dump_traceback_later(min(seconds * LATE_BY, MONTH), exit=True)


class Watch:
    """A dump-and-exit timer that also ends a hang which holds the GIL; every sign of life sets it anew.

    The limit is the larger of `least` seconds and 20 times the slowest stretch seen between two signs of life.
    """

    def __init__(self, least: float | None) -> None:
        self._least = least
        self._slowest = 0.0
        self._said = 0.0
        self.say: Callable[[float], None] = _unheard  # told when the limit has grown, before it is made use of
        self._since: float | None = None
        self._armed = -1e9
        self._lock = threading.Lock()

    @property
    def limit(self) -> float:
        """Seconds."""
        return math.inf if self._least is None else max(self._least, SLOWEST * self._slowest)

    def load(self) -> None:
        """Imports and models are loaded from now on, until there is something else to do."""
        if self._least is not None:
            _end_after(max(self._least, LONGEST_LOAD))

    def beat(self) -> None:
        """A sign of life."""
        if self._least is None:
            return
        with self._lock:
            now = time.monotonic()
            if self._since is not None:
                self._slowest = max(self._slowest, now - self._since)
            self._since = now
            limit = self.limit
            if limit > 1.05 * self._said:
                self._said = limit
                self.say(limit)
            if now - self._armed > limit / 50:  # arming starts a thread: not at every batch of a quick model
                self._armed = now
                _end_after(limit)

    def over(self, values: Iterator[T]) -> Iterator[T]:
        """The values, with a sign of life before each is made."""
        while True:
            self.beat()
            try:
                value = next(values)
            except StopIteration:
                return
            yield value

    def rest(self) -> None:
        """Nothing is at hand: no limit."""
        if self._least is not None:
            with self._lock:
                self._since, self._armed = None, -1e9
                faulthandler.cancel_dump_traceback_later()

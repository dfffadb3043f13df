"""The Spark engine: items are the partitions of one stage per round, and each Python worker of Spark keeps a worker
process, with its model, from one partition to the next. User code never runs in Spark's own processes, so its death is
not a failed task, and the feed, not Spark, decides what follows.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from gristmill.engines.contract import Room, Wanted
from gristmill.engines.crew import BEAT, Crew
from gristmill.engines.local import Process, end
from gristmill.engines.serving import GRACE
from gristmill.job.options import SparkOptions
from gristmill.process.messages import (
    WAIT,
    Death,
    Event,
    Failure,
    Feed,
    Item,
    Left,
    Outcome,
    Signal,
    Stages,
    Started,
    Tick,
    Waiting,
)
from gristmill.process.sparksession import first_line, session
from gristmill.process.spawning import Spawner
from gristmill.process.startup import packed
from gristmill.values import dataclass

ROUND = 10_000  # most items in one round: Spark's driver keeps several kilobytes per task
PATIENCE = 5.0  # seconds without a running task after which the wait is reported
IDLE = 2.0  # seconds that a process waits for its next item, or as long as its model took to load if that is longer


def room(options: SparkOptions) -> Room | None:
    """What Spark has to run partitions on, as far as known without starting it; None for all of this machine."""
    from importlib.util import find_spec

    if find_spec("pyspark") is None:
        return None  # reported when it is started
    from pyspark import SparkContext

    context = options.session.sparkContext if options.session is not None else SparkContext._active_spark_context
    known = (
        dict(context.getConf().getAll())
        if context is not None
        else {"spark.master": options.master or "", **options.conf}
    )
    cpus = int(known.get("spark.task.cpus", options.cpus_per_task))
    if context is not None:
        cores = context.defaultParallelism
    elif (master := known["spark.master"]).startswith("local["):
        if not (count := master[6:].split("]")[0].split(",")[0]).isdigit():
            return None
        cores = int(count)
    elif master == "local":
        cores = 1
    elif master.startswith("local") or not master:
        return None
    else:
        cores = int(known.get("spark.executor.instances", 2)) * int(known.get("spark.executor.cores", 1))
    workers = max(1, cores // cpus)
    with_gpu = workers if float(known.get("spark.task.resource.gpu.amount", 0)) > 0 else 0
    return Room("Spark", workers, with_gpu, cpus, grows=True)


class Spark:
    """Runs items as partitions of Spark stages, in an existing session or in one for the duration of the run."""

    Options = SparkOptions
    here = False
    room = staticmethod(room)

    def __init__(self, workers: int, path: tuple[str, ...], options: SparkOptions) -> None:
        self._workers = max(1, workers)
        self._path = path
        self._options = options

    @staticmethod
    def open(options: SparkOptions, wanted: Wanted) -> Spark:
        return Spark(wanted.workers, wanted.path, options)

    def run(self, stages: Stages, feed: Feed) -> Generator[Event, None, None]:
        """Events until the feed is done. Closing the iterator cancels the current stage, and ends a session of
        our own.
        """
        with session(self._options, self._workers) as spark:
            run = f"gristmill-{os.getpid()}-{time.time_ns()}"
            load = Load(run, self._path, dict(stages.environment(0)), packed(stages))
            rounds = _Rounds(spark.sparkContext, load)
            try:
                while True:
                    held: dict[str, Item] = {}
                    # One name per item, since only Spark knows where it will run; all are free again in the next round.
                    while len(held) < ROUND and isinstance(item := feed.take(name := f"s{len(held)}"), Item):
                        held[name] = item
                    if held:
                        yield from rounds.events(held, min(self._workers, feed.wanted()) - len(held))
                    elif item is WAIT:  # lets the reader of the results act
                        yield Event("")
                        time.sleep(BEAT / 10)
                    else:
                        return
            finally:
                rounds.end()


# ---------------------------------------------------------------- in the driver


class _Rounds:
    """The stages of one run, one after the other. Events come through an accumulator as each partition ends."""

    def __init__(self, context: Any, load: Load) -> None:
        self._context = context
        self._group = load.run
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        from pyspark.accumulators import AddingAccumulatorParam

        events = context.accumulator(_Inbox(self._events), AddingAccumulatorParam([]))
        speculative = context.getConf().get("spark.speculation", "false") == "true"
        self._task = Partition(context.broadcast(load), events, speculative)
        self._thread: threading.Thread | None = None
        self._said = ""
        self._looked = 0.0

    def events(self, held: Mapping[str, Item], spare: int) -> Iterator[Event]:
        """A round: each of `held` (by the worker name that the feed knows) ends with an outcome or a death.

        Meanwhile models are loaded in `spare` slots, for the next round.
        """
        from pyspark import InheritableThread

        waiting = {item.key: name for name, item in held.items()}
        self._looked = time.monotonic()
        self._thread = InheritableThread(target=self._stage, args=([*held.values(), *[None] * spare],), daemon=True)
        self._thread.start()
        failed: BaseException | None = None
        while self._thread is not None:
            try:
                event = self._events.get(timeout=BEAT)
            except queue.Empty:
                yield Event("") if (reason := self._waits()) is None else Waiting("", reason)
                continue
            if not isinstance(event, Event):  # the stage's end: None, or the error that ended it
                self._thread, failed = None, event
            elif isinstance(event, (Outcome, Death)) and (key := _key(event)):
                if (name := waiting.pop(key, None)) is not None:
                    yield replace(event, worker=name)
            else:
                yield event
        if failed is not None and (failure := _of_python(failed)) is not None:
            yield Outcome("", "", None, failure)
            return
        how = "its executor was lost" if failed is None else f"Spark gave up the stage: {first_line(failed)}"
        for key, name in waiting.items():
            yield Death(name, (key,), "" if failed is None else str(failed), lost=how)

    def _stage(self, items: list[Item | None]) -> None:
        failed: BaseException | None = None
        try:
            self._context.setJobGroup(self._group, f"gristmill: {len(items)} partitions", interruptOnCancel=True)
            self._context.parallelize(items, len(items)).foreachPartition(self._task)
        except BaseException as e:  # crosses to the driver's thread
            failed = e
        self._events.put(failed)

    def _waits(self) -> str | None:
        """A message, once, that no partition is running; "" when one runs again."""
        now = time.monotonic()
        if now - self._looked < PATIENCE:
            return None
        self._looked = now
        tracker = self._context.statusTracker()
        stages = [tracker.getStageInfo(s) for s in tracker.getActiveStageIds()]
        lacking = bool(stages) and not any(s.numActiveTasks for s in stages if s is not None)
        before, self._said = self._said, "waiting for Spark to start executors: none is running" if lacking else ""
        return self._said if self._said != before else None

    def end(self) -> None:
        """Cancel what is running and wait for it to be gone."""
        if self._thread is not None:
            self._context.cancelJobGroup(self._group)
            self._thread.join(GRACE)
        self._task.load.unpersist()


class _Inbox:
    """The accumulator's value in the driver, which passes on what is added to it. In Python workers it is a list."""

    def __init__(self, events: queue.SimpleQueue[Any]) -> None:
        self._events = events

    def __iadd__(self, more: Iterable[Event]) -> _Inbox:
        for event in more:
            self._events.put(event)
        return self


def _key(event: Outcome | Death) -> str:
    return event.key if isinstance(event, Outcome) else "".join(event.keys[:1])


def _of_python(error: BaseException) -> Failure | None:
    """What kept Spark's Python workers from starting at all (gristmill missing there, another Python); None for other
    errors.
    """
    text, kind = str(error), type(error).__name__
    if "PythonException" not in kind + text and "PySparkRuntimeError" not in kind + text:
        return None
    wrong = [line.strip() for line in text.splitlines() if "Error: " in line]
    message = f"Spark's Python workers cannot run gristmill: {wrong[-1] if wrong else first_line(error)}"
    return Failure("load", kind, message, text)


# ---------------------------------------------------------------- in a Python worker of Spark


@dataclass(frozen=True)
class Load:
    """What every worker process of a run is started with."""

    run: str
    path: tuple[str, ...]
    environment: Mapping[str, str]
    payload: bytes


@dataclass(frozen=True)
class Partition:
    """What Spark runs on each partition, which holds one item, or None to load a model."""

    load: Any  # a broadcast Load
    events: Any  # an accumulator
    speculative: bool

    def __call__(self, items: Iterator[Item | None]) -> Iterator[None]:
        from pyspark import TaskContext

        context = TaskContext.get()
        gpus = context.resources().get("gpu")
        devices = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus.addresses)}
        for item in items:
            # Spark retries a partition whose executor was lost. Whether to do so is up to the feed, so a retry does
            # nothing here; only a speculative copy of a slow partition looks the same, and does the work.
            if context.attemptNumber() == 0 or self.speculative:
                self.events.add(_slot(self.load.value, devices).do(item))
        return iter(())


_KEPT: list[Slot] = []  # at most one: what this Python worker keeps from task to task


def _slot(load: Load, devices: Mapping[str, str]) -> Slot:
    if _KEPT and (_KEPT[0].load.run, _KEPT[0].devices) != (load.run, devices):
        _KEPT.pop().end()
    if not _KEPT:
        _KEPT.append(Slot(load, devices))
    return _KEPT[0]


class _One:
    """The feed of a slot, which has one item at a time."""

    item: Item | None = None

    def wanted(self) -> int:
        return 1

    def take(self, worker: str) -> Item | Signal:
        item, self.item = self.item, None
        return WAIT if item is None else item


class Slot:
    """A worker process below a Python worker of Spark, given one item at a time and ended when none comes."""

    def __init__(self, load: Load, devices: Mapping[str, str]) -> None:
        self.load = load
        self.devices = devices
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._feed = _One()
        self._spawner = Spawner()
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._events: Iterator[Event] = iter(())
        self._idle = threading.Timer(0.0, self.end)
        self._patience = IDLE

    def do(self, item: Item | None) -> list[Event]:
        """All events from giving the item until its outcome or the process's death; for None, until a process
        is ready.
        """
        with self._lock:
            if item is None and self._process is not None:
                return []
            self._idle.cancel()
            if self._process is None:
                heard: queue.SimpleQueue[Event] = queue.SimpleQueue()
                self._events = Crew(self._feed, 1, lambda name, _: self._start(name, heard), heard).events()
            told = list(self._told(item))
            self._idle = threading.Timer(self._patience, self.end)
            self._idle.daemon = True
            self._idle.start()
            return told

    def _told(self, item: Item | None) -> Iterator[Event]:
        self._feed.item = item
        for event in self._events:
            if isinstance(event, Started):
                self._patience = max(IDLE, event.seconds)
            elif isinstance(event, Left):  # reported before it had this item, which its successor gets
                self._feed.item = item if event.keys else self._feed.item
                event = replace(event, keys=())
            if not isinstance(event, Tick) and type(event) is not Event:  # the outcome counts these rows anyway
                yield replace(event, worker=self._name)
            ready = item is None and isinstance(event, Started)
            ended = item is not None and isinstance(event, Outcome) and event.key == item.key
            if ready or ended or isinstance(event, Death):
                return

    def _start(self, name: str, heard: queue.SimpleQueue[Event]) -> Process:
        path = (*self.load.path, *sys.path)  # what was shipped with the Spark application
        environment = {**self.load.environment, **self.devices}
        self._process = self._spawner.call(lambda: Process(name, path, environment, self.load.payload, heard.put))
        return self._process

    def end(self) -> None:
        with self._lock:
            if self._process is not None:
                end([self._process], GRACE)
                self._process = None

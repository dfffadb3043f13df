"""The Spark engine: items are the partitions of one stage a round, and each Python worker of Spark keeps a worker's
process, with its model, from one partition to the next. User code never runs in Spark's own processes, so that no death
of it is a failed task: what follows from a death is the feed's to decide, not Spark's.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gristmill.engines.crew import BEAT, Crew
from gristmill.engines.local import GRACE, Process, end
from gristmill.engines.spark_session import first_line, session
from gristmill.plan.contracts import (
    WAIT,
    Death,
    Event,
    Failure,
    Feed,
    Item,
    Left,
    Outcome,
    Stages,
    Started,
    Tick,
    Waiting,
)
from gristmill.plan.options import SparkOptions
from gristmill.plan.processes import packed
from gristmill.plan.spawning import Spawner

ROUND = 10_000  # items of one round at most: what the driver of Spark keeps of a task is several kilobytes
PATIENCE = 5.0  # seconds without a running task after which the wait is said aloud
IDLE = 2.0  # seconds that a process waits for the next item at least; or as long as loading its model took


class Spark:
    """Runs items as partitions of Spark stages, in a session that is there or in one for the length of the run."""

    def __init__(self, workers: int, path: tuple[str, ...], options: SparkOptions) -> None:
        self._workers = max(1, workers)
        self._path = path
        self._options = options

    def run(self, stages: Stages, feed: Feed) -> Iterator[Event]:
        """Events until the feed is done. Closing the iterator cancels the stage at hand; a session of our own ends."""
        with session(self._options, self._workers) as spark:
            run = f"gristmill-{os.getpid()}-{time.time_ns()}"
            load = Load(run, self._path, dict(stages.environment(0)), packed(stages))
            rounds = _Rounds(spark.sparkContext, load)
            try:
                while True:
                    held: dict[str, Item] = {}
                    # A name an item, since Spark alone knows where it will run; all are free again in the next round.
                    while len(held) < ROUND and isinstance(item := feed.take(name := f"s{len(held)}"), Item):
                        held[name] = item
                    if held:
                        yield from rounds.events(held, min(self._workers, feed.wanted()) - len(held))
                    elif item is WAIT:  # for who reads the results
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
        """A round: each of `held`, by the feed's name for who has it, ends with an outcome or a death.

        Beside them models are loaded in `spare` slots, which the next round will want.
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
        except BaseException as e:  # crosses to the thread of the driver
            failed = e
        self._events.put(failed)

    def _waits(self) -> str | None:
        """That no partition runs, where that is news; "" when one does again."""
        now = time.monotonic()
        if now - self._looked < PATIENCE:
            return None
        self._looked = now
        tracker = self._context.statusTracker()
        stages = [tracker.getStageInfo(s) for s in tracker.getActiveStageIds()]
        lacking = bool(stages) and not any(s.numActiveTasks for s in stages if s is not None)
        before, self._said = self._said, "waiting for Spark to start executors: none is there" if lacking else ""
        return self._said if self._said != before else None

    def end(self) -> None:
        """Cancel what is running and wait for it to be gone."""
        if self._thread is not None:
            self._context.cancelJobGroup(self._group)
            self._thread.join(GRACE)
        self._task.load.unpersist()


class _Inbox:
    """The accumulator's value in the driver, which hands on what is added to it. In Python workers it is a list."""

    def __init__(self, events: queue.SimpleQueue[Any]) -> None:
        self._events = events

    def __iadd__(self, more: Iterable[Event]) -> _Inbox:
        for event in more:
            self._events.put(event)
        return self


def _key(event: Outcome | Death) -> str:
    return event.key if isinstance(event, Outcome) else "".join(event.keys[:1])


def _of_python(error: BaseException) -> Failure | None:
    """What kept Spark's Python workers from beginning at all (no gristmill there, another Python); None for others."""
    text, kind = str(error), type(error).__name__
    if "PythonException" not in kind + text and "PySparkRuntimeError" not in kind + text:
        return None
    wrong = [line.strip() for line in text.splitlines() if "Error: " in line]
    message = f"Spark's Python workers cannot run gristmill: {wrong[-1] if wrong else first_line(error)}"
    return Failure("load", kind, message, text)


# ---------------------------------------------------------------- in a Python worker of Spark


@dataclass(frozen=True)
class Load:
    """What every worker's process of a run is started with."""

    run: str
    path: tuple[str, ...]
    environment: Mapping[str, str]
    payload: bytes


@dataclass(frozen=True)
class Partition:
    """What Spark runs on each partition, which holds one item; or None, to have a model loaded."""

    load: Any  # a broadcast Load
    events: Any  # an accumulator
    speculative: bool

    def __call__(self, items: Iterator[Item | None]) -> Iterator[None]:
        from pyspark import TaskContext

        context = TaskContext.get()
        gpus = context.resources().get("gpu")
        devices = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus.addresses)}
        for item in items:
            # Spark tries a partition again whose executor was lost. Whether it should be is the feed's to say, so that
            # this one says nothing; only a copy beside a slow one looks the same, and does the work.
            if context.attemptNumber() == 0 or self.speculative:
                self.events.add(_slot(self.load.value, devices).do(item))
        return iter(())


_KEPT: list[Slot] = []  # one, or none: what this Python worker keeps from task to task


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

    def take(self, worker: str) -> Any:
        item, self.item = self.item, None
        return WAIT if item is None else item


class Slot:
    """A worker's process below a Python worker of Spark, given one item at a time and ended when none comes."""

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
        """All that happened from giving the item to its outcome or the process's death; for None, to a process that is
        ready.
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
            elif isinstance(event, Left):  # said before it knew of this item, which its successor gets
                self._feed.item = item if event.keys else self._feed.item
                event = replace(event, keys=())
            if not isinstance(event, Tick) and type(event) is not Event:  # the outcome counts the rows of its ticks
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
        """No more items come."""
        with self._lock:
            if self._process is not None:
                end([self._process], GRACE)
                self._process = None

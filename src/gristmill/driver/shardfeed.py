"""What runs next, and which shards wait because the model may be broken. Pure decisions: no clock, no I/O, no engine;
driven by events. Whether a shard is tried again is decided in retries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import field, replace
from typing import Any

from gristmill.driver.retries import Attempts, error_of, how, rows_to_blame
from gristmill.errors import GristmillError, RunFailed, WorkerLost
from gristmill.observe.events import Note
from gristmill.process.failure import LATE_LOAD, ended
from gristmill.process.messages import (
    DONE,
    WAIT,
    Death,
    Event,
    Failure,
    Item,
    Left,
    Outcome,
    Signal,
    Started,
)
from gristmill.shards.numbers import NumberQueue, Numbers
from gristmill.values import dataclass
from gristmill.worker.recipe import Task

DOUBTS = 8  # consecutive shards, wherever they are, on which the model may fail throughout before the run stops
UNSTARTED = 3  # consecutive workers that may die before they have loaded
LOOK = 256  # pending shards among which one is chosen that a worker can begin at little cost


@dataclass
class ShardFeed:
    """Hands out the probe, then shards in order; decides about retries, suspects, doubt and the end.

    `task` makes the Task of a shard. `out_of_memory` tells whether a killed worker had run out of memory. `most_ahead`
    bounds how far beyond the consumer of a stream shards are scored. `proof` makes a task that scores rows of a shard
    that was scored in this run, or from all over the source (None), for when the model has failed on all that this run
    has tried. Of a `remote` model, which works at one time and not at another, nothing else is evidence. `run` is a
    name unique to this feed, `sink` what errors call the sink.
    """

    workers: int
    probe: Task | None = None
    careful_start: bool = False
    out_of_memory: Callable[[Death], bool] = lambda death: False
    most_ahead: int | None = None
    proof: Callable[[int | None], Task] | None = None
    remote: bool = False
    run: str = ""
    sink: str = ""

    fatal: GristmillError | None = None
    stopped: bool = False
    probed: Any = None
    committed: Numbers = field(default_factory=Numbers)
    ok_rows: int = 0
    notes: list[Note] = field(default_factory=list)

    _task: Callable[[int], Task] | None = None
    _pending: NumberQueue = field(default_factory=NumberQueue)
    _inside: Collection[int] = ()
    _last: dict[str, int] = field(default_factory=dict)  # the shard that a worker was given last
    _doubted: dict[int, Failure] = field(default_factory=dict)
    _attempts: dict[int, Attempts] = field(default_factory=dict)
    _held: dict[str, list[int]] = field(default_factory=dict)
    _probing: str | None = None
    _probe_given: bool = False
    _probe_attempt: Attempts = field(default_factory=Attempts)
    _unstarted: int = 0
    _in_doubt: int = 0  # shards on which the model failed throughout, since it was known to work
    _patience: int = 1  # how many of these a remote model may have before it is tried
    _best: tuple[float, int] | None = None  # the share of rows that were scored, and the shard in which it is largest
    _consumed: int = -1

    # ------------------------------------------------ the engine asks

    def wanted(self) -> int:
        """Workers worth having now; 0 at the end."""
        if self.fatal is not None or self.stopped:
            return 0
        if self._task is None:
            return 1 if self.careful_start else self.workers
        waiting = len(self._pending) + len(self._doubted) + (self.probe is not None)
        return min(self.workers, waiting + sum(map(len, self._held.values())))

    def take(self, worker: str) -> Item | Signal:
        """An Item, WAIT or DONE."""
        if self.fatal is not None or self.stopped:
            return DONE
        if self.probe is not None:
            return self._give_probe(worker)
        if self._task is None:
            return WAIT
        held = self._held.setdefault(worker, [])
        number = self._next(worker, held)
        if number is None:
            return self._idle()
        held.append(number)
        attempt = self._attempts.setdefault(number, Attempts())
        return self._item(f"{number}.{attempt.number}", self._task(number), attempt)

    def _give_probe(self, worker: str) -> Item | Signal:
        if self._probe_given or self._probing not in (None, worker):
            return WAIT
        a, held = self._probe_attempt, self._held.get(worker)
        if held and (a.careful or self._careful(held[0])):
            return WAIT  # a careful attempt has its worker for itself
        self._probe_given, self._probing = True, worker
        assert self.probe is not None
        return self._item(f"probe.{a.number}", self.probe, a)

    def _item(self, key: str, task: Task, a: Attempts) -> Item:
        named = replace(task, attempt=self._name(key), careful=a.careful, blame=a.blame, how=a.how, proven=a.proven)
        return Item(key, named)

    def _name(self, key: str) -> str:
        return f"{self.run}.{key}"

    def _next(self, worker: str, held: list[int]) -> int | None:
        if not self._pending or (held and not self.remote and len(self._pending) <= self.workers):
            return None  # near the end no worker holds a second item that another could begin
        at, doubts = 0, len(self._doubted)
        if self.most_ahead is not None:
            if self._pending[0] > self._consumed + self.most_ahead:
                return None
        elif doubts:
            at = len(self._pending) * doubts // (doubts + 1)  # elsewhere, not next to shards that fail
        elif self._probing not in (None, worker) and self._pending[0] == 0 and len(self._pending) > 1:
            at = self._near(worker, 1)  # shard 0 is for the worker that has already scored its first rows
        else:
            at = self._near(worker, 0)
        if held and (self._careful(held[0]) or self._careful(self._pending[at])):
            return None  # a careful attempt has its worker for itself
        number = self._pending.take(at)
        if self._inside:
            self._last.pop(worker, None)
            self._last[worker] = number
            if len(self._last) > max(LOOK, 2 * self.workers):  # an engine may name a new worker for every item
                del self._last[next(iter(self._last))]
        return number

    def _near(self, worker: str, first: int) -> int:
        """The place of the shard for a worker, from the `first` pending one on: that which begins where its last one
        ended, inside what is decoded from its beginning; else one that begins there; else the one in the middle, so
        that two workers decode as little as can be twice. Shards that are tried again come first.
        """
        if not self._inside or self._pending[first] in self._attempts:
            return first
        most = min(len(self._pending), first + LOOK)
        wanted, begins = self._last.get(worker, -2) + 1, None
        wanted = wanted if wanted in self._inside else -1
        for at in range(first, most):
            number = self._pending[at]
            if number == wanted:
                return at
            if begins is None and number not in self._inside:
                begins = at
                if wanted < 0:
                    break
        return (first + most) // 2 if begins is None else begins

    def _careful(self, number: int) -> bool:
        return number in self._attempts and self._attempts[number].careful

    def _idle(self) -> Signal:
        if any(self._held.values()) or (self._pending and not self._doubted):
            return WAIT
        if self._doubted:  # other shards, if any, are further ahead of the stream's reader than allowed
            self._judge_doubted()
            return WAIT if self.fatal is None else DONE
        return DONE

    def _judge_doubted(self) -> None:
        """Only shards on which the model failed throughout are left: if it works elsewhere, their rows are to blame."""
        scored_first = self.most_ahead is not None and bool(self.probed and self.probed["ok"])
        tell = self.remote and self.proof is not None
        # A stream's reader waits for these rows, and no others can be tried.
        if (self.ok_rows > 0 or scored_first) and not tell:
            self._trust()
        else:
            self._prove()

    def _prove(self) -> None:
        """Score rows from elsewhere, to learn whether the model works."""
        if self.proof is not None:
            self.probe_further(self.proof(None if self._best is None else self._best[1]))
        else:
            self._distrust()

    def _trust(self) -> None:
        """The model works: shards on which it failed throughout have bad rows, and are bisected."""
        self._in_doubt = 0
        for number in self._doubted:
            self._attempts.setdefault(number, Attempts()).proven = True
            self._again(number)
        self._doubted.clear()

    def _distrust(self, also: str = "") -> None:
        failure = next(iter(self._doubted.values()))
        told = f"{failure.who} fails on every row tried{also} ({failure.type}: {failure.message})\n{failure.traceback}"
        self.fatal = self.fatal or RunFailed(told.rstrip())

    # ------------------------------------------------ the run tells

    def begin(self, task: Callable[[int], Task], numbers: Iterable[int], inside: Collection[int] = ()) -> None:
        """The plan is made: these shards are to be scored. To begin one that is `inside` takes decoding what the shards
        before it hold, but for the worker that has just read the one before.
        """
        self._task, self._inside = task, inside
        self._pending = NumberQueue(numbers)
        self.probe = None
        if self._probe_attempt.careful and 0 in self._pending:  # suspects among its first rows are noted
            self._attempts[0] = Attempts(careful=True)

    def consumed(self, number: int) -> None:
        """A stream's consumer has taken the shards up to this one."""
        self._consumed = number

    def probe_further(self, probe: Task) -> None:
        """The probe found no row that could be scored: look at more."""
        self.probe, self.probed = probe, None
        self._probe_again()

    def on(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, Started):
            self._unstarted = 0
        elif isinstance(event, Outcome):
            self._ended(event)
        elif isinstance(event, Death):
            self._died(event)
        elif isinstance(event, Left):
            self._left(event)

    def _ended(self, event: Outcome) -> None:
        if event.key == "":
            assert event.error is not None
            self._fail(
                event.error, "a worker could not start" if event.error.kind != "load" else "the model cannot be loaded"
            )
            return
        if event.key.startswith("probe."):
            self._probe_ended(event)
            return
        number = int(event.key.partition(".")[0])
        self._release(event.worker, number)
        if event.error is None:
            self.committed.add(number)
            if self._attempts.get(number) == Attempts():  # nothing is known of it that another attempt would need
                del self._attempts[number]
            if (ok := event.value["counts"][-1]) > 0:
                self.ok_rows += ok
                self._best = max(self._best or (0.0, number), (ok / max(1, event.value["counts"][4]), number))
                if not self.remote:
                    self._trust()
        else:
            self._failed(number, event.error)

    def _probe_ended(self, event: Outcome) -> None:
        error, a = event.error, self._probe_attempt
        if self._task is not None:  # a proof
            asked, self.probe = self.probe, None
            if error is None and event.value["ok"] > 0:
                self.ok_rows += event.value["ok"]
                self._patience = min(2 * self._patience, DOUBTS)
                self._trust()
            else:
                rows = (asked.rows if asked is not None else None) or 0
                where = "all over the source" if self._best is None else f"shard {self._best[1]}, scored before"
                self._distrust(f", {rows} from {where} among them")
        elif error is None:
            self.probed = event.value
        elif error.kind in ("model", "memory", "sick"):
            assert self.probe is not None and self.probe.rows is not None
            rows = self.probe.rows  # which may all be bad: the run is asked for others
            none: dict[str, Any] = {"answers": {}, "made": {}, "figures": {}}
            self.probed = {"schema": None, "rows": rows, "ok": 0, "dead": rows, "failed": rows, "error": error, **none}
        elif a.first_rows_failed(error):
            self._probe_again()
            self._note("warning", f"the first rows: {error.type}: {error.message}; trying again")
        else:
            if error.kind == "undeclared":  # nothing is committed yet: as for any other name that the job has wrong
                error = replace(error, ours="BadJob")
            self._fail(error, "while scoring the first rows")

    def _failed(self, number: int, error: Failure) -> None:
        attempt = self._attempts.setdefault(number, Attempts())
        if error.kind in ("model", "memory") and not attempt.proven:
            self._doubted[number] = error
            self._in_doubt += 1
            tell = self.remote and self.proof is not None
            then = "trying whether others are answered" if tell else "trying other shards first"
            self._note("warning", f"shard {number}: every row fails ({error.type}: {error.message}); {then}")
            if self.probe is None and self._in_doubt >= (self._patience if tell else DOUBTS):
                self._prove()
        elif attempt.failed(error):
            self._again(number)
            self._note("warning", f"shard {number}: {error.type}: {error.message}; trying again")
        else:
            self._fail(error, f"shard {number}")

    def _died(self, death: Death) -> None:
        self._held.pop(death.worker, None)
        self._last.pop(death.worker, None)
        gone = {key.partition(".")[0] for key in death.keys}
        for worker, held in self._held.items():  # an item in two places may have lost only its first stage
            self._held[worker] = [n for n in held if str(n) not in gone]
        if not death.started:
            self._unstarted += 1
            end = ended(death, LATE_LOAD)
            if end.startswith(LATE_LOAD) and self.fatal is None:
                self.fatal = WorkerLost(f"{end}; a larger batch_timeout allows more\n{death.evidence}")
            elif self._unstarted >= UNSTARTED and self.fatal is None:
                self.fatal = WorkerLost(
                    f"{self._unstarted} workers in a row ended while starting ({end})\n{death.evidence}"
                )
        blame = rows_to_blame(death, self.out_of_memory)
        for place, key in reversed(list(enumerate(death.keys))):  # so that they come next, in their former order
            name = key.partition(".")[0]
            if name == "probe":
                self._bury(self._probe_attempt, key if blame and death.started else "", death, "the first rows")
                self._probe_again()
                continue
            number = int(name)
            if place == 0 and death.started:
                self._bury(
                    self._attempts.setdefault(number, Attempts()), key if blame else "", death, f"shard {number}"
                )
            self._again(number)
        shards = [key.partition(".")[0] for key in death.keys]
        which = f"shard{'s' * (len(shards) > 1)} {', '.join(shards)}" if shards != ["probe"] else "the first rows"
        what = f" while it held {which}: tried again" if shards else ""
        self._note("warning", f"worker {death.worker} ended ({how(death)}){what}")
        if self._probing == death.worker:
            self._probing = None

    def _left(self, gone: Left) -> None:
        """A worker left of its own accord: no fault, and another one takes its place."""
        self._held.pop(gone.worker, None)
        self._last.pop(gone.worker, None)
        if self._probing == gone.worker:
            self._probing = None
        for key in reversed(gone.keys):
            if key.startswith("probe."):
                self._probe_again()
            else:
                self._again(int(key.partition(".")[0]))
        self._note("warning", f"worker {gone.worker} is replaced: {gone.reason}")

    def _bury(self, attempts: Attempts, blamed: str, death: Death, what: str) -> None:
        """A worker died during an attempt; `blamed` is the attempt's key if its rows caused that, else ""."""
        if not attempts.died(death, self._name(blamed) if blamed else "") and self.fatal is None:
            sent = (
                ". No row is blamed for SIGKILL, which comes from outside; code of yours that sends it to its own "
                "process does so each time: have it raise an error instead"
            )
            self.fatal = WorkerLost(
                f"{what}: {attempts.deaths + attempts.kills} workers have died of it ({how(death)}); what is known "
                f"of its rows is kept: run again to resume{sent if attempts.kills > attempts.deaths else ''}\n"
                f"{death.evidence}"
            )

    def _probe_again(self) -> None:
        self._probe_attempt.number += 1
        self._probe_given, self._probing = False, None

    def _again(self, number: int) -> None:
        self._attempts.setdefault(number, Attempts()).number += 1
        self._pending.put_first(number)

    def _release(self, worker: str, number: int) -> None:
        held = self._held.get(worker, [])
        if number in held:
            held.remove(number)
        if not held:
            self._held.pop(worker, None)  # an engine may name a new worker for every item

    def _fail(self, failure: Failure, where: str) -> None:
        self.fatal = self.fatal or error_of(failure, where, self.sink)

    def _note(self, level: Any, text: str) -> None:
        self.notes.append(Note(level, text))

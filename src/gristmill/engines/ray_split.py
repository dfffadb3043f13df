"""Ray with `split=True`: actors that only read, run steps and tokenise, on any node, beside those that predict and
commit. The output of the first travels through Ray's object store, a bounded number of portions ahead.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import field, replace
from typing import Any

from gristmill.engines.crew import TAIL, Aside, Ended
from gristmill.engines.ray_actors import Actor, Host
from gristmill.engines.serving import WITHDRAWN
from gristmill.process.liveness import Vigil
from gristmill.process.messages import Alive, Death, Event, Item, Outcome, Portion, Printed, SplitStages, Taken
from gristmill.process.startup import packed
from gristmill.values import dataclass

AT_WORKER = 2  # portions of an item that its worker holds but has not begun
IN_STORE = 8  # portions of an item that wait in the object store


class Preparer(Host):
    """The actor of the first stage: as Host, but portions are fetched one at a time, so that it is never far ahead."""

    def __init__(self) -> None:
        super().__init__()
        self._portions: queue.Queue[Event] = queue.Queue(1)

    def emit(self, event: Event) -> None:
        """Keep portions, and the end of the process, for whoever asks for the next one; report all but portions."""
        if not isinstance(event, Portion):
            super().emit(event)
        if isinstance(event, (Portion, Ended)):
            self._portions.put(event)

    def next(self, name: str, key: str) -> tuple[Event, bytes | None]:
        """The next portion of an item, or the end of the process that makes it, and separately its body, so that the
        driver need not fetch that. Leftovers of earlier processes and items are skipped.
        """
        while True:
            event = self._portions.get()
            if isinstance(event, Portion) and event.key == key:
                return replace(event, body=None), event.body
            if isinstance(event, Ended) and event.worker == name:
                return event, None


@dataclass
class _Carry:
    """An item on its way from one stage to the other."""

    item: Item
    to: Any
    credits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(AT_WORKER))
    off: bool = False  # the rest is no longer wanted

    def stop(self) -> None:
        self.off = True
        self.credits.release()


class Apart:
    """The first stage of a run: up to `each` preparing actors for each worker, started as items need them."""

    def __init__(
        self, ray: Any, made: Any, path: tuple[str, ...], stages: SplitStages, each: int, emit: Callable[[Event], None]
    ) -> None:
        self._ray = ray
        self._made = made
        self._path = path
        self._stages = stages
        self._first = stages.first()
        self._payload = ray.put(packed(self._first))
        self._each = each
        self._emit = emit
        self._names = (f"p{n}" for n in itertools.count())
        self.preparers: list[Actor] = []
        self._idle: queue.SimpleQueue[Actor] = queue.SimpleQueue()
        self._queues: dict[Actor, queue.SimpleQueue[_Carry]] = {}
        self._carries: dict[tuple[Actor, str], _Carry] = {}
        self._lock = threading.Lock()
        self._vigil = Vigil()  # only for preparers whose next portion is awaited: nobody may be listening to others

    def give(self, worker: Actor, item: Item | None) -> Item | None:
        """The item as given to its worker; its first stage is begun elsewhere if that is allowed."""
        if item is None or not self._stages.apart(item):
            return item
        carry = self._carries[worker, item.key] = _Carry(item, worker.host)
        if worker not in self._queues:
            self._queues[worker] = queue.SimpleQueue()
            for _ in range(self._each):  # in item order, so that none waits for a later one
                threading.Thread(target=self._carry_on, args=(self._queues[worker],), daemon=True).start()
        self._queues[worker].put(carry)
        return replace(item, portions=())

    def hear(self, worker: Actor, event: Event) -> None:
        """Handle what a worker of the second stage reports, before passing it on."""
        if isinstance(event, Taken):
            if (carry := self._carries.get((worker, event.key))) is not None:
                carry.credits.release()
            return
        if isinstance(event, (Outcome, Ended)):
            of = [key for key in list(self._carries) if key[0] is worker]
            for key in of if isinstance(event, Ended) else [(worker, event.key)]:
                if (over := self._carries.pop(key, None)) is not None:
                    over.stop()
        self._emit(event)

    def end(self) -> None:
        """Drop everything: what is prepared but not scored is of no use."""
        for carry in list(self._carries.values()):
            carry.stop()
        for preparer in self.preparers:
            preparer.drop()
        for preparer in self.preparers:
            preparer.thread.join(2.0)

    # ------------------------------------------------ one thread an item

    def _carry_on(self, carries: queue.SimpleQueue[_Carry]) -> None:
        with contextlib.suppress(SystemExit):  # how Ray ends a call when the connection is closed
            self._carry_each(carries)

    def _carry_each(self, carries: queue.SimpleQueue[_Carry]) -> None:
        while True:
            carry = carries.get()
            if not carry.off:
                preparer = self._preparer()
                try:
                    ended = self._carried(carry, preparer)
                except self._ray.exceptions.RayError as e:
                    preparer.drop()
                    self._vigil.forget(preparer.name)
                    ended = Ended(preparer.name, lost=f"its actor was lost: {type(e).__name__}", evidence=str(e))
                if ended is None:
                    self._idle.put(preparer)
                else:
                    self._withdraw(carry, preparer, ended)

    def _carried(self, carry: _Carry, preparer: Actor) -> Ended | None:
        """Pass on an item's portions until the last one, or until they are no longer wanted. Returns how the preparer
        ended, if it did.
        """
        ray, waiting, more = self._ray, deque[tuple[Portion, Any]](), True
        preparer.host.give.remote(carry.item)
        while more or waiting:
            while waiting and (carry.off or carry.credits.acquire(blocking=not more or len(waiting) >= IN_STORE)):
                portion, body = waiting.popleft()
                if not carry.off:
                    carry.to.portion.remote(portion, body)
            if more:
                call = preparer.host.next.options(num_returns=2, concurrency_group="next")
                self._vigil.watch(preparer.name)
                head, body = call.remote(preparer.name, carry.item.key)
                event = ray.get(head)
                self._vigil.rest(preparer.name)
                if isinstance(event, Ended):
                    return event
                waiting.append((event, body))
                more = not event.last
        return None

    def _withdraw(self, carry: _Carry, preparer: Actor, ended: Ended) -> None:
        """After a preparer's death: its item is no longer held, and its worker is told to forget it."""
        preparer.thread.join(2.0)  # then it has heard the last words
        if not preparer.gone:
            self._idle.put(preparer)  # with room for the next process
        if carry.off:
            return
        code = ended.code
        evidence = preparer.tail.decode("utf-8", "replace") + ended.evidence
        exit_code, number = (code, None) if code is None or code >= 0 else (None, -code)
        key = carry.item.key
        with contextlib.suppress(self._ray.exceptions.RayError):
            carry.to.portion.remote(Portion("", key, WITHDRAWN), None)
        self._emit(Aside("", Death(preparer.name, (key,), evidence, exit_code, number, True, ended.lost)))

    def _preparer(self) -> Actor:
        """An idle preparer, or a new one: there are never more of them than carrying threads."""
        try:
            preparer = self._idle.get_nowait()
        except queue.Empty:
            preparer = Actor(self._ray, self._made.remote())
            preparer.busy = False
            with self._lock:
                self.preparers.append(preparer)
        if not preparer.busy:
            preparer.tail, name = b"", next(self._names)
            environment = dict(self._first.environment(0))
            call = preparer.host.start.remote(name, self._path, environment, self._payload)
            preparer.begin(name, call, lambda event: self._heard(preparer, event))
        return preparer

    def look(self, now: float) -> None:
        """Give up preparers that have been silent for too long: whoever waits for one learns that it was lost."""
        for name, _ in self._vigil.late(now):
            for preparer in [p for p in self.preparers if p.name == name]:
                preparer.drop()

    def _heard(self, preparer: Actor, event: Event) -> None:
        self._vigil.heard(event.worker, event.limit if isinstance(event, Alive) else None)
        if isinstance(event, Printed):
            preparer.tail = (preparer.tail + event.text.encode("utf-8", "replace"))[-TAIL:]
        if isinstance(event, (Printed, Outcome)):  # an outcome without a key: the stage could not be opened
            self._emit(Aside("", event))

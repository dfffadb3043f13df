"""The Ray engine: each worker is an actor that holds a place in the cluster, with a fresh interpreter below it in
which user code runs, so that a crash is seen with its signal and its last words, as it is on one machine.
"""

from __future__ import annotations

import contextlib
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from gristmill.engines.crew import Crew, Ended, held_by
from gristmill.engines.local import GRACE, Process, end
from gristmill.engines.ray_cluster import connected, needs, shortage
from gristmill.plan.contracts import Event, Feed, Item, Portion, SplitStages, Stages, Waiting
from gristmill.plan.options import RayOptions
from gristmill.plan.processes import packed
from gristmill.plan.spawning import Spawner

PATIENCE = 2.0  # seconds without a place after which the wait is said aloud


class Ray:
    """Runs items in actors, between `least` and `workers` of them as the cluster has room.

    `gpu` says that the model runs on one; `options` are those of `gm.ray(…)`.
    """

    def __init__(self, workers: int, least: int, path: tuple[str, ...], gpu: bool, options: RayOptions) -> None:
        self._workers = max(1, workers)
        self._least = max(1, least)
        self._path = path
        self._options = options
        self._gpu = gpu

    def run(self, stages: Stages, feed: Feed) -> Iterator[Event]:
        """Events until the feed is done. Closing the iterator ends all actors, and a cluster that was started here."""
        with connected(self._options, math.ceil(self._workers * self._options.cpus_per_worker)) as (ray, ours):
            wanted = needs(self._options, self._gpu, ray.cluster_resources())
            runtime_env = None if ours else self._options.runtime_env  # our own connection has it as a whole
            actors = _Actors(ray, remote(ray, Host, wanted, runtime_env), self._path, stages, self._least)
            held = held_by(stages)
            if self._options.split and hasattr(stages, "first"):  # else there is but one stage
                from gristmill.engines.ray_split import Apart, Preparer

                preparer, each = remote(ray, Preparer, {"CPU": 1}, runtime_env), self._options.preparers_per_worker
                actors.apart = Apart(ray, preparer, self._path, cast(SplitStages, stages), each, actors.events.put)
                held = max(held, 1 + each)
            crew = Crew(feed, self._workers, actors.start, actors.events, held)
            try:
                for event in crew.events():
                    yield event
                    if actors.apart is not None:
                        actors.apart.look(time.monotonic())
                    if (reason := actors.waiting(wanted)) is not None:
                        yield Waiting("", reason)
            finally:
                actors.end()


# ---------------------------------------------------------------- in the cluster


class Host:
    """The actor: starts a worker's process where the cluster has put it, and passes messages both ways."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._spawner = Spawner()
        self._process: Process | None = None

    def start(self, name: str, path: tuple[str, ...], environment: Mapping[str, str], payload: bytes) -> None:
        """A worker; the next one when that has ended."""
        path = (*path, *sys.path)  # what the runtime environment brought
        self._process = self._spawner.call(lambda: Process(name, path, environment, payload, self.emit))

    def emit(self, event: Event) -> None:
        """What the process reports, from several threads."""
        self._events.put(event)

    def give(self, item: Item | None) -> None:
        """As crew.Link."""
        assert self._process is not None
        self._process.give(item)

    def portion(self, portion: Portion, body: bytes | None) -> None:
        """What an actor of the first stage has made; Ray has brought `body` here."""
        assert self._process is not None
        self._process.give(replace(portion, body=body))

    def hear(self) -> list[Event]:
        """What has happened since the last call; waits a while for something to happen."""
        heard: list[Event] = []
        with contextlib.suppress(queue.Empty):
            heard.append(self._events.get(timeout=5.0))
            while True:
                heard.append(self._events.get_nowait())
        return heard

    def end(self, grace: float) -> None:
        """Stop the worker, after `grace` seconds by force."""
        if self._process is not None:
            end([self._process], grace)


# ---------------------------------------------------------------- in the driver


class Actor:
    """An actor and the worker in it, as the driver reaches them (crew.Link); one worker after the other."""

    def __init__(self, ray: Any, host: Any) -> None:
        self.host = host
        self.placed = self.ready = self.gone = False
        self.busy = True
        self.name = ""
        self.tail = b""
        self.apart: Any = None  # ray_split.Apart
        self.since = time.monotonic()
        self._ray = ray

    def begin(self, name: str, call: Any, emit: Callable[[Event], None]) -> None:
        """Listen to the worker that `call` starts, from its placement to its end."""
        self.name, self.busy, self.ready = name, True, False
        self.thread = threading.Thread(target=self._listen, args=(name, call, emit), daemon=True)
        self.thread.start()

    def give(self, item: Item | None) -> None:
        item = item if self.apart is None else self.apart.give(self, item)
        self.host.give.remote(item)  # where that fails the actor is dead, which the listening thread is told, too

    def drop(self) -> None:
        if not self.gone:
            self.gone = True
            self._ray.kill(self.host)

    def _listen(self, name: str, call: Any, emit: Callable[[Event], None]) -> None:
        errors = self._ray.exceptions
        try:
            self._ray.get(call)
            self.placed = self.ready = True
            emit(Event(name))  # it can be given items now
            while self.busy:
                for event in self._ray.get(self.host.hear.options(concurrency_group="hear").remote()):
                    self.busy = not isinstance(event, Ended)
                    emit(event)
        except SystemExit:
            return  # how Ray ends a call when the connection is closed
        except errors.OutOfMemoryError as e:  # its rows may be the cause, so it is not `lost`
            self.drop()
            emit(Ended(name, evidence=str(e)))
        except errors.RayError as e:
            self.drop()  # unreachable is dead: what comes back later must find no shard of its own
            emit(Ended(name, lost=f"its actor was lost: {type(e).__name__}", evidence=str(e)))


class _Actors:
    """The actors of one run, with and without a place."""

    def __init__(self, ray: Any, made: Any, path: tuple[str, ...], stages: Stages, least: int) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._ray = ray
        self._made = made
        self._path = path
        self._stages = stages
        self._payload = ray.put(packed(stages))
        self._least = least
        self._actors: list[Actor] = []
        self.apart: Any = None  # ray_split.Apart
        self._said = ""
        self._looked = 0.0

    def start(self, name: str, index: int) -> Actor | None:
        """A worker, in an actor that has none or in a new one; no more new ones at once than have found their place."""
        self._actors = [a for a in self._actors if not a.gone]
        actor = next((a for a in self._actors if not a.busy), None)
        if actor is None:
            placed = sum(a.placed for a in self._actors)
            if len(self._actors) - placed >= max(self._least - placed, placed, 1):
                return None
            actor = Actor(self._ray, self._made.remote())
            self._actors.append(actor)
        call = actor.host.start.remote(name, self._path, dict(self._stages.environment(index)), self._payload)
        actor.apart = self.apart
        actor.begin(name, call, self.events.put if self.apart is None else partial(self.apart.hear, actor))
        return actor

    def waiting(self, needs: Mapping[str, float]) -> str | None:
        """What is waited for, where that is another thing than was last said; "" when nothing is any more."""
        now = time.monotonic()
        if now - self._looked < 1.0:
            return None
        self._looked = now
        late = [a for a in self._actors if not (a.placed or a.gone) and now - a.since > PATIENCE]
        lacking = self._least - sum(a.placed and not a.gone for a in self._actors)
        reason = ""
        if late and lacking > 0:
            total, free = self._ray.cluster_resources(), self._ray.available_resources()
            reason = shortage(needs, self._least, min(lacking, len(late)), total, free)
        beside = [] if self.apart is None else self.apart.preparers
        if not reason and beside and not any(p.placed for p in beside) and now - beside[0].since > PATIENCE:
            total, free = self._ray.cluster_resources(), self._ray.available_resources()
            reason = shortage({"CPU": 1}, 1, 1, total, free) + ", to prepare on"
        before, self._said = self._said, reason
        return reason if reason != before else None

    def end(self) -> None:
        """Ask all workers to stop; then there are no actors."""
        actors = [a for a in self._actors if not a.gone]
        try:
            asked = [a.host.end.remote(GRACE) for a in actors if a.placed]
            if asked:
                self._ray.wait(asked, num_returns=len(asked), timeout=GRACE)
        finally:  # also when a second signal breaks the wait
            if self.apart is not None:
                self.apart.end()
            for actor in actors:
                actor.drop()
            for actor in actors:
                actor.thread.join(2.0)  # its last call has failed by now


def remote(ray: Any, host: type, needs: Mapping[str, float], runtime_env: Mapping[str, Any] | None) -> Any:
    """An actor class that takes what it `needs`; Ray never tries again what it does: the feed decides that."""
    kind = next((n.partition(":")[2] for n in needs if n.startswith("accelerator_type:")), None)
    asked = {
        "num_cpus": needs["CPU"],
        "num_gpus": needs.get("GPU", 0),
        "memory": needs.get("memory"),
        "resources": {k: v for k, v in needs.items() if k not in ("CPU", "GPU", "memory") and ":" not in k},
        "accelerator_type": kind,
        "runtime_env": None if runtime_env is None else dict(runtime_env),
        "max_restarts": 0,
        "max_task_retries": 0,
        "concurrency_groups": {"hear": 1, "next": 1},
    }
    return ray.remote(**{k: v for k, v in asked.items() if v is not None})(host)

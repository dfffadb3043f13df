"""The Ray engine: each worker is an actor that holds a place in the cluster, with a fresh interpreter below it in which
user code runs, so that a crash is seen with its signal and last words, as on a single machine.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Generator, Mapping
from functools import partial
from typing import Any, cast

from gristmill.engines.contract import Wanted
from gristmill.engines.crew import Crew, held_by
from gristmill.engines.ray_actors import Actor, Host, remote
from gristmill.engines.ray_cluster import connected, needs, room, shortage
from gristmill.engines.serving import GRACE
from gristmill.job.options import RayOptions
from gristmill.process.messages import Event, Feed, SplitStages, Stages, Waiting
from gristmill.process.startup import packed

PATIENCE = 2.0  # seconds without a place after which the wait is reported


class Ray:
    """Runs items in actors, between `least` and `workers` of them as the cluster has room.

    `gpu` says that the model runs on one; `options` are those of `gm.ray(…)`.
    """

    Options = RayOptions
    here = False
    room = staticmethod(room)

    def __init__(self, workers: int, least: int, path: tuple[str, ...], gpu: bool, options: RayOptions) -> None:
        self._workers = max(1, workers)
        self._least = max(1, least)
        self._path = path
        self._options = options
        self._gpu = gpu

    @staticmethod
    def open(options: RayOptions, wanted: Wanted) -> Ray:
        return Ray(wanted.workers, wanted.least, wanted.path, wanted.gpu, options)

    @staticmethod
    def per_call(cpus: float, memory: int | None, gpu: str | None, image: str | None) -> dict[str, Any]:
        """The request as resources of Ray's workers."""
        own: dict[str, Any] = {"cpus_per_worker": cpus}
        if memory is not None:
            own["memory_per_worker"] = memory
        if gpu is not None:
            own.update(gpus_per_worker=1, accelerator_type=gpu)
        if image is not None:
            own["runtime_env"] = {"image_uri": image}
        return own

    def run(self, stages: Stages, feed: Feed) -> Generator[Event, None, None]:
        """Events until the feed is done. Closing the iterator ends all actors, and a cluster that was started here."""
        with connected(self._options, math.ceil(self._workers * self._options.cpus_per_worker)) as (ray, ours):
            wanted = needs(self._options, self._gpu, ray.cluster_resources())
            runtime_env = None if ours else self._options.runtime_env  # our own connection already has it
            actors = _Actors(ray, remote(ray, Host, wanted, runtime_env), self._path, stages, self._least)
            held = held_by(stages)
            if self._options.split and hasattr(stages, "first"):  # otherwise there is only one stage
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
        """A worker, in an idle actor or in a new one; at most as many new ones at once as have been placed."""
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
        """What the run is waiting for, if that has changed since the last message; "" once it waits no longer."""
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

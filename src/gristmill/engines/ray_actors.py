"""The actors of the Ray engine: a host of one worker on a node, and its side in the driver."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gristmill.engines.crew import Ended
from gristmill.engines.local import Process, end
from gristmill.process.messages import Event, Item, Portion
from gristmill.process.spawning import Spawner


class Host:
    """The actor: starts a worker's process where the cluster has put it, and passes messages both ways."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._spawner = Spawner()
        self._process: Process | None = None

    def start(self, name: str, path: tuple[str, ...], environment: Mapping[str, str], payload: bytes) -> None:
        """Start a worker; another one once that has ended."""
        path = (*path, *sys.path)  # what the runtime environment brought
        self._process = self._spawner.call(lambda: Process(name, path, environment, payload, self.emit))

    def emit(self, event: Event) -> None:
        """What the process reports, from several threads."""
        self._events.put(event)

    def give(self, item: Item | None) -> None:
        assert self._process is not None
        self._process.give(item)

    def portion(self, portion: Portion, body: bytes | None) -> None:
        """What an actor of the first stage has made; Ray has brought `body` here."""
        assert self._process is not None
        self._process.give(replace(portion, body=body))

    def hear(self) -> list[Event]:
        """The events since the last call; waits a while for one if there are none."""
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
        self.host.give.remote(item)  # if that fails, the actor is dead, which the listening thread also notices

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
            self.drop()  # unreachable counts as dead: should it come back, it must have no shard
            emit(Ended(name, lost=f"its actor was lost: {type(e).__name__}", evidence=str(e)))


def remote(ray: Any, host: type, needs: Mapping[str, float], runtime_env: Mapping[str, Any] | None) -> Any:
    """An actor class that takes what it `needs`. Ray never retries its calls: the feed decides about that."""
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

"""The contract of an engine: it moves items to workers that keep their state, and reports. It never retries."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

from gristmill.process.messages import Event, Feed, Stages
from gristmill.values import dataclass


@dataclass(frozen=True)
class Room:
    """The capacity that an engine has for workers, for planning.

    `workers` fit at once, `gpu_workers` with a GPU each (or with the requested share of one). `threads` are the cores
    of each; None: the machine's cores are divided among them. `gpus` names the GPUs if the driver has to assign them:
    `per_gpu` workers share one, or each has `per_worker`, whose names are one text with commas between; it `shares`
    them among more workers if the model is small. If it `grows`, more may be requested than there is.
    """

    where: str
    workers: int
    gpu_workers: int = 0
    threads: int | None = None
    gpus: tuple[str, ...] = ()
    per_gpu: int = 1
    per_worker: int = 1
    shares: bool = False
    grows: bool = False


@dataclass(frozen=True)
class Wanted:
    """What a run requests from an engine: at most `workers` and at least `least` workers, which import from `path`
    before sys.path; `gpu` if the model runs on one.
    """

    workers: int
    least: int = 1
    path: tuple[str, ...] = ()
    gpu: bool = False


class Engine(Protocol):
    """Moves items to workers that keep their state, and reports events. It never retries and makes no decisions."""

    def run(self, stages: Stages, feed: Feed) -> Generator[Event, None, None]:
        """Runs until the feed is DONE and everything handed out has ended. Closing the iterator leaves nothing
        running.
        """
        ...


class EngineKind(Protocol):
    """What the registry names (`ENGINES` in job/options.py): usually the engine's class.

    `Options` is a frozen dataclass of its options in a job, which raises BadJob for invalid values. If it is `here`,
    its workers are processes of this machine that see its disk.
    """

    Options: type[Any]
    here: bool

    def room(self, options: Any) -> Room | None:
        """Its capacity for workers; None means this machine's. Raises BadJob if its cluster cannot be reached."""
        ...

    def open(self, options: Any, wanted: Wanted) -> Engine:
        """An engine for one run. Running it raises MissingExtra if its package is missing."""
        ...


class Sized(EngineKind, Protocol):
    """An engine that gives each call of a parallel map the resources it requests; maps run on these engines, and on
    those that are `here`.
    """

    def per_call(self, cpus: float, memory: int | None, gpu: str | None, image: str | None) -> dict[str, Any]:
        """Its options for calls that each need this many cores, bytes of memory, this GPU type and container image."""
        ...

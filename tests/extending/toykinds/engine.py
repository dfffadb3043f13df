"""An engine: at most so many fresh interpreters of this machine."""

from __future__ import annotations

import queue
from collections.abc import Generator
from dataclasses import dataclass

from gristmill.engines.contract import EngineKind, Room, Wanted
from gristmill.engines.crew import Crew, held_by
from gristmill.engines.local import Process, end
from gristmill.errors import BadJob
from gristmill.process.messages import Event, Feed, Stages
from gristmill.process.spawning import Spawner
from gristmill.process.startup import packed


@dataclass(frozen=True)
class DuoOptions:
    """What a job may say: `engine: {name: duo, most: 1}`."""

    most: int = 2

    def __post_init__(self) -> None:
        if self.most < 1:
            raise BadJob(f"engine option most is {self.most}: give at least 1")


class Duo:
    """Workers are started, fed, heard and replaced by a Crew; it is told how one is started."""

    Options = DuoOptions
    here = True  # its workers are processes of this machine

    def __init__(self, workers: int, path: tuple[str, ...]) -> None:
        self._workers = workers
        self._path = path

    @staticmethod
    def room(options: DuoOptions) -> Room | None:
        """What there is to place workers on, for planning; None for this machine as it is."""
        return Room("the duo", options.most)

    @staticmethod
    def open(options: DuoOptions, wanted: Wanted) -> Duo:
        """An engine for one run."""
        return Duo(min(wanted.workers, options.most), wanted.path)

    def run(self, stages: Stages, feed: Feed) -> Generator[Event, None, None]:
        """Events until the feed is done; closing the generator leaves nothing running."""
        payload = packed(stages)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        spawner = Spawner()
        started: list[Process] = []

        def start(name: str, index: int) -> Process:
            environment = stages.environment(index)
            started.append(spawner.call(lambda: Process(name, self._path, environment, payload, events.put)))
            return started[-1]

        try:
            yield from Crew(feed, self._workers, start, events, held_by(stages)).events()
        finally:
            end(started, 5.0)
            spawner.close()


_: EngineKind = Duo  # for mypy

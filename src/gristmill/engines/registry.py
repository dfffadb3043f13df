"""Engines by name."""

from __future__ import annotations

from gristmill.engines.contract import Engine, EngineKind, Room, Wanted
from gristmill.job.options import ENGINES, EngineSpec
from gristmill.process import machine


def engine_kind(spec: EngineSpec) -> EngineKind:
    """The engine that a job names, for questions before it runs."""
    return ENGINES.get(spec.name)


def open_engine(spec: EngineSpec, workers: int, path: tuple[str, ...] = (), gpu: bool = False) -> Engine:
    """The engine that a job names, for `workers` workers that import from `path`; `gpu` says that the model wants one.

    Running it raises MissingExtra if its package is missing.
    """
    least = spec.workers[0] if isinstance(spec.workers, tuple) else 1 if spec.workers == "auto" else workers
    return engine_kind(spec).open(spec.own(), Wanted(workers, least, path, gpu))


def room(spec: EngineSpec) -> Room:
    """An engine's capacity for workers. Raises BadJob if its cluster cannot be reached."""
    return engine_kind(spec).room(spec.own()) or this_machine()


def this_machine(per_gpu: int = 1) -> Room:
    """This machine's capacity: a worker per core, or `per_gpu` workers per GPU."""
    found = machine.gpus()
    return Room("this machine", machine.cores(), per_gpu * len(found), None, found, per_gpu)

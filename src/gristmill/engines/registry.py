"""Engines by name."""

from __future__ import annotations

from gristmill.engines.contract import Engine, EngineKind, Room, Wanted
from gristmill.errors import BadJob
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


def this_machine(gpus_per_worker: float = 1) -> Room:
    """This machine's capacity: a worker per core, or workers with so many GPUs each, or with a share of one."""
    found, each, sharing = machine.gpus(), max(1, int(gpus_per_worker)), max(1, int(1 / gpus_per_worker + 1e-9))
    if found and each > len(found):
        raise BadJob(f"gpus_per_worker is {each}, but this machine has {len(found)}")
    groups = tuple(",".join(found[at : at + each]) for at in range(0, len(found) - each + 1, each))
    return Room("this machine", machine.cores(), sharing * len(groups), None, groups, sharing, each)

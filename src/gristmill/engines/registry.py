"""Engines by name."""

from __future__ import annotations

from typing import Any

from gristmill.plan.contracts import Room
from gristmill.plan.options import EngineSpec


def open_engine(spec: EngineSpec, workers: int, path: tuple[str, ...] = (), gpu: bool = False) -> Any:
    """The engine that a job names, for `workers` workers that import from `path`; `gpu` says that the model wants one.

    Raises MissingExtra, when run, where its package is missing.
    """
    least = spec.workers[0] if isinstance(spec.workers, tuple) else 1 if spec.workers == "auto" else workers
    if spec.name == "local":
        from gristmill.engines.local import Local

        return Local(workers, path, spec.own().grace)
    if spec.name == "ray":
        from gristmill.engines.ray import Ray

        return Ray(workers, least, path, gpu, spec.own())
    from gristmill.engines.spark import Spark

    return Spark(workers, path, spec.own())


def room(spec: EngineSpec) -> Room | None:
    """What an engine has to place workers on; None for this machine. Raises BadJob where its cluster is not there."""
    if spec.name == "ray":
        from gristmill.engines.ray_cluster import room as cluster

        return cluster(spec.own())
    if spec.name == "spark":
        from gristmill.engines.spark_session import room as slots

        return slots(spec.own())
    return None

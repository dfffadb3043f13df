"""Engines by name."""

from __future__ import annotations

import difflib
from typing import Any

from gristmill.errors import BadJob
from gristmill.plan.contracts import Room
from gristmill.plan.options import EngineSpec

NAMES = ("local", "ray", "spark")


def open_engine(spec: EngineSpec, workers: int, path: tuple[str, ...] = (), gpu: bool = False) -> Any:
    """The engine that a job names, for `workers` workers that import from `path`; `gpu` says that the model wants one.

    Raises BadJob for a name there is none for; MissingExtra, when run, where its package is missing.
    """
    least = spec.workers[0] if isinstance(spec.workers, tuple) else 1 if spec.workers == "auto" else workers
    if spec.name == "local":
        from gristmill.engines.local import Local

        return Local(workers, path, spec.own().grace)
    if spec.name == "ray":
        from gristmill.engines.ray import Ray

        return Ray(workers, least, path, gpu, spec.own())
    if spec.name == "spark":
        from gristmill.engines.spark import Spark

        return Spark(workers, path, spec.own())
    close = difflib.get_close_matches(spec.name, NAMES, 1)
    raise BadJob(
        f"engine {spec.name!r}: there is {', '.join(NAMES)}" + (f"; did you mean {close[0]!r}?" if close else "")
    )


def room(spec: EngineSpec) -> Room | None:
    """What an engine has to place workers on; None for this machine. Raises BadJob where its cluster is not there."""
    if spec.name == "ray":
        from gristmill.engines.ray_cluster import room as cluster

        return cluster(spec.own())
    if spec.name == "spark":
        from gristmill.engines.spark_session import room as slots

        return slots(spec.own())
    return None

"""Gristmill runs a model over every row you have and publishes exactly one outcome for each.

Everything public is imported on first use, so that `import gristmill` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Job": "gristmill.api",
    "embed": "gristmill.api",
    "classify": "gristmill.api",
    "apply": "gristmill.api",
    "run": "gristmill.api",
    "load_job": "gristmill.api",
    "verify": "gristmill.api",
    "status": "gristmill.api",
    "read": "gristmill.api",
    "dead": "gristmill.api",
    "retry_dead": "gristmill.api",
    "source": "gristmill.plan.job",
    "sink": "gristmill.plan.job",
    "Source": "gristmill.plan.job",
    "Sink": "gristmill.plan.job",
    "step": "gristmill.plan.specs",
    "filter": "gristmill.plan.specs",
    "flat_map": "gristmill.plan.specs",
    "model": "gristmill.plan.specs",
    "TextEmbedder": "gristmill.plan.specs",
    "TextClassifier": "gristmill.plan.specs",
    "OnnxModel": "gristmill.plan.specs",
    "TorchScriptModel": "gristmill.plan.specs",
    "SklearnModel": "gristmill.plan.specs",
    "Gates": "gristmill.plan.options",
    "ray": "gristmill.plan.options",
    "Report": "gristmill.observe.report",
    "dynamically": "gristmill.batching.decorator",
    "remote_parallel_map": "gristmill.parallel_map",
    "map": "gristmill.parallel_map",
    "detached": "gristmill.parallel_map",
}
_ERRORS = (
    "BadJob",
    "BadModel",
    "BadOutput",
    "BadSource",
    "BatchFailed",
    "BatcherClosed",
    "CallTimeout",
    "CorruptStore",
    "GateFailed",
    "GristmillError",
    "GristmillWarning",
    "Interrupted",
    "MissingExtra",
    "PlanChanged",
    "QueueFull",
    "RemoteError",
    "RunFailed",
    "SinkBusy",
    "SourceChanged",
    "WorkerLost",
    "WrongOutput",
)  # fmt: skip
_HOME.update(dict.fromkeys(_ERRORS, "gristmill.errors"))
_MODULES = ("aio", "batched", "errors", "inference", "spark")

__all__ = [
    "BadJob",
    "BadModel",
    "BadOutput",
    "BadSource",
    "BatchFailed",
    "BatcherClosed",
    "CallTimeout",
    "CorruptStore",
    "GateFailed",
    "Gates",
    "GristmillError",
    "GristmillWarning",
    "Interrupted",
    "Job",
    "MissingExtra",
    "OnnxModel",
    "PlanChanged",
    "QueueFull",
    "RemoteError",
    "Report",
    "RunFailed",
    "Sink",
    "SinkBusy",
    "SklearnModel",
    "Source",
    "SourceChanged",
    "TextClassifier",
    "TextEmbedder",
    "TorchScriptModel",
    "WorkerLost",
    "WrongOutput",
    "__version__",
    "apply",
    "classify",
    "dead",
    "detached",
    "dynamically",
    "embed",
    "filter",
    "flat_map",
    "load_job",
    "map",
    "model",
    "ray",
    "read",
    "remote_parallel_map",
    "retry_dead",
    "run",
    "sink",
    "source",
    "status",
    "step",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is not None:
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"gristmill.{name}")
    raise AttributeError(f"module 'gristmill' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_HOME, *_MODULES, *globals()])


if TYPE_CHECKING:
    from gristmill.api import Job, apply, classify, dead, embed, load_job, read, retry_dead, run, status, verify
    from gristmill.batching.decorator import dynamically
    from gristmill.errors import (
        BadJob,
        BadModel,
        BadOutput,
        BadSource,
        BatcherClosed,
        BatchFailed,
        CallTimeout,
        CorruptStore,
        GateFailed,
        GristmillError,
        GristmillWarning,
        Interrupted,
        MissingExtra,
        PlanChanged,
        QueueFull,
        RemoteError,
        RunFailed,
        SinkBusy,
        SourceChanged,
        WorkerLost,
        WrongOutput,
    )
    from gristmill.observe.report import Report
    from gristmill.parallel_map import detached, map, remote_parallel_map
    from gristmill.plan.job import Sink, Source, sink, source
    from gristmill.plan.options import Gates, ray
    from gristmill.plan.specs import (
        OnnxModel,
        SklearnModel,
        TextClassifier,
        TextEmbedder,
        TorchScriptModel,
        filter,
        flat_map,
        model,
        step,
    )

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
    "read": "gristmill.commit.publish",
    "dead": "gristmill.commit.publish",
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
}
_ERRORS = (
    "BadJob", "BadModel", "BadOutput", "BadSource", "CorruptStore", "GateFailed", "GristmillError", "Interrupted",
    "MissingExtra", "PlanChanged", "RunFailed", "SinkBusy", "SourceChanged", "WorkerLost",
)  # fmt: skip
_HOME.update(dict.fromkeys(_ERRORS, "gristmill.errors"))
_MODULES = ("aio", "batched", "errors", "inference", "spark")

__all__ = [
    "BadJob",
    "BadModel",
    "BadOutput",
    "BadSource",
    "CorruptStore",
    "GateFailed",
    "Gates",
    "GristmillError",
    "Interrupted",
    "Job",
    "MissingExtra",
    "OnnxModel",
    "PlanChanged",
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
    "__version__",
    "apply",
    "classify",
    "dead",
    "dynamically",
    "embed",
    "filter",
    "flat_map",
    "load_job",
    "model",
    "ray",
    "read",
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
    from gristmill.api import Job, apply, classify, embed, load_job, run, status, verify
    from gristmill.batching.decorator import dynamically
    from gristmill.commit.publish import dead, read
    from gristmill.errors import (
        BadJob,
        BadModel,
        BadOutput,
        BadSource,
        CorruptStore,
        GateFailed,
        GristmillError,
        Interrupted,
        MissingExtra,
        PlanChanged,
        RunFailed,
        SinkBusy,
        SourceChanged,
        WorkerLost,
    )
    from gristmill.observe.report import Report
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

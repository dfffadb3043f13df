"""Gristmill runs a model over every row you have and publishes exactly one outcome for each.

Everything public is imported on first use, so that `import gristmill` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gristmill.process import forks as _forks

__version__ = "0.1.0"

_forks.wait_for_imports()  # before a thread uses a public name

_HOME = {
    "Job": "gristmill.api",
    "embed": "gristmill.api",
    "classify": "gristmill.api",
    "predict": "gristmill.api",
    "prompt": "gristmill.api",
    "run_batch": "gristmill.api",
    "apply": "gristmill.api",
    "run": "gristmill.api",
    "score": "gristmill.api",
    "load_job": "gristmill.api",
    "plan": "gristmill.api",
    "tune": "gristmill.api",
    "schema": "gristmill.api",
    "verify": "gristmill.api",
    "compare": "gristmill.api",
    "diff": "gristmill.api",
    "prove": "gristmill.api",
    "deliver": "gristmill.api",
    "lookup": "gristmill.api",
    "to": "gristmill.job.delivery",
    "Delivery": "gristmill.job.delivery",
    "status": "gristmill.api",
    "read": "gristmill.api",
    "dead": "gristmill.api",
    "reduced": "gristmill.api",
    "retry_dead": "gristmill.api",
    "source": "gristmill.job.job",
    "sink": "gristmill.job.job",
    "Source": "gristmill.job.job",
    "Sink": "gristmill.job.job",
    "step": "gristmill.job.specs",
    "filter": "gristmill.job.specs",
    "flat_map": "gristmill.job.specs",
    "model": "gristmill.job.specs",
    "TextEmbedder": "gristmill.job.specs",
    "TextClassifier": "gristmill.job.specs",
    "Prompt": "gristmill.job.prompts",
    "Requests": "gristmill.job.requests",
    "Score": "gristmill.job.scores",
    "OnnxModel": "gristmill.job.specs",
    "TorchScriptModel": "gristmill.job.specs",
    "SklearnModel": "gristmill.job.specs",
    "Gates": "gristmill.job.options",
    "local": "gristmill.job.options",
    "ray": "gristmill.job.options",
    "Report": "gristmill.observe.report",
    "dynamically": "gristmill.dynamic.decorator",
    "remote_parallel_map": "gristmill.parallel.remote_map",
    "map": "gristmill.parallel.remote_map",
    "detached": "gristmill.parallel.remote_map",
}
_ERRORS = (
    "BadJob",
    "BadKey",
    "BadModel",
    "BadOutput",
    "BadSource",
    "BatchFailed",
    "BatcherClosed",
    "CallTimeout",
    "CorruptStore",
    "DeadlineMissed",
    "GateFailed",
    "GristmillError",
    "GristmillWarning",
    "Interrupted",
    "MissingExtra",
    "NewerFormat",
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
    "BadKey",
    "BadModel",
    "BadOutput",
    "BadSource",
    "BatchFailed",
    "BatcherClosed",
    "CallTimeout",
    "CorruptStore",
    "DeadlineMissed",
    "Delivery",
    "GateFailed",
    "Gates",
    "GristmillError",
    "GristmillWarning",
    "Interrupted",
    "Job",
    "MissingExtra",
    "NewerFormat",
    "OnnxModel",
    "PlanChanged",
    "Prompt",
    "QueueFull",
    "RemoteError",
    "Report",
    "Requests",
    "RunFailed",
    "Score",
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
    "compare",
    "dead",
    "deliver",
    "detached",
    "diff",
    "dynamically",
    "embed",
    "filter",
    "flat_map",
    "load_job",
    "local",
    "lookup",
    "map",
    "model",
    "plan",
    "predict",
    "prompt",
    "prove",
    "ray",
    "read",
    "reduced",
    "remote_parallel_map",
    "retry_dead",
    "run",
    "run_batch",
    "schema",
    "score",
    "sink",
    "source",
    "status",
    "step",
    "to",
    "tune",
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
    from gristmill import aio, batched, errors, inference
    from gristmill.api import (
        Job,
        apply,
        classify,
        compare,
        dead,
        deliver,
        diff,
        embed,
        load_job,
        lookup,
        plan,
        predict,
        prompt,
        prove,
        read,
        retry_dead,
        run,
        run_batch,
        schema,
        score,
        status,
        tune,
        verify,
    )
    from gristmill.dynamic.decorator import dynamically
    from gristmill.errors import (
        BadJob,
        BadKey,
        BadModel,
        BadOutput,
        BadSource,
        BatcherClosed,
        BatchFailed,
        CallTimeout,
        CorruptStore,
        DeadlineMissed,
        GateFailed,
        GristmillError,
        GristmillWarning,
        Interrupted,
        MissingExtra,
        NewerFormat,
        PlanChanged,
        QueueFull,
        RemoteError,
        RunFailed,
        SinkBusy,
        SourceChanged,
        WorkerLost,
        WrongOutput,
    )
    from gristmill.job.delivery import Delivery, to
    from gristmill.job.job import Sink, Source, sink, source
    from gristmill.job.options import Gates, local, ray
    from gristmill.job.prompts import Prompt
    from gristmill.job.requests import Requests
    from gristmill.job.scores import Score
    from gristmill.job.specs import (
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
    from gristmill.observe.report import Report
    from gristmill.parallel.remote_map import detached, map, remote_parallel_map
    from gristmill.spark import CALLABLE

    spark = CALLABLE

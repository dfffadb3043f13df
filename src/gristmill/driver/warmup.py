"""What a run can begin before it is planned: the interpreters of its workers. Imports nothing heavy."""

from __future__ import annotations

import os
import stat
import sys

from gristmill.engines.forkserver import PANDAS
from gristmill.engines.interpreter import MOST, SPARES
from gristmill.job.job import JobSpec, Source
from gristmill.process import machine

# What a worker of any job imports before it opens its model.
IMPORTS = (
    "gristmill.worker.stages",
    "gristmill.worker.pipeline",
    "gristmill.models.kinds",
    "gristmill.models.function",
    "gristmill.models.batchfunction",
    "gristmill.models.outofmemory",
    "gristmill.fingerprint.loadedmodules",  # with what compares code: of all these a worker imports it first
    "gristmill.sources.csv",  # with what other readers of text need, too
    "gristmill.sources.parquet",
    "gristmill.sinks.parquet",
    "pyarrow.parquet",
    "numpy.ma",  # which numpy imports late, for the first of its arrays that pyarrow is given
)
FEW = 2  # workers that each import pandas when they need it; more wait for one import, and share its pages
# Libraries that start no thread when they are imported, and take long: what this process has of them, because a script
# imported it above its model, workers will need, too.
LARGE = ("torch",)
SMALL = 4 << 20  # bytes of input: a function is done with so few before a second worker has started


def start(spec: JobSpec) -> None:
    """Start interpreters for a job, only one if it is small. `SPARES.end` ends those not used."""
    wanted = [*getattr(spec.model, "imports", ()), *(name for name in LARGE if name in sys.modules)]
    # Forks of a process that has a library built for GPUs are untried where there are some.
    ahead = [] if machine.gpus() else list(dict.fromkeys(wanted))
    workers = spec.engine.workers if isinstance(spec.engine.workers, int) else machine.cores()
    several = workers > FEW and not _small(spec.source)
    imports = (*IMPORTS, *([PANDAS] if several else []), *ahead)
    SPARES.start(spec.engine, machine.cores(), imports, most=1 if _small(spec.source) else MOST)


def _small(source: Source) -> bool:
    """Whether all it names are small files of this machine; folders and globs take more than a glance, and are not."""
    if source.data is not None:
        return False
    total = 0
    for uri in source.uri:
        try:
            found = os.stat(uri)
        except (OSError, ValueError):
            return False
        if not stat.S_ISREG(found.st_mode):
            return False
        total += found.st_size
    return total < SMALL

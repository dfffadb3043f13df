"""What an interpreter of a worker is started with: where it imports from, and how many threads its libraries have."""

from __future__ import annotations

import os
import sys


def import_path() -> tuple[str, ...]:
    """Where this process imports from, for those that it starts."""
    return tuple(p or os.getcwd() for p in sys.path)


def thread_variables(count: int) -> dict[str, str]:
    """Variables that tell libraries how many threads to have; most read them when they are loaded."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    return dict.fromkeys(names, str(count))

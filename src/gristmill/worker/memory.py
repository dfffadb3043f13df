"""How much memory this process holds, and where Arrow gets it."""

from __future__ import annotations

import os
import sys


def resident() -> int:
    """Resident bytes; the peak of them where the system tells no more, 0 where it tells nothing."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def use_jemalloc() -> None:
    """Let Arrow allocate with jemalloc in this process, where it was built with it and nobody chose another pool.

    mimalloc, its default, holds on to more where three threads read, score and write, and the more the longer they do
    (tests/running/test_memory.py).
    """
    import pyarrow as pa

    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ and "jemalloc" in pa.supported_memory_backends():
        pa.set_memory_pool(pa.jemalloc_memory_pool())

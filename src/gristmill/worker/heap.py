"""How much memory this process holds, and where Arrow gets it."""

from __future__ import annotations

import os
import sys


def resident() -> int:
    """Resident bytes; their peak if the system tells only that, 0 if it tells nothing."""
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
    """Let Arrow allocate with jemalloc in this process, if it was built with it and nobody chose another pool.

    mimalloc, its default, holds on to more memory when three threads read, score and write, and ever more as they run
    (tests/driver/test_memory.py).
    """
    import pyarrow as pa

    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ and "jemalloc" in pa.supported_memory_backends():
        pa.set_memory_pool(pa.jemalloc_memory_pool())

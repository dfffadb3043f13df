"""How much memory this process holds, where Arrow gets it, and how often garbage is looked for."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys

# New objects after which Python looks for garbage (it says 700), and of these looks, each how many goes deeper. With
# thousands of rows in flight, looking through them took a quarter of a request's time.
GARBAGE = (10_000, 20, 50)
# mallopt(3): from which size arrays are mapped by themselves, at most half of what a thread's heap is made of; and how
# much freed memory at the end of a heap is kept.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
LARGE, FREED = 32 << 20, 64 << 20
_LIMITS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


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


def keep_freed() -> None:
    """Let glibc keep what is freed for what is allocated next, up to some megabytes a thread, unless somebody has set
    its limits. As it comes, it gives arrays of 128 KB and more back at once, and the kernel clears each page anew.
    """
    if any(name in os.environ for name in _LIMITS):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, LARGE)
        mallopt(_TRIM_THRESHOLD, FREED)


def collect_rarely() -> None:
    """Look for garbage less often in this process, where many small objects live for a while and few of them are part
    of a cycle: a model that answers row by row has a task, a request and a reply for each.
    """
    gc.set_threshold(*GARBAGE)

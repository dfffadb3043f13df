"""How much memory this process holds."""

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

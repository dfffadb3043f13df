"""Files and connections that this process may have open: a number that the system limits, and that is shared by all."""

from __future__ import annotations

import contextlib
import os

SPARE = 48  # for files of the result, journals, caches, libraries, beside what is open already
MANY = 65_536  # where a system does not say how many are too many


def room(wanted: int) -> int:
    """How many of so many descriptors may be used beside others; the limit is raised for it as far as this user may."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = _open() + SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted + taken:
        most = max(wanted + taken, MANY) if hard == resource.RLIM_INFINITY else hard
        with contextlib.suppress(OSError, ValueError):  # systems have other limits besides
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else max(0, min(wanted, soft - taken))


def _open() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))
    return SPARE

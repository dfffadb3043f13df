"""Which of the processes below a test are workers, and which are there for the next."""

from __future__ import annotations

import psutil

from gristmill.engines.forkserver import NAME


def is_kept(process: psutil.Process) -> bool:
    """Whether it is there for the next test, or gone: a fork server, one of multiprocessing's trackers."""
    try:
        return process.name() == NAME or "resource_tracker" in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return True


def is_worker(process: psutil.Process) -> bool:
    """Whether it is a worker that has not ended: a fork of a fork server, or a fresh interpreter."""
    try:
        forked = process.name() == "gristmill-work"
        return (forked or "engines.serving" in " ".join(process.cmdline())) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False

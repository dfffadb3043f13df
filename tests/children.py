"""Which of the processes below a test are workers, and which are there for the next."""

from __future__ import annotations

import contextlib
import glob
import os

import psutil

from gristmill.engines.forkserver import NAME


def below() -> list[psutil.Process]:
    """The processes below this one. The kernel lists them, where it can: psutil reads what the whole machine runs,
    which took a third of the time of a small test.
    """
    if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
        return psutil.Process().children(recursive=True)
    found: list[psutil.Process] = []
    waiting = [os.getpid()]
    while waiting:
        for child in _children(waiting.pop()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(child))
                waiting.append(child)
    return found


def _children(pid: int) -> set[int]:
    """Those of all its threads. Read twice, since one that ends meanwhile may hide the one after it."""
    found: set[int] = set()
    for _ in range(2):
        for path in glob.glob(f"/proc/{pid}/task/*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(path, encoding="ascii") as listed:
                found.update(map(int, listed.read().split()))
    return found


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs: neither gone, also while this looks, nor waiting for its parent to hear of its end."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
        return (forked or "engines.serving" in " ".join(process.cmdline())) and is_alive(process)
    except psutil.Error:
        return False

"""Forks by the user's program. While another thread imports something: Python frees the import system's own lock in the
child, but not those of single modules, for which the child would wait for ever. A job in a thread imports much in its
first moments. And while something is open that has threads: the child lacks them, and whatever it destroys waits for
them, or crashes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST = 10.0  # seconds: an import that takes longer is itself waiting for something
# What jobs import. A module of the user's may run a whole service while it is imported.
_WAITED_FOR = frozenset(
    ["gristmill", "numpy", "pyarrow", "pandas", "polars", "duckdb", "torch", "transformers", "tokenizers",
     "onnxruntime", "sklearn", "scipy", "pydantic", "cloudpickle", "ray", "pyspark"]
)  # fmt: skip


def wait_for_imports() -> None:
    """From now on, a fork waits for a while until no other thread is in the middle of an import."""
    # The hook registered last runs first: logging's holds a lock that imports need, and that
    # of the standard library's pools one, too. Registered while a fork waits, they
    # would be run only after it, and release a lock that they had not taken.
    import logging  # noqa: F401

    with contextlib.suppress(RuntimeError):  # the main thread has ended, which only libraries that need it must tell
        import concurrent.futures.thread  # noqa: F401

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_settle)


def _settle() -> None:
    deadline = time.monotonic() + LONGEST
    while (_imported_elsewhere() or _first_tempfile()) and time.monotonic() < deadline:
        time.sleep(0.002)


def _imported_elsewhere() -> bool:
    """Whether another thread is importing: from CPython's table of module locks, by name, as weak references (3.10 to
    3.14).
    """
    table = getattr(sys.modules["_frozen_importlib"], "_module_locks", {})
    locks = [lock() for name, lock in list(table.items()) if name.partition(".")[0] in _WAITED_FOR]
    me = threading.get_ident()
    return any(getattr(lock, "owner", None) not in (None, me) for lock in locks)


def _first_tempfile() -> bool:
    """Whether another thread is looking for the folder of temporary files, under a lock that a fork would inherit."""
    lock = getattr(sys.modules.get("tempfile"), "_once_lock", None)
    return lock is not None and lock.locked()


def left_in_forks(opened: T) -> T:
    """The same object, which has threads of its own: a fork never destroys it, also if it is garbage there."""
    _threaded.add(weakref.ref(opened, _threaded.discard))
    return opened


def never_destroyed(kept: Any) -> None:
    """Keep an object in this process for good. What modules hold would be destroyed when the interpreter exits."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


_threaded: set[weakref.ref[Any]] = set()
_at_hand: dict[int, list[Any]] = {}  # by the thread that forks


def _hold() -> None:
    """From before a fork: in the child, the garbage collector may run before any of these functions."""
    if found := [opened for ref in list(_threaded) if (opened := ref()) is not None]:
        _at_hand[threading.get_ident()] = found


def _let_go() -> None:
    _at_hand.pop(threading.get_ident(), None)


def _leave_all() -> None:
    for found in _at_hand.values():
        never_destroyed(found)
    _at_hand.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_leave_all)

"""Forks by the user's program while another thread imports something: Python frees the import system's own lock in the
child, but not those of single modules, for which the child would wait for ever. A job in a thread imports much in its
first moments.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

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

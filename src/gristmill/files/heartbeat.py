"""The lease of a sink in an object store: an object that its holder replaces every few seconds. It is a courtesy, as
lease.py says: safety never rests on it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gristmill.errors import SinkBusy
from gristmill.files.disk import join
from gristmill.files.lease import Holder, myself, named, told

BEAT = 10.0  # seconds between two beats: one request each
STALE = 60.0  # design §7: a lease that has not moved for this long, by the watcher's own clock
LOOK = 2.0  # seconds between two looks at a lease
_HELD: set[str] = set()  # the nonces of the leases that this process holds
HASTE = 1.0  # seconds that a look, or each step of leaving in haste, may take, at worst twice that: it also goes stale


class ObjectLease:
    """Holds the object `lease.json` while the run lives, and sends the run's progress notes along."""

    def __init__(self, files: Any, sink: str, folder: str, tell: Callable[[str], None]) -> None:
        self._files, self._sink, self._tell = files, sink, tell
        self._beating, self._quick = files.hasty(BEAT), files.hasty(HASTE)
        self._path = join(folder, "lease.json")
        self._nonce = secrets.token_hex(6)
        self._about = replace(myself(), machine=_machine(), began=_stat(os.getpid())[1], nonce=self._nonce)
        self._beats = itertools.count()
        self._notes: dict[str, bytes] = {}
        self._over = threading.Event()
        self._lost = False
        self._looked = 0.0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ObjectLease:
        """Take the lease: at once if it is free or its holder was on this machine and is gone, otherwise when it has
        not moved for a minute. Raises SinkBusy if it moves.
        """
        _HELD.add(self._nonce)
        try:
            if not self._files.write_new(self._path, self._body()):
                self._take_over()
        except BaseException:
            _HELD.discard(self._nonce)
            raise
        self._thread = threading.Thread(target=self._beat, name="gristmill-lease", daemon=True)
        self._thread.start()
        return self

    def _take_over(self) -> None:
        first: Any = None
        since = time.monotonic()
        while True:
            try:
                data, version = self._files.look(self._path)
            except FileNotFoundError:
                if self._files.write_new(self._path, self._body()):
                    return
                continue
            about = told(data)
            if _gone(about) or time.monotonic() - since > STALE:
                if self._files.swap(self._path, self._body(), version):
                    return
                since, first = time.monotonic(), None
                continue
            running = _alive(about) and _age(version) < STALE
            if first is None and not running:
                first = version
                self._tell(f"{named(about)} may hold this sink: checking whether it is alive, for up to a minute")
            elif running or version["e_tag"] != first["e_tag"]:
                raise SinkBusy(f"{self._sink}: another run holds this sink ({named(about)}): wait for it or stop it")
            time.sleep(LOOK)

    def __exit__(self, *how: object) -> None:
        self._over.set()
        _HELD.discard(self._nonce)  # not held even if the store is unavailable and it cannot be removed
        if self._thread is not None:
            self._thread.join(HASTE)
        files = self._beating if how[0] is None else self._quick
        with contextlib.suppress(OSError):
            if self._seen(files) is not None:
                self._send(files)
                files.remove(self._path)

    def held(self) -> bool:
        """By a look at the object: another run that has begun has replaced or removed it."""
        if not self._lost and clock() - self._looked > LOOK:
            with contextlib.suppress(OSError):
                self._seen(self._quick)
            self._looked = clock()
        return not self._lost

    def _seen(self, files: Any) -> Any:
        """The version of the lease; None once it is no longer ours, and then forever. Raises OSError."""
        if not self._lost:
            try:
                data, version = files.look(self._path)
                self._lost = told(data).nonce != self._nonce
            except FileNotFoundError:
                self._lost = True
            self._looked = clock()
        return None if self._lost else version

    def say(self, path: str, data: bytes) -> None:
        """Goes with the next beat."""
        self._notes[path] = data

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with contextlib.suppress(OSError):  # a store that does not answer is noticed where it matters
                if (version := self._seen(self._beating)) is None:
                    return
                self._beating.swap(self._path, self._body(), version)
                self._send(self._beating)

    def _send(self, files: Any) -> None:
        notes, self._notes = self._notes, {}
        for path, data in list(notes.items()):
            files.note(path, data)

    def _body(self) -> bytes:
        return replace(self._about, beat=next(self._beats)).dump()


def beating(files: Any, folder: str) -> Holder | None:
    """Who holds the lease, for callers that only look: by its process if on this machine, else by the object's age."""
    try:
        data, version = files.look(join(folder, "lease.json"))
    except FileNotFoundError:
        return None
    about = told(data)
    if _gone(about):
        return None
    return about if _age(version) < (10 if _alive(about) else 1) * STALE else None  # clocks may differ


def _age(version: Any) -> float:
    """Seconds since the lease has moved, if the clocks of this machine and the store agree."""
    return float(time.time() - version["last_modified"].timestamp())


def clock() -> float:
    """Seconds that also count while this machine sleeps, if the system provides them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _machine() -> str:
    """What identifies a kernel and its process-number namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _mine(about: Holder) -> bool:
    return bool(about.machine) and about.machine == _machine()


def _gone(about: Holder) -> bool:
    """Whether the run is certainly over: its process has ended, or is this one, which knows what it holds."""
    return _mine(about) and (not _runs(about) or (about.pid == os.getpid() and about.nonce not in _HELD))


def _alive(about: Holder) -> bool:
    return _mine(about) and _runs(about)


def _runs(about: Holder) -> bool:
    """Whether that very process runs: its number may belong to another by now; in a restarted container, even to the
    process that asks.
    """
    pid = about.pid
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    state, began = _stat(pid)
    return state != "Z" and began in (None, about.began)


def _stat(pid: int) -> tuple[str, int | None]:
    """The state of a process of this machine, and its start time in ticks since boot; None if we may not know that."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            told = file.read().rpartition(")")[2].split()
    except OSError:
        return "?", None
    return told[0], int(told[19])

"""Open incidents, so that each is told once, however many runs it lasts and whatever is killed meanwhile.

An incident is a job and a kind, from when it is first raised until a run in which it is not. It is stored before
anybody is told, and who was told is stored at once after; so one that was cut off between the two is told again, under
the same id, and none is forgotten.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gristmill.errors import CorruptStore
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL
from gristmill.files.document import Document
from gristmill.process.locks import LockFile


@dataclass(frozen=True)
class Open:
    """An incident. Times are seconds since 1970; `told` are those who know of it, `eased` those who know that it is
    over; `over` is when it was seen to be, None while it lasts.
    """

    id: str
    job: str
    kind: str
    text: str
    since: float
    told: tuple[str, ...] = ()
    eased: tuple[str, ...] = ()
    over: float | None = None


@dataclass(frozen=True)
class Incidents(Document, what="note of incidents", sealed=False):
    """`incidents.json`: the incidents that are open, or over and not told to everybody who knew of them."""

    incidents: tuple[Open, ...] = field(default=())


class Book:
    """The incidents of one job in a file of `files`. If `folder` (the sink's) is not there, which a job that cannot
    even be planned must not make, they are in `instead`, on this machine. A `shared` file is locked, as other jobs
    write to it.
    """

    def __init__(
        self, job: str, path: str, files: Files = LOCAL, *, folder: str = "", instead: str = "", shared: bool = False
    ) -> None:
        self.job = job
        self._path, self._files, self._folder, self._instead, self._shared = path, files, folder, instead, shared
        self._lock = threading.Lock()

    def raised(self, kind: str, text: str) -> Open:
        """Open an incident, or find the one that is open. One that was over, and not told to be, goes on."""
        with self._changing() as change:
            known = next((one for one in change.all if (one.job, one.kind) == (self.job, kind)), None)
            if known is None:
                known = Open(uuid.uuid4().hex[:12], self.job, kind, text, time.time())
            elif known.over is not None:
                known = replace(known, over=None, text=text, eased=())
            return change.put(known)

    def over(self, lasting: frozenset[str]) -> None:
        """A run ended well: incidents of this job that are none of these kinds are over."""
        with self._changing() as change:
            for one in change.all:
                if one.job == self.job and one.kind not in lasting and one.over is None:
                    change.put(replace(one, over=time.time()))

    def told(self, incident: Open, who: str, all_who: frozenset[str]) -> None:
        """Someone was told of it, or, once it is over, that it is; it is dropped if nobody of `all_who` is left."""
        with self._changing() as change:
            now = next((one for one in change.all if one.id == incident.id), None)
            if now is None:
                return
            now = replace(now, eased=(*now.eased, who)) if incident.over is not None else _knows(now, who)
            change.put(now)
            change.sweep(self.job, all_who)

    def swept(self, all_who: frozenset[str]) -> None:
        """Drop what is over and was told to everybody who is to know."""
        with self._changing() as change:
            change.sweep(self.job, all_who)

    def mine(self) -> list[Open]:
        """The incidents of this job, oldest first."""
        with self._lock:
            return sorted((one for one in self._read() if one.job == self.job), key=lambda one: one.since)

    # ---------------------------------------------------------------- the file

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Change]:
        with self._lock, self._alone():
            before = self._read()
            change = _Change({one.id: one for one in before})
            yield change
            if change.all != before:
                self._write(change.all)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._shared:
            yield
            return
        with LockFile(f"{self._path}.lock", "a") as file:
            file.lock(wait=True)
            yield

    def _read(self) -> list[Open]:
        found: dict[str, Open] = {}
        for path, files in ((self._instead, LOCAL), (self._path, self._files)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, CorruptStore):
                if path:
                    found.update({one.id: one for one in Incidents.load_from(path, files).incidents})
        return list(found.values())

    def _write(self, incidents: list[Open]) -> None:
        data = Incidents(tuple(incidents)).dump()
        if self._folder and not self._files.holds(self._folder):
            os.makedirs(os.path.dirname(self._instead), exist_ok=True)
            LOCAL.write_over(self._instead, data)
            return
        self._files.write_over(self._path, data)
        if self._instead:
            LOCAL.remove(self._instead)


class _Change:
    def __init__(self, by_id: dict[str, Open]) -> None:
        self._by_id = by_id

    @property
    def all(self) -> list[Open]:
        return list(self._by_id.values())

    def put(self, one: Open) -> Open:
        self._by_id[one.id] = one
        return one

    def sweep(self, job: str, all_who: frozenset[str]) -> None:
        """Forget incidents that are over and that nobody is left to be told of: `all_who` are those told recoveries."""
        for one in self.all:
            if one.job == job and one.over is not None and not (set(one.told) & all_who) - set(one.eased):
                del self._by_id[one.id]


def _knows(one: Open, who: str) -> Open:
    return one if who in one.told else replace(one, told=(*one.told, who))

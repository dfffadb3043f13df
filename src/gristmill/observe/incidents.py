"""Open incidents, so that each is told once, however many runs it lasts and whatever is killed meanwhile.

An incident is a job and a kind, from when it is first raised until a run in which it is not. It is told again, under
the same id, once a run shows something of it that is new, or much worse. It is stored before anybody is told, and who
was told is stored at once after; so one that was cut off between the two is told again, and none is forgotten.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any, TypeVar

from gristmill.errors import CorruptStore
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL
from gristmill.files.document import Document
from gristmill.observe.teller import Sign
from gristmill.values import dataclass

T = TypeVar("T")
MOST_TRIES = 500  # of a change; each fails only because somebody else's did not
WORSE = 10  # times as much as when it was told: it is told again


@dataclass(frozen=True)
class Open:
    """An incident. Times are seconds since 1970; `told` are those who know of it as it is, `eased` those who know that
    it is over; `over` is when it was seen to be, None while it lasts. `what` and `text` are of the last run that showed
    a sign of it, which is `run`; `size` is how much of it there was when it was first told, or told again, which it was
    `changes` times; `earlier` are those who knew of it before that.
    """

    id: str
    job: str
    kind: str
    text: str
    since: float
    told: tuple[str, ...] = ()
    eased: tuple[str, ...] = ()
    over: float | None = None
    what: tuple[str, ...] = ()
    size: int = 0
    run: str = ""
    changes: int = 0
    earlier: tuple[str, ...] = ()

    @property
    def known(self) -> frozenset[str]:
        """Those who know of it, if only as it was."""
        return frozenset((*self.told, *self.earlier))

    def shown(self, sign: Sign, run: str) -> Open:
        """After one more sign of it. If that shows something new, or far more, nobody knows of it as it is now."""
        now = replace(self, text=sign.text, what=sign.what, run=run)
        now = now if self.over is None else replace(now, over=None, eased=())
        if set(sign.what) <= set(self.what) and sign.size < WORSE * max(1, self.size):
            return now
        size, known = max(sign.size, self.size), tuple(sorted(self.known))
        return replace(now, size=size, changes=self.changes + 1, told=(), earlier=known)


@dataclass(frozen=True)
class Incidents(Document, what="note of incidents", sealed=False):
    """`incidents.json`: the incidents that are open, or over and not told to everybody who knew of them."""

    incidents: tuple[Open, ...] = field(default=())


class Book:
    """The incidents of one job in a file of `files`, to which other jobs and runs may write at the same time: each
    change is made to what the file holds then. If `folder` (the sink's) is not there, which a job that cannot even be
    planned must not make, they are in `instead`, on this machine.
    """

    def __init__(self, job: str, path: str, files: Files = LOCAL, *, folder: str = "", instead: str = "") -> None:
        self.job = job
        self._path, self._files, self._folder, self._instead = path, files, folder, instead
        self._lock = threading.Lock()

    def raised(self, sign: Sign, run: str = "") -> Open:
        """Open an incident, or find the one that is open, as it is after this sign of it. One that was over, and not
        told to be, goes on.
        """
        what, size = sign.what, sign.size
        new = Open(uuid.uuid4().hex[:12], self.job, sign.kind, sign.text, time.time(), what=what, size=size, run=run)

        def change(now: _Change) -> Open:
            known = next((one for one in now.all if (one.job, one.kind) == (self.job, sign.kind)), None)
            return now.put(new if known is None else known.shown(sign, run))

        return self._changed(change)

    def over(self, lasting: frozenset[str]) -> None:
        """A run ended well: incidents of this job that are none of these kinds are over."""
        at = time.time()

        def change(now: _Change) -> None:
            for one in now.all:
                if one.job == self.job and one.kind not in lasting and one.over is None:
                    now.put(replace(one, over=at))

        self._changed(change)

    def told(self, incident: Open, who: str, all_who: frozenset[str]) -> None:
        """Someone was told of it, or, once it is over, that it is; it is dropped if nobody of `all_who` is left."""

        def change(now: _Change) -> None:
            known = next((one for one in now.all if one.id == incident.id), None)
            if known is not None:
                now.put(replace(known, eased=(*known.eased, who)) if incident.over is not None else _knows(known, who))
                now.sweep(self.job, all_who)

        self._changed(change)

    def swept(self, all_who: frozenset[str]) -> None:
        """Drop what is over and was told to everybody who is to know."""
        self._changed(lambda now: now.sweep(self.job, all_who))

    def mine(self) -> list[Open]:
        """The incidents of this job, oldest first."""
        with self._lock:
            return sorted((one for one in self._read()[0] if one.job == self.job), key=lambda one: one.since)

    # ---------------------------------------------------------------- the file

    def _changed(self, change: Callable[[_Change], T]) -> T:
        """What a change returns, once it is stored. It is made anew if somebody else was quicker. Raises OSError."""
        with self._lock:
            for _ in range(MOST_TRIES):
                before, looked = self._read()
                now = _Change({one.id: one for one in before})
                found = change(now)
                if now.all == before or self._written(now.all, looked):
                    return found
                time.sleep(random.uniform(0.002, 0.02))
        raise OSError(f"{self._path}: others write to it all the time")

    def _read(self) -> tuple[list[Open], Mapping[str, Any] | None]:
        """All incidents, and the version of the file that they are in; None if it is not there."""
        found: dict[str, Open] = {}
        looked = None
        for path, files in ((self._instead, LOCAL), (self._path, self._files)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, CorruptStore):
                if path:
                    data, version = files.look(path)
                    looked = version if path == self._path else None
                    found.update({one.id: one for one in Incidents.load(data, path).incidents})
        return list(found.values()), looked

    def _written(self, incidents: list[Open], looked: Mapping[str, Any] | None) -> bool:
        """Store them, unless the file is another by now; whether they were stored."""
        data = Incidents(tuple(incidents)).dump()
        if self._folder and not self._files.holds(self._folder):
            os.makedirs(os.path.dirname(self._instead), exist_ok=True)
            LOCAL.write_over(self._instead, data)
            return True
        try:
            new = looked is None
            done = self._files.write_new(self._path, data) if new else self._files.swap(self._path, data, looked or {})
        except FileNotFoundError:  # removed since it was looked at
            return False
        if done and self._instead:
            LOCAL.remove(self._instead)
        return done


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
            if one.job == job and one.over is not None and not (one.known & all_who) - set(one.eased):
                del self._by_id[one.id]


def _knows(one: Open, who: str) -> Open:
    return one if who in one.told else replace(one, told=(*one.told, who))

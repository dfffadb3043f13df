"""What is in an archive, tar or zip: as on the disk that it was made of, or would be unpacked to."""

from __future__ import annotations

import errno
import io
import os
import posixpath
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gristmill.errors import BadSource, SourceChanged
from gristmill.process.forks import never_destroyed
from gristmill.sources.listing import SECOND, Entry, Listing, LocalListing, Names, is_young
from gristmill.sources.members import AHEAD, DAMAGE, Member, Members, below
from gristmill.values import dataclass

KINDS = ("tar", "zip")
_OFTEN = 1.0  # seconds for which what a store said of the archive is believed, if nothing was read since


@dataclass(frozen=True)
class _Seen:
    """What is in the archive while that is `own`. `settled`: it cannot have been written again in the same second."""

    own: Entry
    members: Members
    settled: bool


class Archive:
    """A listing of an archive that another one has at `path`; `shown` is what addresses of its members end in. A member
    changes when the archive does, as another one may give it the same size and time; once it has, nothing that was
    found in it counts. One that is compressed as a whole is unpacked once in each process. Raises BadSource if it is
    cut or damaged, SourceChanged if that is so because it is being written. `known` is the archive when it was listed.
    """

    def __init__(self, kind: str, outer: Listing, path: str, shown: str, known: Entry | None = None) -> None:
        self.kind, self.outer, self.path, self.shown = kind, outer, path, shown
        self._known = known
        self._said: Entry | None = None  # what its outer listing said last
        self._asked = self._read = -_OFTEN  # when that was asked, and when the archive was last read
        self._first: tuple[int, str, float] = (0, "", 0.0)  # the size and stamp it has, and since when that is known
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._turn = threading.RLock()  # all members are read through one file, which has one position
        self._seen: _Seen | None = None

    def leave(self) -> None:
        """In a fork, which shares the open file and its position with its parent: forget it."""
        never_destroyed(self._seen)
        self._begin()

    def __reduce__(self) -> Any:
        return Archive, (self.kind, self.outer, self.path, self.shown, self._known)

    def look(self, path: str) -> Entry | None:
        seen = self._now()
        return None if seen is None else self._entry(seen, path)

    def entries(self, folder: str, wanted: Names) -> list[Entry]:
        seen = self._now()
        return [] if seen is None else self._entries(seen, folder, wanted)

    def tree(self, folder: str, skip: Names) -> Iterator[tuple[str, Entry]]:
        seen = self._now()
        return iter(()) if seen is None else self._tree(seen, folder, skip, ())

    def _entries(self, seen: _Seen, folder: str, wanted: Names) -> list[Entry]:
        _, inside = seen.members.at(folder)
        names = inside if isinstance(inside, dict) else ()
        return [self._there(seen, below(folder, name)) for name in names if wanted(name)]

    def _tree(self, seen: _Seen, folder: str, skip: Names, above: tuple[str, ...]) -> Iterator[tuple[str, Entry]]:
        real = seen.members.followed(folder)
        if real is None or real in above:  # through a link, to a folder above it: a loop
            return
        for entry in self._entries(seen, folder, lambda name: not skip(name)):
            path = below(folder, entry.name)
            if entry.folder:
                yield from self._tree(seen, path, skip, (*above, real))
            else:
                yield path, entry

    def open(self, path: str) -> Any:
        import pyarrow as pa

        with self._turn:
            seen = self._now()
            found = None if seen is None else seen.members.at(path)[1]
            if seen is None or not isinstance(found, Member):
                raise FileNotFoundError(path)
            with self._undamaged(path, seen.own):
                content = seen.members.open(found)
            self._read = time.monotonic()
        return pa.PythonFile(io.BufferedReader(_InTurn(content, self, path, seen.own), 1 << 16), mode="r")

    def public(self, path: str) -> str:
        """The address of a member."""
        return f"{self.kind}://{path}{self.shown}"

    def origin(self) -> tuple[str, str, int]:
        """Which archive it is: the same for all names of it; where it really is, in place of `shown`; and the number of
        its hard links.
        """
        own = self._known
        if own is not None and isinstance(self.outer, LocalListing):
            real = f"::{os.path.realpath(self.path)}"
            return own.inode or real, real, own.links
        if own is not None and isinstance(self.outer, Archive):
            key, real, links = self.outer.origin()
            scheme = f"::{self.outer.kind}://"
            return f"{scheme}{own.inode}::{key}", f"{scheme}{own.real or self.path}{real}", max(links, own.links)
        return self.shown, self.shown, 1

    def _entry(self, seen: _Seen, path: str) -> Entry | None:
        real, found = seen.members.at(path)
        if found is None:
            return None
        if isinstance(found, dict):
            return Entry(posixpath.basename(path), True)
        if found.raw is None:
            raise BadSource(
                f"{self.public(path)}: not a file or folder but a pipe or device: copy its content to a file"
            )
        own, links = seen.own, seen.members.links(found)
        stamp = f"{found.stamp}@{own.size}:{own.stamp}"
        name, real = posixpath.basename(path), real if real != path else ""
        return Entry(name, False, found.size, stamp, own.touched, str(found.place), links, real)

    def _there(self, seen: _Seen, path: str) -> Entry:
        found = self._entry(seen, path)
        if found is None:
            raise BadSource(f"{self.public(path)}: a link that leads to nothing in the archive")
        return found

    # ------------------------------------------------ what the archive says

    def _now(self) -> _Seen | None:
        """What is in the archive as it is now; None if it is gone since it was listed."""
        with self._turn:
            own = self._own()
            if own is None or own.folder:
                if self._known is None:
                    raise BadSource(f"{self._name()}: no such archive")
                return None
            if self._seen is not None and self._stands(self._seen, own):
                self._seen = replace(self._seen, own=own)
                return self._seen
            try:
                self._seen = self._listed(own)
            except BadSource as e:
                if self._known is not None and not _same(self._known, own):
                    raise SourceChanged(f"{self._name()}: was written since it was listed: {e}") from e
                raise
            self._known = own
            return self._seen

    def _own(self) -> Entry | None:
        """The archive itself, as it is after all that was read of it."""
        own, now = self._said, time.monotonic()
        early = own is not None and is_young(own.touched) and self._asked - self._first[2] < SECOND
        near = isinstance(self.outer, LocalListing | Archive)
        if near or own is None or early or self._read >= self._asked or now - self._asked > _OFTEN:
            own = self._said = self.outer.look(self.path)
            self._asked = now
        if own is not None and (own.size, own.stamp) != self._first[:2]:
            self._first = own.size, own.stamp, self._asked
        return own

    def _stands(self, seen: _Seen, own: Entry) -> bool:
        if not is_young(own.touched) and not is_young(seen.own.touched):
            return _same(seen.own, own)
        late = not is_young(own.touched) or self._asked - self._first[2] >= SECOND
        return _same(seen.own, own) and (seen.settled or not late)

    def _listed(self, own: Entry) -> _Seen:
        settled = not is_young(own.touched) or time.monotonic() - self._first[2] >= SECOND
        with self._undamaged("", own):
            members = Members(self.kind, self._file(), self.public)
        self._refuse_written(own)
        return _Seen(own, members, settled)

    def _refuse_written(self, own: Entry, path: str = "") -> None:
        now = self.outer.look(self.path)
        if now is None or not _same(now, own):
            raise SourceChanged(f"{self._name(path)}: was written while it was read")

    @contextmanager
    def _undamaged(self, path: str, own: Entry) -> Iterator[None]:
        try:
            yield
        except (*DAMAGE, OSError) as e:
            # Of the archive's numbers: a place before its beginning, or what a library says of its content.
            if isinstance(e, OSError) and (type(e) is not OSError or e.errno not in (None, errno.EINVAL)):
                raise
            self._refuse_written(own, path)
            cause = " ".join(str(e).split()) or type(e).__name__
            raise BadSource(f"{self._name(path)}: is cut or damaged, or no {self.kind} archive: {cause}") from e

    def _name(self, path: str = "") -> str:
        return self.public(path) if path else self.shown.removeprefix("::")

    def _file(self) -> Any:
        if isinstance(self.outer, LocalListing):
            return open(self.path, "rb")
        return io.BufferedReader(_Raw(self.outer.open(self.path)), AHEAD)


class _Raw(io.RawIOBase):
    """A file of pyarrow as one of Python's."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._native.seek(offset, whence))

    def tell(self) -> int:
        return int(self._native.tell())

    def readinto(self, into: Any) -> int:
        data = self._native.read(len(into))
        into[: len(data)] = data
        return len(data)


class _InTurn(_Raw):
    """A member of an archive while that is `own`, of which others wait to be read through the same file."""

    def __init__(self, content: Any, archive: Archive, path: str, own: Entry) -> None:
        super().__init__(content)
        self._archive, self._path, self._own, self._turn = archive, path, own, archive._turn

    def seek(self, offset: int, whence: int = 0) -> int:
        with self._turn, self._archive._undamaged(self._path, self._own):
            return super().seek(offset, whence)

    def readinto(self, into: Any) -> int:
        with self._turn, self._archive._undamaged(self._path, self._own):
            try:
                return super().readinto(into)
            finally:
                self._archive._read = time.monotonic()


def _same(one: Entry, other: Entry) -> bool:
    """Whether an archive is as it was, as far as such entries tell."""
    young = is_young(one.touched) or is_young(other.touched)
    return (one.size, one.stamp) == (other.size, other.stamp) and (young or one.touched == other.touched)


def _leave_all() -> None:
    for archive in list(_all):
        archive.leave()


_all: weakref.WeakSet[Archive] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)

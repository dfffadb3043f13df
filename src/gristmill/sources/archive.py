"""What is in an archive, tar or zip: as on the disk that it was made of, or would be unpacked to."""

from __future__ import annotations

import io
import posixpath
import shutil
import stat
import tarfile
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gristmill.errors import BadSource, SourceChanged
from gristmill.sources.listing import Entry, Listing, LocalListing, Names
from gristmill.values import dataclass

KINDS = ("tar", "zip")
_FOLLOWED = 40  # links, one after the other, as Linux does
_AHEAD = 1 << 20  # bytes of an archive in a store that are read at once
_HELD = 64 << 20  # bytes of a member of a zip that are unpacked in memory, not to a file
_OFTEN = 1.0  # seconds for which what a store said of the archive is believed
_BLOCK = 512  # bytes of a tar, as POSIX has it: at its end there are some that are zeros
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


@dataclass(frozen=True)
class Member:
    """A file of an archive, or a link: `to` where a symbolic one leads. Names of one file have one `place`; `raw` is
    what the library knows it by.
    """

    size: int
    stamp: str
    place: int
    to: str | None
    raw: Any


class Archive:
    """A listing of an archive that another one has at `path`; `shown` is what addresses of its members end in. `./a`
    and `/a` are `a` there, of two members of one name the last counts, and links lead where they do on a disk. A member
    changes when the archive does, as another one may give it the same size and time. One that is compressed as a whole
    is unpacked once in each process. Raises BadSource if it is cut or damaged.
    """

    def __init__(self, kind: str, outer: Listing, path: str, shown: str) -> None:
        self.kind, self.outer, self.path, self.shown = kind, outer, path, shown
        self._found: dict[str, Member | dict[str, None]] = {}  # a folder is a dict of the names in it
        self._turn = threading.RLock()  # all members are read through one file, which has one position
        self._library: Any = None
        self._own: Entry | None = None
        self._asked = 0.0
        self._hard: dict[int, int] = {}  # by the place of a member the number of hard links to it

    def __reduce__(self) -> Any:
        return Archive, (self.kind, self.outer, self.path, self.shown)

    def look(self, path: str) -> Entry | None:
        members = self._members()
        if isinstance(self.outer, LocalListing | Archive) or time.monotonic() - self._asked > _OFTEN:
            self._own, self._asked = self.outer.look(self.path), time.monotonic()
        return None if self._own is None else self._entry(members, path, self._own)

    def entries(self, folder: str, wanted: Names) -> list[Entry]:
        members, real = self._members(), self._followed(folder)
        inside = None if real is None else members.get(real)
        names = inside if isinstance(inside, dict) else ()
        return [self._there(members, _below(folder, name)) for name in names if wanted(name)]

    def tree(self, folder: str, skip: Names) -> Iterator[tuple[str, Entry]]:
        return self._tree(folder, skip, ())

    def _tree(self, folder: str, skip: Names, above: tuple[str, ...]) -> Iterator[tuple[str, Entry]]:
        real = self._followed(folder)
        if real is None or real in above:  # through a link, to a folder above it: a loop
            return
        for entry in self.entries(folder, lambda name: not skip(name)):
            path = _below(folder, entry.name)
            if entry.folder:
                yield from self._tree(path, skip, (*above, real))
            else:
                yield path, entry

    def open(self, path: str) -> Any:
        import pyarrow as pa

        members, real = self._members(), self._followed(path)
        found = None if real is None else members.get(real)
        if not isinstance(found, Member):
            raise FileNotFoundError(path)
        with self._turn, self._undamaged(path):
            content = self._library.extractfile(found.raw) if self.kind == "tar" else self._unpacked(found)
        return pa.PythonFile(io.BufferedReader(_InTurn(content, self, path), 1 << 16), mode="r")

    def public(self, path: str) -> str:
        """The address of a member."""
        return f"{self.kind}://{path}{self.shown}"

    def _entry(self, members: dict[str, Any], path: str, own: Entry) -> Entry | None:
        real = self._followed(path)
        found = None if real is None else members.get(real)
        if real is None or found is None:
            return None
        if isinstance(found, dict):
            return Entry(posixpath.basename(path), True)
        if found.raw is None:
            raise BadSource(
                f"{self.public(path)}: not a file or folder but a pipe or device: copy its content to a file"
            )
        stamp, links = f"{found.stamp}@{own.size}:{own.stamp}", 1 + self._hard.get(found.place, 0)
        name, real = posixpath.basename(path), real if real != path else ""
        return Entry(name, False, found.size, stamp, own.touched, str(found.place), links, real)

    def _there(self, members: dict[str, Any], path: str) -> Entry:
        assert self._own is not None
        found = self._entry(members, path, self._own)
        if found is None:
            raise BadSource(f"{self.public(path)}: a link that leads to nothing in the archive")
        return found

    def _followed(self, path: str) -> str | None:
        """The member that a path leads to, through links; None if they lead nowhere, or out of the archive."""
        members, left, at, links = self._members(), path.strip("/").split("/"), "", 0
        while left:
            name = left.pop(0)
            if name in ("", "."):
                continue
            if name == "..":
                if not at:
                    return None
                at = posixpath.dirname(at)
                continue
            found = members.get(_below(at, name))
            if isinstance(found, Member) and found.to is not None:
                links += 1
                if found.to.startswith("/") or links > _FOLLOWED:
                    return None
                left = [*found.to.split("/"), *left]
            else:
                at = _below(at, name)
        return at

    # ------------------------------------------------ what the archive says

    def _members(self) -> dict[str, Member | dict[str, None]]:
        with self._turn:
            if not self._found:
                self._own, self._asked = self.outer.look(self.path), time.monotonic()
                if self._own is None or self._own.folder:
                    raise BadSource(f"{self.shown.removeprefix('::')}: no such archive")
                with self._undamaged(""):
                    found = self._tar() if self.kind == "tar" else self._zip()
                now = self.outer.look(self.path)
                if now is None or (now.size, now.stamp) != (self._own.size, self._own.stamp):
                    raise SourceChanged(f"{self.shown.removeprefix('::')}: was written while it was read")
                self._found = found
            return self._found

    @contextmanager
    def _undamaged(self, path: str) -> Iterator[None]:
        try:
            yield
        except _DAMAGE as e:
            what = self.public(path) if path else self.shown.removeprefix("::")
            cause = " ".join(str(e).split()) or type(e).__name__
            raise BadSource(f"{what}: is cut or damaged, or no {self.kind} archive: {cause}") from e

    def _file(self) -> Any:
        if isinstance(self.outer, LocalListing):
            return open(self.path, "rb")
        return io.BufferedReader(_Raw(self.outer.open(self.path)), _AHEAD)

    def _tar(self) -> dict[str, Any]:
        file = self._file()
        file.seek(0)
        start = file.read(6)
        file.seek(0)
        if (
            codec := next((codec for magic, codec in _COMPRESSED.items() if start.startswith(magic)), None)
        ) is not None:
            file = _whole(file, codec)
        self._library = tar = tarfile.TarFile(fileobj=file)
        found: dict[str, Any] = {"": {}}
        last = "at its beginning"
        for raw in tar:
            path, last = _plain(raw.name), f"after {raw.name}"
            if raw.islnk():
                self._put(found, path, self._linked(found, path, raw.linkname))
            elif raw.isdir():
                self._put(found, path, None)
            else:
                to, of = (raw.linkname if raw.issym() else None), raw if raw.isfile() or raw.issym() else None
                self._put(found, path, Member(raw.size, str(raw.mtime), raw.offset, to, of))
        file.seek(tar.offset)
        if file.read(_BLOCK) != bytes(_BLOCK):
            raise tarfile.ReadError(f"it has no end {last} (byte {tar.offset:,})")
        return found

    def _zip(self) -> dict[str, Any]:
        self._library = packed = zipfile.ZipFile(self._file())
        found: dict[str, Any] = {"": {}}
        for raw in packed.infolist():
            link = stat.S_ISLNK(raw.external_attr >> 16)
            to = packed.read(raw).decode("utf-8", "surrogateescape") if link else None
            member = Member(raw.file_size, f"{raw.CRC:08x}", raw.header_offset, to, raw)
            self._put(found, _plain(raw.filename), None if raw.is_dir() else member)
        return found

    def _linked(self, found: dict[str, Any], path: str, to: str) -> Member:
        """The member that a hard link is another name of, which comes before it."""
        target = found.get(_plain(to))
        if not isinstance(target, Member):
            raise BadSource(f"{self.public(path)}: a link to {to}, which the archive does not have before it")
        self._hard[target.place] = self._hard.get(target.place, 0) + 1
        return target

    def _put(self, found: dict[str, Any], path: str, member: Member | None) -> None:
        """Puts a member, or a folder, into the folders above it, which may have no members of their own."""
        if member is not None and path:
            found[path] = member
        elif not isinstance(found.get(path), dict):
            found[path] = {}
        while path:
            folder, _, name = path.rpartition("/")
            above = found.setdefault(folder, {})
            if not isinstance(above, dict):
                raise BadSource(
                    f"{self.public(path)}: is below {folder}, which is no folder in this archive: unpack it"
                )
            if name in above:
                return
            above[name] = None
            path = folder

    def _unpacked(self, member: Member) -> Any:
        """A member of a zip that can be read from anywhere: one that is compressed begins anew for each step back."""
        content = self._library.open(member.raw)
        if member.raw.compress_type == zipfile.ZIP_STORED:
            return content
        out = tempfile.SpooledTemporaryFile(_HELD)  # noqa: SIM115 - as long as who reads it
        shutil.copyfileobj(content, out, _AHEAD)
        out.seek(0)
        return out


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
    """A member, of which others wait to be read through the same file."""

    def __init__(self, content: Any, archive: Archive, path: str) -> None:
        super().__init__(content)
        self._archive, self._path = archive, path

    def readinto(self, into: Any) -> int:
        with self._archive._turn, self._archive._undamaged(self._path):
            return super().readinto(into)


def _whole(file: Any, codec: str) -> Any:
    """What a compressed file holds, in a file without a name: it is read from many places."""
    import bz2
    import gzip
    import lzma

    import pyarrow as pa

    out = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the listing
    openers: dict[str, Any] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
    try:
        content = openers[codec](file) if codec in openers else pa.CompressedInputStream(pa.PythonFile(file), codec)
        with content:
            shutil.copyfileobj(content, out, _AHEAD)
    except (lzma.LZMAError, OSError) as e:
        if isinstance(e, OSError) and e.errno is not None:  # the disk's, or the store's
            raise
        raise tarfile.ReadError(str(e)) from e
    out.seek(0)
    return out


def _plain(name: str) -> str:
    """A member's path, as tar and unzip write it: without `./`, a slash or `../` before it."""
    path = posixpath.normpath(name).lstrip("/")
    while path.startswith("../"):
        path = path[3:]
    return "" if path in (".", "..") else path


def _below(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name

"""What is in a tar archive: as on the disk that it was made of, or would be unpacked to."""

from __future__ import annotations

import io
import posixpath
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gristmill.errors import BadSource
from gristmill.sources.listing import Entry, FsspecListing, LocalListing, Names, is_young

if TYPE_CHECKING:
    import tarfile

_FOLLOWED = 40  # links, one after the other, as Linux does
COMPRESSED = {".tgz": "gzip", ".tbz": "bz2", ".tbz2": "bz2", ".txz": "xz"}  # endings that fsspec does not know


class TarListing:
    """A tar archive that fsspec has opened, which shows links as files and `./a` as a name of its own. Here `./a` is
    `a`, of two members of one name the last counts, and links lead where they do on a disk. A member is touched when
    the archive is, as another one may give it the same size and time.
    """

    def __init__(self, fs: Any) -> None:
        self.fs = fs
        self._found: dict[str, tarfile.TarInfo | dict[str, None]] = {}  # a folder is a dict of the names in it
        self._turn = threading.Lock()  # all members are read through one file, which has one position
        self._touched = ""
        self._hard: dict[int, int] = {}  # by the place of a member the number of hard links to it

    def __reduce__(self) -> Any:
        return TarListing, (self.fs,)

    def look(self, path: str) -> Entry | None:
        real = self._followed(path)
        found = None if real is None else self._members().get(real)
        if real is None or found is None:
            return None
        name, real = posixpath.basename(path), real if real != path else ""
        if isinstance(found, dict):
            return Entry(name, True)
        if not found.isfile():
            raise BadSource(f"{path}: not a file or folder but a pipe or device: copy its content to a file")
        links = 1 + self._hard.get(found.offset, 0)
        return Entry(name, False, found.size, str(found.mtime), self._touched, str(found.offset), links, real)

    def entries(self, folder: str, wanted: Names) -> list[Entry]:
        real = self._followed(folder)
        inside = None if real is None else self._members().get(real)
        return (
            [self._there(_below(folder, name)) for name in inside if wanted(name)] if isinstance(inside, dict) else []
        )

    def tree(self, folder: str, skip: Names) -> Iterator[tuple[str, Entry]]:
        return self._tree(folder, skip, ())

    def _tree(self, folder: str, skip: Names, above: tuple[str, ...]) -> Iterator[tuple[str, Entry]]:
        real = self._followed(folder)
        if real is None or real in above:  # a link to a folder above it is a loop
            return
        for entry in self.entries(folder, lambda name: not skip(name)):
            path = _below(folder, entry.name)
            if entry.folder:
                yield from self._tree(path, skip, (*above, real))
            else:
                yield path, entry

    def open(self, path: str) -> Any:
        import pyarrow as pa

        real = self._followed(path)
        found = None if real is None else self._members().get(real)
        if found is None or isinstance(found, dict):
            raise FileNotFoundError(path)
        content = self.fs.tar.extractfile(found)
        return pa.PythonFile(io.BufferedReader(_InTurn(content, self._turn)), mode="r")

    def _there(self, path: str) -> Entry:
        found = self.look(path)
        if found is None:
            raise BadSource(f"{path}: a link to a file that does not exist")
        return found

    def _members(self) -> dict[str, tarfile.TarInfo | dict[str, None]]:
        if not self._found:
            self._touched = self._own()
            found: dict[str, Any] = {"": {}}
            for member in self.fs.tar.getmembers():
                path = _plain(member.name)
                if member.islnk():
                    member = self._linked(found, path, member)
                if not member.isdir():
                    found[path] = member
                elif not isinstance(found.get(path), dict):
                    found[path] = {}
                _put(found, path)
            self._found = found
        return self._found

    def _linked(self, found: dict[str, Any], path: str, link: tarfile.TarInfo) -> tarfile.TarInfo:
        """The member that a hard link is another name of, which comes before it."""
        target = found.get(_plain(link.linkname))
        if target is None or isinstance(target, dict):
            raise BadSource(f"{path}: a link to {link.linkname}, which the archive does not have before it")
        self._hard[target.offset] = self._hard.get(target.offset, 0) + 1
        return target  # type: ignore[no-any-return]

    def _own(self) -> str:
        """What changes when the archive does."""
        opened = getattr(self.fs, "of", None)
        if opened is None:
            return ""
        local = "file" in (opened.fs.protocol if isinstance(opened.fs.protocol, tuple) else (opened.fs.protocol,))
        own = LocalListing().look(opened.path) if local else FsspecListing(opened.fs).look(opened.path)
        if own is None or is_young(own.touched):
            return "" if own is None else own.touched
        return f"{own.size}:{own.stamp}:{own.touched}"

    def _followed(self, path: str) -> str | None:
        """The member that a path leads to, through links; None if they lead nowhere."""
        members, left, at = self._members(), _plain(path).split("/"), ""
        for _ in range(_FOLLOWED):
            while left:
                at = _plain(_below(at, left.pop(0)))
                found = members.get(at)
                if not isinstance(found, dict) and found is not None and found.issym():
                    break
            else:
                return at
            to = posixpath.join(posixpath.dirname(at), found.linkname)
            left, at = [*_plain(to).split("/"), *left], ""
        return None


class _InTurn(io.RawIOBase):
    """A member, of which others wait to be read through the same file."""

    def __init__(self, content: Any, turn: threading.Lock) -> None:
        self._content, self._turn = content, turn

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._content.seek(offset, whence))

    def tell(self) -> int:
        return int(self._content.tell())

    def readinto(self, into: Any) -> int:
        with self._turn:
            data = self._content.read(len(into))
        into[: len(data)] = data
        return len(data)


def _put(found: dict[str, Any], path: str) -> None:
    """Puts a member into the folders above it, which may have no members of their own."""
    while path:
        folder, _, name = path.rpartition("/")
        above = found.setdefault(folder, {})
        if not isinstance(above, dict):
            raise BadSource(
                f"{path}: is below {folder}, which is no folder in this archive: unpack it, and name the files"
            )
        if name in above:
            return
        above[name] = None
        path = folder


def _plain(name: str) -> str:
    """A member's path without `./`, nor a slash before it."""
    path = posixpath.normpath(name).lstrip("/")
    return "" if path == "." else path


def _below(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name

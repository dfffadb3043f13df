"""What is in a folder of a file system: one small class each for local disks, for pyarrow's file systems and for
fsspec's. Paths are the file system's own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat as modes
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol

from gristmill.errors import BadSource
from gristmill.shards.sourcefiles import SourceFile
from gristmill.values import dataclass

Names = Callable[[str], bool]
Met = Callable[[str, bool], None]  # told of a path, and whether it is a link
Marked = Callable[[str, str], None]  # told of a folder, and of one in it that tables of a lake have
MARKS = frozenset({"_delta_log", "_versions", "metadata"})  # those of Delta, Lance and Iceberg


@dataclass(frozen=True)
class Entry:
    """A file or folder as its parent folder lists it. `stamp` changes when the content does ("" for folders); `touched`
    when anything about the file does, if the file system tells more than the stamp. `inode` is the same for all names
    of a file ("" if not known); `links` counts those names that are not symbolic links. `real` is where a link in an
    archive leads; on a disk that can be asked.
    """

    name: str
    folder: bool
    size: int = 0
    stamp: str = ""
    touched: str = ""
    inode: str = ""
    links: int = 1
    real: str = ""


class Listing(Protocol):
    """Looks at a file system and opens its files. Raises PermissionError if it may not look."""

    def look(self, path: str) -> Entry | None:
        """The file or folder at `path`; None if there is nothing."""
        ...

    def entries(self, folder: str, wanted: Names) -> list[Entry]:
        """What is directly in `folder` under the wanted names; empty if it is not a folder."""
        ...

    def tree(self, folder: str, skip: Names) -> Iterator[tuple[str, Entry]]:
        """All files below `folder` with their paths, in any order. Files and folders whose names are skipped may be
        left out to save work; the caller filters again.
        """
        ...

    def open(self, path: str) -> Any:
        """A pyarrow NativeFile for reading, seekable."""
        ...


@dataclass(frozen=True)
class LocalListing:
    """A local disk. One system call per folder and one per file: 10,000 files take some hundredths of a second. `met`
    is told of folders and of links, also to what is not there, before they are followed; `marked` of folders that may
    be tables.
    """

    met: Met | None = None
    marked: Marked | None = None

    def look(self, path: str) -> Entry | None:
        if self.met is not None and os.path.islink(path):
            self.met(path, True)
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        return _local_entry(os.path.basename(path), path, found)

    def entries(self, folder: str, wanted: Names) -> list[Entry]:
        if self.met is not None:
            self.met(folder or ".", False)
        try:
            with os.scandir(folder or ".") as listed:
                return [
                    _local_entry(e.name, e.path, self._stat(e)) for e in self._told(folder, listed) if wanted(e.name)
                ]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def tree(self, folder: str, skip: Names) -> Iterator[tuple[str, Entry]]:
        return self._tree(folder or ".", skip, ()) if os.path.isdir(folder or ".") else iter(())

    def _tree(
        self, folder: str, skip: Names, above: tuple[str, ...], linked: bool = False
    ) -> Iterator[tuple[str, Entry]]:
        inside: list[str] = []
        if self.met is not None:
            self.met(folder, False)
        with os.scandir(folder) as listed:
            for e in self._told(folder, listed):
                if skip(e.name):
                    continue
                if e.is_dir():
                    if self.met is not None and e.is_symlink():
                        self.met(e.path, True)
                    inside.append(e.path)
                else:
                    yield e.path, _local_entry(e.name, e.path, self._stat(e))
        here = (*above, os.path.realpath(folder)) if inside else above
        for path in inside:
            link = linked or os.path.islink(path)
            if not link or os.path.realpath(path) not in here:  # through a link, to a folder above it: a loop
                yield from self._tree(path, skip, here, link)

    def _told(self, folder: str, listed: Iterable[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
        for entry in listed:
            if self.marked is not None and entry.name in MARKS:
                self.marked(folder, entry.name)
            yield entry

    def _stat(self, entry: os.DirEntry[str]) -> os.stat_result:
        if self.met is not None and entry.is_symlink():
            self.met(entry.path, True)
        try:
            return entry.stat()
        except FileNotFoundError:
            raise BadSource(
                f"{entry.path}: a link to a file that does not exist, or a file that has just been removed"
            ) from None

    def open(self, path: str) -> Any:
        import pyarrow as pa

        return pa.OSFile(path, "rb")


def _local_entry(name: str, path: str, found: os.stat_result) -> Entry:
    if modes.S_ISDIR(found.st_mode):
        return Entry(name, True)
    if not modes.S_ISREG(found.st_mode):
        raise BadSource(f"{path}: not a file or folder but a pipe, socket or device: copy its content to a file")
    touched = f"{found.st_ctime_ns}:{found.st_ino}"  # the write time can be set back, the inode's change time cannot
    inode = f"{found.st_dev}:{found.st_ino}" if found.st_ino else ""  # a folder's listing on Windows has none
    return Entry(name, False, found.st_size, str(found.st_mtime_ns), touched, inode, found.st_nlink)


_GRAIN = 2.0  # seconds for which a time may yet be that of another writing: one, and as much for clocks that differ
_YOUNG = "young:"
_LOOKS = 3  # after the first
SECOND = 1.05  # a little more than what times are told in: a file that is the same so long after has had its second


def _young(written: float) -> str:
    """What a time of writing is as an Entry's `touched`: if so short ago that the file may be written once more within
    the same second, as stores tell it, nothing that another listing has.
    """
    now, until = time.time(), written + _GRAIN
    whole = written % 1 == 0  # a time with a fraction tells two writings apart
    return f"{_YOUNG}{until:.3f}:{time.time_ns()}" if whole and now < until else ""


def is_young(touched: str) -> bool:
    """Whether an Entry says that its file was written just before it was listed."""
    return touched.startswith(_YOUNG)


def settled(found: list[SourceFile], again: Callable[[], list[SourceFile]]) -> list[SourceFile]:
    """Files as they were `found`; if some are young, as found once more `again` a moment later: whatever clocks say,
    what comes after that has another time. Those written meanwhile are young as well, and looked at again, but not for
    ever: in some folders there is always one.
    """
    for _ in range(_LOOKS):
        ends = [float(f.touched.split(":")[1]) for f in found if is_young(f.touched)]
        if not ends:
            break
        time.sleep(min(SECOND, max(0.0, max(ends) - time.time())))
        known = {(f.path, f.size, f.stamp) for f in found}
        found = [
            replace(f, touched="") if is_young(f.touched) and (f.path, f.size, f.stamp) in known else f for f in again()
        ]
    return found


def same_time(one: str, other: str) -> bool:
    """Whether two stamps are equal, or times of which one is in whole seconds, and the other in the same second: some
    stores list milliseconds and tell seconds of a single file.
    """
    for coarse, fine in ((one, other), (other, one)):
        whole = _WHOLE.fullmatch(coarse)
        if whole and fine.startswith(whole[1]) and len(fine) == len(coarse):
            return True
    return one == other


_WHOLE = re.compile(r"(\d{10}(?:\.|(?=0{9}$)))0+")  # seconds; or nanoseconds, as of pyarrow


@dataclass(frozen=True)
class NamedListing(LocalListing):
    """Files of ours whose names say what they hold: one that is made again is the same, though its inode is another."""

    def look(self, path: str) -> Entry | None:
        found = super().look(path)
        return None if found is None else replace(found, touched="", inode="")

    def tree(self, folder: str, skip: Names) -> Iterator[tuple[str, Entry]]:
        return ((path, replace(entry, touched="", inode="")) for path, entry in super().tree(folder, skip))


@dataclass(frozen=True)
class ArrowListing:
    """A pyarrow file system. It reports no ETag, so the stamp is the time of the last change."""

    fs: Any

    def look(self, path: str) -> Entry | None:
        return self._entry(self.fs.get_file_info(path))

    def entries(self, folder: str, wanted: Names) -> list[Entry]:
        return [entry for _, entry in self._select(folder, recursive=False) if wanted(entry.name)]

    def tree(self, folder: str, skip: Names) -> Iterator[tuple[str, Entry]]:
        return ((path, entry) for path, entry in self._select(folder, recursive=True) if not entry.folder)

    def open(self, path: str) -> Any:
        return self.fs.open_input_file(path)

    def _select(self, folder: str, recursive: bool) -> Iterator[tuple[str, Entry]]:
        import pyarrow.fs as pafs

        for info in self.fs.get_file_info(pafs.FileSelector(folder, recursive=recursive, allow_not_found=True)):
            entry = self._entry(info)
            if entry is not None:
                yield info.path, entry

    @staticmethod
    def _entry(info: Any) -> Entry | None:
        import pyarrow.fs as pafs

        if info.type == pafs.FileType.NotFound:
            return None
        if info.type == pafs.FileType.Directory:
            return Entry(info.base_name, True)
        if info.mtime_ns is None:
            return Entry(info.base_name, False, info.size, "")
        # Whole seconds, as they may be all that tells of this file alone.
        return Entry(info.base_name, False, info.size, str(info.mtime_ns), _young(info.mtime_ns // 10**9))


# Keys under which fsspec's file systems report what changes with the content, the most reliable first.
_STAMPS = ("etag", "versionid", "version_id", "generation", "md5hash", "content_md5", "sha", "checksum", "crc")
_TIMES = ("lastmodified", "last_modified", "last-modified", "updated", "mtime", "modified", "created")


@dataclass(frozen=True)
class FsspecListing:
    """An fsspec file system. The stamp is its ETag or version if it reports one, else a time. Its instances, and the
    listings that they cache, are shared by the whole process, so each look clears that cache first.
    """

    fs: Any

    def look(self, path: str) -> Entry | None:
        self.fs.invalidate_cache(self.fs._parent(path))
        try:
            return self._entry(self.fs.info(path))
        except (FileNotFoundError, NotADirectoryError) as e:
            if (cause := unreached(e)) is not None:
                raise cause from None
            return None

    def entries(self, folder: str, wanted: Names) -> list[Entry]:
        self.fs.invalidate_cache(folder)
        try:
            listed = self.fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        own = folder.strip("/")
        found = [self._entry(info) for info in listed if info["name"].strip("/") != own]
        return [entry for entry in found if wanted(entry.name)]

    def tree(self, folder: str, skip: Names) -> Iterator[tuple[str, Entry]]:
        self.fs.invalidate_cache()  # the listings of all folders below
        for path, info in self.fs.find(folder, detail=True).items():
            yield path, self._entry(info)

    def open(self, path: str) -> Any:
        import pyarrow.fs as pafs

        try:
            return pafs.PyFileSystem(pafs.FSSpecHandler(self.fs)).open_input_file(path)
        except FileNotFoundError:  # also where the store is away: pyarrow's handler asks only whether it is a file
            found = self.look(path)
            if found is not None and not found.folder:
                raise OSError(errno.EIO, "the file was not shown for a moment", path) from None
            raise

    @staticmethod
    def _entry(info: Mapping[str, Any]) -> Entry:
        name = info["name"].rstrip("/").rpartition("/")[2]
        if info.get("type") == "directory":
            return Entry(name, True)
        lower = {str(k).lower(): v for k, v in info.items()}
        key = next((k for k in _STAMPS if lower.get(k)), "")
        when = next((lower[k] for k in _TIMES if lower.get(k)), None)
        stamp = _plain(lower[key]) if key else "" if when is None else _plain(when)
        certain = key and (key != "etag" or _DIGEST.fullmatch(stamp))
        seconds = None if certain else _seconds(when)
        return Entry(name, False, int(info.get("size") or 0), stamp, "" if seconds is None else _young(seconds))


# ETags that another content does not have: MD5 (also of parts), SHA, and Azure's, which count. Those of web servers are
# made of a time, often in whole seconds, and the size, or are weak, which means as much.
_DIGEST = re.compile(r"[0-9a-f]{32,}(-[0-9]+)?|0x[0-9a-f]{15,}", re.IGNORECASE)


def _seconds(when: Any) -> float | None:
    """A time of writing, as a date, as seconds or as text, in seconds; None if it is not known."""
    if isinstance(when, str):
        from email.utils import parsedate_to_datetime

        for read in (parsedate_to_datetime, datetime.fromisoformat):
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                return read(when.replace("Z", "+00:00")).timestamp()
    if hasattr(when, "timestamp"):
        when = when.timestamp()
    return when if isinstance(when, (int, float)) else None


_MISSING = (400, 404, 410)  # statuses of a web server for an address at which there is nothing


def unreached(error: BaseException) -> Exception | None:
    """Why a web server did not show a file, if it may have it: fsspec calls whatever goes wrong a file not found."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    asked = isinstance(cause, (ConnectionError, TimeoutError)) or type(cause).__module__.partition(".")[0] == "aiohttp"
    return cause if asked and isinstance(cause, Exception) and getattr(cause, "status", None) not in _MISSING else None


def _plain(value: Any) -> str:
    """A stamp as text: the same whether a listing gives a time as a date or as seconds."""
    if hasattr(value, "timestamp"):
        value = value.timestamp()
    return f"{value:.6f}" if isinstance(value, float) else str(value).strip('"')

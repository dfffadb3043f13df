"""What stands in a folder of a file system: one small class for local disks, one for pyarrow's file systems, one for
fsspec's. Paths are the file system's own.
"""

from __future__ import annotations

import os
import stat as modes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gristmill.errors import BadSource

Names = Callable[[str], bool]


@dataclass(frozen=True)
class Entry:
    """A file or folder as its folder lists it. `stamp` changes when the content does ("" for folders); `touched` when
    anything about the file does, where the file system tells more than the stamp. `inode` is the same for all names of
    a file ("" where that is not known), of which `links` are no symbolic links.
    """

    name: str
    folder: bool
    size: int = 0
    stamp: str = ""
    touched: str = ""
    inode: str = ""
    links: int = 1


class Listing(Protocol):
    """Looks at a file system and opens its files. Raises PermissionError where it may not look."""

    def look(self, path: str) -> Entry | None:
        """What stands at `path`; None where there is nothing."""
        ...

    def entries(self, folder: str, wanted: Names) -> list[Entry]:
        """What stands directly in `folder` under the names wanted; empty where it is no folder."""
        ...

    def tree(self, folder: str, skip: Names) -> Iterator[tuple[str, Entry]]:
        """All files below `folder` with their paths, in any order. Folders and files whose name is skipped are not
        entered, where that saves work: the caller filters again."""
        ...

    def open(self, path: str) -> Any:
        """A pyarrow NativeFile for reading, seekable."""
        ...


@dataclass(frozen=True)
class LocalListing:
    """A local disk. One system call a folder and one a file: 10,000 files take some hundredths of a second."""

    def look(self, path: str) -> Entry | None:
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        return _local_entry(os.path.basename(path), path, found)

    def entries(self, folder: str, wanted: Names) -> list[Entry]:
        try:
            with os.scandir(folder or ".") as listed:
                return [_local_entry(e.name, e.path, _stat(e)) for e in listed if wanted(e.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def tree(self, folder: str, skip: Names) -> Iterator[tuple[str, Entry]]:
        return self._tree(folder or ".", skip, ())

    def _tree(self, folder: str, skip: Names, above: tuple[str, ...]) -> Iterator[tuple[str, Entry]]:
        inside: list[str] = []
        with os.scandir(folder) as listed:
            for e in listed:
                if skip(e.name):
                    continue
                if e.is_dir():
                    inside.append(e.path)
                else:
                    yield e.path, _local_entry(e.name, e.path, _stat(e))
        here = (*above, os.path.realpath(folder)) if inside else above
        for path in inside:
            if not os.path.islink(path) or os.path.realpath(path) not in here:  # a link to a folder above it is a loop
                yield from self._tree(path, skip, here)

    def open(self, path: str) -> Any:
        import pyarrow as pa

        return pa.OSFile(path, "rb")


def _stat(entry: os.DirEntry[str]) -> os.stat_result:
    try:
        return entry.stat()
    except FileNotFoundError:
        raise BadSource(f"{entry.path}: a link to a file that does not exist, or a file that has just gone") from None


def _local_entry(name: str, path: str, found: os.stat_result) -> Entry:
    if modes.S_ISDIR(found.st_mode):
        return Entry(name, True)
    if not modes.S_ISREG(found.st_mode):
        raise BadSource(f"{path}: not a file or folder but a pipe, socket or device: copy its content to a file")
    touched = f"{found.st_ctime_ns}:{found.st_ino}"  # a time of writing can be set back, that of the inode cannot
    inode = f"{found.st_dev}:{found.st_ino}" if found.st_ino else ""  # a folder's listing on Windows tells none
    return Entry(name, False, found.st_size, str(found.st_mtime_ns), touched, inode, found.st_nlink)


@dataclass(frozen=True)
class ArrowListing:
    """A file system of pyarrow. It tells no ETag, so that the stamp is the time of the last change."""

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
        return Entry(info.base_name, False, info.size, str(info.mtime_ns) if info.mtime_ns is not None else "")


# Keys under which fsspec's file systems tell what changes with the content, the surest first.
_STAMPS = ("etag", "versionid", "version_id", "generation", "md5hash", "content_md5", "sha", "checksum", "crc")
_TIMES = ("lastmodified", "last_modified", "last-modified", "updated", "mtime", "modified", "created")


@dataclass(frozen=True)
class FsspecListing:
    """A file system of fsspec. The stamp is its ETag or version where it tells one, else a time. Its instances, and the
    listings that they keep, are shared by all of a process: each look is at what is there now.
    """

    fs: Any

    def look(self, path: str) -> Entry | None:
        self.fs.invalidate_cache(self.fs._parent(path))
        try:
            return self._entry(self.fs.info(path))
        except (FileNotFoundError, NotADirectoryError):
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
        self.fs.invalidate_cache()  # of all folders below
        for path, info in self.fs.find(folder, detail=True).items():
            yield path, self._entry(info)

    def open(self, path: str) -> Any:
        import pyarrow.fs as pafs

        return pafs.PyFileSystem(pafs.FSSpecHandler(self.fs)).open_input_file(path)

    @staticmethod
    def _entry(info: Mapping[str, Any]) -> Entry:
        name = info["name"].rstrip("/").rpartition("/")[2]
        if info.get("type") == "directory":
            return Entry(name, True)
        lower = {str(k).lower(): v for k, v in info.items()}
        stamp = next((_plain(lower[k]) for k in (*_STAMPS, *_TIMES) if lower.get(k)), "")
        return Entry(name, False, int(info.get("size") or 0), stamp)


def _plain(value: Any) -> str:
    """A stamp as text: the same whether a listing tells a time as a date or as seconds."""
    if hasattr(value, "timestamp"):
        value = value.timestamp()
    return f"{value:.6f}" if isinstance(value, float) else str(value).strip('"')

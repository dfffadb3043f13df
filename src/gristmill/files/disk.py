"""The file layer below a sink on a local disk. Everything that a commit or a publish does goes through it, one method
per operation, so that a test can record them or stop at any of them. objectstore.py is the same for object stores.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from gristmill.errors import BadJob
from gristmill.files.contract import Files
from gristmill.files.lease import Holder, Lease, holder
from gristmill.process.locks import LockFile

META = "_gristmill"  # the folder of plans, receipts and work files in a sink


class LocalFiles:
    """Durable file operations on a local disk. An fsync that fails is never tried on the same file again."""

    free_links, server = True, ""

    def create(self, path: str) -> BinaryIO:
        """A new file open for writing; its folder is made. Raises FileExistsError."""
        try:
            return self.open_new(path)
        except FileNotFoundError:
            self.make_folder(os.path.dirname(path))
            return self.open_new(path)

    def open_new(self, path: str) -> BinaryIO:
        """A new file in an existing folder."""
        return open(path, "xb", buffering=1 << 20)

    def sync(self, file: BinaryIO) -> None:
        """Flush and fsync an open file."""
        file.flush()
        os.fsync(file.fileno())

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable. If folders cannot be synced (Windows) there is nothing to do."""
        try:
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        except (PermissionError, IsADirectoryError):
            if os.name == "nt":
                return
            raise
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def link(self, source: str, target: str) -> None:
        """A second name for a file. Raises FileExistsError; never replaces."""
        try:
            os.link(source, target)
        except FileNotFoundError:
            if not os.path.exists(source):
                raise
            self.make_folder(os.path.dirname(target))
            self.link(source, target)
        except OSError as e:
            if e.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise BadJob(
                    f"{os.path.dirname(target)}: this file system has no hard links ({e.strerror}), "
                    "which a commit needs: use another disk"
                ) from e
            raise

    def replace(self, source: str, target: str) -> None:
        """Atomically give `source` the name `target`, replacing any file of that name."""
        os.replace(source, target)

    def take_place(self, made: str, target: str) -> None:
        """`replace` of a file that belongs to people: the new one has the permissions, owner and group that the old one
        was given, where that is allowed.
        """
        with contextlib.suppress(FileNotFoundError):
            _like(made, os.stat(target))
        self.replace(made, target)

    def rename(self, source: str, target: str) -> None:
        """Atomic rename."""
        os.rename(source, target)

    def remove(self, path: str) -> None:
        """Remove a file; no error if it is not there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def mkdir(self, path: str) -> None:
        """Make one folder; no error if it exists."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    # ------------------------------------------------ finished files

    @contextmanager
    def local(self, path: str) -> Iterator[str]:
        """The file itself."""
        if not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        yield path

    def digest(self, path: str) -> tuple[int, str]:
        """Bytes and sha256 of a file as it reads back from disk."""
        return os.path.getsize(path), sha256_of(path)

    def settle(self, paths: Iterable[str]) -> None:
        """Make the names of finished files durable."""
        for folder in sorted({os.path.dirname(p) for p in paths}):
            self.sync_folder(folder)

    def same(self, path: str, source: str, size: int, sha256: str) -> bool:
        """Whether `path` is a name of the file `source`, or a file with this content."""
        if not os.path.exists(path):
            return False
        if os.path.exists(source) and os.path.samefile(path, source):
            return True
        return os.path.getsize(path) == size and sha256_of(path) == sha256

    def read(self, path: str) -> bytes:
        """All of a file."""
        file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))  # half the time of `open`: most are small
        try:
            pieces = [os.read(file, 1 << 16)]
            while pieces[-1]:
                pieces.append(os.read(file, 1 << 16))
        finally:
            os.close(file)
        return b"".join(pieces)

    # ------------------------------------------------ folders, built from the operations above

    def prove(self, folder: str) -> None:
        """Make a folder and a file in it. Whether it supports hard links shows at the first commit."""
        self.make_folder(folder)
        probe = join(folder, f"writable.{secrets.token_hex(6)}.tmp")
        self.create(probe).close()
        self.remove(probe)

    def holds(self, folder: str) -> bool:
        """Whether there is such a folder."""
        return os.path.isdir(folder)

    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder."""
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []

    def entries(self, folder: str) -> Iterator[str]:
        """`names`, one at a time."""
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                yield entry.name

    def sizes(self, folder: str) -> dict[str, int]:
        """The files in a folder with their bytes: one stat per file."""
        found: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                    found[entry.name] = entry.stat().st_size
        return found

    def as_long(self, folder: str, wanted: Iterable[tuple[str, int]]) -> Iterator[bool]:
        """One stat for each."""
        start = os.path.join(folder, "")
        for name, size in wanted:
            try:
                yield os.stat(start + name).st_size == size
            except FileNotFoundError:
                yield False

    def below(self, root: str, skip: str) -> Iterator[str]:
        """All files below a folder, relative to it, except in folders named `skip` and lower folders with one."""
        for folder, folders, names in os.walk(root):
            if skip in folders and folder != root:
                folders.clear()
                continue
            folders[:] = [f for f in folders if f != skip]
            for name in names:
                yield os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")

    def make_folder(self, path: str) -> None:
        """Make a folder and those missing above it, all durable: files in a folder whose name is lost are lost."""
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        self.make_folder(parent)
        self.mkdir(path)
        self.sync_folder(parent)

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it; what cannot be removed stays."""
        for folder, folders, names in os.walk(path, topdown=False):
            with contextlib.suppress(OSError):
                for name in names:
                    self.remove(os.path.join(folder, name))
                for name in folders:
                    self.rmdir(os.path.join(folder, name))
        with contextlib.suppress(OSError):
            self.rmdir(path)

    # ------------------------------------------------ small whole files, built from the operations above

    def write_new(self, path: str, data: bytes) -> bool:
        """Create `path` with `data`, durable and whole or not at all; False if the name was taken."""
        temporary = _temporary(path)
        try:
            self._write(temporary, data)
            self.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            self.remove(temporary)
        self.sync_folder(os.path.dirname(path))
        return True

    def write_over(self, path: str, data: bytes) -> None:
        """Replace `path` by `data` in one durable step."""
        temporary = _temporary(path)
        try:
            self._write(temporary, data)
            self.replace(temporary, path)
        except BaseException:
            self.remove(temporary)
            raise
        self.sync_folder(os.path.dirname(path))

    def _write(self, path: str, data: bytes) -> None:
        with self.create(path) as file:
            file.write(data)
            self.sync(file)

    def look(self, path: str) -> tuple[bytes, Mapping[str, Any]]:
        """A file, with its content as its version."""
        data = self.read(path)
        return data, {"data": data}

    def swap(self, path: str, data: bytes, version: Mapping[str, Any]) -> bool:
        """Replace a file if it still holds what was looked at. The file to be replaced is locked, so that of two
        callers that looked at the same content one wins; if another holds the lock at this moment, the answer is no.
        """
        with LockFile(path, "r+") as file, contextlib.suppress(BlockingIOError):
            if os.name != "nt":  # on Windows an open file cannot be replaced
                file.lock()
            if file.read() == version["data"] and os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                if os.name == "nt":
                    file.close()
                self.write_over(path, data)
                return True
        return False

    def note(self, path: str, data: bytes) -> None:
        """Replace `path` by `data`, in one step, without a sync."""
        temporary = path + ".tmp"
        try:
            with open(temporary, "wb") as out:
                out.write(data)
            os.replace(temporary, path)
        except BaseException:
            self.remove(temporary)
            raise

    # ------------------------------------------------ the rest of the contract

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """One after the other: a disk is no quicker with many requests at once."""
        return map(work, items)

    def arrow(self, otherwise: Mapping[str, str] | None = None) -> None:
        """pyarrow opens local paths by itself."""

    def lease(self, sink: str, folder: str, tell: Callable[[str], None]) -> Lease:
        """A file lock, which the kernel drops with the process."""
        return Lease(sink, folder, self)

    def holder(self, folder: str) -> Holder | None:
        """Who holds the lock."""
        return holder(folder)


LOCAL = LocalFiles()


def _like(made: str, there: os.stat_result) -> None:
    """Give a new file the owner, group and permissions of another. A group that it cannot have reads no more of it than
    anybody does: it would be another group.
    """
    own, mode = os.stat(made), stat.S_IMODE(there.st_mode)
    if (own.st_uid, own.st_gid) != (there.st_uid, there.st_gid):
        for owner in (there.st_uid, -1):
            with contextlib.suppress(OSError):
                os.chown(made, owner, there.st_gid)
                break
        else:
            mode &= ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3
    with contextlib.suppress(OSError):  # of a file system that has none
        os.chmod(made, mode)


def _temporary(path: str) -> str:
    """Where a file is written before it gets its name: for a file at a sink's root this is in its META, so that a run
    that is killed there leaves nothing among the data.
    """
    folder, name = os.path.split(path)
    inside = join(folder, META)
    return join(inside if os.path.isdir(inside) else folder, f"{name}.{secrets.token_hex(4)}.tmp")


def which_file(path: str) -> tuple[int, int] | None:
    """Which file has a name now, by its device and inode; None if there is none."""
    try:
        about = os.stat(path)
    except FileNotFoundError:
        return None
    return about.st_dev, about.st_ino


def content_of(path: str) -> tuple[int, ...] | None:
    """The same, and what tells that somebody has written over it in place: its size and time."""
    try:
        about = os.stat(path)
    except FileNotFoundError:
        return None
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def join(*parts: str) -> str:
    """A path below a sink's root, in the form that every file layer takes."""
    return "/".join(p.rstrip("/") for p in parts[:-1]) + "/" + parts[-1]


def sizes_of(root: str, names: set[str], files: Files) -> dict[str, int]:
    """The bytes of all files in those folders of a root that contain these names."""
    places = {folder: join(root, folder) if folder else root for folder in {n.rpartition("/")[0] for n in names}}
    return {f"{at}/{n}".lstrip("/"): size for at, place in places.items() for n, size in files.sizes(place).items()}


def first_whole(files: Files, paths: Iterable[str], sha256: str) -> str | None:
    """The first of these paths that is a file with this content; None if none is."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError), files.local(path) as at:
            if sha256_of(at) == sha256:
                return path
    return None


def sha256_of(path: str) -> str:
    """Hex digest of a file as it reads back from disk."""
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()

"""A file layer that counts its operations, writes each into a journal, and does harm at one of them: the data of a
crash test. What a power failure would leave is built from the journal.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import random
import shutil
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gristmill.files.disk import LocalFiles

HARM = ("kill", "stop", "ENOSPC", "EIO")


@dataclass(frozen=True)
class Harm:
    """What happens at operation `at`, counted from 0 over those whose name is in `ops` and whose path holds `path`.

    "kill": SIGKILL before the operation, in the middle of it if it is a write. "stop": SIGSTOP before it, outliving the
    parent. "ENOSPC", "EIO": the operation raises, and so do the `times - 1` that follow.
    """

    at: int
    kind: str
    ops: tuple[str, ...] = ()
    path: str = ""
    times: int = 1


class Recorded(LocalFiles):
    """Local files whose operations are journalled in `folder`, one process after the other."""

    def __init__(self, folder: str, harm: Harm | None = None) -> None:
        self.folder = folder
        self.harm = harm
        self._begin()

    def _begin(self) -> None:
        os.makedirs(os.path.join(self.folder, "inodes"), exist_ok=True)
        self._lock = threading.RLock()
        self._count = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "harm": self.harm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def step(self, op: str, path: str, raw: io.FileIO | None = None, data: bytes = b"") -> None:
        """Called before each operation."""
        harm = self.harm
        with self._lock:
            if harm is None or (harm.ops and op not in harm.ops) or harm.path not in path:
                return
            number, self._count = self._count, self._count + 1
            if not harm.at <= number < harm.at + harm.times:
                return
            if raw is not None:
                io.FileIO.write(raw, data[: len(data) // 2])
            if harm.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif harm.kind == "stop":
                ctypes.CDLL(None).prctl(1, 0)  # forget the parent-death signal
                Path(self.folder, "stopped").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                raise OSError(getattr(errno, harm.kind), os.strerror(getattr(errno, harm.kind)), path)

    def journalled(self, op: str, **about: Any) -> None:
        """Called after each operation."""
        line = json.dumps({"op": op, **about}).encode() + b"\n"
        fd = os.open(os.path.join(self.folder, "journal"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, line)
        os.close(fd)

    # ------------------------------------------------ operations

    def open_new(self, path: str) -> BinaryIO:
        self.step("create", path)
        raw = _Raw(path, self)
        inode = os.fstat(raw.fileno()).st_ino
        os.link(path, os.path.join(self.folder, "inodes", str(inode)))  # its content outlives its names
        self.journalled("create", path=path, inode=inode)
        return io.BufferedWriter(raw, 1 << 20)

    def sync(self, file: BinaryIO) -> None:
        file.flush()
        path = str(file.name)
        self.step("sync", path)
        os.fsync(file.fileno())
        stat = os.fstat(file.fileno())
        self.journalled("sync", inode=stat.st_ino, size=stat.st_size)

    def sync_folder(self, path: str) -> None:
        self.step("sync_folder", path)
        super().sync_folder(path)
        self.journalled("sync_folder", path=path)

    def link(self, source: str, target: str) -> None:
        self.step("link", target)
        super().link(source, target)
        self.journalled("link", path=target, inode=os.stat(target).st_ino)

    def replace(self, source: str, target: str) -> None:
        self.step("replace", target)
        inode = os.stat(source).st_ino
        super().replace(source, target)
        self.journalled("replace", path=target, source=source, inode=inode)

    def remove(self, path: str) -> None:
        self.step("remove", path)
        super().remove(path)
        self.journalled("remove", path=path)

    def mkdir(self, path: str) -> None:
        self.step("mkdir", path)
        super().mkdir(path)
        self.journalled("mkdir", path=path)

    def rmdir(self, path: str) -> None:
        self.step("rmdir", path)
        super().rmdir(path)
        self.journalled("remove", path=path)


class _Raw(io.FileIO):
    """A new file whose writes are operations too: one that does harm has written half of its bytes."""

    def __init__(self, path: str, files: Recorded) -> None:
        super().__init__(path, "xb")
        self._files = files

    def write(self, data: Any) -> int:
        self._files.step("write", str(self.name), self, bytes(data))
        return super().write(data)


def operations(folder: str) -> list[dict[str, Any]]:
    """The journal."""
    journal = Path(folder, "journal")
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


# ---------------------------------------------------------------- power failure


def lose_unsynced(journal: str, root: str, how: str, seed: int = 0) -> None:
    """Turn the folder `root` into what a power failure may leave of it.

    `how` "names": names and contents that were not synced are lost; "contents": all names are there, but of a file only
    the bytes synced; "some": each change of a name, and some of the bytes, by chance.
    """
    chance = random.Random(seed)
    synced: dict[int, int] = {}
    durable: dict[str, int | None] = {}  # path -> inode, or None for a folder
    pending: dict[str, list[tuple[str, int | None, bool]]] = {}  # folder -> (path, inode, there)

    def change(path: str, inode: int | None, there: bool) -> None:
        pending.setdefault(os.path.dirname(path), []).append((path, inode, there))

    def settle(path: str, inode: int | None, there: bool) -> None:
        if there:
            durable[path] = inode
        else:
            durable.pop(path, None)

    for entry in operations(journal):
        op, path, inode = entry["op"], entry.get("path", ""), entry.get("inode")
        if op == "sync":
            synced[inode] = entry["size"]
        elif op == "sync_folder":
            for one in pending.pop(path, []):
                settle(*one)
        elif op == "remove":
            change(path, None, False)
        else:
            change(path, inode, True)
            if op == "replace":
                change(entry["source"], None, False)
    for changes in pending.values():
        for one in changes:
            if how == "contents" or (how == "some" and chance.random() < 0.5):
                settle(*one)
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(root)
    for path, inode in sorted(durable.items(), key=lambda e: len(e[0])):
        if not path.startswith(root + os.sep) or not os.path.isdir(os.path.dirname(path)):
            continue
        if inode is None:
            os.makedirs(path, exist_ok=True)
            continue
        content = Path(journal, "inodes", str(inode)).read_bytes()
        whole, safe = len(content), synced.get(inode, 0)
        Path(path).write_bytes(content[: chance.randint(safe, whole) if how == "some" else safe])

"""What is worth keeping between runs on one machine: digests of large files, and models exported to another format.

Everything here can be deleted at any time. The folder is `GRISTMILL_CACHE`, or `~/.cache/gristmill`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gristmill.process.locks import LockFile

# Smaller files are read again each time: about 3 ms, no more than searching the cache and checking the entry.
_SMALL = 4 << 20
# A file touched this recently may change again within the clock tick of its time stamp, so its digest is not kept
# (the "racy" case of git's index; 2 s is FAT's resolution, the coarsest in use).
SETTLED_SECONDS = 2.0


def cache_folder() -> Path:
    """The folder of the cache: `GRISTMILL_CACHE`, or `~/.cache/gristmill`."""
    return Path(os.environ.get("GRISTMILL_CACHE") or Path.home() / ".cache" / "gristmill")


# ---------------------------------------------------------------- digests


def file_digest(path: Path, cache: Path | None = None) -> str:
    """The sha256 of a file's content, in hex; of a large file from the cache while size and times are the same.

    `cache` defaults to `cache_folder()`. A cache that cannot be written is not an error.
    """
    before = path.stat()
    if before.st_size < _SMALL:
        return _hashed(path)
    note = _note(path, before, cache_folder() if cache is None else cache)
    try:
        kept = json.loads(note.read_text(encoding="utf-8"))
        if len(kept["sha256"]) == 64:
            return str(kept["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = _hashed(path)
    after = path.stat()
    unchanged = (before.st_size, before.st_mtime_ns, before.st_ctime_ns) == (
        after.st_size,
        after.st_mtime_ns,
        after.st_ctime_ns,
    )
    if unchanged and time.time() - max(after.st_mtime, after.st_ctime) > SETTLED_SECONDS:
        with contextlib.suppress(OSError):
            write_whole(note, json.dumps({"path": str(path), "size": after.st_size, "sha256": digest}))
    return digest


def table_digest(digests: Mapping[str, str]) -> str:
    """One sha256 over several files: of the lines `name NUL sha256 LF` in order of names; a lone file's own sha256."""
    if len(digests) == 1:
        return next(iter(digests.values()))
    lines = "".join(f"{name}\0{digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _hashed(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _note(path: Path, stat: os.stat_result, cache: Path) -> Path:
    # ctime too: unlike the modification time, no tool can put it back after a change.
    key = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}\0{stat.st_ino}"
    return cache / "digests" / f"{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()}.json"


def write_whole(path: Path, text: str) -> None:
    """Write a file of the cache in one step; nothing is left of one that cannot be written. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


# ---------------------------------------------------------------- folders built once


def built(name: str, build: Callable[[Path], None], cache: Path | None = None) -> Path:
    """The folder `name` in the cache, filled by `build(folder)` unless it is there already.

    It appears at once and complete. Processes that want the same one wait for the first if the system has file locks;
    elsewhere each builds and one wins. Raises OSError if the cache cannot be written.
    """
    root = cache_folder() if cache is None else cache
    target = root / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(target.name + ".lock")):
        if target.is_dir():
            return target
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            build(work)
            work.chmod(0o755)
            work.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    if os.name == "nt":  # no lock, the rename decides
        yield
        return
    with LockFile(str(path), "a+") as file:
        file.lock(wait=True)
        yield

"""Files that arrive: what is there, compared with what was there when the job last ran. Nothing is opened."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence

from gristmill.job.uris import is_local, local_path

WIDTH = 8  # bytes of a digest: a file name and its stamp, among a few millions
SETTLED = 10.0  # seconds since it was last written, after which a file is taken to be whole
_HIDDEN = (".", "_")
_PARTIAL = (".tmp", ".part", ".partial", ".crdownload", ".filepart")


def listed(paths: Sequence[str], now: float) -> bytes:
    """Digests of all files that these paths, globs and folders name, with their sizes and times, sorted; files that
    were written to just now are left out, and so are those with names of files that are not whole. Raises OSError.
    """
    found = set()
    for path in paths:
        for name, written, told in _files(path):
            if written is not None and 0 <= now - written < SETTLED:
                continue
            if not name.endswith(_PARTIAL) and not os.path.basename(name).startswith(_HIDDEN):
                found.add(hashlib.blake2b(told.encode("utf-8", "surrogateescape"), digest_size=WIDTH).digest())
    return b"".join(sorted(found))


def new(before: bytes, after: bytes) -> int:
    """How many files have come, or changed; files that are gone do not count."""
    return len(_each(after) - _each(before))


def _each(digests: bytes) -> set[bytes]:
    return {digests[i : i + WIDTH] for i in range(0, len(digests), WIDTH)}


def _files(path: str) -> Iterator[tuple[str, float | None, str]]:
    """The name of each file, when it was last written, if that tells whether it is whole, and what differs once it is
    another.
    """
    if not is_local(path):
        yield from _elsewhere(path)
        return
    for name in glob.iglob(local_path(path), recursive=True):
        if os.path.isdir(name):
            for folder, folders, names in os.walk(name):
                folders[:] = [f for f in folders if not f.startswith(_HIDDEN)]
                for inside in names:
                    yield from _stamped(os.path.join(folder, inside))
        else:
            yield from _stamped(name)


def _stamped(name: str) -> Iterator[tuple[str, float | None, str]]:
    try:
        found = os.stat(name)
    except FileNotFoundError:  # gone meanwhile
        return
    yield name, found.st_mtime, f"{name}\0{found.st_size}\0{found.st_mtime_ns}"


def _elsewhere(path: str) -> Iterator[tuple[str, float | None, str]]:
    """Objects of a store, which appear whole: their listing has sizes, and times or tags."""
    import fsspec

    system, inside = fsspec.core.url_to_fs(path)
    found = system.glob(inside, detail=True) if any(c in inside for c in "*?[") else system.find(inside, detail=True)
    for name, told in found.items():
        if told.get("type") == "file":
            stamps = [str(told.get(key)) for key in ("size", "ETag", "etag", "LastModified", "updated", "mtime")]
            yield name, None, "\0".join([name, *stamps])

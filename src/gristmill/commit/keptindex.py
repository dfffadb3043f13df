"""The index of answers that may be kept: rows of the result before, by digest, in files beside a plan. Workers map it
into memory and look rows up; it is built a piece at a time, however many rows there are.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from gristmill.commit import fates
from gristmill.commit.documents import TableRecord
from gristmill.commit.fates import Fates
from gristmill.commit.generation import Generation
from gristmill.commit.receipt import Part, Receipt
from gristmill.errors import CorruptStore
from gristmill.files.contract import Files
from gristmill.files.disk import join, sha256_of
from gristmill.values import dataclass

ENTRY = np.dtype(
    [
        ("lo", "<u8"),
        ("part", "<i4"),
        ("source", "<i4"),
        ("row", "<i8"),
        ("made", "<i4"),
        ("rows", "<i4"),
        ("state", "i1"),
    ]
)
_HELD = np.dtype([("hi", "<u8"), ("entry", ENTRY)])
PIECE = 1 << 20  # entries sorted at a time: 40 MB
_TEXTS = ("fates", "fates_sha256", "path", "sha256")
_PARTS = pa.schema([*((name, pa.string()) for name in _TEXTS), ("beside", pa.bool_())])


@dataclass(frozen=True)
class Shelf:
    """A shard of an earlier generation whose answers may be kept: its receipt, and the file that they are in, `beside`
    its parts or the only one of these. `columns` are not stored.
    """

    generation: Generation
    receipt: Receipt
    part: Part | None
    beside: bool


def build(files: Files, folder: str, shelves: Sequence[Shelf]) -> dict[str, TableRecord]:
    """Write the index of these shards into a generation's folder."""
    nonce = secrets.token_hex(4)
    written = {name: join(folder, f"kept-{nonce}.{name}.npy") for name in ("hi", "entries")}
    with tempfile.TemporaryDirectory(prefix="gristmill-") as scratch:
        pieces, total = _spread(scratch, shelves)
        with files.create(written["hi"]) as heads, files.create(written["entries"]) as out:
            _header(heads, np.dtype("<u8"), total)
            _header(out, ENTRY, total)
            for path in pieces:
                held = np.fromfile(path, _HELD)
                first = np.ascontiguousarray(held["hi"])
                order = np.argsort(first)
                heads.write(first[order].data)
                out.write(held["entry"][order].data)
            files.sync(heads)
            files.sync(out)
    written["parts"] = join(folder, f"kept-{nonce}.parts.arrow")
    rows = [
        (
            *(("", "") if s.receipt.fates is None else (s.receipt.fates.work, s.receipt.fates.sha256)),
            "" if s.part is None else _whereabouts(s),
            "" if s.part is None else s.part.sha256,
            s.beside,
        )
        for s in shelves
    ]
    table = pa.table({f.name: pa.array(list(c), f.type) for f, c in zip(_PARTS, zip(*rows, strict=True), strict=True)})
    with files.create(written["parts"]) as out:
        with pa.ipc.new_file(out, _PARTS) as writer:
            writer.write_table(table)
        files.sync(out)
    files.settle(written.values())
    return {name: TableRecord(path.rpartition("/")[2], files.digest(path)[1]) for name, path in written.items()}


def _whereabouts(s: Shelf) -> str:
    """A file of the result below its root: its work file if that is kept, else the name that it is published under."""
    assert s.part is not None
    work, name = s.part.work.rpartition("/")[::2]
    if not s.part.publish or name in s.generation.files.names(join(s.generation.root, work)):
        return s.part.work
    return s.part.publish


def _spread(scratch: str, shelves: Sequence[Shelf]) -> tuple[list[str], int]:
    """The entries in files, each with a range of digests, so that none has many more than PIECE."""
    expected = sum(s.receipt.fates.rows for s in shelves if s.receipt.fates is not None)
    bits = max(0, (expected // PIECE).bit_length())
    paths = [os.path.join(scratch, f"{n}") for n in range(1 << bits)]
    total = 0
    with contextlib.ExitStack() as stack:
        outs: list[BinaryIO] = [stack.enter_context(open(path, "wb")) for path in paths]
        for number, shelf in enumerate(shelves):
            if (found := fates.read(shelf.generation, shelf.receipt)) is None:
                continue
            held = _of_shard(number, found[0])
            total += len(held)
            if not bits:
                outs[0].write(held.tobytes())
                continue
            which = (held["hi"] >> np.uint64(64 - bits)).astype(np.int64)
            for n in np.unique(which).tolist():
                outs[n].write(held[which == n].tobytes())
    return paths, total


def _of_shard(number: int, found: Fates) -> np.ndarray:
    held = np.empty(len(found), _HELD)
    held["hi"], entry = found.digest["hi"], held["entry"]
    entry["lo"], entry["part"], entry["source"] = found.digest["lo"], number, np.arange(len(found))
    entry["row"] = np.cumsum(found.rows, dtype=np.int64) - found.rows
    entry["made"], entry["rows"], entry["state"] = found.made, found.rows, found.state
    dead = found.state == fates.DEAD
    return held[~dead] if dead.any() else held


def _header(out: BinaryIO, kind: np.dtype[Any], rows: int) -> None:
    np.lib.format.write_array_header_1_0(
        out, {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (rows,)}
    )


# ---------------------------------------------------------------- looking rows up


@dataclass(frozen=True)
class Kept:
    """Where a plan's index is: what a worker is given. Paths in it are below the sink's `root`."""

    folder: str
    root: str
    tables: Mapping[str, TableRecord]
    files: Files

    def open(self) -> Index:
        """The index, mapped into memory. Raises CorruptStore if it is not what the plan says."""
        return Index(self._array("hi"), self._array("entries"), self._parts())

    def _array(self, name: str) -> np.ndarray:
        with self._checked(name) as path:
            with open(path, "rb") as file:
                np.lib.format.read_magic(file)
                (rows,), *_ = np.lib.format.read_array_header_1_0(file)
            found: np.ndarray = np.load(path, mmap_mode="r" if rows else None)  # nothing cannot be mapped
            return found

    def _parts(self) -> list[dict[str, Any]]:
        with self._checked("parts") as path, pa.memory_map(path) as source:
            found: list[dict[str, Any]] = pa.ipc.open_file(source).read_all().to_pylist()
            return found

    @contextlib.contextmanager
    def _checked(self, name: str) -> Iterator[str]:
        at = join(self.folder, self.tables[name].path)
        try:
            with self.files.local(at) as path:
                if sha256_of(path) != self.tables[name].sha256:
                    raise CorruptStore(f"{at}: is not what the plan says: start over with --restart (restart=True)")
                yield path
        except FileNotFoundError:
            raise CorruptStore(
                f"{at}: missing, which the plan names: start over with --restart (restart=True)"
            ) from None


@dataclass(frozen=True)
class Index:
    """Entries (ENTRY) sorted by digest, the first half of which is apart; and the files that they are in."""

    hi: np.ndarray
    entries: np.ndarray
    parts: list[dict[str, Any]]

    def find(self, digests: np.ndarray) -> np.ndarray:
        """The number of the first entry with each digest, int64; -1 where there is none."""
        wanted = np.ascontiguousarray(digests["hi"])
        order, at = np.argsort(wanted), np.empty(len(wanted), np.int64)
        at[order] = np.searchsorted(self.hi, wanted[order])  # in order, as the index is: four times as quick
        found = np.full(len(digests), -1, np.int64)
        open_ = np.arange(len(digests))
        while len(open_):
            open_ = open_[at[open_] < len(self.hi)]
            open_ = open_[self.hi[at[open_]] == digests["hi"][open_]]
            same = self.entries["lo"][at[open_]] == digests["lo"][open_] if len(open_) else np.empty(0, bool)
            found[open_[same]] = at[open_[same]]
            open_ = open_[~same]
            at[open_] += 1
        return found

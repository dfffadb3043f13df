"""Reading index files (`indexfile.py` says what is in one): by key, by vector, and all rows of one in order."""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa

from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, BadSource
from gristmill.files.disk import content_of
from gristmill.stores.contract import Key, Mark, Metric, Near, Place, Row, Search, StoreUnavailable
from gristmill.stores.lookup import keyed
from gristmill.stores.onefile import marks_of
from gristmill.stores.packing import key_bytes, unpacking
from gristmill.stores.vectors import Indexed, searched
from gristmill.values import dataclass

MAGIC = b"GRISTIDX"  # the last bytes of a file, after the length of its footer
FORMAT = 1


class Engine(Protocol):
    """A library that searches vectors in files of its own format."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    """What `index` may say, the default first."""
    options: ClassVar[tuple[str, ...]]

    def require(self, shown: str) -> Any:
        """The library. Raises MissingExtra."""
        ...

    def build(self, path: str, about: Indexed, count: int, vectors: Iterable[np.ndarray]) -> None:
        """Write an index of vectors, which are labelled by their place. Holds all of them in memory."""
        ...

    def open(self, path: str, about: Indexed) -> Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]:
        """A function that gives, for each vector, the labels of the nearest, nearest first and -1 where there are no
        more, and how far they are by `about.metric`. One thread at a time calls it.
        """
        ...


@dataclass(frozen=True)
class Footer:
    """What is in a file, and where. `count` are its rows, of which the first `vectors` have one."""

    engine: str
    about: Indexed
    count: int
    vectors: int
    rows: tuple[int, int]  # where they begin, and how many bytes they take
    keys: int
    marks: list[Mark]


def footer(place: Place, engine: Engine) -> Footer | None:
    """What is published; None if there is no file. Raises BadJob for a file of somebody else."""
    try:
        with open(place.path, "rb") as file:
            return _footer(file, place, engine)
    except FileNotFoundError:
        return None


def _footer(file: Any, place: Place, engine: Engine) -> Footer:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 16))
    end = file.read(16)
    if end[8:] != MAGIC:
        raise BadJob(
            f"{place.shown}: is a file that gristmill did not write, or lacks its end, as one that was copied or "
            "restored in part: give another path; if it is ours, restore it, or remove it and deliver again"
        )
    length = int.from_bytes(end[:8], "little")
    file.seek(size - 16 - length)
    said = json.loads(file.read(length))
    if said["engine"] != engine.name or said["format"] != FORMAT:
        raise BadJob(f"{place.shown}: is an index of {said['engine']} (format {said['format']}): give another path")
    marks = marks_of(json.dumps(said["marks"]).encode(), place.shown)
    where = (tuple(said["rows"]), said["keys"])
    return Footer(said["engine"], Indexed(**said["about"]), said["count"], said["vectors"], *where, marks)


@dataclass(frozen=True)
class File:
    """A file that is open: what tells its content, its footer, rows (mapped, not read), the numbers of the first of
    each batch, crcs of keys in order, and the rows that they are of; what searches vectors, if that is open, too.
    """

    content: tuple[int, ...] | None
    footer: Footer
    batches: Sequence[pa.RecordBatch]
    starts: np.ndarray
    crcs: np.ndarray
    order: np.ndarray
    search: Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]] | None

    def numbered(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """All rows, with the number of the first of each batch."""
        return zip(self.starts.tolist(), self.batches, strict=False)


def opened(place: Place, engine: Engine, *, index: bool) -> File | None:
    """The published file, mapped into memory; None if there is none. Raises BadJob, StoreUnavailable."""
    while True:
        try:
            before = content_of(place.path)
            with open(place.path, "rb") as file:
                found = _mapped(place, engine, before, _footer(file, place, engine), index)
        except FileNotFoundError:
            return None
        except (pa.ArrowException, RuntimeError) as e:
            raise StoreUnavailable(f"{place.shown}: cannot be opened: {place.words(e)}: deliver it again") from e
        if content_of(place.path) == before:  # all was opened by name: no other file may have got it meanwhile
            return found


def _mapped(place: Place, engine: Engine, content: tuple[int, ...] | None, said: Footer, index: bool) -> File:
    with pa.memory_map(place.path) as source:
        source.seek(said.rows[0])
        reader = pa.ipc.open_file(pa.BufferReader(source.read_buffer(said.rows[1])))
        source.seek(said.keys)
        keys = source.read_buffer(12 * said.count)
    batches = [reader.get_batch(n) for n in range(reader.num_record_batches)]
    starts = np.concatenate([[0], np.cumsum([batch.num_rows for batch in batches], dtype=np.int64)])
    order, crcs = np.frombuffer(keys, "<i8", said.count), np.frombuffer(keys, "<u4", said.count, 8 * said.count)
    search = engine.open(place.path, said.about) if index and said.vectors else None
    return File(content, said, batches, starts, crcs, order, search)


@dataclass(frozen=True)
class Open:
    """What is read: the file, its mark, its key columns, and what makes rows of values."""

    file: File
    mark: Mark
    columns: Mapping[str, pa.DataType]
    unpacked: Callable[[Sequence[bytes | None]], list[Row | None]]

    def rows(self, numbers: Sequence[int | None]) -> list[Row | None]:
        """The rows of these numbers; None stays None."""
        at = [None if n is None else self._place_of(n) for n in numbers]
        rows = self.unpacked([None if one is None else one[0]["v"][one[1]].as_py() for one in at])
        column = self.file.footer.about.column
        for row, one in zip(rows, at, strict=True):
            if row is not None and one is not None:
                row[column] = one[0]["x"][one[1]].as_py()
        return rows

    def _place_of(self, number: int) -> tuple[pa.RecordBatch, int]:
        batch = int(np.searchsorted(self.file.starts, number, "right")) - 1
        return self.file.batches[batch], number - int(self.file.starts[batch])

    def numbers(self, keys: Sequence[bytes | None]) -> list[int | None]:
        """For each key the number of its row, or None."""
        crcs = np.array([zlib.crc32(key or b"") for key in keys], np.uint32)
        firsts = np.searchsorted(self.file.crcs, crcs, "left").tolist()
        pasts = np.searchsorted(self.file.crcs, crcs, "right").tolist()
        return [
            None
            if key is None
            else next((n for n in self.file.order[first:past].tolist() if self._key(n) == key), None)
            for key, first, past in zip(keys, firsts, pasts, strict=True)
        ]

    def _key(self, number: int) -> bytes:
        batch, row = self._place_of(number)
        return batch["k"][row].as_py()  # type: ignore[no-any-return]


class FileReader:
    """Looks rows up in the file that has the name now."""

    def __init__(self, place: Place, key: tuple[str, ...], engine: Engine) -> None:
        self._place = place
        self._key = key
        self._engine = engine
        self._open: Open | None = None
        self._opening, self._searching = threading.Lock(), threading.Lock()

    def _now(self) -> Open:
        """The published file; one thread at a time opens it."""
        with self._opening:
            content, found = content_of(self._place.path), self._open
            if content is None:
                raise BadSource(f"{self._place.shown}: there is no such file: deliver a result there first")
            if found is None or found.file.content != content:
                file = opened(self._place, self._engine, index=True)
                if file is None:
                    raise BadSource(f"{self._place.shown}: there is no such file any more: deliver a result there")
                found = self._open = self._read(file)
            return found

    def _read(self, file: File) -> Open:
        mark, shown = file.footer.marks[0], self._place.shown
        if self._key and self._key != mark.key:
            raise BadJob(f"{shown}: rows are found by {', '.join(mark.key)} there, not by {self._key[0]}")
        schema = decode_schema(mark.held)
        return Open(file, mark, keyed(shown, mark.key, {f.name: f.type for f in schema}), unpacking(schema))

    def find(self, keys: Sequence[Key]) -> tuple[Mark | None, list[Row | None]]:
        now = self._now()
        if not keys:
            return now.mark, []
        return now.mark, now.rows(now.numbers(key_bytes(keys, now.columns, self._place.shown)))

    def nearest(self, search: Search) -> Near:
        now, shown = self._now(), self._place.shown
        said = now.file.footer
        searched({said.about.column: said.about.width}, search, shown)
        metric: Metric = said.about.metric
        if search.metric not in (None, metric):
            raise BadJob(
                f"{shown}: is an index by {metric}, and {search.metric} is asked for: leave metric out, or deliver "
                f"with index={{{said.about.column!r}: {{'metric': {search.metric!r}}}}}"
            )
        if now.file.search is None:
            nothing: list[Any] = [[] for _ in search.vectors]
            return Near(now.mark, metric, nothing, nothing)
        with self._searching:
            labels, far = now.file.search(search.vectors, min(search.k, said.vectors))
        rows = [[row for row in now.rows(one[one >= 0].tolist()) if row is not None] for one in labels]
        return Near(now.mark, metric, rows, [f[one >= 0].tolist() for one, f in zip(labels, far, strict=True)])

    def close(self) -> None:
        self._open = None

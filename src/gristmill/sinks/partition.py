"""Hive folders: the rows of a shard divided over `day=2026-01-01/` and the like, one file for each."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.arrow.rows import picked
from gristmill.arrow.schemas import plain
from gristmill.errors import BadJob, did_you_mean
from gristmill.files.contract import Files
from gristmill.sinks.contract import SinkFormat, WorkFile, Writer
from gristmill.values import dataclass

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["divided", "folder_name", "partitioned"]

LONGEST = 255  # bytes of a name, on every file system in use
HELD_BYTES = 64 << 20  # of rows held in memory, over all partitions of a shard
NULL = "__HIVE_DEFAULT_PARTITION__"  # Hive's and Spark's name for null; empty text goes there too, as with them
_ESCAPED = re.compile("[\x00-\x1f\x7f\"#%'*/:=?\\\\{\\[\\]^]")  # as Hive's FileUtils.escapePathName


def partitioned(form: SinkFormat, columns: tuple[str, ...]) -> SinkFormat:
    """`form`, with rows divided by `columns`, which appear in the folders' names and not in the files.

    Work files are in one folder; `publish` names the partition's.
    """
    if "" in columns:
        raise BadJob(
            "partition_by names '', a column without a name, which no reader of folders finds in names such as `=1`: "
            "give it a name in a step"
        )
    return Partitioned(form, tuple(columns))


class Partitioned:
    """A sink format that writes one file per partition of a shard; statements about files apply to each of these."""

    def __init__(self, form: SinkFormat, columns: tuple[str, ...]) -> None:
        self.form = form
        self.columns = columns
        self.name = form.name
        self.suffixes, self.tables, self.decimal = form.suffixes, form.tables, form.decimal
        self.count, self.misfit, self.dataset, self.merge = form.count, form.misfit, form.dataset, form.merge

    def stored(self, rows: pa.Table, options: Mapping[str, Any]) -> pa.Schema:
        """As the files' format stores it, with keys unencoded. Raises BadJob for types that cannot name folders. If
        there are no rows, a missing key is allowed, as it may be an answer column not seen yet.
        """
        return self._keyed(self.form.stored(rows, options), unseen=not rows.num_rows)

    def _keyed(self, schema: pa.Schema, unseen: bool = False) -> pa.Schema:
        for name in self.columns:
            if name not in schema.names:
                if unseen:
                    continue
                raise BadJob(
                    f"partition_by names {name!r}, which is neither an output column nor one of the source: the output "
                    f"has {', '.join(schema.names)}{did_you_mean(name, schema.names)}"
                )
            field = schema.field(name)
            kind = plain(field.type)
            if not _names_folders(kind):
                raise BadJob(
                    f"partition_by names {name!r}, a {kind}, which does not read back unchanged from a folder's name: "
                    "convert it to text in a step"
                )
            schema = schema.set(schema.names.index(name), field.with_type(kind))
        return schema

    def refused(self, rows: pa.Table, options: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
        """Also rows whose keys cannot name a folder: empty text, NaN, or too long a value."""
        import pyarrow as pa

        found = self.form.refused(rows, options)
        if not rows.num_rows:  # Arrow cannot combine no chunks of every dictionary
            return found
        for name in (n for n in self.columns if n in rows.column_names):
            column = rows.column(name)
            if not _names_folders(plain(column.type)):
                continue  # reported when the schema is planned
            encoded = column.cast(plain(column.type)).dictionary_encode().combine_chunks()
            wrong = [_unreadable(name, value, plain(column.type)) for value in encoded.dictionary]
            if any(wrong):
                bad = pa.array([w is not None for w in wrong]).take(encoded.indices).fill_null(False)
                for row in np.flatnonzero(bad.to_numpy(zero_copy_only=False)).tolist():
                    message = wrong[encoded.indices[row].as_py()]
                    found.setdefault(row, ("PartitionKey", f"column {name!r} {message}"))
        return found

    def writer(
        self, files: Files, folder: str, stem: str, nonce: str, schema: pa.Schema, options: Mapping[str, Any]
    ) -> Writer:
        import pyarrow as pa

        self._keyed(schema)
        rest = pa.schema([f for f in schema if f.name not in self.columns])
        if not len(rest):
            raise BadJob(
                f"partition_by names every output column ({', '.join(self.columns)}): nothing is left for the files"
            )

        def opened(number: int) -> Writer:
            return self.form.writer(files, folder, stem + _numbered(number), nonce, rest, options)

        return PartitionedWriter(self.columns, rest, files, os.path.join(folder, f"{stem}.{nonce}"), opened)


@dataclass
class _Part:
    """One partition of a shard: its rows in memory, and where its other rows are in the spilled files."""

    number: int
    held: list[pa.Table] = field(default_factory=list)
    spilled: list[tuple[int, int, int]] = field(default_factory=list)  # spill, first row, rows


class PartitionedWriter:
    """Gathers a shard's rows by partition and writes the files at the end, one after the other.

    Thus only one file is open at a time, however many partitions there are. Rows beyond 64 MB are spilled to disk.
    """

    def __init__(
        self, columns: tuple[str, ...], rest: pa.Schema, files: Files, base: str, opened: Callable[[int], Writer]
    ) -> None:
        self._columns, self._rest, self._files, self._base, self._opened = columns, rest, files, base, opened
        self._parts: dict[str, _Part] = {}
        self._bytes = 0
        self._spills: list[str] = []
        self._writers: list[Writer] = []

    def write(self, rows: pa.Table) -> None:
        for folder, index in divided(rows, self._columns):
            part = self._parts.setdefault(folder, _Part(len(self._parts)))
            part.held.append(picked(rows, index).select(self._rest.names))
            self._bytes += part.held[-1].nbytes
        if self._bytes > HELD_BYTES:
            self._spill()

    def _spill(self) -> None:
        """Move the rows in memory to a file, each partition's together."""
        import pyarrow as pa

        path = f"{self._base}.spill{len(self._spills)}.tmp"
        waiting = [p for p in self._parts.values() if p.held]
        tables = [t for p in waiting for t in p.held]
        together = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
        at = 0
        for part in waiting:
            count = sum(t.num_rows for t in part.held)
            part.spilled.append((len(self._spills), at, count))
            part.held = []
            at += count
        self._spills.append(path)
        with self._files.create(path) as file, pa.ipc.new_file(file, together.schema) as out:
            out.write_table(together)
        self._bytes = 0

    def close(self) -> list[WorkFile]:
        import pyarrow as pa

        out: list[WorkFile] = []
        spills = [self._spilled(path) for path in self._spills]
        for folder, part in self._parts.items():
            writer = self._opened(part.number)
            self._writers.append(writer)
            for spill, first, count in part.spilled:
                writer.write(spills[spill].slice(first, count))
            if part.held:
                writer.write(pa.concat_tables(part.held))
            part.held = []
            for file in writer.close():
                name = file.publish.replace(_numbered(part.number), "", 1)
                out.append(replace(file, publish=f"{folder}/{name}"))
        self._remove_spills()
        return out

    def _spilled(self, path: str) -> pa.Table:
        import pyarrow as pa

        with self._files.local(path) as local:  # which stays mapped
            return pa.ipc.open_file(pa.memory_map(local)).read_all()

    def abort(self) -> None:
        self._parts.clear()
        for writer in self._writers:
            writer.abort()
        self._remove_spills()

    def _remove_spills(self) -> None:
        for path in self._spills:
            with contextlib.suppress(Exception):
                self._files.remove(path)


def _numbered(number: int) -> str:
    """The number that distinguishes the work files of a shard's partitions."""
    return f".p{number:05d}"


def divided(rows: pa.Table, columns: tuple[str, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """Each partition's folder with its row numbers, in order, partitions as they first appear; without columns, all
    rows under the folder "".
    """
    if not rows.num_rows:
        return
    codes = np.zeros(rows.num_rows, dtype=np.int64)
    keys: list[tuple[list[str], np.ndarray]] = []  # the texts of each column, and which of them a row has
    for name in columns:
        encoded = _text(rows.column(name)).dictionary_encode().combine_chunks()
        texts = [_segment(name, v) for v in encoded.dictionary.to_pylist()]
        keys.append((texts, encoded.indices.to_numpy(zero_copy_only=False)))
        # Numbered anew each time: products over several columns would not fit into 64 bits.
        codes = np.unique(codes * len(texts) + keys[-1][1], return_inverse=True)[1]
    _, firsts, of_row = np.unique(codes, return_index=True, return_inverse=True)
    places = np.empty(len(firsts), np.int64)
    places[np.argsort(firsts)] = np.arange(len(firsts))
    of_row = places[of_row]
    order = np.argsort(of_row, kind="stable")
    edges = np.searchsorted(of_row[order], np.arange(len(firsts) + 1))
    for i, first in enumerate(np.sort(firsts).tolist()):
        yield "/".join(texts[which[first]] for texts, which in keys), order[edges[i] : edges[i + 1]]


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values as text without nulls: null and the empty text are the same folder."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return pc.fill_null(column.cast(pa.string()), "")


def _names_folders(kind: pa.DataType) -> bool:
    """Whether a reader restores such a value from a folder's name."""
    import pyarrow as pa

    t = pa.types
    tests = (
        t.is_boolean, t.is_integer, t.is_float32, t.is_float64, t.is_string, t.is_large_string, t.is_null, t.is_date,
        t.is_time, t.is_timestamp,
    )  # fmt: skip
    return any(test(kind) for test in tests)


def _unreadable(name: str, value: pa.Scalar, kind: pa.DataType) -> str | None:
    """Why no folder's name can stand for a value; found by trying Arrow's own reader."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    if not value.is_valid:
        return None
    try:
        text = value.cast(pa.string()).as_py()
    except UnicodeDecodeError:
        return "is text that is not valid UTF-8, which a folder's name cannot hold: replace it in a step"
    if text == "":
        return (
            "is empty text, which a folder's name cannot tell from null: replace it with other text or null in a step"
        )
    segment = _segment(name, text)
    if (size := len(segment.encode())) > LONGEST:
        return f"makes a folder's name of {size} bytes, over the limit of {LONGEST}: shorten it in a step"
    try:
        read = ds.HivePartitioning(pa.schema([(name, kind)])).parse(f"/{segment}/")
    except (pa.ArrowException, NotImplementedError):
        read = None
    if read is None or not read.equals(ds.field(name) == value):
        return f"is {text}, which does not read back from a folder's name: change it in a step"
    return None


def _segment(name: str, value: str) -> str:
    return f"{_escaped(name)}={_escaped(value) if value else NULL}"


def folder_name(values: Mapping[str, str | None]) -> str:
    """The folder of a partition, as in `day=2026-01-01/lang=en`."""
    return "/".join(_segment(name, value or "") for name, value in values.items())


def _escaped(text: str) -> str:
    return _ESCAPED.sub(lambda c: f"%{ord(c[0]):02X}", text)

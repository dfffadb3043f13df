"""Parquet files as a source. Planning reads only footers; reading decodes forwards through the wanted row groups, and
continues where the last call stopped.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.arrow.rows import picked
from gristmill.arrow.schemas import plain
from gristmill.errors import BadSource
from gristmill.shards.ranges import as_ranges, clip, inside
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from gristmill.sources import int96
from gristmill.sources.contract import BadRow, Block, Reading
from gristmill.sources.openreaders import Waiting
from gristmill.sources.paths import Storage, open_input
from gristmill.sources.schema import conform
from gristmill.values import dataclass

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ParquetSource"]

_TAIL = 64 << 10  # one read that holds the whole footer of most files
_MAGIC = b"PAR1"
_LEAST_BUFFER = 64 << 10
_BATCH_ROWS = 1 << 16  # rows decoded at a time, pyarrow's own default: larger ones were not faster
_STATISTICS = 50_000  # row groups x columns of a file above which null counts are not worth reading
_KEPT_OPEN = 2  # files kept open for the next call; each holds at most one batch per stream
# Rows that are decoded to see how large they are, where a footer cannot tell; a batch this many times too large has the
# rest of its row group decoded in smaller ones.
_LEAST_LOOKED_AT, _LOOKED_AT, _TOO_LARGE = 16, 1024, 2
_WIDTHS = {"BOOLEAN": 1 / 8, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
_AS_LONG = frozenset({"PLAIN", "RLE", "BIT_PACKED", "DELTA_LENGTH_BYTE_ARRAY", "BYTE_STREAM_SPLIT"})  # as the values
_BAD_ROWS = 1 << 13  # in one block
_GOES_ON = (
    "put the file back whole, or take it out of the source; --on-bad-file skip (on_bad_file='skip') goes on, and makes "
    "dead letters of the rows that cannot be read"
)


class ParquetSource:
    """Rows of Parquet files; a position is the row's number in its file."""

    name = "parquet"
    suffixes: tuple[str, ...] = (".parquet", ".pq", ".parq")
    compressed = by_bytes = written = False
    typed = numbered = True

    def inspect(self, file: SourceFile, fs: Storage, options: Mapping[str, Any]) -> FileInfo:
        """From the footer: one row group per cut. Raises BadSource if a file is truncated, corrupt or not Parquet, or
        if there is no such option (sources/int96.py has the only one).
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        if unknown := [name for name in options if name != int96.OPTION]:
            hint = ": Parquet files have types of their own, and a step can cast them" if "types" in options else ""
            raise BadSource(f"{file.path}: Parquet sources have no option {', '.join(unknown)}{hint}")
        unit = int96.unit_of(options)
        footer, end = _footer(file, fs)
        try:
            opened = pq.ParquetFile(pa.BufferReader(footer), coerce_int96_timestamp_unit=unit)
            metadata, schema = opened.metadata, opened.schema_arrow
        except (pa.ArrowException, OSError) as e:
            raise BadSource(f"{file.path}: the Parquet footer is corrupt: {_line(e)}") from e
        groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
        _check(file, metadata, groups, schema, end)
        before = _alike.before
        alike = before if before is not None and schema.equals(before.schema, check_metadata=True) else _Alike(schema)
        rows, cuts = alike.cuts([g.num_rows for g in groups])
        _alike.before = alike
        return FileInfo(
            file=file,
            extent=metadata.num_rows,
            cuts=cuts,
            divisible=True,
            schema=alike.plain,
            cut_rows=rows,
            nulls=alike.same_nulls(_nulls(metadata, groups)),
            layout=hashlib.blake2b(footer[:-8], digest_size=16).hexdigest(),
        )

    def read(self, info: FileInfo, fs: Storage, ranges: np.ndarray, reading: Reading) -> Iterator[Block]:
        """Blocks of at most 65,536 rows. If data is corrupt, the rows from there to the end of the row group are bad if
        `reading.damaged` is set; otherwise raises BadSource, naming file and row group.
        """
        wanted = as_ranges(ranges)
        if not len(wanted):
            return
        unit = int96.unit_of(reading.options)
        key = (info.file.path, info.file.size, info.file.stamp, info.file.touched, unit)
        opened = _waiting.take(key, lambda: _Opened(info.file, fs, unit))
        sound = False
        try:
            for group in opened.groups(wanted):
                ranges = clip(wanted, int(opened.starts[group]), int(opened.starts[group + 1]))
                try:
                    yield from _read_group(opened, group, ranges, reading)
                except _Damaged as e:
                    if not reading.damaged:
                        raise BadSource(f"{opened.path}: {e}; {_GOES_ON}") from e
                    opened.begin_anew()
                    yield from _bad(clip(ranges, e.row, int(ranges[-1, 1])), str(e), reading)
            sound = True
        except GeneratorExit:
            sound = True  # the caller stopped early; the streams are still good
            raise
        finally:
            _waiting.put(key, opened) if sound else opened.close()


# ---------------------------------------------------------------- planning


class _Alike:
    """What files with one schema share, of which a source may have a hundred thousand."""

    def __init__(self, schema: pa.Schema) -> None:
        import pyarrow as pa

        self.schema = schema
        self.plain = pa.schema([pa.field(f.name, plain(f.type)) for f in schema])
        self._cuts: tuple[list[int], tuple[np.ndarray, np.ndarray]] | None = None
        self._nulls: dict[str, int] | None = None

    def cuts(self, groups: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The rows of each row group, and the positions at which they begin and the last one ends."""
        if self._cuts is None or self._cuts[0] != groups:
            rows = np.array(groups, dtype=np.int64)
            ends = np.concatenate(([0], np.cumsum(rows))).astype(np.int64)
            rows.flags.writeable = ends.flags.writeable = False
            self._cuts = groups, (rows, ends)
        return self._cuts[1]

    def same_nulls(self, nulls: dict[str, int] | None) -> dict[str, int] | None:
        """The same counts, as one object where the last file had them, too."""
        if nulls != self._nulls:
            self._nulls = nulls
        return self._nulls


class _Before(threading.local):
    before: _Alike | None = None


_alike = _Before()


def _footer(file: SourceFile, fs: Storage) -> tuple[bytes, int]:
    """The footer with its length and magic, and where the data before it ends."""
    with open_input(fs, file.path) as opened:
        size = opened.size()
        if size < 12:
            raise BadSource(f"{file.path}: {size} bytes cannot be a Parquet file: it is empty or truncated")
        tail = opened.read_at(min(size, _TAIL), max(0, size - _TAIL))
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if tail[-4:] == b"PARE":
            raise BadSource(f"{file.path}: an encrypted Parquet file, which cannot be read: decrypt it first")
        if tail[-4:] != _MAGIC:
            begins = opened.read_at(4, 0)
            what = "truncated: the footer is missing" if begins == _MAGIC else f"not Parquet: it begins with {begins!r}"
            raise BadSource(f"{file.path}: {what} ({size} bytes)")
        if length + 4 > size:
            raise BadSource(f"{file.path}: the Parquet footer is corrupt: it claims {length - 8} of {size} bytes")
        if length > len(tail):
            tail = opened.read_at(length, size - length)
    return tail[-length:], size - length


def _check(file: SourceFile, metadata: Any, groups: Sequence[Any], schema: pa.Schema, end: int) -> None:
    doubled = (
        [n for n in set(schema.names) if schema.names.count(n) > 1] if len(set(schema.names)) < len(schema) else []
    )
    if doubled:
        raise BadSource(f"{file.path}: column {sorted(doubled)[0]!r} appears more than once in the file")
    held = [group for group in groups if group.num_rows]
    if held and metadata.num_columns:  # columns of a group without rows may have no page
        last = held[-1].column(metadata.num_columns - 1)
        start = min((o for o in (last.dictionary_page_offset, last.data_page_offset) if o), default=0)
        if start + last.total_compressed_size > end:
            raise BadSource(
                f"{file.path}: truncated: the footer refers to data up to byte {start + last.total_compressed_size}"
            )
    if sum(g.num_rows for g in groups) != metadata.num_rows:
        raise BadSource(f"{file.path}: the Parquet footer is corrupt: its row groups do not add up to its rows")


def _nulls(metadata: Any, groups: Sequence[Any]) -> dict[str, int] | None:
    """Null counts by top-level column, for those whose nulls every row group counts."""
    if len(groups) * metadata.num_columns > _STATISTICS:
        return None
    out: dict[str, int] = {}
    for i in range(metadata.num_columns):
        leaf = metadata.schema.column(i)
        if leaf.max_repetition_level or leaf.max_definition_level > 1 or leaf.path != leaf.name:
            continue  # a null in a nested column cannot be told from a null in what holds it
        if leaf.max_definition_level == 0:
            out[leaf.name] = 0
            continue
        counts = [
            s.null_count if s is not None and s.has_null_count else None
            for s in (g.column(i).statistics for g in groups)
        ]
        if None not in counts:
            out[leaf.name] = sum(c for c in counts if c is not None)
    return out


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


# ---------------------------------------------------------------- reading


class _Damaged(Exception):
    """Data that cannot be decoded: `row` of the file, and those after it in its row group."""

    row = 0


def _bad(ranges: np.ndarray, why: str, reading: Reading) -> Iterator[Block]:
    """The rows of `ranges` as bad ones."""
    names = reading.schema.names if reading.columns is None else reading.columns
    none = reading.schema.empty_table().select(list(names))
    positions = inside(ranges)
    for at in range(0, len(positions), _BAD_ROWS):
        bad = tuple(BadRow(p, b"", "Damaged", why) for p in positions[at : at + _BAD_ROWS].tolist())
        yield Block(none, positions[:0], 0, bad)


def _read_group(opened: _Opened, group: int, wanted: np.ndarray, reading: Reading) -> Iterator[Block]:
    """One row group, a window of rows at a time. If there is a condition, its columns are read first, and the others
    only for the rows that it lets through. Raises _Damaged.
    """
    first = int(opened.starts[group])
    ranges = wanted - first
    names = list(reading.schema.names if reading.columns is None else reading.columns)
    asked = (() if reading.where is None else reading.where.columns) or tuple(names)
    lead = opened.stream(group, asked, reading)
    at, stop = int(ranges[0, 0]), int(ranges[-1, 1])
    try:
        while at < stop:
            window = lead.upto(at, stop)
            end = at + window.num_rows
            rows, index = _only(window, clip(ranges, at, end), at)
            if reading.where is None:
                yield Block(rows, index + first)
            else:
                others = tuple(n for n in names if n not in asked)
                for part in _let_through(rows, index, opened, group, reading, others):
                    yield Block(part.rows.select(names), part.index + first, part.filtered)
                    at = part.end
            following = int(np.searchsorted(ranges[:, 1], end, side="right"))
            at = stop if following == len(ranges) else max(end, int(ranges[following, 0]))
    except _Damaged as e:
        e.row = first + at
        raise


@dataclass(frozen=True)
class _Part:
    """Rows of a window that a condition lets through, at `index`, up to row `end`, and how many others there are."""

    rows: pa.Table
    index: np.ndarray
    filtered: int
    end: int


def _let_through(
    rows: pa.Table, index: np.ndarray, opened: _Opened, group: int, reading: Reading, others: tuple[str, ...]
) -> Iterator[_Part]:
    """The rows of a window, which are at `index`, for which the condition holds, with the columns that it did not need:
    as many at once as make a block of these. They are not read if no row is left.
    """
    import pyarrow as pa

    assert reading.where is not None
    kept = np.flatnonzero(reading.where.mask(rows))
    hits = index[kept]
    if len(hits) < len(index):
        rows = picked(rows, kept)
    if not others or not len(hits):
        empty = pa.schema([reading.schema.field(n) for n in others]).empty_table()
        yield _Part(_beside(rows, empty), hits, len(index) - len(hits), int(index[-1]) + 1)
        return
    stream = opened.stream(group, others, reading)
    done = seen = 0  # of hits and of rows
    while done < len(hits):
        begin = int(hits[done])
        more = int(np.searchsorted(hits, begin + stream.batch_rows))
        stop = int(hits[more]) if more < len(hits) else int(index[-1]) + 1
        found = stream.exactly(begin, int(hits[more - 1]) + 1)
        if more - done < found.num_rows:
            found = picked(found, hits[done:more] - begin)
        passed = int(np.searchsorted(index, stop))
        part = _beside(rows.slice(done, more - done), found)
        yield _Part(part, hits[done:more], passed - seen - (more - done), stop)
        done, seen = more, passed


def _beside(rows: pa.Table, others: pa.Table) -> pa.Table:
    for field, column in zip(others.schema, others.columns, strict=True):
        rows = rows.append_column(field, column)
    return rows


def _only(rows: pa.Table, ranges: np.ndarray, at: int) -> tuple[pa.Table, np.ndarray]:
    """The rows of a window that are in `ranges`, and their row numbers in the group. `at` is the window's first."""
    index = inside(ranges)
    if len(index) == rows.num_rows:
        return rows, index
    if len(ranges) == 1:
        return rows.slice(int(ranges[0, 0]) - at, len(index)), index
    return picked(rows, index - at), index


class _Stream:
    """Some columns of one row group, decoded forwards in batches. Going back starts again from its first row."""

    def __init__(self, opened: _Opened, group: int, columns: tuple[str, ...], reading: Reading) -> None:
        there, planned = frozenset(opened.schema.names), frozenset(reading.schema.names)
        if unknown := [c for c in columns if c not in there and c not in planned]:
            raise BadSource(f"{opened.path}: no column {unknown[0]!r}; it has {', '.join(opened.schema.names)}")
        self._here = [c for c in columns if c in there]  # the others are null for this file's rows
        self._int96 = [c for c in self._here if c in opened.int96]
        self._opened = opened
        self._group = group
        self._columns = columns
        self.schema = reading.schema
        self._block_bytes = reading.block_bytes
        self.batch_rows = opened.batch_rows(group, tuple(self._here), reading.block_bytes)
        self._start()

    def _start(self) -> None:
        self._batches = self._opened.decoded(self._group, self._here, self.batch_rows)
        self._beside = self._opened.beside(self._group, self._int96, self.batch_rows) if self._int96 else iter(())
        self._held: Any = None
        self._too_large = False
        self._first = self._next = 0  # rows of the group that the held batch covers

    def upto(self, at: int, stop: int) -> pa.Table:
        """Rows from `at` up to `stop` or the end of the batch that holds `at`; at least one."""
        if at < self._first:
            self._start()
        while at >= self._next:
            self._advance()
        return self._held.slice(at - self._first, min(stop, self._next) - at)

    def exactly(self, at: int, stop: int) -> pa.Table:
        """Rows [at, stop)."""
        import pyarrow as pa

        parts = []
        while at < stop:
            parts.append(self.upto(at, stop))
            at += parts[-1].num_rows
        return parts[0] if len(parts) == 1 else pa.concat_tables(parts)

    def _advance(self) -> None:
        import pyarrow as pa

        if self._too_large:
            self._start()
        with _named(self._group):
            batch = next(self._batches, None)
            beside = next(self._beside, None) if self._int96 else batch
        if batch is None or beside is None:
            raise _Damaged(f"row group {self._group} has fewer rows than the footer says: corrupt")
        for name in self._int96:
            if wrong := int96.misfit(batch.column(name), beside.column(name), self._opened.unit):
                raise BadSource(f"{self._opened.path}: column {name!r}, row group {self._group}: {wrong}")
        self._held = self._cast(pa.Table.from_batches([batch]))
        self._first, self._next = self._next, self._next + batch.num_rows
        size = self._held.nbytes  # not the batch's: one with a dictionary has all of it, however few its rows
        if size > _TOO_LARGE * self._block_bytes and batch.num_rows > 1:
            self.batch_rows = max(1, batch.num_rows * self._block_bytes // size)
            self._too_large = True

    def _cast(self, rows: pa.Table) -> pa.Table:
        import pyarrow as pa

        try:
            found = conform(rows.select(self._here), self.schema)
            if len(self._here) < len(self._columns):
                fields = [(found if n in self._here else self).schema.field(n) for n in self._columns]
                there = (found.column(f.name) if f.name in self._here else _nulls_of(f, rows) for f in fields)
                found = pa.Table.from_arrays(list(there), schema=pa.schema(fields))
            return found
        except pa.ArrowInvalid as e:
            raise BadSource(
                f"{self._opened.path}: row group {self._group} does not have the planned types: {_line(e)}"
            ) from e


def _nulls_of(field: pa.Field, rows: pa.Table) -> pa.Array:
    import pyarrow as pa

    return pa.nulls(rows.num_rows, field.type)


class _named:
    """Turns a decoder's error about corrupt data into a _Damaged with the row group."""

    def __init__(self, group: int) -> None:
        self._group = group

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        import pyarrow as pa

        data = isinstance(error, pa.ArrowException) and not isinstance(error, MemoryError)
        if error is not None and (data or _undecodable(error)):
            raise _Damaged(f"row group {self._group} cannot be read: {_line(error)}") from error


def _undecodable(error: BaseException) -> bool:
    """Decoders raise OSError without a number; one with a number comes from the disk or store, and may be retried."""
    return isinstance(error, OSError) and error.errno is None


def _buffer(footer: Any, most: int) -> int:
    """How much of a column chunk is read at a time, `most` or less: it is streamed, as a row group may be larger than
    memory. Each of the columns takes so much, and the kernel clears it: no more than chunks of this file are long.
    """
    groups = (footer.row_group(g).total_byte_size for g in range(footer.num_row_groups))
    mean = max(groups, default=0) // max(1, footer.num_columns)
    return int(min(most, max(_LEAST_BUFFER, mean)))


class _Opened:
    """A file with its footer parsed, and its open streams. One thread at a time holds it."""

    def __init__(self, file: SourceFile, fs: Storage, unit: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.unit = unit  # of INT96 timestamps
        self.path = file.path
        self._input = open_input(fs, file.path)
        try:
            footer = pq.read_metadata(self._input)
            self._options: dict[str, Any] = {
                "buffer_size": _buffer(footer, 8 << 20 if "://" in file.path else 1 << 20),
                "pre_buffer": False,
                "page_checksum_verification": True,
            }
            self.file = pq.ParquetFile(self._input, metadata=footer, coerce_int96_timestamp_unit=unit, **self._options)
        except (pa.ArrowException, OSError) as e:
            self._input.close()
            if isinstance(e, OSError) and not _undecodable(e):
                raise
            raise BadSource(f"{file.path}: the Parquet footer cannot be read: {_line(e)}") from e
        self.schema = self.file.schema_arrow
        metadata = self.file.metadata
        rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        self.starts = np.concatenate(([0], np.cumsum(rows))).astype(np.int64)
        self._streams: OrderedDict[Any, _Stream] = OrderedDict()
        self.int96 = int96.columns(metadata.schema, frozenset(self.schema.names))
        self._beside: Any = None
        self._row_bytes: dict[tuple[str, ...], float] = {}  # of decoded rows, by columns
        self._typed: tuple[Any, tuple[str, ...], bytes] = (None, (), b"")  # the types of some columns, in one form

    def groups(self, ranges: np.ndarray) -> Iterator[int]:
        """The row groups that `ranges` touch, in order."""
        for group in range(len(self.starts) - 1):
            if self.starts[group] < self.starts[group + 1] and len(
                clip(ranges, self.starts[group], self.starts[group + 1])
            ):
                yield group

    def stream(self, group: int, columns: tuple[str, ...], reading: Reading) -> _Stream:
        """The open stream over these columns, else a new one."""
        import pyarrow as pa

        # As bytes: an extension type of the user's own may have no hash.
        if reading.schema is not self._typed[0] or columns != self._typed[1]:
            planned = frozenset(reading.schema.names)
            types = pa.schema([reading.schema.field(n).remove_metadata() for n in columns if n in planned])
            self._typed = reading.schema, columns, types.serialize().to_pybytes()
        key = (group, columns, self._typed[2], reading.block_bytes)
        found = self._streams.pop(key, None) or _Stream(self, group, columns, reading)
        self._streams[key] = found
        while len(self._streams) > 2:  # a condition's and the others'
            self._streams.popitem(last=False)
        return found

    def begin_anew(self) -> None:
        """Let go of streams that an error has left in an unknown state."""
        self._streams.clear()

    def decoded(self, group: int, columns: Sequence[str], rows: int) -> Any:
        """Batches of columns of a row group, so many rows each; of no columns the first one, which tells how many."""
        return self.file.iter_batches(
            rows, row_groups=[group], columns=list(columns) or self.schema.names[:1], use_threads=True
        )

    def beside(self, group: int, columns: Sequence[str], rows: int) -> Any:
        """The same with INT96 timestamps in the other unit."""
        import pyarrow.parquet as pq

        if self._beside is None:
            other = int96.other(self.unit)
            self._beside = pq.ParquetFile(
                self._input, metadata=self.file.metadata, coerce_int96_timestamp_unit=other, **self._options
            )
        return self._beside.iter_batches(rows, row_groups=[group], columns=list(columns), use_threads=True)

    def batch_rows(self, group: int, columns: tuple[str, ...], block_bytes: int) -> int:
        """Rows to decode at a time to make about one block. A footer tells how long texts are as they are encoded; of
        those in a dictionary, which are as long as they like, some rows are decoded, once for each choice of columns.
        """
        import pyarrow as pa

        rows = max(self.file.metadata.row_group(group).num_rows, 1)
        bytes_, hidden = self._sizes(group, frozenset(columns))
        most = int(min(_BATCH_ROWS, max(1, block_bytes // max(bytes_ / rows, 1.0))))
        few = int(min(max(block_bytes // max(hidden, 1), _LEAST_LOOKED_AT), _LOOKED_AT))  # each may be as long as all
        if not hidden or min(most, rows) <= few:
            return most
        if columns not in self._row_bytes:
            try:
                with _named(group):
                    batch = next(iter(self.decoded(group, columns, few)))
                    seen = conform(pa.Table.from_batches([batch]), pa.schema([]))  # values instead of dictionaries
            except (_Damaged, StopIteration):
                return few  # reading tells what is wrong
            self._row_bytes[columns] = max(seen.nbytes / max(seen.num_rows, 1), 1.0)
        return int(min(most, max(1, block_bytes // self._row_bytes[columns])))

    def _sizes(self, group: int, columns: frozenset[str]) -> tuple[float, int]:
        """Bytes of the values of some columns, and how many of these do not tell how long the values are."""
        metadata = self.file.metadata.row_group(group)
        bytes_, hidden = 0.0, 0
        for chunk in (metadata.column(i) for i in range(metadata.num_columns)):
            if columns.isdisjoint(int96.holders(chunk.path_in_schema)):
                continue
            encoded, width = chunk.total_uncompressed_size, _WIDTHS.get(chunk.physical_type)
            bytes_ += encoded if width is None else max(encoded, width * chunk.num_values)
            if width is None and not _AS_LONG.issuperset(chunk.encodings):
                hidden += encoded
        return bytes_, hidden

    def close(self) -> None:
        self._streams.clear()
        self._input.close()


_waiting: Waiting[_Opened] = Waiting(_KEPT_OPEN)

"""CSV files as a source, plain or compressed. Planning reads a file through once to find where its records begin; after
that, reading can start at any of these places.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.errors import MARKS, BadSource, nearest, undivided
from gristmill.job.formatoptions import known
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from gristmill.sources import openreaders
from gristmill.sources.blocks import blanked, not_utf8
from gristmill.sources.contract import Block, Reading
from gristmill.sources.csvrecords import Dialect
from gristmill.sources.csvrows import NULLS, Fields, check_kind
from gristmill.sources.lines import ENDLESS, Lines, cuts_of, joined, pieces, selected
from gristmill.sources.numbers import misread
from gristmill.sources.paths import Storage
from gristmill.sources.schema import INFERRED, NEVER, UNFIT, from_names
from gristmill.sources.stream import Stream, opened
from gristmill.values import dataclass

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["CsvSource", "TsvSource"]

_PIECE = 2 << 20  # bytes read at a time
_SAMPLE = 1 << 20  # bytes that types are inferred from; option sample_bytes
_TRIED = 1000  # sampled values of a column with a given type that are held against it
_ENOUGH = 20  # fewer tell nothing
_OPTIONS = ("types", "sample_bytes", "delimiter", "quote", "header", "names", "nulls", "encoding")


@dataclass(frozen=True)
class Layout:
    """A file's columns, where its first record after the header begins, and the characters that separate its fields."""

    names: tuple[str, ...]
    first: int
    dialect: Dialect


class CsvSource:
    """Comma-separated values with a header; a position is the byte at which the record begins. UTF-8 only.

    Newlines inside quotes belong to the value. Empty lines are not records. An empty value is null, in text columns
    too; `NA` and its like are null in other columns only. Option `nulls` lists other spellings. A record is a bad row
    if it has too few or too many fields, or a value that does not fit its column: a hexadecimal number; a number too
    large for a float; and, unless `types` names the column, a number with leading zeros or a plus, which would be lost,
    a whole number beyond 2^53 that a float would round, and 1 or 0 among truth values. A float keeps its value, not its
    spelling: 1.50 is 1.5. Options: delimiter (if none is given, a header without a comma is split at its tabs,
    semicolons or bars, whichever splits it and the first 20 records into equally many fields), quote ("" for none),
    header (false if there is none; `names` then gives the columns), nulls, sample_bytes.
    """

    name = "csv"
    suffixes: tuple[str, ...] = (".csv",)
    compressed = by_bytes = written = True
    typed = False
    delimiter = ","

    def inspect(self, file: SourceFile, fs: Storage, options: Mapping[str, Any]) -> FileInfo:
        """Reads the whole file. It can be cut at records about every 64 KB."""
        known(options, _OPTIONS, f"{self.name} source")
        dialect = self._dialect(options)
        with opened(file, fs) as stream:
            if stream.read(0, 2) in (b"\xff\xfe", b"\xfe\xff"):
                raise BadSource(f"{file.path}: UTF-16 text: convert it to UTF-8")
            layout = _layout(stream, dialect, options)
            cuts, rows, sample = _read_through(stream, layout, int(options.get("sample_bytes", _SAMPLE)))
        types = from_names(options.get("types"), file.path)
        _check_types(file, types, layout)
        count = int(rows.sum())
        return FileInfo(
            file=file,
            extent=int(cuts[-1]),
            cuts=cuts,
            divisible=False,
            schema=_infer(file.path, layout, sample, count, types, options),
            cut_rows=rows,
            row_bytes=float(cuts[-1]) / count if count else None,
        )

    def read(self, info: FileInfo, fs: Storage, ranges: np.ndarray, reading: Reading) -> Iterator[Block]:
        """Blocks of about `block_bytes` of text. A range begins at a cut or at the start of some record."""
        if info.rows == 0:
            return
        dialect = self._dialect(reading.options)
        with opened(info.file, fs) as stream:
            layout = _layout_of(info.file, stream, dialect, reading.options)
            dialect = layout.dialect
            fields = Fields(reading, layout.names, dialect, _nulls(reading.options), info.file.path)
            ranges = np.maximum(ranges, layout.first)
            for found in selected(stream, ranges, info.extent, reading.block_bytes, dialect.ends, anywhere=False):
                yield fields.block(found)

    def _dialect(self, options: Mapping[str, Any]) -> Dialect:
        delimiter = str(options.get("delimiter", self.delimiter))
        delimiter = {"tab": "\t", "\\t": "\t"}.get(delimiter, delimiter)
        quote = str(options.get("quote", '"') or "")
        for what, value, lengths in (("delimiter", delimiter, (1,)), ("quote", quote, (0, 1))):
            if len(value) not in lengths or value in ("\n", "\r") or not value.isascii():
                raise BadSource(f"{self.name} {what} is {value!r}: give one ASCII character")
        encoding = str(options.get("encoding", "utf-8")).lower().replace("_", "-")
        if encoding not in ("utf-8", "utf8", "utf-8-sig", "ascii"):
            raise BadSource(
                f"{self.name} encoding is {encoding!r}: only UTF-8 is read: convert the files (iconv does it)"
            )
        return Dialect(delimiter.encode(), quote.encode())


class TsvSource(CsvSource):
    """Tab-separated values, otherwise as CSV."""

    name = "tsv"
    suffixes: tuple[str, ...] = (".tsv", ".tab")
    delimiter = "\t"


def _nulls(options: Mapping[str, Any]) -> tuple[str, ...] | None:
    given = options.get("nulls")
    return None if given is None else (given,) if isinstance(given, str) else tuple(str(n) for n in given)


# A header is at the start, and compressed files are read forwards only.
_layouts: dict[Any, Layout] = openreaders.forgotten({})


def _layout_of(file: SourceFile, stream: Stream, dialect: Dialect, options: Mapping[str, Any]) -> Layout:
    key = (
        file.path,
        file.size,
        file.stamp,
        file.touched,
        dialect,
        str(options.get("header")),
        str(options.get("names")),
    )
    found = _layouts.get(key)
    if found is None:
        if len(_layouts) >= 256:
            _layouts.clear()
        found = _layouts[key] = _layout(stream, dialect, options)
    return found


def _layout(stream: Stream, dialect: Dialect, options: Mapping[str, Any]) -> Layout:
    header = str(options.get("header", True)).lower() not in ("false", "no", "0", "none")
    names = options.get("names")
    for piece in pieces(stream, 0, ENDLESS, ENDLESS, 1 << 16, dialect.ends):
        found = piece.lines()
        if not len(found):
            continue
        record, begins = found.line(0), int(found.position[0])
        ends = int(piece.ends[np.searchsorted(piece.ends, found.stop[0])]) + piece.at + 1
        fields = _split(stream.path, record, dialect)
        if names is not None and len(names) != len(fields):
            raise BadSource(
                f"{stream.path}: names lists {len(names)} columns, but the file's first record has {len(fields)}"
            )
        if header:
            plain = names is None and len(fields) == 1 and "delimiter" not in options and dialect.delimiter == b","
            if plain and (other := _other(stream, record, dialect)):
                return _layout(stream, other, {**options, "delimiter": other.delimiter})
            return Layout(_unique(stream.path, names or fields), ends, dialect)
        return Layout(_unique(stream.path, names or [f"f{i}" for i in range(len(fields))]), begins, dialect)
    return Layout(tuple(names or ()), 0, dialect)


def _other(stream: Stream, header: bytes, dialect: Dialect) -> Dialect | None:
    """The dialect of a file whose header is a single field in `dialect`: with the usual separator that splits the
    records into the most fields, if it gives all the first records equally many.
    """
    others = [replace(dialect, delimiter=mark) for mark in MARKS if mark in header]
    try:
        found = {one: {len(_split(stream.path, r, one)) for r in _first(stream, one)} for one in others}
    except BadSource:  # a bad record, which its reader reports
        return None
    best = max(found, key=lambda one: min(found[one], default=0), default=dialect)
    return best if len(found.get(best, ())) == 1 and found[best] != {1} else None


def _first(stream: Stream, dialect: Dialect) -> list[bytes]:
    """The header and the records after it, at most 20, as a delimiter cuts them: it decides which quotes open a field,
    and so which newlines belong to a value.
    """
    piece = next(pieces(stream, 0, ENDLESS, _SAMPLE, _SAMPLE, dialect.ends), None)
    if piece is None:
        return []
    found = piece.lines()
    records = [found.line(i) for i in range(min(len(found), 20))]
    if len(records) > 1 and (len(piece.data) >= _SAMPLE or dialect.left_open(records[-1])):
        records.pop()  # it may go on
    most = csv.field_size_limit()
    return [r for i, r in enumerate(records) if i == 0 or len(r) <= most]


def _split(path: str, record: bytes, dialect: Dialect) -> list[str]:
    try:
        text = record.decode("utf-8")
    except UnicodeDecodeError as e:
        raise BadSource(f"{path}: the header is not UTF-8: byte 0x{record[e.start]:02x}: convert the file") from None
    if "\r" in text and dialect.quote.decode() not in text:
        raise BadSource(f"{path}: lines end in a bare carriage return: convert them to newlines")
    quote = dialect.quote.decode() or None
    mode: Any = csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE
    try:
        return next(
            csv.reader(io.StringIO(text), delimiter=dialect.delimiter.decode(), quotechar=quote, quoting=mode), []
        )
    except csv.Error as e:
        raise BadSource(f"{path}: the header cannot be read: {e}") from None


def _unique(path: str, names: Any) -> tuple[str, ...]:
    out = tuple(str(n) for n in names)
    doubled = next((n for n in out if out.count(n) > 1), None) if len(set(out)) < len(out) else None
    if doubled is not None:
        raise BadSource(
            f"{path}: column {doubled!r} appears more than once in the header: name all columns with "
            "options={'names': ['a', 'b', …]} (source.options.names in a job file or with --set)"
        )
    return out


def _read_through(stream: Stream, layout: Layout, most: int) -> tuple[np.ndarray, np.ndarray, list[Lines]]:
    """Cuts, the number of records between them, and a sample: the first piece, then pieces at doubling distances."""
    cuts, rows, sample = [np.zeros(1, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], []
    lines = 0
    for number, piece in enumerate(pieces(stream, 0, ENDLESS, ENDLESS, _PIECE, layout.dialect.ends)):
        found = piece.lines()
        if (stray := layout.dialect.astray(found.data, found.start, found.stop)) is not None:
            line = lines + found.data[: int(found.start[stray[0]])].count(b"\n") + 1
            raise BadSource(
                f"{stream.path}: line {line:,}: this record opens a quote that {stray[1]}: all of that would be "
                f"read as one row{undivided(layout.names)}. Close or double the quote, turn quoting off (options="
                "{'quote': ''}, --set source.options.quote=''), or leave the file out "
                "(--on-bad-file skip, on_bad_file='skip')"
            )
        lines += found.data.count(b"\n")
        after = int(np.searchsorted(found.position, layout.first))
        found = Lines(found.data, found.start[after:], found.stop[after:], found.position[after:])
        places, counts = cuts_of(found, piece.at + len(piece.data))
        cuts.append(places)
        rows.append(counts)
        if len(found) and number & (number - 1) == 0:
            sample.append(found.head(int(found.start[0]) + (most if number == 0 else most // 8)))
    return np.concatenate(cuts), np.concatenate(rows), sample


def _check_types(file: SourceFile, types: Mapping[str, Any], layout: Layout) -> None:
    for name, kind in types.items():
        check_kind(file.path, name, kind)
        if layout.names and name not in layout.names:
            alike = nearest(name, layout.names)
            there = f"it has {', '.join(layout.names[:20])}{undivided(layout.names)}"
            hint = f"did you mean {alike!r}?" if alike and not undivided(layout.names) else there
            raise BadSource(f"{file.path}: types names column {name!r}, which the file does not have: {hint}")


def _infer(
    path: str,
    layout: Layout,
    sample: list[Lines],
    rows: int,
    types: Mapping[str, pa.DataType],
    options: Mapping[str, Any],
) -> pa.Schema:
    """Types of the sampled records, of as many `rows`. Dates stay text, and so do numbers that would not come back as
    written.
    """
    import pyarrow as pa

    found: dict[str, pa.DataType] = dict.fromkeys(layout.names, pa.null())
    unfit: dict[str, dict[bytes, bytes]] = {}
    if sample:
        one = joined(sample)
        one = blanked(one, not_utf8(one), b"\n")
        found = inferred(one, layout.names, layout.dialect, _nulls(options))
        unfit = _unfit(path, one, rows, layout, types, options) if types else {}
    found.update(types)
    fields = [pa.field(n, found[n], metadata=unfit.get(n)) for n in layout.names]
    return pa.schema(fields, metadata={INFERRED: b"text"})


def _unfit(
    path: str, one: Lines, rows: int, layout: Layout, types: Mapping[str, pa.DataType], options: Mapping[str, Any]
) -> dict[str, dict[bytes, bytes]]:
    """Marks for the columns with a type that was given and that hardly any of their sampled values fits; NEVER only if
    all `rows` of the file were looked at.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    names, nulls, out = layout.names, _nulls(options), {}
    fields = Fields(Reading(None, pa.schema(dict(types)), options={"types": types}), names, layout.dialect, nulls, path)
    text = Fields.parsed(one, None, names, dict.fromkeys(types, pa.string()), layout.dialect, (), skip=True)
    text = text.take(np.unique(np.linspace(0, len(text) - 1, _TRIED).astype(np.int64))) if len(text) else text
    whole = len(text) == rows
    empty = pa.array(["", *(NULLS if nulls is None else nulls)], pa.string())
    for name, kind in types.items():
        values = pa.concat_arrays([pa.array([], pa.string()), *text[name].chunks])
        values = values.filter(pc.invert(pc.is_in(pc.utf8_trim_whitespace(values), empty)))
        if len(values) < _ENOUGH or pa.types.is_string(kind) or pa.types.is_large_string(kind):
            continue
        refused, lost = fields.misfits(name, values)
        wrong = np.flatnonzero(refused | lost)
        fit = len(values) - len(wrong)
        if fit * 10 < len(values):
            said = fields.unfit(name, values[int(wrong[0])].as_py(), bool(lost[wrong[0]]))
            many = (
                f"only {fit} of {len(values)} sampled values fit"
                if fit
                else f"none of {len(values)} sampled values fits"
            )
            way = f"types={{{name!r}: 'string'}}, --set source.types.{name}=string, reads any"
            if len(spelled := values.take(pa.array(wrong)).unique()) == 1:
                null = spelled[0].as_py()
                way += f"; if {null!r} is null: options={{'nulls': [{null!r}]}}, --set source.options.nulls={null}"
            mark = NEVER if whole and not fit else UNFIT
            out[name] = {mark: f"{path}: {many} what types says: {said} ({way})".encode()}
    return out


def inferred(
    one: Lines, names: tuple[str, ...], dialect: Dialect, nulls: tuple[str, ...] | None
) -> dict[str, pa.DataType]:
    """The type of each column of some records."""
    import pyarrow as pa
    import pyarrow.compute as pc

    t = pa.types
    text = Fields.parsed(one, None, names, dict.fromkeys(names, pa.string()), dialect, ("",), skip=True)
    guess = Fields.parsed(one, None, names, {}, dialect, NULLS if nulls is None else nulls, skip=True)
    out = {}
    for name in names:
        kind = guess.schema.field(name).type
        if t.is_temporal(kind):
            kind = pa.string()
        elif (t.is_integer(kind) or t.is_floating(kind)) and misread(text[name], guess[name]):
            kind = pa.string()  # 007, +49 and 0x10 are not numbers, nor is what a float cannot hold
        elif t.is_floating(kind):
            whole = pc.match_substring_regex(text[name], r"^\s*-?[0-9]+\s*$")
            if pc.all(pc.or_(whole, guess[name].is_null())).as_py():
                kind = pa.string()  # whole numbers beyond 64 bits
        out[name] = kind
    return out

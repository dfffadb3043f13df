"""Records of CSV into rows, by pyarrow's CSV reader."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.arrow.frompython import opened_bytes
from gristmill.errors import BadSource
from gristmill.sources.blocks import assembled, blanked, not_utf8, wanted
from gristmill.sources.contract import BadRow, Block, Reading
from gristmill.sources.csvmisfits import PLAIN, misfits
from gristmill.sources.csvrecords import Dialect
from gristmill.sources.lines import BOM, Lines
from gristmill.sources.numbers import far, misread, sound, zone_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["NULLS", "Fields", "check_kind"]

NULLS = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "Null", "null", "None")  # pandas's and R's; NaN is a float
_PARSE = 1 << 20  # bytes that one thread parses at a time, pyarrow's default
_NEAR = 1 << 17  # bytes scanned together, which fit in a core's cache
_FEW = 8  # records that are not worth a parse of their own as text
_SHOWN = 80  # characters of a value in a message


class Fields:
    """Turns blocks of records into blocks of rows, as one `Reading` asks. If `nulls` is None, the usual spellings are
    null, but in text columns only the empty value is.
    """

    def __init__(
        self, reading: Reading, names: Sequence[str], dialect: Dialect, nulls: tuple[str, ...] | None, path: str
    ) -> None:
        import pyarrow as pa

        self._reading, self._names, self._dialect, self._nulls = reading, tuple(names), dialect, nulls
        self._wanted = wanted(reading)[1]
        self._target = pa.schema([f for f in self._wanted if f.name in names])  # the others are null for this file
        for field in self._target:
            check_kind(path, field.name, field.type)
        self._told = frozenset(reading.options.get("types") or ())
        # 1 and 0 are truth values if `types` asks for them; otherwise they are numbers.
        self._ones = any(pa.types.is_boolean(f.type) for f in self._target if f.name in self._told)
        wire = {f.name: pa.float32() if pa.types.is_float16(f.type) else f.type for f in self._target}
        self._wire = wire or dict.fromkeys(
            self._names[:1], pa.string()
        )  # rows must be counted even if no column is wanted

    def block(self, found: Lines) -> Block:
        """Every record as a row, filtered, or bad."""
        bad = {i: _not_text(found, i) for i in not_utf8(found)}
        last = len(found) - 1
        if (
            last >= 0
            and found.data[int(found.stop[last]) :] in (b"", b"\r")
            and self._dialect.left_open(found.line(last))
        ):
            bad[last] = _bad(found, last, "UnclosedQuote", "a quote opens and is not closed before the end of the file")
        found = blanked(found, bad, b"\n")
        good = np.setdiff1d(np.arange(len(found)), list(bad)) if bad else np.arange(len(found))
        whole = self._table(found, good) if len(good) else None
        if whole is None and (more := self._mismatches(found, good)):
            bad.update(more)
            found = blanked(found, more, b"\n")
        return assembled(
            found,
            bad,
            self._reading,
            lambda part: self._table(found, part) if whole is None else whole,
            lambda i: self._single(found, i),
        )

    def _mismatches(self, found: Lines, part: np.ndarray) -> dict[int, BadRow]:
        """Records with a value that does not fit its column, found for many at once. What else is wrong with a record,
        or with few of them, is left to halving and `_single`.
        """
        import pyarrow as pa

        kinds = {n: k for n, k in self._wire.items() if not (pa.types.is_string(k) or pa.types.is_large_string(k))}
        out: dict[int, BadRow] = {}
        todo = [part] if kinds else []
        while todo:
            at = todo.pop()
            if len(at) < _FEW:
                continue
            try:
                text = None if _returns(found, at) else self._text(found, at, kinds)
            except pa.ArrowException:  # some record has another number of fields
                text = None
            if text is not None and text.num_rows == len(at):
                out.update(self._verdicts(found, at, text))
            else:
                todo += [at[: len(at) // 2], at[len(at) // 2 :]]
        return out

    def _verdicts(self, found: Lines, part: np.ndarray, text: pa.Table) -> dict[int, BadRow]:
        """For each bad record of some whose fields are `text`, why it is, by the first column that it does not fit."""
        import pyarrow.compute as pc

        out: dict[int, BadRow] = {}
        fits = np.ones(len(part), dtype=bool)
        for name in text.column_names:
            values = pc.unique(text[name])
            code = pc.index_in(text[name], value_set=values).to_numpy()
            refused, lost = self.misfits(name, values)
            spelled = values.to_pylist() if refused.any() or lost.any() else []
            for i in np.flatnonzero((refused | lost)[code] & fits).tolist():
                out[int(part[i])] = self._mismatch(found, int(part[i]), name, spelled[code[i]], bool(lost[code[i]]))
                fits[i] = False
        return out

    def misfits(self, name: str, values: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the values a column cannot hold, and which of the others it would change (bool each)."""
        import pyarrow as pa

        nulls = NULLS if self._nulls is None else self._nulls

        def parse(lines: Lines) -> pa.ChunkedArray:
            rows = self.parsed(lines, None, [name], {name: self._wire[name]}, PLAIN, nulls, ones=self._ones)
            return sound(rows.cast(pa.schema([(name, self._kind(name))]))).column(0)

        return misfits(values, self._kind(name), nulls, name in self._told, parse)

    def _text(self, found: Lines, part: np.ndarray, names: Iterable[str]) -> pa.Table:
        import pyarrow as pa

        return self.parsed(found, part, self._names, dict.fromkeys(names, pa.string()), self._dialect, ())

    def _kind(self, name: str) -> pa.DataType:
        return self._target.field(name).type if len(self._target) else self._wire[name]

    def _table(self, found: Lines, part: np.ndarray) -> pa.Table | None:
        import pyarrow as pa

        if len(part) > 1 and _returns(found, part):
            return None
        try:
            nulls = NULLS if self._nulls is None else self._nulls
            rows = self.parsed(found, part, self._names, self._wire, self._dialect, nulls, ones=self._ones)
            if rows.num_rows != len(part):
                return None
            rows = self._without_empty(rows)
            if rows.schema.types != self._target.types and len(self._target):
                rows = rows.cast(self._target)
            return None if self._misread(found, part, sound(rows)) else self._with_nulls(rows)
        except pa.ArrowException:
            return None

    def _with_nulls(self, rows: pa.Table) -> pa.Table:
        """The rows with the columns that this file lacks, as nulls."""
        import pyarrow as pa

        if len(self._target) == len(self._wanted):
            return rows
        nulls = {f.name: pa.nulls(rows.num_rows, f.type) for f in self._wanted if f.name not in self._target.names}
        columns = [nulls[f.name] if f.name in nulls else rows.column(f.name) for f in self._wanted]
        return pa.Table.from_arrays(columns, schema=self._wanted)

    def _misread(self, found: Lines, part: np.ndarray, rows: pa.Table) -> bool:
        """Whether some value differs from what its field says. Columns in which one may are parsed again, as text."""
        import pyarrow as pa

        t = pa.types
        first, last = int(found.start[part[0]]), int(found.stop[part[-1]])
        hexed = max(found.data.find(x, first, last) for x in (b"0x", b"0X")) >= 0
        numbers = {f.name for f in rows.schema if t.is_integer(f.type) or t.is_floating(f.type)} - self._told
        coded = numbers & self._coded(found, part) if numbers else numbers
        doubted = []
        for name, kind in zip(rows.column_names, rows.schema.types, strict=True):
            told = name in self._told
            if (
                (t.is_integer(kind) and hexed)
                or name in coded
                or (t.is_boolean(kind) and self._ones and not told)
                or (t.is_floating(kind) and far(rows.column(name), told).any())
            ):
                doubted.append(name)
        if not doubted:
            return False
        text = self.parsed(found, part, self._names, dict.fromkeys(doubted, pa.string()), self._dialect, ())
        return any(misread(text[n], rows.column(n), n in self._told) for n in doubted)

    def _coded(self, found: Lines, part: np.ndarray) -> set[str]:
        """Columns with a field that begins like 007 or +49; if quotes hide which fields these are, all columns."""
        first, last = int(found.start[part[0]]), int(found.stop[part[-1]])
        octets = np.frombuffer(found.data, dtype=np.uint8)[first:last]
        at = _zeros(octets)
        if found.data.find(b"+", first, last) >= 0:
            at = np.concatenate([at, np.flatnonzero(octets == ord("+"))])
        at = at[_begins(octets, at, self._dialect)]
        if not len(at):
            return set()
        if self._dialect.quote and found.data.find(self._dialect.quote, first, last) >= 0:
            return set(self._names)
        delimiters = np.flatnonzero(octets == self._dialect.delimiter[0])
        record = found.start[np.searchsorted(found.start, at + first, side="right") - 1] - first
        place = np.searchsorted(delimiters, at) - np.searchsorted(delimiters, record)
        return {self._names[i] for i in np.unique(place).tolist() if i < len(self._names)}

    def _without_empty(self, rows: pa.Table) -> pa.Table:
        """Turns empty text into null or, if `nulls` is given, the spellings in it."""
        import pyarrow as pa
        import pyarrow.compute as pc

        for i, field in enumerate(rows.schema):
            if not (pa.types.is_string(field.type) or pa.types.is_large_string(field.type)):
                continue
            column = rows.column(i)
            spelled = [""] if self._nulls is None else list(self._nulls)
            if spelled == [""]:
                least = pc.min(pc.binary_length(column)).as_py()
                if least is None or least > 0:
                    continue
            empty = pc.is_in(column, pa.array(spelled, field.type))
            rows = rows.set_column(i, field, pc.if_else(empty, pa.scalar(None, field.type), column))
        return rows

    def _single(self, found: Lines, i: int) -> BadRow:
        """Why a record is not a row."""
        import pyarrow as pa

        part = np.array([i])
        try:
            text = self._text(found, part, self._names)
        except pa.ArrowException as e:
            count = re.search(r"Expected \d+ columns, got (\d+)", str(e))
            if count is not None:
                return _bad(found, i, "FieldCount", f"{count[1]} fields, {len(self._names)} expected")
            return _bad(found, i, "CSVError", " ".join(str(e).split()))
        if text.num_rows != 1:
            return _bad(found, i, "CSVError", "a carriage return outside quotes")
        for name, kind in self._wire.items():
            lost = False
            try:
                nulls = NULLS if self._nulls is None else self._nulls
                rows = self.parsed(found, part, self._names, {name: kind}, self._dialect, nulls, ones=self._ones)
                lost = self._misread(found, part, sound(rows.cast(pa.schema([(name, self._kind(name))]))))
                if not lost:
                    continue
            except pa.ArrowException:
                pass
            return self._mismatch(found, i, name, str(text[name][0].as_py()), lost)
        return _bad(found, i, "CSVError", "the record cannot be parsed")

    def _mismatch(self, found: Lines, i: int, name: str, value: str, lost: bool) -> BadRow:
        return _bad(found, i, "TypeMismatch", self.unfit(name, value, lost))

    def unfit(self, name: str, value: str, lost: bool) -> str:
        """What is wrong with a value that its column cannot hold or, if `lost`, would hold as another one."""
        import pyarrow as pa

        kind, hint = self._kind(name), ""
        if lost:
            way = f", which the column cannot hold: types={{{name!r}: 'string'}} keeps it as written"
        else:
            hint = ", which had no value in the sample: fix it with types=" if pa.types.is_null(kind) else ""
            way = zone_of(kind, value)
        shown = repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "…")
        return f"column {name!r} is {kind}{hint}; here it is {shown}{way}"

    @staticmethod
    def parsed(
        found: Lines,
        part: np.ndarray | None,
        names: Sequence[str],
        types: Mapping[str, pa.DataType],
        dialect: Dialect,
        nulls: Sequence[str],
        skip: bool = False,
        ones: bool = False,
    ) -> pa.Table:
        """The records from the first to the last of `part` (None: all), with the columns of `types` (empty: all, with
        inferred types). Raises pyarrow.ArrowInvalid. With `skip`, records with a wrong number of fields are left out;
        with `ones`, 1 and 0 are truth values too.
        """
        import pyarrow.csv as pcsv

        part = np.arange(len(found)) if part is None else part
        first, last = int(found.start[part[0]]), int(found.stop[part[-1]])
        longest = int((found.stop[part] - found.start[part]).max())
        data: Any = memoryview(found.data)[first:last]
        if found.data.startswith(BOM, first):  # a value's own: of two, pyarrow takes one away
            data = BOM + found.data[first:last]
        convert: dict[str, Any] = {"include_columns": list(types), "column_types": dict(types)} if types else {}
        return pcsv.read_csv(
            opened_bytes(data),
            read_options=pcsv.ReadOptions(column_names=list(names), block_size=max(_PARSE, longest + 16)),
            parse_options=pcsv.ParseOptions(
                delimiter=dialect.delimiter.decode(),
                quote_char=dialect.quote.decode() or False,
                newlines_in_values=bool(dialect.quote) and dialect.quote in found.data,
                invalid_row_handler=(lambda _: "skip") if skip else None,
            ),
            convert_options=pcsv.ConvertOptions(
                check_utf8=False,
                null_values=list(nulls),
                true_values=["true", "True", "TRUE", *(["1"] if ones else [])],
                false_values=["false", "False", "FALSE", *(["0"] if ones else [])],
                **convert,
            ),
        )


def check_kind(path: str, name: str, kind: pa.DataType) -> None:
    """Raises BadSource if a CSV field cannot be of this type."""
    import pyarrow as pa

    if pa.types.is_nested(kind) or pa.types.is_duration(kind):
        raise BadSource(f"{path}: column {name!r} cannot be read from CSV as {kind}: read it as 'string'")


def _zeros(octets: np.ndarray) -> np.ndarray:
    """Indices of zeros that are followed by a digit and not preceded by a digit or a point."""
    out = [np.flatnonzero((octets[:1] == ord("0")) & (octets[1:2] - np.uint8(ord("0")) < 10))]
    for first in range(0, len(octets) - 2, _NEAR):
        piece = octets[first : first + _NEAR + 2]
        digit = piece - np.uint8(ord("0")) < 10
        which = piece[1:-1] == ord("0")
        which &= digit[2:]
        which &= ~digit[:-2]
        which &= piece[:-2] != ord(".")
        out.append(np.flatnonzero(which) + (first + 1))
    return np.concatenate(out)


def _begins(octets: np.ndarray, at: np.ndarray, dialect: Dialect) -> np.ndarray:
    """Whether there is nothing but a sign and spaces between each index of `at` and the beginning of its field."""
    edges = np.zeros(256, dtype=bool)
    edges[[10, 13, *dialect.delimiter, *dialect.quote]] = True
    space = np.zeros(256, dtype=bool)
    space[[9, 32]] = True
    space &= ~edges
    before = at - 1
    signed = (before >= 0) & np.isin(octets[before], (ord("+"), ord("-")))
    before = before - signed
    blank = np.flatnonzero((before >= 0) & space[octets[before]])
    while len(blank):
        before[blank] -= 1
        blank = blank[before[blank] >= 0]
        blank = blank[space[octets[before[blank]]]]
    begins: np.ndarray = (before < 0) | edges[octets[before]]
    return begins


def _not_text(found: Lines, i: int) -> BadRow:
    line = found.line(i)
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as e:
        return _bad(
            found, i, "UnicodeDecodeError", f"not UTF-8: byte 0x{line[e.start]:02x} at byte {e.start} of the record"
        )
    return _bad(found, i, "UnicodeDecodeError", "not UTF-8")


def _bad(found: Lines, i: int, error: str, message: str) -> BadRow:
    return BadRow(int(found.position[i]), found.line(i), error, message)


def _returns(found: Lines, part: np.ndarray) -> bool:
    """Whether the records have a carriage return that no newline follows. In a quoted field it belongs to the value;
    elsewhere pyarrow ends a row at it, and the rows may by chance be as many as the records, yet different.
    """
    first, last = int(found.start[part[0]]), int(found.stop[part[-1]])
    if found.data.find(b"\r", first, last) < 0:
        return False
    octets = np.frombuffer(found.data, dtype=np.uint8)[first:last]
    at = np.flatnonzero(octets[:-1] == 13)
    return bool((octets[at + 1] != 10).any())

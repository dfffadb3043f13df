"""Lines of JSON into rows: pyarrow parses whole blocks, and lines that stop it are found by halving."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.arrow.casts import Lossy, rebuilt
from gristmill.arrow.frompython import opened_bytes
from gristmill.errors import BadSource
from gristmill.sources.blocks import assembled, blanked, not_utf8, wanted
from gristmill.sources.contract import BadRow, Block, Reading
from gristmill.sources.lines import Lines
from gristmill.sources.numbers import Real, far, has_floats, holds, sound, zone_of
from gristmill.sources.schema import check

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Objects", "trimmed", "wire_of"]

_SPACE = np.zeros(256, dtype=bool)
_SPACE[[9, 13, 32]] = True  # what JSON skips between values, except the newline
_PARSE = 1 << 20  # bytes that one thread parses at a time, pyarrow's default
_SHOWN = 80  # characters of a value in a message
_DIGITS = re.compile(rb"[0-9]{16,}")  # whole numbers that a float may not hold have this many


class Objects:
    """Turns blocks of lines into blocks of rows, as one `Reading` asks."""

    def __init__(self, reading: Reading) -> None:
        import pyarrow as pa

        self._reading = reading
        self._target = wanted(reading)[1]
        check(reading.schema, self._target.names)
        self._wire = pa.schema([pa.field(f.name, wire_of(f.name, f.type)) for f in self._target])
        self._told = frozenset(reading.options.get("types") or ())
        self._floats = [f.name for f in self._target if has_floats(f.type)]
        self._names = (
            None if reading.columns is not None else frozenset(reading.schema.names)
        )  # None: other keys are left out
        self._nested = [f for f in self._wire if pa.types.is_nested(f.type) and f.name not in self._told]

    def block(self, found: Lines) -> Block:
        """Every line as a row, filtered, or bad. Lines of nothing but white space are skipped."""
        found = trimmed(found)
        bad = {i: _explained(found, i) for i in [*_no_object(found), *not_utf8(found)]}
        found = blanked(found, bad, b" ")
        return assembled(
            found, bad, self._reading, lambda part: self._table(found, part), lambda i: self._single(found, i)
        )

    def _table(self, found: Lines, part: np.ndarray) -> pa.Table | None:
        """The lines from the first to the last of `part` as rows, all between them being blank; None if a line stops
        it.

        Each line begins with { and ends with }, so no object can span two lines: as many rows as lines means one row
        per line.
        """
        import pyarrow as pa

        try:
            rows = self._typed(self._parsed(found, part))
        except (pa.ArrowException, ValueError, Lossy, _Bad, RecursionError):
            return None
        return None if rows.num_rows == len(part) and self._loses(found, part, rows) else rows

    def _parsed(self, found: Lines, part: np.ndarray) -> pa.Table:
        """Raises pyarrow.ArrowInvalid if a value does not fit, and _Bad for a value whose key has no column."""
        import pyarrow as pa
        import pyarrow.json as pj

        first, last = int(found.start[part[0]]), int(found.stop[part[-1]])
        longest = int((found.stop[part] - found.start[part]).max())

        def rows(others: str) -> pa.Table:
            return pj.read_json(
                opened_bytes(memoryview(found.data)[first:last]),
                read_options=pj.ReadOptions(block_size=max(_PARSE, longest + 16)),
                parse_options=pj.ParseOptions(explicit_schema=self._wire, unexpected_field_behavior=others),
            )

        if self._names is not None:
            try:
                return rows("error")  # a key without a column, or another fault: the next reading tells which
            except pa.ArrowException:
                pass
        parsed = rows("ignore")
        if self._names is not None or self._nested:
            self._look(found, part)
        return parsed

    def _look(self, found: Lines, part: np.ndarray) -> None:
        """Raises _Bad if a line has a value under a key that has no column, or no field in a column that is read."""
        for line in map(found.line, part.tolist()):
            value = json.loads(line)
            if self._names is not None:
                _no_others(value, self._names, "")
            for field in self._nested:
                _no_other_fields(value.get(field.name), field.type, field.name)

    def _typed(self, rows: pa.Table) -> pa.Table:
        """The parsed rows with the wanted types. Raises pyarrow.ArrowInvalid if a value does not fit."""
        import pyarrow as pa

        if self._wire == self._target:
            return sound(rows)
        columns = [
            pa.chunked_array([rebuilt(c, f.type, _read) for c in rows.column(f.name).chunks], f.type)
            for f in self._target
        ]
        return sound(pa.Table.from_arrays(columns, schema=self._target))

    def _loses(self, found: Lines, part: np.ndarray, rows: pa.Table) -> bool:
        """Whether a float differs from the number in its line. Only lines with large numbers are looked at."""
        floats = [(rows.column(name), name in self._told) for name in self._floats]
        large = np.zeros(len(found), dtype=bool)
        for column, told in floats:
            large[part] |= far(column, told)
        if not large.any():
            return False
        doubted = np.zeros(len(found), dtype=bool)
        doubted[_digits(found, part)] = True
        doubted &= large
        for column, _ in floats:
            doubted[part] |= far(column, True)
        for line in map(found.line, np.flatnonzero(doubted).tolist()):
            try:
                self._fitted(_decoded(line))
            except (_Bad, RecursionError):
                return True
        return False

    def _fitted(self, value: dict[str, Any]) -> dict[str, Any]:
        if self._names is not None:
            _no_others(value, self._names, "")
        return {f.name: _fit(value.get(f.name), f.type, f.name, f.name in self._told) for f in self._target}

    def _single(self, found: Lines, i: int) -> pa.Table | BadRow:
        """A line that pyarrow refused: a row if its values fit the columns without loss, else the reason why not."""
        import pyarrow as pa

        try:
            value = _decoded(found.line(i))
            return self._typed(pa.Table.from_pylist([self._fitted(value)], schema=self._wire))
        except _Bad as e:
            if e.error == "UnknownKey" and (row := self._left_out(found, i)) is not None:
                return row
            return BadRow(int(found.position[i]), found.line(i), e.error, str(e))
        except (pa.ArrowException, UnicodeError, OverflowError, RecursionError) as e:
            return BadRow(int(found.position[i]), found.line(i), type(e).__name__, " ".join(str(e).split()))

    def _left_out(self, found: Lines, i: int) -> pa.Table | None:
        """A line as a row without the keys that have no column, if the condition excludes it; else None."""
        import pyarrow as pa

        if self._reading.where is None:
            return None
        try:
            value = {f.name: _fit(_decoded(found.line(i)).get(f.name), f.type, f.name, True) for f in self._target}
            row = self._typed(pa.Table.from_pylist([value], schema=self._wire))
            return None if self._reading.where.mask(row).any() else row
        except (_Bad, pa.ArrowException):
            return None


class _Bad(Exception):
    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error


def trimmed(found: Lines) -> Lines:
    """The lines without surrounding white space; lines that have nothing else are dropped."""
    octets = np.frombuffer(found.data, dtype=np.uint8)
    some = np.flatnonzero(_SPACE[octets[found.start]] | _SPACE[octets[found.stop - 1]])
    if not len(some):
        return found
    start, stop = found.start.copy(), found.stop.copy()
    left = right = some
    for _ in range(64):  # all lines at once, a character at a time; a longer run of spaces is rare
        left = left[start[left] < stop[left]]
        left = left[_SPACE[octets[start[left]]]]
        start[left] += 1
    for _ in range(64):
        right = right[start[right] < stop[right]]
        right = right[_SPACE[octets[stop[right] - 1]]]
        stop[right] -= 1
    for i in np.union1d(left, right).tolist():
        text = np.flatnonzero(~_SPACE[octets[start[i] : stop[i]]])
        stop[i] = start[i] + (text[-1] + 1 if len(text) else 0)
        start[i] += text[0] if len(text) else 0
    full = start < stop
    return Lines(found.data, start[full], stop[full], found.position[full])


def _digits(found: Lines, part: np.ndarray) -> np.ndarray:
    """Lines among those of `part`, and between them, with a run of many digits; some more than once."""
    first, last = int(found.start[part[0]]), int(found.stop[part[-1]])
    runs = [m.start() for m in _DIGITS.finditer(found.data, first, last)]
    return np.searchsorted(found.start, np.array(runs, dtype=np.int64), side="right") - 1


def _no_object(found: Lines) -> list[int]:
    """Lines that do not begin with { and end with }."""
    octets = np.frombuffer(found.data, dtype=np.uint8)
    looks = (octets[found.start] == ord("{")) & (octets[found.stop - 1] == ord("}"))
    return [] if looks.all() else np.flatnonzero(~looks).tolist()


def _explained(found: Lines, i: int) -> BadRow:
    try:
        _decoded(found.line(i))
    except _Bad as e:
        return BadRow(int(found.position[i]), found.line(i), e.error, str(e))
    return BadRow(int(found.position[i]), found.line(i), "JSONDecodeError", "not one JSON object")


def _decoded(line: bytes) -> dict[str, Any]:
    """A line's object. Raises _Bad if it is not one."""
    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=_once, parse_float=Real)
    except UnicodeDecodeError as e:
        raise _Bad(
            "UnicodeDecodeError", f"not UTF-8: byte 0x{line[e.start]:02x} at byte {e.start} of the line"
        ) from None
    except json.JSONDecodeError as e:
        raise _Bad("JSONDecodeError", f"{e.msg.removesuffix(' at')} at character {e.pos} of the line") from None
    except RecursionError:
        raise _Bad("JSONDecodeError", "nested too deeply") from None
    if not isinstance(value, dict):
        what = {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")
        raise _Bad("NotAnObject", f"a JSON {what}; each line must be an object")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [n for n, _ in pairs]
        raise _Bad("DuplicateKey", f"key {next(n for n in names if names.count(n) > 1)!r} appears twice in one object")
    return out


def _fit(value: Any, kind: pa.DataType, name: str, told: bool) -> Any:
    """A value as its column's type if that loses nothing: whole floats as integers, anything as text. `told`: the type
    was given, so that floats may round.
    """
    import pyarrow as pa

    t = pa.types
    hint, lost = ", which had no value in the sample: fix it with types=" if t.is_null(kind) else "", ""
    if value is None:
        return None
    if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        return value if isinstance(value, str) else _text(value)
    if t.is_integer(kind):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, Real) and value.is_integer() and (exact := Decimal(value.text)) == int(exact):
            return int(exact)
    elif t.is_floating(kind):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if holds(kind, value, told):
                return float(value)
            lost = f", which a {kind} cannot hold: types= with 'string' keeps it as written"
    elif t.is_boolean(kind):
        if isinstance(value, bool):
            return value
    elif t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        if isinstance(value, list):
            return [_fit(v, kind.value_type, name, told) for v in value]
    elif t.is_struct(kind) and isinstance(value, dict):
        if not told:
            _no_others(value, {f.name for f in kind}, f"{name}.")
        return {f.name: _fit(value.get(f.name), f.type, f"{name}.{f.name}", told) for f in kind}
    elif t.is_decimal(kind) and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return pa.scalar(value if isinstance(value, str) else _text(value)).cast(kind).as_py()
        except pa.ArrowException:
            pass
    elif isinstance(value, str) and wire_of(name, kind) == pa.string():
        try:
            _read(pa.array([value]), kind)
            return value
        except pa.ArrowException:
            lost = zone_of(kind, value)
    shown = _text(value)
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
    raise _Bad("TypeMismatch", f"column {name!r} is {kind}{hint}; here it is {shown}{lost}")


def _no_others(value: Mapping[str, Any], names: Collection[str], inside: str) -> None:
    """Raises _Bad for a key that has a value but no column, or no field in one."""
    for key, item in value.items():
        if item is not None and key not in names:
            column = f"{inside}{key}".partition(".")[0]
            raise _Bad(
                "UnknownKey",
                f"key {inside + key!r} has no column: columns are found in a sample of lines, and none of these had "
                f"it; give the type of {column!r} with types=, a larger sample with "
                f"options={{'sample_bytes': 100000000}}, or list the columns you need with columns=",
            )


def _has_fields(kind: pa.DataType) -> bool:
    """Whether the type contains structs."""
    import pyarrow as pa

    return pa.types.is_struct(kind) or (pa.types.is_nested(kind) and _has_fields(kind.field(0).type))


def _no_other_fields(value: Any, kind: pa.DataType, name: str) -> None:
    """As `_no_others`, for structs at any depth."""
    import pyarrow as pa

    if isinstance(value, dict) and pa.types.is_struct(kind):
        _no_others(value, {f.name for f in kind}, f"{name}.")
        for field in kind:
            _no_other_fields(value.get(field.name), field.type, f"{name}.{field.name}")
    elif isinstance(value, list) and pa.types.is_list(kind) and _has_fields(kind):
        for item in value:
            _no_other_fields(item, kind.value_type, name)


def _text(value: Any) -> str:
    """A value as JSON, its numbers as they were written."""
    if isinstance(value, Real):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join([f"{json.dumps(n, ensure_ascii=False)}: {_text(v)}" for n, v in value.items()]) + "}"
    if isinstance(value, list):
        return "[" + ", ".join([_text(v) for v in value]) + "]"
    return json.dumps(value, ensure_ascii=False)


def _read(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Values that came from JSON, as `kind`. Raises pyarrow.ArrowInvalid if one does not fit."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_time(kind):
        return values.cast(kind)
    if pc.all(pc.match_substring_regex(values, r"^[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?$")).as_py() is False:
        raise pa.ArrowInvalid("not a time of day")
    day = pc.binary_join_element_wise("1970-01-01T", values, "")
    return day.cast(pa.timestamp(kind.unit)).cast(kind)


def wire_of(name: str, kind: pa.DataType) -> pa.DataType:
    """The type to ask pyarrow's JSON reader for, which can be cast to `kind`. Raises BadSource."""
    import pyarrow as pa

    t = pa.types
    if t.is_fixed_size_list(kind) or t.is_large_list(kind) or t.is_list(kind):
        return pa.list_(wire_of(name, kind.value_type))
    if t.is_struct(kind):
        return pa.struct([pa.field(f.name, wire_of(name, f.type)) for f in kind])
    if t.is_float16(kind):
        return pa.float32()
    if t.is_null(kind):
        return pa.bool_()  # of the nulls in a list, pyarrow's reader keeps only one
    if t.is_date(kind) or t.is_time(kind) or t.is_timestamp(kind):
        return pa.string()  # pyarrow's own way to read a timestamp drops its zone
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_string_view(kind):
        return pa.string()
    if t.is_map(kind) or t.is_union(kind) or t.is_duration(kind) or t.is_interval(kind):
        raise BadSource(f"column {name!r} cannot be read from JSON as {kind}: give another type")
    return kind

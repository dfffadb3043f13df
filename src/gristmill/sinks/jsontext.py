"""Arrow columns as JSON text, built by string functions over whole columns instead of value by value."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.arrow.casts import entries, lossless
from gristmill.arrow.schemas import is_string, plain
from gristmill.errors import BadOutput
from gristmill.sinks import jsonsizes
from gristmill.sinks.jsonyears import BEYOND, is_beyond

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["json_lines", "json_texts"]

_SLICE_BYTES = 96 << 20  # of text, at most, made at once
_SLICE_ROWS = 1 << 16
_ESCAPES = (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"))  # the backslash first


def json_lines(rows: pa.Table, raw: Collection[str] = ()) -> Iterator[memoryview]:
    """The rows as JSON, one object per line, in pieces of bytes. Text in the columns `raw` is JSON already.

    Floats are the shortest text that reads back as the same float; NaN and infinity, which JSON lacks, are the texts
    NaN, Infinity and -Infinity. Bytes are base64, times ISO 8601 (in UTC with a Z if they have a zone), a duration is
    its number of units, a map a list of objects with `key` and `value`. `jsonread` reads all of it back. Raises
    BadOutput for a day before the year 1 or after 9999, which ISO 8601 cannot write, and for a row over 2 GB.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    names = [json.dumps(name, ensure_ascii=False) for name in rows.column_names]
    for start, stop in _slices(rows):
        part = rows.slice(start, stop - start)
        pieces: list[Any] = []
        for i, name in enumerate(names):
            text = _raw if rows.column_names[i] in raw else _text
            pieces += [pa.scalar(("{" if i == 0 else ",") + name + ":"), text(_one(part.column(i)))]
        if not names:
            yield memoryview(b"{}\n" * part.num_rows)
            continue
        lines = pc.binary_join_element_wise(*pieces, pa.scalar("}\n"), pa.scalar(""))
        yield _bytes(lines)


def _slices(rows: pa.Table) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) that are turned to text at once."""
    sizes = jsonsizes.row_sizes(rows)
    for row in np.flatnonzero(sizes > jsonsizes.MOST).tolist():
        _check_size(int(jsonsizes.row_sizes(rows.slice(row, 1), exact=True)[0]))
    ends, start = np.cumsum(sizes), 0
    while start < len(sizes):
        most = (ends[start - 1] if start else 0) + _SLICE_BYTES
        stop = min(max(int(np.searchsorted(ends, most, side="right")), start + 1), start + _SLICE_ROWS)
        yield start, stop
        start = stop


def _check_size(size: int, what: str = "a row takes") -> None:
    if size > jsonsizes.MOST:
        raise BadOutput(
            f"{what} {size:,} bytes as JSON, of at most {jsonsizes.MOST:,}: use parquet, or leave a column out"
        )


def json_texts(values: pa.Array) -> pa.Array:
    """JSON of each value, as `json_lines` writes it, as a string array; a null stays a null. Raises BadOutput, too, if
    all of it is over 2 GB.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if int(jsonsizes.sizes_of(values).sum()) > jsonsizes.MOST:
        _check_size(int(jsonsizes.sizes_of(values, exact=True).sum()), f"{len(values)} values take")
    text = _text(values)
    return pc.if_else(values.is_valid(), text, pa.scalar(None, pa.string())) if values.null_count else text


def _one(column: pa.ChunkedArray) -> pa.Array:
    """A slice of a column as a single array of its own."""
    import pyarrow as pa

    found = column.combine_chunks()
    if isinstance(found, pa.ChunkedArray):
        found = found.chunk(0) if found.num_chunks == 1 else pa.concat_arrays(found.chunks)
    large = pa.types.is_large_string(found.type) or pa.types.is_large_list(found.type)
    return pa.concat_arrays([found, found.slice(0, 0)]) if large and found.offset else found


def _bytes(lines: pa.Array) -> memoryview:
    """The strings of an array, concatenated without a copy: that is how Arrow holds them."""
    _, offsets, data = lines.buffers()
    edges = np.frombuffer(offsets, dtype=np.int32)
    return memoryview(data)[int(edges[lines.offset]) : int(edges[lines.offset + len(lines)])]


def _raw(values: pa.Array) -> pa.Array:
    """JSON that is there as text, on one line."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not is_string(values.type):
        return _text(values)
    text = pc.replace_substring_regex(values.cast(pa.string()), "[\\r\\n]", " ")
    return pc.fill_null(text, "null")


def _text(values: pa.Array) -> pa.Array:
    """JSON of each value as a string array without nulls (a null is the text null)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, t = values.type, pa.types
    if isinstance(values, pa.ExtensionArray):
        return _text(values.storage)
    if t.is_null(kind):
        return pa.array(["null"] * len(values), pa.string())
    if (bare := plain(kind)) != kind:
        return _text(lossless(values, bare))
    if t.is_boolean(kind) or t.is_integer(kind) or t.is_decimal(kind):
        text = values.cast(pa.string())
    elif t.is_floating(kind):
        text = _float_text(values)
    elif t.is_string(kind) or t.is_large_string(kind):
        text = _quoted(values.cast(pa.string()))
    elif t.is_date(kind):
        _check_years(values)
        text = _between('"', values.cast(pa.string()), '"')
    elif t.is_time(kind):
        text = _between('"', values.cast(pa.string()), '"')
    elif t.is_timestamp(kind):
        text = _time_text(values)
    elif t.is_duration(kind):
        text = values.cast(pa.int64()).cast(pa.string())
    elif t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        text = _list_text(values)
    elif t.is_struct(kind):
        text = _struct_text(values)
    elif t.is_map(kind):
        return _text(entries(values))
    else:
        coded = [None if v is None else f'"{base64.b64encode(v).decode("ascii")}"' for v in values.to_pylist()]
        text = pa.array(coded, pa.string())
    return pc.fill_null(text, "null") if text.null_count else text


def _float_text(values: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_float16(values.type):
        values = values.cast(pa.float32())
    finite = pc.is_finite(values)
    if pc.all(finite, min_count=0).as_py() is False:
        names = pc.if_else(pc.greater(values, 0.0), '"Infinity"', pc.if_else(pc.is_nan(values), '"NaN"', '"-Infinity"'))
        written = _float_text(pc.if_else(finite, values, pa.scalar(None, values.type)))
        return pc.if_else(pc.invert(finite), names, written)
    text = values.cast(pa.string())
    whole = pc.equal(pc.trunc(values), values)
    if pc.any(whole).as_py():
        whole = pc.match_substring_regex(text, "^-?[0-9]+$")  # 1 would read back as an integer
        text = pc.if_else(whole, pc.binary_join_element_wise(text, pa.scalar(".0"), pa.scalar("")), text)
    return text


def _time_text(values: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    zone = values.type.tz
    _check_years(values)
    text = values.cast(pa.timestamp(values.type.unit)).cast(pa.string())
    text = pc.replace_substring(text, " ", "T", max_replacements=1)
    return _between('"', text, 'Z"' if zone else '"')


def _check_years(values: pa.Array) -> None:
    if is_beyond(values):
        raise BadOutput(f"a date or time is {BEYOND}")


def _quoted(values: pa.Array) -> pa.Array:
    """Strings in quotes, escaped. A replacement only runs where there is something to replace."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pc.any(pc.match_substring_regex(values, r'["\\\x00-\x1f]')).as_py():
        for found, written in _ESCAPES:
            if pc.any(pc.match_substring(values, found)).as_py():
                values = pc.replace_substring(values, found, written)
        rare = pc.fill_null(pc.match_substring_regex(values, r"[\x00-\x1f]"), False)
        if pc.any(rare).as_py():
            texts = [_control(v) if r else v for v, r in zip(values.to_pylist(), rare.to_pylist(), strict=True)]
            values = pa.array(texts, pa.string())
    return _between('"', values, '"')


def _control(text: str) -> str:
    return "".join(c if c >= " " else f"\\u{ord(c):04x}" for c in text)


def _between(before: str, text: pa.Array, after: str) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.binary_join_element_wise(pa.scalar(before), text, pa.scalar(after), pa.scalar(""))


def _list_text(values: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    length = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate(([0], np.cumsum(length))).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), _text(values.flatten()))
    text = _between("[", pc.binary_join(lists, ","), "]")
    return pc.if_else(values.is_valid(), text, pa.scalar(None, pa.string())) if values.null_count else text


def _struct_text(values: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    pieces: list[Any] = []
    for i, (field, child) in enumerate(zip(values.type, values.flatten(), strict=True)):
        name = json.dumps(field.name, ensure_ascii=False)
        pieces += [pa.scalar(("{" if i == 0 else ",") + name + ":"), _text(child)]
    if not pieces:
        text = pa.array(["{}"] * len(values), pa.string())
    else:
        text = pc.binary_join_element_wise(*pieces, pa.scalar("}"), pa.scalar(""))
    return pc.if_else(values.is_valid(), text, pa.scalar(None, pa.string())) if values.null_count else text

"""Casts that must not lose anything: every value stays what it was, or there is an error. Arrow's own "safe" casts
permit rounding (0.1 as float32), truncation (a time of day) and values that only look alike (1000 as True).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.arrow.rows import picked
from gristmill.arrow.schemas import plain, storage, wider

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "Lossy",
    "clothed",
    "contents",
    "entries",
    "fitted",
    "is_list",
    "lengths_of",
    "lossless",
    "nearest",
    "rebuilt",
    "stored",
    "together",
]


class Lossy(ValueError):
    """A value that the wanted type cannot hold unchanged; the text names both types."""


def lossless(column: pa.ChunkedArray, kind: pa.DataType, *, rounds: bool = False) -> pa.ChunkedArray:
    """`column` (an Array or ChunkedArray) as `kind`, with every value (null, NaN and infinity too) unchanged. Raises
    Lossy if one would change.

    Numbers become other numbers of the same value, text other text, lists of one container another, times finer or
    coarser ones of the same instant; a struct may gain fields, which are null. Nothing else is cast: numbers do not
    become text, truth values or times, nor a time without a zone one with a zone. `rounds`: floats may be rounded to
    narrower ones, as Python's own, which have no width, but not to infinity.
    """
    import pyarrow as pa

    if column.type.equals(kind):
        return column
    try:
        if isinstance(column, pa.Array):
            return rebuilt(column, kind, _Leaf(rounds))
        return pa.chunked_array([rebuilt(c, kind, _Leaf(rounds)) for c in column.chunks], kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as e:
        raise Lossy(f"{column.type} cannot be cast to {kind}: {e}") from e


def stored(values: pa.Array | pa.ChunkedArray) -> Any:
    """Values as they are held, of plain types: those of an extension type as its storage."""
    import pyarrow as pa

    if isinstance(values, pa.ChunkedArray):
        return pa.chunked_array([stored(chunk) for chunk in values.chunks], storage(values.type))
    held = values.storage if isinstance(values, pa.ExtensionArray) else values
    return held if held.type == storage(held.type) else held.cast(storage(held.type))


def clothed(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Values of a storage as those of an extension type; as they are, if that does not hold all of them."""
    import pyarrow as pa

    try:
        return pa.ExtensionArray.from_storage(kind, lossless(values, kind.storage_type))
    except Lossy:
        return values


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with the columns and types of `schema`; it must have all of these columns and no others. Raises Lossy,
    naming the column.
    """
    import pyarrow as pa

    if table.schema.equals(schema):
        return table
    columns = []
    for field in schema:
        try:
            columns.append(lossless(table.column(field.name), field.type))
        except Lossy as e:
            raise Lossy(f"column {field.name!r}: {e}") from e
    return pa.Table.from_arrays(columns, schema=schema)


def together(tables: Sequence[pa.Table]) -> pa.Table:
    """The rows of all tables, one after the other; a column that some lack is null there. Raises Lossy if no type holds
    all values of a column.
    """
    import pyarrow as pa

    first = tables[0].schema
    if all(t.schema.equals(first) for t in tables[1:]):
        return pa.concat_tables(tables)
    types: dict[str, list[pa.DataType]] = {}
    for field in (f for t in tables for f in t.schema):
        types.setdefault(field.name, []).append(field.type)
    fields = []
    for name, kinds in types.items():
        try:
            fields.append(next(t.schema.field(name) for t in tables if name in t.schema.names))
            fields[-1] = fields[-1].with_type(reduce(_common, kinds))
        except Lossy as e:
            raise Lossy(f"column {name!r}: {e}") from e
    schema = pa.schema(fields)
    return pa.concat_tables([fitted(_filled(t, schema), schema) for t in tables])


def _filled(table: pa.Table, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    for field in schema:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """A type for the values of both; `lossless` checks whether each value fits."""
    import pyarrow as pa

    both = wider(one, other)
    if both is not None:
        return both
    if pa.types.is_dictionary(one) or pa.types.is_dictionary(other):
        return _common(_values(one), _values(other))
    if is_list(one) and is_list(other) and (pa.types.is_fixed_size_list(one) != pa.types.is_fixed_size_list(other)):
        return pa.list_(_common(one.value_type, other.value_type))
    if _kind(one) == _kind(other) == "number" and not (pa.types.is_decimal(one) or pa.types.is_decimal(other)):
        if pa.types.is_floating(one) or pa.types.is_floating(other):
            return pa.float64()
        return pa.uint64() if pa.types.is_unsigned_integer(one) else pa.int64()
    raise Lossy(f"some values are {one}, others {other}")


def _values(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    return kind.value_type if pa.types.is_dictionary(kind) else kind


# ---------------------------------------------------------------- containers


def is_list(kind: pa.DataType) -> bool:
    """Whether values are lists, of any layout."""
    import pyarrow as pa

    t = pa.types
    return any(
        f(kind) for f in (t.is_list, t.is_large_list, t.is_fixed_size_list, t.is_list_view, t.is_large_list_view)
    )


def rebuilt(values: pa.Array, kind: pa.DataType, leaf: Any) -> pa.Array:
    """An array as `kind`: lists, structs and maps are taken apart, and their contents are `leaf(values, kind)`."""
    import pyarrow as pa

    t = pa.types
    if values.type.equals(kind):
        return values
    if t.is_null(values.type) or (t.is_null(kind) and values.null_count == len(values)):
        return pa.nulls(len(values), kind)
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, rebuilt(values, kind.storage_type, leaf))
    if isinstance(values, pa.ExtensionArray):
        return rebuilt(values.storage, kind, leaf)
    if t.is_dictionary(values.type):
        held = rebuilt(values.dictionary, plain(values.type.value_type), leaf)  # Arrow cannot take rows of views
        return rebuilt(picked(held, values.indices), kind, leaf)
    if t.is_run_end_encoded(values.type):
        ends = values.run_ends.to_numpy()  # not `run_end_decode`, which supports fewer types
        runs = np.searchsorted(ends, np.arange(values.offset, values.offset + len(values)), side="right")
        return rebuilt(picked(rebuilt(values.values, plain(kind), leaf), runs), kind, leaf)
    if t.is_dictionary(kind):
        encoded = rebuilt(values, kind.value_type, leaf).dictionary_encode()
        return pa.DictionaryArray.from_arrays(
            encoded.indices.cast(kind.index_type), encoded.dictionary, ordered=kind.ordered
        )
    if is_list(values.type) and is_list(kind) and not (t.is_list_view(kind) or t.is_large_list_view(kind)):
        return _list(values, kind, leaf)
    if t.is_struct(values.type) and t.is_struct(kind):
        return _struct(values, kind, leaf)
    if t.is_map(values.type) and t.is_map(kind):
        return rebuilt(entries(values), kind, leaf)
    if is_list(values.type) and t.is_map(kind) and (t.is_struct(inner := values.type.value_type) or t.is_null(inner)):
        pairs = pa.struct([pa.field("key", kind.key_type, nullable=False), ("value", kind.item_type)])
        return _map(rebuilt(values, pa.list_(pairs), leaf), kind)
    return leaf(values, kind)


def _nulls(values: pa.Array) -> pa.Array | None:
    return values.is_null() if values.null_count else None


def lengths_of(lists: pa.Array) -> np.ndarray:
    """How many values each list has, int64; 0 for a null."""
    import pyarrow.compute as pc  # a worker that only gets numbers starts without it

    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return np.asarray(lengths, dtype=np.int64)


def contents(lists: pa.Array) -> pa.Array:
    """The values of all lists, one after the other, without what is under a null."""
    import pyarrow as pa

    try:
        return lists.flatten()
    except pa.ArrowNotImplementedError:  # for dictionaries of nested values beside nulls
        lengths = lengths_of(lists)
        if pa.types.is_fixed_size_list(lists.type):
            starts = (np.arange(len(lists)) + lists.offset) * lists.type.list_size
        else:
            starts = lists.offsets.to_numpy()[: len(lists)].astype(np.int64)
        before = np.cumsum(lengths) - lengths
        return picked(lists.values, np.repeat(starts - before, lengths) + np.arange(lengths.sum()))


def _list(values: pa.Array, kind: pa.DataType, leaf: Any) -> pa.Array:
    import pyarrow as pa

    lengths = lengths_of(values)
    inner = contents(values)
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    if not pa.types.is_fixed_size_list(kind):
        inner = rebuilt(inner, kind.value_type, leaf)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        made, width = (pa.LargeListArray, np.int64) if pa.types.is_large_list(kind) else (pa.ListArray, np.int32)
        return made.from_arrays(pa.array(offsets.astype(width)), inner, kind, mask=_nulls(values))
    size = kind.list_size
    if (wrong := lengths[valid & (lengths != size)]).size:
        raise Lossy(f"{values.type} has a row of {wrong[0]} values, but {kind} holds {size}")
    if not valid.any():
        inner = pa.nulls(len(values) * size, kind.value_type)
    elif valid.all():
        inner = rebuilt(inner, kind.value_type, leaf)
    else:
        inner = rebuilt(inner, plain(kind.value_type), leaf)  # Arrow cannot take rows of views
        starts = np.concatenate(([0], np.cumsum(lengths)))[:-1]
        index = np.where(valid[:, None], starts[:, None] + np.arange(size), 0)
        inner = picked(inner, pa.array(index.reshape(-1), mask=np.repeat(~valid, size)))
        inner = rebuilt(inner, kind.value_type, leaf)
    if size == 0:
        return pa.FixedSizeListArray.from_buffers(kind, len(values), [_validity(valid)], children=[inner])
    return pa.FixedSizeListArray.from_arrays(inner, type=kind, mask=_nulls(values))


def _validity(valid: np.ndarray) -> pa.Buffer | None:
    import pyarrow as pa

    return None if valid.all() else pa.array(valid).buffers()[1]


def _struct(values: pa.Array, kind: pa.DataType, leaf: Any) -> pa.Array:
    import pyarrow as pa

    have = {f.name: child for f, child in zip(values.type, values.flatten(), strict=True)}
    wanted = [f.name for f in kind]
    if (lost := [n for n in have if n not in wanted]) or len(have) != values.type.num_fields:
        raise Lossy(f"{values.type} has a field {(lost or list(have))[0]!r} that {kind} lacks")
    children = [rebuilt(have[f.name], f.type, leaf) if f.name in have else pa.nulls(len(values), f.type) for f in kind]
    if not children:
        return pa.array([None if v is None else {} for v in values.to_pylist()], kind)
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=_nulls(values))


def entries(values: pa.Array) -> pa.Array:
    """Maps as lists of structs with `key` and `value`; Arrow's own cast fails on maps to nothing but nulls."""
    import pyarrow as pa

    offsets = values.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    fields = [("key", values.type.key_type), ("value", values.type.item_type)]
    columns = [child.slice(first, last - first) for child in (values.keys, values.items)]
    pairs = pa.StructArray.from_arrays(columns, fields=[pa.field(*f) for f in fields])
    return pa.ListArray.from_arrays(pa.array(offsets - first), pairs, mask=_nulls(values))


def _map(lists: pa.Array, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    pairs = lists.values
    keys, items = pairs.field(0), pairs.field(1)
    if keys.null_count:
        raise Lossy(f"a key is null, which {kind} cannot hold")
    return pa.MapArray.from_arrays(lists.offsets, keys, items, kind, mask=_nulls(lists))


# ---------------------------------------------------------------- single values


class _Leaf:
    """A column of single values as another type."""

    def __init__(self, rounds: bool) -> None:
        self._rounds = rounds

    def __call__(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        import pyarrow as pa

        if pa.types.is_float16(values.type):
            values = values.cast(pa.float32())  # few of Arrow's functions support float16
        source = _kind(values.type)
        if source != _kind(kind) or source == "other":
            raise Lossy(f"it is {values.type}, not {kind}")
        try:
            out = self._number(values, kind) if source == "number" else values.cast(kind)
            exact = source in ("text", "bytes") or _alike(out.cast(values.type, safe=False), values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as e:
            raise Lossy(f"{values.type} does not fit {kind}: {e}") from e
        rounded = self._rounds and pa.types.is_floating(values.type) and pa.types.is_floating(kind)
        if not exact and not (rounded and _still_finite(values, out)):
            raise Lossy(f"not every value of type {values.type} is the same as {kind}")
        if pa.types.is_decimal(values.type) and pa.types.is_floating(kind):
            return nearest(values, kind)
        return out

    def _number(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        import pyarrow as pa
        import pyarrow.compute as pc

        t = pa.types
        if t.is_integer(values.type) and t.is_floating(kind):
            # A round trip shows whether a value is exact, but 2^63 and 2^64 do not fit back, nor 65,520 a float16,
            # and what is below all integers (-inf for -2^63 as a float16) comes back as the least.
            out = values.cast(kind, safe=False)
            edge = 2.0 ** (values.type.bit_width - t.is_signed_integer(values.type))
            wide = out.cast(pa.float64())
            if pc.any(pc.or_(pc.greater_equal(wide, edge), pc.less(wide, -edge))).as_py():
                raise Lossy(f"not every value of type {values.type} is the same as {kind}")
            return out
        narrows = t.is_floating(values.type) and t.is_floating(kind)
        return values.cast(kind, safe=not narrows)


def nearest(values: Any, kind: pa.DataType) -> Any:
    """Decimals (an Array or ChunkedArray) as the floats (float32 or float64) that are nearest to them; infinity if none
    is. Arrow's own cast multiplies by a power of ten that is rounded itself: 1.5 becomes 1.5000001.
    """
    import pyarrow as pa

    return values.cast(pa.string()).cast(kind)


def _kind(kind: pa.DataType) -> str:
    import pyarrow as pa

    t = pa.types
    if t.is_integer(kind) or t.is_floating(kind) or t.is_decimal(kind):
        return "number"
    if t.is_timestamp(kind):
        return "instant" if kind.tz else "time"
    if t.is_date(kind):
        return "time"
    for name, found in (("time of day", t.is_time), ("duration", t.is_duration), ("bool", t.is_boolean)):
        if found(kind):
            return name
    if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        return "text"
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_fixed_size_binary(kind) or t.is_binary_view(kind):
        return "bytes"
    return "other"


def _alike(one: pa.Array, other: pa.Array) -> bool:
    """Whether all values are equal, NaN as NaN."""
    import pyarrow as pa
    import pyarrow.compute as pc

    equal = pc.equal(one, other)
    if pa.types.is_floating(other.type):
        equal = pc.or_(equal, pc.and_(pc.is_nan(one), pc.is_nan(other)))
    return bool(pc.all(equal, min_count=0).as_py()) and one.null_count == other.null_count


def _still_finite(before: pa.Array, after: pa.Array) -> bool:
    import pyarrow.compute as pc

    return bool(
        pc.all(pc.or_(pc.is_finite(after.cast(before.type)), pc.invert(pc.is_finite(before))), min_count=0).as_py()
    )

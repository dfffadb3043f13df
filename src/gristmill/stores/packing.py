"""Columns as bytes, one value a row, built by functions over whole columns: what key-value stores keep of a row, as
MessagePack, and the keys that they keep it under.

A row is a map of its columns, which any MessagePack library reads. Dates, times and decimals are texts as in JSON
Lines; a map is a list of pairs. `unpacking` gives back what was packed, by the schema.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import clothed, entries, is_list, stored
from gristmill.arrow.schemas import is_string, plain, storage, unwritable
from gristmill.arrow.topython import from_plain, to_plain
from gristmill.commit.generation import decode_schema, encode_schema
from gristmill.errors import BadJob, did_you_mean
from gristmill.process.extras import require
from gristmill.sinks.jsonread import from_json
from gristmill.sinks.jsontext import json_texts
from gristmill.stores.contract import Key, Load, Mark
from gristmill.stores.lookup import asked, widest

SLICE_BYTES = 32 << 20  # of rows packed at once: Arrow's binary arrays hold 2 GB, and what is packed is larger

_NULL = b"\xc0"
_INTEGERS = {
    pa.int8(): (0xD0, ">i1"),
    pa.int16(): (0xD1, ">i2"),
    pa.int32(): (0xD2, ">i4"),
    pa.int64(): (0xD3, ">i8"),
    pa.uint8(): (0xCC, ">u1"),
    pa.uint16(): (0xCD, ">u2"),
    pa.uint32(): (0xCE, ">u4"),
    pa.uint64(): (0xCF, ">u8"),
    pa.float32(): (0xCA, ">f4"),
    pa.float64(): (0xCB, ">f8"),
}
_TEXT, _BYTES, _LIST, _MAP = 0xDB, 0xC6, 0xDD, 0xDF  # each with a length of four bytes


def check_packed(schema: pa.Schema, key: Sequence[str], shown: str) -> None:
    """Raises BadJob for a column that cannot be packed, and for a key column without a text that tells its values."""
    for field in schema:
        if (why := unwritable(field.type)) is not None:
            raise BadJob(
                f"{shown}: column {field.name!r} is {field.type}, and {why} cannot be held: cast it in a step, or drop "
                "it (drop=)"
            )
        if field.name in key and (pa.types.is_floating(field.type) or pa.types.is_nested(field.type)):
            raise BadJob(f"{shown}: key column {field.name!r} is {field.type}: give columns of texts or whole numbers")


def check_beside(load: Load, marks: Iterable[Mark], shown: str, *, texts: bool = False) -> None:
    """Raises BadJob for rows that are to be beside those of the marks (whose sinks may be others), but are found by
    another key, or have other columns: all rows of such a store are read by one schema. `texts`: numbers are held as
    JSON, which has 0.1 for that of either width.
    """
    kinds: dict[str, list[pa.DataType]] = {}
    for mark in (beside := [] if load.whole else list(marks)):
        for known in decode_schema(mark.held):
            kinds.setdefault(known.name, []).append(known.type)
        if mark.key != load.key:
            raise BadJob(
                f"{shown}: rows are found by {', '.join(mark.key)} there, and these have the key {', '.join(load.key)}"
                ": deliver them by that key, to another place, or in place of the others (mode='replace')"
            )
    for field in load.schema if beside else ():
        if field.name not in kinds and not load.evolve:
            raise BadJob(
                f"{shown}: has no column {field.name!r}, which the result has: it has {', '.join(kinds)}; leave it "
                f"out of the result (drop=), or let the delivery add it (evolve=True){did_you_mean(field.name, kinds)}"
            )
        exactly = field.name in load.key and len(load.key) > 1  # whose bytes tell types apart
        exactly |= texts and pa.types.is_floating(storage(field.type))
        there = kinds.get(field.name, [])
        for kind in [k for k in there if not pa.types.is_null(k)] or there:
            if kind != field.type if exactly else not alike(kind, field.type):
                raise BadJob(
                    f"{shown}: column {field.name!r} is {kind} there, and {field.type} in the result: cast the values "
                    "in a step, or deliver to another place"
                )


def alike(there: pa.DataType, own: pa.DataType) -> bool:
    """Whether values of one type are read right as those of another, where only the schema tells how to read them."""
    there, own = map(storage, (there, own))
    t = pa.types
    for same in (t.is_integer, t.is_floating, t.is_null, is_string, _is_bytes):
        if same(there) and same(own):
            return True
    return bool(there == own or t.is_null(own) or t.is_null(there))


def told(load: Load, there: Iterable[Mark], *, updated: bool = False) -> Mark:
    """The load's mark, beside those of rows that stay: a column of nulls alone has the type that it has in them, by
    which their values are read, and columns that only they have are kept in mind. `updated`: rows of a key that was
    there are changed in the load's columns alone, and keep the others even where the load is the whole.
    """
    schema, known = decode_schema(load.mark.schema), dict[str, pa.Field]()
    for mark in () if load.whole and not updated else sorted(there, key=lambda mark: -mark.turn):
        for field in decode_schema(mark.held):
            if field.name not in known or pa.types.is_null(known[field.name].type):
                known[field.name] = field
    for at, field in enumerate(schema):
        if pa.types.is_null(field.type) and field.name in known and not load.whole:
            schema = schema.set(at, field.with_type(known[field.name].type))
    others = [field for name, field in known.items() if name not in schema.names]
    columns = encode_schema(pa.schema([*schema, *others])) if others else ""
    return dataclasses.replace(load.mark, schema=encode_schema(schema), columns=columns)


def slices(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """A batch in pieces of at most about SLICE_BYTES."""
    step = max(1, int(batch.num_rows * SLICE_BYTES / max(1, batch.nbytes)))
    return [batch.slice(start, step) for start in range(0, batch.num_rows, step)]


def gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches, of about SLICE_BYTES."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= SLICE_BYTES:
            yield from _together(held)
            held, size = [], 0
    yield from _together(held)


def _together(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if not batches:
        return []
    whole = pa.Table.from_batches(batches).combine_chunks()
    return [piece for batch in whole.to_batches() for piece in slices(batch)]


def packed_rows(batch: pa.RecordBatch) -> pa.Array:
    """Each row as a MessagePack map, as a binary array."""
    return joined(_headers(np.full(batch.num_rows, batch.num_columns), _MAP), *_fields(batch.schema, batch.columns))


def packed_keys(columns: Sequence[pa.Array]) -> pa.Array:
    """Each row's key as bytes: the text of the value of a single column (bytes as they are), or a MessagePack list."""
    if len(columns) > 1:
        return joined(_headers(np.full(len(columns[0]), len(columns)), _LIST), *map(_packed, columns))
    column = stored(columns[0])
    if _is_bytes(column.type):
        return column.cast(pa.binary())
    return _as_text(column).cast(pa.binary())


def key_bytes(keys: Sequence[Key], columns: Mapping[str, pa.DataType], shown: str) -> list[bytes | None]:
    """Keys as `packed_keys` has them; None for one that no row can have. Raises BadKey for a key that is none."""

    import pyarrow.compute as pc

    if len(columns) == 1 and (quick := _quick_bytes(keys, next(iter(columns.values())))) is not None:
        return quick
    found = [_asked_bytes(keys, kinds, shown) for kinds in _as_any(columns)]
    return list(pc.coalesce(*found).to_pylist())


def _asked_bytes(keys: Sequence[Key], columns: Mapping[str, pa.DataType], shown: str) -> pa.Array:
    import pyarrow.compute as pc

    table = asked(keys, columns, shown)
    found = packed_keys([column.combine_chunks() for column in table.columns])
    return pc.if_else(table.column(0).combine_chunks().is_valid(), found, pa.scalar(None, pa.binary()))


def _as_any(columns: Mapping[str, pa.DataType]) -> list[dict[str, pa.DataType]]:
    """The types of a key that any row beside may have, whatever was delivered last: where it is one column, numbers of
    every width and bytes of every length are packed alike; several columns have one type each (`check_beside`).
    """
    if len(columns) > 1:
        return [dict(columns)]
    ((name, kind),) = columns.items()
    return [{name: k} for k in ((pa.int64(), pa.uint64()) if pa.types.is_integer(storage(kind)) else (widest(kind),))]


def _quick_bytes(keys: Sequence[Any], kind: pa.DataType) -> list[bytes | None] | None:
    """Most keys of one column, at once what Arrow takes a while to begin; None if they are others."""
    if {*map(type, keys)} != {tuple} or {*map(len, keys)} != {1}:
        return None
    given = {type(value) for (value,) in keys}
    if pa.types.is_string(kind) and given == {str}:
        with contextlib.suppress(UnicodeEncodeError):
            return [value.encode() for (value,) in keys]
    if pa.types.is_integer(kind) and given == {int} and all(-(2**63) <= value < 2**64 for (value,) in keys):
        return [b"%d" % value for (value,) in keys]
    return None


def crc32s(keys: pa.Array) -> np.ndarray:
    """crc32 of each key, as zlib computes it: one step a byte, over all keys that are as long."""
    _, edges, data = keys.buffers()
    starts = np.frombuffer(edges, np.int32)[keys.offset : keys.offset + len(keys) + 1].astype(np.int64)
    held = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)
    found = np.full(len(keys), 0xFFFFFFFF, np.uint32)
    at, past = starts[:-1].copy(), starts[1:]
    active = np.flatnonzero(at < past)
    while len(active):
        low = (found[active] ^ held[at[active]]) & np.uint32(0xFF)
        found[active] = _STEP[low] ^ (found[active] >> np.uint32(8))
        at[active] += 1
        active = active[at[active] < past[active]]
    return np.asarray(found ^ np.uint32(0xFFFFFFFF))


def _steps() -> np.ndarray:
    """The table of crc32 (polynomial 0xEDB88320)."""
    table: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(0xEDB88320), table >> np.uint32(1))
    return np.asarray(table, np.uint32)


_STEP = _steps()


def unpacking(schema: pa.Schema) -> Callable[[Sequence[bytes | None]], list[dict[str, Any] | None]]:
    """A function that gives rows as they were packed, with values as `to_plain` gives them; None stays None."""
    load = require("msgpack", "lmdb", "a key-value store").unpackb
    kinds = [(f.name, restore) for f in schema if (restore := _restoring(f.type)) is not None]

    def unpacked(rows: Sequence[bytes | None]) -> list[dict[str, Any] | None]:
        found = [None if data is None else load(data, strict_map_key=False) for data in rows]
        for name, restore in kinds:
            for row in found:
                if row is not None and row.get(name) is not None:
                    row[name] = restore(row[name])
        return found

    return unpacked


# ---------------------------------------------------------------- packing


def _packed(values: pa.Array) -> pa.Array:
    """Each value as MessagePack, a binary array without nulls."""

    import pyarrow.compute as pc

    if isinstance(values, pa.ExtensionArray):
        return _packed(values.storage)
    if (bare := plain(values.type)) != values.type:
        return _packed(values.cast(bare))
    t, kind = pa.types, values.type
    if t.is_null(kind):
        return pa.array([_NULL] * len(values), pa.binary())
    if t.is_float16(kind):
        return _packed(values.cast(pa.float32()))
    if t.is_boolean(kind):
        made = fixed(_filled(values, False).to_numpy(zero_copy_only=False).astype(np.uint8)[:, None] + np.uint8(0xC2))
    elif t.is_integer(kind) or t.is_floating(kind):
        made = _number(values)
    elif t.is_duration(kind):
        return _packed(values.cast(pa.int64()))
    elif _is_bytes(kind):
        made = _long(_filled(values.cast(pa.binary()), b""), _BYTES)
    elif is_list(kind):
        made = _lists(values)
    elif t.is_map(kind):
        return _packed(entries(values))
    elif t.is_struct(kind):
        children = values.flatten()
        sizes = _headers(np.full(len(values), len(children)), _MAP)
        made = joined(sizes, *_fields(kind, children))
    else:
        made = _long(_filled(_as_text(values).cast(pa.binary()), b""), _TEXT)
    return pc.if_else(values.is_valid(), made, pa.scalar(_NULL, pa.binary())) if values.null_count else made


def _fields(schema: Any, columns: Sequence[pa.Array]) -> list[Any]:
    out: list[Any] = []
    for field, column in zip(schema, columns, strict=True):
        name = field.name.encode()
        out += [pa.scalar(bytes([_TEXT]) + len(name).to_bytes(4, "big") + name, pa.binary()), _packed(column)]
    return out


def _filled(values: pa.Array, value: Any) -> pa.Array:
    import pyarrow.compute as pc

    return pc.fill_null(values, value) if values.null_count else values


def _number(values: pa.Array) -> pa.Array:
    head, form = _INTEGERS[values.type]
    raw = np.ascontiguousarray(_filled(values, 0).to_numpy(zero_copy_only=False), np.dtype(form))
    data = np.empty((len(raw), 1 + raw.itemsize), np.uint8)
    data[:, 0] = head
    data[:, 1:] = raw.view(np.uint8).reshape(len(raw), raw.itemsize)
    return fixed(data)


def fixed(data: np.ndarray) -> pa.Array:
    """The rows of a matrix of bytes, as a binary array."""
    offsets = np.arange(len(data) + 1, dtype=np.int32) * np.int32(data.shape[1])
    return pa.Array.from_buffers(
        pa.binary(), len(data), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))]
    )


def _headers(lengths: np.ndarray, head: int) -> pa.Array:
    """Heads of values that are `lengths` long."""
    data = np.empty((len(lengths), 5), np.uint8)
    data[:, 0] = head
    data[:, 1:] = np.ascontiguousarray(lengths, np.dtype(">u4")).view(np.uint8).reshape(len(lengths), 4)
    return fixed(data)


def _long(values: pa.Array, head: int) -> pa.Array:
    import pyarrow.compute as pc

    return joined(_headers(pc.binary_length(values).to_numpy(zero_copy_only=False), head), values)


def _lists(values: pa.Array) -> pa.Array:
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = values.flatten()
    if flat.type in _INTEGERS and not flat.null_count and len(flat) and (lengths == lengths[0]).all():
        return _vectors(flat.to_numpy(), len(lengths), *_INTEGERS[flat.type])
    inner = _packed(flat)
    _, edges, data = inner.buffers()
    starts = np.frombuffer(edges, np.int32)[inner.offset : inner.offset + len(inner) + 1]
    offsets = np.ascontiguousarray(starts[np.concatenate(([0], np.cumsum(lengths)))], np.int32)
    together = pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(offsets), data])
    return joined(_headers(lengths, _LIST), together)


def _vectors(flat: np.ndarray, count: int, head: int, form: str) -> pa.Array:
    """Lists of as many numbers each, all at once: a sixth of the time."""
    width = len(flat) // count
    number = np.dtype([("head", "u1"), ("value", form)])
    data = np.empty(count, np.dtype([("head", "u1"), ("length", ">u4"), ("values", number, (width,))]))
    data["head"], data["length"] = _LIST, width
    data["values"]["head"], data["values"]["value"] = head, flat.reshape(count, width)
    return fixed(data.view(np.uint8).reshape(count, data.itemsize))


def joined(*pieces: Any) -> pa.Array:
    """Bytes of all pieces, arrays or scalars, one after the other in each row."""

    import pyarrow.compute as pc

    return pc.binary_join_element_wise(*pieces, pa.scalar(b"", pa.binary()))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _as_text(values: pa.Array) -> pa.Array:
    """Values as texts: as JSON, without the quotes."""

    import pyarrow.compute as pc

    t = pa.types
    if t.is_string(values.type) or t.is_large_string(values.type):
        return values.cast(pa.string())
    return pc.utf8_trim(json_texts(values), '"')


# ---------------------------------------------------------------- and back


@cache
def _restoring(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What makes a value of the type from what MessagePack gives; None if that is the value."""
    if isinstance(kind, pa.BaseExtensionType):
        return _extended(kind, _restoring(kind.storage_type) or _same)
    if (bare := plain(kind)) != kind:
        return _restoring(bare)
    t = pa.types
    if is_list(kind):
        inner = _restoring(kind.value_type)
        return None if inner is None else lambda items: [v if v is None else inner(v) for v in items]
    if t.is_map(kind):
        keys, values = (_restoring(part) or _same for part in (kind.key_type, kind.item_type))
        return lambda items: [(keys(i["key"]), i["value"] if i["value"] is None else values(i["value"])) for i in items]
    if t.is_struct(kind):
        inside = [(f.name, restore) for f in kind if (restore := _restoring(f.type)) is not None]
        return None if not inside else lambda row: _record(row, inside)
    if t.is_temporal(kind) or t.is_decimal(kind):
        return lambda value: _scalar(value, kind)
    return None


def _extended(kind: pa.BaseExtensionType, restore: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same for an extension type, of whose storage `restore` makes a value."""
    if isinstance(kind, pa.UuidType):
        return lambda value: uuid.UUID(bytes=value) if len(value) == 16 else value  # of an earlier delivery
    return lambda value: to_plain(clothed(from_plain([restore(value)], kind.storage_type), kind))[0]


def _same(value: Any) -> Any:
    return value


def _record(row: dict[str, Any], inside: Sequence[tuple[str, Callable[[Any], Any]]]) -> dict[str, Any]:
    return {**row, **{name: restore(row[name]) for name, restore in inside if row[name] is not None}}


def _scalar(value: Any, kind: pa.DataType) -> Any:
    if pa.types.is_duration(kind):
        return to_plain(pa.array([value], pa.int64()).cast(kind))[0]
    text = value if pa.types.is_decimal(kind) else f'"{value}"'
    return to_plain(from_json(pa.array([text]), kind))[0]

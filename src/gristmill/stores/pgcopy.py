"""Arrow columns as Postgres's binary COPY format, built by functions over whole columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.arrow.casts import entries, is_list, stored
from gristmill.sinks.jsontext import json_texts
from gristmill.stores.packing import fixed, joined, slices

HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)
END = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
_DAYS, _MICROSECONDS = 10_957, 946_684_800_000_000  # from 1970 to 2000, where Postgres begins to count
_NUMBERS = {
    "smallint": (pa.int16(), ">i2", 21),
    "integer": (pa.int32(), ">i4", 23),
    "bigint": (pa.int64(), ">i8", 20),
    "real": (pa.float32(), ">f4", 700),
    "double precision": (pa.float64(), ">f8", 701),
}
_OIDS = {**{name: oid for name, (_, _, oid) in _NUMBERS.items()}, "text": 25, "boolean": 16, "bytea": 17, "date": 1082,
         "timestamp without time zone": 1114, "timestamp with time zone": 1184, "time without time zone": 1083,
         "numeric": 1700}  # fmt: skip


def copied(batches: Iterable[pa.RecordBatch], kinds: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Batches as a binary COPY, in pieces; `kinds` are the types of the table's columns, as `format_type` writes them.
    Values must fit them (`Database.holds`).
    """
    yield HEAD
    for batch in batches:
        for piece in slices(batch):
            count = pa.scalar(piece.num_columns.to_bytes(2, "big"), pa.binary())
            fields = [_field(c, kinds[f.name]) for f, c in zip(piece.schema, piece.columns, strict=True)]
            rows = joined(count, *fields)
            _, edges, data = rows.buffers()
            ends = np.frombuffer(edges, np.int32)
            yield memoryview(data)[int(ends[rows.offset]) : int(ends[rows.offset + len(rows)])]
    yield END


def _field(values: pa.Array, kind: str) -> pa.Array:
    """Each value with its length before it; a null is a length of -1."""
    values = stored(values)
    if pa.types.is_null(values.type):
        return pa.array([_NULL] * len(values), pa.binary())
    made = _sized(_payload(values, kind))
    return pc.if_else(values.is_valid(), made, pa.scalar(_NULL, pa.binary())) if values.null_count else made


def _sized(payload: pa.Array) -> pa.Array:
    lengths = pc.fill_null(pc.binary_length(payload), 0).to_numpy(zero_copy_only=False)
    return joined(_int32(lengths), pc.fill_null(payload, b"") if payload.null_count else payload)


def _int32(values: np.ndarray) -> pa.Array:
    return fixed(np.ascontiguousarray(values, np.dtype(">i4")).view(np.uint8).reshape(len(values), 4))


def _payload(values: pa.Array, kind: str) -> pa.Array:
    name, t = kind.partition("(")[0], pa.types
    if kind.endswith("[]"):
        return _array(values, kind.removesuffix("[]"))
    if name in _NUMBERS:
        arrow, form, _ = _NUMBERS[name]
        return _number(values.cast(arrow), form)
    if name == "numeric":
        return _numeric(values)
    if name == "vector":
        return _vector(values)
    if name == "boolean":
        return fixed(_filled(values, False).to_numpy(zero_copy_only=False).astype(np.uint8)[:, None])
    if name == "date":
        return _number(pc.subtract(values.cast(pa.date32()).cast(pa.int32()), _DAYS), ">i4")
    if name.startswith("timestamp"):
        moment = values.cast(pa.timestamp("us", values.type.tz)).cast(pa.int64())
        return _number(pc.subtract(moment, _MICROSECONDS), ">i8")
    if name.startswith("time"):
        return _number(values.cast(pa.time64("us")).cast(pa.int64()), ">i8")
    if name == "interval":
        spans = _number(values.cast(pa.duration("us")).cast(pa.int64()), ">i8")
        return joined(spans, pa.scalar(bytes(8), pa.binary()))  # no days, no months
    if name in ("json", "jsonb"):
        text = json_texts(entries(values) if t.is_map(values.type) else values).cast(pa.binary())
        return joined(pa.scalar(b"\x01", pa.binary()), text) if name == "jsonb" else text
    return values.cast(pa.binary())  # text and bytes


def _filled(values: pa.Array, value: Any) -> pa.Array:
    return pc.fill_null(values, value) if values.null_count else values


def _number(values: pa.Array, form: str) -> pa.Array:
    raw = np.ascontiguousarray(_filled(values, 0).to_numpy(zero_copy_only=False), np.dtype(form))
    return fixed(raw.view(np.uint8).reshape(len(raw), raw.itemsize))


def _numeric(values: pa.Array) -> pa.Array:
    """Decimals and whole numbers: groups of four digits, of which those before and after zeros may be left in."""
    scale = max(0, values.type.scale) if pa.types.is_decimal(values.type) else 0
    texts = _filled(_whole(values), 0).cast(pa.string())
    negative = pc.starts_with(texts, "-").to_numpy(zero_copy_only=False)
    bare = pc.utf8_lpad(pc.utf8_ltrim(texts, "-"), scale + 1, "0")
    whole = pc.utf8_slice_codeunits(bare, 0, -scale) if scale else bare
    width = -(-(pc.max(pc.utf8_length(whole)).as_py() or 1) // 4) * 4
    digits = pc.utf8_lpad(whole, width, "0")
    if scale:
        after = -(-scale // 4) * 4
        rest = pc.utf8_rpad(pc.utf8_slice_codeunits(bare, -scale), after, "0")
        digits = pc.binary_join_element_wise(digits, rest, "")
        width += after
    data = np.frombuffer(b"".join(digits.cast(pa.binary()).to_pylist()), np.uint8).reshape(len(values), width // 4, 4)
    groups = (data - ord("0")).astype(np.int16) @ np.array([1000, 100, 10, 1], np.int16)
    before = (width - -(-scale // 4) * 4) // 4
    head = np.empty((len(values), 4), np.dtype(">i2"))
    head[:, 0], head[:, 1], head[:, 3] = width // 4, before - 1, scale
    head[:, 2] = np.where(negative, 0x4000, 0)
    return fixed(np.concatenate([head, groups.astype(">i2")], axis=1).astype(">i2").view(np.uint8))


def _whole(values: pa.Array) -> pa.Array:
    """Decimals as whole numbers of their smallest unit: the text of others may have an exponent."""
    if not pa.types.is_decimal(values.type):
        return values
    if values.type.bit_width < 128:
        values = values.cast(pa.decimal128(values.type.precision, values.type.scale))
    kind = (pa.decimal256 if values.type.bit_width == 256 else pa.decimal128)(values.type.precision, 0)
    return pa.Array.from_buffers(kind, len(values), values.buffers(), offset=values.offset)


def _vector(values: pa.Array) -> pa.Array:
    width = values.type.list_size
    flat = _filled(values, [0.0] * width).flatten().to_numpy(zero_copy_only=False)
    data = np.empty((len(values), 4 + 4 * width), np.uint8)
    data[:, :4] = np.frombuffer(width.to_bytes(2, "big") + bytes(2), np.uint8)
    data[:, 4:] = np.ascontiguousarray(flat, ">f4").view(np.uint8).reshape(len(values), 4 * width)
    return fixed(data)


def _array(values: pa.Array, kind: str) -> pa.Array:
    """Lists of one dimension; those that are empty have none."""
    assert is_list(values.type)
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    inner = _field(values.flatten(), kind)
    _, edges, data = inner.buffers()
    starts = np.frombuffer(edges, np.int32)[inner.offset : inner.offset + len(inner) + 1]
    offsets = np.ascontiguousarray(starts[np.concatenate(([0], np.cumsum(lengths)))], np.int32)
    elements = pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(offsets), data])
    some = lengths > 0
    head = np.zeros((len(values), 3), np.dtype(">i4"))
    head[:, 0], head[:, 1], head[:, 2] = some, 1, _OIDS[kind.partition("(")[0]]
    dimension = np.stack([lengths, np.ones_like(lengths)], axis=1).astype(">i4")
    sizes = pc.if_else(pa.array(some), fixed(dimension.view(np.uint8)), pa.scalar(b"", pa.binary()))
    return joined(fixed(head.view(np.uint8)), sizes, elements)

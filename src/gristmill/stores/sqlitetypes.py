"""Types and values between Arrow and SQLite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.arrow.casts import clothed, stored
from gristmill.arrow.schemas import plain, storage, unwritable
from gristmill.errors import BadJob
from gristmill.sinks.jsonread import from_json
from gristmill.sinks.jsontext import json_texts
from gristmill.stores.lookup import as_delivered, widest


def affinity(kind: str) -> str:
    """https://sqlite.org/datatype3.html, 3.1."""
    words = kind.upper()
    if "INT" in words:
        return "INTEGER"
    if any(word in words for word in ("CHAR", "CLOB", "TEXT")):
        return "TEXT"
    if not words or "BLOB" in words:
        return "BLOB"
    return "REAL" if any(word in words for word in ("REAL", "FLOA", "DOUB")) else "NUMERIC"


def sql_type(kind: pa.DataType, where: str) -> str:
    """The SQL type that holds all values of an Arrow type. Raises BadJob."""
    t, bare = pa.types, storage(kind)
    if t.is_uint64(bare):
        raise BadJob(f"{where} is {kind}, of which SQLite holds the half: cast it to int64 or to text in a step")
    if unwritable(bare) is not None:
        raise BadJob(f"{where} is {kind}, which SQLite cannot hold without loss: cast it in a step, or drop it (drop=)")
    if t.is_integer(bare) or t.is_boolean(bare) or t.is_duration(bare):
        return "INTEGER"
    if t.is_floating(bare):
        return "REAL"
    return "BLOB" if _is_bytes(bare) or is_vector(bare) else "TEXT"


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def is_vector(kind: pa.DataType) -> bool:
    """Whether a value is stored as the bytes of its floats."""
    return bool(pa.types.is_fixed_size_list(kind) and kind.value_type in (pa.float32(), pa.float64()))


def _is_plain(kind: pa.DataType) -> bool:
    """Whether Python's values of the type are SQLite's."""
    t = pa.types
    return any(f(kind) for f in (t.is_integer, t.is_boolean, t.is_string, t.is_large_string, t.is_null, _is_bytes))


def as_values(column: pa.Array) -> list[Any]:
    """A column as SQLite's values. It has no NaN, which would become null."""
    column = stored(column)
    t, bare = pa.types, column.type
    if t.is_floating(bare):
        return list(column.cast(pa.float64()).to_pylist())
    if t.is_duration(bare):
        return list(column.cast(pa.int64()).to_pylist())
    if _is_plain(bare):
        return list(column.to_pylist())
    if is_vector(bare):
        return _packed(column)
    texts = json_texts(column)
    return list((texts if t.is_nested(bare) else pc.utf8_trim(texts, '"')).to_pylist())


def _packed(column: pa.Array) -> list[bytes | None]:
    width, kind = column.type.list_size, column.type.value_type.to_pandas_dtype()
    filled = column.fill_null([0.0] * width) if column.null_count else column
    data = np.ascontiguousarray(filled.flatten().to_numpy(zero_copy_only=False), np.dtype(kind).newbyteorder("<"))
    rows = data.reshape(len(column), width)
    return [row.tobytes() if valid else None for row, valid in zip(rows, column.is_valid().to_pylist(), strict=True)]


def restored(values: list[Any], kind: pa.DataType) -> pa.Array:
    """SQLite's values as they were delivered; in the widest type that is held alike, if `kind` does not hold them."""
    if isinstance(kind, pa.BaseExtensionType):
        return clothed(restored(values, kind.storage_type), kind)
    t, bare = pa.types, plain(kind)
    if t.is_boolean(bare):
        return pa.array([None if v is None else bool(v) for v in values], kind)
    if t.is_null(bare):
        return pa.array(values)  # of an earlier delivery
    if t.is_duration(bare):
        return pa.array(values, pa.int64()).cast(kind)
    if t.is_floating(bare) or _is_plain(bare):
        wide = pa.binary() if _is_bytes(bare) else widest(bare)
        return as_delivered(pa.chunked_array([pa.array(values, wide)]), kind).combine_chunks()
    if is_vector(bare):
        form = np.dtype(bare.value_type.to_pandas_dtype()).newbyteorder("<")
        return pa.array([None if v is None else np.frombuffer(v, form) for v in values], bare)
    texts = pa.array(values, pa.string())
    if not t.is_nested(bare) and not t.is_decimal(bare):
        texts = pc.binary_join_element_wise('"', texts, '"', "")
    return from_json(texts, bare)


def key_type(declared: str) -> pa.DataType:
    """The type of values in a column of others, by the rules of SQLite (datatype3.html, 3.1)."""
    kinds = (
        ("INT", pa.int64()),
        ("CHAR CLOB TEXT", pa.string()),
        ("BLOB", pa.binary()),
        ("REAL FLOA DOUB", pa.float64()),
    )
    return next((k for words, k in kinds if any(word in declared.upper() for word in words.split())), pa.string())

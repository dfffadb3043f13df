"""Types of DuckDB's columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from gristmill.arrow.schemas import plain, storage, unwritable
from gristmill.errors import BadJob
from gristmill.stores.contract import fields_but_for_capitals
from gristmill.stores.sql import folded, holds_decimals, quoted

_SIMPLE = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.uint8(): "UTINYINT",
    pa.uint16(): "USMALLINT",
    pa.uint32(): "UINTEGER",
    pa.uint64(): "UBIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    **dict.fromkeys((pa.string(), pa.large_string()), "VARCHAR"),
    **dict.fromkeys((pa.binary(), pa.large_binary()), "BLOB"),
    **dict.fromkeys((pa.date32(), pa.date64()), "DATE"),
    **dict.fromkeys((pa.time32("s"), pa.time32("ms"), pa.time64("us")), "TIME"),
    pa.time64("ns"): "TIME_NS",
    pa.null(): "INTEGER",
}
_STAMPS = {"s": "TIMESTAMP_S", "ms": "TIMESTAMP_MS", "us": "TIMESTAMP", "ns": "TIMESTAMP_NS"}
# Types of columns that hold the values of others, as SQL: by the type that they would have.
_WIDER: Mapping[str, tuple[str, ...]] = {
    "TINYINT": ("SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "FLOAT", "DOUBLE"),
    "SMALLINT": ("INTEGER", "BIGINT", "HUGEINT", "FLOAT", "DOUBLE"),
    "INTEGER": ("BIGINT", "HUGEINT", "DOUBLE"),
    "BIGINT": ("HUGEINT",),
    "UTINYINT": ("USMALLINT", "UINTEGER", "UBIGINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "FLOAT", "DOUBLE"),
    "USMALLINT": ("UINTEGER", "UBIGINT", "INTEGER", "BIGINT", "HUGEINT", "FLOAT", "DOUBLE"),
    "UINTEGER": ("UBIGINT", "BIGINT", "HUGEINT", "DOUBLE"),
    "UBIGINT": ("HUGEINT",),
    "FLOAT": ("DOUBLE",),
    "DATE": (),
}


def column_type(kind: pa.DataType, where: str) -> str:
    """The SQL type that holds all values of an Arrow type. Raises BadJob."""
    t = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return column_type(kind.storage_type, where)
    if (bare := plain(kind)) != kind:
        return column_type(bare, where)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if t.is_timestamp(kind):
        if kind.tz is None:
            return _STAMPS[kind.unit]
        if kind.unit != "ns":
            return "TIMESTAMP WITH TIME ZONE"
    if t.is_fixed_size_binary(kind):
        return "BLOB"
    if t.is_decimal(kind) and kind.precision <= 38 and 0 <= kind.scale <= kind.precision:
        return f"DECIMAL({kind.precision},{kind.scale})"
    if t.is_fixed_size_list(kind):
        return f"{column_type(kind.value_type, where)}[{kind.list_size}]"
    if t.is_list(kind) or t.is_large_list(kind):
        return f"{column_type(kind.value_type, where)}[]"
    if t.is_map(kind):
        return f"MAP({column_type(kind.key_type, where)}, {column_type(kind.item_type, where)})"
    if t.is_struct(kind) and (odd := next((f.name for f in kind if not f.name or "\0" in f.name), None)) is not None:
        raise BadJob(f"{where} has a field named {odd!r}, as DuckDB names none: give it another name in a step")
    if (why := fields_but_for_capitals(kind, "DuckDB", folded)) is not None:
        raise BadJob(f"{where}: {why}")
    if t.is_struct(kind) and kind.num_fields and unwritable(kind) is None:
        return f"STRUCT({', '.join(f'{quoted(f.name)} {column_type(f.type, where)}' for f in kind)})"
    raise BadJob(
        f"{where} is {kind}, which DuckDB cannot hold without loss: cast it in a step, or leave it out (drop=)"
    )


def holds(connection: Any, there: str, kind: pa.DataType, where: str) -> bool:
    """Whether a column of the type `there`, as DuckDB writes it, holds all values of an Arrow type: names of fields,
    which we always quote, are quoted by DuckDB where its grammar asks for it. Raises BadJob if none does.
    """
    own, bare = column_type(kind, where), storage(kind)
    digits = re.fullmatch(r"DECIMAL\((\d+),(\d+)\)", there)
    if digits is not None and pa.types.is_decimal(bare):
        return holds_decimals(int(digits[1]), int(digits[2]), bare)
    return there == own or there in _WIDER.get(own, ()) or ("STRUCT(" in own and there == str(connection.sqltype(own)))

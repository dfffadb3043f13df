"""Values as keys: the form in which they are compared by whoever knows less of them than Arrow, such as DuckDB, whose
intervals have microseconds. Two values are equal in it if they are, and only then; of numbers -0.0 is 0.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.arrow.casts import is_list, rebuilt
from gristmill.arrow.schemas import plain

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["comparable", "comparable_type", "has_nan", "positive_zeros"]


def comparable_type(kind: pa.DataType) -> pa.DataType:
    """The type of `comparable` values: whole numbers for times and floats, bytes for decimals, and those inside lists
    and structs.
    """
    import pyarrow as pa

    t, kind = pa.types, plain(kind)
    if isinstance(kind, pa.BaseExtensionType):
        return comparable_type(kind.storage_type)
    if t.is_decimal(kind):
        return pa.binary(kind.bit_width // 8)
    if t.is_temporal(kind) or t.is_floating(kind):
        return pa.int64() if kind.bit_width == 64 else pa.int32()
    if t.is_map(kind):
        pair = [("key", comparable_type(kind.key_type)), ("value", comparable_type(kind.item_type))]
        return pa.list_(pa.struct(pair))
    if is_list(kind):
        return pa.list_(comparable_type(kind.value_type))
    if t.is_struct(kind):
        return pa.struct([f.with_type(comparable_type(f.type)) for f in kind])
    return kind


def comparable(values: pa.Array) -> pa.Array:
    """The values in that form, nulls as nulls."""
    return rebuilt(values, comparable_type(values.type), _leaf)


def _leaf(values: pa.Array, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(values.type):
        values = positive_zeros(values.cast(pa.float32()) if pa.types.is_float16(values.type) else values)
        some = pc.is_nan(values)  # of which there are many
        values = pc.if_else(some, pa.scalar(float("nan"), values.type), values) if pc.any(some).as_py() else values
        return values.view(kind)
    return values.view(kind) if pa.types.is_decimal(values.type) else values.cast(kind)


def positive_zeros(values: pa.Array) -> pa.Array:
    """Floats in which -0.0 is 0.0, as all compare them but those that look at bytes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_float16(values.type):  # few of Arrow's functions support it
        return positive_zeros(values.cast(pa.float32())).cast(values.type)
    return pc.add(values, pa.scalar(0.0, values.type)) if pa.types.is_floating(values.type) else values


def has_nan(values: pa.Array) -> pa.Array | None:
    """Which values are NaN; None if there can be none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_floating(values.type):
        return None
    return pc.is_nan(values.cast(pa.float32()) if pa.types.is_float16(values.type) else values)

"""Arrow types compared: which one holds the values of both, and which ones readers know."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def plain(kind: pa.DataType) -> pa.DataType:
    """A type for the same values without features that few readers know: encodings become what they hold, views the
    types that they are views of, vectors of length 0 lists. Field names stay.
    """
    import pyarrow as pa

    t = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        bare = plain(kind.storage_type)
        return kind if bare == kind.storage_type else bare
    if t.is_dictionary(kind) or t.is_run_end_encoded(kind):
        return plain(kind.value_type)
    if t.is_string_view(kind) or t.is_binary_view(kind):
        return pa.string() if t.is_string_view(kind) else pa.binary()
    if t.is_struct(kind):
        return pa.struct([_plain(f) for f in kind])
    if t.is_map(kind):
        return pa.map_(_plain(kind.key_field), _plain(kind.item_field), kind.keys_sorted)
    if t.is_fixed_size_list(kind) and kind.list_size:
        return pa.list_(_plain(kind.value_field), kind.list_size)
    if t.is_large_list(kind) or t.is_large_list_view(kind):
        return pa.large_list(_plain(kind.value_field))
    if t.is_list(kind) or t.is_list_view(kind) or t.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_field))
    return kind


def storage(kind: pa.DataType) -> pa.DataType:
    """The plain type that values are held as: that of the storage of an extension type, too."""
    import pyarrow as pa

    return plain(kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind)


def _plain(field: pa.Field) -> pa.Field:
    return field.with_type(plain(field.type))


def unwritable(kind: pa.DataType) -> str | None:
    """What in the type, at any depth, no sink and no Parquet file can hold; None if all of it can be held."""
    import pyarrow as pa

    t = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return unwritable(kind.storage_type)
    if t.is_struct(kind) and len({f.name for f in kind}) < kind.num_fields:
        return f"a struct with two fields of the same name ({', '.join(f.name for f in kind)})"
    if t.is_union(kind) or t.is_interval(kind):
        return "a union" if t.is_union(kind) else "an interval"
    inner = [kind.value_type] if t.is_dictionary(kind) else [kind.field(i).type for i in range(kind.num_fields)]
    if any(isinstance(k, pa.BaseExtensionType) for k in inner):
        return "an extension type inside another type"  # pyarrow cannot make arrays of these
    return next((why for k in inner if (why := unwritable(k))), None)


def wider(one: pa.DataType, other: pa.DataType, text: bool = False) -> pa.DataType | None:
    """A type that holds the values of both without loss, else None. `text`: read from text, so int fits float."""
    import pyarrow as pa

    t = pa.types
    if one == other or t.is_null(other):
        return one
    if t.is_null(one):
        return other
    if t.is_integer(one) and t.is_integer(other):
        return _wider_integer(one, other)
    if t.is_floating(one) and t.is_floating(other):
        return max(one, other, key=lambda k: k.bit_width)
    if (t.is_integer(one) and t.is_floating(other)) or (t.is_floating(one) and t.is_integer(other)):
        whole, real = (one, other) if t.is_integer(one) else (other, one)
        exact = {16: 8, 32: 16, 64: 32}[real.bit_width]  # integers with no more bits than the mantissa stay exact
        return real if whole.bit_width <= exact else (pa.float64() if text or whole.bit_width <= 32 else None)
    for is_kind, big in ((is_string, pa.large_string()), (_is_bytes, pa.large_binary())):
        if is_kind(one) and is_kind(other):
            return big
    if t.is_decimal(one) and t.is_decimal(other):
        return _wider_decimal(one, other)
    if t.is_timestamp(one) and t.is_timestamp(other) and one.tz == other.tz:
        return min(one, other, key=lambda k: ["ns", "us", "ms", "s"].index(k.unit))
    if t.is_date(one) and t.is_timestamp(other) and other.tz is None and text:
        return other
    if t.is_date(other) and t.is_timestamp(one) and one.tz is None and text:
        return one
    return _wider_nested(one, other, text)


def real(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The float type for whole numbers and floats together if each value is exact, which only they can show."""
    import pyarrow as pa

    t = pa.types
    numbers = all(t.is_integer(k) or t.is_floating(k) for k in (one, other))
    return pa.float64() if numbers and (t.is_floating(one) or t.is_floating(other)) else None


def is_string(kind: pa.DataType) -> bool:
    """Whether values of the type are text."""
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _wider_integer(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    import pyarrow as pa

    signed = [pa.types.is_signed_integer(k) for k in (one, other)]
    if signed[0] == signed[1]:
        return max(one, other, key=lambda k: k.bit_width)
    whole, natural = (one, other) if signed[0] else (other, one)
    bits = max(whole.bit_width, natural.bit_width * 2)
    return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}.get(bits)


def _wider_decimal(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    import pyarrow as pa

    scale = max(one.scale, other.scale)
    digits = max(one.precision - one.scale, other.precision - other.scale) + scale
    return pa.decimal128(digits, scale) if digits <= 38 else (pa.decimal256(digits, scale) if digits <= 76 else None)


def _wider_nested(one: pa.DataType, other: pa.DataType, text: bool) -> pa.DataType | None:
    import pyarrow as pa

    t = pa.types
    lists = [k for k in (one, other) if t.is_list(k) or t.is_large_list(k) or t.is_fixed_size_list(k)]
    if len(lists) == 2:
        inner = wider(one.value_type, other.value_type, text)
        if inner is None:
            return None
        if t.is_fixed_size_list(one) and t.is_fixed_size_list(other) and one.list_size == other.list_size:
            return pa.list_(inner, one.list_size)
        if t.is_fixed_size_list(one) or t.is_fixed_size_list(other):
            return None  # vectors of different width are not one column
        return pa.large_list(inner) if t.is_large_list(one) or t.is_large_list(other) else pa.list_(inner)
    if t.is_struct(one) and t.is_struct(other):
        ours, theirs = {f.name: f.type for f in one}, {f.name: f.type for f in other}
        if not text and set(ours) != set(theirs):
            return None
        fields = []
        for name in dict.fromkeys([*ours, *theirs]):
            both = wider(ours.get(name, pa.null()), theirs.get(name, pa.null()), text)
            if both is None:
                return None
            fields.append(pa.field(name, both))
        return pa.struct(fields)
    return None


def nullable(schema: pa.Schema) -> pa.Schema:
    """The schema with columns that may all hold nulls."""
    import pyarrow as pa

    return pa.schema([f.with_nullable(True) for f in schema], metadata=schema.metadata)

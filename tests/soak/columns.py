"""Random Arrow columns of every type that a source can hold, with awkward values; in a form that compares."""

from __future__ import annotations

import datetime as dt
import decimal
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

UNITS = ("s", "ms", "us", "ns")
TEXTS = ["", "a", "null", "None", "NaN", " edges ", 'quo"te', "two\nlines", "cr\r\nlf",
         "a,b;c\td", "Zażółć", "🙂" * 3, "x" * 3000, "\\", "'", "{}", "0", "1e5", "true"]  # fmt: skip
FLOATS = [0.0, -0.0, 1.5, -1e-308, 5e-324, 1e308, 1 / 3, 123456789.123456789, float("nan"), float("inf"), -float("inf")]


def kind(chance: Random, depth: int = 2) -> pa.DataType:
    """A type, nested at most `depth` deep."""
    plain: list[Callable[[], pa.DataType]] = [
        lambda: chance.choice([pa.int8(), pa.int16(), pa.int32(), pa.int64()]),
        lambda: chance.choice([pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]),
        lambda: chance.choice([pa.float16(), pa.float32(), pa.float64()]),
        lambda: chance.choice([pa.bool_(), pa.string(), pa.large_string()]),
        lambda: chance.choice([pa.binary(), pa.large_binary(), pa.binary(5)]),
        lambda: chance.choice([pa.date32(), pa.time32("ms"), pa.time64("us"), pa.time64("ns")]),
        lambda: pa.timestamp(chance.choice(UNITS[1:]), chance.choice([None, "UTC", "Europe/Warsaw"])),
        lambda: pa.duration(chance.choice(UNITS)),  # Parquet has no seconds for the others
        lambda: pa.decimal128(chance.choice([5, 18, 38]), 2),
        lambda: pa.dictionary(pa.int32(), pa.string()),
        pa.null,
    ]  # fmt: skip
    if depth == 0 or chance.random() < 0.75:
        return chance.choice(plain)()

    def inner() -> pa.DataType:
        return next(
            t
            for t in iter(lambda: kind(chance, depth - 1), None)
            if not pa.types.is_dictionary(t) and not pa.types.is_null(t)
        )

    return chance.choice([
        lambda: pa.list_(inner()), lambda: pa.large_list(inner()), lambda: pa.list_(inner(), chance.choice([1, 3])),
        lambda: pa.struct([("a", inner()), ("b", inner())]), lambda: pa.map_(pa.string(), inner()),
    ])()  # fmt: skip


JSON_KINDS = (pa.bool_(), pa.int64(), pa.float64(), pa.string(), pa.list_(pa.int64()), pa.list_(pa.string()),
              pa.struct([("a", pa.int64()), ("b", pa.string())]))  # fmt: skip
CSV_KINDS = (pa.bool_(), pa.int64(), pa.float64(), pa.string())


def column(chance: Random, of: pa.DataType, rows: int, nulls: float) -> pa.Array:
    """`rows` values of a type, a share of them null."""
    if pa.types.is_null(of):
        return pa.nulls(rows)
    if pa.types.is_dictionary(of):
        return column(chance, of.value_type, rows, nulls).dictionary_encode()
    return pa.array([None if chance.random() < nulls else value(chance, of) for _ in range(rows)], of)


def value(chance: Random, of: pa.DataType) -> Any:
    """A value of a type, as `pa.array` takes it."""
    t = pa.types
    if t.is_boolean(of):
        return chance.random() < 0.5
    if t.is_integer(of):
        most = 2 ** (of.bit_width - t.is_signed_integer(of)) - 1
        return chance.choice([0, 1, most, -most - 1 if t.is_signed_integer(of) else 0, chance.randint(0, most)])
    if t.is_floating(of):
        made = chance.choice(FLOATS) if chance.random() < 0.3 else chance.uniform(-1e4, 1e4)
        if t.is_float64(of):
            return made
        with np.errstate(over="ignore"):
            return np.float16(made) if t.is_float16(of) else float(np.float32(made))
    if t.is_string(of) or t.is_large_string(of):
        return chance.choice(TEXTS) if chance.random() < 0.5 else f"text {chance.randrange(1000)}"
    if t.is_fixed_size_binary(of):
        return chance.randbytes(of.byte_width)
    if t.is_binary(of) or t.is_large_binary(of):
        return chance.randbytes(chance.choice([0, 1, 30]))
    if t.is_decimal(of):
        return decimal.Decimal(chance.randint(-(10 ** (of.precision - 1)), 10 ** (of.precision - 1))).scaleb(
            -of.scale, decimal.Context(prec=60)
        )
    if t.is_date(of):
        return dt.date(1969, 12, 25) + dt.timedelta(days=chance.randrange(40_000))
    if t.is_time(of):
        scale = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[of.unit]
        return pa.scalar(chance.randrange(86_400 * scale), pa.int32() if t.is_time32(of) else pa.int64()).cast(of)
    if t.is_timestamp(of) or t.is_duration(of):
        return pa.scalar(
            chance.randint(-(10**9), 4 * 10**9) * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[of.unit] // 10,
            pa.int64(),
        ).cast(of)
    if t.is_struct(of):
        return {f.name: value(chance, f.type) for f in of}
    if t.is_map(of):
        return [(str(n), value(chance, of.item_type)) for n in range(chance.randrange(3))]
    size = of.list_size if t.is_fixed_size_list(of) else chance.choice([0, 1, 4])
    return [value(chance, of.value_type) for _ in range(size)]


def plain(scalar: Any) -> Any:
    """An Arrow scalar in a form that compares: bits of floats, counts of times, tuples of what is nested."""
    t, of = pa.types, scalar.type
    if not scalar.is_valid:
        return None
    if t.is_dictionary(of):
        return plain(scalar.value)
    if t.is_floating(of):
        number = float(scalar.as_py())
        return "nan" if number != number else struct.pack("<d", number).hex()
    if t.is_temporal(of):
        return scalar.value
    if t.is_struct(of):
        return tuple((f.name, plain(scalar[f.name])) for f in of)
    if t.is_nested(of):
        return tuple(plain(v) for v in scalar.values)
    return scalar.as_py()


def plains(array: Any) -> list[Any]:
    """The values of an array or a column."""
    return [plain(v) for v in array]

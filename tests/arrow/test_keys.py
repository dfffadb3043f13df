"""Values as keys: equal in the form in which they are compared if they are equal, and only then."""

from __future__ import annotations

import decimal
import math
from typing import Any

import pyarrow as pa
import pytest

from gristmill.arrow.keys import comparable
from gristmill.arrow.spilling import spilling

NS = 1_700_000_000_123_456_789
# Values that are all different, some of them by the last digit that the type has.
APART: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int8": (pa.int8(), [-128, 127, 0]),
    "int64": (pa.int64(), [2**53, 2**53 + 1, -(2**63)]),
    "uint64": (pa.uint64(), [2**64 - 1, 2**64 - 2, 2**53 + 1, 0]),
    "bool": (pa.bool_(), [True, False]),
    "half": (pa.float16(), [0.0, 1.0, 6e-8]),
    "single": (pa.float32(), [0.0, 1e-45, 16777216.0, 16777218.0]),
    "double": (pa.float64(), [0.0, 5e-324, 0.1, 0.30000000000000004, 0.3]),
    "decimal": (pa.decimal128(38, 2), [decimal.Decimal(10**35 + i) for i in range(3)]),
    "decimal256": (pa.decimal256(76, 0), [decimal.Decimal(10**60 + i) for i in range(3)]),
    "time_ns": (pa.time64("ns"), [0, 1, 86_399_999_999_999]),
    "time_s": (pa.time32("s"), [0, 1, 86_399]),
    "stamp_ns": (pa.timestamp("ns"), [NS, NS + 1, -1]),
    "zoned_ns": (pa.timestamp("ns", "Europe/Berlin"), [NS, NS + 1]),
    "stamp_s": (pa.timestamp("s"), [-(2**40), 2**40, 0]),
    "duration_ns": (pa.duration("ns"), [NS, NS + 1, -NS]),
    "duration_s": (pa.duration("s"), [2**62, 2**62 + 1]),
    "date32": (pa.date32(), [0, -1, 2**30]),
    "date64": (pa.date64(), [0, 86_400_000]),
    "text": (pa.string(), ["", "a", "A", "a ", "é", "e\u0301", "a\0b"]),
    "large_text": (pa.large_string(), ["a", "b"]),
    "text_view": (pa.string_view(), ["a", "b", "a longer text than fits into a view"]),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), ["a", "b"]),
    "dictionary_ns": (pa.dictionary(pa.int8(), pa.duration("ns")), [NS, NS + 1]),
    "bytes": (pa.binary(), [b"", b"\0", b"\xff"]),
    "large_bytes": (pa.large_binary(), [b"\xff\0", b"\xff"]),
    "bytes_view": (pa.binary_view(), [b"a", b"b"]),
    "fixed": (pa.binary(3), [b"abc", b"ab\0"]),
    "list_ns": (pa.list_(pa.duration("ns")), [[NS], [NS + 1], [], [NS, NS]]),
    "record_ns": (pa.struct([("t", pa.duration("ns"))]), [{"t": NS}, {"t": NS + 1}]),
}


def given(name: str) -> pa.Array:
    """The values, given as numbers where Python has no such times."""
    kind, values = APART[name]
    if pa.types.is_temporal(kind):
        return pa.array(values, pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)
    if pa.types.is_dictionary(kind):
        inner = pa.array(values, pa.int64()).cast(kind.value_type) if name.endswith("ns") else pa.array(values)
        return pa.DictionaryArray.from_arrays(pa.array(range(len(values)), kind.index_type), inner)
    return pa.array(values, kind)


@pytest.mark.parametrize("name", APART)
def test_equal_and_only_then(name: str) -> None:
    """In DuckDB and in Python, and whatever stands before the values in their buffers."""
    values = given(name)
    rows = pa.chunked_array([values, values.slice(1)])
    made = pa.chunked_array([comparable(chunk) for chunk in rows.chunks])
    assert len({repr(v) for v in made.to_pylist()}) == len(values)
    with spilling("64MB") as db:
        db.register("given", pa.table({"k": made}))
        found = db.sql("SELECT times, count(*) FROM (SELECT count(*) AS times FROM given GROUP BY k) GROUP BY times")
        assert dict(found.fetchall()) == {1: 1, 2: len(values) - 1}
    assert comparable(pa.nulls(2, values.type)).null_count == 2
    assert comparable(values.slice(0, 0)).type == made.type


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_zeros_and_nan(kind: pa.DataType) -> None:
    """-0.0 is 0.0, and NaN is NaN, whichever."""
    made = comparable(pa.array([0.0, -0.0, math.nan, -math.nan, 1.0], kind)).to_pylist()
    assert made[0] == made[1] and made[2] == made[3] and len(set(made)) == 3

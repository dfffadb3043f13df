"""Digests of rows that steps make: of what a row holds, and of nothing that stands beside it."""

from __future__ import annotations

import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.worker.identity import digest_of_row, digests_of

ROW = st.fixed_dictionaries(
    {
        "text": st.none() | st.text(),
        "number": st.none() | st.integers(-(2**40), 2**40),
        "day": st.none() | st.dates(),
        "list": st.none() | st.lists(st.text(max_size=3), max_size=3),
    }
)


@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=6), st.booleans())
def test_the_digest_of_a_row_is_its_own(rows: list[dict[str, object]], fraction: bool) -> None:
    """Alone or among others, also where a column's type is another for their sake; other values have another one."""
    others = [{**rows[0], "number": 0.5}] if fraction else []
    found = digests_of(pa.Table.from_pylist([*rows, *others]))
    for row, digest in zip(rows, found.tolist(), strict=False):
        assert digests_of(pa.Table.from_pylist([row])).tolist() == [digest]
        assert digests_of(pa.Table.from_pylist([{**row, "text": f"{row['text']}!"}])).tolist() != [digest]


DAY, NOON = datetime.datetime(2026, 1, 1), datetime.datetime(2026, 1, 1, 12)
# A value, the same beside a neighbour, and that neighbour.
WIDENED = {
    "list": ([8, 1], [0.5]),
    "list of lists": ([[8], None], [[0.5]]),
    "struct": ({"a": 8}, {"b": 1, "a": 0.5}),
    "structs in a list": ([{"a": 8}], [{"b": [1], "a": 0.5}]),
    "decimal": (Decimal(8), Decimal("0.25")),
    "rounded decimal": (Decimal("0.1"), Decimal("0.00000000000001")),
    "decimals in a list": ([Decimal("8.5")], [Decimal("0.25")]),
    "decimal and int": (8, Decimal("1.5")),
    "int": (8, 0.5),
}


@pytest.mark.parametrize("case", WIDENED)
def test_the_digest_of_a_row_does_not_change_with_its_column_s_type(case: str) -> None:
    """Alone, and beside a row for whose sake it is held as another type; the other has another one."""
    value, other = WIDENED[case]
    alone = digests_of(pa.table({"v": pa.array([value, None])}))
    beside = digests_of(pa.table({"v": pa.array([value, other, None])}))
    assert alone[0] == beside[0] != beside[1]
    assert beside[2] == alone[1] == 0
    held = pa.table({"v": pa.array([value, other])}).to_pylist()[0]
    assert digest_of_row({"v": value}) == digest_of_row(held) != digest_of_row({"v": other})


def test_the_digest_of_a_time_is_that_of_the_instant() -> None:
    """In whatever unit a column holds it, or as a day."""
    times = [DAY, datetime.datetime(1969, 12, 31), None]
    kinds = [pa.timestamp(u) for u in ("s", "ms", "us", "ns")] + [pa.date32(), pa.date64()]
    found = {tuple(digests_of(pa.table({"v": pa.array(times).cast(kind)})).tolist()) for kind in kinds}
    assert len(found) == 1
    assert len(set(*found)) == 3
    assert digests_of(pa.table({"v": [NOON]})) != digests_of(pa.table({"v": [DAY]}))
    assert digest_of_row({"v": DAY}) == digest_of_row({"v": DAY.date()}) != digest_of_row({"v": NOON})


def test_the_digest_of_a_piece_is_of_its_values() -> None:
    """Equal values have the same one, be they one object or two, or arrays of objects; others have another."""
    word = "".join(["wo", "rd"])
    assert digest_of_row({"a": word, "b": word}) == digest_of_row({"a": "word", "b": "".join(["w", "ord"])})
    pieces = [{"a": np.array([a, "b"], dtype=object), "at": datetime.date(2026, 1, 1)} for a in (word, "".join("word"))]
    assert digest_of_row(pieces[0]) == digest_of_row(pieces[1]) != digest_of_row({"a": ["word"]})
    assert digest_of_row({"a": Decimal("1.5")}) != digest_of_row({"a": Decimal("1.6")})

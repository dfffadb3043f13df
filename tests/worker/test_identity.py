"""Digests of rows that steps make: of what a row holds, and of nothing that stands beside it."""

from __future__ import annotations

import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
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


def test_the_digest_of_a_piece_is_of_its_values() -> None:
    """Equal values have the same one, be they one object or two, or arrays of objects; others have another."""
    word = "".join(["wo", "rd"])
    assert digest_of_row({"a": word, "b": word}) == digest_of_row({"a": "word", "b": "".join(["w", "ord"])})
    pieces = [{"a": np.array([a, "b"], dtype=object), "at": datetime.date(2026, 1, 1)} for a in (word, "".join("word"))]
    assert digest_of_row(pieces[0]) == digest_of_row(pieces[1]) != digest_of_row({"a": ["word"]})
    assert digest_of_row({"a": Decimal("1.5")}) != digest_of_row({"a": Decimal("1.6")})

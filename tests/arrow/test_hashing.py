"""Digests of rows: of values alone, wherever a row is and however its columns are laid out."""

from __future__ import annotations

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest

from gristmill.arrow.hashing import kinds_of, rough, row_digests

ROWS = pa.table(
    {
        "number": pa.array([1, None, 3, 0], pa.int32()),
        "text": ["x", None, "", "é"],
        "list": pa.array([[1.0, 2.0], None, [], [0.0]], pa.list_(pa.float32())),
        "vector": pa.array([[1, 2], None, [3, 4], [0, 0]], pa.list_(pa.int16(), 2)),
        "holes": [[1, None], None, [], [0]],
        "struct": [{"q": 1}, None, {"q": None}, {"q": 0}],
        "day": [datetime.date(2020, 1, 1), None, datetime.date(2020, 1, 2), datetime.date(1970, 1, 1)],
        "bool": [True, None, False, False],
        "texts": [["a"], None, [], [""]],
        "price": pa.array([decimal.Decimal("1.5"), None, decimal.Decimal("0.0"), decimal.Decimal("2.5")]),
        "bytes": [b"\0", None, b"", b"a"],
        "choice": pa.array(["u", None, "v", "u"]).dictionary_encode(),
        "nothing": pa.nulls(4),
    }
)


@pytest.mark.parametrize("name", [*ROWS.column_names, None])
def test_a_row_is_the_same_anywhere(name: str | None) -> None:
    """Alone, in a slice, after others, in another order, and with a dictionary's values in another place."""
    rows = ROWS if name is None else ROWS.select([name])
    whole = row_digests(rows, "test")
    alone = np.concatenate([row_digests(rows.slice(i, 1), "test") for i in range(4)])
    assert whole.tolist() == alone.tolist()
    moved = pa.concat_tables([rows.slice(2), rows.slice(0, 2)])
    assert row_digests(moved, "test").tolist() == [whole[i].item() for i in (2, 3, 0, 1)]
    assert row_digests(rows.slice(1, 2), "test").tolist() == whole[1:3].tolist()
    if name not in ("nothing", "bool", "choice"):
        assert len(set(whole.tolist())) == 4
    assert row_digests(rows, "other")[0] != whole[0]
    assert len(row_digests(rows.slice(0, 0), "test")) == 0
    assert (rough(rows) == np.concatenate([rough(rows.slice(i, 1)) for i in range(4)])).all()


def test_layouts_do_not_count() -> None:
    """Large strings, views and dictionaries hold the same values; another name or type is another row."""
    texts = pa.array(["a", "bc", None])
    kinds = [texts, texts.cast(pa.large_string()), texts.dictionary_encode()]
    found = [row_digests(pa.table({"t": kind}), "").tolist() for kind in kinds]
    assert found[0] == found[1] == found[2]
    assert kinds_of(pa.schema([("t", pa.large_string())])) == [["t", "string"]]
    assert row_digests(pa.table({"u": texts}), "").tolist() != found[0]
    ints, longs = (row_digests(pa.table({"n": pa.array([1], kind)}), "") for kind in (pa.int32(), pa.int64()))
    assert ints[0] != longs[0]


def test_values_do_not_run_together() -> None:
    """Where one column ends and the next begins counts."""
    one, other = (pa.table({"a": [a], "b": [b]}) for a, b in (("xy", "z"), ("x", "yz")))
    assert row_digests(one, "")[0] != row_digests(other, "")[0]
    empty, null = (pa.table({"a": pa.array([a], pa.string())}) for a in ("", None))
    assert row_digests(empty, "")[0] != row_digests(null, "")[0]

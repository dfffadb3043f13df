"""Vectors that are missing: written, or dead with the way out where pyarrow could not read them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.arrow import nullvectors

VECTOR = pa.list_(pa.float32(), 3)
KINDS: dict[str, tuple[pa.DataType, list[Any], list[bool]]] = {
    "plain": (VECTOR, [[1, 2, 3], None, [4, 5, 6], None], [False, True, False, True]),
    "in a list": (pa.list_(VECTOR), [[[1, 2, 3]], [None], [], None], [False, True, False, False]),
    "in a struct": (pa.struct({"v": VECTOR}), [{"v": [1, 2, 3]}, {"v": None}, None], [False, True, True]),
    "in a map": (pa.map_(pa.string(), VECTOR), [[("a", [1, 2, 3])], [("a", None)], []], [False, True, False]),
    "of vectors": (pa.list_(VECTOR, 2), [[[1, 2, 3], None], [[1, 2, 3], [1, 2, 3]]], [True, False]),
    "a value in it": (VECTOR, [[1, None, 3], [1, 2, 3]], [False, False]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_where_a_vector_is_missing(kind: str) -> None:
    """At every depth, in slices and in several chunks."""
    of, values, wanted = KINDS[kind]
    array = pa.array(values, of)
    column = pa.chunked_array([array, array.slice(1), array.slice(0, 0), array.slice(1, 1)])
    found = nullvectors.missing(column)
    assert found is not None
    assert found.tolist() == [*wanted, *wanted[1:], wanted[1]]
    assert nullvectors.missing(pa.chunked_array([pa.array([[1.0], None])])) is None


def some(batch: Any) -> Any:
    """Every third row has no vector."""
    ids = batch.column("id").to_pylist()
    return pa.table({"v": pa.array([None if i % 3 == 2 else [i, i, i] for i in ids], VECTOR)})


@pytest.mark.parametrize("able", [True, False])
def test_a_result_without_some_vectors_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, able: bool) -> None:
    """No row is published that pyarrow cannot give back: it is dead, and comes with a later pyarrow."""
    if able and not nullvectors.READS_BACK:
        pytest.skip(f"pyarrow {pa.__version__} cannot read missing vectors")
    monkeypatch.setattr(nullvectors, "READS_BACK", able)
    job = gm.Job(pa.table({"id": range(9)}), gm.model(some, batch_format="arrow"), str(tmp_path / "out"), workers=0,
                 gates={"min_ok": 0.5})  # fmt: skip
    report = job.run()
    rows = gm.read(report).to_table()["v"].to_pylist()
    assert [r for r in rows if r] == [[i, i, i] for i in range(9) if i % 3 != 2]
    assert (len(rows), gm.dead(report).num_rows) == ((9, 0) if able else (6, 3))
    if not able:
        assert "pip install 'pyarrow>=26'" in gm.dead(report)["message"][0].as_py()
        if int(pa.__version__.partition(".")[0]) >= 26:
            monkeypatch.setattr(nullvectors, "READS_BACK", True)
            gm.retry_dead(job)
            assert len(gm.read(report).to_table()) == 9

"""How long rows are as JSON is known before they are written; those that no line can hold are dead letters."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.errors import BadOutput
from gristmill.sinks import jsonsizes, jsontext
from gristmill.sinks.jsonsizes import row_sizes, sizes_of, too_long

TEXTS = ["", "plain", 'a "quoted" \\ path', "\n\r\t\x01\x1f", "Größe 猫", None]
ARRAYS = {
    "text": pa.array(TEXTS),
    "large": pa.array(TEXTS, pa.large_string()),
    "dictionary": pa.array(TEXTS).dictionary_encode(),
    "no dictionary": pa.array([None] * 6, pa.string()).dictionary_encode(),
    "bytes": pa.array([b"", b"a", b"ab", b"abc", b"abcd", None]),
    "texts": pa.array([[], TEXTS, ["x"], None, [None], [TEXTS[3]]]),
    "pairs": pa.array([[("a", 1)], [], None, [("b", None)], [('"', 2)], []], pa.map_(pa.string(), pa.int64())),
    "struct": pa.array([{"Größe": t, "n": 1} for t in TEXTS]),
    "int": pa.array([-(2**63)] * 6),
    "float": pa.array([-1.7976931348623157e308, 5e-324, float("nan"), float("-inf"), 1.0, None]),
    "bool": pa.array([False, True, None] * 2),
    "null": pa.nulls(6),
    "decimal": pa.array([Decimal("-" + "9" * 76)] * 6, pa.decimal256(76, 0)),
    "small decimal": pa.array([Decimal("1E-38"), None] * 3, pa.decimal128(38, 38)),
    "time": pa.array([dt.datetime(9999, 12, 31, 23, 59, 59, 999_999)] * 6, pa.timestamp("us", "UTC")),
    "vectors": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12) / 7), 2),
}


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("part", [(0, 6), (2, 4), (5, 1)])
def test_no_row_is_longer_than_was_said(kind: str, part: tuple[int, int]) -> None:
    """Of every type, sliced or whole; and the exact sizes of texts are off by what a number may take, no more."""
    rows = pa.table({'a "name"': ARRAYS[kind].slice(*part)})
    lines = b"".join(jsontext.json_lines(rows)).splitlines(keepends=True)
    for exact in (False, True):
        said = row_sizes(rows, exact).tolist()
        assert len(said) == rows.num_rows
        assert all(len(line) <= size for line, size in zip(lines, said, strict=True))
    if kind in ("text", "large", "dictionary"):
        assert all(size - len(line) <= 8 for line, size in zip(lines, said, strict=True))


def test_rows_are_cut_by_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by their mean: one long text among many short ones is on its own, or with few."""
    monkeypatch.setattr(jsontext, "_SLICE_BYTES", 10_000)
    texts = ["x"] * 500 + ["y" * 4000] * 20 + ["z"] * 500
    rows = pa.table({"k": range(1020), "t": texts})
    pieces = [bytes(piece) for piece in jsontext.json_lines(rows)]
    assert max(map(len, pieces)) < 10_000
    assert b"".join(pieces) == b"".join(b'{"k":%d,"t":"%s"}\n' % (k, t.encode()) for k, t in enumerate(texts))


def test_a_row_that_is_too_long_is_refused_before_its_text_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it takes once it is escaped: what would have ended the process with SIGSEGV is an error."""
    monkeypatch.setattr(jsonsizes, "MOST", 2000)
    texts = ["x" * 1900, '"' * 980, '"' * 1001, "\x01" * 340, "x" * 1990]
    rows = pa.table({"t": texts})
    assert too_long(rows) == [2, 3, 4]
    assert too_long(pa.table({"t": [[t, "x"] for t in texts]})) == [2, 3, 4]
    assert b"".join(jsontext.json_lines(rows.slice(0, 2))).count(b"\n") == 2
    for row in (2, 3, 4):
        with pytest.raises(BadOutput, match="bytes as JSON, of at most 2,000: use parquet"):
            list(jsontext.json_lines(rows.slice(row, 1)))
    with pytest.raises(BadOutput, match="bytes as JSON"):
        jsontext.json_texts(pa.array(texts))
    assert int(sizes_of(pa.array(texts[:2])).sum()) > 2000
    assert len(jsontext.json_texts(pa.array(["x" * 900, '"' * 300]))) == 2


def test_a_row_that_is_too_long_for_json_is_a_dead_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are published; a sink of another format takes it."""
    monkeypatch.setattr(jsonsizes, "MOST", 2000)

    def longer(batch: dict[str, Any]) -> dict[str, Any]:
        return {"t": ['"' * (1500 if k == 3 else 10) for k in batch["k"]]}

    job = {"workers": 0, "gates": gm.Gates(min_ok=0.5)}
    source = [{"k": k} for k in range(6)]
    gm.Job(source, longer, gm.sink(str(tmp_path / "out"), format="jsonl", keep=["k"]), **job).run()
    assert gm.read(str(tmp_path / "out")).to_table()["k"].to_pylist() == [0, 1, 2, 4, 5]
    dead = gm.dead(str(tmp_path / "out")).to_pylist()
    assert [(d["position"], d["error"]) for d in dead] == [(3, "TooLong")]
    assert "which no line can have: use parquet" in dead[0]["message"]
    assert gm.Job(source, longer, gm.sink(str(tmp_path / "all"), keep=["k"]), **job).run().rows_ok == 6

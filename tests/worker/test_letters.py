"""Dead letters read back, whatever text an error, a row or a file name holds."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.driver.run import retry_dead
from gristmill.errors import BadJob, BadSource
from gristmill.files.disk import LOCAL
from gristmill.process.failure import failure_of
from gristmill.result.reading import dead_letters
from gristmill.shards.shard import Shard
from gristmill.worker.bisection import Stage
from gristmill.worker.prepare import Letter
from gristmill.worker.recipe import Task
from gristmill.worker.shardcommit import _DeadLetters

HALF = "caf\ud83d"  # as json.loads gives it for a text that was cut in the middle of a character
ANY = st.one_of(
    st.text(st.one_of(st.integers(0, 0x10FFFF), st.integers(0xD7F0, 0xE00F), st.integers(0, 40)).map(chr)),
    st.binary().map(os.fsdecode),
    st.sampled_from(["\0", HALF, "\ud83d\ude00", "\u2028\r\n", '"\\', "x" * 100_000]),
)
VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64), st.floats(allow_nan=False), ANY),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(ANY, inner, max_size=3)),
    max_leaves=6,
)


def escaped(text: str) -> str:
    """As UTF-8 can hold it."""
    return text.encode("utf-8", "backslashreplace").decode()


@settings(deadline=None)
@given(st.lists(st.tuples(ANY, ANY, ANY, ANY, ANY, st.none() | st.dictionaries(ANY, VALUE)), min_size=1, max_size=4))
def test_every_letter_that_is_written_is_read(told: list[tuple[Any, ...]]) -> None:
    """Paths, steps, errors, messages, tracebacks and payloads of any text: one row for each letter, with its text, the
    halves of characters as they are escaped. Other readers of JSON in UTF-8 can read the file, too.
    """
    task = Task("score", Shard(0, ()))
    with tempfile.TemporaryDirectory() as folder:
        file = _DeadLetters(LOCAL, folder, "part", "n")
        for n, (source, step, error, message, trace, payload) in enumerate(told):
            file.write(Letter(source, n, None, None, None, Stage.MODEL, step, error, message, trace, payload), task, ())
        (written,) = file.close()
        rows = dead_letters([written.path]).to_pylist()
        Path(written.path).read_text(encoding="utf-8")
    assert written.rows == len(rows) == len(told)
    for row, (*texts, payload) in zip(rows, told, strict=True):
        assert [row[n] for n in ("source", "step", "error", "message", "traceback")] == [*map(escaped, texts)]
        assert json.dumps(json.loads(row["payload"])) == json.dumps(json.loads(json.dumps(payload)))


def test_letters_that_stand_in_a_sink_with_half_a_character_are_read(tmp_path: Path) -> None:
    """As they were written before."""
    line = {"source": "in", "position": 1, "message": HALF, "payload": {"t": HALF}}
    (tmp_path / "d.jsonl").write_text(json.dumps(line) + "\n")
    (row,) = dead_letters([str(tmp_path / "d.jsonl")]).to_pylist()
    assert row["message"] == "caf\\ud83d" and json.loads(row["payload"]) == {"t": HALF}


@given(ANY)
def test_a_failure_is_text_that_every_file_can_hold(text: str) -> None:
    """Its message and traceback go to events, receipts, logs and dead letters."""
    failure = failure_of(ValueError(text))
    for part in (failure.message, failure.traceback):
        part.encode("utf-8")


def named(rows: list[dict[str, Any]], mended: str) -> list[dict[str, Any]]:
    """Fails at a row whose JSON holds half a character, until there is a folder `mended`."""
    for row in rows:
        name = json.loads(row["j"])
        if name != "a" and not os.path.exists(mended):
            raise ValueError(f"unknown name {name}")
    return [{"y": 1} for _ in rows]


def cut(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Two rows of each, one of them with half a character."""
    return [{"name": json.loads(row["j"])}, {"name": "b"}]


def test_half_a_character_in_an_error_jams_no_command(tmp_path: Path) -> None:
    """The letter is shown, the result verified, and the row scored again."""
    table = pa.table({"x": range(10), "j": ['"a"'] * 9 + ['"caf\\ud83d"']})
    pq.write_table(table, tmp_path / "in.parquet")
    mended, out = tmp_path / "now", str(tmp_path / "out")
    model = gm.model(named, mended=str(mended), batch_format="rows")
    job = gm.Job(str(tmp_path / "in.parquet"), model, out, workers=0, gates={"min_ok": 0.5})
    with pytest.warns(gm.GristmillWarning):
        job.run()
    assert gm.dead(out)["message"].to_pylist() == ["unknown name caf\\ud83d"] and gm.verify(out).ok
    mended.mkdir()
    assert retry_dead(job.spec).rows_dead == 0 and gm.verify(out).ok


def test_a_row_of_a_flat_map_that_no_column_can_hold_is_dead(tmp_path: Path) -> None:
    """It alone, with all that was made of it, as in any other step; the rows beside it are scored."""
    table = pa.table({"x": range(10), "j": ['"a"'] * 4 + ['"caf\\ud83d"'] + ['"c"'] * 5})
    out = str(tmp_path / "out")
    model = gm.model(lambda b: {"y": b["x"]})
    sink = gm.sink(out, keep=["x", "name"])
    job = gm.Job(table, model, sink, steps=[gm.flat_map(cut)], workers=0, gates={"min_ok": 0.5})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = job.run()
    rows = [(r["x"], r["name"], r["y"]) for r in gm.read(out).to_table().to_pylist()]
    assert rows == [(x, n, x) for x in range(10) if x != 4 for n in ("a" if x < 4 else "c", "b")]
    (letter,) = gm.dead(out).to_pylist()
    assert (letter["position"], letter["error"], letter["step"]) == (4, "UnicodeEncodeError", "cut")
    assert (report.rows_in, report.rows_ok, report.rows_dead) == (10, 18, 1)


def test_a_dead_row_whose_text_is_not_utf8_keeps_its_bytes(tmp_path: Path) -> None:
    """Parquet files say that texts are UTF-8, and do not look."""
    text = pa.array([b"ok", b"\xff\xfe"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"x": [1, 2], "t": text}), tmp_path / "in.parquet")

    def picky(table: pa.Table) -> dict[str, Any]:
        if 2 in table["x"].to_pylist():
            raise ValueError("no")
        return {"y": table["x"]}

    out, model = str(tmp_path / "out"), gm.model(picky, batch_format="arrow")
    job = gm.Job(str(tmp_path / "in.parquet"), model, gm.sink(out, keep=["x"]), workers=0, gates={"min_ok": 0.1})
    with pytest.warns(gm.GristmillWarning):
        job.run()
    assert json.loads(gm.dead(out)["payload"][0].as_py()) == {"x": 2, "t": {"base64": "//4="}}


def test_a_file_whose_name_is_not_utf8_is_named(tmp_path: Path) -> None:
    """With exit 2 and the name as it can be shown; or it is skipped like any bad file."""
    pq.write_table(pa.table({"x": [1]}), tmp_path / "good.parquet")
    os.link(tmp_path / "good.parquet", os.fsencode(tmp_path) + b"/caf\xe9.parquet")
    with pytest.raises(BadSource, match=r"caf\\udce9.parquet: the file's name is not UTF-8"):
        gm.Job(str(tmp_path), gm.model(cut), str(tmp_path / "_out")).run()


@pytest.mark.parametrize("option", ["worker_memory", "window_bytes"])
@pytest.mark.parametrize("value", ["100MB", 0, -1, True, 1.5])
def test_sizes_are_bytes(option: str, value: Any) -> None:
    """Anything else is refused where it is written, with the value and what to write."""
    with pytest.raises(BadJob, match=f"{option} is {value!r}: give bytes"):
        gm.Job("in", gm.model(cut), "out", **{option: value})

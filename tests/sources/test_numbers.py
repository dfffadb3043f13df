"""What a text source keeps of a number is the number that was written, or the record is a bad row that says so."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm

BIG = 2**53 + 1  # the first whole number that is no float
TEXT = st.one_of(
    st.integers(-(10**25), 10**25).map(str),
    st.integers(2**53 - 3, 2**53 + 5).map(str),
    st.sampled_from(["0.5", "1e400", "-1E+400", "1e20", "100000000000000000000", "9" * 320, "1e-400", "-0", "1e22"]),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
)


def says(text: str, value: Any) -> bool:
    """Whether a float is what was written: whole numbers exactly, others as the nearest float there is."""
    if text.lstrip("-").isdigit():
        return math.isfinite(value) and int(value) == int(text)
    return math.isfinite(float(text)) and value == float(text)


@pytest.mark.few(1)
@pytest.mark.parametrize("wrap", ['{"a": %s}', '{"a": [1.5, %s]}', '{"a": {"k": [{"n": %s}]}}'])
@settings(deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=12))
def test_a_number_of_json_is_kept_as_written_or_is_a_bad_row(
    scratch: Any, planned: Any, wrap: str, texts: list[str]
) -> None:
    """Beside fractions, at any depth."""
    lines = [wrap % t for t in ["0.5", *texts]]
    read = _types_apart(planned, scratch, lines)
    bad = {b.payload.decode(): b.message for b in read.bad}
    kept = iter(read.rows["a"].to_pylist())
    for line, text in zip(lines, ["0.5", *texts], strict=True):
        if line in bad:
            assert not says(text, float(text)), "a number that fits is a bad row"
            assert "column 'a" in bad[line] and text[:60] in bad[line] and "types=" in bad[line]
            continue
        value = next(kept)
        while isinstance(value, (list, dict)):
            value = value[-1] if isinstance(value, list) else value["k"] if "k" in value else value["n"]
        assert says(text, value)
    assert next(kept, None) is None


def _types_apart(planned: Any, scratch: Any, lines: list[str]) -> Any:
    """Read with types from the first line alone: what comes later was in no sample."""
    path = scratch.file("x.jsonl", "\n".join(lines).encode())
    plan = planned(path)
    plan.schema = planned(scratch.file("first.jsonl", lines[0].encode())).schema
    return plan.read()


@pytest.mark.long
@settings(deadline=None)
@given(texts=st.lists(TEXT | st.sampled_from(["0x10", "-0XFF", "inf", "true", "1"]), min_size=1, max_size=12))
def test_a_number_of_csv_is_kept_as_written_or_is_a_bad_row(scratch: Any, planned: Any, texts: list[str]) -> None:
    """In a column of each kind, whose type the sample gave."""
    plan = planned(scratch.file("x.csv", "".join(["i,d,b\n", *(f"{t},{t},{t}\n" for t in texts)]).encode()))
    sampled = planned(scratch.file("first.csv", b"i,d,b\n1,0.5,true\n")).schema
    for name in sampled.names:
        plan.schema = sampled
        read = plan.read(columns=[name])
        bad = {b.payload.decode() for b in read.bad}
        kept = [t for t in texts if f"{t},{t},{t}" not in bad]
        for text, value in zip(kept, read.rows[name].to_pylist(), strict=True):
            if name == "b":
                assert (text, value) == ("true", True)
            elif name == "i":
                assert int(text) == value
            else:
                assert text == "inf" or says(text, value)
        if name == "d":
            assert all(says(t, float(t)) <= (t in kept) for t in texts if t not in ("0x10", "-0XFF", "true", "inf"))


def test_what_csv_would_take_for_something_else_stays_text(scratch: Any, planned: Any) -> None:
    """Whole numbers beyond 2^53 beside fractions, what is too large for a float, hexadecimal, 1 beside true."""
    text = f"a,b,c,d,e\n{BIG},1e400,0x10,1,1e20\n0.5,0.5,12,true,0.5\n"
    read = planned(scratch.file("x.csv", text.encode())).read()
    assert read.rows.to_pylist() == [
        {"a": str(BIG), "b": "1e400", "c": "0x10", "d": "1", "e": 1e20},
        {"a": "0.5", "b": "0.5", "c": "12", "d": "true", "e": 0.5},
    ]


def test_types_say_that_it_may_round_or_is_text(scratch: Any, planned: Any) -> None:
    """A float that was asked for rounds, but not to infinity; as text a number is what was written."""
    lines = [str(BIG), "1e400", "0.12345678901234567890", '{"k": [1.10]}']
    path = scratch.file("x.jsonl", "\n".join(f'{{"a": {t}}}' for t in lines).encode())
    read = planned(path, types={"a": "float64"}).read()
    assert read.rows["a"].to_pylist() == [float(BIG), 0.12345678901234568]
    assert [b.position for b in read.bad] == [len(lines[0]) + 8, len("".join(lines[:3])) + 24]
    assert planned(path, types={"a": "string"}).read().rows["a"].to_pylist() == lines
    assert planned(scratch.file("y.jsonl", b'{"a": 9007199254740993.0}'), types={"a": "int64"}).read().rows[
        "a"
    ].to_pylist() == [BIG]
    plan = planned(scratch.file("x.csv", f"a,b\n{BIG},1\n1e39,0\n".encode()), types={"a": "float32", "b": "bool"})
    read = plan.read()
    assert (read.rows.to_pylist(), len(read.bad)) == ([{"a": float(2**53), "b": True}], 1)


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_job_keeps_no_rounded_number(tmp_path: Any, form: str) -> None:
    """Where the sample shows only fractions, the record is a dead letter that names the value and its column."""
    rows = ["0.5"] * 400_000 + [str(BIG)] + ["0.5"] * 400_000
    path = tmp_path / f"x.{form}"
    path.write_text("a\n" + "\n".join(rows) if form == "csv" else "\n".join(f'{{"a": {r}}}' for r in rows))
    source = gm.source(str(path), options={"sample_bytes": 1000})
    report = gm.Job(source, ones, gm.sink(str(tmp_path / "out"), keep=["a"]), workers=0).run()
    assert (report.rows_ok, report.rows_dead) == (800_000, 1)
    (dead,) = gm.dead(str(tmp_path / "out")).to_pylist()
    assert dead["stage"] == "read" and str(BIG) in dead["message"] and "'a'" in dead["message"]
    assert report.read().to_table()["a"].unique().to_pylist() == [0.5]


def ones(batch: dict[str, Any]) -> dict[str, Any]:
    """An answer for each row."""
    return {"y": batch["a"] * 0 + 1}


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_column_of_large_floats_is_read_at_the_usual_pace(scratch: Any, planned: Any, form: str) -> None:
    """Numbers that are large but as written cost a look at each, not a parse of each."""

    def seconds(value: str) -> float:
        lines = [value if form == "csv" else json.dumps({"a": 0}).replace("0", value)] * 200_000
        head = "a\n0.5\n" if form == "csv" else '{"a": 0.5}\n'
        plan = planned(scratch.file(f"x.{form}", (head + "\n".join(lines)).encode()))
        begun = time.perf_counter()
        assert plan.read().rows.num_rows == 200_001
        return time.perf_counter() - begun

    usual = min(seconds("1.25e12") for _ in range(2))
    assert min(seconds("1.25e+22") for _ in range(2)) < 4 * usual + 0.2

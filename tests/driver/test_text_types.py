"""Types of text formats, through jobs: what a sample said holds for every row or the row is dead, and what `types` asks
for reaches whoever reads.
"""

from __future__ import annotations

import bz2
import json
import subprocess
import sys
from datetime import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.errors import BadSource

pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")


def echo(rows: list) -> list:
    return [{"seen": repr(row["x"])} for row in rows]


def table(path: Path, values: list[str]) -> str:
    """A CSV of the fields `x`, as they stand here, each with its number; JSON lines with them as JSON text."""
    if path.suffix == ".csv":
        path.write_text("i,x\n" + "".join(f"{i},{v}\n" for i, v in enumerate(values)))
    else:
        path.write_text("".join(f'{{"i": {i}, "x": {v}}}\n' for i, v in enumerate(values)))
    return str(path)


def scored(path: str, sink: Path, **options: Any) -> tuple[dict[int, Any], dict[int, str]]:
    """What a job makes of the rows: values by number, and the messages of those that are dead."""
    given = {"options": {"sample_bytes": options.pop("sample")}} if "sample" in options else {}
    source = gm.source(path, **given, **options)
    model = gm.model(echo, batch_format="rows")
    report = gm.Job(source, model, gm.sink(str(sink), keep=["i", "x"]), workers=0, gates={"min_ok": 0}).run()
    found = report.read().to_table()
    dead = [] if not report.rows_dead else [r["message"] for r in report.dead().to_pylist()]
    assert report.rows_in == found.num_rows + len(dead)
    return dict(zip(found["i"].to_pylist(), found["x"].to_pylist(), strict=True)), dict(enumerate(dead))


# ---------------------------------------------------------------- what a sample said

FIELDS = ["5", "12", "-3", "1.5", "-0.25", "1e3", "", "NA", "true", "TRUE", "false", "x", "2026-01-01", "12:00", "nan"]
FIELDS += ["007", "00", "-05", "+49", "+4.5", "00.5", "0x1F", "0", "-0.0", "9007199254740993", "123456789012345678901"]
FIELDS += ["1e999", "NaN", "inf", " 08", "1"]


def kept(field: str, value: Any) -> bool:
    """Whether a value is what a field says: text is the text itself, a number would be written alike."""
    if value is None:
        return field in ("", "NA")
    if isinstance(value, str):
        return value == field
    if isinstance(value, bool):
        return field.lower() == str(value).lower()
    number = field.strip().lower()
    if number in ("nan", "inf"):
        return repr(value) == number
    digits = number.removeprefix("-")
    if digits != number.lstrip("+-") or (digits[:1] == "0" and digits[1:2].isalnum()) or value in (float("inf"),):
        return False
    return float(number) == value if "." in number or "e" in number else int(number) == value


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    sample=st.lists(st.sampled_from(FIELDS), min_size=1, max_size=4),
    later=st.lists(st.sampled_from(FIELDS), min_size=5, max_size=30),
    quoted=st.booleans(),
)
def test_a_field_is_kept_as_written_or_dead(
    tmp_path_factory: Any, sample: list[str], later: list[str], quoted: bool
) -> None:
    """Whatever the first records made of the column: none comes out as another number or without its zeros."""
    folder = tmp_path_factory.mktemp("csv")
    fields = [*sample, *later]
    path = table(folder / "in.csv", [f'"{f}"' if quoted and i % 2 else f for i, f in enumerate(fields)])
    try:
        found, _ = scored(path, folder / "out", sample=len("i,x\n") + sum(len(f) + 5 for f in sample))
    except gm.errors.GateFailed:
        return  # all of them dead
    for i, value in found.items():
        assert kept(fields[i], value), (fields[i], value, fields)


@pytest.mark.parametrize("code", ["00005", "+4915112345678", " 007", "-01"])
@pytest.mark.parametrize("first", ["90210", "1.5"])
def test_a_code_beyond_the_sample_is_dead_not_cut(tmp_path: Path, code: str, first: str) -> None:
    """A postal code among numbers: the row says which and the way out, in quotes and beside other text too."""
    lines = [f"{first},d{n},07:30\n" for n in range(50)] + [
        f"{code},e,07:30\n",
        f'"{code}",f,"a,b"\n',
        f"{first},g,0\n",
    ]
    (tmp_path / "in.csv").write_text("x,i,t\n" + "".join(lines))
    found, dead = scored(str(tmp_path / "in.csv"), tmp_path / "out", sample=100)
    whole = not (first == "90210" and "+" in code)  # a plus is no integer at all
    assert len(found) == 51 and len(dead) == 2
    assert all(repr(code) in m and (not whole or "types={'x': 'string'}" in m) for m in dead.values())
    found, _ = scored(str(tmp_path / "in.csv"), tmp_path / "text", types={"x": "string"})
    assert code in found.values()


def test_telephones_are_text_and_asked_for_numbers_are_numbers(tmp_path: Path) -> None:
    """Where the sample shows codes they are text; `types` may ask for numbers all the same."""
    path = table(tmp_path / "in.csv", ["+4915", "+4916"])
    assert scored(path, tmp_path / "a")[0] == {0: "+4915", 1: "+4916"}
    path = table(tmp_path / "in2.csv", ["7", "007"])
    assert scored(path, tmp_path / "b", types={"x": "int64"})[0] == {0: 7, 1: 7}


# ---------------------------------------------------------------- what types asks for

ASKED = [
    (".csv", "bool", ["1", "0", "true"], [True, False, True]),
    (".csv", "float64", ["0.5", "9007199254740993"], [0.5, 9007199254740992.0]),
    (".jsonl", "float64", ["0.5", "9007199254740993"], [0.5, 9007199254740992.0]),
]


@pytest.mark.parametrize(("suffix", "kind", "values", "expected"), ASKED)
def test_types_reach_every_reader(tmp_path: Path, suffix: str, kind: str, values: list[str], expected: list) -> None:
    """A job, its preview, a limit behind a condition (which planning counts), and verify of the source."""
    path = table(tmp_path / f"in{suffix}", values)
    found, dead = scored(path, tmp_path / "out", types={"x": kind})
    assert list(found.values()) == expected and not dead
    assert gm.verify(str(tmp_path / "out"), source=True).ok
    limited, _ = scored(path, tmp_path / "limited", types={"x": kind}, where="x IS NOT NULL", limit=2)
    assert list(limited.values()) == expected[:2]
    job = gm.Job(gm.source(path, types={"x": kind}), gm.model(echo, batch_format="rows"), workers=0)
    assert job.preview(10)["seen"].to_pylist() == [repr(v) for v in expected]


@pytest.mark.few(1)
@pytest.mark.parametrize(("suffix", "kind", "values", "expected"), ASKED)
def test_types_of_a_job_file_reach_its_workers(
    tmp_path: Path, suffix: str, kind: str, values: list[str], expected: list
) -> None:
    """In other processes, by the command."""
    path = table(tmp_path / f"in{suffix}", values)
    (tmp_path / "fn.py").write_text("def f(rows):\n    return [{'seen': repr(r['x'])} for r in rows]\n")
    job = {"source": {"uri": path, "types": {"x": kind}}, "model": {"call": "fn:f", "batch_format": "rows"}}
    job |= {"sink": "out", "engine": {"name": "local", "workers": 1}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-m", "gristmill", "run", "job.yaml", "--progress", "off"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert gm.read(str(tmp_path / "out")).to_table()["seen"].to_pylist() == [repr(v) for v in expected]


# ---------------------------------------------------------------- times

TIMES = ["2024-07-01T12:00:00", "2024-07-01T12:00:00+05:00", "2024-07-01 12:00:00Z", "2024-07-01", "2024-07-01T12:00"]
TIMES += ["2024-07-01T12:00:00.123456789", "12:00:00", "12:30", "23:59:59.5", "x", "2024-02-30", "24:00:00", ""]
KINDS = ["timestamp", "timestamp[us, UTC]", "timestamp[s]", "timestamp[ns]", "timestamp[ms, Europe/Berlin]"]
KINDS += ["date32", "date64", "time32[s]", "time32[ms]", "time64[us]"]


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(kind=st.sampled_from(KINDS), values=st.lists(st.sampled_from(TIMES), min_size=2, max_size=8))
def test_csv_and_json_agree_about_times(tmp_path_factory: Any, kind: str, values: list[str]) -> None:
    """The same text is the same time in both, or dead in both: a zone is neither dropped nor made up."""
    folder = tmp_path_factory.mktemp("times")
    each = []
    for suffix in (".csv", ".jsonl"):
        texts = [json.dumps(v or None) if suffix == ".jsonl" else v for v in values]
        try:
            each.append(scored(table(folder / f"in{suffix}", texts), folder / suffix[1:], types={"x": kind})[0])
        except gm.errors.GateFailed:
            each.append({})
    assert each[0] == each[1]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_zone_where_none_is_held_is_told(tmp_path: Path, suffix: str) -> None:
    """And the other way round; the other rows stand."""
    zoned, local = "2024-07-01T12:00:00+05:00", "2024-07-01T12:00:00"
    texts = [json.dumps(v) if suffix == ".jsonl" else v for v in (zoned, local)]
    path = table(tmp_path / f"in{suffix}", texts)
    found, dead = scored(path, tmp_path / "naive", types={"x": "timestamp"})
    assert list(found) == [1] and "has a zone offset: 'timestamp[us, UTC]'" in dead[0]
    found, dead = scored(path, tmp_path / "instants", types={"x": "timestamp[us, UTC]"})
    assert found[0].hour == 7 and list(found) == [0] and "has no zone offset: 'timestamp[us]'" in dead[0]


def test_a_line_that_is_looked_at_alone_has_its_times_too(tmp_path: Path) -> None:
    """A number that becomes text sends a line there: its time, decimal and bytes are read as in others."""
    line = {"x": "2024-07-01T12:00", "d": 1.25, "b": "ab"}
    lines = [json.dumps({"i": i, "t": i or "a", **line}) + "\n" for i in range(4)]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    types = {"t": "string", "x": "timestamp", "d": "decimal(10,2)", "b": "binary"}
    found, dead = scored(str(tmp_path / "in.jsonl"), tmp_path / "out", types=types)
    assert sorted(found) == [0, 1, 2, 3] and not dead


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_decimal_with_more_digits_than_its_type_is_dead(tmp_path: Path, suffix: str) -> None:
    """pyarrow's readers let it pass, and a file with it is none that others read."""
    path = table(tmp_path / f"in{suffix}", ["1.25", "12345.5", "99.99"])
    found, dead = scored(path, tmp_path / "out", types={"x": "decimal(4,2)"})
    assert sorted(found) == [0, 2] and "12345.5" in dead[0]


def test_times_of_day_within_lists_are_read(tmp_path: Path) -> None:
    """As those that stand alone are."""
    path = table(tmp_path / "in.jsonl", ['["12:00:00", null]', '["x"]', "null"])
    found, dead = scored(path, tmp_path / "out", types={"x": "list<time32[s]>"})
    assert found == {0: [time(12), None], 2: None} and len(dead) == 1


@pytest.mark.parametrize(("suffix", "kind"), [(".csv", "list<int64>"), (".jsonl", "duration[s]")])
def test_a_type_that_a_format_has_none_of_is_refused_before_a_run(tmp_path: Path, suffix: str, kind: str) -> None:
    """With the column, as a bad source (exit 2), not by the worker that meets it."""
    with pytest.raises(BadSource, match="column 'x' cannot be read from"):
        scored(table(tmp_path / f"in{suffix}", ["1"]), tmp_path / "out", types={"x": kind})


def test_bzip2_with_an_empty_stream_in_the_middle_is_named(tmp_path: Path) -> None:
    """The library under it cannot read that: the error is about the file, not about its calls."""
    line = b'{"i": 1, "x": 1}\n'
    (tmp_path / "in.jsonl.bz2").write_bytes(bz2.compress(line) + bz2.compress(b"") + bz2.compress(line))
    with pytest.raises(BadSource, match=r"in\.jsonl\.bz2: cannot be decompressed"):
        scored(str(tmp_path / "in.jsonl.bz2"), tmp_path / "out")


# ---------------------------------------------------------------- files that come later


def kinds(rows: list) -> list:
    return [{"seen": type(row["x"]).__name__} for row in rows]


def joined(sink: Path, folder: Path, fn: Any = kinds, *, types: dict[str, str] | None = None, **verbs: bool) -> Any:
    """What a result over a folder of CSV files has seen, after one more run."""
    model = gm.model(fn, batch_format="rows")
    gm.Job(gm.source(f"{folder}/*.csv", types=types), model, gm.sink(str(sink), keep=["i", "x"]), workers=0).run(
        **verbs
    )
    return gm.read(str(sink)).to_table().to_pydict()


def test_a_later_file_of_numbers_is_read_as_the_text_that_the_result_has(tmp_path: Path) -> None:
    """The column is text in the result: a night of codes that look like numbers is added as text, asked for or not."""
    table(tmp_path / "a.csv", ["01234", "99999"])
    out = tmp_path / "out"
    joined(out, tmp_path)
    for night, types in (("b", None), ("c", {"x": "string"}), ("d", None)):
        table(tmp_path / f"{night}.csv", ["111"])
        found = joined(out, tmp_path, types=types, append=True)
        assert found["x"][-1] == "111" and set(found["seen"]) == {"str"}
        assert joined(out, tmp_path, types={"x": "string"}) == joined(out, tmp_path) == found
    with pytest.raises(gm.errors.PlanChanged, match=r"source\.types was not given|source\.types was"):
        joined(out, tmp_path, types={"x": "int64"}, append=True)


def test_types_that_the_result_does_not_have_are_another_job(tmp_path: Path) -> None:
    """To ask for text where the result has numbers is no other word for the same."""
    table(tmp_path / "a.csv", ["1", "2"])
    joined(tmp_path / "out", tmp_path)
    with pytest.raises(gm.errors.PlanChanged, match=r"source\.types was not given"):
        joined(tmp_path / "out", tmp_path, types={"x": "string"})
    table(tmp_path / "b.csv", ["x7"])
    with pytest.raises(BadSource, match=r"column 'x' is int64 in .*--set source\.types\.x=string"):
        joined(tmp_path / "out", tmp_path, append=True)


def refused(staged: Any) -> None:
    raise ValueError("not today")


def test_a_plan_is_finished_with_the_types_that_it_was_begun_with(tmp_path: Path) -> None:
    """A file of fractions that comes while a run stands still: the rest of the planned whole numbers are no floats."""
    table(tmp_path / "a.csv", ["7"] * 20_000)
    out, source = tmp_path / "out", f"{tmp_path}/*.csv"
    model, sink = gm.model(kinds, batch_format="rows"), gm.sink(str(out), keep=["i", "x"])
    with pytest.raises(gm.errors.GateFailed):
        gm.Job(source, model, sink, workers=0, shard_rows=1000, audit=refused).run()
    for receipt in sorted(out.glob("_gristmill/*/receipts/*"))[1:]:
        receipt.unlink()
    table(tmp_path / "b.csv", ["0.5"])
    assert set(joined(out, tmp_path)["seen"]) == {"int"}

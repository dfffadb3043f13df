"""CSV as a source: where records begin, types and nulls, bad records, all of it by ranges."""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.errors import BadJob, BadSource
from gristmill.sources import csvrows
from gristmill.sources.contract import Reading
from gristmill.sources.csvrecords import Dialect
from gristmill.sources.lines import Piece, pieces
from gristmill.sources.schema import from_names

PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".zst": lambda b: pa.compress(b, "zstd", asbytes=True)}
CELL = st.lists(st.sampled_from(["a", "b", ",", '"', ";", "\n", "\r\n", " ", "\t", "'", "ü", "π"]), max_size=8).map(
    "".join
)


def lexed(data: bytes, delimiter: str = ",") -> tuple[list[tuple[int, bytes]], bool]:
    """Records and their offsets by the state machine of Python's csv module, a character at a time; whether a quote is
    left open."""
    state, start, out = "start", 0, []
    for i, c in enumerate(data.decode("latin-1")):
        if c == "\n" and state != "quoted":
            out.append((start, data[start:i]))
            state, start = "start", i + 1
        elif state == "start":
            state = "quoted" if c == '"' else "start" if c == delimiter else "field"
        elif state == "field":
            state = "start" if c == delimiter else "field"
        elif state == "quoted":
            state = "closed" if c == '"' else "quoted"
        else:
            state = "quoted" if c == '"' else "start" if c == delimiter else "field"
    if start < len(data):
        out.append((start, data[start:]))
    records = [(at, r[:-1] if r.endswith(b"\r") else r) for at, r in out]
    return [(at, r) for at, r in records if r], state == "quoted"


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(CELL, st.none() | st.integers(-(2**63), 2**63 - 1), CELL), max_size=20),
    ending=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    last=st.booleans(),
    mark=st.booleans(),
    delimiter=st.sampled_from([",", ";", "\t"]),
    pack=st.sampled_from(sorted(PACK)),
    picks=st.lists(st.integers(0, 20), max_size=6),
    block_bytes=st.sampled_from([1, 7, 64, 1000, 1 << 20]),
)
def test_what_python_writes_is_read_back_by_any_ranges(
    scratch: Any, planned: Any, rows: Any, ending: str, quoting: Any, last: bool, mark: bool, delimiter: str, pack: str,
    picks: Any, block_bytes: int,
) -> None:  # fmt: skip
    """Quotes, delimiters and newlines inside values; ranges that begin where records do. An empty value is null."""
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, lineterminator=ending, quoting=quoting)
    writer.writerow(["s", "i", "t"])
    writer.writerows(rows)
    text = out.getvalue()
    data = (text if last else text.removesuffix(ending)).encode("utf-8-sig" if mark else "utf-8")
    path = scratch.file(f"x.csv{pack}", PACK[pack](data))
    plan = planned(path, types={"s": "string", "i": "int64", "t": "string"}, options={"delimiter": delimiter})
    offsets = [at for at, _ in lexed(data[3:] if mark else data, delimiter)[0][1:]]
    offsets = [at + 3 * mark for at in offsets]
    assert plan.info.extent == len(data)
    assert plan.info.rows == len(rows)
    read = plan.in_parts([offsets[p] for p in picks if p < len(offsets)], block_bytes=block_bytes)
    assert (read.position.tolist(), read.bad) == (offsets, [])
    assert [tuple(r.values()) for r in read.pylist()] == [(s or None, i, t or None) for s, i, t in rows]


@settings(max_examples=300, deadline=None)
@example(body=',\r"\n","', picks=[], block_bytes=1000)
@given(
    body=st.text(st.sampled_from('",\n\rab'), max_size=60),
    picks=st.lists(st.integers(0, 60), max_size=4),
    block_bytes=st.sampled_from([1, 5, 1000]),
)
def test_every_record_of_a_broken_file_is_accounted_for(
    scratch: Any, planned: Any, body: str, picks: Any, block_bytes: int
) -> None:
    """Quotes anywhere: each record of Python's state machine is a row or a bad row, once, with its own bytes."""
    data = b"x,y\n" + body.encode()
    records, left_open = lexed(data)
    records = records[1:]
    astray = [r for _, r in records if b"\n" in r.rstrip() and not strictly(r)]
    try:
        plan = planned(scratch.file("x.csv", data), types={"x": "string", "y": "string"})
    except BadSource as e:
        assert "this record opens a quote" in str(e)
        assert astray
        return
    offsets = [at for at, _ in records]
    assert plan.info.rows == len(records)
    read = plan.in_parts([offsets[p] for p in picks if p < len(offsets)], block_bytes=block_bytes)
    assert sorted(read.position.tolist() + [b.position for b in read.bad]) == offsets
    raw = dict(records)
    assert all(raw[b.position] == b.payload for b in read.bad)
    for at, row in zip(read.position.tolist(), read.pylist(), strict=True):
        with contextlib.suppress(csv.Error):  # a carriage return at an end of a record, which is let pass
            assert [v or "" for v in row.values()] == next(csv.reader([raw[at].decode()]), [])
    assert not left_open or read.bad[-1].error == "UnclosedQuote"


def strictly(record: bytes) -> bool:
    """Whether a record is what the format's rules say."""
    try:
        return bool(next(csv.reader([record.decode().rstrip("\r\n")], strict=True), True))
    except csv.Error:
        return False


ROWS = [f"{i},text {i}\n" for i in range(1000)]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({20: '20,"great, would buy\n'}, "line 22: .* is not closed before the end of the file, 979 lines on"),
        ({20: '20,"great, would buy\n', 700: '700,"also ""good"" one"\n'}, r'line 22: .* 680 lines on, .*\("also'),
        ({20: '20,"great, would buy\n', 700: '700,"also\n'}, r'line 22: .* 680 lines on, .*\("also'),
        ({20: '20,"two\nlines"\n', 700: '700,"also\n'}, "line 703: .* is not closed before the end .*, 299 lines on"),
        ({20: '20,"two\nlines"\n', 700: '700,say "hi\n'}, None),
        ({20: '20,"two\n""lines"" of it" \n', 700: '700,"also" that\n', 999: '999,"left open\n'}, None),
    ],
)
@pytest.mark.parametrize("piece", [1 << 9, 1 << 20])
def test_a_quote_that_takes_lines_in(
    scratch: Any, planned: Any, monkeypatch: pytest.MonkeyPatch, rows: dict[int, str], said: str | None, piece: int
) -> None:
    """A quote forgotten in one record would make one row of hundreds: no such file is read, in whatever pieces."""
    monkeypatch.setattr("gristmill.sources.csv._PIECE", piece)
    text = "id,text\n" + "".join(rows.get(i, row) for i, row in enumerate(ROWS))
    path = scratch.file("x.csv", text.encode())
    if said is None:
        assert planned(path).info.rows == 1000
        return
    with pytest.raises(BadSource, match=said):
        planned(path)


@settings(max_examples=500, deadline=None)
@given(st.text(st.sampled_from('"",\n\rab'), max_size=40))
def test_ends_of_records_are_those_of_a_state_machine(text: str) -> None:
    """The count of quotes over a whole block, and what it falls back to."""
    data = text.encode()
    dialect = Dialect(b",", b'"')
    records, left_open = lexed(data)
    starts = [0, *(dialect.ends(data) + 1).tolist()]
    spans = [(a, data[a : b - 1]) for a, b in itertools.pairwise(starts)] + [(starts[-1], data[starts[-1] :])]
    assert [(at, r.removesuffix(b"\r")) for at, r in spans if r.removesuffix(b"\r")] == records
    if records:
        assert dialect.left_open(data[starts[-1] :]) == left_open


@settings(max_examples=500, deadline=None)
@given(st.text(st.sampled_from('"",\n\rab '), max_size=40))
def test_a_record_that_takes_lines_in_is_found_among_all(text: str) -> None:
    """Looking at the quotes of all records at once finds what looking at each record does."""
    data, dialect = text.encode(), Dialect(b",", b'"')
    ends = dialect.ends(data)
    starts, stops = np.append(0, ends + 1), np.append(ends, len(data))
    starts, stops = starts[starts < stops], stops[starts < stops]
    each = [dialect.astray(data[a:b], np.array([0]), np.array([b - a])) for a, b in zip(starts, stops, strict=True)]
    first = next(((i, found[1]) for i, found in enumerate(each) if found), None)
    assert (dialect.astray(data, starts, stops) if len(starts) else None) == first


def test_types_and_nulls_are_inferred(scratch: Any, planned: Any) -> None:
    """What would not come back as it was written stays text: leading zeros, dates, very long numbers."""
    text = (
        "int,float,bool,zip,date,long,name,none,exp\n"
        "1,1.5,true,01234,2026-01-01,12345678901234567890,NA,,1e5\n"
        "NA,NaN,false,99999,,1,x,,2\n"
    )
    plan = planned(scratch.file("x.csv", text.encode()))
    kinds = {f.name: str(f.type) for f in plan.schema}
    assert kinds == {
        "int": "int64", "float": "double", "bool": "bool", "zip": "string", "date": "string", "long": "string",
        "name": "string", "none": "null", "exp": "double",
    }  # fmt: skip
    first, second = plan.read().pylist()
    assert first["zip"] == "01234"
    assert (first["name"], second["int"], second["date"]) == ("NA", None, None)
    assert np.isnan(second["float"])


def test_nulls_can_be_named(scratch: Any, planned: Any) -> None:
    """Then they are null in text columns too, and nothing else is."""
    read = planned(
        scratch.file("x.csv", b"a,b\n-,-\n1,\n"), options={"nulls": ["-"]}, types={"a": "int64", "b": "string"}
    )
    assert read.read().pylist() == [{"a": None, "b": None}, {"a": 1, "b": ""}]


@pytest.mark.parametrize(
    ("record", "error", "said"),
    [
        (b"1", "FieldCount", "1 fields, 2 expected"),
        (b"1,2,3", "FieldCount", "3 fields, 2 expected"),
        (b"x,y", "TypeMismatch", "column 'a' is int64; here it is 'x'"),
        (b"1,caf\xe9", "UnicodeDecodeError", "byte 0xe9 at byte 5"),
        (b"1,x\r2,y", "CSVError", "carriage return"),
    ],
)
def test_a_bad_record_says_what_is_wrong_with_it(
    scratch: Any, planned: Any, record: bytes, error: str, said: str
) -> None:
    """With its offset and bytes; those around it are rows."""
    plan = planned(scratch.file("x.csv", b"a,b\n1,x\n" + record + b"\n3,z\n"), types={"a": "int64"})
    read = plan.read()
    assert [r["a"] for r in read.pylist()] == [1, 3]
    (bad,) = read.bad
    assert (bad.position, bad.payload, bad.error) == (8, record, error)
    assert said in bad.message


FIT: dict[str, list[str]] = {
    "int8": ["1", "-12", " 7", "128", "0x1F", "+4", "007", "1.0", "1e2"],
    "uint64": ["1", "18446744073709551615", "18446744073709551616", "-1", "0XfF"],
    "float16": ["1.5", "7e4", "nan", "-inf", "1,5"],
    "float64": ["1.50", "1e5", "1e400", "9007199254740993", "Infinity", "0x10"],
    "bool": ["true", "FALSE", "1", "0", "tRUE", "yes"],
    "null": ["NA", "0", " NA"],
    "string": ["NA", "a\nb", "7"],
    "decimal128(5, 2)": ["1.5", "1234.5", "1.234", "1e2"],
    "date32": ["2020-01-02", "2020-13-02", "02.01.2020", "2020-01-02T03:04:05", " 2020-01-02"],
    "timestamp[us]": ["2020-01-02", "2020-01-02 03:04:05", "2020-01-02T03:04:05Z", "2020-01-02T03:04:05.1234567"],
    "timestamp[us, UTC]": ["2020-01-02T03:04:05Z", "2020-01-02 03:04:05+0130", "2020-01-02T03:04:05", "2020-01-02"],
    "time64[us]": ["03:04:05", "03:04", "25:00:00", "03:04:05.5"],
    "binary": ["a"],
}


@settings(max_examples=40, deadline=None)
@given(data=st.data(), told=st.booleans(), nulls=st.sampled_from([None, ("",), ("NA", "1")]))
def test_bad_records_found_together_are_those_found_one_by_one(data: Any, told: bool, nulls: Any) -> None:
    """The same rows, and the same reasons in the same words, whatever the types and however much does not fit."""
    kinds = data.draw(st.lists(st.sampled_from(sorted(FIT)), min_size=1, max_size=3))
    names = [f"c{i}" for i in range(len(kinds))]
    types = from_names(dict(zip(names, kinds, strict=True)), "x")
    cells = [st.sampled_from([*FIT[k], *FIT[k][:1] * 6, "", "x", 'q"u', "\n", "\ufeff1"]) for k in kinds]
    rows = data.draw(st.lists(st.tuples(*cells), min_size=1, max_size=12))
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    if data.draw(st.booleans()):
        out.write('"1","2","3","4","5"\n')  # fields too many
    dialect, text = Dialect(b",", b'"'), out.getvalue().encode()
    found = Piece(text, 0, dialect.ends(text)).lines()
    reading = Reading(None, pa.schema(types), options={"types": types if told else {}})
    blocks = []
    for few in (2, len(rows) + 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(csvrows, "_FEW", few)
            blocks.append(csvrows.Fields(reading, names, dialect, nulls, "x").block(found))
    together, each = blocks
    assert together.bad == each.bad
    assert together.position.tolist() == each.position.tolist()
    assert str(together.rows.to_pylist()) == str(each.rows.to_pylist())  # nan is not nan


def test_a_file_of_bad_rows_costs_little_more_than_one_of_good_rows(
    scratch: Any, planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong type of a column: the records are not parsed one by one."""
    lines = "".join(f"{i},2020-01-02T03:04:{i % 60:02}Z,N{i}\n" for i in range(2000))
    path = scratch.file("x.csv", ("a,t,n\n" + lines).encode())
    parses: list[Any] = []
    parsed = csvrows.Fields.parsed
    for types in ({"t": "timestamp[us]"}, {"n": "int64"}, {"a": "bool"}):
        plan = planned(path, types={"t": "string", "n": "string", "a": "string", **types})
        with monkeypatch.context() as patch:
            patch.setattr(
                csvrows.Fields, "parsed", staticmethod(lambda *a, **k: (parses.append(a), parsed(*a, **k))[1])
            )
            read = plan.read()
        assert len(read.bad) + read.rows.num_rows == 2000
        assert len(read.bad) > 1900
    assert len(parses) < 30


def test_a_type_that_no_sampled_value_fits_is_told_before_the_run(scratch: Any) -> None:
    """Refused if the column is read and no file has a value of it, told if few are; with the zone, if that is why."""
    folder, text = scratch.folder(), "".join(f"{i},2020-01-02T03:04:05Z,{i or 'x'}\n" for i in range(30))
    (folder / "a.csv").write_text("id,t,n\n" + text)

    def scored(types: dict[str, str], keep: list[str]) -> int:
        source = gm.source(str(folder), types=types)
        return int(gm.apply(source, fn=numbered, keep=keep, workers=0, gates={"min_ok": 0}).num_rows)

    said = r"a.csv: none of 30 sampled values fits what types says: column 't' is timestamp\[us\]; here it is "
    with pytest.raises(BadSource, match=said + r"'2020-.*zone offset: 'timestamp\[us, UTC\]' holds such times"):
        scored({"t": "timestamp[us]"}, ["id", "t"])
    assert scored({"t": "timestamp[us, UTC]", "n": "int64"}, ["t", "n"]) == 29  # one of 30 is a bad row, as ever
    with pytest.warns(
        gm.GristmillWarning, match="only 2 of 30 sampled values fit .* column 'id' is bool; here it is '2'"
    ):
        assert scored({"id": "bool"}, ["id"]) == 2
    (folder / "b.csv").write_text("id,t,n\n1,2020-01-02,y\n")
    with pytest.warns(gm.GristmillWarning, match="none of 30 sampled values fits .* column 't'"):
        assert scored({"t": "timestamp[us]"}, ["t"]) == 1


def test_a_sample_of_values_that_do_not_fit_refuses_no_rows_that_do(scratch: Any) -> None:
    """A condition may take others, and a part of a file says nothing of the rest: that is told, with what may be
    null.
    """
    folder = scratch.folder()
    (folder / "a.csv").write_text("id,v,kind\n" + "0,-,x\n" * 30 + "1,7,y\n" * 3)

    def scored(**options: Any) -> int:
        source = gm.source(str(folder), types={"v": "int64"}, **options)
        return int(gm.apply(source, fn=numbered, keep=["v"], workers=0, gates={"min_ok": 0}).num_rows)

    with pytest.warns(gm.GristmillWarning, match="only 3 of 33 sampled values fit .* if '-' is null: options="):
        assert scored() == 3
    (folder / "a.csv").write_text("id,v,kind\n" + "0,-,x\n" * 30)
    (folder / "b.csv").write_text("id,v,kind\n" + "1,7,y\n" * 3)
    with pytest.warns(gm.GristmillWarning, match="none of 30 sampled values fits"):
        assert scored() == 3
    (folder / "b.csv").unlink()
    with pytest.raises(BadSource, match="none of 30 sampled values fits"):
        scored()
    (folder / "a.csv").write_text("id,v,kind\n" + "0,-,x\n" * 1000 + "1,7,y\n" * 3)
    for more in ({}, {"where": "kind = 'y'"}):
        with pytest.warns(gm.GristmillWarning, match="none of 100 sampled values fits"):
            assert scored(options={"sample_bytes": 600}, **more) == 3


@pytest.mark.parametrize("nan", ["-nan(ind)", "nan(snan)", "NaN", "-Infinity", "inf", "+nan"])
def test_what_is_no_number_is_one_beside_bad_records_too(scratch: Any, nan: str, planned: Any) -> None:
    """Spellings of Windows' C library among them: a bad record in the block makes no other one bad."""
    path = scratch.file("n.csv", f"id,v\n1,{nan}\n2,oops\n3,1.5\n".encode() + b"4,2\n" * 20)
    read = planned(path, options={"types": {"v": "float64"}}).read()
    assert [row["id"] for row in read.pylist()] == [1, 3, *[4] * 20] and len(read.bad) == 1


def numbered(batch: dict[str, Any]) -> dict[str, Any]:
    """A number for each row."""
    return {"k": list(range(len(next(iter(batch.values())))))}


def test_without_a_header(scratch: Any, planned: Any) -> None:
    """Columns by number or by the names given."""
    path = scratch.file("x.csv", b"1,x\n2,y\n")
    assert planned(path, options={"header": False}).read().pylist() == [{"f0": 1, "f1": "x"}, {"f0": 2, "f1": "y"}]
    named = planned(path, options={"header": "false", "names": ["n", "t"]}).read()
    assert named.rows.column_names == ["n", "t"]
    assert named.position.tolist() == [0, 4]


def test_tabs_and_no_quotes(scratch: Any, planned: Any) -> None:
    """TSV; with quote="" a quote is a character like any other."""
    read = planned(scratch.file("x.tsv", b'a\tb\n5" disk\t"x\n'), options={"quote": ""}).read()
    assert read.pylist() == [{"a": '5" disk', "b": '"x'}]


@pytest.mark.parametrize(
    ("content", "options", "rows"),
    [
        (b"a;b\n1;x, y\n", {}, [{"a": 1, "b": "x, y"}]),
        (b'a\t"b;c"\n1\t2\n', {}, [{"a": 1, "b;c": 2}]),
        (b"a;b\n1;\xff\n2;x\n", {}, [{"a;b": "2;x"}]),
        (b"how old; in years?\n39\n40\n", {}, [{"how old; in years?": 39}, {"how old; in years?": 40}]),
        (b"a|b;c\n1|2;3\n", {}, [{"a|b": "1|2", "c": 3}]),
        (b'"a;\nb";c\n1;2\n', {}, [{"a;\nb": 1, "c": 2}]),
        (b'"a;b"\n1;2\n', {}, [{"a;b": "1;2"}]),
        (b"a;b,c\n1,2\n", {}, [{"a;b": 1, "c": 2}]),
        (b'a;b\n1;"x\ny; z"\n2;"x ""q""\r\n, y"\n', {}, [{"a": 1, "b": "x\ny; z"}, {"a": 2, "b": 'x "q"\r\n, y'}]),
        (
            b'a|b\n"1\n|;' + b"x" * 200_000 + b'"|y\n1|2',
            {},
            [{"a": "1\n|;" + "x" * 200_000, "b": "y"}, {"a": "1", "b": "2"}],
        ),
        (b"a;b\n1;2\n", {"delimiter": ","}, [{"a;b": "1;2"}]),
        (b"a;b\n1;2\n", {"header": False}, [{"f0": "a;b"}, {"f0": "1;2"}]),
    ],
)
def test_the_header_shows_what_separates_fields(
    scratch: Any, planned: Any, content: bytes, options: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    """A header without a comma is split at its tabs, semicolons or bars, unless it was said what separates."""
    assert planned(scratch.file("x.csv", content), options=options).read().pylist() == rows
    assert planned(scratch.file("x.csv.gz", gzip.compress(content)), options=options).read().pylist() == rows


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (b"a,a\n1,2\n", {}, "column 'a' appears more than once"),
        (b"a,b\r1,2\r", {}, "bare carriage return"),
        (b"a,\xff\n1,2\n", {}, "the header is not UTF-8"),
        ("a,b\n".encode("utf-16"), {}, "UTF-16"),
        (b"a\n", {"encoding": "latin-1"}, "only UTF-8"),
        (b"a\n", {"delimeter": ";"}, "did you mean 'delimiter'"),
        (b"a\n", {"delimiter": "::"}, "one ASCII character"),
        (b"a,b\n", {"names": ["x"]}, "names lists 1 columns, but the file's first record has 2"),
    ],
)
def test_what_cannot_be_read_is_told_when_planning(
    scratch: Any, planned: Any, content: bytes, options: Any, said: str
) -> None:
    """In one line, before anything runs."""
    with pytest.raises(BadJob, match=said) as caught:
        planned(scratch.file("x.csv", content), options=options)
    assert "\n" not in str(caught.value)


def test_a_header_of_one_field_asks_for_the_delimiter(scratch: Any, planned: Any) -> None:
    """Where its columns are not found, or a quote opens no field: rows of unequal length hid what separates them."""
    asked = r"; is the delimiter ';'\? \(--delimiter ';', options={'delimiter': ';'}\)"
    path = scratch.file("x.csv", b"id;text\n1;x\n2;y;z\n")
    with pytest.raises(BadSource, match=f"keep names column 'text', .*has id;text{asked}$"):
        gm.apply(path, fn=lengths, keep=["text"], workers=0)
    with pytest.raises(BadJob, match=f"no column 'id'.*{asked}$"):
        gm.apply(gm.source(path, where="id > 1"), fn=lengths, workers=0)
    with pytest.raises(BadSource, match=f"types names column 'text', .*{asked}$"):
        planned(path, types={"text": "string"})
    with pytest.raises(BadSource, match=f"opens a quote .*one row{asked}"):
        planned(scratch.file("y.csv", b'id;text\n1;2;3\n"a\nb";c\n'))
    with pytest.raises(BadSource, match=r"is the delimiter 'tab'\? \(--delimiter 'tab'"):
        planned(scratch.file("z.csv", b"id\ttext\n1\n"), types={"text": "string"})


def test_types_for_a_column_that_is_not_there(scratch: Any, planned: Any) -> None:
    """By name, with the one that was meant."""
    with pytest.raises(BadSource, match=r"column 'pirce'.*did you mean 'price'"):
        planned(scratch.file("x.csv", b"price\n1\n"), types={"pirce": "float64"})
    with pytest.raises(BadSource, match="cannot be read from CSV"):
        planned(scratch.file("x.csv", b"v\n1\n"), types={"v": "list<int64>"}).read()


@pytest.mark.parametrize("content", [b"", b"\n", b"a,b\n", b"\xef\xbb\xbfa,b", b"\n\na,b\r\n\r\n"])
def test_no_rows(scratch: Any, planned: Any, content: bytes) -> None:
    """Fault 12: an empty file, and a header alone."""
    plan = planned(scratch.file("x.csv", content))
    assert (plan.info.rows, plan.read().rows.num_rows, plan.read().bad) == (0, 0, [])


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("name", ["b.csv", "0.csv.gz"])
def test_an_empty_file_among_others_is_no_drift(scratch: Any, planned: Any, name: str, content: bytes) -> None:
    """It has no header to differ with, also if it is a byte order mark or empty lines; a job reads all the others."""
    folder = scratch.folder()
    (folder / "a.csv").write_bytes(b"a,b\n1,x\n")
    (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (folder / "c.csv").write_bytes(b"a,b\n1.5,\n")
    assert [str(t) for t in planned(str(folder)).schema.types] == ["double", "string"]
    result = gm.apply(str(folder), fn=lambda batch: {"n": batch["a"] + 1}, keep=["a"], workers=0)
    assert result.to_pydict() == {"a": [1, 1.5], "n": [2, 2.5]}


@pytest.mark.parametrize("pack", sorted(PACK))
def test_a_large_file_is_cut_at_records(scratch: Any, planned: Any, pack: str) -> None:
    """Shards between cuts have the rows planned; newlines in quotes are everywhere."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["i", "t"])
    writer.writerows([i, f'line\n"{i}",\n' * 5] for i in range(60_000))
    plan = planned(scratch.file(f"x.csv{pack}", PACK[pack](out.getvalue().encode())))
    info = plan.info
    assert len(info.cuts) > 3
    assert info.rows == 60_000
    at = 0
    for (a, b), count in zip(itertools.pairwise(info.cuts.tolist()), info.cut_rows.tolist(), strict=True):
        read = plan.read([[a, b]])
        assert read.rows["i"].to_pylist() == list(range(at, at + count))
        at += count


def test_where_and_columns(scratch: Any, planned: Any) -> None:
    """rows + filtered + bad = records; no column wanted at all still counts."""
    plan = planned(scratch.file("x.csv", b"i,k\n1,a\n2,b\n3,a\nbad\n"), types={"i": "int64", "k": "string"})
    read = plan.read(columns=["i"], where="k = 'a'")
    assert (read.pylist(), read.filtered, len(read.bad)) == ([{"i": 1}, {"i": 3}], 1, 1)
    (block,) = plan.blocks(columns=[])
    assert len(block.position) == 3


class Bytes:
    """A stream of these bytes."""

    path = "x"

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, at: int, count: int) -> bytes:
        """See Stream."""
        return self.data[at : at + count]


@given(
    st.lists(
        st.sampled_from(['"', ",", "\n", "\r\n", "a", '"a"', ',"', '",', '"\n', "\ufeff", '\ufeff"']), max_size=30
    ),
    st.sampled_from([1, 3, 7, 1 << 20]),
)
def test_where_records_end_does_not_depend_on_where_reading_begins(parts: list[str], block: int) -> None:
    """A byte order mark is one at the beginning of a file; elsewhere it is a character, and a quote after it, too."""
    data, dialect = "".join(parts).encode(), Dialect(b",", b'"')

    def records(start: int, block: int) -> list[tuple[int, bytes]]:
        stream: Any = Bytes(data)
        some = [p.lines() for p in pieces(stream, start, len(data), len(data), block, dialect.ends)]
        return [(int(one.position[i]), one.line(i)) for one in some for i in range(len(one))]

    whole = records(0, 1 << 20)
    assert records(0, block) == whole
    for position, _ in whole:
        assert records(position, block) == [r for r in whole if r[0] >= position]


@pytest.mark.parametrize("shard_rows", [100, 100_000])
def test_values_that_begin_with_a_byte_order_mark(tmp_path: Path, shard_rows: int) -> None:
    """Each keeps it, wherever a shard, a block or a record after a bad one begins."""
    rows = [f"\ufeffkey{'x' * 100},{i}" if i % 500 else "bad" for i in range(2000)]
    (tmp_path / "in.csv").write_text("\n".join(["id,a", *rows]), encoding="utf-8")
    options: dict[str, Any] = {"types": {"id": "string"}, "workers": 0, "gates": {"min_ok": 0}}
    report = gm.apply(
        str(tmp_path / "in.csv"), tmp_path / "out", fn=lengths, keep=["id", "a"], shard_rows=shard_rows, **options
    )
    assert (report.rows_ok, report.rows_dead) == (1996, 4)
    assert set(report.read().to_table()["n"].to_pylist()) == {104}


def lengths(batch: dict[str, Any]) -> dict[str, Any]:
    """Of the ids."""
    return {"n": [len(value) for value in batch["id"]]}

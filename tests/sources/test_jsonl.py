"""JSON Lines as a source: every line once, by any byte ranges, compressed or not, bad lines named."""

from __future__ import annotations

import bz2
import gzip
import json
import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import BadSource
from gristmill.sources.schema import check

TYPES = {"i": "int64", "f": "float64", "s": "string", "l": "list<int64>"}
INTEGERS = st.integers(-(2**63), 2**63 - 1)
OBJECTS = st.fixed_dictionaries(
    {},
    optional={
        "i": st.none() | INTEGERS,
        "f": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "s": st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
        "l": st.none() | st.lists(INTEGERS, max_size=3),
        "unasked": st.recursive(
            st.none() | st.booleans() | st.text('{}[]",: \n\\ü', max_size=5), st.lists, max_leaves=4
        ),
    },
)
GOOD = st.tuples(OBJECTS, st.booleans(), st.booleans()).map(
    lambda o: json.dumps(o[0], ensure_ascii=o[1], separators=(",", ":") if o[2] else (", ", ": ")).encode("utf-8")
)
SPACED = st.tuples(st.sampled_from([b"", b" ", b"\t ", b" " * 100]), GOOD, st.sampled_from([b"", b" ", b"\r"])).map(
    b"".join
)
BLANK = st.sampled_from([b"", b" ", b"\t\r", b" " * 90])
BAD_LINES = {
    b"{", b"}", b"{}{}", b'{"i": 1} {"i": 2}', b'{"i": 1', b'"i": 1}', b"null", b"true", b"[1]", b"1", b'"text"',
    b"{} null {}", b'{"i": "x"}', b'{"i": 1.5}', b'{"l": 1}', b'{"l": [1, "x"]}', b'{"s": "\xff"}',
    b'{"unasked": "\xc3"}', b"\x00", b"not json", b"{'i': 1}", b'{"i": 1,}', b'{"s": "\\ud800"}', b'{"s": "a\tb"}',
    b'{"i": 9223372036854775808}',
}  # fmt: skip
BAD = st.sampled_from(sorted(BAD_LINES))
PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".zst": lambda b: pa.compress(b, "zstd", asbytes=True)}


def fitted(value: Any, name: str) -> Any:
    """What a column of TYPES holds for a key's value; only called for values that fit it."""
    return float(value) if name == "f" and value is not None else value


def oracle(data: bytes, bad: set[bytes]) -> tuple[list[dict[str, Any]], list[int], list[tuple[int, bytes]]]:
    """Line by line: rows, their offsets, and the bad lines."""
    rows, offsets, wrong, at = [], [], [], 0
    for line in data.split(b"\n"):
        start, at = at, at + len(line) + 1
        if start == 0 and line.startswith(b"\xef\xbb\xbf"):
            line = line[3:]
        line = line.strip(b" \t\r")
        if line in bad:
            wrong.append((start, line))
        elif line:
            value = json.loads(line)
            rows.append({n: fitted(value.get(n), n) for n in TYPES})
            offsets.append(start)
    return rows, offsets, wrong


@settings(max_examples=200, deadline=None)
@given(
    lines=st.lists(st.one_of(GOOD, GOOD, SPACED, BLANK, BAD), max_size=25),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    last=st.booleans(),
    mark=st.booleans(),
    pack=st.sampled_from(sorted(PACK)),
    edges=st.lists(st.integers(0, 1500), max_size=8),
    block_bytes=st.sampled_from([1, 7, 64, 1000, 1 << 20]),
)
def test_any_byte_ranges_tile_the_file(
    scratch: Any,
    planned: Any,
    lines: Any,
    ending: bytes,
    last: bool,
    mark: bool,
    pack: str,
    edges: Any,
    block_bytes: int,
) -> None:
    """A line belongs to the range in which it starts: each comes out once, as a row or a bad row, with its offset."""
    data = ending.join(lines) + (ending if last else b"")
    data = (b"\xef\xbb\xbf" if mark else b"") + data
    bad = {line.strip(b" \t\r") for line in lines if line in BAD_LINES}
    plan = planned(scratch.file(f"x.jsonl{pack}", PACK[pack](data)), types=TYPES)
    assert plan.info.extent == len(data)
    rows, offsets, wrong = oracle(data, bad)
    read = plan.in_parts([min(e, len(data)) for e in edges], columns=list(TYPES), block_bytes=block_bytes)
    assert read.pylist() == rows
    assert read.position.tolist() == offsets
    assert [(b.position, b.payload) for b in read.bad] == wrong
    if pack:
        assert plan.info.rows == len(rows) + len(wrong)


@pytest.mark.parametrize(
    ("line", "error", "said"),
    [
        (b'{"i": 1', "JSONDecodeError", "at character 7"),
        (b"[1]", "NotAnObject", "a JSON array"),
        (b'{"s": "caf\xe9"}', "UnicodeDecodeError", "byte 0xe9 at byte 10"),
        (b'{"i": "x"}', "TypeMismatch", "column 'i' is int64; here it is \"x\""),
        (b'{"i": 1}{"i": 2}', "JSONDecodeError", "Extra data"),
        (b'{"i": 1, "i": 2}', "DuplicateKey", "'i'"),
    ],
)
def test_a_bad_line_says_what_is_wrong_with_it(scratch: Any, planned: Any, line: bytes, error: str, said: str) -> None:
    """Fault 9: with its offset and its bytes; the lines around it are rows."""
    plan = planned(scratch.file("x.jsonl", b'{"i": 1}\n' + line + b'\n{"i": 3}\n'), types={"i": "int64", "s": "string"})
    read = plan.read()
    assert [r["i"] for r in read.pylist()] == [1, 3]
    (bad,) = read.bad
    assert (bad.position, bad.payload, bad.error) == (9, line, error)
    assert said in bad.message


def test_types_are_inferred_from_all_parts_of_the_file(scratch: Any, planned: Any) -> None:
    """int and float are float, null and text are text, also where it looks like a date; keys at the end count."""
    lines = [b'{"a": 1, "b": null, "d": "2026-01-01"}'] * 1000 + [b'{"a": 1.5, "b": "x", "c": [{"k": null}]}'] * 1000
    plan = planned(scratch.file("x.jsonl", b"\n".join(lines)), options={"sample_bytes": 600})
    assert {f.name: str(f.type) for f in plan.schema} == {
        "a": "double",
        "b": "string",
        "d": "string",
        "c": "list<item: struct<k: null>>",
    }
    assert plan.info.row_bytes == pytest.approx(39, abs=3)
    assert plan.read(columns=["a", "b"]).rows.num_rows == 2000


def test_two_kinds_of_value_in_one_column_are_named(scratch: Any, planned: Any) -> None:
    """Both, where, and `types=` as the way out, which reads numbers as text; unless nobody asks for it."""
    path = scratch.file("x.jsonl", b'{"b": 1, "a": 1}\n{"a": "x"}\n{"a": {"k": [true]}}\n')
    plan = planned(path)
    said = r"column 'a' is int64 and string \(byte 17\).*types=\{'a': 'string'\}"
    with pytest.raises(BadSource, match=said):
        plan.read()
    with pytest.raises(BadSource, match=said):
        check(plan.schema, ["b", "a"])
    assert plan.read(columns=["b"]).rows["b"].to_pylist() == [1, None, None]
    assert planned(path, types={"a": "string"}).read().rows["a"].to_pylist() == ["1", "x", '{"k": [true]}']


def test_whole_floats_are_integers_where_integers_are_wanted(scratch: Any, planned: Any) -> None:
    """As pandas writes a column of integers with nulls; what would lose something is a bad row."""
    read = planned(
        scratch.file("x.jsonl", b'{"a": 1.0}\n{"a": 2}\n{"a": 2.5}\n{"a": true}\n'), types={"a": "int64"}
    ).read()
    assert read.rows["a"].to_pylist() == [1, 2]
    assert [b.position for b in read.bad] == [20, 31]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("date32", '"2026-01-02"', "2026-01-02"),
        ("timestamp[us]", '"2026-01-02T03:04:05.5"', "2026-01-02 03:04:05.500000"),
        ("float32", "0.5", "0.5"),
        ("halffloat", "0.5", "0.5"),
        ("bool", "true", "True"),
        ("binary", '"ab"', "b'ab'"),
        ("list<float32>", "[1, 2.5]", "[1.0, 2.5]"),
        ("large_string", '"x"', "x"),
        ("decimal(5,2)", '"1.50"', "1.50"),
    ],
)
def test_types_can_be_given(scratch: Any, planned: Any, kind: str, text: str, value: str) -> None:
    """By name, also those that JSON does not have."""
    read = planned(scratch.file("x.jsonl", f'{{"a": {text}}}\n'.encode()), types={"a": kind}).read()
    assert [str(v) for v in read.rows["a"].to_pylist()] == [value]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("pack", sorted(PACK))
def test_no_rows(scratch: Any, planned: Any, content: bytes, pack: str) -> None:
    """Fault 12."""
    plan = planned(scratch.file(f"x.jsonl{pack}", PACK[pack](content)))
    read = plan.read()
    assert (read.rows.num_rows, read.bad) == (0, [])
    assert plan.info.cuts[0] == 0
    assert plan.info.cuts[-1] == plan.info.extent == len(content)


def test_one_json_document_is_not_json_lines(scratch: Any, planned: Any) -> None:
    """It would come out as nothing but bad rows."""
    for text in (b'[\n {"a": 1},\n {"a": 2}\n]\n', b'{\n "a": 1\n}\n', b'[{"a": 1}]'):
        with pytest.raises(BadSource, match="not JSON Lines"):
            planned(scratch.file("x.jsonl", text))
    with pytest.raises(BadSource, match="UTF-16"):
        planned(scratch.file("x.jsonl", '{"a": 1}'.encode("utf-16")))


@pytest.mark.parametrize("pack", [".gz", ".bz2", ".zst"])
def test_a_compressed_file_is_cut_and_counted_by_reading_it_once(scratch: Any, planned: Any, pack: str) -> None:
    """Shards between its cuts have the rows planned; going back to an earlier one works too."""
    data = b"".join(b'{"i": %d, "t": "%s"}\n' % (i, b"x" * 100) for i in range(60_000))
    plan = planned(scratch.file(f"x.jsonl{pack}", PACK[pack](data)))
    info = plan.info
    assert not info.divisible
    assert len(info.cuts) > 3
    assert info.rows == 60_000
    spans = list(zip(info.cuts[:-1].tolist(), info.cuts[1:].tolist(), strict=True))
    for (a, b), count in [*zip(spans, info.cut_rows.tolist(), strict=True), (spans[0], info.cut_rows[0])]:
        read = plan.read([[a, b]])
        assert read.rows.num_rows == count
        assert data[a:].startswith(b'{"i": %d,' % read.rows["i"][0].as_py())


@pytest.mark.parametrize("pack", [".gz", ".bz2"])
def test_a_truncated_compressed_file_is_named_when_planning(scratch: Any, planned: Any, pack: str) -> None:
    """Fault 8, for text."""
    packed = PACK[pack](b'{"i": 1}\n' * 100_000)
    with pytest.raises(BadSource, match=rf"x\.jsonl\{pack}: cannot be decompressed"):
        planned(scratch.file(f"x.jsonl{pack}", packed[: len(packed) // 2]))


def test_where_counts_what_it_leaves_out(scratch: Any, planned: Any) -> None:
    """rows + filtered + bad = lines; columns that only the condition reads do not come out."""
    data = b"".join(b'{"i": %d, "k": "%s"}\n' % (i, b"odd" if i % 2 else b"even") for i in range(1000)) + b"bad\n"
    read = planned(scratch.file("x.jsonl", data)).read(columns=["i"], where="k = 'odd' AND i > 100")
    assert read.rows.column_names == ["i"]
    assert read.rows["i"].to_pylist() == list(range(101, 1000, 2))
    assert (read.filtered, len(read.bad)) == (550, 1)


def test_columns_may_be_missing_in_some_files(scratch: Any, planned: Any) -> None:
    """A missing key is null; int in one file and float in another is float in both."""
    folder = scratch.folder()
    (folder / "a.jsonl").write_bytes(b'{"a": 1}\n')
    (folder / "b.jsonl").write_bytes(b'{"a": 1.5, "b": "x"}\n')
    (folder / "c.jsonl").write_bytes(b"")
    plan = planned(str(folder))
    assert plan.read().pylist() == [{"a": 1.0, "b": None}]


def test_a_bad_line_among_many_good_ones_costs_little(scratch: Any, planned: Any) -> None:
    """Found by halving the block: 200,000 lines with 20 bad ones are not read one by one."""
    import time

    lines = [b'{"i": %d, "t": "some text that is not short"}' % i for i in range(200_000)]
    clean = planned(scratch.file("a.jsonl", b"\n".join(lines)))
    for i in range(0, 200_000, 10_000):
        lines[i] = b'{"i": "bad"}'
    dirty = planned(scratch.file("b.jsonl", b"\n".join(lines)), types={"i": "int64", "t": "string"})
    started = time.perf_counter()
    clean.read()
    once = time.perf_counter() - started
    started = time.perf_counter()
    assert len(dirty.read().bad) == 20
    assert time.perf_counter() - started < 60 * once + 2


@pytest.mark.long
def test_a_line_of_100_mb(scratch: Any) -> None:
    """Fault 11: longer than a block; memory stays within a few times the line."""
    path = scratch.folder() / "x.jsonl"
    with path.open("wb") as file:
        file.write(b'{"t": "small"}\n{"t": "' + b"x" * (100 << 20) + b'"}\n{"t": "last"}\n')
    code = textwrap.dedent("""
        import resource, sys
        import numpy as np, pyarrow.json, pyarrow.compute
        from gristmill.sources import formats, paths
        from gristmill.sources.contract import Reading
        from gristmill.job.job import source
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        s = source(sys.argv[1]); fs, files = paths.resolve(s); form = formats.source_format(s, files)
        info = form.inspect(files[0], fs, {})
        lengths = [n for b in form.read(info, fs, np.array([[0, info.extent]]), Reading(None, info.schema))
                   for n in pyarrow.compute.binary_length(b.rows["t"]).to_pylist()]
        print(lengths, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)
    """)
    out = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True).stdout
    lengths, _, grown = out.rpartition(" ")
    assert lengths == f"[5, {100 << 20}, 4]"
    assert int(grown) * (1 if sys.platform == "darwin" else 1024) < 8 * (100 << 20)
    assert resource  # measured in the child


def test_a_mixed_column_in_one_file_is_no_drift(scratch: Any, planned: Any) -> None:
    """The other files may have it as numbers; it is refused where it is read, and only there."""
    folder = scratch.folder()
    (folder / "a.jsonl").write_bytes(b'{"a": 1, "b": 1}\n')
    (folder / "b.jsonl").write_bytes(b'{"a": 1, "b": 2}\n{"a": [], "b": 3}\n')
    plan = planned(str(folder))
    assert plan.read(columns=["b"]).rows["b"].to_pylist() == [1]
    with pytest.raises(BadSource, match=r"b\.jsonl: column 'a' is int64 and list"):
        plan.read(columns=["a"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"i": 1, "rare": 0}', "key 'rare' has no column"),
        (b'{"i": 1, "rare": "x", "u": null}', "key 'rare' has no column"),
        (b'{"i": 1, "u": {"n": "a", "vip": true}}', "key 'u.vip' has no column"),
        (b'{"i": 1, "l": [{"k": 1}, {"k": 2, "m": [0]}]}', "key 'l.m' has no column"),
        (b'{"i": 1, "u": {"n": "a", "vip": null}, "rare": null}', None),
        (b'{"i": 1, "p": null, "l": []}', None),
    ],
)
def test_a_key_that_the_sample_did_not_show(scratch: Any, planned: Any, line: bytes, said: str | None) -> None:
    """A value under it is never dropped: the row is bad, unless columns were named, or the type of its column."""
    plain = b'{"i": 0, "u": {"n": "b"}, "l": [{"k": 5}], "p": "%s"}' % (b"x" * 60)
    lines = [plain] * 200
    lines[37:40] = [line] * 3
    plan = planned(scratch.file("x.jsonl", b"\n".join(lines)), options={"sample_bytes": 1000})
    read = plan.read()
    assert len(read.bad) == (3 if said else 0)
    assert all(said in bad.message and bad.error == "UnknownKey" for bad in read.bad if said)
    assert read.rows.num_rows == 200 - len(read.bad)
    assert plan.read(columns=["i", "p"]).rows.num_rows == 200
    some = plan.read(columns=["i", "u"])
    assert len(some.bad) == (3 if said and "'u." in said else 0)
    told = planned(
        scratch.file("y.jsonl", b"\n".join(lines)), types={"u": pa.struct({"n": pa.string()}), "rare": "string"}
    )
    assert said is None or "rare" not in said or sum(r["rare"] is not None for r in told.read().pylist()) == 3


def test_a_condition_leaves_out_rows_with_keys_that_the_sample_did_not_show(scratch: Any, planned: Any) -> None:
    """They are none that anybody asked for."""
    lines = [b'{"i": %d, "p": "%s"}' % (i, b"x" * 60) for i in range(300)]
    lines[150] = b'{"i": 150, "p": "x", "rare": 1}'
    lines[20] = b'{"i": 20, "p": "x", "rare": 1}'
    plan = planned(scratch.file("x.jsonl", b"\n".join(lines)), options={"sample_bytes": 1000})
    read = plan.read(where="i < 100")
    assert (read.rows.num_rows, read.filtered, [b.error for b in read.bad]) == (99, 200, ["UnknownKey"])


def test_keys_that_nobody_reads_take_no_memory(tmp_path: Path) -> None:
    """Another one in each line, beside a column with fields."""
    line = '{"id": %d, "s": {"a": %d, "b%d": null}, "key%d": 1}\n'
    first = "".join('{"id": -1, "s": {"a": 0}}\n' for _ in range(100))
    (tmp_path / "in.jsonl").write_text(first + "".join(line % (i, i, i, i) for i in range(20_000)))
    done = subprocess.run(
        [sys.executable, "-c", ONE_RUN, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    ok, dead, most = map(int, done.stdout.split())
    assert (ok, dead) == (20_100, 0)
    assert 0 < most < 50 << 20


ONE_RUN = """
import sys
import pyarrow as pa
import gristmill as gm

def numbered(batch):
    return {"a": [s["a"] for s in batch["s"]]}

folder = sys.argv[1]
source = gm.source(folder + "/in.jsonl", columns=["id", "s"], options={"sample_bytes": 1000})
report = gm.Job(source, gm.model(numbered), gm.sink(folder + "/out", keep=["id"]), workers=0).run()
print(report.rows_ok, report.rows_dead, pa.default_memory_pool().max_memory())
"""

"""Parquet, JSONL and npy as sinks: what is written is read back by other libraries, and the counts are of the files."""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import errno
import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import BadJob, BadOutput, CorruptStore
from gristmill.files.disk import LocalFiles
from gristmill.sinks.formats import sink_format

VECTORS = pa.table(
    {
        "id": pa.array(range(5000)),
        "vector": pa.FixedSizeListArray.from_arrays(np.arange(20_000, dtype=np.float32), 4),
        "lang": pa.array(["en", "de"] * 2500).dictionary_encode(),
        "text": [f"text {i}" for i in range(5000)],
    }
)


@pytest.mark.parametrize("name", ["parquet", "jsonl", "npy"])
@pytest.mark.parametrize("rows", [0, 1, 5000])
@pytest.mark.parametrize("pieces", [1, 7])
def test_names_and_counts(scratch: Any, name: str, rows: int, pieces: int) -> None:
    """Work files end in .tmp beside their published names; counts are read back from the files."""
    form = sink_format(name)
    folder, files = scratch.written(form, VECTORS.slice(0, rows), pieces)
    assert [f.publish for f in files if f.role == "rows"] == [f"part-0000003.g1{form.suffixes[0]}"]
    for file in files:
        assert Path(file.path).name == f"{file.publish}.abc.tmp"
        assert (file.rows, form.count(file.path, file.role)) == (rows, rows)
        assert (folder / file.publish).stat().st_size > 0 or name == "jsonl"


def test_parquet_keeps_types_order_and_sensible_row_groups(scratch: Any) -> None:
    """Small writes are gathered; zstd; floats have no dictionary, text has."""
    folder, _ = scratch.written(sink_format("parquet"), VECTORS, pieces=500)
    path = folder / "part-0000003.g1.parquet"
    assert pq.read_table(path).equals(VECTORS)
    metadata = pq.read_metadata(path)
    assert metadata.num_row_groups == 1
    columns = {metadata.row_group(0).column(i).path_in_schema: metadata.row_group(0).column(i) for i in range(4)}
    assert {c.compression for c in columns.values()} == {"ZSTD"}
    assert {n: c.has_dictionary_page for n, c in columns.items()} == {
        "id": False,
        "vector.list.element": False,
        "lang": True,
        "text": True,
    }


def test_parquet_row_groups_are_bounded(scratch: Any) -> None:
    """By rows where asked, else by bytes."""
    folder, _ = scratch.written(sink_format("parquet"), VECTORS, pieces=3, row_group_rows=2000, compression="snappy")
    metadata = pq.read_metadata(folder / "part-0000003.g1.parquet")
    assert max(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)) == 2000
    big = pa.table({"v": pa.FixedSizeListArray.from_arrays(np.zeros(60_000 * 384, dtype=np.float32), 384)})
    folder, _ = scratch.written(sink_format("parquet"), big, pieces=60)
    assert pq.read_metadata(folder / "part-0000003.g1.parquet").num_row_groups == 3


@pytest.mark.parametrize("name", ["parquet", "jsonl", "npy"])
def test_options_are_checked(scratch: Any, name: str) -> None:
    """A name that is not known has a suggestion."""
    with pytest.raises(BadJob, match="no option 'compresion'"):
        scratch.written(sink_format(name), VECTORS, compresion="zstd")
    if name != "npy":
        with pytest.raises(BadJob, match="compression is 'rar'"):
            scratch.written(sink_format(name), VECTORS, compression="rar")


class FullDisk(LocalFiles):
    """Files on a disk that is full after some bytes."""

    def create(self, path: str) -> Any:
        file = super().create(path)

        class Limited:
            left = 10_000

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def write(self, data: Any) -> int:
                Limited.left -= memoryview(data).nbytes
                if Limited.left < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return int(file.write(data))

        return Limited()


@pytest.mark.parametrize("name", ["parquet", "jsonl", "npy"])
def test_a_full_disk_is_an_error_and_abort_leaves_nothing(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fault 5: the disk's own error comes out; nothing is left behind, printed or raised later by a destructor."""
    writer = sink_format(name).writer(FullDisk(), str(tmp_path), "part", "n", VECTORS.schema, {})
    with pytest.raises(OSError, match="No space left") as caught:
        for _ in range(20):
            writer.write(VECTORS)
        writer.close()
    assert caught.value.errno == errno.ENOSPC
    writer.abort()
    writer.abort()
    del writer, caught
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["parquet", "jsonl", "npy"])
def test_abort_before_the_first_row(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is left."""
    writer = sink_format(name).writer(LocalFiles(), str(tmp_path), "part", "n", VECTORS.schema, {})
    writer.abort()
    del writer
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["parquet", "jsonl", "npy"])
def test_everything_is_synced_before_it_is_closed(tmp_path: Path, name: str) -> None:
    """The bytes on disk at the moment of the sync are the whole file."""
    synced: dict[str, bytes] = {}

    class Watched(LocalFiles):
        def sync(self, file: Any) -> None:
            super().sync(file)
            synced[file.name] = Path(file.name).read_bytes()

    for options in [{}, {"compression": "gz"}] if name == "jsonl" else [{}]:
        writer = sink_format(name).writer(Watched(), str(tmp_path), f"p{len(options)}", "n", VECTORS.schema, options)
        writer.write(VECTORS)
        for file in writer.close():
            assert synced[file.path] == Path(file.path).read_bytes() != b""


@pytest.mark.parametrize("name", ["parquet", "jsonl", "npy"])
def test_a_file_that_is_not_whole_is_not_counted(scratch: Any, name: str) -> None:
    """Whatever was cut off."""
    form = sink_format(name)
    for compression in [{}, {"compression": "gz"}] if name == "jsonl" else [{}]:
        _, files = scratch.written(form, VECTORS, **compression)
        path = Path(files[0].path)
        content = path.read_bytes()
        for left in (len(content) - 1, len(content) // 2, 50):
            path.write_bytes(content[:left])
            with pytest.raises(CorruptStore, match=path.name):
                form.count(str(path), "rows")


# ---------------------------------------------------------------- JSONL

EVERYTHING = pa.table(
    {
        "i": pa.array([1, None, -5], pa.int8()),
        "f": [1.0, 0.1, math.nan],
        "f32": pa.array([0.1, None, -0.0], pa.float32()),
        "f16": pa.array([np.float16(0.5), None, np.float16(2)], pa.float16()),
        "s": ['a"b\\c\n\x01é😀', None, ""],
        "large": pa.array(["x", None, "\t"], pa.large_string()),
        "b": [b"\xff\x00", None, b""],
        "at": pa.array([dt.datetime(2026, 1, 1, 1, 2, 3, 456), None, dt.datetime(1969, 1, 1)], pa.timestamp("us")),
        "utc": pa.array([dt.datetime(2026, 1, 1), None, None], pa.timestamp("s", "Europe/Berlin")),
        "day": [dt.date(2026, 1, 1), None, None],
        "time": [dt.time(1, 2, 3), None, None],
        "wait": [dt.timedelta(seconds=1), None, None],
        "dec": [decimal.Decimal("1.50"), None, None],
        "l": [[1.5, None], None, []],
        "v": pa.array([[1.0, 2.0], None, [3.0, 0.5]], pa.list_(pa.float32(), 2)),
        "n": [{"a": 1, "b": ["x", None]}, None, {"a": None, "b": None}],
        "nn": [[{"k": "v"}, None], [], None],
        "d": pa.array(["u", None, "u"]).dictionary_encode(),
        "z": pa.nulls(3),
        "ok": [True, None, False],
        'we"ird': [1, 2, 3],
    }
)


def test_json_of_every_type(scratch: Any) -> None:
    """Valid JSON; floats round trip, bytes are base64, times ISO, NaN its name."""
    folder, _ = scratch.written(sink_format("jsonl"), EVERYTHING)
    rows = [json.loads(line) for line in (folder / "part-0000003.g1.jsonl").read_text().splitlines()]
    assert rows[0] == {
        "i": 1, "f": 1.0, "f32": 0.1, "f16": 0.5, "s": 'a"b\\c\n\x01é😀', "large": "x",
        "b": base64.b64encode(b"\xff\x00").decode(), "at": "2026-01-01T01:02:03.000456", "utc": "2026-01-01T00:00:00Z",
        "day": "2026-01-01", "time": "01:02:03.000000", "wait": 1_000_000, "dec": 1.5, "l": [1.5, None],
        "v": [1.0, 2.0], "n": {"a": 1, "b": ["x", None]}, "nn": [{"k": "v"}, None], "d": "u", "z": None, "ok": True,
        'we"ird': 1,
    }  # fmt: skip
    assert {k for k, v in rows[1].items() if v is not None} == {"f", "nn", 'we"ird'}
    assert rows[2]["f"] == "NaN"
    assert (rows[2]["b"], rows[2]["l"], rows[2]["v"], rows[2]["nn"]) == ("", [], [3.0, 0.5], None)
    assert isinstance(rows[0]["f"], float)
    assert math.copysign(1, rows[2]["f32"]) == -1


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
            st.none() | st.floats(allow_nan=False, allow_infinity=False),
            st.none() | st.floats(width=32, allow_nan=False, allow_infinity=False),
            st.none() | st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=4),
            st.none() | st.lists(st.lists(st.none() | st.text('a"\\\n', max_size=3), max_size=2), max_size=2),
        ),
        min_size=1,
        max_size=20,
    ),
    cut=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_json_text_is_what_the_values_are(rows: Any, cut: tuple[int, int]) -> None:
    """Against Python's json, also for a slice of a table."""
    from gristmill.sinks.jsontext import json_lines

    types = [pa.string(), pa.float64(), pa.float32(), pa.list_(pa.float64()), pa.list_(pa.list_(pa.string()))]
    columns = zip(*rows, strict=True)
    table = pa.table([pa.array(c, t) for c, t in zip(columns, types, strict=True)], names=list("sfglt")).slice(*cut)
    text = b"".join(json_lines(table))
    read = [json.loads(line) for line in text.split(b"\n")[:-1]]
    assert len(read) == table.num_rows
    for got, wanted in zip(read, table.to_pylist(), strict=True):
        got["g"] = None if got["g"] is None else float(np.float32(got["g"]))
        assert got == wanted


@pytest.mark.parametrize(("compression", "suffix"), [("gz", ".gz"), ("zst", ".zst"), ("none", "")])
def test_jsonl_compressed(scratch: Any, planned: Any, compression: str, suffix: str) -> None:
    """By option; read back by the source of the same name."""
    folder, files = scratch.written(sink_format("jsonl"), VECTORS, pieces=3, compression=compression)
    assert files[0].publish == f"part-0000003.g1.jsonl{suffix}"
    path = folder / files[0].publish
    assert planned(str(path)).read().rows["text"].to_pylist() == VECTORS["text"].to_pylist()
    if suffix == ".gz":
        assert gzip.decompress(path.read_bytes()).count(b"\n") == 5000


# ---------------------------------------------------------------- npy


@pytest.mark.parametrize("pieces", [1, 13])
def test_npy_is_mapped_and_aligned_with_its_ids(scratch: Any, pieces: int) -> None:
    """numpy opens it with and without mmap; row i of both files is row i."""
    folder, files = scratch.written(sink_format("npy"), VECTORS, pieces)
    assert [(f.publish, f.role) for f in files] == [
        ("part-0000003.g1.npy", "rows"),
        ("part-0000003.g1.ids.parquet", "ids"),
    ]
    wanted = np.arange(20_000, dtype=np.float32).reshape(5000, 4)
    for mode in (None, "r"):
        matrix = np.load(folder / files[0].publish, mmap_mode=mode)
        assert matrix.dtype == np.float32
        assert (matrix == wanted).all()
    assert pq.read_table(folder / files[1].publish).equals(VECTORS.drop_columns("vector"))


def test_npy_of_lists_and_of_vectors_alone(scratch: Any) -> None:
    """Lists of one length are vectors too; without other columns the ids are row numbers."""
    rows = pa.table({"v": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float64()))})
    folder, files = scratch.written(sink_format("npy"), rows)
    assert np.load(folder / files[0].publish).tolist() == [[1, 2], [3, 4]]
    assert pq.read_table(folder / files[1].publish).to_pydict() == {"row": [0, 1]}


def test_npy_needs_one_column_of_vectors(scratch: Any) -> None:
    """Told with the candidates; `vector` chooses."""
    two = VECTORS.append_column("other", VECTORS["vector"])
    with pytest.raises(BadJob, match="columns vector, other hold vectors"):
        scratch.written(sink_format("npy"), two)
    folder, _ = scratch.written(sink_format("npy"), two, vector="other")
    assert pq.read_schema(folder / "part-0000003.g1.ids.parquet").names == ["id", "vector", "lang", "text"]
    with pytest.raises(BadJob, match="no column holds vectors of floats; the columns are id, text"):
        scratch.written(sink_format("npy"), VECTORS.select(["id", "text"]))
    with pytest.raises(BadJob, match="vector is 'id': the vector columns are vector"):
        scratch.written(sink_format("npy"), VECTORS, vector="id")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([[1.0, 2.0], [1.0]], "different widths"),
        ([[1.0], None], "without a vector"),
        ([[1.0], [None]], "contain nulls"),
    ],
)
def test_npy_refuses_what_is_no_matrix(scratch: Any, values: Any, said: str) -> None:
    """Rather than shifting the rows after it."""
    with pytest.raises(BadOutput, match=said):
        scratch.written(sink_format("npy"), pa.table({"v": pa.array(values, pa.list_(pa.float32()))}))

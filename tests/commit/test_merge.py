"""Parts are joined before they are published: every row once, in its partition, in few files, sorted where asked."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.arrow import sorting
from gristmill.cli.app import main
from gristmill.commit import merge
from gristmill.commit.merge import _evenly, _small_together
from gristmill.commit.receipt import Receipt
from gristmill.errors import BadJob, RunFailed


def answered(batch: dict[str, Any]) -> dict[str, Any]:
    """An answer that tells the row; -1 dies."""
    if (batch["id"] == -1).any():
        raise ValueError("no")
    return {"y": batch["id"] * 3}


def vector(batch: dict[str, Any]) -> dict[str, Any]:
    return {"v": np.stack([batch["id"], batch["id"] + 1], axis=1).astype(np.float32)}


def job(rows: Any, out: Path, fn: Any = answered, shard_rows: int = 200, **sink: Any) -> gm.Job:
    keep = sink.pop("keep", ["id"])
    target = gm.sink(str(out), keep=keep, **sink)
    return gm.Job(rows, fn, target, shard_rows=shard_rows, workers=0, gates={"min_ok": 0.0})


def data_files(out: Path) -> list[Path]:
    """The visible files, without `_SUCCESS` and dead letters."""
    return sorted(p for p in out.rglob("*.*") if p.is_file() and not re.search(r"/[_.]", f"/{p.relative_to(out)}"))


ROWS = pa.table({"id": np.arange(1000), "k": [f"k{i % 10}" for i in range(1000)]})


def test_a_file_a_partition(tmp_path: Path) -> None:
    """However many shards; rows of a partition are in the order of the source, and read partition by partition."""
    out = tmp_path / "out"
    report = job(ROWS, out, partition_by=["k"]).run()
    files = data_files(out)
    assert len(files) == 10 and {p.parent.name for p in files} == {f"k=k{i}" for i in range(10)}
    read = report.read().to_table()
    assert read["id"].to_pylist() == [i for k in range(10) for i in range(k, 1000, 10)]
    assert read["k"].to_pylist() == [f"k{k}" for k in range(10) for _ in range(100)]
    verdict = gm.verify(out, deep=True)
    assert verdict.ok and verdict.files == 10
    assert not list(out.glob("_gristmill/g*/work/part-*"))
    assert job(ROWS, out, partition_by=["k"]).run().state == "nothing to do"


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_every_row_once_in_its_partition_and_sorted(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Whatever the keys, shards, files, format and order; held against Python."""
    count = data.draw(st.integers(1, 60))
    ids = data.draw(st.lists(st.integers(-1, 50), min_size=count, max_size=count))
    texts = data.draw(st.lists(st.sampled_from(["a", "b/c", "x.jsonl", None]), min_size=count, max_size=count))
    weight = data.draw(st.lists(st.none() | st.floats(-9, 9), min_size=count, max_size=count))
    rows = pa.table({"id": ids, "k": pa.array(texts, pa.string()), "w": pa.array(weight, pa.float64())})
    by = data.draw(st.sampled_from([[], ["w"], ["y", "w"], ["k", "w"]]))
    how: dict[str, Any] = data.draw(
        st.sampled_from([{"partition_by": ["k"]}, {"partition_by": ["k"], "files": 2}, {"files": 3}, {"merge": True}])
    )
    how = {**how, "format": data.draw(st.sampled_from(["parquet", "jsonl"])), "sort_by": by}
    out = tmp_path_factory.mktemp("out") / "out"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sorting, "HELD_BYTES", data.draw(st.sampled_from([1, 1 << 20])))
        report = job(rows, out, shard_rows=data.draw(st.integers(1, 30)), keep=["id", "k", "w"], **how).run()
    got = report.read().to_table()
    wanted = Counter((i, k, w, 3 * i) for i, k, w in zip(ids, texts, weight, strict=True) if i != -1)
    assert Counter(zip(*(got[n].to_pylist() for n in ("id", "k", "w", "y")), strict=True)) == wanted
    assert report.rows_dead == ids.count(-1)
    files = data_files(out)
    per_folder = Counter(p.parent for p in files)
    assert not files or max(per_folder.values()) <= (1 if how.get("merge") else how.get("files") or 1)
    for part in report.read().get_fragments():
        held = part.to_table(schema=got.schema)
        inside = [n for n in by if n not in how.get("partition_by", ())]
        keys = [[(v is None, v) for v in held[n].to_pylist()] for n in inside]
        places = list(zip(*keys, strict=True))
        assert places == sorted(places)
    assert gm.verify(out, deep=True).ok


def test_sorted_parts_without_joining(tmp_path: Path) -> None:
    """Each shard's part is sorted by itself; by a column that only `sort_by` names, which is carried over."""
    rows = pa.table({"id": np.random.default_rng(0).permutation(300), "w": np.arange(300)[::-1]})
    job(rows, tmp_path / "out", sort_by="w", shard_rows=100).run()
    parts = [pq.read_table(p)["w"].to_pylist() for p in data_files(tmp_path / "out")]
    assert parts == [list(range(200 - a, 300 - a)) for a in (0, 100, 200)]


def test_vectors_are_joined_with_what_is_beside_them(tmp_path: Path) -> None:
    """npy files of a partition become one, with ids in the same order; the manifest says what came from where."""
    source = tmp_path / "in"
    source.mkdir()
    for n in range(2):
        pq.write_table(ROWS.slice(n * 500, 500), source / f"{n}.parquet")
    for how in ({"partition_by": ["k"]}, {"merge": True}):
        out = tmp_path / "".join(how)
        job(str(source), out, vector, format="npy", keep=["id", "k"] if "merge" in how else ["id"], **how).run()
        assert gm.verify(out, deep=True).ok
        manifest = pq.read_table(out / "manifest.parquet", partitioning=None).to_pylist()
        assert len({m["output_path"] for m in manifest}) == (10 if "partition_by" in how else 1)
        assert sum(m["rows"] for m in manifest) == 1000
        assert {Path(m["input_path"]).name for m in manifest} == {"0.parquet", "1.parquet"}
        seen = []
        for name in {m["output_path"] for m in manifest}:
            vectors = np.load(out / name)
            ids = pq.read_table(out / name.replace(".npy", ".ids.parquet"), partitioning=None)
            assert vectors[:, 0].tolist() == ids["id"].to_pylist() and (vectors[:, 1] == vectors[:, 0] + 1).all()
            seen += ids["id"].to_pylist()
        assert sorted(seen) == list(range(1000))
    none = gm.Job(ROWS.slice(0, 0), vector, gm.sink(str(tmp_path / "none"), format="npy", merge=True), workers=0,
                  gates={"allow_empty": True})  # fmt: skip
    assert none.run().rows_ok == 0 and gm.verify(tmp_path / "none").ok
    job(str(source), tmp_path / "bare", vector, format="npy", keep=[], merge=True).run()
    (beside,) = (tmp_path / "bare").glob("merged*.ids.parquet")
    assert pq.read_table(beside)["row"].to_pylist() == list(range(1000))


def test_appended_and_retried_rows_get_files_of_their_own(tmp_path: Path) -> None:
    """One a partition and generation; the earlier ones stay as they are."""
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    pq.write_table(pa.table({"id": [-1, 1, 2, 3], "k": ["a", "a", "b", "b"]}), source / "0.parquet")
    made = job(str(source), out, partition_by=["k"], shard_rows=1)
    made.run()
    before = {p: p.read_bytes() for p in data_files(out)}
    pq.write_table(pa.table({"id": [5, 6, 7], "k": ["a", "a", "c"]}), source / "1.parquet")
    assert made.run(append=True).rows_ok == 6
    assert {p: p.read_bytes() for p in before} == before
    assert sorted(str(p.relative_to(out)) for p in data_files(out)) == [
        "k=a/merged-0000000.g2.parquet", "k=a/part-0000001.g1.parquet", "k=b/merged-0000001.g1.parquet",
        "k=c/part-0000002.g2.parquet",
    ]  # fmt: skip
    assert gm.verify(out, deep=True).ok
    mended = job(str(source), out, lambda batch: {"y": batch["id"] * 3}, partition_by=["k"], shard_rows=1)
    assert gm.retry_dead(mended, accept_code_change=True).rows_dead == 0
    assert sorted(gm.read(out).to_table()["id"].to_pylist()) == [-1, 1, 2, 3, 5, 6, 7]
    assert (out / "k=a" / "part-0000000.g3.parquet").exists() and gm.verify(out, deep=True).ok


def test_which_parts_go_together() -> None:
    """Small ones up to 512 MB, large ones alone; or as many files as were asked for, of about the same size."""
    mb = 1 << 20
    assert _small_together([mb] * 5) == [0] * 5
    assert _small_together([200 * mb, mb, mb, 300 * mb, mb]) == [0, 1, 1, 2, 3]
    assert _small_together([100 * mb] * 6) == [0, 0, 0, 0, 0, 1]
    assert _small_together([]) == _evenly([], 3) == []
    assert _evenly([10] * 6, 2) == [0, 0, 0, 1, 1, 1]
    assert _evenly([10, 10], 5) == [0, 1]
    assert _evenly([1, 1, 100, 1, 1], 2)[-1] == 1


def test_large_ones_are_joined_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same result; an error in one of them is the run's, and the next run goes on with the others' files."""
    job(ROWS, tmp_path / "one", partition_by=["k"]).run()
    monkeypatch.setattr(merge, "AT_ONCE_BYTES", 0)
    write, calls = merge.Joining._write, []

    def failing(self: merge.Joining, file: merge.Joined) -> Any:
        calls.append(file.folder)
        if len(calls) == 6:
            raise RunFailed("the disk is full")
        return write(self, file)

    monkeypatch.setattr(merge.Joining, "_write", failing)
    out = tmp_path / "two"
    with pytest.raises(RunFailed, match="the disk is full"):
        job(ROWS, out, partition_by=["k"]).run()
    assert data_files(out) == []
    first = set(calls)
    calls.clear()
    calls += [""] * 100
    job(ROWS, out, partition_by=["k"]).run()
    assert len(set(calls[100:]) & first) <= 5  # the one that failed, and those that were under way
    assert gm.read(out).to_table().equals(gm.read(tmp_path / "one").to_table())


def test_verify_sees_a_joined_file_of_other_parts(tmp_path: Path) -> None:
    """A receipt that names a part which no shard committed, or rows of another file."""
    out = tmp_path / "out"
    job(ROWS, out, partition_by=["k"], shard_rows=250).run()
    paths = sorted(out.glob("_gristmill/g*/merged/*.json"))
    one, two = (Receipt.load(p.read_bytes(), str(p)) for p in paths[:2])
    assert len(one.of) == 4 and one.parts[0].rows == 100

    def verdict(of: dict[str, str]) -> str:
        paths[0].write_bytes(replace(one, of=of).dump())
        return " ".join(gm.verify(out).lines)

    names = list(one.of)
    assert "was made of" in verdict({**one.of, names[0]: "00"})
    assert "holds 100 rows, but the parts it is made of 75" in verdict({n: one.of[n] for n in names[1:]})
    assert "which k=k1/merged-0000001.g1.parquet has, too" in verdict({**one.of, **two.of})
    assert verdict(dict(one.of)).endswith("all as published")


@pytest.mark.parametrize(
    ("sink", "says"),
    [
        ({"sort_by": ["v"]}, "sort_by names 'v', a .*list.*which has no order"),
        ({"sort_by": ["v"], "drop": ["v"]}, "'v' in both drop and sort_by"),
        ({"format": "npy", "sort_by": ["id"], "files": 1}, "sort_by beside partition_by, files or merge is for tables"),
        ({"merge": True, "files": 2}, "merge, which is one file, and files=2"),
    ],
)
def test_what_cannot_be(tmp_path: Path, sink: dict[str, Any], says: str) -> None:
    """Exit 2, before anything is scored."""
    with pytest.raises(BadJob, match=says):
        job(ROWS, tmp_path / "out", vector, **sink).run()


def test_vectors_sorted_by_shard(tmp_path: Path) -> None:
    """The other columns and the vectors of an npy file are in one order."""
    rows = pa.table({"id": np.arange(100)[::-1].copy()})
    job(rows, tmp_path / "out", vector, format="npy", sort_by=["id"], shard_rows=50).run()
    for part, ids in zip(sorted(tmp_path.glob("out/*.npy")), (range(50, 100), range(50)), strict=True):
        assert np.load(part)[:, 0].tolist() == list(ids)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """--partition-by, --sort-by and --files."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(ROWS.slice(0, 400), "in.parquet")
    Path("mine.py").write_text("def twice(batch):\n    return {'y': batch['id'] * 2}\n")
    typed = "apply in.parquet out --fn mine:twice --keep id --workers 0 --shard-rows 50 --progress off"
    assert main([*typed.split(), "--partition-by", "k", "--sort-by", "y", "--files", "1"]) == 0
    assert len(data_files(tmp_path / "out")) == 10
    capsys.readouterr()
    assert main(["verify", "out", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] and said["files"] == 10

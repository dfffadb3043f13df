"""Jobs whose sink is npy: what a matrix can hold, one width in all of a result, the manifest that names its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.driver.run import retry_dead


def source(folder: Path, *counts: int, first: int = 0) -> str:
    """A folder of files with so many rows: `id` counts over all of them, `day` is one of three."""
    folder.mkdir(exist_ok=True)
    for count in counts:
        ids = np.arange(first, first + count)
        pq.write_table(pa.table({"id": ids, "day": [f"d{i % 3}" for i in ids]}), folder / f"{first:04d}.parquet")
        first += count
    return str(folder)


def by_the_manifest(root: Path) -> tuple[list[float], list[int]]:
    """First number of each vector and id of each row, read as docs/results.md says."""
    parts = pq.read_table(root / "manifest.parquet")["output_path"].unique().to_pylist()
    vectors = np.concatenate([np.load(root / p, mmap_mode="r") for p in parts])
    ids = [pq.ParquetFile(root / f"{p.removesuffix('.npy')}.ids.parquet").read() for p in parts]
    return vectors[:, 0].tolist(), pa.concat_tables(ids)["id"].to_pylist()


@pytest.mark.few(1)
@pytest.mark.parametrize("keys", [(), ("day",)])
def test_the_manifest_names_every_part_and_its_rows(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """Of shards over several files, divided into folders or not, after an append and a retry."""
    root, flag = tmp_path / "out", tmp_path / "fixed"

    def vector(batch: dict[str, Any]) -> dict[str, Any]:
        if 7 in batch["id"] and not flag.exists():
            raise ValueError("seven")
        return {"v": np.stack([batch["id"], batch["id"]], axis=1).astype(np.float32)}

    def job() -> gm.Job:
        sink = gm.sink(str(root), format="npy", keep=["id", "day"], partition_by=keys)
        return gm.Job(given, vector, sink, workers=0, shard_rows=25, gates={"min_ok": 0.9})

    given = source(tmp_path / "in", 10, 30, 20)
    job().run()
    source(tmp_path / "in", 11, first=60)
    job().run(append=True)
    flag.mkdir()
    assert retry_dead(job().spec).rows_ok == 71
    vectors, ids = by_the_manifest(root)
    assert sorted(ids) == list(range(71))
    assert vectors == ids
    assert gm.verify(str(root), deep=True).ok
    for row in pq.read_table(root / "manifest.parquet").to_pylist():
        first = int(Path(row["input_path"]).stem)
        (last,) = (n for f, n in ((0, 10), (10, 40), (40, 60), (60, 71)) if f == first)
        beside = pq.ParquetFile(root / row["output_path"].replace(".npy", ".ids.parquet")).read()
        assert row["rows"] == sum(first <= i < last for i in beside["id"].to_pylist())


@pytest.mark.parametrize("keys", [(), ("day",)])
@pytest.mark.parametrize("as_lists", [False, True])
def test_a_number_that_float32_cannot_hold_is_a_dead_letter(
    tmp_path: Path, as_lists: bool, keys: tuple[str, ...]
) -> None:
    """Also with on_nan keep, which publishes infinities that the model gave; what is only rounded is no fault."""

    def vector(batch: dict[str, Any]) -> dict[str, Any]:
        made = np.full((len(batch["id"]), 2), 0.1)
        made[batch["id"] == 3, 1] = 1e39
        made[batch["id"] == 5, 0] = -1e300
        made[batch["id"] == 8, 0] = np.inf
        return {"v": list(made) if as_lists else made}

    given = source(tmp_path / "in", 12)
    for on_nan, infinite in (("dead", 0), ("keep", 1)):
        root = tmp_path / on_nan
        sink = gm.sink(str(root), format="npy", keep=["id", "day"], partition_by=keys)
        report = gm.Job(given, vector, sink, workers=0, on_nan=on_nan, gates={"min_ok": 0.5}).run()
        assert report.rows_ok == 9 + infinite
        assert report.errors == {"Overflow": 2} | ({} if infinite else {"Infinite": 1})
        assert [x["position"] for x in gm.dead(str(root)).to_pylist() if x["error"] == "Overflow"] == [3, 5]
        vectors, ids = by_the_manifest(root)
        assert sum(np.isinf(vectors)) == infinite
        assert sorted(ids) == [i for i in range(12) if i not in (3, 5) and (infinite or i != 8)]
        assert gm.verify(str(root), deep=True).ok


def wide(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A vector of two numbers for a row, of three from id 100 on."""
    return [{"v": [float(r["id"])] * (2 if r["id"] < 100 else 3)} for r in rows]


@pytest.mark.few(1)
@pytest.mark.parametrize("returns", [None, {"v": "list<float32>"}])
def test_all_vectors_of_a_result_have_one_width(tmp_path: Path, returns: Any) -> None:
    """A shard of another width stops the run, and an append is refused, so that the files can be put together."""
    root, given = tmp_path / "out", source(tmp_path / "in", 100)
    model = gm.model(wide, batch_format="rows", returns=returns)

    def job(to: Path, evolve: bool = False) -> gm.Job:
        sink = gm.sink(str(to), format="npy", keep=["id"], evolve=evolve)
        return gm.Job(given, model, sink, workers=0, shard_rows=50)

    job(root).run()
    source(tmp_path / "in", 50, first=100)
    with pytest.raises(gm.RunFailed, match="has a row of 3 values"):
        job(tmp_path / "other").run()
    with pytest.raises(gm.PlanChanged, match=r"v was .*\[2\], is .*\[3\]") as refused:
        job(root).run(append=True)
    assert "evolve" not in str(refused.value)  # which would not help
    with pytest.raises(gm.PlanChanged, match=r"no single type can hold"):
        job(root, evolve=True).run(append=True)
    assert by_the_manifest(root)[1] == list(range(100))
    assert gm.verify(str(root), deep=True).ok


def test_a_post_step_is_given_the_same_lists_in_every_shard(tmp_path: Path) -> None:
    """Although the width is known once the first rows were scored."""
    kinds = []

    def after(batch: Any) -> Any:
        kinds.append(batch.schema.field("v").type)
        return batch

    step = gm.step(after, batch_format="arrow")
    sink = gm.sink(str(tmp_path / "out"), format="npy", keep=["id"])
    model = gm.model(wide, batch_format="rows")
    gm.Job(source(tmp_path / "in", 100), model, sink, workers=0, post=[step], shard_rows=20).run()
    assert set(kinds) == {pa.list_(pa.float64())}
    assert len(kinds) > 3


@pytest.mark.long
def test_a_job_is_looked_at_whatever_its_sink_is(tmp_path: Path) -> None:
    """Options of the sink's format are no fault of a preview or stream; the first refuses those that a run would."""

    def vector(batch: dict[str, Any]) -> dict[str, Any]:
        return {"v": np.stack([batch["id"], batch["id"]], axis=1) * 1.0}

    given = source(tmp_path / "in", 12)

    def job(form: str | None, **options: str) -> gm.Job:
        sink = gm.sink(str(tmp_path / "out"), format=form, keep=["id"], options=options)
        return gm.Job(given, vector, sink, workers=0)

    for form, options in (
        ("jsonl", {"compression": "gz"}),
        ("npy", {"vector": "v"}),
        (None, {"compression": "snappy"}),
    ):
        assert job(form, **options).preview(3).num_rows == 3
        assert sum(t.num_rows for t in job(form, **options).stream()) == 12
    assert not (tmp_path / "out").exists()
    for form, options, said in (
        ("jsonl", {"compression": "lz4"}, "jsonl sink compression is 'lz4'"),
        ("npy", {"vector": "id"}, "npy sink vector is 'id'"),
        ("parquet", {"compresion": "zstd"}, "parquet sink has no option 'compresion'"),
    ):
        with pytest.raises(gm.BadJob, match=said):
            job(form, **options).preview(3)


def test_a_row_without_a_whole_vector_is_a_dead_letter_of_npy(tmp_path: Path) -> None:
    """A matrix has no room for null: neither for a vector, nor for a number in one; the others are published."""
    vectors = {3: None, 5: [None, 1.0]}
    model = gm.model(
        lambda rows: [{"v": vectors.get(r["id"], [float(r["id"]), 1.0])} for r in rows], batch_format="rows"
    )
    sink = gm.sink(str(tmp_path / "out"), format="npy", keep=["id"])
    source = pa.table({"id": range(300)})
    report = gm.Job(source, model, sink, workers=0, batch_rows=50, gates={"min_ok": 0.9}).run()
    assert (report.rows_ok, report.errors) == (298, {"NoVector": 2})
    assert gm.dead(str(tmp_path / "out"))["position"].to_pylist() == [3, 5]
    found = np.concatenate([np.load(p) for p in sorted((tmp_path / "out").glob("*.npy"))])
    assert found[:, 0].tolist() == [i for i in range(300) if i not in vectors]

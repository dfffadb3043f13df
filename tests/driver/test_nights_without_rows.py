"""Nights whose source has no rows, of jobs that ask for more: nothing is held to columns that nobody knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm


def double(batch: Any) -> Any:
    return {"y": batch["id"] * 2}


def total(rows: pa.RecordBatchReader, folder: str) -> None:
    (Path(folder) / "n.txt").write_text(str(rows.read_all().num_rows))


def write(folder: Path, form: str, rows: int) -> None:
    """The source's only file, of ids 1 to `rows`; without rows a CSV or JSONL file has no bytes."""
    folder.mkdir(exist_ok=True)
    table = pa.table({"id": pa.array(range(1, rows + 1), pa.int64()), "w": pa.array(range(rows), pa.int64())})
    if form == "parquet":
        pq.write_table(table, folder / "a.parquet")
    elif form == "csv":
        (folder / "a.csv").write_text("id,w\n" * bool(rows) + "".join(f"{i + 1},{i}\n" for i in range(rows)))
    else:
        (folder / "a.jsonl").write_text("".join(f'{{"id": {i + 1}, "w": {i}}}\n' for i in range(rows)))


def job(
    tmp_path: Path, form: str, gates: dict[str, Any] | None = None, sink: dict[str, Any] | None = None, **more: Any
) -> gm.Job:
    options = {} if form == "parquet" else {"types": {"id": "int64", "w": "int64"}}
    source = gm.source(str(tmp_path / "in"), format=form, **options)
    to = gm.sink(str(tmp_path / "out"), keep=["id"], **(sink or {}))
    return gm.Job(source, double, to, workers=0, gates={"allow_empty": True, **(gates or {})}, **more)


ASKED: dict[str, dict[str, Any]] = {
    "update": {"update": True},
    "update by key": {"update": {"key": ["id"]}},
    "reduce": {"reduce": total},
    "index": {"sink": {"index": "id"}},
    "index of an update": {"sink": {"index": "id"}, "update": {"key": ["id"]}},
    "sorted by the answer, in folders": {"sink": {"sort_by": ["y"], "partition_by": ["id"]}},
    "drift": {"gates": {"drift": {"y": {"psi": 0.2}}}},
    "deliver": {"deliver": ["{}/store.db#t"]},
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_night_without_rows_is_published(tmp_path: Path, form: str, asked: str) -> None:
    """First, and between nights with rows; a CSV file of no bytes has no columns either."""
    more = dict(ASKED[asked])
    more.update({"deliver": [t.format(f"sqlite://{tmp_path}") for t in more["deliver"]]} if "deliver" in more else {})
    for rows in (0, 3, 0, 4):
        write(tmp_path / "in", form, rows)
        report = job(tmp_path, form, **more).run(restart="update" not in more)
        assert report.rows_ok == rows
        assert [r["y"] for r in gm.read(str(tmp_path / "out")).to_table().to_pylist()] == [
            2 * i for i in range(1, rows + 1)
        ]
        assert gm.verify(str(tmp_path / "out")).ok


@pytest.mark.parametrize("store", ["sqlite", "duckdb", "delta", "lance"])
def test_nothing_is_made_in_a_store_of_columns_that_nobody_knows(tmp_path: Path, store: str) -> None:
    """The first night with rows makes the table; a later one without rows empties it."""
    at = {"delta": "", "lance": "#t"}.get(store, "#t")
    uri = f"{store}://{tmp_path}/store{at}"
    for night, rows in enumerate((0, 3, 0, 2)):
        write(tmp_path / "in", "jsonl", rows)
        report = job(tmp_path, "jsonl", deliver=[gm.to(uri)]).run(restart=True)
        assert [(d.rows, d.to) for d in report.deliveries] == [(rows, report.deliveries[0].to)]
        assert any("nothing is made there" in note for note in report.notes) == (night == 0)
        assert gm.verify(str(tmp_path / "out")).ok
        if night == 0:
            assert not (tmp_path / "store").exists() or store in ("sqlite", "duckdb")
            continue
        with gm.lookup(uri, key="id") as found:
            assert [found.get(i) for i in (1, rows)] == (
                [{"id": i, "y": 2 * i} for i in (1, rows)] if rows else [None] * 2
            )

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


@pytest.mark.parametrize("how", ["changed", "added"])
@pytest.mark.parametrize("key", [None, "id"], ids=["files", "rows"])
def test_a_night_held_back_as_it_has_no_rows_is_given_up(tmp_path: Path, key: str | None, how: str) -> None:
    """Its plan knows no columns, and holds up no later night of an update, whether the file has rows now or a new one
    has.
    """

    def night() -> gm.Report:
        source = gm.source(str(tmp_path / "in"), where="id > 2")
        update = {"key": [key]} if key else True
        return gm.Job(source, double, gm.sink(str(tmp_path / "out"), keep=["id"]), workers=0, update=update).run()

    write(tmp_path / "in", "parquet", 2)
    with pytest.raises(gm.GateFailed, match="none of 2 rows was scored: all were filtered out"):
        night()
    rows = pa.table({"id": [1, 2, 7], "w": [0, 1, 6]})
    if how == "added":
        rows = rows.slice(2)
    pq.write_table(rows, tmp_path / "in" / ("b.parquet" if how == "added" else "a.parquet"))
    for _ in range(2):
        night()
        assert gm.read(tmp_path / "out").to_table().to_pylist() == [{"id": 7, "y": 14}]


def test_columns_of_rows_after_very_many_dead_ones_are_declared(tmp_path: Path) -> None:
    """Beyond those that are looked at for a first one that can be scored; the error says how."""
    ids = [None] * 20_000 + [5]
    pq.write_table(pa.table({"id": pa.array(ids, pa.int64())}), tmp_path / "a.parquet")

    def run(**more: Any) -> gm.Report:
        model = gm.model(double, takes={"id": "int64 not null"}, **more)
        gates, sink = {"min_ok": 0.0}, gm.sink(str(tmp_path / "out"), keep=["id"])
        job = gm.Job(str(tmp_path / "a.parquet"), model, sink, workers=0, on_null="dead", gates=gates)
        return job.run(restart=bool(more))

    with pytest.raises(gm.RunFailed, match="returns= declares columns, also where no first row can be scored"):
        run()
    assert run(returns={"y": "int64"}).rows_ok == 1

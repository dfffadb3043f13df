"""Tables of lakes that have forgotten their earlier versions: whether the rows of a delivery are there is told by what
is left, or its rows are brought again by key, and not appended; none are lost or come twice.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shops
from test_lakes import appender, count_of, iceberg_table, job, rows

import gristmill as gm

DOUBTFUL = r"whether the rows of generation 2 .* cannot be told: .*, and rows are not appended twice: deliver to a"


@pytest.fixture(params=["delta", "iceberg"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A lake with the table `scores`, of others, which forgets as it is told to."""
    with shops.SHOPS[request.param]("", tmp_path) as made:
        if made.name == "delta":
            from deltalake import write_deltalake

            options = {"delta.logRetentionDuration": "interval 0 days"}
            write_deltalake(tmp_path / "scores", rows(1000), configuration=options)
        else:
            appender(made, tmp_path)(rows(1000))
        yield made


def back(shop: shops.Shop, folder: Path) -> None:
    """Make what was there after the first delivery the newest version, as an operator does."""
    if shop.name == "delta":
        from deltalake import DeltaTable

        DeltaTable(str(folder / "scores")).restore(1)
    else:
        table = iceberg_table(folder)
        table.manage_snapshots().rollback_to_snapshot(table.metadata.snapshots[1].snapshot_id).commit()


def compacted(shop: shops.Shop, folder: Path) -> None:
    """All rows in a file that others have written."""
    if shop.name == "delta":
        from deltalake import DeltaTable

        DeltaTable(str(folder / "scores")).optimize.compact()
    else:
        table = iceberg_table(folder)
        table.overwrite(table.scan().to_arrow())


def forget(shop: shops.Shop, folder: Path, wholly: bool) -> None:
    """Leave only the newest version; `wholly` also without the files that told of earlier ones."""
    if shop.name == "delta":
        from deltalake import DeltaTable

        DeltaTable(str(folder / "scores")).create_checkpoint()
        time.sleep(1.1)
        DeltaTable(str(folder / "scores")).cleanup_metadata()
        return
    table = iceberg_table(folder)
    gone = [s.snapshot_id for s in table.metadata.snapshots if s != table.current_snapshot()]
    table.maintenance.expire_snapshots().by_ids(gone).commit()
    for entry in iceberg_table(folder).metadata.metadata_log if wholly else ():
        Path(entry.metadata_file.removeprefix("file://")).unlink(missing_ok=True)


def night(folder: Path, number: int, mode: str, to: Any) -> dict[int, float]:
    """The source of a night, with a new row and, by key, another value of an earlier one; the job; what is to be there
    then.
    """
    (folder / "in").mkdir(exist_ok=True)
    ids = [number] if mode == "append" else list(range(5))
    values = [float(number) if mode == "append" or i == number else 0.0 for i in ids]
    name = f"{number}.parquet" if mode == "append" else "all.parquet"
    pq.write_table(pa.table({"id": pa.array(ids, pa.int64()), "x": values}), folder / "in" / name)
    how: dict[str, Any] = {"on_new_files": "append"} if mode == "append" else {"update": {"key": ["id"]}}
    job(folder, deliver=[to], **how).run()
    return dict(zip(ids, values, strict=True))


def seen(shop: shops.Shop) -> dict[int, float]:
    """The value of each row of ours."""
    return {i: row["y"] for i, row in shop.seen("scores").items() if i < 1000}


@pytest.mark.parametrize("wholly", [False, True])
@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.few(2)
def test_a_restored_table(shop: shops.Shop, mode: str, wholly: bool, tmp_path: Path) -> None:
    """To the first of two nights, with rows of others since: what the second one brought comes again, or, where nothing
    tells of it, is not appended, and `verify` says so.
    """
    to = gm.to(shop.address("scores"), mode=mode, key="id")
    told = night(tmp_path, 1, mode, to) | night(tmp_path, 2, mode, to)
    back(shop, tmp_path)
    appender(shop, tmp_path)(rows(2000))
    forget(shop, tmp_path, wholly)
    if mode == "append" and (wholly or shop.name == "delta"):
        verdict = gm.verify(job(tmp_path, deliver=[to]))
        assert not verdict.ok and "whether the rows of generation 2" in verdict.lines[-1]
        with pytest.raises(gm.BadJob, match=DOUBTFUL):
            night(tmp_path, 3, mode, to)
        assert count_of(shop, tmp_path) == 3
        return
    told |= night(tmp_path, 3, mode, to)
    assert seen(shop) == told and count_of(shop, tmp_path) == len(told) + 2
    assert gm.verify(job(tmp_path, deliver=[to])).ok


@pytest.mark.parametrize("wholly", [False, True])
@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.few(2)
def test_a_table_whose_files_others_have_rewritten(shop: shops.Shop, mode: str, wholly: bool, tmp_path: Path) -> None:
    """Appended rows do not come twice, and by key all are as they are to be; a replace ends the doubt."""
    to = gm.to(shop.address("scores"), mode=mode, key="id")
    told = night(tmp_path, 1, mode, to) | night(tmp_path, 2, mode, to)
    compacted(shop, tmp_path)
    appender(shop, tmp_path)(rows(2000))
    forget(shop, tmp_path, wholly)
    if mode == "append" and (wholly or shop.name == "delta"):
        with pytest.raises(gm.BadJob, match=DOUBTFUL):
            night(tmp_path, 3, mode, to)
        assert seen(shop) == told and count_of(shop, tmp_path) == len(told) + 2
        gm.deliver(str(tmp_path / "out"), gm.to(shop.address("scores"), key="id"))
        told |= night(tmp_path, 3, mode, to)
        assert seen(shop) == told and count_of(shop, tmp_path) == len(told)
        return
    told |= night(tmp_path, 3, mode, to)
    assert seen(shop) == told and count_of(shop, tmp_path) == len(told) + 2


@pytest.mark.parametrize("wholly", [False, True])
@pytest.mark.few(2)
def test_a_table_that_was_not_restored(shop: shops.Shop, wholly: bool, tmp_path: Path) -> None:
    """Has the rows of all nights, by their files, and those of the next one are appended."""
    to = gm.to(shop.address("scores"), mode="append", key="id")
    told = night(tmp_path, 1, "append", to) | night(tmp_path, 2, "append", to)
    for number in (3, 4):
        appender(shop, tmp_path)(rows(1000 + number))
        forget(shop, tmp_path, wholly)
        told |= night(tmp_path, number, "append", to)
        assert seen(shop) == told and count_of(shop, tmp_path) == 2 * number - 1


def test_delta_restored_to_a_version_whose_marks_are_gone(tmp_path: Path) -> None:
    """A delivery has removed them, as they did not hold any more: rows are found, and brought again by key."""
    from deltalake import DeltaTable

    with shops.SHOPS["delta"]("", tmp_path) as shop:
        to = gm.to(shop.address("scores"), mode="upsert", key="id")
        first = night(tmp_path, 1, "upsert", to)
        DeltaTable(str(tmp_path / "scores")).create_checkpoint()
        for path in (tmp_path / "scores" / "_gristmill").iterdir():
            os.utime(path, (1, 1))
        second = night(tmp_path, 2, "upsert", to)
        DeltaTable(str(tmp_path / "scores")).restore(0)
        (tmp_path / "scores" / "_delta_log" / f"{0:020}.json").unlink()
        assert seen(shop) == first
        with gm.lookup(to) as lookup:
            assert lookup.get(1)["y"] == first[1]
        with pytest.raises(gm.BadJob, match=DOUBTFUL):
            gm.deliver(str(tmp_path / "out"), gm.to(shop.address("scores"), mode="append", key="id"))
        gm.deliver(str(tmp_path / "out"), to)
        assert seen(shop) == second


def test_delta_whose_log_has_forgotten_what_was_restored(tmp_path: Path) -> None:
    """The commit that restored it is there, but not the version: appended rows do not come twice, by key they do."""
    from deltalake import DeltaTable, write_deltalake

    with shops.SHOPS["delta"]("", tmp_path) as shop:
        options = {"delta.logRetentionDuration": "interval 0 days"}
        write_deltalake(tmp_path / "scores", rows(1000), configuration=options)
        to = gm.to(shop.address("scores"), mode="append", key="id")
        night(tmp_path, 1, "append", to)
        night(tmp_path, 2, "append", to)
        back(shop, tmp_path)
        forget(shop, tmp_path, False)
        assert DeltaTable(str(tmp_path / "scores")).history(1)[0]["operation"] == "RESTORE"
        with pytest.raises(gm.BadJob, match=DOUBTFUL):
            gm.deliver(str(tmp_path / "out"), to)
        gm.deliver(str(tmp_path / "out"), gm.to(shop.address("scores"), mode="upsert", key="id"))
        assert seen(shop) == {1: 1.0, 2: 2.0} and count_of(shop, tmp_path) == 3


@pytest.mark.few(1)
def test_an_older_result_of_a_restored_sink(shop: shops.Shop, tmp_path: Path) -> None:
    """Does not take the place of a later one of which nothing tells any more whether it is there, unless that is asked
    for.
    """
    to, sink = gm.to(shop.address("scores"), mode="upsert", key="id"), tmp_path / "out"
    first = night(tmp_path, 1, "upsert", to)
    shutil.copytree(sink, tmp_path / "backup")
    second = night(tmp_path, 2, "upsert", to)
    shutil.rmtree(sink)
    shutil.copytree(tmp_path / "backup", sink)
    compacted(shop, tmp_path)
    appender(shop, tmp_path)(rows(2000))
    forget(shop, tmp_path, wholly=True)
    with pytest.raises(gm.SinkBusy, match="generation 2 of this sink already, and this is 1: it is of a copy"):
        gm.deliver(str(sink), to)
    assert seen(shop) == second != first
    gm.deliver(str(sink), to, take_over=True)
    assert seen(shop) == first

"""Tables of lakes, which others write to as well: what is theirs stays, what is ours comes once, no files go."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import shops
from apart import Apart
from test_every_store import ROWS, write

import gristmill as gm
from gristmill.commit.publication import published
from gristmill.files.disk import LOCAL
from gristmill.stores import delivery as deliveries
from gristmill.stores.lake import Lake
from gristmill.stores.results import identity

LAKES = ("delta", "iceberg", "lance")
MARKS = "?" * 15 + ".json"  # how Delta's files of marks are named
pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match:UserWarning")


def scored(batch: dict[str, Any], times: int = 1) -> dict[str, Any]:
    """A number and a text for each row."""
    return {"y": batch["x"] * times, "label": [f"n{times}" for _ in batch["x"]]}


def job(folder: Path, times: int = 1, **options: Any) -> gm.Job:
    """The rows of the folder `in`, in the sink `out`, in shards of ten, here."""
    sink = options.pop("sink", None) or gm.sink(str(folder / "out"), keep=["id"])
    model = gm.model(scored, times=times, returns={"y": "float64", "label": "string"})
    return gm.Job(str(folder / "in"), model, sink, workers=0, shard_rows=10, **options)


def wanted(ids: Any, times: int = 1) -> dict[int, dict[str, Any]]:
    """The rows of such a job."""
    return {i: {"id": i, "y": i / 4 * times, "label": f"n{times}"} for i in ids}


@pytest.fixture(params=LAKES)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[shops.Shop]:
    """Each kind of lake, without tables."""
    with shops.SHOPS[request.param]("", tmp_path) as made:
        yield made


@pytest.fixture
def out(tmp_path: Path) -> str:
    """A sink with a result."""
    write(tmp_path / "in", 0, ROWS)
    job(tmp_path).run()
    return str(tmp_path / "out")


def again(tmp_path: Path, times: int) -> str:
    """The sink with another result."""
    job(tmp_path, times).run(restart=True)
    return str(tmp_path / "out")


def rows(*ids: int) -> pa.Table:
    """Rows of somebody else."""
    columns = {"id": pa.array(ids, pa.int64()), "y": pa.array([0.0] * len(ids)), "label": ["theirs"] * len(ids)}
    return pa.table(columns)


def theirs(*ids: int) -> dict[int, dict[str, Any]]:
    """The same as they are seen."""
    return {row["id"]: row for row in rows(*ids).to_pylist()}


def appender(shop: shops.Shop, folder: Path) -> Callable[[pa.Table], None]:
    """How somebody else appends to the table `scores`."""

    def append(table: pa.Table) -> None:
        if shop.name == "delta":
            from deltalake import write_deltalake

            write_deltalake(folder / "scores", table, mode="append")
        elif shop.name == "lance":
            import lance

            lance.write_dataset(table, folder / "lancedb" / "scores.lance", mode="append")
        else:
            made = pa.schema([(f.name, f.type) for f in table.schema])
            iceberg_catalog(folder).create_table_if_not_exists(("nights", "scores"), made).append(table)

    return append


def iceberg_table(folder: Path, name: str = "scores") -> Any:
    """The Iceberg table, as its own client has it."""
    return iceberg_catalog(folder).load_table(("nights", name))


def iceberg_catalog(folder: Path) -> Any:
    from pyiceberg.catalog import load_catalog

    about = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.sqlite", "warehouse": f"file://{folder}/lake"}
    return load_catalog("shop", **about)


def files_of(shop: shops.Shop, folder: Path) -> set[str]:
    """The data files that are in the table's folder."""
    at = {"delta": "scores", "iceberg": "lake/nights/scores/data", "lance": "lancedb/scores.lance/data"}[shop.name]
    form = {"lance": "*.lance"}.get(shop.name, "*.parquet")
    return {str(path.relative_to(folder / at)) for path in (folder / at).rglob(form)}


@pytest.mark.parametrize("mode", ["append", "upsert", "replace"])
def test_a_table_without_rows(mode: str, shop: shops.Shop, out: str, tmp_path: Path) -> None:
    """Of others, or of a night without any: takes the rows of the next ones."""
    if mode == "append":
        write(tmp_path / "in", 0, 3)
        none = job(tmp_path, sink=gm.sink(str(tmp_path / "none"), keep=["id"]), steps=[gm.filter("id < 0")],
                   gates={"allow_empty": True})  # fmt: skip
        none.run()
        gm.deliver(str(tmp_path / "none"), shop.address("scores"), mode=mode)
    else:
        (tmp_path / "lancedb").mkdir()
        appender(shop, tmp_path)(rows().cast(rows(1).schema))
    assert not shop.seen("scores")
    to = gm.to(shop.address("scores"), mode=mode, key="id")
    gm.deliver(out, to)
    assert shop.seen("scores") == wanted(range(ROWS))
    gm.deliver(out, to)
    assert shop.seen("scores") == wanted(range(ROWS))


@pytest.mark.few(2)
def test_rows_of_others_stay(shop: shops.Shop, out: str, tmp_path: Path) -> None:
    """What somebody else has written is there after appends and upserts, and a repeat does not see it as ours."""
    append = appender(shop, tmp_path)
    address = shop.address("scores")
    gm.deliver(out, address, mode="append", key="id")
    append(rows(100, 101))
    assert gm.deliver(out, address, mode="append", key="id").rows == ROWS  # nothing happens
    assert shop.seen("scores") == {**wanted(range(ROWS)), **theirs(100, 101)}
    write(tmp_path / "in", ROWS, ROWS + 5)
    job(tmp_path, on_new_files="append").run()
    gm.deliver(out, address, mode="append", key="id")
    append(rows(102))
    assert shop.seen("scores") == {**wanted(range(ROWS + 5)), **theirs(100, 101, 102)}
    gm.deliver(again(tmp_path, 3), address, mode="upsert", key="id")
    assert shop.seen("scores") == {**wanted(range(ROWS + 5), 3), **theirs(100, 101, 102)}
    gm.deliver(again(tmp_path, 4), address, key="id")
    assert shop.seen("scores") == wanted(range(ROWS + 5), 4)


@pytest.mark.parametrize("mode", ["append", "replace", "upsert"])
@pytest.mark.few(5)
def test_somebody_who_is_quicker(
    shop: shops.Shop, out: str, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that comes between the look and ours: ours is made on it, or not at all, and no row comes twice."""
    append = appender(shop, tmp_path)
    address = shop.address("scores")
    gm.deliver(out, address, mode="append", key="id")
    columns, times = Lake._columns, []

    def slow(self: Lake, now: Any, load: Any) -> Any:
        if len(times) < 2 and any(frame == "publish" for frame in callers()):
            times.append(1)
            append(rows(100 + len(times)))
        return columns(self, now, load)

    monkeypatch.setattr(Lake, "_columns", slow)
    result = again(tmp_path, 2)
    gm.deliver(result, address, mode=mode, key="id")
    found = shop.seen("scores")
    assert 1 <= len(times) <= 2  # Lance can make ours the one before theirs
    others = theirs(*range(101, 101 + len(times)))
    if mode == "append":
        assert found.keys() == {*range(ROWS), *others}
    elif mode == "upsert":
        assert found == {**wanted(range(ROWS), 2), **others}
    else:
        assert {key: row for key, row in found.items() if key < ROWS} == wanted(range(ROWS), 2)
    store = deliveries.opened(gm.to(address, mode=mode, key="id"))
    assert store.count(None) == (2 * ROWS if mode == "append" else 0) + (
        len(found) if mode != "append" else len(others)
    )


def callers() -> list[str]:
    """The names of the functions that are running."""
    import sys

    frame, names = sys._getframe(1), []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


@pytest.mark.parametrize("name", ["delta", "lance"])
def test_a_folder_that_becomes_a_table_is_not_somebody_elses(
    name: str, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sink makes it between two looks at it, or is in the middle of that; what is not ours is refused still."""
    with shops.SHOPS[name]("", tmp_path) as shop:
        address = shop.address("scores")
        if name == "delta":
            from gristmill.stores import delta

            names = delta._names

            def late(path: str) -> list[str]:
                monkeypatch.setattr(delta, "_names", names)
                gm.deliver(out, address)
                return names(path)

            monkeypatch.setattr(delta, "_names", late)
        else:
            (tmp_path / "lancedb" / "scores.lance" / "_transactions").mkdir(parents=True)
        shutil.copytree(out, f"{out}2")
        gm.deliver(f"{out}2", address)
        assert shop.seen("scores") == wanted(range(ROWS))
        folder = Path(gm.to(address).place.path)
        shutil.rmtree(folder)
        notes = folder / ("notes.txt" if name == "delta" else "scores.lance/notes.txt")
        notes.parent.mkdir(parents=True)
        notes.write_text("of somebody else")
        with pytest.raises(gm.BadJob, match="other files in it, and"):
            gm.deliver(out, address)


def test_what_was_staged_and_never_published_goes(shop: shops.Shop, out: str, tmp_path: Path) -> None:
    """With the next delivery; the files of earlier results stay, for those who still read them."""
    made = gm.to(shop.address("scores"), key="id")
    gm.deliver(out, made)
    first = files_of(shop, tmp_path)
    again(tmp_path, 2)
    store = deliveries.opened(made)
    loading = deliveries.Loading(made, deliveries.Result.of(published(out)), store)
    loading.stage(published(out).live()[:2])
    store.close()
    left = files_of(shop, tmp_path) - first
    assert len(left) == 2
    gm.deliver(again(tmp_path, 3), made)
    assert not left & files_of(shop, tmp_path) and first <= files_of(shop, tmp_path)
    assert shop.seen("scores") == wanted(range(ROWS), 3)


def test_small_parts_share_a_data_file(shop: shops.Shop, out: str, tmp_path: Path) -> None:
    """Those that come together, each once, beside one that was there already."""
    made, result = gm.to(shop.address("scores"), key="id"), published(out)
    store, about = deliveries.opened(made), deliveries.Result.of(result)
    deliveries.Loading(made, about, store).stage(result.live()[1:2])
    assert len(files_of(shop, tmp_path)) == 1
    later = deliveries.Loading(made, about, deliveries.opened(made))
    later.stage(result.live())
    assert len(files_of(shop, tmp_path)) == 3
    there = deliveries.opened(made).staged(deliveries.load_of(made, about))
    assert sorted(there.values()) == sorted(f.rows for f in result.live())
    store.stage(deliveries.load_of(made, about), [part for _, part in later._parts(result.live())])
    assert len(files_of(shop, tmp_path)) == 3  # all were there
    assert gm.deliver(out, made).rows == ROWS
    assert shop.seen("scores") == wanted(range(ROWS))
    assert len(files_of(shop, tmp_path)) == 3


def test_rows_are_in_the_order_of_the_result(shop: shops.Shop, out: str, tmp_path: Path) -> None:
    """As they are read by the lake's own reader, however its files were staged and are called."""
    made, result = gm.to(shop.address("scores"), key="id"), published(out)
    loading = deliveries.Loading(made, deliveries.Result.of(result), deliveries.opened(made))
    for number in reversed(range(len(result.live()))):
        loading.stage(result.live()[number : number + 1])
    gm.deliver(out, made)
    assert list(shop.seen("scores") or ()) == list(range(ROWS))
    gm.deliver(again(tmp_path, 2), made)  # in place of rows that are there
    assert list(shop.seen("scores") or ()) == list(range(ROWS))


@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.long)])
@pytest.mark.few(1)
def test_appending_is_killed_at_any_step(shop: shops.Shop, tmp_path: Path, apart: Apart, kills: int) -> None:
    """Rows are appended or not, all of them, and once, whatever is repeated; somebody else appends in between."""
    append = appender(shop, tmp_path)
    address, how = shop.address("scores"), {"mode": "append", "key": "id"}
    sinks = {"first": str(tmp_path / "first"), "second": str(tmp_path / "out")}
    write(tmp_path / "in", 0, 20)
    job(tmp_path).run()
    shutil.copytree(tmp_path / "out", tmp_path / "first")
    write(tmp_path / "in", 20, ROWS)
    job(tmp_path, on_new_files="append").run()

    def begin() -> None:
        shop.clear("scores")
        gm.deliver(sinks["first"], address, **how)

    def count() -> int:
        return deliveries.opened(gm.to(address, **how)).count(None)

    begin()
    whole = apart.run("harmed:deliver", sink=sinks["second"], to=address, at=None, **how)
    assert whole.code == 0 and count() == ROWS, whole.printed
    lines = int(whole.printed.rpartition("lines ")[2])
    for at in range(lines // kills // 2, lines, lines // kills):
        begin()
        apart.run("harmed:deliver", sink=sinks["second"], to=address, at=at, **how)
        assert shop.seen("scores") in (wanted(range(20)), wanted(range(ROWS))), f"at line {at}"
        append(rows(100))
        gm.deliver(sinks["second"], address, **how)
        assert gm.deliver(sinks["second"], address, **how).generation == 2
        assert shop.seen("scores") == {**wanted(range(ROWS)), **theirs(100)}, f"at line {at}"
        assert count() == ROWS + 1, f"at line {at}"


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_new_columns(shop: shops.Shop, out: str, tmp_path: Path, mode: str) -> None:
    """Are added on request, and null in the rows that were there."""
    address = shop.address("scores")
    gm.deliver(out, address, mode="append", key="id")
    (tmp_path / "more").mkdir()
    write(tmp_path / "more" / "in", ROWS, ROWS + 2)
    made = gm.sink(str(tmp_path / "more" / "out"), keep="id")
    gm.Job(str(tmp_path / "more" / "in"), gm.model(more, returns=MORE), made, workers=0).run()
    with pytest.raises(gm.BadJob, match="has no column 'odd', which the result has"):
        gm.deliver(str(tmp_path / "more" / "out"), address, mode=mode, key="id")
    gm.deliver(str(tmp_path / "more" / "out"), address, mode=mode, key="id", evolve=True)
    found = shop.seen("scores")
    assert [found[ROWS + n]["odd"] for n in (0, 1)] == [[{"a": "ü"}], [{"a": "ü"}]]
    assert found.keys() == set(range(ROWS + 2)) and found[0] == {**wanted([0])[0], "odd": None}


MORE = {"y": "float64", "label": "string", "odd": pa.list_(pa.struct([("a", pa.string())]))}


def more(batch: dict[str, Any]) -> dict[str, Any]:
    """What `scored` gives, and a column of lists."""
    return {"y": batch["x"], "label": ["a"] * len(batch["x"]), "odd": [[{"a": "ü"}]] * len(batch["x"])}


def test_delivered_again_after_others_took_its_place(shop: shops.Shop, out: str, tmp_path: Path) -> None:
    """The same generation of a sink, once that of another has replaced it: with files of its own."""
    made = gm.to(shop.address("scores"), key="id")
    gm.deliver(out, made)
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / "in", 0, 5)
    job(tmp_path / "other", 5).run()
    gm.deliver(str(tmp_path / "other" / "out"), made)
    assert shop.seen("scores") == wanted(range(5), 5)
    gm.deliver(out, made)
    assert shop.seen("scores") == wanted(range(ROWS))


@pytest.mark.few(2)
def test_a_table_that_was_restored(shop: shops.Shop, out: str, tmp_path: Path) -> None:
    """To an earlier delivery: `verify` and `lookup` say which rows are there, and the next command brings the others;
    also after others have written to it.
    """
    made = gm.to(shop.address("scores"), mode="append", key="id")
    gm.deliver(out, made)
    write(tmp_path / "in", ROWS, ROWS + 10)
    nightly = job(tmp_path, on_new_files="append", deliver=[made])
    nightly.run()
    for others in (False, True):
        restore(shop, tmp_path)
        if others:
            appender(shop, tmp_path)(rows(1000))
        verdict = gm.verify(nightly)
        assert not verdict.ok and "holds generation 1, and 2 was delivered last" in verdict.lines[-1]
        with gm.lookup(made) as lookup:
            assert lookup.generation == 1 and lookup.get(ROWS) is None
        assert nightly.run().state == "nothing to do" and gm.verify(nightly).ok
        assert nightly.run().state == "nothing to do"
        assert shop.seen("scores") == {**wanted(range(ROWS + 10)), **(theirs(1000) if others else {})}
        assert count_of(shop, tmp_path) == ROWS + 10 + others


def test_a_table_that_was_restored_to_a_time_before_deliveries(shop: shops.Shop, out: str, tmp_path: Path) -> None:
    """Has none of their rows, which come again, beside those of others."""
    appender(shop, tmp_path)(rows(1000))
    made = gm.to(shop.address("scores"), mode="append", key="id")
    gm.deliver(out, made)
    restore(shop, tmp_path)
    assert shop.seen("scores") == theirs(1000)
    assert "has no rows of this sink: deliver it again" in gm.verify(job(tmp_path, deliver=[made])).lines[-1]
    gm.deliver(out, made)
    assert shop.seen("scores") == {**wanted(range(ROWS)), **theirs(1000)} and count_of(shop, tmp_path) == ROWS + 1


def restore(shop: shops.Shop, folder: Path) -> None:
    """Make the first state of the table the newest one, as an operator does."""
    if shop.name == "delta":
        from deltalake import DeltaTable

        DeltaTable(str(folder / "scores")).restore(0)
    elif shop.name == "iceberg":
        table = iceberg_table(folder)
        table.manage_snapshots().rollback_to_snapshot(table.metadata.snapshots[0].snapshot_id).commit()
    else:
        import lancedb

        table = lancedb.connect(str(folder / "lancedb")).open_table("scores")
        table.checkout(1)
        table.restore()


def count_of(shop: shops.Shop, folder: Path) -> int:
    """The rows of the table, with any that repeat."""
    if shop.name == "delta":
        from deltalake import DeltaTable

        return int(DeltaTable(str(folder / "scores")).to_pyarrow_table().num_rows)
    if shop.name == "iceberg":
        return int(iceberg_table(folder).scan().count())
    import lancedb

    return int(lancedb.connect(str(folder / "lancedb")).open_table("scores").count_rows())


def test_refused(shop: shops.Shop, out: str, tmp_path: Path) -> None:
    """Indices, and addresses that name no table."""
    with pytest.raises(gm.BadJob, match=r"index: deliveries to .* make none"):
        gm.deliver(out, shop.address("scores"), key="id", index={"label": "btree"})
    wrong = {
        "delta": (f"delta://{tmp_path}/scores#table", "a Delta table is a folder: leave out #table"),
        "iceberg": ("iceberg://shop", "name a catalog and a table: iceberg://CATALOG/namespace.table"),
        "lance": (f"lance://{tmp_path}/none/lancedb#scores", "there is no folder .*none: make it"),
    }[shop.name]
    with pytest.raises(gm.BadJob, match=wrong[1]):
        gm.deliver(out, wrong[0])


def test_many_keys(shop: shops.Shop, tmp_path: Path) -> None:
    """More keys than are asked for one by one, and keys of several columns."""
    write(tmp_path / "in", 0, 3000)
    gm.Job(
        str(tmp_path / "in"), gm.model(named, returns={"name": "string", "x": "float64"}),
        gm.sink(str(tmp_path / "out"), keep="id"), workers=0, deliver=[gm.to(shop.address("scores"), key="id")],
    ).run()  # fmt: skip
    with gm.lookup(shop.address("scores")) as lookup:
        found = lookup.get_many(range(2990, 1490, -1))
        assert [row["id"] for row in found] == list(range(2990, 1490, -1)) and found[0]["x"] == 2990 / 4
        assert lookup.get_many([*range(5000, 6500)]) == [None] * 1500
    with gm.lookup(shop.address("scores"), key=["name", "id"]) as lookup:
        assert lookup.get(("it's 7", 7))["x"] == 7 / 4
        assert lookup.get(("it's 7", 8)) is None
    with gm.lookup(shop.address("scores"), key="x") as lookup:
        assert lookup.get(0.25)["id"] == 1


def named(batch: dict[str, Any]) -> dict[str, Any]:
    """A text for each row, with a quote."""
    return {"name": [f"it's {int(4 * x)}" for x in batch["x"]], "x": batch["x"]}


# ---------------------------------------------------------------- Delta


def delta(tmp_path: Path, **options: Any) -> Any:
    """The table."""
    from deltalake import DeltaTable

    return DeltaTable(str(tmp_path / "scores"), **options)


def test_delta_files_by_their_statistics(out: str, tmp_path: Path) -> None:
    """Readers leave out files that cannot have a row; the history names what each commit brought."""
    gm.deliver(out, f"delta://{tmp_path}/scores", key="id")
    table = delta(tmp_path)
    assert len(table.file_uris()) == 2
    assert len(table.file_uris(file_pruning_predicate="id = 25")) == 1
    assert len(table.file_uris(file_pruning_predicate="y > 7.6")) == 1
    assert table.to_pyarrow_table(filters=[("label", "=", "n1"), ("y", ">", 9.0)]).num_rows == 3
    (mark,) = json.loads(table.history(1)[0]["gristmill"])
    assert (mark["generation"], mark["rows"], mark["key"]) == (1, ROWS, ["id"])
    gm.deliver(again(tmp_path, 2), f"delta://{tmp_path}/scores", key="id")
    assert delta(tmp_path).version() == 1
    assert delta(tmp_path, version=0).to_pyarrow_table().num_rows == ROWS  # as long as nobody cleans up
    delta(tmp_path).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True)
    assert delta(tmp_path).to_pyarrow_table().num_rows == ROWS
    assert gm.deliver(out, f"delta://{tmp_path}/scores", key="id").generation == 2


ODD = {
    "text": ["ü" * 40, "a" * 33, None, "\U0010ffff" * 33],
    "long text": ["ü" * 40, "a" * 5000, None, "b"],
    "truth": [True, False, None, True],
    "real": [1.5, float("-inf"), None, float("inf")],
    "no number": [float("nan"), float("nan"), None, float("nan")],
    "day": pa.array([0, 1, None, 20000], pa.date32()),
    "zoned": pa.array([1, 2_000_001, None, -1], pa.timestamp("us", "UTC")),
    "naive": pa.array([1, 2_000_001, None, -1], pa.timestamp("us")),
    "money": pa.array([1, -2, None, 3], pa.decimal128(9, 2)),
    "record": pa.array([{"a": 1}, {"a": None}, None, {"a": 7}], pa.struct([("a", pa.int64())])),
    "list": [[1], [], None, [2, 3]],
    "bytes": [b"a", b"", None, b"\xff"],
    "nothing": pa.nulls(4, pa.int64()),
    "great": pa.array([10**29 + 1, 0, None, 1], pa.decimal128(30, 0)),
    "fine": pa.array([decimal.Decimal("12345678901234567890.1234"), None, 0, 1], pa.decimal128(30, 4)),
}


@pytest.mark.parametrize("column", [*ODD, "all"])
def test_delta_statistics_of_odd_values(tmp_path: Path, column: str) -> None:
    """Whatever a column holds, a reader that asks by it, or by another, finds what is there."""
    import pyarrow.compute as pc

    some = ODD if column == "all" else {column: ODD[column]}
    given = pa.table({"id": pa.array(range(4), pa.int64()), **some})
    gm.Job(
        given, gm.model(same, batch_format="arrow"), str(tmp_path / "out"), workers=0, on_nan="keep",
        deliver=f"delta://{tmp_path}/scores",
    ).run()  # fmt: skip
    found = delta(tmp_path).to_pyarrow_dataset()
    for name in (n for n in given.column_names if n not in ("record", "list", "no number")):
        for value in given.column(name):
            asked_for = pc.field(name) == value if value.is_valid else pc.field(name).is_null()
            alike = pc.sum(pc.fill_null(pc.equal(given.column(name), value), False)).as_py() if value.is_valid else 0
            assert found.to_table(filter=asked_for).num_rows == (alike or given.column(name).null_count), (name, value)
    count = delta(tmp_path).to_pyarrow_table(filters=[("id", ">=", 1)]).num_rows
    assert count == 3


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows as they are."""
    return batch


def test_delta_that_has_forgotten_its_commits(out: str, tmp_path: Path) -> None:
    """Appended rows do not come twice, whether the log or our file of marks is lost."""
    from deltalake import write_deltalake

    address = f"delta://{tmp_path}/scores"
    gm.deliver(out, address, mode="append", key="id")
    (marks,) = (tmp_path / "scores" / "_gristmill").glob(MARKS)
    marks.rename(tmp_path / "kept")
    assert gm.deliver(out, address, mode="append", key="id").rows == ROWS  # from the history
    (tmp_path / "kept").rename(marks)
    write_deltalake(tmp_path / "scores", rows(100), mode="append")
    delta(tmp_path).create_checkpoint()
    for commit in sorted((tmp_path / "scores" / "_delta_log").glob("*.json"))[:-1]:
        commit.unlink()
    gm.deliver(out, address, mode="append", key="id")
    assert delta(tmp_path).to_pyarrow_table().num_rows == ROWS + 1
    marks.unlink()
    for mode in ("append", "upsert"):
        with pytest.raises(gm.BadJob, match=r"_gristmill/\w+\.json is missing there.* or once with mode replace"):
            gm.deliver(out, address, mode=mode, key="id")
    gm.deliver(out, address, key="id")
    assert delta(tmp_path).to_pyarrow_table().num_rows == ROWS


def test_delta_that_is_another_table_of_the_same_version(out: str, tmp_path: Path) -> None:
    """While it is open: the marks are those of the table that is there."""
    from deltalake import write_deltalake

    address = f"delta://{tmp_path}/scores"
    gm.deliver(out, address, key="id")
    store = deliveries.opened(gm.to(address, key="id"))
    sink = identity(out, LOCAL).name
    found, version = store.live(sink), delta(tmp_path).version()
    shutil.rmtree(tmp_path / "scores")
    for number in range(version + 1):
        write_deltalake(tmp_path / "scores", rows(number), mode="append")
    assert found is not None and delta(tmp_path).version() == version and store.live(sink) is None
    store.close()


def test_delta_marks_of_long_ago_go(out: str, tmp_path: Path) -> None:
    """With a later delivery; those that hold, and those that somebody may be about to commit, stay."""
    address, marks = f"delta://{tmp_path}/scores", tmp_path / "scores" / "_gristmill"
    gm.deliver(out, address, key="id")
    (old,) = marks.glob(MARKS)
    files = old.with_suffix(".files.json")
    gm.deliver(again(tmp_path, 2), address, key="id")
    assert len(list(marks.glob(MARKS))) == 2 and files.exists()
    for path in (old, files):
        os.utime(path, (1, 1))
    gm.deliver(again(tmp_path, 3), address, key="id")
    assert len(list(marks.glob(MARKS))) == 2 and not old.exists() and not files.exists()


@pytest.mark.parametrize("mode", ["replace", "append", "upsert"])
def test_delta_that_asks_more_of_its_writers(out: str, tmp_path: Path, mode: str) -> None:
    """A table with partitions and a constraint: rows are written as it asks, or refused in its words."""
    from deltalake import DeltaTable, write_deltalake

    old = rows(100)
    write_deltalake(tmp_path / "scores", old, partition_by=["label"])
    delta(tmp_path).alter.add_constraint({"small": "y < 1000"})
    gm.deliver(out, f"delta://{tmp_path}/scores", mode=mode, key="id")
    found = {row["id"]: row for row in delta(tmp_path).to_pyarrow_table().to_pylist()}
    assert found == {**wanted(range(ROWS)), **({} if mode == "replace" else theirs(100))}
    assert delta(tmp_path).metadata().partition_columns == ["label"]
    assert len(DeltaTable(str(tmp_path / "scores")).partitions()) == (1 if mode == "replace" else 2)
    result = again(tmp_path, 1000)
    with pytest.raises(gm.BadJob, match=r"Delta Lake says: .*failed validation check"):
        gm.deliver(result, f"delta://{tmp_path}/scores", mode=mode, key="id")
    assert {row["id"]: row for row in delta(tmp_path).to_pyarrow_table().to_pylist()} == found


@pytest.mark.parametrize(
    "said", [{"delta.columnMapping.mode": "name"}, {"delta.enableDeletionVectors": "true"}], ids=["names", "deletions"]
)
def test_delta_that_asks_more_of_its_readers(out: str, said: dict[str, str], tmp_path: Path) -> None:
    """Rows are found that its files alone do not tell of, by keys of each kind, ours and those of others."""
    from deltalake import write_deltalake

    write_deltalake(tmp_path / "scores", rows(1, 99), configuration=said)
    address = f"delta://{tmp_path}/scores"
    gm.deliver(out, address, mode="upsert", key="id")
    with gm.lookup(address) as lookup:
        assert lookup.get_many([1, 99, 100]) == [wanted([1])[1], theirs(99)[99], None]
    with gm.lookup(address, key=("label", "y")) as lookup:
        assert lookup.get(("n1", 0.75)) == wanted([3])[3]


@pytest.mark.parametrize("said", [{"mode": "replace"}, {"mode": "upsert", "delete": True}], ids=["replace", "delete"])
def test_delta_from_which_no_row_goes(said: dict[str, Any], tmp_path: Path) -> None:
    """Takes rows that are new; what would remove others is refused before a row is scored, or with exit 2."""
    from deltalake import write_deltalake

    write_deltalake(tmp_path / "scores", rows(99), configuration={"delta.appendOnly": "true"})
    write(tmp_path / "in", 0, ROWS)
    address = f"delta://{tmp_path}/scores"
    with pytest.raises(gm.BadJob, match=r"rows never go \(delta.appendOnly\): use mode append"):
        job(tmp_path, deliver=[gm.to(address, key="id", **said)]).run()
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    upsert = gm.to(address, mode="upsert", key="id")
    job(tmp_path, deliver=[upsert]).run()
    with pytest.raises(gm.BadJob, match="append-only"):
        gm.deliver(again(tmp_path, 2), upsert)
    with gm.lookup(address, key="id") as lookup:
        assert lookup.get_many([3, 99]) == [wanted([3])[3], theirs(99)[99]]


def test_delta_folder_of_something_else(out: str, tmp_path: Path) -> None:
    """A folder of files that is no table stays as it is."""
    shutil.copytree(out, tmp_path / "files")
    with pytest.raises(gm.BadJob, match="is a folder with other files in it, and no Delta table"):
        gm.deliver(out, f"delta://{tmp_path}/files")
    assert not (tmp_path / "files" / "_delta_log").exists()


# ---------------------------------------------------------------- Iceberg


@pytest.mark.parametrize("mode", ["replace", "append"])
def test_iceberg_with_partitions(out: str, tmp_path: Path, mode: str) -> None:
    """Rows are divided as the table asks, in one commit; an upsert is refused before anything happens."""
    from pyiceberg.transforms import IdentityTransform

    with shops.iceberg("", tmp_path) as shop:
        table = iceberg_catalog(tmp_path).create_table(("nights", "scores"), rows(100).schema)
        with table.update_spec() as spec:
            spec.add_field("label", IdentityTransform(), "label")
        table.append(rows(100))
        gm.deliver(out, shop.address("scores"), mode=mode, key="id")
        assert shop.seen("scores") == {**wanted(range(ROWS)), **({} if mode == "replace" else theirs(100))}
        partitions = {file["label"] for file in iceberg_table(tmp_path).inspect.partitions()["partition"].to_pylist()}
        assert partitions == {"n1", *([] if mode == "replace" else ["theirs"])}
        with pytest.raises(gm.BadJob, match="is partitioned, and an upsert does not know how"):
            gm.deliver(out, shop.address("scores"), mode="upsert", key="id")


@pytest.mark.parametrize("form", ["1", "2"])
def test_iceberg_that_has_forgotten_its_snapshots(out: str, form: str, tmp_path: Path) -> None:
    """Appended rows do not come twice after others have written, and what came before has expired."""
    with shops.iceberg("", tmp_path) as shop:
        properties = {"format-version": form}
        iceberg_catalog(tmp_path).create_table(("nights", "scores"), rows(99).schema, properties=properties)
        to = gm.to(shop.address("scores"), mode="append", key="id")
        theirs_now: list[int] = []
        for night in range(3):
            if night:
                write(tmp_path / "in", ROWS + night, ROWS + night + 1)
                job(tmp_path, on_new_files="append").run()
            for number in (98, 99):
                appender(shop, tmp_path)(rows(number * 100 + night))
                theirs_now.append(number * 100 + night)
                table = iceberg_table(tmp_path)
                expired = [
                    s.snapshot_id
                    for s in table.metadata.snapshots
                    if s.snapshot_id != table.current_snapshot().snapshot_id
                ]
                table.maintenance.expire_snapshots().by_ids(expired).commit()
                gm.deliver(out, to)
                nights = wanted([*range(ROWS), *(ROWS + n + 1 for n in range(night))])
                assert shop.seen("scores") == {**nights, **theirs(*theirs_now)}
                assert count_of(shop, tmp_path) == len(nights) + len(theirs_now)


@pytest.mark.parametrize("form", ["1", "2"])
@pytest.mark.few(1)
def test_iceberg_that_was_rolled_back_to_a_snapshot_without_a_past(out: str, form: str, tmp_path: Path) -> None:
    """To one of others between two deliveries: the rows of the first are there, and those of the second come again."""
    with shops.iceberg("", tmp_path) as shop:
        properties = {"format-version": form}
        iceberg_catalog(tmp_path).create_table(("nights", "scores"), rows(99).schema, properties=properties)
        to = gm.to(shop.address("scores"), mode="append", key="id")
        gm.deliver(out, to)
        known = ROWS
        for night in range(3):
            appender(shop, tmp_path)(rows(1000 + night))
            table = iceberg_table(tmp_path)
            between = table.current_snapshot().snapshot_id
            gone = [s.snapshot_id for s in table.metadata.snapshots if s.snapshot_id != between]
            table.maintenance.expire_snapshots().by_ids(gone).commit()
            for _ in range(2):
                write(tmp_path / "in", known, known + 1)
                known += 1
                job(tmp_path, on_new_files="append").run()
                gm.deliver(out, to)
            iceberg_table(tmp_path).manage_snapshots().rollback_to_snapshot(between).commit()
            gm.deliver(out, to)
            gm.deliver(out, to)
            assert shop.seen("scores") == {**wanted(range(known)), **theirs(*range(1000, 1001 + night))}
            assert count_of(shop, tmp_path) == known + night + 1
            assert len(json.loads(iceberg_table(tmp_path).properties["gristmill.after"])) == 2


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("gone", ["renamed", "dropped"])
def test_iceberg_column_whose_name_comes_again(out: str, gone: str, mode: str, tmp_path: Path) -> None:
    """Values of earlier rows do not come back in it: refused, but by a replace, after which there are none."""
    with shops.iceberg("", tmp_path) as shop:
        address = shop.address("scores")
        gm.deliver(out, address, mode=mode, key="id")
        with iceberg_table(tmp_path).update_schema(allow_incompatible_changes=True) as columns:
            columns.rename_column("label", "old") if gone == "renamed" else columns.delete_column("label")
        before = shop.seen("scores")
        result = again(tmp_path, 2)
        with pytest.raises(gm.BadJob, match="column 'label' was there and has been renamed or dropped: added anew"):
            gm.deliver(result, gm.to(address, mode=mode, key="id", evolve=True))
        assert shop.seen("scores") == before
        gm.deliver(result, gm.to(address, key="id", evolve=True))
        old = {"old": None} if gone == "renamed" else {}
        assert shop.seen("scores") == {i: {**row, **old} for i, row in wanted(range(ROWS), 2).items()}


def test_iceberg_snapshots_name_their_generation(out: str, tmp_path: Path) -> None:
    """In their summary; one snapshot a delivery, and the one before can be read on."""
    with shops.iceberg("", tmp_path) as shop:
        gm.deliver(out, shop.address("scores"), key="id")
        gm.deliver(again(tmp_path, 2), shop.address("scores"), key="id")
        found = iceberg_table(tmp_path)
        assert [s.summary["gristmill.generation"] for s in found.snapshots()] == ["1", "2"]
        assert found.scan(snapshot_id=found.snapshots()[0].snapshot_id).to_arrow().num_rows == ROWS
        assert "commit.retry.num-retries" not in found.properties


def test_iceberg_namespace_that_is_not_there(out: str, tmp_path: Path) -> None:
    """Is told with the way out."""
    with shops.iceberg("", tmp_path) as shop, pytest.raises(gm.BadJob, match="there is no namespace days: make it"):
        gm.deliver(out, shop.address("scores").replace("nights.", "days."))


# ---------------------------------------------------------------- Lance


def test_lance_indices_stay(tmp_path: Path) -> None:
    """Of columns and of vectors, and they find the new rows and none of the old ones."""
    import lance
    import numpy as np

    def vectors(batch: dict[str, Any], seed: int) -> dict[str, Any]:
        made = np.random.default_rng(seed).normal(size=(len(batch["id"]), 8)).astype("f4")
        return {"id": batch["id"], "night": np.full(len(made), seed), "v": made}

    write(tmp_path / "in", 0, 600)
    path = tmp_path / "db" / "scores.lance"
    to = gm.to(f"lance://{tmp_path}/db#scores", key="id")

    def run(seed: int) -> None:
        made = gm.model(vectors, seed=seed)
        gm.Job(str(tmp_path / "in"), made, str(tmp_path / "out"), workers=0, deliver=[to]).run(restart=True)

    run(1)
    table = lance.dataset(path)
    assert pa.types.is_fixed_size_list(table.schema.field("v").type)
    table.create_scalar_index("id", "BTREE")
    table.create_index("v", "IVF_FLAT", num_partitions=2)
    run(2)
    table = lance.dataset(path)
    assert {index.name for index in table.describe_indices()} == {"id_idx", "v_idx"}
    assert all(index.num_rows_indexed == 600 for index in table.describe_indices())
    assert table.to_table(filter="id = 77")["night"].to_pylist() == [2]
    query = table.to_table(filter="id = 5")["v"][0].values.to_numpy()
    near = table.to_table(nearest={"column": "v", "q": query, "k": 3, "nprobes": 2})
    assert near["id"][0].as_py() == 5 and set(near["night"].to_pylist()) == {2}
    gm.deliver(str(tmp_path / "out"), to)
    table.optimize.compact_files()
    table.cleanup_old_versions(older_than=datetime.timedelta(0), delete_unverified=True)
    version = lance.dataset(path).version
    gm.deliver(str(tmp_path / "out"), to)
    assert lance.dataset(path).version == version


def test_lance_upserts_with_delete_keep_columns_of_others(out: str, tmp_path: Path) -> None:
    """In rows that stay; rows of other keys go, and an index is of the rows that are there."""
    import lance

    (tmp_path / "lancedb").mkdir()
    path, to = tmp_path / "lancedb" / "scores.lance", f"lance://{tmp_path}/lancedb#scores"
    gm.deliver(out, to)
    lance.write_dataset(rows(100), path, mode="append")
    lance.dataset(path).create_scalar_index("id", "BTREE")
    lance.dataset(path).add_columns({"note": "'of ' || cast(id AS string)"})
    write(tmp_path / "in", 0, ROWS - 5)
    gm.deliver(again(tmp_path, 2), to, mode="upsert", key="id", delete=True)
    table = lance.dataset(path)
    assert {row["id"]: row for row in table.to_table().to_pylist()} == {
        i: {**row, "note": f"of {i}"} for i, row in wanted(range(ROWS - 5), 2).items()
    }
    assert table.to_table(filter="id = 7")["note"].to_pylist() == ["of 7"]
    (index,) = table.describe_indices()
    assert index.num_rows_indexed == ROWS - 5


@pytest.mark.parametrize("mode", ["append", "upsert", "replace"])
def test_lance_that_was_compacted_with_its_indices(out: str, mode: str, tmp_path: Path) -> None:
    """Nights go on, rows are found, and what was delivered is known."""
    import lance

    with shops.lance("", tmp_path) as shop:
        path = tmp_path / "lancedb" / "scores.lance"
        path.parent.mkdir()
        to = gm.to(shop.address("scores"), mode=mode, key="id")
        for first in (100, 200, 300):
            lance.write_dataset(rows(*range(first, first + 50)), path, mode="append")
        lance.dataset(path).create_scalar_index("id", "BTREE")
        gm.deliver(out, to)
        before = shop.seen("scores")
        lance.dataset(path).delete("id = 310 OR id = 0")
        lance.write_dataset(rows(0), path, mode="append")  # somebody's change, in a fragment of its own
        metrics = lance.dataset(path).optimize.compact_files()
        assert metrics.fragments_removed > 1
        gm.deliver(out, to)
        assert shop.seen("scores") == {i: row for i, row in {**(before or {}), **theirs(0)}.items() if i != 310}
        again(tmp_path, 2)
        gm.deliver(out, to)
        with gm.lookup(shop.address("scores")) as lookup:
            kept = {} if mode == "replace" else theirs(110)
            assert lookup.get(110) == kept.get(110)
            assert mode == "append" or lookup.get(3) == wanted([3], 2)[3]


def test_lance_that_has_forgotten_its_commits(out: str, tmp_path: Path) -> None:
    """Appended rows do not come twice after others have written, compacted and cleaned up."""
    import lance

    with shops.lance("", tmp_path) as shop:
        path = tmp_path / "lancedb" / "scores.lance"
        path.parent.mkdir()
        lance.write_dataset(rows(99).add_column(1, "more", pa.array([1])), path)
        lance.dataset(path).drop_columns(["more"])  # the numbers of columns have a gap then
        gm.deliver(out, shop.address("scores"), mode="append", key="id")
        write(tmp_path / "in", ROWS, ROWS + 5)
        job(tmp_path, on_new_files="append").run()
        gm.deliver(out, shop.address("scores"), mode="append", key="id")
        lance.write_dataset(rows(100), path, mode="append")
        table = lance.dataset(path)
        table.optimize.compact_files()
        table.cleanup_old_versions(older_than=datetime.timedelta(0), delete_unverified=True)
        assert len(lance.dataset(path).versions()) == 1
        gm.deliver(out, shop.address("scores"), mode="append", key="id")
        assert shop.seen("scores") == {**wanted(range(ROWS + 5)), **theirs(99, 100)}
        assert lance.dataset(path).count_rows() == ROWS + 7


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", ["append", "upsert", "replace"])
def test_lance_with_an_old_version_that_is_kept(out: str, mode: Any, tmp_path: Path) -> None:
    """By a tag, while somebody replaced the table and cleaned up: its marks are not those of what is there now, and its
    files stay.
    """
    import lance

    with shops.lance("", tmp_path) as shop:
        path = tmp_path / "lancedb" / "scores.lance"
        to = gm.to(shop.address("scores"), mode=mode, key="id")
        gm.deliver(out, to)
        lance.dataset(path).tags.create("kept", lance.dataset(path).version)
        write(tmp_path / "in", ROWS, ROWS + 5)
        job(tmp_path, on_new_files="append", deliver=[to]).run()
        others = range(1000, 1000 + 2 * ROWS)
        lance.write_dataset(rows(*others), path, mode="overwrite")
        lance.dataset(path).cleanup_old_versions(datetime.timedelta(0), error_if_tagged_old_versions=False)
        assert len(lance.dataset(path).versions()) == 2
        for _ in range(2):
            gm.deliver(out, to)
            assert shop.seen("scores") == {**wanted(range(ROWS + 5)), **({} if mode == "replace" else theirs(*others))}
        assert lance.dataset(path).count_rows() == ROWS + 5 + (0 if mode == "replace" else len(others))
        kept = lance.dataset(path, version="kept").to_table().to_pylist()
        assert {row["id"]: row for row in kept} == wanted(range(ROWS))

"""Rows of a sink by key, with an index that stands beside its parts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from decimal import Decimal as D
from pathlib import Path
from typing import Any

import harmed
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apart import Apart

import gristmill as gm
from gristmill import aio
from gristmill.arrow.topython import to_rows
from gristmill.cli.app import main
from gristmill.cli.execute import print_rows
from gristmill.commit import publication
from gristmill.errors import RunFailed
from gristmill.observe.tables import of_arrow
from gristmill.stores import sinkindex, sinkrows
from s3server import S3Server

ROWS = 40


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """A number for each row."""
    return {"y": batch["x"] * 2}


def vectors(batch: dict[str, Any]) -> dict[str, Any]:
    """A vector for each row."""
    return {"v": np.stack([batch["x"], batch["x"]], axis=1).astype(np.float32)}


def tripled(batch: dict[str, Any]) -> dict[str, Any]:
    """Another number for each row."""
    return {"y": batch["x"] * 3}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with rows in it."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("in")
    written("in/a.parquet", range(ROWS))
    return tmp_path


def written(path: str, ids: Any, factor: float = 0.25) -> None:
    """A file of rows with these ids."""
    numbers = np.array(list(ids))
    names = [f"straße {n} 🙂" if n % 7 else None for n in numbers.tolist()]
    pq.write_table(pa.table({"id": numbers, "x": numbers * factor, "n": numbers % 4, "name": names}), path)


def run(fn: Any = doubled, index: Any = "id", sink: str = "out", keep: Any = ("id",), **options: Any) -> Any:
    """The rows scored, with an index."""
    verbs = {name: options.pop(name) for name in ("append", "restart") if name in options}
    target = gm.sink(sink, keep=keep, index=index, **options)
    return gm.Job("in/", fn, target, workers=0, shard_rows=10).run(**verbs)


def receipts(sink: str = "out") -> dict[str, bytes]:
    """What says which rows were scored: a shard that is scored again has another."""
    return {path.name: path.read_bytes() for path in Path(sink).glob("_gristmill/g*/receipts/*")}


def index_files(sink: str = "out") -> list[str]:
    """Names of its index files."""
    return sorted(os.listdir(f"{sink}/_index")) if os.path.isdir(f"{sink}/_index") else []


def test_found_by_the_index(capsys: pytest.CaptureFixture[str]) -> None:
    """In Python and on the command line; a key that is not there is told; the index is a file of the result."""
    run()
    with gm.lookup("out") as scores:
        assert scores.get(3) == {"id": 3, "y": 1.5}
        assert scores.get(ROWS) is None and scores.get(None) is None
        last = {"id": 39, "y": 19.5}
        assert scores.get_many([39, 7, 39, -1]) == [last, {"id": 7, "y": 3.5}, last, None]
        assert scores.get_many([]) == [] and scores.generation == 1
        with pytest.raises(gm.BadJob, match="column 'id' is int64, and a key is not"):
            scores.get("four")
    assert len(index_files()) == 1
    assert main(["lookup", "out", "5", "99"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out) == {"id": 5, "y": 2.5} and "has no row for 99" in said.err
    assert gm.verify("out", deep=True).ok
    assert not [name for name in os.listdir("out") if not name.startswith(("part-", "_"))]


@pytest.mark.parametrize(
    ("by", "options", "key", "row"),
    [
        ("row", {"row_id": "row"}, None, 17),
        ("name", {}, "straße 17 🙂", 17),
        (["n", "name"], {"row_id": "row", "key": ["id"]}, (1, "straße 17 🙂"), 17),
        ("y", {}, None, None),
        ("nothing", {}, None, None),
    ],
)
def test_by_any_columns(by: Any, options: dict[str, Any], key: Any, row: int | None) -> None:
    """Of texts or whole numbers, one or several, the row id among them; of others and of none an error tells."""
    keep = ["id", "name", "n"]
    if row is None:
        wrong = "index: key column 'y' is double" if by == "y" else "index names column 'nothing'"
        with pytest.raises(gm.BadJob, match=wrong):
            run(index=by, keep=keep, **options)
        return
    run(index=by, keep=keep, **options)
    whole = {r["id"]: r for r in gm.read("out").to_table().to_pylist()}
    with gm.lookup("out") as scores:
        assert scores.get(key or whole[row]["row"]) == whole[row]
        keys = [r["row"] if by == "row" else r["name"] if by == "name" else (r["n"], r["name"]) for r in whole.values()]
        named = [None if r["name"] is None else r for r in whole.values()]
        found = scores.get_many(keys)
        assert (found if by == "row" else [r and (r if r["name"] else None) for r in found]) == (
            [*whole.values()] if by == "row" else named
        )


@pytest.mark.parametrize("index", ["id", ()])
def test_values_that_python_does_not_have(index: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Times with nanoseconds and beyond year 9999 are found by and given as they are, and shown."""

    def counts(kind: pa.DataType, *values: int) -> pa.Array:
        return pa.array(values, pa.int64() if kind.bit_width == 64 else pa.int32()).view(kind)

    kinds = {"tod": pa.time64("ns"), "at": pa.timestamp("us", "UTC"), "day": pa.date32(), "took": pa.duration("s")}
    columns = {name: counts(kind, 1, 2, 10**6 * 4, 1001) for name, kind in kinds.items()}
    columns["took"], columns["at"] = (counts(kinds[n], 1, 2, 3, 2**60) for n in ("took", "at"))
    nested = pa.StructArray.from_arrays([columns["tod"], columns["day"]], ["tod", "day"])
    pq.write_table(pa.table({"id": range(4), "x": [0.0] * 4, **columns, "nested": nested}), "in/a.parquet")
    run(index=index, keep=["id", *columns, "nested"])
    expected = to_rows(gm.read("out").to_table())
    assert expected[3]["tod"] == np.timedelta64(1001, "ns") and expected[2]["nested"]["day"] == expected[2]["day"]
    with gm.lookup("out", key="id") as scores:
        assert scores.get(3) == expected[3]
        assert scores.get_many([2, 0, 3]) == [expected[n] for n in (2, 0, 3)]
    for name in columns:
        with gm.lookup("out", key=name) as scores:
            assert scores.get_many([row[name] for row in expected]) == expected, name
            arrow = columns[name][3]
            assert scores.get(arrow) == expected[3], name
    assert main(["lookup", "out", "3", "--key", "id"]) == 0 and '"tod": "1001 nanoseconds"' in capsys.readouterr().out
    assert gm.prove("out", {"id": 2}, key="id").row == expected[2]
    for shown in (print_rows, lambda table: of_arrow(table).show(sys.stdout)):
        shown(gm.read("out").to_table(columns=["day"]))
        assert str(expected[2]["day"]) in capsys.readouterr().out


@pytest.mark.parametrize("form", ["jsonl", "jsonl.zst", "partitioned", "merged", "one file"])
def test_every_form_of_rows(form: str) -> None:
    """Files of lines, folders of a column's values, and one file are looked up alike."""
    sink = "out.parquet" if form == "one file" else "out"
    options: dict[str, Any] = {
        "jsonl": {"format": "jsonl"},
        "jsonl.zst": {"format": "jsonl", "options": {"compression": "zstd"}},
        "partitioned": {"partition_by": ["n"]},
        "merged": {"merge": True},
        "one file": {},
    }[form]
    run(sink=sink, keep=["id", "n"], **options)
    with gm.lookup(sink) as scores:
        assert scores.get_many(range(ROWS)) == [{"id": n, "n": n % 4, "y": n * 0.5} for n in range(ROWS)]
    assert gm.verify(sink, deep=True).ok


def test_vectors_have_none() -> None:
    """An npy sink holds no rows: the job is refused before anything is scored."""
    with pytest.raises(gm.BadJob, match="index is for files of rows"):
        run(vectors, format="npy")


def test_appended_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An append indexes its own rows; a key that is there already is told, and its last row is found. Many index files
    become one.
    """
    monkeypatch.setattr(sinkindex, "FEW", 3)
    run()
    scores = gm.lookup("out")
    assert scores.get(41) is None
    counts = []
    for night in range(1, 5):
        written(f"in/b{night}.parquet", [0, ROWS + night], factor=float(night))
        if night == 1:
            with pytest.warns(gm.GristmillWarning, match="index by id: 1 row has the key of another"):
                report = run(append=True)
        else:
            with pytest.warns(gm.GristmillWarning):
                report = run(append=True)
        assert report.rows_in == ROWS + 2 * night
        counts.append(len(index_files()))
        assert scores.generation == night + 1
        new = {"id": ROWS + night, "y": 2.0 * night * (ROWS + night)}
        assert scores.get_many([0, 39, ROWS + night])[1:] == [{"id": 39, "y": 19.5}, new]
        assert gm.verify("out", deep=True).ok
    assert counts == [2, 3, 1, 2]
    written("in/z.parquet", [0, 0, 0], factor=1.0)  # all are 0, so is their score
    with pytest.warns(gm.GristmillWarning, match="3 rows have the key of another"):
        run(append=True)


def test_the_last_of_repeated_keys() -> None:
    """As the scan does that there is without an index."""
    pq.write_table(pa.table({"id": [1, 2, 1, 1], "x": [1.0, 2.0, 3.0, 4.0], "n": [0] * 4}), "in/a.parquet")
    with pytest.warns(gm.GristmillWarning, match="index by id: 2 rows have the key of another"):
        run()
    assert gm.lookup("out").get_many([1, 2]) == gm.lookup("out", key=["id"]).get_many([1, 2])
    assert gm.lookup("out").get(1)["y"] == 8.0
    run(index="n", sink="other", keep=["id", "n"])
    assert gm.lookup("other").get(0) == {"id": 1, "n": 0, "y": 8.0}
    with pytest.raises(gm.BadSource, match="several rows have id = 1"):
        gm.lookup("other", key="id").get(1)


def test_one_hash_of_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are compared, not only their hashes."""

    def few(keys: pa.Array) -> np.ndarray:
        return np.array([len(key or b"") for key in keys.to_pylist()], np.uint64)

    monkeypatch.setattr(sinkindex, "hashed", few)
    monkeypatch.setattr(sinkrows, "hashed", few)
    with pytest.warns(gm.GristmillWarning):
        run()
    with gm.lookup("out") as scores:
        assert scores.get_many([*range(ROWS), 98]) == [*({"id": n, "y": n * 0.5} for n in range(ROWS)), None]


def test_hashes_of_texts_of_any_length() -> None:
    """Equal for equal bytes wherever they stand, others for others."""
    texts = [b"", b"\0", b"\0\0", b"a", b"ab", b"abcdefgh", b"abcdefgh\0", b"abcdefghi", b"x" * 100, b"x" * 101]
    together = sinkindex.hashed(pa.array(texts, pa.binary()))
    assert len(set(together.tolist())) == len(texts)
    assert together.tolist() == [int(sinkindex.hashed(pa.array([t], pa.binary()))[0]) for t in texts]
    assert sinkindex.hashed(pa.array([b"zz", *texts], pa.binary()).slice(1)).tolist() == together.tolist()


def test_an_index_for_a_result_that_stands() -> None:
    """The same job with an index scores nothing again; other columns take the place of the first; without, it stays."""
    run(index=())
    scored = receipts()
    assert not index_files()
    reader = gm.lookup("out", key="id")
    assert reader.get(4) == {"id": 4, "y": 2.0}
    run()
    (first,) = index_files()
    assert gm.lookup("out").get(4) == {"id": 4, "y": 2.0} == reader.get(4)
    run()
    assert index_files() == [first]
    run(index=())
    assert index_files() == [first] and receipts() == scored
    with pytest.raises(gm.BadJob, match="index names column 'name'"):
        run(index="name")
    assert gm.lookup("out").get(4) == {"id": 4, "y": 2.0} and gm.verify("out", deep=True).ok


def test_another_index_in_its_place() -> None:
    """The file of the first is gone, and readers by its key go on by reading the parts."""
    run(keep=["id", "name"])
    (first,) = index_files()
    reader = gm.lookup("out")
    assert reader.get(4)["y"] == 2.0
    run(index="name", keep=["id", "name"])
    assert first not in index_files() and len(index_files()) == 1
    assert gm.lookup("out").get("straße 4 🙂")["id"] == 4
    assert gm.lookup("out", key="id").get(4)["y"] == 2.0
    assert gm.verify("out", deep=True).ok


def test_rows_that_are_retried() -> None:
    """A retried dead letter is found once it is scored."""

    def job() -> gm.Job:
        model = gm.model(Picky, path=str(Path("fixed").absolute()))
        target = gm.sink("out", keep=["id"], index="id")
        return gm.Job("in/", model, target, workers=0, shard_rows=10, gates={"min_ok": 0.5})

    job().run()
    scores = gm.lookup("out")
    assert scores.get(7) is None and scores.get(8) is not None
    Path("fixed").touch()
    gm.retry_dead(job(), accept_code_change=True)
    assert scores.get(7) == {"id": 7, "y": 3.5} and gm.verify("out", deep=True).ok


class Picky:
    """Fails at 7 until a file is there."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A number for each row."""
        if 7 in batch["id"] and not os.path.exists(self.path):
            raise ValueError("no sevens")
        return {"y": batch["x"] * 2}


@pytest.mark.long
@pytest.mark.parametrize("how", [{}, {"merge": True}, {"files": 1}, {"partition_by": ["half"]}], ids=str)
def test_rows_that_are_retried_are_of_their_own_nights(how: dict[str, Any]) -> None:
    """Of several with one key the latest night's counts: for a lookup with the index and without it, and in stores;
    though one retry scores dead rows of several nights, whose files are joined.
    """
    Path("nights").mkdir()

    def night(number: int, rows: dict[int, float], *deliver: gm.Delivery) -> gm.Job:
        table = pa.table({"id": pa.array(rows, pa.int64()), "x": pa.array(rows.values(), pa.float64())})
        pq.write_table(table, f"nights/{number}.parquet")
        model = gm.model(below_zero, fixed=str(Path("fixed").absolute()), returns=OF_NIGHTS)
        target = gm.sink("out", keep=["id"], index="id", **how)
        options = {"on_new_files": "append", "gates": {"min_ok": 0.1}, "workers": 0, "shard_rows": 3}
        return gm.Job("nights/", model, target, deliver=list(deliver), **options)

    def check(wanted: dict[int, float]) -> None:
        stores = ["duckdb://s.duckdb#t", "lmdb://s.lmdb", "sqlite://s.sqlite#t"]
        for to in stores:
            gm.deliver("out", to, key="id")
        for lookup in (gm.lookup("out"), gm.lookup("out", key="same"), *map(gm.lookup, stores)):
            with lookup:
                found = lookup.get_many(list(wanted))
                assert [row and row["y"] for row in found] == list(wanted.values())
        assert gm.verify("out", deep=True).ok

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gm.GristmillWarning)
        night(1, {0: -10, 1: 11, 2: -12, 4: 14, 5: -15}).run()
        night(2, {0: 20, 1: -21, 2: -22, 3: -23}).run()
        last = night(3, {3: 33, 4: -34})
        last.run()
        check({0: 20, 1: 11, 2: None, 3: 33, 4: 14, 5: None})
        Path("fixed").touch()
        gm.retry_dead(last, accept_code_change=True)
        check({0: 20, 1: -21, 2: -22, 3: 33, 4: -34, 5: -15})
        night(4, {2: 42}).run()
        check({0: 20, 1: -21, 2: 42, 3: 33, 4: -34, 5: -15})


def below_zero(batch: dict[str, Any], fixed: str) -> dict[str, Any]:
    """A number for each row; those below zero are refused until a file is there."""
    if (batch["x"] < 0).any() and not Path(fixed).exists():
        raise ValueError("below zero")
    return {"y": batch["x"], "half": batch["id"] % 2, "same": batch["id"]}


OF_NIGHTS = {"y": "float64", "half": "int64", "same": "int64"}


def test_harm_is_named_and_made_good() -> None:
    """verify names an index file that changed or is gone; the next run makes one that is lost again."""
    run()
    (name,) = index_files()
    path = f"out/_index/{name}"
    whole = Path(path).read_bytes()
    with open(path, "r+b") as file:
        file.seek(200)
        file.write(b"\xff")
    found = gm.verify("out")
    assert not found.ok and any(f"_index/{name}: content changed" in line for line in found.lines)
    shutil.copy(path, "kept")
    for lost in (path, *Path("out/_gristmill").rglob(f"{name}*.tmp")):
        os.remove(lost)
    found = gm.verify("out")
    assert not found.ok and any(f"_index/{name}: missing" in line for line in found.lines)
    with pytest.raises(gm.BadSource, match="an index is made again by the next run of the job"):
        gm.lookup("out").get(3)
    scored = receipts()
    run()
    assert receipts() == scored and Path(path).read_bytes() == whole
    assert gm.lookup("out").get(3) == {"id": 3, "y": 1.5} and gm.verify("out", deep=True).ok


def test_rows_that_are_damaged_are_not_put_down_to_room(tmp_path: Path) -> None:
    """What reads the keys fails within DuckDB, which sorts them."""

    def keys() -> Iterator[pa.RecordBatch]:
        raise pa.ArrowInvalid("not a Parquet file")
        yield

    with (tmp_path / "index").open("wb") as out, pytest.raises(RunFailed, match=r"be read: not a Parquet file: grist"):
        sinkindex.write(keys(), out)


def test_one_of_several_index_files_is_lost() -> None:
    """It is told as one alone is, and the next run that asks for an index makes all of it again."""
    run()
    written("in/b.parquet", [ROWS], factor=1.0)
    run(append=True)
    for lost in Path("out").rglob(f"{index_files()[0].partition('.')[0]}*"):
        os.remove(lost)
    with pytest.raises(gm.BadSource, match="a file of the result is gone"):
        gm.lookup("out").get(3)
    run()
    assert gm.lookup("out").get_many([3, ROWS]) == [{"id": 3, "y": 1.5}, {"id": ROWS, "y": 80.0}]
    assert gm.verify("out", deep=True).ok and len(index_files()) == 1


@pytest.mark.long
def test_a_reader_sees_one_result_at_a_time() -> None:
    """While results are replaced many times, all rows of an answer are of one."""
    run()
    ended, seen, wrong = threading.Event(), set(), []

    def reading() -> None:
        with gm.lookup("out") as scores:
            while not ended.is_set():
                factors = {row["y"] / row["id"] if row else None for row in scores.get_many(range(1, ROWS))}
                seen.update(factors)
                if len(factors) != 1:
                    wrong.append(factors)

    readers = [threading.Thread(target=reading) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for night in range(6):
            run(tripled if night % 2 == 0 else doubled, restart=True)
    finally:
        ended.set()
        for reader in readers:
            reader.join()
    assert not wrong and seen == {0.5, 0.75}


def test_another_sink_in_its_place() -> None:
    """A reader notices that a folder was removed and made anew."""
    run()
    scores = gm.lookup("out")
    assert scores.get(4) == {"id": 4, "y": 2.0}
    shutil.rmtree("out")
    run(tripled)
    shutil.rmtree("out/_gristmill/published")  # so that nothing but _SUCCESS tells
    scores._reader._result.looked -= 60  # type: ignore[attr-defined]
    assert scores.get(4) == {"id": 4, "y": 3.0}


def test_without_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are read through; for many, one warning names the way out."""
    run(index=(), keep=["id", "name"])
    gm.lookup("out", key="id").get(3)
    monkeypatch.setattr(sinkrows, "QUICK", ROWS - 1)
    with gm.lookup("out", key="id") as scores:
        with pytest.warns(gm.GristmillWarning, match=r"no index, .* --index id \(index=\['id'\]\) makes one"):
            assert scores.get(3)["y"] == 1.5
        assert scores.get(4)["y"] == 2.0
    with pytest.raises(gm.BadJob, match="say by which columns to look up"):
        gm.lookup("out").get(3)
    run(index="name", keep=["id", "name"])
    with pytest.warns(gm.GristmillWarning, match="its index is by name"):
        gm.lookup("out", key="id").get(3)


def test_for_coroutines() -> None:
    """The same from `aio`."""

    async def asked() -> list[Any]:
        async with aio.lookup("out") as scores:
            return await asyncio.gather(*(scores.get(n) for n in range(ROWS + 1)))

    run()
    assert asyncio.run(asked()) == [*({"id": n, "y": n * 0.5} for n in range(ROWS)), None]


def test_in_an_object_store(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is there, too, and the next result is found when it is time to look."""
    storage = server.storage()
    target = gm.sink("s3://box/indexed", keep=["id"], index="id", storage=storage)
    for fn in (doubled, tripled):
        gm.Job("in/", fn, target, workers=0, shard_rows=10).run(restart=fn is tripled)
        if fn is doubled:
            scores = gm.lookup("s3://box/indexed", storage=storage)
            assert scores.get_many([3, 99]) == [{"id": 3, "y": 1.5}, None]
    monkeypatch.setattr(sinkrows, "LOOKED", 0)
    assert scores.get(4) == {"id": 4, "y": 3.0}
    assert gm.verify("s3://box/indexed", storage=storage).ok


def scored(folder: str, sink: str, at: int | None) -> None:
    """The job in a folder, killed before line number `at` of the code that makes and publishes an index."""
    os.chdir(folder)
    with harmed.killed_at(at, "stores/sinkindex.py", "driver/indexing.py", "commit/publish.py"):
        run()


@pytest.mark.parametrize("standing", [False, True])
@pytest.mark.few(1)
def test_killed_while_it_is_made(apart: Apart, folder: Path, standing: bool) -> None:
    """At any step; readers find the rows of before, or all, and the same command finishes it without scoring."""

    def begun(sink: str) -> None:
        if standing:
            run(index=(), sink=sink)

    begun("whole")
    whole = apart.run("test_sink_index:scored", folder=str(folder), sink="whole", at=None)
    assert whole.code == 0, whole.printed
    lines = int(whole.printed.rpartition("lines ")[2])
    for at in range(3, lines, lines // 8):
        sink = f"out{at}"
        begun(sink)
        ended = apart.run("test_sink_index:scored", folder=str(folder), sink=sink, at=at)
        assert ended.code == -9 or int(ended.printed.rpartition("lines ")[2]) < at, ended.printed
        before = receipts(sink)
        if standing:
            assert gm.lookup(sink, key="id").get(5) == {"id": 5, "y": 2.5}
        run(sink=sink)
        assert before.items() <= receipts(sink).items() and len(index_files(sink)) == 1
        with gm.lookup(sink) as scores:
            assert scores.get_many([5, ROWS]) == [{"id": 5, "y": 2.5}, None]
        assert gm.verify(sink, deep=True).ok


@pytest.mark.parametrize(
    ("by", "narrow", "wide"),
    [
        (["n", "k"], pa.array([1, 2], pa.int32()), pa.array([2**40], pa.int64())),
        ("k", pa.array([D("1.20"), D("2.00")], pa.decimal128(6, 2)), pa.array([D("1.2345")], pa.decimal128(10, 4))),
        ("k", pa.array([0, 1000], pa.timestamp("ms")), pa.array([5], pa.timestamp("us"))),
    ],
    ids=["whole numbers of several columns", "decimals", "times"],
)
def test_a_key_column_that_becomes_wider(by: Any, narrow: pa.Array, wide: pa.Array) -> None:
    """Rows from before an append that widens a key column are found by the index, as their keys are now; verify knows
    an index that was made of keys of other types, which is not used and made anew.
    """
    shutil.rmtree("in")
    os.mkdir("in")
    for name, keys in (("a", narrow), ("b", wide)):
        count = len(keys)
        pq.write_table(pa.table({"k": keys, "n": pa.array([7] * count), "x": np.arange(count)}), f"in/{name}.parquet")
        run(index=by, keep=["k", "n"], evolve=True, append=name == "b")
        if name == "a":
            old = json.loads(Path("out/_SUCCESS").read_text())["index"]
    rows = gm.read("out").to_table().to_pylist()
    assert len(rows) == 3 and gm.verify("out", deep=True).ok

    def found() -> Any:
        with gm.lookup("out") as there:
            return there.get_many([(r["n"], r["k"]) if isinstance(by, list) else r["k"] for r in rows])

    assert found() == rows
    now = json.loads(Path("out/_SUCCESS").read_text())["index"]
    assert old["types"] != now["types"] and len(now["files"]) == 1
    result = publication.published("out")
    assert result.body.index is not None
    publication.again(result, dataclasses.replace(result.body.index, types=tuple(old["types"])))
    assert found() == rows
    assert "_index: has the keys as" in " ".join(gm.verify("out").lines)
    assert run(index=by, keep=["k", "n"], evolve=True).state == "nothing to do"
    assert gm.verify("out", deep=True).ok and found() == rows


def test_an_index_of_other_rows_is_known_without_reading_them() -> None:
    """By a plain verify, from what its receipt says; the next run makes it anew."""
    run()
    result = publication.published("out")
    assert result.body.index is not None
    strange = dataclasses.replace(result.body.index.files[0], shard=7)
    publication.again(result, dataclasses.replace(result.body.index, files=(strange,)))
    assert "was made of other rows" in " ".join(gm.verify("out").lines)
    assert run().state == "nothing to do" and gm.verify("out", deep=True).ok

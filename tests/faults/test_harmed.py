"""Sinks that were copied, or whose records were damaged: what readers, verify and the next command make of them."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.errors import BadJob, BadSource, GateFailed, RunFailed
from gristmill.files.lease import Lease
from gristmill.process.locks import LockFile


def tens(rows: list[dict[str, Any]]) -> list[Any]:
    """Ten times the id; rows that are marked as bad fail unless a file says that they are mended."""
    return [ValueError("bad") if r["bad"] and not os.path.exists("mended") else {"y": 10 * r["id"]} for r in rows]


def vectors(rows: list[dict[str, Any]]) -> list[Any]:
    """A vector, or null for rows that are marked as bad."""
    return [{"v": None if r["bad"] else [float(r["id"]), 1.0]} for r in rows]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    return tmp_path


def add(name: str, ids: range, bad: Any = lambda i: False, **columns: pa.Array) -> None:
    """A file of the source."""
    table = pa.table({"id": list(ids), "bad": [bad(i) for i in ids], **columns})
    pq.write_table(table, f"in/{name}.parquet")


def job(sink: Any = "out", fn: Any = tens, **options: Any) -> gm.Job:
    """All rows, in this process."""
    sink = sink if not isinstance(sink, str) else gm.sink(sink, keep=["id"])
    options = {"gates": {"min_ok": 0.0}, "workers": 0, **options}
    return gm.Job("in/*.parquet", gm.model(fn, batch_format="rows"), sink, **options)


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_copy_is_verified_as_it_is_read(format: str) -> None:
    """A copy has no links: what gm.read opens is another file than the one with the visible name."""
    add("a", range(20))
    job(gm.sink("out", keep=["id"], format=format)).run()
    shutil.copytree("out", "copy")
    assert gm.verify("copy", deep=True).ok
    (work,) = Path("copy/_gristmill").glob("g*/work/part-*")
    assert work.stat().st_ino != next(Path("copy").glob("part-*")).stat().st_ino
    data = bytearray(work.read_bytes())
    data[len(data) // 2] ^= 1
    work.write_bytes(data)
    verdict = gm.verify("copy")
    assert not verdict.ok
    assert "gm.read opens this file instead of part-" in verdict.lines[0]
    assert gm.verify("out", deep=True).ok


@pytest.mark.parametrize("damage", [b"", b"\0" * 200, b'{"of": ["', b"[]", b'{"of": 3, "sha256": "x", "stamps": []}'])
def test_a_damaged_note_of_a_one_file_sink(damage: bytes) -> None:
    """The file counts as anybody's, and --overwrite makes it the sink's again."""
    add("a", range(20))
    sink = gm.sink("out.parquet", keep=["id"])
    job(sink).run()
    Path(".out.parquet.gristmill/_gristmill/onefile.json").write_bytes(damage)
    assert not gm.verify("out.parquet").ok
    with pytest.raises(BadJob, match="--overwrite"):
        job(sink).run()
    with pytest.raises(BadJob, match="--overwrite"):
        job(sink).run(restart=True)
    again = gm.sink("out.parquet", keep=["id"], overwrite=True)
    job(again).run()
    assert gm.verify("out.parquet").ok
    job(sink).run()
    assert pq.read_table("out.parquet")["y"].to_pylist() == [10 * i for i in range(20)]


def test_accepted_is_what_there_was_to_look_at() -> None:
    """Files that came later are appended by the same command, with the gates."""
    options: dict[str, Any] = {"gates": {"min_ok": 0.9}, "on_new_files": "append"}
    add("1", range(20), lambda i: i < 4)
    with pytest.raises(GateFailed):
        job(**options).run()
    add("2", range(100, 140), lambda i: True)
    with pytest.raises(GateFailed, match="40 rows"):
        job(**options).run(accept=True)
    assert sorted(gm.read("out").to_table()["id"].to_pylist()) == list(range(4, 20))
    assert job(**options).run(accept=True).rows_dead == 44  # now there was
    Path("mended").touch()
    assert gm.retry_dead(job(**options)).rows_ok == 60


def test_a_lease_that_cannot_be_written_is_not_held(folder: Path) -> None:
    """Also while somebody keeps the exception, as an interactive session does."""
    os.symlink("/dev/full", folder / "lock")
    with pytest.raises(OSError) as kept:
        Lease("out", str(folder)).__enter__()
    assert kept.value.__traceback__ is not None
    with LockFile(str(folder / "lock"), "a+") as file:
        file.lock()


@pytest.mark.parametrize("evolve", [False, True])
@pytest.mark.parametrize("verb", ["append", "retry"])
def test_added_rows_of_which_the_first_have_no_vector(verb: str, evolve: bool) -> None:
    """They are dead letters, as they are behind others: the result says what the column holds."""
    add("1", range(10), lambda i: i == 3)
    sink = gm.sink("out", keep=["id"], format="npy", evolve=evolve)
    job(sink, vectors).run()
    if verb == "append":
        add("2", range(100, 190), lambda i: i < 164)
        report = job(sink, vectors).run(append=True)
    else:
        report = gm.retry_dead(job(sink, vectors))
    assert (report.rows_ok, report.rows_dead) == ((9 + 26, 1 + 64) if verb == "append" else (9, 1))
    assert gm.verify("out", deep=True).ok


def test_a_record_of_a_publication_that_is_lost() -> None:
    """What it showed and the next result does not is removed all the same, by the receipts."""
    add("a", range(13), lambda i: i % 5 == 2)
    job().run()
    record = Path("out/_gristmill/published/0000001.json")
    data = record.read_bytes()
    record.unlink()
    record.write_bytes(data[:100])
    Path("mended").touch()
    assert gm.retry_dead(job()).rows_dead == 0
    assert gm.verify("out", deep=True).ok, gm.verify("out").lines
    assert sorted(gm.read("out").to_table()["id"].to_pylist()) == list(range(13))


KEYS = {
    "date32": (pa.date32(), datetime.date(2026, 1, 1)),
    "timestamp": (pa.timestamp("us"), datetime.datetime(2026, 1, 1)),
    "zone": (pa.timestamp("us", "UTC"), datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)),
    "time": (pa.time64("us"), datetime.time(1, 2)),
    "int": (pa.int8(), 7),
    "text": (pa.string(), "a"),
    "bool": (pa.bool_(), True),
    "float": (pa.float32(), 1.5),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KEYS)
def test_partitions_of_a_shard_without_rows(kind: str) -> None:
    """Whatever the type of the key, a shard of which every row is dead, or filtered, ends no run."""
    columns = {"key": pa.array([KEYS[kind][1]] * 100, KEYS[kind][0])}
    add("a", range(100), lambda i: 50 <= i < 55, **columns)
    sink = gm.sink("out", keep=["id"], partition_by=["key"])
    assert job(sink, shard_rows=5).run().rows_dead == 5
    assert gm.retry_dead(job(sink, shard_rows=5)).rows_dead == 5
    source = gm.source("in/*.parquet", where="id >= 50")
    sink = gm.sink("other", keep=["id"], partition_by=["key"])
    options: dict[str, Any] = {"workers": 0, "shard_rows": 5, "gates": {"min_ok": 0.0}}
    assert gm.Job(source, gm.model(tens, batch_format="rows"), sink, **options).run().rows_ok == 45


def test_a_time_that_the_type_of_other_files_does_not_hold() -> None:
    """The error names the column, both types, and what to do."""
    for name, year, unit in (("1", 2020, "ns"), ("2", 1000, "us")):
        add(name, range(1), t=pa.array([datetime.datetime(year, 1, 1)], pa.timestamp(unit)))
    with pytest.raises(RunFailed, match=r"column 't' \(timestamp\[us\] here, timestamp\[ns\] with .* one type\)"):
        job(gm.sink("out", keep=["id", "t"])).run()


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_last_record_that_became_longer(form: str) -> None:
    """It ends where the file ends, not where it ended when it was planned; records after it are no change."""
    shutil.rmtree("in")
    whole = {"csv": ["id,bad\n", "10,\n", "11,"], "jsonl": ['{"id": 10, "bad": ""}\n', '{"id": 11, "bad": ""}']}[form]
    path = Path(f"in.{form}")
    path.write_text("".join(whole))
    gm.apply(str(path), "out", fn=tens, batch_format="rows", keep=["id"], workers=0)
    assert gm.verify("out", source=True).ok
    with path.open("a") as file:
        file.write({"csv": "\n12,\n", "jsonl": '\n{"id": 12, "bad": ""}\n'}[form])
    assert gm.verify("out", source=True).ok
    path.write_text("".join(whole) + {"csv": "7\n", "jsonl": " 7\n"}[form])
    verdict = gm.verify("out", source=True)
    assert not verdict.ok
    assert any("in." in line for line in verdict.lines)


@pytest.fixture
def put_back(folder: Path) -> str:
    """A part that was damaged in place, so under both its names, and then put back, as rsync and mv do."""
    add("a", range(20))
    job(update=True).run()
    (part,) = Path("out").glob("part-*")
    whole = part.read_bytes()
    other = pq.read_table(part)
    pq.write_table(other.set_column(1, "y", pa.array([999] * 20)), "other.parquet")
    part.write_bytes(Path("other.parquet").read_bytes())
    assert part.stat().st_size != len(whole)
    with pytest.raises(BadSource, match=r"has [0-9,]+ of its [0-9,]+ bytes: put it back"):
        gm.read("out")
    Path("back").write_bytes(whole)
    os.replace("back", part)
    return part.name


def test_a_part_that_was_put_back_is_what_is_read(folder: Path, put_back: str) -> None:
    """Not its second name, which still is the damaged file; verify says that this can go."""
    assert gm.read("out").to_table()["y"].to_pylist() == [10 * i for i in range(20)]
    verdict = gm.verify("out", deep=True)
    assert verdict.ok
    (told,) = [line for line in verdict.lines if f"a damaged copy of {put_back}" in line]
    assert told.endswith("remove it")
    gm.deliver("out", f"sqlite://{folder}/to.db#t")
    with contextlib.closing(sqlite3.connect("to.db")) as db:
        assert db.execute("select sum(y) from t").fetchone() == (1900,)
    Path("out", told.partition(":")[0]).unlink()
    assert not any("copy" in line for line in gm.verify("out").lines)


def test_a_damaged_copy_as_long_as_it_was_is_not_delivered(folder: Path) -> None:
    """Deliveries hash a work file that is not the visible one; verify says which of both is whole."""
    add("a", range(20))
    job().run()
    (part,), (work,) = Path("out").glob("part-*"), Path("out/_gristmill").glob("g*/work/part-*")
    whole = part.read_bytes()
    part.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    Path("back").write_bytes(whole)
    os.replace("back", part)
    with pytest.raises(RunFailed, match=r"a damaged copy of part-.*remove the copy"):
        gm.deliver("out", f"sqlite://{folder}/to.db#t")
    assert f"remove it, {part.name} is as it was published)" in gm.verify("out").lines[0]
    work.unlink()
    assert gm.deliver("out", f"sqlite://{folder}/to.db#t").rows == 20


@pytest.mark.parametrize("taken_over", ["whole", "in part"])
@pytest.mark.parametrize("removed", [False, True])
def test_an_update_after_a_flipped_bit(folder: Path, taken_over: str, removed: bool) -> None:
    """The part that was put back is what it keeps, of shards as a whole and of single rows, whether the damaged copy is
    there or was removed meanwhile.
    """
    add("a", range(20))
    job(update=True).run()
    (part,), (work,) = Path("out").glob("part-*"), Path("out/_gristmill").glob("g*/work/part-*")
    whole = part.read_bytes()
    part.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    Path("back").write_bytes(whole)
    os.replace("back", part)
    if removed:
        work.unlink()
    if taken_over == "whole":
        add("b", range(20, 30))
    else:
        add("a", range(21))
    job(update=True).run()
    count = 30 if taken_over == "whole" else 21
    assert sorted(gm.read("out").to_table()["y"].to_pylist()) == [10 * i for i in range(count)]
    assert gm.verify("out", deep=True).ok


def test_status_tells_of_parts_that_are_gone() -> None:
    """It stats them, and says what puts them back."""
    add("a", range(20))
    job().run()
    assert "harmed" not in gm.status("out")
    (part,) = Path("out").glob("part-*")
    part.unlink()
    now = gm.status("out")
    assert now["harmed"] == [part.name]
    assert now["standing"]["words"] == "published, but not all of it is there"
    assert "run the job again" in now["standing"]["way"]["text"]
    job().run()
    assert gm.status("out")["standing"]["words"] == "done and published"


def test_status_tells_of_a_one_file_sink_that_is_gone() -> None:
    """Though all its parts are there; the next run makes it of them."""
    add("a", range(20))
    job("one.parquet").run()
    assert "harmed" not in gm.status("one.parquet")
    Path("one.parquet").unlink()
    assert gm.status("one.parquet")["harmed"] == ["one.parquet"]
    job("one.parquet").run()
    assert pq.read_table("one.parquet").num_rows == 20
    assert gm.status("one.parquet")["standing"]["words"] == "done and published"


def test_an_update_takes_over_the_part_that_was_put_back(folder: Path, put_back: str) -> None:
    """Shards of unchanged files get second names of the visible file, not of its damaged copy."""
    add("b", range(20, 30))
    job(update=True).run()
    assert sorted(gm.read("out").to_table()["y"].to_pylist()) == [10 * i for i in range(30)]
    assert gm.verify("out", deep=True).ok


@pytest.mark.parametrize("put_back", [False, True])
def test_a_page_with_a_flipped_bit_is_not_read(folder: Path, put_back: bool) -> None:
    """Readers know by its checksum, and say which file it is in; so do deliveries. What was put back is read."""
    add("a", range(2000))
    job().run()
    (part,) = Path("out").glob("part-*")
    whole = part.read_bytes()
    column = pq.read_metadata(part).row_group(0).column(1)
    at = column.data_page_offset + column.total_compressed_size - 10
    part.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    (work,) = Path("out/_gristmill").glob("g*/work/part-*")
    told = rf"{part.name}: is not what was published: put it back, or"
    if put_back:
        Path("back").write_bytes(whole)
        os.replace("back", part)
        told = rf"{work.name}: is not what was published, but a damaged copy of {part.name}, which is: remove"
    for read in (
        lambda d: d.to_table(),
        lambda d: list(d.to_batches()),
        lambda d: d.filter(pc.field("id") > 3).to_table(),
    ):
        with pytest.raises(BadSource, match=told):
            read(gm.read("out"))
    with pytest.raises(RunFailed, match=told):
        gm.deliver("out", f"sqlite://{folder}/to.db#t")
    Path("back").write_bytes(whole)
    os.replace("back", part)
    work.unlink()
    assert gm.read("out").to_table()["y"].to_pylist() == [10 * i for i in range(2000)]
    assert gm.deliver("out", f"sqlite://{folder}/to.db#t").rows == 2000


def test_a_question_that_cannot_be_answered_reads_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter that fails is the asker's: hashing all files would not tell why."""
    add("a", range(20))
    job().run()
    rows = gm.read("out")
    monkeypatch.setattr(rows, "harmed", lambda: pytest.fail("files were read"))
    with pytest.raises(pa.ArrowInvalid, match="nothing"):
        rows.to_table(filter=pc.field("nothing") > 3)
    with pytest.raises(pa.ArrowInvalid, match="nothing"):
        list(rows.to_batches(filter=pc.field("nothing") > 3))


def test_damage_that_no_format_shows_is_not_delivered(folder: Path) -> None:
    """JSON Lines have no checksums: a delivery hashes what it is to bring."""
    add("a", range(20))
    job(gm.sink("out", keep=["id"], format="jsonl")).run()
    (part,) = Path("out").glob("part-*")
    part.write_bytes(part.read_bytes().replace(b"190", b"191"))
    with pytest.raises(RunFailed, match=rf"{part.name}: is not what was published: put it back, or"):
        gm.deliver("out", f"sqlite://{folder}/to.db#t")


def flip(path: Path, at: bytes) -> None:
    """Change a bit of the last place where these bytes are."""
    data = bytearray(path.read_bytes())
    data[data.rindex(at)] ^= 1
    path.write_bytes(data)


def test_a_table_of_shards_that_are_taken_over_is_read_by_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of it made an update publish a shard twice, and another one not at all."""
    from gristmill.driver import keeping

    add("a", range(100))
    add("b", range(100, 200))
    options: dict[str, Any] = {"update": {"key": ["id"]}, "shard_rows": 20}
    job(**options).run()
    add("a", range(99))
    with monkeypatch.context() as killed, pytest.raises(ZeroDivisionError):
        killed.setattr(keeping, "adopt", lambda at: 1 / 0)
        job(**options).run()
    (table,) = Path("out/_gristmill").glob("g0002*/adopted-*.arrow")
    flip(table, (7).to_bytes(8, "little"))
    with pytest.raises(gm.CorruptStore, match=r"adopted-.*: missing or not what the plan says"):
        job(**options).run()
    flip(table, (6).to_bytes(8, "little"))
    job(**options).run()
    assert sorted(gm.read("out").to_table()["id"].to_pylist()) == [*range(99), *range(100, 200)]


def test_rows_of_a_retry_are_read_by_their_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged list of them had rows scored again that were published."""
    from gristmill.commit import receipt
    from gristmill.driver import retrydead

    add("a", range(20), lambda i: i in (3, 7))
    job().run()
    Path("mended").touch()
    with monkeypatch.context() as killed, pytest.raises(RunFailed, match="ZeroDivisionError"):
        killed.setattr(receipt, "commit", lambda *a: 1 / 0)
        gm.retry_dead(job())
    (table,) = Path("out/_gristmill").glob("g0002*/retried.arrow")
    flip(table, (7).to_bytes(8, "little"))
    retrydead._wanted.cache_clear()  # as in another process
    with pytest.raises(RunFailed, match=r"retried\.arrow: missing or not what the plan says"):
        gm.retry_dead(job())
    flip(table, (6).to_bytes(8, "little"))
    gm.retry_dead(job())
    assert sorted(gm.read("out").to_table()["id"].to_pylist()) == list(range(20))


def test_what_shards_inherit_is_read_by_its_digest(folder: Path) -> None:
    """Answers of other shards are not theirs."""
    from gristmill.commit import inherited
    from gristmill.commit.documents import TableRecord
    from gristmill.commit.generation import generations

    add("a", range(3))
    job().run()
    (made,) = generations(str(folder / "out"))
    Path(made.folder, "x.arrow").write_bytes(b"other bytes")
    with pytest.raises(gm.CorruptStore, match=r"x\.arrow: missing or not what the plan says"):
        inherited.read(made, {inherited.TABLE: TableRecord("x.arrow", "0" * 64)})

"""Which rows a store is taken to have, whatever happened to the sink's records, to the table, and to its address."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.files.disk import LOCAL
from gristmill.files.document import seal, unseal
from gristmill.job.delivery import same_table
from gristmill.job.snapshots import wanted
from gristmill.stores.contract import Mark, Place
from gristmill.stores.delivery import opened
from gristmill.stores.pgidentity import Identity, are_same
from gristmill.stores.results import identity
from gristmill.stores.sametable import is_read
from gristmill.stores.unmoved import both

ROWS = 10
CLAIMS = Path("out/_gristmill/generations")


def doubled(batch: dict[str, Any], times: int = 2) -> dict[str, Any]:
    """A number for each row."""
    return {"y": batch["id"] * times}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with rows in it."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"id": list(range(ROWS))}), "rows.parquet")
    return tmp_path


def job(*deliver: gm.Delivery, times: int = 2, sink: str = "out", **options: Any) -> gm.Job:
    """The rows, here."""
    model = gm.model(doubled, times=times, returns={"y": "int64"})
    return gm.Job("rows.parquet", model, gm.sink(sink, keep="id"), workers=0, deliver=list(deliver), **options)


def count(file: str, table: str = "scores") -> int:
    """How many rows are in a table of a SQLite file."""
    with closing(sqlite3.connect(file)) as db:
        return int(db.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0])


@pytest.mark.parametrize("what", ["damaged", "removed"])
def test_a_claim_that_is_lost_appends_nothing_twice(what: str) -> None:
    """That of a generation long replaced, by which stores know the sink: every later document repeats it."""
    made = job(gm.to("sqlite://s.sqlite#scores", mode="append"))
    made.run()
    made.run(restart=True)
    assert count("s.sqlite") == 2 * ROWS
    claim = CLAIMS / "0001.json"
    claim.unlink() if what == "removed" else claim.write_text("{")
    assert made.run().state == "nothing to do" and gm.verify("out").ok
    gm.deliver("out", "sqlite://s.sqlite#scores", mode="append")
    assert count("s.sqlite") == 2 * ROWS
    made.run(restart=True)
    assert count("s.sqlite") == 3 * ROWS


def test_a_sink_whose_name_in_stores_is_lost_appends_nothing() -> None:
    """One that an earlier version wrote, of which the first claim alone said it."""
    made = job(gm.to("sqlite://s.sqlite#scores", mode="append"))
    made.run()
    made.run(restart=True)
    for path in [Path("out/_SUCCESS"), *Path("out/_gristmill").glob("published/*"), *CLAIMS.glob("*")]:
        said = unseal(path.read_bytes(), str(path))
        assert said.pop("sink")
        path.write_bytes(seal(said))
    assert made.run().state == "nothing to do" and gm.verify("out").ok
    (CLAIMS / "0001.json").unlink()
    assert "which rows there are this sink's cannot be told" in gm.verify("out").lines[-1]
    with pytest.raises(gm.RunFailed, match=r"rows are not appended twice: restore _gristmill/generations/0001\.json"):
        made.run()
    assert count("s.sqlite") == 2 * ROWS


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("sqlite://s.sqlite#scores", "sqlite://s.sqlite#Scores"),
        ("duckdb://s.duckdb#scores", "duckdb://s.duckdb#SCORES"),
        ("duckdb://s.duckdb#scores", "duckdb://s.duckdb#Main.scores"),
        ("duckdb://s.duckdb#own.Scores", "duckdb://s.duckdb#OWN.scores"),
        ("postgres#aliased", "postgres#public.aliased"),
    ],
)
@pytest.mark.few(3)
def test_a_table_by_another_spelling_is_the_same_table(first: str, second: str, request: pytest.FixtureRequest) -> None:
    """Nothing is appended twice, and the rows are looked up by each."""
    if first.startswith("postgres"):
        server = request.getfixturevalue("postgres")
        first, second = (to.replace("postgres", server, 1) for to in (first, second))
    for to in (first, second, first):
        made = gm.to(to, mode="append", key="id")
        report = job(made).run()
        assert gm.verify(job(made)).ok and report.deliveries[0].rows == ROWS
        with gm.lookup(to) as lookup:
            assert lookup.get(3) == {"id": 3, "y": 6} and lookup.generation == 1
    job(gm.to(second, key="id")).run(restart=True)
    assert gm.verify(job(gm.to(second, key="id"))).ok  # which counts them


def test_a_name_without_a_schema_is_found_as_the_database_finds_it(postgres: str) -> None:
    """In a later schema of the search path, if it is there, and not made a second time in the first."""
    import psycopg

    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute("CREATE SCHEMA IF NOT EXISTS ahead")
        to = f"{postgres}{'&' if '?' in postgres else '?'}options=-csearch_path%3Dahead,public#found_late"
        job(gm.to(f"{postgres}#found_late", mode="append")).run()
        job(gm.to(to, mode="append")).run()
        assert db.execute("SELECT count(*) FROM public.found_late").fetchone() == (ROWS,)
        assert db.execute("SELECT to_regclass('ahead.found_late')").fetchone() == (None,)


EMBEDDED = {
    "sqlite": "s.sqlite#scores",
    "duckdb": "s.duckdb#scores",
    "lmdb": "s.lmdb",
    "delta": "lake",
    "lance": "lance#scores",
}
ODD_TO_ITS_LIBRARY = {"duckdb": "?", "delta": "%"}


@pytest.mark.parametrize("name", EMBEDDED)
def test_a_path_with_marks_of_addresses(name: str, folder: Path) -> None:
    """%25 is a percent sign, %23 a # and %3F a ?; addresses that are shown name the same place."""
    odd = "".join(mark for mark in "%20#? ü" if mark not in ODD_TO_ITS_LIBRARY.get(name, ""))
    at, quoted = folder / odd, odd.replace("%", "%25").replace("?", "%3F").replace("#", "%23")
    at.mkdir()
    to = f"{name}://{quoted}/{EMBEDDED[name]}"
    made = job(gm.to(to, key="id"))
    (receipt,) = made.run().deliveries
    assert made.run().deliveries[0].at == receipt.at
    assert gm.verify("out").ok  # which knows the address of the receipt alone
    assert gm.deliver("out", receipt.to, key="id").at == receipt.at
    with gm.lookup(receipt.to) as lookup:
        assert lookup.get(3) == {"id": 3, "y": 6}
    assert any(at.iterdir()) and not [p for p in folder.iterdir() if p.is_dir() and p.name not in ("out", odd)]
    if name != "lmdb" and name != "lance":  # read, as a source
        read = gm.Job(to, gm.model(doubled, returns={"y": "int64"}), gm.sink("read", keep="id"), workers=0)
        assert read.run().rows_ok == ROWS


@pytest.mark.parametrize("name", [*EMBEDDED, "usearch", "faiss"])
@pytest.mark.few(3)
def test_a_path_that_is_a_link(name: str, folder: Path) -> None:
    """It stays one: what it leads to is the store, by either name."""
    pq.write_table(pa.table({"id": [1, 2], "v": pa.array([[1, 0], [0, 1]], pa.list_(pa.float32(), 2))}), "rows.parquet")
    (folder / "data").mkdir()
    (folder / "links").mkdir()
    file, _, table = EMBEDDED.get(name, f"s.{name}").partition("#")
    at, link = (f"{name}://{place}/{file}{'#' * bool(table)}{table}" for place in ("data", "links"))
    for times, to in ((2, at), (3, link), (4, at), (5, link)):
        model = gm.model(doubled, times=times, returns={"y": "int64"})
        made = gm.to(to, key="id", mode="upsert")
        gm.Job("rows.parquet", model, gm.sink("out", keep=["id", "v"]), workers=0, deliver=made).run(restart=True)
        if times == 2:
            (folder / "links" / file).symlink_to(folder / "data" / file)
        for seen in (at, link):
            with gm.lookup(gm.to(seen, key="id")) as lookup:
                assert lookup.get(2)["y"] == 2 * times  # type: ignore[index]
    assert (folder / "links" / file).is_symlink() and [p.name for p in (folder / "links").iterdir()] == [file]


def test_a_link_that_leads_nowhere(folder: Path) -> None:
    """To a folder that is not there: told before anything is scored."""
    (folder / "s.lmdb").symlink_to(folder / "no" / "s.lmdb")
    with pytest.raises(gm.BadJob, match=r"there is no folder .*/no"):
        job(gm.to("lmdb://s.lmdb", key="id")).run()


@pytest.mark.parametrize(("read", "to"), [
    ("sqlite://s.sqlite#scores", "sqlite://./s.sqlite#Scores"),
    ("duckdb://s.duckdb#scores", "duckdb://s.duckdb#main.scores"),
    ("lake", "delta://lake"),
    ("lance://lance#scores", "lance://lance#scores"),
])  # fmt: skip
def test_the_table_that_the_job_reads(read: str, to: str) -> None:
    """Is not replaced by the result, which may lack rows and columns of it: refused, in a plan as well."""
    store = to.partition("://")[0]
    job(gm.to(read if "://" in read else to, key="id"), sink="before").run()

    def made(**options: Any) -> gm.Job:
        model = gm.model(doubled, times=3, returns={"y": "int64"})
        return gm.Job(read, model, gm.sink("out", keep="id"), workers=0, deliver=[gm.to(to, key="id", **options)])

    told = "is the table that the job reads, and {} would leave only .* use mode='upsert' with its key"
    for options, how in (({}, "mode replace"), ({"mode": "upsert", "delete": True}, "delete")):
        with pytest.raises(gm.BadJob, match=told.format(how)):
            made(**options).run()
        assert any("is the table that the job reads" in line for line in str(made(**options).plan()).splitlines())
        assert not Path("out/_SUCCESS").exists()
    made(mode="upsert").run()
    with gm.lookup(to) as lookup:
        assert lookup.get(3) == {"id": 3, "y": 9} and lookup.get(ROWS - 1) == {"id": ROWS - 1, "y": 3 * (ROWS - 1)}
    if store in ("sqlite", "duckdb"):  # another table there is none of its business
        gm.Job(read, made().spec.model, gm.sink("other", keep="id"), workers=0, deliver=f"{read}_too").run()


@pytest.mark.parametrize(("read", "to"), [
    ("sqlite://s.db#scores", "sqlite://link.db#scores"),
    ("sqlite://s.db#scores", "sqlite://hard.db#Scores"),
    ("sqlite://s.db#main.scores", "sqlite://hard.db#scores"),
    ("duckdb://s.db#scores", "duckdb://hard.db#main.Scores"),
    ("lance://lake#scores", "lance://linked#scores"),
    ("lance://lake#scores", "lance://lake/scores.lance"),
])  # fmt: skip
def test_the_table_that_the_job_reads_by_another_name_of_its_file(read: str, to: str, folder: Path) -> None:
    """Links, too, lead to what is read; a table beside it is another one."""
    store, at = read.partition("://")[0], read.replace("#main.", "#")
    job(gm.to(at, key="id"), sink="before").run()
    if Path("s.db").exists():
        os.symlink("s.db", "link.db")
        os.link("s.db", "hard.db")
    else:
        os.symlink("lake", "linked")

    def made(to: str) -> gm.Job:
        return gm.Job(read, gm.model(doubled, returns={"y": "int64"}), gm.sink("out", keep="id"), workers=0, deliver=to)

    with pytest.raises(gm.BadJob, match="is the table that the job reads"):
        made(to).run()
    assert made(f"{store}://{'lake' if store == 'lance' else 'hard.db'}#other").run().deliveries


def test_the_table_that_the_job_reads_in_postgres(postgres: str, database: Any, folder: Path) -> None:
    """Whatever schema is looked in, and however the server is called; capitals tell tables apart there."""
    database.execute("CREATE TABLE scores (id bigint, text text)")
    database.execute("INSERT INTO scores VALUES (1, 'a')")
    found, slash = f"{postgres}&options=-c%20search_path%3Darea", postgres.replace("?host=", "?host=/.") + "/"

    def made(read: str, to: str) -> gm.Job:
        model, sink = gm.model(doubled, returns={"y": "int64"}), gm.sink("out", keep="id")
        return gm.Job(read, model, sink, workers=0, deliver=gm.to(to, evolve=True))

    zone = f"{postgres}&options=-c%20search_path%3Darea%20-c%20timezone%3DAmerica/New_York"
    with pytest.raises(gm.BadJob, match="is the table that the job reads"):
        made(f"{zone}#scores", f"{found}#scores").run()
    for read, to in (("#scores", "#area.scores"), ("#area.scores", "#scores"), ("#scores", "#scores")):
        with pytest.raises(gm.BadJob, match="is the table that the job reads"):
            made(found + read, found + to).run()
    with pytest.raises(gm.BadJob, match="is the table that the job reads"):
        made(f"{postgres}#area.scores", f"{slash}#area.scores").run()
    assert "is the table that the job reads" in str(made(f"{found}#scores", f"{slash}#area.scores").plan())
    made(f"{found}#scores", f"{found}#Scores").run()
    assert database.execute('SELECT id, text, (SELECT count(*) FROM "Scores") FROM scores').fetchall() == [(1, "a", 1)]


def test_the_table_that_the_job_reads_in_iceberg(folder: Path) -> None:
    """By another name of its catalog it is the same; by the same name in another catalog it is not."""
    from pyiceberg.catalog import load_catalog

    def about(number: int) -> dict[str, str]:
        return {"type": "sql", "uri": f"sqlite:///{folder}/c{number}.db", "warehouse": f"file://{folder}/lake{number}"}

    for number in range(2):
        load_catalog("a", **about(number)).create_namespace("own")
        gm.deliver(job(sink="before").run().sink, gm.to("iceberg://a/own.t", options=about(number)))

    catalog = load_catalog("b", **about(0))  # which a catalog of another kind would be, too
    catalog.create_namespace("own")
    catalog.register_table("own.t", load_catalog("a", **about(0)).load_table("own.t").metadata_location)

    def delivering(to: str, number: int) -> gm.Job:
        source, model = gm.source("iceberg://a/own.t", storage=about(0)), gm.model(doubled, returns={"y": "int64"})
        made = gm.to(to, options=about(number))
        return gm.Job(source, model, gm.sink("out", keep="id"), workers=0, deliver=made)

    with pytest.raises(gm.BadJob, match="is the table that the job reads"):
        delivering("iceberg://b/own.t", 0).run()
    assert delivering("iceberg://a/own.t", 1).run().deliveries


def test_a_table_in_iceberg_that_never_stands_still(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As others commit between any two looks: by another name of its catalog it is the table that the job reads."""
    from pyiceberg.catalog import load_catalog

    from gristmill.stores import iceberg

    about = {"type": "sql", "uri": f"sqlite:///{folder}/c.db", "warehouse": f"file://{folder}/lake"}
    one, other = (load_catalog(name, **about) for name in "ab")
    one.create_namespace("own")
    gm.deliver(job(sink="before").run().sink, gm.to("iceberg://a/own.t", options=about))
    other.create_namespace("own")
    other.register_table("own.t", one.load_table("own.t").metadata_location)
    follows = "UPDATE iceberg_tables SET metadata_location = NEW.metadata_location WHERE catalog_name = 'b'"
    with closing(sqlite3.connect("c.db")) as db:  # which a catalog of another kind would do, too
        db.execute(
            f"CREATE TRIGGER both AFTER UPDATE ON iceberg_tables WHEN NEW.catalog_name = 'a' BEGIN {follows}; END"
        )
    looked = iceberg.loaded

    def loaded(catalog: Any, name: tuple[str, ...]) -> Any:
        found = looked(catalog, name)
        one.load_table("own.t").transaction().set_properties({"at": str(next(times))}).commit_transaction()
        return found

    times = iter(range(1000))
    monkeypatch.setattr(iceberg, "loaded", loaded)
    (read,) = wanted(gm.source("iceberg://a/own.t", storage=about))
    assert is_read(read, gm.to("iceberg://b/own.t", options=about).place)


@pytest.mark.parametrize(("read", "to", "options", "same"), [
    ("u@db/shop#own.t", "u@db/shop#own.t", {}, True),
    ("reader@db/shop#own.t", "writer@db/shop#own.t", {}, True),
    ("u@db/shop#t", "u@db/shop#t", {}, True),
    ("reader@db/shop#t", "writer@db/shop#t", {}, False),
    ("reader@db#own.t", "writer@db#own.t", {}, False),
    ("u@db/shop#t", "u@db/shop#t", {"options": "-c search_path=own"}, False),
])  # fmt: skip
def test_one_address_of_several_servers(
    read: str, to: str, options: dict[str, str], same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are not told apart by it, so that the next session may come to either: it leads to what the job reads."""
    usual = {"table": 1, "database": 5, "standby": False, "system": 7}
    seen = tuple(Identity(started=started, **usual) for started in "01")
    monkeypatch.setattr("gristmill.stores.pgidentity.both", lambda *_: seen)
    (asked,) = wanted(gm.source(f"postgresql://{read}"))
    assert is_read(asked, gm.to(f"postgresql://{to}", options=options).place) is same


@pytest.mark.parametrize(("one", "other", "same"), [
    ({}, {}, True),
    ({"started": "1"}, {"started": "2"}, False),
    ({"started": "1"}, {"started": "2", "standby": True}, True),
    ({"started": "1"}, {"started": "2", "standby": True, "system": 8}, False),
    ({"started": "1"}, {"started": "2", "standby": True, "system": None}, None),
    ({}, {"table": 2}, False),
    ({}, {"database": 2}, False),
    ({"table": None}, {}, None),
])  # fmt: skip
def test_whether_two_servers_have_one_table(one: dict[str, Any], other: dict[str, Any], same: bool | None) -> None:
    """A standby has the tables of its server; a copy that runs by itself has others with the same numbers."""
    usual = {"table": 1, "database": 5, "started": "0", "standby": False, "system": 7}
    assert are_same(Identity(**{**usual, **one}), Identity(**{**usual, **other})) is same


def test_two_addresses_of_a_table_that_others_change() -> None:
    """What changed between two looks is no difference between the places; what changes all the time tells nothing."""
    moments = iter(range(1000))
    here, there = (Place("iceberg", uri, "", uri) for uri in ("iceberg://a/own.t", "iceberg://b/own.t"))
    until = {"still": 3}

    def look(place: Place) -> tuple[str, int]:
        return ("table", min(next(moments), until["still"]))

    assert both(look, here, there) == (("table", 3), ("table", 3))
    until["still"] = 1000
    assert both(look, here, there) is None
    assert both(lambda place: place.uri, here, there) == (here.uri, there.uri)


@pytest.mark.parametrize(("one", "other", "same"), [
    ("postgresql://u:p@DB/shop#scores", "postgres://db:5432/shop#public.scores", True),
    ("postgresql://localhost/shop#scores", "postgresql://127.0.0.1/shop?sslmode=disable#scores", True),
    ("postgresql:///shop?host=/run/a#scores", "postgresql:///shop?host=/run/b#scores", False),
    ("postgresql://db/shop#scores", "postgresql://db/other#scores", False),
    ("postgresql://db/shop#scores", "postgresql://db/shop#own.scores", False),
    ("postgresql://db/shop#scores", "postgresql://db:5433/shop#scores", False),
    ("postgresql://db/shop#scores", "postgresql://db/shop#Scores", False),
    ("duckdb://s.db#scores", "sqlite://s.db#scores", False),
    ("lance://lake#scores", "lance://lake#Scores", False),
])  # fmt: skip
def test_whether_two_addresses_are_one_table(one: str, other: str, same: bool) -> None:
    """As far as they tell."""
    assert same_table(gm.to(one).place, gm.to(other).place) is same


@pytest.mark.parametrize(("to", "told"), [("duckdb://a%3Fb#t", "has a [?] in it"), ("delta://a%2541", "has a %")])
def test_a_path_that_its_library_does_not_find(to: str, told: str) -> None:
    """Is refused before anything is scored."""
    with pytest.raises(gm.BadJob, match=told):
        job(gm.to(to)).run()
    assert not Path("out").exists() or not list(Path("out").glob("*.parquet"))


def elsewhere(batch: dict[str, Any], folder: str) -> dict[str, Any]:
    """A function that changes the current folder."""
    os.chdir(folder)
    return {"y": batch["id"] * 2}


def test_a_function_that_changes_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: the stores are where the job was made."""
    (folder / "other").mkdir()
    model = gm.model(elsewhere, folder=str(folder / "other"), returns={"y": "int64"})
    to = [gm.to(f"{name}://{at}", key="id") for name, at in EMBEDDED.items()]
    report = gm.Job("rows.parquet", model, gm.sink("out", keep="id"), workers=0, deliver=to).run()
    assert [d.rows for d in report.deliveries] == [ROWS] * len(EMBEDDED)
    assert not list((folder / "other").iterdir())
    assert count(str(folder / "s.sqlite")) == ROWS
    monkeypatch.chdir(folder)
    assert gm.verify("out").ok


def test_a_path_that_is_not_quoted_is_told(folder: Path) -> None:
    """A folder with a percent sign in its name, where an address means another one."""
    (folder / "50%20off").mkdir()
    with pytest.raises(gm.BadJob, match=r"a percent sign is %25: there is a folder .*50%20off, which is .*50%2520off"):
        job(gm.to("sqlite://50%20off/s.sqlite#scores")).run()


def test_appending_what_was_brought_by_replace_is_told() -> None:
    """That the rows are there, and are not added again; those of the next generation are, and nothing is told then."""
    job(gm.to("sqlite://s.sqlite#scores")).run()
    made = job(gm.to("sqlite://s.sqlite#scores", mode="append"))
    with pytest.warns(gm.GristmillWarning, match="generation 1 are there already, brought with mode replace at"):
        report = made.run()
    assert report.deliveries[0].mode == "replace" and count("s.sqlite") == ROWS
    verdict = gm.verify(made)
    assert verdict.ok and "(with mode replace; the job's mode append is for later generations)" in verdict.lines[-1]
    assert made.run(restart=True).notes == () and count("s.sqlite") == 2 * ROWS
    assert gm.verify(made).lines[-1].endswith("10 rows of generation 2, as delivered")


def mark_of(made: gm.Job) -> Mark | None:
    """What the store says of the sink's rows."""
    with closing(opened(made.spec.deliver[0])) as store:
        return store.live(identity("out", LOCAL).name)


@pytest.mark.parametrize("to", ["sqlite://s.sqlite#scores", "lmdb://s.lmdb"])
def test_the_same_result_with_another_option(to: str) -> None:
    """`delete`, when its rows are there already: the others go; once is enough."""
    job(gm.to(to, mode="upsert", key="id")).run()
    pq.write_table(pa.table({"id": [1, 2]}), "rows.parquet")
    job(gm.to(to, mode="upsert", key="id")).run(restart=True)
    made = job(gm.to(to, mode="upsert", key="id", delete=True))
    with gm.lookup(to) as lookup:
        assert lookup.get(7) is not None
        (first,) = made.run().deliveries
        assert lookup.get_many([1, 2, 7]) == [{"id": 1, "y": 2}, {"id": 2, "y": 4}, None]
    mark = mark_of(made)
    for again in (made, job(gm.to(to, mode="upsert", key="id"))):
        report = again.run()
        assert report.deliveries[0].at == first.at and report.notes == () and gm.verify(again).ok
    assert mark_of(made) == mark


def indices(file: str) -> list[str]:
    """The columns of the table's indices."""
    with closing(sqlite3.connect(file)) as db:
        names = db.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND tbl_name = 'scores'").fetchall()
        return [row[2] for (name,) in names for row in db.execute(f'PRAGMA index_info("{name}")')]


def test_the_same_result_with_another_index() -> None:
    """It is built, whichever way it is asked for; what is appended has it from the next rows on, which is told."""
    job(gm.to("sqlite://s.sqlite#scores")).run()
    assert indices("s.sqlite") == []
    gm.deliver("out", "sqlite://s.sqlite#scores", index={"y": "btree"})
    assert indices("s.sqlite") == ["y"]
    made = job(gm.to("sqlite://s.sqlite#scores", index={"y": "btree"}))
    before = made.run().deliveries
    assert made.run().deliveries == before
    job(gm.to("sqlite://appended.sqlite#scores", mode="append")).run()
    made = job(gm.to("sqlite://appended.sqlite#scores", mode="append", index={"y": "btree"}))
    with pytest.warns(gm.GristmillWarning, match="no index is built now"):
        made.run()
    assert count("appended.sqlite") == ROWS
    assert made.run(restart=True).notes == () and indices("appended.sqlite") == ["y"]


def test_another_metric_of_the_same_vectors() -> None:
    """The index is made anew."""
    pytest.importorskip("usearch")
    pq.write_table(pa.table({"id": [1, 2], "v": pa.array([[1, 0], [0, 1]], pa.list_(pa.float32(), 2))}), "rows.parquet")
    gm.Job("rows.parquet", gm.model(doubled, returns={"y": "int64"}), gm.sink("out", keep=["id", "v"]), workers=0).run()
    for metric in ("cosine", "l2"):
        gm.deliver("out", "usearch://s.usearch", key="id", index={"v": {"metric": metric}})
        with gm.lookup("usearch://s.usearch") as lookup:
            assert lookup.nearest([1.0, 0.0], 1).metric == metric


def test_an_update_appends_no_kept_row_again() -> None:
    """Neither as a job, before anything is scored, nor by hand to what was delivered before."""
    with pytest.raises(
        gm.BadJob, match=r"s\.sqlite#scores mode append, which adds the rows that an update keeps again"
    ):
        job(gm.to("sqlite://s.sqlite#scores", mode="append"), update={"key": ["id"]})
    made = job(update={"key": ["id"]})
    made.run()
    gm.deliver("out", "sqlite://s.sqlite#scores", mode="append")
    pq.write_table(pq.read_table("rows.parquet").slice(1), "rows.parquet")
    made.run()
    with pytest.raises(gm.BadJob, match="generation 2 is an update, which keeps rows of earlier ones"):
        gm.deliver("out", "sqlite://s.sqlite#scores", mode="append")
    assert count("s.sqlite") == ROWS
    gm.deliver("out", "sqlite://other.sqlite#scores", mode="append")
    gm.deliver("out", "sqlite://other.sqlite#scores", mode="append")
    assert count("other.sqlite") == ROWS - 1


@pytest.mark.parametrize("gone", [1, ROWS])
def test_rows_that_others_take_out_between_two_updates(gone: int) -> None:
    """What did not change is missing, too: all of the result is brought, which is told."""

    def update(changed: int) -> gm.Report:
        pq.write_table(pa.table({"id": [changed, *range(1, ROWS)]}), "rows.parquet")
        return job(gm.to("sqlite://s.sqlite#scores", mode="upsert", key="id"), update={"key": ["id"]}).run()

    update(0)
    with closing(sqlite3.connect("s.sqlite")) as db, db:
        db.execute("DELETE FROM scores WHERE id > 9 - ?", [gone])
    report = update(77)
    assert any(f"holds {ROWS - gone} rows, but 10 were delivered" in note for note in report.notes)
    with gm.lookup("sqlite://s.sqlite#scores") as lookup:
        assert None not in lookup.get_many([77, *range(1, ROWS)])
    assert gm.verify("out").ok and update(78).notes == ()


@pytest.mark.parametrize("to", ["sqlite://s.sqlite#scores", "duckdb://s.duckdb#scores"])
def test_rows_of_others_where_none_are_to_be(to: str) -> None:
    """Beside an upsert with delete they are told as beside a replace, and go: as many as were delivered, or not."""
    for options in ({}, {"mode": "upsert", "delete": True}):
        made = job(gm.to(to, key="id", **options))
        made.run(restart=True)
        gm.Job(
            pa.table({"id": [101, 102]}),
            gm.model(doubled, returns={"y": "int64"}),
            gm.sink(f"other-{options.get('mode')}", keep="id"),
            workers=0,
            deliver=[gm.to(to, mode="append")],
        ).run()
        verdict = gm.verify(made)
        assert not verdict.ok and f"holds {ROWS + 2} rows, but {ROWS} were delivered" in verdict.lines[-1]
        gm.deliver("out", gm.to(to, key="id", **options))
        assert gm.verify(made).ok
        with gm.lookup(to) as lookup:
            assert lookup.get_many([101, 102]) == [None, None]


def test_rows_that_others_take_out_between_two_appends() -> None:
    """By key, of several generations: fewer rows than one of them has are told."""
    Path("in").mkdir()
    os.rename("rows.parquet", "in/a.parquet")
    model = gm.model(doubled, returns={"y": "int64"})
    to = gm.to("sqlite://s.sqlite#scores", mode="upsert", key="id")
    made = gm.Job("in", model, gm.sink("out", keep="id"), workers=0, deliver=to)
    made.run()
    with closing(sqlite3.connect("s.sqlite")) as db, db:
        db.execute("DELETE FROM scores")
    pq.write_table(pa.table({"id": [100, 101]}), "in/b.parquet")
    report = made.run(append=True)
    assert any("holds 2 rows, and the result has 10 or more: others have taken rows out" in n for n in report.notes)
    gm.deliver("out", to)
    assert count("s.sqlite") == ROWS + 2 and gm.verify(made).ok

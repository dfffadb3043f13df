"""Options in the addresses of stores, and of their clients: none is dropped, as it may be the one that keeps rows."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.cli.app import main
from gristmill.job.delivery import STORES
from gristmill.job.secret import Secret


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a result, a job, and a table that has a row of others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    pq.write_table(pa.table({"id": [1, 2]}), "rows.parquet")
    Path("fn.py").write_text("def same(batch):\n    return {'y': batch['id']}\n")
    Path("job.yaml").write_text(
        "source: rows.parquet\nmodel: {call: 'fn:same'}\nsink: {uri: out, keep: [id]}\nengine: {workers: 0}\n"
    )
    assert main(["run", "job.yaml"]) == 0
    with closing(sqlite3.connect("shop.db")) as db:
        db.execute("CREATE TABLE t (id INTEGER, y INTEGER)")
        db.execute("INSERT INTO t VALUES (99, 1)")
        db.commit()
    return tmp_path


def rows() -> int:
    """How many the table has."""
    with closing(sqlite3.connect("shop.db")) as db:
        return int(db.execute("SELECT count(*) FROM t").fetchone()[0])


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("mod=append", "no option 'mod': did you mean 'mode'"),
        ("modes=append", "did you mean 'mode'"),
        ("Mode=append", "did you mean 'mode'"),
        ("if_exists=append", "did you mean 'mode'"),
        ("evolv=true", "did you mean 'evolve'"),
        ("delet=1", "did you mean 'delete'"),
        ("x=1", "no option 'x': it takes mode, key, evolve, delete"),
        ("mode=", "mode has no value"),
        ("mode=append&mode=replace", "mode is 'append' and 'replace': leave one of them out"),
        ("mode=upsert&key=id&delete=maybe", "delete is 'maybe': it must be true or false"),
    ],
)
def test_a_misspelt_option_of_an_address(query: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Is refused: by `replace`, the default, it would delete the rows of others."""
    assert main(["deliver", "out", f"sqlite://shop.db?{query}#t"]) == 2
    assert says in capsys.readouterr().err and rows() == 1
    with pytest.raises(gm.BadJob, match=says):
        gm.to(Secret("${env:STORE}", f"sqlite://shop.db?{query}#t"))


@pytest.mark.parametrize(
    "address",
    [
        "duckdb://s.duckdb?{}=x#t",
        "lmdb://s.lmdb?{}=x",
        "usearch://s.usearch?{}=x",
        "faiss://s.faiss?{}=x",
        "delta://s.delta?{}=x",
        "lance://s.lance?{}=x#t",
        "spark://db.t?{}=x",
        "cassandra://host/shop?{}=x#t",
        "postgresql://host/db?sslmode=disable&{}=x#t",
        "redis://host/0?{}=x#t",
        "qdrant://host?api_key=x&{}=x#t",
        "iceberg://local/a.b?type=sql&{}=x",
    ],
)
def test_every_store_refuses_what_is_nearly_one_of_ours(address: str) -> None:
    """Whether its client takes options or none; in the address and among its client's."""
    for near, ours in (("mod", "mode"), ("mdoe", "mode"), ("kye", "key"), ("evolv", "evolve"), ("Delete", "delete")):
        with pytest.raises(gm.BadJob, match=f"no option '{near}': did you mean '{ours}'"):
            gm.to(address.format(near), key="id")
        with pytest.raises(gm.BadJob, match=f"no option '{near}': did you mean '{ours}', which .* beside options"):
            gm.to(address.partition("?")[0], key="id", options={near: "x"})
    for ours in ("mode", "index"):
        with pytest.raises(gm.BadJob, match=f"no option '{ours}': it is the delivery's own.*gm.to.…, {ours}=…"):
            gm.to(address.partition("?")[0], key="id", options={ours: "append"})


def test_every_store_of_ours_says_what_it_takes() -> None:
    """So that a new one does not drop options."""
    assert not [name for name in STORES.ours if not hasattr(STORES.get(name), "in_address")]


def test_options_of_clients_go_on() -> None:
    """What a client knows is no mistake, however near."""
    for address, options in (
        ("postgresql://host/db?sslmode=disable&sslkey=a&options=-cx#t", {"options": "-cx", "sslkey": "a"}),
        ("redis://host/0?protocol=3#t", {"decode_responses": False}),
        ("iceberg://local/a.b?type=sql&uri=x", {"s3.access-key-id": "x"}),
        ("spark://db.t?staging=/x", {}),
        ("duckdb://s.duckdb#t", {"threads": 1}),
        ("cassandra://host/shop#t", {"local_dc": "eu"}),
    ):
        assert gm.to(address, key="id", options=options).place.options == options
    with pytest.raises(gm.BadJob, match="no option 'local_dc': it goes into options"):
        gm.to("cassandra://host/shop?local_dc=eu#t", key="id")


def test_our_options_among_those_of_the_client(capsys: pytest.CaptureFixture[str]) -> None:
    """In a job file, too; a sink that is a store has them in its own options."""
    job = Path("job.yaml").read_text()
    Path("wrong.yaml").write_text(job + "deliver: [{to: 'sqlite://shop.db#t', options: {mode: append}}]\n")
    assert main(["run", "wrong.yaml"]) == 2
    assert "no option 'mode': it is the delivery's own" in capsys.readouterr().err and rows() == 1
    sink = "sink: {uri: 'sqlite://shop.db#t', keep: [id], options: {mode: append}}"
    Path("right.yaml").write_text(job.replace("sink: {uri: out, keep: [id]}", sink))
    assert main(["run", "right.yaml"]) == 0 and rows() == 3


def test_an_address_of_the_environment_has_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those are read, although the address is shown by the variable's name."""
    Path("env.yaml").write_text(Path("job.yaml").read_text() + "deliver: ['${env:STORE}']\n")
    monkeypatch.setenv("STORE", "sqlite://shop.db?mode=append#t")
    assert main(["run", "env.yaml"]) == 0 and rows() == 3


def test_an_option_beside_the_address_that_says_another() -> None:
    """One of both would be dropped."""
    with pytest.raises(gm.BadJob, match="mode is 'upsert', and in the address 'append': leave one of them out"):
        gm.to("sqlite://shop.db?mode=append#t", mode="upsert", key="id")
    assert gm.to("sqlite://shop.db?mode=upsert&key=id&key=y#t", mode="upsert").key == ("id", "y")


def test_lookups_take_the_key_of_an_address_and_nothing_else() -> None:
    """A misspelt option is told there as well."""
    with gm.lookup("sqlite://shop.db?key=y#t") as found:
        assert found.get(1) == {"id": 99, "y": 1}
    with pytest.raises(gm.BadJob, match="no option 'kye': did you mean 'key'"):
        gm.lookup("sqlite://shop.db?kye=y#t")
    with pytest.raises(gm.BadJob, match="an address of delta has no option 'version'"):
        gm.lookup("delta://s.delta?version=0")


@pytest.mark.parametrize(
    ("module", "address", "says"),
    [
        ("psycopg", "postgresql://127.0.0.1:1/db?foo=1#t", "Postgres' client says: .*foo"),
        ("redis", "redis://127.0.0.1:1/0?foo=1#t", "Redis' client says: .*foo"),
        ("qdrant_client", "qdrant://127.0.0.1:1?foo=1#t", "Qdrant's client says: .*foo"),
        ("qdrant_client", "qdrant:///no/folder?foo=1#t", "local mode has no option 'foo': it takes none"),
    ],
)
def test_what_a_client_does_not_know(module: str, address: str, says: str) -> None:
    """Is no matter of a server that may be there later (exit 2), and no traceback."""
    pytest.importorskip(module)
    with pytest.raises(gm.BadJob, match=says):
        gm.deliver("out", gm.to(address, key="id"))


class Taking:
    """A store of another package, which says nothing of its options."""

    name, modes, keyed, embedded = "taking", ("replace",), False, False


def test_a_store_of_another_package_is_given_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it says what it takes."""
    kinds: dict[str, Any] = {**STORES._loaded, "taking": Taking}
    monkeypatch.setattr(STORES, "_loaded", kinds)
    monkeypatch.setattr(STORES, "ours", {**STORES.ours, "taking": "somewhere:Taking"})
    place = gm.to("taking://host?modes=x#t", options={"mode": "x"}).place
    assert place.uri == "taking://host?modes=x" and place.options == {"mode": "x"}

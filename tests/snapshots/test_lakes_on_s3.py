"""Lakes in a real object store: read where they are, or copied where their client needs options; not delivered to."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.commit import generation as generations
from gristmill.files import roots
from s3server import KEY, SECRET, S3Server


@pytest.fixture(scope="module")
def server(weed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS with one bucket, `box`."""
    started = S3Server(weed, tmp_path_factory.mktemp("s3"))
    try:
        yield started
    finally:
        started.stop()


def same(batch: dict[str, Any]) -> dict[str, Any]:
    """One column of each row."""
    return {"double": batch["id"] * 2}


@pytest.fixture
def options(server: S3Server) -> dict[str, str]:
    """What the Delta client needs to reach the server, with one table there, whose first file is not its rows."""
    lake = pytest.importorskip("deltalake")
    about = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": f"http://{server.address}",
             "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}  # fmt: skip
    place = "s3://box/lake/table"
    lake.write_deltalake(place, pa.table({"id": [1, 2], "day": ["a", "b"]}), storage_options=about, mode="overwrite")
    rows = pa.table({"id": [3, 4], "day": ["a", None]})
    lake.write_deltalake(
        place, rows, storage_options=about, mode="overwrite", schema_mode="overwrite", partition_by=["day"]
    )
    return about


def read(source: Any, sink: Path) -> list[dict[str, Any]]:
    """The rows of a source by their ids."""
    report = gm.apply(source, str(sink), fn=same, keep=["id", "day"], returns={"double": "int64"})
    return report.read().to_table().sort_by("id").to_pylist()


WANTED = [{"id": 3, "day": "a", "double": 6}, {"id": 4, "day": None, "double": 8}]


@pytest.mark.long
def test_a_table_whose_client_has_options_is_copied(options: dict[str, str], tmp_path: Path) -> None:
    """Others know these options by other names."""
    source = gm.source("delta+s3://box/lake/table", storage=options)
    assert read(source, tmp_path / "out") == WANTED
    texts = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in text for text in texts)


def test_a_table_is_read_where_it_is(options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By credentials of the environment, which the workers have, too."""
    for name, value in options.items():
        monkeypatch.setenv(name, value)
    assert read("delta+s3://box/lake/table", tmp_path / "out") == WANTED
    assert not list((tmp_path / "out").glob("_gristmill/inputs/*.snapshot"))
    with pytest.raises(gm.BadSource, match=r"table: is a Delta table, .*: give its address as delta\+s3://box/lake"):
        read("s3://box/lake/table", tmp_path / "no")
    with pytest.raises(gm.BadSource, match="cannot be read as a Delta table"):
        read("delta+s3://box/lake/other", tmp_path / "no")


@pytest.mark.long
def test_an_iceberg_table_is_read_by_its_catalog_and_without(server: S3Server, tmp_path: Path) -> None:
    """At the snapshot that it has then; with its client's options it is copied."""
    pytest.importorskip("pyiceberg")
    from pyiceberg.catalog import load_catalog

    client = {"s3.endpoint": f"http://{server.address}", "s3.access-key-id": KEY, "s3.secret-access-key": SECRET,
              "s3.region": "us-east-1"}  # fmt: skip
    about = {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": "s3://box/ice", **client}
    catalog = load_catalog("shop", **about)
    catalog.create_namespace("web")
    rows = pa.table({"id": [3, 4], "day": ["a", None]})
    table = catalog.create_table("web.events", schema=rows.schema)
    table.append(rows)
    said = table.metadata_location
    assert read(gm.source("iceberg://shop/web.events", storage=about), tmp_path / "out") == WANTED
    table.append(rows)
    assert read(gm.source(f"iceberg+{said}", storage=client), tmp_path / "before") == WANTED
    found = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert found and not any(SECRET.encode() in text for text in found)
    with pytest.raises(gm.BadJob, match=r"iceberg://shop/web.scores: its files are at s3://box/ice/.*this machine's"):
        gm.apply(
            rows,
            str(tmp_path / "no"),
            fn=same,
            keep=["id"],
            deliver=[gm.to("iceberg://shop/web.scores", options=about)],
        )
    assert not (tmp_path / "no" / "_SUCCESS").exists()


def test_a_lance_table_is_copied(server: S3Server, tmp_path: Path) -> None:
    """At the version that it has then, or a named one."""
    lance = pytest.importorskip("lance")
    about = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "aws_endpoint": f"http://{server.address}",
             "aws_region": "us-east-1", "allow_http": "true"}  # fmt: skip
    rows = pa.table({"id": [3, 4], "day": ["a", None]})
    for mode in ("create", "append"):
        lance.write_dataset(rows, "s3://box/lance/events.lance", mode=mode, storage_options=about)
    source = gm.source("lance+s3://box/lance?version=1#events", storage=about)
    assert read(source, tmp_path / "out") == WANTED
    assert len(read(gm.source("lance+s3://box/lance/events.lance", storage=about), tmp_path / "all")) == 4
    found = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert found and not any(SECRET.encode() in text for text in found)
    with pytest.raises(gm.BadSource, match=r"lance\+s3://box/lance#other: cannot be read as a Lance table"):
        read(gm.source("lance+s3://box/lance#other", storage=about), tmp_path / "no")


@pytest.mark.parametrize("address", ["delta+s3://box/scores", "lance+s3://box/db#scores"])
def test_deliveries_are_refused_before_anything_is_scored(address: str, tmp_path: Path) -> None:
    """With the way out; so are lookups."""
    told = r"on this machine's disks only, and this is in an object store: deliver to (delta|lance):///PATH, or let the"
    with pytest.raises(gm.BadJob, match=told):
        gm.apply(pa.table({"id": [1]}), str(tmp_path / "no"), fn=same, deliver=[address])
    with pytest.raises(gm.BadJob, match=told):
        gm.lookup(address, key="id")
    with pytest.raises(gm.BadJob, match=told):
        gm.apply(pa.table({"id": [1]}), address, fn=same)
    assert not (tmp_path / "no").exists()


def test_what_is_copied_for_a_sink_in_a_store_is_its_own(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder on this machine is of one endpoint and one user, and goes when it is empty; another's is refused."""
    import sqlite3

    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    storage = server.storage()
    root, files = roots.opened("s3://box/own", storage)
    _, other = roots.opened("s3://box/own", {**storage, "endpoint_override": "http://127.0.0.1:1"})
    place = Path(generations.held_inputs(root, files))
    assert str(place) != generations.held_inputs(root, other)
    db = sqlite3.connect(tmp_path / "a.sqlite")
    db.execute("CREATE TABLE rows AS SELECT 1 AS id")
    db.commit()
    db.close()
    seen: list[int] = []

    def looked(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(place.stat().st_mode & 0o777)
        return {"double": batch["id"] * 2}

    job = gm.Job(f"sqlite://{tmp_path}/a.sqlite#rows", gm.model(looked), gm.sink("s3://box/own", storage=storage),
                 workers=0)  # fmt: skip
    job.run()
    assert set(seen) == {0o700} and not list(temporary.glob("gristmill-inputs*"))
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(gm.BadJob, match=r"gristmill-inputs-.*: others may write to it.*TMPDIR"):
        job.run()

"""The servers of the tests of stores, one of each kind, and processes apart for those that are killed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import storeservers
from s3server import S3Server

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "faults"), str(HERE / "fakedriver"), str(HERE.parent / "engines")]

import shops  # noqa: E402 - beside the tests


@pytest.fixture(scope="session")
def apart() -> Iterator[object]:
    """Runs functions in processes apart, each a fork of one that has imported everything and done nothing."""
    from apart import Apart

    with Apart() as running:
        yield running


@pytest.fixture(scope="module", params=[name for name in shops.SHOPS if name not in shops.SLOW])
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[shops.Shop]:
    """Each kind of store, without rows at first."""
    server = shops.SERVERS.get(request.param)
    at = request.getfixturevalue(server) if server else ""
    with shops.SHOPS[request.param](at, tmp_path_factory.mktemp(request.param)) as made:
        yield made


@pytest.fixture
def until() -> object:
    """Waits for something to be true."""
    from processes import until

    return until


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a Postgres server's database, with pgvector."""
    with storeservers.postgres() as address:
        yield address


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """The address of a Redis server, without its database."""
    with storeservers.redis() as address:
        yield address


@pytest.fixture(scope="session")
def spark_session() -> Iterator[str]:
    """A session of Spark, which ends with this process; what another one needs to join it."""
    import places

    import sparkjoin

    with places.started("spark"):
        from pyspark.sql import SparkSession

        yield sparkjoin.address(SparkSession.builder.getOrCreate())


@pytest.fixture(scope="session")
def server(weed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS with one bucket, `box`, for as long as the tests run."""
    started = S3Server(weed, tmp_path_factory.mktemp("s3"))
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture
def database(postgres: str) -> Iterator[Any]:
    """A connection to a schema of its own of a Postgres database."""
    import psycopg

    with psycopg.connect(postgres, autocommit=True, options="-c search_path=area") as db:
        db.execute("DROP SCHEMA IF EXISTS area CASCADE")
        db.execute("CREATE SCHEMA area")
        yield db
        db.execute("DROP SCHEMA area CASCADE")

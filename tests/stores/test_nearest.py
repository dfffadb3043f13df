"""The rows nearest to a vector: as numpy finds them by looking at every one, whatever the store."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.cli import main

ROWS, WIDTH, K = 5_000, 64, 10
METRICS = ("cosine", "l2", "ip")


def as_it_is(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The model answers with the vectors that it is given."""
    return batch


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    """Of several lengths, so that metrics differ."""
    random = np.random.default_rng(7)
    return (random.normal(size=(ROWS, WIDTH)) * random.uniform(0.5, 2, (ROWS, 1))).astype(np.float32)


@pytest.fixture(scope="module")
def sink(vectors: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A published result of these vectors, and of a row that has none."""
    folder = tmp_path_factory.mktemp("vectors")
    column = pa.array([*vectors.tolist(), None], pa.list_(pa.float32(), WIDTH))
    rows = pa.table({"id": pa.array(range(ROWS + 1), pa.int64()), "embedding": column})
    pq.write_table(rows, folder / "in.parquet", row_group_size=1_000)
    model = gm.model(as_it_is, batch_format="arrow")
    gm.Job(str(folder / "in.parquet"), model, gm.sink(str(folder / "out")), workers=0, shard_rows=1_000).run()
    return str(folder / "out")


def truth(vectors: np.ndarray, queries: np.ndarray, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows nearest to each query, and how far they are."""
    all_of, asked = vectors.astype(np.float64), queries.astype(np.float64)
    if metric == "l2":
        found = np.linalg.norm(all_of[None] - asked[:, None], axis=2)
    else:
        found = -(asked @ all_of.T)
        if metric == "cosine":
            found = 1 + found / np.linalg.norm(all_of, axis=1) / np.linalg.norm(asked, axis=1)[:, None]
    order = np.argsort(found, axis=1)[:, :K]
    return order, np.take_along_axis(found, order, 1)


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    """Vectors that are in no row."""
    return np.random.default_rng(8).normal(size=(20, WIDTH)).astype(np.float32)


def address(store: str, folder: Path) -> str:
    """A file for a store."""
    return f"{store}://{folder}/found" + ("#rows" if store in ("duckdb", "sqlite") else "")


@pytest.fixture(params=["sink", "duckdb", "sqlite"])
def exact(request: pytest.FixtureRequest, sink: str, tmp_path: Path) -> str:
    """Where every vector is looked at."""
    if request.param == "sink":
        return sink
    to = address(request.param, tmp_path)
    gm.deliver(sink, to)
    return to


@pytest.mark.few(3)
@pytest.mark.parametrize("metric", METRICS)
def test_every_vector_looked_at(exact: str, vectors: np.ndarray, queries: np.ndarray, metric: Any) -> None:
    """Exactly what numpy finds, with the distances; one vector and several give the same."""
    rows, far = truth(vectors, queries, metric)
    with gm.lookup(exact) as lookup:
        found = lookup.nearest_many(queries, K, metric=metric)
        assert [[row["id"] for row in one] for one in found] == rows.tolist()
        np.testing.assert_allclose([[row["_distance"] for row in one] for one in found], far, atol=1e-5)
        assert [row["id"] for row in lookup.nearest(queries[0].tolist(), K, metric=metric)] == rows[0].tolist()
        assert found[0].metric == metric and found[0].generation == 1
        np.testing.assert_array_equal(np.float32(found[0][0]["embedding"]), vectors[rows[0, 0]])
        assert lookup.nearest(vectors[3], 1)[0]["id"] == 3
        assert len(lookup.nearest(queries[0], ROWS + 10)) == ROWS  # the row without a vector is near to none


def recall(found: list[Any], rows: np.ndarray) -> float:
    """The share of the nearest rows that were found."""
    both = zip(found, rows.tolist(), strict=True)
    return float(np.mean([len({row["id"] for row in one} & set(wanted)) / K for one, wanted in both]))


@pytest.mark.few(1)
@pytest.mark.parametrize("metric", METRICS)
def test_pgvector_by_its_index(postgres: str, sink: str, vectors: np.ndarray, queries: np.ndarray, metric: str) -> None:
    """Of the metric of the index, which is used; by another metric every vector is looked at."""
    import psycopg

    to = f"{postgres}#near_{metric}"
    wide = {"expansion_add": 256, "expansion_search": 256}  # threads make an index in some order
    gm.deliver(sink, to, key="id", index={"embedding": {"kind": "hnsw", "metric": metric, **wide}})
    rows, far = truth(vectors, queries, metric)
    with gm.lookup(to) as lookup:
        found = lookup.nearest_many(queries, K)
        assert found[0].metric == metric and recall(found, rows) >= 0.95
        assert lookup.get(3)["embedding"] == vectors[3].tolist()
        np.testing.assert_allclose(found[0][0]["_distance"], far[0, 0], atol=1e-4)
        assert len(lookup.nearest(queries[0], 300)) == 300
        other: Any = "l2" if metric != "l2" else "ip"
        assert recall(lookup.nearest_many(queries, K, metric=other), truth(vectors, queries, other)[0]) == 1
    with psycopg.connect(postgres) as db:
        scans = db.execute(
            "SELECT idx_scan FROM pg_stat_user_indexes "
            "WHERE relname = %s AND pg_get_indexdef(indexrelid) LIKE '%%hnsw%%'",
            [f"near_{metric}"],
        ).fetchall()
        assert len(scans) == 1 and scans[0][0] > 0


def test_pgvector_beside_columns_of_any_name(postgres: str, tmp_path: Path) -> None:
    """Those by which a query might call what it makes itself; and a vector that is an array is told to be one."""
    import psycopg

    eye = np.eye(3, dtype=np.float32)
    odd = {name: [f"{name}{i}" for i in range(3)] for name in ("d", "t", "k", "a", "n", "_distance_", "D", "ctid_")}
    rows = pa.table({"id": [0, 1, 2], **odd, "embedding": pa.array(eye.tolist(), pa.list_(pa.float32(), 3))})
    gm.Job(rows, gm.model(as_it_is, batch_format="arrow"), gm.sink(str(tmp_path / "out")), workers=0).run()
    gm.deliver(str(tmp_path / "out"), to := f"{postgres}#near_names", key="id")
    with gm.lookup(to) as lookup:
        assert [row["id"] for row in lookup.nearest(eye[1], 1)] == [1] and lookup.nearest(eye[2], 1)[0]["d"] == "d2"
    with psycopg.connect(postgres) as db:
        db.execute("ALTER TABLE near_names ALTER embedding TYPE real[]")
    with (
        gm.lookup(to) as lookup,
        pytest.raises(gm.BadJob, match=r"'embedding' has vectors, but is real\[\].*CREATE EXT"),
    ):
        lookup.nearest(eye[1], 1)


@pytest.mark.few(2)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("store", ["usearch", "faiss"])
def test_index_files(
    store: str, sink: str, vectors: np.ndarray, queries: np.ndarray, metric: Any, tmp_path: Path
) -> None:
    """By the metric of the index, and no other; rows by key, also the one that is in no index."""
    to = address(store, tmp_path)
    wide = {"expansion_add": 256, "expansion_search": 256}  # threads make an index in some order
    gm.deliver(sink, to, key="id", index={"embedding": {"kind": "hnsw", "metric": metric, **wide}})
    rows, far = truth(vectors, queries, metric)
    with gm.lookup(to) as lookup:
        found = lookup.nearest_many(queries, K)
        assert found[0].metric == metric and found[0].generation == 1 and recall(found, rows) >= 0.95
        by_id = {row["id"]: row["_distance"] for row in found[0]}
        np.testing.assert_allclose([by_id[i] for i in rows[0] if i in by_id], [
            d for i, d in zip(rows[0], far[0], strict=True) if i in by_id
        ], atol=1e-4)  # fmt: skip
        assert lookup.get(3) == {"id": 3, "embedding": vectors[3].tolist()}
        assert lookup.get_many([ROWS, ROWS + 1]) == [{"id": ROWS, "embedding": None}, None]
        assert len(lookup.nearest(queries[0], 200)) == 200
        with pytest.raises(gm.BadJob, match=f"is an index by {metric}"):
            lookup.nearest(queries[0], metric="l2" if metric != "l2" else "ip")


def test_a_flat_index_looks_at_every_vector(
    sink: str, vectors: np.ndarray, queries: np.ndarray, tmp_path: Path
) -> None:
    """FAISS has one, which finds exactly what numpy does; a library that has none says what it has."""
    gm.deliver(sink, address("faiss", tmp_path), key="id", index={"embedding": "flat"})
    with gm.lookup(address("faiss", tmp_path)) as lookup:
        assert recall(lookup.nearest_many(queries, K), truth(vectors, queries, "cosine")[0]) == 1
    for index, told in (
        ({"embedding": "flat"}, "is 'flat': it must be one of hnsw"),
        ({"embedding": {"expansion": 3}}, "has no option 'expansion'"),
        ({"embedding": {"metric": "cosin"}}, "metric is 'cosin': it must be one of cosine, l2, ip"),
        ({"id": "hnsw"}, "no column of vectors 'id'"),
    ):
        with pytest.raises(gm.BadJob, match=told):
            gm.deliver(sink, address("usearch", tmp_path), key="id", index=index)


@pytest.mark.few(1)
@pytest.mark.parametrize("metric", METRICS)
def test_qdrant_in_local_mode(
    vectors: np.ndarray, queries: np.ndarray, metric: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's local mode looks at every vector; by cosine, they come back 1 long."""
    some = vectors[:300]
    rows = pa.table({"id": pa.array(range(300)), "embedding": pa.array(some.tolist(), pa.list_(pa.float32(), WIDTH))})
    to = gm.to(f"qdrant://{tmp_path}/q#near", key="id", index={"embedding": {"metric": metric}})
    gm.Job(
        rows, gm.model(as_it_is, batch_format="arrow"), gm.sink(str(tmp_path / "out")), workers=0, deliver=[to]
    ).run()
    nearest, far = truth(some, queries, metric)
    with gm.lookup(to) as lookup:
        found = lookup.nearest_many(queries, K)
        assert found[0].metric == metric and [[row["id"] for row in one] for one in found] == nearest.tolist()
        np.testing.assert_allclose([[row["_distance"] for row in one] for one in found], far, atol=1e-4)
        length = np.linalg.norm(some[3]) if metric == "cosine" else 1
        np.testing.assert_allclose(lookup.get(3)["embedding"], some[3] / length, rtol=1e-6)
        with pytest.raises(gm.BadJob, match=f"is searched by {metric}"):
            lookup.nearest(queries[0], metric="l2" if metric != "l2" else "ip")


def test_coroutines_are_answered_together(sink: str, vectors: np.ndarray, tmp_path: Path) -> None:
    """Keys that many ask for at once are few calls of the store; a key that is none fails its own call."""
    to = address("usearch", tmp_path)
    gm.deliver(sink, to, key="id")

    async def ask() -> None:
        async with gm.aio.lookup(to) as lookup:
            calls: list[int] = []
            whole = lookup._lookup._reader.find
            lookup._lookup._reader.find = lambda keys: calls.append(len(keys)) or whole(keys)  # type: ignore
            found = await asyncio.gather(*(lookup.get(n) for n in range(200)), lookup.get_many([7, -1, 8]))
            assert [row["id"] for row in found[:200]] == list(range(200))
            assert [row and row["id"] for row in found[200]] == [7, None, 8]
            assert len(calls) < 50 and sum(calls) == 203
            good, bad = await asyncio.gather(lookup.get(3), lookup.get("three"), return_exceptions=True)
            assert good["id"] == 3 and isinstance(bad, gm.BadJob)
            assert (await lookup.nearest(vectors[5], 1))[0]["id"] == 5
            assert [one[0]["id"] for one in await lookup.nearest_many(vectors[:2], 1)] == [0, 1]
            assert await lookup.generation() == 1
        async with gm.aio.lookup(sink, key="id") as lookup:
            assert (await lookup.get(4))["id"] == 4

    asyncio.run(ask())


def test_what_cannot_be_searched_is_told(sink: str, tmp_path: Path) -> None:
    """A store of keys, vectors of another length, a column that has none, a k that is no number of rows."""
    gm.deliver(sink, address("lmdb", tmp_path), key="id")
    with gm.lookup(address("lmdb", tmp_path)) as lookup, pytest.raises(gm.BadJob, match="finds rows by key only"):
        lookup.nearest([0.0] * WIDTH)
    with gm.lookup(sink) as lookup:
        for call, told in (
            (lambda: lookup.nearest([1.0, 2.0]), "has vectors of 64 numbers, and this one has 2"),
            (lambda: lookup.nearest(np.zeros((2, WIDTH))), "several: nearest_many"),
            (lambda: lookup.nearest([float("nan")] * WIDTH), "NaN or infinity"),
            (lambda: lookup.nearest(["a"]), "a vector is a list of numbers"),
            (lambda: lookup.nearest([0.0] * WIDTH, 0), "k is 0"),
            (lambda: lookup.nearest([0.0] * WIDTH, column="embeding"), "did you mean 'embedding'"),
            (lambda: lookup.nearest([0.0] * WIDTH, column="id"), "no column of vectors 'id'"),
            (lambda: lookup.nearest([0.0] * WIDTH, metric="cosin"), "metric is 'cosin'"),  # type: ignore[arg-type]
        ):
            with pytest.raises(gm.BadJob, match=told):
                call()
        assert lookup.nearest_many([]) == []


def test_from_the_command_line(
    sink: str, vectors: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vector as JSON, one or several in a file of numpy; keys or vectors, not both."""

    def shown(*words: str) -> list[dict[str, Any]]:
        assert main(["lookup", sink, *words]) == 0
        printed = capsys.readouterr()
        assert "_distance is l2" in printed.err or "_distance is cosine" in printed.err
        return [json.loads(line) for line in printed.out.splitlines()]

    one = shown("--nearest", json.dumps(vectors[5].tolist()), "-k", "3", "--metric", "l2")
    assert one[0]["id"] == 5 and len(one) == 3 and one[0]["_distance"] == pytest.approx(0, abs=1e-3)
    np.save(tmp_path / "q.npy", vectors[:2])
    several = shown("--nearest", str(tmp_path / "q.npy"), "-k", "1", "--column", "embedding")
    assert [(row["_vector"], row["id"]) for row in several] == [(0, 0), (1, 1)]
    assert main(["lookup", sink, "3", "--nearest", "[1]"]) == 2
    assert main(["lookup", sink, "--nearest", str(tmp_path / "none.npy")]) == 2

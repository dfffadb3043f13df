"""Indices that are asked for: each is there, of the kind that was asked for last, and those of others stay."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

import gristmill as gm


def zero(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A column of zeros."""
    return pa.record_batch({"zero": [0] * len(batch)})


def delivered(folder: Path, rows: pa.Table) -> str:
    """A published result of these rows."""
    sink = gm.sink(str(folder), keep=rows.column_names)
    gm.Job(rows, gm.model(zero, batch_format="arrow"), sink, workers=0).run()
    return str(folder)


def kinds(database: Any) -> list[str]:
    """What follows USING in the definitions of the table's indices."""
    found = database.execute("SELECT indexdef FROM pg_indexes WHERE schemaname = 'area' AND tablename = 't'")
    return sorted(row[0].rpartition(" USING ")[2].replace("public.", "") for row in found)


L2, COSINE = ({"v": {"kind": "hnsw", "metric": metric}} for metric in ("l2", "cosine"))


@pytest.mark.parametrize("hung", ["", "CREATE VIEW o AS SELECT id FROM t"], ids=["renamed", "in place"])
@pytest.mark.parametrize("mode", ["replace", "upsert"])
def test_another_metric(mode: str, hung: str, postgres: str, database: Any, tmp_path: Path) -> None:
    """The index of ours is made anew, and what is nearest is by it; nights after that find it as it is."""
    rows = pa.table({"id": [0, 1], "v": pa.array([[10.0, 0.0], [0.6, 0.8]], pa.list_(pa.float32(), 2))})
    sink, to = delivered(tmp_path / "out", rows), f"{postgres}#area.t"
    gm.deliver(sink, gm.to(to, key="id", mode=mode, index=COSINE))
    database.execute(hung or "SELECT 1")
    for index, ops, first, far in ((L2, "l2", 1, 0.894427), (COSINE, "cosine", 0, 0.0), (L2, "l2", 1, 0.894427)):
        gm.deliver(sink, gm.to(to, key="id", mode=mode, index=index))
        assert kinds(database) == ["btree (id)", f"hnsw (v vector_{ops}_ops)"]
        with gm.lookup(to) as lookup:
            near = lookup.nearest([1.0, 0.0], 1)
            assert (near[0]["id"], near[0]["_distance"]) == (first, pytest.approx(far, abs=1e-5))


def test_another_method(postgres: str, database: Any, tmp_path: Path) -> None:
    """An index of others of the same column stays beside it, and the latest of ours tells the metric."""
    rows = pa.table({"id": [0, 1], "v": pa.array([[10.0, 0.0], [0.6, 0.8]], pa.list_(pa.float32(), 2))})
    sink, to = delivered(tmp_path / "out", rows), f"{postgres}#area.t"
    database.execute("CREATE TABLE t (id bigint, v public.vector(2), zero bigint)")
    database.execute("CREATE INDEX own ON t USING hnsw (v public.vector_cosine_ops); CREATE INDEX num ON t (id)")
    for id_index in ("hash", "btree"):
        gm.deliver(sink, gm.to(to, index={**L2, "id": id_index}))
        more = ["hash (id)"] if id_index == "hash" else []
        assert kinds(database) == ["btree (id)", *more, "hnsw (v vector_cosine_ops)", "hnsw (v vector_l2_ops)"]
    with gm.lookup(to, key="id") as lookup:
        assert lookup.nearest([1.0, 0.0], 1).metric == "l2"


HALVES = np.float16([[10.0, 0.1], [0.6, 0.8], [6e-8, -3.0]])
HNSW: dict[str, pa.Array] = {
    "halves": pa.FixedSizeListArray.from_arrays(pa.array(HALVES.reshape(-1)), 2),
    "tensors": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [2]), pa.array(HALVES.astype("f4").tolist(), pa.list_(pa.float32(), 2))
    ),
}


@pytest.mark.parametrize("method", ["hnsw", "ivfflat"])
@pytest.mark.parametrize("values", HNSW)
def test_an_index_of_vectors_of_other_types(
    values: str, method: str, postgres: str, database: Any, tmp_path: Path
) -> None:
    """They are columns of pgvector, which are given back as they were."""
    rows = pa.table({"id": range(3), "v": HNSW[values]})
    to = gm.to(f"{postgres}#area.t", key="id", index={"v": {"kind": method, "metric": "cosine"}})
    gm.deliver(delivered(tmp_path / "out", rows), to)
    assert kinds(database) == ["btree (id)", f"{method} (v vector_cosine_ops)"]
    with gm.lookup(to) as lookup:
        assert [list(row["v"]) for row in lookup.get_many(range(3))] == HALVES.tolist()
        assert [row["id"] for row in lookup.nearest([0.5, 0.5], 1)] == [1]


UNBUILT: dict[str, tuple[str, Any, pa.Array, str]] = {
    "doubles": (
        "",
        "hnsw",
        pa.array([[1.0, 2.0]], pa.list_(pa.float64(), 2)),
        r"vector_cosine_ops.*double precision\[\]",
    ),
    "lists": ("", "ivfflat", pa.array([[1.0, 2.0]], pa.list_(pa.float32())), r"vector_cosine_ops.*real\[\]"),
    "long": ("", "hnsw", pa.array([[0.0] * 2001], pa.list_(pa.float32(), 2001)), "than 2000 dimensions"),
    "text": ("", "gin", pa.array(["a"]), "text has no default operator class for access method .*gin"),
    "record": ("", "brin", pa.array([{"a": 1}]), "jsonb has no default operator class"),
    "method": ("", "nosuch", pa.array([1]), "access method .*nosuch.* does not exist"),
    "operators": ("", {"kind": "btree", "ops": "no_ops"}, pa.array([1]), "operator class .*no_ops.* does not exist"),
    "endless": ("public.vector", "hnsw", pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2)), "does not have dimensions"),
    "there": ("real[]", "hnsw", pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2)), r"vector_cosine_ops.*real\[\]"),
}


@pytest.mark.parametrize("case", UNBUILT)
def test_an_index_that_postgres_does_not_build(case: str, postgres: str, database: Any, tmp_path: Path) -> None:
    """In its own words, before anything is scored; nothing is left there."""
    there, how, values, told = UNBUILT[case]
    if there:
        database.execute(f"CREATE TABLE t (id bigint, v {there}, zero bigint)")
    rows, out = pa.table({"id": [0], "v": values}), tmp_path / "out"
    to = gm.to(f"{postgres}#area.t", key="id", index={"v": how})
    job = gm.Job(rows, gm.model(zero, batch_format="arrow"), gm.sink(str(out), keep=["id", "v"]), workers=0, deliver=to)
    with pytest.raises(gm.BadJob, match=f"column 'v': there can be no index .*Postgres says: .*{told}"):
        job.run()
    assert not (out / "_SUCCESS").exists()
    if not there:
        assert database.execute("SELECT relname FROM pg_class WHERE relname ~ '^(gristmill_trial|t$)'").fetchall() == []


@pytest.mark.parametrize("mode", ["replace", "upsert"])
def test_pgvector_in_a_schema_of_its_own(mode: str, postgres: str, database: Any, tmp_path: Path) -> None:
    """Its types and operators are found where no name is looked for, in tables of others, too."""
    vectors = pa.array([[10.0, 0.0], [0.6, 0.8]], pa.list_(pa.float32(), 2))
    sink, to = delivered(tmp_path / "out", pa.table({"id": [0, 1], "v": vectors})), f"{postgres}#area.t"
    database.execute("CREATE SCHEMA apart")
    database.execute("ALTER EXTENSION vector SET SCHEMA apart")
    try:
        for there in (None, "apart.vector(2)"):
            if there:
                database.execute("DROP TABLE t")
                database.execute(f"CREATE TABLE t (id bigint, v {there}, zero bigint)")
            for index in (COSINE, L2):
                gm.deliver(sink, gm.to(to, key="id", mode=mode, index=index))
            with gm.lookup(to) as lookup:
                assert lookup.get(1) == {"id": 1, "v": pytest.approx([0.6, 0.8]), "zero": 0}
                found = lookup.nearest([1.0, 0.0], 2)
                assert found.metric == "l2" and [row["id"] for row in found] == [1, 0]
            assert kinds(database) == ["btree (id)", "hnsw (v apart.vector_l2_ops)"]
    finally:
        database.execute("ALTER EXTENSION vector SET SCHEMA public")
        database.execute("DROP SCHEMA apart CASCADE")


def test_an_index_whose_name_went_with_its_table(postgres: str, database: Any, tmp_path: Path) -> None:
    """The same result is delivered again after somebody has renamed the table."""
    sink = delivered(tmp_path / "out", pa.table({"id": [0, 1]}))
    for name in ("a", "b"):
        gm.deliver(sink, gm.to(f"{postgres}#area.t", key="id", index={"zero": "btree"}))
        assert kinds(database) == ["btree (id)", "btree (zero)"]
        database.execute(f"ALTER TABLE t RENAME TO {name}")


def test_a_table_named_like_sql(postgres: str, database: Any, tmp_path: Path) -> None:
    """Each night it is replaced, with its indices."""
    sink = delivered(tmp_path / "out", pa.table({"id": [0, 1]}))
    database.execute('CREATE TABLE "a USING b" (id bigint PRIMARY KEY, zero bigint)')
    database.execute('CREATE INDEX "x USING y" ON "a USING b" (zero) WHERE id > 0')
    about = "SELECT indexdef FROM pg_indexes WHERE tablename = 'a USING b' ORDER BY 1"
    before = database.execute(about).fetchall()
    for index in ({}, {"id": "hash"}):
        gm.deliver(sink, gm.to(f"{postgres}#area.a USING b", index=index))
    after = database.execute(about).fetchall()
    assert [row for row in after if row in before] == before and len(after) == 3


@pytest.mark.parametrize("store", ["sqlite", "duckdb"])
def test_names_of_indices_that_meet(store: str, tmp_path: Path) -> None:
    """A column of one table and another of a longer one: both have their index, night after night."""
    for number, (table, column) in enumerate((("a", "b_c"), ("a_b", "c"))):
        rows = pa.table({column: [0, 1]})
        for night in range(2):
            sink = delivered(tmp_path / f"{number}{night}", rows)
            gm.deliver(sink, gm.to(f"{store}://{tmp_path}/t#{table}", mode="append", index={column: "art"}))
    connect: Any = sqlite3.connect if store == "sqlite" else duckdb.connect
    sql = "SELECT tbl_name FROM sqlite_master WHERE type = 'index' AND tbl_name NOT LIKE 'grist%'"
    with closing(connect(str(tmp_path / "t"))) as db:
        found = db.execute(sql if store == "sqlite" else "SELECT table_name FROM duckdb_indexes()").fetchall()
    assert sorted(row[0] for row in found) == ["a", "a_b"]

"""Twice the rows take a delivery twice the work, not four times: by counts of steps and by plans, not by clocks."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.stores import duckdb as duckdb_store
from gristmill.stores import postgres as postgres_store
from gristmill.stores import sqlite as sqlite_store

EVERY = 100  # steps of SQLite's machine between two counts
HOW: dict[str, dict[str, Any]] = {
    "replace": {"key": "id"},
    "append": {"mode": "append"},
    "upsert": {"mode": "upsert", "key": "id"},
    "upsert by two": {"mode": "upsert", "key": ["id", "n"]},
    "upsert and delete": {"mode": "upsert", "key": "id", "delete": True},
}


def scored(batch: dict[str, Any]) -> dict[str, Any]:
    """A number for each row."""
    return {"y": batch["x"] * 2}


def sink(folder: Path, rows: int, night: int) -> str:
    """A result whose keys are in no order; a tenth of them are others the next night."""
    ids = np.random.default_rng(night).permutation(rows) + rows // 10 * night
    table = pa.table({"id": [f"k{n}" for n in ids], "n": ids % 3, "x": ids / 4})
    at = str(folder / f"out{rows}-{night}")
    gm.Job(table, gm.model(scored), gm.sink(at, keep=["id", "n"]), workers=0).run()
    return at


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, str]]:
    """For each number of rows the results of two nights."""
    folder = tmp_path_factory.mktemp("growth")
    return {rows: (sink(folder, rows, 0), sink(folder, rows, 1)) for rows in (1000, 2000)}


@pytest.mark.parametrize("table", ["made by us", "of others", "of others, NOCASE", "with a trigger"])
@pytest.mark.parametrize("how", HOW)
def test_sqlite_takes_twice_the_steps_for_twice_the_rows(
    nights: dict[int, tuple[str, str]], how: str, table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its own machine, the first night and the next; it makes no index by itself for rows that it looks for."""
    steps = 0

    def counted() -> None:
        nonlocal steps
        steps += 1

    def connected(*given: Any, **said: Any) -> sqlite3.Connection:
        made = opened(*given, **said)
        made.set_progress_handler(counted, EVERY)
        return made

    opened = sqlite_store._connected
    monkeypatch.setattr(sqlite_store, "_connected", connected)
    taken: dict[int, list[int]] = {}
    for rows, (first, second) in nights.items():
        file = tmp_path / f"{rows}.sqlite"
        if table != "made by us":
            collation = " COLLATE NOCASE" * table.endswith("NOCASE")
            with closing(sqlite3.connect(file)) as db, db:
                db.execute(f"CREATE TABLE t (id TEXT{collation}, n INTEGER, y REAL)")
                if table == "with a trigger":
                    db.execute("CREATE TRIGGER g AFTER INSERT ON t WHEN new.n > 9 BEGIN SELECT 1; END")
                db.executemany("INSERT INTO t VALUES (?, ?, 0)", ((f"k{i}", i % 3) for i in range(rows)))
        for at in (first, second):
            steps = 0
            gm.deliver(at, gm.to(f"sqlite://{file}#t", **HOW[how]))
            taken.setdefault(rows, []).append(steps)
    for small, large in zip(taken[1000], taken[2000], strict=True):
        assert 0 < small < large < 2.7 * small, taken


@pytest.mark.parametrize("how", [how for how in HOW if "upsert" in how])
@pytest.mark.parametrize("store", ["duckdb", "postgres"])
def test_others_join_by_hashes(
    store: str,
    how: str,
    nights: dict[int, tuple[str, str]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No statement of an upsert looks through one table for each row of the other, by the database's own plan."""
    module = {"duckdb": duckdb_store, "postgres": postgres_store}[store]
    plans: list[str] = []
    run = module.Transaction.run

    def explained(self: Any, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        if "EXISTS (" in sql or " AS t SET " in sql:
            plans.append("\n".join(str(row[-1]) for row in run(self, f"EXPLAIN {sql}", *values)))
        return run(self, sql, *values)

    def changed(self: Any, sql: str) -> int:
        plans.append("\n".join(str(row[-1]) for row in run(self, f"EXPLAIN {sql}")))
        return int(change(self, sql))

    change = module.Transaction.changed
    monkeypatch.setattr(module.Transaction, "run", explained)
    monkeypatch.setattr(module.Transaction, "changed", changed)
    server = request.getfixturevalue("postgres") if store == "postgres" else f"duckdb://{tmp_path}/t.duckdb"
    to = gm.to(f"{server}#growth_{'_'.join(how.split())}", **HOW[how])
    for at in nights[2000]:
        gm.deliver(at, to)
    plans = [plan for plan in plans if "pg_class" not in plan]
    assert len(plans) >= 4 + 2 * to.delete
    for plan in plans:
        nested = "NESTED_LOOP" in plan or "BLOCKWISE" in plan or ("Nested Loop" in plan and "Index" not in plan)
        assert not nested, plan
        assert "HASH" in plan or "Hash" in plan or "Merge" in plan or "Index" in plan or "EMPTY" in plan, plan

"""The stores of the suite that every store passes: how each is begun, addressed, and seen by clients of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Row = dict[str, Any]


@dataclass(frozen=True)
class Shop:
    """A store under test. `address` gives that of a table of this name; `seen` the rows that any client sees there, by
    their ids, and None if there is nothing.
    """

    name: str
    address: Callable[[str], str]
    seen: Callable[[str], dict[int, Row] | None]
    clear: Callable[[str], None]

    def staging(self, folder: Path) -> dict[str, str]:
        """What a sink that is this store says of its folder: nothing, if the store is a file."""
        return {} if self.name in EMBEDDED else {"staging": str(folder / "staging")}


@contextmanager
def duckdb(request: pytest.FixtureRequest, folder: Path) -> Iterator[Shop]:
    """A file."""
    import duckdb as client

    file = folder / "shop.duckdb"

    def seen(table: str) -> dict[int, Row] | None:
        if not file.exists():
            return None
        with client.connect(str(file), read_only=True) as db:
            if not db.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = ?", [table]).fetchall():
                return None
            return {row["id"]: row for row in db.table(table).to_arrow_table().to_pylist()}

    def clear(table: str) -> None:
        file.unlink(missing_ok=True)

    yield Shop("duckdb", lambda table: f"duckdb://{file}#{table}", seen, clear)


EMBEDDED = ("duckdb", "sqlite", "lmdb")
SHOPS: dict[str, Callable[[pytest.FixtureRequest, Path], Any]] = {"duckdb": duckdb}

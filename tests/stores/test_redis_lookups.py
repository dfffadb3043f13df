"""Many keys at once in Redis: as many calls of the script as that takes, rows in the order of the keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.stores import redis

ROWS = 3000


def length(batch: dict[str, Any]) -> dict[str, Any]:
    """How long a name is."""
    return {"n": [len(name) for name in batch["name"]]}


@pytest.mark.parametrize("at_once", [7, 5000])
def test_keys_in_any_order(at_once: int, redis_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated ones, such as are not there, null and empty ones among them."""
    monkeypatch.setattr(redis, "ASKED", at_once)
    names = [f"straße {n} 🙂" if n else "" for n in range(ROWS)]
    pq.write_table(pa.table({"name": names}), tmp_path / "rows.parquet")
    address = gm.to(f"{redis_server}/3#names{at_once}", key="name")
    sink = gm.sink(str(tmp_path / "out"), keep=["name"])
    gm.Job(str(tmp_path / "rows.parquet"), length, sink, workers=0, deliver=[address]).run()
    asked = [*reversed(names), "nobody", None, names[5], names[5]]
    with gm.lookup(address) as lookup:
        wanted = [None if name in (None, "nobody") else {"name": name, "n": len(name)} for name in asked]
        assert lookup.get_many(asked) == wanted
        assert lookup.get_many([]) == [] and lookup.get("nobody") is None
        assert lookup.get("") == {"name": "", "n": 0}

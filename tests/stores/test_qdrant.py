"""Qdrant over HTTP: its client speaks to a server that has the API, and keeps points in the client's local mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from qdrantserver import KEY, serving

import gristmill as gm

pytestmark = pytest.mark.filterwarnings("ignore:Api key is used with an insecure connection")

ROWS, WIDTH = 600, 8


def as_it_is(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The model answers with what it is given."""
    return batch


def night(folder: Path, label: str, deliver: Any, **options: Any) -> gm.Report:
    """A run whose rows have this label."""
    vectors = np.random.default_rng(3).normal(size=(ROWS, WIDTH)).astype(np.float32)
    rows = pa.table({
        "id": pa.array(range(ROWS)),
        "label": [label] * ROWS,
        "v": pa.array(vectors.tolist(), pa.list_(pa.float32(), WIDTH)),
    })  # fmt: skip
    model = gm.model(as_it_is, batch_format="arrow")
    return gm.Job(rows, model, gm.sink(str(folder / "out")), workers=0, deliver=[deliver]).run(**options)


@pytest.mark.long
def test_over_http(tmp_path: Path) -> None:
    """Delivered, replaced, merged and looked up by a key; what was replaced is removed, and the secret said nowhere."""
    with serving() as (server, seen):
        to = gm.to(f"{server}?api_key={KEY}#near", key="id", index={"v": {"metric": "l2"}})
        night(tmp_path, "first", to)
        with gm.lookup(f"{server}?api_key={KEY}#near") as lookup:
            row = lookup.get(7)
            assert row is not None and row["label"] == "first"
            assert [one["id"] for one in lookup.get_many([599, 0])] == [599, 0]  # type: ignore[index]
            assert lookup.get_many([-1, ROWS]) == [None, None]
            near = lookup.nearest(row["v"], 3)
            assert near[0]["id"] == 7 and near.metric == "l2" and near[0]["_distance"] == pytest.approx(0, abs=1e-5)
            night(tmp_path, "second", to, restart=True)
            assert lookup.nearest(row["v"], 1)[0]["label"] == "second" and lookup.generation == 2
            removed = [line for line in seen if line.startswith("DELETE")]
            assert len(removed) == 1
            upsert = gm.to(f"{server}?api_key={KEY}#near", mode="upsert", key="id", index={"v": {"metric": "l2"}})
            night(tmp_path / "other", "third", upsert)
            assert lookup.get(7)["label"] == "third"  # type: ignore[index]
        assert KEY not in "".join(p.read_text("latin-1") for p in tmp_path.rglob("*") if p.is_file())


def test_what_a_server_says(tmp_path: Path) -> None:
    """A key that does not suffice, a server that is not there, and a name that is a collection: in one line."""
    with serving() as (server, _):
        with pytest.raises(gm.BadJob, match="Qdrant says: Unexpected Response: 403"):
            night(tmp_path, "a", gm.to(f"{server}?api_key=wrong#near", key="id"))
        with (
            gm.lookup(f"{server}?api_key={KEY}#none") as lookup,
            pytest.raises(gm.BadSource, match="nothing is published"),
        ):
            lookup.get(1)
        night(tmp_path / "b", "b", gm.to(f"{server}?api_key={KEY}#near", key="id"))
        there, vectors = "theirs", {"size": WIDTH, "distance": "Cosine"}
        url = server.replace("qdrant", "http", 1)
        assert httpx.put(f"{url}/collections/{there}", json={"vectors": vectors}, headers={"api-key": KEY}).is_success
        with pytest.raises(gm.BadJob, match="is a collection, and the name has to be an alias"):
            gm.deliver(str(tmp_path / "b" / "out"), f"{server}?api_key={KEY}#{there}", key="id")
        at = gm.lookup(f"{server}?api_key={KEY}#near")
    with at, pytest.raises(gm.RunFailed, match="cannot be reached"):
        at.get(1)

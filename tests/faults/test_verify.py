"""verify proves more than that files are what they were: ways in which a result can be wrong are planted and named."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import victims

import gristmill as gm
from gristmill.files.document import seal, unseal


def resealed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A sealed document with a change that its own checksum does not tell."""
    body = unseal(path.read_bytes(), str(path))
    change(body)
    path.write_bytes(seal(body))


def publication(root: Path) -> list[Path]:
    """Where the latest result is described."""
    return [root / "_SUCCESS", *sorted((root / "_gristmill" / "published").iterdir())[-1:]]


def receipt(root: Path, shard: int = 0) -> Path:
    """A receipt of the first generation."""
    return next((root / "_gristmill").glob(f"g0001-*/receipts/{shard:07d}.json"))


def _counts(by: int) -> Callable[[dict[str, Any]], Any]:
    def change(body: dict[str, Any]) -> None:
        body["counts_list"] = [n + by * (i in (0, 1, 4, 7)) for i, n in enumerate(body["counts_list"])]
        body["rows_ok"] += by

    return change


def _marked(change: Callable[[Path], Any]) -> Callable[[Path], None]:
    return lambda root: change(root / "_SUCCESS")


def lose_receipt(root: Path) -> None:
    receipt(root, 1).unlink()


def flip_receipt(root: Path) -> None:
    path = receipt(root, 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def invent_receipt(root: Path) -> None:
    shutil.copy(receipt(root, 1), receipt(root, 1).with_name("0000099.json"))


def list_twice(root: Path) -> None:
    for path in publication(root):
        resealed(path, lambda body: body["files"].append(body["files"][0]))


def leave_out(root: Path) -> None:
    name = json.loads((root / "_SUCCESS").read_text())["files"][0]["name"]
    for path in publication(root):
        resealed(path, lambda body: body["files"].pop(0))
    (root / name).unlink()


def miscount(root: Path) -> None:
    for path in publication(root):
        resealed(path, _counts(10))


def negative(root: Path) -> None:
    for path in publication(root):
        resealed(path, lambda body: body["counts_list"].__setitem__(3, -1))


def bury_twice(root: Path) -> None:
    letters, *_ = sorted((root / "_dead").glob("*.jsonl"))
    line = letters.read_text().splitlines()[0]
    letters.write_text(f"{line}\n{line}\n")


def bury_the_living(root: Path) -> None:
    letters, *_ = sorted((root / "_dead").glob("*.jsonl"))
    lines = letters.read_text().splitlines()
    row = json.loads(lines[0])
    letters.write_text("\n".join([json.dumps({**row, "position": row["position"] + 1}), *lines[1:]]) + "\n")


def overlap(root: Path) -> None:
    """The second generation's plan names the first one's file."""
    (plan,) = (root / "_gristmill").glob("g0002-*/plan.json")
    entry = unseal(plan.read_bytes(), str(plan))["tables"]["files"]
    path = plan.parent / entry["path"]
    table = pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()
    first = str(root.parent / "in" / "0.parquet")
    table = table.set_column(table.schema.get_field_index("path"), "path", pa.array([first] * table.num_rows))
    with pa.ipc.new_file(str(path), table.schema) as out:
        out.write_table(table)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    resealed(plan, lambda body: body["tables"]["files"].update(sha256=digest))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lose_receipt, "shard 1 has no receipt"),
        (flip_receipt, "the receipt of shard 1 is damaged (0000001.json)"),
        (invent_receipt, "a receipt of shard 99"),
        (list_twice, "listed 2 times"),
        (leave_out, "committed by generation 1, but not in the result"),
        (miscount, "its receipts"),
        (negative, "dead is -1"),
        (bury_twice, "2 dead letters"),
        (bury_the_living, "is both published and a dead letter"),
        (overlap, "is in two generations of the result"),
        (_marked(Path.unlink), "_SUCCESS: missing"),
        (_marked(lambda path: path.write_bytes(b"")), "_SUCCESS: damaged"),
        (_marked(lambda path: path.write_bytes(path.read_bytes()[:50])), "_SUCCESS: damaged"),
        (
            _marked(lambda path: resealed(path, _counts(-31))),
            "_SUCCESS counts 7 rows ok",
        ),
    ],
)
def test_what_is_wrong_with_a_result_is_named(harm: Callable[[Path], None], said: str, quick: Path) -> None:
    """Counts, receipts, plans, letters and lists that contradict each other, though every checksum holds."""
    source, root = victims.write_input(str(quick / "in"), 40, files=1), quick / "out"
    sink = gm.sink(str(root), keep=["id"], row_id="row")
    job = gm.Job(source, gm.model(victims.scored, bad=[3, 13]), sink, workers=0, shard_rows=10, gates={"min_ok": 0.5})
    job.run()
    if harm is overlap:
        pq.write_table(victims.table(10, 40), os.path.join(source, "1.parquet"))
        job.run(append=True)
    assert gm.verify(str(root), deep=True).ok
    if harm in (bury_twice, bury_the_living):
        (root / "_dead").mkdir(exist_ok=True)
    harm(root)
    verdict = gm.verify(str(root))
    assert not verdict.ok
    assert any(said in line for line in verdict.lines), verdict.lines


def _indexed(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    """npy's manifest with a change that neither the publication's checksum nor its row count tells."""

    def harm(root: Path) -> None:
        path = root / "manifest.parquet"
        table = change(pq.read_table(path))
        pq.write_table(table, path)
        found = {
            "rows": table.num_rows,
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for document in publication(root):
            resealed(document, lambda body: next(f for f in body["files"] if f["role"] == "manifest").update(found))

    return harm


def _put(column: str, row: int, value: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        rows[row][column] = value
        return pa.Table.from_pylist(rows, schema=table.schema)

    return change


def _widened(root: Path) -> None:
    """One file holds vectors of twice the width."""
    path = next(root.glob("p=1/*.npy"))
    np.save(path, np.zeros((len(np.load(path)), 4), dtype=np.float32))
    found = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    for document in publication(root):
        resealed(
            document,
            lambda b: next(f for f in b["files"] if f["name"] == path.relative_to(root).as_posix()).update(found),
        )


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_indexed(lambda t: t.slice(1)), "manifest.parquet: does not list p="),
        (_indexed(_put("rows", 0, 60)), "manifest.parquet: lists 60 rows of p="),
        (_indexed(_put("output_path", 0, "p=9/part.npy")), "lists p=9/part.npy, which is not in the result"),
        (_indexed(_put("input_path", 0, "elsewhere")), "lists elsewhere, which is not a file of the source"),
        (_indexed(lambda t: pa.concat_tables([_put("rows", 0, 0)(t).slice(0, 1), t])), "lists 1 pairs of files twice"),
        (_indexed(lambda t: t.take(list(range(t.num_rows))[::-1])), "in another order"),
        (_indexed(lambda t: t.drop_columns("input_path")), "has columns output_path"),
        (_widened, "vectors of width 4, but those of the result have width 2"),
    ],
)
def test_npys_manifest_is_held_against_the_files(harm: Callable[[Path], None], said: str, quick: Path) -> None:
    """Every file of vectors once, with its rows; of one width, with its other columns beside it."""

    def vector(batch: dict[str, Any]) -> dict[str, Any]:
        return {"v": np.zeros((len(batch["id"]), 2)), "p": batch["id"] % 3}

    source, root = victims.write_input(str(quick / "in"), 40, files=1), quick / "out"
    sink = gm.sink(str(root), format="npy", keep=["id"], partition_by=["p"])
    gm.Job(source, vector, sink, workers=0, shard_rows=20).run()
    assert gm.verify(str(root), deep=True).ok
    harm(root)
    verdict = gm.verify(str(root))
    assert not verdict.ok
    assert any(said in line for line in verdict.lines), verdict.lines


def test_a_result_without_rows_has_all_its_columns(quick: Path) -> None:
    """Ids and versions too, so that verify looks for the dead among no rows, and later rows fit."""
    source, root = victims.write_input(str(quick / "in"), 4, files=1), str(quick / "out")
    sink = gm.sink(root, keep=["id"], row_id="row", model_version="version")
    gates = {"min_ok": 0.0, "allow_empty": True}
    model = gm.model(victims.refused)
    gm.Job(source, model, sink, workers=0, gates=gates).run()
    assert gm.verify(root, deep=True).ok
    assert gm.read(root).schema.names == ["row", "id", "version"]

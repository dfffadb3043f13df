"""Row ids made from a key: unique only where the key is, and told where it is not."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.driver.run import retry_dead
from gristmill.observe.report import after

ROWS = 600


def scored(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A vector for each row."""
    return {"v": np.stack([batch["x"], batch["x"]], axis=1).astype(np.float32)}


def job(folder: Path, form: str, key: list[str], **options: Any) -> gm.Job:
    """The job of these tests; `k` has 150 values of 600, `x` is unique."""
    source = folder / "in"
    source.mkdir(exist_ok=True)
    pq.write_table(pa.table({"x": np.arange(ROWS) * 1.0, "k": np.arange(ROWS) % 150}), source / "a.parquet")
    sink = gm.sink(str(folder / "out"), format=form, keep=["k"], row_id="rid", key=key)
    return gm.Job(str(source), gm.model(scored), sink, workers=0, shard_rows=100, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["parquet", "jsonl", "npy"])
def test_ids_that_repeat_are_told(tmp_path: Path, form: str) -> None:
    """A key that is not unique: the run warns, verify says how many rows, over all that was appended."""
    made = job(tmp_path, form, ["k"])
    with pytest.warns(gm.GristmillWarning, match=r"row ids repeat: 450 rows .*the key \(k\) is not unique"):
        report = made.run()
    assert any("row ids repeat" in note for note in report.notes)
    verdict = gm.verify(str(tmp_path / "out"))
    assert verdict.ok
    assert any("450 rows" in line and "(k)" in line for line in verdict.lines), verdict.lines
    pq.write_table(pa.table({"x": [1.0], "k": [3]}), tmp_path / "in" / "b.parquet")
    with pytest.warns(gm.GristmillWarning, match="row ids repeat: 451 rows"):
        made.run(append=True)


def test_ids_of_a_unique_key_are_not(tmp_path: Path) -> None:
    """Nothing is said where each id is one row's."""
    report = job(tmp_path, "parquet", ["k", "x"]).run()
    assert not any("repeat" in note for note in report.notes)
    assert len(gm.verify(str(tmp_path / "out")).lines) == 1


def test_what_the_report_of_npy_says_works(tmp_path: Path) -> None:
    """The line to copy reads the vectors, in the order of the source."""
    report = job(tmp_path, "npy", ["k", "x"]).run()
    (line,) = [text.removeprefix("read").strip() for text in after(report) if text.startswith("read")]
    code = f"import os, numpy as np, pyarrow.parquet as pq\nprint(np.concatenate({line})[:, 0].tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(np.arange(ROWS, dtype=float).tolist())
    with pytest.raises(gm.BadSource, match=r"numpy\.load.*manifest\.parquet.*ids\.parquet"):
        report.read()


def passed(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The source's own column x, and another."""
    with np.errstate(divide="ignore"):
        return {"x": batch["x"], "y": 1 / batch["n"]}


def test_nan_answers_tell_how_they_are_published(tmp_path: Path) -> None:
    """The dead letter and the gate name on_nan, and say where the row's own column had the NaN already."""
    table = pa.table({"x": [1.0, float("nan"), 3.0], "n": [1.0, 1.0, 0.0]})
    with pytest.raises(gm.GateFailed, match="on_nan='keep'"):
        gm.Job(table, gm.model(passed), str(tmp_path / "out"), workers=0).run()
    with pytest.warns(gm.GristmillWarning):
        gm.Job(table, gm.model(passed), str(tmp_path / "out"), workers=0, gates={"min_ok": 0.1}).run()
    had, made = gm.dead(str(tmp_path / "out"))["message"].to_pylist()
    assert "column 'x', which the row's own column already had; on_nan keep" in had
    assert "column 'y'; on_nan keep" in made and "which --restart begins" in made


def test_nan_that_is_left_out_is_no_failure(tmp_path: Path) -> None:
    """What `drop` leaves out of the answers may be NaN, unless a step after the model computes with it."""
    table = pa.table({"x": [1.0, float("nan"), 3.0], "n": [1.0, 1.0, 0.0]})
    inner = gm.sink(str(tmp_path / "out"), drop=["x", "y"])
    options: dict[str, Any] = {"workers": 0, "gates": {"min_ok": 0.1, "warn_failed": 1}}
    report = gm.Job(table, gm.model(lambda b: {**passed(b), "z": b["n"]}), inner, **options).run()
    assert (report.rows_dead, gm.read(str(tmp_path / "out")).schema.names) == (0, ["z"])
    used = gm.Job(table, gm.model(passed), gm.sink(str(tmp_path / "used"), drop=["x", "y"]), post=[tenfold], **options)
    assert used.run().rows_dead == 2


def tenfold(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A step after the model."""
    return {"ten": batch["y"] * 10}


def mixed(rows: list[dict]) -> list[dict]:
    """A key of whole numbers and fractions, whose type depends on which of them stand together."""
    return [{"k": row["id"] + (0.5 if row["id"] % 4 == 0 else 0)} for row in rows]


def until_mended(batch: dict[str, np.ndarray], flag: str) -> dict[str, np.ndarray]:
    """Fails for row 5 until the flag is there."""
    if not Path(flag).exists() and (batch["id"] == 5).any():
        raise ValueError("row 5")
    return {"y": batch["id"]}


def ids(report: gm.Report) -> dict[int, str]:
    """The id of each row."""
    table = report.read().to_table()
    return dict(zip(table["id"].to_pylist(), table["rid"].to_pylist(), strict=True))


def test_a_key_of_numbers_gives_the_same_id_by_any_cut_and_retry(tmp_path: Path) -> None:
    """A whole number is the same key beside fractions, alone in a shard, and retried alone."""
    flag, rows = tmp_path / "mended", [{"id": i} for i in range(12)]

    def made(out: str, **options: Any) -> gm.Job:
        sink = gm.sink(str(tmp_path / out), keep=["id"], row_id="rid", key=["k"])
        model = gm.model(until_mended, flag=str(flag))
        steps = [gm.step(mixed, batch_format="rows")]
        return gm.Job(rows, model, sink, steps=steps, workers=0, gates={"min_ok": 0.5}, **options)

    with pytest.warns(gm.GristmillWarning):
        made("retried").run()
    flag.mkdir()
    whole, cut = ids(made("whole").run()), ids(made("cut", shard_rows=1).run())
    assert whole == cut == ids(retry_dead(made("retried").spec))
    assert len(set(whole.values())) == 12


def nothing_left(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same answer for all rows, under the key's name; row 2 fails."""
    return {"id": [ValueError("two") if i == 2 else 0 for i in batch["id"]]}


def test_ids_are_made_of_the_key_that_the_model_was_given(tmp_path: Path) -> None:
    """A model that puts its answer in the key's place does not give all rows one id."""
    rows = [{"id": i} for i in range(5)]
    found = {}
    for name, fn in (("kept", lambda b: {"y": b["id"]}), ("replaced", nothing_left)):
        sink = gm.sink(str(tmp_path / name), row_id="rid", key=["id"])
        report = gm.Job(rows, gm.model(fn), sink, workers=0, gates={"min_ok": 0.5}).run()
        found[name] = report.read().to_table()["rid"].to_pylist()
    del found["kept"][2]
    assert found["replaced"] == found["kept"]


@pytest.mark.parametrize(
    "keys",
    [
        [Decimal("0.1"), Decimal("0.10000000000000000000000001")],
        [[2**53] * 1500, [2**53] * 700 + [2**53 + 1] * 800],
        [[1, None], [1, 0]],
    ],
)
def test_keys_that_differ_give_other_ids(tmp_path: Path, keys: list[Any]) -> None:
    """However little, in whatever type."""
    table = pa.table({"id": [0, 1], "k": pa.array(keys)})
    sink = gm.sink(str(tmp_path / "out"), keep=["id"], row_id="rid", key=["k"])
    assert len(set(ids(gm.Job(table, lambda b: {"y": b["id"]}, sink, workers=0).run()).values())) == 2

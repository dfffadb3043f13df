"""`drop`: columns left out of the output row, whatever made them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm

ROWS = pa.table({"id": [1, 2, 3], "text": ["a", "b", "c"]})


def logits(batch: Any) -> Any:
    return {"logits": [[1.0, 2.0]] * len(batch["id"]), "label": ["x"] * len(batch["id"])}


def calibrated(batch: Any) -> Any:
    return {"score": [row[0] for row in batch["logits"]], "rest": batch["id"]}


def read(sink: Any, **more: Any) -> pa.Table:
    gm.Job(ROWS, logits, sink, workers=0, **more).run()
    return gm.read(sink.uri).to_table()


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_columns_of_source_model_and_steps_are_dropped(tmp_path: Path, form: str) -> None:
    """What a post step has used up is not written, nor what it made on the way; the rest stands as without it."""
    sink = gm.sink(str(tmp_path / "out"), format=form, keep=["id"], drop=["logits", "rest", "text"])
    table = read(sink, post=[calibrated])
    assert table.to_pylist() == [{"id": i, "label": "x", "score": 1.0} for i in (1, 2, 3)]


def test_in_a_job_file_and_on_the_command_line(tmp_path: Path) -> None:
    """`drop: [logits]` and --drop mean the same."""
    pq.write_table(ROWS, tmp_path / "in.parquet")
    (tmp_path / "scoring.py").write_text(
        "def score(batch):\n    return {'logits': batch['id'], 'label': batch['text']}\n"
    )
    (tmp_path / "job.yaml").write_text(
        "source: in.parquet\nmodel: {call: 'scoring:score'}\nsink: {uri: b, drop: [logits]}\nengine: {workers: 0}\n"
    )
    for arguments in (["apply", "in.parquet", "a", "--fn", "scoring:score", "--drop", "logits"], ["run", "job.yaml"]):
        done = subprocess.run(
            [sys.executable, "-m", "gristmill", *arguments], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    for sink in ("a", "b"):
        assert gm.read(str(tmp_path / sink)).to_table().to_pylist() == [{"label": t} for t in "abc"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"drop": ["logit"]},
            "drop names column 'logit', which no row has: they have id, text, logits, label; did you mean 'logits'",
        ),
        ({"sort_by": ["lable"]}, "'lable', which is not an output column: .*; did you mean 'label'"),
        ({"partition_by": ["lable"]}, "'lable', which is neither an output column .*; did you mean 'label'"),
        ({"index": ["lable"]}, "'lable', which is not an output column: .*; did you mean 'label'"),
        ({"drop": ["logits", "label"]}, "nothing is left"),
        ({"drop": ["id"], "keep": ["id"]}, "'id' in both drop and keep"),
        ({"drop": ["label"], "partition_by": ["label"]}, "'label' in both drop and partition_by"),
        ({"drop": ["n"], "row_id": "n"}, "'n' in both drop and row_id"),
    ],
)
def test_wrong_names_are_told(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    """A name that nothing makes, or that is needed, is a BadJob; nothing is published."""
    with pytest.raises(gm.BadJob, match=says):
        read(gm.sink(str(tmp_path / "out"), **options))
    assert not (tmp_path / "out" / "_SUCCESS").exists()


def test_other_columns_are_another_result(tmp_path: Path) -> None:
    """A result with other columns is not the one that stands: refused, as for any option that shapes it."""
    read(gm.sink(str(tmp_path / "out")))
    with pytest.raises(gm.PlanChanged, match="drop"):
        read(gm.sink(str(tmp_path / "out"), drop=["logits"]))

"""What a message names is what it is about: the line, the flag, the step, the column's type."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm

JOB = """source: rows.parquet
steps:
  - filter: "id >= 0"
model: {call: "scoring:double"}
sink: {uri: out, keep: [id]}
engine: {workers: 0}
post:
  - filter: "score > 0"
"""


def test_a_post_step_that_filters_is_named_with_its_own_line(folder: Any) -> None:
    """`post` stands in line 7; `steps`, which the message has too, in line 2."""
    (folder.path / "job.yaml").write_text(JOB)
    assert "job.yaml:7: post step filter" in folder.run("run", "job.yaml").err


@pytest.mark.parametrize(
    ("flags", "blamed"),
    [
        (
            ("--keep", "id", "--merge", "--partition-by", "t"),
            "--partition-by, --merge: sink has merge",
        ),
        (("--keep", "id", "--limit", "0"), "--limit: source limit is 0"),
    ],
)
def test_the_flags_that_are_to_blame_are_named(folder: Any, flags: tuple[str, ...], blamed: str) -> None:
    """Not one that was given before them."""
    done = folder.run("apply", "rows.parquet", "out", "--fn", "scoring:double", *flags)
    assert done.code == 2 and blamed in done.err and f"--keep: {blamed}" not in done.err, done.err


def test_a_step_that_fails_on_every_row_is_named(folder: Any) -> None:
    """Not the model, which was never asked."""

    def renamed(batch: Any) -> Any:
        return {**batch, "text": batch["content"]}

    def model(batch: Any) -> Any:
        return {"s": batch["x"]}

    sink = gm.sink(str(folder.path / "out"), keep=["id"])
    job = gm.Job(str(folder.path / "rows.parquet"), model, sink, steps=[renamed], workers=0)
    with pytest.raises(gm.RunFailed, match=r"step .*renamed fails on every one of the first rows: KeyError: 'content'"):
        job.run()


@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), pa.list_(pa.float32(), 2)])
def test_the_way_out_of_a_refused_on_null_has_the_column_s_own_type(folder: Any, kind: pa.DataType) -> None:
    """Followed as it is written, it is accepted, and no value changes."""
    values = {pa.int64(): [1, 2**60 + 1], pa.string(): ["a", "b"]}.get(kind, [[1.0, 2.0], [3.0, 4.0]])
    path = str(folder.path / "typed.parquet")
    pq.write_table(pa.table({"id": pa.array(values, kind)}), path)

    def same(batch: pa.Table) -> pa.Table:
        return batch.rename_columns(["s"])

    def job(**more: Any) -> gm.Job:
        sink = gm.sink(str(folder.path / "out"), keep=())
        return gm.Job(path, gm.model(same, batch_format="arrow", **more), sink, on_null="skip", workers=0)

    with pytest.raises(gm.BadJob, match="on_null is 'skip'") as refused:
        job().run()
    takes = eval(str(refused.value).partition("say takes=")[2].partition(" (takes:")[0])  # as a person would copy it
    assert gm.read(job(takes=takes).run().sink).to_table()["s"].to_pylist() == values


def test_progress_off_leaves_the_warnings(folder: Any) -> None:
    """Dead rows are never silent: the one that dies of 60 is told on stderr, and nothing else is."""
    done = folder.apply("bad", "out", "--min-ok", "0.5", "--progress", "off")
    assert done.code == 0 and done.err.startswith("warning: 1 of 60 rows") and "planning" not in done.err
    assert len(done.err.splitlines()) == 1, done.err

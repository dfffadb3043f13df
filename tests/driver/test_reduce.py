"""`reduce=`: the one final file, made of the rows that are published, and published with them."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.cli.app import main
from gristmill.driver import publishing
from gristmill.errors import BadJob, RunFailed

ROWS = pa.table({"id": np.arange(100), "k": [f"k{i % 3}" for i in range(100)]})
SCORED: list[int] = []


def twice(batch: dict[str, Any]) -> dict[str, Any]:
    SCORED.extend(batch["id"].tolist())
    return {"y": batch["id"] * 2}


def vector(batch: dict[str, Any]) -> dict[str, Any]:
    return {"v": np.stack([batch["id"], batch["id"] + 1], axis=1).astype(np.float32)}


def total(rows: pa.RecordBatchReader, folder: str) -> None:
    """A report of the rows, as JSON, and a folder."""
    table = rows.read_all()
    said = {"rows": table.num_rows, "ids": table["id"].to_pylist(), "columns": table.column_names}
    Path(folder, "total.json").write_text(json.dumps(said))
    Path(folder, "more").mkdir()
    Path(folder, "more", "y.txt").write_text(str(sum(table["y"].to_pylist()) if "y" in table.column_names else "none"))


def failing(rows: pa.RecordBatchReader, folder: str) -> None:
    Path(folder, "half.json").write_text("{")
    raise ValueError("not today")


def job(out: Path, reduce: Any = total, rows: Any = ROWS, fn: Any = twice, **sink: Any) -> gm.Job:
    keep = sink.pop("keep", ["id"])
    return gm.Job(rows, fn, gm.sink(str(out), keep=keep, **sink), shard_rows=20, workers=0, reduce=reduce)


def said(out: Path) -> dict[str, Any]:
    """What the report says, by the path that the result gives it."""
    found: dict[str, Any] = json.loads(Path(gm.reduced(out)["total.json"]).read_text())
    return found


@pytest.mark.parametrize(
    "how", [{}, {"partition_by": ["k"], "keep": ["id", "k"]}, {"format": "jsonl", "merge": True}], ids=str
)
def test_made_of_all_rows_and_published_with_them(tmp_path: Path, how: dict[str, Any]) -> None:
    """In the order of the result; named in `_SUCCESS` with digests; verified; not made again."""
    out = tmp_path / "out"
    job(out, **how).run()
    assert said(out)["ids"] == gm.read(out).to_table()["id"].to_pylist()
    assert said(out)["rows"] == 100 and "y" in said(out)["columns"]
    assert sorted(gm.reduced(out)) == ["more/y.txt", "total.json"]
    success = json.loads((out / "_SUCCESS").read_text())
    named = {f["name"]: f["sha256"] for f in success["files"] if f["role"] == "reduced"}
    assert sorted(named) == ["_reduced/g1.0/more/y.txt", "_reduced/g1.0/total.json"] and all(named.values())
    assert success["reduced_by"]["name"] == "total"
    assert gm.verify(out, deep=True).ok
    assert job(out, **how).run().state == "nothing to do"
    part = Path(gm.reduced(out)["total.json"])
    part.chmod(0o644)
    part.write_text(part.read_text().replace("100", "101"))
    assert "total.json: content changed" in " ".join(gm.verify(out).lines)


def test_vectors_are_among_the_rows(tmp_path: Path) -> None:
    """Of an npy sink, joined or not, partitioned or not: as they were answered, beside their own ids."""

    def index(rows: pa.RecordBatchReader, folder: str) -> None:
        found = {}
        for batch in rows:
            values = batch.column("v").flatten().to_numpy().reshape(-1, 2)
            found |= dict(zip(batch.column("id").to_pylist(), values[:, 1].tolist(), strict=True))
        Path(folder, "total.json").write_text(json.dumps(found))

    for number, how in enumerate(({}, {"partition_by": ["k"]}, {"merge": True})):
        job(tmp_path / str(number), index, fn=vector, format="npy", **how).run()
        assert said(tmp_path / str(number)) == {str(i): i + 1.0 for i in range(100)}
        assert gm.verify(tmp_path / str(number)).ok


def test_one_that_raises_publishes_nothing_and_is_mended(tmp_path: Path) -> None:
    """Exit 1, with the line that raised; the same command scores nothing again, also with another function."""
    out = tmp_path / "out"
    with pytest.raises(RunFailed, match=rf"reduce failing failed \({__file__}:\d+\): ValueError: not today") as failed:
        job(out, failing).run()
    assert failed.value.exit_code == 1
    with pytest.raises(gm.BadSource, match="no result"):
        gm.read(out)
    assert not (out / "_reduced").exists()
    SCORED.clear()
    assert job(out, total).run().state == "done"
    assert SCORED == [] and said(out)["rows"] == 100


def test_appended_rows_are_in_it(tmp_path: Path) -> None:
    """It is made of the whole result each time; readers of the old one read on."""
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    pq.write_table(ROWS.slice(0, 60), source / "0.parquet")
    made = job(out, rows=str(source))
    made.run()
    before = gm.reduced(out)["total.json"]
    pq.write_table(ROWS.slice(60), source / "1.parquet")
    made.run(append=True)
    assert said(out)["ids"] == list(range(100))
    assert gm.reduced(out)["total.json"] != before and not os.path.exists(before)
    assert gm.verify(out, deep=True).ok
    made.run(restart=True)
    assert said(out)["rows"] == 100 and gm.verify(out, deep=True).ok
    assert len(list((out / "_reduced").rglob("*.json"))) == 1


def test_another_function_on_a_result_that_stands(tmp_path: Path) -> None:
    """Nothing is scored; the same rows are published again with its files, and the earlier ones go."""
    out = tmp_path / "out"
    job(out, None).run()
    assert gm.reduced(out) == {}
    SCORED.clear()
    report = job(out, total).run()
    assert report.state == "nothing to do" and SCORED == []
    assert any("reduce total was run on the result that is published" in note for note in report.notes)
    assert said(out)["rows"] == 100 and gm.verify(out, deep=True).ok
    with pytest.raises(RunFailed, match="not today"):
        job(out, failing).run()
    assert said(out)["rows"] == 100 and gm.verify(out, deep=True).ok

    def other(rows: pa.RecordBatchReader, folder: str) -> None:
        Path(folder, "other.csv").write_text(str(sum(b.num_rows for b in rows)))

    job(out, other).run()
    assert list(gm.reduced(out)) == ["other.csv"] and gm.verify(out, deep=True).ok
    assert [p.name for p in (out / "_reduced").rglob("*") if p.is_file()] == ["other.csv"]
    before = (out / "_SUCCESS").read_bytes()
    assert job(out, other).run().state == "nothing to do" and (out / "_SUCCESS").read_bytes() == before
    assert gm.read(out).to_table()["id"].to_pylist() == list(range(100))


def test_beside_an_index_of_joined_parts(tmp_path: Path) -> None:
    """Rows are looked up in the files that parts were joined to; another index, or function, keeps the other's."""
    out = tmp_path / "out"
    how = {"partition_by": ["k"], "sort_by": ["y"], "keep": ["id", "k"]}
    job(out, index=["id"], **how).run()
    for made in (job(out, index=["id"], **how), job(out, failing_never, index=["id"], **how),
                 job(out, failing_never, index=["y"], **how)):  # fmt: skip
        assert made.run().state == "nothing to do" and gm.verify(out, deep=True).ok
        assert len(gm.reduced(out)) == (2 if made.spec.reduce is total else 1)
        with gm.lookup(str(out)) as rows:
            found = [rows.get(i * (2 if made.spec.sink.index == ("y",) else 1)) for i in range(100)]
        assert found == [{"id": i, "k": f"k{i % 3}", "y": i * 2} for i in range(100)]


def failing_never(rows: pa.RecordBatchReader, folder: str) -> None:
    Path(folder, "n.txt").write_text(str(sum(b.num_rows for b in rows)))


def test_one_that_was_linked_and_never_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is stopped between linking and publishing, and the function is changed: only the new file is there."""
    out = tmp_path / "out"
    publish = publishing.publish.publish

    def stopped(*args: Any) -> Any:
        raise OSError("stopped")

    monkeypatch.setattr(publishing.publish, "publish", stopped)
    with pytest.raises(RunFailed, match="stopped"):
        job(out, total).run()
    assert (out / "_reduced" / "g1.0" / "total.json").exists()
    monkeypatch.setattr(publishing.publish, "publish", publish)

    def other(rows: pa.RecordBatchReader, folder: str) -> None:
        Path(folder, "other.csv").write_text(str(sum(b.num_rows for b in rows)))

    job(out, other).run()
    assert list(gm.reduced(out)) == ["other.csv"] and gm.verify(out, deep=True).ok


def test_arguments_count(tmp_path: Path) -> None:
    """A partial with another argument, or an object in another state, is another function."""
    for make in (lambda n: functools.partial(named, name=n), Named):
        for name in ("a.txt", "b.txt", "b.txt"):
            job(tmp_path / make.__qualname__, make(name)).run()
            assert list(gm.reduced(tmp_path / make.__qualname__)) == [name]


def named(rows: pa.RecordBatchReader, folder: str, name: str) -> None:
    Path(folder, name).write_text("x")


class Named:
    """The same as an object."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, rows: pa.RecordBatchReader, folder: str) -> None:
        named(rows, folder, self.name)


def test_what_is_refused(tmp_path: Path) -> None:
    """Names that are not there before anything is scored; files that look like rows, and none at all."""
    with pytest.raises(BadJob, match=r"reduce: nowhere:at_all: there is no module 'nowhere'"):
        job(tmp_path / "a", "nowhere:at_all").run()
    with pytest.raises(BadJob, match="reduce is 7, which cannot be called"):
        job(tmp_path / "a", 7)
    with pytest.raises(BadJob, match="reduce but no sink"):
        gm.Job(ROWS, twice, reduce=total)

    def table(rows: pa.RecordBatchReader, folder: str) -> None:
        pq.write_table(rows.read_all(), Path(folder, "all.parquet"))

    with pytest.raises(RunFailed, match=r"wrote all.parquet, which a pattern such as \*\*/\*.parquet would find"):
        job(tmp_path / "a", table).run()
    with pytest.raises(RunFailed, match="wrote no file"):
        job(tmp_path / "a", lambda rows, folder: None).run()
    assert job(tmp_path / "a", total).run().rows_ok == 100


def test_named_in_a_job_file_and_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`reduce: report.py:count`, and --reduce; saved and read again."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(ROWS, "in.parquet")
    Path("mine.py").write_text("def twice(batch):\n    return {'y': batch['id'] * 2}\n")
    Path("report.py").write_text(
        "def count(rows, folder):\n    with open(folder + '/n.txt', 'w') as file:\n"
        "        file.write(str(sum(b.num_rows for b in rows)))\n"
    )
    typed = "apply in.parquet out --fn mine:twice --workers 0 --progress off --reduce report.py:count --save job.yaml"
    assert main(typed.split()) == 0
    assert Path(gm.reduced("out")["n.txt"]).read_text() == "100"
    assert "reduce: report.py:count" in Path("job.yaml").read_text()
    assert main(["run", "job.yaml", "--set", "sink.uri=two", "--workers", "0", "--progress", "off"]) == 0
    assert Path(gm.reduced("two")["n.txt"]).read_text() == "100"
    capsys.readouterr()

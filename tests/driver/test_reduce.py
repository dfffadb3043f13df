"""`reduce=`: the one final file, made of the rows that are published, and published with them."""

from __future__ import annotations

import functools
import json
import os
import sys
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
from gristmill.process.contained import called

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


def test_a_run_counts_the_files_that_it_published(tmp_path: Path) -> None:
    """With those of the index and of reduce: as the next run, which finds nothing to do, counts them."""
    first = job(tmp_path / "out", index=["id"]).run()
    later = job(tmp_path / "out", index=["id"]).run()
    assert later.state == "nothing to do"
    assert (first.files, first.bytes_out) == (later.files, later.bytes_out) and first.files >= 4


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


def leaves(*args: Any) -> None:
    sys.exit(0)


def told(**how: Any) -> Any:
    yield how


async def awaited(*args: Any) -> None:
    raise AssertionError("nobody awaits this")


@pytest.mark.parametrize("what", ["reduce", "audit"])
@pytest.mark.parametrize(
    ("fn", "why"),
    [(leaves, "SystemExit: 0, which would end"), (lambda *given: told(), "it yields"), (awaited, "it is async")],
)
def test_one_that_would_end_the_command(tmp_path: Path, what: str, fn: Any, why: str) -> None:
    """By sys.exit, or whose body nothing runs: it fails, and what is published is what was published."""
    out = tmp_path / "out"
    error = RunFailed if what == "reduce" else gm.GateFailed
    for _ in range(2):
        with pytest.raises(error, match=why):
            gm.Job(ROWS, twice, str(out), workers=0, **{what: fn}).run()
        assert not (out / "_SUCCESS").exists()


def test_a_module_that_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it is imported, as a job, a model or a reduce: exit 2, with the line."""
    monkeypatch.chdir(tmp_path)
    Path("leaving.py").write_text("import sys\nsys.exit(0)\n")
    pq.write_table(ROWS, "rows.parquet")
    apply = ["apply", "rows.parquet", "out", "--fn"]
    named = ["leaving.py:reduce", f"{__name__}:twice"]
    for command in (["run", "leaving.py"], [*apply, named[0]], [*apply, named[1], "--reduce", named[0]]):
        assert main(command) == 2
        assert "SystemExit: 0" in capsys.readouterr().err
    assert not Path("out/_SUCCESS").exists()


def test_one_that_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into its folder, which is removed, and changes the environment: the process stays where it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GM_KEPT", "as it was")

    def moving(rows: pa.RecordBatchReader, folder: str) -> None:
        os.chdir(folder)
        os.environ.pop("GM_KEPT")
        os.environ["GM_NEW"] = "1"
        Path("total.json").write_text("1")

    gm.Job(ROWS, twice, "out", workers=0, reduce=moving).run()
    assert Path.cwd() == tmp_path and os.environ["GM_KEPT"] == "as it was" and "GM_NEW" not in os.environ
    assert Path(gm.reduced("out")["total.json"]).read_text() == "1" and gm.verify("out").ok


def test_what_no_result_can_hold_is_told(tmp_path: Path) -> None:
    """A link to a folder, a name that is no text, a pipe: refused, as files would be lacking; an empty folder."""

    def makes(name: str) -> Any:
        def made(rows: pa.RecordBatchReader, folder: str) -> None:
            Path(folder, "a.txt").write_text("1")
            if name == "empty":
                Path(folder, name).mkdir()
            elif name == "link":
                Path(folder, name).symlink_to(tmp_path)
            elif name == "pipe":
                os.mkfifo(Path(folder, name))
            else:
                Path(os.fsencode(folder).decode(), os.fsdecode(b"\xff")).write_text("1")

        return made

    for name, why in (("link", "a link to a folder"), ("pipe", "neither a file nor a folder"), ("raw", "UTF-8")):
        with pytest.raises(RunFailed, match=why):
            job(tmp_path / "out", makes(name)).run()
    with pytest.warns(gm.GristmillWarning, match="left the folder empty empty"):
        job(tmp_path / "out", makes("empty")).run()
    assert list(gm.reduced(tmp_path / "out")) == ["a.txt"]


def test_vectors_beside_columns_that_change(tmp_path: Path) -> None:
    """With `evolve` appended rows have a column more, and a wider one."""
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()

    def answered(batch: dict[str, Any]) -> dict[str, Any]:
        found = vector(batch)
        return {**found, "more": batch["id"] * 2} if batch["id"].max() >= 100 else found

    def listed(rows: pa.RecordBatchReader, folder: str) -> None:
        Path(folder, "total.json").write_text(json.dumps(rows.read_all().to_pylist()))

    made = job(out, listed, rows=str(source), fn=answered, format="npy", evolve=True)
    pq.write_table(pa.table({"id": pa.array([1, 2], pa.int32())}), source / "0.parquet")
    made.run()
    pq.write_table(pa.table({"id": pa.array([2**33], pa.int64())}), source / "1.parquet")
    made.run(append=True)
    pq.write_table(pa.table({"id": pa.array([300], pa.int64())}), source / "2.parquet")
    made.run(append=True)
    rows = json.loads(Path(gm.reduced(out)["total.json"]).read_text())
    assert [(r["id"], r["more"]) for r in rows] == [(1, None), (2, None), (2**33, 2**34), (300, 600)]
    assert [r["v"][0] for r in rows] == [1.0, 2.0, 2.0**33, 300.0] and gm.verify(out, deep=True).ok


@pytest.mark.parametrize("then", ["same", "none", "append"])
@pytest.mark.parametrize("what", ["reduce", "index"])
def test_files_linked_and_never_published_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, then: str
) -> None:
    """A run is stopped between linking and publishing, of a result that stands or the first one; the next run asks for
    what was there before, or for neither, or appends: nothing is left that no result lists.
    """
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    pq.write_table(ROWS, source / "0.parquet")

    def made(one: Any) -> gm.Job:
        return job(out, one if what == "reduce" else None, str(source), index=() if what == "reduce" else one or ())

    old, new = (total, failing_never) if what == "reduce" else (["id"], ["y"])
    first = then == "none"
    if not first:
        made(old).run()

    def stopped(*args: Any) -> Any:
        raise OSError("stopped")

    for name in ("create", "again"):
        monkeypatch.setattr(publishing.publication, name, stopped)
    with pytest.raises(RunFailed, match="stopped"):
        made(new).run()
    monkeypatch.undo()
    extras = out / ("_reduced" if what == "reduce" else "_index")
    assert not gm.verify(out).ok if not first else any(extras.rglob("*"))
    if then == "append":
        pq.write_table(ROWS.slice(0, 10), source / "1.parquet")
    made(None if first else old).run(append=then == "append")
    assert gm.verify(out, deep=True).ok
    success = json.loads((out / "_SUCCESS").read_text())
    live = {f["name"] for f in [*success["files"], *success.get("index", {"files": []})["files"]]}
    left = {str(p.relative_to(out)) for p in extras.rglob("*") if p.is_file()}
    assert left == {name for name in live if name.startswith(extras.name)}


def test_the_same_result_published_meanwhile(tmp_path: Path) -> None:
    """Another run has published the same rows again, without what this one reduced: that is told."""
    out = tmp_path / "out"
    job(out, None).run()

    def meanwhile(rows: pa.RecordBatchReader, folder: str) -> None:
        publishing.publication.again(publishing.publication.published(str(out)))
        Path(folder, "a.txt").write_text("1")

    with pytest.raises(gm.SinkBusy):
        job(out, meanwhile).run()
    assert gm.reduced(out) == {}
    job(out, total).run()
    assert gm.verify(out, deep=True).ok and said(out)["rows"] == 100


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since before the function was called: that is no fault of its own."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError):
        os.getcwd()
    assert called(lambda: 3) == 3

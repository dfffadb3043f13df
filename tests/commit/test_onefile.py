"""Sinks that are one file: out.parquet, out.jsonl."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.files.disk import LocalFiles


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """Fails for 7 while there is a file named bad."""
    if os.path.exists("bad") and (batch["x"] == 7).any():
        raise ValueError("seven")
    return {"y": batch["x"] * 2}


def other(batch: dict[str, Any]) -> dict[str, Any]:
    """Another job."""
    return {"y": batch["x"] * 3}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with 100 rows in it."""
    monkeypatch.chdir(tmp_path)
    add(tmp_path, 0, 100)
    return tmp_path


def add(folder: Path, first: int, last: int) -> None:
    """Rows from `first` to `last` in a file of their own."""
    (folder / "in").mkdir(exist_ok=True)
    pq.write_table(pa.table({"x": np.arange(first, last)}), folder / "in" / f"{first:04}.parquet")


def job(sink: str, **options: Any) -> gm.Job:
    """All rows of the folder, in this process."""
    return gm.Job("in", doubled, gm.sink(sink, keep="x", **options), workers=0, shard_rows=30)


def rows(path: str) -> list[tuple[int, int]]:
    """What is in a file, by any other reader."""
    if path.endswith(".jsonl"):
        found = [json.loads(line) for line in Path(path).read_text().splitlines()]
    else:
        found = pq.read_table(path).to_pylist()
    assert all(row["y"] == 2 * row["x"] for row in found)
    return [row["x"] for row in found]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_new_appended_and_retried_rows_are_in_the_file(folder: Path, name: str) -> None:
    """All of them, once, in it alone; whoever reads the folder beside it finds nothing else."""
    (folder / "bad").touch()
    report = job(f"made/{name}").run()
    assert (report.sink, report.rows_ok, report.rows_dead) == (f"made/{name}", 99, 1)
    assert sorted(rows(f"made/{name}")) == [x for x in range(100) if x != 7]
    (folder / "bad").unlink()
    add(folder, 100, 150)
    assert job(f"made/{name}").run(append=True).rows_ok == 149
    assert gm.retry_dead(job(f"made/{name}")).rows_dead == 0
    assert sorted(rows(f"made/{name}")) == list(range(150))
    assert [n for n in os.listdir("made") if not n.startswith(".")] == [name]
    status = gm.status(f"made/{name}")
    assert gm.verify(f"made/{name}").ok and (status["state"], Path(status["sink"]).name) == ("done", name)
    assert gm.read(f"made/{name}").to_table().num_rows == 150
    assert gm.apply("made", fn=doubled, workers=0).num_rows == 150
    assert job(f"made/{name}").run(restart=True).rows_ok == 150
    assert rows(f"made/{name}") == list(range(150))


@pytest.mark.parametrize(("at", "how"), [("replace", "again"), ("write_over", "again"), ("replace", "refused")])
def test_a_run_that_ends_before_the_file_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, at: str, how: str
) -> None:
    """The file is the old result until the same job, run again, makes it; it scores nothing again. So does another
    command that is refused.
    """
    job("out.parquet").run()
    add(folder, 100, 150)
    real = getattr(LocalFiles, at)

    def ends(self: LocalFiles, path: str, target: Any) -> None:
        if "onefile" in path:
            raise KeyboardInterrupt
        real(self, path, target)

    with monkeypatch.context() as patched, pytest.raises((KeyboardInterrupt, gm.Interrupted)):
        patched.setattr(LocalFiles, at, ends)
        job("out.parquet").run(append=True)
    assert rows("out.parquet") == list(range(100))
    wrong = gm.verify("out.parquet")
    assert not wrong.ok and "run the job again" in wrong.lines[-1]
    if how == "refused":
        with pytest.raises(gm.PlanChanged):
            gm.Job("in", other, gm.sink("out.parquet", keep="x"), workers=0, shard_rows=30).run()
    else:
        job("out.parquet").run()
    assert sorted(rows("out.parquet")) == list(range(150)) and gm.verify("out.parquet").ok
    assert not list(Path(".out.parquet.gristmill/_gristmill").glob("onefile/*"))


def test_a_file_of_somebody_else_is_left_alone(folder: Path) -> None:
    """Also one that was changed since; with overwrite it is replaced, and a missing one is made again."""
    Path("out.parquet").write_text("mine")
    with pytest.raises(gm.BadJob, match=r"out\.parquet: this file was not written by this sink's runs"):
        job("out.parquet").run()
    assert Path("out.parquet").read_text() == "mine" and not Path(".out.parquet.gristmill").exists()
    job("out.parquet", overwrite=True).run()
    assert rows("out.parquet") == list(range(100))
    Path("out.parquet").unlink()
    assert "is missing" in gm.verify("out.parquet").lines[0]
    job("out.parquet").run()
    assert gm.verify("out.parquet").ok
    Path("out.parquet").unlink()
    Path("out.parquet").write_text("mine")
    assert "another content" in gm.verify("out.parquet").lines[0]
    with pytest.raises(gm.BadJob, match="or was changed since"):
        job("out.parquet").run()


def saved_meanwhile(batch: dict[str, Any]) -> dict[str, Any]:
    """Somebody saves a file under the sink's name while the run scores."""
    if not os.path.exists("once"):
        Path("once").touch()
        Path("out.parquet").write_text("mine")
    return doubled(batch)


@pytest.mark.parametrize("before", [False, True])
def test_a_file_saved_while_the_run_scored_is_left_alone(folder: Path, before: bool) -> None:
    """Whether there was one of ours before or none; what was scored is published, and the next run makes the file."""
    if before:
        job("out.parquet").run()
        add(folder, 100, 120)
    made = gm.Job("in", saved_meanwhile, gm.sink("out.parquet", keep="x"), workers=0, shard_rows=30)
    with pytest.raises(gm.BadJob, match="this file was not written by this sink's runs"):
        made.run(restart=before)
    assert Path("out.parquet").read_text() == "mine"
    with pytest.raises(gm.BadJob, match="this file was not written by this sink's runs"):
        made.run()
    Path("out.parquet").unlink()
    assert made.run().state == "nothing to do"
    assert rows("out.parquet") == list(range(120 if before else 100)) and gm.verify("out.parquet").ok


def test_a_file_that_was_overwritten_once_is_not_ours_for_ever(folder: Path) -> None:
    """Put back with its time, as from a backup, it is refused again."""
    Path("out.parquet").write_text("mine")
    shutil.copy2("out.parquet", "backup")
    job("out.parquet", overwrite=True).run()
    os.replace("backup", "out.parquet")
    with pytest.raises(gm.BadJob, match="or was changed since"):
        job("out.parquet").run()
    assert Path("out.parquet").read_text() == "mine"


def test_a_file_is_not_made_of_itself(folder: Path) -> None:
    """Not even with overwrite, under its own name or through a link: its other columns would be gone."""
    os.symlink("in", "link")
    for sink in ("in/0000.parquet", "link/0000.parquet"):
        for overwrite in (False, True):
            with pytest.raises(gm.BadJob, match="is the source itself, which it would replace: give another name"):
                gm.Job("in/0000.parquet", doubled, gm.sink(sink, overwrite=overwrite), workers=0).run()
            with pytest.raises(gm.BadJob, match=r"is inside source|was not written by this sink"):
                job(sink, overwrite=overwrite).run()
    assert pq.read_table("in/0000.parquet").column_names == ["x"]


def test_an_edit_of_the_file_does_no_harm_to_the_result(folder: Path) -> None:
    """It is a copy: written to in place, and moved away as the error says, it is made again of what was published."""
    for change in (lambda p: p.write_bytes(p.read_bytes().replace(b'"y":40', b'"y":99')),
                   lambda p: p.open("a").write("more\n"), lambda p: p.open("w").close()):  # fmt: skip
        file = Path("out.jsonl")
        job("out.jsonl").run()
        change(file)
        assert not gm.verify("out.jsonl").ok
        with pytest.raises(gm.BadJob, match="move it away"):
            job("out.jsonl").run()
        assert gm.read("out.jsonl").to_table()["y"].to_pylist() == [2 * x for x in range(100)]
        file.rename("mine.jsonl")
        job("out.jsonl").run()
        assert rows("out.jsonl") == list(range(100)) and gm.verify("out.jsonl", deep=True).ok
    (part,) = Path(".out.jsonl.gristmill").glob("merged*")
    part.write_bytes(part.read_bytes().replace(b'"y":40', b'"y":99'))
    Path("out.jsonl").unlink()
    with pytest.raises(gm.CorruptStore, match=r"merged.* is not what was published.* --restart --overwrite"):
        job("out.jsonl").run()
    assert not Path("out.jsonl").exists()
    job("out.jsonl", overwrite=True).run(restart=True)
    assert rows("out.jsonl") == list(range(100)) and gm.verify("out.jsonl").ok


def test_a_file_that_was_copied_or_touched_is_still_the_sink_s(folder: Path) -> None:
    """By its content; a name that leads nowhere is somebody's."""
    job("made/out.parquet").run()
    os.utime("made/out.parquet", (1, 1))
    assert job("made/out.parquet").run().rows_ok == 100
    shutil.copytree("made", "copied")
    add(folder, 100, 150)
    assert job("copied/out.parquet").run(append=True).rows_ok == 150
    assert sorted(rows("copied/out.parquet")) == list(range(150)) and rows("made/out.parquet") == list(range(100))
    Path("link.parquet").symlink_to("nowhere")
    with pytest.raises(gm.BadJob, match="was not written by this sink's runs"):
        job("link.parquet").run()


def test_what_one_file_cannot_be(folder: Path) -> None:
    """In an object store, of another format, in folders, of columns that come and go, an input, a folder."""
    Path("there.parquet").mkdir()
    for sink, options, told in (
        (
            "s3://bucket/out.parquet",
            {},
            r"one file is for local disks: give a folder \(s3://bucket/out.parquet/ is one\)",
        ),
        ("out.parquet", {"format": "jsonl"}, r"give a file named \.jsonl, or a folder"),
        ("out.parquet", {"partition_by": "x"}, "partition_by is for folders"),
        ("out.parquet", {"evolve": True}, "evolve is for folders"),
        ("out.jsonl", {"options": {"compression": "gz"}}, "files of this name are not compressed: give a folder"),
        ("out.csv", {}, r"files of this kind are not written: .* or a folder \(out.csv/ is one\)"),
        ("out.parquet", {"options": None}, "options is None: give a mapping"),
        ("out.parquet", {"row_id": ""}, "row_id is ''"),
        ("in/out.parquet", {}, "is inside source in"),
        ("in/0000.parquet", {}, "this file was not written by this sink's runs"),
        ("there.parquet", {}, "is a folder, and this names one file: a folder of this name is there.parquet/"),
    ):
        with pytest.raises(gm.BadJob, match=told):
            job(sink, **options).run()  # type: ignore[arg-type]
    job("there.parquet/").run()
    for name in ("there.parquet/", "there.parquet"):
        assert gm.read(name).to_table().num_rows == 100 and gm.verify(name).ok


def test_no_rows_are_a_file_without_rows(folder: Path) -> None:
    """With its columns."""
    gm.apply(gm.source("in", where="x < 0"), "none.parquet", fn=doubled, keep="x", workers=0, returns={"y": "int64"},
             gates={"allow_empty": True})  # fmt: skip
    assert pq.read_table("none.parquet").num_rows == 0 and gm.verify("none.parquet").ok


def test_the_file_stays_as_private_as_it_was_made(folder: Path) -> None:
    """What is appended makes a new file, with the permissions of the one before."""
    job("out.parquet").run()
    Path("out.parquet").chmod(0o600)
    add(folder, 100, 150)
    job("out.parquet").run(append=True)
    assert len(rows("out.parquet")) == 150 and Path("out.parquet").stat().st_mode & 0o777 == 0o600

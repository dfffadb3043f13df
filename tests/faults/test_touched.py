"""Source files that were touched, rewritten or put back between two runs and during one: the content decides."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import oracles
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apart import Apart

import gristmill as gm
from gristmill.observe import units
from gristmill.sources.openreaders import Waiting

Write = Callable[[Path, np.ndarray], None]


def rows_of(x: np.ndarray) -> list[dict[str, Any]]:
    """Rows whose text is of one length, whatever x is (0 to 99)."""
    return [{"id": 1000 + i, "x": float(f"{v:02d}.5")} for i, v in enumerate(x.tolist())]


def jsonl(path: Path, x: np.ndarray) -> None:
    """Lines of one length."""
    lines = [f'{{"id": {r["id"]}, "x": {r["x"]:04.1f}}}\n'.replace(": 0", ":  ") for r in rows_of(x)]
    path.write_text("".join(lines))


def csv(path: Path, x: np.ndarray) -> None:
    """The same as columns."""
    path.write_text("id,x\n" + "".join(f"{r['id']},{r['x']:4.1f}\n" for r in rows_of(x)))


def parquet(path: Path, x: np.ndarray) -> None:
    """A file whose footer tells nothing of its values."""
    table = pa.Table.from_pylist(rows_of(x))
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, path, row_group_size=200, **plain)


FORMATS = {"jsonl": jsonl, "csv": csv, "parquet": parquet}
DIVISIBLE = {name: FORMATS[name] for name in ("jsonl", "parquet")}
SOME, OTHER = np.arange(600) % 90, np.arange(600) % 90 + 7


def rewritten(path: Path, write: Write, x: np.ndarray) -> None:
    """Write the file anew, of one size, and set its time back."""
    before = path.stat()
    write(path, x)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def touched(path: Path) -> None:
    """Another time of writing, the same content."""
    os.utime(path, ns=(1_700_000_000_000_000_000, 1_700_000_000_000_000_000))


@pytest.fixture(params=FORMATS)
def source(request: pytest.FixtureRequest, quick: Path) -> tuple[Path, Write]:
    """A file of 600 rows, and how it is written."""
    path = quick / f"a.{request.param}"
    FORMATS[request.param](path, SOME)
    return path, FORMATS[request.param]


divided = pytest.mark.parametrize("source", DIVISIBLE, indirect=True)


def answers(root: Path) -> list[float]:
    """x of the published rows in their order."""
    found: list[float] = gm.read(str(root)).to_table()["x"].to_pylist()
    return found


def run(source: Path, root: Path, fn: str = "scored", args: dict[str, Any] | None = None, **options: Any) -> gm.Report:
    """A job that keeps x, in shards of some 40 rows."""
    return jobs.run(str(source), str(root), fn, args, keep=["id", "x"], workers=0, shard_rows=40, **options)


def part_done(source: str, root: str) -> None:
    """In a process apart: a run that is killed after five shards."""
    harm = {"at": 5, "kind": "kill", "ops": ["link"], "path": "receipts"}
    run(Path(source), Path(root), journal=f"{root}.journal", harm=harm)


def test_fault_80_a_touched_file_of_a_finished_result(source: tuple[Path, Write], quick: Path) -> None:
    """Nothing to do: the file is read again, once, and said to be; the run after that does not read it."""
    path, _ = source
    shards = run(path, quick / "out").shards
    for change in (touched, lambda p: os.link(p, quick / "second name")):
        change(path)
        again = run(path, quick / "out")
        assert again.state == "nothing to do"
        told = units.plural(shards, "committed shard")
        assert f"{path} was touched since it was read: what {told} read of it is read again" in again.notes
        assert run(path, quick / "out").notes == ()
    rewritten(path, source[1], OTHER)
    with pytest.raises(gm.PlanChanged):
        run(path, quick / "out")


def test_fault_50_a_finished_result_whose_file_was_rewritten(source: tuple[Path, Write], quick: Path) -> None:
    """Size and time as they were, other rows: refused, naming the file and what differs; put back, nothing to do."""
    path, write = source
    run(path, quick / "out")
    rewritten(path, write, OTHER)
    for _ in range(2):
        with pytest.raises(gm.PlanChanged, match=rf"{path.name}: it does not hold what shard") as refused:
            run(path, quick / "out")
        assert refused.value.exit_code == 4 and "though its size and time" in str(refused.value)
    rewritten(path, write, SOME)
    assert run(path, quick / "out").state == "nothing to do"
    rewritten(path, write, OTHER)
    report = run(path, quick / "out", verbs={"restart": True})
    assert answers(quick / "out") == [r["x"] for r in rows_of(OTHER)]
    assert report.generation == 2


@pytest.mark.few(1)
@divided
def test_fault_50_a_resume_after_rows_that_were_read_were_rewritten(
    source: tuple[Path, Write], quick: Path, apart: Apart
) -> None:
    """Half of the shards are committed: no old rows beside new ones; with the file put back the run goes on."""
    path, write = source
    killed = apart.run("test_touched:part_done", source=str(path), root=str(quick / "out"))
    assert killed.code == -9, killed.printed
    for x in (OTHER, np.concatenate([[5], SOME[1:]])):
        rewritten(path, write, x)
        with pytest.raises(gm.PlanChanged, match=path.name) as refused:
            run(path, quick / "out")
        assert refused.value.exit_code == 4
    write(path, SOME)  # at another time
    report = run(path, quick / "out")
    assert report.shards_resumed == 5
    assert answers(quick / "out") == [r["x"] for r in rows_of(SOME)]
    assert run(path, quick / "out").state == "nothing to do"


@divided
@pytest.mark.parametrize("back", [True, False])
def test_fault_50_a_resume_after_rows_that_were_not_read_were_rewritten(
    source: tuple[Path, Write], quick: Path, apart: Apart, back: bool
) -> None:
    """What was committed still stands in the file: the rest is read as it is now, and the result is of one file."""
    path, write = source
    killed = apart.run("test_touched:part_done", source=str(path), root=str(quick / "out"))
    assert killed.code == -9, killed.printed
    now = np.concatenate([SOME[:500], OTHER[500:]])
    if back:
        rewritten(path, write, now)
    else:
        write(path, now)
    assert run(path, quick / "out").shards_resumed == 5
    assert answers(quick / "out") == [r["x"] for r in rows_of(now)]
    assert gm.verify(quick / "out", source=True).ok
    assert run(path, quick / "out").state == "nothing to do"


@pytest.mark.few(1)
@divided
def test_a_sample_is_of_all_rows_that_it_was_drawn_from(source: tuple[Path, Write], quick: Path) -> None:
    """Rows that no shard read are rewritten so that other ones would be drawn: another input, run after run. Where the
    same ones are drawn nothing is done.
    """
    path, write = source
    root = quick / "out"

    def drawn(root: Path, **verbs: Any) -> gm.Report:
        rows = gm.source(str(path), where="x < 60", sample=40, seed=1)
        return jobs.run(rows, str(root), "scored", keep=["id", "x"], workers=0, shard_rows=10, verbs=verbs)

    assert drawn(root).rows_ok == 40
    taken = {int(i) - 1000 for i in gm.read(str(root)).to_table()["id"].to_pylist()}
    touched(path)
    assert drawn(root).state == "nothing to do"
    free = np.array([i not in taken for i in range(600)])
    write(path, np.where(free & (SOME < 60), (SOME + 7) % 60, SOME))  # the same rows are below 60
    assert drawn(root).state == "nothing to do"
    write(path, np.where(free & (np.arange(600) < 300), 80, SOME))
    for _ in range(2):
        with pytest.raises(gm.PlanChanged, match="other rows would be selected"):
            drawn(root)
    assert drawn(root, restart=True).rows_ok == 40


def test_fault_50_append_and_retry_after_a_file_was_rewritten(quick: Path) -> None:
    """Touched, they work as ever; rewritten under its old time, what builds on the file's rows is refused."""
    (quick / "in").mkdir()
    path, more = quick / "in" / "a.jsonl", quick / "in" / "b.jsonl"
    jsonl(path, SOME)
    root, args = quick / "out", {"bad": [1003]}
    run(quick / "in", root, args=args)
    touched(path)
    retried = run(quick / "in", root, args=args, verbs={"retry": True})
    assert (retried.rows_ok, retried.rows_dead) == (599, 1)
    jsonl(more, SOME)
    touched(path)
    assert run(quick / "in", root, args=args, verbs={"append": True}).rows_ok == 1198
    jsonl(quick / "in" / "c.jsonl", SOME)
    for changed in (path, more):
        before = changed.read_bytes()
        rewritten(changed, jsonl, OTHER)
        for verb in ("append", "retry"):
            with pytest.raises(gm.PlanChanged, match=changed.name):
                run(quick / "in", root, args=args, verbs={verb: True})
        changed.write_bytes(before)
    assert run(quick / "in", root, args=args, verbs={"append": True}).rows_ok == 1797


@pytest.mark.few(1)
@divided
@pytest.mark.parametrize("workers", [0, 2])
def test_fault_80_a_file_touched_during_the_run(source: tuple[Path, Write], quick: Path, workers: int) -> None:
    """It holds what was read of it: the run says so and goes on."""
    path, _ = source
    args = {"path": str(path), "at": 1170, "marker": str(quick / "marker")}
    report = jobs.run(
        str(path), str(quick / "out"), "touches", args, workers=workers, shard_rows=20, batch_rows=20, keep=["x"]
    )
    assert answers(quick / "out") == [r["x"] for r in rows_of(SOME)]
    assert any("goes on" in note and "modified 2017-07-14" in note for note in report.notes), report.notes
    assert report.rows_in == 600


@divided
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.few(2)
def test_fault_50_a_file_rewritten_during_the_run(source: tuple[Path, Write], quick: Path, workers: int) -> None:
    """Other rows under the old size and time: nothing is published; put back, the run goes on."""
    path, write = source
    other = quick / "other"
    write(other, OTHER)
    before = path.read_bytes()
    args = {"folder": str(quick), "name": path.name, "by": str(other), "at": 1170, "marker": str(quick / "marker")}
    with pytest.raises(gm.SourceChanged, match=path.name) as failed:
        jobs.run(
            str(path), str(quick / "out"), "rewrites", args, workers=workers, shard_rows=20, batch_rows=20, keep=["x"]
        )
    assert failed.value.exit_code == 4
    assert not (quick / "out" / "_SUCCESS").exists()
    path.write_bytes(before)
    jobs.run(str(path), str(quick / "out"), "rewrites", args, workers=workers, shard_rows=20, batch_rows=20, keep=["x"])
    assert answers(quick / "out") == [r["x"] for r in rows_of(SOME)]


def test_verify_source_names_what_is_not_what_was_read(source: tuple[Path, Write], quick: Path) -> None:
    """Every shard's rows are read again: of the sink alone, and through its job; changed, gone, cut short."""
    path, write = source
    shards = run(path, quick / "out").shards
    job = jobs.job(str(path), str(quick / "out"), "scored", keep=["id", "x"])
    for sink_or_job in (quick / "out", job):
        assert gm.verify(sink_or_job, source=True).ok
    rewritten(path, write, np.concatenate([SOME[:599], [3]]))
    assert gm.verify(quick / "out").ok
    for sink_or_job in (quick / "out", job):
        verdict = gm.verify(sink_or_job, source=True)
        assert not verdict.ok
        assert verdict.lines == (f"{path}: it does not hold what shard {shards - 1} of generation 1 read of it",)
    write(path, SOME)
    assert gm.verify(quick / "out", source=True).ok
    path.unlink()
    verdict = gm.verify(quick / "out", source=True)
    assert not verdict.ok and "gone" in verdict.lines[0]


@pytest.mark.long
@pytest.mark.parametrize("steps", [False, True])
def test_digests_travel_from_wherever_rows_are_read(quick: Path, steps: bool) -> None:
    """A flat_map, a condition, several files a shard, processes for steps: what shards read is read again the same."""
    import victims

    source = victims.write_input(str(quick / "in"), 200, files=7)
    options: dict[str, Any] = {"workers": 1, "shard_rows": 64, "batch_rows": 16}
    if steps:
        options["engine"] = {"workers": 1, "steps_workers": 2}
        del options["workers"]
    spread = gm.source(source, where="id % 3 <> 0")
    jobs.run(spread, str(quick / "out"), "scored", steps=[gm.flat_map(victims.twice)], **options)
    receipts = [json.loads(p.read_text()) for p in sorted(quick.glob("out/_gristmill/g*/receipts/*.json"))]
    read = [digest for receipt in receipts for digest in receipt["read"]]
    assert len(read) >= 7 and all(len(d) == 32 for d in read)
    assert gm.verify(quick / "out", source=True).ok
    assert len(oracles.ok_ids(str(quick / "out"))) > 0


@pytest.mark.parametrize("form", ["zip", "tar"])
@pytest.mark.parametrize("name", ["", "a.jsonl", "*.jsonl", "d/", "d/b.jsonl"])
@pytest.mark.few(7)
def test_an_archive_that_was_replaced_by_one_of_the_same_sizes(tmp_path: Path, form: str, name: str) -> None:
    """What stands in it is read again where it tells no time, and is another input where it holds something else."""

    def packed(first: int) -> None:
        with zipfile.ZipFile(tmp_path / "d.zip", "w") as zipped, tarfile.open(tmp_path / "d.tar", "w") as tarred:
            for inner in ("a.jsonl", "d/b.jsonl"):
                text = "".join(json.dumps({"id": first + i}) + "\n" for i in range(5)).encode()
                zipped.writestr(zipfile.ZipInfo(inner), text)
                about = tarfile.TarInfo(inner)
                about.size = len(text)
                tarred.addfile(about, io.BytesIO(text))

    packed(10)
    source = gm.source(f"{form}://{name}::file://{tmp_path}/d.{form}", format="jsonl")
    job = gm.Job(source, lambda b: {"y": b["id"] * 2}, gm.sink(tmp_path / "out"), workers=0)
    rows = 10 if name == "" else 5
    assert job.run().rows_ok == rows
    assert gm.verify(job, source=True).ok
    packed(10)
    assert job.run().state == "nothing to do"
    packed(50)
    assert not gm.verify(job, source=True).ok
    with pytest.raises(gm.PlanChanged, match="does not hold what shard"):
        job.run()
    job.run(restart=True)
    assert sorted(set(gm.read(job).to_table()["y"].to_pylist())) == [100, 102, 104, 106, 108]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_opens_its_own_files(tmp_path: Path) -> None:
    """One that its parent has left open stands where that has read to, and moves on as either reads."""
    waiting: Waiting[Any] = Waiting(2)
    (tmp_path / "a").write_text("one\ntwo\n")
    file = io.FileIO(tmp_path / "a")
    assert file.read(4) == b"one\n"
    waiting.put("a", file)
    child = os.fork()
    if not child:
        own = waiting.take("a", lambda: io.FileIO(tmp_path / "a"))
        os._exit(0 if own.read() == b"one\ntwo\n" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert waiting.take("a", lambda: io.FileIO(tmp_path / "a")).read() == b"two\n"
    file.close()


def test_many_touched_files_are_told_in_one_line(tmp_path: Path) -> None:
    """As the members of an archive are, or a folder that was copied."""
    (tmp_path / "in").mkdir()
    for n in range(7):
        pq.write_table(pa.table({"id": [n]}), tmp_path / "in" / f"{n}.parquet")

    def night() -> gm.Report:
        return gm.apply(str(tmp_path / "in"), str(tmp_path / "out"), fn=same, workers=0)

    night()
    for path in (tmp_path / "in").iterdir():
        touched(str(path))
    (note,) = night().notes
    assert note.endswith("and 6 other files were touched since they were read: what committed shards read of them is "
                         "read again")  # fmt: skip


def same(batch: dict[str, Any]) -> dict[str, Any]:
    """What it is given."""
    return {"same": batch["id"]}

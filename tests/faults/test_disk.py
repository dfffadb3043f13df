"""Faults of disks and stores: 5 to 7, 25, 28 to 30, 34, 36. Full disks are real ones: tiny file systems in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import oracles
import processes
import pyarrow.parquet as pq
import pytest
import recording
import victims

import gristmill as gm
from gristmill.commit.generation import generations
from gristmill.driver import runrecord
from gristmill.driver.views import stands
from gristmill.files.disk import LocalFiles
from gristmill.fingerprint.diskcache import write_whole
from gristmill.observe.facts import Run

Mount = Callable[..., str]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a small file system in memory, or the same anew with other options; skips where that is not allowed."""
    folder = tmp_path / "small"
    folder.mkdir()

    def mounted(options: str) -> str:
        remount = "remount," if os.path.ismount(folder) else ""
        command = ["mount", "-t", "tmpfs", "-o", remount + options, "none", str(folder)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a small file system is not allowed here")
        return str(folder)

    yield mounted
    subprocess.run(["umount", str(folder)], capture_output=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_fault_05_the_disk_is_full(numbers: str, quick: Path, mount: Mount, workers: int) -> None:
    """A disk that is full while rows are written: exit 1, said so; with more room the same command finishes the job."""
    root = os.path.join(mount("size=1m"), "out")
    arguments: dict[str, Any] = {"args": {"width": 1500}, "shard_rows": 20, "workers": workers}
    with pytest.raises(gm.RunFailed, match="No space left") as failed:
        jobs.run(numbers, root, "big", **arguments)
    assert failed.value.exit_code == 1
    oracles.nothing_partial(root)
    how = stands(root)["standing"]
    assert how["words"] == "not finished; the last run failed" and "No space left" in how["why"], how
    mount("size=64m")
    assert jobs.run(numbers, root, "big", **arguments).rows_ok == 200
    oracles.nothing_lost_nothing_twice(root, list(range(200)))


def test_fault_05_the_disk_is_full_while_dead_letters_are_written(quick: Path, mount: Mount) -> None:
    """Dead letters that do not fit on the disk stop the run; they are not lost with it."""
    rows = victims.table(200).append_column("text", [[os.urandom(15_000).hex() for _ in range(200)]])
    pq.write_table(rows, quick / "in.parquet")
    root = os.path.join(mount("size=1m"), "out")
    arguments: dict[str, Any] = {"args": {"bad": 100}, "shard_rows": 50, "workers": 1, "batch_rows": 50}
    with pytest.raises(gm.RunFailed, match="No space left"):
        jobs.run(str(quick / "in.parquet"), root, "fails_big", **arguments)
    mount("size=64m")
    report = jobs.run(str(quick / "in.parquet"), root, "fails_big", **arguments)
    assert (report.rows_ok, report.rows_dead) == (100, 100)
    oracles.nothing_lost_nothing_twice(root, list(range(200)))


@pytest.mark.parametrize(
    ("sink", "harm"),
    [
        ("out", {"ops": ["create"], "path": "settled.json"}),
        ("out", {"ops": ["create"], "path": "/_SUCCESS"}),
        ("out.parquet", {"ops": ["link"], "path": "/out.parquet"}),
    ],
)
def test_fault_05_the_disk_is_full_once_the_result_is_published(quick: Path, sink: str, harm: dict[str, Any]) -> None:
    """The error (injected) says that it is, and the next command does the rest; before that it says nothing of it."""
    source = victims.write_input(str(quick / "in"), 40)
    root = str(quick / sink)
    for path, published in (("/receipts/", False), (harm["path"], True)):
        full = {"at": 0, "kind": "ENOSPC", "times": 99, "ops": harm["ops"] if published else ["create"], "path": path}
        with pytest.raises(gm.RunFailed, match="No space left") as failed:
            jobs.run(source, root, "scored", journal=str(quick / f"journal{published}"), harm=full, workers=0)
        assert ("the result is published, and the next run does what is left" in str(failed.value)) == published
        assert ("also the file of that name" in str(failed.value)) == (published and sink.endswith(".parquet"))
    assert gm.read(root).count_rows() == 40
    assert jobs.run(source, root, "scored", workers=0).state == "nothing to do"
    assert gm.verify(root).ok


def test_fault_05_how_a_run_ended_is_known_without_room_for_it(quick: Path, mount: Mount) -> None:
    """In the place of the record that it has, else on this machine, from where the next run takes it."""
    root, files = os.path.join(mount("size=256k"), "out"), LocalFiles()
    one = Run(run="one", generation=1, kind="run", state="running", started=1000.0)
    how = replace(one, state="failed", exit_code=1, error="the disk is full " * 20, notes=("a note",) * 500)
    claim = Path(root, "_gristmill", "generations", "0001.json")
    for written in (True, False):
        runrecord.begun(root, files, one)
        claim.parent.mkdir(exist_ok=True)
        claim.touch()
        folder = Path(runrecord.folder_of(root))
        if not written:
            for path in folder.iterdir():
                path.unlink()
        with open(os.path.join(root, "other"), "wb", buffering=0) as other, suppress(OSError):
            while True:
                other.write(b"x" * 4096)
        runrecord.ended(root, files, how)
        assert len(list(folder.iterdir())) == written
        assert runrecord.last(root, files, "unfinished") == replace(how, notes=())
        if not written:  # of a sink that is gone by now, with another one in its place
            claim.unlink()
            assert runrecord.last(root, files, "empty") is None
            claim.touch()
        os.remove(os.path.join(root, "other"))
    assert runrecord.begun(root, files, replace(one, run="two", started=2000.0)) == []
    assert [(run.run, run.state) for run in runrecord.listed(root, files)] == [("one", "failed"), ("two", "running")]


def test_fault_05_nothing_is_left_of_a_note_that_does_not_fit(quick: Path, mount: Mount) -> None:
    """Of those that are written without a sync, in the sink and in the cache: what stood there stays."""
    folder = Path(mount("size=64k"))
    files = LocalFiles()
    files.note(str(folder / "note.json"), b"before")
    write_whole(folder / "known.json", "before")
    for write in (files.note, lambda path, data: write_whole(Path(path), data.decode())):
        with pytest.raises(OSError, match="No space left"):
            write(str(folder / "note.json"), b"x" * 200_000)
    assert {p.name: p.read_text() for p in folder.iterdir()} == {"note.json": "before", "known.json": "before"}


@pytest.mark.long
@pytest.mark.parametrize(("error", "first"), [("ENOSPC", 0), ("EIO", 7)])
def test_fault_05_any_operation_fails(quick: Path, error: str, first: int) -> None:
    """An error of the file layer (injected) at every seventh operation, of the two kinds in turns: exit 1 or healed;
    then all oracles hold.
    """
    source = victims.write_input(str(quick / "in"), 40)
    arguments: dict[str, Any] = {"args": {"bad": [3]}, "shard_rows": 20, "workers": 0}
    failed = healed = 0
    for at in range(first, 200, 14):
        root, journal = str(quick / f"out{at}"), str(quick / f"journal{at}")
        try:
            jobs.run(source, root, "scored", journal=journal, harm={"at": at, "kind": error}, **arguments)
            healed += 1
        except gm.RunFailed:
            failed += 1
        except gm.BadJob as e:  # the first look at the sink
            assert "cannot be written" in str(e)
        oracles.nothing_partial(root)
        jobs.run(source, root, "scored", **arguments)
        oracles.nothing_lost_nothing_twice(root, list(range(40)))
        oracles.tidy(root)
    assert failed > 1
    assert healed > 1


def test_fault_06_a_sink_that_cannot_be_written(numbers: str, quick: Path, mount: Mount) -> None:
    """Refused before the model is loaded."""
    root = os.path.join(mount("size=1m,ro"), "out")
    marker = str(quick / "loaded")
    with pytest.raises(gm.BadJob, match="cannot be written"):
        jobs.run(numbers, root, "Loaded", {"marker": marker}, workers=0)
    assert not os.path.exists(marker)


def test_fault_07_a_failed_fsync_is_never_repeated(quick: Path) -> None:
    """fsync that fails (injected): a new attempt writes a new file, and the old one is not synced again."""
    source = victims.write_input(str(quick / "in"), 40)
    root, journal = str(quick / "out"), str(quick / "journal")
    harm = {"at": 1, "kind": "EIO", "ops": ["sync"], "path": "/work/part-"}
    report = jobs.run(source, root, "scored", journal=journal, harm=harm, workers=0, shard_rows=10)
    assert report.rows_ok == 40
    created = {
        o["path"]: o["inode"] for o in recording.operations(journal) if o["op"] == "create" and "/work/" in o["path"]
    }
    synced = {o["inode"] for o in recording.operations(journal) if o["op"] == "sync"}
    lost = [p for p, inode in created.items() if inode not in synced]
    assert len(lost) == 1, "the file whose sync failed"
    assert sum(os.path.basename(lost[0]).split(".")[0] in p for p in created) == 2, "and one in its place"
    oracles.nothing_lost_nothing_twice(root, list(range(40)))


@pytest.mark.long
@pytest.mark.parametrize("jump", [86_400, -86_400])
def test_fault_25_the_clock_jumps_a_day(numbers: str, quick: Path, jump: int) -> None:
    """Wall clocks of driver and workers jump: nothing times out, nobody is blamed, the ETA stays sane."""
    (quick / "site").mkdir()
    (quick / "site" / "sitecustomize.py").write_text(
        f"import time\nreal, begun = time.time, time.monotonic()\n"
        f"time.time = lambda: real() + ({jump} if time.monotonic() - begun > 1.0 else 0)\n"
    )
    environment = {"PYTHONPATH": os.pathsep.join([str(quick / "site"), *filter(None, sys.path)])}
    root = str(quick / "out")
    running = processes.start(
        "jobs:run", env=environment, source=numbers, sink=root, fn="slow", args={"seconds": 0.2}, workers=2,
        shard_rows=10, batch_timeout=5.0,
    )  # fmt: skip
    processes.until(lambda: processes.receipts_in(root) >= 8)
    eta = gm.status(root).get("eta")
    printed, _ = running.communicate(timeout=60)
    assert running.returncode == 0, printed
    assert eta is None or 0 <= eta < 60
    oracles.nothing_lost_nothing_twice(root, list(range(200)))
    assert oracles.dead_ids(root) == []


@pytest.mark.long
def test_fault_28_code_changed_between_runs(numbers: str, quick: Path) -> None:
    """A stopped run is not resumed with other code: exit 4, and the difference names it."""
    folder = quick / "work"
    folder.mkdir()
    code = "def score(batch):\n    return {'y': batch['x'] * 2}\n"
    (folder / "usercode.py").write_text(code)
    line = [sys.executable, "-m", "gristmill", "apply", numbers, str(quick / "out"), "--fn", "usercode:score"]
    assert subprocess.run(line, cwd=folder, capture_output=True).returncode == 0
    (folder / "usercode.py").write_text(code.replace("2", "3"))
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 4
    assert "usercode" in done.stderr
    assert "Traceback" not in done.stderr


def unfinished(numbers: str, quick: Path) -> tuple[str, dict[str, Any]]:
    """A run that stopped after some shards."""
    root, marker = str(quick / "out"), str(quick / "broken")
    arguments: dict[str, Any] = {
        "args": {"marker": marker, "after": 8},
        "shard_rows": 10,
        "workers": 0,
        "batch_rows": 10,
    }
    victims._calls[0] = 0
    with pytest.raises(gm.RunFailed):
        jobs.run(numbers, root, "breaks", **arguments)
    os.unlink(marker)
    victims._calls[0] = -1000
    return root, arguments


@pytest.mark.long
def test_fault_29_torn_receipts(numbers: str, quick: Path) -> None:
    """Receipts that are cut off, empty or changed: their shards are done again, their receipts superseded."""
    root, arguments = unfinished(numbers, quick)
    folder = Path(generations(root)[0].receipts)
    torn = sorted(folder.glob("*.json"))[:3]
    torn[0].write_bytes(torn[0].read_bytes()[:50])
    torn[1].write_bytes(b"")
    torn[2].write_text(torn[2].read_text().replace('"rows": 10', '"rows": 11'))
    report = jobs.run(numbers, root, "breaks", **arguments)
    assert report.rows_in == 200
    assert all(p.with_suffix("").with_suffix(".1.json").exists() for p in torn)
    oracles.nothing_lost_nothing_twice(root, list(range(200)))
    oracles.tidy(root)


@pytest.mark.long
@pytest.mark.parametrize("which", ["plan.json", "shards.*.arrow"])
def test_fault_29_a_torn_plan(numbers: str, quick: Path, which: str) -> None:
    """A plan that is not what its checksum says is refused, naming the file; a restart begins anew."""
    root, arguments = unfinished(numbers, quick)
    path = next(Path(generations(root)[0].folder).glob(which))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(gm.CorruptStore, match=path.name) as refused:
        jobs.run(numbers, root, "breaks", **arguments)
    assert refused.value.exit_code == 1
    assert jobs.run(numbers, root, "breaks", verbs={"restart": True}, **arguments).rows_in == 200
    oracles.nothing_lost_nothing_twice(root, list(range(200)))


@pytest.mark.long
def test_fault_30_ten_runs_race_for_one_sink(numbers: str, quick: Path) -> None:
    """One wins; the others exit 75 and name it, or find nothing to do. There is one result."""
    root = str(quick / "out")
    arguments: dict[str, Any] = {"source": numbers, "sink": root, "fn": "slow", "args": {"seconds": 0.2}}
    racers = [processes.start("jobs:run", **arguments, workers=1, shard_rows=20) for _ in range(10)]
    ended = [(r.communicate(timeout=120)[0], r.returncode) for r in racers]
    assert {code for _, code in ended} <= {0, 75}
    assert sum(code == 0 for _, code in ended) >= 1
    busy = [printed for printed, code in ended if code == 75]
    assert busy
    assert all("process " in printed or "name is not known" in printed for printed in busy)
    oracles.nothing_lost_nothing_twice(root, list(range(200)))
    oracles.tidy(root)


@pytest.mark.long
def test_fault_30_without_the_lease_too(numbers: str, quick: Path) -> None:
    """Safety does not rest on the lease: with its file taken away under three runs at once, those that see it stop, and
    there is still one result.
    """
    root = str(quick / "out")
    arguments: dict[str, Any] = {"source": numbers, "sink": root, "fn": "slow", "args": {"seconds": 0.05}}
    racers, lock = [], Path(root, "_gristmill", "lock")
    for _ in range(3):
        racers.append(processes.start("jobs:run", **arguments, workers=1, shard_rows=10, batch_rows=5))
        processes.until(lambda: lock.exists() and lock.read_text(), 30)
        lock.unlink()
    ended = [(r.communicate(timeout=120)[0], r.returncode) for r in racers]
    assert {code for _, code in ended} <= {0, 1, 75}, ended
    jobs.run(**arguments, workers=0, shard_rows=10, batch_rows=5)
    oracles.nothing_lost_nothing_twice(root, list(range(200)))
    oracles.tidy(root)


def test_fault_34_files_of_another_making(numbers: str, quick: Path) -> None:
    """A sink that holds files of others is refused without overwrite; with it they are left alone."""
    root = quick / "out"
    root.mkdir()
    (root / "notes.parquet").write_bytes(b"mine")
    with pytest.raises(gm.BadJob, match=r"notes\.parquet"):
        jobs.run(numbers, str(root), "scored", workers=0)
    job = gm.Job(numbers, gm.model(victims.scored), gm.sink(str(root), keep=["id"], overwrite=True), workers=0)
    assert job.run().rows_ok == 200
    assert (root / "notes.parquet").read_bytes() == b"mine"


def test_fault_36_published_parts_deleted_or_changed(numbers: str, quick: Path) -> None:
    """verify names each part that is gone, cut off or has one bit changed, and nothing else."""
    root = str(quick / "out")
    jobs.run(numbers, root, "scored", {"bad": [3]}, workers=0, shard_rows=40)
    parts = sorted(Path(root).glob("*.parquet"))
    assert gm.verify(root).ok
    parts[0].unlink()
    data = bytearray(parts[1].read_bytes())
    data[len(data) // 2] ^= 1
    parts[1].write_bytes(data)
    parts[2].write_bytes(parts[2].read_bytes()[:-9])
    letters = next(Path(root, "_dead").glob("*.jsonl"))
    letters.unlink()
    verdict = gm.verify(root)
    assert not verdict.ok
    assert len(verdict.lines) == 4
    for path in (*parts[:3], letters):
        assert any(path.name in line for line in verdict.lines)

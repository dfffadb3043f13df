"""Files that the code itself writes while it runs, where its arguments name them or a folder that they are in."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm

CAME = "taken for written by the code"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Forty rows in a file."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"x": range(40)}), tmp_path / "in" / "a.parquet")
    return tmp_path / "in"


def logging(batch: dict[str, Any], log: str) -> dict[str, Any]:
    """Doubles, and adds to the run's own log."""
    with open(log, "a") as file:
        file.write('{"called": true}\n')
    return {"y": batch["x"] * 2}


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_run_s_own_log_may_be_an_argument(rows: Path, tmp_path: Path, workers: int, there: bool) -> None:
    """It grows before each commit, of this run and of the next, and is not compared."""
    log = tmp_path / "run.jsonl"
    if there:
        log.write_text('{"of": "yesterday"}\n')
    model, out = gm.model(logging, log=str(log)), str(tmp_path / "out")
    job = gm.Job(str(rows), model, out, workers=workers, log=str(log), shard_rows=5, batch_rows=5)
    report = job.run()
    assert (report.rows_ok, report.notes) == (40, ())
    assert job.run().state == "nothing to do"
    pq.write_table(pa.table({"x": range(5)}), rows / "b.parquet")
    assert job.run(append=True).rows_ok == 45
    assert log.read_text().count("called") >= 9 and '"event"' in log.read_text()


def scratching(batch: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Doubles, and leaves weights and a configuration in the folder, others in each call."""
    os.makedirs(scratch, exist_ok=True)
    for name in ("part-{}.bin", "config-{}.json", "note-{}.txt"):
        free = next(p for n in itertools.count() if not (p := Path(scratch, name.format(n))).exists())
        free.write_text("x")
    return {"y": batch["x"] * 2}


@pytest.mark.few(2)
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_scratch_folder_is_no_part_of_the_model(rows: Path, tmp_path: Path, workers: int, there: bool) -> None:
    """Empty or not there at first; whatever comes into it, runs end and go on, and it is said once."""
    scratch = tmp_path / "scratch"
    if there:
        scratch.mkdir()
    model, out = gm.model(scratching, scratch=str(scratch)), str(tmp_path / "out")
    job = gm.Job(str(rows), model, out, workers=workers, shard_rows=5, batch_rows=5)
    report = job.run()
    assert report.rows_ok == 40 and len(list(scratch.iterdir())) >= 24
    assert [CAME in note and str(scratch) in note for note in report.notes] == [True]
    assert job.run().state == "nothing to do"
    pq.write_table(pa.table({"x": range(5)}), rows / "b.parquet")
    report = job.run(append=True)
    assert report.rows_ok == 45 and not any(CAME in note for note in report.notes)


class Caching:
    """Multiplies by what a model folder says, and keeps caches in that folder; dies once, so that another begins."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder.removesuffix("*.bin"))
        self.factor = int((self.folder / "model.bin").read_text())

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        (self.folder / "below").mkdir(exist_ok=True)
        for name in ("tokens.db-wal", "below/cache.bin", "cache.bin"):
            with open(self.folder / name, "a") as file:
                file.write("x")
        if (batch["x"] == 22).any() and not (died := self.folder / "died.bin").exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"y": batch["x"] * self.factor}


@pytest.mark.few(1)
@pytest.mark.parametrize("given", ["{}", "{}/", "m", "{}/*.bin"])
def test_what_comes_into_a_model_folder_is_no_part_of_it(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """No run is stopped by it, nor a worker that starts later; it is said once; what else changes there is refused."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.bin").write_text("3")
    monkeypatch.chdir(tmp_path)
    model, out = gm.model(Caching, folder=given.format(folder)), str(tmp_path / "out")
    job = gm.Job(str(rows), model, out, workers=1, shard_rows=5, batch_rows=5)
    report = job.run()
    assert report.read().to_table()["y"].to_pylist() == [3 * x for x in range(40)]
    assert [CAME in note and "cache.bin" in note and "model.bin" not in note for note in report.notes] == [True]
    assert {p.name for p in folder.iterdir()} > {"model.bin", "tokens.db-wal", "died.bin", "cache.bin"}
    assert job.run().state == "nothing to do"
    pq.write_table(pa.table({"x": range(5)}), rows / "b.parquet")
    report = job.run(append=True)
    assert report.rows_ok == 45 and not any(CAME in note for note in report.notes)
    (folder / "other.bin").write_text("")
    with pytest.raises(gm.PlanChanged, match=r"file .*m.* changed \(.*move away what has been added"):
        job.run()
    (folder / "other.bin").unlink()
    assert job.run().state == "nothing to do"
    (folder / "model.bin").write_text("4")
    with pytest.raises(gm.PlanChanged, match=r"file .*m.* changed"):
        job.run()
    assert job.run(restart=True).read().to_table()["y"].to_pylist() == [4 * x for x in (*range(40), *range(5))]


@pytest.mark.long
def test_a_killed_run_goes_on_though_files_came_into_a_model_folder(rows: Path, tmp_path: Path) -> None:
    """What its code had written there is noted as it goes, and none of it counts for the run that goes on."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.bin").write_text("3")
    script = tmp_path / "job.py"
    script.write_text(
        "import os, time, gristmill as gm\n"
        "class Caching:\n"
        "    def __init__(self, folder):\n"
        "        self.folder = folder\n"
        "    def __call__(self, batch):\n"
        "        last, died = batch['x'].max() == 39, os.path.join(self.folder, 'died.bin')\n"
        "        if last and not os.path.exists(died):\n"
        "            open(died, 'w').close()\n"
        "            while not (os.path.exists(NOTED) and 'died.bin' in open(NOTED).read()):\n"
        "                time.sleep(0.1)\n"
        "            os.kill(os.getppid(), 9)\n"
        "            time.sleep(60)\n"
        "        return {'y': batch['x'] * 3}\n"
        f"NOTED = {str(tmp_path / 'out' / '_gristmill' / 'written.json')!r}\n"
        f"job = gm.Job({str(rows)!r}, gm.model(Caching, folder={str(folder)!r}), {str(tmp_path / 'out')!r},\n"
        "             workers=1, shard_rows=5, batch_rows=5)\n"
        "if __name__ == '__main__':\n"
        "    print(job.run().rows_ok)\n"
    )
    killed = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (again.returncode, again.stdout) == (0, "40\n"), again.stderr


def counted(folder: str, x: int) -> int:
    """Multiplies by what a model folder says, and notes the call in a file of its own there."""
    with open(Path(folder, f"cache{x}.bin"), "a") as file:
        file.write("x")
    return x * int(Path(folder, "model.bin").read_text())


def test_a_checkpoint_holds_though_files_came_into_a_model_folder(tmp_path: Path) -> None:
    """What the function wrote there is no part of the key; the weights are."""
    folder, kept = tmp_path / "m", str(tmp_path / "kept")
    folder.mkdir()
    (folder / "model.bin").write_text("3")
    scored = functools.partial(counted, str(folder))
    for _ in range(2):
        assert gm.map(scored, [1, 2], checkpoint=kept) == [3, 6]
    assert (folder / "cache1.bin").read_text() == "x"
    (folder / "model.bin").write_text("4")
    assert gm.map(scored, [1, 2], checkpoint=kept) == [4, 8]

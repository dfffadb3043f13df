"""Sinks, checkpoints and detached maps that an earlier version has written are read, verified and gone on with: one
folder a version, made by make.py, copied to another place first, where files have other times and inodes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.cli.app import main
from gristmill.files.document import seal, unseal

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.iterdir() if path.name[0].isdigit())
MODULES = ("scoring", "rating")  # of the jobs; other tests have modules of these names
BAD, DEADLY = 3, 100
SOURCES = {"appended": range(30), "given-up": range(20), "unfinished": range(120)}
FINISHED = ("parquet", "jsonl", "npy", "partitioned", "appended", "given-up")
FOLDERS = {"appended": "in-daily", "given-up": "in-growing"}
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kept jobs name their sources by /proc/self/cwd")
pytestmark = linux


@pytest.fixture(params=VERSIONS)
def moved(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a version in another place, which is the current one; its modules are those that are imported."""
    folder = tmp_path / "elsewhere"
    shutil.copytree(HERE / request.param, folder, copy_function=shutil.copy)  # without times
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for name in MODULES:
        sys.modules.pop(name, None)
    yield folder
    for name in MODULES:
        sys.modules.pop(name, None)


def job(name: str, workers: int = 0) -> gm.Job:
    """The job of a kept sink."""
    return gm.load_job(f"{name}.yaml", sets=[f"engine.workers={workers}"])


def rows(sink: str) -> list[int]:
    """Which rows are published, by number; of an npy sink also by its vectors."""
    if not sink.endswith("npy"):
        return sorted(gm.read(sink).to_table(columns=["n"])["n"].to_pylist())
    named = dict.fromkeys(pq.read_table(f"{sink}/manifest.parquet")["output_path"].to_pylist())
    vectors = np.concatenate([np.load(f"{sink}/{name}") for name in named])
    assert vectors[:, 1:].tolist() == [[-1.0, 0.0]] * len(vectors)
    return sorted((vectors[:, 0] - 0.5).astype(int).tolist())


def dead(sink: str) -> list[int]:
    """Which rows are dead letters."""
    return sorted(json.loads(payload)["n"] for payload in gm.dead(sink)["payload"].to_pylist())


def scored(numbers: Any, bad: int = BAD) -> list[int]:
    """Those that are scored."""
    return [n for n in numbers if n % 7 != bad]


def failed(numbers: Any) -> list[int]:
    """Those that are not."""
    return [n for n in numbers if n % 7 == BAD]


@pytest.mark.parametrize("name", FINISHED)
def test_results_are_read_and_verified(name: str, moved: Path) -> None:
    """Rows, dead letters and state are those that were published; every file, value and source row is as it was."""
    sink, numbers = f"sinks/{name}", SOURCES.get(name, range(40))
    assert rows(sink) == scored(numbers)
    assert dead(sink) == failed(numbers)
    assert gm.status(sink)["state"] == "done"
    verdict = gm.verify(sink, deep=True, source=True)
    assert verdict.ok, verdict.lines
    if name not in ("npy", "jsonl"):
        table = gm.read(sink).to_table(columns=["n", "y", "word"])
        assert table["y"].to_pylist() == [2 * n + 1 for n in table["n"].to_pylist()]
        assert table["word"].to_pylist() == [f"ROW {n}" for n in table["n"].to_pylist()]


@pytest.mark.parametrize("name", FINISHED[:-1])
def test_a_finished_job_has_nothing_to_do_and_is_added_to(name: str, moved: Path) -> None:
    """The same job runs no row again, though all files have other times; a new file is appended."""
    report = job(name).run()
    assert (report.state, report.rows_run) == ("nothing to do", 0)
    first = next((moved / FOLDERS.get(name, "in")).glob("0.jsonl")).read_text().splitlines()[:10]
    more = [{**json.loads(line), "n": 200 + number} for number, line in enumerate(first)]
    (moved / FOLDERS.get(name, "in") / "9.jsonl").write_text("".join(json.dumps(row) + "\n" for row in more))
    before = rows(f"sinks/{name}")
    report = job(name).run(append=True)
    assert report.rows_run == 10
    assert rows(f"sinks/{name}") == sorted([*before, *scored(range(200, 210))])
    assert gm.verify(f"sinks/{name}", deep=True, source=True).ok


@pytest.mark.parametrize("name", FINISHED)
def test_dead_letters_are_scored_again(name: str, moved: Path) -> None:
    """With code that fails no more, which is accepted: all rows are published then."""
    code = moved / "scoring.py"
    code.write_text(code.read_text().replace(f"BAD = {BAD}", "BAD = 99"))
    report = gm.retry_dead(job(name), accept_code_change=True)
    numbers = SOURCES.get(name, range(40))
    assert (report.rows_run, report.rows_dead) == (len(failed(numbers)), 0)
    assert rows(f"sinks/{name}") == sorted(numbers)
    assert gm.verify(f"sinks/{name}", deep=True).ok


def test_a_killed_run_goes_on(moved: Path) -> None:
    """What was committed is not scored again, and the row that had killed workers is found by what was known of it."""
    numbers, sink = SOURCES["unfinished"], "sinks/unfinished"
    state = gm.status(sink)
    assert (state["state"], state["shards_done"], state["shards_total"]) == ("unfinished", 4, 6)
    assert dead(sink) == failed(range(state["rows_done"]))
    report = job("unfinished", workers=1).run()
    assert report.shards_resumed == 4
    assert report.rows_run == len(numbers) - state["rows_done"]
    assert rows(sink) == [n for n in scored(numbers) if n != DEADLY]
    letters = gm.dead(sink)
    assert letters.filter(np.array(letters["error"]) == "WorkerDied")["payload"].to_pylist() == [
        json.dumps({"n": DEADLY, "text": f"row {DEADLY}", "part": "a"})
    ]
    assert gm.verify(sink, deep=True, source=True).ok


def test_the_remembered_job_is_known(moved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`retry-dead SINK` without a job scores the dead letters with the one that wrote the sink."""
    assert main(["retry-dead", "sinks/jsonl", "--progress", "off"]) == 0
    assert dead("sinks/jsonl") == failed(range(40))


def test_maps_go_on_from_their_results(moved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's results are not computed again, and a detached map is opened by its id."""
    again = subprocess.run([sys.executable, "maps.py", "checkpoint", "checkpoint"], capture_output=True, text=True)
    assert again.stdout == f"{[n * n for n in range(8)]}\n", again.stderr
    assert not (moved / "calls.log").exists()
    about = json.loads((moved / "detached" / "about.json").read_text())
    shutil.copytree(moved / "detached", moved / "cache" / "detached" / about["id"])
    monkeypatch.setenv("GRISTMILL_CACHE", str(moved / "cache"))
    opened = gm.detached(about["id"])
    assert about.pop("format") == 1
    assert {**opened.status(), "started": 0, "ended": 0} == {
        **about, "state": "done", "done": 4, "started": 0, "ended": 0,
    }  # fmt: skip
    results = opened.results()
    assert [type(r).__name__ for r in results] == ["Answer"] * 3 + ["ValueError"]
    assert [r.n for r in results[:3]] == [0, 1, 4]
    assert str(results[3]) == "negative"


# ---------------------------------------------------------------- what a later version has written

READING: dict[str, Callable[[str], Any]] = {
    "read": lambda name: gm.read(f"sinks/{name}"),
    "verify": lambda name: gm.verify(f"sinks/{name}"),
    "status": lambda name: gm.status(f"sinks/{name}"),
    "dead": lambda name: gm.dead(f"sinks/{name}"),
    "run": lambda name: job(name, workers=int(name == "unfinished")).run(),
    "restart": lambda name: job(name).run(restart=True),
    "retry-dead": lambda name: gm.retry_dead(job(name)),
}
DOCUMENTS = {  # what does not read it goes on, so that an old result is read beside a later version's unfinished run
    "parquet/_SUCCESS": set(READING),
    "parquet/_gristmill/published/0000001.json": {"run", "restart", "retry-dead"},
    "parquet/_gristmill/generations/0001.json": set(READING) - {"read"},
    "parquet/_gristmill/g0001-*/plan.json": {"verify", "run", "restart", "retry-dead"},
    "parquet/_gristmill/g0001-*/receipts/0000001.json": {"verify", "run", "retry-dead"},
    "unfinished/_gristmill/generations/0001.json": {"status", "dead", "run", "retry-dead"},
    "unfinished/_gristmill/g0001-*/plan.json": {"status", "run", "retry-dead"},
    "unfinished/_gristmill/g0001-*/receipts/0000003.json": {"status", "dead", "run"},
}


def of_the_future(path: Path) -> int:
    """The document with a format one higher than any that is known; that format."""
    body = unseal(path.read_bytes(), str(path))
    body["format"] += 1
    path.write_bytes(seal({**body, "what": "nobody knows yet"}))
    return int(body["format"])


def held(folder: Path) -> dict[str, bytes]:
    """All files but the lock, and how far the run says that it is."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in ("lock", "progress.json"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("pattern", DOCUMENTS)
def test_a_document_of_the_future_is_refused(pattern: str, moved: Path) -> None:
    """Whoever needs it names the file, the format that it has, the one that is known and the way out; nothing of the
    sink is changed by that, and the document is not taken for a damaged one.
    """
    name = pattern.partition("/")[0]
    (path,) = (moved / "sinks").glob(pattern)
    future = of_the_future(path)
    shutil.copytree(moved / "sinks" / name, moved / "as-it-was")
    before, found = held(moved / "as-it-was"), set()
    for verb, command in READING.items():
        if (name, verb) == ("unfinished", "restart"):  # needs nothing of what it replaces
            continue
        try:
            command(name)
        except gm.NewerFormat as e:
            found.add(verb)
            assert path.name in str(e)
            assert f"has format {future}, and gristmill" in str(e)
            assert f"up to {future - 1}: use the version that wrote it, or a later one, or use another sink" in str(e)
            assert held(moved / "sinks" / name) == before
        except gm.BadSource as e:
            assert name == "unfinished" and "no result" in str(e)
        shutil.rmtree(moved / "sinks" / name)
        shutil.copytree(moved / "as-it-was", moved / "sinks" / name)
    assert found == DOCUMENTS[pattern]


def test_the_command_line_refuses_it_in_a_line(moved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, and no traceback."""
    of_the_future(moved / "sinks" / "parquet" / "_SUCCESS")
    for command in ("status", "verify", "dead"):
        assert main([command, "sinks/parquet"]) == 2
        assert capsys.readouterr().err.startswith("gristmill: ")
    assert main(["run", "parquet.yaml", "--progress", "off"]) == 2
    said = capsys.readouterr().err
    assert "this publication has format 2" in said
    assert "Traceback" not in said


def test_results_of_the_future_are_refused(moved: Path) -> None:
    """Also those of maps, and the job that a sink remembers."""
    import sqlite3

    with sqlite3.connect(moved / "checkpoint" / "results.sqlite") as file:
        file.execute("pragma user_version = 2")
    with pytest.raises(gm.NewerFormat, match=r"this file of results has format 2.*use another folder"):
        gm.remote_parallel_map(abs, [1], checkpoint=str(moved / "checkpoint"))
    remembered = moved / "sinks" / "parquet" / "_gristmill" / "job.yaml"
    remembered.write_text(remembered.read_text().replace("format 1;", "format 2;"))
    assert main(["retry-dead", "sinks/parquet", "--progress", "off"]) == 2

"""Runs as processes of their own: with the command, stopped, killed, and with many jobs that have nothing to do."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from children import is_alive

JOB = """
vars: {ds: ""}
source: "in/${ds}.parquet"
model: {call: "m:score"}
sink: {uri: "out/${ds}/", keep: [id]}
engine: {workers: 1}
running: {shard_rows: 50}
schedule: {cron: "0 23 * * *", backoff: 1s}
"""
MODEL = """
import time
def score(batch):
    time.sleep(SECONDS)
    return {"twice": batch["id"] * 2}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job over 200 rows a night, for seven nights."""
    for day in range(1, 8):
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": range(day * 1000, day * 1000 + 200)}), tmp_path / f"in/2026-01-0{day}.parquet")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "n.yaml").write_text(JOB)
    (tmp_path / "m.py").write_text(MODEL.replace("SECONDS", "0.05"))
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gristmill", "up", "jobs", *arguments]


def whole(place: Path, day: int) -> None:
    """A night is published, once, with all its rows."""
    sink = place / "out" / f"2026-01-0{day}"
    rows = gm.read(str(sink)).to_table().to_pydict()
    assert sorted(rows["id"]) == list(range(day * 1000, day * 1000 + 200))
    assert all(twice == 2 * one for one, twice in zip(rows["id"], rows["twice"], strict=True))
    assert len(list((sink / "_gristmill" / "generations").iterdir())) == 1


@pytest.mark.long
def test_nights_that_were_missed_are_run_by_the_command(place: Path) -> None:
    """One after the other; what happened is on stderr and in the log; running it again does nothing."""
    (place / "jobs" / "n.yaml").write_text(
        JOB.replace("0 23 * * *", "0 23 1,2 1 *").replace("backoff", "catch_up: all, backoff")
    )
    since = "2026-01-01T00:00"
    ended = subprocess.run(
        command("--once", "--since", since, "--events", "up.jsonl"), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    whole(place, 1)
    whole(place, 2)
    lines = [json.loads(line) for line in (place / "up.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["started", "done"] * 2
    assert lines[0]["tick"] == "2026-01-01T23:00:00+00:00"
    again = subprocess.run(command("--once"), capture_output=True, text=True, timeout=60)
    assert again.returncode == 0 and again.stderr.startswith(
        "gristmill up: jobs: 1 job with a schedule; next n.yaml at "
    )
    assert again.stderr.count("\n") == 1
    shown = subprocess.run(command("--list"), capture_output=True, text=True, timeout=60).stdout
    assert "n.yaml" in shown and "2026-01-02 23:00 UTC done" in shown


@pytest.mark.long
def test_a_run_that_waits_for_its_next_try(place: Path) -> None:
    """`--once` tells of it and exits with 1; `--again` says what it does, and with `--once` does it at once."""
    (place / "m.py").write_text("import os\n" + MODEL.replace("SECONDS", "0 if os.path.exists('well') else None"))
    (place / "jobs" / "n.yaml").write_text(JOB.replace("0 23 * * *", "0 23 1 1 *").replace("1s", "1h"))

    def up(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120)

    first = up("--once", "--since", "2026-01-01T22:00")
    assert first.returncode == 1 and "tried again in" in first.stderr
    (place / "well").touch()
    second = up("--once")
    assert second.returncode == 1 and "n.yaml of 2026-01-01 23:00 UTC: failed, and waits until" in second.stderr
    assert "2026-01-01 23:00 UTC due to be tried again at" in up("--list").stdout
    told = up("--again", "n.yaml")
    assert told.returncode == 0
    assert (
        told.stdout
        == "n.yaml: 1 run to be tried again: no gristmill up runs here now: gristmill up jobs --once does it\n"
    )
    assert up("--again", "n.yaml", "--once").returncode == 0
    whole(place, 1)
    assert "no run of it was given up" in up("--again", "n.yaml").stdout
    (place / "empty").mkdir()
    alone = subprocess.run([*command()[:-1], "empty", "--once"], capture_output=True, text=True, timeout=60)
    assert alone.returncode == 0 and "empty: no job file with a schedule" in alone.stderr


@pytest.mark.long
def test_a_stop_leaves_the_run_resumable(place: Path) -> None:
    """SIGTERM: out within seconds, with 143, nothing left behind; the next `up` goes on with the run."""
    (place / "m.py").write_text(MODEL.replace("SECONDS", "1.0"))
    (place / "jobs" / "n.yaml").write_text(JOB.replace("0 23 * * *", "0 23 1 1 *"))
    first = subprocess.Popen(command("--since", "2026-01-01"), stderr=subprocess.PIPE, text=True)
    receipts = place / "out/2026-01-01/_gristmill"
    wait_for(lambda: any(receipts.glob("g0001-*/receipts/*.json")))
    second = subprocess.run(command("--once"), capture_output=True, text=True, timeout=60)
    assert second.returncode == 75 and f"process {first.pid} on" in second.stderr and second.stderr.count("\n") == 1
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGTERM)
    _, said = first.communicate(timeout=30)
    assert first.returncode == 143 and "1 run was stopped and resumes at the next start" in said
    assert not [child for child in children if is_alive(child)]
    assert not (place / "out/2026-01-01/_SUCCESS").exists()
    assert subprocess.run(command("--once"), timeout=120, stderr=subprocess.DEVNULL).returncode == 0
    whole(place, 1)


@pytest.mark.long
def test_two_hundred_jobs_that_wait_cost_next_to_nothing(place: Path) -> None:
    """Under 100 MB, and under 1 % of a core, also while pages are served that somebody has looked at."""
    for n in range(200):
        (place / "jobs" / f"j{n}.yaml").write_text(JOB.replace("0 23 * * *", f"{n % 60} {n % 24} 29 2 *"))
    (place / "jobs" / "n.yaml").unlink()
    with (place / "up.log").open("w") as log:
        running = subprocess.Popen(command("--listen", "0"), stderr=log)
    try:
        wait_for(lambda: "pages at" in (place / "up.log").read_text())
        process, url = psutil.Process(running.pid), (place / "up.log").read_text().split("pages at ")[1].split()[0]
        for path in ("", "metrics", "healthz"):
            assert urllib.request.urlopen(url + path).status == 200
        wait_for(lambda: busy(process, 1.0) < 0.05)
        seconds = float(os.environ.get("GRISTMILL_IDLE", "10"))
        share = busy(process, seconds)
        memory = process.memory_info().rss
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(timeout=30)
    assert memory < 100e6, memory
    assert share < 0.01, share


def busy(process: psutil.Process, seconds: float) -> float:
    """The share of a core that a process takes."""
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    return (sum(process.cpu_times()[:2]) - before) / seconds


def wait_for(there: object, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not there():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_week_of_nights_while_up_is_killed(place: Path, seed: int) -> None:
    """SIGKILL at random moments, with real runs below it: each night is published once, and none is skipped."""
    dice, script = random.Random(seed), str(Path(__file__).parent / "weekofnights.py")
    began, kills = time.time(), 0
    start, until = "2026-01-01T20:00:00+00:00", "2026-01-08T12:00:00+00:00"
    said: list[str] = []
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        with (place / "up.log").open("a") as log:
            running = subprocess.Popen(
                [sys.executable, script, "jobs", start, str(began), str(86400 / 5), until], stdout=log, stderr=log
            )
        try:
            running.wait(timeout=dice.uniform(0.5, 8) if kills < 12 else 200)
            break
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
            kills += 1
    said = (place / "up.log").read_text().splitlines()
    assert kills and running.returncode == 0, said[-20:]
    for day in range(1, 8):
        whole(place, day)
    ended = [line for line in said if "not tried again" in line]
    assert not ended

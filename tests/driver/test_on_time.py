"""How long a run takes and costs, as it is told before and while it runs; and what happens at a deadline."""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.driver import deadline as deadlines
from gristmill.driver.forecast import Pace, foreseen
from gristmill.driver.planprobe import probed
from gristmill.driver.run import run
from gristmill.driver.views import plan
from gristmill.errors import DeadlineMissed
from gristmill.observe.events import Note, Progress
from llmserver import KEY, ChatServer


class Notes:
    """An observer that keeps what is noted."""

    def __init__(self) -> None:
        self.notes: list[Note] = []

    def progress(self, now: Progress) -> None: ...

    def note(self, note: Note) -> None:
        self.notes.append(note)

    def close(self) -> None: ...

    def alerts(self) -> list[str]:
        return [
            f"{key} {note.fields[key]}" for note in self.notes for key in ("alert", "foresees") if key in note.fields
        ]


def night(seed: int) -> Callable[[float], float]:
    """What a run over so many rows takes: 40 s, 2 ms a row, on a machine that is busy in one night of ten."""
    dice = random.Random(seed)
    return lambda rows: (40 + 0.002 * rows) * dice.choice([1.0, 1.0, 0.97, 1.03, 1.05, 0.98, 1.02, 1.06, 1.0, 1.35])


@pytest.mark.parametrize("seed", range(20))
def test_estimates_of_twenty_nights(seed: int) -> None:
    """From the second on they are within 10 % (the median), whatever the nights' sizes: from a third to three times."""
    dice, takes = random.Random(1000 + seed), night(seed)
    runs: list[Pace] = []
    for _ in range(20):
        rows = round(100_000 * dice.uniform(1 / 3, 3))
        found, seconds = foreseen(rows, runs), takes(rows)
        runs.append(Pace(rows, seconds, 0.9 * 40, None if found is None else found.seconds))
    errors = [one.error for one in runs[1:] if one.error is not None]
    assert len(errors) == 19
    assert statistics.median(errors) < 0.10


def test_an_estimate_says_what_it_rests_on() -> None:
    """How many runs, and how far off the estimates were."""
    assert foreseen(100, []) is None
    one = foreseen(7_200_000, [Pace(1000, 4.0, 2.0)])
    assert one is not None and one.said() == "about 4 h for 7,200,000 rows, by the last run"
    two = foreseen(1000, [Pace(1000, 4.0, 2.0, 5.0), Pace(2000, 6.0, 2.0, 6.6)])
    assert two is not None and two.priced(3600).said() == (
        "about 4.00 s for 1,000 rows, by the last 2 runs (estimates were 17 % off, at most 25 %); $4.00"
    )


def job(folder: Path, rows: int = 300, **options: Any) -> gm.Job:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"x": list(range(rows))}), folder / "in.parquet")
    return gm.Job(str(folder / "in.parquet"), lambda b: {"y": b["x"]}, str(folder / "out"), workers=0, **options)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))


def test_a_plan_tells_how_long_and_what_it_costs(tmp_path: Path) -> None:
    """By the runs before it, in this sink or, on this machine, in another one of the same job; not before the first."""
    made = job(tmp_path / "a", running={"hour_price": 36.0})
    assert made.plan().forecast is None
    report = made.run()
    told = report.details["on_time"]
    assert told["cost"] == pytest.approx(told["seconds"] / 100, rel=0.01) and told["seconds"] >= report.seconds - 0.001
    assert made.plan().forecast is None  # there is nothing to do
    again = job(tmp_path / "b", running={"hour_price": 36.0}).plan()
    assert again.forecast is not None and again.forecast.rows == 300
    assert again.forecast.cost == pytest.approx(again.forecast.seconds / 100)
    report = job(tmp_path / "b").run()
    assert report.details["on_time"]["foreseen"] > 0
    kept = json.loads((tmp_path / "b/out/_gristmill/paces.json").read_text())["runs"]
    assert [one["rows"] for one in kept] == [300] and kept[0]["foreseen"] > 0  # those of another sink are not its own


@pytest.mark.long
def test_functions_of_one_name_are_not_one_job(tmp_path: Path) -> None:
    """`score` of one script tells nothing of `score` of another, each with a sink of its own."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.py").write_text(ONE_NAME)
        pq.write_table(pa.table({"x": list(range(300))}), tmp_path / name / "in.parquet")

    def foreseen(name: str, *words: str) -> str:
        command = [sys.executable, "job.py", *words]
        done = subprocess.run(command, cwd=tmp_path / name, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert foreseen("a", "out") == "unknown"
    assert foreseen("b", "out") == "unknown"
    assert foreseen("a", "other") == "300"


ONE_NAME = """
import sys
import gristmill as gm

def score(batch):
    return {"y": batch["x"]}

job = gm.Job("in.parquet", score, sys.argv[1], workers=0)
found = job.plan().forecast
print("unknown" if found is None else int(found.rows))
job.run()
"""


def test_updates_have_a_pace_of_their_own(tmp_path: Path) -> None:
    """They keep most answers: what the first run took tells nothing of them."""
    made = job(tmp_path, update={"key": ["x"]})
    made.run()
    pq.write_table(pa.table({"x": list(range(310))}), tmp_path / "in.parquet")
    found = made.plan().forecast
    assert found is not None and found.bound and found.said().startswith("at most about") and found.by == "the last run"
    made.run()
    pq.write_table(pa.table({"x": list(range(320))}), tmp_path / "in.parquet")
    found = made.plan().forecast
    assert found is not None and not found.bound and found.by == "the last update"
    kept = json.loads((tmp_path / "out/_gristmill/paces.json").read_text())["runs"]
    assert [one["update"] for one in kept] == [False, True]


def test_previews_and_retries_are_no_nights(tmp_path: Path) -> None:
    """They leave no trace in what is remembered."""
    job(tmp_path / "a").preview(5)
    assert not (tmp_path / "cache" / "paces").exists()


def test_a_missed_deadline_is_told_and_the_run_publishes_late(tmp_path: Path) -> None:
    """Once, as an event with the deadline, which a place may subscribe to."""
    seen, tick = Notes(), datetime.now(timezone.utc) - timedelta(hours=8)
    report = run(job(tmp_path, deadline="7h").spec, tick=tick, observer=seen)
    assert report.state == "done" and report.rows_ok == 300
    assert seen.alerts() == ["alert late"]
    note = next(note for note in seen.notes if "alert" in note.fields)
    assert note.level == "warning" and datetime.fromisoformat(note.fields["deadline"]) == (
        tick + timedelta(hours=7)
    ).replace(microsecond=0)
    assert report.details["on_time"]["late"] is True


def test_on_deadline_stop_publishes_nothing(tmp_path: Path) -> None:
    """Exit 3; what is scored is kept, the old result stays; --accept goes on and publishes."""
    tick = datetime.now(timezone.utc) - timedelta(hours=8)
    made = job(tmp_path, deadline="7h", on_deadline="stop")
    with pytest.raises(DeadlineMissed, match=r"on_deadline is stop: nothing new was published") as caught:
        run(made.spec, tick=tick)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    report = run(made.spec, tick=tick, accept=True)
    assert report.rows_ok == 300 and report.generation == 1


def test_a_forecast_that_passes_the_deadline_is_warned_of_before_it(tmp_path: Path, monkeypatch: Any) -> None:
    """At the start, by earlier runs; with when it will end, and by how much that is late."""
    made = job(tmp_path, deadline="1h")
    monkeypatch.setattr("gristmill.driver.paces.foreseen", lambda rows, runs: foreseen(rows, [Pace(300, 7200.0, 0.0)]))
    seen = Notes()
    run(made.spec, observer=seen)
    assert seen.alerts() == ["foresees late"]
    text = next(note.text for note in seen.notes if "foresees" in note.fields)
    assert "will be late: by the last run it ends about" in text and "1 h after its deadline" in text


def test_the_first_rows_tell_nothing_of_calls_in_flight(tmp_path: Path) -> None:
    """Of a function of one row a few are called to begin with, and then many at a time: no forecast, and no alarm."""
    seen = Notes()
    rows = pa.table({"x": range(1500)})

    async def ask(row: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.1)
        return {"y": row["x"]}

    options: dict[str, Any] = {"concurrency": 100, "deadline": "1m", "workers": 0, "observer": seen}
    pq.write_table(rows, tmp_path / "rows.parquet")
    report = gm.apply(str(tmp_path / "rows.parquet"), str(tmp_path / "out"), fn=ask, returns={"y": "int64"}, **options)
    assert report.rows_ok == 1500 and report.seconds < 60
    assert seen.alerts() == [] and not [note for note in seen.notes if note.text.startswith("takes")]


def test_late_by_less_than_a_minute(tmp_path: Path, monkeypatch: Any) -> None:
    """Is not said to be a minute after a deadline that is in the same minute."""
    made = job(tmp_path, deadline="100s")
    monkeypatch.setattr("gristmill.driver.paces.foreseen", lambda rows, runs: foreseen(rows, [Pace(300, 130.0, 0.0)]))
    seen = Notes()
    run(made.spec, observer=seen)
    text = next(note.text for note in seen.notes if "foresees" in note.fields)
    assert "less than a minute after its deadline" in text


def test_the_rate_so_far_warns_once_it_tells_enough() -> None:
    """Not from the first rows; then once."""

    class Log:
        seconds = 1.0

        def __init__(self) -> None:
            self.told: list[Any] = []

        def note(self, level: str, text: str, **fields: Any) -> None:
            self.told.append(fields)

    log: Any = Log()
    end = deadlines.Deadline(deadlines.now() + timedelta(hours=1), "1h", False)
    watch = deadlines.OnTime(log, end, False)
    watch.look(0.01, 9e9)
    watch.look(0.5, 3500.0)
    assert log.told == []
    watch.look(0.5, 3900.0)
    watch.look(0.6, 4000.0)
    assert [fields["foresees"] for fields in log.told] == ["late"]


def test_a_first_call_is_not_told_as_the_time_of_the_run(tmp_path: Path) -> None:
    """It may be one of imports: a run of a second was said to take minutes."""
    import time

    waits = [0.3]

    def imports(rows: Any) -> Any:
        time.sleep(waits.pop() if waits else 0.0)
        return {"y": rows["x"]}

    pq.write_table(pa.table({"x": list(range(30_000))}), tmp_path / "in.parquet")
    seen = Notes()
    gm.Job(str(tmp_path / "in.parquet"), imports, str(tmp_path / "out"), workers=0).run(observer=seen)
    assert not [note for note in seen.notes if note.text.startswith("takes")]


def test_the_command_takes_the_time_that_it_was_scheduled_for(tmp_path: Path) -> None:
    """Which a schedule's variables are of, in its time zone."""
    from gristmill.jobfile.jobfile import load

    path = tmp_path / "n.yaml"
    path.write_text(
        'vars: {ds: ""}\nsource: "in/${ds}.parquet"\nmodel: {call: "m:f"}\nsink: "out/${ds}/"\n'
        "schedule: {cron: '0 23 * * *', timezone: Europe/Berlin}\n"
    )
    tick = datetime(2026, 1, 1, 23, 30, tzinfo=timezone.utc)
    assert load(str(path), tick=tick).source.uri == ("in/2026-01-02.parquet",)
    assert load(str(path), tick=tick, variables={"ds": "x"}).source.uri == ("in/x.parquet",)


@pytest.mark.long
def test_twenty_real_nights(tmp_path: Path) -> None:
    """Of different sizes, of a model that takes 2 ms a row: the estimates of the second and later ones are within 10 %
    (the median).
    """
    import time

    def slow(rows: Any) -> Any:
        time.sleep(0.002 * len(rows["x"]))
        return {"y": rows["x"]}

    dice, errors = random.Random(5), []
    for n in range(20):
        folder = tmp_path / str(n)
        folder.mkdir()
        count = dice.randint(500, 3000)
        pq.write_table(pa.table({"x": list(range(count))}), folder / "in.parquet")
        report = gm.Job(str(folder / "in.parquet"), slow, str(folder / "out"), workers=1).run()
        told = report.details.get("on_time", {})
        if n:
            errors.append(abs(told["foreseen"] / report.seconds - 1))
    assert statistics.median(errors) < 0.10, errors


def test_a_missed_deadline_is_told_by_alerts(tmp_path: Path) -> None:
    """As the incident `late`."""
    told = tmp_path / "told.jsonl"
    made = job(tmp_path, deadline="7h", alerts=[{"command": f"tee -a {told}", "on": ["late"]}])
    run(made.spec, tick=datetime.now(timezone.utc) - timedelta(hours=8))
    (line,) = told.read_text().splitlines()
    assert json.loads(line)["kind"] == "late"


@pytest.mark.long
def test_a_probe_in_which_nobody_answered(tmp_path: Path) -> None:
    """The forecast says how long that was, and of whom, as its time counts it as if all rows met that."""
    rows = pa.table({"text": [f"row {n}" for n in range(300)]})
    pq.write_table(rows, tmp_path / "rows.parquet")
    with ChatServer(latency=0.2) as server:
        model = gm.Prompt("Say {{ text }}", "m", base_url=server.url, api_key=KEY, concurrency=8)
        spec = gm.Job(str(tmp_path / "rows.parquet"), model, str(tmp_path / "out")).spec
        well = probed(spec, plan(spec), 100)
        assert well.forecast is not None and well.forecast.by == "100 rows of a probe"
        before = server.told()["requests"]

        def outage() -> None:
            while server.told()["requests"] < before + 30:
                time.sleep(0.05)
            server.set(down=True)
            time.sleep(8)
            server.set(down=False)

        thread = threading.Thread(target=outage)
        thread.start()
        away = probed(spec, plan(spec), 100)
        thread.join()
    assert away.forecast is not None
    assert re.search(rf"in which it waited for at least \d.* s \(.*{server.url}.*\): less", away.forecast.by), away

"""Jobs of a folder run when their schedules say so, by a clock that the test moves."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from simulated import Simulated, run, runs, utc, write

from gristmill.cli.app import main
from gristmill.errors import BadJob, RunFailed, SinkBusy
from gristmill.jobfile.jobfile import read_job_file
from gristmill.schedule.contract import RETRY, Happening, Run
from gristmill.schedule.held import held
from gristmill.schedule.jobs import JobFiles
from gristmill.schedule.state import State
from gristmill.schedule.up import Up


def days(found: list[Run]) -> list[str]:
    return [f"{one.tick:%m-%d}" for one in found]


def test_each_night_runs_once_at_its_time(tmp_path: Path) -> None:
    """In the schedule's time zone, from when the job is known: what was before that is nobody's."""
    write(tmp_path, more="schedule: {cron: '0 23 * * *', timezone: Europe/Berlin}")
    world = Simulated(utc("2026-01-01T12:00"))
    told = run(tmp_path, world, "2026-01-04T12:00")
    assert world.started == [("n.yaml", f"2026-01-0{day}T22:00:00+00:00") for day in (1, 2, 3)]
    assert [one.kind for one in told] == ["started", "done"] * 3 + ["stopping"]
    assert {one.state for one in runs(tmp_path)} == {"done"}


def test_the_nights_that_nobody_was_there_for_are_made_up_for(tmp_path: Path) -> None:
    """Each, in order, where the night is in the job's variables; else the latest stands for all, which are noted."""
    write(tmp_path, "each")
    path = write(tmp_path, "latest")
    path.write_text(path.read_text().replace("${ds}", "x").replace('vars: {ds: ""}', ""))
    write(tmp_path, "none", "schedule: {cron: '0 23 * * *', catch_up: none}")
    run(tmp_path, Simulated(utc("2026-01-01T12:00")), "2026-01-01T13:00")
    world = Simulated(utc("2026-01-05T12:00"), takes=60)
    told = run(tmp_path, world, "2026-01-06T12:00")
    assert days(runs(tmp_path, "each.yaml")) == days(runs(tmp_path, "latest.yaml")) == days(runs(tmp_path, "none.yaml"))
    assert [one.state for one in runs(tmp_path, "each.yaml")] == ["done"] * 5
    assert [one.state for one in runs(tmp_path, "latest.yaml")] == ["covered"] * 3 + ["done"] * 2
    assert [one.state for one in runs(tmp_path, "none.yaml")] == ["missed"] * 4 + ["done"]
    assert len([one for one in told if one.kind == "missed"]) == 4
    started = [tick for job, tick in world.started if job == "each.yaml"]
    assert started == sorted(started)


@pytest.mark.long
def test_more_missed_times_than_can_be_made_up_for_are_told(tmp_path: Path) -> None:
    """The latest 400 are; of the others it says how many there are."""
    write(tmp_path, more="schedule: {cron: '*/5 * * * *', catch_up: all}")
    run(tmp_path, Simulated(utc("2026-01-01T12:01")), "2026-01-01T12:02")
    told = run(tmp_path, Simulated(utc("2026-01-05T12:01"), takes=1), "2026-01-05T12:04")
    assert [one.text for one in told if one.kind == "left out"] == [
        "n.yaml: 752 earlier times were missed, more than are made up for: they are left out"
    ]
    assert len(runs(tmp_path)) == 400


def test_what_can_be_resumed_is_tried_again_later_and_later(tmp_path: Path) -> None:
    """Exit 1, after a minute, two, four …; as often as the job says, and then a person has to look."""
    write(tmp_path, more="schedule: {cron: '0 23 * * *', retries: 3}")
    world = Simulated(utc("2026-01-01T22:59"), code=lambda run: 1, takes=0)
    told = run(tmp_path, world, "2026-01-02T22:00")
    assert len(world.started) == 4
    assert [one.text.partition("tried again in ")[2] for one in told if one.kind == "retry"] == [
        "60 s",
        "120 s",
        "240 s",
    ]
    assert runs(tmp_path)[0].state == "failed" and "failed, 4 times" in told[-2].text
    world.code = lambda run: 0 if run.attempts > 1 else 1
    told = run(tmp_path, world, "2026-01-03T22:00")
    assert [one.kind for one in told if one.kind not in ("started", "stopping")] == ["retry", "recovered"]


@pytest.mark.parametrize(("code", "why"), [(2, "is not as it has to be"), (3, "a gate"), (4, "those of its plan")])
def test_what_a_person_has_to_look_at_is_not_tried_again(tmp_path: Path, code: int, why: str) -> None:
    """Exits 2, 3 and 4; the next night runs all the same. `again` makes the run due again."""
    write(tmp_path)
    world = Simulated(utc("2026-01-01T12:00"), code=lambda run: code if run.tick.day == 1 else 0)
    told = run(tmp_path, world, "2026-01-03T12:00")
    assert [one.state for one in runs(tmp_path)] == ["failed", "done"]
    assert why in next(one.text for one in told if one.kind == "failed")
    state = State(str(tmp_path / ".gristmill"))
    assert state.again("n.yaml", world.at.timestamp()) == 1
    state.close()
    world.code = lambda run: 0
    run(tmp_path, world, "2026-01-03T14:00")
    assert [one.state for one in runs(tmp_path)] == ["done", "done"]


def test_a_sink_that_another_run_holds_is_waited_for(tmp_path: Path) -> None:
    """Exit 75 counts as no failure, however often."""
    write(tmp_path, more="schedule: {cron: '0 23 * * *', retries: 0}")
    world = Simulated(utc("2026-01-01T22:59"), code=lambda run: 75 if run.attempts < 20 else 0, takes=1)
    run(tmp_path, world, "2026-01-02T12:00")
    assert [(one.state, one.attempts) for one in runs(tmp_path)] == [("done", 20)]


def test_after_another_job_for_the_same_night(tmp_path: Path) -> None:
    """Once all that it comes after are done, with their tick; not if one of them is not."""
    write(tmp_path, "a")
    write(tmp_path, "b")
    write(tmp_path, "c", "schedule: {after: [a, b.yaml]}")
    world = Simulated(utc("2026-01-01T12:00"), code=lambda run: 3 if run.job == "b.yaml" and run.tick.day == 2 else 0)
    run(tmp_path, world, "2026-01-04T12:00", at_once=2)
    assert days(runs(tmp_path, "c.yaml")) == ["01-01", "01-03"]
    assert world.most == 2
    order = [job for job, tick in world.started if tick.startswith("2026-01-01")]
    assert sorted(order[:2]) == ["a.yaml", "b.yaml"] and order[2:] == ["c.yaml"]


def test_after_another_job_in_its_time_zone_and_with_its_shift(tmp_path: Path) -> None:
    """What runs after a job of the small hours has the day that this one has, unless it says a zone or a shift; also
    by way of a third, and once the first says another zone. A line of the log names the zone.
    """
    write(tmp_path, "a", "schedule: {cron: '30 0 * * *', timezone: Europe/Berlin, shift: -2d}")
    write(tmp_path, "b", "schedule: {after: a}")
    write(tmp_path, "c", "schedule: {after: b.yaml}")
    write(tmp_path, "d", "schedule: {after: a, timezone: UTC, shift: 0d}")
    tick, files = utc("2026-01-01T23:30"), JobFiles(str(tmp_path), {})

    def source(name: str) -> str:
        at = tick.astimezone(files.read(tick).jobs[name].schedule.zone)
        return str(read_job_file(tmp_path / name, tick=at).source.uri[0])

    assert [source(f"{name}.yaml") for name in "abcd"] == ["in/2025-12-31.parquet"] * 3 + ["in/2026-01-01.parquet"]
    told = run(tmp_path, Simulated(utc("2026-01-01T12:00"), takes=1), "2026-01-02T12:00")
    assert "c.yaml of 2026-01-02 00:30 CET: started" in [one.text for one in told]
    write(tmp_path, "a", "schedule: {cron: '30 0 * * *', timezone: Asia/Tokyo, shift: -2d}")
    assert str(files.read(tick).jobs["c.yaml"].schedule.zone) == "Asia/Tokyo"


@pytest.mark.parametrize("gone", ["broken", "empty", "renamed", "without a schedule"])
def test_after_a_job_whose_file_is_not_whole_for_a_moment(tmp_path: Path, gone: str) -> None:
    """Nothing that comes after it runs meanwhile, or for another zone, not even what was begun just then."""
    said = "schedule: {cron: '30 0 * * *', timezone: Asia/Tokyo}"
    path = write(tmp_path, "a", said)
    for name, before in ("b", "a"), ("c", "b"), ("d", "c"):
        write(tmp_path, name, f"schedule: {{after: {before}}}")
    tick, files = utc("2026-01-01T15:30"), JobFiles(str(tmp_path), {})
    assert len(files.read(tick).jobs) == 4
    whole = path.read_text()
    if gone == "renamed":
        path.rename(tmp_path / "a.yaml.old")
    else:
        path.write_text({"broken": "source: [", "empty": "", "without a schedule": whole.replace(said, "")}[gone])
    found = files.read(tick)
    assert not found.jobs and {"b.yaml", "c.yaml", "d.yaml"} <= found.bad.keys()
    for name in "bcd":
        with pytest.raises(
            RunFailed, match=r"it runs after a, which .*, so that its time zone and shift are not known"
        ):
            read_job_file(tmp_path / f"{name}.yaml", tick=tick)
        assert main(["run", str(tmp_path / f"{name}.yaml"), "--scheduled", "2026-01-01T15:30+00:00"]) == 1
    path.write_text(whole)
    assert str(files.read(tick).jobs["d.yaml"].schedule.zone) == "Asia/Tokyo"


def test_a_misspelt_job_before(tmp_path: Path) -> None:
    """The near one is named within the sentence."""
    write(tmp_path, "load", "schedule: {every: day, at: '02:00'}")
    write(tmp_path, "b", "schedule: {after: laod}")
    with pytest.raises(RunFailed, match=r"laod, which is no job file here \(did you mean 'load'\?\), so that its time"):
        read_job_file(tmp_path / "b.yaml", tick=utc("2026-01-01T15:30"))


def test_variables_that_only_the_schedule_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`${ds}` is that of the time, by hand too, without `vars`, whose zone is that of the schedule."""
    path = tmp_path / "n.yaml"
    path.write_text(
        "source: in-${ds}.parquet\nmodel: {call: 'm.py:f'}\nsink: out/\n"
        "schedule: {cron: '30 0 * * *', timezone: Asia/Tokyo}\n"
    )
    for tick, day in (("2026-01-02T00:30", "2026-01-02"), ("2026-01-01T15:30+00:00", "2026-01-02")):
        for verb in ("run", "plan"):
            assert main([verb, str(path), "--scheduled", tick]) == 2
            assert f"in-{day}.parquet" in capsys.readouterr().err


def test_after_jobs_with_other_shifts(tmp_path: Path) -> None:
    """Which day is meant is not known: the job says it."""
    write(tmp_path, "a", "schedule: {cron: '@daily', shift: -1d}")
    write(tmp_path, "b", "schedule: '@daily'")
    path, files, now = write(tmp_path, "c", "schedule: {after: [a, b]}"), JobFiles(str(tmp_path), {}), utc("2026-01-01")
    why = f"{path}:6: schedule after: the shift of the jobs before it differs, -1d ({tmp_path}/a.yaml) and none"
    assert files.read(now).bad["c.yaml"].startswith(why)
    write(tmp_path, "b", "schedule: {cron: '@daily', shift: -1d}")
    assert files.read(now).jobs["c.yaml"].schedule.shift == "-1d"


def test_when_files_arrive(tmp_path: Path) -> None:
    """Once for what has come, whole and under its name; not for what is gone."""
    there = tmp_path / "in"
    there.mkdir()
    write(tmp_path / "jobs", more=f"schedule: {{files: '{there}/*.csv'}}")
    world = Simulated(utc("2100-01-01T12:00"), takes=60)  # files were written long ago
    run(tmp_path / "jobs", world, "2100-01-01T13:00")
    assert world.started == []
    (there / "a.csv").write_text("x")
    (there / "b.csv.tmp").write_text("x")
    run(tmp_path / "jobs", world, "2100-01-01T14:00")
    assert len(world.started) == 1
    run(tmp_path / "jobs", world, "2100-01-01T15:00")
    (there / "a.csv").unlink()
    run(tmp_path / "jobs", world, "2100-01-01T16:00")
    assert len(world.started) == 1
    (there / "c.csv").write_text("y")
    run(tmp_path / "jobs", world, "2100-01-01T17:00")
    assert len(world.started) == 2


def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    """Until it was left alone for a while."""
    from gristmill.schedule import arrivals

    path = tmp_path / "a.csv"
    path.write_text("x")
    written = path.stat().st_mtime
    assert arrivals.listed([str(tmp_path)], written + 1) == b""
    assert arrivals.new(b"", arrivals.listed([str(tmp_path)], written + arrivals.SETTLED)) == 1


def test_limits_are_kept_and_all_jobs_run(tmp_path: Path) -> None:
    """Twenty jobs of one time, three at once."""
    for n in range(20):
        write(tmp_path, f"j{n}")
    world = Simulated(utc("2026-01-01T22:00"), takes=600)
    run(tmp_path, world, "2026-01-02T12:00", at_once=3)
    assert world.most == 3 and len(world.published) == 20


def test_a_job_file_that_is_wrong_keeps_no_other_from_running(tmp_path: Path) -> None:
    """It is told once, in one line with the place and the way out; mended, it makes up for what it missed."""
    write(tmp_path, "good")
    bad = {
        "cron": "schedule: '61 * * * *'",
        "zone": "schedule: {cron: '0 1 * * *', timezone: Europe/Berln}",
        "after": "schedule: {after: nobody}",
        "key": "schedule: {crn: '0 1 * * *'}",
        "empty": "schedule: {files: ''}",
    }
    for name, more in bad.items():
        write(tmp_path, name, more)
    (tmp_path / "yaml.yaml").write_text("schedule: [\n")
    (tmp_path / "other.yaml").write_text("services: {web: {image: x}}\n")
    world = Simulated(utc("2026-01-01T12:00"))
    told = run(tmp_path, world, "2026-01-02T12:00")
    lines = {one.job: one.text for one in told if one.kind == "bad"}
    assert set(lines) == {*(f"{name}.yaml" for name in bad), "yaml.yaml"}
    assert "bad minute" in lines["cron.yaml"] and "cron.yaml:6" in lines["cron.yaml"]
    assert "did you mean 'Europe/Berlin'" in lines["zone.yaml"]
    assert all("\n" not in line for line in lines.values())
    assert world.started == [("good.yaml", "2026-01-01T23:00:00+00:00")]
    write(tmp_path, "cron")
    told = run(tmp_path, world, "2026-01-03T12:00")
    assert ("cron.yaml", "2026-01-02T23:00:00+00:00") in world.started


def test_late_is_told_once(tmp_path: Path) -> None:
    """Whether the run is going on, or waits: and once it is done, that it is."""
    write(tmp_path, more="schedule: {cron: '0 23 * * *', timezone: Europe/Berlin}\ndeadline: '06:00'")
    world = Simulated(utc("2026-01-01T12:00"), takes=10 * 3600)
    told = run(tmp_path, world, "2026-01-02T12:00")
    assert [one.kind for one in told] == ["started", "late", "recovered", "stopping"]
    assert told[1].text.endswith("late: its deadline (2026-01-02 06:00 CET) has passed, and it is running")
    assert told[1].fields["deadline"] == "2026-01-02T06:00:00+01:00"


def test_a_clock_that_is_set_back_runs_nothing_twice(tmp_path: Path) -> None:
    """While it is up, or between two."""
    write(tmp_path)
    world = Simulated(utc("2026-01-01T12:00"), takes=60)
    run(tmp_path, world, "2026-01-02T12:00")
    world.at = utc("2026-01-01T20:00")
    run(tmp_path, world, "2026-01-03T12:00")
    assert [tick for _, tick in world.started] == ["2026-01-01T23:00:00+00:00", "2026-01-02T23:00:00+00:00"]


def test_stopped_runs_are_resumed(tmp_path: Path) -> None:
    """When `up` is told to stop, its runs are, and the next `up` begins with them."""
    write(tmp_path)
    world = Simulated(utc("2026-01-01T12:00"), takes=7200)
    told = run(tmp_path, world, "2026-01-01T23:30")
    assert "1 run was stopped and resumes" in told[-1].text
    assert [(one.state, one.tries) for one in runs(tmp_path)] == [("due", 0)]
    run(tmp_path, world, "2026-01-02T12:00")
    assert [(one.state, one.attempts) for one in runs(tmp_path)] == [("done", 2)]


def test_once_runs_what_is_due_and_ends(tmp_path: Path) -> None:
    """With what comes after it; what is to be tried again stays due."""
    write(tmp_path, "a")
    write(tmp_path, "b", "schedule: {after: a}")
    world, told = Simulated(utc("2026-01-03T12:00"), takes=60), []  # type: ignore[var-annotated]
    state = State(str(tmp_path / ".gristmill"))
    made: Any = Up(JobFiles(str(tmp_path), {}), state, world, told.append, since=utc("2026-01-01T12:00"))
    assert made.once() == [0, 0, 0, 0]
    assert sorted(world.published) == sorted(
        (job, f"2026-01-0{d}T23:00:00+00:00") for job in ("a.yaml", "b.yaml") for d in (1, 2)
    )
    state.close()


def test_once_with_a_job_file_that_cannot_be_run(tmp_path: Path) -> None:
    """What it was to do is not done, so that the exit code is not 0; the others run."""
    write(tmp_path, "a")
    write(tmp_path, "b", "schedule: {crn: '@daily'}")
    world, state = Simulated(utc("2026-01-02T12:00"), takes=60), State(str(tmp_path / ".gristmill"))
    made: Any = Up(JobFiles(str(tmp_path), {}), state, world, lambda now: None, since=utc("2026-01-01T12:00"))
    assert made.once() == [0, 2]
    state.close()
    (tmp_path / "a.yaml").unlink()
    assert main(["up", str(tmp_path), "--once"]) == 1


def test_once_tells_what_waits_for_its_next_try(tmp_path: Path) -> None:
    """It has failed, so that the exit code is not 0, and a line says until when; `again` lets it start at once."""
    write(tmp_path, more="schedule: {cron: '0 23 1 1 *', backoff: 10m}")
    world, told = Simulated(utc("2026-01-02T12:00"), code=lambda run: 1, takes=60), list[Happening]()
    state = State(str(tmp_path / ".gristmill"))

    def once() -> list[int]:
        told.clear()
        up: Any = Up(JobFiles(str(tmp_path), {}), state, world, told.append, since=datetime(2026, 1, 1, 12))  # type: ignore[arg-type]
        return up.once()  # type: ignore[no-any-return]

    assert once() == [1] and [one.kind for one in told] == ["started", "retry"]
    assert once() == [1]
    assert [(one.kind, one.grave) for one in told] == [("since", False), ("waiting", True)]
    assert "n.yaml of 2026-01-01 23:00 UTC: failed, and waits until 2026-01-02 12:11 UTC" in told[1].text
    assert "--once --again n.yaml" in told[1].text
    assert state.again("n.yaml", world.at.timestamp()) == 1
    world.code = lambda run: 0
    assert once() == [0] and once() == [] and state.again("n.yaml", world.at.timestamp()) == 0
    state.close()


def test_since_of_jobs_that_are_known_is_told(tmp_path: Path) -> None:
    """It makes up for nothing then, and one line says of which jobs, and how a time is run by hand."""
    write(tmp_path, "a")
    state = State(str(tmp_path / ".gristmill"))
    world: Any = Simulated(utc("2026-01-02T12:00"), takes=60)
    told = list[Happening]()
    since = utc("2026-01-01T12:00")
    assert Up(JobFiles(str(tmp_path), {}), state, world, told.append, since=since).once() == [0]
    assert [one.kind for one in told if one.kind == "since"] == []
    write(tmp_path, "b")
    assert Up(JobFiles(str(tmp_path), {}), state, world, told.append, since=since).once() == [0]
    (said,) = [one.text for one in told if one.kind == "since"]
    assert "and a.yaml is known" in said and "a.yaml --scheduled TIME" in said and "b.yaml" not in said
    state.close()


@pytest.mark.parametrize("key", ["schedul", "Schedule", "scheduled", "cron"])
def test_a_schedule_under_a_mistyped_key_is_told(key: str, tmp_path: Path) -> None:
    """It would never run, and nobody would know; a job without a schedule, or another file, is left out quietly."""
    write(tmp_path, "a", f"{key}: '@daily'")
    write(tmp_path, "b", "deadline: 7h")
    (tmp_path / "c.yaml").write_text("services: {cron: x}\nscheduler: y\n")
    found = JobFiles(str(tmp_path), {}).read(utc("2026-01-02T12:00"))
    assert list(found.bad) == ["a.yaml"] and "did you mean" in found.bad["a.yaml"] and "schedule" in found.bad["a.yaml"]


def test_since_is_in_the_time_zone_of_the_schedule(tmp_path: Path) -> None:
    """Unless it says another one."""
    write(tmp_path, more="schedule: {cron: '0 0 * * *', timezone: Asia/Tokyo}")
    for since, runs_ in ((datetime(2026, 1, 2, 0, 30), 1), (utc("2026-01-01T12:00"), 2)):
        state = State(str(tmp_path / str(runs_)))
        world: Any = Simulated(utc("2026-01-02T16:00"), takes=60)
        assert len(Up(JobFiles(str(tmp_path), {}), state, world, lambda _: None, since=since).once()) == runs_
        state.close()


def test_a_tick_is_claimed_once(tmp_path: Path) -> None:
    """By whoever is first; a second claim changes nothing of what became of it. Nor does an end that is told twice."""
    state = State(str(tmp_path))
    one = Run("n.yaml", utc("2026-01-01T23:00"))
    state.know("n.yaml", utc("2026-01-01T12:00"), "x")
    assert state.claim([one], one.tick) == [one]
    going = replace(one, state="running", attempts=1)
    assert state.update(going, "due") and not state.update(going, "due")
    assert state.update(replace(going, state="done"), "running")
    assert state.claim([one], one.tick) == []
    assert not state.update(replace(going, state="failed"), "running")
    assert [found.state for found in state.last("n.yaml", 9)] == ["done"]
    state.close()


def test_two_on_one_folder(tmp_path: Path) -> None:
    """The second is refused, and names the first."""
    with (
        held("jobs", str(tmp_path)),
        pytest.raises(SinkBusy, match=r"jobs: another gristmill up runs these jobs \(process \d+ on"),
        held("jobs", str(tmp_path)),
    ):
        pass


def test_two_on_one_folder_with_states_of_their_own(tmp_path: Path) -> None:
    """The second is refused, also where neither may write to the folder of jobs, or knows it by another name."""
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (tmp_path / "link").symlink_to(jobs)
    jobs.chmod(0o555)
    for name in (jobs, tmp_path / "link"):
        with (
            held(str(jobs), str(tmp_path / "one")),
            pytest.raises(SinkBusy, match="another gristmill up runs these jobs, with another --state"),
            held(str(name), str(tmp_path / "other")),
        ):
            pass
    with held(str(jobs), str(tmp_path / "other")):
        assert list(jobs.iterdir()) == []


def test_one_state_for_two_folders(tmp_path: Path) -> None:
    """The second is refused, as nights of jobs of one name would be taken for each other; a folder that was moved, with
    its state or without, goes on with it.
    """
    for name in ("a", "b"):
        (tmp_path / name).mkdir()

    def belong(jobs: str, state: str) -> None:
        with contextlib.closing(State(str(tmp_path / state))) as found:
            found.belong(str(tmp_path / jobs))

    belong("a", "state")
    belong("a", "state")
    with pytest.raises(BadJob, match=r"is the state of the jobs in .*a, .*name a folder of its own"):
        belong("b", "state")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    belong("link", "state")
    belong("a", "a/.gristmill")
    with pytest.raises(BadJob, match="is the state of the jobs in"):
        belong("b", "a/.gristmill")
    (tmp_path / "a").rename(tmp_path / "c")
    belong("c", "c/.gristmill")
    (tmp_path / "link").unlink()
    belong("c", "state")


def test_a_list_shows_no_nights_of_another_folder(tmp_path: Path) -> None:
    """The state of another folder's jobs is refused, and not written to; its own folder is listed with it."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    with contextlib.closing(State(str(tmp_path / "state"))) as state:
        state.belong(str(tmp_path / "a"))
    assert main(["up", str(tmp_path / "b"), "--list", "--state", str(tmp_path / "state")]) == 2
    assert main(["up", str(tmp_path / "a"), "--list", "--state", str(tmp_path / "state")]) == 0
    with contextlib.closing(State(str(tmp_path / "state"))) as state:
        assert state.refuse_others(str(tmp_path / "a"))[0] == "../a"


def test_a_full_disk_for_the_state_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line; nothing starts that is not claimed; what ended meanwhile is stored once there is room, and not lost."""
    write(tmp_path)
    world = Simulated(utc("2026-01-01T12:00"), takes=3600)
    full = [utc("2026-01-01T23:30"), utc("2026-01-02T23:30")]
    whole = State._change

    def change(self: State) -> Any:
        if full[0] <= world.at < full[1]:
            raise sqlite3.OperationalError("database or disk is full")
        return whole(self)

    monkeypatch.setattr(State, "_change", change)
    told = run(tmp_path, world, "2026-01-04T12:00")
    assert len([one for one in told if one.kind == "state"]) == 1
    assert [one.state for one in runs(tmp_path)] == ["done"] * 3
    assert len(world.started) == 3


def test_a_state_that_cannot_be_opened(tmp_path: Path) -> None:
    """Told with the path and the way out."""
    (tmp_path / "up.sqlite").write_text("no database, whatever its name says" * 100)
    with pytest.raises(RunFailed, match=r"up\.sqlite: the state is damaged \(file is not a database\): move it away"):
        State(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match=r"up\.sqlite: the state cannot be opened"):
        State(str(tmp_path / "file"))


def test_a_state_that_is_damaged_while_it_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told as such, with the way out: more space would not help."""
    write(tmp_path)

    def change(self: State) -> Any:
        raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(State, "_change", change)
    told = run(tmp_path, Simulated(utc("2026-01-01T12:00"), takes=3600), "2026-01-02T12:00")
    (one,) = [happened for happened in told if happened.kind == "state"]
    assert "the state is damaged (database disk image is malformed): move it away" in one.text


def test_when_summer_time_begins_and_ends(tmp_path: Path) -> None:
    """A time that does not exist runs once, and one that exists twice, too; also where `up` begins between the two."""
    for start, end, count in (("2026-03-28T12:00", "2026-03-30T12:00", 2), ("2026-10-24T12:00", "2026-10-26T12:00", 2)):
        folder = tmp_path / start[:10]
        write(folder, more="schedule: {cron: '30 2 * * *', timezone: Europe/Berlin}")
        world = Simulated(utc(start), takes=1)
        run(folder, world, end)
        assert len(world.started) == count == len({tick[:10] for _, tick in world.started})
    run(folder, Simulated(utc("2026-10-25T01:10")), "2026-10-25T01:45")
    assert len(runs(folder)) == 2


@pytest.mark.parametrize("seed", range(8))
def test_a_week_of_nights_with_kills(tmp_path: Path, seed: int) -> None:
    """Whatever `up` was about to do when it was killed: each night is published once, and none is skipped."""
    week(tmp_path, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 200))
def test_a_hundred_weeks_of_nights_with_kills(tmp_path: Path, seed: int) -> None:
    """The same, with other chances."""
    week(tmp_path, seed)


def week(folder: Path, seed: int) -> None:
    """A week of two jobs, one after the other, which fail at times, while `up` is killed at times."""
    write(folder, "a", "schedule: {cron: '0 23 * * *', timezone: Europe/Berlin, retries: 1000}\ndeadline: 6h")
    write(folder, "b", "schedule: {after: a, retries: 1000}")
    dice = random.Random(seed)
    world = Simulated(utc("2026-03-26T12:00"), code=lambda run: dice.choice([0, 0, 1, -9, 75]), takes=1800)
    run(folder, world, "2026-03-26T13:00")
    chance = dice.choice([0.02, 0.05, 0.1])
    run(folder, world, "2026-04-02T12:00", chance=lambda: dice.random() < chance)
    world.code = lambda run: 0
    run(folder, world, (world.at + timedelta(days=2)).isoformat()[:16])
    nights = [one.key[1] for one in runs(folder, "a.yaml")]
    first, last = utc(nights[0][:16]), utc(nights[-1][:16])
    assert f"{first:%m-%d}" == "03-26" and len(nights) >= 7
    assert len(nights) == (last.date() - first.date()).days + 1, "a night was skipped"
    for job in ("a.yaml", "b.yaml"):
        assert [one.key[1] for one in runs(folder, job)] == nights
        assert all(world.published[job, night] == 1 for night in nights)
        assert {one.state for one in runs(folder, job)} == {"done"}


def test_a_state_of_format_1_is_taken_over(tmp_path: Path) -> None:
    """Its runs are there, and a tick may have a retry of its dead letters beside its run."""
    with contextlib.closing(sqlite3.connect(tmp_path / "up.sqlite")) as old:
        old.executescript("""
            CREATE TABLE runs (
              job TEXT, tick TEXT, state TEXT, next REAL, attempts INTEGER, tries INTEGER, exit INTEGER, begun REAL,
              ended REAL, deadline REAL, late INTEGER, reason TEXT, PRIMARY KEY (job, tick)
            ) WITHOUT ROWID;
            CREATE INDEX unfinished ON runs (state, next) WHERE state IN ('due', 'running');
            CREATE TABLE jobs (job TEXT PRIMARY KEY, since TEXT, said TEXT, files BLOB) WITHOUT ROWID;
            INSERT INTO jobs VALUES ('n.yaml', '2026-01-01T22:00:00+00:00', '0 23 * * * UTC', x'');
            INSERT INTO runs VALUES
              ('n.yaml', '2026-01-01T22:00:00+00:00', 'done', 0, 2, 1, 0, 10.0, 20.0, 30.0, 1, ''),
              ('n.yaml', '2026-01-02T22:00:00+00:00', 'due', 5, 0, 0, NULL, NULL, NULL, NULL, 0, 'was stopped');
            PRAGMA user_version = 1;
        """)
    tick = utc("2026-01-01T22:00")
    for _ in range(2):
        with contextlib.closing(State(str(tmp_path))) as state:
            due, done = state.last("n.yaml", 9)
            assert (done.state, done.attempts, done.late, done.what) == ("done", 2, True, "run")
            assert (due.state, due.next, due.reason) == ("due", 5, "was stopped")
            assert state.since("n.yaml") is not None
    with contextlib.closing(State(str(tmp_path))) as state:
        assert state.ask(Run("n.yaml", tick, next=7.0, what=RETRY))
        assert not state.ask(Run("n.yaml", tick, next=8.0, what=RETRY)), "it is in the queue"
        assert [run.what for run in state.of("n.yaml", tick)] == ["run", RETRY]


def test_a_retry_that_somebody_asks_for_waits_for_its_turn(tmp_path: Path) -> None:
    """It is no run of its tick: nothing comes after it, it is not late, and no later run stands for it."""
    folder = tmp_path / "jobs"
    write(folder, "n", 'schedule: {cron: "0 23 * * *", catch_up: latest}\ndeadline: 2h')
    write(folder, "after", "schedule: {after: n}")
    world = Simulated(utc("2026-01-01T12:00"))
    run(folder, world, "2026-01-03T12:00")
    before, tick = list(world.started), utc("2026-01-01T23:00")
    assert len(before) == 4
    with contextlib.closing(State(str(folder / ".gristmill"))) as state:
        assert state.ask(Run("n.yaml", tick, next=world.at.timestamp(), what=RETRY, options="--accept-code-change"))
    told = run(folder, world, "2026-01-03T20:00")
    assert world.started == [*before, ("n.yaml", "2026-01-01T23:00:00+00:00")]
    said = [one for one in told if one.job]
    assert [one.kind for one in said] == ["started", "done"]
    assert all("its dead letters" in one.text and one.fields["what"] == RETRY for one in said)
    assert [one.state for one in runs(folder)] == ["done"] * 3


def test_a_list_of_no_jobs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a sentence, without the head of a table."""
    assert main(["up", str(tmp_path), "--list"]) == 0
    assert capsys.readouterr().out.strip() == (
        f"{tmp_path}: no job file with a schedule that can be run is here: nothing runs until one is"
    )


def test_a_list_for_monitors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--list --json`: a line for each job, with its next time and how its last night ended; and for each that cannot
    be run, with what is wrong.
    """
    folder = tmp_path / "jobs"
    write(folder, more='schedule: {cron: "0 23 * * *", timezone: Europe/Berlin}')
    (folder / "bad.yaml").write_text('schedule: "0 23 * * *"\nsource: [')
    run(folder, Simulated(utc("2026-01-01T12:00"), lambda run: 3), "2026-01-02T12:00")
    assert main(["up", str(folder), "--list", "--json"]) == 0
    good, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert (good["job"], good["when"]) == ("n.yaml", "0 23 * * * Europe/Berlin")
    assert datetime.fromisoformat(good["next"]) > utc("2026-11-29T00:00") and "T23:00:00+0" in good["next"]
    last = good["last"]
    assert (last["tick"], last["state"], last["exit"]) == ("2026-01-01T23:00:00+01:00", "failed", 3)
    assert last["begun"] <= last["ended"] and last["next_try"] is None
    assert bad.keys() == {"job", "bad"} and bad["job"] == "bad.yaml" and bad["bad"]
    assert main(["up", str(folder), "--json"]) == 2
    assert "--json is for --list" in capsys.readouterr().err

"""When a job runs, and by when it must be done: what is said, and the times that follow."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gristmill as gm
from gristmill.errors import BadJob
from gristmill.job.durations import duration
from gristmill.job.schedule import Schedule, due, zone_of

BERLIN = zone_of("Europe/Berlin")


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def ticks(cron: str, start: str, count: int, zone: str = "Europe/Berlin") -> list[str]:
    found = Schedule(cron, timezone=zone).ticks(at(start))
    return [one.isoformat() for one in itertools.islice(found, count)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cron": "61 * * * *"}, "'61 * * * *': bad minute: the fields are minute (0-59)"),
        ({"cron": "0 0 31 2 *"}, "'0 0 31 2 *': bad day-of-month"),
        ({"cron": "0 23 * *"}, "give five fields"),
        ({"cron": "0 0 23 * * *"}, "give five fields"),
        ({"cron": "0 1 * * *", "timezone": "Europe/Berln"}, "did you mean 'Europe/Berlin'?"),
        ({"cron": "0 1 * * *", "timezone": "../../etc/passwd"}, "is '../../etc/passwd', which is not known"),
        ({"cron": "0 1 * * *", "after": "x"}, "has both cron and after"),
        ({}, "says no time: give one of cron, after, files"),
        ({"cron": "@daily", "backoff": "soon"}, "backoff is 'soon': give a length of time of at least 1 s"),
        ({"cron": "@daily", "shift": "yesterday"}, "shift is 'yesterday'"),
        ({"cron": "@daily", "vars": {"ds": "today"}}, "vars has ds: 'today': give a format of time"),
        ({"cron": "@daily", "retries": -1}, "retries is -1"),
        ({"crn": "@daily"}, "did you mean 'cron'?"),
    ],
)
def test_what_is_wrong_is_told(given: dict[str, object], said: str) -> None:
    """With the value and the way out, in one line."""
    with pytest.raises(BadJob) as caught:
        Schedule(**given)  # type: ignore[arg-type]
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_time_that_does_not_exist_counts_once_when_the_clock_has_moved() -> None:
    """The clock goes from 2:00 to 3:00."""
    assert ticks("30 2 * * *", "2026-03-28T12:00+01:00", 2) == [
        "2026-03-29T03:00:00+02:00",
        "2026-03-30T02:30:00+02:00",
    ]
    assert ticks("0 2,3 * * *", "2026-03-29T01:00+01:00", 2) == [
        "2026-03-29T03:00:00+02:00",
        "2026-03-30T02:00:00+02:00",
    ]


@pytest.mark.parametrize("start", ["2026-10-24T12:00+02:00", "2026-10-25T02:29:59+02:00"])
def test_a_time_that_exists_twice_counts_the_first_time(start: str) -> None:
    """The clock goes from 3:00 back to 2:00."""
    assert ticks("30 2 * * *", start, 2) == ["2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"]


@pytest.mark.parametrize("start", ["2026-10-25T02:30+02:00", "2026-10-25T02:10+01:00", "2026-10-25T02:45+01:00"])
def test_the_second_time_never_counts(start: str) -> None:
    """Also if it is asked for between the two."""
    assert ticks("30 2 * * *", start, 1) == ["2026-10-26T02:30:00+01:00"]


@given(
    st.datetimes(datetime(2024, 1, 1), datetime(2030, 1, 1)),
    st.sampled_from(["30 2 * * *", "0 3 * * *", "*/20 * * * *", "15 1-3 * * *", "0 0 29 2 *", "0 12 * * MON#1"]),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Sao_Paulo", "UTC"]),
)
def test_ticks_are_the_same_from_wherever_they_are_asked_for(start: datetime, cron: str, zone: str) -> None:
    """They rise, none is at or before the start, and those from a later start are the rest of those from this one."""
    schedule, begin = Schedule(cron, timezone=zone), start.replace(tzinfo=timezone.utc)
    found = list(itertools.islice(schedule.ticks(begin), 6))
    times = [one.timestamp() for one in found]
    assert times == sorted(set(times)) and times[0] > begin.timestamp()
    for i in range(1, 5):
        later = list(itertools.islice(schedule.ticks(found[i - 1]), 2))
        assert [one.timestamp() for one in later] == times[i : i + 2]


@pytest.mark.parametrize(
    ("deadline", "tick", "end"),
    [
        ("06:00", "2026-01-01T23:00+01:00", "2026-01-02T06:00:00+01:00"),
        ("06:00", "2026-01-02T02:00+01:00", "2026-01-02T06:00:00+01:00"),
        ("06:00", "2026-01-02T06:00+01:00", "2026-01-03T06:00:00+01:00"),
        ("6:30:15", "2026-01-01T23:00+01:00", "2026-01-02T06:30:15+01:00"),
        ("7h", "2026-03-28T23:00+01:00", "2026-03-29T07:00:00+02:00"),
        ("1h30m", "2026-01-01T23:00+01:00", "2026-01-02T00:30:00+01:00"),
        ("06:00", "2026-03-28T23:00+01:00", "2026-03-29T06:00:00+02:00"),
        ("02:30", "2026-03-28T23:00+01:00", "2026-03-29T03:30:00+02:00"),
        ("02:30", "2026-10-24T23:00+02:00", "2026-10-25T02:30:00+02:00"),
    ],
)
def test_by_when_it_must_be_done(deadline: str, tick: str, end: str) -> None:
    """The next such time of day, or so long after the tick, whatever the clock does in that night."""
    assert due(deadline, at(tick), BERLIN).isoformat() == end


@pytest.mark.parametrize("deadline", ["6", "24:00", "6 o'clock", "", "-1h", "0m", "7 h"])
def test_a_deadline_that_is_none(deadline: str) -> None:
    """Refused when the job is made."""
    with pytest.raises(BadJob, match=r"deadline is .*give a time of day"):
        gm.Job("in.csv", len, deadline=deadline)


def test_the_variables_of_a_tick() -> None:
    """By default the date in the schedule's zone, of those that the file has; formats and a shift of its own."""
    tick = at("2026-01-01T23:30+00:00")
    assert Schedule("@daily", timezone="Europe/Berlin").variables(tick, {"ds"}) == {"ds": "2026-01-02"}
    assert Schedule("@daily").variables(tick, {"x"}) == {}
    own = Schedule("@daily", vars={"day": "%d.%m."}, shift="-1d")
    assert own.variables(tick, {"ds"}) == {"day": "31.12."}
    over = Schedule("@daily", timezone="Europe/Berlin", shift="-1d").variables(at("2026-03-30T02:30+02:00"), {"ds"})
    assert over == {"ds": "2026-03-29"}


def test_lengths_of_time() -> None:
    """In days, hours, minutes and seconds, in this order."""
    assert duration("1d2h3m4s") == timedelta(days=1, hours=2, minutes=3, seconds=4)
    assert duration("90m") == timedelta(minutes=90)
    assert duration("") is duration("90") is duration("5m1h") is duration(90) is None

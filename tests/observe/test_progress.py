"""What a run shows while it goes: a bar at any width, plain lines now and then, JSON lines; none can stop a run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import BadJob
from gristmill.observe.events import Note, Observer, Progress, Silent
from gristmill.observe.jsonlog import JsonLines, JsonLog
from gristmill.observe.progress import Bar, Lines, Several, Warnings, bar_line, line, make_observer
from gristmill.observe.streams import Sturdy
from gristmill.observe.tables import columns

HALFWAY = Progress(
    phase="running", rows_total=50_000, rows_done=13_905, rows_per_second=338.2, eta=106.0, rows_dead=5, workers=2,
    share=0.28,
)  # fmt: skip


class Clock:
    """Seconds that a test moves by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


# ---------------------------------------------------------------- the bar's line


def test_the_bar_says_rows_rate_time_left_dead_letters_and_workers() -> None:
    """All of it at a usual width."""
    said = bar_line(HALFWAY, 100)
    for part in ("━", " 27 %", "13,905/50,000 rows", "338/s", "1:46 left", "5 dead", "2 workers"):
        assert part in said


def test_a_narrow_bar_keeps_what_matters_most() -> None:
    """Width 20: the share and the rows (fault 40)."""
    assert bar_line(HALFWAY, 20) == "27 %  13,905/50,000"
    assert bar_line(HALFWAY, 10) == "27 %"


@given(
    st.builds(
        Progress,
        phase=st.sampled_from(["planning", "loading", "running", "publishing"]),
        rows_total=st.none() | st.integers(0, 10**13),
        rows_done=st.integers(0, 10**13),
        rows_dead=st.integers(0, 10**9),
        rows_per_second=st.floats(0, 1e9),
        eta=st.none() | st.floats(0, 1e9),
        elapsed=st.floats(0, 1e9),
        share=st.floats(0, 1),
        workers=st.integers(0, 1000),
        waiting=st.text(max_size=30),
    ),
    st.integers(1, 250),
)
def test_the_bar_never_wraps(now: Progress, width: int) -> None:
    """A line that is too long would leave a trail of broken bars."""
    said = bar_line(now, width)
    assert columns(said) <= width and "\n" not in said


def test_a_bar_does_not_dance() -> None:
    """Growing figures keep their place."""
    one = bar_line(Progress(phase="running", rows_total=9_000, rows_done=8, workers=2), 80)
    two = bar_line(Progress(phase="running", rows_total=9_000, rows_done=8_888, workers=2), 80)
    assert one.index("/9,000") == two.index("/9,000")


# ---------------------------------------------------------------- observers


def test_lines_come_at_new_phases_and_then_ever_more_rarely() -> None:
    """A log file of an hour's run is short."""
    out, clock = io.StringIO(), Clock()
    lines = Lines(out, clock)
    lines.progress(Progress(phase="planning"))
    lines.progress(Progress(phase="loading", workers_wanted=2))
    for _ in range(36_000):
        lines.progress(HALFWAY)
        clock.now += 0.1
    lines.progress(Progress(phase="publishing"))
    lines.progress(Progress(phase="done"))
    said = out.getvalue().splitlines()
    assert said[:2] == ["planning", "loading: 2 workers"] and said[-1] == "publishing"
    assert said[2] == "running: 13,905 of 50,000 rows (28 %), 338 rows/s, 1:46 left, 5 dead, 2 workers"
    assert 60 <= len(said) <= 80


def test_a_line_said_again_says_since_when() -> None:
    """A planning of six seconds looked as if it was done twice."""
    out, clock = io.StringIO(), Clock()
    lines = Lines(out, clock)
    for second in range(8):
        clock.now = second
        lines.progress(Progress(phase="planning", elapsed=second))
    assert out.getvalue() == "planning\nplanning … 0:05\n"


def test_what_is_waited_for_is_said_aloud() -> None:
    """A cluster without free GPUs is no silent hang."""
    assert line(Progress(phase="loading", waiting="2 GPUs, the cluster has 1")) == (
        "loading: waiting for 2 GPUs, the cluster has 1"
    )


def test_notes_and_prints_are_lines() -> None:
    """Warnings with their level, what the user's code printed as it was, debugging not at all."""
    out = io.StringIO()
    lines = Lines(out, Clock())
    for note in (Note("warning", "slow"), Note("print", "hello"), Note("debug", "no"), Note("info", "fyi")):
        lines.note(note)
    assert out.getvalue() == "warning: slow\nhello\nfyi\n"


def test_json_lines_are_json_with_time_and_event() -> None:
    """For programs: one object a line, rounded, nothing that JSON does not have."""
    out, clock = io.StringIO(), Clock()
    lines = JsonLines(out, clock)
    lines.progress(HALFWAY)
    lines.progress(HALFWAY)
    lines.note(Note("warning", "ä", {"worker": "w0", "took": float("nan")}))
    clock.now = 6
    lines.progress(HALFWAY)
    read = [json.loads(text) for text in out.getvalue().splitlines()]
    assert [item["event"] for item in read] == ["progress", "note", "progress"]
    assert read[0]["rows_done"] == 13_905 and read[0]["time"].endswith("Z")
    assert read[1] | {"time": 0} == {
        "time": 0, "event": "note", "level": "warning", "text": "ä", "worker": "w0", "took": None,
    }  # fmt: skip


def test_a_json_log_is_added_to(tmp_path: Any) -> None:
    """A resumed run does not erase what the first one said; a log that cannot be opened is a bad job."""
    path = str(tmp_path / "log.jsonl")
    for _ in range(2):
        log = JsonLog(path, Clock())
        log.progress(HALFWAY)
        log.close()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2
    with pytest.raises(BadJob, match="cannot be written: No such file or directory: give another file"):
        JsonLog(str(tmp_path / "no" / "log"), Clock())


def test_several_observers_hear_the_same() -> None:
    """Progress and a log file."""
    one, two = io.StringIO(), io.StringIO()
    several = Several([Lines(one, Clock()), Lines(two, Clock())])
    several.progress(Progress())
    several.note(Note("info", "x"))
    several.close()
    assert one.getvalue() == two.getvalue() == "planning\nx\n"


@pytest.mark.parametrize(
    ("kind", "kinds"), [("auto", Lines), ("lines", Lines), ("bar", Bar), ("json", JsonLines), ("off", Warnings)]
)
def test_the_kinds_of_observer(kind: Any, kinds: type) -> None:
    """A pipe gets lines unless something else is asked for; without stderr there is silence."""
    assert isinstance(make_observer(kind, io.StringIO()), kinds)
    assert isinstance(make_observer(kind, None), Silent)


def everything(observer: Observer, clock: Clock) -> None:
    for phase in ("planning", "loading", "running", "publishing", "done"):
        clock.now += 100
        observer.progress(Progress(phase=phase, rows_total=10, rows_done=5))  # type: ignore[arg-type]
        observer.note(Note("print", "hello"))
    observer.close()


@pytest.mark.parametrize("kind", ["lines", "bar", "json"])
def test_a_closed_pipe_does_not_stop_a_run(kind: Any) -> None:
    """The reader has gone: the run goes on, quietly (fault 40)."""
    reading, writing = os.pipe()
    os.close(reading)
    clock = Clock()
    with os.fdopen(writing, "w", buffering=1) as stream:
        everything(make_observer(kind, stream, clock), clock)
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@pytest.mark.parametrize("kind", ["lines", "bar", "json"])
def test_a_closed_stream_and_a_poor_encoding_do_not_stop_a_run(kind: Any) -> None:
    """Closed by the program itself, or unable to write the bar's characters."""
    closed, clock = io.StringIO(), Clock()
    closed.close()
    everything(make_observer(kind, closed, clock), clock)
    raw = io.BytesIO()
    poor = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    clock = Clock()
    observer = make_observer(kind, poor, clock)
    everything(observer, clock)
    observer.note(Note("info", "größer …"))
    assert b"hello" in raw.getvalue()


def test_a_terminal_that_went_away_does_not_stop_a_run() -> None:
    """Its other end is closed: writes fail with EIO."""
    ours, theirs = pty.openpty()
    clock = Clock()
    with contextlib.suppress(OSError), os.fdopen(theirs, "w") as stream:  # closing it fails too
        bar = make_observer("auto", stream, clock)
        assert isinstance(bar, Bar)
        clock.now = 1
        bar.progress(HALFWAY)
        os.close(ours)
        everything(bar, clock)
        done = True
    assert done


def test_a_short_run_draws_no_bar() -> None:
    """What is over at once needs no animation (and no import of rich)."""
    out, clock = io.StringIO(), Clock()
    bar = Bar(out, clock)
    for phase in ("planning", "running", "done"):
        clock.now += 0.05
        bar.progress(Progress(phase=phase))  # type: ignore[arg-type]
    bar.close()
    assert out.getvalue() == ""


def test_a_sturdy_stream_gives_up_after_the_first_failure() -> None:
    """A thousand failing writes a second would cost more than silence."""
    closed = io.StringIO()
    closed.close()
    sturdy = Sturdy(closed)
    assert sturdy.write("x") == 1 and sturdy.broken
    sturdy.flush()


def test_what_stands_in_for_a_stream_need_not_flush() -> None:
    """A class with `write` alone, as programs put in the place of stderr; one that raises is written to no more."""
    heard: list[str] = []
    plain = Sturdy(type("Redirected", (), {"write": lambda self, text: heard.append(text)})())  # type: ignore[arg-type]
    plain.write("a")
    plain.flush()
    plain.write("b")
    assert heard == ["a", "b"]
    assert Sturdy(object()).write("x") == 1  # type: ignore[arg-type]

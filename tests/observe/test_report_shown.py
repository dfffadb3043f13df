"""The report and tables as people see them: sums that add up, figures with units, lines that fit."""

from __future__ import annotations

import io
import re

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.observe import units
from gristmill.observe.report import Report, count_rows, headline, show_report, top_errors
from gristmill.observe.tables import Table, cell, clip, columns, of_arrow
from gristmill.shards.counts import Counts

PLAIN = Counts(13_905, 13_900, 2, 3, 13_900, 1, 2, 13_897)
REPORT = Report(
    "emb dir/", "done", 1, PLAIN, 7, 3, 41.2, "embed models/minilm", "sha256:0123456789abcdef", 2, files=7,
    bytes_out=21_300_000, busy=0.963, padding=0.041, tokens=123_456, rows_run=13_905,
    errors={"ValueError": 3, "NullText": 2},
)  # fmt: skip


def shown(report: Report) -> str:
    out = io.StringIO()
    show_report(report, out)
    return out.getvalue()


def test_a_report_says_everything_once() -> None:
    """Counts, files, bytes, speed, padding, busy share, model and digest, errors, and what to do next."""
    text = shown(REPORT)
    for part in (
        "emb dir/: done in 41.2 s", "rows in     13,905", "  ok        13,897", "ValueError 3, NullText 2", "21.3 MB",
        "3 were done before", "338/s  2 workers, model busy 96 %, padding 4.1 %, 123,456 tokens",
        "embed models/minilm 0123456789ab", "gm.read('emb dir/')", "gristmill dead 'emb dir/'",
    ):  # fmt: skip
        assert part in text, text


def test_a_run_that_stopped_does_not_say_how_to_read_it() -> None:
    """There is nothing new to read."""
    text = shown(Report("emb/", "stopped", 1, PLAIN, 7, 0, 3.0, "m", "", 2))
    assert "emb/: stopped after 3.00 s, not published" in text and "gm.read" not in text


def test_nothing_to_do_is_said() -> None:
    """The same command again."""
    assert "nothing to do" in shown(Report("emb/", "nothing to do", 1, PLAIN, 7, 7, 0.1, "m", "", 0))


counts = st.builds(
    lambda derived, filtered, dead, ok, df, dd: Counts(
        (ok + df + dd if derived is None else derived) + filtered + dead,
        ok + df + dd if derived is None else derived, filtered, dead, ok + df + dd, df, dd, ok,
    ),
    st.none() | st.integers(0, 10**6), *[st.integers(0, 10**9)] * 5,
)  # fmt: skip


@given(counts)
def test_what_is_shown_adds_up(c: Counts) -> None:
    """What is indented sums to the line above it, with and without steps that make one row many."""
    assert c.discrepancy() is None
    total, parts = None, 0
    for label, figure, _ in count_rows(c):
        n = int(figure.replace(",", ""))
        if label.startswith(" "):
            parts += n
            continue
        assert total is None or parts == total
        total, parts = n, 0
    assert parts == total


def test_the_most_frequent_errors_are_named() -> None:
    """Three by name, the rest by number."""
    assert top_errors({"A": 1, "B": 5, "C": 2, "D": 1, "E": 1}) == "B 5, C 2, A 1, 2 other kinds"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (units.count(13905), "13,905"), (units.plural(1, "file"), "1 file"), (units.plural(2, "file"), "2 files"),
        (units.size(0), "0 B"), (units.size(812), "812 B"), (units.size(21_300_000), "21.3 MB"),
        (units.size(999_600), "1.0 MB"), (units.size(5e15), "5.0 PB"),
        (units.seconds(0.842), "0.84 s"), (units.seconds(41.23), "41.2 s"), (units.seconds(59.96), "1 min"),
        (units.seconds(365), "6 min 5 s"), (units.seconds(12_000), "3 h 20 min"), (units.seconds(187_200), "2 d 4 h"),
        (units.clock(41), "0:41"), (units.clock(3965), "1:06:05"), (units.clock(10**6), "11 d 13 h"),
        (units.rate(338.2), "338 rows/s"), (units.rate(0.42), "0.42 rows/s"), (units.rate(1_710_000), "1.71 M rows/s"),
        (units.percent(0.27), "27 %"), (units.percent(0.0002), "0.02 %"), (units.percent(0.9999), ">99 %"),
        (units.percent(1), "100 %"), (units.percent(0), "0 %"), (units.percent(0.041), "4.1 %"),
    ],
)  # fmt: skip
def test_units(said: str, expected: str) -> None:
    """Thousands apart, units that fit, and a share that is all only when it is all."""
    assert said == expected


# ---------------------------------------------------------------- tables


def test_an_arrow_table_is_readable() -> None:
    """Vectors by their first numbers and length, long texts shortened, numbers to the right."""
    table = pa.table({"id": [1, 22], "text": ["a\nb\x1b[31m", "x" * 200], "v": [[0.125] * 384, None]})
    text = of_arrow(table).plain(100)
    assert "[0.125, 0.125, 0.125, … 384 in all]" in text and "null" in text and "…" in text
    assert "\x1b" not in text and " 1  a b [31m" in text
    assert all(columns(row) <= 100 for row in text.splitlines())


def test_a_narrow_table_keeps_its_ends() -> None:
    """First columns say which row it is, last ones are what was computed."""
    table = Table(tuple("abcdefgh"), (tuple(f"value {c}" for c in "abcdefgh"),))
    text = table.plain(26)
    assert text.splitlines()[0].split() == ["a", "g", "h"] and "(5 more columns: b, c" in text


@given(
    st.lists(st.lists(st.text(max_size=30), min_size=3, max_size=3), max_size=4),
    st.integers(1, 60),
)
def test_no_line_is_wider_than_allowed(rows: list[list[str]], width: int) -> None:
    """Whatever the texts hold: wide characters, combining ones, control characters."""
    table = Table(("one", "two", "three"), tuple(tuple(row) for row in rows))
    for text in table.plain(width).split("\n"):
        assert columns(text) <= max(width, 3) and not re.search("[\x00-\x1f]", text)


@given(st.text(max_size=50), st.integers(0, 30))
def test_clipped_text_fits(text: str, width: int) -> None:
    """By columns of a terminal, not by characters."""
    assert columns(clip(text, width)) <= width


def test_cells() -> None:
    """Values of other kinds."""
    assert cell(None) == "null" and cell(1.0) == "1" and cell(0.123456) == "0.1235"
    assert cell({"a": [1, 2]}) == "{a: [1, 2]}" and cell(b"abc") == "3 bytes 616263"
    assert cell("日本語" * 10, 9) == "日本語日…"


def test_a_report_prints_as_the_table_of_the_command() -> None:
    """`print(report)`, and a report as the last line of a cell, are what a person reads: no list of fields."""
    text = str(REPORT)
    assert text.splitlines()[0] == headline(REPORT)
    assert "rows in" in text and "Counts(" not in text
    shown: list[str] = []
    printer = type("Printer", (), {"text": staticmethod(shown.append)})()
    REPORT._repr_pretty_(printer, False)
    assert shown == [text]

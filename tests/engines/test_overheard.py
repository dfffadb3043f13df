"""What workers print arrives in whole lines, however their pipes cut it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gristmill.engines.output import A_SECOND, LAST, LONGEST, Overheard


class Clock:
    """Seconds that a test moves by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=("Cs",)))), st.data())
def test_however_a_pipe_cuts_it_lines_are_whole(lines: list[str], data: st.DataObject) -> None:
    """Cut anywhere, also in a character of several bytes; what has not ended comes with the worker's end."""
    told, overheard = "\n".join(lines).encode(), Overheard(Clock())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(told)))))
    parts = [overheard.heard(told[a:b]) for a, b in zip([0, *cuts], [*cuts, len(told)], strict=True)]
    assert all(part == "" or part.endswith("\n") for part in parts)
    whole = "".join([*parts, overheard.rest()])
    assert whole.split("\n")[: len(lines) - 1] == lines[:-1]
    assert whole == ("\n".join(lines) + "\n" if told and not told.endswith(b"\n") else told.decode())


def test_a_line_without_end_does_not_grow() -> None:
    """Its first part is shown, and how much was not; a character is not cut in two."""
    clock, overheard = Clock(), Overheard(Clock())
    for _ in range(1000):
        assert overheard.heard("ä".encode() * 1001) == ""
        assert len(overheard._begun) <= LONGEST
    said = overheard.rest()
    assert said.startswith("ä" * 1000) and said.endswith(f"ä… ({2_002_000 - LONGEST:,} bytes more)\n")
    assert "\ufffd" not in said and clock.now == 0


def test_a_flood_is_cut_between_lines_and_said() -> None:
    """What is over the allowance of a second is left out as lines; the last of them come with the worker's end."""
    clock = Clock()
    overheard = Overheard(clock)
    line = b"x" * 99 + b"\n"
    said = overheard.heard(line * 2000)
    assert said == line.decode() * (A_SECOND // 100)
    clock.now = 2.0
    assert (
        overheard.heard(b"after\n")
        == f"… ({2000 - A_SECOND // 100:,} lines left out: more than 64,000 bytes a second)\nafter\n"
    )
    overheard.heard(line * 2000 + b"the reason\n")
    last = overheard.rest().splitlines()
    assert "lines left out" in last[0] and len(last) == 1 + LAST and last[-1] == "the reason"


def test_a_progress_bar_is_one_line() -> None:
    """What it drew over itself is left out, as on a terminal; Windows' line ends are line ends."""
    overheard = Overheard(Clock())
    assert overheard.heard(b"\r 10 %\r 50 %") == ""
    assert overheard.heard(b"\r100 %\nthen\r\n") == "100 %\nthen\n"
    for n in range(100_000):
        overheard.heard(b"\rbatch %d" % n)
    assert overheard.rest() == "batch 99999\n"

"""Suspects: rows that end a process are found by noting and halving, and no other row is blamed."""

from __future__ import annotations

import math
import tempfile

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.worker.prepare import Identity
from gristmill.worker.suspects import Row, Suspects


def identity(rows: int) -> Identity:
    """Rows 0 … of one piece."""
    return Identity(np.zeros(rows, dtype=np.int32), np.arange(rows), np.zeros(rows, dtype=np.int32))


def attempt(folder: str, rows: int, batch: int, poison: set[int], blame: bool) -> tuple[bool, set[Row]]:
    """One careful attempt in a new process: whether it came to its end, and the rows it holds for dead."""
    suspects, who = Suspects(folder, "0000000", blame), identity(rows)
    dead = {g.rows[0] for g in suspects.dead}
    apart = [np.array([r[1] for r in g.rows]) for g in suspects.open]
    put_aside = {r[1] for r in dead} | {int(i) for group in apart for i in group}
    rest = np.array([i for i in range(rows) if i not in put_aside], dtype=np.int64)
    for group in [*apart, *(rest[i : i + batch] for i in range(0, len(rest), batch))]:
        suspects.note(who, group)
        if poison & {int(i) for i in group}:
            return False, dead
    suspects.clear()
    return True, dead


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 16), st.data())
def test_exactly_the_poison_rows_are_found(rows: int, batch: int, data: st.DataObject) -> None:
    """After at most log2(batch) + 3 deaths a row, the attempt ends; the dead rows are the poison rows and no other."""
    poison = data.draw(st.sets(st.integers(0, rows - 1), max_size=5))
    deaths, blame = 0, False
    with tempfile.TemporaryDirectory() as folder:
        while True:
            ended, dead = attempt(folder, rows, batch, poison, blame)
            if ended:
                break
            deaths, blame = deaths + 1, True
            assert deaths <= len(poison) * (math.log2(batch) + 3)
    assert {r[1] for r in dead} == poison


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 30), st.integers(1, 8), st.lists(st.booleans(), max_size=20))
def test_a_kill_from_outside_accuses_nobody(rows: int, batch: int, kills: list[bool]) -> None:
    """Whatever was noted when the process was killed from outside, no row is suspected afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in kills:
            suspects = Suspects(folder, "0000000", blame=False)
            suspects.note(identity(rows), np.arange(min(batch, rows)))
        ended, dead = attempt(folder, rows, batch, set(), blame=False)
    assert ended
    assert dead == set()

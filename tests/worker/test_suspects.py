"""Suspects: rows that end a process are found by noting and halving, and no other row is blamed."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.job.specs import Step
from gristmill.sources.where import SqlWhere
from gristmill.worker.identity import Identity
from gristmill.worker.steps import LoadedStep
from gristmill.worker.suspects import AT_ONCE, Row, Suspects

STAGES = ("step 0", "model")


def identity(rows: int) -> Identity:
    """Rows 0 … of one piece."""
    return Identity(np.zeros(rows, dtype=np.int32), np.arange(rows))


class Shard:
    """Careful attempts at one shard, each as in a new process. `poison` has for each stage the rows that kill there."""

    def __init__(self, folder: str, rows: int, poison: dict[str, set[int]]) -> None:
        self.folder, self.rows, self.poison = folder, rows, poison
        self.serial = itertools.count()
        self.dead: set[Row] = set()

    def attempt(self, blame: str = "", killed_at: int = -1) -> tuple[str, str]:
        """Its name, and how it ended: "done", "died" of a row, or "killed" at the call `killed_at`."""
        name, calls = f"run.{next(self.serial)}", itertools.count()
        suspects, who = Suspects(self.folder, "0000000", name, ["in"], blame), identity(self.rows)
        self.dead = {g.rows[0] for stage in STAGES for g in suspects.dead(stage)}
        for stage in STAGES:
            for first, last, deaths in suspects.runs(stage, who):
                if deaths:
                    continue
                if next(calls) == killed_at:
                    return name, "killed"
                if self.poison.get(stage, set()) & set(range(first, last)):
                    return name, "died"
        return name, "done"


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.data())
@pytest.mark.long
def test_exactly_the_poison_rows_are_found(rows: int, data: st.DataObject) -> None:
    """After at most log2(rows of a call) + 3 deaths a row, the attempt ends; dead are the poison rows and no other."""
    some = st.sets(st.integers(0, rows - 1), max_size=3)
    poison = {stage: data.draw(some) for stage in STAGES}
    deaths, blame, bad = 0, "", len(poison["model"]) + len(poison["step 0"])
    with tempfile.TemporaryDirectory() as folder:
        shard = Shard(folder, rows, poison)
        while (ended := shard.attempt(blame))[1] != "done":
            blame = ended[0]
            deaths += 1
            assert deaths <= bad * (math.log2(min(rows, AT_ONCE)) + 3)
    assert {r[1] for r in shard.dead} == poison["model"] | poison["step 0"]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 200), st.data(), st.lists(st.one_of(st.none(), st.integers(0, 20)), max_size=40))
def test_fault_54_kills_from_outside_accuse_nobody(rows: int, data: st.DataObject, kills: list[int | None]) -> None:
    """Attempts that are killed at any call, between those that die of a row, and drivers that start anew and blame
    nobody, or an attempt before: whatever was noted then, only poison rows end as dead.
    """
    poison = {"model": data.draw(st.sets(st.integers(0, rows - 1), max_size=2))}
    with tempfile.TemporaryDirectory() as folder:
        shard, blame, before = Shard(folder, rows, poison), "", ""
        for kill in [*kills, *itertools.repeat(None, 60)]:
            name, ended = shard.attempt(blame, -1 if kill is None else kill)
            assert {r[1] for r in shard.dead} <= poison["model"]
            if ended == "done":
                break
            # After a kill the driver blames nobody, or is a new one; here it names, wrongly, the attempt before.
            blame, before = (name, name) if ended == "died" else (data.draw(st.sampled_from(["", before])), before)
        assert ended == "done"
        assert {r[1] for r in shard.dead} <= poison["model"]


def test_fault_54_what_was_survived_is_forgiven() -> None:
    """A row that was alone at hand when its worker died once, and is scored the next time, has no death to its name."""
    with tempfile.TemporaryDirectory() as folder:
        who, index = identity(1), np.arange(1)
        Suspects(folder, "0000000", "a.1", ["in"]).note("model", who, index)
        second = Suspects(folder, "0000000", "a.2", ["in"], blame="a.1")
        assert [g.deaths for g in second.open("model")] == [1]
        second.note("model", who, index)
        second.clear()
        third = Suspects(folder, "0000000", "a.3", ["in"])
        third.note("model", who, index)
        fourth = Suspects(folder, "0000000", "a.4", ["in"], blame="a.3")
        assert [g.deaths for g in fourth.open("model")] == [1]
        assert fourth.dead("model") == []


def test_time_begins_with_each_note() -> None:
    """What came before, the reading of rows for one, is no part of the limit of the rows that are noted."""
    with tempfile.TemporaryDirectory() as folder:
        begun: list[list[str]] = []
        suspects = Suspects(folder, "0000000", "a.1", ["in"], begins=lambda: begun.append(os.listdir(folder)))
        for number, _ in enumerate(suspects.runs("model", identity(3 * AT_ONCE)), 1):
            assert begun == [["0000000.a.1.json"]] * number, "it is noted by then"


def test_a_condition_is_compiled_before_rows_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that takes longer than a call may, on a busy machine, the rows that come first were blamed for it."""
    noted: list[list[str]] = []
    made = SqlWhere.__init__
    with tempfile.TemporaryDirectory() as folder:

        def compiled(self: SqlWhere, *args: Any) -> None:
            noted.append(os.listdir(folder))
            made(self, *args)

        monkeypatch.setattr(SqlWhere, "__init__", compiled)
        rows = pa.table({"x": [1, 2, 3]})
        step = LoadedStep(Step("filter", expression="x > 1"))
        suspects = Suspects(folder, "0000000", "a.1", ["in"])
        assert suspects.apart("step 0", step, identity(3), rows, step.apply).rows.to_pydict() == {"x": [2, 3]}
        assert noted == [[]]

"""Batch budgets as a job runs: the sweep ends at the knee, whatever a call costs, and tries nothing that is too much;
quick batches grow; where memory runs out they shrink, and stay so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.job.options import BatchPlan
from gristmill.worker.batches import Budget
from gristmill.worker.budgetsearch import Search, compared, knee, rates_of

BUDGETS = (256, 512, 1024, 2048)


def sweep(budgets: tuple[int, ...] = BUDGETS, longest: float | None = None) -> Search:
    """A search over budgets of tokens."""
    return Search.of(BatchPlan(100, 4096, 8192, by_tokens=True, tries=budgets, longest=longest))


def run(search: Search, seconds: dict[int, float], most: int = 5000) -> tuple[int | None, list[int], dict[str, float]]:
    """Drive a sweep with calls of known cost; the budget it settles on, those it tried in order, and its figures."""
    tried: list[int] = []
    figures: dict[str, float] = {}
    search = search.next()
    while search.on_trial is not None and len(tried) < most:
        budget = search.on_trial
        assert search.now(True).tokens == budget
        tried.append(budget)
        search, told = search.took(8, seconds[budget], budget, budget)
        for name, value in told.items():
            figures[name] = figures.get(name, 0.0) + value
        search = search.next()
    return search.budget.tokens if search.on_trial is None else None, tried, figures


@settings(deadline=None)
@given(st.lists(st.floats(100, 10_000), min_size=4, max_size=4))
def test_it_ends_at_the_knee(rates: list[float]) -> None:
    """For calls of steady cost: the smallest budget within 3 % of the best, and the figures tell the same."""
    true = dict(zip(BUDGETS, rates, strict=True))
    settled, _, figures = run(sweep(), {b: b / r for b, r in true.items()})
    assert settled is not None
    assert true[settled] >= 0.96 * max(true.values())
    assert abs(true[knee(rates_of(figures))] / true[settled] - 1) < 0.04


def test_budgets_are_tried_in_turn_and_hopeless_ones_dropped() -> None:
    """All are tried at first, for about the same time; one at half the speed of the best is not tried to the end."""
    _, tried, _ = run(sweep(), {256: 1.0, 512: 1.0, 1024: 2.0, 2048: 8.0})
    assert tried[:4] == [*BUDGETS]
    assert tried.count(2048) < 4 <= tried.count(1024) <= tried.count(512)


def test_noise_of_a_tenth_does_not_lead_far_from_the_best() -> None:
    """With noise of 10 % a call, what is settled on is within 10 % of the best."""
    rng = np.random.default_rng(0)
    true = {256: 80.0, 512: 95.0, 1024: 100.0, 2048: 90.0}
    for _ in range(50):
        search = sweep().next()
        while (budget := search.on_trial) is not None:
            search = search.took(8, budget / true[budget] * rng.normal(1, 0.1), budget, budget)[0].next()
        assert true[search.budget.tokens or 0] >= 90


def test_a_budget_that_memory_is_too_small_for_is_out() -> None:
    """Out of memory takes the budget and all larger ones out; with the smallest out, half of that is left."""
    search = sweep().next()
    while search.on_trial != 1024:
        search = search.took(8, 1.0, 256, 1024)[0].next()
    settled, tried, _ = run(search.out_of_memory(8, 1024), {256: 2.0, 512: 1.0})
    assert settled == 512
    assert set(tried) == {256, 512}
    none_left = sweep().next().out_of_memory(8, 256)
    assert (none_left.next().on_trial, none_left.budget.tokens) == (None, 128)


def test_no_call_takes_longer_than_is_allowed() -> None:
    """With a limit on a call's time, larger budgets wait until the rate is known, and are not tried where too slow."""
    settled, tried, _ = run(sweep((64, 256, 1024, 4096), longest=2.0), {64: 0.5, 256: 1.9})
    assert settled in (64, 256)
    assert set(tried) == {64, 256}


def test_a_small_batch_at_the_end_of_a_window_is_no_trial() -> None:
    """What took a tenth of the budget says nothing about it."""
    search = sweep().next()
    assert search.took(1, 1.0, 25, 25) == (search, {})


@dataclass(frozen=True)
class Call:
    """A call of the model: it holds so much of what the budget allows, takes so many seconds, or has not the memory."""

    share: float
    seconds: float
    fits: bool
    sweeps: bool


CALLS = st.lists(
    st.builds(
        Call, st.floats(0.01, 1), st.sampled_from((0.001, 0.2, 3.0)), st.sampled_from((True, True, True, False)),
        st.booleans(),
    ),
    max_size=60,
)  # fmt: skip
PLANS = st.builds(
    BatchPlan,
    st.integers(1, 65_536),
    st.integers(1, 4096),
    st.integers(4096, 16_384),
    st.booleans(),
    st.lists(st.integers(1, 65_536), max_size=5).map(tuple),
    st.sampled_from((None, 2.0)),
    st.sampled_from((None, 0.01)),
)


@settings(deadline=None)
@given(PLANS, CALLS)
def test_budgets_stay_within_bounds_whatever_calls_take(plan: BatchPlan, calls: list[Call]) -> None:
    """A call may always hold a row, and never more than what the job says, what is tried, or what a window holds. What
    memory was too small for is not allowed again: no budget on trial is as large, nothing grows. It shrinks no further
    than to a ninth of the call that failed.
    """
    search = Search.of(plan)
    most = max(plan.rows, plan.window if plan.quick else 0, *plan.tries)
    failed: int | None = None  # the least budget on trial that failed
    shrunk = False
    for call in calls:
        before, search = search, search.next(call.sweeps)
        assert before.next(call.sweeps) == search  # what it was given is what it was
        budget = search.now(plan.by_tokens)
        assert 1 <= budget.rows <= most
        assert budget.tokens is None or 1 <= budget.tokens <= max(plan.tokens, *plan.tries, 1)
        assert search.on_trial is None or (search.on_trial in plan.tries and call.sweeps)
        assert failed is None or search.on_trial is None or search.on_trial < failed
        rows = max(1, int(budget.rows * call.share))
        padded = None if budget.tokens is None else max(1, int(budget.tokens * call.share))
        if call.fits or rows == 1:  # one row that memory is too small for is dead
            size = rows if padded is None else padded
            after, figures = search.took(rows, call.seconds, size, size)
            assert set(figures) <= {f"sweep:{search.on_trial}:{name}" for name in ("useful", "seconds", "batches")}
            assert not shrunk or after.budget.rows <= search.budget.rows
        else:
            after = search.out_of_memory(rows, padded)
            shrunk = True
            if search.on_trial is not None:
                failed = search.on_trial
            else:
                found = after.now(plan.by_tokens)
                assert not found.admits(rows, padded) or (found.rows, found.tokens) == (1, None)
                roomy = 9 * found.rows >= min(rows, search.budget.rows)
                assert roomy and (padded is None or 9 * (found.tokens or 0) >= padded or found.rows == 1)
        search = after


def test_memory_that_ran_out_for_few_long_rows_costs_no_more_than_those() -> None:
    """Long rows are bounded by their tokens, not by their number: it shrinks to a quarter, not to a row a call."""
    assert Search(Budget(32_768, 4096)).out_of_memory(128, 32_768).budget.tokens == 8192


def test_there_is_no_knee_of_nothing() -> None:
    """A sweep without a rate has no knee."""
    with pytest.raises(ValueError, match="max"):
        knee({})
    assert rates_of({"sweep:512:useful": 10.0, "sweep:512:seconds": 1.0, "sweep:512:batches": 1.0}) == {}


def test_a_budget_found_against_hopeless_ones_is_known() -> None:
    """Where all others were given up halfway, what is left was compared; one that was tried alone was not."""
    best = {"sweep:512:useful": 100.0, "sweep:512:seconds": 0.6, "sweep:512:batches": 4.0}
    given_up = {"sweep:128:useful": 20.0, "sweep:128:seconds": 0.3, "sweep:128:batches": 2.0}
    assert set(compared({**best, **given_up})) == {512}
    assert compared(best) == compared(given_up) == {}

"""The sweep over batch budgets: it ends at the knee, whatever a call costs, and tries nothing that is too much."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.batching.sweep import Sweep, compared, knee, rates_of

BUDGETS = (256, 512, 1024, 2048)


def run(sweep: Sweep, seconds: dict[int, float], most: int = 5000) -> tuple[int | None, list[int], dict[str, float]]:
    """Drive a sweep with calls of known cost; the budget it settles on, those it tried in order, and its figures."""
    tried: list[int] = []
    figures: dict[str, float] = {}
    while sweep.settled is None and len(tried) < most:
        budget = sweep.next()
        tried.append(budget)
        for name, value in sweep.measured(budget, budget, seconds[budget]).items():
            figures[name] = figures.get(name, 0.0) + value
    return sweep.settled, tried, figures


@settings(deadline=None)
@given(st.lists(st.floats(100, 10_000), min_size=4, max_size=4))
def test_it_ends_at_the_knee(rates: list[float]) -> None:
    """For calls of steady cost: the smallest budget within 3 % of the best, and the figures tell the same."""
    true = dict(zip(BUDGETS, rates, strict=True))
    settled, _, figures = run(Sweep(BUDGETS), {b: b / r for b, r in true.items()})
    assert settled is not None
    assert true[settled] >= 0.96 * max(true.values())
    assert abs(true[knee(rates_of(figures))] / true[settled] - 1) < 0.04


def test_budgets_are_tried_in_turn_and_hopeless_ones_dropped() -> None:
    """All are tried at first, for about the same time; one at half the speed of the best is not tried to the end."""
    _, tried, _ = run(Sweep(BUDGETS), {256: 1.0, 512: 1.0, 1024: 2.0, 2048: 8.0})
    assert tried[:4] == [*BUDGETS]
    assert tried.count(2048) < 4 <= tried.count(1024) <= tried.count(512)


def test_noise_of_a_tenth_does_not_lead_far_from_the_best() -> None:
    """With noise of 10 % a call, what is settled on is within 10 % of the best."""
    rng = np.random.default_rng(0)
    true = {256: 80.0, 512: 95.0, 1024: 100.0, 2048: 90.0}
    for _ in range(50):
        sweep = Sweep(BUDGETS)
        while sweep.settled is None:
            budget = sweep.next()
            sweep.measured(budget, budget, budget / true[budget] * rng.normal(1, 0.1))
        assert true[sweep.settled] >= 90


def test_a_budget_that_memory_is_too_small_for_is_out() -> None:
    """Out of memory takes the budget and all larger ones out; with the smallest out nothing is left."""
    sweep = Sweep(BUDGETS)
    assert sweep.too_much(1024)
    settled, tried, _ = run(sweep, {256: 2.0, 512: 1.0})
    assert settled == 512
    assert set(tried) == {256, 512}
    assert not sweep.too_much(256)


def test_no_call_takes_longer_than_is_allowed() -> None:
    """With a limit on a call's time, larger budgets wait until the rate is known, and are not tried where too slow."""
    settled, tried, _ = run(Sweep((64, 256, 1024, 4096), longest=2.0), {64: 0.5, 256: 1.9})
    assert settled in (64, 256)
    assert set(tried) == {64, 256}


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

"""Which rows go to the model together: each once, within the budget, with little padding."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.worker.batches import Budget, cut, padded_tokens
from gristmill.worker.windows import WindowSize, gather

LENGTHS = st.lists(st.integers(0, 600), max_size=300).map(lambda v: np.array(v, dtype=np.int32))


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 4096), st.integers(1, 128), st.data())
def test_each_row_once_and_budgets_are_kept(lengths: np.ndarray, tokens: int, rows: int, data: st.DataObject) -> None:
    """Batches hold the rows asked for, each once; none is over the budget but a row that is longer than it, alone."""
    chosen = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    batches = cut(lengths, chosen, Budget(tokens, rows))
    assert sorted(np.concatenate([np.empty(0, int), *batches]).tolist()) == chosen.tolist()
    for batch in batches:
        assert 0 < len(batch) <= rows
        assert padded_tokens(lengths, batch) <= tokens or len(batch) == 1


@settings(deadline=None)
@given(LENGTHS, st.integers(600, 8192))
def test_rows_of_nearly_one_length_go_together(lengths: np.ndarray, tokens: int) -> None:
    """No more padding than with batches in the order of the source, and longest first, so that memory fails early."""
    everything = np.arange(len(lengths))
    batches = cut(lengths, everything, Budget(tokens, 4096))
    longest = [int(lengths[b].max()) for b in batches]
    assert longest == sorted(longest, reverse=True)
    for before, after in itertools.pairwise(batches):
        assert lengths[before].min() >= lengths[after].max()


def test_padding_of_docstrings_is_small() -> None:
    """Lengths as those of docstrings (log-normal, cut at 256): under 5 % of padding in windows of 256 rows."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(4.3, 1.0, 4096).astype(np.int32) + 2, 256)
    useful = padded = 0
    for start in range(0, len(lengths), 256):
        window = lengths[start : start + 256]
        useful += int(window.sum())
        padded += sum(padded_tokens(window, b) for b in cut(window, np.arange(256), Budget(1536, 4096)))
    assert 1 - useful / padded < 0.05


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 512))
def test_without_lengths_rows_stay_in_order(rows: int, most: int) -> None:
    """Runs of neighbours, all but the last one full."""
    batches = cut(None, np.arange(rows), Budget(100, most))
    assert np.concatenate([np.empty(0, int), *batches]).tolist() == list(range(rows))
    assert all(len(b) == most for b in batches[:-1])


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_a_budget_is_halved_to_one_row(tokens: int, rows: int) -> None:
    """Halving ends at one row and one token, and never goes below."""
    budget, steps = Budget(tokens, rows), 0
    while not budget.least:
        budget, steps = budget.halved(), steps + 1
        assert budget.tokens is not None
        assert budget.tokens >= 1
    assert steps <= 14


@dataclass(frozen=True)
class Chunk:
    """A chunk of rows."""

    rows_held: int
    bytes_held: int


CHUNKS = st.lists(st.builds(Chunk, st.integers(1, 100), st.integers(0, 1000)), max_size=60)


@settings(deadline=None)
@given(CHUNKS, st.integers(1, 400), st.integers(1, 4000), st.integers(1, 100))
def test_windows_hold_every_chunk_once_in_order(chunks: list[Chunk], rows: int, most: int, first: int) -> None:
    """A window closes with the chunk that fills it: it is over its size by less than one chunk, and never empty."""
    windows = list(gather(chunks, WindowSize(rows, most, first)))
    assert [c for w in windows for c in w] == chunks
    for window in windows:
        assert window
        assert sum(c.rows_held for c in window[:-1]) < rows
        assert sum(c.bytes_held for c in window[:-1]) < most
    if len(windows) > 1:
        assert sum(c.rows_held for c in windows[0][:-1]) < min(first, rows)

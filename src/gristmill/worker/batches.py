"""Which rows go to the model together. Pure functions of lengths; nothing here runs a model or reads a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from gristmill.values import dataclass

# Measured on 2 cores with a 6-layer, 384-wide encoder: on a CPU, calls of 256 to 512 padded tokens run fastest in ONNX
# Runtime (1,536 a tenth slower: the working set leaves the cache) and 1,024 to 4,096 in torch, whose calls cost more; a
# GPU wants one to two orders of magnitude more.
ONNX_TOKENS = 512
CPU_TOKENS = 1536
GPU_TOKENS = 32768
ROWS_WITHOUT_LENGTHS = 32
MOST_ROWS = 4096
# What one more call of the model is worth in tokens, as a share of the budget. Measured with MiniLM on a CPU, a call
# costs about as much as 5 tokens, and small matrices run slower; over docstrings in windows of 256 rows, a sixteenth
# halves the padding (6.5 to 3.4 %) for a quarter more calls.
CALL_SHARE = 16


@dataclass(frozen=True)
class Budget:
    """What one call of the model may hold: padded `tokens` if rows have lengths, and `rows` in any case."""

    tokens: int | None
    rows: int

    def halved(self) -> Budget:
        """The budget to try after running out of memory; never below one row or one token."""
        tokens = None if self.tokens is None else max(1, self.tokens // 2)
        return Budget(tokens, max(1, self.rows // 2))

    def doubled(self, most: int) -> Budget:
        """Twice as many rows, `most` at most."""
        return Budget(self.tokens, max(self.rows, min(2 * self.rows, most)))

    def admits(self, rows: int, padded: int | None) -> bool:
        """Whether a call may hold this many rows, and this many padded tokens if rows have lengths."""
        return rows <= self.rows and (padded is None or self.tokens is None or padded <= self.tokens)

    @property
    def least(self) -> bool:
        """Whether nothing smaller can be tried."""
        return self.rows == 1


def cut(
    lengths: np.ndarray | None, rows: np.ndarray, budget: Budget, apart: np.ndarray | None = None
) -> list[np.ndarray]:
    """Batches of row numbers, each within the budget; together exactly `rows` (int64), each once. Rows marked in
    `apart` (bool [window]) share no batch with the others.

    With `lengths` (int [window], indexed by row number), rows go longest first, so that a batch holds rows of nearly
    one length, and memory runs out at once if at all; a row longer than the budget goes alone. Without lengths, rows
    keep their order. A batch ends early if the rows that follow are so much shorter that padding them would cost more
    than another call.
    """
    return list(cut_lazily(lengths, rows, lambda: budget, apart))


def cut_lazily(
    lengths: np.ndarray | None, rows: np.ndarray, budget: Callable[[], Budget], apart: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """As `cut`, but each batch is cut when requested, with the budget of that moment."""
    for part in divided(rows, apart):
        yield from _cut(lengths, part, budget)


def divided(rows: np.ndarray, apart: np.ndarray | None) -> list[np.ndarray]:
    """The `rows` that are not marked in `apart` (bool [window]) and those that are; either part only if it has any."""
    if apart is None:
        return [rows]
    alone = apart[rows]
    return [part for part in (rows[~alone], rows[alone]) if len(part)]


def _cut(lengths: np.ndarray | None, rows: np.ndarray, budget: Callable[[], Budget]) -> Iterator[np.ndarray]:
    order, widths = rows, None
    if lengths is not None:
        order = rows[np.argsort(-lengths[rows].astype(np.int64), kind="stable")]
        widths = np.maximum(lengths[order].astype(np.int64), 1)
    start = 0
    while start < len(order):
        now = budget()
        if widths is None or now.tokens is None:
            size = now.rows
        else:
            # The first row is the longest, so it sets the width of all.
            most = int(max(1, min(now.rows, now.tokens // int(widths[start]))))
            size = _fullest(widths[start : start + most], now.tokens / CALL_SHARE)
        yield order[start : start + size]
        start += size


def _fullest(widths: np.ndarray, call: float) -> int:
    """How many of the first rows (with falling `widths`) give the most tokens for what is computed, including a call's
    cost.
    """
    if widths[-1] == widths[0]:
        return len(widths)
    useful = np.cumsum(widths) / (np.arange(1, len(widths) + 1) * widths[0] + call)
    return len(useful) - int(np.argmax(useful[::-1]))


def padded_tokens(lengths: np.ndarray, batch: np.ndarray) -> int:
    """Tokens a model computes for a batch when all rows are padded to the longest."""
    return int(lengths[batch].max(initial=0)) * len(batch)

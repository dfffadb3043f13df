"""Position ranges: int64 arrays [k, 2] of start and stop, half open, sorted and disjoint."""

from __future__ import annotations

import numpy as np

__all__ = ["as_ranges", "clip", "inside", "within"]


def as_ranges(ranges: np.ndarray) -> np.ndarray:
    """The ranges without empty ones and with adjacent ones joined: fewer places to stop at."""
    out = np.asarray(ranges, dtype=np.int64).reshape(-1, 2)
    out = out[out[:, 0] < out[:, 1]]
    if len(out) < 2:
        return out
    apart = np.flatnonzero(out[1:, 0] > out[:-1, 1]) + 1
    starts = np.concatenate(([0], apart))
    stops = np.concatenate((apart, [len(out)])) - 1
    return np.stack((out[starts, 0], out[stops, 1]), axis=1)


def clip(ranges: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The parts of `ranges` in [start, stop)."""
    first = int(np.searchsorted(ranges[:, 1], start, side="right"))
    last = int(np.searchsorted(ranges[:, 0], stop, side="left"))
    part: np.ndarray = ranges[first:last].copy()
    if len(part):
        part[0, 0] = max(part[0, 0], start)
        part[-1, 1] = min(part[-1, 1], stop)
    return part


def inside(ranges: np.ndarray) -> np.ndarray:
    """Every position in `ranges`, int64, without a loop over them."""
    lengths = ranges[:, 1] - ranges[:, 0]
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    out: np.ndarray = np.arange(total, dtype=np.int64) + np.repeat(ranges[:, 0] - (ends - lengths), lengths)
    return out


def within(ranges: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """For each position, whether a range contains it (bool)."""
    if not len(ranges):
        return np.zeros(len(positions), dtype=bool)
    at = np.searchsorted(ranges[:, 0], positions, side="right") - 1
    return np.asarray((at >= 0) & (positions < ranges[np.maximum(at, 0), 1]))

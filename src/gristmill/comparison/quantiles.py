"""Exact quantiles of many numbers in bounded memory: they are kept in a file, and counted by their leading bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

BITS = 16  # that one reading of the file settles: 65,536 counts for each quantile
READ = 1 << 20  # numbers read at a time

_SIGN = np.uint64(1 << 63)


class Spool:
    """Numbers (float64, no NaN), in any order, appended to the file at `path`, which may not exist."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.count = 0
        with open(path, "xb"):
            pass

    def add(self, values: np.ndarray) -> None:
        """Append numbers, [n]."""
        if len(values):
            with open(self._path, "ab") as file:
                file.write(_sortable(values + 0.0).data)  # -0.0 is 0.0
            self.count += len(values)

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """For each share from 0 to 1 the number below which that share of them lies, interpolated linearly, as
        numpy.quantile does. There must be numbers.
        """
        at = [(self.count - 1) * share for share in shares]
        ranked = self._ranked({int(rank) for where in at for rank in (np.floor(where), np.ceil(where))})
        found = []
        for where in at:
            low, high = ranked[int(np.floor(where))], ranked[int(np.ceil(where))]
            found.append(low if low == high else low + (high - low) * (where - np.floor(where)))
        return found

    def _ranked(self, ranks: Iterable[int]) -> dict[int, float]:
        """The numbers of some ranks, counted from 0: radix selection, from the leading bits on."""
        known = {rank: (0, rank) for rank in ranks}  # its leading bits, and its rank among numbers that begin so
        for shift in range(64 - BITS, -1, -BITS):
            counts = self._counts({begins for begins, _ in known.values()}, shift)
            for rank, (begins, within) in known.items():
                upto = np.cumsum(counts[begins])
                digit = int(np.searchsorted(upto, within, side="right"))
                known[rank] = (begins << BITS | digit, within - (int(upto[digit - 1]) if digit else 0))
        bits = np.array([begins for begins, _ in known.values()], dtype=np.uint64)
        return dict(zip(known, _numbers(bits).tolist(), strict=True))

    def _counts(self, prefixes: set[int], shift: int) -> dict[int, np.ndarray]:
        """For numbers with these leading bits, how many have each value of the next ones."""
        counts = {begins: np.zeros(1 << BITS, dtype=np.int64) for begins in prefixes}
        for bits in self._read():
            digits = bits >> np.uint64(shift)
            leading = digits >> np.uint64(BITS)
            for begins, count in counts.items():
                mine = digits[leading == np.uint64(begins)] & np.uint64((1 << BITS) - 1)
                count += np.bincount(mine.astype(np.int64), minlength=1 << BITS)
        return counts

    def _read(self) -> Iterator[np.ndarray]:
        with open(self._path, "rb") as file:
            while data := file.read(8 * READ):
                yield np.frombuffer(data, dtype=np.uint64)


def _sortable(values: np.ndarray) -> np.ndarray:
    """Floats as whole numbers in the same order: their bits, of negative ones inverted."""
    bits = np.ascontiguousarray(values, dtype=np.float64).view(np.uint64)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _numbers(bits: np.ndarray) -> np.ndarray:
    return np.where(bits & _SIGN, bits & ~_SIGN, ~bits).view(np.float64)

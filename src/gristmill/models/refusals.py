"""Refusals in a row: when it is time to ask whether the endpoint refuses everything now. Decided by counting alone."""

from __future__ import annotations

DOUBT_AFTER = 20  # refusals, with no answer in between


class Refusals:
    """Those since the last answer. Each question costs something: it is asked after twice as many each time."""

    def __init__(self) -> None:
        self._in_a_row, self._after = 0, DOUBT_AFTER

    def one(self) -> None:
        """One more."""
        self._in_a_row += 1

    def none(self) -> None:
        """A request was answered."""
        self._in_a_row, self._after = 0, DOUBT_AFTER

    def are_many(self) -> bool:
        """Whether there are so many that it is time to ask."""
        return self._in_a_row >= self._after

    def asked(self) -> None:
        """It was asked, and does not refuse everything."""
        self._in_a_row, self._after = 0, 2 * self._after

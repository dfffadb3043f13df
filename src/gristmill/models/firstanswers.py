"""How many rows a model is asked for before it has answered one: decided by counting alone."""

from __future__ import annotations

FEW = 32  # rows in flight until one is answered
DOUBT_AFTER = 20  # rows that have failed, with none answered before, after which no more are asked for


class FirstAnswers:
    """What became of the rows of one worker: once one was answered, only their number limits the others. A model that
    fails on all of them may be wrong throughout, as when another one answers at its address: whether it is, is for
    others to find out, with rows from elsewhere.
    """

    def __init__(self) -> None:
        self.worked = False
        self.failure: BaseException | None = None  # the last one
        self._failed = 0

    def most(self, most: int) -> int:
        """How many of up to `most` rows may be in flight."""
        return most if self.worked else min(most, FEW)

    @property
    def doubted(self) -> bool:
        """Whether no more rows are to be asked for."""
        return not self.worked and self._failed >= DOUBT_AFTER

    def one(self, failure: BaseException | None) -> None:
        """A row was answered, or failed."""
        self.worked |= failure is None
        self._failed += failure is not None
        self.failure = failure or self.failure

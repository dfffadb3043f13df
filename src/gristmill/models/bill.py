"""What a row takes of an endpoint, and the rows that are told apart by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gristmill.models.contract import Journal
from gristmill.shards.counts import summed

if TYPE_CHECKING:
    from gristmill.models.bulk import Bulk

TINY = 1e-12  # of what is summed up: less is none


class TrialRow(dict[str, Any]):
    """A row that shows whether somebody answers now: no answer from before is one to it."""


class ShardRow(dict[str, Any]):
    """A row of a shard with this journal."""

    def __init__(self, row: Mapping[str, Any], journal: Journal) -> None:
        super().__init__(row)
        self.journal = journal


class BulkRow(dict[str, Any]):
    """A row whose request may have been answered in bulk."""

    def __init__(self, row: Mapping[str, Any], bulk: Bulk) -> None:
        super().__init__(row)
        self.bulk = bulk
        self.journal = bulk.journal


class KeptRow(ShardRow):
    """A row whose first answer is kept while it is asked for once more."""

    def first(self, request: bytes) -> tuple[Any, Mapping[str, float]] | None:
        """See Journal."""
        return self.journal.first(self.journal.key(dict(self)), request)

    def put_first(self, request: bytes, answer: Any, used: Mapping[str, float]) -> None:
        """See Journal."""
        self.journal.put_first(self.journal.key(dict(self)), request, answer, used)


class Answer(dict[str, Any]):
    """The columns of an answer, and what it has taken (contract.USED)."""

    used: Mapping[str, float] = {}


class Bill:
    """What one row has taken: the requests that a cache may know, and what those made cost. A row whose request may
    have been answered in bulk, or whose first answer is kept, is told by its class.
    """

    def __init__(self, row: Mapping[str, Any] | None = None) -> None:
        self.bulk = row.bulk if isinstance(row, BulkRow) else None
        self.trial = isinstance(row, TrialRow)
        self.kept = row if isinstance(row, KeptRow) else None
        self.keys: list[bytes] = []
        self.used: dict[str, float] = {}
        self._journal = row.journal if isinstance(row, (ShardRow, BulkRow)) else None
        self._again: dict[str, float] = {}
        self._ended = False

    def add(self, used: Mapping[str, float], again: bool = False) -> None:
        """One more request; with `again` another attempt at the row, if there is one, has its answer, and adds it."""
        self.used = summed([self.used, used])
        if self._ended and self._journal is not None:
            self._journal.took(used)
        if again:
            self._again = summed([self._again, used])

    def told(self) -> dict[str, float]:
        """What was added since this was called last: whoever calls it tells that."""
        used = {name: n - self._again.get(name, 0.0) for name, n in self.used.items()}
        self._again = dict(self.used)
        return {name: n for name, n in used.items() if n > TINY}

    def put_first(self, request: bytes, answer: Any) -> None:
        """See Journal; what the row took until now is told again with its next answer."""
        if self.kept is not None:
            self.kept.put_first(request, answer, self.used)
            self._again = self.used

    def unfinished(self) -> None:
        """The row gets no further in this run: what it took is told all the same, also what is added later."""
        self._ended = True
        if self._journal is not None:
            self._journal.took(self.told())

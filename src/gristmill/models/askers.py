"""Models behind endpoints at work: rows are given to who asks, which is paid for once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from gristmill.job.endpoints import Provider
from gristmill.job.specs import Call, FunctionModel
from gristmill.models.asking import Asking
from gristmill.models.batches import noted
from gristmill.models.bill import Answer, BulkRow, KeptRow, ShardRow, TrialRow
from gristmill.models.bulk import Bulk
from gristmill.models.contract import Journal, Place, Prepared, Told
from gristmill.models.firstanswers import FirstAnswers
from gristmill.models.inflight import Coroutines
from gristmill.models.paid import Paid, provided_by
from gristmill.models.provided import Provided
from gristmill.models.replies import MESSAGES, Unanswered, UnderWay
from gristmill.models.rowfunction import LoadedRows
from gristmill.values import dataclass

HEARD = 0.5  # seconds between two signs of life while batches are read
WAITING = 4  # rows that are begun, per request in flight: some wait before they are sent again
L = TypeVar("L", bound="LoadedAsker")


def loaded(
    asker: Callable[..., Any],
    spec: Asking,
    place: Place,
    takes: Mapping[str, str] | None,
    outputs: pa.Schema | None,
    kind: type[L],
    by_user: bool = False,
    rows: int = 1,
    **more: Any,
) -> L:
    """The model whose rows are answered by `asker(spec, share, at_once, limit, **more)`, as Paid and `endpoint_of` have
    these: a class with an async `__call__`, which gives an Answer, with `paid`, a Paid, and `aclose`. It takes and adds
    these columns (None: what its answers have); `by_user` as in RowModel. A request may be of several `rows`.
    """
    at_once = place.at_once or spec.most
    share = at_once / spec.most  # of the run's limits: that of this worker
    call = Call(asker, {"spec": spec, "share": share, "at_once": at_once, "limit": place.limit, **more}, "row", takes)
    returns = None if outputs is None else {field.name: str(field.type) for field in outputs}
    return kind(_Asked(call, returns, label=spec.name), replace(place, at_once=WAITING * at_once * rows), by_user)


class LoadedAsker(LoadedRows):
    """A model behind an endpoint at work; a RowModel."""

    def __init__(self, spec: FunctionModel, place: Place, by_user: bool) -> None:
        # The endpoint limits the time of each request, without that of waiting for its turn.
        super().__init__(spec, replace(place, limit=math.inf))
        self.by_user = by_user
        self._call.built.paid.share_in(place.run)  # from now on: it may have nothing to ask for
        self._bulks: dict[Journal, Bulk] = {}  # of attempts that are not over
        self._spec, self._limit = spec.call.args["spec"], place.limit

    def begin(self, prepared: Prepared, rows: np.ndarray, told: Told) -> None:
        """See RowModel."""
        if told.journal is not None:
            self._call.built.paid.shares(told.journal)
        if told.planned is not None:  # there is a plan, for which first rows were answered
            self._call.built.paid.resumed()
        if told.journal is not None and self._call.built.provided is None:
            self._look(told.journal, told.answered, told.proven)
        super().begin(prepared, rows, told)

    def bulk(self, journal: Journal, proven: bool = True) -> Bulk | None:
        """See BulkModel."""
        asker = self._call.built
        if asker.provided is None:
            return None
        asker.paid.shares(journal)  # before anything is ordered; what is answered from before is in no batch
        self._first = self._first or FirstAnswers()
        self._first.worked |= proven
        return self._begun_bulk(asker.provided, journal, self._first, proven)

    @property
    def trouble(self) -> str:
        """See RowModel."""
        paid: Paid = self._call.built.paid
        return paid.trouble

    @property
    def most_flying(self) -> int:
        """See RowModel."""
        paid: Paid = self._call.built.paid
        return paid.most_flying

    @property
    def put_off(self) -> int:
        """See RowModel."""
        paid: Paid = self._call.built.paid
        return paid.put_off

    @property
    def news(self) -> list[str]:
        """See RowModel."""
        paid: Paid = self._call.built.paid
        return paid.news

    def leave(self) -> None:
        """See RowModel."""
        self._flight.close(self._call.built.aclose)

    def _given(self, rows: list[Any], journal: Journal | None) -> list[Any]:
        if journal is None:
            return [TrialRow(row) for row in rows]
        if (bulk := self._bulks.get(journal)) is not None:
            return [BulkRow(row, bulk) for row in rows]
        kind = KeptRow if self._may_ask_again else ShardRow
        return [kind(row, journal) for row in rows]

    @property
    def _may_ask_again(self) -> bool:
        """Whether there are answers for which a row is asked for once more."""
        return False

    def _first_answers(self) -> FirstAnswers | None:
        # A model on this machine costs time alone, and is the quicker the more rows it is given.
        return FirstAnswers() if self._call.built.paid.remote else None

    def _lasts(self, error: BaseException) -> bool:
        return super()._lasts(error) and not isinstance(error, (Unanswered, UnderWay))

    def _begun_bulk(self, provided: Provided, journal: Journal, first: FirstAnswers, proven: bool) -> Bulk:
        for over in [other for other in list(self._bulks) if other.closed]:
            if (bulk := self._bulks.pop(over, None)) is not None:
                bulk.close()
        assert isinstance(self._flight, Coroutines)
        found = self._bulks[journal] = Bulk(self._call.built, provided, journal, self._flight.do, first, proven)
        return found

    def _look(self, journal: Journal, heard: Callable[[], None], proven: bool) -> None:
        """Take what batches of a shard have that an earlier run made: this one has no batch API."""
        if journal in self._bulks or not (left := noted(journal.notes)):
            return
        provider: Provider = "anthropic" if left[0].path == MESSAGES else "openai"
        provided = provided_by(provider, self._spec, self._call.built.paid, self._limit)
        bulk = self._begun_bulk(provided, journal, FirstAnswers(), proven)
        assert isinstance(self._flight, Coroutines)
        looked = self._flight.do(bulk.look())
        while not futures.wait([looked], HEARD).done:
            heard()  # it goes on, however large the files are that it reads
        looked.result()

    def _kept(self, answer: Answer) -> Any:
        return dict(answer)


@dataclass(frozen=True)
class _Asked(FunctionModel):
    label: str = ""

    @property
    def name(self) -> str:
        return self.label

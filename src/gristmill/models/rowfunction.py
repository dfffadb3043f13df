"""A user's function of one row, called for many rows at a time: a coroutine function, or a plain one in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.rows import picked
from gristmill.errors import GristmillError
from gristmill.job.specs import FunctionModel
from gristmill.models.batchfunction import LoadedFunction
from gristmill.models.calls import is_async
from gristmill.models.contract import Journal, Place, Prepared
from gristmill.models.conversion import to_batch
from gristmill.models.inflight import DROPPED, Answers, Coroutines, Flight, Raised, Threads
from gristmill.process.failure import EarlierFailure, failure_of
from gristmill.process.ownership import own
from gristmill.shards.counts import summed


@dataclass(frozen=True)
class Told:
    """Who is told of answers: `answered` after each, and the journal, with the places of rows that are in no shard."""

    answered: Callable[[], None]
    journal: Journal | None = None
    places: Sequence[tuple[str, int]] | None = None


class Begun:
    """Rows whose answers are on their way: int64 [k], ascending, and the answers in that order. The others are asked
    for when they are needed, and `told` to the same.
    """

    def __init__(self, rows: np.ndarray, answers: Answers, told: Told) -> None:
        self.rows = rows
        self.answers = answers
        self.told = told
        self._later: dict[int, Any] = {}

    def lacking(self, index: np.ndarray) -> np.ndarray:
        """Those of these rows for which nobody was asked yet."""
        others = np.setdiff1d(index, self.rows)
        return others if not self._later else np.array([n for n in others.tolist() if n not in self._later], np.int64)

    def later(self, index: np.ndarray, found: Sequence[Any]) -> None:
        """Rows that were asked for after the others, and their answers."""
        self._later.update(zip(index.tolist(), found, strict=True))

    def take(self, index: np.ndarray) -> list[Any]:
        """The answers to the rows at `index`."""
        places = np.searchsorted(self.rows, index)
        places[places == len(self.rows)] = 0
        if len(self.rows) and (self.rows[places] == index).all():
            return self.answers.of(places.tolist())
        begun = dict(zip(self.rows.tolist(), range(len(self.rows)), strict=True))
        return [self._later[n] if n in self._later else self.answers.of([begun[n]])[0] for n in index.tolist()]


class LoadedRows(LoadedFunction):
    """A function of one row at work; a RowModel. A row whose call raises fails alone."""

    by_user = True

    def __init__(self, spec: FunctionModel, place: Place) -> None:
        super().__init__(spec, place, "rows")
        function = self._call.function
        coroutine = is_async(type(function) if self._call.built is not None else function)
        self._anew: dict[str, float] = {}  # what rows took that were asked for once more
        self._flight: Flight = (
            Coroutines(function, place.at_once, place.limit) if coroutine else Threads(function, place.at_once)
        )

    def begin(
        self,
        prepared: Prepared,
        rows: np.ndarray,
        answered: Callable[[], None],
        journal: Journal | None = None,
        places: Sequence[tuple[str, int]] | None = None,
    ) -> None:
        """See RowModel."""
        told = Told(answered, journal, places)
        prepared.inputs.begun = Begun(rows, self._asked(prepared, rows, told), told)

    def works(self, prepared: Prepared, index: np.ndarray) -> bool:
        """See RowModel."""
        begun: Begun | None = prepared.inputs.begun
        answers = self._asked(prepared, index, Told(_unheard if begun is None else begun.told.answered))
        answers.wait()
        self._anew = summed([self._anew, answers.used])
        return not any(isinstance(answer, BaseException) for answer in answers.of(range(len(index))))

    def answered(self, prepared: Prepared, rows: np.ndarray, journal: Journal) -> None:
        """See RowModel."""
        for row in to_batch(picked(prepared.inputs.rows, rows), "rows"):
            if key := journal.key(row):
                journal.earlier(key)

    def waiting(self, prepared: Prepared, seconds: float) -> int:
        """See RowModel."""
        return self._begun(prepared).answers.wait(seconds)

    @property
    def trouble(self) -> str:
        """See RowModel."""
        return ""

    def drop(self, prepared: Prepared) -> None:
        """See RowModel."""
        self._begun(prepared).answers.dropped = True

    def used(self, prepared: Prepared) -> Mapping[str, float]:
        """See RowModel."""
        begun: Begun | None = getattr(prepared.inputs, "begun", None)  # a window without rows has no inputs
        asked = {} if begun is None else begun.answers.used
        found, self._anew = summed([asked, self._anew]), {}
        return found

    def leave(self) -> None:
        """See RowModel."""
        self._flight.close()

    def close(self) -> None:
        """Calls the `close` method of a class that has one, or awaits its `aclose` or `close`."""
        built = self._call.built
        self._flight.close(getattr(built, "aclose", None) or getattr(built, "close", None))

    def _result(self, prepared: Prepared, index: np.ndarray, given: pa.Table) -> Any:
        begun: Begun | None = prepared.inputs.begun
        if begun is None:
            nobody = np.empty(0, dtype=np.int64)
            told = Told(_unheard)
            begun = prepared.inputs.begun = Begun(nobody, self._asked(prepared, nobody, told), told)
        begun.answers.wait()
        if len(others := begun.lacking(index)):
            answers = self._asked(prepared, others, begun.told)
            answers.wait()
            self._anew = summed([self._anew, answers.used])
            begun.later(others, answers.of(range(len(others))))
        found = begun.take(index)
        return found if self._returns is not None else [self._nothing if one is None else one for one in found]

    @property
    def _nothing(self) -> ValueError:
        """For a row whose answer was forgotten: what is meant to be null is written so."""
        return ValueError(
            f"{self._name} returned None: return a value, or a dict of columns, as {{'y': None}} for a null one "
            "(or declare returns=)"
        )

    def _kept(self, answer: Any) -> Any:
        """What a journal keeps of an answer."""
        return answer

    def _lasts(self, error: BaseException) -> bool:
        """Whether a row would fail so again: not what memory, disks and networks have for a while."""
        return not isinstance(error, (GristmillError, MemoryError, OSError, TimeoutError, asyncio.TimeoutError))

    def _asked(self, prepared: Prepared, index: np.ndarray, told: Told) -> Answers:
        rows, journal = to_batch(picked(prepared.inputs.rows, index), "rows"), told.journal
        keys = [] if journal is None else [journal.key(row) for row in rows]
        places = None if told.places is None else [told.places[n] for n in index.tolist()]
        known: set[int] = set()

        def heard(answers: Answers, place: int, answer: Any) -> None:
            if place not in known:
                used = getattr(answer.error if isinstance(answer, Raised) else answer, "used", {})
                answers.took(used)
                where = None if places is None else places[place]
                if journal is None or answer is DROPPED:
                    pass
                elif not isinstance(answer, Raised):
                    journal.put(keys[place], self._kept(answer), used, where)
                elif self._lasts(answer.error):
                    journal.failed(keys[place], failure_of(answer.error, "model"), used, where)
                else:
                    journal.took(used)
            told.answered()

        answers = Answers(self._given(rows, journal), heard, own if self.by_user else _same, self._order(rows))
        for place, key in enumerate(keys):
            if journal is None or not key:
                continue
            there, answer = journal.earlier(key)
            if there:
                known.add(place)
                answers.put(place, Raised(answer) if isinstance(answer, EarlierFailure) else answer)
        self._flight.begin(answers)
        return answers

    def _given(self, rows: list[Any], journal: Journal | None) -> list[Any]:
        """What the function is given for these rows of the shard of a journal."""
        return rows

    def _order(self, rows: Sequence[Any]) -> Sequence[int]:
        """The order in which to begin these rows."""
        return range(len(rows))

    def _begun(self, prepared: Prepared) -> Begun:
        found: Begun = prepared.inputs.begun
        return found


def _unheard() -> None:
    pass


def _same(answer: Any) -> Any:
    return answer

"""A user's function of one row, called for many rows at a time: a coroutine function, or a plain one in threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.rows import picked
from gristmill.job.specs import FunctionModel
from gristmill.models.batchfunction import LoadedFunction
from gristmill.models.calls import is_async
from gristmill.models.contract import Journal, Place, Prepared
from gristmill.models.conversion import to_batch
from gristmill.models.inflight import Answers, Coroutines, Flight, Raised, Threads
from gristmill.process.ownership import own
from gristmill.shards.counts import summed


@dataclass(frozen=True)
class Told:
    """Who is told of answers, as RowModel.begin has them."""

    answered: Callable[[], None]
    journal: Journal | None = None
    places: Sequence[tuple[str, int]] | None = None


class Begun:
    """Rows whose answers are on their way: int64 [k], ascending, and the answers in that order. The others are asked
    for with the same listener and journal.
    """

    def __init__(self, rows: np.ndarray, answers: Answers, told: Told) -> None:
        self.rows = rows
        self.answers = answers
        self.told = told
        self._taken = np.zeros(len(rows), dtype=bool)

    def take(self, index: np.ndarray) -> list[Any] | None:
        """The answers to the rows at `index`, once; None if one of them was not begun, or has been taken already: it
        is to be asked for again.
        """
        places = np.searchsorted(self.rows, index)
        places[places == len(self.rows)] = 0
        if not len(self.rows) or (self.rows[places] != index).any() or self._taken[places].any():
            return None
        self._taken[places] = True
        return self.answers.of(places.tolist())


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
        prepared.inputs.begun = Begun(rows, self._asked(picked(prepared.inputs.rows, rows), rows, told), told)

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
        found = None
        if begun is not None:
            begun.answers.wait()
            found = begun.take(index)
        if found is None:
            answers = self._asked(given, index, Told(_unheard) if begun is None else begun.told)
            answers.wait()
            self._anew = summed([self._anew, answers.used])
            found = answers.of(range(len(index)))
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

    def _asked(self, given: pa.Table, index: np.ndarray, told: Told) -> Answers:
        rows, journal, places = to_batch(given, "rows"), told.journal, told.places
        keys = [] if journal is None else [journal.key(row) for row in rows]
        known: set[int] = set()

        def heard(answers: Answers, place: int, answer: Any) -> None:
            if place not in known:
                used = getattr(answer.error if isinstance(answer, Raised) else answer, "used", {})
                answers.took(used)
                if journal is not None and isinstance(answer, Raised):
                    journal.took(used)
                elif journal is not None:
                    where = None if places is None else places[int(index[place])]
                    journal.put(keys[place], self._kept(answer), used, where)
            told.answered()

        answers = Answers(self._given(rows, journal), heard, own if self.by_user else _same, self._order(rows))
        for place, key in enumerate(keys):
            if journal is None or not key:
                continue
            there, answer = journal.earlier(key)
            if there:
                known.add(place)
                answers.put(place, answer)
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

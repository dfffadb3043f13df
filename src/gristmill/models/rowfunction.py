"""A user's function of one row, called for many rows at a time: a coroutine function, or a plain one in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, lossless, together
from gristmill.arrow.rows import picked
from gristmill.errors import BadOutput, GristmillError
from gristmill.job.specs import FunctionModel
from gristmill.models.batchfunction import LoadedFunction
from gristmill.models.calls import is_async
from gristmill.models.contract import Columns, Journal, Place, Prepared, Told
from gristmill.models.conversion import ROWS, to_batch
from gristmill.models.firstanswers import FirstAnswers
from gristmill.models.inflight import DROPPED, Answers, Coroutines, Flight, Raised, Threads
from gristmill.models.rowtypes import FORMAT, AnswerTypes, Checks, Misfit
from gristmill.process.failure import EarlierFailure, SomeFailed, Unasked, failure_of
from gristmill.process.ownership import own
from gristmill.shards.counts import summed


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
        super().__init__(spec, place, FORMAT)
        function = self._call.function
        coroutine = is_async(type(function) if self._call.built is not None else function)
        self._types = AnswerTypes(self._name, self._output, self._renamed, self._returns, self._said)
        self._anew: dict[str, float] = {}  # what rows took that were asked once more, or for an attempt that is over
        self._counting = threading.Lock()
        self._first = self._first_answers()
        self._flight: Flight = (
            Coroutines(function, place.at_once, place.limit, self._first)
            if coroutine
            else Threads(function, place.at_once)
        )

    def begin(self, prepared: Prepared, rows: np.ndarray, told: Told) -> None:
        """See RowModel."""
        prepared.inputs.begun = Begun(rows, self._asked(prepared, rows, told), told)

    def works(self, prepared: Prepared, index: np.ndarray) -> bool:
        """See RowModel."""
        begun: Begun | None = prepared.inputs.begun
        answers = self._asked(prepared, index, Told(_unheard if begun is None else begun.told.answered))
        answers.wait()
        self._took_anew(answers.used)
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

    @property
    def most_flying(self) -> int:
        """See RowModel."""
        return 0

    @property
    def put_off(self) -> int:
        """See RowModel."""
        return 0

    @property
    def news(self) -> list[str]:
        """See RowModel."""
        return []

    def drop(self, prepared: Prepared) -> None:
        """See RowModel."""
        self._begun(prepared).answers.dropped = True

    def used(self, prepared: Prepared) -> Mapping[str, float]:
        """See RowModel."""
        begun: Begun | None = getattr(prepared.inputs, "begun", None)  # a window without rows has no inputs
        asked = {} if begun is None else begun.answers.used
        with self._counting:
            found, self._anew = summed([asked, self._anew]), {}
        return found

    def _took_anew(self, used: Mapping[str, float]) -> None:
        with self._counting:
            self._anew = summed([self._anew, used])

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
            self._took_anew(answers.used)
            begun.later(others, answers.of(range(len(others))))
        return begun.take(index)

    def predict(self, prepared: Prepared, index: np.ndarray) -> pa.Table:
        """The answers as columns: of all rows at once, or of one after the other where they do not go together."""
        try:
            try:
                table, failed = super().predict(prepared, index), None
            except SomeFailed as some:
                if any(isinstance(error, Unasked) for error in some.failed.values()):
                    raise
                table, failed = some.table, some
            _fitted(table, prepared.inputs.begun.told.planned)
        except (BadOutput, Lossy, UnicodeEncodeError):
            if self._returns is None and prepared.inputs.begun.told.planned is None:  # nothing tells which are right
                raise
            return self._one_by_one(prepared, index)
        if failed is not None:
            raise failed
        return table

    def _one_by_one(self, prepared: Prepared, index: np.ndarray) -> pa.Table:
        planned = prepared.inputs.begun.told.planned
        tables: list[pa.Table] = []
        failed: dict[int, BaseException] = {}
        for place, answer in enumerate(prepared.inputs.begun.take(index)):
            if isinstance(answer, BaseException):
                failed[place] = answer
                continue
            row = prepared.inputs.rows.slice(int(index[place]), 1)
            try:
                tables.append(pa.table(dict(self._types.columns(answer, row, planned))))
            except Exception as e:  # Misfit, or what an answer holds in a value's place
                failed[place] = e
        try:
            table = together(tables) if tables else pa.table({})
        except Lossy as e:
            raise BadOutput(
                f"{self._name} returned other types than before: {e}; declare them with returns= (with --restart, "
                "restart=True, if there is a result, whose answers are kept)"
            ) from e
        table = table.replace_schema_metadata({ROWS: b""})
        if failed:
            raise SomeFailed(table, failed, raised=True)
        return table

    def _kept(self, answer: Any) -> Any:
        """What a journal keeps of an answer."""
        return answer

    def _check(self, answer: Any, rows: pa.Table, row: int, planned: Columns | None, checks: Checks) -> None:
        """Raises Misfit, or another exception, if an answer to a row cannot be written in its columns."""
        self._types.check(answer, rows, row, planned, checks)

    def _lasts(self, error: BaseException) -> bool:
        """Whether a row would fail so again: not what memory, disks and networks have for a while."""
        late = (TimeoutError, asyncio.TimeoutError, futures.TimeoutError)  # three before Python 3.11
        passing = (GristmillError, Unasked, MemoryError, OSError, *late)
        return not isinstance(error, passing)

    def _first_answers(self) -> FirstAnswers | None:
        """What decides whether to ask for more rows; None: nothing but their number."""
        return None

    def _asked(self, prepared: Prepared, index: np.ndarray, told: Told) -> Answers:
        rows, journal = to_batch(picked(prepared.inputs.rows, index), "rows"), told.journal
        keys = [] if journal is None else [journal.key(row) for row in rows]
        places = None if told.places is None else [told.places[n] for n in index.tolist()]
        known: set[int] = set()
        checks, table = self._types.checks(told.planned), prepared.inputs.rows

        def heard(answers: Answers, place: int, answer: Any) -> None:
            if place not in known:
                used = getattr(answer.error if isinstance(answer, Raised) else answer, "used", {})
                answers.took(used)
                where = None if places is None else places[place]
                if journal is None or answer is DROPPED:
                    pass
                elif journal.closed:
                    self._took_anew(used)
                elif not isinstance(answer, Raised):
                    journal.put(keys[place], self._kept(answer), used, where)
                elif self._lasts(answer.error):
                    journal.failed(keys[place], failure_of(answer.error, "model"), used, where)
                else:
                    journal.took(used)
            told.answered()

        def owned(place: int, answer: Any) -> Any:
            if isinstance(answer, BaseException):
                return Raised(answer)
            if self.by_user:
                answer = own(dict(answer) if _is_view(answer) else answer)
            try:
                self._check(answer, table, int(index[place]), told.planned, checks)
            except Misfit as e:
                e.used = getattr(answer, "used", {})
                raise
            return answer

        def fits(answer: Any, place: int) -> bool:
            try:
                self._check(answer, table, int(index[place]), told.planned, checks)
            except Exception:  # what was one when other columns were planned: it is asked for again
                return False
            return True

        answers = Answers(self._given(rows, journal), heard, owned, self._order(rows))
        answers.proven = told.proven
        for place, key in enumerate(keys):
            if journal is None or not key:
                continue
            there, answer = journal.earlier(key)
            if there and (isinstance(answer, EarlierFailure) or fits(answer, place)):
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


def _is_view(answer: Any) -> bool:
    """Whether an answer is a mapping that may show what somebody else's dict has."""
    return isinstance(answer, Mapping) and not isinstance(answer, dict)


def _unheard() -> None:
    pass


def _fitted(table: pa.Table, planned: Columns | None) -> None:
    """Raises Lossy if columns are of other types than planned, and do not fit these."""
    for field in () if planned is None else planned.types:
        if field.name in table.column_names:
            lossless(table.column(field.name), field.type)

"""Steps on rows before the model: what they do to the rows, and which source row each resulting row belongs to.

What a step returns for a row is that row's own: nothing is blanked or cut because of its neighbours, with one
exception. A column has one type, so 8 is passed on as 8.0 if its window has a fraction, and a struct gets the fields of
all. These are equal values, but `str(value)` tells them apart: a step before such a function should always return one
type.
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, together
from gristmill.arrow.rows import picked
from gristmill.arrow.topython import to_rows
from gristmill.errors import BadOutput
from gristmill.job.specs import Step
from gristmill.models.calls import LoadedCall, load_call
from gristmill.models.conversion import (
    FRAMES,
    LACKS,
    ROW,
    ROWS,
    Habit,
    from_result,
    is_frame,
    null_numbers,
    owned,
    to_batch,
    told_nulls,
)
from gristmill.models.passthrough import handed_back, same
from gristmill.models.takes import takes_of
from gristmill.process.failure import SomeFailed
from gristmill.process.startup import UserCode
from gristmill.values import dataclass
from gristmill.worker.batches import divided
from gristmill.worker.bisection import DeadRow, Doubt, Isolation, Stage, length_error, told_dead
from gristmill.worker.identity import digest_of_row, digests_of
from gristmill.worker.recipe import Task

STEP_ROWS = 4096  # rows a step gets in one call: enough for vectorised code, few enough to hold several copies
# Immutable types; everything else that a flat_map makes is copied.
_FIXED = {str, int, float, bool, bytes, type(None), datetime.datetime, datetime.date}


@dataclass(frozen=True)
class Applied:
    """What a step made of rows: the rows after it, the number of the row that each came from, and the rows that failed.
    `digests` (uint32, one per row) if it made, or may have made, several rows of one. `returned`: the columns that a
    map gave back, changed or not; `partly`: those that it gave for some rows only. `framed`: the columns that it was
    given as a frame, if it gave back frames, too.
    """

    rows: pa.Table
    origin: np.ndarray
    dead: list[DeadRow]
    digests: np.ndarray | None = None
    returned: frozenset[str] = frozenset()
    partly: frozenset[str] = frozenset()
    framed: frozenset[str] = frozenset()

    @property
    def whole(self) -> bool:
        """Whether a map gave back frames of the whole rows: with one of the columns that it was given, or more."""
        return bool(self.framed & self.returned)

    def moved(self, first: int) -> Applied:
        """The same for rows that are a slice of others, starting at row `first`."""
        return replace(self, origin=self.origin + first, dead=[replace(d, row=d.row + first) for d in self.dead])


class LoadedStep:
    """A step with its function loaded (a class is built once per worker); rows that fail in it die at `stage`."""

    def __init__(self, step: Step, name: str = "", stage: Stage = Stage.BEFORE) -> None:
        self._takes = None if step.call is None else takes_of(step.call)
        self.step = step
        self.name = name  # its place among the steps
        self.made: dict[str, pa.Field] = {}  # columns that its dicts added to probed rows; nullable: not to each
        self.sparse = False  # whether it has returned dicts
        self._frames = False  # whether all that it has returned for the rows at hand are frames
        self._habit = Habit()
        self.stage = stage
        self.call = self._load()
        self._task: Task | None = None
        self._where: Any = None
        self._good: Callable[[], Any] | None = None  # makes the last input for which the function worked
        self.doubt = Doubt(self._still_works)

    def _load(self) -> LoadedCall | None:
        return None if self.step.call is None else load_call(self.step.call)

    def made_ready(self, schema: pa.Schema) -> None:
        """Do once what the first rows would have to wait for: compile a condition. Raises BadJob."""
        if self.step.expression is not None and self._where is None:
            from gristmill.sources.where import SqlWhere

            self._where = SqlWhere(self.step.expression, schema, "filter")

    def close(self) -> None:
        """End what a condition holds open."""
        if self._where is not None:
            self._where.close()

    def begin(self, task: Task) -> None:
        """Called before the rows of a task. A class that was given probed rows, which it will be given again, is built
        anew, so that one that remembers rows does not take these for different ones.
        """
        on_trial = self._task is not None and self._task.kind != "score"
        if self._task is not task and (on_trial or task.kind != "score"):
            self.doubt.worked()  # rows of a probe are scored again: they count once
        if on_trial and self._task is not task and self.call is not None and self.call.built is not None:
            self.call.close()
            self.call = self._good = None
            self.call = self._load()
        self._task, self.doubt.proven = task, task.proven

    def _still_works(self) -> bool | None:
        if self._good is None:
            return None
        assert self.call is not None
        try:
            with UserCode():
                result = self.call(self._good())
                if self.step.kind == "flat_map":
                    list(result)
        except KeyboardInterrupt:
            raise
        except BaseException:  # any failure answers the question
            return False
        return True

    def apply(self, rows: pa.Table) -> Applied:
        """What the step makes of the rows. Raises BadOutput if it broke the row count."""
        if self._takes is None:
            return self._completed(self._applied(rows), rows)
        self._takes.check(rows.schema)
        refused = self._takes.refused(rows)
        if not refused:
            return self._completed(self._applied(rows), rows)
        kept = np.setdiff1d(np.arange(rows.num_rows), [r.row for r in refused])
        if len(kept):
            found = self._completed(self._applied(picked(rows, kept)), rows)
        else:
            found = Applied(rows.slice(0, 0), kept, [])
        dead = [replace(d, row=int(kept[d.row])) for d in found.dead]
        dead += [DeadRow(r.row, self.stage, r.error, r.message, step=self.step.name) for r in refused]
        return replace(found, origin=kept[found.origin], dead=dead)

    def _completed(self, found: Applied, given: pa.Table) -> Applied:
        """Add nulls for each column that the step's dicts added to the first rows but to none of these: whatever comes
        after it finds the same columns, however the rows are cut.
        """
        if self._task is None or self.step.kind == "filter" or not (self.sparse or self.step.kind == "flat_map"):
            return found
        if self._task.kind != "score":
            for f in found.rows.schema:
                if f.name in given.column_names:
                    continue
                before = self.made.get(f.name, f)
                optional = found.rows.column(f.name).null_count > 0 or (f.name in self.made and before.nullable)
                self.made[f.name] = (f if pa.types.is_null(before.type) else before).with_nullable(optional)
        rows = found.rows
        for f in self._task.made.get(self.name, ()):
            if f.name not in rows.column_names:
                rows = rows.append_column(f.with_nullable(True), pa.nulls(rows.num_rows, f.type))
        return replace(found, rows=rows)

    def _applied(self, rows: pa.Table) -> Applied:
        if self.step.kind == "filter":
            return self._filter(rows)
        if self.step.kind == "flat_map":
            return self._flat_map(rows)
        return self._map(rows)

    # ------------------------------------------------ kinds

    def _filter(self, rows: pa.Table) -> Applied:
        dead: list[DeadRow] = []
        if self.step.expression is not None:
            self.made_ready(rows.schema)
            mask = self._where.mask(rows)
        else:
            mask = np.zeros(rows.num_rows, dtype=bool)
            for index, result in self._called(rows, dead):
                mask[index] = self._as_mask(result)
        kept = np.flatnonzero(mask)
        return Applied(rows if len(kept) == rows.num_rows else picked(rows, kept), kept, dead)

    def _as_mask(self, result: pa.Table) -> np.ndarray:
        kind = result.schema.field(0).type if result.num_columns == 1 else f"{result.num_columns} columns"
        if isinstance(kind, str) or not (pa.types.is_boolean(kind) or pa.types.is_null(kind)):  # None counts as False
            raise BadOutput(f"filter {self.step.name} must return one bool per row, not {kind}")
        if pa.types.is_null(kind):
            return np.zeros(result.num_rows, dtype=bool)
        return np.asarray(result.column(0).fill_null(False).to_numpy(zero_copy_only=False), dtype=bool)

    def _map(self, rows: pa.Table) -> Applied:
        dead: list[DeadRow] = []
        parts = []
        self._frames = self.step.call is not None and self.step.call.batch_format in FRAMES
        called = self._called(rows, dead)
        names = rows.column_names if self._takes is None else self._takes.columns
        framed = frozenset(names if self._frames else ())
        for index, result in called:
            digest = None
            if ROW in result.column_names:
                origin = index[self._checked_rows(result.column(ROW), len(index))]
                result = result.drop_columns([ROW])
                if len(np.unique(origin)) < len(origin):
                    digest = digests_of(result.select([n for n in result.column_names if not n.startswith(LACKS)]))
            else:
                origin = index
            returned = frozenset(n for n in result.column_names if not n.startswith(LACKS))
            partly = frozenset(
                n for n in returned if LACKS + n in result.column_names and _any(result.column(LACKS + n))
            )
            merged = self._merged(_pick(rows, origin), result)
            parts.append(Applied(merged, origin, [], digest, returned, partly, framed))
        return self.together(parts, rows, dead)

    def together(self, parts: Sequence[Applied], like: pa.Table, dead: Sequence[DeadRow]) -> Applied:
        """What several calls made of rows `like`, in the order of the rows it was made from, whatever order a step
        used; `dead` are the other rows. Raises BadOutput if types differ.
        """
        try:
            rows = _concatenated([p.rows for p in parts], like)
        except Lossy as e:
            raise BadOutput(f"step {self.step.name} returned different types for different batches: {e}") from e
        digests, origin = None, _joined([p.origin for p in parts])
        if any(p.digests is not None for p in parts):
            digests = _joined([np.zeros(len(p.origin), np.uint32) if p.digests is None else p.digests for p in parts])
        if (np.diff(origin) < 0).any():
            order = np.argsort(origin, kind="stable")
            rows, origin, digests = picked(rows, order), origin[order], None if digests is None else digests[order]
        telling = [p for p in parts if len(p.origin)]  # one whose rows are all dead returned nothing
        returned = frozenset[str]().union(*(p.returned for p in telling))
        partly = frozenset[str]().union(*(p.partly | (returned - p.returned) for p in telling))
        framed = frozenset.intersection(*(p.framed for p in telling)) if telling else frozenset[str]()
        return Applied(rows, origin, [*dead, *(d for p in parts for d in p.dead)], digests, returned, partly, framed)

    def _checked_rows(self, column: pa.ChunkedArray, given: int) -> np.ndarray:
        try:
            numbers = np.asarray(column.cast(pa.int64()).to_numpy(), dtype=np.int64)
        except (pa.ArrowInvalid, ValueError) as e:
            raise BadOutput(f"step {self.step.name}: `_row` holds something other than row numbers ({e})") from e
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= given):
            raise BadOutput(
                f"step {self.step.name}: `_row` names a row that it was not given ({numbers.max()} of {given})"
            )
        return numbers

    def _flat_map(self, rows: pa.Table) -> Applied:
        assert self.call is not None
        made: list[dict[str, Any]] = []
        origin: list[int] = []
        digests: list[int] = []
        dead: list[DeadRow] = []
        for start in range(0, rows.num_rows, STEP_ROWS):
            given = self._given(rows.slice(start, STEP_ROWS))
            for number, row in enumerate(to_rows(given), start):
                try:
                    with UserCode():  # also while a generator is being iterated
                        result = self.call(row)
                        if isinstance(result, BaseException):
                            dead.append(told_dead(number, self.stage, result, self.step.name))
                            continue
                        pieces = list(self._pieces(result))
                except (BadOutput, KeyboardInterrupt):
                    raise
                except BaseException as e:
                    f = self.doubt.failed(e)
                    dead.append(DeadRow(number, self.stage, f.type, f.message, f.traceback, self.step.name))
                else:
                    self._good = partial(_row, given, number - start)
                    self.doubt.worked()
                    made.extend(pieces)
                    origin.extend([number] * len(pieces))
                    digests.extend(map(digest_of_row, pieces))
        kinds = self._given(rows)
        try:
            added = self._held(made, kinds)
        except UnicodeEncodeError:
            unheld = self._unheld(made, origin, kinds)
            kept = [i for i, number in enumerate(origin) if number not in unheld]
            made, origin, digests = [made[i] for i in kept], [origin[i] for i in kept], [digests[i] for i in kept]
            dead += [told_dead(number, self.stage, e, self.step.name) for number, e in unheld.items()]
            added = self._held(made, kinds)
        index, content = np.array(origin, dtype=np.int64), np.array(digests, dtype=np.uint32)
        after = picked(rows, index) if made else rows.slice(0, 0)
        return Applied(after if added is None else self._merged(after, added), index, dead, content)

    def _held(self, made: list[dict[str, Any]], given: pa.Table) -> pa.Table | None:
        """What a flat_map has made, as a table; None if that has no columns."""
        name = f"flat_map {self.step.name}"
        return from_result(made, len(made), name, "output", lacks=True, given=given) if any(made) else None

    def _unheld(self, made: list[dict[str, Any]], origin: list[int], given: pa.Table) -> dict[int, BaseException]:
        """The rows from which something was made that no column can hold, with the reason."""
        found: dict[int, BaseException] = {}
        for number, pieces in groupby(range(len(made)), key=origin.__getitem__):
            try:
                self._held([made[i] for i in pieces], given)
            except UnicodeEncodeError as e:
                found[number] = e
        return found

    def _merged(self, rows: pa.Table, added: pa.Table) -> pa.Table:
        """`rows` with the columns of `added`, which replace those of the same name. Where a dict lacked one, the row's
        own value stays; where the values are those that the step was given, so does the column that it was given.
        """
        assert self.step.call is not None
        form = "rows" if self.step.kind == "flat_map" else self.step.call.batch_format
        given = self._given(rows)
        for name in added.column_names:
            if name.startswith(LACKS):
                continue
            column, at = added.column(name), rows.schema.get_field_index(name)
            if at < 0:
                rows = rows.append_column(name, column)
                continue
            lacks, had = added.column(LACKS + name) if LACKS + name in added.column_names else None, rows.column(at)
            field = rows.schema.field(at)
            if lacks is not None:
                try:
                    column = _filled(lacks, had, column)
                except Lossy as e:
                    raise BadOutput(
                        f"step {self.step.name} returned column {name!r} for some rows only, and its type does not "
                        f"fit the values of the others: {e}"
                    ) from e
            if name in given.column_names:
                column = handed_back(column, given.column(name), form)
            if field.type.equals(column.type) and field.metadata and same(column, had):
                column = had
            rows = rows.set_column(at, field if column is had else name, column)
        return rows

    def _pieces(self, result: Any) -> Iterable[dict[str, Any]]:
        if result is None or isinstance(result, (str, bytes, dict)) or not isinstance(result, Iterable):
            raise BadOutput(
                f"flat_map {self.step.name} returned {type(result).__name__}: it must return a list of dicts"
            )
        for piece in result:
            if not isinstance(piece, dict):
                raise BadOutput(
                    f"flat_map {self.step.name} returned a list of {type(piece).__name__}: it must hold dicts"
                )
            yield {n: v if type(v) in _FIXED else _own(v) for n, v in piece.items()}

    # ------------------------------------------------ calls

    def _given(self, rows: pa.Table) -> pa.Table:
        return rows if self._takes is None else self._takes.given(rows)

    def _called(self, rows: pa.Table, dead: list[DeadRow]) -> list[tuple[np.ndarray, pa.Table]]:
        assert self.call is not None and self.step.call is not None
        function, form, name = self.call, self.step.call.batch_format, self.step.name
        count = rows.num_rows
        numbered = self._given(rows).append_column(ROW, pa.array(np.arange(count, dtype=np.int64)))

        def call(index: np.ndarray) -> pa.Table:
            first, several = int(index[0]), len(index)
            beside = int(index[-1]) - first == several - 1
            given = numbered.slice(first, several) if beside else picked(numbered, index)
            given = given.set_column(given.num_columns - 1, ROW, pa.array(np.arange(len(index), dtype=np.int64)))
            batch = to_batch(given, form)
            try:
                answered = function(batch)
            except TypeError as e:
                told_nulls(e, given, form)
                raise
            self._frames = self._frames and is_frame(answered)
            try:
                result = from_result(
                    answered,
                    None,
                    f"step {name}",
                    "output",
                    lacks=self.step.kind == "map",
                    given=given,
                    habit=self._habit,
                )
            except SomeFailed as e:
                raise self._told(e, len(index)) from None
            self.sparse = self.sparse or ROWS in (result.schema.metadata or {})
            if len(index) == 1 or self._good is None:
                self._good = partial(to_batch, owned(given.slice(0, 1)), form)
            if ROW not in result.column_names and result.num_rows != len(index):
                raise length_error(f"step {name}", len(index), result.num_rows)
            return result

        isolation = Isolation(
            call,
            stage=self.stage,
            step=name,
            out_of_memory=lambda e: isinstance(e, MemoryError),
            doubt=self.doubt,
        )
        outputs: list[tuple[np.ndarray, pa.Table]] = []
        alone = null_numbers(numbered, form)
        for start in range(0, count, STEP_ROWS):
            for part in divided(np.arange(start, min(start + STEP_ROWS, count), dtype=np.int64), alone):
                found = isolation.score(part)
                outputs += found.outputs
                dead += found.dead
        return outputs

    def _told(self, answer: SomeFailed, given: int) -> SomeFailed:
        """The same answer with its exceptions keyed by given row, if the step names the rows of its answers in
        `_row`.
        """
        count = answer.table.num_rows + len(answer.failed)
        if ROW not in answer.table.column_names:
            if count != given:
                raise length_error(f"step {self.step.name}", given, count)
            return answer
        assert answer.lost is not None
        of, places = answer.lost.column(ROW), sorted(answer.failed)
        numbers = self._checked_rows(answer.table.column(ROW), given)
        if of.null_count:  # an exception at the row's own place names it, too: the others get `_row` from their rows
            if count != given or np.isin(np.array(places)[of.is_null().to_numpy()], numbers).any():
                raise BadOutput(
                    f"step {self.step.name} returned an exception without saying for which `_row`, and not at that "
                    "row's place in a list of all rows"
                )
            of = pa.chunked_array([[at if o is None else o for o, at in zip(of.to_pylist(), places, strict=True)]])
        errors = [answer.failed[i] for i in sorted(answer.failed)]
        failed = dict(zip(self._checked_rows(of, given).tolist(), errors, strict=True))
        others = ~np.isin(np.arange(given), list(failed))
        kept = others[numbers]
        among = np.cumsum(others) - 1
        table = picked(answer.table, np.flatnonzero(kept))
        return SomeFailed(table.set_column(table.column_names.index(ROW), ROW, pa.array(among[numbers[kept]])), failed)


def _row(rows: pa.Table, number: int) -> dict[str, Any]:
    return to_rows(rows.slice(number, 1))[0]


def _own(value: Any) -> Any:
    if isinstance(value, BaseException):  # in place of a value: the error of the row
        raise value
    return copy.deepcopy(value)


def _pick(rows: pa.Table, index: np.ndarray) -> pa.Table:
    if len(index) and len(index) == int(index[-1]) - int(index[0]) + 1 and bool((np.diff(index) == 1).all()):
        return rows.slice(int(index[0]), len(index))
    return picked(rows, index)


def _filled(lacks: pa.ChunkedArray, old: pa.ChunkedArray, new: pa.ChunkedArray) -> pa.ChunkedArray:
    """`new`, but `old` where `lacks` is true. Raises Lossy if they have no common type."""
    mask = np.asarray(lacks.to_numpy(), dtype=bool)
    if mask.all():
        return old
    own, others = np.flatnonzero(mask), np.flatnonzero(~mask)
    changed = handed_back(picked(new, others), picked(old, others), "rows")
    parts = [pa.table({"": picked(old, own)}), pa.table({"": changed})]
    order = np.argsort(np.concatenate([np.flatnonzero(mask), np.flatnonzero(~mask)]), kind="stable")
    return picked(together([p for p in parts if p.num_rows]).column(0), order)


def _any(mask: pa.ChunkedArray) -> bool:
    return bool(np.asarray(mask.to_numpy(), dtype=bool).any())


def _concatenated(tables: list[pa.Table], like: pa.Table) -> pa.Table:
    if not tables:
        return like.slice(0, 0)
    return together(tables)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)


def post_step(step: LoadedStep, rows: pa.Table) -> Applied:
    """A step after the model: as `apply`, but it may not drop or repeat rows."""
    found = step.apply(rows)
    if len(found.origin) + len(found.dead) != rows.num_rows:
        raise length_error(f"post step {step.step.name}", rows.num_rows, len(found.origin))
    if found.digests is not None:
        raise BadOutput(
            f"post step {step.step.name} names a row more than once in `_row`: it must return each one once"
        )
    return found

"""A user's function on a batch, or a class built once per worker, at work as a model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, is_list, lossless
from gristmill.arrow.rows import picked, run_of
from gristmill.job.specs import BatchFormat, FunctionModel
from gristmill.models.calls import load_call
from gristmill.models.contract import Place, Prepared, Refusal
from gristmill.models.conversion import Habit, from_result, null_numbers, own, to_batch, to_numpy, told_nulls
from gristmill.models.passthrough import handed_back
from gristmill.models.returns import Undeclared, parse_schema
from gristmill.models.takes import takes_of
from gristmill.process.failure import SomeFailed

DEFAULT_OUTPUT = "output"


class LoadedFunction:
    """A `FunctionModel` at work. Rows have no lengths; batches are cut by count. `form` is how it is given rows."""

    def __init__(self, spec: FunctionModel, place: Place, form: BatchFormat | None = None) -> None:
        self._keep_nulls = place.keep_nulls
        self._name = spec.name
        self._by_row = form is not None
        self._format = form or spec.call.batch_format
        self._returns = None if spec.returns is None else parse_schema(spec.returns)
        self._said = dict(spec.returns or {})
        self._renamed = spec.output
        self._output = spec.output or (
            self._returns.names[0] if self._returns and len(self._returns) == 1 else DEFAULT_OUTPUT
        )
        self._takes = takes_of(spec.call, spec.name)
        self._call = load_call(spec.call, waits=form is not None)
        self._habit = Habit()

    def prepare(self, rows: pa.Table) -> Prepared:
        """The rows themselves; for "numpy", slow columns are converted here already, to spare the model's thread."""
        refused: tuple[Refusal, ...] = ()
        if self._takes is not None:
            source, rows = rows, self._takes.given(rows)
            refused = self._takes.refused(source, self._keep_nulls)
            if not self._keep_nulls:
                rows = self._takes.without_nulls(rows)
        return Prepared(rows.num_rows, _Given(rows, self._format), None, refused, null_numbers(rows, self._format))

    def predict(self, prepared: Prepared, index: np.ndarray) -> pa.Table:
        """What the function returned for the rows at `index`. Raises BadOutput if it is not one row for each."""
        inputs: _Given = prepared.inputs
        count, given = len(index), picked(inputs.rows, index)
        result = self._result(prepared, index, given)
        failed: dict[int, BaseException] = {}
        try:
            table = from_result(result, count, self._name, self._output, self._returns, given=given, habit=self._habit)
        except SomeFailed as e:
            table, failed = e.table, dict(e.failed)
            given = picked(given, np.setdiff1d(np.arange(count), list(failed)))
        if table.num_rows or not failed:
            table, misfits = self._answers(table, given)
            if misfits:
                worked = np.setdiff1d(np.arange(count), list(failed))
                failed |= {int(worked[row]): error for row, error in misfits.items()}
        if failed:
            raise SomeFailed(table, failed, raised=self._by_row)
        return table

    def close(self) -> None:
        """Calls the `close` method of a class that has one."""
        self._call.close()

    def _result(self, prepared: Prepared, index: np.ndarray, given: pa.Table) -> Any:
        batch = prepared.inputs.batch(given, run_of(index))
        try:
            return self._call(batch)
        except TypeError as e:
            told_nulls(e, given, self._format)
            raise

    def _answers(self, table: pa.Table, given: pa.Table) -> tuple[pa.Table, dict[int, ValueError]]:
        """The typed answers; a column that the function was given and handed back is restored (see `handed_back`). Rows
        with a number that a type of `returns=` cannot hold are left out, and reported by their places.
        """
        for i, name in enumerate(table.column_names if self._returns is None else ()):
            if name in given.column_names:
                column = handed_back(table.column(i), given.column(name), self._format)
                table = table.set_column(i, name, column)
        return self._typed(table)

    def _typed(self, table: pa.Table) -> tuple[pa.Table, dict[int, ValueError]]:
        if self._renamed is not None and table.column_names != [self._renamed]:
            if table.num_columns != 1:
                raise Undeclared(
                    f"{self._name} returned columns {', '.join(table.column_names)}: "
                    f"output={self._renamed!r} can rename only one"
                )
            table = table.rename_columns([self._renamed])
        if self._returns is None:
            return table, {}
        if set(table.column_names) != set(self._returns.names):
            raise Undeclared(
                f"{self._name} returned columns {', '.join(table.column_names)}; "
                f"returns= declares {', '.join(self._returns.names)}, and must declare all columns"
            )
        columns: list[pa.ChunkedArray] = []
        misfits: dict[int, ValueError] = {}
        for field in self._returns:
            column = table.column(field.name)
            try:
                columns.append(cast(column, field.type))
            except Lossy as e:
                found = dict(_misfits(column, field.type))
                if not found:
                    raise Undeclared(
                        f"{self._name} returned column {field.name!r} as another type than returns= declares: {e}"
                    ) from e
                what = (
                    f"in column {field.name!r}, which returns= declares {self._said[field.name]}: it cannot hold that"
                )
                misfits |= {row: ValueError(f"{self._name} returned {value!r} {what}") for row, value in found.items()}
        if misfits:
            return self._typed(picked(table, np.setdiff1d(np.arange(table.num_rows), list(misfits))))[0], misfits
        return pa.table(columns, schema=self._returns), {}


class _Given:
    """Rows on their way to a function; for "numpy", columns that are slow to convert, such as text, are arrays already.
    Pickled as the rows alone.
    """

    def __init__(self, rows: pa.Table, batch_format: str) -> None:
        self.rows = rows
        self.begun: Any = None  # their answers, if they are on their way (models/rowfunction.py)
        self._format = batch_format
        slow = [f.name for f in rows.schema if batch_format == "numpy" and _slow(f.type)]
        self._arrays = {name: to_numpy(rows.column(name)) for name in slow}

    def __reduce__(self) -> Any:
        return _Given, (self.rows, self._format)

    def batch(self, given: pa.Table, where: slice | np.ndarray) -> Any:
        """`given`, which are the rows at `where`, in the form that the function takes; the function owns all of it."""
        if not self._arrays:
            return to_batch(given, self._format)
        return {
            name: own(self._arrays[name][where] if name in self._arrays else to_numpy(given.column(name)))
            for name in given.column_names
        }


def _slow(kind: pa.DataType) -> bool:
    # Arrays of numbers are views. Lists and dicts are made anew for every call, as a function may change them.
    return not (pa.types.is_primitive(kind) or pa.types.is_nested(kind))


def cast(column: pa.ChunkedArray, target: pa.DataType) -> pa.ChunkedArray:
    """A column as `returns=` declares it. Raises Lossy."""
    column = _single(column, target)
    kind = column.type
    inner = target
    while is_list(inner):
        inner = inner.value_type
    if pa.types.is_boolean(kind) and (pa.types.is_integer(inner) or pa.types.is_floating(inner)):
        column = column.cast(pa.int8())  # declared as a number: True is 1
    return lossless(column, target, rounds=True)  # decided by its type, whatever values there are


def _single(column: pa.ChunkedArray, target: pa.DataType) -> pa.ChunkedArray:
    """[rows, 1], as many models return it, as one value per row if it is declared so."""
    kind = column.type
    if pa.types.is_fixed_size_list(kind) and kind.list_size == 1 and not pa.types.is_nested(target):
        return pa.chunked_array([chunk.flatten() for chunk in column.chunks], kind.value_type)
    return column


def _misfits(column: pa.ChunkedArray, target: pa.DataType) -> Iterator[tuple[int, Any]]:
    """By row, the values of a column of numbers, or of lists of them, that are or hold a number which `target` cannot
    hold.
    """
    column = _single(column, target)
    kinds, depth = (column.type, target), 0
    while all(map(is_list, kinds)):
        kinds, depth = (kinds[0].value_type, kinds[1].value_type), depth + 1
    if not all(pa.types.is_integer(k) or pa.types.is_floating(k) for k in kinds):
        return
    # Of any width: a different width is not the fault of a value.
    target = functools.reduce(lambda kind, _: pa.list_(kind), range(depth), kinds[1])
    pending = [(0, len(column))]
    while pending:
        first, last = pending.pop()
        try:
            cast(column.slice(first, last - first), target)
        except Lossy:
            half = (first + last) // 2
            if half > first:
                pending += [(half, last), (first, half)]
            else:
                yield first, column[first].as_py()

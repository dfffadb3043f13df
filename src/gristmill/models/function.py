"""A user's function, or a class built once per worker, as a model; and the loading of callables that steps share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, is_list, lossless
from gristmill.arrow.rows import picked, run_of
from gristmill.errors import BadModel, BadOutput, did_you_mean
from gristmill.job.secret import reveal
from gristmill.job.specs import Call, FunctionModel
from gristmill.models.contract import ModelInfo, Place, Prepared, Refusal
from gristmill.models.conversion import Habit, from_result, null_numbers, own, to_batch, to_numpy, told_nulls
from gristmill.models.passthrough import handed_back
from gristmill.models.returns import parse_schema
from gristmill.models.takes import takes_of
from gristmill.process.extras import installed, require
from gristmill.process.failure import SomeFailed
from gristmill.process.startup import UserCode
from gristmill.process.targets import import_target

DEFAULT_OUTPUT = "output"


class LoadedCall:
    """A user's callable, ready to be called with a batch. A class has been built; `close` closes what it built."""

    def __init__(self, name: str, function: Callable[[Any], Any], built: Any = None) -> None:
        self.name = name
        self._function = function
        self.built = built

    def __call__(self, batch: Any) -> Any:
        with UserCode():
            return self._function(batch)

    def close(self) -> None:
        """Calls the `close` method of a class that has one."""
        close = getattr(self.built, "close", None)
        if callable(close):
            with UserCode():
                close()


def load_call(call: Call) -> LoadedCall:
    """The callable of a `Call`, imported if it is named by text; a class is built with its arguments, here and once.

    Raises BadModel if it cannot be found or called. What a class raises while it is built is passed on unchanged.
    """
    target = import_target(call.target) if isinstance(call.target, str) else call.target
    checked = Call(target, call.args, call.batch_format)  # refuses instances, including those that a module holds
    _check_arguments(checked)
    args = reveal(dict(call.args))
    if not inspect.isclass(target):
        _refuse_async(target, call.name)
        return LoadedCall(call.name, functools.partial(target, **args) if args else target)
    with UserCode():
        built = target(**args)
    if not callable(built):
        raise BadModel(f"class {call.name} has no __call__ method: add one that takes a batch and returns its rows")
    _refuse_async(type(built).__call__, call.name)
    return LoadedCall(call.name, built, built)


def _check_arguments(call: Call) -> None:
    """Raises BadModel for arguments that the callable does not take, before it is called with a batch."""
    try:
        signature = inspect.signature(call.target)
    except (ValueError, TypeError):  # builtins and C code do not tell their arguments
        return
    names = list(signature.parameters)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for given in call.args:
        if given not in names and not takes_any:
            hint = did_you_mean(given, names) or f": it has {', '.join(names) or 'none'}"
            raise BadModel(f"{call.name} has no argument {given!r}{hint}")
    try:
        if inspect.isclass(call.target):
            signature.bind(**call.args)
        else:
            signature.bind(None, **call.args)
    except TypeError as e:
        raise BadModel(
            f"{call.name} cannot be called with a batch and {sorted(call.args) or 'no arguments'}: {e}"
        ) from e


def _refuse_async(function: Any, name: str) -> None:
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise BadModel(f"{name} is an async function: give a plain one (it may call asyncio.run)")


def describe(spec: FunctionModel, schema: pa.Schema | None) -> ModelInfo:
    """What is known of it without running it. Raises BadModel for a callable or types that cannot be used."""
    target = spec.call.target
    if isinstance(target, str):
        target = import_target(target)
    call = Call(target, spec.call.args, spec.call.batch_format)
    _check_arguments(call)
    if not inspect.isclass(target):
        _refuse_async(target, spec.name)
    form = spec.call.batch_format
    if form in ("pandas", "polars") and not installed(form):
        require(form, form, f"{spec.name} with batch_format={form!r}")
    known = parse_schema(spec.returns) if spec.returns is not None else None
    if known is not None and spec.output is not None and known.names != [spec.output]:
        raise BadModel(
            f"output={spec.output!r} renames one column, but returns= has {', '.join(known.names) or 'none'}"
        )
    outputs = None if known is None else tuple(known.names)
    takes = takes_of(spec.call)
    if takes is None:
        return ModelInfo(spec.name, outputs=outputs, schema=known, call=spec.call, on_gpu=False)
    takes.check(schema)
    return ModelInfo(spec.name, takes.columns, outputs, known, filled=takes.filled, call=spec.call, on_gpu=False)


def open_model(spec: FunctionModel, place: Place) -> LoadedFunction:
    """Imports the function or builds the class."""
    return LoadedFunction(spec, place)


class LoadedFunction:
    """A `FunctionModel` at work. Rows have no lengths; batches are cut by count."""

    def __init__(self, spec: FunctionModel, place: Place) -> None:
        self._keep_nulls = place.keep_nulls
        self._name = spec.name
        self._format = spec.call.batch_format
        self._returns = None if spec.returns is None else parse_schema(spec.returns)
        self._said = dict(spec.returns or {})
        self._renamed = spec.output
        self._output = spec.output or (
            self._returns.names[0] if self._returns and len(self._returns) == 1 else DEFAULT_OUTPUT
        )
        self._takes = takes_of(spec.call)
        self._call = load_call(spec.call)
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
        batch = inputs.batch(given, run_of(index))
        try:
            result = self._call(batch)
        except TypeError as e:
            told_nulls(e, given, self._format)
            raise
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
            raise SomeFailed(table, failed)
        return table

    def close(self) -> None:
        """Calls the `close` method of a class that has one."""
        self._call.close()

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
                raise BadOutput(
                    f"{self._name} returned columns {', '.join(table.column_names)}: "
                    f"output={self._renamed!r} can rename only one"
                )
            table = table.rename_columns([self._renamed])
        if self._returns is None:
            return table, {}
        if set(table.column_names) != set(self._returns.names):
            raise BadOutput(
                f"{self._name} returned columns {', '.join(table.column_names)}; "
                f"returns= declares {', '.join(self._returns.names)}, and must declare all columns"
            )
        columns: list[pa.ChunkedArray] = []
        misfits: dict[int, ValueError] = {}
        for field in self._returns:
            column = table.column(field.name)
            try:
                columns.append(_cast(column, field.type))
            except Lossy as e:
                found = dict(_misfits(column, field.type))
                if not found:
                    raise BadOutput(
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


def _cast(column: pa.ChunkedArray, target: pa.DataType) -> pa.ChunkedArray:
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
            _cast(column.slice(first, last - first), target)
        except Lossy:
            half = (first + last) // 2
            if half > first:
                pending += [(half, last), (first, half)]
            else:
                yield first, column[first].as_py()

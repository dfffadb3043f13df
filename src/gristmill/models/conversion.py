"""Arrow tables as the kinds of batch that functions take, and what functions return as Arrow tables again.

Shared by models and steps. One rule throughout: one value per row. Nothing is zipped short, broadcast or guessed.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, fitted, is_list, lengths_of
from gristmill.arrow.frompython import from_polars, from_python, is_from, pandas_array, tensor_to_numpy
from gristmill.arrow.rows import picked
from gristmill.arrow.schemas import plain
from gristmill.arrow.topython import from_plain, to_plain, to_rows
from gristmill.errors import ONE_FOR_EACH, BadOutput
from gristmill.models.columns import numbers
from gristmill.process.extras import require
from gristmill.process.failure import SomeFailed

ROWS = b"gristmill.rows"  # marks a table built from dicts: a key that none has is null, as is one that some lack
ROW = "_row"  # the column that says which row is which, in what a step is given and in what it returns
FRAMES = ("arrow", "pandas", "polars")  # the forms in which rows are given as one object, which can be handed back
FEW = 6  # rows: among fewer, whole numbers are easily in row order by chance, and shapes are lost
LACKS = "gristmill.lacks."  # prefix of a column's name: a column of truth values, true for dicts that lacked it


# ---------------------------------------------------------------- rows to a batch


def to_batch(table: pa.Table | pa.RecordBatch, batch_format: str) -> Any:
    """The rows as "numpy" (dict of arrays), "rows" (list of dicts), "arrow", "pandas" or "polars".

    The form of a value depends on the type of its column and on itself, not on the rows beside it, and is exact: see
    `to_numpy`, `to_pandas` and, for rows, `gristmill.arrow.topython.to_plain`. The function owns all of it and may
    change it: nothing shares memory with the rows, which are kept, written and perhaps scored again.
    """
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    if batch_format == "rows":
        return to_rows(table)
    if batch_format == "pandas":
        return to_pandas(table)
    if batch_format == "polars":
        return require("polars", "polars", "batch_format='polars'").from_arrow(owned(table))
    if batch_format == "arrow":  # answers would be put in the order of an index that the source's file names
        own_metadata = {k: v for k, v in (table.schema.metadata or {}).items() if k != b"pandas"}
        return owned(table.replace_schema_metadata(own_metadata))
    return {name: own(to_numpy(table.column(i))) for i, name in enumerate(table.column_names)}


def own(values: np.ndarray) -> np.ndarray:
    """A copy that shares no memory with `values` or with arrays in it. Dicts and lists in it must already be new."""
    copied = np.array(values)
    if values.dtype.kind == "O":
        for i, value in enumerate(values):
            if isinstance(value, np.ndarray):
                copied[i] = own(value)
            elif isinstance(value, (str, bytes, int)):
                break  # a column of texts or numbers
    return copied


def owned(table: pa.Table) -> pa.Table:
    """A copy whose every buffer is new: a table may lie over an array that somebody writes to, and nothing shows it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def to_numpy(column: pa.ChunkedArray) -> np.ndarray:
    """A column as an array whose first axis is rows. Numbers without nulls share Arrow's memory.

    Floats: null is NaN. Whole numbers and booleans: if there are nulls, an array of objects (Python's int, bool and
    None), as floats would be different numbers. Times and durations: datetime64 (in UTC, if the column has a zone) and
    timedelta64, null being NaT. Fixed-size lists of numbers: [rows, n], or like other lists if that has no room for
    their nulls (whole numbers, booleans). Other lists: an array for each row of numbers without nulls. Everything else:
    objects as `to_plain` gives them, null being None.
    """
    array = _one_chunk(column)
    plain = numbers(array)
    if plain is None:
        array = _stored(array)
        plain = numbers(array)
    if plain is not None:
        return plain
    kind = array.type
    if pa.types.is_fixed_size_list(kind) and is_matrix(array):
        return _matrix(array)
    if pa.types.is_nested(kind):
        return _cells(array)
    if (pa.types.is_integer(kind) or pa.types.is_boolean(kind)) and array.null_count:
        found = array.fill_null(False if pa.types.is_boolean(kind) else 0).to_numpy(zero_copy_only=False).astype(object)
        found[array.is_null().to_numpy(zero_copy_only=False)] = None
        return np.asarray(found)
    if pa.types.is_null(kind) or pa.types.is_time(kind):
        return _objects(to_plain(array))
    try:
        return np.asarray((array.cast("date32") if pa.types.is_date64(kind) else array).to_numpy(zero_copy_only=False))
    except (pa.ArrowException, ValueError):  # text that is not UTF-8, types that numpy does not know
        return _objects(to_plain(array))


def to_pandas(table: pa.Table) -> Any:
    """A frame: whole numbers and booleans with nulls as pandas' own nullable types (Int64, boolean, …), zoned times
    with their zone; lists, structs and maps as objects, as in `to_numpy`, and what pandas lacks as in `to_plain`.
    """
    pandas = require("pandas", "pandas", "batch_format='pandas'")
    whole = {i: k for i, k in enumerate(table.schema.types) if pa.types.is_integer(k) or pa.types.is_boolean(k)}
    nullable = {i for i in whole if table.column(i).null_count}
    easy = [i for i, k in enumerate(table.schema.types) if i not in nullable and _pandas_has(k)]
    frame = table.select(easy).to_pandas(ignore_metadata=True).copy() if easy else pandas.DataFrame(
        index=range(table.num_rows)
    )  # fmt: skip
    for i, name in enumerate(table.column_names):
        column = table.column(i)
        if i in nullable:
            dtype = _nullable(pandas, whole[i])
            frame.insert(i, name, column.to_pandas(types_mapper=lambda _, dtype=dtype: dtype))
        elif i not in easy:
            nested = pa.types.is_nested(column.type)
            values = own(_cells(_stored(_one_chunk(column)))) if nested else to_plain(column)
            frame.insert(i, name, pandas.Series(_objects(values), dtype=object))
    return frame


def null_numbers(rows: pa.Table, batch_format: str) -> np.ndarray | None:
    """Rows (bool [rows]) with a null among their whole numbers or truth values, which changes the type of that column
    in a numpy or pandas batch, and so its other values; None if there are none, or no batch could show it.
    """
    if batch_format not in ("numpy", "pandas"):
        return None
    found = None
    for column in rows.columns:
        if column.null_count and (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
            nulls = column.is_null().to_numpy()
            found = nulls if found is None else found | nulls
    return found


def told_nulls(error: TypeError, given: pa.Table, batch_format: str) -> None:
    """Say in the error which columns of whole numbers had nulls, None in arrays, which the function may not expect."""
    found = [f.name for f in given.schema if pa.types.is_integer(f.type) and given.column(f.name).null_count]
    if found and batch_format == "numpy":
        names, takes = ", ".join(map(repr, found)), f"takes={{{found[0]!r}: 'float64'}}"
        text = f"nulls of {names} are given as None: {takes} gives NaN instead"
        error.args = (str(error) if text in str(error) else f"{error} ({text})",)


def _pandas_has(kind: pa.DataType) -> bool:
    t = pa.types
    return not (t.is_nested(kind) or t.is_date(kind) or t.is_time(kind) or t.is_null(kind))


def _nullable(pandas: Any, kind: pa.DataType) -> Any:
    name = "boolean" if pa.types.is_boolean(kind) else str(kind).replace("uint", "UInt").replace("int", "Int")
    return pandas.api.types.pandas_dtype(name)


def _objects(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    made = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):  # all at once, numpy would make a matrix of lists of one length
        made[i] = value
    return made


def _one_chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.num_chunks == 0:
        return pa.array([], column.type)
    joined = column.combine_chunks()
    if isinstance(joined, pa.ChunkedArray):  # strings over 2 GB: no single array of this type can hold them
        raise MemoryError(f"a batch holds {joined.nbytes:,} bytes in one column")
    return joined


def _stored(array: pa.Array) -> pa.Array:
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        elif pa.types.is_run_end_encoded(array.type):
            array = array.cast(array.type.value_type)
        else:
            return array


# ---------------------------------------------------------------- lists


def _leaf(kind: pa.DataType) -> pa.DataType:
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return kind


def _number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def is_matrix(array: pa.Array) -> bool:
    """Whether fixed-size lists are one array of numbers: floats always, others if no null is among them."""
    leaf = _leaf(array.type)
    return min(_sizes(array.type)) > 0 and (
        pa.types.is_floating(leaf) or (_number(leaf) and not (array.null_count or _holed(array).any()))
    )


def _sizes(kind: pa.DataType) -> tuple[int, ...]:
    sizes = []
    while pa.types.is_fixed_size_list(kind):
        sizes.append(kind.list_size)
        kind = kind.value_type
    return tuple(sizes)


def _matrix(array: pa.Array) -> np.ndarray:
    """[rows, n, …] of fixed-size lists, NaN where a float or a list of them is null."""
    if not pa.types.is_fixed_size_list(array.type):
        plain = numbers(array)
        return plain if plain is not None else np.asarray(array.to_numpy(zero_copy_only=False))
    there = array.is_valid().to_numpy(zero_copy_only=False)
    valid = picked(array, np.flatnonzero(there)) if array.null_count else array
    sizes = _sizes(array.type)
    inner = _matrix(valid.flatten()).reshape(len(valid), *sizes)
    if not array.null_count:
        return inner
    full = np.full((len(array), *sizes), np.nan, dtype=inner.dtype)
    full[there] = inner
    return full


def _holed(array: pa.Array) -> np.ndarray:
    """Which rows are null or have a null in them, bool [rows]. For numbers, lists and fixed-size lists."""
    holed = np.array(array.is_null().to_numpy(zero_copy_only=False), dtype=bool)
    if is_list(array.type):
        lengths = lengths_of(array)
        before = np.concatenate(([0], np.cumsum(_holed(array.flatten()))))
        ends = np.cumsum(lengths)
        holed |= before[ends] > before[ends - lengths]
    return holed


def _cells(array: pa.Array) -> np.ndarray:
    kind = array.type
    fixed = pa.types.is_fixed_size_list(kind) and min(_sizes(kind)) > 0 and _number(_leaf(kind))
    if not fixed and not (is_list(kind) and _number(kind.value_type)):
        return _objects(to_plain(array))
    holed = _holed(array)
    made = np.empty(len(array), dtype=object)
    if holed.any():
        bad = np.flatnonzero(holed)
        for i, value in zip(bad.tolist(), to_plain(picked(array, bad)), strict=True):
            made[i] = value
        array = picked(array, np.flatnonzero(~holed))
    places = np.flatnonzero(~holed).tolist()
    if fixed:
        rows: Any = _matrix(array)
    else:
        flat = _matrix(array.flatten())
        ends = np.cumsum(lengths_of(array))
        starts = np.concatenate(([0], ends))[:-1]
        rows = [flat[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    for i, row in zip(places, rows, strict=True):
        made[i] = row
    return made


# ---------------------------------------------------------------- a result to rows


def is_frame(result: Any) -> bool:
    """Whether a function returned a frame: an Arrow table or record batch, a frame of pandas or polars."""
    arrow = isinstance(result, (pa.Table, pa.RecordBatch))
    return arrow or is_from("pandas", result, "DataFrame") or is_from("polars", result, "DataFrame")


class Habit:
    """What calls with many rows have shown about a function, by which its answers to few rows are understood: whether
    the pandas indices that it returns are those of the rows it was given ("rows") or "labels" of its own, and how wide
    its vectors are, by column.
    """

    def __init__(self) -> None:
        self.index = ""
        self.widths: dict[str, int] = {}

    def shows(self, index: str) -> None:
        """Note a kind of index; once both kinds have been seen, nothing is known."""
        self.index = index if self.index in ("", index) else "both"


def from_result(
    result: Any,
    rows: int | None,
    name: str,
    output: str,
    types: pa.Schema | None = None,
    lacks: bool = False,
    given: pa.Table | None = None,
    habit: Habit | None = None,
) -> pa.Table:
    """Whatever a function returned, as a table of `rows` rows (None: as many as its columns agree on).

    `name` is how errors call the function, `output` the column for a result that is one bare array or list. Takes a
    dict of columns, a list of dicts, an Arrow table or record batch, a pandas or polars frame, and bare arrays, series,
    tensors and lists. 2-D arrays become fixed-size lists. Raises BadOutput for another number of rows, None, a
    generator, one value for all rows, and anything else that is not a column. Python's own numbers, which have no
    width, take the types in `types`; values that have a type keep it. Plain values in a column with the name of one in
    `given`, the rows that the function got, take its type if they fit it. What pandas has sorted is put back in the
    order of the rows, if its index shows it. Everything is copied: the function may reuse its memory. `habit` learns
    from results of many rows, and interprets those of a few; a single value for one row is that row's. What a dict
    lacks is null; with `lacks`, an extra column marks the rows for which that is so (see LACKS). Raises SomeFailed if
    an exception takes the place of a row, in a list or in an array of objects.
    """
    found = _Found(name, rows, types, lacks, given, habit or Habit())
    table = found.table(result, output)
    if table.num_columns and rows is not None and table.num_rows != rows:
        raise found.wrong_length(table.num_rows)
    if table.num_columns == 0 and rows:
        raise found.error("returned no columns")
    duplicates = {n for n in table.column_names if table.column_names.count(n) > 1}
    if duplicates:
        raise found.error(f"returned two columns named {min(duplicates)!r}", "give each its own name")
    if found.failed:
        lost = np.isin(np.arange(table.num_rows), list(found.failed))
        raise SomeFailed(picked(table, np.flatnonzero(~lost)), found.failed, picked(table, np.flatnonzero(lost)))
    return table


class _Found:
    """A result being turned into a table; its errors name the function."""

    def __init__(
        self,
        name: str,
        rows: int | None,
        types: pa.Schema | None,
        lacks: bool,
        given: pa.Table | None,
        habit: Habit,
    ) -> None:
        self.habit = habit
        self.name = name
        self.rows = rows
        self.lacks = lacks
        self.types = {} if types is None else {f.name: f.type for f in types}
        self.given = {} if given is None else {f.name: f.type for f in given.schema}
        self._table = given
        self._size = (rows or 0) if given is None else given.num_rows
        self.failed: dict[int, BaseException] = {}

    def error(self, what: str, rule: str = ONE_FOR_EACH) -> BadOutput:
        given = "" if self.rows is None else f"was given {_rows(self.rows)} and "
        return BadOutput(f"{self.name} {given}{what}: {rule}")

    def wrong_length(self, returned: int, column: str | None = None) -> BadOutput:
        where = "" if column is None else f" in column {column!r}"
        return self.error(f"returned {_rows(returned)}{where}")

    def table(self, result: Any, output: str) -> pa.Table:
        if isinstance(result, pa.RecordBatch):
            result = pa.Table.from_batches([result])
        if isinstance(result, pa.Table):
            return owned(_unencoded(self._without_index(result)))
        if result is None:
            raise self.error("returned None")
        if is_from("pandas", result, "DataFrame"):
            return self._from_columns(_pandas_columns(result, self))
        if is_from("polars", result, "DataFrame"):
            return self._from_columns({name: result[name] for name in result.columns})
        if isinstance(result, np.ndarray) and result.dtype.names:
            return self._from_columns({n: result[n] for n in result.dtype.names})
        if isinstance(result, Mapping):
            return self._from_columns(result)
        if isinstance(result, list) and result and any(isinstance(r, Mapping) for r in result):
            return self._from_rows(result)
        if isinstance(result, list) and not result and self.rows in (0, None):
            return pa.table({})
        if isinstance(result, tuple):
            raise self.error(
                f"returned a tuple of {len(result)}, which could be rows or columns; return a dict of columns or a list"
            )
        return self._from_columns({output: result})

    def _from_rows(self, result: list[Any]) -> pa.Table:
        names: dict[str, None] = {}
        self.failed.update({i: row for i, row in enumerate(result) if isinstance(row, BaseException)})
        result = [{} if i in self.failed else row for i, row in enumerate(result)] if self.failed else result
        for row in result:
            if not isinstance(row, Mapping):
                raise self.error(f"returned a list that mixes dicts with {type(row).__name__}", "return one kind")
            names.update(dict.fromkeys(row))
        names.update(dict.fromkeys(self.types) if names else ())
        if self.rows is not None and len(result) != self.rows:
            raise self.wrong_length(len(result))
        if not names:
            raise self.error("returned dicts without keys")
        columns = {n: [row.get(n) for row in result] for n in names}
        if self.lacks and any(len(row) < len(names) for row in result):
            columns.update({f"{LACKS}{n}": [n not in row for row in result] for n in names})
        table = self._from_columns(columns)
        return table.replace_schema_metadata({ROWS: b""})

    def _from_columns(self, columns: Mapping[Any, Any]) -> pa.Table:
        arrays: dict[str, pa.Array | pa.ChunkedArray] = {}
        for column, values in self._in_order(columns).items():
            if not isinstance(column, str):
                raise self.error(
                    f"returned a column named {column!r}, which is {type(column).__name__}, not text",
                    "column names must be text",
                )
            arrays[column] = self._column(column, values)
        lengths = {c: len(a) for c, a in arrays.items()}
        if self.rows is not None:
            for column, length in lengths.items():
                if length != self.rows:
                    raise self.wrong_length(length, column if len(lengths) > 1 else None)
        elif len(set(lengths.values())) > 1:
            told = ", ".join(f"{c}: {n}" for c, n in lengths.items())
            raise self.error(f"returned columns of different lengths ({told})")
        return pa.table(arrays)

    def _in_order(self, columns: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """The columns, those of pandas in the order of the given rows."""
        if ROW in columns and ROW in self.given:
            return columns  # the answers themselves say which row is which
        indexes = {c: values.index for c, values in columns.items() if is_from("pandas", values, "Series")}
        orders: dict[int, np.ndarray | None] = {}
        for column, index in indexes.items():
            if id(index) not in orders:  # the columns of a frame share one
                orders[id(index)] = self._order(index, column)
        moved = {c: order for c, index in indexes.items() if (order := orders[id(index)]) is not None}
        bare = next((c for c in columns if c not in indexes), None)
        if moved and bare is not None:
            raise self.error(
                f"returned pandas column {next(iter(moved))!r}, whose index is in another order than the rows, "
                f"and column {bare!r} without an index",
                "sort the frame with sort_index() before taking arrays out of it",
            )
        return {c: v.iloc[moved[c]] if c in moved else v for c, v in columns.items()}

    def _without_index(self, table: pa.Table) -> pa.Table:
        """A table that was a pandas frame, in the order of the given rows if its index shows it; without the index."""
        if b"pandas" not in (table.schema.metadata or {}):
            return table
        told = json.loads(table.schema.metadata[b"pandas"])["index_columns"]
        names = [c for c in told if isinstance(c, str)]
        if set(names) - set(table.column_names) or set(names) & set(self.given):
            return table  # not an index of this batch, or columns that were given
        if ROW in table.column_names and ROW in self.given:
            return table
        values = [n for n in table.column_names if n not in names or not n.startswith("__index_level_")]
        ranges = [c for c in told if isinstance(c, dict) and c.get("kind") == "range"]
        if names:
            order = self._order(table.select(names).to_pandas().index, values[0] if values else "")
        elif ranges and len(ranges) == len(told) == 1:
            pandas = require("pandas", "pandas", self.name)
            index = pandas.RangeIndex(*(ranges[0][k] for k in ("start", "stop", "step")))
            order = self._order(index, values[0]) if values and len(index) == table.num_rows else None
        else:
            order = None
        table = table.select(values)
        return table if order is None else picked(table, order)

    def _order(self, index: Any, column: str) -> np.ndarray | None:
        """How to put values with this index in the order of the rows, which were given with the index 0, 1, …; None if
        they are in it already, or have labels of their own.
        """
        count = len(index)
        if count < 2 or count != (self.rows if self._table is None else self._table.num_rows):
            return None
        levels = [index.get_level_values(i) for i in range(index.nlevels)]
        theirs = self._as_given([level for level in levels if level.name in self.given])
        if theirs == "one by one":
            return None
        told, doubtful = _told([level for level in levels if level.name not in self.given], len(levels) == 1)
        few = count < FEW
        if few and self.habit.index == "labels":
            return None
        if told and not (few and self.habit.index == "rows") and self._holds(levels):
            told, doubtful = [], True
        if told and all(np.array_equal(order, told[0]) for order in told):
            if (np.diff(told[0]) > 0).all():
                return None
            self._shows("rows")
            return told[0]
        if not told and not doubtful and theirs != "no":
            self._shows("labels")  # of their own
            return None
        raise self.error(
            f"returned pandas column {column!r} with an index ({', '.join(map(repr, index[:4].tolist()))}, …) that "
            "does not tell which row is which",
            "return the index that was given (sort_index() puts values in its order), or, if they are in the order of "
            "the rows, use reset_index(drop=True)",
        )

    def _shows(self, index: str) -> None:
        if self._size >= FEW:
            self.habit.shows(index)

    def _holds(self, levels: list[Any]) -> bool:
        """Whether a given column holds, row by row, the numbers of an unnamed level, which may thus be that column."""
        wholes = [] if self._table is None else [c for c in self._table.columns if pa.types.is_integer(c.type)]
        said = [n for level in levels if level.name is None and (n := _whole(level)) is not None]
        moved = [n for n in said if (np.diff(n) < 0).any()]
        return any(np.array_equal(column.to_numpy(), n) for n in moved for column in wholes)

    def _as_given(self, levels: list[Any]) -> str:
        """What levels named like given columns hold: other values (no), or the given ones, with some rows alike (alike)
        or none (one by one).
        """
        if not levels or self._table is None:
            return "alike"
        had = to_pandas(self._table.select([level.name for level in levels]))
        if not all(had.set_index(level.name).index.equals(level) for level in levels):
            return "no"
        return "alike" if had.duplicated().any() else "one by one"

    def _column(self, column: str, values: Any) -> pa.Array | pa.ChunkedArray:
        if self._size == 1:
            values = self._of_one(column, values)
        try:
            if is_from("pandas.api.extensions", values, "ExtensionArray"):
                values = sys.modules["pandas"].Series(values)
            if is_from("pandas", values, "Series") or is_from("pandas", values, "Index"):
                values = _pandas_values(values)
            elif is_from("polars", values, "Series"):
                values = _readable(pa.table({column: from_polars(values)})).column(0)
            elif is_from("torch", values, "Tensor"):
                values = tensor_to_numpy(values)
            if isinstance(values, (pa.Array, pa.ChunkedArray)):
                return owned(pa.table({column: values})).column(0)
            if isinstance(values, np.ndarray):
                return self._from_array(column, values)
            if isinstance(values, Sequence) and not isinstance(values, (str, bytes, bytearray, memoryview)):
                return self._listed(column, values)
        except UnicodeEncodeError:  # in one row, which a caller that knows the rows finds
            raise
        except (Lossy, pa.ArrowException, OverflowError, TypeError, ValueError) as e:
            listed = values if isinstance(values, Sequence) else list(values)
            failed = {i: v for i, v in enumerate(listed) if isinstance(v, BaseException)}
            if failed:
                self.failed.update(failed)
                return self._column(column, [None if i in failed else v for i, v in enumerate(listed)])
            way = "return plain values of one type"
            if column not in self.types and any(map(_pairs, listed)):
                way = f"declare pairs as a map with returns={{{column!r}: 'map<string, int64>'}}, or {way}"
            raise self.error(f"returned values for column {column!r} that a column cannot hold ({e})", way) from e
        raise self.error(f"returned {_what(values)} as column {column!r}")

    def _of_one(self, column: str, values: Any) -> Any:
        """One row's value if `squeeze()` has removed the axis of rows from it: a single value, or a vector as wide as
        those of other rows.
        """
        if is_from("torch", values, "Tensor"):
            values = tensor_to_numpy(values)
        if isinstance(values, (np.generic, bool, int, float, str)) or (
            isinstance(values, np.ndarray) and values.ndim == 0
        ):
            return np.asarray(values).reshape(1) if isinstance(values, np.ndarray) else [values]
        flat = isinstance(values, list) or (isinstance(values, np.ndarray) and values.ndim == 1)
        if flat and len(values) == self.habit.widths.get(column, 1) != 1:
            return np.asarray(values)[None]
        return values

    def _from_array(self, column: str, values: np.ndarray) -> pa.Array:
        if values.ndim == 2 and len(values) >= FEW:
            self.habit.widths[column] = values.shape[1]
        if values.ndim == 0:
            raise self.error(f"returned a single value ({values!s:.40}) as column {column!r}")
        if values.dtype.kind == "c":
            raise self.error(
                f"returned complex numbers in column {column!r}, which no file format can hold",
                "return the real and imaginary parts",
            )
        if values.ndim > 1 and values.shape[-1] == 0:
            raise self.error(f"returned an array of shape {values.shape} as column {column!r}")
        # The type first: naming `np.ma` imports it, which takes longer than many a model.
        if type(values) is not np.ndarray and isinstance(values, np.ma.MaskedArray):
            if values.ndim > 1 and np.ma.is_masked(values):
                raise self.error(f"returned masked values in an array of shape {values.shape} as column {column!r}")
            if values.ndim > 1:
                return from_array(np.array(values.data))
            if values.dtype.kind == "O":
                return from_python([values])[0].values
            return pa.array(np.array(values.data), mask=np.ma.getmaskarray(values))
        return (
            self._listed(column, list(values)) if values.dtype.kind == "O" else from_array(np.array(values, order="C"))
        )

    def _listed(self, column: str, values: Sequence[Any]) -> pa.Array:
        """Plain values as a column. If the column was given, perhaps only its type can hold them."""
        kind = None if column in self.types else self.given.get(column)
        try:
            found = from_python(values, self.types.get(column))
            if kind is None or found.type.equals(kind):
                return found
            if pa.types.is_uint64(kind) and pa.types.is_int64(found.type):
                return found if (found.drop_null().to_numpy() < 0).any() else found.cast(kind)  # later ones may need it
            if pa.types.is_integer(kind) and pa.types.is_int64(found.type):
                return found  # Python's ints have no width: the type given says nothing about the answers
            if not _known_by_type(kind, values):
                return found
        except (Lossy, pa.ArrowException, OverflowError):
            if kind is None or any(isinstance(v, BaseException) for v in values):
                raise
        try:
            return from_plain(values, kind)
        except Lossy:
            return from_python(values, self.types.get(column))


def _pairs(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(p, tuple) and len(p) == 2 for p in value)


def _known_by_type(kind: pa.DataType, values: Sequence[Any]) -> bool:
    """Whether plain values of a column can be understood only by its type: pairs of a map, times as numpy scalars."""
    if pa.types.is_nested(kind):
        return pa.types.is_map(kind) or any(
            _known_by_type(kind.field(i).type, [np.datetime64(0, "s")]) for i in range(kind.num_fields)
        )
    return bool(pa.types.is_temporal(kind)) and any(isinstance(v, np.generic) for v in values)


def from_array(values: np.ndarray) -> pa.Array:
    """An array as a column, sharing its memory if Arrow can; further axes become nested fixed-size lists."""
    if values.dtype.kind == "O":
        return from_python(list(values))
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    flat = _flat(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


def _flat(values: np.ndarray) -> pa.Array:
    if values.dtype.kind not in "fiu":
        return pa.array(values)
    # Not pa.array: its first call imports pandas, if installed: a third of a second in every worker.
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _told(levels: list[Any], alone: bool) -> tuple[list[np.ndarray], bool]:
    """The orders that the levels of an index show, for rows that were given as 0, 1, …; and whether a level may show
    another one: with a name of its own it could be a rank.
    """
    told, doubtful = [], any(map(_written_numbers, levels))
    for name, found in [(v.name, n) for v in levels if (n := _whole(v)) is not None]:
        order, ours = np.argsort(found, kind="stable"), name in (None, "index")
        ascending = bool((np.diff(found) > 0).all())
        if not (found[order] == np.arange(len(found))).all():
            doubtful |= alone and name is None and not ascending
        elif ours:
            told.append(order)
        else:
            doubtful |= not ascending
    return told, doubtful


def _written_numbers(level: Any) -> bool:
    """Whether texts are the numbers 0, 1, … in another order: the rows' numbers, or labels that look like them."""
    if level.inferred_type != "string" or not level.str.fullmatch("[0-9]{1,9}").all():
        return False
    numbers = level.astype("int64").to_numpy()
    return bool((np.sort(numbers) == np.arange(len(numbers))).all() and (np.diff(numbers) < 0).any())


def _whole(level: Any) -> np.ndarray | None:
    """A level of an index as whole numbers, if it consists of them."""
    if level.inferred_type not in ("integer", "floating") or level.hasnans:
        return None
    numbers = level.to_numpy(dtype=np.float64 if level.inferred_type == "floating" else np.int64)
    return numbers if (numbers == np.floor(numbers)).all() else None


def _pandas_columns(frame: Any, found: _Found) -> dict[str, Any]:
    names = [n if isinstance(n, str) else str(n) for n in frame.columns]
    if len(set(names)) < len(names):
        raise found.error(f"returned a frame with two columns of the same name ({', '.join(names)})")
    return {n: frame.iloc[:, i] for i, n in enumerate(names)}


def _pandas_values(series: Any) -> Any:
    # numpy's own types go through numpy, so that NaN stays NaN; pandas' own types and objects have nulls of their own.
    if isinstance(series.dtype, np.dtype) and series.dtype.kind != "O":
        return series.to_numpy()
    if series.dtype != object:
        return pandas_array(series)
    values = series.to_numpy(copy=True)
    values[series.isna().to_numpy()] = None
    return values


def _unencoded(table: pa.Table) -> pa.Table:
    """Run-end encoded and view columns as the types they stand for, at any depth, as Arrow cannot take rows of them.
    Dictionary columns stay.
    """
    kinds = [f.type if pa.types.is_dictionary(f.type) else plain(f.type) for f in table.schema]
    return fitted(table, pa.schema([f.with_type(k) for f, k in zip(table.schema, kinds, strict=True)]))


def _readable(table: pa.Table) -> pa.Table:
    """Polars' view and large types as the plain ones, which every Parquet reader knows."""
    table = _unencoded(table)
    small = {"large_string": pa.string(), "large_binary": pa.binary()}
    fields = []
    for f in table.schema:
        kind = small.get(str(f.type), f.type)
        if pa.types.is_large_list(kind):
            kind = pa.list_(small.get(str(kind.value_type), kind.value_type))
        fields.append(f.with_type(kind))
    return table.cast(pa.schema(fields))


def _what(values: Any) -> str:
    if isinstance(values, (types.GeneratorType, Iterator)):
        return f"a {type(values).__name__} (make it a list)"
    if isinstance(values, (str, bytes, int, float, bool, np.generic)) or values is None:
        return f"a single value ({values!r:.40})"
    return f"an object of type {type(values).__name__}"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"

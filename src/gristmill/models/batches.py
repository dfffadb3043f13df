"""Arrow tables as the kinds of batch that functions take, and whatever functions return as Arrow tables again.

Shared by models and steps. One rule throughout: one value for each row. Nothing is zipped short, broadcast or guessed.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.errors import BadOutput
from gristmill.io.lossless import Lossy, fitted
from gristmill.io.picking import picked
from gristmill.io.schema import plain
from gristmill.io.values import from_python, is_from, tensor_to_numpy
from gristmill.models.columns import numbers
from gristmill.models.extras import require
from gristmill.plan.failing import SomeFailed

ROWS = b"gristmill.rows"  # marks a table that was dicts: what none of them has is null, as what one of them lacks
LACKS = "gristmill.lacks."  # before a column's name: a column of truth values, which dicts lacked it
_EXACT = 2**53  # integers beyond it are not all exact as float64


# ---------------------------------------------------------------- rows to a batch


def to_batch(table: pa.Table | pa.RecordBatch, batch_format: str) -> Any:
    """The rows as "numpy" (dict of arrays), "rows" (list of dicts), "arrow", "pandas" or "polars".

    All of it is the function's own, to change as it likes: nothing shares memory with the rows, which are kept, written
    and perhaps scored again. See `to_numpy`.
    """
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    if batch_format == "rows":
        return table.to_pylist()
    if batch_format == "pandas":
        require("pandas", "pandas", "batch_format='pandas'")
        frame = table.to_pandas().copy()
        for name in (f.name for f in table.schema if pa.types.is_nested(f.type)):
            frame[name] = own(frame[name].to_numpy())
        return frame
    if batch_format == "polars":
        return require("polars", "polars", "batch_format='polars'").from_arrow(owned(table))
    if batch_format == "arrow":
        return owned(table)
    return {name: own(to_numpy(table.column(i))) for i, name in enumerate(table.column_names)}


def own(values: np.ndarray) -> np.ndarray:
    """A copy that shares no memory with `values`, nor do the arrays in it. Dicts and lists in it must be new."""
    copied = np.array(values)
    if values.dtype.kind == "O":
        for i, value in enumerate(values):
            if isinstance(value, np.ndarray):
                copied[i] = own(value)
            elif isinstance(value, str):
                break  # a column of texts
    return copied


def owned(table: pa.Table) -> pa.Table:
    """A copy whose every buffer is new: a table may lie over an array that somebody writes to, which nothing tells."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def to_numpy(column: pa.ChunkedArray) -> np.ndarray:
    """A column as an array, first axis rows.

    Numbers without nulls and fixed-size lists of them ([rows, n]) share Arrow's memory. Floats with nulls have NaN in
    their place, integers too (float64; as objects where that would change a value). Strings, booleans with nulls, lists
    and structs are object arrays, null being None.
    """
    array = _one_chunk(column)
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
        kind = array.type
    if pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if pa.types.is_fixed_size_list(kind) and kind.list_size > 0 and _plain(_leaf(kind)):
        return _fixed_lists(array)
    if pa.types.is_null(kind):
        return np.full(len(array), None, dtype=object)
    if pa.types.is_integer(kind) and array.null_count and _beyond_exact(array):
        return np.array(array.to_pylist(), dtype=object)
    plain = numbers(array)
    return plain if plain is not None else np.asarray(array.to_numpy(zero_copy_only=False))


def _one_chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.num_chunks == 0:
        return pa.array([], column.type)
    joined = column.combine_chunks()
    if isinstance(joined, pa.ChunkedArray):  # strings over 2 GB: no one array of this type can hold them
        raise MemoryError(f"a batch holds {joined.nbytes:,} bytes in one column")
    return joined


def _leaf(kind: pa.DataType) -> pa.DataType:
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return kind


def _plain(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _fixed_lists(array: pa.Array) -> np.ndarray:
    if array.null_count:
        if not pa.types.is_floating(_leaf(array.type)):
            return np.asarray(array.to_numpy(zero_copy_only=False))
        full = np.full((len(array), *_sizes(array.type)), np.nan, dtype=_leaf(array.type).to_pandas_dtype())
        valid = picked(array, np.flatnonzero(array.is_valid()))
        if len(valid):
            full[array.is_valid().to_numpy(zero_copy_only=False)] = _fixed_lists(valid)
        return full
    sizes = _sizes(array.type)
    rows = len(array)
    while pa.types.is_fixed_size_list(array.type):
        if array.null_count:
            raise BadOutput(f"a list column has nulls inside its rows, so that it is no array of shape {sizes}")
        array = array.flatten()
    return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(rows, *sizes)


def _sizes(kind: pa.DataType) -> tuple[int, ...]:
    sizes = []
    while pa.types.is_fixed_size_list(kind):
        sizes.append(kind.list_size)
        kind = kind.value_type
    return tuple(sizes)


def _beyond_exact(array: pa.Array) -> bool:
    if array.type.bit_width < 64:
        return False
    import pyarrow.compute as pc

    least, most = (v.as_py() for v in pc.min_max(array).values())
    return least is not None and (most > _EXACT or least < -_EXACT)


# ---------------------------------------------------------------- a result to rows


def from_result(
    result: Any, rows: int | None, name: str, output: str, types: pa.Schema | None = None, lacks: bool = False
) -> pa.Table:
    """Whatever a function returned, as a table of `rows` rows (None: as many as its columns agree on).

    `name` is how errors call the function, `output` the column of a result that is one bare array or list. Takes a dict
    of columns, a list of dicts, an Arrow table or record batch, a pandas or polars frame, and bare arrays, series,
    tensors and lists. 2-D arrays become fixed-size lists. Raises BadOutput for another number of rows, None, a
    generator, one value for all rows, and columns that are no columns. Python's own numbers, which have no width, are
    taken as `types` says; values that have a type keep it. All is copied: the function may use its memory again.
    What a dict lacks is null; with `lacks`, a column more says of which rows that is so (see LACKS).
    Raises SomeFailed where an exception stands for a row, in a list or in an array of objects.
    """
    found = _Found(name, rows, types, lacks)
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
    """A result on its way to a table; knows how to say whose it is."""

    def __init__(self, name: str, rows: int | None, types: pa.Schema | None, lacks: bool) -> None:
        self.name = name
        self.rows = rows
        self.lacks = lacks
        self.types = {} if types is None else {f.name: f.type for f in types}
        self.failed: dict[int, BaseException] = {}

    def error(self, what: str, rule: str = "it must return one row for each") -> BadOutput:
        given = "" if self.rows is None else f"was given {_rows(self.rows)} and "
        return BadOutput(f"{self.name} {given}{what}: {rule}")

    def wrong_length(self, returned: int, column: str | None = None) -> BadOutput:
        where = "" if column is None else f" in column {column!r}"
        return self.error(f"returned {_rows(returned)}{where}")

    def table(self, result: Any, output: str) -> pa.Table:
        if isinstance(result, pa.Table):
            return owned(_unencoded(result))
        if isinstance(result, pa.RecordBatch):
            return owned(_unencoded(pa.Table.from_batches([result])))
        if result is None:
            raise self.error("returned None")
        if is_from("pandas", result, "DataFrame"):
            return self._from_columns(_pandas_columns(result, self))
        if is_from("polars", result, "DataFrame"):
            return owned(_readable(result.to_arrow()))
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
        for column, values in columns.items():
            if not isinstance(column, str):
                raise self.error(
                    f"returned a column named {column!r}, which is {type(column).__name__}, not text", "names are text"
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

    def _column(self, column: str, values: Any) -> pa.Array | pa.ChunkedArray:
        try:
            if is_from("pandas", values, "Series") or is_from("pandas", values, "Index"):
                values = _pandas_values(values)
            elif is_from("polars", values, "Series"):
                values = _readable(pa.table({column: values.to_arrow()})).column(0)
            elif is_from("torch", values, "Tensor"):
                values = tensor_to_numpy(values)
            if isinstance(values, (pa.Array, pa.ChunkedArray)):
                return owned(pa.table({column: values})).column(0)
            if isinstance(values, np.ndarray):
                return self._from_array(column, values)
            if isinstance(values, Sequence) and not isinstance(values, (str, bytes, bytearray, memoryview)):
                return from_python(values, self.types.get(column))
        except (Lossy, pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as e:
            listed = values if isinstance(values, Sequence) else values.tolist()
            failed = {i: v for i, v in enumerate(listed) if isinstance(v, BaseException)}
            if failed:
                self.failed.update(failed)
                return self._column(column, [None if i in failed else v for i, v in enumerate(listed)])
            raise self.error(
                f"returned values in column {column!r} that have no one type ({e})", "give them one type"
            ) from e
        raise self.error(f"returned {_what(values)} as column {column!r}")

    def _from_array(self, column: str, values: np.ndarray) -> pa.Array:
        if values.ndim == 0:
            raise self.error(f"returned one single value ({values!s:.40}) as column {column!r}")
        if values.dtype.kind == "c":
            raise self.error(
                f"returned complex numbers in column {column!r}, which no file format holds", "return their parts"
            )
        if values.ndim > 1 and values.shape[-1] == 0:
            raise self.error(f"returned an array of shape {values.shape} as column {column!r}")
        if isinstance(values, np.ma.MaskedArray):
            if values.ndim > 1 and np.ma.is_masked(values):
                raise self.error(f"returned masked values in an array of shape {values.shape} as column {column!r}")
            if values.ndim > 1:
                return from_array(np.array(values.data))
            if values.dtype.kind == "O":
                return from_python([values])[0].values
            return pa.array(np.array(values.data), mask=np.ma.getmaskarray(values))
        return from_array(values if values.dtype.kind == "O" else np.array(values, order="C"))


def from_array(values: np.ndarray) -> pa.Array:
    """An array as a column, sharing its memory where Arrow can; more axes as nested fixed-size lists."""
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
    # Not pa.array: at its first call it imports pandas where that is installed, a third of a second in every worker.
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _pandas_columns(frame: Any, found: _Found) -> dict[str, Any]:
    names = [n if isinstance(n, str) else str(n) for n in frame.columns]
    if len(set(names)) < len(names):
        raise found.error(f"returned a frame with two columns of one name ({', '.join(names)})")
    return {n: frame.iloc[:, i] for i, n in enumerate(names)}


def _pandas_values(series: Any) -> Any:
    # numpy's own types go through numpy, so that NaN stays NaN; pandas' own types and objects say null their own way.
    if isinstance(series.dtype, np.dtype) and series.dtype.kind != "O":
        return series.to_numpy()
    if series.dtype != object:
        return pa.Array.from_pandas(series)
    values = series.to_numpy(copy=True)
    values[series.isna().to_numpy()] = None
    return values


def _unencoded(table: pa.Table) -> pa.Table:
    """Run-ends and views as what they stand for, at any depth: of these Arrow cannot take rows. Columns that are
    dictionaries stay.
    """
    kinds = [f.type if pa.types.is_dictionary(f.type) else plain(f.type) for f in table.schema]
    return fitted(table, pa.schema([f.with_type(k) for f, k in zip(table.schema, kinds, strict=True)]))


def _readable(table: pa.Table) -> pa.Table:
    """Polars' view and large types as the plain ones, which every reader of Parquet knows."""
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
        return f"one single value ({values!r:.40})"
    return f"an object of type {type(values).__name__}"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"

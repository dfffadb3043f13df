"""Values that a store does not hold: told with their row, as a BadJob, as to deliver the same again does not help."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.arrow.casts import entries, is_list, stored
from gristmill.arrow.schemas import is_string
from gristmill.arrow.topython import to_plain
from gristmill.errors import BadJob
from gristmill.stores.vectors import matrix_of

FIRST_DAY, LAST_DAY = -719_162, 2_932_896  # from 1970: the first of the year 1, the last of 9999
AS_TEXT = "which is kept as a text that has no such years"
_TICKS = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000}  # of a day
SHOWN, LONG = 4, 40  # columns of a row that are shown, and letters of a value


def refuse(
    batch: pa.RecordBatch, wrong: pa.Array | np.ndarray, what: str, way: str, columns: Sequence[str] = ()
) -> None:
    """Raises BadJob, in which `what` is wrong and the `way` out stand, for the first row of a batch that is wrong, with
    its values of these columns.
    """
    mask = np.asarray(pc.fill_null(wrong, False)) if isinstance(wrong, pa.Array) else wrong
    if mask.any():
        raise BadJob(f"{what}, in the row with {_shown(batch.slice(int(mask.argmax()), 1), columns)}: {way}")


def _shown(row: pa.RecordBatch, columns: Sequence[str]) -> str:
    """Some values of a row, those that fit a line."""
    first = [field.name for field in row.schema if not pa.types.is_nested(field.type)][:SHOWN]
    values = ((name, repr(to_plain(row.column(name))[0])) for name in dict.fromkeys([*first, *columns]))
    return ", ".join(f"{name} = {text if len(text) <= LONG else f'{text[:LONG]}…'}" for name, text in values)


def _columns(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.Array]]:
    """The columns by name, as values of plain types."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        yield name, stored(column)


def refuse_nan(batch: pa.RecordBatch, shown: str, why: str) -> None:
    """Raises BadJob for NaN in a column of numbers."""
    for name, column in _columns(batch):
        if pa.types.is_floating(column.type):
            way = "deliver to a store that has NaN (duckdb://), or make it null in a step, and --restart"
            refuse(batch, pc.is_nan(column), f"{shown}: column {name!r} has NaN, {why}", way, [name])


def refuse_far(batch: pa.RecordBatch, shown: str, why: str, only: Collection[str] | None = None) -> None:
    """Raises BadJob for a date or time that few clients have, at any depth; in these columns `only`."""
    for name, column in _columns(batch):
        if (only is None or name in only) and (far := _far(column)) is not None:
            what = f"{shown}: column {name!r} has a date or time before the year 1 or after 9999, {why}"
            refuse(batch, far, what, "change it in a step", [name])


def without_far(
    batches: Iterable[pa.RecordBatch], shown: str, why: str, only: Collection[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The same batches. Raises as `refuse_far`."""
    for batch in batches:
        refuse_far(batch, shown, why, only)
        yield batch


def _far(values: pa.Array) -> np.ndarray | None:
    """The rows with a date or time before the year 1 or after 9999; None where the type has none."""
    kind, t = values.type, pa.types
    if t.is_date(kind) or (t.is_timestamp(kind) and kind.unit != "ns"):
        ticks = 1 if t.is_date32(kind) else _TICKS["ms" if t.is_date(kind) else kind.unit]
        whole = values.cast(pa.int32()) if t.is_date32(kind) else values.cast(pa.int64())
        days = pc.fill_null(whole, 0).to_numpy(zero_copy_only=False) // ticks
        return np.asarray((days < FIRST_DAY) | (days > LAST_DAY))
    if t.is_struct(kind):
        found = [far for child in values.flatten() if (far := _far(child)) is not None]
        return np.any(found, axis=0) if found else None
    if not (t.is_map(kind) or is_list(kind)):
        return None
    lists = entries(values) if t.is_map(kind) else values
    if (inner := _far(lists.flatten())) is None:
        return None
    far = np.zeros(len(values), bool)
    far[np.asarray(pc.list_parent_indices(lists))[inner]] = True
    return far


def without_zero_bytes(batches: Iterable[pa.RecordBatch], shown: str, why: str) -> Iterator[pa.RecordBatch]:
    """The same batches. Raises BadJob for a zero byte in a text."""
    for batch in batches:
        for name, column in _columns(batch):
            if is_string(column.type):
                what = f"{shown}: column {name!r} has a text with a zero byte, {why}"
                refuse(batch, pc.match_substring(column, "\0"), what, "replace it in a step", [name])
        yield batch


def without_repeats(batches: Iterable[pa.RecordBatch], shown: str, why: str) -> Iterator[pa.RecordBatch]:
    """The same batches. Raises BadJob for a map in which a key stands twice, at whatever depth."""
    for batch in batches:
        with_maps = batch.select([field.name for field in batch.schema if _has_maps(field.type)])
        for name, column in _columns(with_maps):
            wrong = np.zeros(batch.num_rows, bool)
            wrong[_repeated(column, np.arange(batch.num_rows))] = True
            what = f"{shown}: column {name!r} has a map in which a key stands twice, {why}"
            refuse(batch, wrong, what, "let the last one win in a step, or make it a list of structs", [name])
        yield batch


def _has_maps(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_maps(kind.storage_type)
    return pa.types.is_map(kind) or any(_has_maps(kind.field(n).type) for n in range(kind.num_fields))


def _repeated(values: pa.Array, rows: np.ndarray) -> np.ndarray:
    """The rows, of which `rows` has one for each value, that have a map with a key twice. Keys that are nested
    themselves are not compared.
    """
    kind, t = values.type, pa.types
    if isinstance(values, pa.ExtensionArray):
        return _repeated(values.storage, rows)
    if not _has_maps(kind):
        return rows[:0]
    if t.is_struct(kind):
        return np.concatenate([_repeated(one, rows) for one in values.flatten()])
    lists = entries(values) if t.is_map(kind) else values.cast(pa.list_(kind.value_type))
    of, inner = pc.list_parent_indices(lists), lists.flatten()
    if not t.is_map(kind):
        return _repeated(inner, rows[of])
    keys, items = inner.flatten()
    found = [_repeated(items, rows[of])]
    if not t.is_nested(keys.type):
        numbers = pa.table({"of": of, "key": keys}).group_by(["of", "key"]).aggregate([([], "count_all")])
        found.append(rows[numbers.filter(pc.greater(numbers["count_all"], 1))["of"]])
    return np.concatenate(found)


def refuse_longer(batch: pa.RecordBatch, keys: pa.Array, key: Sequence[str], longest: int, shown: str) -> None:
    """Raises BadJob for a key, as bytes, that is longer than the store holds it."""
    wrong = f"{shown}: a key ({', '.join(key)}) has more than {longest} bytes"
    refuse(batch, pc.greater(pc.binary_length(keys), longest), wrong, "give a shorter key, or a hash", key)


def refuse_hollow(batch: pa.RecordBatch, column: str, shown: str) -> None:
    """Raises BadJob for a vector with a null in it."""
    values = batch.column(column)
    values = values.storage if isinstance(values, pa.ExtensionArray) else values
    width = values.type.list_size
    flat = (values.fill_null([0.0] * width) if values.null_count else values).flatten()
    if flat.null_count:
        hollow = np.asarray(flat.is_null()).reshape(len(values), width).any(axis=1)
        refuse(batch, hollow, f"{shown}: column {column!r} has a vector with a null in it", "replace it in a step")


def refuse_endless(batch: pa.RecordBatch, column: str, shown: str) -> tuple[np.ndarray, np.ndarray]:
    """The vectors of a column, as `matrix_of` gives them. Raises BadJob for one to which nothing is near."""
    refuse_hollow(batch, column, shown)
    values, valid = matrix_of(batch.column(column), where := f"{shown}: column {column!r}")
    wrong = valid & ~np.isfinite(values).all(axis=1)
    refuse(batch, wrong, f"{where} has a vector with NaN or infinity in it, to which nothing is near", "drop such rows")
    return values, valid

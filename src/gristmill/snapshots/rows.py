"""Rows that a database's client gives as Python values, as Arrow batches."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from gristmill.arrow.casts import Lossy, lossless
from gristmill.arrow.frompython import from_python
from gristmill.errors import BadSource
from gristmill.snapshots.contract import Wanted


def as_batch(
    wanted: Wanted, names: Sequence[str], rows: Sequence[Sequence[Any]], kinds: Sequence[pa.DataType | None]
) -> pa.RecordBatch:
    """Rows as a batch: each column of its kind, None for that of its values. Raises BadSource, naming the column."""
    columns = list(zip(*rows, strict=True)) if rows else [() for _ in names]
    arrays = []
    for name, values, kind in zip(names, columns, kinds, strict=True):
        try:
            arrays.append(_array(values, kind))
        except (Lossy, pa.ArrowException, OverflowError, TypeError, ValueError) as e:
            which = f"column {name!r}{f', which is {kind} there' if kind is not None else ''}"
            raise BadSource(f"{wanted.shown}: {which}: {e}: cast it in a query") from e
    return pa.record_batch(arrays, names=list(names))


def _array(values: Sequence[Any], kind: pa.DataType | None) -> pa.Array:
    if not values:
        return pa.array([], kind or pa.null())
    if kind is not None and pa.types.is_boolean(kind):  # some databases have numbers for it
        values = [bool(v) if v in (0, 1) else v for v in values]
    elif kind is not None and pa.types.is_string(kind):
        values = [v if v is None or isinstance(v, str) else _text(v) for v in values]
    elif kind is None:
        values = [str(v) if isinstance(v, uuid.UUID) else v for v in values]
    made = from_python(list(values), kind)
    if kind is None or made.type == kind:
        return made
    return lossless(pa.chunked_array([made]), kind).combine_chunks()  # the next batch may have other values


def _text(value: Any) -> Any:
    """JSON and UUIDs as text; what is neither stays, and is refused."""
    if isinstance(value, uuid.UUID):
        return str(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value

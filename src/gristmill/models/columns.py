"""The columns that a model reads from a source, checked by name and type before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from gristmill.errors import BadModel, did_you_mean


def check_columns(schema: pa.Schema | None, columns: Sequence[str], name: str, what: str = "reads column") -> None:
    """Raises BadModel for the first of `columns` that the source does not have. Without a schema nothing is checked."""
    if schema is None:
        return
    names = frozenset(schema.names)
    for column in columns:
        if column not in names:
            hint = did_you_mean(column, schema.names)
            raise BadModel(
                f"{name} {what} {column!r}, which the source does not have: it has {_listed(schema.names)}{hint}"
            )


def check_text(schema: pa.Schema | None, column: str, name: str) -> None:
    """Raises BadModel if the column is missing or is not text."""
    check_columns(schema, [column], name)
    if schema is not None and not is_text(schema.field(column).type):
        raise BadModel(
            f"{name} reads column {column!r} as text, but it is {schema.field(column).type}: give a column of strings, "
            "or make one in a step"
        )


def is_text(kind: pa.DataType) -> bool:
    """Whether values of the type are text, or bytes that may be UTF-8."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    names = ("string", "large_string", "string_view", "binary", "large_binary", "null")
    return any(getattr(pa.types, f"is_{n}")(kind) for n in names)


def is_number(kind: pa.DataType) -> bool:
    """Whether values of the type are numbers, or booleans."""
    if pa.types.is_dictionary(kind):
        return is_number(kind.value_type)
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )


def _listed(names: Sequence[str], most: int = 12) -> str:
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


_NUMBERS = {
    getattr(pa, name)().id: np.dtype(name)
    for name in (*(f"{u}int{8 << n}" for u in ("", "u") for n in range(4)), "float16", "float32", "float64")
}


def numbers(array: pa.Array) -> np.ndarray | None:
    """Integers or floats without nulls as an array that shares Arrow's memory, read-only; None for anything else.

    Not Arrow's own to_numpy: its first call imports pandas, if installed: a third of a second in every worker.
    """
    dtype = _NUMBERS.get(array.type.id)
    if dtype is None or array.null_count:
        return None
    data = array.buffers()[1]
    if data is None or len(array) == 0:
        return np.empty(0, dtype)
    shared = np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)
    shared.flags.writeable = False  # the buffer may be mutable, and its rows are still needed
    return shared


def of_texts(column: str, found: pa.DataType, wanted: pa.DataType | str) -> str:
    """What else to do about a column that is text because some of its values are: a clause; "" for other columns."""
    if not is_text(found):
        return ""
    return (
        f"; where it is text because some of its values are no numbers (CSV), --set source.types.{column}={wanted} "
        f"(types={{{column!r}: '{wanted}'}}) makes those dead letters"
    )

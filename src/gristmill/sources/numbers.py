"""Numbers as written in a text, against what a column makes of them: a float rounds whole numbers beyond 2^53 and turns
those too large into infinity; pyarrow's CSV reader reads 0x10 as 16, 1 as true, 007 as 7 and +49 as 49. Whole columns
are searched for values that may be wrong, of which there are rarely any; only these are compared with their text.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Real", "far", "has_floats", "holds", "misread", "misreads", "sound", "zone_of"]

_EXACT = 2.0**53  # a float holds every whole number below it
_FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}


class Real(float):
    """A number with a fraction or an exponent that remembers how it was written."""

    def __new__(cls, text: str) -> Real:
        out = super().__new__(cls, text)
        out.text = text
        return out

    text: str


def has_floats(kind: pa.DataType) -> bool:
    """Whether the type contains floats, at any depth."""
    import pyarrow as pa

    return pa.types.is_floating(kind) or any(has_floats(kind.field(i).type) for i in range(kind.num_fields))


def far(column: pa.ChunkedArray, rounds: bool) -> np.ndarray:
    """Rows (bool [rows]) with a float, at any depth, that may not be what was written: it is infinite or, unless floats
    were asked for and so may round (`rounds`), not below 2^53.
    """
    limit = math.inf if rounds else _EXACT
    return np.concatenate([np.zeros(0, dtype=bool), *(_far(chunk, limit) for chunk in column.chunks)])


def _far(values: pa.Array, limit: float) -> np.ndarray:
    import pyarrow as pa
    import pyarrow.compute as pc

    out = np.zeros(len(values), dtype=bool)
    if pa.types.is_floating(values.type):
        np.greater_equal(np.abs(values.to_numpy(zero_copy_only=False)), limit, out=out)
        return out
    if not has_floats(values.type):
        return out
    if pa.types.is_struct(values.type):
        for child in values.flatten():
            out |= _far(child, limit)
        return out
    out[pc.list_parent_indices(values).to_numpy()[_far(values.flatten(), limit)]] = True
    return out


def holds(kind: pa.DataType, value: Any, rounds: bool) -> bool:
    """Whether a column of floats can hold a number from JSON. With `rounds`, floats were asked for, so whole numbers
    may be rounded too, but never to infinity.
    """
    try:
        with np.errstate(over="ignore"):
            kept = float(_FLOATS[kind.bit_width](float(value)))
    except OverflowError:  # an integer larger than any float
        return False
    if math.isinf(kept):
        return type(value) is float  # the word Infinity; numbers are of type Real or int
    return rounds or not isinstance(value, int) or int(kept) == value


def misread(text: pa.ChunkedArray, values: pa.ChunkedArray, rounds: bool = False) -> bool:
    """Whether there is any of `misreads`."""
    return bool(misreads(text, values, rounds).any())


def misreads(text: pa.ChunkedArray, values: pa.ChunkedArray, rounds: bool = False) -> np.ndarray:
    """Rows (bool [rows]) of which pyarrow's CSV reader turned the field in `text` into another value, in `values`, than
    it says. With `rounds`, the type was given, so a float may round and 007 is 7; otherwise a number, unlike a postal
    code or a telephone number, has no leading zeros or plus.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    def found(pattern: str, at: Any = None) -> np.ndarray:
        some = text if at is None else text.take(pa.array(at))
        return np.asarray(pc.fill_null(pc.match_substring_regex(some, pattern), False).to_numpy())

    t, coded = pa.types, r"^\s*[+-]?0[xX]" if rounds else r"^\s*(\+|[+-]?0[0-9xX])"
    wrong: np.ndarray = found(r"^\s*[01]\s*$" if t.is_boolean(values.type) else coded) & values.is_valid().to_numpy()
    if not t.is_floating(values.type):
        return wrong
    at = np.flatnonzero(far(values, rounds))
    if not len(at):
        return wrong
    if rounds:
        wrong[at] |= found("[0-9]", at)  # inf has no digit
        return wrong
    kept = values.take(pa.array(at)).to_numpy()
    endless = np.isinf(kept)
    whole = found(r"^\s*[+-]?[0-9]+\s*$", at)
    wrong[at] |= found("[0-9]", at) & endless
    which = np.flatnonzero(whole & ~endless)
    written = text.take(pa.array(at[which])).to_pylist()
    wrong[at[which]] |= np.fromiter(
        (int(w) != int(k) for w, k in zip(written, kept[which].tolist(), strict=True)), dtype=bool, count=len(which)
    )
    return wrong


def sound(rows: pa.Table) -> pa.Table:
    """Returns the rows. Raises pyarrow.ArrowInvalid if a decimal has more digits than its type, which pyarrow's readers
    let pass.
    """
    for column in rows.columns:
        if "decimal" in str(column.type):
            column.validate(full=True)
    return rows


_ZONED = re.compile(r":.*(Z|[+-][0-9]{2}(:?[0-9]{2})?)$")


def zone_of(kind: pa.DataType, text: str) -> str:
    """Why a text is not a time of this type, if its zone is the reason; else nothing."""
    import pyarrow as pa

    if not pa.types.is_timestamp(kind) or ":" not in text:
        return ""
    zoned = _ZONED.search(text) is not None
    if kind.tz is None:
        return f", which has a zone offset: 'timestamp[{kind.unit}, UTC]' holds such times" if zoned else ""
    return "" if zoned else f", which has no zone offset: 'timestamp[{kind.unit}]' holds such times"

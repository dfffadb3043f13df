"""Numbers as a text has them, against what a column makes of them: a float rounds whole numbers beyond 2^53 and takes
what is too large for infinity; pyarrow's CSV reader takes 0x10 for 16 and 1 for true. Whole columns are asked for
values that can be wrong, of which there are rarely any; only these are compared with their text.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Real", "far", "has_floats", "holds", "misread"]

_EXACT = 2.0**53  # whole numbers below it are all floats
_FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}


class Real(float):
    """A number with a fraction or an exponent that remembers how it was written."""

    def __new__(cls, text: str) -> Real:
        out = super().__new__(cls, text)
        out.text = text
        return out

    text: str


def has_floats(kind: pa.DataType) -> bool:
    """Whether there are floats in it, at any depth."""
    import pyarrow as pa

    return pa.types.is_floating(kind) or any(has_floats(kind.field(i).type) for i in range(kind.num_fields))


def far(column: pa.ChunkedArray, rounds: bool) -> np.ndarray:
    """Rows (bool [rows]) with a float, at any depth, that may not be what was written: it is infinite or, unless it is
    asked for that it `rounds`, not below 2^53.
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
    """Whether a column of floats holds a number as JSON has it. `rounds`: it was asked for, so that it may round whole
    numbers too; to infinity never.
    """
    try:
        with np.errstate(over="ignore"):
            kept = float(_FLOATS[kind.bit_width](float(value)))
    except OverflowError:  # an integer beyond all floats
        return False
    if math.isinf(kept):
        return type(value) is float  # the word Infinity; numbers are of type Real or int
    return rounds or not isinstance(value, int) or int(kept) == value


def misread(text: pa.ChunkedArray, values: pa.ChunkedArray, rounds: bool = False) -> bool:
    """Whether pyarrow's CSV reader took a field of `text` for another value than it says, as in `values`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def found(pattern: str, at: Any = None) -> np.ndarray:
        some = text if at is None else text.take(pa.array(at))
        return np.asarray(pc.fill_null(pc.match_substring_regex(some, pattern), False).to_numpy())

    if not pa.types.is_floating(values.type):
        wrong = found(r"^\s*[01]\s*$" if pa.types.is_boolean(values.type) else r"^\s*[+-]?0[xX]")
        return bool((wrong & values.is_valid().to_numpy()).any())
    at = np.flatnonzero(far(values, rounds))
    if not len(at):
        return False
    if rounds:
        return bool(found("[0-9]", at).any())  # inf has no digit
    kept = values.take(pa.array(at)).to_numpy()
    endless = np.isinf(kept)
    whole = found(r"^\s*[+-]?[0-9]+\s*$", at)
    if found("[0-9]", at)[endless].any():
        return True
    which = np.flatnonzero(whole & ~endless)
    written = text.take(pa.array(at[which])).to_pylist()
    return any(int(w) != int(k) for w, k in zip(written, kept[which].tolist(), strict=True))

"""Timestamps of Parquet's old INT96, which Spark writes by default and Impala and older pandas wrote: a day and the
nanoseconds since its midnight, of any year. No type of Arrow's holds both those years and those digits, and nothing in
the footer tells which a file needs. So a source says one unit for all of its files, microseconds unless told otherwise,
and a value that does not fit it is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.errors import BadSource

if TYPE_CHECKING:
    import pyarrow as pa

OPTION = "int96"
UNITS = ("us", "ns")
_OTHER = {"us": "ns", "ns": "us"}
_MOST = (2**63 - 1) // 1000  # microseconds that int64 holds as nanoseconds


def unit_of(options: Mapping[str, Any]) -> str:
    """The unit that a source reads them in. Raises BadSource."""
    unit = options.get(OPTION, UNITS[0])
    if unit not in UNITS:
        raise BadSource(f"option {OPTION} of a Parquet source is {unit!r}: give 'us' or 'ns'")
    return str(unit)


def other(unit: str) -> str:
    """The unit beside which a value shows whether it fits this one."""
    return _OTHER[unit]


def columns(schema: Any, names: Collection[str]) -> frozenset[str]:
    """Those top-level columns of a Parquet schema, by their names, that may have such timestamps in them."""
    leaves = (schema.column(i) for i in range(len(schema)))
    return frozenset(n for leaf in leaves if leaf.physical_type == "INT96" for n in holders(leaf.path) if n in names)


def holders(path: str) -> Iterator[str]:
    """What the top-level column of a Parquet file's leaf may be called: a name may have dots in it, as the path has."""
    at = path.find(".")
    while at >= 0:
        yield path[:at]
        at = path.find(".", at + 1)
    yield path


def misfit(read: pa.Array, beside: pa.Array, unit: str) -> str | None:
    """What is wrong with a column read in this unit, by the same values in the other one; None if nothing is."""
    for one, two in _times(read, beside):
        micros, nanos = (one, two) if unit == "us" else (two, one)
        # Nanoseconds of years that they do not hold wrap around, and so does this product: what differs is digits.
        digits = nanos - micros * 1000
        if unit == "us" and (lost := np.flatnonzero(digits)).size:
            return (
                f"{_shown(micros[lost[0]], digits[lost[0]])} has digits below a microsecond: options={{'{OPTION}': "
                f"'ns'}} (--set source.options.{OPTION}=ns) reads all such columns as nanoseconds, if years are 1678 "
                "to 2261, and begins another job"
            )
        if unit == "ns" and (far := np.flatnonzero(np.abs(micros) >= _MOST)).size:
            return (
                f"{_shown(micros[far[0]], digits[far[0]])} is of a year that nanoseconds do not hold: without option "
                f"{OPTION} such columns are read as microseconds, if they have no more digits; else write the file "
                "with other types"
            )
    return None


def _times(read: pa.Array, beside: pa.Array) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The timestamps in a column as int64, 0 for null, in both units. Those that have a unit of their own are left out:
    it is the same in both.
    """
    import pyarrow as pa

    from gristmill.arrow.casts import entries, is_list

    kind = read.type
    if pa.types.is_timestamp(kind):
        if kind != beside.type:
            yield _whole(read), _whole(beside)
    elif pa.types.is_map(kind):
        yield from _times(entries(read), entries(beside))
    elif is_list(kind):
        yield from _times(read.flatten(), beside.flatten())
    elif pa.types.is_struct(kind):
        for one, two in zip(read.flatten(), beside.flatten(), strict=True):
            yield from _times(one, two)


def _whole(times: pa.Array) -> np.ndarray:
    import pyarrow as pa

    found: np.ndarray = times.view(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return found


def _shown(micros: np.int64, digits: np.int64) -> str:
    return f"{np.datetime64(int(micros), 'us')}{int(digits):03d}"

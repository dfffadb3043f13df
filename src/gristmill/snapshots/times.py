"""Times that databases have and Arrow has not: infinity, and those beyond what its types can count."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.arrow.casts import entries, is_list
from gristmill.errors import BadSource
from gristmill.snapshots.contract import Wanted

Bounds = dict[str, tuple[int, int]]


def checked(wanted: Wanted, name: str, values: pa.Array, bounds: Bounds) -> None:
    """Raises BadSource if a date, time or timestamp of a column, or inside of its values, is outside of the `bounds` of
    its type ("timestamp", "date", "time": least and most, as Arrow counts, a time in microseconds; "decimal").
    """
    kind, t = values.type, pa.types
    if is_list(kind) or t.is_struct(kind):
        for inner in values.flatten() if t.is_struct(kind) else [values.flatten()]:
            checked(wanted, name, inner, bounds)
        return
    if t.is_map(kind):
        return checked(wanted, name, entries(values), bounds)
    if "decimal" in bounds and t.is_decimal(kind) and len(values):
        found, (least, most) = pc.min_max(values).as_py(), bounds["decimal"]
        if found["min"] is not None and (found["min"] < least or found["max"] > most):
            raise BadSource(f"{wanted.shown}: column {name!r} has a number of more than 38 digits: cast it in a query")
    sort = "timestamp" if t.is_timestamp(kind) else "date" if t.is_date(kind) else "time" if t.is_time(kind) else ""
    if sort not in bounds or not len(values):
        return
    found = pc.min_max(values.view(pa.int32() if kind.bit_width == 32 else pa.int64())).as_py()
    least, most = bounds[sort]
    if sort == "time" and kind.unit == "ns":
        least, most = 1000 * least, 1000 * most + 999
    if found["min"] is not None and (found["min"] < least or found["max"] > most):
        raise BadSource(
            f"{wanted.shown}: column {name!r} has infinity, or a time that {kind} does not hold: give null or another "
            "time for it in a query"
        )

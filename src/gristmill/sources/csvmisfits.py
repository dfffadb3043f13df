"""Which values of a CSV column do not fit its type, found for all of them at once: a file of which every row is bad, as
one with a wrong `types`, must not cost a parse for each row and column. Patterns find the values that pyarrow's reader
surely refuses; all others are given to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gristmill.sources.csvrecords import Dialect
from gristmill.sources.lines import Lines
from gristmill.sources.numbers import misreads

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["PLAIN", "misfits", "one_column"]

PLAIN = Dialect(b",", b'"')
Parse = Callable[[Lines], "pa.ChunkedArray"]  # a file of one column into its type; raises pyarrow.ArrowException


def misfits(
    values: pa.StringArray, kind: pa.DataType, nulls: Sequence[str], told: bool, parse: Parse
) -> tuple[np.ndarray, np.ndarray]:
    """Which of the values the column cannot hold, and which of the others it would change (bool each)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lost = np.zeros(len(values), dtype=bool)
    null = pc.is_in(pc.utf8_trim(values, " \t"), pa.array([n.strip(" \t") for n in nulls], pa.string()))
    refused = _surely(values, kind) & ~null.to_numpy(zero_copy_only=False)
    counts = pa.types.is_integer(kind) or pa.types.is_floating(kind) or (pa.types.is_boolean(kind) and not told)
    todo = [np.flatnonzero(~refused)]
    while todo:
        at = todo.pop()
        if not len(at):
            continue
        some = values.take(pa.array(at))
        try:
            read = parse(one_column(some))
            if counts:
                lost[at] = misreads(pa.chunked_array([some]), read, told)
        except pa.ArrowException:
            if len(at) == 1:
                refused[at] = True
            else:
                todo += [at[: len(at) // 2], at[len(at) // 2 :]]
    return refused, lost


def one_column(values: pa.StringArray) -> Lines:
    """The values as a file of one column, in `PLAIN`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    quoted = pc.binary_join_element_wise(
        pa.scalar('"'), pc.replace_substring(values, '"', '""'), pa.scalar('"\n'), pa.scalar("")
    )
    edges = np.frombuffer(quoted.buffers()[1], dtype=np.int32)[: len(quoted) + 1].astype(np.int64)
    data = quoted.buffers()[2].to_pybytes()[: int(edges[-1])]
    return Lines(data, edges[:-1], edges[1:] - 1, edges[:-1])


def _surely(values: pa.StringArray, kind: pa.DataType) -> np.ndarray:
    """Values that are not of the type, whichever of its spellings pyarrow takes. Not all of them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_null(kind):
        return np.ones(len(values), dtype=bool)
    some, never = _patterns(kind)
    out = np.zeros(len(values), dtype=bool)
    for pattern, matches in ((some, False), (never, True)):
        if pattern:
            found = pc.match_substring_regex(values, rf"^[ \t]*(?:{pattern})[ \t]*$")
            out |= found.to_numpy(zero_copy_only=False) == matches
    return out


def _patterns(kind: pa.DataType) -> tuple[str, str]:
    """What a value of the type is always like, and what it is never like; "" if nothing is known."""
    import pyarrow as pa

    t = pa.types
    if t.is_integer(kind):
        signed = t.is_signed_integer(kind)
        digits = len(str(1 << (kind.bit_width - signed)))
        return ("[-+]?" if signed else "[+]?") + "(0[xX][0-9a-fA-F]+|[0-9]+)", f"[-+]?0*[1-9][0-9]{{{digits},}}"
    if t.is_floating(kind):
        return r"[-+0-9.eE]+|[-+]?(?i:inf|infinity|nan(\(\w*\))?)", ""
    if t.is_decimal(kind):
        return "[-+0-9.eE]+", ""
    if t.is_boolean(kind):
        return "(?i:true|false|0|1)", ""
    if t.is_timestamp(kind):
        zone = "[-0-9T:. ]*" if kind.tz is None else ".*(Z|[-+][0-9]{2}(:?[0-9]{2})?)"
        return f"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}{zone}", ""
    if t.is_date(kind):
        return "[0-9]{4}-[0-9]{2}-[0-9]{2}.*", ""
    return ("[0-9:.]+" if t.is_time(kind) else ""), ""

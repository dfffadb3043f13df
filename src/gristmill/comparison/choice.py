"""What is compared by what: the key columns that join two results, the columns compared, and the type in which the
values of two columns meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pyarrow as pa

from gristmill.arrow.casts import is_list
from gristmill.arrow.schemas import plain, real, wider
from gristmill.comparison.side import Side
from gristmill.errors import BadJob, did_you_mean
from gristmill.values import dataclass

Kind = Literal["labels", "numbers", "vectors", "values"]


@dataclass(frozen=True)
class Chosen:
    """A column to be compared: what its values are, and the one type to which those of both results are cast."""

    name: str
    kind: Kind
    type: pa.DataType
    types: tuple[str, str]


# ---------------------------------------------------------------- keys


def keys_of(a: Side, b: Side, on: Sequence[str] | None) -> dict[str, pa.DataType]:
    """The columns that join the rows, with the type in which their values are compared. Raises BadJob."""
    names = tuple(on) if on is not None else _identifying(a, b)
    if not names or len(set(names)) < len(names):
        raise BadJob(f"--on (on=) is {', '.join(names) or 'empty'}: name each key column once")
    return {name: _key_type(a, b, name) for name in names}


def _identifying(a: Side, b: Side) -> tuple[str, ...]:
    """The columns by which both jobs say that their rows are told apart."""
    key, row_id = (a.option(name) if a.option(name) == b.option(name) else () for name in ("sink.key", "sink.row_id"))
    if row_id and key != () and _both_have(a, b, (row_id,)):  # made of the same columns, or of the place in the source
        return (row_id,)
    if key and _both_have(a, b, key):
        return tuple(key)
    if a.updated_by and a.updated_by == b.updated_by:
        return a.updated_by
    answers = {*a.answers, *b.answers}
    both = [name for name in a.schema.names if name in b.schema.names and name not in answers]
    has = f"both have {', '.join(both)}" if both else "they have no column in common that could (keep one: --keep)"
    raise BadJob(f"{a.name} and {b.name}: give --on (on=), the columns that tell their rows apart: {has}")


def _both_have(a: Side, b: Side, names: Sequence[str]) -> bool:
    return all(name in side.schema.names for side in (a, b) for name in names)


def _key_type(a: Side, b: Side, name: str) -> pa.DataType:
    one, other = (plain(_type_of(side, name, "--on (on=)")) for side in (a, b))
    kind = common(one, other)
    if kind is not None and pa.types.is_floating(kind) and (whole := [k for k in (one, other) if _is_integer(k)]):
        kind = whole[0]  # 2^53 + 1 is no float: the floats have to be whole
    t = pa.types
    fits = (
        *(t.is_boolean, t.is_integer, t.is_floating, t.is_temporal, t.is_decimal128, t.is_fixed_size_binary),
        *(t.is_string, t.is_large_string, t.is_binary, t.is_large_binary),
    )
    if kind is None:
        raise BadJob(f"--on {name}: it is {one} in {a.name} and {other} in {b.name}, which cannot be compared")
    if not any(is_kind(kind) for is_kind in fits):
        raise BadJob(f"--on {name}: it is {kind}: a key is a number, a text, a time, true or false, or bytes")
    return kind


# ---------------------------------------------------------------- compared columns


def compared(
    a: Side, b: Side, keys: Sequence[str], columns: Sequence[str] | None
) -> tuple[tuple[Chosen, ...], dict[str, str]]:
    """The columns to compare, and those left out, with the reason. Raises BadJob if none can be compared, or if one
    that was asked for cannot.
    """
    names = _outputs(a, b, keys) if columns is None else list(dict.fromkeys(columns))
    found, left_out = [], {}
    for name in names:
        if name in keys:
            raise BadJob(f"--columns (columns=) names {name}, which is a key: the rows are joined by it")
        one, other = (_type_of(side, name, "--columns (columns=)") for side in (a, b))
        chosen = _chosen(name, one, other)
        if chosen is None:
            left_out[name] = f"it is {one} in {a.name} and {other} in {b.name}"
        else:
            found.append(chosen)
    if left_out and (columns is not None or not found):
        raise BadJob("; ".join(f"{name} cannot be compared: {why}" for name, why in left_out.items()))
    return tuple(found), left_out


def _outputs(a: Side, b: Side, keys: Sequence[str]) -> list[str]:
    names = [name for name in a.answers if name in b.answers and name not in keys]
    if not names:
        told = "; ".join(f"that of {s.name} answered in {', '.join(s.answers) or 'none'}" for s in (a, b))
        both = [name for name in a.schema.names if name in b.schema.names and name not in keys]
        way = f"--columns (columns=) compares others of those that both have: {', '.join(both)}" if both else "none"
        raise BadJob(f"no column in which both models answered: {told}; {way}")
    return names


def _chosen(name: str, one: pa.DataType, other: pa.DataType) -> Chosen | None:
    types = (str(one), str(other))
    if _is_vector(one) and _is_vector(other):
        return Chosen(name, "vectors", pa.large_list(pa.float64()), types)
    kind = common(plain(one), plain(other))
    if kind is None:
        return None
    t = pa.types
    if t.is_floating(kind) or t.is_decimal(kind):
        whole = _is_integer(plain(one)) and _is_integer(plain(other))
        return Chosen(name, "labels" if whole else "numbers", kind, types)
    text = t.is_string(kind) or t.is_large_string(kind)
    return Chosen(name, "labels" if t.is_boolean(kind) or t.is_integer(kind) or text else "values", kind, types)


def _is_vector(kind: pa.DataType) -> bool:
    return is_list(kind) and bool(pa.types.is_floating(kind.value_type))


# ---------------------------------------------------------------- types


def common(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """A type for the values of both: one that holds them all, else float64 for whole numbers beside floats; None if
    they are values of two sorts.
    """
    kind = wider(one, other)
    if kind is None and _is_integer(one) and _is_integer(other):
        return pa.decimal128(20, 0)  # uint64 beside signed ones
    return real(one, other) if kind is None else kind


def _is_integer(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind))


def _type_of(side: Side, name: str, flag: str) -> pa.DataType:
    names = side.schema.names
    if name not in names:
        has = f"it has {', '.join(names) or 'no columns, and no rows'}{did_you_mean(name, names)}"
        raise BadJob(f"{flag} names {name!r}, which {side.name} does not have: {has}")
    return side.schema.field(name).type

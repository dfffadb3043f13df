"""Python values as an Arrow array, all unchanged. Arrow itself silently turns a datetime after a date into a date, an
instant into a time without a zone, True into 1.0 and 2^64 - 1 into -1.0.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cache
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, is_list, lossless

__all__ = ["from_python", "is_from", "opened_bytes", "tensor_to_numpy"]

_NONE = type(None)
_PLAIN = {str, int, float, bool, bytes}  # if all values of a column are of one of these, Arrow gets them right
_FAMILIES: tuple[tuple[tuple[type, ...], str], ...] = (  # subclasses first: a bool is an int, a datetime a date
    ((bool, np.bool_), "bool"),
    ((np.timedelta64,), "numpy.timedelta64"),
    ((np.datetime64,), "numpy.datetime64"),
    ((int, float, np.integer, np.floating, Decimal), "number"),
    ((str,), "text"),
    ((bytes, bytearray, memoryview), "bytes"),
    ((datetime.datetime,), "datetime"),
    ((datetime.date,), "date"),
    ((datetime.time,), "time"),
    ((datetime.timedelta,), "timedelta"),
    ((list, tuple, set, frozenset, np.ndarray), "list"),
    ((Mapping,), "dict"),
)


def from_python(values: Sequence[Any], declared: pa.DataType | None = None) -> pa.Array:
    """`values`, one per row, as an array of a type that holds all of them unchanged; None and pandas' NaT and NA are
    null. Numbers without a width become `declared` if they fit.

    Raises Lossy, naming both kinds, if values are of two kinds (at any depth: in lists, dicts and arrays), or cannot be
    held at all (a time of day with a zone, the year 2400 beside nanoseconds); otherwise what Arrow raises.
    """
    if declared is not None:
        try:
            return _as_declared(_exact(values, declared), declared)
        except (Lossy, pa.ArrowException, OverflowError) as e:
            if pa.types.is_map(declared):
                raise Lossy(f"as {declared}: {e}") from e
            # for other types, the error without `declared` explains better what is wrong
    exact = _exact(values)
    try:
        return pa.array(exact)
    except OverflowError:
        if not all(v is None or (isinstance(v, int) and v >= 0) for v in values):
            raise
        return pa.array(exact, pa.uint64())


def _as_declared(values: Sequence[Any], declared: pa.DataType) -> pa.Array:
    try:
        found = pa.array(values)
    except (pa.ArrowException, OverflowError):
        # 2^63 is a uint64, and pairs a map, only if that is declared; but given a type, Arrow would cut 1.5 to 1.
        found = pa.array(values, declared)
        if _cut(values, declared):
            raise Lossy(f"not every value is the same as {declared}") from None
        return found
    return lossless(found, declared, rounds=True)


def _cut(values: Sequence[Any], kind: pa.DataType) -> bool:
    """Whether any number, at any depth, has a fraction where `kind` has whole numbers."""
    t = pa.types
    values = [v for v in values if v is not None]
    if t.is_integer(kind):
        return not all(map(_whole, set(map(type, values))))
    if is_list(kind):
        return _cut(list(chain.from_iterable(values)), kind.value_type)
    if t.is_map(kind):
        pairs = list(chain.from_iterable(v.items() if isinstance(v, Mapping) else v for v in values))
        return _cut([k for k, _ in pairs], kind.key_type) or _cut([v for _, v in pairs], kind.item_type)
    if t.is_struct(kind):
        return any(_cut([v.get(f.name) for v in values], f.type) for f in kind)
    return False


def _whole(kind: type) -> bool:
    return issubclass(kind, (int, np.integer)) and not issubclass(kind, np.timedelta64)


# ---------------------------------------------------------------- kinds


@cache
def _family(kind: type) -> str:
    for types, name in _FAMILIES:
        if issubclass(kind, types):
            return name
    return f"{kind.__module__}.{kind.__qualname__}"


def _exact(values: Sequence[Any], declared: pa.DataType | None = None) -> Sequence[Any]:
    """The values, or others that Arrow reads as what these are. `declared` matters for maps, which pairs may be."""
    kinds = set(map(type, values))
    kinds.discard(_NONE)
    if (len(kinds) == 1 and kinds <= _PLAIN) or not kinds:
        return values
    if any(_foreign(k) for k in kinds) and any(map(_closed, values)):
        return _exact([_open(v) if _closed(v) else v for v in values], declared)
    families = {_family(k): k for k in kinds}
    if len(families) > 1:
        ordered = dict.fromkeys(_family(k) for k in map(type, values) if k is not _NONE)
        one, other = islice(ordered, 2)
        raise Lossy(f"some values are {_named(families[one], one)}, others {_named(families[other], other)}")
    family = next(iter(families))
    if family == "number":
        return _exact_numbers(values, kinds)
    if family in ("datetime", "time", "timedelta"):
        return _exact_times(values, family)
    elif family == "list":
        return _exact_lists(values, kinds, declared)
    elif family == "dict":
        return _exact_dicts(values, declared)
    return values


def _named(kind: type, family: str) -> str:
    return family if family in ("number", "text", "bytes", "list", "dict") else kind.__name__


def _exact_numbers(values: Sequence[Any], kinds: set[type]) -> Sequence[Any]:
    """Arrow reports that no type holds both kinds of number only for Python's own, not if numpy's are among them."""
    if len(kinds) == 1 or not any(issubclass(k, np.generic) for k in kinds):
        return values
    if np.longdouble in kinds:
        raise Lossy("values are longdouble and other numbers, which no single type can hold")
    for alike in (np.signedinteger, np.unsignedinteger, np.floating):
        if all(issubclass(k, alike) for k in kinds):
            return values
    return [v.item() if isinstance(v, np.generic) else v for v in values]


def _exact_times(values: Sequence[Any], family: str) -> Sequence[Any]:
    """Arrow takes the nanoseconds of pandas' times only if given such a type: they become its own scalars."""
    if family != "timedelta":
        zones = {v.tzinfo is not None for v in values if v is not None}
        if family == "time" and True in zones:
            raise Lossy("a time of day has a zone, which no column can hold: return it without one, or as text")
        if len(zones) > 1:
            raise Lossy("some values are datetime without a zone, others datetime with one")
    if not any(getattr(v, "nanosecond", 0) or getattr(v, "nanoseconds", 0) for v in values if v is not None):
        return values
    kind = pa.duration("ns") if family == "timedelta" else pa.timestamp("ns", pa.array(values).type.tz)
    try:
        return list(pa.array(values, kind))
    except pa.ArrowException as e:
        raise Lossy(f"some values have nanoseconds, and {kind} cannot hold the others: {e}") from e


# ---------------------------------------------------------------- containers


def _exact_lists(values: Sequence[Any], kinds: set[type], declared: pa.DataType | None) -> Sequence[Any]:
    if kinds == {np.ndarray} and len({v.dtype for v in values if v is not None}) == 1:
        return values
    if any(issubclass(k, np.ndarray) for k in kinds):
        values = [list(v) if isinstance(v, np.ndarray) else v for v in values]
    inner: list[Any] = list(chain.from_iterable(v for v in values if v is not None))
    if declared is not None and pa.types.is_map(declared):
        return _exact_pairs(values, inner, declared)
    exact = _exact(inner, declared.value_type if declared is not None and is_list(declared) else None)
    if exact is inner:
        return values
    each = iter(exact)
    return [None if v is None else list(islice(each, len(v))) for v in values]


def _exact_pairs(values: Sequence[Any], pairs: list[Any], kind: pa.MapType) -> Sequence[Any]:
    if any(not isinstance(p, (tuple, list)) or len(p) != 2 for p in pairs):
        raise Lossy(f"values are not the pairs of a key and a value that {kind} holds")
    keys, items = _exact([k for k, _ in pairs], kind.key_type), _exact([v for _, v in pairs], kind.item_type)
    each = zip(keys, items, strict=True)
    return [None if v is None else list(islice(each, len(v))) for v in values]


def _exact_dicts(values: Sequence[Any], declared: pa.DataType | None) -> Sequence[Any]:
    if declared is not None and pa.types.is_map(declared):
        return _exact_lists([None if v is None else list(v.items()) for v in values], {list}, declared)
    names: dict[Any, None] = {}
    for v in values:
        names.update(v or ())
    if other := next((n for n in names if not isinstance(n, str)), None):
        raise Lossy(f"a dict has the key {other!r}, which is {type(other).__name__}, not text")
    known = {f.name: f.type for f in declared} if declared is not None and pa.types.is_struct(declared) else {}
    changed = {}
    for name in names:
        column = [None if v is None else v.get(name) for v in values]
        exact = _exact(column, known.get(name))
        if exact is not column:
            changed[name] = exact
    if not changed:
        return values
    return [
        None if v is None else {n: changed[n][i] if n in changed else x for n, x in v.items()}
        for i, v in enumerate(values)
    ]


# ---------------------------------------------------------------- values that Arrow does not know


@cache
def _foreign(kind: type) -> bool:
    return issubclass(kind, np.ndarray) or kind.__module__.partition(".")[0] in ("torch", "pandas")


def _closed(value: Any) -> bool:
    """Whether Arrow cannot take this value, or misreads it, but can take what `_open` makes of it."""
    if isinstance(value, np.ndarray):
        return type(value) is not np.ndarray or value.ndim != 1 or value.dtype.kind == "O" or not value.dtype.isnative
    return _missing(value) or is_from("torch", value, "Tensor")


def _missing(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and (value is getattr(pandas, "NaT", value) or value is getattr(pandas, "NA", value))


def _open(value: Any) -> Any:
    if _missing(value):
        return None
    if not isinstance(value, np.ndarray):
        return tensor_to_numpy(value)
    masked = type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray)  # `np.ma` is slow to import
    if masked and value is np.ma.masked:
        return None
    if value.ndim == 0:
        return value[()]
    if value.ndim > 1:
        return list(value)
    if masked:
        return [None if m else v for v, m in zip(value.data, np.ma.getmaskarray(value), strict=True)]
    if value.dtype.kind == "O":
        return list(value)
    return np.asarray(value).astype(value.dtype.newbyteorder("="))


def tensor_to_numpy(tensor: Any) -> np.ndarray:
    """A torch tensor as an array on the CPU; bfloat16, which numpy lacks, as float32 (exact)."""
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    return np.asarray(tensor.numpy())


def is_from(package: str, value: Any, kind: str) -> bool:
    """Whether a value is of a class of a package that may not be installed; never imports it."""
    module = sys.modules.get(package)
    return module is not None and isinstance(value, getattr(module, kind, ()))


def from_polars(values: Any) -> pa.Array | pa.ChunkedArray:
    """A polars series. For a column of Python objects polars gives Arrow only their addresses."""
    return from_python(values.to_list()) if str(values.dtype) == "Object" else values.to_arrow()


def pandas_array(series: Any) -> pa.Array | pa.ChunkedArray:
    """A pandas series without objects. Raises Lossy for types that only pandas reads back: others would see numbers."""
    found = pa.Array.from_pandas(series)
    if isinstance(found.type, pa.ExtensionType) and found.type.extension_name.startswith("pandas."):
        raise Lossy(f"it is pandas' {series.dtype}, which no file format can hold: astype(str) turns it into text")
    kind = found.type
    if pa.types.is_dictionary(kind) and pa.types.is_float64(kind.value_type) and not len(found.dictionary):
        return pa.nulls(len(found))  # to pandas, categories that no value tells are doubles
    return found


def opened_bytes(data: Any) -> pa.NativeFile:
    """A file of bytes for a reader with threads, copied into memory of Arrow's own. A thread may be the last that holds
    the file, when the interpreter ends; one that releases bytes of Python then aborts the process.
    """
    octets = np.frombuffer(data, np.uint8)
    own = pa.allocate_buffer(len(octets))
    if len(octets):
        np.frombuffer(own, np.uint8)[:] = octets
    return pa.BufferReader(own)

"""Values that own their memory: a batch function may return the same buffer each time, and no caller sees another's."""

from __future__ import annotations

import array
import copy
import dataclasses
import functools
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

_FIXED = frozenset({int, float, complex, bool, str, bytes, type(None)})
_CONTAINERS = (list, dict, set, deque, bytearray, array.array, UserDict, UserList, ChainMap)
_ARRAYS = ("__array__", "__array_interface__", "__cuda_array_interface__")  # numpy, pandas, torch, cupy, images


def own(value: Any) -> Any:
    """The value, sharing no memory with the original: arrays, tensors and data frames, lists, dicts, tuples, sets,
    bytearrays, dataclasses and the standard library's wrappers of these are copied, with all of these that they
    contain. Other objects are left as they are: what a copy of a handle, a lock or a model would be is undefined.
    """
    try:
        return _own(value)
    except RecursionError:  # it contains itself
        return copy.deepcopy(value)


def own_all(values: list[Any]) -> list[Any]:
    """A new list of copies of the values, none of which shares memory with another."""
    return values[:] if _FIXED.issuperset(map(type, values)) else [own(value) for value in values]


def is_array(value: Any) -> bool:
    """Whether copying the value as a whole copies all its rows."""
    kind: Any = type(value)
    return _way(kind) is _array


def _own(value: Any) -> Any:
    kind: Any = type(value)
    way = _way(kind)
    return value if way is None else way(value)


@functools.lru_cache(maxsize=512)
def _way(kind: Any) -> Callable[[Any], Any] | None:
    """How values of this class are copied; None for those that are not copied."""
    if kind in _FIXED:
        return None
    for base, way in _WAYS:
        if kind is base:
            return way
    if any(hasattr(kind, name) for name in _ARRAYS):
        # An array with neither, such as one of jax, cannot be changed.
        return _array if hasattr(kind, "copy") or hasattr(kind, "clone") else None
    if dataclasses.is_dataclass(kind):
        return _dataclass
    if issubclass(kind, tuple):
        return _named if hasattr(kind, "_make") else copy.deepcopy
    return copy.deepcopy if issubclass(kind, _CONTAINERS) else None


def _array(value: Any) -> Any:
    if getattr(getattr(value, "dtype", None), "hasobject", False):
        return copy.deepcopy(value)
    return value.copy() if hasattr(value, "copy") else value.clone()


def _each(values: Iterable[Any]) -> Any:
    return values if _FIXED.issuperset(map(type, values)) else map(_own, values)


def _dict(value: dict[Any, Any]) -> dict[Any, Any]:
    return dict(zip(value, _each(value.values()), strict=True))


def _tuple(value: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_each(value))


def _list(value: list[Any]) -> list[Any]:
    return list(_each(value))


def _named(value: Any) -> Any:
    return value._make(_each(value))


def _view(value: memoryview) -> memoryview:
    if not value.nbytes:
        return value
    return memoryview(bytearray(value)).cast(value.format, value.shape)  # type: ignore[call-overload,no-any-return]


def _proxy(value: MappingProxyType[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(_own(dict(value)))


def _dataclass(value: Any) -> Any:
    made = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(made, field.name, _own(getattr(value, field.name)))
    return made


_WAYS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (list, _list),
    (dict, _dict),
    (tuple, _tuple),
    (set, set.copy),
    (bytearray, bytearray.copy),
    (memoryview, _view),
    (MappingProxyType, _proxy),
)

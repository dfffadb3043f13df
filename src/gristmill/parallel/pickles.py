"""Values that own their memory: each is pickled separately, as it is at that moment, and shares nothing with another.
Values that nothing can change are left as they are.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from gristmill.parallel import transport
from gristmill.parallel.transport import LARGE, Parcel, pack, unpack
from gristmill.process.pickling import by_value, pickler
from gristmill.values import dataclass

_FIXED = frozenset({int, float, complex, bool, str, bytes, type(None)})


class Sealed(NamedTuple):
    """A value as bytes, or the file that holds them. `classes` travel beside it: in a bundle, as their places there."""

    data: bytes
    path: str = ""
    classes: tuple[Any, ...] = ()

    def value(self) -> Any:
        """The value, rebuilt; not for a value in a bundle."""
        return _loaded(Parcel(self.data), self.classes)

    def __repr__(self) -> str:
        return repr(self.value())


def fixed(value: Any) -> bool:
    """Whether nothing can change the value."""
    kind = type(value)
    return kind in _FIXED or (kind is tuple and _FIXED.issuperset(map(type, value)))


def seal(value: Any) -> Any:
    """By the caller, for workers, which have never imported its script: a fixed value as it is, a small array copied,
    all else Sealed. Raises what pickling does.
    """
    if fixed(value) or type(value) is Sealed:
        return value
    if (array := _copied(value)) is not None:
        return array
    return Sealed(pickle.dumps(value, protocol=5)) if _simple(value) else _sealed(value)


def seal_back(value: Any) -> Any:
    """By a worker, for the caller, in the way of `shipping.pickled`."""
    if fixed(value):
        return value
    if (array := _copied(value)) is not None:
        return array
    try:
        return Sealed(pickle.dumps(value, protocol=5)) if transport.plain else _sealed(value)
    except Exception:  # whatever pickle fails on, cloudpickle reports better
        return _sealed(value)


def _copied(value: Any) -> Any:
    """A copy of a small array of numbers or texts, which is cheaper than a separate pickle; else None."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray or value.nbytes >= LARGE or not value.flags.writeable:
        return None
    return value.copy("K") if value.dtype.kind in "biufcSUmM" else None


def _simple(value: Any) -> bool:
    """Whether any pickler will do for it: a container of fixed values."""
    if type(value) is dict:
        return _FIXED.issuperset(map(type, value)) and _FIXED.issuperset(map(type, value.values()))
    return type(value) in (list, set, frozenset) and _FIXED.issuperset(map(type, value))


def _sealed(value: Any) -> Sealed:
    file = io.BytesIO()
    pickler = _pickler()(file)
    pickler.dump(value)
    return Sealed(file.getvalue(), classes=tuple(pickler.classes))


@functools.cache
def _pickler() -> Any:
    class Pickler(pickler()):  # type: ignore[misc]
        """Pickles by value, except classes, which are left out to be sent once for many values."""

        def __init__(self, file: Any) -> None:
            super().__init__(file, protocol=5)
            self.classes: dict[Any, int] = {}

        def reducer_override(self, obj: Any) -> Any:
            if not issubclass(type(obj), type):
                return super().reducer_override(obj)
            if obj not in self.classes:
                if (found := super().reducer_override(obj)) is NotImplemented:  # by its name
                    return found
                self.classes[obj] = len(self.classes)
            return _class_at, (self.classes[obj],)

    return Pickler


def _class_at(place: int) -> Any:
    return _reading.classes[place]


class _Reading(threading.local):
    """The classes of the bundle that this thread is reading."""

    classes: tuple[Any, ...] = ()


_reading = _Reading()


def _loaded(parcel: Parcel, classes: tuple[Any, ...]) -> Any:
    before, _reading.classes = _reading.classes, classes
    try:
        return unpack(parcel)
    finally:
        _reading.classes = before


def _bytes(value: Any) -> int:
    """Roughly the bytes that a value takes; exact enough for large values."""
    if type(value) is tuple:
        return sum(map(_bytes, value))
    return len(value) if isinstance(value, (str, bytes)) else getattr(value, "nbytes", 0)


class Bundle:
    """Sealed values gathered into one message; `size` is their bytes. Large ones go through files of `folder`."""

    def __init__(self, folder: str | None) -> None:
        self.size = 0
        self._folder = folder
        self._values: list[Any] = []
        self._places: dict[Any, int] = {}
        self._classes: list[bytes] = []  # each pickled separately: an unreadable one does not affect the others

    def add(self, value: Any) -> None:
        """Adds the result of `seal` or `seal_back`. Raises what pickling its classes does."""
        if type(value) is Sealed:
            for kind in value.classes:
                if kind not in self._places:
                    self._classes.append(by_value(kind))
                    self._places[kind] = len(self._places)
            parcel = pack(value.data, self._folder) if len(value.data) >= LARGE else Parcel(value.data)
            self.size += len(value.data)
            value = Sealed(parcel.data, parcel.path, tuple(self._places[kind] for kind in value.classes))
        else:
            self.size += _bytes(value)
        self._values.append(value)

    def parcel(self) -> Parcel:
        """The whole bundle, to be `opened`."""
        return pack(pickle.dumps((self._values, self._classes), protocol=5), self._folder)


@dataclass(frozen=True)
class Unread:
    """Stands for a value that cannot be rebuilt here."""

    error: Exception


def opened(parcel: Parcel) -> Iterator[Any]:
    """The values of a bundle, each rebuilt when it is asked for; Unread for those that cannot be."""
    values, codes = unpack(parcel)
    known: dict[int, Any] = {}
    for value in values:
        if type(value) is Sealed:
            try:
                for place in value.classes:
                    if place not in known:
                        known[place] = pickle.loads(codes[place])
                value = _loaded(Parcel(value.data, value.path), tuple(known[place] for place in value.classes))
            except Exception as e:
                value = Unread(e)
        yield value

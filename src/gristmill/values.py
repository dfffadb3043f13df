"""Frozen dataclasses that are quick to import.

For each frozen class `dataclasses.dataclass` compiles six methods when its module is imported; with over 200 classes
in a driver that was half of what importing this package took, in each process, though most of a run's classes are never
made. Here `__init__` is compiled, by the standard library, when the first value is made, and the other five are
functions that all classes share. Such a class is a base of others that are made here, or of plain ones, not of frozen
ones of the standard library.
"""

from __future__ import annotations

import dataclasses
import inspect
import reprlib
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, /, **options: bool) -> Any:
        """As `dataclasses.dataclass`, which makes classes with other options than these."""
        frozen = options.get("frozen") and options.keys() <= {"frozen", "eq", "repr", "kw_only"}

        def made(cls: type) -> type:
            return _frozen(cls, **options) if frozen else dataclasses.dataclass(cls, **options)

        return made if cls is None else made(cls)


def _frozen(cls: type, *, frozen: bool, eq: bool = True, repr: bool = True, kw_only: bool = False) -> Any:
    own = dict(vars(cls))
    if any("InitVar" in str(hint) for hint in own.get("__annotations__", {}).values()):
        raise TypeError(f"{cls.__name__}: a class made here has no InitVar: take dataclasses.dataclass")
    made: Any = dataclasses.dataclass(cls, init=False, repr=False, eq=False, kw_only=kw_only)
    shared: dict[str, Any] = {"__setattr__": _set, "__delattr__": _delete}
    if "__init__" not in own:
        shared |= {"__init__": _init(made), "__signature__": _Signature()}
    if repr:
        shared["__repr__"] = _text
    if eq:
        shared |= {"__eq__": _equal, "__hash__": _hash}
        fields = dataclasses.fields(made)
        made._compared = _getter(f.name for f in fields if f.compare)
        made._hashed = _getter(f.name for f in fields if (f.compare if f.hash is None else f.hash))
    for name, method in shared.items():
        if name not in own or (name == "__hash__" and own[name] is None):  # as of a class with an `__eq__` of its own
            setattr(made, name, method)
    return made


def _init(cls: Any) -> Any:
    """An `__init__` that takes the place of itself when it is first called."""
    compiled: list[Any] = []

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: a field may have that name
        if not compiled:
            compiled.append(_compiled(cls))
            if vars(cls)["__init__"] is __init__:  # else somebody has wrapped it
                cls.__init__ = compiled[0]
        compiled[0](*args, **kwargs)

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    __init__.__module__ = cls.__module__
    return __init__


def _compiled(cls: Any) -> Any:
    """What the standard library makes of the fields of a class."""
    fields = [(f.name, f.type, f) for f in dataclasses.fields(cls)]
    space: dict[str, Any] = {"__doc__": "Else one with the signature is made."}
    if hasattr(cls, "__post_init__"):
        space["__post_init__"] = cls.__post_init__
    made: Any = dataclasses.make_dataclass(cls.__name__, fields, namespace=space, frozen=True, repr=False, eq=False)
    made.__init__.__qualname__ = f"{cls.__qualname__}.__init__"
    return made.__init__


class _Signature:
    """The signature of a class, for `inspect.signature` and `help`."""

    def __get__(self, value: object, cls: type) -> inspect.Signature:
        by = next(c for c in cls.__mro__ if "__init__" in vars(c))
        if value is not None or "__signature__" not in vars(by):  # of its `__call__`, or of an `__init__` of its own
            raise AttributeError("__signature__")
        whole = inspect.signature(_compiled(by))
        shown = getattr(by, "_shown", lambda hint: hint)
        return whole.replace(
            parameters=[p.replace(annotation=shown(p.annotation)) for p in whole.parameters.values()][1:]
        )


def _getter(names: Any) -> Any:
    names = tuple(names)
    if len(names) > 1:
        return staticmethod(attrgetter(*names))
    return staticmethod((lambda value: (getattr(value, names[0]),)) if names else lambda value: ())


def _set(self: Any, name: str, value: Any) -> None:
    if _is_field(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _delete(self: Any, name: str) -> None:
    if _is_field(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _is_field(value: Any, name: str) -> bool:
    """As the standard library has it: a subclass that is no dataclass may have attributes of its own."""
    cls = type(value)
    return "__dataclass_fields__" in vars(cls) or name in cls.__dataclass_fields__


def _equal(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self._compared(self) == self._compared(other)


def _hash(self: Any) -> int:
    return hash(self._hashed(self))


@reprlib.recursive_repr()
def _text(self: Any) -> str:
    shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({shown})"

"""Frozen dataclasses of gristmill.values, beside those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gristmill as gm
from gristmill import values

FIELDS = {
    "plain": {},
    "default": {"default": 7},
    "made": {"default_factory": list},
    "hidden": {"default": 1, "repr": False},
    "aside": {"default": 2, "compare": False},
    "unhashed": {"default": 3, "hash": False},
    "hashed": {"default": 4, "compare": False, "hash": True},
    "named": {"default": 5, "kw_only": True},
    "fixed": {"default": 6, "init": False},
}
Fields = list[tuple[str, str]]
ORDERED = st.lists(st.sampled_from(sorted(FIELDS)), max_size=6).map(
    lambda kinds: sorted(((f"f{n}", kind) for n, kind in enumerate(kinds)), key=lambda field: field[1] != "plain")
)


def made(decorate: Callable[..., Any], fields: Fields, base: type | None = None, **options: Any) -> Any:
    """A frozen class with these fields, which notes that it was made."""
    space: dict[str, Any] = {
        "__annotations__": {name: "int" for name, _ in fields},
        "__module__": __name__,
        "__post_init__": lambda self: object.__setattr__(self, "noted", True),
        "__doc__": "A value.",
        **{name: dataclasses.field(**FIELDS[kind]) for name, kind in fields if FIELDS[kind]},
    }
    return decorate(frozen=True, **options)(type("Value", (base,) if base else (), space))


def outcome(act: Callable[[], Any]) -> Any:
    """What it answers, or the type and the words of what it raises."""
    try:
        return act()
    except Exception as e:
        return type(e), str(e)


@given(ORDERED, ORDERED, st.lists(st.integers(0, 3), max_size=8), st.booleans(), st.booleans(), st.booleans())
def test_as_the_standard_library(
    fields: Fields, more: Fields, given_: list[int], kw_only: bool, eq: bool, repr_: bool
) -> None:
    """Values, signatures, text, comparison, hash, copies and refusals are those of dataclasses.dataclass, also of
    classes that inherit.
    """
    more = [(f"g{name}", kind) for name, kind in more if kind != "plain"]
    options = {"kw_only": kw_only, "eq": eq, "repr": repr_}
    seen = []
    for decorate in (values.dataclass, dataclasses.dataclass):
        cls = made(decorate, fields, **options)
        for each in (cls, made(decorate, more, cls, **options)):
            by_name = {f.name: n for f, n in zip(dataclasses.fields(each), given_, strict=False) if f.init}
            one = outcome(lambda each=each: each(*given_))
            two = outcome(lambda each=each, by_name=by_name: each(**by_name))
            seen.append(str(inspect.signature(each)))
            for value in (one, two):
                if not dataclasses.is_dataclass(value):
                    seen.append(value)
                    continue
                seen += [dataclasses.asdict(value), vars(value), value.__match_args__]
                seen += [repr(value)] if repr_ else []
                other = copy.copy(value)
                seen += [value == other, value == 1, dataclasses.replace(value) == value if by_name else None]
                seen += [outcome(lambda value=value: hash(value)) if eq else None]
                for act in (setattr, lambda v, n, _: delattr(v, n)):
                    seen += [outcome(lambda value=value, n=n, act=act: act(value, n, 1)) for n in [*by_name, "other"]]
    half = len(seen) // 2
    for ours, theirs in zip(seen[:half], seen[half:], strict=True):
        assert ours == theirs


@values.dataclass(frozen=True)
class Base:
    """A value with a default that is made anew."""

    a: int
    b: list[int] = dataclasses.field(default_factory=list)


class Plain(Base):
    """No dataclass itself."""


def test_a_subclass_that_is_no_dataclass() -> None:
    """It is made as its base is, may have attributes of its own, and has the base's fields frozen."""
    value = Plain(1)
    value.own = 2  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'a'"):
        value.a = 2  # type: ignore[misc]
    assert (value, pickle.loads(pickle.dumps(value))) == (Plain(1), value) and value != Base(1)
    assert Base(1).b is not Base(1).b


def test_an_init_that_was_wrapped_before_it_was_called() -> None:
    """What wraps `__init__` stays."""
    cls = made(values.dataclass, [("a", "plain")])
    first, calls = cls.__init__, []

    def wrapped(self: Any, a: int) -> None:
        calls.append(a)
        first(self, a)

    cls.__init__ = wrapped
    assert [cls(1).a, cls(2).a, calls] == [1, 2, [1, 2]]


def test_first_values_made_at_once() -> None:
    """Threads that make the first values of a class at the same time all make them."""
    cls = made(values.dataclass, [("a", "plain"), ("b", "default")])
    begin, found = threading.Barrier(8), []

    def make(n: int) -> None:
        begin.wait()
        found.append(cls(n))

    threads = [threading.Thread(target=make, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(value.a for value in found) == list(range(8))


def test_nothing_is_compiled_for_a_class_of_which_no_value_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first value leads to an `__init__`."""
    asked: list[type] = []
    compiled = values._compiled
    monkeypatch.setattr(values, "_compiled", lambda cls: asked.append(cls) or compiled(cls))
    cls = made(values.dataclass, [("a", "plain")])
    assert asked == []
    assert (cls(1), cls(2), asked) == (cls(1), cls(2), [cls])


def test_signatures_say_what_options_are_in_short() -> None:
    """`help(gm.Gates)` and editors show types, not the whole description of an option."""
    shown = str(inspect.signature(gm.Gates))
    assert "min_ok: " in shown and "Annotated" not in shown and len(shown) < 600


@values.dataclass(frozen=True)
class Called(Base):
    """A value that is called."""

    def __call__(self, x: int, y: int) -> int:
        """The larger one."""
        return max(x, y, self.a)


class Otherwise(Base):
    """One with an `__init__` of its own."""

    def __init__(self, text: str) -> None:
        super().__init__(int(text))


def test_signatures_of_values_and_of_subclasses() -> None:
    """A value's is that of its call, a subclass's that of its own `__init__`."""
    assert str(inspect.signature(Called(1))) == "(x: 'int', y: 'int') -> 'int'"
    assert str(inspect.signature(Otherwise)) == "(text: 'str') -> 'None'"
    assert str(inspect.signature(Plain)) == str(inspect.signature(Base)) != str(inspect.signature(Otherwise))


def test_a_value_inside_itself_has_a_text() -> None:
    """As that of the standard library."""
    value = Base(1)
    value.b.append(value)  # type: ignore[arg-type]
    assert repr(value) == "Base(a=1, b=[...])"


def test_what_is_only_for_init_is_refused() -> None:
    """It would be lost."""
    with pytest.raises(TypeError, match="Value: a class made here has no InitVar"):
        values.dataclass(frozen=True)(type("Value", (), {"__annotations__": {"a": "dataclasses.InitVar[int]"}}))

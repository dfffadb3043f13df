"""One error of a batch becomes an error of each caller's own, equal in all that can be seen."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest

from gristmill.dynamic.callerrors import personal
from gristmill.errors import BatchFailed


class Plain(Exception):
    """As most are."""


class Keyword(ValueError):
    """Its `__init__` takes other arguments than it passes on."""

    def __init__(self, *, row: int) -> None:
        super().__init__(f"row {row} is bad")
        self.row = row


class File(FileNotFoundError):
    """Has fields in C."""


class Picky(Exception):
    """Cannot be made again."""

    made = 0

    def __new__(cls, *args: Any) -> Picky:
        cls.made += 1
        if cls.made > 1:
            raise TypeError("only one of me")
        return super().__new__(cls, *args)


def caught(error: Exception) -> Exception:
    try:
        try:
            raise KeyError("deep")
        except KeyError as deep:
            raise error from deep
    except Exception as raised:
        return raised


ERRORS = [
    Plain("a", 1),
    Plain(),
    Keyword(row=3),
    OSError(2, "No such file", "x.txt"),
    File(2, "No such file", "y.txt"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ImportError("no", name="torch", path="here"),
    SyntaxError("bad", ("f.py", 3, 4, "x =")),
    KeyError("k"),
    ZeroDivisionError("division by zero"),
]
if sys.version_info >= (3, 11):
    ERRORS.append(builtins.ExceptionGroup("two", [ValueError(1), KeyError(2)]))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_twin_looks_the_same(error: Exception) -> None:
    """Type, text, arguments, attributes, cause and traceback; and it is another object."""
    original = caught(error)
    original.extra = [1]  # type: ignore[attr-defined]
    if hasattr(original, "add_note"):
        original.add_note("a hint")
    twin = personal(original)
    assert twin is not original
    assert (type(twin), str(twin), repr(twin), twin.args) == (
        type(original),
        str(original),
        repr(original),
        original.args,
    )
    assert vars(twin) == vars(original)
    assert (twin.__cause__, twin.__traceback__) == (original.__cause__, original.__traceback__)
    for field in ("errno", "filename", "row", "name", "path", "lineno", "object", "reason", "exceptions"):
        assert getattr(twin, field, None) == getattr(original, field, None)
    before = original.__traceback__
    with pytest.raises(type(original)):
        raise twin
    assert original.__traceback__ is before
    if hasattr(original, "add_note"):
        twin.add_note("mine")
        assert original.__notes__ == ["a hint"]


def test_an_error_that_cannot_be_made_again() -> None:
    """Is the cause of one that can."""
    original = caught(Picky("x"))
    twin = personal(original)
    assert isinstance(twin, BatchFailed)
    assert twin.__cause__ is original
    assert str(twin) == "Picky: x"

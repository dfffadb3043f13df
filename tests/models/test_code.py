"""Digests of user code: whatever answers differently has another one, whatever is the same has the same."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import operator
import subprocess
import sys
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.models.code import digests, exact_digest, value_digest
from gristmill.parallel.kept import code_digest
from gristmill.plan.specs import Call

Circle = namedtuple("Circle", "x y")
Square = namedtuple("Square", "x y")


class Constant:
    """A callable object, and a method."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self, x: Any) -> int:
        return self.value

    def method(self, x: Any) -> int:
        """The same."""
        return self.value


class Slotted:
    """One without a `__dict__`."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self, x: Any) -> int:
        return self.value


def base(x: Any) -> Any:
    """What is decorated."""
    return x


def other(x: Any) -> Any:
    """Another function of the same file."""
    return [x]


def times(n: int) -> Callable[[Any], Any]:
    """A decorator with an argument."""

    def decorated(function: Any) -> Any:
        @functools.wraps(function)
        def call(x: Any) -> Any:
            return function(x) * n

        return call

    return decorated


REGISTRY: dict[str, Any] = {}


def recursive(x: int) -> int:
    """Refers to itself through a table and a partial."""
    return REGISTRY["it"](x - 1) + REGISTRY["part"](x - 1) if x else 0


REGISTRY.update(it=recursive, part=functools.partial(recursive))


@pytest.mark.parametrize(
    "callables",
    [
        (base, other, times(2)(base), times(3)(base), times(2)(times(3)(base)), times(2)(other)),
        (lambda x: x + 1, lambda x: x + 2),
        (functools.partial(base), functools.partial(other), functools.partial(base, x=1), functools.partial(base, 1)),
        (Constant(1), Constant(2), Constant(1).method, Constant(2).method, functools.partial(Constant(1))),
        (functools.partial(Constant(1).method), functools.partial(Constant(2).method)),
        (Slotted(1), Slotted(2)),
        (operator.itemgetter(0), operator.itemgetter(1), operator.attrgetter("a")),
        (operator.methodcaller("upper"), operator.methodcaller("lower")),
        ("a-b".split, "c-d".split, "a-b".join),
        ({1: 2}.get, {1: 3}.get),
        (recursive, base),
    ],
    ids=lambda callables: getattr(callables[0], "__qualname__", type(callables[0]).__name__),
)
def test_callables_that_differ(callables: tuple[Any, ...]) -> None:
    """Two of them never share a digest, and each has its own again."""
    found = [code_digest(c) for c in callables]
    assert len(set(found)) == len(callables)
    assert found == [code_digest(c) for c in callables]


def test_inputs_that_differ() -> None:
    """A function can tell types of containers, and the order of keys; so can a checkpoint."""
    values = [
        [1, 2], (1, 2), Circle(1, 2), Square(1, 2), {1, 2}, frozenset([1, 2]), {1: 2, 3: 4}, {3: 4, 1: 2},
        OrderedDict({1: 2, 3: 4}), Counter({1: 2, 3: 4}), 1, True, 1.0, "1", b"1", None, [[1], 2], [(1,), 2],
    ]  # fmt: skip
    found = [exact_digest(v) for v in values]
    for (one, first), (two, second) in itertools.combinations(zip(values, found, strict=True), 2):
        assert first != second, f"{one!r} and {two!r}"


def test_arguments_of_a_job_may_come_from_a_file() -> None:
    """A list there is a tuple in Python, and the order of keys means nothing."""
    assert value_digest({"a": (1, 2), "b": 3}) == value_digest({"b": 3, "a": [1, 2]})


SCRIPT = """
import enum, json, threading
from collections import defaultdict
from gristmill.models.code import callable_digests, exact_digest
def f(x, among=frozenset("abcdef")):
    return x in {"some", "more", "words"} or x in among
class Size(str, enum.Enum):
    SMALL = "s"
class Plain(int):
    pass
class Config:
    def __init__(self, words):
        self.words, self.size = set(words), Size.SMALL
class Scorer:
    def __init__(self):
        self.config, self.me, self.lines = Config(["a", "b", "c"]), self, defaultdict(list)
    def score(self, x):
        return x
HANDLERS = {}
def handler(n):
    def handle(x):
        return HANDLERS[n](x)
    return handle
HANDLERS.update({n: handler(n) for n in range(30)})
holding = Scorer()
holding.lock = threading.Lock()
calls = [f, Scorer().score, Scorer().__init__, handler(3), holding.score]
values = [{"x": {"some", "more", "words"}}, Size.SMALL, Plain(3), Config("abc"), {Size.SMALL: [Plain(1)]}]
print(json.dumps([[callable_digests(c) for c in calls], [exact_digest(v) for v in values]]))
"""


def test_the_same_in_every_process(tmp_path: Path) -> None:
    """Of a script's own classes, of sets, of what refers to itself, of thirty functions that know each other."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    runs = [subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout for _ in range(2)]
    assert json.loads(runs[0]) == json.loads(runs[1])
    assert len(set(json.loads(runs[0])[1])) == 5


def test_by_name_or_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a job file names and what Python gives is one thing, also decorated, also a class's method."""
    (tmp_path / "digested.py").write_text(
        "import functools\n"
        "def deco(f):\n    @functools.wraps(f)\n    def call(*a):\n        return f(*a)\n    return call\n"
        "@deco\ndef score(batch): return batch\n"
        "class Scorer:\n    @classmethod\n    def score(cls, batch): return batch\n"
    )
    assert list(digests(Call("digested:score"))) == ["callable score"], "it is not there yet"
    monkeypatch.syspath_prepend(str(tmp_path))
    digested = importlib.import_module("digested")
    assert digests(Call("digested:score")) == digests(Call(digested.score))
    assert digests(Call("digested:Scorer")) == digests(Call(digested.Scorer))
    assert digests(Call("digested:Scorer.score")) == digests(Call(digested.Scorer.score))

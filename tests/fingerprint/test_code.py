"""Digests of user code: whatever answers differently has another one, whatever is the same has the same."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import operator
import os
import re
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gristmill.errors import BadModel
from gristmill.fingerprint.code import callable_digests, digests, exact_digest, not_compared, value_digest
from gristmill.fingerprint.digests import Fingerprint, differences
from gristmill.job.specs import Call
from gristmill.parallel.checkpoint import checkpoint, code_digest

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


class Linear(NamedTuple):
    """A record with a method."""

    k: int

    def score(self, x: int) -> int:
        """Of first degree."""
        return x * self.k


class Quadratic(NamedTuple):
    """Another one with the same fields."""

    k: int

    def score(self, x: int) -> int:
        """Of second degree."""
        return x * x * self.k


class Words(list[str]):
    """A list that does more."""

    def __contains__(self, word: object) -> bool:
        return super().__contains__(str(word).lower())


class Lines(list[str]):
    """A list that does something else."""

    def __contains__(self, word: object) -> bool:
        return False


class Loud(str):
    """A text that does more."""

    def __eq__(self, other: object) -> bool:
        return super().__eq__(str(other).lower())

    __hash__ = str.__hash__


class Rules(type(Path())):  # type: ignore[misc]
    """A path with a method."""

    def factor(self) -> int:
        """Of one."""
        return 1


class Laws(type(Path())):  # type: ignore[misc]
    """A path with another one."""

    def factor(self) -> int:
        """Of two."""
        return 2


class Tree(dict[str, Any]):
    """Makes what is not there."""

    def __getattr__(self, name: str) -> Any:
        return self.setdefault(name, Tree())


class Dotted(dict[str, Any]):
    """Raises what an attribute does not."""

    __getattr__ = dict.__getitem__


class Weight(float):
    """A number with more in it."""

    __slots__ = ("__unit", "bias")
    bias: float

    def __new__(cls, value: float, bias: float, unit: str = "kg") -> Weight:
        self = super().__new__(cls, value)
        self.bias, self.__unit = bias, unit
        return self

    def __reduce__(self) -> Any:
        return Weight, (float(self), self.bias, self.__unit)


@pytest.mark.parametrize(
    "arguments",
    [
        (Weight(2, 0), Weight(2, 1), Weight(2, 0, "g"), 2.0),
        (Rules("v1"), Laws("v1"), Rules("v2"), Path("v1")),
        (Tree(a=1), Tree(a=2), Dotted(a=1), {"a": 1}),
        (Linear(1), Quadratic(1), (1,)),
        ([Linear(1)], [Quadratic(1)]),
        ({"a": Linear(1)}, {"a": Quadratic(1)}),
        (Words(["a"]), Lines(["a"]), ["a"]),
        (Loud("a"), "a"),
        (defaultdict(int, a=1), defaultdict(float, a=1), {"a": 1}),
        (Counter("a"), {"a": 1}),
    ],
    ids=repr,
)
def test_arguments_that_do_other_things_differ(arguments: tuple[Any, ...]) -> None:
    """By their classes, even if they hold the same; as in `callables`, one alone is always the same."""
    found = [tuple(digests(Call(base, {"w": value})).items()) for value in arguments]
    for value in arguments:
        assert not isinstance(value, Tree) or list(value) == ["a"]  # looking at it has not changed it
    assert len(set(found)) == len(found) and found == [
        tuple(digests(Call(base, {"w": value})).items()) for value in arguments
    ]


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
def test_callables_that_differ(callables: tuple[Any, ...], tmp_path: Path) -> None:
    """Two of them never share a digest, and each has its own again."""
    with contextlib.closing(checkpoint(str(tmp_path))) as kept:
        found = [code_digest(c, kept)[0] for c in callables]
        assert len(set(found)) == len(callables)
        assert found == [code_digest(c, kept)[0] for c in callables]


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
    """A list there is a tuple in Python. The order of arguments means nothing, that of a mapping among them does, and
    so does that of the columns which a function takes.
    """
    assert value_digest({"a": (1, 2), "b": 3}) == value_digest({"a": [1, 2], "b": 3})
    rules = {"red": ["colour"], "apple": ["fruit"]}
    other = dict(reversed(rules.items()))
    same = [digests(Call(base, given)) for given in ({"x": 1, "y": rules}, {"y": rules, "x": 1})]
    assert same[0] == same[1]
    for pair in ((rules, other), ({"by": [rules]}, {"by": [other]})):
        assert digests(Call(base, {"y": pair[0]})) != digests(Call(base, {"y": pair[1]}))
    assert digests(Call(base, takes={"a": "any", "b": "any"})) != digests(Call(base, takes={"b": "any", "a": "any"}))


SCRIPT = """
import enum, json, threading
from collections import defaultdict
from gristmill.fingerprint.code import callable_digests, exact_digest
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


QUANTISED = """
import sys, torch, warnings
from gristmill.fingerprint.code import exact_digest
warnings.simplefilter("ignore")
torch.manual_seed(int(sys.argv[1]))
plain = torch.nn.Sequential(torch.nn.Linear(2, 3))
weights = torch.quantize_per_channel(plain[0].weight.detach(), torch.ones(3) / 9, torch.zeros(3), 0, torch.qint8)
whole = torch.ao.quantization.quantize_dynamic(plain, {torch.nn.Linear}, dtype=torch.qint8)
print(exact_digest(weights), exact_digest(whole))
"""


@pytest.mark.long
def test_quantised_weights_count_by_their_content() -> None:
    """The same in every process, other weights are others."""
    pytest.importorskip("torch")
    commands = [[sys.executable, "-c", QUANTISED, seed] for seed in ("1", "1", "2")]
    first, again, other = (
        subprocess.run(c, capture_output=True, text=True, timeout=100, check=True).stdout.split() for c in commands
    )
    assert first == again and all(a != b for a, b in zip(first, other, strict=True))


def test_a_default_that_remembers_is_no_other_code() -> None:
    """What a function puts into its own default is other after each call: named, and its other defaults count."""

    def kept(x: Any, by: Any = (1, [2]), _seen: dict[int, int] = {}) -> Any:  # noqa: B006
        return _seen.setdefault(x, x)

    before = callable_digests(kept)
    kept(3)
    assert callable_digests(kept) == before and any("_seen (the code itself" in name for name in before)
    kept.__defaults__ = ((1, [3]), kept.__defaults__[1])  # type: ignore[index]
    assert callable_digests(kept) != before
    table = {"a": 1}

    def given(x: Any, lookup: dict[str, int] = table) -> Any:
        return lookup.setdefault(x, -1)

    before = callable_digests(given)
    table["a"] = 2
    assert callable_digests(given) != before, "what it was given counts"


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


VALUES = """
import datetime, decimal, enum, functools, hashlib, json, re, sys, types
from dataclasses import dataclass
from pathlib import Path
import numpy as np, pandas as pd, polars as pl, pyarrow as pa, torch
from gristmill.fingerprint.code import callable_digests, exact_digest
n = int(sys.argv[1])
@dataclass
class Config:
    weight: int
class Slotted:
    __slots__ = ("n", "me")
    def __init__(self, n): self.n, self.me = n, self
class Base: pass
Base.n = n
class Below(Base):
    size = n
    def score(self, x): return self.n
class Kind(enum.Enum):
    ONE = n
class Held:
    def __init__(self, n): self.inside = {"list": [Config(n)]}
    def method(self): return self.inside
values = {
    "array": np.array([0] * 5000 + [n]),
    "strided": np.arange(10 * n).reshape(-1, 2)[:, 1],
    "objects": np.array([n, "a"], object),
    "scalar": np.float32(n),
    "dtype": np.dtype([("a", f"i{4 * n}")]),
    "Arrow": pa.array([0, None, n])[1:],
    "chunks": pa.chunked_array([[n], [2]]),
    "table": pa.table({"a": ["x", str(n)]}),
    "frame": pd.DataFrame({"a": ["x", None, n], "b": [1.0, 2.0, n]}),
    "series": pd.Series([n], name="s"),
    "polars": pl.DataFrame({"a": [1, n]}),
    "tensor": torch.zeros(100, dtype=torch.bfloat16) + n,
    "linear": torch.full((2, 2), n)[:, 1:],
    "dataclass": Config(n),
    "namespace": types.SimpleNamespace(a=[n]),
    "slots": Slotted(n),
    "bases": Below,
    "object of it": Below(),
    "enum": Kind.ONE,
    "held": Held(n),
    "method": Held(n).method,
    "partial": functools.partial(print, Config(n)),
    "regex": re.compile("a" * n),
    "path": Path(str(n)),
    "decimal": decimal.Decimal(n),
    "date": datetime.datetime(2000, 1, n),
    "zone": datetime.timezone(datetime.timedelta(hours=n)),
    "objects in a set": {Path(str(i)) for i in range(20 * n)},
    "set": {f"{i}" for i in range(20 * n)},
    "deep": {"a": [({n},)]},
    "made": type("Made", (), {"__call__": lambda self, x: [n]}),
    "view": types.MappingProxyType({"n": n}),
}
def holding(value):
    def score(x):
        return value
    return score
print(json.dumps({k: [exact_digest(v), callable_digests(holding(v))] for k, v in values.items()}))
"""


@pytest.mark.long
def test_values_count_by_their_content(tmp_path: Path) -> None:
    """Of every kind, given or held in a closure: another content is another digest, the same is the same everywhere."""
    (tmp_path / "script.py").write_text(VALUES)

    def found(argument: str, seed: str) -> Any:
        command, environment = (
            [sys.executable, str(tmp_path / "script.py"), argument],
            {**os.environ, "PYTHONHASHSEED": seed},
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
        return json.loads(done.stdout)

    once, again, other = found("1", "1"), found("1", "2"), found("2", "1")
    assert once == again
    for kind, (value, held) in once.items():
        assert value != other[kind][0], kind
        assert held != other[kind][1], kind
        assert not any("not compared" in name for name in held), kind


def test_what_has_no_content_is_named(tmp_path: Path) -> None:
    """A lock or an open file is no part of a digest, and is said to be none; so is what the function changes itself."""
    lock, calls = threading.Lock(), [0]
    with open(tmp_path / "open", "w") as file:

        def score(x: Any) -> Any:
            with lock:
                calls[0] += 1
                return {"held": [x, file]}

        found = callable_digests(score)
        calls[0] += 1
        assert callable_digests(score) == found
        named = sorted(name.partition("score.")[2] for name in found if name.startswith("not compared: "))
    assert named == ["calls (the code itself changes it)", "file (_io.TextIOWrapper)", "lock (_thread.lock)"]
    said = not_compared(found)
    assert said is not None
    assert all(name in said for name in named)
    assert not_compared(callable_digests(base)) is None
    with pytest.raises(BadModel, match="cannot be sent to workers"):
        exact_digest([lock])


def test_files_that_constants_name_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a module's constant names may be a log as well as a model: it is not compared, and a note names it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = {"weights": "w.bin", "own": "own.log"}
    for name in paths.values():
        Path(name).touch()
    Path("naming_files.py").write_text(
        "from pathlib import Path\n"
        f"PATHS = {paths!r}\nNONE, WORD, HERE = 'no.bin', 'constants', Path('.')\n"
        "class Model:\n    file = Path('w.bin')\n"
        "    def __call__(self, x):\n        return {'y': [open(p) for p in (*PATHS.values(), NONE, WORD, HERE)]}\n"
    )
    model = importlib.import_module("naming_files").Model
    said = not_compared(callable_digests(model, apart={str(tmp_path / "own.log")}))
    assert said is not None
    assert said.startswith("the contents of files that constants name are not compared: "), said
    assert re.findall(r"(\S+) \((\S+)\)", said) == [
        ("Model.__call__.PATHS", "w.bin"),
        ("Model.file", "w.bin"),
    ], said


def test_what_code_sets_of_its_class_is_its_state() -> None:
    """A class that counts what is built of it is the same job when some were built, whatever is only named by then."""

    class Counted:
        made = 0

        def __init__(self) -> None:
            type(self).made += 1
            self.__class__.last = self.made  # type: ignore[attr-defined]

    def fingerprint() -> Fingerprint:
        return Fingerprint({}, {}, {f"model: {name}": digest for name, digest in callable_digests(Counted).items()}, {})

    before = fingerprint()
    Counted()
    now = fingerprint()
    assert "model: not compared: " in str(set(now.code) - set(before.code))
    assert differences(before.stored(), now, {}) == []


@pytest.mark.parametrize("place", ["helper()\n", "if __name__ == '__main__':\n    helper()\n"])
def test_a_script_that_does_more_is_told_where_that_does_not_count(tmp_path: Path, place: str) -> None:
    """A call on the top level may change what a model does; one below the guard is the script's alone."""
    text = "import gristmill as gm\n\ndef helper():\n    return 1\n\ndef score(batch):\n    return batch\n"
    found = []
    for number, more in enumerate(("", place)):
        (tmp_path / str(number)).mkdir()
        code = module_digests(tmp_path / str(number), text + more, "")
        found.append(Fingerprint({}, {}, code, {}))
    lines = [line for line in differences(found[0].stored(), found[1], {}) if "imported" in line]
    guard = "what only a script is to do goes below if __name__ == '__main__':, which does not count"
    told = f"code: module scoring: what it does when it is imported changed ({guard})"
    assert lines == ([told] if place.startswith("helper") else [])


SCORING = """
import helpers
from helpers import SIZE as LARGE
import gristmill as gm
LABELS = {"a": 1}
_calls = []
def score(batch):
    '''What it does.'''
    _calls.append(1)
    return clean(batch["x"]) * helpers.FACTOR * LARGE
def clean(x):
    return x
def unused(x):
    return x
class Other:
    pass
job = gm.Job(source="in", model=gm.model(score), sink="out")
print(job)
"""
HELPERS = "def deco(c):\n    return c\nFACTOR = 2\nSIZE = 3\nSPARE = 4\ndef spare():\n    return SPARE\n"


def module_digests(folder: Path, scoring: str, helpers: str) -> dict[str, str]:
    """Of `score`, by name, in a process of its own."""
    (folder / "scoring.py").write_text(scoring)
    (folder / "helpers.py").write_text(helpers)
    text = "import json; from gristmill.fingerprint.code import digests; from gristmill.job.specs import Call\n"
    text += "found = digests(Call('scoring:score')); print(json.dumps(found))"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=60,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ("\ndef clean", "\n\n# of it\n\ndef clean", []),
        ("return x\ndef unused(x):", "return x\ndef unused(x, y=1):", []),
        ("class Other:\n    pass", "class Other:\n    n = 1", []),
        ("sink=\"out\"", "sink=\"elsewhere\"", []),
        ("SPARE = 4", "SPARE = 5", []),
        ("LABELS = {\"a\": 1}", "LABELS = {\"a\": 2}", []),
        ("return x\ndef unused", "return x + 1\ndef unused", ["module scoring: function clean"]),
        ("FACTOR = 2", "FACTOR = 2.0", ["module helpers: FACTOR", "score.helpers.FACTOR"]),
        ("SIZE = 3", "SIZE = 4", ["module helpers: SIZE", "score.LARGE"]),
        (
            "def spare",
            "import os\nos.environ['A'] = 'b'\ndef spare",
            ["module helpers: import os", "module helpers: statements"],
        ),
        (
            "class Other",
            "@helpers.deco\nclass Other",
            ["module helpers: function deco", "module scoring: class Other", "module scoring: statements"],
        ),
        ("return clean(", "return globals()['clean'](", None),
    ],
)  # fmt: skip
def test_what_is_reached_counts(tmp_path: Path, before: str, after: str, names: list[str] | None) -> None:
    """Comments, job options and names that the function does not reach make no difference; the rest is named."""
    texts = (SCORING, HELPERS)
    edited = [text.replace(before, after) for text in texts]
    assert edited != list(texts)
    found = []
    for number, pair in enumerate((texts, edited)):
        (tmp_path / str(number)).mkdir()
        found.append(module_digests(tmp_path / str(number), *pair))
    differing = sorted(n for n in {*found[0], *found[1]} if found[0].get(n) != found[1].get(n))
    if names is None:
        assert "module scoring: function score" in differing
        assert "module scoring: function unused" in found[1]
    else:
        assert differing == names
    assert "not compared: score._calls (the code itself changes it)" in found[0]


@functools.singledispatch
def by_kind(x: Any) -> int:
    """Functions by the type of what they are given."""
    return 0


@by_kind.register
def _(x: float) -> int:
    return 3


def test_what_installed_code_remembers_is_not_noted() -> None:
    """The caches of functools are nothing that a user could give otherwise."""
    assert not_compared(callable_digests(lambda b: by_kind(b["x"]))) is None


FAST = """
def helper(x):
    return x * 3

class Base:
    def factor(self):
        return 3
"""
BRANCHES = """
import functools, os
import fast, slow

B = os.environ["MODE"] == "b"
try:
    if B:
        raise ImportError
    from fast import Base, helper
    import fast as impl
except ImportError:
    from slow import Base, helper
    import slow as impl
chosen = slow.helper if B else fast.helper

def imported(b):
    return helper(b["x"])

def by_module(b):
    return impl.helper(b["x"])

def aliased(b):
    return chosen(b["x"])

part = functools.partial(impl.helper)
memo = functools.lru_cache(impl.helper)

def logged(function):
    def inner(x):
        return function(x)
    return inner

decorated = logged(impl.helper)

def in_part(b):
    return part(b["x"])

def in_memo(b):
    return memo(b["x"])

def in_closure(b):
    return decorated(b["x"])

class Derived(Base):
    def __call__(self, b):
        return self.factor()

class Chooses(slow.Base if B else fast.Base):
    def __call__(self, b):
        return self.factor()

class Branches:
    if B:
        def __call__(self, b):
            return 3
    else:
        def __call__(self, b):
            return 2

def two(self, b):
    return 2

def three(self, b):
    return 3

class Named:
    __call__ = three if B else two

if B:
    def defined(b):
        return 2
else:
    def defined(b):
        return 3

def wrapping(f):
    import functools
    @functools.wraps(f)
    def wrapper(b):
        return f(b)
    return wrapper

if B:
    @wrapping
    def wrapped(b):
        return 2
else:
    @wrapping
    def wrapped(b):
        return 3

def same(b):
    return b
"""
OPEN = [
    "imported",
    "by_module",
    "aliased",
    "in_part",
    "in_memo",
    "in_closure",
    "Derived",
    "Chooses",
    "Branches",
    "Named",
    "defined",
    "wrapped",
    "same",
]
TELL = """
import json, branches
from gristmill.fingerprint.code import callable_digests
print(json.dumps({n: callable_digests(getattr(branches, n)) for n in %r}))
"""


def test_of_several_definitions_the_one_in_use_counts(tmp_path: Path) -> None:
    """By a condition, an import that fails, an alias or a base: what the source leaves open, the process tells."""
    for name, text in {"fast": FAST, "slow": FAST.replace("3", "2"), "branches": BRANCHES}.items():
        (tmp_path / f"{name}.py").write_text(text)
    found = {}
    for mode in ("a", "b", "a again"):
        done = subprocess.run([sys.executable, "-c", TELL % OPEN], cwd=tmp_path, env={**os.environ, "MODE": mode[0]},
                              capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
        found[mode] = json.loads(done.stdout)
    assert found["a"] == found["a again"]
    assert [name for name in OPEN if found["a"][name] == found["b"][name]] == ["same"]


def test_a_script_that_defines_a_name_again_has_another_job(tmp_path: Path) -> None:
    """A function, a class and the function of a parallel map's checkpoint: never the answers of the one before."""
    (tmp_path / "again.py").write_text("""
import gristmill as gm
rows = [{"x": 1.0}, {"x": 2.0}]
def score(b): return {"v": b["x"] * 2}
class Scorer:
    def __call__(self, b): return {"v": b["x"] * 2}
def run(model, out):
    try:
        return gm.Job(rows, model, out, workers=0).run().read().to_table()["v"].to_pylist()
    except gm.PlanChanged as e:
        return str(e).splitlines()[1].strip()
def double(x): return x * 2
if __name__ == "__main__":
    print(run(score, "one"), run(Scorer, "two"), gm.map(double, [1, 2], checkpoint="kept"))
def score(b): return {"v": b["x"] * 3}
class Scorer:
    def __call__(self, b): return {"v": b["x"] * 3}
def double(x): return x * 3
if __name__ == "__main__":
    print(run(score, "one"), run(Scorer, "two"), gm.map(double, [1, 2], checkpoint="kept"), sep="; ")
""")
    done = subprocess.run([sys.executable, "again.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[2.0, 4.0] [2.0, 4.0] [2, 4]",
        "code: model: again:score changed; code: model: again:Scorer.__call__ changed; [3, 6]",
    ]


def test_a_module_whose_file_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a temporary folder, which code loads by its name: what is compared is the rest."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "soon_gone.py").write_text("FACTOR = 2\n")
    (tmp_path / "by_its_name.py").write_text(
        "import importlib\ndef f(x):\n    return x * importlib.import_module('soon_gone').FACTOR\n"
    )
    importlib.import_module("soon_gone")
    f = importlib.import_module("by_its_name").f
    try:
        assert "module soon_gone: FACTOR" in digests(Call(f))
        (tmp_path / "soon_gone.py").unlink()
        assert "module by_its_name: function f" in digests(Call(f))
    finally:
        del sys.modules["soon_gone"], sys.modules["by_its_name"]


def test_a_module_of_the_name_of_another_one_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that imports a module from one folder, and then another one of its name, as a session of notebooks
    does: the second job is told by what the second module says.
    """
    found = []
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        (folder / "renamed_score.py").write_text(f"def score(batch):\n    return {{'y': batch['x'] * {value}}}\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder))
            found.append(callable_digests(importlib.import_module("renamed_score").score))
            del sys.modules["renamed_score"]
    assert found[0] != found[1]

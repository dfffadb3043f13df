"""What a function refers to counts by what it is, not by what it is called: a case each, of two jobs that answer
otherwise and must not share a digest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# By name: the text of job.py below HEAD, then of other files. `K` is read from a file, that says 1 or 2; so is `@@`.
HEAD = """
import enum, functools, json, os
K = json.load(open(os.path.join(os.path.dirname(__file__), "k.json")))
def made(k):
    def inner(x): return x * k
    return inner
"""
VALUE = "import json, os\nK = json.load(open(os.path.join(os.path.dirname(__file__), 'k.json')))\n"
ONE_OF = "def a(x): return x\ndef b(x): return -x\np, q = (a, b)[K - 1], (b, a)[K - 1]\n"
F = {"part.py": "def f(x): return x * @@\n"}
DIFFERENT: dict[str, tuple[str, dict[str, str]]] = {
    "functions of one name": (
        "from a import f as fa\nfrom b import f as fb\ndef score(x): return fa(x) + fb(x)",
        {"a.py": VALUE + "def f(x): return x * K", "b.py": "K = 7\ndef f(x): return x * K"},
    ),
    "classes of one name": (
        "import a, b\ndef score(x): return x * a.C.k + x * b.C.k",
        {"a.py": VALUE + "class C: k = K", "b.py": "class C: k = 7"},
    ),
    "a function of numpy's over another": (
        "import numpy as np\nT = {'f': np.frompyfunc(made(K), 1, 1)}\ndef score(x): return T['f'](x)",
        {},
    ),
    "a vectorized function": ("import numpy as np\nf = np.vectorize(made(K))\ndef score(x): return f(x)", {}),
    "a polynomial": ("import numpy as np\nf = np.poly1d([K, 2])\ndef score(x): return f(x)", {}),
    "a seeded generator": ("import numpy as np\nR = np.random.default_rng(K)\ndef score(x): return R.random()", {}),
    "which function a key stands for": (
        ONE_OF + "R = {'p': p, 'q': q}\ndef score(x): return R['p'](x) + R['q'](x)",
        {},
    ),
    "which function a member is": (
        ONE_OF + "class P: pass\nR = P()\nR.p, R.q = p, q\ndef score(x): return R.p(x) + R.q(x)",
        {},
    ),
    "which function is in a record handed on": (
        ONE_OF + "import types\nR = types.SimpleNamespace(p=p, q=q)\n"
        "def of(r, x): return r.p(x) + r.q(x)\ndef score(x): return of(R, x)",
        {},
    ),
    "which class a key stands for": (
        "class A: k = 1\nclass B: k = 2\nR = {'p': (A, B)[K - 1], 'q': (B, A)[K - 1]}\n"
        "def score(x): return 3 * R['q']().k + R['p']().k",
        {},
    ),
    "a key with a text before it": ("R = {'w_1': K}\ndef score(x): return R.get(f'w_{x}', 1)", {}),
    "a key that texts make": ("R = {'w_1': K}\ndef score(x): return R.get('w_' + x, 1)", {}),
    "a key that a method makes": ("R = {'a': K}\ndef score(x): return R.get('A'.lower(), 1)", {}),
    "a key, and all of them": ("R = {'a': 1, 'b': K}\ndef score(x): return R['a'] * sum(R.values())", {}),
    "a key that comes": ("R = {'a': 1, **({} if K == 1 else {'b': 7})}\ndef score(x): return R.get('b', 1)", {}),
    "a key, and its dict by another name": (
        "R = {'a': 1, 'b': K}\ndef score(x):\n    other = R\n    return R['a'] * other['b']",
        {},
    ),
    "a member that a property is made of": (
        "class P:\n    def __init__(self): self._k = K\n    @property\n    def k(self): return self._k\n"
        "R = P()\ndef score(x): return R.k",
        {},
    ),
    "a member of what is enclosed": (
        "import types\ndef mk(r):\n    def inner(x): return r.k * x\n    return inner\n"
        "score = mk(types.SimpleNamespace(k=K))",
        {},
    ),
    "closures of one factory": ("a, b = made(K), made(7)\ndef score(x): return a(x) + b(x)", {}),
    "lambdas of one factory": (
        "mk = lambda k: lambda x: x * k\na, b = mk(K), mk(7)\nscore = lambda x: a(x) + b(x)",
        {},
    ),
    "properties of one factory": (
        "def prop(k): return property(lambda self: k)\n"
        "class score:\n    a, b = prop(K), prop(7)\n    def __call__(self, x): return x * self.a + self.b",
        {},
    ),
    "methods of one factory": (
        "def mk(k):\n    def method(self, x): return x * k\n    return method\n"
        "class score:\n    a, b = mk(K), mk(7)\n    def __call__(self, x): return self.a(x) + self.b(x)",
        {},
    ),
    "a static partial": (
        "def mul(x, by): return x * by\n"
        "class score:\n    scale = staticmethod(functools.partial(mul, by=K))\n"
        "    def __call__(self, x): return self.scale(x)",
        {},
    ),
    "a partial of a class": (
        "def mul(x, by): return x * by\n"
        "class score:\n    scale = functools.partial(mul, by=K)\n    def __call__(self, x): return self.scale(x)",
        {},
    ),
    "a partial method": (
        "class score:\n    def mul(self, x, k): return x * k\n    scaled = functools.partialmethod(mul, k=K)\n"
        "    def __call__(self, x): return self.scaled(x)",
        {},
    ),
    "an object with .func": (
        "class Stage:\n    def __init__(self, func, k): self.func, self.k = func, k\n"
        "    def __call__(self, x): return self.func(x) * self.k\n"
        "class score:\n    stage = Stage(abs, K)\n    def __call__(self, x): return self.stage(x)",
        {},
    ),
    "a decorator that is a class": (
        "class Scaled:\n    def __init__(self, f, k): self.f, self.k = f, k; functools.update_wrapper(self, f)\n"
        "    def __call__(self, x): return self.f(x) * self.k\n"
        "def plain(x): return x\nhelper = Scaled(plain, K)\ndef score(x): return helper(x)",
        {},
    ),
    "a partial that looks like its function": (
        "def plain(x, k): return x * k\nhelper = functools.update_wrapper(functools.partial(plain, k=K), plain)\n"
        "def score(x): return helper(x)",
        {},
    ),
    "around a cache": (
        "helper = functools.lru_cache(made(K))\ndef score(x): return helper(x)",
        {},
    ),
    "one decorator thrice": (
        "def scaled(k):\n    def deco(f):\n        @functools.wraps(f)\n        def call(x): return f(x) * k\n"
        "        return call\n    return deco\n"
        "@scaled(K)\n@scaled(3)\ndef h(x): return x\n@scaled(5)\ndef g(x): return x\ndef score(x): return h(x) + g(x)",
        {},
    ),
    "single dispatch": (
        "@functools.singledispatch\ndef h(x): return 0\nh.register(int, made(K))\ndef score(x): return h(x)",
        {},
    ),
    "an attribute of the function": ("def score(x): return x * score.k\nscore.k = K", {}),
    "an attribute of a helper": ("def h(x): return x * h.k\nh.k = K\ndef score(x): return h(x)", {}),
    "imported in a closure": (
        "def make():\n    def score(x):\n        import part\n        return part.f(x)\n    return score\n"
        "score = make()",
        F,
    ),
    "a name imported in a closure": (
        "def make():\n    def score(x):\n        from part import f\n        return f(x)\n    return score\n"
        "score = make()",
        F,
    ),
    "imported in a class of a function": (
        "def make():\n    class Scorer:\n        def __init__(self):\n            import part\n"
        "            self.f = part.f\n"
        "        def __call__(self, x): return self.f(x)\n    return Scorer\nscore = make()",
        F,
    ),
    "imported in a lambda": ("score = lambda x: __import__('part').f(x)", F),
    "imported from a folder": (
        "def score(x):\n    from mylib import part\n    return part.f(x)",
        {"mylib/part.py": F["part.py"]},
    ),
    "imported from a folder in a closure": (
        "def make():\n    def score(x):\n        from mylib import part\n        return part.f(x)\n    return score\n"
        "score = make()",
        {"mylib/part.py": F["part.py"]},
    ),
    "a value of a module of a folder": (
        "import mylib.part\ndef score(x): return x * mylib.part.W",
        {"mylib/part.py": VALUE.replace("'k.json'", "'../k.json'") + "W = K"},
    ),
    "imported by a made name": (
        "import importlib\ndef score(x): return importlib.import_module(f'mylib.{x}').f(x)",
        {"mylib/part.py": F["part.py"]},
    ),
    "imported by a name that begins with a constant": (
        "from importlib import import_module\nBASE = 'mylib'\ndef score(x): return import_module(BASE + '.' + x).f(x)",
        {"mylib/part.py": F["part.py"]},
    ),
    "imported by a made name in a closure": (
        "score = lambda x: __import__('importlib').import_module('mylib.{}'.format(x)).f(x)",
        {"mylib/part.py": F["part.py"]},
    ),
    "imported by a relative name": (
        "import pkg\ndef score(x): return pkg.f(x)",
        {
            "pkg/__init__.py": "import importlib\ndef f(x): return importlib.import_module('.' + x, __package__).f(x)",
            "pkg/part.py": F["part.py"],
        },
    ),
    "imported by any name": ("import importlib\ndef score(x): return importlib.import_module(x).f(x)", F),
    "imported by any name in a closure": (
        "import importlib\ndef make():\n    def score(x): return importlib.import_module(x).f(x)\n    return score\n"
        "score = make()",
        F,
    ),
    "imported by any name in another package": (
        "import tool\ndef score(x): return tool.load('part').f(x)",
        {"tool/__init__.py": "import importlib\ndef load(name): return importlib.import_module(name)", **F},
    ),
    "plugins of a package": (
        "import pkg\ndef score(x): return pkg.REGISTRY['part'](x)",
        {
            "pkg/__init__.py": "import importlib, pkgutil\nREGISTRY = {}\n"
            "def register(f):\n    REGISTRY['part'] = f\n    return f\n"
            "for m in pkgutil.iter_modules(__path__): importlib.import_module(f'{__name__}.{m.name}')",
            "pkg/part.py": "from pkg import register\n@register\ndef f(x): return x * @@\n",
        },
    ),
    "a plugin that has registered itself": (
        "import registry\nexec('import part')\ndef score(x): return registry.score(x)",
        {
            "registry.py": "REGISTRY = {}\ndef register(f):\n    REGISTRY['part'] = f\n    return f\n"
            "def score(x): return REGISTRY['part'](x)",
            "part.py": "from registry import register\n@register\ndef f(x): return x * @@\n",
        },
    ),
    "a module in a dict": (
        "import part\ndef make():\n    D = {'h': part}\n    def score(x): return D['h'].f(x)\n    return score\n"
        "score = make()",
        F,
    ),
    "a value of a module in a dict": (
        "import part\ndef make():\n    D = {'h': part}\n    def score(x): return D['h'].W * x\n    return score\n"
        "score = make()",
        {"part.py": VALUE + "W = K\n"},
    ),
    "a module as argument": ("import part\ndef score(x, h): return h.f(x)\nargs = {'h': part}", F),
    "a method of an enum": (
        "def make():\n    class M(enum.Enum):\n        A = 1\n        def f(self, x): return x * @@\n"
        "    m = M.A\n    return lambda x: m.f(x)\nscore = make()",
        {},
    ),
    "what an enum's method refers to": (
        "class M(enum.Enum):\n    A = 1\n    def f(self, x): return x * K\nm = M.A\ndef score(x): return m.f(x)",
        {},
    ),
    "a metaclass": (
        "class Meta(type):\n    def f(cls, x): return x * K\nclass I(metaclass=Meta): pass\n"
        "def score(x): return I.f(x)",
        {},
    ),
    "a class in a class": (
        "class score:\n    class Conf: k = K\n    def __call__(self, x): return x * self.Conf.k",
        {},
    ),
    "a descriptor": (
        "class D:\n    def __init__(self, k): self.k = k\n    def __get__(self, o, t=None): return self.k\n"
        "class score:\n    k = D(K)\n    def __call__(self, x): return x * self.k",
        {},
    ),
    "a module of a package": (
        "import pkg\ndef score(x): return x * pkg.conf.W",
        {"pkg/__init__.py": "from . import conf", "pkg/conf.py": VALUE.replace("'k.json'", "'../k.json'") + "W = K"},
    ),
    "an import in each branch": (
        "def score(x):\n    if x > 5:\n        from part import f\n    else:\n        from other import f\n"
        "    return f(x)",
        {"other.py": "def f(x): return x", **F},
    ),
    "an import in each method": (
        "class score:\n    def __call__(self, x): return self.a(x) + self.b(x)\n"
        "    def a(self, x):\n        import part as rules\n        return rules.f(x)\n"
        "    def b(self, x):\n        import other as rules\n        return rules.f(x)",
        {"other.py": "def f(x): return x", **F},
    ),
    "an import that is tried first": (
        "def score(x):\n    import lazily\n    return lazily.f(x)",
        {"lazily.py": "try:\n    from part import f\nexcept ImportError:\n    from other import f\n", **F},
    ),
    "a name that a package has from its part": (
        "def score(x):\n    from pack import f\n    return f(x)",
        {"pack/__init__.py": "from .part import f", "pack/part.py": F["part.py"]},
    ),
    "a package under another name": (
        "def score(x):\n    import pack.part\n    p = pack\n    return p.part.f(x)",
        {"pack/__init__.py": "", "pack/part.py": F["part.py"]},
    ),
}
# Text of job.py that is the same in every process: V is what score refers to.
SAME = {
    "the environment": "V = os.environ",
    "functions of numpy's": "import numpy as np\nfrom numpy import log1p as f\n"
    "T = np.dtype('f4'), np.random.RandomState(1)\n"
    "V = {'log': np.log1p, 'of': np.vectorize(made(2)), 'p': np.poly1d([1, 2]), 'f': f, 'n': np.float32, 't': T}",
    "one that cannot be looked into": "class W:\n    @property\n    def __dict__(self): raise RuntimeError\n"
    "V = 1\nW = W()",
    "what a process has one of": "import ctypes, random\nimport numpy as np\nfrom scipy.stats import norm\n"
    "L = ctypes.CDLL(None)\nL.labs.restype = ctypes.c_long\n"
    "V = norm, norm(0, 1), L, L.labs, np.random.mtrand._rand, random._inst",
    "stop words": "from sklearn.feature_extraction.text import TfidfVectorizer\n"
    "V = TfidfVectorizer(stop_words=list('abcdefgh')).fit(['hello there', 'other words'])",
    "sets of sets": "V = {'a': {frozenset('abc'), frozenset('de')}, 'b': set('abcdefgh')}",
    "a class with sets": "class V:\n    names = set('abcdefgh')\n    def f(self): return self.names",
    "functions in a set": "V = {made(2), made(3), len}",
    "a cache that was used": "@functools.lru_cache\ndef V(x): return x\nV(1)",
    "single dispatch that was used": "@functools.singledispatch\ndef V(x): return 0\nV.register(int, made(2))\nV(1)",
    "an attribute that a global is called like": "import time\nV = 1\nstart = time.strftime('%f') + str(os.getpid())\n"
    "def job(m): return m.start()\nV = job",
    "an enum": "class V(enum.Enum):\n    A = frozenset('abcdefgh')\n    def f(self): return self.B",
    "cycles": "class N: pass\na, b, c = N(), N(), N()\na.o, b.o, c.o = {b, c}, {a, c}, {a, b}\na.n, b.n, c.n = 'abc'\n"
    "V = {a, b, c}",
}
# The same, of attributes that are other in every process and are named as such, by what they are called.
PASSING_WITHIN = {
    "score.V.run": "import uuid\nfrom dataclasses import dataclass, field\n@dataclass\nclass C:\n    k: float = 0.5\n"
    "    run: str = field(default_factory=lambda: uuid.uuid4().hex)\nV = C()",
    "score.V.began": "import time\nclass C:\n"
    "    def __init__(self): self.at, self.k = 0, 1; self.began = time.time()\nV = C()",
    "V.began": "import time\nclass V:\n    began = time.time()\n    k = 1",
}
# The same, of such values.
PASSING = {
    "the time": "import time\nV = time.time()",
    "a name": "from uuid import uuid4\nV = f'run-{uuid4().hex[:20]}'",
    "a number": "V = os.getpid()",
    "a folder": "import tempfile\nfrom pathlib import Path\nV = Path(tempfile.mkdtemp(dir=os.path.dirname(__file__)))",
    "now": "import datetime\nV = datetime.datetime.now().isoformat()",
    "a stamp": "from datetime import datetime\nV = datetime.now().strftime('%Y%m%d_%H%M%S')",
    "a stamp in a name": "from datetime import datetime\nV = f'run-{datetime.now():%Y-%m-%dT%H:%M:%S}'",
    "a log": "import time\nV = os.path.join('logs', time.strftime('%H%M%S'))",
    "a deadline": "import time\nV = time.time() + 3600",
    "milliseconds": "import time\nV = time.perf_counter() * 1000",
    "no seed": "import numpy as np\nV = np.random.default_rng()",
}
LOOK = """
import importlib, json, os, sys
from gristmill.fingerprint import code
from gristmill.job.specs import Call
found = {}
for folder in sorted(os.listdir(sys.argv[1])):
    before = set(sys.modules)
    sys.path.insert(0, os.path.join(sys.argv[1], folder))
    job = importlib.import_module("job")
    found[folder] = code.digests(Call(job.score, getattr(job, "args", {})))
    sys.path.pop(0)
    for name in {n for n in set(sys.modules) - before if sys.argv[1] in str(getattr(sys.modules[n], "__path__", ""))
                 or (getattr(sys.modules[n], "__file__", None) or "").startswith(sys.argv[1])}:
        del sys.modules[name]
    importlib.invalidate_caches()
    from gristmill.fingerprint import modules
    for kept in (modules._found_file, modules._folders, modules._parsed):
        kept.cache_clear()
print(json.dumps(found))
"""


def looked_at(cases: dict[str, tuple[str, dict[str, str]]], folder: Path, k: str, seed: str) -> dict[str, Any]:
    """Digests by case, in a process of their own."""
    for name, (text, others) in cases.items():
        for file, content in {"job.py": HEAD + text + "\n", **others, "k.json": "@@"}.items():
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content.replace("@@", k))
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1", f"OTHER_{seed}": seed}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(folder)],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def different(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Digests of all cases: twice with 1, then with 2."""
    folder = tmp_path_factory.mktemp("different")
    return [looked_at(DIFFERENT, folder, k, seed) for k, seed in (("1", "1"), ("1", "2"), ("2", "1"))]


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_is_referred_to_counts(different: list[dict[str, Any]], case: str) -> None:
    """Another value is another digest, and the same is the same in another process."""
    once, again, other = (found[case] for found in different)
    # The file's own text and the module's `K` are what they are by name; what is told must be of the object.
    assert once == again
    assert once != other, case


@pytest.mark.long
def test_what_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Whatever the order of sets is and whatever else is in the environment."""
    cases = {name: (f"{text}\ndef score(x): return V", {}) for name, text in SAME.items()}
    once, again = (looked_at(cases, tmp_path, "1", seed) for seed in "12")
    for case, found in once.items():
        assert found == again[case], case


# Values in the order of a set. What is read from a file in another order, and stands in no set, is another value.
SHUFFLED = {
    "a dict": "V = {w: 1.0 for w in {'a', 'b', 'c', 'd'}}",
    "a list": "V = list({'a', 'b', 'c', 'd'})",
    "of a name": "W = {'a', 'b', 'c'} | {'d'}\nV = tuple(W)",
    "of a function": "def made(words):\n    return [w for w in set(words)]\nV = made('abcd')",
    "of another module": "from words import W\nV = dict.fromkeys(W)",
    "of keys": "A = dict.fromkeys('abcdef')\nV = [*(A.keys() & {'a', 'b', 'c', 'd'})]",
    "filled": "V = {}\nfor w in {'a', 'b', 'c', 'd'}:\n    V[w] = 1",
    "a class": "class V:\n    words = list({'a', 'b', 'c', 'd'})",
    "a closure": "def make():\n    words = list({'a', 'b', 'c', 'd'})\n    return lambda x: words\nV = make()",
}
ORDERED = {
    "a file": "S = {'a', 'b'}\nV = [k for k in K if k in S and k in {'a', 'b'}]",
    "sorted": "V = sorted({'a', 'b'}, reverse=K == ['a', 'b'])",
    "a set beside": "def f(k): return len(set(k))\nN = f(K)\nV = {k: N for k in K}",
    "a loader": "for k in {'a', 'b'} - {*K}:\n    raise KeyError(k)\nV = tuple(K)",
    "numbers": "V = [k for n in {0, 1} for k in K[n:n + 1]]",
}


def test_the_order_of_a_set_is_none(tmp_path: Path) -> None:
    """What is made by going through a set is the same in another process, and its order said not to be compared; in
    another order that the source gives it is another, and so is what no set is gone through for.
    """
    words = {"words.py": "W = frozenset(('a', 'b', 'c', 'd'))\n"}
    cases = {case: (f"{text}\ndef score(x): return V", words) for case, text in SHUFFLED.items()}
    found = [looked_at(cases, tmp_path / "set", "1", seed) for seed in "1234"]
    for case, first in found[0].items():
        assert all(first == other[case] for other in found), case
        assert any("the order of" in name for name in first), case
    other = {case: (text.replace("'a', 'b'", "'b', 'a'"), words) for case, (text, _) in cases.items()}
    edited = looked_at(other, tmp_path / "edited", "1", "1")
    assert all(edited[case] != first for case, first in found[0].items() if other[case] != cases[case])
    cases = {case: (f"{text}\ndef score(x): return V", {}) for case, text in ORDERED.items()}
    once, again = (looked_at(cases, tmp_path / str(n), k, "1") for n, k in enumerate(('["a", "b"]', '["b", "a"]')))
    for case, first in once.items():
        assert first != again[case] and not any("not compared" in name for name in first), case


def test_what_passes_with_a_process_is_named(tmp_path: Path) -> None:
    """The time, a process's number: no difference, and said not to be compared, also where another module has it."""
    cases = {name: (f"{text}\ndef score(x): return V", {}) for name, text in PASSING.items()}
    cases["of another module"] = (
        "from conf import V\ndef score(x): return V",
        {"conf.py": "import time\nV = time.time()"},
    )
    once, again = (looked_at(cases, tmp_path, "1", seed) for seed in "12")
    for case, found in once.items():
        assert found == again[case], case
        assert "not compared: score.V (other in every process)" in found, case


def test_what_of_an_object_or_class_passes_with_a_process_is_named(tmp_path: Path) -> None:
    """The time it was made, an identifier: no difference, and said; its other attributes count."""
    cases = {name: (f"{text}\ndef score(x): return V", {}) for name, text in PASSING_WITHIN.items()}
    counts = {
        name: (text.replace("k = 1", "k = K").replace("0, 1", "0, K") + "\nV.k = K", {})
        for name, (text, _) in cases.items()
    }
    once, again = (looked_at(cases, tmp_path / "same", "1", seed) for seed in "12")
    first, other = (looked_at(counts, tmp_path / "other", k, "1") for k in "12")
    for case, found in once.items():
        assert found == again[case] and first[case] != other[case], case
        assert f"not compared: {case} (other in every process)" in found, case


def test_what_only_looks_passing_counts(tmp_path: Path) -> None:
    """A seed, a year, a name that is bound again: their values shape answers."""
    texts = {
        "a seed": "import random\nV = random.Random(K)",
        "a year": "import datetime\nV = datetime.datetime.now().year + K",
        "bound again": "import time\nV = time.time()\nV = K",
    }
    cases = {name: (f"{text}\ndef score(x): return V", {}) for name, text in texts.items()}
    once, other = (looked_at(cases, tmp_path, k, "1") for k in "12")
    for case, found in once.items():
        assert found != other[case], case
        assert not any("not compared" in name for name in found), case


def test_modules_that_no_name_tells_are_named(tmp_path: Path) -> None:
    """Where the source does not say how a module's name begins, it is said that one from elsewhere is not seen.
    What is looked at does not run.
    """
    cases = {
        "told": (
            "import importlib\ndef score(x): return importlib.import_module(f'mylib.{x}').f(x)",
            {"mylib/a.py": ""},
        ),
        "not told": (
            "import importlib\ndef score(x): return importlib.import_module(x).f(x)",
            {"a.py": "", "job_of_another/__init__.py": "raise SystemExit('it ran')", "job_of_another/part.py": ""},
        ),
        "by a path": ("from runpy import run_path\ndef score(x): return run_path(x)['f'](x)", {"a.py": ""}),
    }
    found = looked_at(cases, tmp_path, "1", "1")
    said = {case: [name for name in digests if "not compared" in name] for case, digests in found.items()}
    elsewhere = ["not compared: modules imported by names made at run time in job from elsewhere"]
    assert said == {"told": [], "not told": elsewhere, "by a path": elsewhere}

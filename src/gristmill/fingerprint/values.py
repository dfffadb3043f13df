"""Values as texts that distinguish them by content, the same in every process. Values without such a text are named."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import datetime
import decimal
import enum
import fractions
import gc
import hashlib
import io
import os
import pathlib
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

from gristmill.fingerprint import lazyfiles
from gristmill.fingerprint.randomness import Drawn
from gristmill.job.secret import Secret
from gristmill.job.secretnames import names_secret
from gristmill.job.uris import redact
from gristmill.values import dataclass

_SCALARS = (bool, int, float, str, bytes)
_FLAT = {type(None), *_SCALARS}  # exactly these types: their repr distinguishes them, and is written in C
_DEEPEST = 1000  # no value that is compared is nested as deep; one may create new parts without end
_PLAIN = (
    *_SCALARS,
    complex,
    decimal.Decimal,
    fractions.Fraction,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    enum.Enum,
    pathlib.PurePath,
)
_SMALL = 10_000  # values up to which one is looked at again
_LAZY = ("pyarrow", "polars")
_LONG = 200  # characters; a longer text is known by its sha256


@dataclass(frozen=True)
class Held:
    """A value that a name of a module, or of a class or function there (`a.b`), stands for. `plain`: see `is_plain`;
    `shown` is a plain value as text. `ordered`: whether order counts in the digest.
    """

    module: str
    name: str
    digest: str
    plain: bool
    shown: str
    ordered: bool

    @staticmethod
    def of(module: str, name: str, digest: str, value: Any, ordered: bool) -> Held:
        """The value that a name stands for now; it is not shown if the name says that it is a secret."""
        plain = is_plain(value)
        secret = not plain or names_secret(name)
        return Held(module, name, digest, plain, "another value" if secret else _cut(redact(repr(value))), ordered)


@dataclass
class Walk:
    """One walk over values and all that they refer to: what was seen, what is being looked at, what cannot be compared.

    `code` gives the digests by name of what `is_code`; `named` gives a class's name; `local` says whether a module is
    the user's; `drawn` gives the attributes of a class's objects that differ between processes by its source. `held`
    are the values seen that every process builds itself as it imports their modules; `modules` are the digests, by
    name, of statements that code behind values rests on. `files` are digests, by path, of files that code behind the
    current value names, `looked` is what was found there, and what is in `apart` does not count as part of a folder
    (see `files.named_files`).
    """

    is_code: Callable[[Any], bool]
    code: Callable[[Any], Mapping[str, str]]
    named: Callable[[type], str]
    local: Callable[[str], bool]
    drawn: Callable[[type], Mapping[str, Collection[Drawn]]]
    ordered: bool = True  # whether the order in lists and mappings counts
    imported: bool = (
        False  # whether the current value is one that every process builds by itself, as it imports a module
    )
    seen: dict[tuple[int, bool, bool, bool], tuple[Any, str]] = field(default_factory=dict)  # keeps values and ids
    within: list[int] = field(default_factory=list)
    missed: dict[str, None] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    looked: dict[str, Any] = field(default_factory=dict)
    apart: Collection[str] = ()
    label: str = ""

    def text(self, value: Any, *, exact: bool) -> str:
        """The text of a value; `exact` distinguishes lists from tuples, and sets, which a job file cannot."""
        kind = type(value)
        if kind in _FLAT:
            return _short(f"{kind.__name__}:{value!r}")
        key = (id(value), exact, self.ordered, self.imported)
        if key in self.seen:
            return self.seen[key][1]
        if key[0] in self.within:
            return f"cycle {len(self.within) - self.within.index(key[0])}"
        self.within.append(key[0])
        try:
            found = _short(_text(value, self, exact))
        finally:
            self.within.pop()
        self.seen[key] = (value, found)
        return found

    def miss(self, value: Any) -> str:
        """Notes, by name, a value that has no content to compare as far as can be seen from here."""
        name = self.named(type(value))
        self.missed[f"{self.label or 'value'} ({name})"] = None
        return f"not compared {name}"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


def _short(text: str) -> str:
    return text if len(text) <= _LONG else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _text(value: Any, walk: Walk, exact: bool) -> str:
    kind = type(value)
    if isinstance(value, enum.Enum):
        own = walk.text(kind, exact=True) if walk.local(kind.__module__) else walk.named(kind)
        return f"{own}.{value.name}={walk.text(value.value, exact=True)}"
    if isinstance(value, _SCALARS):
        base = next(b for b in _SCALARS if isinstance(value, b))
        return _subclass(value, base.__repr__(value), walk)
    if isinstance(value, (dict, list, tuple, set, frozenset, types.MappingProxyType)):
        text = _container(value, walk, exact)
        plain = kind in (dict, types.MappingProxyType) or (kind in (list, tuple, set, frozenset) and not exact)
        return text if plain else _subclass(value, text, walk)
    if walk.is_code(value):
        return walk.named(kind) + walk.text(sorted(walk.code(value).items()), exact=False)
    if isinstance(value, os._Environ):
        return "environment"  # it differs between shells, and between machines
    if isinstance(value, pathlib.PurePath):
        text = f"{kind.__name__}:{value}"
        return text if kind.__module__.partition(".")[0] == "pathlib" else _subclass(value, text, walk)
    # Compiled, or counted: the wrapper is installed code. Asking a value of the user's class would run its code.
    if not walk.local(kind.__module__) and hasattr(value, "__wrapped__"):
        return walk.named(kind) + walk.text(value.__wrapped__, exact=True)
    if isinstance(value, types.CellType):
        return "cell" + walk.text(value.cell_contents, exact=True)
    if (shared := _shared(value)) is not None:
        return f"{walk.named(kind)} {shared}"
    buffers = _buffers(value, walk)
    if buffers is not None:
        return f"{walk.named(kind)}:{buffers}"
    unread = lazyfiles.times(value) if _package(value) in _LAZY else ""
    return _object(value, walk) + unread if unread is not None else walk.miss(value)


def _shared(value: Any) -> str | None:
    """What a process has only one of, and whose state or address differs between processes: by its name, a library of
    functions also by its file's content. None for all else.
    """
    numpy, plain = sys.modules.get("numpy.random.mtrand"), sys.modules.get("random")
    if (numpy is not None and value is numpy._rand) or (plain is not None and value is plain._inst):
        return "of the process"  # scipy's distributions draw with it
    ctypes = sys.modules.get("ctypes")
    if ctypes is not None and isinstance(value, ctypes.CDLL):
        name = str(value._name)
        return f"{name} {_hash(pathlib.Path(name).read_bytes())}" if os.path.isfile(name) else name
    if ctypes is not None and isinstance(value, ctypes._CFuncPtr) and isinstance(getattr(value, "__name__", 0), str):
        return str(value.__name__)
    return None


def _container(value: Any, walk: Walk, exact: bool) -> str:
    # An order that does not count is that of the value itself, not of its parts.
    ordered, walk.ordered = walk.ordered, True
    if isinstance(value, Mapping):
        if {*map(type, value), *map(type, value.values())} <= _FLAT:
            return repr(dict(value) if ordered else sorted(map(repr, value.items())))
        pairs = [f"{walk.text(k, exact=exact)}={walk.text(v, exact=exact)}" for k, v in value.items()]
        return "{" + ",".join(pairs if ordered else sorted(pairs)) + "}"
    if isinstance(value, (list, tuple)):
        if set(map(type, value)) <= _FLAT:
            return repr(list(value) if ordered else sorted(map(repr, value)))
        items = [walk.text(v, exact=exact) for v in value]
        return "[" + ",".join(items if ordered else sorted(items)) + "]"
    if set(map(type, value)) <= _FLAT:
        return "(" + ",".join(sorted(map(repr, value))) + ")"
    texts, seen = [], dict(walk.seen)
    for item in value:  # in an order that differs between processes: no item may depend on the one before
        walk.seen = dict(seen)
        texts.append(walk.text(item, exact=exact))
    walk.seen = seen
    return "(" + ",".join(sorted(texts)) + ")"


def _subclass(value: Any, text: str, walk: Walk) -> str:
    """A value of a built-in type, or of a subclass, which may hold more than that."""
    more = {**_slots(value), **_own(value)}
    if isinstance(value, collections.defaultdict):
        more["default"] = vars(collections.defaultdict)["default_factory"].__get__(value)
    more = {name: item for name, item in more.items() if item is not None}
    kind = type(value)
    own = walk.text(kind, exact=True) if walk.local(kind.__module__) else walk.named(kind)
    return own + text + (walk.text(more, exact=True) if more else "")


def _own(value: Any) -> dict[str, Any]:
    """A value's attributes, without asking its class, whose `__getattr__` may do anything."""
    try:
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
        return found
    except AttributeError:
        return {}


def _slots(value: Any) -> dict[str, Any]:
    """What a value holds in `__slots__` of classes that are not Python's; of a Secret nothing, whose text stands for
    it.
    """
    found: dict[str, Any] = {}
    for cls in () if isinstance(value, Secret) else type(value).__mro__:
        if cls.__module__.partition(".")[0] in sys.stdlib_module_names:
            continue
        for name, slot in vars(cls).items():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # it was not given a value
                    found.setdefault(name, slot.__get__(value))
    return found


def is_plain(value: Any) -> bool:
    """Whether a value is one number, text, time or the like, or a tuple of these: nothing can change it in place."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, value))
    generic = getattr(sys.modules.get("numpy"), "generic", bool)
    return value is None or isinstance(value, (*_PLAIN, generic))


def is_small(value: Any, local: Callable[[str], bool]) -> bool:
    """Whether a value is cheap to look at again: it is plain, or holds no more than 10,000 plain values in containers
    and objects of the user's own.
    """
    waiting, seen = [value], dict[int, Any]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, (dict, list, tuple, set, frozenset)):
            waiting += [*value.keys(), *value.values()] if isinstance(value, dict) else value
        elif local(type(value).__module__) and hasattr(value, "__dict__"):
            waiting += vars(value).values()
        elif not is_plain(value):
            return False
        if len(seen) + len(waiting) > _SMALL:
            return False
    return True


def texts_in(value: Any) -> Iterator[str | bytes | os.PathLike[str]]:
    """The texts and paths anywhere in a value: in containers, as keys of mappings, in what pickle would rebuild an
    object from, and in the files that a dataset or lazy frame reads. Tables and tensors are data, and not searched.
    """
    waiting: list[tuple[Any, int]] = [(value, 0)]
    seen: dict[int, Any] = {}
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, (str, bytes, os.PathLike)):
            yield value
        elif type(value) not in _FLAT and id(value) not in seen and depth < _DEEPEST:
            seen[id(value)] = value  # so that its id is not reused
            with contextlib.suppress(Exception):  # objects of other libraries may raise anything when examined
                waiting += [(part, depth + 1) for part in _parts(value)]


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, (type, types.FunctionType, types.ModuleType)):
        return ()
    if isinstance(value, (Mapping, list, tuple, set, frozenset, collections.deque)):
        held = [*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value)
        return [*held, *_slots(value).values(), *_own(value).values()]
    package = _package(value)
    if package in _LAZY:
        return lazyfiles.parts(value)
    if package == "numpy" and hasattr(value, "dtype"):
        return value.tolist() if value.dtype.kind in "OUS" and value.shape else ()
    return () if package in ("torch", "pandas") else (_state(value),)


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


# ---------------------------------------------------------------- arrays and tables


def _buffers(value: Any, walk: Walk) -> str | None:
    """Arrays, tensors and tables by their bytes; None for other values, and for those without plain bytes."""
    package = _package(value)
    if package == "numpy":
        return _numpy(value, walk)
    if package == "pyarrow":
        return _arrow(value)
    if package == "polars" and hasattr(value, "to_arrow"):
        return str(getattr(value, "name", "")) + (_arrow(value.to_arrow()) or "")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.layout == torch.strided:
        plain = value.detach().cpu().contiguous()
        if plain.is_quantized:
            each = "channel" in str(plain.qscheme())
            axis = plain.q_per_channel_axis() if each else ""
            scales = plain.q_per_channel_scales() if each else plain.q_scale()
            zeros = plain.q_per_channel_zero_points() if each else plain.q_zero_point()
            parts = [str(plain.qscheme()), axis, scales, zeros, plain.int_repr()]
            return f"{plain.dtype} {walk.text(parts, exact=True)}"
        return f"{plain.dtype} {tuple(plain.shape)} {_hash(plain.reshape(-1).view(torch.uint8).numpy())}"
    return None


def _numpy(value: Any, walk: Walk) -> str | None:
    import numpy as np

    if isinstance(value, np.dtype):
        return str(value.descr if value.names else value)
    if isinstance(value, np.ufunc):
        made_of = [part for part in gc.get_referents(value) if callable(part)]  # the function of a frompyfunc
        return f"{value.__name__} {walk.text(made_of, exact=True)}" if made_of else str(value.__name__)
    if not isinstance(value, np.generic) and type(value) not in (np.ndarray, np.memmap):
        return None
    if value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {walk.text(value.tolist(), exact=True)}"
    kind = value.dtype.descr if value.dtype.names else value.dtype.str
    return f"{kind} {value.shape} {_hash(np.ascontiguousarray(value).reshape(-1).view(np.uint8))}"


def _arrow(value: Any) -> str | None:
    import pyarrow as pa
    import xxhash

    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        value = pa.table({"": value})
    if isinstance(value, pa.RecordBatch):
        value = pa.Table.from_batches([value])
    if not isinstance(value, pa.Table):
        return None
    digest = xxhash.xxh3_128()

    class Hashed(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            digest.update(data)
            return len(data)

    with pa.ipc.new_stream(Hashed(), value.schema) as stream:
        stream.write_table(value.combine_chunks())
    return digest.hexdigest()


def _hash(data: Any) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


# ---------------------------------------------------------------- objects


def _object(value: Any, walk: Walk) -> str:
    """Its class, and what pickle would rebuild it from; for the user's own classes the code too."""
    kind = type(value)
    state = walk.miss if isinstance(value, (io.IOBase, types.GeneratorType)) else _state
    found = state(value)
    if found is None:
        return walk.miss(value)
    local = walk.local(kind.__module__)
    state_of = found if isinstance(found, dict) else found[0][2] if isinstance(found, list) else None
    if walk.imported and local and isinstance(state_of, dict):
        drawn = walk.drawn(kind)
        other = {name for name in drawn.keys() & state_of.keys() if any(d.fits(state_of[name]) for d in drawn[name])}
        walk.missed.update((f"{walk.label}.{name} (other in every process)", None) for name in sorted(other))
        kept = {name: item for name, item in state_of.items() if name not in other}
        found = kept if isinstance(found, dict) else [(*found[0][:2], kept), *found[1:]]
    own = walk.text(kind, exact=True) if local else walk.named(kind)
    return own + (found if isinstance(found, str) else walk.text(found, exact=True))


def _state(value: Any) -> Any:
    """What distinguishes an object from others of its class, as pickle would save it; None if nothing tells."""
    try:
        made = copyreg.dispatch_table.get(type(value))
        reduced = value.__reduce_ex__(4) if made is None else made(value)
    except Exception:  # it cannot be pickled
        return getattr(value, "__dict__", None)
    if isinstance(reduced, str):
        return reduced
    made, arguments, *rest = reduced
    state = rest[0] if rest else None
    if isinstance(state, dict):  # an address by which an object identifies its own part differs between processes
        parts = {id(part): name for name, part in state.items()}
        state = {k: f"address of {parts[v]}" if type(v) is int and v in parts else v for k, v in state.items()}
    return [(made, arguments, state), *(list(part or ()) for part in rest[1:3])]

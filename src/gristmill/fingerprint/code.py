"""Digests of user code: they tell whether a function, what it refers to, or a module of the user's has changed."""

from __future__ import annotations

import argparse
import ast
import copyreg
import dis
import functools
import hashlib
import inspect
import itertools
import os
import pickle
import sys
import textwrap
import types
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from pathlib import Path
from typing import Any

from gristmill.errors import BadModel
from gristmill.fingerprint.assignments import goes_through_set, is_shuffled
from gristmill.fingerprint.digests import FILE, NOT_COMPARED, PACKAGE, VALUE, file_path
from gristmill.fingerprint.edits import must_be_as_written
from gristmill.fingerprint.modelfiles import BY_TIMES, Looked, files_told, named_files
from gristmill.fingerprint.modules import (
    ALL,
    BY_NAME,
    IMPORTING,
    add_module,
    add_version,
    around,
    changed_names,
    drawn_as,
    drawn_in,
    imported_by,
    is_doubtful,
    is_local_module,
    is_users,
    local_file,
    modules_named,
    named,
    package_digest,
    package_of,
    read,
)
from gristmill.fingerprint.randomness import Drawn
from gristmill.fingerprint.values import Held, Walk, is_plain, is_small
from gristmill.job.secret import UNSEALED, Secret, secrets_in
from gristmill.job.specs import Call
from gristmill.process.pickling import by_value
from gristmill.values import dataclass

_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)

_current: ContextVar[Walk | None] = ContextVar("current", default=None)


def digests(
    call: Call, held: list[Held] | None = None, looked: dict[str, Looked] | None = None,
    apart: Collection[str] = (),
) -> dict[str, str]:  # fmt: skip
    """Digests by name: the callable, statements of the user's modules that it rests on, arguments, closure, globals.

    Files that arguments name count by their content; values of the environment are stored as they are (to be sealed).
    Versions of the installed distributions that the code imports are included. A callable named by text is imported,
    and is then the same as one that was passed directly. What has no content to compare is only named. Values that
    workers will have by their own imports, and that must be the same there, go to `held`. What is found at the named
    paths goes to `looked`; folders are searched without what is in `apart` (see `files.named_files`).
    """
    with _looking(looked, apart) as walk:
        found: dict[str, str] = {}
        target = call.target
        if isinstance(target, str):
            module, _, name = target.partition(":")
            target = _imported(target)
            if target is None:
                add_module(module, name.partition(".")[0], found)
        else:
            name = _qualified(target)
        if target is not None:
            _Look(walk, found).callable(target)
        found[f"callable {name}"] = f"given {call.batch_format}"
        for key, value in call.args.items():
            label = f"argument {key} of {name}"
            found[label] = _argument_digest(label, value, walk)
            found.update(_files(label, value, walk))
            found.update({f"{VALUE}{s} ({label})": Secret(UNSEALED, s.reveal()) for s in secrets_in(value)})
        if call.takes is not None:
            found[f"columns taken by {name}"] = value_digest(dict(call.takes))
        if held is not None:
            held += walk.held
        return _with_missed({**found, **walk.modules}, walk)


def digests_of_code(
    parts: Iterable[Any], held: list[Held], looked: dict[str, Looked], apart: Collection[str]
) -> dict[str, str]:
    """As `digests`, for functions and classes that a model's files name."""
    with _looking(looked, apart) as walk:
        found: dict[str, str] = {}
        look = _Look(walk, found)
        for part in parts:
            look.callable(part)
        held += walk.held
        return _with_missed({**found, **walk.modules}, walk)


def code_in(value: Any) -> list[Any]:
    """The functions and classes, except Python's own, found in an object as pickle would save it, or, where pickle
    cannot, in its attributes; its data is not examined. Raises BadModel for an object that cannot be searched.
    """
    parts = _Parts()
    try:
        parts.dump(value)
    except Exception as e:
        raise BadModel(f"{type(value).__name__}: its contents cannot be determined ({type(e).__name__}: {e})") from e
    return [c for c in parts.found.values() if (c.__module__ or "").partition(".")[0] not in sys.stdlib_module_names]


class _Parts(pickle.Pickler):
    def __init__(self) -> None:
        self.found: dict[int, Any] = {}
        super().__init__(self, protocol=5, buffer_callback=lambda _: False)

    def write(self, data: Any) -> int:
        """Discards what pickle saves."""
        return len(data)

    def reducer_override(self, value: Any) -> Any:
        """Functions and classes are collected, even those that pickle could not find again; a lock or a connection,
        which it cannot save, has no code of its own.
        """
        named = isinstance(value, (type, types.FunctionType))
        kind = value if named else type(value)
        self.found[id(kind)] = kind
        if named or isinstance(value, types.ModuleType):
            return NotImplemented if value is str else (str, ())
        try:
            made = copyreg.dispatch_table.get(kind)
            reduced = value.__reduce_ex__(5) if made is None else made(value)
        except Exception:
            return str, (), dict(getattr(value, "__dict__", {}))
        return (str, ()) if isinstance(reduced, str) else reduced


def not_compared(code: dict[str, str]) -> str | None:
    """The warning about values whose changes no digest detects, given the digests of a job's code; None for none."""
    said = []
    names = sorted({name.partition(NOT_COMPARED)[2] for name in code if NOT_COMPARED in name})
    paths = [name[len(_CONSTANT) :] for name in names if name.startswith(_CONSTANT)]
    if paths:
        said.append(
            f"the contents of files that constants name are not compared: {', '.join(paths)}; pass such a path as an "
            "argument"
        )
    if values := [name for name in names if not name.startswith(_CONSTANT)]:
        said.append(
            f"changes of these values are not detected: {', '.join(values)}; pass what shapes the answers as an "
            "argument of a class that each worker builds: gm.model(Class, name=value)"
        )
    files = {name.partition(FILE)[2]: digest for name, digest in code.items() if FILE in name}
    unseen = sorted(f"{name}: {digest}" for name, digest in files.items() if digest.startswith(NOT_COMPARED))
    if unseen:
        said.append(
            f"changes in these folders are not detected: {', '.join(unseen)}; pass what shapes the answers as files, "
            "or as a folder of its own"
        )
    timed = sorted(name for name, digest in files.items() if digest.startswith(BY_TIMES))
    if timed:
        said.append(f"compared by name, size and time only, as they are larger than 64 GiB: {', '.join(timed)}")
    return "; ".join(said) or None


def _files(label: str, value: Any, walk: Walk) -> dict[str, str]:
    """Digests of the files named by the value looked at last, and by the code behind it."""
    named = {**walk.files, **dict(named_files(value, walk.looked, walk.apart))}
    walk.files.clear()
    return {f"{FILE}{path} ({label})": digest for path, digest in named.items()}


def _imported(text: str) -> Any:
    from gristmill.process.targets import import_target

    try:
        return import_target(text)
    except BadModel:  # reported by whoever needs it here
        return None


def callable_digests(
    target: Any, looked: dict[str, Looked] | None = None, held: list[Held] | None = None, apart: Collection[str] = ()
) -> dict[str, str]:
    """As `digests`, for any callable without arguments of its own: a function, class, partial, method, or object."""
    found: dict[str, str] = {}
    outermost = _current.get() is None
    with _looking(looked, apart) as walk:
        _Look(walk, found).callable(target)
        if held is not None:
            held += walk.held
        if outermost:
            return _with_missed(found, walk)
        walk.modules.update((name, digest) for name, digest in found.items() if name.startswith("module "))
        paths = {name: path for name in found if (path := file_path(name, found)) is not None}
        walk.files.update({path: found.pop(name) for name, path in paths.items()})
        return found


@contextmanager
def _looking(looked: dict[str, Looked] | None = None, apart: Collection[str] = ()) -> Iterator[Walk]:
    """The walk over values that is under way, else a new one with `looked` and `apart`."""
    walk = _current.get()
    if walk is not None:
        yield walk
        return
    looked = {} if looked is None else looked
    walk = Walk(is_code, callable_digests, _class_name, _local_module, _drawn, looked=looked, apart=apart)
    token = _current.set(walk)
    try:
        yield walk
    finally:
        _current.reset(token)


def _with_missed(found: dict[str, str], walk: Walk) -> dict[str, str]:
    return {**found, **{f"{NOT_COMPARED}{name}": "" for name in walk.missed}}


# ---------------------------------------------------------------- values


def value_digest(value: Any) -> str:
    """A digest of a value by its content, the same in every process. Lists and tuples count as the same, because a job
    file has only lists. Raises BadModel for a value that could not be sent to workers.
    """
    return _digest(value, exact=False)


def exact_digest(value: Any, *, ordered: bool = True, imported: bool = False) -> str:
    """As `value_digest`, but types of containers are told apart, as a function could. Unless `ordered`, the order in
    lists and mappings does not count. If `imported` (each process builds the value as it imports a module), attributes
    that differ between processes, by the source of their class, are left out.
    """
    return _digest(value, exact=True, ordered=ordered, imported=imported)


def _digest(value: Any, *, exact: bool, ordered: bool = True, imported: bool = False) -> str:
    outermost = _current.get() is None
    with _looking() as walk:
        before = walk.ordered, walk.imported
        walk.ordered, walk.imported = ordered, imported
        text = _text(value, walk, exact)
        walk.ordered, walk.imported = before
        if outermost and walk.missed and not imported:
            text = _pickled(value)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _text(value: Any, walk: Walk, exact: bool) -> str:
    try:
        return walk.text(value, exact=exact)
    except RecursionError:
        return walk.miss(value)


def _pickled(value: Any) -> str:
    try:
        return hashlib.sha256(by_value(value)).hexdigest()
    except Exception as e:
        raise BadModel(f"{type(value).__name__} {value!r:.80}: cannot be sent to workers ({e})") from e


def _argument_digest(label: str, value: Any, walk: Walk) -> str:
    known = len(walk.missed)
    walk.label = label
    digest = value_digest(value)
    if len(walk.missed) > known:
        _pickled(value)
    return digest


# ---------------------------------------------------------------- code

# Types that only wrap other values, with the attributes that hold them.
_MADE: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    functools.partialmethod: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    functools._lru_cache_wrapper: ("__wrapped__",),
    types.MethodType: ("__func__", "__self__"),
    types.BuiltinMethodType: ("__qualname__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
}
# Instructions that read and write a module's names; other names in code are those of attributes and methods.
_GLOBAL = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
# The same for names of enclosing functions, without those that only pass them on to an inner function.
_ENCLOSED = {"LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_CALLS = {"PRECALL", "CALL", "CALL_METHOD"}
_RECORDS = (argparse.Namespace, types.SimpleNamespace)
_HELD = ("registry",)  # attributes of installed functions that hold the user's code: of `functools.singledispatch`
_NAMED = (type, types.FunctionType, types.ModuleType)
_CODE = (*_NAMED, *_MADE)
_CONSTANT = "file of "  # before the name of a constant that names a file
_STATE = " (the code itself changes it)"


def _name_of(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return named(value.__name__)
    return f"{named(value.__module__ or '')}:{value.__qualname__}"


def is_code(value: Any) -> bool:
    """Whether a value is compared by `callable_digests`, and not by its content."""
    return isinstance(value, _CODE)


def _class_name(kind: type) -> str:
    return f"{named(kind.__module__)}.{kind.__qualname__}"


def _drawn(kind: type) -> dict[str, list[Drawn]]:
    found: dict[str, list[Drawn]] = {}
    for above in (k for k in kind.__mro__ if _local_module(k.__module__)):
        for attribute, forms in drawn_in(named(above.__module__), above.__qualname__).items():
            found.setdefault(attribute, []).extend(forms)
    return found


def _local_module(module: str) -> bool:
    return module == "__main__" or is_local_module(named(module))


def _qualified(target: Any) -> str:
    """The name that distinguishes it from others of its module."""
    if isinstance(target, functools.partial):
        return _qualified(target.func)
    return getattr(target, "__qualname__", None) or type(target).__qualname__


def _stands(target: Any) -> bool:
    """Whether its module has this object under its name, so that the module's source, or version, covers its code."""
    module = getattr(target, "__module__", None) or ""
    if getattr(getattr(target, "__code__", None), "co_filename", "").startswith("<") or named(module) == "__main__":
        return False
    found: Any = sys.modules.get(module)
    for part in target.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is target or getattr(found, "__func__", None) is target


@dataclass
class _Look:
    """One walk over code and all that it refers to: each object once, by identity and not by name.

    `found` are digests by names that a user can read; of two objects with one name the second is "name (2)".
    """

    walk: Walk
    found: dict[str, str]
    seen: dict[Any, Any] = field(default_factory=dict)  # by id, with the object, so that its id is not reused

    def put(self, label: str, digest: str) -> str:
        """Stores the digest under the label, or the next free one, and returns that label."""
        labels = itertools.chain([label], (f"{label} ({number})" for number in itertools.count(2)))
        free = next(name for name in labels if name not in self.found)
        self.found[free] = digest
        return free

    def callable(self, target: Any) -> None:
        """Adds a callable, by its name, and all that it refers to."""
        module = getattr(target, "__module__", None) or ""
        self.put(f"callable {_qualified(target)}", "" if _local_module(module) else module)
        package = package_of(module)
        if (
            package and f"{PACKAGE}{package}" not in self.found
        ):  # usually the user's own, and its version does not always change with its code
            self.found[f"{PACKAGE}{package}"] = package_digest(package) or ""
            for function in (target, *vars(target).values()) if hasattr(target, "__dict__") else ():
                if isinstance(function, types.FunctionType) and os.path.isfile(function.__code__.co_filename):
                    must_be_as_written(function.__code__, Path(function.__code__.co_filename))
        self.add("object", target, given=True)
        if any(name.startswith(BY_NAME) for name in (*self.walk.missed, *(n[len(NOT_COMPARED) :] for n in self.found))):
            for other in around(named(module))[0] if _local_module(module) else ():  # a helper may be given its modules
                self.source(other, ALL)

    def add(
        self, label: str, value: Any, *, changed: bool = False, owner: str | None = None, given: bool = False,
        home: tuple[str, str] = ("", ""), maker: tuple[str, str] = ("", ""), held: bool = True,
    ) -> None:  # fmt: skip
        """Adds any value that code refers to. State that the code itself changes as it runs differs after each call: it
        is only named. What the source of a class or function `owner` contains need not be added again. For a `given`
        value, such as an argument, the files that it names count too. `home` is the module that has it, and its name
        there; `maker`, if there is no home, the module and the function that made it. One that is not `held` is only a
        part of what the name stands for.
        """
        if is_code(value):
            if id(value) not in self.seen:
                self.seen[id(value)] = value
                self._code(label, value, owner)
        elif changed:
            self.walk.missed[f"{label}{_STATE}"] = None
            if is_plain(value):
                self.hold(home, exact_digest(value), value)
            for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
                if isinstance(part, (type, types.FunctionType)) and _stands(part) and _local_module(part.__module__):
                    self.source(named(part.__module__), part.__qualname__.partition(".")[0])  # it was registered
        else:
            before, self.walk.label = self.walk.label, label
            several = isinstance(value, (dict, list, tuple)) and len(value) > 1
            ordered = not several or not (is_shuffled(*home) if home[0] else goes_through_set(*maker))
            if not ordered and several:
                self.walk.missed[f"the order of {label} (of a set: other in every process; sorted() gives it one)"] = (
                    None
                )
            digest = exact_digest(value, ordered=ordered, imported=bool(home[0]))
            put = self.put(label, digest)
            self.walk.label = before
            if held:
                self.hold(home, digest, value, ordered)
            self.found.update(_files(put, value if given else None, self.walk))
            if home[0] and not given:  # the code itself may write them
                told = files_told(value, self.walk.apart)
                self.walk.missed.update({f"{_CONSTANT}{label} ({name})": None for name in told})
            if callable(value):  # by the code of its class, whose name is clearer in differences
                self.add(label, type(value))

    def hold(self, home: tuple[str, str], digest: str, value: Any, ordered: bool = True) -> None:
        """Notes a value that workers will have by their own import, and what it is here."""
        if home[0] not in ("", "__main__", named("__main__")) and is_small(value, _local_module):
            self.walk.held.append(Held.of(*home, digest, value, ordered))

    def _code(self, label: str, value: Any, owner: str | None) -> None:
        if isinstance(value, types.ModuleType):
            self.module(label, value, {ALL: None})
        elif isinstance(value, types.FunctionType):
            self.function(value, owner)
        elif isinstance(value, type):
            self.kind(value)
        else:
            made = next(kind for kind in _MADE if isinstance(value, kind))
            parts = {name: getattr(value, name) for name in _MADE[made]}
            if type(value) is not made:  # a subclass of the user's
                parts.update({"class": type(value), **getattr(value, "__dict__", {})})
            for name, part in parts.items():
                if part is not None:
                    self.tell_which(f"{label}.{name}", part)
                    self.add(label if is_code(part) else f"{label}.{name}", part, owner=owner, given=True)

    def function(self, function: types.FunctionType, owner: str | None) -> None:
        """Adds its code, and what it refers to; for an installed function the version, and what it was built from or
        wraps.
        """
        name, module = function.__qualname__, named(function.__module__ or "")
        stands, users = _stands(function), is_users(function.__code__)
        if not users:
            add_version(function.__globals__.get("__name__") or "", self.found)
        if stands and not _local_module(module):
            return
        state = _module_state(module)
        if stands:
            self.source(module, name.partition(".")[0])
        elif owner is not None and name.rpartition(".")[0] == owner:
            stands = True
        else:
            self.put(f"{module}:{name}", _source_digest(function) if users else "")
            state = state | _own_state(function)
        written = users and not function.__code__.co_filename.startswith("<")
        if stands and written and is_doubtful(module, name):
            self.put(f"{module}:{name}", _source_digest(function))
        file = local_file(named(function.__globals__.get("__name__") or "")) if users else None
        if file is not None:
            must_be_as_written(function.__code__, file)
        maker = (module, name.partition(".")[0]) if users else ("", "")
        if (inner := vars(function).get("__wrapped__")) is not None:
            self.add(name, inner, owner=name.rpartition(".")[0] if stands else None)
        for label, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                continue  # a cell that is still empty holds nothing to compare
            if users:
                self.tell_which(f"{name}.{label}", value)
            asked = {m for code in _codes(function.__code__) for n, m in _uses(code, _ENCLOSED) if n == label}
            parts = _asked(value, asked) if users and label not in state and not is_code(value) else None
            for member, part in ({"": value} if parts is None else parts).items():
                inner = f"{name}.{label}.{member}".rstrip(".")
                self.add(inner, part, changed=label in state, given=users, maker=maker)
            if not users:  # what installed code remembers is its own
                self.walk.missed.pop(f"{name}.{label}{_STATE}", None)
        defaults: tuple[Any, Any] = (function.__defaults__ or (), function.__kwdefaults__ or {})
        plain = all(is_plain(v) and not isinstance(v, tuple) for v in (*defaults[0], *defaults[1].values()))
        if users and not plain:
            count = function.__code__.co_argcount
            positional = function.__code__.co_varnames[count - len(defaults[0]) : count]
            remembers = _own_changes(function) & {*positional, *defaults[1]}
            self.walk.missed.update((f"{name}.{n}{_STATE}", None) for n in sorted(remembers))
            kept = (None if n in remembers else v for n, v in zip(positional, defaults[0], strict=False))
            defaults = tuple(kept), {n: None if n in remembers else v for n, v in defaults[1].items()}
        self.add(f"{name}.defaults", defaults, given=users, maker=("", "") if plain else maker)
        for label, value in vars(function).items():
            if label != "__wrapped__" and (users or label in _HELD):
                home = (module, f"{name}.{label}") if stands and owner is None else ("", "")
                self.add(f"{name}.{label}", value, changed=f"{function.__name__}.{label}" in state, home=home)
        if users:
            self._globals(function, name, state, stands)

    def _globals(self, function: types.FunctionType, name: str, state: set[str], stands: bool) -> None:
        """Adds the globals that the code names, also in nested code, and modules that it imports as it runs."""
        package = function.__globals__.get("__package__") or ""
        names, known = dict[str, None](), dict[str, set[str | None]]()
        for code in _codes(function.__code__):
            names.update(dict.fromkeys(code.co_names))
            for label, member in _uses(code, _GLOBAL):
                known.setdefault(label, set()).add(member)
            if not stands:  # else the module's source covers it
                for other, inner in imported_by(code, package):
                    self.source(other, inner)
            if not stands and IMPORTING & set(code.co_names):
                texts = [c for c in code.co_consts if isinstance(c, str) and c.replace(".", "_").isidentifier()]
                found = [m for text in texts for m in ([text] if is_local_module(text) else modules_named(text))]
                if not found:
                    found, elsewhere = around(named(function.__module__ or ""))
                    self.walk.missed[elsewhere] = None
                for other in found:
                    self.source(other, ALL)
        for label, members in known.items():
            if label in function.__globals__ and label not in ("__name__", "__file__"):
                of, changed = function.__globals__, label in state
                self.named(f"{name}.{label}", of, label, names, changed=changed, members=members)

    def source(self, module: str, name: str) -> None:
        """Adds what a name of a module rests on, once."""
        if (module, name) not in self.seen:
            self.seen[module, name] = None
            add_module(module, name, self.found)

    def named(
        self, label: str, values: dict[str, Any], name: str, names: Iterable[str], *, changed: bool,
        above: tuple[types.ModuleType, ...] = (), members: Collection[str | None] = (None,),
    ) -> None:  # fmt: skip
        """Adds what a name of a module stands for, `values` being the module's; for a record of options only the
        `members` that the code reads, if it does nothing else with the record (else `members` includes None).
        """
        value = values[name]
        if isinstance(value, _NAMED) and not changed and is_doubtful(named(values.get("__name__") or ""), name):
            self.stands_for(label, value)
        if isinstance(value, types.ModuleType):
            self.module(label, value, names, changed=changed, above=above)
        elif (id(values), name) not in self.seen:
            self.seen[id(values), name] = values
            home = named(values.get("__name__") or "")
            drawn = None if is_code(value) else drawn_as(home, name)
            if drawn is not None and drawn.fits(value):
                self.walk.missed[f"{label} (other in every process)"] = None
                return
            found = (home, name) if _local_module(home) else ("", "")
            parts = None if changed or is_code(value) else _asked(value, members)
            if parts is None:
                self.add(label, value, changed=changed, home=found)
                return
            del self.seen[id(values), name]  # other code may read more
            for member, part in parts.items():
                if (id(values), name, member) not in self.seen:
                    self.seen[id(values), name, member] = values
                    self.add(f"{label}.{member}", part, home=found, held=False)
            if found[0] and is_small(value, _local_module):
                ordered = not is_shuffled(*found)
                self.hold(found, exact_digest(value, ordered=ordered, imported=True), value, ordered)

    def module(
        self, label: str, module: types.ModuleType, names: Iterable[str], *, changed: bool = False,
        above: tuple[types.ModuleType, ...] = (),
    ) -> None:  # fmt: skip
        """Adds a module that code refers to; for the user's own, the values of all names that the code may mean."""
        name = named(module.__name__)
        if module in above or not _local_module(name) or name == "__main__":
            add_version(name, self.found)
            return
        every = not {ALL, "getattr"}.isdisjoint(names)
        self.source(name, ALL if every else "")
        state = _module_state(name)
        for inner in list(vars(module)) if every else names:
            if inner in vars(module) and not inner.startswith("__"):
                self.source(name, inner)
                known = changed or inner in state
                self.named(f"{label}.{inner}", vars(module), inner, names, changed=known, above=(*above, module))

    def kind(self, kind: type) -> None:
        """Adds a class: its attributes, bases and metaclass. A method put there later counts by its code."""
        module, name = named(kind.__module__), kind.__qualname__
        if not _local_module(module):
            add_version(module, self.found)
            return
        stands, state = _stands(kind), _module_state(module)
        if stands:
            self.source(module, name.partition(".")[0])
        else:
            self.put(f"{module}:{name}", _source_digest(kind))
            state = state | _own_state(kind)
        state = {n.partition(".")[2] for n in state}
        drawn = drawn_in(module, name) if stands else {}
        for attribute, value in list(vars(kind).items()):
            if any(d.fits(value) for d in drawn.get(attribute, ())):
                self.walk.missed[f"{name}.{attribute} (other in every process)"] = None
                continue
            hidden = (attribute.startswith("_") and attribute.endswith("_")) or attribute == "_abc_impl"
            if not isinstance(value, _DESCRIPTORS) and (is_code(value) or callable(value) or not hidden):
                own, label = name if stands else None, f"{name}.{attribute}"
                home = (module, label) if stands else ("", "")
                self.add(label, value, changed=attribute in state, owner=own, home=home)
        for above in (*kind.__bases__, type(kind)):
            self.add(name, above)
        if stands and kind.__bases__ != (object,):
            self.stands_for(f"{name}.bases", *kind.__bases__)

    def tell_which(self, label: str, value: Any) -> None:
        """Records which function or class of the user's a holder has: its module's source may define several."""
        if isinstance(value, (type, types.FunctionType)) and _local_module(value.__module__ or ""):
            self.stands_for(label, value)

    def stands_for(self, label: str, *values: Any) -> None:
        """Records, once, which of the objects that the source may mean the label stands for."""
        key = (label, tuple(map(id, values)))
        if key not in self.seen:
            self.seen[key] = values
            self.put(label, ", ".join(map(_name_of, values)))


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """The code and all code nested in it."""
    found = [code]
    for one in found:
        found += [c for c in one.co_consts if isinstance(c, types.CodeType)]
    return found


def _uses(code: types.CodeType, reads: Collection[str]) -> Iterator[tuple[str, str | None]]:
    """The names that code accesses by the instructions in `reads`, each with the one member that is read of it
    (`args.k`, `cfg["k"]`, `cfg.get("k", 1)`), or None where the code does something else with it.
    """
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "PUSH_NULL", "EXTENDED_ARG")]
    for at, step in enumerate(steps):
        if step.opname not in reads:
            continue
        then, last, *call = (*steps[at + 1 : at + 5], step, step, step, step)[:4]
        if then.opname == "LOAD_CONST" and isinstance(then.argval, str):
            asks = last.opname == "BINARY_SUBSCR" or (last.opname == "BINARY_OP" and last.argrepr == "[]")
            yield step.argval, f"[{then.argval}" if asks else None
        elif then.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            called = then.opname == "LOAD_METHOD" or "NULL|self" in then.argrepr  # and not passed to something else
            called = called and any(
                each.opname in _CALLS and (n == 0 or call[0].opname in ("LOAD_CONST", "LOAD_FAST"))
                for n, each in enumerate(call)
            )
            known = called and then.argval == "get" and last.opname == "LOAD_CONST" and isinstance(last.argval, str)
            yield step.argval, f"[{last.argval}" if known else then.argval
        else:
            yield step.argval, None


def _asked(value: Any, members: Collection[str | None]) -> dict[str, Any] | None:
    """The members that code reads of a record of options: a dict, an object that argparse or dataclasses made, or
    another object that only holds them. If the code uses the record in other ways, and it is nothing but its members,
    all of them, so that a difference names one. None where the value counts as a whole, as when a member is code.
    """
    found = _members(value, members)
    return None if found is None or any(is_code(part) or callable(part) for part in found.values()) else found


def _members(value: Any, members: Collection[str | None]) -> dict[str, Any] | None:
    names = [m for m in members if m is not None]
    kind = type(value)
    if not names or len(names) < len(members):
        return dict(vars(value)) if kind in _RECORDS else None
    if kind is dict:
        keys = [n[1:] for n in names if n.startswith("[")]
        return {k: value[k] for k in sorted(keys) if k in value} if len(keys) == len(names) else None
    simple = kind in _RECORDS or _local_module(kind.__module__)
    if not simple or any(hasattr(kind, name) and inspect.isdatadescriptor(getattr(kind, name)) for name in names):
        return None
    if any("__getattribute__" in vars(above) for above in kind.__mro__[:-1]):
        return None
    own = getattr(value, "__dict__", {})
    return {n: own[n] for n in sorted(names)} if all(n in own for n in names) else None


def _module_state(module: str) -> set[str]:
    """Names whose values some function or class of a module changes as it runs."""
    file = local_file(module)
    return read(file, module).changed if file is not None and file.suffix == ".py" else set()


def _own_state(target: Any) -> set[str]:
    """As `_module_state`, for a function or class that its module's source does not cover."""
    try:
        return changed_names(ast.parse(_own_source(target)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return set()  # a lambda within a line, or no source: nothing counts as its state


def _own_changes(function: types.FunctionType) -> set[str]:
    """Parameters of a function whose defaults are empty and which it changes in place."""
    try:
        nodes = ast.walk(ast.parse(_own_source(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return set()  # as above
    inside = next((n for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))), None)
    if inside is None:
        return set()
    body = inside.body if isinstance(inside.body, list) else [inside.body]
    return set[str]().union(*map(changed_names, body)) & _empty_defaults(inside.args)


def _empty_defaults(arguments: ast.arguments) -> set[str]:
    """Parameters whose defaults are empty as written: anything in them was added later."""
    positional = [*arguments.posonlyargs, *arguments.args]
    given = [*zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)]
    given += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
    return {a.arg for a, d in given if ast.unparse(d) in ("{}", "[]", "dict()", "list()", "set()")}


def _own_source(target: Any) -> str:
    return textwrap.dedent(inspect.getsource(getattr(target, "__code__", target)))


def _source_digest(target: Any) -> str:
    """A digest of its code that does not depend on formatting."""
    return hashlib.sha256(_source(target).encode("utf-8", "surrogatepass")).hexdigest()


def _source(target: Any) -> str:
    code = getattr(target, "__code__", None)
    if code is not None and code.co_name == "<lambda>":
        return _code_text(code)  # its source is the whole line
    try:
        return ast.unparse(ast.parse(_own_source(target)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return str(target.__qualname__) + ("" if code is None else _code_text(code))


def _code_text(code: types.CodeType) -> str:
    consts = [_code_text(c) if isinstance(c, types.CodeType) else exact_digest(c) for c in code.co_consts]
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return repr((code.co_code.hex(), consts, code.co_names, arguments, code.co_flags))

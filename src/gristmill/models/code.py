"""Digests of user code: what tells that a function, what it refers to, or a module of the user's has changed."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from gristmill.errors import BadModel
from gristmill.models.files import named_files
from gristmill.models.modules import ALL, add_module, add_version, changed_names, is_local, local_file, named, read
from gristmill.models.values import Walk
from gristmill.plan.fingerprint import FILE
from gristmill.plan.specs import Call

NOT_COMPARED = "not compared: "
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)

_current: ContextVar[Walk | None] = ContextVar("current", default=None)


def digests(call: Call) -> dict[str, str]:
    """Digests by name: the callable, statements of the user's modules that it rests on, arguments, closure, globals.

    Files that arguments name count by what they hold. Versions of the installed distributions that the code imports
    stand beside them. A callable named by text is imported, and is then the same as one that was given. What has no
    content that could be compared is named there.
    """
    with _looking() as walk:
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
            _add_callable(target, found)
        found[f"callable {name}"] = f"given {call.batch_format}"
        for key, value in call.args.items():
            label = f"argument {key} of {name}"
            found[label] = _argument_digest(label, value, walk)
            found.update({f"{FILE}{path} ({label})": digest for path, digest in named_files(value)})
        if call.takes is not None:
            found[f"columns taken by {name}"] = value_digest(dict(call.takes))
        return _with_missed(found, walk)


def not_compared(code: dict[str, str]) -> str | None:
    """What is to be said of values that no digest tells apart, given the digests of a job's code; None for none."""
    names = sorted({name.partition(NOT_COMPARED)[2] for name in code if NOT_COMPARED in name})
    if not names:
        return None
    return (
        f"a change of these values is not seen: {', '.join(names)}; what shapes answers should be an argument of a "
        "class that each worker builds: gm.model(Class, name=value)"
    )


def _imported(text: str) -> Any:
    from gristmill.models.function import import_target

    try:
        return import_target(text)
    except BadModel:  # said by whoever needs it here
        return None


def callable_digests(target: Any) -> dict[str, str]:
    """The same for any callable, without arguments of its own: a function, class, partial, method, or object."""
    found: dict[str, str] = {}
    outermost = _current.get() is None
    with _looking() as walk:
        _add_callable(target, found)
        return _with_missed(found, walk) if outermost else found


@contextmanager
def _looking() -> Iterator[Walk]:
    """The look at values that is under way, else a new one."""
    walk = _current.get()
    if walk is not None:
        yield walk
        return
    token = _current.set(Walk(callable_digests, _class_name, _local_module))
    try:
        yield _current.get()  # type: ignore[misc]
    finally:
        _current.reset(token)


def _with_missed(found: dict[str, str], walk: Walk) -> dict[str, str]:
    return {**found, **{f"{NOT_COMPARED}{name}": "" for name in walk.missed}}


# ---------------------------------------------------------------- values


def value_digest(value: Any) -> str:
    """A digest of a value by its content, the same in every process. A job file has lists where Python has tuples, and
    mappings in any order: these are the same. Raises BadModel for a value that could not be sent to workers.
    """
    return _digest(value, exact=False)


def exact_digest(value: Any) -> str:
    """As `value_digest`, but what a function could tell apart is not the same: types of containers, order of keys."""
    return _digest(value, exact=True)


def _digest(value: Any, *, exact: bool) -> str:
    outermost = _current.get() is None
    with _looking() as walk:
        text = _text(value, walk, exact)
        if outermost and walk.missed:
            text = _pickled(value)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _text(value: Any, walk: Walk, exact: bool) -> str:
    try:
        return walk.text(value, exact=exact)
    except RecursionError:
        return walk.miss(value)


def _pickled(value: Any) -> str:
    import cloudpickle

    try:
        return hashlib.sha256(cloudpickle.dumps(value, protocol=5)).hexdigest()
    except Exception as e:
        raise BadModel(f"{type(value).__name__} {value!r:.80}: cannot be sent to workers ({e})") from e


def _argument_digest(label: str, value: Any, walk: Walk) -> str:
    known = len(walk.missed)
    walk.label = label
    digest = value_digest(value)
    if len(walk.missed) > known:
        _pickled(value)
    return digest


def _class_name(kind: type) -> str:
    return f"{named(kind.__module__)}.{kind.__qualname__}"


def _local_module(module: str) -> bool:
    return module == "__main__" or local_file(named(module)) is not None


def _qualified(target: Any) -> str:
    """What tells it from others of its module."""
    if isinstance(target, functools.partial):
        return _qualified(target.func)
    return getattr(target, "__qualname__", None) or type(target).__qualname__


# ---------------------------------------------------------------- callables


def _add_callable(target: Any, found: dict[str, str]) -> None:
    module = getattr(target, "__module__", None) or ""
    found[f"callable {_qualified(target)}"] = "" if _local_module(module) else module
    if isinstance(target, functools.partial):
        found["partial arguments"] = exact_digest([target.args, sorted(target.keywords.items())])
        _add_callable(target.func, found)
        return
    owner = getattr(target, "__self__", None)
    if inspect.ismethod(target):
        found["object"] = exact_digest(owner)
        target = target.__func__
    elif inspect.isbuiltin(target):
        if owner is not None and not isinstance(owner, types.ModuleType):
            found["object"] = exact_digest(owner)
    elif not (inspect.isroutine(target) or isinstance(target, type) or hasattr(target, "__wrapped__")):
        found["object"] = exact_digest(target)  # called by its class's __call__
        target = type(target)
    _add_object(target, found, set())


def _importable(target: Any) -> bool:
    """Whether it is what its module's source says, so that the module's statements tell all of its code."""
    module = getattr(target, "__module__", None) or ""
    if getattr(getattr(target, "__code__", None), "co_filename", "").startswith("<") or named(module) == "__main__":
        return False
    found: Any = sys.modules.get(module)
    for part in getattr(target, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return (found is target or getattr(found, "__func__", None) is target) and local_file(named(module)) is not None


def _add_object(target: Any, found: dict[str, str], seen: set[int]) -> None:
    """A function or class, and what it refers to; of a decorated one every layer."""
    stated, depth = _importable(target), len(list(_layers(target)))
    if stated and id(target) not in seen:
        add_module(named(target.__module__), target.__qualname__.partition(".")[0], found)
    while (inner := getattr(target, "__wrapped__", None)) is not None and id(target) not in seen:
        seen.add(id(target))
        if isinstance(target, types.FunctionType):
            label = f"{target.__code__.co_name} {depth} around {_qualified(inner)}"
            _add_layer(target, label, found, seen, "" if stated else label)
        target, depth = inner, depth - 1
    if id(target) in seen:
        return
    seen.add(id(target))
    module = named(getattr(target, "__module__", None) or "")
    name = getattr(target, "__qualname__", repr(target))
    if module and not _local_module(module) and not _is_local_object(target):
        add_version(module, found)
        return
    stated = stated or _importable(target)
    _add_layer(target, name, found, seen, "" if stated else f"{module}:{name}")


def _layers(target: Any) -> Iterator[Any]:
    """What decorators were put around, from the outermost to the last; one that is around itself ends it."""
    seen: set[int] = set()
    while (inner := getattr(target, "__wrapped__", None)) is not None and id(inner) not in seen:
        seen.add(id(inner))
        yield inner
        target = inner


def _add_layer(target: Any, name: str, found: dict[str, str], seen: set[int], key: str) -> None:
    """What a function or class refers to, and under `key` its source; "" where its module's statements tell that."""
    if key:
        found[key] = hashlib.sha256(_source(target).encode("utf-8", "surrogatepass")).hexdigest()
    if isinstance(target, types.FunctionType):
        _add_references(target, name, found, seen)
    elif isinstance(target, type):
        _add_class(target, name, found, seen)


def _is_local_object(target: Any) -> bool:
    code = getattr(target, "__code__", None)
    return code is not None and is_local(code.co_filename)


def _add_class(kind: type, name: str, found: dict[str, str], seen: set[int]) -> None:
    """Its attributes, what its methods refer to, and its bases. A method put there later counts by its code."""
    state = {n.partition(".")[2] for n in _state_names(kind)}
    for attribute, value in vars(kind).items():
        functions = _functions(value)
        for function in functions:
            own = function.__qualname__ == f"{kind.__qualname__}.{function.__name__}"
            (_add_references if own else _add_other)(function, f"{name}.{attribute}" if not own else name, found, seen)
        hidden = attribute.startswith("_") and attribute.endswith("_")
        if functions or hidden or attribute == "_abc_impl" or isinstance(value, _DESCRIPTORS):
            continue
        _add_value(f"{name}.{attribute}", value, found, seen, changed=attribute in state)
    for base in kind.__bases__:
        _add_object(base, found, seen)


def _add_other(function: Any, _: str, found: dict[str, str], seen: set[int]) -> None:
    _add_object(function, found, seen)


def _functions(value: Any) -> list[types.FunctionType]:
    parts = [getattr(value, n, None) for n in ("fget", "fset", "fdel")] if isinstance(value, property) else [value]
    parts = [getattr(p, "__func__", getattr(p, "func", p)) for p in parts]
    return [inner for p in parts if isinstance(inner := getattr(p, "__wrapped__", p), types.FunctionType)]


def _add_references(function: types.FunctionType, name: str, found: dict[str, str], seen: set[int]) -> None:
    """Closure values, defaults, and the globals that the code names, of nested code too."""
    state = _state_names(function)
    for label, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            continue  # a cell that is still empty holds nothing to compare
        _add_value(f"{name}.{label}", value, found, seen, changed=label in state)
    _add_value(f"{name}.defaults", [function.__defaults__, function.__kwdefaults__], found, seen)
    codes, names = [function.__code__], dict[str, None]()
    while codes:
        code = codes.pop()
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        names.update(dict.fromkeys(code.co_names))
    for label in names:
        if label in function.__globals__ and label not in ("__name__", "__file__"):
            value = function.__globals__[label]
            if isinstance(value, types.ModuleType):
                _add_named(f"{name}.{label}", value, names, found, seen, changed=label in state)
            else:
                _add_value(f"{name}.{label}", value, found, seen, changed=label in state)


def _add_named(
    label: str,
    module: types.ModuleType,
    names: dict[str, None],
    found: dict[str, str],
    seen: set[int],
    *,
    changed: bool,
) -> None:
    """A module that code refers to: of the user's own, the values of all names that the code may mean."""
    if id(module) in seen or not _local_module(module.__name__) or named(module.__name__) == "__main__":
        add_version(module.__name__, found)
        return
    add_module(module.__name__, "", found)
    file = local_file(module.__name__)
    state = read(file, module.__name__).changed if file is not None and file.suffix == ".py" else set()
    for name in vars(module) if "getattr" in names else names:
        value = vars(module).get(name, module)
        if value is module or name.startswith("__"):
            continue
        add_module(module.__name__, name, found)
        if isinstance(value, types.ModuleType):
            _add_named(f"{label}.{name}", value, names, found, {*seen, id(module)}, changed=changed)
        else:
            _add_value(f"{label}.{name}", value, found, seen, changed=changed or name in state)


def _add_value(label: str, value: Any, found: dict[str, str], seen: set[int], *, changed: bool = False) -> None:
    """What a name stands for. What the code itself changes as it runs is other after each call, and is only named."""
    if isinstance(value, types.ModuleType):
        add_module(value.__name__, ALL, found)
    elif isinstance(value, (types.FunctionType, type)) or (callable(value) and hasattr(value, "__wrapped__")):
        _add_object(value, found, seen)
    elif changed:
        with _looking() as walk:
            walk.missed[f"{label} (the code itself changes it)"] = None
    else:
        with _looking() as walk:
            before, walk.label = walk.label, label
            found[label] = exact_digest(value)
            walk.label = before


def _state_names(target: Any) -> set[str]:
    """Names whose values a function, a class or another function of the same module changes as it runs."""
    file = local_file(named(getattr(target, "__module__", None) or ""))
    found: set[str] = set()
    if file is not None and file.suffix == ".py":
        found |= read(file, named(target.__module__)).changed
    try:
        found |= changed_names(ast.parse(_own_source(target)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return found  # of a lambda within a line, or without source: nothing is taken for its state
    return found


def _own_source(target: Any) -> str:
    return textwrap.dedent(inspect.getsource(getattr(target, "__code__", target)))


def _source(target: Any) -> str:
    """Its code, however it is written."""
    code = getattr(target, "__code__", None)
    if code is not None and code.co_name == "<lambda>":
        return _code_text(code)  # its source is all of its line
    try:
        return ast.unparse(ast.parse(_own_source(target)))
    except (OSError, TypeError, SyntaxError, ValueError):
        codes = (
            [code]
            if code is not None
            else [f.__code__ for v in getattr(target, "__dict__", {}).values() for f in _functions(v)]
        )
        return repr((getattr(target, "__qualname__", type(target)), [_code_text(c) for c in codes]))


def _code_text(code: types.CodeType) -> str:
    consts = [_code_text(c) if isinstance(c, types.CodeType) else exact_digest(c) for c in code.co_consts]
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return repr((code.co_code.hex(), consts, code.co_names, arguments, code.co_flags))

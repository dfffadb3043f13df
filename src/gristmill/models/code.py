"""Digests of user code: what tells that a function, or anything it imports from outside site-packages, has changed."""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import importlib.util
import inspect
import sys
import sysconfig
import textwrap
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from gristmill.errors import BadModel
from gristmill.plan.specs import Call

_SCALARS = (bool, int, float, str, bytes)
_PLAIN = (*_SCALARS, list, tuple, dict, set, frozenset)


_seen: ContextVar[dict[int, Any] | None] = ContextVar("seen", default=None)


def digests(call: Call) -> dict[str, str]:
    """Digests by name: which callable, it or its module's file, local modules that it imports, arguments and closure.

    Versions of the installed distributions that the code imports stand beside them. Nothing is executed for a callable
    named by text; the pickle is not used, because it differs from process to process.
    """
    found: dict[str, str] = {}
    if isinstance(call.target, str):
        module, _, name = call.target.partition(":")
        _add_module(module, found)
    else:
        name = _qualified(call.target)
        found = callable_digests(call.target)
    found[f"callable {name}"] = f"given {call.batch_format}"
    if call.args:
        found.update({f"argument {key} of {name}": value_digest(value) for key, value in call.args.items()})
    if call.takes is not None:
        found[f"columns taken by {name}"] = value_digest(dict(call.takes))
    return found


def callable_digests(target: Any) -> dict[str, str]:
    """The same for any callable, without arguments of its own: a function, class, partial, method, or object."""
    found: dict[str, str] = {}
    with _once(target) as again:
        if again:
            found[f"again {_qualified(target)}"] = ""
        else:
            _add_callable(target, found)
    return found


@contextmanager
def _once(value: Any) -> Iterator[bool]:
    """Whether this digest has come by the object before: what refers to itself ends, and nothing is done twice."""
    seen, token = _seen.get(), None
    if seen is None:
        token = _seen.set(seen := {})
    again = id(value) in seen
    seen[id(value)] = value  # kept, so that no other gets its id
    try:
        yield again
    finally:
        if token is not None:
            _seen.reset(token)


def _add_callable(target: Any, found: dict[str, str]) -> None:
    found[f"callable {_qualified(target)}"] = ""
    if isinstance(target, functools.partial):
        found["partial arguments"] = exact_digest([target.args, sorted(target.keywords.items())])
        _add_callable(target.func, found)
        return
    module = getattr(target, "__module__", None) or ""
    if _importable(target, module) and _local_file(module) is not None:
        _add_module(module, found)  # with its decorators; the same as of "module:name"
        return
    owner = getattr(target, "__self__", None)
    if inspect.ismethod(target):
        found["object"] = _object_digest(owner)
        target = target.__func__
    elif inspect.isbuiltin(target):
        if owner is not None and not isinstance(owner, types.ModuleType):
            found["object"] = exact_digest(owner)
    elif not (inspect.isroutine(target) or isinstance(target, type) or hasattr(target, "__wrapped__")):
        found["object"] = _object_digest(target)  # called by its class's __call__
        target = type(target)
    _add_object(target, found, set())


def _importable(target: Any, module: str) -> bool:
    if module in ("", "__main__"):
        return False
    found: Any = sys.modules.get(module)
    for part in getattr(target, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return bool(found is target or (inspect.ismethod(target) and found == target))


def _object_digest(value: Any) -> str:
    try:
        return exact_digest(_state(value))
    except BadModel:  # it holds a lock or the like: without workers that is fine, and with them sending it is refused
        return type(value).__qualname__


def _state(value: Any) -> Any:
    """What makes an object another one than its class's next: as pickle would have it."""
    if isinstance(value, type):
        return value
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # it cannot be pickled
        return getattr(value, "__dict__", None)
    return reduced if isinstance(reduced, str) else [reduced[:3], *(list(part or ()) for part in reduced[3:5])]


def _qualified(target: Any) -> str:
    """What tells it from others of its module."""
    if isinstance(target, functools.partial):
        return _qualified(target.func)
    return getattr(target, "__qualname__", None) or type(target).__qualname__


def value_digest(value: Any) -> str:
    """A digest of a plain value, the same in every process; arrays, tables and others by their pickled content. A job
    file has lists where Python has tuples, and mappings in any order: these are the same.
    """
    return hashlib.sha256(_canonical(value, exact=False).encode("utf-8", "surrogatepass")).hexdigest()


def exact_digest(value: Any) -> str:
    """As `value_digest`, but what a function could tell apart is not the same: types of containers, order of keys."""
    return hashlib.sha256(_canonical(value, exact=True).encode("utf-8", "surrogatepass")).hexdigest()


def _canonical(value: Any, *, exact: bool) -> str:
    """A text that is the same in every process. Only objects of installed packages are pickled: cloudpickle gives the
    classes of a script another number each time.
    """
    kind = type(value)
    if value is None:
        return "NoneType:None"
    if isinstance(value, enum.Enum):
        return f"{_class_name(kind)}.{value.name}"
    if isinstance(value, _SCALARS):
        base = next(b for b in _SCALARS if isinstance(value, b))
        return f"{kind.__name__}:{value!r}" if kind is base or not exact else _subclass(value, base.__repr__(value))
    if isinstance(value, dict) or (isinstance(value, Mapping) and not exact):
        pairs = [f"{_canonical(k, exact=exact)}={_canonical(v, exact=exact)}" for k, v in value.items()]
        text = "{" + ",".join(pairs if exact else sorted(pairs)) + "}"
        return text if kind is dict or not exact else _subclass(value, text)
    if isinstance(value, (list, tuple)):
        text = "[" + ",".join(_canonical(v, exact=exact) for v in value) + "]"
        return _subclass(value, text) if exact else text
    if isinstance(value, (set, frozenset)):
        text = "(" + ",".join(sorted(_canonical(v, exact=exact) for v in value)) + ")"
        return _subclass(value, text) if exact else text
    if isinstance(value, (types.FunctionType, types.MethodType, type, functools.partial)):
        return _class_name(kind) + _canonical(callable_digests(value), exact=False)
    if isinstance(value, types.ModuleType):
        return f"module:{value.__name__}"
    if kind.__module__ == "__main__" or _local_file(kind.__module__) is not None:
        with _once(value) as again:
            return _class_name(kind) + ("again" if again else _canonical(_state(value), exact=True))
    import cloudpickle

    try:
        return hashlib.sha256(cloudpickle.dumps(value, protocol=5)).hexdigest()
    except Exception as e:
        raise BadModel(f"{kind.__name__} {value!r:.80}: cannot be sent to workers ({e})") from e


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _subclass(value: Any, text: str) -> str:
    """A value of a built-in kind, or of a class made from one, which may hold more than that."""
    more = {**getattr(value, "__dict__", {}), "default": getattr(value, "default_factory", None)}
    more = {name: item for name, item in more.items() if item is not None}
    return _class_name(type(value)) + text + (_canonical(more, exact=True) if more else "")


# ---------------------------------------------------------------- objects


def _add_object(target: Any, found: dict[str, str], seen: set[int]) -> None:
    """A function or class, and what it refers to; of a decorated one every layer."""
    while (inner := getattr(target, "__wrapped__", None)) is not None and id(target) not in seen:
        seen.add(id(target))
        if isinstance(target, types.FunctionType):
            _add_layer(target, f"{target.__code__.co_name} {len(found)} around {_qualified(inner)}", found, seen)
        target = inner
    if id(target) in seen:
        return
    seen.add(id(target))
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__qualname__", repr(target))
    # A lambda's file does not tell it from the next one there.
    if module not in ("__main__", "") and _local_file(module) is not None and "<" not in name:
        _add_module(module, found)
        return
    if module and module != "__main__" and _local_file(module) is None and not _is_local_object(target):
        _add_version(module, found)
        return
    _add_layer(target, name, found, seen, f"{module}:{name}")


def _add_layer(target: Any, name: str, found: dict[str, str], seen: set[int], key: str = "") -> None:
    found[key or name] = hashlib.sha256(_source(target).encode()).hexdigest()
    for function in _functions(target):
        for label, value in _references(function):
            _add_reference(f"{name}.{label}", value, found, seen)


def _is_local_object(target: Any) -> bool:
    code = getattr(target, "__code__", None)
    return code is not None and not _installed(Path(code.co_filename))


def _functions(target: Any) -> Iterator[types.FunctionType]:
    if isinstance(target, types.FunctionType):
        yield target
    elif isinstance(target, type):
        for value in vars(target).values():
            inner = getattr(value, "__func__", value)
            if isinstance(inner, types.FunctionType):
                yield inner


def _references(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Closure values, defaults, and the globals that the code names, of nested code too."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # a cell that is still empty holds nothing to compare
    yield "defaults", [function.__defaults__, function.__kwdefaults__]
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        for name in code.co_names:
            if name in function.__globals__ and name not in ("__name__", "__file__"):
                yield name, function.__globals__[name]


def _add_reference(label: str, value: Any, found: dict[str, str], seen: set[int]) -> None:
    if isinstance(value, types.ModuleType):
        _add_module(value.__name__, found)
    elif isinstance(value, (types.FunctionType, type)):
        _add_object(value, found, seen)
    elif isinstance(value, functools.partial):
        found[label] = exact_digest(value)
    elif value is None or isinstance(value, _PLAIN):
        found[label] = value_digest(value)


def _source(target: Any) -> str:
    code = getattr(target, "__code__", None)
    try:
        text = textwrap.dedent(inspect.getsource(target if code is None else code))
        # A lambda's source is all of its line.
        return text + _code_text(code) if code is not None and code.co_name == "<lambda>" else text
    except (OSError, TypeError):
        return _code_text(code) if code is not None else repr(getattr(target, "__qualname__", type(target)))


def _code_text(code: types.CodeType) -> str:
    consts = [_code_text(c) if isinstance(c, types.CodeType) else _canonical(c, exact=True) for c in code.co_consts]
    return repr((code.co_code.hex(), consts, code.co_names, code.co_varnames[: code.co_argcount]))


# ---------------------------------------------------------------- modules


def _add_module(name: str, found: dict[str, str]) -> None:
    """A local module's file and, by reading its imports, the local modules below it."""
    waiting = [name]
    while waiting:
        module = waiting.pop()
        file = _local_file(module)
        if file is None:
            _add_version(module, found)
            continue
        key = f"module {module}"
        if key in found:
            continue
        source = file.read_bytes()
        found[key] = hashlib.sha256(source).hexdigest()
        if file.suffix == ".py":
            waiting += _imports(source, module, file.name == "__init__.py")


def _imports(source: bytes, module: str, package: bool) -> list[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []  # the import itself will say so, with the line
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".") if package else module.split(".")[:-1]
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            names.append(base)
            names += [f"{base}.{a.name}" for a in node.names if _local_file(f"{base}.{a.name}") is not None]
    return [n for n in names if n]


def _local_file(module: str) -> Path | None:
    """The file of a module outside site-packages and the standard library, else None."""
    try:
        return _found_file(module)
    except LookupError:
        return None


@functools.lru_cache(maxsize=4096)
def _found_file(module: str) -> Path | None:
    """The same. Raises LookupError where there is no such module, which is not kept: a notebook may write it later."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "gristmill":
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError) as e:
        raise LookupError(module) from e
    if spec is None:
        raise LookupError(module)
    if spec.origin in (None, "built-in", "frozen"):
        return None
    path = Path(str(spec.origin))
    return None if _installed(path) else path


def _installed(path: Path) -> bool:
    paths = sysconfig.get_paths()
    homes = {Path(paths[k]) for k in ("purelib", "platlib", "stdlib", "platstdlib")}
    return any(home in path.parents for home in homes) or "site-packages" in path.parts


def _add_version(module: str, found: dict[str, str]) -> None:
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("gristmill", "__main__"):
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        found[f"version of {top}"] = version(top)
    except PackageNotFoundError:
        for distribution in _distributions().get(top, []):
            found[f"version of {distribution}"] = version(distribution)


@functools.lru_cache(maxsize=1)
def _distributions() -> dict[str, list[str]]:
    from importlib.metadata import packages_distributions

    return {k: list(v) for k, v in packages_distributions().items()}

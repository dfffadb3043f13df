"""Modules of the user by their source: which statements of a module, and of modules that it imports, a name rests on.

Formatting and comments do not count. Names that nothing reaches are left out; statements that run when the module is
imported count, whatever is reached.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import importlib.util
import os
import sys
import sysconfig
import types
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import field
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from pathlib import Path
from typing import Any

from gristmill.fingerprint.digests import NOT_COMPARED
from gristmill.fingerprint.diskcache import file_digest, table_digest
from gristmill.fingerprint.modelfiles import TOO_MANY, below, digests_of
from gristmill.fingerprint.randomness import Drawn, dotted, drawn
from gristmill.values import dataclass

ALL = "*"
_CODE = set(all_suffixes())
_MOST_HASHED = 1000  # files of an installed package: 0.1 s
_OURS = Path(__file__).resolve().parents[1]
_SCRIPTS = sysconfig.get_path("scripts")
# If one of these is used, any name of the module may be meant.
_BY_NAME = {"globals", "locals", "vars", "eval", "exec", "compile", "__import__", "import_module", "modules"}
IMPORTING = {"__import__", "import_module", "resolve_name", "run_module", "iter_modules", "walk_packages"}
_BY_PATH = {"spec_from_file_location", "SourceFileLoader", "run_path"}  # modules imported with these are not searched
BY_NAME = "modules imported by names made at run time in "
_MOST_ENTRIES = 10_000  # files and folders that are searched for modules
_MOST_MODULES = 1_000  # modules found in this way: to read them takes seconds
# If a class knows its subclasses, any class of any module may be meant.
_BY_CLASS = {"__init_subclass__", "__subclasses__"}
_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Methods that change a list, dict, set or the like in place.
_CHANGING = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "setdefault", "sort", "update", "fill", "put",
}  # fmt: skip


def named(module: str) -> str:
    """A module's name as others import it. A running script is `__main__` to itself, in processes that multiprocessing
    spawns also `__mp_main__`; its name here is that of its file.
    """
    if module not in ("__main__", "__mp_main__"):
        return module
    main: Any = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is None or not os.path.isfile(file):  # a notebook or a prompt
        return module
    folder, name = os.path.split(file)
    if folder == _SCRIPTS and "." not in name:  # an installed command, which is not a module of its package's name
        return module
    spec = getattr(main, "__spec__", None)
    return spec.name if spec is not None and spec.name else Path(file).stem


def is_ours(module: str) -> bool:
    """Whether a module is Gristmill's, whose version is compared separately: never a part of the user's code."""
    return module.partition(".")[0] == "gristmill"


def local_file(module: str) -> Path | None:
    """The file of a module outside site-packages and the standard library, else None."""
    main: Any = sys.modules.get("__main__")
    if is_ours(module):  # also if its command is what runs
        return None
    if module not in ("", "__main__") and module == named("__main__"):
        path = Path(main.__file__).resolve()
        return None if _installed(path) else path
    try:
        return _found_file(module, _as_now(module))
    except LookupError:
        return None


def _spec(module: str) -> ModuleSpec | None:
    """Where a module is, found without running any code of its packages."""
    package = module.rpartition(".")[0]
    if not package or package in sys.modules:
        return importlib.util.find_spec(module)
    above = _spec(package)
    folders = None if above is None else above.submodule_search_locations
    return None if folders is None else PathFinder.find_spec(module, list(folders))


def _as_now(module: str) -> object:
    """What decides where a module is found: a process may import another module of that name, from elsewhere."""
    return getattr(sys.modules.get(module), "__file__", None) or tuple(sys.path)


@functools.lru_cache(maxsize=4096)
def _found_file(module: str, now: object) -> Path | None:
    """As `local_file`. Raises LookupError if there is none, which is not cached: a notebook may write it later."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "__main__":
        return None
    try:
        spec = _spec(module)
    except (ImportError, ValueError, AttributeError) as e:
        if (file := getattr(sys.modules.get(module), "__file__", None)) and os.path.isfile(file):  # runpy.run_path
            return None if _installed(Path(file)) else Path(file).resolve()
        raise LookupError(module) from e
    if spec is None:
        raise LookupError(module)
    if spec.origin in (None, "built-in", "frozen"):
        return None
    path = Path(str(spec.origin))
    return None if _installed(path) else path


@functools.lru_cache(maxsize=4096)
def on_disk(file: Path) -> Path:
    """The file itself, or the archive on the import path that it is in."""
    return next((above for above in file.parents if above.is_file()), file)


def content(file: Path) -> bytes:
    """The content of a file, which may be in an archive on the import path."""
    archive = on_disk(file)
    if archive == file:
        return file.read_bytes()
    with zipfile.ZipFile(archive) as opened:
        return opened.read(file.relative_to(archive).as_posix())


def _installed(path: Path) -> bool:
    paths = sysconfig.get_paths()
    homes = {Path(paths[k]) for k in ("purelib", "platlib", "stdlib", "platstdlib")}
    return any(home in path.parents for home in homes) or "site-packages" in path.parts


def is_local_module(module: str) -> bool:
    """Whether a module, or a package that is only a folder, is the user's own."""
    if local_file(module) is not None:
        return True
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("", "gristmill", "__main__"):
        return False
    try:
        return any(not _installed(Path(folder)) for folder in _folders(module, _as_now(module)))
    except (LookupError, ImportError, ValueError, AttributeError):
        return False


@functools.lru_cache(maxsize=4096)
def _folders(module: str, now: object) -> tuple[str, ...]:
    """Folders of a package without a file. Raises LookupError if there is no such module, which is not cached."""
    spec = _spec(module)
    if spec is None:
        raise LookupError(module)
    return tuple(spec.submodule_search_locations or ()) if spec.origin is None else ()


@functools.lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Whether a file of code belongs to the standard library, an installed package, or Gristmill."""
    return file.startswith("<frozen ") or _OURS in Path(file).parents or _installed(Path(file))


def is_users(code: types.CodeType) -> bool:
    """Whether code is from the user's own files, or from no file, such as a notebook's cell."""
    return not is_installed(code.co_filename)


def imported_by(code: types.CodeType, package: str) -> list[tuple[str, str]]:
    """Modules that code imports as it runs, each with the name imported from it (`ALL` for every name)."""
    found: list[tuple[str, str]] = []
    before: list[Any] = [None, None]
    for step in dis.get_instructions(code) if dis.opmap["IMPORT_NAME"] in code.co_code[::2] else ():
        if step.opname == "IMPORT_NAME":
            names, module = before[1], step.argval
            node = ast.ImportFrom(module, [ast.alias(n) for n in names or ()], before[0] or 0)
            bound = [pair for _, pair in imported(node, package, True)] if names else [(module, "")]
            found += [(module, name or ALL) for module, name in bound]
        before = [before[1], step.argval]
    return found


def add_module(
    module: str, name: str, found: dict[str, str], source_of: Callable[[Path, str], Source] | None = None
) -> None:
    """Adds digests of what `name` of a module rests on (`ALL` for every name), such as "module a: function f", and the
    versions of the installed modules among it. Sources come from `source_of`, else they are read as they are now.
    """
    first = (module, name)
    waiting: list[tuple[str, str]] = [first]
    done: set[tuple[str, str]] = set()
    installed: set[str] = set()
    wide = False
    while waiting:
        module, name = waiting.pop()
        name = ALL if wide else name
        if (module, name) in done:
            continue
        done.add((module, name))
        file = local_file(module)
        if file is None:
            top = module.partition(".")[0]
            if top not in installed:
                installed.add(top)
                add_version(top, found)
            continue
        parts = module.split(".")
        waiting += [(".".join(parts[:n]), "") for n in range(1, len(parts))]
        if file.suffix != ".py":
            found[f"module {module}"] = hashlib.sha256(content(file)).hexdigest()
            continue
        try:
            source = (source_of or read)(file, module)
        except FileNotFoundError:  # it was loaded, and its file is gone: whatever loads it again reports it
            continue
        for part in source.reached(name):
            key = f"module {module}: {part}"
            if key not in found:
                found[key] = source.digest(part)
            waiting += source.uses(part)
            if source.imports_any(part):
                beside, elsewhere = around(module)
                found[f"{NOT_COMPARED}{elsewhere}"] = ""
                waiting += [(other, ALL) for other in beside]
            if not wide and source.knows_classes(part):
                wide, waiting = True, [*waiting, *done]
        waiting += [(other, "") for other in source.runs]
        if (module, name) != first:  # names that it imports itself
            targets = [t for n, ts in source.bound.items() for t in ts] if name == ALL else source.bound.get(name, [])
            waiting += [(other, inner or ALL) for other, inner in targets]


def around(module: str) -> tuple[list[str], str]:
    """The modules that a module may mean without naming them (those of its outermost package, else of its folder), and
    the text that reports others from elsewhere.
    """
    top = module.partition(".")[0]
    found = modules_named(f"{top}.")
    if found:
        found.append(top)
    else:
        file = local_file(module)
        folder = Path.cwd() if module == "__main__" else None if file is None else file.parent
        found = [] if folder is None else _modules_in([str(folder)], "")
    return found, f"{BY_NAME}{module}{' from elsewhere' if found else ''}"


def modules_named(beginning: str) -> list[str]:
    """The user's modules whose names begin in this way, in its package; of an installed package only the package."""
    package, dot, _ = beginning.rpartition(".")
    if not dot:
        return []
    try:
        spec = _spec(package)
    except (ImportError, ValueError, AttributeError):
        return []
    if spec is None:
        return []
    if not is_local_module(package):
        return [package]
    found = _modules_in(list(spec.submodule_search_locations or ()), f"{package}.")
    return [name for name in found if name.startswith(beginning)]


def _modules_in(folders: list[str], prefix: str) -> list[str]:
    """The names of all modules in folders and packages below them, except the running script; none if they are too
    many to read.
    """
    found, entries = set[str](), 0
    waiting = [(folder, prefix) for folder in folders]
    while waiting:
        folder, prefix = waiting.pop()
        readable = os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)
        for entry in os.scandir(folder) if readable else ():
            entries += 1
            stem, ending = os.path.splitext(entry.name)
            if entries > _MOST_ENTRIES or len(found) > _MOST_MODULES:
                return []
            if stem.isidentifier() and not ending and entry.is_dir() and stem not in ("__pycache__", "node_modules"):
                waiting.append((entry.path, f"{prefix}{stem}."))
            elif stem == "__init__" and ending == ".py" and prefix:
                found.add(prefix.rstrip("."))
            elif stem.isidentifier() and ending == ".py":
                found.add(prefix + stem)
    return sorted(found - {named("__main__")})


def _entry_points(group: str) -> list[str]:
    from importlib.metadata import entry_points

    return sorted({point.value.partition(":")[0] for point in entry_points(group=group)})


@dataclass
class Source:
    """A parsed module: its statements by what they define, "statements" for those that define nothing."""

    module: str
    package: bool
    parts: dict[str, list[ast.stmt]] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=dict)  # by name, the parts that bind it
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)  # by name: module, name in it or ""
    bound: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # the same, with all imports of each name
    runs: set[str] = field(default_factory=set)  # modules that importing it runs
    ours: set[str] = field(default_factory=lambda: {"print"})  # Gristmill's, whose options are compared separately
    pure: set[str] = field(default_factory=lambda: {"property", "staticmethod", "classmethod"})  # decorators
    changed: set[str] = field(default_factory=set)  # see `changed_names`
    drawn: dict[str, Drawn] = field(default_factory=dict)  # names whose values differ between processes
    _uses: dict[str, tuple[set[str], list[tuple[str, str]], bool]] = field(default_factory=dict)
    _digests: dict[str, str] = field(default_factory=dict)

    def bind(self, found: list[tuple[str, tuple[str, str]]]) -> None:
        """Add the names that imports of the module bind."""
        self.imports.update(found)
        _bind(self.bound, found)

    def reached(self, name: str) -> list[str]:
        """The parts that a name rests on, in order of their names; "statements" always."""
        waiting = [p for p in ("statements",) if p in self.parts]
        dunder = name.startswith("__") and name.endswith("__")
        known = name in self.names or name == "" or dunder
        waiting += self.names.get(name, ()) if known else list(self.parts)
        done: set[str] = set()
        while waiting:
            part = waiting.pop()
            if part not in done:
                done.add(part)
                used = self._used(part)[0]
                waiting += self.parts if ALL in used else [p for n in used for p in self.names.get(n, ())]
        return sorted(done)

    def knows_classes(self, part: str) -> bool:
        """Whether a part uses the subclasses of a class."""
        return bool(self._used(part)[0] & _BY_CLASS)

    def sets(self, name: str) -> bool:
        """Whether its functions and classes set a global or an attribute of this name."""
        nodes = (n for stmts in self.parts.values() for s in stmts if isinstance(s, _DEFINED) for n in ast.walk(s))
        return any(
            name in n.names if isinstance(n, ast.Global) else isinstance(n, ast.Attribute) and n.attr == name
            for n in nodes
            if not isinstance(getattr(n, "ctx", None), ast.Load)
        )

    def digest(self, part: str) -> str:
        """A digest of a part's code that does not depend on formatting."""
        if part not in self._digests:  # a plan asks for it, then its pins, and each later job of this process
            text = "\n".join(map(ast.unparse, self.parts[part]))
            self._digests[part] = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return self._digests[part]

    def uses(self, part: str) -> list[tuple[str, str]]:
        """Names of other modules that a part uses."""
        return self._used(part)[1]

    def imports_any(self, part: str) -> bool:
        """Whether a part imports modules whose names the source does not even begin to tell."""
        return self._used(part)[2]

    def _used(self, part: str) -> tuple[set[str], list[tuple[str, str]], bool]:
        if part not in self._uses:
            self._uses[part] = self._looked(part)
        return self._uses[part]

    def _looked(self, part: str) -> tuple[set[str], list[tuple[str, str]], bool]:
        names: set[str] = set()
        others: list[tuple[str, str]] = []
        unknown = False
        bound = {name: list(targets) for name, targets in self.bound.items()}
        runs = set(self.runs)
        nodes = [node for stmt in self.parts[part] for node in ast.walk(stmt)]
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found = imported(node, self.module, self.package)
                _bind(bound, found)
                others += [(module, ALL if name == ALL else "") for _, (module, name) in found]
                runs.update(a.name for a in node.names if isinstance(node, ast.Import))
        others += [(module, "") for module in runs - self.runs]
        for n in range(max(map(len, bound.values()), default=1)):  # each branch, or method, may bind the name
            imports = {name: targets[min(n, len(targets) - 1)] for name, targets in bound.items()}
            unknown = self._names(nodes, imports, runs, names, others) or unknown
        return names, others, unknown

    def _names(
        self, nodes: list[ast.AST], imports: dict[str, tuple[str, str]], runs: set[str], names: set[str],
        others: list[tuple[str, str]],
    ) -> bool:  # fmt: skip
        """Adds the names that are used, and those of other modules; returns whether it may import any module."""
        unknown = False
        bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            if isinstance(node, ast.Call) and (found := self._called(node, imports)) is not None:
                others += [(module, ALL) for module in found]
                unknown = unknown or not found
            elif isinstance(node, ast.FunctionDef):
                names |= {node.name} & _BY_CLASS
            elif isinstance(node, ast.Attribute):
                names |= {ALL} if node.attr in _BY_NAME - {"compile"} else {node.attr} & _BY_CLASS
                others += through(node, imports)
            elif isinstance(node, ast.Name):
                names.add(ALL if node.id in _BY_NAME else node.id)
                if node.id in imports and (id(node) not in bases or imports[node.id][1]):
                    module, name = imports[node.id]
                    others.append((module, name or ALL))
                    others += [(below, ALL) for below in runs if not name and below.startswith(f"{module}.")]
        return unknown

    def _called(self, call: ast.Call, imports: dict[str, tuple[str, str]]) -> list[str] | None:
        """The modules that a call imports by a name built at run time, as far as its beginning tells; None for a call
        that imports none.
        """
        function = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if function == "entry_points":
            group = next((k.value for k in call.keywords if k.arg == "group"), call.args[0] if call.args else None)
            text, whole = self._begins(group, imports)
            return _entry_points(text) if whole else []
        if function in _BY_PATH:
            return []
        if function not in IMPORTING:
            return None
        given = [*call.args, *(k.value for k in call.keywords if k.arg == "package")]
        if function in ("iter_modules", "walk_packages"):
            path = given[0] if given else None
            owner = path.value if isinstance(path, ast.Attribute) and path.attr == "__path__" else None
            own = isinstance(path, ast.Name) and path.id == "__path__"
            text, whole = (self.module if own else dotted(owner, imports) if owner is not None else ""), False
            text += "." if text else ""
        else:
            text, whole = self._begins(given[0] if given else None, imports)
        if text.startswith("."):
            base, known = self._begins(given[1], imports) if len(given) > 1 else ("", False)
            parts = (base if known else self._package).split(".")
            dots = len(text) - len(text.lstrip("."))
            text = ".".join([*parts[: len(parts) - dots + 1], text.lstrip(".")])
        return [text.partition(":")[0]] if whole and text else modules_named(text)

    @property
    def _package(self) -> str:
        return self.module if self.package else self.module.rpartition(".")[0]

    def _begins(self, node: ast.expr | None, imports: dict[str, tuple[str, str]]) -> tuple[str, bool]:
        """The beginning of a text that is built from constants of the module, and whether that is all of it."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value, True
        if isinstance(node, ast.Name):
            known = {"__name__": self.module, "__package__": self._package}
            bound = self.parts.get(node.id, [])
            value = bound[0].value if len(bound) == 1 and isinstance(bound[0], (ast.Assign, ast.AnnAssign)) else None
            constant = isinstance(value, ast.Constant) and isinstance(value.value, str)
            return (known[node.id], True) if node.id in known else self._begins(value if constant else None, imports)
        if isinstance(node, ast.Attribute) and node.attr == "__name__":
            text = dotted(node.value, imports)
            return text, bool(text)
        if isinstance(node, ast.FormattedValue):
            return self._begins(node.value, imports)
        parts: list[ast.expr] = []
        if isinstance(node, ast.JoinedStr):
            parts = node.values
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = [node.left, node.right]
        begun, whole = "", bool(parts)
        for part in parts:
            text, whole = self._begins(part, imports)
            begun += text
            if not whole:
                break
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            begun = self._begins(node.left, imports)[0].partition("%")[0]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            begun = self._begins(node.func.value, imports)[0].partition("{")[0]
        return begun, whole


def _bind(bound: dict[str, list[tuple[str, str]]], found: list[tuple[str, tuple[str, str]]]) -> None:
    for name, target in found:
        targets = bound.setdefault(name, [])
        if target not in targets:
            targets.append(target)


def through(node: ast.Attribute, imports: dict[str, tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """`a.b.c` as a name of the module `a`, or of `a.b` if that is a module."""
    chain, root = [node.attr], node.value
    while isinstance(root, ast.Attribute):
        chain.append(root.attr)
        root = root.value
    if not isinstance(root, ast.Name) or root.id not in imports or imports[root.id][1]:
        return
    module = imports[root.id][0]
    for name in reversed(chain):
        if local_file(f"{module}.{name}") is None:
            yield module, name
            return
        module = f"{module}.{name}"
    yield module, ALL


@functools.lru_cache(maxsize=256)
def _parsed(file: Path, module: str, stamp: tuple[int, int]) -> Source:
    return parse(content(file), file, module)


@functools.lru_cache(maxsize=256)
def parse(text: bytes, file: Path, module: str) -> Source:
    """The source of a module, parsed from the content that its file has, or had."""
    source = Source(module, file.name == "__init__.py")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # the import itself will report it, with the line
        source.parts["statements"] = [ast.Expr(ast.Constant(text.hex()))]
        return source
    for number, stmt in enumerate(tree.body):
        _file(stmt, number, source)
    return source


def read(file: Path, module: str) -> Source:
    """A module's source as it is now."""
    stat = on_disk(file).stat()
    return _parsed(file, module, (stat.st_mtime_ns, stat.st_size))


def _file(stmt: ast.stmt, number: int, source: Source) -> None:
    """Put a statement under what it defines."""
    if isinstance(stmt, (ast.Import, ast.ImportFrom)):
        _file_import(stmt, source)
    elif isinstance(stmt, _DEFINED):
        part = f"{'class' if isinstance(stmt, ast.ClassDef) else 'function'} {stmt.name}"
        source.parts.setdefault(part, []).append(stmt)
        source.names.setdefault(stmt.name, set()).add(part)
        source.changed |= changed_names(stmt)
        if any(not _root(d) & (source.ours | source.pure) for d in stmt.decorator_list):  # it may be registered
            source.parts.setdefault("statements", []).append(ast.Expr(ast.Name(stmt.name)))
    elif isinstance(stmt, (ast.Assign, ast.AnnAssign)) and (names := plain_targets(stmt)):
        for name in names:
            source.parts.setdefault(name, []).append(stmt)
            source.names.setdefault(name, set()).add(name)
        found = None if stmt.value is None else drawn(stmt.value, source.imports)
        if found is not None:
            source.drawn.update(dict.fromkeys(names, found))
        if isinstance(stmt.value, ast.Call) and _root(stmt.value) & source.ours:
            source.ours.update(names)
        elif stmt.value is not None and not _harmless(stmt.value, source):
            source.parts.setdefault("statements", []).append(stmt)
    elif number == 0 and _text(stmt):
        source.parts["__doc__"] = [stmt]
        source.names["__doc__"] = {"__doc__"}
    elif not (_is_main_guard(stmt) or (isinstance(stmt, ast.Expr) and _harmless(stmt.value, source))):
        source.parts.setdefault("statements", []).append(stmt)
        for node in ast.walk(stmt):
            bound_names = [node.id] if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) else []
            if isinstance(node, _DEFINED):
                bound_names = [node.name]
                source.changed |= changed_names(node)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                source.bind(imported(node, source.module, source.package))
            for name in bound_names:
                source.names.setdefault(name, set()).add("statements")


def _file_import(stmt: ast.Import | ast.ImportFrom, source: Source) -> None:
    if isinstance(stmt, ast.Import):
        source.runs.update(a.name for a in stmt.names)
    found = imported(stmt, source.module, source.package)
    source.bind(found)
    for name, (module, inner) in found:
        source.runs.add(module)
        top = module.partition(".")[0]
        if is_ours(module):
            source.ours.add(name)
        elif top in sys.stdlib_module_names:
            source.pure.add(name)
        part = "statements" if inner == ALL else f"import {name}"
        plain = ast.ImportFrom(module, [ast.alias(inner, name)], 0) if inner else ast.Import([ast.alias(module, name)])
        source.parts.setdefault(part, []).append(plain)
        source.names.setdefault(name, set()).add(part)


def plain_targets(stmt: ast.Assign | ast.AnnAssign) -> list[str]:
    """The names that a statement binds, if it binds nothing else."""
    targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
    flat = [n for t in targets for n in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])]
    return [n.id for n in flat if isinstance(n, ast.Name)] if all(isinstance(n, ast.Name) for n in flat) else []


def _text(stmt: ast.stmt) -> bool:
    return isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant) and isinstance(stmt.value.value, str)


def _harmless(node: ast.expr, source: Source) -> bool:
    """Whether evaluating it only gives a value: it calls nothing but Gristmill and `print`."""
    calls = (p for p in ast.walk(node) if isinstance(p, ast.Call))
    named = any(isinstance(p, ast.NamedExpr) for p in ast.walk(node))
    return not named and all(_root(call) & source.ours for call in calls)


def drawn_in(module: str, name: str) -> dict[str, list[Drawn]]:
    """The attributes of a class, and of its objects, that differ between processes by the source of its module."""
    file = local_file(module)
    if file is None or file.suffix != ".py":
        return {}
    source = read(file, module)
    body: list[ast.stmt] = [stmt for stmts in source.parts.values() for stmt in stmts]
    for inner in name.split("."):
        kinds = {id(s): s for s in body if isinstance(s, ast.ClassDef) and s.name == inner}
        if len(kinds) != 1:
            return {}
        body = next(iter(kinds.values())).body
    given: dict[str, list[Drawn | None]] = {}
    for stmt in body:
        if isinstance(stmt, (ast.Assign, ast.AnnAssign)) and stmt.value is not None:
            for attribute in plain_targets(stmt):
                given.setdefault(attribute, []).append(drawn(stmt.value, source.imports, default=True))
        nodes = list(ast.walk(stmt)) if isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef)) else []
        whole = {id(t): n.value for n in nodes if isinstance(n, ast.Assign) for t in n.targets}
        for node in nodes:
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                value = whole.get(id(node))
                given.setdefault(node.attr, []).append(None if value is None else drawn(value, source.imports))
    return {n: [v for v in values if v is not None] for n, values in given.items() if None not in values}


def drawn_as(module: str, name: str) -> Drawn | None:
    """What a name's value is if it differs between processes by the source of its module, wherever it is imported from.
    None for a name that is bound more than once: it may be anything.
    """
    file = local_file(module)
    if file is None or file.suffix != ".py":
        return None
    source = read(file, module)
    if name in source.drawn:
        return source.drawn[name] if source.names[name] == {name} and len(source.parts[name]) == 1 else None
    other, inner = source.imports.get(name, ("", ""))
    return drawn_as(other, inner) if inner and (other, inner) != (module, name) else None


def is_doubtful(module: str, name: str) -> bool:
    """Whether the source of a module leaves open which definition a name of it (`a.b` of a class) stands for: it is
    defined twice or under a condition, or is assigned.
    """
    file = local_file(module)
    if file is None or file.suffix != ".py":
        return False
    source, (top, *inner) = read(file, module), name.split(".")
    found = [stmt for part in source.names.get(top, ()) for stmt in source.parts[part]]
    for name in inner:
        if len(found) != 1 or not isinstance(found[0], ast.ClassDef):
            return True
        found = [s for s in found[0].body if any(isinstance(n, _DEFINED) and n.name == name for n in ast.walk(s))]
    binds = (*_DEFINED, *(() if inner else (ast.Import, ast.ImportFrom)))
    return len(found) != 1 or not isinstance(found[0], binds) or getattr(found[0], "name", name) != name


def _root(node: ast.expr) -> set[str]:
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def _is_main_guard(stmt: ast.stmt) -> bool:
    return isinstance(stmt, ast.If) and not stmt.orelse and ast.unparse(stmt.test) == "__name__ == '__main__'"


def imported(node: ast.Import | ast.ImportFrom, module: str, package: bool) -> list[tuple[str, tuple[str, str]]]:
    """What an import binds: each name, with a module and the name in it, "" for the module itself."""
    if isinstance(node, ast.Import):
        bound = []
        for a in node.names:
            top = a.name.partition(".")[0]
            bound.append((a.asname, (a.name, "")) if a.asname else (top, (top, "")))
        return bound
    base = node.module or ""
    if node.level:
        parts = module.split(".") if package else module.split(".")[:-1]
        base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
    if not base:
        return []
    found = []
    for a in node.names:
        below = f"{base}.{a.name}"
        is_module = a.name != ALL and is_local_module(base) and is_local_module(below)
        found.append((a.asname or a.name, (below, "") if is_module else (base, a.name)))
    return found


def changed_names(node: ast.AST, bound: frozenset[str] = frozenset()) -> set[str]:
    """Names whose values a function or class itself changes as it runs: its state, which differs after each call.

    Attributes of objects that are not its own are given as "object.attribute" too.
    """
    below = list(ast.iter_child_nodes(node))
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        inside = [n for child in below for n in ast.walk(child)]
        shared = {name for n in inside if isinstance(n, (ast.Global, ast.Nonlocal)) for name in n.names}
        stored = {n.id for n in inside if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        bound = (bound | stored | {n.arg for n in inside if isinstance(n, ast.arg)}) - shared
    found: set[str] = set()
    target: ast.expr | None = None
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        found.update(node.names)
    elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        target = node
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
        target = node.func
    if target is not None:
        root = _root(target)
        found |= (root - bound) | {f"{name}.{attribute}" for name in root for attribute in _attribute(target, name)}
    for child in below:
        found |= changed_names(child, bound)
    return found


def _attribute(target: ast.expr, root: str) -> set[str]:
    """The attribute of a name that is changed; an attribute set on `self` is the object's own, not its class's."""
    inner = target
    if isinstance(target, ast.Attribute) and ast.unparse(target.value) in ("type(self)", "self.__class__"):
        return {target.attr}
    while isinstance(inner, (ast.Attribute, ast.Subscript)) and not isinstance(inner.value, ast.Name):
        inner = inner.value
    if not isinstance(inner, ast.Attribute) or (inner is target and root == "self"):
        return set()
    return {inner.attr}


def add_version(module: str, found: dict[str, str]) -> None:
    """Adds the version of the installed distribution that a module belongs to."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("gristmill", "__main__") or f"version of {top}" in found:
        return
    from importlib.metadata import distribution, version

    for name in _distributions(top):
        told = distribution(name).read_text("METADATA")
        found[f"version of {name}"] = version(name) if told is None else _version_in(told) or version(name)


@functools.lru_cache(maxsize=256)
def _version_in(told: str) -> str | None:
    """The version that a distribution's metadata tell: parsing them takes a millisecond, and each run asks for many."""
    from email.parser import HeaderParser

    return HeaderParser().parsestr(told)["Version"]


def _distributions(top: str) -> list[str]:
    """The installed distributions that a top-level module belongs to."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution(top)
    except PackageNotFoundError:
        return _by_module().get(top, [])
    return [top]


@functools.lru_cache(maxsize=1)
def _by_module() -> dict[str, list[str]]:
    from importlib.metadata import packages_distributions

    return {k: list(v) for k, v in packages_distributions().items()}


def package_of(module: str) -> str:
    """The outermost package, not counting namespaces, that an installed module belongs to; "" for the user's own files,
    Python's and Gristmill's.
    """
    parts = module.split(".")
    if parts[0] in sys.stdlib_module_names or parts[0] in ("", "gristmill", "__main__") or is_local_module(module):
        return ""
    names = (".".join(parts[: n + 1]) for n in range(len(parts)))
    return next((name for name in names if _root_of(name) is not None), "")


def package_digest(name: str) -> str | None:
    """A digest of the files of an installed package, or module; None if it is not installed here. Files other than code
    count only if they were installed with it: it may have written others itself. For a large package the digests that
    its installer recorded count.
    """
    from importlib.metadata import distribution

    root = _root_of(name)
    if root is None:
        return None
    if on_disk(root).is_file():
        return file_digest(on_disk(root))
    recorded = [file for dist in _distributions(name.partition(".")[0]) for file in distribution(dist).files or ()]
    found = below(root)
    if found is None or len(found) > _MOST_HASHED:
        inside = Path(*name.split("."))
        noted = {str(file): file.hash.value for file in recorded if file.hash and inside in Path(file).parents}
        return table_digest(noted) if noted else TOO_MANY
    known = {os.path.realpath(str(file.locate())) for file in recorded}
    files = [f for f in found if not known or f.suffix in _CODE or os.path.realpath(f) in known]
    return digests_of(root, files, None, name).all


def _root_of(name: str) -> Path | None:
    """The folder of an installed package, or the file of a module; None for a namespace, or if it is not installed."""
    try:
        spec = _spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or spec.origin in (None, "built-in", "frozen"):
        return None
    path = Path(str(spec.origin))
    return path.parent if spec.submodule_search_locations else path

"""How the source of the user's modules builds the value of a name: the same in every process, or in an order that
differs between processes.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from gristmill.fingerprint.modules import ALL, Source, local_file, named, plain_targets, read, through

# Modules of Python that look at nothing but their arguments, and the functions and names that look further.
_STEADY = {
    "collections", "copy", "dataclasses", "decimal", "enum", "fractions", "functools", "itertools", "json", "math",
    "operator", "re", "string", "textwrap", "types", "typing", "unicodedata",
}  # fmt: skip
_OUTSIDE = {
    "__file__", "__name__", "__path__", "__spec__", "hash", "id", "input", "open", "globals", "locals", "vars", "eval",
    "exec", "compile", "__import__",
}  # fmt: skip
# Functions for which the order of a set does not matter, and methods that give another set.
_UNORDERED = {"sorted", "len", "min", "max", "sum", "any", "all", "set", "frozenset", "isinstance", "bool", "print"}
_OF_SETS = {"union", "intersection", "difference", "symmetric_difference"}
_WITH_SETS = {
    *_OF_SETS, "issubset", "issuperset", "isdisjoint", "add", "intersection_update", "difference_update",
    "symmetric_difference_update",
}  # fmt: skip


def is_steady(module: str, name: str) -> bool:
    """Whether, by the source of the modules, a name has the same value wherever they are imported: it is built only
    from constants, from other such names, and by Python's own functions that look at nothing outside.
    """
    for source, what in _making(module, name):
        if isinstance(what, str):
            if source is not None or what.partition(".")[0] not in _STEADY:
                return False
        elif any(
            isinstance(n, (ast.Import, ast.ImportFrom, ast.Global)) or (isinstance(n, ast.Name) and n.id in _OUTSIDE)
            for n in ast.walk(what)
        ):
            return False
    return True


def is_shuffled(module: str, name: str) -> bool:
    """Whether, by the source of the modules, a name's value is built by iterating over a set, whose order differs
    between processes.
    """
    return any(
        source is not None and not isinstance(what, str) and _through_set(what, source)
        for source, what in _making(module, name)
    )


def goes_through_set(module: str, name: str) -> bool:
    """Whether a function of a module itself iterates over a set in this way."""
    file = local_file(module)
    if file is None or file.suffix != ".py":
        return False
    source = read(file, module)
    return any(_through_set(stmt, source) for part in source.names.get(name, ()) for stmt in source.parts[part])


def _making(module: str, name: str) -> Iterator[tuple[Source | None, ast.AST | str]]:
    """The statements that give a name (`a.b` of a class) its value, and those of the names that they use, each with the
    source of its module. For a module that is not the user's, only its name; for a name that a source does not define,
    the source with that name.
    """
    waiting, done = [(module, name)], set[tuple[str, str]]()
    while waiting:
        module, name = waiting.pop()
        if (module, name) in done:
            continue
        done.add((module, name))
        file = local_file(module)
        if file is None or file.suffix != ".py":
            yield None, module
            continue
        source, (top, *inner) = read(file, module), name.split(".")
        other, imported_name = source.imports.get(top, ("", ""))
        if other:
            waiting.append((other, ".".join(filter(None, [imported_name, *inner])) or ALL))
            continue
        if top not in source.names:
            yield source, top
            continue
        done_by = [s for s in source.parts.get("statements", ()) if _mentions(s, top)]
        bound = [s for part in source.names[top] if part != "statements" for s in source.parts[part]]
        for stmt in (*(given for s in bound for given in _giving(s, inner)), *done_by):
            yield source, stmt
            for node in ast.walk(stmt):
                if isinstance(node, ast.Attribute):
                    waiting += through(node, source.imports)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                    if node.id in source.imports:
                        waiting += [source.imports[node.id]] if source.imports[node.id][1] else []
                    elif node.id in source.names:
                        waiting.append((module, node.id))


def _mentions(stmt: ast.stmt, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(stmt))


def _giving(stmt: ast.stmt, inner: list[str]) -> list[ast.stmt]:
    """What gives a name its value, `inner` being its names in a class; the whole statement if that is unclear."""
    for name in inner:
        body = stmt.body if isinstance(stmt, ast.ClassDef) else []
        found = [
            s
            for s in body
            if (isinstance(s, (ast.Assign, ast.AnnAssign)) and name in plain_targets(s))
            or (isinstance(s, ast.ClassDef) and s.name == name)
        ]
        if len(found) != 1:
            return [stmt]
        stmt = found[0]
    return [stmt]


# ---------------------------------------------------------------- sets


def _through_set(stmt: ast.AST, source: Source) -> bool:
    """Whether a statement iterates over a set to build something that has an order."""
    nodes = list(ast.walk(stmt))
    local = {
        n.targets[0].id
        for n in nodes
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) and _is_set(n.value, source, set())
    }
    taken: list[ast.expr] = []
    unordered: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.comprehension) or (isinstance(node, (ast.For, ast.AsyncFor)) and _puts(node.body)):
            taken.append(node.iter)
        elif isinstance(node, ast.Starred):
            taken.append(node.value)
        elif isinstance(node, ast.SetComp):
            unordered |= {id(g.iter) for g in node.generators}
        elif isinstance(node, ast.Call):
            taken += node.args
            if isinstance(node.func, ast.Attribute) and node.func.attr == "pop":
                taken.append(node.func.value)
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            if called in _UNORDERED or getattr(node.func, "attr", "") in _WITH_SETS:
                inner = [g for a in node.args if isinstance(a, (ast.GeneratorExp, ast.ListComp)) for g in a.generators]
                unordered |= {id(a) for a in node.args} | {id(g.iter) for g in inner}
    return any(id(node) not in unordered and _is_set(node, source, local) for node in taken)


_PUTTING = {"append", "appendleft", "extend", "insert", "setdefault", "update"}


def _puts(body: list[ast.stmt]) -> bool:
    """Whether a loop stores its items anywhere: one that only looks, raises or prints creates no order."""
    nodes = [node for stmt in body for node in ast.walk(stmt)]
    return any(
        isinstance(n, (ast.Yield, ast.YieldFrom, ast.AugAssign))
        or (isinstance(n, ast.Subscript) and not isinstance(n.ctx, ast.Load))
        or (isinstance(n, ast.Attribute) and n.attr in _PUTTING)
        for n in nodes
    )


def _is_set(node: ast.expr, source: Source, local: set[str]) -> bool:
    """Whether an expression is a set of items whose hash differs between processes: texts, but not numbers."""
    if isinstance(node, ast.Set):
        return not all(isinstance(e, ast.Constant) and isinstance(e.value, (int, float)) for e in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.Sub, ast.BitXor)):
        return any(_is_set(side, source, local) or _is_keys(side) for side in (node.left, node.right))
    if isinstance(node, ast.Call):
        attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        return attribute in _OF_SETS or (isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset"))
    if isinstance(node, ast.Name):
        module = sys.modules.get("__main__" if source.module == named("__main__") else source.module)
        value = getattr(module, node.id, None)
        return node.id in local or (
            isinstance(value, (set, frozenset)) and not all(isinstance(v, (int, float)) for v in value)
        )
    return isinstance(node, ast.SetComp)


def _is_keys(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("keys", "items")

"""Prompts as Jinja templates over a row's columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gristmill.errors import BadModel
from gristmill.process.extras import require

ROW = "row"  # the whole row, for columns whose names are no identifiers
_WORDS = (bool, type(None))


class Template:
    """A template, checked: `columns` are those it names; with `whole`, it may read any (through `row`). `taken` has the
    names that mean something to Jinja where the template has them, and no column: `row`, `none`, `true`, `false`.
    Raises BadModel for what is not a template, and MissingExtra.
    """

    def __init__(self, text: str, what: str) -> None:
        jinja2 = require("jinja2", "llm", "a prompt")
        from jinja2 import meta, nodes

        from gristmill.models.sandbox import Sandbox

        environment = Sandbox()
        try:
            tree = environment.parsed(text)
            names = meta.find_undeclared_variables(_without_globals(Sandbox()).parse(text))
            self._made = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as e:
            raise BadModel(f"{what}, line {e.lineno}: {e.message}: {_cut(text)!r}") from e
        # `range(3)` is Jinja's, and `{{ range }}` a column.
        named = Counter(node.name for node in tree.find_all(nodes.Name))
        called = Counter(node.node.name for node in tree.find_all(nodes.Call) if isinstance(node.node, nodes.Name))
        if "self" in named:
            raise BadModel(f"{what}: `self` is Jinja's own: write row['self'] for a column of that name")
        theirs = {name for name in environment.globals if called[name] == named[name]}
        read, written = [], 0
        for node in tree.find_all(nodes.Getitem):
            if isinstance(node.node, nodes.Name) and node.node.name == ROW and isinstance(node.arg, nodes.Const):
                read.append(str(node.arg.value))
                written += node.arg.value == ROW
        self.whole = sum(node.name == ROW for node in tree.find_all(nodes.Name)) > len(read)
        self.columns = tuple(sorted((names - theirs - {ROW}).union(read)))
        words = {str(node.value) for node in tree.find_all(nodes.Const) if isinstance(node.value, _WORDS)}
        self.taken = frozenset({*words, *map(str.lower, words), *([ROW] if named[ROW] > written else [])})

    def of(self, row: Mapping[str, Any]) -> str:
        """The text for a row. Raises what the template raises: jinja2.UndefinedError, also for a null that it puts in,
        TypeError, …
        """
        from gristmill.models.sandbox import nulled

        row = nulled(row)
        found: str = self._made.render({**row, ROW: row})
        return found


def _without_globals(environment: Any) -> Any:
    """One that takes no name for Jinja's own."""
    environment.globals.clear()
    return environment


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"

"""Prompts as Jinja templates over a row's columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gristmill.errors import BadModel
from gristmill.process.extras import require

ROW = "row"  # the whole row, for columns whose names are no identifiers


class Template:
    """A template, checked: `columns` are those it names; with `whole`, it may read any (through `row`). Raises BadModel
    for what is not a template, and MissingExtra.
    """

    def __init__(self, text: str, what: str) -> None:
        jinja2 = require("jinja2", "llm", "a prompt")
        from jinja2 import meta, nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        try:
            tree = _without_globals(ImmutableSandboxedEnvironment()).parse(text)
            self._made = environment.from_string(text)
        except jinja2.TemplateSyntaxError as e:
            raise BadModel(f"{what}, line {e.lineno}: {e.message}: {_cut(text)!r}") from e
        # `range(3)` is Jinja's, and `{{ range }}` a column.
        named = Counter(node.name for node in tree.find_all(nodes.Name))
        called = Counter(node.node.name for node in tree.find_all(nodes.Call) if isinstance(node.node, nodes.Name))
        theirs = {name for name in environment.globals if called[name] == named[name]}
        names = meta.find_undeclared_variables(tree) - theirs
        read = [
            str(node.arg.value)
            for node in tree.find_all(nodes.Getitem)
            if isinstance(node.node, nodes.Name) and node.node.name == ROW and isinstance(node.arg, nodes.Const)
        ]
        self.whole = sum(node.name == ROW for node in tree.find_all(nodes.Name)) > len(read)
        self.columns = tuple(sorted((names - {ROW}).union(read)))

    def of(self, row: Mapping[str, Any]) -> str:
        """The text for a row. Raises what the template raises: jinja2.UndefinedError, TypeError, …"""
        found: str = self._made.render({**row, ROW: row})
        return found


def _without_globals(environment: Any) -> Any:
    """One that takes no name for Jinja's own."""
    environment.globals.clear()
    return environment


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"

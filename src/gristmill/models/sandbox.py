"""Jinja as prompts have it: in its sandbox, strict, with a row's values before methods of Python's, and without a text
for what is null.
"""

from __future__ import annotations

import datetime
import decimal
import json
import pprint
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

NULL = "a value that it puts in is null: write what stands for that, as in {{ city or 'unknown' }}"


class Null(jinja2.StrictUndefined):
    """A null of a row: false, equal to none and to no other value, with a default if one is given, and no text."""

    def __bool__(self) -> bool:  # type: ignore[override]
        return False

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return other is None or isinstance(other, Null)

    def __ne__(self, other: object) -> bool:  # type: ignore[override]
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(None)

    def __repr__(self) -> str:
        return "None"  # in a list or an object that is put in as Python writes it


class Sandbox(ImmutableSandboxedEnvironment):
    """What `order.items` and `order['items']` say is the field, if it is no call; a method is not text."""

    def __init__(self) -> None:
        super().__init__(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=_text)
        self.tests["none"] = lambda value: value is None or isinstance(value, Null)
        self.filters.update(tojson=_json, attr=self._attr, pprint=_pretty)

    def parsed(self, text: str) -> nodes.Template:
        """The template, with fields where it has attributes that are not called. Raises TemplateSyntaxError."""
        tree = self.parse(text)
        called = {id(call.node) for call in tree.find_all(nodes.Call)}
        _as_fields(tree, called)
        return tree

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, Mapping):
            return obj[argument] if argument in obj else self.undefined(obj=obj, name=argument)
        return self._no_method(obj, argument, super().getitem(obj, argument))

    def _attr(self, obj: Any, name: str) -> Any:
        """The filter `attr`: of a row's object its field, as everywhere."""
        if isinstance(obj, Mapping):
            return self.getitem(obj, name)
        return self._no_method(obj, name, self.getattr(obj, name))

    def _no_method(self, obj: Any, argument: Any, found: Any) -> Any:
        is_method = callable(found) and not isinstance(found, jinja2.Undefined)
        return self.undefined(obj=obj, name=argument) if is_method else found


def nulled(value: Any) -> Any:
    """A value of a row with Null for each None in it."""
    if value is None:
        return Null(NULL)
    if isinstance(value, Mapping):
        return {key: nulled(item) for key, item in value.items()}
    return [nulled(item) for item in value] if isinstance(value, (list, tuple)) else value


def _as_fields(node: nodes.Node, called: set[int]) -> None:
    for name, value in list(node.iter_fields()):
        if isinstance(value, nodes.Node):
            setattr(node, name, _field(value, called))
        elif isinstance(value, list):
            setattr(node, name, [_field(item, called) if isinstance(item, nodes.Node) else item for item in value])


def _field(node: nodes.Node, called: set[int]) -> nodes.Node:
    _as_fields(node, called)
    if not isinstance(node, nodes.Getattr) or id(node) in called:
        return node
    found = nodes.Getitem(node.node, nodes.Const(node.attr, lineno=node.lineno), node.ctx, lineno=node.lineno)
    assert node.environment is not None
    return found.set_environment(node.environment)


def _text(value: Any) -> Any:
    """What a template puts in. Raises UndefinedError for a null that came of a call."""
    if value is None:
        raise jinja2.UndefinedError(NULL)
    return value


def _json(value: Any, indent: int | None = None) -> str:
    """The filter `tojson`: as a reader sees it, with all letters, and without the escapes that HTML needs."""
    return json.dumps(value, default=_plain, ensure_ascii=False, indent=indent)


def _pretty(value: Any) -> str:
    """The filter `pprint`, which has no text for a null either."""
    return str(value) if isinstance(value, jinja2.Undefined) else pprint.pformat(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Null):
        return None
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")

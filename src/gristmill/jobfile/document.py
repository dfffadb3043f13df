"""YAML text as plain values, read safely and within bounds, with the line of each value.

It is `yaml.safe_load` made stricter: no tags, no key twice, text keys only, limits on size, depth and on what aliases
expand to, and the scalars of YAML 1.2 (`no` is a text, `2026-01-01` is a text, `1e-3` is a number).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from gristmill.errors import BadJob
from gristmill.values import dataclass

Path = tuple[str | int, ...]

# A job file is a page long. The bounds are far above any that a person writes, far below what troubles a machine.
MOST_BYTES = 1 << 20
MOST_DEPTH = 40
MOST_VALUES = 50_000

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_CORE: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    (_NULL, lambda text: None),
    (_BOOL, lambda text: text.lower() == "true"),
    (_INT, lambda text: int(text, 0) if text[:2] in ("0o", "0x") else int(text)),
    (_FLOAT, lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower()))),
)
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Written:
    """A number, or true/false, of a variable, with its spelling, in case it is inserted into a text."""

    text: str
    value: int | float | bool


@dataclass(frozen=True)
class Document:
    """A mapping read from a file called `name`. `places` gives the place of each value (`name:line`), by its path."""

    name: str
    value: dict[str, Any]
    places: Mapping[Path, str]

    def place(self, path: Path) -> str:
        """The place of a value; if it has none of its own, that of the nearest enclosing value."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        within = (place for inside, place in self.places.items() if path and inside[: len(path)] == path)
        return next(within, self.name)


JOB = "a job file is a mapping with `source`, `model` and `sink`"


def read_document(text: bytes, name: str, form: str = JOB, *, empty: bool = False) -> Document:
    """A YAML (or JSON) mapping. Raises BadJob, with the line, for anything that is not one or is out of bounds; `form`
    says what it has to be. An `empty` one is allowed if that is said.
    """
    if len(text) > MOST_BYTES:
        raise BadJob(f"{name}: {len(text):,} bytes, and at most {MOST_BYTES:,} are read: {form}")
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise BadJob(f"{name}: byte {e.start} is not UTF-8: save the file as UTF-8") from None
    reader = _Reader(name)
    value = reader.read(decoded)
    if value is None and empty:
        value = {}
    if not isinstance(value, dict):
        found = "is empty" if value is None else f"holds a {_kind(value)}"
        raise BadJob(f"{name}: {found}: {form}")
    return Document(name, value, {path: f"{name}:{line}" for path, line in reader.lines.items()})


class _Refused(yaml.MarkedYAMLError):
    """YAML that job files may not have."""


class _Composer(yaml.SafeLoader):
    """PyYAML's safe loader up to nodes (it constructs nothing), stopped at a depth and at any tag."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if tag := getattr(event, "tag", None):
            what = f"the tag {tag.replace(_TAG, '!!')} is not allowed: write plain values"
            raise _Refused(problem=what, problem_mark=event.start_mark)
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise _Refused(problem=f"nested more than {MOST_DEPTH} deep", problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _way_out(error: yaml.YAMLError, mark: yaml.Mark | None) -> str:
    """What to look at where a text is not YAML, and where that which is not finished begins."""
    if isinstance(error, _Refused):
        return ""
    context, begun = getattr(error, "context", None), getattr(error, "context_mark", None)
    at = f" that begins in line {begun.line + 1}" if begun and mark and begun.line != mark.line else ""
    what = f", {context.removeprefix('while ')}{at}" if context else ""
    return f"{what}: close what is open, indent alike and without tabs, and quote a text that has : # @ {{ or [ in it"


class _Reader:
    """Turns nodes into values, counting them, because an alias can stand for any number."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Path, int] = {}
        self.left = MOST_VALUES

    def read(self, text: str) -> Any:
        loader = None
        try:
            loader = _Composer(text)
            node = loader.get_single_node()
        except yaml.YAMLError as e:
            mark = getattr(e, "problem_mark", None)
            place = f"{self.name}:{mark.line + 1}:{mark.column + 1}" if mark else self.name
            raise BadJob(f"{place}: {getattr(e, 'problem', None) or e}{_way_out(e, mark)}") from None
        finally:
            if loader is not None:
                loader.dispose()
        return None if node is None else self.value(node, ())

    def value(self, node: yaml.Node, path: Path) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        self.left -= 1
        if self.left < 0:
            raise BadJob(f"{self.name}:{line}: more than {MOST_VALUES:,} values once aliases are written out")
        if len(path) > MOST_DEPTH:
            raise BadJob(f"{self.name}:{line}: nested more than {MOST_DEPTH} deep")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        value = self.scalar(node, line)
        within = path[2:] if path[:1] == ("profiles",) else path
        kept = within[:1] == ("vars",) and len(within) > 1 and path[-1] != "<key>" and isinstance(value, (int, float))
        return Written(node.value, value) if kept else value

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.value == "<<" and key_node.style is None:
                merged.update(self.merge(value_node, path, line))
                continue
            key = self.value(key_node, (*path, "<key>"))
            if not isinstance(key, str):
                raise BadJob(
                    f"{self.name}:{line}: the key {key!r} is a {_kind(key)}: keys must be text, put it in quotes"
                )
            here = (*path, key)
            if key in own:
                raise BadJob(f"{self.name}:{line}: {key!r} appears twice: first in line {self.lines[here]}")
            self.lines[here] = line
            own[key] = self.value(value_node, here)
        return {**merged, **own}

    def merge(self, node: yaml.Node, path: Path, line: int) -> dict[str, Any]:
        value = self.value(node, path)
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, dict) for part in parts):
            raise BadJob(f"{self.name}:{line}: << takes a mapping, or a list of them")
        return {key: item for part in reversed(parts) for key, item in part.items()}

    def scalar(self, node: Any, line: int) -> Any:
        text: str = node.value
        if node.style is not None:
            return text  # in quotes, or a block
        try:
            return next((read(text) for pattern, read in _CORE if pattern.fullmatch(text)), text)
        except ValueError as e:
            raise BadJob(f"{self.name}:{line}: {text[:40]!r} cannot be read: {e}") from None


def _kind(value: Any) -> str:
    names = {dict: "mapping", list: "list", str: "text", bool: "true/false", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes where YAML 1.1 or 1.2 would take it for something else, so that any reader agrees."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # Line breaks in other styles are folded, and PyYAML even loses some of Unicode's: here they are escaped.
    style = '"' if re.search("[\n\r\x85\u2028\u2029\ufeff]", text) else None
    return dumper.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _text)
_Dumper.add_implicit_resolver(_TAG + "float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+0123456789."))
_Dumper.add_implicit_resolver(_TAG + "int", re.compile(f"^(?:{_INT.pattern})$"), list("-+0123456789"))


def write_document(value: Mapping[str, Any]) -> str:
    """A mapping of plain values (dict, list, str, numbers, None) as YAML that `read_document` reads back equal."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)

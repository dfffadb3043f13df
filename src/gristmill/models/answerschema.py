"""Answers as a JSON Schema describes them: what of it is sent, the columns that come from it, and whether an answer is
one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Protocol

import pyarrow as pa

from gristmill.errors import BadModel
from gristmill.job.prompts import is_schema
from gristmill.models.returns import parse_schema
from gristmill.process.extras import require
from gristmill.process.startup import UserCode
from gristmill.values import dataclass

SAID = 3  # of what is wrong with an answer
_SCALARS: Mapping[str, pa.DataType] = {
    "string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_(),
}  # fmt: skip
# What an endpoint does not need, or refuses: names within the schema are put in place.
_LEFT_OUT = {"$schema", "$id", "$ref", "$defs", "$comment", "definitions", "default", "allOf", "anyOf", "oneOf"}


@dataclass(frozen=True)
class Node:
    """A schema without references: of one `kind` of JSON's, an "enum", or "any of" some. `about` is all else that it
    says; of the properties of an object, those that are `optional` may be null here, and were absent there.
    """

    kind: str
    place: str
    about: Mapping[str, Any] = field(default_factory=dict)
    properties: Mapping[str, Node] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    parts: tuple[Node, ...] = ()  # the items of an array, or one of which a value is

    @property
    def null(self) -> bool:
        """Whether a value may be null."""
        if self.kind == "enum":
            return None in self.about["enum"]
        return self.kind == "null" or (self.kind == "any of" and any(part.null for part in self.parts))

    def sent(self) -> dict[str, Any]:
        """The schema as endpoints take it: every property is there, and no other."""
        if self.kind == "any of":
            return {**self.about, "anyOf": [part.sent() for part in self.parts]}
        if self.kind == "enum":
            return dict(self.about)
        if self.kind == "array":
            return {**self.about, "type": "array", "items": self.parts[0].sent()}
        if self.kind != "object":
            return {**self.about, "type": self.kind}
        inside = {name: self._property(name).sent() for name in self.properties}
        return {**self.about, **object_of(inside)}

    def _property(self, name: str) -> Node:
        node = self.properties[name]
        if name not in self.optional or node.null:
            return node
        parts = node.parts if node.kind == "any of" else (node,)
        about = node.about if node.kind == "any of" else {}
        return Node("any of", node.place, about, parts=(*parts, Node("null", node.place)))

    def type(self) -> pa.DataType:
        """Its values as those of a column. Raises BadModel if no type has them."""
        if self.kind in _SCALARS:
            return _SCALARS[self.kind]
        if self.kind == "array":
            return pa.list_(self.parts[0].type())
        if self.kind == "object":
            return pa.struct([pa.field(name, node.type()) for name, node in self.properties.items()])
        if self.kind == "enum":
            found = {_kind_of(value) for value in self.about["enum"] if value is not None}
            kinds = {_SCALARS.get(kind) for kind in found}
        else:
            kinds = {part.type() for part in self.parts if part.kind != "null"}
        if kinds == {pa.int64(), pa.float64()}:
            return pa.float64()
        kind = next(iter(kinds), None)
        if len(kinds) != 1 or kind is None:
            told = ", ".join(sorted(map(str, kinds))) or "nothing but null"
            raise _cannot(
                self.place, f"is one of several types ({told})", "give it one, or make it a property for each"
            )
        return kind

    def present(self, value: Any) -> Any:
        """A value as the schema itself has it: what is null because it is absent is left out."""
        if isinstance(value, dict) and (node := self._of("object")) is not None:
            absent = [n for n in node.optional if n in value and value[n] is None and not node.properties[n].null]
            kept = {name: item for name, item in value.items() if name not in absent}
            return {n: node.properties[n].present(v) if n in node.properties else v for n, v in kept.items()}
        if isinstance(value, list) and (node := self._of("array")) is not None:
            return [node.parts[0].present(item) for item in value]
        return value

    def _of(self, kind: str) -> Node | None:
        parts = self.parts if self.kind == "any of" else (self,)
        return next((part for part in parts if part.kind == kind), None)


def object_of(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object with these properties, all of them, and no others."""
    return {
        "type": "object", "properties": dict(properties), "required": list(properties), "additionalProperties": False
    }  # fmt: skip


def root_of(schema: Mapping[str, Any], titles: bool = True) -> Node:
    """The nodes of a schema, whose root is an object with properties; `titles` are kept. Raises BadModel, naming the
    property, for what has no form as columns.
    """
    found = _Reader(schema, titles).node(schema, "", ())
    if found.kind != "object":
        raise BadModel(f"returns: the schema is of {found.kind}: an answer is an object: make this a property of one")
    return found


class _Reader:
    """Reads the schemas within one, following what they refer to."""

    def __init__(self, root: Mapping[str, Any], titles: bool) -> None:
        self._root = root
        self._left_out = _LEFT_OUT if titles else {*_LEFT_OUT, "title"}

    def node(self, schema: Any, place: str, inside: tuple[str, ...]) -> Node:
        if not isinstance(schema, Mapping):
            raise _cannot(place, f"has the schema {schema!r}", "give it a type")
        if isinstance(ref := schema.get("$ref"), str):
            if ref in inside:
                raise _cannot(place, f"contains itself ({ref})", "a column's type has an end: say how deep it goes")
            beside = {key: item for key, item in schema.items() if key != "$ref"}
            return self.node({**self._named(ref, place), **beside}, place, (*inside, ref))
        about = {key: item for key, item in schema.items() if key not in self._left_out}
        if (whole := schema.get("allOf")) is not None:
            if len(whole) != 1 or not isinstance(whole[0], Mapping):
                raise _cannot(place, "is allOf several schemas", "write them as one")
            return self.node({**whole[0], **{k: v for k, v in schema.items() if k != "allOf"}}, place, inside)
        if (some := schema.get("anyOf") or schema.get("oneOf")) is not None:
            return self._any(some, {k: v for k, v in about.items() if k in ("title", "description")}, place, inside)
        if "const" in about:
            about = {**{k: v for k, v in about.items() if k != "const"}, "enum": [about["const"]]}
        if "enum" in about:
            return Node("enum", place, {**about, "enum": list(about["enum"])})
        kind = about.pop("type", None)
        if isinstance(kind, Sequence) and not isinstance(kind, str):
            return self._any([{**about, "type": one} for one in kind], {}, place, inside)
        return self._typed(kind, schema, about, place, inside)

    def _any(self, some: Sequence[Any], about: Mapping[str, Any], place: str, inside: tuple[str, ...]) -> Node:
        parts = [self.node(one, place, inside) for one in some]
        flat = [inner for part in parts for inner in (part.parts if part.kind == "any of" else (part,))]
        return replace(flat[0], about={**flat[0].about, **about}) if len(flat) == 1 else Node(
            "any of", place, about, parts=tuple(flat)
        )  # fmt: skip

    def _typed(self, kind: Any, schema: Mapping[str, Any], about: Any, place: str, inside: tuple[str, ...]) -> Node:
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema, about, place, inside)
        if kind == "array":
            items = schema.get("items")
            if first := schema.get("prefixItems"):  # of a tuple, whose members have one type
                about = {**about, "minItems": len(first), "maxItems": len(first)}
                if items or any(item != first[0] for item in first):
                    raise _cannot(place, "is a tuple of several types", "make it an object, with a name for each")
                items = first[0]
            about = {key: item for key, item in about.items() if key not in ("items", "prefixItems")}
            if not items:
                raise _cannot(place, "is an array of anything", "give its items a type")
            return Node("array", place, about, parts=(self.node(items, f"{place}[]", inside),))
        if kind in _SCALARS or kind == "null":
            return Node(kind, place, about)
        if kind is None:
            raise _cannot(place, "may be anything", "give it a type")
        raise _cannot(place, f"has the type {kind!r}", f"JSON has {', '.join(_SCALARS)}, array, object and null")

    def _object(self, schema: Mapping[str, Any], about: Any, place: str, inside: tuple[str, ...]) -> Node:
        properties = schema.get("properties")
        if not properties:
            way = "name its properties, or make it an array of objects with a key and a value"
            raise _cannot(place, "is an object with any names", way)
        left = ("properties", "required", "additionalProperties")
        about = {key: item for key, item in about.items() if key not in left}
        nodes = {name: self.node(p, f"{place}.{name}".lstrip("."), inside) for name, p in properties.items()}
        optional = frozenset(nodes).difference(schema.get("required") or ())
        return Node("object", place, about, nodes, optional)

    def _named(self, ref: str, place: str) -> Mapping[str, Any]:
        found: Any = self._root
        for part in ref.removeprefix("#").split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not ref.startswith("#") or not isinstance(found, Mapping):
            raise _cannot(place, f"refers to {ref!r}", "nothing is there: refer to #/$defs/NAME of the same schema")
        return found


class Answers(Protocol):
    """What answers with columns are: the schema that is `sent`, and the `columns`."""

    sent: dict[str, Any]
    columns: pa.Schema

    def held(self, found: dict[str, Any]) -> dict[str, Any]:
        """The columns of an answer. Raises ValueError with what is wrong, in words that a model understands."""
        ...


def answers_in(returns: Mapping[str, Any] | type[Any]) -> Answers:
    """What `returns` describes: names and types, a JSON Schema, or a pydantic class. Raises BadModel, MissingExtra."""
    if isinstance(returns, type):
        return ClassAnswers(returns)
    return SchemaAnswers(returns) if is_schema(returns) else NamedAnswers(returns)


class NamedAnswers:
    """Names and types: every name is in an answer, with a value of its type or null."""

    def __init__(self, returns: Mapping[str, Any]) -> None:
        self.columns = parse_schema(returns)
        self.sent = object_of({field.name: _json_type(field.type, field.name) for field in self.columns})

    def held(self, found: dict[str, Any]) -> dict[str, Any]:
        """See Answers."""
        if lost := [name for name in self.columns.names if name not in found]:
            raise ValueError(f"it has no {lost[0]!r}")
        return {field.name: self._value(found[field.name], field) for field in self.columns}

    def _value(self, value: Any, field: pa.Field) -> Any:
        wanted = _json_type(field.type, field.name)
        wrong = ValueError(f"{field.name!r} is {json.dumps(value)[:100]}, which is not {wanted}")
        try:
            return _typed(value, field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError, LookupError):
            raise wrong from None


class SchemaAnswers:
    """A JSON Schema of the user's, by which answers are checked. Raises BadModel for what is none, and MissingExtra."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        library = require("jsonschema", "llm", "returns as a JSON Schema")
        kind = library.validators.validator_for(schema, default=library.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except library.exceptions.SchemaError as e:
            where = ".".join(map(str, e.absolute_path))
            raise BadModel(f"returns is no JSON Schema{f', at {where}' if where else ''}: {e.message[:300]}") from e
        self._root = root_of(schema)
        self.sent = self._root.sent()
        self.columns = columns_of(self._root)
        self._validator = kind(schema, format_checker=kind.FORMAT_CHECKER)

    def held(self, found: dict[str, Any]) -> dict[str, Any]:
        """See Answers."""
        value = self._root.present(found)
        errors = sorted(self._validator.iter_errors(value), key=lambda e: list(map(str, e.absolute_path)))
        if errors:
            raise ValueError(_listed([(e.absolute_path, e.message) for e in errors]))
        return _in_columns(value, self.columns)


class ClassAnswers:
    """A pydantic class of the user's, which checks answers and makes them whole. Columns have the names of its fields
    (and computed ones), with values as it writes them. Raises BadModel.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        try:
            schema = kind.model_json_schema()
            written = kind.model_json_schema(by_alias=False, mode="serialization")
        except Exception as e:  # pydantic's, and what the class's own methods raise
            raise BadModel(f"returns: {kind.__name__} has no JSON Schema: {str(e).splitlines()[0]}") from e
        self._root = root_of(schema, titles=False)
        self.sent = self._root.sent()
        self.columns = columns_of(root_of(written, titles=False))

    def held(self, found: dict[str, Any]) -> dict[str, Any]:
        """See Answers. The class sees JSON, so that a strict one takes dates as texts."""
        from pydantic import ValidationError

        with UserCode():
            try:
                made = self._kind.model_validate_json(json.dumps(self._root.present(found)))
            except ValidationError as e:
                told = [(error["loc"], error["msg"]) for error in e.errors(include_url=False, include_context=False)]
                raise ValueError(_listed(told)) from None
            written = made.model_dump(mode="json")
        return _in_columns(written, self.columns)


def columns_of(root: Node) -> pa.Schema:
    """A column for each property. Raises BadModel."""
    return pa.schema([pa.field(name, node.type()) for name, node in root.properties.items()])


def _in_columns(value: Mapping[str, Any], columns: pa.Schema) -> dict[str, Any]:
    """The values of columns; absent ones are null. Raises ValueError for a number that its column cannot hold."""
    held = {}
    for column in columns:
        item = value.get(column.name)
        try:
            held[column.name] = _typed(item, column.type, absent=True)
        except (pa.ArrowException, TypeError, ValueError, OverflowError, LookupError) as e:
            raise ValueError(f"{column.name!r} is {json.dumps(item)[:100]}, which is no {column.type}: {e}") from None
    return held


EXACT = 2.0**53  # from here on a float may be another whole number than the one that was written


def _typed(value: Any, kind: pa.DataType, absent: bool = False) -> Any:
    """A value as its type has it, at any depth: not a text for a number or an array, nor a fraction for a whole number,
    and each field of an object, unless it may be `absent`. Raises TypeError and others for one that is not of the JSON
    type.
    """
    if value is None:
        return None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if not isinstance(value, list):
            raise TypeError("not an array")
        return [_typed(item, kind.value_type, absent) for item in value]
    if pa.types.is_struct(kind):
        if not isinstance(value, dict):
            raise TypeError("not an object")
        found = {field.name: value.get(field.name) if absent else value[field.name] for field in kind}
        return {field.name: _typed(found[field.name], field.type, absent) for field in kind}
    if isinstance(value, bool) != pa.types.is_boolean(kind) or isinstance(value, (list, dict)):
        raise TypeError("of another type")
    if pa.types.is_integer(kind):
        if value != int(value):  # which pyarrow would cut
            raise ValueError("not a whole number")
        if isinstance(value, float) and abs(value) >= EXACT:  # 9007199254740993.0 is …992 by now
            raise ValueError("too large for a number with a fraction")
        value = int(value)
    return pa.scalar(value, kind).as_py()


def _json_type(kind: pa.DataType, name: str) -> dict[str, Any]:
    """A type as JSON Schema has it. Raises BadModel for one that JSON does not have."""
    if pa.types.is_boolean(kind):
        return {"type": "boolean"}
    if pa.types.is_integer(kind):
        return {"type": "integer"}
    if pa.types.is_floating(kind):
        return {"type": "number"}
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return {"type": "string"}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return {"type": "array", "items": _json_type(kind.value_type, name)}
    if pa.types.is_struct(kind):
        return object_of({f.name: _json_type(f.type, name) for f in kind})
    raise BadModel(f"returns gives column {name!r} the type {kind}, which JSON does not have: string, int64, float64, "
                   "bool, list<…> and struct<…> are")  # fmt: skip


def _listed(errors: Sequence[tuple[Any, str]]) -> str:
    """The first errors of an answer in words: where, and what."""

    def words() -> Iterator[str]:
        for place, said in errors[:SAID]:
            where = ".".join(map(str, place))
            yield f"{where}: {said[:300]}" if where else said[:300]

    more = f"; and {len(errors) - SAID} more" if len(errors) > SAID else ""
    return "; ".join(words()) + more


def _kind_of(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number"}
    return kinds.get(type(value), type(value).__name__)


def _cannot(place: str, what: str, way: str) -> BadModel:
    where = f"property {place!r}" if place else "the schema"
    return BadModel(f"returns: {where} {what}, which no column's type is: {way}")

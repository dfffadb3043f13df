"""Values checked against type hints by pydantic, with errors in words: what was received and what is expected."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BeforeValidator, TypeAdapter, ValidationError, WithJsonSchema, WrapValidator

from gristmill.errors import BadJob
from gristmill.job.secret import Secret


def field_type(hint: Any) -> Any:
    """A dataclass field's type as a job file takes it: one text stands for a list of one, and secrets stay secrets."""
    if hint is str:
        return Annotated[str, WrapValidator(_text)]
    if hint is int:
        return Annotated[int, BeforeValidator(_no_bool)]
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        parts = tuple(part for part in parts if get_origin(part) is not type)  # a file has no classes, but their names
        return Union[tuple(field_type(part) for part in parts)]  # noqa: UP007
    if origin is tuple and parts[1:] == (Ellipsis,):
        item: Any = field_type(parts[0])
        return Annotated[tuple[item, ...], BeforeValidator(_listed), WithJsonSchema(_one_or_many(parts[0]))]
    if origin is tuple:
        return tuple[tuple(field_type(part) for part in parts)]  # type: ignore[misc]
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return dict[str, field_type(parts[1]) if parts else Any]  # type: ignore[misc]
    return hint


def _text(value: Any, handler: Any) -> Any:
    checked = handler(value)
    return value if isinstance(value, Secret) else checked


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("is true/false, but a whole number is needed")
    return value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _one_or_many(hint: Any) -> dict[str, Any]:
    if hint is not str:
        return {"type": "array"}
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def check(hint: Any, value: Any, said: str) -> Any:
    """`value` converted to the type `hint`. Raises BadJob, whose message begins with `said`, if it does not fit."""
    try:
        return TypeAdapter(field_type(hint)).validate_python(value)
    except ValidationError as e:
        raise BadJob(f"{said}: {expected(value, e.errors())}") from None


# pydantic's error types, in the words of a person who writes a job.
_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "string": "a text (in quotes)",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "mapping": "a mapping",
    "model": "a mapping",
    "none": "null",
}


def expected(value: Any, errors: Iterable[Mapping[str, Any]]) -> str:
    """What is wrong with one value: the errors of all types that it could have, in one sentence."""
    words: list[str] = []
    for error in errors:
        kind = str(error["type"])
        family = kind.partition("_")[0]
        if kind in ("literal_error", "enum"):
            word = str(error["ctx"]["expected"])
        elif family in _WORDS and kind.endswith(
            ("_type", "_parsing", "_from_float", "_attributes_type", "_parsing_size")
        ):
            word = _WORDS[family]
        elif kind == "union_tag_not_found":  # a section whose key says what it is
            word = _WORDS["mapping"]
        elif kind in ("too_short", "too_long"):
            word = f"a list of {error['ctx'].get('min_length') or error['ctx'].get('max_length')}"
        elif kind == "value_error":
            word = "a whole number"
        else:
            word = str(error["msg"])
        if word not in words:
            words.append(word)
    return f"{shortened(value)} does not fit: give {' or '.join(words)}"


def shortened(value: Any) -> str:
    """A value as a message shows it, cut at 60 characters."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:59] + "…"

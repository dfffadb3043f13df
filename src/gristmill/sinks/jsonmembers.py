"""The members of a JSON object as the text that they are written as, so that passing them on changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import NoReturn

__all__ = ["members", "quoted", "value_of"]

_SPACE = re.compile(r"[ \t\n\r]*")


def members(text: str) -> dict[str, str]:
    """The text of each member's value, by name. Raises ValueError, in words, for what is not one JSON object."""
    found: dict[str, str] = {}
    at = _expected(text, 0, "{")
    end = text[at : at + 1] == "}"
    while not end:
        name, at = _decoded(text, at)
        if not isinstance(name, str):
            raise ValueError("the name of a member is not text")
        start = _expected(text, at, ":")
        _, at = _decoded(text, start)
        found[name] = text[start:at]
        at = _skipped(text, at)
        end = text[at : at + 1] == "}"
        if not end:
            at = _expected(text, at, ",")
    if _expected(text, at, "}") != len(text):
        raise ValueError("something follows the object")
    return found


def quoted(lines: bytes, names: Collection[str]) -> bytes:
    """Lines of objects, with the values of these members as texts of JSON instead of JSON."""
    return b"".join(_quoted(line.decode(), names) for line in lines.splitlines())


def value_of(text: str) -> object:
    """What a text of JSON means. Raises ValueError, in words."""
    value, at = _decoded(text, _skipped(text, 0))
    if _skipped(text, at) != len(text):
        raise ValueError("something follows the value")
    return value


def _quoted(line: str, names: Collection[str]) -> bytes:
    told = (
        f"{json.dumps(name)}:{json.dumps(text) if name in names and text != 'null' else text}"
        for name, text in members(line).items()
    )
    return f"{{{','.join(told)}}}\n".encode()


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _decoded(text: str, at: int) -> tuple[object, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _expected(text: str, at: int, sign: str) -> int:
    """Where what follows the sign begins."""
    at = _skipped(text, at)
    if text[at : at + 1] != sign:
        raise ValueError(f"{sign!r} is expected at character {at}")
    return _skipped(text, at + 1)


def _skipped(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()

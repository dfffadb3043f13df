"""Names of files that nobody wrote yet: what is known of them, and which of them a source would read."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import product

from gristmill.sources import patterns

Token = tuple[str, bool]
"""One character of these (of all, if it is empty), and whether it stands for any number of them, also for none."""
Name = tuple[Token, ...]
"""A name of a file or a folder, as far as it is known."""

_MANY = "*"
_CHARACTERS = "".join(sorted(set(string.printable) - set("/" + string.whitespace), key=lambda c: (not c.isalnum(), c)))
_FILE = re.compile(r"[^=]*(?:\.|\[\.\])[A-Za-z]\w*")
ANYTHING: Name = (("", False), ("", True))


def text(known: str) -> Name:
    """Just these characters."""
    return tuple((c, False) for c in known)


def number(digits: int) -> Name:
    """So many digits, or more."""
    return ((string.digits, False),) * digits + ((string.digits, True),)


def read(uri: str, folder: str, below: Sequence[Name]) -> bool:
    """Whether a source, a folder, a pattern or a file, would read any file with such a path below a folder. That
    patterns of files (`*.parquet`) also match folders named so is left out: whose values end so is seen once they are.
    """
    parts = (_MANY, *uri.split("/"))
    folders = [part for part in parts if not _FILE.fullmatch(part)]
    of = (*(folders for _ in below[1:]), parts)
    names = [
        dict.fromkeys(e for p in ps if (e := example(p, name)) is not None) for ps, name in zip(of, below, strict=False)
    ]
    return any(uri == path or patterns.reads(uri, path) for path in map("/".join, product([folder], *names)))


@lru_cache(4096)
def example(pattern: str, name: Name) -> str | None:
    """One of the names that a component of a pattern matches; None if it matches none of them."""
    if not patterns.MAGIC.search(pattern):
        return pattern if _names(name).fullmatch(pattern) else None
    wanted = _tokens(pattern)
    rest: dict[tuple[int, int], str | None] = {}  # by where both begin
    for i in range(len(wanted), -1, -1):
        for j in range(len(name), -1, -1):
            found = "" if (i, j) == (len(wanted), len(name)) else None
            if i < len(wanted) and wanted[i][1]:
                found = rest[i + 1, j]
            if found is None and j < len(name) and name[j][1]:
                found = rest[i, j + 1]
            if found is None and i < len(wanted) and j < len(name) and not (wanted[i][1] and name[j][1]):
                after = rest[i + (not wanted[i][1]), j + (not name[j][1])]
                common = _common(wanted[i][0], name[j][0])
                found = common + after if common and after is not None else None
            rest[i, j] = found
    return rest[0, 0]


@cache
def _names(name: Name) -> re.Pattern[str]:
    some = (f"[{re.escape(characters)}]" if characters else "." for characters, _ in name)
    return re.compile("".join(one + "*" * many for one, (_, many) in zip(some, name, strict=True)), re.DOTALL)


@cache
def _common(one: str, other: str) -> str:
    """A character of both; empty if there is none."""
    if not one or not other:
        return (one or other or _CHARACTERS)[0]
    return next((c for c in one if c in other), "")


def _tokens(pattern: str) -> list[Token]:
    """A component of a pattern, as sources read it."""
    out: list[Token] = []
    i = 0
    while i < len(pattern):
        close = pattern.find("]", i + 2) if pattern[i] == "[" else -1
        if close > 0:
            out.append((_among(pattern[i + 1 : close]), False))
            i = close
        else:
            out.append({"*": ("", True), "?": ("", False)}.get(pattern[i], (pattern[i], False)))
        i += 1
    return out


def _among(inside: str) -> str:
    """Characters that such brackets in a pattern stand for: not all, but some."""
    wanted = ("^" + inside[1:] if inside[0] in "!^" else inside).replace("\\", r"\\")
    try:
        return "".join(c for c in dict.fromkeys(_CHARACTERS + inside) if re.match(f"[{wanted}]", c))
    except re.error:  # as it is listed, the pattern is refused
        return ""

"""Which files a folder or a pattern stands for, and what is there instead of something that is not."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator

from gristmill.errors import BadSource
from gristmill.files.disk import META
from gristmill.job.uris import QUERY, local_path, redact
from gristmill.sources.listing import Entry, Listing, LocalListing

MAGIC = re.compile(r"[*?\[]")
_IGNORED_ENDS = (".tmp", ".crc")
_WILD = "*?]"  # what ends a component of a pattern that stands for several names
# `_x` and `.x` are hidden, and the folder `x.tmp`; `_day=1` and `day=.tmp` are partitions.
_SHOWN = rf"(?![._](?![^/]*=))(?![^/=]*(?:{'|'.join(map(re.escape, _IGNORED_ENDS))})/)"
_DONE = "".join(f"(?<!{re.escape(end)})" for end in _IGNORED_ENDS)
_BELOW = f"(?:/{_SHOWN}[^/]+)*"  # files below a folder that matches


def files_of(listing: Listing, path: str, shown: str) -> tuple[str, list[tuple[str, Entry]]]:
    """The files that a path, a folder or a glob stands for, sorted, and the part of the path that has no wildcards; no
    files of a folder that is a sink. `shown` is what the person wrote.
    """
    entry = listing.look(path)
    if entry is not None and not entry.folder:
        return path, [(path, entry)]
    if entry is not None:
        found = sorted(_below(listing, path), key=lambda f: f[0])
        if not found and listing.look(f"{path}/{META}") is None:
            raise BadSource(
                f"{shown}: the folder holds no files (names that start with _ or . are not read), and files say which "
                "columns there are: run again once there is one; allow_empty is for files without rows"
            )
        return path, found
    if MAGIC.search(path):
        base, parts = _fixed(path)
        matched = dict(_expand(listing, base, parts))
        if not matched:
            raise BadSource(f"{shown}: the pattern matches no file; {_nearby(listing, path)}")
        return base, sorted(matched.items())
    raise BadSource(f"{shown}: no such file or folder; {_nearby(listing, path)}")


def _hidden(name: str) -> bool:
    """Whether a folder is not read; nor is a file of that name. A value of a partition may be anything."""
    return "=" not in name and _ignored(name)


def _ignored(name: str) -> bool:
    """Whether a file is not read."""
    return (name.startswith(("_", ".")) and "=" not in name) or name.endswith(_IGNORED_ENDS)


def _unread(below: str) -> bool:
    """Whether a file with this path below a source is not read."""
    *folders, name = _names(below)
    return _ignored(name) or any(map(_hidden, folders))


def _below(listing: Listing, folder: str) -> Iterator[tuple[str, Entry]]:
    """All files below a folder that are not ignored, with their paths."""
    start = length(folder)
    for path, entry in listing.tree(folder, _hidden):
        if not _unread(path[start:]):
            yield path, entry


def _names(path: str) -> list[str]:
    return path.replace(os.sep, "/").split("/")


def hive(below: str) -> str:
    """The `name=value` folders of a path below what the source names."""
    return "/".join(name for name in _names(below)[:-1] if name.find("=") > 0) if "=" in below else ""


def _fixed(pattern: str) -> tuple[str, list[str]]:
    """The folder before the first wildcard, and the components from there on."""
    parts = _names(pattern)
    fixed = next(i for i, part in enumerate(parts) if MAGIC.search(part))
    return "/".join(parts[:fixed]) or ("/" if pattern.startswith("/") else ""), parts[fixed:]


def _expand(listing: Listing, base: str, parts: list[str]) -> Iterator[tuple[str, Entry]]:
    """Files that match, and all files below folders that match. `**` stands for any number of folders."""
    part, rest = parts[0], parts[1:]
    if part == "**":
        wanted = _regex(rest or ["*"])
        start = length(base)
        hidden = any(part.startswith(("_", ".")) or part.endswith(_IGNORED_ENDS) for part in rest)
        for path, entry in listing.tree(base, _never if hidden else _hidden):
            if wanted.fullmatch(path[start:].replace(os.sep, "/")) and (hidden or not path.endswith(_IGNORED_ENDS)):
                yield path, entry
        return
    if not MAGIC.search(part):
        path = _join(base, part)
        there = listing.look(path)
        if there is not None:
            yield from _matched(listing, path, there, rest)
        return
    wanted = re.compile(_part(part))
    for entry in listing.entries(base, lambda name: wanted.fullmatch(name) is not None):
        if not entry.folder and part[-1] in _WILD and entry.name.endswith(_IGNORED_ENDS):
            continue
        yield from _matched(listing, _join(base, entry.name), entry, rest)


def _matched(listing: Listing, path: str, entry: Entry, rest: list[str]) -> Iterator[tuple[str, Entry]]:
    if rest:
        if entry.folder:
            yield from _expand(listing, path, rest)
    elif entry.folder:
        yield from _below(listing, path)
    else:
        yield path, entry


def _never(_: str) -> bool:
    return False


def length(folder: str) -> int:
    """Where the part below `folder` begins in a path below it."""
    return len(folder.rstrip("/")) + 1 if folder else 0


def _join(base: str, name: str) -> str:
    return f"{base}{'' if base.endswith('/') or not base else '/'}{name}"


def _regex(parts: list[str]) -> re.Pattern[str]:
    """What follows a `**`, as one expression over the path below it; files below a folder that matches count too."""
    folders = f"(?:{_SHOWN}[^/]+/)*"
    out = folders
    for part in parts[:-1]:
        out += folders if part == "**" else _part(part) + "/"
    last = _part("*" if parts[-1] == "**" else parts[-1])
    return re.compile(out + last + _BELOW)


def _part(part: str) -> str:
    """One component of a glob as an expression. A wildcard at the start does not match hidden or unfinished files."""
    out, i = "", 0
    while i < len(part):
        c = part[i]
        close = part.find("]", i + 2) if c == "[" else -1
        if c == "*":
            out += "[^/]*"
        elif c == "?":
            out += "[^/]"
        elif close > 0:
            inside = part[i + 1 : close].replace("\\", r"\\")
            out += "[" + ("^" + inside[1:] if inside[0] in "!^" else inside) + "]"
            i = close
        else:
            out += re.escape(c)
        i += 1
    start = _SHOWN if part[0] in "*?[" else ""
    return start + (f"(?:(?=[^/]*=){out}|{out}{_DONE})" if part[-1] in _WILD else out)


def reads(uri: str, path: str) -> bool:
    """Whether a folder or a pattern would read a file that appears at `path`, which is taken literally."""
    uri = QUERY.split(uri, maxsplit=1)[0].rstrip("/")
    if not MAGIC.search(uri) or ("://" not in uri and os.path.isdir(uri)):
        below = path.startswith(f"{uri}/") and ("://" in uri or os.path.isdir(uri))
        return below and not _unread(path[len(uri) + 1 :])
    base, parts = _fixed(uri)
    if not path.startswith(f"{base}/"):
        return False
    last = parts[-1]
    if path.endswith(_IGNORED_ENDS) and (last[-1] in _WILD or not re.fullmatch(_part(last), path.rpartition("/")[2])):
        return False
    deep = parts.index("**") if "**" in parts else len(parts)
    wanted = "/".join(map(_part, parts[:deep])) + _BELOW
    if deep < len(parts):
        wanted = "".join(_part(part) + "/" for part in parts[:deep]) + _regex(parts[deep + 1 :] or ["*"]).pattern
    return re.fullmatch(wanted, path[len(base.rstrip("/")) + 1 :]) is not None


def nearby(uri: str) -> str:
    """What is on this machine instead of something that is not there, in words."""
    return _nearby(LocalListing(), local_path(uri))


def _nearby(listing: Listing, path: str) -> str:
    """What is there instead: the nearest folder that exists, and similar names in it."""
    if path.startswith(("http://", "https://")):
        return "check the address"  # a web server has no folders
    parts = _names(path)
    fixed = next((i for i, part in enumerate(parts) if MAGIC.search(part)), len(parts))
    for depth in range(min(fixed, len(parts) - 1), 0, -1):
        folder = "/".join(parts[:depth]) or "/"
        above = listing.look(folder)
        if above is None or not above.folder:
            continue
        try:
            names = sorted(e.name for e in listing.entries(folder, lambda name: not _ignored(name)))
        except (BadSource, OSError):
            return f"{redact(folder)} exists"
        wanted = parts[depth] if depth < len(parts) else ""
        alike = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
        if alike:
            return f"{redact(folder)} has {', '.join(repr(a) for a in alike)}"
        if not names:
            return f"{redact(folder)} is empty"
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return f"{redact(folder)} exists and holds {', '.join(names[:5])}{more}"
    return "nothing above it exists either" if len(parts) > 1 else "check the path"

"""The files of values that are read only on demand: datasets of pyarrow and lazy frames of polars."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MOST_BYTES = 64 << 30  # together; up to this size they are compared by content


def parts(value: Any) -> list[Any]:
    """What names the files on this machine that a value of pyarrow or polars would read: paths, or other such values.
    Empty if they are too large to be read for comparison: then `times` distinguishes them.
    """
    found = list(_parts(value))
    return [] if _size(found) > _MOST_BYTES else found


def times(value: Any) -> str | None:
    """Names, sizes and times of a value's files if these are too large for `parts`, "" for all other values; None if
    nothing tells which files it reads.
    """
    if _is_frame(value) and (_plan(value) is None or '"PythonScan":' in str(_plan(value))):
        return None
    found = list(_parts(value))
    if _size(found) <= _MOST_BYTES:
        return ""
    return repr([(str(path), stat.st_size, stat.st_mtime_ns) for path in found if (stat := _stat(path)) is not None])


def _is_frame(value: Any) -> bool:
    polars = sys.modules.get("polars")
    return polars is not None and isinstance(value, polars.LazyFrame)


def _parts(value: Any) -> Iterator[Any]:
    if _is_frame(value):
        yield from _scanned(_plan(value) or "")
    elif hasattr(value, "children") and hasattr(value, "get_fragments"):  # several datasets as one
        yield from value.children
    elif hasattr(value, "filesystem") and (hasattr(value, "files") or hasattr(value, "path")):
        root = _root(value.filesystem)
        if root is not None:
            yield from (Path(root, path) for path in (value.files if hasattr(value, "files") else [value.path]))


def _root(fs: Any) -> str | None:
    """The root of a pyarrow file system's paths on this machine; None if they are not on this machine."""
    if fs.type_name == "subtree":
        above = _root(fs.base_fs)
        return None if above is None else os.path.join(above, fs.base_path)
    return "" if fs.type_name == "local" else None


def _plan(frame: Any) -> str | None:
    """The plan as text, in which paths are complete; None if it cannot be had."""
    import polars

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, but nothing else does this
        try:
            return str(frame.serialize(format="json"))
        except polars.exceptions.PolarsError:
            return None


def _scanned(plan: str) -> Iterator[Path]:
    key, decoder = '"Paths":', json.JSONDecoder()
    at = plan.find(key)
    while at >= 0:
        found, end = decoder.raw_decode(plan, at + len(key))
        for item in found:
            path = Path(item["inner"] if isinstance(item, dict) else item)
            yield path / "**" / "*" if path.is_dir() else path
        at = plan.find(key, end)


def _size(found: list[Any]) -> int:
    return sum(stat.st_size for path in found if isinstance(path, Path) and (stat := _stat(path)) is not None)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None

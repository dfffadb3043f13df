"""Columns taken from the names of a source's folders (`lang=en/…`): one value for all rows of a file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from gristmill.errors import BadSource
from gristmill.shards.ranges import as_ranges
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from gristmill.sinks.partition import NULL
from gristmill.sources.contract import Block, Numbered, Reading, SourceFormat, Where
from gristmill.sources.schema import MIXED, from_names
from gristmill.values import dataclass

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Hive", "narrowed", "wanted_columns", "with_columns"]

Kinds = Mapping[str, "pa.DataType"]

_OURS = b"gristmill.folder"  # field metadata: the column is a folder's, not the file's; value: how it was typed
_GUESSED = b"guessed"
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,18}")


class Hive:
    """A source format whose files also have the columns of their folders; `name` and `suffixes` are the wrapped
    format's.

    `inspect` describes the file alone: the type of a folder's column depends on all files (`with_columns`).
    """

    def __init__(self, form: SourceFormat) -> None:
        self.form = form
        self.name = form.name
        self.suffixes = form.suffixes
        self.compressed, self.by_bytes = form.compressed, form.by_bytes
        self.written, self.typed = form.written, form.typed

    def inspect(self, file: SourceFile, fs: Any, options: Mapping[str, Any]) -> FileInfo:
        return self.form.inspect(file, fs, _without(options, _values(file)))

    def read(self, info: FileInfo, fs: Any, ranges: np.ndarray, reading: Reading) -> Iterator[Block]:
        """The file's blocks, each with a constant column for each value that a folder gives. Where these alone decide
        that a condition does not hold, and positions count rows, the file is not opened.
        """
        import pyarrow as pa

        said = {n: v for n, v in _values(info.file).items() if n in reading.schema.names}
        names = list(reading.schema.names if reading.columns is None else reading.columns)
        asked = () if reading.where is None else reading.where.columns
        if said.keys().isdisjoint([*names, *asked]):
            yield from self.form.read(info, fs, ranges, reading)
            return
        schema = reading.schema
        values = {n: _typed(info.file.path, n, v, schema.field(n).type) for n, v in said.items()}
        if reading.where is not None and asked and said.keys() >= set(asked):  # it is the same for all rows
            if not reading.where.mask(pa.table([pa.repeat(values[n], 1) for n in asked], names=list(asked)))[0]:
                if isinstance(self.form, Numbered) and self.form.numbered:  # none is read
                    none = schema.empty_table().select(names)
                    yield Block(none, np.zeros(0, dtype=np.int64), int(np.diff(as_ranges(ranges)).sum()))
                    return
            else:
                reading, asked = replace(reading, where=None), ()
        own = pa.schema([f for f in schema if f.name not in said], metadata=schema.metadata)
        needed = tuple(n for n in asked if n not in said) or _least(own, self.form)
        where = None if reading.where is None else _Where(reading.where, values, needed)
        columns = (
            None if reading.columns is None else tuple(n for n in names if n not in said) or _least(own, self.form)
        )
        inner = replace(reading, columns=columns, schema=own, where=where, options=_without(reading.options, said))
        for block in self.form.read(info, fs, ranges, inner):
            yield replace(block, rows=_beside(block.rows, names, values))


@dataclass
class _Where:
    """A condition over rows that lack the folders' columns; `columns` are the file's to read for it, at least one."""

    where: Where
    values: Mapping[str, pa.Scalar]
    columns: tuple[str, ...]

    def mask(self, rows: pa.Table) -> np.ndarray:
        return self.where.mask(_beside(rows, self.where.columns or self.columns, self.values))

    def close(self) -> None:
        self.where.close()


def _beside(rows: pa.Table, names: Sequence[str], values: Mapping[str, pa.Scalar]) -> pa.Table:
    """The columns `names`: constant if in `values`, else those of the rows."""
    import pyarrow as pa

    arrays = [pa.repeat(values[n], rows.num_rows) if n in values else rows.column(n) for n in names]
    return pa.table(arrays, names=list(names))


def _least(schema: pa.Schema, form: SourceFormat) -> tuple[str, ...]:
    """The file's column to read if only folders' columns are wanted, so that rows can be counted: a column of numbers
    or, in text formats, of text, which every value fits.
    """
    import pyarrow as pa

    sound = [f for f in schema if MIXED not in (f.metadata or {})]
    return tuple(f.name for f in sorted(sound, key=lambda f: pa.types.is_primitive(f.type) != form.typed)[:1])


def _without(options: Mapping[str, Any], names: Mapping[str, Any]) -> Mapping[str, Any]:
    """The format's options, `types` without the columns of folders."""
    types = options.get("types")
    if not isinstance(types, Mapping) or types.keys().isdisjoint(names):
        return options
    left = {n: kind for n, kind in types.items() if n not in names}
    return {**{n: v for n, v in options.items() if n != "types"}, **({"types": left} if left else {})}


# ---------------------------------------------------------------- planning


def with_columns(infos: Sequence[FileInfo], types: Any, stored: Mapping[str, Kinds]) -> list[FileInfo]:
    """What is known of the files of a source, with the columns of their folders after the files' own.

    Their types are those of `types`, else those in `stored` (by path: the types of the folder columns of the sink that
    a file belongs to), else int64 if all the folders' names have whole numbers in canonical form, else text. A column
    that the file itself also has cannot be read.
    """
    types = from_names(types, "source")
    told = [{**stored.get(info.file.path, {}), **types} for info in infos]
    kinds = _inferred({(n, v) for info, t in zip(infos, told, strict=True) for n, v in _said(info) if n not in t})
    return [_with(info, kinds, t) for info, t in zip(infos, told, strict=True)]


def narrowed(infos: Sequence[FileInfo], schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """The schema of some files of a source, with the types of folders' columns as if these were all the files."""
    import pyarrow as pa

    ours = {n for info in infos for n in names if n in info.schema.names and _mark(info.schema.field(n)) == _GUESSED}
    kinds = _inferred({(n, v) for info in infos for n, v in _said(info) if n in ours})
    return pa.schema([f.with_type(kinds.get(f.name, pa.string())) if f.name in ours else f for f in schema])


def _inferred(values: Collection[tuple[str, str | None]]) -> Kinds:
    """The types of columns with these values: int64 if all are whole numbers; columns left out are text."""
    import pyarrow as pa

    text = {name for name, value in values if value is not None and not _whole(value)}
    return {name: pa.int64() for name, value in values if value is not None and name not in text}


def _said(info: FileInfo) -> Collection[tuple[str, str | None]]:
    return _values(info.file).items()


def wanted_columns(
    infos: Sequence[FileInfo], asked: Collection[str], schema: pa.Schema
) -> tuple[list[FileInfo], tuple[str, ...]]:
    """The files, and the folders' columns that are asked for; if none is, the files are given without their folders."""
    names = {name for info in infos for name in _values(info.file) if name in asked and name in schema.names}
    if names:
        return list(infos), tuple(sorted(names))
    return [replace(info, file=replace(info.file, folders="")) for info in infos], ()


def _whole(text: str) -> bool:
    return _WHOLE.fullmatch(text) is not None and -(1 << 63) <= int(text) < 1 << 63


def _mark(field: pa.Field) -> bytes | None:
    found: bytes | None = (field.metadata or {}).get(_OURS)
    return found


def _with(info: FileInfo, kinds: Kinds, told: Kinds) -> FileInfo:
    """`info` with the folders' columns that the file has now, in place of any that an earlier plan gave it."""
    import pyarrow as pa

    said, before = _values(info.file), {f.name for f in info.schema if _mark(f) is not None}
    fields = {f.name: f for f in info.schema if f.name not in before}
    nulls = None if info.nulls is None else {n: count for n, count in info.nulls.items() if n not in before}
    for name, text in said.items() if fields or info.extent else ():  # an empty file is compatible with any other
        kind = told[name] if name in told else kinds.get(name, pa.string())
        if why := _twice(info.file, name, fields):
            fields[name] = pa.field(name, pa.string(), metadata={MIXED: why.encode()})
            continue
        _typed(info.file.path, name, text, kind)
        fields[name] = pa.field(name, kind, metadata={_OURS: b"told" if name in told else _GUESSED})
        if nulls is not None:
            nulls[name] = (info.rows or 0) if text is None else 0
    return replace(info, schema=pa.schema(list(fields.values()), metadata=info.schema.metadata), nulls=nulls)


def _twice(file: SourceFile, name: str, fields: Mapping[str, Any]) -> str:
    """Why a folder's column may have more than one value; nothing if it cannot."""
    folders = [segment for segment in file.folders.split("/") if _split(segment)[0] == name]
    also = "in the file" if name in fields else f"in {folders[1]}" if len(folders) > 1 else ""
    if not also:
        return ""
    return (
        f"{file.path}: column {name!r} is in a folder's name ({folders[0]}) and also {also}: rename one of the two; or "
        f"list the {name}=… folders one by one as the source (the name of a listed folder is not a column); or leave "
        "the column out by listing the others (--columns, columns=)"
    )


# ---------------------------------------------------------------- values


def _split(segment: str) -> tuple[str, str]:
    name, _, value = segment.partition("=")
    return unquote(name, errors="strict"), unquote(value, errors="strict")


@lru_cache(maxsize=1 << 14)
def _read(folders: str) -> dict[str, str | None]:
    found = map(_split, folders.split("/"))
    return {name: None if value == NULL else value for name, value in found}


def _values(file: SourceFile) -> Mapping[str, str | None]:
    """The values in the names of a file's folders, by column. Raises BadSource."""
    try:
        return _read(file.folders) if file.folders else {}
    except UnicodeDecodeError:
        raise BadSource(
            f"{file.path}: a folder's name ({file.folders}) decodes to bytes that are not valid UTF-8, so it cannot be "
            "a column: rename the folder"
        ) from None


def _typed(path: str, name: str, text: str | None, kind: pa.DataType) -> pa.Scalar:
    """A folder's value. Raises BadSource if it is not of this type."""
    import pyarrow as pa

    try:
        if text is None:
            return pa.scalar(None, kind)
        if pa.types.is_time(kind):  # pyarrow cannot cast text to these
            return pa.array([f"1970-01-01 {text}"]).cast(pa.timestamp(kind.unit)).cast(kind)[0]
        return pa.array([text]).cast(kind)[0]
    except (pa.ArrowException, NotImplementedError) as e:
        raise BadSource(
            f"{path}: its folder says {name}={text}, which is not of type {kind}: give the column another type "
            f"(types={{{name!r}: 'string'}})"
        ) from e

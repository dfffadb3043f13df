"""What planning learned about the source's files, kept beside the plan: a later run opens only what has changed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from gristmill.commit.documents import Seen, SeenSame
from gristmill.commit.generation import Generation, decode_schema, encode_schema, stored_files
from gristmill.errors import CorruptStore
from gristmill.files.disk import join
from gristmill.fingerprint.digests import digest_of
from gristmill.shards.sourcefiles import FileInfo, SourceFile

_LOOKED_AT = b"gristmill.looked_at"  # in the table's metadata: digest of the format and options they were read with
_SAME = "same.json"
_SCHEMAS = b"gristmill.schemas"  # the distinct schemas, referred to by number


class Inspections:
    """Files as earlier plans of one sink found them, valid for those not touched since."""

    def __init__(self, found: Mapping[str, Mapping[str, FileInfo]] | None = None) -> None:
        self._found = found or {}

    def of(self, file: SourceFile, looked_at: str) -> FileInfo | None:
        """What is known of a file inspected this way; None if the file may have been touched."""
        info = self._found.get(looked_at, {}).get(file.path)
        if info is None or not (file.stamp or file.touched):
            return None
        known = (info.file.size, info.file.stamp, info.file.touched)
        return replace(info, file=file) if known == (file.size, file.stamp, file.touched) else None

    @property
    def paths(self) -> frozenset[str]:
        """Of all files in earlier plans."""
        return frozenset().union(*self._found.values())

    def has(self, path: str, looked_at: str) -> bool:
        """Whether a file is in an earlier plan, touched since or not."""
        return path in self._found.get(looked_at, {})


def looked_at(form: str, options: Mapping[str, object]) -> str:
    """A digest of how files are inspected: with different options the same file has different rows."""
    return digest_of({"format": form, **{name: repr(value) for name, value in sorted(options.items())}})


def as_table(infos: Sequence[FileInfo], how: str) -> pa.Table:
    """The inspected files as a table, one row per file, in the plan's order."""
    schemas: dict[str, int] = {}
    numbers = [schemas.setdefault(encode_schema(i.schema), len(schemas)) for i in infos]
    table = pa.table(
        {
            "layout": pa.array([i.layout for i in infos], pa.string()),
            "cuts": _lists([i.cuts for i in infos]),
            "cut_rows": _lists([i.cut_rows for i in infos]),
            "divisible": pa.array([i.divisible for i in infos], pa.bool_()),
            "row_bytes": pa.array([i.row_bytes for i in infos], pa.float64()),
            "nulls": pa.array([None if i.nulls is None else json.dumps(dict(i.nulls)) for i in infos], pa.string()),
            "schema": pa.array(numbers, pa.int32()),
        }
    )
    return table.replace_schema_metadata({_LOOKED_AT: how.encode(), _SCHEMAS: json.dumps(list(schemas)).encode()})


def of_generations(members: Iterable[Generation]) -> Inspections:
    """What the stored plans of these generations know; the latest takes precedence. Plans that cannot be read are
    skipped: the run reports the damage if it needs them. A file that was touched since, and found to hold what shards
    read of it, may be another one where none did: it is inspected again.
    """
    found: dict[str, dict[str, FileInfo]] = {}
    for member in members:
        if member.planned:
            table = stored_files(member)
            if table is not None:
                how = (table.schema.metadata or {}).get(_LOOKED_AT, b"").decode()
                found.setdefault(how, {}).update(_infos(table))
    return Inspections(found)


def planned_files(members: Iterable[Generation]) -> dict[str, FileInfo]:
    """The files of stored plans by path; the latest takes precedence."""
    found: dict[str, FileInfo] = {}
    for table in map(stored_files, members):
        found.update({} if table is None else _infos(table))
    return found


# ---------------------------------------------------------------- files that were touched, and found to be the same


def last_seen(members: Iterable[Generation]) -> dict[str, Seen]:
    """How files looked when they were last known to hold what the plans' shards read, by path."""
    found: dict[str, Seen] = {}
    for member in members:
        table = stored_files(member)
        if table is not None:
            path, *seen = (table.column(name).to_pylist() for name in ("path", "size", "stamp", "touched"))
            found.update(zip(path, zip(*seen, strict=True), strict=True))
        found.update(_noted(member))
    return found


def noted_same(members: Iterable[Generation]) -> set[str]:
    """Files that have been touched since they were planned, but were found to be the same."""
    return {path for member in members for path in _noted(member)}


def note_same(member: Generation, files: Sequence[SourceFile]) -> None:
    """Note beside a plan how these files look now: they were read again and still hold what its shards read."""
    if files:
        noted = SeenSame({**_noted(member), **{f.path: (f.size, f.stamp, f.touched) for f in files}})
        member.files.write_over(join(member.folder, _SAME), noted.dump())


def _noted(member: Generation) -> Mapping[str, Seen]:
    try:
        return SeenSame.load_from(join(member.folder, _SAME), member.files).files
    except (FileNotFoundError, CorruptStore):
        return {}  # the files are read once more


def _infos(table: pa.Table) -> dict[str, FileInfo]:
    schemas = [decode_schema(text) for text in json.loads(table.schema.metadata[_SCHEMAS])]
    names = ("path", "size", "stamp", "touched", "extent", "layout", "divisible", "row_bytes", "nulls", "schema")
    plain = zip(*(table.column(name).to_pylist() for name in names), strict=True)
    infos = {}
    lists = zip(_arrays(table.column("cuts")), _arrays(table.column("cut_rows")), strict=True)
    for (path, size, stamp, touched, extent, layout, divisible, row_bytes, nulls, schema), (cuts, rows) in zip(
        plain, lists, strict=True
    ):
        assert cuts is not None
        counted = None if nulls is None else json.loads(nulls)
        file = SourceFile(path, size, stamp, touched)
        infos[path] = FileInfo(file, extent, cuts, divisible, schemas[schema], rows, counted, layout, row_bytes)
    return infos


def _lists(arrays: Sequence[np.ndarray | None]) -> pa.Array:
    """Arrays of int64 as one column of lists; None stays null.

    Put together from buffers: building one from an array, or a list with a mask, imports pandas and pyarrow.compute,
    which costs every run's start at least 40 ms.
    """
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([0 if a is None else len(a) for a in arrays], out=offsets[1:])
    parts = [np.asarray(a, dtype=np.int64) for a in arrays if a is not None]
    values = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    flat = pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])
    there = pa.array([a is not None for a in arrays], pa.bool_()).buffers()[1]
    kind = pa.large_list(pa.int64())
    return pa.Array.from_buffers(kind, len(arrays), [there, pa.py_buffer(offsets)], children=[flat])


def _arrays(column: pa.ChunkedArray) -> Iterable[np.ndarray | None]:
    for chunk in column.chunks:
        flat, offsets, there = chunk.values.to_numpy(), chunk.offsets.to_numpy(), chunk.is_valid().to_pylist()
        for row, valid in enumerate(there):
            yield flat[offsets[row] : offsets[row + 1]].copy() if valid else None

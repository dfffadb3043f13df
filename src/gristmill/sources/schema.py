"""One schema for the files of a source. Files that differ are found when planning, and named."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gristmill.arrow.typetext import column_type
from gristmill.errors import BadSource
from gristmill.shards.sourcefiles import FileInfo

if TYPE_CHECKING:
    import pyarrow as pa
from gristmill.arrow.schemas import nullable, plain, real, wider

__all__ = [
    "INFERRED",
    "MIXED",
    "NEVER",
    "UNFIT",
    "apart",
    "as_text",
    "check",
    "conform",
    "from_names",
    "unfit",
    "unify",
]

MIXED = b"gristmill.mixed"  # in a field's metadata: why the column has no type, and the way out
_APART = b"gristmill.apart"  # in a field's metadata: how the files of a source differ in the column
INFERRED = (
    b"gristmill.inferred"  # in a schema's metadata: types come from a sample of text, so that text can be read wider
)
UNFIT = b"gristmill.unfit"  # in a field's metadata: that few sampled values are of the type that was given, in words
NEVER = b"gristmill.never"  # the same, if none is
_SHOWN = 3


def unify(infos: Sequence[FileInfo], evolve: bool = False) -> pa.Schema:
    """The schema that all files can be read with, in the first file's order.

    Types that differ are widened if that loses nothing (int32 and int64, null and anything). A column that some files
    lack, or whose types cannot be made one, is only reported by `apart`: it matters if it is read. With `evolve`, files
    may lack a column, which is null for their rows, and whole numbers combined with fractions are floats, each value
    being compared as it is read.
    """
    import pyarrow as pa

    kinds = _kinds(infos)
    inferred = all((schema.metadata or {}).get(INFERRED) == b"sparse" for schema, _ in kinds)
    fields = []
    for name in dict.fromkeys(n for s, _ in kinds for n in s.names):  # hundreds: names are not listed for each
        lacking = [] if inferred or evolve else [paths for s, paths in kinds if not _has(s, name)]
        missing = [p for paths in lacking for p in paths]
        found = mixed = _mixed(name, kinds)
        one, problem = (pa.string(), None) if mixed is not None else _one_type(name, kinds, evolve)
        if missing:
            problem = f"column {name!r} is missing in {_listed(missing)}, of {len(infos)} files"
        if problem is not None:
            found = {**(mixed or {}), _APART: problem.encode()}
        fields.append(pa.field(name, one, metadata=found))
    return pa.schema(fields)


def apart(schema: pa.Schema, columns: Iterable[str]) -> dict[str, str]:
    """How the files of a source differ in some columns of their common schema, by column, in words."""
    found = ((n, (schema.field(n).metadata or {}).get(_APART)) for n in columns if _has(schema, n))
    return {name: problem.decode() for name, problem in found if problem is not None}


def as_text(infos: Sequence[FileInfo], columns: Collection[str]) -> list[FileInfo]:
    """For files whose values are all text when they are read (CSV): a column of `columns` that is text in some files is
    text in the others too, even if all its values there look like numbers.
    """
    import pyarrow as pa

    of_text = [i for i in infos if (i.schema.metadata or {}).get(INFERRED) == b"text"] if columns else []
    named = {n for i in of_text for n in i.schema.names if n in columns and i.schema.field(n).type == pa.string()}
    if not named:
        return list(infos)
    read = {id(i) for i in of_text}
    return [replace(i, schema=_with_text(i.schema, named)) if id(i) in read else i for i in infos]


def _with_text(schema: pa.Schema, named: Collection[str]) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([f.with_type(pa.string()) if f.name in named else f for f in schema], metadata=schema.metadata)


Kinds = list[tuple["pa.Schema", list[str]]]  # each schema with the files that have it


def _kinds(infos: Sequence[FileInfo]) -> Kinds:
    found: dict[bytes, tuple[pa.Schema, list[str]]] = {}
    last: tuple[pa.Schema, list[str]] | None = None
    for info in infos:
        if (info.extent == 0 or info.rows == 0) and not len(info.schema):
            continue  # a text file with no line, or only empty ones, has no columns and differs from nothing
        if last is None or info.schema is not last[0]:  # else it is shared with the file before
            key = info.schema.serialize().to_pybytes()  # one with metadata has no hash in older versions of pyarrow
            last = info.schema, found.setdefault(key, (info.schema, []))[1]
        last[1].append(info.file.path)
    return list(found.values())


def _has(schema: pa.Schema, name: str) -> bool:
    return bool(schema.get_all_field_indices(name))


def _one_type(name: str, kinds: Kinds, evolve: bool) -> tuple[pa.DataType, str | None]:
    """The column's type in all files, and what is wrong with it, if anything."""
    import pyarrow as pa

    by_type: list[tuple[pa.DataType, list[str]]] = []  # types of a class of the user's own may have no hash
    text = False
    for schema, paths in kinds:
        if _has(schema, name):
            kind = plain(schema.field(name).type)
            known = next((their for t, their in by_type if t == kind), None)
            if known is None:
                by_type.append((kind, known := []))
            known += paths
            text = text or INFERRED in (schema.metadata or {})
    types = [t for t, _ in by_type]
    each = ", ".join(f"{t} in {_listed(paths)}" for t, paths in by_type)
    hint = f" (types={{'{name}': 'string'}}, --set source.types.{name}=string, reads it as text)" if text else ""
    problem = f"column {name!r} is {each}{hint}"
    one, alike = types[0], True
    for other in types[1:]:
        both = wider(one, other, text)
        alike = alike and both is not None
        both = real(one, other) if both is None else both
        if both is None:
            return pa.string(), problem
        one = both
    return one, None if alike or evolve else problem


def _mixed(name: str, kinds: Kinds) -> dict[bytes, bytes] | None:
    found = (s.field(name).metadata or {} for s, _ in kinds if _has(s, name))
    return next(({MIXED: m[MIXED]} for m in found if MIXED in m), None)


def check(schema: pa.Schema, columns: Iterable[str]) -> None:
    """Raises BadSource if a wanted column has values of two kinds in its file."""
    for name in columns:
        why = (schema.field(name).metadata or {}).get(MIXED) if _has(schema, name) else None
        if why is not None:
            raise BadSource(why.decode())


def unfit(infos: Sequence[FileInfo], columns: Iterable[str], some: bool) -> list[str]:
    """A line for each wanted column with a given type that hardly any of a file's values fits. Raises BadSource if no
    value of any file fits: then every row would be bad, unless a condition takes only `some`.
    """
    lines = []
    kinds = _kinds(infos)
    for name in columns:
        marks = [s.field(name).metadata or {} for s, _ in kinds if _has(s, name)]
        said = [m.get(NEVER) or m.get(UNFIT) for m in marks]
        first = next((text.decode() for text in said if text is not None), None)
        if first is not None and not some and all(NEVER in m for m in marks):
            raise BadSource(first)
        if first is not None:
            lines.append(first)
    return lines


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more


def conform(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """`rows` with the types of `schema` for the columns that it names. Columns keep their order, and may all hold
    nulls, even if those of one file cannot.

    Raises pyarrow.ArrowInvalid if a value does not fit.
    """
    import pyarrow as pa

    from gristmill.arrow.casts import lossless

    for i, field in enumerate(rows.schema):
        at = schema.get_field_index(field.name)
        wanted = schema.field(at).type if at >= 0 else plain(field.type)
        if field.type != wanted:
            column = rows.column(i)
            if plain(field.type) != field.type:
                column = lossless(column, plain(field.type))
            try:
                column = column.cast(wanted)
            except pa.ArrowInvalid as e:
                both = f"{field.type} here, {wanted} with the other files"
                raise pa.ArrowInvalid(f"column {field.name!r} ({both}; write them with one type): {e}") from e
            rows = rows.set_column(i, pa.field(field.name, wanted), column)
    return pa.Table.from_arrays(rows.columns, schema=nullable(rows.schema)) if rows.num_columns else rows


def from_names(types: object, where: str) -> dict[str, pa.DataType]:
    """Arrow types from what a person writes: `{"id": "int64", "when": "timestamp[us]"}`. Raises BadSource."""
    if types is None:
        return {}
    if not isinstance(types, dict):
        raise BadSource(f"{where}: types is {types!r}: give a mapping of column to type, such as {{'id': 'int64'}}")
    out = {}
    for name, kind in types.items():
        try:
            out[name] = column_type(kind)[0]
        except ValueError as e:
            raise BadSource(f"{where}: types[{name!r}] is {kind!r}: {e}") from None
    return out

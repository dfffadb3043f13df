"""One schema for the files of a source. Files that differ are found when planning, and named."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gristmill.errors import BadSource
from gristmill.io.typenames import parse_type
from gristmill.plan.contracts import FileInfo

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "INFERRED",
    "MIXED",
    "apart",
    "as_text",
    "check",
    "conform",
    "from_names",
    "nullable",
    "plain",
    "real",
    "unify",
    "unwritable",
    "wider",
]

MIXED = b"gristmill.mixed"  # in a field's metadata: why the column has no type, and the way out
_APART = b"gristmill.apart"  # in a field's metadata: how the files of a source differ in the column
INFERRED = (
    b"gristmill.inferred"  # in a schema's metadata: types come from a sample of text, so that text can be read wider
)
_SHOWN = 3


def unify(infos: Sequence[FileInfo], evolve: bool = False) -> pa.Schema:
    """The schema that all files can be read with, in the first file's order.

    Types that differ are widened where that loses nothing (int32 and int64, null and anything). A column that some
    files lack, or whose types cannot be one, is only told by `apart`: it matters where it is read. With `evolve` files
    may lack a column, which is null for their rows, and whole numbers beside fractions are floats, each value that is
    read being compared.
    """
    import pyarrow as pa

    kinds = _kinds(infos)
    inferred = all((schema.metadata or {}).get(INFERRED) == b"sparse" for schema, _ in kinds)
    fields = []
    for name in dict.fromkeys(n for s, _ in kinds for n in s.names):
        missing = [] if inferred or evolve else [p for s, paths in kinds if name not in s.names for p in paths]
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
    found = ((n, (schema.field(n).metadata or {}).get(_APART)) for n in columns if n in schema.names)
    return {name: problem.decode() for name, problem in found if problem is not None}


def as_text(infos: Sequence[FileInfo], columns: Collection[str]) -> list[FileInfo]:
    """Files of values that are all text when they are read (CSV), where a column of `columns` is text in some of them:
    then it is in the others too, also where all that a file has in it looks like numbers.
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
    for info in infos:
        if info.extent == 0 and not len(info.schema):
            continue  # an empty text file has no columns and differs from nothing
        key = info.schema.serialize().to_pybytes()  # a schema with metadata has no hash in older versions of pyarrow
        found.setdefault(key, (info.schema, []))[1].append(info.file.path)
    return list(found.values())


def _one_type(name: str, kinds: Kinds, evolve: bool) -> tuple[pa.DataType, str | None]:
    """The column's type in all files, and what is wrong with it."""
    import pyarrow as pa

    by_type: list[tuple[pa.DataType, list[str]]] = []  # types of a class of the user's own may have no hash
    text = False
    for schema, paths in kinds:
        if name in schema.names:
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
    found = (s.field(name).metadata or {} for s, _ in kinds if name in s.names)
    return next(({MIXED: m[MIXED]} for m in found if MIXED in m), None)


def check(schema: pa.Schema, columns: Iterable[str]) -> None:
    """Raises BadSource where a column that is wanted has values of two kinds in its file."""
    for name in columns:
        why = (schema.field(name).metadata or {}).get(MIXED) if name in schema.names else None
        if why is not None:
            raise BadSource(why.decode())


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more


def plain(kind: pa.DataType) -> pa.DataType:
    """A type without what few readers know, for the same values: encodings as what they hold, views as the types that
    they are views of, vectors of no length as lists. Names of fields stay.
    """
    import pyarrow as pa

    t = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        bare = plain(kind.storage_type)
        return kind if bare == kind.storage_type else bare
    if t.is_dictionary(kind) or t.is_run_end_encoded(kind):
        return plain(kind.value_type)
    if t.is_string_view(kind) or t.is_binary_view(kind):
        return pa.string() if t.is_string_view(kind) else pa.binary()
    if t.is_struct(kind):
        return pa.struct([_plain(f) for f in kind])
    if t.is_map(kind):
        return pa.map_(_plain(kind.key_field), _plain(kind.item_field), kind.keys_sorted)
    if t.is_fixed_size_list(kind) and kind.list_size:
        return pa.list_(_plain(kind.value_field), kind.list_size)
    if t.is_large_list(kind) or t.is_large_list_view(kind):
        return pa.large_list(_plain(kind.value_field))
    if t.is_list(kind) or t.is_list_view(kind) or t.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_field))
    return kind


def _plain(field: pa.Field) -> pa.Field:
    return field.with_type(plain(field.type))


def unwritable(kind: pa.DataType) -> str | None:
    """What it is, at any depth, that no sink and no Parquet file can hold; None where all of it can be."""
    import pyarrow as pa

    t = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return unwritable(kind.storage_type)
    if t.is_struct(kind) and len({f.name for f in kind}) < kind.num_fields:
        return f"a struct with two fields of one name ({', '.join(f.name for f in kind)})"
    if t.is_union(kind) or t.is_interval(kind):
        return "a union" if t.is_union(kind) else "an interval"
    inner = [kind.value_type] if t.is_dictionary(kind) else [kind.field(i).type for i in range(kind.num_fields)]
    if any(isinstance(k, pa.BaseExtensionType) for k in inner):
        return "an extension type inside another type"  # of which pyarrow makes no arrays
    return next((why for k in inner if (why := unwritable(k))), None)


def wider(one: pa.DataType, other: pa.DataType, text: bool = False) -> pa.DataType | None:
    """A type that holds the values of both without loss, else None. `text`: read from text, so int fits float."""
    import pyarrow as pa

    t = pa.types
    if one == other or t.is_null(other):
        return one
    if t.is_null(one):
        return other
    if t.is_integer(one) and t.is_integer(other):
        return _wider_integer(one, other)
    if t.is_floating(one) and t.is_floating(other):
        return max(one, other, key=lambda k: k.bit_width)
    if (t.is_integer(one) and t.is_floating(other)) or (t.is_floating(one) and t.is_integer(other)):
        whole, real = (one, other) if t.is_integer(one) else (other, one)
        exact = {16: 8, 32: 16, 64: 32}[real.bit_width]  # integers up to the mantissa's bits stay what they are
        return real if whole.bit_width <= exact else (pa.float64() if text or whole.bit_width <= 32 else None)
    for is_kind, big in ((_is_text, pa.large_string()), (_is_bytes, pa.large_binary())):
        if is_kind(one) and is_kind(other):
            return big
    if t.is_decimal(one) and t.is_decimal(other):
        return _wider_decimal(one, other)
    if t.is_timestamp(one) and t.is_timestamp(other) and one.tz == other.tz:
        return min(one, other, key=lambda k: ["ns", "us", "ms", "s"].index(k.unit))
    if t.is_date(one) and t.is_timestamp(other) and other.tz is None and text:
        return other
    if t.is_date(other) and t.is_timestamp(one) and one.tz is None and text:
        return one
    return _wider_nested(one, other, text)


def real(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The floats that whole numbers and floats can be together where each value is exact, which only they can tell."""
    import pyarrow as pa

    t = pa.types
    numbers = all(t.is_integer(k) or t.is_floating(k) for k in (one, other))
    return pa.float64() if numbers and (t.is_floating(one) or t.is_floating(other)) else None


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _wider_integer(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    import pyarrow as pa

    signed = [pa.types.is_signed_integer(k) for k in (one, other)]
    if signed[0] == signed[1]:
        return max(one, other, key=lambda k: k.bit_width)
    whole, natural = (one, other) if signed[0] else (other, one)
    bits = max(whole.bit_width, natural.bit_width * 2)
    return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}.get(bits)


def _wider_decimal(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    import pyarrow as pa

    scale = max(one.scale, other.scale)
    digits = max(one.precision - one.scale, other.precision - other.scale) + scale
    return pa.decimal128(digits, scale) if digits <= 38 else (pa.decimal256(digits, scale) if digits <= 76 else None)


def _wider_nested(one: pa.DataType, other: pa.DataType, text: bool) -> pa.DataType | None:
    import pyarrow as pa

    t = pa.types
    lists = [k for k in (one, other) if t.is_list(k) or t.is_large_list(k) or t.is_fixed_size_list(k)]
    if len(lists) == 2:
        inner = wider(one.value_type, other.value_type, text)
        if inner is None:
            return None
        if t.is_fixed_size_list(one) and t.is_fixed_size_list(other) and one.list_size == other.list_size:
            return pa.list_(inner, one.list_size)
        if t.is_fixed_size_list(one) or t.is_fixed_size_list(other):
            return None  # vectors of different width are not one column
        return pa.large_list(inner) if t.is_large_list(one) or t.is_large_list(other) else pa.list_(inner)
    if t.is_struct(one) and t.is_struct(other):
        ours, theirs = {f.name: f.type for f in one}, {f.name: f.type for f in other}
        if not text and set(ours) != set(theirs):
            return None
        fields = []
        for name in dict.fromkeys([*ours, *theirs]):
            both = wider(ours.get(name, pa.null()), theirs.get(name, pa.null()), text)
            if both is None:
                return None
            fields.append(pa.field(name, both))
        return pa.struct(fields)
    return None


def conform(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """`rows` with the types of `schema` for the columns that it names; columns stay where they are, and may all hold
    nulls: that one file's cannot binds no other.

    Raises pyarrow.ArrowInvalid where a value does not fit.
    """
    import pyarrow as pa

    from gristmill.io.lossless import lossless

    for i, field in enumerate(rows.schema):
        at = schema.get_field_index(field.name)
        wanted = schema.field(at).type if at >= 0 else plain(field.type)
        if field.type != wanted:
            column = rows.column(i)
            if plain(field.type) != field.type:
                column = lossless(column, plain(field.type))
            rows = rows.set_column(i, pa.field(field.name, wanted), column.cast(wanted))
    return pa.Table.from_arrays(rows.columns, schema=nullable(rows.schema)) if rows.num_columns else rows


def nullable(schema: pa.Schema) -> pa.Schema:
    """The schema with columns that may all hold nulls."""
    import pyarrow as pa

    return pa.schema([f.with_nullable(True) for f in schema], metadata=schema.metadata)


def from_names(types: object, where: str) -> dict[str, pa.DataType]:
    """Arrow types from what a person writes: `{"id": "int64", "when": "timestamp[us]"}`. Raises BadSource."""
    import pyarrow as pa

    if types is None:
        return {}
    if not isinstance(types, dict):
        raise BadSource(f"{where}: types is {types!r}: give a mapping of column to type, as {{'id': 'int64'}}")
    out = {}
    for name, kind in types.items():
        if isinstance(kind, pa.DataType):
            out[name] = kind
            continue
        try:
            out[name] = parse_type(str(kind))
        except ValueError as e:
            raise BadSource(f"{where}: types[{name!r}] is {kind!r}: {e}") from None
    return out

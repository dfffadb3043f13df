"""Reads back what the JSON Lines sink wrote: the inverse of `jsontext`. Every type that can be written reads back
equal, although JSON has few types: columns are parsed as types that it has, then converted to those of the schema.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any

from gristmill.arrow.casts import is_list, rebuilt
from gristmill.arrow.filesystem import called, go_on, python_files
from gristmill.arrow.schemas import is_string, plain, unwritable
from gristmill.errors import BadJob, CorruptStore
from gristmill.sinks.jsonmembers import quoted

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["as_arrow", "from_json", "stored"]

_BLOCK = 8 << 20  # bytes of text parsed at once; a row that is longer is read whole
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd"}
_SPECIAL = re.compile(rb'"(?:NaN|-?Infinity)"')


def stored(schema: pa.Schema) -> pa.Schema:
    """The schema as JSON Lines keep it: encodings and views as what they hold. Raises BadJob for other types."""
    import pyarrow as pa

    for field in schema:
        if why := unwritable(field.type):
            raise BadJob(
                f"column {field.name!r} is {field.type}, and a jsonl sink cannot hold {why}: cast it to another "
                "type in a step"
            )
    return pa.schema([field.with_type(plain(field.type)) for field in schema])


# ---------------------------------------------------------------- the file system


def as_arrow(
    files: Any, schema: pa.Schema, sizes: Mapping[str, int] | None = None, raw: frozenset[str] = frozenset()
) -> Any:
    """A pyarrow file system in which JSON Lines files of `files`, plain or compressed, appear as Arrow files with the
    columns of `schema`, so that a Dataset reads them file by file, as often as needed. Each is converted block by block
    into a temporary file, which is deleted when it is closed. `sizes` are the bytes that files must have, as nothing
    else shows that lines are missing at the end: CorruptStore if one differs. `raw` as for `json_lines`.
    """
    texts = frozenset(field.name for field in schema if field.name in raw and is_string(field.type))
    return python_files(_shown()(files, stored(schema), dict(sizes or {}), texts))


@cache
def _shown() -> type:
    """The class, made when first needed: its base is pyarrow's, which is slow to import."""
    import pyarrow.fs as pafs

    class Shown(pafs.FileSystemHandler):  # type: ignore[misc]
        """Reads only; nothing else of a file system is ever asked for."""

        def __init__(self, files: Any, schema: pa.Schema, sizes: dict[str, int], raw: frozenset[str]) -> None:
            self.made_of = (files, schema, sizes, raw)
            self.files, self.schema, self.sizes, self.raw = self.made_of

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Shown) and self.made_of == other.made_of

        def __hash__(self) -> int:
            return hash(Shown)

        def __reduce__(self) -> Any:
            return _opened_again, self.made_of

        def get_type_name(self) -> str:
            return "gristmill-jsonl"

        def normalize_path(self, path: str) -> str:
            return str(self.files.normalize_path(path))

        def get_file_info(self, paths: list[str]) -> Any:
            return self.files.get_file_info(paths)

        def get_file_info_selector(self, selector: Any) -> Any:
            return self.files.get_file_info(selector)

        def open_input_file(self, path: str) -> Any:
            with called():
                size = self.files.get_file_info(path).size
                if (wanted := self.sizes.get(path, size)) != size:
                    raise CorruptStore(f"{path}: has {size:,} of its {wanted:,} bytes")
                return _converted(self.files, path, self.schema, self.raw)

        open_input_stream = open_input_file

        def _refused(self, *args: Any, **more: Any) -> Any:
            raise NotImplementedError("a result is read, not written")

        create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refused
        move = copy_file = open_output_stream = open_append_stream = _refused

    return Shown


def _opened_again(*made_of: Any) -> Any:
    return _shown()(*made_of)


def _converted(files: Any, path: str, schema: pa.Schema, raw: frozenset[str]) -> Any:
    """A JSON Lines file as an Arrow file, on disk but without a name."""
    import pyarrow as pa

    handle, name = tempfile.mkstemp(prefix="gristmill-read-", suffix=".tmp")
    os.close(handle)
    try:
        with pa.OSFile(name, "wb") as out, pa.ipc.new_file(out, schema) as writer:
            for text in _blocks(files, path):
                go_on()
                writer.write_batch(_parsed(text, schema, path, raw))
        return pa.memory_map(name)
    finally:
        os.unlink(name)


def _blocks(files: Any, path: str) -> Iterator[bytes]:
    """The file in pieces of whole lines."""
    with files.open_input_stream(path, compression=None) as first:
        codec = _MAGIC.get(first.read(2))
    with contextlib.closing(files.open_input_stream(path, compression=codec)) as stream:
        rest = b""
        while data := stream.read(_BLOCK):
            cut = data.rfind(b"\n") + 1
            if cut == 0:
                rest += data
                continue
            yield rest + data[:cut]
            rest = data[cut:]
    if rest:
        raise CorruptStore(f"{path}: the last line is cut off")


# ---------------------------------------------------------------- text to rows


def from_json(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """The values of which `jsontext.json_texts` are the texts, a string array; nulls stay nulls."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lines = pc.binary_join_element_wise('{"v":', pc.fill_null(texts, "null"), "}\n", "")
    data = "".join(lines.to_pylist()).encode()
    return _parsed(data, pa.schema([("v", kind)]), "JSON", frozenset()).column(0) if data else pa.array([], kind)


def _parsed(text: bytes, schema: pa.Schema, path: str, raw: frozenset[str]) -> pa.RecordBatch:
    import pyarrow as pa
    import pyarrow.json as pj

    wire = pa.schema([pa.field(f.name, _wire(f.type)) for f in schema])
    try:
        text = quoted(text, raw) if raw else text
        if _SPECIAL.search(text) and any(_floats(f.type) for f in schema):
            rows = _with_specials(text, wire)
        else:
            rows = pj.read_json(
                pa.BufferReader(text),
                read_options=pj.ReadOptions(use_threads=False, block_size=len(text) + 16),
                parse_options=pj.ParseOptions(explicit_schema=wire, unexpected_field_behavior="ignore"),
            )
        arrays = [rebuilt(_one(rows.column(f.name)), f.type, _leaf) for f in schema]
    except (pa.ArrowException, ValueError) as e:
        raise CorruptStore(f"{path}: cannot be read back as it was written: {e}") from e
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _one(column: pa.ChunkedArray) -> pa.Array:
    import pyarrow as pa

    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays([pa.array([], column.type), *column.chunks])


def _wire(kind: pa.DataType) -> pa.DataType:
    """The type that pyarrow's JSON reader parses it as."""
    import pyarrow as pa

    t = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _wire(kind.storage_type)
    if t.is_null(kind):
        return pa.bool_()  # of the nulls in a list, pyarrow's reader keeps only one
    if t.is_boolean(kind) or t.is_integer(kind) or t.is_decimal(kind):
        return kind
    if t.is_floating(kind):
        return pa.float32() if t.is_float16(kind) else kind
    if t.is_duration(kind):
        return pa.int64()
    if is_list(kind):
        return pa.list_(_wire(kind.value_type))
    if t.is_struct(kind):
        return pa.struct([pa.field(f.name, _wire(f.type)) for f in kind])
    if t.is_map(kind):
        return pa.list_(pa.struct([("key", _wire(kind.key_type)), ("value", _wire(kind.item_type))]))
    return pa.string()  # text, times, and bytes as base64


def _leaf(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """The parsed values, with their original types."""
    import pyarrow as pa
    import pyarrow.compute as pc

    t = pa.types
    if t.is_date64(kind):
        return values.cast(pa.date32()).cast(kind)
    if t.is_time(kind):
        day = pc.binary_join_element_wise(pa.scalar("1970-01-01T"), values, pa.scalar(""))
        return day.cast(pa.timestamp(kind.unit)).cast(kind)
    if t.is_timestamp(kind) and kind.tz:
        if kind.unit == "ns":
            return _nanoseconds(pc.utf8_rtrim(values, "Z")).cast(kind)
        return values.cast(pa.timestamp(kind.unit, "UTC")).cast(kind)
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_fixed_size_binary(kind):
        return pa.array([None if v is None else base64.b64decode(v) for v in values.to_pylist()], kind)
    if t.is_timestamp(kind) and kind.unit == "ns":
        return _nanoseconds(values)
    return values.cast(kind)


def _nanoseconds(values: pa.Array) -> pa.Array:
    """Times from text. Arrow takes none of the first second of the range, in which pandas' Timestamp.min is; numpy
    does.
    """
    import numpy as np
    import pyarrow as pa

    try:
        return values.cast(pa.timestamp("ns"))
    except pa.ArrowInvalid:
        return pa.array(np.array(values.to_pylist(), dtype="datetime64[ns]"))


# ---------------------------------------------------------------- NaN and infinity, which JSON lacks


def _floats(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _floats(kind.storage_type)
    if pa.types.is_floating(kind):
        return True
    return any(_floats(kind.field(i).type) for i in range(kind.num_fields))


def _with_specials(text: bytes, wire: pa.Schema) -> pa.Table:
    """Line by line: pyarrow's reader rejects a float written as text, and a text column may have the value NaN, too."""
    import pyarrow as pa

    rows = [json.loads(line, parse_float=Decimal) for line in text.splitlines()]
    columns = [[_value(row.get(f.name), f.type) for row in rows] for f in wire]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, wire, strict=True)], schema=wire)


def _value(value: Any, kind: pa.DataType) -> Any:
    import pyarrow as pa

    if value is None:
        return None
    if pa.types.is_floating(kind):
        return float(value)
    if pa.types.is_decimal(kind):
        return Decimal(value)
    if pa.types.is_list(kind):
        return [_value(v, kind.value_type) for v in value]
    if pa.types.is_struct(kind):
        return {f.name: _value(value.get(f.name), f.type) for f in kind}
    return value

"""A digest of what was read: of the values, row by row, not of a file's bytes or of how rows were split into blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_128

from gristmill.arrow.rows import picked
from gristmill.arrow.valuebytes import value_bytes
from gristmill.sources.contract import Block

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Content"]


class Content:
    """The digest of one file's blocks, added in order: of rows and positions, and of what was filtered out or bad.

    XXH3 with 128 bits detects content that differs by accident, at some gigabytes a second; it is no proof against
    somebody who looks for a collision.
    """

    def __init__(self) -> None:
        self._rest = xxh3_128()  # positions and bad rows
        self._columns: dict[str, _Values] = {}
        self._filtered = 0

    def add(self, block: Block) -> None:
        self._filtered += block.filtered
        for bad in block.bad:
            self._rest.update(f"{bad.position}:{bad.error}:{len(bad.payload)}:".encode())
            self._rest.update(bad.payload)
        self._rest.update(block.position.astype(np.int64, copy=False).data)
        for field, column in zip(block.rows.schema, block.rows.columns, strict=True):
            values = self._columns.get(field.name) or self._columns.setdefault(field.name, _Values(field.type))
            for chunk in column.chunks:
                values.add(chunk)

    def hexdigest(self) -> str:
        """32 hex digits."""
        told = {name: values.told() for name, values in self._columns.items() if values.rows}
        return str(xxh3_128(repr((self._filtered, self._rest.hexdigest(), told)).encode()).hexdigest())


class _Values:
    """A column, or what a nested one holds: where it is null, how long its values are, and their bytes. Each of these
    is a stream of its own, so that a stream is the same wherever the column is cut.
    """

    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind
        self._streams: dict[str, Any] = {}
        self._inner: dict[str, _Values] = {}
        self.rows = 0

    def told(self) -> Any:
        """The digests of all streams, as plain values."""
        streams = sorted((name, stream.hexdigest()) for name, stream in self._streams.items())
        return (
            str(self._kind),
            self.rows,
            streams,
            [(n, inner.told()) for n, inner in self._inner.items() if inner.rows],
        )

    def add(self, array: pa.Array) -> None:
        if hasattr(array, "storage"):  # of an extension type, which may have no hash
            return self.add(array.storage)
        shape, width = _shape(array.type)
        if shape in _UNWRAPPED:
            return self.add(_UNWRAPPED[shape](array))
        if array.null_count:
            self._stream("nulls", np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)) + self.rows)
        self.rows += len(array)
        if array.null_count:
            array = picked(array, np.flatnonzero(array.is_valid()))  # the bytes under a null are arbitrary
        if not len(array):
            return None
        if shape == "plain":
            start = array.offset * width
            self._stream("values", memoryview(array.buffers()[1])[start : start + len(array) * width])
        elif shape == "bytes":
            first, last = self._lengths(array, width)
            if (data := array.buffers()[2]) is not None:
                self._stream("values", memoryview(data)[first:last])
        elif shape == "bits":
            bits = np.unpackbits(np.frombuffer(array.buffers()[1], np.uint8), bitorder="little")
            self._stream("values", bits[array.offset : array.offset + len(array)])
        elif shape == "struct":
            for field, child in zip(array.type, array.flatten(), strict=True):
                self._nested(field.name, child)
        elif shape == "fixed":
            self._nested("values", array.flatten())
        elif shape in ("list", "map"):
            first, last = self._lengths(array, width)
            for name in ("keys", "items") if shape == "map" else ("values",):
                self._nested(name, getattr(array, name).slice(first, last - first))
        elif shape == "other":
            for value in value_bytes(array).to_pylist():
                self._stream("values", value)
        return None

    def _lengths(self, array: pa.Array, width: int) -> tuple[int, int]:
        """Adds the length of each value; returns where the first begins and the last ends in what holds them."""
        edges = np.frombuffer(array.buffers()[1], np.dtype(f"i{width}"))[array.offset : array.offset + len(array) + 1]
        self._stream("lengths", np.diff(edges))
        return int(edges[0]), int(edges[-1])

    def _nested(self, name: str, array: pa.Array) -> None:
        (self._inner.get(name) or self._inner.setdefault(name, _Values(array.type))).add(array)

    def _stream(self, name: str, data: Any) -> None:
        if not len(data):
            return
        if name not in self._streams:
            self._streams[name] = xxh3_128()
        self._streams[name].update(data)


_UNWRAPPED: Mapping[str, Callable[[Any], Any]] = {
    "dictionary": lambda array: array.dictionary_decode(),
    "view": lambda array: array.cast("large_binary"),
}


@lru_cache(maxsize=1024)
def _shape(kind: pa.DataType) -> tuple[str, int]:
    """How values of a type are laid out in memory, and the bytes of one value or of an offset."""
    import pyarrow as pa

    t = pa.types
    offset = 8 if t.is_large_string(kind) or t.is_large_binary(kind) or t.is_large_list(kind) else 4
    shapes = (
        ("null", t.is_null),
        ("dictionary", t.is_dictionary),
        ("view", lambda k: t.is_string_view(k) or t.is_binary_view(k)),
        ("bytes", lambda k: t.is_string(k) or t.is_binary(k) or t.is_large_string(k) or t.is_large_binary(k)),
        ("struct", t.is_struct),
        ("fixed", t.is_fixed_size_list),
        ("map", t.is_map),
        ("list", lambda k: t.is_list(k) or t.is_large_list(k)),
        ("bits", t.is_boolean),
        ("plain", lambda k: t.is_primitive(k) or t.is_decimal(k) or t.is_fixed_size_binary(k)),
    )
    shape = next((name for name, fits in shapes if fits(kind)), "other")  # unions and the like: no source gives them
    return shape, kind.bit_width // 8 if shape == "plain" else offset

"""The signature of an ONNX file (inputs, outputs, operators), read from its protobuf without loading the model.

The weights are skipped over, so this takes milliseconds and needs neither onnx nor onnxruntime. Field numbers are those
of onnx.proto3 (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto3), the wire format is protobuf's
(https://protobuf.dev/programming-guides/encoding/).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from gristmill.errors import BadModel
from gristmill.values import dataclass

# TensorProto.DataType, as numpy calls them
_DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16",
}  # fmt: skip
# What makes a graph a quantised one: onnxruntime.quantization and optimum write one of these for dynamic, QDQ and
# QOperator models, and for 4-bit weights.
_QUANTISED = ("DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinear", "DynamicQuantizeMatMul", "QAttention")
_FOUR_BIT = ("MatMulNBits", "MatMulBnb4", "MatMulFpQ4")


@dataclass(frozen=True)
class Value:
    """An input or output: its name, dtype (numpy's name; "sequence" or "map" if it is not a tensor) and shape.

    A free axis is None in `shape`; `shape` is None if the graph does not even give the rank.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True)
class Graph:
    """What an ONNX file says of itself. `precision` is "float32", "float16", "bfloat16", "int8" or "int4"."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    operators: frozenset[str]
    precision: str
    external: tuple[str, ...]


def read_graph(path: Path) -> Graph:
    """The signature of an ONNX file. Raises BadModel if the file is not an ONNX model."""
    try:
        if path.stat().st_size == 0:
            raise ValueError("the file is empty")
        return _model(_mapped(path))
    except (ValueError, IndexError, UnicodeDecodeError) as e:
        raise BadModel(f"{path}: this is not an ONNX model ({e})") from None


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        # Not closed by hand: a traceback may still hold slices of it.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _model(view: memoryview) -> Graph:
    graph = _one(view, 7)
    if graph is None:
        raise ValueError("it holds no graph")
    inputs: list[Value] = []
    outputs: list[Value] = []
    operators: set[str] = set()
    weights: dict[str, tuple[int, int]] = {}
    external: set[str] = set()
    for number, value in _fields(graph):
        if not isinstance(value, memoryview):
            continue
        if number == 1:
            operators.add(_text(_one(value, 4)))
        elif number == 5:
            name, kind, size, files = _weight(value)
            weights[name] = (kind, size)
            external.update(files)
        elif number in (11, 12):
            (inputs if number == 11 else outputs).append(_value(value))
    if not outputs:
        raise ValueError("its graph has no outputs")
    inputs = [v for v in inputs if v.name not in weights]  # IR version 3 and older list weights among the inputs
    return Graph(
        tuple(inputs), tuple(outputs), frozenset(operators), _precision(operators, weights), tuple(sorted(external))
    )


def _precision(operators: set[str], weights: dict[str, tuple[int, int]]) -> str:
    if any(o.startswith(_QUANTISED) for o in operators):
        return "int8"
    if operators & set(_FOUR_BIT):
        return "int4"
    sizes: dict[str, int] = {}
    for kind, size in weights.values():
        dtype = _DTYPES.get(kind, "")
        sizes[dtype] = sizes.get(dtype, 0) + size
    floats = {d: n for d, n in sizes.items() if d in ("float32", "float16", "bfloat16", "float64")}
    if sizes.get("int8", 0) + sizes.get("uint8", 0) > sum(floats.values()):
        return "int8"  # even if only the weights are int8, and the arithmetic is float
    return max(floats, key=lambda d: floats[d]) if floats else "float32"


def _weight(view: memoryview) -> tuple[str, int, int, list[str]]:
    name, kind, size, files = "", 0, 1, []
    for number, value in _fields(view):
        if number == 1:
            for dim in _packed(value):
                size *= dim
        elif number == 2 and isinstance(value, int):
            kind = value
        elif number == 8 and isinstance(value, memoryview):
            name = _text(value)
        elif number == 13 and isinstance(value, memoryview) and _text(_one(value, 1)) == "location":
            files.append(_text(_one(value, 2)))
    return name, kind, size, files


def _value(view: memoryview) -> Value:
    name = _text(_one(view, 1))
    kind = _one(view, 2)
    if kind is None:
        return Value(name, "", None)
    for number, inner in _fields(kind):
        if number == 1 and isinstance(inner, memoryview):
            return Value(name, *_tensor(inner))
        if number in (4, 5):
            return Value(name, "sequence" if number == 4 else "map", None)
    return Value(name, "", None)


def _tensor(view: memoryview) -> tuple[str, tuple[int | None, ...] | None]:
    dtype, shape = "", None
    for number, value in _fields(view):
        if number == 1 and isinstance(value, int):
            dtype = _DTYPES.get(value, f"type {value}")
        elif number == 2 and isinstance(value, memoryview):
            shape = tuple(_axis(dim) for field, dim in _fields(value) if field == 1 and isinstance(dim, memoryview))
    return dtype, shape


def _axis(view: memoryview) -> int | None:
    for number, value in _fields(view):
        if number == 1 and isinstance(value, int):
            return value if 0 < value < 1 << 62 else None
    return None


# ---------------------------------------------------------------- protobuf's wire format


def _fields(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    at, end = 0, len(view)
    while at < end:
        key, at = _varint(view, at)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise ValueError("not in protobuf's wire format")
        if wire == 0:
            value, at = _varint(view, at)
            yield number, value
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        elif wire == 2:
            size, at = _varint(view, at)
            if size > end - at:
                raise ValueError("the file is cut short, or not in protobuf's wire format")
            yield number, view[at : at + size]
            at += size
        else:
            raise ValueError("not in protobuf's wire format")


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("not in protobuf's wire format")


def _packed(value: int | memoryview) -> list[int]:
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        one, at = _varint(value, at)
        found.append(one)
    return found


def _one(view: memoryview, wanted: int) -> memoryview | None:
    for number, value in _fields(view):
        if number == wanted and isinstance(value, memoryview):
            return value
    return None


def _text(view: memoryview | None) -> str:
    return "" if view is None else bytes(view).decode("utf-8")

"""The head of a GGUF file: what a language model says of itself, read without its weights."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from gristmill.errors import BadModel

MAGIC = b"GGUF"
MOST_TEXT = 1 << 24  # bytes of a text in the head: more is a damaged file
# By the numbers of the specification (github.com/ggml-org/ggml, docs/gguf.md).
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


def context_length(path: Path) -> int | None:
    """The tokens that a model takes, of prompt and answer together; None if it does not say. Raises BadModel for what
    is no GGUF file.
    """
    try:
        with open(path, "rb") as file:
            if file.read(4) != MAGIC:
                raise BadModel(f"{path}: this is not a GGUF file: it does not begin with GGUF")
            version = _number(file, "I")
            if version not in (2, 3):
                raise BadModel(f"{path}: GGUF version {version} is not supported: convert it to version 3")
            _tensors, entries = _number(file, "Q"), _number(file, "Q")
            for _ in range(entries):
                name = _text(file).decode("utf-8", "replace")
                value = _value(file, _number(file, "I"))
                if name.endswith(".context_length"):
                    return int(value)
    except (OSError, struct.error, ValueError, KeyError) as e:
        raise BadModel(f"{path}: this GGUF file cannot be read ({type(e).__name__}: {e}): is it whole?") from e
    return None


def _number(file: BinaryIO, kind: str) -> Any:
    return struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))[0]


def _text(file: BinaryIO) -> bytes:
    if (size := _number(file, "Q")) > MOST_TEXT:
        raise ValueError(f"a text of {size} bytes")
    return file.read(size)


def _value(file: BinaryIO, kind: int) -> Any:
    """A value; None for an array, which is passed over."""
    if kind == _TEXT:
        return _text(file)
    if kind != _ARRAY:
        return _number(file, _NUMBERS[kind])
    inner, count = _number(file, "I"), _number(file, "Q")
    if inner in (_TEXT, _ARRAY):
        for _ in range(count):
            _value(file, inner)
    else:
        file.seek(count * struct.calcsize(_NUMBERS[inner]), 1)
    return None

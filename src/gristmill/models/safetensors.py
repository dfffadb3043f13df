"""Files of safetensors, read by numpy alone. The format: https://github.com/huggingface/safetensors#format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def read_header(path: Path) -> dict[str, Any]:
    """What the file says of its float tensors: `dtype`, `shape` and `data_offsets` by name. Others are left out.
    Raises OSError and ValueError.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError(f"{path} is not a safetensors file")
        header = json.loads(file.read(size))
    return {n: e for n, e in header.items() if n != "__metadata__" and e["dtype"] in (*_FLOATS, "BF16")}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The float tensors as float32, which share the file's memory where they are float32 there."""
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=start) if path.stat().st_size > start else np.empty(0, "u1")
    tensors = {}
    for name, entry in read_header(path).items():
        begin, end = entry["data_offsets"]
        raw = data[begin:end]
        if entry["dtype"] == "BF16":  # the upper half of a float32
            values = (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, dtype=_FLOATS[entry["dtype"]]).astype(np.float32, copy=False)
        tensors[name] = values.reshape(entry["shape"])
    return tensors

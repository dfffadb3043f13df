"""Whether the library that computes a model can use a GPU: wheels for CPUs alone are as common as those for both."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Literal

Library = Literal["torch", "onnxruntime", "openvino"]


def library_of(backend: str) -> Library:
    """What computes a transformer with that backend."""
    return "openvino" if "openvino" in backend else "torch" if backend == "torch" else "onnxruntime"


def without_gpu(library: Library) -> str | None:
    """Why the library that is installed here cannot use a GPU, and what to install; None if it can, or is not here."""
    if library == "openvino":
        return "backend openvino computes on CPUs here: use backend torch or onnx"
    if library == "torch":
        built = _torch_build()
        if built is None or built[1]:
            return None
        return f"torch {built[0]} is built without CUDA: install one that has it (https://pytorch.org/get-started)"
    try:
        import onnxruntime
    except ImportError:
        return None
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        return None
    return f"onnxruntime {onnxruntime.__version__} is built without CUDA: use backend torch, or install onnxruntime-gpu"


def _torch_build() -> tuple[str, bool] | None:
    """torch's version, and whether it is built for CUDA or ROCm (torch names them alike): read, as to import it takes
    seconds.
    """
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    try:
        text = (Path(next(iter(found.submodule_search_locations))) / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    said = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*=\s*(.+?)\s*$", text, re.MULTILINE))
    if "cuda" not in said:
        return None
    built = any(said.get(n, "None") != "None" for n in ("cuda", "hip"))
    return said.get("__version__", "").strip("'\""), built

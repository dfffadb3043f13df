"""Failures for lack of memory, in any library, and how to release what is cached."""

from __future__ import annotations

import gc
import re
import sys

# What libraries without their own exception class say: ONNX Runtime's arena and CUDA providers, torch's CPU and MPS
# allocators, cuBLAS and cuDNN workspaces.
_PHRASES = re.compile(
    r"out of memory|failed to allocate memory|can't allocate memory|cannot allocate memory|bad[_ ]alloc"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUDA failure 2\b|BFCArena::.*[Aa]lloc"
    r"|Unable to allocate [\d.]+ \w+ for an array",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory (of the device or the machine) ran out, so that fewer rows might fit."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, MemoryError) or type(current).__name__ in ("OutOfMemoryError", "ArrowMemoryError"):
            return True
        if isinstance(current, RuntimeError) or type(current).__module__.startswith(("onnxruntime", "torch")):
            try:
                text = str(current)
            except Exception:  # a broken __str__ says nothing about memory
                text = ""
            if _PHRASES.search(text):
                return True
        current = current.__cause__
    return False


def release_memory() -> None:
    """Collect garbage and hand cached device memory back. Costs tens of milliseconds: only after running out."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    elif hasattr(torch, "mps") and torch.backends.mps.is_available():
        torch.mps.empty_cache()

"""Types of GPUs by the many names that people, drivers and clusters use for them."""

from __future__ import annotations

import re
from collections.abc import Iterable

OF_RAY = ("A10G", "A100", "H100", "K80", "L4", "P4", "P100", "T4", "V100")  # those by NVIDIA, known without Ray
# Types that data centres have and Ray's own list lacks; spelled as Ray spells what its nodes report.
COMMON = (
    "A10", "A30", "A40", "A100-40G", "A100-80G", "A800", "B200", "B300", "GB200", "GH200", "H20", "H200", "H800",
    "L20", "L40", "L40S", "RTX-4090", "RTX-5090", "RTX-6000",
)  # fmt: skip
_BRANDS = {"nvidia", "tesla", "geforce", "quadro", "gpu", "amd", "intel"}
_DIGIT = re.compile(r"\d").search
_MEMORY = re.compile(r"(\d+)g(?:i?b)?")


def meant(asked: str, names: Iterable[str]) -> str | None:
    """Which of the names `asked` means, however it is written: A100_80G, "nvidia-a100", "A100-SXM4-80GB"; None if it is
    none of them, or has more memory than any.
    """
    words, memory = _read(asked)
    found: list[tuple[tuple[bool, bool, bool, int], str]] = []
    for name in sorted(set(names)):
        its, has = _read(name)
        alike = (its <= words or words <= its) and any(
            map(_DIGIT, its if len(its) < len(words) else words)
        )  # a brand is not a type
        if name == asked or (alike and (not memory or not has or memory <= has)):
            found.append(((name == asked, its == words, memory == has, -len(its ^ words)), name))
    return max(found)[1] if found else None


def _read(name: str) -> tuple[frozenset[str], int]:
    """The words of a type, and its memory in GB, 0 if it gives none."""
    words = [w for w in re.split(r"[^a-z0-9]+", name.lower()) if w and w not in _BRANDS]
    memory = [int(m[1]) for w in words if (m := _MEMORY.fullmatch(w))]
    return frozenset(w for w in words if not _MEMORY.fullmatch(w)), max(memory, default=0)

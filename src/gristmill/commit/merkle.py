"""Merkle trees as RFC 6962 (section 2.1) defines them, over sha256: a root stands for a list of leaves, and a path of a
few hashes shows that a leaf is among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal

from gristmill.values import dataclass

__all__ = ["Step", "climbed", "leaf", "path", "root"]


@dataclass(frozen=True)
class Step:
    """A step of a path towards the root: the hash beside the one that was reached, and on which side of it."""

    side: Literal["left", "right"]
    hash: str


def leaf(data: bytes) -> bytes:
    """The hash of a leaf. Its prefix is another one than that of a pair, so that none can be taken for the other."""
    return hashlib.sha256(b"\0" + data).digest()


def root(leaves: Iterable[bytes]) -> bytes:
    """The root over hashes of leaves, in their order, which are taken one at a time."""
    whole: list[tuple[int, bytes]] = []  # trees over leaves before this one, with their heights, which fall
    for found in leaves:
        height, top = 0, found
        while whole and whole[-1][0] == height:
            height, top = height + 1, _pair(whole.pop()[1], top)
        whole.append((height, top))
    if not whole:
        return hashlib.sha256(b"").digest()
    _, top = whole.pop()
    while whole:  # a last one without a partner goes up as it is, which is the tree of the RFC
        top = _pair(whole.pop()[1], top)
    return top


def path(leaves: Sequence[bytes], index: int) -> tuple[Step, ...]:
    """The steps from one of the leaves to the root."""
    level, found = list(leaves), []
    while len(level) > 1:
        beside = index ^ 1
        if beside < len(level):
            found.append(Step("right" if beside > index else "left", level[beside].hex()))
        level, index = _above(level), index // 2
    return tuple(found)


def climbed(start: bytes, steps: Sequence[Step]) -> bytes:
    """The root that a path leads to from a leaf."""
    for step in steps:
        other = bytes.fromhex(step.hash)
        start = _pair(start, other) if step.side == "right" else _pair(other, start)
    return start


def _above(level: Sequence[bytes]) -> list[bytes]:
    pairs = [_pair(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
    return pairs if len(level) % 2 == 0 else [*pairs, level[-1]]


def _pair(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()

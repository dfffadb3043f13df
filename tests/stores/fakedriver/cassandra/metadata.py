"""Where partitions are in the ring."""

from __future__ import annotations

import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Murmur3Token:
    """A place in it, by another hash than the real one."""

    value: int

    @classmethod
    def from_key(cls, key: bytes) -> Murmur3Token:
        """The token of a partition."""
        return cls(zlib.crc32(key) - (1 << 31))

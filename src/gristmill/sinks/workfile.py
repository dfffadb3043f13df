"""A work file as pyarrow's encoders see it."""

from __future__ import annotations

from typing import Any

__all__ = ["Guarded"]


class Guarded:
    """Passes writes on to a file, but leaves closing it to its owner, who has to sync it first.

    Encoders write their last bytes when they are closed or collected; after `drop` these are discarded.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._dropped = False
        self.closed = False

    def write(self, data: Any) -> int:
        """Write, or after `drop` only count the bytes."""
        if self._dropped:
            return memoryview(data).nbytes
        written: int = self._file.write(data)
        return written

    def drop(self) -> None:
        """Let nothing more through."""
        self._dropped = True

    def flush(self) -> None:
        """Nothing: the owner syncs."""

    def close(self) -> None:
        """Nothing: the owner closes."""

    def tell(self) -> int:
        """The position in the file."""
        position: int = 0 if self._dropped else self._file.tell()
        return position

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

"""An object as a file that is read by ranges."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from gristmill.files.objectstore import ObjectFiles


T = TypeVar("T")


class Ranges(io.RawIOBase):
    """An object as a file that is read by ranges, from its other place (`kept`) if it goes meanwhile."""

    def __init__(self, files: ObjectFiles, path: str, kept: str | None = None) -> None:
        self._files, self._paths, self._at = files, [path, *([] if kept is None else [kept])], 0
        self.size = self._asked(files.size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self.size if size < 0 else min(self.size, self._at + size)
        if stop <= self._at:
            return b""
        data = self._asked(lambda path: self._files.range(path, self._at, stop))
        self._at += len(data)
        return data

    def _asked(self, what: Callable[[str], T]) -> T:
        try:
            return what(self._paths[0])
        except FileNotFoundError:
            if len(self._paths) == 1:
                raise
            del self._paths[0]
            return what(self._paths[0])

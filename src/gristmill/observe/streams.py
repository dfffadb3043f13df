"""Real streams: terminals and pipes, wide and narrow, some of which close before we are done."""

from __future__ import annotations

import os
from typing import Any, TextIO

PIPE_WIDTH = 160  # columns, if there is no terminal to ask


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def width_of(stream: Any) -> int:
    """Columns of the terminal behind a stream; PIPE_WIDTH if there is none."""
    if not is_terminal(stream):
        return PIPE_WIDTH
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return 80


class Sturdy:
    """A stream that never raises: what cannot be written is lost, and after a first failure everything."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.broken = False

    def write(self, text: str) -> int:
        """Write, or lose, the text."""
        if not self.broken:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                return self.write(text.encode(encoding, "replace").decode(encoding))
            except Exception:  # whatever a program's replacement for a stream raises
                self.broken = True
        return len(text)

    def flush(self) -> None:
        """Flush, if the stream still can."""
        if not self.broken:
            try:
                self._stream.flush()
            except AttributeError:  # a stream that can only write
                return
            except Exception:
                self.broken = True

    def isatty(self) -> bool:
        return is_terminal(self._stream)

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return self._stream.encoding or "utf-8"

"""The bytes of a text file by offset. Compressed files (.gz, .zst, .bz2) are read forwards only: offsets count the
decompressed bytes, and a reader stays open between calls so that the next range continues where the last one stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from gristmill.errors import BadSource
from gristmill.shards.sourcefiles import SourceFile
from gristmill.sources.openreaders import Waiting
from gristmill.sources.paths import Storage, open_input

__all__ = ["Stream", "compressed", "opened"]

_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_SKIP = 4 << 20  # bytes decompressed at a time on the way to an offset


class Stream(Protocol):
    """Bytes by offset."""

    path: str

    def read(self, at: int, count: int) -> bytes:
        """At most `count` bytes from offset `at`; none only at the end of the file."""
        ...

    def close(self) -> None: ...


def plain_name(path: str) -> str:
    """A path without a URL's query and what contains an archive; in a local path these marks are part of a name."""
    return path.partition("?")[0].partition("::")[0] if "://" in path else path


def compressed(path: str) -> str | None:
    """The codec that a path's suffix shows, or None."""
    name = plain_name(path).lower()
    return next((codec for suffix, codec in _CODECS.items() if name.endswith(suffix)), None)


@contextmanager
def opened(file: SourceFile, fs: Storage) -> Iterator[Stream]:
    """The file's stream, for one user: a kept one, else a new one. It is kept again, unless reading failed."""
    key = (file.path, file.size, file.stamp, file.touched)
    stream = _waiting.take(key, lambda: _open(file, fs))
    sound = False
    try:
        yield stream
        sound = True
    except GeneratorExit:
        sound = True  # the caller stopped early
        raise
    finally:
        _waiting.put(key, stream) if sound else stream.close()


def _open(file: SourceFile, fs: Storage) -> Stream:
    codec = compressed(file.path)
    return _Plain(file.path, fs) if codec is None else _Inflating(file.path, fs, codec)


class _Plain:
    def __init__(self, path: str, fs: Storage) -> None:
        self.path = path
        self._file = open_input(fs, path)

    def read(self, at: int, count: int) -> bytes:
        data: bytes = self._file.read_at(count, at)
        return data

    def close(self) -> None:
        self._file.close()


class _Inflating:
    """Keeps the last bytes that it returned, as a range may begin within them."""

    def __init__(self, path: str, fs: Storage, codec: str) -> None:
        self.path, self._fs, self._codec = path, fs, codec
        self._file: Any = None
        self._start()

    def _start(self) -> None:
        import pyarrow as pa

        self.close()
        self._file = open_input(self._fs, self.path)
        self._inflated = pa.CompressedInputStream(self._file, self._codec)
        self._held, self._held_at, self._next = b"", 0, 0

    def read(self, at: int, count: int) -> bytes:
        if at < self._held_at:
            self._start()
        while at >= self._next:
            self._held_at, self._held = (
                self._next,
                self._more(count if at == self._next else min(_SKIP, at - self._next)),
            )
            self._next += len(self._held)
            if not self._held:
                return b""
        return self._held[at - self._held_at :][:count]

    def _more(self, count: int) -> bytes:
        import pyarrow as pa

        try:
            data: bytes = self._inflated.read(count)
        except (OSError, pa.ArrowException) as e:  # bzip2 raises the latter if one of several streams is empty
            if isinstance(e, (OSError, MemoryError)) and (getattr(e, "errno", None) or not _of_the_data(str(e))):
                raise
            raise BadSource(
                f"{self.path}: cannot be decompressed after byte {self._next} of the text: {' '.join(str(e).split())}"
            ) from e
        return data

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _of_the_data(message: str) -> bool:
    return any(word in message.lower() for word in ("compress", "zlib", "inflate", "zstd", "bz2", "stream"))


_waiting: Waiting[Stream] = Waiting(2)

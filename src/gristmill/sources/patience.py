"""File systems behind a network, whose store may be unavailable for a while: requests are repeated for as long as a
restart or a failover takes. What will not change, such as missing rights or a missing bucket, is reported at once.
"""

from __future__ import annotations

import errno
import io
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from gristmill.errors import BadSource
from gristmill.job.uris import redact
from gristmill.process.away import is_away, says_away
from gristmill.process.blockingcalls import heard
from gristmill.process.interrupts import ENDING
from gristmill.process.pool import Pool
from gristmill.sources.listing import Entry, Listing, Names, unreached
from gristmill.values import dataclass

__all__ = ["PATIENCE", "Patient", "StoreAway", "connected", "patiently"]

PATIENCE = 180.0  # seconds, as for sinks
_SAID_AFTER = 5.0  # seconds of waiting before anything is reported
_LOG = logging.getLogger("gristmill.sources")
T = TypeVar("T")

# What errors of pyarrow, botocore and Google, and those of others by their status, say of failures that another attempt
# does not change. They also quote names of files, which must not match.
_LASTING = re.compile(
    r"AWS Error (?:ACCESS_DENIED|INVALID_\w+|SIGNATURE\w*|UNRECOGNIZED_CLIENT|MISSING_AUTH\w*|NO_SUCH_\w+|\w*NOT_FOUND)"
    r"|\((?:AccessDenied|NoSuch\w+|Invalid\w+|SignatureDoesNotMatch|40[0-57])\)|Unable to locate credentials"
    r"|Status\((?:PERMISSION_DENIED|UNAUTHENTICATED|NOT_FOUND|INVALID_ARGUMENT)"
    r"|(?:HTTP status|status code:?|HTTP/[\d.]+) (?:3\d\d|4(?!08|09|25|29)\d\d|501|505)"
)
# What errors of pyarrow say when the store cannot be asked where a bucket is.
_AWAY = re.compile(
    r"AWS Error (?:NETWORK_CONNECTION|REQUEST_TIMEOUT|SLOW_DOWN|THROTTLING|SERVICE_UNAVAILABLE|INTERNAL_\w+)"
)
_LIBRARIES = ("aiohttp", "botocore", "requests", "urllib3", "httpx", "httpcore", "http", "gcsfs", "azure", "google")
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)


class StoreAway(OSError):
    """A source's store did not answer within the time allowed. The filename is the store's address."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def patiently(place: str, ask: Callable[[], T], patience: float = PATIENCE) -> T:
    """What `ask` returns, retried with full jitter; the main thread hears signals. Raises StoreAway; BadSource for
    failures that last.
    """
    from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

    began, said = time.monotonic(), False

    def tell(state: RetryCallState) -> None:
        nonlocal said
        if not said and time.monotonic() - began > _SAID_AFTER:
            said = True
            error = state.outcome.exception() if state.outcome is not None else None
            _LOG.warning(
                "%s: the store does not answer (%s): waiting up to %.0f s for it", place, _line(error), patience
            )

    def pause(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not ENDING.overdue(began):
            time.sleep(min(0.25, seconds))

    attempts = Retrying(
        wait=wait_random_exponential(0.2, max=10), stop=stop_after_delay(patience), sleep=pause, before_sleep=tell,
        retry=retry_if_exception(lambda e: _passing(e) and not ENDING.overdue(began)), reraise=True,
    )  # fmt: skip
    try:
        return attempts(lambda: heard(ask))
    except Exception as e:
        text = _line(e)
        if _passing(e):
            waited = f"the store did not answer for {time.monotonic() - began:.0f} s ({text})"
            raise StoreAway(errno.EIO, waited, place) from None
        if _lasting(e):
            raise BadSource(f"{place}: not readable: {text}") from None
        if isinstance(e, FileNotFoundError) and e.errno is None:
            raise FileNotFoundError(errno.ENOENT, text, place) from None
        raise


def connected(place: str, connect: Callable[[], T]) -> T:
    """What `connect` returns: a client of the store, some of which ask it something at once. They also raise what
    another attempt does not change, such as that a library is not installed: only that the store is away is waited for.
    """
    other: list[Exception] = []

    def attempt() -> T | None:
        try:
            return connect()
        except Exception as e:
            cause = unreached(e) or e
            if _passing(cause) and (is_away(cause) or says_away(str(cause)) or _AWAY.search(str(cause))):
                raise cause from None
            other.append(cause)
            return None

    made = patiently(place, attempt)
    if other:
        raise other[0]
    return cast(T, made)


def _passing(error: BaseException) -> bool:
    """Whether another attempt may succeed: for what a network or a server may raise, unless it is known to last."""
    foreign = type(error).__module__.partition(".")[0] in _LIBRARIES
    return (foreign or isinstance(error, OSError)) and not isinstance(error, _FINAL) and not _lasting(error)


def _lasting(error: BaseException) -> bool:
    """Whether a store has said, or its client, what another attempt does not change."""
    if isinstance(error, _FINAL):
        return False
    wrong = isinstance(error, ValueError) and type(error).__module__.partition(".")[0] == "aiohttp"  # URL, certificate
    wrong = wrong or type(error).__name__ == "ArrowException"  # what Azure's client says of credentials
    return wrong or _LASTING.search(f"{error} HTTP status {getattr(error, 'status', None)}") is not None


def _line(error: BaseException | None) -> str:
    return redact(" ".join(str(error).split()))[:300] or type(error).__name__


@dataclass(frozen=True)
class Patient:
    """A listing whose store, at `place`, may be unavailable for a while."""

    inner: Listing
    place: str

    def look(self, path: str) -> Entry | None:
        return patiently(self.place, lambda: self.inner.look(path))

    def entries(self, folder: str, wanted: Names) -> list[Entry]:
        return patiently(self.place, lambda: self.inner.entries(folder, wanted))

    def tree(self, folder: str, skip: Names) -> Iterator[tuple[str, Entry]]:
        return iter(patiently(self.place, lambda: list(self.inner.tree(folder, skip))))

    def open(self, path: str) -> Any:
        import pyarrow as pa

        return pa.PythonFile(_Resumed(self, path), mode="r")


class _Resumed(io.RawIOBase):
    """A file that is reopened after a failed read and then read on. While each read continues where another stopped, as
    those of a text or of a long column chunk do, the next one is requested ahead.
    """

    AHEAD = 4  # columns that are read at once; for each, as much as its last read is held ahead

    def __init__(self, store: Patient, path: str) -> None:
        self._store, self._path = store, path
        self._native: Any = None
        self._at = 0
        self._ends: deque[int] = deque(maxlen=4 * self.AHEAD)  # where the last reads ended
        self._coming: dict[tuple[int, int], Future[bytes]] = {}
        self._threads: Pool | None = None
        self._size = patiently(store.place, lambda: int(self._opened().size()))

    def _opened(self) -> Any:
        if self._native is None:
            self._native = self._store.inner.open(self._path)
        return self._native

    def _attempt(self, at: int, count: int) -> bytes:
        native = self._opened()
        try:
            data: bytes = native.read_at(count, at)
            if len(data) < count:
                raise OSError(f"the answer ended after {len(data)} of {count} bytes")
        except Exception:
            if self._native is native:
                self._native = None  # it may be a broken fsspec connection
            raise
        return data

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        count = min(size, self._size - self._at) if size >= 0 else self._size - self._at
        if count <= 0:
            return b""
        at, self._at = self._at, self._at + count
        coming = self._coming.pop((at, count), None)
        if at in self._ends:
            self._ask_ahead(self._at, min(count, self._size - self._at))
        self._ends.append(self._at)
        if coming is not None and (data := _arrived(coming)) is not None:
            return data
        return patiently(self._store.place, lambda: self._attempt(at, count))

    def _ask_ahead(self, at: int, count: int) -> None:
        if count > 0 and (at, count) not in self._coming:
            while len(self._coming) >= self.AHEAD:
                self._coming.pop(next(iter(self._coming))).cancel()
            if self._threads is None:
                self._threads = Pool(self.AHEAD, "gristmill-ahead")
            self._coming[at, count] = self._threads.submit(self._attempt, at, count)

    def close(self) -> None:
        self._coming.clear()
        if self._threads is not None:
            self._threads.cancel()
        if self._native is not None:
            self._native.close()
        super().close()


def _arrived(coming: Future[bytes]) -> bytes | None:
    """The bytes requested ahead; None if that failed: they are then requested again, with patience."""
    return coming.result() if coming.exception() is None else None

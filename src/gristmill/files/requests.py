"""Requests to an object store: retried if another attempt may succeed, given up if the process is to end.

They are coroutines in a thread of their own, so that whoever waits for one hears signals and can drop it.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import errno
import gc
import itertools
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from gristmill.errors import BadJob
from gristmill.process.interrupts import ENDING

T = TypeVar("T")

_LOG = logging.getLogger("gristmill.commit")
_TICK = 0.25  # seconds between two checks whether the process is to end
_SAID_AFTER = 5.0  # seconds of waiting before anything is reported
_SAID_EVERY = 60.0  # seconds between two reports that the store is unavailable, over many requests
# Statuses, and codes of S3 under others, that say that another attempt may succeed; no status: nothing was answered.
_PASSING = re.compile(r"408|409|425|429|5(?!01|05)\d\d")
_PASSING_CODES = {"RequestTimeout", "SlowDown", "InternalError", "OperationAborted", "ConditionalRequestConflict"}
_STATUS = re.compile(r"status code: (\d{3}[^:\n<]{0,40})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_LEAVING = 3.0  # seconds that the end of the process waits for obstore's threads
_MISPLACED = "redirect without LOCATION"  # how obstore reports a bucket in another region


class Contended(Exception):
    """Another request was at the object at the same moment: nothing was done, and it must be tried again."""


def answer(path: str, request: Callable[[], Awaitable[T]], patience: float) -> T:
    """The store's answer, retried with full jitter for up to `patience` seconds if that may help.

    Raises OSError in our own words, FileNotFoundError if there is no such object.
    """
    began, loop = time.monotonic(), _loop()
    if loop.left():
        raise InterruptedError(errno.EINTR, "this process is ending", path)
    asked = asyncio.run_coroutine_threadsafe(_patiently(path, request, patience), loop)
    try:
        while not concurrent.futures.wait([asked], _TICK).done:
            if ENDING.overdue(began) or loop.left():
                raise InterruptedError(errno.EINTR, "the store did not answer before this process had to end", path)
        return asked.result()
    except InterruptedError:
        raise
    except Exception as e:
        raise _plain(e, path) from None
    finally:
        asked.cancel()
        if loop.leaving:
            loop.settle()


async def _patiently(path: str, request: Callable[[], Awaitable[T]], patience: float) -> T:
    from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_random_exponential

    began = time.monotonic()

    def tell(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, Exception) and time.monotonic() - began > _SAID_AFTER:
            plain = _plain(error, path)
            _say(f"{path}: {getattr(plain, 'strerror', None) or plain}: retrying for up to {patience:.0f} s")

    async for attempt in AsyncRetrying(
        wait=wait_random_exponential(0.2, max=10), stop=stop_after_delay(patience), retry=retry_if_exception(_passing),
        before_sleep=tell, reraise=True,
    ):  # fmt: skip
        with attempt:
            return await request()
    raise AssertionError("the last attempt returns or raises")


_said: list[float] = []  # when it was last reported that a store is unavailable


def _say(text: str) -> None:
    now = time.monotonic()
    if not _said or now - _said[0] > _SAID_EVERY:
        _said[:] = [now]
        _LOG.warning("%s", text)


class _Loop(asyncio.SelectorEventLoop):
    """Tracks the futures that obstore's threads hold: if one of these threads enters Python while the interpreter ends,
    to deliver an answer or to release a future, it aborts the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.leaving = False
        self._alive: weakref.WeakSet[asyncio.Future[Any]] = weakref.WeakSet()

    def create_future(self) -> asyncio.Future[Any]:
        """As obstore calls it for each request."""
        made = super().create_future()
        self._alive.add(made)
        return made

    def left(self) -> bool:
        """Whether the caller may make no more requests: once the process is ending, only the thread that ends it may,
        for a last word to the store.
        """
        return self.leaving and threading.current_thread() is not threading.main_thread()

    def settle(self) -> None:
        """Wait until no thread of obstore's needs Python any more."""
        import obstore

        until = time.monotonic() + _LEAVING
        for looks in itertools.count(1):
            if not self._alive or time.monotonic() > until:
                return
            if looks % 40 == 0:
                gc.collect()  # a request's error, and its frames, may hold its future in a cycle
            time.sleep(0.005)
            obstore.parse_scheme("memory:///")  # its threads leave references for the next caller to release


_loops: dict[int, _Loop] = {}  # by process id; only this process's is used
_starting = threading.Lock()


def _loop() -> _Loop:
    """The loop that runs in a thread of this process. Raises BadJob in a process forked from one with a loop: obstore's
    threads, which can be started only once, do not exist there, and no request would ever end.
    """
    if _loops and os.getpid() not in _loops:
        raise BadJob(
            f"process {os.getpid()} was forked from process {next(iter(_loops))} after that had connected to an object "
            'store, and connections do not survive a fork: start it with multiprocessing.get_context("spawn"), '
            "or fork before the first request"
        )
    with _starting:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = _Loop()
            atexit.register(_leave, os.getpid())
            threading.Thread(target=loop.run_forever, name="gristmill-requests", daemon=True).start()
        return loop


def _leave(process: int) -> None:
    if os.getpid() == process:  # not in a fork, which has none of the threads
        _loops[process].leaving = True
        _loops[process].settle()


def _passing(error: BaseException) -> bool:
    """Whether another attempt may succeed."""
    from obstore.exceptions import AlreadyExistsError, BaseError, GenericError, JoinError

    if isinstance(error, Contended):
        return True
    if type(error) not in (BaseError, GenericError, JoinError, AlreadyExistsError):
        return False
    status, code = _STATUS.search(str(error)), _CODE.search(str(error))
    if code is not None and code[1] in _PASSING_CODES:
        return True
    return _MISPLACED not in str(error) if status is None else _PASSING.match(status[1]) is not None


def _plain(error: Exception, path: str) -> Exception:
    """A store's error in our own words: the status, and the code that the store gave; other errors unchanged."""
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    said = " ".join(m[1].strip() for m in (status, code) if m)
    if isinstance(error, FileNotFoundError) and (code is None or code[1] != "NoSuchBucket"):
        return FileNotFoundError(errno.ENOENT, "no such object", path)
    if isinstance(error, Contended):
        return OSError(errno.EIO, "the store keeps refusing, as if others were writing the same object", path)
    if not isinstance(error, (BaseError, FileNotFoundError)):
        return error
    if _MISPLACED in text:
        said = "with a redirect: the bucket is in another region: give region=…"
    denied = isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or said.startswith(("401", "403"))
    return OSError(
        errno.EACCES if denied else errno.EIO, f"the store {f'answered {said}' if said else _silent(text)}", path
    )


def _silent(text: str) -> str:
    return "cannot be reached" if "connect" in text.lower() else "did not answer"

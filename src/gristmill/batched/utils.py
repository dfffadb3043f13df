"""Names that code written for `batched.utils` imports. Gristmill itself uses none of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from gristmill.batched.types import CacheStats

__all__ = [
    "AsyncDiskCache",
    "batch_iter",
    "batch_iter_by_length",
    "bucket_batch_iter",
    "ensure_async",
    "ensure_import",
    "first",
    "get_or_create_event_loop",
    "is_method",
]

T = TypeVar("T")


@contextlib.contextmanager
def ensure_import(install_name: str | None = None) -> Iterator[None]:
    """An ImportError inside tells how to install what is missing: `install_name`, or what could not be imported."""
    try:
        yield
    except ImportError as e:
        text = f"Failed to import {e.name}: pip install {install_name or e.name}"
        raise ImportError(text, name=e.name) from e


def first(it: Iterable[T]) -> T:
    """The first item. Raises StopIteration if there is none."""
    return next(iter(it))


def is_method(func: Callable[..., Any]) -> bool:
    """Whether a function takes `self` or `cls` and at least one more argument."""
    names = list(inspect.signature(func).parameters)
    return len(names) > 1 and names[0] in ("self", "cls")


def ensure_async(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself if it is a coroutine function, else one that runs it in a thread."""
    if inspect.iscoroutinefunction(func):
        return func

    @functools.wraps(func)
    async def threaded(*args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(func, *args, **kwargs)

    return threaded


def get_or_create_event_loop() -> asyncio.AbstractEventLoop:
    """The running loop, the thread's, or a new one that becomes the thread's."""
    with contextlib.suppress(RuntimeError):
        return asyncio.get_event_loop()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def batch_iter(seq: Sequence[T], batch_size: int) -> Iterator[Sequence[T]]:
    """Pieces of at most `batch_size` items, in order."""
    return (seq[at : at + batch_size] for at in range(0, len(seq), batch_size))


def batch_iter_by_length(seq: Sequence[Any], max_batch_length: int, batch_size: int) -> Iterator[list[Any]]:
    """Pieces of at most `batch_size` items whose lengths sum to at most `max_batch_length`; a longer item is alone."""
    batch: list[Any] = []
    length = 0
    for item in seq:
        if batch and (len(batch) >= batch_size or length + len(item) > max_batch_length):
            yield batch
            batch, length = [], 0
        batch.append(item)
        length += len(item)
    if batch:
        yield batch


def bucket_batch_iter(
    data: list[Any], batch_size: int, *, descending: bool = True
) -> Iterator[tuple[list[Any], list[int]]]:
    """Pieces of items of similar length, with their places in `data`; what fits into one piece keeps its order."""
    order = list(range(len(data)))
    if len(data) > batch_size:
        order.sort(key=lambda place: len(data[place]), reverse=descending)
    for places in batch_iter(order, batch_size) if data else [[]]:
        yield [data[place] for place in places], list(places)


class AsyncDiskCache:
    """A cache on disk for `cache=`, using the package diskcache; values expire after `expiration_seconds`."""

    def __init__(
        self,
        cache_dir: str = "~/.cache/batched",
        *,
        max_threads: int = 16,
        collect_stats: bool = False,
        expiration_seconds: float | None = None,
        **kwargs: Any,
    ) -> None:
        with ensure_import("diskcache"):
            import diskcache  # type: ignore[import-not-found]

        path = Path(cache_dir).expanduser().resolve()
        path.mkdir(parents=True, exist_ok=True)
        self._cache = diskcache.Cache(str(path), **{"statistics": False, **kwargs})
        self._pool = ThreadPoolExecutor(max_threads)
        self._collect = collect_stats
        self._expire = expiration_seconds
        self._stats = CacheStats()

    async def get(self, key: Any) -> Any:
        """The value of a key, None if there is none."""
        begun = time.perf_counter()
        value = await self._call(self._cache.get, self._get_key(key))
        if self._collect:
            self._stats.update_get(hit=value is not None, time_taken=time.perf_counter() - begun)
        return value

    async def set(self, key: Any, value: Any) -> None:
        begun = time.perf_counter()
        await self._call(self._cache.set, self._get_key(key), value, expire=self._expire)
        if self._collect:
            self._stats.update_set(time_taken=time.perf_counter() - begun)

    async def clear(self) -> None:
        await self._call(self._cache.clear)

    def clear_stats(self) -> None:
        """Start counting from zero again."""
        self._stats = CacheStats()

    def stats(self) -> CacheStats:
        """Counts of requests and hits, if `collect_stats` is set."""
        return self._stats

    def _get_key(self, key: Any) -> Any:
        """The key on disk; subclasses may change it."""
        return key

    async def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, functools.partial(function, *args, **options)
        )

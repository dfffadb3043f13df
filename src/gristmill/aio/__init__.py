"""`gristmill.aio.dynamically`: concurrent calls of coroutines grouped; the function may be a coroutine function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeVar, overload

from gristmill.aio import inference
from gristmill.batching.cached import AsyncCache
from gristmill.batching.decorator import Items, decorate
from gristmill.batching.settings import PriorityStrategy, Strategy, WhenFull, settle
from gristmill.batching.work import Lists

__all__ = ["AsyncBatchProcessor", "PriorityStrategy", "dynamically", "inference"]

T = TypeVar("T")
U = TypeVar("U")


class AsyncBatchProcessor(Items[T, U]):
    """What `dynamically` makes of a function, which may be a coroutine function: awaitable."""

    _blocking = False
    __call__ = Items.acall

    def __init__(self, func: Callable[..., Any], **options: Any) -> None:
        super().__init__(func, **options)


class AioDecorator(Protocol):
    """`aio.dynamically(…)` with options: takes the function, which may be a coroutine function."""

    @overload
    def __call__(self, function: Callable[[list[T]], Awaitable[Iterable[U]]], /) -> AsyncBatchProcessor[T, U]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[T]], Awaitable[Iterable[U]]], /) -> AsyncBatchProcessor[T, U]: ...
    @overload
    def __call__(self, function: Callable[[list[T]], Iterable[U]], /) -> AsyncBatchProcessor[T, U]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[T]], Iterable[U]], /) -> AsyncBatchProcessor[T, U]: ...


@overload
def dynamically(
    func: Callable[[list[T]], Awaitable[Iterable[U]]], /, *args: Any, **options: Any
) -> AsyncBatchProcessor[T, U]: ...
@overload
def dynamically(
    func: Callable[[Any, list[T]], Awaitable[Iterable[U]]], /, *args: Any, **options: Any
) -> AsyncBatchProcessor[T, U]: ...
@overload
def dynamically(func: Callable[[list[T]], Iterable[U]], /, *args: Any, **options: Any) -> AsyncBatchProcessor[T, U]: ...
@overload
def dynamically(
    func: Callable[[Any, list[T]], Iterable[U]], /, *args: Any, **options: Any
) -> AsyncBatchProcessor[T, U]: ...
@overload
def dynamically(
    func: None = None,
    /,
    *,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int | None = 8,
    max_batch_length: float | None = None,
    priority_strategy: Strategy = PriorityStrategy.NONE,
    cache: AsyncCache | None = None,
    cost: Callable[[Any], float] | None = None,
    max_batch_cost: float | None = None,
    priority: Callable[[Any], float] | None = None,
    max_queue: int | None = None,
    when_full: WhenFull = "wait",
    timeout: float | None = None,
    retry_alone: bool = False,
) -> AioDecorator: ...
def dynamically(
    func: Any = None,
    /,
    *,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int | None = 8,
    max_batch_length: float | None = None,
    priority_strategy: Strategy = PriorityStrategy.NONE,
    cache: AsyncCache | None = None,
    cost: Callable[[Any], float] | None = None,
    max_batch_cost: float | None = None,
    priority: Callable[[Any], float] | None = None,
    max_queue: int | None = None,
    when_full: WhenFull = "wait",
    timeout: float | None = None,
    retry_alone: bool = False,
) -> Any:
    """Group concurrent calls of coroutines: `@aio.dynamically`, or with options.

    The function takes a list of items and returns one result an item. A coroutine function (or an asynchronous
    generator) runs on the loop that called, each loop by itself; an ordinary function runs in a thread of its own, for
    all loops. `await f(item)`, `await f([items])`.

    `max_batch_length` bounds the sum of the items' lengths in a batch. `priority_strategy`: "none" serves in order of
    arrival; "priority" lets calls of at most `small_batch_threshold` items go before larger ones, which keep a quarter
    of the places; "length" does that, too, and takes the items of one call shortest first. `cache` is asked for each
    item before it is queued, and told the result; of a method, for the item and a name of the instance, which is no
    other's, nor of another process. Functions that share a cache share its answers.

    The other options are those of `gristmill.dynamically`.
    """
    chosen = settle(
        layout=Lists(),
        batch_size=batch_size,
        timeout_ms=timeout_ms,
        small_batch_threshold=small_batch_threshold,
        cost=cost,
        max_batch_cost=max_batch_length if max_batch_cost is None else max_batch_cost,
        priority=priority,
        max_queue=max_queue,
        when_full=when_full,
        timeout=timeout,
        retry_alone=retry_alone,
        priority_strategy=priority_strategy,
        cache=cache,
    )
    return decorate(AsyncBatchProcessor, func, chosen)


AsyncBatchProcessor._decorator = staticmethod(dynamically)

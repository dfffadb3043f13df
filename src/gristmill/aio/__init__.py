"""For asyncio: `aio.dynamically` groups concurrent calls of coroutines, of a function that may be a coroutine function;
`aio.lookup` looks rows up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from gristmill.aio import inference
from gristmill.aio.lookups import AsyncLookup, lookup
from gristmill.dynamic.decorator import Items, decorate
from gristmill.dynamic.settings import Awaited, PriorityStrategy, with_options

__all__ = ["AsyncBatchProcessor", "AsyncLookup", "PriorityStrategy", "dynamically", "inference", "lookup"]

T = TypeVar("T")
U = TypeVar("U")
P = ParamSpec("P")


class AsyncBatchProcessor(Items[T, U]):
    """What `dynamically` returns for a function, which may be a coroutine function: awaitable."""

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


class Dynamically(Protocol[P]):
    """`aio.dynamically`: takes the function, or options."""

    @overload
    def __call__(
        self, func: Callable[[list[T]], Awaitable[Iterable[U]]], /, *args: P.args, **options: P.kwargs
    ) -> AsyncBatchProcessor[T, U]: ...
    @overload
    def __call__(
        self, func: Callable[[Any, list[T]], Awaitable[Iterable[U]]], /, *args: P.args, **options: P.kwargs
    ) -> AsyncBatchProcessor[T, U]: ...
    @overload
    def __call__(
        self, func: Callable[[list[T]], Iterable[U]], /, *args: P.args, **options: P.kwargs
    ) -> AsyncBatchProcessor[T, U]: ...
    @overload
    def __call__(
        self, func: Callable[[Any, list[T]], Iterable[U]], /, *args: P.args, **options: P.kwargs
    ) -> AsyncBatchProcessor[T, U]: ...
    @overload
    def __call__(self, func: None = None, /, *args: P.args, **options: P.kwargs) -> AioDecorator: ...


def _typed(kind: Callable[P, Awaited]) -> Callable[[Any], Dynamically[P]]:
    return with_options(kind)


@_typed(Awaited)
def dynamically(func: Any = None, /, *args: Any, **options: Any) -> Any:
    """Group concurrent calls of coroutines: `@aio.dynamically`, or with options.

    The function takes a list of items and returns one result per item. A coroutine function (or an asynchronous
    generator) runs on the calling loop, with separate batches for each loop; an ordinary function runs in a thread of
    its own, for all loops. `await f(item)`, `await f([items])`.

    The options of `gristmill.dynamically` mean the same here.
    """
    return decorate(AsyncBatchProcessor, func, Awaited(*args, **options).settings())


AsyncBatchProcessor._decorator = staticmethod(dynamically)

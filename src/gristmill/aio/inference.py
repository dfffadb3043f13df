"""`gristmill.aio.inference.dynamically`: concurrent calls of a model by coroutines, padded into one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

from gristmill.dynamic.decorator import Model, OfModels, decorate
from gristmill.dynamic.settings import AwaitedPadded, with_options

__all__ = ["AsyncModelBatchProcessor", "dynamically"]

P = ParamSpec("P")


class AsyncModelBatchProcessor(Model):
    """What `dynamically` returns for a function, which may be a coroutine function."""

    _blocking = False
    __call__ = Model.acall


def _typed(kind: Callable[P, AwaitedPadded]) -> Callable[[Any], OfModels[P, AsyncModelBatchProcessor]]:
    return with_options(kind)


@_typed(AwaitedPadded)
def dynamically(func: Any = None, /, *args: Any, **options: Any) -> Any:
    """Group concurrent calls of a model by coroutines: `@aio.inference.dynamically`, or with options.

    As `gristmill.inference.dynamically`, with the options of `gristmill.aio.dynamically`; the function may be a
    coroutine function.
    """
    return decorate(AsyncModelBatchProcessor, func, AwaitedPadded(*args, **options).settings())


AsyncModelBatchProcessor._decorator = staticmethod(dynamically)

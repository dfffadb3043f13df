"""`gristmill.aio.inference.dynamically`: concurrent calls of a model by coroutines, padded into one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

from gristmill.batching.cached import AsyncCache
from gristmill.batching.decorator import Model, decorate
from gristmill.batching.settings import PriorityStrategy, Strategy, WhenFull, settle
from gristmill.inference import features

__all__ = ["AsyncModelBatchProcessor", "dynamically"]


class AsyncModelBatchProcessor(Model):
    """What `dynamically` makes of a function, which may be a coroutine function."""

    _blocking = False
    __call__ = Model.acall


@overload
def dynamically(func: Callable[..., Any], /, *args: Any, **options: Any) -> AsyncModelBatchProcessor: ...
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
    pad_tokens: Mapping[str, Any] | None = None,
    pad_token: Mapping[str, Any] | None = None,
    padding_side: Literal["left", "right"] = "right",
    spread_kwargs: bool = False,
    sequence_feature: str | None = None,
    attention_mask: bool | str = False,
    unpad_outputs: bool | str | Sequence[str | int] = False,
    cost: Callable[[Any], float] | None = None,
    max_batch_cost: float | None = None,
    priority: Callable[[Any], float] | None = None,
    max_queue: int | None = None,
    when_full: WhenFull = "wait",
    timeout: float | None = None,
    retry_alone: bool = False,
) -> Callable[[Callable[..., Any]], AsyncModelBatchProcessor]: ...
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
    pad_tokens: Mapping[str, Any] | None = None,
    pad_token: Mapping[str, Any] | None = None,
    padding_side: Literal["left", "right"] = "right",
    spread_kwargs: bool = False,
    sequence_feature: str | None = None,
    attention_mask: bool | str = False,
    unpad_outputs: bool | str | Sequence[str | int] = False,
    cost: Callable[[Any], float] | None = None,
    max_batch_cost: float | None = None,
    priority: Callable[[Any], float] | None = None,
    max_queue: int | None = None,
    when_full: WhenFull = "wait",
    timeout: float | None = None,
    retry_alone: bool = False,
) -> Any:
    """Group concurrent calls of a model by coroutines: `@aio.inference.dynamically`, or with options.

    As `gristmill.inference.dynamically`, with the options of `gristmill.aio.dynamically`; the function may be a
    coroutine function. `max_batch_length` bounds the padded tokens of a batch: its longest row times its rows.
    """
    chosen = settle(
        layout=features(
            pad_tokens=pad_tokens,
            pad_token=pad_token,
            padding_side=padding_side,
            spread_kwargs=spread_kwargs,
            sequence_feature=sequence_feature,
            attention_mask=attention_mask,
            unpad_outputs=unpad_outputs,
        ),
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
    return decorate(AsyncModelBatchProcessor, func, chosen)


AsyncModelBatchProcessor._decorator = staticmethod(dynamically)

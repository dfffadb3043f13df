"""`gristmill.inference.dynamically`: concurrent calls of a model grouped, padded into one batch and given out again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

from gristmill.batching.decorator import Model, decorate
from gristmill.batching.padding import MASK, Features, Padding
from gristmill.batching.settings import WhenFull, settle

__all__ = ["ModelBatchProcessor", "dynamically"]


class ModelBatchProcessor(Model):
    """What `dynamically` makes of a function: features in, outputs with as many rows out."""

    def __call__(self, *args: Any, **features: Any) -> Any:
        """`acall` for threads: blocks until the outputs are there."""
        target, given, told = self._given(args, features)
        items = target._layout.items(given)
        return target._answer(given, items, target._batcher.call(target._owner, items, **told))


def features(
    *,
    pad_tokens: Mapping[str, Any] | None,
    pad_token: Mapping[str, Any] | None,
    padding_side: Literal["left", "right"],
    spread_kwargs: bool,
    sequence_feature: str | None,
    attention_mask: bool | str,
    unpad_outputs: bool | str | Sequence[str | int],
) -> Features:
    """The layout that these options describe. Raises TypeError for tokens given twice, ValueError for a wrong side."""
    if pad_tokens is not None and pad_token is not None:
        raise TypeError("pad_tokens and pad_token are two names of one option: give one of them")
    tokens = pad_tokens if pad_tokens is not None else pad_token
    if tokens is not None and not isinstance(tokens, Mapping):
        raise TypeError(f"pad_tokens is {tokens!r}: it is a dict from feature name to value")
    mask = MASK if attention_mask is True else attention_mask or None
    return Features(Padding(dict(tokens or {}), padding_side, sequence_feature, mask, unpad_outputs, spread_kwargs))


@overload
def dynamically(func: Callable[..., Any], /, *args: Any, **options: Any) -> ModelBatchProcessor: ...
@overload
def dynamically(
    func: None = None,
    /,
    *,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int | None = 8,
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
) -> Callable[[Callable[..., Any]], ModelBatchProcessor]: ...
def dynamically(
    func: Any = None,
    /,
    *,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int | None = 8,
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
    """Group concurrent calls of a model: `@inference.dynamically`, or with options.

    The function takes a dict of features (arrays or tensors, the first axis the batch) and returns an array or tensor
    with as many rows, or a list, tuple or dict of such. Each caller gives features of one or more rows, as arrays or
    lists of arrays, and gets the outputs of its own rows. Features keep their dtype, library and device and may be of
    any rank; rows whose features differ in name, dtype or rank go to the function apart.

    `pad_tokens` (or `pad_token`) are the values to pad shorter rows with, 0 where none is named, on `padding_side`.
    `attention_mask=True` gives the function an `attention_mask` (a text: under that name), int64, 1 for each row's own
    places and 0 for padding, unless the caller brings one; `sequence_feature` names the feature measured for it.
    `unpad_outputs=True`, or the names or places of some outputs, cuts per-token outputs back to each row's own length:
    callers who gave lists get lists of arrays. With `spread_kwargs` the function takes features as keyword arguments.
    `max_batch_cost` bounds the padded tokens of a batch: its longest row times its rows.

    The other options are those of `gristmill.dynamically`.
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
        max_batch_cost=max_batch_cost,
        priority=priority,
        max_queue=max_queue,
        when_full=when_full,
        timeout=timeout,
        retry_alone=retry_alone,
    )
    return decorate(ModelBatchProcessor, func, chosen)


ModelBatchProcessor._decorator = staticmethod(dynamically)

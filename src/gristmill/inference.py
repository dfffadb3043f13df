"""`gristmill.inference.dynamically`: concurrent calls of a model grouped, padded into one batch and given out again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

from gristmill.dynamic.decorator import Model, OfModels, decorate
from gristmill.dynamic.settings import Padded, with_options

__all__ = ["ModelBatchProcessor", "dynamically"]

P = ParamSpec("P")


class ModelBatchProcessor(Model):
    """What `dynamically` returns for a function: features in, outputs with as many rows out."""

    def __call__(self, *args: Any, **features: Any) -> Any:
        """`acall` for threads: blocks until the outputs are ready."""
        target, given, told = self._given(args, features)
        items = target._layout.items(given)
        return target._answer(given, items, target._batcher.call(target._owner, items, **told))


def _typed(kind: Callable[P, Padded]) -> Callable[[Any], OfModels[P, ModelBatchProcessor]]:
    return with_options(kind)


@_typed(Padded)
def dynamically(func: Any = None, /, *args: Any, **options: Any) -> Any:
    """Group concurrent calls of a model: `@inference.dynamically`, or with options.

    The function takes a dict of features (arrays or tensors, the first axis the batch) and returns an array or tensor
    with as many rows, or a list, tuple or dict of such. Each caller gives features of one or more rows, as arrays or
    lists of arrays, and gets the outputs of its own rows. Features keep their dtype, library and device, and may have
    any rank; rows whose features differ in name, dtype or rank are never in one batch.

    `max_batch_cost` bounds the padded tokens of a batch: its longest row times its rows. The options of
    `gristmill.dynamically` mean the same here.
    """
    return decorate(ModelBatchProcessor, func, Padded(*args, **options).settings())


ModelBatchProcessor._decorator = staticmethod(dynamically)

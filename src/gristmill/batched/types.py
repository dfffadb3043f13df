"""Names that code written for `batched.types` imports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from gristmill.dynamic.settings import PriorityStrategy
from gristmill.dynamic.stats import Stats as BatchProcessorStats
from gristmill.values import dataclass

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = [
    "AsyncCache",
    "BatchFunc",
    "BatchInfer",
    "BatchProcessorStats",
    "CacheStats",
    "Feature",
    "NDArrayOrTensor",
    "PriorityStrategy",
    "T",
    "U",
]

T = TypeVar("T")
U = TypeVar("U")
_K_contra = TypeVar("_K_contra", contravariant=True)
_V = TypeVar("_V")

BatchFunc = Callable[[list[T]], list[U]]

NDArrayOrTensor = TypeVar("NDArrayOrTensor", "np.ndarray[Any, Any]", "torch.Tensor")
Feature: TypeAlias = NDArrayOrTensor | list[NDArrayOrTensor]
BatchInfer: TypeAlias = Callable[[dict[str, Feature[Any]]], Feature[Any]] | Callable[..., Feature[Any]]


@dataclass
class CacheStats:
    """The result of a cache's `stats()`; the cache itself keeps these figures. Times are in seconds."""

    gets: int = 0
    hits: int = 0
    sets: int = 0
    total_get_time: float = 0.0
    total_hit_time: float = 0.0
    total_set_time: float = 0.0

    @property
    def avg_get_time(self) -> float:
        """Seconds per get."""
        return self.total_get_time / self.gets if self.gets else 0.0

    @property
    def avg_hit_time(self) -> float:
        """Seconds per get that found something."""
        return self.total_hit_time / self.hits if self.hits else 0.0

    @property
    def avg_set_time(self) -> float:
        """Seconds per set."""
        return self.total_set_time / self.sets if self.sets else 0.0

    def update_get(self, *, hit: bool, time_taken: float) -> None:
        self.gets += 1
        self.total_get_time += time_taken
        if hit:
            self.hits += 1
            self.total_hit_time += time_taken

    def update_set(self, *, time_taken: float) -> None:
        self.sets += 1
        self.total_set_time += time_taken


@runtime_checkable
class AsyncCache(Protocol[_K_contra, _V]):
    """The whole protocol of a cache. `cache=` itself needs only `get` and `set`, and uses `stats` if there is one."""

    async def get(self, key: _K_contra) -> _V | None: ...

    async def set(self, key: _K_contra, value: _V) -> None: ...

    async def clear(self) -> None: ...

    def stats(self) -> CacheStats: ...

"""What code written for `batched.types` looks for."""

from gristmill.batching.cached import AsyncCache
from gristmill.batching.settings import PriorityStrategy
from gristmill.batching.stats import Stats as BatchProcessorStats

__all__ = ["AsyncCache", "BatchProcessorStats", "PriorityStrategy"]

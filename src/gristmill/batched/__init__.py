"""The names of the `batched` package: `import gristmill.batched as batched` runs code that was written for it."""

from gristmill.batched import aio, inference, types
from gristmill.batching.decorator import dynamically

__all__ = ["aio", "dynamically", "inference", "types"]

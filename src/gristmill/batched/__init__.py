"""The names of the `batched` package: `import gristmill.batched as batched` runs code that was written for it."""

from gristmill.batched import aio, inference, types, utils
from gristmill.dynamic.decorator import BatchProcessor, dynamically

__all__ = ["BatchProcessor", "aio", "dynamically", "inference", "types", "utils"]

"""The names of `batched.aio`."""

from gristmill.aio import AsyncBatchProcessor, dynamically
from gristmill.batched.aio import inference

__all__ = ["AsyncBatchProcessor", "dynamically", "inference"]

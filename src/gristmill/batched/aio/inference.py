"""The names of `batched.aio.inference`."""

from gristmill.aio.inference import AsyncModelBatchProcessor, dynamically

__all__ = ["AsyncModelBatchProcessor", "dynamically"]

"""The names of `batched.inference`."""

from gristmill.inference import ModelBatchProcessor, dynamically

__all__ = ["ModelBatchProcessor", "dynamically"]

"""`batched.aio`."""

from gristmill.aio import dynamically
from gristmill.batched.aio import inference

__all__ = ["dynamically", "inference"]

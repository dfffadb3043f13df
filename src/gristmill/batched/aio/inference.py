"""`batched.aio.inference`."""

from gristmill.aio.inference import dynamically

__all__ = ["dynamically"]

"""`batched.inference`."""

from gristmill.inference import dynamically

__all__ = ["dynamically"]

"""Heavy packages, imported where they are used; a missing one is an error that prints the install command."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from gristmill.errors import MissingExtra


def require(module: str, extra: str, purpose: str) -> Any:
    """The imported module, or MissingExtra saying what it is needed for and how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        package = module.partition(".")[0]
        if e.name is not None and e.name.partition(".")[0] != package:
            raise  # the package is installed but broken: its own error says more
        raise MissingExtra(
            f"{purpose} needs {package}, which is not installed: pip install 'gristmill[{extra}]'"
        ) from e


def installed(module: str) -> bool:
    """Whether a package could be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False

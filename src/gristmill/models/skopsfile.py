"""skops.io, imported without torch, which it imports by itself where that is installed. Importing this module
imports it, so that a process from which workers are forked can have it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

# skops lists the estimators of scikit-learn by walking its packages, and so imports these: bridges to libraries of
# arrays, which import the libraries, and which scikit-learn imports by itself where it is given such arrays. They hold
# no estimator (`all_estimators` looks at no "externals"), so that the list is the same without them.
_BRIDGES = {f"sklearn.externals.array_api_compat.{name}": name for name in ("torch", "cupy", "dask")}


def _imported() -> ModuleType:
    held = [bridge for bridge, library in _BRIDGES.items() if library not in sys.modules and bridge not in sys.modules]
    for bridge in held:
        sys.modules[bridge] = None  # type: ignore[assignment]  # how Python is told that an import is to fail
    try:
        return importlib.import_module("skops.io")
    finally:
        for bridge in held:
            sys.modules.pop(bridge, None)


io = sys.modules.get("skops.io") or _imported()

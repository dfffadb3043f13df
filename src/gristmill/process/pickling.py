"""Pickles that can be read where the script or notebook defining their functions was never imported: by cloudpickle."""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

WAYS = (
    "put it in a module of its own (a .py file), which workers import, create what cannot be sent in the __init__ of a "
    "class, or use workers=0"
)


def by_value(value: Any) -> bytes:
    """The pickle of a value. Raises whatever pickle does."""
    out = io.BytesIO()
    pickler()(out, protocol=5).dump(value)
    return out.getvalue()


@functools.cache
def pickler() -> Any:
    """The pickler class, which other code may extend."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            """Functions under `functools.cache` are pickled like others, each with an empty cache, where cloudpickle
            would pickle them by name; cached properties without the lock that they have before Python 3.12.
            """
            if type(obj) is functools.cached_property:
                return _cached_property, (obj.func, obj.attrname)
            if isinstance(obj, functools._lru_cache_wrapper) and _goes_by_value(obj):
                return _cached, (obj.__wrapped__, obj.cache_parameters())
            return super().reducer_override(obj)

    return Pickler


def _goes_by_value(cached: Any) -> bool:
    import cloudpickle

    found: Any = sys.modules.get(cached.__module__ or "")
    if cached.__module__ == "__main__" or cached.__module__ in cloudpickle.list_registry_pickle_by_value():
        return True
    for part in cached.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is not cached


def _cached(function: Callable[..., Any], how: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**how)(function)


def _cached_property(function: Callable[..., Any], name: str) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def from_value(data: bytes) -> Any:
    """What was pickled by value. Raises RuntimeError, with advice, if it cannot be rebuilt here."""
    try:
        return pickle.loads(data)
    except (AttributeError, RecursionError) as e:  # missing names, and objects whose __getattr__ asks itself
        raise RuntimeError(
            f"{type(e).__name__}: {e}: a function of a script or notebook is sent to workers with everything it "
            f"refers to, and that could not be rebuilt there; {WAYS}"
        ) from e

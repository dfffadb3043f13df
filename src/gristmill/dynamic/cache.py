"""Results that a cache of the user's already has, and calls for those that it does not have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from gristmill.process.ownership import own, own_all


class AsyncCache(Protocol):
    """What `cache=` takes. `get` returns None for a key that it does not hold; its errors are raised to the caller."""

    async def get(self, key: Any) -> Any: ...

    async def set(self, key: Any, value: Any) -> None: ...


async def through(
    cache: AsyncCache, keys: Sequence[Any], ask: Callable[[Sequence[int]], Awaitable[Sequence[Any]]]
) -> list[Any]:
    """A result for each key: the cache's, or what `ask` returns for the places that the cache has none for.

    Callers do not wait until new results are in the cache; if that fails, asyncio's handler reports it. The cache and
    each caller get their own copies, which they may change at once.
    """
    results = own_all(await asyncio.gather(*(cache.get(key) for key in keys)))
    missing = [place for place, result in enumerate(results) if result is None]
    if missing:
        kept = {place: _kept(keys[place]) for place in missing}
        for place, result in zip(missing, await ask(missing), strict=True):
            results[place] = result
            task = asyncio.ensure_future(cache.set(kept[place], own(result)))
            _storing.add(task)
            task.add_done_callback(_storing.discard)
    return results


def _kept(key: Any) -> Any:
    """A copy of a key that stays as it is, whatever the caller does with its item while the result is stored."""
    try:
        hash(key)
    except TypeError:
        return own(key)
    return key


_storing: set[asyncio.Future[None]] = set()  # asyncio itself holds tasks weakly

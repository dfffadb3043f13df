"""Results that a cache of the user's already has, and those that it does not have yet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from gristmill.batching.owning import own, own_all


class AsyncCache(Protocol):
    """What `cache=` takes. `get` returns None for what it does not hold; errors of `get` are the caller's."""

    async def get(self, key: Any) -> Any: ...

    async def set(self, key: Any, value: Any) -> None: ...


async def through(
    cache: AsyncCache, keys: Sequence[Any], ask: Callable[[Sequence[int]], Awaitable[Sequence[Any]]]
) -> list[Any]:
    """A result for each key: the cache's, or what `ask` returns for the places that the cache has none for.

    Callers do not wait until new results are in the cache; if that fails, asyncio's handler reports it. What the cache
    is given is its own, and what it gives each caller's: they may change theirs at once.
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
    """A key that stays what it is, whatever the caller does with its item while that is stored."""
    try:
        hash(key)
    except TypeError:
        return own(key)
    return key


_storing: set[asyncio.Future[None]] = set()  # asyncio itself holds tasks weakly

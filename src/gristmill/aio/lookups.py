"""`gristmill.aio.lookup`: what `gristmill.lookup` finds, for coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gristmill.dynamic.decorator import dynamically
from gristmill.job.keywords import named

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from gristmill.stores.contract import Metric, Row
    from gristmill.stores.lookup import Lookup, Neighbours

AT_ONCE = 256  # calls of coroutines that are looked up together


class AsyncLookup:
    """A `Lookup` whose answers are awaited. Calls for keys that come while others are looked up go to the store
    together, in one call; a key that is none fails its own call alone. For coroutines of any loops.
    """

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._asked = dynamically(self._found, batch_size=AT_ONCE, timeout_ms=0, retry_alone=True)

    def _found(self, calls: list[Sequence[Any]]) -> list[list[Row | None]]:
        """For each call the rows of its keys; all of one generation."""
        rows = iter(self._lookup.get_many([key for keys in calls for key in keys]))
        return [[next(rows) for _ in keys] for keys in calls]

    async def get(self, key: Any) -> Row | None:
        """The row of a key, as `Lookup.get` gives it."""
        return (await self.get_many([key]))[0]

    async def get_many(self, keys: Iterable[Any]) -> list[Row | None]:
        """The row of each key, as `Lookup.get_many` gives them; all of one generation."""
        found: list[list[Row | None]] = await self._asked.acall([list(keys)])
        return found[0]

    async def nearest(
        self, vector: ArrayLike, k: int = 10, *, column: str | None = None, metric: Metric | None = None
    ) -> Neighbours:
        """The rows nearest to a vector, as `Lookup.nearest` gives them."""
        return await asyncio.to_thread(self._lookup.nearest, vector, k, column=column, metric=metric)

    async def nearest_many(
        self, vectors: ArrayLike, k: int = 10, *, column: str | None = None, metric: Metric | None = None
    ) -> list[Neighbours]:
        """The rows nearest to each row of a matrix, as `Lookup.nearest_many` gives them."""
        return await asyncio.to_thread(self._lookup.nearest_many, vectors, k, column=column, metric=metric)

    async def generation(self) -> int | None:
        """The generation that is looked up in now; None if that is not known."""
        return await asyncio.to_thread(lambda: self._lookup.generation)

    async def aclose(self) -> None:
        """Answer the calls that wait, and close what is open."""
        await self._asked.aclose()
        await asyncio.to_thread(self._lookup.close)

    async def __aenter__(self) -> AsyncLookup:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


@named("aio.lookup")
def lookup(at: Any, key: Sequence[str] | str | None = None, *, storage: Mapping[str, Any] | None = None) -> AsyncLookup:
    """As `gristmill.lookup`, with answers that are awaited: `async with aio.lookup("redis://…#scores") as scores: await
    scores.get(3)`.
    """
    from gristmill.api import lookup as looked_up

    return AsyncLookup(looked_up(at, key, storage=storage))

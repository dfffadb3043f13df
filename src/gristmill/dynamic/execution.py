"""Running one batch: the function's arguments, the meaning of its answers, and whose they are. For both drivers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from functools import partial
from itertools import islice
from typing import Any, Protocol

from gristmill.dynamic.admission import Batch
from gristmill.dynamic.callerrors import ordinary
from gristmill.dynamic.calls import Call, Raised, call_of, clock, scatter
from gristmill.dynamic.stats import Tally
from gristmill.errors import BatchFailed, WrongOutput
from gristmill.process.ownership import is_array, own, own_all

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Layout(Protocol):
    """How items become the function's arguments, and what it returns becomes one result per item."""

    def groups(self, items: Sequence[Any]) -> Sequence[Sequence[int]]:
        """Groups of places whose items can go to the function together; every place once."""
        ...

    def gather(self, items: Sequence[Any]) -> Arguments:
        """Positional and keyword arguments of one call with these items."""
        ...

    def rows(self, outputs: Any, items: Sequence[Any]) -> list[Any]:
        """One result per item, in order, none of which shares memory with another or with what the function may return
        next. Raises WrongOutput.
        """
        ...

    def length(self, item: Any) -> float:
        """What the item costs if no other measure is given."""
        ...

    def key(self, item: Any) -> Any:
        """The key of the item in a cache."""
        ...


class Lists:
    """The function takes a list of items and returns, or yields, one result per item."""

    def groups(self, items: Sequence[Any]) -> Sequence[Sequence[int]]:
        return (range(len(items)),)

    def gather(self, items: Sequence[Any]) -> Arguments:
        return (list(items),), {}  # a copy: the function may sort or empty its list

    def rows(self, outputs: Any, items: Sequence[Any]) -> list[Any]:
        told = type(outputs) is list
        if not told or len(outputs) == len(items):
            outputs = own_all(outputs) if told else at_most(outputs, len(items) + 1)
        if len(outputs) != len(items):
            returned = f"{len(outputs)} results" if len(outputs) < len(items) or told else "more results"
            raise WrongOutput(f"the batch function returned {returned} for {len(items)} items")
        return outputs  # type: ignore[no-any-return]

    def length(self, item: Any) -> float:
        try:
            return len(item)
        except TypeError:
            return 1

    def key(self, item: Any) -> Any:
        return item


def at_most(outputs: Any, most: int) -> list[Any]:
    """The first `most` of the outputs, each copied when it came; a generator may be endless. Raises WrongOutput for
    anything but a list.
    """
    if inspect.isawaitable(outputs):
        getattr(outputs, "close", lambda: None)()
        raise WrongOutput(
            "the batch function returned an awaitable: declare it with `async def`, under aio.dynamically"
        )
    # Iterating over these gives keys, letters or column names, which may by chance be as many as the items.
    if outputs is None or isinstance(outputs, (str, bytes, Mapping, Set)) or hasattr(outputs, "columns"):
        raise WrongOutput(
            f"the batch function returned {type(outputs).__name__}: it must return a list, one result per item"
        )
    try:
        iterator = iter(own(outputs) if is_array(outputs) else map(own, outputs))
    except TypeError as error:
        raise WrongOutput(
            f"the batch function returned {outputs!r:.200}: it must return a list, one result per item"
        ) from error
    return list(islice(iterator, most))


def is_asynchronous(function: Any) -> bool:
    """Whether calling it gives a coroutine or an asynchronous generator, as far as is known without calling it."""
    while isinstance(function, partial):
        function = function.func
    candidates = (function, getattr(function, "__call__", None))  # noqa: B004
    return any(inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one) for one in candidates)


class Work:
    """The user's function with all that is needed to run a batch of calls through it."""

    def __init__(self, function: Callable[..., Any], layout: Layout, *, method: bool, retry_alone: bool) -> None:
        self.function = function
        self.layout = layout
        self.method = method  # the function takes the calls' owner first
        self.retry_alone = retry_alone
        self.asynchronous = is_asynchronous(function)

    def run(self, batch: Batch, tally: Tally) -> list[Call]:
        """Run the batch here and now; returns the calls that it completes. Errors of the function are not raised."""
        steps, owner = self._steps(batch, tally), self._owner(batch)
        reply: Any = None
        while True:
            try:
                chunk = steps.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            reply = self._attempt(owner, chunk)

    async def arun(self, batch: Batch, tally: Tally) -> list[Call]:
        """`run` for a coroutine function, or one that is an asynchronous generator."""
        steps, owner = self._steps(batch, tally), self._owner(batch)
        reply: Any = None
        while True:
            try:
                chunk = steps.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            reply = await self._attempt_async(owner, chunk)

    def _owner(self, batch: Batch) -> tuple[Any, ...]:
        return (call_of(batch.parts[0][0]).owner,) if self.method else ()

    def _steps(self, batch: Batch, tally: Tally) -> Generator[list[Any], Any, list[Call]]:
        """Yields the items to call the function with, is sent their results, and returns the calls that are over."""
        started = clock()
        tally.left(batch, started)
        items = batch.items
        groups = self.layout.groups(items)
        outcomes: list[Any]
        if len(groups) == 1:
            outcomes = yield from self._outcomes(items)
        else:
            placed: dict[int, Any] = {}
            for places in groups:
                some = yield from self._outcomes([items[place] for place in places])
                placed.update(zip(places, some, strict=True))
            outcomes = [placed[place] for place in range(len(items))]
        failed = sum([type(outcome) is Raised for outcome in outcomes])
        tally.ran(len(items), clock() - started, failed)
        return scatter(batch, outcomes, any_raised=failed > 0)

    def _outcomes(self, items: list[Any]) -> Generator[list[Any], Any, list[Any]]:
        reply = yield items
        if type(reply) is not Raised:
            return reply  # type: ignore[no-any-return]
        if not self.retry_alone or len(items) == 1 or isinstance(reply.error, BatchFailed):
            return [reply] * len(items)
        outcomes: list[Any] = []
        for item in items:
            reply = yield [item]
            outcomes += [reply] if type(reply) is Raised else reply
        return outcomes

    def _attempt(self, owner: tuple[Any, ...], items: list[Any]) -> list[Any] | Raised:
        try:
            arguments, keywords = self._gathered(items)
            return self.layout.rows(self.function(*owner, *arguments, **keywords), items)
        except BaseException as error:
            return Raised(ordinary(error))

    def _gathered(self, items: list[Any]) -> Arguments:
        """The arguments; copies if the items may be tried again, as the function may change some before it fails."""
        return self.layout.gather(own_all(items) if self.retry_alone and len(items) > 1 else items)

    async def _attempt_async(self, owner: tuple[Any, ...], items: list[Any]) -> list[Any] | Raised:
        try:
            arguments, keywords = self._gathered(items)
            outputs = self.function(*owner, *arguments, **keywords)
            if hasattr(outputs, "__aiter__"):
                outputs = await _first(outputs, len(items) + 1)
            return self.layout.rows(await outputs if inspect.isawaitable(outputs) else outputs, items)
        except BaseException as error:
            return Raised(ordinary(error))


async def _first(outputs: Any, most: int) -> list[Any]:
    rows: list[Any] = []
    async for row in outputs:
        rows.append(own(row))
        if len(rows) == most:
            break
    return rows

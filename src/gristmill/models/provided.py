"""A provider of batches as one worker uses it, and who makes requests of rows and pays for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gristmill.models.desk import Desk
from gristmill.models.providers import BatchAPI

Row = Mapping[str, Any]


class Asks(Protocol):
    """Whoever makes requests of rows, asked in its event loop."""

    def request(self, row: Row) -> tuple[str, dict[str, Any], float] | None:
        """The path of the first request that a row makes, its body, and about how many tokens its prompt has by its
        length; None: it makes none.
        """
        ...

    async def __call__(self, row: Row) -> Any:
        """The answer to a row."""
        ...


class Money(Protocol):
    """What requests cost."""

    tried: bool

    @property
    def known(self) -> bool:
        """Whether it is known what requests take, if that matters."""
        ...

    @property
    def learns(self) -> bool:
        """Whether it is to be told of what each request has taken."""
        ...

    @property
    def answered(self) -> int:
        """How many requests are known, of those that were answered."""
        ...

    def bounds(self, most: int | None) -> bool:
        """Whether what a request may cost at most is known, if that matters; its answer has at most so many tokens."""
        ...

    def learn(self, path: str, body: Mapping[str, Any], reply: Mapping[str, Any], tokens: float) -> float:
        """What a request has taken whose prompt has about so many tokens by its length; it is counted elsewhere.
        Returns the dollars.
        """
        ...

    def correct(self, cost: float) -> None:
        """What was ordered costs so many dollars more, or less."""
        ...

    def guess(self, tokens: float, most: int | None) -> float:
        """Dollars that a request may cost of which the prompt has about so many tokens by its length, and the answer at
        most so many.
        """
        ...

    def kept(self, path: str, body: Mapping[str, Any]) -> bool:
        """Whether there is an answer from before."""
        ...

    def order(self, cost: float) -> None:
        """Requests are about to be sent that may cost so many dollars. Raises RunFailed."""
        ...

    def settle(self, cost: float) -> None:
        """Of what was ordered, so much is answered, or given up."""
        ...


@dataclass
class Provided:
    """A provider as one worker uses it: what is known of all its shards."""

    api: BatchAPI
    desk: Desk
    money: Money
    dedupe: bool
    error: BaseException | None = None  # what ended one of the shards ends all
    known: set[str] = field(default_factory=set)  # ids of batches whose shards are known
    most: int = 0  # requests of a batch, once the provider had too much; then one batch at a time
    trials: int = 0  # rows that were asked alone
    full: float | None = None  # since when even batches of one request are too much
    unbounded: int = 0  # requests under way whose cost nothing bounds
    landed: asyncio.Event = field(default_factory=asyncio.Event)  # some of them are answered
    one: asyncio.Lock = field(default_factory=asyncio.Lock)
    tasks: set[asyncio.Future[Any]] = field(default_factory=set)

    async def close(self) -> None:
        """Wait for no batch any more."""
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
        await self.desk.close()

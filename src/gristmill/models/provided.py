"""A provider of batches as one worker uses it, and who makes requests of rows and pays for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Protocol

from gristmill.models.bill import Bill
from gristmill.models.contract import Once
from gristmill.models.desk import Desk
from gristmill.models.providers import BatchAPI
from gristmill.models.spending import Spending
from gristmill.values import dataclass

PROOF = 600.0  # seconds after which somebody is asked alone again before a batch is made, which may take a day

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


class Pays(Protocol):
    """Whoever asks for what is in no batch, and keeps answers."""

    spending: Spending
    answered: float | None  # when, by the monotonic clock, a request of its own was answered last

    def claims(self) -> Once | None:
        """By what equal requests are asked once, in all workers; what is claimed there is kept up."""
        ...

    def kept(self, path: str, body: Mapping[str, Any]) -> bool:
        """Whether there is an answer from before."""
        ...

    async def alone(self, body: Mapping[str, Any], tokens: float, path: str, bill: Bill) -> dict[str, Any]:
        """The answer to a request of its own, counted. Raises as Endpoint.ask."""
        ...


@dataclass
class Provided:
    """A provider as one worker uses it: what is known of all its shards."""

    api: BatchAPI
    desk: Desk
    paid: Pays
    dedupe: bool
    error: BaseException | None = None  # what ended one of the shards ends all
    known: set[str] = field(default_factory=set)  # ids of batches whose shards are known
    most: int = 0  # requests of a batch, once the provider had too much; then one batch at a time
    trying: bool = False  # whether a row was asked alone
    trials: int = 0  # rows that were
    full: float | None = None  # since when even batches of one request are too much
    unbounded: int = 0  # requests under way whose cost nothing bounds
    paying: int = 0  # batches under way for which money is kept free
    begun: float = field(default_factory=time.time)
    landed: asyncio.Event = field(default_factory=asyncio.Event)  # some of them are answered
    one: asyncio.Lock = field(default_factory=asyncio.Lock)
    proving: asyncio.Lock = field(default_factory=asyncio.Lock)
    tasks: set[asyncio.Future[Any]] = field(default_factory=set)

    @property
    def spending(self) -> Spending:
        """What requests cost."""
        return self.paid.spending

    @property
    def answers(self) -> bool:
        """Whether somebody was answered of late."""
        answered = self.paid.answered
        return answered is not None and time.monotonic() < answered + PROOF

    @property
    def tried(self) -> bool:
        """Whether a row was asked alone, whatever became of it, or answered."""
        return self.trying or self.paid.answered is not None

    def go_on(self) -> None:
        """Returns if the run goes on; raises what has ended one of the shards."""
        if self.error is not None:
            raise self.error.with_traceback(None)

    async def close(self) -> None:
        """Wait for no batch any more."""
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
        await self.desk.close()

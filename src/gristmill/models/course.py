"""What becomes of a batch: it is created, waited for and read, and its end may end the run, once."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from gristmill.errors import GristmillError, RunFailed
from gristmill.models.batches import Batch, Request, noted
from gristmill.models.contract import Journal
from gristmill.models.creation import POLL, SLOWEST, Creation
from gristmill.models.desk import Busy, Gone, Unsure
from gristmill.models.filed import Filed
from gristmill.models.provided import Provided
from gristmill.models.providers import State
from gristmill.models.results import Results
from gristmill.process.ownstderr import say

SHORTLY = 30.0  # seconds in which a batch is looked for that a run without a batch API would not wait for


class Course:
    """Sees the batches of a shard through. `alone` asks for one request without a batch, and returns what it failed
    with.
    """

    def __init__(
        self,
        provided: Provided,
        journal: Journal,
        filed: Filed,
        alone: Callable[[Request], Awaitable[Exception | None]],
    ) -> None:
        self._provided = provided
        self._journal = journal
        self._filed = filed
        self._alone = alone
        self._creation = Creation(provided, journal, filed)
        self.results = Results(provided, journal, filed)
        self._smaller = 0  # batches that were too much

    async def through(self, batch: Batch) -> list[Request]:
        """See a batch through. Returns the requests that are to be asked again."""
        if batch.foreign:
            return await self._elsewhere(batch)
        try:
            if not batch.id and batch.earlier:
                batch.id = "" if batch.over else await self._creation.there(batch) or ""
                if not batch.id:  # it was never created
                    await self._note(batch, over=True)
                    batch.over = batch.counted = True
                    return batch.leaves()
                await self._note(batch, id=batch.id)
            elif not batch.id:
                batch.id = await self._creation.created(batch)
                await self._note(batch, id=batch.id)
            self._provided.known.add(batch.id)
            state = await self.results.whole(batch)
        except Gone as e:
            if batch.open:  # it may be there when the next run looks, and be counted then
                await self._ended(batch, f"is no longer there ({e}), and its requests would have to be paid for again")
            await self.results.count(batch)
            await self._twins(batch)
            return batch.leaves()
        await self._twins(batch)
        await self._judged(batch)
        again = batch.leaves()
        self._provided.full = self._provided.full if state.full else None
        if state.failed and again:
            return await self._failed(batch, state, again)
        if batch.refused and again:
            await self._ended(batch, f"was not answered in full: the provider refuses {batch.refused}")
        if state.cancelled and again:
            await self._ended(batch, f"was cancelled at the provider, with {len(again):,} requests unanswered")
        return again

    async def _elsewhere(self, batch: Batch) -> list[Request]:
        """Have what a batch of another shard is answered, which sees it through itself."""
        with contextlib.suppress(Gone):
            batch.id = batch.id or await self._creation.there(batch) or ""
            if batch.id:
                await self.results.whole(batch)
        batch.found.difference_update(batch.strange)  # that shard finds out whether it is the model
        batch.strange.clear()
        return batch.leaves()

    async def _twins(self, batch: Batch) -> None:
        """Whether a batch is there twice, as its creation was repeated: what another one takes is paid, and so told."""
        if not batch.repeated or not batch.id:
            return
        try:
            found = await self._creation.twins(batch)
        except (Gone, RunFailed) as e:
            say(f"{batch.id}: whether its first creation was obeyed later, and is paid for too, cannot be told ({e})")
            return
        for one in found:
            await self._twin(batch, one)
            batch.twins.append(one)

    async def _twin(self, batch: Batch, one: str) -> None:
        twin = Batch(
            batch.name, batch.path, batch.digests, batch.since, batch.tokens, batch.most, one, twins=batch.twins,
            twin=True, earlier=True, sent=True,
        )  # fmt: skip
        say(
            f"{one}: the same requests as {batch.id}, whose first creation was obeyed after it had been looked for: "
            "what it takes is counted, and it is cancelled if it is not over"
        )
        api, desk = self._provided.api, self._provided.desk
        try:
            if not (await api.look(desk, one)).over:
                with contextlib.suppress(Busy, Unsure, RunFailed):  # it is over by now, or goes on: that is counted
                    await api.cancel(desk, one)
            await asyncio.wait_for(self.results.whole(twin), desk.limit)
        except (Gone, RunFailed, asyncio.TimeoutError) as e:
            say(f"{one}: what it may cost is counted, as what it takes cannot be told{f' ({e})' if str(e) else ''}")
            await self.results.count(twin)

    async def left(self, batch: Batch) -> None:
        """Take what a batch was answered by now, for whichever rows, of a run that has no batch API: one that is not
        over is not waited for, and counted as what it may cost.
        """
        if batch.over and not batch.id:  # it was never created
            return
        tokens, most = batch.mean
        longest = None if most is None else math.ceil(most)
        batch.asks = {n: Request(d, batch.path, 0, 0, tokens, longest) for n, d in enumerate(batch.digests)}
        desk, name, over, why = self._provided.desk, batch.id or batch.name, not batch.id, ""
        try:
            over = over or (await self._provided.api.look(desk, batch.id)).over
            if over:
                await asyncio.wait_for(self.through(batch), desk.limit if batch.id else SHORTLY)
                return
        except (GristmillError, Gone, asyncio.TimeoutError) as e:  # what it has no answer for is asked alone
            why = f" ({e})" if str(e) else ""
        if over and batch.counted:
            say(f"{name}: not answered in full, and the rest is asked alone{why}")
            return
        say(
            f"{name}: under way at the provider, and not waited for without batch_api: what it may cost is counted, "
            f"and its {len(batch.open):,} requests are asked for, and paid, alone; cancel it there, or go on with "
            f"batch_api{why}"
        )
        await self.results.count(batch)

    async def _note(self, batch: Batch, **told: Any) -> None:
        await asyncio.to_thread(self._journal.note, {"batch": batch.name, **told})

    async def _ended(self, batch: Batch, what: str) -> None:
        """Stop because of how a batch ended, once: the next run asks again."""
        if not batch.over:
            await self._note(batch, over=True)
            name = batch.id or batch.name
            raise RunFailed(f"batch {name} {what}; what is answered is kept: run again to ask for the rest")

    async def _judged(self, batch: Batch) -> None:
        """What the provider does not have (404) for some requests may be the model: one of these is asked for alone,
        which stops the run then. If it is answered, the others are asked for again.
        """
        if not batch.strange:
            return
        one, *others = batch.strange
        if answered := await self._alone(batch.asks[one]) is None:
            await self._note(batch, judged=True)  # another attempt would ask, and pay, for one more
        for place in others:
            status, reply = batch.strange[place]
            if answered:
                batch.found.discard(place)
                batch.asks[place].tries += 1
                batch.asks[place].why = reply["why"]
            else:
                self._filed.keep(batch.asks[place].digest, status, reply)
        batch.strange.clear()

    async def _failed(self, batch: Batch, state: State, again: list[Request]) -> list[Request]:
        """Of a batch that the provider did not begin: ask again in smaller ones if it was too much, else stop."""
        if not state.full:
            await self._ended(batch, f"was refused: {state.failed}")
        elif not batch.over:
            await self._note(batch, over=True)
            if len(batch.asks) == 1 and self._full() and not await self.others():
                raise RunFailed(
                    f"batch {batch.id} of one request is too much for the provider, though no other of this run is "
                    f"under way: {state.failed}; what is answered is kept: run again once there is room"
                )
            self._provided.most = max(1, len(batch.asks) // 2)
            self._smaller += 1
            await asyncio.sleep(min(SLOWEST, POLL * 2 ** min(10, self._smaller)))
        return again

    def _full(self) -> bool:
        """Whether even one request has been too much for as long as a provider may be out of reach."""
        now, provided = time.monotonic(), self._provided
        provided.full = now if provided.full is None else provided.full
        return now - provided.full > provided.desk.limit

    async def others(self, since: float = 0.0) -> bool:
        """Whether a batch of this job is under way that was made since then."""
        for batch in noted(await asyncio.to_thread(self._journal.everywhere)):
            if batch.id and not batch.over and not batch.counted and batch.since >= since:
                with contextlib.suppress(Gone):
                    if not (await self._provided.api.look(self._provided.desk, batch.id)).over:
                        return True
        return False

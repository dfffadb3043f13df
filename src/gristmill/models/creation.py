"""A batch is created at its provider once, whatever its creation was answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import NoReturn

from gristmill.errors import RunFailed
from gristmill.models.batches import Batch, noted
from gristmill.models.contract import Journal
from gristmill.models.desk import Busy, Gone, Unsure
from gristmill.models.filed import Filed
from gristmill.models.provided import Provided
from gristmill.models.providers import Listed
from gristmill.process.ownstderr import say

POLL, SLOWER, SLOWEST = 1.0, 1.3, 60.0  # seconds between two looks at a batch: first, times so much, at most
# Seconds for which a batch is looked for, once its creation was not answered: the call may be on its way still, and for
# long where a proxy has given up waiting for the provider.
SHORT, LONG = 10.0, 300.0
LOOK, SELDOM = 1.0, 15.0  # seconds between two looks, at first and at most
UNSURE = 10  # times that a creation may go unanswered


class Creation:
    """Creates the batches of a shard, or finds those that may have been created."""

    def __init__(self, provided: Provided, journal: Journal, filed: Filed) -> None:
        self._provided = provided
        self._journal = journal
        self._filed = filed

    async def created(self, batch: Batch) -> str:
        """Create a batch, once. Returns its id."""
        api, desk = self._provided.api, self._provided.desk
        uploaded = await api.upload(desk, batch.name, batch.path, self._lines(batch))
        tries, unsure, begun = 0, 0, time.monotonic()
        while True:
            tries += 1
            batch.sent = True
            try:
                return await api.create(desk, batch.name, batch.path, uploaded, self._lines(batch))
            except Busy as e:
                batch.sent = unsure > 0
                await desk.rest(e, begun, min(SLOWEST, POLL * SLOWER**tries))
            except Unsure as e:
                if not e.sent:
                    batch.sent = unsure > 0
                    await desk.rest(e, begun, min(SLOWEST, POLL * SLOWER**tries))
                    continue
                if (found := await self._appeared(batch, e)) is not None:
                    return found
                unsure, begun = unsure + 1, time.monotonic()
                if unsure >= UNSURE:
                    raise RunFailed(f"the provider creates no batch: {e}; what is answered is kept: run again") from e

    async def _appeared(self, batch: Batch, why: Unsure) -> str | None:
        """The id of a batch whose creation was not answered; None if it is to be created again."""
        batch.unsure = str(why)
        if why.late:
            batch.late = time.time()
            await asyncio.to_thread(self._journal.note, {"batch": batch.name, "late": batch.late})
            say(
                f"the creation of a batch of {len(batch.digests):,} requests was not answered ({why}): it is looked "
                f"for at the provider for {self._patience(batch):.0f} s before it is created again"
            )
        try:
            found = await self.there(batch)
        finally:
            batch.unsure = ""
        if found is None and not batch.repeated:
            batch.repeated = True
            await asyncio.to_thread(self._journal.note, {"batch": batch.name, "repeated": True})
        return found

    def _patience(self, batch: Batch) -> float:
        long = min(LONG, self._provided.desk.limit)
        return max(SHORT, min(long, batch.late + long - time.time()))

    async def there(self, batch: Batch) -> str | None:
        """The id of a batch that may have been created; None also if that still cannot be told, which has stopped a run
        before (`unlisted`).
        """
        wait = POLL
        until, pause = time.monotonic() + self._patience(batch), LOOK
        while True:
            try:
                found = await self._listed(batch)
            except Gone as e:
                if batch.earlier and batch.unlisted:
                    return None
                what = f"batches cannot be listed at the provider ({e})"
                await self._unlisted(batch, what, "its list", "there is no list")
            if found.ids:
                return found.ids[0]
            if found.open:  # one of them may be ours, which is told once they are over
                wait = min(SLOWEST, wait * SLOWER)
                await asyncio.sleep(wait)
                continue
            if (left := until - time.monotonic()) <= 0.0:
                if found.dark and not (batch.earlier and batch.unlisted):
                    what = f"the results of {', '.join(found.dark[:3])} are not there"
                    await self._unlisted(batch, what, "these", "they are not there")
                return None
            await asyncio.sleep(min(pause, left))
            pause = min(SELDOM, 1.5 * pause)

    async def twins(self, batch: Batch) -> list[str]:
        """The ids of others that are the same as a batch, which is over: what was created before it was, and appeared
        late. Those that may be so, or somebody else's, are said and waited for, not for long. Raises Gone, RunFailed.
        """
        until, wait, told = time.monotonic() + self._provided.desk.limit, POLL, False
        while (found := await self._listed(batch)).open:
            left = until - time.monotonic() - wait
            if not told or left <= 0:
                what = "it is waited for" if left > 0 else "it is waited for no more, and what it takes not counted"
                say(
                    f"{', '.join(found.open[:3])}: not over, and may have the same requests as {batch.id}, whose first "
                    f"creation was not answered: only its results tell whose it is ({what}); if it is nobody "
                    "else's, cancel it at the provider"
                )
            if left <= 0:
                break
            told = True
            await asyncio.sleep(wait)
            wait = min(SLOWEST, wait * SLOWER)
        return [one for one in found.ids if one not in batch.twins]

    async def _listed(self, batch: Batch) -> Listed:
        known = set(self._provided.known)  # all of which are noted by now
        elsewhere = [other for other in noted(await asyncio.to_thread(self._journal.everywhere)) if other.id]
        if batch.foreign and (found := [other.id for other in elsewhere if other.name == batch.name]):
            return Listed(tuple(found))  # its own shard has found it
        others = frozenset({*known, *(other.id for other in elsewhere)})
        return await self._provided.api.find(self._provided.desk, batch.name, len(batch.digests), batch.since, others)

    async def _unlisted(self, batch: Batch, what: str, by: str, still: str) -> NoReturn:
        await asyncio.to_thread(self._journal.note, {"batch": batch.name, "unlisted": True})
        raise RunFailed(
            f"{what}, and whether a batch was created whose creation was not answered can be told by {by} "
            f"alone: run again to look once more; if {still} then either, its {len(batch.digests):,} requests are "
            "asked for anew, and may be paid for twice. What else is answered is kept"
        ) from None

    def _lines(self, batch: Batch) -> Iterator[tuple[str, bytes]]:
        """The requests of a batch, by their ids."""
        for place, request in batch.asks.items():
            yield f"{batch.name}-{place}", self._filed.body(request)

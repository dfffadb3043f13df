"""What a batch gave: read until all of it is there, kept for the rows that ask for it, and counted, once over all
attempts at a shard, where it is read, as the provider bills it whoever takes it.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time

from gristmill.errors import RunFailed
from gristmill.job.secret import scrub_values
from gristmill.models.batches import Batch, Request
from gristmill.models.contract import Journal
from gristmill.models.creation import POLL, SLOWER, SLOWEST
from gristmill.models.desk import Gone
from gristmill.models.filed import Filed
from gristmill.models.outcomes import may_be_billed
from gristmill.models.provided import Provided
from gristmill.models.providers import MOST_LINE, BatchReply, State
from gristmill.models.replies import LATER, NOBODY, QUOTA, REPLIES, answers
from gristmill.shards.counts import summed

MOST_DIGITS = 9  # of a request's place in its batch
TURN = 500  # results that are read before others have a turn
DAY = 86_400.0  # seconds in which a batch is over, or has expired


class Results:
    """Reads the batches of a shard."""

    def __init__(self, provided: Provided, journal: Journal, filed: Filed) -> None:
        self._provided = provided
        self._spending = provided.spending
        self._journal = journal
        self._filed = filed

    async def whole(self, batch: Batch) -> State:
        """Keep and count what a batch gave, all of it: what is not told yet, though it was answered and is paid for, is
        waited for. Raises Gone, RunFailed.
        """
        desk, begun, wait = self._provided.desk, 0.0, POLL
        for request in batch.open.values():
            request.why = ""
        while True:
            state = await self._ended(batch)
            told = len(batch.digests) if state.answered is None else min(state.answered, len(batch.digests))
            read, gone = await self._read(batch, state, told)
            if (gone and batch.gone) or read >= told:  # still, as an earlier run has told
                break
            begun = begun or time.monotonic()
            if time.monotonic() - begun + wait > max(desk.limit, desk.timeout):
                what = (
                    f"batch {batch.id} is over, and the provider gives {read:,} of the {told:,} results that there are"
                )
                if gone:
                    await self._note(batch, gone=True)
                    raise RunFailed(
                        f"{what}: the rest is no longer there ({gone}). Run again to look once more: if that is so "
                        "still, these requests alone are asked for, and paid, anew; what else is answered is kept"
                    )
                raise RunFailed(f"{what}: run again to look once more; none of these requests is in another batch")
            await asyncio.sleep(wait)
            wait = min(SLOWEST, wait * SLOWER)
        for request in batch.open.values():
            request.tries += not (state.failed or state.cancelled or batch.refused)  # else nobody was asked
            request.why = request.why or "nothing was said of it"
        await self.count(batch, told - len(batch.read))
        return state

    async def count(self, batch: Batch, unread: int | None = None) -> None:
        """Note what the results of a batch took, if that is not noted yet, with what so many may have cost that were
        not read (None: all of these). What was kept free for those that were not answered is free again.
        """
        unread = max(0, len(batch.digests) - len(batch.read) if unread is None else unread)
        lost = [request for place, request in batch.asks.items() if place not in batch.read]
        for number, request in enumerate(lost):
            self._spending.spend(request.cost if number < unread else 0.0, request.cost)
            request.cost = 0.0
        if batch.counted:
            return
        used = batch.used
        if unread and (cost := unread * self._spending.guess(*batch.mean)):
            used = summed([used, {"cost": cost}])
        told, once = {"batch": batch.name, "counted": True}, f"results of {batch.name}"
        if batch.twin:  # for which nothing was kept free
            self._spending.spend(used.get("cost", 0.0))
            told, once = {"batch": batch.name, "twins": [*batch.twins, batch.id]}, f"{once} as {batch.id}"
        await asyncio.to_thread(self._journal.note, told, used, once)
        batch.counted = True

    async def _note(self, batch: Batch, **told: bool) -> None:
        await asyncio.to_thread(self._journal.note, {"batch": batch.name, **told})

    async def _ended(self, batch: Batch) -> State:
        """Raises Gone, and RunFailed if it should be over long since."""
        wait = POLL
        while True:
            state = (await self._provided.api.look(self._provided.desk, batch.id)).of(len(batch.digests))
            batch.state = state
            if state.over:
                return state
            until = batch.since + DAY if state.until is None else state.until
            if time.time() > until + self._provided.desk.limit:
                raise RunFailed(
                    f"batch {batch.id} is not over, though it should have been at {time.ctime(until)}: {state.done:,} "
                    f"of {len(batch.digests):,} are done; run again to look once more, or cancel it at the provider"
                )
            await asyncio.sleep(wait)
            wait = min(SLOWEST, wait * SLOWER)

    async def _read(self, batch: Batch, state: State, answered: int) -> tuple[int, str]:
        """Keep what the files of a batch have. Returns how many of the results that are `answered` they have; a line
        that cannot be read is one, unless it may be of a request that was not done, and there is no line of that; but
        not if none can be read, nor at the end of a file, which may be cut there, nor if it is about somebody else's
        request. And why some are gone, if they are.
        """
        undone, unreadable, others, number, gone = set[int](), 0, 0, 0, state.gone
        for path in state.files:
            with tempfile.TemporaryFile() as file:
                try:
                    await self._provided.desk.fetched(path, file, MOST_LINE * len(batch.digests))
                except Gone as e:  # it may be there later
                    gone = str(e)
                    continue
                file.seek(0)
                while line := file.readline(MOST_LINE):
                    number += 1
                    if number % TURN == 0:
                        await asyncio.sleep(0)
                    result = self._provided.api.result(line)
                    if result is not None and not result.custom_id.startswith(f"{batch.name}-"):
                        others += 1
                    elif result is None or (found := self._line(batch, result)) is None:
                        unreadable += bool(line.strip()) and line.endswith(b"\n")
                    elif not state.counts(found[1]):
                        undone.add(found[0])
                    elif found[0] not in batch.read:
                        batch.read.add(found[0])
                        self._count(batch, *found)
        if not (batch.read or undone):
            return 0, gone
        hidden = max(0, len(batch.digests) - answered - len(undone))  # which the unreadable ones may be
        read = len(batch.read) + max(0, unreadable - hidden)
        if (unreadable or others) and read < answered:
            gone = gone or f"{unreadable:,} lines cannot be read, {others:,} are about requests of others"
        return read, gone

    def _line(self, batch: Batch, result: BatchReply) -> tuple[int, BatchReply] | None:
        """Keep what a line says. Returns it, and the place of the request that it is about; None if that cannot be
        read.
        """
        name, _, digits = result.custom_id.rpartition("-")
        if name != batch.name or not (digits.isascii() and digits.isdigit()) or len(digits) > MOST_DIGITS:
            return None
        if (place := int(digits)) >= len(batch.digests):
            return None
        ask = batch.asks.get(place)
        if (
            ask is not None
            and place not in batch.found
            and place not in batch.left
            and self._kept(batch, place, ask, result)
        ):
            batch.found.add(place)
        return place, result

    def _kept(self, batch: Batch, place: int, request: Request, result: BatchReply) -> bool:
        """Whether a result is the end of a request."""
        try:
            reply, said = scrub_values([result.reply, result.why], self._provided.desk.secrets)
        except RecursionError:
            request.why = "a reply that is nested too deeply"
            return False
        if result.status == 200 and answers(reply, REPLIES[request.path]):
            self._filed.keep(request.digest, 200, reply)
            return True
        why = f"{result.status}: {said}" if result.status else said
        if result.code in QUOTA or (result.status in NOBODY and result.status != 404):
            batch.refused = request.why = f"{NOBODY.get(result.status or 0, 'the account')}: {why}"
            return False
        if result.status is None or result.status in LATER | {200} | ({404} if batch.judged else set()):
            request.why = why or "a reply of another form"
            return False
        if result.status == 404:
            batch.strange[place] = result.status, {"why": why, "reply": reply}
            return True
        self._filed.keep(request.digest, result.status, {"why": why, "reply": reply})
        return True

    def _count(self, batch: Batch, place: int, result: BatchReply) -> None:
        """Count what a result took, once: later ones are reckoned by it, and where this worker has kept money free for
        it, that is spent.
        """
        ask = batch.asks.get(place)
        size, most = batch.mean if ask is None else (ask.tokens, ask.most)
        most = None if most is None else math.ceil(most)
        if result.status == 200 and answers(result.reply, REPLIES[batch.path]):
            used = self._spending.of_reply(result.reply, size, batch.path, most)
        elif result.status == 200 and may_be_billed(200, result.reply):
            used = {"cost": self._spending.guess(size, most)}
        else:
            used = self._spending.of_refusal(result.reply, size)
        batch.used = summed([batch.used, {name: n for name, n in used.items() if n}])
        if ask is not None and not batch.earlier:
            self._spending.spend(used.get("cost", 0.0), ask.cost)
            ask.cost = 0.0

"""Which requests of a shard are its own to ask in a batch, where equal ones are asked once: not those that a batch of
another shard has, whoever has made it, nor those that somebody else is asking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from gristmill.models.batches import Batch, Request, claimed, noted
from gristmill.models.contract import Journal, Once
from gristmill.models.filed import Filed
from gristmill.models.provided import Provided
from gristmill.models.results import TURN


class Claims:
    """Those of one shard, in one attempt. What is claimed is so for as long as this worker lives. After that a batch
    that was noted tells whose it was: so it is looked for once something is claimed, and not before.
    """

    def __init__(self, provided: Provided, journal: Journal, filed: Filed) -> None:
        self._provided = provided
        self._journal = journal
        self._filed = filed
        self._held: set[bytes] = set()
        self._put: set[bytes] = set()  # requests whose answers others have

    async def own(self, requests: list[Request], batches: list[Batch]) -> tuple[list[Request], list[Request]]:
        """Those of these requests, which are in none of the shard's `batches`, that are to be asked here, and those
        that somebody else is asking. Others are answered, or were put in batches of other shards, which are added.
        """
        once = self._provided.paid.claims() if self._provided.dedupe else None
        if once is None:
            return requests, []
        own, waits, new = list[Request](), list[Request](), list[Request]()
        left = {batch.digests[place] for batch in batches if batch.foreign for place in batch.left}
        for number, request in enumerate(requests):
            if number % TURN == TURN - 1:
                await asyncio.sleep(0)
            if request.digest in self._held:
                (new if request.digest in left else own).append(request)
            elif (what := once.claim(request.digest)[0]) == "mine":
                self._held.add(request.digest)
                new.append(request)
            elif what == "wait":
                waits.append(request)
        if new:
            notes = await asyncio.to_thread(self._journal.everywhere)
            new = self._unanswered(new, notes, once)
            found = self._elsewhere(new, batches, notes)
            new = claimed(new, found)
            batches += found  # what one of them has not answered is in another one
        return own + new, waits

    async def batched(self) -> set[bytes]:
        """The requests that are in batches of any shard."""
        found = noted(await asyncio.to_thread(self._journal.everywhere))
        return {digest for batch in found if batch.id or not batch.over for digest in batch.digests}

    def _unanswered(self, requests: list[Request], notes: Sequence[Any], once: Once) -> list[Request]:
        """Those of these requests that no shard has noted an answer to, which it asked for alone: others have these."""
        replies: dict[bytes, Any] = {}
        for note in notes:
            if "void" in note:
                replies.pop(bytes.fromhex(note["digest"]), None)
            elif "reply" in note:
                replies[bytes.fromhex(note["digest"])] = note["reply"]
        for digest in replies.keys() & {request.digest for request in requests}:
            once.put(digest, replies[digest])
            self._held.discard(digest)
        return [request for request in requests if request.digest not in replies]

    def _elsewhere(self, requests: list[Request], batches: list[Batch], notes: Sequence[Any]) -> list[Batch]:
        """Batches of other shards that may have some of these requests."""
        wanted, known = {request.digest for request in requests}, {batch.name for batch in batches}
        found = []
        for batch in noted(notes):
            there = batch.id or not batch.over  # one that was cancelled may have answers
            if batch.name not in known and there and not wanted.isdisjoint(batch.digests):
                batch.foreign = batch.counted = True  # by its own shard
                found.append(batch)
        return found

    async def put(self, requests: Sequence[Request]) -> None:
        """Others may have what those of the shard that are answered by now were answered."""
        once = self._provided.paid.claims() if self._provided.dedupe else None
        if once is None:
            return
        for number, digest in enumerate({request.digest for request in requests} - self._put):
            if number % TURN == TURN - 1:
                await asyncio.sleep(0)
            found = self._filed.first(digest, take=False)
            if found is not None and found[0] == 200:
                once.put(digest, found[1])
                self._put.add(digest)
                self._held.discard(digest)

    def release(self) -> None:
        """Nobody is asked here any more."""
        if self._held and (once := self._provided.paid.claims()) is not None:
            for digest in self._held:
                once.release(digest)
        self._held.clear()

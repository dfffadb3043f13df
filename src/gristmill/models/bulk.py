"""The requests of one shard, answered in bulk: batches at a provider, each created once, whatever dies meanwhile.

A batch is noted in the shard's journal before it is created, with the digests of its requests, and again with its id.
Another attempt at the shard waits for the same batches; one without an id is looked for at the provider, by its name,
before it is created.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill.arrow.rows import picked
from gristmill.errors import GristmillError, RunFailed
from gristmill.job.secret import scrub_values
from gristmill.models.answercache import digest_of
from gristmill.models.batches import Batch, Request, claimed, noted
from gristmill.models.contract import Journal, Prepared
from gristmill.models.conversion import to_batch
from gristmill.models.desk import Busy, Gone, Unsure
from gristmill.models.firstanswers import FirstAnswers
from gristmill.models.provided import Asks, Provided, Row
from gristmill.models.providers import MOST_LINE, Result, State
from gristmill.models.replies import LATER, NOBODY, QUOTA, REPLIES, Refused, Unanswered, UnderWay, answers
from gristmill.models.usual import most_tokens
from gristmill.process.failure import Unasked

TRIES = 3  # batches that a request may be in without an answer
POLL, SLOWER, SLOWEST = 1.0, 1.3, 60.0  # seconds between two looks at a batch: first, times so much, at most
# Seconds after which a batch is looked for, once its creation was not answered: the call may be on its way still.
LOOKS = (0.0, 1.0, 3.0, 6.0)
UNSURE = 10  # times that a creation may go unanswered
MOST_DIGITS = 9  # of a request's place in its batch
TURN = 500  # results that are read before others have a turn
FEW, GROWS = 20, 10  # requests whose cost nothing bounds: of the first batch, and times those that were answered
TRIALS = 20  # rows that are asked alone to learn what requests take, until one is answered
DAY = 86_400.0  # seconds in which a batch is over, or has expired


class BulkRow(dict[str, Any]):
    """A row whose request may have been answered in bulk."""

    def __init__(self, row: Row, bulk: Bulk) -> None:
        super().__init__(row)
        self.bulk = bulk
        self.journal = bulk.journal


@dataclass(frozen=True)
class Taken:
    """The answer to a request that was in a batch, or was asked alone before there was one. What it took is `told`
    already, or is to be told by who takes it; `ours`: it is paid for by this worker, and not by an earlier attempt.
    """

    reply: dict[str, Any]
    told: bool
    ours: bool


class Bulk:
    """The requests of a shard; see models.contract.Bulk. What begins with an underscore runs in the event loop that
    `do` gives coroutines to.
    """

    def __init__(
        self,
        asker: Asks,
        provided: Provided,
        journal: Journal,
        do: Callable[[Coroutine[Any, Any, Any]], Future[Any]],
        first: FirstAnswers,
    ) -> None:
        self._first = first
        self._asker = asker
        self._provided = provided
        self.journal = journal
        self._do = do
        self._closed = False
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._requests: list[Request] = []
        self._seen: set[bytes] = set()
        self._held: Counter[bytes] = Counter()  # answers of the journal that rows of this attempt will have, by keys
        self._alone: Counter[bytes] = Counter()  # requests that rows made alone, and need not make again
        self._bodies: Any = tempfile.TemporaryFile()  # noqa: SIM115 - until the shard is done
        self._replies: Any = tempfile.TemporaryFile()  # noqa: SIM115
        # Status, where the reply is, and of which kind it is (Taken).
        self._found: dict[bytes, list[tuple[int, int, int, bool, bool]]] = {}
        self._batches = noted(journal.notes)
        self._batched = {digest for batch in self._batches for digest in batch.digests}
        self._settled: set[bytes] = set()  # requests with answers for several rows
        provided.known.update(batch.id for batch in self._batches if batch.id)
        self._task: asyncio.Future[Any] | None = None
        self._owed, self._owed_cost = 0, 0.0  # requests that are ordered, and not settled
        self._made = len(self._batches)
        self._trial: list[bytes] = []  # requests that the row has made that is asked alone
        for told in journal.notes:
            if "void" in told and self._found.get(bytes.fromhex(told["digest"])):
                self._found[bytes.fromhex(told["digest"])].pop()
            if "reply" in told:
                self._keep(bytes.fromhex(told["digest"]), 200, told["reply"], told=True, ours=False)

    # ------------------------------------------------ the worker

    def add(self, prepared: Prepared, rows: np.ndarray) -> None:
        """See models.contract.Bulk."""
        if len(rows):
            self._result(self._added(to_batch(picked(prepared.inputs.rows, rows), "rows")))

    def send(self) -> None:
        """See models.contract.Bulk."""
        self._do(self._answered())

    def wait(self, seconds: float) -> bool:
        """See models.contract.Bulk."""
        done = self._done.wait(seconds)
        error = self._error or self._provided.error
        if error is not None:
            raise error
        return done

    @property
    def told(self) -> str:
        """See models.contract.Bulk."""
        open_ = [batch for batch in self._batches if batch.asks and not (batch.state and batch.state.over)]
        if self._done.is_set() or not open_:
            return ""
        batch = open_[0]
        more = f" (and {len(open_) - 1} more of its shard)" if len(open_) > 1 else ""
        if not batch.id:
            return f"the provider to create a batch of {len(batch.digests):,} requests{more}"
        done = 0 if batch.state is None else batch.state.done
        return f"{batch.id}: {done:,} of {len(batch.digests):,} done{more}"

    def close(self) -> None:
        """See models.contract.Bulk."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(RuntimeError):  # the loop has ended before
                self._do(self._dropped())

    def _result(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        future = self._do(coroutine)
        while True:
            try:
                return future.result(0.5)
            except futures.TimeoutError:  # before Python 3.11 no other is this one
                if self._closed or future.done():
                    raise

    # ------------------------------------------------ requests

    async def _added(self, rows: Sequence[Row]) -> None:
        for number, row in enumerate(rows):
            if number % TURN == TURN - 1:
                await asyncio.sleep(0)
            key = self.journal.key(row)
            if key and self._held[key] < self.journal.held(key):
                self._held[key] += 1
                continue
            money, first = self._provided.money, self._first
            if not first.doubted and (
                not money.tried or not first.worked or (not money.known and self._provided.trials < TRIALS)
            ):
                await self._tried(row)
            if first.doubted:
                assert first.failure is not None
                raise Unasked(first.failure)
            self._add(row)

    async def _tried(self, row: Row) -> None:
        """Ask for one row as without a batch: a key or a model that is refused is told now, not when a batch is over,
        and what requests have to look like, and cost, is known from now on, if it is answered. What it takes is told
        here, whatever becomes of the row.
        """
        self._provided.money.tried = True
        self._provided.trials += 1
        self._trial = []
        try:
            used = (await self._asker(BulkRow(row, self))).used
            if used.get("requests"):  # it is no answer from before
                self._first.one(None)
        except GristmillError:
            self._provided.money.tried = False
            raise
        except UnderWay:
            self._provided.trials -= 1
            return
        except Exception as e:  # told for the row, when it is asked for
            used = getattr(e, "used", {})
            self._first.one(e)
            for digest in self._trial:  # of no use: the next run asks again, as for any row that failed
                await asyncio.to_thread(self.journal.note, {"digest": digest.hex(), "void": True})
        if used := {name: n for name, n in used.items() if name != "refused"}:  # the row tells that itself
            await asyncio.to_thread(self.journal.spent, used)

    def _add(self, row: Row) -> None:
        made = self._asker.request(row)
        if made is None:
            return
        path, body, tokens = made
        digest = _digest(path, body)
        if path not in self._provided.api.paths or self._provided.money.kept(path, body):
            return
        if self._provided.dedupe and digest in self._seen:
            return
        if self._provided.dedupe:
            self._seen.add(digest)
        if self._alone[digest] < len(self._found.get(digest, ())):
            self._alone[digest] += 1
            return
        try:
            data = json.dumps(body, allow_nan=False).encode()
        except ValueError:  # 1e400: no JSON, for which a provider would refuse the whole batch
            return
        self._requests.append(Request(digest, path, self._bodies.seek(0, 2), len(data), tokens, most_tokens(body)))
        self._bodies.write(data)

    # ------------------------------------------------ answers

    def take(self, path: str, body: Mapping[str, Any]) -> Taken | None:
        """The answer to a request that was in a batch; None if it was in none, or has been taken. Raises Refused,
        Unanswered, and UnderWay while the batches are not over.
        """
        digest = _digest(path, body)
        found = self._found.get(digest)
        if not found:
            if not self._done.is_set() and digest in self._batched:
                raise UnderWay
            return None
        status, at, size, told, ours = found[0]
        if self._done.is_set() and not self._provided.dedupe:
            found.pop(0)
            self._settle(1)
        elif self._done.is_set() and digest not in self._settled:
            self._settled.add(digest)
            self._settle(1)
        self._replies.seek(at)
        reply = json.loads(self._replies.read(size))
        if status == 200:
            return Taken(dict(reply), told, ours)
        if status == 0:
            raise Unanswered(reply["why"])
        raise Refused(reply["why"], status, reply["reply"])

    async def asked_alone(self, path: str, body: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
        """A request was answered before the batches were made: its row need not be in one."""
        if self._done.is_set() or path not in self._provided.api.paths:
            return
        digest = _digest(path, body)
        reply = scrub_values(reply, self._provided.desk.secrets)
        self._keep(digest, 200, reply, told=True)
        self._trial.append(digest)
        await asyncio.to_thread(self.journal.note, {"digest": digest.hex(), "reply": reply})

    def _keep(self, digest: bytes, status: int, reply: Any, told: bool = False, ours: bool = True) -> None:
        data = json.dumps(reply).encode()
        self._found.setdefault(digest, []).append((status, self._replies.seek(0, 2), len(data), told, ours))
        self._replies.write(data)

    # ------------------------------------------------ batches

    async def _answered(self) -> None:
        self._task = task = asyncio.ensure_future(self._all())
        self._provided.tasks.add(task)
        try:
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                self._error = error
                if isinstance(error, GristmillError):
                    self._provided.error = self._provided.error or error
        finally:
            self._provided.tasks.discard(task)
            if not task.cancelled():
                self._done.set()

    async def _all(self) -> None:
        """Answer all requests, in as many rounds of batches as that takes."""
        todo = self._requests
        while todo:
            mine = [batch for batch in self._batches if not batch.asks]
            todo, later = self._now(claimed(todo, mine))
            new = [self._batch(part) for part in self._parts(todo)]
            self._batches += new
            batches = [batch for batch in (*mine, *new) if batch.asks]
            again = await _together([self._one(batch) for batch in batches])
            todo = [request for some in again for request in some]
            for request in todo:
                request.tries += request.why != ""
                if request.tries >= TRIES:
                    why = f"it was in {TRIES} batches, and was not answered in the last one: {request.why}"
                    self._keep(request.digest, 0, {"why": why})
            todo = [*later, *(request for request in todo if request.tries < TRIES)]

    def _now(self, requests: list[Request]) -> tuple[list[Request], list[Request]]:
        """Those of these requests that may be in batches now, and those that wait for what the others will cost."""
        if self._bounded(requests):
            return requests, []
        return requests[: self._room], requests[self._room :]

    def _bounded(self, requests: Iterable[Request]) -> bool:
        return all(self._provided.money.bounds(request.most) for request in requests)

    @property
    def _room(self) -> int:
        """Requests that may be under way whose cost nothing bounds: few until it is known what many have cost."""
        return max(FEW, GROWS * self._provided.money.answered)

    def _parts(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """As many requests as a batch may have, of one path."""
        api = self._provided.api
        for path in dict.fromkeys(request.path for request in requests):
            part: list[Request] = []
            size = 0
            for request in requests:
                if request.path != path:
                    continue
                more = request.size + 200  # with what is around it
                if part and (len(part) >= (self._provided.most or api.most_requests) or size + more > api.most_bytes):
                    yield part
                    part, size = [], 0
                part.append(request)
                size += more
            if part:
                yield part

    def _batch(self, part: Sequence[Request]) -> Batch:
        self._made += 1
        whole = hashlib.blake2b(f"{self.journal.name} {self._made}".encode(), digest_size=16)
        for request in part:
            whole.update(request.digest)
        digests = [request.digest for request in part]
        return Batch(f"gm{whole.hexdigest()}", part[0].path, digests, time.time(), asks=dict(enumerate(part)))

    async def _one(self, batch: Batch) -> list[Request]:
        """See a batch through. Returns the requests that are to be asked again."""
        if self._at_once(batch):
            return await self._through(batch)
        provided = self._provided
        async with provided.one:
            if not self._at_once(batch):
                while provided.unbounded and not batch.earlier and not self._bounded(batch.asks.values()):
                    provided.landed.clear()
                    await provided.landed.wait()
                return await self._through(batch)
        return await self._through(batch)

    def _at_once(self, batch: Batch) -> bool:
        """Whether it may be under way beside others: they are not too much, and what it costs is known or paid."""
        if self._provided.most or batch.earlier:
            return not self._provided.most
        if self._bounded(batch.asks.values()):
            return self._provided.money.known
        return self._provided.unbounded + len(batch.asks) <= self._room if self._provided.money.known else False

    async def _through(self, batch: Batch) -> list[Request]:
        unbounded = 0 if batch.earlier or self._bounded(batch.asks.values()) else len(batch.asks)
        self._provided.unbounded += unbounded  # before anybody else looks
        try:
            if not batch.earlier:
                self._order(batch)
                await self._note(batch, path=batch.path, digests=[d.hex() for d in batch.digests], at=batch.since)
            again = await self._seen_through(batch)
        finally:
            self._provided.unbounded -= unbounded
            self._provided.landed.set()
        if not batch.earlier:  # they cost nothing
            self._settle(len(again), sum(request.cost for request in again))
        return again

    def _order(self, batch: Batch) -> None:
        for request in batch.asks.values():
            request.cost = self._provided.money.guess(request.tokens, request.most)
        cost = sum(request.cost for request in batch.asks.values())
        self._provided.money.order(cost)
        self._owed += len(batch.asks)
        self._owed_cost += cost

    async def _seen_through(self, batch: Batch) -> list[Request]:
        try:
            if not batch.id and batch.earlier:
                batch.id = "" if batch.over else await self._there(batch, batch.unlisted) or ""
                if not batch.id:  # it was never created
                    await self._note(batch, over=True)
                    return list(batch.asks.values())
                await self._note(batch, id=batch.id)
            elif not batch.id:
                batch.id = await self._created(batch)
                await self._note(batch, id=batch.id)
            self._provided.known.add(batch.id)
            state = await self._read_whole(batch)
        except Gone as e:
            await self._told(batch, f"is no longer there ({e}), and its requests would have to be paid for again")
            return list(batch.asks.values())
        again = [request for place, request in batch.asks.items() if place not in batch.found]
        self._provided.full = self._provided.full if state.full else None
        if state.failed and again:
            return await self._failed(batch, state, again)
        if batch.refused and again:
            await self._told(batch, f"was not answered in full: the provider refuses {batch.refused}")
        if state.cancelled and again:
            await self._told(batch, f"was cancelled at the provider, with {len(again):,} requests unanswered")
        return again

    async def _note(self, batch: Batch, **told: Any) -> None:
        await asyncio.to_thread(self.journal.note, {"batch": batch.name, **told})

    async def _told(self, batch: Batch, what: str) -> None:
        """Stop because of how a batch ended, once: the next run asks again."""
        if not batch.over:
            await self._note(batch, over=True)
            name = batch.id or batch.name
            raise RunFailed(f"batch {name} {what}; what is answered is kept: run again to ask for the rest")

    async def _created(self, batch: Batch) -> str:
        """Create a batch, once. Returns its id."""
        api, desk = self._provided.api, self._provided.desk
        uploaded = await api.upload(desk, batch.name, batch.path, self._lines(batch))
        tries, unsure, begun = 0, 0, time.monotonic()
        while True:
            tries += 1
            try:
                return await api.create(desk, batch.name, batch.path, uploaded, self._lines(batch))
            except Busy as e:
                await desk.rest(e, begun, min(SLOWEST, POLL * SLOWER**tries))
            except Unsure as e:
                if (found := await self._there(batch, False)) is not None:
                    return found
                unsure, begun = unsure + 1, time.monotonic()
                if unsure >= UNSURE:
                    raise RunFailed(f"the provider creates no batch: {e}; what is answered is kept: run again") from e

    async def _there(self, batch: Batch, unlisted: bool) -> str | None:
        """The id of a batch that may have been created; None also if there still is no list, which has stopped a run
        before (`unlisted`).
        """
        api, desk, wait = self._provided.api, self._provided.desk, POLL
        looks = iter(LOOKS)
        while True:
            elsewhere = noted(await asyncio.to_thread(self.journal.everywhere))
            others = frozenset({*self._provided.known, *(other.id for other in elsewhere if other.id)})
            try:
                found = await api.find(desk, batch.name, len(batch.digests), batch.since, others)
            except Gone as e:
                if unlisted:
                    return None
                await self._note(batch, unlisted=True)
                raise RunFailed(
                    f"batches cannot be listed at the provider ({e}), and whether one was created whose creation was "
                    "not answered can be told by its list alone: run again to look once more; if there is no list then "
                    f"either, its {len(batch.digests):,} requests are asked for anew, and may be paid for twice. What "
                    "else is answered is kept"
                ) from None
            if found and not found[0].startswith("?"):
                return found[0]
            if found:  # one of them may be ours, which is told once they are over
                wait = min(SLOWEST, wait * SLOWER)
                await asyncio.sleep(wait)
                continue
            if (pause := next(looks, None)) is None:
                return None
            await asyncio.sleep(pause)

    def _lines(self, batch: Batch) -> Iterator[tuple[str, bytes]]:
        """The requests of a batch, by their ids."""
        for place, request in batch.asks.items():
            self._bodies.seek(request.at)
            yield f"{batch.name}-{place}", self._bodies.read(request.size)

    async def _ended(self, batch: Batch) -> State:
        """Raises Gone, and RunFailed if it should be over long since."""
        wait = POLL
        while True:
            batch.state = state = await self._provided.api.look(self._provided.desk, batch.id)
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

    async def _failed(self, batch: Batch, state: State, again: list[Request]) -> list[Request]:
        """Of a batch that the provider did not begin: ask again in smaller ones if it was too much, else stop."""
        if not state.full:
            await self._told(batch, f"was refused: {state.failed}")
        elif not batch.over:
            await self._note(batch, over=True)
            if len(batch.asks) == 1 and self._full() and not await self._others():
                raise RunFailed(
                    f"batch {batch.id} of one request is too much for the provider, though no other of this run is "
                    f"under way: {state.failed}; what is answered is kept: run again once there is room"
                )
            self._provided.most = max(1, len(batch.asks) // 2)
            await asyncio.sleep(min(SLOWEST, POLL * 2 ** min(10, self._made)))
        return again

    def _full(self) -> bool:
        """Whether even one request has been too much for as long as a provider may be out of reach."""
        now, provided = time.monotonic(), self._provided
        provided.full = now if provided.full is None else provided.full
        return now - provided.full > provided.desk.limit

    async def _others(self) -> bool:
        """Whether a batch of this run is under way."""
        for batch in noted(await asyncio.to_thread(self.journal.everywhere)):
            if batch.id and not batch.over:
                with contextlib.suppress(Gone):
                    if not (await self._provided.api.look(self._provided.desk, batch.id)).over:
                        return True
        return False

    async def _read_whole(self, batch: Batch) -> State:
        """Keep what a batch gave, all of it: what is not told yet, though it was answered and is paid for, is waited
        for. Raises Gone, RunFailed.
        """
        desk, begun, wait = self._provided.desk, 0.0, POLL
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
        for number, request in batch.asks.items():
            if number not in batch.found:
                request.why = request.why or "nothing was said of it"
        return state

    async def _read(self, batch: Batch, state: State, answered: int) -> tuple[int, str]:
        """Keep what the files of a batch have. Returns how many of the results that are `answered` they have; a line
        that cannot be read is one, unless it may be of a request that was not done, and there is no line of that; but
        not if none can be read, nor at the end of a file, which may be cut there. And why some are gone, if they are.
        """
        told, undone, unreadable, number, gone = set[int](), set[int](), 0, 0, state.gone
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
                    found = self._line(batch, line)
                    if found is None:
                        unreadable += bool(line.strip()) and line.endswith(b"\n")
                    else:
                        (told if state.counts(found[1]) else undone).add(found[0])
        if not (told or undone):
            return 0, gone
        hidden = max(0, len(batch.digests) - answered - len(undone))  # which the unreadable ones may be
        read = len(told) + max(0, unreadable - hidden)
        if unreadable and read < answered:
            gone = gone or f"{unreadable:,} lines cannot be read"
        return read, gone

    def _line(self, batch: Batch, line: bytes) -> tuple[int, Result] | None:
        """Keep what a line says. Returns it, and the place of the request that it is about; None if that cannot be
        read.
        """
        if (result := self._provided.api.result(line)) is None:
            return None
        name, _, digits = result.custom_id.rpartition("-")
        if name != batch.name or not (digits.isascii() and digits.isdigit()) or len(digits) > MOST_DIGITS:
            return None
        place = int(digits)
        ask = batch.asks.get(place)
        if ask is not None and place not in batch.found and self._kept(batch, ask, result):
            batch.found.add(place)
        return place, result

    def _kept(self, batch: Batch, request: Request, result: Result) -> bool:
        """Whether a result is the end of a request."""
        try:
            reply, said = scrub_values([result.reply, result.why], self._provided.desk.secrets)
        except RecursionError:
            request.why = "a reply that is nested too deeply"
            return False
        if result.status == 200 and answers(reply, REPLIES[request.path]):
            if self._provided.money.learns:
                self._bodies.seek(request.at)
                body = json.loads(self._bodies.read(request.size))
                cost = self._provided.money.learn(request.path, body, reply, request.tokens)
                if not batch.earlier:  # what is kept free for it is now what it costs
                    self._provided.money.correct(cost - request.cost)
                    self._owed_cost += cost - request.cost
            self._keep(request.digest, 200, reply, ours=not batch.earlier)
            return True
        why = f"{result.status}: {said}" if result.status else said
        if result.code in QUOTA or (result.status in NOBODY and result.status != 404):
            batch.refused = request.why = f"{NOBODY.get(result.status or 0, 'the account')}: {why}"
            return False
        if result.status is None or result.status == 200 or result.status in LATER:
            request.why = why or "a reply of another form"
            return False
        self._keep(request.digest, result.status, {"why": why, "reply": reply})
        return True

    def _settle(self, requests: int, cost: float | None = None) -> None:
        """So many requests are answered, or given up, which were to cost so much: as others, if that is not said."""
        if self._owed:
            requests = min(requests, self._owed)
            cost = self._owed_cost * requests / self._owed if cost is None else min(cost, self._owed_cost)
            self._owed -= requests
            self._owed_cost -= cost
            self._provided.money.settle(cost)

    async def _dropped(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        self._settle(self._owed)
        self._bodies.close()
        self._replies.close()


def _digest(path: str, body: Mapping[str, Any]) -> bytes:
    return digest_of({"path": path, "body": body})


async def _together(calls: Sequence[Awaitable[list[Request]]]) -> list[list[Request]]:
    """The results of all; if one raises, the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()

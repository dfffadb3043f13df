"""The requests of one shard, answered in bulk: batches at a provider, each created once, whatever dies meanwhile.

A batch is noted in the shard's journal before it is created, with the digests of its requests, and again with its id.
Another attempt at the shard waits for the same batches; one without an id is looked for at the provider, by its name,
before it is created. What a batch took is noted when its results are read, whoever takes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import numpy as np

from gristmill.arrow.rows import picked
from gristmill.errors import GristmillError, RunFailed
from gristmill.job.secret import scrub_values
from gristmill.models.answercache import digest_of
from gristmill.models.batches import Batch, Request, claimed, made, note_of, noted
from gristmill.models.bill import TINY, Bill, BulkRow
from gristmill.models.claims import Claims
from gristmill.models.contract import Journal, Prepared
from gristmill.models.conversion import to_batch
from gristmill.models.course import Course
from gristmill.models.creation import POLL, SLOWER, SLOWEST
from gristmill.models.filed import Filed
from gristmill.models.firstanswers import FirstAnswers
from gristmill.models.provided import Asks, Provided, Row
from gristmill.models.replies import Empty, Refused, Unanswered, UnderWay
from gristmill.models.results import TURN
from gristmill.models.spending import LOOK, PATIENCE
from gristmill.models.usual import most_tokens
from gristmill.process.failure import Unasked
from gristmill.process.ownstderr import say
from gristmill.shards.counts import summed

TRIES = 3  # batches that a request may be in without an answer
FEW, GROWS = 20, 10  # requests whose cost nothing bounds: of the first batch, and times those that were answered
TRIALS = 20  # rows, or requests, that are asked alone until one is answered


class Bulk:
    """The requests of a shard; see models.contract.Bulk. What begins with an underscore runs in the event loop that
    `do` gives coroutines to. A model that is `proven` is not asked alone once more before it is sent a batch.
    """

    def __init__(
        self,
        asker: Asks,
        provided: Provided,
        journal: Journal,
        do: Callable[[Coroutine[Any, Any, Any]], Future[Any]],
        first: FirstAnswers,
        proven: bool = True,
    ) -> None:
        self._first = first
        self._asker = asker
        self._provided = provided
        self.journal = journal
        self._do = do
        self._proven = proven
        self._closed = False
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._requests: list[Request] = []
        self._seen: set[bytes] = set()
        self._held: Counter[bytes] = Counter()  # answers of the journal that rows of this attempt will have, by keys
        self._alone: Counter[bytes] = Counter()  # requests that rows made alone, and need not make again
        self._filed = Filed()
        self._course = Course(provided, journal, self._filed, self._asked_for)
        self._claims = Claims(provided, journal, self._filed)
        self._waits = 0  # requests that somebody else is asking, if nothing else is to be done
        self._batches = noted(journal.notes)
        self._batched = {digest for batch in self._batches for digest in batch.digests}
        provided.known.update(batch.id for batch in self._batches if batch.id)
        self._task: asyncio.Future[Any] | None = None
        self._looked = False  # whether other shards have noted equal requests
        self._made = len(self._batches)
        self._trial: list[bytes] = []  # requests that the row has made that is asked alone,
        self._told: Mapping[str, float] = {}  # and what is noted of what these took
        for told in journal.notes:
            if "void" in told:
                self._filed.forget(bytes.fromhex(told["digest"]))
            if "reply" in told:
                self._filed.keep(bytes.fromhex(told["digest"]), 200, told["reply"])

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
    def done(self) -> bool:
        """Whether no batch of its is under way any more."""
        return self._done.is_set()

    @property
    def told(self) -> str:
        """See models.contract.Bulk."""
        open_ = [batch for batch in self._batches if batch.asks and not (batch.state and batch.state.over)]
        if self._waits and not self._done.is_set():
            return f"{self._waits:,} requests that are equal to those of another shard, which has asked for them"
        if self._done.is_set() or not open_:
            return ""
        batch = open_[0]
        more = f" (and {len(open_) - 1} more of its shard)" if len(open_) > 1 else ""
        if not batch.id and batch.unsure:
            what = f"a batch of {len(batch.digests):,} requests to appear at the provider"
            return f"{what}: its creation was not answered ({batch.unsure}), and may be obeyed late{more}"
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
            provided, first = self._provided, self._first
            if not first.doubted and (
                not provided.tried or not first.worked or (not provided.spending.known and provided.trials < TRIALS)
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
        if self._provided.dedupe and not self._looked:
            self._batched |= await self._claims.batched()
            self._looked = True
        self._provided.trying = True
        self._provided.trials += 1
        self._trial, self._told = [], {}
        try:
            used = (await self._asker(BulkRow(row, self))).used
            if used.get("requests"):  # it is no answer from before
                self._first.one(None)
        except GristmillError:
            self._provided.trying = False
            raise
        except UnderWay:
            self._provided.trials -= 1
            return
        except Exception as e:  # told for the row, when it is asked for
            used = getattr(e, "used", {})
            self._first.one(e)
            for digest in self._trial:  # of no use: the next run asks again, as for any row that failed
                await asyncio.to_thread(self.journal.note, {"digest": digest.hex(), "void": True})
        rest = {name: n - self._told.get(name, 0.0) for name, n in used.items() if name != "refused"}  # the row's own
        if rest := {name: n for name, n in rest.items() if n > TINY}:
            await asyncio.to_thread(self.journal.spent, rest)

    def _add(self, row: Row) -> None:
        made = self._asker.request(row)
        if made is None:
            return
        path, body, tokens = made
        digest = _digest(path, body)
        if path not in self._provided.api.paths or self._provided.paid.kept(path, body):
            return
        if self._provided.dedupe and digest in self._seen:
            return
        if self._provided.dedupe:
            self._seen.add(digest)
        if self._alone[digest] < self._filed.count(digest):
            self._alone[digest] += 1
            return
        try:
            data = json.dumps(body, allow_nan=False).encode()
        except ValueError:  # 1e400: no JSON, for which a provider would refuse the whole batch
            return
        self._requests.append(self._filed.request(digest, path, data, tokens, most_tokens(body)))

    # ------------------------------------------------ answers

    def take(self, path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The reply to a request that was in a batch, or asked alone before there was one, which is counted; None if it
        was neither, or has been taken. Raises Refused, Unanswered, and UnderWay while the batches are not over.
        """
        digest, done = _digest(path, body), self._done.is_set()
        found = self._filed.first(digest, take=done and not self._provided.dedupe)
        if found is None:
            if not done and digest in self._batched:
                raise UnderWay
            return None
        status, reply = found
        if status == 200:
            return dict(reply)
        if status == 0:
            raise Unanswered(reply["why"])
        raise Refused(reply["why"], status, reply["reply"])

    async def asked_alone(self, path: str, body: Mapping[str, Any], reply: Mapping[str, Any], bill: Bill) -> None:
        """A request was answered alone: if the batches are not made yet, its row need not be in one, and what it took
        is noted with its answer.
        """
        if self._done.is_set() or path not in self._provided.api.paths:
            return
        digest = _digest(path, body)
        reply = scrub_values(reply, self._provided.desk.secrets)
        self._filed.keep(digest, 200, reply)
        self._trial.append(digest)
        used = bill.told()
        self._told = summed([self._told, used])
        await asyncio.to_thread(self.journal.note, {"digest": digest.hex(), "reply": reply}, used)

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
            if self._provided.error is None:  # else others would ask, and pay, in a run that is about to stop
                self._claims.release()
            if not task.cancelled():
                self._done.set()

    async def _all(self) -> None:
        """Answer all requests, in as many rounds of batches as that takes; then what was noted of batches that none of
        them is in is counted, too.
        """
        todo, pause = self._requests, POLL
        while todo:
            self._provided.go_on()
            todo, waits = await self._claims.own(claimed(todo, self._batches), self._batches)
            todo, later = self._now(todo)
            mine = [batch for batch in self._batches if batch.open]
            self._waits = 0 if todo or mine else len(waits)
            if self._waits:
                await asyncio.sleep(pause)
                pause = min(SLOWEST, SLOWER * pause)
            again = await _together(
                [
                    *(self._resumed(batch) for batch in mine),
                    *(self._turn(part) for part in self._parts(todo)),
                ]
            )
            todo = [request for some in again for request in some]
            for request in todo:
                if request.tries >= TRIES:
                    why = f"it was in {TRIES} batches, and was not answered in the last one: {request.why}"
                    self._filed.keep(request.digest, 0, {"why": why})
            await self._claims.put(self._requests)
            todo = [*waits, *later, *(request for request in todo if request.tries < TRIES)]
        for batch in self._batches:
            if not batch.counted:
                await self._unneeded(batch)

    def _now(self, requests: list[Request]) -> tuple[list[Request], list[Request]]:
        """Those of these requests that may be in batches now, and those that wait for what the others will cost."""
        if self._bounded(requests):
            return requests, []
        return requests[: self._room], requests[self._room :]

    def _bounded(self, requests: Iterable[Request]) -> bool:
        return all(self._provided.spending.bounds(request.most) for request in requests)

    @property
    def _room(self) -> int:
        """Requests that may be under way whose cost nothing bounds: few until it is known what many have cost."""
        return max(FEW, GROWS * self._provided.spending.answered)

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

    async def _resumed(self, batch: Batch) -> list[Request]:
        """See a batch of an earlier attempt through. Returns the requests that are to be asked again."""
        if not self._provided.most:
            return await self._course.through(batch)
        async with self._provided.one:
            return await self._course.through(batch)

    async def _turn(self, part: list[Request]) -> list[Request]:
        """Send requests when they may be under way. Returns those that are to be asked again."""
        provided = self._provided
        if self._at_once(part):
            return await self._sent(part)
        async with provided.one:
            if not self._at_once(part):
                while provided.unbounded and not self._bounded(part):
                    provided.landed.clear()
                    await provided.landed.wait()
                return await self._sent(part)
        return await self._sent(part)

    def _at_once(self, part: Sequence[Request]) -> bool:
        """Whether they may be under way beside others: they are not too much, and what they cost is known or little."""
        provided = self._provided
        if provided.most or not provided.spending.known:
            return False
        return self._bounded(part) or provided.unbounded + len(part) <= self._room

    async def _sent(self, part: list[Request]) -> list[Request]:
        """Make a batch of as many of these as there is money for, and see it through. Returns the requests that are to
        be asked again, or for the first time.
        """
        provided = self._provided
        unbounded = 0 if self._bounded(part) else len(part)
        provided.unbounded += unbounded  # before anybody else looks
        try:
            paid = await self._afforded(part)
            part, rest = part[:paid], part[paid:]
            provided.go_on()
            provided.paying += 1
            try:
                if part := await self._proved(part):
                    batch = self._batch(part)
                    self._batches.append(batch)
                    await asyncio.to_thread(self.journal.note, note_of(batch))
                    rest = [*await self._course.through(batch), *rest]
                return rest
            finally:
                provided.paying -= 1
        finally:
            provided.unbounded -= unbounded
            provided.landed.set()

    def _batch(self, part: Sequence[Request]) -> Batch:
        self._made += 1
        whole = hashlib.blake2b(f"{self.journal.name} {self._made}".encode(), digest_size=16)
        for request in part:
            whole.update(request.digest)
        return made(f"gm{whole.hexdigest()}", part, time.time())

    async def _proved(self, part: list[Request]) -> list[Request]:
        """Ask for one of them alone, unless somebody was answered of late: what is wrong by now is told at once, and
        not when a batch is over. Returns the others. Raises Unasked if many were asked for and none was answered.
        """
        provided, asked = self._provided, 0
        async with provided.proving:
            failed = not (self._proven or provided.answers)
            while failed and asked < len(part):
                failure = await self._asked_for(part[asked])
                asked, failed = asked + 1, failure is not None
                if failure is not None and asked >= TRIALS:
                    raise Unasked(failure)
        return part[asked:]

    async def _asked_for(self, request: Request) -> Exception | None:
        """Ask for one request alone, and keep what becomes of it. Returns what it failed with."""
        bill, body = Bill(BulkRow({}, self)), json.loads(self._filed.body(request))
        self._provided.spending.settle(request.cost)  # it is kept anew
        request.cost = 0.0
        try:
            await self._provided.paid.alone(body, request.tokens, request.path, bill)
            await self._claims.put([request])  # it may be hours until others of its shard are answered
            return None
        except (GristmillError, asyncio.CancelledError):
            bill.unfinished()
            raise
        except Empty as e:
            self._provided.spending.count(e.reply, request.tokens, bill, request.path, body)
            self._filed.keep(request.digest, e.status, {"why": str(e), "reply": e.reply})
            failure: Exception = e
        except Refused as e:
            self._filed.keep(request.digest, e.status, {"why": str(e), "reply": e.reply})
            failure = e
        except Unanswered as e:
            self._filed.keep(request.digest, 0, {"why": str(e)})
            failure = e
        if used := bill.told():
            await asyncio.to_thread(self.journal.spent, used)
        return failure

    async def _afforded(self, part: Sequence[Request]) -> int:
        """For how many of these money is kept free, once there is some: for fewer than all only if none is kept for
        others that are under way, which may turn out to cost less. Raises RunFailed if there is none even for one.
        """
        provided, spending = self._provided, self._provided.spending
        for request in part:
            request.cost = spending.guess(request.tokens, request.most)
        costs = [request.cost for request in part]
        others_until, pause = time.monotonic() + PATIENCE, LOOK
        while not (found := spending.order(costs, some=not provided.paying)):
            spending.goes_on()
            if provided.paying or spending.flying:
                others_until = time.monotonic() + PATIENCE
            elif spending.alone or (time.monotonic() > others_until and not await self._course.others(provided.begun)):
                spending.stop_at(costs[0])
            await spending.freed(pause)
            pause = min(SLOWEST, SLOWER * pause) if not provided.paying else LOOK
        for request in part[found:]:
            request.cost = 0.0
        return found

    async def _unneeded(self, batch: Batch) -> None:
        """Count what a batch took of which no row needs anything, without waiting for it for long: then as what it may
        cost.
        """
        try:
            await asyncio.wait_for(self._course.through(batch), self._provided.desk.limit)
        except (asyncio.TimeoutError, RunFailed) as e:  # which is no reason to stop: nothing of it is needed
            say(
                f"{batch.id or batch.name}: under way at the provider, and not waited for, as its rows have their "
                f"answers: what it may cost is counted{f' ({e})' if str(e) else ''}"
            )
            await self._course.results.count(batch)

    async def look(self) -> None:
        """Instead of `add` and `send`, in the event loop: take what batches of earlier attempts were answered by now,
        for a run that has no batch API. None is sent, and none is waited for.
        """
        try:
            for batch in self._batches:
                await self._course.left(batch)
        finally:
            await self._provided.close()
            self._done.set()

    async def _dropped(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        for batch in self._batches:
            for request in batch.asks.values():  # what was sent goes on, and is paid
                self._provided.spending.spend(request.cost if batch.sent else 0.0, request.cost)
                request.cost = 0.0
        self._provided.spending.settle(sum(request.cost for request in self._requests))
        self._filed.close()


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

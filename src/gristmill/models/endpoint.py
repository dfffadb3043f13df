"""Endpoints that speak OpenAI's forms: requests, what their failures mean, and when to ask again."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import math
import random
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

from gristmill.errors import BadModel, GristmillError, RunFailed
from gristmill.job.secret import Secret, scrub, scrub_values, unsaid
from gristmill.job.uris import redact
from gristmill.models.addresses import Address, Addresses, below
from gristmill.models.ending import Ending
from gristmill.models.outcomes import may_be_billed
from gristmill.models.refusals import Refusals
from gristmill.models.replies import (
    CHAT,
    FULL,
    LATER,
    MESSAGES,
    NOBODY,
    QUOTA,
    REPLIES,
    Closed,
    Empty,
    Forbidden,
    Later,
    Refused,
    Unanswered,
    after_of,
    answers,
    holds,
    json_in,
    redirected,
    said_in,
    tokens_in,
)
from gristmill.models.room import Room
from gristmill.models.silence import SAID, Silence, steps
from gristmill.models.slots import Slots
from gristmill.models.turns import Turns
from gristmill.models.vendors import OPENAI, Vendor
from gristmill.process.extras import require

if TYPE_CHECKING:
    import aiohttp

    from gristmill.models.wire import Connector

BASE, MOST = 0.5, 30.0  # seconds: the first wait before a request is sent again, and the longest (full jitter)
FIRST_TRIES = 4  # of the very first request: an endpoint that does not answer is told at once
LOOK = 0.25  # seconds between two looks for an address that may be asked
# A 403 may be the key's, or that of a filter which forbids one text. If the endpoint does not say which, it is the
# key's once so many are forbidden and nobody is answered, or if nobody ever was within a sixth of so many seconds.
SUSPECTS, SUSPENSE = 16, 30.0
# Members of the smallest requests that there are, and what limits an answer in each form that has one.
SMALL: Mapping[str, Any] = {
    "messages": [{"role": "user", "content": "1"}], "prompt": "1", "input": "1", "max_tokens": 1,
    "max_completion_tokens": 1, "max_output_tokens": 16, "text_1": "1", "text_2": "1", "query": "1", "documents": ["1"],
}  # fmt: skip
LONGEST = {
    CHAT: "max_tokens", "completions": "max_tokens", MESSAGES: "max_tokens", "responses": "max_output_tokens"
}  # fmt: skip
CONNECT = 30.0  # seconds until there is a connection: nobody is there to refuse it
MOST_LOOK = 10.0  # seconds in which it has to be answered
MOST_AGAIN = 1 << 20  # bytes of a request that was answered, to be sent once more
ELSEWHERE = 2.0  # seconds in which another address may be well, for a request that one has refused


class Payer(Protocol):
    """Who pays for a request, with whatever follows from it."""

    def lost(self) -> None:
        """It was sent, and may have to be paid for, but there is no answer."""
        ...

    def refused(self, reply: Any) -> None:
        """It was refused, with this JSON, which may tell that it has to be paid for all the same."""
        ...

    async def again(self) -> None:
        """Returns once there is money to send it again, and its answer can be kept. Raises RunFailed."""
        ...

    def still(self) -> bool:
        """Whether what is kept free for it is enough, by what others have taken since it began to wait, and its answer
        can be kept; if not, no money is, and it is not to be sent before `again`.
        """
        ...

    def probed(self, path: str, body: Mapping[str, Any], reply: Mapping[str, Any] | None) -> None:
        """Another one was sent to see whether the endpoint is well; without a reply it may have to be paid for, too."""
        ...


class NotYet(Exception):
    """A request is not to be sent before `Payer.again`."""


class Endpoint:
    """A client of one model's addresses, used in one event loop. Limits are the run's, of which this worker has a
    `share`. A status in `nobody`,
    which has in words what is refused, is about all requests. What it says of failures is without `secrets`.
    """

    def __init__(
        self,
        urls: list[str],
        key: str | None,
        *,
        timeout: float,
        limit: float,
        room: Room,
        requests: float | None,
        tokens: float | None,
        share: float = 1.0,
        nobody: Mapping[int, str] = NOBODY,
        vendor: Vendor = OPENAI,
        secrets: tuple[Secret, ...] = (),
    ) -> None:
        require("aiohttp", "llm", "a prompt")
        self._most = min(MOST, limit / 8)
        self._addresses = Addresses(urls, self._most)
        self._headers = {"content-type": "application/json", **vendor.headers(key)}
        self._vendor = vendor
        self._secrets = secrets
        self._with_users = any(redact(url) != url and "@" in url for url in urls)
        self._timeout = min(timeout, limit)
        self._limit = limit
        self._nobody = nobody
        self._room = room
        self._slots = Slots(room)
        self._session: aiohttp.ClientSession | None = None
        self._connector: Connector | None = None
        self._first: asyncio.Lock | None = None
        self._answered = False
        self._resumed = False
        self._heard = float("-inf")  # when the endpoint last answered a request
        self._since = float("-inf")  # when a request was sent and no other was on its way
        self._silence: Silence | None = None  # since nobody is answered
        self._looking: asyncio.Lock | None = None
        self._looked = float("-inf")  # when it was last asked whether it answers at all
        self._answered_last: Mapping[str, Any] = {}  # a request, by the form of `path`
        self._answered_path = ""
        self._refusals = Refusals()
        self._suspects = 0  # requests that were forbidden, and none has been answered since
        self._closed: dict[str, str] = {}  # addresses that are left out for good, and what each has said
        self.ending = Ending()
        self._turns = Turns(requests, tokens, share, self.ending)
        self.news: list[str] = []  # see paid.Asked
        self.put_off = 0  # see paid.Asked

    async def ask(
        self, body: Mapping[str, Any], tokens: float, path: str = CHAT, payer: Payer | None = None
    ) -> dict[str, Any]:
        """The endpoint's answer to a request that takes about so many tokens, whatever it takes to get one, which
        `payer` is told. `path` is one of REPLIES. Raises Refused (Empty if it was paid for), Unanswered, and BadModel
        or RunFailed for what no other row would be answered either.
        """
        try:
            if not self._answered:
                self._first = self._first or asyncio.Lock()
                async with self._first:  # one request alone, until there is an answer of any kind
                    if self._is_first():
                        return await self._asked(body, tokens, path, payer)
            return await self._asked(body, tokens, path, payer)
        except Forbidden as forbidden:
            await self._forbidden_alone(forbidden)
            raise Refused(forbidden.why, 403, forbidden.reply) from None

    def resumed(self) -> None:
        """See paid.Asked."""
        self._resumed = True

    def _is_first(self) -> bool:
        return not self._answered

    def share_in(self, run: str) -> None:
        """See paid.Asked."""
        self._turns.share_in(run)

    def stop(self, error: GristmillError) -> NoReturn:
        """No more requests, for this reason, which is raised."""
        self.ending.stop(error)

    async def close(self) -> None:
        """Close the connections."""
        self._turns.close()
        if self._session is not None:
            await self._session.close()

    async def _asked(self, body: Mapping[str, Any], tokens: float, path: str, payer: Payer | None) -> dict[str, Any]:
        tokens = min(tokens, self._turns.most)  # whatever a request says of itself, it waits a minute at most
        tries, taken = 0, 0.0  # seconds in flight and resting: waiting for others is not the request's fault
        data = json.dumps(body).encode()
        refusing: dict[
            str, tuple[Address, float]
        ] = {}  # the addresses that have refused it, and when it was sent there
        while True:
            tries += 1
            try:
                async with self._slots:  # not held by what waits to be sent again
                    self.ending.go_on()
                    address = await self._turn(tokens, refusing, payer)
                    sent, own = time.monotonic(), self._addresses.sends(address)
                    try:
                        found = await self._sent(address, path, data)
                    except asyncio.CancelledError:  # the run is ended, and it is on its way
                        if payer is not None:
                            payer.lost()
                        raise
                    finally:
                        self._addresses.over(address, own)
            except NotYet:
                assert payer is not None
                tries -= 1
                await payer.again()  # without a place, which those in flight may need to be answered
                continue
            except Closed as closed:
                self._without(address, closed)
                continue
            except Later as later:
                self._failed(address, sent, later)
                taken += time.monotonic() - sent
                if later.lost and payer is not None:
                    payer.lost()
                await self._nobody_there(later, tries, address, path, body, payer)
                wait = self._pause(later, tries, address)
                if taken + wait > self._limit or self._silent() + wait > self._limit:
                    times = "once" if tries == 1 else f"{tries} times"
                    own = Unanswered(f"asked {times} in {taken:.0f} s, the last time: {later.why}")
                    await self._given_up(own, path, body, payer)
                    if taken + wait > self._limit:
                        raise own from None
                await self.ending.sleep(wait)
                taken += wait
                if later.lost and payer is not None:
                    await payer.again()
                continue
            except (Refused, Forbidden) as e:
                if payer is not None:
                    payer.refused(e.reply)
                if address.url not in refusing and len(refusing) + 1 < len(self._addresses):
                    refusing[address.url] = address, sent
                    self._addresses.refused(address, time.monotonic(), sent)
                    continue  # perhaps the fault is that of the address
                refusing[address.url] = address, sent
                await self._refused_by(refusing, e, payer)
                raise
            self._well(address, sent)
            for other, when in refusing.values():
                self._addresses.failed(other, time.monotonic(), when, None)
            self._room.answered(time.monotonic(), self._slots.flying + 1)
            self._turns.more((sum(tokens_in(found)) or tokens) - tokens)
            if not holds(found, REPLIES[path]):
                raise Empty(REPLIES[path], found)
            self._refusals.none()
            if len(data) <= MOST_AGAIN:
                self._answered_path, self._answered_last = path, body
            return found

    # ------------------------------------------------ addresses, and whether anybody answers

    async def _turn(self, tokens: float, refusing: Collection[str], payer: Payer | None) -> Address:
        """Whom a request is to ask now, when one may be sent: its turn is taken once there is somebody, as all that
        waited for an address would leave at once. Raises NotYet. Nothing may be waited for before it is sent.
        """
        until = time.monotonic() + ELSEWHERE
        while True:
            await self._somebody(refusing, until)
            turn, goes = await self._turns.take(tokens), False
            try:
                self.ending.go_on()  # as it may be over since it began to wait
                for but in (refusing, self._left_for_others(refusing, until)):
                    if (found := self._addresses.free(time.monotonic(), but)) is not None:
                        if payer is not None and not payer.still():
                            raise NotYet
                        goes = True
                        return found
            finally:
                if not goes:  # nobody is well any more by now, or it may not be sent yet, or all is over
                    self._turns.unsent(turn, tokens)

    async def _somebody(self, refusing: Collection[str], until: float) -> None:
        """Returns once an address may be asked; until then, one that was not `refusing` the request. Raises RunFailed
        if all want to be left alone for longer than a request may take.
        """
        while self._addresses.free(now := time.monotonic(), self._left_for_others(refusing, until)) is None:
            rest = self._addresses.rest(now)
            if rest > self._limit:
                self._left_alone(rest, "")
            await self.ending.sleep(min(LOOK, max(0.01, rest)))

    def _left_for_others(self, refusing: Collection[str], until: float) -> Collection[str]:
        """The addresses that a request does not ask, as long as others may become well until then."""
        others = time.monotonic() < until and any(address.url not in refusing for address in self._addresses)
        return refusing if others else ()

    def _well(self, address: Address, sent: float) -> None:
        """The endpoint has answered a request."""
        if not self._answered:  # one request alone, and while it was waited for, nobody was held up
            self._turns.anew()
        self._answered, self._heard, self._silence = True, time.monotonic(), None
        self._addresses.answered(address, sent)

    def _without(self, address: Address, closed: Closed) -> None:
        """Ask this address no more, which is told once. Raises BadModel or RunFailed if it was the last one."""
        self.ending.go_on()
        url = redact(address.url)
        new = url not in self._closed
        self._closed[url] = f"refuses {closed.what}: {closed.why}"
        if not self._addresses.without(address):
            others = "; ".join(f"{other} {said}" for other, said in self._closed.items() if other != url)
            self.stop(
                self._refused(closed.what, f"{closed.why}; so do all addresses: {others}" if others else closed.why)
            )
        if new:
            self.news.append(f"{url} {self._closed[url]}: it is left out, and its requests go to the other addresses")

    def _failed(self, address: Address, sent: float, later: Later) -> None:
        now = time.monotonic()
        self.put_off += later.full
        many = self._addresses.failed(address, now, sent, later.after, later.full)
        if many and later.full and not self._addresses.others_well(address, now):
            self._room.refused(now, sent)
        if rest := self._addresses.rest(now):
            self._turns.rest(now + rest)
        self._silence = self._silence or Silence(max(sent, self._heard))
        self._silence.failed(address, later)

    def _silent(self) -> float:
        """Seconds in which nobody was answered, since the first failure among them."""
        return 0.0 if self._silence is None else time.monotonic() - self._silence.since

    async def _nobody_there(
        self, later: Later, tries: int, address: Address, path: str, body: Mapping[str, Any], payer: Payer | None
    ) -> None:
        """Raises RunFailed if no request has been answered yet, the smallest one included. Once nobody was answered for
        a while, the smallest is asked now and then: progress is to tell one request's failure from an endpoint's.
        """
        first = not self._answered and tries >= max(FIRST_TRIES, len(self._addresses)) and not later.full
        if first and not await self._answers_small(path, body, 0.0, payer):
            self._never_answered(f"asked {tries} times, the last time: {later.why}", path, body)
        if self._silent() < SAID[-1] or time.monotonic() < self._looked + SAID[-1]:
            return
        self._looking = self._looking or asyncio.Lock()
        if not self._looking.locked():
            async with self._looking:
                await self._answers_small(path, body, 0.0, payer)

    def _never_answered(self, how: str, path: str, body: Mapping[str, Any]) -> NoReturn:
        """Stop, as no address has answered yet, neither a row's request nor the smallest; `how` it was asked."""
        where = " and ".join(below(redact(address.url), path) for address in self._addresses)
        what = f"a row's request ({how}), nor to the smallest there is (one token of model {body.get('model')!r})"
        told = f"{where}: no answer to {what} in {self._silent():.0f} s"
        if self._resumed:
            self.stop(
                RunFailed(f"{told}: it has answered this job before: run again once it does, what it answered is kept")
            )
        slow = f" If it is slow, give a longer timeout (now {self._timeout:g} s)." if "(timeout)" in how else ""
        self.stop(RunFailed(f"{told}: is this the endpoint (base_url)?{slow} Run again once it answers"))

    def _pause(self, later: Later, tries: int, address: Address) -> float:
        """Seconds to rest before the next try. Raises RunFailed if the endpoint wants to be left alone for longer than
        a request may take.
        """
        rest = self._addresses.rest(time.monotonic())
        if rest > self._limit:
            self._left_alone(rest, f": {later.why}")
        if not rest and tries < len(self._addresses):
            return 0.0  # another one may answer at once
        if rest and later.after is not None:
            return rest
        alone = 0.0 if later.after is None else later.after + random.uniform(0, 0.1)  # the others go on
        return max(rest, alone, random.uniform(0, min(self._most, BASE * 2.0 ** min(tries - 1, 10))))

    def _left_alone(self, rest: float, why: str) -> NoReturn:
        """Stop, as the address that may be asked first asks to be left alone for so long."""
        at = datetime.datetime.now().astimezone() + datetime.timedelta(seconds=rest)
        url = redact(min(self._addresses, key=lambda address: address.rests_until).url)
        self.stop(
            RunFailed(
                f"{url} asks to be left alone until {at:%Y-%m-%d %H:%M:%S} ({rest:,.0f} s), which is longer than "
                f"batch_timeout{why}; what is answered is kept: run again then"
            )
        )

    async def _given_up(self, own: Unanswered, path: str, body: Mapping[str, Any], payer: Payer | None) -> None:
        """A request, or all, had no answer for as long as they may. Returns if it is this request alone: the endpoint
        answers others, or at least the smallest request that there is. Raises RunFailed.
        """
        if self._silent() < self._limit / 2:
            return
        self._looking = self._looking or asyncio.Lock()
        async with self._looking:
            self.ending.go_on()
            seconds = min(MOST_LOOK, self._limit / 9)
            if self._silence is None or await self._answers_small(path, body, seconds, payer):
                return
            if not self._answered:
                self._never_answered(str(own), path, body)
            self.stop(
                RunFailed(
                    f"no answer from {self._silence.url} for {self._silent():.0f} s ({own}); what is answered is kept: "
                    "run again"
                )
            )

    async def _answers_small(self, path: str, body: Mapping[str, Any], seconds: float, payer: Payer | None) -> bool:
        """Whether the endpoint answers the smallest request of a form (if only to refuse it, as long as none was
        answered), or one that it has answered: asked once, and again for so many seconds.
        """
        self._looked = time.monotonic()
        smallest = {"model": body.get("model"), **{name: SMALL[name] for name in SMALL if name in body}}
        asked = [(path, _of_one_token(path, smallest)), *self._known()]
        until = time.monotonic() + seconds
        while True:
            for form, one in asked:
                for address in self._addresses:
                    refused = await self._refuses(address, form, one, payer)
                    if refused is False or (refused and not self._answered_last):
                        return True
            if (left := until - time.monotonic()) <= 0:
                return False
            await self.ending.sleep(min(left, BASE))

    def _known(self) -> list[tuple[str, dict[str, Any]]]:
        """A request that was answered, with its path: for its first token, and as it was."""
        form, one = self._answered_path, dict(self._answered_last)
        less = _of_one_token(form, one) if one else one
        return [(form, body) for body in ((one,) if less == one else (less, one)) if body]

    async def _refuses(self, address: Address, path: str, body: Mapping[str, Any], payer: Payer | None) -> bool | None:
        """Whether an address refuses a request; None if it does not answer."""
        sent = time.monotonic()
        whole = body == self._answered_last
        most = self._timeout if whole else min(MOST_LOOK, max(1.0, self._limit / 9))
        try:
            found = await asyncio.wait_for(self._sent(address, path, json.dumps(body).encode()), most)
        except (Later, asyncio.TimeoutError) as e:
            if payer is not None and (not isinstance(e, Later) or e.lost):
                payer.probed(path, body, None)
            return None
        except Closed as e:
            self._without(address, e)
            return None
        except (Refused, Forbidden):
            if not self._answered_last:
                self._well(address, sent)
            return True
        self._well(address, sent)
        if payer is not None:
            payer.probed(path, body, found)
        return False

    @property
    def most_flying(self) -> int:
        """See paid.Asked. Called in any thread."""
        return self._slots.most

    @property
    def trouble(self) -> str:
        """What keeps answers away, for people; "" if nothing does. Called in any thread."""
        now, silence = time.monotonic(), self._silence
        if self.ending.error is not None:
            return "waiting for the run to end"
        if silence is not None:
            told = silence.told(now, self._addresses.rest(now))
            over = f"; a row is given up after {self._limit:.0f} s (batch_timeout)"
            return told + over if told and self._answered and math.isfinite(self._limit) else told
        quiet = now - max(self._heard, self._since)
        if quiet < SAID[-1] or not (asked := [a for a in self._addresses if a.flying]):
            return ""
        return f"waiting: no answer from {redact(asked[0].url)} for {steps(quiet)} s"

    # ------------------------------------------------ who is refused

    async def _refused_by(
        self,
        addresses: Mapping[str, tuple[Address, float]],
        refusal: Refused | Forbidden,
        payer: Payer | None,
    ) -> None:
        """A request is refused, by all addresses that could be asked. Returns if that is its own fault. Raises
        RunFailed if many were, one after the other, and one that was answered before is refused now, too.
        """
        for address, sent in addresses.values():
            self._addresses.answered(address, sent)
            if isinstance(refusal, Refused):
                self._well(address, sent)
        self._refusals.one()
        if not self._refusals.are_many() or not self._answered_last:
            return
        self._looking = self._looking or asyncio.Lock()
        async with self._looking:
            self.ending.go_on()
            if not self._refusals.are_many():
                return
            if await self._refuses_known(payer):
                why = refusal.why if isinstance(refusal, Forbidden) else str(refusal)
                self.stop(
                    RunFailed(
                        "the endpoint refuses every request now, also one that it has answered before: "
                        f"{why}; what is answered is kept: run again"
                    )
                )
            self._refusals.asked()

    async def _refuses_known(self, payer: Payer | None) -> bool:
        """Whether each address refuses what was answered before."""
        for form, one in self._known():
            for address in self._addresses:
                if not await self._refuses(address, form, one, payer):
                    return False
        return True

    async def _forbidden_alone(self, forbidden: Forbidden) -> None:
        """Returns if a filter forbids this request's text: others are answered, or the key is good for the list of
        models. Raises BadModel or RunFailed if it is the key that is refused.
        """
        self._suspects += 1
        try:
            good = None if self._heard >= forbidden.sent else await self._key_is_good()
            until = time.monotonic() + (SUSPENSE if self._answered else SUSPENSE / 6)
            while good is None and self._suspects < SUSPECTS and time.monotonic() < until:
                if self._heard >= forbidden.sent:
                    break
                await self.ending.sleep(0.05)
            if good is None and self._heard < forbidden.sent:
                good = self._answered and self._suspects < SUSPECTS
            if good is False:
                self.stop(self._refused("the key", forbidden.why))
        finally:
            self._suspects -= 1

    async def _key_is_good(self) -> bool | None:
        """Whether the endpoint lists its models to this key; None if it does not say."""
        import aiohttp

        for address in self._addresses:
            with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
                async with self._opened().get(below(address.url, "models"), allow_redirects=False) as reply:
                    if reply.status in (200, 401, 403):
                        return reply.status == 200
        return None

    def _refused(self, what: str, why: str) -> GristmillError:
        if not self._answered:
            return BadModel(f"the endpoint refuses {what}: {why}")
        return RunFailed(f"the endpoint refuses {what} now: {why}; what is answered is kept: run again")

    async def _sent(self, address: Address, path: str, data: bytes) -> dict[str, Any]:
        import aiohttp

        from gristmill.models.wire import calling, whole

        sent, call, session = time.monotonic(), calling(), self._opened()
        if not any(a.flying for a in self._addresses):
            self._since = sent
        address.flying += 1
        no_address = (aiohttp.InvalidURL, getattr(aiohttp, "NonHttpUrlClientError", aiohttp.InvalidURL))  # of 3.10
        try:
            # Not redirected: the headers with the key would be sent along to whoever is named.
            async with session.post(below(address.url, path), data=data, allow_redirects=False) as reply:
                text = await whole(reply)
                status, headers = reply.status, reply.headers
        except no_address:
            self.stop(BadModel(f"base_url {redact(address.url)!r} is not an address: write it as https://host/v1"))
        except asyncio.TimeoutError:  # which is an OSError
            what = "answer" if call.by is not None or self._timeout <= CONNECT else "connection"
            seconds = self._timeout if what == "answer" else CONNECT
            lost = call.by is not None and may_be_billed(None)
            raise Later(f"no {what} within {seconds:g} s (timeout)", lost=lost) from None
        except (aiohttp.ClientError, OSError) as e:
            lost = call.by is not None and may_be_billed(None)
            raise Later(scrub(f"{type(e).__name__}: {e}", self._secrets), lost=lost) from None
        finally:
            address.flying -= 1
        assert self._connector is not None
        if self._connector.repeated(call, data, text):
            lost = may_be_billed(status)
            raise Later("the reply to another request came once more, instead of one to this", lost=lost)
        found = json_in(text)
        if 200 <= status < 300 and answers(found, REPLIES[path]):
            return cast("dict[str, Any]", unsaid(found, text, self._secrets))
        if status == 200:
            said = scrub(text.decode("utf-8", "replace"), self._secrets)
            raise Later(f"a reply without {REPLIES[path]}: {said[:200]!r}", lost=may_be_billed(status, found))
        raise self._failure(status, text, headers, below(redact(address.url), path), sent)

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        from gristmill.models.wire import Connector

        if self._session is None:
            self._connector = Connector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=self._connector,
                timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=min(CONNECT, self._timeout)),
                headers=self._headers,
            )
        return self._session

    def _failure(self, status: int, text: bytes, headers: Mapping[str, str], asked: str, sent: float) -> Exception:
        said, code = said_in(scrub(text.decode("utf-8", "replace"), self._secrets).encode())
        said, reply = scrub(said, self._secrets), scrub_values(json_in(text), self._secrets)
        why = f"{status}: {said.removeprefix(f'{status}: ')}" if said else str(status)
        if 300 <= status < 400:
            self.stop(BadModel(scrub(redirected(asked, status, headers), self._secrets)))
        if status == 403 and code not in QUOTA:
            return Forbidden(why, sent, reply)
        if status in self._nobody or code in QUOTA:
            if status == 404:
                v1 = "" if "/v1" in asked else "; most addresses end in /v1 (base_url)"
                why = f"{why} ({asked}{v1})"
            elif status == 401 and self._vendor.sends not in self._headers and not self._with_users:
                why = f"{why}; no key was sent: {self._vendor.variable}_API_KEY is not set, and no api_key is given"
            return Closed(self._nobody.get(status, "the account"), why)
        if status in LATER:
            return Later(why, after_of(headers), status in FULL, may_be_billed(status, json_in(text)))
        return Refused(why, status, reply, code)


def _of_one_token(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A request that asks for as little as there is."""
    limits = [name for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if name in body]
    if not limits and path in LONGEST:
        limits = [LONGEST[path]]
    few = {"input": body["input"][:1]} if path == "embeddings" and isinstance(body.get("input"), list) else {}
    return {**body, **few, **{name: SMALL[name] for name in limits}}

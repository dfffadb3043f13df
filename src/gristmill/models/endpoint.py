"""Endpoints that speak OpenAI's chat form: requests, what their failures mean, and when to ask again."""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from gristmill.errors import BadModel, GristmillError, RunFailed
from gristmill.job.uris import redact
from gristmill.models.pace import Pace
from gristmill.models.room import Room
from gristmill.process.extras import require

if TYPE_CHECKING:
    import aiohttp

BASE, MOST = 0.5, 30.0  # seconds: the first wait before a request is sent again, and the longest (full jitter)
FIRST_TRIES = 4  # of the very first request: an endpoint that does not answer is told at once
LATER = frozenset({408, 409, 425, 429, 500, 502, 503, 504, *range(520, 530)})
FULL = frozenset({429, 503})
# What is refused for all rows.
NOBODY = {401: "the key", 402: "the account", 403: "the key", 404: "the address or the model"}
QUOTA = ("insufficient_quota", "billing_hard_limit_reached")


class Refused(Exception):
    """The endpoint refuses this request, and would again."""


class Unanswered(Exception):
    """The request was sent again until its time was over."""


@dataclass(frozen=True)
class Later(Exception):
    """What is worth another try, not before `after` seconds if the endpoint says so; `full`: it has too much to do."""

    why: str
    after: float | None = None
    full: bool = False


@dataclass
class Address:
    """One of an endpoint's addresses, how many requests it has, and until when it is left alone."""

    url: str
    flying: int = 0
    rests_until: float = 0.0


class Slots:
    """Room for requests in flight, in the order in which they ask for it; as `async with`. Used in one event loop."""

    def __init__(self, room: Room) -> None:
        self.flying = 0
        self._room = room
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self.flying < self._room.limit and not self._waiting:
            self.flying += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # cancelled after it was given its place
                await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.flying -= 1
        while self._waiting and self.flying < self._room.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self.flying += 1
                turn.set_result(None)


class Endpoint:
    """A client of one model's addresses, used in one event loop. Limits are this worker's share."""

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
    ) -> None:
        require("aiohttp", "llm", "a prompt")
        self._addresses = [Address(url.rstrip("/")) for url in urls]
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._timeout = timeout
        self._limit = limit
        self._room = room
        self._slots = Slots(room)
        self._requests, self._tokens = Pace(requests), Pace(tokens)
        self._session: aiohttp.ClientSession | None = None
        self._first: asyncio.Lock | None = None
        self._queue: asyncio.Lock | None = None
        self._answered = False
        self._over: GristmillError | None = None

    async def ask(self, body: Mapping[str, Any], tokens: float, path: str, key: str) -> dict[str, Any]:
        """The endpoint's answer to a request that takes about so many tokens, whatever it takes to get one: a JSON
        object with `key`, from the `path` below its address. Raises Refused, Unanswered, and BadModel or RunFailed for
        what no other row would be answered either.
        """
        if not self._answered:
            self._first = self._first or asyncio.Lock()
            async with self._first:  # one request alone, until there is an answer of any kind
                if self._is_first():
                    return await self._asked(body, tokens, path, key)
        return await self._asked(body, tokens, path, key)

    def _is_first(self) -> bool:
        return not self._answered

    def stop(self, error: GristmillError) -> NoReturn:
        """No more requests, for this reason, which is raised."""
        self._over = self._over or error
        raise self._over

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _asked(self, body: Mapping[str, Any], tokens: float, path: str, key: str) -> dict[str, Any]:
        begun, tries = time.monotonic(), 0
        data = json.dumps(body).encode()
        while True:
            tries += 1
            try:
                async with self._slots:  # not held by what waits to be sent again
                    if self._over is not None:
                        raise self._over
                    await self._turn(tokens)
                    address = self._address()
                    sent = time.monotonic()
                    found = await self._sent(address, data, path, key)
            except Later as later:
                if later.full:
                    self._room.refused(time.monotonic(), sent)
                await self._wait(later, tries, begun, address)
                continue
            except Refused:
                self._answered = True
                raise
            self._answered = True
            self._room.answered(time.monotonic(), self._slots.flying + 1)
            used = found.get("usage") or {}
            self._tokens.more(float(used.get("total_tokens") or tokens) - tokens)
            return found

    async def _turn(self, tokens: float) -> None:
        self._queue = self._queue or asyncio.Lock()
        async with self._queue:  # one after the other: what a stall held up does not leave all at once
            now = time.monotonic()
            begin = max(self._requests.turn(now), self._tokens.turn(now, tokens))
            if begin > now:
                await asyncio.sleep(begin - now)

    def _address(self) -> Address:
        now = time.monotonic()
        well = [a for a in self._addresses if a.rests_until <= now]
        return min(well, key=lambda a: a.flying) if well else min(self._addresses, key=lambda a: a.rests_until)

    async def _wait(self, later: Later, tries: int, begun: float, address: Address) -> None:
        now = time.monotonic()
        if not self._answered and tries >= FIRST_TRIES:
            self._over = BadModel(f"{address.url}: no answer: {later.why}: is this the endpoint (base_url)?")
            raise self._over
        wait = random.uniform(0, min(MOST, BASE * 2.0 ** min(tries - 1, 10)))
        if later.after is not None:
            wait = later.after + random.uniform(0, 0.1)
        if now + wait - begun > self._limit:
            times = "once" if tries == 1 else f"{tries} times"
            raise Unanswered(f"asked {times} in {now - begun:.0f} s, the last time: {later.why}")
        if later.after is not None:  # said to all requests, not to this one alone
            self._requests.pause(now + wait)
        if len(self._addresses) > 1:
            address.rests_until = now + max(1.0, wait)
            wait = 0.0 if any(a.rests_until <= now for a in self._addresses) else wait
        await asyncio.sleep(wait)

    async def _sent(self, address: Address, data: bytes, path: str, key: str) -> dict[str, Any]:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=self._timeout),
                headers=self._headers,
            )
        address.flying += 1
        try:
            async with self._session.post(f"{address.url}/{path}", data=data) as reply:
                text = await reply.read()
                status, headers = reply.status, reply.headers
        except aiohttp.InvalidURL as e:
            self._over = BadModel(f"base_url {address.url!r} is not an address: write it as https://host/v1")
            raise self._over from e
        except (aiohttp.ClientError, OSError) as e:
            raise Later(f"{type(e).__name__}: {e}") from None
        except asyncio.TimeoutError:
            raise Later(f"no answer within {self._timeout:g} s (timeout)") from None
        finally:
            address.flying -= 1
        if status == 200:
            return _parsed(text, key)
        raise self._failure(status, text, headers, f"{redact(address.url)}/{path}")

    def _failure(self, status: int, text: bytes, headers: Mapping[str, str], asked: str) -> Exception:
        said, code = _said(text)
        why = f"{status}: {said.removeprefix(f'{status}: ')}" if said else str(status)
        if status in NOBODY or code in QUOTA:
            what = NOBODY.get(status, "the account")
            if status == 404:
                v1 = "" if "/v1" in asked else "; most addresses end in /v1 (base_url)"
                why = f"{why} ({asked}{v1})"
            elif status == 401 and "authorization" not in self._headers:
                why = f"{why}; no key was sent: OPENAI_API_KEY is not set, and no api_key is given"
            if not self._answered:
                self._over = BadModel(f"the endpoint refuses {what}: {why}")
            else:
                self._over = RunFailed(f"the endpoint refuses {what} now: {why}; what is answered is kept: run again")
            return self._over
        if status in LATER:
            return Later(why, _after(headers), status in FULL)
        return Refused(why)


def _parsed(text: bytes, key: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
        if isinstance(found, dict) and found[key]:
            return found
    except (ValueError, KeyError):
        pass
    raise Later(f"not an answer with {key!r}: {text[:200].decode('utf-8', 'replace')!r}")


def _said(text: bytes) -> tuple[str, str]:
    """An error in the endpoint's own words, and its code."""
    try:
        found = json.loads(text)
        error = found.get("error", found)
        if isinstance(error, dict):
            message = error.get("message") or error.get("detail") or json.dumps(error)
            return str(message)[:1000], str(error.get("code") or error.get("type") or "")
        return str(error)[:1000], ""
    except (ValueError, AttributeError):
        return text[:300].decode("utf-8", "replace").strip(), ""


def _after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, as a Retry-After (RFC 9110: seconds or a date) or retry-after-ms says; None without one."""
    try:
        if (milliseconds := headers.get("retry-after-ms")) is not None:
            return max(0.0, float(milliseconds) / 1000)
        if (text := headers.get("retry-after")) is None:
            return None
        if text.strip().replace(".", "", 1).isdigit():
            return float(text)
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None

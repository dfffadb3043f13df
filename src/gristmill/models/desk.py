"""Calls to a provider's batch API: one at a time, what their failures mean, and when to make them again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from gristmill.errors import BadModel, RunFailed
from gristmill.job.secret import Secret, scrub, scrub_values
from gristmill.job.uris import redact
from gristmill.models.addresses import below
from gristmill.models.replies import LATER, NOBODY, QUOTA, after_of, redirected, said_in
from gristmill.process.extras import require

if TYPE_CHECKING:
    import aiohttp

BASE, MOST = 0.5, 30.0  # seconds: the first wait before a call is made again, and the longest (full jitter)
# Statuses by which somebody on the way of a call says that there was no answer: of proxies, and of Cloudflare.
GIVEN_UP = frozenset({408, 499, 502, 504, *range(520, 528), 598, 599})
PIECE = 1 << 20  # bytes of a file that is fetched, at a time
CONNECT = 30.0  # seconds
LEAST = 1024  # bytes of a file that have to move in a second, on average over the time that a call may take
MOST_JSON = 1 << 25  # bytes of a reply: a hundred batches, with all that is told of them, are a hundredth of it


Reply = tuple[int, Mapping[str, str], bytes]  # status, headers, and the body if it is not written to a file


class Busy(Exception):
    """The provider takes no such call now, and has done nothing."""

    def __init__(self, why: str, after: float | None) -> None:
        super().__init__(why)
        self.after = after


class Unsure(Exception):
    """There was no answer, or one that does not tell whether the call was obeyed, which it may be `late`, as somebody
    on its way has given up waiting. If it was not `sent`, nobody was there.
    """

    after: float | None = None
    late = True
    sent = True


class Gone(Exception):
    """There is nothing of that name at the provider."""


class Desk:
    """The address of a provider, with the key. A call has its answer within `timeout` seconds, or moves a file at no
    less than a least rate. One that is not obeyed for `limit` seconds, or is to wait for longer, ends the run, which
    can be gone on with. What it gives, and says of failures, is without `secrets`. Used in one event loop.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], *, timeout: float, limit: float, secrets: tuple[Secret, ...] = ()
    ) -> None:
        require("aiohttp", "llm", "a batch API")
        self._url = url
        self._headers = dict(headers)
        self.timeout = timeout
        self.limit = limit
        self.secrets = secrets
        self._session: aiohttp.ClientSession | None = None

    async def asked(self, path: str, has: Sequence[str], **params: str) -> dict[str, Any]:
        """What a GET tells, which has these members. Raises Gone, RunFailed."""
        return await self.patient(lambda: self.once("GET", path, params=params, has=has))

    async def fetched(self, path: str, into: IO[bytes], most: int, first: bool = False) -> None:
        """Write what a GET gives to the end of a file, whole, or at least its `first` line; more than `most` bytes are
        no such file. Raises Gone, RunFailed.
        """
        begin = into.seek(0, 2)

        async def whole() -> dict[str, Any]:
            into.seek(begin)
            into.truncate()
            return await self.once("GET", path, into=into, first=first, most=most)

        await self.patient(whole)

    async def patient(self, call: Callable[[], Any]) -> dict[str, Any]:
        """What a call that may be made twice gives in the end."""
        begun, tries = time.monotonic(), 0
        while True:
            tries += 1
            try:
                found: dict[str, Any] = await call()
                return found
            except (Busy, Unsure) as e:
                await self.rest(e, begun, random.uniform(0, min(MOST, BASE * 2.0 ** min(tries, 10))))

    async def rest(self, why: Busy | Unsure, begun: float, pause: float) -> None:
        """Wait before a call that is made since `begun` is made again: for a `pause`, or as long as the provider says
        if that is longer. Raises RunFailed if there is not so much time.
        """
        taken, wait = time.monotonic() - begun, max(why.after or 0.0, min(pause, self.limit))
        if taken <= self.limit and wait <= self.limit:
            await asyncio.sleep(wait)
            return
        what = f"no call was obeyed for {self.limit:.0f} s, the last time: {why}"
        if wait > self.limit:
            what = f"it asks to be left alone for {wait:,.0f} s, which is longer than batch_timeout: {why}"
        elif isinstance(why, Unsure):
            what = f"no answer for {self.limit:.0f} s, the last time: {why}"
        raise RunFailed(
            f"{redact(self._url)}: {what}; batches go on there, and what they answer is fetched by the next run: run "
            "again"
        ) from None

    async def once(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        data: Any = None,
        sends: IO[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        into: IO[bytes] | None = None,
        most: int = MOST_JSON,
        first: bool = False,
        has: Sequence[str] = (),
    ) -> dict[str, Any]:
        """One call, and the JSON that it is answered with, which `has` these members. `sends` is the file that is read
        for `data`. Raises Busy, Unsure, Gone, RunFailed, BadModel.
        """
        import aiohttp

        where = below(self._url, path)
        # Not redirected: the headers with the key would be sent along to whoever is named.
        call = self._opened().request(method, where, params=params, data=data, headers=headers, allow_redirects=False)
        try:
            status, told, text = await self._watched(_replied(call, into, most, first), into or sends)
        except aiohttp.InvalidURL as e:
            raise RunFailed(f"base_url {redact(self._url)!r} is not an address: write it as https://host/v1") from e
        except asyncio.TimeoutError:
            raise Unsure(f"no answer within {self.timeout:g} s (timeout)") from None
        except (aiohttp.ClientError, OSError) as e:
            failure = Unsure(scrub(f"{type(e).__name__}: {e}", self.secrets))
            failure.sent = not isinstance(e, aiohttp.ClientConnectorError)
            raise failure from None
        if status != 200:
            raise self._failure(method, status, text, told, where)
        if into is not None:
            return {}
        try:
            found = json.loads(text)
            if isinstance(found, dict) and all(found.get(name) is not None for name in has):
                return dict(scrub_values(found, self.secrets))
        except (ValueError, RecursionError):
            pass
        what = f"no JSON object{' with ' + ', '.join(has) if has else ''}"
        said = scrub(text.decode("utf-8", "replace"), self.secrets)
        raise Unsure(f"a reply that is {what}: {said[:200]!r}")

    async def _watched(self, call: Coroutine[Any, Any, Reply], file: IO[bytes] | None) -> Reply:
        """A call, ended if in the time that it may take it does not end, nor moves so much of a `file`."""

        def moved() -> int:  # a copy of the file's descriptor shares its place
            return 0 if file is None else os.lseek(file.fileno(), 0, os.SEEK_CUR)

        task = asyncio.ensure_future(call)
        try:
            while True:
                before = moved()
                done, _ = await asyncio.wait([task], timeout=self.timeout)
                if done:
                    return task.result()
                if moved() - before < LEAST * self.timeout:
                    raise asyncio.TimeoutError
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    def _failure(self, method: str, status: int, text: bytes, headers: Mapping[str, str], where: str) -> Exception:
        said, code = said_in(scrub(text.decode("utf-8", "replace"), self.secrets).encode())
        said = scrub(said, self.secrets)
        why = f"{status}: {said.removeprefix(f'{status}: ')}" if said else str(status)
        if status == 404 and method == "GET":
            return Gone(why)
        if 300 <= status < 400:
            return BadModel(scrub(redirected(f"{method} {redact(where)}", status, headers), self.secrets))
        if status not in LATER or code in QUOTA:
            what = {**NOBODY, 404: "the address"}.get(status, "the account" if code in QUOTA else "the call")
            return RunFailed(
                f"the provider refuses {what}: {why} ({method} {redact(where)}); batches that are under way go on, and "
                "the next run fetches what they answer: run again"
            )
        if status == 429:
            return Busy(why, after_of(headers))
        failure = Unsure(why)
        failure.after = after_of(headers)
        failure.late = status in GIVEN_UP
        return failure

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            # A file of requests may take long on its way.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT, sock_read=self.timeout)
            self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        return self._session


async def _replied(call: Any, into: IO[bytes] | None, most: int, first: bool) -> Reply:
    """What a call is answered with; a good one `into` a file, if there is one. Raises Unsure for more than `most`."""
    async with call as reply:
        file = into if reply.status == 200 else None
        if file is None:
            most = min(most, MOST_JSON)
        text, size = bytearray(), 0
        async for piece in reply.content.iter_chunked(PIECE):
            size += len(piece)
            if size > most:
                raise Unsure(f"a reply of more than {most:,} bytes")
            if file is None:
                text += piece
                continue
            file.write(piece)
            file.flush()  # so that its place tells that it moves
            if first and b"\n" in piece:
                break
        return reply.status, reply.headers, bytes(text)

"""How endpoints are reached: connections that carry the reply to each request, once, and replies that have an end."""

from __future__ import annotations

import contextvars
import weakref
from typing import TYPE_CHECKING, Any

import aiohttp

from gristmill.values import dataclass

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.connector import Connection

MOST = 1 << 26  # bytes of a reply, as it is once it is decompressed
PIECE = 1 << 16  # bytes that are read at a time
DOUBTED = 100_000  # replies that are remembered as doubted


class TooLong(aiohttp.ClientPayloadError):
    """A reply that is no answer, however it goes on."""


@dataclass
class Call:
    """A request, and the connection by which it is sent; None until there is one."""

    by: ResponseHandler | None = None


_CALL: contextvars.ContextVar[Call | None] = contextvars.ContextVar("call", default=None)


def calling() -> Call:
    """The request that is sent next in this task by a Connector."""
    call = Call()
    _CALL.set(call)
    return call


async def whole(reply: aiohttp.ClientResponse) -> bytes:
    """What a reply holds, decompressed. Raises TooLong, and what `reply.read` does."""
    pieces, size = [], 0
    async for piece in reply.content.iter_chunked(PIECE):
        size += len(piece)
        if size > MOST:
            reply.close()
            raise TooLong(f"a reply of more than {MOST >> 20} MB")
        pieces.append(piece)
    return b"".join(pieces)


class Connector(aiohttp.TCPConnector):
    """Connections that are kept for the next request, but none on which a server says more than it was asked: that
    would be taken for the answer to the next one, as would be each answer after it. Used in one event loop.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # What was asked last by each, and what it was answered.
        self._last: weakref.WeakKeyDictionary[ResponseHandler, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._doubted: set[int] = set()

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Connection:
        """See BaseConnector. One that was used before has received nothing since."""
        while True:
            found = await super().connect(req, traces, timeout)
            protocol = found.protocol
            if protocol is None or protocol not in self._last or not protocol.should_close:
                break
            found.close()
        if protocol is not None:
            self._last.setdefault(protocol, (0, 0))
        if (call := _CALL.get()) is not None:
            call.by = protocol
        return found

    def repeated(self, call: Call, asked: bytes, said: bytes) -> bool:
        """Whether a reply is to the byte the one before on its connection, which was to another request: a server, or a
        proxy before it, has sent that again, and the connection is closed, as the right one comes late. An endpoint
        may give equal replies by right: each is doubted once.
        """
        if call.by is None:
            return False
        now, before = (hash(asked), hash(said)), self._last.get(call.by, (0, 0))
        self._last[call.by] = now
        if before[0] in (0, now[0]) or before[1] != now[1] or now[1] in self._doubted:
            return False
        if len(self._doubted) >= DOUBTED:
            self._doubted.clear()
        self._doubted.add(now[1])
        call.by.close()
        return True

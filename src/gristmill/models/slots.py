"""Room for requests in flight, in the order in which they ask for it."""

from __future__ import annotations

import asyncio
from collections import deque

from gristmill.models.room import Room


class Slots:
    """Room for requests in flight, in the order in which they ask for it; as `async with`. Used in one event loop."""

    def __init__(self, room: Room) -> None:
        self.flying = self.most = 0  # now, and at most
        self._room = room
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self.flying < self._room.limit and not self._waiting:
            self.flying += 1
            self.most = max(self.most, self.flying)
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
                self.most = max(self.most, self.flying)
                turn.set_result(None)

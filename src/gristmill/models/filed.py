"""The requests of a shard, and the replies to them, in temporary files until the shard is done."""

from __future__ import annotations

import json
import tempfile
from typing import Any

from gristmill.models.batches import Request


class Filed:
    """Bodies of requests, and replies by the digests of what they answer. Used in one thread."""

    def __init__(self) -> None:
        self._bodies: Any = tempfile.TemporaryFile()  # noqa: SIM115 - until the shard is done
        self._replies: Any = tempfile.TemporaryFile()  # noqa: SIM115
        self._found: dict[bytes, list[tuple[int, int, int]]] = {}  # status, and where the reply is

    def request(self, digest: bytes, path: str, body: bytes, tokens: float, most: int | None) -> Request:
        """Keep a body."""
        made = Request(digest, path, self._bodies.seek(0, 2), len(body), tokens, most)
        self._bodies.write(body)
        return made

    def body(self, request: Request) -> bytes:
        """The body of a request, as JSON."""
        self._bodies.seek(request.at)
        return bytes(self._bodies.read(request.size))

    def keep(self, digest: bytes, status: int, reply: Any) -> None:
        """Keep a reply, with 200, or why there is none."""
        data = json.dumps(reply).encode()
        self._found.setdefault(digest, []).append((status, self._replies.seek(0, 2), len(data)))
        self._replies.write(data)

    def count(self, digest: bytes) -> int:
        """How many replies there are to such requests."""
        return len(self._found.get(digest, ()))

    def first(self, digest: bytes, take: bool) -> tuple[int, Any] | None:
        """The first of these replies, with its status: it is for no other, if it is to `take` it."""
        if not (found := self._found.get(digest)):
            return None
        status, at, size = found.pop(0) if take else found[0]
        self._replies.seek(at)
        return status, json.loads(self._replies.read(size))

    def forget(self, digest: bytes) -> None:
        """Keep the last of these replies no longer."""
        if found := self._found.get(digest):
            found.pop()

    def close(self) -> None:
        """Nothing of it is needed any more."""
        self._bodies.close()
        self._replies.close()

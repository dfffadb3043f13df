"""The hashes in which Redis has the rows of one place: a row is in the one whose number is that of `crc32(key) %
count`. Whatever is done to all of them is done in steps, each of which keeps the server for milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.stores.packing import crc32s, joined

BUCKET = 100  # rows a hash: under 128, the server keeps it as one compact block
FULL = 2 * BUCKET  # rows a hash at most, on average, before there have to be more of them
AT_ONCE = 1000  # commands that are sent before their replies are read
MOVED, OF_EACH = 50, 200  # hashes whose rows are moved together, and rows of each that are asked for at once

# KEYS: a hash, and the one that is to have its rows, too.
_MERGE = """
local rows = redis.call('HGETALL', KEYS[1])
for i = 1, #rows, 2 do redis.call('HSET', KEYS[2], rows[i], rows[i + 1]) end
return #rows / 2
"""


def number_for(rows: int) -> int:
    """How many hashes so many rows are to be in."""
    return max(1, -(-rows // BUCKET))


class Hashes:
    """`count` hashes, whose names are `at`, a colon, and a number; those without rows are not there."""

    def __init__(self, client: Any, at: str, count: int) -> None:
        self._client = client
        self.at, self.count = at, count

    def rows(self) -> int:
        """How many rows they have."""
        return sum(sum(found) for found in self._each("HLEN"))

    def fitting(self, more: int) -> int:
        """How many hashes their rows and so many `more` are to be in: as many, unless that would be too few."""
        rows = self.rows() + more
        return self.count if rows <= FULL * self.count else number_for(rows)

    def unlink(self) -> None:
        """Remove them; the server frees their memory beside its work."""
        for _ in self._each("UNLINK"):
            pass

    def expire(self, seconds: int) -> None:
        """Let them go after a while."""
        for _ in self._each("EXPIRE", seconds):
            pass

    def _each(self, command: str, *more: Any) -> Iterator[list[Any]]:
        """The replies to a command about each hash."""
        for first in range(0, self.count, AT_ONCE):
            with self._client.pipeline(transaction=False) as pipeline:
                for number in range(first, min(first + AT_ONCE, self.count)):
                    pipeline.execute_command(command, f"{self.at}:{number}", *more)
                yield pipeline.execute()

    # ------------------------------------------------ rows

    def put(self, keys: pa.Array, rows: pa.Array) -> None:
        """Add rows, or put them in place of those of their keys."""
        _send(self._client, commands(keys, rows, self.at, self.count))

    def copy(self, source: Hashes) -> None:
        """Become as the others are, which are as many. These have no rows yet."""
        for first in range(0, self.count, AT_ONCE):
            with self._client.pipeline(transaction=False) as pipeline:
                for number in range(first, min(first + AT_ONCE, self.count)):
                    pipeline.execute_command("COPY", f"{source.at}:{number}", f"{self.at}:{number}", "REPLACE")
                pipeline.execute()

    def take(self, source: Hashes) -> None:
        """Put all rows of others."""
        if source.count != self.count:
            return self._move(source)
        for first in range(0, self.count, AT_ONCE):
            with self._client.pipeline(transaction=False) as pipeline:
                for number in range(first, min(first + AT_ONCE, self.count)):
                    pipeline.eval(_MERGE, 2, f"{source.at}:{number}", f"{self.at}:{number}")
                pipeline.execute()
        return None

    def _move(self, source: Hashes) -> None:
        """The same where each row is in a hash of another number: they come here, and go there."""
        for first in range(0, source.count, MOVED):
            left = {f"{source.at}:{n}": 0 for n in range(first, min(first + MOVED, source.count))}
            while left:
                with self._client.pipeline(transaction=False) as pipeline:
                    for name, cursor in left.items():
                        pipeline.hscan(name, cursor, count=OF_EACH)
                    found = pipeline.execute()
                rows = {key: row for _, some in found for key, row in some.items()}
                if rows:
                    self.put(pa.array(list(rows), pa.binary()), pa.array(list(rows.values()), pa.binary()))
                left = {name: cursor for name, (cursor, _) in zip(left, found, strict=True) if cursor}


def _send(client: Any, data: pa.Array) -> None:
    """Send commands, some at a time, and read their replies."""
    connection = client.connection_pool.get_connection()
    _, edges, text = data.buffers()
    starts = np.frombuffer(edges, np.int32)[data.offset : data.offset + len(data) + 1].tolist()
    try:
        for first in range(0, len(data), AT_ONCE):
            last = min(first + AT_ONCE, len(data))
            connection.send_packed_command([memoryview(text)[starts[first] : starts[last]]])
            for _ in range(first, last):
                connection.read_response()
    except BaseException:
        connection.disconnect()  # with replies that nobody will read
        raise
    finally:
        client.connection_pool.release(connection)


def commands(keys: pa.Array, rows: pa.Array, at: str, count: int) -> pa.Array:
    """HSET commands for rows, as the bytes that are sent, one for each hash that they are in, or several if they are
    many.
    """
    number = crc32s(keys) % np.uint32(count)
    order = np.argsort(number, kind="stable")
    number, index = number[order], pa.array(order)
    fields = joined(*_bulk(keys.take(index)), *_bulk(rows.take(index)))
    firsts = _firsts(number)
    sizes = np.diff(np.append(firsts, len(number)))
    names = [f"{at}:{n}".encode() for n in number[firsts].tolist()]
    heads = [
        b"*%d\r\n$4\r\nHSET\r\n$%d\r\n%s\r\n" % (2 + 2 * s, len(n), n)
        for s, n in zip(sizes.tolist(), names, strict=True)
    ]
    _, edges, data = fields.buffers()
    starts = np.frombuffer(edges, np.int32)[fields.offset : fields.offset + len(fields) + 1]
    offsets = np.ascontiguousarray(starts[np.append(firsts, len(number))], np.int32)
    bodies = pa.Array.from_buffers(pa.binary(), len(firsts), [None, pa.py_buffer(offsets), data])
    return joined(pa.array(heads, pa.binary()), bodies)


def _firsts(numbers: np.ndarray) -> np.ndarray:
    """Where in sorted numbers each begins, and again after every AT_ONCE of the same."""
    if not len(numbers):
        return np.array([], np.int64)
    begins = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1])))
    within = np.arange(len(numbers)) - np.repeat(begins, np.diff(np.append(begins, len(numbers))))
    return np.flatnonzero(within % AT_ONCE == 0)


def _bulk(values: pa.Array) -> list[Any]:
    """Values as RESP's bulk strings: their length, then themselves."""
    length = pc.binary_length(values).cast(pa.string()).cast(pa.binary())
    line = pa.scalar(b"\r\n", pa.binary())
    return [pa.scalar(b"$", pa.binary()), length, line, values, line]

"""Redis and Valkey. A generation's rows are in hashes of about a hundred rows each, `prefix:place:r:N`, which take a
quarter of the memory of a key a row; the key `prefix` points at the generation that is published, and readers follow it
and get their row in one call of a script. A place is named once and never again: rows that were replaced stay for a
while, and those that are brought in their stead are not to go with them.

A row is found by its key's text: its hash's number is that of `crc32(key) % buckets`, and its value is a MessagePack
map (packing.py). Trap: a server that evicts keys, or that restarts without having saved them, loses rows; `count` and
`gristmill verify` tell.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, BadSource
from gristmill.process.extras import require
from gristmill.stores.contract import (
    STAGED,
    Key,
    Load,
    Mark,
    Mode,
    Part,
    Place,
    Reader,
    Store,
    StoreKind,
    StoreUnavailable,
    is_there,
    refuse_gone,
    refuse_ours,
)
from gristmill.stores.lookup import keyed
from gristmill.stores.packing import (
    check_beside,
    check_packed,
    crc32s,
    gathered,
    joined,
    key_bytes,
    packed_keys,
    packed_rows,
    told,
    unpacking,
)
from gristmill.stores.refused import AS_TEXT, refuse_far
from gristmill.values import dataclass

BUCKET = 100  # rows a hash: under 128, the server keeps it as one compact block
UNKNOWN = 1_000_000  # rows that are expected where nobody can tell
GRACE = 60  # seconds that the rows of an earlier generation stay, for readers of others that do not use the script
AT_ONCE = 1000  # commands that are sent before their replies are read
ASKED = 5000  # keys a call of the script
TIMEOUT = 30  # seconds to wait for the server

# KEYS: the pointer. ARGV: where it pointed, and what is asked for, packed: the number of a hash, keys in it, the next
# number, and so on. Returns where it points now and, if that is the same, the rows, packed: a reply that is one text
# and a command for each hash take half the time of one each for each row, on both sides.
_FIND = """
local at = redis.call('HGET', KEYS[1], 'at')
if at ~= ARGV[1] then return {at} end
local asked, out = cmsgpack.unpack(ARGV[2]), {}
for i = 1, #asked, 2 do
  local rows = redis.call('HMGET', at .. ':' .. string.format('%d', asked[i]), unpack(asked[i + 1]))
  for j = 1, #rows do out[#out + 1] = rows[j] end
end
return {at, cmsgpack.pack(out)}
"""
# KEYS: the pointer, the places. ARGV: where it points now (or ''), where it is to, buckets, marks, the place.
_SWITCH = """
if (redis.call('HGET', KEYS[1], 'at') or '') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'at', ARGV[2], 'buckets', ARGV[3], 'marks', ARGV[4])
redis.call('HSET', KEYS[2], ARGV[5], 'live')
return 1
"""
# KEYS: a hash, and the one that is to have its rows, too.
_MERGE = """
local rows = redis.call('HGETALL', KEYS[1])
for i = 1, #rows, 2 do redis.call('HSET', KEYS[2], rows[i], rows[i + 1]) end
return #rows / 2
"""


class Redis:
    """`redis://HOST:PORT/DB#prefix`; `rediss://` for TLS, `valkey://` for a Valkey server."""

    name: ClassVar[str] = "redis"
    modes: ClassVar[tuple[Mode, ...]] = ("replace", "upsert")
    keyed: ClassVar[bool] = True
    embedded: ClassVar[bool] = False

    @staticmethod
    def open(place: Place) -> Store:
        """The rows under a prefix, on a server that answers."""
        refuse_ours(place, place.name, f".*:(stages$|{STAGED})")
        return Server(place, _client(place))

    @staticmethod
    def reader(place: Place, key: tuple[str, ...]) -> Reader:
        """A pool of connections."""
        return ServerReader(place, key)


_: type[StoreKind] = Redis  # for mypy


def _client(place: Place) -> Any:
    redis = require("redis", "redis", place.shown)
    if not place.name:
        raise BadJob(f"{place.shown}: name a prefix for the keys: {place.shown}#scores")
    uri = place.uri.replace("valkey", "redis", 1) if place.uri.startswith("valkey") else place.uri
    with _said(place, "cannot be reached"):
        options = {"socket_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT, **place.options}
        client = redis.Redis.from_url(uri, **options)
        client.ping()
        return client


@contextlib.contextmanager
def _said(place: Place, what: str = "Redis says") -> Iterator[None]:
    redis = require("redis", "redis", place.shown)
    try:
        yield
    except (redis.RedisError, OSError, ValueError) as e:
        raise StoreUnavailable(f"{place.shown}: {what}: {place.words(e)}") from e


class Server:
    """The rows under one prefix."""

    def __init__(self, place: Place, client: Any) -> None:
        self._place = place
        self._client = client
        self._prefix = place.name

    # ------------------------------------------------ before

    def check(self, load: Load) -> None:
        check_packed(load.schema, load.key, self._place.shown)
        with _said(self._place):
            marks, at = self._client.hmget(self._prefix, "marks", "at")
            if (marks is None or at is None) and self._client.exists(self._prefix):
                raise BadJob(
                    f"{self._place.shown}: is a key that gristmill did not write, and deliveries would write into it: "
                    "give another prefix"
                )
        check_beside(load, _marks(marks, self._place), self._place.shown)

    def live(self, sink: str) -> Mark | None:
        with _said(self._place):
            return next(
                (m for m in _marks(self._client.hget(self._prefix, "marks"), self._place) if m.sink == sink), None
            )

    # ------------------------------------------------ staging

    def _at(self, place: str, part: str = "r") -> str:
        return f"{self._prefix}:{place}:{part}"

    def _places(self) -> dict[str, str]:
        """All places, and whether rows are being staged there, are or were live, or are going."""
        found = self._client.hgetall(f"{self._prefix}:stages")
        return {name.decode(): state.decode() for name, state in found.items()}

    def _begun(self, load: Load) -> str | None:
        """The place in which this generation's rows are being staged; None if there is none."""
        ours = (n for n, state in self._places().items() if state == "staging" and n.partition(".")[0] == load.stage)
        return min((name for name in ours if "." in name), default=None)

    def _begin(self, load: Load) -> tuple[str, int]:
        """The place of this generation's rows, and how many hashes they are in. An upsert has as many as the rows that
        it is merged with.
        """
        place = self._begun(load)
        if place is None:
            place = f"{load.stage}.{secrets.token_hex(4)}"
            self._client.hset(f"{self._prefix}:stages", place, "staging")
        found = self._client.hget(self._at(place, "about"), "buckets")
        if found is None:
            base = None if load.whole else self._client.hget(self._prefix, "buckets")
            count = int(base) if base else max(1, -(-(load.mark.rows or UNKNOWN) // BUCKET))
            self._client.hsetnx(self._at(place, "about"), "buckets", count)
            found = self._client.hget(self._at(place, "about"), "buckets")
        return place, int(found)

    def staged(self, load: Load) -> Mapping[str, int]:
        with _said(self._place):
            place = self._begun(load)
            found = {} if place is None else self._client.hgetall(self._at(place, "parts"))
        return {part.decode(): int(rows) for part, rows in found.items()}

    def stage(self, load: Load, parts: Sequence[Part]) -> None:
        with _said(self._place):
            place, buckets = self._begin(load)
            there = self._client.hkeys(self._at(place, "parts"))
            new = [part for part in parts if part.id.encode() not in there]
            # The more rows at once, the fewer commands: each is about one hash.
            for piece in gathered(batch for part in new for batch in part.batches()):
                refuse_far(piece, self._place.shown, AS_TEXT)
                self._send(commands(piece, load.key, self._at(place), buckets))
            if new:
                self._client.hset(self._at(place, "parts"), mapping={part.id: part.rows for part in new})

    def _send(self, data: pa.Array) -> None:
        """Send commands, some at a time, and read their replies."""
        connection = self._client.connection_pool.get_connection()
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
            self._client.connection_pool.release(connection)

    def count(self, load: Load | None) -> int:
        with _said(self._place):
            if load is not None:
                place, buckets = self._begin(load)
                return self._rows(self._at(place), buckets)
            at, buckets = self._client.hmget(self._prefix, "at", "buckets")
            return 0 if at is None else self._rows(at.decode(), int(buckets))

    def _rows(self, at: str, buckets: int) -> int:
        return sum(sum(found) for found in self._each("HLEN", at, buckets))

    def _each(self, command: str, at: str, buckets: int, *more: Any) -> Iterator[list[Any]]:
        """The replies to a command about each hash of a generation."""
        for first in range(0, buckets, AT_ONCE):
            with self._client.pipeline(transaction=False) as pipeline:
                for bucket in range(first, min(first + AT_ONCE, buckets)):
                    pipeline.execute_command(command, f"{at}:{bucket}", *more)
                yield pipeline.execute()

    # ------------------------------------------------ the atomic step

    def publish(self, load: Load) -> None:
        with _said(self._place):
            while True:
                before, of, marks = self._client.hmget(self._prefix, "at", "buckets", "marks")
                there = _marks(marks, self._place)
                found = next((m for m in there if m.sink == load.mark.sink), None)
                if is_there(found, load, self._place.shown):
                    return
                check_beside(load, there, self._place.shown)
                refuse_gone(load, self.staged(load).values(), self._place.shown)
                place, buckets = self._begin(load)
                at = self._at(place)
                if not (load.whole or before is None):
                    at, buckets = self._merged(place, before.decode(), int(of), buckets)
                others = [] if load.whole else [m for m in there if m.sink != load.mark.sink]
                said = json.dumps([json.loads(m.dump()) for m in (told(load, there), *others)])
                keys = [self._prefix, f"{self._prefix}:stages"]
                if self._client.eval(_SWITCH, 2, *keys, before or "", at, buckets, said, place):
                    return
                # Another sink's rows were published in between: they are merged, too.

    def _merged(self, place: str, base: str, of: int, buckets: int) -> tuple[str, int]:
        """The published rows and the staged ones together, where no reader looks yet."""
        at, about = self._at(place, "m"), self._at(place, "about")
        for _ in self._each("UNLINK", at, max(of, int(self._client.hget(about, "merged") or 0))):
            pass  # of an attempt over other rows
        self._client.hset(about, "merged", of)
        for first in range(0, of, AT_ONCE):
            with self._client.pipeline(transaction=False) as pipeline:
                for bucket in range(first, min(first + AT_ONCE, of)):
                    pipeline.execute_command("COPY", f"{base}:{bucket}", f"{at}:{bucket}", "REPLACE")
                pipeline.execute()
        staged = self._at(place)
        if of == buckets:
            for first in range(0, buckets, AT_ONCE):
                with self._client.pipeline(transaction=False) as pipeline:
                    for bucket in range(first, min(first + AT_ONCE, buckets)):
                        pipeline.eval(_MERGE, 2, f"{staged}:{bucket}", f"{at}:{bucket}")
                    pipeline.execute()
            return at, of
        for bucket in range(buckets):  # the rows that are published were staged with another number meanwhile
            rows = self._client.hgetall(f"{staged}:{bucket}")
            with self._client.pipeline(transaction=False) as pipeline:
                for key, value in rows.items():
                    pipeline.hset(f"{at}:{zlib.crc32(key) % of}", key, value)
                pipeline.execute()
        return at, of

    def drop(self, load: Load, *, this: bool = False) -> None:
        with _said(self._place):
            places = self._places()  # before the pointer: what becomes live meanwhile is not among those that were
            at = self._client.hget(self._prefix, "at")
            live = "" if at is None else at.decode()
            for place, state in places.items():
                ours = place.startswith(load.places) and (this or place.partition(".")[0] != load.stage)
                # Rows that were live once are of no use to anybody, whichever sink they are from.
                if ours or state != "staging":
                    self._remove(place, live, at_once=state == "staging")

    def _remove(self, place: str, live: str, *, at_once: bool) -> None:
        """Remove what is in a place, except what is published."""
        about, held = self._at(place, "about"), live.startswith(self._at(place, ""))
        if not held:  # whoever is stopped in the middle leaves nothing that could be taken for whole
            self._client.hset(f"{self._prefix}:stages", place, "going")
        for part, number in (("r", "buckets"), ("m", "merged")):
            if (at := self._at(place, part)) != live:
                command = ("UNLINK",) if at_once or held else ("EXPIRE", GRACE)
                buckets = self._client.hget(about, number) or self._client.hget(about, "buckets") or 0
                for _ in self._each(command[0], at, int(buckets), *command[1:]):
                    pass
        self._client.delete(self._at(place, "parts"))
        if not held:
            self._client.delete(about)
            self._client.hdel(f"{self._prefix}:stages", place)

    def close(self) -> None:
        self._client.close()


def _marks(data: bytes | None, place: Place) -> list[Mark]:
    return [] if data is None else [Mark.load(json.dumps(body).encode(), place.shown) for body in json.loads(data)]


def commands(batch: pa.RecordBatch, key: Sequence[str], at: str, buckets: int) -> pa.Array:
    """HSET commands for a batch's rows, as the bytes that are sent, one for each hash that they are in."""
    keys = packed_keys([batch.column(name) for name in key])
    number = crc32s(keys) % np.uint32(buckets)
    order = np.argsort(number, kind="stable")
    number, index = number[order], pa.array(order)
    fields = joined(*_bulk(keys.take(index)), *_bulk(packed_rows(batch).take(index)))
    firsts = (
        np.flatnonzero(np.concatenate(([True], number[1:] != number[:-1]))) if len(number) else np.array([], np.int64)
    )
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


def _bulk(values: pa.Array) -> list[Any]:
    """Values as RESP's bulk strings: their length, then themselves."""
    length = pc.binary_length(values).cast(pa.string()).cast(pa.binary())
    line = pa.scalar(b"\r\n", pa.binary())
    return [pa.scalar(b"$", pa.binary()), length, line, values, line]


@dataclass(frozen=True)
class Known:
    """The generation that is read: where it is, in how many hashes, its mark, its key columns, and what makes rows of
    its values.
    """

    at: bytes
    buckets: int
    mark: Mark
    columns: Mapping[str, pa.DataType]
    unpacked: Callable[[Sequence[bytes | None]], list[dict[str, Any] | None]]


class ServerReader:
    """Looks rows up: one call of a script, which looks whether the pointer is still the same."""

    def __init__(self, place: Place, key: tuple[str, ...]) -> None:
        self._place = place
        self._key = key
        self._client = _client(place)
        self._find = self._client.register_script(_FIND)
        self._known: Known | None = None
        self._msgpack = require("msgpack", "redis", place.shown)

    def find(self, keys: Sequence[Key]) -> tuple[Mark | None, list[dict[str, Any] | None]]:
        with _said(self._place):
            while True:
                known = self._known or self._look()
                rows = self._rows(known, key_bytes(keys, known.columns, self._place.shown))
                if rows is not None:
                    return known.mark, known.unpacked(rows)
                self._known = None  # another generation was published meanwhile

    def _look(self) -> Known:
        at, buckets, marks = self._client.hmget(self._place.name, "at", "buckets", "marks")
        if at is None:
            raise BadSource(f"{self._place.shown}: nothing is published there: deliver a result there first")
        mark = _marks(marks, self._place)[0]
        if self._key and self._key != mark.key:
            raise BadJob(f"{self._place.shown}: rows are found by {', '.join(mark.key)} there, not by {self._key[0]}")
        schema = decode_schema(mark.held)
        columns = keyed(self._place.shown, mark.key, {f.name: f.type for f in schema})
        self._known = Known(at, int(buckets), mark, columns, unpacking(schema))
        return self._known

    def _rows(self, known: Known, keys: Sequence[bytes | None]) -> list[bytes | None] | None:
        """What is kept of each key; None if the rows are of another generation."""
        of = self._numbers(known, keys)
        order = sorted((place for place, key in enumerate(keys) if key is not None), key=of.__getitem__)
        out: list[bytes | None] = [None] * len(keys)
        for first in range(0, max(1, len(order)), ASKED):
            some = order[first : first + ASKED]
            asked: list[Any] = []
            for number, places in itertools.groupby(some, of.__getitem__):
                asked += number, [keys[place] for place in places]
            reply = self._find(keys=[self._place.name], args=[known.at, self._msgpack.packb(asked, use_bin_type=False)])
            if not reply or reply[0] != known.at:
                return None
            for place, row in zip(some, self._msgpack.unpackb(reply[1], raw=True), strict=True):
                out[place] = row or None
        return out

    def _numbers(self, known: Known, keys: Sequence[bytes | None]) -> list[int]:
        """The number of the hash that each key is in."""
        if len(keys) == 1:  # at once what Arrow takes a while to begin
            return [zlib.crc32(keys[0] or b"") % known.buckets]
        return [int(n) for n in (crc32s(pa.array(keys, pa.binary())) % np.uint32(known.buckets)).tolist()]

    def close(self) -> None:
        self._client.close()

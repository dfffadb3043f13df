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
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, BadSource
from gristmill.process.extras import require
from gristmill.stores.contract import (
    STAGED,
    Key,
    Load,
    Mark,
    Mode,
    Overtaken,
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
    key_bytes,
    packed_keys,
    packed_rows,
    told,
    unpacking,
)
from gristmill.stores.redishashes import AT_ONCE, Hashes, number_for
from gristmill.stores.refused import AS_TEXT, refuse_far
from gristmill.values import dataclass

_OURS = f".*:(stages$|{STAGED})"  # names of keys that are no pointers
UNKNOWN = 1_000_000  # rows that are expected where nobody can tell
GRACE = 60  # seconds that the rows of an earlier generation stay, for readers of others that do not use the script
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
# KEYS: the pointer, the places, the parts that are staged. ARGV: where it points now (or ''), where it is to, how many
# hashes there are, marks, the place whose rows were staged, the one that is published (the same, or one that has those
# rows among others), how many hashes the first has, and what names of places begin with.
_SWITCH = """
if (redis.call('HGET', KEYS[1], 'at') or '') ~= ARGV[1] then return 0 end
for n = 5, 6 do
  local state = string.match(redis.call('HGET', KEYS[2], ARGV[n]) or '', '^%a+')
  if state ~= 'staging' and state ~= 'merging' then return 0 end
end
if string.sub(ARGV[1], 1, #ARGV[8]) == ARGV[8] then
  local before = string.match(string.sub(ARGV[1], #ARGV[8] + 1), '^[^:]*')
  local number = string.match(redis.call('HGET', KEYS[2], before) or '', '^%a+ ?(%d*)')
  if number then redis.call('HSET', KEYS[2], before, 'going ' .. number) end
end
redis.call('HSET', KEYS[1], 'at', ARGV[2], 'buckets', ARGV[3], 'marks', ARGV[4])
redis.call('HSET', KEYS[2], ARGV[5], 'void ' .. ARGV[7], ARGV[6], 'live ' .. ARGV[3])
redis.call('UNLINK', KEYS[3])
return 1
"""
# KEYS: the pointer, the places. ARGV: a place, what the names of its keys begin with, its state when it was looked at,
# and another key that points there (or ''). Nothing, if it is published, or if its state has changed, or if that other
# key leads readers there, which is noted. Otherwise nobody publishes it any more: returns what it is from now on, and
# how many hashes it has.
_GOING = """
local at = redis.call('HGET', KEYS[1], 'at') or ''
local state, number = string.match(redis.call('HGET', KEYS[2], ARGV[1]) or '', '^(%a+) ?(%d*)')
if state ~= ARGV[3] or string.sub(at, 1, #ARGV[2]) == ARGV[2] then return {} end
local kept, was = ARGV[4] ~= '', {live = 1, kept = 1, going = 1}
state = kept and 'kept' or was[state] and 'going' or 'void'
redis.call('HDEL', KEYS[2], ARGV[1]) -- a server without memory refuses HSET, unless something was written before
redis.call('HSET', KEYS[2], ARGV[1], state .. ' ' .. number .. (kept and ' ' .. ARGV[4] or ''))
return kept and {} or {state, number}
"""
# KEYS: the places, the parts of one of them. ARGV: the place; parts and their rows. Notes them, unless it is going.
_STAGED = """
if string.match(redis.call('HGET', KEYS[1], ARGV[1]) or '', '^%a+') ~= 'staging' then return 0 end
for n = 2, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[n], ARGV[n + 1]) end
return 1
"""


class Redis:
    """`redis://HOST:PORT/DB#prefix`; `rediss://` for TLS, `valkey://` for a Valkey server."""

    name: ClassVar[str] = "redis"
    modes: ClassVar[tuple[Mode, ...]] = ("replace", "upsert")
    keyed: ClassVar[bool] = True
    embedded: ClassVar[bool] = False
    in_address: ClassVar[tuple[str, ...] | None] = None
    in_options: ClassVar[tuple[str, ...] | None] = None

    @staticmethod
    def open(place: Place) -> Store:
        """The rows under a prefix, on a server that answers."""
        refuse_ours(place, place.name, _OURS)
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
        try:
            client.ping()
        except TypeError as e:  # an option that it does not know
            raise BadJob(f"{place.shown}: Redis' client says: {place.words(e)}") from e
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
        self._kept: list[str] = []  # places that had to stay, as it is not known who reads them

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
            self._refuse_theirs(f"{self._prefix}:stages")
        check_beside(load, _marks(marks, self._place), self._place.shown)

    def _refuse_theirs(self, stages: str) -> None:
        """Raises BadJob for a key of somebody else where places are noted."""
        kind = self._client.type(stages)
        known = kind == b"none" or (kind == b"hash" and all(_is_ours(repr(n)[2:]) for n in self._client.hkeys(stages)))
        if not known:
            raise BadJob(
                f"{self._place.shown}: {stages!r} is a key that gristmill did not write, and deliveries note "
                "there what they stage: give another prefix"
            )

    def live(self, sink: str) -> Mark | None:
        with _said(self._place):
            return next(
                (m for m in _marks(self._client.hget(self._prefix, "marks"), self._place) if m.sink == sink), None
            )

    # ------------------------------------------------ staging

    def _at(self, place: str, part: str = "r") -> str:
        return f"{self._prefix}:{place}:{part}"

    def _places(self) -> dict[str, Noted]:
        """What is noted of each place."""
        found = self._client.hgetall(f"{self._prefix}:stages")
        told = {name.decode(): state.decode().split(" ", 2) for name, state in found.items()}
        return {name: Noted(*said) for name, said in told.items() if _is_ours(name)}

    def _begun(self, load: Load) -> There | None:
        """The place in which this generation's rows are being staged; None if there is none."""
        ours = (
            (name, noted.number)
            for name, noted in self._places().items()
            if noted.state == "staging" and noted.number and name.partition(".")[0] == load.stage
        )
        return next((self._there(name, int(number)) for name, number in sorted(ours)), None)

    def _there(self, name: str, number: int) -> There:
        return There(name, Hashes(self._client, self._at(name), number))

    def _begin(self, load: Load) -> There:
        """The same, named if there is none. An upsert has as many hashes as it will be merged to."""
        found = self._begun(load)
        if found is None:
            rows, base = load.mark.rows or UNKNOWN, None if load.whole else self._live()
            found = self._named(load, "staging", number_for(rows) if base is None else base.fitting(rows))
        return found

    def _named(self, load: Load, state: str, number: int) -> There:
        """A new place."""
        name = f"{load.stage}.{secrets.token_hex(4)}"
        self._client.hset(f"{self._prefix}:stages", name, f"{state} {number}")
        return self._there(name, number)

    def _live(self) -> Hashes | None:
        """What readers see."""
        at, number = self._client.hmget(self._prefix, "at", "buckets")
        return None if at is None else Hashes(self._client, at.decode(), int(number))

    def staged(self, load: Load) -> Mapping[str, int]:
        with _said(self._place):
            there = self._begun(load)
            found = {} if there is None else self._client.hgetall(self._at(there.name, "parts"))
        return {part.decode(): int(rows) for part, rows in found.items()}

    def stage(self, load: Load, parts: Sequence[Part]) -> None:
        with _said(self._place):
            there = self._begin(load)
            known = self._client.hkeys(self._at(there.name, "parts"))
            new = [part for part in parts if part.id.encode() not in known]
            # The more rows at once, the fewer commands: each is about one hash.
            for piece in gathered(batch for part in new for batch in part.batches()):
                refuse_far(piece, self._place.shown, AS_TEXT)
                there.hashes.put(packed_keys([piece.column(name) for name in load.key]), packed_rows(piece))
            keys = [f"{self._prefix}:stages", self._at(there.name, "parts")]
            said = [text for part in new for text in (part.id, part.rows)]
            if not self._client.eval(_STAGED, 2, *keys, there.name, *said):
                there.hashes.unlink()  # what came after others had removed it
                raise Overtaken(f"{self._place.shown}: what was being staged is not there any more: run again")

    def count(self, load: Load | None) -> int:
        with _said(self._place):
            hashes = self._live() if load is None else self._begin(load).hashes
            return 0 if hashes is None else hashes.rows()

    # ------------------------------------------------ the atomic step

    def publish(self, load: Load) -> None:
        with _said(self._place):
            while not self._is_published(load):
                pass  # another sink's rows were published in between: they are merged, too

    def _is_published(self, load: Load) -> bool:
        """Whether it is now: False, and nothing has happened, if others were quicker or have removed what is staged."""
        before, of, marks = self._client.hmget(self._prefix, "at", "buckets", "marks")
        there = _marks(marks, self._place)
        found = next((m for m in there if m.sink == load.mark.sink), None)
        if is_there(found, load, self._place.shown):
            return True
        check_beside(load, there, self._place.shown)
        refuse_gone(load, self.staged(load).values(), self._place.shown)
        made = staged = self._begin(load)
        if not (load.whole or before is None):
            made = self._merged(load, staged.hashes, Hashes(self._client, before.decode(), int(of)))
        others = [] if load.whole else [m for m in there if m.sink != load.mark.sink]
        said = json.dumps([json.loads(m.dump()) for m in (told(load, there), *others)])
        keys = [self._prefix, f"{self._prefix}:stages", self._at(staged.name, "parts")]
        to = [made.hashes.at, made.hashes.count, said, staged.name, made.name, staged.hashes.count, f"{self._prefix}:"]
        if self._client.eval(_SWITCH, 3, *keys, before or "", *to):
            return True
        if made is not staged:  # also where others have removed it while rows still came
            made.hashes.unlink()
            self._client.hdel(f"{self._prefix}:stages", made.name)
        return False

    def _merged(self, load: Load, staged: Hashes, base: Hashes) -> There:
        """The published rows and the staged ones together, in a place of this attempt alone: one that is late changes
        nothing of what another has published.
        """
        made = self._named(load, "merging", base.fitting(load.mark.rows))
        try:
            if made.hashes.count == base.count:
                made.hashes.copy(base)
            else:
                made.hashes.take(base)
            made.hashes.take(staged)
        except Exception:  # such as of a server without memory: it has what was there, once more
            with contextlib.suppress(Exception):
                self._remove(made.name, "merging")
            raise
        return made

    def drop(self, load: Load, *, this: bool = False) -> None:
        with _said(self._place):
            places = self._places()
            readers = self._readers(places)
            self._kept = [place for place, reader in readers.items() if reader is None]
            for place, noted in places.items():
                if noted.state in ("staging", "merging"):
                    # A merge is of one attempt alone.
                    other = noted.state == "merging" or place.partition(".")[0] != load.stage
                    if place.startswith(load.places) and (this or other):
                        self._remove(place, noted.state)
                # Rows that were live once are of no use to anybody else, whichever sink they are from.
                elif noted.state in ("going", "void") or readers.get(place) is not None:
                    self._remove(place, noted.state, readers.get(place) or "")

    def left(self) -> str:
        """See Leaving."""
        if not self._kept:
            return ""
        keys = ", ".join(self._at(place, "*") for place in self._kept[:3]) + ", …" * (len(self._kept) > 3)
        return (
            "rows stay there whose pointer was renamed or removed, as this user may not see all keys, one of which may "
            f"point to them: let it look (ACL SETUSER … +scan +hget %R~*), or remove them if nobody reads them ({keys})"
        )

    def _readers(self, places: Mapping[str, Noted]) -> dict[str, str | None]:
        """For each place that was live and is not what the pointer says, though no delivery has replaced it, the key
        that points there, or '': somebody has renamed the pointer, and reads by its new name what is there, or has
        removed it. All keys are looked through if a place is new among these, or its key has gone; None if that one
        may be among keys that cannot be seen, and there are rows.
        """
        at = (self._client.hget(self._prefix, "at") or b"").decode()
        found = {
            place: noted.reader
            for place, noted in places.items()
            if noted.state in ("live", "kept") and not at.startswith(self._at(place, ""))
        }
        of = {self._at(place, part).encode(): place for place in found for part in "rm"}
        known = [name for name in found.values() if name]
        held = {of[to]: name for name, to in zip(known, self._pointed(known), strict=True) if to and to in of}
        unseen = False
        if len(held) < len(found):
            looked, unseen = self._looked_for(of)
            held |= looked
        return {
            place: held.get(place, None if unseen and self._has_rows(place, places[place]) else "") for place in found
        }

    def _has_rows(self, place: str, noted: Noted) -> bool:
        """Whether a place has any, as far as that is known."""
        return not noted.number or self._there(place, int(noted.number)).hashes.rows() > 0

    def _pointed(self, names: Sequence[str | bytes]) -> list[bytes | None]:
        """Where each key points: b"" if it is no pointer, None if this user cannot see it."""
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hget(name, "at")
            found = pipeline.execute(raise_on_error=False)
        unseen = (isinstance(at, Exception) and not str(at).startswith("WRONGTYPE") for at in found)
        return [
            None if hidden else at if isinstance(at, bytes) else b"" for at, hidden in zip(found, unseen, strict=True)
        ]

    def _looked_for(self, of: Mapping[bytes, str]) -> tuple[dict[str, str], bool]:
        """The keys that point to places, among all, and whether there are some that cannot be seen."""
        redis = require("redis", "redis", self._place.shown)
        held: dict[str, str] = {}
        unseen, rows = False, re.compile(_OURS.encode(), re.DOTALL)
        names = (name for name in self._client.scan_iter(count=AT_ONCE, _type="hash") if not rows.match(name))
        try:
            while some := list(itertools.islice(names, AT_ONCE)):
                found = self._pointed(some)
                unseen = unseen or None in found
                pointers = zip(some, found, strict=True)
                held |= {of[to]: name.decode(errors="replace") for name, to in pointers if to and to in of}
        except redis.ResponseError as e:
            # Before Redis 6, there is no TYPE.
            if not (isinstance(e, redis.exceptions.NoPermissionError) or "syntax" in str(e)):
                raise
            return held, True
        return held, unseen

    def _remove(self, place: str, state: str, reader: str = "") -> None:
        """Remove what is in a place that was found in a state, except what is published, also if it became that just
        now, or what another key reads.
        """
        stages = f"{self._prefix}:stages"
        told = self._client.eval(_GOING, 2, self._prefix, stages, place, self._at(place, ""), state, reader)
        if not told:
            return
        state, number = (text.decode() for text in told)
        if not number:
            self._remove_named(place, state == "going")
        elif state == "going":
            self._there(place, int(number)).hashes.expire(GRACE)
        else:
            self._there(place, int(number)).hashes.unlink()
        self._client.delete(self._at(place, "parts"), self._at(place, "about"))
        self._client.hdel(stages, place)

    def _remove_named(self, place: str, late: bool) -> None:
        """The same of what an earlier version has left, which is found by its names alone."""
        names = self._client.scan_iter(f"{_as_pattern(self._at(place, ''))}[rm]:*", count=AT_ONCE)
        while some := list(itertools.islice(names, AT_ONCE)):
            with self._client.pipeline(transaction=False) as pipeline:
                for name in some:
                    pipeline.expire(name, GRACE) if late else pipeline.unlink(name)
                pipeline.execute()

    def close(self) -> None:
        self._client.close()


def _marks(data: bytes | None, place: Place) -> list[Mark]:
    return [] if data is None else [Mark.load(json.dumps(body).encode(), place.shown) for body in json.loads(data)]


def _is_ours(place: str) -> bool:
    return re.match(STAGED, place) is not None


def _as_pattern(name: str) -> str:
    """What is looked for by exactly this name."""
    return re.sub(r"([][*?^\\-])", r"\\\1", name)


@dataclass(frozen=True)
class Noted:
    """What is noted of a place: whether rows are being staged or merged there, are or were live, are kept for another
    key, its `reader`, or are going (void: they never were live); and how many hashes it has, which an earlier version
    did not note.
    """

    state: str
    number: str = ""
    reader: str = ""


@dataclass(frozen=True)
class There:
    """A place: its name, and the hashes that its rows are in."""

    name: str
    hashes: Hashes


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

"""Cassandra, Scylla and what else speaks CQL. A generation's rows are in partitions of about a thousand, `(at,
bucket)`, of one table; a row of another table points at the generation that is published, and is changed by a
lightweight transaction, which is the atomic step.

A row is found by its key's text: its bucket is that of `crc32(key) % buckets`, and its value is a MessagePack map
(packing.py). There is no reading of several partitions at one moment, so readers look at the pointer before and after;
rows are removed only when no pointer leads to them.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa

from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, BadSource
from gristmill.process.extras import require
from gristmill.stores.contract import (
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
    key_bytes,
    packed_keys,
    packed_rows,
    told,
    unpacking,
)
from gristmill.stores.refused import AS_TEXT, refuse_far, refuse_longer
from gristmill.values import dataclass

BUCKET = 1000  # rows a partition: of rows of some kilobytes, a few megabytes, which is what servers like
UNKNOWN = 1_000_000  # rows that are expected where nobody can tell
BATCH_ROWS, BATCH_BYTES = 100, 64 << 10  # of a statement, whose rows are all of one partition
AT_ONCE = 64  # statements under way
LONGEST = 65_535  # bytes of a key
PORT = 9042
_OPTIONS = ("username", "password", "ssl", "local_dc")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,35}")  # with what is added, names have at most 48 characters
# The rows; where the table points; the places that hold rows, or are to; what parts are staged.
_TABLES = {
    "{t}": "at text, bucket int, key blob, row blob, PRIMARY KEY ((at, bucket), key)",
    "{t}_live": "name text, at text, buckets int, marks text, PRIMARY KEY (name)",
    "{t}_places": "name text, at text, stage text, buckets int, was_live boolean, PRIMARY KEY (name, at)",
    "{t}_parts": "stage text, part text, held bigint, PRIMARY KEY (stage, part)",
}
_ALL = "all"  # the one partition of what is known of all places
_POINTER = "SELECT at, buckets, marks FROM {t}_live WHERE name = ?"
_PLACES = "SELECT at, stage, buckets, was_live FROM {t}_places WHERE name = ?"
_PLACE = f"{_PLACES} AND at = ?"
_SERIAL = (_POINTER, _PLACES, _PLACE)  # of what lightweight transactions write, which are then finished first


class Cassandra:
    """`cassandra://HOST,HOST:PORT/KEYSPACE#table`; `scylla://` is the same."""

    name: ClassVar[str] = "cassandra"
    modes: ClassVar[tuple[Mode, ...]] = ("replace", "upsert")
    keyed: ClassVar[bool] = True
    embedded: ClassVar[bool] = False
    in_address: ClassVar[tuple[str, ...] | None] = ()
    in_options: ClassVar[tuple[str, ...] | None] = _OPTIONS

    @staticmethod
    def open(place: Place) -> Store:
        """The tables of this name, in a keyspace that is there."""
        refuse_ours(place, place.name, r".*_(live|places|parts)$")
        return Tables(place, Client(place))

    @staticmethod
    def reader(place: Place, key: tuple[str, ...]) -> Reader:
        """A session of its own."""
        return TablesReader(place, key)


_: type[StoreKind] = Cassandra  # for mypy


class Client:
    """A session in a keyspace, and its prepared statements."""

    _session: Any = None

    def __init__(self, place: Place) -> None:
        self._cluster = require("cassandra.cluster", "cassandra", place.shown)
        self._errors = (require("cassandra", "cassandra", place.shown).DriverException, self._cluster.NoHostAvailable)
        self._place = place
        self._prepared: dict[str, Any] = {}
        parts = urlsplit(place.uri)
        keyspace = parts.path.strip("/")
        if not _NAME.fullmatch(keyspace) or not _NAME.fullmatch(place.name):
            raise BadJob(
                f"{place.shown}: give a keyspace and a table, as in cassandra://HOST/shop#scores (letters, digits and "
                "underscores, at most 36)"
            )
        self._keyspace, self._arguments = keyspace, self._asked(parts)
        self._connection: Any = None
        with self.said("cannot be reached"):
            self._session = self._connected()

    @property
    def session(self) -> Any:
        """The session, which is begun again after it was let go."""
        self._session = self._session or self._connected()
        return self._session

    def _connected(self) -> Any:
        self._connection = self._cluster.Cluster(**self._arguments)
        try:
            return self._connection.connect(self._keyspace)
        except BaseException:
            self._connection.shutdown()
            raise

    def _asked(self, parts: Any) -> dict[str, Any]:
        options = dict(self._place.options)
        user, password = options.get("username", parts.username), options.get("password", parts.password)
        hosts = [host.partition(":") for host in parts.netloc.rpartition("@")[2].split(",")]
        given: dict[str, Any] = {"contact_points": [host for host, _, _ in hosts]}
        given["port"] = next((int(port) for _, _, port in hosts if port), PORT)
        if user:
            auth = require("cassandra.auth", "cassandra", self._place.shown)
            given["auth_provider"] = auth.PlainTextAuthProvider(unquote(str(user)), unquote(str(password or "")))
        if options.get("ssl"):
            import ssl

            given["ssl_context"] = ssl.create_default_context()
        if "local_dc" in options:
            policies = require("cassandra.policies", "cassandra", self._place.shown)
            near = policies.DCAwareRoundRobinPolicy(local_dc=str(options["local_dc"]))
            profile = self._cluster.ExecutionProfile(load_balancing_policy=policies.TokenAwarePolicy(near))
            given["execution_profiles"] = {self._cluster.EXEC_PROFILE_DEFAULT: profile}
        return given

    @contextlib.contextmanager
    def said(self, what: str = "Cassandra says") -> Iterator[None]:
        """Errors of the driver as ours."""
        try:
            yield
        except (*self._errors, OSError) as e:
            words = self._place.words(e) if any(e.args) else type(e).__name__  # which is all that some say
            raise StoreUnavailable(f"{self._place.shown}: {what}: {words}") from e

    def bound(self, cql: str, *values: Any) -> Any:
        """A statement about the tables `{t}…`, with its values. Every statement is prepared once."""
        if cql not in self._prepared:
            levels = require("cassandra", "cassandra", self._place.shown).ConsistencyLevel
            prepared = self.session.prepare(cql.format(t=self._place.name))
            prepared.consistency_level = levels.LOCAL_SERIAL if cql in _SERIAL else levels.LOCAL_QUORUM
            prepared.serial_consistency_level = levels.LOCAL_SERIAL
            self._prepared[cql] = prepared
        return self._prepared[cql].bind(values)

    def run(self, cql: str, *values: Any) -> Any:
        """The rows that a statement gives."""
        return self.session.execute(self.bound(cql, *values))

    def runs(self, statements: Iterable[Any]) -> Iterator[Any]:
        """The rows that each of many statements gives, of which some are under way at once."""
        concurrent = require("cassandra.concurrent", "cassandra", self._place.shown)
        asked = ((statement, ()) for statement in statements)
        found = concurrent.execute_concurrent(
            self.session, asked, concurrency=AT_ONCE, raise_on_first_error=True, results_generator=True
        )
        return (rows for _, rows in found)

    def batch(self, statements: Sequence[Any]) -> Any:
        """Statements about one partition as one, which is applied as a whole."""
        query = require("cassandra.query", "cassandra", self._place.shown)
        levels = require("cassandra", "cassandra", self._place.shown).ConsistencyLevel
        batch = query.BatchStatement(query.BatchType.UNLOGGED, consistency_level=levels.LOCAL_QUORUM)
        for each in statements:
            batch.add(each)
        return batch

    def token(self, statement: Any) -> int:
        """Where a statement's partition is in the ring."""
        metadata = require("cassandra.metadata", "cassandra", self._place.shown)
        return int(metadata.Murmur3Token.from_key(statement.routing_key).value)

    def there(self) -> bool:
        """Whether the tables have been made; the one that is made last is looked for."""
        cql = "SELECT table_name FROM system_schema.tables WHERE keyspace_name = %s AND table_name = %s"
        last = list(_TABLES)[-1].format(t=self._place.name)
        return self.session.execute(cql, (self._keyspace, last.lower())).one() is not None

    def make(self) -> None:
        """Make the tables."""
        for name, columns in _TABLES.items():
            self.session.execute(f"CREATE TABLE IF NOT EXISTS {name.format(t=self._place.name)} ({columns})")

    def close(self) -> None:
        if self._session is not None:
            self._session = None
            self._prepared.clear()
            self._connection.shutdown()


class Tables:
    """The rows under one name."""

    def __init__(self, place: Place, client: Client) -> None:
        self._place, self._client = place, client
        self._made = False

    # ------------------------------------------------ before

    def check(self, load: Load) -> None:
        check_packed(load.schema, load.key, self._place.shown)
        with self._client.said():
            marks = self._pointer().marks
        check_beside(load, marks, self._place.shown)

    def live(self, sink: str) -> Mark | None:
        with self._client.said():
            pointer = self._pointer()
            return next((m for m in pointer.marks if m.sink == sink), None)

    def _pointer(self) -> Pointer:
        return _pointer(self._client, self._place) if self._there() else Pointer()

    def _there(self) -> bool:
        self._made = self._made or self._client.there()
        return self._made

    # ------------------------------------------------ staging

    def _begun(self, load: Load) -> Any:
        """The place in which this generation's rows are being staged; None if there is none. No two have one name: rows
        that are brought in the stead of replaced ones are not to go with them.
        """
        places = (p for p in self._client.run(_PLACES, _ALL) if p.stage == load.stage and not p.was_live)
        return min((p for p in places if p.at.count(".") == 1), key=lambda p: str(p.at), default=None)

    def _begin(self, load: Load) -> tuple[str, int]:
        """The place of this generation's rows, and how many partitions they are in. An upsert has as many as the rows
        that it is merged with.
        """
        if not self._there():
            self._client.make()
            self._made = True
        found = self._begun(load)
        if found is None:
            base = 0 if load.whole else self._pointer().buckets
            at = f"{load.stage}.{secrets.token_hex(4)}"
            self._place_of(load, at, base or max(1, -(-(load.mark.rows or UNKNOWN) // BUCKET)))
            found = self._begun(load)
        return str(found.at), int(found.buckets)

    def _place_of(self, load: Load, at: str, buckets: int) -> None:
        """Note that a place holds rows, or is to, before it does."""
        put = "INSERT INTO {t}_places (name, at, stage, buckets, was_live) VALUES (?, ?, ?, ?, ?) IF NOT EXISTS"
        self._client.run(put, _ALL, at, load.stage, buckets, False)

    def staged(self, load: Load) -> Mapping[str, int]:
        with self._client.said():
            if not self._there():
                return {}
            begun = self._begun(load)
            if begun is None:
                return {}
            found = self._client.run("SELECT part, held FROM {t}_parts WHERE stage = ?", begun.at)
            return {row.part: row.held for row in found}

    def stage(self, load: Load, parts: Sequence[Part]) -> None:
        there = self.staged(load)
        new = [part for part in parts if part.id not in there]
        with self._client.said():
            at, buckets = self._begin(load)
            for piece in gathered(batch for part in new for batch in part.batches()):
                refuse_far(piece, self._place.shown, AS_TEXT)
                keys = packed_keys([piece.column(name) for name in load.key])
                refuse_longer(piece, keys, load.key, LONGEST, self._place.shown)
                self._write(at, buckets, keys, packed_rows(piece))
            for part in new:
                put = "INSERT INTO {t}_parts (stage, part, held) VALUES (?, ?, ?)"
                self._client.run(put, at, part.id, part.rows)

    def _write(self, at: str, buckets: int, keys: pa.Array, rows: pa.Array) -> None:
        """Write rows, partition by partition, in the order of the partitions' tokens, so that what goes to one node
        comes together.
        """
        for _ in self._client.runs(batch for _, batch in sorted(self._batches(at, buckets, keys, rows), key=_token)):
            pass

    def _batches(self, at: str, buckets: int, keys: pa.Array, rows: pa.Array) -> Iterator[tuple[int, Any]]:
        """Statements that each write rows of one partition, with its token."""
        number = crc32s(keys) % np.uint32(buckets)
        order = np.argsort(number, kind="stable")
        put = "INSERT INTO {t} (at, bucket, key, row) VALUES (?, ?, ?, ?)"
        held, size, of, token = list[Any](), 0, -1, 0
        picked = pa.array(order)
        for bucket, key, row in zip(
            number[order].tolist(), keys.take(picked).to_pylist(), rows.take(picked).to_pylist(), strict=True
        ):
            if held and (bucket != of or len(held) >= BATCH_ROWS or size >= BATCH_BYTES):
                yield token, self._client.batch(held)
                held, size = [], 0
            held.append(self._client.bound(put, at, bucket, key, row))
            size += len(row)
            if bucket != of:
                of, token = bucket, self._client.token(held[-1])
        if held:
            yield token, self._client.batch(held)

    def count(self, load: Load | None) -> int:
        with self._client.said():
            if load is not None:
                return self._rows(*self._begin(load))
            pointer = self._pointer()
            return self._rows(pointer.at, pointer.buckets)

    def _rows(self, at: str, buckets: int) -> int:
        asked = "SELECT count(*) AS held FROM {t} WHERE at = ? AND bucket = ?"
        return sum(found.one().held for found in self._each(asked, at, buckets))

    def _each(self, cql: str, at: str, buckets: int) -> Iterator[Any]:
        """What a statement gives for each partition of a place."""
        return self._client.runs(self._client.bound(cql, at, bucket) for bucket in range(buckets))

    # ------------------------------------------------ the atomic step

    def publish(self, load: Load) -> None:
        with self._client.said():
            while True:
                before = self._pointer()
                found = next((m for m in before.marks if m.sink == load.mark.sink), None)
                if is_there(found, load, self._place.shown):
                    return
                check_beside(load, before.marks, self._place.shown)
                refuse_gone(load, self.staged(load).values(), self._place.shown)
                at, buckets = staged, of = self._begin(load)
                if not (load.whole or not before.at):
                    at, buckets = self._merged(load, before, staged, of)
                others = [] if load.whole else [m for m in before.marks if m.sink != load.mark.sink]
                if self._switched(before, at, buckets, (told(load, before.marks), *others)):
                    change = "UPDATE {t}_places SET was_live = ? WHERE name = ? AND at = ? IF EXISTS"
                    self._client.run(change, True, _ALL, at)
                    return
                # Another sink's rows were published in between: they are merged, too.

    def _switched(self, before: Pointer, at: str, buckets: int, marks: Sequence[Mark]) -> bool:
        said = json.dumps([json.loads(m.dump()) for m in marks])
        if not before.at:
            put = "INSERT INTO {t}_live (name, at, buckets, marks) VALUES (?, ?, ?, ?) IF NOT EXISTS"
            return bool(self._client.run(put, _ALL, at, buckets, said).was_applied)
        change = "UPDATE {t}_live SET at = ?, buckets = ?, marks = ? WHERE name = ? IF at = ?"
        return bool(self._client.run(change, at, buckets, said, _ALL, before.at).was_applied)

    def _merged(self, load: Load, base: Pointer, staged: str, buckets: int) -> tuple[str, int]:
        """The published rows and the staged ones together, in a place that is named by both and so begun again with the
        same rows after a crash.
        """
        at = f"{staged}.{zlib.crc32(base.at.encode()):08x}"
        self._place_of(load, at, base.buckets)
        for place, of in ((base.at, base.buckets), (staged, buckets)):
            for found in self._each("SELECT key, row FROM {t} WHERE at = ? AND bucket = ?", place, of):
                rows = list(found)
                keys = pa.array([row.key for row in rows], pa.binary())
                self._write(at, base.buckets, keys, pa.array([row.row for row in rows], pa.binary()))
        return at, base.buckets

    def drop(self, load: Load, *, this: bool = False) -> None:
        if not this:  # the pointer's row alone is compared by who publishes: it would lead to a place without rows
            return
        with self._client.said():
            if not self._there():
                return
            # Before the pointer is: what becomes live meanwhile is not among those that were.
            places = list(self._client.run(_PLACES, _ALL))
            live = self._pointer().at
            for place in places:
                ours = place.stage.startswith(load.places)
                # Rows that were live once are of no use to anybody, whichever sink they are from.
                if place.at != live and (ours or place.was_live):
                    self._remove(place)

    def _remove(self, place: Any) -> None:
        self._client.run("DELETE FROM {t}_parts WHERE stage = ?", place.at)  # before their rows, as they say of them
        for _ in self._each("DELETE FROM {t} WHERE at = ? AND bucket = ?", place.at, place.buckets):
            pass
        self._client.run("DELETE FROM {t}_places WHERE name = ? AND at = ? IF EXISTS", _ALL, place.at)

    def close(self) -> None:
        self._client.close()


@dataclass(frozen=True)
class Pointer:
    """The place that is published, if there is one, in how many partitions, and whose rows are there."""

    at: str = ""
    buckets: int = 0
    marks: tuple[Mark, ...] = ()


def _pointer(client: Client, place: Place) -> Pointer:
    found = client.run(_POINTER, _ALL).one()
    if found is None:
        return Pointer()
    marks = tuple(Mark.load(json.dumps(body).encode(), place.shown) for body in json.loads(found.marks))
    return Pointer(found.at, found.buckets, marks)


def _token(each: tuple[int, Any]) -> int:
    return each[0]


class TablesReader:
    """Looks rows up in the place that the pointer leads to before and after they are read."""

    def __init__(self, place: Place, key: tuple[str, ...]) -> None:
        self._place, self._key = place, key
        self._client = Client(place)

    def find(self, keys: Sequence[Key]) -> tuple[Mark | None, list[dict[str, Any] | None]]:
        with self._client.said():
            pointer = _pointer(self._client, self._place) if self._client.there() else Pointer()
            while True:
                if not pointer.at:
                    raise BadSource(f"{self._place.shown}: nothing is published there: deliver a result there first")
                found = self._rows(pointer, keys)
                before, pointer = pointer, _pointer(self._client, self._place)
                if before == pointer:
                    return pointer.marks[0], found

    def _rows(self, pointer: Pointer, keys: Sequence[Key]) -> list[dict[str, Any] | None]:
        mark = pointer.marks[0]
        if self._key and self._key != mark.key:
            raise BadJob(f"{self._place.shown}: rows are found by {', '.join(mark.key)} there, not by {self._key[0]}")
        schema = decode_schema(mark.held)
        columns = keyed(self._place.shown, mark.key, {f.name: f.type for f in schema})
        packed = key_bytes(keys, columns, self._place.shown)
        asked = "SELECT row FROM {t} WHERE at = ? AND bucket = ? AND key = ?"
        found = self._client.runs(
            self._client.bound(asked, pointer.at, zlib.crc32(key) % pointer.buckets, key)
            for key in packed
            if key is not None
        )
        there = iter([None if (row := rows.one()) is None else row.row for rows in found])
        return unpacking(schema)([None if key is None else next(there) for key in packed])

    def close(self) -> None:
        self._client.close()

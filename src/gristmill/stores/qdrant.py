"""Qdrant: a collection a generation, and an alias, which is the name that applications use, set to it in one step.

What a collection is, is in its own metadata: the parts that it has, the marks of its sinks, and, once another is about
to take its place, that it is replaced, or that it is going. Points have ids by their keys, so that bringing a part
twice is the same.

Setting an alias asks for nothing, but renaming one fails if it is not there, and then what follows in the same request
is not done (`update_aliases` in Qdrant's collection_meta_ops.rs). So the collection that is published has a second
alias, its turn, which whoever sets the name to another one renames first: of two who do so one is too late. So does
whoever removes a collection that might be published: those who looked at it before it was going have to look again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import pyarrow as pa

from gristmill.arrow.casts import clothed, stored
from gristmill.arrow.schemas import plain, storage
from gristmill.arrow.topython import from_plain, to_plain
from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, BadSource
from gristmill.sinks.jsonread import from_json
from gristmill.sinks.jsontext import json_lines
from gristmill.stores.contract import (
    Key,
    Load,
    Mark,
    Metric,
    Mode,
    Near,
    Part,
    Place,
    Reader,
    Row,
    Search,
    Store,
    StoreKind,
    StoreUnavailable,
    is_there,
    refuse_gone,
    refuse_ours,
)
from gristmill.stores.lookup import keyed
from gristmill.stores.packing import check_beside, check_packed, key_bytes, packed_keys, told
from gristmill.stores.qdrantcalls import (
    TURN,
    Client,
    Gone,
    about_of,
    aliases_of,
    marks_in,
    next_turn,
    published,
    setting,
    target_of,
    turn_in,
    turns,
)
from gristmill.stores.refused import AS_TEXT, refuse_endless, refuse_far
from gristmill.stores.vectors import Indexed, indexed, searched
from gristmill.values import dataclass

AT_ONCE = 256  # points a request: some megabytes of JSON, where a server takes 32
PATIENCE = 600.0  # seconds to wait until a server has indexed what was loaded
GRACE = 1.0  # seconds for which what is replaced stays, for searches that have begun
EXPANSION = 128  # candidates that a search looks at
_METRICS: dict[Metric, str] = {"cosine": "Cosine", "l2": "Euclid", "ip": "Dot"}
MERGED = "_m"  # how a collection's name ends that has rows of several sinks
GOING = "going"  # in the metadata of a collection that is not to be published any more
ATTEMPTS = 20  # deliveries of others that are quicker, one after the other, before it is given up
_FORMAT = {"_gristmill": 1}  # in a collection's metadata: a server that is too old does not keep it
T = TypeVar("T")


class Qdrant:
    """`qdrant://HOST:6333#name` (`qdrants://` by TLS), or `qdrant:///FOLDER#name` for a folder in the local mode of the
    client, which is for tests. The API key is `?api_key=`, or in `options`.
    """

    name: ClassVar[str] = "qdrant"
    modes: ClassVar[tuple[Mode, ...]] = ("replace", "upsert")
    keyed: ClassVar[bool] = True
    embedded: ClassVar[bool] = False
    in_address: ClassVar[tuple[str, ...] | None] = None
    in_options: ClassVar[tuple[str, ...] | None] = None

    @staticmethod
    def open(place: Place) -> Store:
        """The collections, over a connection that is made now."""
        store = Collections(place)
        refuse_ours(place, place.name)
        store.names()
        return store

    @staticmethod
    def reader(place: Place, key: tuple[str, ...]) -> Reader:
        """One client, which threads share."""
        return ServerReader(place, key)


_: type[StoreKind] = Qdrant  # for mypy


# ---------------------------------------------------------------- delivering


class Collections:
    """An alias, and the collections of its generations, as a store."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._client = Client(place)

    def names(self) -> list[str]:
        """All collections."""
        return [found.name for found in self._client.call("get_collections").collections]

    def check(self, load: Load) -> None:
        shown = self._place.shown
        about = self._vectors(load)
        check_packed(load.schema, load.key, shown)
        for field in load.schema:
            if pa.types.is_nested(field.type) and "decimal" in str(field.type):
                raise BadJob(
                    f"{shown}: column {field.name!r} is {field.type}, and Qdrant has no decimals in lists and structs: "
                    "cast them to text in a step, or drop it (drop=)"
                )
        kind = load.schema.field(about.column).type
        if storage(kind).value_type == pa.float64():
            raise BadJob(
                f"{shown}: column {about.column!r} is {kind}, and Qdrant has vectors of float32: cast it in a step"
            )
        if load.target in self.names():
            raise BadJob(
                f"{shown}: {load.target!r} is a collection, and the name has to be an alias, which is set to a new "
                "collection by each delivery: give another name"
            )
        config = None if load.whole else published(self._client, load.target)[1]
        if config is not None:
            check_beside(load, marks_in(config.metadata or {}, shown), shown, texts=True)
            found = config.params.vectors
            own = {name: (vector.size, vector.distance.value) for name, vector in found.items()}
            if own != {about.column: (about.width, _METRICS[about.metric])}:
                told = ", ".join(f"{name}: {size} numbers, {distance}" for name, (size, distance) in own.items())
                raise BadJob(
                    f"{shown}: has other vectors ({told}): replace them (mode='replace'), or give another name"
                )

    def _vectors(self, load: Load) -> Indexed:
        return indexed(load, self._place.shown, ("hnsw",), ("metric", "connectivity", "expansion_add"))

    def live(self, sink: str) -> Mark | None:
        return next((mark for mark in self._live()[1] if mark.sink == sink), None)

    def _live(self) -> tuple[str | None, list[Mark]]:
        """The collection that is published, and its marks."""
        there, config = published(self._client, self._place.name)
        return there, [] if there is None else marks_in(config.metadata or {}, self._place.shown)

    # ------------------------------------------------ staging

    def _begun(self, load: Load) -> tuple[str | None, dict[str, Any]]:
        """The collection in which this generation is being staged, and its metadata. One that was published is none,
        and no other has its name, so that whoever removes it once it is replaced removes nothing else.
        """
        live = target_of(self._client, load.target)
        for name in sorted(self.names()):
            if name.startswith(f"{load.stage}_") and not name.endswith(MERGED) and name != live:
                with contextlib.suppress(Gone):
                    about = about_of(self._client, name)
                    if "replaced" not in about and GOING not in about:
                        return name, about
        return None, {}

    def _begin(self, load: Load) -> tuple[str, dict[str, Any]]:
        """The same, made if there is none."""
        name, about = self._begun(load)
        if name is None:
            name = f"{load.stage}_{secrets.token_hex(4)}"
            self._create(load, name)
        return name, about

    def staged(self, load: Load) -> Mapping[str, int]:
        return dict(self._begun(load)[1].get("parts", {}))

    def stage(self, load: Load, parts: Sequence[Part]) -> None:
        name, about = self._begin(load)
        there = dict(about.get("parts", {}))
        for part in parts:
            if part.id not in there:
                for batch in part.batches():
                    self._bring(load, name, batch)
                there[part.id] = part.rows
        self._client.call("update_collection", name, metadata={"parts": there})

    def _create(self, load: Load, name: str) -> None:
        from qdrant_client import models

        about = self._vectors(load)
        given = {"m": about.options.get("connectivity"), "ef_construct": about.options.get("expansion_add")}
        params = models.VectorParams(
            size=about.width,
            distance=models.Distance(_METRICS[about.metric]),
            hnsw_config=models.HnswConfigDiff(**{n: v for n, v in given.items() if v is not None}),
        )
        said = {**_FORMAT, "target": load.target, "column": about.column}
        self._client.call("create_collection", name, vectors_config={about.column: params}, metadata=said)
        if "_gristmill" not in about_of(self._client, name):
            raise StoreUnavailable(
                f"{self._place.shown}: the server keeps no metadata of collections: Qdrant 1.16 does"
            )

    def _bring(self, load: Load, name: str, batch: pa.RecordBatch) -> None:
        from qdrant_client import models

        about = self._vectors(load)
        values, valid = refuse_endless(batch, about.column, self._place.shown)
        refuse_far(batch, self._place.shown, AS_TEXT)
        rest = _texts(pa.Table.from_batches([batch]).drop_columns([about.column]))
        payloads = [json.loads(line) for piece in json_lines(rest) for line in bytes(piece).splitlines()]
        vectors = [{about.column: v} if there else {} for v, there in zip(values.tolist(), valid.tolist(), strict=True)]
        made = ids(packed_keys([batch.column(name) for name in load.key]).to_pylist(), _integers(load.schema, load.key))
        points = [
            models.PointStruct(id=i, vector=vector, payload=payload)
            for i, vector, payload in zip(made, vectors, payloads, strict=True)
        ]
        self._put(name, points)

    def _put(self, name: str, points: Sequence[Any]) -> None:
        for first in range(0, len(points), AT_ONCE):
            some = list(points[first : first + AT_ONCE])
            self._client.call("upsert", name, some, wait=True)

    def count(self, load: Load | None) -> int:
        name = self._place.name if load is None else self._begun(load)[0]
        if name is None:
            return 0
        try:
            return int(self._client.call("count", name, exact=True).count)
        except Gone:
            return 0

    # ------------------------------------------------ the atomic step

    def publish(self, load: Load) -> None:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(Gone):  # what was published is replaced, and removed: there is another
                if self._is_published(load):
                    return
        raise StoreUnavailable(
            f"{self._place.shown}: others have delivered there {ATTEMPTS} times while this was to be: run again"
        )

    def _is_published(self, load: Load) -> bool:
        """Whether it is now: False, and nothing has happened, if another one was quicker."""
        before, there = self._live()
        found = next((mark for mark in there if mark.sink == load.mark.sink), None)
        if is_there(found, load, self._place.shown):
            return True
        refuse_gone(load, self.staged(load).values(), self._place.shown)
        staged = self._begin(load)[0]
        turn = self._turn(load, before, staged)
        if turn is None:
            return False
        at = staged if load.whole or before is None else self._merged(load, staged, before)
        others = [] if load.whole else [m for m in there if m.sink != load.mark.sink]
        said = json.dumps([json.loads(mark.dump()) for mark in (told(load, there), *others)])
        self._client.call("update_collection", at, metadata={"marks": said})
        self._indexed(at)
        if GOING in about_of(self._client, at):  # after its turn was looked at: see `_goes`
            return False
        if before is not None:
            self._client.call("update_collection", before, metadata={"replaced": at})
        if done := self._switched(load, turn, at):
            return done
        if at != staged:
            self._client.call("delete_collection", at)
        return False

    def _turn(self, load: Load, before: str | None, staged: str) -> str | None:
        """The alias that is renamed by who takes the place of a collection; None if that is not published any more.
        What an earlier version published has none yet, and the first result of all takes the place of none.
        """
        there = aliases_of(self._client)
        if there.get(load.target) != before:
            return None
        if (found := turn_in(there, load.target, before)) is not None:
            return found
        turn = turns(load.target, before)
        self._client.call("update_collection_aliases", setting(turn, before or staged))
        if target_of(self._client, load.target) == before:
            return turn
        self._client.call("update_collection_aliases", setting(turn, before or staged)[:1])
        return None

    def _switched(self, load: Load, turn: str, at: str) -> bool:
        """The step. False if another one has taken its turn."""
        return self._renamed(turn, f"{at}{TURN}", *setting(f"{at}{TURN}", at), *setting(load.target, at))

    def _renamed(self, alias: str, to: str, *then: Any) -> bool:
        """Rename an alias, and do what follows. False if there is none of that name: then nothing is done."""
        from qdrant_client import models

        renamed = models.RenameAlias(old_alias_name=alias, new_alias_name=to)
        try:
            self._client.call("update_collection_aliases", [models.RenameAliasOperation(rename_alias=renamed), *then])
        except Gone:
            return False
        return True

    def _merged(self, load: Load, staged: str, before: str) -> str:
        """The published points and the staged ones together, in a collection of their own."""
        self.check(load)  # what is there may be of others by now
        name = f"{staged}_{secrets.token_hex(4)}{MERGED}"
        self._create(load, name)
        try:
            for source in (before, staged):
                for points in self._points(source):
                    self._put(name, points)
        except Exception:  # such as of a server whose disk is full
            with contextlib.suppress(Exception):
                self._client.call("delete_collection", name)
            raise
        return name

    def _points(self, name: str) -> Iterator[list[Any]]:
        from qdrant_client import models

        at: Any = None
        while True:
            said = {"limit": AT_ONCE, "offset": at, "with_payload": True, "with_vectors": True}
            found, at = self._client.call("scroll", name, **said)
            yield [models.PointStruct(id=p.id, vector=p.vector or {}, payload=p.payload) for p in found]
            if at is None:
                return

    def _indexed(self, name: str) -> None:
        """Wait until what was loaded is indexed; a search finds it before, slowly."""
        until = time.monotonic() + PATIENCE
        while self._client.call("get_collection", name).status == "yellow" and time.monotonic() < until:
            time.sleep(0.2)

    def drop(self, load: Load, *, this: bool = False) -> None:
        for name in self.names():
            if not name.startswith("gm_") or name == target_of(self._client, load.target):
                continue
            try:
                about = about_of(self._client, name)
            except Gone:  # others remove what is replaced, too
                continue
            if about.get("target") != load.target:
                continue
            other = name.endswith(MERGED) or not name.startswith(load.stage)  # a merge is of one attempt alone
            ours = name.startswith(load.places) and (this or other)
            if "replaced" in about and self._client.remote:
                time.sleep(GRACE)
            if "replaced" in about or (ours and self._goes(load, name)):
                self._client.call("delete_collection", name)

    def _goes(self, load: Load, name: str) -> bool:
        """Whether a collection that was never published never is, from now on. False if it became that just now. Who
        looked at it before it said that it is going has a turn that is none any more; who looks now sees that.
        """
        try:
            self._client.call("update_collection", name, metadata={GOING: True})
        except Gone:
            return False
        while True:
            there = aliases_of(self._client)
            live = there.get(load.target)
            if live == name:
                return False
            turn = turn_in(there, load.target, live)
            if turn is None or self._renamed(turn, next_turn(turn)):
                return True

    def close(self) -> None:
        self._client.close()


def _texts(rows: pa.Table) -> pa.Table:
    """Decimals as texts: JSON's numbers would be read as floats."""
    for at, field in enumerate(rows.schema):
        if pa.types.is_decimal(storage(field.type)):
            rows = rows.set_column(at, field.name, stored(rows.column(at)).cast(pa.string()))
    return rows


def _integers(schema: pa.Schema, key: Sequence[str]) -> bool:
    return len(key) == 1 and bool(pa.types.is_integer(schema.field(key[0]).type))


def ids(keys: Sequence[bytes], integers: bool) -> list[Any]:
    """The points' ids: a key that is a natural number itself, any other a UUID by its hash."""
    return [
        int(key) if integers and not key.startswith(b"-") else str(uuid.UUID(bytes=hashlib.sha256(key).digest()[:16]))
        for key in keys
    ]


# ---------------------------------------------------------------- looking up


@dataclass(frozen=True)
class Known:
    """The collection that is read: its name, its mark and schema, its key columns, and the vectors that it has."""

    name: str
    mark: Mark
    schema: pa.Schema
    columns: Mapping[str, pa.DataType]
    vectors: Mapping[str, Any]

    def row(self, values: Mapping[str, Any], vector: Any) -> Row:
        """A point as the row that was delivered."""
        made = {}
        for field in self.schema:
            if field.name in self.vectors:
                found = (vector or {}).get(field.name)
                made[field.name] = None if found is None else pa.array(found, pa.float32()).to_pylist()
            elif field.name in values:
                made[field.name] = _restored(values[field.name], field.type)
        return {**made, **{name: value for name, value in values.items() if name not in made}}


class ServerReader:
    """Looks points up in the collection that the alias is set to; it is looked at before each answer."""

    def __init__(self, place: Place, key: tuple[str, ...]) -> None:
        self._place = place
        self._key = key
        self._client = Client(place)
        self._known: Known | None = None

    def _reading(self, what: Callable[[Known], T]) -> T:
        """An answer of one collection: if that was replaced and removed meanwhile, of the next one."""
        while True:
            known = self._now()
            try:
                return what(known)
            except Gone:
                self._known = None

    def _now(self) -> Known:
        there = target_of(self._client, self._place.name)
        if there is None:
            raise BadSource(f"{self._place.shown}: nothing is published there: deliver a result there first")
        known = self._known
        if known is None or known.name != there:
            try:
                about = self._client.call("get_collection", there)
            except Gone:
                return self._now()
            known = self._known = self._read(there, about.config)
        return known

    def _read(self, name: str, config: Any) -> Known:
        marks = marks_in(config.metadata or {}, self._place.shown)
        if not marks:
            raise BadJob(f"{self._place.shown}: is an alias of a collection that gristmill did not write: {name}")
        mark = marks[0]
        if self._key and self._key != mark.key:
            raise BadJob(f"{self._place.shown}: rows are found by {', '.join(mark.key)} there, not by {self._key[0]}")
        schema = decode_schema(mark.held)
        columns = keyed(self._place.shown, mark.key, {f.name: f.type for f in schema})
        return Known(name, mark, schema, columns, config.params.vectors)

    def find(self, keys: Sequence[Key]) -> tuple[Mark | None, list[Row | None]]:
        return self._reading(lambda known: (known.mark, self._found(known, keys)))

    def _found(self, known: Known, keys: Sequence[Key]) -> list[Row | None]:
        if not keys:
            return []
        packed = key_bytes(keys, known.columns, self._place.shown)
        integers = _integers(pa.schema(list(known.columns.items())), list(known.columns))
        wanted = ids([key for key in packed if key is not None], integers)
        found: dict[Any, Row] = {}
        for first in range(0, len(wanted), AT_ONCE):
            some = wanted[first : first + AT_ONCE]
            points = self._client.call("retrieve", known.name, some, with_payload=True, with_vectors=True)
            found.update((p.id, known.row(p.payload or {}, p.vector)) for p in points)
        at = iter(wanted)
        return [None if key is None else found.get(next(at)) for key in packed]

    def nearest(self, search: Search) -> Near:
        return self._reading(lambda known: self._nearest(known, search))

    def _nearest(self, known: Known, search: Search) -> Near:
        from qdrant_client import models

        shown = self._place.shown
        column = searched({n: v.size for n, v in known.vectors.items()}, search, shown)
        metric = next(m for m, name in _METRICS.items() if name == known.vectors[column].distance.value)
        if search.metric not in (None, metric):
            raise BadJob(f"{shown}: is searched by {metric}, and {search.metric} is asked for: leave metric out")
        params = models.SearchParams(hnsw_ef=max(EXPANSION, 2 * search.k)) if self._client.remote else None
        said = {"using": column, "limit": search.k, "with_payload": True, "with_vector": True, "params": params}
        asked = [models.QueryRequest(query=vector, **said) for vector in search.vectors.tolist()]
        found = [one.points for one in self._client.call("query_batch_points", known.name, asked)]
        rows = [[known.row(p.payload or {}, p.vector) for p in one] for one in found]
        return Near(known.mark, metric, rows, [[_distance(p.score, metric) for p in one] for one in found])

    def close(self) -> None:
        self._client.close()


def _distance(score: float, metric: Metric) -> float:
    """Qdrant's scores are the distance, the cosine, and the inner product."""
    return score if metric == "l2" else 1 - score if metric == "cosine" else -score


def _restored(value: Any, kind: pa.DataType) -> Any:
    """A value of a payload as it was delivered."""
    if value is None:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        held = from_plain([_restored(value, kind.storage_type)], kind.storage_type)
        return to_plain(clothed(held, kind))[0]
    t, kind = pa.types, plain(kind)
    if any(f(kind) for f in (t.is_string, t.is_large_string, t.is_integer, t.is_boolean, t.is_null)):
        return value
    if t.is_fixed_size_binary(kind):
        kind = pa.binary()  # of any length, as an earlier delivery may have had them
    if t.is_decimal(kind):
        return to_plain(pa.array([value], pa.string()).cast(kind))[0]
    return to_plain(from_json(pa.array([json.dumps(value)], pa.string()), kind))[0]

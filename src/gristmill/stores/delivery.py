"""Bringing a published result to a store: what is to be brought, in which steps, and the receipt in the end. Nothing
here is scored; every step may be repeated, in this process or another, until the store's mark is that of the result.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from gristmill.arrow.keys import positive_zeros
from gristmill.commit.documents import Delivered, Live
from gristmill.commit.generation import encode_schema, generations
from gristmill.commit.publication import Publication
from gristmill.errors import BadJob, BadSource, CorruptStore, RunFailed, SinkBusy, did_you_mean
from gristmill.job.delivery import STORES, Delivery
from gristmill.job.secret import reveal
from gristmill.result.reading import kept
from gristmill.sinks.formats import sink_format
from gristmill.stores.contract import Load, Mark, Overtaken, Part, Store, as_asked, later
from gristmill.stores.difference import before, changed
from gristmill.stores.doubts import beside_unmarked, doubt, refuse_doubtful, refuse_kept, refuse_mixed, untold
from gristmill.stores.fileerrors import saying, unread
from gristmill.stores.homes import refuse_lost
from gristmill.stores.newest import distinct, newest
from gristmill.stores.receipts import path_of, receipt_at
from gristmill.stores.results import Result, check_part, identity, lacking

# Of small parts that are brought together, as a transaction takes a while whatever is in it: rows, and bytes of files.
GROUP_ROWS, GROUP_BYTES = 1_000_000, 256 << 20
BATCH_ROWS = 65_536  # rows of a part that are held in memory together, if they are small
READ_AHEAD = 2  # batches
ATTEMPTS = 3  # deliveries that others come before in their last step, before it is given up
Step = Literal["looking", "loading", "switching"]
Watch = Callable[[Step, int, int], None]
"""Told how far a delivery is: it looks at keys and at what is there, loads rows where no reader sees them, and makes
them visible; how many rows are loaded, and of how many (0: that is not known yet).
"""
_UNKNOWN = "which rows there are this sink's cannot be told, as the claim of its first generation is lost"
_UNKNOWN_WAYS = "restore _gristmill/generations/0001.json, or deliver to another place, or with mode replace"


def opened(delivery: Delivery) -> Store:
    """The store of a delivery. Raises BadJob, MissingExtra, StoreUnavailable."""
    place = delivery.place
    return STORES.get(place.store).open(place)


def files_of(delivery: Delivery) -> tuple[str, str] | None:
    """Where on this machine a delivery writes, and there the path of a file as it makes them ("" if it is one file);
    None for a store elsewhere.
    """
    place, kind = delivery.place, STORES.get(delivery.place.store)
    if hasattr(kind, "files"):
        found: tuple[str, str] | None = kind.files(place)
        return found
    return (place.path, "") if kind.embedded else None


def load_of(delivery: Delivery, result: Result, rows: int = 0) -> Load:
    """What a delivery of this result brings. Raises CorruptStore if it is to be appended, and might be there already
    under a name that is lost.
    """
    if delivery.mode == "append" and not result.sink.known:
        raise CorruptStore(f"{delivery.shown}: {_UNKNOWN}, and rows are not appended twice: {_UNKNOWN_WAYS}")
    schema = result.schema
    mark = Mark(
        sink=result.sink.name,
        generation=result.generation.number,
        name=result.generation.name,
        generations=result.members,
        mode=delivery.mode,
        key=delivery.key,
        rows=rows,
        schema=encode_schema(schema.remove_metadata()),
        at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        names=result.names(),
        delete=delivery.delete,
        index=_digest(delivery.index),
        home=result.generation.root if delivery.is_sink else "",
    )
    said = {name: getattr(delivery, name) for name in ("mode", "key", "index", "evolve", "delete")}
    kind = STORES.get(delivery.place.store)
    target = kind.target(delivery.place) if hasattr(kind, "target") else delivery.place.name
    return Load(target, mark, schema, **said)


def _digest(index: Mapping[str, Any]) -> str:
    """What marks note of the indices that are asked for; nothing of none."""
    told = json.dumps(reveal(index), sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:16] if index else ""


def check(delivery: Delivery, result: Result, store: Store, take_over: bool = False) -> None:
    """Raises BadJob for a result that does not fit the store, as far as its schema tells, and for one that is to be
    appended to rows of which some may be its own; with `take_over` also beside those of a sink whose folder is lost.
    """
    form = result.about.sink_format
    if not sink_format(form).tables:
        raise BadJob(
            f"deliver {delivery.shown}: the sink's format is {form}, which has no rows to deliver: use parquet"
        )
    load = load_of(delivery, result)
    if not take_over:
        refuse_lost(delivery, result.generation.root, result.generation.files, store)
    if result.about.unseen:  # what its columns are is known once there are rows
        return
    names = load.schema.names
    for option, columns in (("key", load.key), ("index", tuple(load.index))):
        if unknown := next((name for name in columns if name not in names), None):
            raise BadJob(
                f"deliver {delivery.shown}: {option} names column {unknown!r}, which the result does not have: "
                f"it has {', '.join(names)}{did_you_mean(unknown, names)}"
            )
    store.check(load)
    if load.mode == "append":
        found = store.live(load.mark.sink)
        refuse_doubtful(delivery, result, store, found)
        refuse_mixed(delivery, result, found)
        refuse_kept(delivery, result, found)


class Loading:
    """A delivery of one result, in progress. `stage` may be called as parts are committed, `finish` once after the
    result is published. With `take_over` it takes the place of a later result of a copy of the sink.
    """

    def __init__(
        self,
        delivery: Delivery,
        result: Result,
        store: Store,
        *,
        expected: int = 0,
        watch: Watch | None = None,
        take_over: bool = False,
    ) -> None:
        self._delivery, self._result, self._takes_over = delivery, result, take_over
        self._store = saying(store, delivery.place)
        self._begun = time.monotonic()
        self._watch = watch
        self._loaded: dict[str, int] = {}  # of parts, the rows that were read for the store
        self._wanted = 0
        self._load = load_of(delivery, result, expected)
        self._staged: dict[str, int] | None = None
        self._newest: Mapping[str, np.ndarray] = {}  # of files some of whose rows are not delivered, those that are
        self._look()

    def _look(self) -> Mark | None:
        """What the store has of this sink, by which it is decided what to bring: all, where that is doubtful. Raises
        BadJob for rows that are to be appended then.
        """
        there = self._store.live(self._load.mark.sink)
        if self._load.mode == "append":
            refuse_doubtful(self._delivery, self._result, self._store, there)
        self._before = found = None if there is not None and there.doubtful else there
        self._shared = there is None or self._result.shares(there)
        self._updates = before(self._result.generation, self._load, found) if self._shared else None
        self._load = replace(self._load, found=there)
        return found

    def wanted(self, live: Sequence[Live]) -> list[Live]:
        """The files whose rows are to be brought: all of them, or those of generations that were not delivered yet."""
        before = self._before
        known = () if before is None or self._all(before) else before.generations
        return [f for f in live if f.role == "rows" and f.generation not in known]

    def _all(self, before: Mark) -> bool:
        """Whether the whole result is to be brought, though something of this sink was before, or of a copy of it: that
        may have other rows under the numbers of the same generations.
        """
        return self._load.whole or before.name == self._load.mark.name or not self._shared

    def _total(self, live: Sequence[Live], rows: int) -> int | None:
        """How many rows of this sink there are at least once these are appended; None if that is not known."""
        before = self._before
        if before is None or self._load.mode == "replace":
            return rows
        if self._load.mode == "upsert" or self._all(before):
            return rows if self._load.mode == "append" else None
        there = before.total
        if there is None and before.mode == "upsert":
            files = [f for f in live if f.role == "rows" and f.generation in before.generations]
            there = distinct(self._result.rows_of(files), before.key)
        return None if there is None else there + rows

    def early(self, live: Sequence[Live]) -> list[Live]:
        """Those of the files that can be brought before all of the result are known: by key, later ones may have rows
        that take the place of theirs.
        """
        if self._updates is not None:  # which rows are others is known in the end
            return []
        return [f for f in live if not self._load.key or f.generation == self._load.mark.generation]

    def stage(self, live: Sequence[Live]) -> None:
        """Bring committed files that are not in the staging place yet."""
        if self._staged is None:
            self._store.drop(self._load)  # what was interrupted may be what leaves no room
            self._staged = dict(self._store.staged(self._load))
        group: list[Part] = []
        rows = size = 0
        for f, part in self._parts([f for f in self.wanted(live) if self._id(f) not in self._staged]):
            if group and (rows + part.rows > GROUP_ROWS or size + f.bytes > GROUP_BYTES):
                self._bring(group)
                group, rows, size = [], 0, 0
            group.append(part)
            rows, size = rows + part.rows, size + f.bytes
        self._bring(group)

    def _bring(self, parts: Sequence[Part]) -> None:
        assert self._staged is not None
        if parts:
            self._store.stage(self._load, parts)
            self._staged.update((part.id, part.rows) for part in parts)
            self._read({part.id: part.rows for part in parts})

    def _read(self, rows: Mapping[str, int]) -> None:
        """So many rows of these parts are on their way to the store."""
        self._loaded.update(rows)
        self._say("loading")

    def _say(self, step: Step) -> None:
        if self._watch is not None:
            self._watch(step, min(sum(self._loaded.values()), self._wanted), self._wanted)

    def rest(self) -> None:
        """Let go of what the store holds, until there is more to bring."""
        self._store.close()

    def finish(
        self, live: Sequence[Live], anew: bool = False, warn: Callable[[str], None] = lambda text: None
    ) -> Delivered:
        """Deliver the published result, whatever is left of that, and return the receipt. With `anew` it is brought
        once more if rows of it are missing, and otherwise `warn` is told. Raises BadJob for keys that repeat, SinkBusy
        if a later generation is live, Overtaken if another became that meanwhile, StoreUnavailable, RunFailed if rows
        are missing in the store.
        """
        self._say("looking")
        found, load = self._look(), self._load
        if load.found is not None and load.found.doubtful:  # of a later result, it says that there has been one
            self._refuse_later(load.found, warn)
        if found is not None and found.name == load.mark.name and as_asked(found, load):
            self._tell_of_indices(found, warn)
            if not anew and (wrong := lacking(self._store, found, live, self._result, self._delivery.shown)):
                way = "" if found.mode == "append" else "; gristmill deliver brings them again"
                warn(f"{wrong}: others have taken rows out{way}")
            if not (anew and self._lacks(found, live)):
                self._clear(load, warn)
                return self._receipt(found, live, warn, new=False)
            load = self._load = load.after(found)
        elif found is not None:
            self._refuse_later(found, warn)
            if self._same(found, live):
                self._clear(load, warn)
                return self._receipt(found, live, warn, new=False)
        elif self._result.about.unseen and not any(f.rows for f in live if f.role == "rows"):
            warn(f"{self._delivery.shown}: nothing is made there for a result without rows, whose columns are unknown")
            return self._receipt(load.mark, live, warn)
        files = self.wanted(live)
        check(self._delivery, self._result, self._store, self._takes_over)
        if load.key:
            self._newest = _chosen(self._delivery, self._result, files, live)
        if self._updates is not None and not load.mark.again:
            self._newest = self._changed(files, self._updates, warn)
        rows = sum(map(self._rows, files))
        older = 0 if self._updates is not None else sum(f.rows for f in files) - rows
        load = self._load = load.of(rows, older, self._total(live, rows), beside_unmarked(load, self._store))
        self._only(files)
        self._wanted = rows
        self._read(dict(self._staged or {}))
        self.stage(live)
        if (count := self._store.count(load)) != load.mark.rows:
            self._store.drop(load, this=True)
            raise RunFailed(
                f"{self._delivery.shown}: {count:,} rows are staged there, but {load.mark.rows:,} were delivered: what "
                "was staged is removed, and the next run, or gristmill deliver, loads it again"
            )
        self._say("switching")
        self._store.publish(load)
        self._clear(load, warn)
        return self._receipt(load.mark, live, warn)

    def _clear(self, load: Load, warn: Callable[[str], None]) -> None:
        """Remove what is staged, and what was replaced; `warn` is told of what stays."""
        self._store.drop(load, this=True)
        if hasattr(self._store, "left") and (why := self._store.left()):
            warn(f"{self._delivery.shown}: {why}")

    def _refuse_later(self, found: Mark, warn: Callable[[str], None]) -> None:
        """Raises SinkBusy if what is there is later than this result, unless it is of a copy of the sink and to be
        taken over. If it is of a copy, `warn` is told.
        """
        own, shown = self._load.mark, self._delivery.shown
        if self._shared:
            if found.generation > own.generation:
                raise SinkBusy(later(found, own, shown))
            return
        if own.mode == "append":
            refuse_mixed(self._delivery, self._result, found)
        copy = f"a copy of this sink that went its own way ({found.name}; one of the two was restored from a backup?)"
        if found.generation > own.generation and not self._takes_over:
            way = "gristmill deliver --take-over (gm.deliver with take_over=True)"
            brings = "appends" if own.mode == "append" else "brings"
            raise SinkBusy(
                f"{shown}: holds generation {found.generation} of this sink already, and this is {own.generation}: it "
                f"is of {copy}, and nothing was changed: {way} {brings} this result nevertheless, and so does a run "
                "that scores it anew (--restart)"
            )
        beside = "" if self._load.whole else "; rows that only the copy had stay there"
        warn(f"{shown}: held generation {found.generation} of {copy}: all of this result is brought{beside}")

    def _tell_of_indices(self, found: Mark, warn: Callable[[str], None]) -> None:
        if found.index != self._load.mark.index:
            warn(
                f"{self._delivery.shown}: its rows are there already, and not appended again, so that no index is "
                "built now: those of `index` are with the next rows that are appended"
            )

    def _same(self, found: Mark, live: Sequence[Live]) -> bool:
        """Whether an earlier result is there whose rows are those of this one, such as the one before a retry that
        mended nothing: of files that are never changed, as many rows as were delivered.
        """
        files, load = [f for f in live if f.role == "rows" and f.rows], self._load
        asked = (load.mode, load.key, load.mark.index)
        if load.mode != "replace" or (found.mode, found.key, found.index) != asked:
            return False
        if not self._shared or not {f.generation for f in files} <= set(found.generations):
            return False
        if sum(f.rows for f in files) != found.rows + found.older or found.schema != load.mark.schema:
            return False
        return lacking(self._store, found, live, self._result, self._delivery.shown) is None

    def _lacks(self, found: Mark, live: Sequence[Live]) -> bool:
        """Whether rows of this result are missing in the store. Raises BadJob for a mode in which they cannot be
        brought again.
        """
        wrong = lacking(self._store, found, live, self._result, self._delivery.shown)
        if wrong is not None and found.mode == "append":
            raise BadJob(
                f"{wrong}: which ones cannot be told, and appending all of them would repeat the others: deliver to "
                "another place, or with mode replace"
            )
        return wrong is not None

    def _only(self, files: Sequence[Live]) -> None:
        """Leave nothing of other generations, and begin the staging place anew if it has parts that are not of this
        result: a shard was scored again.
        """
        self._store.drop(self._load)
        staged = dict(self._store.staged(self._load))
        if not staged.keys() <= {self._id(f) for f in files}:
            self._store.drop(self._load, this=True)
            staged = {}
        self._staged = staged

    def _parts(self, files: Sequence[Live]) -> Iterator[tuple[Live, Part]]:
        root, layer = self._result.generation.root, self._result.generation.files
        for f, path in zip(files, kept(root, files, layer), strict=True):
            if (rows := self._rows(f)) or not f.rows:
                check_part(root, layer, f, path)
                yield f, Part(self._id(f), rows, path, self._reading(f))

    def _rows(self, f: Live) -> int:
        """How many rows of a file are delivered."""
        return int(self._newest[f.name].sum()) if f.name in self._newest else f.rows

    def _id(self, f: Live) -> str:
        """What a part is called: other rows of the same file are another part."""
        whole, some = f"{f.name}@{f.sha256[:16]}", self._newest.get(f.name)
        return whole if some is None else f"{whole}-{hashlib.sha256(np.packbits(some).tobytes()).hexdigest()[:16]}"

    def _reading(self, f: Live) -> Callable[[], Iterator[pa.RecordBatch]]:
        some = self._newest.get(f.name)

        def batches() -> Iterator[pa.RecordBatch]:
            schema, at, read = self._load.schema, 0, 0
            scanner = self._result.rows_of([f]).scanner(batch_size=BATCH_ROWS, batch_readahead=READ_AHEAD)
            for batch in unread(scanner.to_batches()):
                mask = None if some is None else some[at : at + batch.num_rows]
                at += batch.num_rows
                batch = batch if mask is None else batch.filter(pa.array(mask))
                if batch.num_rows:
                    batch = batch if batch.schema.equals(schema) else batch.cast(schema)
                    read += batch.num_rows
                    self._read({self._id(f): read})
                    yield _with_zeros(batch, self._load.key)

        return batches

    def _changed(
        self, files: Sequence[Live], base: Publication, warn: Callable[[str], None]
    ) -> Mapping[str, np.ndarray]:
        """Of the rows of an update those that are not in the result before, if the store has all of that."""
        assert self._before is not None
        try:
            if wrong := lacking(self._store, self._before, base.live(), self._result, self._delivery.shown):
                warn(f"{wrong}: others have taken rows out: all of this result is brought, not only what changed")
                self._updates = None
                return self._newest
            return changed(files, self._result.rows_of, base.live(), Result.of(base).rows_of)
        except (BadSource, CorruptStore, OSError, pa.ArrowException):  # its files were cleared away, or are damaged
            self._updates = None
            return self._newest

    def _receipt(self, mark: Mark, live: Sequence[Live], warn: Callable[[str], None], *, new: bool = True) -> Delivered:
        """The receipt, which is written. Of what was there before it keeps how long that took, if it is known."""
        generation = self._result.generation
        receipt = Delivered(
            to=self._delivery.shown,
            mode=mark.mode,
            key=mark.key,
            generation=mark.generation,
            rows=mark.rows,
            at=mark.at,
            seconds=round(time.monotonic() - self._begun, 3),
            older=mark.older,
            beyond=self._beyond(live, warn if new else lambda text: None),
        )
        path = path_of(generation, receipt.to)
        if not new and (known := receipt_at(path, generation.files)) is not None:
            receipt = replace(receipt, seconds=known.seconds) if known.at == receipt.at else receipt
        generation.files.write_over(path, receipt.dump())
        return receipt

    def _beyond(self, live: Sequence[Live], warn: Callable[[str], None]) -> int | None:
        """How many rows the store has that are not of the result, if others may stay there; None where counting does
        not tell, as rows of several generations may have the same key. If it has fewer, `warn` is told.
        """
        if self._load.mode != "upsert" or self._load.delete:
            return None
        rows: Counter[int] = Counter()  # of each generation, in which no key repeats
        for f in live:
            rows[f.generation] += f.rows if f.role == "rows" else 0
        there, least = self._store.count(None), max(rows.values(), default=0)
        if there < least:
            shown = self._delivery.shown
            warn(
                f"{shown}: holds {there:,} rows, and the result has {least:,} or more: others have taken rows out; "
                "gristmill deliver brings them again"
            )
        return None if len(self._result.members) > 1 else max(0, there - least)


def _with_zeros(batch: pa.RecordBatch, key: Sequence[str]) -> pa.RecordBatch:
    """A batch in whose key -0.0 is 0.0: some stores take them for one key, and some for two."""
    for at, field in enumerate(batch.schema):
        if field.name in key and pa.types.is_floating(field.type):
            batch = batch.set_column(at, field, positive_zeros(batch.column(at)))
    return batch


def refuse_repeated(
    delivery: Delivery, result: Result, files: Sequence[Live], live: Sequence[Live], nights: bool = False
) -> None:
    """Before a result is published, of whose `live` files these are new: raises BadJob for keys that repeat in them,
    or are null, as `Loading.finish` would; also for those of all rows of one night (`nights`), as that does not.
    """
    if delivery.key:
        _chosen(delivery, result, [f for f in files if f.role == "rows"], live, nights)


def _chosen(
    delivery: Delivery, result: Result, files: Sequence[Live], live: Sequence[Live], nights: bool = False
) -> dict[str, np.ndarray]:
    rows = [f for f in live if f.role == "rows"]
    claims = generations(result.generation.root, result.generation.files)
    members = [g for g in claims if g.number in result.members]
    return newest(files, rows, members, result.rows_of, delivery.key, f"deliver {delivery.shown}", nights)


def deliver(
    found: Publication,
    delivery: Delivery,
    anew: bool = False,
    warn: Callable[[str], None] = lambda text: None,
    watch: Watch | None = None,
    take_over: bool = False,
) -> Delivered:
    """Bring a published result to a store; see `Loading.finish`. If others deliver there meanwhile, what is to be
    brought is looked for once more. The caller holds the sink's lease.
    """
    for attempt in range(1, ATTEMPTS + 1):
        store = opened(delivery)
        try:
            loading = Loading(delivery, Result.of(found), store, watch=watch, take_over=take_over)
            return loading.finish(found.live(), anew, warn)
        except Overtaken:
            if attempt == ATTEMPTS:
                raise
        finally:
            store.close()
    raise AssertionError("the last attempt returns or raises")


def differences(found: Publication, delivery: Delivery, receipt: Delivered) -> list[str]:
    """What is wrong in a store to which a result was delivered: a line each. Raises what opening it raises."""
    store = opened(delivery)
    try:
        sink = identity(found.root, found.files, found)
        mark = store.live(sink.name)
        if mark is None and not sink.known:
            return [f"{receipt.to}: {_UNKNOWN}: {_UNKNOWN_WAYS}"]
        if mark is None and found.body.unseen and not receipt.rows:
            return []
        if receipt.mode == "append" and (why := doubt(delivery, Result.of(found), store, mark, receipt.to)) is not None:
            return [why]
        if mark is None:
            return [f"{receipt.to}: was delivered at {receipt.at}, but has no rows of this sink: deliver it again"]
        if mark.doubtful:
            return [f"{receipt.to}: {untold(mark)}: gristmill deliver brings all rows of this result"]
        if mark.generation != receipt.generation:
            return [f"{receipt.to}: holds generation {mark.generation}, and {receipt.generation} was delivered last"]
        if not Result.of(found).shares(mark):
            return [
                f"{receipt.to}: holds generation {mark.generation} of a copy of this sink that went its own way "
                f"({mark.name}): gristmill deliver brings this one"
            ]
        if mark.rows != receipt.rows:
            return [f"{receipt.to}: its mark says {mark.rows:,} rows, and the receipt {receipt.rows:,}"]
        wrong = lacking(store, mark, found.live(), Result.of(found), receipt.to)
        way = "" if mark.mode == "append" else ": gristmill deliver brings them again"
        return [] if wrong is None else [wrong + way]
    finally:
        store.close()

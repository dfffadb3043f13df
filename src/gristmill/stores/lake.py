"""Stores that are tables of a lake: data files, and a log that says which of them are the table. One way to stage,
publish and drop, over what formats of lakes differ in.

A part, or several small ones that come together, becomes a data file in a folder of its generation inside the table's
own, where no reader looks, because no entry of the log names it. The entry that does so publishes all of them, and the
mark with them: nothing is copied then. A folder whose files a log has named once is a table's from then on, and only
what cleans that up removes it; see `Named`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from gristmill.arrow.batches import regrouped
from gristmill.arrow.casts import Lossy, lossless
from gristmill.arrow.schemas import plain, wider
from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, GristmillError, did_you_mean
from gristmill.files.disk import LOCAL
from gristmill.process.pool import Pool
from gristmill.sinks.parquet import worth_a_dictionary
from gristmill.stores.contract import (
    BEGUN,
    Load,
    Mark,
    Part,
    Place,
    StoreUnavailable,
    in_staging,
    is_left,
    is_there,
    refuse_gone,
)
from gristmill.stores.gate import Gate
from gristmill.stores.named import Named
from gristmill.stores.packing import told
from gristmill.values import dataclass

PATIENCE = 600.0  # seconds to wait for another deliverer's commit, which an upsert may take to rewrite files
WRITERS = 2  # files that are written at once
GROUP_ROWS, GROUP_BYTES = 1 << 20, 32 << 20  # of a row group of Parquet, at most
GENERATED = b"delta.generationExpression"  # of a column whose values the table makes itself: how
ATTEMPTS = 20  # commits that others are quicker with, one after the other, before it is given up


@dataclass(frozen=True)
class Snapshot:
    """A table at one version: its columns, the marks of what is in it, that of the last delivery first, and how often
    the files of a staging place became its own. `table` is what the format's client calls it. `new` if nothing was
    ever delivered there, as far as the format tells; a table that was restored has been. `lost` says that its marks are
    not to be found, and the way out: nothing is put beside rows of which none tells whose they are. `version` is what
    no other version of this table is called, nor one of another table that shares its folder.
    """

    schema: pa.Schema
    marks: tuple[Mark, ...]
    committed: Callable[[str], int]
    table: Any
    version: str
    new: bool = False
    lost: str = ""


@dataclass(frozen=True)
class Datafile:
    """A staged file: of which parts, with the rows that each was to bring, and how many rows there are."""

    path: str
    parts: Mapping[str, int]
    rows: int


class Format(Protocol):
    """What one format of lakes does otherwise than others, for one table. What it refuses is a StoreUnavailable."""

    name: str
    """As people write it."""
    suffix: str
    """How data files end."""
    joint: str
    """What is between the name of a staging place and those of its files: a slash, or a dash where a table is flat."""
    joins: bool
    """Whether a data file may be of several parts."""
    names: bool
    """Whether staged files become the table's own where they are."""

    def now(self) -> Snapshot | None:
        """The newest version; None if there is no table."""
        ...

    def folder(self) -> str:
        """Where data files are, on this machine."""
        ...

    def kind(self, kind: pa.DataType) -> pa.DataType | None:
        """The Arrow type of a column that holds all values of a type; None if there is none."""
        ...

    def retypes(self, now: Snapshot, load: Load, kind: pa.DataType) -> bool:
        """Whether a replace can give a column of the table this type, and nothing else is lost."""
        ...

    def refused(self, now: Snapshot | None, load: Load) -> str | None:
        """Why rows cannot be brought to this table in this way, whatever their columns' types, and the way out."""
        ...

    def write(
        self,
        now: Snapshot | None,
        path: str,
        parts: Sequence[Part],
        schema: pa.Schema,
        batches: Iterator[pa.RecordBatch],
    ) -> None:
        """Make a data file of parts, which `about` names then. Threads call it for several files at once."""
        ...

    def about(self, path: str) -> Datafile:
        """What a data file says of itself."""
        ...

    def commit(
        self, now: Snapshot | None, load: Load, schema: pa.Schema, files: Sequence[Datafile], marks: Sequence[Mark]
    ) -> bool:
        """Make the version after `now`, in which the files are the table's as the load's mode says, `load.stage` is
        committed once more, and the marks are these. False, and nothing has happened, if another version came first.
        """
        ...

    def count(self) -> int:
        """Rows that readers see."""
        ...

    def paths(self, now: Snapshot) -> Iterator[str]:
        """The data files of a version that are in `folder`, by their paths there; none without `names`."""
        ...


class Lake:
    """A table of a lake, as a store."""

    def __init__(self, place: Place, form: Format, lock: str) -> None:
        self._place = place
        self._form = form
        self._known: dict[str, Datafile] = {}
        self._lock, self._gate = lock, Gate(lock, place.shown, PATIENCE)

    # ------------------------------------------------ before

    def check(self, load: Load) -> None:
        if load.index:
            raise BadJob(
                f"{self._place.shown}: index: deliveries to {self._form.name} make none: leave it out, and make it "
                "there, where it stays"
            )
        self._columns(self._form.now(), load)

    def _columns(self, now: Snapshot | None, load: Load) -> pa.Schema:
        """The columns of the result as the table has them, or will have them. Raises BadJob."""
        shown, form = self._place.shown, self._form.name
        there = {} if now is None else {f.name: f for f in now.schema}
        if now is not None and now.lost and not load.whole:
            raise StoreUnavailable(now.lost)
        if (why := self._form.refused(now, load)) is not None:
            raise BadJob(f"{shown}: {why}")
        fields = []
        for field in load.schema:
            own = self._form.kind(plain(field.type))
            if own is None:
                raise BadJob(
                    f"{shown}: column {field.name!r} is {field.type}, which {form} cannot hold without loss: cast it "
                    "in a step, or leave it out (drop=)"
                )
            if there and field.name not in there and not load.evolve:
                raise BadJob(
                    f"{shown}: has no column {field.name!r}, which the result has: it has {', '.join(there)}; add it "
                    "there, leave it out of the result (drop=), or let the delivery add it (evolve=True)"
                    f"{did_you_mean(field.name, there)}"
                )
            column = there.get(field.name, pa.field(field.name, own))
            if not (pa.types.is_null(field.type) or holds(column.type, own)):
                hollow = now is not None and self._hollow(now, load, column, own)
                if not hollow or load.mode != "replace":
                    way = ", or deliver once with mode replace, as only nulls came there so far" if hollow else ""
                    raise BadJob(
                        f"{shown}: column {field.name!r} is {column.type}, which does not hold the result's "
                        f"{field.type} without loss: change the column's type there{way}, or cast the values in a step"
                    )
                column = column.with_type(own)
            fields.append(pa.field(field.name, column.type, column.nullable))
        if load.mode != "upsert" or load.delete:
            strict = (f.name for f in left_out(there.values(), load.schema) if not f.nullable)
            if (name := next(strict, None)) is not None:
                raise BadJob(
                    f"{shown}: column {name!r} takes no nulls there, and the result lacks it: add it in a step, or let "
                    "it take nulls there"
                )
        return pa.schema(fields)

    def _hollow(self, now: Snapshot, load: Load, column: pa.Field, own: pa.DataType) -> bool:
        """Whether a replace gives a column of the table another type: only nulls were delivered to it, which tell none,
        and it still has the one that such a column is made with.
        """
        known = (decode_schema(mark.held) for mark in now.marks)
        delivered = [schema.field(column.name).type for schema in known if column.name in schema.names]
        only_nulls = bool(delivered) and all(map(pa.types.is_null, delivered))
        return only_nulls and column.type == self._form.kind(pa.null()) and self._form.retypes(now, load, own)

    def live(self, sink: str) -> Mark | None:
        return _live(self._form.now(), sink)

    # ------------------------------------------------ staging

    def _staging(self, now: Snapshot | None, load: Load, schema: pa.Schema) -> str:
        """What the paths of this generation's files begin with, of which none has ever been committed. Files of other
        columns have others: somebody may change the table's before an interrupted delivery goes on.
        """
        folder, number = self._form.folder(), _times(now, load) + 1
        while not Named(folder).usable(f"{load.stage}_{number}", _version(now)):
            number += 1
        columns = hashlib.sha256(str(schema).encode()).hexdigest()[:8]
        return os.path.join(folder, f"{load.stage}_{number}{self._form.joint}{columns}")

    def _staged(self, load: Load) -> list[Datafile]:
        """The files of this generation."""
        now = self._form.now()
        return self._files(self._staging(now, load, self._columns(now, load)))

    def _files(self, staging: str) -> list[Datafile]:
        folder, first = os.path.split(staging)
        names = sorted(n for n in LOCAL.names(folder) if n.startswith(first) and n.endswith(self._form.suffix))
        found = [file for name in names if (file := self._about(os.path.join(folder, name))) is not None]
        return sorted(found, key=lambda file: min(file.parts, default=""))  # as the result's rows are, where tables are

    def _sweep(self, staging: str, those: Callable[[str], bool] = lambda path: True) -> None:
        """Remove files that were begun by an attempt that was interrupted."""
        folder, first = os.path.split(staging)
        for name in LOCAL.names(folder):
            path = os.path.join(folder, name)
            if name.startswith(first) and name.endswith(BEGUN) and those(path):
                LOCAL.remove(path)

    def _about(self, path: str) -> Datafile | None:
        """What a staged file says of itself, read once: a path is of one part, and never of another content. None if it
        is not there, or cannot be read, so that its parts are staged again.
        """
        if path not in self._known:
            with contextlib.suppress(StoreUnavailable, pa.ArrowException, OSError, ValueError, KeyError, TypeError):
                if os.path.getsize(path):  # Lance panics at an empty one
                    self._known[path] = self._form.about(path)
        return self._known.get(path)

    def staged(self, load: Load) -> Mapping[str, int]:
        return {part: rows for file in self._staged(load) for part, rows in file.parts.items()}

    def stage(self, load: Load, parts: Sequence[Part]) -> None:
        now = self._form.now()
        schema = self._columns(now, load)
        staging = self._staging(now, load, schema)
        folder = os.path.dirname(f"{staging}x")
        LOCAL.make_folder(folder)
        there = {part for file in self._files(staging) for part in file.parts}
        new = [part for part in parts if part.id not in there]
        shares = _shared(new, WRITERS) if self._form.joins else [[part] for part in new]
        with Pool(WRITERS) as writers:
            list(writers.map(lambda share: self._stage(now, staging, schema, share), shares))
        LOCAL.sync_folder(folder)

    def _stage(self, now: Snapshot | None, staging: str, schema: pa.Schema, parts: Sequence[Part]) -> None:
        """Make a data file of parts: each costs a while whatever is in it, for its sync more than for its making."""
        name = hashlib.sha256("\0".join(part.id for part in parts).encode()).hexdigest()[:24]
        target = f"{staging}{name}{self._form.suffix}"
        made = f"{staging}{name}.{secrets.token_hex(4)}{BEGUN}"  # whoever else stages the same parts has another
        try:
            with in_staging(self._place.shown):
                batches = (batch for part in parts for batch in self._cast(part, schema))
                self._form.write(now, made, parts, schema, batches)
                settled(made)
                if os.path.exists(target) and self._about(target) is not None:  # and perhaps the table's own by now
                    LOCAL.remove(made)
                else:
                    os.replace(made, target)  # parts are whole, or not there
        except BaseException:
            with contextlib.suppress(OSError):
                LOCAL.remove(made)
            raise

    def _cast(self, part: Part, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for batch in part.batches():
            columns = []
            for field in schema:
                try:
                    columns.append(lossless(batch.column(field.name), field.type))
                    if columns[-1].null_count and not field.nullable:
                        raise Lossy("it has nulls, which the table does not take")
                except (Lossy, pa.ArrowException) as e:
                    raise BadJob(f"{self._place.shown}: column {field.name!r} of {part.path}: {e}") from e
            yield pa.record_batch(columns, schema=schema)

    def count(self, load: Load | None) -> int:
        if load is None:
            return self._form.count()
        return sum(file.rows for file in self._staged(load))

    def marks(self) -> Sequence[Mark]:
        """See Shared."""
        now = self._form.now()
        return () if now is None else now.marks

    def unmarked(self) -> int:
        """See Unmarked."""
        now = self._form.now()
        return self._form.count() if now is not None and (now.new or any(m.unmarked for m in now.marks)) else 0

    # ------------------------------------------------ the atomic step

    def publish(self, load: Load) -> None:
        with self._alone():
            for _ in range(ATTEMPTS):
                now = self._form.now()
                if is_there(_live(now, load.mark.sink), load, self._place.shown):
                    return
                others = () if now is None or load.whole else (m for m in now.marks if m.sink != load.mark.sink)
                schema = self._columns(now, load)
                files = self._files(staging := self._staging(now, load, schema))
                self._sweep(staging)  # the place is about to be the table's own
                refuse_gone(load, (file.rows for file in files), self._place.shown)
                mark = load.mark if now is None else told(load, now.marks, updated=load.mode == "upsert")
                if self._commit(staging, now, load, schema, files, (mark, *others)):
                    return
        raise StoreUnavailable(
            f"{self._place.shown}: others have written there {ATTEMPTS} times while this was to be committed: run again"
        )

    def _commit(
        self,
        staging: str,
        now: Snapshot | None,
        load: Load,
        schema: pa.Schema,
        files: Sequence[Datafile],
        marks: Sequence[Mark],
    ) -> bool:
        """The format's commit, of which is noted that it may name the files. What ends this process leaves the note."""
        if not (files and self._form.names):
            return self._form.commit(now, load, schema, files, marks)
        folder, times = self._form.folder(), _times(now, load)
        notes, place = Named(folder), os.path.relpath(staging, folder).partition(self._form.joint)[0]
        notes.begin(place, _version(now))
        done = False
        try:
            done = self._form.commit(now, load, schema, files, marks)
        except Exception:
            with contextlib.suppress(GristmillError):  # then nothing tells whether they are named
                if _times(self._form.now(), load) == times:
                    notes.forget(place)
            raise
        if done or _times(self._form.now(), load) > times:
            notes.keep(place)
        else:
            notes.forget(place)
        return done

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other deliverer on this machine commits or removes files meanwhile."""
        os.makedirs(os.path.dirname(self._lock), exist_ok=True)
        self._gate.hold()
        try:
            yield
        finally:
            self._gate.release()

    def drop(self, load: Load, *, this: bool = False) -> None:
        folder, joint = self._form.folder(), self._form.joint
        notes = Named(folder)
        found = [name for name in LOCAL.names(folder) if name.startswith(load.places)]
        if not (found or notes.of(load.places)):
            return
        with self._alone():
            now = self._form.now()
            left = self._left({name.partition(joint)[0] for name in found}, now, notes)
            for name in found:
                if (place := name.partition(joint)[0]) not in left:
                    continue
                path = os.path.join(folder, name)
                if this or place.rpartition("_")[0] != load.stage:
                    (LOCAL.remove_folder if os.path.isdir(path) else LOCAL.remove)(path)
                else:
                    self._sweep(os.path.join(path, "") if os.path.isdir(path) else path, is_left)
            there = {name.partition(joint)[0] for name in LOCAL.names(folder)}
            for place in notes.of(load.places):
                if place not in there:
                    notes.forget(place)
                elif this and now is None and place.startswith(f"{load.stage}_") and notes.usable(place, ""):
                    notes.keep(place)  # it may be named, and nothing else is staged there

    def _left(self, places: set[str], now: Snapshot | None, notes: Named) -> set[str]:
        """Those of some staging places that are no table's own, also not one's that has later versions without them.
        What this table tells of its own is noted, as it may forget that.
        """
        own = set() if now is None else {place for place in places if _tells(now, place)}
        left = {place for place in places - own if notes.removable(place, _version(now))}
        if left and now is not None:
            own |= left & {path.partition(self._form.joint)[0] for path in self._form.paths(now)}
        for place in own.difference(notes.of("")):
            notes.keep(place)
        return left - own

    def close(self) -> None:
        self._gate.release()


def _shared(parts: Sequence[Part], among: int) -> list[Sequence[Part]]:
    """Parts in so many shares of about as many rows, in order."""
    shares: list[list[Part]] = []
    rows, each = 0, sum(part.rows for part in parts) / max(1, among)
    for part in parts:
        if not shares or rows >= each * len(shares):
            shares.append([])
        shares[-1].append(part)
        rows += part.rows
    return list(shares)


def settled(path: str) -> None:
    """Put a file's content on the disk, before any log names it."""
    with open(path, "rb+") as file:
        LOCAL.sync(file)


def _times(now: Snapshot | None, load: Load) -> int:
    """How often the staging place of a load was committed, as far as the table tells."""
    return 0 if now is None else now.committed(load.stage)


def _tells(now: Snapshot, place: str) -> bool:
    """Whether a table tells that a staging place was committed."""
    stage, _, number = place.rpartition("_")
    return number.isdigit() and now.committed(stage) >= int(number)


def _version(now: Snapshot | None) -> str:
    """What `Named` calls it."""
    return "" if now is None else now.version


def _live(now: Snapshot | None, sink: str) -> Mark | None:
    return None if now is None else next((mark for mark in now.marks if mark.sink == sink), None)


def left_out(there: Iterable[pa.Field], schema: pa.Schema) -> list[pa.Field]:
    """The columns of a table that rows of these columns lack, and that it does not make itself."""
    return [f for f in there if f.name not in schema.names and GENERATED not in (f.metadata or {})]


def losing(now: Snapshot, load: Load) -> str | None:
    """Why an upsert that writes whole rows would lose values of the table; None if it would lose none."""
    if kept := [name for name in now.schema.names if name not in load.schema.names]:
        return f"has columns that the result lacks ({', '.join(kept)}), whose values an upsert would lose: add them"
    return None


def padded(batches: Iterable[pa.RecordBatch], lacks: Sequence[pa.Field]) -> Iterator[pa.RecordBatch]:
    """The same rows, with nulls in columns of a table that they lack, where what writes them asks for all columns."""
    for batch in batches:
        nulls = [pa.nulls(batch.num_rows, f.type) for f in lacks]
        yield pa.record_batch([*batch.columns, *nulls], schema=pa.schema([*batch.schema, *lacks]))


def holds(there: pa.DataType, own: pa.DataType) -> bool:
    """Whether a column of the type `there` holds all values of the type `own`."""
    return bool(there == own or wider(there, own) == there)


# ---------------------------------------------------------------- types

SIMPLE: Mapping[pa.DataType, pa.DataType] = {
    **{k: k for k in (pa.bool_(), pa.int32(), pa.int64(), pa.float32(), pa.float64())},
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    **dict.fromkeys((pa.string(), pa.large_string()), pa.string()),
    **dict.fromkeys((pa.binary(), pa.large_binary()), pa.binary()),
    **dict.fromkeys((pa.date32(), pa.date64()), pa.date32()),
    pa.null(): pa.int32(),
}  # types of single values, and those of columns that hold them, where formats agree


def column_type(kind: pa.DataType, simple: Mapping[pa.DataType, pa.DataType]) -> pa.DataType | None:
    """The type of a column that holds all values of a type, in formats whose times have microseconds; None if there is
    none.
    """
    t = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return column_type(kind.storage_type, simple)
    if kind in simple:
        return simple[kind]
    if t.is_fixed_size_binary(kind):
        return pa.binary()
    if t.is_timestamp(kind) and kind.unit != "ns":
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if t.is_decimal(kind) and kind.precision <= 38 and 0 <= kind.scale <= kind.precision:
        return pa.decimal128(kind.precision, kind.scale)
    if t.is_fixed_size_list(kind) or t.is_list(kind) or t.is_large_list(kind):
        inner = column_type(kind.value_type, simple)
        return None if inner is None else pa.list_(pa.field("element", inner))
    if t.is_map(kind):
        pair = column_type(kind.key_type, simple), column_type(kind.item_type, simple)
        return None if None in pair else pa.map_(*pair)
    if t.is_struct(kind) and kind.num_fields:
        fields = [(f.name, column_type(f.type, simple)) for f in kind]
        return None if any(k is None for _, k in fields) else pa.struct(fields)
    return None


# ---------------------------------------------------------------- Parquet

PART = b"gristmill.part"


def labelled(parts: Sequence[Part]) -> str:
    """What a data file says of its parts: the id of one, or the rows of each."""
    return parts[0].id if len(parts) == 1 else json.dumps({part.id: part.rows for part in parts})


def datafile(path: str, said: str, rows: int) -> Datafile:
    """A data file by what it says of its parts, and its rows."""
    return Datafile(path, json.loads(said) if said.startswith("{") else {said: rows}, rows)


def write_parquet(path: str, said: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    """A Parquet file that any reader of lakes knows."""
    import pyarrow.parquet as pq

    tried = worth_a_dictionary(schema)
    with pq.ParquetWriter(path, schema, store_schema=False, use_dictionary=tried) as writer:
        writer.add_key_value_metadata({PART.decode(): said})
        for batch in regrouped(batches, GROUP_ROWS, GROUP_BYTES):
            writer.write_batch(batch)


def parquet_about(path: str) -> Datafile:
    """What a file says that `write_parquet` made."""
    import pyarrow.parquet as pq

    about = pq.read_metadata(path)
    return datafile(path, about.metadata[PART].decode(), about.num_rows)


def parquet_batches(files: Sequence[Datafile], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of staged files."""
    import pyarrow.parquet as pq

    for file in files:
        with pq.ParquetFile(file.path) as reader:
            for batch in reader.iter_batches():
                yield batch.cast(schema)

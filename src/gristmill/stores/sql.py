"""Stores that are tables of a database: one way to stage, publish and look up, over what databases differ in.

Beside the table stand three of ours: `gristmill_marks`, `gristmill_parts`, which has the receipts of parts, and a
staging table for each generation that is being loaded. A part and its receipt are one transaction, and so are the
switch and the mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, did_you_mean
from gristmill.stores.contract import Load, Mark, Part, Place, is_there, refuse_gone, refuse_ours, same_but_for_capitals
from gristmill.stores.packing import alike, told

if TYPE_CHECKING:
    import pyarrow as pa

MARKS, PARTS = "gristmill_marks", "gristmill_parts"
ROWS = "gristmill_rows"  # a view, of what is loaded or looked up
_OURS = {
    MARKS: "(target TEXT NOT NULL, sink TEXT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (target, sink))",
    PARTS: "(stage TEXT NOT NULL, part TEXT NOT NULL, n BIGINT NOT NULL, PRIMARY KEY (stage, part))",
}


class Session(Protocol):
    """One transaction of a database. Tables are named as in SQL, quoted where needed."""

    def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement with `?` for each value; its rows."""
        ...

    def insert(self, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        """Add rows by the names of their columns, with the database's bulk loader. Returns how many."""
        ...

    def columns(self, table: str) -> dict[str, str]:
        """A table's columns with their types, in order; none if there is no such table."""
        ...

    def tables(self, prefix: str) -> list[str]:
        """The tables beside ours whose names begin with a prefix, as named in SQL."""
        ...


class Nothing:
    """A session of a database that is not there."""

    def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return []

    def insert(self, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        raise NotImplementedError  # who only looks adds nothing

    def columns(self, table: str) -> dict[str, str]:
        return {}

    def tables(self, prefix: str) -> list[str]:
        return []


class Database(Protocol):
    """What one database does otherwise than others. `folds`: its name, if columns whose names differ in capitals of
    ASCII are one; else nothing.
    """

    folds: ClassVar[str]

    def session(self, *, write: bool) -> AbstractContextManager[Session]:
        """A transaction, committed at the end and rolled back on an error. Raises StoreUnavailable."""
        ...

    def alone(self, session: Session) -> None:
        """Let no other deliverer to the target go on before this transaction has ended."""
        ...

    def table(self, name: str) -> str:
        """How a table of ours, beside the target, is named in SQL."""
        ...

    def target(self) -> str:
        """How the target is named in SQL."""
        ...

    def marked(self) -> str:
        """Under which name the marks beside the target have it: the same, however an address spells it."""
        ...

    def kind(self, field: pa.Field) -> str:
        """The type of a column for these values. Raises BadJob if none holds all of them without loss."""
        ...

    def holds(self, field: pa.Field, kind: str) -> bool:
        """Whether a column of the type `kind` holds these values without loss."""
        ...

    def typed(self, kind: str) -> bool:
        """Whether a column of the type `kind` tells of itself which values it has."""
        ...

    def binary(self, kind: str) -> str:
        """What follows a column of the type `kind` in SQL where its values are compared as they are, whatever collation
        it has; nothing for types without collations.
        """
        ...

    def fits(self, session: Session, load: Load) -> None:
        """Before anything is scored: raises BadJob for what would keep these rows from the target later, such as rights
        that are missing, or what hangs on it. Changes nothing.
        """
        ...

    def staging(self, session: Session, load: Load, columns: Mapping[str, str]) -> None:
        """Create the staging table if it is not there."""
        ...

    def ready(self, session: Session, load: Load) -> None:
        """Before the switch, which is to be short: build on the staging table what the target has, and `load.index`."""
        ...

    def matching(self, session: Session, load: Load) -> None:
        """Before rows are matched by `load.key`, from the target to the staging table and back: build what keeps that
        from looking through one table for each row of the other.
        """
        ...

    def switch(self, session: Session, load: Load) -> None:
        """Make the staging table the target, in this transaction. Indices, grants and views of the target stay, as it
        is now: others may have changed it since the staging table was made.
        """
        ...

    def indexed(self, session: Session, load: Load) -> None:
        """Build those of `load.index` that the target does not have."""
        ...

    def close(self) -> None: ...


def quoted(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def named(place: Place) -> None:
    """Raises BadJob for an address that names no table, or one of ours."""
    if not all(place.name.split(".")) or place.name.count(".") > 1:
        raise BadJob(f"{place.shown}: name a table: {place.shown.partition('#')[0]}#scores (or #schema.scores)")
    refuse_ours(place, place.name.rpartition(".")[2], f"({MARKS}|{PARTS}|{ROWS})$")


def folded(name: str) -> str:
    """A name as databases compare it that do not tell capitals of ASCII from small letters."""
    return name.encode().lower().decode()


class Tables:
    """A table of a database, as a store."""

    def __init__(self, place: Place, database: Database) -> None:
        self._place = place
        self._db = database

    # ------------------------------------------------ before

    def check(self, load: Load) -> None:
        with self._db.session(write=False) as session:
            self._db.fits(session, load)
            self._columns(session, load)
            self._beside(session, load)

    def _beside(self, session: Session, load: Load) -> None:
        """Raises BadJob for columns in which rows of others are as well, which were delivered as another type: where a
        column does not tell its values' type, all are read as those that were delivered last.
        """
        marks, there = self._db.table(MARKS), session.columns(self._db.target())
        if load.whole or not there or not session.columns(marks):
            return
        for mark in _marks(session, marks, self._db.marked(), self._place.shown):
            known = decode_schema(mark.schema)
            for field in load.schema:
                if field.name not in known.names or field.name not in there or self._db.typed(there[field.name]):
                    continue
                if not alike(kind := known.field(field.name).type, field.type):
                    raise BadJob(
                        f"{self._place.shown}: column {field.name!r} has values of {kind} there, and of {field.type} "
                        "in the result, and nothing would tell them apart: cast the values in a step, or deliver to "
                        "another table"
                    )

    def _columns(self, session: Session, load: Load) -> dict[str, str]:
        """The columns of the staging table with their types: those of the target, and new ones. Raises BadJob."""
        there, shown = session.columns(self._db.target()), self._place.shown
        columns = dict(there)
        for field in load.schema:
            if field.name not in there:
                if there and not load.evolve:
                    raise BadJob(
                        f"{shown}: has no column {field.name!r}, which the result has{did_you_mean(field.name, there)}"
                        f": it has {', '.join(there)}; add it there, leave it out of the result (drop=), or let the "
                        "delivery add it (evolve=True)"
                    )
                columns[field.name] = self._db.kind(field)
            elif not self._db.holds(field, there[field.name]):
                raise BadJob(
                    f"{shown}: column {field.name!r} is {there[field.name]}, which does not hold the result's "
                    f"{field.type} without loss: change the column's type there, or cast the values in a step"
                )
        if self._db.folds and (why := same_but_for_capitals(columns, self._db.folds, folded)) is not None:
            raise BadJob(f"{shown}: {why}")
        return columns

    # ------------------------------------------------ staging

    def live(self, sink: str) -> Mark | None:
        with self._db.session(write=False) as session:
            return self._live(session, sink)

    def _live(self, session: Session, sink: str) -> Mark | None:
        marks = self._db.table(MARKS)
        if not session.columns(marks):
            return None
        rows = session.run(f"SELECT body FROM {marks} WHERE target = ? AND sink = ?", self._db.marked(), sink)
        if not rows or not session.columns(self._db.target()):
            return None
        return Mark.load(rows[0][0].encode(), self._place.shown)

    def staged(self, load: Load) -> Mapping[str, int]:
        parts, stage = self._db.table(PARTS), self._db.table(load.stage)
        with self._db.session(write=False) as session:
            if not session.columns(parts) or not session.columns(stage):
                return {}
            return {
                row[0]: int(row[1]) for row in session.run(f"SELECT part, n FROM {parts} WHERE stage = ?", load.stage)
            }

    def stage(self, load: Load, parts: Sequence[Part]) -> None:
        receipts, stage = self._db.table(PARTS), self._db.table(load.stage)
        with self._db.session(write=True) as session:
            self._db.alone(session)
            self._begin(session, load)
            there = {row[0] for row in session.run(f"SELECT part FROM {receipts} WHERE stage = ?", load.stage)}
            new = [part for part in parts if part.id not in there]
            for part in new:
                session.run(f"INSERT INTO {receipts} VALUES (?, ?, ?)", load.stage, part.id, part.rows)
            if new:
                session.insert(stage, load.schema, (batch for part in new for batch in part.batches()))

    def _begin(self, session: Session, load: Load) -> None:
        """Make our tables, and the staging table of this generation."""
        parts, stage = self._db.table(PARTS), self._db.table(load.stage)
        for name, columns in _OURS.items():
            if not session.columns(self._db.table(name)):
                session.run(f"CREATE TABLE IF NOT EXISTS {self._db.table(name)} {columns}")
        if not session.columns(stage):
            session.run(f"DELETE FROM {parts} WHERE stage = ?", load.stage)  # of a table that somebody dropped
            self._db.staging(session, load, self._columns(session, load))

    def count(self, load: Load | None) -> int:
        table = self._db.target() if load is None else self._db.table(load.stage)
        with self._db.session(write=False) as session:
            return int(session.run(f"SELECT count(*) FROM {table}")[0][0]) if session.columns(table) else 0

    # ------------------------------------------------ the atomic step

    def publish(self, load: Load) -> None:
        with self._db.session(write=True) as session:
            self._db.alone(session)
            if self._is_there(session, load):
                return
            self._begin(session, load)
            if load.mode == "replace":
                self._db.ready(session, load)
            elif load.mode == "upsert":
                self._db.matching(session, load)
        with self._db.session(write=True) as session:
            self._db.alone(session)
            if not self._is_there(session, load):
                parts = session.run(f"SELECT n FROM {self._db.table(PARTS)} WHERE stage = ?", load.stage)
                refuse_gone(load, (int(row[0]) for row in parts), self._place.shown)
                self._columns(session, load)  # of a target that others may have changed
                self._apply(session, load)
                self._note(session, load)

    def _is_there(self, session: Session, load: Load) -> bool:
        return is_there(self._live(session, load.mark.sink), load, self._place.shown)

    def _apply(self, session: Session, load: Load) -> None:
        target, stage = self._db.target(), self._db.table(load.stage)
        if load.mode == "replace":
            self._db.switch(session, load)
            return
        names, columns = load.schema.names, session.columns(stage)
        if not session.columns(target):
            created(session, target, columns)
        extended(session, target, stage, names)
        if load.mode == "append":
            listed = ", ".join(map(quoted, names))
            session.run(f"INSERT INTO {target} ({listed}) SELECT {listed} FROM {stage}")
        else:
            merged(session, self._db, stage, load, delete=load.delete)
        session.run(f"DROP TABLE {stage}")
        self._db.indexed(session, load)

    def _note(self, session: Session, load: Load) -> None:
        marks, parts, target = self._db.table(MARKS), self._db.table(PARTS), self._db.marked()
        known = _marks(session, marks, target, self._place.shown)
        mark = replace(told(load, known), turn=1 + max((m.turn for m in known), default=0))
        if load.whole:
            session.run(f"DELETE FROM {marks} WHERE target = ?", target)
        else:
            session.run(f"DELETE FROM {marks} WHERE target = ? AND sink = ?", target, load.mark.sink)
        session.run(f"INSERT INTO {marks} VALUES (?, ?, ?)", target, mark.sink, mark.dump().decode())
        session.run(f"DELETE FROM {parts} WHERE stage = ?", load.stage)

    def drop(self, load: Load, *, this: bool = False) -> None:
        with self._db.session(write=True) as session:
            kept = None if this else self._db.table(load.stage)
            for table in session.tables(load.places):
                if table != kept:
                    session.run(f"DROP TABLE IF EXISTS {table}")
            if session.columns(self._db.table(PARTS)):
                sql = f"DELETE FROM {self._db.table(PARTS)} WHERE stage LIKE ?"
                session.run(
                    sql if this else f"{sql} AND stage <> ?", f"{load.places}%", *(() if this else (load.stage,))
                )

    def close(self) -> None:
        self._db.close()


def _marks(session: Session, table: str, target: str, shown: str) -> list[Mark]:
    """The marks of all sinks whose rows are in the target."""
    rows = session.run(f"SELECT body FROM {table} WHERE target = ?", target)
    return [Mark.load(row[0].encode(), shown) for row in rows]


def latest(session: Session, table: str, target: str, shown: str) -> Mark | None:
    """The mark of what was delivered last to the target, in the `table` of marks; None if there is none."""
    found = _marks(session, table, target, shown) if session.columns(table) else []
    return max(found, key=lambda mark: (mark.turn, mark.at), default=None)


def _defined(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{quoted(name)} {kind}" for name, kind in columns.items())


def created(session: Session, table: str, columns: Mapping[str, str]) -> None:
    """Create a table of these columns."""
    session.run(f"CREATE TABLE {table} ({_defined(columns)})")


def as_staged(session: Session, target: str, stage: str, new: Sequence[str]) -> bool:
    """Whether the staging table has the columns that the target has now, and beside them only `new` ones."""
    there, staged = (list(session.columns(table).items()) for table in (target, stage))
    return staged[: len(there)] == there and all(name in new for name, _ in staged[len(there) :])


def extended(session: Session, target: str, stage: str, columns: Sequence[str]) -> None:
    """Add those of the result's columns that the target does not have."""
    there = session.columns(target)
    for name, kind in session.columns(stage).items():
        if name in columns and name not in there:
            session.run(f"ALTER TABLE {target} ADD COLUMN {quoted(name)} {kind}")


def moved(session: Session, target: str, stage: str, columns: Sequence[str], *, truncate: bool = False) -> None:
    """Put the staged rows in the place of the target's, one transaction: all that hangs on the target stays, and
    columns that the result does not have get their defaults.
    """
    extended(session, target, stage, columns)
    names = ", ".join(map(quoted, columns))
    session.run(f"TRUNCATE {target}" if truncate else f"DELETE FROM {target}")
    session.run(f"INSERT INTO {target} ({names}) SELECT {names} FROM {stage}")
    session.run(f"DROP TABLE {stage}")


def same_key(session: Session, database: Database, load: Load, row: str = "t") -> str:
    """Whether a `row` of the target has the key of the staged row `s`, in SQL: by an index of the column's collation,
    and as it is.
    """
    kinds, told = session.columns(database.target()), []
    for name in load.key:
        own, staged, binary = f"{row}.{quoted(name)}", f"s.{quoted(name)}", database.binary(kinds[name])
        told += [f"{own} = {staged}"] + ([f"{own}{binary} = {staged}{binary}"] if binary else [])
    return " AND ".join(told)


def merged(session: Session, database: Database, stage: str, load: Load, *, delete: bool) -> None:
    """Put the staged rows among those of the target by their key; with `delete` rows of other keys go."""
    target, names, same = database.target(), load.schema.names, same_key(session, database, load)
    if delete:
        session.run(f"DELETE FROM {target} AS t WHERE NOT EXISTS (SELECT 1 FROM {stage} AS s WHERE {same})")
    if values := [n for n in names if n not in load.key]:
        sets = ", ".join(f"{quoted(n)} = s.{quoted(n)}" for n in values)
        session.run(f"UPDATE {target} AS t SET {sets} FROM {stage} AS s WHERE {same}")
    listed = ", ".join(map(quoted, names))
    session.run(
        f"INSERT INTO {target} ({listed}) SELECT {listed} FROM {stage} AS s "
        f"WHERE NOT EXISTS (SELECT 1 FROM {target} AS t WHERE {same})"
    )

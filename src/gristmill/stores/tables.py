"""A table of a database, as a store.

Beside the table stand three of ours: `gristmill_marks`, `gristmill_parts`, which has the receipts of parts, and a
staging table for each generation that is being loaded. A part and its receipt are one transaction, and so are the
switch and the mark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, did_you_mean
from gristmill.stores.contract import Load, Mark, Part, Place, is_there, refuse_gone, same_but_for_capitals
from gristmill.stores.packing import alike, told
from gristmill.stores.sql import (
    MARKS,
    PARTS,
    Database,
    Session,
    appended,
    counted,
    extended,
    folded,
    merged,
    quoted,
)
from gristmill.stores.tablemarks import Marks, copies_of, marks_astray, marks_of

_OURS = {
    MARKS: "(target TEXT NOT NULL, which TEXT NOT NULL, sink TEXT NOT NULL, body TEXT NOT NULL, "
    "PRIMARY KEY (target, which, sink))",
    PARTS: "(stage TEXT NOT NULL, part TEXT NOT NULL, n BIGINT NOT NULL, PRIMARY KEY (stage, part))",
}


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
        there = session.columns(self._db.target())
        if load.whole or not there:
            return
        for mark in self._marks(session).read:
            known = decode_schema(mark.held)
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
        columns, made = dict(there), self._db.generated(session) if there else ()
        for field in load.schema:
            if field.name in made:
                raise BadJob(
                    f"{shown}: column {field.name!r} is GENERATED there, so that the table makes its values: leave it "
                    "out of the result (drop=), or give it another name in a step"
                )
            if field.name not in there:
                if there and not load.evolve:
                    raise BadJob(
                        f"{shown}: has no column {field.name!r}, which the result has: it has {', '.join(there)}; add "
                        "it there, leave it out of the result (drop=), or let the delivery add it (evolve=True)"
                        f"{did_you_mean(field.name, there)}"
                    )
                columns[field.name] = self._db.kind(field)
            elif not (pa.types.is_null(field.type) or self._db.holds(field, there[field.name])):
                hollow = self._hollow(session, load, field.name, there[field.name])
                if not (hollow and (load.whole or load.evolve)):
                    way = ", or let the delivery do that, as only nulls are there (evolve=True)" if hollow else ""
                    raise BadJob(
                        f"{shown}: column {field.name!r} is {there[field.name]}, which does not hold the result's "
                        f"{field.type} without loss: change the column's type there{way}, or cast the values in a step"
                    )
                columns[field.name] = self._db.kind(field)
        known = [*columns, *(name for name in made if name not in columns)]
        if self._db.folds and (why := same_but_for_capitals(known, self._db.folds, folded)) is not None:
            raise BadJob(f"{shown}: {why}")
        return columns

    def _hollow(self, session: Session, load: Load, name: str, kind: str) -> bool:
        """Whether a column of the target may get another type: only nulls were delivered to it, which tell none, and it
        still has the one that such a column is made with.
        """
        if kind != self._db.kind(pa.field(name, pa.null())):
            return False
        known = (decode_schema(m.held) for m in self._marks(session).read)
        delivered = [schema.field(name).type for schema in known if name in schema.names]
        if not delivered or not all(map(pa.types.is_null, delivered)) or not self._db.drops(session, load, name):
            return False
        filled = f"SELECT 1 FROM {self._db.target()} WHERE {quoted(name)} IS NOT NULL LIMIT 1"  # by others
        return load.whole or not session.run(filled)

    # ------------------------------------------------ staging

    def live(self, sink: str) -> Mark | None:
        with self._db.session(write=False) as session:
            return self._live(session, sink)

    def _live(self, session: Session, sink: str) -> Mark | None:
        if not session.columns(self._db.target()):
            return None
        return self._marks(session).live(sink, self._count(session))

    def _marks(self, session: Session) -> Marks:
        return marks_of(session, self._db.which(session), self._place.shown)

    def _count(self, session: Session) -> Callable[[], int]:
        return lambda: counted(session, self._db.target())

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
        if new := {name: own for name, own in _OURS.items() if not session.columns(self._db.table(name))}:
            self._db.alone(session, ours=True)  # others may be making them for another target
            for name, columns in new.items():
                session.run(f"CREATE TABLE IF NOT EXISTS {self._db.table(name)} {columns}")
        if not session.columns(stage):
            session.run(f"DELETE FROM {parts} WHERE stage = ?", load.stage)  # of a table that somebody dropped
            self._db.staging(session, load, self._columns(session, load))

    def count(self, load: Load | None) -> int:
        table = self._db.target() if load is None else self._db.table(load.stage)
        with self._db.session(write=False) as session:
            return int(session.run(f"SELECT count(*) FROM {table}")[0][0]) if session.columns(table) else 0

    def marks(self) -> Sequence[Mark]:
        """See Shared."""
        with self._db.session(write=False) as session:
            return self._marks(session).read if session.columns(self._db.target()) else ()

    def unmarked(self) -> int:
        """See Unmarked."""
        with self._db.session(write=False) as session:
            there = session.columns(self._db.target())
            return self._marks(session).unmarked(self._count(session)) if there else 0

    def untold(self, sink: str, last: tuple[int, str]) -> int:
        """See Counted."""
        with self._db.session(write=False) as session:
            there = session.columns(self._db.target())
            return self._marks(session).untold(sink, last, self._count(session)) if there else 0

    def was(self, name: str) -> bool:
        """See Counted. A table that tells which it is has its marks, but for those in schemas that may not be read."""
        with self._db.session(write=False) as session:
            table = self._db.named(session, name)
            moved = table.rpartition('."')[2] == self._db.target().rpartition('."')[2]  # a name itself may have a dot
            if self._db.which(session).now and not moved:
                return False
            return not session.columns(table)

    def astray(self, sink: str) -> tuple[str, Mark] | None:
        """See Counted."""
        with self._db.session(write=False) as session:
            there = self._db.which(session)
            schema = self._place.name[: -len(there.name)]  # with its dot; tables of SQLite may have dots in their names
            for row in marks_astray(session, there, sink, self._place.shown):
                if not session.columns(self._db.named(session, f"{schema}{row.target}")):
                    return row.target, row.mark
        return None

    def copies(self, mark: Mark) -> Sequence[str]:
        """See Counted."""
        with self._db.session(write=False) as session:
            return copies_of(session, self._db.which(session), mark)

    # ------------------------------------------------ the atomic step

    def publish(self, load: Load) -> None:
        with self._db.session(write=True) as session:
            self._db.alone(session)
            if self._is_there(session, load):
                return
            self._begin(session, load)
            self._db.brief(session)
            if load.mode == "replace":
                self._db.ready(session, load)
            elif load.mode == "upsert":
                self._db.matching(session, load)
            if gone := self._other_types(session, load):
                self._db.freed(session, load, gone)
        with self._db.session(write=True) as session:
            self._db.alone(session)
            self._db.brief(session)
            self._db.keep(session, load)
            before, made = self._marks(session), not session.columns(self._db.target())
            live = None if made else before.live(load.mark.sink, self._count(session))
            if not is_there(live, load, self._place.shown):
                parts = session.run(f"SELECT n FROM {self._db.table(PARTS)} WHERE stage = ?", load.stage)
                refuse_gone(load, (int(row[0]) for row in parts), self._place.shown)
                self._retyped(session, load)
                short = not (made or load.whole) and before.lacking(self._count(session))
                updated = self._apply(session, load)
                self._note(session, load, before, made=made, updated=updated, lacking=short)

    def _retyped(self, session: Session, load: Load) -> None:
        """Take columns out of the target that are to have another type, so that they are added as new ones are. Raises
        BadJob for a target that does not take the rows any more.
        """
        there = session.columns(self._db.target())
        if there.items() <= self._columns(session, load).items():
            return
        self._db.still(session)
        for name in self._other_types(session, load):
            session.run(f"ALTER TABLE {self._db.target()} DROP COLUMN {quoted(name)}")

    def _other_types(self, session: Session, load: Load) -> list[str]:
        """The columns of the target that are to have another type. Raises BadJob as `_columns` does."""
        there = session.columns(self._db.target())
        return [name for name, kind in self._columns(session, load).items() if there.get(name, kind) != kind]

    def _is_there(self, session: Session, load: Load) -> bool:
        return is_there(self._live(session, load.mark.sink), load, self._place.shown)

    def _apply(self, session: Session, load: Load) -> bool:
        """Whether rows that stay keep their values in columns that the result lacks."""
        target, stage = self._db.target(), self._db.table(load.stage)
        if load.mode == "replace":
            return self._db.switch(session, load)
        names, columns = load.schema.names, session.columns(stage)
        if not session.columns(target):
            self._db.create(session, target, columns)
        extended(session, target, stage, names)
        if load.mode == "append":
            appended(session, self._db, stage, load, self._place.shown)
        else:
            merged(session, self._db, stage, load, self._place.shown, delete=load.delete)
        session.run(f"DROP TABLE {stage}")
        self._db.indexed(session, load)
        return True

    def _note(self, session: Session, load: Load, before: Marks, *, made: bool, updated: bool, lacking: bool) -> None:
        """Write the mark. `before` are those of before the step, `made`: there was no table of this name, `lacking`:
        fewer rows than its marks told of.
        """
        now = before.told(self._db.which(session).now, whole=load.whole)
        mark = told(load, () if made else before.read, updated=updated)
        mark = replace(mark, turn=before.turn + 1, table=now)
        before.note(session, mark, now=now, made=made, whole=load.whole, lacking=lacking)
        session.run(f"DELETE FROM {self._db.table(PARTS)} WHERE stage = ?", load.stage)

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

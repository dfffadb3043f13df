"""Databases as the stores that are tables need them: what they differ in, and how rows get from one table into another.
A target that does not take what it is given is noticed within the transaction, which then changes nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from gristmill.errors import BadJob
from gristmill.stores.contract import Load, Place, refuse_ours
from gristmill.values import dataclass

if TYPE_CHECKING:
    import pyarrow as pa

MARKS, PARTS = "gristmill_marks", "gristmill_parts"
WITH_TABLES = "it (with all of its tables)"  # what it is to remove a file that is a database
ROWS = "gristmill_rows"  # a view, of what is loaded or looked up
# Tables within statements: rows there, staged ones, and those that refer to them. Shorter names may be columns, too,
# and in a subquery DuckDB takes `s.x` for a field of a column `s` before it is a column of the table `s` outside.
OLD, NEW, OTHER = "gristmill_old", "gristmill_new", "gristmill_other"


class Session(Protocol):
    """One transaction of a database. Tables are named as in SQL, quoted where needed."""

    def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement with `?` for each value; its rows."""
        ...

    def changed(self, sql: str) -> int:
        """Run a statement; how many rows it has inserted, updated or deleted, as the database counts them."""
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


def of_sqlite(words: str, shown: str) -> str | None:
    """What is said of a file that DuckDB cannot open because it is one of SQLite's; None if that is not why. It is told
    by DuckDB's words: to look into the file would let go of the locks that this process has on it.
    """
    if "sqlite_scanner" not in words:
        return None
    return f"{shown}: is a file of SQLite's: its address is {shown.replace('duckdb:', 'sqlite:', 1)}"


def not_sqlite(words: str, shown: str) -> str:
    """What is added to SQLite's words about a file that is none of its own."""
    if "not a database" not in words:
        return ""
    return f": if DuckDB made it, its address is {shown.replace('sqlite:', 'duckdb:', 1)}"


@dataclass(frozen=True)
class Which:
    """Which table has the name of a target. `name` is that, the same however an address spells it. `now` has a word
    that tells the table, and one that tells that of marks, which stay as long as these are the tables that they are,
    whatever is done to them; more of them tell in which database these say so. It is empty where that is not told.
    `marks` is the table of marks beside the target, in SQL; `left` finds others in which some of it may be left, and is
    asked where none are beside it: whoever looks rows up does without those that are locked if what it is given says
    so. `elsewhere` says whether such words are known to be those of a table that has another name; `others` are the
    names of those that have the words of this one, too, and `having` gives those that have some words, as people can
    give them to several.
    """

    name: str
    now: str
    marks: str
    elsewhere: Callable[[str], bool]
    left: Callable[[Callable[[], bool]], Sequence[str]] = lambda spared: ()
    others: Sequence[str] = ()
    having: Callable[[str], Sequence[str]] = lambda told: ()


class Nothing:
    """A session of a database that is not there."""

    def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return []

    def changed(self, sql: str) -> int:
        raise NotImplementedError  # who only looks changes nothing

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

    def alone(self, session: Session, *, ours: bool = False) -> None:
        """Let no other deliverer to the target go on before this transaction has ended; with `ours` none that makes the
        tables of ours beside it.
        """
        ...

    def brief(self, session: Session) -> None:
        """From now on let no statement of this transaction wait long for others' locks: whoever comes after it waits
        with it, readers of the target among them.
        """
        ...

    def table(self, name: str) -> str:
        """How a table of ours, beside the target, is named in SQL."""
        ...

    def target(self) -> str:
        """How the target is named in SQL."""
        ...

    def which(self, session: Session) -> Which:
        """Which table has the target's name."""
        ...

    def keep(self, session: Session, load: Load) -> None:
        """Let nobody give the target's name to another table before this transaction has ended."""
        ...

    def named(self, session: Session, name: str) -> str:
        """How the table of another address of this database is named in SQL."""
        ...

    def create(self, session: Session, table: str, columns: Mapping[str, str]) -> None:
        """Create a table of these columns, of which `which` tells once it is the target."""
        ...

    def kind(self, field: pa.Field) -> str:
        """The type of a column for these values. Raises BadJob if none holds all of them without loss."""
        ...

    def holds(self, field: pa.Field, kind: str) -> bool:
        """Whether a column of the type `kind` holds these values without loss."""
        ...

    def drops(self, session: Session, load: Load, column: str) -> bool:
        """Whether one of the target's columns can be dropped, and nothing but its name, type and values goes then, and
        indices of ours (see `freed`), which are built anew.
        """
        ...

    def freed(self, session: Session, load: Load, columns: Collection[str]) -> None:
        """Before columns are dropped, in a transaction of its own: drop indices of ours that would keep them there."""
        ...

    def still(self, session: Session) -> None:
        """Let nobody else change the target's rows before this transaction has ended."""
        ...

    def typed(self, kind: str) -> bool:
        """Whether a column of the type `kind` tells of itself which values it has."""
        ...

    def binary(self, kind: str) -> str:
        """What follows a column of the type `kind` in SQL where its values are compared as they are, whatever collation
        it has; nothing for types of which the database does that anyway.
        """
        ...

    def generated(self, session: Session) -> Collection[str]:
        """The columns of the target whose values are an expression of others: nothing is inserted there."""
        ...

    def meddles(self, session: Session, load: Load) -> bool:
        """Whether the target may take other rows than it is given: by triggers, rules, or what a constraint does about
        a conflict. Then nobody else changes its rows before this transaction has ended, so that they can be counted.
        """
        ...

    def settled(self, session: Session) -> None:
        """Let what is to happen at the end of this transaction happen now."""
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

    def switch(self, session: Session, load: Load) -> bool:
        """Make the staging table the target, in this transaction. Indices, grants and views of the target stay, as it
        is now: others may have changed it since the staging table was made. Whether rows were updated by their key, so
        that they keep columns that the result lacks.
        """
        ...

    def indexed(self, session: Session, load: Load) -> None:
        """Build those of `load.index` that the target does not have; one of ours of the same column, but of another
        kind, goes.
        """
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


def holds_decimals(precision: int, scale: int, kind: pa.DataType) -> bool:
    """Whether a column of decimals with so many digits, so many of them behind the point, holds those of a type."""
    return bool(scale >= kind.scale and precision - scale >= kind.precision - kind.scale)


def refuse_view(shown: str) -> None:
    """Raises BadJob for a view, whose rows are those of other tables."""
    raise BadJob(f"{shown}: is a view, whose rows cannot be replaced: deliver to the table that they are in")


def told_apart(name: str, table: str, columns: Sequence[str]) -> str:
    """The name of an index of ours, where another table's has that name."""
    return f"{name}_{hashlib.sha256(chr(0).join((table, *columns)).encode()).hexdigest()[:8]}"


def defined(columns: Mapping[str, str]) -> str:
    """Columns as a table is created with them."""
    return ", ".join(f"{quoted(name)} {kind}" for name, kind in columns.items())


def witness() -> str:
    """What tells a table that we make from all others, where a database does not."""
    return f"gristmill {secrets.token_hex(8)}"


_SHARED = " - shared"


def told_by(word: str, *, shared: bool) -> str:
    """What marks tell of a table with a witness: also whether it is `shared` by copies to which somebody gave it."""
    return f"{word}{_SHARED}" if shared else f"{word} -"


def is_shared(told: str) -> bool:
    """Whether several tables had a witness when a mark told of it."""
    return told.endswith(_SHARED)


def witnessed(name: str, there: Sequence[tuple[str, str]], marks: str) -> Which:
    """Which table has a name, by the witnesses of all tables that have one, which somebody may have given to a copy as
    well. `marks` is the table of marks, in SQL.
    """
    words = [(folded(table), witness.split()[1]) for table, witness in there]
    own = next((word for table, word in words if table == folded(name)), "")

    def having(told: str) -> Sequence[str]:
        return [table for table, word in words if word == told.split(maxsplit=1)[0]]

    def elsewhere(told: str) -> bool:
        return told.split(maxsplit=1)[0] != own and bool(having(told))

    others = [table for table in having(own) if table != folded(name)] if own else []
    now = told_by(own, shared=bool(others)) if own else ""
    return Which(folded(name), now, marks, elsewhere, others=others, having=having)


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


def counted(session: Session, table: str, where: str = "") -> int:
    """How many rows a table has."""
    return int(session.run(f"SELECT count(*) FROM {table}{where}")[0][0])


def refuse_others(wanted: int, found: int, shown: str, what: str = "there") -> None:
    """Raises BadJob if the target has not taken what it was given."""
    if found != wanted:
        raise BadJob(
            f"{shown}: {wanted:,} rows were to be {what}, and {found:,} are: triggers or rules of the table, or what a "
            "constraint of it does about a conflict (ON CONFLICT IGNORE), take or add some: drop these, or deliver to "
            "a table without them"
        )


def _inserted(session: Session, target: str, stage: str, columns: Sequence[str], where: str = "") -> int:
    names = ", ".join(map(quoted, columns))
    return session.changed(f"INSERT INTO {target} ({names}) SELECT {names} FROM {stage} AS {NEW}{where}")


def appended(session: Session, database: Database, stage: str, load: Load, shown: str) -> None:
    """Put the staged rows beside those of the target. Raises BadJob if it does not take all of them."""
    target, meddles = database.target(), database.meddles(session, load)
    before = counted(session, target) if meddles else 0
    taken = _inserted(session, target, stage, load.schema.names)
    database.settled(session)
    if meddles:  # what the database counts leaves out what triggers do, such as to bring a row to its partition
        taken = counted(session, target) - before
    refuse_others(load.mark.rows, taken, shown)


def moved(
    session: Session, database: Database, stage: str, load: Load, shown: str, *, emptied: Sequence[str] = ()
) -> None:
    """Put the staged rows in the place of the target's, one transaction: all that hangs on the target stays, and
    columns that the result does not have get their defaults. `emptied` are the statements that remove its rows. Raises
    BadJob if it does not take all of them.
    """
    target, columns = database.target(), load.schema.names
    extended(session, target, stage, columns)
    meddles = database.meddles(session, load)
    for sql in emptied or (f"DELETE FROM {target}",):
        session.run(sql)
    taken = _inserted(session, target, stage, columns)
    session.run(f"DROP TABLE {stage}")
    database.settled(session)
    refuse_others(load.mark.rows, counted(session, target) if meddles else taken, shown)


def same_key(session: Session, database: Database, load: Load, row: str = OLD) -> str:
    """Whether a `row` of the target has the key of the staged row, in SQL: by an index of the column's collation,
    and as it is.
    """
    kinds, told = session.columns(database.target()), []
    for name in load.key:
        own, staged, binary = f"{row}.{quoted(name)}", f"{NEW}.{quoted(name)}", database.binary(kinds[name])
        told += [f"{own} = {staged}"] + ([f"{own}{binary} = {staged}{binary}"] if binary else [])
    return " AND ".join(told)


def merged(session: Session, database: Database, stage: str, load: Load, shown: str, *, delete: bool) -> None:
    """Put the staged rows among those of the target by their key; with `delete` rows of other keys go. Raises BadJob if
    it does not take all of them.
    """
    target, names, same = database.target(), load.schema.names, same_key(session, database, load)
    other = f" AS {OLD} WHERE NOT EXISTS (SELECT 1 FROM {stage} AS {NEW} WHERE {same})"
    new = f" WHERE NOT EXISTS (SELECT 1 FROM {target} AS {OLD} WHERE {same})"
    meddles = database.meddles(session, load)
    before = _Counts.of(session, target, stage, other, new) if meddles else None
    if delete:
        session.run(f"DELETE FROM {target}{other}")
    updated = None
    if values := [n for n in names if n not in load.key]:
        sets = ", ".join(f"{quoted(n)} = {NEW}.{quoted(n)}" for n in values)
        updated = session.changed(f"UPDATE {target} AS {OLD} SET {sets} FROM {stage} AS {NEW} WHERE {same}")
        if before is not None and updated < before.own:  # a trigger may keep rows from being written as they are
            updated = before.own - _unlike(session, database, stage, load, same)
    _inserted(session, target, stage, names, new)
    database.settled(session)
    if before is not None:
        after = _Counts.of(session, target, stage, other, new)
        if updated is not None:
            refuse_others(before.own, updated, shown, "updated")
        refuse_others(before.own + before.new, after.own, shown)
        refuse_others(load.mark.rows, load.mark.rows - after.new, shown)
        refuse_others(0 if delete else before.other, after.other, shown, "there of others")


def _unlike(session: Session, database: Database, stage: str, load: Load, same: str) -> int:
    """How many staged rows have a key of the target, but are not there as they are."""
    target = database.target()
    kinds = session.columns(target)
    staged, own = (
        ", ".join(f"{at}.{quoted(n)}{database.binary(kinds[n])}" for n in load.schema.names) for at in (NEW, OLD)
    )
    wanted = f"SELECT {staged} FROM {stage} AS {NEW} WHERE EXISTS (SELECT 1 FROM {target} AS {OLD} WHERE {same})"
    return counted(session, f"({wanted} EXCEPT SELECT {own} FROM {target} AS {OLD}) AS {NEW}")


@dataclass(frozen=True)
class _Counts:
    """Rows of the target whose keys are staged, and others; staged rows whose keys are not there."""

    own: int
    other: int
    new: int

    @classmethod
    def of(cls, session: Session, target: str, stage: str, other: str, new: str) -> _Counts:
        beside = counted(session, target, other)
        return cls(counted(session, target) - beside, beside, counted(session, stage, f" AS {NEW}{new}"))

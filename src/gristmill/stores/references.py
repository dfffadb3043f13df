"""Foreign keys of other tables that refer to the one that is delivered to. For them a row that is deleted and inserted
again has been gone, so its rows are updated by the key that they refer to.
"""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.errors import BadJob
from gristmill.stores.contract import Load
from gristmill.stores.sql import NEW, OLD, OTHER, Database, Session, quoted, same_key
from gristmill.values import dataclass

_AFTER = {"c": "deletes rows there", "n": "takes it from rows there", "d": "takes it from rows there"}


@dataclass(frozen=True)
class Reference:
    """A foreign key: its name, the table that has it (as named in SQL) and whether that is the one it refers to, the
    columns here and there, what it does when a row here goes (`c`, `n`, `d`, `r`, `a`, as Postgres says it), and
    whether the columns there can be read.
    """

    name: str
    table: str
    own: bool
    here: tuple[str, ...]
    there: tuple[str, ...]
    deletes: str
    readable: bool = True

    def __str__(self) -> str:
        return f"table {self.table} refers to it by {', '.join(self.here)} (foreign key {self.name})"


def refuse_unkeyed(found: Sequence[Reference], load: Load, shown: str) -> None:
    """For a replace: raises BadJob if rows cannot be told by the columns that others refer to, or if it cannot be seen
    whether they refer to rows that go.
    """
    for reference in found:
        if set(reference.here) != set(load.key):
            key = reference.here[0] if len(reference.here) == 1 else list(reference.here)
            one = len({frozenset(other.here) for other in found}) == 1
            raise BadJob(
                f"{shown}: {reference}, which {_AFTER.get(reference.deletes, 'forbids it')} when a replace removes the "
                f"old rows: {f'give key={key!r}, by which rows are updated, or ' * one}deliver with mode='upsert'"
            )
        if not reference.readable:
            raise BadJob(
                f"{shown}: {reference}, and this role cannot see whether it refers to rows that go: GRANT SELECT ON "
                f"{reference.table}, or deliver with mode='upsert'"
            )


def refuse_referenced(session: Session, database: Database, found: Sequence[Reference], load: Load, shown: str) -> None:
    """Raises BadJob for rows to which others refer, and which are not among the staged rows."""
    stage, target = database.table(load.stage), database.target()
    staged = f"EXISTS (SELECT 1 FROM {stage} AS {NEW} WHERE {{}})"
    for reference in found:
        pairs = zip(reference.here, reference.there, strict=True)
        refers = " AND ".join(f"{OTHER}.{quoted(there)} = {OLD}.{quoted(here)}" for here, there in pairs)
        gone = f"NOT {staged.format(same_key(session, database, load))}"
        if reference.own:  # a row that goes itself refers to nothing
            gone += f" AND {staged.format(same_key(session, database, load, OTHER))}"
        listed = ", ".join(f"{OLD}.{quoted(name)}" for name in reference.here)
        joined = f"{reference.table} AS {OTHER} JOIN {target} AS {OLD} ON {refers}"
        sql = f"SELECT count(*) OVER (), {listed} FROM {joined}"
        for count, *key in session.run(f"{sql} WHERE {gone} LIMIT 1"):
            raise BadJob(
                f"{shown}: {reference}, and {count:,} rows there refer to rows that are not in the result any more "
                f"(such as {', '.join(reference.here)} = {', '.join(map(repr, key))}): remove them there first, or "
                "deliver with mode='upsert', which leaves such rows (with delete=True the foreign key does as it says)"
            )

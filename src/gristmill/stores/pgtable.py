"""What hangs on a table of Postgres, as its catalog tells: what a table that takes its place would not have, which
others refer to it, and the rights that a role has there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from gristmill.errors import BadJob
from gristmill.stores.contract import STAGED, Load, StoreBusy
from gristmill.stores.references import Reference
from gristmill.stores.sql import MARKS, Session, Which, quoted, refuse_view

# Whatever depends on the table or its row type, but for its own indices, defaults, constraints and toast, which the
# staging table gets; and what `LIKE` leaves out.
_HANGS = """
SELECT 1 FROM pg_class c WHERE c.oid = to_regclass(?) AND (
    c.relkind <> 'r' OR c.relispartition OR c.relhassubclass OR c.relrowsecurity OR c.reloftype <> 0
    OR c.relowner <> (SELECT oid FROM pg_roles WHERE rolname = current_user)
    OR c.relpersistence <> 'p' OR c.relreplident <> 'd' OR c.reltablespace <> 0 OR c.reloptions IS NOT NULL
    OR c.relam <> (SELECT a.oid FROM pg_am a WHERE a.amname = current_setting('default_table_access_method'))
    OR EXISTS (SELECT FROM pg_class t WHERE t.oid = c.reltoastrelid AND t.reloptions IS NOT NULL)
    OR EXISTS (SELECT FROM aclexplode(c.relacl) a WHERE a.grantor <> c.relowner)
    OR EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid)
    OR EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND (
        a.attacl IS NOT NULL OR a.attoptions IS NOT NULL OR coalesce(a.attstattarget, -1) >= 0))
    OR EXISTS (SELECT FROM pg_constraint k WHERE k.conrelid = c.oid AND NOT k.convalidated)
    OR EXISTS (SELECT FROM pg_index x JOIN pg_class o ON o.oid = x.indexrelid WHERE x.indrelid = c.oid AND (
        x.indisclustered OR o.reltablespace <> 0
        OR o.reloptions IS NOT NULL AND EXISTS (SELECT FROM pg_constraint k WHERE k.conindid = o.oid)
        OR EXISTS (SELECT FROM pg_description t WHERE t.objoid = o.oid AND t.classoid = 'pg_class'::regclass)
        OR EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = o.oid AND coalesce(a.attstattarget, -1) >= 0)))
    OR EXISTS (SELECT FROM pg_description t JOIN pg_constraint k ON k.oid = t.objoid
        WHERE t.classoid = 'pg_constraint'::regclass AND k.conrelid = c.oid)
    OR EXISTS (SELECT FROM pg_seclabel s WHERE s.objoid = c.oid AND s.classoid = 'pg_class'::regclass)
    OR EXISTS (SELECT FROM pg_subscription_rel s WHERE s.srrelid = c.oid)
    OR EXISTS (SELECT FROM pg_publication_tables p JOIN pg_namespace n ON n.nspname = p.schemaname
        WHERE n.oid = c.relnamespace AND p.tablename = c.relname)
    OR EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid
        AND d.refclassid = 'pg_extension'::regclass)
    OR EXISTS (SELECT FROM pg_depend d WHERE (
            d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid
            OR d.refclassid = 'pg_type'::regclass AND d.refobjid IN (
                SELECT t.oid FROM pg_type t WHERE t.oid = c.reltype OR t.typelem = c.reltype))
        AND NOT CASE d.classid
            WHEN 'pg_type'::regclass THEN EXISTS (
                SELECT FROM pg_type t WHERE t.oid = d.objid AND (t.oid = c.reltype OR t.typelem = c.reltype))
            WHEN 'pg_class'::regclass THEN d.objid IN (c.oid, c.reltoastrelid) OR EXISTS (
                SELECT FROM pg_index x WHERE x.indexrelid = d.objid AND x.indrelid = c.oid)
            WHEN 'pg_attrdef'::regclass THEN EXISTS (
                SELECT FROM pg_attrdef f WHERE f.oid = d.objid AND f.adrelid = c.oid)
            WHEN 'pg_constraint'::regclass THEN EXISTS (
                SELECT FROM pg_constraint k WHERE k.oid = d.objid AND k.conrelid = c.oid
                AND k.contype IN ('c', 'n', 'p', 'u', 'x'))
            ELSE false END))
"""
# What a table (true) and one that was made like it have alike: columns in order, and constraints that are no index.
_COLUMNS = """
SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity::text, a.attgenerated::text,
    a.attcollation, a.attstorage::text, a.attcompression::text, pg_get_expr(f.adbin, f.adrelid),
    col_description(a.attrelid, a.attnum), a.attrelid = to_regclass(?)
FROM pg_attribute a LEFT JOIN pg_attrdef f ON f.adrelid = a.attrelid AND f.adnum = a.attnum
WHERE a.attrelid IN (to_regclass(?), to_regclass(?)) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
_CHECKS = """
SELECT conname, pg_get_constraintdef(oid), conrelid = to_regclass(?) FROM pg_constraint
WHERE conrelid IN (to_regclass(?), to_regclass(?)) AND contype = 'c' ORDER BY conname
"""
_REFERENCES = """
SELECT f.conname, format('%I.%I', n.nspname, o.relname), f.conrelid = f.confrelid,
    ARRAY(SELECT a.attname::text FROM unnest(f.confkey) WITH ORDINALITY k(at, n)
        JOIN pg_attribute a ON a.attrelid = f.confrelid AND a.attnum = k.at ORDER BY k.n),
    ARRAY(SELECT a.attname::text FROM unnest(f.conkey) WITH ORDINALITY k(at, n)
        JOIN pg_attribute a ON a.attrelid = f.conrelid AND a.attnum = k.at ORDER BY k.n),
    f.confdeltype::text, has_table_privilege(f.conrelid, 'SELECT') AND NOT row_security_active(f.conrelid)
FROM pg_constraint f JOIN pg_class o ON o.oid = f.conrelid JOIN pg_namespace n ON n.oid = o.relnamespace
WHERE f.contype = 'f' AND f.confrelid = to_regclass(?) AND NOT (f.confdeltype = 'a' AND f.condeferrable)
ORDER BY 1, 2
"""
# Whether a column is more than its name and type, or anything but an index of ours depends on it.
_MORE = """
SELECT 1 FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = to_regclass(?) AND a.attname = ? AND (
    a.attnotnull OR a.atthasdef OR a.attidentity <> '' OR a.attcollation <> t.typcollation
    OR col_description(a.attrelid, a.attnum) IS NOT NULL
    OR EXISTS (SELECT FROM pg_depend d WHERE d.refclassid = 'pg_class'::regclass AND d.refobjid = a.attrelid
        AND d.refobjsubid = a.attnum AND NOT EXISTS (SELECT FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid
            WHERE d.classid = 'pg_class'::regclass AND x.indexrelid = d.objid AND x.indrelid = a.attrelid
            AND NOT x.indisunique AND i.relname ~ ?)))
"""


# Tables of marks in other schemas.
_PLACES = """
SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relname = ? AND c.relkind = 'r' AND n.nspname <> ? AND has_schema_privilege(n.oid, 'USAGE')
    AND has_table_privilege(c.oid, 'SELECT') AND 4 = (SELECT count(*) FROM pg_attribute a WHERE a.attrelid = c.oid
        AND a.attname IN ('target', 'which', 'sink', 'body') AND a.atttypid = 'text'::regtype) ORDER BY c.oid
"""
_OWN_INDEX = """
SELECT 1 FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid WHERE x.indrelid = to_regclass(?) AND i.relname ~ ?
"""
_AT_ONCE = 100  # tables of marks that are asked with one statement: each is locked until it is answered
_WAITS = "1s"  # how long it is waited for whoever has locked the marks of another schema


def which(
    session: Session, schema: str, table: str, shown: str, *, unmoved: set[tuple[str, ...]] | None = None
) -> Which:
    """By their numbers in the catalog, and by whose that is: on another server, to which all was restored, the same
    ones may be those of other tables. Those of views do not count, whose rows are elsewhere. A table that was moved to
    this schema has left its marks in another one: that is looked for where none are beside it. Whoever reads keeps that
    it is `unmoved`, for as long as it is: whatever moves a table writes its row in the catalog anew.
    """
    marks, target = (f"{quoted(schema)}.{quoted(name)}" for name in (MARKS, table))

    def elsewhere(told: str) -> bool:
        number, beside, *of = told.split()
        # In a copy of the table of marks that it was written into, a mark is of the table that was copied with it,
        # whether or not the original is there as well; unless that is in this schema, too.
        sql = (
            "SELECT 1 FROM pg_class WHERE oid = ?::oid AND oid IS DISTINCT FROM to_regclass(?) AND relkind IN "
            "('r', 'p') AND (to_regclass(?) = ?::oid OR relnamespace = to_regnamespace(?))"
        )
        return (not at or of == at) and bool(session.run(sql, number, target, marks, beside, quoted(schema)))

    at: list[str] = []
    may = "SELECT has_function_privilege(to_regprocedure('pg_catalog.pg_control_system()'), 'EXECUTE')"
    if session.run(may)[0][0]:
        catalog = "SELECT c.system_identifier, d.oid FROM pg_control_system() c, pg_database d"
        at = list(map(str, session.run(f"{catalog} WHERE d.datname = current_database()")[0]))

    def left(spared: Callable[[], bool]) -> Sequence[str]:
        own, locked = tuple(map(str, found[0])), list[str]()
        if unmoved is not None and own in unmoved:
            return ()
        places = [row[0] for row in session.run(_PLACES, MARKS, schema)]
        lone = unmoved is not None and (not session.run(_OWN_INDEX, target, f"^{STAGED}") or spared())
        some = (places[first : first + _AT_ONCE] for first in range(0, len(places), _AT_ONCE))
        each = (_left(session, one, f"{own[0]} %", shown, locked if lone else None) for one in some)
        there = [place for one in each for place in one]
        if unmoved is not None and not there and not locked:
            unmoved.clear()  # of another table
            unmoved.add(own)
        return there

    sql = (
        "SELECT c.oid, to_regclass(?)::oid, c.xmin::text FROM pg_class c WHERE c.oid = to_regclass(?) AND c.relkind IN "
        "('r', 'p')"
    )
    found = session.run(sql, marks, target) if at else []
    if not found:
        return Which(table, "", marks, elsewhere)
    return Which(table, " ".join([*map(str, found[0][:2]), *at]), marks, elsewhere, left)


def _left(
    session: Session, places: Sequence[str], own: str, shown: str, locked: list[str] | None = None
) -> Sequence[str]:
    """In which other schemas marks of a table were left: of many at once, and if one is locked or gone, of each half.
    That others lock theirs is no matter of whoever reads a table that nothing tells to be delivered, or that has come
    with its marks (and has them as `locked`); neither a delivery nor another lookup goes on without marks that may be
    there. Raises StoreBusy.
    """
    from psycopg import errors

    session.run("SAVEPOINT gristmill")
    try:
        waits = len(places) == 1 and locked is None
        if waits:
            session.run(f"SET LOCAL lock_timeout = '{_WAITS}'")
        session.run(f"LOCK TABLE {', '.join(places)} IN ACCESS SHARE MODE{'' if waits else ' NOWAIT'}")
        each = (f"SELECT {n} WHERE EXISTS (SELECT FROM {at} WHERE which LIKE ?)" for n, at in enumerate(places))
        return [places[n] for (n,) in session.run(" UNION ALL ".join(each), *(own,) * len(places))]
    except (errors.UndefinedTable, errors.InvalidSchemaName, errors.LockNotAvailable) as e:
        if len(places) == 1:
            if not isinstance(e, errors.LockNotAvailable):
                return []
            if locked is not None:
                locked += places
                return []
            why = "locked by others, and marks of this table may be there: none are beside it"
            raise StoreBusy(f"{shown}: {places[0]} is {why}") from e
    finally:
        session.run("ROLLBACK TO SAVEPOINT gristmill")
        session.run("RELEASE SAVEPOINT gristmill")
    half = len(places) // 2
    return [at for some in (places[:half], places[half:]) for at in _left(session, some, own, shown, locked)]


def hangs(session: Session, table: str) -> bool:
    """Whether anything hangs on a table, or is set for it, that another one in its place would not have: then it is to
    stay the table that it is.
    """
    return bool(session.run(_HANGS, table))


def is_plain(session: Session, table: str, column: str) -> bool:
    """Whether a column could be dropped and made anew, and nothing were lost but its values and indices of ours."""
    return not session.run(_MORE, table, column, f"^{STAGED}")


def made_like(session: Session, stage: str, table: str, new: Sequence[str]) -> bool:
    """Whether a table is still as another one was when this was made like it, but for `new` columns at the end: else
    somebody has changed that meanwhile.
    """
    (there, staged), (checks, own) = (_both(session, sql, table, stage) for sql in (_COLUMNS, _CHECKS))
    return staged[: len(there)] == there and all(row[0] in new for row in staged[len(there) :]) and own == checks


def _both(session: Session, sql: str, table: str, stage: str) -> list[list[tuple[Any, ...]]]:
    """What is asked of two tables at once."""
    rows = session.run(sql, table, table, stage)
    return [[row[:-1] for row in rows if row[-1] == of] for of in (True, False)]


def keeps_rows(session: Session, table: str) -> bool:
    """Whether rows that are deleted would not just go: policies may hide some from this role, and triggers and rules of
    others do what they do then. TRUNCATE passes them by.
    """
    sql = (
        "SELECT 1 FROM pg_class c WHERE c.oid = to_regclass(?) AND (row_security_active(c.oid) OR EXISTS (SELECT FROM "
        "pg_rewrite r WHERE r.ev_class = c.oid AND r.ev_type = '4') OR EXISTS (SELECT FROM pg_trigger g WHERE "
        "g.tgrelid = c.oid AND NOT g.tgisinternal AND g.tgtype & 8 <> 0))"
    )
    return bool(session.run(sql, table))


# ---------------------------------------------------------------- other tables


def references(session: Session, table: str) -> list[Reference]:
    """The foreign keys of other tables that refer to a table, for which a row that is deleted and inserted again has
    been gone; beside them those of its own. What is looked at when the transaction ends alone is none of them.
    """
    rows = session.run(_REFERENCES, table)
    found = [Reference(name, at, own, tuple(h), tuple(t), how, bool(r)) for name, at, own, h, t, how, r in rows]
    return found if any(not reference.own for reference in found) else []


# ---------------------------------------------------------------- rights


def refuse_rights(session: Session, table: str, rights: Sequence[str], shown: str) -> None:
    """Raises BadJob for rights that the role does not have on a table that is there."""
    rows = session.run(
        "SELECT r, quote_ident(current_user) FROM unnest(?::text[]) AS r WHERE to_regclass(?) IS NOT NULL AND NOT CASE "
        "WHEN r IN ('SELECT', 'INSERT', 'UPDATE') THEN has_any_column_privilege(to_regclass(?), r) "
        "ELSE has_table_privilege(to_regclass(?), r) END",
        *(list(rights), table, table, table),
    )
    if rows:
        lacking, role = ", ".join(row[0] for row in rows), rows[0][1]
        raise BadJob(f"{shown}: role {role} may not {lacking}: GRANT {lacking} ON {table} TO {role}")


def refuse_schema(session: Session, schema: str, shown: str) -> None:
    """Raises BadJob for a schema that is not there, or in which the role may not create what is staged."""
    rows = session.run(
        "SELECT quote_ident(current_user), has_schema_privilege(n.oid, 'USAGE') AND "
        "has_schema_privilege(n.oid, 'CREATE') FROM pg_namespace n WHERE n.nspname = ?",
        schema,
    )
    if not rows:
        raise BadJob(f"{shown}: there is no schema {schema}: CREATE SCHEMA {quoted(schema)}, or name another")
    if not rows[0][1]:
        role = rows[0][0]
        raise BadJob(
            f"{shown}: role {role} may not create tables in schema {schema}, where rows are staged: "
            f"GRANT USAGE, CREATE ON SCHEMA {quoted(schema)} TO {role}"
        )


def owned(session: Session, table: str) -> bool:
    """Whether the role may change a table."""
    sql = "SELECT pg_has_role(c.relowner, 'USAGE') FROM pg_class c WHERE c.oid = to_regclass(?)"
    return bool(session.run(sql, table)[0][0])


def takes_index(session: Session, table: str) -> bool:
    """Whether the role may build an index of a table, and it is none of views."""
    sql = "SELECT 1 FROM pg_class c WHERE c.oid = to_regclass(?) AND c.relkind <> 'v'"
    return bool(session.run(sql, table)) and owned(session, table)


def refuse_changes(session: Session, table: str, load: Load, lacking: Collection[str], shown: str) -> None:
    """Raises BadJob for columns and indices that are to be added to a table of another role (`lacking` are those that
    an index is `lacking` of), and for a column of the result whose values the table makes itself.
    """
    own = {row[0]: row[3] for row in session.run(_COLUMNS, table, table, table)}
    if made := next((name for name in load.schema.names if own.get(name) == "a"), None):
        raise BadJob(
            f"{shown}: column {made!r} is GENERATED ALWAYS AS IDENTITY, so that the table makes its values: leave "
            f"it out of the result (drop=), or ALTER COLUMN {quoted(made)} SET GENERATED BY DEFAULT"
        )
    if owned(session, table):
        return
    new = [f"column {name!r}" for name in load.schema.names if name not in own]
    new += [f"an index of {name!r}" for name in lacking]
    if new:
        raise BadJob(f"{shown}: {', '.join(new)} cannot be added, as another role owns the table: let that one do it")


# ---------------------------------------------------------------- kinds of tables


def refuse_kind(session: Session, table: str, load: Load, shown: str) -> None:
    """Raises BadJob for a view, whose rows are those of another table."""
    kind = session.run("SELECT relkind::text FROM pg_class WHERE oid = to_regclass(?)", table)[0][0]
    if kind == "m" or (kind == "v" and (load.mode == "replace" or load.index)):
        refuse_view(shown)


def meddles(session: Session, table: str, load: Load) -> bool:
    """Whether a table's triggers or rules, or those of its partitions, may keep rows from it or add some. Not where
    rows cannot be counted: a view may not show those that were inserted, nor may a policy, and a role that may do
    nothing but insert does not keep others from doing so.
    """
    sql = """
    SELECT 1 FROM pg_class c WHERE c.oid = to_regclass(?) AND (c.relkind <> 'v' OR ?) AND NOT row_security_active(c.oid)
        AND has_table_privilege(c.oid, 'UPDATE, DELETE, TRUNCATE')
        AND EXISTS (WITH RECURSIVE own(id) AS (SELECT c.oid UNION SELECT i.inhrelid FROM pg_inherits i JOIN own ON
            own.id = i.inhparent) SELECT FROM own WHERE c.relkind = 'v'
            OR EXISTS (SELECT FROM pg_rewrite r WHERE r.ev_class = own.id AND r.ev_type <> '1')
            OR EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = own.id AND NOT g.tgisinternal))
    """
    return bool(session.run(sql, table, load.mode == "upsert"))


def generated(session: Session, table: str) -> list[str]:
    """The columns of a table that are an expression of others."""
    sql = "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(?) AND attnum > 0 AND attgenerated <> ''"
    return [row[0] for row in session.run(sql, table)]

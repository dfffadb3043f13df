"""Which table of which Postgres an address leads to: servers have several addresses, and names are looked for in the
schemas that an address, a role or a database says.
"""

from __future__ import annotations

import contextlib

from gristmill.errors import GristmillError
from gristmill.process.extras import require
from gristmill.stores.contract import Place
from gristmill.stores.pgsession import Transaction, connected
from gristmill.stores.sql import quoted
from gristmill.stores.unmoved import both
from gristmill.values import dataclass

_HERE = (
    "SELECT to_regclass(?)::oid, oid, extract(epoch FROM pg_postmaster_start_time())::text, pg_is_in_recovery() "
    "FROM pg_database WHERE datname = current_database()"
)
_MAY = "SELECT has_function_privilege(to_regprocedure('pg_catalog.pg_control_system()'), 'EXECUTE')"


@dataclass(frozen=True)
class Identity:
    """A table (None: there is none) and its database by their numbers, and their server: since when it runs, in seconds
    since 1970, which each session tells alike, whether it is a standby, and the number that it shares with its standbys
    and copies (None: that is kept from this role).
    """

    table: int | None
    database: int
    started: str
    standby: bool
    system: int | None = None


def same(read: Place, to: Place) -> bool | None:
    """Whether two addresses lead to one table, also to a copy on a standby; None if that cannot be told."""
    with contextlib.suppress(GristmillError):
        psycopg = require("psycopg", "postgres", to.shown)
        with contextlib.suppress(psycopg.Error):
            found = both(_identity, read, to)
            return None if found is None else are_same(*found)
    return None


def are_same(one: Identity, other: Identity) -> bool | None:
    """Whether they are one table; None if that cannot be told."""
    if one.table is None:
        return None
    if (one.table, one.database) != (other.table, other.database):
        return False
    if one.started == other.started or not (one.standby or other.standby):
        return one.started == other.started  # a copy that runs by itself has the same numbers
    return None if one.system is None or other.system is None else one.system == other.system


def _identity(place: Place) -> Identity:
    schema, _, table = place.name.rpartition(".")
    name = ".".join(quoted(part) for part in (schema, table) if part)
    with contextlib.closing(connected(place)) as connection:
        session = Transaction(connection, place.shown)
        (found,) = session.run(_HERE, name)
        may = session.run(_MAY)[0][0]
        return Identity(*found, *(session.run("SELECT system_identifier FROM pg_control_system()")[0] if may else ()))

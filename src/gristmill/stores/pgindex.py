"""Indices of Postgres: what a table has, what is asked for, and whether it can be built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from gristmill.arrow.casts import is_list
from gristmill.arrow.schemas import storage
from gristmill.errors import BadJob
from gristmill.process.extras import require
from gristmill.stores.contract import Load, Place
from gristmill.stores.pgvector import OPERATORS
from gristmill.stores.sql import Session
from gristmill.stores.vectors import metric_of
from gristmill.values import dataclass

_TRIAL = "pg_temp.gristmill_trial"
# Of a table's indices: name, columns, and what an Index tells.
_ALL = """
SELECT i.relname,
    (SELECT string_agg(a.attname, ',' ORDER BY k.n) FROM unnest(x.indkey) WITH ORDINALITY k(at, n)
        JOIN pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = k.at),
    (SELECT pg_get_constraintdef(c.oid) FROM pg_constraint c
        WHERE c.conindid = i.oid AND c.contype IN ('p', 'u', 'x') AND c.conrelid = x.indrelid),
    CASE WHEN x.indisunique THEN 'UNIQUE ' ELSE '' END,
    substr(pg_get_indexdef(i.oid), 1 + length(format('CREATE %sINDEX %I ON %s%I.%I',
        CASE WHEN x.indisunique THEN 'UNIQUE ' END, i.relname, CASE WHEN i.relkind = 'I' THEN 'ONLY ' END,
        n.nspname, t.relname))),
    m.amname, o.opcname, o.opcdefault
FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_class t ON t.oid = x.indrelid
    JOIN pg_namespace n ON n.oid = t.relnamespace JOIN pg_am m ON m.oid = i.relam
    JOIN pg_opclass o ON o.oid = x.indclass[0]
WHERE x.indrelid = to_regclass(?) ORDER BY i.relname
"""


@dataclass(frozen=True)
class Index:
    """An index: its columns, the constraint that it serves, whether it is `UNIQUE`, what follows the table's name in
    its definition, its method, and the operators of its first column, with whether those are its method's own.
    """

    columns: str
    constraint: str | None
    unique: str
    using: str
    method: str
    operators: str
    usual: bool

    def serves(self, column: str, method: str, operators: str) -> bool:
        """Whether it is what is asked for a column."""
        same = self.columns == column and self.method == method
        return same and (self.operators == operators or (not operators and self.usual))


def indices(session: Session, table: str) -> dict[str, Index]:
    """The indices of a table by name."""
    return {name: Index(columns or "", *about) for name, columns, *about in session.run(_ALL, table)}


def asked(load: Load) -> dict[str, tuple[str, str]]:
    """The indices that are asked for: method and operators, by column."""
    return {column: _method(how, load.schema.field(column).type) for column, how in load.index.items()}


def _method(how: Any, kind: pa.DataType) -> tuple[str, str]:
    """An index's method and operators: `hnsw`, `{kind: hnsw, metric: l2}`, `{kind: hnsw, ops: halfvec_l2_ops}`."""
    about = {"kind": how} if isinstance(how, str) else dict(how) if isinstance(how, Mapping) else {"kind": "btree"}
    method = str(about.get("kind", "btree"))
    ops = about.get("ops", "")
    if not ops and method in ("hnsw", "ivfflat") and is_list(storage(kind)):
        ops = OPERATORS[metric_of(about.get("metric", "cosine"), "index")]
    if not (method.isidentifier() and (not ops or str(ops).isidentifier())):
        raise BadJob(f"index {how!r}: give a method of Postgres, such as btree or hnsw")
    return method, str(ops)


def refuse_unbuilt(session: Session, column: str, kind: str, how: tuple[str, str], place: Place) -> None:
    """Raises BadJob for an index that Postgres does not build of a column of the type `kind`: it is tried on a table of
    this transaction that nobody sees, where the user may make one, and is gone after.
    """
    psycopg = require("psycopg", "postgres", place.shown)
    method, operators = how
    limits = psycopg.errors.ProgramLimitExceeded
    refused = (psycopg.ProgrammingError, psycopg.NotSupportedError, psycopg.DataError, limits)
    session.run("SAVEPOINT gristmill_trial")
    made = False
    try:
        session.run(f"CREATE TEMPORARY TABLE {_TRIAL.partition('.')[2]} (c {kind})")
        made = True
        session.run(f"CREATE INDEX ON {_TRIAL} USING {method} (c{f' {operators}' if operators else ''})")
    except refused as e:
        if made:
            asked_for = f"{method}{f' ({operators})' if operators else ''}"
            raise BadJob(
                f"{place.shown}: column {column!r}: there can be no index {asked_for} of its type, {kind}: Postgres "
                f"says: {place.words(e)}: ask for another one, or cast the column in a step (vectors to float32)"
            ) from e
    session.run("ROLLBACK TO SAVEPOINT gristmill_trial")

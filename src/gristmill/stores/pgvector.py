"""Searching vectors in Postgres, with the extension pgvector: its operators are our metrics."""

from __future__ import annotations

from typing import Any

from gristmill.stores.contract import STAGED, Metric, Search
from gristmill.stores.sql import Session

OPERATORS: dict[Metric, str] = {"cosine": "vector_cosine_ops", "l2": "vector_l2_ops", "ip": "vector_ip_ops"}
_SIGNS: dict[Metric, str] = {"cosine": "<=>", "l2": "<->", "ip": "<#>"}
EF = (100, 1000)  # candidates that HNSW looks at: at least, where pgvector's default is 40, and at most, as it allows

_INSTALLED = """
SELECT quote_ident(n.nspname), n.nspname = ANY (current_schemas(true)), current_setting('search_path')
FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
WHERE e.extname = 'vector' AND has_schema_privilege(n.oid, 'USAGE')
"""


def installed(session: Session) -> tuple[bool, str]:
    """Whether the database has pgvector for this role, and the statement by which a transaction finds its types and
    operators, if they are in a schema that is not searched; it takes no snapshot.
    """
    rows = session.run(_INSTALLED)
    if not rows or rows[0][1]:
        return bool(rows), ""
    schema, _, before = rows[0]
    searched = ", ".join([before] * (before not in ("", '""')) + [schema])
    return True, f"SET LOCAL search_path TO {searched}"


def indexed_by(session: Session, table: str, column: str) -> Metric | None:
    """The metric of an index of a column: of several that of the latest of ours, if there is one; None if there is no
    such index.
    """
    found = session.run(
        "SELECT o.opcname FROM pg_index x JOIN pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = x.indkey[0] "
        "JOIN pg_opclass o ON o.oid = x.indclass[0] JOIN pg_class i ON i.oid = x.indexrelid "
        "WHERE x.indrelid = to_regclass(?) AND a.attname = ? AND x.indisvalid ORDER BY i.relname ~ ? DESC, i.oid DESC",
        *(table, column, f"^{STAGED}"),
    )
    metrics = {operators: metric for metric, operators in OPERATORS.items()}
    return next((metrics[row[0]] for row in found if row[0] in metrics), None)


def nearest(
    session: Session, table: str, column: str, listed: str, search: Search, metric: Metric
) -> list[list[tuple[Any, ...]]]:
    """For each vector the nearest rows: the distance, then the columns listed."""
    session.run("SELECT set_config('hnsw.ef_search', ?, true)", str(min(EF[1], max(EF[0], 2 * search.k))))
    version = session.run("SELECT extversion FROM pg_extension WHERE extname = 'vector'")[0][0]
    if tuple(int(part) for part in version.split(".")[:2]) >= (0, 8):  # goes on where filters leave fewer than k
        session.run("SELECT set_config('hnsw.iterative_scan', 'strict_order', true)")
    sql = f"SELECT {column} {_SIGNS[metric]} ?::vector, {listed} FROM {table} ORDER BY 1 LIMIT ?"
    found = (session.run(sql, _text(vector), search.k) for vector in search.vectors.tolist())
    return [[row for row in one if row[0] is not None and row[0] == row[0]] for one in found]


def _text(vector: list[float]) -> str:
    return f"[{','.join(map(repr, vector))}]"

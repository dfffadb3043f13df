"""SQL conditions on rows, checked when planning and evaluated by DuckDB on tables in memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.errors import BadJob, MissingExtra

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SqlWhere"]

# Functions whose answer is another one on the next attempt: a shard that is tried again would keep other rows.
_FICKLE = frozenset(
    [
        "random",
        "setseed",
        "uuid",
        "gen_random_uuid",
        "uuidv4",
        "uuidv7",
        "nextval",
        "currval",
        "now",
        "current_timestamp",
        "get_current_timestamp",
        "get_current_time",
        "current_date",
        "today",
        "transaction_timestamp",
        "current_localtime",
        "current_localtimestamp",
    ]
)
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "threads": 1,
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    "lock_configuration": "true",
}


class SqlWhere:
    """A condition such as `lang = 'en' AND length(text) > 0`, in DuckDB's SQL. Where it is null it does not hold.

    `columns` are those of `schema` that it reads. It can be pickled; a worker compiles it again. Raises BadJob where
    the expression is not a condition on one row of `schema`, with the columns there are.
    """

    def __init__(self, expression: str, schema: pa.Schema) -> None:
        self.expression = expression
        self._connection: Any = None
        self._lock = threading.Lock()
        names = list(dict.fromkeys(_columns(self, schema.names)))
        self.columns: tuple[str, ...] = tuple(n for n in schema.names if n in names)
        self._check(schema)

    def __repr__(self) -> str:
        return f"SqlWhere({self.expression!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"expression": self.expression, "columns": self.columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _connection=None, _lock=threading.Lock())

    def mask(self, rows: pa.Table) -> np.ndarray:
        """One bool a row, in order. `rows` has at least `columns`. Raises BadJob where a value stops the expression."""
        if not rows.num_rows:
            return np.zeros(0, dtype=bool)
        with self._lock:
            db = self._db()
            db.register("rows", _readable(rows, self.columns))
            try:
                found = db.execute(f"SELECT coalesce((\n{self.expression}\n), false) AS holds FROM rows").fetchnumpy()[
                    "holds"
                ]
            except Exception as e:
                raise BadJob(
                    f"{self._named}: {_line(e)} (TRY_CAST gives null where a value cannot be converted)"
                ) from e
            finally:
                db.unregister("rows")
        return np.asarray(np.ma.filled(found, False), dtype=bool)

    @property
    def _named(self) -> str:
        return f"condition {self.expression!r}"

    def _db(self) -> Any:
        found = self._connection
        if found is None:
            try:
                import duckdb
            except ImportError as e:
                raise MissingExtra(f"{self._named}: conditions need DuckDB: pip install duckdb") from e
            found = self._connection = duckdb.connect(":memory:", config=_CONFIG)
        return found

    def _check(self, schema: pa.Schema) -> None:
        """Bind the expression against the columns' types."""
        db = self._db()
        try:
            db.register("rows", _readable(schema.empty_table(), self.columns))
            db.execute(f"SELECT 1 FROM rows WHERE (\n{self.expression}\n)").fetchall()
            kind = db.execute(f"DESCRIBE SELECT (\n{self.expression}\n) AS holds FROM rows").fetchall()[0][1]
        except Exception as e:
            raise BadJob(f"{self._named}: {_line(e)}; the columns are {', '.join(schema.names)}") from e
        finally:
            db.unregister("rows")
        if kind not in ("BOOLEAN", "NULL", '"NULL"'):
            raise BadJob(f"{self._named} gives {kind}, not true or false: compare it with something")


def _columns(where: SqlWhere, names: list[str]) -> Iterator[str]:
    """The columns that an expression may mean. Raises BadJob for what is more than a condition on one row."""
    if not str(where.expression or "").strip():
        raise BadJob(f"condition {where.expression!r} is empty: give one such as \"lang = 'en'\"")
    node = _parsed(where)
    by_name = {n.lower(): n for n in names} | {n: n for n in names}  # DuckDB's names ignore case
    for part in _nodes(node["where_clause"]):
        if part.get("class") == "SUBQUERY":
            raise BadJob(f"{where._named} selects from elsewhere: only the row's own columns can be used")
        if part.get("class") == "FUNCTION" and part.get("function_name", "").lower() in _FICKLE:
            raise _fickle(where, part["function_name"])
        if part.get("class") == "STAR" or part.get("type") == "STAR":
            yield from names
        if part.get("class") == "COLUMN_REF":
            path = [str(p) for p in part.get("column_names", ())]
            found = [by_name.get(p, by_name.get(p.lower())) for p in path[:2]]
            yield from (f for f in found if f is not None)
            if found == [None] and path[0].lower() in _FICKLE:
                raise _fickle(where, path[0])


def _fickle(where: SqlWhere, name: str) -> BadJob:
    hint = "use sample= for a random part, or write the time out"
    return BadJob(f"{where._named} calls {name}, which gives another answer on another attempt: {hint}")


def _readable(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """The columns of a condition as DuckDB takes them; a column of nulls where it reads none, for the row count."""
    import pyarrow as pa

    if not columns:
        return pa.table({"": pa.nulls(rows.num_rows)})
    rows = rows.select(list(columns))
    for i, field in enumerate(rows.schema):
        if pa.types.is_float16(field.type):
            rows = rows.set_column(i, field.name, rows.column(i).cast(pa.float32()))
    return rows


def _parsed(where: SqlWhere) -> Any:
    sql = f"SELECT 1 FROM rows WHERE (\n{where.expression}\n)"
    answer = json.loads(where._db().execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchall()[0][0])
    if answer.get("error"):
        raise BadJob(f"{where._named}: {_line(answer.get('error_message', 'cannot be parsed'))}")
    statements = answer["statements"]
    node = statements[0]["node"]
    more = node.get("modifiers") or node.get("group_expressions") or node.get("having") or node.get("qualify")
    if len(statements) != 1 or node.get("type") != "SELECT_NODE" or more or node.get("sample"):
        raise BadJob(f"{where._named} is more than one condition: give what could follow WHERE, alone")
    return node


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
        for value in tree.values():
            yield from _nodes(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _nodes(value)


def _line(error: object) -> str:
    """DuckDB's message on one line, without its drawing of where in the SQL (which is not what the person wrote)."""
    text = str(error).partition("\n\nLINE ")[0].partition("\nLINE ")[0].partition("Candidate bindings")[0]
    return " ".join(text.split())

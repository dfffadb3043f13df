"""SQL conditions on rows, checked when planning and evaluated by DuckDB on tables in memory."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.arrow.spilling import tamed
from gristmill.errors import BadJob, MissingExtra, did_you_mean
from gristmill.process.startup import imported

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SqlWhere", "columns_of"]

# DuckDB's list of functions says nothing about these, or the wrong thing; some are words without parentheses.
_CLOCKS = frozenset(
    ["current_localtime", "current_localtimestamp", "current_timestamp", "current_time", "localtime", "localtimestamp"]
)
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "threads": 1,
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
}
_EXAMPLE = "give one in SQL, such as \"lang = 'en' AND stars >= 3\""
_LOWER = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz")


def load() -> None:
    """Import DuckDB, which takes long: before conditions are evaluated."""
    with contextlib.suppress(ImportError):  # the first condition says what to install
        imported("duckdb")


def columns_of(expression: str, schema: pa.Schema, key: str = "") -> tuple[str, ...]:
    """The columns that a condition reads. Raises BadJob, as SqlWhere."""
    with contextlib.closing(SqlWhere(expression, schema, key)) as where:
        return where.columns


class SqlWhere:
    """A condition such as `lang = 'en' AND length(text) > 0`, in DuckDB's SQL. It does not hold if it is null.

    `columns` are those of `schema` that it reads; of two that differ only in case, the one that is spelled exactly as
    in the expression. Instants are read and shown in UTC, on every machine. It can be pickled; a worker compiles it
    again. `key` is how errors call the option that it was given by. Raises BadJob if the expression is not a condition
    on one row of `schema` with the columns there are; if its result may differ on another attempt; or if it reads two
    names that are the same to DuckDB, which ignores case. Whoever makes one closes it: DuckDB has threads.
    """

    def __init__(self, expression: str, schema: pa.Schema, key: str = "") -> None:
        self.expression, self._key = expression, key
        self._connection: Any = None
        self._lock = threading.Lock()
        self._process = os.getpid()
        try:
            names = set(_columns(self, schema.names))
            self.columns: tuple[str, ...] = tuple(n for n in schema.names if n in names)
            _check_apart(self, [schema.field(n) for n in self.columns])
            self._check(schema)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"SqlWhere({self.expression!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"expression": self.expression, "columns": self.columns, "_key": self._key}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _connection=None, _lock=threading.Lock(), _process=os.getpid())

    def close(self) -> None:
        """End its connection. The next rows open another."""
        self._begin_in_a_fork()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def mask(self, rows: pa.Table) -> np.ndarray:
        """One bool per row, in order. `rows` has at least `columns`. Raises BadJob if a value stops the expression."""
        if not rows.num_rows:
            return np.zeros(0, dtype=bool)
        self._check_durations(rows)
        self._begin_in_a_fork()
        with self._lock:
            db = self._db()
            db.register("rows", _readable(rows, self.columns))
            try:
                found = db.execute(self._evaluated).fetchnumpy()
            except Exception as e:
                raise BadJob(
                    f"{self._named}: {_line(e)} (TRY_CAST gives null where a value cannot be converted)"
                ) from e
            finally:
                db.unregister("rows")
        first, *others = (np.asarray(np.ma.filled(holds, False), dtype=bool) for holds in found.values())
        return functools.reduce(np.logical_and, others, first)

    @property
    def _evaluated(self) -> str:
        """The SQL that decides, also in `_check`. COLUMNS(…) makes several columns of it, all of which must hold."""
        return f"SELECT (\n{self.expression}\n) AS holds FROM rows"

    @property
    def _named(self) -> str:
        return f"{self._key}{': ' if self._key else ''}condition {self.expression!r}"

    def _begin_in_a_fork(self) -> None:
        """There, the connection has no threads, and nobody may let go of the lock."""
        if self._process != os.getpid():
            self._connection, self._lock, self._process = None, threading.Lock(), os.getpid()

    def _db(self) -> Any:
        found = self._connection
        if found is None:
            try:
                duckdb = imported("duckdb")
            except ImportError as e:
                raise MissingExtra(f"{self._named}: conditions need DuckDB: pip install duckdb") from e
            found = tamed(duckdb.connect(":memory:", config=_CONFIG))
            found.execute("SET TimeZone = 'UTC'; SET lock_configuration = true")
            self._connection = found
        return found

    def _check_durations(self, rows: pa.Table) -> None:
        """Raises BadJob for a duration that DuckDB, whose intervals are of microseconds, would cut off."""
        from gristmill.arrow.casts import Lossy, lossless

        for name in self.columns:
            kind = rows.schema.field(name).type
            if (known := _of_microseconds(kind)) != kind:
                try:
                    lossless(rows.column(name), known)
                except Lossy as e:
                    raise BadJob(
                        f"{self._named}: column {name!r} has durations with digits below a microsecond, which SQL does "
                        "not compare: filter with a function: gm.filter(f), or steps: [{filter: 'module:f'}]"
                    ) from e

    def _check(self, schema: pa.Schema) -> None:
        """Bind the expression against the columns' types: as a condition, which has no aggregates, and as evaluated."""
        db = self._db()
        try:
            db.register("rows", _readable(schema.empty_table(), self.columns))
            db.execute(f"SELECT 1 FROM rows WHERE (\n{self.expression}\n)").fetchall()
            kinds = [kind for _, kind, *_ in db.execute(f"DESCRIBE {self._evaluated}").fetchall()]
        except Exception as e:
            raise BadJob(f"{self._named}: {_unbound(_line(e), schema.names)}") from e
        finally:
            db.unregister("rows")
        if unfit := [kind for kind in kinds if kind not in ("BOOLEAN", "NULL", '"NULL"')]:
            raise BadJob(f"{self._named} gives {unfit[0]}, not true or false: compare it with something")


def _columns(where: SqlWhere, names: list[str]) -> Iterator[str]:
    """The columns that an expression may mean. Raises BadJob for anything more than a condition on one row."""
    if not str(where.expression or "").strip():
        raise BadJob(f"condition {where.expression!r} is empty: {_EXAMPLE}")
    fickle = _fickle(where._db())
    for part in _nodes(_parsed(where)["where_clause"]):
        if part.get("class") == "SUBQUERY":
            raise BadJob(f"{where._named} selects from another table: only the row's own columns can be used")
        if part.get("class") == "FUNCTION":
            name = part.get("function_name", "").lower()
            if name in fickle or (name == "age" and len(part["arguments"]) < 2):  # since today
                raise _unlike(where, name)
        if part.get("class") == "STAR" or part.get("type") == "STAR":
            yield from names
        if part.get("class") == "COLUMN_REF":
            path = [str(p) for p in part.get("column_names", ())]
            first = _meant(where, path[0], names)
            yield from first
            if len(path) > 1 and _folded(path[0]) == "rows":
                yield from _meant(where, path[1], names)
            if len(path) == 1 and not first and path[0].lower() in fickle:
                raise _unlike(where, path[0])


def _folded(name: str) -> str:
    """A name as DuckDB compares it: the case of ASCII letters does not count."""
    return name.translate(_LOWER)


def _meant(where: SqlWhere, name: str, names: Sequence[str]) -> list[str]:
    """The column that a name in an expression stands for, none or one. Raises BadJob if it may be one of several."""
    if name in names:
        return [name]
    alike = [n for n in names if _folded(n) == _folded(name)]
    if len(alike) > 1:
        listed = ", ".join(map(repr, alike))
        raise BadJob(f"{where._named}: {name!r} is ambiguous, as it matches the columns {listed}: write the exact name")
    return alike


def _check_apart(where: SqlWhere, fields: Iterable[pa.Field], path: str = "") -> None:
    """Raises BadJob if two of the names, or of the fields in their structs, are the same to DuckDB."""
    known: dict[str, str] = {}
    for field in fields:
        name = f"{path}{field.name}"
        other = known.setdefault(_folded(field.name), name)
        if other != name:
            raise BadJob(
                f"{where._named} reads {other!r} and {name!r}, which are the same name in SQL, as it ignores case: "
                "rename one in the source, or filter with a function: gm.filter(f), or steps: [{filter: 'module:f'}]"
            )
        inner = [field.type.field(i) for i in range(field.type.num_fields)]
        _check_apart(where, inner, f"{name}.")


_known_fickle: list[frozenset[str]] = []


def _fickle(db: Any) -> frozenset[str]:
    """Functions whose answer may differ on the next attempt, so that a shard would keep other rows: those that DuckDB
    does not call consistent, and macros built from them.
    """
    if not _known_fickle:
        listed = db.execute(
            "SELECT function_name, stability, macro_definition FROM duckdb_functions() "
            "WHERE function_type IN ('scalar', 'macro')"
        ).fetchall()
        found = _CLOCKS | {n for n, stability, _ in listed if stability not in (None, "CONSISTENT")}
        found -= {"error"}  # always the same
        macros = {n: set(re.findall(r"\w+", text)) for n, _, text in listed if text}
        while more := {n for n, words in macros.items() if n not in found and words & found}:
            found |= more
        _known_fickle.append(found)
    return _known_fickle[0]


def _unlike(where: SqlWhere, name: str) -> BadJob:
    hint = "use sample= for a random part, or write the time or value as a literal"
    return BadJob(f"{where._named} calls {name}, which may give a different answer on each attempt: {hint}")


def _readable(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """The columns of a condition as DuckDB takes them; if it reads none, a column of nulls for the row count."""
    import pyarrow as pa

    if not columns:
        return pa.table({"": pa.nulls(rows.num_rows)})
    rows = rows.select(list(columns))
    for i, field in enumerate(rows.schema):
        if pa.types.is_float16(field.type):
            rows = rows.set_column(i, field.name, rows.column(i).cast(pa.float32()))
    return rows


def _of_microseconds(kind: pa.DataType) -> pa.DataType:
    """A type whose durations, at any depth, are of microseconds where it has nanoseconds."""
    import pyarrow as pa

    t = pa.types

    def inside(field: pa.Field) -> pa.Field:
        return field.with_type(_of_microseconds(field.type))

    if t.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if t.is_struct(kind):
        return pa.struct([inside(f) for f in kind])
    if t.is_map(kind):
        return pa.map_(inside(kind.key_field), inside(kind.item_field), kind.keys_sorted)
    if t.is_fixed_size_list(kind):
        return pa.list_(inside(kind.value_field), kind.list_size)
    if t.is_large_list(kind):
        return pa.large_list(inside(kind.value_field))
    return pa.list_(inside(kind.value_field)) if t.is_list(kind) else kind


def _parsed(where: SqlWhere) -> Any:
    sql = f"SELECT 1 FROM rows WHERE (\n{where.expression}\n)"
    answer = json.loads(where._db().execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchall()[0][0])
    if answer.get("error"):
        said = _line(answer.get("error_message", "cannot be parsed"))
        if int(answer.get("position") or 0) >= len(sql.encode()) - 1:  # at the bracket after it, which nobody wrote
            said = "syntax error at its end: a value is missing there, or a bracket"
        raise BadJob(f"{where._named}: {said}: {_EXAMPLE}")
    statements = answer["statements"]
    node = statements[0]["node"]
    more = node.get("modifiers") or node.get("group_expressions") or node.get("having") or node.get("qualify")
    if len(statements) != 1 or node.get("type") != "SELECT_NODE" or more or node.get("sample"):
        raise BadJob(f"{where._named} is more than one condition: give only what could follow WHERE")
    return node


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
        for value in tree.values():
            yield from _nodes(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _nodes(value)


def _unbound(said: str, names: list[str]) -> str:
    """DuckDB's message for an expression that does not fit the columns, with what there are."""
    there = f"; the columns are {', '.join(names)}"
    if missing := re.search(r'Referenced column "(.+?)" not found', said):
        hint = did_you_mean(missing[1], names) or f"; a text stands in single quotes: '{missing[1]}'"
        return f"there is no column {missing[1]!r}{there}{hint}"
    return said + there


def _line(error: object) -> str:
    """DuckDB's message on one line, without its drawing of the place in the SQL (not what the person wrote)."""
    text = re.split(r"\n*\nLINE |Candidate (?:bindings|functions)", str(error))[0]
    return " ".join(text.split())

"""Conditions in SQL."""

from __future__ import annotations

import pickle

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from gristmill.errors import BadJob
from gristmill.sources.where import SqlWhere

ROWS = pa.table(
    {
        "lang": ["en", None, "de", "en"],
        "text": ["a", "bb", None, "dddd"],
        "n": [1, 2, 3, 4],
        "half": np.array([1.0, 2.0, 3.0, 4.0], np.float16),
        "where_": pa.array([{"x": i} for i in range(4)]),
        "Two Words": [True, False, True, None],
    }
)


@pytest.mark.parametrize(
    ("expression", "columns", "mask"),
    [
        ("lang = 'en'", ("lang",), [1, 0, 0, 1]),
        ("LANG = 'en' AND length(text) > 1", ("lang", "text"), [0, 0, 0, 1]),
        ("lang IS NULL", ("lang",), [0, 1, 0, 0]),
        ("rows.n BETWEEN 2 AND 3 -- a comment", ("n",), [0, 1, 1, 0]),
        ("half > 2.5", ("half",), [0, 0, 1, 1]),
        ("where_.x = 2", ("where_",), [0, 0, 1, 0]),
        ('"Two Words"', ("Two Words",), [1, 0, 1, 0]),
        ("text LIKE '%;%' OR true", ("text",), [1, 1, 1, 1]),
        ("NULL::BOOLEAN", (), [0, 0, 0, 0]),
        ("true", (), [1, 1, 1, 1]),
        ("list_contains([1, 4], n)", ("n",), [1, 0, 0, 1]),
    ],
)
def test_a_condition_holds_for_rows(expression: str, columns: tuple[str, ...], mask: list[int]) -> None:
    """One bool a row, null counting as false, also on another machine; it says which columns it reads."""
    where = SqlWhere(expression, ROWS.schema)
    assert where.columns == columns
    assert where.mask(ROWS).tolist() == [bool(m) for m in mask]
    copy = pickle.loads(pickle.dumps(where))
    assert copy.mask(ROWS.select(columns) if columns else ROWS).tolist() == [bool(m) for m in mask]
    assert copy.mask(ROWS.slice(0, 0)).tolist() == []


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("langg = 'en'", "no column 'langg'; the columns are lang, text"),
        ("lang = en", r"no column 'en'; the columns are .*; a text stands in single quotes: 'en'$"),
        ('lang = "en"', r"no column 'en'; the columns are .*; a text stands in single quotes: 'en'$"),
        ("n > > 2", 'syntax error at or near ">": give one in SQL, such as'),
        ("n >", "condition 'n >': syntax error at its end: a value is missing there, or a bracket: give one in SQL"),
        ("lang = 'ä' AND (n > 1", "syntax error at its end"),
        ("lang = 'ääääääää' AND n > ) OR n", r"syntax error at or near \"\)\""),
        ("lower(n) = 'a'", r"No function matches[^;]*type casts\.; the columns are"),
        ("n", "gives BIGINT, not true or false"),
        ("columns('Two Words|^n$')", "gives BIGINT, not true or false"),
        ("columns('^n$|half') > 0 and columns('half') > 0", "Multiple different STAR/COLUMNS"),
        ("unnest([true, false])", "UNNEST not supported"),
        ("", "is empty"),
        ("n = 1; SELECT 1", "syntax error|more than one"),
        ("n = 1) OR (n IN (SELECT 1)", "selects from another table"),
        ("EXISTS (SELECT 1 FROM read_text('/etc/passwd'))", "selects from another table"),
        ("(SELECT content FROM '/etc/passwd') = ''", "selects from another table"),
        ("n = 1) LIMIT (1", "more than one condition"),
        ("true) UNION SELECT 1 FROM rows WHERE (true", "more than one condition"),
        ("n = 1) GROUP BY n HAVING (true", "more than one condition"),
        ("sum(n) > 1", "aggregates"),
        ("row_number() OVER () = 1", "window functions"),
        ("random() < 0.5", "a different answer on each attempt"),
        ("n = current_date", "a different answer on each attempt"),
    ],
)
def test_what_is_no_condition_is_refused_when_planning(expression: str, said: str) -> None:
    """In one line, with the expression and DuckDB's reason."""
    with pytest.raises(BadJob, match=said) as caught:
        SqlWhere(expression, ROWS.schema)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "expression",
    [
        "columns(*) is not null",
        "columns('a|b') > 0",
        "columns(* exclude id) > 0",
        "columns(lambda c: c <> 'id') is null",
        "not (columns('a|b') > 0)",
        "columns('a|b') > 0 or id = 2",
        "columns(*) > 0 and columns(*) < 6",
        "coalesce(*columns('a|b')) > 0",
        "columns('flag')",
        "columns('flag|a') > 0",
    ],
)
def test_many_columns_are_one_condition_as_to_duckdb(expression: str) -> None:
    """COLUMNS(…) holds if it holds for each of the columns, as behind WHERE in DuckDB itself."""
    rows = pa.table(
        {
            "id": range(8),
            "a": [1, None, 3, None, 5, -1, 7, -1],
            "b": [1, 2, None, None, -5, 6, 7, -1],
            "flag": [True, True, None, True, True, False, True, True],
        }
    )
    with duckdb.connect() as db:
        db.register("rows", rows)
        wanted = [n for (n,) in db.execute(f"SELECT id FROM rows WHERE {expression} ORDER BY id").fetchall()]
    assert np.flatnonzero(SqlWhere(expression, rows.schema).mask(rows)).tolist() == wanted


def test_a_value_that_stops_the_expression_is_told() -> None:
    """A cast that fails is an error with the way out, not a row that is silently dropped."""
    where = SqlWhere("CAST(text AS INTEGER) > 1", ROWS.schema)
    with pytest.raises(BadJob, match="TRY_CAST"):
        where.mask(ROWS)
    assert SqlWhere("TRY_CAST(text AS INTEGER) IS NULL", ROWS.schema).mask(ROWS).all()


@pytest.mark.parametrize("inside", ["alone", "list", "struct", "map", "vector"])
def test_durations_are_not_compared_without_their_nanoseconds(inside: str) -> None:
    """As DuckDB does, for which 1,500 ns are a microsecond; with digits that it has they are compared."""
    times = pa.array([1000, 2000, None, -3000], pa.duration("ns"))
    late = pa.array([1000, 1500, None, -3000], pa.duration("ns"))

    def table(d: pa.Array) -> pa.Table:
        offsets = pa.array(range(5), pa.int32())
        made = {
            "alone": lambda: d,
            "list": lambda: pa.ListArray.from_arrays(offsets, d),
            "struct": lambda: pa.StructArray.from_arrays([d], ["v"]),
            "map": lambda: pa.MapArray.from_arrays(offsets, pa.array(["v"] * 4), d),
            "vector": lambda: pa.FixedSizeListArray.from_arrays(d, 1),
        }[inside]
        return pa.table({"d": made(), "k": range(4)})

    value = {"alone": "d", "list": "d[1]", "struct": "d.v", "map": "d['v']", "vector": "d[1]"}[inside]
    where = SqlWhere(f"{value} = INTERVAL 1 MICROSECOND", table(times).schema)
    assert where.mask(table(times)).tolist() == [True, False, False, False]
    with pytest.raises(BadJob, match="'d' has durations with digits below a microsecond"):
        where.mask(table(late))
    assert SqlWhere("k = 1", table(late).schema).mask(table(late)).tolist() == [False, True, False, False]


def test_order_is_kept_over_many_chunks() -> None:
    """The mask is aligned with the rows."""
    n = np.random.default_rng(0).integers(0, 1000, 300_000)
    rows = pa.concat_tables([pa.table({"n": part}) for part in np.array_split(n, 7)])
    assert (SqlWhere("n % 7 = 3", rows.schema).mask(rows) == (n % 7 == 3)).all()

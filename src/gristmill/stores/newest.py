"""Which rows of a result are delivered by key: of several that have the same, the one of the latest night.

A row is as old as the generation that read it from the source: one that was dead then, and scored later, is older than
one of the same key that was read in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.keys import comparable, comparable_type, has_nan
from gristmill.arrow.rows import picked
from gristmill.arrow.spilling import batches_of, given, spilling
from gristmill.arrow.topython import to_plain
from gristmill.commit.documents import Live
from gristmill.commit.generation import Generation
from gristmill.commit.nights import ages
from gristmill.errors import BadJob, RunFailed

if TYPE_CHECKING:
    import pyarrow.dataset as ds

BATCH_ROWS = 65_536  # rows whose keys are held in memory together
READ_AHEAD = 2  # batches, where the first may tell that the others are not needed
KEY_MEMORY = "256MB"  # for finding keys that repeat; more are compared on disk


def newest(
    files: Sequence[Live],
    live: Sequence[Live],
    members: Sequence[Generation],
    rows_of: Callable[[Sequence[Live]], ds.Dataset],
    key: Sequence[str],
    shown: str,
    nights: bool = False,
) -> dict[str, np.ndarray]:
    """Of `files`, which are to be delivered, those with rows that are not the latest of their key among all `live`
    ones: a mask of the rows that are, by the file's name. `rows_of` opens files. Raises BadJob if two rows of one age
    have the same key (`nights`: two of one night, also if one of them was dead then), or one of `files` has a null in
    it, RunFailed for files that are not as they were published.
    """
    if not files:
        return {}
    old = dict(zip(live, ages(live, members), strict=True))
    first, asked = min(old[f] for f in files), set(files)
    if nights:
        first = (first[0], 0)
    several = [*files, *(f for f in live if f not in asked and old[f] >= first)]
    order = {age: n for n, age in enumerate(sorted({old[f] for f in several}))}
    heads, wanted = [f"k{i}" for i in range(len(key))], sum(f.rows for f in files)
    ends, of = np.cumsum([f.rows for f in several]), np.array([order[old[f]] for f in several], np.int32)
    night = np.array([old[f][0] for f in several], np.int32)
    rows = rows_of(several)
    if len(order) == 1 and len(key) == 1 and _ascend(rows, key[0]) == ends[-1]:
        return {}
    fields = [
        pa.field(head, comparable_type(rows.schema.field(name).type)) for head, name in zip(heads, key, strict=True)
    ]
    schema = pa.schema([*fields, ("n", pa.int64()), ("age", pa.int32()), ("night", pa.int32())])

    at = 0

    def keys() -> Iterator[pa.RecordBatch]:
        """Those of all files, one after the other, numbered."""
        nonlocal at
        for batch in rows.scanner(columns=list(key), batch_size=BATCH_ROWS).to_batches():
            n = np.arange(at, at + len(batch))
            file = np.searchsorted(ends, n, side="right").clip(max=len(of) - 1)
            columns = [_comparable(column) for column in batch.columns]
            yield pa.record_batch([*columns, pa.array(n), pa.array(of[file]), pa.array(night[file])], schema=schema)
            at += len(batch)

    with spilling(KEY_MEMORY) as connection:
        with given(connection, given=(schema, keys())):
            connection.execute("CREATE TEMP TABLE keys AS SELECT * FROM given")
        if at != ends[-1]:
            raise RunFailed(f"{shown}: its files have {at:,} rows, and {ends[-1]:,} were published: verify tells which")
        empty = f"n < {wanted} AND ({' OR '.join(f'{head} IS NULL' for head in heads)})"
        wrong = [
            *_nulls(connection, empty, key),
            *_repeated(connection, heads, rows, key, "night" if nights else "age", empty),
        ]
        if wrong:
            raise BadJob(f"{shown}: {'; and '.join(wrong)}")
        return {} if len(order) < 2 else _masks(connection, heads, files)


def _ascend(rows: ds.Dataset, key: str) -> int | None:
    """How many rows there are if each key is greater than the one before, as those of many sources are, so that none
    repeats and none is null; None if that is not so. Nothing is held in memory.
    """

    import pyarrow.compute as pc

    kind, last, count = rows.schema.field(key).type, None, 0
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_date(kind)):
        return None
    for batch in rows.scanner(columns=[key], batch_size=BATCH_ROWS, batch_readahead=READ_AHEAD).to_batches():
        keys = batch.column(0)
        if not len(keys):
            continue
        rising = pc.less(keys.slice(0, len(keys) - 1), keys.slice(1))
        if keys.null_count or not pc.all(rising, min_count=0).as_py():
            return None
        if last is not None and not pc.less(last, keys[0]).as_py():
            return None
        last, count = keys[-1], count + len(keys)
    return count


def _nulls(connection: Any, empty: str, key: Sequence[str]) -> Iterator[str]:
    """What is wrong with rows that are `empty`, if there are any."""
    (nulls,) = connection.execute(f"SELECT count(*) FROM keys WHERE {empty}").fetchone()
    if nulls:
        have, them = ("row has a null in its", "it") if nulls == 1 else ("rows have a null in their", "them")
        yield f"{nulls:,} {have} key ({', '.join(key)}), or NaN: filter {them} out first"


def _comparable(column: pa.Array) -> pa.Array:
    """A key column as DuckDB is given it; NaN, which is equal to nothing, as null."""

    import pyarrow.compute as pc

    nan, values = has_nan(column), comparable(column)
    return values if nan is None else pc.if_else(nan, pa.scalar(None, values.type), values)


def _repeated(
    connection: Any, heads: Sequence[str], rows: ds.Dataset, key: Sequence[str], among: str, empty: str
) -> Iterator[str]:
    """What is wrong with rows of one key, if there are any but those that are `empty`."""
    names = ", ".join(heads)
    groups = (
        f"SELECT {names}, count(*) AS times, min(n) AS first FROM keys WHERE NOT ({empty}) GROUP BY {among}, {names} "
        "HAVING times > 1"
    )
    found = connection.execute(f"SELECT times, first FROM ({groups}) ORDER BY times DESC, {names} LIMIT 3").fetchall()
    if found:
        (many,) = connection.execute(f"SELECT count(*) FROM ({groups})").fetchone()
        values = _rows_at(rows, key, [first for _, first in found])
        told = "; ".join(
            f"{', '.join(key_text(column[n]) for column in values.columns)} {times:,} times"
            for n, (times, _) in enumerate(found)
        )
        repeat = f"{many:,} key{'s'[: many != 1]} ({', '.join(key)}) {'repeats' if many == 1 else 'repeat'}"
        yield (
            f"{repeat}: {told}{' …' if many > 3 else ''}: give columns that tell rows apart, or leave all but one of "
            "them out of the source"
        )


def _rows_at(rows: ds.Dataset, key: Sequence[str], places: Sequence[int]) -> pa.Table:
    """The keys of some rows, as they are in the result: DuckDB's values are others."""
    order, at, found = np.sort(places), 0, []
    for batch in rows.scanner(columns=list(key), batch_size=BATCH_ROWS).to_batches():
        some = order[(order >= at) & (order < at + len(batch))] - at
        if len(some):
            found.append(picked(pa.Table.from_batches([batch]), some))
        at += len(batch)
    return picked(pa.concat_tables(found), np.searchsorted(order, places))


def key_text(value: pa.Scalar) -> str:
    """A key's value as people read it."""
    return repr(to_plain(pa.array([value], value.type))[0])


def _masks(connection: Any, heads: Sequence[str], files: Sequence[Live]) -> dict[str, np.ndarray]:
    ends = np.cumsum([f.rows for f in files])
    latest = f"SELECT n, age, max(age) OVER (PARTITION BY {', '.join(heads)}) AS latest FROM keys"
    older = connection.sql(f"SELECT n FROM ({latest}) WHERE age < latest AND n < {ends[-1]}")
    masks: dict[str, np.ndarray] = {}
    for batch in batches_of(older, BATCH_ROWS):
        rows = batch["n"].to_numpy()
        numbers = np.searchsorted(ends, rows, side="right")
        for number in np.unique(numbers).tolist():
            f = files[number]
            own = rows[numbers == number] - (ends[number] - f.rows)
            masks.setdefault(f.name, np.ones(f.rows, bool))[own] = False
    return masks


def distinct(rows: Any, key: Sequence[str]) -> int:
    """How many keys some rows have."""
    names = ", ".join(heads := [f"k{i}" for i in range(len(key))])
    kinds = [comparable_type(rows.schema.field(name).type) for name in key]
    schema = pa.schema(list(zip(heads, kinds, strict=True)))
    batches = rows.scanner(columns=list(key), batch_size=BATCH_ROWS).to_batches()
    keys = (pa.record_batch([comparable(c) for c in b.columns], schema=schema) for b in batches)
    with spilling(KEY_MEMORY) as connection, given(connection, given=(schema, keys)):
        found = connection.execute(f"SELECT count(*) FROM (SELECT DISTINCT {names} FROM given)").fetchone()
    return int(found[0]) if found else 0

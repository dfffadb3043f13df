"""What looking up has in common in all stores: keys as given become the key columns' values, and what a store gives
back becomes rows as they were delivered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.arrow.casts import Lossy, lossless
from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, BadSource, did_you_mean
from gristmill.job.delivery import STORES, Delivery, place_of
from gristmill.stores.contract import DISTANCE, Mark, Metric, Near, Reader, Row, Searcher
from gristmill.stores.vectors import search_of

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

SCANNED = 16_384  # rows that are held in memory together when all are looked at


def keyed(shown: str, key: Sequence[str], types: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """The key columns with their types. Raises BadJob if none are known, or one is not there."""
    if not key:
        raise BadJob(
            f"{shown}: was not delivered with a key: say by which columns to look up, for example key='id' (--key id); "
            f"it has {', '.join(types)}"
        )
    for name in key:
        if name not in types:
            raise BadJob(f"{shown}: has no column {name!r}{did_you_mean(name, types)}: it has {', '.join(types)}")
    return {name: types[name] for name in key}


def asked(keys: Sequence[tuple[Any, ...]], columns: Mapping[str, pa.DataType], shown: str) -> pa.Table:
    """The keys as a table of the key columns, one row each. Raises BadJob for a key that is none."""
    for key in keys:
        if len(key) != len(columns):
            names = ", ".join(columns)
            raise BadJob(
                f"{shown}: key {key if len(key) != 1 else key[0]!r}: the key has {len(columns)} columns: {names}"
            )
    made = {}
    for place, (name, kind) in enumerate(columns.items()):
        values = [key[place] for key in keys]
        made[name] = _as(values, kind, name, shown)
    return pa.table(made)


def _as(values: list[Any], kind: pa.DataType, name: str, shown: str) -> pa.Array:
    """Values of a key column; texts are parsed, as they come from a command line."""
    try:
        texts = bool(values) and all(isinstance(v, str) for v in values)
        if texts and not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            return pa.array(values, pa.string()).cast(kind)
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return pa.array([v if v is None or isinstance(v, str) else str(v) for v in values], kind)
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as e:
        raise BadJob(f"{shown}: column {name!r} is {kind}, and a key is not: {e}") from None


def matching(keys: pa.Table) -> pc.Expression:
    """A filter for rows that may have one of these keys."""
    some = [pc.field(name).isin(keys.column(name).combine_chunks()) for name in keys.column_names]
    return functools.reduce(lambda a, b: a & b, some)


def restored(found: pa.Table, keys: pa.Table, mark: Mark | None, shown: str | None) -> list[Row | None]:
    """For each key the row found for it, in the types that were delivered. Raises BadSource if there are two, where
    nothing tells which of them counts (`shown`); else it is the last one.
    """
    if mark is not None:
        found = delivered(found, mark)
    names = keys.column_names
    cast = pa.table({n: keys.column(n).cast(found.schema.field(n).type) for n in names})
    return by_key(found.to_pylist(), names, list(zip(*(cast.column(n).to_pylist() for n in names), strict=True)), shown)


def by_key(
    rows: Sequence[Row], names: Sequence[str], keys: Sequence[tuple[Any, ...]], shown: str | None
) -> list[Row | None]:
    """For each key the row that has it. Raises BadSource, as `restored` does."""
    there: dict[tuple[Any, ...], Row] = {}
    twice: set[tuple[Any, ...]] = set()
    for row in rows:
        key = tuple(row[n] for n in names)
        if key in there:
            twice.add(key)
        there[key] = row
    for key in keys if twice and shown is not None else ():
        if key in twice:
            raise repeated(shown or "", names, key)
    return [there.get(key) for key in keys]


def repeated(shown: str, names: Sequence[str], key: Sequence[Any]) -> BadSource:
    """The error for a key of several rows."""
    which = ", ".join(f"{n} = {v!r}" for n, v in zip(names, key, strict=True))
    return BadSource(
        f"{shown}: several rows have {which}, and a lookup finds one a key: deliver with mode='upsert', which keeps "
        "the latest row of each key, or query the table"
    )


def delivered(found: pa.Table, mark: Mark) -> pa.Table:
    """Rows of a store with the types of the schema that they were delivered with, as far as values allow."""
    columns, schema = {}, decode_schema(mark.schema)
    for name in found.column_names:
        column = found.column(name)
        kind = schema.field(name).type if name in schema.names else column.type
        columns[name] = column if column.type == kind else _cast(column, kind)
    return pa.table(columns)


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    try:
        return lossless(column, kind)
    except Lossy:  # others have written here, too
        return column
    except pa.ArrowException:
        return pa.chunked_array([pa.array(column.to_pylist(), kind)])


class Neighbours(list[Row]):
    """The rows nearest to a vector, nearest first, each with its `_distance` by `metric`: cosine is 1 - the cosine, l2
    the length of the difference, ip the inner product, negated. `generation` is theirs.
    """

    def __init__(self, near: Near, which: int) -> None:
        found = zip(near.rows[which], near.distances[which], strict=True)
        super().__init__({**row, DISTANCE: distance} for row, distance in found)
        self.metric: Metric = near.metric
        self.generation: int | None = None if near.mark is None else near.mark.generation


class Lookup:
    """Rows by key, always of one published generation, and of the next one when there is one. See `gm.lookup`."""

    def __init__(self, reader: Reader, shown: str) -> None:
        self._reader = reader
        self._shown = shown

    def get(self, key: Any) -> Row | None:
        """The row of a key, as a dict; None if there is none. A key of several columns is a tuple, in their order."""
        return self.get_many([key])[0]

    def get_many(self, keys: Iterable[Any]) -> list[Row | None]:
        """The row of each key, or None, in the order of the keys; all of one generation."""
        return self._reader.find([_tuple(key) for key in keys])[1]

    def nearest(
        self, vector: ArrayLike, k: int = 10, *, column: str | None = None, metric: Metric | None = None
    ) -> Neighbours:
        """The `k` rows whose vectors are nearest to `vector`, nearest first, each with its `_distance`. `column` has
        the vectors: it may be left out if it is the only one that has. `metric` is cosine, l2 or ip: by default that of
        the index, or cosine. Raises BadJob for a store that finds rows by key only.
        """
        return self._near(vector, k, column, metric, dimensions=1)[0]

    def nearest_many(
        self, vectors: ArrayLike, k: int = 10, *, column: str | None = None, metric: Metric | None = None
    ) -> list[Neighbours]:
        """The same for each row of a matrix, all of one generation."""
        return self._near(vectors, k, column, metric, dimensions=2)

    def _near(
        self, given: Any, k: int, column: str | None, metric: Metric | None, *, dimensions: int
    ) -> list[Neighbours]:
        if not isinstance(self._reader, Searcher):
            raise BadJob(
                f"{self._shown}: finds rows by key only: deliver the result to a store of vectors, for example "
                "usearch://FILE or postgresql://…"
            )
        search = search_of(given, k, column, metric, dimensions, self._shown)
        if not len(search.vectors):
            return []
        near = self._reader.nearest(search)
        return [Neighbours(near, number) for number in range(len(search.vectors))]

    @property
    def generation(self) -> int | None:
        """The generation that is looked up in now; None if that is not known, as others have written there."""
        mark = self._reader.find([])[0]
        return None if mark is None else mark.generation

    def close(self) -> None:
        """Close what is open."""
        self._reader.close()

    def __enter__(self) -> Lookup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tuple(key: Any) -> tuple[Any, ...]:
    if isinstance(key, (str, int)):  # most are, and to ask whether they are mappings takes longer
        return (key,)
    if isinstance(key, Mapping):
        return tuple(key.values())
    return tuple(key) if isinstance(key, (tuple, list)) else (key,)


def in_store(at: str | Delivery, key: tuple[str, ...]) -> Lookup:
    """In a store. Raises BadJob, BadSource, MissingExtra."""
    place = place_of(at)
    return Lookup(STORES.get(place.store).reader(place, key), place.shown)

"""What looking up has in common in all stores: keys as given become the key columns' values, and what a store gives
back becomes rows as they were delivered.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from gristmill.arrow.casts import Lossy, lossless, stored
from gristmill.arrow.keys import comparable, has_nan
from gristmill.arrow.schemas import storage, wider
from gristmill.arrow.topython import to_plain, to_rows
from gristmill.arrow.valuebytes import value_bytes
from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, BadSource, did_you_mean
from gristmill.job.delivery import STORES, Delivery, keyed_by, place_of
from gristmill.stores.contract import DISTANCE, Key, Mark, Metric, Near, Reader, Row, Searcher
from gristmill.stores.keys import exact
from gristmill.stores.vectors import search_of

if TYPE_CHECKING:
    import pyarrow.compute as pc
    from numpy.typing import ArrayLike

# What to do about keys of several rows in a table.
OF_TABLE = "deliver with mode='upsert', which keeps the latest row of each key, or query the table"
_UNITS = ["s", "ms", "us", "ns"]
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
            raise BadJob(f"{shown}: has no column {name!r}: it has {', '.join(types)}{did_you_mean(name, types)}")
    return {name: types[name] for name in key}


def asked(
    keys: Sequence[Key],
    columns: Mapping[str, pa.DataType],
    shown: str,
    mark: Mark | None = None,
    texts: Mapping[str, pa.DataType] | None = None,
) -> pa.Table:
    """The keys as a table of the key columns, one row each, of the plain types of these; a key that no row can have is
    null in all of them. Its values are those of the types that were delivered, where `mark` tells, or of the columns
    where these are wider: an earlier delivery may have brought what the latest type does not hold. Raises BadKey.
    `texts`: see `keys.exact`.
    """

    import pyarrow.compute as pc

    schema = decode_schema(mark.held) if mark is not None else pa.schema([])
    own = {n: covering(schema.field(n).type, kind) if n in schema.names else kind for n, kind in columns.items()}
    made = {n: _held(column, storage(columns[n])) for n, column in exact(keys, own, shown, texts).items()}
    there = functools.reduce(pc.and_, (pc.is_valid(column) for column in made.values()))
    if not pc.all(there, min_count=0).as_py():
        made = {n: pc.if_else(there, column, pa.scalar(None, column.type)) for n, column in made.items()}
    return pa.table(made)


def _held(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Values as the store holds them; null for those that it cannot hold."""
    if values.type == kind:
        return values
    try:
        return values.cast(kind)
    except pa.ArrowException:
        return pa.concat_arrays([_held_or_null(values.slice(place, 1), kind) for place in range(len(values))])


def _held_or_null(one: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return one.cast(kind)
    except pa.ArrowException:
        return pa.nulls(1, kind)


def covering(kind: pa.DataType, column: pa.DataType) -> pa.DataType:
    """The type of keys for rows that were delivered as `kind`, in a column that may have others, too, as `column` holds
    them: the finer or wider of both.
    """
    t, own, there = pa.types, storage(kind), storage(column)
    if own == there or isinstance(kind, pa.BaseExtensionType):
        return kind
    if t.is_timestamp(own) and t.is_timestamp(there) and (own.tz is None) == (there.tz is None):
        return pa.timestamp(_finer(own, there), own.tz)
    if t.is_duration(own) and t.is_duration(there):
        return pa.duration(_finer(own, there))
    if t.is_time(own) and t.is_time(there):
        return max(own, there, key=lambda k: _UNITS.index(k.unit))
    if (t.is_integer(own) or t.is_decimal(own)) and t.is_decimal(there):
        return wider(own, there) or there
    if t.is_fixed_size_binary(own) and (t.is_binary(there) or t.is_large_binary(there)):
        return there
    return wider(own, there) or kind


def widest(kind: pa.DataType) -> pa.DataType:
    """The widest type whose values are stored as those of `kind` are, where only what was delivered tells the type of a
    column: an earlier delivery may have brought what the latest type does not hold.
    """
    t, own = pa.types, storage(kind)
    if isinstance(kind, pa.BaseExtensionType):
        return kind
    if t.is_integer(own):
        return own if t.is_uint64(own) else pa.int64()
    if t.is_floating(own):
        return pa.float64()
    return pa.binary() if t.is_fixed_size_binary(own) else own


def _finer(one: pa.DataType, other: pa.DataType) -> str:
    return _UNITS[max(_UNITS.index(one.unit), _UNITS.index(other.unit))]


def matching(keys: pa.Table, schema: pa.Schema) -> pc.Expression:
    """A filter for rows of a schema that may have one of these keys."""
    return functools.reduce(lambda a, b: a & b, (_among(keys.column(n), schema.field(n)) for n in keys.column_names))


def _among(values: pa.ChunkedArray, field: pa.Field) -> pc.Expression:
    import pyarrow.compute as pc

    t, some, kind = pa.types, pc.drop_null(values).combine_chunks(), values.type
    if pa.types.is_nested(kind) or isinstance(field.type, pa.BaseExtensionType):
        return pc.scalar(True)  # Arrow compares none of these: all rows are looked at
    if t.is_floating(kind):
        some = some.cast(pa.float64())
        some = pa.concat_arrays([some, pa.array([0.0, -0.0])]) if pc.any(pc.equal(some, 0.0)).as_py() else some
    elif t.is_decimal32(kind) or t.is_decimal64(kind):
        some = some.cast(pa.decimal128(kind.precision, kind.scale))
    of = pc.field(field.name)
    # Texts and bytes may be views in files, which Arrow fails to compare with what a Parquet footer says.
    viewed = t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind) or t.is_large_binary(kind)
    return (of if field.type == some.type and not viewed else of.cast(some.type)).isin(some)


def restored(
    found: pa.Table, keys: pa.Table, mark: Mark | None, shown: str, way_out: str = OF_TABLE
) -> list[Row | None]:
    """For each key the row found for it, in the types that were delivered. Raises BadSource if there are two."""
    names = keys.column_names
    wanted = [_told_apart(keys.column(name)) for name in names]
    own = [
        stored(found.column(name)).cast(keys.column(name).type) for name in names
    ]  # keys are as the store holds them
    there = list(zip(*map(_told_apart, own), strict=True))
    if mark is not None:
        found = delivered(found, mark)
    rows = dict(zip(there, to_rows(found), strict=True))
    several = {key for key, times in Counter(there).items() if times > 1}
    asked_for = list(zip(*wanted, strict=True))
    for place, key in enumerate(asked_for if several else ()):
        if key in several and None not in key:
            raise repeated(shown, names, [to_plain(keys.column(n).slice(place, 1))[0] for n in names], way_out)
    return [None if None in key else rows.get(key) for key in asked_for]


def _told_apart(column: pa.ChunkedArray) -> list[Any]:
    """The values of a key column as bytes, which are equal if these are; None for null, and for NaN."""

    import pyarrow.compute as pc

    told: list[Any] = []
    for chunk in column.chunks:
        nan, made = has_nan(chunk), value_bytes(comparable(chunk))
        there = chunk.is_valid() if nan is None else pc.and_not(chunk.is_valid(), nan.fill_null(False))
        told += pc.if_else(there, made, pa.scalar(None, made.type)).to_pylist()
    return told


def repeated(shown: str, names: Sequence[str], key: Sequence[Any], way_out: str = OF_TABLE) -> BadSource:
    """The error for a key of several rows."""
    which = ", ".join(f"{n} = {v!r}" for n, v in zip(names, key, strict=True))
    return BadSource(f"{shown}: several rows have {which}, and a lookup finds one a key: {way_out}")


def delivered(found: pa.Table, mark: Mark) -> pa.Table:
    """Rows of a store with the types of the schema that they were delivered with, as far as values allow."""
    columns, schema = {}, decode_schema(mark.held)
    for name in found.column_names:
        column = found.column(name)
        kind = schema.field(name).type if name in schema.names else column.type
        columns[name] = column if column.type == kind else as_delivered(column, kind)
    return pa.table(columns)


def as_delivered(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """The values of a column as `kind`, or as they are if it does not hold all of them without loss."""
    try:
        return lossless(column, kind)
    except Lossy:  # others have written here, too, or an earlier delivery had a wider type
        return column


@contextlib.contextmanager
def refused_as(shown: str, name: str, kind: pa.DataType | None) -> Iterator[None]:
    """While values of a column are made those of the type that was delivered. Raises BadSource if some are none."""
    try:
        yield
    except (pa.ArrowException, TypeError, ValueError) as e:
        raise BadSource(
            f"{shown}: column {name!r} has values that are none of {kind}, as it was delivered ({str(e).strip()}): "
            "others have written there, or altered it: deliver again with mode replace, or query the table"
        ) from e


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
        """The row of a key, as a dict; None if there is none. A key of several columns is a tuple, in their order, or a
        dict by their names. It finds the row whose key it equals, as Python compares values; a text for a column that
        holds none is read as one of its values. Raises BadKey for other names, and for a value of another type.
        """
        return self.get_many([key])[0]

    def get_many(self, keys: Iterable[Any]) -> list[Row | None]:
        """The row of each key, or None, in the order of the keys; all of one generation."""
        return self._reader.find([_key(key) for key in keys])[1]

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


def _key(key: Any) -> Key:
    if isinstance(key, (str, int)):  # most are, and to ask whether they are mappings takes longer
        return (key,)
    if isinstance(key, Mapping):
        return key
    return tuple(key) if isinstance(key, (tuple, list)) else (key,)


def in_store(at: str | Delivery, key: tuple[str, ...]) -> Lookup:
    """In a store. Raises BadJob, BadSource, MissingExtra."""
    place = place_of(at)
    return Lookup(STORES.get(place.store).reader(place, key or keyed_by(at)), place.shown)

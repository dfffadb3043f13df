"""Vectors of rows: how far apart two are, which column has them, and the nearest by looking at every one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from gristmill.arrow.rows import picked
from gristmill.arrow.schemas import storage
from gristmill.arrow.topython import to_rows
from gristmill.errors import BadJob, did_you_mean
from gristmill.stores.contract import Load, Metric, Near, Row, Search
from gristmill.values import dataclass

_AT_ONCE = 4 << 20  # numbers of float64 that are compared together

_METRICS = {
    **dict.fromkeys(("cosine", "cos"), "cosine"),
    **dict.fromkeys(("l2", "l2sq", "euclid", "euclidean"), "l2"),
    **dict.fromkeys(("ip", "dot", "inner_product"), "ip"),
}


def metric_of(value: Any, where: str) -> Metric:
    """A metric by one of its names. Raises BadJob."""
    found: Any = _METRICS.get(str(value).lower())
    if found is None:
        raise BadJob(f"{where}: metric is {value!r}: it must be one of {', '.join(get_args(Metric))}")
    return found  # type: ignore[no-any-return]


def search_of(given: Any, k: int, column: str | None, metric: str | None, dimensions: int, shown: str) -> Search:
    """What is asked for, checked: a vector (one dimension), or several as the rows of a matrix. Raises BadJob."""
    try:
        matrix = np.asarray(given, np.float32)
    except (TypeError, ValueError) as e:
        raise BadJob(f"{shown}: a vector is a list of numbers, or an array of them: {e}") from None
    if matrix.ndim != dimensions and matrix.size:
        way = "a vector has one dimension (several: nearest_many)" if dimensions == 1 else "several vectors have two"
        raise BadJob(f"{shown}: {way}, and this has {matrix.ndim}")
    if dimensions == 1:
        matrix = matrix.reshape(1, -1)
    if not np.isfinite(matrix).all():
        raise BadJob(f"{shown}: a vector has NaN or infinity in it, to which nothing is near")
    if not isinstance(k, (int, np.integer)) or k < 1:  # type: ignore[redundant-expr]
        raise BadJob(f"{shown}: k is {k!r}: it must be a whole number of at least 1")
    how = None if metric is None else metric_of(metric, shown)
    return Search(np.ascontiguousarray(matrix), int(k), column, how)


# ---------------------------------------------------------------- columns


def is_vector(kind: pa.DataType) -> bool:
    """Whether values of a type are vectors of one length."""
    bare = storage(kind)
    return bool(pa.types.is_fixed_size_list(bare) and pa.types.is_floating(bare.value_type) and bare.list_size)


def width_of(kind: pa.DataType) -> int:
    """How many numbers a vector of the type has."""
    return int((kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind).list_size)


def searched(widths: Mapping[str, int], search: Search, shown: str) -> str:
    """The column that a search is in, of those that have vectors of these widths. Raises BadJob."""
    column = chosen(widths, search.column, shown)
    if (wide := search.vectors.shape[1]) != widths[column]:
        raise BadJob(f"{shown}: column {column!r} has vectors of {widths[column]} numbers, and this one has {wide}")
    return column


def chosen(columns: Mapping[str, Any], named: str | None, shown: str) -> str:
    """The column of vectors that is named, or the only one. Raises BadJob."""
    if named is not None:
        if named not in columns:
            raise BadJob(f"{shown}: has no column of vectors {named!r}{_those(columns)}{did_you_mean(named, columns)}")
        return named
    if len(columns) != 1:
        way = "say which, for example column=" + repr(next(iter(columns))) if columns else "cast lists to float32[n]"
        raise BadJob(f"{shown}: has {len(columns)} columns of vectors of one length{_those(columns)}: {way}")
    return next(iter(columns))


def _those(columns: Iterable[str]) -> str:
    return f" (it has {', '.join(columns)})" if list(columns) else ""


def columns_in(schema: pa.Schema) -> dict[str, int]:
    """The columns that have vectors, with how many numbers each."""
    return {f.name: width_of(f.type) for f in schema if is_vector(f.type)}


def matrix_of(column: pa.Array, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The vectors of a column, as a matrix of its kind of floats, and which of its rows have one. Raises BadJob for a
    vector with a null in it.
    """
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    width, valid = column.type.list_size, np.asarray(column.is_valid())
    flat = (column.fill_null([0.0] * width) if column.null_count else column).flatten()
    if flat.null_count:
        raise BadJob(f"{where} has vectors with a null in them: replace it in a step")
    return flat.to_numpy(zero_copy_only=False).reshape(len(column), width), valid


# ---------------------------------------------------------------- what an index is told


@dataclass(frozen=True)
class Indexed:
    """The column of a delivery that is indexed, and how. `options` are those of the index's library."""

    column: str
    width: int
    metric: Metric
    options: Mapping[str, Any]


def indexed(load: Load, shown: str, kinds: Sequence[str], known: Sequence[str]) -> Indexed:
    """What `index` says of a delivery's vectors: `{embedding: hnsw}`, `{embedding: {kind: hnsw, metric: l2}}`, or
    nothing if the result has one column of them. Raises BadJob.
    """
    if len(load.index) > 1:
        raise BadJob(f"{shown}: index names {', '.join(load.index)}, and one column of vectors is indexed: choose one")
    columns = columns_in(load.schema)
    named, how = next(iter(load.index.items()), (None, None))
    column = chosen(columns, named, shown)
    about = {"kind": how} if isinstance(how, str) else dict(how) if isinstance(how, Mapping) else {}
    where = f"{shown}: index of {column!r}"
    if (kind := about.pop("kind", kinds[0])) not in kinds:
        raise BadJob(f"{where} is {kind!r}: it must be one of {', '.join(kinds)}")
    metric = metric_of(about.pop("metric", "cosine"), where)
    if unknown := next((name for name in about if name not in known), None):
        raise BadJob(f"{where} has no option {unknown!r}: it has {', '.join(known)}{did_you_mean(unknown, known)}")
    return Indexed(column, columns[column], metric, {"kind": kind, **about})


# ---------------------------------------------------------------- every one looked at


def nearest_of_all(batches: Iterable[pa.RecordBatch], column: str, search: Search, shown: str) -> Near:
    """The nearest rows, exactly. Batches come one after the other; kept are the rows that are among the nearest."""
    queries, k = search.vectors.astype(np.float64), search.k
    metric: Metric = search.metric or "cosine"
    best = np.full((len(queries), k), np.inf)
    rows = np.full((len(queries), k), -1)
    kept: list[tuple[int, Row]] = []
    start = 0
    for piece in _pieces(batches, max(search.vectors.shape)):
        vectors, valid = matrix_of(piece.column(column), f"{shown}: column {column!r}")
        found = distances(vectors.astype(np.float64), queries, metric)
        found = np.where(valid[None, :] & ~np.isnan(found), found, np.inf)
        if (found < best[:, -1:]).any():
            few = np.argpartition(found, min(k, len(valid)) - 1, axis=1)[:, :k]
            all_found = np.concatenate([best, np.take_along_axis(found, few, 1)], axis=1)
            all_rows = np.concatenate([rows, few + start], axis=1)
            order = np.argsort(all_found, axis=1, kind="stable")[:, :k]
            best, rows = np.take_along_axis(all_found, order, 1), np.take_along_axis(all_rows, order, 1)
            rows = np.where(np.isinf(best), -1, rows)
            new = np.unique(rows[rows >= start])
            there = set(rows.ravel().tolist())
            kept = [(n, row) for n, row in kept if n in there]
            kept += zip(new.tolist(), to_rows(picked(pa.Table.from_batches([piece]), new - start)), strict=True)
        start += len(valid)
    by_number = dict(kept)
    each = [[(by_number[n], d) for n, d in zip(*pair, strict=True) if n >= 0]
            for pair in zip(rows.tolist(), best.tolist(), strict=True)]  # fmt: skip
    return Near(None, metric, [[row for row, _ in one] for one in each], [[d for _, d in one] for one in each])


def _pieces(batches: Iterable[pa.RecordBatch], each: int) -> Iterator[pa.RecordBatch]:
    """Batches in pieces that are compared at once, if every row takes so many numbers."""
    step = max(1, _AT_ONCE // each)
    for batch in batches:
        yield from (batch.slice(at, step) for at in range(0, batch.num_rows, step))


def distances(vectors: np.ndarray, queries: np.ndarray, metric: Metric) -> np.ndarray:
    """How far each vector, a row of float64, is from each query: a row a query. NaN for a vector of zeros by cosine."""
    inner = queries @ vectors.T
    if metric == "ip":
        return np.asarray(-inner)
    lengths, own = np.einsum("ij,ij->i", vectors, vectors), np.einsum("ij,ij->i", queries, queries)
    if metric == "l2":
        return np.asarray(np.sqrt(np.maximum(lengths[None, :] - 2 * inner + own[:, None], 0)))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(1 - inner / np.sqrt(lengths[None, :] * own[:, None]))

"""What the log of a Delta table says of its files, and which of them may have some keys by that."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.stores.deltastats import LONGEST
from gristmill.stores.deltatrial import TIMES

_PLAIN = frozenset({TIMES})  # what a table may ask of its readers, and its files are its rows
EVER = pc.scalar(True)  # what holds of all rows of a file of which nothing is known


def rows_among(table: Any, keys: pa.Table, schema: pa.Schema, some: pc.Expression) -> pa.Table:
    """Rows of the table, whose columns are `schema`: those of which `some` holds, among them all with one of the keys.
    Trap: where its protocol says of columns or rows more than the files do, deltalake's datasets refuse it, or give
    nulls.
    """
    protocol = table.protocol()
    if protocol.min_reader_version < 2 or (protocol.min_reader_version > 2 and _PLAIN.issuperset(_features(protocol))):
        return files_of(table, keys).to_table(filter=some)
    batches = pa.RecordBatchReader.from_stream(table.scan())
    found = [pa.Table.from_batches([batch]).cast(schema).filter(some) for batch in batches]
    return pa.concat_tables(found) if found else schema.empty_table()


def _features(protocol: Any) -> Sequence[str]:
    return protocol.reader_features or ()


def files_of(table: Any, keys: pa.Table) -> Any:
    """A dataset of the files that may have some keys, as far as the log tells the truth. Trap: deltalake's own leaves
    files out by ranges that a merge has rounded (decimals beyond 2^53).
    """
    import pyarrow.dataset as ds

    rows, about = table.to_pyarrow_dataset(), about_files(table)
    apart = table.metadata().partition_columns
    constant = _holding(about, [rows.schema.field(n) for n in apart])
    ranges = _holding(about, [rows.schema.field(n) for n in keys.column_names if n not in apart])

    def of(known: Mapping[str, Any], fragments: Iterable[Any]) -> Any:
        made = [rows.format.make_fragment(f.path, f.filesystem, known.get(f.path, EVER)) for f in fragments]
        return ds.FileSystemDataset(made, rows.schema, rows.format, rows.filesystem)

    some = of(ranges, rows.get_fragments()).get_fragments(filter=_plainly(keys))
    return of(constant, some)


def _plainly(keys: pa.Table) -> Any:
    """A filter that leaves files out by their ranges."""
    told = [n for n in keys.column_names if _told_exactly(keys[n].type)]
    some = (pc.field(n).isin(pc.drop_null(keys[n]).combine_chunks()) for n in told)
    return functools.reduce(lambda a, b: a & b, some, EVER)


def _holding(about: pa.Table, columns: Sequence[pa.Field]) -> dict[str, Any]:
    """What holds of all rows of files, by their paths."""
    known: dict[str, Any] = {}
    for field in columns:
        for at, holds in _known(about, field):
            known[at] = holds if at not in known else known[at] & holds
    return known


def _known(about: pa.Table, field: pa.Field) -> Iterator[tuple[str, Any]]:
    """Paths of files, and what holds of all values of a column there."""
    column, name = pc.field(field.name), field.name
    if f"partition.{name}" in about.column_names:
        for path, value in zip(about["path"], about[f"partition.{name}"].cast(field.type), strict=True):
            yield unquote(path.as_py()), column == value if value.is_valid else column.is_null()
    elif (
        _told_exactly(field.type) and f"min.{name}" in about.column_names and f"null_count.{name}" in about.column_names
    ):
        low, high = (about[f"{end}.{name}"].cast(field.type) for end in ("min", "max"))
        for path, nulls, least, most in zip(about["path"], about[f"null_count.{name}"], low, high, strict=True):
            cut = pa.types.is_string(field.type) and len(most.as_py() or "") >= LONGEST
            if nulls.as_py() == 0 and least.is_valid and most.is_valid and not cut:
                yield unquote(path.as_py()), (column >= least) & (column <= most)


def _told_exactly(kind: pa.DataType) -> bool:
    """Whether JSON has all values of a type, whoever has written it."""
    return bool(pa.types.is_signed_integer(kind) or pa.types.is_date32(kind) or pa.types.is_string(kind))


def about_files(table: Any) -> pa.Table:
    """What the log says of each file."""
    return pa.table(table.get_add_actions(flatten=True))

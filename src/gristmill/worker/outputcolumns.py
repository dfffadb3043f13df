"""The columns of an output row that are not simply a model's: casts to the plan, ids, the model's version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, lossless
from gristmill.errors import BadOutput
from gristmill.worker.identity import said


def fit(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with the planned columns and types, null for columns it lacks. Raises BadOutput for a column that is not
    planned, and for a value that does not fit without loss.
    """
    if new := [n for n in table.column_names if n not in schema.names]:
        raise BadOutput(
            f"these rows have a column {new[0]!r}, which the first rows did not have ({', '.join(schema.names)}): "
            "return it for every row, or none; returns= declares columns, also where no first row can be scored"
        )
    columns = []
    for f in schema:
        if f.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, f.type))
            continue
        column = table.column(f.name)
        try:
            columns.append(lossless(column, f.type))
        except Lossy as e:
            if pa.types.is_null(f.type):
                raise BadOutput(
                    f"column {f.name!r} has values, which none of the first rows had, so that its type was not known: "
                    "declare it with returns= if it is a model's (with --restart, restart=True, if there is a result); "
                    "let a step return an array that has a type, pa.array(values, pa.float64()) for one of numbers"
                ) from e
            raise BadOutput(
                f"column {f.name!r} does not fit the planned {f.type}: {e}; that is its type in the first rows, or if "
                "none of these has a value, in the result before: return one type for all rows (returns= declares a "
                "model's, a step returns an array that has it: pa.array(values, pa.float64()) for one of numbers), or, "
                "if an update keeps answers of that type, score all rows anew (--restart, restart=True)"
            ) from e
    return pa.Table.from_arrays(columns, schema=schema)


def constant(value: str, rows: int) -> pa.DictionaryArray:
    """The same text for each row."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, dtype=np.int32)), pa.array([value]))


def beside(rows: pa.Table, others: pa.Table) -> pa.Table:
    """Rows with the columns of others, of as many rows."""
    columns, fields = [*rows.columns, *others.columns], [*rows.schema, *others.schema]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def places(paths: Sequence[str], piece: np.ndarray, position: np.ndarray) -> Iterable[str]:
    """What tells rows by their place in the source, as text."""
    return (f"{paths[p]}\0{n}" for p, n in zip(piece.tolist(), position.tolist(), strict=True))


def keys(columns: Sequence[pa.ChunkedArray]) -> Iterable[str]:
    """What tells rows by these columns, as text."""
    found = zip(*map(said, columns), strict=True)
    return (json.dumps(key, default=str, ensure_ascii=False) for key in found)


def ids_of(texts: Iterable[str], copies: Iterable[str]) -> pa.Array:
    """Ids of rows: 32 hex digits of blake2b over what tells them, and the copy."""
    return pa.array(
        [
            hashlib.blake2b(f"{text}\0{copy or 0}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
            for text, copy in zip(texts, copies, strict=True)
        ],
        pa.string(),
    )

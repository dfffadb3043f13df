"""Tables of Delta Lake that are made to be looked at and removed: deltalake commits some that nobody can open, it
itself included, and a table with such a version in its log is lost.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator

import pyarrow as pa

TRIES, WAIT = 50, 0.02  # times to remove a folder, and seconds between them
TIMES = "timestampNtz"  # what a table has to say of itself that has times without a zone


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """A folder for a table, removed afterwards: where deltalake has failed, its threads write on for a while."""
    made = tempfile.mkdtemp(prefix="gristmill-")
    try:
        yield made
    finally:
        empty = 0
        for _ in range(TRIES):
            shutil.rmtree(made, ignore_errors=True)
            if (empty := 0 if os.path.exists(made) else empty + 1) > 1:
                break
            time.sleep(WAIT)


@functools.lru_cache(maxsize=64)
def unopened(columns: pa.Schema) -> str | None:
    """Why a table that gets these columns could not be opened again; None if it can."""
    if not len(columns) or _opens(columns):
        return None
    alone = [field for field in columns if not _opens(pa.schema([field]))]
    named = ", ".join(f"column {field.name!r} ({field.type})" for field in alone or columns)
    return (
        f"{named}: deltalake would make a table of it that nobody can open: cast it in a step (times in maps to ones "
        "with a time zone), or leave it out (drop=)"
    )


def _opens(columns: pa.Schema) -> bool:
    import deltalake
    from deltalake.transaction import create_table_with_add_actions

    with folder() as path:
        try:
            create_table_with_add_actions(path, deltalake.Schema.from_arrow(columns), [])
            deltalake.DeltaTable(path)
        except (deltalake.exceptions.DeltaError, pa.ArrowException, OSError, ValueError):
            return False
    return True


def has_times(kind: pa.DataType) -> bool:
    """Whether a type has times without a zone, at any depth."""
    inner = (kind.field(n).type for n in range(kind.num_fields))
    return bool(pa.types.is_timestamp(kind) and kind.tz is None) or any(map(has_times, inner))

"""What sources that are databases share: the statement that gives their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gristmill.errors import BadSource, did_you_mean
from gristmill.job.snapshots import Wanted, table_of
from gristmill.stores.sql import quoted


def selected(
    wanted: Wanted,
    there: Sequence[str] | None = None,
    as_: Mapping[str, str] | None = None,
    more: Sequence[str] = (),
) -> str:
    """A statement for the rows that are wanted, with those of its columns. `there` are the columns that it has, and
    `as_` expressions for some of them, with {} for the column; `more` are further expressions.
    """
    if wanted.query is not None:
        rows = f"(\n{wanted.query.strip().rstrip(';')}\n) AS q"  # a comment may end the query
    else:
        rows = ".".join(quoted(name) for name in table_of(wanted) if name)
    if there is None:
        return f"SELECT * FROM {rows}"
    columns = [f"{(as_ or {}).get(n, '{}').format(quoted(n))} AS {quoted(n)}" for n in read_of(wanted, there)]
    return f"SELECT {', '.join([*columns, *more])} FROM {rows}"


def counting(wanted: Wanted) -> str:
    """A statement that counts the rows that are wanted."""
    return f"SELECT count(*) FROM ({selected(wanted)}) AS counted"


def read_of(wanted: Wanted, there: Sequence[str]) -> list[str]:
    """The columns that are read of those that a store has. Raises BadSource for one that is not there, or is twice."""
    if len(set(there)) < len(there):
        twice = next(name for name in there if list(there).count(name) > 1)
        raise BadSource(f"{wanted.shown}: two columns are named {twice!r}: give them other names in the query (AS)")
    asked = list(there) if wanted.columns is None else list(wanted.columns)
    for name in asked:
        if name not in there:
            raise BadSource(
                f"{wanted.shown}: there is no column {name!r}: it has {', '.join(there)}{did_you_mean(name, there)}"
            )
    return asked

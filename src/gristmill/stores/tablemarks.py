"""Whether marks that are kept by a table's name are of the table that has the name now: one that somebody renames,
restores or puts back brings its rows along, and leaves the marks where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from gristmill.stores.contract import Mark


def is_of(mark: Mark, now: str) -> bool:
    """Whether a mark is of the table that is there `now` (see `Database.which`), as far as that is known. Where the
    table of marks is another one as well, all of the schema was restored, and the mark with its table.
    """
    if not mark.table or not now:
        return not mark.past
    (own, beside), (there, marks) = mark.table.split(), now.split()
    return own == there or (beside != marks and not mark.past)


def live(found: Mark | None, marks: Sequence[Mark], now: str, count: Callable[[], int]) -> Mark | None:
    """A sink's mark; doubtful if it is of another table than is there now, in which rows of this sink may be, too; None
    if they are not, as others' marks tell of all of its rows.
    """
    if found is None or is_of(found, now):
        return found
    held = [mark for mark in marks if is_of(mark, now)]
    if any(mark.unmarked for mark in held):
        return replace(found, doubtful=True)
    told = [mark.rows if mark.mode == "replace" or mark.delete else mark.total for mark in held]
    known = sum(rows for rows in told if rows is not None)
    return None if None not in told and count() == known else replace(found, doubtful=True)


def beside(others: Iterable[Mark], now: str, *, made: bool, whole: bool) -> Iterator[tuple[Mark, Mark | None]]:
    """The marks of other sinks once something is delivered, each with what becomes of it. Of a table that was `made`
    for that they are not: they are kept as those of one that may be put back. With the rows of others (`whole`) their
    marks go, but for those of a table that is not there.
    """
    for mark in others:
        if made:
            yield mark, replace(mark, past=True)
        elif not is_of(mark, now):
            yield mark, mark if mark.past or not whole else None
        elif whole:
            yield mark, None
        else:
            yield mark, replace(mark, past=False, table=now)

"""Whether marks that are kept by a table's name are of the table that has the name now: one that somebody renames,
restores or puts back brings its rows along, and leaves the marks where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from gristmill.stores.contract import Mark


def is_of(mark: Mark, now: str) -> bool:
    """Whether a mark is of the table that is there `now` (see `Database.which`), as far as that is known."""
    if not mark.table or not now:
        return not mark.past
    return came_to(mark, now) or _restored(mark, now)


def came_to(mark: Mark, now: str) -> bool:
    """Whether it is known that a mark is of the table that is there now, whatever name it has."""
    own, there = mark.table.split(), now.split()
    return bool(own and there) and own[0] == there[0] and not _elsewhere(own, there)


def _elsewhere(own: Sequence[str], there: Sequence[str]) -> bool:
    """Whether a table was in another database, whose numbers say nothing here."""
    return min(len(own), len(there)) > 2 and own[2:] != there[2:]


def _restored(mark: Mark, now: str) -> bool:
    """Whether a mark seems to have come with its table, as that of marks is another one as well, or the database is:
    all of the schema was restored.
    """
    own, there = mark.table.split(), now.split()
    if mark.past or not own or not there:
        return False
    return _elsewhere(own, there) or (own[0] != there[0] and own[1] != there[1])


def lacks(marks: Iterable[Mark], now: str, count: Callable[[], int]) -> bool:
    """Whether a table that seems to have been restored with its marks has fewer rows than they tell of: it was restored
    once more, without them.
    """
    held = [mark for mark in marks if is_of(mark, now)]
    if not any(_restored(mark, now) for mark in held):
        return False
    appended = sum(mark.total for mark in held if mark.total is not None)
    return count() < max(appended, *(mark.rows for mark in held))


def live(found: Mark | None, marks: Sequence[Mark], now: str, count: Callable[[], int]) -> Mark | None:
    """A sink's mark; doubtful if it is of another table than is there now, in which rows of this sink may be, too; None
    if they are not, as that one was made without them, or others' marks tell of all of its rows.
    """
    if found is None or (is_of(found, now) and not _restored(found, now)):
        return found
    if _restored(found, now):
        return replace(found, doubtful=True) if lacks(marks, now, count) else found
    if now and found.past and found.without == now:
        return None
    held = [mark for mark in marks if is_of(mark, now)]
    if any(mark.unmarked for mark in held):
        return replace(found, doubtful=True)
    told = [mark.rows if mark.mode == "replace" or mark.delete else mark.total for mark in held]
    known = sum(rows for rows in told if rows is not None)
    return None if None not in told and count() == known else replace(found, doubtful=True)


def beside(
    others: Iterable[Mark], now: str, *, made: bool, whole: bool, lacking: bool
) -> Iterator[tuple[Mark, Mark | None]]:
    """The marks of other sinks once something is delivered, each with what becomes of it. Of a table that was `made`
    for that they are not: they are kept as those of one that may be put back. With the rows of others (`whole`) their
    marks go, but for those of a table that is not there. Where rows are `lacking`, marks that came with it are doubted.
    """
    for mark in others:
        if made:
            yield mark, replace(mark, past=True, without=now)
        elif not is_of(mark, now):
            kept = replace(mark, without=now) if whole else mark
            yield mark, kept if mark.past or not whole else None
        elif whole:
            yield mark, None
        else:
            doubtful = mark.doubtful or (lacking and _restored(mark, now))
            yield mark, replace(mark, past=False, table=now, doubtful=doubtful)

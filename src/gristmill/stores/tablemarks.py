"""The marks of the table that is there: a mark belongs to the table that its rows came to, whatever name that has now.
The name counts only where nothing tells tables apart, as somebody has given a witness to a copy, say, or where all was
restored, so that numbers of tables are others.
Marks of other tables are left as they are: these may be there under other names, or be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from gristmill.stores.contract import Mark
from gristmill.stores.sql import Session, Which, is_shared, told_by
from gristmill.values import dataclass

_REPLACED = 256  # sinks of which a mark tells that their rows were replaced: each night may have one
_REMEMBERED = 8  # tables that had a name and are gone: they may be put back


@dataclass(frozen=True)
class Row:
    """A mark as it is kept: in which table of marks, and the name of the target that it was written for."""

    at: str
    target: str
    which: str
    mark: Mark

    @property
    def place(self) -> tuple[str, str, str, str]:
        """What tells it from all others."""
        return self.at, self.target, self.which, self.mark.sink

    def removed(self, session: Session) -> None:
        sql = f"DELETE FROM {self.at} WHERE target = ? AND which = ? AND sink = ?"
        session.run(sql, self.target, self.which, self.mark.sink)

    def added(self, session: Session) -> None:
        values = self.target, self.which, self.mark.sink, self.mark.dump().decode()
        session.run(f"INSERT INTO {self.at} VALUES (?, ?, ?, ?)", *values)


@dataclass(frozen=True)
class Marks:
    """What is known of the deliveries to a table. `counted` are the marks of it; `certain` if the table tells that they
    are, `restored` if they seem to have come with it from elsewhere, or it may be another one with the same witness.
    `named` are all others of its name, or where nothing is certain all of that; `loose` those by which it is read then:
    of no table that is known to have another name. `beside` are marks of its witness that were written for other names,
    where several tables have it or had it.
    """

    there: Which
    counted: Sequence[Row]
    loose: Sequence[Row]
    named: Sequence[Row]
    certain: bool
    restored: bool
    beside: Sequence[Row] = ()

    @property
    def doubted(self) -> list[Row]:
        """Those of other names, whose rows may be in the table whatever its own marks tell of: it may be one of these
        tables, where these are gone; or one of this name that told nothing, and was made anew with another's witness.
        """
        gone = _gone(self.beside, self.there)
        renamed = self.certain and any(row.target != self.there.name for row in self.counted)
        return gone + [row for row in self.named if renamed and not (row.mark.table or row.mark.past)]

    def told(self, now: str, *, whole: bool) -> str:
        """What the next mark is to tell of the table that is `now` there: as long as marks are beside it of one that it
        may be, too, and its rows are not all new (`whole`), the name counts.
        """
        own = _same(now, self.there.now) and not is_shared(now)
        kept = own and not whole and _gone(self.beside, self.there)
        return told_by(now.split(maxsplit=1)[0], shared=True) if kept else now

    @property
    def held(self) -> list[Mark]:
        """The marks of all sinks whose rows are known to be in the table."""
        return [replace(mark, past=False) if mark.past else mark for mark in _latest(self.counted).values()]

    @property
    def read(self) -> list[Mark]:
        """The marks by which values are read: where none is known to be of the table, those that were the last to come
        to one of its name that is gone.
        """
        return self.held or list(_latest(_group(self.loose)).values())

    @property
    def last(self) -> Mark | None:
        """The mark of what was delivered last."""
        return max(self.read, key=_when, default=None)

    @property
    def turn(self) -> int:
        """Of the latest mark."""
        return max((row.mark.turn for row in (*self.counted, *self.named, *self.beside)), default=0)

    def lacking(self, count: Callable[[], int]) -> bool:
        """Whether a table that seems to have been restored with its marks has fewer rows than they tell of: it was
        restored once more, without them.
        """
        if not self.restored:
            return False
        held = self.held
        return count() < max(sum(mark.total or 0 for mark in held), *(mark.rows for mark in held))

    def live(self, sink: str, count: Callable[[], int]) -> Mark | None:
        """A sink's mark; doubtful if it is of another table than is there now, in which rows of this sink may be, too;
        None if they are not, as the marks of the table tell of all that was delivered there.
        """
        if (found := next((mark for mark in self.held if mark.sink == sink), None)) is not None:
            return replace(found, doubtful=True) if self.lacking(count) else found
        if (other := _latest((*self.named, *self.beside)).get(sink)) is None:
            return None
        # Of those beside, too: tables with one witness may have swapped their names.
        doubted = any(row.mark.sink == sink for row in (*self.doubted, *self.beside))
        if (not doubted and self._tells_all(count)) or not count():
            return None
        return replace(other, doubtful=True, past=True)

    def _tells_all(self, count: Callable[[], int]) -> bool:
        told = self.certain or (self.restored and not self.lacking(count))
        return told and not any(mark.unmarked for mark in self.held)

    def unmarked(self, count: Callable[[], int]) -> int:
        """See `contract.Unmarked`."""
        held = self.held
        if held and not any(mark.unmarked for mark in held) and not self.lacking(count):
            return 0
        return count()

    def untold(self, sink: str, last: tuple[int, str], count: Callable[[], int]) -> int:
        """How many rows there are, if none of the marks is of this sink, and others' tell neither that its `last` rows
        were replaced nor of just as many: it is not known then whether it has some.
        """
        gone = [(number, at) for mark in self.held for of, number, at in mark.replaced if of == sink]
        if sink in _latest((*self.counted, *self.named)) or any(last == one or last[0] < one[0] for one in gone):
            return 0
        told = [mark.rows if mark.mode == "replace" or mark.delete else mark.total for mark in self.held]
        known, rows = sum(number or 0 for number in told), count()
        return 0 if rows == known and None not in told else rows

    def note(self, session: Session, mark: Mark, *, now: str, made: bool, whole: bool, lacking: bool) -> None:
        """Write a mark of what came to the table, which is `now` this one, and was `made` for that if there was none;
        with the rows of others (`whole`) their marks go, else they are those of the table as well.
        """
        counted = () if made else self.counted
        gone, new = list(counted), [self._replacing(mark, counted, whole)]
        if whole and _same(now, self.there.now) and not self.there.others:  # others may be those, renamed
            gone += _gone(self.beside, self.there)  # it is known by its witness from now on
        if not whole:
            beside = (replace(m, past=False) for s, m in _latest(counted).items() if s != mark.sink)
            new += [replace(m, table=now, doubtful=m.doubtful or lacking) for m in beside]
        if not now:  # the next mark is known by the same name: those of others are told from it
            past = _without(self.loose, counted)
            known = {one.sink for one in new}
            gone += past
            kept = () if whole and not made else past
            new += [replace(row.mark, past=True) for row in kept if row.mark.table or row.mark.sink not in known]
        gone += self._forgotten(mark.sink, counted)
        rows = [Row(self.there.marks, self.there.name, one.table, one) for one in new]
        before, after = ({row.place: row for row in some} for some in (gone, rows))
        for place, row in before.items():
            if after.get(place) != row:
                row.removed(session)
        for place, row in after.items():
            if before.get(place) != row:  # those of hundreds of other sinks stay as they are
                row.removed(session)
                row.added(session)

    def _forgotten(self, sink: str, counted: Iterable[Row]) -> Iterable[Row]:
        """A sink's marks of tables that had this name long ago, and are nowhere now: a job may make one each night."""
        told = [row for row in _without(self.named, counted) if row.mark.sink == sink and row.mark.table]
        older = sorted(told, key=lambda row: _when(row.mark))[:-_REMEMBERED]
        return [row for row in older if not self.there.elsewhere(row.mark.table)]

    @staticmethod
    def _replacing(mark: Mark, counted: Iterable[Row], whole: bool) -> Mark:
        """A mark with the sinks whose rows were replaced since the table was made, the last of them."""
        gone: dict[str, tuple[str, int, str]] = {}
        for sink, known in sorted(_latest(counted).items(), key=lambda found: _when(found[1])):
            if whole or sink == mark.sink:
                for one in (*known.replaced, (sink, known.generation, known.at)):
                    gone.pop(one[0], None)  # the latest stand last
                    gone[one[0]] = one
        gone.pop(mark.sink, None)
        return replace(mark, replaced=tuple(gone.values())[-_REPLACED:])


def marks_of(session: Session, there: Which, shown: str) -> Marks:
    """The marks of the table that is there: for whoever delivers to it, counts its rows, or looks them up."""
    rows = _rows(session, there, shown)
    named = _named(rows, there)
    own = [row for row in rows if _came_to(row.mark, there.now)]
    if counted := _told_apart(own, there):
        beside = _without(own, counted)
        unsure = bool(_gone(beside, there))
        return Marks(there, counted, (), _without(named, own), certain=True, restored=unsure, beside=beside)
    loose = _loose(named, there)
    group = _group(loose)
    restored = bool(group) and _restored(group[0].mark, there.now)
    # Where the table does not tell, but others of its name did, it may be any of them.
    by_name = bool(group) and (not group[0].mark.table if there.now else len(group) == len(_current(loose)))
    counted = group if by_name or restored else []
    return Marks(there, counted, loose, named, certain=False, restored=restored, beside=own)


def marks_astray(session: Session, there: Which, sink: str, shown: str) -> Iterable[Row]:
    """A sink's marks beside the table that were written for other names, and may be of it, as nothing tells otherwise:
    the numbers of tables say nothing of one that was restored.
    """
    if not session.columns(at := there.marks):
        return
    sql = f"SELECT target, which, body FROM {at} WHERE sink = ? AND target <> ?"
    for target, which, body in session.run(sql, sink, there.name):
        mark = Mark.load(body.encode(), shown)
        another = there.now and mark.table and not _restored(mark, there.now)
        if not another and not (mark.table and there.elsewhere(mark.table)):
            yield Row(at, target, which, mark)


def copies_of(session: Session, there: Which, mark: Mark) -> Sequence[str]:
    """The other tables with the witness that a mark alone tells of, for whose names none was written: the table that
    it came to, renamed, or copies.
    """
    if (
        not mark.table
        or is_shared(mark.table)
        or not (having := [name for name in there.having(mark.table) if name != there.name])
    ):
        return ()
    sql = f"SELECT target FROM {there.marks} WHERE which LIKE ?"
    own = {target for (target,) in session.run(sql, f"{mark.table.split()[0]} %")}
    return [name for name in having if name not in own]


def last_mark(session: Session, there: Which, shown: str) -> Mark | None:
    """The mark of what was delivered last, for whoever looks rows up: those of others of the name, of which there may
    be hundreds, are not read if the table has its own.
    """
    by_name = {"target = ?": there.name, "which LIKE ?": f"{there.now.partition(' ')[0]} %"}
    # The last delivery to a table gave all of its marks the name of then: if it still has that, no others are read.
    for asked in (by_name, {"which LIKE ?": by_name["which LIKE ?"]}) if there.now else ():
        rows = _kept(session, there.marks, asked, " AND ", shown)
        if own := _told_apart([row for row in rows if _came_to(row.mark, there.now)], there):
            return Marks(there, own, (), (), certain=True, restored=False).last
    found = marks_of(session, there, shown)
    return replace(found, loose=_copied(found.beside, there) or found.loose).last


def _rows(session: Session, there: Which, shown: str) -> list[Row]:
    """Those of the table, and beside it those of its name."""
    own = {"which LIKE ?": f"{there.now.split()[0]} %"} if there.now else {}
    rows = list(_kept(session, there.marks, {"target = ?": there.name, **own}, " OR ", shown))
    if own and not any(_came_to(row.mark, there.now) for row in rows):  # a restored mark may tell the same number
        named = _named(rows, there)
        places = there.left(lambda: any(_restored(row.mark, there.now) for row in _group(_loose(named, there))))
        rows += [row for place in places for row in _kept(session, place, own, "", shown)]
    return rows


def _told_apart(own: list[Row], there: Which) -> list[Row]:
    """Those of the table of all that tell its words: where several tables have these, or had when the last delivery
    came to one, only those that were written for its name. A table that tells no others has had them alone since.
    """
    here = [row for row in own if row.target == there.name]
    if there.others or any(is_shared(row.which) for row in own):
        return here
    return own


def _copied(own: Sequence[Row], there: Which) -> Sequence[Row]:
    """Those by which a table is read that has another one's witness: of just one, if it has not got rows since."""
    one = len({row.target for row in own}) == 1
    return own if one and not any(is_shared(row.which) and row.target in there.others for row in own) else []


def _gone(rows: Iterable[Row], there: Which) -> list[Row]:
    """Those of tables that are not there under their names, whose witness a table has: it may be one of these."""
    return [row for row in rows if row.target not in (there.name, *there.others)]


def _named(rows: Iterable[Row], there: Which) -> list[Row]:
    return [row for row in rows if row.target == there.name and row.at == there.marks]


def _loose(named: Iterable[Row], there: Which) -> list[Row]:
    """Those of no table that is known to have another name."""
    return [row for row in named if not (row.mark.table and there.elsewhere(row.mark.table))]


def _kept(session: Session, at: str, asked: Mapping[str, str], joined: str, shown: str) -> Iterator[Row]:
    """What one table of marks has of what is asked."""
    if session.columns(at):
        sql = f"SELECT target, which, body FROM {at} WHERE {joined.join(asked)}"
        for target, which, body in session.run(sql, *asked.values()):
            yield Row(at, target, which, _loaded(body, shown))


@lru_cache(1024)
def _loaded(body: str, shown: str) -> Mark:
    """A mark: each lookup reads those of all sinks, and a delivery does several times."""
    return Mark.load(body.encode(), shown)


def left_in(session: Session, there: Which) -> Sequence[str]:
    """The tables of marks in other schemas that have some of the table, where none are beside it."""
    if not there.now:
        return ()
    sql = f"SELECT DISTINCT which FROM {there.marks} WHERE which LIKE ?"
    told = session.run(sql, f"{there.now.split()[0]} %") if session.columns(there.marks) else []
    return () if any(_same(which, there.now) for (which,) in told) else there.left(lambda: False)


def _without(rows: Iterable[Row], others: Iterable[Row]) -> list[Row]:
    places = {row.place for row in others}
    return [row for row in rows if row.place not in places]


def _current(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if not row.mark.past]


def _group(rows: Iterable[Row]) -> list[Row]:
    """The marks of the table that was the last to have a name."""
    there = _current(rows)
    last = max((row.mark for row in there), key=_when, default=None)
    return [row for row in there if last is not None and _same(row.mark.table, last.table)]


def _latest(rows: Iterable[Row]) -> dict[str, Mark]:
    """The latest mark of each sink."""
    return {mark.sink: mark for mark in sorted((row.mark for row in rows), key=_when)}


def _when(mark: Mark) -> tuple[int, str]:
    return mark.turn, mark.at


def _same(one: str, other: str) -> bool:
    """Whether what is told of two tables is told of one."""
    a, b = one.split(), other.split()
    return a[:1] == b[:1] and not _elsewhere(a, b)


def _came_to(mark: Mark, now: str) -> bool:
    """Whether it is known that a mark is of the table that is there now, whatever name it has."""
    return bool(mark.table and now) and _same(mark.table, now)


def _elsewhere(own: Sequence[str], there: Sequence[str]) -> bool:
    """Whether a table was in another database, whose numbers say nothing here."""
    return min(len(own), len(there)) > 2 and own[2:] != there[2:]


def _restored(mark: Mark, now: str) -> bool:
    """Whether a mark seems to have come with its table, as that of marks is another one as well, or the database is:
    all of the schema was restored.
    """
    own, there = mark.table.split(), now.split()
    if not own or not there:
        return False
    return _elsewhere(own, there) or (own[0] != there[0] and own[1] != there[1])

"""Which generation an update works on: one made of the source as it is now, and of the answers of the live result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace

from gristmill.commit import generation as generations
from gristmill.commit import receipt as receipts
from gristmill.commit.generation import Generation
from gristmill.driver.resolved import Resolved
from gristmill.driver.selection import Choice, Held, chosen, compared, paid
from gristmill.errors import BadJob, CorruptStore, PlanChanged
from gristmill.files.contract import Files
from gristmill.observe import units
from gristmill.observe.standing import UNREAD
from gristmill.shards import shard
from gristmill.shards.counts import Counts

ROWS = (
    "options: source.where ",
    "options: source.limit ",
    "options: source.sample ",
    "options: source.seed ",
    "options: source.uri in order ",
)


def choose(
    files: Files, root: str, uri: str, r: Resolved, *, append: bool, accept: bool, tell: Callable[[str], None]
) -> Choice:
    """Go on with an unfinished run of the same job over the same source; begin an update where anything differs. It
    keeps the answers of unfinished runs, too, which are given up. Where there is no result yet, an unfinished run of
    the job over other rows is given up so, and PlanChanged is raised for one of something else.
    """
    if append:
        raise BadJob(
            f"{uri}: the job has update, which scores new files, and what changed in the others besides: leave out "
            "--append (append=True)"
        )
    held = Held.by(root, files, tell)
    try:
        found = chosen(held, uri, r, append=False, accept=accept)
        if not found.later:
            begins = found.generation is not None and not found.resumed
            return replace(found, carries=tuple(_carried(held, held.known(r)))) if begins else found
        first = found.generation
        if held.latest is None and first is not None and not generations.read_plan(first).about.unseen:
            return found  # the files that appeared since come once it is done; without a row it may never be
    except PlanChanged:
        if held.latest is None and not _of_other_rows(held, r):
            raise
    r = held.known(r)
    carries = tuple(_carried(held, r))
    if carries:
        _tell(held, carries)
    generation = held.claim("new" if held.latest is None else "update", r, carries=bool(carries))
    return Choice(generation, False, r, updates=held.latest, carries=carries)


def _of_other_rows(held: Held, r: Resolved) -> bool:
    """Whether a sink without a result has a run that is unfinished, of this job but for the rows of its source."""
    begun = held.unfinished
    return begun is not None and begun.planned and not differing(begun, held.known(r), held)


def _carried(held: Held, r: Resolved) -> Iterator[Generation]:
    """The unfinished generations since the result whose answers hold, the newest first: one after the other may have
    kept answers of those before, and not committed them. Those before a --restart were given up by that.
    """
    since = 0 if held.latest is None else max(held.latest.generations)
    for begun in reversed(held.claims):
        if begun.number <= since:
            return
        if begun.kind in ("new", "update", "restart", "retry-dead") and begun.planned and not differing(begun, r, held):
            yield begun
        if begun.kind == "restart" and not begun.lost:
            return


def _tell(held: Held, carries: Sequence[Generation]) -> None:
    begun = carries[0]
    done, shards = len(receipts.listed(begun.receipts, begun.files)), len(generations.read_plan(begun).shards)
    what = "the first run" if begun.kind == "new" else f"the unfinished {begun.kind}"
    said = f", with {dropped}" if (dropped := paid(begun)) else ""
    held.tell(
        f"the source is not as it was when {what} here began: that run (generation {begun.number}, {done} of "
        f"{units.plural(shards, 'shard')} done) is given up{said}: rows that are as they were keep their answers"
    )


def foreseen(held: Held, r: Resolved) -> str:
    """What an update would find in a sink that is not of this source as it is, as a line; "" if it is refused. Nothing
    is claimed or written.
    """
    if held.latest is None:
        other = (
            "an unfinished first run over other rows of the source: a run keeps answers to rows that are as they were"
        )
        return other if _of_other_rows(held, r) else ""
    lines = differing(held.members()[-1], held.known(r), held)
    if lines:
        return f"a result, which a run makes anew: {told(lines)}"
    return "a result, which a run updates: rows that are new or changed are scored, the others keep their answers"


def differing(member: Generation, r: Resolved, held: Held) -> list[str]:
    """What differs between a generation and a job so that its answers no longer hold: all but the inputs, and which
    rows of them are taken.
    """
    lines = compared(member, r.fingerprint, r.fingerprint.inputs)
    return [line for line in lines if not line.startswith(("input:", *ROWS))]


def at_most(held: Held, r: Resolved) -> str:
    """How many rows an update scores at most, by what files alone tell, as a clause."""
    if r.more:
        return "how many that are is known once a run has read them"
    same = _as_they_were(held, r)
    if (rows := _in_others(r, same)) is None:
        return "no file is as it was, so that how many rows that are is known once they are read: estimates are of all"
    dead = ", and the dead ones" if _dead(held) else ""
    of = units.count(round(r.estimated_rows))
    return (
        f"{units.count(len(same))} of {units.plural(len(r.files), 'file is as it was', 'files are as they were')}, so "
        f"that at most {units.count(round(rows))} of {of} rows{dead} are scored"
    )


def rows_at_most(held: Held, r: Resolved) -> float | None:
    """The rows that an update scores at most, by what files alone tell; None if they do not."""
    rows = None if r.more else _in_others(r, _as_they_were(held, r))
    return None if rows is None else rows + _dead(held)


def _as_they_were(held: Held, r: Resolved) -> set[str]:
    before = held.inputs(held.members(), r)
    return {path for path, digest in r.fingerprint.inputs.items() if before.get(path) == digest}


def _in_others(r: Resolved, same: set[str]) -> float | None:
    """About how many rows are in files that are not the `same`; None if none is."""
    spans = [(r.files[f], a, b) for f, a, b in r.selection.ranges.tolist()]
    if not same or not spans:
        return None
    return sum(shard.estimated_rows(f, a, b) for f, a, b in spans if f.file.path not in same)


def _dead(held: Held) -> int:
    return 0 if held.latest is None else held.latest.body.rows_dead


def missed(held: Held, r: Resolved, gone: Callable[[], int | None]) -> str:
    """Why a result made anew must not be published whose source has files that cannot be read: the one before has rows
    of them, or of files that are gone, or rows that are `gone` (None: not known), which may be in them. "" if it has
    none.
    """
    if not r.unread or held.latest is None:
        return ""
    them = "it" if len(r.unread) == 1 else "them"
    try:
        absent = _with_rows(held.members(), frozenset(r.fingerprint.inputs))
    except CorruptStore as e:
        return _held_back(r.unread, f"may have rows of {them}: which files its rows are of cannot be told ({e})")
    if absent & set(r.unread):
        return _held_back(r.unread, f"has rows of {them}, which are not gone")
    if absent:
        return _held_back(
            r.unread, f"has rows of {_listed(sorted(absent))}, no longer in the source, which may be in {them}"
        )
    if (rows := gone()) == 0:
        return ""
    of = "may have rows" if rows is None else f"has {units.plural(rows, 'row')}"
    return _held_back(r.unread, f"{of} that no file which can be read has any more, and which may be in {them}")


def _held_back(unread: Sequence[str], why: str) -> str:
    they, them, one = ("it is", "it", "the file") if len(unread) == 1 else ("they are", "them", "the files")
    return (
        f"{_listed(unread)} {UNREAD} the result {why}: nothing new was published, and the result before stands. Put "
        f"{one} right and run again; if {they} to leave, --accept (accept=True) publishes the others without {them}"
    )


def _with_rows(members: Sequence[Generation], there: Set[str]) -> set[str]:
    """The files of generations that are not `there`, and of whose shards some rows were not left out. Raises
    CorruptStore if a plan is damaged.
    """
    found: set[str] = set()
    for member in members:
        if generations.stored_inputs(member).keys() <= there:
            continue
        shards, done = generations.read_plan(member).shards, receipts.standing(member.receipts, member.files)
        for number in range(len(shards)):
            counts = Counts(*done[number].counts) if number in done else None
            if counts is None or counts.ok or counts.all_dead:  # one whose receipt is damaged may have rows
                found.update(piece.file.path for piece in shards[number].pieces)
    return found - there


def _listed(paths: Sequence[str]) -> str:
    return f"{', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"


def told(lines: Sequence[str], generation: int | None = None) -> str:
    """Why all rows are scored, or those of one generation, as a sentence."""
    more = f", and {units.plural(len(lines) - 3, 'other difference')}" if len(lines) > 3 else ""
    what = "no answer is kept, and all rows are scored"
    what = what if generation is None else f"no answer of generation {generation} is kept"
    return f"{what}: {'; '.join(lines[:3])}{more}"

"""The index of a sink: what a job asks for, made before its result is published, or for one that stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gristmill.commit import publication, publish
from gristmill.commit.documents import Described, Indexed, Live, PlanDocument
from gristmill.commit.generation import decode_schema, generations, pending
from gristmill.driver.choice import Chosen
from gristmill.driver.opening import Opened
from gristmill.driver.runlog import RunLog
from gristmill.files.disk import sizes_of
from gristmill.observe import units
from gristmill.sinks.formats import sink_format

if TYPE_CHECKING:
    from gristmill.stores.sinkindex import Made


def fitting(at: Chosen, about: PlanDocument) -> None:
    """Once the schema of the rows is known, see that they can be looked up as the job asks. Raises BadJob."""
    if at.sink.index and not about.unseen:
        from gristmill.stores import sinkindex

        tables = sink_format(about.sink_format).tables
        sinkindex.check(decode_schema(about.output_schema), at.sink.index, tables, at.sink.uri)


def made(s: Chosen, about: PlanDocument, live: Sequence[Live], members: Sequence[int]) -> Made | None:
    """The index of what is about to be published, whose files are `live`, of the generations `members`; None if the job
    asks for none, or there is no row whose columns are known.
    """
    if not s.sink.index or _blank(about, live):
        return None
    from gristmill.stores import sinkindex

    base = None if s.base is None or s.generation.base is None else s.base.body.index
    base = _there(s, base)
    return _told(sinkindex.made(s.generation, live, members, about, s.sink.index, base), s.log)


def again(at: Opened) -> None:
    """Make the index that the job asks for and that its result does not have, and publish the result once more with it.
    Nothing is scored. Raises BadJob, and SinkBusy if another run has published meanwhile.
    """
    result = publication.latest(at.root, at.files)
    if not at.sink.index or result is None:
        return
    about, by = result.body, at.sink.index
    if _blank(about, result.live()):
        return
    from gristmill.stores import sinkindex

    standing = _there(at, about.index)
    asked = standing is not None and sinkindex.same(standing, by, sinkindex.types_of(about, by))
    if asked and not sinkindex.misfits(result):
        return
    sinkindex.check(decode_schema(about.output_schema), by, sink_format(about.sink_format).tables, at.sink.uri)
    if (begun := pending(generations(at.root, at.files), result.number)) is not None:
        at.log.note(
            "warning", f"no index was made, as an unfinished {begun.kind} would be lost by it: finish that first"
        )
        return
    generation = next(g for g in generations(at.root, at.files) if g.number == result.generation)
    at.log.say(phase="publishing")
    at.refuse_late()
    found = _told(sinkindex.made(generation, result.live(), result.generations, about, by, None), at.log)
    at.refuse_late()
    publish.link_parts(at.files, generation, publication.live_of(generation, [found.receipt]))
    publication.again(result, found.index)
    publish.settle(at.root, at.files)
    at.log.tell(f"made an index by {', '.join(by)}")


def _blank(about: Described, live: Sequence[Live]) -> bool:
    return about.unseen and not any(f.rows for f in live if f.role == "rows")


def _there(at: Opened, index: Indexed | None) -> Indexed | None:
    """An index, if all its files are there."""
    if index is None:
        return None
    there = sizes_of(at.root, {f.name for f in index.files}, at.files)
    return index if all(there.get(f.name) == f.bytes for f in index.files) else None


def _told(found: Made, log: RunLog) -> Made:
    if found.repeats:
        rows = units.plural(found.repeats, "row has", "rows have")
        by = ", ".join(found.index.by)
        log.note("warning", f"index by {by}: {rows} the key of another: a lookup finds the last of the latest night")
    return found

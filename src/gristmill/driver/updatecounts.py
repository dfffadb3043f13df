"""What the report says of an update: how many rows kept their answers, were scored, and are gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pyarrow as pa

from gristmill.arrow.spilling import apart, given, spilling
from gristmill.commit import fates
from gristmill.commit import generation as generations
from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Matched
from gristmill.commit.fates import KEPT, SCORED
from gristmill.commit.generation import Generation
from gristmill.commit.publication import Publication, published
from gristmill.commit.receipt import Receipt
from gristmill.driver.scoring import Scored
from gristmill.driver.selection import Held
from gristmill.errors import CorruptStore

UNKNOWN = "how many rows are gone is not known"
MEMORY = "256MB"  # of DuckDB, to count the rows that are gone
_KEYS = pa.schema([("key", pa.uint64())])


def counted(s: Scored) -> dict[str, int]:
    """How many source rows were kept, scored and, if the result before tells its rows apart as this one does, are gone.
    Nothing for a generation that is no update.
    """
    if s.generation.kind != "update":
        return {}
    told = {name: int(s.receipts.sums.figures.get(name, 0)) for name in (KEPT, SCORED)}
    found = {"kept": told[KEPT], "scored": told[SCORED]}
    gone = _gone(s, published(s.root, s.files))
    return found if gone is None else {**found, "gone": gone}


def _gone(s: Scored, before: Publication) -> int | None:
    members = [g for g in Held.by(s.root, s.files).members(before) if g.kind != "retry-dead"]
    old: list[tuple[Generation, Receipt]] = []
    for member in members:
        plan, done = generations.read_plan(member), receipts.standing(member.receipts, s.files)
        if not _same_key(plan.about.matched, s.plan.about.matched):
            s.log.tell(f"{UNKNOWN}: the rows before were not told by the same key")
            return None
        if gone := receipts.unreadable(done, len(plan.shards), member.number):
            s.log.tell(f"{UNKNOWN}: {gone}")
            return None
        old += [(member, x) for x in done.values()]
    new = [(s.generation, x) for x in s.receipts.values()]
    if _unrecorded(old) != _unrecorded(new):
        s.log.tell(f"{UNKNOWN}: files that were taken over as they were have no record of their rows by this key")
        return None
    both = Counter(_digests(old)) & Counter(_digests(new))  # shards that were taken over

    def keys(of: Sequence[tuple[Generation, Receipt]]) -> Iterator[pa.RecordBatch]:
        skipped = both.copy()
        for generation, receipt in of:
            if receipt.fates is None:
                continue
            if skipped[receipt.fates.sha256]:
                skipped[receipt.fates.sha256] -= 1
                continue
            if (found := fates.read(generation, receipt)) is None:
                raise CorruptStore(f"{generation.root}: {receipt.fates.work} is gone or not what was committed")
            yield pa.record_batch([pa.array(found[0].key)], schema=_KEYS)

    try:
        return _fewer(keys(old), keys(new))
    except CorruptStore as e:
        s.log.tell(f"{UNKNOWN}: {e}")
        return None


def _same_key(then: Matched | None, now: Matched | None) -> bool:
    """Whether both tell rows by the same columns, of the same types."""
    if then is None or now is None or then.key != now.key:
        return False
    old, new = dict(then.kinds), dict(now.kinds)
    return all(old[name] == new[name] for name in now.key)


def _unrecorded(of: Sequence[tuple[Generation, Receipt]]) -> Counter[tuple[str, ...]]:
    """Shards whose rows were not recorded, by what they have read and written."""
    some = [x for _, x in of if x.fates is None and x.counts[0] > x.counts[2]]  # more rows than `where` has left out
    return Counter((*x.read, *(p.sha256 for p in x.parts)) for x in some)


def _digests(of: Sequence[tuple[Generation, Receipt]]) -> list[str]:
    return [x.fates.sha256 for _, x in of if x.fates is not None]


def _fewer(old: Iterator[pa.RecordBatch], new: Iterator[pa.RecordBatch]) -> int:
    """How many more rows have each key in one than in the other, in all."""
    query = """
        select coalesce(sum(greatest(o.n - coalesce(m.n, 0), 0)), 0)
        from (select key, count(*) n from before group by key) o
        left join (select key, count(*) n from since group by key) m using (key)
    """
    with spilling(MEMORY) as connection, given(connection, before=(_KEYS, old), since=(_KEYS, new)):
        found = apart(lambda: connection.execute(query).fetchone(), connection)
    return int(found[0])

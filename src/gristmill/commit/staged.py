"""A result by its name: what a sink has published, had with an earlier generation (`@3`), or has staged (`@staged`):
what a gate, an audit or a deadline holds back, as it would be published.
"""

from __future__ import annotations

from dataclasses import fields

from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Described, Success
from gristmill.commit.generation import decode_schema, generations, pending, read_plan
from gristmill.commit.publication import Publication, latest, live_of, of_generation, published
from gristmill.errors import BadSource, CorruptStore
from gristmill.files.contract import Files
from gristmill.shards.counts import Counts

STAGED = "staged"


def result_named(root: str, files: Files, which: int | str | None) -> Publication:
    """The result of a sink by what its name has after the @; None is the latest. Raises BadSource."""
    if which is None:
        return published(root, files)
    return of_generation(root, which, files) if isinstance(which, int) else staged(root, files)


def staged(root: str, files: Files) -> Publication:
    """What is staged in a sink. Raises BadSource if that is nothing, or not all of it."""
    before = latest(root, files)
    number = 0 if before is None else before.number
    begun = pending(generations(root, files), number)
    if begun is None or not begun.planned:
        raise BadSource(f"{root}: nothing is staged there: all that was scored is published")
    if begun.kind == "retry-dead":
        raise BadSource(f"{root}: what is unfinished there is a retry-dead, whose rows are no result by themselves")
    plan, done = read_plan(begun), receipts.standing(begun.receipts, files)
    if len(done) < len(plan.shards):
        raise BadSource(
            f"{root}: the run that is unfinished there has scored {len(done)} of {len(plan.shards)} shards, and is no "
            "result yet"
        )
    base = before if begun.base is not None else None
    live = [*([] if base is None else base.live()), *live_of(begun, list(done.values()))]
    rows = tuple(f for f in live if f.role in ("rows", "ids", "dead"))
    counts = sum((Counts(*one.counts) for one in done.values()), Counts())
    counts = counts if base is None else Counts(*base.body.counts_list) + counts
    about = {f.name: getattr(plan.about, f.name) for f in fields(Described)}
    body = Success(
        **about, generations=(*(() if base is None else base.body.generations), begun.number), counts=counts,
        counts_list=counts.values(), rows_in=counts.rows_in, rows_ok=counts.ok, rows_dead=counts.all_dead,
        rows_filtered=counts.all_filtered, shards=len(done), published="", seconds=0.0, errors={}, skipped=(),
        publication=number + 1, generation=begun.number, files=rows,
    )  # fmt: skip
    return Publication(root, body, files)


def updated_by(result: Publication) -> tuple[str, ...]:
    """The columns by which the job of a result tells its rows from one night to the next (`update`), if they are kept
    in it; () if there are none.
    """
    own = next((g for g in generations(result.root, result.files) if g.number == result.generation), None)
    if own is None or own.lost:
        return ()
    try:
        matched = read_plan(own).about.matched
    except (CorruptStore, FileNotFoundError):
        return ()
    kept = decode_schema(result.body.output_schema).names
    return matched.key if matched is not None and all(name in kept for name in matched.key) else ()

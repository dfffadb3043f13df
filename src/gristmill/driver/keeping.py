"""The plan of an update: shards that are taken over as they are, and shards of which each row keeps its answers or is
scored. The result is a generation of its own, which needs nothing of the one before once it is published.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.commit import fates, inherited, keptindex
from gristmill.commit import generation as generations
from gristmill.commit import receipt as receipts
from gristmill.commit.documents import PlanDocument, ResultRecord, TableRecord
from gristmill.commit.fates import KEPT, SCORED
from gristmill.commit.generation import Generation, Plan, decode_schema, encode_schema
from gristmill.commit.keptindex import Shelf
from gristmill.commit.receipt import Part, Receipt
from gristmill.driver import inheriting, probe, shipping, sizes, updating
from gristmill.driver.choice import Chosen
from gristmill.driver.inheriting import Left, Place
from gristmill.driver.probe import Planned
from gristmill.driver.resolved import Resolved
from gristmill.driver.selection import LOADED, Held
from gristmill.errors import CorruptStore
from gristmill.files.disk import first_whole, join
from gristmill.shards import shard
from gristmill.shards.counts import Counts
from gristmill.shards.shard import RANGES, Selection
from gristmill.values import dataclass

ADOPTED = pa.schema([("shard", pa.int64()), ("generation", pa.int64()), ("of", pa.int64())])


@dataclass(frozen=True)
class Base:
    """A generation of the result before whose answers hold, with its plan and receipts. With `whole`, what it wrote is
    what this job would write, so that shards can be taken over; with `by_row`, rows are told as this job tells them.
    The files of the source in `unchanged` are as they were.
    """

    generation: Generation
    plan: Plan
    done: Mapping[int, Receipt]
    whole: bool
    by_row: bool
    unchanged: frozenset[str] = frozenset()

    def left(self, r: Resolved) -> list[Left]:
        """Its shards that are not committed and of which there are answers."""
        return inheriting.left(r, self.generation, self.plan, self.done)


Piece = tuple[list[Place], tuple[Base, int] | None]  # the ranges of a shard, and which it is if it is taken over


def planned(at: Chosen) -> Planned | None:
    """The plan of an update that is begun, whose columns are those of the result before, or of the unfinished run whose
    answers it keeps; None if nothing can be kept, so that all is as for a new result. Raises CorruptStore if the result
    before is damaged.
    """
    anew = any(one.kind == "restart" for one in at.carries)  # by --restart: answers of the result were given up
    result = at.updates if at.updates is not None and at.updates.body.rows_ok and not anew else None
    # One that was planned without a row to score knows no columns that rows need have, and has no answers.
    carries = [one for one in at.carries if not generations.read_plan(one).about.unseen]
    if at.plan is not None or (result is None and not carries):
        return None
    held = Held.by(at.root, at.files, at.log.tell_once)
    members = [] if result is None else held.members(result)
    about: ResultRecord | PlanDocument
    if carries:
        about, lines = generations.read_plan(carries[0]).about, []
    else:
        assert result is not None
        about, lines = result.body, updating.differing(members[-1], at.resolved, held)
    schema = None if lines else _schema(at.resolved, decode_schema(about.output_schema), tuple(about.answers))
    if schema is None:
        why = lines or ["a column of the result has held nothing but nulls so far, and so has no type"]
        at.log.tell(updating.told(why))
        return None
    bases, left_out = _bases(at, [*members, *carries[::-1]], schema, held)
    for line in left_out:
        at.log.tell(line)
    bases = _unchanged(at.resolved, members, bases, held)
    unfinished = [one for b in bases if b.generation in carries for one in b.left(at.resolved)]
    # The shards before may be small because there were few rows, and so do not tell how long they took.
    paces = [b.plan.about.pace for b in sorted(bases, key=lambda b: b.generation.number)]
    pace = next((p for p in reversed(paces) if p is not None), None)
    table, adopted = _shards(at, bases, unfinished, _beside(at.resolved, schema), sizes.shard_rows(at.resolved, pace))
    kept = _index(at, bases)
    if not (kept or adopted.num_rows or unfinished):  # so that nothing has to have the types that the result had
        if not left_out:
            at.log.tell(updating.told(["no file is as it was, and its rows cannot be told one by one"]))
        return None
    if adopted.num_rows:
        kept["adopted"] = _stored(at, adopted, "adopted")
    if unfinished:
        scored = sorted({*table.column("shard").to_pylist()} - {*adopted.column("shard").to_pylist()})
        kept[inherited.TABLE] = _stored(at, inheriting.heirs(unfinished, table, scored), inherited.TABLE)
    told = {"answers": dict(about.answers), "made": dict(about.made), "output_schema": encode_schema(schema)}
    at.files.settle([join(at.generation.folder, t.path) for t in kept.values()])
    number = 0 if at.updates is None else at.updates.number
    return probe.written(at, probe.described(at, **told, kept=kept, updates=number, pace=pace), table)


def _schema(r: Resolved, before: pa.Schema, answers: Sequence[str]) -> pa.Schema | None:
    """The columns of the result before, with the types that carried-over ones have now. None if the type of an answer
    is not known, as each was null.
    """
    how, sink = shipping.matching(r), r.job.sink
    assert how is not None and sink is not None
    fields = []
    for field in before:
        ours = field.name in (sink.row_id, sink.model_version)
        if not (how.opaque or ours or field.name in answers) and field.name in r.schema.names:
            field = field.with_type(r.schema.field(field.name).type)
        elif pa.types.is_null(field.type):
            return None
        fields.append(field)
    return r.sink_format.stored(pa.Table.from_batches([], pa.schema(fields)), sink.options)


def _bases(
    at: Chosen, members: Sequence[Generation], schema: pa.Schema, held: Held
) -> tuple[list[Base], dict[str, None]]:
    """The generations whose answers hold: scored by this model and code, of columns of these types. And what there is
    to say of the answers that cannot be kept, or only with whole files.
    """
    r, found, told = at.resolved, [], dict[str, None]()
    result = () if at.updates is None else at.updates.generations
    differing = {m.number: updating.differing(m, r, held) for m in members}
    retries = (m.number for m in members if m.kind == "retry-dead" and m.number in result)
    accepted = max((n for n in retries if not differing[n]), default=0)
    for member in members:
        plan = generations.read_plan(member)
        lines = differing[member.number]
        if member.number in result and member.number < accepted and _named(at, plan) and _confirmed(lines):
            lines = []
        other = lines or _other_types(plan, r)
        if other:
            told[updating.told(other, member.number if len(members) > 1 else None)] = None
            continue
        whole = member.kind != "retry-dead" and not at.sink.joins and _writes(at, plan, schema)
        if apart := _other_rows(plan, r):
            files = "answers are kept only of whole files that are as they were: "
            told[f"{files}{apart}" if whole else updating.told([apart])] = None
        done = receipts.standing(member.receipts, at.files)
        if member.number in result and (gone := receipts.unreadable(done, len(plan.shards), member.number)):
            told[f"{gone}: what they tell of is scored again"] = None
        found.append(Base(member, plan, done, whole, not apart))
    return found, told


def _confirmed(lines: Sequence[str]) -> bool:
    """Whether all that differs is code that a later retry-dead was scored with: whoever had it accept that confirmed
    that the other rows need not be scored again. What code loads as it runs may have changed since.
    """
    return all(line.startswith("code:") and not line.endswith(LOADED) for line in lines)


def _writes(at: Chosen, plan: Plan, schema: pa.Schema) -> bool:
    """Whether what a plan's shards wrote is what this job would write of the same rows, with the same version."""
    r, about = at.resolved, plan.about
    alike = about.fingerprint.options == r.fingerprint.stored().options
    return _named(at, plan) and alike and decode_schema(about.output_schema).equals(schema)


def _named(at: Chosen, plan: Plan) -> bool:
    """Whether a plan's rows name the version of the model that this job's rows would, or none does."""
    return at.sink.model_version is None or plan.about.model.version == shipping.model_version(at.resolved)


def _other_types(plan: Plan, r: Resolved) -> list[str]:
    """Columns that answers rest on now and that a plan's rows did not have, or with another type."""
    now, then = shipping.matched(r), decode_schema(plan.about.reads.schema)
    assert now is not None
    lines = []
    for name, _ in now.kinds:
        kind = r.schema.field(name).type
        if name not in then.names:
            lines.append(f"column {name!r} is new")
        elif str(then.field(name).type) != str(kind):
            lines.append(f"column {name!r} was {then.field(name).type}, is {kind}")
    return lines


def _other_rows(plan: Plan, r: Resolved) -> str:
    """Why the rows of a plan cannot be told from each other as this job tells them; "" if they can."""
    then, now = plan.about.matched, shipping.matched(r)
    assert now is not None
    if then == now:
        return ""
    if then is None:
        return "the result before was made without update, which records its rows"
    if then.key != now.key:
        was, is_now = (", ".join(m.key) or "the place of a row in its file" for m in (then, now))
        return f"the key of update was {was}, is {is_now}"
    if gone := [n for n in then.columns if n not in now.columns]:
        return f"answers rested on {', '.join(gone)}, too"
    return "the columns that answers rest on are in another order"


def _unchanged(r: Resolved, members: Sequence[Generation], bases: Sequence[Base], held: Held) -> list[Base]:
    """The bases with the source files that are as they were when those were made, which are `members` of the result, or
    unfinished.
    """

    def same(of: Sequence[Generation]) -> frozenset[str]:
        stored = held.inputs(of, r) if of else {}
        return frozenset(path for path, digest in r.fingerprint.inputs.items() if stored.get(path) == digest)

    of_result = same(members)
    return [replace(b, unchanged=of_result if b.generation in members else same([b.generation])) for b in bases]


# ---------------------------------------------------------------- shards


def _beside(r: Resolved, schema: pa.Schema) -> frozenset[str]:
    """Columns of the source that are to be compared and that are not written: only reading them again can profile them.
    There are none where what is beside rows whose answers are kept is not known.
    """
    how = shipping.matching(r)
    if how is None or how.opaque:
        return frozenset()
    return frozenset(n for n in r.job.gates.drift or () if n not in schema.names and n in r.schema.names)


def _shards(
    at: Chosen, bases: Sequence[Base], unfinished: Sequence[Left], beside: frozenset[str], rows: int
) -> tuple[pa.Table, pa.Table]:
    """The shard table, in the order of the source, and which of its shards are taken over (ADOPTED). It is divided into
    shards of so many `rows`, or as unfinished ones were, where the files can still be cut there: they may have changed
    since, and so may where a limit ends in one that has not.
    """
    r = at.resolved
    edges = _edges(r)
    known: dict[tuple[int, int], Piece] = {
        x.ranges[0][:2]: (list(x.ranges), None) for x in unfinished if x.ranges and _can_be_cut(r, x.ranges, edges)
    }
    known.update({x: piece for x, piece in _adoptable(at, bases, beside).items() if _can_be_cut(r, piece[0], edges)})
    out: list[tuple[int, int, int, int, int]] = []
    adopted: list[tuple[int, int, int]] = []
    number = 0
    for ranges, whole, of in _divided(r, known):
        if of is not None:
            adopted.append((number, of[0].generation.number, of[1]))
            told = of[0].plan.shards.rows_of(of[1])
            counts = [-1] * len(ranges) if told is None else _apart(r, ranges)
            out += [(number, *span, n) for span, n in zip(ranges, counts, strict=True)]
            number += 1
            continue
        if whole:
            out += [(number, *span, n) for span, n in zip(ranges, _apart(r, ranges), strict=True)]
            number += 1
            continue
        some = Selection(np.array(ranges, dtype=np.int64).reshape(-1, 3))
        table = shard.cut(r.files, some, rows, max(1, r.workers))
        for n, *span in zip(*(table.column(name).to_pylist() for name in RANGES.names), strict=True):
            out.append((number + n, *span))
        number += shard.count(table)
    assert _can_be_cut(r, [(file, start, stop) for _, file, start, stop, _ in out], edges), "cut inside a row"
    return _table(RANGES, out), _table(ADOPTED, adopted)


def _can_be_cut(r: Resolved, ranges: Iterable[Place], edges: Set[tuple[int, int]]) -> bool:
    """Whether all of these begin and end where files, as they are now, can be cut, or at `edges` of the selection."""
    return all(r.files[f].can_be_cut(at) or (f, at) in edges for f, *ends in ranges for at in ends)


def _edges(r: Resolved) -> set[tuple[int, int]]:
    """Where what is selected (by limit or sample) begins and ends in files that cannot be cut anywhere."""
    whole = np.array([not f.divisible for f in r.files], dtype=bool)
    some = r.selection.ranges[whole[r.selection.ranges[:, 0]]] if len(whole) else r.selection.ranges
    return {(f, at) for f, *ends in some.tolist() for at in ends}


def _table(schema: pa.Schema, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    columns: list[Any] = list(zip(*rows, strict=True)) if rows else [[] for _ in schema]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def _apart(r: Resolved, ranges: Sequence[Place]) -> list[int]:
    counts = [shard.rows_between(r.files[f], a, b) for f, a, b in ranges]
    return [-1 if n is None else n for n in counts]


def _adoptable(at: Chosen, bases: Sequence[Base], beside: frozenset[str]) -> dict[tuple[int, int], Piece]:
    """Shards of the result before that can be taken over, with their ranges, by file and start of the first: of files
    that are as they were, without a dead row, with all their files, and with a profile of the columns `beside` those
    that are written: where that lacks one, the rows keep their answers one by one, and are read for it.
    """
    number = {f.file.path: i for i, f in enumerate(at.resolved.files)}
    found: dict[tuple[int, int], Piece] = {}
    for base in bases:
        if not base.whole:
            continue
        torn = {x.shard for x in receipts.lost(at.files, at.root, base.generation.work, base.done.values())}
        for n, done in base.done.items():
            shard_ = base.plan.shards[n]
            whole = n not in torn and not Counts(*done.counts).all_dead and len(shard_.pieces) > 0
            if base.by_row and done.fates is not None and not _profiled(done, beside):
                continue
            if whole and all(p.file.path in base.unchanged for p in shard_.pieces):
                ranges = [(number[p.file.path], a, b) for p in shard_.pieces for a, b in p.ranges]
                found[ranges[0][:2]] = ranges, (base, n)
    return found


def _profiled(done: Receipt, columns: frozenset[str]) -> bool:
    if not columns or (done.profile is not None and not done.profile.rows):
        return True
    return done.profile is not None and columns <= done.profile.columns.keys()


def _divided(
    r: Resolved, known: Mapping[tuple[int, int], Piece]
) -> Iterator[tuple[list[Place], bool, tuple[Base, int] | None]]:
    """The selected ranges in order: those of a whole shard, which may be taken over, or some that are of none."""
    todo = [tuple(span) for span in r.selection.ranges.tolist()]
    starts = {f: sorted(a for g, a in known if g == f) for f in {f for f, _ in known}}
    left: list[Place] = []
    at = 0
    while at < len(todo):
        file, start, stop = todo[at]
        found = known.get((file, start))
        rest = None if found is None else _after(todo[at:], found[0])
        if found is not None and rest is not None:
            if left:
                yield left, False, None
                left = []
            yield found[0], True, found[1]
            todo, at = rest, 0
            continue
        until = min([a for a in starts.get(file, ()) if start < a < stop], default=stop)
        left.append((file, start, until))
        if until == stop:
            at += 1
        else:
            todo[at] = (file, until, stop)
    if left:
        yield left, False, None


def _after(todo: Sequence[Any], ranges: Sequence[Place]) -> list[Any] | None:
    """What is left to do once these ranges are done, which have to be the first; None if they are not."""
    at, (file, start, stop) = 0, todo[0]
    for number, (f, a, b) in enumerate(ranges):
        if (f, a) != (file, start) or b > stop:
            return None
        start = b
        if start == stop:
            at += 1
            if at < len(todo):
                file, start, stop = todo[at]
            elif number < len(ranges) - 1:
                return None
            else:
                return []
    return [(file, start, stop), *todo[at + 1 :]]


# ---------------------------------------------------------------- answers


def _index(at: Chosen, bases: Sequence[Base]) -> dict[str, TableRecord]:
    """The index of all answers that may be kept row by row; nothing if no generation has told them apart so."""
    told = [(b.generation, x) for b in bases if b.by_row for x in b.done.values()]
    whole = _as_long(at, [p for _, x in told for p in x.beside])
    shelves = [_shelf(g, x) for g, x in told if x.fates is not None and all(p.work in whole for p in x.beside)]
    return keptindex.build(at.files, at.generation.folder, shelves) if shelves else {}


def _shelf(generation: Generation, done: Receipt) -> Shelf:
    if done.answers is not None:
        return Shelf(generation, done, done.answers, True)
    return Shelf(generation, done, next((p for p in done.parts if p.role == "rows"), None), False)


def _stored(at: Chosen, table: pa.Table, name: str) -> TableRecord:
    path = join(at.generation.folder, f"{name}-{secrets.token_hex(4)}.arrow")
    with at.files.create(path) as out:
        with pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
        at.files.sync(out)
    return TableRecord(path.rpartition("/")[2], at.files.digest(path)[1])


# ---------------------------------------------------------------- shards that are taken over


def adopt(at: Planned) -> None:
    """Commit the shards that are taken over and have no receipt yet: their files get second names."""
    told = at.plan.about.kept.get("adopted")
    if told is None:
        return
    rows = generations.whole_table(at.generation, told)
    here = receipts.listed(at.generation.receipts, at.files)
    todo = [row for row in rows.to_pylist() if row["shard"] not in here]
    known = {g.number: g for g in generations.generations(at.root, at.files)}
    done = {n: receipts.standing(known[n].receipts, at.files) for n in {row["generation"] for row in todo}}
    plans = {n: generations.read_plan(known[n]) for n in done}
    alike = {n: plan.about.matched == at.plan.about.matched for n, plan in plans.items()}
    if gone := [x for x in todo if x["of"] not in done[x["generation"]]]:
        n = gone[0]["generation"]
        raise CorruptStore(
            f"{at.root}: {receipts.unreadable(done[n], len(plans[n].shards), n)}, of which an unfinished update takes "
            "shards over: put them back, or score all rows again with --restart (restart=True)"
        )
    parts = [p for x in todo for p in _all_parts(done[x["generation"]][x["of"]])]
    as_long = _as_long(at, parts)
    whole = {p.work for p in parts if p.work in as_long and not _spoilt(at, p)}
    taken = []
    for x in todo:
        n, receipt = x["generation"], done[x["generation"]][x["of"]]
        recorded = alike[n] and all(p.work in whole for p in receipt.beside)
        taken.append(_taken(at, known[n], receipt if recorded else _unrecorded(receipt), x["shard"], whole))
    at.files.settle([join(at.root, p.work) for x in taken for p in _all_parts(x)])
    for receipt in taken:
        receipts.commit(at.files, at.generation.receipts, receipt)


def _spoilt(at: Planned, part: Part) -> bool:
    """Whether a work file is not what was committed, though as long. Looks only on a disk, and if the visible name is
    another file: it was put back then, or the sink is a copy. Raises CorruptStore if that one is not, either.
    """
    work, visible = (join(at.root, name) for name in (part.work, part.publish))
    if not (at.files.free_links and part.publish and os.path.exists(visible)) or os.path.samefile(work, visible):
        return False
    if (whole := first_whole(at.files, (work, visible), part.sha256)) is not None:
        return whole == visible
    raise CorruptStore(
        f"{visible}: holds answers of the result before, but is not what was committed, and neither is its copy "
        f"{work}: put it back, or score all rows again with --restart (restart=True)"
    )


def _all_parts(receipt: Receipt) -> list[Part]:
    return [*receipt.parts, *receipt.beside]


def _as_long(at: Chosen, parts: Sequence[Part]) -> set[str]:
    """The work files of these that are there and as long as they were. What else is wrong is seen where they are read:
    answers may be as large as the result.
    """
    found = at.files.as_long(at.root, ((p.work, p.bytes) for p in parts))
    return {p.work for p, same in zip(parts, found, strict=True) if same}


def _unrecorded(receipt: Receipt) -> Receipt:
    """A receipt without what it says of its rows: this job tells them in another way, or it is lost."""
    return replace(receipt, fates=None, answers=None)


def _taken(at: Planned, of: Generation, receipt: Receipt, number: int, whole: Container[str]) -> Receipt:
    """The receipt of a shard as that of shard `number` here, with its files under names of this generation; of those
    whose work files are not `whole`, that is the visible file.
    """
    g, nonce, old = at.generation, secrets.token_hex(6), f"part-{receipt.shard:07d}.g{of.number}"
    new = f"part-{number:07d}.g{g.number}"

    def linked(part: Part, folder: str, name: str) -> Part:
        source = part.work if part.work in whole or not part.publish else part.publish
        work = join(folder, name)
        at.files.make_folder(folder)
        at.files.link(join(at.root, source), work)
        return replace(part, work=work[len(at.root) + 1 :], publish=part.publish.replace(old, new))

    parts = tuple(linked(p, g.work, f"{p.publish.replace(old, new)}.{nonce}.tmp") for p in receipt.parts)
    beside, into = (receipt.fates, receipt.answers), fates.folder(g.folder)
    named = (f"{number:07d}.{nonce}.arrow", f"{number:07d}.{nonce}.answers.arrow")
    told = [None if p is None else linked(p, into, name) for p, name in zip(beside, named, strict=True)]
    rows = _source_rows(receipt)
    figures = {n: v for n, v in receipt.figures.items() if n.startswith("input:")} | {KEPT: float(rows), SCORED: 0.0}
    return replace(
        receipt, shard=number, nonce=nonce, parts=parts, figures=figures, fates=told[0], answers=told[1], version=0
    )


def _source_rows(receipt: Receipt) -> int:
    """How many rows of the source a shard has, without those that conditions have left out."""
    counts = Counts(*receipt.counts)
    return counts.rows_in - counts.filtered if receipt.fates is None else receipt.fates.rows

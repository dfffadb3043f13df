"""Proving a row: its file, receipt and plan are hashed again, and lead to the root of the result."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import pyarrow as pa

from gristmill.commit import merkle, seals
from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Live, Sealed
from gristmill.commit.generation import Generation, read_plan
from gristmill.commit.publication import Publication, load
from gristmill.commit.receipt import Receipt
from gristmill.driver import sourcecheck
from gristmill.errors import BadKey, BadSource, CorruptStore, PlanChanged
from gristmill.files.disk import join
from gristmill.fingerprint import digests
from gristmill.job.job import Source
from gristmill.observe import units
from gristmill.proof import finding, keeping
from gristmill.proof.finding import Origin, Spot
from gristmill.proof.proof import Check, Input, Maker, Path, Proof, Run
from gristmill.result import reading
from gristmill.result.verify import Member
from gristmill.shards.sourcefiles import SourceFile
from gristmill.stores.contract import Key
from gristmill.stores.sinkrows import own_key
from gristmill.values import dataclass


@dataclass(frozen=True)
class Asked:
    """Which row is to be proved, and how: by a key of these columns or by `FILE:POSITION`; with the `root` that
    somebody has kept elsewhere; with the source read again (True, or as the job has it).
    """

    row: Any
    key: tuple[str, ...] = ()
    root: str | None = None
    source: Source | bool = False


@dataclass
class Found:
    """What is known of the row so far."""

    result: Publication
    spot: Spot | None
    origin: Origin
    member: Member
    candidates: list[tuple[Receipt, Spot]] = field(default_factory=list)
    joined: Receipt | None = None
    letter: dict[str, Any] | None = None
    row: Any = None
    doubt: str = ""  # why it is not known that the row has an answer


def prove(result: Publication, name: str, asked: Asked) -> Proof:
    """What made a row of a result, and whether its digests lead to the root. Raises BadKey if there is no such row, and
    PlanChanged if what is needed to look for it cannot be read.
    """
    try:
        found = _found(result, name, asked)
        checks, path = _checked(found, asked)
        return _proof(found, name, checks, path, asked)
    except (CorruptStore, FileNotFoundError, pa.ArrowException) as e:
        raise PlanChanged(
            f"{name}: nothing can be proved of the row, as a file of the result cannot be read ({e}): gristmill verify "
            f"{name} lists everything that is wrong"
        ) from e


# ---------------------------------------------------------------- which row


def _found(result: Publication, name: str, asked: Asked) -> Found:
    if not result.body.published:
        raise BadSource(f"{name}: what is staged can be proved once it is published")
    members = {g.number: _member(g) for g in finding.others(result) if not g.lost}
    place = finding.as_position(asked.row)
    found = None
    if asked.key or own_key(result):
        key: Key = asked.row if isinstance(asked.row, (tuple, dict)) else (asked.row,)
        try:
            spot = finding.by_key(result, [m.generation for m in members.values()], key, asked.key)
        except BadKey:
            if place is None:
                raise
            spot = None
        found = None if spot is None else _by_spot(result, members, spot, asked)
    if found is None and place is not None:
        found = _by_position(result, list(members.values()), *place, asked)
    if found is None:
        way = (
            "rows that were filtered out are in no result, and dead ones are named by FILE:POSITION (gristmill dead)"
            if asked.key or own_key(result)
            else "it has no row_id and no key: name columns that tell rows apart (--key), or FILE:POSITION"
        )
        raise BadKey(f"{name}: has no row {asked.row!r}: {way}")
    return found


def _member(generation: Generation) -> Member:
    plan, files = read_plan(generation), generation.files
    done = receipts.standing(generation.receipts, files)
    joined = receipts.standing(generation.joined, files)
    return Member(generation, plan, done, tuple(joined.values()))


def _by_spot(result: Publication, members: dict[int, Member], spot: Spot, asked: Asked) -> Found:
    if spot.live.generation not in members:
        raise CorruptStore(f"generation {spot.live.generation}: its claim is lost")
    member = members[spot.live.generation]
    candidates, joined = finding.made_by(member, spot)
    row = finding.row_of(result, spot)
    origin = Origin(candidates[0][0])
    for receipt, inside in candidates:
        places = _places(member, receipt, asked)
        tried = finding.origin_of(result, member, receipt, inside.number, row or {}, places)
        if tried.position is not None:
            origin, candidates = tried, [(receipt, inside)]
            break
    return Found(result, spot, origin, member, candidates, joined, row=row)


def _by_position(
    result: Publication, members: Sequence[Member], path: str, position: int, asked: Asked
) -> Found | None:
    for member in reversed(members):  # a retry is about rows that an earlier one has read, too
        if (there := finding.shard_of(member, path, position)) is None or there[1] not in member.done:
            continue
        file, shard = there
        receipt = member.done[shard]
        origin = Origin(receipt, file, position)
        if (letter := _letter(result, member, file, position)) is not None:
            f = next(f for f in result.live() if f.role == "dead" and _of(f, receipt, member))
            return Found(result, Spot(f, None), origin, member, [], None, letter)
        places = _places(member, receipt, asked)
        spots = finding.spot_of(result, member, origin, places)
        if spots:
            candidates, joined = finding.made_by(member, spots[0])
            row = finding.row_of(result, spots[0])
            sure = row is not None or (len(spots) == 1 and finding.is_there(member, receipt, places))
            doubt = "" if sure else _doubt(receipt, places is None)
            return Found(result, spots[0], origin, member, candidates, joined, row=row, doubt=doubt)
    return None


def _doubt(receipt: Receipt, in_text: bool) -> str:
    rows = sum(p.rows for p in receipt.parts if p.role == "rows")
    way = ", and so does --source (source=True)" if in_text else ""
    return (
        f"it is one of the {units.plural(rows, 'row')} that its shard has written, or was left out, and nothing "
        f"tells which: row_id tells it{way}"
    )


def _of(f: Live, receipt: Receipt, member: Member) -> bool:
    return (f.generation, f.shard) == (member.generation.number, receipt.shard)


def _letter(result: Publication, member: Member, path: str, position: int) -> dict[str, Any] | None:
    files = [f for f in result.live() if f.role == "dead" and f.generation == member.generation.number]
    letters = reading.dead_letters(reading.letters_of(result.root, files, result.files), result.files)
    for row in letters.to_pylist():
        if (row["source"], row["position"]) == (path, position):
            return {name: row[name] for name in ("stage", "error", "message", "payload")}
    return None


def _places(member: Member, receipt: Receipt, asked: Asked) -> finding.Places | None:
    if asked.source is not False and member.plan.about.only is None:
        source = asked.source if isinstance(asked.source, Source) else None
        again = sourcecheck.read_again(member.generation, receipt.shard, source)
        if not any(one.wrong for one in again):
            return [(one.path, one.positions) for one in again]
    return finding.places_of(member, receipt)


# ---------------------------------------------------------------- what is computed again


def _checked(found: Found, asked: Asked) -> tuple[list[Check], Path | None]:
    result, member, receipt = found.result, found.member, found.origin.receipt
    assert found.spot is not None
    checks = [_file(result, found.spot.live), *_parts(found)]
    plan = seals.plan_checksum(member.generation)
    checks.append(
        Check("receipt and plan", True, "each has the digest that it says, and the plan's tables have theirs")
    )
    path, more = _climbed(result, member, receipt, plan)
    checks += more
    stored = load(result.root, result.number, result.files)
    if stored is not None and stored.body != result.body:
        checks.append(Check("_SUCCESS", False, "it is not what was published, of which the sink keeps a record"))
    if asked.root is not None:
        wanted = asked.root.strip().lower().removeprefix("sha256:")
        same = result.body.root is not None and wanted == result.body.root
        told = "is the one that was given" if same else f"is {result.body.root}, and {wanted} was given"
        checks.append(Check("root", same, told))
    if asked.source is not False:
        checks += _source(found, asked)
    if found.doubt:
        checks.append(Check("row", False, found.doubt))
    return checks, path


def _file(result: Publication, f: Live) -> Check:
    """The published file, as it is kept for readers, and by its visible name if that is another file."""
    (kept,) = reading.kept(result.root, [f], result.files)
    visible = join(result.root, f.name)
    digests = []
    for path in dict.fromkeys([kept, visible]):
        if path == visible != kept and result.files.same(visible, kept, f.bytes, f.sha256):
            continue
        with contextlib.suppress(FileNotFoundError):
            digests.append(result.files.digest(path))
    if not digests:
        return Check(f.name, False, "the file is gone")
    wrong = [digest for size, digest in digests if (size, digest) != (f.bytes, f.sha256)]
    told = f"has sha256 {wrong[0]}, and {f.sha256} was published" if wrong else "its sha256 is that of _SUCCESS"
    return Check(f.name, not wrong, told)


def _parts(found: Found) -> list[Check]:
    """That the file is the one which its receipt commits, and that of a joined one made of the shard's part."""
    assert found.spot is not None
    live, receipt, joined = found.spot.live, found.origin.receipt, found.joined
    holder = receipt if joined is None else joined
    part = next((p for p in holder.parts if p.publish == live.name), None)
    same = part is not None and (part.sha256, part.rows, part.bytes) == (live.sha256, live.rows, live.bytes)
    told = "is what its receipt commits" if same else "is not what its receipt commits"
    checks = [Check("file", same, told)]
    if joined is not None and joined.of:
        own = [p for p in receipt.parts if p.role == "rows"]
        wrong = [p.publish for p in own if joined.of.get(p.publish, p.sha256) != p.sha256]
        checks.append(
            Check(
                "joined", not wrong, "of the part that the shard committed" if not wrong else f"{wrong[0]} is another"
            )
        )
    return checks


def _climbed(result: Publication, member: Member, receipt: Receipt, plan: str) -> tuple[Path | None, list[Check]]:
    """The path from receipt and plan to the root, and whether it leads there."""
    body, number = result.body, member.generation.number
    known = next((n for n, s in enumerate(body.sealed) if s.generation == number), None)
    if body.root is None or known is None:
        return None, [Check("root", False, "the result has none: it was published by an earlier version")]
    all_of = seals.leaves(plan, member.done.values(), member.joined)
    own = Sealed(number, merkle.root(all_of).hex(), len(all_of))
    tops = [seals.leaf_of_generation(one) for one in body.sealed]
    leaf = seals.leaf_of_receipt(receipt)
    steps = merkle.path(all_of, all_of.index(leaf)), merkle.path(all_of, 0), merkle.path(tops, known)
    reached = [
        merkle.climbed(start, way).hex() for start, way in ((leaf, steps[0]), (seals.leaf_of_plan(plan), steps[1]))
    ]
    top = merkle.climbed(seals.leaf_of_generation(own), steps[2]).hex()
    same = set(reached) == {body.sealed[known].root} and top == body.root == seals.root_of(body.sealed)
    told = (
        f"receipt and plan lead to it by {len(steps[0]) + len(steps[2])} hashes"
        if same
        else (f"receipt and plan lead to {top}: plan or receipts are not those that were published")
    )
    path = Path(f"plan {plan}", f"shard {receipt.shard} {receipt.checksum}", steps[1], steps[0], own, steps[2])
    return path, [Check("root", same, told)]


def _source(found: Found, asked: Asked) -> list[Check]:
    """The source, read again where the shard has read it."""
    source = asked.source if isinstance(asked.source, Source) else None
    try:
        again = sourcecheck.read_again(found.member.generation, found.origin.receipt.shard, source)
    except BadSource as e:
        return [Check("source", False, str(e))]
    wanted = [one for one in again if found.origin.path in (None, one.path)]
    return [Check(one.path, one.wrong is None, one.wrong or "holds what the shard read of it") for one in wanted]


# ---------------------------------------------------------------- what is shown


def _proof(found: Found, name: str, checks: list[Check], path: Path | None, asked: Asked) -> Proof:
    result, member, receipt, spot = found.result, found.member, found.origin.receipt, found.spot
    assert spot is not None
    about, generation = member.plan.about, member.generation
    code = digests.compared(about.fingerprint.code)
    body = next(keeping.publications_of(result, generation.number), None)
    when = "" if body is None else body.published
    run = Run(generation.number, generation.name, generation.kind, about.created, when, about.runs_on.told())
    return Proof(
        sink=name,
        outcome="unknown" if found.doubt else "answer" if found.letter is None else "dead",
        row=found.letter or found.row,
        file=spot.live.name,
        number=spot.number,
        file_sha256=spot.live.sha256,
        shard=receipt.shard,
        receipt=receipt.checksum,
        inputs=tuple(_inputs(found)),
        model=about.model,
        code=digests.digest_of(code),
        code_parts=len(code),
        run=run,
        checks=tuple(checks),
        root=result.body.root,
        path=path,
        joined=None if found.joined is None else found.joined.checksum,
        made_by=_maker(found, asked),
        notes=tuple(_notes(found, asked)),
    )


def _maker(found: Found, asked: Asked) -> Maker | None:
    """Who made an answer that was kept."""
    member, origin = found.member, found.origin
    if member.generation.kind != "update" or found.letter is not None:
        return None
    number = keeping.number_of(_places(member, origin.receipt, asked), origin.path, origin.position)
    return keeping.maker(found.result, member.generation, origin.receipt, number)


def _inputs(found: Found) -> list[Input]:
    """The file that the row came from, or all that its shard read."""
    shard, receipt, origin = found.member.plan.shards[found.origin.receipt.shard], found.origin.receipt, found.origin
    made = []
    for n, piece in enumerate(shard.pieces):
        if origin.path not in (None, piece.file.path):
            continue
        if origin.position is not None and not any(a <= origin.position < b for a, b in piece.ranges):
            continue
        file: SourceFile = piece.file
        digest = receipt.read[n] if n < len(receipt.read) else ""
        made.append(Input(file.path, origin.position, piece.ranges, file.size, file.stamp, digest))
    return made


def _notes(found: Found, asked: Asked) -> list[str]:
    notes = []
    if len(found.candidates) > 1:
        notes.append(
            f"the file was sorted: the row is of one of {len(found.candidates)} shards, the first of which is shown"
        )
    if found.origin.position is None:
        way = "" if asked.source is not False else "; with --source (source=True) positions in text files are known"
        steps = any(name.startswith("steps[") for name in found.member.plan.about.fingerprint.options)
        why = "steps may have made several rows of one, or none" if steps else "nothing in the row tells it"
        notes.append(f"which of these rows it came from is not known: {why}; row_id tells it{way}")
    if json.loads(found.member.plan.about.fingerprint.options.get("sink.sort_by", "null")) and found.spot is not None:
        notes.append("the rows of the file are sorted, not in the order of the source")
    return notes

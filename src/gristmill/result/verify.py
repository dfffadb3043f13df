"""Verifying a result: what is published against its receipts, the receipts against their plans, and all of it against
the publication.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.commit import merkle, seals
from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Live
from gristmill.commit.generation import Generation, Plan, decode_schema, generations, read_plan
from gristmill.commit.inspections import planned_files
from gristmill.commit.publication import Publication, marking, published
from gristmill.commit.publish import LISTED, MANIFEST, committed, leftover, strangers
from gristmill.commit.receipt import Part, Receipt
from gristmill.errors import CorruptStore
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL, first_whole, join, sha256_of, sizes_of
from gristmill.result import ids, reading
from gristmill.result.reduction import OF_ROWS, digest_of_rows
from gristmill.shards.counts import Counts
from gristmill.sinks.contract import SinkFormat
from gristmill.values import dataclass


@dataclass(frozen=True)
class Verdict:
    """What `verify` found. `lines` are human-readable, and its text; `ok` is whether everything is as it was
    published.
    """

    ok: bool
    lines: tuple[str, ...]
    files: int = 0
    rows: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"ok": self.ok, "lines": list(self.lines), "files": self.files, "rows": self.rows, **self.details}


@dataclass(frozen=True)
class Member:
    """A generation of a result with its plan and its valid receipts by shard; `joined` are the receipts of files that
    parts were joined to, `indexed` those of index files.
    """

    generation: Generation
    plan: Plan
    done: Mapping[int, Receipt]
    joined: tuple[Receipt, ...] = ()
    indexed: Mapping[int, Receipt] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether one file has all rows, by a receipt that does not say which parts it is of."""
        return any(not r.of for r in self.joined)

    @property
    def covered(self) -> set[str]:
        """The names of the parts that are in joined files."""
        parts = (p for r in self.done.values() for p in r.parts if p.role != "dead")
        return {p.publish for p in parts} if self.whole else {name for r in self.joined for name in r.of}


def verify(root: str, sink_format: SinkFormat, files: Files = LOCAL, *, deep: bool = False) -> Verdict:
    """Recount and re-hash every live file, and check plans, receipts, dead letters and counts against each other.

    Names each file that is missing, changed or not live, each shard without a receipt or with two, each row that is
    both dead and published (if rows have ids), each sum that differs from `_SUCCESS`. Repeated ids are reported, but
    are no fault of the result, and neither is it if files are gone by which an update keeps answers. With `deep`, all
    values are read again as `gm.read` reads them.
    """
    result = published(root, files)
    live = result.live()
    schema = decode_schema(result.body.output_schema)
    marked = marking(result)
    wrong = [] if marked is None else [marked]
    held = [*((f, join(root, f.name)) for f in live), *_others_read(result, live)]
    wrong += [w for w in files.map(lambda f: _wrong(result, f[0], f[1], sink_format, schema), held) if w is not None]
    stray = strangers(root, {f.name for f in live}, files)
    wrong += _strays(result, stray) if stray else []
    wrong += [f"{name}: listed {n} times" for name, n in Counter(f.name for f in live).items() if n > 1]
    members: list[Member] = []
    for found in _members(result):
        if isinstance(found, str):
            wrong.append(found)
        else:
            members.append(found)
            wrong += _against_plan(found)
            wrong += _against_receipts(found, live)
    wrong += _overlaps(members)
    wrong += _unsealed(result, members)
    wrong += _sums(result, live, members)
    wrong += _letters(result, live, sink_format, files)
    if not sink_format.tables and not any(line.startswith(MANIFEST) for line in wrong):
        wrong += _manifested(result, live, members)
    if deep and not wrong:
        wrong += _deep(result, sink_format, files)
    rows = sum(f.rows for f in live if f.role == "rows")
    lines = wrong or [f"{len(live)} files, {rows} rows: all as published"]
    if not wrong and (repeated := ids.said(result)) is not None:
        lines.append(repeated)  # not an error: what a key holds comes from the source
    lines += _spoilt(result, live)
    lines += _beside(members, files)
    return Verdict(not wrong, tuple(lines), len(live), rows)


# ---------------------------------------------------------------- files


def _strays(result: Publication, stray: Sequence[str]) -> list[str]:
    """Files that are not part of the result. Those that an unfinished run had linked when it was stopped are no fault
    of what is published, but affect anyone who reads by a glob.
    """
    whose = {
        name: g
        for g in generations(result.root, result.files)
        if not g.lost and g.predecessor == result.number
        for name in committed(g)
    }
    old, strange = leftover(result), "is in the sink, but _SUCCESS does not list it"
    mended = "is of an earlier result, and a run was stopped before it had removed it: the next run does"
    lines = [f"{name}: {mended if name in old else strange}" for name in stray if name not in whose]
    for number, kind in sorted({(whose[n].number, whose[n].kind) for n in stray if n in whose}):
        names = [n for n in stray if n in whose and whose[n].number == number]
        files = f"{len(names)} files" if len(names) > 1 else names[0]
        lines.append(
            f"{files} of an unfinished {kind} (generation {number}) are in the sink: gm.read leaves them out, a glob "
            "does not; the next run finishes it, or says how to give it up"
        )
    return lines


def _others_read(result: Publication, live: Sequence[Live]) -> Iterator[tuple[Live, str]]:
    """Files that readers open instead of those of the visible names, where they are other files: a copy of a sink has
    no links.
    """
    rows = reading.readable(result.root, [f for f in live if f.role != "dead"], result.files)
    dead = reading.kept(result.root, [f for f in live if f.role == "dead"], result.files)
    for f, path in zip(sorted(live, key=lambda f: f.role == "dead"), [*rows, *dead], strict=True):
        visible = join(result.root, f.name)
        if path != visible and not (result.files.free_links and reading.same(path, visible)):
            yield f, path


def _spoilt(result: Publication, live: Sequence[Live]) -> list[str]:
    """Work files that were damaged, of parts that were put back under their visible names: no reader opens them."""
    root, files = result.root, result.files
    whole = files.as_long(root, ((f.work, f.bytes) for f in live))
    cut = [f for f, same in zip(live, whole, strict=True) if not same] if files.free_links else []
    there = sizes_of(root, {f.work for f in cut}, files)
    return [
        f"{f.work}: {there[f.work]} bytes, but {f.bytes} were published: a damaged copy of {f.name}, which readers "
        "open instead: remove it"
        for f in cut
        if f.work in there and not reading.same(join(root, f.work), join(root, f.name))
    ]


def _beside(members: Sequence[Member], files: Files) -> list[str]:
    """What is wrong with the files by which the next update knows whose answers still hold; no reader opens them."""
    parts = [(m, r.shard, p) for m in members for r in m.done.values() for p in r.beside]

    def whole(each: tuple[Member, int, Part]) -> bool:
        try:
            return files.digest(join(each[0].generation.root, each[2].work)) == (each[2].bytes, each[2].sha256)
        except FileNotFoundError:
            return False

    bad = [each for each, ok in zip(parts, files.map(whole, parts), strict=True) if not ok]
    if not bad:
        return []
    shards, (_, _, first) = len({(m.generation.number, shard) for m, shard, _ in bad}), bad[0]
    more = f", and {len(bad) - 1} more of {len(parts)}" if len(bad) > 1 else ""
    rows = "its shard" if shards == 1 else f"{shards} shards"
    return [
        f"{first.work}: gone, or not what was committed{more}: no reader needs it, but the next update scores all rows "
        f"of {rows} again, except in files that are as they were"
    ]


def _wrong(result: Publication, f: Live, at: str, sink_format: SinkFormat, schema: pa.Schema) -> str | None:
    name = os.path.relpath(at, result.root) if result.files.free_links else at.removeprefix(result.root).lstrip("/")
    try:
        with result.files.local(at) as path:
            options = json.loads(result.body.fingerprint.options.get("sink.options", "{}"))
            found = _differs(path, f, sink_format, schema, options)
    except FileNotFoundError:
        return f"{name}: missing ({f.rows} rows of shard {f.shard}, generation {f.generation})"
    if found is None:
        return None
    return f"{name}: {found}{'' if name == f.name else _instead(result, f)}"


def _instead(result: Publication, f: Live) -> str:
    """What a damaged file is to readers that they open instead of the visible one, and what to do."""
    told = f"gm.read opens this file instead of {f.name}, whose copy it is, while it is there"
    if first_whole(result.files, [join(result.root, f.name)], f.sha256) is not None:
        return f" ({told}: remove it, {f.name} is as it was published)"
    return f" ({told})"


def _differs(path: str, f: Live, sink_format: SinkFormat, schema: pa.Schema, options: Mapping[str, Any]) -> str | None:
    if os.path.getsize(path) != f.bytes:
        return f"{os.path.getsize(path)} bytes, but {f.bytes} were published"
    if sha256_of(path) != f.sha256:
        return "content changed (sha256 differs)"
    if f.role == "reduced":
        return None
    if f.role == "index":
        counted = int(np.load(path, mmap_mode="r" if f.rows else None).shape[1])
    else:
        counted = count_lines(path) if f.role == "dead" else sink_format.count(path, f.role)
    if counted != f.rows:
        return f"{counted} rows, but {f.rows} were published"
    return sink_format.misfit(path, schema, options) if f.role == "rows" else None


def count_lines(path: str) -> int:
    """Newlines in a file."""
    with open(path, "rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


# ---------------------------------------------------------------- plans and receipts


def _members(result: Publication) -> Iterator[Member | str]:
    known = {g.number: g for g in generations(result.root, result.files)}
    for number in result.generations:
        generation = known.get(number)
        if generation is None or generation.lost:
            yield f"generation {number}: its claim is missing or damaged"
            continue
        try:
            plan = read_plan(generation)
        except (CorruptStore, FileNotFoundError) as e:
            yield f"generation {number}: its plan is missing or damaged ({e})"
            continue
        done = receipts.standing(generation.receipts, result.files)
        joined = receipts.standing(generation.joined, result.files)
        indexed = receipts.standing(generation.indexed, result.files)
        yield Member(generation, plan, done, tuple(joined.values()), indexed)


def _against_plan(m: Member) -> list[str]:
    """Check that every shard of the plan has one receipt whose counts add up, and that the ranges of a plan are
    disjoint and cover a source that was to be read whole.
    """
    name, planned = f"generation {m.generation.number}", len(m.plan.shards)
    missing = [n for n in range(planned) if n not in m.done]
    torn = receipts.listed(m.generation.receipts, m.generation.files) if missing else {}
    lines = [f"{name}: {_unread(n, torn.get(n, ()))}" for n in missing]
    lines += [
        f"{name}: there is a receipt of shard {n}, but the plan has {planned} shards" for n in m.done if n >= planned
    ]
    for number, receipt in m.done.items():
        counts = Counts(*receipt.counts)
        wrong = counts.discrepancy()
        for role, counted in (("rows", counts.ok), ("dead", counts.dead + counts.derived_dead)):
            held = sum(p.rows for p in receipt.parts if p.role == role)
            if held != counted:
                wrong = wrong or f"counts {counted} rows {role}, but its files hold {held}"
        if receipt.shard != number:
            wrong = f"is the receipt of shard {receipt.shard}"
        if wrong is not None:
            lines.append(f"{name}: shard {number}: {wrong}")
    return lines + [f"{name}: {line}" for line in _untiled(m)]


def _unread(number: int, paths: Sequence[str]) -> str:
    """Why a shard has no valid receipt: there is none, or those that there are do not read back."""
    if not paths:
        return f"shard {number} has no receipt"
    return f"the receipt of shard {number} is damaged ({paths[-1].replace(os.sep, '/').rpartition('/')[2]})"


def _untiled(m: Member) -> list[str]:
    begins: dict[str, int] | None = None
    ranges = _ranges(m)
    lines = [f"{path}: rows at {at} are in two shards" for path, at in _doubled(ranges)]
    if m.plan.about.everything:
        covered = {path: int((spans[:, 1] - spans[:, 0]).sum()) for path, spans in ranges.items()}
        for file, extent in zip(m.plan.shards.files, m.plan.shards.extents.tolist(), strict=True):
            if covered.get(file.path, 0) == extent:
                continue
            begins = _begins(m) if begins is None else begins
            extent -= begins.get(file.path, 0)
            if covered.get(file.path, 0) != extent:
                lines.append(f"{file.path}: {covered.get(file.path, 0)} of {extent} positions are in shards")
    return lines


def _begins(m: Member) -> dict[str, int]:
    """Where files begin, by path."""
    return {path: int(info.cuts[0]) for path, info in planned_files([m.generation]).items()}


def _ranges(m: Member) -> dict[str, np.ndarray]:
    """Planned ranges [k, 2] by path, sorted."""
    table = m.plan.shards.table
    number = table.column("file").to_numpy()
    spans = np.column_stack([table.column("start").to_numpy(), table.column("stop").to_numpy()])
    found = {}
    for index, file in enumerate(m.plan.shards.files):
        own = spans[number == index] if len(m.plan.shards.files) > 1 else spans
        found[file.path] = own[np.argsort(own[:, 0], kind="stable")]
    return found


def _doubled(ranges: Mapping[str, np.ndarray]) -> Iterator[tuple[str, int]]:
    for path, spans in ranges.items():
        for at in np.flatnonzero(spans[1:, 0] < spans[:-1, 1])[:3].tolist():
            yield path, int(spans[at + 1, 0])


def _unsealed(result: Publication, members: Sequence[Member]) -> list[str]:
    """Check that plans and receipts are those that the root of the result stands for; earlier versions had none."""
    body = result.body
    if body.root is None:
        return []
    lines = []
    found = {m.generation.number: m for m in members}
    for wanted in body.sealed:
        if (m := found.get(wanted.generation)) is not None:  # else it is reported already
            all_of = seals.leaves(seals.plan_checksum(m.generation), m.done.values(), m.joined)
            if merkle.root(all_of).hex() != wanted.root:
                lines.append(f"generation {wanted.generation}: its plan and receipts are not those that were published")
    if seals.root_of(body.sealed) != body.root or [s.generation for s in body.sealed] != result.generations:
        lines.append("_SUCCESS: its root is not that of its generations")
    return lines


def _overlaps(members: Sequence[Member]) -> list[str]:
    """Files scored by two generations of a result; not retries, whose rows the others have not scored."""
    seen: set[str] = set()
    lines = []
    for m in members:
        if m.generation.kind == "retry-dead":
            continue
        paths = {f.path for f in m.plan.shards.files}
        lines += [f"{path}: is in two generations of the result" for path in sorted(paths & seen)]
        seen |= paths
    return lines


def _against_receipts(m: Member, live: Sequence[Live]) -> list[str]:
    """Check that a generation's live files are those that its receipts commit: all rows, and no other files."""
    number = m.generation.number
    covered = m.covered
    committed = {p.publish: p for r in m.done.values() for p in r.parts if p.publish not in covered}
    committed |= {p.publish: p for r in m.joined for p in r.parts}
    reduced = receipts.standing(m.generation.reduced, m.generation.files).values()
    made = committed | {p.publish: p for r in [*reduced, *m.indexed.values()] for p in r.parts}
    mine = {f.name: f for f in live if f.generation == number and f.role != "manifest"}
    lines = []
    for name, f in mine.items():
        part = made.get(name)
        if part is None or (part.sha256, part.rows, part.role) != (f.sha256, f.rows, f.role):
            lines.append(f"{name}: it does not match any receipt of generation {number}")
    lost = [name for name, part in committed.items() if part.role != "dead" and name not in mine]
    lines += [f"{name}: committed by generation {number}, but not in the result" for name in lost]
    of = digest_of_rows(live)
    strange = [p.publish for r in reduced if r.of.get(OF_ROWS) != of for p in r.parts if p.publish in mine]
    lines += [f"{name}: was made by reduce of other rows than those of the result" for name in strange]
    return lines + [line for receipt in m.joined if receipt.of for line in _misjoined(receipt, m)]


def _misjoined(receipt: Receipt, m: Member) -> list[str]:
    """Check that a joined file is of parts that shards committed, of each once, and has all their rows."""
    parts = {p.publish: p for r in m.done.values() for p in r.parts}
    name = receipt.parts[0].publish
    strange = [n for n, digest in receipt.of.items() if n not in parts or parts[n].sha256 != digest]
    lines = [f"{name}: was made of {n}, which no receipt commits" for n in strange]
    others = [r for r in m.joined if r.shard != receipt.shard]
    lines += [f"{name}: has the rows of {n}, which {r.parts[0].publish} has, too" for r in others for n in r.of
              if n in receipt.of]  # fmt: skip
    rows = sum(parts[n].rows for n in receipt.of if n in parts and parts[n].role == "rows")
    held = sum(p.rows for p in receipt.parts if p.role == "rows")
    return lines if lines or rows == held else [f"{name}: holds {held} rows, but the parts it is made of {rows}"]


# ---------------------------------------------------------------- sums


def _sums(result: Publication, live: Sequence[Live], members: Sequence[Member]) -> list[str]:
    body = result.body
    counts = Counts(*body.counts_list)
    wrong = counts.discrepancy()
    lines = [] if wrong is None else [f"_SUCCESS: {wrong}"]
    for role, counted in (("rows", body.rows_ok), ("dead", body.rows_dead)):
        held = sum(f.rows for f in live if f.role == role)
        if held != counted:
            lines.append(
                f"_SUCCESS counts {counted} rows {'ok' if role == 'rows' else 'dead'}, but its files hold {held}"
            )
    scored = [m for m in members if m.generation.kind != "retry-dead"]
    if len(members) == len(result.generations):
        rows_in = sum(r.counts[0] for m in scored for r in m.done.values())
        if rows_in != counts.rows_in:
            lines.append(f"_SUCCESS counts {counts.rows_in} rows in, but its receipts {rows_in}")
        if len(scored) == len(members):
            total = sum((Counts(*r.counts) for m in scored for r in m.done.values()), Counts())
            if total != counts:
                lines.append(f"_SUCCESS has counts {counts.values()}, but its receipts {total.values()}")
    return lines


def _letters(result: Publication, live: Sequence[Live], sink_format: SinkFormat, files: Files) -> list[str]:
    """Check that no row is dead twice and, if row ids stand for places in the source, that no dead row is published."""
    import pyarrow.compute as pc

    try:
        letters = reading.dead_letters(reading.kept(result.root, [f for f in live if f.role == "dead"], files), files)
    except CorruptStore:
        return []  # already reported
    who = list(zip(*(letters.column(n).to_pylist() for n in ("source", "position", "copy")), strict=True))
    lines = [f"{s} at {p}, copy {c}: {n} dead letters" for (s, p, c), n in Counter(who).items() if n > 1]
    options = result.body.fingerprint.options
    column = options.get("sink.row_id", "").strip('"')
    if (
        not who
        or column not in decode_schema(result.body.output_schema).names
        or "sink.key" in options
        or not sink_format.tables
    ):
        return lines
    ids, rows = pa.array([_id(s, p, c) for s, p, c in who]), reading.read(result.root, files)
    for batch in rows.to_batches(columns=[column]) if column in rows.schema.names else ():  # else there are no rows
        both = batch.column(0).filter(pc.is_in(batch.column(0), ids))
        lines += [f"row {i}: is both published and a dead letter" for i in both.to_pylist()[:3]]
    return lines


def _id(source: str, position: int, copy: Any) -> str:
    """The id as worker.shardcommit.row_ids makes it."""
    text = f"{source}\0{position}\0{copy or 0}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _manifested(result: Publication, live: Sequence[Live], members: Sequence[Member]) -> list[str]:
    """Check that npy's manifest names every file of vectors once, in order, with all its rows and the source files that
    they came from, and that the other columns have as many rows beside each file.
    """
    import pyarrow.parquet as pq

    with result.files.local(join(result.root, MANIFEST)) as path:
        table = pq.read_table(path)
    if not table.schema.equals(LISTED):
        return [f"{MANIFEST}: has columns {table.schema.to_string(show_schema_metadata=False)}"]
    held = {f.name: f.rows for f in live if f.role == "rows"}
    sums = table.group_by("output_path").aggregate([("rows", "sum")])
    named = dict(zip(sums["output_path"].to_pylist(), sums["rows_sum"].to_pylist(), strict=True))
    lines = [f"{MANIFEST}: does not list {name} ({rows} rows)" for name, rows in held.items() if name not in named]
    lines += [f"{MANIFEST}: lists {name}, which is not in the result" for name in named if name not in held]
    lines += [
        f"{MANIFEST}: lists {named[name]} rows of {name}, which holds {rows}"
        for name, rows in held.items()
        if named.get(name, rows) != rows
    ]
    if not lines and table["output_path"].unique().to_pylist() != list(held):
        lines.append(f"{MANIFEST}: lists the files in another order than the result")
    if (pairs := table.group_by(["input_path", "output_path"]).aggregate([]).num_rows) != table.num_rows:
        lines.append(f"{MANIFEST}: lists {table.num_rows - pairs} pairs of files twice")
    known = {f.path for m in members for f in m.plan.shards.files}
    strange = sorted(set(table["input_path"].to_pylist()) - known) if len(members) == len(result.generations) else []
    lines += [f"{MANIFEST}: lists {path}, which is not a file of the source" for path in strange]
    beside = {f.name.removesuffix(".ids.parquet"): f.rows for f in live if f.role == "ids"}
    for name, rows in held.items():
        if (ids := beside.get(name.removesuffix(".npy"))) != rows:
            lines.append(f"{name}: {rows} rows, but {'none' if ids is None else ids} of the other columns beside it")
    return lines


def _deep(result: Publication, sink_format: SinkFormat, files: Files) -> list[str]:
    """Read all values, as a user would."""
    try:
        if not sink_format.tables:  # vectors need no conversion to numbers
            beside = reading.readable_dataset(result, "ids")
            there = [n for part in [*beside.get_fragments()][:1] for n in part.physical_schema.names]
            rows = sum(b.num_rows for b in beside.to_batches(columns=[n for n in beside.schema.names if n in there]))
        else:
            rows = sum(b.num_rows for b in reading.read(result.root, files).to_batches())
    except (CorruptStore, pa.ArrowException, OSError, ValueError) as e:
        return [f"the rows cannot be read: {type(e).__name__}: {e}"]
    wanted = result.body.rows_ok
    return [] if rows == wanted else [f"{rows} rows can be read, but {wanted} were published"]

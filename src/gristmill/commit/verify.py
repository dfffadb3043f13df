"""Verifying a result: what is published against its receipts, its receipts against their plans, and all of it against
what the publication says.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.commit import ids, reading
from gristmill.commit import receipt as receipts
from gristmill.commit.generation import Generation, Plan, decode_schema, generations, read_plan
from gristmill.commit.publication import Live, Publication, published
from gristmill.commit.publish import LISTED, MANIFEST, committed, strangers
from gristmill.commit.receipt import Receipt
from gristmill.commit.store import LOCAL, join, sha256_of
from gristmill.errors import CorruptStore
from gristmill.io.npy import vector_column
from gristmill.io.parquet_sink import read_as
from gristmill.io.schema import real, wider
from gristmill.plan.contracts import Files
from gristmill.plan.counts import Counts


@dataclass(frozen=True)
class Verdict:
    """What `verify` found. `lines` are readable; `ok` is whether everything is as it was published."""

    ok: bool
    lines: tuple[str, ...]
    files: int = 0
    rows: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"ok": self.ok, "lines": list(self.lines), "files": self.files, "rows": self.rows, **self.details}


@dataclass(frozen=True)
class Member:
    """A generation of a result with its plan and its standing receipts by shard; `merged` is that of its one file."""

    generation: Generation
    plan: Plan
    done: Mapping[int, Receipt]
    merged: Receipt | None = None


def verify(root: str, sink_format: Any, files: Files = LOCAL, *, deep: bool = False) -> Verdict:
    """Recount and re-hash every live file, and hold plans, receipts, dead letters and counts against each other.

    Names each file that is missing, changed or not live, each shard without a receipt or with two, each row that is
    both dead and published (where rows have ids), each sum that is not what `_SUCCESS` says. Ids that repeat are told,
    and are no fault of the result. With `deep` all values are
    read again as `gm.read` reads them.
    """
    result = published(root, files)
    live = result.live()
    schema = decode_schema(result.body["output_schema"])
    if sink_format.name == "parquet":
        schema = read_as(schema)
    elif sink_format.name == "npy" and (vectors := _vectors(result)) is not None:
        schema = pa.schema([vectors])
    wrong = [w for w in files.map(lambda f: _wrong(result, f, sink_format, schema), live) if w is not None]
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
    wrong += _sums(result, live, members)
    wrong += _letters(result, live, files)
    if sink_format.name == "npy" and not any(line.startswith(MANIFEST) for line in wrong):
        wrong += _manifested(result, live, members)
    if deep and not wrong:
        wrong += _deep(result, files)
    rows = sum(f.rows for f in live if f.role == "rows")
    lines = wrong or [f"{len(live)} files, {rows} rows: all as published"]
    if not wrong and (repeated := ids.said(result)) is not None:
        lines.append(repeated)  # as it was published: what a key holds is the source's
    return Verdict(not wrong, tuple(lines), len(live), rows)


# ---------------------------------------------------------------- files


def _strays(result: Publication, stray: Sequence[str]) -> list[str]:
    """Files that are not of the result. Those that a run of what is unfinished had linked when it was stopped are no
    fault of what is published, and yet one for who reads by a glob.
    """
    whose = {
        name: g
        for g in generations(result.root, result.files)
        if not g.lost and g.predecessor == result.number
        for name in committed(g)
    }
    lines = [f"{name}: stands in the sink, but _SUCCESS does not list it" for name in stray if name not in whose]
    for number, kind in sorted({(whose[n].number, whose[n].kind) for n in stray if n in whose}):
        names = [n for n in stray if n in whose and whose[n].number == number]
        files = f"{len(names)} files" if len(names) > 1 else names[0]
        lines.append(
            f"{files} of an unfinished {kind} (generation {number}) stand in the sink: gm.read leaves them out, a glob "
            "does not; the next run finishes it, or names the way to give it up"
        )
    return lines


def _wrong(result: Publication, f: Live, sink_format: Any, schema: pa.Schema) -> str | None:
    try:
        with result.files.local(join(result.root, f.name)) as path:
            return _differs(path, f, sink_format, schema)
    except FileNotFoundError:
        return f"{f.name}: missing ({f.rows} rows of shard {f.shard}, generation {f.generation})"


def _differs(path: str, f: Live, sink_format: Any, schema: pa.Schema) -> str | None:
    if os.path.getsize(path) != f.bytes:
        return f"{f.name}: {os.path.getsize(path)} bytes, published with {f.bytes}"
    if sha256_of(path) != f.sha256:
        return f"{f.name}: content changed (sha256 differs)"
    counted = count_lines(path) if f.role == "dead" else sink_format.count(path, f.role)
    if counted != f.rows:
        return f"{f.name}: {counted} rows, published with {f.rows}"
    if f.role != "rows" or sink_format.name == "jsonl":
        return None
    return _misfit(path, f, schema) if sink_format.name == "parquet" else _other_width(path, f, sink_format, schema)


def _misfit(path: str, f: Live, schema: pa.Schema) -> str | None:
    """A column of a Parquet part that the result's schema, as Parquet gives it back, does not have so."""
    import pyarrow.parquet as pq

    for column in pq.read_schema(path):
        if column.name not in schema.names:
            return f"{f.name}: has column {column.name!r}, which the result has not"
        wanted = schema.field(column.name).type
        if column.type != wanted and not _same_values(column.type, wanted):
            return f"{f.name}: column {column.name!r} is {column.type}, in the result it is {wanted}"
    return None


def _other_width(path: str, f: Live, sink_format: Any, schema: pa.Schema) -> str | None:
    """Vectors of another width than that of the result, whose one column `schema` has."""
    width, kind = sink_format.shape(path)[1], schema.field(0).type
    wrong = pa.types.is_fixed_size_list(kind) and width != kind.list_size
    return f"{f.name}: vectors of width {width}, in the result it is {kind.list_size}" if wrong else None


def _vectors(result: Publication) -> pa.Field | None:
    """The column that an npy sink writes as a matrix; None of a result without rows, which may have none."""
    if not result.body["rows_ok"]:
        return None
    schema = decode_schema(result.body["output_schema"])
    options = json.loads(result.body["fingerprint"]["options"].get("sink.options", "{}"))
    return schema.field(vector_column(schema, options.get("vector")))


def _same_values(stored: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of one type, at any depth, read as the other: the same, a wider one, another unit of time."""
    t = pa.types
    if stored == wanted or wanted in (wider(stored, wanted), real(stored, wanted)):
        return True
    if t.is_dictionary(stored) or t.is_dictionary(wanted):
        return _same_values(*(k.value_type if t.is_dictionary(k) else k for k in (stored, wanted)))
    if t.is_timestamp(stored) and t.is_timestamp(wanted):
        return bool(stored.tz == wanted.tz)
    if type(stored) is not type(wanted) or stored.num_fields != wanted.num_fields or not stored.num_fields:
        return False
    if t.is_fixed_size_list(stored) and stored.list_size != wanted.list_size:
        return False
    pairs = [(stored.field(i), wanted.field(i)) for i in range(stored.num_fields)]
    named = not t.is_struct(stored) or all(s.name == w.name for s, w in pairs)
    return named and all(_same_values(s.type, w.type) for s, w in pairs)


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
        merged = receipts.standing(join(generation.folder, "merged"), result.files)
        yield Member(generation, plan, done, next(iter(merged.values()), None))


def _against_plan(m: Member) -> list[str]:
    """Every shard of the plan has one receipt, whose counts add up; ranges of a plan are disjoint, and cover a source
    that was to be read whole.
    """
    name, planned = f"generation {m.generation.number}", len(m.plan.shards)
    lines = [f"{name}: shard {n} has no receipt" for n in range(planned) if n not in m.done]
    lines += [f"{name}: a receipt of shard {n}, of {planned} planned" for n in m.done if n >= planned]
    for number, receipt in m.done.items():
        counts = Counts(*receipt.counts)
        wrong = counts.discrepancy()
        for role, counted in (("rows", counts.ok), ("dead", counts.dead + counts.derived_dead)):
            held = sum(p.rows for p in receipt.parts if p.role == role)
            if held != counted:
                wrong = wrong or f"{counted} rows {role}, its files hold {held}"
        if receipt.shard != number:
            wrong = f"is the receipt of shard {receipt.shard}"
        if wrong is not None:
            lines.append(f"{name}: shard {number}: {wrong}")
    return lines + [f"{name}: {line}" for line in _untiled(m)]


def _untiled(m: Member) -> list[str]:
    ranges = _ranges(m)
    lines = [f"{path}: rows at {at} are in two shards" for path, at in _doubled(ranges)]
    if m.plan.about.get("everything"):
        covered = {path: int((spans[:, 1] - spans[:, 0]).sum()) for path, spans in ranges.items()}
        for file, extent in zip(m.plan.shards.files, m.plan.shards.extents.tolist(), strict=True):
            if covered.get(file.path, 0) != extent:
                lines.append(f"{file.path}: {covered.get(file.path, 0)} of {extent} positions are in shards")
    return lines


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


def _overlaps(members: Sequence[Member]) -> list[str]:
    """Rows that two generations of a result have scored; retried ones are those that the others have not."""
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
    """The live files of a generation are those that its receipts commit: all rows, and no others."""
    number = m.generation.number
    done = [*m.done.values()] if m.merged is None else [m.merged, *m.done.values()]
    committed = {p.publish: p for r in done for p in r.parts}
    mine = {f.name: f for f in live if f.generation == number and f.role != "manifest"}
    lines = []
    for name, f in mine.items():
        part = committed.get(name)
        if part is None or (part.sha256, part.rows, part.role) != (f.sha256, f.rows, f.role):
            lines.append(f"{name}: no receipt of generation {number} commits it so")
    for receipt in [m.merged] if m.merged is not None else m.done.values():
        lost = [p.publish for p in receipt.parts if p.role != "dead" and p.publish not in mine]
        lines += [f"{name}: committed by generation {number}, and not in the result" for name in lost]
    return lines


# ---------------------------------------------------------------- sums


def _sums(result: Publication, live: Sequence[Live], members: Sequence[Member]) -> list[str]:
    body = result.body
    counts = Counts(*body["counts_list"])
    wrong = counts.discrepancy()
    lines = [] if wrong is None else [f"_SUCCESS: {wrong}"]
    for role, counted in (("rows", body["rows_ok"]), ("dead", body["rows_dead"])):
        held = sum(f.rows for f in live if f.role == role)
        if held != counted:
            lines.append(f"_SUCCESS counts {counted} rows {'ok' if role == 'rows' else 'dead'}, its files hold {held}")
    scored = [m for m in members if m.generation.kind != "retry-dead"]
    if len(members) == len(result.generations):
        rows_in = sum(r.counts[0] for m in scored for r in m.done.values())
        if rows_in != counts.rows_in:
            lines.append(f"_SUCCESS counts {counts.rows_in} rows in, its receipts {rows_in}")
        if len(scored) == len(members):
            total = sum((Counts(*r.counts) for m in scored for r in m.done.values()), Counts())
            if total != counts:
                lines.append(f"_SUCCESS has counts {counts.values()}, its receipts {total.values()}")
    return lines


def _letters(result: Publication, live: Sequence[Live], files: Files) -> list[str]:
    """No row is dead twice; none that is dead is published, where rows have ids of their place in the source."""
    import pyarrow.compute as pc

    try:
        letters = reading.dead_letters(reading.kept(result.root, [f for f in live if f.role == "dead"], files), files)
    except CorruptStore:
        return []  # told of already
    who = list(zip(*(letters.column(n).to_pylist() for n in ("source", "position", "copy")), strict=True))
    lines = [f"{s} at {p}, copy {c}: {n} dead letters" for (s, p, c), n in Counter(who).items() if n > 1]
    options = result.body["fingerprint"]["options"]
    column = options.get("sink.row_id", "").strip('"')
    if (
        not who
        or column not in decode_schema(result.body["output_schema"]).names
        or "sink.key" in options
        or result.body["sink_format"] == "npy"
    ):
        return lines
    ids, rows = pa.array([_id(s, p, c) for s, p, c in who]), reading.read(result.root, files)
    for batch in rows.to_batches(columns=[column]) if column in rows.schema.names else ():  # else there are no rows
        both = batch.column(0).filter(pc.is_in(batch.column(0), ids))
        lines += [f"row {i}: is published and dead" for i in both.to_pylist()[:3]]
    return lines


def _id(source: str, position: int, copy: Any) -> str:
    """As worker.commit.row_ids makes them."""
    text = f"{source}\0{position}\0{copy or 0}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _manifested(result: Publication, live: Sequence[Live], members: Sequence[Member]) -> list[str]:
    """npy's manifest names every file of vectors once, in their order, with all its rows and the source files that
    these are of; beside each file stand as many rows of the other columns.
    """
    import pyarrow.parquet as pq

    with result.files.local(join(result.root, MANIFEST)) as path:
        table = pq.read_table(path)
    if not table.schema.equals(LISTED):
        return [f"{MANIFEST}: has columns {table.schema.to_string(show_schema_metadata=False)}"]
    held = {f.name: f.rows for f in live if f.role == "rows"}
    sums = table.group_by("output_path").aggregate([("rows", "sum")])
    named = dict(zip(sums["output_path"].to_pylist(), sums["rows_sum"].to_pylist(), strict=True))
    lines = [f"{MANIFEST}: does not name {name} ({rows} rows)" for name, rows in held.items() if name not in named]
    lines += [f"{MANIFEST}: names {name}, which is not in the result" for name in named if name not in held]
    lines += [
        f"{MANIFEST}: {named[name]} rows in {name}, which holds {rows}"
        for name, rows in held.items()
        if named.get(name, rows) != rows
    ]
    if not lines and table["output_path"].unique().to_pylist() != list(held):
        lines.append(f"{MANIFEST}: names the files in another order than that of the result")
    if (pairs := table.group_by(["input_path", "output_path"]).aggregate([]).num_rows) != table.num_rows:
        lines.append(f"{MANIFEST}: lists {table.num_rows - pairs} pairs of files twice")
    known = {f.path for m in members for f in m.plan.shards.files}
    strange = sorted(set(table["input_path"].to_pylist()) - known) if len(members) == len(result.generations) else []
    lines += [f"{MANIFEST}: names {path}, which is no file of the source" for path in strange]
    beside = {f.name.removesuffix(".ids.parquet"): f.rows for f in live if f.role == "ids"}
    for name, rows in held.items():
        if (ids := beside.get(name.removesuffix(".npy"))) != rows:
            lines.append(f"{name}: {rows} rows, beside it {'none' if ids is None else ids} of the other columns")
    return lines


def _deep(result: Publication, files: Files) -> list[str]:
    """All values, read as a person would read them."""
    try:
        if result.body["sink_format"] == "npy":  # whose vectors are numbers as they stand
            vectors, beside = _vectors(result), reading.readable_dataset(result, "ids")
            others = [n for n in beside.schema.names if vectors is None or n != vectors.name]
            rows = sum(b.num_rows for b in beside.to_batches(columns=others))
        else:
            rows = sum(b.num_rows for b in reading.read(result.root, files).to_batches())
    except (CorruptStore, pa.ArrowException, OSError, ValueError) as e:
        return [f"the rows cannot be read: {type(e).__name__}: {e}"]
    wanted = result.body["rows_ok"]
    return [] if rows == wanted else [f"{rows} rows are read, {wanted} were published"]

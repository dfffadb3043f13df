"""The index of a sink: for a published row's key, which row it is, so that a lookup reads little. It stands beside the
parts (`_index/`), is made before they are published, and is one of the files that `_SUCCESS` lists.

An index file is a .npy of whole numbers, [2, n], sorted: hashes of keys, and for each the number of its row, counted
through the files of the result; of one hash the rows of the latest night (commit/nights.py) come last. An append adds a
file for its own rows; when there are FEW, or rows are older than those of a file before (scored again), one takes their
place. Keys themselves are not in it: who finds a row compares them.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.schemas import plain
from gristmill.arrow.spilling import apart, batches_of, given, spilling
from gristmill.commit import nights, publication
from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Described, Indexed, Live
from gristmill.commit.generation import Generation, decode_schema, generations
from gristmill.commit.publication import Publication
from gristmill.commit.receipt import Receipt
from gristmill.errors import BadJob, RunFailed, did_you_mean
from gristmill.files.contract import Files
from gristmill.files.disk import join, sha256_of
from gristmill.process.startup import imported
from gristmill.result.reading import dataset_of, kept
from gristmill.sinks.contract import WorkFile
from gristmill.stores.packing import check_packed, packed_keys
from gristmill.values import dataclass

FEW = 8  # files that are searched one after the other, a few microseconds each; more become one
MEMORY = "256MB"  # for sorting; more is sorted on disk
SORTED = 65_536  # hashes that are written at once
READ = 65_536  # rows whose keys are read at once
_STAGED = pa.schema([("h", pa.uint64()), ("a", pa.uint32()), ("n", pa.uint64())])
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio: its products spread over all bits
_SPREAD = np.uint64(0xBF58476D1CE4E5B9)  # the first multiplier of splitmix64


@dataclass(frozen=True)
class Made:
    """An index file that is committed: its receipt, what the result is to say of the whole index, and how many rows of
    that file have the key of an earlier one.
    """

    receipt: Receipt
    index: Indexed
    repeats: int


def check(schema: pa.Schema, by: Sequence[str], tables: bool, shown: str) -> None:
    """Raises BadJob for columns that rows cannot be looked up by."""
    if not tables:
        raise BadJob(f"sink {shown}: index is for files of rows: leave it out, or give another format")
    for name in by:
        if name not in schema.names:
            raise BadJob(
                f"sink {shown}: index names column {name!r}, which is not an output column: there are "
                f"{', '.join(schema.names)}{did_you_mean(name, schema.names)}"
            )
    check_packed(pa.schema([schema.field(name) for name in by]), by, f"sink {shown}: index")


def types_of(about: Described, by: Sequence[str]) -> tuple[str, ...]:
    """The types as which the values of these columns are hashed: those of the whole result, to which rows of earlier
    generations are cast.
    """
    schema = decode_schema(about.output_schema)
    return tuple(str(plain(schema.field(name).type)) if name in schema.names else "" for name in by)


# ---------------------------------------------------------------- making it


def made(
    generation: Generation,
    live: Sequence[Live],
    members: Sequence[int],
    about: Described,
    by: tuple[str, ...],
    base: Indexed | None,
) -> Made:
    """The index file of a generation that is about to be published with the files `live`, those of its `base` first,
    which are of `members`. When repeated, it finds its receipt. Where the base's keys are of other types, whose hashes
    are others, all is made anew.
    """
    files, types = generation.files, types_of(about, by)
    rows, ranks = [f for f in live if f.role == "rows"], ranked(live, members, generation.root, files)
    standing = base.files if base is not None and same(base, by, types) and len(base.files) < FEW else ()
    since = max((f.generation for f in standing), default=0)
    own = [f for f in rows if f.generation > since]
    newest = max((ranks[f] for f in rows if f.generation <= since), default=0)
    if any(ranks[f] < newest for f in own):
        standing, since, own = (), 0, rows
    first = sum(f.rows for f in rows if f.generation <= since)
    number = _number(by, types, first, own)
    stem = f"{number:012x}.g{generation.number}"
    folder = generation.indexed
    found = receipts.valid(receipts.listed(folder, files).get(number, []), files)
    if found is not None and receipts.lost(files, generation.root, generation.work, [found]):
        publication.revoke(generation, folder, found)
        found = None
    if found is None:
        keys = hashes(generation.root, files, own, ranks, about, by, first)
        found = _committed(generation, keys, stem, number)
    index = Indexed(by, (*standing, *publication.live_of(generation, [found])), types)
    return Made(found, index, _repeats(generation.root, files, index))


def ranked(live: Sequence[Live], members: Sequence[int], root: str, files: Files) -> dict[Live, int]:
    """How old the rows of each file of a result are: the latest night's have the greatest number."""
    rows, some = [f for f in live if f.role == "rows"], set(members)
    ages = nights.ages(rows, [g for g in generations(root, files) if g.number in some])
    order = {age: n for n, age in enumerate(sorted(set(ages)))}
    return {f: order[age] for f, age in zip(rows, ages, strict=True)}


def same(index: Indexed, by: Sequence[str], types: Sequence[str]) -> bool:
    """Whether an index is by these columns, with keys hashed as values of these types."""
    return (index.by, index.types) == (tuple(by), tuple(types))


def usable(result: Publication) -> bool:
    """Whether a lookup finds every row by the index of a result. Of one by an earlier version nobody knows that, unless
    all of it was made at once.
    """
    index = result.body.index
    if index is None or not index.types:
        return index is not None and len(index.files) == 1
    return index.types == types_of(result.body, index.by)


def _number(by: Sequence[str], types: Sequence[str], first: int, own: Sequence[Live]) -> int:
    """The number of the receipt of an index file: a digest of what it is made of."""
    made_of = [*by, *types, str(first), *(f.sha256 for f in own)]
    return int(hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:12], 16)


def _committed(generation: Generation, keys: Iterator[pa.RecordBatch], stem: str, number: int) -> Receipt:
    files, nonce = generation.files, secrets.token_hex(6)
    path = join(generation.work, f"{stem}.npy.{nonce}.tmp")
    with files.create(path) as out:
        count = write(keys, out)
        files.sync(out)
    part = receipts.measure(files, WorkFile(path, f"_index/{stem}.npy", count, "index"), generation.root)
    files.settle([path])
    files.make_folder(generation.indexed)
    return receipts.commit(files, generation.indexed, Receipt(number, nonce, (0,) * 8, (part,)))


_AGAIN = "the same job makes it anew when it is run again, and scores nothing"


def misfits(result: Publication) -> list[str]:
    """A line for each index file that was made of other rows than those of the result, or of other values of them, as
    its name, its receipt and its length say. Nothing is opened.
    """
    index = result.body.index
    if index is None:
        return []
    types = types_of(result.body, index.by)
    if index.types and index.types != types:
        said = ", ".join(f"{name} {was}" for name, was in zip(index.by, index.types, strict=True))
        return [f"_index: has the keys as {said}, and the result as {', '.join(types)}: {_AGAIN}"]
    lines = []
    for f, first, own in _made_of(result, index):
        if f.shard != _number(index.by, index.types, first, own):
            lines.append(f"{f.name}: was made of other rows than those of the result: {_AGAIN}")
        elif f.rows > (rows := sum(part.rows for part in own)):
            lines.append(f"{f.name}: has {f.rows} keys of {rows} rows: {_AGAIN}")
    left = {part.generation for part in result.live() if part.role == "rows"}
    if beyond := sorted(n for n in left if n > max((f.generation for f in index.files), default=0)):
        lines.append(f"_index: lacks the rows of generation {beyond[0]}: {_AGAIN}")
    return lines


def differences(result: Publication) -> list[str]:
    """A line for each index file that is not what the rows of the result make, all of which are read."""
    index, lines = result.body.index, []
    ranks = ranked(result.live(), result.generations, result.root, result.files) if index is not None else {}
    for f, first, own in () if index is None else _made_of(result, index):
        with tempfile.NamedTemporaryFile(prefix="gristmill-") as again:
            write(hashes(result.root, result.files, own, ranks, result.body, index.by if index else (), first), again)
            again.flush()
            if sha256_of(again.name) != f.sha256:
                lines.append(
                    f"{f.name}: is not the index of these rows: run the job again with --restart (restart=True)"
                )
    return lines


def _made_of(result: Publication, index: Indexed) -> Iterator[tuple[Live, int, list[Live]]]:
    """Each index file with the number of its first row, and the files of rows that it is made of."""
    rows = [f for f in result.live() if f.role == "rows"]
    first, since = 0, 0
    for f in index.files:
        own = [part for part in rows if since < part.generation <= f.generation]
        yield f, first, own
        first, since = first + sum(part.rows for part in own), f.generation


def hashes(
    root: str,
    files: Files,
    parts: Sequence[Live],
    ranks: Mapping[Live, int],
    about: Described,
    by: Sequence[str],
    first: int,
) -> Iterator[pa.RecordBatch]:
    """The keys of all rows of some files, hashed, with how old they are, and the numbers of the rows, which begin at
    `first`.
    """
    rows = dataset_of(root, files, parts, about)
    for part, fragment in zip(parts, rows.get_fragments(), strict=True):
        at = first
        for batch in fragment.to_batches(schema=rows.schema, columns=list(by), batch_size=READ, batch_readahead=2):
            keys = packed_keys([batch.column(name) for name in by])
            numbers = np.arange(at, at + batch.num_rows, dtype=np.uint64)
            valid = keys.is_valid().to_numpy(zero_copy_only=False)
            some = hashed(keys)[valid]
            yield pa.record_batch([some, np.full(len(some), ranks[part], np.uint32), numbers[valid]], schema=_STAGED)
            at += batch.num_rows
        first += part.rows


def write(keys: Iterator[pa.RecordBatch], out: IO[bytes]) -> int:
    """Write an index file of such keys; the number of them. Raises RunFailed if there is no room to sort them, or the
    rows are damaged.
    """
    duckdb = imported("duckdb")
    try:
        return _sorted(keys, out)
    except duckdb.Error as e:
        why = " ".join(str(e).split())
        raise RunFailed(f"index: the keys could not be sorted: {why}: run again when there is room for them") from e
    except pa.ArrowException as e:
        why = " ".join(str(e).split())
        raise RunFailed(f"index: the rows cannot be read: {why}: gristmill verify names what is wrong") from e


def _sorted(keys: Iterator[pa.RecordBatch], out: IO[bytes]) -> int:
    with spilling(MEMORY) as db, tempfile.TemporaryFile(prefix="gristmill-") as numbers:
        return apart(lambda: _sorted_by(db, keys, out, numbers), db)


def _sorted_by(db: Any, keys: Iterator[pa.RecordBatch], out: IO[bytes], numbers: IO[bytes]) -> int:
    with given(db, staged=(_STAGED, keys)):
        db.execute("CREATE TEMP TABLE keys AS SELECT h, a, n FROM staged")
    count = int(db.sql("SELECT count(*) FROM keys").fetchall()[0][0])
    header = {"descr": "<u8", "fortran_order": False, "shape": (2, count)}
    np.lib.format.write_array_header_1_0(out, header)
    for batch in batches_of(db.sql("SELECT h, n FROM keys ORDER BY h, a, n"), SORTED):
        out.write(batch.column(0).to_numpy().astype("<u8", copy=False).tobytes())
        numbers.write(batch.column(1).to_numpy().astype("<u8", copy=False).tobytes())
    numbers.seek(0)
    while block := numbers.read(1 << 20):
        out.write(block)
    return count


def _repeats(root: str, files: Files, index: Indexed) -> int:
    """Rows of the newest file that have the key of an earlier row, in it or in the others."""
    with contextlib.ExitStack() as stack:
        *others, newest = (stack.enter_context(opened(root, files, f)) for f in index.files)
        count, last = 0, None
        for first in range(0, newest.shape[1], SORTED):
            some = np.array(newest[0, first : first + SORTED])
            again: np.ndarray = np.append(last is not None and some[0] == last, some[1:] == some[:-1])
            for other in others:
                at = np.minimum(np.searchsorted(other[0], some), max(0, other.shape[1] - 1))
                again |= other[0][at] == some if other.shape[1] else False
            count, last = count + int(again.sum()), some[-1]
    return count


# ---------------------------------------------------------------- reading it


@contextlib.contextmanager
def opened(root: str, files: Files, f: Live) -> Iterator[np.ndarray]:
    """The numbers of an index file, mapped into memory. Raises FileNotFoundError."""
    (there,) = kept(root, [f], files)
    with files.local(there) as path:
        yield np.asarray(np.load(path, mmap_mode="r" if f.rows else None))


def hashed(keys: pa.Array) -> np.ndarray:
    """A hash of 64 bits of each key (a binary array; of a null, any): eight bytes a step, over all keys together."""
    _, edges, data = keys.buffers()
    starts = np.frombuffer(edges, np.int32)[keys.offset : keys.offset + len(keys) + 1].astype(np.int64)
    held = np.zeros((0 if data is None else data.size) + 8, np.uint8)  # so that each eight bytes can be read
    if data is not None:
        held[:-8] = np.frombuffer(data, np.uint8)
    words: np.ndarray = np.ndarray(len(held) - 7, "<u8", held, strides=(1,))
    at, left = starts[:-1], np.diff(starts)
    found = left.astype(np.uint64) * _MIX
    active = np.flatnonzero(left > 0)
    while len(active):
        whole = len(active) == len(found)
        begins, rest = (at, left) if whole else (at[active], left[active])
        beyond = (np.maximum(8 - rest, 0) * 8).astype(np.uint64)  # bits of the next key
        step = _mixed((found if whole else found[active]) ^ (words[begins] << beyond))
        if whole:
            found = step
        else:
            found[active] = step
        at, left = at + 8, left - 8
        active = active[rest > 8]
    return _mixed(found)


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * _SPREAD
    return np.asarray(values ^ (values >> np.uint64(31)))

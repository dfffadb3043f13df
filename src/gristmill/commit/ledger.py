"""The ledger of a generation: what its valid receipts say, in columns, in the order of the shards. Very many are read
by processes beside this one, and no object of each is held: a whole receipt is read from its file again when asked for.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.commit import readers, receiptblock
from gristmill.commit import receipt as receipts
from gristmill.commit.generation import Generation
from gristmill.commit.live import Columns, LiveFiles, pack, unpacked
from gristmill.commit.receipt import Receipt
from gristmill.commit.receiptblock import Block, Sums
from gristmill.files.contract import Files
from gristmill.files.disk import join
from gristmill.shards.counts import Counts
from gristmill.values import dataclass

BLOCK = 8192  # receipts in a block, about


@dataclass(frozen=True)
class Listing:
    """The receipts that are in a folder: the shards with any, ascending, and for those with others than the first
    version which versions.
    """

    shards: np.ndarray
    versions: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @staticmethod
    def of(folder: str, files: Files) -> Listing:
        """What is in a folder. Nothing is opened."""
        versions: dict[int, list[int]] = {}
        entries, firsts = files.entries(folder), [np.empty(0, np.int64)]
        while names := list(itertools.islice(entries, 1 << 16)):
            numbers, others = _numbered(names)
            firsts.append(numbers)
            for shard, version in filter(None, map(receipts.numbered, others)):
                if version:
                    versions.setdefault(shard, []).append(version)
                else:
                    firsts.append(np.array([shard]))
        first = np.sort(np.concatenate(firsts))
        for shard, some in versions.items():
            at = int(np.searchsorted(first, shard))
            some += [0] if at < len(first) and first[at] == shard else []
            some.sort()
        every = np.union1d(first, np.fromiter(versions, np.int64)) if versions else first
        return Listing(every, versions)

    def of_shard(self, shard: int) -> Sequence[int]:
        """The versions of a shard's receipt, of one that is listed."""
        return self.versions.get(shard, (0,))


def _numbered(names: list[str]) -> tuple[np.ndarray, list[str]]:
    """The shards of names that are seven digits and `.json`, as nearly all are; and the other names."""
    try:
        text = np.array(names, "S13")  # a longer name has a thirteenth byte
    except UnicodeEncodeError:
        return np.empty(0, np.int64), names
    digits = text.view(np.uint8).reshape(-1, 13)
    plain = (text.astype("S12") == text) & (digits[:, 7:12] == np.frombuffer(b".json", np.uint8)).all(axis=1)
    plain &= ((digits[:, :7] >= ord("0")) & (digits[:, :7] <= ord("9"))).all(axis=1)
    numbers = (digits[plain, :7].astype(np.int64) - ord("0")) @ 10 ** np.arange(6, -1, -1)
    return numbers, [] if plain.all() else list(itertools.compress(names, (~plain).tolist()))


class Ledger(Mapping[int, Receipt]):
    """The valid receipts of a generation. As a mapping it gives each by its shard, read anew. Shards of which there are
    receipts, none of them valid, are `torn`; `cut_as_read` is what `cut` was when all were read, if that is known.
    """

    def __init__(
        self,
        generation: Generation,
        blocks: Sequence[Block] = (),
        sums: Sums | None = None,
        torn: Sequence[int] = (),
        cut_as_read: Sequence[int] | None = None,
    ) -> None:
        self.generation, self.blocks, self.sums = generation, tuple(blocks), sums or Sums()
        self.torn, self.cut_as_read = torn, cut_as_read
        self.shards = np.concatenate([np.empty(0, np.int64), *(block.shards for block in blocks)])
        self.versions = {shard: v for block in blocks for shard, v in block.versions.items()}

    @staticmethod
    def of(generation: Generation, known: Ledger | None = None) -> Ledger:
        """All valid receipts. Those `known` are not read again, as long as all of them are listed."""
        folder, files = generation.receipts, generation.files
        listed = Listing.of(folder, files)
        if known is None or not known._in(listed):
            known = Ledger(generation)
        new = listed.shards[~np.isin(listed.shards, known.shards, assume_unique=True)] if len(known) else listed.shards
        pieces = [new[at : at + BLOCK] for at in range(0, len(new), BLOCK)]
        blocks, sums, cut = list[Block](), known.sums, None if len(known) or not pieces else list[int]()
        for block, more, lost in readers.blocks(generation, pieces, listed.versions):
            blocks += [block] if len(block.shards) else []
            sums += more
            cut = None if cut is None or lost is None else [*cut, *lost]
        found = Ledger(generation, merged(known.blocks, blocks), sums, cut_as_read=cut)
        found.torn = np.setdiff1d(listed.shards, found.shards, assume_unique=True).tolist()
        return found

    def _in(self, listed: Listing) -> bool:
        """Whether all receipts are listed, in their versions."""
        there = bool(np.isin(self.shards, listed.shards, assume_unique=True).all())
        odd = set(listed.versions) | set(self.versions)
        return there and all(self.versions.get(n, 0) in listed.of_shard(n) for n in odd if n in self)

    # ------------------------------------------------ a mapping

    def __len__(self) -> int:
        return len(self.shards)

    def __iter__(self) -> Iterator[int]:
        return iter(self.shards.tolist())

    def __contains__(self, shard: object) -> bool:
        if not isinstance(shard, int):
            return False
        at = int(np.searchsorted(self.shards, shard))
        return at < len(self.shards) and bool(self.shards[at] == shard)

    def __getitem__(self, shard: int) -> Receipt:
        if shard not in self:
            raise KeyError(shard)
        path = join(self.generation.receipts, receipts.name(shard, self.versions.get(shard, 0)))
        return Receipt.load_from(path, self.generation.files)

    # ------------------------------------------------ what all say together

    @property
    def counts(self) -> Counts:
        """The rows of all shards."""
        return self.sums.counts

    @property
    def parts(self) -> LiveFiles:
        """The files that they commit."""
        return LiveFiles(block.parts for block in self.blocks if block.parts.rows)

    def checksums(self) -> Iterator[tuple[int, str]]:
        """Shard and checksum of each."""
        for block in self.blocks:
            said = unpacked(block.said)
            yield from zip(said["shard"].to_pylist(), (c.hex() for c in said["checksum"].to_pylist()), strict=True)

    def said_of(self, shard: int) -> tuple[Counts, Mapping[str, int]]:
        """The counts and errors of one."""
        block = next(b for b in self.blocks if b.shards[0] <= shard <= b.shards[-1] and shard in b.shards)
        row = unpacked(block.said).slice(int(np.searchsorted(block.shards, shard)), 1).to_pylist()[0]
        errors: Mapping[str, int] = json.loads(row["errors"] or "{}")
        return Counts(*row["counts"]), errors

    def missing(self, shards: int) -> np.ndarray:
        """The shards of so many that have no receipt."""
        lacks = np.ones(shards, np.bool_)
        lacks[self.shards[self.shards < shards]] = False
        return np.flatnonzero(lacks)

    def cut(self) -> list[int]:
        """Shards whose files are not all there as committed: see `receiptblock.cut`."""
        return receiptblock.cut(self.generation, self.parts)


def merged(old: Sequence[Block], new: Sequence[Block]) -> list[Block]:
    """The blocks of both, of which no shard is in two, in order. Of each only those are looked into that the other has
    shards among.
    """
    if not old or not new:
        return [*old, *new]
    out: list[Block] = []
    left = list(new)
    for block in old:
        last = block.shards[-1]
        among: list[Block] = []
        while left and left[0].shards[0] < last:
            head = left.pop(0)
            at = int(np.searchsorted(head.shards, last))
            among.append(_slice(head, 0, at))
            if at < len(head.shards):
                left.insert(0, _slice(head, at, len(head.shards)))
        out += _together([block, *among]) if among else [block]
    return [*out, *left]


def _together(blocks: Sequence[Block]) -> list[Block]:
    """Blocks made into one in the order of the shards, or into several of no more than twice the usual size."""
    said = pa.Table.from_batches([unpacked(b.said) for b in blocks]).sort_by("shard").combine_chunks()
    parts = pa.Table.from_batches([b.parts.batch() for b in blocks])
    order = np.argsort(parts["shard"].to_numpy(), kind="stable")
    parts = parts.take(pa.array(order)).combine_chunks()
    whole = _block(said, parts, {n: v for b in blocks for n, v in b.versions.items()})
    count = len(whole.shards)
    if count <= 2 * BLOCK:
        return [whole]
    return [_slice(whole, at, min(at + BLOCK, count)) for at in range(0, count, BLOCK)]


def _slice(block: Block, first: int, last: int) -> Block:
    if first == 0 and last == len(block.shards):
        return block
    said, batch = unpacked(block.said), block.parts.batch()
    of = batch.column("shard").to_numpy()
    a, b = (int(np.searchsorted(of, block.shards[at - 1], side="right")) if at else 0 for at in (first, last))
    return _block(said.slice(first, last - first), batch.slice(a, b - a), block.versions)


def _block(said: Any, parts: Any, versions: Mapping[int, int]) -> Block:
    one, other = (t if isinstance(t, pa.RecordBatch) else _one_batch(t) for t in (said, parts))
    shards = one.column("shard").to_numpy().copy()
    held = set(shards.tolist()) if versions else ()
    return Block(shards, pack(one), Columns.packed(other), {n: v for n, v in versions.items() if n in held})


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)

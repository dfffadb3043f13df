"""Rows of a sink by key: by its index (sinkindex.py) where it has one, else by reading what may hold the keys."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
import warnings
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.rows import picked
from gristmill.arrow.topython import to_rows
from gristmill.commit import publication
from gristmill.commit.documents import Live
from gristmill.commit.publication import SUCCESS, Publication
from gristmill.commit.staged import updated_by
from gristmill.errors import BadSource, CorruptStore, GristmillWarning
from gristmill.files.contract import Files
from gristmill.files.disk import join
from gristmill.result.reading import dataset_of, rows_of
from gristmill.stores.contract import Key, Mark, Near, Row, Search
from gristmill.stores.lookup import SCANNED, Lookup, asked, keyed, matching, restored
from gristmill.stores.packing import key_bytes
from gristmill.stores.sinkindex import hashed, opened, ranked, usable
from gristmill.stores.vectors import columns_in, nearest_of_all, searched
from gristmill.values import dataclass

# What to do about keys of several rows in a sink without an index.
OF_SINK = (
    "the same job with an index by them (--index) makes it find the last and scores nothing again; or deliver with "
    "mode='upsert', which keeps the latest row of each key, or read the rows (gm.read)"
)
QUICK = 100_000  # rows that are read for a key without a word: some hundredths of a second
KEPT = 256 << 20  # bytes of row groups that are kept once they were read
LOOKED = 1.0  # seconds between two looks at an object store for the next result, each of which is a request


def in_sink(root: str, files: Files, key: tuple[str, ...]) -> Lookup:
    """In a sink's own files."""
    return Lookup(Published(root, files, key), root)


class Published:
    """Looks rows up in the published files of a sink. Without an index, row groups that cannot hold a key are left out,
    if the rows are sorted by it; a GristmillWarning says so once where there are many rows.
    """

    def __init__(self, root: str, files: Files, key: tuple[str, ...]) -> None:
        self._root, self._files, self._key = root, files, key
        self._result: OpenResult | None = None
        self._said = False

    def _now(self, *, anew: bool = False) -> OpenResult:
        """What is published now. The record of the next result is asked for each time, where that is no request;
        `_SUCCESS` itself now and then, and if files are gone (`anew`), since a sink may be put in the place of another.
        """
        known = self._result
        if known is not None and not anew and time.monotonic() - known.looked < LOOKED:
            number = known.publication.number + 1
            if not self._files.free_links or publication.load(self._root, number, self._files) is None:
                return known
        try:
            said = self._files.read(join(self._root, SUCCESS))
        except FileNotFoundError:
            said = b""
        result = publication.published(self._root, self._files)
        if known is not None and (said, result.number) == (known.said, known.publication.number):
            known.looked = time.monotonic()
            return known
        self._result = found = OpenResult(result, said, self._key)
        return found

    def find(self, keys: Sequence[Key]) -> tuple[Mark | None, list[Row | None]]:
        now = self._now()
        while True:
            if not keys:
                return now.mark, []
            wanted = keyed(self._root, now.key, now.types)
            if not now.indexed:
                self._slow(now)
                return now.mark, now.by_reading(asked(keys, wanted, self._root))
            try:
                return now.mark, now.by_index(key_bytes(keys, wanted, self._root), wanted)
            except (FileNotFoundError, CorruptStore) as e:
                if (later := self._now(anew=True)) is now:
                    raise BadSource(
                        f"{self._root}: a file of the result is gone: {e}: gristmill verify names it; an index is made "
                        "again by the next run of the job"
                    ) from e
                now = later  # which has replaced these files

    def _slow(self, now: OpenResult) -> None:
        if self._said or now.publication.body.rows_ok <= QUICK:
            return
        self._said = True
        what, by = "no index", ", ".join(now.key)
        if now.publication.body.index is not None:
            what = f"its index is by {', '.join(now.publication.body.index.by)}"
            what += "" if usable(now.publication) else ", of other types than these are now"
        warnings.warn(
            f"{self._root}: {what}, so that its files are read for each lookup by {by}: the same job with "
            f"--index {','.join(now.key)} (index={list(now.key)}) makes one and scores nothing again; "
            "or deliver the result to a store",
            GristmillWarning,
            stacklevel=4,
        )

    def nearest(self, search: Search) -> Near:
        """Every vector is read."""
        now = self._now()
        column = searched(columns_in(now.rows.schema), search, self._root)
        batches = now.rows.scanner(batch_size=SCANNED, batch_readahead=2).to_batches()
        return replace(nearest_of_all(batches, column, search, self._root), mark=now.mark)

    def close(self) -> None:
        """Let go of files."""
        self._result = None


@dataclass(frozen=True)
class Block:
    """Rows of a file that are read together: a fragment of the dataset, and the number of the first of them."""

    fragment: Any
    first: int


class OpenResult:
    """One published result, open for lookups. `said` is what `_SUCCESS` said when it was opened."""

    def __init__(self, result: Publication, said: bytes, key: tuple[str, ...]) -> None:
        self.publication, self.said, self.looked = result, said, time.monotonic()
        self.rows = rows_of(result)
        self.types = {f.name: f.type for f in self.rows.schema}
        indexed = result.body.index
        self.key = key or (indexed.by if indexed is not None else own_key(result))
        self.indexed = indexed is not None and indexed.by == self.key and usable(result)
        self.mark = _as_mark(result)
        self._parts: list[Live] = [f for f in result.live() if f.role == "rows"]
        self._firsts = [0, *itertools.accumulate(f.rows for f in self._parts)]
        self._fragments = list(self.rows.get_fragments())
        self._blocks: dict[int, list[Block]] = {}
        self._held: OrderedDict[int, pa.Table] = OrderedDict()  # by the number of their first row, last used last
        self._bytes = 0
        self._lock = threading.Lock()

    @cached_property
    def _nights(self) -> list[Any]:
        """The rows of each night, the latest first."""
        root, files, body = self.publication.root, self.publication.files, self.publication.body
        ranks = ranked(self._parts, self.publication.generations, root, files)
        return [
            dataset_of(root, files, [f for f in self._parts if ranks[f] == rank], body)
            for rank in sorted(set(ranks.values()), reverse=True)
        ]

    def by_reading(self, keys: pa.Table) -> list[Row | None]:
        """For each key its row, of the latest night that has one. Raises BadSource if several rows of that have it."""
        out: list[Row | None] = [None] * keys.num_rows
        left = list(range(keys.num_rows))
        for night in self._nights if left else []:
            some = keys.take(left)
            found = night.to_table(filter=matching(some, night.schema))
            for place, row in zip(left, restored(found, some, None, self.publication.root, OF_SINK), strict=True):
                out[place] = row
            left = [place for place in left if out[place] is None]
            if not left:
                break
        return out

    @cached_property
    def _index(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Hashes and numbers of each index file, newest first. Raises FileNotFoundError."""
        assert self.publication.body.index is not None
        files = self.publication.body.index.files
        with contextlib.ExitStack() as stack:
            found = [
                stack.enter_context(opened(self.publication.root, self.publication.files, f)) for f in reversed(files)
            ]
            return [(one[0], one[1]) for one in found]

    def by_index(self, keys: Sequence[bytes | None], columns: Mapping[str, pa.DataType]) -> list[Row | None]:
        """For each key (as `key_bytes` gives it) its row; of several rows the last. Raises FileNotFoundError."""
        out: list[Row | None] = [None] * len(keys)
        left = np.array([place for place, key in enumerate(keys) if key is not None], np.int64)
        wanted = hashed(pa.array([keys[place] for place in left.tolist()], pa.binary()))
        for hashes, numbers in self._index:
            ends = np.searchsorted(hashes, wanted, "right")
            there = _ending(hashes, ends, wanted)
            while there.any():  # once, unless two keys have one hash
                some = np.flatnonzero(there)
                for place, row in zip(left[some].tolist(), self._rows(numbers[ends[some] - 1]), strict=True):
                    out[place] = row
                self._compare(left[some].tolist(), keys, columns, out)
                ends = ends - 1
                there &= np.array([out[place] is None for place in left.tolist()])
                there &= _ending(hashes, ends, wanted)
            lacks = np.array([out[place] is None for place in left.tolist()], bool)
            if not lacks.any():
                break
            left, wanted = left[lacks], wanted[lacks]
        return out

    def _compare(
        self, places: list[int], keys: Sequence[bytes | None], columns: Mapping[str, pa.DataType], out: list[Row | None]
    ) -> None:
        """Take out rows whose key only has the hash of the key that was asked for."""
        values = [tuple([row[name] for name in self.key]) for place in places if (row := out[place]) is not None]
        for place, key in zip(places, key_bytes(values, columns, self.publication.root), strict=True):
            if key != keys[place]:
                out[place] = None

    def _rows(self, numbers: np.ndarray) -> list[Row]:
        """The rows of these numbers."""
        numbers = numbers.astype(np.int64)
        if len(numbers) == 1:
            block = self._block(int(numbers[0]))
            return to_rows(self._read(block).slice(int(numbers[0]) - block.first, 1))
        order = np.argsort(numbers)
        found: list[Row] = []
        while len(found) < len(order):
            block = self._block(int(numbers[order[len(found)]]))
            rows = self._read(block)
            upto = np.searchsorted(numbers, block.first + rows.num_rows, sorter=order)
            found += to_rows(picked(rows, numbers[order[len(found) : upto]] - block.first))
        out: list[Any] = [None] * len(found)
        for place, row in zip(order.tolist(), found, strict=True):
            out[place] = row
        return out

    def _block(self, number: int) -> Block:
        """What holds the row of a number."""
        part = bisect_right(self._firsts, number) - 1
        blocks = self._of(part)
        return blocks[bisect_right(blocks, number, key=lambda b: b.first) - 1]

    def _of(self, part: int) -> list[Block]:
        """What a file can be read by: row groups of a Parquet file, else all of it."""
        found = self._blocks.get(part)
        if found is None:
            first, fragment = self._firsts[part], self._fragments[part]
            found = []
            for piece in fragment.split_by_row_group() if hasattr(fragment, "split_by_row_group") else [fragment]:
                found.append(Block(piece, first))
                first += sum(g.num_rows for g in piece.row_groups) if hasattr(piece, "row_groups") else 0
            self._blocks[part] = found
        return found

    def _read(self, block: Block) -> pa.Table:
        with self._lock:
            if (found := self._held.get(block.first)) is not None:
                self._held.move_to_end(block.first)
                return found
        made = block.fragment.to_table(schema=self.rows.schema).combine_chunks()
        with self._lock:
            if block.first not in self._held:
                self._held[block.first] = made
                self._bytes += made.nbytes
            while self._bytes > KEPT and len(self._held) > 1:
                self._bytes -= self._held.popitem(last=False)[1].nbytes
        return made


def _ending(hashes: np.ndarray, ends: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Whether the hash just before each of these ends is the one that is wanted."""
    there = ends > 0
    there[there] = hashes[ends[there] - 1] == wanted[there]
    return there


def own_key(result: Publication) -> tuple[str, ...]:
    """The columns that tell the rows of a result apart: its key, else its row id, else the key of `update`."""
    options = result.body.fingerprint.options
    row_id, key = (json.loads(options.get(f"sink.{name}", "null")) for name in ("row_id", "key"))
    return tuple(key) if key else (row_id,) if row_id else updated_by(result)


def _as_mark(result: Publication) -> Mark:
    body = result.body
    about = (result.root, result.generation, "", tuple(result.generations), "replace", (), body.rows_ok)
    return Mark(*about, body.output_schema)

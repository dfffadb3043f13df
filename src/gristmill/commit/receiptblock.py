"""A block of receipts: what those of some shards say, as columns, and in sum; read from their files without an object
for each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.commit import receipt as receipts
from gristmill.commit.generation import Generation
from gristmill.commit.live import LISTED, Columns, LiveFiles, pack
from gristmill.commit.receipt import Receipt
from gristmill.errors import CorruptStore
from gristmill.files.disk import join
from gristmill.files.document import unsealed
from gristmill.profiles.profile import Profile
from gristmill.shards.counts import Counts, summed
from gristmill.values import dataclass

SAID = pa.schema(
    [
        ("shard", pa.int64()),
        ("checksum", pa.binary(32)),
        ("counts", pa.list_(pa.int64(), 8)),
        ("errors", pa.string()),  # JSON, or "" for none
    ]
)


@dataclass(frozen=True)
class Sums:
    """What receipts say together. `profile` is None if one of them has none, as those of an earlier version; figures of
    source files are left out.
    """

    counts: Counts = field(default_factory=Counts)
    errors: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    profile: Profile | None = field(default_factory=Profile)

    def __add__(self, other: Sums) -> Sums:
        both = self.profile is not None and other.profile is not None
        return Sums(
            self.counts + other.counts,
            summed([self.errors, other.errors]),
            summed([self.figures, other.figures]),
            self.profile + other.profile if both else None,  # type: ignore[operator]
        )


@dataclass(frozen=True)
class Block:
    """Receipts of some shards, ascending: `said` is a packed batch of the schema SAID, `parts` the files that they
    commit, `versions` those of receipts that are not the first of their shard.
    """

    shards: np.ndarray
    said: pa.Buffer
    parts: Columns
    versions: Mapping[int, int] = field(default_factory=dict)


def read(generation: Generation, shards: Sequence[int], versions: Mapping[int, Sequence[int]]) -> tuple[Block, Sums]:
    """The valid receipts of these shards: of each, the lowest version whose checksum matches. `versions` are those that
    are there, where they are not just the first. Raises NewerFormat.
    """
    folder, files = generation.receipts, generation.files
    made = _Columns(generation.number)

    def content(shard: int) -> bytes:
        version = versions[shard][0] if shard in versions else 0
        return files.read(f"{folder}/{receipts.name(shard, version)}")

    for shard, data in zip(shards, files.map(content, shards), strict=True):
        if shard not in versions and made.quick(shard, data):
            continue
        paths = [join(folder, receipts.name(shard, version)) for version in versions.get(shard, (0,))]
        if (found := receipts.valid(paths, files)) is not None:
            made.careful(shard, found)
    return made.block(), made.sums()


class _Columns:
    """What receipts say, gathered."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._said: list[tuple[int, bytes, list[int], str]] = []
        self._parts: list[tuple[Any, ...]] = []
        self._versions: dict[int, int] = {}
        self._errors: dict[str, float] = {}
        self._figures: dict[str, float] = {}
        self._profile: Profile | None = Profile()
        self._rows, self._nulls = 0, dict[str, int]()  # of profiles that count nothing but nulls

    def quick(self, shard: int, data: bytes) -> bool:
        """Add a receipt as it is stored; false for one that must be looked at with care."""
        try:
            body, checksum = unsealed(data, "")
            counts, parts, figures, errors = (body[name] for name in ("counts", "parts", "figures", "errors"))
            if body.get("format", 1) != Receipt.FORMAT or body["shard"] != shard or not _ints(counts, 8):
                return False
            rows = [
                (p["publish"], p["work"], p["rows"], p["bytes"], p["sha256"], p["role"], self._generation, shard)
                for p in parts
            ]
            if not all(map(_typed, rows)):
                return False
        except (CorruptStore, KeyError, TypeError, AttributeError):
            return False
        profile = body.get("profile")
        if profile is not None and (profile.get("columns") or not self._counts_nulls(profile)):
            return False
        self._add(shard, checksum, counts, errors, figures)
        self._parts += rows
        if profile is None:
            self._profile = None
        return True

    def _counts_nulls(self, profile: Mapping[str, Any]) -> bool:
        """Add a profile that counts nothing but nulls, in the same columns as those before."""
        rows, nulls = profile["rows"], profile["nulls"]
        if not self._rows:
            self._rows, self._nulls = rows, dict(nulls)
            return True
        if nulls.keys() != self._nulls.keys():
            return not rows
        self._rows += rows
        for name, count in nulls.items():
            self._nulls[name] += count
        return True

    def careful(self, shard: int, found: Receipt) -> None:
        """Add a valid receipt."""
        self._add(shard, found.checksum, list(found.counts), found.errors, found.figures)
        self._parts += [
            (p.publish, p.work, p.rows, p.bytes, p.sha256, p.role, self._generation, shard) for p in found.parts
        ]
        if found.version:
            self._versions[shard] = found.version
        if found.profile is None or self._profile is None:
            self._profile = None
        else:
            self._profile += found.profile

    def _add(
        self, shard: int, checksum: str, counts: list[int], errors: Mapping[str, int], figures: Mapping[str, float]
    ) -> None:
        self._said.append((shard, bytes.fromhex(checksum), counts, json.dumps(dict(errors)) if errors else ""))
        for name, count in errors.items():
            self._errors[name] = self._errors.get(name, 0) + count
        for name, value in figures.items():
            if not name.startswith("input:"):
                self._figures[name] = self._figures.get(name, 0) + value

    def block(self) -> Block:
        """All as columns."""
        said, parts = (_batch(rows, schema) for rows, schema in ((self._said, SAID), (self._parts, LISTED)))
        shards = np.array([row[0] for row in self._said], np.int64)
        return Block(shards, pack(said), Columns.packed(parts), self._versions)

    def sums(self) -> Sums:
        """All in sum."""
        counts = np.array([row[2] for row in self._said], np.int64).reshape(-1, 8).sum(axis=0).tolist()
        profile = self._profile
        if profile is not None:
            profile = Profile(self._rows, self._nulls) + profile
        return Sums(Counts(*counts), self._errors, self._figures, profile)


def cut(generation: Generation, parts: LiveFiles) -> list[int]:
    """Shards of which files are not in the folder for work with the committed sizes: some were truncated or removed.
    Opens none.
    """
    wanted = ((work.rpartition("/")[2], size) for work, size in parts.tuples("work", "bytes"))
    there = generation.files.as_long(generation.work, wanted)
    return sorted({shard for (shard,), whole in zip(parts.tuples("shard"), there, strict=True) if not whole})


def _ints(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and set(map(type, values)) == {int}


def _typed(part: tuple[Any, ...]) -> bool:
    return tuple(map(type, part)) == (str, str, int, int, str, str, int, int)


def _batch(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
    )

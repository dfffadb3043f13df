"""Receipts: the record whose creation commits a shard. It is created once; whoever comes second has lost."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gristmill.commit.store import LocalFiles, seal, sha256_of, unseal
from gristmill.errors import CorruptStore
from gristmill.plan.contracts import WorkFile

_NAME = re.compile(r"^(\d{7,})(?:\.(\d+))?\.json$")


@dataclass(frozen=True)
class Part:
    """A committed file: where the work file is, the name it is published under, rows, bytes and sha256."""

    work: str
    publish: str
    rows: int
    bytes: int
    sha256: str
    role: str


@dataclass(frozen=True)
class Receipt:
    """A committed shard: its counts (Counts.values()), its files, who did it, and figures for the report."""

    shard: int
    nonce: str
    counts: tuple[int, ...]
    parts: tuple[Part, ...]
    figures: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    version: int = 0

    def sealed(self) -> bytes:
        """As it stands on disk."""
        body = {
            "shard": self.shard,
            "nonce": self.nonce,
            "counts": list(self.counts),
            "parts": [vars(p) for p in self.parts],
            "figures": dict(self.figures),
            "errors": dict(self.errors),
        }
        return seal(body)

    @staticmethod
    def load(path: str) -> Receipt:
        """Raises CorruptStore if the checksum does not hold."""
        body = unseal(path)
        match = _NAME.match(os.path.basename(path))
        try:
            return Receipt(
                body["shard"],
                body["nonce"],
                tuple(body["counts"]),
                tuple(Part(**p) for p in body["parts"]),
                body["figures"],
                body["errors"],
                int(match.group(2) or 0) if match else 0,
            )
        except (KeyError, TypeError) as e:
            raise CorruptStore(f"{path}: not a receipt ({e})") from e


def measure(file: WorkFile, root: str) -> Part:
    """A finished work file as it reads back from disk."""
    return Part(
        os.path.relpath(file.path, root),
        file.publish,
        file.rows,
        os.path.getsize(file.path),
        sha256_of(file.path),
        file.role,
    )


def commit(files: LocalFiles, folder: str, receipt: Receipt) -> Receipt:
    """Create the receipt in `folder` and return the one that stands: it is mine exactly if the nonces are equal.

    A receipt that does not read back is superseded by the next number, as design §7 says.
    """
    version = 0
    while True:
        path = os.path.join(folder, name(receipt.shard, version))
        if files.write_new(path, receipt.sealed()):
            return receipt
        try:
            return Receipt.load(path)
        except CorruptStore:
            version += 1


def name(shard: int, version: int = 0) -> str:
    """A receipt's file name: seven digits, and the number of torn ones that stood before it."""
    return f"{shard:07d}.json" if version == 0 else f"{shard:07d}.{version}.json"


def listed(folder: str) -> dict[int, list[str]]:
    """Receipt files by shard, the lowest version first. Nothing is opened."""
    found: dict[int, list[tuple[int, str]]] = {}
    try:
        entries = os.listdir(folder)
    except FileNotFoundError:
        return {}
    for entry in entries:
        if match := _NAME.match(entry):
            found.setdefault(int(match.group(1)), []).append((int(match.group(2) or 0), os.path.join(folder, entry)))
    return {shard: [path for _, path in sorted(paths)] for shard, paths in sorted(found.items())}


def valid(paths: list[str]) -> Receipt | None:
    """The receipt that counts: the lowest whose checksum holds."""
    for path in paths:
        try:
            return Receipt.load(path)
        except CorruptStore:
            continue
    return None


def torn(paths: list[str]) -> bool:
    """Whether a receipt is so short that it cannot be whole: a cheap look that opens nothing."""
    return all(os.path.getsize(p) < 64 for p in paths)


def plain(receipt: Receipt) -> dict[str, Any]:
    """What crosses from worker to driver."""
    return {
        "shard": receipt.shard,
        "counts": receipt.counts,
        "figures": dict(receipt.figures),
        "errors": dict(receipt.errors),
    }

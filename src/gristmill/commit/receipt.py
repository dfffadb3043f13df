"""Receipts: the record whose creation commits a shard. It is created once; whoever comes second has lost."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gristmill.commit.store import LOCAL, join, seal, unseal
from gristmill.errors import CorruptStore
from gristmill.plan.contracts import Files, WorkFile

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
    """A committed shard: its counts (Counts.values()), its files, who did it, figures for the report, and the digest of
    what it `read` of each of its pieces (io.content).
    """

    shard: int
    nonce: str
    counts: tuple[int, ...]
    parts: tuple[Part, ...]
    figures: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    read: tuple[str, ...] = ()
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
            "read": list(self.read),
        }
        return seal(body)

    @staticmethod
    def load(path: str, files: Files = LOCAL) -> Receipt:
        """Raises CorruptStore if the checksum does not hold."""
        body = unseal(path, files)
        match = _NAME.match(path.replace(os.sep, "/").rpartition("/")[2])
        try:
            return Receipt(
                body["shard"],
                body["nonce"],
                tuple(body["counts"]),
                tuple(Part(**p) for p in body["parts"]),
                body["figures"],
                body["errors"],
                tuple(body["read"]),
                int(match.group(2) or 0) if match else 0,
            )
        except (KeyError, TypeError) as e:
            raise CorruptStore(f"{path}: not a receipt ({e})") from e


def input_figure(path: str, folder: str) -> str:
    """The name of the figure that says how many rows of a source file are in the shard's part in that folder."""
    return f"input:{path}\0{folder}" if folder else f"input:{path}"


def inputs_of(receipt: Receipt) -> list[tuple[str, Part, int]]:
    """For each of a shard's parts with rows the source files that these came from, and how many each. Raises
    CorruptStore where that does not add up.
    """
    found: dict[str, list[tuple[str, int]]] = {}
    for figure, rows in receipt.figures.items():
        if figure.startswith("input:"):
            path, _, folder = figure.removeprefix("input:").partition("\0")
            found.setdefault(folder, []).append((path, int(rows)))
    out = []
    for part in receipt.parts:
        if part.role != "rows":
            continue
        named = found.get(part.publish.rpartition("/")[0], [])
        if sum(rows for _, rows in named) != part.rows:
            raise CorruptStore(
                f"{part.publish}: its receipt does not say of which source files its {part.rows} rows are: start anew "
                "with --restart (restart=True)"
            )
        out += [(path, part, rows) for path, rows in named]
    return out


def measure(files: Files, file: WorkFile, root: str) -> Part:
    """A finished work file as it reads back."""
    return Part(
        file.path[len(root) :].lstrip("/" + os.sep), file.publish, file.rows, *files.digest(file.path), file.role
    )


def commit(files: Files, folder: str, receipt: Receipt) -> Receipt:
    """Create the receipt in `folder` and return the one that stands: it is mine exactly if the nonces are equal.

    A receipt that does not read back is superseded by the next number, as design §7 says.
    """
    version = 0
    while True:
        path = join(folder, name(receipt.shard, version))
        if files.write_new(path, receipt.sealed()):
            return receipt
        try:
            return Receipt.load(path, files)
        except CorruptStore:
            version += 1


def name(shard: int, version: int = 0) -> str:
    """A receipt's file name: seven digits, and the number of torn ones that stood before it."""
    return f"{shard:07d}.json" if version == 0 else f"{shard:07d}.{version}.json"


def listed(folder: str, files: Files = LOCAL) -> dict[int, list[str]]:
    """Receipt files by shard, the lowest version first. Nothing is opened."""
    found: dict[int, list[tuple[int, str]]] = {}
    for entry in files.names(folder):
        if match := _NAME.match(entry):
            found.setdefault(int(match.group(1)), []).append((int(match.group(2) or 0), join(folder, entry)))
    return {shard: [path for _, path in sorted(paths)] for shard, paths in sorted(found.items())}


def valid(paths: list[str], files: Files = LOCAL) -> Receipt | None:
    """The receipt that counts: the lowest whose checksum holds."""
    for path in paths:
        try:
            return Receipt.load(path, files)
        except CorruptStore:
            continue
    return None


def standing(folder: str, files: Files = LOCAL) -> dict[int, Receipt]:
    """All receipts that count, by shard."""
    found = listed(folder, files)
    read = zip(found, files.map(lambda paths: valid(paths, files), found.values()), strict=True)
    return {number: receipt for number, receipt in read if receipt is not None}


def cut(files: Files, work: str, found: Iterable[Receipt]) -> list[Receipt]:
    """Receipts of files that do not all stand in the folder `work` with the bytes that were committed: they were cut
    since, or have gone. Opens none.
    """
    sizes = files.sizes(work)
    return [r for r in found if any(sizes.get(p.work.rpartition("/")[2]) != p.bytes for p in r.parts)]


def void(files: Files, root: str, folder: str, receipt: Receipt) -> None:
    """Let a receipt in `folder` count as little as a torn one, so that what it is of is done again. Visible names that
    its files have got go.
    """
    for part in receipt.parts:
        visible = join(root, part.publish)
        if files.same(visible, join(root, part.work), part.bytes, part.sha256):
            files.remove(visible)
    files.write_over(join(folder, name(receipt.shard, receipt.version)), b"")


def plain(receipt: Receipt) -> dict[str, Any]:
    """What crosses from worker to driver."""
    return {
        "shard": receipt.shard,
        "counts": receipt.counts,
        "figures": dict(receipt.figures),
        "errors": dict(receipt.errors),
    }

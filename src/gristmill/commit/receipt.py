"""Receipts: the record whose creation commits a shard. It is created once; a second attempt to create it loses."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Any

from gristmill.errors import CorruptStore
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL, join
from gristmill.files.document import NOT_STORED, Document, unsealed
from gristmill.profiles.profile import Profile
from gristmill.sinks.contract import Role, WorkFile
from gristmill.values import dataclass

_NAME = re.compile(r"^(\d{7,})(?:\.(\d+))?\.json$")


@dataclass(frozen=True)
class Part:
    """A committed file: path of the work file, the name it is published under, rows, bytes and sha256."""

    work: str
    publish: str
    rows: int
    bytes: int
    sha256: str
    role: Role


@dataclass(frozen=True)
class Receipt(Document, what="receipt"):
    """A committed shard: its counts (Counts.values()), its files, who did it, figures for the report, and the digest of
    what it `read` of each of its pieces (io.content). One of a file that parts were joined to has no counts, and is
    `of` those parts: their sha256 by the name that they would have been published under. `fates` is the file that says
    what became of each source row, and `answers` that of its answers, for a shard of a job with `update` (fates.py).
    `profile` is that of its rows (None of one by an earlier version), `checksum` that of the receipt as it is stored.
    """

    shard: int
    nonce: str
    counts: tuple[int, ...]
    parts: tuple[Part, ...]
    figures: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    read: tuple[str, ...] = ()
    of: Mapping[str, str] = field(default_factory=dict)
    fates: Part | None = None
    answers: Part | None = None
    profile: Profile | None = None
    version: int = field(default=0, metadata=NOT_STORED)
    checksum: str = field(default="", metadata=NOT_STORED, compare=False)

    @property
    def beside(self) -> list[Part]:
        """The files by which an update knows whose answers hold, if it has them: no reader needs them."""
        return [p for p in (self.fates, self.answers) if p is not None]

    @classmethod
    def load_from(cls, path: str, files: Files = LOCAL) -> Receipt:
        """The receipt at a path. Raises CorruptStore if it does not read back."""
        match = _NAME.match(path.replace(os.sep, "/").rpartition("/")[2])
        body, checksum = unsealed(files.read(path), path)
        version = int(match.group(2) or 0) if match else 0
        return replace(cls.of_body(body, path), version=version, checksum=checksum)


def input_figure(path: str, folder: str) -> str:
    """The name of the figure that says how many rows of a source file are in the shard's part in that folder."""
    return f"input:{path}\0{folder}" if folder else f"input:{path}"


def input_figures(receipt: Receipt, folder: str) -> dict[str, float]:
    """The figures of `input_figure` that are about one folder."""
    found = {name: rows for name, rows in receipt.figures.items() if name.startswith("input:")}
    return {name: rows for name, rows in found.items() if name.partition("\0")[2] == folder}


def inputs_of(receipt: Receipt) -> list[tuple[str, Part, int]]:
    """For each of a shard's parts with rows, the source files that these came from, and how many rows of each. Raises
    CorruptStore if they do not add up.
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
                f"{part.publish}: its receipt does not say which source files its {part.rows} rows came from: start "
                "over with --restart (restart=True)"
            )
        out += [(path, part, rows) for path, rows in named]
    return out


def measure(files: Files, file: WorkFile, root: str) -> Part:
    """A finished work file, measured by reading it back."""
    return Part(
        file.path[len(root) :].lstrip("/" + os.sep), file.publish, file.rows, *files.digest(file.path), file.role
    )


def commit(files: Files, folder: str, receipt: Receipt) -> Receipt:
    """Create the receipt in `folder` and return the valid one: it is the caller's exactly if the nonces are equal.

    A receipt that does not read back is superseded by the next number, as design §7 says.
    """
    version = 0
    while True:
        path = join(folder, name(receipt.shard, version))
        data = receipt.dump()
        if files.write_new(path, data):
            return replace(receipt, checksum=unsealed(data, path)[1])
        try:
            return Receipt.load_from(path, files)
        except CorruptStore:
            version += 1


def name(shard: int, version: int = 0) -> str:
    """A receipt's file name: seven digits, and the number of torn ones before it."""
    return f"{shard:07d}.json" if version == 0 else f"{shard:07d}.{version}.json"


def numbered(entry: str) -> tuple[int, int] | None:
    """The shard and version of a receipt by its file name; None for any other name."""
    match = _NAME.match(entry)
    if match is None:
        return None
    shard, version = int(match.group(1)), int(match.group(2) or 0)
    return (shard, version) if name(shard, version) == entry else None  # never two names of one


def listed(folder: str, files: Files = LOCAL) -> dict[int, list[str]]:
    """Receipt files by shard, the lowest version first. Nothing is opened."""
    found: dict[int, list[tuple[int, str]]] = {}
    for entry in files.names(folder):
        if match := _NAME.match(entry):
            found.setdefault(int(match.group(1)), []).append((int(match.group(2) or 0), join(folder, entry)))
    return {shard: [path for _, path in sorted(paths)] for shard, paths in sorted(found.items())}


def valid(paths: list[str], files: Files = LOCAL) -> Receipt | None:
    """The valid receipt: the lowest version whose checksum matches."""
    for path in paths:
        try:
            return Receipt.load_from(path, files)
        except CorruptStore:
            continue
    return None


def standing(folder: str, files: Files = LOCAL, known: Mapping[int, Receipt] | None = None) -> dict[int, Receipt]:
    """All valid receipts, by shard; those `known` are not read again, as long as they are listed."""
    found = listed(folder, files)
    held = {
        number: receipt
        for number, receipt in (known or {}).items()
        if join(folder, name(number, receipt.version)) in found.get(number, ())
    }
    new = {number: paths for number, paths in found.items() if number not in held}
    read = zip(new, files.map(lambda paths: valid(paths, files), new.values()), strict=True)
    held.update((number, receipt) for number, receipt in read if receipt is not None)
    return dict(sorted(held.items()))


def unreadable(done: Mapping[int, Receipt], shards: int, number: int) -> str:
    """Of which shards of a published generation no receipt can be read, each of which had one, as a clause; "" if there
    are none. Whoever asks what is in a result must not take them for shards without rows.
    """
    gone = [n for n in range(shards) if n not in done] if len(done) < shards else []
    if not gone:
        return ""
    some = f"{', '.join(map(str, gone[:3]))}{f' and {len(gone) - 3} more' if len(gone) > 3 else ''}"
    which = f"shard {some}" if len(gone) == 1 else f"shards {some}"
    return f"the receipts of {which} of generation {number} are damaged or lost"


def cut(files: Files, work: str, found: Iterable[Receipt]) -> list[Receipt]:
    """Receipts whose files are not all in the folder `work` with the committed sizes: some were truncated or removed.
    Opens none.
    """
    sizes = files.sizes(work)
    return [r for r in found if any(sizes.get(p.work.rpartition("/")[2]) != p.bytes for p in r.parts)]


def lost(files: Files, root: str, work: str, found: Iterable[Receipt]) -> list[Receipt]:
    """Those of the receipts that `cut` finds whose visible files are not what they say either. A store without links
    keeps only these, once they are published.
    """
    return [
        r
        for r in cut(files, work, found)
        if not all(files.same(join(root, p.publish), "", p.bytes, p.sha256) for p in r.parts)
    ]


def plain(receipt: Receipt) -> dict[str, Any]:
    """The part of a receipt that is sent from worker to driver."""
    return {
        "shard": receipt.shard,
        "counts": receipt.counts,
        "figures": dict(receipt.figures),
        "errors": dict(receipt.errors),
    }

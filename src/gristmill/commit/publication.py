"""Publications: what readers of a sink are given, one after another. Each is created once, as the successor of the one
that it was made from, so that of two drivers one publishes and the other is told; `_SUCCESS` is made from the latest.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from gristmill.commit.generation import Generation, meta
from gristmill.commit.receipt import Receipt
from gristmill.commit.store import LOCAL, join, seal, unseal
from gristmill.errors import BadSource, CorruptStore, SinkBusy
from gristmill.plan.contracts import Files

SUCCESS = "_SUCCESS"
INLINE_FILES = 2000  # more live files than this are listed in a table beside the plan
PATIENT = 50  # attempts at replacing _SUCCESS, a second in all, while others do
_NAME = re.compile(r"^(\d{7,})(?:\.(\d+))?\.json$")
_LISTED = pa.schema(
    [
        ("name", pa.string()),
        ("work", pa.string()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
        ("role", pa.string()),
        ("generation", pa.int64()),
        ("shard", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Live:
    """A live file of a sink: its visible name, the work file it is a name of (both relative to the root), and what it
    must hold.
    """

    name: str
    work: str
    rows: int
    bytes: int
    sha256: str
    role: str
    generation: int
    shard: int


def live_of(generation: Generation, receipts: Sequence[Receipt]) -> list[Live]:
    """The files that a generation's receipts commit."""
    return [
        Live(p.publish, p.work, p.rows, p.bytes, p.sha256, p.role, generation.number, r.shard)
        for r in receipts
        for p in r.parts
    ]


@dataclass(frozen=True)
class Publication:
    """One result as it was published. `number` counts them from 1; `body` is what `_SUCCESS` says."""

    root: str
    number: int
    body: Mapping[str, Any]
    files: Files = field(default=LOCAL, compare=False, repr=False)

    @property
    def generation(self) -> int:
        """The generation that was published."""
        return int(self.body["generation"])

    @property
    def generations(self) -> list[int]:
        """All whose rows are in the result, oldest first."""
        return list(self.body["generations"])

    @property
    def before(self) -> int:
        """The number of the last publication of another result, whose readers may still be at it; 0 for none."""
        return int(self.body.get("before", self.number - 1))

    def live(self) -> list[Live]:
        """Its files. Raises CorruptStore where their table is missing or damaged."""
        if "files" in self.body:
            return [Live(**f) for f in self.body["files"]]
        path = join(self.root, self.body["files_table"])
        try:
            with self.files.local(path) as name:
                if self.files.digest(path)[1] != self.body["files_sha256"]:
                    raise CorruptStore(f"{path}: is not what _SUCCESS says: start anew with --restart (restart=True)")
                with pa.memory_map(name) as source:
                    table = pa.ipc.open_file(source).read_all()
        except FileNotFoundError:
            raise CorruptStore(
                f"{path}: missing, which _SUCCESS names: start anew with --restart (restart=True)"
            ) from None
        columns = (table.column(n).to_pylist() for n in _LISTED.names)
        return [Live(*values) for values in zip(*columns, strict=True)]


# ---------------------------------------------------------------- finding the latest


def latest(root: str, files: Files = LOCAL) -> Publication | None:
    """The newest publication; None where nothing was published.

    It is what `_SUCCESS` says, unless a driver was stopped before it had replaced that, or came late and replaced it by
    an older one: whatever was created after it counts.
    """
    root = os.fspath(root)
    found = _marked(root, files)
    if found is None:
        return next(_stored(root, files), None)
    while (after := load(root, found.number + 1, files)) is not None:
        found = after
    return found


def _marked(root: str, files: Files) -> Publication | None:
    """What `_SUCCESS` says; None where it is not there, torn, or another system's empty marker."""
    try:
        body = unseal(join(root, SUCCESS), files)
        return Publication(root, int(body["publication"]), body, files)
    except (FileNotFoundError, CorruptStore, KeyError):
        return None


def _stored(root: str, files: Files) -> Iterator[Publication]:
    """All that read back, the newest first."""
    numbers = {int(m[1]) for e in files.names(join(meta(root), "published")) if (m := _NAME.match(e))}
    for number in sorted(numbers, reverse=True):
        if (found := load(root, number, files)) is not None:
            yield found


def load(root: str, number: int, files: Files = LOCAL) -> Publication | None:
    """The publication of that number: the lowest version that reads back; None where there is none."""
    version = 0
    while True:
        try:
            return Publication(root, number, unseal(_path(root, number, version), files), files)
        except FileNotFoundError:
            return None
        except CorruptStore:
            version += 1


def _path(root: str, number: int, version: int) -> str:
    return join(meta(root), "published", f"{number:07d}.json" if version == 0 else f"{number:07d}.{version}.json")


def published(root: str, files: Files = LOCAL) -> Publication:
    """The latest publication. Raises BadSource where nothing is published."""
    found = latest(root, files)
    if found is None:
        unfinished = (
            f"a run is unfinished here: run the job again; `gristmill status {root}` tells how far it came, and "
            "whether a gate holds it back"
        )
        hint = unfinished if files.holds(meta(root)) else "no run has published here"
        raise BadSource(f"{root}: no result ({hint})")
    return found


def success(root: str, files: Files = LOCAL) -> dict[str, Any] | None:
    """What the latest publication says, or None where nothing was published."""
    found = latest(root, files)
    return None if found is None else dict(found.body)


# ---------------------------------------------------------------- making the next


def create(generation: Generation, about: Mapping[str, Any], live: Sequence[Live]) -> Publication:
    """Publish a generation as the successor of the publication it was made from: the one step that decides. The same
    generation published twice is one publication.

    Raises SinkBusy where another generation has become the successor: nothing of this one is or will be published.
    """
    root, number = generation.root, generation.predecessor + 1
    many = len(live) > INLINE_FILES
    listed = _write_table(generation, live) if many else {"files": [asdict(f) for f in live]}
    body = {"format": 1, "publication": number, "generation": generation.number, **about, **listed}
    standing = _first(root, body, generation.files)
    if standing.generation != generation.number:
        raise SinkBusy(
            f"{root}: another run has published, or given this one (generation {generation.number}) up, since it "
            "began: nothing of it was published; run again to go on from there"
        )
    return standing


def again(found: Publication) -> Publication:
    """The same result as its own successor: what was begun on top of it and is unfinished is given up for good, as none
    of that can become the successor any more. Raises SinkBusy where another run has published meanwhile.
    """
    body = {**found.body, "publication": found.number + 1, "before": found.before}
    standing = _first(found.root, body, found.files)
    if standing.body != body:
        raise SinkBusy(f"{found.root}: another run has published meanwhile: run again to go on from there")
    return standing


def _first(root: str, body: Mapping[str, Any], files: Files) -> Publication:
    """Create a publication, or find the one that has its number."""
    number, version = int(body["publication"]), 0
    standing = load(root, number, files)
    while standing is None:
        if files.write_new(_path(root, number, version), seal(dict(body))):
            return Publication(root, number, body, files)
        standing, version = load(root, number, files), version + 1
    return standing


def _write_table(generation: Generation, live: Sequence[Live]) -> dict[str, str]:
    files, path = generation.files, join(generation.folder, f"live.{secrets.token_hex(4)}.arrow")
    with files.create(path) as out:
        rows = pa.table({name: [getattr(f, name) for f in live] for name in _LISTED.names}, _LISTED)
        with pa.ipc.new_file(out, _LISTED, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(rows)
        files.sync(out)
    digest = files.digest(path)[1]
    files.settle([path])
    return {"files_table": path[len(generation.root) + 1 :], "files_sha256": digest}


def mark(root: str, files: Files) -> Publication | None:
    """Let `_SUCCESS` say what the latest publication is, and return that. Anyone may, at any time: of many who do, also
    of one that was stopped for a year in the middle, the newest is what stands in the end.
    """
    path = join(root, SUCCESS)
    attempt = 0
    while True:
        newest = latest(root, files)
        if newest is None:
            return None
        marked = _marked(root, files)
        if marked is not None and marked.number >= newest.number:
            if load(root, newest.number, files) is None:  # a sink that was copied without its records
                files.write_new(_path(root, newest.number, 0), seal(dict(newest.body)))
            return newest
        data = seal(dict(newest.body))
        attempt += 1
        replace(files, path, data, standing(files, path), attempt)


def standing(files: Files, path: str) -> Mapping[str, Any] | None:
    """The version of what has a visible name now; None where nothing has it."""
    try:
        return files.look(path)[1]
    except FileNotFoundError:
        return None


def replace(files: Files, path: str, data: bytes, version: Mapping[str, Any] | None, attempt: int) -> None:
    """Write a visible name if it still has this version, and else wait a little: the next look decides."""
    if attempt >= PATIENT:  # somebody who is stopped in the middle holds it; should he go on, he looks again, too
        files.write_over(path, data)
        return
    try:
        done = files.write_new(path, data) if version is None else files.swap(path, data, version)
    except FileNotFoundError:  # it was taken away meanwhile
        done = False
    if not done:
        time.sleep(0.02)

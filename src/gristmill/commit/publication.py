"""Publications: the successive results that readers of a sink see. Each is created once, as the successor of the one it
builds on, so of two drivers one publishes and the other gets an error; `_SUCCESS` is derived from the latest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Indexed, Live, ResultRecord, Success
from gristmill.commit.generation import Generation, meta
from gristmill.commit.live import LiveFiles
from gristmill.commit.receipt import Receipt
from gristmill.errors import BadSource, CorruptStore, SinkBusy
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL, join, sizes_of
from gristmill.values import dataclass

SUCCESS = "_SUCCESS"
INLINE_FILES = 2000  # more live files than this are listed in a table beside the plan
PATIENT = 50  # attempts at replacing _SUCCESS while others do so, a second in all
_NAME = re.compile(r"^(\d{7,})(?:\.(\d+))?\.json$")


def live_of(generation: Generation, receipts: Iterable[Receipt]) -> LiveFiles:
    """The files that a generation's receipts commit."""
    return LiveFiles.listed(
        Live(p.publish, p.work, p.rows, p.bytes, p.sha256, p.role, generation.number, r.shard)
        for r in receipts
        for p in r.parts
    )


@dataclass(frozen=True)
class Publication:
    """One result as it was published. `body` is what `_SUCCESS` says."""

    root: str
    body: Success
    files: Files = field(default=LOCAL, compare=False, repr=False)

    @property
    def number(self) -> int:
        """Its number, counted from 1."""
        return self.body.publication

    @property
    def generation(self) -> int:
        """The generation that was published."""
        return self.body.generation

    @property
    def generations(self) -> list[int]:
        """All generations whose rows are in the result, oldest first."""
        return list(self.body.generations)

    @property
    def before(self) -> int:
        """The number of the last publication of another result, which may still have readers; 0 for none."""
        return self.number - 1 if self.body.before is None else self.body.before

    def live(self) -> LiveFiles:
        """Its files, with those of its index. Raises CorruptStore if their table is missing or damaged."""
        index = () if self.body.index is None else self.body.index.files
        return (self._listed() if self.body.files is None else LiveFiles.listed(self.body.files)) + index

    def _listed(self) -> LiveFiles:
        path = join(self.root, self.body.files_table or "")
        try:
            data = self.files.read(path)
        except FileNotFoundError:
            raise CorruptStore(
                f"{path}: missing, which _SUCCESS names: start over with --restart (restart=True)"
            ) from None
        if hashlib.sha256(data).hexdigest() != self.body.files_sha256:
            raise CorruptStore(f"{path}: is not what _SUCCESS says: start over with --restart (restart=True)")
        return LiveFiles.stored(data)


# ---------------------------------------------------------------- finding the latest


def latest(root: str, files: Files = LOCAL) -> Publication | None:
    """The newest publication; None if nothing was published.

    It is what `_SUCCESS` says, unless a driver was stopped before it had replaced that, or was late and replaced it
    with an older one: any publication created after the one in `_SUCCESS` counts.
    """
    root = os.fspath(root)
    found = _marked(root, files)
    if found is None:
        return next(_stored(root, files), None)
    while (after := load(root, found.number + 1, files)) is not None:
        found = after
    return found


def marking(result: Publication) -> str | None:
    """What is wrong with `_SUCCESS`, as a line; None if it says what this result says."""
    again = "the next run writes it again, and readers that wait for it do not find this result until then"
    try:
        found = Success.load_from(join(result.root, SUCCESS), result.files)
    except FileNotFoundError:
        return f"_SUCCESS: missing: {again}"
    except CorruptStore as e:
        return f"_SUCCESS: damaged ({e}): {again}"
    if found.dump() == result.body.dump():
        return None
    said = f"it says publication {found.publication} with {found.rows_ok} rows"
    return f"_SUCCESS: {said}, and {result.number} with {result.body.rows_ok} was published: {again}"


def _marked(root: str, files: Files) -> Publication | None:
    """What `_SUCCESS` says; None if it is missing, torn, or another system's empty marker."""
    try:
        return Publication(root, Success.load_from(join(root, SUCCESS), files), files)
    except (FileNotFoundError, CorruptStore):
        return None


def _stored(root: str, files: Files) -> Iterator[Publication]:
    """All publications that read back, newest first."""
    numbers = {int(m[1]) for e in files.names(join(meta(root), "published")) if (m := _NAME.match(e))}
    for number in sorted(numbers, reverse=True):
        if (found := load(root, number, files)) is not None:
            yield found


def load(root: str, number: int, files: Files = LOCAL) -> Publication | None:
    """The publication with that number: the lowest version that reads back; None if there is none."""
    version = 0
    while True:
        try:
            return Publication(root, Success.load_from(_path(root, number, version), files), files)
        except FileNotFoundError:
            return None
        except CorruptStore:
            version += 1


def _path(root: str, number: int, version: int) -> str:
    return join(meta(root), "published", f"{number:07d}.json" if version == 0 else f"{number:07d}.{version}.json")


def published(root: str, files: Files = LOCAL) -> Publication:
    """The latest publication. Raises BadSource if nothing is published."""
    found = latest(root, files)
    if found is None:
        unfinished = (
            f"there is an unfinished run here: run the job again; `gristmill status {root}` shows how far it got, "
            "and whether a gate blocks it"
        )
        hint = unfinished if files.holds(meta(root)) else "no run has published here"
        raise BadSource(f"{root}: no result ({hint})")
    return found


def of_generation(root: str, number: int, files: Files = LOCAL) -> Publication:
    """The result that was published with a generation, by its number, if its files still stand: those of the result
    before the latest do until another is published. Raises BadSource.
    """
    newest = published(root, files)
    if newest.generation == number:
        return newest
    found = next((p for p in _stored(root, files) if p.generation == number), None)
    if found is None:
        known = sorted({p.generation for p in _stored(root, files)})
        raise BadSource(
            f"{root}: no result was published with generation {number}: there are {', '.join(map(str, known))}"
        )
    live = found.live().of("rows", "ids")
    sizes = sizes_of(root, {name for f in live for name in (f.name, f.work)}, files)
    if gone := [f.name for f in live if f.bytes not in (sizes.get(f.work), sizes.get(f.name))]:
        raise BadSource(
            f"{root}: the files of generation {number} are gone ({gone[0]}): those of a result are kept until the "
            f"next but one is published, and {newest.generation} is the latest"
        )
    return found


def success(root: str, files: Files = LOCAL) -> Success | None:
    """What the latest publication says, or None if nothing was published."""
    found = latest(root, files)
    return None if found is None else found.body


# ---------------------------------------------------------------- making the next


def create(generation: Generation, about: ResultRecord, live: LiveFiles, index: Indexed | None = None) -> Publication:
    """Publish a generation as the successor of the publication it was made from: the one step that decides. The same
    generation published twice is one publication. `live` are its files, without those of its index.

    Raises SinkBusy if another generation has become the successor: nothing of this one is or will be published.
    """
    root, number = generation.root, generation.predecessor + 1
    body = Success(**vars(about), publication=number, generation=generation.number, index=index)
    if len(live) > INLINE_FILES:
        table, digest = _write_table(generation, live)
        body = dataclasses.replace(body, files_table=table, files_sha256=digest)
    else:
        body = dataclasses.replace(body, files=tuple(live))
    standing = _first(root, body, generation.files)
    own = Publication(root, body, generation.files)
    if standing.generation != generation.number or _reduced(standing) != _reduced(own):
        raise SinkBusy(
            f"{root}: since this run began, another one has published, or has given it (generation "
            f"{generation.number}) up: this run has published nothing; run it again to continue from there"
        )
    return standing


def _reduced(found: Publication) -> tuple[Mapping[str, str], set[tuple[str, str]]]:
    """What a result was reduced by, and to which files: where that alone is new, its generation tells nothing."""
    return dict(found.body.reduced_by), {(f.name, f.sha256) for f in found.live().of("reduced")}


def again(found: Publication, index: Indexed | None = None) -> Publication:
    """Publish the same result as its own successor, with another index if one is given: unfinished generations begun on
    top of it are given up for good, as none of them can become the successor any more. Raises SinkBusy if another run
    has published meanwhile.
    """
    body = dataclasses.replace(
        found.body, publication=found.number + 1, before=found.before, index=index or found.body.index
    )
    standing = _first(found.root, body, found.files)
    if standing.body != body:
        raise SinkBusy(f"{found.root}: another run has published meanwhile: run again to continue from there")
    return standing


def _first(root: str, body: Success, files: Files) -> Publication:
    """Create a publication, or return the existing one with its number."""
    number, version = body.publication, 0
    standing = load(root, number, files)
    while standing is None:
        if files.write_new(_path(root, number, version), body.dump()):
            return Publication(root, body, files)
        standing, version = load(root, number, files), version + 1
    return standing


def revoke(generation: Generation, folder: str, receipt: Receipt) -> None:
    """Revoke a receipt in `folder`, as if it were torn, so that what it is of is made again. Visible names given to its
    files are removed, but never one that the latest result lists and that is whole: raises SinkBusy then, as whoever
    revokes it was suspended while another run published.
    """
    root, files = generation.root, generation.files
    same = [p for p in receipt.parts if files.same(join(root, p.publish), join(root, p.work), p.bytes, p.sha256)]
    shown = latest(root, files)
    listed = set() if shown is None or not same else {f.name for f in shown.live()}
    for p in same:
        if p.publish in listed and files.same(join(root, p.publish), "", p.bytes, p.sha256):
            raise SinkBusy(f"{root}: another run has published {p.publish} meanwhile: run again to continue from there")
    for part in same:
        files.remove(join(root, part.publish))
    files.write_over(join(folder, receipts.name(receipt.shard, receipt.version)), b"")


def _write_table(generation: Generation, live: LiveFiles) -> tuple[str, str]:
    """Write the table of live files. Returns its path below the root, and its digest."""
    files, path = generation.files, join(generation.folder, f"live.{secrets.token_hex(4)}.arrow")
    with files.create(path) as out:
        live.write(out)
        files.sync(out)
    digest = files.digest(path)[1]
    files.settle([path])
    return path[len(generation.root) + 1 :], digest


def mark(root: str, files: Files) -> Publication | None:
    """Make `_SUCCESS` the latest publication, and return that. Any process may do so at any time: the newest
    publication wins in the end, even over a process that was suspended midway for a long time.
    """
    path = join(root, SUCCESS)
    attempt = 0
    while True:
        newest = latest(root, files)
        if newest is None:
            return None
        marked = _marked(root, files)
        if marked is not None and marked.number >= newest.number:
            if load(root, newest.number, files) is None:  # the sink was copied without its records
                files.write_new(_path(root, newest.number, 0), newest.body.dump())
            return newest
        data = newest.body.dump()
        attempt += 1
        replace(files, path, data, standing(files, path), attempt)


def standing(files: Files, path: str) -> Mapping[str, Any] | None:
    """The current version of the file with a visible name; None if there is none."""
    try:
        return files.look(path)[1]
    except FileNotFoundError:
        return None


def replace(files: Files, path: str, data: bytes, version: Mapping[str, Any] | None, attempt: int) -> None:
    """Write a visible file if it still has this version, otherwise wait a little: the next look decides."""
    if attempt >= PATIENT:  # a suspended process holds it; if it resumes, it looks again, too
        files.write_over(path, data)
        return
    try:
        done = files.write_new(path, data) if version is None else files.swap(path, data, version)
    except FileNotFoundError:  # it was removed meanwhile
        done = False
    if not done:
        time.sleep(0.02)

"""At which snapshot a run reads a source that is a store. Its generation notes it, so that a run that was interrupted
goes on with the same rows; what was copied for it is removed when its result is published.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gristmill.commit import generation as generations
from gristmill.commit.generation import Generation
from gristmill.driver.selection import Held
from gristmill.errors import CorruptStore
from gristmill.files.contract import Files, Lease
from gristmill.files.disk import join
from gristmill.files.document import Document
from gristmill.job.job import COPY, HELD, JobSpec
from gristmill.job.snapshots import is_snapshot
from gristmill.snapshots.pinned import Pin, Pinned
from gristmill.values import dataclass

if TYPE_CHECKING:
    from gristmill.snapshots.pinning import Pinning


@dataclass(frozen=True)
class Pins(Document, what="note of the snapshots that are read"):
    """`snapshots.json` of a generation: what its plan reads, for a source that is a store."""

    pins: tuple[Pin, ...]


@contextlib.contextmanager
def begun(spec: JobSpec, root: str, files: Files, *, restart: bool, retry: bool) -> Iterator[Pinning | None]:
    """The source's stores, open while inside; None for a source that is none. An unfinished run of this sink, and one
    of its dead letters, reads what was read before. Raises as `Pinning`.
    """
    if spec.source.data is not None or not is_snapshot(spec.source):
        yield None
        return
    pinning = _pinning(spec, root, files, generations.held_inputs(root, files), restart=restart, retry=retry)
    try:
        yield pinning
    finally:
        pinning.close()


def looked_at(spec: JobSpec, root: str, files: Files, folder: str, first: int) -> Pinned | None:
    """What a run of this sink would read now, for those who only look; what has to be copied, of a store that can be
    counted only the `first` rows, goes into `folder`.
    """
    if spec.source.data is not None or spec.source.uri[0].startswith(HELD) or not is_snapshot(spec.source):
        return None
    with contextlib.closing(_pinning(spec, root, files, folder)) as pinning:
        return pinning.pinned(lambda _: None, first)


def _pinning(
    spec: JobSpec, root: str, files: Files, folder: str, *, restart: bool = False, retry: bool = False
) -> Pinning:
    from gristmill.snapshots.pinning import Pinning  # few jobs have one, and it takes long

    if restart or not files.holds(generations.meta(root)):
        return Pinning(spec.source, folder)
    held = Held.by(root, files)
    return Pinning(spec.source, folder, _noted(_read_before(held, retry=retry)), _noted(_published(held)))


def _read_before(held: Held, *, retry: bool) -> list[Generation]:
    """The generations that decide which rows are read, the first that noted any: an unfinished one whose rows are
    decided, or those that dead letters are of.
    """
    claimed = held.unfinished
    begun = [] if claimed is None else [claimed]
    if retry:
        return [*(g for g in begun if g.kind == "retry-dead"), *_of_letters(held)]
    return [g for g in begun if g.planned or g.kind in ("append", "restart")]


def _of_letters(held: Held) -> list[Generation]:
    """Those of a result that has dead letters."""
    return _published(held) if held.latest is not None and held.latest.body.rows_dead else []


def _published(held: Held) -> list[Generation]:
    """The generations whose rows the result has, the latest first."""
    with contextlib.suppress(CorruptStore):  # it is told when the result is read
        return held.members()[::-1]
    return []


def _noted(of: Iterable[Generation]) -> tuple[Pin, ...]:
    """What the first of some generations reads that has a note of it."""
    for generation in of:
        with contextlib.suppress(FileNotFoundError, CorruptStore):  # else the store is read anew, and differences told
            return Pins.load_from(_path(generation), generation.files).pins
    return ()


def note(generation: Generation, pins: tuple[Pin, ...]) -> None:
    """Note what a generation reads that is begun, or resumed."""
    if _noted([generation]) != pins:
        generation.files.make_folder(generation.folder)
        generation.files.write_over(_path(generation), Pins(pins).dump())


@contextlib.contextmanager
def swept(root: str, files: Files, lease: Lease) -> Iterator[None]:
    """Afterwards, copies that nobody needs any more are removed: all of them once a result is published, unless it has
    dead letters, which are scored again from there. Nothing is if the sink is another run's by then.
    """
    try:
        yield
    finally:
        if lease.held():
            _sweep(root, files, generations.held_inputs(root, files))


def _sweep(root: str, files: Files, folder: str) -> None:
    if not os.path.isdir(folder):
        return
    ours = [name for name in os.listdir(folder) if name.endswith((COPY, ".tmp"))]
    kept = _needed(Held.by(root, files)) if ours else set()
    for name in ours:
        if name not in kept and os.path.isdir(os.path.join(folder, name)):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    if files.arrow() is not None:  # among the temporary files of this machine
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _needed(held: Held) -> set[str]:
    """The copies that an unfinished generation reads, or dead letters are of."""
    begun = [] if held.unfinished is None else [held.unfinished]
    return {pin.copy for of in (_of_letters(held), begun) for pin in _noted(of)}


def _path(generation: Generation) -> str:
    return join(generation.folder, "snapshots.json")

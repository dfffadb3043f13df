"""At which snapshot a run reads a source that is a store. It is noted in the sink, so that a run that was interrupted
goes on with the same rows; what was copied for it is removed when its result is published.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from gristmill.commit import generation as generations
from gristmill.driver.selection import Held
from gristmill.errors import CorruptStore
from gristmill.files.contract import Files, Lease
from gristmill.files.disk import join
from gristmill.files.document import Document
from gristmill.job.job import COPY, HELD, JobSpec
from gristmill.job.snapshots import is_snapshot
from gristmill.snapshots.pinned import Pin, Pinned, Pinning


@dataclass(frozen=True)
class Pins(Document, what="note of the snapshots that are read"):
    """`inputs/snapshots.json`: what the latest plan of a sink reads, for a source that is a store."""

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
    held = Held.by(root, files) if files.holds(generations.meta(root)) else None
    known = () if held is None else noted(root, files)
    pins = known if retry or (held is not None and not restart and _goes_on(held)) else ()
    before = () if restart or held is None or held.latest is None else known
    return Pinning(spec.source, folder, pins, before)


def _goes_on(held: Held) -> bool:
    """Whether an unfinished generation is here whose rows are decided."""
    claimed = held.unfinished
    return claimed is not None and (claimed.planned or claimed.kind in ("append", "restart"))


def noted(root: str, files: Files) -> tuple[Pin, ...]:
    """The pins of the latest plan."""
    try:
        return Pins.load_from(_path(root), files).pins
    except (FileNotFoundError, CorruptStore):  # then the store is read anew, and what differs is told
        return ()


def note(root: str, files: Files, pins: tuple[Pin, ...]) -> None:
    """Note what the generation reads that is begun, or resumed."""
    if noted(root, files) != pins:
        files.make_folder(join(generations.meta(root), "inputs"))
        files.write_over(_path(root), Pins(pins).dump())


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
    if not os.path.isdir(folder) or not any(name.endswith((COPY, ".tmp")) for name in os.listdir(folder)):
        return
    held = Held.by(root, files)
    dead = held.latest is not None and held.latest.body.rows_dead > 0
    kept = {pin.copy for pin in noted(root, files)} if dead or held.unfinished is not None else set()
    for name in os.listdir(folder):
        if (name.endswith(COPY) and name not in kept) or (
            name.endswith(".tmp") and os.path.isdir(os.path.join(folder, name))
        ):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def _path(root: str) -> str:
    return join(generations.meta(root), "inputs", "snapshots.json")

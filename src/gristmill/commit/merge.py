"""Joining: what shards wrote, joined to larger files before it is published, streamed in plan order; each file has a
receipt of its own, so that a run that was stopped goes on with the next file.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from gristmill.commit import publication
from gristmill.commit import receipt as receipts
from gristmill.commit.generation import Generation
from gristmill.commit.receipt import Part, Receipt
from gristmill.errors import RunFailed
from gristmill.files.contract import Files
from gristmill.files.disk import join
from gristmill.job.job import Sink
from gristmill.process import machine
from gristmill.sinks.contract import SinkFormat, WorkFile
from gristmill.values import dataclass

FILE_BYTES = 512 << 20  # at most so large are files if nobody says how many there should be
LARGE_BYTES = 128 << 20  # parts that are as large stay as they are then: rewriting them would gain little
AT_ONCE_BYTES = 64 << 20  # less than this is joined in the thread that is here
THREADS = 4


@dataclass(frozen=True)
class Joined:
    """A file to be made, of the parts of `given` (each a shard's receipt with the parts of one folder), in order."""

    number: int
    folder: str
    stem: str
    given: tuple[Receipt, ...]

    @property
    def parts(self) -> list[Part]:
        """Its parts, of all roles, in order."""
        return [part for receipt in self.given for part in receipt.parts]

    @property
    def of(self) -> dict[str, str]:
        """What its receipt is to say that it is of."""
        return {part.publish: part.sha256 for part in self.parts}

    @property
    def alone(self) -> bool:
        """Whether there is nothing to join."""
        return len(self.given) == 1


@dataclass(frozen=True)
class Joining:
    """The parts of a generation, joined as a sink asks for: `merge` is one file, `files` are at most so many in each
    folder; else small parts are joined to files of up to 512 MB. Shards of different `nights` (commit/nights.py) are
    never joined, as of rows with one key the latest counts.
    """

    files: Files
    generation: Generation
    form: SinkFormat
    schema: pa.Schema
    sink: Sink
    nights: Sequence[int] = ()  # of each shard; () if all are of one

    def receipts(self, done: Sequence[Receipt]) -> list[Receipt]:
        """The receipts to publish instead of `done`: the same dead letters, then files folder by folder, in the order
        in which folders first appear. A part that would be alone in its file stays as it is.

        When repeated, it finds its receipts and does nothing. Raises BadJob for formats that cannot be joined.
        """
        files = self._planned(done)
        wanted = [f for f in files if self.sink.merge or not f.alone]
        made = self._standing(wanted)
        missing = [f for f in wanted if f.number not in made]
        self.files.make_folder(self.generation.joined)
        small = sum(p.bytes for f in missing for p in f.parts) < AT_ONCE_BYTES
        written = self.files.map(self._write, missing) if small else _in_threads(self._write, missing)
        made |= {f.number: receipt for f, receipt in zip(missing, written, strict=True)}
        return [*map(_letters, done), *(made.get(f.number) or f.given[0] for f in files)]

    def _planned(self, done: Sequence[Receipt]) -> list[Joined]:
        """The files, numbered after all shards."""
        first, g = len(done), self.generation.number
        folders: dict[str, list[Receipt]] = {}
        for receipt in done:
            for folder, parts in _by_folder(receipt).items():
                figures = receipts.input_figures(receipt, folder)
                only = replace(receipt, parts=parts, figures=figures, errors={}, read=())
                folders.setdefault(folder, []).append(only)
        if self.sink.merge and len(set(self.nights)) < 2:
            if not folders and not self.form.tables:  # vectors of a width that nobody knows
                return []
            return [Joined(first, "", f"merged.g{g}", tuple(folders.get("", ())))]
        cut = [(folder, tuple(given)) for folder, all_ in folders.items() for given in self._cut(all_)]
        return [Joined(first + n, folder, f"merged-{n:07d}.g{g}", given) for n, (folder, given) in enumerate(cut)]

    def _cut(self, given: Sequence[Receipt]) -> Iterator[list[Receipt]]:
        """One folder's parts, in order, night by night, file by file."""
        for _, night in itertools.groupby(given, lambda receipt: self.nights[receipt.shard] if self.nights else 0):
            some = list(night)
            sizes = [sum(p.bytes for p in receipt.parts) for receipt in some]
            most = 1 if self.sink.merge else self.sink.files
            places = _small_together(sizes) if most is None else _evenly(sizes, most)
            for _, file in itertools.groupby(zip(places, some, strict=True), lambda placed: placed[0]):
                yield [receipt for _, receipt in file]

    def _standing(self, wanted: Sequence[Joined]) -> dict[int, Receipt]:
        """Files that were made before. Others are revoked: their bytes are gone, or a shard was scored again since."""
        of = {f.number: f.of for f in wanted}
        found = receipts.standing(self.generation.joined, self.files)
        lost = {r.shard for r in receipts.lost(self.files, self.generation.root, self.generation.work, found.values())}
        # An earlier version did not say what its one file is of.
        held = {n: r for n, r in found.items() if n not in lost and n in of and (dict(r.of) or of[n]) == of[n]}
        for number in found.keys() - held.keys():
            publication.revoke(self.generation, self.generation.joined, found[number])
        return held

    def _write(self, file: Joined) -> Receipt:
        root, parts = self.generation.root, file.parts
        for part in parts:
            path = join(root, part.work)
            if self.files.digest(path)[1] != part.sha256:
                raise RunFailed(f"{path}: is not what its receipt says: run again with --restart (restart=True)")
        given = [WorkFile(join(root, p.work), p.publish.rpartition("/")[2], p.rows, p.role) for p in parts]
        schema = pa.schema([f for f in self.schema if f.name not in self.sink.partition_by])
        nonce = secrets.token_hex(6)
        written = self.form.merge(self.files, self.generation.work, given, file.stem, nonce, schema, self.sink.options)
        self._check(file, written)
        named = [replace(w, publish=join(file.folder, w.publish) if file.folder else w.publish) for w in written]
        measured = tuple(receipts.measure(self.files, w, root) for w in named)
        self.files.settle([w.path for w in written])
        figures = _summed([receipts.input_figures(r, file.folder) for r in file.given])
        mine = Receipt(file.number, nonce, (0,) * 8, measured, figures, of=file.of)
        standing = receipts.commit(self.files, self.generation.joined, mine)
        if standing.nonce != nonce:  # another run was quicker
            for w in written:
                self.files.remove(w.path)
        return standing

    def _check(self, file: Joined, written: Sequence[WorkFile]) -> None:
        """Raises RunFailed if the files, read back, do not hold as many rows as the parts."""
        wanted = sum(p.rows for p in file.parts if p.role == "rows")
        for w in written:
            with self.files.local(w.path) as path:
                held = self.form.count(path, w.role)
            if not held == w.rows == wanted:
                raise RunFailed(f"{w.path}: holds {held} of the {wanted} rows of the parts that were joined")


def _evenly(sizes: Sequence[int], files: int) -> list[int]:
    """The file of each part, counted from 0, if they go into so many files of about the same size."""
    total, count = sum(sizes) or 1, min(files, len(sizes))
    before = itertools.accumulate(sizes, initial=0)
    return [min((start + size // 2) * count // total, count - 1) for start, size in zip(before, sizes, strict=False)]


def _small_together(sizes: Sequence[int]) -> list[int]:
    """The file of each part, counted from 0, if large parts have one of their own."""
    found: list[int] = []
    number, held, before = -1, 0, LARGE_BYTES
    for size in sizes:
        if max(size, before) >= LARGE_BYTES or held + size > FILE_BYTES:
            number, held = number + 1, 0
        found.append(number)
        held, before = held + size, size
    return found


def _by_folder(receipt: Receipt) -> dict[str, tuple[Part, ...]]:
    """A shard's parts with rows, and the files beside them, by the folder that they are published in."""
    found: dict[str, tuple[Part, ...]] = {}
    for part in receipt.parts:
        if part.role != "dead":
            folder = part.publish.rpartition("/")[0]
            found[folder] = (*found.get(folder, ()), part)
    return found


def _letters(receipt: Receipt) -> Receipt:
    """A receipt without its rows."""
    return replace(receipt, parts=tuple(p for p in receipt.parts if p.role == "dead"))


def _summed(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in (item for some in figures for item in some.items()):
        found[name] = found.get(name, 0.0) + value
    return found


def _in_threads(work: Callable[[Joined], Receipt], items: Sequence[Joined]) -> Iterator[Receipt]:
    """`work` applied to each, in order, several at once. Whoever is stopped does not wait for them: they write files
    that nothing knows of, and the last one may still commit its own.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(items)):
        waiting.put(number)
    done: queue.SimpleQueue[tuple[int, Receipt | BaseException]] = queue.SimpleQueue()
    over = threading.Event()

    def run() -> None:
        with contextlib.suppress(queue.Empty):
            while not over.is_set():
                number = waiting.get_nowait()
                try:
                    done.put((number, work(items[number])))
                except BaseException as e:
                    done.put((number, e))

    for _ in range(min(THREADS, machine.cores(), len(items))):
        threading.Thread(target=run, daemon=True, name="gristmill join").start()
    found: dict[int, Receipt] = {}
    try:
        while len(found) < len(items):
            number, made = done.get()
            if isinstance(made, BaseException):
                raise made
            found[number] = made
    finally:
        over.set()
    yield from (found[number] for number in range(len(items)))

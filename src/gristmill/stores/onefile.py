"""Stores in which a result is one file: it is built beside the old one and given its name, and never changed again.
Readers keep the file that they have open, and look whether there is another. Staged parts are Arrow files in a hidden
folder beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from gristmill.errors import BadJob, RunFailed
from gristmill.files.disk import LOCAL
from gristmill.process.locks import locked_folder
from gristmill.process.pool import Pool
from gristmill.stores.contract import (
    BEGUN,
    Load,
    Mark,
    Overtaken,
    Part,
    Place,
    in_staging,
    is_left,
    is_there,
    refuse_gone,
)
from gristmill.stores.gate import Gate
from gristmill.stores.packing import check_beside, slices, told

WRITERS = 2  # parts that are staged at once
PATIENCE = 20.0  # seconds to wait for another deliverer's last step


class Format(Protocol):
    """What one kind of file does otherwise than others."""

    def check(self, load: Load) -> None:
        """As a store's."""
        ...

    def staged(self, load: Load) -> pa.Schema:
        """The columns of rows as they are staged."""
        ...

    def kept(self, batch: pa.RecordBatch, load: Load) -> pa.RecordBatch:
        """Rows as they are staged. Raises RunFailed for values that cannot be held."""
        ...

    def published(self) -> tuple[list[Mark], int]:
        """The marks in the file that is published, and its rows; none if there is no file. Raises BadJob for a file of
        somebody else.
        """
        ...

    def build(self, path: str, load: Load, runs: Sequence[str], marks: bytes) -> int:
        """Write a new file, of the staged rows and, unless `load.whole`, the published ones of other keys; how many
        rows it has. Whatever lies at the path is of an attempt that was interrupted.
        """
        ...


def checked(place: Place) -> None:
    """Raises BadJob for a path at which no file can be."""
    folder = os.path.dirname(os.path.realpath(place.path))
    if not os.path.isdir(folder):
        raise BadJob(f"{place.shown}: there is no folder {folder}: make it, or give another path")
    if os.path.isdir(place.path):
        raise BadJob(f"{place.shown}: is a folder, and a result is one file: give the path of a file")


class OneFile:
    """A file as a store."""

    def __init__(self, place: Place, form: Format) -> None:
        self._place = place
        self._form = form
        self._path = os.path.realpath(place.path)  # a link stays one
        self._folder, self._name = os.path.split(self._path)
        self._gate = Gate(self._path, place.shown, PATIENCE)

    def check(self, load: Load) -> None:
        self._form.check(load)
        check_beside(load, self._form.published()[0], self._place.shown)

    def live(self, sink: str) -> Mark | None:
        return next((mark for mark in self._form.published()[0] if mark.sink == sink), None)

    # ------------------------------------------------ staging

    def _place_of(self, stage: str) -> str:
        return os.path.join(self._folder, f".{self._name}.{stage}")

    def _make(self, folder: str) -> None:
        """Make a staging place: where the published file is kept from others, so are the rows of the next one."""
        os.makedirs(folder, exist_ok=True)
        with contextlib.suppress(OSError):  # there is no file yet, or the folder is of another user
            if not os.stat(self._path).st_mode & stat.S_IROTH:
                os.chmod(folder, stat.S_IRWXU)

    def _runs(self, load: Load) -> dict[str, str]:
        """The staged files by the parts' ids."""
        folder = self._place_of(load.stage)
        paths = (os.path.join(folder, name) for name in LOCAL.names(folder) if name.endswith(".arrow"))
        return {found[0]: path for path in paths if (found := _held(path)) is not None}

    def staged(self, load: Load) -> Mapping[str, int]:
        return dict(held for path in self._runs(load).values() if (held := _held(path)) is not None)

    def stage(self, load: Load, parts: Sequence[Part]) -> None:
        with Pool(WRITERS) as writers:  # one computes while another's file is put on the disk
            list(writers.map(lambda part: self._stage(load, part), parts))

    def _stage(self, load: Load, part: Part) -> None:
        folder = self._place_of(load.stage)
        target = os.path.join(folder, hashlib.sha256(part.id.encode()).hexdigest()[:24] + ".arrow")
        if _held(target) is not None:
            return
        self._make(folder)
        made = f"{target}.{secrets.token_hex(4)}{BEGUN}"  # whoever else stages the same part has another
        about = {"part": part.id}
        schema = self._form.staged(load).with_metadata(about)
        with in_staging(self._place.shown), _or_none(made):
            with open(made, "wb") as out:
                with pa.ipc.new_file(out, schema) as writer:
                    for batch in part.batches():
                        for piece in slices(batch):
                            writer.write_batch(self._form.kept(piece, load).replace_schema_metadata(about))
                LOCAL.sync(out)
            os.replace(made, target)  # a part is whole, or not there
            LOCAL.sync_folder(folder)

    def count(self, load: Load | None) -> int:
        if load is not None:
            return sum(self.staged(load).values())
        return self._form.published()[1]

    # ------------------------------------------------ the atomic step

    def publish(self, load: Load) -> None:
        self._gate.hold()  # of two deliverers, the second looks after the first has renamed
        try:
            if not is_there(self.live(load.mark.sink), load, self._place.shown):
                self._replace(load)
        finally:
            self._gate.release()

    def _replace(self, load: Load) -> None:
        folder = self._place_of(load.stage)
        self._make(folder)
        with locked_folder(folder) as ours:
            if not ours:  # somebody is removing it
                raise Overtaken(self._gone())
            with _or_none(made := os.path.join(folder, "new")):
                self._put(load, made)

    def _gone(self) -> str:
        return f"{self._place.shown}: what was staged is not there any more: run again"

    def _put(self, load: Load, made: str) -> None:
        """Give the name to a new file, of the runs that are there now: nobody removes them meanwhile."""
        runs = {path: held[1] for path in self._runs(load).values() if (held := _held(path)) is not None}
        refuse_gone(load, runs.values(), self._place.shown)
        self._form.check(load)  # what is there may be of others by now
        there = self._form.published()[0]
        check_beside(load, there, self._place.shown)
        others = [] if load.whole else [m for m in there if m.sink != load.mark.sink]
        marks = json.dumps([json.loads(mark.dump()) for mark in (told(load, there), *others)]).encode()
        try:
            rows = self._form.build(made, load, list(runs), marks)
        except Exception as e:
            if all(map(os.path.exists, runs)):
                raise
            raise Overtaken(self._gone()) from e  # removed by somebody who does not look whether it is used
        if load.whole and rows != load.mark.rows:
            raise RunFailed(f"{self._place.shown}: {rows:,} rows were written of {load.mark.rows:,}: run again")
        LOCAL.settle([made])
        LOCAL.take_place(made, self._path)
        LOCAL.sync_folder(self._folder)

    def drop(self, load: Load, *, this: bool = False) -> None:
        kept = None if this else os.path.basename(self._place_of(load.stage))
        for name in os.listdir(self._folder):
            if not name.startswith(f".{self._name}.{load.places}"):
                continue
            with locked_folder(folder := os.path.join(self._folder, name)) as free:
                if free and name != kept:  # not free: a file is made of what is there, by who removes it afterwards
                    LOCAL.remove_folder(folder)
                elif free:
                    _swept(folder)

    def close(self) -> None:
        self._gate.release()


@contextlib.contextmanager
def _or_none(path: str) -> Iterator[None]:
    """While a file is made: if that fails, what there is of it takes no room."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            LOCAL.remove(path)
        raise


def _swept(folder: str) -> None:
    """Remove what attempts that were killed have begun in a staging place, where nobody makes the new file now."""
    for name in LOCAL.names(folder):
        path = os.path.join(folder, name)
        if is_left(path) if name.endswith(BEGUN) else not name.endswith(".arrow"):
            (LOCAL.remove_folder if os.path.isdir(path) else LOCAL.remove)(path)


def _held(path: str) -> tuple[str, int] | None:
    """The part that a staged file holds, and its rows; None if it is not there, or cannot be read: then the part is
    staged again.
    """
    try:
        with pa.memory_map(path) as source:
            reader = pa.ipc.open_file(source)
            rows = sum(reader.get_batch(n).num_rows for n in range(reader.num_record_batches))
            return reader.schema.metadata[b"part"].decode(), rows
    except (pa.ArrowException, OSError, TypeError, KeyError, UnicodeDecodeError):
        return None


def read_runs(paths: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of staged files."""
    for path in paths:
        with pa.memory_map(path) as source:
            reader = pa.ipc.open_file(source)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number).replace_schema_metadata(None)


def marks_of(data: bytes, shown: str) -> list[Mark]:
    """Marks as `OneFile` has them written into a file."""
    return [Mark.load(json.dumps(body).encode(), shown) for body in json.loads(data)]

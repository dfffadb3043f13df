"""A source that is a store, from its addresses to files: opened, copied if its own files alone are not the rows."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gristmill.errors import BadJob
from gristmill.job.job import HELD, Source
from gristmill.job.snapshots import SNAPSHOTS, Wanted, wanted
from gristmill.shards.sourcefiles import SourceFile
from gristmill.sinks.partition import NULL
from gristmill.snapshots.contract import Counted, DataFile, Growing, Snapshot
from gristmill.snapshots.copying import copied
from gristmill.snapshots.pinned import Pin, Pinned
from gristmill.sources import paths
from gristmill.sources.paths import Storage

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Pinning"]

Tell = Callable[[str], None]


class Pinning:
    """A source that is a store, from its addresses to files. Making one opens the stores of which there is no pin, so
    that what cannot be read is told before anything else is done; `pinned` then copies what has to be copied, into
    `folder`. A store that grows is read on from its pin in `before`. Raises as `SnapshotKind.open` does.
    """

    def __init__(self, source: Source, folder: str, pins: Sequence[Pin] = (), before: Sequence[Pin] = ()) -> None:
        self._source, self._folder = source, folder
        every = wanted(source)
        self._asked = list({each.id: each for each in every}.values())
        ids = Counter(each.id for each in every)
        self._twice = [f"{a.shown} is named twice as a source: it is read once" for a in self._asked if ids[a.id] > 1]
        known, self._before = {pin.id: pin for pin in pins}, {pin.id: pin.version for pin in before}
        self._pins = [self._usable(known.get(asked.id)) for asked in self._asked]
        self._open: list[Snapshot | None] = []
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            for asked, pin in zip(self._asked, self._pins, strict=True):
                self._open.append(None if self._copy(pin) else self._opened(asked, pin))
            stack.pop_all()

    def _usable(self, pin: Pin | None) -> Pin | None:
        """A pin that still leads to its rows: by its version, or by the copy if that is here."""
        return pin if pin is not None and (pin.version or self._copy(pin)) else None

    def _copy(self, pin: Pin | None) -> bool:
        return pin is not None and bool(pin.copy) and os.path.isdir(os.path.join(self._folder, pin.copy))

    def pinned(self, tell: Tell, first: int | None = None) -> Pinned:
        """The files; `tell` gets a line on each store. Then the stores are let go: a transaction that stays open for as
        long as a run takes keeps a server from tidying up, and a file from being written. For those who only look, of a
        store that can be counted no more than the `first` rows are copied.
        """
        try:
            return self._pinned(tell, first)
        finally:
            self.close()

    def _pinned(self, tell: Tell, first: int | None) -> Pinned:
        more = 0
        storage, files, pins = Storage(), list[SourceFile](), list[Pin]()
        kinds: dict[str, Mapping[str, pa.DataType]] = {}
        forms: dict[str, str] = {}
        for asked, pin, snapshot in zip(self._asked, self._pins, list(self._open), strict=True):
            if snapshot is None and not self._copy(pin):  # another run has removed it since
                pin = self._usable(pin)
                snapshot = self._opened(asked, pin)
                self._open.append(snapshot)
            found = None if snapshot is None else snapshot.files()
            if found is not None and (there := self._listed(found)) is not None:
                assert snapshot is not None and snapshot.schema is not None
                told, copy = f"read at {snapshot.told}", ""
                types = {field.name: field.type for field in snapshot.schema}
                forms[found[0].form] = asked.shown
                kinds.update({_path(file): {name: types[name] for name in file.constant} for file in found})
            else:
                left = 0 if first is None or snapshot is None else _beyond(first, asked, snapshot)
                more += left
                told, copy = self._copied(replace(asked, rows=first) if left else asked, pin, snapshot)
                there = self._held(copy)
                forms["parquet"] = asked.shown
            storage = Storage((*storage.mounts, *there[0].mounts))
            files += there[1]
            made = pin or Pin(asked.id, "" if snapshot is None else snapshot.version, told, _now())
            pins.append(replace(made, copy=copy))
            tell(
                f"{asked.shown}: {told}" if pin is None else f"{asked.shown}: as for the run that is here ({pin.told})"
            )
        if len(forms) > 1:
            raise BadJob(
                f"source names stores that are not read alike: {', '.join(forms.values())}: give a job to each"
            )
        once = {file.path: file for file in files}
        if len(once) < len(files):
            said = ", ".join(asked.shown for asked in self._asked)
            self._twice.append(f"files that several of the addresses name are read once: {said}")
        form = next(iter(forms))
        return Pinned(storage, tuple(once.values()), kinds, tuple(pins), tuple(self._twice), more, form)

    def _opened(self, asked: Wanted, pin: Pin | None) -> Snapshot:
        kind: Any = SNAPSHOTS.get(asked.place.store)
        before = self._before.get(asked.id, "") if pin is None and isinstance(kind, Growing) else ""
        if before:
            grown: Snapshot = kind.onwards(asked, before)
            return grown
        opened: Snapshot = kind.open(asked, "" if pin is None else pin.version)
        return opened

    def _copied(self, asked: Wanted, pin: Pin | None, snapshot: Snapshot | None) -> tuple[str, str]:
        if snapshot is None:
            assert pin is not None
            return pin.told, pin.copy
        begun = time.monotonic()
        os.makedirs(self._folder, exist_ok=True)
        copy, rows = copied(snapshot, asked, self._folder)
        took, version = time.monotonic() - begun, f" at {snapshot.told}" if snapshot.told else ""
        return f"{rows:,} rows{version} copied in {took:.1f} s, as of {_now()}", copy

    def _held(self, copy: str) -> tuple[Storage, list[SourceFile]]:
        return paths.resolve(Source((f"{HELD}{copy}",), storage={HELD: self._folder}))

    def _listed(self, found: Sequence[DataFile]) -> tuple[Storage, list[SourceFile]] | None:
        """The store's own files as a source lists them; None if there are none, which a copy has the columns of."""
        if not found:
            return None
        uris = tuple(sorted(file.uri for file in found))
        storage, listed = paths.resolve(Source(uris, storage=found[0].storage))
        by_path = {_path(file): file for file in found}
        return storage, [replace(file, folders=_folders(by_path[file.path])) for file in listed]

    def close(self) -> None:
        """Let go of the stores."""
        held, self._open = self._open, []
        for snapshot in held:
            if snapshot is not None:
                snapshot.close()


def _beyond(first: int, asked: Wanted, snapshot: Snapshot) -> int:
    """How many of the rows that are wanted come after the first ones; 0 if that is not known without reading."""
    count = snapshot.count() if isinstance(snapshot, Counted) else None
    wanted = first if count is None else count if asked.rows is None else min(count, asked.rows)
    return max(0, wanted - first)


def _path(file: DataFile) -> str:
    return paths.redact(file.uri)


def _folders(file: DataFile) -> str:
    """Constant columns, as folders named by them would say it."""
    said = {name: NULL if value is None else quote(value, safe="") for name, value in file.constant.items()}
    return "/".join(f"{quote(name, safe='')}={value}" for name, value in said.items())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")

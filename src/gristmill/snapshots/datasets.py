"""Folders that Hugging Face's `Dataset.save_to_disk` writes, as a source. They hold Arrow files, which are read without
that package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from gristmill.errors import BadSource
from gristmill.snapshots.contract import DataFile, Piece, Snapshot, SnapshotKind, Wanted
from gristmill.snapshots.sql import read_of


class Datasets:
    """A folder with `state.json` and `dataset_info.json`, or `datasets:///PATH`; `#train` for a split of several."""

    name: ClassVar[str] = "datasets"
    queried: ClassVar[bool] = False
    said: ClassVar[tuple[str, ...]] = ()
    embedded: ClassVar[bool] = True
    in_address: ClassVar[tuple[str, ...]] = ()
    marks: ClassVar[tuple[tuple[str, ...], ...]] = (("dataset_dict.json",), ("dataset_info.json", "state.json"))

    @staticmethod
    def open(wanted: Wanted, version: str) -> Snapshot:
        """The dataset, by what its folder says of it."""
        return Saved(wanted)


_: type[SnapshotKind] = Datasets  # for mypy


class Saved:
    """One dataset."""

    version = told = ""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        folder = Path(wanted.place.path)
        if (folder / "dataset_dict.json").exists():
            splits = self._json(folder / "dataset_dict.json")["splits"]
            if wanted.place.name not in splits:
                listed = ", ".join(f"{folder}/{split}" for split in splits)
                raise BadSource(f"{wanted.shown}: holds several datasets: name one of them: {listed}")
            folder = folder / wanted.place.name
        state = self._json(folder / "state.json")
        if state.get("_indices_data_files"):
            raise BadSource(f"{wanted.shown}: its rows are chosen by an index: save it again (flatten_indices())")
        self._paths = [str(folder / file["filename"]) for file in state["_data_files"]]
        if not self._paths:
            raise BadSource(f"{wanted.shown}: it has no data files, and so no columns")
        with self._opened(self._paths[0]) as reader:
            names = read_of(wanted, reader.schema.names)
            self.schema = pa.schema([reader.schema.field(n) for n in names])

    def _json(self, path: Path) -> Any:
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError as e:
            raise BadSource(f"{self._wanted.shown}: is no dataset that save_to_disk wrote: there is no {path}") from e
        except ValueError as e:
            raise BadSource(f"{path}: is damaged: {e}") from e

    def _opened(self, path: str) -> Any:
        try:
            return pa.ipc.open_stream(pa.memory_map(path))
        except (pa.ArrowException, OSError) as e:
            raise BadSource(f"{self._wanted.shown}: {os.path.basename(path)} cannot be read: {e}") from e

    def files(self) -> Sequence[DataFile] | None:
        return None

    def pieces(self) -> Sequence[Piece]:
        return [partial(self._read, path) for path in self._paths]

    def _read(self, path: str) -> Iterator[pa.RecordBatch]:
        try:
            with self._opened(path) as reader:
                for batch in reader:
                    yield batch.select(self.schema.names)
        except (pa.ArrowException, OSError) as e:
            raise BadSource(f"{self._wanted.shown}: {os.path.basename(path)} cannot be read: {e}") from e

    def cancel(self) -> None:
        """No read takes long."""

    def close(self) -> None:
        """Nothing is held."""

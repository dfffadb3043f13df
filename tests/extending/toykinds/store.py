"""A store: a JSON file of rows by key, `shelf:///FILE`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, BadSource
from gristmill.stores.contract import Key, Load, Mark, Mode, Part, Place, Reader, Store, StoreKind, is_there
from gristmill.stores.keys import exact


class Shelf:
    """One row a key; its addresses are `shelf:///FILE`."""

    name: ClassVar[str] = "shelf"
    modes: ClassVar[tuple[Mode, ...]] = ("replace",)
    keyed: ClassVar[bool] = True
    embedded: ClassVar[bool] = True

    @staticmethod
    def open(place: Place) -> Store:
        """For a delivery."""
        return Shelved(place)

    @staticmethod
    def reader(place: Place, key: tuple[str, ...]) -> Reader:
        """For `gm.lookup`."""
        return ShelfReader(place)


_: type[StoreKind] = Shelf  # for mypy


class Shelved:
    """Parts are staged as files of a folder beside the file; to publish is to replace the file."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._file = Path(place.path)

    def check(self, load: Load) -> None:
        """Before anything is scored: what JSON holds without loss."""
        for field in load.schema:
            if not (pa.types.is_integer(field.type) or pa.types.is_string(field.type)):
                raise BadJob(
                    f"{self._place.shown}: column {field.name!r} is {field.type}: only texts and whole numbers fit"
                )

    def live(self, sink: str) -> Mark | None:
        """What readers see, if it is of this sink."""
        mark = _read(self._file)[0]
        return mark if mark is not None and mark.sink == sink else None

    def _folder(self, load: Load) -> Path:
        return self._file.with_name(f".{self._file.name}.{load.stage}")

    def staged(self, load: Load) -> Mapping[str, int]:
        """The parts that are whole, with their rows."""
        parts = [json.loads(path.read_text()) for path in self._folder(load).glob("*.json")]
        return {part["id"]: len(part["rows"]) for part in parts}

    def stage(self, load: Load, parts: Sequence[Part]) -> None:
        """Each once: a part has a file of its own, which is whole or not there."""
        folder = self._folder(load)
        folder.mkdir(exist_ok=True)
        for part in parts:
            rows = [row for batch in part.batches() for row in batch.to_pylist()]
            _replace(folder / f"{hashlib.sha256(part.id.encode()).hexdigest()}.json", {"id": part.id, "rows": rows})

    def count(self, load: Load | None) -> int:
        """Rows that are staged, or that readers see."""
        return len(_read(self._file)[1]) if load is None else sum(self.staged(load).values())

    def publish(self, load: Load) -> None:
        """The rows and the mark are one file, which takes the place of the old one."""
        if is_there(self.live(load.mark.sink), load, self._place.shown):
            return
        parts = [json.loads(path.read_text())["rows"] for path in self._folder(load).glob("*.json")]
        rows = {str([row[name] for name in load.key]): row for part in parts for row in part}
        _replace(self._file, {"mark": load.mark.dump().decode(), "rows": rows})

    def drop(self, load: Load, *, this: bool = False) -> None:
        """Remove what other generations of this sink left."""
        for folder in self._file.parent.glob(f".{self._file.name}.{load.places}*"):
            if this or folder != self._folder(load):
                shutil.rmtree(folder)

    def close(self) -> None:
        """Nothing is held."""


def _replace(path: Path, body: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(body))
    os.replace(temporary, path)


def _read(file: Path) -> tuple[Mark | None, dict[str, Any]]:
    if not file.exists():
        return None, {}
    body = json.loads(file.read_text())
    return Mark.load(body["mark"].encode(), str(file)), body["rows"]


class ShelfReader:
    """Reads the file each time."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def find(self, keys: Sequence[Key]) -> tuple[Mark | None, list[dict[str, Any] | None]]:
        """A row, or None, for each key: `exact` gives keys as values of their columns, in the order of these."""
        mark, rows = _read(Path(self._place.path))
        if mark is None:
            raise BadSource(f"{self._place.shown}: nothing is published there")
        schema = decode_schema(mark.schema)
        columns = exact(keys, {name: schema.field(name).type for name in mark.key}, self._place.shown)
        values = zip(*(column.to_pylist() for column in columns.values()), strict=True)
        return mark, [rows.get(str(list(key))) for key in values]

    def close(self) -> None:
        """Nothing is held."""

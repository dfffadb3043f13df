"""LMDB files that are replaced at the very moment in which they are opened."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path
from typing import Any

import lmdb
import pyarrow as pa
import pytest

import gristmill as gm


def _same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def _night(folder: Path, label: str) -> Path:
    """A file of two rows with this label."""
    rows = pa.table({"id": [1, 2], "label": [label] * 2})
    sink = gm.sink(str(folder / label))
    made = gm.to(f"lmdb://{folder / f'{label}.lmdb'}", key="id")
    gm.Job(rows, gm.model(_same, batch_format="arrow"), sink, workers=0, deliver=[made]).run()
    return folder / f"{label}.lmdb"


def test_a_file_that_is_replaced_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at its name and the opening: it is one file, however many readers open it, and its rows are
    those of one night.
    """
    old, new = _night(tmp_path, "old"), _night(tmp_path, "new")
    shutil.copy(old, place := tmp_path / "place.lmdb")
    gc.collect()
    plain = lmdb.open

    def late(*given: Any, **named: Any) -> Any:
        if new.exists():
            os.replace(new, place)
        return plain(*given, **named)

    monkeypatch.setattr(lmdb, "open", late)
    with gm.lookup(f"lmdb://{place}") as one, gm.lookup(f"lmdb://{place}") as other:
        assert one.get(1) == other.get(1) == {"id": 1, "label": "new"}
        assert one.get(2) == other.get(2) == {"id": 2, "label": "new"}


def test_a_file_that_is_about_to_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread lets go of it, and LMDB has not closed it yet: it is opened a moment later."""
    place, plain, refused = _night(tmp_path, "place"), lmdb.open, [1, 2, 3]

    def closing(path: str, *given: Any, **named: Any) -> Any:
        if refused:
            refused.pop()
            raise lmdb.Error(f"The environment {path!r} is already open in this process.")
        return plain(path, *given, **named)

    gc.collect()
    monkeypatch.setattr(lmdb, "open", closing)
    with gm.lookup(f"lmdb://{place}") as lookup:
        assert lookup.get(1) == {"id": 1, "label": "place"} and not refused

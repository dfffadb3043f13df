"""What is looked at of the modules that are loaded when a worker opens its model."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pyarrow as pa
import pytest

import gristmill as gm


class Library:
    """As cffi leaves its libraries among the modules: says that it is a module, and has no `__dict__`."""

    __slots__ = ()
    __class__ = property(lambda self: types.ModuleType)  # type: ignore[assignment]


def score(batch: pa.RecordBatch) -> pa.Array:
    return batch.column("id")


def test_what_only_says_that_it_is_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run beside it answers every row."""
    library = Library()
    assert isinstance(library, types.ModuleType)
    monkeypatch.setitem(sys.modules, "_sealed.lib", library)
    rows = pa.table({"id": range(3)})
    gm.apply(rows, str(tmp_path / "out"), fn=score, batch_format="arrow", workers=0)
    assert gm.read(tmp_path / "out").to_table().num_rows == 3

"""What the tests of sources and sinks share: fresh folders, and a source planned and read as the worker does it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gristmill.arrow.casts import fitted
from gristmill.files.disk import LocalFiles
from gristmill.job.job import source
from gristmill.shards.sourcefiles import FileInfo
from gristmill.sinks.contract import WorkFile
from gristmill.sources import formats, paths
from gristmill.sources.contract import BadRow, Reading
from gristmill.sources.schema import apart, unify
from gristmill.sources.where import SqlWhere


@dataclass(frozen=True)
class Read:
    """What came out of a source: rows, their positions, how many were filtered, and the bad ones."""

    rows: pa.Table
    position: np.ndarray
    filtered: int
    bad: list[BadRow]

    def pylist(self) -> list[dict[str, Any]]:
        return self.rows.to_pylist()


class Planned:
    """A source as planning sees it; `read` reads ranges of its first file as a worker does."""

    def __init__(self, *uri: str, **options: Any) -> None:
        self.source = source(*uri, **options)
        self.fs, self.files = paths.resolve(self.source)
        self.format = formats.source_format(self.source, self.files)
        self.options = formats.format_options(self.source)
        self.infos: list[FileInfo] = [self.format.inspect(f, self.fs, self.options) for f in self.files]
        self.schema = unify(self.infos)
        self.apart = apart(self.schema, self.schema.names)

    @property
    def info(self) -> FileInfo:
        return self.infos[0]

    def blocks(self, ranges: Any = None, columns: Any = None, where: str | None = None, **more: Any) -> list[Any]:
        condition = None if where is None else SqlWhere(where, self.schema)
        wanted = None if columns is None else tuple(columns)
        reading = Reading(wanted, self.schema, condition, options=self.options, **more)
        ranges = [[0, self.info.extent]] if ranges is None else ranges
        return list(self.format.read(self.info, self.fs, np.array(ranges, dtype=np.int64).reshape(-1, 2), reading))

    def read(self, ranges: Any = None, columns: Any = None, where: str | None = None, **more: Any) -> Read:
        blocks = self.blocks(ranges, columns, where, **more)
        for block in blocks:
            assert len(block.position) == block.rows.num_rows
        names = list(self.schema.names if columns is None else columns)
        empty = pa.schema([self.schema.field(n) for n in names]).empty_table()
        return Read(
            pa.concat_tables([empty, *(b.rows for b in blocks)]),
            np.concatenate([np.zeros(0, dtype=np.int64), *(b.position for b in blocks)]),
            sum(b.filtered for b in blocks),
            [bad for b in blocks for bad in b.bad],
        )

    def in_parts(self, edges: list[int], **more: Any) -> Read:
        """Read as shards would: one call for each range between edges, in order."""
        edges = sorted({0, self.info.extent, *edges})
        parts = [self.read([[a, b]], **more) for a, b in itertools.pairwise(edges)] or [self.read([], **more)]
        return Read(
            pa.concat_tables([p.rows for p in parts]),
            np.concatenate([p.position for p in parts]),
            sum(p.filtered for p in parts),
            [bad for p in parts for bad in p.bad],
        )


class Scratch:
    """Folders and files under one temporary folder; property tests ask for a new one each time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._numbers = itertools.count()

    def folder(self) -> Path:
        path = self._root / f"{next(self._numbers):05d}"
        path.mkdir()
        return path

    def file(self, name: str, content: bytes) -> str:
        path = self.folder() / name
        path.write_bytes(content)
        return str(path)

    def written(self, form: Any, rows: pa.Table, pieces: int = 1, **options: Any) -> tuple[Path, list[WorkFile]]:
        """A folder with the published files of one shard, written in some pieces."""
        folder = self.folder()
        schema = form.stored(rows, options)
        rows = fitted(rows, schema)
        writer = form.writer(LocalFiles(), str(folder / "work"), "part-0000003.g1", "abc", schema, options)
        step = max(1, -(-rows.num_rows // pieces))
        for start in range(0, rows.num_rows, step):
            writer.write(rows.slice(start, step))
        files = writer.close()
        for file in files:
            target = folder / "out" / file.publish
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(file.path, target)
        return folder / "out", files


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """Where a test may put files."""
    return Scratch(tmp_path_factory.mktemp("io"))


@pytest.fixture(scope="session")
def planned() -> type[Planned]:
    """`planned(uri, **source options)`: a source, planned."""
    return Planned


def pytest_make_parametrize_id(val: Any) -> str | None:
    text = str(val) if isinstance(val, Mapping) else None
    return None if text is None or " at 0x" in text else text  # an address differs between processes

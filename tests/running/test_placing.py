"""How many workers a job gets: from cores, and from what memory holds of its model."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill import machine, planning

pytestmark = pytest.mark.real_model


@pytest.mark.parametrize(
    ("cores", "memory", "workers", "threads"),
    [(8, 64 << 30, 8, 1), (8, 2 << 30, 2, 4), (8, 1 << 28, 1, 8), (1, 64 << 30, 1, 1)],
)
def test_workers_fit_into_memory(
    minilm_onnx: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    memory: int,
    workers: int,
    threads: int,
) -> None:
    """A process a core, but no more than hold their model in memory together; cores that are left become threads."""
    pq.write_table(pa.table({"text": ["a"] * 10_000}), tmp_path / "in.parquet")
    monkeypatch.setattr(machine, "cores", lambda: cores)
    monkeypatch.setattr(machine, "memory", lambda: memory)
    monkeypatch.setattr(machine, "gpus", lambda: ())
    job = gm.Job(str(tmp_path / "in.parquet"), gm.TextEmbedder(str(minilm_onnx), text="text"), str(tmp_path / "out"))
    found = planning.resolve(job.spec)
    assert (found.workers, found.place.threads) == (workers, threads)


def test_memory_is_that_of_the_control_group() -> None:
    """What this process may use: never more than the machine has, never nothing."""
    import psutil

    assert 64 << 20 < machine.memory() <= psutil.virtual_memory().total * 1.01

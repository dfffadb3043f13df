"""How many workers a job gets: from cores, and from what memory holds of its model."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.driver import planning
from gristmill.job.options import EngineSpec
from gristmill.process import machine
from gristmill.worker.stages import ShardStages

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


@pytest.mark.parametrize(
    ("share", "gpus", "workers", "names"),
    [
        (1, "auto", 2, ("0", "1")),
        (0.5, "auto", 4, ("0", "1")),
        (0.3, 1, 3, ("0",)),
        (0.5, 0, 8, ()),
        (2, "auto", 1, ("0,1",)),
        (2, 2, 1, ("0,1",)),
    ],
)
def test_workers_share_gpus(
    minilm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    gpus: int | str,
    workers: int,
    names: tuple[str, ...],
) -> None:
    """gpus_per_worker as a fraction puts several workers on each GPU, in turns, and above 1 gives each as many; gpus=
    counts GPUs, not workers.
    """
    pq.write_table(pa.table({"text": ["a"] * 10_000}), tmp_path / "in.parquet")
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setattr(machine, "memory", lambda: 64 << 30)
    monkeypatch.setattr(machine, "gpus", lambda: ("0", "1"))
    engine = EngineSpec(gpus=gpus, options={"gpus_per_worker": share})  # type: ignore[arg-type]
    model = gm.TextEmbedder(str(minilm), text="text")
    job = gm.Job(str(tmp_path / "in.parquet"), model, str(tmp_path / "out"), engine=engine)
    found = planning.resolve(job.spec)
    assert (found.workers, found.gpus) == (workers, names)
    seen = [ShardStages(None, gpus=found.gpus).environment(i).get("CUDA_VISIBLE_DEVICES") for i in range(workers)]  # type: ignore[arg-type]
    if names:
        assert {seen.count(name) for name in names} == {workers // len(names)}


@pytest.mark.parametrize("share", [0, 1.5, True, "half"])
def test_a_share_of_a_gpu_is_a_fraction(share: object) -> None:
    """One and a half GPUs a worker, none, or a word are refused with what to give."""
    with pytest.raises(gm.BadJob, match="gpus_per_worker is"):
        EngineSpec(options={"gpus_per_worker": share})


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, with how many there are; so is a number of GPUs that no number of workers has."""
    monkeypatch.setattr(machine, "gpus", lambda: ("0", "1", "2"))
    options = {"gpus_per_worker": 4}
    with pytest.raises(gm.BadJob, match="gpus_per_worker is 4, but this machine has 3"):
        gm.Job([{"text": "a"}], gm.model(len), engine=EngineSpec(options=options)).plan()
    found = gm.Job([{"text": "a"}], gm.model(len), engine=EngineSpec(gpus=1, options={"gpus_per_worker": 2}))
    with pytest.raises(gm.BadJob, match="gpus is 1, and each worker has 2: give a multiple"):
        found.plan()

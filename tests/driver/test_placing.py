"""How many workers a job gets: from cores, and from what memory holds of its model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.driver import devices, planning
from gristmill.driver.resolved import Resolved
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


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of 8 cores and 2 GPUs, with libraries that can use them; and a source."""
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setattr(machine, "memory", lambda: 64 << 30)
    monkeypatch.setattr(machine, "gpus", lambda: ("0", "1"))
    monkeypatch.setattr(devices, "without_gpu", lambda library: None)
    pq.write_table(pa.table({"text": ["a"] * 10_000, "x": [0.5] * 10_000}), tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


def seen(found: Resolved) -> list[str | None]:
    """The GPUs that the workers of a job see."""
    recipe: Any = SimpleNamespace(place=found.place)
    stages = ShardStages(recipe, gpus=found.gpus)
    return [stages.environment(i).get("CUDA_VISIBLE_DEVICES") for i in range(found.workers)]


@pytest.mark.parametrize(
    ("share", "gpus", "workers", "names"),
    [
        (1, "auto", 2, ("0", "1")),
        (0.5, "auto", 4, ("0", "1")),
        (0.3, 1, 3, ("0",)),
        (0.5, 0, 8, ()),
        (2, "auto", 1, ("0,1",)),
        (2, 2, 1, ("0,1",)),
        (None, "auto", 4, ("0", "1")),
        (None, 1, 2, ("0",)),
    ],
)
def test_workers_share_gpus(
    minilm: Path, two_gpus: Path, share: float | None, gpus: int | str, workers: int, names: tuple[str, ...]
) -> None:
    """gpus_per_worker as a fraction puts several workers on each GPU, in turns, and above 1 gives each as many; gpus=
    counts GPUs, not workers. By default two workers of a small text model share one.
    """
    engine = EngineSpec(gpus=gpus, options={"gpus_per_worker": share})  # type: ignore[arg-type]
    model = gm.TextEmbedder(str(minilm), text="text")
    found = planning.resolve(gm.Job(str(two_gpus), model, engine=engine).spec)
    assert (found.workers, found.gpus, found.place.device) == (workers, names, "cuda" if names else "cpu")
    if names:
        assert {seen(found).count(name) for name in names} == {workers // len(names)}


@pytest.mark.parametrize(
    ("device", "gpus", "place", "names"),
    [("cuda", "auto", "cuda", ("0", "1")), ("cuda:1", "auto", "cuda", ("1",)), ("cpu", "auto", "cpu", ())],
)
def test_a_device_by_name(
    minilm: Path, two_gpus: Path, device: str, gpus: int | str, place: str, names: tuple[str, ...]
) -> None:
    """`cuda` is all GPUs, `cuda:1` the second alone, which a worker sees as its first; `cpu` none."""
    model = gm.TextEmbedder(str(minilm), text="text", device=device)
    found = planning.resolve(gm.Job(str(two_gpus), model, engine=EngineSpec(gpus=gpus)).spec)  # type: ignore[arg-type]
    assert (found.place.device, found.gpus) == (place, names)
    assert set(seen(found)) - {None} == set(names)
    assert found.workers == (2 * len(names) or 8)


def test_a_device_that_is_not_there(minilm: Path, two_gpus: Path) -> None:
    """A number that no GPU has is refused, with those there are; so is a GPU for a job that is to have none."""
    job = gm.Job(str(two_gpus), gm.TextEmbedder(str(minilm), text="text", device="cuda:2"))
    with pytest.raises(gm.BadJob, match="device 'cuda:2': this machine has cuda:0, cuda:1"):
        job.plan()
    none = gm.Job(str(two_gpus), gm.TextEmbedder(str(minilm), text="text", device="cuda"), engine=EngineSpec(gpus=0))
    with pytest.raises(gm.BadJob, match="device is 'cuda', and gpus is 0: leave one of them out"):
        none.plan()


@pytest.mark.parametrize("asked", ["auto", "cuda", "gpus"])
def test_a_library_without_cuda(minilm: Path, two_gpus: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    """Where torch is built for CPUs the model runs on these, and the run says so; a GPU that was asked for is refused
    before anything is loaded.
    """
    monkeypatch.setattr(devices, "without_gpu", lambda library: f"{library} is built without CUDA")
    model = gm.TextEmbedder(str(minilm), text="text", device="cuda" if asked == "cuda" else "auto")
    job = gm.Job(str(two_gpus), model, engine=EngineSpec(gpus=1 if asked == "gpus" else "auto"))
    if asked != "auto":
        with pytest.raises(gm.BadJob, match="torch is built without CUDA"):
            job.plan()
        return
    found = planning.resolve(job.spec)
    assert (found.place.device, found.workers, found.gpus) == ("cpu", 8, ())
    assert "the GPU of this machine is not used: torch is built without CUDA" in found.notes


def test_what_needs_no_gpu(two_gpus: Path, tmp_path: Path) -> None:
    """A function has all cores beside GPUs, as one of scikit-learn has; with gpus= it has a worker for each."""
    import skops.io  # type: ignore[import-untyped]
    from sklearn.linear_model import LogisticRegression

    skops.io.dump(LogisticRegression().fit([[0.0], [1.0]], [0, 1]), tmp_path / "model.skops")
    scikit = gm.SklearnModel(str(tmp_path / "model.skops"), features=("x",))
    for model in (gm.model(len), scikit):
        found = planning.resolve(gm.Job(str(two_gpus), model).spec)
        assert (found.place.device, found.workers) == ("cpu", 8)
    found = planning.resolve(gm.Job(str(two_gpus), gm.model(len), engine=EngineSpec(gpus=2)).spec)
    assert found.workers == 2
    assert seen(found) == ["0", "1"]


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


def test_an_opened_encoder_without_cuda(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that is opened beside a GPU which its library cannot use runs on the CPU."""
    monkeypatch.setattr(machine, "gpus", lambda: ("0",))
    with gm.TextEmbedder(str(minilm), text="text").open() as encoder:
        assert encoder.encode("a dog").shape == (384,)

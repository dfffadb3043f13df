"""The Ray engine on a real cluster of several nodes: nodes that come and go, places that are waited for, resources."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import oracles
import processes
import psutil
import pyarrow as pa
import pytest
import victims
from heard import Heard
from places import MEMORY, head

import gristmill as gm
from children import is_worker
from gristmill.engines.ray_cluster import needs, room, shortage
from gristmill.job.options import RayOptions
from gristmill.observe.events import Progress

pytestmark = pytest.mark.leaves_children  # idle processes of Ray; our own are watched by `leaves_no_worker`


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that runs nothing and a node with one core and one (pretended) GPU, to which this process is connected."""
    with head() as cluster:
        cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=MEMORY)
        yield cluster


class Waits(Heard):
    """Does something as soon as the run says that it waits."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.then = then
        self.most = 0

    def progress(self, now: Progress) -> None:
        super().progress(now)
        self.most = max(self.most, now.workers)
        if now.waiting and self.then is not None:
            then, self.then = self.then, None
            then()


@pytest.mark.long
def test_workers_are_as_many_as_fit(cluster: Any, numbers: str, tmp_path: Path) -> None:
    """`workers: auto` asks the cluster, not this machine."""
    cores, gpu = room(RayOptions()), room(RayOptions(gpus_per_worker=0.5))
    assert cores is not None and gpu is not None
    assert (cores.workers, cores.gpu_workers, cores.threads) == (1, 1, 1)
    assert gpu.gpu_workers == 1  # one core, though the GPU has room for two
    none = room(RayOptions(resources={"tpu": 1}))
    assert none is not None and none.workers == 1  # one, to wait for


@pytest.mark.long
def test_a_place_is_waited_for_aloud(cluster: Any, numbers: str, wanted: pa.Table, tmp_path: Path) -> None:
    """Two workers, room for one: the wait is said with numbers, the job goes on meanwhile, and with both when a node
    comes.
    """
    root, heard = str(tmp_path / "out"), Waits(lambda: cluster.add_node(num_cpus=1, object_store_memory=MEMORY))
    args = {"seconds": 0.3}
    job = jobs.job(numbers, root, "slow", args, engine=engine(workers=2), shard_rows=10, batch_rows=10, keep=["id"])
    assert job.run(observer=heard).rows_ok == 200
    assert heard.waited[0] == "waiting for 2 CPUs, the cluster has 1 CPU"
    assert heard.most == 2
    oracles.same_values(root, wanted)


@pytest.mark.long
def test_a_node_is_killed(cluster: Any, numbers: str, wanted: pa.Table, tmp_path: Path) -> None:
    """Three nodes, one killed in the middle: its shard is done elsewhere, one receipt a shard, and no row is blamed."""
    lost = cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
    root, heard = str(tmp_path / "out"), Waits(None)

    def kill() -> None:
        # Of three workers one is on that node, as the others have one core each.
        processes.until(lambda: processes.receipts_in(root) >= 4 and heard.most >= 3)
        cluster.remove_node(lost, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    args = {"seconds": 0.4}
    options: dict[str, Any] = {"engine": engine(workers=(1, 4)), "shard_rows": 5, "batch_rows": 5}
    report = jobs.job(numbers, root, "slow", args, **options).run(observer=heard)
    killer.join()
    assert (report.rows_ok, report.rows_dead) == (200, 0)
    assert any("its actor was lost" in n.text for n in heard.notes)
    assert processes.receipts_in(root) == report.shards
    oracles.nothing_lost_nothing_twice(root, list(range(200)))
    oracles.same_values(root, wanted)
    oracles.tidy(root)


@pytest.mark.long
def test_an_actor_is_killed(cluster: Any, numbers: str, tmp_path: Path) -> None:
    """The actor's own process, not the worker's: its place is filled again, and what it ran is not blamed."""
    root, heard = str(tmp_path / "out"), Heard()
    model = gm.model(kills_its_parent, marker=str(tmp_path / "killed"), at=77)
    sink = gm.sink(root, keep=["id"])
    report = gm.Job(numbers, model, sink, engine=gm.ray(workers=1), shard_rows=20).run(observer=heard)
    assert (report.rows_ok, report.rows_dead) == (200, 0)
    assert heard.deaths() in (1, 2), heard.notes  # Ray may begin the next one on what is left of the first
    assert any("its actor was lost" in n.text for n in heard.notes)
    oracles.nothing_lost_nothing_twice(root, list(range(200)))


def kills_its_parent(batch: dict[str, Any], marker: str, at: int) -> dict[str, Any]:
    """SIGKILL to the process above, once."""
    if at in batch["id"].tolist() and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(10)
    return {"y": batch["x"]}


def engine(**fields: Any) -> dict[str, Any]:
    """Fields of an EngineSpec on the cluster at hand."""
    return {"name": "ray", "options": {}, **fields}


def placed(batch: dict[str, Any]) -> dict[str, Any]:
    """What a worker's process sees of its place."""
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GREETING")
    return {"y": batch["x"], **{n: [os.environ.get(n, "")] * len(batch["x"]) for n in names}}


@pytest.mark.long
def test_resources_and_runtime_environment(cluster: Any, numbers: str, tmp_path: Path) -> None:
    """A share of a GPU, cores and variables of the runtime environment are what a worker's process has."""
    options = {"gpus_per_worker": 0.5, "cpus_per_worker": 1, "runtime_env": {"env_vars": {"GREETING": "hello"}}}
    job = gm.Job(numbers, gm.model(placed), str(tmp_path / "out"), engine=gm.ray(workers=1, **options))
    job.run()
    row = gm.read(tmp_path / "out").to_table().to_pylist()[-1]
    assert (row["CUDA_VISIBLE_DEVICES"], row["OMP_NUM_THREADS"], row["GREETING"]) == ("0", "1", "hello")


@pytest.mark.slow
def test_a_local_cluster_comes_and_goes(numbers: str, wanted: pa.Table, tmp_path: Path) -> None:
    """Without a cluster one is started for the run, and nothing of it is left afterwards."""
    root = str(tmp_path / "out")
    arguments = {"source": numbers, "sink": root, "fn": "slow", "args": {"seconds": 0.02}, "batch_rows": 5}
    local = engine(workers=2, options={"address": "local"})
    running = processes.start("jobs:run", {"RAY_AUTH_MODE": "disabled"}, **arguments, engine=local)
    processes.until(lambda: processes.receipts_in(root) >= 1 or running.poll() is not None)
    below = psutil.Process(running.pid).children(recursive=True)
    printed, _ = running.communicate(timeout=60)
    assert running.returncode == 0, printed
    assert below
    assert processes.gone(below, 5)
    oracles.same_values(root, wanted)


@pytest.mark.long
def test_the_driver_is_killed(cluster: Any, numbers: str, wanted: pa.Table, tmp_path: Path) -> None:
    """SIGKILL to the driver: its actors and their processes leave the cluster, and the next run goes on."""
    root, options = str(tmp_path / "out"), {"address": cluster.address}
    arguments: dict[str, Any] = {"engine": engine(workers=2, options=options), "shard_rows": 10, "batch_rows": 5}
    args = {"seconds": 0.1}
    running = processes.start("jobs:run", source=numbers, sink=root, fn="slow", args=args, **arguments)
    processes.until(lambda: processes.receipts_in(root) >= 2)
    workers = [p for p in psutil.Process().children(recursive=True) if is_worker(p)]
    assert workers
    processes.killed(running)
    assert processes.gone(workers, 12)
    report = jobs.run(numbers, root, "slow", args, **arguments)
    assert 0 < report.rows_run < 200
    oracles.same_values(root, wanted)


def test_shortage_in_words() -> None:
    """What is said of a wait: what the cluster lacks altogether, else what is taken, else that it is starting."""
    gpu = needs(RayOptions(), gpu=True, there={})
    assert shortage(gpu, 2, 1, {"CPU": 8, "GPU": 1}, {"CPU": 7}) == "waiting for 2 GPUs, the cluster has 1 GPU"
    busy = shortage(gpu, 2, 2, {"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 1})
    assert busy == "waiting for 2 GPUs, the cluster has 1 GPU of 4 GPUs free"
    starting = shortage(gpu, 2, 1, {"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4})
    assert starting == "waiting for the cluster to start 1 of 2 workers"
    rare = needs(RayOptions(accelerator_type="A100", memory_per_worker=8 << 30), gpu=True, there={})
    total = {"CPU": 8.0, "GPU": 4.0, "memory": float(4 << 30)}
    assert shortage(rare, 1, 1, total, total) == "waiting for 8 GB of memory, the cluster has 4 GB of memory"
    total["memory"] *= 4
    assert shortage(rare, 1, 1, total, total) == "waiting for a node with A100, the cluster has none"


@pytest.mark.parametrize(
    ("asked", "there", "found"),
    [
        ("A100", {}, "A100"), ("A100_80G", {}, "A100"), ("A100-80GB", {}, "A100"), ("nvidia-a100", {}, "A100"),
        ("H100_80GB", {}, "H100"), ("NVIDIA H100 80GB HBM3", {}, "H100"), ("Tesla T4", {}, "T4"), ("l40s", {}, "L40S"),
        ("A100_80G", {"accelerator_type:A100-80G": 1, "accelerator_type:A100": 1}, "A100-80G"),
        ("A100_40G", {"accelerator_type:A100-80G": 1}, "A100-80G"),
        ("A100_80G", {"accelerator_type:A100-40G": 1}, "A100"),
        ("ours", {"accelerator_type:ours": 1}, "ours"), ("rtx_4090", {"accelerator_type:GeForce-RTX-4090": 1},
                                                         "GeForce-RTX-4090"),
    ],
)  # fmt: skip
def test_fault_66_types_of_gpus_as_others_write_them(asked: str, there: dict[str, float], found: str) -> None:
    """The cluster's name, or Ray's."""
    wanted = needs(RayOptions(accelerator_type=asked), gpu=True, there=there)
    assert [name for name in wanted if ":" in name] == [f"accelerator_type:{found}"]


@pytest.mark.parametrize("asked", ["A1OO", "nvidia", "RTX", "", "80GB"])
def test_fault_66_no_type_of_gpus(asked: str) -> None:
    """Refused: Ray would wait for ever."""
    with pytest.raises(gm.BadJob, match=r"is not a known type of GPU: .*the cluster has V100"):
        needs(RayOptions(accelerator_type=asked or "?"), gpu=True, there={"accelerator_type:V100": 1})


@pytest.mark.long
def test_fault_66_a_map_says_what_it_waits_for(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within seconds, what it lacks and what the cluster has; when that comes, it goes on."""
    said, nodes = [], []

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            said.append(text)
            if "waiting" in text and not nodes:
                kind = {"accelerator_type:H100": 1}
                nodes.append(cluster.add_node(num_cpus=1, num_gpus=1, resources=kind, object_store_memory=MEMORY))
            return len(text)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Terminal())
        found = gm.map(abs, [-1], engine="ray", func_gpu="H100_80GB")
    assert found == [1]
    assert "abs: waiting for a node with H100, the cluster has none" in "".join(said)
    for node in nodes:
        cluster.remove_node(node)


def test_options_are_checked_before_anything_runs(numbers: str, tmp_path: Path) -> None:
    """An option that Ray's engine does not have, a value it cannot have, a cluster that is not there: one line each."""
    with pytest.raises(gm.BadJob, match=r"no option 'gpu_per_worker': did you mean 'gpus_per_worker'\?"):
        gm.ray(gpu_per_worker=1)
    with pytest.raises(gm.BadJob, match="gpus_per_worker is -1"):
        gm.ray(gpus_per_worker=-1)
    running = processes.start("jobs:run", source=numbers, sink=str(tmp_path / "out"), fn="scored", engine=ABSENT)
    printed, _ = running.communicate(timeout=60)
    assert running.returncode == 2, printed
    assert "no cluster at address '127.0.0.1:1'" in printed


ABSENT = {"name": "ray", "workers": 1, "options": {"address": "127.0.0.1:1"}}


def test_a_job_file_names_the_engine(tmp_path: Path) -> None:
    """`engine: {name: ray, …}` of a job file and its profiles is the engine of gm.ray(…); so are --engine and --set."""
    from gristmill.job.options import EngineSpec

    victims.write_input(str(tmp_path / "in"), 10, files=1)
    (tmp_path / "job.yaml").write_text(
        "source: in/\nsink: out/\nmodel: {call: 'victims:scored'}\n"
        "profiles: {prod: {engine: {name: ray, address: auto, gpus_per_worker: 1, workers: [4, 64]}}}\n"
    )
    job = gm.load_job(str(tmp_path / "job.yaml"), profile="prod")
    assert job.spec.engine == gm.ray(address="auto", gpus_per_worker=1, workers=(4, 64))
    job = gm.load_job(str(tmp_path / "job.yaml"), sets=["engine.name=ray", "engine.gpus_per_worker=0.5"])
    assert job.spec.engine == gm.ray(gpus_per_worker=0.5)
    job = gm.load_job(str(tmp_path / "job.yaml"), profile="prod", sets=["engine.name=local"])
    assert job.spec.engine == EngineSpec("local", workers=(4, 64))  # what only Ray can be told is left out


# ---------------------------------------------------------------- prepare and predict placed apart


@pytest.fixture(scope="module")
def wide(cluster: Any) -> Any:
    """Two cores more, for a worker and one that prepares."""
    cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
    return cluster


def split(**fields: Any) -> dict[str, Any]:
    """The same engine with the first stage in actors of its own."""
    return engine(options={"split": True, **fields.pop("options", {})}, **fields)


@pytest.mark.long
def test_split_gives_the_same(wide: Any, numbers: str, tmp_path: Path) -> None:
    """Steps, dead letters of steps and of the model, ids: the same table, letters and receipts as in one place."""

    def run(name: str, on: dict[str, Any]) -> gm.Report:
        sink = gm.sink(str(tmp_path / name), keep=["id"], row_id="rid")
        steps = [victims.odd, gm.flat_map(twice)]
        return jobs.run(numbers, sink, "scored", {"bad": [30, 131]}, steps=steps, engine=on, shard_rows=20)

    plain, apart = run("wanted", {"name": "local", "workers": 0}), run("out", split(workers=1))
    assert (apart.rows_ok, apart.rows_dead, apart.rows_filtered) == (
        plain.rows_ok,
        plain.rows_dead,
        plain.rows_filtered,
    )
    oracles.same_values(str(tmp_path / "out"), gm.read(tmp_path / "wanted").to_table())
    letters = [gm.dead(tmp_path / name).drop_columns(["traceback"]).to_pylist() for name in ("out", "wanted")]
    assert letters[0] == letters[1]
    assert processes.receipts_in(str(tmp_path / "out")) == apart.shards
    oracles.tidy(str(tmp_path / "out"))


def twice(row: dict[str, Any]) -> list[dict[str, Any]]:
    """One row as two."""
    if row["id"] == 44:
        raise ValueError("not this one")
    return [{"x": row["x"]}, {"x": -row["x"]}]


@pytest.mark.slow
def test_split_texts(wide: Any, minilm_onnx: Path, reviews_folder: Path, tmp_path: Path) -> None:
    """Tokens made in one actor, vectors in another: within 1e-5 of what one process makes, in the same order."""
    import numpy as np

    def run(name: str, on: dict[str, Any]) -> pa.Table:
        model = gm.TextEmbedder(str(minilm_onnx), text="text", backend="onnx", device="cpu")
        source = gm.source(str(reviews_folder), limit=150)
        sink = gm.sink(str(tmp_path / name), keep=["review_id"])
        gm.Job(source, model, sink, engine=jobs.engine_of(on), shard_rows=60).run()
        return gm.read(tmp_path / name).to_table()

    here, apart = run("here", {"name": "local", "workers": 0}), run("apart", split(workers=1))
    assert apart["review_id"].equals(here["review_id"])
    vectors = [np.stack(t["embedding"].to_numpy()) for t in (here, apart)]
    assert np.abs(vectors[0] - vectors[1]).max() < 1e-5


@pytest.mark.long
def test_split_a_worker_of_either_stage_dies(wide: Any, numbers: str, wanted: pa.Table, tmp_path: Path) -> None:
    """SIGKILL to a preparing process and one to a predicting: nothing lost or blamed. A step that segfaults on a row is
    isolated as ever.
    """
    heard, root = Heard(), str(tmp_path / "out")
    steps = [gm.step(killed_once, marker=str(tmp_path / "killed"), at=150)]
    args = {"marker": str(tmp_path / "once"), "at": 60, "what": "kill"}
    job = jobs.job(numbers, root, "once", args, steps=steps, engine=split(workers=1), shard_rows=20)
    report = job.run(observer=heard)
    assert (report.rows_ok, report.rows_dead, heard.deaths()) == (200, 0, 2)
    assert any(n.text.startswith("worker p") and "SIGKILL" in n.text for n in heard.notes)
    oracles.same_values(root, wanted)
    assert processes.receipts_in(root) == report.shards
    heard, root = Heard(), str(tmp_path / "bad")
    job = jobs.job(numbers, root, "scored", steps=[victims.harmful_step], engine=split(workers=1), shard_rows=4)
    report = job.run(observer=heard)
    assert (report.rows_ok, sorted(oracles.dead_ids(root))) == (198, [85, 86])


def killed_once(batch: dict[str, Any], marker: str, at: int) -> dict[str, Any]:
    """A step that kills its process at row `at`, once."""
    victims.once(batch, marker, at, "kill")
    return {"x": batch["x"]}


@pytest.mark.long
def test_the_parallel_map(cluster: Any) -> None:
    """`remote_parallel_map(engine="ray")`: calls in actors; large values, exceptions and deaths as on one machine."""

    def squared(x: Any) -> Any:
        if isinstance(x, int) and x == 13:
            os._exit(3)
        if isinstance(x, int) and x == 14:
            raise KeyError("fourteen")
        return x * x

    found = gm.map(squared, range(20), engine="ray", return_exceptions=True, func_cpu=1)
    assert [v for v in found if isinstance(v, int)] == [x * x for x in range(20) if x not in (13, 14)]
    assert isinstance(found[13], gm.WorkerLost) and isinstance(found[14], KeyError)
    (array,) = gm.map(squared, [np.full(500_000, 3.0)], engine=gm.ray())
    assert array.sum() == 9.0 * 500_000
    with pytest.raises(gm.BadJob, match="func_ram is 'much'"):
        gm.map(squared, [1], engine="ray", func_ram="much")

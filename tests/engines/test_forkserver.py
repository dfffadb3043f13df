"""Workers that are forks: children of the driver, as if each had been started afresh."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pretended import Feed, Stages, Worker

import gristmill as gm
from children import below, is_alive
from gristmill.driver.warmup import SMALL
from gristmill.engines import forkserver, interpreter
from gristmill.engines.forkserver import NAME, Child
from gristmill.engines.interpreter import Spares
from gristmill.engines.local import Local
from gristmill.process.messages import Emit, Printed
from gristmill.process.startup import import_path, thread_variables

pytestmark = pytest.mark.skipif(not forkserver.possible(), reason="needs Linux, where workers are forks")


def servers() -> list[psutil.Process]:
    """The fork servers below this process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process().children() if child.name() == NAME and is_alive(child)]
    return servers()  # one was gone before its name was read


@pytest.fixture(autouse=True)
def no_other_server() -> Iterator[None]:
    """None that another test has left, nor one that is still believed to run."""
    if (kept := interpreter.SPARES._server) is not None:
        kept.end()
    for server in servers():
        server.kill()
        server.wait(5)
    yield


@dataclass(frozen=True)
class Looking(Stages):
    """Workers that print what they see of their process, with a variable."""

    variables: Mapping[str, str] = field(default_factory=lambda: {**thread_variables(1), "GIVEN": "given"})

    def environment(self, index: int) -> Mapping[str, str]:
        return self.variables

    def open(self, name: str, emit: Emit) -> Worker:
        return Looker(name)


class Looker(Worker):
    """Prints what it sees."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        seen = {name: os.environ.get(name) for name in ("GIVEN", "SET", "GONE", "OPENBLAS_NUM_THREADS")}
        limits = resource.getrlimit(resource.RLIMIT_CORE)
        umask = os.umask(0)
        print(seen, os.getcwd(), limits, oct(umask), os.getppid(), os.getsid(0) == os.getpid(), sys.stdin.read())
        print(f"BLAS {blas_threads()} random {np.random.rand()} {time.tzname[0]}")


def blas_threads() -> int:
    """Threads of numpy's OpenBLAS."""
    import ctypes

    return int(ctypes.CDLL(np._core._multiarray_umath.__file__).scipy_openblas_get_num_threads64_())


def printed(workers: int, stages: Stages, items: int = 10) -> str:
    """What workers print while they echo some items."""
    feed = Feed([("echo", n) for n in range(items)], workers=workers)
    for event in Local(workers, import_path()).run(stages, feed):
        feed.on(event)
    assert sorted(feed.ended) == list(range(items))
    return "".join(event.text for event in feed.events if isinstance(event, Printed))


def test_a_fork_is_like_a_fresh_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's child in a session of its own, with the directory, variables, limits and mask the driver has now,
    and as many threads as it was given; the same server forks for the next run.
    """
    monkeypatch.setenv("GONE", "no")
    printed(1, Looking())
    server = servers()
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("SET", "yes")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o027)
    try:
        told = printed(1, Looking())
        assert len(servers()) == 1 and servers() != server  # another environment: another server
        again = printed(1, Looking(variables=thread_variables(2)))
    finally:
        os.umask(before)
    seen = "{'GIVEN': 'given', 'SET': 'yes', 'GONE': None, 'OPENBLAS_NUM_THREADS': '1'}"
    core = resource.getrlimit(resource.RLIMIT_CORE)
    assert f"{seen} {tmp_path} {core} 0o27 {os.getpid()} True \n" in told
    assert "BLAS 1 " in told and "JST" in told
    assert "BLAS 2 " in again


def test_the_same_server_for_the_next_run(tmp_path: Path) -> None:
    """As long as nothing of what a process is born with has changed; chance is another one in each worker."""
    first = printed(2, Looking(), 40)
    server = servers()
    second = printed(2, Looking(), 40)
    assert servers() == server and len(server) == 1
    draws = [line.split()[3] for line in (first + second).splitlines() if line.startswith("BLAS")]
    assert len(draws) >= 2 and len(set(draws)) == len(draws)


def key_and_address(_: int) -> tuple[str | None, str | None]:
    """What a worker would send, and where."""
    return os.environ.get("SOME_API_KEY"), os.environ.get("SOME_BASE_URL")


def test_keys_and_addresses_are_those_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library reads them on loading: workers are given the current ones, none that is gone, by the same server."""
    monkeypatch.setenv("SOME_API_KEY", "old")
    assert gm.map(key_and_address, [1]) == [("old", None)]
    server = servers()
    monkeypatch.setenv("SOME_API_KEY", "new")
    monkeypatch.setenv("SOME_BASE_URL", "http://127.0.0.1:1/v1")
    assert gm.map(key_and_address, [1]) == [("new", "http://127.0.0.1:1/v1")]
    monkeypatch.delenv("SOME_API_KEY")
    assert gm.map(key_and_address, [1]) == [(None, "http://127.0.0.1:1/v1")]
    assert servers() == server and len(server) == 1


def has_pandas(batch: dict) -> dict:
    """For each row, whether its process had imported pandas before the first call."""
    global _had  # noqa: PLW0603
    _had = "pandas" in sys.modules if _had is None else _had
    return {"had": [_had] * len(batch["id"])}


_had: bool | None = None


def test_many_forks_find_pandas_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow imports it when it is first given a list: three workers share it, and one does not wait for what it may
    never need.
    """
    pq.write_table(pa.table({"id": range(1_200_000)}), tmp_path / "rows.parquet", compression="none")
    assert (tmp_path / "rows.parquet").stat().st_size > SMALL
    monkeypatch.setenv("A_SERVER", "of this test's own")
    for workers in (1, 3):
        rows = gm.apply(str(tmp_path / "rows.parquet"), fn=has_pandas, workers=workers, limit=2)
        assert rows["had"].to_pylist() == [workers == 3] * 2


def test_later_runs_find_pandas_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of a process does not wait for it; the same server has it for the next, whatever the workers."""
    pq.write_table(pa.table({"id": range(2)}), tmp_path / "rows.parquet")
    monkeypatch.setenv("A_SERVER", "of this test's own, too")
    had = [gm.apply(str(tmp_path / "rows.parquet"), fn=has_pandas, workers=1)["had"].to_pylist() for _ in range(3)]
    assert had == [[False] * 2, [True] * 2, [True] * 2] and len(servers()) == 1


JOB = """
import sys
import gristmill as gm
from gristmill.engines import forkserver

begun = []
start = forkserver.ForkServer.__init__
forkserver.ForkServer.__init__ = lambda self, born, imports: (begun.append(imports), start(self, born, imports))[1]
"""
SKLEARN_JOB = """
gm.predict("rows.parquet", model="model.skops", features=["x"], keep=["x"], workers=1)
assert len(begun) == 1 and {"sklearn.base", "gristmill.models.skopsfile"} <= set(begun[0]), begun
"""
TORCH_JOB = """
import torch

class Model:
    def __init__(self):
        self.threads = torch.get_num_threads()

    def __call__(self, batch):
        return {"threads": [self.threads] * len(batch["x"])}

if __name__ == "__main__":
    rows = gm.apply("rows.parquet", fn=gm.model(Model), workers=1, threads=3).to_pylist()
    assert rows == [{"threads": 3}] * 2, rows
    assert len(begun) == 1 and "torch" in begun[0], begun
"""


@pytest.mark.parametrize("library", ["sklearn", "torch"])
@pytest.mark.few(1)
def test_forks_find_a_library_imported(library: str, tmp_path: Path) -> None:
    """scikit-learn is imported by one server, and sets variables: no reason for another one. Of torch, what a script
    imports above its model; forks use as many threads as they are given.
    """
    if library == "sklearn":
        skops_io = pytest.importorskip("skops.io")
        from sklearn.linear_model import LinearRegression

        skops_io.dump(LinearRegression().fit([[0.0], [1.0]], [0.0, 1.0]), tmp_path / "model.skops")
    else:
        pytest.importorskip("torch")
    pq.write_table(pa.table({"x": [0.5, 2.0]}), tmp_path / "rows.parquet")
    (tmp_path / "job.py").write_text(JOB + {"sklearn": SKLEARN_JOB, "torch": TORCH_JOB}[library])
    done = subprocess.run([sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_server_that_is_gone(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed or stopped between two runs: the next run has workers all the same, and no server is left stopped."""
    printed(1, Looking())
    (server,) = servers()
    monkeypatch.setattr(forkserver, "BORN", 1.0)
    server.send_signal({"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])
    if how == "killed":
        server.wait(5)
    printed(2, Looking(), 40)
    assert not is_alive(server)


def test_workers_outlive_their_server() -> None:
    """The server is killed in the middle of a run: nothing rests on it."""
    feed = Feed([("sleep", 0.5), ("echo", 1), ("sleep", 0.5), ("echo", 2)], workers=2)
    for event in Local(2, import_path()).run(Looking(), feed):
        feed.on(event)
        for server in servers():
            server.kill()
    assert len(feed.ended) == 4


def test_one_that_cannot_fork_is_not_asked_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that starts a thread in each interpreter: forks would lack it. Workers are fresh interpreters."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    spares = Spares()
    assert [spares.take(import_path(), {}) for _ in range(4)] == [None] * 4
    assert spares._failed == interpreter.TRIES
    assert "GIVEN" in printed(1, Looking())


@pytest.mark.parametrize("depth", [1, 2], ids=["on the way", "a worker"])
def test_one_that_is_stopped_as_it_is_forked_is_ended(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not yet asked to end with its driver, who does not know its number; those of before live on."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\ndepth, forks = 0, 0\n"
        "def before():\n    global forks\n    forks += depth == 0\n"
        "def born():\n    global depth\n    depth += 1\n"
        f"    if (depth, forks) == ({depth}, 2): os.kill(os.getpid(), signal.SIGSTOP)\n"
        "os.register_at_fork(before=before, after_in_child=born)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setattr(forkserver, "BORN", 1.0)
    before = {child.pid for child in below()}
    spares = Spares()
    first = spares.take(import_path(), {})
    assert isinstance(first, Child)
    assert spares.take(import_path(), {}) is None
    left = {child.pid for child in below()} - before
    assert left == {first.pid} and first.poll() is None
    first.kill()
    first.wait()
    for pipe in (first.stdin, first.stdout, first.stderr):
        pipe.close()


def test_a_child_ends_as_processes_do() -> None:
    """Exit codes and signals, waited for with and without a limit, by several threads at once."""
    spares = Spares()

    def child() -> Child:
        found = spares.take(import_path(), {})
        assert isinstance(found, Child)
        return found

    ended = child()
    with pytest.raises(subprocess.TimeoutExpired):
        ended.wait(0.1)
    assert ended.poll() is None
    ended.stdin.close()
    assert (ended.wait(10), ended.wait(), ended.poll()) == (0, 0, 0)
    ended.kill()  # nobody else's process
    killed = child()
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    for each in (ended, killed):
        with contextlib.suppress(OSError):
            each.stdin.close()
        each.stdout.close()
        each.stderr.close()


def test_forks_end_with_the_driver(tmp_path: Path) -> None:
    """A driver that is killed leaves neither workers nor their server."""
    code = (
        "import os, time, sys\nfrom gristmill.engines.interpreter import SPARES\n"
        "from gristmill.process.startup import import_path\n"
        "kept = [SPARES.take(import_path(), {}) for _ in range(2)]\nprint('started', flush=True)\ntime.sleep(60)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert driver.stdout is not None and driver.stdout.readline() == b"started\n"
    children = psutil.Process(driver.pid).children()
    assert len(children) == 3
    for child in children:
        child.suspend()  # what does not run cannot see that its pipe has closed
    driver.kill()
    driver.communicate()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not [p for p in alive if is_alive(p)]


@pytest.mark.few(2)
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("work", ["gm.map(abs, [-3]) == [3]", "gm.apply([{'x': 1}], fn=same).num_rows == 1"])
def test_a_fork_of_the_driver_while_workers_start(work: str, seconds: float) -> None:
    """A child that is forked while another thread imports what it needs, or waits for the server, has workers of its
    own.
    """
    code = (
        "import faulthandler, os, threading, time, gristmill as gm\n"
        "def same(batch): return {'y': batch['x']}\n"
        f"def works(): return {work}\n"
        "thread = threading.Thread(target=works); thread.start()\n"
        f"time.sleep({seconds})\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    faulthandler.dump_traceback_later(60, exit=True)\n"
        "    os._exit(not works())\n"
        "assert os.waitpid(child, 0)[1] == 0; thread.join()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=100)


def test_forks_of_a_module_that_runs_as_it_is_imported(tmp_path: Path) -> None:
    """They do not wait for its end."""
    (tmp_path / "service.py").write_text(
        "import os, threading, time, gristmill as gm\ngm.Job\n"
        "def forks():\n    begun = time.monotonic()\n    child = os.fork()\n    child or os._exit(0)\n"
        "    os.waitpid(child, 0); print(time.monotonic() - begun < 5)\n"
        "thread = threading.Thread(target=forks); thread.start(); thread.join()\n"
    )
    line = [sys.executable, "-W", "ignore", "-c", "import service"]
    ended = subprocess.run(line, check=True, timeout=60, capture_output=True, text=True, cwd=tmp_path)
    assert ended.stdout == "True\n"


def test_workers_of_a_driver_that_ignores_its_children_are_forks() -> None:
    """SIGCHLD that is ignored is inherited, by the server too, which has to wait for children."""
    code = (
        "import signal, gristmill as gm; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "print(*set(gm.map(lambda n: open('/proc/self/comm').read().strip(), range(4))))\n"
    )
    line = [sys.executable, "-W", "ignore", "-c", code]
    assert subprocess.run(line, check=True, timeout=60, capture_output=True, text=True).stdout == "gristmill-work\n"


def test_a_job_and_a_map(tmp_path: Path) -> None:
    """Functions of a script, in forks: rows and order as ever, by one server."""

    def plus(batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": batch["x"] + 1, "worker": [os.getpid()] * len(batch["x"])}

    table = pa.table({"x": list(range(5000))})
    gm.run(gm.Job(table, plus, tmp_path / "out", workers=2, shard_rows=100))
    found = gm.read(tmp_path / "out").to_table()
    assert found["y"].to_pylist() == list(range(1, 5001))
    assert os.getpid() not in found["worker"].to_pylist()
    assert gm.map(lambda n: n * 2, range(100)) == [n * 2 for n in range(100)]
    assert len(servers()) == 1


def pools(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What Arrow has had at most in mimalloc in this process."""
    peak = pa.mimalloc_memory_pool().max_memory()
    return {"mimalloc": np.full(len(batch["x"]), -1 if peak is None else peak)}


@pytest.mark.skipif(
    not {"mimalloc", "jemalloc"} <= {*pa.supported_memory_backends()} or "ARROW_DEFAULT_MEMORY_POOL" in os.environ,
    reason="Arrow has no choice of pools here",
)
def test_what_arrow_allocates_by_itself_is_in_the_chosen_pool(tmp_path: Path) -> None:
    """Pages of Parquet files as well as arrays, though the pool is set after Arrow was loaded."""
    pq.write_table(pa.table({"x": np.random.default_rng(0).random(100_000)}), tmp_path / "in.parquet")
    found = gm.run(gm.Job(str(tmp_path / "in.parquet"), pools, str(tmp_path / "out"), workers=1)).read()
    assert found.to_table()["mimalloc"].unique().to_pylist() == [0]

"""Fixtures that every test may use: the kit's models and data, and a watch over what a test leaves running."""

from __future__ import annotations

import compileall
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pyarrow as pa
import pytest

import kit
from children import below, is_kept
from llmserver import KEY, ChatServer

pytest_plugins = ("planned",)

# Before any library reads them: no hub is reachable, and a tokenizer's threads would mix with the workers'.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# A terminal's width and colours, or a developer's settings, must not change what a test sees.
for name in [name for name in os.environ if name.startswith("GRISTMILL_") and name != "GRISTMILL_KIT_CACHE"]:
    del os.environ[name]
os.environ.update(COLUMNS="120", NO_COLOR="1")
# Files of tests are in memory, where there is enough of it: each run of a job syncs some twenty files.
_MEMORY = Path("/dev/shm")
if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
# What runs remember (exported models, batch budgets) must not reach from one test session into the next.
_CACHE = tempfile.TemporaryDirectory(prefix="gristmill-tests-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
os.environ["GRISTMILL_CACHE"] = _CACHE.name
os.environ.pop("FORCE_COLOR", None)
# A module that a test writes twice within a second, as long as before, would be taken from its bytecode: only that of
# the sources is written, here, once, since tests start many interpreters, and that of the tests, as they are collected.
compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=1)
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
sys.dont_write_bytecode = False  # until all are collected

# How fast examples are made and run is the machine's affair, not what a property says. `make test` tries the same
# examples each time, so that a change is judged by what it changed; `make test-all` looks for new ones.
_PROFILE: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("same examples", derandomize=True, **_PROFILE)
hypothesis.settings.register_profile("new examples", derandomize=False, **_PROFILE)
hypothesis.settings.load_profile("same examples")

# A shell that starts tests in the background has them ignore interrupts, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GRACE_S = 5.0  # a worker that was told to stop may still be leaving


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run several at a time, a file stays in one process, and those that start Ray or Spark in the same.

    They are begun in the order of the collection (below), not those of most tests first. Not by xdist's marks: 3.8
    writes a group into an attribute of tests that pytest 9.2 no longer has, and scatters all.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "clusters" if "/engines/" in file else file

    config.option.loadscopereorder = False
    return ByFile(config, log)


# Folders of tests of which most take a few hundredths of a second; so do those in no folder.
_QUICK = {"arrow", "commit", "dynamic", "fingerprint", "job", "jobfile", "shards", "sinks", "sources", "worker"}


def _turn(folder: str) -> int:
    return 0 if folder == "engines" else 2 if folder in {"tests", *_QUICK} else 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `few(n)` all but n cases, spread over all of them, are `long`. Where tests run several at a
    time, the clusters come first and quick files last: a file of one long test would end long after all others.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        counts = Counter(item.path for item in items)
        items.sort(key=lambda item: (_turn(item.path.parent.name), -counts[item.path], item.path))
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        marker = same[0].get_closest_marker("few")
        assert marker is not None
        kept = {round(k * (len(same) - 1) / max(1, marker.args[0] - 1)) for k in range(marker.args[0])}
        for k, item in enumerate(same):
            if k not in kept:
                item.add_marker("long")


def pytest_collection_finish() -> None:
    """Thousands of collected tests are objects that every collection of garbage would visit, in tests as in the runs
    that they start in this process.
    """
    sys.dont_write_bytecode = True
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Some extension modules look at exit whether all that is theirs was collected."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2, fp32 safetensors, a sentence-transformers folder."""
    return kit.minilm()


@pytest.fixture(scope="session")
def minilm_onnx() -> Path:
    """The same model as fp32 ONNX."""
    return kit.minilm_onnx()


@pytest.fixture(scope="session")
def minilm_int8() -> Path:
    """The same model as int8 ONNX; needs no torch."""
    return kit.minilm_int8()


@pytest.fixture(scope="session")
def sentiment_classifier() -> Path:
    """A Hugging Face BertForSequenceClassification folder, labels fresh and rotten."""
    return kit.sentiment_classifier()


@pytest.fixture(scope="session")
def sentiment_classifier_onnx() -> Path:
    """The same classifier as ONNX with output `logits`."""
    return kit.sentiment_classifier_onnx()


@pytest.fixture(scope="session")
def reviews() -> pa.Table:
    """13,905 film reviews: review_id, text, category, movie_name."""
    return kit.reviews()


@pytest.fixture(scope="session")
def reviews_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reviews as four Parquet files in a folder that tests only read."""
    folder = tmp_path_factory.mktemp("reviews")
    kit.write_reviews(folder, files=4)
    return folder


@pytest.fixture(scope="session")
def docstrings() -> list[str]:
    """2,000 texts of very mixed length; `kit.docstrings(n)` has more."""
    return kit.docstrings(2_000)


@pytest.fixture(scope="session")
def flights() -> pa.Table:
    """336,776 flights, 19 columns, with nulls."""
    return kit.flights()


@pytest.fixture(scope="session")
def weed() -> Path:
    """The S3 server's binary."""
    return kit.weed()


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    """A server, its address and its key in the environment."""
    with ChatServer() as server:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        yield server


@pytest.fixture(autouse=True)
def leaves_no_children(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves child processes running, and ends them; `@pytest.mark.leaves_children` opts out.

    Processes of fixtures with a wider scope were there before and do not count.
    """
    if request.node.get_closest_marker("leaves_children"):
        yield
        return
    before = {child.pid for child in below()}
    yield
    deadline = time.monotonic() + GRACE_S
    while (left := _running_children(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        described = [f"{child.pid} ({' '.join(_command(child))[:200]})" for child in left]
        for child in left:
            _end(child)
        pytest.fail(f"child processes still running {GRACE_S:g} s after the test: " + "; ".join(described))


@pytest.fixture(autouse=True)
def forgets_its_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modules that a test imports from its folders, and these folders on the path, are gone after it: another test's
    `scoring.py` is another module.
    """
    modules, path, folders = set(sys.modules), set(sys.path), f"{tmp_path_factory.getbasetemp()}{os.sep}"
    yield
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folders):
            del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if entry in path or not entry.startswith(folders)]


def _running_children(before: set[int]) -> list[psutil.Process]:
    """Children that are new and alive; a zombie waits only for its parent, multiprocessing keeps its trackers, and a
    fork server is kept for the next run.
    """
    return [child for child in below() if child.pid not in before and _alive(child) and not is_kept(child)]


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() or [process.name()]
    except psutil.Error:
        return []


def _end(process: psutil.Process) -> None:
    try:
        process.kill()
        process.wait(GRACE_S)
    except psutil.Error:
        pass

"""Every engine of places.NAMES, started once a module; what the fault tests use; a watch over what workers leave."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from children import below, is_worker

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "faults")]  # imported by name, here and in workers


def _named(name: str) -> object:
    import places

    # Clusters keep idle processes between jobs; what gristmill's own workers leave is watched by `leaves_no_worker`.
    return name if name in places.OURS else pytest.param(name, marks=pytest.mark.leaves_children)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `place` runs on every engine, those of one engine together."""
    import places

    if "place" in metafunc.fixturenames:
        metafunc.parametrize("place", [_named(n) for n in places.NAMES], indirect=True, scope="module")


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest) -> Iterator[object]:
    """An engine that is there to be used (places.Place)."""
    import places

    with places.started(request.param) as running:
        yield running


@pytest.fixture(scope="session")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """200 rows in two Parquet files, which tests only read."""
    from victims import write_input

    return write_input(str(tmp_path_factory.mktemp("numbers")), 200)


@pytest.fixture(scope="session")
def wanted(numbers: str, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """What victims' row-wise answer is for `numbers`: scored without any worker or interruption."""
    import jobs

    import gristmill as gm

    root = str(tmp_path_factory.mktemp("wanted") / "out")
    jobs.run(numbers, root, "scored", workers=0)
    return gm.read(root).to_table()


@pytest.fixture(autouse=True)
def leaves_no_worker() -> Iterator[None]:
    """Fails a test after which a worker of ours still runs, whichever engine started it."""
    before = _workers()
    yield
    deadline = time.monotonic() + 10
    while (left := _workers() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"workers still running: {left}"


def _workers() -> set[int]:
    """Processes below this one that are workers of an engine."""
    return {process.pid for process in below() if is_worker(process)}

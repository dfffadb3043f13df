"""Modules that run a map or a job at their top level, unguarded: workers that import them start nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import gristmill as gm

MAPS = """
import gristmill as gm

class Point:
    def __init__(self, x): self.x = x

def tripled(x): return Point(3 * x)

print("importing")
found = [point.x for point in gm.map(tripled, [1, 2, 3])]

def added(x): return helped(x) + 1
def helped(x): return 10 * x
"""
JOB = """
import gristmill as gm

def doubled(batch): return {"y": batch["x"] * 2}

rows = gm.apply([{"x": n} for n in range(100)], fn=doubled).num_rows
"""
DETACHED = """
import gristmill as gm

def doubled(x): return 2 * x

handle = gm.remote_parallel_map(doubled, [1, 2], detach=True)
"""
MAIN = """
import gristmill as gm
import maps, jobs, detached
print(maps.found, jobs.rows, list(detached.handle), gm.map(maps.added, [1, 2]), gm.map(maps.tripled, [5])[0].x)
"""
MOST = 12  # processes at once: two workers of a map or job, what serves them, and what was there before


def ran(folder: Path, *arguments: str, seconds: float = 120) -> tuple[int, str, str, int]:
    """Runs Python there: exit code, stdout, stderr, and the most processes below it at any time. Ends them all."""
    popen = subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process, most, seen = psutil.Process(popen.pid), 0, set()
    until = time.monotonic() + seconds
    try:
        while popen.poll() is None and most <= 3 * MOST and time.monotonic() < until:
            try:
                below = process.children(recursive=True)
            except psutil.NoSuchProcess:
                break
            seen |= set(below)
            most = max(most, len(below))
            time.sleep(0.02)
    finally:
        popen.kill() if popen.poll() is None else None
        for child in seen:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
    out, err = popen.communicate(timeout=30)
    return popen.returncode, out, err, most


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Modules that start something when they are imported, and rows."""
    for name, text in (("maps", MAPS), ("jobs", JOB), ("detached", DETACHED)):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"x": {n}}}\n' for n in range(50)))
    return tmp_path


@pytest.mark.long
def test_fault_62_functions_of_a_module_that_maps_at_its_top_level(folder: Path) -> None:
    """They reach the workers as those of a script do; the module is imported once, here; no process too many."""
    (folder / "main.py").write_text(MAIN)
    code, out, err, most = ran(folder, "main.py")
    assert (code, out) == (0, "importing\n[3, 6, 9] 100 [2, 4] [11, 21] 15\n"), err
    assert err == "" and most <= MOST


@pytest.mark.long
def test_fault_62_a_worker_that_has_to_import_it_says_so_once(folder: Path) -> None:
    """Its function was named by a text: exit 2, and one line that names the line and the way out."""
    code, _, err, most = ran(folder, "-m", "gristmill", "apply", "rows.jsonl", "out", "--fn", "jobs:doubled")
    said = [line for line in err.splitlines() if "is started when module jobs is imported" in line]
    assert code == 2 and len(said) == 1, err
    assert "jobs.py, line 6: a job" in said[0] and 'if __name__ == "__main__":' in said[0] and "Traceback" not in err
    assert most <= MOST
    line = "import gristmill as gm; gm.map(lambda x: __import__('maps').added(x), [1, 2])"
    code, _, err, most = ran(folder, "-c", line)
    assert code == 1 and "BadJob" in err and "maps.py, line 10: a map" in err and most <= MOST


def test_fault_62_an_input_whose_module_maps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module whose import here was spared the map: its inputs fail with the line, and nothing else is started."""
    (folder / "things.py").write_text(
        "import os, gristmill as gm\nclass Thing: pass\nif 'SPARED' not in os.environ:\n    gm.map(len, ['a'])\n"
    )
    monkeypatch.setenv("SPARED", "1")
    main = "import os, gristmill as gm, things\ndel os.environ['SPARED']\n"
    main += "found = gm.map(lambda x: 1, [things.Thing(), 2], return_exceptions=True)\nprint(found[1], found[0])\n"
    code, out, err, most = ran(folder, "-c", main)
    assert code == 0 and out.startswith("1 ") and "things.py, line 4: a map" in out and most <= MOST, err


def test_nested_maps_and_jobs_at_run_time_go_on(folder: Path) -> None:
    """Inside of a call a map is nothing unusual, also of functions of modules that are imported there."""

    def outer(n: int) -> list[int]:
        import gristmill as gm

        return gm.map(abs, [n, -n])

    assert gm.map(outer, [1, 2], max_parallelism=1) == [[1, 1], [2, 2]]


CACHED = """
import functools, sys
import gristmill as gm

@functools.lru_cache(maxsize=3)
def model(): return 2

@functools.cache
def summed(n): return n if n < 2 else n + summed(n - 1)

class Scorer:
    @functools.cached_property
    def third(self): return 3

    @functools.cache
    def fourth(self): return 4

    def __call__(self, batch): return {"y": batch["x"] * model() * self.third * self.fourth()}

class Asks:
    def __getattr__(self, name): return getattr(self.inner, name)

class Holds(Asks):
    def __init__(self): self.inner = "x"

held = Holds()

def asks(batch): return {"y": [held.upper() for _ in batch["x"]]}

if __name__ == "__main__":
    rows = [{"x": 1.0}, {"x": 2.0}]
    print(list(gm.map(lambda x: x * model() + summed(x), [1, 2, 3])))
    print([row["y"] for row in gm.apply(rows, fn=Scorer, workers=1).to_pylist()])
    print(gm.apply(rows, fn=asks, workers=0).to_pydict())
    gm.apply(rows, fn=asks, workers=1)
"""


@pytest.mark.long
def test_cached_functions_of_a_script_reach_workers(tmp_path: Path) -> None:
    """Those under `functools.cache` and the like as any other; what cannot be made anew there is told so."""
    (tmp_path / "script.py").write_text(CACHED)
    code, out, err, _ = ran(tmp_path, "script.py")
    assert out == "[3, 7, 12]\n[24.0, 48.0]\n{'y': ['X', 'X']}\n", err
    assert code == 1 and "RecursionError" in err and "put it in a module of its own (a .py file)" in err

"""Threads that work for a caller, also once the main thread has ended, when Python's own pools take no more work."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest

from gristmill.process.pool import Pool

JOB = """
import os, sqlite3, threading
import gristmill as gm
with sqlite3.connect("in.db") as base:
    base.execute("create table t (x integer)")
    base.executemany("insert into t values (?)", [(i,) for i in range(500)])
base.close()
def double(batch):
    return {"y": batch["x"] * 2}
def late():
    threading.main_thread().join()
    source = f"sqlite:///{os.path.abspath('in.db')}#t"
    report = gm.apply(source, "out/", fn=double, workers=1)
    print(sum(report.read().to_table()["y"].to_pylist()))
threading.Thread(target=late).start()
"""

OTHERS = """
import threading
from concurrent.futures import wait
%s
class Frame:  # of a library that converts in threads
    def __arrow_c_stream__(self, schema=None):
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(int, "7").result()
def late():
    threading.main_thread().join()
    import gristmill as gm
    try:
        gm.apply(Frame(), fn=lambda batch: batch)
    except gm.RunFailed as e:
        print(e)
threading.Thread(target=late, name="night").start()
"""


def ran(script: str, folder: Path) -> str:
    """What a script in a process of its own prints; its errors if it prints nothing."""
    (folder / "late.py").write_text(script)
    command = [sys.executable, "late.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout or done.stderr


def test_a_job_after_the_end_of_the_main_thread(tmp_path: Path) -> None:
    """A thread that the program does not wait for runs its job, whose source is copied by threads of a pool."""
    told = ran(JOB, tmp_path)
    if sys.version_info[:2] == (3, 12):  # which starts no threads then
        assert "let the main thread wait" in told, told
    else:
        assert told == f"{sum(range(500)) * 2}\n"


@pytest.mark.parametrize(("early", "way"), [("import gristmill", "then on: let"), ("", "import gristmill in the main")])
def test_pools_of_others_after_the_end_of_the_main_thread(tmp_path: Path, early: str, way: str) -> None:
    """What Python refuses a library then is told as what it is, with the way out."""
    told = ran(OTHERS % early, tmp_path)
    assert "in thread 'night'" in told and "main thread has ended" in told and way in told, told


def test_the_order_of_results_and_an_error() -> None:
    """Results come in the order of the items, an error where its item stands; what has not begun then is dropped."""
    done: list[int] = []

    def work(item: int) -> int:
        done.append(item)
        if item == 3:
            raise ValueError("three")
        return item * item

    with Pool(4) as pool:
        assert list(pool.map(work, (0, 1, 2))) == [0, 1, 4]
    with pytest.raises(ValueError, match="three"), Pool(1) as pool:
        list(pool.map(work, range(3, 1000)))
    assert len(done) < 1000
    assert not [thread for thread in threading.enumerate() if thread.name == "gristmill-pool"]


def test_as_many_at_once_as_it_may() -> None:
    """Never more threads than it was given, and as many where there is work for them."""
    meeting, at_once = threading.Barrier(3), [0, 0]
    lock = threading.Lock()

    def work(_: int) -> None:
        with lock:
            at_once[0] += 1
            at_once[1] = max(at_once)
        meeting.wait(10)
        with lock:
            at_once[0] -= 1

    with Pool(3) as pool:
        list(pool.map(work, range(9)))
    assert at_once == [0, 3]


def test_nobody_waits_for_a_pool_that_is_dropped() -> None:
    """A pool that nobody closes has no thread once its work is done."""
    pool = Pool(2, "gristmill-dropped")
    assert [each.result(10) for each in [pool.submit(str, n) for n in range(5)]] == list("01234")
    for thread in threading.enumerate():
        if thread.name == "gristmill-dropped":
            thread.join(10)
            assert not thread.is_alive()


def test_what_is_dropped_is_over() -> None:
    """Whoever waits for all that was given hears of what never began, too: a copy of a store hung for ever."""
    with Pool(2) as pool:
        begun = [pool.submit(threading.Event().wait, 0.2) for _ in range(6)]
        pool.cancel()
        assert not wait(begun, timeout=10).not_done
        assert [each.cancelled() for each in begun].count(True) >= 4

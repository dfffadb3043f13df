"""Requests that are asked once: by one of many workers, also where workers die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.commit import once as onces
from gristmill.commit.once import MINE, WAIT, Once

STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["claim", "put", "refuse", "release", "die", "forget"])), max_size=30
)


@given(steps=STEPS)
def test_one_asks_at_a_time_and_nobody_again(tmp_path_factory: Any, steps: list[tuple[int, str]]) -> None:
    """Whatever workers do and whoever of them dies: an answer is the first one, and is everyone's."""
    folder = str(tmp_path_factory.mktemp("once"))
    workers = [Once(folder, "r") for _ in range(3)]
    asking: set[int] = set()
    answer: tuple[str, Any] | None = None
    for n, what in steps:
        worker = workers[n]
        if what == "claim":
            told = worker.claim(b"x")
            assert told == (answer if answer is not None else (WAIT if asking else MINE, None))
            asking |= {n} if told[0] == MINE else set()
        elif what in ("put", "refuse") and n in asking:
            worker.put(b"x", {"n": n}, refused=what == "refuse")
            answer, asking = ("answer" if what == "put" else "refused", {"n": n}), set()
        elif what == "release" and n in asking:
            worker.release(b"x")
            asking = set()
        elif what == "forget":
            worker.forget([b"x"])
        elif what == "die":
            worker.close()
            workers[n] = Once(folder, "r")
            asking -= {n}
        assert workers[0].known(b"x") == (answer is not None and answer[0] == "answer")
    for worker in workers:
        worker.close()
    assert not list(Path(folder).glob("*.lock"))


def test_another_run_asks_again_what_was_refused_or_forgotten(tmp_path: Path) -> None:
    """And keeps what was answered."""
    first, other = Once(str(tmp_path), "a"), Once(str(tmp_path), "b")
    for request, refused in ((b"fits", False), (b"refused", True), (b"unfit", False)):
        assert first.claim(request)[0] == MINE
        first.put(request, {"of": "a"}, refused=refused)
    first.forget([b"unfit"])
    assert [first.claim(r)[0] for r in (b"fits", b"refused", b"unfit")] == ["answer", "refused", "answer"]
    assert [other.claim(r)[0] for r in (b"fits", b"refused", b"unfit")] == ["answer", MINE, MINE]
    other.put(b"unfit", {"of": "b"})
    assert first.claim(b"unfit") == other.claim(b"unfit") == ("answer", {"of": "b"})


def test_a_killed_worker_s_claims_lapse(tmp_path: Path) -> None:
    """At once; those of one that is stopped do not, unless it is very late."""
    code = "import sys, time; from gristmill.commit.once import Once; o = Once(sys.argv[1], 'r')\n"
    code += "print(o.claim(b'x')[0], flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline().strip() == MINE
        mine = Once(str(tmp_path), "r")
        other.send_signal(signal.SIGSTOP)
        assert mine.claim(b"x") == (WAIT, None)
        other.kill()
        other.wait()
        assert mine.claim(b"x") == (MINE, None)


def test_what_takes_too_long_is_asked_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose answer stays, if it is first."""
    first, other = Once(str(tmp_path), "r"), Once(str(tmp_path), "r")
    assert first.claim(b"x")[0] == MINE and other.claim(b"x")[0] == WAIT
    monkeypatch.setattr(onces, "LATE", -1.0)
    assert other.claim(b"x")[0] == MINE
    other.put(b"x", {"of": 2})
    first.put(b"x", {"of": 1})
    assert first.claim(b"x") == ("answer", {"of": 2})


def test_many_open_a_new_file_at_once(tmp_path: Path) -> None:
    """None of them is refused as the others are making it: all agree on who asks."""
    for turn in range(100):
        together, mine = threading.Barrier(8), []

        def work(folder: Path, together: threading.Barrier, mine: list[str]) -> None:
            together.wait()
            once = Once(str(folder), "r")
            mine.append(once.claim(b"a")[0])
            together.wait()
            once.close()

        threads = [threading.Thread(target=work, args=(tmp_path / str(turn), together, mine)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(mine) == ["mine", *["wait"] * 7]


def test_many_threads_of_many(tmp_path: Path) -> None:
    """One of them asks for each."""
    asked: list[int] = []

    def work() -> None:
        once = Once(str(tmp_path), "r")
        for n in range(50):
            while (told := once.claim(bytes([n])))[0] == WAIT:
                pass
            if told[0] == MINE:
                asked.append(n)
                once.put(bytes([n]), {"n": n})
        once.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(asked) == list(range(50))


def test_a_file_that_cannot_be_used_stops_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said once."""
    (tmp_path / "file").touch()
    once = Once(os.path.join(tmp_path, "file", "once"), "r")
    assert [once.claim(b"x")[0] for _ in range(3)] == [MINE] * 3
    once.put(b"x", {})
    once.close()
    assert capsys.readouterr().err.count("asked once a worker") == 1

"""What becomes of prints, of values that cannot travel, and of a generator that is left, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import called
import pytest

import gristmill as gm


def ran(tmp_path: Path, text: str, stderr: int = subprocess.PIPE, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own."""
    path = tmp_path / "script.py"
    path.write_text(text)
    return subprocess.run(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, **variables},
    )


def test_a_generator_that_is_left_open_does_not_keep_the_interpreter(tmp_path: Path) -> None:
    """A script that takes one of many results and ends, ends."""
    done = ran(
        tmp_path,
        "import gristmill\ndef f(x): return x\n"
        "g = gristmill.remote_parallel_map(f, range(1000), generator=True)\nprint(next(g))\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().isdigit()


@pytest.mark.parametrize("how", ["terminated", "forked", "pooled"])
def test_calls_can_end_their_children(how: str) -> None:
    """A worker does not heed SIGTERM, but processes that a call starts do, however they are started."""
    assert gm.map(getattr(called, how), [1, 2], timeout=30) in ([-15, -15], [[1, 2], [1, 2]])


def test_prints_without_a_stdout_are_nothing(tmp_path: Path) -> None:
    """In a daemon that has closed its streams, which Python gives as None, a map whose calls print has its results."""
    done = ran(
        tmp_path,
        "import gristmill, sys\ndef f(x):\n    print('line', x); print('aside', x, file=sys.stderr); return x + 1\n"
        "sys.stdout = sys.stderr = None\n"
        "open('found', 'w').write(str(gristmill.map(f, [1, 2])))\n",
    )
    assert (done.returncode, (tmp_path / "found").read_text()) == (0, "[2, 3]")


def test_no_print_is_lost(tmp_path: Path) -> None:
    """Hundreds of kilobytes of prints arrive whole on stdout; what was written to stderr arrives on stderr."""
    done = ran(
        tmp_path,
        "import gristmill, sys\ndef f(x):\n    for i in range(3000): print('line', x, i, '.' * 40)\n"
        "    print('aside', x, file=sys.stderr)\n"
        "gristmill.remote_parallel_map(f, [1, 2, 3])\n",
    )
    lines = done.stdout.splitlines()
    assert sorted(lines) == sorted(f"line {x} {i} {'.' * 40}" for x in (1, 2, 3) for i in range(3000))
    assert sorted(done.stderr.split()) == ["1", "2", "3", "aside", "aside", "aside"]


def test_bytes_are_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    """What calls write to sys.stdout.buffer comes as text, in order with what they print."""
    gm.map(called.prints_bytes, [1])
    assert capsys.readouterr().out == "text bytes\na line\n\xe9 \\xff\nwrapped\nend \\xc3"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_print_that_cannot_be_encoded_ends_nothing(tmp_path: Path, encoding: str) -> None:
    """It is written with backslashes; what can be encoded stays as it is."""
    done = ran(
        tmp_path,
        "import gristmill\ndef f(x):\n    print('plain')\n    print('\\xe9 a\\udc80b')\n    return x\n"
        "print(gristmill.map(f, [1]))\n",
        PYTHONIOENCODING=encoding,
    )
    assert done.returncode == 0, done.stderr
    accent = "\\xe9" if encoding == "ascii" else "\xe9"
    assert done.stdout.splitlines() == ["plain", f"{accent} a\\udc80b", "[1]"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_the_progress_line_leaves_stdout_alone(tmp_path: Path) -> None:
    """With stderr a terminal and stdout a pipe, what the caller prints while the line is shown goes to the pipe."""
    ours, theirs = os.openpty()
    reading = threading.Thread(target=_drain, args=(ours,), daemon=True)
    reading.start()
    done = ran(
        tmp_path,
        "import gristmill, time\ndef f(x):\n    time.sleep(0.4)\n    return x\n"
        "for r in gristmill.remote_parallel_map(f, range(6), generator=True): print('data', r)\n",
        theirs,
    )
    os.close(theirs)
    os.close(ours)
    assert sorted(done.stdout.splitlines()) == [f"data {i}" for i in range(6)]


def _drain(end: int) -> None:
    try:
        while os.read(end, 4096):
            pass
    except OSError:
        return


@pytest.mark.parametrize(("bad", "kind"), [(threading.Lock(), TypeError), (called.Unreadable(), ValueError)])
def test_an_input_that_cannot_travel_fails_alone(bad: Any, kind: type[Exception]) -> None:
    """With its own index, while the others have their results."""
    inputs = [0, 1, 2, bad, 4, *range(5, 200)]
    found = gm.map(called.kept_alone, inputs, return_exceptions=True)
    assert isinstance(found[3], kind)
    assert found[3].__notes__[0].startswith("input 3:")
    assert found[:3] + found[4:] == [n for n in range(200) if n != 3]


@pytest.mark.parametrize("inputs", [list, iter])
def test_an_input_without_a_digest_fails_alone(inputs: Any, tmp_path: Path) -> None:
    """With a checkpoint, which keeps the others."""
    for _ in range(2):
        found = gm.map(
            called.kept_alone, inputs([0, threading.Lock(), 2]), return_exceptions=True, checkpoint=str(tmp_path)
        )
        assert isinstance(found[1], TypeError) and found[1].__notes__[0].startswith("input 1: <unlocked")
        assert found[::2] == [0, 2]


def test_an_input_of_a_detached_map_that_cannot_travel_fails_alone() -> None:
    """With its own index and looks; a function that cannot leaves nothing behind."""
    handle = gm.map(called.kept_alone, [0, threading.Lock(), 2], return_exceptions=True, detach=True)
    found = handle.results(timeout=30)
    assert isinstance(found[1], TypeError) and "lock" in str(found[1])
    assert found[1].__notes__[0].startswith("input 1: <unlocked")
    assert found[::2] == [0, 2]
    lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        gm.map(lambda x: (x, lock), [1], detach=True)
    assert [p.name for p in handle.folder.parent.iterdir()] == [handle.id]


def test_a_detached_map_names_the_inputs_that_fail() -> None:
    """By their looks, as the map itself does; also what its driver cannot read is told."""
    failing = gm.map(called.raises, [0, 1], detach=True)
    dying = gm.map(called.dies, [(0, [2]), (2, [2])], detach=True)
    unread = gm.map(called.kept_alone, [called.Unreadable()], detach=True)
    with pytest.raises(KeyError, match="one") as caught:
        failing.results(timeout=30)
    assert caught.value.__notes__ == ["input 1: 1"]
    with pytest.raises(gm.WorkerLost, match=r"input 1 \(\(2, \[2\]\)\)"):
        dying.results(timeout=30)
    with pytest.raises(gm.RunFailed, match="ValueError: invalid literal"):
        unread.results(timeout=30)


def test_a_result_that_cannot_be_read_here_fails_alone() -> None:
    """As one that cannot be pickled."""
    found = gm.map(called.unreadable, range(100), return_exceptions=True)
    assert isinstance(found[7], ValueError)
    assert found[:7] + found[8:] == [n for n in range(100) if n != 7]


def test_an_exception_with_an_init_of_its_own_keeps_its_type() -> None:
    """One that pickle alone could not make again comes back as itself, with its attributes."""
    with pytest.raises(called.OwnError, match="2: two") as caught:
        gm.remote_parallel_map(called.raises, [2])
    assert caught.value.code == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("how", "code"), [("raises", 1), ("exits", 3), ("returns", 0)])
def test_a_forked_child_of_a_call_is_not_the_worker(how: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    """It ends with its own exit code and traceback, and prints to stderr; the results are those of the worker."""
    assert gm.map(called.forks, [(1, how), (2, how)], max_parallelism=1, timeout=20) == [(1, code), (2, code)]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("printed by the child") == 2
    assert err.count("RuntimeError: raised by the child") == (2 if how == "raises" else 0)


@pytest.mark.few(1)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("leaves", ["sys.exit(5)", "found.close(); sys.exit(5)", "del found; sys.exit(5)"])
def test_a_fork_of_the_caller_leaves_its_maps_alone(tmp_path: Path, leaves: str) -> None:
    """It ends as any process, and takes neither the workers nor the files of a map that is open."""
    done = ran(
        tmp_path,
        "import gristmill, os, signal, sys, time\n"
        "def f(x):\n    time.sleep(0.01)\n    return x, bytes(2_000_000), os.getpid()\n"
        f"found = gristmill.remote_parallel_map(f, range(30), generator=True, checkpoint={str(tmp_path / 'kept')!r})\n"
        "pids = {next(found)[2]}\n"
        "child = os.fork()\n"
        f"if child == 0:\n    signal.alarm(5)\n    {leaves}\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "rest = [pid for _, _, pid in found]\n"
        "print(len(rest), len(pids.union(rest)) <= (os.cpu_count() or 1))\n",
    )
    assert done.stdout.split() == ["5", "29", "True"], done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_map_does_not_go_on_in_a_fork(tmp_path: Path) -> None:
    """The next result is the process's that began it."""
    done = ran(
        tmp_path,
        "import gristmill, os, signal\n"
        "found = gristmill.remote_parallel_map(abs, range(9), generator=True, spinner=False)\n"
        "next(found)\n"
        "child = os.fork()\n"
        "if child == 0:\n    signal.alarm(5)\n    next(found)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(list(found)))\n",
    )
    assert done.stdout.split() == ["1", "8"], done.stderr
    assert "RunFailed" in done.stderr

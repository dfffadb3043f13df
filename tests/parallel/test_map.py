"""`gristmill.remote_parallel_map` and `gristmill.map` as a person uses them, with real processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import called
import numpy as np
import pytest

import gristmill as gm
from gristmill.parallel import placing
from gristmill.parallel.checkpoint import Kept
from gristmill.process import machine

HERE = Path(__file__).parent


class Adder:
    """A callable object, and a bound method."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, x: int) -> int:
        return x + self.n

    def add(self, x: int) -> int:
        return x + self.n


def run_script(
    text: str, *arguments: str, stdin: bool = False, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, from a file's text or from standard input."""
    line = [sys.executable, "-" if stdin else "-c", *([] if stdin else [text]), *arguments]
    return subprocess.run(line, input=text if stdin else None, capture_output=True, text=True, timeout=timeout)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """TimeoutError in the main thread if the body takes longer."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------- results


def test_results_of_every_input() -> None:
    """A list in order of completion; in the inputs' order where asked for; nothing for nothing."""
    assert sorted(gm.remote_parallel_map(called.double, range(2000))) == [2 * x for x in range(2000)]
    assert gm.remote_parallel_map(called.double, range(2000), ordered=True) == [2 * x for x in range(2000)]
    assert gm.map(called.double, ["a", "b"]) == ["aa", "bb"]
    assert gm.remote_parallel_map(called.double, []) == []
    assert list(gm.remote_parallel_map(called.double, [], generator=True)) == []
    assert gm.map(called.double, iter([])) == []


def test_tuples_are_arguments_and_lists_are_one() -> None:
    """A tuple is unpacked; a list, a dict and None are one argument."""
    assert gm.map(lambda a, b: a - b, [(5, 3), (1, 1)]) == [2, 0]
    assert gm.map(lambda x: x, [[1, 2], {"a": 1}, None, (7,)]) == [[1, 2], {"a": 1}, None, 7]


def test_any_callable() -> None:
    """Lambdas, closures, partials, bound methods, callable objects, builtins."""
    n = 10
    assert gm.map(lambda x: x + n, [1]) == [11]
    assert gm.map(functools.partial(pow, 2), [3]) == [8]
    assert gm.map(Adder(5), [1]) == gm.map(Adder(5).add, [1]) == [6]
    assert gm.map(len, [["a"], "xyz"]) == [1, 3]


def test_what_cannot_be_called_is_told() -> None:
    """A value that is no function, an async function, options out of range: told by name at once."""

    async def later(x: int) -> int:
        return x

    cases: list[tuple[Any, dict[str, Any], str]] = [
        (3, {}, "3 cannot be called"),
        (later, {}, "later is async"),
        (called.double, {"retries": -1}, "retries is -1"),
        (called.double, {"timeout": 0}, "timeout is 0"),
        (called.double, {"timeout": math.nan}, "timeout is nan"),
        (called.double, {"func_cpu": 0}, "func_cpu is 0"),
        (called.double, {"max_parallelism": 0}, "max_parallelism is 0"),
        (called.double, {"engine": "dask"}, "engine 'dask'"),
        (called.double, {"func_gpu": "A100"}, "func_gpu='A100': this machine shows no GPU"),
        (called.double, {"func_gpu": "Q9"}, "func_gpu='Q9': no type of GPU that is known here"),
        (called.double, {"func_gpu": 2}, "func_gpu is 2: give one type of GPU, such as 'A100', or 0 for none"),
    ]
    for function, options, says in cases:
        if "func_gpu" in options and os.path.exists("/proc/driver/nvidia"):
            continue
        with pytest.raises(gm.BadJob, match=says):
            gm.remote_parallel_map(function, [1], **options)
    assert placing.Request(gpu=0) == placing.Request()  # as other libraries spell that there is none
    assert gm.remote_parallel_map(called.double, [1], func_gpu=0) == [2]
    with pytest.raises(gm.BadJob, match="inputs is int"):
        gm.remote_parallel_map(called.double, 5)  # type: ignore[arg-type]


def test_a_generator_streams_in_order_of_completion() -> None:
    """What is ready first comes first, long before the rest is done."""
    begun = time.monotonic()
    found = gm.remote_parallel_map(called.slow, [8.0, 0.01, 0.02], generator=True, max_parallelism=2)
    assert next(found) == 0.01
    assert time.monotonic() - begun < 7.5
    assert next(found) == 0.02
    found.close()


def test_large_inputs_and_results() -> None:
    """Arrays of some megabytes go both ways, through files that are gone afterwards."""
    arrays = [np.full(1_000_000, i, dtype=np.float64) for i in range(4)]
    for i, result in enumerate(gm.map(called.double, arrays)):
        assert result[0] == 2 * i and len(result) == 1_000_000


def test_function_attributes_live_as_long_as_the_worker() -> None:
    """A model kept on the function is loaded once a worker, not once a call."""
    found = gm.map(called.kept, range(500), max_parallelism=2)
    assert {loads for _, loads in found} == {1}
    assert 1 <= len({pid for pid, _ in found}) <= 2


# ---------------------------------------------------------------- failures


def test_exceptions_come_back_as_their_own_type() -> None:
    """With the worker's traceback as the cause, and a note with the input's index."""
    with pytest.raises(KeyError, match="one") as raised:
        gm.map(called.raises, [0, 1])
    assert "in raises" in str(raised.value.__cause__)
    assert raised.value.__notes__ == ["input 1: 1"] and raised.value.input_index == 1  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Nothing can be set on it."""

    code: int


def refuses(code: int) -> None:
    """Raises one of those."""
    raise Frozen(code)


def test_exceptions_that_are_frozen() -> None:
    """They come back as they are, with cause, note and index, although nothing can be set on them."""
    (found,) = gm.map(refuses, [7], return_exceptions=True)
    assert found == Frozen(7) and found.input_index == 0 and found.__notes__ == ["input 0: 7"]
    assert "in refuses" in str(found.__cause__)


@pytest.mark.parametrize(("number", "says"), [(3, "SystemExit"), (4, "ValueError")])
def test_exceptions_that_cannot_travel_come_as_text(number: int, says: str) -> None:
    """One that would end the caller, one that holds a lock: RemoteError."""
    with pytest.raises(gm.RemoteError, match=says) as raised:
        gm.map(called.raises, [number])
    assert "in raises" in str(raised.value.__cause__)


def test_results_that_plain_pickle_refuses() -> None:
    """A lambda comes back; a lock is that input's failure, the others have their results."""
    (made,) = gm.map(called.raises, [5])
    assert made() == 5
    first, second, third = gm.map(called.raises, [0, 6, 7], return_exceptions=True)
    assert (first, third) == (0, 7)
    assert isinstance(second, TypeError) and "cannot be pickled" in str(second)


def test_return_exceptions() -> None:
    """Exceptions stand where the results would."""
    found = gm.map(called.raises, [0, 1, 2], return_exceptions=True)
    assert found[0] == 0 and isinstance(found[1], KeyError) and isinstance(found[2], called.OwnError)


@pytest.mark.parametrize("how", ["kill", "segfault", "exit"])
def test_a_worker_that_dies(how: str, tmp_path: Path) -> None:
    """Only the input that killed it fails, with its index, after all the others have finished."""
    function = functools.partial(called.dies, bad=[37], how=how)
    found = []
    with pytest.raises(gm.WorkerLost, match=r"input 37 \(37\)") as raised:
        for value in gm.remote_parallel_map(function, range(100), generator=True):
            found.append(value)
    assert sorted(found) == [x for x in range(100) if x != 37]
    assert raised.value.__notes__[0] == "input 37: 37" and raised.value.input_index == 37  # type: ignore[attr-defined]
    values = gm.map(function, range(100), return_exceptions=True, retries=1)
    assert isinstance(values[37], gm.WorkerLost) and values[37].input_index == 37


def test_retries(tmp_path: Path) -> None:
    """An input that fails twice succeeds with two retries, and not with one."""
    function = functools.partial(called.fails_until, folder=str(tmp_path), times=2)
    assert gm.map(function, [1, 2, 3], retries=2) == [1, 2, 3]
    with pytest.raises(ConnectionError, match="try 1"):
        gm.map(function, [4], retries=1)


def test_large_values_of_a_killed_caller_are_swept_away() -> None:
    """By the next map, which leaves alone those of callers that live."""
    text = (
        "import sys, time, called, numpy, gristmill as gm\n"
        "for a in gm.map(called.slowly, [numpy.ones(1 << 18)] * 400, generator=True):\n"
        "    print('result', flush=True)\n"
    )
    callers = [subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, cwd=HERE) for _ in range(2)]
    for caller in callers:
        assert caller.stdout is not None and caller.stdout.readline()
    folders = {c.pid: folder_of(c.pid) for c in callers}
    try:
        callers[0].kill()
        callers[0].communicate()
        assert os.listdir(folders[callers[0].pid])
        assert gm.map(called.double, [np.ones(1 << 18)])[0].sum() == 1 << 19
        assert not os.path.exists(folders[callers[0].pid])
        assert os.path.exists(folders[callers[1].pid])
    finally:
        callers[1].terminate()
        callers[1].communicate()
        gm.map(called.double, [1])


def folder_of(pid: int) -> str:
    """Where a caller's large values are: the folder whose lock it holds."""
    held = [os.path.realpath(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    (lock,) = [path for path in held if "/gristmill-map-" in path and path.endswith("/lock")]
    return os.path.dirname(lock)


def test_timeout(capfd: pytest.CaptureFixture[str]) -> None:
    """A call over its time is CallTimeout (a TimeoutError), soon, which tells where it was; the others keep their
    results, and nothing is printed.
    """
    begun = time.monotonic()
    found = gm.map(called.slow, [0.01, 60.0, 0.02], timeout=0.5, return_exceptions=True)
    assert time.monotonic() - begun < 20
    assert found[::2] == [0.01, 0.02]
    assert isinstance(found[1], gm.CallTimeout) and isinstance(found[1], TimeoutError)
    assert re.search(r"input 1 \(60\.0\): .* timeout: .*called\.py.*, line \d+ in slow$", str(found[1]))
    assert "calling.py" not in str(found[1].__cause__) and " in slow" in str(found[1].__cause__)
    (bare,) = gm.map(time.sleep, [60.0], timeout=0.5, return_exceptions=True)
    assert isinstance(bare, gm.CallTimeout)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("how", ["none", "closed", "timer"])
@pytest.mark.few(2)
def test_calls_that_change_what_their_process_prints_to(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    """They are called all the same, and those that take too long are over."""
    function = functools.partial(called.unheard, how=how)
    with within(60):
        found = gm.map(function, [0.01, 60.0, 0.02], timeout=0.5, return_exceptions=True, max_parallelism=1)
    assert found[::2] == [0.01, 0.02]
    assert isinstance(found[1], gm.CallTimeout)
    # Whoever takes the timer away may be given up from outside first, which does not see where it was.
    assert "called.py" in str(found[1]) or (how == "timer" and "without a sign of life" in str(found[1]))
    if how == "timer":
        assert capfd.readouterr().out == "heard\n" * 3


@pytest.mark.long
@pytest.mark.parametrize("retries", [0, 1])
def test_a_stopped_worker_s_call_is_over_its_time(tmp_path: Path, retries: int) -> None:
    """Whose own timer stands still with it: its call is CallTimeout, or tried again, and the map goes on."""
    function = functools.partial(called.stops, folder=str(tmp_path))
    with within(60):
        found = gm.map(function, range(8), timeout=1.0, retries=retries, return_exceptions=True)
    if retries == 0:
        assert isinstance(found[3], gm.CallTimeout) and "without a sign of life" in str(found[3])
        found[3] = 30
    assert found == [x * 10 for x in range(8)]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.long
def test_a_worker_that_stays_stopped_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where calls may take for ever: another one does what it had, which is not to blame."""
    monkeypatch.setattr("gristmill.process.liveness.STOPPED", 1.0)
    with within(60):
        assert gm.map(functools.partial(called.stops, folder=str(tmp_path)), range(8)) == [x * 10 for x in range(8)]


@pytest.mark.long
def test_a_call_that_holds_the_gil_may_take_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives no sign of life, and is let be: its process goes on, also after it was stopped for a moment."""
    monkeypatch.setattr("gristmill.process.liveness.STOPPED", 0.1)
    monkeypatch.setattr("gristmill.process.liveness.LOADING", 0.1)
    marker = tmp_path / "pid"

    def nudge() -> None:
        while not marker.exists() or not marker.read_text():
            time.sleep(0.05)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(int(marker.read_text()), number)
            time.sleep(0.5)

    thread = threading.Thread(target=nudge)
    thread.start()
    assert gm.map(functools.partial(called.holds, marker=str(marker)), [9]) == [9]
    thread.join()


@pytest.mark.parametrize("timeout", [math.inf, 1e10, 10**400, 1e9, 1e-9])
def test_timeouts_of_any_size(timeout: Any) -> None:
    """What no clock can count to is no timeout; the least is one that is over at once."""
    kind = gm.CallTimeout if timeout < 1 else float
    (found,) = gm.map(called.slow, [0.1], timeout=timeout, return_exceptions=True)
    assert isinstance(found, kind)


def test_an_iterator_that_raises() -> None:
    """Its exception is the caller's; what was computed before has come."""

    def numbers() -> Any:
        yield from range(3)
        raise LookupError("no more")

    found = gm.remote_parallel_map(called.double, numbers(), generator=True)
    with pytest.raises(LookupError, match="no more"):
        list(found)


# ---------------------------------------------------------------- flow


def test_endless_inputs_and_a_slow_consumer() -> None:
    """Inputs are read only as far ahead as is needed: a consumer that stops taking stops the reading."""
    read = itertools.count()
    seen = [0]

    def numbers() -> Any:
        for n in read:
            seen[0] = n
            yield n

    found = gm.remote_parallel_map(functools.partial(called.slow), (0.005 + 0 * n for n in numbers()), generator=True)
    for _ in range(20):
        next(found)
    time.sleep(1.0)
    ahead = seen[0]
    assert ahead < 200, "far more was read than 20 results need"
    time.sleep(0.5)
    assert seen[0] == ahead
    found.close()


def test_leaving_early_stops_the_workers(tmp_path: Path) -> None:
    """Calls that nobody waits for any more are not made."""
    log = str(tmp_path / "log")
    for _ in gm.remote_parallel_map(_logged_slowly(log), range(10_000), generator=True):
        break
    time.sleep(0.3)
    count = len(Path(log).read_text().splitlines())
    time.sleep(0.5)
    assert len(Path(log).read_text().splitlines()) == count < 2000


def _logged_slowly(log: str) -> Any:
    def function(x: int) -> int:
        time.sleep(0.002)
        return called.noted(x, log)

    return function


def test_from_any_thread_and_nested() -> None:
    """Four threads at once; a map inside of a map, which does not multiply the workers."""
    found: dict[int, list[int]] = {}

    def work(n: int) -> None:
        found[n] = gm.map(called.double, range(n * 10, n * 10 + 5), max_parallelism=1)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [2 * x for x in range(n * 10, n * 10 + 5)] for n in range(4)}

    def outer(n: int) -> list[int]:
        import gristmill as gm

        return gm.map(lambda x: x + n, [1, 2])

    assert gm.map(outer, [10, 20], max_parallelism=2) == [[11, 12], [21, 22]]


def test_calls_at_once_are_bounded(tmp_path: Path) -> None:
    """max_parallelism and func_cpu bound the calls; threads of a worker are those of its func_cpu."""

    def look(x: int) -> tuple[int, str]:
        time.sleep(0.05)
        return os.getpid(), os.environ["OMP_NUM_THREADS"]

    assert len({pid for pid, _ in gm.map(look, range(6), max_parallelism=1)}) == 1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = gm.map(look, range(4), func_cpu=4096)
    assert len({pid for pid, _ in found}) == 1
    assert ["func_cpu=4096" in str(w.message) for w in said if w.category is gm.GristmillWarning] == [True]
    assert {threads for _, threads in gm.map(look, range(2), func_cpu=1)} == {"1"}


def test_options_that_do_no_harm_are_not_warned_of() -> None:
    """grow, region, disk_gb mean nothing on one machine; that an image is not used is said, once."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            options: dict[str, Any] = {"region": "eu", "disk_gb": 5, "grow": True, "image": "python:3.12"}
            assert gm.remote_parallel_map(called.double, [1], **options) == [2]
    assert ["python:3.12" in str(w.message) for w in said if w.category is gm.GristmillWarning] == [True]


def test_calls_that_wait_may_be_more_than_the_cores(tmp_path: Path) -> None:
    """max_parallelism above the cores means it, and so does a fraction of a core; a whole core does not."""
    count = 3 * machine.cores() + 2

    def met(folder: str, here: int) -> bool:
        Path(folder, str(os.getpid())).touch()
        until = time.monotonic() + 40
        while len(os.listdir(folder)) < here and time.monotonic() < until:
            time.sleep(0.01)
        return len(os.listdir(folder)) >= here

    for number, options in enumerate(({"max_parallelism": count}, {"func_cpu": 1 / (count / machine.cores())})):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert all(gm.remote_parallel_map(met, [(str(folder), count)] * count, **options))
    place = placing.on_this_machine(placing.Request(cpu=1, most=count))
    assert place.workers == machine.cores()
    place = placing.on_this_machine(placing.Request(most=10**9))
    assert place.workers < 10**6 and "room for" in place.notes[0]


@pytest.mark.parametrize("slow", [False, True])
def test_a_generator_begins_at_once(tmp_path: Path, slow: bool) -> None:
    """Calls run before anybody asks for a result; an iterator that is slow to begin holds up nobody."""
    log = tmp_path / "log"

    def values() -> Iterator[tuple[int, str]]:
        time.sleep(60 if slow else 0)
        yield from [(1, str(log)), (2, str(log))]

    begun = time.monotonic()
    for inputs in (values(), [(1, str(log)), (2, str(log))]):
        found = gm.remote_parallel_map(called.noted, inputs, generator=True, max_parallelism=1)
        assert time.monotonic() - begun < 20
        until = time.monotonic() + 30
        while not slow and not log.exists() and time.monotonic() < until:
            time.sleep(0.02)
        assert log.exists() != slow
        if slow:
            del found
            return
        assert sorted(found) == [10, 20]
        log.unlink()


def test_the_engine_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GRISTMILL_ENGINE is the engine of maps and jobs that name none, and of no map inside of a call."""
    monkeypatch.setenv("GRISTMILL_ENGINE", "nowhere")
    with pytest.raises(gm.BadJob, match="GRISTMILL_ENGINE is 'nowhere': give local, ray, spark"):
        gm.map(called.double, [1])
    assert gm.map(called.double, [1], engine="local") == [2]
    monkeypatch.setenv("GRISTMILL_ENGINE", "spark")
    with pytest.raises(gm.BadJob, match=r"GRISTMILL_ENGINE.*a map runs on local or ray"):
        gm.map(called.double, [1])

    def outer(n: int) -> list[int]:
        import gristmill as gm

        return gm.map(lambda x: x + n, [1, 2])

    assert gm.map(outer, [10], engine="local") == [[11, 12]]
    job = ([{"x": 1}], len)
    assert gm.Job(*job).spec.engine.name == "spark"
    assert gm.Job(*job, workers=0).spec.engine.name == "local"
    assert gm.Job(*job, engine="local").spec.engine.name == "local"
    file = tmp_path / "job.yaml"
    for engine, name in (("", "spark"), ("engine: local\n", "local"), ("engine: {workers: 3}\n", "spark"),
                         ("engine: {workers: 0}\n", "local")):  # fmt: skip
        file.write_text(f"source: x.parquet\nmodel: {{call: 'os:getpid'}}\nsink: out\n{engine}")
        assert gm.load_job(str(file)).spec.engine.name == name


class Claims(list[int]):
    """A list that says it is of another length."""

    def __init__(self, count: int, says: int) -> None:
        super().__init__(range(count))
        self.says = says

    def __len__(self) -> int:
        return self.says


@pytest.mark.parametrize(("count", "says"), [(3, 5), (2000, 2), (5, 5), (1, 400), (300, 1)])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_length_is_only_a_hint(count: int, says: int, ordered: bool) -> None:
    """All inputs are called and none is waited for, whatever `len` says; a list may grow meanwhile."""
    with within(40):
        found = gm.remote_parallel_map(called.double, Claims(count, says), ordered=ordered)
    assert sorted(found) == [2 * x for x in range(count)]


def test_a_list_that_grows() -> None:
    """As with the built-in map, what a consumer adds is called too."""
    values, found = [1, 2, 3], []
    for value in gm.remote_parallel_map(called.double, values, generator=True, max_parallelism=1):
        found.append(value)
        if len(values) < 6:
            values.append(value + 10)
    assert sorted(found) == sorted(2 * x for x in values) and len(found) == 6


def test_results_half_sent(tmp_path: Path) -> None:
    """A worker that is killed in the middle of a long message: its input alone is lost, and nothing is printed here."""
    code = (
        "import os, pathlib, threading, time, gristmill as gm\n"
        "def large(x):\n"
        "    if x == 5:\n"
        "        threading.Thread(target=lambda: (time.sleep(0.02), os.kill(os.getpid(), 9))).start()\n"
        "        return [bytearray(os.urandom(900_000)) for _ in range(400)]\n"
        "    return x\n"
        "found = gm.map(large, range(8), return_exceptions=True)\n"
        "print([x for x in found if isinstance(x, int)], type(found[5]).__name__)\n"
        f"tries = pathlib.Path({str(tmp_path)!r})\n"
        "def kills(x):\n"
        # Twice for each of four inputs: fewer deaths in all than `retries`, whichever input they hit.
        "    if x % 5 == 3 and len(list(tries.glob(f'{x}-*'))) < 2:\n"
        "        (tries / f'{x}-{os.getpid()}').touch()\n"
        "        threading.Timer(0.001, lambda: os.kill(os.getpid(), 9)).start()\n"
        "    return b'x' * 900_000\n"
        "found = gm.map(kills, range(20), retries=9)\n"
        "print([len(x) for x in found] == [900_000] * 20)\n"
    )
    done = run_script(code)
    assert done.stdout == "[0, 1, 2, 3, 4, 6, 7] WorkerLost\nTrue\n", done.stderr
    # A kill that comes when the last result has been told already is said, for it is no end that anybody asked for.
    late = [
        x
        for x in done.stderr.splitlines()
        if not x.endswith("all it had left to do was to close its model; its rows are done")
    ]
    assert late == [], done.stderr


# ---------------------------------------------------------------- scripts and signals


SCRIPT = """
import gristmill as gm
from dataclasses import dataclass

@dataclass
class Point:
    x: int

def moved(p):
    print("moving", p.x)
    return Point(p.x + 1)

found = gm.map(moved, [Point(1), Point(2)])
assert all(isinstance(p, Point) for p in found), "the class is the caller's own"
print(found)
"""


@pytest.mark.parametrize("stdin", [False, True])
def test_scripts_without_a_main_guard_and_from_standard_input(stdin: bool) -> None:
    """Classes and functions of a script reach the workers and come back; prints appear here."""
    done = run_script(SCRIPT, stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert "[Point(x=2), Point(x=3)]" in done.stdout
    assert "moving 1" in done.stdout and "moving 2" in done.stdout
    assert done.stderr == ""


def test_ctrl_c_leaves_nothing_running(tmp_path: Path) -> None:
    """SIGINT ends the script with KeyboardInterrupt, and its workers with it, although they are in long calls."""
    script = (
        "import gristmill as gm, os, time, sys\n"
        "def f(x):\n    open(f'{sys.argv[1]}/{os.getpid()}', 'w').close()\n    time.sleep(600)\n"
        "import functools\n"
        f"gm.map(lambda x: (open(r'{tmp_path}/' + str(os.getpid()), 'w').close(), time.sleep(600)), range(4))\n"
    )
    running = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("[0-9]*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, printed = running.communicate(timeout=60)
    assert "KeyboardInterrupt" in printed
    workers = [int(p.name) for p in tmp_path.glob("[0-9]*")]
    assert workers
    deadline = time.monotonic() + 5
    while any(map(_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, workers))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_first_result_comes_soon() -> None:
    """A cold start, import and all, also on a busy machine (benchmarks/parallel_map.py measures it)."""
    done = run_script(
        "import time; t = time.monotonic()\nimport gristmill as gm\n"
        "print(next(gm.remote_parallel_map(lambda x: x, range(100), generator=True)), time.monotonic() - t)"
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[1]) < 2.0


# ---------------------------------------------------------------- checkpoints


@pytest.mark.long
def test_a_checkpoint_survives_a_crash(tmp_path: Path) -> None:
    """Killed in the middle, called again: finished inputs are not computed again; other code or inputs are."""
    log, folder = tmp_path / "log", tmp_path / "kept"
    script = (
        "import functools, sys, time\nsys.path.insert(0, sys.argv[3])\nimport called, gristmill as gm\n"
        "def f(x):\n    time.sleep(0.02)\n    return called.noted(x, sys.argv[1])\n"
        "f = functools.partial(called.noted, log=sys.argv[1])\n"
        "g = lambda x: (time.sleep(0.02), called.noted(x, log))[1]\n"
        "log = sys.argv[1]\n"
        "print(sum(gm.remote_parallel_map(g, range(60), checkpoint=sys.argv[2])))\n"
    )
    line = [sys.executable, "-c", script, str(log), str(folder), str(Path(__file__).parent)]
    running = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while (not log.exists() or len(log.read_text().splitlines()) < 25) and time.monotonic() < deadline:
        time.sleep(0.02)
    running.kill()
    running.wait()
    time.sleep(0.5)  # its workers end by themselves
    before = len(log.read_text().splitlines())
    assert 25 <= before < 60
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 10 * sum(range(60))
    calls = [int(text.split()[0]) for text in log.read_text().splitlines()]
    assert set(calls) == set(range(60))
    assert len(calls) < 60 + 20, "what was finished is computed again"
    count = len(calls)
    again = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert int(again.stdout) == 10 * sum(range(60))
    assert len(log.read_text().splitlines()) == count


def test_a_checkpoint_is_of_the_code_and_the_input(tmp_path: Path) -> None:
    """Another function, another closure value or another input is another key."""
    folder = str(tmp_path / "kept")

    def scaled(factor: int) -> Any:
        return lambda x: x * factor

    assert gm.map(scaled(2), [1, 2], checkpoint=folder) == [2, 4]
    assert gm.map(scaled(3), [1, 2], checkpoint=folder) == [3, 6]
    assert gm.map(scaled(2), [1, 2, 3], checkpoint=folder) == [2, 4, 6]
    assert gm.map(Adder(1), [1], checkpoint=folder) == [2]
    assert gm.map(Adder(2), [1], checkpoint=folder) == [3]
    assert gm.map(scaled(2), iter([3, 1]), checkpoint=folder) == [6, 2]


def test_a_checkpoint_is_of_what_workers_compute_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that a script sets in a module does not reach workers: refused, and not kept as the answer of another."""
    (tmp_path / "setting.py").write_text("RATE = 2\n\n\ndef scaled(x):\n    return x * RATE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    setting = importlib.import_module("setting")
    folder = str(tmp_path / "kept")
    with monkeypatch.context() as patched, pytest.raises(gm.BadJob, match=r"setting.RATE is 3 where .*, and 2 in its"):
        patched.setattr(setting, "RATE", 3)
        gm.map(setting.scaled, [1, 2], checkpoint=folder)
    assert gm.map(setting.scaled, [1, 2], checkpoint=folder) == [2, 4]


@pytest.mark.few(1)
@pytest.mark.parametrize("ordered", [False, True])
def test_a_checkpoint_of_endless_inputs(tmp_path: Path, ordered: bool) -> None:
    """What is known comes, although no input is missing; and it does not keep what is computed from coming."""
    folder = str(tmp_path / "kept")

    def took(values: Any, most: int) -> list[int]:
        found = gm.map(called.double, values, ordered=ordered, generator=True, checkpoint=folder)
        with contextlib.closing(found), within(20):
            return list(itertools.islice(found, most))

    assert set(took(itertools.cycle(range(3)), 10)) <= {0, 2, 4}
    assert gm.map(called.double, range(3), checkpoint=folder) == [0, 2, 4]
    again = took(itertools.cycle(range(3)), 10_000)
    assert again == [0, 2, 4] * 3333 + [0]
    mixed: list[int] = []
    found = gm.map(called.double, itertools.chain([0, 9], itertools.cycle(range(3))), ordered=ordered, generator=True,
                   checkpoint=folder)  # fmt: skip
    with contextlib.closing(found), within(60):
        while 18 not in mixed or len(mixed) < 10_000:
            mixed.append(next(found))
    assert mixed.count(18) == 1
    assert not ordered or mixed[:4] == [0, 18, 0, 2]


def test_known_results_come_before_others_are_computed(tmp_path: Path) -> None:
    """At once, from an iterator that is slow and from a list, and read from the disk one by one."""
    folder = str(tmp_path / "kept")
    assert gm.map(called.slow, [0.001 * n for n in range(50)], checkpoint=folder)
    values = [0.001 * n for n in range(50)]

    def slowly() -> Any:
        yield from values[:3]
        time.sleep(60)

    begun = time.monotonic()
    for inputs in (slowly(), [60.0, *values]):
        found = gm.remote_parallel_map(called.slow, inputs, generator=True, checkpoint=folder)
        with contextlib.closing(found), within(20):
            assert [next(found) for _ in range(3)] == values[:3]
    assert time.monotonic() - begun < 10
    reading = 0

    class Counting(Kept):
        def find(self, key: str) -> Any:
            nonlocal reading
            reading += 1
            return super().find(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gristmill.parallel.mapping.checkpoint", lambda at: Counting(f"{at}/results.sqlite"))
        for ordered in (False, True):
            found = gm.map(called.slow, [*values, 0.2], ordered=ordered, generator=True, checkpoint=folder)
            assert [next(found), next(found)] == values[:2]
            found.close()
            assert reading == 2
            reading = 0


def test_order_with_results_that_are_known(tmp_path: Path) -> None:
    """Gaps in what has to be computed do not count as results that are missing."""
    folder = str(tmp_path / "kept")
    gm.map(called.double, [0, 5], checkpoint=folder)
    found = gm.map(called.double, range(4000), checkpoint=folder, max_parallelism=1, generator=True)
    with contextlib.closing(found), within(20):
        assert list(found) == [2 * x for x in range(4000)]


def test_results_that_a_disk_does_not_hold_are_told_with_the_way_on(tmp_path: Path) -> None:
    """Of a checkpoint and of a detached map: the file, and what to do; with room the same call goes on."""
    script = (
        "import resource, sys, gristmill as gm\n"
        "def large(x):\n    return bytes([x]) * 20_000\n"
        "limit = int(sys.argv[2])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1)) if limit else None\n"
        "if sys.argv[3] == 'detached':\n    gm.map(large, range(50), detach=True).results(60)\n"
        "found = gm.map(large, range(50), checkpoint=sys.argv[1])\n"
        "assert found == [large(x) for x in range(50)]\n"
    )
    for how in ("detached", "here"):
        done = run_script(script, str(tmp_path / "kept"), "300000", how)
        assert done.returncode == 1 and "RunFailed" in done.stderr
        assert "results.sqlite: " in done.stderr and "call the map again when the disk works again" in done.stderr
    done = run_script(script, str(tmp_path / "kept"), "0", "here")
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- detached


def test_a_detached_map(tmp_path: Path) -> None:
    """It goes on when its caller has ended; another process opens it by its id, and gets the results in order."""
    script = (
        "import gristmill as gm, time\n"
        "def square(x):\n    time.sleep(0.1)\n    print('at', x)\n    return x * x\n"
        "print(gm.remote_parallel_map(square, range(8), detach=True).id)"
    )
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    handle = gm.detached(done.stdout.strip())
    assert handle.status()["total"] == 8
    assert handle.results(timeout=60) == [x * x for x in range(8)]
    status = handle.status()
    assert (status["state"], status["done"]) == ("done", 8)
    assert "at 7" in handle.log.read_text()
    assert list(handle) == list(handle) == [x * x for x in range(8)]
    with pytest.raises(gm.BadJob, match="no detached map 'nothing'"):
        gm.detached("nothing")


def test_a_detached_map_that_fails_is_cancelled_or_lost() -> None:
    """An exception is raised by results(); cancel() ends it; a killed driver is told."""
    failed = gm.remote_parallel_map(called.raises, [0, 1], detach=True)
    with pytest.raises(KeyError, match="one"):
        failed.results(timeout=60)
    with pytest.raises(KeyError) as found:
        list(failed)
    assert found.value.input_index == 1  # type: ignore[attr-defined]
    until = time.monotonic() + 10
    while (status := failed.status())["state"] == "running" and time.monotonic() < until:
        time.sleep(0.05)
    assert (status["state"], status["error"], status["input"]) == ("failed", "KeyError: 'one'", 1)
    kept = gm.remote_parallel_map(called.raises, [0, 1], detach=True, return_exceptions=True)
    assert [type(x) for x in kept.results(timeout=60)] == [int, KeyError]
    endless = gm.remote_parallel_map(called.slow, [600.0] * 4, detach=True)
    with pytest.raises(TimeoutError, match="0 of 4"):
        endless.results(timeout=0.3)
    endless.cancel()
    assert endless.status()["state"] == "cancelled"
    with pytest.raises(gm.RunFailed, match="cancelled"):
        endless.results()
    lost = gm.remote_parallel_map(called.slow, [600.0] * 4, detach=True)
    from gristmill.files.lease import holder

    os.kill(holder(str(lost.folder)).pid, signal.SIGKILL)  # type: ignore[union-attr]
    with pytest.raises(gm.RunFailed, match="lost"):
        lost.results(timeout=60)
    assert len(gm.remote_parallel_map(called.slow, [0.0])) == 1  # sweeps what the killed one left in memory


@pytest.mark.parametrize("said", [1, np.True_], ids=["one", "numpy"])
def test_what_is_true_counts_as_true_for_a_detached_map(said: Any) -> None:
    """What it keeps of itself has a truth value, whatever the caller gave."""
    found = gm.remote_parallel_map(called.raises, [0, 1], detach=True, return_exceptions=said).results(60)
    assert len(found) == 2 and any(isinstance(value, Exception) for value in found)

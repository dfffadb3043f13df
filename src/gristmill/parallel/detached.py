"""Maps that go on without their caller: a driver process of their own, and a handle that any process can open by id."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gristmill.commit.lease import Lease, holder
from gristmill.errors import BadJob, RunFailed
from gristmill.models.cache import cache_folder
from gristmill.parallel.feed import Result
from gristmill.parallel.kept import Kept
from gristmill.parallel.mapping import Mapping, delivered, name_of, owned, results
from gristmill.parallel.shipping import Fault, Shown, fault_of, raised, short
from gristmill.plan.contracts import Failure
from gristmill.plan.pickling import by_value
from gristmill.plan.processes import become_worker, import_path

_ID = re.compile(r"[0-9a-z-]{1,80}")
RESERVED = 4096  # bytes on disk for how a map ended, which is told on a full disk, too


class Detached:
    """A map that runs by itself. `id` opens it again from any process of this user: `gristmill.detached(id)`."""

    def __init__(self, id: str) -> None:
        if not _ID.fullmatch(id) or not ((folder := _home() / id) / "about.json").is_file():
            there = sorted(p.parent.name for p in _home().glob("*/about.json"))
            raise BadJob(f"no detached map {id!r}; there are {', '.join(there[-5:]) or 'none'}")
        self.id = id
        self.folder = folder

    def __repr__(self) -> str:
        return f"Detached({self.id!r})"

    def status(self) -> dict[str, Any]:
        """`state` ("running", "done", "failed", "cancelled" or "lost"), `done` and `total` inputs, `name`, and of one
        that failed its `error`, with the number of the `input` that had it.

        "lost" is a driver that ended without saying how: killed, or with its machine.
        """
        about = _read(self.folder / "about.json")
        about.update(_read(self.folder / "state.json"))
        with contextlib.closing(self._kept()) as kept:
            about["done"] = kept.count()
        if about["state"] == "running" and not self._alive():
            about.update(_read(self.folder / "state.json"))  # it may have ended between the two looks
            if about["state"] == "running":
                about["state"] = "lost"
        return about

    def results(self, timeout: float | None = None) -> list[Any]:
        """Waits until it has ended, and gives the results in the order of the inputs. Raises as the map itself would;
        TimeoutError after `timeout` seconds, RunFailed if it was cancelled, or its driver was lost.
        """
        return list(self._delivered(timeout))

    def __iter__(self) -> Iterator[Any]:
        """The results in the order of the inputs, each as soon as it is there; raises as `results` does."""
        return self._delivered(None)

    def _delivered(self, timeout: float | None) -> Iterator[Any]:
        until = None if timeout is None else time.monotonic() + timeout
        keeps = bool(_read(self.folder / "about.json")["return_exceptions"])
        return delivered(self._found(until), ordered=True, return_exceptions=keeps)

    def _found(self, until: float | None) -> Generator[Result, None, None]:
        state = "running"
        with contextlib.closing(self._kept()) as kept:
            while state == "running":
                about = self.status()  # before the look: what comes later is found by the next
                state = about["state"]
                for key, value, fault in kept.new():
                    yield Result(int(key), value, value, fault)
                if state == "running" and until is not None and time.monotonic() > until:
                    raise TimeoutError(f"detached map {self.id}: {about['done']} of {about['total']} done so far")
                if state == "running":
                    time.sleep(0.1)
        if about["state"] == "cancelled":
            raise RunFailed(f"detached map {self.id}: cancelled after {about['done']} results")
        if about["state"] == "lost":
            raise RunFailed(f"detached map {self.id}: its driver process was lost; what it printed is in {self.log}")
        if about["state"] == "failed" and "input" not in about:  # the exception of an input is raised as the map does
            raise RunFailed(f"detached map {self.id}: {about.get('error')}")

    def cancel(self, timeout: float = 15.0) -> None:
        """Ends it; returns when nothing of it is running any more. What was finished stays."""
        (self.folder / "cancel").touch()
        until = time.monotonic() + timeout
        while self._alive():
            if time.monotonic() > until:
                raise TimeoutError(f"detached map {self.id} has not ended within {timeout} s")
            time.sleep(0.05)

    @property
    def log(self) -> Path:
        """What its calls print goes here."""
        return self.folder / "log.txt"

    def _alive(self) -> bool:
        return holder(str(self.folder)) is not None

    def _kept(self) -> Kept:
        return Kept(str(self.folder / "results.sqlite"))


def start(function: Any, values: Iterable[Any], how: Mapping) -> Detached:
    """Starts the driver, and returns when it has taken over."""
    inputs = list(owned(values))
    name = re.sub("[^a-z0-9]+", "-", name_of(function).lower()).strip("-")[:40]
    id = f"{name or 'map'}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    call = _packed(function, inputs, how)  # before there is a folder: it may raise
    folder = _home() / id
    about = {"id": id, "name": name_of(function), "total": len(inputs), "return_exceptions": how.return_exceptions}
    try:
        folder.mkdir(parents=True, mode=0o700)
        (folder / "call.pickle").write_bytes(call)
        (folder / "about.json").write_text(json.dumps({**about, "state": "running", "started": time.time()}))
    except OSError as e:
        raise RunFailed(
            f"{folder}: {e}: a detached map cannot be kept here; call it again when the disk is well"
        ) from e
    code = f"import sys; sys.path[:0] = {import_path()!r}; "
    code += f"from gristmill.parallel.detached import drive; drive({str(folder)!r})"
    with open(folder / "log.txt", "ab") as log:
        driver = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # the caller's terminal may go
        )
    # Until the lock names its holder, so is held: sooner, the map would be taken for lost.
    while not _has_text(folder / "lock"):
        if driver.poll() is not None and not _has_text(folder / "lock"):
            raise RunFailed(f"the driver of a detached map ended at once; see {folder / 'log.txt'}")
        time.sleep(0.01)
    return Detached(id)


@dataclass(frozen=True, repr=False)
class _Unsent(Shown):
    """Stands in the driver for an input that could not be pickled, and cannot be either."""

    fault: Fault

    def __reduce__(self) -> Any:
        raise raised(self.fault)


def _packed(function: Any, inputs: list[Any], how: Mapping) -> bytes:
    """What the driver is to do; inputs that cannot be pickled as what they look like and why. Raises what pickling the
    function does.
    """
    rest = (replace(how, spinner=False), list(sys.path))
    try:
        return by_value((function, inputs, *rest, {}))
    except Exception:  # of which, shows when each is pickled alone
        unsent: dict[int, tuple[str, Fault]] = {}
        for number, value in enumerate(inputs):
            try:
                by_value(value)
            except Exception as e:
                unsent[number] = (short(value), fault_of(e))
        if not unsent:
            raise
    return by_value((function, [None if n in unsent else v for n, v in enumerate(inputs)], *rest, unsent))


class _Cancelled(Exception):
    """Somebody wants no more of it."""


def drive(folder: str) -> None:
    """The driver's whole life: map, keep every result, say how it ended."""
    import pickle

    become_worker()
    home = Path(folder)
    temporary = home / "state.json.tmp"
    temporary.write_text(" " * RESERVED)
    with Lease(folder, folder), contextlib.closing(Kept(str(home / "results.sqlite"))) as kept:
        ended: dict[str, Any] = {"state": "done"}
        try:
            function, inputs, how, path, unsent = pickle.loads((home / "call.pickle").read_bytes())
            sys.path[:] = path
            for number, (text, fault) in unsent.items():
                inputs[number] = _Unsent(text, fault)
            if (failed := _drive(home, kept, function, inputs, how)) is not None:
                number, failure = failed
                ended = {"state": "failed", "error": f"{failure.type}: {failure.message}", "input": number}
        except _Cancelled:
            ended = {"state": "cancelled"}
        except BaseException as e:  # told to whoever opens the handle
            ended = {"state": "failed", "error": f"{type(e).__name__}: {e}"}
            raise
        finally:
            with temporary.open("r+") as file:
                file.write(json.dumps({**ended, "ended": time.time()}))
            os.replace(temporary, home / "state.json")


def _drive(home: Path, kept: Kept, function: Any, inputs: list[Any], how: Mapping) -> tuple[int, Failure] | None:
    """The first input that failed, where the map raises that; None where none did."""
    first = None

    def watch() -> None:
        if (home / "cancel").exists():
            raise _Cancelled

    with contextlib.closing(results(function, inputs, replace(how, ordered=False), watch)) as found:
        for result in found:
            value = Shown(short(result.input)) if result.fault is not None else result.value
            kept.add([(str(result.number), value, result.fault)])
            if result.fault is None or how.return_exceptions:
                continue
            first = first or (result.number, result.fault.failure)
            if not result.fault.died:
                break
    return first


def _home() -> Path:
    return cache_folder() / "detached"


def _has_text(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except FileNotFoundError:
        return {}

"""Maps that continue without their caller: a separate driver process, and a handle that any process can open by id."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from gristmill.errors import BadJob, RunFailed
from gristmill.files.document import Document
from gristmill.files.lease import Lease, holder
from gristmill.fingerprint.diskcache import cache_folder
from gristmill.parallel.checkpoint import Kept
from gristmill.parallel.inputfeed import CallResult
from gristmill.parallel.mapping import Mapping, delivered, name_of, owned, results
from gristmill.parallel.transport import Fault, Shown, fault_of, raised, short
from gristmill.process.messages import Failure
from gristmill.process.pickling import by_value
from gristmill.process.startup import become_worker, import_path
from gristmill.values import dataclass

_ID = re.compile(r"[0-9a-z-]{1,80}")
RESERVED = 4096  # bytes on disk for how a map ended, which can so be written even to a full disk


@dataclass(frozen=True)
class About(Document, what="detached map", sealed=False):
    """`about.json`: what a detached map is; `started` in seconds since 1970."""

    id: str
    name: str
    total: int
    return_exceptions: bool
    started: float


@dataclass(frozen=True)
class Ended(Document, what="end of a detached map", sealed=False):
    """`state.json`: how it ended, and when; if it failed, the error, and the number of the input that raised it."""

    state: Literal["done", "failed", "cancelled"]
    error: str | None = None
    input: int | None = None
    ended: float = 0.0


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
        """`state` ("running", "done", "failed", "cancelled" or "lost"), `done` and `total` inputs, `name`, and for a
        failed map its `error`, with the number of the `input` that raised it.

        "lost" means that the driver ended without a record: it was killed, or its machine failed.
        """
        about = {**vars(self._about()), "state": "running", **self._ended()}
        with contextlib.closing(self._kept()) as kept:
            about["done"] = kept.count()
        if about["state"] == "running" and not self._alive():
            about.update(self._ended())  # it may have ended between the two looks
            if about["state"] == "running":
                about["state"] = "lost"
        return about

    def results(self, timeout: float | None = None) -> list[Any]:
        """Waits until the map has ended, and returns the results in the order of the inputs. Raises what the map itself
        would; TimeoutError after `timeout` seconds, RunFailed if it was cancelled, or its driver was lost.
        """
        return list(self._delivered(timeout))

    def __iter__(self) -> Iterator[Any]:
        """The results in the order of the inputs, each as soon as it is ready; raises what `results` does."""
        return self._delivered(None)

    def _delivered(self, timeout: float | None) -> Iterator[Any]:
        until = None if timeout is None else time.monotonic() + timeout
        keeps = self._about().return_exceptions
        return delivered(self._found(until), ordered=True, return_exceptions=keeps)

    def _found(self, until: float | None) -> Generator[CallResult, None, None]:
        state = "running"
        with contextlib.closing(self._kept()) as kept:
            while state == "running":
                about = self.status()  # before reading results: later ones are found next time
                state = about["state"]
                for key, value, fault in kept.new():
                    yield CallResult(int(key), value, value, fault)
                if state == "running" and until is not None and time.monotonic() > until:
                    raise TimeoutError(f"detached map {self.id}: {about['done']} of {about['total']} done so far")
                if state == "running":
                    time.sleep(0.1)
        if about["state"] == "cancelled":
            raise RunFailed(f"detached map {self.id}: cancelled after {about['done']} results")
        if about["state"] == "lost":
            raise RunFailed(f"detached map {self.id}: its driver process was lost; what it printed is in {self.log}")
        if about["state"] == "failed" and "input" not in about:  # an input's exception is raised as by the map itself
            raise RunFailed(f"detached map {self.id}: {about.get('error')}")

    def cancel(self, timeout: float = 15.0) -> None:
        """Ends the map; returns when none of it is running any more. Finished results stay."""
        (self.folder / "cancel").touch()
        until = time.monotonic() + timeout
        while self._alive():
            if time.monotonic() > until:
                raise TimeoutError(f"detached map {self.id} did not finish within {timeout} s")
            time.sleep(0.05)

    @property
    def log(self) -> Path:
        """The file to which its calls print."""
        return self.folder / "log.txt"

    def _about(self) -> About:
        path = self.folder / "about.json"
        return About.load(path.read_bytes(), str(path))

    def _ended(self) -> dict[str, Any]:
        """What is known of its end: empty while it is running."""
        path = self.folder / "state.json"
        try:
            ended = Ended.load(path.read_bytes(), str(path))
        except FileNotFoundError:
            return {}
        return {name: value for name, value in vars(ended).items() if value is not None}

    def _alive(self) -> bool:
        return holder(str(self.folder)) is not None

    def _kept(self) -> Kept:
        return Kept(str(self.folder / "results.sqlite"))


def start(function: Any, values: Iterable[Any], how: Mapping) -> Detached:
    """Starts the driver, and returns when it has taken over."""
    inputs = list(owned(values))
    name = re.sub("[^a-z0-9]+", "-", name_of(function).lower()).strip("-")[:40]
    id = f"{name or 'map'}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    call = _packed(function, inputs, how)  # before the folder is created: it may raise
    folder = _home() / id
    about = About(id, name_of(function), len(inputs), how.return_exceptions, time.time())
    try:
        folder.mkdir(parents=True, mode=0o700)
        (folder / "call.pickle").write_bytes(call)
        (folder / "about.json").write_bytes(about.dump())
    except OSError as e:
        raise RunFailed(
            f"{folder}: {e}: a detached map cannot be kept here; call it again when the disk works again"
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
    # Wait until the lock names its holder, and so is held: sooner, the map would look lost.
    while not _has_text(folder / "lock"):
        if driver.poll() is not None and not _has_text(folder / "lock"):
            raise RunFailed(f"the driver of a detached map exited at once; see {folder / 'log.txt'}")
        time.sleep(0.01)
    return Detached(id)


@dataclass(frozen=True, repr=False)
class _Unsent(Shown):
    """Stands in the driver for an input that cannot be pickled; it cannot be pickled either."""

    fault: Fault

    def __reduce__(self) -> Any:
        raise raised(self.fault)


def _packed(function: Any, inputs: list[Any], how: Mapping) -> bytes:
    """The driver's work; an input that cannot be pickled is replaced by what it looks like and why. Raises what
    pickling the function does.
    """
    rest = (replace(how, spinner=False), list(sys.path))
    try:
        return by_value((function, inputs, *rest, {}))
    except Exception:  # pickling each alone shows which input caused it
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
    """The map was cancelled."""


def drive(folder: str) -> None:
    """The driver's whole life: map, keep every result, record how it ended."""
    import pickle

    become_worker()
    home = Path(folder)
    temporary = home / "state.json.tmp"
    temporary.write_text(" " * RESERVED)
    with Lease(folder, folder), contextlib.closing(Kept(str(home / "results.sqlite"))) as kept:
        ended = Ended("done")
        try:
            function, inputs, how, path, unsent = pickle.loads((home / "call.pickle").read_bytes())
            sys.path[:] = path
            for number, (text, fault) in unsent.items():
                inputs[number] = _Unsent(text, fault)
            if (failed := _drive(home, kept, function, inputs, how)) is not None:
                number, failure = failed
                ended = Ended("failed", f"{failure.type}: {failure.message}", number)
        except _Cancelled:
            ended = Ended("cancelled")
        except BaseException as e:  # reported to whoever opens the handle
            ended = Ended("failed", f"{type(e).__name__}: {e}")
            raise
        finally:
            with temporary.open("rb+") as file:
                file.write(replace(ended, ended=time.time()).dump())
            os.replace(temporary, home / "state.json")


def _drive(home: Path, kept: Kept, function: Any, inputs: list[Any], how: Mapping) -> tuple[int, Failure] | None:
    """The first input that failed, if the map raises its error; None if none did."""
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

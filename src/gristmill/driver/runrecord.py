"""The records of runs on a sink: when each was, what it did, how it ended. One that says "running" while nobody holds
the sink was killed. Of runs that ended before they had a generation (0), such as those of a job that cannot run, the
last in a row is kept; if there is no sink yet, which they must not make, on this machine. There, too, is how a run
ended that could not write it into the sink.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from dataclasses import replace

from gristmill.commit.generation import claimed, meta
from gristmill.errors import CorruptStore
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL, join
from gristmill.files.document import Document
from gristmill.fingerprint.diskcache import cache_folder
from gristmill.job.uris import is_local
from gristmill.observe.facts import Run
from gristmill.observe.standing import KILLED
from gristmill.process.scratch import is_passing
from gristmill.values import dataclass

KEPT = 50  # records of runs
KEPT_ELSEWHERE = 200  # of sinks that are not there yet
LAST = 3  # records among which the last run is: one without a generation may have ended while another one ran
RUNNING = "running"
ROOM = 4096  # bytes that a record takes while its run goes on: how that ends then fits in there, also on a full disk
MOST_BRIEF = 1500  # characters of an error in a record that has no more room than that


@dataclass(frozen=True, kw_only=True)
class RunRecord(Run, Document, what="record of a run", sealed=False):
    """`runs/….json`: see `observe.facts.Run`."""


def folder_of(root: str) -> str:
    """Where the records of a sink are."""
    return join(meta(root), "runs")


def write(root: str, files: Files, run: Run) -> None:
    """Write a record, or replace that of the same run. Raises OSError."""
    files.note(join(folder_of(root), _name(run)), RunRecord(**vars(run)).dump())


def ended(root: str, files: Files, run: Run) -> None:
    """Write how a run ended that has a record. Where that cannot be written (a full disk), a short record takes the
    place of the one that is there, which has room; without that, it is on this machine. Raises OSError.
    """
    try:
        write(root, files, run)
    except OSError:
        brief = replace(
            run, error=run.error[:MOST_BRIEF], pace=(), slowest=(), per_worker=(), notes=(), drift=(), phases={},
            threads={}, used={},
        )  # fmt: skip
        if not (is_local(root) and _written_in_place(join(folder_of(root), _name(run)), RunRecord(**vars(brief)))):
            _write_elsewhere(root, brief)


def _written_in_place(path: str, record: RunRecord) -> bool:
    data = record.dump()
    with contextlib.suppress(OSError), open(path, "rb+", buffering=0) as file:
        room = os.fstat(file.fileno()).st_size
        return len(data) <= room and file.write(data.ljust(room)) == room
    return False


def listed(root: str, files: Files, most: int = KEPT) -> list[Run]:
    """The newest runs, newest last; records that do not read back are left out."""
    other, found = _elsewhere_known(root, files), list[Run]()
    for name in sorted(_names(root, files))[-most:]:
        with contextlib.suppress(FileNotFoundError, CorruptStore):
            run = Run(**vars(RunRecord.load_from(join(folder_of(root), name), files)))
            found.append(run if other is None or other.run != run.run else other)
    return found


def begun(root: str, files: Files, run: Run) -> list[Run]:
    """Write the record of a run that has the lease, and those of runs that ended without a word, which are returned.
    Raises OSError.
    """
    _make_room(root, files)
    # Only the last that began can be: each run that begins ends those before it.
    last = listed(root, files, LAST)
    died = [replace(one, state=KILLED) for one in last if one.state == RUNNING and one.run != run.run]
    other = _elsewhere_known(root, files)
    for one in died if other is None or not other.generation else [*died, other]:
        write(root, files, one)
    files.note(join(folder_of(root), _name(run)), RunRecord(**vars(run)).dump().ljust(ROOM))
    with contextlib.suppress(OSError, RuntimeError):
        LOCAL.remove(_elsewhere(root))
    return died


def note(root: str, files: Files, run: Run) -> None:
    """Write the record of a run that ended before it had a generation. Raises OSError."""
    if files.holds(meta(root)):
        for one in listed(root, files, 1):
            if not one.generation:
                files.remove(join(folder_of(root), _name(one)))
        _make_room(root, files)
        write(root, files, run)
    elif not is_passing(root):
        _write_elsewhere(root, run)


def last(root: str, files: Files, state: str) -> Run | None:
    """The run that ended last; None if none is known. `state` is that of the sink: if nobody runs there, a run that
    says that it does was killed.
    """
    found = [settled(one, state) for one in listed(root, files, LAST)]
    other = None if found else _elsewhere_known(root, files)
    found += [] if other is None else [other]
    return max(found, key=lambda one: one.started + one.seconds, default=None)


def settled(run: Run, state: str) -> Run:
    """A run as it ended: one that says that it is running, where nobody is, was killed."""
    if run.state != RUNNING or state == "running":
        return run
    return replace(run, state=KILLED, error=died_how(run))


def _make_room(root: str, files: Files) -> None:
    files.make_folder(folder_of(root))
    names = sorted(_names(root, files))
    for name in names[: max(0, len(names) - KEPT + 1)]:
        files.remove(join(folder_of(root), name))


def _write_elsewhere(root: str, run: Run) -> None:
    path = _elsewhere(root)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    _sweep(os.path.dirname(path))
    LOCAL.write_over(path, RunRecord(**vars(run)).dump())


def _elsewhere_known(root: str, files: Files) -> Run | None:
    """The record in the cache; None if it is of a sink that is gone, of whose generation this one has no claim."""
    with contextlib.suppress(OSError, RuntimeError, CorruptStore):
        run = Run(**vars(RunRecord.load_from(_elsewhere(root), LOCAL)))
        return run if not run.generation or claimed(root, run.generation, files) else None
    return None


def _elsewhere(root: str) -> str:
    return str(cache_folder() / "failed" / f"{hashlib.sha256(root.encode()).hexdigest()[:32]}.json")


def _sweep(folder: str) -> None:
    paths = sorted((os.path.join(folder, name) for name in os.listdir(folder)), key=os.path.getmtime)
    for path in paths[: max(0, len(paths) - KEPT_ELSEWHERE)]:
        LOCAL.remove(path)


def died_how(run: Run) -> str:
    """How a run ended that could not say so itself."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
    return (
        f"the run that began at {when} (process {run.pid} on {run.host}) ended without a word: it was killed, its "
        "machine went down, or the disk had no room for one"
    )


def _names(root: str, files: Files) -> list[str]:
    return [name for name in files.names(folder_of(root)) if name.endswith(".json")]


def _name(run: Run) -> str:
    return f"{round(run.started * 1000):013d}-{run.run[:8]}.json"

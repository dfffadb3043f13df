"""The records of runs on a sink: when each was, what it did, how it ended. One that says "running" while nobody holds
the sink was killed. Of runs that ended before they had a generation (0), such as those of a job that cannot run, the
last in a row is kept; if there is no sink yet, which they must not make, on this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from dataclasses import replace

from gristmill.commit.generation import meta
from gristmill.errors import CorruptStore
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL, join
from gristmill.files.document import Document
from gristmill.fingerprint.diskcache import cache_folder
from gristmill.observe.facts import Run
from gristmill.observe.standing import KILLED
from gristmill.process.scratch import is_passing
from gristmill.values import dataclass

KEPT = 50  # records of runs
KEPT_ELSEWHERE = 200  # of sinks that are not there yet
LAST = 3  # records among which the last run is: one without a generation may have ended while another one ran
RUNNING = "running"


@dataclass(frozen=True, kw_only=True)
class RunRecord(Run, Document, what="record of a run", sealed=False):
    """`runs/….json`: see `observe.facts.Run`."""


def folder_of(root: str) -> str:
    """Where the records of a sink are."""
    return join(meta(root), "runs")


def write(root: str, files: Files, run: Run) -> None:
    """Write a record, or replace that of the same run. Raises OSError."""
    files.note(join(folder_of(root), _name(run)), RunRecord(**vars(run)).dump())


def listed(root: str, files: Files, most: int = KEPT) -> list[Run]:
    """The newest runs, newest last; records that do not read back are left out."""
    found = []
    for name in sorted(_names(root, files))[-most:]:
        with contextlib.suppress(FileNotFoundError, CorruptStore):
            record = RunRecord.load_from(join(folder_of(root), name), files)
            found.append(Run(**vars(record)))
    return found


def begun(root: str, files: Files, run: Run) -> list[Run]:
    """Write the record of a run that has the lease, and those of runs that ended without a word, which are returned.
    Raises OSError.
    """
    _make_room(root, files)
    # Only the last that began can be: each run that begins ends those before it.
    last = listed(root, files, LAST)
    died = [replace(one, state=KILLED) for one in last if one.state == RUNNING and one.run != run.run]
    for one in died:
        write(root, files, one)
    write(root, files, run)
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
        path = _elsewhere(root)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _sweep(os.path.dirname(path))
        LOCAL.write_over(path, RunRecord(**vars(run)).dump())


def last(root: str, files: Files, state: str) -> Run | None:
    """The run that ended last; None if none is known. `state` is that of the sink: if nobody runs there, a run that
    says that it does was killed.
    """
    found = [settled(one, state) for one in listed(root, files, LAST)]
    with contextlib.suppress(OSError, RuntimeError, CorruptStore):
        found += [] if found else [Run(**vars(RunRecord.load_from(_elsewhere(root), LOCAL)))]
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
        f"the run that began at {when} (process {run.pid} on {run.host}) ended without a word: it was killed, or its "
        "machine went down"
    )


def _names(root: str, files: Files) -> list[str]:
    return [name for name in files.names(folder_of(root)) if name.endswith(".json")]


def _name(run: Run) -> str:
    return f"{round(run.started * 1000):013d}-{run.run[:8]}.json"

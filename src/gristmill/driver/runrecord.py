"""The records of runs on a sink: when each was, what it did, how it ended. One that says "running" while nobody holds
the sink was killed.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace

from gristmill.commit.generation import meta
from gristmill.errors import CorruptStore
from gristmill.files.contract import Files
from gristmill.files.disk import join
from gristmill.files.document import Document
from gristmill.observe.facts import Run

KEPT = 50  # records of runs
RUNNING, KILLED = "running", "killed"


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
    files.make_folder(folder_of(root))
    names = sorted(_names(root, files))
    for name in names[: max(0, len(names) - KEPT + 1)]:
        files.remove(join(folder_of(root), name))
    # Only the last can be: each run that begins ends those before it.
    died = [replace(one, state=KILLED) for one in listed(root, files, 1) if one.state == RUNNING and one.run != run.run]
    for one in died:
        write(root, files, one)
    write(root, files, run)
    return died


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

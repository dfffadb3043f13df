"""The note of how far a run is, for `gristmill status` and for the next run."""

from __future__ import annotations

from gristmill.commit.generation import Generation
from gristmill.errors import CorruptStore
from gristmill.files.disk import join
from gristmill.files.document import Document
from gristmill.observe.events import Progress
from gristmill.values import dataclass


@dataclass(frozen=True)
class ProgressNote(Progress, Document, what="note of progress", sealed=False):
    """`progress.json`: the last progress reported, when (seconds since 1970), and by which process."""

    at: float | None = None
    pid: int = 0


def path_of(generation: Generation) -> str:
    """The path of a generation's note."""
    return join(generation.folder, "progress.json")


def last_said(generation: Generation) -> ProgressNote | None:
    """The last note of a run; None if there is none that can be read."""
    try:
        return ProgressNote.load_from(path_of(generation), generation.files)
    except (FileNotFoundError, CorruptStore):
        return None

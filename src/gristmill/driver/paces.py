"""How long the runs of a job took: remembered in its sink, and in the cache of the machine by what the job is, for jobs
of which each night has a sink of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gristmill.commit import generation as generations
from gristmill.driver.forecast import Forecast, Pace, foreseen
from gristmill.driver.planning import Resolved
from gristmill.errors import CorruptStore, NewerFormat
from gristmill.files.contract import Files
from gristmill.files.disk import join
from gristmill.files.document import Document
from gristmill.fingerprint import digests, diskcache
from gristmill.models import modelsfile
from gristmill.models.versions import OURS
from gristmill.process import machine
from gristmill.process.targets import import_target
from gristmill.values import dataclass

KEPT = 50  # runs, of which the last ones are used; the others are there to be looked at


@dataclass(frozen=True)
class Paces(Document, what="note of how long runs took", sealed=False):
    """`paces.json`: the last runs, the latest last."""

    runs: tuple[Pace, ...] = ()

    def and_of(self, run: Pace) -> Paces:
        """With one more."""
        return Paces((*self.runs, run)[-KEPT:])


def known(r: Resolved, root: str, files: Files) -> Paces:
    """What is known of the job's runs: by its sink, or else by this machine."""
    found = _of_sink(root, files)
    return found if found.runs else _of_machine(r)


def forecast(r: Resolved, rows: float, root: str, files: Files, update: bool = False) -> Forecast | None:
    """How long a run of the job takes over so many rows, or an update, as far as those before it tell."""
    found = foreseen(rows, [run for run in known(r, root, files).runs if run.update == update])
    if found is not None and update:
        found = replace(found, by=found.by.replace("run", "update"))
    return None if found is None else found.priced(r.job.running.hour_price)


def remember(r: Resolved, root: str, files: Files, run: Pace) -> None:
    """Keep how long a run took, in its sink beside those of this sink alone. Failing to write is no error: the next
    estimate rests on fewer runs.
    """
    with contextlib.suppress(OSError):
        files.note(_in_sink(root), _of_sink(root, files).and_of(run).dump())
    with contextlib.suppress(OSError):
        diskcache.write_whole(_note(r), _of_machine(r).and_of(run).dump().decode())


def _of_sink(root: str, files: Files) -> Paces:
    try:
        return Paces.load_from(_in_sink(root), files)
    except (OSError, CorruptStore, NewerFormat):
        return Paces()


def _in_sink(root: str) -> str:
    return join(generations.meta(root), "paces.json")


def _of_machine(r: Resolved) -> Paces:
    note = _note(r)
    try:
        return Paces.load(note.read_bytes(), str(note))
    except (OSError, CorruptStore, NewerFormat):
        return Paces()


def _note(r: Resolved) -> Path:
    """The file of the cache for this job, whichever rows it is run over: a model that was trained again, or code that
    was mended, is still as fast as before. Functions are told apart by name and file.
    """
    about: Mapping[str, Any] = {
        "model": [type(r.job.model).__name__, r.job.model.name],
        "options": {k: v for k, v in r.fingerprint.options.items() if not k.startswith(("sink.", "model.sha256"))},
        "code": _callables(r),
        "place": [r.place.device, r.place.backend, r.job.engine.name, r.workers, len(r.gpus)],
        "machine": machine.name(),
    }
    if places := [_registry(one.asked) for one in r.registered if one.asked.startswith(OURS)]:
        about = {**about, "registries": places}
    return diskcache.cache_folder() / "paces" / f"{digests.digest_of(json.dumps(about, sort_keys=True))[:40]}.json"


def _registry(asked: str) -> str:
    """The file of the registry that a name is looked up in: another one may have another model of this name."""
    file = asked.removeprefix(OURS).rpartition("#")[0]
    return os.path.realpath(file or modelsfile.nearest_file())


def _callables(r: Resolved) -> list[tuple[str, str]]:
    """The functions and classes of a job, and the file of each; the current folder for what is typed in a session."""
    calls = [r.info.call, *(step.call for step in (*r.job.steps, *r.job.post))]
    found = []
    for target in [call.target for call in calls if call is not None]:
        code = import_target(target) if isinstance(target, str) else target
        file = getattr(sys.modules.get(getattr(code, "__module__", "")), "__file__", None)
        found.append((getattr(code, "__qualname__", type(code).__qualname__), os.path.realpath(file or os.getcwd())))
    return found

"""Jobs as fault tests run them, here or in a process apart: one function, plain arguments."""

from __future__ import annotations

from typing import Any

import victims
from recording import Harm, Recorded

import gristmill as gm
from gristmill.running import Run, Verbs


def job(source: Any, sink: str, fn: str, args: dict[str, Any] | None = None, **options: Any) -> gm.Job:
    """A function of victims.py over a source, keeping ids."""
    keep = options.pop("keep", ["id"])
    model = gm.model(getattr(victims, fn), **(args or {}))
    return gm.Job(source, model, gm.sink(sink, keep=keep), **options)


def run(
    source: Any,
    sink: str,
    fn: str,
    args: dict[str, Any] | None = None,
    journal: str = "",
    harm: dict[str, Any] | None = None,
    verbs: dict[str, Any] | None = None,
    **options: Any,
) -> gm.Report:
    """Run it; on a recorded file layer, where a journal is given."""
    if harm and "ops" in harm:
        harm = {**harm, "ops": tuple(harm["ops"])}
    files = Recorded(journal, Harm(**harm) if harm else None) if journal else None
    return Run(job(source, sink, fn, args, **options).spec, Verbs(**(verbs or {})), files=files).run()

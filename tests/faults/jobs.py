"""Jobs as fault tests run them, here or in a process apart: one function, plain arguments."""

from __future__ import annotations

from typing import Any

import victims
from recording import Harm, Recorded

import gristmill as gm
from gristmill.driver.opening import Verbs
from gristmill.driver.run import finish
from gristmill.job.options import EngineSpec


def job(source: Any, sink: Any, fn: str, args: dict[str, Any] | None = None, **options: Any) -> gm.Job:
    """A function of victims.py over a source, keeping ids, no gate. `engine` may be the fields of an EngineSpec."""
    keep, form = options.pop("keep", ["id"]), options.pop("format", None)
    options.setdefault("gates", {"min_ok": 0.0})  # what becomes of rows is looked at, however many die
    model = gm.model(getattr(victims, fn), **(args or {}))
    if "engine" in options:
        options["engine"] = engine_of(options["engine"])
    return gm.Job(source, model, gm.sink(sink, keep=keep, format=form) if isinstance(sink, str) else sink, **options)


def engine_of(fields: dict[str, Any]) -> EngineSpec:
    """An engine from plain values, as a process apart is given them."""
    return EngineSpec(**fields)


def run(
    source: Any,
    sink: Any,
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
    return finish(job(source, sink, fn, args, **options).spec, Verbs(**(verbs or {})), files=files).report

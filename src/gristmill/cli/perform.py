"""Running, or previewing, a job that a command has put together, and showing what comes of it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gristmill import ahead
from gristmill.cli.ending import hide
from gristmill.errors import BadJob, GristmillError, Interrupted
from gristmill.observe import units
from gristmill.observe.events import Observer
from gristmill.observe.logging import logged
from gristmill.observe.progress import make_observer
from gristmill.observe.report import Report
from gristmill.observe.tables import Table
from gristmill.plan.job import JobSpec
from gristmill.plan.secret import secrets_in

_THREADS = "OPENBLAS_NUM_THREADS"


def perform(spec: JobSpec, given: Mapping[str, Any]) -> int:
    """Save, preview or run a job as the flags in `given` say; returns the exit code."""
    if given["restart"] and given["append"]:
        raise BadJob("--restart and --append: the first scores all rows anew, the second only new files; give one")
    verbs = {name: given[name] for name in ("restart", "append", "accept")}
    if given["preview"] is not None and (said := [f"--{name}" for name, value in verbs.items() if value]):
        raise BadJob(f"--preview and {said[0]}: a preview writes nothing, and no job remembers {said[0]}; give one")
    if given["save"]:
        save(spec, given["save"])
    if given["preview"] is not None:
        return preview(spec, given)

    def whole(observer: Observer) -> Report:
        ahead.start(spec)  # before anything that takes long to import
        gc.disable()  # see engines.local.serve
        try:
            if spec.source.data is None and spec.engine.workers != 0 and not spec.audit:
                _import_arrow()
            from gristmill.cli.remembered import remember
            from gristmill.running import run, sink_place
        finally:
            gc.enable()
        report = run(spec, **verbs, observer=observer)
        if spec.sink is not None and report.state == "done":
            remember(spec, *sink_place(spec.sink))
        return report

    return shown(spec, given, whole)


def _import_arrow() -> None:
    """Import pyarrow and numpy as a process needs them that runs no user code; workers are left alone.

    With the first array that it makes pyarrow imports pandas, where it is installed (0.2 to 0.3 s, measured), and
    numpy's OpenBLAS starts a thread a core, which turn idly for a while (0.03 s of CPU): neither is for a driver.
    """
    if "pandas" in sys.modules:
        return
    threads = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    later = _PandasLater()
    sys.meta_path.insert(0, later)
    try:
        import pyarrow as pa

        pa.array([0])
    finally:
        later.now = True
        del os.environ[_THREADS]
        if threads is not None:
            os.environ[_THREADS] = threads


class _PandasLater:
    """Keeps pyarrow from importing pandas by itself. Where a module of the user's, which the job is described by,
    imports it, pyarrow is to know it again: else it would read a Series there otherwise than anywhere else.
    """

    now = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname != "pandas":
            return
        if not self.now:
            raise ImportError("pandas is left out here")
        import pyarrow as pa

        sys.meta_path.remove(self)
        pa.lib._pandas_api.__init__()  # asks once, and remembers that it found none


def shown(spec: JobSpec, given: Mapping[str, Any], work: Callable[[Observer], Report]) -> int:
    """Do the work under an observer, and show its report, also that of a run which failed."""
    try:
        with watched(spec, given["progress"]) as observer:
            report = work(observer)
    except (GristmillError, Interrupted) as error:
        if error.report is not None:
            with suppress(BrokenPipeError):
                show(error.report, given)
        raise
    show(report, given)
    return 0


def preview(spec: JobSpec, given: Mapping[str, Any]) -> int:
    """Score some rows and print them, and those that failed beside them. Raises RunFailed where all did."""
    from gristmill.observe.tables import of_arrow
    from gristmill.viewing import preview as some

    with watched(spec, given["progress"]) as observer:
        found = some(spec, given["preview"], observer)
    if given["as_json"]:
        print_rows(found.rows)
    else:
        of_arrow(found.rows, title=f"{units.plural(found.rows.num_rows, 'row')}, nothing was written").show(sys.stdout)
    if found.dead.num_rows:
        _failed(found.dead).show(sys.stderr if given["as_json"] else sys.stdout)
    if (failure := found.failure()) is not None:
        raise failure
    return 0


def _failed(dead: Any) -> Table:
    """The rows of a preview that failed."""
    rows = tuple(
        (f"{os.path.basename(row['source'])}:{row['position']}", row["stage"], row["error"], row["message"])
        for row in dead.to_pylist()
    )
    return Table(("row", "stage", "error", "message"), rows, title=f"{units.plural(len(rows), 'row')} failed")


@contextmanager
def watched(spec: JobSpec, kind: Any) -> Iterator[Observer]:
    """The observer of a run: what --progress says, and the job's log file. Secrets reach neither, nor errors."""
    secrets = list(secrets_in(spec))
    hide(secrets)
    bar = make_observer("lines" if kind == "auto" and os.environ.get("TERM") == "dumb" else kind, sys.stderr)
    with logged(bar, spec.running.log, secrets) as observer:
        yield observer


def save(spec: JobSpec, path: str) -> None:
    """Write the job as a job file. Raises BadJob rather than replace a file that says something else."""
    from gristmill.plan.jobfile import dump

    text = f"# Runs the same with: gristmill run {path}\n{dump(spec)}"
    try:
        with open(path, encoding="utf-8") as file:
            if file.read() == text:
                return
        raise BadJob(f"--save {path}: the file is there and says something else: remove it, or give another name")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as e:
        raise BadJob(f"--save {path}: {e}") from None
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as e:
        raise BadJob(f"--save {path}: cannot be written: {e.strerror}") from None


def print_rows(table: Any) -> None:
    """An Arrow table as JSON lines on stdout."""
    import json

    for batch in table.to_batches(max_chunksize=256):
        for row in batch.to_pylist():
            sys.stdout.write(json.dumps(row, default=str, ensure_ascii=False) + "\n")


def show(report: Report, given: Mapping[str, Any]) -> None:
    """The report on stdout: as a table, or as one JSON object; with --progress json also as the last line on stderr."""
    import json

    from gristmill.observe.jsonlog import of_report
    from gristmill.observe.report import show_report

    if given["progress"] == "json":
        from gristmill.observe.streams import Sturdy

        Sturdy(sys.stderr).write(of_report(report) + "\n")
    if given["as_json"]:
        sys.stdout.write(json.dumps(report.as_dict(), default=str, ensure_ascii=False) + "\n")
    else:
        show_report(report, sys.stdout)

"""Running, or previewing, a job that a command has built, and showing the result."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from gristmill.cli.ending import hide
from gristmill.driver import warmup
from gristmill.errors import BadJob, GristmillError, Interrupted
from gristmill.job.job import JobSpec
from gristmill.job.recipients import hidden_in
from gristmill.job.secret import HIDDEN, scrub, secrets_in
from gristmill.job.secretnames import names_secret
from gristmill.job.uris import redact
from gristmill.observe import units
from gristmill.observe.events import Observer
from gristmill.observe.observers import logged
from gristmill.observe.progress import make_observer
from gristmill.observe.report import Report
from gristmill.observe.tables import Table

NO_SECRETS = re.compile(r"--key|(source|update|deliver\.\d+)\.key")  # options called like secrets, which name columns
_EXPRESSIONS = ("--where", "--query", "--prompt", "--system")
_THREADS = "OPENBLAS_NUM_THREADS"


def perform(spec: JobSpec, given: Mapping[str, Any]) -> int:
    """Save, preview or run a job, depending on the flags in `given`; returns the exit code."""
    if given["restart"] and given["append"]:
        raise BadJob(
            "--restart and --append: the first scores all rows again, the second only new files; give one of them"
        )
    if given["append"] and spec.update is not None:
        what = "--update" if given["update"] else "the job's update"
        raise BadJob(
            f"--append and {what}: an update scores new files, and what changed in the others besides: leave out "
            "--append"
        )
    verbs = {name: given[name] for name in ("restart", "append", "accept")}
    if given["preview"] is not None and (said := [f"--{name}" for name, value in verbs.items() if value]):
        raise BadJob(
            f"--preview and {said[0]}: a preview writes nothing, and a job file does not hold {said[0]}; give one of "
            "them"
        )
    if not given["save"]:
        return _performed(spec, given, verbs)
    new = save(replace(spec, on_new_files="append") if given["append"] else spec, given["save"])
    try:
        return _performed(spec, given, verbs)
    except GristmillError as error:
        if new and error.exit_code == BadJob.exit_code:  # nothing was run: the corrected command may save its own
            os.unlink(given["save"])
        raise


def _performed(spec: JobSpec, given: Mapping[str, Any], verbs: Mapping[str, bool]) -> int:
    if given["preview"] is not None:
        return preview(spec, given)

    warmup.start(spec)  # before any slow import, of which `shown` needs some
    with _uncollected():
        if spec.source.data is None and spec.engine.workers != 0 and not spec.audit:
            _import_arrow()

    def whole(observer: Observer) -> Report:
        with _uncollected():
            from gristmill.cli.lastjob import remember
            from gristmill.driver.opening import sink_place
            from gristmill.driver.run import run
        report = run(spec, **verbs, tick=given.get("scheduled"), observer=observer, typed=typed(spec))
        if spec.sink is not None and report.state == "done":
            remember(spec, *sink_place(spec.sink))
        return report

    return shown(spec, given, whole)


def typed(spec: JobSpec) -> tuple[str, ...]:
    """What was typed, for those who want to type it again, without secrets: of addresses of alerts only the host, and
    no value whose name says that it is one. Nothing if the job has one that is written out, whose other forms nobody
    knows.
    """
    from gristmill.cli.lastjob import holds_secret

    if holds_secret(spec):
        return ()
    secrets = [*secrets_in(spec), *hidden_in([*spec.alerts, *spec.metrics, *spec.lineage])]
    words, flag = ["gristmill"], ""
    for word in sys.argv[1:]:
        words.append(redact(scrub(_without_secret(word, flag), secrets)))
        flag = word if word.startswith("--") and "=" not in word else ""
    return tuple(words)


def _without_secret(word: str, flag: str) -> str:
    """A word of a command line, after `flag`, if that is one, without the value of a secret: --flag=VALUE, the VALUE of
    a flag, or NAME=VALUE as that. Folders of a partition (`key=5/`) and conditions are none.
    """
    if word.startswith("--") and "=" in word:
        flag, _, value = word.partition("=")
        return f"{flag}={_without_secret(value, flag)}"
    if not flag or word.startswith("--") or flag in _EXPRESSIONS:
        return word
    if _names_secret(flag):
        return HIDDEN
    name, equals, _ = word.partition("=")
    return f"{name}={HIDDEN}" if equals and "/" not in name and _names_secret(name) else word


def _names_secret(name: str) -> bool:
    return names_secret(name) and not NO_SECRETS.fullmatch(name)


@contextmanager
def _uncollected() -> Iterator[None]:
    """While modules are imported, as engines.serving has it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _import_arrow() -> None:
    """Import pyarrow and numpy in the way a process without user code needs them; workers are not affected.

    With the first array that it creates pyarrow imports pandas, if it is installed (0.2 to 0.3 s, measured), and
    numpy's OpenBLAS starts a thread per core, which spin for a while (0.03 s of CPU): a driver needs neither.
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
    """Keeps pyarrow from importing pandas by itself. If a module of the user's, which describes the job, imports it,
    pyarrow must learn of it: else it would read a Series differently there than anywhere else.
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
    """Do the work under an observer, and show its report, even that of a failed run."""
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
    """Score some rows and print them, with those that failed. Raises RunFailed if all did."""
    from gristmill.driver.views import preview as some
    from gristmill.observe.tables import of_arrow

    with watched(spec, given["progress"]) as observer:
        found = some(spec, given["preview"], observer)
    if given["as_json"]:
        print_rows(found.rows)
    else:
        what = units.plural(found.rows.num_rows, "row")
        if found.filtered and not found.rows.num_rows and not found.dead.num_rows:
            what = f"0 rows: filters left out all {found.filtered:,} that were read; the model was not called"
        of_arrow(found.rows, title=f"{what}, nothing was written").show(sys.stdout)
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


def shown_by(kind: Any) -> Observer:
    """The observer of --progress, on stderr."""
    return make_observer("lines" if kind == "auto" and os.environ.get("TERM") == "dumb" else kind, sys.stderr)


@contextmanager
def watched(spec: JobSpec, kind: Any) -> Iterator[Observer]:
    """The observers of a run: that of --progress, and the job's log file. Secrets reach neither of them, nor errors."""
    from gristmill.driver.apart import check_files

    secrets = list(secrets_in(spec))
    hide(secrets)
    check_files(spec)
    with logged(shown_by(kind), spec.running.log, secrets) as observer:
        yield observer


def save(spec: JobSpec, path: str) -> bool:
    """Write the job as a job file; whether it was not there before. Raises BadJob rather than replace a file with other
    content.
    """
    from gristmill.jobfile.writing import dump

    text = f"# Runs the same with: gristmill run {path}\n{dump(spec)}"
    try:
        with open(path, encoding="utf-8") as file:
            if file.read() == text:
                return False
        raise BadJob(f"--save {path}: the file exists and has other content: remove it, or give another name")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as e:
        raise BadJob(f"--save {path}: {e}") from None
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as e:
        raise BadJob(f"--save {path}: cannot be written: {e.strerror}") from None
    return True


def print_rows(table: Any) -> None:
    """An Arrow table as JSON lines on stdout."""
    import json

    from gristmill.arrow.topython import to_rows

    for first in range(0, table.num_rows, 256):
        for row in to_rows(table.slice(first, 256)):
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

"""A run: a job's rows are scored and published in phases, each a frozen value built from the one before: opened
(opening.py), chosen (choice.py), planned (probe.py), scored (scoring.py), published (publishing.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import replace
from datetime import datetime

from gristmill.commit import generation as generations
from gristmill.commit import publication
from gristmill.commit.receipt import Receipt
from gristmill.driver import delivering, drifting, indexing, paces, selection, summary
from gristmill.driver.choice import chosen
from gristmill.driver.notices import Telling, told
from gristmill.driver.opening import Command, Opened, Verbs, opened
from gristmill.driver.publishing import Published, published, untouched
from gristmill.driver.scoring import Scoring
from gristmill.engines.interpreter import SPARES
from gristmill.errors import GristmillError, Interrupted, RunFailed
from gristmill.files.contract import Files
from gristmill.job.job import JobSpec
from gristmill.job.uris import file_of
from gristmill.observe.events import Observer
from gristmill.observe.report import Report
from gristmill.process import lasting
from gristmill.process.machine import Stops
from gristmill.process.startup import starting
from gristmill.sources.patience import StoreAway


def run(
    spec: JobSpec,
    *,
    restart: bool = False,
    append: bool = False,
    accept: bool = False,
    tick: datetime | None = None,
    observer: Observer | None = None,
    typed: Sequence[str] = (),
) -> Report:
    """Run a job to its end, or resume it where it stopped. Returns the report of what is published. A deadline counts
    from `tick`, the time that the run was scheduled for, or else from now. `typed` is what was typed on a command
    line, for the record of the run.

    Raises BadJob (nothing was run), PlanChanged, SinkBusy, GateFailed, RunFailed, Interrupted; those raised after rows
    were scored carry `.report`.
    """
    return _whole(spec, Verbs(restart, append, accept, tick=tick, timed=True), observer, typed)


def retry_dead(
    spec: JobSpec,
    *,
    accept_code_change: bool = False,
    observer: Observer | None = None,
    typed: Sequence[str] = (),
) -> Report:
    """Score the dead letters of a job's live result again. Rows that succeed are published after the others, in files
    of their own, even if the result was one file.

    Raises PlanChanged if the code has changed and that was not accepted, if anything else has changed, or if the steps
    make other rows of a source row than before, so that a dead one among them is not found again.
    """
    return _whole(spec, Verbs(retry=True, accept_code_change=accept_code_change), observer, typed)


def _whole(spec: JobSpec, verbs: Verbs, observer: Observer | None, typed: Sequence[str]) -> Report:
    starting("a job")
    with lasting.during(spec.engine):
        done = finish(spec, verbs, observer, typed=typed)
        if done.later:  # an unfinished plan was finished as planned; now the files that appeared since, at which nobody
            # who accepts could look
            then = replace(verbs, restart=False, append=spec.update is None, accept=False, spent=done.spent)
            done = finish(spec, then, observer, typed=typed)
    return done.report


def finish(
    spec: JobSpec,
    verbs: Verbs | None = None,
    observer: Observer | None = None,
    *,
    files: Files | None = None,
    typed: Sequence[str] = (),
) -> Published:
    """One run, to its end; `files` replaces the sink's own file layer."""
    command = Command.of(spec, verbs, observer, False, files, typed)
    try:
        next(_in_steps(command))
    except StopIteration as e:
        done: Published = e.value
        return done
    raise AssertionError("a run that is no stream gives nothing away")


def streamed(spec: JobSpec, observer: Observer | None = None) -> Generator[Receipt, None, Published]:
    """One run, which yields its receipts in plan order as they come. Between receipts signals belong to the program,
    which may ask for the next one in another thread.
    """
    with lasting.during(spec.engine):
        return (yield from _in_steps(Command.of(spec, None, observer, True, None)))


def _in_steps(command: Command) -> Generator[Receipt, None, Published]:
    stops = Stops()
    phases = _phases(command, stops)
    try:
        while True:
            with stops.caught():
                try:
                    done = next(phases)
                except StopIteration as e:
                    published: Published = e.value
                    return published
            yield done
    finally:
        with stops.caught():
            phases.close()


def _phases(command: Command, stops: Stops) -> Generator[Receipt, None, Published]:
    done: Published | None = None
    try:
        with told(command) as telling:
            done = yield from _told_phases(command, stops, telling)
            telling.done(done.report)
        return done
    finally:
        SPARES.end()
        SPARES.expect_another()
        if done is None or not done.later:
            command.log.observer.close()


def _told_phases(command: Command, stops: Stops, telling: Telling) -> Generator[Receipt, None, Published]:
    scoring: Scoring | None = None
    try:
        delivering.reached(command)
        with opened(command) as at, chosen(at) as choice:
            if choice is None:
                telling.idle(at)
                done = untouched(at)
            else:
                if choice.plan is not None:
                    indexing.fitting(choice, choice.plan.about)
                    delivering.fitting(choice, choice.plan.about)
                drifting.ready(choice)
                telling.began(choice)
                scoring = Scoring(choice, stops)
                telling.scoring(scoring)
                with stops.heeded():
                    scored = yield from scoring.run()
                scoring.on_time.refuse_late()
                done = replace(published(scored), spent=scoring.spent)
            if not done.later:  # else once the files that appeared since are in the result, too
                done = replace(done, report=delivering.delivered(at, done.report))
            if scoring is not None:
                done = replace(done, report=_timed(at, scoring, done.report))
        return done
    except (GristmillError, Interrupted) as e:
        if e.report is None and scoring is not None:
            e.report = summary.stopped(scoring)
        raise
    except OSError as e:  # a full or failing disk; workers report theirs as an outcome
        report = None if scoring is None else summary.stopped(scoring)
        raise RunFailed(_words(command, e, scoring), report=report) from e


def _timed(at: Opened, scoring: Scoring, report: Report) -> Report:
    """The report with what is known of the run's time, which is remembered."""
    plan = scoring.at.plan
    on_time, updates = scoring.on_time, plan is not None and plan.about.updates is not None
    if at.verbs.timed and (pace := on_time.pace(report.shards_resumed, updates)) is not None:
        paces.remember(scoring.at.resolved, at.root, at.files, pace)
    told = on_time.told(at.log.seconds, at.spec.running.hour_price)
    return replace(report, details={**report.details, "on_time": told}) if told else report


def _words(command: Command, error: OSError, scoring: Scoring | None) -> str:
    """The message for an error of the disk or the store, and what to do about it."""
    uri, folder = command.sink.uri, generations.meta(command.root)
    kept = "nothing that was committed is lost"
    if scoring is not None and _is_published(command, scoring):
        made = ", also the file of that name" if file_of(command.root) else ""
        kept = f"the result is published, and the next run does what is left to do after that{made}"
    if isinstance(error, StoreAway):
        return f"{error}: {kept}; run again when it does"
    way = f"{kept}; run again when the {'store answers' if '://' in uri else 'disk is well'}"
    if isinstance(error, FileNotFoundError) and str(error.filename).startswith(folder):
        way = f"a file of the sink itself is gone (gristmill verify names it): put it back, or use {selection.RESTART}"
    return f"{uri}: {error}: {way}"


def _is_published(command: Command, scoring: Scoring) -> bool:
    """Whether what a run has scored is the result that readers see, as far as can be read."""
    with contextlib.suppress(OSError, GristmillError):
        found = publication.latest(command.root, command.files)
        return found is not None and found.generation == scoring.at.generation.number
    return False

"""What a run tells others: its record in the sink, and, where the job names somebody, alerts, metrics and lineage. None
of it can fail the run: records are a courtesy, and all else is sent by threads of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import pyarrow as pa

from gristmill import __version__
from gristmill.commit import drift, publication
from gristmill.commit.generation import decode_schema, meta
from gristmill.driver import runrecord
from gristmill.driver.choice import Chosen
from gristmill.driver.opening import Command, Opened
from gristmill.driver.probe import Planned
from gristmill.driver.scoring import Scoring
from gristmill.errors import DeadlineMissed, GateFailed, GristmillError, Interrupted, NewerFormat, SinkBusy, in_one_line
from gristmill.files.disk import LOCAL, join
from gristmill.fingerprint.diskcache import cache_folder
from gristmill.job.job import JobSpec
from gristmill.job.recipients import hidden_in
from gristmill.job.uris import file_of, is_local, local_path, redact
from gristmill.observe.events import Note, Progress
from gristmill.observe.facts import Pace, Run, Slow
from gristmill.observe.incidents import Book
from gristmill.observe.progress import Several
from gristmill.observe.report import Report
from gristmill.observe.standing import LATE, NOT_DELIVERED, failed
from gristmill.observe.standing import way as way_on
from gristmill.observe.teller import Begun, Column, Data, Ended, Sign, Teller, Told
from gristmill.shards.shard import ShardTable

INCIDENTS = "incidents.json"


@contextlib.contextmanager
def told(c: Command) -> Iterator[Telling]:
    """Tell others of a run, whose report is given to `done`, and whose error is what comes out of the block. Raises
    BadJob if nobody can be told in the way that the job asks for.
    """
    telling = Telling(c)
    try:
        yield telling
    except GeneratorExit:  # a stream that is not read to its end
        telling.failed(Interrupted("given up"))
        raise
    except BaseException as e:
        telling.failed(e)
        raise
    with contextlib.suppress(Interrupted):  # the result is published: who stops now stops only the telling
        telling.well()


class Telling:
    """Tells of one run. It looks at progress and notes as an observer, and hears of the phases from the run."""

    def __init__(self, c: Command) -> None:
        self._c = c
        self._run = str(uuid.uuid4())
        self._started = time.time()
        self._record: Run | None = None
        self._pace = Pace()
        self._begun = self._idle = False
        self._output: Data | None = None
        self._report: Report | None = None
        self._scoring: Scoring | None = None
        spec = c.spec
        c.log.hide(hidden_in([*spec.alerts, *spec.metrics, *spec.lineage]))
        tellers = [] if c.stream else _tellers(c, spec)
        self._silent = not tellers
        self._told = Told(tellers)
        c.log.observer = Several([c.log.observer, self, self._told])

    # ------------------------------------------------ as an observer

    def progress(self, now: Progress) -> None:
        """Keep how many rows were done when."""
        if now.phase in ("running", "publishing"):
            self._pace.take(now.elapsed, now.rows_done)

    def note(self, note: Note) -> None:
        """Does nothing: the log keeps notes."""

    def close(self) -> None:
        """Does nothing."""

    # ------------------------------------------------ the phases

    def idle(self, at: Opened) -> None:
        """There is nothing to do."""
        self._idle = True
        if not self._silent:
            self._begin(self._of(at))
            self._left_out(at)

    def began(self, at: Chosen) -> None:
        """There is something to do: write a record, and tell that it begins."""
        died, g = list[Run](), at.generation
        self._record = replace(self._new(), generation=g.number, kind=g.kind)
        if not self._c.stream:
            with contextlib.suppress(OSError):
                died = runrecord.begun(at.root, at.files, self._record)
        if self._silent:
            return
        gone = tuple((one.run, runrecord.died_how(one)) for one in died)
        self._begin(replace(self._of(at), generation=g.number, kind=g.kind, died=gone))
        self._left_out(at)

    def _new(self) -> Run:
        spec = self._c.spec
        return Run(
            run=self._run, generation=0, kind="", state=runrecord.RUNNING, started=self._started,
            host=socket.gethostname(), pid=os.getpid(), version=__version__, command=self._c.typed, folder=os.getcwd(),
            engine=spec.engine.name, model=spec.model.name,
        )  # fmt: skip

    def scoring(self, scoring: Scoring) -> None:
        """What is being scored, of which the record has the figures at the end."""
        self._scoring = scoring

    def done(self, report: Report) -> None:
        """The run is done, and this is its report."""
        self._report = report

    # ------------------------------------------------ the end

    def well(self) -> None:
        """The run ended well."""
        report = self._report
        assert report is not None
        if report.state == "done" and not self._silent:
            self._output = self._published()
        self._end(report.state, report, None)

    def failed(self, error: BaseException) -> None:
        """The run ended with an error."""
        report = getattr(error, "report", None)
        if isinstance(error, SinkBusy) and not self._begun:
            return  # another run has the sink, and tells of itself
        state = "stopped" if isinstance(error, Interrupted) else "gate failed" if isinstance(error, GateFailed) else ""
        self._end(state or "failed", report if isinstance(report, Report) else None, error)

    def _end(self, state: str, report: Report | None, error: BaseException | None) -> None:
        c, way = self._c, ""
        text, code = "", 0
        if error is not None:
            text = c.log.scrubbed(in_one_line(error))
            text = text if isinstance(error, (GristmillError, Interrupted)) else f"{type(error).__name__}: {text}"
            code = int(getattr(error, "exit_code", 1))
        now = self._ended(_kept_as(state, report, error), report, text, code)
        if failed(now):
            way = str(way_on(now))
        if not c.stream and not isinstance(error, NewerFormat):  # a sink of a later version is left as it is
            with contextlib.suppress(OSError, GristmillError, RuntimeError):  # no home, for one
                self._keep(now)
        if self._silent:
            return
        if not self._begun:
            self._begin(self._named())
        end = Ended(
            state, time.time(), round(c.log.seconds, 3), _sign(error, text), text, code, way=way,
            **({} if report is None else _counts(report)), output=self._output,
            assertions=_gates(c.spec, state, report), published=self._published_at(),
        )  # fmt: skip
        for line in self._told.ended(end):
            c.log.note("warning", f"not told: {line}")

    def _ended(self, state: str, report: Report | None, text: str, code: int) -> Run:
        scoring = self._scoring
        now = replace(
            self._record or self._new(), state=state, seconds=round(self._c.log.seconds, 3), error=text, exit_code=code,
            notes=tuple(self._c.log.notes[-20:]), phases=_rounded(self._c.log.phases),
        )  # fmt: skip
        if scoring is not None and isinstance(scoring.at, Planned):
            sums, shards = scoring.tally.sums(), scoring.at.plan.shards
            now = replace(
                now, rows=sums.rows_run, shards=len(shards), shards_done=sums.shards_done, per_worker=sums.per_worker,
                slowest=tuple(_placed(one, shards) for one in sums.slowest), workers=scoring.at.resolved.workers,
                rows_ok=sums.counts.ok, rows_dead=sums.counts.all_dead, rows_filtered=sums.counts.all_filtered,
                used=dict(sums.used), threads={name: _rounded(took) for name, took in sums.threads.items()},
                pace=self._pace.points(now.seconds, scoring.tally.rows_done),
            )  # fmt: skip
        if report is not None:
            now = replace(now, busy=report.busy, padding=report.padding, drift=report.drift)
        return now

    def _keep(self, now: Run) -> None:
        """Keep the record of a run that began something; of others only of one that failed, or that shows that what
        failed before is well again.
        """
        root, files = self._c.root, self._c.files
        if self._record is not None:
            runrecord.ended(root, files, now)
        elif self._idle and now.exit_code == 0:
            before = runrecord.last(root, files, "")
            if before is not None and failed(before):
                runrecord.note(root, files, now)
        elif now.exit_code != Interrupted.exit_code:
            runrecord.note(root, files, now)

    # ------------------------------------------------ as values

    def _begin(self, run: Begun) -> None:
        self._begun = True
        self._told.began(run)

    def _left_out(self, at: Opened) -> None:
        if bad := at.resolved.skipped:
            files = tuple(self._c.log.scrubbed(one.partition(": ")[0]) for one in bad)
            self._told.raised(Sign("skipped", self._c.log.scrubbed("; ".join(bad)), files))

    def _named(self) -> Begun:
        root = self._c.root
        name = file_of(root) or root
        return Begun(name, self._run, name, self._started, self._c.spec.model.name, engine=self._c.spec.engine.name)

    def _of(self, at: Opened) -> Begun:
        r, latest = at.resolved, publication.latest(at.root, at.files)
        schema = None if latest is None else decode_schema(latest.body.output_schema)
        if isinstance(at, Chosen) and at.plan is not None:
            schema = at.plan.schema
        output = Data(self._named().sink, () if schema is None else _columns(schema, at))
        inputs = _inputs(at)
        published = None if latest is None else _seconds(latest.body.published)
        return replace(self._named(), digest=r.info.digest, inputs=inputs, output=output, published=published)

    def _published_at(self) -> float | None:
        """When what the sink holds was published."""
        with contextlib.suppress(OSError, GristmillError):
            found = publication.latest(self._c.root, self._c.files)
            return None if found is None else _seconds(found.body.published)
        return None

    def _published(self) -> Data | None:
        """What the sink holds now."""
        c, scoring = self._c, self._scoring
        with contextlib.suppress(OSError, GristmillError):
            body = publication.published(c.root, c.files).body
            at = None if scoring is None else scoring.at
            columns = () if at is None else _columns(decode_schema(body.output_schema), at)
            report = self._report
            size = (None, None) if report is None else (report.bytes_out, report.files)
            return Data(self._named().sink, columns, body.rows_ok, *size)
        return None


def _kept_as(state: str, report: Report | None, error: BaseException | None) -> str:
    """The state of a run in its record."""
    if isinstance(error, DeadlineMissed):
        return LATE
    return report.state if report is not None and report.state == NOT_DELIVERED else state


def _tellers(c: Command, spec: JobSpec) -> list[Teller]:
    found: list[Teller] = []
    if spec.alerts:
        from gristmill.observe.alerts import Alerts

        found.append(Alerts(spec.alerts, lambda state: _book(c, state)))
    if spec.metrics:
        from gristmill.observe.metrics import gauges

        found += [gauges(to) for to in spec.metrics]
    if spec.lineage:
        from gristmill.observe.lineage import Events

        found += [Events(to) for to in spec.lineage]
    return found


def _book(c: Command, state: str | None) -> Book:
    job = file_of(c.root) or c.root
    if state is not None:
        return Book(job, local_path(state), LOCAL)
    instead = cache_folder() / "incidents" / f"{hashlib.sha256(c.root.encode()).hexdigest()[:32]}.json"
    return Book(job, join(meta(c.root), INCIDENTS), c.files, folder=meta(c.root), instead=str(instead))


def _sign(error: BaseException | None, text: str) -> Sign | None:
    """The incident that an error makes. Who presses Ctrl-C knows it; a stop by somebody else's SIGTERM is told."""
    code = int(getattr(error, "exit_code", 1))
    if error is None or (isinstance(error, Interrupted) and code != 143):
        return None
    if isinstance(error, GateFailed):
        found = getattr(error.report, "drift", ())
        if any(d.verdict == "failed" for d in found):
            return Sign("drift", text, (*drift.refused(found), *error.gates))
        return Sign(error.incident, text, error.gates)
    kind = error.incident if isinstance(error, GristmillError) else "failed"
    return Sign(kind, text, (f"exit {code}",)) if kind else None


def _gates(spec: JobSpec, state: str, report: Report | None) -> tuple[tuple[str, bool], ...]:
    """The gates, and whether they held: also those that somebody has set aside (--accept)."""
    if state not in ("done", "gate failed") or report is None:
        return ()
    counts, limit = report.counts, spec.gates
    enough = counts.all_dead <= limit.allowed(counts.ok + counts.all_dead)
    return (("rows_accounted_for", counts.discrepancy() is None), (f"min_ok {limit.min_ok}", enough),
            ("all gates", state == "done" and enough))  # fmt: skip


def _counts(report: Report) -> dict[str, Any]:
    rows = {name: getattr(report, name) for name in ("rows_in", "rows_ok", "rows_dead", "rows_filtered", "rows_run")}
    return {**rows, "shards_done": report.shards_done, "errors": dict(report.errors)}


def _placed(one: Slow, shards: ShardTable) -> Slow:
    """A slow shard with where its first rows are in the source."""
    piece = shards[one.shard].pieces[0]
    return replace(one, source=piece.file.path, start=piece.ranges[0][0], stop=piece.ranges[-1][1])


def _inputs(at: Opened) -> tuple[Data, ...]:
    r, source = at.resolved, at.spec.source
    columns = tuple(Column(f.name, str(f.type)) for f in r.schema)
    uris = [_address(uri) for uri in source.uri] or ["memory://table"]
    if len(uris) > 1:  # of which each is a data set, and only all together were counted
        return tuple(Data(uri, columns) for uri in uris)
    return (Data(uris[0], columns, r.rows, r.bytes, len(r.files), dict(r.nulls)),)


def _address(uri: str) -> str:
    return redact(uri) if not is_local(uri) else os.path.abspath(local_path(redact(uri)))


def _columns(schema: pa.Schema, at: Opened) -> tuple[Column, ...]:
    """The output's columns, with those of the source that they are made of: as far as is known without knowing what
    code does, which may make any column of any.
    """
    r, spec = at.resolved, at.spec
    code = any(step.kind != "filter" for step in spec.steps) or bool(spec.post)
    source = tuple(r.schema.names)
    reads = source if code or r.info.columns is None else r.info.columns
    keep = r.keep or ()
    found = []
    for f in schema:
        kept = f.name in keep and f.name in source
        of: Sequence[str] = (f.name,) if kept and not code else reads
        if spec.sink is not None and f.name in (spec.sink.row_id, spec.sink.model_version):
            of = spec.sink.key if f.name == spec.sink.row_id else ()
        found.append(Column(f.name, str(f.type), tuple(of), kept and not code))
    return tuple(found)


def _seconds(published: str) -> float | None:
    with contextlib.suppress(ValueError):
        return datetime.strptime(published, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    return None


def _rounded(took: Mapping[str, float]) -> dict[str, float]:
    """Seconds without those that went into nothing, in milliseconds."""
    return {what: round(seconds, 3) for what, seconds in took.items() if seconds >= 0.0005}

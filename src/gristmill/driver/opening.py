"""The first phase of a run: check and lease the sink, and resolve the job over its source as it is now."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from gristmill.commit import generation as generations
from gristmill.commit import inspections, onefile, publication
from gristmill.commit import publish as publishing
from gristmill.driver import pinning, planning, sinkcheck, warmup
from gristmill.driver.resolved import Resolved
from gristmill.driver.runlog import RunLog
from gristmill.errors import BadJob, CorruptStore, SinkBusy
from gristmill.files import roots
from gristmill.files.contract import Files, Lease
from gristmill.files.disk import LOCAL
from gristmill.job.delivery import STAGING, is_store, staging_of
from gristmill.job.job import JobSpec, Sink
from gristmill.job.secret import secrets_in
from gristmill.job.uris import file_named
from gristmill.observe.events import Observer, Silent
from gristmill.process.scratch import make_owned
from gristmill.snapshots.pinned import Pinned
from gristmill.values import dataclass

if TYPE_CHECKING:
    from gristmill.snapshots.pinning import Pinning


def sink_root(sink: Sink) -> str:
    """The sink's root: a folder as an absolute path, or a place in an object store. Raises BadJob for anything else."""
    return sink_place(sink)[0]


def sink_place(sink: Sink) -> tuple[str, Files]:
    """The sink's root, which has no secrets in it, and the file layer that opens it."""
    sink = in_folder(sink)
    return roots.opened(sink.uri, sink.storage)


def in_folder(sink: Sink) -> Sink:
    """The sink itself, for one that is a store which knows where its runs are. Raises what opening the store raises."""
    if not is_store(sink.uri):
        return sink
    storage = {name: value for name, value in sink.storage.items() if name != STAGING}
    return replace(sink, uri=staging_of(sink.uri, sink.storage), storage=storage)


@dataclass(frozen=True)
class Verbs:
    """What the user asked for on a sink that already holds something; the time that the run was scheduled for, which
    its deadline counts from; whether how long it takes is remembered for later ones (`timed`); and how many dollars of
    its max_cost it has `spent` before.
    """

    restart: bool = False
    append: bool = False
    accept: bool = False
    retry: bool = False
    accept_code_change: bool = False
    tick: datetime | None = None
    timed: bool = False
    spent: float = 0.0


@dataclass(frozen=True)
class Command:
    """One run of one job on one sink, as requested. A `stream` yields its receipts as they come."""

    spec: JobSpec
    sink: Sink  # without secrets
    root: str
    files: Files
    verbs: Verbs
    stream: bool
    log: RunLog
    typed: tuple[str, ...] = field(default=(), kw_only=True)  # on a command line, without secrets

    @staticmethod
    def of(
        spec: JobSpec, verbs: Verbs | None, observer: Observer | None, stream: bool, files: Files | None,
        typed: Sequence[str] = (),
    ) -> Command:  # fmt: skip
        """The command for a job; `files` replaces the sink's own file layer. Raises BadJob for a job without a sink."""
        if spec.sink is None:
            raise BadJob(
                "the job has no sink: give one (sink=…), take answers as they come with job.stream(), or use "
                "gm.apply(data, fn=…), gm.embed(data, …) or gm.classify(data, …) to get a table back"
            )
        spec = replace(spec, sink=in_folder(spec.sink))
        assert spec.sink is not None
        root, own = sink_place(spec.sink)
        shown = f"{root}/" if file_named(root) else root  # in a store, a folder
        sink = spec.sink if own is LOCAL else replace(spec.sink, uri=shown, storage={})
        log = RunLog(spec, sink.uri, observer or Silent())
        return Command(spec, sink, root, files or own, verbs or Verbs(), stream, log, typed=tuple(typed))

    @property
    def appends(self) -> bool:
        """Whether the user asked to append new files."""
        return self.verbs.append or self.spec.on_new_files == "append"

    @property
    def goes_on(self) -> bool:
        """Whether files that appeared since an unfinished run was planned are scored once that is done."""
        return self.appends or (self.spec.update is not None and not self.verbs.retry)

    @property
    def look(self) -> str:
        """How to read the dead letters before they are published; a stream's are deleted with its folder."""
        if self.stream:
            return "job.run() keeps them, so that you can look at them"
        return f"gristmill dead {shlex.quote(self.sink.uri)} shows them"


@dataclass(frozen=True)
class Opened(Command):
    """A sink that this run holds, and the job over its source as it is now."""

    lease: Lease
    resolved: Resolved

    def refuse_late(self) -> None:
        """Raises SinkBusy if another run took over this sink while this one was suspended."""
        if not self.lease.held():
            raise SinkBusy(
                f"{self.sink.uri}: another run took over this sink while this one was stopped: what is committed "
                "is kept; run again when the other one has ended"
            )


@contextlib.contextmanager
def opened(c: Command) -> Iterator[Opened]:
    """The sink, leased while inside. Raises BadJob and its subclasses, SinkBusy."""
    c.log.say(phase="planning")
    warmup.start(c.spec)
    look_at_sink(c.spec, c.files)
    with pinning.begun(c.spec, c.root, c.files, restart=c.verbs.restart, retry=c.verbs.retry) as stores:
        # Before the sink's folder is made, so that a job that cannot run leaves nothing behind.
        early = stores is None and c.spec.source.data is None
        yield from _leased(c, stores, resolved(_plannable(c), c.root, c.files) if early else None)


def _leased(c: Command, stores: Pinning | None, r: Resolved | None) -> Iterator[Opened]:
    folder = generations.meta(c.root)
    try:  # fail before anything is loaded if the sink cannot be written (fault 6)
        c.files.prove(folder)
    except OSError as e:
        raise BadJob(f"sink {c.sink.uri}: cannot be written ({e.strerror}): give another folder") from e
    with c.files.lease(c.sink.uri, folder, c.log.tell) as lease, pinning.swept(c.root, c.files, lease):
        if r is None and c.files.arrow() is not None:
            make_owned(generations.held_inputs(c.root, c.files))
        if stores is not None:
            r = resolved(_plannable(c), c.root, c.files, pinned=stores.pinned(c.log.tell))
        elif r is None:
            r = _with_data(c)
        c.log.hide(secrets_in(r.model))
        for note in r.warnings:
            c.log.note("warning", note)
        for one in r.registered:
            c.log.tell(f"{one.asked} is {one}: sha256 {one.digest[:12]}…")
        if r.nulls_given:
            c.log.tell(r.nulls_given)
        # The result that a stopped run had published; if it cannot be read, --restart replaces it.
        with contextlib.suppress(CorruptStore, FileNotFoundError):
            publishing.settle(c.root, c.files)
            if publication.latest(c.root, c.files) is not None:
                onefile.settle(c.root, r.sink_format, c.sink.options, c.sink.overwrite, c.files)
        yield Opened(**vars(c), lease=lease, resolved=r)


def look_at_sink(spec: JobSpec, files: Files | None = None) -> None:
    """Raises BadJob if a run of the job may not write into its sink. `files` replaces the sink's own file layer."""
    assert spec.sink is not None
    sink = in_folder(spec.sink)
    root, own = sink_place(sink)
    sinkcheck.refuse(spec.source, sink, root, files or own, manifest=not planning.sink_format_of(spec).tables)


def resolved(
    spec: JobSpec,
    root: str,
    files: Files,
    held_data: str | None = None,
    pinned: Pinned | None = None,
    first: int | None = None,
) -> Resolved:
    """A job over files, resolved with what its sink knows of them. Raises as `planning.resolve` does."""
    claims = generations.generations(root, files)
    written = generations.written(root, files)
    texts = next((g.fingerprint.texts for g in reversed(claims) if not g.lost), ())
    # The sink may hold a plan to resume, or a finished one: whether files differ matters only when a new one is begun.
    known = inspections.of_generations(claims)
    about: dict[str, Any] = {"begins": not claims, "texts": texts, "written": written, "pinned": pinned, "first": first}
    return planning.resolve(spec, held_data, known, **about)


def _with_data(c: Command) -> Resolved:
    """A job over a table in memory. The table is written beside the plan; for an object store, on this machine only, so
    that to resume there the job must supply the same table again.
    """
    held = generations.held_inputs(c.root, c.files)
    return planning.resolve(_plannable(c), held, written=generations.written(c.root, c.files))


def _plannable(c: Command) -> JobSpec:
    """The job as planning checks it: what the user has accepted must not be refused again for its null counts."""
    return c.spec if not c.verbs.accept else replace(c.spec, gates=replace(c.spec.gates, min_ok=0.0))

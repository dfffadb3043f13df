"""A run: drives an engine with a feed until every shard has a receipt, checks the gates, publishes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa

from gristmill import planning
from gristmill.commit import generation as generations
from gristmill.commit import publish as publishing
from gristmill.commit import receipt as receipts
from gristmill.commit.generation import Generation, Plan
from gristmill.commit.lease import Lease
from gristmill.commit.receipt import Receipt
from gristmill.commit.store import LocalFiles
from gristmill.engines.registry import open_engine
from gristmill.errors import BadJob, GateFailed, GristmillError, Interrupted, PlanChanged, RunFailed
from gristmill.feeding import ShardFeed
from gristmill.observe.events import Note, Observer, Progress, Silent
from gristmill.observe.report import Counts, Report
from gristmill.plan import fingerprint, shard
from gristmill.plan.contracts import Death, Event, Printed, Started, Tick, Waiting
from gristmill.plan.job import JobSpec, Sink
from gristmill.plan.shard import Piece, Selection, Shard
from gristmill.planning import Resolved
from gristmill.worker.recipe import Output, Reader, Recipe, Task
from gristmill.worker.work import ShardStages

PROBE_ROWS = 64


def run(
    spec: JobSpec,
    *,
    restart: bool = False,
    append: bool = False,
    accept: bool = False,
    observer: Observer | None = None,
) -> Report:
    """Run a job to its end, or go on where it stopped. Returns the report of what is published.

    Raises BadJob (nothing was run), PlanChanged, SinkBusy, GateFailed, RunFailed, Interrupted; those raised after rows
    were scored carry `.report`.
    """
    return Run(spec, restart=restart, append=append, accept=accept, observer=observer).run()


def sink_root(sink: Sink) -> str:
    """The sink's folder as an absolute path. Raises BadJob for what is not a local folder."""
    uri = sink.uri.removeprefix("file://")
    if "://" in uri:
        raise BadJob(f"sink {uri.partition('://')[0]}://…: only local folders can be sinks so far")
    if os.path.exists(uri) and not os.path.isdir(uri):
        raise BadJob(f"sink {uri}: is a file; a sink is a folder")
    return os.path.abspath(uri)


class Run:
    """One run of one job on one sink. `stream`, where given, gets every committed shard's receipt in plan order."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        restart: bool = False,
        append: bool = False,
        accept: bool = False,
        observer: Observer | None = None,
        stream: bool = False,
    ) -> None:
        if spec.sink is None:
            raise BadJob("the job has no sink: give one, or use gm.embed(data, …) without a sink to get a table back")
        self.spec = spec
        self.sink = spec.sink
        self.root = sink_root(spec.sink)
        self._restart, self._append, self._accept = restart, append or spec.on_new_files == "append", accept
        self._observer = observer or Silent()
        self._files = LocalFiles()
        self._begun = time.monotonic()
        self._signal = _Signals()
        self._stream = stream
        self._now = Progress(sink=spec.sink.uri, model=spec.model.name)
        self._said = 0.0
        self._workers_seen: set[str] = set()
        self._first_start: float | None = None
        self._ticking: dict[str, int] = {}
        self._notes: list[str] = []

    def run(self) -> Report:
        """See the module's `run`."""
        for _ in self.shards():
            pass
        return self.report

    def shards(self) -> Iterator[Receipt]:
        """The run, step by step: yields receipts in plan order where this is a stream, and nothing otherwise."""
        try:
            self._open_sink()
            with Lease(self.root, generations.meta(self.root)):
                yield from self._held()
        finally:
            self._observer.close()

    def _held(self) -> Iterator[Receipt]:
        self._say(phase="planning")
        held = os.path.join(generations.meta(self.root), "inputs")
        self.resolved = r = planning.resolve(self.spec, held)
        for note in r.notes:
            self._note("warning", note)
        self.generation, resumed = self._chosen(r)
        if self.generation is None:
            self.report = self._published_report("nothing to do")
            self._say(phase="done")
            return
        self._say(generation=self.generation.number)
        self.plan: Plan | None = generations.read_plan(self.generation) if resumed else None
        with self._signal.caught():
            yield from self._score(r)
        self._publish(r)

    # ------------------------------------------------ the sink

    def _open_sink(self) -> None:
        """Fails before anything is loaded where the sink cannot be written (fault 6) or holds others' files (fault 34)."""
        publishing.refuse_foreign(self.root, self.sink.overwrite)
        try:
            os.makedirs(generations.meta(self.root), exist_ok=True)
            probe = os.path.join(generations.meta(self.root), f"writable.{os.getpid()}.tmp")
            self._files.create(probe).close()
            self._files.remove(probe)
        except OSError as e:
            raise BadJob(f"sink {self.sink.uri}: cannot be written ({e.strerror}): give another folder") from e

    def _chosen(self, r: Resolved) -> tuple[Any, bool]:
        """The generation to work on and whether it is planned already; None where there is nothing to do."""
        known = generations.generations(self.root)
        body = generations.success(self.root)
        live = 0 if body is None else body["generation"]
        latest = known[-1] if known else None
        if latest is not None and latest.number > live:
            if not latest.planned:
                return latest, False
            lines = self._differences(latest, r, [latest])
            if not lines:
                return latest, True
            if not self._restart:
                raise PlanChanged(
                    f"{self.sink.uri}: an unfinished run is here, planned for something else:\n{fingerprint.listed(lines)}\n"
                    "put it back to resume that run, or --restart to begin anew"
                )
            return generations.claim(self._files, self.root, "restart"), False
        if latest is None:
            return generations.claim(self._files, self.root, "new"), False
        if self._restart:
            return generations.claim(self._files, self.root, "restart"), False
        return self._after_published(r, known, body or {})

    def _after_published(self, r: Resolved, known: list[Generation], body: dict[str, Any]) -> tuple[Any, bool]:
        members = [g for g in known if g.number in body["generations"]]
        lines = self._differences(members[0], r, [g for g in members if g.kind != "retry-dead"])
        if not lines:
            return None, True
        only_inputs = all(line.startswith("input:") for line in lines)
        stored = self._inputs([g for g in members if g.kind != "retry-dead"])
        if self._append and only_inputs and fingerprint.new_inputs_only(stored, r.fingerprint):
            self.resolved = only_new(r, stored)
            return generations.claim(self._files, self.root, "append", base=members[-1].number), False
        way = (
            "--append to score only new files, --restart to score everything anew"
            if only_inputs
            else "--restart to score everything anew"
        )
        raise PlanChanged(f"{self.sink.uri}: holds a result of something else:\n{fingerprint.listed(lines)}\nuse {way}")

    def _differences(self, planned: Generation, r: Resolved, members: list[Generation]) -> list[str]:
        old = generations.read_plan(planned).about["fingerprint"]
        inputs = self._inputs(members)
        now = r.fingerprint
        if planned.kind == "append" and members == [planned]:
            base = self._inputs(
                [g for g in generations.generations(self.root) if g.number < planned.number and g.planned]
            )
            now = replace(now, inputs={k: v for k, v in now.inputs.items() if k not in base})
        if members != [planned]:
            old = {**old, "inputs": fingerprint.digest_of(inputs)}
        return fingerprint.differences(old, now, inputs)

    def _inputs(self, members: list[Generation]) -> dict[str, str]:
        merged: dict[str, str] = {}
        for member in members:
            merged.update(generations.stored_inputs(member))
        return merged

    # ------------------------------------------------ scoring

    def _score(self, r: Resolved) -> Iterator[Receipt]:
        r = self.resolved
        done = {} if self.plan is None else receipts.listed(self.generation.receipts)
        if self.plan is not None and len(done) >= len(self.plan.shards) and not self._stream:
            self._receipts = self._valid(done)
            if len(self._receipts) == len(self.plan.shards):
                return
        feed = ShardFeed(r.workers or 1, careful_start=_small(r), out_of_memory=_OutOfMemory())
        feed.most_ahead = 4 * max(1, r.workers) if self._stream else None
        self._feed = feed
        if self.plan is None:
            feed.probe = self._probe_task(r)
        else:
            self._begin(feed, done)
        yield from self._driven(r, feed)

    def _driven(self, r: Resolved, feed: ShardFeed) -> Iterator[Receipt]:
        stages = ShardStages(recipe(r, self.sink), max(1, r.place.threads), r.gpus, timed=r.workers > 0)
        engine = open_engine(
            self.spec.engine.name, workers=r.workers, path=tuple(_import_path()), **self.spec.engine.options
        )
        self._say(phase="loading", workers_wanted=r.workers)
        events = engine.run(stages, feed)
        streamed = 0
        try:
            for event in events:
                self._heard(event, feed)
                if feed.probed is not None and self.plan is None:
                    self._planned(r, feed)
                if self.plan is not None:
                    self._check_gates_early(feed)
                while self._stream and streamed in feed.committed:
                    yield self._one(streamed)
                    feed.consumed(streamed)
                    streamed += 1
                if self._signal.number is not None or feed.fatal is not None:
                    break
        except BaseException as e:
            self._say(phase="failed")
            if isinstance(e, GristmillError) and e.report is None and self.plan is not None:
                e.report = self._partial_report()
            raise
        finally:
            feed.stopped = True
            with contextlib.suppress(ValueError):
                events.close()
        if self._signal.number is not None:
            self._say(phase="stopped")
            name = signal.Signals(self._signal.number).name
            raise Interrupted(
                f"stopped by {name}: run the same command again to go on",
                exit_code=128 + self._signal.number,
                report=self._partial_report() if self.plan is not None else None,
            )
        if feed.fatal is not None:
            self._say(phase="failed")
            feed.fatal.report = self._partial_report() if self.plan is not None else None
            raise feed.fatal
        yield from self._complete(r, feed)

    def _complete(self, r: Resolved, feed: ShardFeed) -> Iterator[Receipt]:
        """Read all receipts; shards whose receipt does not read back are done again."""
        assert self.plan is not None
        found = self._valid(receipts.listed(self.generation.receipts))
        missing = [n for n in range(len(self.plan.shards)) if n not in found]
        if not missing:
            self._receipts = found
            return
        self._note("warning", f"{len(missing)} shards have no readable receipt ({missing[:5]}): they are done again")
        again = ShardFeed(r.workers or 1, out_of_memory=_OutOfMemory())
        again.begin(self._task, missing)
        self._feed = again
        yield from self._driven(r, again)

    def _valid(self, listed: dict[int, list[str]]) -> dict[int, Receipt]:
        read = ((n, receipts.valid(paths)) for n, paths in listed.items())
        return {n: receipt for n, receipt in read if receipt is not None}

    def _one(self, number: int) -> Receipt:
        found = receipts.valid(receipts.listed(self.generation.receipts).get(number, []))
        if found is None:
            raise RunFailed(f"shard {number}: its receipt does not read back: run again")
        return found

    # ------------------------------------------------ the plan

    def _probe_task(self, r: Resolved) -> Task:
        spans = _pieces(r, PROBE_ROWS * 64)
        rows = min(PROBE_ROWS, planning.budget_of(r)[1])
        return Task("probe", Shard(0, spans), self.generation.number, self.generation.folder, self.root, rows=rows)

    def _planned(self, r: Resolved, feed: ShardFeed) -> None:
        answer = feed.probed
        assert feed.probe is not None
        limit = feed.probe.rows or PROBE_ROWS
        if answer["schema"] is None and answer["rows"] >= limit:
            whole = Task("probe", Shard(0, _pieces(r, None)), self.generation.number, self.generation.folder, self.root)
            feed.probe = whole
            feed.probe_further(limit * 16)
            return
        self._check_columns(r, answer)
        seconds = answer["figures"].get("model_seconds", 0.0)
        rate = answer["ok"] / seconds if seconds > 0 and answer["ok"] else None
        table = shard.cut(r.files, r.selection, planning.shard_rows(r, rate), max(1, r.workers))
        schema = answer["schema"] or generations.encode_schema(_no_rows_schema(r, self.sink))
        tokens, rows, _ = planning.budget_of(r)
        about = {
            "fingerprint": r.fingerprint.as_dict(),
            "output_schema": schema,
            "results": answer.get("results", []),
            "sink_format": r.sink_format.name,
            "partition_by": list(self.sink.partition_by),
            "model": {"name": self.spec.model.name, "digest": r.info.digest, "version": model_version(r)},
            "batch": {"tokens": tokens, "rows": rows},
            "workers": r.workers,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        self.plan = generations.write_plan(self._files, self.generation, about, list(r.files), table)
        self._begin(feed, {})

    def _check_columns(self, r: Resolved, answer: dict[str, Any]) -> None:
        """Names that only the first rows could tell (a function's results) must not stand twice."""
        names = generations.decode_schema(answer["schema"]).names if answer["schema"] else []
        results = answer.get("results", [])
        kept = [n for n in (r.keep or ()) if n in results]
        doubled = kept or [n for n in names if names.count(n) > 1]
        if doubled:
            raise BadJob(
                f"column {doubled[0]!r} would stand twice in the output: {r.model.name} returns it and keep carries it over; "
                "rename one (output=) or leave it out of keep"
            )
        missing = [
            n for n in (*(r.keep or ()), *self.sink.partition_by, *self.sink.key) if answer["schema"] and n not in names
        ]
        missing = [n for n in missing if n not in self.sink.key]
        if missing:
            raise BadJob(
                f"keep or partition_by names column {missing[0]!r}, which is in no output row: there are {', '.join(names)}"
            )

    def _begin(self, feed: ShardFeed, done: dict[int, Any]) -> None:
        assert self.plan is not None
        self._schema = self.plan.schema
        todo = [n for n in range(len(self.plan.shards)) if n not in done]
        rows_done = 0
        if done:
            known = [self.plan.shards[n].rows for n in done] if self.plan.shards.rows() is not None else []
            rows_done = sum(k for k in known if k is not None)
        self._resumed = len(done)
        self._weights = sum(self.plan.shards.weight(n) for n in done)
        self._weight = sum(self.plan.shards.weight(n) for n in range(len(self.plan.shards))) or 1
        feed.begin(self._task, todo)
        self._run_begun = time.monotonic()
        self._say(
            phase="running",
            shards_total=len(self.plan.shards),
            shards_done=len(done),
            shards_resumed=len(done),
            rows_total=self.plan.shards.rows(),
            rows_done=rows_done,
            rows_ok=0,
        )
        self._rows_resumed = rows_done

    def _task(self, number: int) -> Task:
        assert self.plan is not None
        g = self.generation
        return Task("score", self.plan.shards[number], g.number, g.folder, self.root, self._schema)

    # ------------------------------------------------ events

    def _heard(self, event: Event, feed: ShardFeed) -> None:
        before = len(feed.committed)
        feed.on(event)
        for note in feed.notes:
            self._observer.note(note)
        feed.notes.clear()
        if isinstance(event, Printed):
            self._observer.note(Note("print", event.text, {"worker": event.worker}))
        elif isinstance(event, Started):
            self._workers_seen.add(event.worker)
            self._first_start = self._first_start or time.monotonic()
        elif isinstance(event, Death):
            self._workers_seen.discard(event.worker)
            for key in event.keys:
                self._ticking.pop(key, None)
        elif isinstance(event, Tick):
            self._ticking[event.key] = self._ticking.get(event.key, 0) + event.rows
        elif isinstance(event, Waiting):
            self._say(waiting=event.reason)
        if len(feed.committed) != before or isinstance(event, (Started, Death, Tick)):
            self._count(feed, event)

    def _count(self, feed: ShardFeed, event: Event) -> None:
        if self.plan is None:
            self._say(workers=len(self._workers_seen))
            return
        key = getattr(event, "key", "")
        if (number := _number(key)) is not None and number in feed.committed:
            self._ticking.pop(key, None)
            self._weights += self.plan.shards.weight(number)
            self._sum = getattr(self, "_sum", Counts()) + Counts(*feed.committed[number]["counts"])
        total = getattr(self, "_sum", Counts())
        ticking = sum(v for k, v in self._ticking.items() if not k.startswith("probe"))
        elapsed = max(1e-9, time.monotonic() - self._run_begun)
        fresh = total.rows_in + ticking
        rate = fresh / elapsed
        rows_total = self.plan.shards.rows()
        left = None if rows_total is None else max(0, rows_total - self._rows_resumed - fresh)
        share = self._weights / self._weight
        if left is None and rate > 0 and total.rows_in and share < 1:
            left = round(total.rows_in * (1 - share) / max(share, 1e-9))
        self._say(
            shards_done=self._resumed + len(feed.committed),
            rows_done=self._rows_resumed + fresh,
            rows_ok=total.ok,
            rows_dead=total.dead + total.derived_dead,
            rows_filtered=total.filtered + total.derived_filtered,
            rows_per_second=rate,
            eta=None if left is None or rate == 0 else left / rate,
            share=share,
            workers=len(self._workers_seen),
        )

    def _say(self, **changes: Any) -> None:
        phase = self._now.phase
        self._now = dataclasses.replace(self._now, elapsed=time.monotonic() - self._begun, **changes)
        if self._now.phase != phase or time.monotonic() - self._said > 0.1:
            self._said = time.monotonic()
            self._observer.progress(self._now)
            g = getattr(self, "generation", None)
            if g is not None and os.path.isdir(g.folder):
                with contextlib.suppress(OSError):  # status is a courtesy: a full disk is found where it matters
                    generations.write_progress(
                        self._files, g, {**dataclasses.asdict(self._now), "at": time.time(), "pid": os.getpid()}
                    )

    def _note(self, level: Any, text: str) -> None:
        self._notes.append(text)
        self._observer.note(Note(level, text))

    # ------------------------------------------------ gates and publishing

    def _check_gates_early(self, feed: ShardFeed) -> None:
        """Stop as soon as min_ok can no longer hold, whatever the rest may be."""
        assert self.plan is not None
        rows = self.plan.shards.rows()
        if self._accept or rows is None or any(s.kind == "flat_map" for s in self.spec.steps) or feed.fatal:
            return
        now = getattr(self, "_sum", Counts())
        dead = now.dead + now.derived_dead
        possible = rows - now.filtered - now.derived_filtered
        if possible > 0 and (possible - dead) / possible < self.spec.gates.min_ok:
            raise GateFailed(
                f"min_ok {self.spec.gates.min_ok} can no longer hold: {dead} of at most {possible} rows are dead letters"
                f"{self._worst()}; nothing new was published (--accept publishes all the same)"
            )

    def _worst(self) -> str:
        errors: dict[str, int] = {}
        for value in self._feed.committed.values():
            for name, count in value["errors"].items():
                errors[name] = errors.get(name, 0) + count
        worst = sorted(errors.items(), key=lambda kv: -kv[1])[:3]
        return " (" + ", ".join(f"{name}: {count}" for name, count in worst) + ")" if worst else ""

    def _publish(self, r: Resolved) -> None:
        self._say(phase="publishing")
        assert self.plan is not None
        done = [self._receipts[n] for n in sorted(self._receipts)]
        counts = sum((Counts(*x.counts) for x in done), Counts())
        self._gates(counts, done)
        body = generations.success(self.root)
        base_live: list[publishing.Live] = []
        base_counts = Counts()
        numbers = [self.generation.number]
        if self.generation.base is not None and body is not None:
            _, base_live = publishing.published(self.root)
            base_counts = Counts(*body["counts_list"])
            numbers = [*body["generations"], *numbers]
        done = self._merged(r, done) if self.sink.merge else done
        publishing.link_parts(self._files, self.generation, done)
        live = [*base_live, *publishing.live_of(self.generation, done)]
        total = base_counts + counts
        if r.sink_format.name == "npy":
            publishing.write_manifest(self._files, self.root, done, body if self.generation.base else None)
        publishing.publish(self._files, self.generation, self._about(r, total, numbers, done), live)
        self.report = self._report(r, total, done, live)
        self._say(phase="done", share=1.0)

    def _gates(self, counts: Counts, done: list[Receipt]) -> None:
        assert self.plan is not None
        wrong = counts.discrepancy()
        planned = self.plan.shards.rows()
        if wrong is None and planned is not None and planned != counts.rows_in and self.generation.kind != "retry-dead":
            wrong = f"{planned} rows planned, {counts.rows_in} accounted for"
        if wrong is not None:
            raise GateFailed(
                f"the counts do not add up: {wrong}; nothing was published", report=self._partial_report(counts)
            )
        dead = counts.dead + counts.derived_dead
        scored = counts.ok + dead
        gates = self.spec.gates
        if scored and dead / scored > gates.warn_failed:
            self._note(
                "warning", f"{dead} of {scored} rows ({dead / scored:.2%}) are dead letters{self._worst_of(done)}"
            )
        if self._accept:
            return
        if counts.ok == 0 and not gates.allow_empty:
            why = (
                "the source has no rows"
                if counts.rows_in == 0
                else f"none of {counts.rows_in} rows was scored{self._worst_of(done)}"
            )
            raise GateFailed(
                f"{why}; nothing was published (gates: allow_empty: true, or --accept)",
                report=self._partial_report(counts),
            )
        if scored and counts.ok / scored < gates.min_ok:
            raise GateFailed(
                f"min_ok {gates.min_ok} does not hold: {counts.ok} of {scored} rows were scored, {dead} are dead letters"
                f"{self._worst_of(done)}; nothing new was published (look at {self.generation.work}/dead-*, then --accept)",
                report=self._partial_report(counts),
            )

    def _worst_of(self, done: list[Receipt]) -> str:
        errors = _summed(x.errors for x in done)
        worst = sorted(errors.items(), key=lambda kv: -kv[1])[:3]
        return " (" + ", ".join(f"{name}: {int(count)}" for name, count in worst) + ")" if worst else ""

    def _merged(self, r: Resolved, done: list[Receipt]) -> list[Receipt]:
        from gristmill.commit.merge import merge

        return merge(self._files, self.generation, done, r.sink_format, self._schema)

    def _about(self, r: Resolved, total: Counts, numbers: list[int], done: list[Receipt]) -> dict[str, Any]:
        assert self.plan is not None
        about = self.plan.about
        return {
            "generations": numbers,
            "counts": dataclasses.asdict(total),
            "counts_list": list(total.values()),
            "rows_in": total.rows_in,
            "rows_ok": total.ok,
            "rows_dead": total.dead + total.derived_dead,
            "rows_filtered": total.filtered + total.derived_filtered,
            "model": about["model"],
            "fingerprint": about["fingerprint"],
            "output_schema": about["output_schema"],
            "sink_format": about["sink_format"],
            "partition_by": about["partition_by"],
            "shards": len(done),
            "published": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": round(time.monotonic() - self._begun, 3),
            "errors": {k: int(v) for k, v in _summed(x.errors for x in done).items()},
        }

    # ------------------------------------------------ reports

    def _report(self, r: Resolved, total: Counts, done: list[Receipt], live: list[publishing.Live]) -> Report:
        figures = _summed({k: v for k, v in x.figures.items() if not k.startswith("input:")} for x in done)
        fresh = getattr(self, "_sum", Counts())
        span = max(1e-9, time.monotonic() - (self._first_start or time.monotonic()))
        run_figures = _summed(v["figures"] for v in self._feed.committed.values()) if hasattr(self, "_feed") else {}
        padded = figures.get("padded", 0.0)
        return Report(
            sink=self.sink.uri, state="done", generation=self.generation.number, counts=total,
            shards=len(done), shards_resumed=getattr(self, "_resumed", len(done)), seconds=time.monotonic() - self._begun,
            model=self.spec.model.name, digest=r.info.digest, workers=r.workers, engine=self.spec.engine.name,
            files=len(live), bytes_out=sum(f.bytes for f in live), model_seconds=figures.get("model_seconds", 0.0),
            busy=min(1.0, run_figures.get("model_seconds", 0.0) / (span * max(1, r.workers))) if fresh.rows_in else None,
            padding=1 - figures["tokens"] / padded if padded else None,
            tokens=int(figures["tokens"]) if figures.get("tokens") else None, rows_run=fresh.rows_in,
            errors={k: int(v) for k, v in _summed(x.errors for x in done).items()}, notes=tuple(self._notes),
        )  # fmt: skip

    def _partial_report(self, counts: Counts | None = None) -> Report:
        total = counts or getattr(self, "_sum", Counts())
        assert self.plan is not None
        return Report(
            sink=self.sink.uri, state=self._now.phase, generation=self.generation.number, counts=total,
            shards=len(self.plan.shards), shards_resumed=getattr(self, "_resumed", 0), seconds=time.monotonic() - self._begun,
            model=self.spec.model.name, digest=self.resolved.info.digest, workers=self.resolved.workers,
            engine=self.spec.engine.name, rows_run=total.rows_in, notes=tuple(self._notes),
        )  # fmt: skip

    def _published_report(self, state: str) -> Report:
        body, live = publishing.published(self.root)
        return Report(
            sink=self.sink.uri, state=state, generation=body["generation"], counts=Counts(*body["counts_list"]),
            shards=body["shards"], shards_resumed=body["shards"], seconds=time.monotonic() - self._begun,
            model=body["model"]["name"], digest=body["model"]["digest"], workers=0, engine=self.spec.engine.name,
            files=len(live), bytes_out=sum(f.bytes for f in live), errors=body.get("errors", {}), notes=tuple(self._notes),
        )  # fmt: skip


# ---------------------------------------------------------------- pieces of a run


def recipe(r: Resolved, sink: Sink) -> Recipe:
    """What the workers of a resolved job are given."""
    tokens, rows, window = planning.budget_of(r)
    job = r.job
    leave = tuple(r.info.columns or ())
    where = job.source.where
    return Recipe(
        Reader(r.source_format, r.fs, r.columns, r.schema, where, dict(job.source.options)),
        job.steps, r.model, r.info.columns, job.post,
        Output(r.keep, leave, sink.row_id, sink.key, sink.model_version, model_version(r)),
        replace(sink, storage={}), r.sink_format, r.place, job.running, job.on_null, job.on_nan, tokens, rows, window,
    )  # fmt: skip


def model_version(r: Resolved) -> str:
    """The model's version: the digest of its files, or of its code where it has none."""
    return r.info.digest or fingerprint.digest_of(dict(r.fingerprint.code))


def only_new(r: Resolved, stored: dict[str, str]) -> Resolved:
    """The same job over the files that are not in `stored`."""
    if r.job.source.limit is not None or r.job.source.sample is not None:
        raise BadJob("--append together with limit or sample: which rows are new cannot be told")
    keep = [i for i, f in enumerate(r.files) if f.file.path not in stored]
    files = tuple(r.files[i] for i in keep)
    inputs = {k: v for k, v in r.fingerprint.inputs.items() if k not in stored}
    return replace(
        r, files=files, selection=Selection.everything(files), fingerprint=replace(r.fingerprint, inputs=inputs)
    )


def _pieces(r: Resolved, most: int | None) -> tuple[Piece, ...]:
    """The first selected ranges of the source, enough for `most` rows; all of them for None."""
    out: list[Piece] = []
    rows = 0.0
    for index, start, stop in r.selection.ranges.tolist():
        f = r.files[index]
        if out and out[-1].index == index:
            out[-1] = replace(out[-1], ranges=(*out[-1].ranges, (start, stop)))
        else:
            out.append(Piece(index, f.file, f.extent, ((start, stop),)))
        rows += shard.estimated_rows(f, start, stop)
        if most is not None and rows >= most:
            break
    return tuple(out)


def _no_rows_schema(r: Resolved, sink: Sink) -> pa.Schema:
    names = r.keep if r.keep is not None else tuple(n for n in r.schema.names if n not in (r.info.columns or ()))
    fields = [r.schema.field(n) for n in names if n in r.schema.names]
    return pa.schema([*fields, *(r.info.schema or ())])


def _small(r: Resolved) -> bool:
    """Whether one worker should look first: a function over little input is done before a second one has started."""
    from gristmill.plan.specs import FunctionModel

    return isinstance(r.model, FunctionModel) and r.bytes < 4 << 20


def _import_path() -> list[str]:
    return [p or os.getcwd() for p in sys.path]


def _number(key: str) -> int | None:
    head = key.partition(".")[0]
    return int(head) if head.isdigit() else None


def _summed(parts: Any) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total


class _Signals:
    """SIGINT and SIGTERM while a run goes: the first asks for an end, the second one ends at once."""

    def __init__(self) -> None:
        self.number: int | None = None

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, self._on)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on(self, number: int, _: Any) -> None:
        if self.number is not None:
            raise Interrupted(f"stopped at once by a second {signal.Signals(number).name}", exit_code=128 + number)
        self.number = number


class _OutOfMemory:
    """Whether the kernel has killed for want of memory since last asked, by its own counters."""

    _FILES = ("/sys/fs/cgroup/memory.events", "/proc/vmstat")

    def __init__(self) -> None:
        self._seen = self._count()

    def __call__(self, death: Death) -> bool:
        now = self._count()
        more, self._seen = now > self._seen, now
        return more

    def _count(self) -> int:
        total = 0
        for path in self._FILES:
            with contextlib.suppress(OSError), open(path) as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        return total

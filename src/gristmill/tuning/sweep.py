"""The sweep of `gristmill tune`: arrangements first, then batch budgets on the best of them; always in alternation."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import field, replace

import numpy as np

from gristmill.driver import backends, budgets, planning, sizes
from gristmill.driver.resolved import Resolved
from gristmill.driver.shipping import recipe
from gristmill.engines.registry import engine_kind
from gristmill.errors import BadJob
from gristmill.files.disk import LocalFiles
from gristmill.job.job import JobSpec, Sink
from gristmill.job.options import Gates
from gristmill.process import machine
from gristmill.process.scratch import passing
from gristmill.process.startup import import_path, starting
from gristmill.shards import shard
from gristmill.shards.shard import Piece, Shard
from gristmill.tuning.bench import Answer, Bench
from gristmill.values import dataclass
from gristmill.worker.budgetsearch import HOPELESS, knee
from gristmill.worker.recipe import Task
from gristmill.worker.stages import ShardStages
from gristmill.worker.trial import Trial, TrialStages

CPU_BUDGETS = (256, 512, 1024, 1536, 2048, 4096, 8192)
GPU_BUDGETS = (4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
ROW_BUDGETS = (16, 64, 256, 1024, 4096, 16_384)
STEP = 4  # from a budget of rows to the next larger one
LONGEST_CALL = 10.0  # seconds: a larger budget is not tried if its call would take longer
SAMPLE_ROWS = 1024
GPU_SAMPLE_ROWS = 8192
MOST_SAMPLED = 65_536  # rows, if larger budgets of rows are requested
SPREAD = 4  # places of the source that the sample is taken from
A_TRIAL = 4096  # tokens or rows that a trial computes at least

Say = Callable[[str], None]


@dataclass(frozen=True)
class Arrangement:
    """How the model runs: workers, threads of each, and for text models the backend and the precision."""

    workers: int
    threads: int
    backend: str = ""
    dtype: str = ""

    def __str__(self) -> str:
        parts = [f"{self.workers} x {self.threads}", *(p for p in (self.backend, self.dtype) if p)]
        return " ".join(parts)


@dataclass(frozen=True)
class Measured:
    """One line of the table. `rate` is the median of its trials: useful tokens (or rows) per second of all workers."""

    arrangement: Arrangement
    budget: int
    rate: float
    padding: float
    trials: int
    failed: str = ""


@dataclass(frozen=True)
class Tuned:
    """What a sweep found. `unit` is "tokens" or "rows"; `arrangements` were measured at the default budget, `budgets`
    on `best`; `knee` is the smallest budget within 3 % of the best. `default` is what a run would choose by itself.
    """

    model: str
    unit: str
    arrangements: tuple[Measured, ...]
    budgets: tuple[Measured, ...]
    best: Arrangement
    knee: int
    default: int
    default_arrangement: Arrangement
    notes: tuple[str, ...] = field(default=())

    @property
    def rates(self) -> dict[int, float]:
        """Rates by budget, for the budgets that ran."""
        return {m.budget: m.rate for m in self.budgets if m.rate > 0}


def tune(
    spec: JobSpec, budgets_tried: Sequence[int] | None = None, *, rounds: int = 3, say: Say = lambda _: None
) -> Tuned:
    """Measure a job's model on its own rows. Scores the sample several times, and writes nothing but its findings, for
    later runs. `budgets_tried` are tried as they are, or a note says why not. Raises BadJob and RunFailed.
    """
    starting("a sweep")
    if spec.engine.workers == 0:
        raise BadJob("tune measures workers, and workers is 0: give a number, or auto")
    with passing() as folder, ExitStack() as open_benches:
        ungated = replace(spec, gates=Gates(min_ok=0.0))  # nothing is published
        chosen = backends.settle(planning.resolve(ungated, folder), thorough=True)
        r = chosen.resolved
        sweep = _Sweep(r, folder, rounds, say, open_benches, budgets_tried)
        arrangements = sweep.arrangements()
        best = max(arrangements, key=lambda m: m.rate).arrangement if arrangements else _own(r)
        backends.keep(r, {m.arrangement.backend: m.rate for m in sorted(arrangements, key=lambda m: m.rate)})
        measured = sweep.budgets(best, sorted(set(budgets_tried or _budgets(r))))
        if not budgets_tried:
            measured = sweep.further(best, measured)
        rates = {m.budget: m.rate for m in measured if m.rate > 0}
        if not measured:
            raise BadJob(f"tune: {sweep.untried[0]}: give smaller budgets")
        if not rates:
            raise BadJob(f"tune: memory ran out at the smallest budget, {measured[0].budget}: give smaller ones")
        found = knee(rates)
        budgets.keep(_arranged(r, best), found, rates)
        if found == measured[-1].budget < _most(r) and not sweep.untried:
            sweep.untried.append(f"{found:,}, the largest that was tried, is the best: --budgets tries larger ones")
        plain = sizes.budget_of(r)
        return Tuned(
            r.model.name, "tokens" if plain.by_tokens else "rows", tuple(arrangements), tuple(measured), best, found,
            plain.tokens if plain.by_tokens else plain.rows, _own(r), (*chosen.notes, *sweep.untried),
        )  # fmt: skip


class _Sweep:
    """The benches of one sweep: one per arrangement, kept open so that they can take turns. `untried` gives the reasons
    for budgets in `asked` that were not tried.
    """

    def __init__(
        self, r: Resolved, folder: str, rounds: int, say: Say, stack: ExitStack, asked: Sequence[int] | None
    ) -> None:
        self.untried: list[str] = []
        self._r = r
        self._rounds = rounds
        self._say = say
        self._stack = stack
        self._asked = asked is not None
        self._benches: dict[Arrangement, Bench] = {}
        rows = GPU_SAMPLE_ROWS if r.place.gpu else SAMPLE_ROWS
        if asked and not sizes.budget_of(r).by_tokens:
            rows = max(rows, min(MOST_SAMPLED, max(asked)))
        self._task = Task("probe", Shard(0, _spread(r, rows)), folder=folder, root=folder, rows=rows)
        self._sink = Sink(folder)

    def arrangements(self) -> list[Measured]:
        """All arrangements to choose from, at the default budget; empty if there is only one."""
        choice = _choices(self._r)
        if len(choice) < 2:
            return []
        plain = sizes.budget_of(self._r)
        budget = plain.tokens if plain.by_tokens else plain.rows
        return self._alternated([(a, budget) for a in choice])

    def budgets(self, arrangement: Arrangement, tried: Sequence[int]) -> list[Measured]:
        """Every budget on one arrangement, smallest first, up to where memory ends or the rate has fallen far."""
        for other in [a for a in self._benches if a != arrangement]:
            self._benches.pop(other).close()
        return self._alternated([(arrangement, budget) for budget in tried], full=self._asked)

    def further(self, arrangement: Arrangement, measured: list[Measured]) -> list[Measured]:
        """With larger budgets of rows added, as long as the largest is clearly the best, and there are rows and time
        for a still larger one.
        """
        if sizes.budget_of(self._r).by_tokens:
            return measured
        last = measured[-1]
        while not last.failed and knee({m.budget: m.rate for m in measured if m.rate > 0}) == last.budget:
            budget = min(STEP * last.budget, _most(self._r))
            if not last.budget < budget <= min(LONGEST_CALL * last.rate, self._r.estimated_rows):
                break
            self._task = replace(self._task, shard=Shard(0, _spread(self._r, budget)), rows=budget)
            measured = [*measured, *self._alternated([(arrangement, budget)])]
            last = measured[-1]
        return measured

    def _alternated(self, candidates: list[tuple[Arrangement, int]], full: bool = False) -> list[Measured]:
        answers: dict[tuple[Arrangement, int], list[Answer]] = {c: [] for c in candidates}
        left = list(candidates)
        for number in range(self._rounds):
            for candidate in list(left):
                if candidate not in left:
                    continue
                arrangement, budget = candidate
                answer = self._bench(arrangement).measure(Trial(self._task, budget, self._shares(budget, number), full))
                if not answer.short:
                    answers[candidate].append(answer)
                    self._say(f"round {number + 1} of {self._rounds}: {arrangement}, {budget:,}: {answer.rate:,.0f}/s")
                same = {b: a[-1].rate for (other, b), a in answers.items() if a and other == arrangement and b < budget}
                least, why = self._hopeless(budget, answer, same)
                out = [c for c in left if c[0] == arrangement and c[1] >= least]
                left = [c for c in left if c not in out]
                self._leave_out([b for other, b in out if not answers[other, b]], why)
        return [_line(a, b, found) for (a, b), found in answers.items() if found]

    def _leave_out(self, tried_never: list[int], why: str) -> None:
        for budget in tried_never if self._asked else ():
            self.untried.append(f"budget {budget:,} was not tried: {why}")
            self._say(self.untried[-1])

    def _hopeless(self, budget: int, latest: Answer, smaller: dict[int, float]) -> tuple[float, str]:
        """The budget from which no more trials are needed, and why; infinity if all need them."""
        if latest.failed:
            return budget, f"{latest.failed} ran out at {budget:,}"
        if latest.short:
            sampled = self._r.estimated_rows > (self._task.rows or math.inf)
            of = "of the sample" if sampled else "that there are"
            return budget, f"its call would not be full with all {latest.short:,} rows {of}"
        if latest.whole and not self._asked:
            return budget + 1, ""
        longest = LONGEST_CALL * latest.rate
        if self._asked:
            return max(budget + 1, longest), f"its call would take more than {LONGEST_CALL:g} s"
        slow = bool(smaller) and (latest.rate < HOPELESS * max(smaller.values()) or budget > longest)
        return budget if slow else math.inf, ""

    def _shares(self, budget: int, number: int) -> tuple[float, ...]:
        count = int(np.clip(-(-A_TRIAL // budget), 2, 16))
        return tuple((k + (number + 0.5) / self._rounds) / count for k in range(count))

    def _bench(self, arrangement: Arrangement) -> Bench:
        if arrangement not in self._benches:
            r = _arranged(self._r, arrangement)
            given = recipe(r, self._sink, LocalFiles(), sizes.budget_of(r))
            stages = TrialStages(ShardStages(given, arrangement.threads, r.gpus, timed=False))
            bench = Bench(r, stages, import_path())
            self._benches[arrangement] = self._stack.enter_context(closing(bench))
        return self._benches[arrangement]


def _line(arrangement: Arrangement, budget: int, found: list[Answer]) -> Measured:
    failed = next((a.failed for a in found if a.failed), "")
    rate = 0.0 if failed else statistics.median(a.rate for a in found)
    return Measured(arrangement, budget, rate, found[-1].padding, len(found), failed)


# ---------------------------------------------------------------- what there is to choose from


def _budgets(r: Resolved) -> tuple[int, ...]:
    if not sizes.budget_of(r).by_tokens:
        return tuple(sorted({min(b, _most(r)) for b in ROW_BUDGETS}))
    return GPU_BUDGETS if r.place.gpu else CPU_BUDGETS


def _most(r: Resolved) -> int:
    """The largest budget that calls can make use of."""
    if sizes.budget_of(r).by_tokens:
        return sys.maxsize
    rows = r.job.running.shard_rows
    return min(ROW_BUDGETS[-1], ROW_BUDGETS[-1] if rows == "auto" else rows)


def _own(r: Resolved) -> Arrangement:
    """The arrangement that a run would take."""
    if not sizes.budget_of(r).by_tokens:
        return Arrangement(max(1, r.workers), r.place.threads)
    return Arrangement(max(1, r.workers), r.place.threads, r.place.backend, getattr(r.model, "dtype", ""))


def _choices(r: Resolved) -> list[Arrangement]:
    """The run's own arrangement first, then other splits of this machine's cores, then the other backends of the same
    precision; what the job fixes is not varied.
    """
    own = _own(r)
    engine = r.job.engine
    found = [own]
    on_cpu = engine_kind(engine).here and r.place.device == "cpu" and r.info.call is None
    if on_cpu and engine.workers == "auto" and engine.threads == "auto":
        cores = machine.cores()
        splits = [n for n in (cores, cores // 2, cores // 4, 1) if n >= 1]
        found += [replace(own, workers=n, threads=max(1, cores // n)) for n in splits]
    found += [replace(own, backend=name) for name in backends.usable(r)]
    return list(dict.fromkeys(found))


def _arranged(r: Resolved, a: Arrangement) -> Resolved:
    same = a.backend == r.place.backend  # the run has settled whether that is on a graph of the folder or an export
    model = r.model if same or not r.info.exportable else backends.on(backends.text_model(r), a.backend)
    place = replace(r.place, threads=a.threads, backend=a.backend or r.place.backend)
    return replace(r, workers=a.workers, place=place, model=model)


def _spread(r: Resolved, rows: int) -> tuple[Piece, ...]:
    """About `rows` rows from several places of the selection; from the start of files that cannot be cut."""
    spans = r.selection.ranges.tolist()
    weights = [shard.estimated_rows(r.files[f], a, b) for f, a, b in spans]
    total = sum(weights)
    if total <= rows:
        return _pieces(r, [(f, a, b) for f, a, b in spans])
    wanted = [place * total / SPREAD for place in range(SPREAD)]
    taken, before = [], 0.0
    for (f, a, b), weight in zip(spans, weights, strict=True):
        for start in [w - before for w in wanted if before <= w < before + weight]:
            density = (b - a) / max(weight, 1e-9)  # positions per row
            first = a + int(start * density) if r.files[f].divisible else a
            taken.append((f, first, min(b, first + max(1, int(rows / SPREAD * density) + 1))))
        before += weight
    return _pieces(r, taken)


def _pieces(r: Resolved, spans: list[tuple[int, int, int]]) -> tuple[Piece, ...]:
    out: list[Piece] = []
    for f, a, b in spans:
        file = r.files[f]
        if out and out[-1].index == f:
            last = out[-1].ranges[-1]
            ranges = (*out[-1].ranges[:-1], (last[0], max(b, last[1]))) if a <= last[1] else (*out[-1].ranges, (a, b))
            out[-1] = replace(out[-1], ranges=ranges)
        else:
            out.append(Piece(f, file.file, file.extent, ((a, b),)))
    return tuple(out)

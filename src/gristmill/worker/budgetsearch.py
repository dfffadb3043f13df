"""Finding the batch budget while a job runs: budgets are tried in turn on its own batches, so that no row is scored
only for the trial; batches whose calls are quick grow, and shrink if memory runs out. Pure: the caller of the model
reports what a call took, and continues with the search it gets back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gristmill.job.options import BatchPlan
from gristmill.values import dataclass
from gristmill.worker.batches import Budget

WITHIN = 0.03  # the knee: the smallest budget this close to the best throughput
# Before a budget is judged: this many batches, as one has about a tenth of noise on a busy machine, and this many
# seconds, as short calls are disturbed most.
ROUNDS = 4
SECONDS = 0.5
HOPELESS = 0.8  # a budget below this share of the best after half of that is dropped


@dataclass(frozen=True)
class Trial:
    """A budget of the sweep: useful tokens (or rows) and seconds of its batches, without the first one, in which memory
    is allocated and kernels are chosen; `spent` includes that one. A budget that is not `open` is no longer tried.
    """

    budget: int
    useful: float = 0.0
    seconds: float = 0.0
    batches: int = 0
    spent: float = 0.0
    warm: bool = False
    open: bool = True

    @property
    def rate(self) -> float:
        """Useful tokens (or rows) per second."""
        return self.useful / self.seconds if self.seconds > 0 else 0.0

    def judged(self, share: float = 1.0) -> bool:
        """Whether it was tried for long enough, or for this share of that."""
        return self.batches >= ROUNDS * share and self.seconds >= SECONDS * share

    def after(self, useful: float, seconds: float) -> Trial:
        """The trial with one more batch counted."""
        if not self.warm:
            return replace(self, spent=seconds, warm=True)
        useful, spent = self.useful + useful, self.spent + seconds
        return replace(self, useful=useful, seconds=self.seconds + seconds, batches=self.batches + 1, spent=spent)


@dataclass(frozen=True)
class Search:
    """What a call of the model may hold, from batch to batch: the `budget` found so far and, during a sweep, the
    `trials` of others, smallest first; the current batch is cut with the one `on_trial`.

    A larger budget is not tried if its call would take over `longest` seconds at the rates seen so far. Full batches
    that take under `quick` seconds are followed by larger ones, up to `most` rows.
    """

    budget: Budget
    by_tokens: bool = False
    trials: tuple[Trial, ...] = ()
    on_trial: int | None = None
    longest: float | None = None
    quick: float | None = None
    most: int = 0

    @staticmethod
    def of(plan: BatchPlan) -> Search:
        """The search at its start."""
        trials = tuple(Trial(budget) for budget in sorted(set(plan.tries)))
        budget = Budget(plan.tokens, plan.rows)
        return Search(budget, plan.by_tokens, trials, longest=plan.longest, quick=plan.quick, most=plan.window)

    def next(self, sweeps: bool = True) -> Search:
        """The search before a batch is cut: on trial is the open budget with the least time spent; once all are judged,
        their knee becomes the budget. Nothing is on trial if this batch is not to be one (`sweeps`).
        """
        tried = [t for t in self.trials if t.open]
        if not (sweeps and tried):
            return self if self.on_trial is None else replace(self, on_trial=None)
        if all(t.judged() for t in tried):
            found = knee({t.budget: t.rate for t in tried})
            return replace(self, budget=self._with(found), trials=(), on_trial=None)
        rate = max(t.rate for t in self.trials)
        offered = [t for t in tried if t is tried[0] or self._quick_enough(t, rate)]
        return replace(self, on_trial=min(offered, key=lambda t: (t.spent, t.budget)).budget)

    def now(self, lengths: bool) -> Budget:
        """The budget to cut the batch with; `lengths` says whether its rows have lengths."""
        found = self.budget if self.on_trial is None else self._with(self.on_trial)
        return found if lengths else Budget(None, found.rows)

    def took(self, rows: int, seconds: float, useful: int, padded: int) -> tuple[Search, dict[str, float]]:
        """A batch was scored: its `useful` tokens, and `padded` ones (its rows, if those have no lengths).

        Also returns what it took as figures that add up over batches and workers, for `rates_of`.
        """
        found, name = self, f"sweep:{self.on_trial}"
        if self.quick is not None and seconds < self.quick and rows == self.budget.rows:
            found = replace(self, budget=self.budget.doubled(self.most))
        if self.on_trial is None or padded < self.on_trial / 2:  # a small batch, as the window ended
            return found, {}
        cold = any(t.budget == self.on_trial and not t.warm for t in self.trials)
        trials = [t.after(useful, seconds) if t.budget == self.on_trial else t for t in self.trials]
        if cold:
            return replace(found, trials=tuple(trials)), {}
        figures = {f"{name}:useful": float(useful), f"{name}:seconds": seconds, f"{name}:batches": 1.0}
        return replace(found, trials=self._pruned(trials)), figures

    def out_of_memory(self, rows: int, padded: int | None) -> Search:
        """Memory ran out in a call of this many rows (and padded tokens, if they have lengths): a budget on trial is
        dropped, with all larger ones; otherwise the budget is halved to below that call, and once more. From now on
        nothing grows.
        """
        found = replace(self, on_trial=None, quick=None)
        if (tried := self.on_trial) is not None:
            trials = tuple(replace(t, open=t.open and t.budget < tried) for t in self.trials)
            if any(t.open for t in trials):
                return replace(found, trials=trials)
            return replace(found, budget=self._with(tried).halved(), trials=())
        budget = self.budget
        while not budget.least and budget.admits(rows, padded):
            budget = budget.halved()
        return replace(found, budget=budget.halved())

    def _with(self, budget: int) -> Budget:
        return replace(self.budget, tokens=budget) if self.by_tokens else Budget(None, budget)

    def _quick_enough(self, trial: Trial, rate: float) -> bool:
        return self.longest is None or (rate > 0 and trial.budget / rate <= self.longest)

    def _pruned(self, trials: list[Trial]) -> tuple[Trial, ...]:
        """The trials, with those closed that are clearly too slow."""
        best = max((t.rate for t in trials if t.open and t.judged(0.5)), default=None)
        if best is None:
            return tuple(trials)
        good = (t.rate >= HOPELESS * best if t.judged(0.5) else self._quick_enough(t, best) for t in trials)
        return tuple(replace(t, open=t.open and ok) for t, ok in zip(trials, good, strict=True))


def knee(rates: Mapping[int, float], within: float = WITHIN) -> int:
    """The smallest budget whose rate is within this share of the best one. Raises ValueError if there is none."""
    best = max(rates.values())
    return min(budget for budget, rate in rates.items() if rate >= (1 - within) * best)


def rates_of(figures: Mapping[str, float], share: float = 1.0) -> dict[int, float]:
    """Rates by budget from the summed `figures` of sweeps, for those that were judged to the end, or to this share of
    it.
    """
    rates = {}
    for name, value in figures.items():
        kind, _, rest = name.partition(":")
        if kind == "sweep" and rest.endswith(":useful"):
            budget = rest.removesuffix(":useful")
            seconds, batches = figures.get(f"sweep:{budget}:seconds", 0.0), figures.get(f"sweep:{budget}:batches", 0.0)
            if seconds >= SECONDS * share and batches >= ROUNDS * share:
                rates[int(budget)] = value / seconds
    return rates


def compared(figures: Mapping[str, float]) -> dict[int, float]:
    """The rates of budgets judged to the end, if they were compared with another (one dropped as hopeless was tried for
    half of that). Empty if nothing was compared.
    """
    return rates_of(figures) if len(rates_of(figures, 0.5)) > 1 else {}

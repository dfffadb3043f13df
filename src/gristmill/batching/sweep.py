"""Finding the batch budget while a job runs: budgets are tried in turn on its own batches, so that no row is scored for
the trial alone. Pure: who tries tells what it took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WITHIN = 0.03  # the knee: the smallest budget this near to the best throughput
# Before a budget is judged: so many batches, as the noise of one is about a tenth on a busy machine, and so many
# seconds, as short calls are disturbed most.
ROUNDS = 4
SECONDS = 0.5
HOPELESS = 0.8  # a budget this far below the best after half of that is tried no more


@dataclass
class _Trial:
    useful: float = 0.0
    seconds: float = 0.0
    batches: int = 0
    spent: float = 0.0
    warm: bool = False

    @property
    def rate(self) -> float:
        return self.useful / self.seconds if self.seconds > 0 else 0.0

    def judged(self, share: float = 1.0) -> bool:
        return self.batches >= ROUNDS * share and self.seconds >= SECONDS * share


def knee(rates: Mapping[int, float], within: float = WITHIN) -> int:
    """The smallest budget whose rate is within a share of the best one. Raises ValueError where there is none."""
    best = max(rates.values())
    return min(budget for budget, rate in rates.items() if rate >= (1 - within) * best)


class Sweep:
    """Tries `budgets` in alternation, each for about the same time, until all are judged. `longest` is the most seconds
    that a call of a larger budget may take, going by the rate of those tried.
    """

    def __init__(self, budgets: Sequence[int], longest: float | None = None) -> None:
        self._trials = {b: _Trial() for b in sorted(set(budgets))}
        self._open = sorted(self._trials)
        self._longest = longest

    @property
    def settled(self) -> int | None:
        """The knee, once every budget that is still tried has been judged."""
        if not all(self._trials[b].judged() for b in self._open):
            return None
        return knee({b: self._trials[b].rate for b in self._open})

    def next(self) -> int:
        """The budget to cut the next batch with: the one that was given the least time so far."""
        known = max((t.rate for t in self._trials.values()), default=0.0)
        offered = [b for b in self._open if self._quick(b, known)]
        return min(offered, key=lambda b: (self._trials[b].spent, b))

    def _quick(self, budget: int, rate: float) -> bool:
        if self._longest is None or budget == self._open[0]:
            return True
        return rate > 0 and budget / rate <= self._longest

    def measured(self, budget: int, useful: float, seconds: float) -> dict[str, float]:
        """A batch cut with `budget` gave `useful` tokens (or rows), padding left out, in so many seconds.

        Returns it as figures that add up over batches and workers, for `rates_of`. The first batch of each budget does
        not count: memory is allocated and kernels are chosen in it.
        """
        trial = self._trials[budget]
        trial.spent += seconds
        if not trial.warm:
            trial.warm = True
            return {}
        trial.useful += useful
        trial.seconds += seconds
        trial.batches += 1
        self._prune()
        name = f"sweep:{budget}"
        return {f"{name}:useful": useful, f"{name}:seconds": seconds, f"{name}:batches": 1.0}

    def too_much(self, budget: int) -> bool:
        """Memory ran out: this budget and all larger ones are out. Whether any is left."""
        self._open = [b for b in self._open if b < budget]
        return bool(self._open)

    def _prune(self) -> None:
        judged = {b: t.rate for b in self._open if (t := self._trials[b]).judged(0.5)}
        if not judged:
            return
        best = max(judged.values())
        slow = {b for b, rate in judged.items() if rate < HOPELESS * best}
        if self._longest is not None:
            slow |= {b for b in self._open if b not in judged and b / best > self._longest}
        self._open = [b for b in self._open if b not in slow]


def rates_of(figures: Mapping[str, float], share: float = 1.0) -> dict[int, float]:
    """Rates by budget from the summed `figures` of sweeps: of those that some worker judged to the end, or for
    this share of it.
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
    """The rates of budgets judged to the end, where they were compared with another: one that was given up as hopeless
    was tried for half of that. Empty where nothing was compared.
    """
    return rates_of(figures) if len(rates_of(figures, 0.5)) > 1 else {}

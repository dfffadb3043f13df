"""Rows by outcome, and other figures: what receipts hold, gates compare and reports show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gristmill.values import dataclass


@dataclass(frozen=True)
class Counts:
    """Rows by outcome. Exactly: rows_in = expanded + filtered + dead; derived = ok + derived_filtered + derived_dead.

    The source level ends at the first `flat_map` step (without one, at the model): `expanded` source rows became
    `derived` rows, the same number unless a step made several rows of one.
    """

    rows_in: int = 0
    expanded: int = 0
    filtered: int = 0
    dead: int = 0
    derived: int = 0
    derived_filtered: int = 0
    derived_dead: int = 0
    ok: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, ...]:
        """The eight counts in the order of the fields."""
        return (
            self.rows_in,
            self.expanded,
            self.filtered,
            self.dead,
            self.derived,
            self.derived_filtered,
            self.derived_dead,
            self.ok,
        )

    @property
    def all_dead(self) -> int:
        """Dead rows of both levels."""
        return self.dead + self.derived_dead

    @property
    def all_filtered(self) -> int:
        """Filtered rows of both levels."""
        return self.filtered + self.derived_filtered

    def discrepancy(self) -> str | None:
        """What does not add up, as a sentence; None when all does."""
        if min(self.values()) < 0:
            name, value = next((n, v) for n, v in vars(self).items() if v < 0)
            return f"{name} is {value}"
        if self.rows_in != self.expanded + self.filtered + self.dead:
            return (
                f"{self.rows_in} source rows, but {self.expanded} went on + {self.filtered} filtered + "
                f"{self.dead} dead = {self.expanded + self.filtered + self.dead}"
            )
        if self.derived != self.ok + self.derived_filtered + self.derived_dead:
            return (
                f"{self.derived} rows for the model, but {self.ok} ok + {self.derived_filtered} filtered + "
                f"{self.derived_dead} dead = {self.ok + self.derived_filtered + self.derived_dead}"
            )
        return None


def summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of mappings, name by name."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total

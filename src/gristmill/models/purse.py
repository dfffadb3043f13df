"""What one worker may spend of what its run may: reserved before a request is sent, and settled by what that cost."""

from __future__ import annotations

from gristmill.models.contract import Allowance

LOOSE = 1 / 16  # of the total: so much more than it needs goes back to the other workers,
KEPT = 1 / 64  # but for so much, that not each request has to claim
NEARLY = 1 + 1e-9  # sums of floats


class Purse:
    """Dollars, of `total`: those that are claimed of the run's allowance, or without one `share` of them."""

    def __init__(self, total: float, share: float) -> None:
        self.allowance: Allowance | None = None
        self.total = total
        self.alone = share >= 1.0  # whether no other worker can leave something
        self.spent = 0.0
        self._share = share
        self.reserved = 0.0
        self._held = self._told = 0.0

    @property
    def gone(self) -> float:
        """What is spent by the run, or kept free by its other workers, as far as is known here."""
        others = 0.0 if self.allowance is None else self.allowance.claimed - self._held
        return self.spent + max(0.0, others)

    @property
    def left_behind(self) -> float:
        """What others have claimed, and have not told that they spent it: where there are none, of one that died."""
        return 0.0 if self.allowance is None else max(0.0, self.allowance.claimed - self.allowance.ended - self._held)

    def reserve(self, cost: float) -> bool:
        """Whether so much is there to spend, of what this worker has claimed or can claim now; then it is reserved."""
        need = self.spent + self.reserved + cost
        if self.allowance is None:
            enough = need <= self.total * self._share * NEARLY
        else:
            if need > self._held or not self._held:
                self._held += self.allowance.claim(max(0.0, need - self._held), self.total)
            enough = self._held > 0 and need <= self._held * NEARLY
        if enough:
            self.reserved += cost
        return enough

    def release(self, cost: float) -> None:
        """What was reserved is spent, or is not needed; less than 0: it costs so much more."""
        self.reserved = max(0.0, self.reserved - cost)
        loose = self._held - self.spent - self.reserved
        if self.allowance is not None and not self.alone and loose > LOOSE * self.total:
            back = loose - KEPT * self.total
            self.allowance.give_back(back)
            self._held -= back

    def close(self) -> None:
        """Give back what is left, or note what was spent beyond what was claimed; and tell what was spent."""
        if self.allowance is not None and (self._held != self.spent or self._told != self.spent):
            self.allowance.give_back(self._held - self.spent, self.spent - self._told)
            self._held = self._told = self.spent

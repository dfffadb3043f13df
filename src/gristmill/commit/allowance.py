"""What the workers of a run may spend together: each claims its part as it needs it, whoever dies or joins."""

from __future__ import annotations

import threading

from gristmill.files.contract import Files
from gristmill.files.disk import join

# Of what is left, claimed at a time: a worker that dies may take with it as much that it has not spent, and a run
# claims some hundreds of times.
PART = 1 / 64


class Allowance:
    """Claims on a sum, in the order of their numbers: each a file beside the receipts that one worker could create.

    `folder` is the generation's. Workers of another run begin anew. A claim is its part, with what was spent behind it
    if somebody who has ended tells that.
    """

    def __init__(self, folder: str, run: str, files: Files) -> None:
        self._files = files
        self._folder = join(folder, "spent")
        self._run = run
        self._next = 0
        self._claimed = self._ended = 0.0
        self._lock = threading.Lock()

    def claim(self, least: float, total: float) -> float:
        """A part of `total`, in the same unit: `least` or more; 0 if less than that is left."""
        with self._lock:
            while True:
                left = total - self._claimed
                part = max(least, left * PART)
                if part > left or part <= 0:
                    if not self._passed():
                        return 0.0
                elif self._noted(part):
                    return part

    def give_back(self, part: float, spent: float = 0.0) -> None:
        """What was claimed, and not spent; and what was, of all that its worker has claimed, once that ends."""
        with self._lock:
            while not self._noted(-part, spent):
                pass

    def begin(self, spent: float) -> None:
        """So much was spent in an earlier part of the run."""
        self.give_back(-spent, spent)

    @property
    def claimed(self) -> float:
        """How much is claimed, as far as is known here: all of it once a claim was refused."""
        return self._claimed

    @property
    def ended(self) -> float:
        """How much of it was spent by those that have ended, as far as is known here."""
        return self._ended

    def spent(self) -> float:
        """How much was claimed and not given back: what was spent, once all workers have ended."""
        with self._lock:
            while self._passed():
                pass
            return self._claimed

    def _noted(self, part: float, spent: float = 0.0) -> bool:
        """Whether the next claim is this one; another's is counted."""
        path = self._path()
        if self._next == 0:
            self._files.make_folder(self._folder)
        if self._files.write_new(path, (f"{part!r} {spent!r}" if spent else repr(part)).encode()):
            self._claimed += part
            self._ended += spent
            self._next += 1
            return True
        self._passed()
        return False

    def _passed(self) -> bool:
        """Count the next claim, if it is there."""
        try:
            part, *spent = map(float, self._files.read(self._path()).split())
        except FileNotFoundError:
            return False
        self._claimed += part
        self._ended += sum(spent)
        self._next += 1
        return True

    def _path(self) -> str:
        return join(self._folder, f"{self._run}.{self._next:06d}")

"""`gristmill up` with a clock on which a night takes seconds: `python nights.py FOLDER START FACTOR UNTIL`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timedelta

from gristmill.schedule.contract import Run
from gristmill.schedule.held import held
from gristmill.schedule.jobs import JobFiles
from gristmill.schedule.processes import Processes
from gristmill.schedule.state import State
from gristmill.schedule.up import Up


class Fast(Processes):
    """Time goes by so many times as fast since `began`, which was `start`."""

    began, start_at, factor, until = 0.0, datetime.min, 1.0, datetime.max

    def now(self) -> datetime:
        return self.start_at + timedelta(seconds=(time.time() - self.began) * self.factor)

    def wait(self, seconds: float) -> Sequence[tuple[Run, int]]:
        if self.now() >= self.until and not self._going:
            self._asked.append(15)
        return super().wait(max(0.05, min(seconds / self.factor, 1.0)))


def main(folder: str, start: str, began: str, factor: str, until: str) -> None:
    where = os.path.join(folder, ".gristmill")
    world = Fast(os.path.join(where, "logs"), dict(os.environ))
    world.began, world.factor = float(began), float(factor)
    world.start_at, world.until = datetime.fromisoformat(start), datetime.fromisoformat(until)
    with held(folder, where), world.caught():
        state = State(where)
        since = datetime.fromisoformat(start)
        Up(JobFiles(folder, os.environ), state, world, lambda now: print(now.text, flush=True), since=since).forever()


if __name__ == "__main__":
    main(*sys.argv[1:])

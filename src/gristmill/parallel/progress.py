"""The progress line of a parallel map: name, done of total, running, rate. Only on a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from gristmill.observe.streams import is_terminal
from gristmill.process.ownstderr import say


class Line:
    """Shown on stderr while a map runs, and gone afterwards. What calls print appears above it."""

    def __init__(self, name: str, total: int | None, wanted: bool) -> None:
        self._name = name
        self._total = total
        self._shown: Any = None
        self._task: Any = None
        self._wanted = wanted and is_terminal(sys.stderr)
        self._said = 0.0
        self._begun = time.monotonic()

    def __enter__(self) -> Line:
        return self

    def update(self, done: int, running: int) -> None:
        """Update the counts. Drawn for the first time after half a second: a quick map draws nothing."""
        now = time.monotonic()
        if not self._wanted or now - self._begun < 0.5 or now - self._said < 0.1:
            return
        self._said = now
        if self._shown is None:
            self._start()
        rate = done / max(now - self._begun, 1e-9)
        self._shown.update(self._task, completed=done, running=running, rate=f"{rate:,.1f}/s")

    def say(self, text: str) -> None:
        """A line for a person, even without a terminal."""
        say(f"{self._name}: {text}")

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

        self._shown = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[running]} running  {task.fields[rate]}"),
            console=Console(stderr=True),
            transient=True,
            # Text printed here goes above the line, unless it was redirected on purpose.
            redirect_stdout=is_terminal(sys.stdout),
        )
        self._task = self._shown.add_task(self._name, total=self._total, running=0, rate="")
        self._shown.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown.stop()

"""What a run reports as it goes: notes and progress."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

from gristmill.commit.generation import Generation
from gristmill.driver import progressnote
from gristmill.driver.progressnote import ProgressNote
from gristmill.errors import GateFailed
from gristmill.files.contract import Lease
from gristmill.job.job import JobSpec
from gristmill.job.secret import Secret, scrub, secrets_in
from gristmill.observe.events import Note, Observer, Progress


class RunLog:
    """Reports to the observer, without the job's secrets; keeps the notes for the report. Once the run has a
    generation, progress is also noted beside the plan, for `gristmill status`.
    """

    def __init__(self, spec: JobSpec, sink: str, observer: Observer) -> None:
        self.observer = observer
        self.notes: list[str] = []
        self._secrets = tuple(secrets_in(spec))
        self._now = Progress(sink=sink, model=spec.model.name)
        self._begun = time.monotonic()
        self._said = 0.0
        self._noted: tuple[Lease, str] | None = None
        self._took: dict[str, float] = {}  # seconds of the phases that have ended
        self._since = 0.0  # when the current one began

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._begun

    @property
    def now(self) -> Progress:
        """What was last said."""
        return self._now

    @property
    def phase(self) -> str:
        """The phase last reported."""
        return self._now.phase

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase so far, which add up to `seconds`: what comes before the first is the first's."""
        took = dict(self._took)
        took[self.phase] = took.get(self.phase, 0.0) + self.seconds - self._since
        return took

    def hide(self, secrets: Iterable[Secret]) -> None:
        """Keep these secrets out of what is reported, too."""
        self._secrets = (*self._secrets, *secrets)

    def scrubbed(self, text: str) -> str:
        """A text without the job's secrets."""
        return scrub(text, self._secrets)

    def note(self, level: Literal["info", "warning"], text: str, **fields: Any) -> None:
        """Report something worth a line."""
        text = self.scrubbed(text)
        self.notes.append(text)
        self.observer.note(Note(level, text, fields))

    def warn(self, text: str) -> None:
        """Report something that a person should look at."""
        self.note("warning", text)

    def tell(self, text: str) -> None:
        """Report something worth a line that is not a warning."""
        self.note("info", text)

    def tell_once(self, text: str) -> None:
        """As `tell`, but not what was told before."""
        if self.scrubbed(text) not in self.notes:
            self.tell(text)

    def say(self, **changes: Any) -> None:
        """Report progress, given what has changed; at most ten times a second within a phase."""
        if changes.get("phase", self.phase) != self.phase:
            self._took, self._since = self.phases, self.seconds
        doing = self._now.doing
        self._now = replace(self._now, elapsed=self.seconds, **changes)
        if self._now.doing == doing and time.monotonic() - self._said < 0.1:
            return
        self._said = time.monotonic()
        self.observer.progress(self._now)
        if self._noted is not None:
            lease, path = self._noted
            line = ProgressNote(**vars(self._now), at=time.time(), pid=os.getpid())
            with contextlib.suppress(OSError):  # status is a courtesy: a full disk is reported where it matters
                lease.say(path, line.dump())

    def begin(self, generation: Generation, lease: Lease) -> None:
        """From now on the run works on this generation."""
        self._noted = lease, progressnote.path_of(generation)
        self.say(generation=generation.number)

    @contextlib.contextmanager
    def gate(self) -> Iterator[None]:
        """Notes for `gristmill status` if a gate inside does not hold, while the lease is held."""
        try:
            yield
        except GateFailed as e:
            self.say(phase="gate failed", gate=self.scrubbed(str(e)))
            raise

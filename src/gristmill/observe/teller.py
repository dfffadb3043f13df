"""What others are told of a run, as frozen values, and who tells them: a `Teller` gets them from the driver's thread
and sends them from one of its own, so that nothing it waits for is waited for by the run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Protocol

from gristmill.observe.events import Note, Progress
from gristmill.values import dataclass

PATIENCE_S = 10.0  # seconds, all tellers together, that the end of a run waits for what is still to be sent


@dataclass(frozen=True)
class Column:
    """A column, its type as text, and of an output column the source columns that it is made of; `kept` says that it is
    one of them, as it was.
    """

    name: str
    type: str
    of: tuple[str, ...] = ()
    kept: bool = False


@dataclass(frozen=True)
class Data:
    """A data set: its address (without secrets), columns, and what is known of its size. `nulls` counts by column."""

    uri: str
    columns: tuple[Column, ...] = ()
    rows: int | None = None
    bytes: int | None = None
    files: int | None = None
    nulls: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Begun:
    """A run that has begun. `job` names it for people and for incidents, `run` is its UUID; `died` are those of earlier
    runs that ended without a word. Times are seconds since 1970; `published` is when the sink's result was.
    """

    job: str
    run: str
    sink: str
    started: float
    model: str = ""
    digest: str = ""
    generation: int = 0
    kind: str = ""
    engine: str = ""
    inputs: tuple[Data, ...] = ()
    output: Data | None = None
    published: float | None = None
    died: tuple[tuple[str, str], ...] = ()  # run and how, in words


@dataclass(frozen=True)
class Sign:
    """A sign of an incident of a kind: what happened, as `text` for a person, and as names of all that is wrong
    (`what`: gates, files, an exit code) and how much of it there is (`size`: rows), by which something new is known.
    """

    kind: str
    text: str
    what: tuple[str, ...] = ()
    size: int = 0


@dataclass(frozen=True)
class Ended:
    """How a run ended. `incident` is the sign of one that its error makes, `text` is the error's, `way` what to do
    about it. `published` is when the sink's result was (seconds since 1970), None if nothing is.
    """

    state: str
    at: float
    seconds: float
    incident: Sign | None = None
    text: str = ""
    exit_code: int = 0
    way: str = ""
    rows_in: int = 0
    rows_ok: int = 0
    rows_dead: int = 0
    rows_filtered: int = 0
    rows_run: int = 0
    shards_done: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    output: Data | None = None
    published: float | None = None
    assertions: tuple[tuple[str, bool], ...] = ()  # gates, and whether they held

    @property
    def good(self) -> bool:
        """Whether the sink holds what the job wants."""
        return self.state in ("done", "nothing to do")


class Teller(Protocol):
    """Tells others of a run. No method waits or raises; `close` waits until `until` (of time.monotonic), and says what
    could not be told, in words without secrets.
    """

    def began(self, run: Begun) -> None: ...

    def progress(self, now: Progress) -> None: ...

    def raised(self, sign: Sign) -> None: ...

    def ended(self, end: Ended) -> None: ...

    def close(self, until: float) -> list[str]: ...


class Told:
    """Several tellers as an observer of a run. A note whose fields have an `alert`, which names a kind of incident,
    raises that, `about` names in `about`; one about rows that are dead letters (`rows_dead`) raises "dead".
    """

    def __init__(self, tellers: Sequence[Teller]) -> None:
        self._tellers = tuple(tellers)

    def began(self, run: Begun) -> None:
        """Pass on that the run has begun."""
        for teller in self._tellers:
            teller.began(run)

    def progress(self, now: Progress) -> None:
        for teller in self._tellers:
            teller.progress(now)

    def note(self, note: Note) -> None:
        """Raise what the note says."""
        told = note.fields
        kind = told.get("alert") or ("dead" if "rows_dead" in told else "")
        if kind:
            self.raised(Sign(str(kind), note.text, tuple(told.get("about", ())), int(told.get("rows_dead", 0))))

    def raised(self, sign: Sign) -> None:
        """Raise an incident, or show one more sign of one."""
        for teller in self._tellers:
            teller.raised(sign)

    def ended(self, end: Ended) -> list[str]:
        """Pass on how the run ended, and wait a little for all that is still to be sent; returns what could not be."""
        for teller in self._tellers:
            teller.ended(end)
        until = time.monotonic() + PATIENCE_S
        return [line for teller in self._tellers for line in teller.close(until)]

    def close(self) -> None:
        """Does nothing: `ended` has closed them."""

"""By when a run must be done: warned of as soon as the forecast passes it, told once it has passed.

The notes have the field `deadline`, and `foresees` or `alert`, which is "late": the latter raises that incident.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone, tzinfo

from gristmill.driver.forecast import Forecast, Pace, price
from gristmill.driver.runlog import RunLog
from gristmill.errors import DeadlineMissed
from gristmill.job.job import JobSpec
from gristmill.job.schedule import due
from gristmill.observe import units
from gristmill.values import dataclass

SURE = 0.05  # the share of the rows from which the rate so far tells more than earlier runs
MARGIN = 0.02  # of the time that is left: a forecast so little over the deadline is no news


@dataclass(frozen=True)
class Deadline:
    """An instant, in the time zone that it is told in, as it was said; and whether the run stops there."""

    at: datetime
    said: str
    stops: bool

    @staticmethod
    def of(spec: JobSpec, tick: datetime | None) -> Deadline | None:
        """That of the run of a tick, or of one that begins now; None for a job without."""
        if spec.deadline is None:
            return None
        zone: tzinfo = timezone.utc if spec.schedule is None else spec.schedule.zone
        return Deadline(due(spec.deadline, tick or now(), zone), spec.deadline, spec.on_deadline == "stop")

    def __str__(self) -> str:
        return clock(self.at)


class OnTime:
    """What a run knows of its time: the forecast it began with, its deadline, and what of that was told."""

    def __init__(self, log: RunLog, deadline: Deadline | None, accepted: bool) -> None:
        self.deadline = deadline
        self.forecast: Forecast | None = None
        self.ahead = 0.0  # seconds until the first shard was begun
        self.rows: float | None = None  # those that this run is to score; None if another run has scored some of them
        self._log = log
        self._accepted = accepted
        self._warned = self._late = False

    @property
    def late(self) -> bool:
        """Whether the deadline has passed, and was told."""
        return self._late

    def begun(self, rows: float, resumed: bool, found: Forecast | None) -> None:
        """The plan is there: so many rows are left, and take as long as was found."""
        self.ahead = self._log.seconds
        self.rows, self.forecast = (None if resumed else rows), found
        if found is None:
            return
        ends = now() + timedelta(seconds=max(0.0, found.seconds - self.ahead))
        if found.seconds >= 60 or self.deadline is not None:
            text = f"takes {found.said()}"
            if self.deadline is not None:
                text += f"; ends about {clock(ends, self.deadline.at.tzinfo)}, deadline {self.deadline}"
            self._log.note("info", text, foreseen=found.seconds)
        self._warn(ends, found.by)

    def look(self, share: float, eta: float | None) -> None:
        """Look at the clock. Raises DeadlineMissed if the deadline has passed and the run is to stop there."""
        if self.deadline is None:
            return
        if now() > self.deadline.at:
            self.refuse_late()
        elif eta is not None and share >= SURE:
            self._warn(now() + timedelta(seconds=eta), "the rate so far")

    def _warn(self, ends: datetime, by: str) -> None:
        end = self.deadline
        if end is None or self._warned or self._late or ends <= end.at + MARGIN * max(timedelta(0), end.at - now()):
            return
        self._warned = True
        late = (ends - end.at).total_seconds()
        over = units.seconds(round(late / 60) * 60) if late >= 60 else "less than a minute"
        self._log.note(
            "warning",
            f"will be late: by {by} it ends about {clock(ends, end.at.tzinfo)}, {over} after its deadline ({end})",
            foresees="late",
            deadline=end.at.isoformat(timespec="seconds"),
            ends=ends.astimezone(end.at.tzinfo).isoformat(timespec="seconds"),
        )

    def refuse_late(self) -> None:
        """Tell, once, that the deadline has passed, if it has. Raises DeadlineMissed if the run is to stop there."""
        end = self.deadline
        if end is None or now() <= end.at:
            return
        stops = end.stops and not self._accepted
        if not self._late:
            self._late = True
            what = "it stops, and nothing new is published" if stops else "it goes on and will publish late"
            text = f"late: the deadline ({end}) has passed: {what}"
            self._log.note("warning", text, alert="late", deadline=end.at.isoformat(timespec="seconds"))
        if stops:
            raise DeadlineMissed(
                f"the deadline ({end}) has passed, and on_deadline is stop: nothing new was published; what is scored "
                "is kept: the same job with --accept (accept=True) goes on and publishes late",
                gates=["deadline"],
            )

    def pace(self, rows_resumed: int, update: bool) -> Pace | None:
        """How long the run took, for the estimates of later ones; None if it did not score all of its rows itself."""
        if self.rows is None or rows_resumed or not self.rows:
            return None
        known = None if self.forecast is None else round(self.forecast.seconds, 3)
        at = now().isoformat(timespec="seconds")
        return Pace(round(self.rows), round(self._log.seconds, 3), round(self.ahead, 3), known, at, update)

    def told(self, seconds: float, an_hour: float | None) -> dict[str, object]:
        """For the report: how long it took with publishing and deliveries, and was foreseen to take; the cost, the
        deadline and whether it was missed.
        """
        out: dict[str, object] = {"seconds": round(seconds, 3)}
        if self.forecast is not None and self.rows is not None:
            out["foreseen"] = round(self.forecast.seconds, 3)
        if an_hour is not None:
            out["cost"] = round(price(seconds, an_hour), 6)
        if self.deadline is not None:
            out |= {"deadline": self.deadline.at.isoformat(timespec="seconds"), "late": self._late}
        return out if len(out) > 1 else {}


def now() -> datetime:
    """The present, by the clock that people go by: a deadline is a time of day."""
    return datetime.now(timezone.utc)


def clock(at: datetime, zone: tzinfo | None = None) -> str:
    """`06:00 CET`, with the date unless it is within a day."""
    shown = at.astimezone(zone) if zone is not None else at
    near = abs(at - now()) < timedelta(hours=20)
    return shown.strftime("%H:%M %Z" if near else "%Y-%m-%d %H:%M %Z")

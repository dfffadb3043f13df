"""When a job runs, and by when it must be done: what `schedule:` and `deadline:` say, and the times that follow from
them. Nothing here asks what time it is.

A run is for one **tick**: the time that the schedule gave, an instant with the schedule's time zone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime, time, timedelta, timezone, tzinfo
from typing import TYPE_CHECKING, Annotated, Any, Literal

from gristmill.errors import BadJob, did_you_mean
from gristmill.job.annotations import Help, whole
from gristmill.job.durations import duration, of_option
from gristmill.job.keywords import option_fields
from gristmill.values import dataclass

if TYPE_CHECKING:
    from cronsim import CronSim

NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
# Variables that a job file which has them is given, unless its schedule says others; Airflow's names.
VARIABLES = {"ds": "%Y-%m-%d", "ds_nodash": "%Y%m%d", "ts": "%Y-%m-%dT%H:%M:%S%z"}
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?")
DEADLINE = "give a time of day (06:00) or a length of time (7h, 90m)"


@option_fields("schedule ")
@dataclass(frozen=True)
class Schedule:
    """When `gristmill up` runs a job: at times, after other jobs, or when files arrive.

    A time that the clock leaves out when summer time begins counts once, when the clock has moved; one that it shows
    twice, when summer time ends, counts the first time. Expressions with `*` in minutes or hours go by every hour.
    """

    cron: Annotated[str | None, Help("At these times: five fields of cron, or @daily and its like", flag=None)] = None
    timezone: Annotated[str, Help("The time zone of cron, deadline and vars, for example Europe/Berlin", flag=None)] = (
        "UTC"
    )
    after: Annotated[
        tuple[str, ...],
        Help("After these job files of the folder, each time that all of them have run for the same tick", flag=None),
    ] = ()
    files: Annotated[
        tuple[str, ...],
        Help("When files arrive, or change, that these paths or globs name; folders stand for their files", flag=None),
    ] = ()
    vars: Annotated[
        Mapping[str, str] | None,
        Help(
            "Variables that a run is given, as formats of the tick's time (strftime); default: ds (%Y-%m-%d), "
            "ds_nodash and ts, of these the ones that the job file has",
            flag=None,
        ),
    ] = None
    shift: Annotated[
        str | None,
        Help("By how much the time in vars is away from the tick: -1d is the day before", flag=None),
    ] = None
    catch_up: Annotated[
        Literal["all", "latest", "none"] | None,
        Help(
            "What is done about ticks that nobody was there for: a run for each, one for the latest, or none (default: "
            "all if the tick is in the job's variables, else latest)",
            flag=None,
        ),
    ] = None
    retries: Annotated[
        int, whole(0), Help("How often a run is tried again that failed and can be resumed (exit 1)", flag=None)
    ] = 5
    backoff: Annotated[str, Help("How long until the first of these; doubled for each, up to an hour", flag=None)] = (
        "1m"
    )

    def __post_init__(self) -> None:
        said = [name for name in ("cron", "after", "files") if getattr(self, name)]
        if len(said) != 1:
            found = f"has both {said[0]} and {said[1]}" if said else "says no time"
            raise BadJob(f"schedule {found}: give one of cron, after, files")
        for name in ("after", "files"):
            if not all(str(one).strip() for one in getattr(self, name)):
                raise BadJob(f"schedule {name} has an empty name: give a path, or leave it out")
        _ = self.zone
        if self.cron is not None:
            self._times(datetime(2000, 1, 1, tzinfo=timezone.utc))
        of_option("schedule backoff", self.backoff, timedelta(seconds=1))
        if self.shift is not None:
            of_option("schedule shift", self.shift.lstrip("+-"))
        for name, form in (self.vars or {}).items():
            if "%" not in str(form):
                raise BadJob(f"schedule vars has {name}: {form!r}: give a format of time, for example '%Y-%m-%d'")

    @property
    def zone(self) -> tzinfo:
        """The time zone. Raises BadJob if there is none of this name."""
        return zone_of(self.timezone)

    @property
    def fields(self) -> str:
        """The five fields of cron."""
        said = " ".join((self.cron or "").split())
        return NICKNAMES.get(said.lower(), said)

    @property
    def first_retry(self) -> timedelta:
        """How long until a run that failed is tried again for the first time."""
        return of_option("schedule backoff", self.backoff, timedelta(seconds=1))

    def ticks(self, after: datetime) -> Iterator[datetime]:
        """The times of cron that follow a time, each once, with the schedule's time zone; without end, or for fifty
        years without a time.
        """
        known = after
        for found in self._times(after):
            if found.timestamp() > known.timestamp():  # not one in the hour that is there twice, seen a second time
                known = found
                yield found

    def _times(self, after: datetime) -> CronSim:
        from cronsim import CronSim, CronSimError

        if len(self.fields.split()) != 5:
            raise BadJob(
                f"schedule cron is {self.cron!r}: give five fields (minute hour day month weekday), for example "
                f"'0 23 * * *', or one of {', '.join(NICKNAMES)}"
            )
        try:
            return CronSim(self.fields, after.astimezone(self.zone))
        except CronSimError as e:
            wrong = str(e)[:1].lower() + str(e)[1:]
            raise BadJob(
                f"schedule cron is {self.cron!r}: {wrong}: the fields are minute (0-59), hour (0-23), day (1-31), "
                "month (1-12), weekday (0-7, MON-SUN)"
            ) from None

    def variables(self, tick: datetime, known: Mapping[str, Any] | set[str]) -> dict[str, str]:
        """The variables that the run of a tick is given, of those that its job file has (`known`)."""
        at = tick.astimezone(self.zone)
        if self.shift is not None:
            by = of_option("schedule shift", self.shift.lstrip("+-"))
            at = _moved(at, -by if self.shift.startswith("-") else by)
        forms = self.vars if self.vars is not None else {n: form for n, form in VARIABLES.items() if n in known}
        return {name: at.strftime(form) for name, form in forms.items()}

    def each_counts(self, known: Mapping[str, Any] | set[str]) -> bool:
        """Whether every tick has a run of its own, rather than the latest one standing for those before it."""
        if self.catch_up is not None:
            return self.catch_up == "all"
        return bool(self.variables(datetime(2000, 1, 1, tzinfo=timezone.utc), known))


def zone_of(name: str) -> tzinfo:
    """The time zone of a name. Raises BadJob."""
    from zoneinfo import ZoneInfo, available_timezones

    if name == "UTC":
        return timezone.utc
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        there = available_timezones()
        hint = did_you_mean(name, there) if there else "; this system has none: install the package tzdata"
        raise BadJob(
            f"schedule timezone is {name!r}, which is not known: give one such as Europe/Berlin{hint}"
        ) from None


def as_schedule(value: Any) -> Schedule | None:
    """A Schedule from what a person writes: an expression of cron, or a mapping of options. Raises BadJob."""
    if value is None or isinstance(value, Schedule):
        return value
    if isinstance(value, str):
        return Schedule(value)
    if not isinstance(value, Mapping):
        raise BadJob(f"schedule is {value!r}: give an expression of cron ('0 23 * * *'), or a mapping of options")
    return Schedule(**value)


def due(deadline: str, tick: datetime, zone: tzinfo) -> datetime:
    """When the run of a tick must be done: at the next such time of day, or so long after the tick. Raises BadJob."""
    at = tick.astimezone(zone)
    if (found := _CLOCK.fullmatch(deadline)) is None:
        length = duration(deadline)
        if not length:
            raise BadJob(f"deadline is {deadline!r}: {DEADLINE}")
        return (at.astimezone(timezone.utc) + length).astimezone(zone)
    clock = time(int(found[1]), int(found[2]), int(found[3] or 0))
    day = at.date()
    while (end := datetime.combine(day, clock, zone)).timestamp() <= at.timestamp():
        day += timedelta(days=1)
    return end.astimezone(timezone.utc).astimezone(zone)  # a time that the clock leaves out, as what it shows instead


def _moved(at: datetime, by: timedelta) -> datetime:
    """A time moved: whole days keep the time of day, whatever the clock does meanwhile."""
    if by % timedelta(days=1) == timedelta(0):
        return at + by
    return (at.astimezone(timezone.utc) + by).astimezone(at.tzinfo)

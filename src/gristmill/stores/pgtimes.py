"""Dates and times of Postgres that Python does not have, as numpy has them: those before the year 1 and after 9999."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_TEXT = re.compile(
    r"(\d{4,})-(\d\d)-(\d\d)(?: (\d\d:\d\d:\d\d(?:\.\d+)?)([+-]\d\d(?::\d\d){0,2})?)?( BC)?"
)  # as DateStyle ISO writes them


def far(text: str) -> np.datetime64 | None:
    """A date or time (in UTC if it has a zone) as Postgres writes it; None for what is none, such as infinity."""
    if (found := _TEXT.fullmatch(text)) is None:
        return None
    year, month, day, time, zone, before = found.groups()
    counted = 1 - int(year) if before else int(year)
    date = f"{'-' if counted < 0 else ''}{abs(counted):04d}-{month}-{day}"
    if time is None:
        return np.datetime64(date, "D")
    made = np.datetime64(f"{date}T{time}", "us")
    if zone:
        parts = [int(part) for part in zone[1:].split(":")]
        seconds = sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
        made -= np.timedelta64(seconds if zone[0] == "+" else -seconds, "s")
    return made


def read_far(connection: Any) -> None:
    """Have a connection give such values back; it refuses them otherwise."""
    from psycopg import DataError
    from psycopg.types import datetime as known

    def reading(loader: Any) -> Any:
        class Reading(loader):  # type: ignore[misc]
            def load(self, data: Any) -> Any:
                try:
                    return super().load(data)
                except DataError:
                    if (found := far(bytes(data).decode())) is None:
                        raise
                    return found

        return Reading

    for name, loader in (
        ("date", known.DateLoader),
        ("timestamp", known.TimestampLoader),
        ("timestamptz", known.TimestamptzLoader),
    ):
        connection.adapters.register_loader(name, reading(loader))

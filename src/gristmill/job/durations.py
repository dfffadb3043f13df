"""Lengths of time as people write them: `90s`, `15m`, `7h`, `1d`, `1h30m`."""

from __future__ import annotations

import re
from datetime import timedelta

from gristmill.errors import BadJob

_PARTS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_LONGEST = timedelta(days=10_000)


def duration(text: object) -> timedelta | None:
    """The length of time that a text says; None if it says none."""
    found = _PARTS.fullmatch(text) if isinstance(text, str) else None
    if found is None or not text:
        return None
    days, hours, minutes, seconds = (int((part or "0")[:9]) for part in found.groups())
    said = timedelta(days=min(days, _LONGEST.days), hours=hours, minutes=minutes, seconds=seconds)
    return min(said, _LONGEST)


def of_option(name: str, text: object, least: timedelta = timedelta(0)) -> timedelta:
    """The length of time that an option says. Raises BadJob if it says none, or less than `least`."""
    found = duration(text)
    if found is None or found < least:
        more = f" of at least {least.total_seconds():g} s" if least else ""
        raise BadJob(f"{name} is {text!r}: give a length of time{more}, for example 90s, 15m, 7h or 1h30m")
    return found

"""Figures as people read them: thousands separated, bytes and times in the unit that fits, shares in per cent."""

from __future__ import annotations


def count(n: int) -> str:
    """`13,905`."""
    return f"{n:,}"


def plural(n: int, one: str, many: str | None = None) -> str:
    """`1 file`, `7 files`."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def size(n: float) -> str:
    """Bytes in powers of 1000: `812 B`, `21.3 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 999.5:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 99.95 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:,.1f} PB"


def seconds(s: float) -> str:
    """A duration: `0.84 s`, `41.2 s`, `6 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    if s < 9.995:
        return f"{s:.2f} s"
    if s < 59.95:
        return f"{s:.1f} s"
    whole = round(s)
    for unit, below, length, part in (("min", "s", 60, 1), ("h", "min", 3600, 60), ("d", "h", 86400, 3600)):
        if whole < length * (60 if unit == "min" else 24 if unit == "h" else 10**9):
            rest = whole % length // part
            return f"{whole // length:,} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{whole:,} s"


def clock(s: float) -> str:
    """A remaining time, short: `0:41`, `1:06:05`, `2 d 4 h`."""
    whole = max(0, round(s))
    if whole >= 48 * 3600:
        return seconds(whole)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def rate(per_second: float, unit: str = "rows") -> str:
    """`338 rows/s`, `0.42 rows/s`, `1.71 M rows/s`."""
    return f"{_short(per_second)} {unit}/s"


def short_rate(per_second: float) -> str:
    """`338/s`, `1.71 M/s`."""
    return f"{_short(per_second)}/s"


def _short(n: float) -> str:
    if n >= 999_500:
        return f"{n / 1e6:,.2f} M"
    return f"{n:,.0f}" if n >= 99.5 else f"{n:.1f}" if n >= 9.95 else f"{n:.2f}"


def percent(share: float) -> str:
    """`27 %`, `4.1 %`, `0.02 %`; only all is 100 %, only nothing is 0 %."""
    p = share * 100
    if p <= 0 or p >= 100:
        return f"{round(p)} %"
    if p >= 99.5:
        return ">99 %"
    return f"{p:.0f} %" if p >= 10 else f"{p:.1f} %" if p >= 0.095 else f"{p:.2g} %"

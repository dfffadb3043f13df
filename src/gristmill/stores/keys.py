"""Keys of a lookup as values of the key columns. One rule for all stores: a key finds the row whose key it equals, as
Python compares values, and no other.

So a value of another type is an error (`BadKey`), and one of the right type that the column cannot hold as it is
(2**70, 5.5 for a whole number, a time between two of its ticks, NaN, None) is the key of no row. A text for a column
that holds none is read as a value of its type, as it comes from a command line or an address.
"""

from __future__ import annotations

import datetime as dt
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy
from gristmill.arrow.schemas import storage
from gristmill.arrow.topython import from_plain, to_plain
from gristmill.errors import BadKey, did_you_mean
from gristmill.stores.contract import Key

_TICK = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}  # nanoseconds
_DAY = 86_400 * 10**9
_NANOSECONDS: dict[str, Any] = {  # of numpy's units
    "W": 7 * _DAY, "D": _DAY, "h": 3600 * 10**9, "m": 60 * 10**9, **_TICK, "generic": 1,
    "ps": Fraction(1, 10**3), "fs": Fraction(1, 10**6), "as": Fraction(1, 10**9),
}  # fmt: skip
_EPOCH, _EPOCH64 = dt.datetime(1970, 1, 1), np.datetime64("1970-01-01", "D")
_WHOLE = re.compile(r"[+-]?[0-9]+")
_OF_DAY = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9])(?:\.([0-9]{1,9}))?)?")


class _Other(Exception):
    """A value of another type than the column's; the text says what to give."""


def exact(
    keys: Sequence[Key], columns: Mapping[str, pa.DataType], shown: str, texts: Mapping[str, pa.DataType] | None = None
) -> dict[str, pa.Array]:
    """For each key column the values of all keys, of its bare type; null where no row can have that key. `texts`: the
    narrower types of floats by which texts are read. Raises BadKey for a key that is none.
    """
    names = list(columns)
    given = [_in_order(key, names, shown) for key in keys]
    made = {}
    for place, (name, kind) in enumerate(columns.items()):
        told = (texts or {}).get(name, kind)
        made[name] = _column([key[place] for key in given], name, kind, told, shown)
    return made


def retold(keys: Sequence[Key], names: Sequence[str], made: Mapping[str, Callable[[Any], Any]]) -> list[Key]:
    """Keys with the values of some columns made others, which a database reads: of types that Arrow does not have."""

    def told(key: Key) -> Key:
        if isinstance(key, Mapping):
            return {name: made[name](value) if name in made else value for name, value in key.items()}
        if len(key) != len(names):
            return key  # which is none: `exact` says so
        return tuple(made[name](value) if name in made else value for name, value in zip(names, key, strict=True))

    return [told(key) for key in keys]


def number_text(value: Any) -> Any:
    """A number, or the text of one, with all its digits; None for one that no row can have."""
    if isinstance(value, (np.integer, np.floating)):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal, str)):
        return value
    try:
        number = Decimal(value)
    except InvalidOperation:
        return value  # the database says that it is no number
    return format(number, "f") if number.is_finite() else None


def uuid_text(value: Any) -> Any:
    """A UUID, or a text of one, as databases write it."""
    if isinstance(value, str):
        try:
            value = uuid.UUID(value)
        except ValueError:
            return value  # the database says that it is none
    return str(value) if isinstance(value, uuid.UUID) else value


def _in_order(key: Key, names: list[str], shown: str) -> tuple[Any, ...]:
    if isinstance(key, Mapping):
        if key.keys() == set(names):
            return tuple(key[name] for name in names)
        unknown = next((name for name in key if name not in names), None)
        if unknown is not None:
            what = f"{unknown!r} is no column of the key"
        else:
            what = f"{next(name for name in names if name not in key)!r} is missing"
        near = did_you_mean(str(unknown), names) if unknown is not None else ""
        raise BadKey(f"{shown}: key {dict(key)!r}: {what}: the key has {_counted(names)}{near}")
    if len(key) != len(names):
        raise BadKey(f"{shown}: key {key if len(key) != 1 else key[0]!r}: the key has {_counted(names)}")
    return key


def _counted(names: list[str]) -> str:
    return f"{len(names)} column{'s' if len(names) > 1 else ''}: {', '.join(names)}"


def _column(values: list[Any], name: str, kind: pa.DataType, told: pa.DataType, shown: str) -> pa.Array:
    types, held = set(map(type, values)), storage(kind)
    if (types == {int} and pa.types.is_integer(held)) or (types == {str} and pa.types.is_string(held)):
        try:  # what most keys are, at once
            return pa.array(values, held)
        except (pa.ArrowException, OverflowError, UnicodeError):
            pass  # one of them is the key of no row
    fit = _fitting(held)
    if isinstance(kind, (pa.UuidType, pa.Bool8Type)):
        fit = _uuid if isinstance(kind, pa.UuidType) else _truth8
    try:
        read = _fitting(storage(told)) if pa.types.is_floating(held) else fit
        found = [_fitted(value, read if isinstance(value, str) else fit) for value in values]
    except _Other as e:
        raise BadKey(f"{shown}: column {name!r} is {kind}, and a key is not: {e}") from None
    if pa.types.is_temporal(held):
        return pa.array(found, pa.int32() if held.bit_width == 32 else pa.int64()).view(held)
    return from_plain(found, held) if pa.types.is_nested(held) else pa.array(found, held)


def _fitted(value: Any, fit: Callable[[Any], Any]) -> Any:
    """The value as Arrow takes it for the column, None if the column cannot hold it."""
    if isinstance(value, pa.Scalar):
        value = to_plain(pa.array([value], value.type))[0]
    if value is None:
        return None
    if isinstance(value, np.generic) and not isinstance(value, (np.datetime64, np.timedelta64)):
        value = value.item()
    try:
        return fit(value)
    except _Other as e:
        raise _Other(f"{value!r} is of type {type(value).__name__}: {e}") from None


@cache
def _fitting(kind: pa.DataType) -> Callable[[Any], Any]:
    """For a bare type, what makes a value that Arrow holds as it is (a time: the number of its ticks) of one that is
    given, None if there is no such value. The function raises _Other.
    """
    t = pa.types
    if t.is_null(kind):
        return lambda value: None
    if t.is_boolean(kind):
        return _truth
    if t.is_string(kind) or t.is_large_string(kind):
        return _text
    if t.is_binary(kind) or t.is_large_binary(kind):
        return _bytes
    for is_one, fitting in _KINDS:
        if is_one(kind):
            return fitting(kind)
    return _nested(kind)


# ---------------------------------------------------------------- numbers


def _number(value: Any) -> int | float | Decimal | None:
    """A number; None for one that equals no other (NaN)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise _Other("give a number")
    if isinstance(value, Decimal):
        return None if value.is_nan() else value
    return value if value == value else None


def _infinite(number: int | float | Decimal) -> bool:
    return not isinstance(number, int) and number in (float("inf"), float("-inf"))


def _whole(kind: pa.DataType) -> Callable[[Any], Any]:
    signed = pa.types.is_signed_integer(kind)
    least, most = (-(2 ** (kind.bit_width - 1)) if signed else 0), 2 ** (kind.bit_width - signed) - 1

    def fits(value: Any) -> int | None:
        if isinstance(value, str):
            if not _WHOLE.fullmatch(value):
                raise _Other("give a whole number")
            value = Decimal(value)
        number = _number(value)
        if number is None or _infinite(number) or (isinstance(number, Decimal) and number.adjusted() > 20):
            return None
        if number != int(number):
            return None
        return int(number) if least <= number <= most else None

    return fits


def _floating(kind: pa.DataType) -> Callable[[Any], Any]:
    made: Any = {16: np.float16, 32: np.float32, 64: np.float64}[kind.bit_width]

    def fits(value: Any) -> Any:
        if isinstance(value, str):
            try:
                return made(float(value))
            except ValueError:
                raise _Other("give a number") from None
        number = _number(value)
        if number is None:
            return None
        try:
            with np.errstate(over="ignore"):
                held = made(float(number))
        except OverflowError:
            return None
        return held if float(held) == number else None

    return fits


def _decimal(kind: pa.DataType) -> Callable[[Any], Any]:
    def fits(value: Any) -> Decimal | None:
        if isinstance(value, str):
            try:
                value = Decimal(value)
            except InvalidOperation:
                raise _Other("give a number") from None
        number = _number(value)
        if number is None or _infinite(number):
            return None
        sign, digits, exponent = Decimal(number).as_tuple()
        assert isinstance(exponent, int)
        significant = len("".join(map(str, digits)).rstrip("0"))
        exponent += len(digits) - significant
        if not significant:
            return Decimal(0)
        if exponent < -kind.scale or exponent + significant > kind.precision - kind.scale:
            return None
        return Decimal((sign, digits[:significant], exponent))

    return fits


# ---------------------------------------------------------------- texts, bytes, truth


def _truth(value: Any) -> bool:
    said = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(said, bool):
        raise _Other("give true or false")
    return said


def _text(value: Any) -> str | None:
    if not isinstance(value, str):
        raise _Other("give a text")
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which no text in UTF-8 has
        return None
    return value


def _bytes(value: Any) -> bytes | None:
    if isinstance(value, str):
        try:
            return value.encode("utf-8", "surrogateescape")  # so bytes of a command line come back as they were
        except UnicodeEncodeError:
            return None
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise _Other("give bytes")
    return bytes(value)


def _wide(kind: pa.DataType) -> Callable[[Any], Any]:
    return lambda value: held if (held := _bytes(value)) is not None and len(held) == kind.byte_width else None


def _truth8(value: Any) -> int:
    """A truth value that is held as a number."""
    return int(_truth(value))


def _uuid(value: Any) -> bytes | None:
    if isinstance(value, str):
        try:
            return uuid.UUID(value).bytes
        except ValueError:
            raise _Other("give a UUID") from None
    if isinstance(value, uuid.UUID):
        return value.bytes
    if not isinstance(value, bytes):
        raise _Other("give a UUID")
    return value if len(value) == 16 else None


# ---------------------------------------------------------------- times, as whole numbers of ticks


def _ticks(nanoseconds: int | None, tick: int, bits: int = 64) -> int | None:
    if nanoseconds is None or nanoseconds % tick or not -(2 ** (bits - 1)) < nanoseconds // tick < 2 ** (bits - 1):
        return None
    return nanoseconds // tick


def _span(value: Any) -> int | None:
    """The nanoseconds of a timedelta, also of numpy's or pandas'; None if it has none, or parts of one."""
    if value != value:  # "not a time"
        return None
    if not isinstance(value, np.timedelta64):
        micros = (value.days * 86_400 + value.seconds) * 10**6 + value.microseconds
        return int(micros * 1000 + getattr(value, "nanoseconds", 0))
    unit, count = np.datetime_data(value.dtype)
    if unit not in _NANOSECONDS:
        raise _Other("give it in weeks or a smaller unit")
    exactly = Fraction(int(value.astype(np.int64)) * count * _NANOSECONDS[unit])
    return int(exactly.numerator) if exactly.denominator == 1 else None


def _date(kind: pa.DataType) -> Callable[[Any], Any]:
    tick, bits = (_DAY, 32) if pa.types.is_date32(kind) else (10**6, 64)

    def fits(value: Any) -> int | None:
        if isinstance(value, str):
            try:
                value = np.datetime64(pa.array([value]).cast(pa.date32())[0].value, "D")
            except (pa.ArrowException, UnicodeError):
                raise _Other("give a date, as in 2026-01-31") from None
        units = ("Y", "M", "W", "D", "generic") if bits == 32 else ("Y", "M", "W", "D", "generic", "ms")
        if isinstance(value, np.datetime64) and np.datetime_data(value.dtype)[0] in units:
            return _ticks(_since_epoch(value), tick, bits)
        if isinstance(value, (dt.datetime, np.datetime64)) or not isinstance(value, dt.date):
            raise _Other("give a date")
        return _ticks(_span(value - _EPOCH.date()), tick, bits)

    return fits


def _since_epoch(day: np.datetime64) -> int | None:
    if np.datetime_data(day.dtype)[0] == "ms":
        return _span(day.view(day.dtype.str.replace("M8", "m8")))
    return _span(day.astype("M8[D]") - _EPOCH64)


def _in_python(moment: np.datetime64) -> bool:
    """Whether Python has such a time, with a zone or without; of others, numpy's are in UTC."""
    return bool(dt.MINYEAR <= moment.astype("M8[Y]").astype(np.int64) + 1970 <= dt.MAXYEAR)


def _time(kind: pa.DataType) -> Callable[[Any], Any]:
    tick, bits = _TICK[kind.unit], kind.bit_width

    def fits(value: Any) -> int | None:
        if isinstance(value, str):
            if (parts := _OF_DAY.fullmatch(value)) is None:
                raise _Other("give a time of day, as in 12:30:00")
            hours, minutes, seconds = (int(part or 0) for part in parts.groups()[:3])
            part = int((parts[4] or "0").ljust(9, "0"))
        elif isinstance(value, np.timedelta64):  # since midnight: what a lookup gives where Python has no such time
            since = _span(value)
            return _ticks(since, tick, bits) if since is not None and 0 <= since < _DAY else None
        else:
            if not isinstance(value, dt.time) or value.tzinfo is not None:
                raise _Other("give a time of day without a zone")
            hours, minutes, seconds, part = value.hour, value.minute, value.second, value.microsecond * 1000
        return _ticks(((hours * 60 + minutes) * 60 + seconds) * 10**9 + part, tick, bits)

    return fits


def _instant(kind: pa.DataType) -> Callable[[Any], Any]:
    tick, zoned = _TICK[kind.unit], kind.tz is not None
    what = f"give a time {'with' if zoned else 'without'} a zone"

    def fits(value: Any) -> int | None:
        if isinstance(value, str):
            return _ticks(_read(value, kind.tz, what), tick)
        if isinstance(value, np.datetime64):
            if zoned and _in_python(value):
                raise _Other(what)
            coarse = np.datetime_data(value.dtype)[0] in ("Y", "M", "generic")
            value = value.astype("M8[D]") if coarse else value
            return _ticks(_span(value.view(value.dtype.str.replace("M8", "m8"))), tick)
        if not isinstance(value, dt.datetime):
            raise _Other(what)
        if value != value:  # pandas' "not a time"
            return None
        if (value.utcoffset() is not None) != zoned:
            raise _Other(what)
        return _ticks(_span(value - (_EPOCH.replace(tzinfo=dt.timezone.utc) if zoned else _EPOCH)), tick)

    return fits


def _read(text: str, zone: str | None, what: str) -> int | None:
    """A text as nanoseconds since 1970."""
    for unit, tick in _TICK.items():
        try:
            return int(pa.array([text]).cast(pa.timestamp(unit, zone)).cast(pa.int64())[0].as_py()) * tick
        except (pa.ArrowException, UnicodeError):
            continue  # as nanoseconds, it may be too far off
    raise _Other(f"{what}, as in 2026-01-31T12:30:00{'Z' if zone is not None else ''}")


def _duration(kind: pa.DataType) -> Callable[[Any], Any]:
    tick = _TICK[kind.unit]

    def fits(value: Any) -> int | None:
        if not isinstance(value, (dt.timedelta, np.timedelta64)):
            raise _Other("give a timedelta")
        return _ticks(_span(value), tick)

    return fits


def _nested(kind: pa.DataType) -> Callable[[Any], Any]:
    """Lists, structs and all else: what comes back from Arrow as it was given."""

    def fits(value: Any) -> Any:
        try:
            held = from_plain([value], kind)
        except (Lossy, TypeError, ValueError, OverflowError) as e:
            raise _Other(str(e)) from None
        return value if to_plain(held)[0] == value else None

    return fits


_KINDS: list[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], Callable[[Any], Any]]]] = [
    (pa.types.is_integer, _whole),
    (pa.types.is_floating, _floating),
    (pa.types.is_decimal, _decimal),
    (pa.types.is_fixed_size_binary, _wide),
    (pa.types.is_date, _date),
    (pa.types.is_time, _time),
    (pa.types.is_timestamp, _instant),
    (pa.types.is_duration, _duration),
]

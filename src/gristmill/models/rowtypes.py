"""What a single answer has to be: whether a value is one of its column's type, said before the answer is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, is_list, lossless
from gristmill.errors import BadOutput
from gristmill.models.batchfunction import cast
from gristmill.models.contract import Columns
from gristmill.models.conversion import Habit, from_result
from gristmill.models.passthrough import handed_back
from gristmill.process.failure import SomeFailed

FORMAT: Literal["rows"] = "rows"  # how a function of one row is given it
Quick = Callable[[Any], bool]
Checks = Mapping[str, Quick]  # by column, what shows at a glance that a value fits
_LEAST_FLOAT32, _EXACT = float(np.finfo(np.float32).max), 2**53


class Misfit(Exception):
    """An answer that is not of the form asked for, also when asked for again. `used` is what it has taken
    (contract.USED).
    """

    used: Mapping[str, float] = {}


def quick(kind: pa.DataType, rounds: bool) -> Quick:
    """Whether a value of Python's is surely one of a column of this type, without a conversion, which takes a hundred
    times as long; false does not mean that it is none. `rounds`: floats may be rounded to it.
    """
    t = pa.types
    if t.is_string(kind) or t.is_large_string(kind):
        return lambda v: type(v) is str and (v.isascii() or _encodes(v))
    if t.is_boolean(kind):
        return lambda v: type(v) is bool
    if t.is_integer(kind):
        signed = t.is_signed_integer(kind)
        least, most = (-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1)) if signed else (0, 2**kind.bit_width)
        return lambda v: type(v) is int and least <= v < most
    if t.is_float64(kind):
        return lambda v: type(v) is float or (type(v) is int and -_EXACT <= v <= _EXACT)
    if t.is_float32(kind) and rounds:
        return lambda v: type(v) is float and (abs(v) <= _LEAST_FLOAT32 or not math.isfinite(v))
    if is_list(kind):
        inner, size = quick(kind.value_type, rounds), kind.list_size if t.is_fixed_size_list(kind) else None
        array = _dtype(kind.value_type)

        def listed(v: Any) -> bool:
            if type(v) is np.ndarray:
                return v.ndim == 1 and array is not None and v.dtype == array and size in (None, len(v))
            return type(v) is list and size in (None, len(v)) and all(x is None or inner(x) for x in v)

        return listed
    if t.is_struct(kind):
        fields = {field.name: quick(field.type, rounds) for field in kind}
        return lambda v: (
            type(v) is dict and v.keys() == fields.keys() and all(v[n] is None or ok(v[n]) for n, ok in fields.items())
        )
    return lambda v: False


def _dtype(kind: pa.DataType) -> np.dtype[Any] | None:
    """That of arrays which are surely of this type, one of numbers."""
    numbers = pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind)
    return np.dtype(kind.to_pandas_dtype()) if numbers else None


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class AnswerTypes:
    """What the answers of a function of one row are to be, by what it declares (`returns`, as it `said`), and by what
    is planned. `output` is the column of an answer that is no dict, and `renamed` that of a single column.
    """

    def __init__(
        self, name: str, output: str, renamed: str | None, returns: pa.Schema | None, said: Mapping[str, str]
    ) -> None:
        self._name = name
        self._output = output
        self._renamed = renamed
        self._returns = returns
        self._said = said

    def check(self, answer: Any, rows: pa.Table, row: int, planned: Columns | None, checks: Checks) -> None:
        """Raises Misfit if an answer to a row cannot be written in its columns, where these are known."""
        if self._returns is None and answer is None:
            raise self._nothing
        if (self._returns is None and planned is None) or self._surely(answer, checks):
            return
        for _ in self.columns(answer, rows.slice(row, 1), planned):
            pass

    def _surely(self, answer: Any, checks: Checks) -> bool:
        """Whether an answer fits, if that is seen at a glance."""
        if not isinstance(answer, dict):
            check = checks.get(self._output)
            return check is not None and (answer is None or check(answer))
        if not answer or (self._renamed is not None and len(answer) != 1):
            return False
        for name, value in answer.items():
            check = checks.get(name)
            if check is None or not (value is None or check(value)):
                return False
        return True

    def checks(self, planned: Columns | None) -> Checks:
        """By column, what shows at a glance that a value fits."""
        types = {} if planned is None else {f.name: f.type for f in planned.types}
        declared = self._returns
        fields = types if declared is None else {f.name: f.type for f in declared}
        return {
            name: quick(kind, rounds=declared is not None)
            for name, kind in fields.items()
            if types.get(name, kind).equals(kind)
        }

    def columns(self, answer: Any, row: pa.Table, planned: Columns | None) -> Iterator[tuple[str, pa.ChunkedArray]]:
        """The columns of one answer. Raises Misfit, naming the first that does not fit."""
        values = answer if isinstance(answer, Mapping) else {self._output: answer}
        if self._renamed is not None and len(values) == 1:
            values = {self._renamed: next(iter(values.values()))}
        known: Sequence[str] | None = planned.names if planned is not None else None
        declared = self._returns is not None
        known = self._returns.names if self._returns is not None else known
        for name, value in values.items():
            if known is not None and name not in known:
                whose = "returns= does not declare" if declared else "the first rows did not have"
                raise Misfit(f"{self._name} returned a column {name!r}, which {whose}: they are {', '.join(known)}")
            yield name, self._column(name, value, row, planned)
        for field in self._returns or (planned.types if planned is not None and not values else ()):
            if field.name not in values:
                yield field.name, pa.chunked_array([pa.nulls(1, field.type)])

    def _column(self, name: str, value: Any, row: pa.Table, planned: Columns | None) -> pa.ChunkedArray:
        """One row's value as its column. Raises Misfit."""
        kind, whose = None, "no column holds"
        try:
            table = from_result([{name: value}], 1, self._name, self._output, self._returns, given=row, habit=Habit())
            column = table.column(name)
            if self._returns is not None:
                kind = self._returns.field(name).type
                whose = f"returns= declares {self._said[name]}"
                column = cast(column, kind)
            elif name in row.column_names:
                column = handed_back(column, row.column(name), FORMAT)
            if planned is not None and name in planned.types.names:
                kind = planned.types.field(name).type
                whose = whose if self._returns is not None else f"was {kind} in the first rows"
                column = lossless(column, kind)
        except SomeFailed as e:
            raise e.failed[0] from None
        except (BadOutput, Lossy, UnicodeEncodeError, pa.ArrowException, OverflowError, TypeError, ValueError) as e:
            if kind is None and self._returns is not None:
                whose = f"returns= declares {self._said[name]}"
            elif kind is None and planned is not None and name in planned.types.names:
                whose = f"was {planned.types.field(name).type} in the first rows"
            why = f" ({e})" if isinstance(e, UnicodeEncodeError) else ""
            told = f"{value!r:.200}".encode("utf-8", "backslashreplace").decode()
            raise Misfit(
                f"{self._name} returned {told} ({type(value).__name__}) in column {name!r}, which {whose}: it cannot "
                f"hold that{why}"
            ) from None
        return column

    @property
    def _nothing(self) -> ValueError:
        """For a row whose answer was forgotten: what is meant to be null is written so."""
        return ValueError(
            f"{self._name} returned None: return a value, or a dict of columns, as {{'y': None}} for a null one "
            "(or declare returns=)"
        )

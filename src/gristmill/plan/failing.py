"""Failures and deaths as text, so that they cross any boundary, whatever an exception's class is or does."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gristmill.errors import GristmillError
from gristmill.plan.contracts import Death, Failure

if TYPE_CHECKING:
    import pyarrow as pa

TRACE = 16_000  # characters of a traceback that are kept, the last ones: the user's own frames


class SomeFailed(Exception):
    """Rows of a batch were answered with an exception each, the others with values. Raised by Model.predict and steps.

    `table` has the others alone, in their order; `failed` the exceptions by the number of the answer, and `lost` what
    else was in those answers.
    """

    def __init__(self, table: pa.Table, failed: Mapping[int, BaseException], lost: pa.Table | None = None) -> None:
        super().__init__(f"{len(failed)} rows failed")
        self.table = table
        self.failed = failed
        self.lost = lost


def storable(text: str) -> str:
    """`text` as UTF-8 can hold it: halves of surrogate pairs, which file names and JSON may have, as escaped."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def failure_of(error: BaseException, kind: str = "other") -> Failure:
    """An exception as a Failure; never raises, whatever the exception's own methods do."""
    try:
        message = str(error)
    except Exception as e:
        message = f"<{type(error).__name__} whose text cannot be had: {type(e).__name__}>"
    try:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-TRACE:]
    except Exception as e:
        trace = f"<no traceback: {type(e).__name__}>"
    module, name = type(error).__module__, type(error).__qualname__
    code = error.exit_code if isinstance(error, GristmillError) else 1
    return Failure(
        kind,
        storable(name if module in ("builtins", "__main__") else f"{module}.{name}"),
        storable(message[:4000]),
        storable(trace),
        code,
    )


def ended(death: Death, late: str) -> str:
    """How a worker ended, in words: `late` where it was its own watch that ended it ("": it had none)."""
    if death.lost:
        return death.lost
    if death.signal is not None:
        try:
            return signal.Signals(death.signal).name
        except ValueError:
            return f"signal {death.signal}"
    if late and "Timeout (" in death.evidence:
        return late
    return f"exit code {death.exit_code}"

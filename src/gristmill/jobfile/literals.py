"""Values typed on a command line."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

from gristmill.errors import BadJob

# Numbers that may be meant as text: trailing zeros (versions), not finite, digits around an e (digests).
_DOUBTFUL = re.compile(r"-?\d+\.\d*[1-9]0+|-?\d+\.0{2,}|\d{2,}[eE]\d+|-?(NaN|Infinity)|-0")


def literal(text: str, said: str | None) -> Any:
    """A value typed on a command line: JSON if it is valid, else the text itself. Raises BadJob, whose message begins
    with `said`, if a number would not be what was typed: 1.10, 12e4567, NaN.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return text
    exact = not isinstance(value, float) or (math.isfinite(value) and Decimal(text) == Decimal(repr(value)))
    if said is not None and (not exact or _DOUBTFUL.fullmatch(text.strip())):
        number = f"write {value!r} if you mean that, or " if math.isfinite(value) else ""
        raise BadJob(f"{said}: this would be the number {value!r}, not {text}: {number}'\"{text}\"' for the text")
    return value

"""Names as one text with commas, as flags take them: a name with a comma or a quote is in quotes, as in CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

__all__ = ["joined", "split"]


def split(text: str) -> list[str]:
    """The names in `a,"b, c"`."""
    rows = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    return [name for row in rows for field in row if (name := field.strip())]


def joined(names: Sequence[str]) -> str:
    """One text that is split into these names."""
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="").writerow(names)
    return out.getvalue()

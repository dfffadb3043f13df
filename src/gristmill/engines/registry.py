"""Engines by name."""

from __future__ import annotations

import difflib
from typing import Any

from gristmill.errors import BadJob

NAMES = ("local", "ray", "spark")


def open_engine(name: str, **options: Any) -> Any:
    """The engine called `name`. Raises BadJob for a name there is none for, MissingExtra where its package is
    missing.
    """
    if name == "local":
        from gristmill.engines.local import Local

        return Local(**options)
    close = difflib.get_close_matches(name, NAMES, 1)
    raise BadJob(
        f"engine {name!r}: there is {', '.join(NAMES[:1])}" + (f"; did you mean {close[0]!r}?" if close else "")
    )

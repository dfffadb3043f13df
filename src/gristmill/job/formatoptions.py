"""Options of formats: an unknown name is an error with a suggestion, never ignored."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from gristmill.errors import BadJob

__all__ = ["known"]


def known(options: Mapping[str, Any], names: Iterable[str], of: str) -> None:
    """Raises BadJob for an option that is not in `names`. `of` says whose options they are."""
    names = list(names)
    for name in options:
        if name not in names:
            alike = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {alike[0]!r}?" if alike else f"it takes {', '.join(names) or 'none'}"
            raise BadJob(f"{of} has no option {name!r}: {hint}")

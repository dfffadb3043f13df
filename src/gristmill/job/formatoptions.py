"""Options of formats: an unknown name is an error with a suggestion, never ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gristmill.errors import BadJob, nearest
from gristmill.job.synonyms import meant, said

__all__ = ["known"]


def known(options: Mapping[str, Any], names: Iterable[str], of: str) -> None:
    """Raises BadJob for an option that is not in `names`. `of` says whose options they are."""
    names = list(names)
    for name in options:
        if name not in names:
            instead = said(str(name))
            near = meant(str(name), names) or (None if instead else nearest(str(name), names))
            hint = f"did you mean {near!r}?" if near else instead or f"it takes {', '.join(names) or 'none'}"
            raise BadJob(f"{of} has no option {name!r}: {hint}")

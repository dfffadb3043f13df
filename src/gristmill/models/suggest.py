"""The name that was probably meant, for the end of an error message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that is most like `name`, whatever the case of its letters; None if none is."""
    by_fold = {n.casefold(): n for n in names}
    close = difflib.get_close_matches(name.casefold(), by_fold, 1)
    return by_fold[close[0]] if close else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """ "; did you mean 'text'?", or nothing."""
    close = nearest(name, names)
    return "" if close is None else f"; did you mean {close!r}?"

"""What two addresses lead to, told of one moment: others may change it between a look at the one and at the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gristmill.stores.contract import Place

__all__ = ["both"]

_Seen = TypeVar("_Seen")
_LOOKS = 5


def both(look: Callable[[Place], _Seen], read: Place, to: Place) -> tuple[_Seen, _Seen] | None:
    """What is seen at two places, of which the first did not change in the meantime, or which are alike; None if it
    changes with every look.
    """
    one = look(read)
    for _ in range(_LOOKS):
        other, again = look(to), look(read)
        if other in (one, again):
            return other, other
        if one == again:
            return one, other
        one = again
    return None

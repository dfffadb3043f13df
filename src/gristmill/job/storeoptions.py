"""Options of stores, in their addresses and beside them: each is somebody's, or refused. One that is dropped may be the
one that leaves the rows of others where they are.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from urllib.parse import parse_qsl

from gristmill.errors import BadJob
from gristmill.job.formatoptions import known

__all__ = ["names_of", "refuse_misplaced", "refuse_unknown", "said_in"]

_NEAR = 0.8  # names of clients (sslmode) are further from ours


def _pairs(uri: str) -> list[tuple[str, str]]:
    return parse_qsl(uri.partition("#")[0].partition("?")[2], keep_blank_values=True)


def names_of(uri: str) -> list[str]:
    """The names of the options in the query of an address."""
    return [name for name, _ in _pairs(uri)]


def said_in(uri: str, ours: Collection[str], shown: str, lists: Collection[str] = ()) -> dict[str, str]:
    """Our options in the query of an address; those that are `lists` may be given item by item. Raises BadJob for one
    without a value, or with two.
    """
    found: dict[str, str] = {}
    for name, value in _pairs(uri):
        if name not in ours:
            continue
        if not value:
            raise BadJob(f"{shown}: {name} has no value: write ?{name}=VALUE, or leave it out")
        if name in lists and name in found:
            value = f"{found[name]},{value}"
        elif found.get(name, value) != value:
            raise BadJob(f"{shown}: {name} is {found[name]!r} and {value!r}: leave one of them out")
        found[name] = value
    return found


def refuse_unknown(given: Iterable[str], takes: Collection[str] | None, ours: Collection[str], whose: str) -> None:
    """Raises BadJob for an option in an address that is neither one of `ours` nor one that the store `takes`; for one
    that is nearly one of ours where that is for the store's client to say (None).
    """
    for name in given:
        if takes is not None:
            known({name: ""}, (*ours, *takes), whose)
        elif name not in ours and (near := _nearly(name, ours)):
            raise BadJob(f"{whose} has no option {name!r}: did you mean {near!r}?")


def refuse_misplaced(given: Iterable[str], takes: Collection[str] | None, ours: Collection[str], whose: str) -> None:
    """Raises BadJob for an option among those of a store's client that is one of `ours`, nearly one, or, unless that is
    for the client to say (None), not one that it `takes`.
    """
    for name in given:
        near = None if name in (takes or ()) else _nearly(name, ours)
        if near is not None:
            asked = "it" if name == near else f"did you mean {near!r}, which"
            raise BadJob(
                f"{whose} has no option {name!r}: {asked} is the delivery's own, and stands beside options: "
                f"{{to: …, {near}: …}} in a job file, gm.to(…, {near}=…) in Python"
            )
        if takes is not None:
            known({name: ""}, takes, whose)


def _nearly(name: str, ours: Collection[str]) -> str | None:
    """Which of ours may be meant: also with its letters in another order."""
    plain = name.casefold()
    close = difflib.get_close_matches(plain, ours, 1, _NEAR)
    return next((one for one in (*close, *ours) if one in close or sorted(one) == sorted(plain)), None)

"""The addresses of one model, which share its requests: one that fails is left out until it is well. Decided from a
clock alone.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence

from gristmill.values import dataclass

BASE = 0.5  # seconds for which an address is left out at first; twice as long each time
FAILED = 2  # failures, one after the other, that are no longer those of single requests
LAST = 10  # requests to an address that tell what it has room for, or as many as are on their way,
MANY = 0.3  # and the share of them that is put off where it has too much to do: fewer are chance
LONG = 5.0  # seconds: whoever asks for a longer pause means all requests


def below(url: str, path: str) -> str:
    """The address of what is below another one: `https://host/v1?api-version=1` and `models` is
    `https://host/v1/models?api-version=1`.
    """
    place, question, query = url.partition("?")
    return f"{place.rstrip('/')}/{path}{question}{query}"


@dataclass
class Address:
    """One of them: how many requests it has, until when it is left alone, and since when."""

    url: str
    flying: int = 0
    failures: int = 0  # one after the other
    rests_until: float = float("-inf")
    rested: float = float("-inf")
    trial: object | None = None  # of the request that is on its way to see whether it is well again
    put_off: float = 0.0  # the share of the last requests that are to come later (429, 503, a Retry-After)

    @property
    def last(self) -> int:
        """Over how many requests that share is."""
        return max(LAST, self.flying)


class Addresses:
    """Those of an endpoint. One that fails is left out for up to `most` seconds at a time; so is one that refuses what
    others answer. A single one rests only if it says so itself: its requests are sent again one by one. A short pause
    that it asks for is that of the one request, unless it puts off many. One that would refuse everything (its key, its
    model) is left out for good, but for the last one.
    """

    def __init__(self, urls: Sequence[str], most: float) -> None:
        self._most = most
        self._all = [Address(url if "?" in url else url.rstrip("/")) for url in urls]

    def __iter__(self) -> Iterator[Address]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def free(self, now: float, but: Collection[str] = ()) -> Address | None:
        """The least busy one that is well, for a request, and none of `but`; of one that failed, a single request finds
        out.
        """
        asked = [a for a in self._all if a.url not in but]
        free = [a for a in asked if a.rests_until <= now and not (self._left_out(a) and a.trial)]
        return min(free, key=lambda a: (not self._left_out(a), a.flying), default=None)

    def sends(self, address: Address) -> object:
        """A request is on its way there. Whatever becomes of it, `over` is called with what this returns, and then what
        it showed is told, before anything is waited for: meanwhile no other one is sent where one is enough.
        """
        own = object()
        # By what is sent, not by what is answered: a request is put off at once, and answered later.
        address.put_off *= 1 - 1 / address.last
        if self._left_out(address):
            address.trial = own
        return own

    def over(self, address: Address, own: object) -> None:
        """A request is not on its way any more."""
        if address.trial is own:
            address.trial = None

    def rest(self, now: float) -> float:
        """Seconds until one of them may be asked; 0 if one may now."""
        return max(0.0, min(a.rests_until for a in self._all) - now)

    def others_well(self, address: Address, now: float) -> bool:
        """Whether another one is well."""
        return any(a is not address and a.rests_until <= now and not self._left_out(a) for a in self._all)

    def without(self, address: Address) -> bool:
        """Leave it out for good. Returns whether another one is left; the last one stays."""
        self._all = [a for a in self._all if a is not address] or self._all
        return self._all != [address]

    def failed(self, address: Address, now: float, sent: float, after: float | None, full: bool = False) -> bool:
        """It did not answer a request that was `sent` at that time, asks to be left alone for `after` seconds, or is
        `full`. Returns whether it has too much to do, or asks for a pause of all requests.
        """
        if full or after is not None:
            address.put_off += 1 / address.last
        many = address.put_off > MANY or (after or 0.0) > LONG
        if many and after is not None:
            address.rests_until = max(address.rests_until, now + after + random.uniform(0, 0.1))
        if sent < address.rested:  # which says nothing new
            return many
        address.trial = None
        address.failures += 1
        if self._left_out(address):
            address.rested = now
            pause = random.uniform(0.5, 1.0) * min(self._most, BASE * 2.0 ** min(address.failures - 1, 10))
            address.rests_until = max(address.rests_until, now + pause)
        return many

    def refused(self, address: Address, now: float, sent: float) -> None:
        """It refused a request, which may be answered elsewhere: one that is left out shows no more than that by it."""
        if self._left_out(address):
            self.failed(address, now, sent, None)

    def answered(self, address: Address, sent: float) -> None:
        """It answered a request that was sent at that time."""
        if sent >= address.rested:
            address.failures, address.trial = 0, None

    def _left_out(self, address: Address) -> bool:
        return len(self._all) > 1 and address.failures >= FAILED

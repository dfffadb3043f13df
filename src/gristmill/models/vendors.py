"""Whose forms an endpoint speaks: where it is if nobody says, and how it is given the key."""

from __future__ import annotations

from collections.abc import Mapping

from gristmill.job.endpoints import Provider
from gristmill.values import dataclass


@dataclass(frozen=True)
class Vendor:
    """`variable` begins the names of the environment's variables for address and key (…_BASE_URL, …_API_KEY); the key
    is sent in the header `sends`, after the word `before`, and `more` headers with each request.
    """

    url: str
    variable: str
    sends: str = "authorization"
    before: str = "Bearer "
    more: tuple[tuple[str, str], ...] = ()

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Of each request."""
        return {**dict(self.more), **({self.sends: f"{self.before}{key}"} if key else {})}


OPENAI = Vendor("https://api.openai.com/v1", "OPENAI")
ANTHROPIC = Vendor("https://api.anthropic.com/v1", "ANTHROPIC", "x-api-key", "", (("anthropic-version", "2023-06-01"),))
VENDORS: Mapping[Provider, Vendor] = {"openai": OPENAI, "anthropic": ANTHROPIC}

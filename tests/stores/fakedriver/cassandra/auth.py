"""Who asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlainTextAuthProvider:
    """A name and a password."""

    username: str
    password: str

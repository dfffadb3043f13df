"""Batches of requests at a provider, as they are noted, and which requests are in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.models.providers import State


@dataclass(slots=True)
class Request:
    """A request: where its body is, about how many tokens its prompt has, and what its answer may have at most."""

    digest: bytes
    path: str
    at: int
    size: int
    tokens: float
    most: int | None
    cost: float = 0.0
    tries: int = 0
    why: str = ""


@dataclass
class Batch:
    """A batch: the digests of its requests, in order; `asks` are those of this attempt, by their place in it. It was
    noted by an `earlier` attempt, which has told how it ended if it is `over`, that its answers are `gone` at the
    provider, or that it is `unlisted`: nothing tells whether it was created.
    """

    name: str
    path: str
    digests: Sequence[bytes]
    since: float
    id: str = ""
    over: bool = False
    gone: bool = False
    unlisted: bool = False
    earlier: bool = False
    asks: dict[int, Request] = field(default_factory=dict)
    state: State | None = None
    found: set[int] = field(default_factory=set)  # places of requests that have their answer
    refused: str = ""  # what the provider refuses, whoever asks


def noted(notes: Sequence[Any]) -> list[Batch]:
    """The batches that earlier attempts noted."""
    told: dict[str, dict[str, Any]] = {}
    for note in notes:
        if "batch" in note:
            told.setdefault(note["batch"], {}).update(note)
    return [
        Batch(
            name, one["path"], [bytes.fromhex(d) for d in one["digests"]], one["at"], one.get("id", ""),
            one.get("over", False), one.get("gone", False), one.get("unlisted", False), earlier=True,
        )
        for name, one in told.items()
        if "digests" in one
    ]  # fmt: skip


def under_way(notes: Sequence[Any]) -> list[str]:
    """The batches that may be under way, by what is noted of them: their ids, or else their names."""
    return [batch.id or batch.name for batch in noted(notes) if not batch.over]


def claimed(requests: Sequence[Request], batches: Collection[Batch]) -> list[Request]:
    """Put requests where batches have such; returns the others."""
    places: dict[bytes, deque[tuple[Batch, int]]] = {}
    for batch in batches:
        for number, digest in enumerate(batch.digests):
            places.setdefault(digest, deque()).append((batch, number))
    left = []
    for request in requests:
        if there := places.get(request.digest):
            batch, at = there.popleft()
            batch.asks[at] = request
        else:
            left.append(request)
    return left

"""Batches of requests at a provider, as they are noted, and which requests are in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from gristmill.values import dataclass

if TYPE_CHECKING:  # a driver that asks nobody needs no event loop
    from gristmill.models.providers import State


@dataclass(slots=True)
class Request:
    """A request: where its body is, about how many tokens its prompt has, and what its answer may have at most. `cost`
    is kept free for it.
    """

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
    """A batch: the digests of its requests, in order; `asks` are those of this attempt, by their place in it. Their
    prompts have about so many `tokens` together, and their answers `most` (None: nothing limits them). It was noted by
    an `earlier` attempt, which has told how it ended if it is `over`, that its answers are `gone` at the provider, that
    it is `unlisted`: nothing tells whether it was created; what it took (`counted`); and that what was not there (404)
    for some requests is there by now (`judged`). `late` is when its creation was not answered, and may be obeyed later,
    in seconds of the epoch; once it was `repeated`, there may be `twins`, of which these are counted, and each is a
    batch, too (`twin`). It may be a `foreign` one, of another shard, that has some of the requests.
    """

    name: str
    path: str
    digests: Sequence[bytes]
    since: float
    tokens: float = 0.0
    most: float | None = None
    id: str = ""
    over: bool = False
    gone: bool = False
    unlisted: bool = False
    counted: bool = False
    judged: bool = False
    earlier: bool = False
    late: float = 0.0
    repeated: bool = False
    twins: list[str] = field(default_factory=list)
    twin: bool = False
    foreign: bool = False
    sent: bool = False  # it may be there
    unsure: str = ""  # why it is looked for, while it is
    asks: dict[int, Request] = field(default_factory=dict)
    state: State | None = None
    found: set[int] = field(default_factory=set)  # places of requests that have their answer,
    left: set[int] = field(default_factory=set)  # and of those that have none here
    read: set[int] = field(default_factory=set)  # places of results that were read
    used: dict[str, float] = field(default_factory=dict)  # what these took
    refused: str = ""  # what the provider refuses, whoever asks
    strange: dict[int, tuple[int, Any]] = field(default_factory=dict)  # answers (404) that may be about all requests

    @property
    def open(self) -> dict[int, Request]:
        """Those of its requests that have no answer, and may have one here."""
        return {place: ask for place, ask in self.asks.items() if place not in self.found and place not in self.left}

    def leaves(self) -> list[Request]:
        """The requests that have no answer here: each is given back once."""
        again = self.open
        self.left.update(again)
        return list(again.values())

    @property
    def mean(self) -> tuple[float, float | None]:
        """Tokens of a prompt, and of its answer at most."""
        return self.tokens / len(self.digests), None if self.most is None else self.most / len(self.digests)


def made(name: str, part: Sequence[Request], since: float) -> Batch:
    """A batch of these requests."""
    most = [request.most for request in part if request.most is not None]
    return Batch(
        name, part[0].path, [request.digest for request in part], since, sum(request.tokens for request in part),
        float(sum(most)) if len(most) == len(part) else None, asks=dict(enumerate(part)),
    )  # fmt: skip


def note_of(batch: Batch) -> dict[str, Any]:
    """What is noted of a batch before it is created."""
    return {
        "batch": batch.name, "path": batch.path, "digests": [digest.hex() for digest in batch.digests],
        "at": batch.since, "tokens": batch.tokens, "most": batch.most,
    }  # fmt: skip


def noted(notes: Sequence[Any]) -> list[Batch]:
    """The batches that earlier attempts noted."""
    told: dict[str, dict[str, Any]] = {}
    for note in notes:
        if "batch" in note:
            told.setdefault(note["batch"], {}).update(note)
    return [
        Batch(
            name, one["path"], [bytes.fromhex(d) for d in one["digests"]], one["at"], one.get("tokens", 0.0),
            one.get("most", 0.0), one.get("id", ""), one.get("over", False), one.get("gone", False),
            one.get("unlisted", False), one.get("counted", False), one.get("judged", False), earlier=True,
            late=one.get("late", 0.0), repeated=one.get("repeated", False), twins=one.get("twins", []), sent=True,
        )
        for name, one in told.items()
        if "digests" in one
    ]  # fmt: skip


def under_way(notes: Sequence[Any]) -> list[str]:
    """The batches that may be under way, by what is noted of them: their ids, or else their names."""
    return [batch.id or batch.name for batch in noted(notes) if not batch.over]


def claimed(requests: Sequence[Request], batches: Collection[Batch]) -> list[Request]:
    """Put requests where batches have such, and nobody's yet: one that has no answer there may be in another one, with
    others that were put there before. Returns those that are in none.
    """
    places: dict[bytes, deque[tuple[Batch, int]]] = {}
    for batch in batches:
        for number, digest in enumerate(batch.digests):
            if number not in batch.asks:
                places.setdefault(digest, deque()).append((batch, number))
    left = []
    for request in requests:
        if there := places.get(request.digest):
            batch, at = there.popleft()
            batch.asks[at] = request
        else:
            left.append(request)
    return left

"""What endpoints reply, and what their failures mean."""

from __future__ import annotations

import email.utils
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.job.uris import redact
from gristmill.process.failure import Outside
from gristmill.values import dataclass

# Statuses of what may be answered another time, odd ones included: no more than 501 and 505 say that it never will be.
LATER = frozenset({408, 409, 424, 425, 429, 499, *range(100, 200), *range(201, 300), *range(500, 1000)} - {501, 505})
FULL = frozenset({429, 503})
# What is refused for all rows.
NOBODY = {401: "the key", 402: "the account", 404: "the address or the model"}
QUOTA = ("insufficient_quota", "billing_hard_limit_reached")
CHAT, MESSAGES = "chat/completions", "messages"
# By the path of a request, what its reply holds.
REPLIES = {
    CHAT: "choices",
    "completions": "choices",
    "embeddings": "data",
    "responses": "output",
    MESSAGES: "content",
    "score": "data",
    "rerank": "results",
}
MOST_USED = 10**9  # tokens of one request: more is no number of tokens
MOST_AFTER = 86_400.0  # seconds for which an endpoint may ask to be left alone: more is no such time, but taken as that


class Refused(Outside):
    """The endpoint refuses this request, and would again: with which status and code, and its reply if that is JSON.
    `used` is what its row has taken all the same (contract.USED).
    """

    used: Mapping[str, float] = {}

    def __init__(self, why: str, status: int = 400, reply: Any = None, code: str = "") -> None:
        super().__init__(why)
        self.status = status
        self.reply = reply
        self.code = code


class Empty(Refused):
    """The endpoint answered with 200 and nothing, as gateways do for texts that they filter. It is paid for: `reply`
    has what it took.
    """

    def __init__(self, key: str, reply: Mapping[str, Any]) -> None:
        super().__init__(f"a reply without {key}", 200, reply)


class UnderWay(Exception):
    """The request is in a batch that is not over."""


class Unanswered(Outside):
    """The request was sent again until its time was over."""


@dataclass(frozen=True)
class Forbidden(Exception):
    """The endpoint forbids this request, which was `sent` at that time, or all."""

    why: str
    sent: float
    reply: Any = None


@dataclass(frozen=True)
class Closed(Exception):
    """An address refuses every request: its key, its account, or the model (`what`)."""

    what: str
    why: str


@dataclass(frozen=True)
class Later(Exception):
    """What is worth another try, not before `after` seconds if the endpoint says so; `full`: it has too much to do;
    `lost`: the request was sent, and what it was answered is not known, so that it may have to be paid for.
    """

    why: str
    after: float | None = None
    full: bool = False
    lost: bool = False


def holds(found: Any, key: str) -> bool:
    """Whether a reply has what such replies hold; a response or a message may have put out nothing."""
    return isinstance(found, dict) and bool(found.get(key) or (key in ("output", "content") and key in found))


def answers(found: Any, key: str) -> bool:
    """Whether a reply is an answer, which is paid for: it holds what such replies hold, if only an empty list, as
    gateways give for texts that they filter, or tells what it took.
    """
    return holds(found, key) or (isinstance(found, dict) and (found.get(key) == [] or sum(tokens_in(found)) > 0))


def place_of(item: Any) -> int | None:
    """The `index` of one of several answers, also where it is written as 1.0 or "1"; None if it has none."""
    found = item.get("index") if isinstance(item, Mapping) else None
    if type(found) is int:
        return found
    if isinstance(found, float) and found.is_integer():
        return int(found)
    return int(found) if isinstance(found, str) and found.isdecimal() and len(found) < 10 else None


def placed(items: Sequence[Any]) -> dict[int, Any]:
    """Several answers by their `index`, or else by their place; by -1 where an index is no number."""
    found: dict[int, Any] = {}
    for place, item in enumerate(items):
        own = place_of(item)
        found[place if "index" not in item else -1 if own is None else own] = item
    return found


def redirected(asked: str, status: int, headers: Mapping[str, str]) -> str:
    """For people: where an address points to, without what may be a secret."""
    where = redact(headers.get("location", "")).partition("?")[0].partition("#")[0][:200] or "nowhere"
    return (
        f"{asked} answers {status}, a redirect to {where}: it is not followed, as whoever is there would get the key: "
        "give the address itself (base_url)"
    )


def json_in(text: bytes) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def usage_of(found: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an answer's usage that can be such, whatever else it may hold."""
    usage = found.get("usage")
    if not isinstance(usage, dict):
        return {}
    return {name: float(n) for name, n in usage.items() if type(n) in (int, float) and 0 <= n <= MOST_USED}


def tokens_in(found: Mapping[str, Any]) -> tuple[float, float]:
    """The tokens of prompt and answer, whichever form has named them."""
    usage = usage_of(found)
    names = (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
    given, made = (usage.get(one) or usage.get(other) or 0.0 for one, other in names)
    return given, made


def said_in(text: bytes) -> tuple[str, str]:
    """An error in the endpoint's own words, and its code."""
    try:
        found = json.loads(text)
        error = found.get("error", found)
        if isinstance(error, dict):
            message = error.get("message") or error.get("detail") or json.dumps(error)
            return str(message)[:1000], str(error.get("code") or error.get("type") or "")
        return str(error)[:1000], ""
    except (ValueError, AttributeError):
        return text[:300].decode("utf-8", "replace").strip(), ""


def after_of(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, as a Retry-After (RFC 9110: seconds or a date) or retry-after-ms says, up to MOST_AFTER; None
    without one, or for what is no time to come.
    """
    try:
        if (milliseconds := headers.get("retry-after-ms")) is not None:
            seconds = float(milliseconds) / 1000
        elif (text := headers.get("retry-after")) is None:
            return None
        elif text.strip().replace(".", "", 1).lstrip("-").isdecimal():
            seconds = float(text)
        else:
            seconds = max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError, OSError):
        return None
    return min(seconds, MOST_AFTER) if math.isfinite(seconds) and seconds >= 0 else None

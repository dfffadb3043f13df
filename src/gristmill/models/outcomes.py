"""Requests that have no answer, and which of them may be on the bill all the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# By status, of requests that are sent again: why the endpoint may have computed an answer, which it bills. All others
# say that nothing was computed, or not to its end (overloaded, not ready, broken), that a proxy had no connection (521
# to 523, 525, 526, 530, 599), or that this request never will be answered: providers do not bill these.
BILLED: Mapping[int, str] = {
    **dict.fromkeys(range(200, 300), "it was answered, and what came cannot be read"),
    408: "its answer took too long (Azure bills that)",
    499: "the proxy takes it that we have left",
    502: "the answer to a proxy was cut, or was none",
    504: "the answer to a proxy took too long",
    520: "the answer to a proxy was cut, or was none (Cloudflare)",
    524: "the answer to a proxy took too long (Cloudflare)",
    598: "the answer to a proxy took too long",
}


def may_be_billed(status: int | None, reply: Any = None) -> bool:
    """Whether a request that was sent, and has no answer, may be on the bill: with this status (None: the connection
    ended, or its time was over) and this JSON, if that is what came. One that is told to have failed is not.
    """
    if status is None:
        return True
    failed = 200 <= status < 300 and isinstance(reply, Mapping) and bool(reply.get("error"))
    return status in BILLED and not failed


def filtered(reply: Mapping[str, Any]) -> bool:
    """Whether a refusal tells that a filter of Azure's has read the prompt, which is billed (a 400): its error has what
    the filter found.
    """
    error = reply.get("error")
    if not isinstance(error, Mapping) or error.get("code") != "content_filter":
        return False
    return any(isinstance(error.get(name), Mapping) for name in ("innererror", "inner_error"))

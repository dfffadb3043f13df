"""The batch APIs of providers, as their references have them: how a batch is created, found again, looked at and read.

https://platform.openai.com/docs/api-reference/batch, https://platform.claude.com/docs/en/api/messages/batches
"""

from __future__ import annotations

import datetime
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import IO, Any, Protocol

from gristmill.job.endpoints import Provider
from gristmill.models.desk import Desk, Gone
from gristmill.models.replies import CHAT, MESSAGES
from gristmill.values import dataclass

SLACK = 3600.0  # seconds by which the provider's clock may differ from this one
PAGE = 100
MARK = "gristmill"  # the name of what OpenAI's metadata hold of ours
MOST_LINE = 1 << 27  # bytes of the answer to one request: 2,048 vectors of 3,072 numbers have half as many

Lines = Iterable[tuple[str, bytes]]  # custom_id and the body of a request, as JSON


@dataclass(frozen=True)
class BatchReply:
    """What a batch gave for one request: its reply with 200, or what is wrong; `status` is None if it was not done."""

    custom_id: str
    status: int | None
    reply: Any
    why: str = ""
    code: str = ""


def _every(result: BatchReply) -> bool:
    return True


@dataclass(frozen=True)
class State:
    """A batch at its provider. `over`: it changes no more, and its files have a line for each of as many requests as
    are `answered` (None: for all of them), which is one that `counts` as such. `failed` says why nothing of it was
    done, and `full` that this is because too much is under way; `cancelled`: somebody has ended it. `until` it should
    be over, in seconds of the epoch. `gone` says why results are no longer kept, if that is told. Where the files have
    a line for `every` request, a `total` of fewer is of a moment ago.
    """

    over: bool
    done: int
    total: int
    files: tuple[str, ...] = ()  # paths of what it gave
    answered: int | None = 0
    failed: str = ""
    full: bool = False
    cancelled: bool = False
    until: float | None = None
    gone: str = ""
    counts: Callable[[BatchReply], bool] = _every
    every: bool = False

    def of(self, requests: int) -> State:
        """This, of a batch of so many requests: counts of fewer are not believed."""
        behind = self.over and self.every and self.total < requests
        return replace(self, answered=None, counts=_every) if behind else self


@dataclass(frozen=True)
class Listed:
    """What a list of batches tells of one that may have been created: the `ids` of those that are it, or else of those
    that may be: `open` until they are over, `dark` because their results are not there.
    """

    ids: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    dark: tuple[str, ...] = ()


class BatchAPI(Protocol):
    """A provider. `paths` are the forms that it takes, and a batch is of one of them."""

    paths: frozenset[str]
    most_requests: int
    most_bytes: int

    async def upload(self, desk: Desk, name: str, path: str, lines: Lines) -> str:
        """What has to be there before a batch is created, as `create` takes it: it may be there twice."""
        ...

    async def create(self, desk: Desk, name: str, path: str, uploaded: str, lines: Lines) -> str:
        """Create a batch that can be found by its name, and return its id. Raises as Desk.once: after Unsure there may
        be one.
        """
        ...

    async def find(self, desk: Desk, name: str, count: int, since: float, others: frozenset[str]) -> Listed:
        """The batches of so many requests that were created with that name, after `since`; none of `others` is. Raises
        Gone if there is no list.
        """
        ...

    async def look(self, desk: Desk, batch: str) -> State:
        """How far it is. Raises Gone."""
        ...

    async def cancel(self, desk: Desk, batch: str) -> None:
        """Begin no more of it: it is over soon. Raises as Desk.once, also if it is over."""
        ...

    def result(self, line: bytes) -> BatchReply | None:
        """What a line of a batch's files says; None if it cannot be read."""
        ...


class OpenAI:
    """A file of requests, a batch that names it, and files of what it gave. Its name is in the metadata."""

    paths = frozenset({CHAT, "completions", "embeddings", "responses"})
    most_requests, most_bytes = 50_000, 200 * 10**6

    async def upload(self, desk: Desk, name: str, path: str, lines: Lines) -> str:
        """See BatchAPI."""
        with tempfile.TemporaryFile() as file:
            for custom_id, body in lines:
                head = json.dumps({"custom_id": custom_id, "method": "POST", "url": f"/v1/{path}"})
                file.write(head.encode()[:-1] + b', "body": ' + body + b"}\n")
            file.flush()
            given = await desk.patient(lambda: self._uploaded(desk, name, file))
        return str(given["id"])

    async def create(self, desk: Desk, name: str, path: str, uploaded: str, lines: Lines) -> str:
        """See BatchAPI."""
        told = {
            "input_file_id": uploaded,
            "endpoint": f"/v1/{path}",
            "completion_window": "24h",
            "metadata": {MARK: name},
        }
        headers = {"content-type": "application/json"}
        found = await desk.once("POST", "batches", data=json.dumps(told).encode(), headers=headers, has=("id",))
        return str(found["id"])

    async def _uploaded(self, desk: Desk, name: str, file: IO[bytes]) -> dict[str, Any]:
        import aiohttp

        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", _again(file), filename=f"{name}.jsonl", content_type="application/jsonl")
        return await desk.once("POST", "files", data=form, sends=file, has=("id",))

    async def find(self, desk: Desk, name: str, count: int, since: float, others: frozenset[str]) -> Listed:
        """See BatchAPI."""
        found, after = [], dict[str, str]()
        while True:
            page = await desk.asked("batches", ("data",), limit=str(PAGE), **after)
            batches = _listed(page)
            for batch in batches:
                marks = batch.get("metadata")
                if isinstance(marks, dict) and marks.get(MARK) == name and batch["id"] not in others:
                    found.append((_seconds(batch.get("created_at")), batch["id"]))
            if not page.get("has_more") or not batches or _seconds(batches[-1].get("created_at")) < since - SLACK:
                break
            if after == (after := {"after": batches[-1]["id"]}):  # the same page for ever
                break
        return Listed(tuple(batch for _, batch in sorted(found)))

    async def look(self, desk: Desk, batch: str) -> State:
        """See BatchAPI."""
        told = await desk.asked(f"batches/{batch}", ("status",))
        status, counts, errors = str(told["status"]).lower(), _counts(told), told.get("errors")
        cancelled, done = status in ("cancelled", "canceled"), counts.get("completed", 0) + counts.get("failed", 0)
        whole = status == "completed"  # all are told, and counts that say less are of a moment ago
        # Of one that was ended before, what was not begun may count as failed, too.
        answered = counts.get("completed", 0) if not whole else done if 0 < done >= counts.get("total", 0) else None
        listed = errors.get("data") if isinstance(errors, dict) else None
        found = [e for e in (listed if isinstance(listed, list) else ()) if isinstance(e, dict)]
        files = [told.get("output_file_id"), told.get("error_file_id")]
        return State(
            status in ("completed", "failed", "expired") or cancelled,
            done,
            counts.get("total", 0),
            tuple(f"files/{file}/content" for file in files if file),
            answered,
            "; ".join(map(_error, found[:5])) or "no reason is given" if status == "failed" else "",
            any(e.get("code") == "token_limit_exceeded" for e in found),
            cancelled,
            _until(told),
            counts=_every if whole else self._completed,
            every=whole,
        )

    async def cancel(self, desk: Desk, batch: str) -> None:
        """See BatchAPI."""
        await desk.once("POST", f"batches/{batch}/cancel")

    def _completed(self, result: BatchReply) -> bool:
        """Whether it is one of those that are completed: what was not begun has an error, as what failed."""
        return result.status == 200 or (result.status is None and not result.why)

    def result(self, line: bytes) -> BatchReply | None:
        """See BatchAPI."""
        if (told := _readable(line)) is None:
            return None
        reply, error = told.get("response"), told.get("error")
        reply = reply if isinstance(reply, dict) else {}
        body, status = reply.get("body"), reply.get("status_code")
        if isinstance(body, dict) and isinstance(body.get("error"), dict):
            error = error or body["error"]
        why, code = _said(error)
        return BatchReply(told["custom_id"], status if type(status) is int else None, body, why, code)


# The statuses that its errors would have had, by their type.
STATUSES = {
    "invalid_request_error": 400, "authentication_error": 401, "billing_error": 402, "permission_error": 403,
    "not_found_error": 404, "request_too_large": 413, "rate_limit_error": 429, "api_error": 500,
    "timeout_error": 504, "overloaded_error": 529,
}  # fmt: skip


class Anthropic:
    """A batch with all its requests. It has no metadata: its name begins the ids of its requests, which are told only
    once it has ended.
    """

    paths = frozenset({MESSAGES})
    most_requests, most_bytes = 100_000, 256 * 10**6

    async def upload(self, desk: Desk, name: str, path: str, lines: Lines) -> str:
        """See BatchAPI: nothing."""
        return ""

    async def create(self, desk: Desk, name: str, path: str, uploaded: str, lines: Lines) -> str:
        """See BatchAPI."""
        with tempfile.TemporaryFile() as file:
            file.write(b'{"requests": [')
            for number, (custom_id, body) in enumerate(lines):
                head = json.dumps({"custom_id": custom_id}).encode()[:-1]
                file.write((b",\n" if number else b"") + head + b', "params": ' + body + b"}")
            file.write(b"]}")
            file.flush()
            headers = {"content-type": "application/json"}
            found = await desk.once(
                "POST", "messages/batches", data=_again(file), sends=file, headers=headers, has=("id",)
            )
        return str(found["id"])

    async def find(self, desk: Desk, name: str, count: int, since: float, others: frozenset[str]) -> Listed:
        """See BatchAPI."""
        found, running, dark, after = list[str](), list[str](), list[str](), dict[str, str]()
        while True:
            page = await desk.asked("messages/batches", ("data",), limit=str(PAGE), **after)
            batches = _listed(page)
            for batch in batches:
                if batch["id"] in others or _seconds(batch.get("created_at")) < since - SLACK or _total(batch) != count:
                    continue
                if batch.get("processing_status") != "ended":
                    running.append(batch["id"])
                    continue
                whose = await self._is(desk, batch["id"], name) if batch.get("results_url") else None
                if whose is not False:
                    (dark if whose is None else found).append(batch["id"])
            if not page.get("has_more") or not batches or _seconds(batches[-1].get("created_at")) < since - SLACK:
                break
            if after == (after := {"after_id": batches[-1]["id"]}):  # the same page for ever
                break
        return Listed(tuple(found[::-1]), tuple(running), tuple(dark))

    async def _is(self, desk: Desk, batch: str, name: str) -> bool | None:
        """Whether it has that name; None if its results are not there, which would tell."""
        with tempfile.TemporaryFile() as file:
            try:
                await desk.fetched(f"messages/batches/{batch}/results", file, MOST_LINE, first=True)
            except Gone:
                return None
            file.seek(0)
            told = _readable(file.readline(MOST_LINE))
            return None if told is None else told["custom_id"].startswith(f"{name}-")

    async def look(self, desk: Desk, batch: str) -> State:
        """See BatchAPI."""
        told = await desk.asked(f"messages/batches/{batch}", ("processing_status",))
        total, counts = _total(told), _counts(told)
        over = str(told["processing_status"]).lower() == "ended"
        files = (f"messages/batches/{batch}/results",) if over and told.get("results_url") else ()
        cancelled = told.get("cancel_initiated_at") is not None
        done = total - counts.get("processing", 0)
        believed = 0 < done == total  # else they are of a moment ago
        answered = counts.get("succeeded", 0) + counts.get("errored", 0) if believed else None
        gone = f"archived at {told['archived_at']}" if told.get("archived_at") and not files else ""
        return State(
            over, done, total, files, answered, cancelled=cancelled, until=_until(told), gone=gone,
            counts=self._answered if believed else _every, every=True,
        )  # fmt: skip

    async def cancel(self, desk: Desk, batch: str) -> None:
        """See BatchAPI."""
        await desk.once("POST", f"messages/batches/{batch}/cancel")

    def _answered(self, result: BatchReply) -> bool:
        return result.status is not None or result.why not in ("canceled", "expired")

    def result(self, line: bytes) -> BatchReply | None:
        """See BatchAPI."""
        if (told := _readable(line)) is None:
            return None
        result, name = told.get("result"), told["custom_id"]
        result = result if isinstance(result, dict) else {}
        kind = result.get("type")
        if kind == "succeeded":
            return BatchReply(name, 200, result.get("message"))
        if kind == "errored" and isinstance(reply := result.get("error"), dict):
            error = reply.get("error") or reply  # the whole reply, or only what is wrong
            of = error.get("type") if isinstance(error, dict) else None
            return BatchReply(name, STATUSES.get(str(of), 400), reply, _said(error)[0] or str(of))
        return BatchReply(name, None, None, str(kind))


PROVIDERS: Mapping[Provider, BatchAPI] = {"openai": OpenAI(), "anthropic": Anthropic()}


def _again(file: IO[bytes]) -> IO[bytes]:
    """The file from its beginning, for a client that closes what it has sent."""
    file.seek(0)
    return os.fdopen(os.dup(file.fileno()), "rb")


def _error(error: Mapping[str, Any]) -> str:
    line = "" if error.get("line") is None else f"line {error['line']}: "
    return f"{line}{error.get('message') or error.get('code')}"


def _readable(line: bytes) -> dict[str, Any] | None:
    """A line that is an object with a custom_id; what another one was about is asked for again."""
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) and isinstance(told.get("custom_id"), str) else None


def _said(error: Any) -> tuple[str, str]:
    """What an error says, and its code."""
    if not isinstance(error, dict):
        return str(error or ""), ""
    return str(error.get("message") or error.get("code") or ""), str(error.get("code") or "")


def _listed(page: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The batches of a page that can be told from others."""
    data = page["data"] if isinstance(page["data"], list) else []
    return [b for b in data if isinstance(b, dict) and isinstance(b.get("id"), str)]


def _counts(batch: Mapping[str, Any]) -> dict[str, int]:
    counts = batch.get("request_counts")
    return {name: n for name, n in counts.items() if type(n) is int} if isinstance(counts, dict) else {}


def _total(batch: Mapping[str, Any]) -> int:
    return sum(_counts(batch).values())


def _until(batch: Mapping[str, Any]) -> float | None:
    """When a batch expires, if that is told."""
    seconds = _seconds(batch.get("expires_at"))
    return seconds if math.isfinite(seconds) else None


def _seconds(time: Any) -> float:
    """A time, in seconds or as text; one that is not told is taken to be later than any."""
    if isinstance(time, (int, float)):
        return float(time)
    try:
        return datetime.datetime.fromisoformat(str(time).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return math.inf

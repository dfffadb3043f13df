"""A server with the batch APIs of OpenAI and Anthropic, as their references describe them, beside their ordinary forms:
it delays, expires, cancels, refuses, loses answers, and counts how often it computed what.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from llmserver import KEY, Chat, ChatServer

ANTHROPIC = "/anthropic"


class BatchServer(ChatServer):
    """Runs until it is stopped. `options` are those of `Batches`, and of `Chat` (llmserver)."""

    file = str(Path(__file__))

    @property
    def anthropic(self) -> str:
        """Its address in Anthropic's form."""
        return f"http://127.0.0.1:{self.port}{ANTHROPIC}/v1"


class Batches(Chat):
    """`takes` seconds pass until a batch is over, or as many as a shared file says that names none. Of their requests
    the shares `later` and `gone` fail for now (429 and 500), or are answered by nobody, in the first batch that they
    are in. Of the first `expire` batches only the first half of the requests is answered; the first `cancel` are
    cancelled in the same way. One creation is answered by a proxy that does not wait (504), and obeyed `slowly`,
    after so many seconds. So many looks at batches find none (`unseen`), and
    so many files have lines of somebody else's instead of their last five (`mixed`).
    The creation of the first `lose` batches is not answered, nor that of the first
    `unheard`, which create none. `fails` is what the next batch fails with (a code), and `holds` how many requests may
    be under way. Of calls of these APIs, the share `flaky` fails. `stops` is a call, and after how many of it one is
    not answered ("POST batches" creates nothing then, "created" does). One call may be turned `away` (429). The first
    `garbled` batches have lines of some kinds that cannot be read, and so many looks tell of no state (`mum`). So
    many looks at batches that are over name no file (`late`), or have counts that `lag` as the first of a list says; so
    many files are cut in the middle (`cut_files`), or not
    there (`lost`), and so many lists (`unlisted`). Requests with a text have an error of the server's own in the first
    batch that they are in (`says`: text, status, message, code). One call is answered by drops, without an end
    (`drips`), or by a flood (`floods`). Batches that are over have this `word` as their status, and all should have
    been over for so many seconds (`past`). The files of the batches `removed` are no longer there,
    nor are files of such names. Batches after the first are not over while that is set (`waits`).
    """

    def __init__(self, **options: Any) -> None:
        self.takes, self.later, self.gone, self.flaky = 0.5, 0.0, 0.0, 0.0
        self.waits = False
        self.expire = self.cancel = self.lose = self.unheard = 0
        self.fails = ""
        self.holds: int | None = None
        self.away = ""
        self.garbled = self.mum = self.late = self.cut_files = self.lost = self.unlisted = 0
        self.says: list[Any] = []
        self.drips = self.floods = self.word = ""
        self.past: float | None = None
        self.slowly: float | None = None
        self.unseen = self.mixed = 0
        self.lag: list[str] = []
        self.removed: list[str] = []
        self.stops: list[Any] = []  # a call, and how many of it are answered: the next one is not, whatever it did
        super().__init__(**options)
        self.reached = False
        self.kept: list[Any] = []
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.asked: Counter[str] = Counter()  # calls, by method and form
        self.computed: Counter[str] = Counter()  # requests in batches, by their texts
        self.alone: Counter[str] = Counter()  # messages in none, by their texts
        self.names: Counter[str] = Counter()  # custom_ids
        self.seen: Counter[str] = Counter()
        self.chances = random.Random(1)

    # ------------------------------------------------ both

    async def _stopped(self, call: str) -> None:
        if self.stops and self.stops[0] == call:
            self.stops = [call, self.stops[1] - 1]
            if self.stops[1] < 0:
                self.reached, self.stops = True, []
                await asyncio.Event().wait()

    async def _refused(self, request: Any, call: str) -> Any:
        from aiohttp import web

        self.asked[call] += 1
        await self._stopped(call)
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if key != self.key:
            return web.json_response({"error": {"message": "Incorrect API key", "code": "invalid_api_key"}}, status=401)
        if ANTHROPIC in request.path and "anthropic-version" not in request.headers:
            return web.json_response({"error": {"message": "anthropic-version is required"}}, status=400)
        if call == self.drips:
            return await _endless(request, b" ", 0.3)
        if call == self.floods:
            return await _endless(request, b" " * (1 << 20), 0.0)
        if call == "GET batch" and self.unseen:
            self.unseen -= 1
            return web.json_response({"error": {"message": "No such batch"}}, status=404)
        if call == "GET batches" and self.unlisted:
            self.unlisted -= 1
            return web.json_response({"error": {"message": "Invalid URL"}}, status=404)
        name = request.match_info.get("id", "")
        if call == "GET content" and {name, name.rpartition("-")[2]} & set(self.removed):
            return web.json_response({"error": {"message": "No such File object"}}, status=404)
        if call == "GET content" and self.lost:
            self.lost -= 1
            return web.json_response({"error": {"message": "No such File object"}}, status=404)
        if call == self.away:
            return web.json_response({"error": {"message": "Too many"}}, status=429, headers=self._after())
        if call == "GET batch" and self.mum:
            self.mum -= 1
            return web.json_response({"id": request.match_info["id"]})
        if self.chances.random() < self.flaky:
            status = self.chances.choice([429, 500, 503, 0])
            if status == 0:
                request.transport.close()
                return web.Response()
            return web.json_response({"error": {"message": "flaky"}}, status=status)
        return None

    async def _begin(self, requests: list[tuple[str, str, Any]], **about: Any) -> dict[str, Any]:
        """A batch of requests: custom_id, path and body of each."""
        number = len(self.batches)
        batch = {"number": number, "requests": requests, "results": [], "created": time.time(), "status": "going"}
        batch.update(about)
        assert len({custom_id for custom_id, _, _ in requests}) == len(requests)
        self.names.update(custom_id for custom_id, _, _ in requests)
        asyncio.get_running_loop().create_task(self._work(batch))
        return batch

    async def _work(self, batch: dict[str, Any]) -> None:
        if self.fails:
            batch.update(status="failed", why=self.fails)
            self.fails = ""
            return
        under_way = sum(len(b["requests"]) for b in self.batches.values() if b["status"] == "going")
        if self.holds is not None and under_way > self.holds:
            batch.update(status="failed", why="token_limit_exceeded")
            return
        await asyncio.sleep(self.takes / 2)
        while self.waits and batch["number"] > 1:
            await asyncio.sleep(0.05)
        requests, status = batch["requests"], "ended"
        if batch.get("ended"):
            status = "cancelled"
        elif self.expire or self.cancel:
            status = "expired" if self.expire else "cancelled"
            self.expire, self.cancel = max(0, self.expire - 1), self.cancel - (not self.expire and self.cancel > 0)
        done = requests if status == "ended" else requests[: len(requests) // 2]
        for custom_id, path, body in done:
            batch["results"].append((custom_id, *await self._computed(path, body)))
        batch["results"] += [(custom_id, None, None) for custom_id, _, _ in requests[len(done) :]]
        self.chances.shuffle(batch["results"])
        await asyncio.sleep(self.takes / 2)
        batch["status"] = status

    async def _computed(self, path: str, body: Any) -> tuple[int | None, Any]:
        text = json.dumps(body)
        self.seen[text] += 1
        if self.seen[text] == 1:
            drawn = self.chances.random()
            if drawn < self.later:
                return 429 if drawn < self.later / 2 else 500, {"error": {"message": "later", "type": "api_error"}}
            if drawn < self.later + self.gone:
                return None, None
        if self.says and self.says[0] in text and self.seen[text] == 1:
            return self.says[1], {"error": {"message": self.says[2], "code": self.says[3]}}
        status, reply, _ = await self._answer(None, path, body)
        if status == 200:
            self.computed[text] += 1
        return status, reply

    def told(self) -> dict[str, Any]:
        return {
            **super().told(), "batches": [len(b["requests"]) for b in self.batches.values()],
            "computed": dict(self.computed), "alone": dict(self.alone), "asked": dict(self.asked),
            "names": dict(self.names), "statuses_of": [b["status"] for b in self.batches.values()],
            "reached": self.reached,
        }  # fmt: skip

    async def _created(self, request: Any, begin: Any, answer: Any) -> Any:
        from aiohttp import web

        if self.slowly is not None:
            self.kept.append(asyncio.get_running_loop().create_task(self._later(self.slowly, begin)))
            self.slowly = None
            return web.json_response({"error": {"message": "Gateway Time-out"}}, status=504)
        if self.unheard:
            self.unheard -= 1
            request.transport.close()
            return web.Response()
        batch = await begin()
        await self._stopped("created")
        if self.lose:
            self.lose -= 1
            request.transport.close()
            return web.Response()
        return web.json_response(answer(batch))

    async def _later(self, seconds: float, begin: Any) -> None:
        await asyncio.sleep(seconds)
        await begin()

    async def cancelled(self, request: Any) -> Any:
        from aiohttp import web

        if (refused := await self._refused(request, "POST cancel")) is not None:
            return refused
        batch = self.batches[request.match_info["id"]]
        if batch["status"] != "going":
            return web.json_response({"error": {"message": "Cannot cancel a completed batch"}}, status=409)
        batch["ended"] = True
        return web.json_response(self._anthropic(batch) if ANTHROPIC in request.path else self._openai(batch))

    # ------------------------------------------------ OpenAI

    async def upload(self, request: Any) -> Any:
        from aiohttp import web

        if (refused := await self._refused(request, "POST files")) is not None:
            return refused
        form = await request.post()
        assert form["purpose"] == "batch"
        name = f"file-{len(self.files)}"
        self.files[name] = form["file"].file.read()
        return web.json_response({"id": name, "object": "file", "purpose": "batch", "bytes": len(self.files[name])})

    async def create(self, request: Any) -> Any:
        if (refused := await self._refused(request, "POST batches")) is not None:
            return refused
        told = await request.json()
        assert told["completion_window"] == "24h"

        async def begin() -> Any:
            name, requests = f"batch_{len(self.batches)}", []
            self.batches[name] = {"status": "going", "requests": []}
            for line in self.files[told["input_file_id"]].splitlines():
                one = json.loads(line)
                assert one["method"] == "POST" and one["url"] == told["endpoint"]
                requests.append((one["custom_id"], one["url"].removeprefix("/v1/"), one["body"]))
            self.batches[name] = await self._begin(requests, id=name, told=told)
            return self.batches[name]

        return await self._created(request, begin, self._openai)

    def _openai(self, batch: dict[str, Any]) -> dict[str, Any]:
        status = {"going": "in_progress", "ended": "completed"}.get(batch["status"], batch["status"])
        over, results, told = batch["status"] != "going", batch["results"], batch["told"]
        good = [custom_id for custom_id, code, _ in results if code == 200]
        files = {}
        if over and status != "failed":
            files["output_file_id"] = f"out-{batch['id']}" if good else None
            files["error_file_id"] = f"err-{batch['id']}" if len(good) < len(results) else None
        if over and self._is_late():
            files = {}
        if over and self.word:
            status = self.word
        if self.past is not None:
            files["expires_at"] = int(time.time() - self.past)
        counts = {"total": len(batch["requests"]), "completed": len(good), "failed": len(results) - len(good)}
        if over and self.lag:
            files, lag = {}, self.lag.pop(0)
            counts["completed"] = {"none": 0, "half": len(good) // 2, "fewer": len(good) // 2}.get(lag, len(good))
            counts["total"] = len(good) // 2 if lag == "fewer" else counts["total"]
            counts = {"total": counts["total"]} if lag == "total" else counts
        why = batch.get("why")
        errors = {"object": "list", "data": [{"code": why, "message": f"{why}!", "line": None}]}
        return {
            "id": batch["id"], "object": "batch", "endpoint": told["endpoint"], "completion_window": "24h",
            "input_file_id": told["input_file_id"], "metadata": told.get("metadata"), "status": status,
            "created_at": int(batch["created"]), "output_file_id": None, "error_file_id": None, **files,
            "errors": errors if status == "failed" else None,
            "request_counts": counts,
        }  # fmt: skip

    async def look(self, request: Any) -> Any:
        from aiohttp import web

        if (refused := await self._refused(request, "GET batch")) is not None:
            return refused
        if (batch := self.batches.get(request.match_info["id"])) is None:
            return web.json_response({"error": {"message": "No such batch"}}, status=404)
        return web.json_response(self._openai(batch))

    async def list(self, request: Any) -> Any:
        from aiohttp import web

        if (refused := await self._refused(request, "GET batches")) is not None:
            return refused
        some, more = self._page(request.query.get("after"), int(request.query.get("limit", 20)))
        return web.json_response({"object": "list", "data": [self._openai(b) for b in some], "has_more": more})

    def _page(self, after: str | None, limit: int) -> tuple[list[Any], bool]:
        every = list(self.batches.values())[::-1]
        begin = 0 if after is None else [b["id"] for b in every].index(after) + 1
        return every[begin : begin + limit], len(every) > begin + limit

    async def content(self, request: Any) -> Any:
        if (refused := await self._refused(request, "GET content")) is not None:
            return refused
        kind, _, name = request.match_info["id"].partition("-")
        batch = self.batches[name]
        lines = []
        for custom_id, status, reply in batch["results"]:
            if (status == 200) != (kind == "out"):
                continue
            response = None if status is None else {"status_code": status, "request_id": "r", "body": reply}
            error = None
            if status is None:
                code = {"expired": "batch_expired", "cancelled": "batch_cancelled"}.get(batch["status"], "request_lost")
                error = {"code": code, "message": f"This request could not be executed: {code}"}
            lines.append(json.dumps({"id": "b", "custom_id": custom_id, "response": response, "error": error}))
        return await self._file(request, "\n".join(self._odd(batch, lines, "response")))

    async def _file(self, request: Any, text: str) -> Any:
        """A file without its length, which may be cut."""
        from aiohttp import web

        reply = web.StreamResponse()
        reply.force_close()
        await reply.prepare(request)
        cut, self.cut_files = self.cut_files > 0, max(0, self.cut_files - 1)
        await reply.write(text[: len(text) // 2 if cut else None].encode())
        return reply

    def _odd(self, batch: Any, lines: list[str], what: str) -> list[str]:
        """The lines, some of which cannot be read if the batch is garbled."""
        if self.mixed:
            self.mixed -= 1
            told = [json.loads(line) for line in lines[:9]]
            return [*lines[:-5], *(json.dumps({**one, "custom_id": f"gm{'0' * 32}-{n}"}) for n, one in enumerate(told))]
        if batch["number"] > self.garbled:  # from 1
            return lines
        told = [json.loads(line) for line in lines[1:]]
        told[0] = [1, 2]
        del told[1]["custom_id"]
        told[2]["custom_id"] = told[2]["custom_id"].rpartition("-")[0] + "-\N{SUPERSCRIPT TWO}"
        told[3]["custom_id"] += "9" * 5000
        told[4][what] = "oops"
        told[5][what] = {"type": "succeeded", "status_code": 200, "body": None}
        told[6][what] = {"type": "errored", "error": None, "status_code": [1], "body": "no"}
        told[7][what] = None
        return [lines[0][:50], "\0", *map(json.dumps, told)]

    # ------------------------------------------------ Anthropic

    async def messages(self, request: Any) -> Any:
        from aiohttp import web

        if (refused := await self._refused(request, "POST messages")) is not None:
            return refused
        status, reply, _ = await self._answer(None, "messages", body := await request.json())
        if status == 200:
            self.alone[json.dumps(body)] += 1
        return web.json_response(reply, status=status)

    async def create_messages(self, request: Any) -> Any:
        if (refused := await self._refused(request, "POST batches")) is not None:
            return refused
        told = await request.json()

        async def begin() -> Any:
            name = f"msgbatch_{len(self.batches)}"
            self.batches[name] = {"status": "going", "requests": []}
            requests = [(one["custom_id"], "messages", one["params"]) for one in told["requests"]]
            assert all(len(custom_id) <= 64 for custom_id, _, _ in requests)
            self.batches[name] = await self._begin(requests, id=name)
            return self.batches[name]

        return await self._created(request, begin, self._anthropic)

    def _anthropic(self, batch: dict[str, Any]) -> dict[str, Any]:
        over, counts = batch["status"] != "going", Counter[str]()
        for result in batch["results"] if over else []:
            counts[self._type(batch, result)] += 1
        if not over:
            counts["processing"] = len(batch["requests"])
        url = f"http://elsewhere/{batch['id']}/results" if over and not self._is_late() else None
        if over and self.lag:
            url, lag = None, self.lag.pop(0)
            there = counts["succeeded"]
            counts["succeeded"] = there // 2 if lag in ("half", "fewer") else 0
            counts["processing"] = {"half": there - there // 2, "none": there}.get(lag, 0)
        created = datetime.datetime.fromtimestamp(batch["created"], datetime.timezone.utc).isoformat()
        return {
            "id": batch["id"], "type": "message_batch", "processing_status": "ended" if over else "in_progress",
            "request_counts": {
                name: counts[name] for name in ("processing", "succeeded", "errored", "canceled", "expired")
            },
            "created_at": created.replace("+00:00", "Z"), "archived_at": None,
            "cancel_initiated_at": created if batch["status"] == "cancelled" else None,
            "results_url": url,
        }  # fmt: skip

    def _is_late(self) -> bool:
        self.late -= 1
        return self.late >= 0

    def _type(self, batch: dict[str, Any], result: Any) -> str:
        if result[1] is None:
            return "canceled" if batch["status"] == "cancelled" else "expired"
        return "succeeded" if result[1] == 200 else "errored"

    async def look_messages(self, request: Any) -> Any:
        from aiohttp import web

        if (refused := await self._refused(request, "GET batch")) is not None:
            return refused
        return web.json_response(self._anthropic(self.batches[request.match_info["id"]]))

    async def list_messages(self, request: Any) -> Any:
        from aiohttp import web

        if (refused := await self._refused(request, "GET batches")) is not None:
            return refused
        some, more = self._page(request.query.get("after_id"), int(request.query.get("limit", 20)))
        return web.json_response({"data": [self._anthropic(b) for b in some], "has_more": more})

    async def results(self, request: Any) -> Any:
        if (refused := await self._refused(request, "GET content")) is not None:
            return refused
        batch = self.batches[request.match_info["id"]]
        lines = []
        for custom_id, status, reply in batch["results"]:
            result = {"type": self._type(batch, (custom_id, status, reply))}
            if status == 200:
                result["message"] = reply
            elif status is not None:
                kind = {429: "rate_limit_error", 500: "api_error"}.get(status, "invalid_request_error")
                result["error"] = {"type": "error", "error": {"type": kind, "message": reply["error"]["message"]}}
            lines.append(json.dumps({"custom_id": custom_id, "result": result}))
        return await self._file(request, "".join(f"{line}\n" for line in self._odd(batch, lines, "result")))

    def routes(self) -> list[Any]:
        from aiohttp import web

        return [
            web.post("/v1/files", self.upload), web.post("/v1/batches", self.create),
            web.post("/v1/batches/{id}/cancel", self.cancelled),
            web.get("/v1/batches", self.list), web.get("/v1/batches/{id}", self.look),
            web.get("/v1/files/{id}/content", self.content), web.post(f"{ANTHROPIC}/v1/messages", self.messages),
            web.post(f"{ANTHROPIC}/v1/messages/batches", self.create_messages),
            web.post(f"{ANTHROPIC}/v1/messages/batches/{{id}}/cancel", self.cancelled),
            web.get(f"{ANTHROPIC}/v1/messages/batches", self.list_messages),
            web.get(f"{ANTHROPIC}/v1/messages/batches/{{id}}", self.look_messages),
            web.get(f"{ANTHROPIC}/v1/messages/batches/{{id}}/results", self.results),
        ]  # fmt: skip


async def _endless(request: Any, piece: bytes, pause: float) -> Any:
    from aiohttp import web

    reply = web.StreamResponse()
    await reply.prepare(request)
    while True:
        await reply.write(piece)
        await asyncio.sleep(pause)


if __name__ == "__main__":
    from llmserver import main

    assert KEY
    main(Batches(**json.loads(sys.argv[1])))

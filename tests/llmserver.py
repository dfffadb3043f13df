"""A server that speaks OpenAI's forms (chat, completions, embeddings, responses) and vLLM's score and rerank, in a
process of its own: it answers by rules, limits, delays, refuses, cuts connections, talks nonsense, and counts what it
was asked.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
import urllib.request
from collections import Counter, deque
from pathlib import Path
from types import TracebackType
from typing import Any

KEY = "sk-open-sesame"


class ChatServer:
    """Runs until it is stopped. `options` are those of `Chat`; `set` changes them while it runs."""

    def __init__(self, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), json.dumps(options)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> ChatServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def told(self) -> dict[str, Any]:
        """What it was asked: `requests`, `answered` prompts by text with their numbers, `most` at once, `rate`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/told") as reply:
            found: dict[str, Any] = json.load(reply)
            return found

    def set(self, **options: Any) -> None:
        """Change options."""
        data = json.dumps(options).encode()
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{self.port}/set", data=data)).close()


class Chat:
    """What it does. `slow` of the requests take `times` as long; `busy`, `broken`, `cut`, `nonsense` are shares of them
    that fail so; `limit` is of requests a second, over which it answers 429; `structured` that it takes a schema;
    `lacks` are the paths that it does not have, `stuck` is a text that it never answers.
    """

    def __init__(self, **options: Any) -> None:
        self.latency, self.slow, self.times = 0.0, 0.0, 100.0
        self.busy = self.broken = self.cut = self.nonsense = 0.0
        self.limit: float | None = None
        self.key: str | None = KEY
        self.model = "m"
        self.structured = True
        self.down = False
        self.answer = "echo"
        self.seed = 0
        self.lacks: list[str] = []
        self.stuck: str | None = None
        self.retry_after: float | None = None
        for name, value in options.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self.random = random.Random(self.seed)
        self.requests, self.at_once, self.most = 0, 0, 0
        self.answered: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.times_of: deque[float] = deque()
        self.rate = 0  # the most requests let through in a second
        self.bodies: list[Any] = []

    async def chat(self, request: Any) -> Any:
        from aiohttp import web

        self.requests += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            status, body, headers = await self._answer(request, request.match_info["path"], await request.json())
        finally:
            self.at_once -= 1
        self.statuses[status] += 1
        if status == 0:
            request.transport.close()
            return web.Response()
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers=headers, content_type="application/json")

    async def models(self, request: Any) -> Any:
        from aiohttp import web

        if self.down:
            request.transport.close()
        return web.json_response({"object": "list", "data": [{"id": self.model}]})

    async def _answer(self, request: Any, path: str, body: Any) -> tuple[int, Any, dict[str, str]]:
        def error(status: int, message: str, code: str = "", **headers: str) -> tuple[int, Any, dict[str, str]]:
            return status, {"error": {"message": message, "code": code}}, headers

        if self.down:
            return 0, "", {}
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return error(401, "Incorrect API key provided", "invalid_api_key")
        if path in self.lacks:
            return 404, {"detail": "Not Found"}, {}
        if body["model"] != self.model:
            return error(404, f"The model `{body['model']}` does not exist", "model_not_found")
        if "response_format" in body and not self.structured:
            return error(400, "response_format is not supported")
        now = time.monotonic()
        if self.limit is not None:
            while self.times_of and self.times_of[0] <= now - 1:
                self.times_of.popleft()
            if len(self.times_of) >= self.limit:
                return error(429, "Rate limit reached", "rate_limit_exceeded")
            self.times_of.append(now)
            self.rate = max(self.rate, len(self.times_of))
        drawn = self.random.random()
        for share, failure in (
            (self.busy, error(429, "Too many requests", **self._after())), (self.broken, error(500, "Something broke")),
            (self.cut, (0, "", {})), (self.nonsense, (200, "<html>proxy</html>", {})),
        ):  # fmt: skip
            if drawn < share:
                return failure
            drawn -= share
        said = _asked(path, body)
        if "too long" in said:
            return error(400, "This model's maximum context length is 8 tokens", "context_length_exceeded")
        if said == self.stuck:
            await asyncio.Event().wait()
        slow = self.random.random() < self.slow
        await asyncio.sleep(self.latency * (self.times if slow else 1.0))
        self.answered[said] += 1
        if len(self.bodies) < 100:
            self.bodies.append(body)
        if path != "chat/completions":
            return 200, self._other(path, said, body), {}
        reason = "content_filter" if "forbidden" in said else "stop"
        content = self._said(said, body)
        usage = {"prompt_tokens": len(said.split()), "completion_tokens": len(content.split()), "total_tokens": 0}
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": reason}
        return 200, {"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage}, {}

    def _other(self, path: str, said: str, body: Any) -> Any:
        """An answer in another form than chat's: what was said is in it."""
        given, made = len(said.split()), len(said.split())
        usage = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
        if path == "completions":
            choice = {"index": 0, "text": f"<{said}>", "finish_reason": "stop"}
            return {"id": "cmpl-x", "object": "text_completion", "choices": [choice], "usage": usage}
        if path == "responses":
            content = [{"type": "output_text", "text": f"<{said}>"}]
            output = [{"type": "message", "role": "assistant", "content": content}]
            usage = {"input_tokens": given, "output_tokens": made, "total_tokens": given + made}
            return {"id": "resp_x", "object": "response", "status": "completed", "output": output, "usage": usage}
        if path == "rerank":
            return {"id": "rerank-x", "results": [{"index": 0, "relevance_score": float(given)}]}
        rows = [{"object": path, "index": 0, "embedding" if path == "embeddings" else "score": [float(given), 0.5]}]
        return {"object": "list", "data": rows, "usage": {"prompt_tokens": given, "total_tokens": given}}

    def _after(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}

    def _said(self, prompt: str, body: Any) -> str:
        words = prompt.split()
        if self.answer == "echo":
            return f"<{prompt}>"
        if self.answer == "auto":  # whatever the schema asks for
            schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
            return f"<{prompt}>" if schema is None else json.dumps(_of(schema, prompt))
        if self.answer == "second":  # fits only when asked again
            asked_again = len(body["messages"]) > 2
            return json.dumps({"n": len(words), "word": words[0]}) if asked_again else json.dumps({"n": "many"})
        if self.answer == "never":
            return "I would rather not say."
        if self.answer == "choice":
            found = "yes" if len(words) % 2 else "no"
            return json.dumps({"choice": found}) if "response_format" in body else f" {found.title()}.\n"
        assert self.answer == "json"
        return "```json\n" + json.dumps({"n": len(words), "word": words[0], "all": words}) + "\n```"

    def told(self) -> dict[str, Any]:
        return {
            "requests": self.requests, "answered": dict(self.answered), "most": self.most, "rate": self.rate,
            "statuses": {str(k): v for k, v in self.statuses.items()}, "bodies": self.bodies,
        }  # fmt: skip


def _asked(path: str, body: Any) -> str:
    """The text of a request, wherever its form has it."""
    if path == "chat/completions":
        return str(body["messages"][-1]["content"])
    return str(body[{"completions": "prompt", "score": "text_1", "rerank": "query"}.get(path, "input")])


def _of(schema: Any, prompt: str) -> Any:
    """Some value of a schema."""
    if "enum" in schema:
        return schema["enum"][len(prompt) % len(schema["enum"])]
    if schema["type"] == "object":
        return {name: _of(inner, prompt) for name, inner in schema["properties"].items()}
    if schema["type"] == "array":
        return [_of(schema["items"], prompt)]
    return {"string": prompt[:20], "integer": len(prompt), "number": 0.5, "boolean": True}[schema["type"]]


def main() -> None:
    from aiohttp import web

    chat = Chat(**json.loads(sys.argv[1]))

    async def told(request: Any) -> Any:
        return web.json_response(chat.told())

    async def change(request: Any) -> Any:
        for name, value in (await request.json()).items():
            setattr(chat, name, value)
        return web.Response()

    async def serve() -> None:
        app = web.Application()
        path = "{path:chat/completions|completions|embeddings|responses|score|rerank}"
        app.add_routes([web.post(f"/v1/{path}", chat.chat), web.get("/v1/models", chat.models)])
        app.add_routes([web.get("/told", told), web.post("/set", change)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()

"""A server that speaks OpenAI's forms (chat, completions, embeddings, responses) and vLLM's score and rerank, in a
process of its own: it answers by rules, limits, delays, refuses, cuts connections, talks nonsense, and counts what it
was asked.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
import struct
import subprocess
import sys
import time
from collections import Counter, deque
from pathlib import Path
from types import TracebackType
from typing import Any

KEY = "sk-open-sesame"


class ChatServer:
    """Runs until it is stopped. `options` are those of `Chat`; `set` changes them while it runs."""

    file = str(Path(__file__))

    def __init__(self, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, self.file, json.dumps(options)], stdout=subprocess.PIPE, text=True
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
        import urllib.request  # here, since servers do without, and start quicker

        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/told") as reply:
            found: dict[str, Any] = json.load(reply)
            return found

    def set(self, **options: Any) -> None:
        """Change options."""
        import urllib.request

        data = json.dumps(options).encode()
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{self.port}/set", data=data)).close()


class Chat:
    """What it does, in all of OpenAI's forms. `slow` of the requests take `times` as long;
    `busy`, `broken`, `gateway` (504), `cut`, `nonsense` are shares of them that fail so; `limit` is of requests a
    second, over which it answers 429; `structured` that it takes a schema, `logprobs` that it tells them, `newer`
    that it wants max_completion_tokens. `forbids` is a text to which it answers 403, `fails` one to which 500,
    `stuck` one that it never answers, and `lacks` are the paths that it does not have. Of embeddings, it takes
    `inputs` texts in a request, gives vectors in base64 if it knows that (`encodes`), and has dimensions only if
    they may be chosen (`chooses`). It `echoes` prompts of completions with log-probabilities, of which tokens are
    of three letters and begin with a special one (`special`). After the first so many of its requests, it `turns`:
    to all it answers one status, and to those for one token another. To a text with `empties` it gives no choice,
    and it may have `moved`, to an address.
    """

    def __init__(self, **options: Any) -> None:
        self.latency, self.slow, self.times = 0.0, 0.0, 100.0
        self.busy = self.broken = self.gateway = self.cut = self.nonsense = 0.0
        self.limit: float | None = None
        self.key: str | None = KEY
        self.model = "m"
        self.structured = self.logprobs = True
        self.newer = False
        self.forbids = ""
        self.lacks: list[str] = []
        self.lacking = "Not Found"
        self.echoes, self.special = True, "<s>"
        self.inputs, self.encodes, self.chooses = 2048, True, True
        self.lists = True  # its models, to whoever asks
        self.odd: dict[str, Any] = {}  # instead of what a choice has, for prompts with the word "odd"
        self.instead: dict[str, Any] = {}  # of what a reply has, for prompts with the word "odd",
        self.odd_times = 1_000_000  # so many times, after which it answers these as others
        self.stuck: str | None = None
        self.complains: list[str] = []  # for prompts with "complain", with what and with which code it refuses them
        self.refusal: dict[str, Any] = {}  # the reply, with 400, to prompts with "filtered"
        self.tells = ""  # the headers of requests with this text, in refusing them
        self.down = False
        self.fails = ""  # a text for which something breaks
        self.turns: list[int] = []  # after how many requests, to which status, and to which for one token
        self.empties = self.moved = ""
        self.names = True  # each reply has an id of its own
        self.terse = True  # answers a prompt of one character, too
        self.answer = "echo"
        self.fixed = 0  # tokens that each prompt has beside its own
        self.seed = 0
        self.retry_after: Any = None
        for name, value in options.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self.random = random.Random(self.seed)
        self.requests, self.at_once, self.most = 0, 0, 0
        self.answered: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.queries: Counter[str] = Counter()
        self.times_of: deque[float] = deque()
        self.rate = 0  # the most requests let through in a second
        self.bodies: list[Any] = []

    async def chat(self, request: Any) -> Any:
        from aiohttp import web

        self.requests += 1
        name = f"x-{self.requests}"
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.queries[request.query_string] += 1
        try:
            status, body, headers = await self._answer(request, request.match_info["path"], await request.json())
        finally:
            self.at_once -= 1
        self.statuses[status] += 1
        if status == 0:
            request.transport.close()
            return web.Response()
        if status == 200 and isinstance(body, dict) and self.names:
            body = {**body, "id": name}
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers=headers, content_type="application/json")

    async def models(self, request: Any) -> Any:
        from aiohttp import web

        if self.down:
            request.transport.close()
        return web.json_response({"object": "list", "data": [{"id": self.model}]}, status=200 if self.lists else 403)

    async def _answer(self, request: Any, path: str, body: Any) -> tuple[int, Any, dict[str, str]]:
        def error(status: int, message: str, code: str = "", **headers: str) -> tuple[int, Any, dict[str, str]]:
            return status, {"error": {"message": message, "code": code}}, headers

        if self.down:
            return 0, "", {}
        if self.moved:
            return 307, "", {"location": f"{self.moved}/{path}?token={KEY}"}
        if self.turns and self.requests > self.turns[0]:
            return error(self.turns[1 + (body.get("max_tokens") == 1)], "model 'm' does not exist")
        if request is not None and self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return error(401, "Incorrect API key provided", "invalid_api_key")
        if self.tells and self.tells in json.dumps(body):
            return error(400, f"headers were {dict(request.headers)}")
        if not self.terse and body.get("messages", [{}])[-1].get("content") == "1":
            return 0, "", {}
        if self.fails and self.fails in json.dumps(body):
            return error(500, "something broke")
        if self.complains and "complain" in json.dumps(body.get("messages")):
            return error(400, *self.complains)
        if self.refusal and "filtered" in json.dumps(body.get("messages")):
            return 400, self.refusal, {}
        if path in self.lacks:
            return 404, {"detail": self.lacking}, {}
        if self.forbids and self.forbids in json.dumps(body):
            return error(403, "Forbidden by policy")
        if body["model"] not in self.model.split(","):
            return error(404, f"The model `{body['model']}` does not exist", "model_not_found")
        if ("response_format" in body or "text" in body) and not self.structured:
            return error(400, "response_format is not supported")
        if "logprobs" in body and not self.logprobs:
            return error(400, "logprobs is not supported with this model")
        if body.get("echo") and not self.echoes:
            return error(400, "Only no echo is supported")
        if body.get("echo") and self.newer and body["max_tokens"] == 0:
            return error(400, "max_tokens must be at least 1, got 0.")
        if "max_tokens" in body and self.newer and "echo" not in body:
            return error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        texts = body["input"] if path == "embeddings" and isinstance(body["input"], list) else []
        if len(texts) > self.inputs:
            return error(413, f"batch size {len(texts)} > maximum allowed batch size {self.inputs}")
        if "encoding_format" in body and not self.encodes:
            return error(400, "Unknown parameter: encoding_format")
        if "dimensions" in body and not self.chooses:
            return error(400, "This model does not support specifying dimensions.")
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
            (self.gateway, error(504, "Gateway Time-out")), (self.cut, (0, "", {})),
            (self.nonsense, (200, "<html>proxy</html>", {})),
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
        if request is not None:  # not in a batch, or in a form that is looked at elsewhere
            self.answered.update(texts or [said])
        if len(self.bodies) < 100:
            self.bodies.append(body)
        reason = "content_filter" if "forbidden" in said else "stop"
        content = self._said(said, body)
        if body.get("echo"):
            return 200, self._echoed(body), {}
        if path == "embeddings":
            return 200, _vectors(texts or [said], body), {}
        if path not in _FORMS:
            return 200, _other(path, len(said.split())), {}
        if self.empties and self.empties in said:
            return 200, {"id": "x", "choices": [], "usage": _usage(len(said.split()), content)}, {}
        found = _FORMS[path](content, reason, self.fixed + len(said.split()), _tokens(content, body))
        if self.odd and "odd" in said.split():
            usage = self.odd.get("usage", found["usage"])
            found = {**found, "choices": [{**found["choices"][0], **self.odd}], "usage": usage}
        if self.instead and self.odd_times > 0 and "odd" in said.split():
            self.odd_times -= 1
            found = {**found, **self.instead}
        return 200, found, {}

    def _echoed(self, body: Any) -> Any:
        """Each prompt with its tokens; a token's log-probability is that of `echoed`, the first has none."""
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        choices: list[Any] = []
        for place, prompt in enumerate(prompts):
            tokens = [*([self.special] if self.special else []), *(prompt[n : n + 3] for n in range(0, len(prompt), 3))]
            logged: list[float | None] = [echoed(token) for token in tokens]
            logged[0] = None
            made = "!" * body["max_tokens"]
            logprobs = {"tokens": [*tokens, *made], "token_logprobs": [*logged, *(-9.0 for _ in made)]}
            choices.append({"index": place, "text": prompt + made, "finish_reason": "length", "logprobs": logprobs})
        given = sum(len(choice["logprobs"]["tokens"]) for choice in choices)
        return {"id": "x", "object": "text_completion", "choices": choices[::-1], "usage": _usage(given, "")}

    def _after(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}

    def _said(self, prompt: str, body: Any) -> str:
        words = prompt.split()
        if self.answer == "echo":
            return f"<{prompt}>"
        if self.answer == "plain":
            return prompt.partition("\n\nAnswer with")[0]
        if self.answer == "auto":  # whatever the schema asks for
            form = body.get("response_format", {}).get("json_schema") or body.get("text", {}).get("format", {})
            schema = (form or body.get("output_config", {}).get("format", {})).get("schema")
            return f"<{prompt}>" if schema is None else json.dumps(_of(schema, prompt))
        if self.answer == "second":  # fits only when asked again
            asked_again = len(body.get("messages") or body.get("input") or ()) > 2
            return json.dumps({"n": len(words), "word": words[0]}) if asked_again else json.dumps({"n": "many"})
        if self.answer == "never":
            return "I would rather not say."
        if self.answer == "choice":
            found = "yes" if len(words) % 2 else "no"
            return json.dumps({"choice": found}) if "response_format" in body else f" {found.title()}.\n"
        if self.answer.startswith("{"):  # that text, with the first message for $
            first = str(body["messages"][0]["content"])
            return self.answer.replace("$", first.partition("\n\nAnswer with")[0])
        assert self.answer == "json"
        return "```json\n" + json.dumps({"n": len(words), "word": words[0], "all": words}) + "\n```"

    def routes(self) -> list[Any]:
        """Of others than it has itself."""
        return []

    def told(self) -> dict[str, Any]:
        return {
            "requests": self.requests, "answered": dict(self.answered), "most": self.most, "rate": self.rate,
            "statuses": {str(k): v for k, v in self.statuses.items()}, "bodies": self.bodies,
            "queries": dict(self.queries),
        }  # fmt: skip


def echoed(token: str) -> float:
    """The log-probability of a token of a prompt."""
    return -0.5 if token[:1] in "aeiou" else -float(len(token))


def _tokens(content: str, body: Any) -> list[tuple[str, float]]:
    """Tokens of three characters, each with a probability of a half, if the request wants to know."""
    wanted = "logprobs" in body or "include" in body
    return [(content[n : n + 3], math.log(0.5)) for n in range(0, len(content) if wanted else 0, 3)]


def _logged(tokens: list[tuple[str, float]]) -> Any:
    return [{"token": token, "logprob": logprob} for token, logprob in tokens]


def _usage(given: int, content: str, names: tuple[str, str] = ("prompt_tokens", "completion_tokens")) -> Any:
    made = len(content.split())
    return {names[0]: given, names[1]: made, "total_tokens": given + made}


def _chat(content: str, reason: str, given: int, tokens: list[tuple[str, float]]) -> Any:
    message = {"role": "assistant", "content": content, "reasoning_content": "hm"}
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": {"content": _logged(tokens)}}
    return {"id": "x", "object": "chat.completion", "choices": [choice], "usage": _usage(given, content)}


def _completion(content: str, reason: str, given: int, tokens: list[tuple[str, float]]) -> Any:
    logged = {"tokens": [token for token, _ in tokens], "token_logprobs": [logprob for _, logprob in tokens]}
    choice = {"index": 0, "text": content, "finish_reason": reason, "logprobs": logged}
    return {"id": "x", "object": "text_completion", "choices": [choice], "usage": _usage(given, content)}


def _response(content: str, reason: str, given: int, tokens: list[tuple[str, float]]) -> Any:
    part = {"type": "output_text", "text": content, "logprobs": _logged(tokens)}
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [part]},
    ]
    usage = _usage(given, content, ("input_tokens", "output_tokens"))
    cut = None if reason == "stop" else {"reason": reason}
    return {"id": "x", "object": "response", "output": output, "usage": usage, "incomplete_details": cut}


def _message(content: str, reason: str, given: int, tokens: list[tuple[str, float]]) -> Any:
    blocks = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": content}]
    usage = _usage(given, content, ("input_tokens", "output_tokens"))
    usage.pop("total_tokens")
    ended = {"stop": "end_turn", "content_filter": "refusal"}[reason]
    return {"id": "x", "type": "message", "role": "assistant", "content": blocks, "stop_reason": ended, "usage": usage}


_FORMS = {"chat/completions": _chat, "completions": _completion, "responses": _response, "messages": _message}


def _vectors(texts: list[str], body: Any) -> Any:
    """The words of each text and a half, with zeros after that, in another order than that of the texts."""
    rows = []
    for place, text in enumerate(texts):
        vector: Any = ([float(len(text.split())), 0.5] + [0.0] * body.get("dimensions", 2))[: body.get("dimensions", 2)]
        if body.get("encoding_format") == "base64":
            vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        rows.append({"object": "embedding", "index": place, "embedding": vector})
    given = sum(len(text.split()) for text in texts)
    return {"object": "list", "data": rows[::-1], "usage": {"prompt_tokens": given, "total_tokens": given}}


def _other(path: str, given: int) -> Any:
    """An answer of numbers."""
    if path == "rerank":
        return {"id": "rerank-x", "results": [{"index": 0, "relevance_score": float(given)}]}
    rows = [{"object": path, "index": 0, "score": [float(given), 0.5]}]
    return {"object": "list", "data": rows, "usage": {"prompt_tokens": given, "total_tokens": given}}


def _asked(path: str, body: Any) -> str:
    """The text of a request, wherever its form has it."""
    name = {"chat/completions": "messages", "completions": "prompt", "score": "text_1", "rerank": "query"}
    said = body["messages" if path == "messages" else name.get(path, "input")]
    if path in ("embeddings", "completions"):
        return "\n".join(said) if isinstance(said, list) else str(said)
    if isinstance(said, list):
        said = said[-1]["content"] if said else ""
    if isinstance(said, list):
        said = "|".join(part.get("text") or part["type"] for part in said)
    return str(said)


def _of(schema: Any, prompt: str) -> Any:
    """Some value of a schema."""
    if "enum" in schema:
        return schema["enum"][len(prompt) % len(schema["enum"])]
    if "anyOf" in schema:
        return _of(schema["anyOf"][0], prompt)
    if schema["type"] == "object":
        return {name: _of(inner, prompt) for name, inner in schema["properties"].items()}
    if schema["type"] == "array":
        return [_of(schema["items"], prompt)]
    most = schema.get("maximum", len(prompt))
    return {"string": prompt[:20], "integer": min(most, len(prompt)), "number": 0.5, "boolean": True}[schema["type"]]


def main(chat: Chat) -> None:
    from aiohttp import web

    async def told(request: Any) -> Any:
        return web.json_response(chat.told())

    async def change(request: Any) -> Any:
        for name, value in (await request.json()).items():
            setattr(chat, name, value)
        return web.Response()

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 30)
        path = "{path:chat/completions|completions|embeddings|responses|score|rerank}"
        app.add_routes([web.post(f"/v1/{path}", chat.chat), web.get("/v1/models", chat.models)])
        app.add_routes(chat.routes())
        app.add_routes([web.get("/told", told), web.post("/set", change)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main(Chat(**json.loads(sys.argv[1])))

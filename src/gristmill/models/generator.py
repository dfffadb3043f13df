"""A language model on this machine's CPU, through OpenVINO GenAI, asked as an endpoint is: requests and replies in
OpenAI's chat form. Its scheduler mixes all requests at hand, token by token, so that none waits for another.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from gristmill.errors import BadModel, GristmillError, RunFailed, did_you_mean
from gristmill.models.ending import Ending
from gristmill.models.endpoint import Payer
from gristmill.models.grammar import grammar_of
from gristmill.models.llmfiles import LlmFiles
from gristmill.models.replies import CHAT, Refused
from gristmill.process import machine
from gristmill.process.extras import require
from gristmill.values import dataclass

AT_ONCE = 256  # prompts that are computed at a time, if nobody says how many: as many as its scheduler takes
MAX_TOKENS = 256  # of an answer, if nobody says how many
CACHE_SHARE, LEAST_CACHE, MOST_CACHE = 0.25, 1, 16  # of the worker's memory, and GB: keys and values of tokens
# `step` holds Python's lock: between two steps others get so much of a step's time, and once more if there is room for
# requests that they may bring.
OTHERS, ROOM = 0.01, 0.001
TURNS, PATIENCE = 8, 0.5  # rounds of the event loop from an answer to the next row's request; seconds to wait for these
LONGEST = 1 << 17  # tokens that are tried where a model does not say how many it takes

# Fields of a request besides those that are options, with the names that GenAI has for them.
FIELDS = {
    "seed": "rng_seed",
    "stop": "stop_strings",
    "stop_token_ids": "stop_token_ids",
    "min_tokens": "min_new_tokens",
    **{
        name: name
        for name in ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos")
    },
}


def check_request(request: Mapping[str, Any], fields: Collection[str] = FIELDS) -> None:
    """Raises BadModel for fields that a local model does not take."""
    for name in request:
        if name not in fields:
            hint = did_you_mean(name, list(fields)) or f": it takes {', '.join(fields)}"
            raise BadModel(f"request has {name!r}, which a model on this machine does not take{hint}")


def cache_bytes(threads: int) -> int:
    """Memory for the keys and values of tokens on a CPU, of a worker that has so many cores: whole gigabytes."""
    share = machine.memory() * CACHE_SHARE * min(1.0, threads / machine.cores())
    return int(min(MOST_CACHE, max(LEAST_CACHE, share / (1 << 30)))) << 30


def whole_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation for a model that has no template for it."""
    return "\n\n".join(str(message["content"]) for message in messages)


@dataclass(frozen=True)
class Request:
    """A request on its way to the scheduler, and who waits for the answer."""

    body: Mapping[str, Any]
    answer: asyncio.Future[dict[str, Any]]
    loop: asyncio.AbstractEventLoop

    def answered(self, found: dict[str, Any] | BaseException) -> None:
        """Give the answer to who waits. Called in the scheduler's thread."""
        self.loop.call_soon_threadsafe(_give, self.answer, found)


def _give(answer: asyncio.Future[dict[str, Any]], found: dict[str, Any] | BaseException) -> None:
    if answer.done():  # dropped
        return
    if isinstance(found, BaseException):
        answer.set_exception(found)
    else:
        answer.set_result(found)


class Generator:
    """A loaded model, with a thread in which its scheduler runs. `most` requests are computed at a time; those asked
    for beyond that wait. Loading takes seconds. `PREFIXES`: whether what prompts begin with alike is computed once;
    `PROPERTIES` are OpenVINO's, beside the number of threads.
    """

    PREFIXES = True
    PROPERTIES: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, files: LlmFiles, *, threads: int, most: int, request: Mapping[str, Any], choice: str) -> None:
        self._genai = require("openvino_genai", "genai", "a language model on this machine")
        self._most = most
        self._choice = choice
        self._pipe = self._opened(files, threads)
        self._tokenizer = self._pipe.get_tokenizer()
        self._context = self._limit(files.context)
        self._check(request)
        self._new: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._active: dict[
            int, tuple[Request, Any, Any]
        ] = {}  # by number: the request, its handle, its prompt's tokens
        self._begun = 0
        self.ending = Ending()
        self.alive: Callable[[], None] = lambda: None  # called whenever the scheduler got on
        self._thread = threading.Thread(target=self._run, name="gristmill-generator", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """What keeps answers away: nothing, it computes."""
        return ""

    @property
    def most_flying(self) -> int:
        """See Asked."""
        return 0

    @property
    def put_off(self) -> int:
        """See Asked."""
        return 0

    @property
    def news(self) -> list[str]:
        """See Asked."""
        return []

    async def ask(
        self, body: Mapping[str, Any], tokens: float, path: str = CHAT, payer: Payer | None = None
    ) -> dict[str, Any]:
        """The answer to a request in OpenAI's chat form, which is the only `path`. Raises Refused for a prompt that
        the model cannot take, and RunFailed if it broke.
        """
        self.ending.go_on()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._new.put(Request(body, answer, loop))
        return await answer

    def resumed(self) -> None:
        """A model on this machine is there, or cannot be loaded."""

    def share_in(self, run: str) -> None:
        """See paid.Asked: there are no limits."""

    def stop(self, error: GristmillError) -> NoReturn:
        """No more requests, for this reason, which is raised."""
        self.ending.stop(error)

    async def close(self) -> None:
        """End the thread, after the step that it is at."""
        self._new.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    # ------------------------------------------------ loading

    def _opened(self, files: LlmFiles, threads: int) -> Any:
        config = self._genai.SchedulerConfig()
        config.enable_prefix_caching = self.PREFIXES
        config.max_num_seqs = self._most
        config.cache_size = cache_bytes(threads) >> 30  # used as it is needed
        try:
            return self._genai.ContinuousBatchingPipeline(
                str(files.opened), config, "CPU", {"INFERENCE_NUM_THREADS": threads, **self.PROPERTIES}
            )
        except RuntimeError as e:
            raise BadModel(f"llm {files.opened}: OpenVINO GenAI cannot load it: {_said(e)}") from e

    def _limit(self, context: int | None) -> int | None:
        """The tokens of a prompt and its answer. A tokenizer cuts longer texts, perhaps earlier, and says nothing."""
        tried = "a " * ((context or LONGEST) + 8)
        found = int(self._tokenizer.encode(tried, add_special_tokens=False).input_ids.shape[1])
        return min(found, context) if context is not None else found if found < LONGEST else None

    def _check(self, request: Mapping[str, Any]) -> None:
        try:
            self._config({**request, "max_tokens": 1}, "", 1).validate()
        except (RuntimeError, TypeError, ValueError) as e:
            raise BadModel(f"request {dict(request)}: {_said(e)}") from e

    # ------------------------------------------------ the scheduler's thread

    def _run(self) -> None:
        idle = True
        while self._take(idle):
            begun = time.perf_counter()
            try:
                if self._active:
                    self._pipe.step()
                done = self._finished()
            except Exception as e:  # GenAI does not say of which request, and goes on failing
                self._break(e)
                return
            self.alive()
            idle = not self._active and self._new.empty()
            room = ROOM if len(self._active) < self._most else 0.0
            time.sleep(room + OTHERS * (time.perf_counter() - begun))
            if done is not None:
                self._others_turn(done)

    def _take(self, idle: bool) -> bool:
        """Hand new requests to the scheduler; wait for one if there is nothing to do. False at the end."""
        new: list[Request] = []
        while True:
            try:
                found = self._new.get(block=idle)
            except queue.Empty:
                break
            if found is None:
                return False
            if idle:
                self._others_turn(found.loop)  # the first of many
            new.append(found)
            idle = False
        for request in new:
            try:
                self._add(request)
            except Exception as e:  # a template or text that cannot be taken: this row's own failure
                request.answered(e if isinstance(e, Refused) else Refused(_said(e)))
        return True

    def _add(self, request: Request) -> None:
        if request.answer.cancelled():
            return
        text, special = self._text(request.body["messages"])
        given = self._tokenizer.encode(text, add_special_tokens=special).input_ids
        count = given.shape[1]
        if not count:
            raise Refused("the prompt is empty")
        if self._context is not None and count >= self._context:
            pieces = [text[n : n + self._context // 4] for n in range(0, len(text), self._context // 4)]
            about = sum(self._tokenizer.encode(piece, add_special_tokens=False).input_ids.shape[1] for piece in pieces)
            raise Refused(f"the prompt has about {about} tokens, and the model's context is {self._context}")
        self._begin(request, given, self._config(request.body, text, count), count)

    def _begin(self, request: Request, given: Any, config: Any, count: Any) -> None:
        """Hand over the tokens of a prompt; `count` is kept for the reply."""
        self._begun += 1
        self._active[self._begun] = (request, self._pipe.add_request(self._begun, given, config), count)

    def _text(self, messages: list[dict[str, Any]]) -> tuple[str, bool]:
        """The text of a conversation, as the model's template has it, and whether it lacks special tokens."""
        if self._tokenizer.chat_template:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True), False
        return whole_text(messages), True

    def _config(self, body: Mapping[str, Any], text: str, count: int) -> Any:
        config = self._pipe.get_config()  # a copy of the model's own, which has its ends of text
        config.apply_chat_template = False
        config.max_new_tokens = int(body.get("max_tokens") or MAX_TOKENS)
        if self._context is not None:
            config.max_new_tokens = min(config.max_new_tokens, self._context - count)
        temperature = body.get("temperature") or 0.0
        config.do_sample = temperature > 0
        if config.do_sample:
            config.temperature = temperature
            config.top_p = float(1.0 if body.get("top_p") is None else body["top_p"])
        for name in FIELDS.keys() & body.keys():
            value = body[name]
            if name in ("stop", "stop_token_ids"):
                value = {value} if isinstance(value, str) else {*value}
            setattr(config, FIELDS[name], value)
        # Of each prompt another one, and the same whatever rows are beside it.
        config.rng_seed = (int(body.get("seed") or 0) + zlib.crc32(text.encode())) % (1 << 31)
        if (form := body.get("response_format")) is not None:
            grammar = grammar_of(form["json_schema"]["schema"], self._choice)
            config.structured_output_config = self._genai.StructuredOutputConfig(grammar=grammar)
        return config

    def _finished(self) -> asyncio.AbstractEventLoop | None:
        """Hand out the answers that are there; the loop that got some."""
        running, loop = self._genai.GenerationStatus.RUNNING, None
        for number, (request, handle, count) in list(self._active.items()):
            if handle.get_status() == running:
                if request.answer.cancelled():
                    handle.cancel()
                continue
            del self._active[number]
            request.answered(self._reply(handle, count))
            loop = request.loop
        return loop

    def _made(self, handle: Any, count: int) -> Any:
        """What was made for a prompt of so many tokens, or Refused."""
        if handle.get_status() == self._genai.GenerationStatus.IGNORED:
            return Refused(f"the prompt has {count} tokens, which the memory for them (KV cache) cannot hold")
        if not (found := handle.read_all()):
            return Refused(f"the request was ended without an answer ({handle.get_status().name})")
        return found[0]

    def _reply(self, handle: Any, count: Any) -> dict[str, Any] | BaseException:
        if isinstance(found := self._made(handle, count), BaseException):
            return found
        made = list(found.generated_ids)
        cut = found.finish_reason == self._genai.GenerationFinishReason.LENGTH
        message = {"role": "assistant", "content": self._tokenizer.decode(made)}
        usage = {"prompt_tokens": count, "completion_tokens": len(made), "total_tokens": count + len(made)}
        return {"choices": [{"message": message, "finish_reason": "length" if cut else "stop"}], "usage": usage}

    def _others_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until the loop has gone round: answers become rows, and next rows become requests."""
        turned = threading.Event()

        def turn(left: int) -> None:
            if left:
                loop.call_soon(turn, left - 1)
            else:
                turned.set()

        loop.call_soon_threadsafe(turn, TURNS)
        turned.wait(PATIENCE)

    def _break(self, error: Exception) -> None:
        self.ending.error = RunFailed(
            f"OpenVINO GenAI failed with {len(self._active)} prompts at hand: {_said(error)}; what is answered is "
            "kept: run again"
        )
        for request, _, _ in self._active.values():
            request.answered(self.ending.error)
        while (found := self._new.get()) is not None:
            found.answered(self.ending.error)


def _said(error: Exception) -> str:
    """What OpenVINO says, without where in its sources it says so."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:500]

"""A language model on this machine that tells the log-probabilities of texts, through OpenVINO GenAI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gristmill.models.generator import Generator, Request
from gristmill.models.replies import Refused

SCORES = "scores"  # in a reply: the log-probability of each token of the continuation


class Scorer(Generator):
    """A loaded model; an Asked for requests with a `prompt` and its `continuation`. One more token is made than is
    asked about, because GenAI tells those of a prompt when it has made one.
    """

    # What is cached of a prompt has no log-probabilities. What GenAI rounds by default, for speed, moves those of a
    # token by up to a nat; without that, they are within 0.001 of those of the model's logits (SmolLM2, 2026.4).
    PREFIXES = False
    PROPERTIES: ClassVar[Mapping[str, Any]] = {
        "INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "KV_CACHE_PRECISION": "f32",
    }  # fmt: skip

    def _add(self, request: Request) -> None:
        if request.answer.cancelled():
            return
        prompt = str(request.body["prompt"])
        text = prompt + str(request.body["continuation"])
        before = self._tokens(prompt)
        given = self._tokenizer.encode(text, add_special_tokens=True).input_ids
        whole = given.data[0].tolist()
        begin = next((n for n, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        begin = min(begin, len(whole))
        if self._context is not None and len(whole) >= self._context:
            raise Refused(f"the text has {len(whole)} tokens or more, and the model's context is {self._context}")
        if begin == len(whole):
            raise Refused("the continuation adds no token to the prompt")
        if not begin:
            raise Refused("no token comes before the continuation: the first token of a text has no probability")
        config = self._config({"max_tokens": 1}, text, len(whole))
        config.echo = True
        config.logprobs = 1
        config.ignore_eos = True
        self._begin(request, given, config, (begin, len(whole)))

    def _tokens(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=True).input_ids.data.ravel().tolist()
        return found

    def _reply(self, handle: Any, count: Any) -> dict[str, Any] | BaseException:
        begin, end = count
        if isinstance(found := self._made(handle, end), BaseException):
            return found
        logged = list(found.generated_log_probs)
        if len(logged) != end + 1:
            return Refused(f"{len(logged)} log-probabilities for {end} tokens and one")
        usage = {"prompt_tokens": end, "completion_tokens": 0, "total_tokens": end}
        return {SCORES: [float(number) for number in logged[begin:end]], "usage": usage}

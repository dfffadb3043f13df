"""What requests take, learned from those that were answered: for what is to be kept free before one is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
LIMITLESS = 10**9  # tokens of an answer: whoever writes more means that nothing limits them
HEADROOM = 1.5  # times the longest answer of late is what the next may take, if nothing limits it
SPREAD = 0.3  # of their mean is what lengths have to differ by to tell what prompts have apart from their length
FADES = 0.99  # what a request counts after each further one: some hundreds are remembered


class Usual:
    """Tokens of prompts, as a part that all have (templates of chats, schemas, images) and a multiple of what their
    length lets expect, never less than the shortest of late; and of answers. Once an answer took more than
    its request allows, as where thoughts are billed beside it, what requests allow bounds nothing (`exceeded`).
    """

    def __init__(self) -> None:
        self.answered = 0  # requests
        self.exceeded = False
        self._beyond = 0.0  # the most that an answer of late took, in times of what its request allows
        self._longest = 0.0
        self._least = float("inf")  # tokens of the shortest prompt of late
        # Sums over requests, for the line of least squares: how many, sizes, tokens, and their products.
        self._n = self._size = self._given = self._squares = self._products = 0.0

    @property
    def known(self) -> bool:
        """Whether a request was answered."""
        return self.answered > 0

    def tokens(self, size: float, most: float | None) -> tuple[float, float]:
        """Of a prompt of about `size` tokens by its length, and of its answer, which has `most` (None: no limit)."""
        given = self._prompt(size)
        if most is None:
            return given, HEADROOM * self._longest
        return given, most * max(1.0, HEADROOM * self._beyond) if self.exceeded else most

    def add(self, size: float, given: float, made: float, most: float | None) -> None:
        """A prompt of about `size` tokens by its length had `given`, and its answer `made`, of `most` (None: no
        limit).
        """
        self.answered += 1
        if most:
            self._beyond = max(made / most, FADES * self._beyond)
            self.exceeded |= made > most
        self._longest = max(made, FADES * self._longest)
        if given > 0 and size > 0:  # else nothing was told
            self._least = min(given, self._least / FADES)
            self._n = FADES * self._n + 1
            self._size = FADES * self._size + size
            self._given = FADES * self._given + given
            self._squares = FADES * self._squares + size * size
            self._products = FADES * self._products + size * given

    def _prompt(self, size: float) -> float:
        """Tokens of a prompt. Where lengths hardly differed, they do not tell which part all have: a longer one is
        taken to have none of it, a shorter one to have nothing else.
        """
        if not self._n:
            return size
        mean, given, most = self._size / self._n, self._given / self._n, self._given / self._size
        varies = self._squares / self._n - mean * mean
        slope = most if size > mean else 0.0
        if varies > (SPREAD * mean) ** 2:
            slope = min(most, max(0.0, (self._products / self._n - mean * given) / varies))
        return max(given + slope * (size - mean), self._least)


def most_tokens(body: Mapping[str, Any]) -> int | None:
    """The tokens that the answers to a request may have together; None if nothing limits them."""
    found = next((n for name in MOST_TOKENS if type(n := body.get(name)) is int), None)
    if found is None:
        return None
    answers = max([1, *(n for name in ("n", "best_of") if type(n := body.get(name)) is int)])
    return max(0, min(found, LIMITLESS)) * min(answers, LIMITLESS) * _prompts(body)


def _prompts(body: Mapping[str, Any]) -> int:
    """How many prompts a request has: a list of numbers is one of tokens."""
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else 1

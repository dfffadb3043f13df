"""Language models over rows, as a job names them."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from gristmill.errors import BadJob
from gristmill.job.annotations import Help, Range, whole
from gristmill.job.keywords import option_fields
from gristmill.job.specs import AT_ONCE, FILES, OUTPUT, RETURNS, SHA256

_PLACE = "where and how fast it is asked, not what"
_SECONDS = Range("give seconds, more than 0", above=0)
_SHARE = Range("give a number from 0 to 1", 0, 1)


@option_fields()
@dataclass(frozen=True)
class Prompt:
    """A prompt a row, answered by a language model behind an endpoint that speaks OpenAI's chat form. Adds `output`,
    or the columns of `returns`. Without `base_url`, an `llm` that is a folder for OpenVINO, a .gguf file, or a copy of
    such a model of the hub here is loaded in the workers, and answers greedily unless `temperature` says otherwise.

    `prompt` and `system` are Jinja templates over the row's columns (`{{ text }}`, or `{{ row["a b"] }}`), or `@FILE`.
    With `returns` the answer is a JSON object with these columns, and with `choices` one of these texts: sent as
    structured output where the endpoint takes that, validated in any case, and asked for once more with what was wrong
    if it does not fit. Rows are in flight across batches and shards; limits are those of the whole run.
    """

    home: ClassVar[str] = "gristmill.models.prompt"
    not_shaping: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("base_url", "api_key", "concurrency"), _PLACE),
        **dict.fromkeys(("requests_per_minute", "tokens_per_minute", "timeout"), _PLACE),
        "sha256": FILES,
        **dict.fromkeys(("cache", "price", "max_cost"), "what answers cost, not what they are"),
    }

    prompt: Annotated[str, Help("The prompt: a Jinja template over the row's columns, or @FILE", flag=None)]
    llm: Annotated[str, Help("The language model, as its endpoint names it, or a folder or .gguf file", flag=None)]
    base_url: Annotated[
        str | None,
        Help("The endpoint, or several with commas between (default: OPENAI_BASE_URL, else OpenAI)", "URL", usual=True),
    ] = None
    system: Annotated[str | None, Help("The system prompt: a template, or @FILE", "TEMPLATE", usual=True)] = None
    output: Annotated[str, OUTPUT] = "answer"
    returns: Annotated[Mapping[str, str] | None, RETURNS] = None
    choices: Annotated[tuple[str, ...] | None, Help("The answer is one of these texts")] = None
    temperature: Annotated[
        float | None, Range("give a number of at least 0", least=0), Help("0: the likeliest token each time")
    ] = None
    top_p: Annotated[float | None, _SHARE, Help("Only tokens that make up so much of the probability")] = None
    max_tokens: Annotated[int | None, whole(1), Help("Tokens of an answer at most (a local model: 256)")] = None
    request: Annotated[
        Mapping[str, Any], Help("Other fields of the request, for example {reasoning_effort: low}", flag="--request")
    ] = field(default_factory=dict)
    keep_usage: Annotated[
        bool, Help("Also write prompt_tokens, completion_tokens and finish_reason, after the output's name")
    ] = False
    api_key: Annotated[
        str | None, Help("Its key, as ${env:NAME} (default: the environment's OPENAI_API_KEY)", flag=None)
    ] = None
    concurrency: Annotated[int, whole(1), AT_ONCE] = 32
    requests_per_minute: Annotated[int | None, whole(1), Help("Requests a minute at most, in the whole run")] = None
    tokens_per_minute: Annotated[
        int | None, whole(1), Help("Tokens a minute at most, of prompts and answers, in the whole run")
    ] = None
    dedupe: Annotated[bool, Help("Ask for equal prompts once: all their rows have that answer")] = False
    cache: Annotated[
        str | None,
        Help(
            "A folder on this machine that keeps answers across runs, by all that is sent: they are not paid for again",
            "FOLDER",
        ),
    ] = None
    price: Annotated[
        Mapping[str, str] | None,
        Help("Dollars for tokens, as input=0.40/1M and output=1.60/1M: the report then says what the run cost"),
    ] = None
    max_cost: Annotated[
        float | None,
        Range("give dollars, more than 0", above=0),
        Help("Stop before the run has cost so many dollars; the next run goes on (needs price)", "DOLLARS"),
    ] = None
    timeout: Annotated[float, _SECONDS, Help("Seconds that one request may take; it is then sent again", "SECONDS")] = (
        120.0
    )
    sha256: Annotated[str | None, SHA256] = None

    def __post_init__(self) -> None:
        if self.choices is not None and self.returns is not None:
            raise BadJob("choices and returns are two forms of an answer: leave one of them out")
        if self.choices is not None and (len(self.choices) < 2 or len({*self.choices}) < len(self.choices)):
            raise BadJob(f"choices is {list(self.choices)}: give two or more different texts")
        if self.price is not None:
            prices(self.price)
        elif self.max_cost is not None:
            raise BadJob("max_cost needs price, as input=0.40/1M and output=1.60/1M")
        for name in ("model", "messages", "stream", "n"):
            if name in self.request:
                raise BadJob(f"request has {name!r}, which is not an option: gristmill sets it")

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return f"prompt {self.llm}"


_PRICE = re.compile(r"\$?(\d+(?:\.\d*)?|\.\d+)\s*/\s*(1M|1K|token)", re.IGNORECASE)
_TOKENS = {"1m": 1e6, "1k": 1e3, "token": 1.0}


def prices(price: Mapping[str, str]) -> tuple[float, float]:
    """Dollars for a token of a prompt and of an answer. Raises BadJob for a price without a unit, or another name."""
    found = []
    for name in ("input", "output"):
        text = str(price.get(name, ""))
        if (match := _PRICE.fullmatch(text.strip())) is None:
            raise BadJob(
                f"price has {name} as {text!r}: write dollars and for how many tokens, as 0.40/1M (1M, 1K, token)"
            )
        found.append(float(match[1]) / _TOKENS[match[2].lower()])
    if other := [name for name in price if name not in ("input", "output")]:
        raise BadJob(f"price has {other[0]!r}: it has input and output")
    return found[0], found[1]


def text_of(template: str, what: str) -> str:
    """A template's text, read from its file if it is `@FILE`. Raises BadJob."""
    if not template.startswith("@"):
        return template
    try:
        with open(os.path.expanduser(template[1:]), encoding="utf-8") as file:
            text = file.read()
        return f"{{##}}{text}" if text.startswith("@") else text  # an empty comment: this text names no file
    except (OSError, UnicodeDecodeError) as e:
        raise BadJob(f"{what} {template}: cannot be read ({e}); a text that begins with @ names a file") from e

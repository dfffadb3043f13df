"""Language models over rows, as a job names them."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from gristmill.errors import BadJob
from gristmill.job.annotations import Help, Range, whole
from gristmill.job.keywords import option_fields
from gristmill.job.options import Auto
from gristmill.job.specs import AT_ONCE, BACKEND, FILES, OUTPUT, RETURNS, SHA256

Api = Literal["chat", "completions", "responses", "messages"]
Backend = Literal["auto", "genai", "vllm"]
Provider = Literal["openai", "anthropic"]
# The forms that the batch API of a provider takes; the first one is that of a job that names none.
BATCHED: Mapping[Provider, tuple[Api, ...]] = {
    "openai": ("chat", "completions", "responses"), "anthropic": ("messages",)
}  # fmt: skip
MOST = 256  # requests in flight, if nobody says how many
BATCHES = 16  # batches of a provider that are under way, likewise
_PLACE = "where and how fast it is asked, not what"
_SECONDS = Range("give seconds, more than 0", above=0)
_SHARE = Range("give a number from 0 to 1", 0, 1)

# How endpoints are asked, in every kind of model that asks one.
BaseURL = Annotated[
    str | None,
    Help("The endpoint, or several with commas between (default: OPENAI_BASE_URL, else OpenAI)", "URL", usual=True),
]
APIKey = Annotated[str | None, Help("Its key, as ${env:NAME} (default: the environment's OPENAI_API_KEY)", flag=None)]
Concurrency = Annotated[int | Auto, whole(1), AT_ONCE]
RequestsPerMinute = Annotated[int | None, whole(1), Help("Requests a minute at most, in the whole run")]
TokensPerMinute = Annotated[
    int | None, whole(1), Help("Tokens a minute at most, of prompts and answers, in the whole run")
]
Dedupe = Annotated[bool, Help("Ask for equal prompts once: all their rows have that answer")]
Cache = Annotated[
    str | None,
    Help(
        "A folder on this machine that keeps answers across runs, by all that is sent: they are not paid for again",
        "FOLDER",
    ),
]
Price = Annotated[
    Mapping[str, str] | None,
    Help("Dollars for tokens, as input=0.40/1M and output=1.60/1M: the report then says what the run cost"),
]
MaxCost = Annotated[
    float | None,
    Range("give dollars, more than 0", above=0),
    Help("Stop before the run has cost so many dollars; the next run goes on (needs price)", "DOLLARS"),
]
Timeout = Annotated[float, _SECONDS, Help("Seconds that one request may take; it is then sent again", "SECONDS")]
BatchAPI = Annotated[
    Provider | None,
    Help("Ask through this provider's batch API: for half the price, answered within a day", "PROVIDER"),
]
HOW_ASKED: Mapping[str, str] = {
    **dict.fromkeys(("base_url", "api_key", "concurrency", "batch_api"), _PLACE),
    **dict.fromkeys(("requests_per_minute", "tokens_per_minute", "timeout"), _PLACE),
    **dict.fromkeys(("cache", "price", "max_cost"), "what answers cost, not what they are"),
}


@option_fields()
@dataclass(frozen=True)
class Prompt:
    """A prompt a row, answered by a language model behind an endpoint that speaks OpenAI's chat form, or another `api`
    of its. Adds `output`, or the columns of `returns`. Without `base_url`, an `llm` that is a folder for OpenVINO or
    with safetensors, a .gguf file, or a copy of such a model of the hub here is loaded in the workers, and answers
    greedily unless `temperature` says otherwise.

    `prompt` and `system` are Jinja templates over the row's columns (`{{ text }}`, or `{{ row["a b"] }}`), or `@FILE`.
    `examples` are rows with their answers, which are shown before each row; `images` are columns of bytes or addresses.
    Instead of these, `messages` is a function of a row that gives a text, or messages with role and content.

    With `returns` the answer is a JSON object with these columns, and with `choices` one of these texts: sent as
    structured output where the endpoint takes that, validated in any case, and asked for once more with what was wrong
    if it does not fit. Rows are in flight across batches and shards; limits are those of the whole run.
    """

    home: ClassVar[str] = "gristmill.models.prompt"
    ordered: ClassVar[tuple[str, ...]] = ("returns", "request")  # mappings whose order is sent, and shapes the answers
    not_shaping: ClassVar[Mapping[str, str]] = {
        **HOW_ASKED,
        "messages": "compared as code, with all that it refers to",
        "sha256": FILES,
    }

    prompt: Annotated[str | None, Help("The prompt: a Jinja template over the row's columns, or @FILE", flag=None)] = (
        None
    )
    llm: Annotated[str, Help("The language model, as its endpoint names it, or a folder or .gguf file", flag=None)] = ""
    base_url: BaseURL = None
    system: Annotated[str | None, Help("The system prompt: a template, or @FILE", "TEMPLATE", usual=True)] = None
    messages: Annotated[
        Any,
        Help("Instead of a prompt: your function of a row, which gives its messages (or a text)", "MODULE:NAME"),
    ] = None
    examples: Annotated[
        Any, Help("Rows with their answers, which are shown to the model first: @FILE of JSON Lines", "@FILE")
    ] = None
    images: Annotated[tuple[str, ...] | None, Help("Columns with images to send: their bytes, or addresses")] = None
    api: Annotated[Api, Help("The form of requests: chat, completions (of a text), responses, or messages")] = "chat"
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
    keep_score: Annotated[
        bool, Help("Also write the probability of the answered choice, where the endpoint tells those of tokens")
    ] = False
    keep_reasoning: Annotated[bool, Help("Also write what the model thought, where the endpoint tells")] = False
    keep_prompt: Annotated[bool, Help("Also write the prompt as it was sent")] = False
    backend: Annotated[Backend, BACKEND] = "auto"
    vllm: Annotated[
        Mapping[str, Any], Help("Arguments of vLLM's engine, for example {max_model_len: 8192}", flag="--vllm")
    ] = field(default_factory=dict)
    api_key: APIKey = None
    concurrency: Concurrency = "auto"
    requests_per_minute: RequestsPerMinute = None
    tokens_per_minute: TokensPerMinute = None
    dedupe: Dedupe = False
    cache: Cache = None
    price: Price = None
    max_cost: MaxCost = None
    timeout: Timeout = 120.0
    batch_api: BatchAPI = None
    sha256: Annotated[str | None, SHA256] = None

    def __post_init__(self) -> None:
        if not self.llm:
            raise BadJob("a prompt needs llm, the name of the language model at its endpoint")
        if self.batch_api is not None and self.api not in (forms := BATCHED[self.batch_api]):
            if self.api != "chat":
                raise BadJob(f"api is {self.api}: batch_api={self.batch_api} takes {', '.join(forms)}; leave it out")
            object.__setattr__(self, "api", forms[0])
        if self.api == "messages" and self.max_tokens is None:
            raise BadJob("max_tokens is missing: api=messages, Anthropic's form, needs it: the most of an answer")
        self._check_messages()
        if self.keep_score and self.choices is None:
            raise BadJob("keep_score is of choices: name them")
        if self.choices is not None and self.returns is not None:
            raise BadJob("choices and returns are two forms of an answer: leave one of them out")
        if self.choices is not None and (len(self.choices) < 2 or len({*self.choices}) < len(self.choices)):
            raise BadJob(f"choices is {list(self.choices)}: give two or more different texts")
        check_cost(self.price, self.max_cost)
        for name in ("model", "messages", "input", "stream", "n"):
            if name in self.request:
                raise BadJob(f"request has {name!r}, which is not an option: gristmill sets it")

    def _check_messages(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise BadJob("give a prompt (a template), or messages (a function of a row)")
        others = [name for name in ("system", "examples", "images") if getattr(self, name) is not None]
        if self.messages is not None and others:
            raise BadJob(f"{others[0]} belongs to a prompt: with messages, the function gives all that is sent")
        if self.messages is not None and not (isinstance(self.messages, str) or callable(self.messages)):
            raise BadJob(f"messages is {self.messages!r}: give a function of a row, or 'module:name'")
        if self.api == "completions" and (others or self.messages is not None):
            raise BadJob(f"{(*others, 'messages')[0]}: api=completions sends one text, the prompt alone; use api=chat")
        if isinstance(self.examples, str):
            if not self.examples.startswith("@"):
                raise BadJob(f"examples is {self.examples!r}: give rows with their answers, or @FILE of JSON Lines")
        elif self.examples is not None:
            rows = self.examples
            if not isinstance(rows, (list, tuple)) or not all(isinstance(row, Mapping) for row in rows):
                raise BadJob("examples is a list of mappings: each a row, with its answer in the column of output")
            object.__setattr__(self, "examples", tuple(dict(row) for row in rows))

    @property
    def most(self) -> int:
        """Requests in flight at most."""
        return most_of(self.concurrency, self.batch_api)

    @property
    def batches(self) -> int:
        """A provider's batches under way at most."""
        return batches_of(self.concurrency, self.batch_api)

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return f"prompt {self.llm}"


def most_of(concurrency: int | Auto, batch_api: Provider | None = None) -> int:
    """Requests in flight at most; `concurrency` is of batches if there is a batch_api."""
    return MOST if concurrency == "auto" or batch_api is not None else concurrency


def batches_of(concurrency: int | Auto, batch_api: Provider | None) -> int:
    """Batches under way at most; 0 without a batch_api."""
    if batch_api is None:
        return 0
    return BATCHES if concurrency == "auto" else concurrency


def check_cost(price: Mapping[str, str] | None, max_cost: float | None) -> None:
    """Raises BadJob for prices that `prices` does not take, and for a limit without a price."""
    if price is not None:
        prices(price)
    elif max_cost is not None:
        raise BadJob(
            "max_cost needs price, that of tokens in and out: --price input=0.40/1M --price output=1.60/1M, "
            "price={'input': '0.40/1M', 'output': '1.60/1M'}"
        )


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

"""Language models over rows, as a job names them."""

import os
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from gristmill.errors import BadJob
from gristmill.job.annotations import Help, Range, whole
from gristmill.job.endpoints import (
    HOW_ASKED,
    APIKey,
    BaseURL,
    BatchAPI,
    Cache,
    Concurrency,
    Dedupe,
    MaxCost,
    Price,
    Provider,
    Request,
    RequestsPerMinute,
    Timeout,
    TokensPerMinute,
    batches_of,
    check_cost,
    check_request,
    most_of,
)
from gristmill.job.keywords import option_fields
from gristmill.job.specs import BACKEND, FILES, OUTPUT, RETURNS, SHA256
from gristmill.values import dataclass

Api = Literal["chat", "completions", "responses", "messages"]
Backend = Literal["auto", "genai", "vllm"]
# The forms that the batch API of a provider takes; the first one is that of a job that names none.
BATCHED: Mapping[Provider, tuple[Api, ...]] = {
    "openai": ("chat", "completions", "responses"), "anthropic": ("messages",)
}  # fmt: skip
_SHARE = Range("give a number from 0 to 1", 0, 1)


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
    returns: Annotated[Mapping[str, Any] | type[Any] | str | None, RETURNS] = None
    choices: Annotated[tuple[str, ...] | None, Help("The answer is one of these texts", usual=True)] = None
    temperature: Annotated[
        float | None, Range("give a number of at least 0", least=0), Help("0: the likeliest token each time")
    ] = None
    top_p: Annotated[float | None, _SHARE, Help("Only tokens that make up so much of the probability")] = None
    max_tokens: Annotated[int | None, whole(1), Help("Tokens of an answer at most (a local model: 256)")] = None
    request: Request = field(default_factory=dict)
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
        check_returns(self.returns)
        if self.choices is not None and (len(self.choices) < 2 or len({*self.choices}) < len(self.choices)):
            raise BadJob(f"choices is {list(self.choices)}: give two or more different texts")
        check_cost(self.price, self.max_cost)
        check_request(self.request)

    def _check_messages(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise BadJob("give a prompt (--prompt: a template), or messages (--messages: a function of a row)")
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


def check_returns(returns: Any) -> None:
    """Raises BadJob for what tells no columns."""
    if isinstance(returns, type) and not is_class(returns):
        raise BadJob(f"returns is {returns.__name__}, which is no pydantic class: derive it from pydantic.BaseModel")
    if isinstance(returns, str) and not returns.startswith("@") and ":" not in returns:
        raise BadJob(f"returns is {returns!r}: give names and types, @FILE of a JSON Schema, or MODULE:NAME of a class")
    if isinstance(returns, Mapping) and not returns:
        raise BadJob("returns is empty: give names and types, or leave it out")


def is_class(returns: Any) -> bool:
    """Whether it is a pydantic class."""
    return isinstance(returns, type) and hasattr(returns, "model_validate_json")


def is_schema(returns: Any) -> bool:
    """Whether a mapping is a JSON Schema, and not names and types, which are texts."""
    if not isinstance(returns, Mapping):
        return False
    parts = (returns.get("properties"), returns.get("$defs"), returns.get("anyOf"), returns.get("required"))
    told = "$schema" in returns or "$ref" in returns or returns.get("type") in ("object", "array")
    return told or any(isinstance(part, (Mapping, list)) for part in parts)


def text_of(template: str, what: str) -> str:
    """A template's text, read from its file if it is `@FILE`. Raises BadJob, also for a file's name without the @."""
    if not template.startswith("@"):
        if "{{" not in template and "{%" not in template and os.path.isfile(os.path.expanduser(template)):
            raise BadJob(
                f"{what} {template!r} names no column, and a file has that name: write @{template} for its text"
            )
        return template
    try:
        with open(os.path.expanduser(template[1:]), encoding="utf-8") as file:
            text = file.read()
        return f"{{##}}{text}" if text.startswith("@") else text  # an empty comment: this text names no file
    except (OSError, UnicodeDecodeError) as e:
        raise BadJob(f"{what} {template}: cannot be read ({e}); a text that begins with @ names a file") from e

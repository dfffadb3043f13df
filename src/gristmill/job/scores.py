"""Texts scored by language models, as a job names them."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, ClassVar

from gristmill.errors import BadJob
from gristmill.job.annotations import Help
from gristmill.job.endpoints import (
    HOW_ASKED,
    APIKey,
    BaseURL,
    Cache,
    Concurrency,
    Dedupe,
    MaxCost,
    Price,
    Request,
    RequestsPerMinute,
    Timeout,
    TokensPerMinute,
    check_cost,
    check_request,
    most_of,
)
from gristmill.job.keywords import option_fields
from gristmill.job.specs import FILES, OUTPUT, SHA256
from gristmill.values import dataclass


@option_fields()
@dataclass(frozen=True)
class Score:
    """How likely a language model finds texts after a prompt: the log-probability of each continuation, in nats, summed
    over its tokens. Adds `output` and `<output>_tokens`, how many these are; for several continuations both are lists,
    and `<output>_best` is the likeliest of them.

    `prompt` is a Jinja template over the row's columns, or `@FILE`; a continuation follows it as it is written, and no
    chat template is used: begin continuations with a blank, or end the prompt with one. A token that holds letters of
    both counts for the continuation. `llm` is a folder for OpenVINO or a .gguf file, or with `base_url` a name at an
    endpoint that has completions with `echo` and `logprobs` (vLLM).
    """

    home: ClassVar[str] = "gristmill.models.score"
    ordered: ClassVar[tuple[str, ...]] = ("request",)
    not_shaping: ClassVar[Mapping[str, str]] = {**HOW_ASKED, "sha256": FILES}

    prompt: Annotated[
        str, Help("What continuations follow: a Jinja template over the row's columns, or @FILE", flag=None)
    ]
    llm: Annotated[str, Help("The language model: a folder or .gguf file, or its name at the endpoint", flag=None)]
    continuations: Annotated[tuple[str, ...] | None, Help("The texts to score after each prompt", usual=True)] = None
    continuations_from: Annotated[
        str | None, Help("The column with the continuations instead: of each row a text, or a list of texts", "COLUMN")
    ] = None
    output: Annotated[str, OUTPUT] = "score"
    base_url: BaseURL = None
    request: Request = field(default_factory=dict)
    api_key: APIKey = None
    concurrency: Concurrency = "auto"
    requests_per_minute: RequestsPerMinute = None
    tokens_per_minute: TokensPerMinute = None
    dedupe: Dedupe = False
    cache: Cache = None
    price: Price = None
    max_cost: MaxCost = None
    timeout: Timeout = 120.0
    sha256: Annotated[str | None, SHA256] = None

    def __post_init__(self) -> None:
        if (self.continuations is None) == (self.continuations_from is None):
            raise BadJob("give continuations (texts), or continuations_from (the column that holds them)")
        if self.continuations is not None:
            texts = self.continuations
            if not texts or "" in texts or len({*texts}) < len(texts):
                raise BadJob(f"continuations is {list(texts)}: give different texts, none of them empty")
        check_cost(self.price, self.max_cost)
        check_request(self.request)

    @property
    def most(self) -> int:
        """Requests in flight at most."""
        return most_of(self.concurrency)

    @property
    def batch_api(self) -> None:
        """Scores are not asked for in bulk."""
        return None

    @property
    def batches(self) -> int:
        """See `batch_api`."""
        return 0

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return f"score {self.llm}"

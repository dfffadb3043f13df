"""Requests to an endpoint as rows, as a job names them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from gristmill.errors import BadJob
from gristmill.job.annotations import Help
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
    RequestsPerMinute,
    Timeout,
    TokensPerMinute,
    batches_of,
    check_cost,
    most_of,
)
from gristmill.job.job import Sink, Source
from gristmill.job.keywords import option_fields
from gristmill.job.options import Gates
from gristmill.job.prompts import BATCHED
from gristmill.values import dataclass

BATCH = "openai-batch"


def batch_ends(input_file: str, output_file: str) -> dict[str, Any]:
    """What of a job `run-batch` is: every line is a row, also one that is no request, and none may be missing."""
    return {
        "source": Source((input_file,), format=BATCH, options={"invalid": "keep"}),
        "sink": Sink(output_file, format=BATCH, keep=("custom_id",)),
        "gates": Gates(min_ok=1, allow_empty=True),
    }


@option_fields()
@dataclass(frozen=True)
class Requests:
    """Requests that are there, one a row, sent to an endpoint: the columns custom_id, method, url and body of OpenAI's
    batch files (`format="openai-batch"`). Adds `id`, `response` and `error`, which an openai-batch sink writes.

    `llm` is the model of requests that name none; one that names another is refused. What is refused, and what cannot
    be sent, is no dead letter: its row says so in `error`. What cannot be answered for any row (a key, an endpoint that
    has gone) stops the job.
    """

    home: ClassVar[str] = "gristmill.models.requests"
    not_shaping: ClassVar[Mapping[str, str]] = HOW_ASKED

    llm: Annotated[str, Help("The language model that the requests are for, as its endpoint names it", flag=None)]
    base_url: BaseURL = None
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

    def __post_init__(self) -> None:
        check_cost(self.price, self.max_cost)
        if self.batch_api is not None and "chat" not in BATCHED[self.batch_api]:
            raise BadJob(f"batch_api is {self.batch_api}: requests have OpenAI's forms, which only openai takes")

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
        return f"requests {self.llm}"

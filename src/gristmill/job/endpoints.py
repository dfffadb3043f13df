"""How endpoints are asked, as a job says: options and prices of every kind of model that asks one."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from gristmill.errors import BadJob
from gristmill.job.annotations import Help, Range, whole
from gristmill.job.options import Auto

Provider = Literal["openai", "anthropic"]
MOST = 256  # requests in flight, if nobody says how many
BATCHES = 16  # batches of a provider that are under way, likewise
_PLACE = "where and how fast it is asked, not what"
_SECONDS = Range("give seconds, more than 0", above=0)

AT_ONCE = Help(
    "Rows in flight in the whole run, each one call, or one request (default 32; of endpoints auto: as many as make "
    "more answers a second, up to 256)",
    usual=True,
)
BaseURL = Annotated[
    str | None,
    Help(
        "The endpoint, or several with commas between (default of prompts: OPENAI_BASE_URL, else OpenAI)",
        "URL",
        usual=True,
    ),
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
Request = Annotated[
    Mapping[str, Any], Help("Other fields of the request, for example {reasoning_effort: low}", flag="--request")
]
HOW_ASKED: Mapping[str, str] = {
    **dict.fromkeys(("base_url", "api_key", "concurrency", "batch_api"), _PLACE),
    **dict.fromkeys(("requests_per_minute", "tokens_per_minute", "timeout"), _PLACE),
    **dict.fromkeys(("cache", "price", "max_cost"), "what answers cost, not what they are"),
}


def most_of(concurrency: int | Auto, batch_api: Provider | None = None) -> int:
    """Requests in flight at most; `concurrency` is of batches if there is a batch_api."""
    return MOST if concurrency == "auto" or batch_api is not None else concurrency


def batches_of(concurrency: int | Auto, batch_api: Provider | None) -> int:
    """Batches under way at most; 0 without a batch_api."""
    if batch_api is None:
        return 0
    return BATCHES if concurrency == "auto" else concurrency


_BOTH = "--price input=0.40/1M --price output=1.60/1M"


def check_cost(price: Mapping[str, str] | None, max_cost: float | None) -> None:
    """Raises BadJob for prices that `prices` does not take, and for a limit without a price."""
    if price is not None:
        prices(price)
    elif max_cost is not None:
        raise BadJob(
            f"max_cost needs price, that of tokens in and out: {_BOTH}, "
            "price={'input': '0.40/1M', 'output': '1.60/1M'}"
        )


def check_request(request: Mapping[str, Any]) -> None:
    """Raises BadJob for other fields of requests which are not for the user to set."""
    for name in ("model", "messages", "input", "stream", "n"):
        if name in request:
            raise BadJob(f"request has {name!r}, which is not an option: gristmill sets it")


_PRICE = re.compile(r"\$?(\d+(?:\.\d*)?|\.\d+)\s*/\s*(1M|1K|token)", re.IGNORECASE)
_DOLLARS = re.compile(r"\$?(\d+(?:\.\d*)?|\.\d+)")
_TOKENS = {"1m": 1e6, "1k": 1e3, "token": 1.0}


def prices(price: Mapping[str, str]) -> tuple[float, float]:
    """Dollars for a token of a prompt and of an answer. Raises BadJob for a price without a unit, or another name."""
    found = []
    for name in ("input", "output"):
        text = str(price.get(name, ""))
        if (match := _PRICE.fullmatch(text.strip())) is None:
            if "," in text:
                raise BadJob(f"price has {name} as {text!r}: give each alone: {_BOTH}")
            if _DOLLARS.fullmatch(text.strip()):
                raise BadJob(f"price has {name} as {text!r}, without a unit: {text.strip()}/1M is for a million tokens")
            raise BadJob(
                f"price has {name} as {text!r}: write dollars and for how many tokens, as 0.40/1M (1M, 1K, token)"
            )
        found.append(float(match[1]) / _TOKENS[match[2].lower()])
    if other := [name for name in price if name not in ("input", "output")]:
        raise BadJob(f"price has {other[0]!r}: it has input and output")
    return found[0], found[1]

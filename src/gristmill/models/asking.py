"""What specs of models behind endpoints say of how they are asked, and what follows before anybody is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from gristmill.errors import BadModel
from gristmill.job.endpoints import Provider, prices
from gristmill.job.secret import HIDDEN, Secret, reveal
from gristmill.job.specs import changed
from gristmill.job.uris import redact
from gristmill.models.vendors import OPENAI, Vendor

LETTERS = 4  # of a token, about: what a prompt will take is corrected by what the endpoint says it took
S = TypeVar("S", bound="Asking")


class Asking(Protocol):
    """What specs of models behind endpoints say of how they are asked; see job.prompts."""

    @property
    def name(self) -> str: ...
    @property
    def concurrency(self) -> int | Literal["auto"]: ...
    @property
    def most(self) -> int: ...
    @property
    def base_url(self) -> str | None: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def requests_per_minute(self) -> int | None: ...
    @property
    def tokens_per_minute(self) -> int | None: ...
    @property
    def dedupe(self) -> bool: ...
    @property
    def cache(self) -> str | None: ...
    @property
    def price(self) -> Mapping[str, str] | None: ...
    @property
    def max_cost(self) -> float | None: ...
    @property
    def timeout(self) -> float: ...
    @property
    def batch_api(self) -> Provider | None: ...
    @property
    def batches(self) -> int: ...


def reached(spec: S, vendor: Vendor = OPENAI) -> S:
    """The spec with its endpoint, key and folder, which the workers' machines may lack. Raises BadModel."""
    of_key, given = f"{vendor.variable}_API_KEY", spec.api_key
    if given is not None and not isinstance(given, Secret):  # as written in a script: an endpoint may repeat it
        given = Secret(HIDDEN, given)
    key, url = os.environ.get(of_key), spec.base_url or os.environ.get(f"{vendor.variable}_BASE_URL") or vendor.url
    plain = str(reveal(url))
    if redact(plain) != plain:  # a user and a password, which are sent instead of a key
        if spec.api_key is not None and vendor.sends == OPENAI.sends and "@" in plain:
            raise BadModel("base_url has a user, and there is an api_key: both would be the same header, give one")
        key, url = (None if "@" in plain else key), url if isinstance(url, Secret) else Secret(redact(plain), plain)
    if spec.batch_api is not None and "," in plain:
        raise BadModel("base_url has several addresses, and batch_api takes one: that at which its batches are kept")
    if given is None:
        key = _sendable(key, f"{of_key} of the environment")
    else:
        given = _sendable(given, f"api_key ({given})")
    return changed(
        spec,
        base_url=url,
        cache=None if spec.cache is None else os.path.abspath(os.path.expanduser(spec.cache)),
        api_key=given or (None if key is None else Secret(f"${{env:{of_key}}}", key)),
    )


def asks(spec: Asking) -> str:
    """For people: the addresses that a reached spec names, without secrets; "" if it has none."""
    if spec.base_url is None:
        return ""
    urls = [redact(url.strip()) for url in str(reveal(spec.base_url)).split(",") if url.strip()]
    told = ", ".join(url.partition("?")[0] for url in urls)
    return told if spec.batch_api is None else f"{told} (batch API)"


def _sendable(key: Any, which: str) -> Any:
    """A key without the line's end that it has in a file. Raises BadModel for one that no header can hold."""
    if key is None:
        return None
    plain = str(reveal(key))
    found = plain.rstrip("\r\n")
    if odd := next((c for c in found if not c.isprintable()), None):  # control characters, and what is no UTF-8
        shown = "a line break" if odd in "\r\n" else ascii(odd)
        raise BadModel(
            f"{which} holds a character that no key has ({shown}, at place "
            f"{found.index(odd) + 1} of {len(found)}): give the key alone"
        )
    if found == plain:
        return key
    return Secret(str(key), found) if isinstance(key, Secret) else found


def estimated(spec: Asking, sizes: Sequence[tuple[int, int | None]]) -> dict[str, float]:
    """What requests will take (contract.USED), each of so many characters and with an answer of at most so many tokens;
    answers are taken to be as long as they may, and left out of the count if nothing limits them.
    """
    given = sum(letters for letters, _ in sizes) / LETTERS
    most = [tokens for _, tokens in sizes]
    made = None if None in most else float(sum(tokens or 0 for tokens in most))
    found = {"requests": float(len(sizes)), "prompt_tokens": given}
    if made is not None:
        found["completion_tokens"] = made
    if spec.price is not None:
        of_given, of_made = prices(spec.price)
        found["cost"] = given * of_given + (made or 0.0) * of_made
    return found

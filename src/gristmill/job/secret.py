"""Secrets of a job: text that shows as `${env:NAME}` wherever it appears, and gives its value only on request.

A job file's `${env:TOKEN}` becomes a `Secret`, whose characters are the text as written. Whatever prints, hashes,
compares it or turns it into JSON therefore sees `${env:TOKEN}`: a place that forgets `reveal` fails to log in, and does
not leak. The value travels only through pickle, to the workers, and `reveal` gives it where a file system is opened or
a function is called.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import functools
import hashlib
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

LEAST = (
    4  # shorter values are not searched for in text: masking every "1" or "no" would ruin messages, and hide nothing
)
WORD = 12  # characters of which a value that somebody would choose for a secret has more than words have


class Secret(str):
    """Text as written in the job file (`shown`), and what it stands for (`hidden`), which only `reveal` gives."""

    __slots__ = ("_hidden",)
    _hidden: str

    def __new__(cls, shown: str, hidden: str) -> Secret:
        self = super().__new__(cls, shown)
        self._hidden = hidden
        return self

    def __reduce__(self) -> tuple[type[Secret], tuple[str, str]]:
        return Secret, (str(self), self._hidden)

    def reveal(self) -> str:
        """The value itself. Give it to the library that needs it, and to nothing that stores or prints it."""
        return self._hidden


HIDDEN = "***"  # shown for a password
_USERS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^\s:/@,]*):([^\s/@,]+)@")
SEALED = "scrypt "  # before the salt and the digest of a sealed value
UNSEALED = "not sealed"


def sealed(secret: Secret, salt: bytes) -> str:
    """A digest with its salt, which distinguishes a value from others and is slow to guess it from."""
    text = secret.reveal().encode("utf-8", "surrogateescape")
    return f"{SEALED}{salt.hex()} {hashlib.scrypt(text, salt=salt, n=1 << 14, r=8, p=1).hex()}"


def salt_of(text: str) -> bytes | None:
    """The salt of a sealed value, None for any other text."""
    return bytes.fromhex(text.split(" ")[1]) if text.startswith(SEALED) else None


def reveal(value: Any) -> Any:
    """`value` with every Secret in it (also inside mappings, lists and tuples) replaced by what it stands for. Plain
    dicts, lists and tuples are copied. Values of other classes, which may hold or do more, are copied if a Secret is
    inside, and are otherwise given as they are.
    """
    if isinstance(value, Secret):
        return value.reveal()
    if type(value) in (dict, types.MappingProxyType):
        return {key: reveal(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(reveal, value))
    if not isinstance(value, (Mapping, list, tuple)) or next(secrets_in(value), None) is None:
        return value
    if isinstance(value, tuple):
        return value._make(map(reveal, value)) if hasattr(value, "_make") else tuple(map(reveal, value))
    made: Any = copy.copy(value)
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        made[key] = reveal(item)
    return made


def secrets_in(value: Any) -> Iterator[Secret]:
    """The secrets inside a value: mappings, lists, tuples and dataclasses are searched. Of an address that is one, its
    password is another, also as it is sent.
    """
    if isinstance(value, Secret):
        yield value
        yield from _passwords(value.reveal())
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from secrets_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from secrets_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from secrets_in(getattr(value, field.name))


def _passwords(text: str) -> Iterator[Secret]:
    for user, password in _USERS.findall(text):
        yield Secret(HIDDEN, password)
        plain = f"{unquote(user)}:{unquote(password)}"
        yield Secret(HIDDEN, unquote(password))
        yield Secret(HIDDEN, base64.b64encode(plain.encode()).decode())  # HTTP's basic authentication


def scrub(text: str, secrets: Iterable[Secret]) -> str:
    """`text` with the values of `secrets` replaced by the secrets' texts, also as JSON and addresses write them: for
    messages that a library wrote.
    """
    for secret in sorted(secrets, key=lambda s: -len(s.reveal())):
        if len(secret.reveal()) >= LEAST:
            for form in _forms(secret.reveal()):
                text = text.replace(form, str(secret))
    return text


def unsaid(value: Any, text: bytes, secrets: Iterable[Secret]) -> Any:
    """`value`, which is what the JSON `text` holds and was answered to whoever sent secrets, without these. Values of
    less than WORD characters stay: "none" and "EMPTY" are keys of servers that want none, and answers, too.
    """
    long = tuple(secret for secret in secrets if len(secret.reveal()) >= WORD)
    if not long:
        return value
    if b"\\/" in text or b"\\u" in text:  # which may be a character of a secret
        text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    said = any(form.encode("utf-8", "surrogatepass") in text for secret in long for form in _forms(secret.reveal()))
    return scrub_values(value, long) if said else value


@functools.lru_cache(maxsize=64)
def _forms(value: str) -> list[str]:
    """A text as it is, and as it may be written, the longest first."""
    escaped = [json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
    found = {value, *escaped, quote(value.encode("utf-8", "surrogatepass"), safe="")}
    return sorted(found, key=len, reverse=True)


def scrub_values(value: Any, secrets: Iterable[Secret]) -> Any:
    """`value`, plain data, with every text in it scrubbed, the keys of mappings, too; anything but text stays. For
    documents: scrubbing their JSON would rewrite numbers that only look like a secret, and miss one that is escaped.
    """
    if isinstance(value, str):
        return scrub(value, secrets)
    if isinstance(value, Mapping):
        return {scrub_values(key, secrets): scrub_values(item, secrets) for key, item in value.items()}
    return [scrub_values(item, secrets) for item in value] if isinstance(value, (list, tuple)) else value

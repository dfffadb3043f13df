"""Who may look at the pages: where they are listened for, the token, and what keeps other sites out. Pure: it is given
what a request says.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from dataclasses import field
from http.cookies import CookieError, SimpleCookie

from gristmill.errors import BadJob
from gristmill.job.uris import is_address
from gristmill.values import dataclass

LEAST_TOKEN = 16  # characters: what nobody finds by trying
DAYS = 30  # that a browser remembers that it was let in
_NAMED = re.compile(r"\[?([0-9A-Za-z.:_-]+?)\]?(?::\d+)?")


@dataclass(frozen=True)
class Listen:
    """Where the pages are: an address of this machine, and a port, 0 for any that is free."""

    host: str
    port: int

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host == "localhost" or (is_address(self.host) and ipaddress.ip_address(self.host).is_loopback)

    def url(self, port: int) -> str:
        """The address of the pages, once the port is known."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{port}/"


def listen_of(text: str, token: str) -> Listen:
    """What `--listen` says: `8080`, `0.0.0.0:8080`, `[::1]:8080`. Raises BadJob, also if others could look unasked."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if (not host and ":" in text) or not port.isdecimal() or int(port) > 65535 or (":" in host and "[" not in text):
        raise BadJob(f"--listen {text}: give a port, or HOST:PORT: 8080, 0.0.0.0:8080, [::]:8080")
    found = Listen(host or "127.0.0.1", int(port))
    if token and len(token) < LEAST_TOKEN:
        raise BadJob(
            f"the token has {len(token)} characters: give at least {LEAST_TOKEN}, as openssl rand -hex 16 does"
        )
    if not token and not found.local:
        raise BadJob(
            f"--listen {text}: other machines reach it, so it needs a token: set GRISTMILL_TOKEN "
            "(openssl rand -hex 16 makes one), or listen on this machine alone: "
            f"--listen {port}"
        )
    return found


@dataclass(frozen=True)
class Access:
    """What lets a request in. Without a token everybody on this machine is let in, and a request must have been made to
    an address or `localhost`: a page from elsewhere whose name was made to lead here (DNS rebinding) says that name.
    With one, such a page has nothing to show: browsers send the cookie only to the name that it is of.
    """

    token: str = ""
    cookie: str = "gristmill"
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def knows_host(self, host: str) -> bool:
        """Whether a request to this host (its header) is answered."""
        found = _NAMED.fullmatch(host)
        if found is None:
            return False
        return bool(self.token) or found[1].lower() == "localhost" or is_address(found[1])

    def lets_in(self, cookies: str, authorization: str) -> bool:
        """Whether a request comes from somebody who has the token."""
        if not self.token:
            return True
        kind, _, said = authorization.partition(" ")
        if kind.lower() == "bearer" and self.is_token(said.strip()):
            return True
        try:
            found = SimpleCookie(cookies).get(self.cookie)
        except CookieError:
            return False
        return found is not None and _same(found.value, self._pass)

    def is_token(self, said: str) -> bool:
        """Whether this is the token; takes as long whatever is said."""
        return bool(self.token) and _same(said, self.token)

    @property
    def set_cookie(self) -> str:
        """The header that makes a browser remember that it was let in; the token is not in it."""
        return f"{self.cookie}={self._pass}; Path=/; Max-Age={DAYS * 86400}; HttpOnly; SameSite=Lax"

    @property
    def form(self) -> str:
        """What a form of these pages sends along; no other site can know it."""
        return self._derived(self.key, "form")

    def sent_by_us(self, said: str, origin: str, site: str, host: str) -> bool:
        """Whether a form comes from these pages, by what it sends along, and what a browser says of where it was."""
        if origin and origin.partition("://")[2].lower() != host.lower():
            return False
        return site in ("", "same-origin") and _same(said, self.form)

    @property
    def _pass(self) -> str:
        return self._derived(self.token.encode(), "pass")

    @staticmethod
    def _derived(key: bytes, what: str) -> str:
        return hmac.new(key, f"gristmill up {what}".encode(), hashlib.sha256).hexdigest()


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))

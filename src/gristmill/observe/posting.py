"""One request with a body, to somebody who is told something: bounded in time, not redirected, and in its errors
without its address, which may be a secret.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from gristmill import __version__
from gristmill.errors import GristmillError

EACH_S = 5.0  # seconds that a server may be silent for
TRIES = 3
AGAIN = (408, 425, 429, 500, 502, 503, 504)  # answers after which the same request may be taken


class NotTold(GristmillError):
    """Somebody could not be told; the run does not depend on it."""


class _Straight(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: headers with secrets were meant for the address that was given."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_Straight)


def post(
    url: str, body: bytes, headers: Mapping[str, str], until: float, *, method: str = "POST", tries: int = TRIES
) -> None:
    """Send it, up to `tries` times while that may help and there is time. Raises NotTold."""
    pause = 0.5
    for attempt in range(1, tries + 1):
        wrong, again = _tried(url, body, headers, until, method)
        if not wrong:
            return
        left = until - time.monotonic()
        if not again or attempt == tries or left <= pause:
            raise NotTold(wrong)
        time.sleep(pause)
        pause *= 3


def _tried(url: str, body: bytes, headers: Mapping[str, str], until: float, method: str) -> tuple[str, bool]:
    """What is wrong, in words without the address, and whether trying again may help."""
    address, login = _without_login(url)
    sent = {"User-Agent": f"gristmill/{__version__}", **login, **headers}
    timeout = max(0.1, min(EACH_S, until - time.monotonic()))
    try:
        request = urllib.request.Request(address, body, sent, method=method)
        with _OPENER.open(request, timeout=timeout) as answer:
            answer.read(1 << 16)
        return "", False
    except urllib.error.HTTPError as e:
        with e:
            return f"it answered {e.code} {e.reason}", e.code in AGAIN
    except urllib.error.URLError as e:
        return f"it cannot be reached ({_reason(e.reason)})", True
    except TimeoutError:
        return f"no answer within {timeout:.0f} s", True
    except (OSError, ValueError) as e:
        return f"it cannot be reached ({_reason(e)})", isinstance(e, OSError)


def _reason(error: Any) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return str(getattr(error, "strerror", None) or type(error).__name__)


def _without_login(url: str) -> tuple[str, dict[str, str]]:
    """The address without a user and password in it, and the header that says them."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url, {}
    login, _, host = parts.netloc.rpartition("@")
    token = b64encode(unquote(login).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {token}"}

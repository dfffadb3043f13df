"""Whether an error says that a server is not there at the moment, which another try may find well: nobody answers, its
host is not found, or it is starting or has too much to do. Not so what it refuses: who asks, and what for.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping

STATUSES = frozenset({408, 429, 502, 503, 504})
# Of clients that say it in words alone, the operating system's or the server's.
_WORDS = re.compile(
    r"connection refused|timed out|timeout expired|connection timeout|failed to resolve|name resolution|"
    r"name or service not known|unreachable|no route to host|connection reset|closed the connection unexpectedly|"
    r"failed: no such file or directory|starting up|shutting down|not yet accepting|recovery mode|too many (clients|"
    r"connections)|connection slots|redis is busy|used memory > 'maxmemory'|link with master is down",
    re.IGNORECASE,
)
_LOADING = "BusyLoadingError"  # Redis, while it reads its file


def is_away(error: BaseException) -> bool:
    """Whether an error, or one that it came of, says so by its type or its status."""
    return any(_says(one) for one in _chain(error))


def says_away(text: str) -> bool:
    """Whether the words of a client that was to connect say so."""
    return _WORDS.search(text) is not None


def _says(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror, socket.timeout)):
        return True
    return getattr(error, "status_code", None) in STATUSES or type(error).__name__ == _LOADING


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, those that it came of, and those that it holds, as clients of several hosts have them."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        of_hosts = getattr(one, "errors", None)
        held = of_hosts.values() if isinstance(of_hosts, Mapping) else ()
        origin = one.__cause__ if one.__suppress_context__ or one.__cause__ is not None else one.__context__
        left += [e for e in (origin, *one.args, *held) if isinstance(e, BaseException)]

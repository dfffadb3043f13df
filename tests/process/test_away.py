"""Errors of clients whose server is not there, told from those of servers that refuse."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.process.away import is_away, says_away


def double(batch: Any) -> Any:
    """The model."""
    return {"y": batch["id"] * 2}


def raised(outer: Exception, inner: Exception, *, suppressed: bool = False) -> Exception:
    """As a client raises one for another."""
    try:
        try:
            raise inner
        except Exception:
            if suppressed:
                raise outer from None
            raise outer  # noqa: B904
    except Exception as e:
        return e


class Reply(Exception):
    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


class Hosts(Exception):
    def __init__(self, *errors: Exception) -> None:
        super().__init__("none of the hosts")
        self.errors = {f"10.0.0.{n}": error for n, error in enumerate(errors)}


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (ConnectionRefusedError(111, "refused"), True),
        (TimeoutError(), True),
        (socket.gaierror(-3, "Temporary failure in name resolution"), True),
        (raised(RuntimeError("client"), ConnectionResetError()), True),
        (RuntimeError(OSError("pool"), ConnectionAbortedError()), True),  # held among its values, as urllib3's are
        (Hosts(ConnectionRefusedError()), True),
        (Reply(503), True),
        (Reply(403), False),
        (Hosts(PermissionError("who are you?")), False),
        (raised(RuntimeError("no such table"), ConnectionResetError(), suppressed=True), False),
        (FileNotFoundError(2, "no such file"), False),
        (ValueError("port is abc"), False),
    ],
)
def test_by_type_and_status(error: Exception, away: bool) -> None:
    """Of the error itself, or one that it came of or holds."""
    assert is_away(error) is away


@pytest.mark.parametrize(
    ("text", "away"),
    [
        ('connection failed: connection to server at "127.0.0.1", port 1 failed: Connection refused', True),
        ("failed to resolve host 'db.internal': [Errno -3] Temporary failure in name resolution", True),
        ('connection to server on socket "/run/.s.PGSQL.5432" failed: No such file or directory', True),
        ("FATAL:  the database system is starting up", True),
        ("FATAL:  sorry, too many clients already", True),
        ('FATAL:  password authentication failed for user "me"', False),
        ("connection to server failed: fe_sendauth: no password supplied", False),
        ('FATAL:  database "shop" does not exist', False),
        ('connection is bad: invalid integer value "abc" for connection option "port"', False),
    ],
)
def test_by_the_words_of_postgres(text: str, away: bool) -> None:
    """Its client says it in words alone."""
    assert says_away(text) is away


@pytest.mark.parametrize(
    ("text", "away"),
    [
        ("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", True),
        ("command not allowed when used memory > 'maxmemory'.", True),
        ("Link with MASTER is down and replica-serve-stale-data is set to 'no'.", True),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False),
        ("invalid username-password pair or user is disabled.", False),
    ],
)
def test_by_the_words_of_redis(text: str, away: bool) -> None:
    """What it does now, or has no memory for, it does later."""
    assert says_away(text) is away


@pytest.mark.parametrize("name", ["t", "unreachable_hosts", "timed out"])
@pytest.mark.parametrize("store", ["sqlite", "duckdb"])
def test_what_is_no_database_is_so_whatever_its_tables_are_called(store: str, name: str, tmp_path: Path) -> None:
    """Another try would not help: exit 2. Names of the user's are no words of the client's."""
    (tmp_path / "notes").write_text("hello" * 1000)
    job = gm.Job(
        pa.table({"id": [1]}), double, str(tmp_path / "out"), workers=0, deliver=[f"{store}://{tmp_path}/notes#{name}"]
    )
    with pytest.raises(gm.BadJob):
        job.run()

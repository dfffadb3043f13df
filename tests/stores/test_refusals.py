"""Fault 71: what a store refuses for the moment is asked again; what it refuses for good is told in its words."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from gristmill.commit.places import opened
from gristmill.plan.contracts import Files
from s3server import S3Server, Troubled

CONDITIONAL = re.compile("If-None-Match|If-Match", re.IGNORECASE)


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Troubled]:
    """In front of the server, without trouble yet."""
    started = Troubled(server.address)
    yield started
    started.close()


def files_of(server: S3Server, proxy: Troubled, name: str) -> tuple[str, Files]:
    """A folder behind the proxy."""
    return opened(f"s3://box/{name}", server.storage(proxy.address))


def test_fault_71_a_conflict_is_no_answer(server: S3Server, proxy: Troubled) -> None:
    """409 ConditionalRequestConflict on every second conditional PUT: created once, swapped once, both in the end."""
    root, files = files_of(server, proxy, "conflicts")
    proxy.every, proxy.kinds, proxy.wanted = 2, ("409",), CONDITIONAL
    for n in range(4):
        assert files.write_new(f"{root}/{n}", b"ours %d" % n)
        assert not files.write_new(f"{root}/{n}", b"another's")
        data, version = files.look(f"{root}/{n}")
        assert data == b"ours %d" % n
        assert files.swap(f"{root}/{n}", b"new", version)
        assert not files.swap(f"{root}/{n}", b"late", version)
        assert files.read(f"{root}/{n}") == b"new"
    assert proxy.troubles["409"] >= 4


def test_fault_71_a_conflict_of_other_requests_is_waited_for(server: S3Server, proxy: Troubled) -> None:
    """Copies, deletions and plain writes are made again, too."""
    root, files = files_of(server, proxy, "others")
    files.write_over(f"{root}/a", b"a")
    proxy.every, proxy.kinds = 2, ("409",)
    for n in range(4):
        files.write_over(f"{root}/a", b"%d" % n)
        files.link(f"{root}/a", f"{root}/copy-{n}")
        assert files.read(f"{root}/copy-{n}") == b"%d" % n
        files.remove(f"{root}/copy-{n}")
    proxy.every = 0
    assert files.names(root) == ["a"]


@pytest.mark.parametrize(
    ("kind", "word"),
    [("403", "403"), ("501", "501"), ("405", "405"), ("301", "another region"), ("404", "NoSuchBucket")],
)
def test_fault_71_what_lasts_is_told_at_once(server: S3Server, proxy: Troubled, kind: str, word: str) -> None:
    """No three minutes of attempts that cannot succeed."""
    root, files = files_of(server, proxy, "lasting")
    proxy.every, proxy.kinds = 1, (kind,)
    began = time.monotonic()
    for ask in (lambda: files.write_new(f"{root}/a", b"a"), lambda: files.names(root), lambda: files.read(f"{root}/a")):
        with pytest.raises(OSError, match=word):
            ask()
    assert time.monotonic() - began < 5

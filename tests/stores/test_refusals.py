"""Faults 71, 74: what a store refuses for the moment is asked again; what it refuses for good is told in its words."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from gristmill.errors import BadJob, BadSource
from gristmill.files import requests
from gristmill.files.contract import Files
from gristmill.files.roots import opened
from gristmill.job.job import source
from gristmill.sources.paths import open_input, resolve
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


@pytest.mark.long
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


@pytest.mark.few(3)
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
    assert time.monotonic() - began < 20


def test_a_role_that_may_not_remove_is_refused_at_first(server: S3Server, proxy: Troubled) -> None:
    """Before any row is scored; a sink in which nothing can be removed could never replace a result."""
    root, files = files_of(server, proxy, "worm")
    proxy.every, proxy.kinds, proxy.wanted = 1, ("403",), re.compile(r"^DELETE |^POST [^ ]*\?delete")
    with pytest.raises(BadJob, match=r"can be written there, but not deleted .*403.*s3:DeleteObject"):
        files.prove(root)


NAMES = [
    "a?b",
    "what?",
    "a#b",
    "a%b",
    "a%20b",
    "a+b",
    "a b",
    "a*b",
    "é漢",
    "a.",
    "a[b]",
    "a{b}",
    'a"b',
    "a&b=c",
    "a|b",
    "x=1",
]


@pytest.mark.parametrize("name", NAMES)
def test_fault_74_any_name_is_kept_as_it_is(server: S3Server, name: str) -> None:
    """What a sink writes below such a name stands there, and a source finds it there."""
    root, files = opened(f"s3://box/names/{name}", server.storage())
    assert files.write_new(f"{root}/{name}.jsonl", b'{"a": 1}\n')
    assert files.names(root) == [f"{name}.jsonl"]
    fs, found = resolve(source(f"s3://box/names/{name}", storage=server.storage()))
    assert [f.path for f in found] == [f"s3://box/names/{name}/{name}.jsonl"]
    assert open_input(fs, found[0].path).read() == b'{"a": 1}\n'


@pytest.mark.parametrize("name", ["a\\b", "a//b", "./a", "a/./b", "a\nb"])
def test_fault_74_names_that_stores_change_are_refused(server: S3Server, name: str) -> None:
    """In one line, before anything is asked of the store."""
    with pytest.raises(BadJob, match="is not a name that every store keeps"):
        opened(f"s3://box/x/{name}", server.storage())
    if "//" in name:
        with pytest.raises(BadSource, match="two slashes in a row"):
            resolve(source(f"s3://box/x/{name}", storage=server.storage()))


@pytest.mark.long
def test_fault_69_a_sink_that_is_away_is_told_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong endpoint, say: which place does not answer is said once, long before the waiting ends."""
    monkeypatch.setattr(requests, "_SAID_AFTER", 0.2)
    monkeypatch.setattr(requests, "_said", [])
    nobody = {"endpoint_override": "http://127.0.0.1:9", "region": "x", "access_key": "a", "secret_key": "b"}
    root, files = opened("s3://box/away", nobody)
    with pytest.raises(OSError, match="cannot be reached"):
        files.hasty(2.0).names(root)  # type: ignore[attr-defined]
    (line,) = [r.getMessage() for r in caplog.records if r.name == "gristmill.commit"]
    assert "away" in line and "cannot be reached" in line and "retrying for up to 2 s" in line

"""Limits of what a process may have open, and disks that do not take an answer: nothing is paid for and lost."""

from __future__ import annotations

import asyncio
import dataclasses
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.commit.journal import Journal
from gristmill.errors import BadModel, RunFailed
from gristmill.files.disk import LOCAL
from gristmill.models import keeping
from gristmill.models.bill import Bill, ShardRow
from gristmill.models.paid import Paid, endpoint_of
from gristmill.process import descriptors
from llmserver import KEY, ChatServer


def on_a_full_disk(journal: Journal, patch: pytest.MonkeyPatch) -> list[bool]:
    """Its records find no room while the one value that is returned is true."""
    write, refuses = journal._append, [True]

    def written(records: bytes) -> None:
        if refuses[0]:
            raise OSError(28, "No space left on device")
        write(records)

    patch.setattr(journal, "_append", written)
    return refuses


def limited(folder: Path, open_files: str, *more: str) -> subprocess.CompletedProcess[str]:
    """A run of 300 rows in a process that may have so many files open."""
    pq.write_table(pa.table({"id": range(300), "text": [f"row {n}" for n in range(300)]}), folder / "rows.parquet")
    typed = [sys.executable, "-m", "gristmill", "prompt", "rows.parquet", "out", "--prompt", "{{ text }}", *more]
    typed += ["--model", "m", "--keep", "id", "--workers", "1"]
    return subprocess.run(
        ["bash", "-c", f'ulimit {open_files}; exec "$@"', "-", *typed], cwd=folder, capture_output=True, text=True
    )


def test_a_number_of_connections_that_no_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is refused if somebody gave it; with several addresses each keeps its own."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 300))
    monkeypatch.setattr(descriptors, "_open", lambda: 20)
    spec = gm.Prompt("x", "m", base_url="http://a:1/v1,http://b:1/v1", concurrency=120)
    with pytest.raises(
        BadModel, match=r"to each of 2 addresses beside its files, 116: raise the limit \(ulimit -n 384\)"
    ):
        endpoint_of(spec, 1.0, 120, 60.0)
    endpoint_of(spec, 1.0, 116, 60.0)
    endpoint_of(dataclasses.replace(spec, concurrency="auto"), 1.0, 256, 60.0)


@pytest.mark.long
def test_more_requests_than_files_may_be_open_are_refused_before_any_is_paid(chat: ChatServer, tmp_path: Path) -> None:
    """As answers could not be kept then; it says how many may be."""
    done = limited(tmp_path, "-n 200", "--concurrency", "250")
    assert done.returncode == 2 and "concurrency 250 in each worker is more than" in done.stderr, done.stderr
    assert "ulimit -n" in done.stderr and chat.told()["requests"] == 0


@pytest.mark.long
@pytest.mark.parametrize("limit", ["-Sn 200", "-n 200"])
def test_as_many_requests_as_files_may_be_open(chat: ChatServer, tmp_path: Path, limit: str) -> None:
    """A limit that may be raised is; else as many are in flight as it leaves, if nobody says how many."""
    chat.set(latency=0.5)
    soft = limit.startswith("-S")
    done = limited(tmp_path, limit, *(["--concurrency", "250"] if soft else []))
    told = chat.told()
    assert done.returncode == 0 and set(told["answered"].values()) == {1} and len(told["answered"]) == 300, done.stderr
    assert told["most"] > 200 if soft else told["most"] < 200 and "requests in flight, by the files" in done.stderr


@pytest.mark.parametrize("passes", [True, False])
def test_nothing_is_asked_while_answers_cannot_be_kept(
    chat: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool
) -> None:
    """It waits a while for the disk, and then ends the run."""
    monkeypatch.setattr(keeping, "UNKEPT", 5.0 if passes else 0.3)
    spec = gm.Prompt("x", "m", base_url=chat.url, api_key=KEY)
    journal = Journal(str(tmp_path), 0, "r", "1", LOCAL)
    journal.ready()
    refuses = on_a_full_disk(journal, monkeypatch)
    journal.put(journal.key({"id": 0}), {"answer": "earlier"}, {})

    async def told() -> list[Any]:
        asker = Paid(spec, 1.0, endpoint_of(spec, 1.0, 8, 60.0))
        asker.shares(journal)
        bodies = [{"model": "m", "messages": [{"role": "user", "content": f"row {n}"}]} for n in range(3)]
        asked = [
            asyncio.ensure_future(asker.ask(b, 4.0, Bill(ShardRow({"id": n}, journal)))) for n, b in enumerate(bodies)
        ]
        try:
            await asyncio.sleep(0.2)
            assert chat.told()["requests"] == 0
            refuses[0] = not passes
            return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await asker.aclose()

    found = asyncio.run(told())
    if passes:
        assert all(isinstance(reply, dict) for reply in found) and chat.told()["requests"] == 3
    else:
        assert all(isinstance(e, RunFailed) and "No space left" in str(e) for e in found)
        assert chat.told()["requests"] == 0
    journal.close()
    assert Journal(str(tmp_path), 0, "r", "2", LOCAL).earlier(journal.key({"id": 0}))[0] is passes


@pytest.mark.parametrize("waits", ["for a place", "for its turn", "to be sent again"])
def test_what_was_begun_before_a_disk_is_full_is_not_sent(
    chat: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """Whatever it waits for meanwhile, and if it is another shard's; once there is room, each row is asked once."""
    limits: dict[str, Any] = {"requests_per_minute": 1200} if waits == "for its turn" else {}
    spec = gm.Prompt("x", "m", base_url=chat.url, api_key=KEY, **limits)
    full, other = (Journal(str(tmp_path), shard, "r", "1", LOCAL) for shard in range(2))
    refuses = on_a_full_disk(full, monkeypatch)

    async def told() -> None:
        asker = Paid(spec, 1.0, endpoint_of(spec, 1.0, 20 if waits == "to be sent again" else 2, 60.0))
        asker.shares(full)
        asker.shares(other)

        def asked(n: int) -> asyncio.Task[Any]:
            body = {"model": "m", "messages": [{"role": "user", "content": f"row {n}"}]}
            return asyncio.ensure_future(asker.ask(body, 4.0, Bill(ShardRow({"id": n}, other))))

        try:
            await asked(0)
            chat.set(latency=0.05, broken=float(waits == "to be sent again"))
            rows = [asked(n) for n in range(1, 21)]
            await asyncio.sleep(0.15)
            full.put(full.key({"id": 0}), {"answer": "earlier"}, {})
            chat.set(broken=0.0)
            await asyncio.sleep(0.1)
            before = chat.told()["requests"]
            await asyncio.sleep(0.6)
            assert chat.told()["requests"] == before and not all(row.done() for row in rows)
            refuses[0] = False
            await asyncio.gather(*rows)
        finally:
            await asker.aclose()

    asyncio.run(told())
    assert set(chat.told()["answered"].values()) == {1} and len(chat.told()["answered"]) == 21
    full.close()
    other.close()

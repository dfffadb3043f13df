"""The commit protocol by itself: receipts created once, torn ones superseded, sealed files that tell of changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gristmill.commit import receipt as receipts
from gristmill.commit.generation import claim, generations
from gristmill.commit.receipt import Part, Receipt
from gristmill.errors import CorruptStore, SinkBusy
from gristmill.files.disk import LocalFiles
from gristmill.files.document import seal, unseal
from gristmill.files.lease import Lease, holder

FILES = LocalFiles()


def receipt(nonce: str, shard: int = 7) -> Receipt:
    """A receipt of one part."""
    part = Part(f"work/{nonce}.tmp", f"part-{shard:07d}.g1.parquet", 10, 100, "0" * 64, "rows")
    return Receipt(shard, nonce, (10, 10, 0, 0, 10, 0, 0, 10), (part,))


def test_of_many_attempts_one_commits(tmp_path: Path) -> None:
    """Attempts that commit one shard at the same time all see the same receipt, and it is one of theirs."""
    seen: list[Receipt] = []
    attempts = [
        threading.Thread(target=lambda n=n: seen.append(receipts.commit(FILES, str(tmp_path), receipt(f"n{n}"))))
        for n in range(16)
    ]
    for attempt in attempts:
        attempt.start()
    for attempt in attempts:
        attempt.join()
    assert len({r.nonce for r in seen}) == 1
    assert os.listdir(tmp_path) == ["0000007.json"]


def test_the_lowest_whole_receipt_counts(tmp_path: Path) -> None:
    """A torn receipt is superseded by the next number; if it is whole after all, it is the one that counts."""
    first = receipts.commit(FILES, str(tmp_path), receipt("first"))
    path = tmp_path / "0000007.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:40])
    second = receipts.commit(FILES, str(tmp_path), receipt("second"))
    assert (second.nonce, sorted(os.listdir(tmp_path))) == ("second", ["0000007.1.json", "0000007.json"])
    listed = receipts.listed(str(tmp_path))[7]
    found = receipts.valid(listed)
    assert found is not None
    assert (found.nonce, found.parts) == ("second", second.parts)
    path.write_bytes(whole)
    found = receipts.valid(listed)
    assert found is not None
    assert found.nonce == first.nonce


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_one_changed_byte_is_seen(at: int, flip: int) -> None:
    """A sealed file with any byte changed does not read back, unless only its white space did."""
    body = json.loads(receipt("x").dump())
    data = bytearray(receipt("x").dump())
    data[at % len(data)] ^= flip
    try:
        read = unseal(bytes(data), "sealed")
    except CorruptStore:
        return
    assert {**read, "checksum": body["checksum"]} == body


def test_sealed_files_are_readable_by_people_and_round_trip(tmp_path: Path) -> None:
    """Any JSON comes back as it was; the file is indented text."""
    body = {"a": [1, 2.5, None, "ü"], "b": {"c": True}}
    (tmp_path / "f").write_bytes(seal(body))
    assert unseal((tmp_path / "f").read_bytes(), "f") == body
    assert (tmp_path / "f").read_text().startswith("{\n")


def test_claims_at_once_get_numbers_of_their_own(tmp_path: Path) -> None:
    """Generations claimed by several at once are numbered 1 to n."""
    threads = [threading.Thread(target=lambda: claim(FILES, str(tmp_path), "new")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = generations(str(tmp_path))
    assert [g.number for g in found] == list(range(1, 9))
    assert len({g.name for g in found}) == 8


def test_a_lease_names_its_holder(tmp_path: Path) -> None:
    """A second one is refused and told who holds it; it is free when the first has ended."""
    with Lease("out", str(tmp_path)):
        assert (held := holder(str(tmp_path))) is not None and held.pid == os.getpid()
        with pytest.raises(SinkBusy, match=f"process {os.getpid()}"), Lease("out", str(tmp_path)):
            pass
    assert holder(str(tmp_path)) is None
    with Lease("out", str(tmp_path)):
        pass


TAKES_AND_FORKS = """
import os, sys, time
from gristmill.files.lease import Lease
with Lease("out", sys.argv[1]):
    child = os.fork()
    if not child:
        time.sleep(60)
    print(child, flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), 9)
with Lease("out", sys.argv[1]):  # the same process again
    pass
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("how", ["ended", "killed"])
def test_a_lease_ends_with_its_run_though_a_fork_lives_on(tmp_path: Path, how: str) -> None:
    """A process of a pool, forked while a run went on, keeps the sink from nobody once the run has ended in any way."""
    command = [sys.executable, "-c", TAKES_AND_FORKS, str(tmp_path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        child = int(run.stdout.readline())
        try:
            assert run.wait(30) == (0 if how == "ended" else -9)
            until = time.monotonic() + 10  # a fork that has not run yet still has to close what it was born with
            while (held := holder(str(tmp_path))) is not None and time.monotonic() < until:
                time.sleep(0.05)
            assert held is None
            with Lease("out", str(tmp_path)):
                os.kill(child, 0)  # it lives
        finally:
            os.kill(child, 9)
        assert run.stderr.read() == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_that_leaves_the_run_leaves_the_lease(tmp_path: Path) -> None:
    """A fork that comes out of the `with` gives back nothing: the lock is its parent's."""
    with Lease("out", str(tmp_path)) as lease:
        child = os.fork()
        if not child:
            try:
                lease.__exit__()
            finally:
                os._exit(lease.held())
        assert os.waitpid(child, 0)[1] == 0
        assert holder(str(tmp_path)) is not None


def test_looking_at_a_lease_takes_it_from_nobody(tmp_path: Path) -> None:
    """Three that look all the time see no run where there is none, and no run is refused for their sake."""
    with Lease("out", str(tmp_path)):
        pass
    seen: list[object] = []
    until = time.monotonic() + 1.0

    def look() -> None:
        while time.monotonic() < until:
            seen.append(holder(str(tmp_path)))

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) > 100 and set(map(repr, seen)) == {"None"}
    until = time.monotonic() + 1.0
    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    while time.monotonic() < until:
        with Lease("out", str(tmp_path)), pytest.raises(SinkBusy):
            Lease("out", str(tmp_path)).__enter__()
    for thread in threads:
        thread.join()


def test_whole_files_or_none(tmp_path: Path) -> None:
    """write_new never replaces, write_over always does; neither leaves a temporary file, also when it fails."""
    path = str(tmp_path / "deep" / "er" / "file")
    assert FILES.write_new(path, b"one")
    assert not FILES.write_new(path, b"two")
    assert Path(path).read_bytes() == b"one"
    FILES.write_over(path, b"three")
    assert Path(path).read_bytes() == b"three"

    class Failing(LocalFiles):
        def sync(self, file: object) -> None:
            raise OSError("no")

    for write in (Failing().write_new, Failing().write_over):
        with pytest.raises(OSError, match="no"):
            write(path + "2", b"four")
    assert os.listdir(tmp_path / "deep" / "er") == ["file"]

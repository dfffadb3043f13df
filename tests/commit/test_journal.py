"""Journals of answers: whole after a kill at any byte, each answer for one row, of plain values alone."""

from __future__ import annotations

import io
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from callers import eventually
from gristmill.commit import journal as journals
from gristmill.commit.journal import Journal, _write_all
from gristmill.files.disk import LOCAL
from gristmill.job.secret import Secret
from gristmill.process.failure import EarlierFailure, failure_of
from gristmill.process.messages import Failure

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(rows=st.lists(st.tuples(st.integers(0, 3), PLAIN), max_size=8), cut=st.integers(0, 400))
def test_what_was_written_is_there_as_it_was(tmp_path_factory: Any, rows: list[tuple[int, Any]], cut: int) -> None:
    """Up to the record in which the writer was killed; answers to equal rows are given in their order."""
    folder = str(tmp_path_factory.mktemp("g"))
    first = Journal(folder, 7, "ra", "a", LOCAL)
    for row, answer in rows:
        first.put(first.key({"x": row}), answer, {})
    first.close()
    whole = len(rows)
    for path in Path(folder, "journal").glob("*"):
        data = path.read_bytes()
        path.write_bytes(data[: max(0, len(data) - cut)])
        whole = len(journals._records(path.read_bytes()))
    assert whole == len(rows) or cut > 0
    again = Journal(folder, 7, "rb", "b", LOCAL)
    for row, answer in rows[:whole]:
        assert again.earlier(again.key({"x": row})) == (True, answer)
    assert all(again.earlier(again.key({"x": row})) == (False, None) for row in range(4))
    assert Journal(folder, 8, "rc", "c", LOCAL).earlier(again.key({"x": 0})) == (False, None)
    again.remove()
    assert LOCAL.names(str(Path(folder, "journal"))) == []


@given(junk=st.binary(max_size=60) | st.integers(1, 200).map(bytes), at=st.integers(0, 200), over=st.booleans())
def test_a_file_whose_end_no_disk_has_written_is_read_as_far_as_it_goes(
    tmp_path_factory: Any, junk: bytes, at: int, over: bool
) -> None:
    """Zeros or anything else at its end, as after a power failure, or in its middle: no answer is another one."""
    folder = str(tmp_path_factory.mktemp("g"))
    first = Journal(folder, 7, "ra", "a", LOCAL)
    for row in range(5):
        first.put(first.key(row), f"answer {row}", {"requests": 1.0})
    first.close()
    (path,) = Path(folder, "journal").glob("*")
    data = path.read_bytes()
    path.write_bytes(data[:at] + junk + data[at + len(junk) :] if over else data + junk)
    again = Journal(folder, 7, "rb", "b", LOCAL)
    found = [again.earlier(again.key(row)) for row in range(5)]
    assert all(told in ((True, f"answer {row}"), (False, None)) for row, told in enumerate(found))
    assert over or all(known for known, _ in found)


def test_other_values_are_not_kept(tmp_path: Path) -> None:
    """Those that JSON would change: tuples, bytes, keys that are no text."""
    journal = Journal(str(tmp_path), 0, "ra", "a", LOCAL)
    endless: list[Any] = []
    endless.append(endless)
    for n, answer in enumerate([(1, 2), b"x", {1: 2}, {"a": {1}}, float, 10**5000, endless]):
        journal.put(journal.key(n), answer, {})
    assert LOCAL.names(str(tmp_path / "journal")) == []


def test_answers_of_ones_own_code_are_kept_as_they_come(tmp_path: Path) -> None:
    """After the code was compared, which takes a part of the time where it takes long; none if it does not stand."""
    took = [0.0, 0.0]

    def stands() -> None:
        if took[0] < 0:
            raise RuntimeError("another code")
        begun = time.monotonic()
        time.sleep(took[0])
        took[1] += time.monotonic() - begun

    def kept(n: int) -> bool:
        return Journal(str(tmp_path), 0, "rb", "b", LOCAL).earlier(journal.key(n)) == (True, n)

    journal = Journal(str(tmp_path), 0, "ra", "a", LOCAL, stands)
    for n in range(20):
        journal.put(journal.key(n), n, {})
        assert eventually(lambda n=n: kept(n))
    took[0], took[1], begun = 0.01, 0.0, time.monotonic()
    for n in range(20, 200):
        journal.put(journal.key(n), n, {})
        time.sleep(0.002)
    assert took[1] < 0.4 * (time.monotonic() - begun)
    journal.close()
    assert kept(199)
    took[0] = -1.0
    other = Journal(str(tmp_path), 0, "rc", "c", LOCAL, stands)
    other.put(other.key("x"), 1, {})
    assert Journal(str(tmp_path), 0, "rd", "d", LOCAL).earlier(other.key("x")) == (False, None)


@pytest.mark.parametrize("local", [True, False])
def test_what_is_being_written_when_a_shard_ends(tmp_path: Path, local: bool) -> None:
    """Is there once the journal is closed, and gone once it is removed: not lost, not left behind."""
    slow, go = threading.Event(), threading.Event()

    def stands() -> None:
        slow.set()
        assert go.wait(10)

    for end in (Journal.close, Journal.remove):
        folder = str(tmp_path / end.__name__) if local else f"s3://b/{end.__name__}"
        files: Any = LOCAL if local else Store()
        journal = Journal(folder, 0, "ra", "a", files, stands)
        storing = threading.Thread(target=journal.put, args=(journal.key(1), 1, {}))
        storing.start()
        assert slow.wait(10)
        ending = threading.Thread(target=end, args=(journal,))
        ending.start()
        ending.join(0.05)
        assert ending.is_alive()
        go.set()
        storing.join()
        ending.join()
        there = Journal(folder, 0, "rb", "b", files).earlier(journal.key(1))
        assert there == ((True, 1) if end is Journal.close else (False, None))
        slow.clear()
        go.clear()


def test_notes_are_there_before_anything_else_is_done(tmp_path: Path) -> None:
    """For the next attempt at the shard, and for whoever asks for those of all; beside answers that are torn."""
    folder = str(tmp_path)
    first = Journal(folder, 7, "ra", "a", LOCAL)
    first.put(first.key({"x": 1}), "y", {})
    first.note({"batch": "x", "digests": ["00"]})
    first.note({"batch": "x", "id": "b"})
    first.put(first.key({"x": 2}), "z", {})
    path = next(Path(folder, "journal").glob("*"))
    path.write_bytes(path.read_bytes()[:-1])
    noted = [{"batch": "x", "digests": ["00"]}, {"batch": "x", "id": "b"}]
    again = Journal(folder, 7, "rb", "b", LOCAL)
    assert again.notes == noted and again.held(again.key({"x": 1})) == 1 and again.held(again.key({"x": 2})) == 0
    other = Journal(folder, 8, "rb", "c", LOCAL)
    assert other.notes == [] and list(other.everywhere()) == journals.notes(folder, LOCAL) == noted
    again.remove()
    assert journals.notes(folder, LOCAL) == []


class Odd:
    """What an extension type of somebody's may give: no text tells one from another."""

    def __repr__(self) -> str:
        return "odd"


def test_a_row_that_no_text_tells_from_others_has_no_key(tmp_path: Path) -> None:
    """Its answer is not kept, as another row would be given it."""
    journal = Journal(str(tmp_path), 0, "ra", "a", LOCAL)
    assert journal.key({"x": Odd()}) == journal.key({"x": [{"y": Odd()}]}) == journal.key({"x": np.arange(2)}) == b""
    assert journal.key({"x": [1, (b"a", None)]}) != journal.key({"x": [1, (b"b", None)]})


class Store:
    """A store's files, of which journals need these."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def names(self, folder: str) -> list[str]:
        return [path.rpartition("/")[2] for path in self.held if path.startswith(f"{folder}/")]

    def read(self, path: str) -> bytes:
        return self.held[path]

    def note(self, path: str, data: bytes) -> None:
        self.held[path] = data

    def remove(self, path: str) -> None:
        del self.held[path]


def test_in_a_store_answers_are_kept_soon(tmp_path: Path) -> None:
    """In few objects, each within a second."""
    store: Any = Store()
    journal = Journal("s3://b/g", 3, "ra", "a", store)
    for n in range(100):
        journal.put(journal.key(n), {"y": n}, {})
    time.sleep(3 * journals.SOON)
    assert len(store.held) == 1
    journal.put(journal.key(100), {"y": 100}, {})
    journal.close()
    again = Journal("s3://b/g", 3, "rb", "b", store)
    assert all(again.earlier(again.key(n)) == (True, {"y": n}) for n in range(101))
    again.remove()
    assert store.held == {}


def test_what_it_took_is_there_once(tmp_path: Path) -> None:
    """For the attempt that commits: of kept answers and of those that cannot be; of the first rows in shard 0 alone."""
    folder = str(tmp_path)
    probe = Journal(folder, None, "ra", "p", LOCAL)
    probe.put(probe.key(1), "x", {"cost": 1.0})
    probe.close()
    for attempt in ("a", "b"):
        journal = Journal(folder, 0, "ra", attempt, LOCAL)
        journal.put(journal.key(2), "y", {"cost": 10.0})
        journal.put(b"", "z", {"cost": 100.0})
        journal.put(journal.key(3), {1, 2}, {"cost": 1000.0})
        journal.took({"cost": 10000.0})
        journal.close()
    assert Journal(folder, 0, "rb", "c", LOCAL).before == {"cost": 22221.0}
    other = Journal(folder, 1, "rb", "c", LOCAL)
    assert (
        other.before == {} and other.earlier(other.key(1)) == (True, "x") and other.earlier(bytes(16)) == (False, None)
    )


class Slow(io.RawIOBase):
    """An unbuffered file that takes three bytes at a time."""

    def __init__(self) -> None:
        self.held = b""

    def write(self, data: Any) -> int:
        """See RawIOBase."""
        self.held += bytes(data[:3])
        return min(3, len(data))


def test_a_file_that_takes_less_at_a_time_has_all() -> None:
    """As on a disk that is filling up."""
    out = Slow()
    _write_all(out, b"a whole record")
    assert out.held == b"a whole record"


def test_what_failed_for_itself_is_known_to_the_same_run(tmp_path: Path) -> None:
    """One row each, with its type, words and traceback, without secrets; another run asks again, and counts what it
    took.
    """
    folder, secret = str(tmp_path), Secret("${env:KEY}", "sk-open")
    first = Journal(folder, 7, "ra", "a", LOCAL, secrets=(secret,))
    first.failed(first.key(1), Failure("model", "Refused", "no sk-open", "line\n" * 9000), {"cost": 1.0})
    first.failed(b"", Failure("model", "Refused", "no"), {"cost": 10.0})
    first.close()
    again, other = Journal(folder, 7, "ra", "b", LOCAL), Journal(folder, 7, "rb", "b", LOCAL)
    there, error = again.earlier(again.key(1))
    assert there and isinstance(error, EarlierFailure) and again.earlier(again.key(1)) == (False, None)
    told = failure_of(error, "memory")
    assert (told.kind, told.type, told.message) == ("memory", "Refused", "no ${env:KEY}")
    assert told.traceback and len(told.traceback) <= journals.TRACE
    assert other.earlier(other.key(1)) == (False, None) and other.before == again.before == {"cost": 11.0}


def test_the_first_rows_are_known_to_their_own_shards(tmp_path: Path) -> None:
    """Equal rows of other shards are asked for themselves."""
    folder = str(tmp_path)
    probe = Journal(folder, None, "ra", "p", LOCAL)
    for n in range(2):
        probe.put(probe.key("same"), n, {}, ("f", 10 * n))
    probe.close()
    mine = Journal(folder, 3, "ra", "a", LOCAL, holds=lambda row: row == ("f", 10))
    assert mine.earlier(mine.key("same")) == (True, 1) and mine.earlier(mine.key("same")) == (False, None)


def test_what_cannot_be_written_is_written_once_it_can(tmp_path: Path) -> None:
    """An error passes, as that of a full disk: part of a record makes no other unreadable; there is trouble."""
    journal = Journal(str(tmp_path), 0, "ra", "a", LOCAL)
    journal.ready()
    journal.put(journal.key(0), "zero", {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (next((tmp_path / "journal").iterdir()).stat().st_size + 9, hard))
        with pytest.raises(OSError):
            journal.note({"batch": 1})
        for n in (1, 2):
            journal.put(journal.key(n), f"answer {n}", {})
        assert isinstance(journal.trouble, OSError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    until = time.monotonic() + 5
    while journal.trouble is not None and time.monotonic() < until:
        time.sleep(0.02)
    journal.put(journal.key(3), "three", {})
    journal.close()
    again = Journal(str(tmp_path), 0, "rb", "b", LOCAL)
    kept = [again.earlier(again.key(n)) for n in range(4)]
    assert kept == [(True, "zero"), (True, "answer 1"), (True, "answer 2"), (True, "three")] and not again.notes

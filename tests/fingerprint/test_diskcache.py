"""Digests that are not computed anew, and folders that are built once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time

import pytest

from gristmill.fingerprint.diskcache import built, cache_folder, file_digest, table_digest

SIZE = 5 << 20


@pytest.fixture
def large(tmp_path):
    """A file that is worth caching, last touched a while ago."""
    path = tmp_path / "large.bin"
    path.write_bytes(b"a" * SIZE)
    return path


def settled(path):
    """Waits until the file's change time, which cannot be set, is old enough."""
    wait = path.stat().st_ctime + 2.1 - time.time()
    if wait > 0:
        time.sleep(wait)


def test_a_digest_is_kept_and_a_change_is_seen(large, tmp_path):
    """The second look reads a note; a change of content is seen even where size and time were put back."""
    cache = tmp_path / "cache"
    settled(large)
    first = file_digest(large, cache)
    assert first == hashlib.sha256(b"a" * SIZE).hexdigest()
    assert len(list((cache / "digests").iterdir())) == 1
    times = large.stat()
    large.write_bytes(b"b" * SIZE)
    os.utime(large, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file_digest(large, cache) == hashlib.sha256(b"b" * SIZE).hexdigest()


def test_a_file_that_was_just_written_is_not_kept(large, tmp_path):
    """Within the clock's tick it may change again without a sign."""
    os.utime(large)
    file_digest(large, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_used_is_no_error(large, tmp_path):
    """A file in its place, or a broken note: the digest is computed."""
    (tmp_path / "cache").write_text("in the way")
    settled(large)
    assert file_digest(large, tmp_path / "cache") == hashlib.sha256(b"a" * SIZE).hexdigest()
    cache = tmp_path / "good"
    file_digest(large, cache)
    for note in (cache / "digests").iterdir():
        note.write_text('{"sha256": "short"}')
    assert file_digest(large, cache) == hashlib.sha256(b"a" * SIZE).hexdigest()


def test_one_digest_for_several_files():
    """A lone file's digest is its own; several depend on names and contents, not on order."""
    assert table_digest({"a": "1" * 64}) == "1" * 64
    assert table_digest({"a": "1", "b": "2"}) == table_digest({"b": "2", "a": "1"})
    assert table_digest({"a": "1", "b": "2"}) != table_digest({"a": "2", "b": "1"})


def test_the_folder_is_where_the_variable_says(monkeypatch, tmp_path):
    """GRISTMILL_CACHE moves the cache."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("GRISTMILL_CACHE")
    assert cache_folder().name == "gristmill"


def test_a_build_that_fails_leaves_nothing(tmp_path):
    """A failed build is not taken for a finished one, and can be tried again."""

    def fail(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        built("thing", fail, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thing.lock"]
    assert (built("thing", lambda f: f.joinpath("whole").touch() or None, tmp_path) / "whole").exists()


def test_racing_processes_build_once(tmp_path):
    """Several processes that want the same folder get one, built by one of them."""
    script = (
        "import sys, time, pathlib, os\n"
        "from gristmill.fingerprint.diskcache import built\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "def build(folder):\n"
        "    with open(root / 'builds', 'a') as f: f.write('x')\n"
        "    time.sleep(0.3)\n"
        "    (folder / 'done').touch()\n"
        "assert (built('a/thing', build, root) / 'done').exists()\n"
    )
    racers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(4)]
    assert [r.wait() for r in racers] == [0] * 4
    assert (tmp_path / "builds").read_text() == "x"

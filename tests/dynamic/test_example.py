"""The example of dynamic batching, run as a user would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "dynamic.py"


@pytest.mark.long
@pytest.mark.real_model
def test_the_example(sentiment_classifier: Path) -> None:
    """456 callers' texts are labelled as one by one, in far fewer calls of the model."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(sentiment_classifier)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    labels = re.findall(r"^(fresh|rotten) ", done.stdout, flags=re.MULTILINE)
    assert len(labels) == 4
    texts, calls = map(int, re.search(r"^(\d+) texts in (\d+) calls", done.stdout, flags=re.MULTILINE).groups())  # type: ignore[union-attr]
    assert texts == 456
    assert calls < 60

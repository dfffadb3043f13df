"""The limit of a call is that of calls: what else took long does not lengthen it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

WATCHED = """
import sys, time
from gristmill.worker.watch import Watch
watch = Watch(0.5)
watch.beat()
time.sleep(0.2)
watch.beat(calling=sys.argv[1] == "slow")
time.sleep(0.2)
for _ in range(3):
    watch.beat(calling=False)
    watch.beat(calling=True)
time.sleep(float(sys.argv[2]))
print("done")
"""


@pytest.mark.parametrize(("before", "seconds", "said"), [("quick", 3.5, ""), ("slow", 1.0, "done\n")])
def test_only_a_slow_call_lengthens_the_limit(before: str, seconds: float, said: str) -> None:
    """A hang ends at the limit though reading took seconds before; a model whose calls are slow has 20 times that."""
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", WATCHED, before, str(seconds)], capture_output=True, text=True)
    assert done.stdout == said, done.stderr
    assert ("Timeout" in done.stderr) == (said == "")
    assert said or time.monotonic() - begun < 3

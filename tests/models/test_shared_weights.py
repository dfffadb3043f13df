"""Workers of one machine share the weights of a torch model: its file is mapped, not copied."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOAD = """
import sys
import numpy as np
import pyarrow as pa
import gristmill as gm
from gristmill.models.kinds import open
from gristmill.models.contract import Place

model = open(gm.TextEmbedder(sys.argv[1], text="text", backend="torch", dtype="float32"), Place("cpu", "float32"))
model.predict(model.prepare(pa.table({"text": ["a text"] * 8})), np.arange(8))
held, of = {}, ""
for line in __builtins__.open("/proc/self/smaps"):
    words = line.split()
    if words[0].endswith(":"):
        if of.endswith("model.safetensors"):
            held[words[0]] = held.get(words[0], 0) + (int(words[1]) if words[1].isdigit() else 0)
    else:
        of = words[-1]
print(held.get("Rss:", 0) << 10, (held.get("Private_Dirty:", 0)) << 10)
"""


@pytest.mark.long
@pytest.mark.real_model
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux's /proc/self/smaps")
def test_weights_of_torch_are_mapped(minilm: Path) -> None:
    """After a prediction the layers (42 MB of float32) are pages of the file itself, none of them a copy."""
    told = subprocess.run([sys.executable, "-c", LOAD, str(minilm)], capture_output=True, text=True, check=True).stdout
    resident, copied = (int(n) for n in told.split()[-2:])
    assert resident > 40_000_000
    assert copied == 0

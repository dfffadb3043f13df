"""A run in a notebook, watched through a real kernel."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

from gristmill.observe.notebook import in_notebook

CELL = """
import time
import pyarrow as pa
import gristmill as gm

def score(batch):
    time.sleep(0.05)
    print("scoring", len(batch["x"]))
    if 3 in batch["x"].tolist():
        raise ValueError("three")
    return {"y": batch["x"]}

table = pa.table({"x": list(range(200))})
report = gm.Job(table, score, OUT, workers=1, batch_rows=10, shard_rows=100).run()
"""


@pytest.fixture
def kernel() -> Iterator[Any]:
    """A client of a fresh kernel of this interpreter."""
    manager = KernelManager()
    arguments = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=arguments, display_name="here", language="python")
    manager.start_kernel(env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.long
def test_fault_79_a_notebook_shows_a_bar(kernel: Any, tmp_path: Path) -> None:
    """One output that is redrawn, with figures that grow to the total; prints and warnings are the cell's output."""
    heard: list[Any] = []
    cell = CELL.replace("OUT", repr(str(tmp_path / "out")))
    reply = kernel.execute_interactive(cell, output_hook=heard.append, timeout=200)
    assert reply["content"]["status"] == "ok", reply["content"]
    shown = [m["content"] for m in heard if m["msg_type"] in ("display_data", "update_display_data")]
    assert [m["msg_type"] for m in heard].count("display_data") == 1
    assert len({m["transient"]["display_id"] for m in shown}) == 1
    lines = [m["data"]["text/plain"] for m in shown]
    assert any("/200 rows" in line and "━" in line and "╌" in line for line in lines), lines
    assert "100 %" in lines[-1] and "200/200 rows" in lines[-1] and "1 dead" in lines[-1]
    text = {name: "".join(m["content"]["text"] for m in heard if m["msg_type"] == "stream"
            and m["content"]["name"] == name) for name in ("stdout", "stderr")}  # fmt: skip
    assert set(text["stdout"].splitlines()) <= {f"scoring {n}" for n in range(1, 11)}
    assert "GristmillWarning" in text["stderr"] and "1 of 200 rows (0.50%) are dead letters" in text["stderr"]


@pytest.mark.long
def test_a_preview_in_a_notebook_shows_prints(kernel: Any, tmp_path: Path) -> None:
    """What the function prints is the cell's output; no bar."""
    heard: list[Any] = []
    cell = CELL.replace("OUT", repr(str(tmp_path / "out"))).replace(".run()", ".preview(2)")
    reply = kernel.execute_interactive(cell, output_hook=heard.append, timeout=200)
    assert reply["content"]["status"] == "ok", reply["content"]
    said = [(m["content"]["name"], m["content"]["text"].strip()) for m in heard if m["msg_type"] == "stream"]
    assert ("stdout", "scoring") in [(name, text.partition(" ")[0]) for name, text in said], said
    assert "display_data" not in [m["msg_type"] for m in heard]


def test_here_is_no_notebook() -> None:
    """Also with IPython loaded."""
    import IPython

    assert IPython.get_ipython() is None and not in_notebook()

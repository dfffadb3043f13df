"""Prompts answered by a real model behind a real server of OpenAI's chat form: SmolLM2-135M in `transformers serve`.
tests/models/test_vllm.py has the same with `vllm serve`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
import kit
from gristmill.errors import GateFailed

NEEDED = ("fastapi", "uvicorn", "openai", "accelerate", "gguf")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.long,  # its start takes 15 seconds
    pytest.mark.real_model,
    pytest.mark.skipif(bool(MISSING), reason=f"`transformers serve` needs {', '.join(MISSING)}: make install"),
    pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning"),
]
COUNTRIES = {"France": "Paris", "Spain": "Madrid", "Japan": "Tokyo", "Germany": "Berlin"}


class Served:
    """`transformers serve` with one model, which can be killed and started again at its address."""

    def __init__(self, model: str, log: Path) -> None:
        self.model = model
        self._log = log
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = int(s.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.start()

    def start(self) -> None:
        """Returns before it answers."""
        typed = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", self.model]
        typed += ["--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu"]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(typed, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def ready(self) -> None:
        """Waits until it answers."""
        until = time.monotonic() + 180
        while True:
            assert self._process.poll() is None and time.monotonic() < until, self._log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
                return
            time.sleep(0.2)

    def kill(self) -> None:
        """With SIGKILL."""
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests here."""
    server = Served(str(kit.smollm_folder()), tmp_path_factory.mktemp("served") / "log")
    try:
        server.ready()
        yield server
    finally:
        server.kill()


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key and no other endpoint in the environment."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def table(names: list[str]) -> pa.Table:
    return pa.table({"id": range(len(names)), "name": names})


def test_rows_have_a_real_models_answers(served: Served) -> None:
    """Each at its place, with the tokens that the server counted."""
    found = gm.prompt(
        table([*COUNTRIES]), prompt="What is the capital of {{ name }}?", model=served.model, base_url=served.url,
        temperature=0, max_tokens=10, keep_usage=True, workers=0,
    ).to_pylist()  # fmt: skip
    right = [capital in row["answer"] for row, capital in zip(found, COUNTRIES.values(), strict=True)]
    assert sum(right) >= 3, found
    assert all(0 < row["answer_completion_tokens"] <= 10 < row["answer_prompt_tokens"] for row in found)


def test_a_schema_that_a_server_passes_over(served: Served) -> None:
    """It takes the request and answers as it likes: that is checked, asked again, and told in a dead letter."""
    with pytest.raises(GateFailed) as failed:
        gm.prompt(
            table(["A wonderful film."]), prompt="Write a poem about: {{ name }}", model=served.model, temperature=0,
            base_url=served.url, returns={"stars": "int64"}, max_tokens=8, workers=0, gates={"min_ok": 1.0},
        )  # fmt: skip
    assert "JSON" in str(failed.value) or "Misfit" in str(failed.value)


def test_a_model_that_is_not_served(served: Served, tmp_path: Path) -> None:
    """Nothing is published, and the refusal is told in the server's own words. It is a 400 without OpenAI's code for
    it, which may as well be about the row.
    """
    with pytest.raises(GateFailed) as refused:
        gm.prompt(
            table(["a", "b"]), tmp_path / "out", prompt="{{ name }}", model="another", base_url=served.url, workers=0
        )
    assert refused.value.exit_code == 3 and refused.value.report is not None
    assert all("requested 'another'" in row["message"] for row in refused.value.report.dead().to_pylist())
    assert not (tmp_path / "out" / "_SUCCESS").exists()


@pytest.mark.leaves_children  # the server that all tests here share
def test_a_server_that_is_killed_in_the_middle(served: Served, tmp_path: Path) -> None:
    """The run waits until it is back, and asks only for what was in flight once more."""
    rows = 12
    pq.write_table(table([f"the number {n}" for n in range(rows)]), tmp_path / "rows.parquet")
    typed = [sys.executable, "-m", "gristmill", "prompt", "rows.parquet", "out", "--keep", "id", "--prompt"]
    typed += ["Tell me of {{ name }}", "--model", served.model, "--base-url", served.url, "--max-tokens", "6"]
    run = subprocess.Popen(
        [*typed, "--temperature", "0", "--concurrency", "2"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    until = time.monotonic() + 120
    while not any(path.stat().st_size > 400 for path in tmp_path.glob("out/_gristmill/*/journal/*")):
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    served.kill()
    served.start()
    said, _ = run.communicate(timeout=180)
    assert run.returncode == 0, said
    found = gm.read(str(tmp_path / "out")).to_table()
    assert found["id"].to_pylist() == list(range(rows)) and all(found["answer"].to_pylist())
    assert re.search(rf"asked +{rows} requests", said), said

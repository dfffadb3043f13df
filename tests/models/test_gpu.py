"""Models on a real NVIDIA GPU: placement, precisions, memory that runs out, workers that share one. Skipped without."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.models.gpulibraries import without_gpu
from gristmill.process import machine

pytestmark = pytest.mark.skipif(
    not machine.gpus() or without_gpu("torch") is not None, reason="needs an NVIDIA GPU and a torch that can use it"
)

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dogs",
    "while",
    "seven",
    "wizards",
    "mix",
    "jugs",
    "wine",
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence-transformers folder with a BERT of random weights and a tokenizer of its own few words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("encoder")
    vocabulary = {t: n for n, t in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    BertModel(BertConfig(vocab_size=len(vocabulary), **sizes)).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 texts of 1 to 300 words."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 300, size=3000)
    table = pa.table({"id": range(3000), "text": [" ".join(draw.choice(WORDS, size=n)) for n in lengths]})
    path = tmp_path_factory.mktemp("texts") / "texts.parquet"
    pq.write_table(table, path)
    return path


def embedded(texts: Path, out: Path, encoder: Path, **options: Any) -> tuple[np.ndarray, gm.Report]:
    """The vectors of a job, in the order of the ids, and its report."""
    report = gm.embed(str(texts), str(out), text="text", model=str(encoder), keep=["id"], **options)
    table = report.read().to_table().sort_by("id")
    assert table["id"].to_pylist() == list(range(3000))
    return np.stack(table["embedding"].to_numpy()), report


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Row by row."""
    return np.asarray((a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))


def test_is_placed_on_the_gpu_by_itself(texts: Path, encoder: Path, tmp_path: Path) -> None:
    """Without options a model runs on the GPU, and its vectors are the CPU's."""
    found, report = embedded(texts, tmp_path / "gpu", encoder)
    assert report.details["runs_on"]["device"].startswith("cuda")
    plain, on_cpu = embedded(texts, tmp_path / "cpu", encoder, device="cpu")
    assert on_cpu.details["runs_on"]["device"] == "cpu"
    assert np.abs(found - plain).max() < 1e-4
    named, _ = embedded(texts, tmp_path / "named", encoder, device="cuda:0")
    assert np.abs(named - found).max() < 1e-5


def test_equals_sentence_transformers(texts: Path, encoder: Path, tmp_path: Path) -> None:
    """The vectors are those of `encode` on the same GPU, and of an encoder opened in this process."""
    from sentence_transformers import SentenceTransformer

    found, _ = embedded(texts, tmp_path / "out", encoder)
    some = pq.read_table(texts)["text"].to_pylist()[:200]
    expected = SentenceTransformer(str(encoder), device="cuda").encode(some)
    assert np.abs(found[:200] - expected).max() < 1e-4
    with gm.TextEmbedder(str(encoder), text="text").open() as opened:
        assert np.abs(opened.encode(some) - expected).max() < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(texts: Path, encoder: Path, tmp_path: Path, dtype: str) -> None:
    """Half precision is what runs if asked for, and stays close."""
    found, report = embedded(texts, tmp_path / "half", encoder, dtype=dtype)
    assert report.details["runs_on"]["dtype"] == dtype
    full, _ = embedded(texts, tmp_path / "full", encoder)
    assert cosines(found, full).min() > 0.99
    assert np.abs(found - full).max() > 0  # it was not float32 under another name


def _filled(free: int) -> Any:
    """A tensor that leaves about `free` bytes of the GPU's memory to others."""
    import torch

    torch.cuda.init()
    room = torch.cuda.mem_get_info()[0]
    return torch.empty(room - free, dtype=torch.uint8, device="cuda")


def test_memory_that_runs_out(texts: Path, encoder: Path, tmp_path: Path) -> None:
    """With a budget that the GPU cannot hold, batches are halved until they fit: every row once, none dead."""
    held = _filled(1_500_000_000)
    try:
        found, report = embedded(texts, tmp_path / "tight", encoder, batch_tokens=4_000_000, batch_rows=4096)
    finally:
        del held
        import torch

        torch.cuda.empty_cache()
    assert (report.rows_ok, report.rows_dead) == (3000, 0)
    plain, _ = embedded(texts, tmp_path / "plain", encoder)
    assert np.abs(found - plain).max() < 1e-4


class Greedy:
    """A user's model that takes 200 MB of the GPU for each row of a call."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._weight = torch.ones(1, device="cuda")

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        rows = len(batch["id"])
        work = self._torch.empty(rows * 200_000_000, dtype=self._torch.uint8, device="cuda")
        value = self._torch.from_numpy(np.asarray(batch["id"])).to("cuda") * self._weight
        del work
        return {"value": value.cpu().numpy()}


def test_memory_that_runs_out_in_a_function(texts: Path, tmp_path: Path) -> None:
    """A function whose call does not fit is given fewer rows; `gpus=1` gives it one worker, which sees the GPU."""
    held = _filled(6_000_000_000)
    try:
        report = gm.Job(
            gm.source(str(texts), limit=600), model=gm.model(Greedy, returns={"value": "float32"}),
            sink=gm.sink(str(tmp_path / "out"), keep=["id"]), engine=gm.local(gpus=1), batch_rows=256,
        ).run()  # fmt: skip
    finally:
        del held
        import torch

        torch.cuda.empty_cache()
    assert (report.workers, report.rows_ok, report.rows_dead) == (1, 600, 0)
    table = report.read().to_table()
    assert table["value"].to_pylist() == [float(i) for i in table["id"].to_pylist()]


def test_workers_share_a_gpu(texts: Path, encoder: Path, tmp_path: Path) -> None:
    """`gpus_per_worker=0.5`: two workers on one GPU, each row once, the same vectors."""
    found, report = embedded(texts, tmp_path / "two", encoder, engine=gm.local(gpus_per_worker=0.5), shard_rows=300)
    assert report.workers == 2
    plain, _ = embedded(texts, tmp_path / "one", encoder)
    assert np.abs(found - plain).max() < 1e-4


def test_torchscript(tmp_path: Path) -> None:
    """A TorchScript file runs on the GPU, with the CPU's answers."""
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)).eval()
    torch.jit.trace(net, torch.zeros(2, 8)).save(str(tmp_path / "net.pt"))
    names = [f"x{n}" for n in range(8)]
    values = np.random.default_rng(0).normal(size=(5000, 8)).astype(np.float32)
    pq.write_table(pa.table({n: values[:, i] for i, n in enumerate(names)}), tmp_path / "rows.parquet")
    model = gm.TorchScriptModel(str(tmp_path / "net.pt"), features=tuple(names))
    report = gm.Job(str(tmp_path / "rows.parquet"), model=model, sink=str(tmp_path / "out")).run()
    assert report.details["runs_on"]["device"].startswith("cuda")
    found = np.stack(report.read().to_table()["output"].to_numpy())
    with torch.inference_mode():
        expected = net(torch.from_numpy(values)).numpy()
    assert np.abs(found - expected).max() < 1e-4


def test_onnx_runtime_without_cuda(texts: Path, encoder: Path, tmp_path: Path) -> None:
    """An ONNX model runs on CPUs where ONNX Runtime has no CUDA, and says so; with it, on the GPU."""
    import torch

    net = torch.nn.Linear(1, 1).eval()
    torch.onnx.export(net, (torch.zeros(2, 1),), str(tmp_path / "net.onnx"), input_names=["x"], output_names=["y"],
                      dynamic_axes={"x": {0: "n"}, "y": {0: "n"}}, dynamo=False)  # fmt: skip
    pq.write_table(pa.table({"x": np.arange(500, dtype=np.float32)}), tmp_path / "rows.parquet")
    model = gm.OnnxModel(str(tmp_path / "net.onnx"), inputs={"x": "x"})
    report = gm.Job(str(tmp_path / "rows.parquet"), model=model, sink=str(tmp_path / "out")).run()
    assert report.rows_ok == 500
    on_gpu = without_gpu("onnxruntime") is None
    assert report.details["runs_on"]["device"].startswith("cuda" if on_gpu else "cpu")
    assert on_gpu or any("built without CUDA" in note for note in report.notes)


def test_killed_on_the_gpu(texts: Path, encoder: Path, tmp_path: Path) -> None:
    """kill −9 of a driver while its worker computes on the GPU: the memory is given back, the next run ends it."""
    import torch

    free = torch.cuda.mem_get_info()[0]
    command = [sys.executable, "-m", "gristmill", "embed", str(texts), str(tmp_path / "out"), "--text", "text"]
    command += ["--model", str(encoder), "--keep", "id", "--shard-rows", "100"]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    done = tmp_path / "out" / "_gristmill"
    end = time.monotonic() + 120
    while not list(done.glob("**/receipts*/*")) and not list(tmp_path.glob("out/part-*")):
        assert driver.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    while torch.cuda.mem_get_info()[0] < free - (256 << 20):
        assert time.monotonic() < end
        time.sleep(0.1)
    found, report = embedded(texts, tmp_path / "out", encoder, shard_rows=100)
    assert report.shards_resumed > 0
    plain, _ = embedded(texts, tmp_path / "plain", encoder)
    assert np.abs(found - plain).max() < 1e-4
    shutil.rmtree(tmp_path / "plain")


def test_tune_sweeps(texts: Path, encoder: Path, tmp_path: Path) -> None:
    """`tune` tries budgets on the GPU, and says which is best."""
    job = f"source: {texts}\nmodel: {{embed: {encoder}, text: text}}\nsink: {tmp_path / 'out'}\n"
    (tmp_path / "job.yaml").write_text(job)
    command = [sys.executable, "-m", "gristmill", "tune", str(tmp_path / "job.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert "32,768" in done.stdout

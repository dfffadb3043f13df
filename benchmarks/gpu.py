"""Text to vectors on one GPU: whole jobs, and `encode` of sentence-transformers over the same texts, each in a process
of its own, in turns. Rows a second without loading (of a job: of its workers, from their first rows on), wall seconds
with it, and how much of that time the GPU was at work (by NVML, while it was at all).

python benchmarks/gpu.py --model FOLDER --texts FILE.parquet [--rows 80000] [--rounds 3] [--only NAME …] [--wide]

`--wide` makes an encoder of random weights in BERT-large's form (24 layers, 1,024 wide) beside the given folder's
tokenizer: how fast it is does not depend on its weights. The file has a column `text`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ENCODE = """
import json, sys, time
import numpy as np, pyarrow as pa, pyarrow.parquet as pq, torch
from sentence_transformers import SentenceTransformer
source, model, out, dtype, batch = sys.argv[1:]
table = pq.read_table(source)
model = SentenceTransformer(model, device="cuda", model_kwargs={"dtype": getattr(torch, dtype)})
texts = table["text"].to_pylist()
model.encode(texts[:64], batch_size=int(batch), show_progress_bar=False)
torch.cuda.synchronize()
begun = time.perf_counter()
vectors = model.encode(texts, batch_size=int(batch), show_progress_bar=False)
column = pa.FixedSizeListArray.from_arrays(pa.array(np.asarray(vectors, np.float32).ravel()), vectors.shape[1])
pq.write_table(pa.table({"id": table["id"], "embedding": column}), out + ".parquet")
print(json.dumps({"rate": len(texts) / (time.perf_counter() - begun)}))
"""

JOB = """
import json, sys
import gristmill as gm
source, model, out, dtype, share, budget = sys.argv[1:]
more = {} if budget == "auto" else {"batch_tokens": int(budget)}
report = gm.embed(source, out, text="text", model=model, keep=["id"], dtype=dtype,
                  engine=gm.local(gpus_per_worker=float(share)), **more)
told = {n: getattr(report, n) for n in ("workers", "busy", "held_back", "padding", "details", "notes")}
print(json.dumps({"rate": sum(w.rows_per_second for w in report.per_worker), "told": told}, default=str))
"""


class Watch:
    """How busy the GPU is, sampled until stopped: the mean share of time with a kernel at work, from the first sample
    with any to the last, and the most memory in bytes.
    """

    def __init__(self) -> None:
        import pynvml  # type: ignore[import-not-found]  # of nvidia-ml-py

        pynvml.nvmlInit()
        self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self._busy: list[int] = []
        self._memory = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.wait(0.1):
            self._busy.append(self._nvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu)
            self._memory = max(self._memory, self._nvml.nvmlDeviceGetMemoryInfo(self._gpu).used)

    def stop(self) -> tuple[float, int]:
        self._done.set()
        self._thread.join()
        at = [n for n, busy in enumerate(self._busy) if busy > 0]
        between = self._busy[at[0] : at[-1] + 1] if at else [0]
        return statistics.fmean(between) / 100, self._memory


def contestants(source: str, model: str) -> dict[str, list[str]]:
    """Names, and what each is given."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        for batch in (32, 256):
            found[f"encode {dtype}, batches of {batch}"] = [ENCODE, source, model, "{out}", dtype, str(batch)]
        for share, words in ((1, "one worker"), (1 / 2, "two workers"), (1 / 3, "three workers")):
            if share > 1 / 3 or dtype == "bfloat16":
                found[f"gristmill {dtype}, {words}"] = [JOB, source, model, "{out}", dtype, str(share), "auto"]
    return found


def once(command: list[str], folder: Path, number: int) -> dict[str, Any]:
    """One run in a process of its own."""
    out = folder / f"out-{number}"
    given = [part.replace("{out}", str(out)) for part in command]
    env = {**os.environ, "GRISTMILL_CACHE": str(folder / f"cache-{number}")}
    watch, begun = Watch(), time.perf_counter()
    done = subprocess.run([sys.executable, "-c", *given], env=env, capture_output=True, text=True, check=False)
    seconds, (busy, memory) = time.perf_counter() - begun, watch.stop()
    if done.returncode:
        raise SystemExit(f"exit {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {**found, "seconds": seconds, "busy": busy, "memory": memory, "out": str(out)}


def wide(folder: Path, model: Path) -> Path:
    """A folder with BERT-large's sizes and random weights."""
    import torch
    from transformers import BertConfig, BertModel

    target = folder / "wide"
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("*.safetensors", "*.onnx"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    BertModel(BertConfig(vocab_size=30522, **sizes)).eval().save_pretrained(target)
    pooling = json.loads((target / "1_Pooling" / "config.json").read_text())
    pooling["word_embedding_dimension"] = 1024
    (target / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return target


def rows(texts: str, count: int, folder: Path) -> str:
    """As many rows as asked for, the texts again and again."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = pq.read_table(texts, columns=["text"]).combine_chunks()
    table = pa.concat_tables([found] * -(-count // len(found))).slice(0, count).combine_chunks()
    pq.write_table(table.add_column(0, "id", pa.array(range(count))), folder / "texts.parquet", row_group_size=8192)
    return str(folder / "texts.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", required=True)
    parser.add_argument("--rows", type=int, default=80_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--wide", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        folder = Path(name)
        model = wide(folder, given.model) if given.wide else given.model
        every = contestants(rows(given.texts, given.rows, folder), str(model))
        chosen = {n: c for n, c in every.items() if not given.only or any(o in n for o in given.only)}
        found: dict[str, list[dict[str, Any]]] = {}
        for number in range(given.rounds):
            for n, command in chosen.items():
                run = once(command, folder, len(found) * 100 + number)
                found.setdefault(n, []).append(run)
                print(json.dumps({"name": n, **{k: v for k, v in run.items() if k != "told"}}), flush=True)
                if number == 0 and "told" in run:
                    print("   ", json.dumps(run["told"])[:1500], flush=True)
        show(found, given.rows)


def show(found: dict[str, list[dict[str, Any]]], count: int) -> None:
    """The table of docs/benchmarks.md."""
    print(f"\n{count:,} texts\n\n| | rows/s, loaded | wall s, whole | GPU at work | GPU memory, GB |")
    print("|---|---|---|---|---|")
    for name, runs in found.items():
        middle = {k: statistics.median(r[k] for r in runs) for k in ("rate", "seconds", "busy", "memory")}
        print(
            f"| {name} | {middle['rate']:,.0f} | {middle['seconds']:.1f} | {middle['busy']:.0%} | "
            f"{middle['memory'] / 1e9:.1f} |"
        )


if __name__ == "__main__":
    main()

"""How long many workers take until they are ready, and what they hold in memory: 1 beside 16, each with numpy, pyarrow
and a TorchScript model of 90 MB.

    python benchmarks/workers.py [--workers 16] [--rounds 5]

Ready is when the last of them has loaded the model, counted from the start of the command. Memory is the sum of the
proportional set sizes (PSS) of all processes of the run at that moment.
"""

from __future__ import annotations

import argparse
import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

MODEL_MB = 90
ROWS = 1000  # a file
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import gristmill as gm

here, workers = Path.cwd(), int(sys.argv[1])

class Model:
    def __init__(self):
        self.net = torch.jit.load("model.pt")
        (here / f"ready-{os.getpid()}").touch()

    def __call__(self, batch):
        time.sleep(0.2)  # or the first workers would have done all before the last are ready
        with torch.inference_mode():
            return {"y": self.net(torch.from_numpy(batch["x"].copy())[:, None].expand(-1, 1024)).numpy()[:, 0]}

if __name__ == "__main__":
    gm.run(gm.Job("rows", gm.model(Model), gm.sink(f"out{workers}"), workers=workers))
"""


def ready(folder: Path, workers: int) -> tuple[float, float]:
    """Seconds until that many workers are ready, and the megabytes that all processes of the run then hold."""
    for old in folder.glob("ready-*"):
        old.unlink()
    subprocess.run(["rm", "-rf", str(folder / f"out{workers}")], check=True)
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "job.py", str(workers)], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        while len(list(folder.glob("ready-*"))) < workers:
            if process.poll() is not None:
                raise SystemExit(process.stderr.read().decode() if process.stderr else "")
            time.sleep(0.01)
        took = time.perf_counter() - began
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        held = sum(p.memory_full_info().pss for p in family) / 1e6
        process.kill()
    return took, held


def main() -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=2)  # as installing a package does
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        layers = [torch.nn.Linear(1024, 1024) for _ in range(MODEL_MB * 10**6 // (4 * 1024 * 1025))]
        torch.jit.trace(torch.nn.Sequential(*layers), torch.zeros(1, 1024)).save(folder / "model.pt")
        (folder / "job.py").write_text(SCRIPT)
        (folder / "rows").mkdir()
        for n in range(4 * given.workers):
            rows = np.random.default_rng(n).standard_normal(ROWS, dtype=np.float32)
            pq.write_table(
                pa.table({"x": rows, "pad": pa.array([os.urandom(100)] * ROWS)}), folder / f"rows/{n}.parquet"
            )
        found = {n: [ready(folder, n) for _ in range(given.rounds)] for n in (1, given.workers)}
    one, many = (tuple(statistics.median(v) for v in zip(*found[n], strict=True)) for n in (1, given.workers))
    print(f"1 worker ready after {one[0]:.2f} s, {one[1]:,.0f} MB; {given.workers} after {many[0]:.2f} s "
          f"({many[0] / one[0]:.2f} x), {many[1]:,.0f} MB ({many[1] / one[1]:.2f} x)")  # fmt: skip


if __name__ == "__main__":
    main()

"""What a plan of very many shards costs the driver: cutting, storing, listing receipts, reading them to publish.

    python benchmarks/scale_plan.py [--shards 100000]

No model runs and no row is read: receipts are written as a worker writes them, without the fsync of each.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time

import numpy as np

from gristmill.commit import generation as generations
from gristmill.commit import receipt as receipts
from gristmill.commit.receipt import Part, Receipt
from gristmill.files.disk import LocalFiles
from gristmill.shards import shard
from gristmill.shards.shard import Selection
from gristmill.shards.sourcefiles import FileInfo, SourceFile


def timed(what: str, started: float) -> float:
    """Print what has taken how long; the time now."""
    now = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what:<40} {now - started:8.2f} s   peak {peak:6.0f} MB", flush=True)
    return now


def main() -> None:
    import pyarrow as pa

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=100_000)
    count = parser.parse_args().shards
    rows = count * 1000
    info = FileInfo(
        SourceFile("x.parquet", rows * 100, "1"), rows, np.array([0, rows]), True, pa.schema([]), np.array([rows])
    )
    with tempfile.TemporaryDirectory(prefix="scale-") as root:
        now = time.perf_counter()
        table = shard.cut([info], Selection.everything([info]), 1000, 2)
        now = timed(f"cut into {shard.count(table):,} shards", now)
        files = LocalFiles()
        generation = generations.claim(files, root, "new")
        os.makedirs(generation.folder)
        about = {"output_schema": generations.encode_schema(pa.schema([])), "fingerprint": {}}
        plan = generations.write_plan(files, generation, about, [info], table)
        now = timed("plan written and read back", now)
        os.makedirs(generation.receipts)
        part = Part("work", "part-0000000.g1.parquet", 1000, 4096, "0" * 64, "rows")
        for number in range(len(plan.shards)):
            made = Receipt(number, "0" * 12, (1000, 1000, 0, 0, 1000, 0, 0, 1000), (part,))
            with open(os.path.join(generation.receipts, receipts.name(number)), "wb") as out:
                out.write(made.sealed())
        now = timed("receipts written (by the workers)", now)
        listed = receipts.listed(generation.receipts)
        now = timed("resume: receipts listed", now)
        found = {n: receipts.valid(paths) for n, paths in listed.items()}
        assert len(found) == len(plan.shards)
        timed("publish: receipts read and checked", now)


if __name__ == "__main__":
    main()

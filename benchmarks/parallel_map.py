"""The parallel map against joblib's loky and multiprocessing.Pool.imap_unordered: tiny calls, and the first result.

    python benchmarks/parallel_map.py [--calls 10000] [--rounds 7]

Each figure is of a whole process, started afresh, in alternation. Chunking is left to each: joblib batches by itself,
`imap_unordered` takes its default of one input a message (and 100 in a second column, as a person who tunes it would).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

COMMON = "import time\nbegun = time.time()\ndef tiny(x):\n    return x + 1\n"
END = "print(first, time.time() - begun)\n"
SCRIPTS = {
    "gristmill": COMMON
    + "import gristmill as gm\n"
    + "found = gm.remote_parallel_map(tiny, range(CALLS), generator=True, max_parallelism=WORKERS)\n"
    + "value = next(found); first = time.time() - begun\n"
    + "total = value + sum(found)\nassert total == sum(range(1, CALLS + 1))\n"
    + END,
    "joblib loky": COMMON
    + "from joblib import Parallel, delayed\n"
    + "found = Parallel(WORKERS, return_as='generator_unordered')(delayed(tiny)(x) for x in range(CALLS))\n"
    + "value = next(found); first = time.time() - begun\n"
    + "total = value + sum(found)\nassert total == sum(range(1, CALLS + 1))\n"
    + END,
    "Pool.imap_unordered": COMMON
    + "from multiprocessing import Pool\n"
    + "with Pool(WORKERS) as pool:\n"
    + "    found = pool.imap_unordered(tiny, range(CALLS))\n"
    + "    value = next(found); first = time.time() - begun\n"
    + "    total = value + sum(found)\nassert total == sum(range(1, CALLS + 1))\n"
    + END,
    "Pool.imap_unordered, chunksize 100": COMMON
    + "from multiprocessing import Pool\n"
    + "with Pool(WORKERS) as pool:\n"
    + "    found = pool.imap_unordered(tiny, range(CALLS), chunksize=100)\n"
    + "    value = next(found); first = time.time() - begun\n"
    + "    total = value + sum(found)\nassert total == sum(range(1, CALLS + 1))\n"
    + END,
}


def measured(script: str, calls: int, workers: int) -> tuple[float, float, float]:
    """Seconds to the first result, to the last, and of the whole process."""
    text = script.replace("CALLS", str(calls)).replace("WORKERS", str(workers))
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    whole = time.perf_counter() - begun
    first, last = map(float, done.stdout.split()[-2:])
    return first, last, whole


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    workers = len(os.sched_getaffinity(0))
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SCRIPTS}
    for _ in range(given.rounds):
        for name, script in SCRIPTS.items():
            taken[name].append(measured(script, given.calls, workers))
    print(f"{given.calls:,} tiny calls, {workers} workers, medians of {given.rounds}, seconds")
    print("| | first result | all results | whole process | against gristmill |\n|---|---|---|---|---|")
    ours = statistics.median(t[2] for t in taken["gristmill"])
    for name, times in taken.items():
        first, last, whole = (statistics.median(t[i] for t in times) for i in range(3))
        print(f"| {name} | {first:.2f} | {last:.2f} | {whole:.2f} | {whole / ours:.2f} × |")


if __name__ == "__main__":
    main()

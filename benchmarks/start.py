"""How long the small things take: `import gristmill`; a 1,000-row job of a plain function from command to exit; and the
same job again in one session, where workers are forks and where they are fresh interpreters.

python benchmarks/start.py [--rounds 5]
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

# Medians of wall seconds, and of CPU seconds in child processes, of the jobs after the first.
SESSION = """
import resource, statistics, sys, time
import gristmill as gm, fns
walls, cpus = [], []
for n in range({rounds} + 1):
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    gm.run(gm.Job("rows.parquet", fns.double, gm.sink(f"{{sys.argv[1]}}{{n}}", keep=["id"]), workers=2))
    walls.append(time.perf_counter() - began)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
print(statistics.median(walls[1:]), statistics.median(cpus[1:]))
"""


def in_session(folder: Path, rounds: int, fork: str) -> tuple[float, float]:
    """Wall and CPU seconds of a job that is not the first of its session."""
    command = [sys.executable, "-c", SESSION.format(rounds=rounds), f"again{fork}-"]
    env = {**os.environ, "GRISTMILL_FORK": fork, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    done = subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, text=True)
    wall, cpu = map(float, done.stdout.split())
    return wall, cpu


def median(command: list[str], folder: Path, rounds: int) -> float:
    """Median wall seconds of a whole process; the sink is another one every round."""
    times = []
    for number in range(rounds):
        started = time.perf_counter()
        subprocess.run([c.replace("{n}", str(number)) for c in command], cwd=folder, check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=2)  # as installing a package does
    with tempfile.TemporaryDirectory(prefix="start-") as name:
        folder = Path(name)
        pq.write_table(pa.table({"id": range(1000), "x": [i / 2 for i in range(1000)]}), folder / "rows.parquet")
        (folder / "fns.py").write_text("def double(batch):\n    return {'y': batch['x'] * 2}\n")
        bare = median([sys.executable, "-c", "pass"], folder, rounds)
        imported = median([sys.executable, "-c", "import gristmill"], folder, rounds)
        job = ["apply", "rows.parquet", "out{n}", "--fn", "fns:double", "--keep", "id", "--progress", "off"]
        whole = median([sys.executable, "-m", "gristmill", *job], folder, rounds)
        forks, fresh = (in_session(folder, rounds, fork) for fork in "10")
    print(f"import gristmill        {imported - bare:.3f} s (over a bare interpreter's {bare:.3f} s)")
    print(f"1,000 rows, whole job   {whole:.2f} s")
    print(f"again in one session    {forks[0]:.2f} s, {forks[1]:.2f} s of CPU in children, which are forks")
    print(f"                        {fresh[0]:.2f} s, {fresh[1]:.2f} s of CPU in children, with GRISTMILL_FORK=0")


if __name__ == "__main__":
    main()

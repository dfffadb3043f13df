"""How long the small things take: `import gristmill`, and a 1,000-row job of a plain function from command to exit.

python benchmarks/start.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import compileall
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


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
    print(f"import gristmill        {imported - bare:.3f} s (over a bare interpreter's {bare:.3f} s)")
    print(f"1,000 rows, whole job   {whole:.2f} s")


if __name__ == "__main__":
    main()

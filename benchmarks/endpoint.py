"""A prompt a row against one local server (tests/llmserver.py), as whole processes: a job, a loop by hand, Curator,
Daft's `prompt` and Ray Data's HTTP request processor, each 64 at a time (or as it is made for).

python benchmarks/endpoint.py [--rows 2000] [--only job loop] [--curator .venv-curator/bin/python]
                              [--daft .venv-peers/bin/python] [--ray .venv/bin/python]

Prints a table: seconds with a healthy server (20 ms), with 5 % answered 429 and 1 % 500, rows lost there, and what a
SIGKILL in the middle costs: requests that were answered and are sent again by the next run, and rows lost after it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tests"))
from llmserver import KEY, ChatServer

HERE = Path(__file__).parent
PEERS = HERE / "peers"
LIMIT = 180.0  # seconds of one run


@dataclass(frozen=True)
class Run:
    """How one run ended: seconds, exit code, rows that are not in its output, and what it said last."""

    seconds: float
    code: int
    lost: int
    said: str


def command(name: str, python: str, url: str, source: Path, target: Path) -> list[str]:
    """What somebody types."""
    if name == "job":
        asks = ["--prompt", "{{ text }}", "--model", "m", "--base-url", url, "--concurrency", "64", "--keep", "id"]
        return [python, "-m", "gristmill", "prompt", str(source), str(target), *asks, "--workers", "1"]
    return [python, str(PEERS / f"prompt_{name}.py"), url, str(source), str(target)]


def rows_in(target: Path) -> Counter[int]:
    """The ids in an output, and how often."""
    files = [str(path) for path in target.glob("*.parquet")] if target.is_dir() else []
    found = ds.dataset(files).to_table(columns=["id", "answer"]) if files else None
    answered = () if found is None else found.filter(found["answer"].is_valid())["id"].to_pylist()
    return Counter(answered)


def once(
    typed: list[str], folder: Path, target: Path, rows: int, server: ChatServer, kill_at: int | None = None
) -> Run:
    """Run a command to its end, or kill it and all its processes once so many prompts are answered."""
    env = {**os.environ, "OPENAI_API_KEY": KEY, "PYTHONDONTWRITEBYTECODE": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(typed, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            while process.poll() is None and time.perf_counter() - begun < LIMIT:
                if kill_at is not None and sum(server.told()["answered"].values()) >= kill_at:
                    break
                time.sleep(0.02)
        finally:
            killed = process.poll() is None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        took = time.perf_counter() - begun
        log.seek(0)
        said = [line.strip() for line in log.read().splitlines() if line.strip()]
    lost = rows - len(rows_in(target))
    return Run(took, -9 if killed else process.returncode, lost, said[-1][:200] if said else "")


def contest(name: str, python: str, rows: int) -> str:
    """One line of the table."""
    cells = [name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        source = folder / "rows.parquet"
        pq.write_table(pa.table({"id": range(rows), "text": [f"row {n} is here" for n in range(rows)]}), source)
        for n, options in enumerate(({}, {"busy": 0.05, "broken": 0.01})):
            with ChatServer(latency=0.02, **options) as server:
                target = folder / f"out{n}"
                run = once(command(name, python, server.url, source, target), folder, target, rows, server)
            print(f"{name} {options}: {run}", file=sys.stderr, flush=True)
            cells.append(f"{run.seconds:.1f}" if run.code == 0 else f"failed after {run.seconds:.1f}")
        cells.append(f"{run.lost:,}")
        with ChatServer(latency=0.02) as server:
            target = folder / "killed"
            typed = command(name, python, server.url, source, target)
            once(typed, folder, target, rows, server, kill_at=rows // 2)
            before = Counter(server.told()["answered"])
            run = once(typed, folder, target, rows, server)
            again = sum(n - 1 for n in server.told()["answered"].values())
        print(f"{name} killed at {sum(before.values())}: {run}", file=sys.stderr, flush=True)
        cells += [f"{again:,}", f"{run.lost:,}" if run.code == 0 else f"{run.lost:,}; exit {run.code}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--only", nargs="*", choices=["job", "loop", "curator", "daft", "ray"])
    for peer, place in (("curator", ".venv-curator"), ("daft", ".venv-peers"), ("ray", ".venv")):
        parser.add_argument(f"--{peer}", default=str(HERE.parent / place / "bin" / "python"))
    given = parser.parse_args()
    pythons = {"job": sys.executable, "loop": sys.executable}
    pythons |= {peer: getattr(given, peer) for peer in ("curator", "daft", "ray")}
    print("| | seconds | with 429 and 500 | rows lost | asked again after a kill | rows lost then |")
    print("|---|---|---|---|---|---|")
    for name, python in pythons.items():
        if given.only in (None, [], [name]) or name in given.only:
            print(
                contest(name, python, given.rows) if Path(python).exists() else f"| {name}: not installed |", flush=True
            )


if __name__ == "__main__":
    main()

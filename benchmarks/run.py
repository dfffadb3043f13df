"""All contestants side by side in one run, in alternation: whole processes, from command to files on disk.

    python benchmarks/run.py [--rounds 5] [--only cheap|text] [--write docs/benchmarks.md]

Prints medians and ratios; with --write, also into the page of figures, between two marks. Quote ratios from one run:
machines are noisy.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

HERE = Path(__file__).parent
PEERS = HERE / "peers"
BEGIN, END = "<!-- side by side: begin -->", "<!-- side by side: end -->"  # what lies between is written anew
sys.path.insert(0, str(HERE.parent / "tests"))


@dataclass(frozen=True)
class Contestant:
    """A command that reads the input and writes `{out}`."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Measured:
    """Wall seconds and peak resident bytes of all processes of one run."""

    seconds: float
    peak: int


def once(contestant: Contestant, folder: Path, env: dict[str, str]) -> Measured:
    """Run one command to its end. Raises CalledProcessError with its output where it fails."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.unlink(missing_ok=True)
    command = [part.replace("{out}", str(out)) for part in contestant.command]
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=PEERS, env=env, stdout=log, stderr=log)
        peaks: dict[int, int] = {}
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                for p in (watched, *watched.children(recursive=True)):
                    peaks[p.pid] = max(peaks.get(p.pid, 0), p.memory_info().rss)
            except psutil.Error:
                pass
            time.sleep(0.05)
        seconds = time.perf_counter() - started
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"{contestant.name} failed:\n{log.read()[-3000:]}")
    return Measured(seconds, sum(peaks.values()))


def contest(title: str, rows: int, contestants: list[Contestant], rounds: int, env: dict[str, str]) -> list[str]:
    """Alternate all contestants for some rounds; a Markdown table, the first contestant being what ratios refer to."""
    found: dict[str, list[Measured]] = {c.name: [] for c in contestants}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for number in range(rounds):
            for contestant in contestants:
                measured = once(contestant, Path(folder), env)
                found[contestant.name].append(measured)
                print(f"{title} {number + 1}/{rounds} {contestant.name}: {measured.seconds:.2f} s", flush=True)
    base = statistics.median(m.seconds for m in found[contestants[0].name])
    lines = [
        f"## {title}",
        "",
        "| | median s | least to most | rows/s | times the time of gristmill | peak MB |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        times = sorted(m.seconds for m in runs)
        median = statistics.median(times)
        peak = statistics.median(m.peak for m in runs) / 1e6
        span = f"{times[0]:.2f} to {times[-1]:.2f}"
        lines.append(f"| {name} | {median:.2f} | {span} | {rows / median:,.0f} | {median / base:.2f} | {peak:,.0f} |")
    return [*lines, ""]


def python(script: str, *args: str) -> tuple[str, ...]:
    """A peer's script."""
    return (sys.executable, str(PEERS / script), *args)


def gristmill(*args: str) -> tuple[str, ...]:
    """The command a person types."""
    return (sys.executable, "-m", "gristmill", *args, "--progress", "off")


def cheap(data: Path) -> list[Contestant]:
    """Softmax regression over 16 float32 features, 3 million rows, Parquet to Parquet."""
    source = str(data / "features.parquet")
    return [
        Contestant("gristmill", gristmill("apply", source, "{out}", "--fn", "softmax:predict", "--keep", "id")),
        Contestant("hand-written pyarrow loop", python("pyarrow_loop.py", source, "{out}")),
        Contestant("Ray Data", python("ray_data.py", source, "{out}")),
        Contestant("Spark mapInArrow", python("spark_arrow.py", source, "{out}")),
    ]


def text(data: Path) -> list[Contestant]:
    """MiniLM over 4,000 docstrings of mixed length."""
    import kit

    source, fp32 = str(data / "texts.parquet"), str(kit.minilm())
    embed = ("embed", source, "{out}", "--text", "text", "--keep", "id", "--model")
    return [
        Contestant("gristmill", gristmill(*embed, fp32)),
        Contestant("gristmill --backend torch", gristmill(*embed, fp32, "--backend", "torch")),
        Contestant("gristmill --dtype int8", gristmill(*embed, fp32, "--dtype", "int8")),
        Contestant("sentence-transformers encode", python("encode.py", "encode", fp32, source, "{out}")),
        Contestant("encode in row order, batches of 32", python("encode.py", "unsorted", fp32, source, "{out}")),
        Contestant("Ray Data", python("ray_text.py", fp32, source, "{out}")),
    ]


def about(rounds: int) -> list[str]:
    """The machine and the versions."""
    names = ("pyarrow", "numpy", "onnxruntime", "torch", "sentence-transformers", "ray", "pyspark")
    versions = ", ".join(f"{n} {version(n)}" for n in names)
    memory = psutil.virtual_memory().total / 2**30
    return [
        "Written by `make bench` (`benchmarks/run.py`): whole processes from command to files on disk, in alternation,",
        f"medians of {rounds}. The figure that counts is the ratio within one run.",
        "",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"Python {platform.python_version()}; {versions}.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["cheap", "text"])
    parser.add_argument("--without", default="", help="names of contestants to leave out, separated by |")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "gristmill-bench")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    env = {**os.environ, "BENCH_DATA": str(given.data), "PYTHONPATH": str(PEERS), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, str(PEERS / "data.py"), str(given.data)], check=True, env=env)
    left_out = given.without.split("|")

    def chosen(contestants: list[Contestant]) -> list[Contestant]:
        return [c for c in contestants if c.name not in left_out]

    lines = about(given.rounds)
    if given.only != "text":
        title = "Cheap model: softmax regression, 3 million rows of 16 features"
        lines += contest(title, 3_000_000, chosen(cheap(given.data)), given.rounds, env)
    if given.only != "cheap":
        lines += contest("MiniLM over 4,000 docstrings", 4000, chosen(text(given.data)), given.rounds, env)
    print("\n" + "\n".join(lines))
    if given.write:
        page = given.write.read_text()
        before, after = page.partition(BEGIN)[0], page.partition(END)[2]
        given.write.write_text("\n".join([before + BEGIN, *lines, END]) + after)


if __name__ == "__main__":
    main()

"""All contestants side by side in one run, in alternation: whole processes, from command to files on disk.

    python benchmarks/run.py [--rounds 5] [--only cheap|text|growth] [--write docs/benchmarks.md]

Prints medians and ratios; with --write, also into the page of figures, between two marks of the section. Quote ratios
from one run: machines are noisy. Daft needs another pyarrow than the project is tested with, so `make bench` gives it
an environment of its own, .venv-peers; without that it is left out, and the page says so.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
PEERS = HERE / "peers"
DAFT = HERE.parent / ".venv-peers" / "bin" / "python"
sys.path.insert(0, str(HERE.parent / "tests"))


@dataclass(frozen=True)
class Contestant:
    """A command that reads the input and writes `{out}`."""

    name: str
    command: tuple[str, ...]
    slow: bool = False  # takes part in every fourth round only


@dataclass(frozen=True)
class Measured:
    """Wall seconds, seconds until the first rows were safe, peak resident bytes of all processes of one run, and what
    gristmill reports of it.
    """

    seconds: float
    first: float
    peak: int
    report: dict


# Runs that a signal ended (Daft's interpreter, now and then, when it exits) are done again, and the page says how many.
MOST_CRASHES = 20
crashes: Counter[str] = Counter()


def once(contestant: Contestant, folder: Path, env: dict[str, str]) -> Measured:
    """Run one command to its end. Raises RuntimeError with its output where it fails."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.unlink(missing_ok=True)
    os.sync()  # what the run before has left unwritten is not this one's to wait for
    command = [part.replace("{out}", str(out)) for part in contestant.command]
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as told, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=PEERS, env=env, stdout=told, stderr=log)
        peaks: dict[int, int] = {}
        first = None
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                for p in (watched, *watched.children(recursive=True)):
                    peaks[p.pid] = max(peaks.get(p.pid, 0), p.memory_info().rss)
            except psutil.Error:
                pass
            if first is None and safe(out):
                first = time.perf_counter() - started
            time.sleep(0.05)
        seconds = time.perf_counter() - started
        log.seek(0), told.seek(0)
        if process.returncode < 0 and crashes[contestant.name] < MOST_CRASHES:
            crashes[contestant.name] += 1
            return once(contestant, folder, env)
        if process.returncode:
            raise RuntimeError(f"{contestant.name} failed:\n{told.read()[-1000:]}{log.read()[-3000:]}")
        printed = told.read().strip()
        report = json.loads(printed) if "gristmill" in command else {}
    return Measured(seconds, first or seconds, sum(peaks.values()), report)


def safe(out: Path) -> bool:
    """Whether some rows would outlive a kill: a receipt, or a whole Parquet file at the place of the result."""
    if any(out.glob("_gristmill/g*/receipts/*.json")):
        return True
    for path in [out] if out.is_file() else out.glob("*.parquet"):
        try:
            pq.read_metadata(path)
        except (pa.ArrowInvalid, OSError):
            continue
        return True
    return False


def contest(title: str, rows: int, contestants: list[Contestant], rounds: int, env: dict[str, str]) -> Section:
    """Alternate all contestants for some rounds; a Markdown table, the first contestant being what ratios refer to."""
    found: dict[str, list[Measured]] = {c.name: [] for c in contestants}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for number in range(rounds):
            for contestant in contestants:
                if contestant.slow and number % 4:
                    continue
                measured = once(contestant, Path(folder), env)
                found[contestant.name].append(measured)
                print(f"{title} {number + 1}/{rounds} {contestant.name}: {measured.seconds:.2f} s", flush=True)
    base = statistics.median(m.seconds for m in found[contestants[0].name])
    lines = [
        f"## {title}",
        "",
        "| | runs | median s | least to most | rows/s | time to that of gristmill | first rows safe, s | peak MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        times = sorted(m.seconds for m in runs)
        median = statistics.median(times)
        first = statistics.median(m.first for m in runs)
        peak = statistics.median(m.peak for m in runs) / 1e6
        span = f"{times[0]:.2f} to {times[-1]:.2f}"
        lines.append(
            f"| {name} | {len(runs)} | {median:.2f} | {span} | {rows / median:,.0f} | {median / base:.2f} "
            f"| {first:.1f} | {peak:,.0f} |"
        )
    return Section([*lines, "", *crashed()], found)


def crashed() -> list[str]:
    """What was said of runs that crashed since the last call."""
    said = [f"{name} crashed in {n} more runs, which were done again." for name, n in crashes.items()]
    crashes.clear()
    return [*said, ""] if said else []


@dataclass(frozen=True)
class Section:
    """A table, and the runs behind it by contestant."""

    lines: list[str]
    runs: dict[str, list[Measured]]


# ---------------------------------------------------------------- what the machine can do


def product_rate(size: int = 1024, seconds: float = 2.0) -> float:
    """GFLOP/s of float32 matrix products by torch (MKL) on all cores: the best of some stretches, in a process of its
    own.
    """
    code = (
        "import time, torch\n"
        f"a, b = torch.randn({size}, {size}), torch.randn({size}, {size})\n"
        "best, end = 0.0, time.perf_counter() + " + str(seconds) + "\n"
        "while time.perf_counter() < end:\n"
        "    t = time.perf_counter()\n"
        "    for _ in range(10): a @ b\n"
        f"    best = max(best, 10 * 2 * {size}**3 / (time.perf_counter() - t))\n"
        "print(best / 1e9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def useful_flops(model: Path, texts: list[str]) -> tuple[float, np.ndarray]:
    """Floating-point operations of a BERT encoder over texts without padding, and the token count of each: 24 h² a
    token and layer for its matrix products, 4 h t more for attention over t tokens.
    """
    import tokenizers

    shape = json.loads((model / "config.json").read_text())
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(json.loads((model / "sentence_bert_config.json").read_text())["max_seq_length"])
    lengths = np.array([len(e.ids) for e in tokenizer.encode_batch(texts)], dtype=float)
    return float(layers * (24 * hidden**2 * lengths + 4 * hidden * lengths**2).sum()), lengths


def inside(runs: dict[str, list[Measured]], flops: float, rate: float) -> list[str]:
    """What gristmill's own reports say of its runs."""
    lines = [
        f"Useful work is {flops / 1e9:,.0f} GFLOP, padding left out. All cores together reach {rate:.0f} GFLOP/s in",
        "float32 matrix products of 1,024 by 1,024 (torch, best stretch of two seconds, before and after the runs).",
        "",
        "| | padding | model busy, of the run | of the matrix-product rate while the model runs | held back by |",
        "|---|---|---|---|---|",
    ]
    for name, measured in runs.items():
        reports = [m.report for m in measured if m.report]
        if not reports:
            continue
        middle = {k: statistics.median(r[k] for r in reports) for k in ("padding", "busy", "model_seconds")}
        reached = flops / 1e9 / (middle["model_seconds"] / reports[0]["workers"])
        held = ", ".join(
            f"{what} {statistics.median(r['held_back'].get(what, 0) for r in reports):.1%}"
            for what in reports[0]["held_back"]
        )
        lines.append(
            f"| {name} | {middle['padding']:.1%} | {middle['busy']:.1%} "
            f"| {reached / rate:.0%} ({reached:.0f} GFLOP/s) | {held} |"
        )
    return [*lines, ""]


# ---------------------------------------------------------------- contestants


def python(script: str, *args: str) -> tuple[str, ...]:
    """A peer's script."""
    return (sys.executable, str(PEERS / script), *args)


def gristmill(*args: str) -> tuple[str, ...]:
    """The command a person types."""
    return (sys.executable, "-m", "gristmill", *args, "--progress", "off", "--json")


def daft(script: str, *args: str) -> list[Contestant]:
    """Daft's contestant, where its environment is there."""
    return [Contestant("Daft", (str(DAFT), str(PEERS / script), *args))] if DAFT.exists() else []


def cheap(data: Path) -> list[Contestant]:
    """Softmax regression over 16 float32 features, 3 million rows, Parquet to Parquet."""
    source = str(data / "features.parquet")
    return [
        Contestant("gristmill", gristmill("apply", source, "{out}", "--fn", "softmax:predict", "--keep", "id")),
        Contestant("hand-written pyarrow loop", python("pyarrow_loop.py", source, "{out}")),
        Contestant("Ray Data", python("ray_data.py", source, "{out}")),
        Contestant("Spark mapInArrow", python("spark_arrow.py", source, "{out}")),
        *daft("daft_features.py", source, "{out}"),
    ]


def text(data: Path) -> list[Contestant]:
    """MiniLM over 4,000 docstrings of mixed length."""
    import kit

    source, fp32 = str(data / "texts.parquet"), str(kit.minilm())
    embed = ("embed", source, "{out}", "--text", "text", "--keep", "id", "--model")
    return [
        Contestant("gristmill", gristmill(*embed, fp32)),
        Contestant("gristmill --backend torch", gristmill(*embed, fp32, "--backend", "torch"), slow=True),
        Contestant("gristmill --dtype int8", gristmill(*embed, fp32, "--dtype", "int8")),
        Contestant("sentence-transformers encode", python("encode.py", "encode", fp32, source, "{out}")),
        Contestant(
            "encode in row order, batches of 32", python("encode.py", "unsorted", fp32, source, "{out}"), slow=True
        ),
        Contestant("Ray Data", python("ray_text.py", fp32, source, "{out}")),
        *daft("daft_text.py", fp32, source, "{out}"),
    ]


def growth(data: Path, rounds: int, env: dict[str, str]) -> list[str]:
    """More rows: the time and the memory they take. It is the same file, copied: a link would be no other."""
    sources = {3_000_000: data / "features.parquet"}
    for times in (10, 40):
        sources[times * 3_000_000] = several = data / f"times{times}"
        several.mkdir(exist_ok=True)
        for number in range(times):
            if not (copy := several / f"{number}.parquet").exists():
                shutil.copyfile(data / "features.parquet", copy)
    found: dict[tuple[str, int], list[Measured]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for number in range(rounds):
            for rows, source in sources.items():
                command = gristmill("apply", str(source), "{out}", "--fn", "softmax:predict", "--keep", "id")
                files = str(source) if source.is_file() else f"{source}/*.parquet"
                for contestant in (Contestant("gristmill", command), *daft("daft_features.py", files, "{out}")):
                    measured = once(contestant, Path(folder), env)
                    found.setdefault((contestant.name, rows), []).append(measured)
                    print(
                        f"growth {number + 1}/{rounds} {contestant.name} {rows:,}: {measured.seconds:.2f} s", flush=True
                    )
    lines = [
        "## More rows (the cheap model)",
        "",
        "| | rows | median s | least to most | rows/s | peak MB, all processes |",
        "|---|---|---|---|---|---|",
    ]
    for (name, rows), runs in sorted(found.items(), key=lambda f: (f[0][0] == "Daft", f[0][1])):
        times = sorted(m.seconds for m in runs)
        middle, peak = statistics.median(times), statistics.median(m.peak for m in runs) / 1e6
        span = f"{times[0]:.2f} to {times[-1]:.2f}"
        lines.append(f"| {name} | {rows:,} | {middle:.2f} | {span} | {rows / middle:,.0f} | {peak:,.0f} |")
    return [*lines, "", *crashed()]


def about(rounds: int) -> list[str]:
    """The machine and the versions."""
    names = ("pyarrow", "numpy", "onnxruntime", "torch", "sentence-transformers", "ray", "pyspark")
    versions = ", ".join([*(f"{n} {version(n)}" for n in names), daft_version()])
    memory = psutil.virtual_memory().total / 2**30
    return [
        "Written by `make bench` (`benchmarks/run.py`): whole processes from command to files on disk, in alternation,",
        f"medians of {rounds} rounds. The figure that counts is the ratio within one run.",
        "",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"Python {platform.python_version()}; {versions}.",
        "",
    ]


def daft_version() -> str:
    """What of Daft took part, and with which pyarrow."""
    if not DAFT.exists():
        return "Daft left out: `make bench` installs it"
    code = "from importlib.metadata import version as v; print('daft', v('daft'), 'with pyarrow', v('pyarrow'))"
    return subprocess.run([str(DAFT), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def environment(data: Path) -> dict[str, str]:
    """Of all contestants. Ray makes its workers yield to everything else on the machine, which would count against it
    here; and a cluster that somebody has left behind is not to be joined.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {
        **env,
        "BENCH_DATA": str(data),
        "PYTHONPATH": str(PEERS),
        "HF_HUB_OFFLINE": "1",
        "RAY_worker_niceness": "0",
    }


def write(page: Path, section: str, lines: list[str]) -> None:
    """Put the lines between the marks of a section."""
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    text = page.read_text()
    if begin not in text or end not in text:
        raise SystemExit(f"{page} has no marks for {section!r}: {begin} … {end}")
    page.write_text("\n".join([text.partition(begin)[0] + begin, *lines, end]) + text.partition(end)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["cheap", "text", "growth"])
    parser.add_argument("--without", default="", help="names of contestants to leave out, separated by |")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "gristmill-bench")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    compileall.compile_dir(HERE.parent / "src", quiet=2)  # as installing a package does, the peers' too
    env = environment(given.data)
    subprocess.run([sys.executable, str(PEERS / "data.py"), str(given.data)], check=True, env=env)
    left_out = given.without.split("|")

    def chosen(contestants: list[Contestant]) -> list[Contestant]:
        return [c for c in contestants if c.name not in left_out]

    sections: dict[str, list[str]] = {}
    if given.only in (None, "cheap"):
        title = "Cheap model: softmax regression, 3 million rows of 16 features"
        sections["cheap"] = contest(title, 3_000_000, chosen(cheap(given.data)), given.rounds, env).lines
    if given.only in (None, "text"):
        import kit

        rate = product_rate()
        found = contest("MiniLM over 4,000 docstrings", 4000, chosen(text(given.data)), given.rounds, env)
        rate = max(rate, product_rate())
        texts = pq.read_table(given.data / "texts.parquet")["text"].to_pylist()
        flops, lengths = useful_flops(kit.minilm(), texts)
        half, most = np.quantile(lengths, [0.5, 0.9])
        told = f"Tokens of a text: mean {lengths.mean():.0f}, p50 {half:.0f}, p90 {most:.0f}."
        sections["text"] = [*found.lines, told, *inside(found.runs, flops, rate)]
    if given.only in (None, "growth"):
        sections["growth"] = growth(given.data, given.rounds, env)
    for section, lines in sections.items():
        print("\n" + "\n".join(lines))
        if given.write:
            write(given.write, section, [*about(given.rounds), *lines])


if __name__ == "__main__":
    main()

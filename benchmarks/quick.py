"""Ten minutes that tell whether something became slower: each line is what gristmill takes beside a reference in the
same run, in turns, whole processes. The ratios are compared with those of `benchmarks/quick.json`.

    python benchmarks/quick.py [--only small] [--write]

A line is worse if its median is above all rounds that were committed, and all that were committed below its median: by
more than either spread. Exit code 1 if one is. `--write` keeps the new figures as those to be compared with. Ratios
of machines with other numbers of cores are not compared.
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import run
import update

HERE = Path(__file__).parent
KEPT = HERE / "quick.json"
Timed = Callable[[], float]


@dataclass(frozen=True)
class Line:
    """What is timed, and beside what. `goal`: the ratio that it should not exceed, if one is set."""

    name: str
    ours: Timed
    reference: Timed
    beside: str
    rounds: int
    goal: float | None = None


@dataclass(frozen=True)
class Ratio:
    """Ours / reference: the median of the rounds' ratios, the least and the most, and the median seconds of ours."""

    ratio: float
    least: float
    most: float
    seconds: float
    rounds: int


def measured(line: Line) -> Ratio:
    """Both in turns; the first round fills caches and does not count."""
    ours, ratios = [], []
    for number in range(line.rounds + 1):
        a, b = line.ours(), line.reference()
        if number:
            ours.append(a)
            ratios.append(a / b)
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), statistics.median(ours), line.rounds)


def worse(now: Ratio, before: Ratio) -> bool:
    """Whether the difference is more than the rounds of either differ among themselves."""
    return now.ratio > before.most and before.ratio < now.least


# ---------------------------------------------------------------- the lines


def lines(data: Path, folder: Path, env: dict[str, str]) -> Iterator[tuple[str, Callable[[], list[Line]]]]:
    """Names and how to prepare them."""

    def timed(*command: str) -> Timed:
        return lambda: run.once(run.Contestant(command[-1], command), folder, env).seconds

    yield "small", lambda: small(data, timed)
    yield "cheap", lambda: cheap(data, timed)
    yield "embed", lambda: embed(data, timed)
    yield "text", lambda: text(data, timed)
    yield "features", lambda: features(data, timed)
    yield "update", lambda: updated(folder)
    yield "prompts", prompts


Commands = Callable[..., Timed]


def small(data: Path, timed: Commands) -> list[Line]:
    """1,000 rows of a trivial function, from command to exit."""
    source = str(part(data / "features.parquet", data / "small.parquet", 1000))
    job = timed(*run.gristmill("apply", source, "{out}", "--fn", "softmax:predict", "--keep", "id"))
    return [Line("1,000 trivial rows", job, timed(*run.python("pyarrow_loop.py", source, "{out}")), "pyarrow", 9, 1.5)]


def cheap(data: Path, timed: Commands) -> list[Line]:
    """3 million rows of a softmax regression."""
    source, name = str(data / "features.parquet"), "3 M rows, cheap model"
    job = timed(*run.gristmill("apply", source, "{out}", "--fn", "softmax:predict", "--keep", "id"))
    found = [Line(name, job, timed(*run.python("pyarrow_loop.py", source, "{out}")), "a loop", 5, 1 / 1.9)]
    for peer in run.daft("daft_features.py", source, "{out}"):
        found.append(Line(name, job, timed(*peer.command), "Daft", 5, 1 / 1.25))
    return found


def embed(data: Path, timed: Commands) -> list[Line]:
    """`gm.embed` of 200 texts in a new process."""
    import kit

    source, model = str(part(data / "texts.parquet", data / "texts200.parquet", 200)), str(kit.minilm())
    script = (
        "import sys, pandas, gristmill as gm\n"
        "if __name__ == '__main__':\n"
        "    gm.embed(pandas.read_parquet(sys.argv[1]), text='text', model=sys.argv[2]).to_pandas()"
        ".to_parquet(sys.argv[3])\n"
    )
    call = timed(sys.executable, "-c", script, source, model, "{out}")
    by_hand = timed(*run.python("encode.py", "encode", model, source, "{out}"))
    return [Line("gm.embed of 200 texts, cold", call, by_hand, "encode", 3, 1.3)]


def text(data: Path, timed: Commands) -> list[Line]:
    """MiniLM over 800 docstrings."""
    import kit

    source, model = str(part(data / "texts.parquet", data / "texts800.parquet", 800)), str(kit.minilm())
    command = run.gristmill("embed", source, "{out}", "--text", "text", "--keep", "id", "--model", model)
    by_hand = timed(*run.python("encode.py", "encode", model, source, "{out}"))
    return [
        Line("MiniLM, 800 docstrings", timed(*command), by_hand, "encode", 3, 1 / 2.2),
        Line("the same in int8", timed(*command, "--dtype", "int8"), by_hand, "encode", 3),
    ]


def features(data: Path, timed: Commands) -> list[Line]:
    """600,000 rows of 100 columns through scikit-learn."""
    source, model = data / "wide.parquet", data / "wide.skops"
    if not model.exists():
        import skops.io
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        rng = np.random.default_rng(0)
        x = rng.standard_normal((600_000, 100), dtype=np.float32)
        names = [f"c{n}" for n in range(100)]
        table = pa.table({"id": np.arange(len(x)), **{n: x[:, k] for k, n in enumerate(names)}})
        pq.write_table(table, source, row_group_size=50_000)
        some = table.slice(0, 20_000).select(names).to_pandas()
        fitted = make_pipeline(StandardScaler(), LogisticRegression())
        skops.io.dump(fitted.fit(some, (x[:20_000, :5].sum(axis=1) > 0).astype(int)), model)
    job = timed(*run.gristmill(
        "predict", str(source), "{out}", "--model", str(model), "--method", "predict_proba", "--keep", "id"
    ))  # fmt: skip
    by_hand = timed(*run.python("predict_proba.py", str(model), str(source), "{out}"))
    return [Line("600,000 rows of 100 features", job, by_hand, "predict_proba", 3, 1 / 1.5)]


def updated(folder: Path, rows: int = 300_000) -> list[Line]:
    """An update of which 2 % changed, beside the same job that scores all by a function that takes no time."""
    where = Path(tempfile.mkdtemp(dir=folder))
    given, order = SimpleNamespace(key=True, width=64, workers=2, cost=0.0), np.arange(rows)
    update.put(where / "in", rows, set(), order, 0)
    update.run(where, given, sink=str(where / "first"))
    update.put(where / "in", rows, set(range(0, rows, 50)), order, 1)

    def ours() -> float:
        shutil.rmtree(where / "out", ignore_errors=True)
        shutil.copytree(where / "first", where / "out")
        return float(update.run(where, given, sink=str(where / "out"))["seconds"])

    def alone() -> float:
        shutil.rmtree(where / "alone", ignore_errors=True)
        return float(update.run(where, given, sink=str(where / "alone"), update=None)["seconds"])

    return [Line("an update, 2 % changed", ours, alone, "all scored by next to nothing", 3, 1.3)]


def prompts() -> list[Line]:
    """3,000 prompts that a server answers after 20 ms, one worker."""
    from prompts import job, loop, served

    ours = served(job, {"latency": 0.02}, 3000, concurrency=128)
    by_hand = served(loop, {"latency": 0.02}, 3000, 128, batches=False)
    return [Line("3,000 prompts of 20 ms", ours, by_hand, "a semaphore loop", 5)]


def part(source: Path, target: Path, rows: int) -> Path:
    """A file of the first rows of another one."""
    if not target.exists():
        pq.write_table(pq.read_table(source).slice(0, rows), target)
    return target


# ---------------------------------------------------------------- the comparison


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["small", "cheap", "embed", "text", "features", "update", "prompts"])
    parser.add_argument("--write", action="store_true", help="keep these figures in quick.json")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "gristmill-bench")
    given = parser.parse_args()
    compileall.compile_dir(HERE.parent / "src", quiet=2)  # as installing a package does
    env = run.environment(given.data)
    subprocess.run([sys.executable, str(run.PEERS / "data.py"), str(given.data)], check=True, env=env)
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {"machine": machine(), "lines": {}}
    before = {name: Ratio(**told) for name, told in kept["lines"].items()} if kept["machine"] == machine() else {}
    if kept["machine"] != machine():
        print(f"nothing to compare with: quick.json is of {kept['machine']}, this is {machine()}")
    found: dict[str, Ratio] = {}
    slower = []
    with tempfile.TemporaryDirectory(prefix="quick-") as folder:
        for name, prepared in lines(given.data, Path(folder), env):
            for line in prepared() if given.only in (None, name) else []:
                title = f"{line.name}, beside {line.beside}"
                found[title] = measured(line)
                print(told(title, line, found[title], before.get(title)), flush=True)
                if title in before and worse(found[title], before[title]):
                    slower.append(title)
    if given.write:
        lines_ = {**kept["lines"], **{title: asdict(ratio) for title, ratio in found.items()}}
        KEPT.write_text(json.dumps({"machine": machine(), "date": str(date.today()), "lines": lines_}, indent=1) + "\n")
    if slower:
        raise SystemExit("slower by more than the spread: " + "; ".join(slower))


def machine() -> str:
    """What ratios depend on."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


def told(title: str, line: Line, now: Ratio, before: Ratio | None) -> str:
    """One line of the table."""
    against = "new" if before is None else f"was {before.ratio:.2f} ({before.least:.2f} to {before.most:.2f})"
    if before is not None and worse(now, before):
        against += ", SLOWER"
    goal = "" if line.goal is None else f"; goal {line.goal:.2f}"
    return f"{title}: {now.ratio:.2f} ({now.least:.2f} to {now.most:.2f}), {now.seconds:.2f} s; {against}{goal}"


if __name__ == "__main__":
    main()

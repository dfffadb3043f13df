"""Models of features over wide tables, beside the library's own `predict_proba` of the whole file in one process.

    python benchmarks/features.py [--rounds 5] [--only hist] [--columns 100,500] [--json FILE]

Both are whole processes, from command to files on disk, in turns; a model and its table are made once, in the folder of
the other benchmarks. Beside wall seconds stand those of all cores together (user and system time of a process and of
what it started), which other work on the machine hardly changes. LightGBM and XGBoost take part where they can be
imported.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import run

HERE = Path(__file__).parent
VALUES = 60_000_000  # of a table, whatever the number of its columns
TRAINED_ON = 20_000  # rows
CITIES = 200  # different values of a column of text


@dataclass(frozen=True)
class Taken:
    """Wall seconds of a whole process, and what it and its children computed: seconds of user and system time."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Line:
    """Both in turns: medians, and the median of the rounds' ratios (the reference's time to ours)."""

    name: str
    columns: int
    rows: int
    ours: Taken
    reference: Taken
    ratio: float
    least: float
    most: float


# ---------------------------------------------------------------- tables and models


def numbers(columns: int) -> pa.Table:
    """An id, and float32 columns."""
    rng = np.random.default_rng(0)
    rows = VALUES // columns
    names = [f"c{n}" for n in range(columns)]
    return pa.table({"id": np.arange(rows), **{n: rng.standard_normal(rows, dtype=np.float32) for n in names}})


def mixed(columns: int) -> pa.Table:
    """The same with texts in every tenth column, of which half have a null now and then."""
    table = numbers(columns).slice(0, VALUES // columns // 2)
    rng = np.random.default_rng(1)
    cities = np.array([f"city {n}" for n in range(CITIES)])
    for n in range(0, columns, 10):
        texts = pa.array(cities[rng.integers(0, CITIES, table.num_rows)])
        table = table.set_column(n + 1, f"c{n}", texts)
    return table


def labels(table: pa.Table) -> np.ndarray:
    """Three classes that rest on some columns of numbers."""
    some = sum(table[f"c{n}"].to_numpy() for n in (1, 2, 3, 4))
    return np.digitize(some, [-1.0, 1.0])


def logistic(table: pa.Table) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression())


def boosting(table: pa.Table) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(max_iter=30)


def forest(table: pa.Table) -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(50, max_depth=10, n_jobs=2, random_state=0)


def encoded(table: pa.Table) -> Any:
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    texts = [f.name for f in table.schema if pa.types.is_string(f.type)]
    others = [f.name for f in table.schema if f.name not in ("id", *texts)]
    parts = [("text", OneHotEncoder(handle_unknown="ignore"), texts), ("number", StandardScaler(), others)]
    return make_pipeline(ColumnTransformer(parts), LogisticRegression())


def lightgbm(table: pa.Table) -> Any:
    from lightgbm import LGBMClassifier

    return LGBMClassifier(n_estimators=50, verbose=-1)


def xgboost(table: pa.Table) -> Any:
    from xgboost import XGBClassifier

    return XGBClassifier(n_estimators=50)


@dataclass(frozen=True)
class Kind:
    """A model that is fitted on the first rows of a table, and how it is saved."""

    name: str
    build: Callable[[pa.Table], Any]
    table: Callable[[int], pa.Table] = numbers
    suffix: str = ".skops"
    library: str = "sklearn"


KINDS = {
    "logistic": Kind("scaler and logistic regression", logistic),
    "encoded": Kind("one-hot texts, scaled numbers, logistic regression", encoded, mixed),
    "hist": Kind("HistGradientBoosting, 30 rounds", boosting),
    "forest": Kind("RandomForest, 50 trees, n_jobs=2", forest),
    "lightgbm": Kind("LightGBM, 50 rounds", lightgbm, suffix=".joblib", library="lightgbm"),
    "xgboost": Kind("XGBoost, 50 rounds", xgboost, suffix=".joblib", library="xgboost"),
    "onnx": Kind("the forest as an ONNX graph", forest, suffix=".onnx", library="onnxruntime"),
}


def made(kind: str, columns: int, folder: Path) -> tuple[Path, Path]:
    """The files of a table and of a model fitted on it, made if they are not there."""
    what = KINDS[kind]
    source = folder / f"{what.table.__name__}{columns}.parquet"
    model = folder / f"{kind}{columns}{what.suffix}"
    if not source.exists():
        pq.write_table(what.table(columns), source, row_group_size=50_000)
    if not model.exists():
        some = next(pq.ParquetFile(source).iter_batches(TRAINED_ON))
        table = pa.Table.from_batches([some])
        features = [n for n in table.column_names if n != "id"]
        fitted = what.build(table).fit(table.select(features).to_pandas(), labels(table))
        save(fitted, model)
    return source, model


def save(fitted: Any, path: Path) -> None:
    """In the form that the suffix names."""
    if path.suffix == ".onnx":
        import onnx

        onnx.save(as_graph(fitted), str(path))
    elif path.suffix == ".joblib":
        import joblib

        joblib.dump(fitted, path)
    else:
        import skops.io

        skops.io.dump(fitted, path)


def as_graph(forest: Any) -> Any:
    """A forest of scikit-learn as a graph with one TreeEnsembleClassifier, whose answers are its probabilities."""
    from onnx import TensorProto, helper

    nodes: dict[str, list[Any]] = {
        k: [] for k in ("treeids", "nodeids", "featureids", "values", "modes", "true", "false")
    }
    leaves: dict[str, list[Any]] = {k: [] for k in ("treeids", "nodeids", "ids", "weights")}
    for number, estimator in enumerate(forest.estimators_):
        tree = estimator.tree_
        count = tree.node_count
        inner = tree.children_left != tree.children_right
        nodes["treeids"] += [number] * count
        nodes["nodeids"] += range(count)
        nodes["featureids"] += np.where(inner, tree.feature, 0).tolist()
        # Beyond a threshold in float64 lie the same float32 numbers as beyond the next smaller one in float32.
        nodes["values"] += np.where(inner, below(tree.threshold), 0).tolist()
        nodes["modes"] += np.where(inner, "BRANCH_LEQ", "LEAF").tolist()
        nodes["true"] += np.where(inner, tree.children_left, 0).tolist()
        nodes["false"] += np.where(inner, tree.children_right, 0).tolist()
        shares = tree.value[:, 0] / tree.value[:, 0].sum(axis=1, keepdims=True) / len(forest.estimators_)
        for leaf in np.flatnonzero(~inner).tolist():
            for label, weight in enumerate(shares[leaf].tolist()):
                for name, value in zip(leaves, (number, leaf, label, weight), strict=True):
                    leaves[name].append(value)
    of_nodes = {f"nodes_{k}{'nodeids' * (k in ('true', 'false'))}": v for k, v in nodes.items()}
    node = helper.make_node(
        "TreeEnsembleClassifier", ["x"], ["label", "probabilities"], domain="ai.onnx.ml",
        **of_nodes, **{f"class_{k}": v for k, v in leaves.items()},
        classlabels_int64s=forest.classes_.tolist(), post_transform="NONE",
    )  # fmt: skip
    width, classes = forest.n_features_in_, len(forest.classes_)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, width])
    answers = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [None, classes])
    graph = helper.make_graph([node], "forest", [given], [answers])
    opsets = [helper.make_opsetid("ai.onnx.ml", 3), helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def below(thresholds: np.ndarray) -> np.ndarray:
    """The greatest float32 numbers that are not above these."""
    narrow = thresholds.astype(np.float32)
    return np.where(narrow > thresholds, np.nextafter(narrow, np.float32(-np.inf)), narrow)


# ---------------------------------------------------------------- runs


def taken(command: tuple[str, ...], env: dict[str, str]) -> Taken:
    """Run a command to its end. Raises RuntimeError with its output where it fails."""
    with tempfile.TemporaryFile("w+") as log:
        os.sync()
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=run.PEERS, env=env, stdout=subprocess.DEVNULL, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"{' '.join(command)}:\n{log.read()[-3000:]}")
    return Taken(seconds, used.ru_utime + used.ru_stime)


def commands(source: Path, model: Path, out: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ours and the reference's, which write to `out` and `out`.parquet."""
    more: tuple[str, ...] = ("--method", "predict_proba")
    if model.suffix == ".onnx":
        names = [n for n in pq.read_schema(source).names if n != "id"]
        more = ("--features", ",".join(names))
    else:  # trees are of types that skops does not trust by itself
        more = (*more, "--allow-pickle", "--sha256", hashlib.sha256(model.read_bytes()).hexdigest())
    ours = run.gristmill("predict", str(source), str(out), "--model", str(model), "--keep", "id", *more)
    return ours, run.python("predict_proba.py", str(model), str(source), f"{out}.parquet")


def check(out: Path) -> None:
    """Raises ValueError where the two answers differ by more than rounding."""
    ours, theirs = pq.read_table(str(out)), pq.read_table(f"{out}.parquet")
    column = next(n for n in ours.column_names if n != "id")
    a, b = (np.stack(t.sort_by("id")[n].to_numpy()) for t, n in ((ours, column), (theirs, "probabilities")))
    if len(a) != len(b) or not np.allclose(a, b, atol=1e-5):
        raise ValueError(
            f"{out}: {len(a)} and {len(b)} rows, up to {np.abs(a - b).max() if len(a) == len(b) else 0} apart"
        )


def measured(kind: str, columns: int, rounds: int, data: Path, env: dict[str, str]) -> Line:
    """Both in turns; the first round fills caches, is compared, and does not count."""
    source, model = made(kind, columns, data)
    found: list[tuple[Taken, Taken]] = []
    with tempfile.TemporaryDirectory(prefix="features-") as folder:
        out = Path(folder) / "out"
        ours, reference = commands(source, model, out)
        for number in range(rounds + 1):
            pair = taken(ours, env), taken(reference, env)
            if number:
                found.append(pair)
            else:
                check(out)
            shutil.rmtree(out)
    ratios = [b.wall / a.wall for a, b in found]
    a, b = (
        Taken(statistics.median(t.wall for t in each), statistics.median(t.cpu for t in each))
        for each in zip(*found, strict=True)
    )
    rows = pq.read_metadata(source).num_rows
    return Line(KINDS[kind].name, columns, rows, a, b, statistics.median(ratios), min(ratios), max(ratios))


def table(lines: list[Line]) -> Iterator[str]:
    """As Markdown."""
    yield "| model | columns | rows | ours: wall s | cores' s | reference: wall s | cores' s | its time to ours |"
    yield "|---|---|---|---|---|---|---|---|"
    for line in lines:
        a, b = line.ours, line.reference
        yield (
            f"| {line.name} | {line.columns} | {line.rows:,} | {a.wall:.2f} | {a.cpu:.2f} | {b.wall:.2f} | {b.cpu:.2f} "
            f"| {line.ratio:.2f} ({line.least:.2f} to {line.most:.2f}) |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of models, separated by commas")
    parser.add_argument("--columns", default="100,500")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "gristmill-bench")
    parser.add_argument("--json", type=Path, help="keep the figures in this file, too")
    given = parser.parse_args()
    compileall.compile_dir(HERE.parent / "src", quiet=2)  # as installing a package does
    given.data.mkdir(parents=True, exist_ok=True)
    env, lines = run.environment(given.data), []
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], *filter(None, [os.environ.get("PYTHONPATH")])])
    for columns in map(int, given.columns.split(",")):
        for kind in given.only.split(","):
            if find_spec(KINDS[kind].library) is None:
                print(f"{KINDS[kind].library} is not installed: left out", flush=True)
                continue
            lines.append(measured(kind, columns, given.rounds, given.data, env))
            print(list(table(lines[-1:]))[-1], flush=True)
    print("\n" + "\n".join(table(lines)))
    if given.json:
        given.json.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")


if __name__ == "__main__":
    main()

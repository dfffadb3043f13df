"""What the pages say is there: files and models by their names, made where a page speaks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kit
import storeservers
from s3server import S3Server
from snippets import ROOT, Reader


def reviews(path: Path) -> None:
    """Two Parquet files of film reviews."""
    kit.write_reviews(path, files=2, rows=12)


def minilm(path: Path) -> None:
    """A model of texts, in a form that loads quickly."""
    path.symlink_to(kit.minilm_int8())


def sentiment(path: Path) -> None:
    """A classifier of texts."""
    path.symlink_to(kit.sentiment_classifier_onnx())


def customers(path: Path) -> None:
    """Rows of numbers."""
    _frame().assign(customer_id=range(100)).to_parquet(path)


def weights(path: Path) -> None:
    """Two numbers, one for each feature of theirs."""
    import numpy as np

    np.save(path, np.array([0.5, 0.25]))


def churn_joblib(path: Path) -> None:
    """An estimator fitted on them, as joblib saves it."""
    import joblib

    joblib.dump(_estimator(), path)


def churn_skops(path: Path) -> None:
    """The same, as skops saves it."""
    import skops.io

    skops.io.dump(_estimator(), path)


def risk_onnx(path: Path) -> None:
    """A graph of one matrix product."""
    import onnx
    from onnx import TensorProto, helper

    weights = helper.make_tensor("w", TensorProto.FLOAT, [2, 1], [0.5, 0.25])
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, k]) for n, k in (("x", 2), ("risk", 1))]
    node = helper.make_node("MatMul", ["x", "w"], ["risk"])
    graph = helper.make_graph([node], "g", info[:1], info[1:], initializer=[weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def net_pt(path: Path) -> None:
    """A traced layer."""
    import torch

    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 1).eval(), torch.zeros(2, 2)), path)


def manuals(path: Path) -> None:
    """Texts: a long one, a short one, an empty one."""
    path.mkdir()
    (path / "long.md").write_text(" ".join(f"word{n}\n" for n in range(250)))
    (path / "short.txt").write_text("one two")
    (path / "empty.txt").write_text(" \n")


def photos(path: Path) -> None:
    """Two images, and one that is cut."""
    from PIL import Image

    path.mkdir()
    for n, colour in enumerate(("#ff0000", "#0000ff")):
        Image.new("RGB", (9, 7), colour).save(path / f"{n}.png")
    (path / "torn.png").write_bytes((path / "0.png").read_bytes()[:40])


def _frame():  # type: ignore[no-untyped-def]
    import numpy as np
    import pandas as pd

    return pd.DataFrame({"age": np.arange(100.0), "spend": np.arange(100.0) % 7})


def _estimator():  # type: ignore[no-untyped-def]
    import numpy as np
    from sklearn.linear_model import LogisticRegression

    frame = _frame()
    return LogisticRegression().fit(frame, np.where(frame.age > 50, "stay", "churn"))


THERE: dict[str, Callable[[Path], None]] = {
    "reviews/": reviews,
    "models/minilm": minilm,
    "models/sentiment": sentiment,
    "customers.parquet": customers,
    "weights.npy": weights,
    "churn.joblib": churn_joblib,
    "churn.skops": churn_skops,
    "risk.onnx": risk_onnx,
    "net.pt": net_pt,
    "manuals/": manuals,
    "photos/": photos,
}


@pytest.fixture(scope="session")
def store(weed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server with one bucket, `box`."""
    started = S3Server(weed, tmp_path_factory.mktemp("s3"))
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="session")
def databases() -> Iterator[dict[str, str]]:
    """A Postgres and a Redis server and a broker, as the pages about stores name them in the environment."""
    with storeservers.postgres() as postgres, storeservers.redis() as redis, storeservers.mock_brokers() as kafka:
        yield {"PG_URL": postgres, "REDIS_URL": f"{redis}/0", "KAFKA_BROKER": kafka}


@pytest.fixture
def reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], Reader]:
    """By a page's name a reader of it, in a folder that holds what its text speaks of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def begin(page: str) -> Reader:
        text = (ROOT / page).read_text(encoding="utf-8")
        for name, make in THERE.items():
            if name in text:
                path = tmp_path / name.rstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                make(path)
        return Reader(tmp_path, capsys)

    return begin

"""The examples of docs/models.md, run in the order in which they stand there."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import onnx
import pandas as pd
import pytest
import torch
from onnx import TensorProto, helper
from sklearn.linear_model import LogisticRegression

import gristmill as gm

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the page says is there."""
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame({"age": np.arange(100.0), "spend": np.arange(100.0) % 7})
    frame.assign(customer_id=range(100)).to_parquet("customers.parquet")
    joblib.dump(LogisticRegression().fit(frame, np.where(frame.age > 50, "stay", "churn")), "churn.joblib")
    weights = helper.make_tensor("w", TensorProto.FLOAT, [2, 1], [0.5, 0.25])
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, k]) for n, k in (("x", 2), ("risk", 1))]
    node = helper.make_node("MatMul", ["x", "w"], ["risk"])
    graph = helper.make_graph([node], "g", info[:1], info[1:], initializer=[weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), "risk.onnx")
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 1).eval(), torch.zeros(2, 2)), "net.pt")
    return tmp_path


@pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")
def test_the_examples_of_the_page(folder: Path) -> None:
    """Each publishes a row for every customer; a job file is the same job as the lines of Python above it."""
    digest = hashlib.sha256((folder / "churn.joblib").read_bytes()).hexdigest()
    scope: dict[str, Any] = {"SHA256": digest, "__name__": "page"}
    blocks = re.findall(r"^```(python|yaml)\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    for kind, text in blocks:
        if kind == "python":
            exec(compile(text, "models.md", "exec"), scope)
        else:
            (folder / "job.yaml").write_text(text.replace("${sha256}", digest))
            assert gm.load_job("job.yaml").run().state == "nothing to do"
    assert len(blocks) == 9
    for sink in ("scores", "risk", "net", "own", "wide", "audited"):
        assert gm.read(sink).count_rows() == 100
    assert gm.read("scores").schema.field("probabilities").metadata[b"labels"] == b'["churn", "stay"]'
    scores = gm.read("scores").to_table()["probabilities"].to_pylist()
    wide = gm.read("wide").to_table()
    assert wide.column_names == ["customer_id", "p_churn", "p_stay"]
    assert list(map(list, zip(wide["p_churn"].to_pylist(), wide["p_stay"].to_pylist(), strict=True))) == scores

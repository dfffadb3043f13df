"""Faults of texts, on a real model: nulls and empty texts (10), a text of a million tokens (11), rows that kill the
tokeniser (21), a model folder whose files point elsewhere (37).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import victims
from test_deaths import Heard

import gristmill as gm
from kit import minilm, minilm_onnx

pytestmark = pytest.mark.real_model


def vectors(table: pa.Table) -> np.ndarray:
    """The embedding column, [rows, dimensions]; NaN where it is null."""
    return np.array([[np.nan] * 384 if v is None else v for v in table["embedding"].to_pylist()], dtype=np.float32)


def embedded(rows: pa.Table, folder: Path, name: str = "out", **options: Any) -> gm.Report:
    """The rows embedded in this process."""
    pq.write_table(rows, folder / f"{name}.parquet")
    model = gm.TextEmbedder(str(minilm_onnx()), text="text")
    sink = gm.sink(str(folder / name), keep=["id"])
    return gm.Job(str(folder / f"{name}.parquet"), model, sink, **{"workers": 0, **options}).run()


@pytest.mark.long
@pytest.mark.parametrize(
    ("on_null", "ok", "dead", "filtered"), [("dead", 3, 1, 0), ("skip", 3, 0, 1), ("keep", 4, 0, 0)]
)
def test_fault_10_null_and_empty_texts(quick: Path, on_null: str, ok: int, dead: int, filtered: int) -> None:
    """A null is a dead letter, left out, or scored as the empty text, as asked; "None" is a word."""
    rows = pa.table({"id": [0, 1, 2, 3], "text": ["a film", None, "", "None"]})
    report = embedded(rows, quick, on_null=on_null)
    assert (report.rows_ok, report.rows_dead, report.rows_filtered) == (ok, dead, filtered)
    table = report.read().to_table()
    found = dict(zip(table["id"].to_pylist(), vectors(table), strict=True))
    assert np.isfinite(found[2]).all() and not np.allclose(found[2], found[3])
    if on_null == "keep":
        assert np.array_equal(found[1], found[2])
    else:
        assert 1 not in found
    if on_null == "dead":
        assert oracles.dead_ids(str(quick / "out")) == [1]


@pytest.mark.long
def test_fault_11_a_text_of_a_million_tokens(quick: Path) -> None:
    """It is cut where the model says so, at 256 tokens, without tokenising the rest: memory hardly grows."""
    words = "a long film about nothing "
    peaks = {}
    for name, long in (("short", words * 100), ("long", words * 200_000)):
        pq.write_table(pa.table({"id": [0, 1, 2], "text": [words * 100, long, "x"]}), quick / f"{name}.parquet")
        code = (
            "import resource, sys; import gristmill as gm\n"
            "model = gm.TextEmbedder(sys.argv[3], text='text')\n"
            "gm.Job(sys.argv[1], model, gm.sink(sys.argv[2], keep=['id']), workers=0).run()\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        line = [sys.executable, "-c", code, str(quick / f"{name}.parquet"), str(quick / name), str(minilm_onnx())]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        peaks[name] = int(done.stdout) >> 10
    assert peaks["long"] - peaks["short"] < 80, f"{peaks} MB: to tokenise it all would take some 300 MB more"
    found = vectors(gm.read(str(quick / "long")).to_table())
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_fault_11_a_text_longer_than_a_model_without_a_limit_takes(quick: Path, tmp_path: Path) -> None:
    """`max_length` asked for by hand is the one that counts."""
    pq.write_table(pa.table({"id": [0, 1], "text": ["good " * 8, "good " * 5000]}), quick / "in.parquet")
    model = gm.TextEmbedder(str(minilm_onnx()), text="text", max_length=10)
    report = gm.Job(str(quick / "in.parquet"), model, gm.sink(str(quick / "out"), keep=["id"]), workers=0).run()
    found = vectors(report.read().to_table())
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


@pytest.mark.parametrize("first", [0, pytest.param(200, marks=pytest.mark.slow)])
def test_fault_21_rows_that_end_the_process_in_the_tokeniser(quick: Path, first: int) -> None:
    """Two rows end the process while they are made ready, at the beginning of the job or later: they alone are dead."""
    texts = [f"review number {n}" for n in range(300)]
    bad = [first + 3, first + 9]
    for n in bad:
        texts[n] = "poison"
    pq.write_table(pa.table({"id": range(300), "text": texts}), quick / "in.parquet")
    model = gm.TextEmbedder(str(minilm_onnx()), text="text")
    job = gm.Job(
        str(quick / "in.parquet"), model, gm.sink(str(quick / "out"), keep=["id"]),
        steps=[gm.step(victims.deadly_tokeniser)], workers=1, shard_rows=20,
    )  # fmt: skip
    heard = Heard()
    report = job.run(observer=heard)
    assert heard.deaths() < 20, "what the first rows did is not found out twice"
    assert (report.rows_ok, oracles.dead_ids(str(quick / "out"))) == (298, bad)
    letters = gm.dead(str(quick / "out")).to_pylist()
    assert {x["error"] for x in letters} == {"WorkerDied"}
    ids = report.read().to_table()["id"].to_pylist()
    assert ids == [n for n in range(300) if n not in bad]


def test_fault_37_a_model_folder_that_points_elsewhere(quick: Path) -> None:
    """A modules.json whose path leaves the model's folder is refused by name before anything is loaded."""
    shutil.copytree(minilm(), quick / "model")
    modules = json.loads((quick / "model" / "modules.json").read_text())
    modules[1]["path"] = "../elsewhere"
    (quick / "model" / "modules.json").write_text(json.dumps(modules))
    shutil.copytree(minilm() / "1_Pooling", quick / "elsewhere")
    with pytest.raises(gm.BadJob, match=r"\.\./elsewhere"):
        gm.embed(pa.table({"text": ["x"]}), str(quick / "out"), text="text", model=str(quick / "model"))


def test_fault_37_onnx_weights_that_point_elsewhere(quick: Path) -> None:
    """A graph whose external weights lie outside its folder is refused by name."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    weights = helper.make_tensor("w", TensorProto.FLOAT, [4], np.zeros(4, dtype=np.float32).tobytes(), raw=True)
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 4]) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", value[:1], value[1:], [weights])
    (quick / "model").mkdir()
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(made, str(quick / "model" / "m.onnx"), save_as_external_data=True, location="w.bin", size_threshold=0)
    path = quick / "model" / "m.onnx"
    shutil.move(quick / "model" / "w.bin", quick / "w.bin")
    path.write_bytes(path.read_bytes().replace(b"w.bin", b"../w."[:5]))
    (quick / "w.").write_bytes((quick / "w.bin").read_bytes())
    pq.write_table(pa.table({"x": [[0.0] * 4]}), quick / "in.parquet")
    with pytest.raises(gm.BadJob, match=r"\.\./w\."):
        gm.Job(str(quick / "in.parquet"), gm.OnnxModel(str(path)), str(quick / "out"), workers=0).run()

"""`gristmill.spark.predict_udf`: a model as a column expression in a query of one's own."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import places
import pytest

import gristmill as gm
from gristmill.spark import predict_udf
from snippets import block

pytestmark = pytest.mark.leaves_children  # Spark's own


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    """The session of this process."""
    from pyspark.sql import SparkSession

    with places.started("spark"):
        yield SparkSession.builder.getOrCreate()


@pytest.fixture(params=["arrow", "pandas"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As in Spark 4.1 and later, and as before it, where user-defined functions over Arrow arrays are not there."""
    import pyspark.sql.functions as functions

    if request.param == "pandas":
        monkeypatch.delattr(functions, "arrow_udf")
    return str(request.param)


class Scorer:
    """Two columns of one; fails on 13, and says which process built it."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import os

        if (batch["x"] == 13).any():
            raise ValueError("unlucky")
        return {"y": batch["x"] * self.by, "pid": np.full(len(batch["x"]), os.getpid())}


@pytest.mark.long
def test_texts_to_vectors(spark: Any, minilm_onnx: Path) -> None:
    """The vectors of a job, null where the text is null, in a column that is named by the model's own."""
    texts = [None if n % 7 == 3 else f"a review of film {n}, " * (1 + n % 5) for n in range(60)]
    model = gm.TextEmbedder(str(minilm_onnx), text="body")
    rows = spark.createDataFrame(list(enumerate(texts)), "id int, body string").repartition(3)
    got = {r.id: r.embedding for r in rows.select("id", predict_udf(model)()).collect()}
    wanted = gm.embed(
        [{"id": n, "body": t} for n, t in enumerate(texts) if t], text="body", model=str(minilm_onnx), workers=0
    )
    assert sorted(n for n in got if got[n] is None) == list(range(3, 60, 7))
    vectors = {row["id"]: row["embedding"] for row in wanted.to_pylist()}
    assert all(np.allclose(got[n], vectors[n], atol=1e-5) for n in vectors)


@pytest.mark.few(1)
def test_a_struct_of_several_columns(spark: Any, kind: str) -> None:
    """Columns by name and as expressions; a class is built once a Python worker; rows that fail are null on request."""
    from pyspark.sql import functions as f

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 10)
    score = predict_udf(gm.model(Scorer, by=2.0, returns={"y": "float64", "pid": "int64"}), on_error="null")
    rows = spark.range(100).repartition(2).withColumn("p", score(x=f.col("id") + 1)).select("id", "p.y", "p.pid")
    found = {r.id: r.y for r in rows.collect()}
    assert found.pop(12) is None
    assert found == {n: 2.0 * (n + 1) for n in range(100) if n != 12}
    assert len({r.pid for r in rows.collect() if r.pid is not None}) <= 2
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def test_a_model_that_is_made_anew_is_another_one(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's Python workers go on from query to query: neither old weights nor an old module answer for new ones."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "anew.py"
    module.write_text(
        "class Scorer:\n    def __init__(self, path):\n        self.w = float(open(path).read())\n"
        "    def __call__(self, batch):\n        return {'y': batch['id'] * self.w}\n"
    )
    weights = tmp_path / "w.txt"
    scorer = importlib.import_module("anew").Scorer

    def answers() -> set[float]:
        score = predict_udf(gm.model(scorer, path=str(weights), returns={"y": "float64"}))
        rows = spark.range(1, 40).repartition(4)
        return {r.y / r.id for r in rows.select("id", score("id").alias("y")).collect()}

    for by in (2.0, 3.0):
        weights.write_text(str(by))
        assert answers() == {by}
    module.write_text(module.read_text().replace("* self.w", "* self.w * 10"))
    scorer = importlib.reload(importlib.import_module("anew")).Scorer
    with pytest.raises(Exception, match=r"anew\.py has changed since this Python worker of Spark imported it"):
        answers()


@pytest.mark.long
def test_what_fails_the_query(spark: Any) -> None:
    """A row that raises, by default, with its own error; a null where that was said; a wrong number of rows always."""
    from pyspark.errors import PythonException

    rows = spark.range(20).selectExpr("double(id) AS x")
    returns = {"y": "float64", "pid": "int64"}
    with pytest.raises(PythonException, match="ValueError: unlucky"):
        rows.select(predict_udf(gm.model(Scorer, by=2.0, returns=returns))("x")).collect()
    short = gm.model(too_few, returns={"y": "float64"})
    with pytest.raises(PythonException, match="was given 20 rows and returned 19"):
        rows.repartition(1).select(predict_udf(short, on_error="null")("x")).collect()


def too_few(batch: dict[str, Any]) -> dict[str, Any]:
    """One row less than it was given."""
    return {"y": batch["x"][1:]}


@pytest.mark.long
def test_a_torchscript_file_s_types_are_said(spark: Any, tmp_path: Path) -> None:
    """What such a file returns only a run tells: the error says what to write, and that works."""
    torch = pytest.importorskip("torch")
    path = str(tmp_path / "m.pt")
    torch.jit.save(torch.jit.trace(torch.nn.Flatten(0), torch.zeros(3, 1)), path)
    model = gm.TorchScriptModel(path, features=("x",), output="y")
    with pytest.raises(gm.BadModel) as told:
        predict_udf(model)
    assert 'predict_udf(model, returns={"y": "list<float32>"})' in str(told.value)
    rows = spark.range(20).selectExpr("double(id) AS x")
    same = predict_udf(model, returns={"y": "float64"})
    assert {r.x: r.y for r in rows.select("x", same()).collect()} == {float(n): float(n) for n in range(20)}


def test_what_cannot_be(spark: Any, minilm_onnx: Path) -> None:
    """Told where the expression is made: no types, columns that the model does not read, an unknown policy."""
    with pytest.raises(gm.BadModel, match="returns="):
        predict_udf(too_few)
    embed = predict_udf(gm.TextEmbedder(str(minilm_onnx), text="body"))
    with pytest.raises(gm.BadJob, match="was given 2 columns, but it reads body"):
        embed("a", "b")
    with pytest.raises(gm.BadJob, match="on_null is 'drop'"):
        predict_udf(too_few, on_null="drop")  # type: ignore[arg-type]


@pytest.mark.long
def test_the_column_expression_of_the_documentation(
    spark: Any, minilm_int8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snippet of docs/clusters.md, on a table of that name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "minilm").symlink_to(minilm_int8)
    spark.createDataFrame([(1, "a film"), (2, "a play")], "id int, body string").createOrReplaceTempView("reviews")
    text = block("docs/clusters.md", "predict_udf").replace('"models/', f'"{tmp_path}/models/')
    exec(text.replace('"vectors/"', f'"{tmp_path}/vectors/"'), {"gm": gm, "spark": spark})
    rows = spark.read.parquet(f"{tmp_path}/vectors/").collect()
    assert sorted((r.id, len(r.vector)) for r in rows) == [(1, 384), (2, 384)]

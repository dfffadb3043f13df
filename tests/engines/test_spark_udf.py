"""`gristmill.spark.predict_udf`: a model as a column expression in a query of one's own."""

from __future__ import annotations

import importlib
import json
import re
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
@pytest.mark.parametrize(
    ("layers", "returns"),
    [((1,), '{"y": "float32"}'), ((3,), '{"y": "list<float32>"}'), ((1, "flat"), '{"y": "float32"}')],
)
def test_a_torchscript_file_s_types_are_said(spark: Any, tmp_path: Path, layers: tuple[Any, ...], returns: str) -> None:
    """What such a file returns only a run tells: the error says what to write, which works."""
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(2, layers[0]), *[torch.nn.Flatten(0) for _ in layers[1:]])
    path = str(tmp_path / "m.pt")
    torch.jit.script(net).save(path)
    model = gm.TorchScriptModel(path, features=("a", "b"), output="y")
    with pytest.raises(gm.BadModel) as told:
        predict_udf(model)
    assert f"predict_udf(model, returns={returns})" in str(told.value)
    rows = spark.range(20).selectExpr("double(id) AS a", "float(-id) AS b")
    found = {r.a: r.y for r in rows.select("a", predict_udf(model, returns=json.loads(returns))()).collect()}
    with torch.inference_mode():
        wanted = {float(n): net(torch.tensor([[n, -n]], dtype=torch.float32)).reshape(-1) for n in range(20)}
    assert all(np.allclose(found[n], wanted[n], atol=1e-5) for n in wanted) and len(found) == 20
    assert all((np.ndim(v) == 1) == ("list" in returns) for v in found.values())
    other = {"y": "list<float32>" if returns == '{"y": "float32"}' else "float32"}
    with pytest.raises(Exception, match=re.escape(f"call predict_udf with returns={returns}, not")):
        rows.select(predict_udf(model, returns=other)()).collect()


@pytest.mark.parametrize("method", ["predict", "predict_proba", "of texts"])
def test_a_scikit_learn_file_s_types_are_said(tmp_path: Path, method: str) -> None:
    """Likewise of numbers and of text."""
    linear = pytest.importorskip("sklearn.linear_model")
    pipeline, text = pytest.importorskip("sklearn.pipeline"), pytest.importorskip("sklearn.feature_extraction.text")
    skops = pytest.importorskip("skops.io")
    fitted = linear.LogisticRegression().fit(np.array([[0.0, 1.0], [1.0, 0.0]]), [0, 1])
    if method == "of texts":
        fitted = pipeline.make_pipeline(text.TfidfVectorizer(), linear.LogisticRegression()).fit(
            ["good film", "bad film"], ["good", "bad"]
        )
    skops.dump(fitted, tmp_path / "m.skops")
    features, asked = (["t"], "predict") if method == "of texts" else (["a", "b"], method)
    with pytest.raises(gm.BadModel) as told:
        predict_udf(gm.SklearnModel(str(tmp_path / "m.skops"), features=features, method=asked))
    wanted = {"predict": '"int64"', "predict_proba": '"list<float64>"', "of texts": '"string"'}[method]
    assert f": {wanted}}})" in str(told.value) and "rows of zeros" in str(told.value)


def test_what_cannot_be(spark: Any, minilm_onnx: Path) -> None:
    """Told where the expression is made: no types, columns that the model does not read, an unknown policy."""
    with pytest.raises(gm.BadModel, match=r'returns=\{"output": "float32"\}\), or .*"list<float32>"'):
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

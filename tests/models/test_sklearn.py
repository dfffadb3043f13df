"""scikit-learn estimators over feature columns."""

from __future__ import annotations

import hashlib
import pickle

import joblib
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, KBinsDiscretizer, OneHotEncoder, OrdinalEncoder, StandardScaler

import gristmill as gm
import kit
from gristmill.errors import BadModel
from gristmill.job.specs import SklearnModel, TorchScriptModel
from gristmill.models import kinds
from gristmill.models.contract import Place

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame({"a": RNG.random(200), "b": RNG.random(200), "c": RNG.choice(["x", "y"], 200)})
TARGET = np.where(FRAME.a + FRAME.b > 1, "high", "low")


def dump(estimator, path):
    """Saves with joblib; gives the options that allow it."""
    joblib.dump(estimator, path)
    return {"model": str(path), "allow_pickle": True, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def run(spec, table):
    description = kinds.describe(spec, table.schema)
    model = kinds.open(spec, Place(threads=1))
    prepared = model.prepare(table)
    refused = [r.row for r in prepared.refused]
    index = RNG.permutation([i for i in range(table.num_rows) if i not in refused])
    output = model.predict(prepared, index)
    model.close()
    assert tuple(output.column_names) == description.outputs
    return output.take(np.argsort(index)), refused


def table(frame=FRAME):
    return pa.Table.from_pandas(frame, preserve_index=False)


def test_the_probability_of_one_class_alone(tmp_path):
    """`label` names it, as it is or as text; what is none of the classes, or of no probability, is told with them."""
    numbered = np.where(TARGET == "high", 1, 0)
    yes, floats = numbered == 1, numbered.astype(float)
    for target, label, place in (
        (TARGET, "low", 1), (numbered, 1, 1), (numbered, "0", 0), (numbered, 1.0, 1), (yes, True, 1), (yes, "False", 0),
        (floats, 1.0, 1), (floats, "1.0", 1), (floats, 0, 0),
    ):  # fmt: skip
        estimator = LogisticRegression().fit(FRAME[["a", "b"]], target)
        options = dump(estimator, tmp_path / "m.joblib")
        output, _ = run(SklearnModel(**options, method="predict_proba", label=label), table())
        assert output.column_names == ["probability"]
        assert output["probability"].to_numpy() == pytest.approx(estimator.predict_proba(FRAME[["a", "b"]])[:, place])
    options = dump(LogisticRegression().fit(FRAME[["a", "b"]], numbered), tmp_path / "m.joblib")
    with pytest.raises(BadModel, match="label is 2, but its classes are 0, 1"):
        kinds.describe(SklearnModel(**options, method="predict_proba", label=2), table().schema)
    with pytest.raises(BadModel, match="label is for predict_proba, but method is 'predict'"):
        kinds.describe(SklearnModel(**options, label=1), table().schema)


@pytest.mark.parametrize("kind", [OneHotEncoder, OrdinalEncoder])
def test_an_encoder_takes_texts_by_itself(tmp_path, kind):
    """It says of itself that its columns may be categories."""
    texts = FRAME[["c"]].assign(d=[f"v{n % 3}" for n in range(len(FRAME))])
    encoder = kind(**({"sparse_output": False} if kind is OneHotEncoder else {})).fit(texts)
    output, _ = run(SklearnModel(**dump(encoder, tmp_path / "e.joblib"), method="transform"), table(texts))
    assert np.array_equal(np.stack(output["transformed"].to_numpy(zero_copy_only=False)), encoder.transform(texts))


def test_predict_in_python(tmp_path):
    """Rows of a data frame get their predictions, by the suffix of the model's file; wrong options are told."""
    import skops.io

    estimator = LogisticRegression().fit(FRAME[["a", "b"]], TARGET)
    skops.io.dump(estimator, path := str(tmp_path / "m.skops"))
    found = gm.predict(FRAME, model=path, method="predict_proba", label="high", keep="c", workers=0)
    assert found["probability"].to_numpy() == pytest.approx(estimator.predict_proba(FRAME[["a", "b"]])[:, 0])
    assert found["c"].to_pylist() == FRAME["c"].tolist()
    array = LogisticRegression().fit(FRAME[["a"]].to_numpy(), TARGET)
    skops.io.dump(array, plain := str(tmp_path / "a.skops"))
    report = gm.predict(FRAME.rename(columns={"a": "age"}), tmp_path / "out", model=plain, features="age", workers=0)
    assert report.rows_ok == 200
    with pytest.raises(gm.BadJob, match="OnnxModel has no option 'method'"):
        gm.predict(FRAME, model="m.onnx", method="predict")
    with pytest.raises(gm.BadJob, match=r"model m.bin: not the suffix of a saved model: it must be one of .onnx"):
        gm.predict(FRAME, model="m.bin")


@pytest.mark.parametrize("method", ["predict", "predict_proba", "decision_function"])
def test_methods_equal_the_estimator(tmp_path, method):
    """Every method gives what the estimator gives; several values a row are a fixed-size list with class names."""
    estimator = LogisticRegression().fit(FRAME[["a", "b"]], TARGET)
    options = dump(estimator, tmp_path / "m.joblib")
    output, _ = run(SklearnModel(**options, method=method), table())
    wanted = getattr(estimator, method)(FRAME[["a", "b"]])
    name = {"predict": "prediction", "predict_proba": "probabilities", "decision_function": "decision"}[method]
    assert output.column_names == [name]
    if method == "predict":
        assert output[name].to_pylist() == wanted.tolist()
    else:
        assert np.allclose(np.array(output[name].to_pylist()), wanted)
        assert output.schema.field(name).metadata[b"labels"] == b'["high", "low"]'


def test_features_go_in_by_name_whatever_their_order(tmp_path):
    """The source's columns are taken in the order of training."""
    estimator = LinearRegression().fit(FRAME[["a", "b"]], FRAME.a - FRAME.b)
    options = dump(estimator, tmp_path / "m.joblib")
    output, _ = run(SklearnModel(**options, features=("b", "a"), output="y"), table(FRAME[["c", "b", "a"]]))
    assert np.allclose(output["y"].to_numpy(), FRAME.a - FRAME.b)


def test_missing_values_are_refused_unless_the_model_takes_them(tmp_path):
    """A null is refused for a linear model, and passed on to an imputer or to boosted trees, which know what to do."""
    holes = FRAME[["a", "b"]].copy()
    holes.loc[3, "a"] = np.nan
    linear = dump(LogisticRegression().fit(FRAME[["a", "b"]], TARGET), tmp_path / "linear.joblib")
    output, refused = run(SklearnModel(**linear), table(holes))
    assert refused == [3]
    assert output.num_rows == 199
    for estimator in (HistGradientBoostingClassifier(max_iter=5), make_pipeline(SimpleImputer(), LogisticRegression())):
        estimator.fit(holes, TARGET)
        output, refused = run(SklearnModel(**dump(estimator, tmp_path / "m.joblib")), table(holes))
        assert refused == []
        assert output["prediction"].to_pylist() == estimator.predict(holes).tolist()


@pytest.mark.parametrize("search", [False, True])
def test_a_scaler_before_a_model_that_takes_no_missing_values(tmp_path, search):
    """A pipeline says of itself what its first step says, and a scaler passes NaN on: nulls are refused as nulls, and
    on_null has its effect. So does a search that has found a pipeline.
    """
    holes = FRAME[["a", "b"]].assign(id=range(len(FRAME)))
    holes.loc[[3, 50], "a"] = np.nan
    made = make_pipeline(StandardScaler(), LogisticRegression())
    made = GridSearchCV(made, {"logisticregression__C": [1.0]}, cv=2) if search else made
    model = SklearnModel(**dump(made.fit(FRAME[["a", "b"]], TARGET), tmp_path / "m.joblib"))
    rows = pa.Table.from_pandas(holes, preserve_index=False)
    for on_null, left in ((None, ["NullFeature"] * 2), ("skip", [])):
        sink = str(tmp_path / str(on_null))
        job = gm.Job(rows, model, gm.sink(sink, keep=["id"]), on_null=on_null, workers=0, gates={"min_ok": 0.9})
        report = job.run()
        assert report.rows_ok == 198 and gm.dead(sink)["error"].to_pylist() == left
    holes.to_json(lines := str(tmp_path / "rows.jsonl"), orient="records", lines=True)  # of which no nulls are known
    with pytest.raises(gm.GateFailed, match=r"with on_null skip .*, or given to .* with on_null keep; that"):
        gm.Job(lines, model, gm.sink(str(tmp_path / "gated")), workers=0, gates={"min_ok": 1}).run()


def test_columns_that_are_no_numbers_reach_a_column_transformer(tmp_path):
    """A pipeline that encodes text columns gets them."""
    encode = make_column_transformer((OneHotEncoder(), ["c"]), (StandardScaler(), ["a", "b"]))
    estimator = make_pipeline(encode, LogisticRegression()).fit(FRAME, TARGET)
    output, _ = run(SklearnModel(**dump(estimator, tmp_path / "m.joblib")), table())
    assert output["prediction"].to_pylist() == estimator.predict(FRAME).tolist()


def test_transform_of_a_pipeline(tmp_path):
    """transform gives vectors."""
    scaler = StandardScaler().fit(FRAME[["a", "b"]].to_numpy())
    output, _ = run(
        SklearnModel(**dump(scaler, tmp_path / "m.joblib"), features=("a", "b"), method="transform"), table()
    )
    assert np.allclose(np.array(output["transformed"].to_pylist()), scaler.transform(FRAME[["a", "b"]].to_numpy()))


def test_flights(tmp_path):
    """Boosted trees on real rows with real nulls: the same predictions as the estimator's own, in the rows' order."""
    flights = kit.flights().slice(0, 20_000)
    features = ["dep_delay", "distance", "hour", "month", "air_time"]
    frame = flights.select(features).to_pandas().astype(float)
    late = flights["arr_delay"].to_pandas().fillna(0) > 15
    estimator = HistGradientBoostingClassifier(max_iter=20, random_state=0).fit(frame, late)
    spec = SklearnModel(**dump(estimator, tmp_path / "m.joblib"), method="predict_proba", output="p")
    output, refused = run(spec, flights)
    assert refused == []
    assert np.allclose(np.array(output["p"].to_pylist()), estimator.predict_proba(frame))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"features": ("a", "d")}, "was fitted with a, b, but features= lacks b and also has d"),
        ({"method": "score"}, "one of predict, predict_proba"),
        ({"method": "transform"}, "has no method 'transform'"),
        ({"allow_pickle": False}, "opening a pickle runs whatever code is in it"),
        ({"sha256": None}, "opening a pickle runs whatever code is in it"),
        ({"sha256": "0" * 64}, "sha256 is pinned to 000"),
        ({"model": "missing.joblib"}, "there is no such file"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_runs(tmp_path, options, says):
    """Wrong features, methods, missing permission and digests are one line."""
    estimator = LogisticRegression().fit(FRAME[["a", "b"]], TARGET)
    spec = SklearnModel(**{**dump(estimator, tmp_path / "m.joblib"), **options})
    with pytest.raises(BadModel) as caught:
        kinds.describe(spec, table().schema)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_source_columns_are_compared_with_the_fitted_ones(tmp_path):
    """A feature that the source lacks is named, with a suggestion; so is one that is no number."""
    estimator = LogisticRegression().fit(FRAME[["a", "b"]].rename(columns={"a": "height", "b": "width"}), TARGET)
    spec = SklearnModel(**dump(estimator, tmp_path / "m.joblib"))
    with pytest.raises(BadModel, match=r"was fitted with column 'height'.*did you mean 'heigth'"):
        kinds.describe(spec, pa.schema({"heigth": pa.float64(), "width": pa.float64()}))
    with pytest.raises(
        BadModel, match=r"'height' as a number, but it is string: .*--set source\.types\.height=float64"
    ):
        kinds.describe(spec, pa.schema({"height": pa.string(), "width": pa.float64()}))
    unnamed = LogisticRegression().fit(FRAME[["a", "b"]].to_numpy(), TARGET)
    options = dump(unnamed, tmp_path / "u.joblib")
    with pytest.raises(BadModel, match="without names on 2 features"):
        kinds.describe(SklearnModel(**options), None)
    with pytest.raises(BadModel, match="fitted on 2 features, but features= names 1"):
        kinds.describe(SklearnModel(**options, features=("a",)), None)
    with pytest.raises(BadModel, match=r"is given by features= column 'c', which the source does not have"):
        kinds.describe(SklearnModel(**options, features=("a", "c")), table().select(["a"]).schema)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_pickle_is_not_opened_unless_it_is_the_pinned_one(tmp_path):
    """Nothing in a pickle runs without allow_pickle, and nothing of another file than the pinned one."""
    path = tmp_path / "bomb.pkl"
    path.write_bytes(pickle.dumps(Bomb(tmp_path / "burst")))
    for options in ({}, {"allow_pickle": True}, {"allow_pickle": True, "sha256": "0" * 64}):
        for step in (lambda s: kinds.describe(s, None), lambda s: kinds.open(s, Place())):
            with pytest.raises(BadModel):
                step(SklearnModel(str(path), features=("a",), **options))
    assert not (tmp_path / "burst").exists()


def test_skops_files(tmp_path):
    """skops files need no permission, except for parts that skops itself does not trust."""
    skops_io = pytest.importorskip("skops.io")
    linear = LogisticRegression().fit(FRAME[["a", "b"]], TARGET)
    skops_io.dump(linear, tmp_path / "linear.skops")
    output, _ = run(SklearnModel(str(tmp_path / "linear.skops")), table())
    assert output["prediction"].to_pylist() == linear.predict(FRAME[["a", "b"]]).tolist()
    coded = make_pipeline(OneHotEncoder(dtype=np.dtype("float32")), LogisticRegression()).fit(FRAME[["a", "b"]], TARGET)
    skops_io.dump(coded, tmp_path / "coded.skops")
    assert skops_io.get_untrusted_types(file=tmp_path / "coded.skops") == ["numpy.dtype"]
    output, _ = run(SklearnModel(str(tmp_path / "coded.skops")), table())
    assert output["prediction"].to_pylist() == coded.predict(FRAME[["a", "b"]]).tolist()
    trees = HistGradientBoostingClassifier(max_iter=3).fit(FRAME[["a", "b"]], TARGET)
    path = tmp_path / "trees.skops"
    skops_io.dump(trees, path)
    with pytest.raises(BadModel, match="does not trust by default"):
        kinds.describe(SklearnModel(str(path)), None)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    output, _ = run(SklearnModel(str(path), allow_pickle=True, sha256=digest), table())
    assert output["prediction"].to_pylist() == trees.predict(FRAME[["a", "b"]]).tolist()


# ---------------------------------------------------------------- a row is given as it is, whatever is beside it

BIG = 2**53
IDS = [BIG + 1, BIG + 2, 10115, 20095]
AS_TEXT = FunctionTransformer(pd.DataFrame.astype, kw_args={"dtype": str})
BY_VALUE = [OneHotEncoder(handle_unknown="ignore")]
BY_TEXT = [AS_TEXT, *BY_VALUE]


def numbers_of(values, kind):
    return pa.array(values, pa.int64()).cast(kind)


def each(spec, rows):
    """What each row gets in a window of its own; None where it is refused."""
    model = kinds.open(spec, Place(threads=1))
    prepared = [model.prepare(rows.slice(i, 1)) for i in range(rows.num_rows)]
    found = [None if p.refused else model.predict(p, np.array([0]))["prediction"][0].as_py() for p in prepared]
    model.close()
    return [None if v is None else round(v, 6) for v in found]


@pytest.mark.parametrize(
    ("steps", "beside", "named"),
    [(BY_VALUE, [], False), (BY_VALUE, [], True), (BY_VALUE, ["c"], True), (BY_TEXT, [], True), (BY_TEXT, ["c"], True)],
)
def test_whole_numbers_reach_an_estimator_as_those_it_was_fitted_with(tmp_path, steps, beside, named):
    """Large ids are told apart, and codes are read as text without a fraction, alone and beside a row with a null."""
    frame = pd.DataFrame({"id": IDS, "c": list("aaaa")})[["id", *beside]]
    target = [1.0, 2.0, 3.0, 4.0]
    estimator = make_pipeline(*steps, LinearRegression()).fit(frame if named else frame.to_numpy(), target)
    spec = SklearnModel(**dump(estimator, tmp_path / "m.joblib"), features=("id", *beside))
    rows = pa.table({"id": pa.array([*IDS, None], pa.int64()), "c": list("aaaaa")})
    output, refused = run(spec, rows)
    assert refused == []
    assert output["prediction"].to_pylist()[:4] == pytest.approx(target)
    assert [round(v, 6) for v in output["prediction"].to_pylist()] == each(spec, rows)


@pytest.mark.parametrize("kind", [pa.int64(), pa.int8(), pa.bool_(), pa.decimal128(21, 2), pa.float32()], ids=str)
@pytest.mark.parametrize("beside", [[], ["c"]], ids=["numbers", "text beside"])
def test_a_rows_answer_is_that_which_it_gets_alone(tmp_path, kind, beside):
    """Nulls and NaN in some rows change nothing for others, whether they are scored or not."""
    plain = [0, 1, 1, 0] if pa.types.is_boolean(kind) else [0, 1, 2, 3]
    frame = pa.table({"x": numbers_of(plain, kind), "y": [1.0, 2.0, 3.0, 4.0], "c": list("abab")}).to_pandas()
    columns = [(make_pipeline(FunctionTransformer(pd.DataFrame.astype, kw_args={"dtype": str}), *BY_VALUE), ["x"])]
    columns += [(OneHotEncoder(handle_unknown="ignore"), beside)] * bool(beside)
    given = numbers_of([*plain, None, plain[1]], kind)
    rows = pa.table({"x": given, "y": [*frame["y"], 1.0, float("nan")], "c": list("ababab")})
    for scored, numbers in ((True, SimpleImputer()), (False, "passthrough")):
        encode = make_column_transformer(*columns, (numbers, ["y"]), sparse_threshold=0)
        estimator = make_pipeline(encode, LinearRegression()).fit(frame[["x", "y", *beside]], [1.0, 5.0, 2.0, 7.0])
        spec = SklearnModel(**dump(estimator, tmp_path / "m.joblib"))
        output, refused = run(spec, rows)
        assert refused == ([] if scored else [4, 5])
        alone = each(spec, rows)
        assert [i for i, v in enumerate(alone) if v is None] == refused
        assert [round(v, 6) for v in output["prediction"].to_pylist()] == [v for v in alone if v is not None]


def test_a_large_whole_number_beside_a_null_is_that_rows_dead_letter(tmp_path):
    """A row with a null has floats for whole numbers: one that they cannot hold refuses its row, not the window."""
    frame = pd.DataFrame({"a": [1.0, np.nan, 3.0, 4.0], "b": [1.0, 2.0, 3.0, 4.0]})
    rows = pa.table({"a": [1, None, None, BIG + 1], "b": pa.array([1, 2, BIG + 1, 4], pa.int64())})
    for values in (frame, frame.to_numpy()):
        estimator = HistGradientBoostingClassifier(min_samples_leaf=1).fit(values, [0, 1, 0, 1])
        spec = SklearnModel(**dump(estimator, tmp_path / "m.joblib"), features=("a", "b"))
        model = kinds.open(spec, Place(threads=1))
        (refused,) = model.prepare(rows).refused
        assert (refused.row, refused.error) == (2, "OutOfRange")
        assert f"column 'b' holds {BIG + 1}, which float64 cannot hold exactly" in refused.message
        model.close()


# ---------------------------------------------------------------- nulls that parts of a pipeline take


def _mixed(fit_on: pa.Table, *, imputes: bool):
    """A pipeline whose ColumnTransformer imputes numbers and words, or words alone."""
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    words = make_pipeline(SimpleImputer(strategy="constant", fill_value="?"), OneHotEncoder(handle_unknown="ignore"))
    numbers = SimpleImputer() if imputes else "passthrough"
    parts = ColumnTransformer([("numbers", numbers, ["a", "b"]), ("words", words, ["kind"])])
    frame = fit_on.to_pandas()
    return make_pipeline(parts, LogisticRegression()).fit(frame[["a", "b", "kind"]], frame["y"])


TRAINED = pa.table({"a": [0.0, 1, 2, 3], "b": [1.0, 0, 3, 1], "kind": ["u", "v", "u", "v"], "y": [0, 1, 0, 1]})
NULLS = pa.table({"id": [0, 1, 2], "a": [1.0, None, 2.0], "b": [0.5, 1.0, None], "kind": ["u", None, "v"]})


def _job(tmp_path, estimator, **options):
    import joblib

    path = tmp_path / "model.joblib"
    joblib.dump(estimator, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    spec = SklearnModel(str(path), allow_pickle=True, sha256=digest)
    return gm.Job(NULLS, spec, gm.sink(str(tmp_path / "out"), keep=["id"]), workers=0, **options)


@pytest.mark.parametrize("on_null", [None, "keep"])
def test_fault_76_a_pipeline_that_imputes_is_asked(tmp_path, on_null):
    """Nulls that a ColumnTransformer deals with reach it: the answers are the pipeline's own, and a note says so."""
    estimator = _mixed(TRAINED, imputes=True)
    report = _job(tmp_path, estimator, on_null=on_null).run()
    found = report.read().to_table().to_pydict()
    assert found["prediction"] == estimator.predict(NULLS.to_pandas()[["a", "b", "kind"]]).tolist()
    assert (found["id"], report.rows_dead) == ([0, 1, 2], 0)
    assert any("it scored a row of them" in note for note in report.notes)


@pytest.mark.parametrize(("on_null", "errors"), [("dead", ["NullFeature"] * 2), ("keep", ["ValueError"] * 2)])
def test_fault_76_no_row_is_ok_without_an_answer(tmp_path, on_null, errors):
    """Where the pipeline fails on nulls, `keep` still gives it the rows, and their failures are dead letters."""
    report = _job(tmp_path, _mixed(TRAINED, imputes=False), on_null=on_null, gates={"min_ok": 0.1}).run()
    assert report.read().to_table()["id"].to_pylist() == [0]
    assert report.dead()["error"].to_pylist() == errors
    assert (report.rows_ok, report.rows_dead) == (1, 2)


def test_fault_76_nulls_kept_reach_graphs_too(tmp_path):
    """TorchScript over floats is given NaN under `keep`: a NaN answer is a dead letter, one that it replaces is not."""
    import torch

    class Filled(torch.nn.Module):
        def forward(self, x):
            return torch.nan_to_num(x[:, 0], nan=-1.0) + x[:, 1]

    torch.jit.script(Filled()).save(str(tmp_path / "filled.pt"))
    job = gm.Job(
        NULLS, TorchScriptModel(str(tmp_path / "filled.pt"), features=("a", "b"), output="y"),
        gm.sink(str(tmp_path / "out"), keep=["id"]), workers=0, on_null="keep", gates={"min_ok": 0.1},
    )  # fmt: skip
    report = job.run()
    assert report.read().to_table().to_pydict() == {"id": [0, 1], "y": [1.5, 0.0]}
    assert report.dead()["error"].to_pylist() == ["NaN"]


@pytest.mark.parametrize("rows", [1, 60])
def test_a_text_pipeline_is_given_its_texts(tmp_path, rows):
    """A vectorizer takes one text a row, also of one row; other columns, and a null, are told or dead."""
    texts = [f"{'good' if i % 2 else 'bad'} film {i}" for i in range(60)]
    model = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(texts, np.arange(60) % 2)
    saved = dump(model, tmp_path / "m.joblib")
    spec = SklearnModel(**saved, method="predict_proba", features=["t"])
    source = pa.table({"t": [*texts[: rows - 1], texts[7]], "n": range(rows)})
    found = run(spec, source)[0]["probabilities"].to_pylist()
    np.testing.assert_allclose(found, model.predict_proba(source["t"].to_pylist()), atol=1e-12)
    with pytest.raises(BadModel, match="one text a row"):
        run(SklearnModel(**saved, features=["t", "n"]), source)
    assert run(spec, pa.table({"t": ["good film", None, "bad film"]}))[1] == [1]


@pytest.mark.parametrize("kind", ["sparse", "frame"])
def test_transforms_that_give_other_than_arrays(tmp_path, kind):
    """Sparse matrices and frames (set_output) are rows of numbers like arrays."""
    model = KBinsDiscretizer(3, encode="onehot") if kind == "sparse" else StandardScaler()
    x = np.arange(40.0).reshape(20, 2)
    model.fit(x)
    if kind == "frame":
        model.set_output(transform="pandas")
    spec = SklearnModel(**dump(model, tmp_path / "m.joblib"), method="transform", features=["a", "b"])
    found = run(spec, pa.table({"a": x[:, 0], "b": x[:, 1]}))[0]["transformed"].to_pylist()
    wanted = model.transform(x)
    np.testing.assert_allclose(found, wanted.toarray() if kind == "sparse" else np.asarray(wanted))

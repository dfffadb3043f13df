"""ONNX graphs over feature columns, and the signature reader against onnx itself."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import onnx
import onnxruntime as ort
import pyarrow as pa
import pytest
from onnx import TensorProto, helper, numpy_helper

import kit
from gristmill.errors import BadModel
from gristmill.job.specs import OnnxModel
from gristmill.models import kinds
from gristmill.models.contract import Place
from gristmill.models.onnx_graph import read_graph

RNG = np.random.default_rng(0)


def save(path, nodes, inputs, outputs, weights=()):
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializer=list(weights))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return path


def info(name, dtype, shape):
    return helper.make_tensor_value_info(name, dtype, shape)


@pytest.fixture
def linear(tmp_path):
    """x [n, 3] → y [n, 2] and total [n, 1]."""
    weight = helper.make_tensor("w", TensorProto.FLOAT, [3, 2], RNG.random(6).astype(np.float32))
    ones = helper.make_tensor("o", TensorProto.FLOAT, [3, 1], np.ones(3, np.float32))
    return save(
        tmp_path / "linear.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("MatMul", ["x", "o"], ["total"])],
        [info("x", TensorProto.FLOAT, ["n", 3])],
        [info("y", TensorProto.FLOAT, ["n", 2]), info("total", TensorProto.FLOAT, ["n", 1])],
        [weight, ones],
    )


@pytest.fixture
def two_inputs(tmp_path):
    """a [n] float, b [n] int64 → c = a + b."""
    return save(
        tmp_path / "two.onnx",
        [
            helper.make_node("Cast", ["b"], ["bf"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["a", "bf"], ["c"]),
        ],
        [info("a", TensorProto.FLOAT, ["n"]), info("b", TensorProto.INT64, ["n"])],
        [info("c", TensorProto.FLOAT, ["n"])],
    )


TABLE = pa.table(
    {
        "p": pa.array([1.0, 2.0, None, 4.0, float("nan")], pa.float64()),
        "q": pa.array([1, 2, 3, 4, 5], pa.int32()),
        "r": pa.array([0.5, float("inf"), 0.5, 0.5, 0.5], pa.float32()),
        "v": pa.array([[1, 2, 3]] * 5, pa.list_(pa.float32(), 3)),
        "ragged": pa.array([[1, 2, 3], [1, 2, 3], [1], [4, 5, 6], None], pa.list_(pa.float64())),
        "text": ["a"] * 5,
    }
)


def run(spec, table=TABLE, index=None):
    description = kinds.describe(kinds.resolve(spec), table.schema)
    model = kinds.open(spec, Place())
    prepared = model.prepare(table)
    refused = {r.row: r for r in prepared.refused}
    index = np.array([i for i in range(table.num_rows) if i not in refused]) if index is None else np.array(index)
    output = model.predict(prepared, index)
    assert tuple(output.column_names) == description.outputs
    if description.schema is not None:
        assert output.schema.equals(description.schema)
    return output, refused


def test_features_are_stacked_and_bad_rows_refused(linear):
    """Columns go side by side in the order given; null, NaN and infinite features are refused by column."""
    output, refused = run(OnnxModel(str(linear), features=("p", "q", "r")))
    assert sorted(refused) == [1, 2, 4]
    assert {r.kind for r in refused.values()} == {"null"}
    assert [refused[i].message for i in (1, 2, 4)] == [
        "column 'r' is NaN or infinite",
        "column 'p' is null",
        "column 'p' is NaN or infinite",
    ]
    matrix = np.array([[1, 1, 0.5], [4, 4, 0.5]], np.float32)
    wanted = ort.InferenceSession(str(linear)).run(None, {"x": matrix})
    assert np.allclose(np.array(output["y"].to_pylist()), wanted[0])
    assert output["total"].to_pylist() == [2.5, 8.5]


@pytest.mark.parametrize("kind", [pa.decimal128(10, 2), pa.decimal128(19, 2), pa.decimal256(40, 3)], ids=str)
def test_decimals_with_a_null(linear, kind):
    """As databases write them: the row with the null is refused, the others are scored."""
    values = pa.array([Decimal("1.25"), None, Decimal("2.50")], kind)
    table = pa.table({"p": values, "q": pa.array([1.0, 2.0, 3.0]), "r": pa.array([0.0, 0.0, 1.0])})
    prepared = kinds.open(kinds.resolve(OnnxModel(str(linear), features=("p", "q", "r"))), Place()).prepare(table)
    assert [(r.row, r.kind) for r in prepared.refused] == [(1, "null")]


def test_lists_fixed_and_ragged(linear):
    """A column of lists is a matrix; rows of another length are refused as invalid."""
    output, refused = run(OnnxModel(str(linear), inputs={"x": "v"}))
    assert output["total"].to_pylist() == [6] * 5
    output, refused = run(OnnxModel(str(linear), inputs={"x": "ragged"}))
    assert {i: r.kind for i, r in refused.items()} == {2: "invalid", 4: "null"}
    assert output["total"].to_pylist() == [6, 6, 15]


@pytest.fixture
def summed(tmp_path):
    """x [n, k], whatever k is → total [n]."""
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    return save(
        tmp_path / "summed.onnx",
        [helper.make_node("ReduceSum", ["x", "axes"], ["total"], keepdims=0)],
        [info("x", TensorProto.FLOAT, ["n", "k"])],
        [info("total", TensorProto.FLOAT, ["n"])],
        [axes],
    )


@pytest.mark.parametrize("first", [[1, 2], [1, 2, 3]])
@pytest.mark.parametrize("given", [{"inputs": {"x": "x"}}, {"features": ("x",)}])
def test_no_row_is_the_measure_of_others(summed, first, given):
    """Where the graph takes lists of any length each gets its own answer, whichever stands first and in any order."""
    lists = [first, *[[1, 2, 3], [4], None, [7, 8], [9], [1, None]] * 3]
    table = pa.table({"x": pa.array(lists, pa.list_(pa.float32()))})
    output, refused = run(OnnxModel(str(summed), **given), table)
    bad = {i for i, x in enumerate(lists) if x is None or None in x}
    assert set(refused) == bad
    assert output["total"].to_pylist() == [sum(x) for i, x in enumerate(lists) if i not in bad]
    index = [i for i in range(len(lists)) if i not in bad][::-1]
    output, _ = run(OnnxModel(str(summed), **given), table, index)
    assert output["total"].to_pylist() == [sum(lists[i]) for i in index]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64", "bool"])
def test_whole_numbers_do_not_wrap(tmp_path, dtype):
    """What the graph's type cannot hold is refused, by row and value; every other number arrives as it is."""
    graph_type = getattr(TensorProto, dtype.upper())
    path = save(
        tmp_path / "same.onnx",
        [helper.make_node("Identity", ["x"], ["y"])],
        [info("x", graph_type, ["n"])],
        [info("y", graph_type, ["n"])],
    )
    least, most = (0, 1) if dtype == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    for kind in (pa.int64(), pa.uint64(), pa.int16()):
        bounds = np.iinfo(kind.to_pandas_dtype())
        tried = [0, 1, -1, 255, 256, -129, 2**31, 2**32 + 5, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1]
        values = [v for v in tried if bounds.min <= v <= bounds.max]
        output, refused = run(OnnxModel(str(path)), pa.table({"x": pa.array(values, kind)}))
        kept = [v for v in values if least <= v <= most]
        assert [int(v) for v in output["y"].to_pylist()] == kept
        assert {values[i]: r.message for i, r in refused.items()} == {
            v: f"column 'x' holds {v}, which {dtype} cannot" for v in values if v not in kept
        }


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_decimals_are_the_nearest_numbers(tmp_path, dtype):
    """No other float of the graph's type is nearer."""
    number = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}[dtype]
    path = save(
        tmp_path / "same.onnx",
        [helper.make_node("Identity", ["x"], ["y"])],
        [info("x", number, ["n", 1])],
        [info("y", number, ["n", 1])],
    )
    texts = ["7", "1000", "12.5", "0.1", "1.005", "9007199254740993", "1.00048828125000000001", "16777217.000000000001"]
    values = [
        Decimal(text) for text in texts if dtype != "float16" or (len(text) != 16 and not text.startswith("16777"))
    ]
    output, refused = run(
        OnnxModel(str(path), inputs={"x": "x"}), pa.table({"x": pa.array(values, pa.decimal128(38, 20))})
    )
    found = output["y"].to_pylist()
    assert len(found) == len(values) and not refused
    of = np.dtype(dtype).type
    for value, got in zip(values, found, strict=True):
        for end in (-np.inf, np.inf):
            other = Fraction(float(np.nextafter(of(got), of(end))))
            assert abs(Fraction(float(got)) - Fraction(value)) <= abs(other - Fraction(value)), value


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64(), pa.decimal128(38, 0), pa.list_(pa.int64())], ids=str)
def test_whole_numbers_are_never_rounded(tmp_path, dtype, kind):
    """A whole number that the graph's float type cannot hold is refused, beside nulls too; fractions are rounded."""
    number = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}[dtype]
    path = save(
        tmp_path / "same.onnx",
        [helper.make_node("Identity", ["x"], ["y"])],
        [info("x", number, ["n", 1])],
        [info("y", number, ["n", 1])],
    )
    values = [0, 2**11 + 1, 2**24 + 1, 2**24, 2**53 + 1, 2**62, 2**62 + 1, 2**63 - 1, -(2**53) - 1, None]
    values = [abs(v) if kind == pa.uint64() and v is not None else v for v in values]
    given = [[v] if v is not None else None for v in values] if pa.types.is_list(kind) else values
    table = pa.table({"x": pa.array(given, kind), "id": pa.array(range(len(values)))})
    with np.errstate(over="ignore"):
        kept = [v for v in values if v is not None and np.isfinite(np.dtype(dtype).type(v)) and
                int(np.dtype(dtype).type(v)) == v]  # fmt: skip
    output, refused = run(OnnxModel(str(path), inputs={"x": "x"}), table)
    assert output["y"].to_pylist() == kept
    told = [r.message for r in refused.values() if r.error == "OutOfRange"]
    assert told == [
        f"column 'x' holds {v}, which {dtype} cannot hold exactly: if it may be rounded, cast the column to a float in "
        "a step"
        for v in values if v is not None and v not in kept
    ]  # fmt: skip
    fractions = pa.table({"x": pa.array([0.1, 1e3 + 0.3])})
    output, refused = run(OnnxModel(str(path), inputs={"x": "x"}), fractions)
    assert (output["y"].to_pylist(), refused) == (np.array([0.1, 1e3 + 0.3]).astype(dtype).tolist(), {})


def test_any_order_of_rows(linear):
    """predict answers for the rows asked for, in that order."""
    output, _ = run(OnnxModel(str(linear), inputs={"x": "ragged"}, outputs={"total": "sum"}), index=[3, 0, 1])
    assert output.to_pydict() == {"sum": [15, 6, 6]}


def test_inputs_by_name(two_inputs):
    """Without features or inputs each graph input gets the column of its name."""
    table = pa.table({"a": pa.array([0.5, 1.5]), "b": pa.array([1, 2], pa.int8())})
    output, _ = run(OnnxModel(str(two_inputs)), table)
    assert output.to_pydict() == {"c": [1.5, 3.5]}
    output, _ = run(OnnxModel(str(two_inputs), inputs={"a": "b", "b": "b"}, output="double"), table)
    assert output.to_pydict() == {"double": [2, 4]}


def test_a_graph_for_one_row(tmp_path):
    """A first axis of 1 means row by row."""
    path = save(
        tmp_path / "one.onnx",
        [helper.make_node("Neg", ["x"], ["y"])],
        [info("x", TensorProto.FLOAT, [1, 2])],
        [info("y", TensorProto.FLOAT, [1, 2])],
    )
    table = pa.table({"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]})
    output, _ = run(OnnxModel(str(path), features=("a", "b")), table)
    assert output["y"].to_pylist() == [[-1, -4], [-2, -5], [-3, -6]]


@pytest.mark.real_model
def test_magika():
    """A real model with an int32 vector in: probabilities equal onnxruntime's own."""
    data = RNG.integers(0, 256, (20, 2048), dtype=np.int32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(data.reshape(-1)), 2048)
    output, _ = run(OnnxModel(str(kit.magika_onnx()), inputs={"bytes": "content"}), pa.table({"content": column}))
    wanted = ort.InferenceSession(str(kit.magika_onnx())).run(None, {"bytes": data})[0]
    found = output["target_label"].combine_chunks().flatten().to_numpy().reshape(20, -1)
    assert np.abs(found - wanted).max() < 1e-6


@pytest.mark.parametrize(
    ("fixture", "options", "says"),
    [
        ("linear", {}, "takes 3 values per row, and no column has its name: give features="),
        ("linear", {"features": ("p", "q")}, "takes 3 values per row, but p, q give 2"),
        ("linear", {"features": ("p", "q", "text")}, "column 'text' as a number, but it is string"),
        ("linear", {"features": ("p", "q", "t")}, "reads column 't', which the source does not have"),
        ("linear", {"inputs": {"X": "v"}}, "did you mean 'x'?"),
        ("linear", {"inputs": {"x": "v"}, "features": ("p",)}, "both given"),
        ("linear", {"inputs": {"x": "v"}, "output": "z"}, "renames one column, but there are y, total"),
        ("linear", {"inputs": {"x": "v"}, "outputs": {"z": "z"}}, "the model has y, total"),
        ("linear", {"inputs": {"x": "v"}, "sha256": "ab"}, "sha256 is pinned to ab"),
        ("two_inputs", {}, "the source has no column for the graph's a, b"),
        ("two_inputs", {"features": ("p", "q")}, "features= is for a graph with one input"),
        ("two_inputs", {"inputs": {"a": "p"}}, "no column for the graph's b"),
        (
            "two_inputs",
            {"inputs": {"a": "q", "b": "p"}},
            "takes int64, but column 'p' is double: numbers would be truncated",
        ),
        ("two_inputs", {"inputs": {"a": "v", "b": "q"}}, "takes one value per row, but column 'v' is"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_runs(fixture, options, says, request):
    """Inputs, ranks, dtypes and names are compared with the source's columns, in one line."""
    path = request.getfixturevalue(fixture)
    with pytest.raises(BadModel) as caught:
        kinds.describe(OnnxModel(str(path), **options), TABLE.schema)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.real_model
def test_graphs_with_other_inputs_are_refused():
    """A graph with a scalar or a state among its inputs says which."""
    schema = pa.schema({"chunk": pa.list_(pa.float32(), 512)})
    spec = OnnxModel(str(kit.silero_onnx()), inputs={"input": "chunk", "state": "chunk", "sr": "chunk"})
    with pytest.raises(BadModel, match=r"'state' takes exactly 2 rows"):
        kinds.describe(spec, schema)


def test_files_that_are_no_models(tmp_path):
    """Missing, empty, cut and foreign files are named as such."""
    (tmp_path / "empty.onnx").write_bytes(b"")
    (tmp_path / "text.onnx").write_text("this is text, not protobuf")
    (tmp_path / "cut.onnx").write_bytes(kit.magika_onnx().read_bytes()[:1000])
    for name in ("empty", "text", "cut"):
        with pytest.raises(BadModel, match="is not an ONNX model"):
            kinds.describe(OnnxModel(str(tmp_path / f"{name}.onnx")), None)
    with pytest.raises(BadModel, match="did you mean"):
        kinds.describe(OnnxModel(str(tmp_path / "emty.onnx")), None)
    with pytest.raises(BadModel, match=r"this is a folder, but a file \(ONNX\) is needed.* it holds cut.onnx"):
        kinds.describe(OnnxModel(str(tmp_path)), None)


@pytest.mark.real_model
@pytest.mark.parametrize(
    "name", ["minilm_onnx", "minilm_int8", "magika_onnx", "silero_onnx", "sentiment_classifier_onnx"]
)
def test_signatures_are_those_that_onnx_reads(name):
    """Inputs, outputs and operators of real files, read without loading them, are what the onnx package says."""
    path = getattr(kit, name)()
    path = path / "onnx" / "model.onnx" if path.is_dir() else path
    found = read_graph(path)
    wanted = onnx.load(str(path), load_external_data=False).graph
    weights = {w.name for w in wanted.initializer}
    assert [v.name for v in found.inputs] == [v.name for v in wanted.input if v.name not in weights]
    for mine, theirs in zip(found.outputs, wanted.output, strict=True):
        kind = theirs.type.tensor_type
        assert mine.name == theirs.name
        assert np.dtype(mine.dtype) == helper.tensor_dtype_to_np_dtype(kind.elem_type)
        assert mine.shape == tuple(d.dim_value or None for d in kind.shape.dim)
    assert found.operators == {n.op_type for n in wanted.node}
    assert found.precision == ("int8" if name == "minilm_int8" else "float32")


def test_external_weights_are_part_of_the_digest(tmp_path):
    """Weights in a file of their own are found, digested, and missed if they are gone."""
    values = RNG.random((64, 64)).astype(np.float32)
    weight = numpy_helper.from_array(values, "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g",
        [info("x", TensorProto.FLOAT, ["n", 64])], [info("y", TensorProto.FLOAT, ["n", 64])], [weight],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = tmp_path / "big.onnx"
    onnx.save_model(
        model,
        str(path),
        save_as_external_data=True,
        location="big.onnx.data",
        size_threshold=0,
        convert_attribute=False,
    )
    found = kinds.describe(OnnxModel(str(path), inputs={"x": "v"}), None)
    assert set(found.digests) == {"big.onnx", "big.onnx.data"}
    (tmp_path / "big.onnx.data").unlink()
    with pytest.raises(BadModel, match=r"big.onnx.data beside it, which is missing"):
        kinds.describe(OnnxModel(str(path), inputs={"x": "v"}), None)

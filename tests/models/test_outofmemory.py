"""Which errors mean that memory ran out, as the libraries really raise them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from gristmill.models.outofmemory import is_out_of_memory, release_memory


def raised(function) -> BaseException:
    with pytest.raises(Exception) as caught:
        function()
    return caught.value


def from_onnx(path):
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("ConstantOfShape", ["shape"], ["y"])], "g",
        [helper.make_tensor_value_info("shape", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(path))
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"shape": np.array([1 << 44])})


def test_the_libraries_own_errors(tmp_path):
    """numpy, torch, ONNX Runtime and Arrow, each asked for far too much."""
    torch = pytest.importorskip("torch")
    assert is_out_of_memory(raised(lambda: np.empty(1 << 50)))
    assert is_out_of_memory(raised(lambda: torch.empty(1 << 50)))
    assert is_out_of_memory(raised(lambda: from_onnx(tmp_path / "huge.onnx")))
    assert is_out_of_memory(raised(lambda: pa.allocate_buffer(1 << 55)))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"))


def test_an_error_caused_by_one_counts():
    """A library that wraps the error keeps its meaning."""
    try:
        try:
            raise MemoryError
        except MemoryError as e:
            raise ValueError("could not score") from e
    except ValueError as e:
        assert is_out_of_memory(e)


@pytest.mark.parametrize(
    "error", [ValueError("out of memory"), KeyError("x"), RuntimeError("shape mismatch"), OSError(28, "No space left")]
)
def test_other_errors_are_not(error):
    """A user's ValueError that happens to say so is no sign, nor is a full disk."""
    assert not is_out_of_memory(error)


def test_release_is_harmless():
    """Giving memory back works with and without torch loaded."""
    release_memory()

"""TorchScript files over feature columns."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import kit
from gristmill.errors import BadModel
from gristmill.job.specs import TorchScriptModel
from gristmill.models import kinds
from gristmill.models.contract import Place

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TABLE = pa.table(
    {
        "a": pa.array([1.0, 2.0, None, 4.0]),
        "b": pa.array([1, 2, 3, 4], pa.int64()),
        "v": pa.array([[1, 2]] * 4, pa.list_(pa.float32(), 2)),
        "text": ["x"] * 4,
    }
)


def traced(path, module, *example):
    torch.manual_seed(0)
    torch.jit.save(torch.jit.trace(module.eval(), example), str(path))
    return str(path)


class Both(torch.nn.Module):
    def forward(self, v, b):
        return v * 2, b + 1


class Named(torch.nn.Module):
    def forward(self, x):
        return {"total": x.sum(dim=1), "largest": x.max(dim=1, keepdim=True).values}


def run(spec, table=TABLE):
    kinds.describe(spec, table.schema)
    model = kinds.open(spec, Place(threads=1))
    prepared = model.prepare(table)
    refused = [r.row for r in prepared.refused]
    index = np.array([i for i in range(table.num_rows) if i not in refused])
    return model.predict(prepared, index), refused


@pytest.mark.long
def test_features_equal_the_module(tmp_path):
    """Stacked columns give what the module gives; rows with nulls are refused."""
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Softmax(dim=1))
    path = traced(tmp_path / "m.pt", module, torch.zeros(2, 2))
    output, refused = run(TorchScriptModel(path, features=("a", "b"), output="p"))
    wanted = module(torch.tensor([[1.0, 1], [2, 2], [4, 4]])).detach().numpy()
    assert refused == [2]
    assert output.schema.field("p").type == pa.list_(pa.float32(), 3)
    assert np.abs(np.array(output["p"].to_pylist()) - wanted).max() < 1e-6


class Summed(torch.nn.Module):
    def forward(self, x):
        return x.sum(dim=1)


def test_lists_of_many_lengths_and_large_numbers(tmp_path):
    """Each list gets its own answer, whichever stands first; a number beyond int64 is refused and does not wrap."""
    path = str(tmp_path / "m.pt")
    torch.jit.save(torch.jit.script(Summed()), path)
    lists = [[1, 2], [1, 2, 3], [4], [5, 6], [2**64 - 1]]
    table = pa.table({"x": pa.array(lists, pa.list_(pa.uint64()))})
    output, refused = run(TorchScriptModel(path, inputs=("x",), output="y"), table)
    assert refused == [4]
    assert output["y"].to_pylist() == [3, 6, 4, 11]


def test_several_tensors_in_and_out(tmp_path):
    """inputs= gives a tensor each, of its own dtype; a tuple becomes numbered columns, a dict named ones."""
    path = traced(tmp_path / "both.pt", Both(), torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    output, _ = run(TorchScriptModel(path, inputs=("v", "b"), output="o"))
    assert output.to_pydict() == {"o_0": [[2, 4]] * 4, "o_1": [2, 3, 4, 5]}
    scripted = tmp_path / "named.pt"
    torch.jit.save(torch.jit.script(Named()), str(scripted))
    output, _ = run(TorchScriptModel(str(scripted), inputs=(["b", "b"],)))
    assert output.to_pydict() == {"total": [2, 4, 6, 8], "largest": [1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "does not name its inputs"),
        ({"features": ("a",), "inputs": ("b",)}, "one of the two"),
        ({"features": ("a", "c")}, "reads column 'c'"),
        ({"features": ("a", "text")}, "as a number, but it is string"),
        ({"features": ("a", "b"), "dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_runs(tmp_path, options, says):
    """Options and columns that cannot be are one line."""
    path = traced(tmp_path / "m.pt", torch.nn.Linear(2, 1), torch.zeros(1, 2))
    with pytest.raises(BadModel) as caught:
        kinds.describe(TorchScriptModel(path, **options), TABLE.schema)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_and_pickles_are_not_torchscript(tmp_path):
    """A state dict or a pickled module is refused without being opened."""
    torch.save(torch.nn.Linear(2, 1).state_dict(), tmp_path / "weights.pt")
    (tmp_path / "other.pt").write_bytes(b"other")
    with pytest.raises(BadModel, match="holds weights or a pickled model"):
        kinds.describe(TorchScriptModel(str(tmp_path / "weights.pt"), features=("a",)), None)
    with pytest.raises(BadModel, match="is none"):
        kinds.describe(TorchScriptModel(str(tmp_path / "other.pt"), features=("a",)), None)


@pytest.mark.real_model
def test_a_real_file_is_recognised():
    """Silero's file is TorchScript; its digest is that of the file."""
    info = kinds.describe(TorchScriptModel(str(kit.silero_jit()), features=("a",)), TABLE.schema)
    assert info.digest == kit.SHA256["silero_vad/data/silero_vad.jit"]

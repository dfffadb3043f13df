"""A model whose files change while a run goes on: no worker loads others than were planned."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Shifted(torch.nn.Module):
    """Adds a number; ends its process once, at a row, after putting other files in its own place."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x):  # type: ignore[no-untyped-def]
        """A column more."""
        return x[:, 0] + self.by


def _saved(path: Path, by: float) -> Path:
    torch.jit.save(torch.jit.trace(Shifted(by).eval(), torch.zeros(2, 1)), str(path))
    return path


class Changes:
    """A step that changes the model's file when it sees a row, and ends its worker, once."""

    def __init__(self, model: str, other: str, marker: str) -> None:
        self.model, self.other, self.marker = model, other, Path(marker)

    def __call__(self, batch):  # type: ignore[no-untyped-def]
        import os

        if 60 in batch["id"].tolist() and not self.marker.exists():
            self.marker.touch()
            shutil.copy(self.other, self.model)
            os.kill(os.getpid(), 9)
        return {"x": batch["x"]}


@pytest.mark.long
@pytest.mark.parametrize("to", ["another model", "no model"])
def test_a_model_that_changes_during_a_run_is_exit_4(to: str, tmp_path: Path) -> None:
    """The next worker refuses to load it; nothing is published, and with the planned files back the run goes on."""
    planned, other = _saved(tmp_path / "planned.pt", 1.0), tmp_path / "other.pt"
    if to == "no model":
        other.write_bytes(planned.read_bytes()[:500])
    else:
        _saved(other, 2.0)
    model = tmp_path / "model.pt"
    shutil.copy(planned, model)
    rows = pa.table({"id": range(100), "x": pa.array([float(i) for i in range(100)], pa.float32())})
    pq.write_table(rows, tmp_path / "in.parquet")
    step = gm.step(Changes, model=str(model), other=str(other), marker=str(tmp_path / "marker"))
    job = gm.Job(str(tmp_path / "in.parquet"), gm.TorchScriptModel(str(model), features=("x",), output="y"),
                 gm.sink(str(tmp_path / "out"), keep=["id"]), steps=[step], workers=1, shard_rows=25)  # fmt: skip
    with pytest.raises(gm.PlanChanged, match=r"model\.pt: its files have changed since the run was planned") as stopped:
        job.run()
    assert stopped.value.exit_code == 4 and not (tmp_path / "out" / "_SUCCESS").exists()
    shutil.copy(planned, model)
    assert job.run().read().to_table()["y"].to_pylist() == [float(i) + 1 for i in range(100)]

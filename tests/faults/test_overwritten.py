"""Files of a model that are overwritten in place while a worker has them mapped: no two models in one result."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
import kit
from gristmill.fingerprint.modelfiles import digests_of, opening

WIDE = 16384  # floats: of less than a page nothing is mapped


def _scaled(path: Path, by: float) -> Path:
    """A graph whose weights are in a file beside it: y = by * x."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.full((1, WIDE), by, np.float32), "w")
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["m"]),
        helper.make_node("ReduceMean", ["m"], ["y"], axes=[1], keepdims=1),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1]) for name in "xy")
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], [weight]), opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )
    onnx.save_model(model, str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    return path.with_name("w.bin")


def _rewritten(other: str, path: str) -> None:
    """As `rsync --inplace` does."""
    with Path(path).open("r+b") as file:
        file.write(Path(other).read_bytes())


WAYS: dict[str, Callable[[str, str], Any]] = {
    "cp": shutil.copyfile,
    "rsync --inplace": _rewritten,
    "mv": os.replace,
    "touch": lambda _, path: os.utime(path),
}


def overwrites(batch: dict[str, Any]) -> dict[str, Any]:
    """A step that does something to a file when it sees row 120, once. No argument names the file: it would count."""
    way, other, path = os.environ["OVERWRITES"].split(os.pathsep)
    if 120 in batch["id"].tolist() and not Path(f"{path}.done").exists():
        Path(f"{path}.done").touch()
        WAYS[way](other, path)
    return {"x": batch["x"]}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_overwritten_while_they_are_mapped(
    way: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 4, and no shard counts that may be answered by them; with the planned bytes back all rows are the planned
    model's. Files that are only touched stop nothing.
    """
    pytest.importorskip("onnxruntime")
    (tmp_path / "new").mkdir()
    weights, other = _scaled(tmp_path / "m.onnx", 2.0), _scaled(tmp_path / "new" / "m.onnx", 5.0)
    planned, ids = weights.read_bytes(), range(200)
    monkeypatch.setenv("OVERWRITES", os.pathsep.join([way, str(other), str(weights)]))
    pq.write_table(pa.table({"id": ids, "x": pa.array(ids, pa.float32())}), tmp_path / "in.parquet")
    job = gm.Job(str(tmp_path / "in.parquet"), gm.OnnxModel(str(tmp_path / "m.onnx"), features=("x",)),
                 gm.sink(str(tmp_path / "out"), keep=["id"]), steps=[overwrites], workers=workers, shard_rows=20,
                 batch_rows=20)  # fmt: skip
    if way != "touch":
        with pytest.raises(gm.PlanChanged, match=r"onnx .*: its file .*w\.bin was changed after the run") as stopped:
            job.run()
        assert stopped.value.exit_code == 4 and not (tmp_path / "out" / "_SUCCESS").exists()
        weights.write_bytes(planned)
    report = job.run()
    assert report.read().to_table()["y"].to_pylist() == [2.0 * i for i in ids]
    assert bool(report.shards_resumed) == (way != "touch")


def test_a_write_within_the_tick_of_a_files_times_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that tells times in whole seconds, what is written right after a look has those that it had then."""
    path, stat = tmp_path / "w.bin", os.stat

    def coarse(of: Any, **how: Any) -> os.stat_result:
        s = stat(of, **how)
        whole = {name: s[number] * 10**9 for number, name in ((8, "st_mtime_ns"), (9, "st_ctime_ns"))}
        return os.stat_result([*s, *s[7:10]], whole)

    monkeypatch.setattr(os, "stat", coarse)
    path.write_bytes(b"planned")
    with opening() as found:
        digests_of(tmp_path, [path], hashlib.sha256(b"planned").hexdigest(), "m")
    assert found[0].changed() is None
    for _ in range(3):  # a second ends at most once meanwhile
        path.write_bytes(b"another")
        assert found[0].changed() == f"m: its file {path}"
        path.write_bytes(b"planned")
        assert found[0].changed() is None


@pytest.mark.long
@pytest.mark.real_model
def test_safetensors_that_are_overwritten_while_torch_has_them(
    tmp_path: Path, minilm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, of a text model."""
    pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    shutil.copytree(minilm, tmp_path / "model")
    weights, other = tmp_path / "model" / "model.safetensors", tmp_path / "other.st"
    save_file(
        {k: v * 1.02 if v.is_floating_point() else v for k, v in load_file(weights).items()}, other, {"format": "pt"}
    )
    planned, ids = weights.read_bytes(), range(200)
    monkeypatch.setenv("OVERWRITES", os.pathsep.join(["rsync --inplace", str(other), str(weights)]))
    texts = [f"text {i}" for i in ids]
    pq.write_table(pa.table({"id": ids, "x": texts}), tmp_path / "in.parquet")

    def job(sink: str) -> gm.Job:
        model = gm.TextEmbedder(str(tmp_path / "model"), text="x", backend="torch")
        return gm.Job(str(tmp_path / "in.parquet"), model, gm.sink(str(tmp_path / sink), keep=["id"]),
                      steps=[overwrites], workers=0, shard_rows=20, batch_rows=20)  # fmt: skip

    with pytest.raises(gm.PlanChanged, match=r"embed .*: its file .*model\.safetensors was changed after the run"):
        job("out").run()
    weights.write_bytes(planned)
    assert job("out").run().shards_resumed
    found, whole = (job(sink).run().read().to_numpy("embedding") for sink in ("out", "whole"))
    np.testing.assert_allclose(found, whole, atol=1e-5)


@pytest.mark.long
@pytest.mark.real_model
def test_answers_of_overwritten_weights_are_not_kept_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a language model answered since is not what the next attempt finds answered."""
    pytest.importorskip("openvino_genai")
    weights, other = tmp_path / "m.gguf", tmp_path / "other.gguf"
    shutil.copyfile(kit.smollm(), weights)
    half = kit.smollm().read_bytes()
    other.write_bytes(half[: len(half) // 2] + bytes(len(half) // 2))
    monkeypatch.setenv("OVERWRITES", os.pathsep.join(["rsync --inplace", str(other), str(weights)]))
    pq.write_table(pa.table({"id": range(118, 122), "x": list("abcd")}), tmp_path / "in.parquet")
    job = gm.Job(str(tmp_path / "in.parquet"), gm.Prompt("Say {{x}}", llm=str(weights), max_tokens=2),
                 gm.sink(str(tmp_path / "out"), keep=["id"]), steps=[overwrites], workers=0, shard_rows=2)  # fmt: skip
    with pytest.raises(gm.PlanChanged, match=r"its file .*m\.gguf was changed"):
        job.run()
    assert not sum(p.stat().st_size for p in (tmp_path / "out").glob("_gristmill/*/journal/*"))

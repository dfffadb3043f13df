"""ONNX Runtime sessions, and transformers run by them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.errors import BadModel
from gristmill.models.contract import Place
from gristmill.models.onnx_graph import Graph, Value, read_graph
from gristmill.models.text import Batch
from gristmill.process.extras import require
from gristmill.process.forks import left_in_forks

# Names that exporters give to the vector of each token, and to one vector for all; optimum, sentence-transformers and
# transformers.js write these.
_TOKEN_OUTPUTS = ("last_hidden_state", "token_embeddings", "hidden_states")
_POOLED_OUTPUTS = ("sentence_embedding", "embeddings", "pooler_output")


def open_session(path: Path, place: Place, name: str) -> Any:
    """An onnxruntime session with `place.threads` threads. Raises BadModel for a file or device that cannot be used."""
    ort = require("onnxruntime", "onnx", name)
    options = ort.SessionOptions()
    options.intra_op_num_threads = place.threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    # Batches differ in shape from one to the next, so remembering a pattern for each shape only wastes memory.
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return left_in_forks(ort.InferenceSession(str(path), options, providers=providers(ort, place.device, name)))
    except Exception as e:  # onnxruntime's own classes have no common base but Exception
        from gristmill.models.outofmemory import is_out_of_memory

        if is_out_of_memory(e):
            raise
        raise BadModel(f"{name}: onnxruntime cannot load {path}: {_line(e)}") from e


def providers(ort: Any, device: str, name: str) -> list[Any]:
    """Execution providers for a device, in order of preference."""
    if device.startswith("cuda"):
        if "CUDAExecutionProvider" not in ort.get_available_providers():
            raise BadModel(
                f"{name}: device {device!r} needs onnxruntime-gpu; the onnxruntime installed here is for "
                f"{', '.join(ort.get_available_providers())}: use backend torch, or pip install onnxruntime-gpu"
            )
        number = int(device.partition(":")[2] or 0)
        return [("CUDAExecutionProvider", {"device_id": number}), "CPUExecutionProvider"]
    return ["CPUExecutionProvider"]


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


class GraphEncoder:
    """A transformer as an ONNX graph, fed only the inputs that it has, whatever runs it."""

    def output(self, batch: Batch) -> np.ndarray:
        """What the graph gives for the batch: float32 [rows, …]."""
        raise NotImplementedError

    def vectors(self, batch: Batch) -> ArrayVectors | np.ndarray:
        """Token vectors, or float32 [rows, n] if the graph pools by itself."""
        found = self.output(batch)
        return ArrayVectors(found) if found.ndim == 3 else found

    def logits(self, batch: Batch) -> np.ndarray:
        """float32 [rows, labels]."""
        return self.output(batch)


class OnnxEncoder(GraphEncoder):
    """A transformer run by ONNX Runtime."""

    def __init__(self, path: Path, task: str, place: Place, name: str) -> None:
        graph = read_graph(path)
        self._output = check_encoder(graph, task, path, name).name
        self._types = {v.name: np.dtype(v.dtype) for v in graph.inputs}
        self._session = open_session(path, place, name)
        self.about = {
            "backend": "onnx",
            "device": place.device,
            "dtype": graph.precision,
            "threads": place.threads,
            "provider": self._session.get_providers()[0],
        }

    def output(self, batch: Batch) -> np.ndarray:
        """What the graph gives for the batch: float32 [rows, …]."""
        found = self._session.run([self._output], fed(batch, self._types))[0]
        return np.asarray(found).astype(np.float32, copy=False)


def fed(batch: Batch, types: Mapping[str, np.dtype]) -> dict[str, np.ndarray]:
    """The inputs of an encoder's graph, by their names and types there."""
    feeds = {}
    for name, dtype in types.items():
        if name == "input_ids":
            feeds[name] = batch.ids.astype(dtype, copy=False)
        elif name == "attention_mask":
            feeds[name] = batch.mask.astype(dtype)
        elif name == "position_ids":
            feeds[name] = np.maximum(np.cumsum(batch.mask, axis=1) - 1, 0).astype(dtype)
        else:
            feeds[name] = np.zeros(batch.ids.shape, dtype) if batch.types is None else batch.types.astype(dtype)
    return feeds


class ArrayVectors:
    """Token vectors float32 [rows, width, n] as an array."""

    def __init__(self, vectors: np.ndarray) -> None:
        self._vectors = vectors

    def weighted(self, weights: np.ndarray) -> np.ndarray:
        """Sum over tokens of vector times weight: [rows, n]."""
        return np.asarray(np.matmul(weights[:, None, :], self._vectors)[:, 0, :])

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The vector of one token per row: [rows, n]."""
        return np.asarray(self._vectors[np.arange(len(positions)), positions])

    def largest(self, mask: np.ndarray) -> np.ndarray:
        """The largest value over the tokens where `mask` is True: [rows, n]."""
        return np.asarray(np.where(mask[:, :, None], self._vectors, -np.inf).max(axis=1).astype(np.float32))


def check_encoder(graph: Graph, task: str, path: Path, name: str) -> Value:
    """The output to read. Raises BadModel for a graph that is not a text encoder, naming its inputs and outputs."""
    known = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
    names = [v.name for v in graph.inputs]
    if "input_ids" not in names or set(names) - known:
        raise BadModel(f"{name}: {path} is not a text encoder: its inputs are {', '.join(names) or 'none'}")
    outputs = {v.name: v for v in graph.outputs}
    if task == "classify":
        found = outputs.get("logits") or next((v for v in graph.outputs if _rank(v) == 2), None)
        wanted = "logits"
    else:
        tokens = next((outputs[n] for n in _TOKEN_OUTPUTS if n in outputs), None)
        pooled = next((outputs[n] for n in _POOLED_OUTPUTS if n in outputs), None)
        found = tokens or next((v for v in graph.outputs if _rank(v) == 3 and v.name != "logits"), None) or pooled
        wanted = "last_hidden_state"
    if found is None or found.dtype not in ("float32", "float16"):
        raise BadModel(f"{name}: {path} has no output like {wanted}: it has {', '.join(outputs)}")
    return found


def _rank(value: Value) -> int | None:
    return None if value.shape is None else len(value.shape)

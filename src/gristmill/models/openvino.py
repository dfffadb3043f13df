"""Transformers run by OpenVINO on a CPU, from an ONNX graph in float32: in float32, or in bfloat16 on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gristmill.errors import BadModel
from gristmill.models.contract import Place
from gristmill.models.onnx import GraphEncoder, check_encoder, fed
from gristmill.models.onnx_graph import read_graph
from gristmill.models.text import Batch
from gristmill.process.extras import require
from gristmill.process.forks import left_in_forks

_HINTS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVinoEncoder(GraphEncoder):
    """A transformer compiled by OpenVINO with `place.threads` threads, fed only the inputs that it has. `dtype` is what
    it computes in; a processor without bfloat16 computes in float32 all the same, and `about` says so.
    """

    def __init__(self, path: Path, task: str, place: Place, dtype: str, name: str) -> None:
        ov = require("openvino", "openvino", name)
        graph = read_graph(path)
        self._output = check_encoder(graph, task, path, name).name
        self._types = {v.name: np.dtype(v.dtype) for v in graph.inputs}
        settings = {
            "INFERENCE_NUM_THREADS": place.threads,
            "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": _HINTS[dtype],
            "ENABLE_CPU_PINNING": False,  # workers are several processes, all of which would be pinned to core 0
        }
        try:
            core = ov.Core()
            model = core.compile_model(core.read_model(str(path)), "CPU", settings)
            self._request = left_in_forks(model.create_infer_request())
            computes = str(model.get_property("INFERENCE_PRECISION_HINT"))
        except RuntimeError as e:
            raise BadModel(f"{name}: openvino cannot load {path}: {str(e).strip().splitlines()[-1]}") from e
        self.about: dict[str, Any] = {
            "backend": "openvino",
            "device": "cpu",
            "dtype": "bfloat16" if "bfloat16" in computes or "bf16" in computes else "float32",
            "threads": place.threads,
        }

    def output(self, batch: Batch) -> np.ndarray:
        """What the graph gives for the batch: float32 [rows, …], a copy, as the request's own memory is used again."""
        self._request.infer(fed(batch, self._types), share_inputs=True)
        return np.array(self._request.get_tensor(self._output).data, dtype=np.float32)

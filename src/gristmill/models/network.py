"""A transformer, loaded at a place by whatever runs it."""

from __future__ import annotations

from gristmill.models.contract import Place
from gristmill.models.encoder import Encoder, EncoderFiles


def open_encoder(files: EncoderFiles, task: str, place: Place, name: str, *, code: bool = False) -> Encoder:
    """Loads the network for `task` ("embed" or "classify") at a place."""
    if files.backend != "torch":
        graph = files.graph
        if graph is None or files.quantise:
            from gristmill.models.export import ready

            graph = ready(files, task, name, code=code)
        if files.backend == "openvino":
            from gristmill.models.openvino import OpenVinoEncoder

            return OpenVinoEncoder(graph, task, place, files.dtype, name)
        from gristmill.models.onnx import OnnxEncoder

        return OnnxEncoder(graph, task, place, name)
    from gristmill.models.torch import TorchEncoder

    return TorchEncoder(files, task, place, name, code=code)

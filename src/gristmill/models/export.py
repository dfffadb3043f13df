"""Transformers exported to ONNX, and quantised if int8 is requested, on first use; kept in the cache under the digest
of the model they come from.

ONNX Runtime optimises the graph when it loads it (fused attention products, BiasGelu, LayerNormalization): 0.14 s for
MiniLM, and on a CPU a tenth faster than the graph that onnxruntime.transformers.optimizer writes.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.errors import BadModel
from gristmill.fingerprint.diskcache import built, cache_folder
from gristmill.models import encoder_graph
from gristmill.models.contract import Place
from gristmill.models.encoder import EncoderFiles, digest
from gristmill.models.onnx import OnnxEncoder
from gristmill.models.text import Batch
from gristmill.process.extras import installed, require

_LOG = logging.getLogger("gristmill.models")
_OPSET = encoder_graph.OPSET
_FORMAT = 2  # counts up when what is written here changes
# How far an exported float32 encoder may differ from the one it comes from; measured on MiniLM: 2e-6.
_TOLERANCE = 1e-3
_BUILT = 1e-4  # the same of a graph written from the weights, or it is traced
_EXAMPLE = 160  # tokens: beyond 128, from where mpnet's distances are all alike


def exportable() -> bool:
    """Whether the packages that an export needs are installed."""
    return all(installed(m) for m in ("torch", "transformers", "onnx", "onnxruntime"))


def ready(files: EncoderFiles, task: str, name: str, *, code: bool = False) -> Path:
    """The ONNX file that these files call for: an existing, exported or quantised one. Raises as `exported` does."""
    if files.quantise:
        return quantised(files, task, name, code=code)
    return files.graph or exported(files, task, name, code=code)


def export_key(digest: str, task: str) -> str:
    """The name in the cache for what is made from the model with this digest: the folder of its float32 ONNX file."""
    return f"exports/{digest[:40]}-{task}-{_OPSET}.{_FORMAT}"


def exported(files: EncoderFiles, task: str, name: str, *, code: bool = False) -> Path:
    """The ONNX file of a torch model: from the cache, or written there now: of families whose graph is known in a
    second or two beside loading the model, of others by tracing it (a minute for a base-size model).

    It is compared with the torch model on two rows before it is kept. Needs torch and transformers. Raises BadModel if
    the model cannot be exported, or gives other values afterwards.
    """

    def build(folder: Path) -> None:
        _LOG.warning("%s: no float32 ONNX file in %s: exporting one to the cache", name, files.root)
        _export(files, task, folder / "model.onnx", name, code)

    return built(export_key(digest(files, name, code=code), task), build) / "model.onnx"


def quick(files: EncoderFiles, task: str, name: str, *, code: bool = False) -> bool:
    """Whether the ONNX file is in the cache, or is written without tracing."""
    if (cache_folder() / export_key(digest(files, name, code=code), task)).is_dir():
        return True
    return not code and encoder_graph.known(files, task) is not None


def quantised(files: EncoderFiles, task: str, name: str, *, code: bool = False) -> Path:
    """The float32 graph with dynamic int8 arithmetic: weights by channel, activations by tensor, matrix products only.

    From the cache, or made there now (seconds). Method: onnxruntime.quantization.quantize_dynamic. Needs onnx.
    """
    narrow = not _wide_products()
    key = f"{export_key(digest(files, name, code=code), task)}-int8{'-7bit' if narrow else ''}"

    def build(folder: Path) -> None:
        require("onnx", "export", f"quantising {name}")
        from onnxruntime.quantization import QuantType, quantize_dynamic

        graph = files.graph or exported(files, task, name, code=code)
        log = logging.getLogger()
        level = log.level
        log.setLevel(logging.ERROR)  # it recommends preparation that is for static quantisation
        try:
            quantize_dynamic(
                graph, folder / "model.onnx", weight_type=QuantType.QInt8, per_channel=True, reduce_range=narrow,
                op_types_to_quantize=["MatMul"],
                extra_options={"MatMulConstBOnly": True, "DefaultTensorType": 1},
            )  # fmt: skip
        except (ValueError, RuntimeError, TypeError) as e:
            raise BadModel(f"{name}: cannot be quantised to int8 ({type(e).__name__}: {e}): use float32") from e
        finally:
            log.setLevel(level)

    return built(key, build) / "model.onnx"


def _wide_products() -> bool:
    """Whether sums of int8 products are wide enough for 8-bit weights: older x86 adds pairs in 16 bits, which overflow
    (https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html, "reduce_range").
    """
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "vnni" in flags or "asimd" in flags


def _export(files: EncoderFiles, task: str, path: Path, name: str, code: bool) -> None:
    require("torch", "torch", f"exporting {name}")
    require("transformers", "hf", f"exporting {name}")
    from gristmill.models.torch import load_transformer

    # Eager attention: the exporter supports its operators everywhere, and ONNX Runtime fuses them again.
    model = load_transformer(files, task, "float32", name, code=code, attention="eager")
    shape = None if code else encoder_graph.known(files, task)
    if shape is not None:
        encoder_graph.write_graph(files, shape, task, path)
        batch = _example(
            int(model.config.vocab_size), min(_EXAMPLE, shape.positions - 2 - shape.padding), shape.padding
        )
        difference = _difference(path, task, batch, _values(model, task, batch), name)
        if difference <= _BUILT:
            return
        _LOG.warning("%s: written from its weights the graph differs by %.2g: tracing it", name, difference)
        path.unlink()
        path.with_name(path.name + encoder_graph.DATA).unlink()
    _trace(model, task, path, name)


def _trace(model: Any, task: str, path: Path, name: str) -> None:
    import torch

    output = _output(task)
    base: Any = torch.nn.Module

    class Plain(base):  # type: ignore[misc]
        """The network with two positional inputs and one output."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask)[output]

    batch = _example(int(getattr(model.config, "vocab_size", 1000)), 12, None)
    ids, mask = torch.from_numpy(batch.ids), torch.from_numpy(batch.mask.astype(np.int64))
    axes: dict[str, dict[int, str]] = {n: {0: "batch", 1: "sequence"} for n in ("input_ids", "attention_mask")}
    axes[output] = {0: "batch"} if task == "classify" else {0: "batch", 1: "sequence"}
    try:
        wanted = _values(model, task, batch)
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                Plain().eval(), (ids, mask), str(path), input_names=["input_ids", "attention_mask"],
                output_names=[output], dynamic_axes=axes, opset_version=_OPSET, dynamo=False,
            )  # fmt: skip
    except Exception as e:
        raise BadModel(f"{name}: cannot be exported to ONNX ({type(e).__name__}: {e}): use backend torch") from e
    difference = _difference(path, task, batch, wanted, name)
    if not difference <= _TOLERANCE:
        raise BadModel(
            f"{name}: exported to ONNX, it differs by {difference:.2g} from the torch model: use backend torch"
        )


def _output(task: str) -> str:
    return "logits" if task == "classify" else "last_hidden_state"


def _values(model: Any, task: str, batch: Batch) -> np.ndarray:
    """What the torch model gives."""
    import torch

    with torch.inference_mode():
        ids, mask = torch.from_numpy(batch.ids), torch.from_numpy(batch.mask.astype(np.int64))
        return np.asarray(model(input_ids=ids, attention_mask=mask)[_output(task)].numpy())


def _example(vocabulary: int, tokens: int, padding: int | None) -> Batch:
    """Two rows of different lengths, so that padding is part of the comparison; its tokens are random, too, if no token
    is named.
    """
    first = 5 if padding is None or vocabulary <= 6 else max(5, padding + 1)
    ids = np.random.default_rng(0).integers(first, max(first + 1, vocabulary), size=(2, tokens), dtype=np.int64)
    mask = np.ones((2, tokens), dtype=bool)
    mask[1, tokens * 7 // 12 :] = False
    if padding is not None:
        ids[~mask] = padding
    return Batch(ids, mask)


def _difference(path: Path, task: str, batch: Batch, wanted: np.ndarray, name: str) -> float:
    """The largest difference of the graph's values from those that are wanted."""
    session = OnnxEncoder(path, task, Place(), name)
    length = int(batch.mask[1].sum())
    shorter = Batch(batch.ids[1:, :length], batch.mask[1:, :length])  # other sizes than those it was exported with
    largest = 0.0
    for given, expected in ((batch, wanted), (shorter, wanted[1:] if task == "classify" else wanted[1:, :length])):
        found = session.output(given)
        if task != "classify":
            found, expected = found[given.mask], expected[given.mask]
        difference = float(np.abs(found - expected).max())
        largest = difference if not difference <= largest else largest  # also if it is not a number
    return largest

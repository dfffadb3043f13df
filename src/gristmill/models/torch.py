"""Transformers run by torch, on a CPU or a GPU."""

from __future__ import annotations

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from gristmill.errors import BadModel
from gristmill.models.contract import Place
from gristmill.models.encoder import EncoderFiles
from gristmill.models.text import Batch
from gristmill.process.extras import require


def open_device(place: Place, name: str) -> Any:
    """The torch device of a place, after setting torch's threads. Raises BadModel for one that is not available."""
    torch = require("torch", "torch", name)
    if torch.get_num_threads() != place.threads:
        torch.set_num_threads(place.threads)
    if place.device.startswith("cuda") and not torch.cuda.is_available():
        raise BadModel(f"{name}: device {place.device!r}: torch sees no CUDA GPU here (torch {torch.__version__})")
    if place.device.startswith("mps") and not torch.backends.mps.is_available():
        raise BadModel(f"{name}: device {place.device!r}: torch sees no Metal GPU here")
    try:
        return torch.device(place.device)
    except RuntimeError as e:
        raise BadModel(f"{name}: device {place.device!r}: {e}") from e


def load_transformer(
    files: EncoderFiles, task: str, dtype: str, name: str, *, code: bool, attention: str | None = None
) -> Any:
    """A transformers model on the CPU, ready for inference. Raises BadModel if it cannot be loaded.

    Weights come from safetensors, or through torch.load(weights_only=True), transformers' own rule for older files.
    """
    torch = require("torch", "torch", name)
    transformers = require("transformers", "hf", name)
    options: dict[str, Any] = {"trust_remote_code": code, "local_files_only": True}
    options[_dtype_option(transformers)] = getattr(torch, dtype)
    if attention is not None:
        options["attn_implementation"] = attention
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(files.folder), trust_remote_code=code, local_files_only=True
        )
        if hasattr(config, "use_cache"):
            config.use_cache = False
        transformers.utils.logging.disable_progress_bar()  # a bar of its own, in every worker
        home = _home(transformers, config, task)
        model = home.from_pretrained(str(files.folder), config=config, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as e:
        from gristmill.models.outofmemory import is_out_of_memory

        if is_out_of_memory(e):
            raise
        raise BadModel(
            f"{name}: transformers cannot load {files.folder}: {str(e).strip().partition(chr(10))[0]}"
        ) from e
    return model.eval()


def _dtype_option(transformers: Any) -> str:
    """What `from_pretrained` calls the type of the weights: `torch_dtype` before transformers 4.56."""
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return "dtype" if (major, minor) >= (4, 56) else "torch_dtype"


def _home(transformers: Any, config: Any, task: str) -> Any:
    if task == "classify":
        return transformers.AutoModelForSequenceClassification
    if getattr(config, "is_encoder_decoder", False):
        return transformers.AutoModelForTextEncoding  # the encoder alone: T5 and its kind
    return transformers.AutoModel


class TorchEncoder:
    """A transformer in torch: scaled-dot-product attention, inference mode.

    On a GPU not by cuDNN's kernel, which torch prefers in half precision on Hopper: it is compiled for each shape, and
    of our batches hardly two have the same (MiniLM in bfloat16 on an H200: four fifths of the time went there).
    """

    def __init__(self, files: EncoderFiles, task: str, place: Place, name: str, *, code: bool = False) -> None:
        self._torch = require("torch", "torch", name)
        self._device = open_device(place, name)
        # None lets transformers use scaled-dot-product attention if the model has it.
        model = load_transformer(files, task, files.dtype, name, code=code)
        self._model = model.to(self._device)
        self._takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
        self.about = {"backend": "torch", "device": str(self._device), "dtype": files.dtype, "threads": place.threads}

    def vectors(self, batch: Batch) -> TensorVectors:
        """Token vectors, left on the device."""
        with self._torch.inference_mode(), self._attention():
            return TensorVectors(self._torch, self._forward(batch)[0])

    def logits(self, batch: Batch) -> np.ndarray:
        """float32 [rows, labels]."""
        with self._torch.inference_mode(), self._attention():
            return np.asarray(self._forward(batch).logits.float().cpu().numpy())

    def _attention(self) -> AbstractContextManager[None]:
        if self._device.type != "cuda" or not hasattr(self._torch.nn, "attention"):
            return contextlib.nullcontext()
        kinds = self._torch.nn.attention.SDPBackend
        chosen = [kinds.FLASH_ATTENTION, kinds.EFFICIENT_ATTENTION, kinds.MATH]
        found: AbstractContextManager[None] = self._torch.nn.attention.sdpa_kernel(chosen)
        return found

    def _forward(self, batch: Batch) -> Any:
        feeds = {"input_ids": self._tensor(batch.ids), "attention_mask": self._tensor(batch.mask.astype(np.int64))}
        if batch.types is not None and self._takes_types:
            feeds["token_type_ids"] = self._tensor(batch.types)
        return self._model(**feeds)

    def _tensor(self, array: np.ndarray) -> Any:
        return self._torch.from_numpy(array).to(self._device, non_blocking=True)


class TensorVectors:
    """Token vectors [rows, width, n] as a tensor; sums are float32, as sentence-transformers does them."""

    def __init__(self, torch: Any, vectors: Any) -> None:
        self._torch = torch
        self._vectors = vectors

    def weighted(self, weights: np.ndarray) -> np.ndarray:
        """Sum over tokens of vector times weight: [rows, n]."""
        with self._torch.inference_mode():
            factors = self._torch.from_numpy(weights).to(self._vectors.device)
            return _array(self._torch.matmul(factors[:, None, :], self._vectors.float())[:, 0, :])

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The vector of one token per row: [rows, n]."""
        with self._torch.inference_mode():
            places = self._torch.from_numpy(positions).to(self._vectors.device)
            rows = self._torch.arange(len(positions), device=self._vectors.device)
            return _array(self._vectors[rows, places])

    def largest(self, mask: np.ndarray) -> np.ndarray:
        """The largest value over the tokens where `mask` is True: [rows, n]."""
        with self._torch.inference_mode():
            out = self._torch.from_numpy(~mask).to(self._vectors.device)
            return _array(self._vectors.masked_fill(out[:, :, None], float("-inf")).max(dim=1).values)


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.float().cpu().numpy())

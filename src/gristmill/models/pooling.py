"""From token vectors to one vector per row, as sentence-transformers' modules do it.

Sources: Pooling, Dense and Normalize of sentence-transformers (sentence_transformer/modules/pooling.py, base/modules/),
whose folders these read. Weights and positions are computed here in numpy; the sums over tokens are done by the
backend, where the token vectors are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from gristmill.errors import BadModel
from gristmill.fingerprint.modelfiles import read_json
from gristmill.models.safetensors import read_safetensors
from gristmill.models.text import Batch
from gristmill.process.extras import require
from gristmill.values import dataclass

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# The older configuration has one key a mode; the order is that of sentence-transformers, and of the output.
_LEGACY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class TokenVectors(Protocol):
    """Token vectors [rows, width, n] of a batch, wherever they are. Results are float32 on the CPU."""

    def weighted(self, weights: np.ndarray) -> np.ndarray:
        """Sum over tokens of vector times weight (float32 [rows, width]): [rows, n]."""
        ...

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The vector of one token per row (int64 [rows]): [rows, n]."""
        ...

    def largest(self, mask: np.ndarray) -> np.ndarray:
        """The largest value over the tokens where `mask` is True: [rows, n]."""
        ...


@dataclass(frozen=True)
class Pooling:
    """Which ways of pooling, concatenated in the result, and whether the prompt's tokens take part."""

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True

    def __call__(self, vectors: TokenVectors, batch: Batch) -> np.ndarray:
        """float32 [rows, modes × n]."""
        mask = batch.mask
        if not self.include_prompt and batch.prompt:
            mask = _without_prompt(mask, batch.prompt)
        parts = [_pooled(mode, vectors, mask, batch.mask) for mode in self.modes]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _without_prompt(mask: np.ndarray, tokens: int) -> np.ndarray:
    first: np.ndarray = mask.argmax(axis=1)
    return mask & (np.arange(mask.shape[1]) >= (first + tokens).reshape(-1, 1))


def _pooled(mode: str, vectors: TokenVectors, mask: np.ndarray, whole: np.ndarray) -> np.ndarray:
    if mode == "cls":
        return vectors.at(mask.argmax(axis=1))
    if mode == "lasttoken":
        width = mask.shape[1]
        last = width - 1 - mask[:, ::-1].argmax(axis=1)
        return np.where(np.any(mask, axis=1, keepdims=True), vectors.at(last), np.float32(0))
    if mode == "max":
        return vectors.largest(mask)
    weights = mask.astype(np.float32)
    count = weights.sum(axis=1, keepdims=True)
    if mode == "weightedmean":
        first = whole.argmax(axis=1)
        weights *= np.arange(1, mask.shape[1] + 1, dtype=np.float32) - first[:, None]
        count = weights.sum(axis=1, keepdims=True)
    elif mode == "mean_sqrt_len_tokens":
        count = np.sqrt(count)
    return vectors.weighted(weights / np.maximum(count, np.float32(1e-9)))


def read_pooling(folder: Path, name: str) -> Pooling:
    """The pooling that a module's config.json gives. Raises BadModel for an unknown way of pooling."""
    config = read_json(folder / "config.json", name)
    modes = config.get("pooling_mode") or [mode for key, mode in _LEGACY.items() if config.get(key)] or "mean"
    modes = (modes,) if isinstance(modes, str) else tuple(modes)
    for mode in modes:
        check_mode(mode, name)
    return Pooling(modes, bool(config.get("include_prompt", True)))


def check_mode(mode: str, name: str) -> None:
    """Raises BadModel for an unknown way of pooling."""
    if mode not in MODES:
        raise BadModel(f"{name}: pooling is {mode!r}: it must be one of {', '.join(MODES)}")


# ---------------------------------------------------------------- after pooling

Layer = Callable[[np.ndarray], np.ndarray]


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Rows divided by their Euclidean length (at least 1e-12, as torch.nn.functional.normalize)."""
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
    return np.asarray(vectors / np.maximum(lengths, np.float32(1e-12))[:, None])


@dataclass(frozen=True)
class Dense:
    """A linear layer with an activation, float32: `weight` [out, in], `bias` [out] or None."""

    weight: np.ndarray
    bias: np.ndarray | None
    activation: Layer

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """float32 [rows, out]."""
        out = vectors @ self.weight.T
        return self.activation(out if self.bias is None else out + self.bias)


def _gelu(x: np.ndarray) -> np.ndarray:
    erf = np.frompyfunc(math.erf, 1, 1)(x / np.float32(math.sqrt(2))).astype(np.float32)
    return np.asarray(x * np.float32(0.5) * (np.float32(1) + erf))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.float32(1) / (np.float32(1) + np.exp(-x)))


_ACTIVATIONS: dict[str, Layer] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, np.float32(0)),
    "Sigmoid": _sigmoid,
    "SiLU": lambda x: x * _sigmoid(x),
    "GELU": _gelu,
}


def check_dense(folder: Path, name: str) -> int:
    """How many values the layer gives. Raises BadModel if it is of a kind that is not supported here."""
    config = read_json(folder / "config.json", name)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise BadModel(f"{name}: {folder.name} has activation {activation}: supported are {', '.join(_ACTIVATIONS)}")
    for key, plain in (("use_residual", False), ("module_input_name", "sentence_embedding")):
        if config.get(key, plain) != plain or (
            key == "module_input_name" and config.get("module_output_name") not in (None, plain)
        ):
            raise BadModel(f"{name}: {folder.name} has {key}={config.get(key)!r}, which is not supported")
    if dense_weights(folder) is None:
        raise BadModel(f"{name}: {folder} has neither model.safetensors nor pytorch_model.bin")
    if not isinstance(config.get("out_features"), int):
        raise BadModel(f"{name}: {folder / 'config.json'} has no out_features")
    return int(config["out_features"])


def dense_weights(folder: Path) -> Path | None:
    """The file with a Dense module's weights."""
    return next((folder / n for n in ("model.safetensors", "pytorch_model.bin") if (folder / n).is_file()), None)


def read_dense(folder: Path, name: str) -> Dense:
    """A Dense module of a sentence-transformers folder."""
    config = read_json(folder / "config.json", name)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    path = dense_weights(folder)
    assert path is not None
    if path.suffix == ".safetensors":
        tensors = read_safetensors(path)
    else:
        torch = require("torch", "torch", f"{name}: {path}")
        tensors = {k: v.float().numpy() for k, v in torch.load(path, map_location="cpu", weights_only=True).items()}
    return Dense(tensors["linear.weight"], tensors.get("linear.bias"), _ACTIVATIONS[activation])

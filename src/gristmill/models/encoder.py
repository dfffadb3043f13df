"""A transformer's files in a model folder: which of them are used, at what precision, by which backend.

The rule: a precision is never changed unless requested. A quantised or half-precision ONNX file is used only if it is
the only ONNX file, or if it is requested (`dtype`, or the file itself as the model). If int8 is requested and there is
no int8 file, it is made from the float32 model.

If a folder has weights, they are the model: an ONNX graph beside them may be from an earlier training. Unless
requested, the graph is used only if torch is not installed; if it is used, both are part of the digest. A run may
choose ONNX Runtime or OpenVINO on an export of the weights (driver/backends.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gristmill.errors import BadModel
from gristmill.fingerprint.modelfiles import digests_of, inside, model_folder, read_json
from gristmill.job.specs import EXPORTED
from gristmill.models.onnx_graph import Value, read_graph
from gristmill.models.pooling import TokenVectors
from gristmill.models.text import Batch
from gristmill.process.extras import installed, require
from gristmill.values import dataclass

BACKENDS = ("auto", "torch", "onnx", "openvino")
_DTYPES = {
    "auto": "auto", "float32": "float32", "fp32": "float32", "float": "float32", "float16": "float16",
    "fp16": "float16", "half": "float16", "bfloat16": "bfloat16", "bf16": "bfloat16", "int8": "int8", "int4": "int4",
}  # fmt: skip
# Names that optimum, transformers.js and sentence-transformers give to ONNX files of other precisions than float32.
_REDUCED = re.compile(r"int8|uint8|quant|q4|bnb4|int4|fp16|float16|bf16|bfloat16|_O4\b", re.IGNORECASE)
# Configuration files that the output depends on, if they are there.
_CONFIGURATION = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json", "modules.json",
    "sentence_bert_config.json", "config_sentence_transformers.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "spm.model",
)  # fmt: skip


_TOGETHER = 3600.0  # seconds within which files belong to one download or one copy


class Encoder(Protocol):
    """A transformer at work. One thread calls it."""

    about: dict[str, Any]

    def vectors(self, batch: Batch) -> TokenVectors | np.ndarray:
        """Token vectors; or float32 [rows, n] if the network itself does the pooling."""
        ...

    def logits(self, batch: Batch) -> np.ndarray:
        """float32 [rows, labels]."""
        ...


@dataclass(frozen=True)
class EncoderFiles:
    """What will be loaded: `graph` for onnx and openvino (None: to be exported from `weights`), `weights` for torch.

    `quantise`: the graph is float32 and int8 is requested, so the graph will be quantised.
    """

    root: Path
    folder: Path
    backend: str
    dtype: str
    weights: tuple[Path, ...]
    graph: Path | None = None
    quantise: bool = False

    @property
    def remarks(self) -> tuple[str, ...]:
        """A warning if the graph that is used was written before the weights beside it."""
        if self.graph is None or not self.weights or not all(p.is_file() for p in self.weights):
            return ()
        newest = max(p.stat().st_mtime for p in self.weights)
        if newest <= self.graph.stat().st_mtime + _TOGETHER:
            return ()
        name = self.graph.relative_to(self.root).as_posix()
        return (
            f"{name} is used, but is older than {self.weights[0].name}: export it again if the model was trained since",
        )

    @property
    def used(self) -> tuple[Path, ...]:
        """The files whose content the output depends on, except the configuration."""
        if self.backend != "torch" and self.graph is not None:
            return (
                self.graph,
                *self.weights,  # the graph was made from these: if they are retrained, so must it be
                *(inside(self.graph.parent, n, str(self.root)) for n in read_graph(self.graph).external),
            )
        return self.weights

    @property
    def bytes(self) -> int:
        """Size of what is loaded."""
        loaded = [p for p in self.used if self.graph is None or p not in self.weights]
        return sum(p.stat().st_size for p in loaded if p.is_file())

    def flops_a_token(self, name: str) -> float:
        """Multiplications and additions per token, without attention's own: 2 for each weight of the layers (4 of width
        x width, 2 of width x inner); from the size of the weights if the configuration does not say.
        """
        config = read_json(self.folder / "config.json", name)
        width, layers, inner = (config.get(k) for k in ("hidden_size", "num_hidden_layers", "intermediate_size"))
        if isinstance(width, int) and isinstance(layers, int):
            inner = inner if isinstance(inner, int) else 4 * width
            return 2.0 * layers * (4 * width * width + 2 * width * inner)
        return self.bytes / 2.0


def model_root(model: str, *, code: bool = False) -> tuple[Path, Path | None]:
    """The folder of a model, and the ONNX file in it if `model` names that file itself."""
    path = Path(model).expanduser()
    if path.suffix == ".onnx" and path.is_file():
        return (path.parent.parent if path.parent.name == "onnx" else path.parent), path
    return model_folder(model, code=code), None


def find_encoder(
    root: Path, folder: Path, named: Path | None, backend: str, dtype: str, device: str, name: str
) -> EncoderFiles:
    """Chooses backend, precision and files. Depends only on the folder, what is installed, and what is requested.

    Raises BadModel if there is nothing to load, or nothing that was requested, naming what there is.
    """
    if backend not in (*BACKENDS, *EXPORTED.values()):
        raise BadModel(f"{name}: backend is {backend!r}: it must be one of {', '.join(BACKENDS)}")
    if dtype not in _DTYPES:
        raise BadModel(f"{name}: dtype is {dtype!r}: it must be one of {', '.join(sorted(set(_DTYPES.values())))}")
    if not (folder / "config.json").is_file():
        raise BadModel(
            f"{name}: {folder} has no config.json, so it is not a Hugging Face model folder{_contents(folder)}"
        )
    choice = _Choice(root, folder, named, _DTYPES[dtype], name)
    if backend == "auto":
        backend = choice.backend(device)
    for runs, export in EXPORTED.items():
        if backend == export:
            return choice.exported(runs)
    if backend == "openvino":
        return choice.openvino(device)
    return choice.torch() if backend == "torch" else choice.onnx()


def _contents(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())[:8]
    return f"; it holds {', '.join(names)}" if names else "; it is empty"


@dataclass(frozen=True)
class _Choice:
    root: Path
    folder: Path
    named: Path | None
    dtype: str
    name: str

    def backend(self, device: str) -> str:
        if self.named is not None or self.dtype in ("int8", "int4"):
            return "onnx"
        if not self.weights:
            return "onnx"
        if self.dtype in ("float16", "bfloat16") or device.startswith(("cuda", "mps")) or not installed("onnxruntime"):
            return "torch"
        if self._loadable:
            return "torch"
        return "onnx" if self._full() else "torch"

    @property
    def weights(self) -> tuple[Path, ...]:
        """The weights for torch: safetensors, else what torch.save wrote (read with weights_only)."""
        for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
            if (self.folder / f"{stem}{suffix}").is_file():
                return (self.folder / f"{stem}{suffix}",)
            index = read_json(self.folder / f"{stem}{suffix}.index.json", self.name)
            if index:
                return tuple(self.folder / n for n in sorted(set(index.get("weight_map", {}).values())))
        return ()

    @property
    def _loadable(self) -> bool:
        """Whether there are weights, and torch to load them: then they are the model."""
        return bool(self.weights) and installed("torch") and installed("transformers")

    def torch(self) -> EncoderFiles:
        if self.named is not None:
            raise BadModel(f"{self.name}: {self.named.name} is an ONNX file, which backend torch cannot read")
        if self.dtype in ("int8", "int4"):
            raise BadModel(f"{self.name}: dtype {self.dtype} needs an ONNX file: use backend onnx")
        weights = self.weights
        if not weights:
            raise BadModel(
                f"{self.name}: {self.folder} has no model.safetensors or pytorch_model.bin{_contents(self.folder)}"
            )
        missing = [p.name for p in weights if not p.is_file()]
        if missing:
            raise BadModel(f"{self.name}: {self.folder} lacks {', '.join(missing)}, which its index lists")
        dtype = self._saved_dtype() if self.dtype == "auto" else self.dtype
        return EncoderFiles(self.root, self.folder, "torch", dtype, weights)

    def exported(self, backend: str) -> EncoderFiles:
        found = self.torch()
        reduced = backend == "openvino" and found.dtype == "bfloat16"
        return replace(found, backend=backend, dtype="bfloat16" if reduced else "float32")

    def openvino(self, device: str) -> EncoderFiles:
        """The float32 graph, computed in float32 or bfloat16."""
        if self.dtype not in ("auto", "float32", "bfloat16") or not device.startswith(("cpu", "auto")):
            raise BadModel(
                f"{self.name}: backend openvino computes in float32 or bfloat16 on a CPU, not {self.dtype} on "
                f"{device}: use backend onnx or torch"
            )
        found = replace(self, dtype="float32").onnx()
        return replace(found, backend="openvino", dtype="bfloat16" if self.dtype == "bfloat16" else "float32")

    def onnx(self) -> EncoderFiles:
        if self.dtype == "bfloat16":
            raise BadModel(
                f"{self.name}: backend onnx does not support bfloat16: use backend torch or openvino, or float32"
            )
        made = self.dtype == "int8" and self.named is None and self._loadable and installed("onnx")
        found = None if made else self._graph()
        weights = self.weights if self.named is None else ()
        if found is not None:
            precision = read_graph(found).precision
            return EncoderFiles(self.root, self.folder, "onnx", precision, weights, found)
        if self.dtype == "int8" and (self.weights or self._full() is not None):
            full = None if made else self._full()
            return EncoderFiles(self.root, self.folder, "onnx", "int8", weights, full, quantise=True)
        if self.dtype not in ("auto", "float32"):
            raise BadModel(
                f"{self.name}: there is no ONNX file of dtype {self.dtype} in {self.root}, and only float32 and "
                f"int8 are made here; there are: {self._names(self._graphs())}"
            )
        if not self.weights:
            raise BadModel(
                f"{self.name}: {self.root} has neither a float32 ONNX file nor weights to export one from; "
                f"ONNX files: {self._names(self._graphs())}{'' if self._graphs() else _contents(self.root)}"
            )
        return EncoderFiles(self.root, self.folder, "onnx", "float32", self.weights, None)

    def _graph(self) -> Path | None:
        if self.named is not None:
            precision = read_graph(self.named).precision
            if self.dtype not in ("auto", precision):
                raise BadModel(f"{self.name}: dtype is {self.dtype}, but {self.named.name} is {precision}")
            return self.named
        if self.dtype in ("auto", "float32"):
            full = self._full()
            if full is not None or self.dtype == "float32":
                return full
            every = self._graphs()
            if len(every) > 1 and not self.weights:
                raise BadModel(
                    f"{self.name}: {self.root} has several ONNX files, none of them float32 ({self._names(every)}): "
                    "choose one with dtype, or give the file itself as the model"
                )
            return every[0] if len(every) == 1 else None
        same = [p for p in self._graphs() if read_graph(p).precision == self.dtype]
        if len(same) > 1:
            raise BadModel(
                f"{self.name}: several ONNX files are {self.dtype} ({self._names(same)}): "
                "give the file itself as the model"
            )
        return same[0] if same else None

    def _full(self) -> Path | None:
        """The float32 graph: model.onnx if it is one, else the first by name that is."""
        plain = [p for p in self._graphs() if not _REDUCED.search(p.stem)]
        plain.sort(key=lambda p: (p.name != "model.onnx", p.name))
        return next((p for p in plain if read_graph(p).precision == "float32"), None)

    def _graphs(self) -> list[Path]:
        folders = dict.fromkeys([self.folder / "onnx", self.root / "onnx", self.folder, self.root])
        return [p for folder in folders for p in sorted(folder.glob("*.onnx"))]

    def _names(self, paths: Iterable[Path]) -> str:
        return ", ".join(p.relative_to(self.root).as_posix() for p in paths) or "none"

    def _saved_dtype(self) -> str:
        config = read_json(self.folder / "config.json", self.name)
        saved = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        return _DTYPES.get(saved, "float32")


def covered(files: EncoderFiles, *, code: bool = False) -> list[Path]:
    """All files that the output depends on: weights, configuration, and with `code` the folder's own Python files."""
    folders = dict.fromkeys([files.root, files.folder])
    found = [folder / name for folder in folders for name in _CONFIGURATION if (folder / name).is_file()]
    return [*found, *(sorted(files.folder.glob("*.py")) if code else ()), *files.used]


def digest(files: EncoderFiles, name: str, *, code: bool = False) -> str:
    """The digest of all these files; every cached form of the network is kept under it."""
    return digests_of(files.root, covered(files, code=code), None, name).all


def check_graph(files: EncoderFiles, task: str, name: str) -> Value | None:
    """The output of the graph, if there already is one. Raises BadModel if it does not suit `task`."""
    if files.graph is None:
        return None
    from gristmill.models.onnx import check_encoder

    return check_encoder(read_graph(files.graph), task, files.graph, name)


def check_packages(files: EncoderFiles, name: str) -> None:
    """Raises MissingExtra for a package that loading these files would need. Imports none of them."""
    needed = [("tokenizers", "text")]
    if files.backend != "torch":
        needed.append(("onnxruntime", "onnx"))
    if files.backend == "openvino":
        needed.append(("openvino", "openvino"))
    if files.backend == "torch" or files.graph is None:
        needed += [("torch", "torch"), ("transformers", "hf")]
    if files.backend != "torch" and (files.graph is None or files.quantise):
        needed.append(("onnx", "export"))
    for module, extra in needed:
        if not installed(module):
            require(module, extra, name)

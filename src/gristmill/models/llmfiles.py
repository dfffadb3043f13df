"""Language models on this machine: which names mean one, and its files."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from gristmill.errors import BadModel, nearest
from gristmill.fingerprint.modelfiles import Digests, below, digests_of, read_json
from gristmill.models.gguf import context_length

GRAPH, TOKENIZER = "openvino_model.xml", "openvino_tokenizer.xml"
# As the configurations of architectures name the tokens that they take.
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
WAY_OUT = (
    "give a folder that OpenVINO has exported or a .gguf file, or base_url if an endpoint has a model of this name"
)


@dataclass(frozen=True)
class LlmFiles:
    """A language model's files: what OpenVINO GenAI opens, all that count, and how many tokens it takes (None: it does
    not say).
    """

    opened: Path
    files: tuple[Path, ...]
    context: int | None

    @property
    def weight_bytes(self) -> int:
        """Their size, which is mostly that of the weights."""
        return sum(path.stat().st_size for path in self.files)

    def digests(self, pinned: str | None, name: str) -> Digests:
        """Of the files. Raises OtherFiles if they are not those that are pinned."""
        return digests_of(self.opened if self.opened.is_dir() else self.opened.parent, self.files, pinned, name)


def find_llm(llm: str, elsewhere: bool) -> LlmFiles | None:
    """The model that a name means on this machine: a folder with a model for OpenVINO, or with one GGUF file; such a
    file; or the copy of a model of the Hugging Face hub. None for a name at an endpoint; if one is named `elsewhere`,
    the hub's copies are not looked for. Raises BadModel for a path where nothing of the kind is.
    """
    path = Path(llm).expanduser()
    if path.is_file():
        return _file(path)
    if path.is_dir():
        if (found := _folder(path)) is not None:
            return found
        if _is_path(llm):
            held = sorted(p.name for p in path.iterdir())[:5]
            raise BadModel(
                f"llm {llm}: this folder has no {GRAPH} (it holds {', '.join(held) or 'nothing'}): {_how(path)}"
            )
    elif _is_path(llm):
        close = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else None
        hint = f"; did you mean {path.parent / close}?" if close else ""
        raise BadModel(f"llm {llm}: there is no such file or folder{hint}: {WAY_OUT}")
    elif "/" in llm and not elsewhere:
        return _hub_copy(llm)
    return None


def _is_path(llm: str) -> bool:
    """Whether a name can only be a path: hub ids and names at endpoints begin otherwise."""
    return llm.startswith(("/", "./", "../", "~")) or llm.endswith(".gguf") or os.path.isabs(llm)


def _file(path: Path) -> LlmFiles:
    if path.suffix != ".gguf":
        raise BadModel(f"llm {path}: this file is no .gguf: {WAY_OUT}")
    return LlmFiles(path, (path,), context_length(path))


def _folder(path: Path) -> LlmFiles | None:
    if (path / GRAPH).is_file():
        if not (path / TOKENIZER).is_file():
            raise BadModel(f"llm {path}: it has {GRAPH}, but no {TOKENIZER}: {_how(path)}")
        config = read_json(path / "config.json", str(path))
        inner = config.get("text_config")  # of models that also see
        said = {**(inner if isinstance(inner, dict) else {}), **config}
        context = next((said[name] for name in CONTEXTS if isinstance(said.get(name), int)), None)
        return LlmFiles(path, tuple(below(path) or ()), context)
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise BadModel(f"llm {path}: it holds {', '.join(p.name for p in files[:5])}: give one of these files")
    return _file(files[0]) if files else None


def _how(path: Path) -> str:
    if (path / "config.json").is_file():
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

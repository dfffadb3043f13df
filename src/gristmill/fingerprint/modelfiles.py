"""A model's files: where they are, whether they exist, and their digests compared with a pinned one."""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import re
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from gristmill.errors import BadModel, nearest
from gristmill.fingerprint.digests import NOT_COMPARED
from gristmill.fingerprint.diskcache import SETTLED_SECONDS, file_digest, table_digest
from gristmill.fingerprint.values import texts_in
from gristmill.job.secret import Secret, reveal
from gristmill.values import dataclass

# What model folders contain: for torch, ONNX, TensorFlow, scikit-learn, llama.cpp, gradient boosting, sentencepiece.
WEIGHTS = {
    ".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".onnx", ".pb", ".h5", ".keras", ".tflite", ".joblib", ".pkl",
    ".skops", ".npz", ".gguf", ".ubj", ".cbm", ".model",
}  # fmt: skip
_MODEL_FILE = re.compile(r"(model|config|tokenizer|vocab|meta|params|weights)\b|.*\.cfg$")
# Up to these limits a folder that an argument names is compared by the content of its files.
MOST_FILES = 10_000
MOST_BYTES = 64 << 30
NO_MODEL = f"{NOT_COMPARED}nothing in it looks like a model"
TOO_MANY = f"{NOT_COMPARED}more than {MOST_FILES:,} files"
UNREADABLE = f"{NOT_COMPARED}it cannot be read"
BY_TIMES = "by names, sizes and times "  # before the digest of these
_SUFFIX = re.compile(r"\.[\w*?\[\]-]+$")  # of a pattern: a sentence with a question mark has none
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Digests:
    """sha256 of a model's files by name, and of them all (see `table_digest`)."""

    by_file: Mapping[str, str]

    @property
    def all(self) -> str:
        """One digest for the model."""
        return table_digest(self.by_file)


class OtherFiles(BadModel):
    """A model's files do not match the pinned digest."""


class Opened:
    """Files of a model that were compared with the planned digest before it was loaded. Whatever loads it may map them
    into memory, and then answers with what they contain now.
    """

    def __init__(self, name: str, stats: Mapping[str, str], digests: Mapping[str, str]) -> None:
        self._name = name
        # By absolute path, as code may change folder: what to call it, its stat and its digest.
        self._files = {os.path.abspath(path): (path, stats[path], digest) for path, digest in digests.items()}

    def changed(self) -> str | None:
        """What has other bytes than were compared, or is gone; None if nothing has. Raises OSError if a disk fails."""
        for path, (shown, then, digest) in self._files.items():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                now = _stat(path)
                if now == then or file_digest(Path(path)) == digest:
                    self._files[path] = shown, now, digest
                    continue
            return f"{self._name}: its file {shown}"
        return None


_OPENING: ContextVar[list[Opened] | None] = ContextVar("_OPENING", default=None)


@contextlib.contextmanager
def opening() -> Iterator[Sequence[Opened]]:
    """Gives the files that are compared with a pinned digest inside."""
    found: list[Opened] = []
    before = _OPENING.set(found)
    try:
        yield found
    finally:
        _OPENING.reset(before)


def digests_of(root: Path, files: Iterable[Path], pinned: str | None, name: str) -> Digests:
    """Digests of `files`, named from `root`. Raises BadModel if `pinned` matches neither all files nor one of them."""
    opened, paths = _OPENING.get() if pinned is not None else None, sorted(set(files))
    stats = {} if opened is None else _stats(map(str, paths))  # before they are read
    by_file = {_relative(path, root): file_digest(path) for path in paths}
    found = Digests(by_file)
    if pinned is not None:
        wanted = pinned.strip().lower().removeprefix("sha256:")
        if wanted != found.all and wanted not in by_file.values():
            raise OtherFiles(
                f"{name}: sha256 is pinned to {wanted}, but the files have {found.all}: these are not the files that "
                "were pinned; get those, or check what has changed and pin the new digest"
            )
    if opened is not None:
        opened.append(Opened(name, stats, {str(path): by_file[_relative(path, root)] for path in paths}))
    return found


@dataclass(frozen=True)
class Looked:
    """What a text names: `files` below `root`, not counting what is in `apart`; empty if nothing there counts.
    `place` is the result of `place_of`, `base` the folder that the text was resolved from, "" for an absolute path.
    `sure` says that the text is no mere word, `told` that it is not secret.
    """

    place: str
    root: str
    base: str
    sure: bool
    told: bool
    apart: Collection[str]
    files: frozenset[str]

    @property
    def may_grow(self) -> bool:
        """Whether files may be added to what it names: not if that is one file."""
        return not self.files or (self.told and self.files != {self.place})

    def came(self, name: str) -> list[str]:
        """What has been added since under this name: the name itself if nothing counted before, else files."""
        try:
            found = _found(self.place, self.sure, self.apart)
        except OSError:
            return []
        if not self.files:
            return [] if found in (None, NO_MODEL) else [name]
        new = {*map(os.path.abspath, found[1])} - self.files if isinstance(found, tuple) else set()
        return sorted(os.path.relpath(path, self.base) if self.base else path for path in new)

    def with_more(self, came: Iterable[str]) -> Looked:
        """The same with these files added, as `came` returned them."""
        return replace(self, files=self.files.union(os.path.normpath(os.path.join(self.base, path)) for path in came))


def named_files(
    value: Any, looked: dict[str, Looked] | None = None, apart: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """The files and folders on this machine that texts and paths anywhere in an argument name, with digests of their
    contents, or one of the words above. A text that could be something else, such as a word that is also the name of a
    folder here, does not count, nor does a pattern (`*`) that matches nothing. What is in `apart` (real paths) does not
    count as part of its folder. What was found, or could be found later, goes to `looked`.
    """
    for item in texts_in(value):
        text = _path(item)
        if not 0 < len(text) < 4096 or "\0" in text:
            continue
        name = os.fsdecode(item) if isinstance(item, bytes) else str(item)
        name = name.encode("utf-8", "backslashreplace").decode()
        sure, root, files = os.path.dirname(text) != "" or not isinstance(item, str), "", frozenset[str]()
        try:
            found = _found(text, sure, apart)
            digest = found if found is None or isinstance(found, str) else _digest(*found)
            if isinstance(found, tuple):
                root, files = os.path.abspath(found[0]), frozenset(map(os.path.abspath, found[1]))
        except OSError:
            digest = UNREADABLE
        if digest is not None:
            yield name, digest
        own = digest is None and os.path.isfile(text) and os.path.realpath(text) in apart  # the job's own log
        may_come = digest in (None, NO_MODEL) and not own and (sure or not glob.has_magic(text))
        if looked is not None and (files or may_come):
            base = "" if os.path.isabs(text) else os.getcwd()
            looked[name] = Looked(place_of(text), root, base, sure, not isinstance(item, Secret), apart, files)


def files_told(value: Any, apart: Collection[str] = ()) -> Iterator[str]:
    """The texts and paths in a value that name existing files not in `apart`. The files are not read, as the code may
    write them.
    """
    for item in texts_in(value):
        text = _path(item)
        plain = 0 < len(text) < 4096 and "\0" not in text and not isinstance(item, (bytes, Secret))
        named = plain and (os.path.dirname(text) or Path(text).suffix) and os.path.isfile(text)
        if named and os.path.realpath(text) not in apart:
            yield text


def _path(item: str | bytes | os.PathLike[str]) -> str:
    text = str(reveal(item)) if not isinstance(item, bytes) else os.fsdecode(item)
    if text.startswith("file:"):
        from urllib.request import url2pathname  # imports http, email and ssl

        text = url2pathname(urlsplit(text).path)
    return os.path.expanduser(text)


def place_of(name: str) -> str:
    """The absolute path, or pattern, behind a name of `named_files`, from this folder (with its own `[` escaped)."""
    path = _path(name)
    if os.path.lexists(path) or not glob.has_magic(path):
        return os.path.abspath(path)
    return os.path.join(glob.escape(os.getcwd()), path)


def real_places(paths: Iterable[str | Path]) -> frozenset[str]:
    """Paths with links resolved, except in the last part of each: a link itself counts as a file of its own."""
    parts = [os.path.split(os.fspath(path).rstrip("/")) for path in paths]
    real = {folder: os.path.realpath(folder) for folder, _ in set(parts)}
    return frozenset(os.path.join(real[folder], name) for folder, name in parts)


@dataclass(frozen=True)
class Stamp:
    """The files that a name stood for when its digest was taken: their root, and size, times and inode of each."""

    root: str
    files: Mapping[str, str]


def stamp_of(place: str, digest: str, stamp: Stamp | None = None, apart: Collection[str] = ()) -> Stamp | None:
    """The stamp of what is at a place, if it has the digest that `named_files` gave it: certain if its files are as in
    `stamp`. What was added to a folder since does not count, as the code may have written it. None if a file was
    replaced, or is gone.
    """
    if stamp is not None:
        try:
            now = _stats(stamp.files)
            if now == stamp.files or _digest(Path(stamp.root), [Path(p) for p in stamp.files]) == digest:
                return Stamp(stamp.root, now)
        except OSError:
            pass  # gone; or this is another machine, or folder
    try:
        found = _found(place, True, apart)
        if isinstance(found, tuple) and _digest(*found) == digest:
            return Stamp(str(found[0]), _stats(map(str, found[1])))
    except OSError:
        pass
    return None


def whole_stamp(place: str, digest: str | None = None, stamp: Stamp | None = None) -> Stamp | None:
    """The stamp of a file, or of all files of a folder but hidden ones, whatever they are called, if they have a digest
    (any, if it is None): certain if they are as in `stamp`. None if one was replaced or added, or is gone.
    """
    path = Path(place)
    try:
        files = [path] if path.is_file() else below(path)
        if not files:
            return None
        now = Stamp(place, _stats(map(str, files)))
        root = path.parent if files == [path] else path
        if digest is None or now == stamp or digests_of(root, files, None, place).all == digest:
            return now
    except OSError:
        pass
    return None


def _stats(paths: Iterable[str]) -> dict[str, str]:
    return {path: _stat(path) for path in paths}


def _stat(path: str) -> str:
    """Size, times and inode of a file; of one that was written just now like no other, as it may be written again
    within the same tick of its times.
    """
    s, now = os.stat(path), time.time()
    told = f"{s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} {s.st_ino}"
    fresh = abs(now - s.st_mtime) < SETTLED_SECONDS or abs(now - s.st_ctime) < SETTLED_SECONDS
    return f"{told} {time.monotonic_ns()}" if fresh else told


def _found(text: str, sure: bool, apart: Collection[str] = ()) -> tuple[Path, list[Path]] | str | None:
    """What a text names: a folder and its files that count, or a file twice; one of the words above; None for nothing.
    `sure` says that the text is no mere word; what is in `apart` does not count.
    """
    try:
        kind = os.stat(text).st_mode
    except (OSError, ValueError):
        return _matching(text, apart) if glob.has_magic(text) and (sure or _SUFFIX.search(text)) else None
    path = Path(text)
    if stat.S_ISREG(kind):
        if apart and os.path.realpath(text) in apart:
            return None  # the job's own log
        return (path, [path]) if sure or path.suffix else None
    if not stat.S_ISDIR(kind):
        return None
    found = below(path, apart)
    if found is None:
        return TOO_MANY if sure or any(p.suffix in WEIGHTS for p in path.iterdir()) else None
    if any(p.suffix in WEIGHTS or (sure and _MODEL_FILE.match(p.name)) for p in found):
        return path, found
    return NO_MODEL if sure and found else None


def _matching(pattern: str, apart: Collection[str]) -> tuple[Path, list[Path]] | str | None:
    """The files that a text with `*`, `?` or `[…]` stands for."""
    plain = (re.sub(r"\[([*?[])\]", r"\1", part) for part in Path(pattern).parts)
    parts = zip(plain, Path(pattern).parts, strict=True)
    fixed = itertools.takewhile(lambda pair: not glob.has_magic(pair[1]) or glob.escape(pair[0]) == pair[1], parts)
    root = Path(*(part for part, _ in fixed))
    if "**" in pattern and below(root, apart) is None:
        return TOO_MANY
    found = list(itertools.islice(glob.iglob(pattern, recursive=True), MOST_FILES + 1))
    if len(found) > MOST_FILES:
        return TOO_MANY
    real = os.path.join(os.path.realpath(root), "")
    own = {path for path in apart if path.startswith(real)}
    left = tuple(os.path.join(path, "") for path in own if os.path.isdir(path))
    files = [
        p
        for p in map(Path, found)
        if p.is_file() and own.isdisjoint({at := os.path.realpath(p), *real_places([p])}) and not at.startswith(left)
    ]
    return (root, files) if files else None


def _digest(root: Path, files: list[Path]) -> str:
    return file_digest(root) if files == [root] else _together(root, files)


def _together(root: Path, files: list[Path]) -> str:
    stats = {_relative(p, root): p.stat() for p in files}
    if sum(s.st_size for s in stats.values()) <= MOST_BYTES:
        return digests_of(root, files, None, str(root)).all
    return BY_TIMES + table_digest({name: f"{s.st_size} {s.st_mtime_ns}" for name, s in stats.items()})


def below(folder: Path, apart: Collection[str] = ()) -> list[Path] | None:
    """The files in a folder and its subfolders, also those that links lead to, except hidden ones and those in `apart`;
    None if there are too many.
    """
    found: list[Path] = []
    entered: set[str] = set()
    for at, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(at)
        if real in entered or (real in apart and at != os.fspath(folder)):
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not _hidden(name))
        left = [n for n in names if not _hidden(n) and not (apart and os.path.join(real, n) in apart)]
        found += [path for name in left if (path := Path(at, name)).is_file()]
        if len(found) > MOST_FILES or len(entered) > MOST_FILES:
            return None
    return found


def _hidden(name: str) -> bool:
    return name.startswith((".", "__pycache__"))


def _relative(path: Path, root: Path) -> str:
    try:
        return path.relative_to(root).as_posix()
    except ValueError:
        return path.name


def inside(folder: Path, named: str, name: str) -> Path:
    """A file or folder that a model's own files name. Raises BadModel if the name leaves the model's folder; links in
    it may lead elsewhere, like those of a hub's cache.
    """
    parts = PurePosixPath(named.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or Path(named).is_absolute():
        raise BadModel(f"{name}: its files refer to {named!r}, which is outside {folder}: this is refused")
    return folder / named


def model_file(text: str, kind: str, suffixes: tuple[str, ...] = ()) -> Path:
    """A model that is one file. Raises BadModel if there is none (for a folder, naming fitting files in it)."""
    path = Path(text).expanduser()
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix in suffixes)
        hint = f"; it holds {', '.join(inside[:5])}" if inside else ""
        raise BadModel(f"{text}: this is a folder, but a file ({kind}) is needed{hint}: give the file")
    if not path.is_file():
        raise BadModel(f"{text}: there is no such file (a file for {kind} is needed){_nearby(path)}")
    return path


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (nor a folder {path.parent})"
    close = nearest(path.name, [p.name for p in path.parent.iterdir()])
    return f"; did you mean {path.parent / close}?" if close else ""


def read_json(path: Path, name: str) -> dict[str, Any]:
    """A configuration file of a model; {} if there is none. Raises BadModel, naming the file, if it cannot be read."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise BadModel(f"{name}: {path} cannot be read as JSON: {e}") from e
    return found if isinstance(found, dict) else {"list": found}


# ---------------------------------------------------------------- folders and the hub


def model_folder(text: str, *, code: bool = False) -> Path:
    """A folder on disk, or the local copy of a model of the Hugging Face hub ("org/name", "org/name@revision").

    A copy that exists already is used as it is; else it is downloaded: configuration, safetensors and fp32 ONNX
    (and Python files with `code`). Raises BadModel if there is neither.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise BadModel(f"{text}: this is a file, but a model folder is needed: give the folder that holds config.json")
    repo, _, revision = text.partition("@")
    if not _HUB_ID.fullmatch(repo):
        raise BadModel(f"{text}: there is no such folder{_nearby(path)}")
    return _hub_copy(repo, revision or None, text, code, _nearby(path))


def _hub_copy(repo: str, revision: str | None, text: str, code: bool, nearby: str) -> Path:
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ModuleNotFoundError as e:
        raise BadModel(
            f"{text}: there is no such folder{nearby}; if you mean a model on the Hugging Face hub: "
            "pip install 'gristmill[hf]'"
        ) from e
    with contextlib.suppress(LocalEntryNotFoundError, FileNotFoundError):
        copy = Path(snapshot_download(repo, revision=revision, local_files_only=True))
        if (copy / "config.json").is_file():
            return copy
    try:
        info = HfApi().model_info(repo, revision=revision, timeout=10)
        names = [s.rfilename for s in info.siblings or ()]
        return Path(snapshot_download(repo, revision=info.sha, allow_patterns=_wanted(names, code)))
    except Exception as e:  # any network failure: the remedy is the same
        reason = str(e).strip().partition("\n")[0] or type(e).__name__
        raise BadModel(
            f"{text}: there is no such folder, and no model of this name could be downloaded from the Hugging Face hub "
            f"({reason}){nearby}"
        ) from e


def _wanted(names: list[str], code: bool) -> list[str]:
    """Configuration, tokenizer, one format of weights, and the fp32 ONNX graph; nothing for other frameworks."""
    wanted = [n for n in names if n.endswith((".json", ".txt", ".model")) or (code and n.endswith(".py"))]
    safe = [n for n in names if n.endswith(".safetensors")]
    wanted += safe or [n for n in names if n.endswith(".bin") and not n.startswith(("onnx/", "openvino/"))]
    wanted += [n for n in names if n in ("onnx/model.onnx", "model.onnx") or n.startswith("onnx/model.onnx_data")]
    return wanted

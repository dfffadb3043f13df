"""A version of a registered model, whoever keeps the register: what it is called, where its files are, what they must
be, and who approved it for what.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gristmill.errors import BadModel
from gristmill.fingerprint.modelfiles import MOST_FILES, Digests, below, digests_of
from gristmill.values import dataclass

OURS, MLFLOW = "registry:", "models:/"  # before the names of models
_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]*")


@dataclass(frozen=True)
class Registered:
    """A version of a registered model as a run has used it: what was asked for (`asked`), for which `stage` it is
    approved ("" for one that is named by its version), by whom, and when.
    """

    name: str
    version: str
    digest: str
    asked: str
    stage: str = ""
    approved_by: str = ""
    approved_at: str = ""

    @property
    def label(self) -> str:
        """As a reference names it: `reviews/3`."""
        return f"{self.name}/{self.version}"

    def __str__(self) -> str:
        """For a person."""
        who = f" by {self.approved_by}" if self.approved_by else ""
        when = f" at {self.approved_at}" if self.approved_at else ""
        return f"{self.label}" + (f", approved for {self.stage}{who}{when}" if self.stage else "")


@dataclass(frozen=True)
class Approval:
    """Who approved a version for a stage, and when."""

    by: str
    at: str


@dataclass(frozen=True)
class Version:
    """A version of a model: where its files are, from here; their digest, if it is recorded; and its stages."""

    name: str
    version: str
    path: str
    sha256: str | None
    approved: Mapping[str, Approval]
    place: str

    @property
    def label(self) -> str:
        """As a reference names it."""
        return f"{self.name}/{self.version}"


def check(version: Version, digest: str) -> None:
    """Raises BadModel if the files of a version, which have this digest, are not those that were recorded."""
    if version.sha256 is not None and version.sha256 != digest:
        raise BadModel(
            f"{version.place}: {version.label} was recorded with sha256 {version.sha256}, but {version.path} has "
            f"{digest}: put the recorded files back, or give these a version of their own (gristmill approve "
            f"{version.name} VERSION --for STAGE --path {version.path})"
        )


def digests_at(path: str, what: str) -> Digests:
    """Digests of a file, or of all files of a folder but hidden ones. Raises BadModel."""
    root = Path(path).expanduser()
    if root.is_file():
        return digests_of(root.parent, [root], None, what)
    if not root.is_dir():
        raise BadModel(f"{what}: there is no file or folder {path}: put it there, or correct its path")
    held = below(root)
    if not held:
        why = "has no files" if held is not None else f"has more than {MOST_FILES:,} files"
        raise BadModel(f"{what}: {path} {why}: give the model's own folder")
    return digests_of(root, held, None, what)


def check_name(name: str, what: str, place: str) -> None:
    """Raises BadModel for what cannot be part of a reference."""
    if not _NAME.fullmatch(name):
        raise BadModel(f"{place}: the {what} {name!r} is no name: use letters, digits, dots, dashes and underscores")

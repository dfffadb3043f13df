"""Which model a name stands for: `registry:NAME@STAGE` by the file models.yaml of the user's repository, and
`models:/NAME@ALIAS` by MLflow. A name is resolved once, when a job is planned, and its files have to be those that were
approved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from gristmill.errors import BadModel
from gristmill.job.specs import Call, changed
from gristmill.models.versions import MLFLOW, OURS, Approval, Registered, Version, check, digests_at

_FIELDS = ("model", "llm")  # of specs, that name files
# Words that say where a model stands today, and not which it is.
_MOVING = "latest newest current production prod staging stable live champion main master head best"
_MOVES = re.compile(rf"(?:.*[-_.])?(?:{_MOVING.replace(' ', '|')})(?:\.\w+)?", re.IGNORECASE)
_CONTENT = re.compile(r"[0-9a-f]{40,64}")  # what a hub's cache names files by


@dataclass(frozen=True)
class Found:
    """A spec whose model is no longer a name but the path of its files, and what the registry says of these; `by_file`
    are their digests.
    """

    spec: Any
    registered: Registered
    by_file: Mapping[str, str]

    def check_loaded(self, digests: Mapping[str, str]) -> None:
        """Raises BadModel if files that are to be loaded, by their digests, are none of those that were approved."""
        known = set(self.by_file.values())
        if wrong := [name for name, digest in digests.items() if digest not in known]:
            raise BadModel(
                f"{self.registered.asked}: {wrong[0]} is not among the files of {self.registered.label}, or was "
                "changed while they were compared: run again"
            )


def is_named(text: Any) -> bool:
    """Whether a text names a model of a registry."""
    return isinstance(text, str) and text.startswith((OURS, MLFLOW))


def found(spec: Any) -> Found | None:
    """A spec with the files that the registry has under its model's name; None if that is not one of a registry. An
    argument of a function may be such a name, too. Raises BadModel, and MissingExtra for MLflow.
    """
    if not is_dataclass(spec):
        return None
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name in _FIELDS and is_named(value):
            _check_local(spec, value)
            return _with_files(spec, field.name, located(value, getattr(spec, "suffixes", None)), value)
        if isinstance(value, Call) and (named := [name for name, arg in value.args.items() if is_named(arg)]):
            return _with_arguments(spec, field.name, value, named)
    return None


def as_files(spec: Any) -> Any:
    """The spec with its files, whether or not a registry names them. Raises as `found`."""
    named = found(spec)
    return spec if named is None else named.spec


def located(asked: str, suffixes: tuple[str, ...] | None = None) -> Version:
    """The version that a name stands for; `suffixes` are those of a kind of model that is one file. Raises BadModel."""
    if asked.startswith(MLFLOW):
        from gristmill.models import mlflow

        return mlflow.located(asked, suffixes)
    from gristmill.models import modelsfile

    file, _, name = asked.removeprefix(OURS).rpartition("#")
    return modelsfile.version_at(modelsfile.read(file or modelsfile.nearest_file()), name, asked)


def file_of(asked: str) -> str:
    """The path of what a name stands for, for those who look at its suffix; any other text is a path itself."""
    return located(asked).path if is_named(asked) else asked


def _with_files(spec: Any, name: str, version: Version, asked: str) -> Found:
    digests = digests_at(version.path, f"{asked} ({version.label}, {version.place})")
    check(version, digests.all)
    made = changed(spec, **{name: version.path})
    if os.path.isfile(version.path) and getattr(spec, "sha256", digests) is None:
        made = changed(made, sha256=digests.all)
    return Found(made, _registered(version, digests.all, asked), digests.by_file)


def _with_arguments(spec: Any, field: str, call: Call, named: list[str]) -> Found:
    args, several = dict(call.args), []
    for name in named:
        version = located(args[name])
        digests = digests_at(version.path, f"{args[name]} ({version.label}, {version.place})")
        check(version, digests.all)
        several.append(Found(spec, _registered(version, digests.all, args[name]), digests.by_file))
        args[name] = version.path
    return replace(several[0], spec=changed(spec, **{field: replace(call, args=args)}))


def _registered(version: Version, digest: str, asked: str) -> Registered:
    stage = asked.rpartition("@")[2].partition("#")[0] if "@" in asked else ""
    approval = version.approved.get(stage, Approval("", ""))
    return Registered(version.name, version.version, digest, asked, stage, approval.by, approval.at)


def _check_local(spec: Any, asked: str) -> None:
    """Raises BadModel for a model that is elsewhere, of which a registry of files says nothing."""
    at_endpoints = hasattr(spec, "base_url") and not hasattr(spec, "sha256")
    if at_endpoints or getattr(spec, "base_url", None) is not None:
        raise BadModel(f"{asked} names files, and this model is one at an endpoint: give its name there")


# ---------------------------------------------------------------- names that move


def moving(spec: Any) -> tuple[str, ...]:
    """A warning for a model whose path may stand for other files tomorrow, unless its digest is pinned."""
    path = next((value for name in _FIELDS if isinstance(value := getattr(spec, name, None), str)), None)
    if path is None or is_named(path) or getattr(spec, "sha256", None) is not None or not os.path.exists(path):
        return ()
    parts = Path(path).parts[-2:]
    why = next((f"its path says {part!r}" for part in parts if _MOVES.fullmatch(part)), None)
    link = next((p for p in (Path(path), Path(path).parent) if str(p) != "." and _links(p)), None)
    if why is None and link is not None:
        why = f"{link} is a link to {os.readlink(link)}"
    if why is None:
        return ()
    return (
        f"model {path}: {why}, so that it may be another model tomorrow: give the path of a version, pin sha256, or "
        f"approve it (gristmill approve NAME VERSION --for batch --path {os.path.relpath(os.path.realpath(path))}) and "
        f"name it {OURS}NAME@batch",
    )


def _links(path: Path) -> bool:
    return path.is_symlink() and not _CONTENT.fullmatch(os.path.basename(os.readlink(path)))

"""Which model a name stands for: `registry:NAME@STAGE` by the file models.yaml of the user's repository, and
`models:/NAME@ALIAS` by MLflow. A name is resolved once, when a job is planned, and its files have to be those that were
approved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from gristmill.errors import BadModel
from gristmill.fingerprint.modelfiles import Digests, place_of, whole_stamp
from gristmill.fingerprint.pins import Approved
from gristmill.job.specs import Call, changed
from gristmill.models.versions import MLFLOW, OURS, Approval, Registered, Version, check, digests_at
from gristmill.values import dataclass

_FIELDS = ("model", "llm")  # of specs, that name files
# Words that say where a model stands today, and not which it is.
_MOVING = "latest newest current production prod staging stable live champion main master head best"
_MOVES = re.compile(rf"(?:.*[-_.])?(?:{_MOVING.replace(' ', '|')})(?:\.\w+)?", re.IGNORECASE)
_CONTENT = re.compile(r"[0-9a-f]{40,64}")  # what a hub's cache names files by


@dataclass(frozen=True)
class Found:
    """A spec whose models are no longer names but the paths of their files, and what the registry says of each. `model`
    has the digests by file of the one that the spec itself loads, None if all are arguments of its code; `arguments`
    are the digests of these by what they are called, and `approved` their files, which no worker may find changed.
    """

    spec: Any
    registered: tuple[Registered, ...] = ()
    model: Mapping[str, str] | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    approved: tuple[Approved, ...] = ()

    def check_loaded(self, digests: Mapping[str, str]) -> None:
        """Raises BadModel if files that are to be loaded, by their digests, are none of those that were approved."""
        if self.model is None:
            return
        known, one = set(self.model.values()), self.registered[0]
        if wrong := [name for name, digest in digests.items() if digest not in known]:
            raise BadModel(
                f"{one.asked}: {wrong[0]} is not among the files of {one.label}, or was changed while they were "
                "compared: run again"
            )

    def with_files(self, name: str, version: Version, asked: str) -> Found:
        """With the files of a version in a field of the spec."""
        digests = _compared(version, asked)
        made = changed(self.spec, **{name: version.path})
        if os.path.isfile(version.path) and getattr(self.spec, "sha256", digests) is None:
            made = changed(made, sha256=digests.all)
        one = _registered(version, digests.all, asked)
        return replace(self, spec=made, registered=(one, *self.registered), model=digests.by_file)

    def with_arguments(self, name: str, call: Call) -> Found:
        """With the files of the versions that arguments of a call name."""
        found, args = self, dict(call.args)
        for key in [key for key, arg in call.args.items() if is_named(arg)]:
            asked, version = args[key], located(args[key])
            what = f"argument {key}" if name == "call" else f"argument {key} of {name}"
            before = whole_stamp(place_of(version.path))
            digests = _compared(version, asked)
            args[key] = version.path
            found = replace(
                found,
                registered=(*found.registered, _registered(version, digests.all, asked)),
                arguments={**found.arguments, f"files of {what}": digests.all},
                approved=(
                    *found.approved,
                    Approved(version.path, f"{version.path} ({version.label}, {what})", digests.all, before),
                ),
            )
        return replace(found, spec=changed(found.spec, **{name: replace(call, args=args)}))


def is_named(text: Any) -> bool:
    """Whether a text names a model of a registry."""
    return isinstance(text, str) and text.startswith((OURS, MLFLOW))


def found(spec: Any) -> Found | None:
    """A spec with the files that the registry has under its model's name; None if that is not one of a registry. An
    argument of a function may be such a name, too. Raises BadModel, and MissingExtra for MLflow.
    """
    if not is_dataclass(spec):
        return None
    found = Found(spec)
    for name in [one.name for one in fields(spec)]:
        value = getattr(spec, name)
        if name in _FIELDS and is_named(value):
            _check_local(spec, value)
            found = found.with_files(name, located(value, getattr(spec, "suffixes", None)), value)
        elif isinstance(value, Call):
            found = found.with_arguments(name, value)
    return found if found.registered else None


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


def _compared(version: Version, asked: str) -> Digests:
    digests = digests_at(version.path, f"{asked} ({version.label}, {version.place})")
    check(version, digests.all)
    return digests


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
    real = os.path.realpath(path)
    shown = min(os.path.relpath(real), real, key=len)
    return (
        f"model {path}: {why}, so that it may be another model tomorrow: give the path of a version, pin sha256, or "
        f"approve it (gristmill approve NAME VERSION --for batch --path {shown}) and "
        f"name it {OURS}NAME@batch",
    )


def _links(path: Path) -> bool:
    return path.is_symlink() and not _CONTENT.fullmatch(os.path.basename(os.readlink(path)))

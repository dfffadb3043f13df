"""models.yaml: the models of a user's repository, with their versions, files and approvals."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gristmill.errors import BadJob, BadModel, did_you_mean
from gristmill.files.disk import LOCAL
from gristmill.jobfile.document import read_document, write_document
from gristmill.models.versions import OURS, Approval, Version, check, check_name, digests_at
from gristmill.process.extras import installed, require
from gristmill.values import dataclass

FILE = "models.yaml"
_KEYS = ("path", "sha256", "approved", "about")


@dataclass(frozen=True)
class Registry:
    """What is in a file models.yaml; `value` as it is written there."""

    file: str
    versions: tuple[Version, ...]
    value: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        """The models, in the order of the file."""
        return list(dict.fromkeys(v.name for v in self.versions))


def nearest_file() -> str:
    """The file models.yaml of this folder, or of the nearest above it that has one. Raises BadModel."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / FILE).is_file():
            return os.path.relpath(folder / FILE)
    raise BadModel(
        f"there is no {FILE} in {here} or above it: gristmill approve NAME VERSION --for STAGE --path PATH makes one, "
        f"and {OURS}FILE#NAME@STAGE names another"
    )


def read(file: str) -> Registry:
    """A file models.yaml. Raises BadModel, with the line, for one that is none."""
    try:
        text = Path(file).expanduser().read_bytes()
    except OSError as e:
        raise BadModel(f"{file}: cannot be read ({e.strerror}): give the file that gristmill approve writes") from None
    return parsed(text, file)


def parsed(text: bytes, file: str) -> Registry:
    """The text of a file models.yaml: see `read`."""
    try:
        document = read_document(text, file, "it maps models' names to their versions", empty=True)
    except BadJob as e:
        raise BadModel(str(e)) from None
    versions = []
    for name, held in document.value.items():
        check_name(name, "model", document.place((name,)))
        for version, said in _mapping(held, f"{document.place((name,))}: {name}", "versions by their names").items():
            place = document.place((name, version))
            check_name(version, "version", place)
            versions.append(_version(name, version, said, place, os.path.dirname(file)))
    _check_stages(versions)
    return Registry(file, tuple(versions), document.value)


def _version(name: str, version: str, said: Any, place: str, folder: str) -> Version:
    label = f"{place}: {name}/{version}"
    held = _mapping(said, label, "path, sha256 and approved")
    if unknown := [key for key in held if key not in _KEYS]:
        raise BadModel(
            f"{label} has no key {unknown[0]!r}: its keys are {', '.join(_KEYS)}{did_you_mean(unknown[0], _KEYS)}"
        )
    path, digest = held.get("path"), held.get("sha256")
    if not isinstance(path, str) or not path:
        raise BadModel(f"{label} has no path: write where its files are, from the folder of {FILE}")
    if digest is not None:
        digest = str(digest).strip().lower().removeprefix("sha256:")
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise BadModel(f"{label}: sha256 is {held['sha256']!r}: it has 64 hex digits; gristmill approve writes it")
    approved = {}
    for stage, approval in _mapping(held.get("approved") or {}, f"{label}: approved", "stages").items():
        check_name(stage, "stage", place)
        told = _mapping(approval or {}, f"{label}: approved for {stage}", "by and at")
        approved[stage] = Approval(str(told.get("by") or ""), str(told.get("at") or ""))
    if approved and digest is None:
        raise BadModel(
            f"{label} is approved for {next(iter(approved))}, and has no sha256 that says which files were: gristmill "
            f"approve {name} {version} --for {next(iter(approved))} records it"
        )
    expanded = os.path.expanduser(path)
    return Version(name, version, os.path.normpath(os.path.join(folder, expanded)), digest, approved, place)


def _mapping(value: Any, what: str, of: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadModel(f"{what} is {value!r:.60}: it has to be a mapping of {of}")
    return value


def _check_stages(versions: Iterable[Version]) -> None:
    """Raises BadModel if two versions of a model are in one stage."""
    seen: dict[tuple[str, str], Version] = {}
    for v in versions:
        for stage in v.approved:
            other = seen.setdefault((v.name, stage), v)
            if other is not v:
                raise BadModel(
                    f"{v.place}: {v.label} and {other.label} are both approved for {stage}, so that {v.name}@{stage} "
                    f"could be either: keep one of them; gristmill approve {v.name} VERSION --for {stage} moves it"
                )


def version_at(registry: Registry, name: str, asked: str) -> Version:
    """The version that `NAME@STAGE` or `NAME/VERSION` names. Raises BadModel, with the nearest that there is."""
    model, _, rest = name.partition("@") if "@" in name else name.partition("/")
    own = [v for v in registry.versions if v.name == model]
    if not own:
        there = f"it has {', '.join(registry.names) or 'none'}{did_you_mean(model, registry.names)}"
        raise BadModel(f"{asked}: {registry.file} has no model {model!r}: {there}")
    versions = {v.version: v for v in own}
    if "@" not in name:
        if not rest:
            raise BadModel(f"{asked}: which version? Write {model}@STAGE, or {model}/VERSION: {_stages(own)}")
        if rest in versions:
            return versions[rest]
        raise BadModel(
            f"{asked}: {registry.file} has no version {rest!r} of {model}: it has {', '.join(versions)}"
            f"{did_you_mean(rest, versions)}"
        )
    stages = {stage: v for v in own for stage in v.approved}
    if rest in stages:
        return stages[rest]
    raise BadModel(
        f"{asked}: no version of {model} is approved for {rest!r}: {_stages(own)}; gristmill approve {model} VERSION "
        f"--for {rest or 'STAGE'} approves one{did_you_mean(rest, stages)}"
    )


def _stages(versions: Iterable[Version]) -> str:
    told = [f"{v.version} ({', '.join(v.approved) or 'approved for nothing'})" for v in versions]
    return f"its versions are {', '.join(told)}"


# ---------------------------------------------------------------- approving


@dataclass(frozen=True)
class Approved:
    """What an approval has written: the version as it is now, its stage, and the version that had it before ("" for
    none). `changed` is whether anything was written.
    """

    version: Version
    stage: str
    before: str
    changed: bool


def approve(
    name: str, version: str, stage: str, *, by: str, at: str, path: str | None = None, file: str = FILE
) -> Approved:
    """Approve a version for a stage, which no other version has from then on: its digest, who and when are written to
    models.yaml, which is replaced in one step and keeps its comments. `path` is where the files of a new version are,
    from here. Raises BadModel, above all if the files are not those that were recorded, and MissingExtra.
    """
    for given, what in ((name, "model"), (version, "version"), (stage, "stage")):
        check_name(given, what, "approve")
    file = os.path.realpath(os.path.expanduser(file))
    if not os.path.isdir(os.path.dirname(file)):
        raise BadModel(f"{os.path.relpath(file)}: cannot be written: there is no folder {os.path.dirname(file)}")
    try:
        return _approved(name, version, stage, Approval(by, at), path, file)
    except OSError as e:
        raise BadModel(f"{os.path.relpath(file)}: cannot be written ({e.strerror}): nothing is approved") from e


def _approved(name: str, version: str, stage: str, approval: Approval, path: str | None, file: str) -> Approved:
    while True:
        looked = LOCAL.look(file) if os.path.exists(file) else None
        text = b"" if looked is None else looked[0]
        known = parsed(text, os.path.relpath(file))
        digest, own = _examined(known, name, version, path, os.path.relpath(file))
        had = next((v.version for v in known.versions if v.name == name and stage in v.approved), "")
        value = _with_approval(known.value, (name, version, stage), own, digest, approval)
        if had == version and _told(known, name, version).sha256 == digest:
            return Approved(_told(known, name, version), stage, had, False)
        made = _rewritten(text, value, file).encode()
        after = parsed(made, os.path.relpath(file))
        if after.value != value:
            raise BadModel(f"{os.path.relpath(file)}: cannot be edited without changing other entries: edit it by hand")
        if LOCAL.write_new(file, made) if looked is None else LOCAL.swap(file, made, looked[1]):
            return Approved(_told(after, name, version), stage, "" if had == version else had, True)


def _told(known: Registry, name: str, version: str) -> Version:
    return next(v for v in known.versions if (v.name, v.version) == (name, version))


def _examined(known: Registry, name: str, version: str, path: str | None, file: str) -> tuple[str, str]:
    """The digest of the files of a version, and their path from the registry's folder. Raises BadModel."""
    found = next((v for v in known.versions if (v.name, v.version) == (name, version)), None)
    if found is None and path is None:
        versions = [v.version for v in known.versions if v.name == name]
        if versions:
            raise BadModel(
                f"{file} has no version {version!r} of {name}: it has {', '.join(versions)}; --path PATH (path=) adds "
                f"one{did_you_mean(version, versions)}"
            )
        near = did_you_mean(name, known.names)
        raise BadModel(f"{file} has no model {name!r}: --path PATH (path=) says where the files of a new one are{near}")
    folder = os.path.dirname(os.path.realpath(file))
    if path is None:
        assert found is not None
        own = str(known.value[name][version]["path"])
        at = found.path
    else:
        at = os.path.expanduser(path)
        own = at if os.path.isabs(at) else os.path.relpath(os.path.abspath(at), folder)
        if found is not None and os.path.realpath(found.path) != os.path.realpath(at):
            raise BadModel(
                f"{found.place}: {found.label} is {found.path}: files at {path} are another version: name it"
            )
    digest = digests_at(at, f"{name}/{version}").all
    if found is not None:
        check(found, digest)
    return digest, own


def _with_approval(
    value: Mapping[str, Any], which: tuple[str, str, str], path: str, digest: str, approval: Approval
) -> dict[str, Any]:
    """The content of models.yaml with a version approved for a stage, and no other version of the model."""
    name, version, stage = which
    models = {model: {v: dict(said) for v, said in versions.items()} for model, versions in value.items()}
    own = models.setdefault(name, {})
    for said in own.values():
        if stage in (said.get("approved") or {}):
            said["approved"] = {other: told for other, told in said["approved"].items() if other != stage}
            if not said["approved"]:
                del said["approved"]
    said = own.setdefault(version, {"path": path})
    said["sha256"] = digest
    said["approved"] = {**(said.get("approved") or {}), stage: {"by": approval.by, "at": approval.at}}
    return models


def _rewritten(text: bytes, value: Mapping[str, Any], file: str) -> str:
    """The text with other content, and the same comments. Raises MissingExtra if it has any, and there is no ruamel."""
    commented = any(b"#" in line for line in text.splitlines())
    if not commented and not installed("ruamel.yaml"):
        return write_document(value)
    require("ruamel.yaml", "registry", f"{os.path.relpath(file)} has comments, and to keep them, approve")
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 4096
    data = yaml.load(text.decode("utf-8-sig")) or {}
    _merge(data, value)
    out = io.StringIO()
    yaml.dump(data, out)
    return out.getvalue()


def _merge(data: Any, value: Mapping[str, Any]) -> None:
    """Make a mapping equal to another, and touch nothing that is equal already."""
    for key in [key for key in data if key not in value]:
        del data[key]
    for key, item in value.items():
        if isinstance(item, Mapping) and isinstance(data.get(key), dict):
            _merge(data[key], item)
        elif key not in data or data[key] != item:
            data[key] = item


# ---------------------------------------------------------------- listing

SAME, OTHER, GONE, UNRECORDED = "as recorded", "changed", "missing", "not recorded"


def state(version: Version) -> str:
    """Whether the files of a version are those that were recorded, as one of the words above."""
    try:
        digest = digests_at(version.path, version.label).all
    except BadModel:
        return GONE
    return UNRECORDED if version.sha256 is None else SAME if version.sha256 == digest else OTHER

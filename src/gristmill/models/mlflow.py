"""Models of MLflow's registry: `models:/NAME@ALIAS`, where the version's tag `approved_for` names the alias. The tag
`sha256`, which `gristmill approve` sets, says what the files of a version have to be.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from gristmill.errors import BadModel, RunFailed, did_you_mean
from gristmill.fingerprint.diskcache import built
from gristmill.job.uris import is_local, local_path
from gristmill.models.versions import MLFLOW, Approval, Version, check, check_name, digests_at
from gristmill.process.away import STATUSES, is_away
from gristmill.process.extras import require

APPROVED_FOR = "approved_for"  # the tag with the aliases that a version is approved for, with commas between
_DIGEST, _BY, _AT = "sha256", "approved_by", "approved_at"
_FOLDERS = ("config.json", "modules.json", "openvino_model.xml")  # one of these is in a folder of a text model
T = TypeVar("T")


def located(asked: str, suffixes: tuple[str, ...] | None) -> Version:
    """The version that `models:/NAME@ALIAS` or `models:/NAME/VERSION` stands for, with its files on this machine;
    `#PATH` after it names what inside it is the model. Raises BadModel, and MissingExtra.
    """
    named, _, inside = asked.removeprefix(MLFLOW).partition("#")
    client = _client(asked)
    if "@" in named:
        name, _, alias = named.partition("@")
        found = _told(asked, lambda: client.get_model_version_by_alias(name, alias), lambda: _hint(client, name, alias))
        if alias not in _stages(found):
            raise BadModel(
                f"{asked}: version {found.version} of {name} has the alias, and its tag {APPROVED_FOR} is "
                f"{found.tags.get(APPROVED_FOR)!r}: it is not approved; gristmill approve {MLFLOW}{name} "
                f"{found.version} --for {alias} approves it"
            )
    else:
        name, _, version = named.rpartition("/")
        found = _told(asked, lambda: client.get_model_version(name, version), lambda: _hint(client, name))
    path = _inside(_fetched(client, found), inside, suffixes, asked)
    told = Approval(found.tags.get(_BY, ""), found.tags.get(_AT, ""))
    if _DIGEST in found.tags:  # which is of all of it
        _checked(client, found)
    return Version(name, str(found.version), path, None, dict.fromkeys(_stages(found), told), "MLflow")


def approve(name: str, version: str, stage: str, *, by: str, at: str) -> Version:
    """Give a version of MLflow's registry the alias `stage` and the tags that say who approved it, when, and what its
    files are. Raises BadModel, above all if these are not those of an earlier approval, and MissingExtra.
    """
    check_name(stage, "stage", "approve")
    model, asked = name.removeprefix(MLFLOW), f"{name}/{version}"
    client = _client(asked)
    found = _told(asked, lambda: client.get_model_version(model, version), lambda: _hint(client, model))
    path, digest = _checked(client, found)
    stages = ",".join(sorted({*_stages(found), stage}))
    tags = {_DIGEST: digest, APPROVED_FOR: stages, _BY: by, _AT: at}
    _told(asked, lambda: [client.set_model_version_tag(model, version, key, value) for key, value in tags.items()])
    _told(asked, lambda: client.set_registered_model_alias(model, stage, version))
    return Version(model, version, path, digest, {stage: Approval(by, at)}, "MLflow")


def _checked(client: Any, found: Any) -> tuple[str, str]:
    """Where all files of a version are, and their digest. Raises BadModel if its tag says another one."""
    path = _fetched(client, found)
    digest = digests_at(path, f"{MLFLOW}{found.name}/{found.version}").all
    check(Version(found.name, str(found.version), path, found.tags.get(_DIGEST), {}, "MLflow"), digest)
    return path, digest


def _stages(found: Any) -> list[str]:
    return [stage.strip() for stage in found.tags.get(APPROVED_FOR, "").split(",") if stage.strip()]


def _client(asked: str) -> Any:
    mlflow = require("mlflow", "mlflow", asked)
    if not hasattr(mlflow.MlflowClient, "get_model_version_by_alias"):
        raise BadModel(f"{asked}: MLflow {mlflow.__version__} has no aliases: pip install 'gristmill[mlflow]'")
    return _told(asked, mlflow.MlflowClient)


def _told(asked: str, call: Callable[[], T], hint: Callable[[], str] = str) -> T:
    """What MLflow answers. Raises BadModel for what it refuses, with its own words; RunFailed if it is not there."""
    exceptions = require("mlflow.exceptions", "mlflow", asked)
    try:
        return call()
    except exceptions.MlflowException as e:
        words = f"{asked}: MLflow: {str(e).partition(chr(10))[0]}"
        if is_away(e) or e.get_http_status_code() in STATUSES:
            raise RunFailed(f"{words}: check MLFLOW_TRACKING_URI, or run again once the registry answers") from e
        raise BadModel(f"{words}{hint()}") from e


def _hint(client: Any, name: str, alias: str = "") -> str:
    """The nearest of the names that there are, or the aliases of a model."""
    exceptions = require("mlflow.exceptions", "mlflow", name)
    try:
        names = [m.name for m in client.search_registered_models(max_results=1000)]
        if name not in names:
            return did_you_mean(name, names)
        aliases = client.get_registered_model(name).aliases
        versions = sorted(str(v.version) for v in client.search_model_versions(f"name='{name}'"))
    except exceptions.MlflowException:
        return ""  # what was refused is told already
    there = f": its versions are {', '.join(versions)}, its aliases {', '.join(aliases) or 'none'}"
    return there + (did_you_mean(alias, aliases) if alias else "")


def _fetched(client: Any, found: Any) -> str:
    """A version's files on this machine: where they are, or a copy in the cache."""
    uri = str(client.get_model_version_download_uri(found.name, found.version))
    if is_local(uri) and os.path.exists(local_path(uri)):
        return local_path(uri)
    artifacts = require("mlflow.artifacts", "mlflow", MLFLOW)
    key = hashlib.sha256(f"{uri}\0{found.name}\0{found.version}\0{found.creation_timestamp}".encode()).hexdigest()[:24]

    def download(folder: Path) -> None:
        where = f"{MLFLOW}{found.name}/{found.version}"
        _told(where, lambda: artifacts.download_artifacts(artifact_uri=where, dst_path=str(folder)))

    return str(built(f"mlflow/{key}", download))


def _inside(path: str, inside: str, suffixes: tuple[str, ...] | None, asked: str) -> str:
    """What in the files of a version is the model itself. Raises BadModel if that is not plain."""
    root = Path(path)
    if inside:
        if ".." in Path(inside).parts or not (root / inside).exists():
            held = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
            raise BadModel(f"{asked}: has no {inside}: it has {', '.join(held[:8])}{did_you_mean(inside, held)}")
        return str(root / inside)
    if root.is_file():
        return path
    if suffixes is not None:
        return str(
            _only([p for p in sorted(root.rglob("*")) if p.suffix in suffixes], root, asked, ", ".join(suffixes))
        )
    folders = [p for p in (root, *sorted(root.rglob("*"))) if p.is_dir() and any((p / n).is_file() for n in _FOLDERS)]
    return str(folders[0] if folders else root)


def _only(found: Iterable[Path], root: Path, asked: str, what: str) -> Path:
    several = list(found)
    if len(several) == 1:
        return several[0]
    names = ", ".join(p.relative_to(root).as_posix() for p in several) or "none"
    raise BadModel(f"{asked}: a file with {what} is needed, and it has {names}: name it with #PATH after the model")

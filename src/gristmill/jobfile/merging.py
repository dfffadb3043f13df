"""Profiles and `--set` laid over a job file's document, before variables are filled in and anything is checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.errors import BadJob, nearest
from gristmill.job.options import ENGINE, EngineSpec, default_engine
from gristmill.job.recipients import HEADS, head
from gristmill.job.specs import kind_in
from gristmill.jobfile.document import Document, Path, Written
from gristmill.jobfile.overlay import split_set

_STEP = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def normal(document: Document) -> Document:
    """The document with shorthands written out: a text (or a list) as source, a text as sink, engine or step."""
    return Document(document.name, _normal(document.value), document.places)


def _normal(value: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(value)
    for name, key in (("source", "uri"), ("sink", "uri"), ("engine", "name"), ("schedule", "cron")):
        if isinstance(out.get(name), (str, list)):
            out[name] = {key: out[name]}
    if "deliver" in out:
        given = out["deliver"] if isinstance(out["deliver"], list) else [out["deliver"]]
        out["deliver"] = [{"to": one} if isinstance(one, str) else one for one in given]
    for name, (_, key) in HEADS.items():
        if name in out:
            out[name] = [head(one, key) for one in (out[name] if isinstance(out[name], list) else [out[name]])]
    for name in ("steps", "post"):
        if isinstance(out.get(name), list):
            out[name] = [_step(step) for step in out[name]]
    if isinstance(out.get("profiles"), dict):
        out["profiles"] = {n: _normal(p) if isinstance(p, dict) else p for n, p in out["profiles"].items()}
    return out


def _step(step: Any) -> Any:
    if not isinstance(step, str):
        return step
    return {"map": step} if _STEP.fullmatch(step) else {"filter": step}


def check_profiles(document: Document) -> None:
    """Raises BadJob for a profile that is not part of a job, whether or not it is chosen."""
    profiles = document.value.get("profiles") or {}
    if not isinstance(profiles, dict):
        raise BadJob(f"{document.place(('profiles',))}: profiles is not a mapping: write {{prod: {{engine: ray}}}}")
    for name, part in profiles.items():
        if not isinstance(part, dict):
            raise BadJob(f"{document.place(('profiles', name))}: profile {name} is not a mapping: write parts of a job")
        if "profiles" in part:
            raise BadJob(f"{document.place(('profiles', name, 'profiles'))}: a profile has no profiles of its own")


def apply_profile(document: Document, profile: str | None) -> Document:
    """The document with the profile's parts merged over it: mappings merge, all else replaces.

    Raises BadJob for an unknown profile.
    """
    profiles = document.value.get("profiles") or {}
    if profile is None:
        return document
    if profile not in profiles:
        near = nearest(profile, profiles)
        hint = f"did you mean {near}?" if near else f"it has {', '.join(profiles) or 'none'}"
        raise BadJob(f"--profile {profile}: {document.name} has no such profile: {hint}")
    return merged(document, profile)


def merged(document: Document, profile: str) -> Document:
    """The document with one of its profiles laid over it; values from the profile have their places there."""
    head: Path = ("profiles", profile)
    moved = {path[2:]: place for path, place in document.places.items() if path[:2] == head and len(path) > 2}
    value = _merge(document.value, document.value["profiles"][profile], ())
    return Document(document.name, value, {**document.places, **moved})


def _merge(below: Mapping[str, Any], above: Mapping[str, Any], path: Path) -> dict[str, Any]:
    # A profile that names another kind of model means another model, not one of two kinds.
    other_kind = path == ("model",) and kind_in(above) not in (None, kind_in(below))
    out = {} if other_kind else dict(below)
    if path == ("engine",):
        out = _for_engine(out, above.get("name"))
    for key, item in above.items():
        old = out.get(key)
        out[key] = _merge(old, item, (*path, key)) if isinstance(old, dict) and isinstance(item, dict) else item
    return out


def _for_engine(section: Mapping[str, Any], name: Any) -> dict[str, Any]:
    """The part of an engine's section that applies to the engine called `name`: for another engine, neither its own
    options nor `workers: 0`.
    """
    if name is None or name == section.get("name", EngineSpec.name):
        return dict(section)
    return {
        key: item
        for key, item in section.items()
        if key in EngineSpec.__dataclass_fields__ and (key, item) != ("workers", 0)
    }


def apply_sets(document: Document, sets: Sequence[str]) -> Document:
    """The document with each `a.b=value` put in, in order. Numbers index lists: `steps.0.args.size=64`."""
    value: Any = document.value
    places = dict(document.places)
    for text in sets:
        path, given = split_set(text)
        if path[0] == "vars" and isinstance(given, (int, float)):
            given = Written(text.partition("=")[2], given)
        if tuple(path) == ("engine", "name") and isinstance(value.get("engine"), dict):
            value = {**value, "engine": _for_engine(value["engine"], given)}
        value = _put(value, path, given, text)
        steps: Path = tuple(int(part) if part.isdigit() else part for part in path)
        places = {p: place for p, place in places.items() if p[: len(steps)] != steps}
        places[steps] = f"--set {text}"
    return Document(document.name, _normal(value), places)


def variables_set(sets: Sequence[str]) -> dict[str, str]:
    """The variables that `--set vars.NAME=value` gives, with how each was given."""
    named = ((split_set(text)[0], text) for text in sets)
    return {path[1]: f"--set {text}" for path, text in named if path[0] == "vars" and len(path) == 2}


def with_default_engine(document: Document, environ: Mapping[str, str]) -> Document:
    """The document with the engine that the environment names, if it names none itself."""
    engine = document.value.get("engine") or {}
    if not isinstance(engine, dict) or "name" in engine or not environ.get(ENGINE):
        return document
    value = {**document.value, "engine": {**engine, "name": default_engine(environ)}}
    return Document(document.name, value, document.places)


def _put(value: Any, path: Sequence[str], given: Any, text: str) -> Any:
    if not path:
        return given
    head, rest = path[0], path[1:]
    if isinstance(value, list):
        if not head.isdigit() or int(head) >= len(value):
            raise BadJob(f"--set {text}: there is no number {head} in a list of {len(value)}: count from 0")
        at = int(head)
        return [*value[:at], _put(value[at], rest, given, text), *value[at + 1 :]]
    if value is not None and not isinstance(value, dict):
        raise BadJob(f"--set {text}: {head!r} cannot be set inside {value!r}, which is one value")
    return {**(value or {}), head: _put((value or {}).get(head), rest, given, text)}

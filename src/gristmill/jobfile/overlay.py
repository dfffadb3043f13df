"""Values laid over a finished job: what the flags of a command, and `--set`, do to a job.

A path is written as in a job file (`source.limit`, `model.args.size`, `engine.workers`), whatever the classes are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from gristmill.errors import BadJob, nearest
from gristmill.job.job import JobSpec
from gristmill.job.namelists import split
from gristmill.job.options import EngineSpec
from gristmill.job.recipients import HEADS
from gristmill.job.specs import MODELS, Step, head_of, of_call
from gristmill.values import dataclass

_OF_A_CALL = ("args", "batch_format", "takes")


@dataclass(frozen=True)
class Change:
    """A value for the place at `path`. `said` is how the user gave it; `typed` means that its type is already right."""

    path: tuple[str, ...]
    value: Any
    said: str
    typed: bool = True


def split_set(text: str) -> tuple[tuple[str, ...], Any]:
    """`a.b=value` as a path and a value, which is JSON if it is valid, else text. Raises BadJob."""
    from gristmill.jobfile.literals import literal

    name, equals, value = text.partition("=")
    path = tuple(name.strip().split("."))
    if not equals or not all(path):
        raise BadJob(f"--set {text}: write it as a.b=value, for example running.batch_rows=256")
    return path, literal(value, None if path[0] == "vars" else f"--set {text}")


def changes_of(sets: Sequence[str]) -> list[Change]:
    """The changes that `--set a.b=value` asks for."""
    return [Change(path, value, f"--set {text}", typed=False) for text in sets for path, value in [split_set(text)]]


def overlay(spec: JobSpec, changes: Iterable[Change]) -> JobSpec:
    """The job with all changes made, each part of it built once, so that values may depend on each other.

    Raises BadJob if there is no such place, or the value does not fit it.
    """
    out: JobSpec = _with(spec, _tree(changes), ())
    return out


def overlaid(part: Any, name: str, changes: Iterable[Change]) -> Any:
    """A part of a job, which has this name there, with the changes to it: before the job makes something else of it,
    such as a folder and a delivery of a sink that is a store. Raises BadJob as `overlay` does.
    """
    tree = _tree(change for change in changes if change.path[0] == name and change.path[1:])
    return _with(part, tree[name], (name,)) if tree else part


def _tree(changes: Iterable[Change]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for change in changes:
        node = tree
        for part in change.path[:-1]:
            below = node.setdefault(part, {})
            if isinstance(below, Change):
                raise BadJob(f"{change.said}: {below.said} already sets all of it")
            node = below
        node[change.path[-1]] = change
    return tree


def _with(value: Any, tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_fields(value, tree, path)
    if value is None or isinstance(value, Mapping):
        return {**(value or {}), **{key: _leaf((value or {}).get(key), sub, (*path, key)) for key, sub in tree.items()}}
    first = _first(tree)
    if isinstance(value, tuple):
        items = list(value)
        for key, sub in tree.items():
            if not key.isdigit() or int(key) >= len(items):
                raise BadJob(f"{first.said}: there is no number {key} in a list of {len(items)}: count from 0")
            items[int(key)] = _leaf(items[int(key)], sub, (*path, key))
        return tuple(items)
    raise BadJob(f"{first.said}: nothing can be set inside {'.'.join(path)}, which is {value!r}")


def _leaf(old: Any, sub: Any, path: tuple[str, ...]) -> Any:
    return sub.value if isinstance(sub, Change) else _with(old, sub, path)


def _with_fields(value: Any, tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    new: dict[str, Any] = {}
    inside: dict[str, dict[str, Any]] = {}
    if isinstance(value, EngineSpec) and isinstance(engine := tree.get("name"), Change):
        value = value.named(str(engine.value))  # the other keys may be its options
    for key, sub in tree.items():
        name, deeper = _field(value, key, sub)
        if deeper is None:
            new[name] = _typed(value, name, sub) if isinstance(sub, Change) else _below(value, name, sub, (*path, key))
        else:
            inside.setdefault(name, {})[deeper] = sub
    new |= {name: _below(value, name, sub, path) for name, sub in inside.items()}
    try:
        return dataclasses.replace(value, **new)
    except BadJob as e:
        blamed = [sub.said for key, sub in tree.items() if isinstance(sub, Change) and re.search(rf"\b{key}\b", str(e))]
        raise type(e)(f"{', '.join(blamed) or _first(tree).said}: {e}") from None


def _below(value: Any, name: str, sub: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    old = getattr(value, name)
    if old is None and name == "sink":
        raise BadJob(f"{_first(sub).said}: the job has no sink: give it one (sink=…)")
    return _with(old, sub, path)


def _field(value: Any, key: str, sub: Any) -> tuple[str, str | None]:
    """The dataclass field that a job file's key means, and the field inside it if the classes nest one level deeper."""
    names = [f.name for f in dataclasses.fields(value)]
    kind, head = _kind_and_head(value)
    if key in _OF_A_CALL and isinstance(value, Step) and value.call is not None:
        return "call", key
    if kind is not None and of_call(type(value)):
        if key in _OF_A_CALL:
            return head, key
        if key == kind and isinstance(sub, Change):
            return head, "target"
    elif key == kind:
        return head, None
    if key in names and key != (head if kind else "call"):
        return key, None
    if isinstance(value, EngineSpec) and key in value.own_names:
        return "options", key
    known = _known(value, names)
    near = nearest(key, known)
    hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
    if "options" in known and not near:
        hint += f"; an option of its format is options.{key}"
    what = f"this model ({kind})" if kind else type(value).__name__.removesuffix("Spec").lower()
    raise BadJob(f"{_first({key: sub}).said}: {what} has no {key!r}: {hint}")


def _known(value: Any, names: Sequence[str]) -> list[str]:
    """The keys that a job file has for a dataclass."""
    kind, head = _kind_and_head(value)
    hidden = (
        "data",
        "audit",
        "deliver",
        *HEADS,
        head or "call",
        *(["options"] if isinstance(value, EngineSpec) else []),
    )
    known = [name for name in names if name not in hidden]
    if isinstance(value, EngineSpec):
        return [*known, *value.own_names]
    return [kind, *known, *(_OF_A_CALL if of_call(type(value)) else ())] if kind else known


def _kind_and_head(value: Any) -> tuple[str | None, str]:
    """The key that gives the kind of a model, and the field under that key; None and "" for anything else."""
    kind = type(value)
    return (MODELS.name_of(kind), head_of(kind)) if hasattr(kind, "home") else (None, "")


def _typed(value: Any, name: str, change: Change) -> Any:
    if change.typed:
        return change.value
    from gristmill.job.typechecks import check

    if isinstance(value, JobSpec) and not name.startswith(("on_", "deadline")):
        raise BadJob(f"{change.said}: {name} is a whole section: set one of its keys, {name}.key=value")
    hint, given = get_type_hints(type(value))[name], change.value
    if isinstance(given, str) and tuple[str, ...] in (hint, *get_args(hint)):
        given = split(given)  # as flags take it
    return check(hint, given, change.said)


def _first(tree: Mapping[str, Any]) -> Change:
    for sub in tree.values():
        return sub if isinstance(sub, Change) else _first(sub)
    raise AssertionError("a tree of changes has leaves")

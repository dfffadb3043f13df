"""Jobs by name: a job file (YAML), a Python file or a module that holds one; and a job written as a job file.

Paths in a job file are relative to the folder the command is started in, as on a command line, not to the file. What
overrides what, from weakest: the file, its profile, `--set`; then variables are filled in.

`${env:NAME}` gives a `Secret` (gristmill.plan.secret): the job holds the text `${env:NAME}`, and so does whatever is
written, printed or hashed from it; its value is had by `reveal` alone. It may stand where values go to a library or to
the user's code, nowhere else.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path as File
from typing import Any

from gristmill.errors import BadJob, GristmillError
from gristmill.plan.job import JobSpec
from gristmill.plan.specs import Call, FunctionModel, Step

SUFFIXES = (".yaml", ".yml", ".json")
_PYTHON = re.compile(r"(?P<file>.+\.py)(?::(?P<name>[A-Za-z_]\w*))?")
_MODULE = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")


def is_job(ref: str) -> bool:
    """Whether a text names a job (a .yaml, .yml or .json file, FILE.py[:NAME], MODULE:NAME), rather than a sink."""
    if "://" in ref or os.path.isdir(ref):
        return False
    return ref.endswith(SUFFIXES) or bool(_PYTHON.fullmatch(ref) or _MODULE.fullmatch(ref))


def load(
    ref: str,
    *,
    variables: Mapping[str, str] | None = None,
    profile: str | None = None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> JobSpec:
    """The job that `ref` names: `job.yaml`, `FILE.py[:NAME]` (NAME is `job` unless given) or `MODULE:NAME`.

    `sets` are `a.b=value`, values as JSON or else text. Raises BadJob where it does not name a job, or a wrong one.
    """
    if ref.endswith(SUFFIXES):
        return read_job_file(ref, variables=variables, profile=profile, sets=sets, environ=environ)
    if variables or profile:
        given = "--profile " + profile if profile else "--var " + "=".join(next(iter((variables or {}).items())))
        raise BadJob(f"{given}: {ref} is Python, which has no variables or profiles: use --set, or a job file (YAML)")
    spec = _python_job(ref)
    if not sets:
        return spec
    from gristmill.plan.overlay import changes_of, overlay

    return overlay(spec, changes_of(sets))


def read_job_file(
    path: str | os.PathLike[str],
    *,
    variables: Mapping[str, str] | None = None,
    profile: str | None = None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> JobSpec:
    """The job in a job file. `environ` is where `${env:NAME}` is looked up; without it there is none.

    Raises BadJob: one line for each thing wrong, with file, line and way out. Nothing is opened but the file.
    """
    from gristmill.plan.document import read_document
    from gristmill.plan.jobmerge import apply_profile, apply_sets, check_profiles, merged, normal, with_default_engine
    from gristmill.plan.jobschema import check_keys, validated
    from gristmill.plan.variables import Scope

    name = os.fspath(path)
    read = normal(read_document(_bytes(name), name))
    check_profiles(read)
    document = with_default_engine(apply_sets(apply_profile(read, profile), sets), environ or {})
    scope = Scope(document, variables or {}, environ or {})
    filled = {key: scope.fill(item, (key,)) for key, item in document.value.items() if key not in ("vars", "profiles")}
    spec = validated(dataclasses.replace(document, value=filled))
    scope.check_unused(variables or {})
    for other in read.value.get("profiles") or ():
        check_keys(merged(read, other))
    check_names(spec)
    return spec


def _bytes(name: str) -> bytes:
    from gristmill.plan.document import MOST_BYTES

    try:
        with open(name, "rb") as file:
            return file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        folder = File(name).parent
        there = [p.name for p in folder.glob("*") if p.suffix in SUFFIXES] if folder.is_dir() else []
        near = difflib.get_close_matches(File(name).name, there, 1)
        hint = f"did you mean {folder / near[0]}?" if near else f"the current folder is {os.getcwd()}"
        raise BadJob(f"{name}: there is no such job file: {hint}") from None
    except OSError as e:
        raise BadJob(f"{name}: cannot be read: {e.strerror}") from None


# ---------------------------------------------------------------- jobs in Python


def _python_job(ref: str) -> JobSpec:
    if match := _PYTHON.fullmatch(ref):
        module, name = _import_file(match["file"]), match["name"] or "job"
    elif match := _MODULE.fullmatch(ref):
        module, name = _import(match["module"], ref), match["name"]
    else:
        raise BadJob(f"{ref}: not a job: give a job file (.yaml), FILE.py, FILE.py:NAME or MODULE:NAME")
    value = getattr(module, name, None)
    spec = getattr(value, "spec", value)
    if isinstance(spec, JobSpec):
        check_names(spec)
        return spec
    jobs = [key for key, item in vars(module).items() if isinstance(getattr(item, "spec", item), JobSpec)]
    hint = f"its jobs are {', '.join(jobs)}" if jobs else f"write {name} = gm.Job(source=…, model=…, sink=…)"
    found = "is not there" if value is None else f"is a {type(value).__name__}, not a gristmill Job"
    raise BadJob(f"{ref}: {name} {found}: {hint}")


def _import_file(path: str) -> Any:
    """A Python file as the module of its name, as if it had been started: its folder is importable, also by workers."""
    file = File(path).resolve()
    if not file.is_file():
        raise BadJob(f"{path}: there is no such file: the current folder is {os.getcwd()}")
    if "." in file.stem:
        raise BadJob(f"{path}: workers import it by its name, and {file.stem!r} has a dot in it: rename the file")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    module = _import(file.stem, path)
    found = getattr(module, "__file__", None)
    if found is None or File(found).resolve() != file:
        raise BadJob(f"{path}: a module named {file.stem!r} is there already ({found or 'built in'}): rename the file")
    return module


def _import(name: str, ref: str) -> Any:
    try:
        return importlib.import_module(name)
    except GristmillError:
        raise
    except ModuleNotFoundError as e:
        if e.name is not None and (name == e.name or name.startswith(e.name + ".")):
            raise BadJob(f"{ref}: no module named {e.name!r}: the current folder ({os.getcwd()}) is importable") from e
        raise BadJob(f"{ref}: it needs the module {e.name!r}, which is not installed here{_where(e, ref)}") from e
    except Exception as e:
        raise BadJob(f"{ref}: cannot be imported: {type(e).__name__}: {e}{_where(e, ref)}; --debug shows more") from e


def _where(error: BaseException, ref: str) -> str:
    """The line of the user's own file that raised, the last one of the traceback that is not Python's."""
    import traceback

    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    frames = [f for f in frames if f.filename != __file__]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


# ---------------------------------------------------------------- names


def check_names(spec: JobSpec) -> None:
    """Raises BadJob for a column's name that could leave the sink's folder, or cannot be a name at all.

    Columns become names of folders (`partition_by`) and of fields; `..`, slashes and control characters are refused.
    """
    sink = spec.sink
    named: list[tuple[str, Iterable[Any]]] = [("model.output", [getattr(spec.model, "output", None)])]
    if isinstance(spec.model, FunctionModel):
        named.append(("model.returns", spec.model.returns or ()))
    if sink is not None:
        named += [("sink.partition_by", sink.partition_by), ("sink.key", sink.key)]
        named += [("sink.row_id", [sink.row_id]), ("sink.model_version", [sink.model_version])]
    for where, names in named:
        for name in names:
            if name is not None and not good_name(name):
                raise BadJob(
                    f"{where} is {name!r}: a column's name has no slash, no control characters, and is not . or .."
                )


def good_name(name: Any) -> bool:
    """Whether a text can name a column, and so a part of a path."""
    return isinstance(name, str) and name not in ("", ".", "..") and not re.search(r"[/\\\x00-\x1f\x7f]", name)


# ---------------------------------------------------------------- writing


def dump(spec: JobSpec) -> str:
    """A job as the text of a job file that gives the same job. Raises BadJob for what only Python can hold.

    Only what differs from the defaults is written. Secrets are written as `${env:NAME}`.
    """
    from gristmill.plan.document import write_document

    if spec.source.data is not None:
        raise BadJob("the source is a table in memory, which a job file cannot hold: write it to a file first")
    body: dict[str, Any] = {"source": _differing(spec.source, drop=("data",))}
    body["source"]["uri"] = _one_or_many(spec.source.uri)
    if spec.steps:
        body["steps"] = [_step_body(step) for step in spec.steps]
    body["model"] = _model_body(spec)
    if spec.post:
        body["post"] = [_step_body(step) for step in spec.post]
    if spec.sink is not None:
        body["sink"] = _differing(spec.sink)
    choices = _differing(spec, drop=("source", "sink", "model", "steps", "post", "gates", "engine", "running", "audit"))
    engine = _differing(spec.engine, drop=("options",))
    if spec.engine.options:
        engine = {**engine, "name": spec.engine.name, **spec.engine.options}
    sections = {"gates": _differing(spec.gates), "engine": engine, "running": _differing(spec.running)}
    if spec.audit:
        choices["audit"] = [target_name(Call(hook)) for hook in spec.audit]
    return write_document(_plain({**body, **choices, **{name: item for name, item in sections.items() if item}}))


def _differing(value: Any, drop: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass that are not at their default, in the order of the fields."""
    out = {}
    for field in dataclasses.fields(value):
        if field.name in drop:
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        item = getattr(value, field.name)
        if default is dataclasses.MISSING or item != default or type(item) is not type(default):
            out[field.name] = item
    return out


def _one_or_many(items: Sequence[str]) -> Any:
    return items[0] if len(items) == 1 else list(items)


def _model_body(spec: JobSpec) -> dict[str, Any]:
    from gristmill.plan.overlay import KIND_OF

    model = spec.model
    if isinstance(model, FunctionModel):
        rest = _differing(model, drop=("call",))
        return {"call": target_name(model.call), **_call_body(model.call, "numpy"), **rest}
    values = _differing(model)
    return {KIND_OF[type(model)]: values.pop("model"), **values}


def _step_body(step: Step) -> dict[str, Any]:
    if step.call is None:
        return {step.kind: step.expression}
    default = "rows" if step.kind == "flat_map" else "numpy"
    return {step.kind: target_name(step.call), **_call_body(step.call, default)}


def _call_body(call: Call, default: str) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if call.args:
        body["args"] = call.args
    if call.batch_format != default:
        body["batch_format"] = call.batch_format
    if call.takes is not None:
        body["takes"] = dict(call.takes)
    return body


def target_name(call: Call) -> str:
    """A callable as MODULE:NAME. Raises BadJob where it cannot be found again under that name."""
    if isinstance(call.target, str):
        return call.target
    module, name = getattr(call.target, "__module__", None), getattr(call.target, "__qualname__", "")
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not call.target or module == "__main__":
        raise BadJob(
            f"{call.name} cannot be written to a job file: put it in a module, so that it has a name, MODULE:NAME"
        )
    return f"{module}:{name}"


def _plain(value: Any) -> Any:
    """Values as YAML has them; text is escaped, secrets stand as they were written."""
    from gristmill.plan.secret import Secret
    from gristmill.plan.variables import escape

    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Secret):
        return str(value)
    if isinstance(value, str):
        return escape(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise BadJob(
        f"{value!r} ({type(value).__name__}) cannot be written to a job file: give text, numbers, lists or mappings"
    )


# Numbers that could be meant as text: trailing zeros (versions), no finite number, digits around an e (digests).
_DOUBTFUL = re.compile(r"-?\d+\.\d*[1-9]0+|-?\d+\.0{2,}|\d{2,}[eE]\d+|-?(NaN|Infinity)|-0")


def literal(text: str, said: str | None) -> Any:
    """A value typed on a command line: JSON if it is some, else the text itself. Raises BadJob, which begins with
    `said`, where a number would not be what was typed: 1.10, 12e4567, NaN.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return text
    exact = not isinstance(value, float) or (math.isfinite(value) and Decimal(text) == Decimal(repr(value)))
    if said is not None and (not exact or _DOUBTFUL.fullmatch(text.strip())):
        number = f"write {value!r} if that is meant, or " if math.isfinite(value) else ""
        raise BadJob(f"{said}: this would be the number {value!r}, not {text}: {number}'\"{text}\"' for the text")
    return value

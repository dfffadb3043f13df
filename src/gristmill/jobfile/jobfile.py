"""Jobs by name: a job file (YAML), a Python file or a module that holds one; and a job written as a job file.

Paths in a job file are relative to the folder the command is started in, as on a command line, not to the file. What
overrides what, from the weakest: the file, its profile, `--set`; then variables are filled in.

`${env:NAME}` gives a `Secret` (gristmill.job.secret): the job holds the text `${env:NAME}`, and so does whatever is
written, printed or hashed from it; only `reveal` gives its value. It is allowed where values go to a library or to the
user's code, nowhere else.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path as File
from typing import Any

from gristmill.errors import BadJob, GristmillError
from gristmill.job.job import JobSpec
from gristmill.job.prompts import is_schema
from gristmill.jobfile.suffixes import SUFFIXES
from gristmill.process.contained import enduring

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
    tick: datetime | None = None,
) -> JobSpec:
    """The job that `ref` names: `job.yaml`, `FILE.py[:NAME]` (NAME is `job` unless given) or `MODULE:NAME`.

    `sets` are `a.b=value`, values as JSON or else text. `tick` is the time that the run was scheduled for, which a job
    file's schedule puts into its variables. Raises BadJob if it does not name a job, or names a wrong one.
    """
    if ref.endswith(SUFFIXES):
        return read_job_file(ref, variables=variables, profile=profile, sets=sets, environ=environ, tick=tick)
    if variables or profile:
        given = "--profile " + profile if profile else "--var " + "=".join(next(iter((variables or {}).items())))
        raise BadJob(f"{given}: {ref} is Python, which has no variables or profiles: use --set, or a job file (YAML)")
    spec = _python_job(ref)
    if not sets:
        return spec
    from gristmill.jobfile.overlay import changes_of, overlay

    return overlay(spec, changes_of(sets))


def read_job_file(
    path: str | os.PathLike[str],
    *,
    variables: Mapping[str, str] | None = None,
    profile: str | None = None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    tick: datetime | None = None,
) -> JobSpec:
    """The job in a job file, for the tick of its schedule if one is given. `environ` is where `${env:NAME}` is looked
    up; without it there are no such values.

    Raises BadJob: one line for each error, with file, line and way out; RunFailed if a tick is given, and a job before
    it, whose time zone it has, cannot be read. Nothing but the file is opened, and those of jobs that it runs after.
    """
    from gristmill.jobfile.document import read_document
    from gristmill.jobfile.merging import (
        apply_profile,
        apply_sets,
        check_profiles,
        merged,
        normal,
        variables_set,
        with_default_engine,
    )
    from gristmill.jobfile.scheduling import inherited, told, variables_at
    from gristmill.jobfile.sections import check_keys, validated
    from gristmill.jobfile.variables import Scope, check_given, references, variables_of

    name = os.fspath(path)
    read = inherited(normal(read_document(_bytes(name), name)), needed=tick is not None)
    check_profiles(read)
    chosen = apply_profile(read, profile)
    document = with_default_engine(apply_sets(chosen, sets), environ or {})
    given = variables or {}
    if tick is not None:
        given = {**variables_at(document, tick), **given}
    scope = Scope(document, given, environ or {})
    filled = {key: scope.fill(item, (key,)) for key, item in document.value.items() if key not in ("vars", "profiles")}
    spec = validated(dataclasses.replace(document, value=filled))
    said = {variable: f"--var {variable}={text}" for variable, text in (variables or {}).items()}
    check_given(document, variables_of(chosen), told(document) | said | variables_set(sets))
    for other in read.value.get("profiles") or ():
        whole = merged(read, other)
        check_keys(whole)
        own = {v: f"{whole.place(('vars', v))}: profile {other}" for v in variables_of(read, ("profiles", other))}
        check_given(whole, [*variables_of(read), *references(document)], own)
    check_names(spec)
    return spec


def _bytes(name: str) -> bytes:
    from gristmill.jobfile.document import MOST_BYTES

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


def _python_job(ref: str) -> JobSpec:
    if match := _PYTHON.fullmatch(ref):
        module, name = _import_file(match["file"]), match["name"] or "job"
    elif match := _MODULE.fullmatch(ref):
        module, name = _import(match["module"], ref), match["name"]
    else:
        raise BadJob(
            f"{ref}: not a job: give a job file (.yaml), FILE.py, FILE.py:NAME or MODULE:NAME; "
            "a command becomes one with --save (gristmill apply … --save job.yaml)"
        )
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
    """A Python file as the module of its name, as if it were started: its folder is importable, also in workers."""
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
        raise BadJob(f"{path}: there is already a module named {file.stem!r} ({found or 'built in'}): rename the file")
    return module


def _import(name: str, ref: str) -> Any:
    try:
        with enduring():
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
    """The line of the user's own file that raised: the last one of the traceback that is not Python's."""
    import traceback

    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    frames = [f for f in frames if f.filename != __file__]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def check_names(spec: JobSpec) -> None:
    """Raises BadJob for a column name that could leave the sink's folder, or cannot be a name at all.

    Columns become names of folders (`partition_by`) and of fields; `..`, slashes and control characters are refused.
    """
    sink = spec.sink
    named: list[tuple[str, Iterable[Any]]] = [("model.output", [getattr(spec.model, "output", None)])]
    if isinstance(returns := getattr(spec.model, "returns", None), Mapping):
        named.append(("model.returns", returns.get("properties", ()) if is_schema(returns) else returns))
    if sink is not None:
        named += [(f"sink.{what}", getattr(sink, what)) for what in ("partition_by", "sort_by", "key", "index")]
        named += [("sink.row_id", [sink.row_id]), ("sink.model_version", [sink.model_version])]
    for where, names in named:
        for name in names:
            if name is not None and not good_name(name):
                raise BadJob(
                    f"{where} is {name!r}: a column's name has no slash, no control characters, and is not . or .."
                )


def good_name(name: Any) -> bool:
    """Whether a text can name a column, and so be part of a path."""
    return isinstance(name, str) and name not in ("", ".", "..") and not re.search(r"[/\\\x00-\x1f\x7f]", name)

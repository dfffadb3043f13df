"""What shapes the output of a job, as digests, and the job's own code besides its model."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gristmill.driver.apart import plain_path
from gristmill.errors import BadJob, BadModel
from gristmill.fingerprint import digests as fingerprint
from gristmill.fingerprint.digests import Fingerprint
from gristmill.job.job import JobSpec
from gristmill.job.secret import reveal
from gristmill.job.specs import MODELS, ModelSpec, changed
from gristmill.job.uris import file_named, records_of
from gristmill.models.contract import ModelInfo
from gristmill.models.kinds import open_function
from gristmill.shards.sourcefiles import FileInfo
from gristmill.sinks.formats import SINKS
from gristmill.sources.formats import SOURCES

if TYPE_CHECKING:
    from gristmill.result.reduction import Reducer


def fingerprint_of(
    job: JobSpec,
    model: ModelSpec,
    info: ModelInfo,
    files: Sequence[FileInfo],
    source_format: str,
    sink_format: str,
    reads: Sequence[str] = (),
    written: Collection[str] = (),
) -> Fingerprint:
    """Everything that shapes the output, as digests. `model` is the job's model as resolved, `reads` the columns that
    are read, and `written` what the code itself writes, which does not count as part of a folder.
    """
    from gristmill.fingerprint import code
    from gristmill.fingerprint.modelfiles import Looked, real_places

    calls = {f"{name}[{n}]": s.call for name in ("steps", "post") for n, s in enumerate(getattr(job, name))}
    calls["model"] = info.call
    digests: dict[str, str] = {}
    held: list[Any] = []
    looked: dict[str, Looked] = {}
    own = not_folders(job, files) | real_places(written)
    looks = [(place, code.digests(call, held, looked, own)) for place, call in calls.items() if call is not None]
    registered, versions = others(model, source_format, sink_format)
    looks.append(("model", code.digests_of_code((*info.code, *registered), held, looked, own)))
    for place, found in looks:
        for name, digest in found.items():
            # Modules are shared by all steps; a lambda, an argument or a closure belongs to one step.
            digests[
                name if name.startswith(("module ", "version of ", fingerprint.PACKAGE)) else f"{place}: {name}"
            ] = digest
    digests |= versions
    described = replace(job, model=_as_asked(job, model, info))
    options = fingerprint.options_of(described, source_format, sink_format)
    return Fingerprint(
        fingerprint.in_order(options, job.source, [f.file.path for f in files]),
        dict(info.digests),
        digests,
        {f.file.path: fingerprint.input_digest(f) for f in files},
        fingerprint.digest_of(list(reads)) if reads else "",
        tuple(held),
        looked=looked,
    )


def others(model: ModelSpec, source_format: str, sink_format: str) -> tuple[list[Any], dict[str, str]]:
    """What other packages have registered of a job's model and formats, which counts as user code: classes and
    functions, and the packages' versions.
    """
    code: list[Any] = []
    versions: dict[str, str] = {}
    kind = MODELS.name_of(type(model)) or ""
    for registry, name in ((MODELS, kind), (SOURCES, source_format), (SINKS, sink_format)):
        if (package := registry.package_of(name)) is not None:
            versions[f"version of {package[0]}"] = package[1]
            code += [registry.get(name), *([open_function(model)] if registry is MODELS else [])]
    return code, versions


def not_folders(job: JobSpec, files: Sequence[FileInfo]) -> frozenset[str]:
    """Real paths that do not count as part of a folder named by an argument: what the job writes, and its source, which
    is compared separately.
    """
    from gristmill.fingerprint.modelfiles import MOST_FILES

    uris = [] if job.sink is None else [job.sink.uri, *([records_of(job.sink.uri)] if file_named(job.sink.uri) else [])]
    uris += [*job.source.uri, *([job.running.log] if job.running.log else [])]
    plain = {path for uri in uris if "://" not in (path := plain_path(str(reveal(uri))))}
    read = [f.file.path for f in files if "://" not in f.file.path] if len(files) <= MOST_FILES else []
    real = {folder: os.path.join(os.path.realpath(folder), "") for folder in set(map(os.path.dirname, read))}
    whole = tuple(os.path.join(path, "") for path in plain)
    names = ((real[os.path.dirname(path)], os.path.basename(path)) for path in read)
    return frozenset(plain).union(folder + name for folder, name in names if not folder.startswith(whole))


def _as_asked(job: JobSpec, model: ModelSpec, info: ModelInfo) -> ModelSpec:
    """The model with its precision resolved, but the backend as the job has it: "auto" may become either, for the same
    values (gristmill.driver.backends), and the plan stores which.
    """
    asked: Any = job.model
    return changed(model, backend=asked.backend) if info.exportable else model


def reducer(job: JobSpec) -> Reducer | None:
    """What makes the final files of a job, imported if given by name; None if nothing does. Raises BadJob."""
    if job.reduce is None:
        return None
    from gristmill.fingerprint import code
    from gristmill.process.targets import import_target
    from gristmill.result.reduction import Reducer

    try:
        call = import_target(job.reduce) if isinstance(job.reduce, str) else job.reduce
    except BadModel as e:
        raise BadJob(f"reduce: {e}") from e
    if not callable(call):
        raise BadJob(f"reduce: {job.reduce} is a {type(call).__name__}, not a function of rows and a folder")
    name = job.reduce if isinstance(job.reduce, str) else getattr(call, "__qualname__", type(call).__qualname__)
    digests = fingerprint.compared(code.digests_of_code((call,), [], {}, frozenset()))
    return Reducer(name, call, fingerprint.digest_of(digests))


def audits(job: JobSpec) -> list[Any]:
    """The functions that audit the staged result, imported if given by name. Raises BadJob."""
    from gristmill.process.targets import import_target

    hooks = []
    for hook in job.audit:
        try:
            hooks.append(import_target(hook) if isinstance(hook, str) else hook)
        except BadModel as e:
            raise BadJob(f"audit: {e}") from e
        if not callable(hooks[-1]):
            raise BadJob(f"audit: {hook} is a {type(hooks[-1]).__name__}, not a function of the staged result")
    return hooks

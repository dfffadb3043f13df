"""A job written as a file, which reads back as the same job."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.errors import BadJob
from gristmill.job.job import JobSpec
from gristmill.job.recipients import HEADS
from gristmill.job.specs import MODELS, Call, Step, head_of, of_call
from gristmill.job.uris import file_formats


def dump(spec: JobSpec) -> str:
    """A job as the text of a job file that gives the same job. Raises BadJob for what only Python can hold.

    Only what differs from the defaults is written. Secrets are written as `${env:NAME}`.
    """
    from gristmill.jobfile.document import write_document

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
        usual = file_formats(spec.sink.uri)[:1]  # of one file, which is merged anyway
        told = ("format", "merge") if usual == (spec.sink.format,) else ("merge",) if usual else ()
        body["sink"] = _differing(spec.sink, drop=told)
    apart = (
        "source",
        "sink",
        "model",
        "steps",
        "post",
        "gates",
        "engine",
        "running",
        "audit",
        "reduce",
        "deliver",
        "update",
        "schedule",
        *HEADS,
    )
    choices = _differing(spec, drop=apart)
    engine = _differing(spec.engine, drop=("options",))
    if spec.engine.options:
        engine = {**engine, "name": spec.engine.name, **spec.engine.options}
    sections = {"gates": _differing(spec.gates), "engine": engine, "running": _differing(spec.running)}
    if spec.deliver:
        choices["deliver"] = [_differing(one) for one in spec.deliver]
    if spec.update is not None:
        choices["update"] = _differing(spec.update) or True
    if spec.schedule is not None:
        choices["schedule"] = _differing(spec.schedule)
    choices |= {name: [_differing(one) for one in told] for name in HEADS if (told := getattr(spec, name))}
    if spec.audit:
        choices["audit"] = [target_name(Call(hook)) for hook in spec.audit]
    if spec.reduce is not None:
        choices["reduce"] = target_name(Call(spec.reduce))
    return write_document(_plain({**body, **choices, **{name: item for name, item in sections.items() if item}}))


def _differing(value: Any, drop: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass that do not have their defaults, in the order of the fields."""
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
    kind, head = type(spec.model), head_of(type(spec.model))
    values, name = _differing(spec.model), str(MODELS.name_of(kind))
    under = values.pop(head, getattr(spec.model, head))
    if of_call(kind):
        return {name: target_name(under), **_call_body(under, "numpy"), **values}
    return {name: under, **values}


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
    """A callable as MODULE:NAME. Raises BadJob if it cannot be found again under that name."""
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
    """Values as YAML has them; text is escaped, secrets appear as they were written."""
    from gristmill.job.secret import Secret
    from gristmill.jobfile.variables import escape

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
    if isinstance(value, type) or inspect.isroutine(value):
        return target_name(Call(value))
    raise BadJob(
        f"{value!r} ({type(value).__name__}) cannot be written to a job file: give text, numbers, lists or mappings"
    )

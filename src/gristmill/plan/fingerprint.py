"""The fingerprint of a plan: a table of digests of everything that shapes its output, and the readable difference of
two.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from gristmill.plan.job import JobSpec

# What a model spec says of where it runs, or of where it was found, does not change what it answers.
_NOT_OUTPUT = ("device", "model", "allow_pickle", "sha256", "call")
MOST_LINES = 12


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Digests by section and name. `inputs` may be large, and is compared only where its own digest differs."""

    options: Mapping[str, str]
    model: Mapping[str, str]
    code: Mapping[str, str]
    inputs: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """As the plan stores it: the inputs as one digest, since the plan's file table lists them."""
        return {
            "options": dict(self.options),
            "model": dict(self.model),
            "code": dict(self.code),
            "inputs": digest_of(self.inputs),
        }


def digest_of(value: Any) -> str:
    """sha256 of a plain value, the same in every process."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def options_of(job: JobSpec, sink_format: str) -> dict[str, str]:
    """The options that shape the output, as text by name."""
    source, sink = job.source, job.sink
    values: dict[str, Any] = {
        "source.format": source.format,
        "source.columns": source.columns,
        "source.where": source.where,
        "source.limit": source.limit,
        "source.sample": source.sample,
        "source.seed": source.seed if source.sample else None,
        "source.types": dict(source.types or {}) or None,
        "source.options": dict(source.options) or None,
        "on_null": job.on_null,
        "on_nan": job.on_nan,
        "sink.format": sink_format,
        "steps": [_step(s) for s in job.steps],
        "post": [_step(s) for s in job.post],
    }
    if sink is not None:
        for name in ("keep", "row_id", "key", "partition_by", "merge", "model_version"):
            values[f"sink.{name}"] = getattr(sink, name)
    values["model.kind"] = type(job.model).__name__
    for field in dataclasses.fields(job.model):
        if field.name not in _NOT_OUTPUT:
            values[f"model.{field.name}"] = getattr(job.model, field.name)
    return {k: json.dumps(v, default=str, sort_keys=True) for k, v in values.items() if v not in (None, [], (), {})}


def _step(step: Any) -> list[Any]:
    return [step.kind, step.expression, None if step.call is None else step.call.name]


def differences(old: Mapping[str, Any], new: Fingerprint, old_inputs: Mapping[str, str] | None) -> list[str]:
    """What differs between a stored fingerprint and this one, a line each; empty where nothing does.

    `old_inputs` may be None where the digests of the inputs are equal.
    """
    lines = []
    for section in ("options", "model", "code"):
        lines += _differing(section, old.get(section, {}), getattr(new, section))
    if old.get("inputs") != digest_of(new.inputs):
        lines += _differing("input", old_inputs or {}, new.inputs)
    return lines


def new_inputs_only(old_inputs: Mapping[str, str], new: Fingerprint) -> bool:
    """Whether the inputs differ only by files that were not there before."""
    return all(new.inputs.get(path) == digest for path, digest in old_inputs.items())


def _differing(section: str, old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    lines = []
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        if before == now:
            continue
        if before is None:
            lines.append(f"{section}: {name} is new" + (f" ({_short(now)})" if section == "options" else ""))
        elif now is None:
            lines.append(f"{section}: {name} is gone" + (f" (was {_short(before)})" if section == "options" else ""))
        else:
            lines.append(f"{section}: {name} was {_short(before)}, is {_short(now)}")
    return lines


def _short(value: str | None) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:12] + "…"


def listed(lines: list[str]) -> str:
    """Difference lines as text, not more than a screen."""
    more = len(lines) - MOST_LINES
    return "\n".join(f"  {line}" for line in lines[:MOST_LINES]) + (f"\n  … and {more} more" if more > 0 else "")

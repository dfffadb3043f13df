"""Writing a sweep's findings into the job file that it measured, without changing any other line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gristmill.errors import BadJob
from gristmill.tuning.sweep import Tuned


def changes(found: Tuned) -> dict[str, dict[str, Any]]:
    """Sections and keys of a job file: the knee, and the arrangement if a run would choose another by itself. Never a
    backend or a precision, which the job decides.
    """
    out: dict[str, dict[str, Any]] = {"running": {f"batch_{found.unit}": found.knee}}
    best, now = found.best, found.default_arrangement
    if (best.workers, best.threads) != (now.workers, now.threads):
        out["engine"] = {"workers": best.workers, "threads": best.threads}
    return out


def write(found: Tuned, path: str, profile: str | None = None) -> dict[str, dict[str, Any]]:
    """Put the changes into a YAML job file, keeping comments and all other lines; returns them.

    Raises BadJob if the file is not one, or is written so that no line of it can be changed alone, and if the `profile`
    has other values for the same keys, so that the changes would have no effect.
    """
    wanted = changes(found)
    file = Path(path)
    if file.suffix not in (".yaml", ".yml") or not file.is_file():
        raise BadJob(f"--write: {path} is not a job file in YAML; it would be: {_shown(wanted)}")
    text = file.read_text(encoding="utf-8")
    new = text
    for section, values in wanted.items():
        new = edited(new, section, values)
    before = yaml.safe_load(text) or {}
    own = ((before.get("profiles") or {}).get(profile) or {}) if profile else {}
    if said := [f"{s}.{key}" for s, values in wanted.items() for key in values if key in (own.get(s) or {})]:
        raise BadJob(
            f"--write: profile {profile} of {path} has its own {', '.join(said)}; put this there: {_shown(wanted)}"
        )
    expected = {**before, **{s: {**(before.get(s) or {}), **v} for s, v in wanted.items()}}
    if yaml.safe_load(new) != expected:
        raise BadJob(f"--write: {path} is written in a form that cannot be edited here; put this in: {_shown(wanted)}")
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(new, encoding="utf-8")
        temporary.chmod(file.stat().st_mode & 0o777)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return wanted


def edited(text: str, section: str, values: Mapping[str, Any]) -> str:
    """The text with keys of a top-level section set: in its braces, in its block, or in a new line at the end."""
    flow = re.compile(rf"^{section}:[ \t]*\{{(?P<inside>[^{{}}\n]*)\}}", re.MULTILINE)
    if (found := flow.search(text)) is not None:
        inside = found["inside"].strip()
        for key, value in values.items():
            old = re.compile(rf"\b{key}:\s*[^,]*")
            inside = old.sub(f"{key}: {value}", inside) if old.search(inside) else f"{inside}, {key}: {value}"
        return text[: found.start("inside")] + inside.lstrip(", ") + text[found.end("inside") :]
    block = re.compile(rf"^{section}:[ \t]*(#[^\n]*)?\n(?P<lines>(?:[ \t]+[^\n]*\n|[ \t]*\n)*)", re.MULTILINE)
    if (found := block.search(whole := text if text.endswith("\n") else text + "\n")) is not None and found[
        "lines"
    ].strip():
        lines = found["lines"]
        indent = re.match(r"[ \t]*", lines)[0]  # type: ignore[index]
        for key, value in values.items():
            old = re.compile(rf"^{indent}{key}:[ \t]*[^#\n]*?(?P<rest>[ \t]*(#[^\n]*)?)$", re.MULTILINE)
            lines = (
                old.sub(rf"{indent}{key}: {value}\g<rest>", lines)
                if old.search(lines)
                else f"{indent}{key}: {value}\n{lines}"
            )
        return (whole[: found.start("lines")] + lines + whole[found.end("lines") :])[: None if whole == text else -1]
    inside = ", ".join(f"{key}: {value}" for key, value in values.items())
    return f"{text.rstrip()}\n{section}: {{{inside}}}\n"


def _shown(wanted: Mapping[str, Mapping[str, Any]]) -> str:
    return "; ".join(f"{s}: {{{', '.join(f'{k}: {v}' for k, v in values.items())}}}" for s, values in wanted.items())

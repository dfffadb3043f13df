"""Writes the reference pages beside itself, from what they describe: commands, schema, options, exceptions.

    python docs/reference/_generate.py

`make docs` runs it before the site is built. Nothing is written by hand here that the code says.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

import gristmill
from gristmill import errors
from gristmill.cli import helptext
from gristmill.cli.app import COMMANDS
from gristmill.cli.app import gristmill as group
from gristmill.dynamic.settings import Awaited, Batching, Padded
from gristmill.job.annotations import Option, options_of
from gristmill.job.job import Sink, Source
from gristmill.job.options import ENGINES, Gates
from gristmill.job.specs import MODELS
from gristmill.jobfile.sections import json_schema

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"


def pages() -> dict[str, str]:
    """Every page of the reference: file name to Markdown."""
    return {
        "cli.md": cli_page(),
        "job-file.md": job_file_page(),
        "options.md": options_page(),
        "python.md": python_page(),
        "errors.md": errors_page(),
    }


# ---------------------------------------------------------------- Markdown


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; bars in cells are escaped but for those in code, line breaks become blanks."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    parts = re.split(r"(`[^`]*`)", re.sub(r"\s+", " ", text).strip())
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in parts)


def code(text: object) -> str:
    """Text as inline code; nothing for nothing."""
    return f"`{text}`" if str(text) else ""


def escaped(text: str) -> str:
    """Help text as Markdown that shows it to the letter, inline code aside."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<>\[\]])", r"\\\1", part) for part in parts)


# ---------------------------------------------------------------- commands


def commands() -> dict[str, click.Command]:
    """The commands by name, in the order of `gristmill --help`."""
    context = click.Context(group, info_name="gristmill")
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def cli_page() -> str:
    """What `--help` of every command says."""
    rows = [(f"[`{name}`](#gristmill-{name})", escaped(line)) for name, (_, line) in COMMANDS.items()]
    parts = [
        "# Commands\n",
        "What `gristmill COMMAND --help` prints. Exit codes are in [Exceptions and exit codes](errors.md).\n",
        table(("command", "what it does"), rows),
    ]
    for name, command in commands().items():
        parts.append(_command(name, command))
    return "\n".join(parts)


def _command(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"gristmill {name}")
    parts = [f"## gristmill {name}\n", f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"]
    parts.append(escaped(inspect.cleandoc(command.help or "")) + "\n")
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Option):
            shown = copy.copy(parameter)
            shown.hidden = False
            record = shown.get_help_record(context)
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
    for title, records in sorted(groups.items(), key=lambda item: helptext.GROUPS.index(item[0])):
        if len(groups) > 1:
            parts.append(f"**{title}**\n")
        parts.append(table(("option", "meaning"), ((code(option), escaped(text)) for option, text in records)))
    if examples := inspect.cleandoc(getattr(command, "examples", "")):
        parts.append(f"```bash\n{examples}\n```\n")
    return "\n".join(parts)


def flags() -> dict[str, str]:
    """The flag of each field of a job that has one: `source.where` to `--where`."""
    found: dict[str, str] = {}
    for command in commands().values():
        for parameter in command.params:
            name = parameter.name or ""
            if isinstance(parameter, click.Option) and name.startswith("at_"):
                found.setdefault(name.removeprefix("at_").replace("__", "."), parameter.opts[0])
    return found


# ---------------------------------------------------------------- job files

SECTIONS = {  # headings of the sections of a job file, in its order
    "source": "Source",
    "steps": "Steps",
    "model": "Models",
    "sink": "Sink",
    "update": "Update",
    "gates": "Gates",
    "running": "Running",
    "engine": "Engine",
    "deliver": "Deliver",
    "schedule": "Schedule",
    "alerts": "Alerts",
    "metrics": "Metrics",
    "lineage": "Lineage",
}


def job_file_page() -> str:
    """Every key of a job file, from the schema that editors use."""
    schema = json_schema()
    top = [
        (f"[`{key}`](#{SECTIONS[key].lower()})" if key in SECTIONS else code(key), *_about(field))
        for key, field in schema["properties"].items()
    ]
    parts = [
        "# Job file keys\n",
        "From the JSON Schema that `gristmill schema` prints. [Job files](../job-files.md) shows how they are used.\n",
        table(("key", "type", "default", "meaning"), top),
    ]
    for key, title in SECTIONS.items():
        parts.append(f"## {title}\n")
        for name, fields in sections(schema, key).items():
            if name:
                parts.append(f"### {key}: {name}\n")
            parts.append(
                table(("key", "type", "default", "meaning"), ((code(k), *_about(f)) for k, f in fields.items()))
            )
    parts.append(_engines())
    return "\n".join(parts)


def sections(schema: Mapping[str, Any], key: str) -> dict[str, Mapping[str, Any]]:
    """The mappings that may stand under a key of a job: by kind for models and steps, else under ""."""
    found = {}
    for name in _references(schema["properties"][key]):
        definition = schema["$defs"][name.removeprefix("#/$defs/")]
        required = definition.get("required", ())
        kind = definition["title"].replace("_", " ", 1).rpartition(" ")[2] if key in ("model", "steps") else ""
        found[kind] = {k: {**f, "required": k in required} for k, f in definition["properties"].items()}
    return found


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for item in node.values():
            yield from _references(item)
    elif isinstance(node, list):
        for item in node:
            yield from _references(item)


def _about(field: Mapping[str, Any]) -> tuple[str, str, str]:
    default = "required" if field.get("required") is True else _value(field.get("default"))
    return " or ".join(dict.fromkeys(_types(field))), default, escaped(field.get("description", ""))


def _value(default: Any) -> str:
    return "" if default is None or default in ({}, [], ()) else code(_written(default))


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value} ({value >> 20} MB)"
    return str(value)


def _types(field: Mapping[str, Any]) -> Iterator[str]:
    """Names of the types that a field takes, references to variables left out."""
    if "$ref" in field:
        yield "mapping"
    elif "const" in field:
        yield code(field["const"])
    elif "enum" in field:
        yield from map(code, field["enum"])
    elif "anyOf" in field or "oneOf" in field:
        for part in field.get("anyOf", field.get("oneOf")):
            if part.get("type") != "null" and "pattern" not in part:
                yield from _types(part)
    elif field.get("type") == "array":
        inner = " or ".join(dict.fromkeys(_types(field.get("items", {}))))
        yield f"list of {inner}" if inner else "list"
    else:
        names = {"object": "mapping", "string": "text", "integer": "whole number", "boolean": "true or false"}
        yield names.get(field.get("type", ""), field.get("type", "anything"))


def _engines() -> str:
    """The options of each engine, which stand beside `workers` and the others."""
    parts = []
    for name, options in ((name, ENGINES.get(name).Options) for name in ENGINES.ours):
        parts += [f"### engine: {name}\n", escaped(inspect.getdoc(options) or "") + "\n"]
        parts.append(table(("key", "type", "default", "meaning"), _fields(options)))
    return "\n".join(parts)


def _fields(cls: type[Any]) -> Iterator[tuple[str, ...]]:
    """The options of a class: name, type, default and meaning."""
    for field in dataclasses.fields(cls):
        option = options_of(cls)[field.name]
        meaning = "" if option.help is None else option.help.text
        yield code(field.name), _kinds(option), _value(_default(field)), escaped(meaning)


def _kinds(option: Option) -> str:
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "a session"}
    return " or ".join(names.get(part, "mapping") for part in option.types if part is not type(None))


def _default(field: dataclasses.Field[Any]) -> Any:
    return None if field.default is dataclasses.MISSING else field.default


# ---------------------------------------------------------------- options

SPELLED = {  # how Python is told what stands in a section of a job file
    "source": "gm.source(…, {}=…)",
    "sink": "gm.sink(…, {}=…)",
    "gates": "gm.Job(…, gates={{{!r}: …}})",
    "engine": "gm.Job(…, {}=…)",
    "running": "gm.Job(…, {}=…)",
    "deliver": "gm.to(…, {}=…)",
    "alerts": "gm.Job(…, alerts=[{{{!r}: …}}])",
    "metrics": "gm.Job(…, metrics=[{{{!r}: …}}])",
    "lineage": "gm.Job(…, lineage=[{{{!r}: …}}])",
}


def options_page() -> str:
    """How an option is written in Python, in a job file and on the command line."""
    schema, typed = json_schema(), flags()
    parts = [
        "# Options: three spellings\n",
        "An option has one name. In Python it is a keyword, in a job file a key, on the command line a flag; an option "
        "without a flag is given as `--set SECTION.NAME=VALUE`. What each one means is in "
        "[Job file keys](job-file.md).\n",
    ]
    rows = [
        (code(key), code(f"gm.Job(…, {key}=…)"), code(f"{key}: …"), code(typed.get(f"job.{key}", "")))
        for key in schema["properties"]
        if key.startswith("on_") or key in ("audit", "deliver", "alerts", "metrics", "lineage")
    ]
    parts += ["## Job\n", table(("option", "Python", "job file", "command line"), rows)]
    for key, title in SECTIONS.items():
        if key in SPELLED:
            (fields,) = sections(schema, key).values()
            parts += [f"## {title}\n", _spellings(key, fields, typed)]
    parts.append("## Models\n")
    for kind, fields in sections(schema, "model").items():
        parts += [f"### {kind}\n", _model_spellings(kind, fields, typed)]
    return "\n".join(parts)


def _spellings(section: str, fields: Mapping[str, Any], typed: Mapping[str, str]) -> str:
    rows = [
        (
            code(name),
            code(_python(section, name)),
            code(f"{section}: {{{name}: …}}"),
            code(typed.get(f"{section}.{name}", "")) or ("" if name == "uri" else code(f"--set {section}.{name}=…")),
        )
        for name in fields
    ]
    return table(("option", "Python", "job file", "command line"), rows)


def _python(section: str, name: str) -> str:
    if name in ("uri", "to") and section in ("source", "sink", "deliver"):
        return f"gm.{'to' if name == 'to' else section}(…)"
    return "gm.Job(…, engine=…)" if (section, name) == ("engine", "name") else SPELLED[section].format(name)


KINDS = {
    "embed": "TextEmbedder",
    "classify": "TextClassifier",
    "onnx": "OnnxModel",
    "torchscript": "TorchScriptModel",
    "sklearn": "SklearnModel",
    "prompt": "Prompt",
    "score": "Score",
    "requests": "Requests",
    "call": "model",
}
COMMAND_OF = {  # of one kind of model
    **{name: name for name in ("embed", "classify", "prompt", "score")}, "requests": "run-batch", "call": "apply",
}  # fmt: skip


def _model_spellings(kind: str, fields: Mapping[str, Any], typed: Mapping[str, str]) -> str:
    """Flags are those of the command of that name; models without a command are named by a job file."""
    made, command = KINDS.get(kind, kind), COMMAND_OF.get(kind)
    known = commands()[command].params if command else []
    has = {parameter.name for parameter in known}
    rows = []
    for name in fields:
        python = f"gm.{made}(…)" if name == kind else f"gm.{made}(…, {name}=…)"
        flag = typed.get(f"model.{name}", "") if f"at_model__{name}" in has else ""
        if name == kind and command:
            flag = {"apply": "--fn", "prompt": "--prompt", "score": "--prompt"}.get(command, "--model")
        elif name == "llm":
            flag = "--model"
        rows.append((code(name), code(python), code(f"model: {{{name}: …}}"), code(flag)))
    return table(("option", "Python", "job file", f"`gristmill {command}`" if command else "command line"), rows)


# ---------------------------------------------------------------- Python

GROUPS = {
    "Jobs": (
        *("Job", "embed", "classify", "predict", "prompt", "score", "run_batch", "apply", "run", "plan", "tune"),
        "load_job",
        "schema",
    ),
    "Results": ("read", "dead", "retry_dead", "status", "verify", "compare", "diff", "prove", "Report"),
    "Stores": ("to", "Delivery", "deliver", "lookup"),
    "Sources, sinks and steps": ("source", "sink", "Source", "Sink", "step", "filter", "flat_map", "Gates"),
    "Models": (
        *("model", "Prompt", "Score", "Requests", "TextEmbedder", "TextClassifier", "SklearnModel", "OnnxModel"),
        "TorchScriptModel",
    ),
    "Engines": ("local", "ray"),
    "The parallel map": ("remote_parallel_map", "map", "detached"),
    "Dynamic batching": ("dynamically",),
}
OPTIONS = {  # the classes whose options stand in a table below what has them
    **{f"{cls.__module__}.{cls.__name__}": cls for cls in (Source, Sink, Gates, *map(MODELS.get, MODELS.ours))},
    **{f"gristmill.job.options.{name}": ENGINES.get(name).Options for name in ENGINES.ours},
    "gristmill.dynamic.decorator.dynamically": Batching,
    "gristmill.inference.dynamically": Padded,
    "gristmill.aio.dynamically": Awaited,
}
MODULES = {
    "Spark": ("gristmill.spark", ("predict_udf",)),
    "Dynamic batching of models": ("gristmill.inference", ("dynamically",)),
    "Dynamic batching for asyncio": ("gristmill.aio", ("dynamically",)),
    "Dynamic batching of models for asyncio": ("gristmill.aio.inference", ("dynamically",)),
}


def python_page() -> str:
    """Directives for mkdocstrings: every public name, where it is defined."""
    listed = {name for names in GROUPS.values() for name in names}
    rest = [n for n in gristmill.__all__ if n not in listed and not hasattr(errors, n) and not n.startswith("_")]
    parts = [
        "# Python API\n",
        "`import gristmill as gm`. The keywords that `**options` stands for are in [Options](options.md), exceptions "
        "in [Exceptions and exit codes](errors.md).\n",
    ]
    for title, names in {**GROUPS, **({"More": tuple(rest)} if rest else {})}.items():
        parts.append(f"## {title}\n")
        parts += [_documented(f"gm.{name}", f"{gristmill._HOME[name]}.{name}") for name in names]
        if title == "Engines":  # gm.spark is the module, which can be called
            parts.append(_documented("gm.spark", "gristmill.job.options.spark"))
    for title, (module, names) in MODULES.items():
        parts.append(f"## {title}\n")
        short = module.replace("gristmill", "gm")
        parts += [_documented(f"{short}.{name}", f"{module}.{name}") for name in names]
    return "\n".join(parts)


def _documented(shown: str, place: str) -> str:
    options = {"heading": shown, "toc_label": shown}
    # What they return depends on the sink.
    if place.rpartition(".")[2] in (
        "embed",
        "classify",
        "predict",
        "prompt",
        "score",
        "apply",
    ):
        options |= {"show_overloads": "true", "overloads_only": "true"}
    lines = [f"::: {place}", "    options:", *(f"      {k}: {v}" for k, v in options.items()), ""]
    return "\n".join([*lines, _options(OPTIONS[place])] if place in OPTIONS else lines)


def _options(cls: type[Any]) -> str:
    """The options of a class; of a decorator, those left out that all have."""
    rows = []
    for field in dataclasses.fields(cls):
        option = options_of(cls)[field.name]
        if option.help is not None and not (issubclass(cls, Batching) and hasattr(cls.__base__, field.name)):
            default = field.default.value if isinstance(field.default, enum.Enum) else field.default
            shown = "" if default is None or default is dataclasses.MISSING or default == () else code(repr(default))
            rows.append((code(field.name), shown, escaped(option.help.text)))
    return table(("option", "default", "meaning"), rows)


# ---------------------------------------------------------------- exceptions


def errors_page() -> str:
    """The tree of exceptions with their exit codes, and what the codes mean, as README says it."""
    rows = [
        (
            f'<span id="{cls.__name__.lower()}"></span>`{cls.__name__}`',
            code(cls.__bases__[0].__name__),
            code(getattr(cls, "exit_code", "")),
            escaped(inspect.getdoc(cls) or ""),
        )
        for cls in (getattr(errors, name) for name in errors.__all__)
    ]
    return "\n".join([
        "# Exceptions and exit codes\n",
        "## Exit codes\n",
        exit_codes(),
        "## Exceptions\n",
        "All of them can be imported from `gristmill`. `exit_code` is what the command line ends with; where a run "
        "happened before the error, `report` is its report.\n",
        table(("exception", "is a", "exit code", "meaning"), rows),
    ])  # fmt: skip


def exit_codes() -> str:
    """README's table of exit codes."""
    found = re.search(r"^\| exit \| meaning \|\n(?:\|.*\n)+", README.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{README} has no table of exit codes")
    return found[0]


if __name__ == "__main__":
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")

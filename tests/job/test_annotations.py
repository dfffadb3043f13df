"""An option is said once, in the annotation of its field: everything else that knows of it has it from there."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import click
import pytest

import gristmill as gm
from gristmill import aio, inference
from gristmill.cli.app import gristmill as group
from gristmill.cli.flags import SECTIONS
from gristmill.dynamic import settings
from gristmill.job import delivery, job, keywords, options, prompts, recipients, requests, schedule, scores, specs
from gristmill.job.annotations import Option, options_of
from gristmill.jobfile.sections import json_schema
from gristmill.observe.events import Observer

ENGINES = tuple(options.ENGINES.get(name).Options for name in options.ENGINES.ours)
BATCHING = {
    gm.dynamically: settings.Batching,
    aio.dynamically: settings.Awaited,
    inference.dynamically: settings.Padded,
    aio.inference.dynamically: settings.AwaitedPadded,
}
TOLD = tuple(cls for cls, _ in recipients.HEADS.values())
CLASSES = [cls for classes in SECTIONS.values() for cls in classes]
NO_OPTIONS = {(job.Source, "data"), (specs.FunctionModel, "call")}  # what Python alone has, and what has options inside
OWN = {
    ("prompt", "--prompt"),
    ("score", "--prompt"),
}  # what a command is about; the flag of that name is another option of other commands
SOURCE = Path(gm.__file__).parent


def every() -> Iterator[tuple[type[Any], Option]]:
    """Each option that there is, with its class."""
    for cls in (*CLASSES, delivery.Delivery, options.Update, schedule.Schedule, *TOLD, *ENGINES, *BATCHING.values()):
        for option in options_of(cls).values():
            if (cls, option.name) not in NO_OPTIONS:
                yield cls, option


def test_every_option_says_what_it_means() -> None:
    """In its own annotation, and in no other text of the source."""
    texts = {option.help.text if option.help else f"{cls.__name__}.{option.name} has none" for cls, option in every()}
    assert not [text for text in texts if text.endswith(" has none")]
    found: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found.update(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in texts)
    assert {text: found[text] for text in texts if found[text] != 1} == {}


def commands() -> dict[str, click.Command]:
    """The commands that have flags of a job's options."""
    context = click.Context(group, info_name="gristmill")
    made = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {n: c for n, c in made.items() if c is not None and any((p.name or "").startswith("at_") for p in c.params)}


def flags() -> dict[str, tuple[str, str]]:
    """The flags that options say they have: name and help by the parameter that click passes."""
    found = {}
    for section, option in ((s, o) for s, kinds in SECTIONS.items() for k in kinds for o in options_of(k).values()):
        inside = [(f"{option.name}__{key.name}", key.help) for key in option.keys]
        for name, said in [(option.name, option.help), *inside]:
            if said is not None and said.flag is not None:
                flag = said.flag or "--" + name.rpartition("__")[2].replace("_", "-")
                found[f"at_{section}__{name}"] = (flag, said.text)
    return found


def test_every_flag_is_that_of_an_option() -> None:
    """With its name and help; the default is the option's own. No other flag of these commands has such a name."""
    said, seen = flags(), set()
    for name, command in commands().items():
        for parameter in (p for p in command.params if isinstance(p, click.Option)):
            key, typed = parameter.name or "", parameter.opts[0]
            if key.startswith("at_"):
                assert (typed, parameter.help) == said[key]
                assert parameter.default in (None, ()) or "UNSET" in repr(parameter.default), f"{name} {typed}"
                seen.add(key)
            elif (name, typed) not in OWN:
                assert typed not in [flag for flag, _ in said.values()], f"{name} {typed} is said in a second place"
    assert seen == set(said)


def test_every_key_of_a_job_file_is_that_of_an_option() -> None:
    """Its description and default; vars and profiles are what only job files have."""
    said = {option.help.text for _, option in every() if option.help is not None}
    schema = json_schema()
    for definition in (schema, *schema["$defs"].values()):
        steps = definition["title"].lower().startswith("step")
        for name, field in definition["properties"].items():
            if name not in ("vars", "profiles") and not (steps and name in ("map", "flat_map", "filter")):
                assert field["description"] in said, (definition["title"], name)
    for section, cls in (
        ("Running", options.Running),
        ("Gates", options.Gates),
        ("Sink", job.Sink),
        ("Delivery", delivery.Delivery),
        *((cls.__name__, cls) for cls in TOLD),
    ):
        for name, field in schema["$defs"][section]["properties"].items():
            if (default := cls.__dataclass_fields__[name].default) is not dataclasses.MISSING:
                assert field["default"] == (list(default) if isinstance(default, tuple) else default)


RANGES = [(cls, option) for cls, option in every() if option.range is not None]


@pytest.mark.parametrize(("cls", "option"), RANGES, ids=[f"{cls.__name__}.{option.name}" for cls, option in RANGES])
def test_every_range_is_checked(cls: type[Any], option: Option) -> None:
    """Where the value is given, with the name, the value and what to give instead."""
    need: Mapping[type, dict[str, Any]] = {
        job.Source: {"uri": ("in.csv",)},
        schedule.Schedule: {"cron": "@daily"},
        job.Sink: {"uri": "out"},
        specs.FunctionModel: {"call": specs.Call("m:f")},
        specs.TextEmbedder: {"model": "m", "text": "t", "base_url": "http://h/v1", "price": {"input": "1/1M"}},
        prompts.Prompt: {"prompt": "p", "llm": "m", "price": {"input": "1/1M", "output": "1/1M"}},
        scores.Score: {
            "prompt": "p",
            "llm": "m",
            "continuations": ("a",),
            "price": {"input": "1/1M", "output": "1/1M"},
        },
        requests.Requests: {"llm": "m", "price": {"input": "1/1M", "output": "1/1M"}},
    }
    limits = option.range
    assert limits is not None
    low = limits.least - 1 if limits.above is None else limits.above
    for wrong in (low, limits.most + 1, "x", True, float("nan")):
        if wrong != float("inf"):
            with pytest.raises(gm.BadJob) as e:
                cls(**need.get(cls, {}), **{option.name: wrong})
            assert f"{option.name} is {wrong!r}: {limits.words}" in str(e.value)
    for right in (1, *option.texts, *([None] if type(None) in option.types else [])):
        assert getattr(cls(**need.get(cls, {}), **{option.name: right}), option.name) == right


def test_every_choice_is_checked() -> None:
    """One of the texts that the type names, told with all of them."""
    with pytest.raises(gm.BadJob, match="on_bad_file is 'skp': it must be one of fail, skip"):
        gm.source("in.csv", on_bad_file="skp")  # type: ignore[arg-type]
    with pytest.raises(gm.BadJob, match="on_null is 'ded': it must be one of dead, skip, keep"):
        gm.Job("in.csv", "m:f", "out", on_null="ded")  # type: ignore[arg-type]
    with pytest.raises(gm.BadJob, match="sink options is 'zstd': give a mapping"):
        gm.sink("out", options="zstd")  # type: ignore[arg-type]


WIDER = {
    **dict.fromkeys(recipients.HEADS, Any),  # what Python takes in more forms than the job has it in
    "gates": options.Gates | Mapping[str, Any] | None,
    "running": options.Running | Mapping[str, Any] | None,
    "engine": str | options.EngineSpec | None,
    "audit": Any,
    "update": bool | options.Update | Mapping[str, Any] | None,
    "schedule": Any,  # an expression of cron, a mapping, or a Schedule
    "deliver": Any,  # addresses, mappings, or gm.to(…), one or several
    "messages": str | Callable[[dict[str, Any]], Any] | None,
    "examples": str | Sequence[Mapping[str, Any]] | None,
    "inputs": Mapping[str, Any] | Sequence[Any] | None,  # by the kind of model
}


def test_checkers_are_told_the_types_of_the_options() -> None:
    """The keywords of public functions, which type checkers must find written out, are the options with their types."""
    names = {
        "Names": Sequence[str] | str, "Auto": options.Auto, "EngineSpec": options.EngineSpec, "Gates": options.Gates,
        "Running": options.Running, "Observer": Observer, "Update": options.Update,
    }  # fmt: skip
    text = {**options_of(specs.TextClassifier), **options_of(specs.TextEmbedder)}
    for kind, classes in (
        (keywords.SourceOptions, (job.Source,)),
        (keywords.SinkOptions, (job.Sink,)),
        (keywords.DeliveryOptions, (delivery.Delivery,)),
        (keywords.JobOptions, (job.JobSpec, options.Running, options.EngineSpec)),
        (keywords.OfLocal, (options.EngineSpec, options.LocalOptions)),
        (keywords.OfRay, (options.EngineSpec, options.RayOptions)),
        (keywords.OfSpark, (options.EngineSpec, options.SparkOptions)),
        (keywords.EmbedOptions, (specs.TextEmbedder,)),
        (keywords.ClassifyOptions, (specs.TextClassifier,)),
        (keywords.PredictOptions, (specs.SklearnModel, specs.OnnxModel, specs.TorchScriptModel)),
        (keywords.PromptOptions, (prompts.Prompt,)),
        (keywords.ScoringOptions, (scores.Score,)),
        (keywords.RunBatchOptions, (requests.Requests, job.JobSpec, options.Running, options.EngineSpec)),
        (keywords.ApplyOptions, (specs.Call, specs.FunctionModel)),
    ):
        told = typing.get_type_hints(kind, localns=names)
        for name, option in [item for cls in classes for item in options_of(cls).items()]:
            if name in told and not (name == "output" and kind is keywords.ApplyOptions):
                assert told[name] == widened(name, option), f"{kind.__name__}.{name}"
    assert set(text) - {"model", "text", "output"} <= {*keywords.names_of(keywords.EmbedOptions), "all_scores"}


def widened(name: str, option: Option) -> Any:
    """The type as Python takes it: a text for a list of one, and any sequence."""
    if name in WIDER:
        return WIDER[name]
    names = [Sequence[str] | str if part == tuple[str, ...] else part for part in option.types]
    return typing.Union[tuple(names)]  # noqa: UP007


@pytest.mark.parametrize("name", options.ENGINES.ours)
def test_each_engine_has_a_function_with_its_options(name: str) -> None:
    """`gm.local`, `gm.ray` and `gm.spark` take what all engines and what this one can be told, and give an engine."""
    function = getattr(gm, name)
    for option, value in (("workers", 3), ("threads", 2)):
        assert getattr(function(**{option: value}), option) == value
    assert function() == options.EngineSpec(name)
    wrong = "masterr" if name == "spark" else "gpus_per_workr"
    with pytest.raises(gm.BadJob, match=f"engine {name} has no option '{wrong}': did you mean"):
        function(**{wrong: 1})


@pytest.mark.parametrize("function", BATCHING, ids=lambda f: f.__module__)
def test_decorators_show_their_options(function: Any) -> None:
    """Names, types and defaults in the signature, meanings in the help; a wrong name is told with the right one."""
    kind = BATCHING[function]
    shown = list(inspect.signature(function).parameters.values())[1:]
    fields = {name: field for name, field in kind.__dataclass_fields__.items() if name in options_of(kind)}
    assert {p.name: p.default for p in shown} == {name: field.default for name, field in fields.items()}
    assert not [p for p in shown if get_origin(p.annotation) is Annotated]
    assert all(f"- {name}: {o.help.text}" in function.__doc__ for name, o in options_of(kind).items() if o.help)
    with pytest.raises(TypeError, match="dynamically has no option 'bach_size': did you mean 'batch_size'"):
        function(bach_size=3)
    assert get_args(settings.WhenFull) == options_of(kind)["when_full"].texts

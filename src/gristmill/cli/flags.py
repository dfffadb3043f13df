"""Flags built from the options of a job, which declare whether they have one, and how it is spelled.

A flag that was not given changes nothing, so defaults exist in one place only, the frozen descriptions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import click

from gristmill.cli.helptext import GroupedOption
from gristmill.errors import BadJob
from gristmill.job.annotations import Help, Option, options_of
from gristmill.job.delivery import Delivery, is_store
from gristmill.job.job import JobSpec, Sink, Source
from gristmill.job.namelists import split
from gristmill.job.options import EngineSpec, Gates, Running, Update
from gristmill.job.recipients import as_told
from gristmill.job.specs import MODELS, Call
from gristmill.jobfile.literals import literal
from gristmill.jobfile.overlay import Change
from gristmill.values import dataclass

F = TypeVar("F", bound=Callable[..., Any])

SECTIONS: dict[str, tuple[type[Any], ...]] = {
    "source": (Source,),
    "sink": (Sink,),
    "job": (JobSpec,),
    "gates": (Gates,),
    "engine": (EngineSpec,),
    "running": (Running,),
    "model": (*(MODELS.get(kind) for kind in MODELS.ours), Call),
}
GROUPS = {
    "source": "Source", "sink": "Output", "job": "Rows that fail", "gates": "Rows that fail", "engine": "How it runs",
    "running": "How it runs", "model": "Model",
}  # fmt: skip
# Flags that come first in their group of --help, in this order; the others follow, in the order of the fields.
FIRST = (
    *("--text", "--features", "--method", "--device", "--dtype", "--backend", "--max-length", "--sha256"),
    *("--trust-remote-code", "--where", "--columns", "--limit", "--sample", "--seed", "--source-format", "--delimiter"),
    *("--keep", "--drop", "--output", "--format", "--partition-by", "--sort-by", "--files", "--merge"),
    *("--engine", "--workers", "--gpus", "--threads", "--steps-workers"),
    *("--batch-tokens", "--batch-rows", "--batch-timeout"),
)


@dataclass(frozen=True)
class Flag:
    """The flag of an option: its `name` as typed, and `path` into the job (`source.limit`)."""

    name: str
    path: str
    option: Option
    help: Help

    @property
    def key(self) -> str:
        """The name of the parameter that click passes."""
        return "at_" + self.path.replace(".", "__")

    @property
    def place(self) -> tuple[str, ...]:
        """The path as the job has it: fields of the job itself are at its top."""
        parts = tuple(self.path.split("."))
        return parts[1:] if parts[0] == "job" else parts


def flags_of(section: str, *kinds: type[Any]) -> tuple[Flag, ...]:
    """A flag for each option of a section that has one, in the order of --help; for a model, options of its kinds."""
    found: dict[str, Flag] = {}
    for option in (option for cls in kinds or SECTIONS[section] for option in options_of(cls).values()):
        for one in (option, *(Option(f"{option.name}.{key.name}", str, key.help) for key in option.keys)):
            if one.help is not None and one.help.flag is not None:
                typed = one.help.flag or "--" + one.name.rpartition(".")[2].replace("_", "-")
                found.setdefault(typed, Flag(typed, f"{section}.{one.name}", one, one.help))
    return ordered(found.values())


def ordered(flags: Iterable[Flag]) -> tuple[Flag, ...]:
    """Flags in the order of --help, group by group."""
    return tuple(sorted(flags, key=lambda flag: FIRST.index(flag.name) if flag.name in FIRST else len(FIRST)))


# ---------------------------------------------------------------- types


if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # generic only for newer versions of click


class Value(_ParamType):
    """Text, or a number or true or false if it is one."""

    name = "value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return literal(value, f"{param.opts[0] if param else self.name} {value}") if isinstance(value, str) else value


class AutoInt(_ParamType):
    """A whole number, or auto."""

    name = "whole number or auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "auto" or isinstance(value, int):
            return value
        if re.fullmatch(r"\d+", str(value)):
            return int(value)
        return self.fail(f"{value!r}: give a whole number, or auto", param, ctx)


class AutoRange(AutoInt):
    """A whole number, auto, or least and most, as 4-64."""

    name = "whole number, auto or range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if match := re.fullmatch(r"(\d+)[-:,](\d+)", str(value)):
            return int(match[1]), int(match[2])
        return super().convert(value, param, ctx)


class Pair(_ParamType):
    """`k=v`; with `typed`, v is read as JSON if it is valid."""

    name = "K=V"

    def __init__(self, typed: bool = True) -> None:
        self.typed = typed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        key, equals, text = str(value).partition("=")
        if not equals or not key:
            return self.fail(f"{value!r}: write it as name=value", param, ctx)
        if not self.typed:
            return key, text
        return key, literal(text, f"{param.opts[0] if param else self.name} {value}")


class PairOrName(Pair):
    """`k=v`, or the whole as `@FILE`, `MODULE:NAME` or a JSON object."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, dict):
            return value
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                return dict(json.loads(value))
            except ValueError as e:
                return self.fail(f"{value!r}: is no JSON ({e}): write name=type, a JSON object, or @FILE", param, ctx)
        if isinstance(value, str) and (value.startswith("@") or ("=" not in value and ":" in value)):
            return value
        return super().convert(value, param, ctx)


def click_type(option: Option) -> dict[str, Any]:
    """How click takes an option; if it is not given it is None, or empty if it can be given many times."""
    kinds: list[Any] = [part for part in option.types if part is not type(None)]
    origins: list[Any] = [get_origin(part) for part in kinds]
    if kinds[0] is bool:
        return {"is_flag": True, "default": None}
    if Mapping in origins and str in kinds:
        return {"type": PairOrName(typed=False), "multiple": True}
    if str in kinds and len(kinds) > 1:
        return {"type": Value()}
    if len(kinds) > 1:
        one_or_two = {"type": AutoRange(), "metavar": "N|auto|A-B"}
        return one_or_two if tuple in origins else {"type": AutoInt(), "metavar": "N|auto"}
    if origins[0] is Literal:
        return {"type": click.Choice(list(option.texts))}
    if origins[0] is tuple:
        return {"multiple": True, "metavar": "A,B"}
    if origins[0] is Mapping:
        return {"type": Pair(get_args(kinds[0])[1] is not str), "multiple": True}
    kind, metavar = {
        int: (click.INT, "N"),
        float: (click.FLOAT, "X"),
        str: (click.STRING, None),
        Any: (click.STRING, None),
    }[kinds[0]]
    return {"type": kind, **({"metavar": metavar} if metavar else {})}


def options(flags: Sequence[Flag], required: Sequence[str] = ()) -> Callable[[F], F]:
    """A decorator that gives a command these flags. `required` are paths of flags that must be given."""

    def decorate(command: F) -> F:
        for flag in reversed(flags):
            kind = click_type(flag.option)
            if flag.help.metavar:
                kind["metavar"] = flag.help.metavar
            negated = {*flag.option.types} == {bool, type(None)}
            name = f"{flag.name}/--no-{flag.name.removeprefix('--')}" if negated else flag.name
            group = flag.help.group or GROUPS[flag.path.partition(".")[0]]
            decorated = click.option(
                name, flag.key, cls=GroupedOption, group=group, usual=flag.help.usual, help=flag.help.text,
                required=flag.path in required, **kind,
            )  # fmt: skip
            command = decorated(command)
        return command

    return decorate


def changes(flags: Sequence[Flag], given: Mapping[str, Any]) -> list[Change]:
    """The changes to a job that the given flags make."""
    out = []
    for flag in flags:
        value = given.get(flag.key)
        if value is None or value == () or (flag.key == _KEY and _for_update(given)):
            continue
        if any(get_origin(part) is tuple and get_args(part)[1:] == (...,) for part in flag.option.types):
            value = listed(value)
        elif isinstance(value, tuple) and (whole := [one for one in value if isinstance(one, (str, dict))]):
            if len(value) > 1:
                raise BadJob(f"{flag.name} {whole[0]} is all of it: give it alone")
            value = whole[0]
        elif isinstance(value, tuple) and value and isinstance(value[0], tuple):
            if twice := next((k for i, (k, _) in enumerate(value) if k in [k for k, _ in value[:i]]), None):
                raise BadJob(f"{flag.name} {twice}=… is given twice")
            value = dict(value)
        out.append(Change(flag.place, value, flag.name))
    return out


_KEY, _ROW_ID = "at_sink__key", "at_sink__row_id"


def _for_update(given: Mapping[str, Any]) -> bool:
    """Whether --key is what --update matches rows by, and not (also) what row ids are made of."""
    return bool(given.get("update")) and not given.get(_ROW_ID)


def delivered_to(spec: JobSpec, given: Mapping[str, Any]) -> JobSpec:
    """The job with the stores of --deliver, and whom --alert, --metrics and --lineage tell, besides its own, and with
    --update. Raises BadJob.
    """
    if given.get("update"):
        key = listed(given.get(_KEY) or ())
        spec = replace(spec, update=Update(key) if key else spec.update or Update())
    some = given.get("deliver")
    spec = replace(spec, deliver=(*spec.deliver, *map(Delivery, some))) if some else spec
    told = {"alerts": given.get("alert"), "metrics": given.get("metrics"), "lineage": given.get("lineage")}
    more = {name: (*getattr(spec, name), *as_told(name, some)) for name, some in told.items() if some}
    return replace(spec, **more) if more else spec  # type: ignore[arg-type]


def listed(values: Sequence[str]) -> tuple[str, ...]:
    """`--keep a,b --keep c` as its names; one with a comma is in quotes, `--keep 'a,"b, c"'`."""
    return tuple(name for value in values for name in split(value))


# Where a message has name=value, but names no option of a job: in a text that it quotes, in a call, after a flag, and
# where the value is a path or a price.
_OTHERS = re.compile(r"""(?<!\w)(['"]).*?\1(?!\w)|\w\((?:[^()]|\([^()]*\))*\)|--[\w-]+\s[\w.]+=|\w+=[^\s,;)]*/\S*""")
_BESIDE = re.compile(r"\((--[\w-]+)[^()]*\)")  # the flag, and what it is in Python


def _of_a_store(message: str) -> bool:
    """Whether a message is about a store that is delivered to."""
    return any(is_store(word.lstrip("'(\"")) for word in message.split() if "://" in word)


def ways(message: str, parameters: Sequence[click.Parameter]) -> str:
    """A line that tells how this command takes the options that a message names as in Python (`types=`); empty if it
    names none, or gives the flag itself.
    """
    given = {parameter.name: parameter.opts[0] for parameter in parameters}
    own = {opt.removeprefix("--").replace("-", "_"): opt for p in parameters for opt in p.opts if opt.startswith("--")}
    told, here = [], _of_a_store(message)
    rest = _BESIDE.sub(lambda m: " " if m[1] in own.values() else m[0], message)
    for name in dict.fromkeys(re.findall(r"(?<![\w.'\"/-])([a-z_]+)=", _OTHERS.sub(" ", rest))):
        if here and name in options_of(Delivery) and not {"mode", "nearest"} & own.keys():  # of deliver, lookup
            inside = "" if name in ("index", "options") else f", or ?{name}=… in its address, before the #"
            told.append(f"{name}= is of the delivery: {{to: …, {name}: …}} in a job file{inside}")
            continue
        homes = [(s, cls) for s, classes in SECTIONS.items() for cls in classes if name in options_of(cls)]
        if len({section for section, _ in homes}) != 1:
            continue
        section, cls = homes[0]
        place = (name,) if section == "job" else (section, name)
        kinds: list[Any] = [get_origin(part) for part in options_of(cls)[name].types]
        one = re.search(rf"\b{name}=\{{'(\w+)'", message)
        inside = ".NAME" if Mapping in kinds else f".{one[1]}" if one else ""
        anyhow = f"--set {'.'.join(place)}{inside}=…" if "sets" in given else ""
        way = given.get(f"at_{section}__{name}") or own.get(name) or anyhow
        if way and way.split("=")[0] not in message and f"--set {'.'.join(place)}." not in message:
            told.append(f"{name}= is {way}")
    return f"\n(for this command: {', '.join(told)})" if told else ""

"""Flags made from the fields of a job: a flag is a path into the job, and its type is the field's own.

A flag that was not given changes nothing, so the defaults stand in one place only, the frozen descriptions.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from gristmill.cli.shape import Option
from gristmill.errors import BadJob
from gristmill.plan.fields import about
from gristmill.plan.job import JobSpec, Sink, Source
from gristmill.plan.jobfile import literal
from gristmill.plan.lists import split
from gristmill.plan.options import EngineSpec, Gates, Running
from gristmill.plan.overlay import KIND_OF, Change
from gristmill.plan.specs import Call

F = TypeVar("F", bound=Callable[..., Any])

SECTIONS: dict[str, tuple[type[Any], ...]] = {
    "source": (Source,),
    "sink": (Sink,),
    "running": (Running,),
    "gates": (Gates,),
    "engine": (EngineSpec,),
    "model": (*KIND_OF, Call),
    "job": (JobSpec,),
}


@dataclass(frozen=True)
class Flag:
    """`name` as typed, `path` into the job (`source.limit`), the group in --help, and a metavar where one says more."""

    name: str
    path: str
    group: str
    metavar: str | None = None

    @property
    def key(self) -> str:
        """The name of the parameter that click passes."""
        return "at_" + self.path.replace(".", "__")

    @property
    def place(self) -> tuple[str, ...]:
        """The path as the job has it: fields of the job itself stand at its top."""
        parts = tuple(self.path.split("."))
        return parts[1:] if parts[0] == "job" else parts


# ---------------------------------------------------------------- types


if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # generic only to newer versions of click


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
    """`k=v`; `typed` reads v as JSON where it is some."""

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


@functools.cache  # evaluated for each flag anew they were a tenth of a command
def _hints(section: str) -> dict[str, Any]:
    """Types of the fields of a section, the first class's before those of others."""
    return {name: hint for cls in reversed(SECTIONS[section]) for name, hint in get_type_hints(cls).items()}


def _hint(path: str) -> Any:
    section, _, field = path.partition(".")
    return str if field.startswith("options.") else _hints(section)[field]


def _plain_hint(hint: Any) -> Any:
    """The hint without its None."""
    if get_origin(hint) in (Union, types.UnionType):
        rest = [part for part in get_args(hint) if part is not type(None)]
        return rest[0] if len(rest) == 1 else tuple(rest)
    return hint


def _origin(hint: Any) -> Any:
    return get_origin(hint)


def click_type(hint: Any) -> dict[str, Any]:
    """How click takes a field of this type; nothing given is None, or empty where it can be given many times."""
    plain = _plain_hint(hint)
    if plain is bool:
        return {"is_flag": True, "default": None}
    origin = _origin(plain)
    if origin is Literal:
        return {"type": click.Choice(list(get_args(plain)))}
    if origin is tuple:
        return {"multiple": True, "metavar": "A,B"}
    if isinstance(plain, tuple):
        if any(_origin(part) is tuple for part in plain):
            return {"type": AutoRange(), "metavar": "N|auto|A-B"}
        return {"type": AutoInt(), "metavar": "N|auto"}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        typed = get_args(plain)[1] is not str
        return {"type": Pair(typed), "multiple": True}
    names = {int: (click.INT, "N"), float: (click.FLOAT, "X"), str: (click.STRING, None)}
    kind, metavar = names[plain]
    return {"type": kind, **({"metavar": metavar} if metavar else {})}


def options(flags: Sequence[Flag], required: Sequence[str] = ()) -> Callable[[F], F]:
    """A decorator that gives a command these flags. `required` are paths of flags that must be given."""

    def decorate(command: F) -> F:
        for flag in reversed(flags):
            kind = click_type(_hint(flag.path))
            if flag.metavar:
                kind["metavar"] = flag.metavar
            section, _, field = flag.path.partition(".")
            negated = "bool | None" in str(_hint(flag.path)) and kind.get("is_flag")
            name = f"{flag.name}/--no-{flag.name.removeprefix('--')}" if negated else flag.name
            decorated = click.option(
                name, flag.key, cls=Option, group=flag.group, help=about(section, field),
                required=flag.path in required, **kind,
            )  # fmt: skip
            command = decorated(command)
        return command

    return decorate


def changes(flags: Sequence[Flag], given: Mapping[str, Any]) -> list[Change]:
    """What the flags that were given change in a job."""
    out = []
    for flag in flags:
        value = given.get(flag.key)
        if value is None or value == ():
            continue
        hint = _plain_hint(_hint(flag.path))
        if get_origin(hint) is tuple:
            value = listed(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], tuple):
            if twice := next((k for i, (k, _) in enumerate(value) if k in [k for k, _ in value[:i]]), None):
                raise BadJob(f"{flag.name} {twice}=… is given twice")
            value = dict(value)
        out.append(Change(flag.place, value, flag.name))
    return out


def listed(values: Sequence[str]) -> tuple[str, ...]:
    """`--keep a,b --keep c` as its names; one with a comma is in quotes, `--keep 'a,"b, c"'`."""
    return tuple(name for value in values for name in split(value))


def ways(message: str, parameters: Sequence[click.Parameter]) -> str:
    """A line that says how a command is given the options which a message names as Python does (`types=`); empty where
    it names none, or says it itself.
    """
    given = {parameter.name: parameter.opts[0] for parameter in parameters}
    told = []
    for name in dict.fromkeys(re.findall(r"(?<![\w.'\"-])([a-z_]+)=", message)):
        homes = [s for s, classes in SECTIONS.items() if any(name in cls.__dataclass_fields__ for cls in classes)]
        if len(homes) != 1:
            continue
        flag = Flag("", f"{homes[0]}.{name}", "")
        inside = ".NAME" if get_origin(_plain_hint(_hint(flag.path))) is Mapping else ""
        way = given.get(flag.key) or (f"--set {'.'.join(flag.place)}{inside}=…" if "sets" in given else "")
        if way and way.split("=")[0] not in message:
            told.append(f"{name}= is {way}")
    return f"\n(for this command: {', '.join(told)})" if told else ""

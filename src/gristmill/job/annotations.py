"""What an option declares in the annotation of its field: its range, its meaning, how its flag is spelled.

    limit: Annotated[int | None, whole(1), Help("Only the first N rows for which the condition holds")] = None

Name, type and default are the field's own. Checks in Python, flags, the schema of job files and the reference are
generated from these, and repeat nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import os
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from gristmill.errors import BadJob
from gristmill.values import dataclass


@dataclass(frozen=True)
class Help:
    """What an option means, in one line; and its flag: "" has the option's own name, None means no flag. The command
    line lists it in a `group`, else in that of its section, with a `metavar` if that says more than the type. `usual`
    flags are those that --help shows even for commands with many.
    """

    text: str
    metavar: str | None = None
    flag: str | None = ""
    group: str = ""
    usual: bool = False


@dataclass(frozen=True)
class Key:
    """An option inside a mapping that has its own flag: a text under this key."""

    name: str
    help: Help


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, or `above` one. `words` say what to give; None and texts that the type names,
    such as "auto", are allowed too.
    """

    words: str
    least: float = -math.inf
    most: float = math.inf
    above: float | None = None
    whole: bool = False

    def holds(self, value: Any) -> bool:
        """Whether it is a number in the range."""
        if not is_of(value, int if self.whole else float):
            return False
        return self.least <= value <= self.most and (self.above is None or value > self.above)


def whole(least: int, words: str = "") -> Range:
    """Whole numbers of at least `least`."""
    return Range(words or f"give a whole number of at least {least}", least, whole=True)


def size(example: int) -> Range:
    """Bytes, at least one; `example` is a number of them for the error message."""
    return whole(1, f"give bytes as a whole number, for example {example} for {example >> 20} MB")


@dataclass(frozen=True)
class Option:
    """A field of a class of options; `hint` is its type, without other annotations."""

    name: str
    hint: Any
    help: Help | None = None
    range: Range | None = None
    keys: tuple[Key, ...] = ()

    @functools.cached_property
    def types(self) -> tuple[Any, ...]:
        """The members of its type, if that is a union."""
        return get_args(self.hint) if get_origin(self.hint) in (Union, types.UnionType) else (self.hint,)

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """The texts that its type names: "auto", or all texts of a choice."""
        return tuple(text for part in self.types if get_origin(part) is Literal for text in get_args(part))

    def check(self, value: Any, of: str = "") -> None:
        """Raises BadJob for a value that is out of range, or not one of the choices. `of` says whose option it is. A
        pair is checked by its class.
        """
        kinds = {get_origin(part) for part in self.types}
        if (value is None and type(None) in self.types) or (isinstance(value, str) and value in self.texts):
            return
        if self.range is not None:
            pair = tuple in kinds and isinstance(value, (tuple, list))
            if not (pair or self.range.holds(value)):
                others = "".join(f", or {text!r}" for text in self.texts)
                raise BadJob(f"{of}{self.name} is {value!r}: {self.range.words}{others}")
        elif Literal in kinds:
            raise BadJob(f"{self.name} is {value!r}: it must be one of {', '.join(self.texts)}")
        elif Mapping in kinds and not isinstance(value, Mapping):
            if not any(isinstance(value, kind) for kind in (str, type) if kind in (*kinds, *self.types)):
                raise BadJob(f"{of}{self.name} is {value!r}: give a mapping")
        elif NAMES in self.types and _names(value) is None:
            raise BadJob(f"{of}{self.name} is {value!r}: give a name, or a list of names")
        elif (wanted := self.misfit(value)) is not None:
            if self.name == "model":
                refuse_estimator(value, of + self.name)
            raise BadJob(f"{of}{self.name} is {value!r}: give {wanted}")

    def misfit(self, value: Any) -> str | None:
        """What to give instead of a value of a wrong type, if the option's types are plain; None if the value fits."""
        if any(kind not in PLAIN for kind in self.types) or any(is_of(value, kind) for kind in self.types):
            return None
        return " or ".join(words for kind in self.types if (words := PLAIN[kind]))

    def held(self, value: Any) -> Any:
        """A value as its class holds it: names as a tuple, whether one name, a list, or an array was given; a path as
        text, and other packages' numbers as Python's.
        """
        if NAMES in self.types:
            return _names(value)
        if isinstance(value, os.PathLike) and str in self.types:
            return os.fspath(value)
        if bool in self.types and is_of(value, bool):
            return bool(value)
        if isinstance(value, (int, float, str)) or not isinstance(value, numbers.Real):
            return value
        return int(value) if isinstance(value, numbers.Integral) else float(value)


PLAIN: Mapping[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    type(None): "",
}


def is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a plain type. Booleans are not numbers; a path is a text; other packages' numbers count."""
    if kind in (int, float):
        return isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
    if kind is bool and type(value).__module__ == "numpy":
        return type(value).__name__ in ("bool", "bool_")  # of numpy 2 and 1
    return isinstance(value, (str, os.PathLike) if kind is str else kind)


def refuse_estimator(value: Any, what: str) -> None:
    """Raises BadJob for a fitted estimator, or another object that predicts, given as `what`: workers load models from
    files.
    """
    known = [name for name in ("fit", "predict", "transform") if callable(getattr(value, name, None))]
    if not isinstance(value, type) and ("predict" in known or known == ["fit", "transform"]):
        raise BadJob(
            f"{what} is an object in memory ({type(value).__name__}), and each worker loads its own: save it with "
            "skops.io.dump (or joblib.dump) and give the file's name: gm.predict(…, model='model.skops')"
        )


def _names(value: Any) -> tuple[str, ...] | None:
    """One name, or those of a list, an array or an index (`df.columns`), as a tuple; None for anything else."""
    if isinstance(value, str):
        return (value,)
    listed = next((found for name in ("tolist", "to_list", "to_pylist") if (found := getattr(value, name, None))), None)
    some = listed() if listed is not None else value
    return tuple(some) if isinstance(some, (list, tuple)) and all(isinstance(n, str) for n in some) else None


NAMES = tuple[str, ...]  # the type of an option that takes one name, or a list of names


def options_of(cls: type[Any]) -> Mapping[str, Option]:
    """The fields of a dataclass, in order. Other packages' classes may have their `help` in the field's metadata."""
    known = _OPTIONS.get(cls)
    if known is None:
        fields = dataclasses.fields(cls)  # whose types are texts in a module with lazy annotations
        hints = get_type_hints(cls, include_extras=True) if any(isinstance(f.type, str) for f in fields) else {}
        known = _OPTIONS[cls] = {f.name: _option(f, hints.get(f.name, f.type)) for f in fields}
    return known


_OPTIONS: dict[type[Any], Mapping[str, Option]] = {}


def _option(field: dataclasses.Field[Any], hint: Any) -> Option:
    said = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    text = field.metadata.get("help")
    about = next((s for s in said if isinstance(s, Help)), None if text is None else Help(text))
    limits = next((s for s in said if isinstance(s, Range)), None)
    return Option(field.name, bare(hint), about, limits, tuple(s for s in said if isinstance(s, Key)))


def checked(cls: type[Any], values: Mapping[str, Any], of: str = "") -> dict[str, Any]:
    """The values as the class holds them. Raises BadJob for the first that its field does not accept; see
    `Option.check`.
    """
    known = options_of(cls)
    for name, value in values.items():
        known[name].check(value, of)
    return {name: known[name].held(value) for name, value in values.items()}


def bare(hint: Any) -> Any:
    """A type without other annotations."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint

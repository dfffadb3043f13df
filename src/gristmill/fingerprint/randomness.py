"""Expressions in the user's source whose value differs between processes: the time, a process's number, what is drawn
by chance. A value counts as drawn only if it has the form of what its expression gives, here and now: a value that a
configuration put in its place shapes answers.
"""

from __future__ import annotations

import ast
import datetime
import operator
import os
import pathlib
import random
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gristmill.process.startup import began
from gristmill.values import dataclass

_CLOCKS = {"time", "monotonic", "perf_counter", "process_time"}
_HEX, _TOKEN, _NAME = "[0-9a-f]", "[A-Za-z0-9_-]", "[a-z0-9_]"
_CELL = re.compile(r"\[[^]]*\]|.")
_LEAST = 6  # characters: fewer could easily be those of a word
_SLACK = 1.0  # seconds, by which a time may be rounded

Imports = Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class Drawn:
    """`kind` is its type, `seems` says whether a value of that type can be what was drawn in this process. `cells` are
    patterns that match it as a text: one for each character, or one for all if their number is not known; `told` says
    whether a text that they match can be it.
    """

    kind: type
    seems: Callable[[Any], bool]
    cells: tuple[str, ...] = ()
    told: Callable[[str], bool] = lambda text: True

    def fits(self, value: Any) -> bool:
        """Whether a value can be what was drawn in this process."""
        return isinstance(value, self.kind) and not isinstance(value, bool) and self.seems(value)


def drawn(value: ast.expr, imports: Imports, default: bool = False) -> Drawn | None:
    """What an expression gives, if that is just such a value, as text, or a part of it. `default`: of a field, which
    may be given another value.
    """
    if isinstance(value, ast.Call):
        factory = [k.value for k in value.keywords if k.arg == "default_factory"]
        if factory:  # of a dataclass
            made = factory[0].body if isinstance(factory[0], ast.Lambda) else ast.Call(factory[0], [], [])
            return drawn(made, imports, default=True)
        name = dotted(value.func, imports)
        return None if default and name == "random.Random" else _called(value, name) or _written(value, imports)
    if isinstance(value, ast.JoinedStr):
        return _joined(value, imports)
    if isinstance(value, ast.BinOp):
        return _reckoned(value, imports)
    if not isinstance(value, (ast.Attribute, ast.Subscript)) or (inner := drawn(value.value, imports)) is None:
        return None
    return _part(inner, value.slice) if isinstance(value, ast.Subscript) else _attribute(inner, value.attr)


def dotted(node: ast.expr, imports: Imports) -> str:
    """The full name of what an expression names, from its module on; "" if it names nothing that is imported."""
    chain: list[str] = []
    while isinstance(node, ast.Attribute):
        chain.insert(0, node.attr)
        node = node.value
    return ".".join(filter(None, [*imports.get(node.id, ()), *chain])) if isinstance(node, ast.Name) else ""


# ---------------------------------------------------------------- what is called


def _called(call: ast.Call, name: str) -> Drawn | None:
    module, _, function = name.rpartition(".")
    given = bool(call.args or call.keywords)
    clock = function.removesuffix("_ns")
    if module == "time" and clock in _CLOCKS:
        return _clock(getattr(time, clock), int if clock != function else float)
    if name in ("datetime.datetime.now", "datetime.datetime.utcnow"):
        zone = datetime.timezone.utc if function == "utcnow" else None
        text = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\.\d{6}" + (r"[+-]\d\d:\d\d" if given else "")
        return Drawn(datetime.datetime, lambda v: bool(v.tzinfo) == given and _is_now(v, zone), (text,),
                     lambda text: _is_now(datetime.datetime.fromisoformat(text), zone))  # fmt: skip
    if name == "time.strftime" and len(call.args) == 1:
        return _stamp(call.args[0])
    if name in ("os.getpid", "os.getppid"):  # 1 is the number of any program in a container, and of any parent
        number = getattr(os, function)()
        return Drawn(int, lambda v: bool(v == number > 1), tuple(str(number)), lambda text: number > 1)
    if name in ("uuid.uuid1", "uuid.uuid4"):
        version = int(name[-1])
        cells = _CELL.findall(f"{_HEX * 8}-{_HEX * 4}-{version}{_HEX * 3}-[89ab]{_HEX * 3}-{_HEX * 12}")
        return Drawn(uuid.UUID, lambda v: v.version == version, tuple(cells), _mixed)
    if name == "secrets.token_hex":
        return _text((_HEX,) * (2 * _size(call)), _mixed)
    if name == "secrets.token_urlsafe":
        return _text((_TOKEN,) * -(-_size(call) * 4 // 3), _is_token)
    if name == "os.urandom":
        return Drawn(bytes, lambda v: len(v) == _size(call) and not v.isascii())
    if name == "tempfile.mkdtemp":
        return _text(_folder(call))
    if name == "tempfile.TemporaryDirectory":
        return Drawn(tempfile.TemporaryDirectory, lambda v: True, _folder(call))
    if name == "tempfile.mkstemp":
        path = _text(_folder(call))
        return Drawn(tuple, lambda v: len(v) == 2 and path.fits(v[1]), ("", *path.cells))
    if name == "numpy.random.default_rng" and not given:  # a seeded one has its seed as entropy
        return Drawn(object, lambda v: getattr(v.bit_generator.seed_seq, "entropy", 0).bit_length() > 64)
    if name == "random.SystemRandom" or (name == "random.Random" and not given):
        return Drawn(getattr(random, function), lambda v: True)
    return None


def _clock(clock: Callable[[], float], kind: type) -> Drawn:
    def near(value: float) -> bool:
        seconds = value / 1e9 if kind is int else value
        return seconds != round(seconds, 2) and _lately(seconds, clock)  # a person gives round values

    return Drawn(kind, near, (r"\d+" if kind is int else r"\d+\.\d+",), lambda text: near(kind(text)))


def _lately(seconds: float, clock: Callable[[], float] = time.time) -> bool:
    """Whether it is a time within this process's life."""
    return clock() - (time.time() - began()) - _SLACK < seconds < clock() + _SLACK


def _is_now(value: datetime.datetime, zone: datetime.tzinfo | None) -> bool:
    return _lately((value.replace(tzinfo=zone) if zone else value).timestamp())


def _stamp(form: ast.expr) -> Drawn | None:
    """The time as `strftime` writes it, if that includes the second: a day alone may well be what a job asks about."""
    said = form.value if isinstance(form, ast.Constant) else None
    if not isinstance(said, str) or not re.search("%[STXcs]", said):
        return None

    def told(text: str) -> bool:
        try:
            found = datetime.datetime.strptime(text, said)
        except ValueError:
            return False
        if not re.search("%[djDFxc]", said):
            found = datetime.datetime.combine(datetime.date.today(), found.time())
        return _is_now(found, None) or _is_now(found, datetime.timezone.utc)

    return _text(("(?s:.+)",), told)


def _size(call: ast.Call) -> int:
    """How many bytes the call draws; 0 if the source does not tell."""
    said = [*call.args, *(k.value for k in call.keywords)] or [ast.Constant(32)]
    number = said[0].value if isinstance(said[0], ast.Constant) else 0
    return number if isinstance(number, int) else 0


def _folder(call: ast.Call) -> tuple[str, ...]:
    """A path that `tempfile` makes, which may be in any folder if the call is given one."""
    told = {k.arg: k.value for k in call.keywords}
    around = []
    for part in ("prefix", "suffix"):
        said = told.pop(part, ast.Constant("tmp" if part == "prefix" else ""))
        around.append(re.escape(str(said.value)) if isinstance(said, ast.Constant) else ".*")
    place = "(?s:.*)" if call.args or told else re.escape(tempfile.gettempdir())
    return (f"{place}[\\\\/]{around[0]}{_NAME * 8}{around[1]}",)


def _mixed(text: str) -> bool:
    """Whether it has digits and letters: digits alone may well be a given date, and letters alone a word."""
    return len(text) >= _LEAST and bool(re.search("[0-9]", text) and re.search("[a-f]", text))


def _is_token(text: str) -> bool:
    """Whether it looks random: not like words joined by dashes."""
    dashes = sum(map(text.count, "-_"))
    return len(text) >= 2 * _LEAST and text not in (text.lower(), text.upper()) and dashes <= len(text) // 5


# ---------------------------------------------------------------- what is built from it


def _text(cells: tuple[str, ...], told: Callable[[str], bool] = lambda text: True) -> Drawn:
    pattern = re.compile("".join(cells))
    return Drawn(str, lambda v: bool(pattern.fullmatch(v)) and told(v), cells, told)


def _written(call: ast.Call, imports: Imports) -> Drawn | None:
    """Such a value written as a text, a path or another number."""
    if dotted(call.func, imports) == "os.path.join" and call.args and not call.keywords:
        return _named_in(call.args[:-1], call.args[-1], imports)
    method = isinstance(call.func, ast.Attribute)
    of = call.func.value if isinstance(call.func, ast.Attribute) else call.args[0] if len(call.args) == 1 else None
    if of is None or call.keywords or (inner := drawn(of, imports)) is None:
        return None
    how = (dotted(call.func, imports) or getattr(call.func, "id", getattr(call.func, "attr", ""))).rpartition(".")[2]
    if how == "strftime" and method and len(call.args) == 1 and inner.kind is datetime.datetime:
        return _stamp(call.args[0])
    if method and not call.args and inner.kind is datetime.datetime:
        text = _text(inner.cells, inner.told)
        return text if how == "isoformat" else _clock(time.time, float) if how == "timestamp" else None
    if how == "str" and not method and inner.cells and inner.kind is not tuple:
        return _text(inner.cells, inner.told)
    if how == "Path" and inner.kind is str:
        return Drawn(pathlib.PurePath, lambda v: inner.fits(str(v)))
    if how in ("int", "round") and inner.kind is float and _of_time(of, imports):
        return Drawn(int, _lately, (r"\d+",), lambda text: _lately(int(text)))
    return None


def _named_in(folders: Sequence[ast.expr], name: ast.expr, imports: Imports) -> Drawn | None:
    """A path whose last part is such a value, in folders that the source itself names: a folder given from outside
    counts.
    """
    said = [_folder_of(folder, imports) for folder in folders]
    if (inner := drawn(name, imports)) is None or inner.kind is not str or None in said:
        return None
    place = os.path.join(*(text or "" for text in said), "")
    return _text((re.escape(place), *inner.cells), lambda text: inner.fits(os.path.basename(text)))


def _folder_of(node: ast.expr, imports: Imports) -> str | None:
    """The folder that an expression names literally."""
    name = dotted(node.func, imports) if isinstance(node, ast.Call) else ""
    if name == "tempfile.gettempdir":
        return tempfile.gettempdir()
    if isinstance(node, ast.Call) and name == "pathlib.Path" and len(node.args) == 1:
        node = node.args[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _reckoned(value: ast.BinOp, imports: Imports) -> Drawn | None:
    """A time that a number in the source is added to, subtracted from, or scales: a deadline, milliseconds; also the
    path of such a text in a folder.
    """
    if isinstance(value.op, ast.Div) and (path := _named_in([value.left], value.right, imports)) is not None:
        return Drawn(pathlib.PurePath, lambda v: path.fits(str(v)), path.cells, path.told)
    back = {ast.Add: operator.sub, ast.Sub: operator.add, ast.Mult: operator.truediv, ast.Div: operator.mul}
    undo = back.get(type(value.op))
    number = value.right.value if isinstance(value.right, ast.Constant) else None
    if undo is None or not isinstance(number, int | float) or not number:
        return None
    if (inner := drawn(value.left, imports)) is None or inner.kind is not float:
        return None
    return Drawn(float, lambda v: inner.seems(undo(v, number)))


def _of_time(node: ast.expr, imports: Imports) -> bool:
    """Whether it is the time of day, a number of seconds that nothing else comes near."""
    name = dotted(node.func, imports) if isinstance(node, ast.Call) else ""
    return name == "time.time" or getattr(getattr(node, "func", None), "attr", "") == "timestamp"


def _attribute(inner: Drawn, name: str) -> Drawn | None:
    if inner.kind is uuid.UUID and name == "hex":
        return _text(tuple(cell for cell in inner.cells if cell != "-"), _mixed)
    if inner.kind is uuid.UUID and name == "int":
        return Drawn(int, lambda v: v.bit_length() in range(65, 129) and inner.fits(uuid.UUID(int=v)))
    return _text(inner.cells) if inner.kind is tempfile.TemporaryDirectory and name == "name" else None


def _part(inner: Drawn, where: ast.expr) -> Drawn | None:
    """A part, by numbers in the source, of a text whose every character has a cell; or the path of `mkstemp`."""
    if inner.kind is tuple:
        return _text(inner.cells[1:]) if isinstance(where, ast.Constant) and where.value in (1, -1) else None
    ends = [where.lower, where.upper, where.step] if isinstance(where, ast.Slice) else []
    try:
        numbers = [None if end is None else ast.literal_eval(end) for end in ends]
    except ValueError:
        return None
    if inner.kind is not str or not ends or not all(_CELL.fullmatch(cell) for cell in inner.cells):
        return None
    cells = inner.cells[slice(*numbers)]
    return _text(cells, inner.told) if cells else None


def _joined(value: ast.JoinedStr, imports: Imports) -> Drawn | None:
    """An f-string of nothing but such values and the literal text between them."""
    cells, told = [], []
    for part in value.values:
        if isinstance(part, ast.FormattedValue):
            inner = drawn(part.value, imports) if part.conversion in (-1, 115) else None
            if part.format_spec is not None and inner is not None:
                form = part.format_spec.values[0] if isinstance(part.format_spec, ast.JoinedStr) else part.format_spec
                inner = _stamp(form) if inner.kind is datetime.datetime else None
            if inner is None or not inner.cells or inner.kind is tuple:
                return None
            told.append(inner.told)
            cells.append(f"({''.join(inner.cells)})")
        else:
            cells.append(re.escape(str(ast.literal_eval(part))))
    if not told:
        return None
    pattern = re.compile("".join(cells))

    def all_told(text: str) -> bool:
        found = pattern.fullmatch(text)
        return found is not None and all(tell(group) for tell, group in zip(told, found.groups(), strict=True))

    return _text(tuple(cells), all_told)

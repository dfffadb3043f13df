"""Durable documents: what a later run, and a later version, reads again. Each kind is a frozen dataclass with a format
number, which `dump` writes and `load` reads.

A later version reads every format from 1 on. FORMAT goes up if an earlier version would misread what is written; a
field that it may ignore needs no new format. Fields that an earlier format lacks have defaults.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gristmill.errors import CorruptStore, NewerFormat

if TYPE_CHECKING:
    from gristmill.files.contract import Files

D = TypeVar("D", bound="Document")
NOT_STORED: Mapping[str, Any] = {"stored": False}  # metadata of a field that is not part of the document
_CHECKSUM = re.compile(rb'\n "checksum": "([0-9a-f]{64})",')  # of the outermost object, as it is indented
_RESTART = "restore it, or start over with --restart (restart=True)"


class Document:
    """Base of the documents that are JSON. A SEALED one contains its own checksum, so that a torn one is detected. The
    seal is the same in every format.
    """

    FORMAT: ClassVar[int]
    WHAT: ClassVar[str]
    SEALED: ClassVar[bool]

    def __init_subclass__(cls, what: str = "document", sealed: bool = True, format: int = 1) -> None:
        cls.WHAT, cls.SEALED, cls.FORMAT = what, sealed, format

    def dump(self) -> bytes:
        """The document as stored on disk; fields that are None are left out."""
        kind: Any = type(self)
        body = {name: value for name in _stored(kind) if (value := getattr(self, name)) is not None}
        body["format"] = self.FORMAT
        return seal(body) if self.SEALED else json.dumps(body, default=_plain).encode()

    @classmethod
    def load(cls: type[D], data: bytes, path: str) -> D:
        """The document that was dumped. Raises CorruptStore if it is not a complete document of this kind, NewerFormat
        if its format is newer than this version knows; `path` is for the message.
        """
        return cls.of_body(unseal(data, path) if cls.SEALED else _parsed(data, path), path)

    @classmethod
    def of_body(cls: type[D], body: Mapping[str, Any], path: str) -> D:
        """The document of a body that was unsealed: see `load`."""
        found = body.get("format", 1)
        if type(found) is int:
            refuse_newer(path, cls.WHAT, found, cls.FORMAT)
        try:
            kind: Any = cls
            made: D = _reader(kind)(body)
            return made
        except (TypeError, ValueError) as e:
            raise CorruptStore(f"{path}: not a {cls.WHAT} ({e}): {_RESTART}") from e

    @classmethod
    def load_from(cls: type[D], path: str, files: Files) -> D:
        """The document at a path: see `load`. Raises FileNotFoundError."""
        return cls.load(files.read(path), path)


def refuse_newer(path: str, what: str, found: int, known: int, other: str = "another sink") -> None:
    """Raises NewerFormat if a format is newer than the latest known one."""
    if found > known:
        from gristmill import __version__

        raise NewerFormat(
            f"{path}: this {what} has format {found}, and gristmill {__version__} knows formats up to {known}: use the "
            f"version that wrote it, or a later one, or use {other}"
        )


# ---------------------------------------------------------------- JSON with a checksum


def seal(body: Mapping[str, Any]) -> bytes:
    """JSON with its own checksum, readable by people."""
    whole = {**body, "checksum": hashlib.sha256(_canonical(body).encode()).hexdigest()}
    return (json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False, default=_plain) + "\n").encode()


def unseal(data: bytes, path: str) -> dict[str, Any]:
    """What was sealed. Raises CorruptStore if it is not."""
    return unsealed(data, path)[0]


def unsealed(data: bytes, path: str) -> tuple[dict[str, Any], str]:
    """What was sealed, and its checksum, which was computed again. Raises CorruptStore if it is another."""
    if (quick := _as_written(data)) is not None:
        return quick
    body = _parsed(data, path)
    checksum = body.pop("checksum", None)
    if checksum is None:
        raise CorruptStore(f"{path}: damaged, or not written by gristmill (no checksum): {_RESTART}")
    if hashlib.sha256(_canonical(body).encode()).hexdigest() != checksum:
        raise CorruptStore(f"{path}: damaged (its checksum does not match): {_RESTART}")
    return body, str(checksum)


def _as_written(data: bytes) -> tuple[dict[str, Any], str] | None:
    """What `unsealed` returns, for a document that is as `seal` wrote it: its canonical form is then its text without
    line ends and indents, which no string holds, and the checksum proves that it is. None for any other.
    """
    if (found := _CHECKSUM.search(data)) is None:
        return None
    lines = (data[: found.start()] + data[found.end() :]).split(b"\n")
    text, checksum = b"".join(map(bytes.lstrip, lines)).replace(b'": ', b'":'), found[1].decode()
    if hashlib.sha256(text).hexdigest() != checksum:
        return None
    body = json.loads(text.decode())
    return (body, checksum) if isinstance(body, dict) else None


def _canonical(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_plain)


def _parsed(data: bytes, path: str) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except ValueError as e:
        raise CorruptStore(f"{path}: damaged, or not written by gristmill ({e}): {_RESTART}") from e
    if not isinstance(body, dict):
        raise CorruptStore(f"{path}: damaged, or not written by gristmill (a {type(body).__name__}): {_RESTART}")
    return body


def _plain(value: Any) -> Any:
    """Values that JSON cannot hold, in a form that it can: records and mappings as objects."""
    if dataclasses.is_dataclass(value):
        return vars(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be stored in a document")


# ---------------------------------------------------------------- values of the types that fields declare


@functools.cache
def _stored(kind: Any) -> Mapping[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(kind) if f.metadata.get("stored", True)}


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """A function that makes a value of this type from parsed JSON. It raises TypeError or ValueError."""
    origin, args = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _record(kind)
    if origin in (Union, types.UnionType):
        (some,) = (_reader(a) for a in args if a is not type(None))
        return lambda value: None if value is None else some(value)
    if origin is tuple and args[-1] is Ellipsis:
        each = _reader(args[0])
        return lambda value: tuple([each(v) for v in _of(value, list)])
    if origin is tuple:
        parts = [_reader(a) for a in args]
        return lambda value: tuple([read(v) for read, v in zip(parts, _of(value, list), strict=True)])
    if origin is Literal:
        return lambda value: args[args.index(value)]
    if origin is not None:  # Mapping[str, …]
        item = _reader(args[1])
        return lambda value: {name: item(v) for name, v in _of(value, dict).items()}
    if kind is float:
        return lambda value: _of(value, float, int)
    return (lambda value: value) if kind is Any else lambda value: _of(value, kind)


def _record(kind: Any) -> Callable[[Any], Any]:
    hints, some = get_type_hints(kind), _stored(kind)
    readers = [(name, _reader(hints[name])) for name in some]
    missing = dataclasses.MISSING
    needed = {n for n, f in some.items() if f.default is missing and f.default_factory is missing}

    def read(value: Any) -> Any:
        if lacks := needed - _of(value, dict).keys():
            raise ValueError(f"without {', '.join(sorted(lacks))}")
        return kind(**{name: one(value[name]) for name, one in readers if name in value})

    return read


def _of(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise TypeError(f"{value!r:.40} is no {kinds[0].__name__}")
    return value

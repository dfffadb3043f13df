"""`${name}` and `${env:NAME}` in a job file. A variable is text or a number; a value of the environment is a Secret.

`$${` stands for a plain `${`. A text that is just one reference takes the variable's own type, so that `limit: ${n}` is
a number when `n` is. Within a text a variable is inserted as it was written, to the character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gristmill.errors import BadJob, nearest
from gristmill.job.secret import Secret
from gristmill.jobfile.document import Document, Path, Written

_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")

# Where secrets are allowed: places whose value goes to a library or to the user's function, not into an answer. A path
# matches from its start; * is any one step.
SECRET_PLACES: tuple[Path, ...] = (
    ("vars",),
    ("source", "uri"),
    ("source", "options"),
    ("source", "storage"),
    ("sink", "uri"),
    ("sink", "options"),
    ("sink", "storage"),
    ("model", "args"),
    ("model", "api_key"),
    ("model", "base_url"),
    ("steps", "*", "args"),
    ("post", "*", "args"),
    ("engine",),
    ("deliver", "*", "to"),
    ("deliver", "*", "options"),
    ("alerts", "*", "webhook"),
    ("alerts", "*", "headers"),
    ("alerts", "*", "smtp"),
    ("alerts", "*", "command"),
    ("metrics", "*"),
    ("lineage", "*", "to"),
    ("lineage", "*", "headers"),
)


def escape(text: str) -> str:
    """Text as it must be written in a job file to stand for itself."""
    return text.replace("${", "$${")


class Scope:
    """The variables of a job file and the environment; `fill` inserts them."""

    def __init__(self, document: Document, given: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self.document = document
        self.given, self.environ = given, environ
        self.values: dict[str, Any] = {}
        declared = document.value.get("vars") or {}
        if not isinstance(declared, dict):
            raise BadJob(
                f"{document.place(('vars',))}: vars is {declared!r}: write a mapping, for example {{ds: today}}"
            )
        for name, value in declared.items():
            path = ("vars", name)
            if not _NAME.fullmatch(name) or name == "env":
                raise BadJob(
                    f"{document.place(path)}: {name!r} is not a valid variable name: use letters, digits, _ . -"
                )
            if isinstance(value, (dict, list)):
                raise BadJob(
                    f"{document.place(path)}: vars.{name} is a {type(value).__name__}: a variable is one value"
                )
            self.values[name] = _typed(given[name], value, name) if name in given else self.fill(value, path)
        self.values |= {name: value for name, value in given.items() if name not in self.values}

    def fill(self, value: Any, path: Path = ()) -> Any:
        """`value` with all references replaced. Raises BadJob for an unknown name, with its place."""
        if isinstance(value, dict):
            return {key: self.fill(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self.fill(item, (*path, i)) for i, item in enumerate(value)]
        if isinstance(value, str) and "${" in value:
            return self._text(value, path)
        return value

    def _text(self, text: str, path: Path) -> Any:
        whole = _REFERENCE.fullmatch(text)
        if whole and whole[1] is not None:
            value = self._value(whole[1], path)
            return self._alone(whole[1], value, path) if isinstance(value, Written) else value
        parts: list[Any] = []
        at = 0
        for match in _REFERENCE.finditer(text):
            parts += [text[at : match.start()], "${" if match[0] == "$${" else self._value(match[1], path)]
            at = match.end()
        parts.append(text[at:])
        if not any(isinstance(part, Secret) for part in parts):
            return "".join(_plain(part) for part in parts)
        return Secret("".join(map(_shown, parts)), "".join(map(_hidden, parts)))

    def _value(self, name: str | None, path: Path) -> Any:
        place = self.document.place(path)
        if name is None:
            raise BadJob(f"{place}: {dotted(path)} has an unclosed ${{: write $${{ for the characters themselves")
        if name.startswith("env:"):
            return self._secret(name.removeprefix("env:"), path)
        if not _NAME.fullmatch(name):
            raise BadJob(f"{place}: ${{{name}}} is not a variable's name: write ${{name}} or ${{env:NAME}}")
        if name not in self.values:
            near = nearest(name, self.values)
            hint = f"did you mean ${{{near}}}?" if near else f"give it under vars, or with --var {name}=…"
            raise BadJob(f"{place}: {dotted(path)} uses ${{{name}}}, which is not defined: {hint}")
        value = self.values[name]
        if value is None:
            raise BadJob(f"{place}: {dotted(path)} uses ${{{name}}}, which has no value: give it with --var {name}=…")
        if isinstance(value, Secret):
            self._may_hold_secret(path, name)
        return value

    def _alone(self, name: str, written: Written, path: Path) -> int | float | bool:
        """A variable's number, if its text says no more than the number: a postcode such as 01234 says more."""
        value = written.value
        whole = isinstance(value, float) and value.is_integer() and written.text == repr(int(value))
        if isinstance(value, bool) or whole or written.text == repr(value):
            return value
        given = name in self.given
        where = f"--var {name}={written.text}" if given else f"{self.document.place(('vars', name))}: vars.{name}"
        raise BadJob(
            f"{where}: {dotted(path)} would get the number {value!r}, not {written.text}: write {value!r} if that is "
            f'meant, else make {name} a text, in quotes, in the job file: vars: {{{name}: "{written.text}"}}'
        )

    def _secret(self, name: str, path: Path) -> Secret:
        self._may_hold_secret(path, f"env:{name}")
        if name not in self.environ:
            raise BadJob(
                f"{self.document.place(path)}: {dotted(path)} needs the environment variable {name}, which is not set: "
                f"export {name}=… and run again"
            )
        return Secret(f"${{env:{name}}}", self.environ[name])

    def _may_hold_secret(self, path: Path, name: str) -> None:
        for allowed in SECRET_PLACES:
            if len(path) >= len(allowed) and all(a in ("*", p) for a, p in zip(allowed, path, strict=False)):
                return
        raise BadJob(
            f"{self.document.place(path)}: {dotted(path)} uses ${{{name}}}, a value of the environment: "
            "these are secrets, allowed only in uri, to, storage, options, args, api_key, base_url and engine; give "
            "other values with --var"
        )


def check_given(document: Document, declared: Iterable[str], given: Mapping[str, str]) -> None:
    """Raises BadJob for a variable, in words as it was given, that is neither declared nor used in the document: its
    name is probably mistyped.
    """
    known = {*declared, *references(document)}
    for name, said in given.items():
        if name not in known:
            near = nearest(name, sorted(known))
            has = f"its variables are {', '.join(sorted(known))}" if known else "it has no variables"
            hint = f"did you mean {near}?" if near else has
            raise BadJob(f"{said}: {document.name} has no ${{{name}}}; {hint}")


def variables_of(document: Document, path: Path = ()) -> list[str]:
    """The names of the variables that a document, or a profile at `path` in it, declares."""
    part: Any = document.value
    for key in path:
        part = part[key]
    declared = part.get("vars")
    return list(declared) if isinstance(declared, dict) else []


def references(document: Document) -> set[str]:
    """The names of all variables that a document uses, its profiles left out."""
    return {name for key, part in document.value.items() if key != "profiles" for name in _references(part)}


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        names = (match[1] for match in _REFERENCE.finditer(value))
        yield from (name for name in names if name and not name.startswith("env:"))
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _references(part)


def dotted(path: Path) -> str:
    """A path as people write it: `steps.0.args`."""
    return ".".join(str(part) for part in path)


def _typed(text: str, declared: Any, name: str) -> Any:
    """A value given with --var, as the kind of value that the file gives the variable."""
    if not isinstance(declared, Written):
        return text
    try:
        if isinstance(declared.value, bool):
            return Written(text, {"true": True, "false": False}[text.lower()])
        whole = isinstance(declared.value, int) and "." not in text and "e" not in text.lower()
        return Written(text, int(text) if whole else float(text))
    except (KeyError, ValueError):
        kind = "true or false" if isinstance(declared.value, bool) else "a number"
        raise BadJob(f"--var {name}={text}: the job file gives {name} as {declared.text}: give {kind}") from None


def _shown(part: Any) -> str:
    return str(part) if isinstance(part, Secret) else escape(_plain(part))


def _hidden(part: Any) -> str:
    return part.reveal() if isinstance(part, Secret) else _plain(part)


def _plain(part: Any) -> str:
    return part.text if isinstance(part, Written) else str(part)

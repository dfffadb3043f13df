"""The user's modules and the files that arguments name, as planned: no worker of a run computes with others."""

from __future__ import annotations

import hashlib
import importlib
import operator
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gristmill.errors import BadJob, PlanChanged
from gristmill.fingerprint.assignments import is_shuffled, is_steady
from gristmill.fingerprint.digests import FILE, NOT_COMPARED, PACKAGE, file_path
from gristmill.fingerprint.modelfiles import BY_TIMES, Looked, Opened, Stamp, place_of, stamp_of, whole_stamp
from gristmill.fingerprint.modules import content, local_file, named, on_disk, package_digest, read
from gristmill.fingerprint.values import Held
from gristmill.job.secret import Secret
from gristmill.values import dataclass

AGAIN = "put it back and run again, or --restart (restart=True) with what is there now"


@dataclass(frozen=True, eq=False)
class Pin:
    """A module: digests of those statements of it that the plan rests on ("": of its file, if that is not source;
    PACKAGE: of all files of an installed package), and the path, size and time of the file that had them, None if it
    no longer had them.
    """

    module: str
    parts: Mapping[str, str]
    stamp: tuple[str, int, int] | None = None


def pins(code: Mapping[str, str]) -> tuple[Pin, ...]:
    """Pins of the modules that the digests of a job's code name. A running script has none: workers are sent what they
    need of it and do not import it.
    """
    parts = parts_of(code)
    parts |= {name.removeprefix(PACKAGE): {PACKAGE: told} for name, told in code.items() if name.startswith(PACKAGE)}
    return tuple(_pinned(module, digests) for module, digests in parts.items())


def parts_of(code: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The digests of statements by module ("": of the file of a module without source)."""
    parts: dict[str, dict[str, str]] = {}
    for name, digest in code.items():
        module, _, part = name.removeprefix("module ").partition(": ")
        if name.startswith("module ") and module != named("__main__"):
            parts.setdefault(module, {})[part] = digest
    return parts


@dataclass(frozen=True, eq=False)
class Named:
    """A file or folder that an argument names: the name, what to call it, its digest, and its stamp while it had that
    digest, None if it no longer had it (see `files.stamp_of`). What is in `apart` does not count as part of a folder.
    """

    name: str
    what: str
    digest: str
    stamp: Stamp | None
    apart: Collection[str]

    def standing(self, place: str) -> Named | None:
        """The same with the stamp that it has now; None if it was changed."""
        stamp = stamp_of(place, self.digest, self.stamp, self.apart)
        return None if stamp is None else replace(self, stamp=stamp)


@dataclass(frozen=True, eq=False)
class Approved:
    """The files of a version that a registry names, which an argument is given: all of them count, whatever they are
    called.
    """

    name: str
    what: str
    digest: str
    stamp: Stamp | None

    def standing(self, place: str) -> Approved | None:
        """The same with the stamp that they have now; None if they were changed."""
        stamp = whole_stamp(place, self.digest, self.stamp)
        return None if stamp is None else replace(self, stamp=stamp)


def named_pins(code: Mapping[str, str], secrets: Sequence[Secret], looked: Mapping[str, Looked]) -> tuple[Named, ...]:
    """The files that the digests of a job's code name, as they were when `looked` at: what was added since does not
    count. Files compared by times are left out, as times are specific to a machine.
    """
    hidden = {str(secret): secret for secret in secrets}
    found: dict[str, Named] = {}
    for entry, digest in code.items():
        name = file_path(entry, code)
        # The fingerprint writes a name that is not UTF-8 with other characters.
        if name is None or name in found or digest.startswith((NOT_COMPARED, BY_TIMES)) or "\\udc" in name:
            continue
        real, at = hidden.get(name, name), looked[name]
        then = Stamp(at.root, dict.fromkeys(at.files, ""))
        stamp = stamp_of(place_of(real), digest, then, at.apart)
        found[name] = Named(real, entry[entry.index(FILE) :], digest, stamp, at.apart)
    return tuple(found.values())


def _pinned(module: str, parts: Mapping[str, str]) -> Pin:
    file = None if PACKAGE in parts else local_file(module)
    if file is None or not on_disk(file).is_file():
        return Pin(module, parts)
    stamp = _stamp(file)  # before its content is read: a later write gives another stamp
    return Pin(module, parts, stamp if holds(file, module, parts) else None)


class Planned:
    """Compares what a worker computes with to the plan: each `look` at what was loaded since the one before."""

    def __init__(self, planned: Sequence[Pin], named: Sequence[Named | Approved], way: str = AGAIN) -> None:
        self._way = way
        self._loaded = dict.fromkeys(planned, -1)  # how many modules of each were loaded when it was as planned
        # By absolute path, as the code may change folder. When code reads a file is unknown: it must not change at all.
        self._named = [(place_of(one.name), one) for one in named]
        self._opened: list[Opened] = []

    def watch(self, opened: Sequence[Opened]) -> None:
        """The files of the model, which must not change either from when they were compared."""
        self._opened += opened

    def look(self) -> None:
        """Raises PlanChanged if a file, or a module loaded since the last look (at first any), is not as planned."""
        for number, (place, one) in enumerate(self._named):
            now = one.standing(place)
            if now is None:
                raise changed_meanwhile(one.what, self._way + "; if the code writes it itself, move it away first")
            self._named[number] = place, now
        for model in self._opened:
            if (what := model.changed()) is not None:
                raise changed_meanwhile(what, self._way)
        loaded = {pin: _loaded(pin) for pin in self._loaded}  # first: what is loaded meanwhile is for the next look
        check([pin for pin, count in loaded.items() if count > self._loaded[pin]], self._way)
        self._loaded = loaded


def _loaded(pin: Pin) -> int:
    """How many of a pin's modules are loaded here; one that is being imported may not have read its file yet."""
    if PACKAGE not in pin.parts:
        spec = getattr(sys.modules.get(pin.module), "__spec__", None)
        return int(pin.module in sys.modules and not getattr(spec, "_initializing", False))
    return sum(name.startswith(f"{pin.module}.") for name in list(sys.modules))


def check(planned: Sequence[Pin], way: str = AGAIN) -> None:
    """Raises PlanChanged, with the way out, if a module has changed since planning in what the plan rests on. A module
    that is not found under its name is not checked: whatever imports it reports that.
    """
    if planned:
        importlib.invalidate_caches()
    for pin in planned:
        what = _changed(pin)
        if what is not None:
            raise changed_meanwhile(what, way)


def changed_meanwhile(what: str, way: str = AGAIN) -> PlanChanged:
    """The error for something that is no longer as it was planned, or loaded."""
    return PlanChanged(
        f"{what} was changed after the run was planned, and answers of two versions must not be mixed in one result: "
        f"{way}"
    )


def _changed(pin: Pin) -> str | None:
    """The name of what is not as planned; None if the module is."""
    if PACKAGE in pin.parts:
        found = package_digest(pin.module)
        return None if found in (None, pin.parts[PACKAGE]) else f"the installed package {pin.module}"
    file = local_file(pin.module)
    if file is None or not on_disk(file).is_file() or _stamp(file) == pin.stamp or holds(file, pin.module, pin.parts):
        return None
    return f"{file}: module {pin.module}"


def unlike(held: tuple[Held, ...], planned: tuple[Pin, ...]) -> list[str]:
    """Warnings about values of the user's modules that differ in this worker from those where the run was planned,
    which would label the answers. Raises BadJob for a plain value that the module's source gives, and that no code
    changes as it runs: a script has set it.
    """
    from gristmill.fingerprint.code import exact_digest

    said = []
    for one in held:
        try:
            value = operator.attrgetter(one.name)(sys.modules[one.module])
        except (KeyError, AttributeError):  # not imported here: it will be if it is needed
            continue
        now = Held.of(one.module, one.name, exact_digest(value, ordered=one.ordered, imported=True), value, one.ordered)
        if now.digest == one.digest:
            continue
        what = f"{one.module}.{one.name} is {one.shown} where the run was started, and {now.shown} in its workers"
        home = (one.module, one.name)
        if one.plain and is_steady(*home) and not is_shuffled(*home) and not _stored(one.name, planned):
            raise BadJob(
                f"{what}: they import {one.module} afresh, and do not see what a script sets in it: pass it as an "
                "argument (gm.model(f, name=value); in a map functools.partial(f, name=value)), or set it in the file"
            )
        said.append(f"{what}, which compute with it: pass what shapes the answers as an argument")
    return said


def _stored(name: str, planned: tuple[Pin, ...]) -> bool:
    """Whether code of the job's modules may set this name as it runs, from wherever."""
    last = name.rpartition(".")[2]
    files = ((pin.module, file) for pin in planned if (file := local_file(pin.module)) and file.suffix == ".py")
    return any(read(file, module).sets(last) for module, file in files)


def _stamp(file: Path) -> tuple[str, int, int]:
    stat = on_disk(file).stat()
    return str(file), stat.st_size, stat.st_mtime_ns


def holds(file: Path, module: str, parts: Mapping[str, str]) -> bool:
    """Whether the statements in a module's file have these digests, and the file runs no others."""
    if file.suffix != ".py":
        return parts == {"": hashlib.sha256(content(file)).hexdigest()}
    source = read(file, module)
    if "statements" in source.parts and "statements" not in parts:  # they run, whichever names are used
        return False
    return all(part in source.parts and source.digest(part) == digest for part, digest in parts.items())

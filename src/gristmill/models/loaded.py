"""The user's modules that code loads as it runs (a pickle that it opens, a plugin that it looks for): those that no
statement names which the plan rests on. Which they are, a run notes; the next one compares them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Mapping, Sequence

from gristmill.models.modules import content, is_installed, is_ours, local_file, named, read
from gristmill.models.pins import Pin


class Loaded:
    """What comes into `sys.modules` from now on, beyond modules that are `planned` and what importing these loads."""

    def __init__(self, planned: Sequence[Pin]) -> None:
        self._planned = {pin.module for pin in planned}
        self._seen = set(sys.modules)
        self._reached: set[str] | None = None

    def look(self) -> dict[str, str]:
        """Digests of what has come since the look before, by module."""
        came = set(sys.modules) - self._seen
        self._seen |= came
        found = {name: digest for name in sorted(came) if _is_users(name) and (digest := digest_of(name))}
        if found and self._reached is None:
            self._reached = _reached(self._planned)
        return {name: digest for name, digest in found.items() if name not in (self._reached or ())}


def changed(noted: Mapping[str, Collection[str]]) -> list[str]:
    """Those of the modules, with the digests that were noted of each, of which a file is here that is another."""
    return [name for name, digests in noted.items() if (now := digest_of(name)) and set(digests) != {now}]


def digest_of(module: str) -> str:
    """Of its code, however it is written; "" where it is none of the user's, or not to be found by its name."""
    file = None if module == named("__main__") else local_file(module)
    try:
        if file is None:
            return ""
        if file.suffix != ".py":
            return hashlib.sha256(content(file)).hexdigest()
        source = read(file, module)
    except OSError:  # gone since it was loaded
        return ""
    parts = [f"{part} {source.digest(part)}" for part in sorted(source.parts) if part != "__doc__"]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _is_users(module: str) -> bool:
    """Whether it may be the user's, by where it was loaded from: most are not, and are told apart quickly."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and not is_ours(module) and not is_installed(file)


def _reached(planned: Collection[str]) -> set[str]:
    """The modules, what importing them runs, and the packages of all of these."""
    found: set[str] = set()
    waiting = list(planned)
    while waiting:
        module = waiting.pop()
        if not module or module in found:
            continue
        found.add(module)
        waiting.append(module.rpartition(".")[0])
        file = local_file(module)
        if file is not None and file.suffix == ".py" and file.is_file():
            source = read(file, module)
            waiting += source.runs
            waiting += [f"{other}.{name}" for targets in source.bound.values() for other, name in targets if name]
    return found

"""What code loads of the user's modules as it runs: classes in a pickle that it opens, plugins that it looks for. No
statement names them that the plan rests on. Which they are, a run notes; the next one compares them.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from gristmill.models.modules import add_module, is_installed, is_ours, local_file, named, on_disk, read
from gristmill.models.pins import Pin, changed_meanwhile, holds, parts_of

# What this process has loaded, told by the interpreter itself (sys.addaudithook): when each module's import began, in
# nanoseconds since 1970, and the names that pickles were made of.
_BEGUN: dict[str, int] = {}
_PICKLED: dict[tuple[str, str], None] = {}
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Loaded:
    """What is loaded from now on: modules beyond those that are `planned` and what importing these loads, and names
    of the user's modules in pickles.
    """

    def __init__(self, planned: Sequence[Pin]) -> None:
        _listen()
        self._planned = {pin.module for pin in planned}
        self._began = time.time_ns()
        self._modules, self._pickled = set(sys.modules), set(_PICKLED)
        self._reached: set[str] | None = None

    def look(self) -> dict[str, str]:
        """What has come and is not `noted`, by module or MODULE:NAME: the files and statements that it rests on, as
        `changed` reads them. Raises PlanChanged where a file has been written since it was loaded, so that nobody can
        tell what it was.
        """
        modules, pickled = set(sys.modules) - self._modules, set(_PICKLED) - self._pickled
        came = [module for module in modules if _is_users(module)]
        if came and self._reached is None:
            self._reached = _reached(self._planned)
        entries = {f"{module}:{name.partition('.')[0]}" for module, name in pickled if _is_users(module)}
        known = {module for module, _ in pickled}.union(self._reached or ())
        entries.update(module for module in came if module not in known)
        found = {entry: told for entry in sorted(entries) if (told := self._told(entry))}
        if not found:
            self._modules |= modules
            self._pickled |= pickled
        return found

    def noted(self, found: Mapping[str, str]) -> None:
        """That is known of these, and they need no other look."""
        self._modules.update(entry.partition(":")[0] for entry in found)
        self._pickled.update(pair for pair in set(_PICKLED) if f"{pair[0]}:{pair[1].partition('.')[0]}" in found)

    def _told(self, entry: str) -> str:
        module, _, name = entry.partition(":")
        if module == named("__main__"):
            return ""
        code: dict[str, str] = {}
        if name:
            add_module(module, name, code)
        elif (file := local_file(module)) is not None and file.suffix == ".py":
            source = read(file, module)
            code = {f"module {module}: {part}": source.digest(part) for part in source.parts if part != "__doc__"}
        else:
            add_module(module, "", code)
        told: dict[str, list[object]] = {}
        for each, parts in parts_of(code).items():
            if (file := local_file(each)) is None:
                continue
            if on_disk(file).stat().st_mtime_ns > _BEGUN.get(each, self._began):
                raise changed_meanwhile(f"{file}: module {each}")
            told[str(file)] = [each, parts]
        return json.dumps(told, sort_keys=True) if told else ""


def changed(noted: Mapping[str, Collection[str]]) -> list[str]:
    """Those of what was noted that are not here as they were, or were loaded in two ways. A file that is gone is told
    by whatever loads it.
    """
    return [entry for entry, tellings in noted.items() if len(set(tellings)) > 1 or not all(map(_holds, tellings))]


def _holds(told: str) -> bool:
    files = ((Path(path), *about) for path, about in json.loads(told).items())
    return all(holds(file, module, parts) for file, module, parts in files if on_disk(file).is_file())


def _listen() -> None:
    if "" not in _BEGUN:
        _BEGUN[""] = 0
        sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[object, ...]) -> None:
    if event == "pickle.find_class":
        _PICKLED[str(arguments[0]), str(arguments[1])] = None
    elif event == "import":
        _BEGUN.setdefault(str(arguments[0]), time.time_ns())


def _is_users(module: str) -> bool:
    """Whether it may be the user's, by where it was loaded from: most are not, and are told apart quickly."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(file, str) or is_ours(module) or file.startswith(_INSTALLED):
        return False
    return not is_installed(file)


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

"""What code loads as it runs: the user's modules (classes in a pickle that it opens, plugins that it looks for), and
files of weights that it opens itself. Nothing that the plan rests on names them. A run notes which they are; the next
run compares them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from zipfile import BadZipFile

from gristmill.fingerprint import modules
from gristmill.fingerprint.diskcache import file_digest
from gristmill.fingerprint.modelfiles import WEIGHTS
from gristmill.fingerprint.modules import Source, is_installed, local_file, read
from gristmill.fingerprint.pins import Named, Pin, changed_meanwhile, holds, parts_of

T = TypeVar("T")
Stats = tuple[int, int, int, int]
# What this process has loaded, as reported by the interpreter itself (sys.addaudithook): by file, the source of the
# user's modules as it first ran (for compiled ones the file's digest), because a file may soon be deleted or rewritten;
# and the names that pickles were built from.
_HELD: dict[str, bytes | str] = {}
_COMPILED: dict[str, bytes] = {}  # sources that have not run yet
_PICKLED: dict[tuple[str, str], None] = {}
# By path, the files of weights that the user's code has opened, as they were the last time, and those that it has
# written or moved there, each with the number of the event: of several openings, the first since `_BEGUN`.
_OPENED: dict[str, tuple[int, Stats]] = {}
_WRITTEN: dict[str, int] = {}
_EDITABLE: dict[str, tuple[int, Stats]] = {}  # those opened so that they may be written in place, as np.memmap does
_EVENTS = itertools.count(1)
_BEGUN = [0]  # the event at which the latest `Loaded` began to listen
_WEIGHTS = {*WEIGHTS, ".npy", ".pickle", ".sav", ".dill", ".p", ".pk", ".pklz"}
BUILT = "the weights that the code opens"  # instead of a file: all that a model was built from, see `_of_a_model`
_MOST = 100  # files that a run notes: beyond that they are files that rows name, one per row
OWN = "written by the code itself"  # instead of a file's digest
_listen = functools.cache(sys.addaudithook)
_PAUSE = 0.3  # seconds after which a file has its content back if another worker rewrites it unchanged
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def listen() -> None:
    """Note from now on what this process loads."""
    _listen(_heard)


def outdated(planned: Sequence[Pin]) -> list[str]:
    """Files of modules that this process loaded in another state than the planned one."""
    found = []
    for pin in planned:
        file = local_file(pin.module)
        held = _HELD.get(str(file))
        if file is None or pin.module not in sys.modules or held is None:
            continue
        source = modules.parse(held, file, pin.module) if isinstance(held, bytes) else None
        now = {"": held} if source is None else {p: source.digest(p) for p in pin.parts if p in source.parts}
        if now != dict(pin.parts):
            found.append(str(file))
    return found


class Loaded:
    """What is loaded from now on: modules except the `planned` ones and what importing these loads, names of the user's
    modules in pickles, and files of weights except those that arguments have `named`.
    """

    def __init__(self, planned: Sequence[Pin], named: Sequence[Named]) -> None:
        listen()
        given = [os.path.abspath(path) for one in named if one.stamp is not None for path in one.stamp.files]
        self._given, self._files, self._begun = set(given), set[str](), next(_EVENTS)
        _BEGUN[0] = self._begun
        self._built, self._of, self._model = 0, "", dict[str, str]()
        _HELD.clear()
        _EDITABLE.clear()
        for file in filter(None, map(_users_file, list(sys.modules))):
            _hold(file)
        self._planned = {pin.module for pin in planned}
        self._modules, self._pickled = set(sys.modules), set(_PICKLED)
        self._reached: set[str] | None = None

    def built(self, role: str) -> None:
        """What a worker in this role scores rows with has been built, and has seen no row yet."""
        self._built, self._of = next(_EVENTS), role

    def look(self) -> dict[str, str]:
        """What was loaded and is not yet `noted`, by module or MODULE:NAME: the files and statements that it rests on,
        as `changed` reads them. Raises PlanChanged if a file no longer contains what was loaded from it.
        """
        new, pickled = set(sys.modules) - self._modules, set(_PICKLED) - self._pickled
        came = [module for module in new if _users_file(module)]
        if came and self._reached is None:
            self._reached = _reached(self._planned)
        entries = {f"{module}:{name.partition('.')[0]}" for module, name in pickled if _users_file(module)}
        known = {module for module, _ in pickled}.union(self._reached or ())
        entries.update(module for module in came if module not in known)
        found = {entry: told for entry in sorted(entries) if (told := self._told(entry))}
        found |= self._opened()
        found |= self._of_a_model(found)
        if not found:
            self._modules |= new
            self._pickled |= pickled
        return found

    def _opened(self) -> dict[str, str]:
        """The files of weights that code has opened or written since, in the form of `look`."""
        told = self.written()
        known = {*self._given, *self._files, *told, *(path for path in list(_WRITTEN) if _own(path) in self._files)}
        for path, (event, then) in list(_OPENED.items()):
            if len(self._files) + len(told) >= _MOST:
                break
            if event > self._begun and path not in known:
                with contextlib.suppress(OSError):  # it is gone, and what it contained is unknown
                    digest = file_digest(Path(path))
                    if _stats(path) == then:  # else it was written during this run: probably by this code
                        told[path] = _of_file(path, digest)
        return told

    def _of_a_model(self, found: Mapping[str, str]) -> dict[str, str]:
        """One entry for all files of weights that were opened to build the model, before it saw a row, which may name
        other files: so it shows when the newest file of a folder replaces another that itself is unchanged.
        """
        events = {path: event for path, (event, _) in list(_OPENED.items())}
        files = {p: json.loads(told)[p][1][""] for p, told in found.items() if events.get(p, self._built) < self._built}
        made = {path: has for path, has in files.items() if has != OWN}
        if not made:
            return {}
        self._model |= made
        return {f"{BUILT} ({self._of})": json.dumps(self._model, sort_keys=True)}

    def written(self) -> dict[str, str]:
        """The files of weights that code has written itself and that are not `noted`, in the form of `look`."""
        edited = (
            path for path, (event, then) in list(_EDITABLE.items()) if event > self._begun and _edited(path, then)
        )
        wrote = (path for path, event in list(_WRITTEN.items()) if event > self._begun)
        new = (path for path in itertools.chain(wrote, edited) if _own(path) not in self._files)
        return {path: _of_file(path, OWN) for path in itertools.islice(new, max(0, _MOST - len(self._files)))}

    def noted(self, found: Mapping[str, str]) -> None:
        """These have been recorded, and need not be looked at again."""
        self._files.update(_own(entry) if told == _of_file(entry, OWN) else entry for entry, told in found.items())
        self._modules.update(entry.partition(":")[0] for entry in found)
        self._pickled.update(pair for pair in set(_PICKLED) if f"{pair[0]}:{pair[1].partition('.')[0]}" in found)

    def _told(self, entry: str) -> str:
        module, _, name = entry.partition(":")
        if module == modules.named("__main__"):
            return ""
        code: dict[str, str] = {}
        file = local_file(module)
        try:
            if name or file is None or file.suffix != ".py":
                modules.add_module(module, name, code, _as_loaded)
            else:
                source = _as_loaded(file, module)
                code = {f"module {module}: {part}": source.digest(part) for part in source.parts if part != "__doc__"}
        except OSError:  # the file is gone and its content is not held: no source, or loaded before anyone listened
            return ""
        told: dict[str, list[object]] = {}
        for each, parts in parts_of(code).items():
            if (file := local_file(each)) is None:
                continue
            held = _HELD.get(str(file), parts.get(""))
            if parts.get("", held) != held or not (_stands(file, each, parts) or _stands(file, each, parts, _PAUSE)):
                raise changed_meanwhile(f"{file}: module {each}")
            told[str(file)] = [each, parts]
        return json.dumps(told, sort_keys=True) if told else ""


def _own(path: str) -> str:
    return f"{path} {OWN}"


def _of_file(path: str, digest: str) -> str:
    return json.dumps({path: ["", {"": digest}]})


def changed(noted: Mapping[str, Collection[str]]) -> list[str]:
    """Those noted entries that are no longer here as they were, or that were loaded in two versions."""
    return [
        entry
        for entry, tellings in noted.items()
        if not entry.startswith(BUILT)
        and (not alike(tellings) or not (_of_file(entry, OWN) in tellings or all(map(_holds, tellings))))
    ]


def contradicted(entry: str, told: str, noted: Mapping[str, Collection[str]]) -> str:
    """What other processes, by their notes, have loaded in another version; "" for nothing. Some of the files that a
    model was built from may be missing: a process that has them does not reopen them, or code opens its own copy.
    """
    if not entry.startswith(BUILT):
        return "" if alike({told, *noted.get(entry, ())}) else entry
    now = _weights(told, noted)
    for then in (_weights(other, noted) for other in noted.get(entry, ())):
        come, gone = (sorted(one[d] for d in one.keys() - other.keys()) for one, other in ((now, then), (then, now)))
        if come and gone:
            return f"{', '.join(come)} in the place of {', '.join(gone)}"
    return ""


def _weights(told: str, noted: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Paths by content of the files, without those that code wrote itself in some run or worker."""
    files = json.loads(told)
    return {files[path]: path for path in files if _of_file(path, OWN) not in noted.get(path, ())}


def alike(tellings: Collection[str]) -> bool:
    """Whether the same was loaded, wherever from: a worker may unpack it into a folder of its own. What the code itself
    writes may differ each time.
    """
    parts = [json.loads(told).values() for told in tellings]
    own = any(["", {"": OWN}] in each for each in parts)
    return own or len({json.dumps(sorted(each)) for each in parts}) < 2


def _holds(told: str) -> bool:
    return all(_stands(Path(path), module, parts) for path, (module, parts) in json.loads(told).items())


def _stands(file: Path, module: str, parts: Mapping[str, str], pause: float = 0.0) -> bool:
    """Whether a file still contains what was loaded from it. One that is gone counts: whatever loads it reports it."""
    time.sleep(pause)
    try:
        return holds(file, module, parts) if module else parts == {"": file_digest(file)}
    except OSError:
        return True


def _as_loaded(file: Path, module: str) -> Source:
    held = _HELD.get(str(file))
    return modules.parse(held, file, module) if isinstance(held, bytes) else read(file, module)


def _heard(event: str, arguments: tuple[object, ...]) -> None:
    if event == "pickle.find_class":
        _PICKLED[str(arguments[0]), str(arguments[1])] = None
    elif event == "exec":
        code = arguments[0]
        if isinstance(code, types.CodeType) and code.co_name == "<module>" and code.co_filename.endswith(".py"):
            _hold(code.co_filename)
    elif event == "compile":
        source, file = arguments
        if isinstance(source, bytes) and isinstance(file, str) and file.endswith(".py") and not _is_installed(file):
            _COMPILED[file] = source
    elif event == "import" and isinstance(arguments[1], str):  # a compiled module's file
        _hold(arguments[1])
    elif event == "os.rename" or (event == "open" and isinstance(arguments[1], str)):
        file, mode = (arguments[1], "w") if event == "os.rename" else (arguments[0], str(arguments[1]))
        with contextlib.suppress(OSError, TypeError, ValueError):  # whoever opens it gets a better message
            _open(file, mode)


def _open(file: object, mode: str) -> None:
    """Note a file of weights that the user's code opens by name."""
    if not isinstance(file, (str, os.PathLike)):
        return
    path = os.path.abspath(os.fspath(file))
    if _WEIGHTS.isdisjoint(Path(path.lower()).suffixes) or not _asked_by_users():
        return
    event = next(_EVENTS)
    if mode.strip("rbtU+" if mode.startswith("r") else "rbtU"):
        _remember(_WRITTEN, path, event)
    else:
        first, _ = _OPENED.get(path, (0, None))
        _remember(_OPENED, path, (first if first > _BEGUN[0] else event, _stats(path)))
        if "+" in mode:
            _remember(_EDITABLE, path, _EDITABLE.get(path, _OPENED[path]))


def _remember(files: dict[str, T], path: str, told: T) -> None:
    if len(files) >= 10 * _MOST and path not in files:
        del files[next(iter(files))]  # the oldest
    files[path] = told


def _edited(path: str, then: Stats) -> bool:
    try:
        return _stats(path) != then
    except OSError:
        return True


def _stats(path: str) -> Stats:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _asked_by_users() -> bool:
    """Whether the user's code, and not Gristmill, has led here. A thread of a library's pool, which does not tell who
    gave it its work, does the user's: Gristmill's own threads have frames of its own.
    """
    frame: types.FrameType | None = sys._getframe(3)
    while frame is not None:
        if modules.is_ours(str(frame.f_globals.get("__name__"))):
            return False
        if not _is_installed(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return threading.current_thread() is not threading.main_thread()


def _hold(file: str) -> None:
    if file not in _HELD and not _is_installed(file):
        with contextlib.suppress(OSError, BadZipFile, KeyError):  # code that only claims to be from such a file
            held = _COMPILED.pop(file, None) or modules.content(Path(file))
            _HELD[file] = held if file.endswith(".py") else hashlib.sha256(held).hexdigest()


def _is_installed(file: str) -> bool:
    return file.startswith(_INSTALLED) or is_installed(file)  # the first test is quick and settles most of thousands


def _users_file(module: str) -> str:
    """The file of a module that may be the user's, by where it was loaded from, else "": a quick test for most."""
    found = sys.modules.get(module)  # does not load a lazy module
    kind = type(found)  # not what it says it is: a library of cffi among the modules says it is one, without a __dict__
    file = object.__getattribute__(found, "__dict__").get("__file__") if issubclass(kind, types.ModuleType) else None
    if not isinstance(file, str) or modules.is_ours(module) or _is_installed(file):
        return ""
    return file


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

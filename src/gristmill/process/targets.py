"""Callables by name: what "module:name" and "file.py:name" import."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from gristmill.errors import BadModel, GristmillError, did_you_mean
from gristmill.process.contained import enduring


def import_target(text: str) -> Any:
    """What "module:name" or "file.py:name" names; the current folder is importable, as with `python -m`, and so is the
    file's folder. Raises BadModel.
    """
    module_name, _, name = text.rpartition(":")
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    if module_name.endswith(".py"):
        module_name = _module_of(Path(module_name), text)
    try:
        with enduring():
            value = importlib.import_module(module_name)
    except GristmillError:  # in a worker: the module itself runs a job
        raise
    except ModuleNotFoundError as e:
        if e.name is None or not (module_name == e.name or module_name.startswith(e.name + ".")):
            raise BadModel(f"{text}: importing {module_name} failed: {e}") from e
        raise BadModel(
            f"{text}: there is no module {module_name!r}; looked in {here} and in the installed packages. "
            "Run from the folder that holds it, or check the name"
        ) from e
    except Exception as e:
        raise BadModel(f"{text}: importing {module_name} failed: {type(e).__name__}: {e}") from e
    for part in name.split("."):
        if not hasattr(value, part):
            hint = did_you_mean(part, dir(value))
            raise BadModel(f"{text}: module {module_name} ({_file_of(value)}) has no {part!r}{hint}")
        value = getattr(value, part)
    return value


def _module_of(file: Path, text: str) -> str:
    """The name under which a file is imported, here and by workers: as a module in its folder. Raises BadModel."""
    file = file.resolve()
    if not file.is_file():
        raise BadModel(f"{text}: there is no such file: the current folder is {Path.cwd()}")
    if not file.stem.isidentifier():
        raise BadModel(
            f"{text}: workers import it by its name, and {file.stem!r} is not a valid module name: rename the file"
        )
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    loaded = sys.modules.get(file.stem) or importlib.util.find_spec(file.stem)
    found = getattr(loaded, "__file__", None) or getattr(loaded, "origin", None)
    if found is None or Path(found).resolve() != file:
        raise BadModel(f"{text}: {file.stem!r} is also the name of {found or 'a module of Python'}: rename the file")
    return file.stem


def _file_of(value: Any) -> str:
    return getattr(value, "__file__", None) or type(value).__name__

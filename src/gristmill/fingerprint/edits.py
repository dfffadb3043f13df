"""Whether code in memory is still what its file contains: a file may be saved while its slow imports run."""

from __future__ import annotations

import functools
import types
from pathlib import Path

from gristmill.errors import BadJob
from gristmill.fingerprint.modules import content, on_disk
from gristmill.process.startup import began

_SLACK = 0.1  # seconds by which the clock of a disk, or of a process, may be off


def must_be_as_written(code: types.CodeType, file: Path) -> None:
    """Raises BadJob if the file was written after this process began, and no longer contains the code."""
    if Path(code.co_filename).name != file.name or file.suffix != ".py":
        return  # built from a text, or compiled
    stat = on_disk(file).stat()
    if max(stat.st_mtime, stat.st_ctime) < began() - _SLACK:
        return
    if _signature(code) not in _signatures(file, stat.st_mtime_ns, stat.st_size):
        raise BadJob(
            f"{file} was changed after this process imported it ({code.co_name} is different now): restart the process"
        )


@functools.lru_cache(maxsize=64)
def _signatures(file: Path, *stamp: int) -> frozenset[str]:
    """Signatures of all code in a file as it is now."""
    try:
        waiting = [compile(content(file), str(file), "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return frozenset()
    found = set()
    while waiting:
        code = waiting.pop()
        found.add(_signature(code))
        waiting += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(found)


def _signature(code: types.CodeType) -> str:
    consts = [_signature(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags)
    return repr((code.co_name, code.co_code.hex(), consts, names))


def _constant(value: object) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)

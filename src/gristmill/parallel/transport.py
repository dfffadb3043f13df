"""Values and exceptions on their way between caller and worker: small ones in the message, large ones in files."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import secrets
import sys
from typing import Any

from gristmill.errors import CallTimeout, RemoteError, WorkerLost
from gristmill.process.failure import failure_of
from gristmill.process.messages import Failure
from gristmill.process.pickling import by_value, pickler
from gristmill.values import dataclass

LARGE = 1 << 20  # bytes of a message above which its value travels through a file


@dataclass(frozen=True)
class Parcel:
    """A pickled value: the bytes, or the file that holds them; and their number."""

    data: bytes = b""
    path: str = ""
    size: int = 0


def pack(data: bytes, folder: str | None) -> Parcel:
    """Pickled bytes as a parcel; in a file of `folder` if they are many, in the message if there is no folder."""
    if folder is None or len(data) < LARGE:
        return Parcel(data, size=len(data))
    path = os.path.join(folder, secrets.token_hex(8))
    try:
        with open(path, "xb") as out:
            out.write(data)
    except OSError:  # no room there: slower, but it arrives
        with contextlib.suppress(OSError):
            os.unlink(path)
        return Parcel(data, size=len(data))
    return Parcel(path=path, size=len(data))


def unpack(parcel: Parcel) -> Any:
    """The value. A file is read once, and then deleted."""
    if not parcel.path:
        return pickle.loads(parcel.data)
    with open(parcel.path, "rb") as file:
        value = pickle.load(file)
    os.unlink(parcel.path)
    return value


def by_name(value: Any) -> bytes:
    """A pickle to be read in another, or a later, process: classes that travel by value become that script's own if it
    has one of that name.
    """

    class Pickler(pickler()):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            found = super().reducer_override(obj)
            if isinstance(found, tuple) and isinstance(obj, type) and obj.__module__ != "builtins":
                return _class, (obj.__module__, obj.__qualname__, by_value(obj))
            return found

    out = io.BytesIO()
    Pickler(out, protocol=5).dump(value)
    return out.getvalue()


def _class(module: str, name: str, data: bytes) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    own = isinstance(found, type) and (found.__module__, found.__qualname__) == (module, name)
    return found if own else pickle.loads(data)


plain = True  # False in workers for which modules were shipped by value: plain pickle would import them


def pickled(value: Any) -> bytes:
    """Pickled by a worker for the caller. What plain pickle refuses, such as classes that came from the caller's
    script, cloudpickle sends back as the caller's own.
    """
    try:
        return pickle.dumps(value, protocol=5) if plain else by_name(value)
    except Exception:  # whatever pickle fails on, cloudpickle reports better
        return by_name(value)


# ---------------------------------------------------------------- exceptions


@dataclass(frozen=True)
class Fault:
    """Why an input has no result: an exception as text, and pickled if it can be. `died`: its worker ended."""

    failure: Failure
    exception: bytes | None = None
    died: bool = False


class RemoteTraceback(Exception):
    """The worker's traceback, shown as the cause of an exception that is raised again."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def fault_of(error: BaseException) -> Fault:
    """An exception of user code as it is sent. One that would end the caller (SystemExit) is sent as text alone."""
    failure = failure_of(error)
    if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
        return Fault(failure)
    error = error.with_traceback(None)
    for whole in (error, (type(error), error.args, vars(error))):  # the second: if `__init__` does not take `args`
        try:
            data = pickled(whole)
            if type(_made(pickle.loads(data))) is type(error):
                return Fault(failure, data)
        except Exception:  # whatever its class does: if nothing else works, its text must do
            continue
    return Fault(failure)


def _made(found: Any) -> Any:
    """The exception of a Fault: pickled whole, or as class, arguments and attributes."""
    if not isinstance(found, tuple):
        return found
    kind, arguments, attributes = found
    error = kind.__new__(kind, *arguments)
    BaseException.__setattr__(error, "args", arguments)  # its class may be frozen
    error.__dict__.update(attributes)
    return error


def raised(fault: Fault) -> Exception:
    """The exception that a call raised, or RemoteError with its text."""
    if fault.exception is not None:
        with contextlib.suppress(Exception):  # a class that cannot be rebuilt from its pickle
            found = _made(pickle.loads(fault.exception))
            if isinstance(found, Exception):
                return found
    return RemoteError(f"{fault.failure.type}: {fault.failure.message}")


def revived(fault: Fault, number: int, value: Any) -> Exception:
    """The exception to raise for input `number`, which is its `input_index`: of its own type if possible, else
    RemoteError or WorkerLost.
    """
    failure = fault.failure
    if failure.kind == "timeout":
        error: Exception = CallTimeout(f"input {number} ({short(value)}): {failure.message}")
    elif fault.died:
        error = WorkerLost(f"input {number} ({short(value)}): {failure.message}")
    else:
        error = raised(fault)
    if failure.traceback:
        BaseException.__setattr__(error, "__cause__", RemoteTraceback(failure.traceback))  # its class may be frozen
    note = f"input {number}: {short(value)}"
    vars(error).update(input_index=number, __notes__=[*getattr(error, "__notes__", []), note])
    return error


def short(value: Any) -> str:
    """The beginning of its repr, even if that raises."""
    try:
        text = repr(value)
    except Exception as e:  # a repr of the user's
        text = f"<{type(value).__name__} whose repr raises {type(e).__name__}>"
    return text if len(text) <= 200 else text[:199] + "…"


@dataclass(frozen=True)
class Shown:
    """Stands for a value of which only the beginning of the repr was kept."""

    text: str

    def __repr__(self) -> str:
        return self.text

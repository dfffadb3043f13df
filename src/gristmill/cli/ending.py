"""How a command ends: an error as one message on stderr, its exit code, and a quiet end if nobody reads any more."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import click

from gristmill.errors import GristmillError, GristmillWarning
from gristmill.job.secret import Secret, scrub
from gristmill.job.synonyms import meant, said
from gristmill.process.failure import own_frames

USAGE = 2
FAILED = 1
INTERRUPTED = 130
LONGEST_LINE = 600  # characters: a message may quote a value, not a document
MOST_LINES = 60


def end(error: BaseException, debug: bool) -> int:
    """Report what went wrong; returns the exit code. Unless `debug`, a user's mistake shows no traceback, and a failure
    of the user's code one of that code only.
    """
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else FAILED
    if isinstance(error, (KeyboardInterrupt, click.Abort)) or _interrupted(error):
        say("interrupted: nothing is lost, run the same command again")
        return INTERRUPTED
    if debug:
        _write("".join(traceback.format_exception(error)))
    if isinstance(error, GristmillError):
        say(str(error) if debug else own_frames(str(error)))
        return error.exit_code
    if isinstance(error, click.UsageError):
        say(usage(error))
        return USAGE
    if isinstance(error, click.ClickException):
        say(error.format_message())
        return USAGE
    if isinstance(error, OSError) and error.errno is not None:
        return _system(error)
    if not debug:  # not foreseen: whoever investigates it needs all of it
        _write("".join(traceback.format_exception(error)))
    say(f"stopped by an unexpected error: {type(error).__name__}: {error}; running again resumes")
    return FAILED


def _interrupted(error: BaseException) -> bool:
    """Whether an interrupt was the cause of another error: Python turns one raised while a class is created into a
    RuntimeError.
    """
    return isinstance(error, RuntimeError) and isinstance(error.__cause__, KeyboardInterrupt)


def _system(error: OSError) -> int:
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    hint = "free some space and run again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "--debug shows where"
    say(f"{what}: {hint}")
    return FAILED


def usage(error: click.UsageError) -> str:
    """A usage error with what was most likely meant, and how to get help."""
    message = error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        message = _no_such_option(error.option_name, error.ctx.command.params) or message
    path = error.ctx.command_path if error.ctx is not None else "gristmill"
    return f"{message[:1].lower()}{message[1:]} ({path} --help)"


def _no_such_option(name: str, parameters: Iterable[click.Parameter]) -> str | None:
    """What is said of a flag that has another name elsewhere, or for which there is none; None of any other."""
    flags = [flag for parameter in parameters for flag in parameter.opts if flag.startswith("--")]
    near = meant(name, flags)
    hint = f"did you mean {near}?" if near else said(name)
    return None if hint is None else f"no such option {name!r}: {hint}"


def say(message: str) -> None:
    """A message on stderr, after the program's name, which users can search their logs for; long lines are cut."""
    lines = message.split("\n")
    shown = [line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + "…" for line in lines[:MOST_LINES]]
    if len(lines) > MOST_LINES:
        shown.append(f"… ({len(lines) - MOST_LINES} more lines)")
    _write("gristmill: " + "\n".join(shown) + "\n")


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Python's warnings of this package are shown as those of a run are, without the file and the line of its code."""
    as_before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, GristmillWarning):
            _write(f"warning: {message}\n")
        else:
            as_before(message, category, *place, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = as_before


_SECRETS: list[Secret] = []  # of the current job: a library's error message may contain them


def hide(secrets: Iterable[Secret]) -> None:
    """Keep the values of these secrets out of all messages from now on."""
    _SECRETS.extend(secrets)


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(scrub(text, _SECRETS))
        sys.stderr.flush()


def ended(code: int) -> int:
    """Flush stdout. If its reader has gone, point it at nothing, so that the interpreter's own flush is quiet."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, sys.stdout.fileno())
            os.close(nothing)
    return code

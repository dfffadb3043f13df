"""User code that is called in the driver, where what it does to the process is done to the run: what would end it is an
error like any other, and its folder and environment are put back.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

from gristmill.process.startup import UserCode


class WouldEnd(RuntimeError):
    """User code raised what is no Exception, such as SystemExit, and would end the command with its exit code."""


@contextlib.contextmanager
def enduring() -> Iterator[None]:
    """Whatever is raised inside is an Exception, except for what a signal raises. For imports, whose changes to the
    folder and the environment are meant to stay. Raises WouldEnd.
    """
    try:
        with UserCode():
            yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as e:  # SystemExit, GeneratorExit, panics of extension modules
        text = f"it raised {type(e).__name__}: {e}, which would end the command as if it were done"
        raise WouldEnd(text).with_traceback(e.__traceback__) from None


@contextlib.contextmanager
def _in_place() -> Iterator[None]:
    """The process's folder and environment, put back; not a folder that was gone before."""
    environment, folder = dict(os.environ), None
    with contextlib.suppress(FileNotFoundError):
        folder = os.getcwd()
    try:
        yield
    finally:
        if folder is not None:
            os.chdir(folder)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def called(function: Callable[..., Any], *arguments: Any, use: Callable[[Any], Any] = lambda answer: answer) -> Any:
    """What a user's function makes of these arguments; `use`, which may run code of the user's, too, makes a plain
    value of that. Raises whatever it raises as an Exception, and TypeError for a function whose body was not run,
    because it is async or yields.
    """
    with enduring(), _in_place():
        answer = function(*arguments)
        for unrun in (inspect.iscoroutine, inspect.isgenerator, inspect.isasyncgen, inspect.isawaitable):
            if unrun(answer):
                if hasattr(answer, "close"):
                    answer.close()
                how = "yields, and nothing takes" if unrun is inspect.isgenerator else "is async, and nothing awaits"
                raise TypeError(f"it {how} it: make it a plain function")
        return use(answer)

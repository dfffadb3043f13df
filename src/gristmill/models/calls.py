"""Callables of a job, loaded: functions, and classes built once per worker."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from gristmill.errors import BadModel, did_you_mean
from gristmill.job.secret import reveal
from gristmill.job.specs import Call
from gristmill.process.startup import UserCode
from gristmill.process.targets import import_target


class LoadedCall:
    """A user's callable, ready to be called with a batch. A class has been built; `close` closes what it built."""

    def __init__(self, name: str, function: Callable[[Any], Any], built: Any = None) -> None:
        self.name = name
        self.function = function
        self.built = built

    def __call__(self, batch: Any) -> Any:
        with UserCode():
            return self.function(batch)

    def close(self) -> None:
        """Calls the `close` method of a class that has one."""
        close = getattr(self.built, "close", None)
        if callable(close):
            with UserCode():
                close()


def load_call(call: Call, waits: bool = False) -> LoadedCall:
    """The callable of a `Call`, imported if it is named by text; a class is built with its arguments, here and once.

    Raises BadModel as `found` does. What a class raises while it is built is passed on unchanged.
    """
    target = found(call, waits)
    args = reveal(dict(call.args))
    if not inspect.isclass(target):
        return LoadedCall(call.name, functools.partial(target, **args) if args else target)
    with UserCode():
        built = target(**args)
    if not callable(built):
        raise BadModel(f"class {call.name} has no __call__ method: add one that takes a batch and returns its rows")
    return LoadedCall(call.name, built, built)


def found(call: Call, waits: bool = False) -> Any:
    """The target of a `Call`, imported if it is named by text. Raises BadModel if it cannot be found or called with its
    arguments, or is async and nothing `waits` for it.
    """
    target = import_target(call.target) if isinstance(call.target, str) else call.target
    checked = Call(target, call.args, call.batch_format)  # refuses instances, including those that a module holds
    check_arguments(checked)
    if not waits:
        _refuse_async(target, call.name)
    return target


def check_arguments(call: Call) -> None:
    """Raises BadModel for arguments that the callable does not take, before it is called with a batch."""
    try:
        signature = inspect.signature(call.target)
    except (ValueError, TypeError):  # builtins and C code do not tell their arguments
        return
    names = list(signature.parameters)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for given in call.args:
        if given not in names and not takes_any:
            hint = did_you_mean(given, names) or f": it has {', '.join(names) or 'none'}"
            raise BadModel(f"{call.name} has no argument {given!r}{hint}")
    first = () if inspect.isclass(call.target) else (None,)  # the batch
    try:
        signature.bind(*first, **call.args)
    except TypeError as e:
        what = f"{call.name} cannot be called with a batch and {sorted(call.args) or 'no arguments'}: {e}"
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        asked = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind in named]
        if missing := [name for name in asked[len(first) :] if name not in call.args]:
            what += f"; give it with --arg {missing[0]}=…, args: {{{missing[0]}: …}} or gm.model(…, {missing[0]}=…)"
        raise BadModel(what) from e


def is_async(target: Any) -> bool:
    """Whether calling it gives a coroutine: a coroutine function, or a class whose `__call__` is one."""
    return inspect.iscoroutinefunction(target.__call__ if inspect.isclass(target) else target)


def _refuse_async(target: Any, name: str) -> None:
    if is_async(target) or inspect.isasyncgenfunction(target.__call__ if inspect.isclass(target) else target):
        raise BadModel(
            f"{name} is an async function: give a plain one (it may call asyncio.run); the model of a job may be a "
            "coroutine function of one row, which is called for many rows at a time"
        )

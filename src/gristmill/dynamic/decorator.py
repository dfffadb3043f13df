"""What the decorators return: a batched function, and its form bound to an instance or a class.

The four decorators (`gristmill.dynamically`, `gristmill.inference.dynamically` and their twins under `gristmill.aio`)
differ in their options and in the class of what they return, not in how calls are batched. Each class is defined beside
its decorator, has its options, and is named as in the `batched` package.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

from gristmill.dynamic.batcher import Batcher
from gristmill.dynamic.cache import through
from gristmill.dynamic.execution import Work, is_asynchronous
from gristmill.dynamic.padding import Features
from gristmill.dynamic.settings import Batching, Settings, with_options
from gristmill.dynamic.stats import Stats

T = TypeVar("T")
U = TypeVar("U")
P = ParamSpec("P")
D_co = TypeVar("D_co", bound="Dynamic", covariant=True)
D = TypeVar("D", bound="Dynamic")


class _Shared:
    """What a batched function and all its bound forms share: the batchers, one per owner."""

    def __init__(self, function: Callable[..., Any], chosen: Settings) -> None:
        self.function = function
        self.settings = chosen
        self._unbound = self._make(method=False)
        self._bound: dict[int, tuple[weakref.ref[Any], Batcher]] = {}

    def batcher(self, owner: Any, *, bound: bool) -> Batcher:
        """The owner's batcher. It is gone when the owner is, and does not keep it alive."""
        if not bound:
            return self._unbound
        found = self._bound.get(id(owner))  # by identity: instances may be unhashable, or equal to each other
        if found is None:
            found = self._bound.setdefault(id(owner), (self._watch(owner), self._make(method=True)))
        return found[1]

    def _make(self, *, method: bool) -> Batcher:
        chosen = self.settings
        work = Work(self.function, chosen.layout, method=method, retry_alone=chosen.retry_alone)
        return Batcher(work, chosen.rules, chosen.options)

    def _watch(self, owner: Any) -> weakref.ref[Any]:
        key, batchers = id(owner), self._bound

        def gone(ref: weakref.ref[Any]) -> None:
            if key in batchers and batchers[key][0] is ref:
                del batchers[key]

        try:
            return weakref.ref(owner, gone)
        except TypeError:
            kind = type(owner).__name__
            raise TypeError(
                f"{kind} has __slots__ without '__weakref__', so its batched methods cannot tell when an instance is "
                "gone: add '__weakref__' to them"
            ) from None


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function needs two values: it is a method, called with its instance and a batch."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # unknown for some built-in functions
        return True
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in kinds and p.default is p.empty]
    return len(needed) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


class Dynamic:
    """A function whose concurrent calls are grouped. Base of the four forms, which define what a call looks like.

    A function of a module has one queue; a method has one for each instance (a class method for each class), which is
    collected with it.
    """

    _blocking = True
    _decorator: Callable[..., Any]  # the one that makes functions of this form

    def __init__(self, _func: Callable[..., Any], *args: Any, **options: Any) -> None:
        """As the decorator of this form would create it, with its options."""
        self._begin(_func, self._decorator(None, *args, **options).keywords["chosen"])

    @classmethod
    def of(cls: type[D], function: Callable[..., Any], chosen: Settings) -> D:
        """This form of a function, with settled options."""
        made = object.__new__(cls)
        made._begin(function, chosen)
        return made

    def _begin(self, function: Callable[..., Any], chosen: Settings) -> None:
        plain: Any = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
        if not callable(plain):
            raise TypeError(f"{plain!r} cannot be called: give a function that takes a batch")
        if self._blocking and is_asynchronous(plain):
            home = "gristmill.aio.inference" if isinstance(chosen.layout, Features) else "gristmill.aio"
            raise TypeError(f"{_name(plain)} is a coroutine function: decorate it with {home}.dynamically")
        functools.update_wrapper(self, plain)  # type: ignore[arg-type]
        self._kind: Any = None if plain is function else type(function)
        self._shared = _Shared(plain, chosen)
        self._batcher = self._shared.batcher(None, bound=False)
        self._owner: Any = None
        self._is_bound = False

    def __get__(self: D, instance: Any, owner: Any = None) -> D:
        target = (owner if owner is not None else type(instance)) if self._kind is classmethod else instance
        if target is None or self._is_bound or self._kind is staticmethod:
            return self
        bound = object.__new__(type(self))
        batcher = self._shared.batcher(target, bound=True)
        bound.__dict__.update(self.__dict__, _batcher=batcher, _owner=target, _is_bound=True)
        return bound

    def __repr__(self) -> str:
        return f"<batched {_name(self._shared.function)}{f' of {self._owner!r}' if self._is_bound else ''}>"

    def __reduce__(self) -> Any:
        function = self._shared.function
        name, module = _name(function), getattr(function, "__module__", None)
        if self._is_bound:
            return getattr, (self._owner, function.__name__)
        if module != "__main__" and _found(module, name) is self:
            return name
        # A script's functions travel by value if the pickler can do that (cloudpickle).
        wrapped = function if self._kind is None else self._kind(function)
        return type(self).of, (wrapped, self._shared.settings)

    @property
    def batch_func(self) -> Callable[..., Any]:
        """The function that takes the batches."""
        return self._shared.function

    def start(self) -> None:
        """Nothing: the thread, or the task of a loop, starts with the first call."""

    @property
    def stats(self) -> Stats:
        """A snapshot of what has been done so far: counts, averages, histograms."""
        cache = self._shared.settings.cache
        report = getattr(cache, "stats", None)
        return self._batcher.stats(report() if callable(report) else None)

    def clear_stats(self) -> None:
        """Start counting from zero again."""
        self._batcher.clear_stats()

    def close(self, *, cancel: bool = False, timeout: float | None = None) -> None:
        """Take no more calls: they raise BatcherClosed. Those that wait are served first; with `cancel`, or after
        `timeout` seconds, they raise BatcherClosed too. A batch that has left is not stopped.

        Waits for the thread; from inside the batch function, and for coroutine functions (see `aclose`), it does not.
        """
        self._batcher.close(cancel=cancel, timeout=timeout)

    shutdown = close

    async def aclose(self, *, cancel: bool = False, timeout: float | None = None) -> None:
        """`close` that waits for the calls being served on this loop, without blocking it."""
        await self._batcher.aclose(cancel=cancel, timeout=timeout)

    def _target(self, args: tuple[Any, ...]) -> tuple[Any, Any]:
        """The call's owner, and what is called with: `Class.method(instance, item)` names both."""
        if len(args) == 1:
            return self, args[0]
        if len(args) == 2 and not self._is_bound and self._kind is None and _takes_two(self._shared.function):
            return self.__get__(args[0]), args[1]
        raise TypeError(f"{_name(self._shared.function)} takes one item or a list of items, not {len(args)} arguments")

    def _refuse(self, others: Mapping[str, Any]) -> None:
        if others:
            raise TypeError(
                f"{_name(self._shared.function)} takes one item or a list of items, by position, and timeout= and "
                f"priority=, not {', '.join(others)}="
            )

    async def _through(self, items: list[Any], timeout: float | None, priority: float | None) -> Sequence[Any]:
        """The results of some items, from the cache if it has them; for a method, those of this owner."""
        chosen, name = self._shared.settings, self._batcher.name
        if chosen.cache is None:
            return await self._batcher.acall(self._owner, items, timeout, priority)
        return await through(
            chosen.cache,
            [(name, key) if self._is_bound else key for key in map(chosen.layout.key, items)],
            lambda places: self._batcher.acall(self._owner, [items[place] for place in places], timeout, priority),
        )


class Items(Dynamic, Generic[T, U]):
    """A call is one item, or a list of items."""

    @overload
    async def acall(
        self, items: list[T], /, *, timeout: float | None = ..., priority: float | None = ...
    ) -> list[U]: ...
    @overload
    async def acall(self, item: T, /, *, timeout: float | None = ..., priority: float | None = ...) -> U: ...
    @overload
    async def acall(
        self, owner: object, item: Any, /, *, timeout: float | None = ..., priority: float | None = ...
    ) -> Any: ...
    async def acall(
        self, *args: Any, timeout: float | None = None, priority: float | None = None, **others: Any
    ) -> Any:
        """One result for one item, a list of results in order for a list of items; on any event loop.

        `timeout` is in seconds, for the whole call. `priority` is in seconds too: the call is served as if it had
        arrived that much later. Raises the batch function's error, CallTimeout, QueueFull, BatcherClosed, WrongOutput.
        """
        self._refuse(others)
        if len(args) != 1:
            target, item = self._target(args)
            return await target.acall(item, timeout=timeout, priority=priority)
        item = args[0]
        if isinstance(item, list):
            return await self._through(list(item), timeout, priority) if item else []
        if self._shared.settings.cache is None:
            return (await self._batcher.acall(self._owner, [item], timeout, priority))[0]
        return (await self._through([item], timeout, priority))[0]


class Model(Dynamic):
    """A call is a dict of features, or keyword arguments."""

    async def acall(self, *args: Any, **features: Any) -> Any:
        """`await f.acall(features)` with a dict, or with keyword arguments; on any event loop.

        The first axis of each feature (an array, or a list of them) is the rows, often one. Returns what the function
        does (an array or tensor, or a list, tuple or dict of them) with the rows of this call alone. `timeout=`,
        `priority=` and errors are as in other calls; ValueError for features with different numbers of rows.
        """
        target, given, told = self._given(args, features)
        items = target._layout.items(given)
        return target._answer(given, items, await target._through(items, **told))

    @property
    def _layout(self) -> Features:
        layout = self._shared.settings.layout
        assert isinstance(layout, Features)
        return layout

    def _given(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        # A feature is never a bare number, so these names can also be features.
        told = {key: keywords.pop(key) for key in ("timeout", "priority") if _is_number(keywords.get(key, _MISSING))}
        if not keywords and args:
            target, features = self._target(args)
        elif args and (len(args) > 1 or isinstance(args[0], Mapping)):
            raise TypeError(f"features are given as a dict or by keyword, not both: {', '.join(keywords)}")
        else:
            target, features = (self.__get__(args[0]) if args else self), keywords
        return target, features, {"timeout": None, "priority": None, **told}

    def _answer(self, features: Any, items: Sequence[Any], rows: Sequence[Any]) -> Any:
        return self._layout.result(items, rows, ragged=self._layout.ragged(features))


class BatchProcessor(Items[T, U]):
    """What `gristmill.dynamically` returns for a function: callable from any thread, and awaitable through `acall`."""

    @overload
    def __call__(self, items: list[T], /, *, timeout: float | None = ..., priority: float | None = ...) -> list[U]: ...
    @overload
    def __call__(self, item: T, /, *, timeout: float | None = ..., priority: float | None = ...) -> U: ...
    @overload
    def __call__(
        self, owner: object, item: Any, /, *, timeout: float | None = ..., priority: float | None = ...
    ) -> Any: ...
    def __call__(self, *args: Any, timeout: float | None = None, priority: float | None = None, **others: Any) -> Any:
        """`acall` for threads: blocks until the results are ready."""
        self._refuse(others)
        if len(args) != 1:
            target, item = self._target(args)
            return target(item, timeout=timeout, priority=priority)
        item = args[0]
        if not isinstance(item, list):
            return self._batcher.call(self._owner, [item], timeout, priority)[0]
        return self._batcher.call(self._owner, list(item), timeout, priority) if item else []


class Decorator(Protocol):
    """`dynamically(…)` with options: takes the function."""

    @overload
    def __call__(self, function: Callable[[list[T]], Iterable[U]], /) -> BatchProcessor[T, U]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[T]], Iterable[U]], /) -> BatchProcessor[T, U]: ...


class OfModels(Protocol[P, D_co]):
    """`inference.dynamically`, which returns a form of a model: takes the function, or options."""

    @overload
    def __call__(self, func: Callable[..., Any], /, *args: P.args, **options: P.kwargs) -> D_co: ...
    @overload
    def __call__(
        self, func: None = None, /, *args: P.args, **options: P.kwargs
    ) -> Callable[[Callable[..., Any]], D_co]: ...


class Dynamically(Protocol[P]):
    """`dynamically`: takes the function, or options."""

    @overload
    def __call__(
        self, func: Callable[[list[T]], Iterable[U]], /, *args: P.args, **options: P.kwargs
    ) -> BatchProcessor[T, U]: ...
    @overload
    def __call__(
        self, func: Callable[[Any, list[T]], Iterable[U]], /, *args: P.args, **options: P.kwargs
    ) -> BatchProcessor[T, U]: ...
    @overload
    def __call__(self, func: None = None, /, *args: P.args, **options: P.kwargs) -> Decorator: ...


def _typed(kind: Callable[P, Batching]) -> Callable[[Any], Dynamically[P]]:
    return with_options(kind)


@_typed(Batching)
def dynamically(func: Any = None, /, *args: Any, **options: Any) -> Any:
    """Group concurrent calls of a function on a list: `@dynamically`, or `@dynamically(batch_size=64)`.

    The function takes a list of items and returns one result for each (as a list, an array, or a generator). It runs in
    one thread of its own, one batch at a time. `f(item)`, `f([items])` and `await f.acall(item)` may be called from any
    thread and event loop, also from inside the function. In a class, put it above @staticmethod or @classmethod.

    The function is given the callers' own items, as in any call. Each result belongs to its caller alone, so the
    function may reuse one array, list or dict for all batches. Objects that are not containers, arrays or dataclasses
    are handed over as they are.

    A batch leaves when it has `batch_size` items (or costs `max_batch_cost`), or when its oldest item has waited
    `timeout_ms`. Raises ValueError or TypeError for invalid options, and TypeError for a coroutine function.
    """
    return decorate(BatchProcessor, func, Batching(*args, **options).settings())


def decorate(form: type[Dynamic], func: Any, chosen: Settings) -> Any:
    """The batched function, or a decorator that returns it if only options were given."""
    make = functools.partial(form.of, chosen=chosen)
    return make if func is None else make(func)


BatchProcessor._decorator = staticmethod(dynamically)


_MISSING = object()


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _found(module: str | None, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module or ""])
    except (AttributeError, KeyError):
        return None

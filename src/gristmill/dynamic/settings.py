"""The options of the four decorators, and the settings that follow from them.

An option is declared only here; signatures, for type checkers and people, and the reference are generated from these.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, field
from enum import Enum
from typing import Annotated, Any, Literal, get_args

from gristmill.dynamic.admission import Rules
from gristmill.dynamic.batcher import Options
from gristmill.dynamic.cache import AsyncCache
from gristmill.dynamic.execution import Layout, Lists
from gristmill.dynamic.padding import MASK, Features, Padding, Side
from gristmill.job.annotations import Help, bare, options_of
from gristmill.job.keywords import unknown
from gristmill.values import dataclass

WhenFull = Literal["wait", "refuse"]


class PriorityStrategy(Enum):
    """Who goes first; options also take the names as texts."""

    NONE = "none"  # who came first
    LENGTH = "length"  # small calls; and of large ones, the shortest items
    PRIORITY = "priority"  # small calls


Strategy = PriorityStrategy | Literal["none", "length", "priority"]


@dataclass(frozen=True)
class Settings:
    """All settings of a decorator, for the parts that use them."""

    rules: Rules = field(default_factory=Rules)
    options: Options = field(default_factory=Options)
    layout: Layout = field(default_factory=Lists)
    retry_alone: bool = False
    cache: AsyncCache | None = None


@dataclass(frozen=True)
class Batching:
    """The options of `gristmill.dynamically`."""

    batch_size: Annotated[int, Help("Items in a batch at most; it leaves when it has as many")] = Rules.batch_size
    timeout_ms: Annotated[
        float,
        Help("Milliseconds that the oldest item waits for others; with 0, a batch leaves once the function is idle"),
    ] = Rules.timeout * 1000
    small_batch_threshold: Annotated[
        int | None,
        Help("Calls of more items go after smaller ones, but keep a quarter of the places; None: no call"),
    ] = Rules.small_batch_threshold
    _: KW_ONLY
    cost: Annotated[
        Callable[[Any], float] | None, Help("What an item costs (default: its length, if max_batch_cost is given)")
    ] = None
    max_batch_cost: Annotated[
        float | None,
        Help("What a batch may cost: the sum of its items, or of a model's rows the longest times their number"),
    ] = None
    priority: Annotated[
        Callable[[Any], float] | None,
        Help("The seconds by which an item may be overtaken: with 1, all that comes within a second goes first"),
    ] = None
    max_queue: Annotated[int | None, Help("Items that may wait; when_full says what becomes of more")] = None
    when_full: Annotated[
        WhenFull, Help("wait: further calls wait in front of the queue; refuse: they raise QueueFull")
    ] = "wait"
    timeout: Annotated[
        float | None, Help("Seconds that a call may take, unless it says so itself; then it raises CallTimeout")
    ] = None
    retry_alone: Annotated[
        bool, Help("After a batch fails, try its items one by one, so that only those at fault fail")
    ] = False

    @property
    def layout(self) -> Layout:
        """What the function is given."""
        return Lists()

    def settings(self) -> Settings:
        """The settings that follow. Raises ValueError and TypeError for invalid options."""
        return self._settled(self.max_batch_cost, PriorityStrategy.PRIORITY, None)

    def _settled(self, most: float | None, strategy: PriorityStrategy, cache: AsyncCache | None) -> Settings:
        if self.when_full not in get_args(WhenFull):
            raise ValueError(
                f"when_full is {self.when_full!r}: it must be {' or '.join(map(repr, get_args(WhenFull)))}"
            )
        if self.cost is not None and most is None:
            raise ValueError("cost= measures items, but nothing says what a batch may cost: give max_batch_cost=")
        for name, value in (("cost", self.cost), ("priority", self.priority)):
            if value is not None and not callable(value):
                raise TypeError(f"{name} is {value!r}: it must be a function of an item")
        layout, cost = self.layout, self.cost
        padded = isinstance(layout, Features)
        sort = padded or strategy is PriorityStrategy.LENGTH  # rows of nearly one length need little padding
        rules = Rules(
            batch_size=self.batch_size,
            timeout=self.timeout_ms / 1000,
            small_batch_threshold=None if strategy is PriorityStrategy.NONE else self.small_batch_threshold,
            max_cost=most,
            padded=padded,
            max_queue=self.max_queue,
            refuse=self.when_full == "refuse",
        )
        if cost is None and (most is not None or sort):
            cost = layout.length
        return Settings(rules, Options(cost, self.priority, self.timeout, sort), layout, self.retry_alone, cache)


@dataclass(frozen=True)
class Awaited(Batching):
    """The options of `gristmill.aio.dynamically`."""

    _: KW_ONLY
    max_batch_length: Annotated[float | None, Help("max_batch_cost, where that is not given")] = None
    priority_strategy: Annotated[
        Strategy,
        Help(
            "none: in order of arrival; priority: calls of at most small_batch_threshold items go before larger ones, "
            "which keep a quarter of the places; length: that, and the items of one call shortest first"
        ),
    ] = PriorityStrategy.NONE
    cache: Annotated[
        AsyncCache | None,
        Help(
            "Asked for each item before it is queued, and told the result; of a method, for the item and a name of the "
            "instance, which is no other's, nor of another process. Functions that share a cache share its answers"
        ),
    ] = None

    def settings(self) -> Settings:
        """The settings that follow. Raises ValueError and TypeError for invalid options."""
        most = self.max_batch_length if self.max_batch_cost is None else self.max_batch_cost
        return self._settled(most, PriorityStrategy(self.priority_strategy), self.cache)


@dataclass(frozen=True)
class Padded(Batching):
    """The options of `gristmill.inference.dynamically`."""

    _: KW_ONLY
    pad_tokens: Annotated[
        Mapping[str, Any] | None, Help("By feature, what shorter rows are padded with; 0 where none is named")
    ] = None
    pad_token: Annotated[Mapping[str, Any] | None, Help("Another name of pad_tokens")] = None
    padding_side: Annotated[Side, Help("Where that goes, on every axis that differs")] = Padding.side
    spread_kwargs: Annotated[bool, Help("Give the function the features as keyword arguments")] = Padding.spread
    sequence_feature: Annotated[
        str | None, Help("The feature that tells a row's length (default: the first that has one)")
    ] = Padding.sequence
    attention_mask: Annotated[
        bool | str,
        Help(
            "True: give the function an attention_mask (a text: under that name), int64, 1 for each row's own places "
            "and 0 for padding, unless the caller brings one"
        ),
    ] = False
    unpad_outputs: Annotated[
        bool | str | Sequence[str | int],
        Help(
            "True, or the names or places of some outputs: cut these, which have a value a token, back to each row's "
            "own length; callers who gave lists get lists of arrays"
        ),
    ] = False

    @property
    def layout(self) -> Layout:
        """Features, padded. Raises TypeError for tokens given twice, ValueError for a wrong side."""
        if self.pad_tokens is not None and self.pad_token is not None:
            raise TypeError("pad_tokens and pad_token are two names of one option: give one of them")
        tokens = self.pad_tokens if self.pad_tokens is not None else self.pad_token
        if tokens is not None and not isinstance(tokens, Mapping):
            raise TypeError(f"pad_tokens is {tokens!r}: it must be a dict from feature name to value")
        mask = MASK if self.attention_mask is True else self.attention_mask or None
        unpad: Any = self.unpad_outputs
        return Features(
            Padding(dict(tokens or {}), self.padding_side, self.sequence_feature, mask, unpad, self.spread_kwargs)
        )


@dataclass(frozen=True)
class AwaitedPadded(Padded, Awaited):
    """The options of `gristmill.aio.inference.dynamically`."""


def with_options(kind: Callable[..., Batching]) -> Callable[[Any], Any]:
    """A decorator: shows the options of a kind in a function's signature and docstring, and reports a wrong name."""
    cls: Any = kind
    options = options_of(cls)

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            for name, value in given.items():
                if name not in options:
                    raise TypeError(str(unknown(function.__name__, name, options)))
                if (wanted := options[name].misfit(value)) is not None:
                    raise TypeError(f"{function.__name__}: {name} is {value!r}: give {wanted}")
            return function(*args, **given)

        first = next(iter(inspect.signature(function).parameters.values()))
        rest = [p.replace(annotation=bare(p.annotation)) for p in inspect.signature(kind).parameters.values()]
        shown: Any = call
        shown.__signature__ = inspect.Signature([first, *rest])
        told = [f"- {name}: {option.help.text}" for name, option in options.items() if option.help is not None]
        shown.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", "", *told])
        return shown

    return decorate

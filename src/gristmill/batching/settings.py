"""The options of the four decorators, checked and put together for what uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from gristmill.batching.admission import Rules
from gristmill.batching.batcher import Options
from gristmill.batching.cached import AsyncCache
from gristmill.batching.padding import Features
from gristmill.batching.work import Layout, Lists

WhenFull = Literal["wait", "refuse"]


class PriorityStrategy(Enum):
    """Who goes first; the options take the names as texts, too."""

    NONE = "none"  # who came first
    LENGTH = "length"  # small calls; and of large ones, the shortest items
    PRIORITY = "priority"  # small calls


Strategy = PriorityStrategy | Literal["none", "length", "priority"]


@dataclass(frozen=True)
class Settings:
    """All that a decorator was told."""

    rules: Rules = field(default_factory=Rules)
    options: Options = field(default_factory=Options)
    layout: Layout = field(default_factory=Lists)
    retry_alone: bool = False
    cache: AsyncCache | None = None


def settle(
    *,
    layout: Layout,
    batch_size: int,
    timeout_ms: float,
    small_batch_threshold: int | None,
    cost: Callable[[Any], float] | None,
    max_batch_cost: float | None,
    priority: Callable[[Any], float] | None,
    max_queue: int | None,
    when_full: WhenFull,
    timeout: float | None,
    retry_alone: bool,
    priority_strategy: Strategy = PriorityStrategy.PRIORITY,
    cache: AsyncCache | None = None,
) -> Settings:
    """The options of any of the decorators. Raises ValueError and TypeError for what cannot be."""
    if when_full not in ("wait", "refuse"):
        raise ValueError(f"when_full is {when_full!r}: it is 'wait' or 'refuse'")
    if cost is not None and max_batch_cost is None:
        raise ValueError("cost= measures items, but nothing says what a batch may cost: give max_batch_cost=")
    for name, value in (("cost", cost), ("priority", priority)):
        if value is not None and not callable(value):
            raise TypeError(f"{name} is {value!r}: it is a function of an item")
    strategy = PriorityStrategy(priority_strategy)
    padded = isinstance(layout, Features)
    sort = padded or strategy is PriorityStrategy.LENGTH  # rows of nearly one length need little padding
    rules = Rules(
        batch_size=batch_size,
        timeout=timeout_ms / 1000,
        small_batch_threshold=None if strategy is PriorityStrategy.NONE else small_batch_threshold,
        max_cost=max_batch_cost,
        padded=padded,
        max_queue=max_queue,
        refuse=when_full == "refuse",
    )
    if cost is None and (max_batch_cost is not None or sort):
        cost = layout.length
    return Settings(rules, Options(cost, priority, timeout, sort), layout, retry_alone, cache)

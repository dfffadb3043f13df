"""What a caller of a batched function is given is its own: no other call, batch or cache shares its memory."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from callers import at_once
from gristmill import aio, inference
from gristmill.dynamic.decorator import dynamically

pytestmark = pytest.mark.timeout(60)
SIZE = 16


@dataclasses.dataclass(frozen=True)
class Answer:
    """A result of a class."""

    values: Any


class Pair(NamedTuple):
    """Another."""

    values: Any
    number: int


def filled(buffer: Any, items: list[float]) -> Any:
    """The buffer with the items in its first rows."""
    for place, item in enumerate(items):
        buffer[place] = item
    return buffer[: len(items)]


_array, _torch = np.zeros((SIZE, 2)), torch.zeros((SIZE, 2))
_objects = np.array([*([0.0] for _ in range(SIZE)), None], dtype=object)[:SIZE]
_rows: list[Any] = [[0.0] for _ in range(SIZE)]
_dicts: list[Any] = [{"v": [0.0]} for _ in range(SIZE)]
_one = np.zeros(2)


def _changed(held: list[Any], items: list[float], put: Callable[[Any, float], None]) -> list[Any]:
    for one, item in zip(held, items, strict=False):
        put(one, item)
    return held[: len(items)]


def _put(row: Any, item: float) -> None:
    row[0] = item


def _one_by_one(items: list[float]) -> Any:
    for item in items:
        _one[:] = item
        yield _one


def _everywhere(items: list[float]) -> Any:
    _one[:] = items[0]
    return [_one] * len(items)


WAYS: dict[str, Callable[[list[float]], Any]] = {
    "array": lambda items: filled(_array, items),
    "list of views": lambda items: list(filled(_array, items)),
    "tensor": lambda items: filled(_torch, items),
    "objects": lambda items: _changed(list(_objects), items, _put) and _objects[: len(items)],
    "lists": lambda items: _changed(_rows, items, _put),
    "dicts": lambda items: _changed(_dicts, items, lambda d, x: _put(d["v"], x)),
    "ordered": lambda items: [collections.OrderedDict(v=row) for row in filled(_array, items)],
    "tuples": lambda items: [(row, {"row": row}) for row in filled(_array, items)],
    "named": lambda items: [Pair(row, 1) for row in filled(_array, items)],
    "dataclasses": lambda items: [Answer(row) for row in filled(_array, items)],
    "memory": lambda items: [memoryview(row) for row in filled(_array, items)],
    "generator": _one_by_one,
}


def first(value: Any) -> float:
    """The number in a result."""
    while not isinstance(value, (int, float)):
        value = value.values if isinstance(value, (Answer, Pair)) else value
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
        value = value.item() if hasattr(value, "item") and not getattr(value, "shape", 1) else value
    return float(value)


@pytest.mark.parametrize("way", WAYS)
def test_results_of_memory_that_is_used_again(way: str) -> None:
    """One call of more items than a batch, and calls after it: each result stays what it was."""
    score = dynamically(batch_size=SIZE)(WAYS[way])
    found = score(list(map(float, range(4 * SIZE))))
    later = score([-1.0] * SIZE)
    assert list(map(first, found)) == list(range(4 * SIZE))
    assert list(map(first, later)) == [-1.0] * SIZE


@pytest.mark.parametrize("way", WAYS)
def test_results_of_coroutine_functions_too(way: str) -> None:
    """The same on an event loop, and for asynchronous generators."""

    @aio.dynamically(batch_size=SIZE)
    async def score(items: list[float]) -> Any:
        return WAYS[way](items)

    @aio.dynamically(batch_size=SIZE)
    async def stream(items: list[float]) -> Any:
        for row in WAYS[way](items):
            yield row

    async def ask() -> None:
        for function in (score, stream):
            found = await function(list(map(float, range(4 * SIZE))))
            await function([-1.0] * SIZE)
            assert list(map(first, found)) == list(range(4 * SIZE))

    asyncio.run(ask())


def test_results_of_a_model_for_many_callers() -> None:
    """A caller puts its rows together while the next batch runs: they are those of its own batch."""
    buffers = [np.zeros((64, 2)), np.zeros((64, 2))]

    @inference.dynamically(batch_size=64, timeout_ms=1)
    def model(features: dict[str, Any]) -> Any:
        count = len(features["x"])
        for buffer in buffers:
            buffer[:] = np.nan
            buffer[:count] = features["x"][:, :1]
        return {"a": buffers[0][:count], "b": [buffers[1][:count]]}

    def ask(begin: int) -> list[Any]:
        return [(i, model({"x": np.full((1, 3), float(i))})) for i in range(begin, begin + 60)]

    found = at_once([lambda begin=k * 100: ask(begin) for k in range(20)])  # type: ignore[misc]
    wrong = [i for some in found for i, value in some if not (value["a"] == i).all() or not (value["b"][0] == i).all()]
    assert not wrong


def test_a_model_that_waits_for_nobody() -> None:
    """The rows are taken out of the function's memory before it runs again, however slow the caller is."""
    layout = inference.dynamically(lambda features: None)._shared.settings.layout
    buffer = np.zeros((2, 3))
    items = layout.items({"x": np.ones((2, 3))})
    rows = layout.rows(buffer, items)
    whole = layout.rows([buffer], layout.items({"x": np.ones((0, 3))}))
    buffer[:] = 7
    assert not layout.result(items, rows, ragged=False).any() and not whole[0][0].any()


def test_no_caller_sees_what_another_does_with_its_result() -> None:
    """One object for all items of a batch is one for each caller."""
    score = dynamically(batch_size=8, timeout_ms=50)(_everywhere)
    found = at_once([lambda: score(1.0)] * 8)
    found[0] += 1
    assert [value.tolist() for value in found[1:]] == [[1.0, 1.0]] * 7


def test_features_are_the_models_own() -> None:
    """A model that changes what it is given changes no caller's arrays, whether it pads them or not."""

    @inference.dynamically(timeout_ms=0)
    def model(features: dict[str, Any]) -> Any:
        features["x"] *= 0
        return features["x"]

    for rows in (np.ones((1, 3)), [np.ones(3), np.ones(2)], torch.ones((2, 3))):
        model({"x": rows})
        assert all(bool((row == 1).all()) for row in rows)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_items_are_tried_again_as_they_came(asynchronous: bool) -> None:
    """A function that changes items in place and then fails: what is tried alone is what its caller gave."""

    def halve(items: list[Any]) -> list[float]:
        for item in items:
            item["x"] /= 2
        if any(np.isnan(item["x"]).any() for item in items):
            raise ValueError("not a number")
        return [float(item["x"][0]) for item in items]

    async def later(items: list[Any]) -> list[float]:
        return halve(items)

    inputs = [{"x": np.full(2, x)} for x in (2.0, 4.0, np.nan)]
    if asynchronous:
        score: Any = aio.dynamically(retry_alone=True, timeout_ms=20)(later)

        async def ask() -> list[Any]:
            return await asyncio.gather(*map(score, inputs), return_exceptions=True)

        found = asyncio.run(ask())
    else:
        threaded = dynamically(retry_alone=True, timeout_ms=20)(halve)
        found = at_once([lambda item=item: threaded(item) for item in inputs])  # type: ignore[misc]
    assert found[:2] == [1.0, 2.0] and isinstance(found[2], ValueError)


class Memory:
    """A cache in memory that stores late, as one on a disk does."""

    def __init__(self) -> None:
        self.held: list[tuple[Any, Any]] = []

    async def get(self, key: Any) -> Any:
        return next((value for other, value in self.held if _same(other, key)), None)

    async def set(self, key: Any, value: Any) -> None:
        await asyncio.sleep(0.01)
        self.held.append((key, value))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(np.array_equal(one[name], other[name]) for name in one)
    return bool(one == other)


@pytest.mark.parametrize("kind", ["items", "features"])
def test_what_a_cache_holds_is_its_own(kind: str) -> None:
    """Callers change their items, and what they were given, at once: the cache goes on with what they had asked for."""
    memory = Memory()

    @aio.dynamically(timeout_ms=0, cache=memory)
    async def lists(items: list[Any]) -> list[Any]:
        return [[value * 10 for value in item] for item in items]

    @aio.inference.dynamically(timeout_ms=0, cache=memory)
    async def model(features: dict[str, Any]) -> Any:
        return {"y": features["x"] * 10, "z": [features["x"]]}

    async def ask() -> None:
        for _ in range(3):
            for x in (1, 2, 3):
                if kind == "items":
                    item = [[x]]
                    (found,) = await lists(item)
                    assert found == [10 * x]
                    found[0] = item[0][0] = -1
                else:
                    features = {"x": np.full((1, 2), x)}
                    found = await model(features)
                    assert (found["y"] == 10 * x).all() and (found["z"][0] == x).all()
                    found["y"][:] = features["x"][:] = -1
            await asyncio.sleep(0.05)
        assert len(memory.held) == 3

    asyncio.run(ask())


def test_errors_of_a_batch_share_nothing() -> None:
    """What one caller does with the details of an error is no other caller's business."""

    def fails(items: list[int]) -> list[int]:
        time.sleep(0.05)
        error = ValueError(["details"])
        error.more = {"bad": [1]}  # type: ignore[attr-defined]
        raise error

    score = dynamically(batch_size=4, timeout_ms=50)(fails)
    caught: list[Any] = at_once([lambda: score(1)] * 4)
    caught[0].args[0].clear()
    caught[0].more["bad"].clear()
    assert [(error.args, error.more) for error in caught[1:]] == [((["details"],), {"bad": [1]})] * 3


def test_objects_of_other_classes_are_handed_over() -> None:
    """What nobody could copy (a lock, a handle) arrives as it is; a list that holds itself does too."""
    lock, handle = threading.Lock(), object()
    circle: list[Any] = []
    circle.append(circle)
    found = dynamically(timeout_ms=0)(lambda items: [lock, [handle], circle])([1, 2, 3])
    assert found[0] is lock and found[1][0] is handle
    assert found[2] is not circle and found[2][0] is found[2]


VALUES = st.recursive(
    st.none() | st.integers() | st.text() | st.binary().map(bytearray) | st.integers(0, 3).map(np.arange),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | inner.map(Answer)
        | inner.map(lambda value: Pair(value, 1))
        | inner.map(lambda value: collections.OrderedDict(a=value))
        | inner.map(lambda value: collections.deque([value]))
    ),
    max_leaves=8,
)


def memory_of(value: Any) -> list[int]:
    """The ids of all in it that can be changed, and the addresses of arrays."""
    if isinstance(value, np.ndarray):
        return [value.__array_interface__["data"][0]] if value.size else []
    if isinstance(value, (Answer, Pair)):
        return memory_of(value.values)
    found = [id(value)] if isinstance(value, (list, dict, bytearray, collections.deque)) else []
    inner = value.values() if isinstance(value, dict) else value
    if isinstance(value, (list, tuple, dict, collections.deque)):
        found += [one for part in inner for one in memory_of(part)]
    return found


@settings(max_examples=200, deadline=None)
@given(value=VALUES)
def test_a_copy_is_equal_and_shares_nothing(value: Any) -> None:
    """Whatever a result is made of, what a caller gets is the same, of the same types, in memory of its own."""
    echo = dynamically(timeout_ms=0)(lambda items: [value] * len(items))
    one, other = echo([1, 2])
    assert repr(one) == repr(value) and type(one) is type(value)
    ids = [memory_of(found) for found in (value, one, other)]
    assert sum(len(set(found)) for found in ids) == len(set().union(*ids))

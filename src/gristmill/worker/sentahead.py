"""Shards whose rows are answered in bulk, hours later: they are sent before their turn comes, as many as a worker
holds, and their windows wait on the disk.
"""

from __future__ import annotations

import queue
import struct
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from gristmill.models.contract import Bulk
from gristmill.process.failure import Unasked, failure_of
from gristmill.process.messages import Item
from gristmill.worker.bisection import ModelBroken
from gristmill.worker.firststage import packed
from gristmill.worker.prepare import Window
from gristmill.worker.recipe import Task

LOOK = 0.5  # seconds between two looks whether the worker is being stopped
_SIZE = struct.Struct("<Q")


class Sending(Protocol):
    """What a worker does for the shards that it sends."""

    stopping: threading.Event

    def windows(self, item: Item) -> Iterator[Window]:
        """The windows of an item, as they are read."""
        ...

    def alive(self, item: Item, window: Window) -> Iterator[np.ndarray]:
        """The rows of a window that are to be answered, in parts that may be sent one after the other."""
        ...

    def bulk(self, item: Item) -> Bulk | None:
        """Where an item's rows are sent; None if they are asked for one by one."""
        ...

    def waits(self, reason: str) -> None:
        """What is waited for; "" once nothing is."""
        ...


class SentAhead:
    """Items on their way to a worker: those that it scores are sent, in a thread, as soon as they come."""

    def __init__(self, worker: Sending) -> None:
        self._worker = worker
        self._under_way: list[Bulk] = []

    def items(self, items: Iterator[Item]) -> Iterator[Item]:
        """The items in order, each with its windows as portions, which come once they are answered."""
        sent: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        threading.Thread(target=self._send, args=(items, sent), name="gristmill-sent", daemon=True).start()
        return iter(sent.get, None)

    def _send(self, items: Iterator[Item], sent: queue.SimpleQueue[Item | None]) -> None:
        for item in items:
            if self._worker.stopping.is_set():
                break
            try:
                item = self._sent(item)
            except BaseException as e:  # raised where the portions are iterated: the item fails
                item = replace(item, portions=_failing(e))
            sent.put(item)
        sent.put(None)

    def _sent(self, item: Item) -> Item:
        task: Task = item.value
        if task.kind != "score" or (bulk := self._worker.bulk(item)) is None:
            return item
        file = tempfile.TemporaryFile()  # noqa: SIM115 - until its windows are taken
        try:
            for window in self._worker.windows(item):
                for rows in self._worker.alive(item, window):
                    bulk.add(window.prepared, rows)
                body = packed(window, prepared=False)  # it is prepared again when it is its turn
                file.write(_SIZE.pack(len(body)))
                file.write(body)
                if self._worker.stopping.is_set():
                    break
            bulk.send()
        except BaseException as e:
            bulk.close()
            file.close()
            if isinstance(e, Unasked):
                raise _broken(e) from e
            raise
        self._under_way.append(bulk)
        return replace(item, portions=self._portions(bulk, file))

    def _portions(self, bulk: Bulk, file: Any) -> Iterator[bytes]:
        try:
            self._wait(bulk)
            file.seek(0)
            while (head := file.read(_SIZE.size)) and not self._worker.stopping.is_set():
                yield file.read(_SIZE.unpack(head)[0])
        finally:
            file.close()

    def _wait(self, bulk: Bulk) -> None:
        said = ""
        try:
            while not bulk.wait(LOOK) and not self._worker.stopping.is_set():
                more, told = len(self._under_way) - 1, bulk.told
                told = f"{told}, {more} more shard{'s' * (more > 1)} after it" if told and more else told
                if told and told != said:
                    said = told
                    self._worker.waits(told)
        except Unasked as e:
            raise _broken(e) from e
        finally:
            self._under_way.remove(bulk)
            if said:
                self._worker.waits("")


def _broken(error: Unasked) -> ModelBroken:
    """A model that answers nobody."""
    return ModelBroken(failure_of(error, "model"))


def _failing(error: BaseException) -> Iterator[bytes]:
    yield from ()
    raise error

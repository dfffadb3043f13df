"""File layers whose every operation waits for leave: a driver can be stopped at any of them, continued, or ended.

The disk is a folder in memory below the layer that disks have; the store is obstore's own in memory below the layer
that object stores have, with answers that are lost and conflicts that another attempt does not meet.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from gristmill.errors import SinkBusy
from gristmill.files.disk import LocalFiles
from gristmill.files.objectstore import ObjectFiles


class Ended(OSError):
    """The driver was ended at this operation; none that follows is done, as after SIGKILL."""


class Driver:
    """One run on a sink, as its operations see it. `at` is the operation at which it stops, or ends if `ends`."""

    def __init__(self, name: str, at: int | None = None, ends: bool = False) -> None:
        self.name, self.at, self.ends = name, at, ends
        self.operations = 0
        self.over = False
        self.leased = False
        self.stopped = threading.Event()
        self._changed = threading.Condition()
        self._going = True

    def step(self, operation: str, path: str) -> None:
        """Called before each operation, by any of the driver's threads. The lease and progress are no steps."""
        with self._changed:
            if self.over:
                raise Ended(f"{self.name} ended before {operation} {path}")
            number, self.operations = self.operations, self.operations + 1
            if number == self.at:
                if self.ends:
                    self.over = True
                    raise Ended(f"{self.name} ended at {operation} {path}")
                self._going = False
                self.stopped.set()
            self._changed.wait_for(lambda: self._going or self.over)
            if self.over:
                raise Ended(f"{self.name} ended before {operation} {path}")

    def pause(self) -> None:
        """Blocks while the driver is stopped: not only its operations stand still."""
        with self._changed:
            self._changed.wait_for(lambda: self._going or self.over)

    def end(self) -> None:
        """As SIGKILL."""
        with self._changed:
            self.over = True
            self._changed.notify_all()

    def go_on(self) -> None:
        """As SIGCONT."""
        with self._changed:
            self._going = True
            self._changed.notify_all()


class Leases:
    """Who holds which sink. A driver that has ended holds nothing; one that is stopped holds it until it is taken."""

    def __init__(self) -> None:
        self._holder: dict[str, Driver] = {}

    def take(self, sink: str, driver: Driver) -> None:
        holder = self._holder.get(sink)
        if holder is not None and not holder.over and not holder.stopped.is_set():
            raise SinkBusy(f"{sink}: {holder.name} holds it")
        self._holder[sink] = driver
        driver.leased = True

    def held(self, sink: str, driver: Driver) -> bool:
        return self._holder.get(sink) is driver

    def drop(self, sink: str, driver: Driver) -> None:
        if self.held(sink, driver):
            del self._holder[sink]


class SteppedLease:
    """The lease of one driver."""

    def __init__(self, leases: Leases, sink: str, driver: Driver) -> None:
        self._leases, self._sink, self._driver = leases, sink, driver

    def __enter__(self) -> SteppedLease:
        self._leases.take(self._sink, self._driver)
        return self

    def __exit__(self, *_: object) -> None:
        self._leases.drop(self._sink, self._driver)

    def held(self) -> bool:
        self._driver.pause()
        return self._leases.held(self._sink, self._driver)

    def say(self, path: str, data: bytes) -> None:
        """Progress is no part of the protocol."""


class SteppedDisk(LocalFiles):
    """A local disk."""

    def __init__(self, leases: Leases, driver: Driver) -> None:
        self.driver, self._leases = driver, leases

    def lease(self, sink: str, folder: str, tell: Callable[[str], None]) -> Any:
        return SteppedLease(self._leases, sink, self.driver)

    def holder(self, folder: str) -> None:
        return None

    def open_new(self, path: str) -> BinaryIO:
        self.driver.step("create", path)
        return super().open_new(path)

    def sync(self, file: BinaryIO) -> None:
        self.driver.step("sync", str(file.name))
        super().sync(file)

    def sync_folder(self, path: str) -> None:
        """No step: power does not fail here."""

    def link(self, source: str, target: str) -> None:
        self.driver.step("link", target)
        super().link(source, target)

    def replace(self, source: str, target: str) -> None:
        self.driver.step("replace", target)
        super().replace(source, target)

    def remove(self, path: str) -> None:
        self.driver.step("remove", path)
        super().remove(path)

    def read(self, path: str) -> bytes:
        self.driver.step("read", path)
        return super().read(path)

    def names(self, folder: str) -> list[str]:
        self.driver.step("names", folder)
        return super().names(folder)


class SteppedStore(ObjectFiles):
    """An object store in memory, `store` being shared by all drivers of it. Now and then a request that was done has
    its answer lost, or one is refused with a conflict that another attempt does not meet (409).
    """

    def __init__(self, store: Any, leases: Leases, driver: Driver, seed: int) -> None:
        super().__init__("s3://box/", {}, patience=5.0)
        self._opened, self._leases, self.driver = store, leases, driver
        self._chance = random.Random(seed)

    def lease(self, sink: str, folder: str, tell: Callable[[str], None]) -> Any:
        return SteppedLease(self._leases, sink, self.driver)

    def holder(self, folder: str) -> None:
        return None

    def map(self, work: Callable[[Any], Any], items: Any) -> Any:
        return map(work, items)

    def note(self, path: str, data: bytes) -> None:
        self.write_over(path, data)

    def _try(self, path: str, request: Callable[[], Any]) -> Any:
        from obstore.exceptions import GenericError

        self.driver.step("request", path)

        async def shaky() -> Any:
            chance = self._chance.random()
            if chance < 0.01:
                raise GenericError("status code: 409 Conflict: <Code>ConditionalRequestConflict</Code>")
            answer = await request()
            if chance < 0.03:
                raise GenericError("connection closed before message completed")
            return answer

        return super()._try(path, shaky)


def layers(folder: str, kind: str) -> tuple[str, Callable[[Driver], Any]]:
    """The root of a new sink, and what makes a driver's file layer on it."""
    leases = Leases()
    if kind == "disk":
        return f"{folder}/out", lambda driver: SteppedDisk(leases, driver)
    from obstore.store import MemoryStore

    store = MemoryStore()
    return "s3://box/out", lambda driver: SteppedStore(store, leases, driver, hash(driver.name) & 0xFFFF)

"""Loading beside the run: committed parts are staged in the stores while others are scored, so that little is left to
do once the result is published. It is a help, never needed: what it does not do, or fails at, is done then.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence

from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Live
from gristmill.commit.publication import live_of
from gristmill.driver.probe import Planned
from gristmill.errors import GristmillError
from gristmill.job.delivery import Delivery
from gristmill.stores import delivery as deliveries
from gristmill.stores.results import Result, identity

SOON = 3.0  # seconds of scoring after which loading begins: a shorter job is delivered at once
EVERY = 1.0  # seconds between two looks for receipts
NICE = 10  # how far its thread stands back for the workers
LEAVE = 8.0  # seconds to wait, when the run ends, for the part that is being loaded


class Beside:
    """A thread that loads what is committed. The driver wakes it when shards were, and stops it before it publishes."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self._begun = time.monotonic()
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()
        self._over = threading.Event()

    def wake(self, at: Planned) -> None:
        """Shards were committed. The first time that this is worthwhile, the thread starts."""
        if self._thread is None:
            if not at.spec.deliver or at.stream or at.sink.joins or time.monotonic() - self._begun < SOON:
                return
            self._thread = threading.Thread(target=self._run, args=(at,), daemon=True, name="gristmill deliveries")
            self._thread.start()
        self._woken.set()

    def stop(self) -> None:
        """End once the part that is being loaded is; at the latest with the process."""
        self._over.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join(LEAVE)

    def _run(self, at: Planned) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        with contextlib.ExitStack() as stack:
            loads = [load for d in at.spec.deliver if (load := self._begin(at, d, stack)) is not None]
            live: list[Live] = [] if at.base is None else list(at.base.live())
            known: dict[int, receipts.Receipt] = {}
            while loads and not self._over.is_set():
                self._woken.wait()
                self._woken.clear()
                found = receipts.standing(at.generation.receipts, at.files, known)
                live += live_of(at.generation, [r for n, r in found.items() if n not in known])
                known = found
                loads = [load for load in loads if self._tried(functools.partial(self._stage, load, live))]
                live = []
                self._over.wait(EVERY)

    def _begin(self, at: Planned, delivery: Delivery, stack: contextlib.ExitStack) -> deliveries.Loading | None:
        members = (*(at.base.generations if at.base is not None else ()), at.generation.number)
        made: list[deliveries.Loading] = []

        def begin() -> None:
            store = stack.enter_context(contextlib.closing(deliveries.opened(delivery)))
            result = Result(at.generation, members, at.plan.about, identity(at.root, at.files))
            made.append(deliveries.Loading(delivery, result, store, expected=at.plan.shards.rows() or 0))
            made[0].rest()  # whatever was opened to look: others, such as the next delivery, may need the same file

        return made[0] if self._tried(begin) else None

    def _stage(self, load: deliveries.Loading, live: Sequence[Live]) -> None:
        for f in load.early(live):
            if self._over.is_set():
                return
            load.stage([f])
        load.rest()

    def _tried(self, work: Callable[[], None]) -> bool:
        """Whether work was done; a store that fails is left alone until the result is published."""
        try:
            work()
        except (GristmillError, OSError) as e:
            self.failed.append(str(e))
            return False
        return True

"""Whether answers can be kept: while they cannot, none is asked for, as it would be paid for and lost."""

from __future__ import annotations

import time

from gristmill.errors import RunFailed
from gristmill.models.contract import Journal
from gristmill.models.ending import Ending

UNKEPT = 10.0  # seconds for which answers may not be kept, while no more are asked for
SOON, LOOK = 0.02, 0.25  # seconds between two looks, at first and at most


class Keeping:
    """The journals of one worker. They are beside one result: what one of them cannot keep, none can. Used in one event
    loop, but for `of`.
    """

    def __init__(self, ending: Ending) -> None:
        self._ending = ending
        self._journals: list[Journal] = []

    def of(self, journal: Journal) -> None:
        """Answers are kept there, too. Called in any thread."""
        if journal not in self._journals:
            self._journals = [*(other for other in self._journals if not other.closed), journal]

    @property
    def trouble(self) -> Exception | None:
        """Why answers cannot be kept now; see Journal."""
        found = (journal.trouble for journal in self._journals if not journal.closed)
        return next((trouble for trouble in found if trouble is not None), None)

    async def ready(self) -> None:
        """Returns once answers can be kept. Raises RunFailed if that takes too long."""
        until, pause = time.monotonic() + UNKEPT, SOON
        while (trouble := self.trouble) is not None:
            if time.monotonic() > until:
                self._ending.stop(
                    RunFailed(
                        f"answers cannot be kept beside the result ({type(trouble).__name__}: {trouble}), and no more "
                        "are paid for: put that right (room on the disk, rights, open files), then run again; what is "
                        "answered and kept is not asked for again"
                    )
                )
            await self._ending.sleep(pause)
            pause = min(LOOK, 1.5 * pause)

"""Which files the code writes itself: those that arguments name, and that come to be while it runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from gristmill.models.files import there

_PAUSE = 0.05  # seconds between two looks: a process that is killed has noted all but what came within the last
_SHARE = 200  # a look takes one part of so many of the time, where there is much to look at


class Watch:
    """Looks, while code runs, which of the paths that were `absent` (see `files.named_files`) come to be there, and has
    them noted, each once, at the latest at the end. `note` is called from a thread of its own; where it fails with
    OSError it is tried again, at the end by the caller.
    """

    def __init__(self, absent: Mapping[str, tuple[str, bool]], note: Callable[[list[str]], None]) -> None:
        self.seen: list[str] = []
        self._absent = dict(absent)
        self._note = note
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if self._absent:
            self._thread = threading.Thread(target=self._watch, name="gristmill-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(*(() if kind is None else (OSError,))):  # what is under way says more
            self.look()

    def look(self) -> None:
        """Note what has come."""
        with self._looking:
            came = [name for name, named in self._absent.items() if there(*named)]
            if came:
                self._note(came)
                self.seen += came
            for name in came:
                del self._absent[name]

    def _watch(self) -> None:
        pause = _PAUSE
        while not self._ended.wait(pause):
            begun = time.monotonic()
            with contextlib.suppress(OSError):  # the next look tries again, and the last one says it
                self.look()
            pause = max(_PAUSE, _SHARE * (time.monotonic() - begun))

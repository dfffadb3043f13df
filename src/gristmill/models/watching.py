"""Which files the code writes itself: those that arguments name, and that come to be while it runs."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from gristmill.models.files import Looked

_PAUSE = 0.05  # seconds between two looks: a process that is killed has noted all but what came within the last
_SHARE = 200  # a look takes one part of so many of the time, where there is much to look at


class Watch:
    """Looks, while code runs, for what comes to where arguments name it, as `files.named_files` has `looked`: to a path
    at which nothing was, or into a folder. It has that noted, each once, at the latest at the end. `note` is called
    from a thread of its own; where it fails with OSError it is tried again, at the end by the caller.
    """

    def __init__(self, looked: Mapping[str, Looked], note: Callable[[list[str]], None]) -> None:
        self.seen: list[str] = []
        self._looked = {name: at for name, at in looked.items() if at.may_grow}
        self._note = note
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if self._looked:
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
            came = {name: new for name, at in self._looked.items() if (new := at.came(name))}
            if came:
                new = list(dict.fromkeys(itertools.chain.from_iterable(came.values())))
                self._note(new)
                self.seen += new
            for name, new in came.items():
                at = self._looked.pop(name)
                if at.files:
                    self._looked[name] = at.with_more(new)

    def _watch(self) -> None:
        pause = _PAUSE
        while not self._ended.wait(pause):
            begun = time.monotonic()
            with contextlib.suppress(OSError):  # the next look tries again, and the last one says it
                self.look()
            pause = max(_PAUSE, _SHARE * (time.monotonic() - begun))

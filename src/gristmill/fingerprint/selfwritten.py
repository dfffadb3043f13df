"""Which files the code writes itself: those that arguments name and that appear while it runs."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from gristmill.fingerprint.modelfiles import Looked

_PAUSE = 0.05  # seconds between two looks: a process that is killed has noted all but what appeared since the last one
_SHARE = 200  # looks take at most one part in this many of the time, if there is much to look at


class Watch:
    """Looks, while code runs, for what appears where arguments name it, as `files.named_files` has `looked`: at a path
    where nothing was, or in a folder. Each is noted once, at the latest at the end. `note` is called from a separate
    thread; if it fails with OSError it is tried again, at the end by the caller.
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
        with contextlib.suppress(*(() if kind is None else (OSError,))):  # the error under way says more
            self.look()

    def look(self) -> None:
        """Note what has appeared."""
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
            with contextlib.suppress(OSError):  # the next look tries again, and the last one reports it
                self.look()
            pause = max(_PAUSE, _SHARE * (time.monotonic() - begun))

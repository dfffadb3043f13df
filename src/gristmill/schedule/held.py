"""That only one `gristmill up` runs the jobs of a folder at a time, wherever its state is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from gristmill.errors import RunFailed, SinkBusy
from gristmill.files.lease import myself, named, told
from gristmill.process.locks import LockFile, locked_folder


@contextlib.contextmanager
def held(folder: str, state: str) -> Iterator[None]:
    """While inside, this process is the one whose state is in a folder, and the one that runs the jobs of `folder`,
    which is not written to. Raises SinkBusy, naming the other one, and RunFailed if the state cannot be written.
    """
    path = os.path.join(state, "up.lock")
    try:
        os.makedirs(state, exist_ok=True)
        file = LockFile(path, "a+")
    except OSError as e:
        raise RunFailed(f"{path}: cannot be written ({e.strerror}): name another folder (--state)") from e
    with file:
        try:
            file.lock()
        except OSError:
            file.seek(0)
            about = told(file.read())
            who = named(about) if about.pid else "its name is not known yet"
            raise SinkBusy(f"{folder}: another gristmill up runs these jobs ({who}): stop it first") from None
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            file.truncate(0)
            file.write(myself().dump())
        with locked_folder(folder) as free:
            if not free:
                raise SinkBusy(f"{folder}: another gristmill up runs these jobs, with another --state: stop it first")
            yield

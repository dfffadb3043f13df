"""Receipts read block by block: in this process, or very many on a disk in processes beside it, as most of the work is
Python's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import numpy as np

from gristmill.commit.generation import Generation
from gristmill.commit.live import LiveFiles
from gristmill.commit.receiptblock import Block, Sums, cut, read
from gristmill.files.disk import LOCAL
from gristmill.process.machine import cores
from gristmill.process.spawning import mortal

MANY = 4  # blocks: with fewer, a process takes longer to start than to read them
MOST = 8  # processes
_SERVE = "import sys; sys.path[:] = {path!r}; from gristmill.commit.readers import serve; serve({out})"
Versions = Mapping[int, Sequence[int]]


def blocks(
    generation: Generation, pieces: Sequence[np.ndarray], versions: Versions
) -> Iterator[tuple[Block, Sums, list[int] | None]]:
    """The receipts of each piece, which are some shards, and the shards among them that are `cut`, if that was looked
    at, too. `versions` as for `read`. Raises NewerFormat.
    """
    done = 0
    if len(pieces) >= MANY and cores() > 1 and generation.files is LOCAL:
        for found in _beside(generation, pieces, versions):
            yield found
            done += 1
    for piece in pieces[done:]:  # all, or those after a process has failed: its error is then met here
        yield *read(generation, piece.tolist(), versions), None


def _beside(
    generation: Generation, pieces: Sequence[np.ndarray], versions: Versions
) -> Iterator[tuple[Block, Sums, list[int]]]:
    """As `blocks`, by several processes; those up to the first that one of them could not deliver."""
    count = min(cores(), MOST, len(pieces))
    try:
        with contextlib.ExitStack() as stack:
            readers = [stack.enter_context(_started()) for _ in range(count)]
            for n, (reader, _) in enumerate(readers):
                _send(reader, (generation, pieces[n::count], versions))
            for n in range(len(pieces)):
                yield pickle.load(readers[n % count][1])
    except Exception:  # whatever it is: no process to be had, one that ended; this process reads what is missing
        return


@contextlib.contextmanager
def _started() -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A process, and what it sends. By a pipe of its own, as anything at its start (a sitecustomize) may print."""
    ours, its = os.pipe()
    code = _SERVE.format(path=[p or os.getcwd() for p in sys.path], out=its)
    with open(ours, "rb") as sent:
        try:
            reader = subprocess.Popen(
                [*mortal(), sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what fails is read again, and its error raised, in this process
                pass_fds=[its],
                start_new_session=True,  # this process handles a Ctrl-C at the terminal
            )
        finally:
            os.close(its)
        try:
            yield reader, sent
        finally:
            reader.kill()
            reader.communicate()


def _send(reader: subprocess.Popen[bytes], work: object) -> None:
    assert reader.stdin is not None
    pickle.dump(work, reader.stdin)
    reader.stdin.close()
    reader.stdin = None


def serve(out: int) -> None:
    """In such a process: read the pieces that come, and send their blocks to that descriptor."""
    generation, pieces, versions = pickle.load(sys.stdin.buffer)
    gc.disable()  # nothing here is in a circle
    with open(out, "wb") as sent:
        for piece in pieces:
            block, sums = read(generation, piece.tolist(), versions)
            pickle.dump((block, sums, cut(generation, LiveFiles([block.parts]))), sent, protocol=5)
            sent.flush()

"""The contract of the file layer below a sink, and of its lease."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    from gristmill.files.lease import Holder


class Files(Protocol):
    """The file layer that everything below a sink goes through: a local disk, or an object store. A test can record its
    operations or stop at any of them.

    Paths begin with the sink's root and use `/`. It can be pickled and is cheap to open in a worker. Failures raise
    OSError, without secrets in the text. With `free_links`, a second name costs nothing and keeps the file when the
    first name is removed; without, it is a copy.
    """

    free_links: bool

    @property
    def server(self) -> str:
        """What tells its store from others in which the same paths are other files; "" on a disk."""
        ...

    # ---- files of a shard, written in pieces

    def create(self, path: str) -> BinaryIO:
        """A new file open for writing and seeking; its folder is made. Raises FileExistsError."""
        ...

    def sync(self, file: BinaryIO) -> None:
        """Flush an open file, and make its content durable if the file is already in its final place."""
        ...

    def local(self, path: str) -> AbstractContextManager[str]:
        """A path on this machine with the file's content, for libraries that read it; gone afterwards if it is a copy.
        Raises FileNotFoundError.
        """
        ...

    def digest(self, path: str) -> tuple[int, str]:
        """Size in bytes and sha256 of a file, read back. Raises FileNotFoundError."""
        ...

    def settle(self, paths: Iterable[str]) -> None:
        """Make finished files durable under their names. Others' files, and files settled already, are left alone."""
        ...

    def link(self, source: str, target: str) -> None:
        """Gives a settled file a second name. Raises FileExistsError if the name is taken, FileNotFoundError if there
        is no such file.
        """
        ...

    def same(self, path: str, source: str, size: int, sha256: str) -> bool:
        """Whether `path` exists and is `source` under another name, or has this content."""
        ...

    # ---- small whole files

    def write_new(self, path: str, data: bytes) -> bool:
        """Create `path` with `data`, durable and whole or not at all; False if the name was taken by other data."""
        ...

    def write_over(self, path: str, data: bytes) -> None:
        """Replace `path` by `data` in one durable step."""
        ...

    def note(self, path: str, data: bytes) -> None:
        """Replace `path` by `data` in one step that outlives this process, but maybe not a power failure."""
        ...

    def read(self, path: str) -> bytes:
        """All of a file. Raises FileNotFoundError."""
        ...

    def look(self, path: str) -> tuple[bytes, Mapping[str, Any]]:
        """All of a file, and its version, which `swap` takes. Raises FileNotFoundError."""
        ...

    def swap(self, path: str, data: bytes, version: Mapping[str, Any]) -> bool:
        """Replace `path` by `data`, as `write_over` does, if it still has this version; false if it has another one.

        Of two swaps of one version one wins. On a disk this only holds between swaps: a concurrent `write_over` may be
        lost, and on Windows a swap too. Raises FileNotFoundError.
        """
        ...

    def remove(self, path: str) -> None:
        """Remove a file; no error if it is not there."""
        ...

    # ---- folders

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents; nothing in a store, which has no folders."""
        ...

    def prove(self, folder: str) -> None:
        """Make a folder and check that a run can commit there. Raises OSError, and BadJob if a guarantee is missing."""
        ...

    def holds(self, folder: str) -> bool:
        """Whether there is such a folder."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names of the files directly in a folder, in any order; none if there is no such folder."""
        ...

    def entries(self, folder: str) -> Iterator[str]:
        """`names`, one at a time: very many are never all in memory on a disk."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """`names` with the bytes of each."""
        ...

    def as_long(self, folder: str, wanted: Iterable[tuple[str, int]]) -> Iterator[bool]:
        """For each of these paths below a folder, with the bytes wanted, whether there is such a file, in order."""
        ...

    def below(self, root: str, skip: str) -> Iterator[str]:
        """All files below a folder, relative to it, except those in its folder named `skip`, and those below folders
        that contain a folder of this name themselves.
        """
        ...

    def remove_folder(self, path: str) -> None:
        """Remove a folder and everything in it; what cannot be removed stays."""
        ...

    # ---- the rest

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """`work` applied to each item, in order: one after the other on a disk, many at once in a store."""
        ...

    def arrow(self, otherwise: Mapping[str, str] | None = None) -> Any:
        """The pyarrow file system that opens these paths; None for a local disk. `otherwise` says where to look for
        files that are gone.
        """
        ...

    def lease(self, sink: str, folder: str, tell: Callable[[str], None]) -> Lease:
        """The lease of a sink, kept in `folder`; not yet taken. `tell` gets messages about waiting."""
        ...

    def holder(self, folder: str) -> Holder | None:
        """Who holds the lease in `folder` now, or None."""
        ...


class Lease(Protocol):
    """Keeps two runs off one sink as a courtesy; safety never rests on it."""

    def __enter__(self) -> Lease:
        """Take the lease. Raises SinkBusy, naming the run that holds it."""
        ...

    def __exit__(self, *_: object) -> None: ...

    def held(self) -> bool:
        """Whether this run still holds the sink. Once another run may have begun, it is false, and stays false.

        Two system calls on a disk. In a store one request, at most every two seconds and with a limit of two seconds;
        if the store does not answer, the lease still counts as held.
        """
        ...

    def say(self, path: str, data: bytes) -> None:
        """Record the run's progress for others to see; in a store soon, not at once, as each record is a request."""
        ...

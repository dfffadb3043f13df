"""The contract of a source that is a store: it is opened once, when a run is planned, and read as it was at that
moment, whatever is written to it while the run goes on.

Either its data files alone are the rows (`files`), and workers read them where they are, or the rows are copied into
Parquet files in the run's folder (`pieces`), which are removed when the result is published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from gristmill.job.snapshots import Wanted
from gristmill.values import dataclass

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Counted", "DataFile", "Growing", "Piece", "Snapshot", "SnapshotKind", "Wanted"]

Piece = Callable[[], "Iterator[pa.RecordBatch]"]
"""Reads some of the rows, in an order that is the same whenever they are: a copy that is lost may have to be made
again, and positions in it are what rows are known by. Pieces may be read at once, in threads.
"""


@dataclass(frozen=True)
class DataFile:
    """A Parquet file of a store: `uri` as pyarrow opens it, or an absolute path. `constant` are columns that are not in
    the file, and have one value in all of its rows: as text, None for null.

    What is no file, and is read as one, has another source format as its `form`, and `storage` with what its address
    needs to be opened (`sources.paths`).
    """

    uri: str
    constant: Mapping[str, str | None] = field(default_factory=dict)
    form: str = "parquet"
    storage: Mapping[str, Any] = field(default_factory=dict, repr=False)


class Snapshot(Protocol):
    """A store as it was when it was opened. Errors of the store come as BadSource (what is asked for is not there) or
    RunFailed (it is away), in one line with its own words and without secrets.
    """

    version: str
    """What `open` needs to give the same rows later, also if the store has changed since; "" if it cannot. It tells a
    table from one of the same name that takes its place.
    """
    told: str
    """The version for people: "version 5"."""
    schema: pa.Schema | None
    """The columns and their types, at least those that are wanted. None: batches have the types of their values, and
    what holds all of them is found when all have been read.
    """

    def files(self) -> Sequence[DataFile] | None:
        """The files that alone are the rows, all with the columns of `schema` but the constant ones; None if there are
        none such, as with deleted rows that are marked somewhere else.
        """
        ...

    def pieces(self) -> Sequence[Piece]:
        """What reads the rows, in order, with the columns that are wanted. Each may be read once."""
        ...

    def cancel(self) -> None:
        """End what pieces are reading, in other threads: they then raise whatever they like."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Counted(Protocol):
    """A Snapshot that can tell how many rows it has without giving them."""

    def count(self) -> int | None:
        """Rows of the snapshot; None if that cannot be told."""
        ...


class SnapshotKind(Protocol):
    """A kind of store to read from, registered under the scheme of its addresses. A class with these attributes is
    one.
    """

    name: ClassVar[str]
    queried: ClassVar[bool]
    """Whether it can be asked a query."""
    said: ClassVar[tuple[str, ...]]
    """Names of options in the query of its addresses that are ours and not the client's, such as `version`."""
    embedded: ClassVar[bool]
    """Whether it is a file or folder on this machine, unless the scheme says otherwise (`delta+s3`)."""
    marks: ClassVar[tuple[tuple[str, ...], ...]]
    """A folder is such a store if it holds all the names of one of these: `(("_delta_log",),)`."""

    @staticmethod
    def open(wanted: Wanted, version: str) -> Snapshot:
        """The store as it is now, or at a `version` that an earlier snapshot had. Raises BadJob for an address that is
        not one, MissingExtra, BadSource for what is not there, RunFailed for a store that is away, PlanChanged for a
        `version` that is gone.
        """
        ...


class Choosy(Protocol):
    """A kind of store that says which options it takes in its addresses: others are refused. One without this is given
    all.
    """

    in_address: ClassVar[tuple[str, ...]]
    """Names beside those of `said`, which are its client's."""


@runtime_checkable
class Growing(Protocol):
    """A kind of store that also knows what came since an earlier snapshot."""

    def onwards(self, wanted: Wanted, version: str) -> Snapshot:
        """The store as it is now, whose files are those of an earlier `version`, and others for what came since. Raises
        as `open` does, and SourceChanged if some of what came since is no longer there.
        """
        ...

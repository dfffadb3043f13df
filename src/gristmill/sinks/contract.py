"""The contract of a sink format: the work files of a shard, and what they can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import pyarrow as pa
from gristmill.files.contract import Files
from gristmill.values import dataclass

Role = Literal["rows", "ids", "dead", "manifest", "index", "reduced", "fates", "answers"]


@dataclass(frozen=True)
class WorkFile:
    """A finished file of a shard: where it was written, the name it is published under, and its rows.

    `role` is "rows" for files with output rows (their sum is the shard's ok count), "ids" for the files of the other
    columns if those are not tables, "dead" for dead letters, "manifest" for the file that lists both, "index" for one
    by which rows are looked up, and "reduced" for those that a job's `reduce` wrote. "fates" and "answers" are what a
    later run keeps answers by, and are not published.
    """

    path: str
    publish: str
    rows: int
    role: Role = "rows"


class Writer(Protocol):
    """Writes one shard's output. `close` syncs and returns the finished files, even if there were no rows."""

    def write(self, rows: pa.Table) -> None: ...

    def close(self) -> list[WorkFile]: ...

    def abort(self) -> None:
        """Closes and removes what was written; never raises because of it."""
        ...


class SinkFormat(Protocol):
    """One file format as a sink. It is made without arguments and can be pickled, as workers receive it. `stem` is the
    published name without its suffix, for example `part-0000007.g1`.

    `name` is the name under which it is registered; `suffixes` are what its file names may end in.
    """

    name: str
    suffixes: tuple[str, ...]
    tables: bool
    """Whether its files hold whole rows, which `gm.read` can read. If not, files of the role "rows" hold one column of
    vectors of one width, for numpy.load; those of "ids" hold the other columns as Parquet, in the same order; and a
    manifest lists both.
    """
    decimal: bool
    """Whether numbers are written as text, with just enough digits to tell values of their type apart."""

    def writer(
        self, files: Files, folder: str, stem: str, nonce: str, schema: pa.Schema, options: Mapping[str, Any]
    ) -> Writer:
        """Opens work files named `<folder>/<stem>…<suffix>.<nonce>.tmp`."""
        ...

    def stored(self, rows: pa.Table, options: Mapping[str, Any]) -> pa.Schema:
        """The schema that its files will have, and to which all rows are cast, from the schema of the first rows (there
        may be none). Raises BadJob for a type that it cannot hold.
        """
        ...

    def refused(self, rows: pa.Table, options: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
        """Rows that it cannot hold, with error and message; they become dead letters. `rows` have the columns to be
        written and, before these are planned, possibly others.
        """
        ...

    def count(self, path: str, role: Role) -> int:
        """The number of rows in a finished file, read back from it. Raises if it is incomplete."""
        ...

    def misfit(self, path: str, schema: pa.Schema, options: Mapping[str, Any]) -> str | None:
        """How a finished file of the role "rows" differs from the result's schema, in words; None if it does not, or if
        the file does not record its types.
        """
        ...

    def dataset(self, system: Any, schema: pa.Schema, sizes: Mapping[str, int]) -> tuple[Any, Any]:
        """The pyarrow.dataset format and the pyarrow file system with which its table files (if it has none, the "ids"
        files) are read with this schema. `system` opens the files as they are; `sizes` has their bytes by path.
        """
        ...

    def merge(
        self,
        files: Files,
        folder: str,
        parts: Sequence[WorkFile],
        stem: str,
        nonce: str,
        schema: pa.Schema,
        options: Mapping[str, Any],
    ) -> list[WorkFile]:
        """Work files, as a writer for `stem` would make them, that hold the rows of all parts in order, in bounded
        memory. `parts` are files that writers closed, with the same schema. Raises BadJob if the format has no such
        files.
        """
        ...

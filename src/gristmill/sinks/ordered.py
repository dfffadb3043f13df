"""Files whose rows are sorted by columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gristmill.arrow.sorting import Sorting, sortable
from gristmill.errors import BadJob, RunFailed, did_you_mean
from gristmill.files.contract import Files
from gristmill.process.startup import imported
from gristmill.sinks.contract import SinkFormat, WorkFile, Writer

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ordered"]

READ_ROWS = 65_536  # at once, of a file that is joined to others


def ordered(form: SinkFormat, columns: tuple[str, ...]) -> SinkFormat:
    """`form`, with the rows of each file sorted by `columns`, ascending, nulls last, equal rows as they came."""
    return Ordered(form, tuple(columns))


class Ordered:
    """A sink format that writes the files of another one, sorted."""

    def __init__(self, form: SinkFormat, columns: tuple[str, ...]) -> None:
        self.form = form
        self.columns = columns
        self.name = form.name
        self.suffixes, self.tables, self.decimal = form.suffixes, form.tables, form.decimal
        self.count, self.misfit, self.dataset, self.refused = form.count, form.misfit, form.dataset, form.refused

    def stored(self, rows: pa.Table, options: Mapping[str, Any]) -> pa.Schema:
        """As the files' format stores it. Raises BadJob for columns that are not there, or have no order. If there are
        no rows, one may be missing: it may be an answer column not seen yet.
        """
        schema = self.form.stored(rows, options)
        for name in self.columns:
            if name not in schema.names:
                if rows.num_rows:
                    near, there = did_you_mean(name, schema.names), ", ".join(schema.names)
                    raise BadJob(f"sort_by names {name!r}, which is not an output column: the output has {there}{near}")
            elif not sortable(schema.field(name).type):
                raise BadJob(
                    f"sort_by names {name!r}, a {schema.field(name).type}, which has no order: name a column of "
                    "numbers, text or times"
                )
        return schema

    def writer(
        self, files: Files, folder: str, stem: str, nonce: str, schema: pa.Schema, options: Mapping[str, Any]
    ) -> Writer:
        return OrderedWriter(self.form.writer(files, folder, stem, nonce, schema, options), self.columns)

    def merge(
        self, files: Files, folder: str, parts: Sequence[WorkFile], stem: str, nonce: str, schema: pa.Schema,
        options: Mapping[str, Any],
    ) -> list[WorkFile]:  # fmt: skip
        """All rows of the parts, read back and sorted. Raises BadJob for a format whose files are not tables, and
        RunFailed if they cannot be sorted.
        """
        if not self.tables:
            raise BadJob(
                f"sort_by: the files of a {self.name} sink are sorted as shards write them, and not once they are "
                "joined: leave out partition_by, files and merge, or sort_by"
            )
        writer = self.writer(files, folder, stem, nonce, schema, options)
        try:
            for part in parts:
                with files.local(part.path) as path:
                    for rows in self._rows(path, schema):
                        writer.write(rows)
            return writer.close()
        except BaseException as e:
            writer.abort()
            if isinstance(e, imported("duckdb").Error):
                why = " ".join(str(e).split())
                raise RunFailed(
                    f"sort_by {', '.join(self.columns)}: the joined rows could not be sorted: {why}: run again when "
                    "there is room for them"
                ) from e
            raise

    def _rows(self, path: str, schema: pa.Schema) -> Iterator[pa.Table]:
        import os

        import pyarrow as pa
        import pyarrow.fs as pafs

        form, system = self.dataset(pafs.LocalFileSystem(), schema, {path: os.path.getsize(path)})
        found = form.make_fragment(path, system)
        for batch in found.to_batches(schema, batch_size=READ_ROWS, batch_readahead=1, use_threads=False):
            yield pa.Table.from_batches([batch])


class OrderedWriter:
    """Holds a file's rows, beyond 64 MB on disk, and writes them sorted at the end."""

    def __init__(self, writer: Writer, columns: Sequence[str]) -> None:
        self._writer = writer
        self._sorting = Sorting(columns)

    def write(self, rows: pa.Table) -> None:
        self._sorting.add(rows)

    def close(self) -> list[WorkFile]:
        for rows in self._sorting.sorted():
            self._writer.write(rows)
        self._sorting.close()
        return self._writer.close()

    def abort(self) -> None:
        self._sorting.close()
        self._writer.abort()

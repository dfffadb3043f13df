"""One of the two results that are compared: its rows as a stream, and what its publication says of its columns."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from gristmill.commit.publication import Publication
from gristmill.commit.staged import result_named, updated_by
from gristmill.errors import CorruptStore
from gristmill.files.contract import Files
from gristmill.result.reading import rows_of
from gristmill.values import dataclass

BATCH_BYTES = 4e6  # of stored rows in a batch: some ten times that in memory, as float64 and products
BATCH_ROWS = (256, 65_536)  # at least and at most


@dataclass(frozen=True)
class Side:
    """A published result, under the `name` that it was given by. It stays the same result if a run replaces it."""

    name: str
    result: Publication

    @staticmethod
    def at(name: str, root: str, files: Files, generation: int | str | None = None) -> Side:
        """What is published in a sink, or what was with a generation, or is "staged". Raises BadSource if nothing is,
        or not as tables, or if the files of that generation are gone.
        """
        side = Side(name, result_named(root, files, generation))
        side.schema  # noqa: B018  # opens it
        return side

    @functools.cached_property
    def rows(self) -> Any:
        """The published rows, as `gm.read` gives them."""
        return rows_of(self.result)

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return self.rows.schema

    @functools.cached_property
    def count(self) -> int:
        """How many rows are published."""
        return sum(f.rows for f in self.result.live() if f.role == "rows")

    @property
    def answers(self) -> tuple[str, ...]:
        """The columns that the model answered in; of a result without rows, where that is unknown, all columns."""
        answered = self.result.body.answers
        return tuple(name for name in self.schema.names if name in answered or not (answered or self.count))

    @functools.cached_property
    def updated_by(self) -> tuple[str, ...]:
        """The key columns by which an update of it tells rows."""
        return updated_by(self.result)

    def option(self, name: str) -> Any:
        """An option of the job that wrote it (`sink.key`), as JSON has it; None if it was left at its default."""
        return json.loads(self.result.body.fingerprint.options.get(name, "null"))

    def stream(self, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """The rows' columns in order, in tables of bounded size, each with the number of its first row. Raises
        BadSource for a file that was truncated after it was published.
        """
        import pyarrow.dataset as ds

        stored = sum(f.bytes for f in self.result.live() if f.role == "rows") / max(1, self.count)
        least, most = BATCH_ROWS
        size = int(min(most, max(least, BATCH_BYTES / max(1, stored))))
        options: dict[str, Any] = {"batch_size": size, "batch_readahead": 1, "fragment_readahead": 1}
        if isinstance(self.rows.format, ds.ParquetFileFormat):  # page by page, not a group of rows at once
            options["fragment_scan_options"] = ds.ParquetFragmentScanOptions(use_buffered_stream=True, pre_buffer=False)
        first = 0
        try:
            for batch in self.rows.scanner(columns=list(dict.fromkeys(columns)), **options).to_batches():
                if batch.num_rows:
                    yield first, pa.Table.from_batches([batch])
                    first += batch.num_rows
        except (pa.ArrowInvalid, OSError, CorruptStore) as e:
            raise (self.rows.cut() or e) from None

"""Answers that still hold: rows of the result before, found by digest, and what is written for them again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import is_list
from gristmill.arrow.rows import picked
from gristmill.commit import fates
from gristmill.commit.keptindex import Index, Kept
from gristmill.errors import CorruptStore
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL, first_whole, join
from gristmill.shards.counts import Counts
from gristmill.values import dataclass
from gristmill.worker.identity import Identity
from gristmill.worker.matching import Matching
from gristmill.worker.outputcolumns import constant, fit, ids_of, keys, places
from gristmill.worker.recipe import Recipe, Task

WRITTEN_ROWS = 4096  # output rows that are put together at a time
BATCH_ROWS = 4096  # of a part, read together
READ_BYTES = 1 << 20
BUSY = 2  # parts of which rows are held: a window has those of one and the next, where the order is as it was


@dataclass(frozen=True)
class KeptRows:
    """Source rows whose answers are kept, in order: where these are (keptindex.ENTRY), each one's number in the shard,
    piece and position, and the columns that are made of it anew.
    """

    entries: np.ndarray
    origin: np.ndarray
    piece: np.ndarray
    position: np.ndarray
    source: pa.Table

    def between(self, first: int, last: int) -> KeptRows:
        """Those of the source rows from number `first` up to before `last`."""
        a, b = np.searchsorted(self.origin, [first, last]).tolist()
        return self.sliced(a, b)

    def sliced(self, a: int, b: int) -> KeptRows:
        """Those from the a-th up to before the b-th."""
        entries, origin, piece, position = (x[a:b] for x in (self.entries, self.origin, self.piece, self.position))
        return KeptRows(entries, origin, piece, position, self.source.slice(a, b - a))

    def pieces(self) -> Iterator[KeptRows]:
        """These, a few at a time: their answers may be large."""
        ends = np.cumsum(self.entries["rows"], dtype=np.int64)
        edges = np.searchsorted(ends, np.arange(WRITTEN_ROWS, int(ends[-1]) if len(ends) else 0, WRITTEN_ROWS))
        edges = np.unique([0, *(edges + 1).tolist(), len(ends)])
        for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            yield self.sliced(a, b)

    @staticmethod
    def joined(parts: Sequence[KeptRows]) -> KeptRows | None:
        """All of these, in order; None for none."""
        if not parts:
            return None
        names = ("entries", "origin", "piece", "position")
        entries, origin, piece, position = (np.concatenate([getattr(p, n) for p in parts]) for n in names)
        return KeptRows(entries, origin, piece, position, pa.concat_tables([p.source for p in parts]))


@dataclass(frozen=True)
class Written:
    """Output rows in source order: the number of the source row that each is of, the piece that this is in, and each
    one's copy text, where steps may have made it. `beside` are the columns of the source that are not written.
    """

    rows: pa.Table
    origin: np.ndarray
    piece: np.ndarray
    copies: pa.Array
    beside: pa.Table | None = None

    def sliced(self, a: int, b: int) -> Written:
        """The rows from the a-th up to before the b-th."""
        copies = self.copies.slice(a, b - a) if len(self.copies) else self.copies
        return Written(self.rows.slice(a, b - a), self.origin[a:b], self.piece[a:b], copies)

    def merged(self, other: Written) -> Written:
        """These and others, in source order."""
        origin, piece = (np.concatenate([getattr(w, n) for w in (self, other)]) for n in ("origin", "piece"))
        order = np.argsort(origin, kind="stable")
        rows = picked(pa.concat_tables([self.rows, other.rows]), order)
        copies = pa.concat_arrays([self.copies, other.copies])
        return Written(rows, origin[order], piece[order], picked(copies, order) if len(copies) else copies)


class KeptAnswers:
    """The answers of one plan that may be kept. One thread finds them, another one reads them."""

    def __init__(self, kept: Kept, recipe: Recipe, matching: Matching) -> None:
        self._index: Index = kept.open()
        self._recipe = recipe
        self._matching = matching
        self._shelf = _Shelf(kept, self._index.parts, matching.opaque)

    def find(
        self, task: Task, rows: pa.Table, who: Identity, numbers: np.ndarray, digests: np.ndarray
    ) -> tuple[np.ndarray, KeptRows] | None:
        """Which of these source rows keep their answers (a mask), and these; None if none does."""
        at = self._index.find(digests)
        place = np.flatnonzero(at >= 0)
        place = place[self._shelf.hold(self._index.entries["part"][at[place]])]
        if not len(place):
            return None
        source = picked(rows.select(self._sources(task, rows)), place)
        if unheld := self._refused(task, source):  # a column that is carried over may be what the sink cannot hold
            place = np.delete(place, list(unheld))
            source = picked(rows.select(source.column_names), place)
        mask = np.zeros(rows.num_rows, bool)
        mask[place] = True
        entries = np.asarray(self._index.entries[at[place]])
        return mask, KeptRows(entries, numbers[place], who.piece[place], who.position[place], source)

    def _refused(self, task: Task, source: pa.Table) -> Mapping[int, Any]:
        """Rows of which the sink cannot hold a column that is carried over; their answers it has held before."""
        assert task.schema is not None
        form, options = self._recipe.sink_format, self._recipe.sink.options
        fields = pa.schema([f for f in task.schema if f.name in source.column_names and f.name in self._anew(task)])
        vectors = [f.name for f in fields if is_list(f.type)]
        if not fields.names or not (form.tables or options.get("vector", next(iter(vectors), None)) in vectors):
            return {}  # of vectors a sink without tables refuses only these
        return form.refused(fit(source.select(fields.names), fields), options)

    def _taken_over(self, task: Task) -> list[str]:
        output, schema = self._recipe.output, task.schema
        assert schema is not None
        return self._matching.taken_over(schema, task.answers, output.row_id, output.model_version)

    def _anew(self, task: Task) -> list[str]:
        """The columns that are carried over from the source as it is now."""
        assert task.schema is not None
        others = {*self._taken_over(task), self._recipe.output.row_id, self._recipe.output.model_version}
        return [n for n in task.schema.names if n not in others]

    def _sources(self, task: Task, rows: pa.Table) -> list[str]:
        if not self._matching.opaque:  # profiles have those that are not written, too
            return list(rows.column_names)
        keys = self._recipe.output.key if self._matching.id == "made" else ()
        return list(dict.fromkeys(n for n in (*self._anew(task), *keys) if n in rows.column_names))

    def written(self, task: Task, kept: KeptRows) -> Written:
        """The output rows for these. Raises BadOutput if a column that is carried over does not fit."""
        output, schema, entries = self._recipe.output, task.schema, kept.entries
        assert schema is not None
        flat = np.repeat(np.arange(len(entries)), entries["rows"])
        answers = self._shelf.answers(entries, pa.schema([schema.field(n) for n in self._taken_over(task)]))
        copies = self._shelf.copies(entries) if self._matching.opaque else pa.array([], pa.string())
        columns: dict[str, Any] = {}
        for name in schema.names:
            if name in answers.column_names:
                columns[name] = answers.column(name)
            elif name == output.row_id:
                columns[name] = self._ids(task, kept, answers, flat, copies)
            elif name == output.model_version:
                columns[name] = constant(output.digest, len(flat))
            else:
                columns[name] = picked(kept.source.column(name), flat)
        others = [n for n in kept.source.column_names if n not in schema.names]
        beside = None if self._matching.opaque or not others else picked(kept.source.select(others), flat)
        return Written(fit(pa.table(columns), schema), kept.origin[flat], kept.piece[flat], copies, beside)

    def _ids(self, task: Task, kept: KeptRows, answers: pa.Table, flat: np.ndarray, copies: pa.Array) -> pa.Array:
        by, told = self._recipe.output.key, copies.to_pylist() or [""] * len(flat)
        if not by:
            return ids_of(places(task.paths, kept.piece[flat], kept.position[flat]), told)
        source = kept.source
        had = [picked(source.column(n), flat) if n in source.column_names else answers.column(n) for n in by]
        return ids_of(keys(had), told)


def counted(entries: np.ndarray) -> Counts:
    """The counts of source rows with these entries, without the rows written."""
    went_on = entries["state"] == fates.EXPANDED
    made, rows = int(entries["made"].sum()), int(entries["rows"].sum())
    return Counts(
        len(entries), int(went_on.sum()), int((~went_on).sum()), 0, derived=made, derived_filtered=made - rows
    )


# ---------------------------------------------------------------- where answers are


class _Shelf:
    """The files that answers are in, opened as they are needed."""

    def __init__(self, kept: Kept, parts: Sequence[Mapping[str, Any]], copies: bool) -> None:
        self._kept = kept
        self._parts = parts
        self._copies = copies  # whether those of rows are asked for, which are in the files of fates
        self._beside: dict[str, str | None] = {}  # of files beside parts, where they are; None if they are damaged
        self._open: dict[int, _Laid | _Grouped] = {}
        self._fates: dict[int, _Laid] = {}
        self._busy: list[_Grouped] = []  # those that hold rows in memory

    def hold(self, parts: np.ndarray) -> np.ndarray:
        """Which of these (a mask) have answers that may be kept: not those of a damaged file beside parts, which no
        reader needs. One of the result that is damaged is told of when it is read.
        """
        return ~np.isin(parts, [n for n in np.unique(parts).tolist() if not self._has(self._parts[n])])

    def _has(self, told: Mapping[str, Any]) -> bool:
        """Whether the files beside a part that its rows need are whole."""
        if told["beside"] and self._whole_beside(told["path"], told["sha256"]) is None:
            return False
        return not self._copies or self._whole_beside(told["fates"], told["fates_sha256"]) is not None

    def _whole_beside(self, name: str, sha256: str) -> str | None:
        if name not in self._beside:
            self._beside[name] = first_whole(self._kept.files, [join(self._kept.root, name)], sha256)
        return self._beside[name]

    def answers(self, entries: np.ndarray, schema: pa.Schema) -> pa.Table:
        """The answers of these entries, one after the other, in these columns."""
        part, row = np.repeat(entries["part"], entries["rows"]), _spelled(entries["row"], entries["rows"])
        return self._gathered(part, row, schema, lambda n: self._file(n, schema))

    def copies(self, entries: np.ndarray) -> pa.Array:
        """The copy texts of the rows of these entries; "" for those that no step made."""
        schema = pa.schema([("copies", pa.list_(pa.string()))])
        found = self._gathered(entries["part"], entries["source"].astype(np.int64), schema, self._fates_of)
        texts = found.column("copies").to_pylist()
        counts = entries["rows"].tolist()
        return pa.array([t for text, n in zip(texts, counts, strict=True) for t in (text or [""] * n)], pa.string())

    def _gathered(self, part: np.ndarray, row: np.ndarray, schema: pa.Schema, opened: Any) -> pa.Table:
        if not len(part):
            return pa.Table.from_batches([], schema)
        order = np.lexsort((row, part))
        part, row = part[order], row[order]
        begins = np.flatnonzero(np.diff(part, prepend=-1))
        ends = [*begins[1:].tolist(), len(part)]
        some = [opened(int(part[a])).rows(row[a:b]) for a, b in zip(begins.tolist(), ends, strict=True)]
        table = pa.concat_tables([fit(t, schema) for t in some])
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return picked(table, back)

    def _file(self, number: int, schema: pa.Schema) -> _Laid | _Grouped:
        if number not in self._open:
            told = self._parts[number]
            if told["beside"]:
                beside = self._whole_beside(told["path"], told["sha256"])
                assert beside is not None, "asked of rows that are not kept"
                self._open[number] = _Laid(beside, self._kept.files, schema.names)
            else:
                path = self._whole(told["path"], told["sha256"])
                self._open[number] = _Grouped(path, self._kept.files, schema.names)
        found = self._open[number]
        if isinstance(found, _Grouped) and found not in self._busy:
            self._busy.append(found)
            if len(self._busy) > BUSY:
                self._busy.pop(0).rest()
        return found

    def _fates_of(self, number: int) -> _Laid:
        if number not in self._fates:
            path = join(self._kept.root, self._parts[number]["fates"])
            self._fates[number] = _Laid(path, self._kept.files, ["copies"])
        return self._fates[number]

    def _whole(self, name: str, sha256: str) -> str:
        """The file's path, or that of its visible name, if that is what was committed, as it was put back there. Raises
        CorruptStore if neither is: what is damaged must not be copied.
        """
        visible = name.rpartition("/work/")[2].removesuffix(".tmp").rpartition(".")[0]
        both = [join(self._kept.root, each) for each in (name, visible)]
        if (path := first_whole(self._kept.files, both, sha256)) is not None:
            return path
        raise CorruptStore(
            f"{join(self._kept.root, name)}: holds answers of the result before, but is gone or not what was committed "
            "(gristmill verify names what is wrong): put it back, or score all rows again with --restart (restart=True)"
        )


def _spelled(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The numbers from each `first` on, `count` of them."""
    total = int(count.sum())
    begins = np.cumsum(count, dtype=np.int64) - count
    numbers: np.ndarray = np.arange(total) + np.repeat(first - begins, count)
    return numbers


class _Laid:
    """A file whose rows lie as they are in memory: any of them can be read alone."""

    def __init__(self, path: str, files: Files, names: Sequence[str]) -> None:
        with files.local(path) as at, pa.memory_map(at) as source:
            table = pa.ipc.open_file(source).read_all()
        self._table = table.select(list(names))

    def rows(self, numbers: np.ndarray) -> pa.Table:
        """The rows with these numbers, ascending."""
        return picked(self._table, numbers)


class _Grouped:
    """A Parquet part, of which a row group is read forwards, a batch at a time. Once that was begun again so often that
    its rows must be wanted in another order than they are in, it is laid out in a temporary file.
    """

    def __init__(self, path: str, files: Files, names: Sequence[str]) -> None:
        import pyarrow.parquet as pq

        with files.local(path) as at:
            self._file = pq.ParquetFile(at, buffer_size=READ_BYTES, pre_buffer=False)
        self._names = list(names)
        about = self._file.metadata
        sizes = [about.row_group(n).num_rows for n in range(about.num_row_groups)]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._group = -1
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._held: list[pa.Table] = []
        self._from = self._to = 0  # rows of the group that are held
        self._begun = 0
        self._laid: _Laid | None = None

    def rows(self, numbers: np.ndarray) -> pa.Table:
        """The rows with these numbers, ascending."""
        if self._laid is None and self._begun > 2 * len(self._ends) + 2:
            self._held.clear()
            self._laid = self._laid_out()
        if self._laid is not None:
            return self._laid.rows(numbers)
        group = np.searchsorted(self._ends, numbers, side="right")
        begins = np.flatnonzero(np.diff(group, prepend=-1)).tolist()
        some = []
        for a, b in zip(begins, [*begins[1:], len(group)], strict=True):
            n = int(group[a])
            some.append(self._of_group(n, numbers[a:b] - (int(self._ends[n - 1]) if n else 0)))
        return some[0] if len(some) == 1 else pa.concat_tables(some)

    def rest(self) -> None:
        """Let go of what is in memory."""
        self._group, self._batches = -1, iter(())
        self._held.clear()

    def _of_group(self, n: int, numbers: np.ndarray) -> pa.Table:
        if n != self._group or numbers[0] < self._from:
            self._group, self._held, self._from, self._to = n, [], 0, 0
            self._batches = self._file.iter_batches(BATCH_ROWS, row_groups=[n], columns=self._names)
            self._begun += 1
        while numbers[-1] >= self._to:
            while self._held and self._from + self._held[0].num_rows <= numbers[0]:
                self._from += self._held.pop(0).num_rows
            batch = pa.Table.from_batches([next(self._batches)]).select(self._names)
            self._held.append(batch)
            self._to += batch.num_rows
        found = picked(pa.concat_tables(self._held), numbers - self._from)
        while len(self._held) > 1:  # the next window may begin in the last one
            self._from += self._held.pop(0).num_rows
        return found

    def _laid_out(self) -> _Laid:
        """All rows in a file that is gone when nobody has it open any more."""
        handle, path = tempfile.mkstemp(prefix="gristmill-", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as out:
                schema = self._file.schema_arrow
                schema = pa.schema([schema.field(n) for n in self._names])
                with pa.ipc.new_file(out, schema) as writer:
                    for batch in self._file.iter_batches(columns=self._names):
                        writer.write_table(pa.Table.from_batches([batch]).select(self._names))
            return _Laid(path, LOCAL, self._names)
        finally:
            os.unlink(path)

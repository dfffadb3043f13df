"""The third stage: write a shard's rows and dead letters to work files, check them, create the receipt."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, lossless
from gristmill.arrow.rows import picked
from gristmill.commit import fates
from gristmill.commit import receipt as receipts
from gristmill.commit.fates import KEPT, SCORED, Fates
from gristmill.commit.receipt import Receipt, input_figure
from gristmill.errors import BadJob, BadOutput, RunFailed
from gristmill.files.contract import Files
from gristmill.files.disk import join
from gristmill.job.secret import Secret, scrub_values
from gristmill.process.failure import storable
from gristmill.profiles.columns import Profiling
from gristmill.shards.counts import Counts, summed
from gristmill.sinks.contract import WorkFile
from gristmill.sinks.partition import divided
from gristmill.worker.clock import Clock
from gristmill.worker.kept import KeptRows, Written
from gristmill.worker.matching import Record
from gristmill.worker.outputcolumns import beside, constant, fit, ids_of, keys, places
from gristmill.worker.predict import Scored
from gristmill.worker.prepare import Letter, Prepare
from gristmill.worker.recipe import Output, Recipe, Task


class Uncounted(RunFailed):
    """The counts of a shard do not add up; nothing of it is committed."""


class ShardCommit:
    """One attempt at one shard's output. `add` windows in order, then `finish`; or `abort`."""

    def __init__(self, recipe: Recipe, prepare: Prepare, task: Task, files: Files, clock: Clock | None = None) -> None:
        """`clock`: that of the thread that writes."""
        self._clock = clock or Clock()
        self._recipe = recipe
        self._prepare = prepare
        self._task = task
        self._files = files
        self._earlier = any(p.file.path in recipe.reader.own for p in task.shard.pieces)
        self.nonce = secrets.token_hex(6)
        self._stem = f"part-{task.shard.number:07d}.g{task.generation}"
        self._work = join(task.folder, "work")
        self._rows: Any = None
        self._dead: _DeadLetters | None = None
        self._counts = Counts()
        self._figures: dict[str, float] = {}
        self._errors: dict[str, int] = {}
        self._inputs: dict[str, int] = {}
        self._read: list[str] = []
        self._finished: list[WorkFile] = []
        self._beside: list[WorkFile] = []
        self._record = None if recipe.matching is None else Record()
        self._answers: Any = None
        self._profiling = Profiling(recipe.profiled)

    def add(self, scored: Scored) -> None:
        """Write a window's rows and dead letters."""
        rows = output_rows(scored, self._recipe.output, self._task, self._earlier)
        known = scored.window.fates
        if rows.num_rows:
            self._profiling.add(rows if self._opaque else _with_inputs(rows, scored))
        if known is None:
            self._write(rows, scored.identity.piece)
        else:
            for some in self._followed(scored, known, rows):
                self._write(some.rows, some.piece)
        paths = self._task.paths
        for letter in scored.window.letters:
            self._bury(letter)
        for dead in scored.dead:
            who = scored.window.identity
            path, position = paths[int(who.piece[dead.row])], int(who.position[dead.row])
            self._bury(self._prepare.letter(dead, scored.window.rows, path, position, who.copy(dead.row)))
        self._counts = self._counts + scored.counts
        self._read += scored.window.read
        self.count(scored.figures)
        self._clock.lap("encode")

    def count(self, figures: Mapping[str, float]) -> None:
        """Add figures for the report."""
        for name, value in figures.items():
            self._figures[name] = self._figures.get(name, 0.0) + value

    @property
    def _opaque(self) -> bool:
        """Whether the columns beside those that are written are not known of rows whose answers are kept."""
        return self._recipe.matching is not None and self._recipe.matching.opaque

    def _write(self, rows: pa.Table, piece: np.ndarray) -> None:
        if not rows.num_rows:
            return
        if self._rows is None:
            schema = self._task.schema or rows.schema
            self._rows = self._recipe.sink_format.writer(
                self._files, self._work, self._stem, self.nonce, schema, self._recipe.sink.options
            )
        self._rows.write(rows)
        self._note_inputs(rows, piece)

    def _followed(self, scored: Scored, known: Fates, rows: pa.Table) -> Iterator[Written]:
        """Record what became of a window's source rows; give the rows that were scored, in the order of the source with
        those whose answers are kept among them.
        """
        window, matching = scored.window, self._recipe.matching
        assert self._record is not None and window.origin is not None and matching is not None
        origin = window.origin[scored.place]
        copies = pa.array(scored.identity.copy_texts() if matching.opaque else [], pa.string())
        told = {KEPT: window.sources_kept, SCORED: len(known) - window.sources_kept}
        self._figures = summed([self._figures, told])
        self._record.parts.append(known)
        self._record.made.append(window.origin)
        self._record.written.append(origin)
        self._record.died.append(window.origin[[d.row for d in scored.dead]])
        for some in self._mixed(Written(rows, origin, scored.identity.piece, copies), window.kept):
            self._record.copies.append(some.copies)
            if matching.beside and some.rows.num_rows:
                self._write_answers(some.rows)
            yield some

    def _mixed(self, new: Written, kept: KeptRows | None) -> Iterator[Written]:
        answers = None if kept is None else self._prepare.answers(self._task)
        done = 0
        if kept is not None and answers is not None:
            for some in kept.pieces():
                until = int(np.searchsorted(new.origin, some.origin[-1]))
                old = answers.written(self._task, some)
                self._profiling.add(old.rows if old.beside is None else beside(old.rows, old.beside))
                yield old if until == done else new.sliced(done, until).merged(old)
                done = until
        yield new.sliced(done, len(new.origin))

    def _write_answers(self, rows: pa.Table) -> None:
        output, matching = self._recipe.output, self._recipe.matching
        assert matching is not None
        schema = self._task.schema or rows.schema
        names = matching.taken_over(schema, self._task.answers, output.row_id, output.model_version)
        if self._answers is None:
            self._answers = _Answers(self._files, self._task, self.nonce, rows.select(names).schema)
        self._answers.write(rows.select(names))

    def _recorded(self) -> tuple[WorkFile | None, WorkFile | None]:
        """The finished files by which a later run keeps answers."""
        if self._record is None:
            return None, None
        (known, copies), number = self._record.finished(), self._task.shard.number
        own = [] if self._answers is None else [self._answers.close()]
        self._answers = None
        self._beside += own
        told = fates.write(self._files, self._task.folder, number, self.nonce, known, copies)
        self._beside.append(told)
        return told, own[0] if own else None

    def finish(self) -> Receipt:
        """Sync, re-read and count the files, then create the receipt: the commit point. Returns the valid one."""
        for writer in (self._rows, self._dead):
            if writer is not None:
                self._finished += writer.close()
        self._rows = self._dead = None
        ok = sum(f.rows for f in self._finished if f.role == "rows")
        counts = self._counts + Counts(ok=ok)
        self._clock.lap("close and sync")
        self._check(counts)
        self._clock.lap("read back")
        recorded = self._recorded()
        parts = tuple(receipts.measure(self._files, f, self._task.root) for f in self._finished)
        told, answers = (None if f is None else receipts.measure(self._files, f, self._task.root) for f in recorded)
        self._clock.lap("hash")
        self._files.settle([f.path for f in (*self._finished, *self._beside)])
        figures = {**self._figures, **{k: float(v) for k, v in self._inputs.items()}}
        number, read = self._task.shard.number, tuple(self._read)
        mine = Receipt(
            number,
            self.nonce,
            counts.values(),
            parts,
            figures,
            self._errors,
            read,
            fates=told,
            answers=answers,
            profile=self._profiling.profile(),
        )
        standing = receipts.commit(self._files, join(self._task.folder, "receipts"), mine)
        self._clock.lap("receipt")
        if standing.nonce != self.nonce:
            self.abort()
        return standing

    def abort(self) -> None:
        """Remove what this attempt wrote; its error, if any, is already being reported."""
        for writer in (self._rows, self._dead, self._answers):
            if writer is not None:
                writer.abort()
        for file in (*self._finished, *self._beside):
            with contextlib.suppress(OSError):
                self._files.remove(file.path)

    def _check(self, counts: Counts) -> None:
        wrong = counts.discrepancy()
        planned = self._task.shard.rows if self._task.only is None else None
        if wrong is None and planned is not None and counts.rows_in != planned:
            wrong = f"{planned} rows planned, {counts.rows_in} read"
        buried = sum(f.rows for f in self._finished if f.role == "dead")
        if buried != counts.all_dead:
            wrong = wrong or f"{counts.all_dead} rows died, {buried} dead letters were written"
        for file in self._finished:
            if file.role != "dead":
                with self._files.local(file.path) as path:
                    read_back = self._recipe.sink_format.count(path, file.role)
                if read_back != file.rows:
                    wrong = wrong or f"{file.path}: {file.rows} rows written, {read_back} read back"
        if wrong is not None:
            self.abort()
            raise Uncounted(f"shard {self._task.shard.number}: {wrong}")

    def _bury(self, letter: Letter) -> None:
        if self._dead is None:
            self._dead = _DeadLetters(self._files, self._work, self._stem, self.nonce)
        self._dead.write(letter, self._task, self._recipe.secrets)
        self._errors[letter.error] = self._errors.get(letter.error, 0) + 1

    def _note_inputs(self, rows: pa.Table, piece: np.ndarray) -> None:
        """Count the rows of each file in each part, for the manifest of a sink without tables."""
        if self._recipe.sink_format.tables:
            return
        paths = self._task.paths
        for folder, index in divided(rows, self._recipe.sink.partition_by):
            numbers, counts = np.unique(piece[index], return_counts=True)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                key = input_figure(paths[number], folder)
                self._inputs[key] = self._inputs.get(key, 0) + count


class _Answers:
    """The answers of a shard's rows, in order, as they lie in memory; for sinks whose files have them otherwise."""

    def __init__(self, files: Files, task: Task, nonce: str, schema: pa.Schema) -> None:
        folder = fates.folder(task.folder)
        files.make_folder(folder)
        self._files = files
        self._path = join(folder, f"{task.shard.number:07d}.{nonce}.answers.arrow")
        self._file = files.create(self._path)
        self._writer = pa.ipc.new_file(self._file, schema)
        self._rows = 0

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows)
        self._rows += rows.num_rows

    def close(self) -> WorkFile:
        self._writer.close()
        with self._file:
            self._files.sync(self._file)
        return WorkFile(self._path, "", self._rows, "answers")

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._files.remove(self._path)


class _DeadLetters:
    """A shard's dead letters as JSON lines."""

    def __init__(self, files: Files, folder: str, stem: str, nonce: str) -> None:
        self._files = files
        self._publish = f"_dead/{stem}.jsonl"
        self._path = join(folder, f"dead-{stem}.jsonl.{nonce}.tmp")
        self._file = files.create(self._path)
        self._rows = 0

    def write(self, letter: Letter, task: Task, secrets: tuple[Secret, ...]) -> None:
        body = {**vars(letter), "generation": task.generation, "shard": task.shard.number}
        if secrets:  # the identity stays as it is: retry-dead finds the row by it
            body |= {name: scrub_values(body[name], secrets) for name in ("message", "traceback")}
            row = letter.payload or {}  # whose columns keep their names
            body["payload"] = letter.payload and {name: scrub_values(row[name], secrets) for name in row}
        # Text of the letter itself that UTF-8 cannot hold is written escaped; in the payload, which readers get as
        # JSON, the escape is the text's own.
        told = {name: storable(value) if isinstance(value, str) else value for name, value in body.items()}
        line = json.dumps(told, ensure_ascii=False, allow_nan=True)
        self._file.write(line.encode("utf-8", "backslashreplace") + b"\n")
        self._rows += 1

    def close(self) -> list[WorkFile]:
        with self._file:
            self._files.sync(self._file)
        return [WorkFile(self._path, self._publish, self._rows, "dead")]

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # a full disk refuses buffered data, too
            self._file.close()
        with contextlib.suppress(OSError):
            self._files.remove(self._path)


# ---------------------------------------------------------------- output rows


def output_rows(scored: Scored, output: Output, task: Task, earlier: bool = False) -> pa.Table:
    """The rows as they will be written: id, kept columns, results, version, in this order. Rows of an `earlier` night
    may lack a column that the result has got since, as those of that night which were answered do.
    """
    rows = scored.rows
    after = [n for n in scored.results if task.schema is None or n not in scored.answers]  # made by a post step
    output = output.beside((*task.answers, *after))
    if task.schema is not None and not rows.num_rows:
        return pa.Table.from_batches([], task.schema)
    if task.schema is not None and (doubled := [n for n in scored.results if n in (output.keep or ())]):
        raise BadOutput(
            f"the results of these rows have a column {doubled[0]!r}, which those of the first rows did not, and keep "
            "carries over a column of that name: rename one, or leave it out of keep"
        )
    columns = {n: rows.column(n) for n in output.columns(rows.column_names, scored.results)}
    if not columns and rows.num_rows and output.drop:
        raise BadJob(f"drop names every output column ({', '.join(output.drop)}): nothing is left to write")
    if not columns and rows.num_rows:
        raise BadJob(
            "nothing is left to write: the frames that steps after the model return have none of its answers and no "
            "new column, and keep names none"
        )
    for option, name in (("row_id", output.row_id), ("model_version", output.model_version)):
        if name in columns and name not in scored.results:
            raise BadJob(
                f"{option} names column {name!r}, which the rows already have: give another name, or leave it out of "
                "keep"
            )
    if output.row_id is not None:
        columns = {output.row_id: row_ids(scored, output, task), **columns}
    if output.model_version is not None and output.model_version not in columns:  # the driver refuses such a name
        columns[output.model_version] = constant(output.digest, rows.num_rows)
    ours = (output.row_id, output.model_version)  # source columns of these names are left out
    fields = {f.name: f for f in rows.schema if f.name not in ours}
    schema = pa.schema([fields.get(n, pa.field(n, c.type)) for n, c in columns.items()])
    table = pa.Table.from_arrays(list(columns.values()), schema=schema)
    if task.schema is not None and not table.schema.equals(task.schema):
        lost = [n for n in task.schema.names if n not in columns and n not in (output.keep or ())]
        if lost and rows.num_rows and output.keep is not None and not scored.sparse and not earlier:
            raise BadOutput(f"these rows have no column {lost[0]!r}, which the first rows had: return it for every row")
        table = fit(table, task.schema)
    return table


def _with_inputs(written: pa.Table, scored: Scored) -> pa.Table:
    """The rows as they are written, with the columns beside them that steps and model had and that are not written."""
    names = [n for n in scored.rows.column_names if n not in written.column_names]
    if not names or scored.rows.num_rows != written.num_rows:
        return written
    return beside(written, scored.rows.select(names))


def fitting(rows: pa.Table, schema: pa.Schema, base: pa.Schema) -> pa.Schema:
    """The schema of `rows` as stored, with the types of `base` for columns whose values fit these without loss."""
    for i, f in enumerate(schema):
        at = base.get_field_index(f.name)
        if at >= 0 and not f.type.equals(base.field(at).type):
            with contextlib.suppress(Lossy):  # it differs, which the driver reports
                lossless(rows.column(i), base.field(at).type)
                schema = schema.set(i, f.with_type(base.field(at).type))
    return schema


def row_ids(scored: Scored, output: Output, task: Task) -> pa.Array:
    """Stable ids, of the key columns (or source path and position) and the copy: `ids_of`.

    The same row gets the same id in every run, on every machine, wherever shards are cut. A key is the value that the
    row had when the model was given it, even if the model or a post step replaces that.
    """
    who = scored.identity
    if not scored.rows.num_rows:  # which may lack the key's columns
        return pa.array([], pa.string())
    if not output.key:
        return ids_of(places(task.paths, who.piece, who.position), who.copy_texts())
    for name in output.key:
        if name not in scored.rows.column_names:
            raise BadJob(f"key names column {name!r}: the rows have {', '.join(scored.rows.column_names)}")
    given = scored.window.rows
    names = [n for n in output.key if n in given.column_names]
    had = picked(given.select(names), scored.place) if names else given
    return ids_of(keys([(had if n in names else scored.rows).column(n) for n in output.key]), who.copy_texts())

"""The third stage: write a shard's rows and dead letters to work files, check them, create the receipt."""

from __future__ import annotations

import contextlib
import json
import secrets
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, lossless
from gristmill.arrow.rows import picked
from gristmill.commit import receipt as receipts
from gristmill.commit.receipt import Receipt, input_figure
from gristmill.errors import BadJob, BadOutput, RunFailed
from gristmill.files.contract import Files
from gristmill.files.disk import join
from gristmill.job.secret import Secret, scrub_values
from gristmill.process.failure import storable
from gristmill.profiles.columns import Profiling
from gristmill.shards.counts import Counts
from gristmill.sinks.contract import WorkFile
from gristmill.sinks.partition import divided
from gristmill.worker.identity import said
from gristmill.worker.predict import Scored
from gristmill.worker.prepare import Letter, Prepare
from gristmill.worker.recipe import Output, Recipe, Task


class Uncounted(RunFailed):
    """The counts of a shard do not add up; nothing of it is committed."""


class ShardCommit:
    """One attempt at one shard's output. `add` windows in order, then `finish`; or `abort`."""

    def __init__(self, recipe: Recipe, prepare: Prepare, task: Task, files: Files) -> None:
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
        self._profiling = Profiling(recipe.profiled)

    def add(self, scored: Scored) -> None:
        """Write a window's rows and dead letters."""
        rows = output_rows(scored, self._recipe.output, self._task, self._earlier)
        if rows.num_rows:
            if self._rows is None:
                schema = self._task.schema or rows.schema
                self._rows = self._recipe.sink_format.writer(
                    self._files, self._work, self._stem, self.nonce, schema, self._recipe.sink.options
                )
            self._rows.write(rows)
            self._note_inputs(rows, scored)
            self._profiling.add(_with_inputs(rows, scored))
        paths = self._task.paths
        for letter in scored.window.letters:
            self._bury(letter)
        for dead in scored.dead:
            who = scored.window.identity
            path, position = paths[int(who.piece[dead.row])], int(who.position[dead.row])
            self._bury(self._prepare.letter(dead, scored.window.rows, path, position, who.copy(dead.row)))
        self._counts = self._counts + scored.counts
        self._read += scored.window.read
        for name, value in scored.figures.items():
            self._figures[name] = self._figures.get(name, 0.0) + value

    def finish(self) -> Receipt:
        """Sync, re-read and count the files, then create the receipt: the commit point. Returns the valid one."""
        for writer in (self._rows, self._dead):
            if writer is not None:
                self._finished += writer.close()
        self._rows = self._dead = None
        ok = sum(f.rows for f in self._finished if f.role == "rows")
        counts = self._counts + Counts(ok=ok)
        self._check(counts)
        parts = tuple(receipts.measure(self._files, f, self._task.root) for f in self._finished)
        self._files.settle([f.path for f in self._finished])
        figures = {**self._figures, **{k: float(v) for k, v in self._inputs.items()}}
        number, read = self._task.shard.number, tuple(self._read)
        mine = Receipt(
            number, self.nonce, counts.values(), parts, figures, self._errors, read, profile=self._profiling.profile()
        )
        standing = receipts.commit(self._files, join(self._task.folder, "receipts"), mine)
        if standing.nonce != self.nonce:
            self.abort()
        return standing

    def abort(self) -> None:
        """Remove what this attempt wrote; its error, if any, is already being reported."""
        for writer in (self._rows, self._dead):
            if writer is not None:
                writer.abort()
        for file in self._finished:
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

    def _note_inputs(self, rows: pa.Table, scored: Scored) -> None:
        """Count the rows of each file in each part, for the manifest of a sink without tables."""
        if self._recipe.sink_format.tables:
            return
        paths = self._task.paths
        for folder, index in divided(rows, self._recipe.sink.partition_by):
            numbers, counts = np.unique(scored.identity.piece[index], return_counts=True)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                key = input_figure(paths[number], folder)
                self._inputs[key] = self._inputs.get(key, 0) + count


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
    for option, name in (("row_id", output.row_id), ("model_version", output.model_version)):
        if name in columns and name not in scored.results:
            raise BadJob(
                f"{option} names column {name!r}, which the rows already have: give another name, or leave it out of "
                "keep"
            )
    if output.row_id is not None:
        columns = {output.row_id: row_ids(scored, output, task), **columns}
    if output.model_version is not None and output.model_version not in columns:  # the driver refuses such a name
        columns[output.model_version] = _constant(output.digest, rows.num_rows)
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
    given = scored.rows.select(names)
    columns, fields = [*written.columns, *given.columns], [*written.schema, *given.schema]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def fit(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with the planned columns and types, null for columns it lacks. Raises BadOutput for a column that is not
    planned, and for a value that does not fit without loss.
    """
    if new := [n for n in table.column_names if n not in schema.names]:
        raise BadOutput(
            f"these rows have a column {new[0]!r}, which the first rows did not have ({', '.join(schema.names)}): "
            "return it for every row, or none"
        )
    columns = []
    for f in schema:
        if f.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, f.type))
            continue
        column = table.column(f.name)
        try:
            columns.append(lossless(column, f.type))
        except Lossy as e:
            raise BadOutput(
                f"column {f.name!r} does not fit the planned {f.type}: {e}; return one type for all rows (returns= "
                "declares it)"
            ) from e
    return pa.Table.from_arrays(columns, schema=schema)


def fitting(rows: pa.Table, schema: pa.Schema, base: pa.Schema) -> pa.Schema:
    """The schema of `rows` as stored, with the types of `base` for columns whose values fit these without loss."""
    for i, f in enumerate(schema):
        at = base.get_field_index(f.name)
        if at >= 0 and not f.type.equals(base.field(at).type):
            with contextlib.suppress(Lossy):  # it differs, which the driver reports
                lossless(rows.column(i), base.field(at).type)
                schema = schema.set(i, f.with_type(base.field(at).type))
    return schema


def _constant(value: str, rows: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, dtype=np.int32)), pa.array([value]))


def row_ids(scored: Scored, output: Output, task: Task) -> pa.Array:
    """Stable ids: 32 hex digits of blake2b over the key columns (or source path and position) and the copy.

    The same row gets the same id in every run, on every machine, wherever shards are cut. A key is the value that the
    row had when the model was given it, even if the model or a post step replaces that.
    """
    import hashlib

    who = scored.identity
    if not scored.rows.num_rows:  # which may lack the key's columns
        return pa.array([], pa.string())
    if output.key:
        for name in output.key:
            if name not in scored.rows.column_names:
                raise BadJob(f"key names column {name!r}: the rows have {', '.join(scored.rows.column_names)}")
        given = scored.window.rows
        names = [n for n in output.key if n in given.column_names]
        had = picked(given.select(names), scored.place) if names else given
        keys = [said((had if n in names else scored.rows).column(n)) for n in output.key]
        texts = [json.dumps(key, default=str, ensure_ascii=False) for key in zip(*keys, strict=True)]
    else:
        paths = task.paths
        texts = [f"{paths[p]}\0{n}" for p, n in zip(who.piece.tolist(), who.position.tolist(), strict=True)]
    return pa.array(
        [
            hashlib.blake2b(f"{text}\0{copy or 0}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
            for text, copy in zip(texts, who.copy_texts(), strict=True)
        ],
        pa.string(),
    )

"""Reducing: a function of the user's reads all rows that are about to be published, as a stream, and writes the one
final file, index or report. What it wrote is committed by a receipt, and published with the rows.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Described, Live
from gristmill.commit.generation import Generation, decode_schema
from gristmill.commit.publication import Publication
from gristmill.commit.receipt import Receipt
from gristmill.errors import RunFailed
from gristmill.files.contract import Files
from gristmill.files.disk import join
from gristmill.fingerprint.digests import digest_of
from gristmill.process import contained
from gristmill.process.contained import called
from gristmill.process.failure import storable
from gristmill.result.reading import dataset_of, kept
from gristmill.sinks.contract import WorkFile
from gristmill.sinks.formats import sink_format
from gristmill.sinks.npy import vector_column
from gristmill.values import dataclass

FOLDER = "_reduced"
BATCH_ROWS = 16_384
OF_ROWS, OF_CODE = "rows", "code"  # in the receipt: what the files are made of


@dataclass(frozen=True)
class Reducer:
    """The function of a job's `reduce`: its name, and the digest of its code."""

    name: str
    call: Callable[[pa.RecordBatchReader, str], Any]
    code: str

    def said(self) -> dict[str, str]:
        """What the result says of it."""
        return {"name": self.name, "code": self.code}


@dataclass(frozen=True)
class Reduction:
    """All rows of a result, `live`, as they are about to be published with a generation; `about` describes them. What
    a person should know is told, as a warning.
    """

    generation: Generation
    live: Sequence[Live]
    about: Described
    reducer: Reducer
    tell: Callable[[str], None]

    def receipt(self) -> Receipt:
        """The receipt of the files that the function made of these rows; if it was run before, it is not again. Raises
        RunFailed if it raises, or writes nothing.
        """
        files, folder = self.generation.files, self.generation.reduced
        of = {OF_ROWS: digest_of_rows(self.live), OF_CODE: self.reducer.code}
        while True:
            found = receipts.standing(folder, files)
            lost = {r.shard for r in receipts.lost(files, self.generation.root, self.generation.work, found.values())}
            for number, receipt in found.items():
                if dict(receipt.of) == of and number not in lost:
                    return receipt
            if (made := self._made(max(found, default=-1) + 1, of)) is not None:
                return made

    def _made(self, number: int, of: Mapping[str, str]) -> Receipt | None:
        """Run the function and commit what it wrote; None if another run has taken the number."""
        files, root = self.generation.files, self.generation.root
        nonce = secrets.token_hex(6)
        written = self._written(number, nonce)
        parts = tuple(receipts.measure(files, w, root) for w in written)
        files.settle([w.path for w in written])
        files.make_folder(self.generation.reduced)
        mine = Receipt(number, nonce, (0,) * 8, parts, of=of)
        standing = receipts.commit(files, self.generation.reduced, mine)
        if standing.nonce == nonce:
            return standing
        for w in written:
            files.remove(w.path)
        return None

    def _written(self, number: int, nonce: str) -> list[WorkFile]:
        out: list[WorkFile] = []
        with tempfile.TemporaryDirectory(prefix="gristmill-") as folder:
            self._call(folder)
            for place, (name, path) in enumerate(self._found(folder)):
                work = join(self.generation.work, f"reduced-{number:03d}-{place:05d}.{nonce}.tmp")
                with open(path, "rb") as source, self.generation.files.create(work) as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                    self.generation.files.sync(file)
                visible = f"{FOLDER}/g{self.generation.number}.{number}/{name}"
                out.append(WorkFile(work, visible, 0, "reduced"))
        return out

    def _call(self, folder: str) -> None:
        name = self.reducer.name
        try:
            with self.rows() as rows:
                called(self.reducer.call, rows, folder)
        except Exception as e:
            raise RunFailed(
                f"reduce {name} failed{_where(e)}: {type(e).__name__}: {e}; nothing new was published. Mend it and run "
                "the same command again: nothing is scored again"
            ) from e

    def _found(self, folder: str) -> list[tuple[str, str]]:
        """What was written, by its name in the folder. Raises RunFailed for nothing, and for files that look like rows
        of the result.
        """
        form, name = sink_format(self.about.sink_format), self.reducer.name
        paths = sorted(self._walked(folder))
        names = [os.path.relpath(path, folder).replace(os.sep, "/") for path in paths]
        if not names:
            raise RunFailed(f"reduce {name} wrote no file into the folder that it was given; nothing new was published")
        for one in names:
            if form.tables and one.endswith(form.suffixes):
                raise RunFailed(
                    f"reduce {name} wrote {one}, which a pattern such as **/*{form.suffixes[0]} would find among the "
                    "rows of this sink: give it another suffix (.arrow, .csv, …); nothing new was published"
                )
        return list(zip(names, paths, strict=True))

    def _walked(self, folder: str) -> Iterator[str]:
        """The files below the folder. Raises RunFailed for what cannot be published."""
        for where, folders, some in os.walk(folder, onerror=_raised):
            for path in (os.path.join(where, name) for name in [*folders, *some]):
                shown = storable(os.path.relpath(path, folder))
                if shown != os.path.relpath(path, folder):
                    why = "whose name is not valid UTF-8"
                elif os.path.islink(path) and os.path.isdir(path):
                    why = "a link to a folder, whose files would not be in the result: copy them"
                elif not (os.path.isfile(path) or os.path.isdir(path)):
                    why = "which is neither a file nor a folder, or a link to nothing"
                else:
                    continue
                raise RunFailed(f"reduce {self.reducer.name} wrote {shown}, {why}; nothing new was published")
            if not folders and not some and where != folder:
                empty = os.path.relpath(where, folder)
                self.tell(f"reduce {self.reducer.name} left the folder {empty} empty: only files are in a result")
            yield from (os.path.join(where, name) for name in some)

    def rows(self) -> pa.RecordBatchReader:
        """All rows in the order of the result, in memory a few batches at a time; for npy, vectors among them."""
        root, files = self.generation.root, self.generation.files
        schema = decode_schema(self.about.output_schema)
        form = sink_format(self.about.sink_format)
        if form.tables:
            parts = [f for f in self.live if f.role == "rows"]
            dataset = dataset_of(root, files, parts, self.about)
            some = dataset.scanner(batch_size=BATCH_ROWS, batch_readahead=2, fragment_readahead=1)
            return some.to_reader()
        return pa.RecordBatchReader.from_batches(schema, self._with_vectors(schema, files))

    def _with_vectors(self, schema: pa.Schema, files: Files) -> Iterator[pa.RecordBatch]:
        root = self.generation.root
        vectors, beside = ([f for f in self.live if f.role == role] for role in ("rows", "ids"))
        if not vectors:
            return
        options = json.loads(self.about.fingerprint.options.get("sink.options", "{}"))
        column = vector_column(schema, options.get("vector"))
        others = [n for n in schema.names if n != column]  # an earlier file may lack some, or have narrower ones
        dataset = dataset_of(root, files, beside, self.about)
        for path, fragment in zip(kept(root, vectors, files), dataset.get_fragments(), strict=True):
            with files.local(path) as local:
                matrix = np.load(local, mmap_mode="r")
                at = 0
                for batch in fragment.to_batches(dataset.schema, columns=others, batch_size=BATCH_ROWS):
                    rows = np.ascontiguousarray(matrix[at : at + batch.num_rows])
                    at += batch.num_rows
                    made = pa.FixedSizeListArray.from_arrays(rows.reshape(-1), matrix.shape[1])
                    held = {**dict(zip(batch.schema.names, batch.columns, strict=True)), column: made}
                    yield pa.RecordBatch.from_arrays([held[f.name].cast(f.type) for f in schema], schema=schema)


def digest_of_rows(live: Sequence[Live]) -> str:
    """A digest of the rows of a result, in their order: of its files."""
    return digest_of([f.sha256 for f in live if f.role in ("rows", "ids")])


def files_of(result: Publication) -> dict[str, str]:
    """The files that `reduce` made of a result, by the names that it gave them: paths that stay readable, as those of
    `gm.read` do.
    """
    parts = [f for f in result.live() if f.role == "reduced"]
    paths = [join(result.root, f.name) for f in parts]
    return {f.name.split("/", 2)[2]: path for f, path in zip(parts, paths, strict=True)}


def _raised(error: OSError) -> None:
    raise error


def _where(error: BaseException) -> str:
    """The line of the user's code that raised."""
    ours = (__file__, contained.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""

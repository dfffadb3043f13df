"""Reading what a sink holds: the rows of its latest publication, and its dead letters."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.schemas import nullable
from gristmill.commit.documents import Described, Live
from gristmill.commit.generation import Generation, decode_schema, generations, pending
from gristmill.commit.publication import Publication, latest, published
from gristmill.commit.publish import wrong_size
from gristmill.commit.receipt import standing
from gristmill.errors import BadJob, BadSource, CorruptStore, did_you_mean
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL, first_whole, join, sizes_of
from gristmill.process.extras import require
from gristmill.process.failure import storable
from gristmill.sinks.contract import Role
from gristmill.sinks.formats import sink_format


def read(root: str, files: Files) -> Any:
    """The rows of a sink, a pyarrow Dataset: see `gm.read`. Raises BadSource."""
    return rows_of(published(root, files))


def rows_of(result: Publication) -> Any:
    """The rows of a result, a pyarrow Dataset: see `gm.read`. Raises BadSource for a format without tables."""
    if not sink_format(result.body.sink_format).tables:
        raise BadSource(
            f"{result.root}: a {result.body.sink_format} sink has no tables: numpy.load the output_path files that its "
            "manifest.parquet names, in that order; part-N.ids.parquet has the other columns of part-N.npy"
        )
    return readable_dataset(result, "rows")


def beside(result: Publication) -> Role:
    """The role of the files that hold a result's columns; without tables, all columns but its vectors."""
    return "rows" if sink_format(result.body.sink_format).tables else "ids"


def readable_dataset(result: Publication, role: Role) -> Any:
    """A pyarrow Dataset of a result's files in one role: its "rows", or the "ids" beside npy's vectors."""
    parts = [f for f in result.live() if f.role == role]
    return dataset_of(result.root, result.files, parts, result.body)


def dataset_of(root: str, files: Files, parts: Sequence[Live], about: Described) -> Any:
    """A pyarrow Dataset of table files, published or not; `about` is what plans and publications record of them:
    output_schema, partition_by, sink_format.
    """
    import pyarrow.dataset as ds

    schema = nullable(decode_schema(about.output_schema))
    paths = readable(root, parts, files)
    visible = [f for f, path in zip(parts, paths, strict=True) if path == join(root, f.name)]
    if files.free_links and (harmed := _cut(root, visible, files, gone=False)) is not None:
        raise harmed  # now: of a file that became longer, no reader would notice
    keys = [k for k in about.partition_by if k in schema.names]  # without rows they may be missing
    inside = pa.schema([f for f in schema if f.name not in keys])
    sizes = {path: f.bytes for path, f in zip(paths, parts, strict=True)}
    form, system = sink_format(about.sink_format).dataset(opener(root, parts, files), inside, sizes)
    hive = ds.HivePartitioning(pa.schema([schema.field(k) for k in keys]))
    fragments = [
        form.make_fragment(path, system, hive.parse(f.name) if keys else None)
        for path, f in zip(paths, parts, strict=True)
    ]
    rows = _rows()(fragments, schema, form, system)
    rows.harmed = functools.partial(_harmed, root, parts, files)
    return rows


def _harmed(root: str, parts: Sequence[Live], files: Files) -> BadSource | None:
    """The error if one of these files is not what was published: once they could not be read."""
    if (cut := _cut(root, parts, files)) is not None:
        return cut
    opened = zip(parts, readable(root, parts, files), strict=True)
    return next((BadSource(why) for f, path in opened if (why := spoilt(root, f, path, files)) is not None), None)


def spoilt(root: str, f: Live, path: str, files: Files) -> str | None:
    """What is wrong if the file that readers open at `path` for `f` is not what was published, and the way out. Reads
    all of it.
    """
    visible = join(root, f.name)
    if first_whole(files, [path], f.sha256) is not None:
        return None
    if path != visible and first_whole(files, [visible], f.sha256) is not None:
        return (
            f"{path}: is not what was published, but a damaged copy of {f.name}, which is: remove the copy; readers "
            f"then open {f.name}"
        )
    also = f" (and remove {path}, its copy)" if path != visible and files.free_links and not same(path, visible) else ""
    return (
        f"{visible}: is not what was published: put it back{also}, or score all rows again with --restart "
        "(restart=True); gristmill verify lists every damaged file"
    )


def same(one: str, other: str) -> bool:
    """Whether both are names of one file of a disk."""
    try:
        return os.path.samefile(one, other)
    except FileNotFoundError:
        return False


def _cut(root: str, parts: Sequence[Live], files: Files, *, gone: bool = True) -> BadSource | None:
    """The error if one of these files is not as long as it was when written, or if one is `gone`."""
    sizes = sizes_of(root, {name for f in parts for name in (f.name, f.work)}, files)
    for f in parts:
        if f.bytes not in (there := [sizes[name] for name in (f.work, f.name) if name in sizes]):
            if not (there or gone):
                continue
            if not there and _replaced(root, f, files):
                return BadSource(f"{root}: a later result has replaced these rows since they were opened: read again")
            what = wrong_size(max(there, default=None), f.bytes)
            return BadSource(
                f"{join(root, f.name)}: is published, but {what}: put it back, or score all rows again with --restart "
                "(restart=True); gristmill verify lists every damaged file"
            )
    return None


def _replaced(root: str, file: Live, files: Files) -> bool:
    """Whether a file is no longer of what is published."""
    with contextlib.suppress(CorruptStore):
        now = latest(root, files)
        return now is not None and file.work not in {f.work for f in now.live()}
    return False


_UNREADABLE = (pa.ArrowException, OSError, TypeError, CorruptStore)  # what damaged files make pyarrow raise


@functools.cache
def _rows() -> type:
    """The class of what `gm.read` returns; made on first use, as pyarrow.dataset is slow to import."""
    import pyarrow.dataset as ds

    class Rows(ds.FileSystemDataset):  # type: ignore[misc]
        """Published rows: a pyarrow Dataset, with conversions out of Arrow. `to_table` and `to_batches` raise
        BadSource for a file that was damaged after it was published, as far as its format shows that: all of Parquet's
        pages have checksums.
        """

        harmed: Callable[[], BadSource | None] = staticmethod(lambda: None)

        def filter(self, expression: Any) -> Rows:
            """As of any Dataset."""
            some: Rows = super().filter(expression)
            some.harmed = self.harmed
            return some

        def to_table(self, *args: Any, **options: Any) -> pa.Table:
            """As of any Dataset."""
            try:
                return super().to_table(*args, **options)
            except _UNREADABLE as e:
                raise self._why(e, args, options) from None

        def to_batches(self, *args: Any, **options: Any) -> Iterator[pa.RecordBatch]:
            """As of any Dataset."""
            try:
                yield from super().to_batches(*args, **options)
            except _UNREADABLE as e:
                raise self._why(e, args, options) from None

        def _why(self, error: Exception, args: Sequence[Any], options: Mapping[str, Any]) -> Exception:
            """What is raised for an error: of a question that fails without any rows, too, that itself. Else the files
            are read again, all of them.
            """
            try:
                ds.dataset(pa.Table.from_batches([], self.schema)).to_table(*args, **options)
            except _UNREADABLE:
                return error
            return self.harmed() or error

        def to_pandas(self, columns: list[str] | None = None) -> Any:
            """A pandas DataFrame of the rows, or of some columns of them."""
            require("pandas", "pandas", "to_pandas()")
            return self._some(columns).to_pandas()

        def to_polars(self, columns: list[str] | None = None) -> Any:
            """A polars DataFrame of the rows, or of some columns of them."""
            return require("polars", "polars", "to_polars()").from_arrow(self._some(columns))

        def _some(self, columns: list[str] | None) -> pa.Table:
            """These columns, or all. Raises BadJob for one that there is not."""
            for column in () if columns is None else columns:
                self._check(column)
            return self.to_table(columns=columns)

        def _check(self, column: str) -> None:
            if column not in self.schema.names:
                has = ", ".join(self.schema.names)
                raise BadJob(f"there is no column {column!r}: it has {has}{did_you_mean(column, self.schema.names)}")

        def to_numpy(self, column: str) -> np.ndarray:
            """One column as an array, the first axis the rows: vectors are [rows, n]. Raises BadJob for no column."""
            from gristmill.models.conversion import to_numpy

            self._check(column)
            return to_numpy(self.to_table(columns=[column]).column(0))

    return Rows


def opener(root: str, parts: Sequence[Live], files: Files) -> Any:
    """The pyarrow file system that opens the files of a result, even after the next one has replaced it."""
    import pyarrow.fs as pafs

    return files.arrow({join(root, f.name): join(root, f.work) for f in parts}) or pafs.LocalFileSystem()


def readable(root: str, parts: Sequence[Live], files: Files) -> list[str]:
    """For each file, a path that still holds it after the next result is published: its work file, if that is kept
    beside the visible name; a sink that was copied without its `_gristmill` has only the latter.
    """
    return kept(root, parts, files) if files.free_links else [join(root, f.name) for f in parts]


def kept(root: str, parts: Sequence[Live], files: Files) -> list[str]:
    """For each file, its work file, if that still exists, as long as it was written, else its visible name: a file that
    was damaged under both names may have been put back under the one that people see.
    """
    whole = files.as_long(root, ((f.work, f.bytes) for f in parts))
    return [join(root, f.work if same else f.name) for f, same in zip(parts, whole, strict=True)]


DEAD = pa.schema(
    [
        ("source", pa.string()),
        ("position", pa.int64()),
        ("copy", pa.string()),
        ("copies", pa.int64()),
        ("digest", pa.string()),
        ("stage", pa.string()),
        ("step", pa.string()),
        ("error", pa.string()),
        ("message", pa.string()),
        ("traceback", pa.string()),
        ("payload", pa.string()),
        ("generation", pa.int64()),
        ("shard", pa.int64()),
    ]
)


def dead(root: str, files: Files, generation: int | None = None) -> pa.Table:
    """The dead letters of a sink, schema DEAD: see `gm.dead`."""
    begun = unfinished(root, files)
    if begun is not None and (begun.predecessor == 0 or begun.number == generation):
        return committed_letters(begun)
    return dead_letters(letters_of(root, published(root, files).live(), files), files)


def committed_letters(begun: Generation) -> pa.Table:
    """The dead letters of the shards that an unfinished generation has committed."""
    parts = [part for done in standing(begun.receipts, begun.files).values() for part in done.parts]
    return dead_letters([join(begun.root, p.work) for p in parts if p.role == "dead"], begun.files)


def letters_of(root: str, live: Sequence[Live], files: Files) -> list[str]:
    """Paths of the dead-letter files among the files of a result; readers may have cleared away the visible ones.
    Raises CorruptStore for one that was truncated.
    """
    dead = [f for f in live if f.role == "dead"]
    sizes = sizes_of(root, {name for f in dead for name in (f.name, f.work)}, files)
    found = [next((n for n in (f.work, f.name) if sizes.get(n) == f.bytes), None) for f in dead]
    for f, name in zip(dead, found, strict=True):
        if name is None:
            raise _no_letters(join(root, f.name), "was cut" if f.name in sizes else "is gone")
    return [join(root, name) for name in found if name is not None]


def _no_letters(name: str, why: str) -> CorruptStore:
    return CorruptStore(
        f"{name}: holds dead letters of the result, but the file {why}: put it back, or score all rows again with "
        "--restart (restart=True)"
    )


def unfinished(root: str, files: Files = LOCAL) -> Generation | None:
    """The generation that may become the next result and has a plan; None if there is none."""
    found = latest(root, files)
    begun = pending(generations(root, files), 0 if found is None else found.number)
    return begun if begun is not None and begun.planned else None


def dead_letters(paths: Sequence[str], files: Files = LOCAL) -> pa.Table:
    """Dead-letter files as a table, schema DEAD. Raises CorruptStore for one that is gone or was truncated."""
    rows = []
    for name in paths:
        try:
            with files.local(name) as path, open(path, encoding="utf-8") as file:
                lines = file.readlines()
        except FileNotFoundError:
            raise _no_letters(name, "is gone") from None
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                raise _no_letters(name, "was cut") from None
            row["payload"] = json.dumps(row.get("payload"), ensure_ascii=False)
            rows.append({n: storable(v) if isinstance(v, str) else v for n, v in row.items()})
    return pa.Table.from_pylist(rows, schema=DEAD)

"""Spark tables as source and sink. A job that names one is turned into a job over files: a source becomes the files of
one snapshot, which workers read by position; a sink becomes a folder beside the table, which is then pointed at its
files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from gristmill.commit.generation import decode_schema
from gristmill.commit.publication import published
from gristmill.engines.spark_session import first_line, session
from gristmill.errors import BadJob, BadSource, RunFailed
from gristmill.files.disk import LOCAL, META
from gristmill.job.job import JobSpec, Sink, Source
from gristmill.job.options import SparkOptions
from gristmill.job.secret import reveal
from gristmill.job.uris import local_path
from gristmill.process import machine
from gristmill.process.scratch import passing

SCHEME = "spark://"
_NAME = re.compile(r"[\w-]+(\.[\w-]+){0,2}")


@dataclass(frozen=True)
class Tables:
    """A job whose tables have become files and folders, and the sink's table."""

    spec: JobSpec
    sink: TableSink | None = None

    def settle(self) -> None:
        """Point the sink's table at what is published, in one step of the catalog. Idempotent."""
        if self.sink is not None:
            self.sink.settle()


@contextlib.contextmanager
def opened(spec: JobSpec) -> Iterator[Tables]:
    """The job without Spark tables. If it names some, a session is open while inside: the engine's, the one of this
    process, or a new one.

    Raises BadSource for a table that does not exist, BadJob for one that cannot be a sink.
    """
    from_table = any(u.startswith(SCHEME) for u in spec.source.uri)
    to_table = spec.sink is not None and spec.sink.uri.startswith(SCHEME)
    if not (from_table or to_table):
        yield Tables(spec)
        return
    with contextlib.ExitStack() as stack:
        spark = stack.enter_context(_session(spec))
        sink = None
        if to_table:
            assert spec.sink is not None
            sink = TableSink(spark, spec.sink)
            spec = replace(spec, sink=sink.folder_sink)
        if from_table:
            spec = replace(spec, source=_of_files(spark, spec, stack))
        yield Tables(spec, sink)


def _session(spec: JobSpec) -> Any:
    options = replace(spec.engine, options=reveal(spec.engine.options)).own()
    if not isinstance(options, SparkOptions):
        options = SparkOptions()
    if options.session is None:  # tables outlive a session only in a catalog that is not in memory
        options = replace(options, conf={"spark.sql.catalogImplementation": "hive", **options.conf})
    workers = spec.engine.workers
    return session(options, workers if isinstance(workers, int) and workers else machine.cores())


def name_of(uri: str) -> str:
    """`db.table` of `spark://db.table`, quoted for SQL. Raises BadJob for anything that is not a table name."""
    name = uri.removeprefix(SCHEME)
    if not _NAME.fullmatch(name):
        raise BadJob(f"{uri}: write a table as spark://db.table, with letters, digits, _ and - in its names")
    return ".".join(f"`{part}`" for part in name.split("."))


def _described(spark: Any, name: str) -> dict[str, str]:
    """What the catalog says about a table; empty if there is none."""
    if not spark.catalog.tableExists(name):
        return {}
    return {row[0]: row[1] for row in spark.sql(f"DESCRIBE TABLE EXTENDED {name}").collect()}


def _is_plain(about: dict[str, str]) -> bool:
    """Whether a table's rows are those of its Parquet files and nothing else."""
    hive = about.get("Provider", "").lower() == "hive" and "Parquet" in about.get("Serde Library", "")
    return (about.get("Provider", "").lower() == "parquet" or hive) and "# Partition Information" not in about


# ---------------------------------------------------------------- source


def _of_files(spark: Any, spec: JobSpec, stack: contextlib.ExitStack) -> Source:
    folder = None if spec.sink is None else os.path.join(_local(spec.sink.uri), META, "inputs")
    if folder is None:
        folder = stack.enter_context(passing())
    paths: list[str] = []
    for uri in spec.source.uri:
        paths += _snapshot(spark, uri, folder) if uri.startswith(SCHEME) else [uri]
    return replace(spec.source, uri=tuple(paths), format="parquet")


def _local(uri: str) -> str:
    if "://" in uri.removeprefix("file://"):
        raise BadJob(f"sink {uri}: with a Spark table as source, the sink must be a folder that all workers reach")
    return local_path(uri)


def _snapshot(spark: Any, uri: str, folder: str) -> list[str]:
    """Files that hold the rows of a table as they are now: its own files, if they are all there is to it."""
    name = name_of(uri)
    if not spark.catalog.tableExists(name):
        raise BadSource(f"{uri}: Spark's catalog has no such table{_near(spark, uri)}")
    spark.catalog.refreshTable(name)  # a session caches its list of a table's files: others may have written since
    table = spark.table(name)
    about = _described(spark, name)
    if _is_plain(about):
        files = sorted(table.inputFiles())
        if files and set(spark.read.parquet(files[0]).columns) == set(table.columns):
            return [_path(f) for f in files]
    return [_materialised(spark, table, uri, folder)]


def _near(spark: Any, uri: str) -> str:
    database = uri.removeprefix(SCHEME).rpartition(".")[0] or spark.catalog.currentDatabase()
    if not spark.catalog.databaseExists(database):
        return f": it has no database {database!r}"
    names = [t.name for t in spark.catalog.listTables(database)]
    return f": {database} holds {', '.join(names[:8]) or 'none'}"


def _path(uri: str) -> str:
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return unquote(parts.path)
    return re.sub(r"^s3[an]://", "s3://", unquote(uri))


def _materialised(spark: Any, table: Any, uri: str, folder: str) -> str:
    """A view, or a table of another format, written once as Parquet: a folder named by the content.

    A resumed run finds its rows there; if they have changed since, the name differs, and the run is refused as for any
    changed input. The content is identified by the sum of the rows' 64-bit hashes.
    """
    from pyspark.sql import functions as f

    micro = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"  # Spark's default stops at milliseconds
    text = f.to_json(f.struct("*"), {"timestampFormat": f"{micro}XXX", "timestampNTZFormat": micro})
    row = f.xxhash64(text).cast("decimal(38,0)")
    total, count = table.agg(f.sum(row), f.count(f.lit(1))).first()
    content = json.dumps([table.schema.json(), str(total), count])
    name = f"{uri.removeprefix(SCHEME)}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    target = os.path.join(folder, name)
    if not os.path.isdir(target):
        temporary = f"{target}.{secrets.token_hex(4)}.tmp"
        os.makedirs(folder, exist_ok=True)
        table.write.parquet(_uri(temporary))
        _check_rows(temporary, count, uri)
        try:
            os.rename(temporary, target)
        except OSError:  # another run has written the same
            shutil.rmtree(temporary)
    return target


def _check_rows(folder: str, wanted: int, uri: str) -> None:
    import pyarrow.dataset as ds

    found = ds.dataset(folder, format="parquet").count_rows() if os.path.isdir(folder) else 0
    if found != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        raise BadSource(
            f"{uri}: {found} of {wanted} rows of its snapshot are in {folder}: it changes while it is read, or the "
            "folder is not shared with Spark's executors"
        )


def _uri(path: str) -> str:
    return "file://" + quote(path)


# ---------------------------------------------------------------- sink


_FOLDERS: dict[str, str] = {}  # of tables this process has opened, so that looking at a result starts no session


def folder_of(sink: Sink) -> str:
    """The folder beside a sink's table that holds its runs. Starts a session if this process has not opened the table
    before and the sink does not set `storage: {staging: …}`.
    """
    if sink.uri not in _FOLDERS and "staging" not in sink.storage:
        with session(SparkOptions(conf={"spark.sql.catalogImplementation": "hive"})) as spark:
            return TableSink(spark, sink).folder_sink.uri
    return _FOLDERS.get(sink.uri) or os.path.join(_staging(sink), "run")


def _staging(sink: Sink) -> str:
    table = sink.uri.removeprefix(SCHEME)  # jobs that share a profile share the staging folder
    return os.path.join(os.path.abspath(str(reveal(sink.storage)["staging"])), f"{table}.gristmill")


class TableSink:
    """A table that a job replaces. Its runs are in `folder_sink`; each result gets a folder of its own, at which the
    table is then pointed, so that a query sees either the old rows or the new ones. The previous folder is kept for
    running queries.

    The table is created if there is none; an existing one must be Parquet, unpartitioned, with the same columns.
    """

    def __init__(self, spark: Any, sink: Sink) -> None:
        self._spark = spark
        self._uri = sink.uri
        self._name = name_of(sink.uri)
        self._refuse(sink)
        self._base = _staging(sink) if "staging" in sink.storage else self._beside()
        self.folder_sink = replace(
            sink,
            uri=os.path.join(self._base, "run"),
            format="parquet",
            options={**sink.options, "timestamps": "us"},  # the unit of Spark's timestamps
            storage={k: v for k, v in sink.storage.items() if k != "staging"},
        )
        _FOLDERS[sink.uri] = self.folder_sink.uri

    def _refuse(self, sink: Sink) -> None:
        about = _described(self._spark, self._name)
        if sink.joins or sink.sort_by or sink.index or sink.format not in (None, "parquet"):
            raise BadJob(
                f"sink {sink.uri}: a table has no format, partition_by, sort_by, files, merge or index: leave them out"
            )
        if about.get("Type") == "VIEW" or (about and not _is_plain(about)):
            kind = "a view" if about.get("Type") == "VIEW" else f"{about.get('Provider')}, or partitioned"
            raise BadJob(
                f"sink {sink.uri}: is {kind}; only unpartitioned Parquet tables are replaced in one step: write to a "
                "folder, then insert from it"
            )

    def _beside(self) -> str:
        database, _, table = self._uri.removeprefix(SCHEME).rpartition(".")
        catalog = self._spark.catalog
        database = database or catalog.currentDatabase()
        if not catalog.databaseExists(database):
            raise BadJob(f"sink {self._uri}: Spark's catalog has no database {database!r}: create it first")
        where = catalog.getDatabase(database).locationUri
        if urlsplit(where).scheme not in ("", "file"):
            raise BadJob(
                f"sink {self._uri}: its database is at {where}: give storage: {{staging: FOLDER}}, a folder that all "
                "workers reach"
            )
        return os.path.join(_path(where) if where.startswith("file:") else where, f"{table}.gristmill")

    def settle(self) -> None:
        """Point the table at the live result, under the lease. Raises SinkBusy if another run has begun: it
        will do so.
        """
        with LOCAL.lease(self._uri, os.path.join(self.folder_sink.uri, META), lambda _: None):
            self._settle()

    def _settle(self) -> None:
        result = published(self.folder_sink.uri)
        body, live = result.body, result.live()
        # Named by content: generation numbers restart if the folder of the runs was removed or restored from a backup.
        held = json.dumps([body.output_schema, *((f.name, f.sha256) for f in live if f.role == "rows")])
        name = f"data-g{body.generation:04d}-{hashlib.sha256(held.encode()).hexdigest()[:16]}"
        folder = os.path.join(self._base, name)
        self._fill(
            folder, [os.path.join(self.folder_sink.uri, f.name) for f in live if f.role == "rows"], body.output_schema
        )
        try:
            self._point_at(folder)
        except (BadJob, RunFailed):
            raise
        except Exception as e:  # whatever a catalog raises
            raise RunFailed(
                f"sink {self._uri}: the result stands in {folder}, but the table could not be pointed at it: "
                f"{first_line(e)}: run again when the catalog works"
            ) from e
        self._forget(folder)

    def _fill(self, folder: str, parts: list[str], schema: str) -> None:
        if os.path.isdir(folder):
            return
        import pyarrow.parquet as pq

        temporary = f"{folder}.{secrets.token_hex(4)}.tmp"
        os.makedirs(temporary)
        for part in parts:
            LOCAL.link(part, os.path.join(temporary, os.path.basename(part)))
        if not parts:
            nothing = decode_schema(schema).empty_table()
            pq.write_table(nothing, os.path.join(temporary, "part-none.parquet"), coerce_timestamps="us")
        LOCAL.sync_folder(temporary)
        LOCAL.rename(temporary, folder)
        LOCAL.sync_folder(self._base)

    def _point_at(self, folder: str) -> None:
        spark, about = self._spark, _described(self._spark, self._name)
        if not about:
            spark.catalog.createTable(self._name, path=_uri(folder), source="parquet")
            return
        if _path(about.get("Location", "").replace("file:/", "file:///", 1)) == folder:
            return
        had, has = _columns(spark.table(self._name)), _columns(spark.read.parquet(_uri(folder)))
        if had != has:
            raise RunFailed(
                f"sink {self._uri}: the table has {', '.join(had)}, but the result {', '.join(has)}: drop the table "
                "and run again, which scores nothing again; or give another one"
            )
        spark.sql(f"ALTER TABLE {self._name} SET LOCATION '{_uri(folder)}'")  # the atomic step
        spark.catalog.refreshTable(self._name)

    def _forget(self, folder: str) -> None:
        """Remove all results except this one and the latest other one, and what killed runs left unfinished."""
        names = os.listdir(self._base)
        results = [n for n in names if re.fullmatch(r"data-g\d+-[0-9a-f]{16}", n) and n != os.path.basename(folder)]
        results.sort(key=lambda n: os.stat(os.path.join(self._base, n)).st_mtime_ns)
        unfinished = [n for n in names if re.fullmatch(r"data-g\d+-[0-9a-f]{16}\.[0-9a-f]{8}\.tmp", n)]
        for name in [*results[:-1], *unfinished]:
            shutil.rmtree(os.path.join(self._base, name))


def _columns(table: Any) -> list[str]:
    return [f"{field.name}: {field.dataType.simpleString()}" for field in table.schema]

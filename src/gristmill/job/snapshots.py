"""Sources that are stores: which addresses name one, and what they say."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from gristmill.errors import BadJob, did_you_mean
from gristmill.job.delivery import Place
from gristmill.job.job import Source
from gristmill.job.registry import Registry
from gristmill.job.secret import reveal
from gristmill.job.storeoptions import names_of, refuse_unknown, said_in
from gristmill.job.uris import in_uri, is_local, local_path, redact
from gristmill.values import dataclass

if TYPE_CHECKING:
    from gristmill.snapshots.contract import SnapshotKind

SNAPSHOTS: Registry[type[SnapshotKind]] = Registry(
    "store to read from",
    "gristmill.snapshots",
    {
        "delta": "gristmill.snapshots.delta:Delta",
        "iceberg": "gristmill.snapshots.iceberg:Iceberg",
        "lance": "gristmill.snapshots.lance:Lance",
        "datasets": "gristmill.snapshots.datasets:Datasets",
        "postgresql": "gristmill.snapshots.postgres:Postgres",
        "duckdb": "gristmill.snapshots.duckdb:DuckDB",
        "sqlite": "gristmill.snapshots.sqlite:SQLite",
        "sqlalchemy": "gristmill.snapshots.sqlalchemy:SQLAlchemy",
        "kafka": "gristmill.snapshots.kafka:Kafka",
        "spark": "gristmill.snapshots.spark:Spark",
    },
    needs=("name", "queried", "said", "embedded", "marks", "open"),
    aliases={
        "postgres": "postgresql",
        **dict.fromkeys(("mysql", "mariadb", "mssql", "oracle", "snowflake", "bigquery", "trino"), "sqlalchemy"),
    },
)
_FILES = frozenset({"file", "local", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "http", "https", "hf"})


@dataclass(frozen=True)
class Wanted:
    """What is to be read of a store: a table (`place.name`), or what a `query` gives; of its `columns` (None: all), at
    most `rows`. `said` are our options in the address, such as `version`. `id` tells it from others, without secrets.
    """

    place: Place
    query: str | None = None
    said: dict[str, str] = field(default_factory=dict)
    columns: tuple[str, ...] | None = None
    rows: int | None = None

    @property
    def shown(self) -> str:
        """The address without secrets."""
        return self.place.shown

    @property
    def id(self) -> str:
        """A digest of the address, and of what is read there."""
        told = repr((self.shown, self.query, sorted(self.said.items()), self.columns, self.rows))
        return hashlib.sha256(told.encode()).hexdigest()

    def words(self, error: BaseException) -> str:
        """What a client says is wrong, in one line and without secrets."""
        return self.place.words(error)


def is_snapshot(source: Source) -> bool:
    """Whether a source is a store. Raises BadJob for a query that no store is asked."""
    kinds = [kind_of(uri, source) for uri in source.uri]
    if any(kinds) and not all(kinds):
        files = next(uri for uri, kind in zip(source.uri, kinds, strict=True) if not kind)
        raise BadJob(f"source names a store and files ({redact(files)}): give a job to each, or copy the rows to files")
    if source.query is not None:
        asked = [kind for kind in kinds if kind and SNAPSHOTS.get(kind).queried]
        if len(asked) != 1:
            raise BadJob(
                "source has a query, which is asked of one database: give its address, for example "
                "postgresql://HOST/DB or duckdb:///FILE"
            )
    return bool(kinds) and all(kinds)


def kind_of(uri: str, source: Source) -> str | None:
    """The kind of store at an address; None for files. A folder with the marks of a table is one, unless the source
    says how its files are read.
    """
    scheme, there, _ = str(reveal(uri)).partition("://")
    if there and scheme.lower() not in ("file", "local"):
        base = scheme.lower().partition("+")[0]
        base = SNAPSHOTS.aliases.get(base, base)
        return base if base not in _FILES and base in SNAPSHOTS else None
    if source.format is not None or not os.path.isdir(path := local_path(uri)):
        return None
    return next((kind for kind in SNAPSHOTS.ours if _marked(path, SNAPSHOTS.get(kind).marks)), None)


def _marked(path: str, marks: tuple[tuple[str, ...], ...]) -> bool:
    return any(all(os.path.exists(os.path.join(path, name)) for name in names) for names in marks)


def wanted(source: Source) -> list[Wanted]:
    """What a source that is a store reads, for each of its addresses. Raises BadJob for an address that says too
    little.
    """
    found = []
    for uri in source.uri:
        kind = SNAPSHOTS.get(str(kind_of(uri, source)))
        place, said = _place(uri, kind, source)
        if place.name and source.query is not None:
            raise BadJob(f"{place.shown}: names a table, and the source has a query: leave one of them out")
        found.append(Wanted(place, source.query, said, source.columns, None if source.where else source.limit))
    return found


def _place(uri: str, kind: type[SnapshotKind], source: Source) -> tuple[Place, dict[str, str]]:
    text = str(reveal(uri))
    if is_local(text):
        text = f"{kind.name}://{in_uri(local_path(text))}"
    rest, _, name = text.partition("#")
    address, _, query = rest.partition("?")
    client = "&".join(p for p in query.split("&") if p and p.partition("=")[0] not in kind.said)
    uri = address + ("?" + client if client else "")
    shown = redact(uri)
    said = said_in(text, kind.said, shown)
    _refuse_ignored(kind, names_of(text), source.storage, shown)
    if kind.embedded and "+" not in address.partition("://")[0]:
        shown = f"{kind.name}://{in_uri(Place(kind.name, uri, name, '').path)}"
    shown += "".join(f"{mark}{n}={v}" for mark, (n, v) in zip("?&&&", said.items(), strict=False))
    return Place(kind.name, uri, name, f"{shown}#{name}" if name else shown, dict(reveal(source.storage))), said


def _refuse_ignored(kind: Any, given: list[str], storage: Mapping[str, Any], shown: str) -> None:
    """Raises BadJob for options that nobody would look at, if the kind of store says which it takes."""
    if not hasattr(kind, "in_address"):
        return
    refuse_unknown(given, kind.in_address, kind.said, f"{shown}: an address of {kind.name}")
    if said := next((name for name in storage if name in kind.said), None):
        raise BadJob(f"{shown}: storage has {said!r}, which goes into the address: ?{said}=…")


def table_of(wanted: Wanted) -> tuple[str, str]:
    """The schema ("" if not given) and the name of the table that an address names. Raises BadJob if it names none."""
    schema, _, table = wanted.place.name.rpartition(".")
    if not table or (schema == "" and "." in wanted.place.name):
        address = wanted.shown.partition("#")[0]
        raise BadJob(f"{wanted.shown}: name a table ({address}#reviews or #schema.reviews), or give a query")
    return schema, table


def near(name: str, there: list[str]) -> str:
    """What else is there, for a table that is not."""
    listed = ", ".join(sorted(there)[:8]) + (", …" if len(there) > 8 else "")
    return f": it has {listed or 'no tables'}{did_you_mean(name, there)}"

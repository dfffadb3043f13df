"""Finding and opening source files: a file, a folder, a glob, or several of them, on a local disk or any file system
that pyarrow or fsspec opens. Paths that leave this module contain no secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

from gristmill.errors import BadSource, MissingExtra, RunFailed, SourceChanged, did_you_mean
from gristmill.fingerprint.digests import written
from gristmill.job.job import HELD, Source
from gristmill.job.snapshots import SNAPSHOTS
from gristmill.job.uris import QUERY, in_uri, is_local, local_path, redact
from gristmill.shards.sourcefiles import SourceFile
from gristmill.sources.archive import KINDS, Archive
from gristmill.sources.listing import (
    ArrowListing,
    Entry,
    FsspecListing,
    Listing,
    LocalListing,
    Met,
    NamedListing,
    is_young,
    same_time,
)
from gristmill.sources.patience import Patient, StoreAway, connected
from gristmill.sources.patterns import files_of, hive, length
from gristmill.sources.twins import twins
from gristmill.values import dataclass

__all__ = ["Storage", "changed", "look", "mounted", "open_input", "redact", "resolve"]

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]+://")
_LOG = "_delta_log"
_TABLES = (  # what tables of lakes have in them: a folder, in which there are files with such an ending; and an address
    (_LOG, "a Delta", "", "delta://{}"),
    ("_versions", "a Lance", ".manifest", "lance://{}"),
    ("metadata", "an Iceberg", ".metadata.json", "iceberg://CATALOG/NAMESPACE.TABLE"),
)
_TOLD = 3  # files with two names that a note lists
_LOGS = {"kafka": "gristmill.sources.kafkalog"}  # what is no file system, and lists ranges of records as files
_TOP = "memory://"  # has no buckets: files may be at its top, and a third slash says nothing
_AGAIN = 2  # seconds for which Google's client tries again by itself, not 15 minutes: `Patient` does
_ARROW_SCHEMES = frozenset({"s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"})


@dataclass(frozen=True)
class Mount:
    """A file system and how public paths map onto its own: `prefix` + rest + `suffix` is `inner_prefix` + rest."""

    prefix: str
    listing: Listing
    inner_prefix: str = ""
    suffix: str = ""

    def inner(self, path: str) -> str:
        """The file system's own path."""
        return self.inner_prefix + path[len(self.prefix) : len(path) - len(self.suffix)]

    def public(self, inner: str) -> str:
        """The path as people see it."""
        rest = inner[len(self.inner_prefix) :] if inner.startswith(self.inner_prefix) else inner.lstrip("/")
        return self.prefix + rest + self.suffix

    def holds(self, path: str) -> bool:
        """Whether this mount opens `path`: an archive not what is in one that is inside it."""
        held = path.startswith(self.prefix) and path.endswith(self.suffix)
        return held and not (self.suffix and "://" in path[len(self.prefix) : len(path) - len(self.suffix)])


_LOCAL = Mount("", LocalListing())


@dataclass(frozen=True, repr=False)
class Storage:
    """The file systems of a source: opens any path that `resolve` listed, on a worker too (it can be pickled).

    It may hold credentials. Its repr does not show them; it must not be written into a plan or a report.
    """

    mounts: tuple[Mount, ...] = field(default=())
    named: tuple[str, ...] = field(default=(), compare=False)  # what the addresses of the source name, as paths here
    hollow: tuple[str, ...] = field(default=(), compare=False)  # those of them that are sinks without files

    def __repr__(self) -> str:
        return f"Storage({', '.join(m.prefix for m in self.mounts) or 'local'})"

    def mount(self, path: str) -> Mount:
        """The mount that opens `path`: the one with the longest prefix."""
        if not _SCHEME.match(path):
            return _LOCAL
        found = [m for m in self.mounts if m.holds(path)]
        if not found:
            raise BadSource(f"{redact(path)}: not a path of this source")
        return max(found, key=lambda m: len(m.prefix))


def resolve(
    source: Source,
    tell: Callable[[str], None] | None = None,
    planned: Collection[str] = (),
    met: Met | None = None,
    whole: Callable[[str], bool] = lambda path: False,
    alone: Callable[[Storage, list[SourceFile], dict[str, str]], Iterable[SourceFile]] = lambda fs, files, links: files,
) -> tuple[Storage, list[SourceFile]]:
    """The files of a source, sorted by path within each URI, URIs in the order given, each file once, whatever names
    lead to it; `tell` gets a note on those left out. Hard links that are each named outright are separate files, and so
    are names whose rows differ by them: that are `whole`, one row, or in other folders `name=value`. A file goes by the
    name that it has in `planned`, the paths of an earlier plan, if it still has that. `met` is told each folder and
    link on a local disk before it is followed. `alone` says which of all names are read, of which it gets where
    links lead, before those of one file are joined: a name that is not read takes nothing away from another.

    Folders are read with everything below them except names that start with `_` or `.` and files that end in .tmp or
    .crc, as Spark does. Local paths come out absolute. Raises BadSource, naming the value and what is near it, if a
    path is missing, a folder is empty or a glob matches nothing.
    """
    mounts: dict[str, Mount] = {}
    opened: dict[str, str] = {}
    listings: list[tuple[Mount, int, bool, list[tuple[str, Entry]]]] = []
    links: dict[str, str] = {}
    names: list[str] = []
    hollow: list[str] = []

    def followed(path: str, link: bool) -> None:
        if link:
            links[path] = os.path.realpath(path)
        if met is not None:
            met(path, link)

    for uri in source.uri:
        try:
            path, mount = _place(uri, source.storage)
            place = mount.prefix + "\0" + mount.suffix
            if mount.prefix:
                _refuse_two_ways(opened.setdefault(place, uri), uri)
            known = mounts.setdefault(place, mount)
            marked = partial(_refuse_table, uri) if source.format is None else None
            listing = LocalListing(followed, marked) if known is _LOCAL else known.listing
            names.append(known.public(path))
            root, listed = files_of(listing, path, redact(uri))
            if not listed:
                hollow.append(known.public(path))
                continue
            start = length(root)
            folder = bool(mount.prefix) and root == path != listed[0][0]
            if folder and source.format is None and known.listing.look(f"{path}/{_LOG}") is not None:
                raise BadSource(
                    f"{redact(uri)}: is a Delta table, whose files are not all its rows: give its address as "
                    f"delta+{redact(uri)}; or format='parquet' (--source-format parquet) for all files in it"
                )
            listings.append((known, start, listed[0][0] == path, listed))
        except PermissionError as e:
            raise BadSource(f"{redact(uri)}: not readable: {redact(e.filename or str(e))}: {e.strerror}") from e
        except StoreAway as e:
            raise RunFailed(f"{e}: run again when the store answers") from e
        except OSError as e:
            raise BadSource(f"{redact(uri)}: cannot be listed: {redact(' '.join(str(e).split()))}") from e
    files: dict[str, SourceFile] = {}
    for mount, start, _, listed in listings:
        for inner, entry in listed:
            public, folders = mount.public(inner), hive(inner[start:])
            if public not in files or len(folders) > len(files[public].folders):  # named from higher up, too
                files[public] = SourceFile(public, entry.size, entry.stamp, entry.touched, folders)
            if entry.real:
                links[public] = mount.public(entry.real)
    fs = Storage(tuple(m for m in mounts.values() if m.prefix), tuple(names), tuple(hollow))
    read = {file.path: file for file in alone(fs, list(files.values()), links)}
    again = list[str]()
    for one, kept in twins([(mount, named, listed) for mount, _, named, listed in listings], read, planned, whole):
        if one != kept:
            del read[one]
        again.append(f"{kept} and {one}" if one != kept else f"{one}, which is listed twice")
    if again and tell is not None:
        more = f"; and {len(again) - _TOLD} more" if len(again) > _TOLD else ""
        tell(f"files that are listed under two names are read once: {'; '.join(again[:_TOLD])}{more}")
    return fs, list(read.values())


def _refuse_two_ways(one: str, other: str) -> None:
    """Raises BadSource for two addresses of one place that differ by what is not shown, or by their options: the second
    would be read as the first is, or be taken for it.
    """
    if one != other and _way(one) != _way(other):
        raise BadSource(
            f"{redact(one)} and {redact(other)}: two addresses of one place that differ by their user, signature or "
            "options: write the same in both, or give a job to each"
        )


def _way(uri: str) -> tuple[str, ...]:
    """What an address says of how its place is opened."""
    if uri.lower().startswith("http"):  # of these a place is one file, however its scheme and host are written
        host, _, path = uri.partition("://")[2].partition("/")
        return (host.lower(), path)
    first, _, chain = _chained(uri)
    plain, *query = QUERY.split(first, maxsplit=1)
    root = _split_root(plain)[0]
    return ("" if redact(root) == root else root.partition("://")[2], *query, chain)


def _chained(uri: str) -> tuple[str, str, str]:
    """An address in an archive, and after `::` that of the archive: on a disk its absolute path."""
    *chain, last = uri.split("::")
    if chain and all("://" in part for part in chain) and is_local(last):
        uri = "::".join([*chain, local_path(last)])
    first, colons, rest = uri.partition("::")
    return first, colons, rest


def _refuse_table(uri: str, folder: str, mark: str) -> None:
    """Raises BadSource for a folder of a source that is a table of a lake: it keeps files of rows that are no more."""
    folder = os.path.abspath(folder)
    for name, kind, end, address in _TABLES:
        if mark == name and any(n.endswith(end) for n in _listed(os.path.join(folder, name))):
            raise BadSource(
                f"{folder}: is {kind} table in source {redact(uri)}, and its files are not all its rows: name the "
                f"table as the source ({address.format(in_uri(folder))}), or a pattern that leaves it out, or say "
                "format='parquet' (--source-format parquet) for all files in it"
            )


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # no folder, or gone
        return []


def open_input(fs: Storage, path: str) -> Any:
    """A listed file opened for reading: a pyarrow NativeFile, seekable. Raises SourceChanged if it is gone."""
    mount = fs.mount(path)
    try:
        return mount.listing.open(mount.inner(path))
    except FileNotFoundError as e:
        raise SourceChanged(f"{path}: gone since it was listed") from e
    except PermissionError as e:
        raise BadSource(f"{path}: not readable ({redact(e.strerror or str(e))})") from e


def mounted(uris: Sequence[str], storage: Mapping[str, Any]) -> Storage:
    """The storage that opens these URIs and the paths derived from them. No file is looked up."""
    mounts: list[Mount] = []
    for uri in uris:
        if _SCHEME.match(uri) and not any(mount.prefix and mount.holds(uri) for mount in mounts):
            try:
                mounts.append(_place(uri, storage)[1])
            except StoreAway as e:
                raise RunFailed(f"{e}: run again when the store answers") from e
    return Storage(tuple(m for m in mounts if m.prefix))


def look(fs: Storage, file: SourceFile) -> SourceFile:
    """A listed file as it is now. Raises SourceChanged if it is gone."""
    mount = fs.mount(file.path)
    now = mount.listing.look(mount.inner(file.path))
    if now is None:
        raise SourceChanged(f"{file.path}: gone since it was listed")
    stamp = file.stamp if mount.prefix and same_time(now.stamp, file.stamp) else now.stamp
    return replace(file, size=now.size, stamp=stamp, touched=now.touched)


def changed(fs: Storage, file: SourceFile) -> str | None:
    """How a file now differs from its listing, in words; None if it does not. Raises SourceChanged as `look` does."""
    now = look(fs, file)
    if now.size != file.size:
        return f"{now.size:,} bytes, but {file.size:,} when planned"
    if now.stamp != file.stamp:
        return written(now.stamp, file.stamp)
    if is_young(now.touched) or is_young(file.touched):
        return None
    return "its inode was changed" if now.touched != file.touched else None


# ---------------------------------------------------------------- from a URI to a mount


def _place(uri: str, storage: Mapping[str, Any]) -> tuple[str, Mount]:
    """The path inside its file system, and the mount that opens it."""
    scheme = uri.partition("://")[0].lower() if _SCHEME.match(uri) else ""
    uri = f"{scheme}{uri[len(scheme) :]}"
    if uri.startswith(HELD) and HELD in storage:
        mount = Mount(HELD, NamedListing(), f"{storage[HELD]}/")
        return mount.inner(uri), mount
    if scheme in _LOGS:
        prefix, inner, log, suffix = import_module(_LOGS[scheme]).placed(uri, storage)
        return inner, Mount(prefix, log, "", suffix)
    if scheme in ("", "file", "local"):
        return local_path(uri), _LOCAL  # a trailing slash only says that it is a folder
    if scheme in KINDS and "::" in uri:
        return _in_archive(scheme, uri, storage)
    if scheme in KINDS:
        raise BadSource(
            f"{redact(uri)}: names no archive: {scheme}://::PATH is all files in one, {scheme}://NAME::PATH one"
        )
    try:
        if scheme in _ARROW_SCHEMES and "::" not in uri:
            try:
                return _patient(uri, partial(_with_arrow, scheme, uri, storage))
            except (ImportError, NotImplementedError, TypeError):
                pass  # pyarrow was built without it, or the options are fsspec's
        return _patient(uri, partial(_with_fsspec, scheme, uri, storage))
    except ImportError as e:
        raise MissingExtra(f"{redact(uri)}: {scheme}:// needs a package that is not installed: {redact(str(e))}") from e
    except (BadSource, MissingExtra, StoreAway):
        raise
    except Exception as e:
        cause = redact(" ".join(str(e).split()))
        if "Protocol not known" in cause:
            names = (*SNAPSHOTS.ours, *SNAPSHOTS.aliases, *sorted(_ARROW_SCHEMES))
            cause += f"; stores that are read are {', '.join(SNAPSHOTS.ours)}{did_you_mean(scheme, names)}"
        raise BadSource(f"{redact(uri)}: cannot be opened: {cause or type(e).__name__}") from e


def _in_archive(scheme: str, uri: str, storage: Mapping[str, Any]) -> tuple[str, Mount]:
    """Options of the archive's own store may be given by its scheme, as fsspec has them."""
    first, _, chain = _chained(uri)
    of = storage.get(chain.partition("://")[0], storage)
    path, outer = _place(chain, of if isinstance(of, Mapping) else storage)
    inner = "/".join(name for name in first.partition("://")[2].split("/") if name not in ("", "."))
    shown = redact(f"::{chain}")
    return inner, Mount(f"{scheme}://", Archive(scheme, outer.listing, path, shown), "", shown)


def _patient(uri: str, place: Callable[[], tuple[str, Mount]]) -> tuple[str, Mount]:
    path, mount = connected(redact(uri), place)
    return path, replace(mount, listing=Patient(mount.listing, mount.prefix.rstrip("/")))


def _with_arrow(scheme: str, uri: str, storage: Mapping[str, Any]) -> tuple[str, Mount]:
    import pyarrow.fs as pafs

    parts = QUERY.split(uri, maxsplit=1)
    query = f"?{parts[1]}" if len(parts) == 2 else ""
    root, path = _split_root(parts[0])
    if "//" in path:
        raise BadSource(
            f"{redact(uri)}: the path has an empty segment (two slashes in a row): write it as the store lists it"
        )
    google = scheme in ("gs", "gcs")
    if storage:
        kinds = {"s3": "S3FileSystem", "gs": "GcsFileSystem", "gcs": "GcsFileSystem"}
        if query or scheme not in kinds:
            raise NotImplementedError
        limit = {"retry_time_limit": timedelta(seconds=_AGAIN)} if google else {}
        fs = getattr(pafs, kinds[scheme])(**{**limit, **storage})
        bucket = root.partition("://")[2].rstrip("/")
    else:
        if google and "retry_limit_seconds=" not in query:
            query = f"{query or '?'}{'&' if query else ''}retry_limit_seconds={_AGAIN}"
        user, at, host = root.partition("://")[2].rstrip("/").rpartition("@")
        fs, bucket = pafs.FileSystem.from_uri(f"{scheme}://{user.replace('/', '%2F')}{at}{host}/{query}")
    inner = bucket.rstrip("/") + "/"
    return (inner + path).rstrip("/"), Mount(_public_root(root), ArrowListing(fs), inner)


def _with_fsspec(scheme: str, uri: str, storage: Mapping[str, Any]) -> tuple[str, Mount]:
    from fsspec.archive import AbstractArchiveFileSystem
    from fsspec.core import get_filesystem_class, url_to_fs

    if scheme in ("http", "https"):  # a query may sign one file only, so each URL is its own mount
        fs, inner = url_to_fs(uri, **storage)
        host, slash, path = redact(uri).partition("://")[2].partition("/")
        return inner, Mount(f"{scheme}://{host.lower()}{slash}{path}", FsspecListing(fs), inner)
    first, colons, chain = _chained(uri)
    root, path = _split_root(first)
    if colons:  # fsspec keeps the archive's file open, as this process first saw it
        get_filesystem_class(scheme).clear_instance_cache()
    fs, inner = url_to_fs(f"{first}{colons}{chain}", **storage)
    if isinstance(fs, AbstractArchiveFileSystem):  # names in an archive have no bucket before them
        return inner, Mount(f"{scheme}://", FsspecListing(fs), "", redact(colons + chain))
    if first.startswith(_TOP):
        return inner, Mount(_TOP, FsspecListing(fs), "/", redact(colons + chain))
    tail = path.rstrip("/")
    if not inner.endswith(tail):
        tail = ""
    prefix = inner[: len(inner) - len(tail)]
    if tail == "" and prefix and not prefix.endswith("/"):
        prefix += "/"
    return inner.rstrip("/") or inner, Mount(_public_root(root), FsspecListing(fs), prefix, redact(colons + chain))


def _split_root(uri: str) -> tuple[str, str]:
    """`s3://key:sec/ret@bucket/a/b` as (`s3://key:sec/ret@bucket/`, `a/b`)."""
    scheme, _, rest = uri.partition("://")
    shown = redact(uri).partition("://")[2]
    path = shown.partition("/")[2]
    return f"{scheme}://{rest[: len(rest) - len(path)]}", path


def _public_root(root: str) -> str:
    """As people see it, and the same however its scheme is written: files go by it."""
    scheme, _, rest = redact(root).partition("://")
    scheme = {"gcs": "gs"}.get(scheme.lower(), scheme.lower())
    return f"{scheme}://{rest.rstrip('/')}/" if rest.strip("/") else f"{scheme}://{rest}"

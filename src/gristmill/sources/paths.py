"""Finding and opening source files: a file, a folder, a glob, or several of them, on a local disk or any file system
that pyarrow or fsspec opens. Paths that leave this module contain no secrets.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

from gristmill.errors import BadSource, MissingExtra, RunFailed, SourceChanged, did_you_mean
from gristmill.files.disk import META
from gristmill.fingerprint.digests import written
from gristmill.job.job import HELD, Source
from gristmill.job.snapshots import SNAPSHOTS
from gristmill.job.uris import QUERY, in_uri, is_local, local_path, redact
from gristmill.shards.sourcefiles import SourceFile
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
from gristmill.sources.tar import COMPRESSED, TarListing
from gristmill.values import dataclass

__all__ = ["Storage", "changed", "look", "mounted", "nearby", "open_input", "reads", "redact", "resolve"]

_MAGIC = re.compile(r"[*?\[]")
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]+://")
_IGNORED_ENDS = (".tmp", ".crc")
_LOG = "_delta_log"
_TABLES = (  # what tables of lakes have in them: a folder, in which there are files with such an ending; and an address
    (_LOG, "a Delta", "", "delta://{}"),
    ("_versions", "a Lance", ".manifest", "lance://{}"),
    ("metadata", "an Iceberg", ".metadata.json", "iceberg://CATALOG/NAMESPACE.TABLE"),
)
_TOLD = 3  # files with two names that a note lists
# `_x` and `.x` are hidden, and the folder `x.tmp`; `_day=1` and `day=.tmp` are partitions.
_SHOWN = rf"(?![._](?![^/]*=))(?![^/=]*(?:{'|'.join(map(re.escape, _IGNORED_ENDS))})/)"
_DONE = "".join(f"(?<!{re.escape(end)})" for end in _IGNORED_ENDS)
_WILD = "*?]"  # what ends a component of a pattern that stands for several names
_BELOW = f"(?:/{_SHOWN}[^/]+)*"  # files below a folder that matches
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
        """Whether this mount opens `path`."""
        return path.startswith(self.prefix) and path.endswith(self.suffix)


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
            root, listed = _files(listing, path, redact(uri))
            if not listed:
                hollow.append(known.public(path))
                continue
            start = _length(root)
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
            public, folders = mount.public(inner), _hive(inner[start:])
            if public not in files or len(folders) > len(files[public].folders):  # named from higher up, too
                files[public] = SourceFile(public, entry.size, entry.stamp, entry.touched, folders)
            if entry.real:
                links[public] = mount.public(entry.real)
    fs = Storage(tuple(m for m in mounts.values() if m.prefix), tuple(names), tuple(hollow))
    read = {file.path: file for file in alone(fs, list(files.values()), links)}
    again = list[str]()
    for one, kept in _twins([(mount, named, listed) for mount, _, named, listed in listings], read, planned, whole):
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
    first, colons, chain = uri.partition("::")
    return first, colons, local_path(chain) if colons and is_local(chain) else chain


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


def reads(uri: str, path: str) -> bool:
    """Whether a folder or a pattern would read a file that appears at `path`, which is taken literally."""
    uri = QUERY.split(uri, maxsplit=1)[0].rstrip("/")
    if not _MAGIC.search(uri) or ("://" not in uri and os.path.isdir(uri)):
        below = path.startswith(f"{uri}/") and ("://" in uri or os.path.isdir(uri))
        return below and not _unread(path[len(uri) + 1 :])
    base, parts = _fixed(uri)
    if not path.startswith(f"{base}/"):
        return False
    last = parts[-1]
    if path.endswith(_IGNORED_ENDS) and (last[-1] in _WILD or not re.fullmatch(_part(last), path.rpartition("/")[2])):
        return False
    deep = parts.index("**") if "**" in parts else len(parts)
    wanted = "/".join(map(_part, parts[:deep])) + _BELOW
    if deep < len(parts):
        wanted = "".join(_part(part) + "/" for part in parts[:deep]) + _regex(parts[deep + 1 :] or ["*"]).pattern
    return re.fullmatch(wanted, path[len(base.rstrip("/")) + 1 :]) is not None


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
    if scheme == "tar" and (compression := COMPRESSED.get(os.path.splitext(chain)[1])) is not None:
        storage = {"tar": {"compression": compression}, **storage}
    fs, inner = url_to_fs(f"{first}{colons}{chain}", **storage)
    if isinstance(fs, AbstractArchiveFileSystem):  # names in an archive have no bucket before them
        listing = TarListing(fs) if scheme == "tar" else FsspecListing(fs)
        return inner, Mount(f"{scheme}://", listing, "", redact(colons + chain))
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


# ---------------------------------------------------------------- from a path to its files


@dataclass(frozen=True)
class _Name:
    """A name of a file that has several: where it leads, whether a link leads there, whether it was named outright, its
    folders `name=value`, and whether the file is one row, which its name belongs to.
    """

    path: str
    real: str
    link: bool
    outright: bool
    folders: frozenset[str]
    whole: bool
    links: int

    def is_same(self, other: _Name) -> bool:
        """Whether two names of one inode are of one file, with the same rows. The inode alone is not enough, as network
        disks make up numbers. Hard links that are both named outright are two files. A name adds no rows to one that
        has all of its folders. Two links to a file that is one row are rows of their own.
        """
        if self.real == other.real and not (self.whole and self.link and other.link):
            return self.folders <= other.folders or other.folders <= self.folders
        different = self.whole or self.folders != other.folders or (self.outright and other.outright)
        return self.links > 1 and not different


def _twins(
    listings: Sequence[tuple[Mount, bool, list[tuple[str, Entry]]]],
    read: Mapping[str, SourceFile],
    planned: Collection[str],
    whole: Callable[[str], bool],
) -> Iterator[tuple[str, str]]:
    """The names of files that add no rows to another name, after which they are told: `listings` are what each URI has,
    and whether it is one file, named outright; of these only what is `read` counts. Of two names one that is
    `planned` counts; else the one in more folders `name=value`; else that of the first listing, and there the one that
    is no link, or the first. A name that is listed twice comes with itself.
    """
    several = {
        inode
        for inode, count in Counter(
            (mount.prefix, mount.suffix, entry.inode)
            for mount, _, listed in listings
            for path, entry in listed
            if entry.inode and mount.public(path) in read
        ).items()
        if count > 1
    }
    groups: dict[tuple[str, str, str], dict[str, tuple[Any, _Name]]] = {}
    twice = list[str]()
    for order, (mount, named, listed) in enumerate(listings):
        of = (mount.prefix, mount.suffix)
        found = [(path, e) for path, e in listed if (*of, e.inode) in several and mount.public(path) in read]
        above = os.path.commonpath([path for path, _ in listed]) if found and not mount.prefix else ""
        base = os.path.realpath(above)
        for inner, entry in found:
            group = groups.setdefault((*of, entry.inode), {})
            path = mount.public(inner)
            if path in group:
                twice.append(path)
                continue
            folders = frozenset(filter(None, read[path].folders.split("/")))
            if mount.prefix:
                real, link = mount.public(entry.real) if entry.real else path, entry.real != ""
            else:
                real = os.path.realpath(path)
                link = real != os.path.join(base, os.path.relpath(path, above))
            rank = (path not in planned, -len(folders), order, link, path)
            group[path] = (rank, _Name(path, real, link, named, folders, whole(path), entry.links))
    for group in groups.values():
        kept = list[tuple[_Name, str]]()  # what adds nothing to a name adds nothing to what that is kept by
        for _, name in sorted(group.values(), key=lambda ranked: ranked[0]):
            by = next((by for other, by in kept if name.is_same(other)), name.path)
            kept.append((name, by))
            if by != name.path:
                yield name.path, by
    yield from ((path, path) for path in twice)


def _files(listing: Listing, path: str, shown: str) -> tuple[str, list[tuple[str, Entry]]]:
    """The files that a path, a folder or a glob stands for, sorted, and the part of the path that has no wildcards; no
    files of a folder that is a sink. `shown` is what the person wrote.
    """
    entry = listing.look(path)
    if entry is not None and not entry.folder:
        return path, [(path, entry)]
    if entry is not None:
        found = sorted(_below(listing, path), key=lambda f: f[0])
        if not found and listing.look(f"{path}/{META}") is None:
            raise BadSource(
                f"{shown}: the folder holds no files (names that start with _ or . are not read), and files say which "
                "columns there are: run again once there is one; allow_empty is for files without rows"
            )
        return path, found
    if _MAGIC.search(path):
        base, parts = _fixed(path)
        matched = dict(_expand(listing, base, parts))
        if not matched:
            raise BadSource(f"{shown}: the pattern matches no file; {_nearby(listing, path)}")
        return base, sorted(matched.items())
    raise BadSource(f"{shown}: no such file or folder; {_nearby(listing, path)}")


def _hidden(name: str) -> bool:
    """Whether a folder is not read; nor is a file of that name. A value of a partition may be anything."""
    return "=" not in name and _ignored(name)


def _ignored(name: str) -> bool:
    """Whether a file is not read."""
    return (name.startswith(("_", ".")) and "=" not in name) or name.endswith(_IGNORED_ENDS)


def _unread(below: str) -> bool:
    """Whether a file with this path below a source is not read."""
    *folders, name = _names(below)
    return _ignored(name) or any(map(_hidden, folders))


def _below(listing: Listing, folder: str) -> Iterator[tuple[str, Entry]]:
    """All files below a folder that are not ignored, with their paths."""
    start = _length(folder)
    for path, entry in listing.tree(folder, _hidden):
        if not _unread(path[start:]):
            yield path, entry


def _names(path: str) -> list[str]:
    return path.replace(os.sep, "/").split("/")


def _hive(below: str) -> str:
    """The `name=value` folders of a path below what the source names."""
    return "/".join(name for name in _names(below)[:-1] if name.find("=") > 0) if "=" in below else ""


def _fixed(pattern: str) -> tuple[str, list[str]]:
    """The folder before the first wildcard, and the components from there on."""
    parts = _names(pattern)
    fixed = next(i for i, part in enumerate(parts) if _MAGIC.search(part))
    return "/".join(parts[:fixed]) or ("/" if pattern.startswith("/") else ""), parts[fixed:]


def _expand(listing: Listing, base: str, parts: list[str]) -> Iterator[tuple[str, Entry]]:
    """Files that match, and all files below folders that match. `**` stands for any number of folders."""
    part, rest = parts[0], parts[1:]
    if part == "**":
        wanted = _regex(rest or ["*"])
        start = _length(base)
        hidden = any(part.startswith(("_", ".")) or part.endswith(_IGNORED_ENDS) for part in rest)
        for path, entry in listing.tree(base, _never if hidden else _hidden):
            if wanted.fullmatch(path[start:].replace(os.sep, "/")) and (hidden or not path.endswith(_IGNORED_ENDS)):
                yield path, entry
        return
    if not _MAGIC.search(part):
        path = _join(base, part)
        there = listing.look(path)
        if there is not None:
            yield from _matched(listing, path, there, rest)
        return
    wanted = re.compile(_part(part))
    for entry in listing.entries(base, lambda name: wanted.fullmatch(name) is not None):
        if not entry.folder and part[-1] in _WILD and entry.name.endswith(_IGNORED_ENDS):
            continue
        yield from _matched(listing, _join(base, entry.name), entry, rest)


def _matched(listing: Listing, path: str, entry: Entry, rest: list[str]) -> Iterator[tuple[str, Entry]]:
    if rest:
        if entry.folder:
            yield from _expand(listing, path, rest)
    elif entry.folder:
        yield from _below(listing, path)
    else:
        yield path, entry


def _never(_: str) -> bool:
    return False


def _length(folder: str) -> int:
    """Where the part below `folder` begins in a path below it."""
    return len(folder.rstrip("/")) + 1 if folder else 0


def _join(base: str, name: str) -> str:
    return f"{base}{'' if base.endswith('/') or not base else '/'}{name}"


def _regex(parts: list[str]) -> re.Pattern[str]:
    """What follows a `**`, as one expression over the path below it; files below a folder that matches count too."""
    folders = f"(?:{_SHOWN}[^/]+/)*"
    out = folders
    for part in parts[:-1]:
        out += folders if part == "**" else _part(part) + "/"
    last = _part("*" if parts[-1] == "**" else parts[-1])
    return re.compile(out + last + _BELOW)


def _part(part: str) -> str:
    """One component of a glob as an expression. A wildcard at the start does not match hidden or unfinished files."""
    out, i = "", 0
    while i < len(part):
        c = part[i]
        close = part.find("]", i + 2) if c == "[" else -1
        if c == "*":
            out += "[^/]*"
        elif c == "?":
            out += "[^/]"
        elif close > 0:
            inside = part[i + 1 : close].replace("\\", r"\\")
            out += "[" + ("^" + inside[1:] if inside[0] in "!^" else inside) + "]"
            i = close
        else:
            out += re.escape(c)
        i += 1
    start = _SHOWN if part[0] in "*?[" else ""
    return start + (f"(?:(?=[^/]*=){out}|{out}{_DONE})" if part[-1] in _WILD else out)


def nearby(uri: str) -> str:
    """What is on this machine instead of something that is not there, in words."""
    return _nearby(_LOCAL.listing, local_path(uri))


def _nearby(listing: Listing, path: str) -> str:
    """What is there instead: the nearest folder that exists, and similar names in it."""
    if path.startswith(("http://", "https://")):
        return "check the address"  # a web server has no folders
    parts = _names(path)
    fixed = next((i for i, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    for depth in range(min(fixed, len(parts) - 1), 0, -1):
        folder = "/".join(parts[:depth]) or "/"
        above = listing.look(folder)
        if above is None or not above.folder:
            continue
        try:
            names = sorted(e.name for e in listing.entries(folder, lambda name: not _ignored(name)))
        except (BadSource, OSError):
            return f"{redact(folder)} exists"
        wanted = parts[depth] if depth < len(parts) else ""
        alike = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
        if alike:
            return f"{redact(folder)} has {', '.join(repr(a) for a in alike)}"
        if not names:
            return f"{redact(folder)} is empty"
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return f"{redact(folder)} exists and holds {', '.join(names[:5])}{more}"
    return "nothing above it exists either" if len(parts) > 1 else "check the path"

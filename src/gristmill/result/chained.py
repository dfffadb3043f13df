"""Sinks in the source of another job: of their files, those that are published."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import pyarrow as pa

from gristmill.commit.documents import PlanDocument
from gristmill.commit.generation import PLAN, decode_schema, numbered, numbers
from gristmill.commit.publication import Publication, latest
from gristmill.errors import BadSource, CorruptStore, RunFailed
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL, META, join
from gristmill.job.uris import redact
from gristmill.process.pool import Pool
from gristmill.shards.sourcefiles import SourceFile
from gristmill.values import dataclass

if TYPE_CHECKING:
    from gristmill.sources.listing import Listing
    from gristmill.sources.paths import Mount, Storage

_PART = re.compile(r"(?:part-\d{7,}|merged(?:-\d{7,})?)\.g(\d+)\.")
_WILD = re.compile(r"[*?\[]")
_LETTERS = "_dead"
_AT_ONCE = 32  # sinks that are looked at, as by the file layer of a sink in a store

Kinds = Mapping[str, pa.DataType]


class Stored:
    """The records of sinks in a file system of a source, opened as its files are: as much of `Files` as is needed.
    `rooted`: its paths begin with a slash, which those in an archive do not.
    """

    free_links, server = False, ""

    def __init__(self, listing: Listing, rooted: bool) -> None:
        self._listing, self._rooted = listing, rooted

    def _own(self, path: str) -> str:
        """A path that was joined to a root, which is empty at the top of a file system."""
        return path if self._rooted else path.lstrip("/")

    def read(self, path: str) -> bytes:
        """All of a file. Raises FileNotFoundError."""
        with self._listing.open(self._own(path)) as file:
            return bytes(file.read())

    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder."""
        return [e.name for e in self._listing.entries(self._own(folder), lambda _: True) if not e.folder]

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Many at once, where the file system's client is known to allow it."""
        from gristmill.sources.listing import ArrowListing

        if not isinstance(getattr(self._listing, "inner", None), ArrowListing):
            yield from map(work, items)
            return
        with Pool(_AT_ONCE, "gristmill-sinks") as threads:
            yield from threads.map(work, items)


@dataclass(frozen=True)
class Published:
    """A sink, whose files' paths begin with `start`: the numbers of its generations, and of its result that of the
    latest one in it (0: there is none), the size of each file, and the types of the columns in its folder names.
    If its records may not be read, `denied` says why, and nothing else is known, not even whether it is a sink.
    """

    start: str
    claims: frozenset[int]
    newest: int
    sizes: Mapping[str, int]
    keys: Kinds
    mount: Mount = field(compare=False, repr=False)
    files: Files = field(compare=False, repr=False)
    result: Publication | None = field(compare=False, repr=False)
    denied: str = ""
    planned: dict[int, Sequence[str] | None] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def at(mount: Mount, files: Files, start: str) -> Published | None:
        """The sink in a folder, by what its files' paths begin with; None if there is none."""
        try:
            return Published._found(mount, files, start)
        except PermissionError as e:
            denied = redact(e.strerror or str(e))
        except BadSource as e:  # as those who wait for a store say it
            denied = str(e)
        return Published(start, frozenset(), 0, {}, {}, mount, files, None, denied)

    @staticmethod
    def _found(mount: Mount, files: Files, start: str) -> Published | None:
        root = start.rstrip("/")
        claims = frozenset(numbers(root, files))
        if not claims:
            return None
        result = latest(root, files)
        if result is None:
            return Published(start, claims, 0, {}, {}, mount, files, None)
        keys, schema = result.body.partition_by, decode_schema(result.body.output_schema)
        kinds = {n: schema.field(n).type for n in keys if n in schema.names}
        sizes = {f.name: f.bytes for f in result.live()}
        return Published(start, claims, result.generation, sizes, kinds, mount, files, result)

    @property
    def root(self) -> str:
        """Its folder; empty for the top of a file system."""
        return self.start.rstrip("/")

    @property
    def shown(self) -> str:
        """Its folder, as people see it."""
        return _public(self.mount, self.start)

    def path(self, name: str) -> str:
        """The path of one of its files in a source."""
        return self.mount.public(self.start + name)

    def writes(self, name: str) -> bool:
        """Whether a generation of this sink has or had this name for a file: one that it began, where it has parts."""
        folder, _, base = name.rpartition("/")
        if (number := _generation(base)) not in self.claims:
            return False
        if number not in self.planned:
            self.planned[number] = self._partitioned(number)
        if folder == _LETTERS or f"{folder}/".startswith(f"{META}/"):
            return True
        by = self.planned[number]
        return by is None or [n.partition("=")[0] for n in folder.split("/") if n] == _segments(by)

    def _partitioned(self, number: int) -> Sequence[str] | None:
        """What a generation's folders are named by: as the result's, if its plan is gone; None if nobody knows."""
        standing = None if self.result is None else self.result.body.partition_by
        if self.result is not None and number in self.result.generations:
            return standing
        try:
            folder = numbered(self.root, number, self.files).folder
            return PlanDocument.load_from(join(folder, PLAN), self.files).partition_by
        except (FileNotFoundError, CorruptStore, PermissionError, BadSource):
            return standing


@dataclass(frozen=True)
class Chained:
    """The files of a source, without those that are `left` out: of a sink, but not of what it has published. By path,
    the types of columns in a sink's folder names; and the sinks that were found, by their folders; by folder `read` has
    the files here of a sink, by their names in it. `others` are here, in the folder of a sink, and have names as it
    gives, but are not its own; `hidden` are here that may be of a sink whose records may not be read.
    """

    files: list[SourceFile]
    kinds: dict[str, Kinds]
    sinks: Mapping[str, Published]
    left: list[tuple[_Part, Published]]
    others: list[tuple[_Part, Published]]
    read: dict[str, dict[str, SourceFile]]
    hidden: dict[str, tuple[Published, list[_Part]]]

    def add(self, file: SourceFile, part: _Part | None, known: Mapping[str, Published | None]) -> None:
        """One more file, which may be a part of a sink."""
        sink, name = (None, "") if part is None else part.owner(known)
        if part is not None and sink is not None and not name:
            self.left.append((part, sink))
            return
        if sink is not None:
            self.read.setdefault(sink.shown, {})[name] = file
            if sink.keys:
                self.kinds[file.path] = sink.keys
        elif part is not None:
            if (above := part.folder.above(self.sinks)) is not None:
                self.others.append((part, above))
            if (denied := part.denied(known)) is not None:
                self.hidden.setdefault(denied.shown, (denied, []))[1].append(part)
        self.files.append(file)

    def refuse(self, uris: Sequence[str], outright: set[str]) -> None:
        """Raises BadSource if nothing is left to read, or a file is left out that the source names `outright`, whose
        URIs these are as paths are shown; if a published file was cut, or is gone while others remain; and if files of
        several generations may be of a sink of which it cannot be known what is published.
        """
        for part, sink in self.left:
            if part.shown in outright:
                raise BadSource(_not_published(part.shown, sink))
        if not self.files:
            uri, told = ", ".join(uris), next((s for _, s in self.left if s.newest), None)
            if told is None:
                raise BadSource(f"{uri}: it is the sink of a run that has published nothing yet")
            raise BadSource(_not_published(uri, told))
        for sink, parts in self.hidden.values():
            several = sorted({part.number for part in parts if part.shown not in outright})
            if len(several) > 1 and _lists(sink, outright):
                raise BadSource(_not_known(sink, several))
        with _answered():
            _check_whole(self, outright)

    def notes(self) -> list[str]:
        """What may be missed, or come twice; nothing of a run that goes on from a result."""
        found: dict[str, list[str]] = {}
        for part, sink in self.left:
            if not sink.newest:
                found.setdefault(f"{sink.shown}: is a sink that has published nothing yet, and is not read", [])
            elif part.number <= sink.newest:
                what = "files with names of its parts that are not of its result are not read"
                found.setdefault(f"{sink.shown}: {what}", []).append(part.shown)
        for part, sink in ((part, sink) for part, sink in self.others if sink.shown in self.read):
            what = "files below this sink that have names as its parts, but are not its own, are read as well"
            found.setdefault(f"{sink.shown}: {what}", []).append(part.shown)
        for sink, parts in self.hidden.values():
            what = "whether files with names of a sink's parts are published is not known"
            text = f"{sink.path(META)}: may not be read ({sink.denied}): {what}"
            found[text] = [part.shown for part in parts]
        return [text + _some(paths) for text, paths in found.items()]


def _not_published(what: str, sink: Published) -> str:
    told = "has published nothing yet" if not sink.newest else "has not published it"
    return (
        f"{what}: has the name of a part of the sink {sink.shown}, which {told}: name {sink.shown} to read its result; "
        "if it is another file, move it out of that folder"
    )


def _not_known(sink: Published, several: Sequence[int]) -> str:
    return (
        f"{sink.shown}: has files with names as a sink gives to those of several runs "
        f"({', '.join(f'g{n}' for n in several)}), and which of them are published may not be read "
        f"({sink.path(META)}: {sink.denied}): get the right to read that folder, or name the files of one run, as in "
        f"part-*.g{several[-1]}.*"
    )


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f": {paths[0]}{more}" if paths else ""


def published_alone(fs: Storage, listed: Sequence[SourceFile]) -> Chained:
    """The files of a source, of sinks only those of the published result, not those of a run that was stopped while
    publishing, nor of the previous result. If the files lack some of what a sink has published, they were listed
    before that was. Costs nothing for files that no sink has names for; else each folder that may be a sink is looked
    at once.
    """
    folders: dict[tuple[str, str, str], _Folder] = {}
    real: dict[str, str] = {}
    named = [f.path for f in listed if _PART.search(f.path)]
    parts = {path: part for path in named if (part := _Part.of(fs, path, folders, real)).number}
    with _answered():
        known = _sinks(list(parts.values()))
        sinks = {folder: sink for folder, sink in known.items() if sink is not None and not sink.denied}
        found = Chained([], {}, sinks, [], [], {}, {})
        for file in listed:
            found.add(file, parts.get(file.path), known)
    return found


@contextmanager
def _answered() -> Iterator[None]:
    """Raises RunFailed if a store does not answer."""
    from gristmill.sources.patience import StoreAway

    try:
        yield
    except StoreAway as e:
        raise RunFailed(f"{e}: run again when the store answers") from e


@dataclass(frozen=True)
class _Folder:
    """A folder of a source, and the folders that the sink of a part in it may be, the highest first, those that a link
    leads to last: each by its path as people see it, with what paths of files in it begin with, and what the names
    within that sink of files in this folder begin with.
    """

    mount: Mount
    start: str
    roots: Mapping[str, tuple[str, str]]

    @staticmethod
    def of(mount: Mount, start: str, real: dict[str, str]) -> _Folder:
        # Not above a file of a web server, which has no folders.
        found = {r: start[len(r) :] for r in _roots(start) if r.startswith(mount.inner_prefix)}
        if not mount.prefix and (there := _real(start[:-1], real) + "/") != start:
            known = {_real(r[:-1], real) for r in found}
            found |= {r: there[len(r) :] for r in _roots(there) if r[:-1] not in known}
        return _Folder(mount, start, {_public(mount, r): (r, below) for r, below in found.items()})

    def above(self, sinks: Mapping[str, Published]) -> Published | None:
        """The nearest of these sinks that it is in."""
        start = self.start
        while sinks:
            if (found := sinks.get(_public(self.mount, start))) is not None:
                return found
            if not start.strip("/"):
                break
            start = _higher(start)
        return None


@dataclass(frozen=True)
class _Part:
    """A file with a name as sinks give: its path as people see it, its name in its folder, and the number of the
    generation (0: it has no such name after all).
    """

    shown: str
    name: str
    folder: _Folder
    number: int

    @staticmethod
    def of(fs: Storage, path: str, folders: dict[tuple[str, str, str], _Folder], real: dict[str, str]) -> _Part:
        mount = fs.mount(path)
        inner = mount.inner(path) if mount.prefix else os.path.abspath(path).replace(os.sep, "/")
        name = inner.rpartition("/")[2]
        key = (mount.prefix, mount.suffix, inner[: len(inner) - len(name)])
        if key not in folders:
            folders[key] = _Folder.of(mount, key[2], real)
        return _Part(path, name, folders[key], _generation(name))

    def owner(self, known: Mapping[str, Published | None]) -> tuple[Published | None, str]:
        """The sink that it is of, and its name there if it is published: of two that it may be, the one that published
        it, else the nearest.
        """
        found: Published | None = None
        for public, (_, below) in self.folder.roots.items():
            sink, name = known.get(public), below + self.name
            if sink is not None and name in sink.sizes:
                return sink, name
            if sink is not None and sink.writes(name):
                found = sink
        return found, ""

    def denied(self, known: Mapping[str, Published | None]) -> Published | None:
        """The first that it may be of whose records may not be read."""
        looked = (known.get(public) for public in self.folder.roots)
        return next((sink for sink in looked if sink is not None and sink.denied), None)


def _public(mount: Mount, start: str) -> str:
    """A folder as people see it, from what paths in it begin with; of a bucket or an archive its address."""
    folder = start.rstrip("/")
    return mount.public(folder if folder.startswith(mount.inner_prefix) else start)


def _real(folder: str, known: dict[str, str]) -> str:
    """`os.path.realpath` of an absolute folder, with one look for each folder of all of them."""
    if folder not in known:
        above, _, name = folder.rpartition("/")
        if os.path.islink(folder):
            known[folder] = os.path.realpath(folder).replace(os.sep, "/").rstrip("/")
        else:
            known[folder] = f"{_real(above, known)}/{name}" if above else folder
    return known[folder]


def _higher(start: str) -> str:
    """What paths in the folder above begin with."""
    folder = start.rstrip("/")
    return folder[: len(folder) - len(folder.rpartition("/")[2])]


def _roots(start: str) -> list[str]:
    """What may be the root of a sink that has a part in this folder, the highest first: parts are there, or below in
    folders named `name=value`.
    """
    if (hidden := f"/{start}".find(f"/{META}/")) >= 0:
        return [start[:hidden]]
    found = [start]
    while (name := found[-1].rstrip("/").rpartition("/")[2]) == _LETTERS or name.find("=") > 0:
        found.append(_higher(found[-1]))
    return found[::-1]


def _sinks(parts: list[_Part]) -> dict[str, Published | None]:
    """The sinks of these files by folder, and None for each other folder that was looked at: from the highest down, as
    far as files are not published by what was found there.
    """
    known: dict[str, Published | None] = {}
    layers: dict[tuple[str, str], Files] = {}
    depth = 0
    while parts := [p for p in parts if depth < len(p.folder.roots) and not p.owner(known)[1]]:
        wanted: dict[tuple[str, str], tuple[Mount, dict[str, str]]] = {}
        for folder in {id(p.folder): p.folder for p in parts}.values():
            mount, (public, (start, _)) = folder.mount, list(folder.roots.items())[depth]
            if public not in known:
                wanted.setdefault((mount.prefix, mount.suffix), (mount, {}))[1][public] = start
        for key, (mount, roots) in wanted.items():
            rooted = next(iter(roots.values())).startswith("/")
            files = layers.setdefault(key, cast(Files, Stored(mount.listing, rooted)) if mount.prefix else LOCAL)
            known.update(zip(roots, files.map(partial(Published.at, mount, files), roots.values()), strict=True))
        depth += 1
    return known


def _generation(name: str) -> int:
    """The number of the generation that has a part of this name."""
    match = _PART.match(name)
    return 0 if match is None else int(match[1])


def _segments(columns: Sequence[str]) -> list[str]:
    """The names in front of `=` in the folders of a sink that is partitioned by these columns."""
    from gristmill.sinks.partition import folder_name

    whole = folder_name(dict.fromkeys(columns, "x"))
    return [name.partition("=")[0] for name in whole.split("/") if name]


def _check_whole(found: Chained, uris: Iterable[str]) -> None:
    """Raises BadSource if a published file of a sink that is read was truncated, or is gone: of those that the source
    asks for, and of those in a folder of which others are read.
    """
    for sink in found.sinks.values():
        there: dict[str, set[str]] = {}  # by folder; of one of which a file is not listed, as a pattern picks some
        listed, asked = found.read.get(sink.shown, {}), _asking(sink.mount, uris)
        read = {name.rpartition("/")[0] for name in listed}
        for name, size in sink.sizes.items():
            folder, _, base = name.rpartition("/")
            if name in listed and listed[name].size != size:
                _refuse_lost(listed[name].path, f"has {listed[name].size:,} of its {size:,} bytes")
            if name in listed or not _PART.match(base) or not (folder in read or asked(sink.path(name))):
                continue
            if folder not in there:
                there[folder] = set(sink.files.names(join(sink.root, folder) if folder else sink.root))
            if base not in there[folder]:
                _refuse_lost(sink.path(name), "the file is gone", "" if folder in read else _ON_PURPOSE)


def _asking(mount: Mount, uris: Iterable[str]) -> Callable[[str], bool]:
    """Whether a folder or a pattern of these would read a file at a path of this file system."""
    from gristmill.sources.paths import reads

    named = set(_named(mount, uris))
    patterns = [uri for uri in named if _WILD.search(uri)]

    def asked(shown: str) -> bool:
        path = _plain(mount, shown)
        above = (path[:i] for i, c in enumerate(path) if c == "/")
        return any(reads(uri, path) for uri in (*(a for a in above if a in named), *patterns))

    return asked


def _lists(sink: Published, uris: Iterable[str]) -> bool:
    """Whether one of these lists the folder of a sink itself, and not only folders in it."""
    root = f"{_plain(sink.mount, sink.shown).rstrip('/')}/"
    named = [(_WILD.split(uri)[0], uri) for uri in _named(sink.mount, uris)]
    return any(root.startswith(f"{fixed if fixed == uri else fixed.rpartition('/')[0]}/") for fixed, uri in named)


def _named(mount: Mount, uris: Iterable[str]) -> list[str]:
    """Those of these, as paths are shown, that are in this file system, as `_plain`."""
    here = [uri for uri in uris if mount.holds(uri) and ("://" in uri) == bool(mount.prefix)]
    return [_plain(mount, uri).rstrip("/") for uri in here]


def _plain(mount: Mount, shown: str) -> str:
    """A path as one below a folder, which those in archives are not, without what follows it."""
    rest = shown[len(mount.prefix) : len(shown) - len(mount.suffix)]
    return f"at://top/{rest}" if mount.prefix else rest


_ON_PURPOSE = "; or name the folders to be read, if it was removed on purpose"


def _refuse_lost(path: str, what: str, way: str = "") -> NoReturn:
    raise BadSource(
        f"{path}: is published, but {what}: run the job of that sink again, which restores it if its rows are still "
        f"kept{way}"
    )

"""Sinks in the source of another job: of their files, those that are published."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from gristmill.commit.publish import MANIFEST
from gristmill.errors import BadSource, RunFailed
from gristmill.files.disk import META, join
from gristmill.result.parts import Folder, Part, layer, sinks_of
from gristmill.result.published import LETTERS, PART, Kinds, Published
from gristmill.shards.sourcefiles import SourceFile
from gristmill.values import dataclass

if TYPE_CHECKING:
    from gristmill.sources.paths import Mount, Storage

_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Chained:
    """The files of a source, without those that are `left` out: of a sink, but not of what it has published. By path,
    the types of columns in a sink's folder names; and the sinks that were found, by their folders; by folder `read` has
    the files here of a sink, by their names in it. `others` are here, in the folder of a sink, and have names as it
    gives, but are not its own; `hidden` are here that may be of a sink whose records may not be read. `hollow` sinks
    have no files here.
    """

    files: list[SourceFile]
    kinds: dict[str, Kinds]
    sinks: Mapping[str, Published]
    left: list[tuple[Part, Published]]
    others: list[tuple[Part, Published]]
    read: dict[str, dict[str, SourceFile]]
    hidden: dict[str, tuple[Published, list[Part]]]
    hollow: list[Published]

    def add(self, file: SourceFile, part: Part | None, known: Mapping[str, Published | None]) -> None:
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
            if (above := part.above(self.sinks)) is not None:
                self.others.append((part, above))
            if (denied := part.denied(known)) is not None:
                self.hidden.setdefault(denied.shown, (denied, []))[1].append(part)
        self.files.append(file)

    def of(self) -> Collection[Published]:
        """The sinks that there are files of."""
        return (
            {shown: self.sinks[shown] for shown in self.read} | {sink.shown: sink for _, sink in self.left}
        ).values()

    def refuse(self, uris: Sequence[str], outright: set[str]) -> None:
        """Raises BadSource if nothing is left to read, or a file is left out that the source names `outright`, whose
        URIs these are as paths are shown; if a published file was cut, or is gone while others remain; and if files of
        several generations may be of a sink of which it cannot be known what is published.
        """
        for part, sink in self.left:
            if part.shown in outright:
                raise BadSource(_not_published(part.shown, sink))
        for sink in self.hollow:
            if sink.denied:
                raise BadSource(f"{sink.path(META)}: may not be read ({sink.denied}), and there are no files beside it")
            for name in sink.sizes:
                if PART.match(name.rpartition("/")[2]) and not name.startswith(f"{LETTERS}/"):
                    _refuse_lost(sink.path(name), "the file is gone")
        if not self.files and any(sink.newest for sink in self.hollow):
            raise BadSource(
                f"{', '.join(uris)}: its result has no rows, and so no file that says which columns there are: run "
                "again once it has some; a sink with merge (--merge, merge=True) has a file without rows, too, of the "
                "columns that are known before any row is scored"
            )
        if not self.files:
            uri, told = ", ".join(uris), next((s for _, s in self.left if s.newest), None)
            if told is None:
                raise BadSource(f"{uri}: it is the sink of a run that has published nothing yet")
            raise BadSource(_not_published(uri, told))
        for sink, parts in self.hidden.values():
            several = sorted({part.number for part in parts if part.shown not in outright})
            if len(several) > 1 and _lists(sink, outright):
                raise BadSource(_not_known(sink, several))
        with answered():
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
        for sink in self.hollow:
            what = (
                "its result has no rows" if sink.newest else "is a sink that has published nothing yet, and is not read"
            )
            found[f"{sink.shown}: {what}"] = []
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


def published_alone(fs: Storage, listed: Sequence[SourceFile], links: Mapping[str, str] | None = None) -> Chained:
    """The files of a source, of sinks only those of the published result, not those of a run that was stopped while
    publishing, nor of the previous result. If the files lack some of what a sink has published, they were listed
    before that was. `links` says where links lead. Costs nothing for files that no sink has names for; else
    each folder that may be a sink is looked at once.
    """
    folders: dict[tuple[str, str, str], Folder] = {}
    real: dict[str, str] = {}
    found = (Part.of(fs, f.path, (links or {}).get(f.path), folders, real) for f in listed)
    parts = {part.shown: part for part in found if part is not None}
    with answered():
        known = sinks_of(list(parts.values()))
        sinks = {folder: sink for folder, sink in known.items() if sink is not None and not sink.denied}
        hollow = [_hollow(fs, path) for path in fs.hollow]
        chained = Chained([], {}, sinks, [], [], {}, {}, hollow)
        lists = [file.path for file in listed if _lists_vectors(fs, file.path)]
        for file in listed:
            if file.path not in lists:
                chained.add(file, parts.get(file.path), known)
    if lists and len(lists) == len(listed):
        raise BadSource(
            f"{lists[0]}: lists which vectors are of which input, and has no rows; what stands beside the vectors is "
            f"in {lists[0].removesuffix(MANIFEST)}**/*.ids.parquet"
        )
    return chained


def _lists_vectors(fs: Storage, path: str) -> bool:
    """Whether it is the file in which a sink without tables lists its vectors: no rows, though it is a table."""
    if path.partition("::")[0].rpartition("/")[2] != MANIFEST:
        return False
    mount = fs.mount(path)
    inner = mount.inner(path) if mount.prefix else os.path.abspath(path).replace(os.sep, "/")
    start = inner.removesuffix(MANIFEST)
    sink = Published.at(mount, layer(mount, start), start)
    return sink is not None and MANIFEST in sink.sizes


def _hollow(fs: Storage, path: str) -> Published:
    """A sink of which there are no files."""
    mount = fs.mount(path)
    inner = mount.inner(path) if mount.prefix else path
    start = inner if not inner or inner.endswith("/") else f"{inner}/"
    files = layer(mount, start)
    return Published.at(mount, files, start) or Published(start, frozenset(), 0, {}, {}, mount, files, None)


@contextmanager
def answered() -> Iterator[None]:
    """Raises RunFailed if the store of a source does not answer."""
    from gristmill.sources.patience import StoreAway

    try:
        yield
    except StoreAway as e:
        raise RunFailed(f"{e}: run again when the store answers") from e


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
            if name in listed or not PART.match(base) or not (folder in read or asked(sink.path(name))):
                continue
            if folder not in there:
                there[folder] = set(sink.files.names(join(sink.root, folder) if folder else sink.root))
            if base not in there[folder]:
                _refuse_lost(sink.path(name), "the file is gone", "" if folder in read else _ON_PURPOSE)


def _asking(mount: Mount, uris: Iterable[str]) -> Callable[[str], bool]:
    """Whether a folder or a pattern of these would read a file at a path of this file system."""
    from gristmill.sources.patterns import reads

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

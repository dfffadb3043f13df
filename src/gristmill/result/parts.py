"""Which files of a source may be parts of sinks, of which, and by what name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL, META
from gristmill.result.published import LETTERS, PART, Published, Stored, generation, public
from gristmill.values import dataclass

if TYPE_CHECKING:
    from gristmill.sources.paths import Mount, Storage


@dataclass(frozen=True)
class Root:
    """A folder that may be a sink: its path as people see it, what paths of files in it begin with, and what the names
    within that sink begin with of the files in a folder of it.
    """

    mount: Mount
    shown: str
    start: str
    below: str


@dataclass(frozen=True)
class Folder:
    """A folder of a source, and the folders that the sink of a part in it may be, the highest first, those that a link
    leads to last.
    """

    mount: Mount
    start: str
    roots: tuple[Root, ...]

    @staticmethod
    def of(mount: Mount, start: str, real: dict[str, str]) -> Folder:
        # Not above a file of a web server, which has no folders.
        found = {r: start[len(r) :] for r in _roots(start) if r.startswith(mount.inner_prefix)}
        if not mount.prefix and (there := _real(start[:-1], real) + "/") != start:
            known = {_real(r[:-1], real) for r in found}
            found |= {r: there[len(r) :] for r in _roots(there) if r[:-1] not in known}
        return Folder(mount, start, tuple(Root(mount, public(mount, r), r, below) for r, below in found.items()))

    def above(self, sinks: Mapping[str, Published]) -> Published | None:
        """The nearest of these sinks that it is in."""
        start = self.start
        while sinks:
            if (found := sinks.get(public(self.mount, start))) is not None:
                return found
            if not start.strip("/"):
                break
            start = _higher(start)
        return None


@dataclass(frozen=True)
class Part:
    """A file with a name as sinks give: its path as people see it, the number of the generation, and the folders that
    it is in, with its name in each: of a symbolic link also that of the file it leads to.
    """

    shown: str
    number: int
    places: tuple[tuple[Folder, str], ...]

    @staticmethod
    def of(
        fs: Storage, path: str, leads: str | None, folders: dict[tuple[str, str, str], Folder], real: dict[str, str]
    ) -> Part | None:
        """None if neither the file nor what it `leads` to has such a name."""
        paths = (path,) if leads is None else (path, leads)
        places: list[tuple[Folder, str]] = []
        for one in paths:
            if not PART.search(one):
                continue
            mount = fs.mount(one)
            inner = mount.inner(one) if mount.prefix else os.path.abspath(one).replace(os.sep, "/")
            name = inner.rpartition("/")[2]
            if not generation(name):
                continue
            key = (mount.prefix, mount.suffix, inner[: len(inner) - len(name)])
            if key not in folders:
                folders[key] = Folder.of(mount, key[2], real)
            places.append((folders[key], name))
        return Part(path, generation(places[0][1]), tuple(places)) if places else None

    def owner(self, known: Mapping[str, Published | None]) -> tuple[Published | None, str]:
        """The sink that it is of, and its name there if it is published: of two that it may be, the one that published
        it, else the nearest.
        """
        found: Published | None = None
        for folder, own in self.places:
            for root in folder.roots:
                sink, name = known.get(root.shown), root.below + own
                if sink is not None and name in sink.sizes:
                    return sink, name
                if sink is not None and sink.writes(name):
                    found = sink
        return found, ""

    def above(self, sinks: Mapping[str, Published]) -> Published | None:
        """The nearest of these sinks that it is in."""
        return self.places[0][0].above(sinks)

    def denied(self, known: Mapping[str, Published | None]) -> Published | None:
        """The first that it may be of whose records may not be read."""
        looked = (known.get(root.shown) for folder, _ in self.places for root in folder.roots)
        return next((sink for sink in looked if sink is not None and sink.denied), None)

    def root(self, depth: int) -> Root | None:
        """Of the folders that may be its sink, the one to be looked at after so many."""
        for folder, _ in self.places:
            if depth < len(folder.roots):
                return folder.roots[depth]
            depth -= len(folder.roots)
        return None


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
    while (name := found[-1].rstrip("/").rpartition("/")[2]) == LETTERS or name.find("=") > 0:
        found.append(_higher(found[-1]))
    return found[::-1]


def sinks_of(parts: Iterable[Part]) -> dict[str, Published | None]:
    """The sinks of these files by folder, and None for each other folder that was looked at: from the highest down, as
    far as files are not published by what was found there.
    """
    known: dict[str, Published | None] = {}
    layers: dict[tuple[str, str], Files] = {}
    depth, left = 0, list(parts)
    while left := [part for part in left if part.root(depth) is not None and not part.owner(known)[1]]:
        wanted: dict[tuple[str, str], tuple[Mount, dict[str, str]]] = {}
        for part in {tuple(id(folder) for folder, _ in part.places): part for part in left}.values():
            if (root := part.root(depth)) is not None and root.shown not in known:
                mount = root.mount
                wanted.setdefault((mount.prefix, mount.suffix), (mount, {}))[1][root.shown] = root.start
        for key, (mount, roots) in wanted.items():
            files = layers.setdefault(key, layer(mount, next(iter(roots.values()))))
            known.update(zip(roots, files.map(partial(Published.at, mount, files), roots.values()), strict=True))
        depth += 1
    return known


def layer(mount: Mount, start: str) -> Files:
    """What opens the records of a sink in a file system of a source, of which some paths begin with `start`."""
    return cast(Files, Stored(mount.listing, start.startswith("/"))) if mount.prefix else LOCAL

"""Names that lead to one file: which of them is read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gristmill.shards.sourcefiles import SourceFile
from gristmill.sources.archive import Archive
from gristmill.sources.listing import Entry
from gristmill.values import dataclass

if TYPE_CHECKING:
    from gristmill.sources.paths import Mount


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


@dataclass(frozen=True)
class _Place:
    """Where files are: of an archive the same for all its names, of which those are hard `links` that are no symbolic
    ones; `suffix` is what its members really end in.
    """

    key: tuple[str, str]
    suffix: str
    links: int

    @classmethod
    def of(cls, mount: Mount) -> _Place:
        if not isinstance(mount.listing, Archive):
            return cls((mount.prefix, mount.suffix), mount.suffix, 1)
        key, real, links = mount.listing.origin()
        return cls((mount.prefix, key), real, links)

    def real(self, mount: Mount, inner: str) -> str:
        """What a file is really called."""
        return mount.public(inner).removesuffix(mount.suffix) + self.suffix


def twins(
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
    places = [_Place.of(mount) for mount, _, _ in listings]
    several = {
        inode
        for inode, count in Counter(
            (*place.key, entry.inode)
            for (mount, _, listed), place in zip(listings, places, strict=True)
            for path, entry in listed
            if entry.inode and mount.public(path) in read
        ).items()
        if count > 1
    }
    groups: dict[tuple[str, str, str], dict[str, tuple[Any, _Name]]] = {}
    twice = list[str]()
    for order, ((mount, named, listed), place) in enumerate(zip(listings, places, strict=True)):
        found = [(path, e) for path, e in listed if (*place.key, e.inode) in several and mount.public(path) in read]
        above = os.path.commonpath([path for path, _ in listed]) if found and not mount.prefix else ""
        base = os.path.realpath(above)
        for inner, entry in found:
            group = groups.setdefault((*place.key, entry.inode), {})
            path = mount.public(inner)
            if path in group:
                twice.append(path)
                continue
            folders = frozenset(filter(None, read[path].folders.split("/")))
            if mount.prefix:
                real, link = place.real(mount, entry.real or inner), entry.real != ""
            else:
                real = os.path.realpath(path)
                link = real != os.path.join(base, os.path.relpath(path, above))
            rank = (path not in planned, -len(folders), order, link, path)
            group[path] = (rank, _Name(path, real, link, named, folders, whole(path), max(entry.links, place.links)))
    for group in groups.values():
        kept = list[tuple[_Name, str]]()  # what adds nothing to a name adds nothing to what that is kept by
        for _, name in sorted(group.values(), key=lambda ranked: ranked[0]):
            by = next((by for other, by in kept if name.is_same(other)), name.path)
            kept.append((name, by))
            if by != name.path:
                yield name.path, by
    yield from ((path, path) for path in twice)

"""What a sink has published, by its records, wherever it lies: also in a file system of a source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from gristmill.commit.documents import PlanDocument
from gristmill.commit.generation import PLAN, decode_schema, numbered, numbers
from gristmill.commit.publication import Publication, latest
from gristmill.errors import BadSource, CorruptStore
from gristmill.files.contract import Files
from gristmill.files.disk import META, join
from gristmill.job.uris import redact
from gristmill.process.pool import Pool
from gristmill.values import dataclass

if TYPE_CHECKING:
    from gristmill.sources.listing import Listing
    from gristmill.sources.paths import Mount

PART = re.compile(r"(?:part-\d{7,}|merged(?:-\d{7,})?)\.g(\d+)\.")
LETTERS = "_dead"
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
        return public(self.mount, self.start)

    def path(self, name: str) -> str:
        """The path of one of its files in a source."""
        return self.mount.public(self.start + name)

    def is_at(self, root: str, files: Files) -> bool:
        """Whether it has the generations of the sink in a folder of another file layer, by the names that chance gave
        them. So has a copy.
        """
        if self.claims != numbers(root, files):
            return False
        newest = max(self.claims)
        return numbered(self.root, newest, self.files).name == numbered(root, newest, files).name

    def writes(self, name: str) -> bool:
        """Whether a generation of this sink has or had this name for a file: one that it began, where it has parts."""
        folder, _, base = name.rpartition("/")
        if (number := generation(base)) not in self.claims:
            return False
        if number not in self.planned:
            self.planned[number] = self._partitioned(number)
        if folder == LETTERS or f"{folder}/".startswith(f"{META}/"):
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


def public(mount: Mount, start: str) -> str:
    """A folder as people see it, from what paths in it begin with; of a bucket or an archive its address."""
    folder = start.rstrip("/")
    return mount.public(folder if folder.startswith(mount.inner_prefix) else start)


def generation(name: str) -> int:
    """The number of the generation that has a part of this name."""
    match = PART.match(name)
    return 0 if match is None else int(match[1])


def _segments(columns: Sequence[str]) -> list[str]:
    """The names in front of `=` in the folders of a sink that is partitioned by these columns."""
    from gristmill.sinks.partition import folder_name

    whole = folder_name(dict.fromkeys(columns, "x"))
    return [name.partition("=")[0] for name in whole.split("/") if name]

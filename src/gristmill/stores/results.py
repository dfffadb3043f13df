"""A result that stores are to have: its generation among all that its sink ever had, and which rows are missing in a
store that was given it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from gristmill.commit.documents import Described, Live
from gristmill.commit.generation import Generation, decode_schema, generations, meta, sink_of
from gristmill.commit.publication import Publication, latest
from gristmill.errors import CorruptStore
from gristmill.files.contract import Files
from gristmill.files.disk import join
from gristmill.result.reading import dataset_of, spoilt
from gristmill.stores.contract import Mark, Store
from gristmill.stores.newest import distinct
from gristmill.values import dataclass


@dataclass(frozen=True)
class Identity:
    """What marks call a sink: see `sink_of`. One that is not `known` any more, as all documents that said it are lost,
    may have delivered under another name.
    """

    name: str
    known: bool = True


def identity(root: str, files: Files, found: Publication | None = None) -> Identity:
    """The identity of a sink."""
    result, claims = found or latest(root, files), generations(root, files)
    if name := (None if result is None else result.body.sink) or sink_of(claims):
        return Identity(name)
    first = next((g.name for g in claims if not g.lost), None)
    return Identity(first or hashlib.sha256(root.encode()).hexdigest()[:16], known=not claims)


@dataclass(frozen=True)
class Result:
    """A result to deliver, published or about to be: its generation, the `members` whose rows are in it, and what is
    recorded of its files.
    """

    generation: Generation
    members: tuple[int, ...]
    about: Described
    sink: Identity

    @staticmethod
    def of(found: Publication) -> Result:
        """The result that a publication made. Raises CorruptStore if its claim is lost."""
        claims = {g.number: g for g in generations(found.root, found.files)}
        generation = claims.get(found.generation)
        if generation is None or generation.lost:
            raise CorruptStore(
                f"{found.root}: the claim of generation {found.generation} is lost or damaged, and a delivery needs "
                "it: start over with --restart (restart=True)"
            )
        return Result(generation, tuple(found.generations), found.body, identity(found.root, found.files, found))

    def names(self) -> tuple[str, ...]:
        """The names of its members' folders, which no other sink has; "" for one whose claim is lost."""
        own = self.generation
        if self.members == (own.number,):
            return (own.name,)
        claims = {g.number: g.name for g in generations(own.root, own.files) if not g.lost}
        return tuple(claims.get(number, "") for number in self.members)

    def shares(self, mark: Mark) -> bool:
        """Whether all that a mark tells of is of the generations that the sink has had by now. Others are those of a
        copy that went its own way: one of the two was restored from a backup.
        """
        own = self.generation
        if mark.name == own.name:
            return True
        claims = {g.number: g for g in generations(own.root, own.files)}
        said = {mark.generation: mark.name, **dict(zip(mark.generations, mark.names, strict=False))}
        for number, name in said.items():
            claim = claims.get(number)
            if name and not (claim.name == name if claim and not claim.lost else self._has_folder(name)):
                return False
        return True

    def _has_folder(self, name: str) -> bool:
        """Whether there is the folder of a generation, whose claim is lost."""
        return self.generation.files.holds(join(meta(self.generation.root), name))

    @property
    def schema(self) -> pa.Schema:
        """That of its rows."""
        from gristmill.arrow.schemas import nullable

        return nullable(decode_schema(self.about.output_schema))

    def rows_of(self, files: Sequence[Live]) -> Any:
        """A dataset of some of its files."""
        return dataset_of(self.generation.root, self.generation.files, files, self.about)


def check_part(root: str, files: Files, f: Live, path: str) -> None:
    """Raises CorruptStore if the file at `path` is not what was committed as `f`. Looks on disks: object stores do so
    themselves.
    """
    if files.free_links and (wrong := spoilt(root, f, path, files)) is not None:
        raise CorruptStore(wrong)


def lacking(store: Store, mark: Mark, live: Sequence[Live], result: Result, shown: str) -> str | None:
    """What a store lacks of a result that was delivered to it, as a line; None if it has as many rows as it must. One
    that is appended to, or updated by key, may have more, of others, unless those were to go.
    """
    count, rows = store.count(None), [f for f in live if f.role == "rows" and f.generation in mark.generations]
    if mark.mode == "replace" or mark.delete:
        wanted, right = mark.rows, count == mark.rows
    elif mark.mode == "append":
        wanted = mark.total if mark.total is not None else _appended(result, rows, mark)
        right = count >= wanted
    else:
        wanted = mark.rows
        if right := count >= wanted:  # else there is no need to look which keys repeat in several generations
            wanted = _keys(result, rows, mark.key)
            right = count >= wanted
    return None if right else f"{shown}: holds {count:,} rows, but {wanted:,} were delivered"


def _keys(result: Result, rows: Sequence[Live], key: Sequence[str]) -> int:
    """How many keys files have, which are delivered by key: none repeats in a generation."""
    several = len({f.generation for f in rows}) > 1
    return distinct(result.rows_of(rows), key) if several else sum(f.rows for f in rows)


def _appended(result: Result, rows: Sequence[Live], mark: Mark) -> int:
    """How many rows appends brought at least, by a mark that does not tell: by key, they left earlier ones out."""
    return distinct(result.rows_of(rows), mark.key) if mark.key else sum(f.rows for f in rows)

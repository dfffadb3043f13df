"""What seals a result: a Merkle root over the plan and all receipts of each of its generations, and one over these.

A plan has the digests of model, code, options and the list of inputs; a receipt those of a shard's files, and of what
it read of each input. So whoever knows the root knows whether any of them was changed since. Index files, and what was
reduced, are made of the rows, and are not part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from gristmill.commit import merkle
from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Sealed
from gristmill.commit.generation import PLAN, Generation
from gristmill.commit.ledger import Ledger
from gristmill.commit.publication import Publication
from gristmill.commit.receipt import Receipt
from gristmill.files.disk import join
from gristmill.files.document import unsealed

__all__ = ["leaf_of_generation", "leaf_of_plan", "leaf_of_receipt", "leaves", "root_of", "sealed", "whole"]


def leaf_of_plan(checksum: str) -> bytes:
    """The leaf of a plan with this checksum."""
    return merkle.leaf(f"plan {checksum}".encode())


def leaf_of_receipt(receipt: Receipt) -> bytes:
    """The leaf of a receipt, of a shard or of a file that parts were joined to."""
    return _leaf("joined" if receipt.of else "shard", receipt.shard, receipt.checksum)


def _leaf(of: str, number: int, checksum: str) -> bytes:
    return merkle.leaf(f"{of} {number} {checksum}".encode())


def leaf_of_generation(found: Sealed) -> bytes:
    """The leaf of a generation in the tree over all of them."""
    return merkle.leaf(f"generation {found.generation} {found.leaves} {found.root}".encode())


def leaves(plan: str, done: Iterable[Receipt], joined: Iterable[Receipt]) -> list[bytes]:
    """The leaves of a generation: its plan, by the checksum, its shards, and the files that their parts were joined to,
    each in order of their numbers.
    """
    some = (sorted(found, key=lambda r: r.shard) for found in (done, joined))
    return [leaf_of_plan(plan), *(leaf_of_receipt(r) for found in some for r in found)]


def plan_checksum(generation: Generation) -> str:
    """The checksum of a plan, which was computed again. Raises CorruptStore, FileNotFoundError."""
    path = join(generation.folder, PLAN)
    return unsealed(generation.files.read(path), path)[1]


def sealed(generation: Generation, done: Ledger | None = None) -> Sealed:
    """A generation's root; its receipts that are `done` are not read again. Raises CorruptStore, FileNotFoundError."""
    found = Ledger.of(generation, done)
    joined = leaves("", (), receipts.standing(generation.joined, generation.files).values())[1:]
    shards = (_leaf("shard", *one) for one in found.checksums())
    every = itertools.chain([leaf_of_plan(plan_checksum(generation))], shards, joined)
    return Sealed(generation.number, merkle.root(every).hex(), 1 + len(found) + len(joined))


def root_of(all_of: Sequence[Sealed]) -> str:
    """The root of a result."""
    return merkle.root([leaf_of_generation(found) for found in all_of]).hex()


def whole(members: Sequence[Generation], base: Publication | None, own: Sealed) -> tuple[tuple[Sealed, ...], str]:
    """The roots of all generations of a result, those of its `base` as that has them (an earlier version had none), and
    the root over them. Raises CorruptStore, FileNotFoundError.
    """
    known = {found.generation: found for found in (() if base is None else base.body.sealed)}
    known[own.generation] = own
    found = tuple(known.get(g.number) or sealed(g) for g in members)
    return found, root_of(found)

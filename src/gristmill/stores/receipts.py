"""Receipts of deliveries: what a generation's folder says of the stores that were given its rows."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import replace

from gristmill.commit.documents import Delivered
from gristmill.commit.generation import Generation
from gristmill.errors import BadJob, CorruptStore
from gristmill.files.contract import Files
from gristmill.files.disk import join
from gristmill.job.delivery import Delivery, Place, place_of, same_table


def path_of(generation: Generation, shown: str) -> str:
    """Where the receipt of a generation's delivery to a store is."""
    return join(generation.deliveries, f"{hashlib.sha256(shown.encode()).hexdigest()[:16]}.json")


def receipts(generation: Generation) -> list[Delivered]:
    """The receipts of a generation's deliveries."""
    folder, files, found = generation.deliveries, generation.files, []
    for name in sorted(files.names(folder)):
        if (receipt := receipt_at(join(folder, name), files)) is not None:
            found.append(receipt)
    return found


def receipt_at(path: str, files: Files) -> Delivered | None:
    """A receipt; None if there is none, or a damaged one: the store knows, and the next delivery writes it again."""
    try:
        return Delivered.load_from(path, files)
    except (CorruptStore, FileNotFoundError):
        return None


def is_of(receipt: Delivered, place: Place) -> bool:
    """Whether a receipt is of a delivery to a place, however addresses spell it."""
    to = receipt.to
    with contextlib.suppress(BadJob):  # of an address that a secret holds, say
        return to == place.shown or same_table(place_of(to), place)
    return to == place.shown


def renewed(receipt: Delivered) -> Delivery:
    """The delivery of a receipt, without secrets."""
    return replace(Delivery(receipt.to, key=receipt.key or ()), mode=receipt.mode)  # type: ignore[arg-type]

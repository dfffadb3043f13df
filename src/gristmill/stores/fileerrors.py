"""Whose an error of a disk or a connection is while rows go from a sink to a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from gristmill.job.delivery import Place
from gristmill.stores.contract import Store, StoreUnavailable

__all__ = ["saying", "unread"]

T = TypeVar("T")


class Unread(Exception):
    """The sink's own rows cannot be read, for its cause."""


def unread(rows: Iterable[T]) -> Iterator[T]:
    """Rows of the sink, which a store reads: an error of theirs is not taken for one of the store."""
    try:
        yield from rows
    except OSError as e:
        raise Unread from e


def saying(store: Store, place: Place) -> Store:
    """The same store, whose errors of files, such as of a full disk, are a StoreUnavailable as others are: other stores
    of the job are elsewhere.
    """
    made: Any = _Saying(store, place)
    return made  # type: ignore[no-any-return]


class _Saying:
    def __init__(self, store: Store, place: Place) -> None:
        self._store, self._place = store, place

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def said(*given: Any, **named: Any) -> Any:
            try:
                return call(*given, **named)
            except Unread as e:
                raise (e.__cause__ or e) from None
            except OSError as e:
                raise StoreUnavailable(f"{self._place.shown}: {self._place.words(e)}") from e

        return said

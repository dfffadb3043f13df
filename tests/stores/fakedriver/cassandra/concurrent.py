"""Many statements at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def execute_concurrent(
    session: Any,
    statements: Iterable[tuple[Any, Any]],
    concurrency: int,
    raise_on_first_error: bool,
    results_generator: bool,
) -> Iterator[tuple[bool, Any]]:
    """One after the other."""
    assert concurrency > 0 and raise_on_first_error and results_generator
    return ((True, session.execute(statement)) for statement, _ in statements)

"""Bugs that were once there, put back: the exploration finds each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import stepped
from scenes import Act, Interleaving
from test_protocol import explore, memory  # noqa: F401 - a fixture

from gristmill.commit import publication, publish
from gristmill.driver import selection
from gristmill.errors import BadSource
from gristmill.worker.prepare import Prepare
from gristmill.worker.retried import Seeking

GROWN = "result and a new file"


def claims_forget(patch: pytest.MonkeyPatch) -> None:
    """42: what a claim without a plan was for is not compared."""
    patch.setattr(selection, "_meant", lambda *_: [])
    patch.setattr(selection, "_changed", lambda *_: [])


def twins_are_scored_again(patch: pytest.MonkeyPatch) -> None:
    """43: a retry takes all that a source row becomes, not the dead alone."""

    def made(self: Seeking, origin: np.ndarray, *_: Any) -> tuple[Seeking, np.ndarray]:
        return Seeking([None] * len(origin)), np.arange(len(origin))

    patch.setattr(Seeking, "made", made)


def publishing_is_not_fenced(patch: pytest.MonkeyPatch) -> None:
    """48: whoever publishes is the successor of whatever is there, and no lease is ever lost."""
    create = publication.create

    def unfenced(generation: Any, about: Any, *more: Any) -> Any:
        latest = publication.latest(generation.root, generation.files)
        return create(replace(generation, predecessor=latest.number if latest else 0), about, *more)

    patch.setattr(publish.publication, "create", unfenced)
    patch.setattr(stepped.SteppedLease, "held", lambda self: True)


def killers_are_not_sought(patch: pytest.MonkeyPatch) -> None:
    """55: rows that end their worker in a step are not isolated in a retry."""
    advance = Prepare._advance

    def advanced(self: Prepare, flow: Any, number: int, step: Any, suspects: Any) -> None:
        advance(self, flow, number, step, None if flow.seeking is not None else suspects)

    patch.setattr(Prepare, "_advance", advanced)


def restarts_resume_anything(patch: pytest.MonkeyPatch) -> None:
    """56: --restart goes on with whatever is unfinished."""
    choose = selection.choose

    def chosen(files: Any, root: str, uri: str, r: Any, *, restart: bool, **more: Any) -> Any:
        held = selection.Held.by(root, files)
        if restart and held.unfinished is not None and held.unfinished.planned:
            return selection.Choice(held.unfinished, True, r, held.base_of(held.unfinished))
        return choose(files, root, uri, r, restart=restart, **more)

    patch.setattr(selection, "choose", chosen)


@pytest.mark.long
@pytest.mark.parametrize(
    ("bug", "held", "first", "second", "ends"),
    [
        (claims_forget, GROWN, Act("append", 1), Act("append", 2), True),
        (twins_are_scored_again, "result", Act("retry", 2), Act("retry", 2), True),
        (killers_are_not_sought, "result", Act("retry", 4), Act("run", 1), False),
        (publishing_is_not_fenced, GROWN, Act("append", 1), Act("restart", 2), False),
        (restarts_resume_anything, GROWN, Act("append", 1), Act("restart", 2), True),
    ],
)
@pytest.mark.parametrize("kind", ["disk", pytest.param("store", marks=pytest.mark.soak)])
def test_bugs_that_are_put_back_are_found(
    bug: Callable[[pytest.MonkeyPatch], None],
    held: str,
    first: Act,
    second: Act,
    ends: bool,
    kind: str,
    memory: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within a walk over every third operation; without the bug the same walk finds nothing (test_protocol.py)."""
    bug(monkeypatch)
    path = Interleaving(kind, held, first, second, ends)
    came, at = True, 0
    while came:
        try:
            came, _ = explore(path, memory, at)
        except (AssertionError, BadSource):  # the latter: a result that is published and cannot be read
            return
        at += 3
    pytest.fail(f"{bug.__doc__} was not found in {at // 3} interleavings")

"""What is told to do about a run that did not end well: words, and the command."""

from __future__ import annotations

from typing import Any

from gristmill.observe.facts import Run
from gristmill.observe.standing import NOT_DELIVERED, UNREAD, standing


def told(words: str, **run: Any) -> str:
    """The way out of a run of this command, on a sink whose run is unfinished if a gate held it back."""
    how = {"generation": 2, "kind": "update", "state": "failed", "started": 1.0, "folder": "/w", **run}
    now = {"state": "unfinished" if run["exit_code"] == 3 else "done", "deliveries": [{"state": "failed"}]}
    found = standing(now, Run(run="r", command=tuple(words.split()), **how))
    return str(found.way)


def test_a_file_that_cannot_be_read_is_to_be_put_right() -> None:
    """Accepting it takes its rows away: that comes second, and the command is the plain one."""
    for words in ("gristmill run n.yaml", "gristmill run n.yaml --restart"):
        way = told(words, exit_code=3, error=f"in/b.parquet {UNREAD} the result has rows of it, which are not gone")
        assert way.startswith("put what cannot be read right") and way.endswith("cd /w && gristmill run n.yaml"), way
    way = told("gristmill run n.yaml", exit_code=3, error="min_ok")
    assert way.startswith("look at it") and way.endswith("n.yaml --accept")


def test_rows_that_no_store_will_take() -> None:
    """With keys that repeat no second try helps: the source is to be mended, and nothing more is to be accepted."""
    run = {"state": NOT_DELIVERED, "error": "1 key (id) repeats: 3 2 times"}
    way = told("gristmill run n.yaml --accept", exit_code=2, **run)
    assert (
        "in the source or the delivery" in way and "store is well" not in way and way.endswith("gristmill run n.yaml")
    )
    way = told("gristmill run n.yaml", exit_code=1, **{**run, "error": "connection refused"})
    assert way.startswith("once the store is well")

"""How things stand with a sink, why, and what to do: the same words in `status`, `report` and alerts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from gristmill.observe.facts import Run, Standing, Way

Line = tuple[str, str]  # a label, and a text
NOT_DELIVERED, LATE, KILLED = "published, but not delivered", "deadline missed", "killed"
UNREAD = "cannot be read, and"  # in the message of the gate for files of an update
FILE_FIRST = (
    "put what cannot be read right, and run it again; with --accept (accept=True) the others are published without it"
)
PUT_BACK = (
    "run the job again: it puts back what is still kept, and says what to do otherwise; gristmill verify names all "
    "that is wrong"
)
WHICH = "the message names the ways: which one is meant, only you can know"
_STATES = {
    "running": "running",
    "unfinished": "not finished, and not running",
    "done": "done and published",
    "empty": "nothing was run here",
}
_ENDED = {
    1: "failed",
    2: "could not begin",
    3: "was held back by a gate",
    4: "was refused: input, model or code are not those of its plan",
    130: "was stopped",
    143: "was stopped",
}


def standing(now: Mapping[str, Any], last: Run | None) -> Standing:
    """How things stand, by the state of a sink (`driver.views.status`) and the last run on it. A run that is under way
    counts more than one that failed.
    """
    state, gate = str(now.get("state")), str(now.get("gate") or "")
    said, bad = _STATES.get(state, state), last is not None and failed(last)
    if state == "done" and not bad and (harmed := now.get("harmed")):
        more = f", and {len(harmed) - 1} more" if len(harmed) > 1 else ""
        return Standing("published, but not all of it is there", f"{harmed[0]}: gone, or cut{more}", Way(PUT_BACK))
    if state == "running" or (state != "unfinished" and not bad):
        return Standing(said)
    if last is None or not bad:
        if gate:
            text = "look at it, and publish it as it is: run the job again with --accept (accept=True)"
            text = FILE_FIRST if UNREAD in gate else text
            return Standing("not published: a gate did not hold", gate, Way(text))
        return Standing(said, "", _resumed(last))
    if last.state == NOT_DELIVERED and state == "done":
        if all(one["state"] == "delivered" for one in now.get("deliveries", ())):
            return Standing(said)  # somebody has, since
        return Standing(NOT_DELIVERED, last.error, way(last))
    if state == "unfinished" and last.exit_code == 3:
        what = "its deadline had passed" if last.state == LATE else "a gate did not hold"
        return Standing(f"not published: {what}", last.error, way(last))
    ended = "ended without a word" if last.state == KILLED else _ENDED.get(last.exit_code or 1, "failed")
    before = {"done": "published before", "empty": "nothing is published", "unfinished": "not finished"}.get(
        state, said
    )
    return Standing(f"{before}; the last run {ended}", last.error, way(last))


def failed(run: Run) -> bool:
    """Whether a run did not end well."""
    return run.state == KILLED or run.exit_code not in (None, 0)


def way(run: Run) -> Way:
    """What to do about a run that did not end well."""
    if run.state == NOT_DELIVERED and run.exit_code == 2:
        without = " without --accept" if "--accept" in run.command else ""
        text = f"mend what the message names, in the source or the delivery, and run it again{without}"
        return Way(text, _command(run, accept=False))
    if run.state == NOT_DELIVERED:
        return Way("once the store is well, run it again: nothing is scored again", _command(run))
    if run.exit_code == 2:
        return Way("mend what the message names, and run it again", _command(run))
    if run.exit_code == 3 and UNREAD in run.error:
        return Way(FILE_FIRST, _command(run, accept=False))
    if run.exit_code == 3:
        text = "go on and publish late" if run.state == LATE else "look at it, and publish it as it is"
        others = "" if run.state == LATE else " (or mend data or job, and run it without --accept)"
        return Way(f"{text} with --accept (accept=True){others}", _command(run, accept=True))
    if run.exit_code == 4:
        return Way(WHICH)
    return _resumed(run)


def _resumed(run: Run | None) -> Way:
    return Way("run the job again to resume: what is scored is kept", "" if run is None else _command(run))


def _command(run: Run, accept: bool | None = None) -> str:
    """As it was, or so that it accepts what was found, or does not."""
    if not run.command:
        return ""
    words = list(run.command)
    if accept is not None and "retry-dead" not in words[:2]:
        words = [word for word in words if word not in ("--accept", "--restart")] + ["--accept"] * accept
    return f"cd {shlex.quote(run.folder)} && {shlex.join(words)}"


# ---------------------------------------------------------------- as lines


def standing_lines(standing: Standing) -> Iterator[Line]:
    """How things stand: `state`, `why`, and `next`, what to do."""
    yield "state", standing.words
    if standing.why:
        yield "why", standing.why
    if standing.way is not None:
        yield "next", str(standing.way)


def staged_lines(sink: str, now: Mapping[str, Any]) -> Iterator[Line]:
    """What is staged: rows that are all scored, and not published, with what compares them with those that are."""
    if now.get("state") != "unfinished" or not now.get("shards_total") or now.get("shards_done") != now["shards_total"]:
        return
    rows = ", ".join(f"{now.get(f'rows_{name}') or 0:,} {name}" for name in ("ok", "dead", "filtered"))
    named = f"{sink.rstrip('/')}@staged"
    both = (
        f"; gristmill diff {shlex.quote(sink)} {shlex.quote(named)} tells what is other" if now.get("published") else ""
    )
    yield "staged", f"{rows}{both or f'; gm.read({named!r}) has them'}"

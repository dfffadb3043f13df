"""Which generation a run works on: a new one, an unfinished one, or none because there is nothing to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gristmill.commit import generation as generations
from gristmill.commit.generation import Generation
from gristmill.errors import BadJob, CorruptStore, PlanChanged
from gristmill.plan import fingerprint
from gristmill.plan.contracts import Files
from gristmill.plan.fingerprint import Fingerprint
from gristmill.plan.shard import Selection
from gristmill.planning import Resolved


@dataclass(frozen=True)
class Choice:
    """`generation` None: nothing to do. `resumed`: its plan stands already. `resolved` may be fewer files (append)."""

    generation: Generation | None
    resumed: bool
    resolved: Resolved


def choose(files: Files, root: str, uri: str, r: Resolved, *, restart: bool, append: bool) -> Choice:
    """Compare what the sink holds with the job. Raises PlanChanged, with a readable difference."""
    known = generations.generations(root, files)
    body = generations.success(root, files)
    live = 0 if body is None else int(body["generation"])
    latest = known[-1] if known else None
    given_up = latest is not None and latest.kind == "retry-dead" and not latest.planned  # the live result is whole
    if latest is not None and latest.number > live and not given_up:
        return _unfinished(files, root, uri, r, latest, known, restart)
    if latest is None or body is None:
        return Choice(generations.claim(files, root, "new"), False, r)
    if restart:
        return Choice(generations.claim(files, root, "restart"), False, r)
    return _finished(files, root, uri, r, [g for g in known if g.number in body["generations"]], append)


def _unfinished(
    files: Files, root: str, uri: str, r: Resolved, latest: Generation, known: Sequence[Generation], restart: bool
) -> Choice:
    if not latest.planned:
        if latest.kind == "append":
            return Choice(latest, False, only_new(r, inputs_of(_members(files, root, known))))
        return Choice(latest, False, r)
    try:
        planned = inputs_of([latest])
        ours = {k: v for k, v in r.fingerprint.inputs.items() if k in planned or latest.kind != "append"}
        lines = _compare(latest, replace(r.fingerprint, inputs=ours), planned)
    except CorruptStore:
        if not restart:
            raise
        lines = ["plan: cannot be read"]
    if not lines:
        return Choice(latest, True, r)
    if not restart:
        raise PlanChanged(
            f"{uri}: an unfinished run is here, planned for something else:\n{fingerprint.listed(lines)}\n"
            "put it back to resume that run, or use --restart to begin anew"
        )
    return Choice(generations.claim(files, root, "restart"), False, r)


def _finished(files: Files, root: str, uri: str, r: Resolved, members: Sequence[Generation], append: bool) -> Choice:
    stored = inputs_of(members)
    lines = _compare(members[-1], r.fingerprint, stored)
    if not lines:
        return Choice(None, True, r)
    only_inputs = all(line.startswith("input:") for line in lines)
    grown = only_inputs and fingerprint.new_inputs_only(stored, r.fingerprint)
    if append and grown:
        fewer = only_new(r, stored)
        return Choice(generations.claim(files, root, "append", base=members[-1].number), False, fewer)
    ways = "--restart to score everything anew" + (", or --append to score only the new files" if grown else "")
    raise PlanChanged(f"{uri}: holds a result of something else:\n{fingerprint.listed(lines)}\nuse {ways}")


def _compare(planned: Generation, now: Fingerprint, inputs: dict[str, str]) -> list[str]:
    old = generations.read_plan(planned).about["fingerprint"]
    return fingerprint.differences({**old, "inputs": fingerprint.digest_of(inputs)}, now, inputs)


def _members(files: Files, root: str, known: Sequence[Generation]) -> list[Generation]:
    body: dict[str, Any] = generations.success(root, files) or {"generations": []}
    return [g for g in known if g.number in body["generations"]]


def inputs_of(members: Sequence[Generation]) -> dict[str, str]:
    """Input digests of several generations by path."""
    merged: dict[str, str] = {}
    for member in members:
        merged.update(generations.stored_inputs(member))
    return merged


def only_new(r: Resolved, stored: dict[str, str]) -> Resolved:
    """The same job over the files that are not in `stored`. Raises BadJob where new rows cannot be told from old
    ones.
    """
    if r.job.source.limit is not None or r.job.source.sample is not None:
        raise BadJob("--append together with limit or sample: which rows are new cannot be told")
    files = tuple(f for f in r.files if f.file.path not in stored)
    inputs = {k: v for k, v in r.fingerprint.inputs.items() if k not in stored}
    return replace(
        r, files=files, selection=Selection.everything(files), fingerprint=replace(r.fingerprint, inputs=inputs)
    )

"""Scoring dead letters again: a generation whose rows are the dead rows of the live result, and nothing else."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import lru_cache

import numpy as np
import pyarrow as pa

from gristmill.commit import publication
from gristmill.commit.generation import Generation, sources_of
from gristmill.driver.resolved import Resolved
from gristmill.driver.selection import ACCEPT, RESTART, RETRY, Choice, Held, as_it_is, before_others, compared, paid
from gristmill.driver.sourcecheck import owned
from gristmill.errors import BadJob, CorruptStore, PlanChanged
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL, join
from gristmill.fingerprint import digests
from gristmill.result.reading import committed_letters, dead_letters, letters_of
from gristmill.shards.counts import Counts
from gristmill.shards.shard import Selection
from gristmill.values import dataclass
from gristmill.worker.bisection import Stage
from gristmill.worker.identity import Copy
from gristmill.worker.retried import Sought

RUN = "use gristmill run JOB (job.run())"
DEAD_FILE = "retried.arrow"


@dataclass(frozen=True)
class Only:
    """The rows that a retry scores: those that were dead, by source, position and copy."""

    path: str
    sha256: str
    files: Files = field(default=LOCAL, compare=False, repr=False)

    def wanted(self, source: str) -> dict[int, Sought]:
        """A source's dead rows by position, then by the path of their copy; None for a source row that died itself."""
        return _wanted(self).get(source, {})


def letters_table(path: str, sha256: str, files: Files) -> pa.Table:
    """The rows that a retry was begun for; `sha256` is "" if nobody has recorded it. Raises CorruptStore."""
    with contextlib.suppress(FileNotFoundError):
        data = files.read(path)
        if sha256 in ("", hashlib.sha256(data).hexdigest()):
            with contextlib.suppress(pa.ArrowException):
                return pa.ipc.open_file(pa.BufferReader(data)).read_all()
    raise CorruptStore(f"{path}: missing or not what the plan says: start over with --restart (restart=True)")


@lru_cache(maxsize=4)
def _wanted(only: Only) -> dict[str, dict[int, Sought]]:
    found: dict[str, dict[int, Sought]] = {}
    for row in letters_table(only.path, only.sha256, only.files).to_pylist():
        rows = found.setdefault(row["source"], {})
        copy = None if row["copy"] is None else Copy.read(row["copy"], row["copies"], row["digest"])
        if copy is None:
            rows[row["position"]] = None
        else:
            copies = rows.setdefault(row["position"], {})
            assert copies is not None, f"{row['source']} at {row['position']}: dead, and made many"
            copies[copy.path] = copy
    return found


def choose(
    files: Files, root: str, uri: str, r: Resolved, *, accept_code_change: bool, tell: Callable[[str], None]
) -> Choice:
    """A retry generation over the live dead letters, or the unfinished one. Raises PlanChanged, BadJob."""
    held = Held.by(root, files, tell)
    r = held.known(r)
    base = publication.published(root, files)
    letters = dead_letters(letters_of(root, base.live(), files), files)
    begun = held.unfinished if held.unfinished is not None and held.unfinished.planned else None
    if begun is not None and begun.kind != "retry-dead":
        _refuse(held, begun, uri, r, letters.num_rows)
    aside = begun if begun is not None and begun.kind != "retry-dead" else None
    begun = None if aside is not None else begun
    members = held.members()
    stored = held.inputs([*members, *([] if begun is None else [begun])], r)
    r = before_others(r, list(stored))  # a retry ignores files that appeared since
    if base.body.rows_ok:  # else what is written has the types of the first rows scored, in whichever run
        r = owned(r, members, set(letters.column("source").to_pylist()))
    if begun is not None and not compared(begun, r.fingerprint, stored, members):
        return Choice(begun, True, r, base)
    lines = compared(members[-1], r.fingerprint, stored, members[:-1])
    code = [line for line in lines if line.startswith("code:")]
    others = [line for line in lines if r.pins and line.startswith("input:")]  # a store goes on without its letters
    if letters.num_rows == 0 and len(code) + len(others) == len(lines):
        return Choice(None, True, r, base)
    if len(code) != len(lines) or (code and not accept_code_change):
        way = f"put it back, then retry-dead to score the dead letters again, or use {RESTART}"
        if len(code) == len(lines):
            way = f"use {RETRY} the dead letters with the new code"
        elif r.job.update is not None:
            way = f"{RUN}: an update scores what has changed, and dead rows again"
        elif not r.pins and r.job.source.data is None and all(line.startswith("input:") for line in lines):
            way += (
                ", or run the job with --update (update=True), which scores the files that have changed, and dead rows"
            )
        raise PlanChanged(f"{uri}: this is not the job that wrote these dead letters:\n{digests.listed(lines)}\n{way}")
    if aside is not None and (dropped := paid(aside)):
        way = f"{RUN}{' with --append (append=True)' if aside.kind == 'append' else ''}"
        raise BadJob(
            f"{uri}: the unfinished {aside.kind} here (generation {aside.number}) would be given up, with {dropped}: "
            f"{way} to go on with it, then retry-dead; or use {RESTART}"
        )
    if aside is not None and aside.kind == "append":
        tell("the unfinished append is put aside: the next run with --append (append=True) starts it over")
    generation = held.claim("retry-dead", r)
    return Choice(
        generation,
        False,
        replace(r, selection=_selection(r, letters, members), only=_stored(files, generation, letters)),
        base,
    )


def _refuse(held: Held, begun: Generation, uri: str, r: Resolved, letters: int) -> None:
    """Raises BadJob if there is an unfinished restart of this same job, which will replace the letters, or an
    unfinished append or update that alone has dead rows, which are not dead letters until it is published.
    """
    inputs = held.inputs([begun] if begun.base is None else [*held.members(), begun], r)
    lines = compared(begun, before_others(r, list(inputs)).fingerprint, inputs)  # new files do not count
    same = all(r.pins and line.startswith("input:") for line in lines)  # a restart has read the store anew
    if begun.kind in ("new", "restart"):
        if same:
            raise BadJob(
                f"{uri}: an unfinished run of this job is here, whose result will replace these letters: use run "
                "to go on with it, or --restart (restart=True) to begin it anew"
            )
    elif not letters and (dead := committed_letters(begun).num_rows):
        if begun.kind == "update":
            raise BadJob(
                f"{uri}: no row of the published result is dead; the {dead:,} dead rows are those of an update that "
                f"has not finished, and is not published: {RUN} to go on with it, or {ACCEPT}, then retry-dead to "
                "score its dead rows again"
            )
        ways = f"{ACCEPT}, then {RETRY} its dead rows with the new code, or {RESTART}"
        ways = f"use {ways}" if as_it_is(begun, lines) else f"put it back, then {ways}"
        if same:
            ways = f"use {ACCEPT}, then retry-dead to score its dead rows again, or {RESTART}"
        raise BadJob(
            f"{uri}: no row of the published result is dead; the {dead:,} dead rows are those of a run with --append "
            f"that has not finished, and is not published: {ways}"
        )


def _selection(r: Resolved, letters: pa.Table, members: Sequence[Generation]) -> Selection:
    """The source rows behind the letters, those of each night apart: a shard's rows are as old as the generation that
    read them first (`sources_of`). A letter whose source is no longer in the job is an error.
    """
    nights = sources_of(members)
    place = {f.file.path: i for i, f in enumerate(r.files)}
    dead = zip(*(letters.column(n).to_pylist() for n in ("source", "position")), strict=True)
    rows = sorted({(nights.get(s, 0), place[s], p) for s, p in dead})
    ranges = np.array([(i, p, p + 1) for _, i, p in rows], dtype=np.int64).reshape(-1, 3)
    return Selection(ranges, np.array([night for night, _, _ in rows], dtype=np.int64))


def _stored(files: Files, generation: Generation, letters: pa.Table) -> Only:
    table = letters.select(["source", "position", "copy", "copies", "digest"])
    path = join(generation.folder, DEAD_FILE)
    out = pa.BufferOutputStream()
    with pa.ipc.new_file(out, table.schema) as file:
        file.write_table(table)
    data = out.getvalue().to_pybytes()
    files.write_over(path, data)
    return Only(path, hashlib.sha256(data).hexdigest(), files)


def combined(base: Counts, base_dead: pa.Table, new: Counts) -> Counts:
    """Counts of the live result after a retry: the base's without its dead rows, plus the retry's.

    The base still counts the source row of a dead copy as expanded; a dead source row is counted by the retry alone.
    """
    made, before = 0, 0
    copies, stages = (base_dead.column(name).to_pylist() for name in ("copy", "stage"))
    for copy, stage in zip(copies, stages, strict=True):
        made += copy is not None
        before += Stage(stage) in (Stage.READ, Stage.BEFORE)
    scored = len(copies) - made - before  # source rows that had reached the model
    gone = Counts(
        rows_in=before + scored, dead=before, expanded=scored, derived=scored + made, derived_dead=scored + made
    )
    left = Counts(*(a - b for a, b in zip(base.values(), gone.values(), strict=True)))
    return left + new

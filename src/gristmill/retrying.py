"""Scoring dead letters again: a generation whose rows are the dead rows of the live result, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import pyarrow as pa

from gristmill.choosing import Choice, Held, compared
from gristmill.commit import publication
from gristmill.commit.generation import Generation
from gristmill.commit.reading import dead_letters, letters_of
from gristmill.commit.store import LOCAL, join
from gristmill.errors import BadJob, PlanChanged
from gristmill.plan import fingerprint
from gristmill.plan.contracts import Files
from gristmill.plan.counts import Counts
from gristmill.plan.shard import Selection
from gristmill.planning import Resolved

DEAD_FILE = "retried.table"  # Parquet, under a name that no glob for data finds
BEFORE_MODEL = ("read", "step")  # stages at which a whole source row died


@dataclass(frozen=True)
class Only:
    """Which derived rows of a retried shard count: those that were dead, by source, position and copy."""

    path: str
    files: Files = field(default=LOCAL, compare=False, repr=False)

    def wanted(self, source: str) -> dict[int, set[int] | None]:
        """Copies by position for a source; None for a source row that had died as a whole."""
        return _wanted(self).get(source, {})


@lru_cache(maxsize=4)
def _wanted(only: Only) -> dict[str, dict[int, set[int] | None]]:
    import pyarrow.parquet as pq

    found: dict[str, dict[int, set[int] | None]] = {}
    for row in pq.read_table(pa.BufferReader(only.files.read(only.path))).to_pylist():
        rows = found.setdefault(row["source"], {})
        if row["whole"]:
            rows[row["position"]] = None
        elif rows.get(row["position"], set()) is not None:
            copies = rows.setdefault(row["position"], set())
            assert copies is not None
            copies.add(row["copy"])
    return found


def choose(
    files: Files, root: str, uri: str, r: Resolved, *, accept_code_change: bool, tell: Callable[[str], None]
) -> Choice:
    """A retry generation over the live dead letters, or the unfinished one. Raises PlanChanged, BadJob."""
    held = Held.by(root, files, tell)
    base = publication.published(root, files)
    begun = held.unfinished if held.unfinished is not None and held.unfinished.planned else None
    if begun is not None and begun.kind != "retry-dead":
        raise BadJob(f"{uri}: an unfinished run is here: finish it before its dead letters are scored again")
    members = held.members()
    stored = held.inputs([*members, *([] if begun is None else [begun])], r)
    if begun is not None and not compared(begun, r.fingerprint, stored):
        return Choice(begun, True, r, base)
    lines = compared(members[-1], r.fingerprint, stored)
    code = [line for line in lines if line.startswith("code:")]
    if len(code) != len(lines) or (code and not accept_code_change):
        way = (
            "--accept-code-change scores the dead letters with the new code"
            if len(code) == len(lines)
            else "put it back"
        )
        raise PlanChanged(f"{uri}: the job is not the one whose letters these are:\n{fingerprint.listed(lines)}\n{way}")
    letters = dead_letters(letters_of(root, base.live(), files), files)
    if letters.num_rows == 0:
        return Choice(None, True, r, base)
    generation = held.claim("retry-dead", r)
    return Choice(
        generation,
        False,
        replace(r, selection=_selection(r, letters), only=_stored(files, generation, r, letters)),
        base,
    )


def _selection(r: Resolved, letters: pa.Table) -> Selection:
    """The source rows behind the letters. A letter whose source is not in the job any more is an error."""
    place = {f.file.path: i for i, f in enumerate(r.files)}
    rows = sorted(
        {(place[s], p) for s, p in zip(*(letters.column(n).to_pylist() for n in ("source", "position")), strict=True)}
    )
    return Selection(np.array([(i, p, p + 1) for i, p in rows], dtype=np.int64).reshape(-1, 3))


def _stored(files: Files, generation: Generation, r: Resolved, letters: pa.Table) -> Only:
    import pyarrow.parquet as pq

    derived = any(s.kind == "flat_map" for s in r.job.steps)
    whole = [not derived or stage.startswith(BEFORE_MODEL) for stage in letters.column("stage").to_pylist()]
    table = letters.select(["source", "position", "copy"]).append_column("whole", pa.array(whole))
    path = join(generation.folder, DEAD_FILE)
    out = pa.BufferOutputStream()
    pq.write_table(table, out)
    files.write_over(path, out.getvalue().to_pybytes())
    return Only(path, files)


def combined(base: Counts, base_dead: pa.Table, derived: bool, new: Counts) -> Counts:
    """Counts of the live result after a retry: the base's without its dead rows, and the retry's.

    A derived row's source row stays counted as expanded by the base; a whole row's fate is the retry's alone.
    """
    stages = base_dead.column("stage").to_pylist()
    before = sum(s.startswith(BEFORE_MODEL) for s in stages)
    after = len(stages) - before
    if derived:
        gone = Counts(rows_in=before, dead=before, derived=after, derived_dead=after)
    else:
        gone = Counts(rows_in=before + after, dead=before, expanded=after, derived=after, derived_dead=after)
    left = Counts(*(a - b for a, b in zip(base.values(), gone.values(), strict=True)))
    return left + new

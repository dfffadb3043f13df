"""What `gristmill up` remembers: which ticks are claimed, what became of their runs, and up to when it has looked. A
file of SQLite; each change is one transaction, on disk before anything follows from it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from gristmill.errors import BadJob, NewerFormat, RunFailed
from gristmill.files.sqlitelog import log_ahead
from gristmill.schedule.contract import RUN, Run, written

FORMAT = 2
PATIENCE = 5.0  # seconds to wait for whoever else has the file open
KEPT = 100 * 86400.0  # seconds that runs which ended are remembered
_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
  job TEXT, tick TEXT, state TEXT, next REAL, attempts INTEGER, tries INTEGER, exit INTEGER, begun REAL, ended REAL,
  deadline REAL, late INTEGER, reason TEXT, what TEXT, options TEXT, PRIMARY KEY (job, tick, what)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS unfinished ON runs (state, next) WHERE state IN ('due', 'running');
CREATE TABLE IF NOT EXISTS jobs (job TEXT PRIMARY KEY, since TEXT, said TEXT, files BLOB) WITHOUT ROWID;
"""
_OLD = "job, tick, state, next, attempts, tries, exit, begun, ended, deadline, late, reason"
_COLUMNS = f"{_OLD}, what, options"
# Format 1 knew only runs, so that a tick had one.
_FROM_1 = f"""
BEGIN IMMEDIATE;
DROP INDEX IF EXISTS unfinished;
ALTER TABLE runs RENAME TO runs1;
{_TABLES}
INSERT INTO runs SELECT {_OLD}, 'run', '' FROM runs1;
DROP TABLE runs1;
PRAGMA user_version = {FORMAT};
COMMIT;
"""


class State:
    """The state in a folder. Raises RunFailed if it cannot be opened; methods raise sqlite3.Error."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "up.sqlite")
        try:
            os.makedirs(folder, exist_ok=True)
            self._held = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)
            log_ahead(self._held, PATIENCE)
            self._held.execute("PRAGMA synchronous = FULL")
            found = self._held.execute("PRAGMA user_version").fetchone()[0]
            if found > FORMAT:
                raise NewerFormat(
                    f"{self.path}: it has format {found}, and this version knows {FORMAT}: use a later one"
                )
            self._held.executescript(_FROM_1 if found == 1 else _TABLES)
            if found < FORMAT:
                self._held.execute(f"PRAGMA user_version = {FORMAT}")
            self._held.execute("CREATE TABLE IF NOT EXISTS of (folder TEXT)")
        except (sqlite3.Error, OSError) as e:
            if is_damaged(e):
                raise RunFailed(self.damaged(e)) from e
            what = getattr(e, "strerror", None) or e
            raise RunFailed(
                f"{self.path}: the state cannot be opened ({what}): free some space, or name another folder (--state)"
            ) from e

    def damaged(self, why: Exception) -> str:
        """What there is to do if the file does not read back."""
        return (
            f"{self.path}: the state is damaged ({why}): move it away, with {os.path.basename(self.path)}-wal and -shm "
            "if they are there, and start again with --since TIME, the last night that is known to be done: what is in "
            "the sinks is not run twice"
        )

    def belong(self, jobs: str) -> None:
        """Note that this is the state of a folder of jobs. Raises BadJob as `refuse_others` does. A folder that is gone
        was moved.
        """
        with self._change() as held:
            found, mine = self.refuse_others(jobs)
            if found != mine:
                held.execute("DELETE FROM of")
                held.execute("INSERT INTO of VALUES (?)", (mine,))

    def refuse_others(self, jobs: str) -> tuple[str | None, str]:
        """What this says of its folder of jobs, and what it is to say of this one; nothing is written. Raises BadJob if
        it is the state of another one: jobs of one name would be taken for each other.
        """
        here = os.path.abspath(os.path.dirname(self.path))
        mine = os.path.relpath(os.path.abspath(jobs), here)
        row = self._held.execute("SELECT folder FROM of").fetchone()
        found = None if row is None else row[0]
        other = None if found is None else os.path.normpath(os.path.join(here, found))
        if other is not None and found != mine and os.path.isdir(other) and not os.path.samefile(other, jobs):
            raise BadJob(
                f"{self.path}: is the state of the jobs in {other}, whose times would be taken for those of "
                f"{jobs}: name a folder of its own for these (--state)"
            )
        return found, mine

    def close(self) -> None:
        """Close the file."""
        self._held.close()

    @contextlib.contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        self._held.execute("BEGIN IMMEDIATE")
        try:
            yield self._held
            self._held.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._held.execute("ROLLBACK")
            raise

    # ------------------------------------------------ jobs

    def since(self, job: str) -> tuple[datetime, str, bytes] | None:
        """Up to when ticks of a job were looked at, what its schedule said then, and the files that were there."""
        found = self._held.execute("SELECT since, said, files FROM jobs WHERE job = ?", (job,)).fetchone()
        return None if found is None else (datetime.fromisoformat(found[0]), found[1], found[2])

    def know(self, job: str, since: datetime, said: str) -> None:
        """From now on ticks of a job count that are later than this."""
        with self._change() as held:
            held.execute(
                "INSERT INTO jobs VALUES (?, ?, ?, x'') ON CONFLICT (job) DO UPDATE SET since = ?2, said = ?3",
                (job, written(since), said),
            )

    def claim(self, runs: Sequence[Run], since: datetime, files: bytes | None = None) -> list[Run]:
        """Claim ticks of a job, and note that it was looked at up to a time; returns those that nobody had claimed. A
        run that is covered takes the place of one that is due and was claimed before.
        """
        new = []
        with self._change() as held:
            for run in runs:
                made = held.execute(
                    f"INSERT OR IGNORE INTO runs ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)", _values(run)
                )
                new += [run] if made.rowcount else []
            job = runs[0].job
            held.execute("UPDATE jobs SET since = max(since, ?) WHERE job = ?", (written(since), job))
            if files is not None:
                held.execute("UPDATE jobs SET files = ? WHERE job = ?", (files, job))
        return new

    # ------------------------------------------------ runs

    def unfinished(self) -> list[Run]:
        """All runs that are due or going on, in the order in which they are to be started."""
        order = "ORDER BY next, tick, job"
        return self._read(f"SELECT {_COLUMNS} FROM runs WHERE state IN ('due', 'running') {order}")

    def last(self, job: str, most: int = 1) -> list[Run]:
        """The latest runs of a job, the newest first."""
        return self._read(f"SELECT {_COLUMNS} FROM runs WHERE job = ? ORDER BY tick DESC, what LIMIT ?", job, most)

    def failed(self, most: int) -> list[Run]:
        """The latest runs, of all jobs, that a person has to look at."""
        return self._read(f"SELECT {_COLUMNS} FROM runs WHERE state = 'failed' ORDER BY tick DESC LIMIT ?", most)

    def of(self, job: str, tick: datetime) -> list[Run]:
        """What was run for a tick: the run itself, and after it the retry of its dead letters."""
        return self._read(
            f"SELECT {_COLUMNS} FROM runs WHERE job = ? AND tick = ? ORDER BY what = '{RUN}' DESC", job, written(tick)
        )

    def done_since(self, job: str, since: datetime) -> dict[str, float]:
        """Ticks of a job whose runs were done after a time, and when."""
        some = "SELECT tick, ended FROM runs WHERE job = ? AND state = 'done' AND what = 'run' AND ended >= ?"
        return dict(self._held.execute(some, (job, since.timestamp())).fetchall())

    def claimed(self, job: str) -> set[str]:
        """All ticks of a job that are claimed."""
        return {tick for (tick,) in self._held.execute("SELECT tick FROM runs WHERE job = ? AND what = 'run'", (job,))}

    def update(self, run: Run, was: str) -> bool:
        """Store what became of a run whose state was `was`; whether it still was."""
        with self._change() as held:
            made = held.execute(
                "UPDATE runs SET state=?3, next=?4, attempts=?5, tries=?6, exit=?7, begun=?8, ended=?9, deadline=?10, "
                "late=?11, reason=?12 WHERE job=?1 AND tick=?2 AND what=?13 AND state=?15",
                (*_values(run), was),
            )
            return bool(made.rowcount)

    def ask(self, run: Run) -> bool:
        """Put a run into the queue that somebody asks for, unless it is there, or going on; whether it was put."""
        with self._change() as held:
            made = held.execute(
                f"INSERT INTO runs ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET "
                "state=?3, next=?4, attempts=0, tries=0, exit=NULL, begun=NULL, ended=NULL, reason='', options=?14 "
                "WHERE state NOT IN ('due', 'running')",
                _values(run),
            )
            return bool(made.rowcount)

    def again(self, job: str, now: float) -> int:
        """Make the runs of a job due at once that a person had to look at, or that wait to be tried again; how many."""
        with self._change() as held:
            made = held.execute(
                "UPDATE runs SET state='due', next=?1, tries=0, ended=NULL WHERE job=?2 AND (state='failed' OR "
                "(state='due' AND next > ?1))",
                (now, job),
            )
            return made.rowcount

    def forget(self, now: float) -> None:
        """Drop the runs that ended long ago."""
        with self._change() as held:
            held.execute("DELETE FROM runs WHERE ended < ?", (now - KEPT,))

    def _read(self, query: str, *values: object) -> list[Run]:
        return [_run(row) for row in self._held.execute(query, values)]


def is_damaged(e: Exception) -> bool:
    """Whether the file of a state does not read back, as it does not if there is no room."""
    return type(e) is sqlite3.DatabaseError


def _values(run: Run) -> tuple[object, ...]:
    return (
        run.job, written(run.tick), run.state, run.next, run.attempts, run.tries, run.exit, run.begun, run.ended,
        run.deadline, int(run.late), run.reason, run.what, run.options,
    )  # fmt: skip


def _run(row: Sequence[object]) -> Run:
    names = [name.strip() for name in _COLUMNS.split(",")]
    told: Mapping[str, object] = dict(zip(names, row, strict=True))
    return Run(**{**told, "tick": datetime.fromisoformat(str(told["tick"])), "late": bool(told["late"])})  # type: ignore[arg-type]

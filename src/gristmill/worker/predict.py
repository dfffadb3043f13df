"""The second stage: score a window. Batches are cut by length, outputs return to their rows' places, and failing rows
are isolated.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, fitted, is_list, together
from gristmill.arrow.rows import picked
from gristmill.errors import BadOutput
from gristmill.models.contract import Columns, Journal, Model, Prepared, Refusal, RowModel, Told
from gristmill.models.conversion import ROWS
from gristmill.process.failure import SomeFailed
from gristmill.shards.counts import Counts
from gristmill.values import dataclass
from gristmill.worker.batches import Budget, cut_lazily, padded_tokens
from gristmill.worker.bisection import DeadRow, Doubt, Isolation, Stage, length_error
from gristmill.worker.budgetsearch import Search
from gristmill.worker.finite import holds_nan, not_finite
from gristmill.worker.identity import Identity, Row, digests_of
from gristmill.worker.poststeps import PostStep, PostSteps, run_here
from gristmill.worker.prepare import Window
from gristmill.worker.recipe import Recipe, Task

Guard = Callable[[np.ndarray], None]  # called with the rows that go to user code next; empty for rows of another window


@dataclass(frozen=True)
class Scored:
    """A scored window: output rows in source order with their row numbers in the window and identities, and the dead
    rows (also by row number). `results` are the columns returned by the model or by a step after it.
    """

    window: Window
    rows: pa.Table
    place: np.ndarray
    identity: Identity
    counts: Counts
    results: tuple[str, ...] = ()
    answers: Mapping[str, bool] = field(default_factory=dict)  # the model's columns, and whether some rows had null
    dead: tuple[DeadRow, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    raw: tuple[tuple[np.ndarray, pa.Table], ...] = ()  # for a probe: rows of the window, and what the model returned
    sparse: bool = False  # answers came as dicts: a column that none of them has is null
    failed: int = 0  # rows that the model was given, and that it raised or told an error for


class Predict:
    """Scores windows with one loaded model. Remembers the budget that fits in memory, and a row that worked."""

    def __init__(self, recipe: Recipe, model: Model) -> None:
        from gristmill.models.outofmemory import is_out_of_memory, release_memory

        self._recipe = recipe
        self._model = model
        self.by_user = isinstance(model, RowModel) and model.by_user
        self.post = PostSteps(recipe)
        self._budgets = Search.of(recipe.batch)
        self._good: tuple[Prepared, np.ndarray] | None = None
        self._at_hand: Prepared | None = None
        self._planned: tuple[pa.Schema, Columns] | None = None
        self._tried_last = ""
        self._before: Guard | None = None  # called before each call of the model, also before mere trials
        self._doomed: frozenset[int] = frozenset()
        self._doubt = Doubt(self._works_elsewhere, remote=isinstance(model, RowModel))
        # Rows, their positions, digests of what the model was given for them, their outputs.
        self._kept: list[tuple[list[Row], np.ndarray, np.ndarray, pa.Table]] = []
        self._is_out_of_memory = is_out_of_memory
        self._release_memory = release_memory
        self._ran_out = False  # since memory was last released

    def score(
        self,
        task: Task,
        window: Window,
        before: Guard | None = None,
        tick: Callable[[int], None] | None = None,
        apart: Sequence[np.ndarray] = (),
        doomed: Sequence[DeadRow] = (),
        run: PostStep = run_here,
    ) -> Scored:
        """Outputs for every row of the window that can be scored. Raises ModelBroken and BadOutput.

        Rows in `apart` are scored first, in these batches; those in `doomed` not at all. `run` runs a step after.
        """
        self.post.begin(task)
        rows = window.rows.num_rows
        refused = {r.row: r for r in window.prepared.refused}
        alive = np.ones(rows, dtype=bool)
        outputs = self._from_probe(task, window)
        for gone in (list(refused), [d.row for d in doomed], *apart, *(index for index, _ in outputs)):
            alive[np.asarray(gone, dtype=np.int64)] = False
        dead: list[DeadRow] = list(doomed)
        failed = 0
        figures = {"model_seconds": 0.0, "tokens": 0.0, "padded": 0.0, "batches": 0.0}

        def counted(batch: np.ndarray) -> tuple[int, int]:
            if (lengths := window.prepared.lengths) is None:
                return len(batch), len(batch)
            useful, padded = int(lengths[batch].sum()), padded_tokens(lengths, batch)
            figures["tokens"] += useful
            figures["padded"] += padded
            return useful, padded

        for index, _ in outputs:
            counted(index)
        self._doomed = frozenset(d.row for d in doomed)
        isolation = self._isolation(task, window, before)
        sweeps = task.kind == "score" and not task.careful
        self._budgets = self._budgets.next(False)  # batches already cut are no trial
        left = np.flatnonzero(alive)
        warming = len(left) // 2 if task.kind == "probe" and self._recipe.place.gpu else 0
        parts = (self._batches(window.prepared, rows, sweeps) for rows in (left[:warming], left[warming:]))
        for batch in itertools.chain(apart, *parts):
            started = time.perf_counter()
            found = isolation.score(batch)
            seconds = time.perf_counter() - started
            figures["model_seconds"] += seconds
            if warming > 0:
                figures["warmup_seconds"] = figures.get("warmup_seconds", 0.0) + seconds
                figures["warmup_rows"] = figures.get("warmup_rows", 0.0) + sum(len(i) for i, _ in found.outputs)
                warming -= len(batch)
            figures["batches"] += 1
            tokens = counted(batch)
            if sweeps and not found.dead:
                self._budgets, told = self._budgets.took(len(batch), seconds, *tokens)
                for name, value in told.items():
                    figures[name] = figures.get(name, 0.0) + value
            outputs += found.outputs
            dead += found.dead
            failed += len(found.dead)
            if tick is not None:
                tick(len(batch))
        return replace(self._finished(task, window, refused, outputs, dead, figures, run), failed=failed)

    def begin(
        self, task: Task, window: Window, answered: Callable[[], None], journal: Journal | None, careful: bool
    ) -> None:
        """Ask a model that answers row by row for the rows that `score` will be given; a `careful` attempt for none."""
        assert isinstance(self._model, RowModel)
        rows = np.empty(0, dtype=np.int64) if careful else self.alive(task, window)
        if journal is not None:
            for index, _ in self._from_probe(task, window):
                self._model.answered(window.prepared, index, journal)
        places, proven = None, task.proven or careful or task.kind != "score"
        if task.kind == "probe":
            places = [row[:2] for row in window.identity.places(task.paths)]
        told = Told(answered, journal, places, self._columns(task), proven)
        self._model.begin(window.prepared, rows, told)

    def _columns(self, task: Task) -> Columns | None:
        """The model's columns as planned. A post step may be given others, of which nothing is written."""
        if task.schema is None:
            return None
        if self._planned is None or self._planned[0] is not task.schema:
            types = pa.schema([f for f in task.schema if f.name in task.answers])
            self._planned = task.schema, Columns(types, None if self.post else task.answers)
        return self._planned[1]

    def alive(self, task: Task, window: Window) -> np.ndarray:
        """The rows of a window that the model is to be asked for, int64 [k]: those that it does not refuse, and that no
        probe has scored.
        """
        alive = np.full(window.rows.num_rows, True)
        for gone in ([r.row for r in window.prepared.refused], *(index for index, _ in self._from_probe(task, window))):
            alive[np.asarray(gone, dtype=np.int64)] = False
        return np.flatnonzero(alive)

    # ------------------------------------------------ the probe

    def keep(self, task: Task, scored: Scored, anew: bool) -> None:
        """Remember what a probe scored, so that its shard need not score it again. `anew`: replace what an earlier,
        smaller probe kept, whose rows are among these.
        """
        found = []
        for index, table in scored.raw:
            who = scored.window.identity.take(index)
            found.append((who.places(task.paths), who.position, self._given(scored.window.rows, index), table))
        self._kept = [*([] if anew else self._kept), *found]

    def _from_probe(self, task: Task, window: Window) -> list[tuple[np.ndarray, pa.Table]]:
        """Outputs of this window's rows that the probe has scored. The probe reads from the start of shard 0."""
        if (
            not self._kept
            or task.kind != "score"
            or task.careful
            or task.shard.number != 0
            or len(window.identity.piece) == 0
        ):
            return []
        found = []
        for keys, positions, digests, table in self._kept:
            near = np.flatnonzero(np.isin(window.identity.position, positions))
            place = dict(zip(window.identity.take(near).places(task.paths), near.tolist(), strict=True))
            index = np.array([place.get(key, -1) for key in keys], dtype=np.int64)
            have = np.flatnonzero(index >= 0)
            have = have[self._given(window.rows, index[have]) == digests[have]]
            if len(have):
                found.append((index[have], table if len(have) == len(keys) else picked(table, have)))
        return found

    def _given(self, rows: pa.Table, index: np.ndarray) -> np.ndarray:
        """Digests of these rows, as a step may have made them again, and differently."""
        return digests_of(picked(rows, index)) if self._recipe.steps else np.zeros(len(index), dtype=np.uint32)

    # ------------------------------------------------ batches

    def _batches(self, prepared: Prepared, rows: np.ndarray, sweeps: bool) -> Iterator[np.ndarray]:
        def budget() -> Budget:
            self._budgets = self._budgets.next(sweeps)
            return self._budgets.now(prepared.lengths is not None)

        return cut_lazily(prepared.lengths, rows, budget, prepared.apart)

    def _isolation(self, task: Task, window: Window, before: Guard | None) -> Isolation:
        prepared = self._at_hand = window.prepared
        self._before = before
        self._doubt.proven = task.proven
        if (what := task.kind if task.kind == "score" else task.attempt) != self._tried_last:
            self._tried_last = what
            self._doubt.worked()  # rows of a probe are scored again: they count once

        def call(index: np.ndarray) -> pa.Table:
            try:
                output = self._model.predict(prepared, index)
            except SomeFailed as some:
                if len(worked := np.setdiff1d(np.arange(len(index)), list(some.failed))):
                    self._good = (prepared, index[worked[:1]])
                raise
            if output.num_rows != len(index):
                raise length_error(self._recipe.model.name, len(index), output.num_rows)
            self._good = (prepared, index[:1])
            return output

        def shrink(index: np.ndarray) -> None:
            self._release_memory()
            padded = None if prepared.lengths is None else padded_tokens(prepared.lengths, index)
            self._budgets = self._budgets.out_of_memory(len(index), padded)

        return Isolation(
            call,
            stage=Stage.MODEL,
            out_of_memory=self._says_memory_ran_out,
            shrink=shrink,
            doubt=self._doubt,
            before=before,
        )

    def _works_elsewhere(self) -> bool | None:
        """Whether the model still scores a row that it scored before; if there is none, True if it scores any of some
        rows spread over the window, else None.
        """
        if self._ran_out:
            self._release_memory()
            self._ran_out = False
        if self._good is not None and isinstance(self._model, RowModel):
            return self._model.works(*self._good)
        if self._good is not None:
            nobody = np.empty(0, dtype=np.int64)  # perhaps from another window: no suspects
            if self._tried(*self._good, nobody):
                return True
            self._release_memory()  # perhaps it ran out, and was told in other words
            return self._tried(*self._good, nobody)
        prepared = self._at_hand
        assert prepared is not None
        gone = {r.row for r in prepared.refused} | self._doomed
        spread = np.unique(np.linspace(0, prepared.rows - 1, num=min(16, prepared.rows)).astype(np.int64))
        alive = [spread[i : i + 1] for i in range(len(spread)) if int(spread[i]) not in gone]
        return any(self._tried(prepared, row, row) for row in alive) or None

    def _says_memory_ran_out(self, error: BaseException) -> bool:
        found: bool = self._is_out_of_memory(error)
        self._ran_out |= found
        return found

    def _tried(self, prepared: Prepared, index: np.ndarray, suspects: np.ndarray) -> bool:
        if self._before is not None:
            self._before(suspects)
        try:
            self._model.predict(prepared, index)
        except KeyboardInterrupt:
            raise
        except BaseException:  # any failure answers the question
            return False
        return True

    # ------------------------------------------------ from outputs to rows

    def _finished(
        self,
        task: Task,
        window: Window,
        refused: dict[int, Refusal],
        outputs: list[tuple[np.ndarray, pa.Table]],
        dead: list[DeadRow],
        figures: dict[str, float],
        run: PostStep,
    ) -> Scored:
        skipped = [r for r in refused.values() if r.kind == "null" and self._recipe.on_null == "skip"]
        put_aside = {r.row for r in skipped}
        dead += [DeadRow(r.row, Stage.MODEL, r.error, r.message) for r in refused.values() if r.row not in put_aside]
        outputs = self._holdable(task, window, outputs, dead)
        index = np.concatenate([i for i, _ in outputs]) if outputs else np.empty(0, dtype=np.int64)
        dicts = any(ROWS in (t.schema.metadata or {}) for _, t in outputs)
        results = self._joined(task, outputs)
        results = _with_all(task, results) if dicts else results
        ascending = bool((index[1:] > index[:-1]).all())  # as when rows have no lengths and none was put off
        place = index if ascending else np.sort(index)
        rows = self._placed(window.rows, place, index, results)
        identity = window.identity.take(place)
        names = list(results.column_names)
        rows, identity, place = self._finite(Stage.MODEL, window, rows, names, identity, place, dead)
        if self.post:
            rows, identity, place, names, replaced = self.post.after(task, rows, identity, place, names, dead, run)
            rows, identity, place = self._finite(Stage.AFTER, window, rows, names, identity, place, dead, replaced)
        written = _as_before(rows.select(self._recipe.output.columns(rows.column_names, names)), task)
        if unheld := self._recipe.sink_format.refused(written, self._recipe.sink.options):
            dead += [DeadRow(int(place[i]), Stage.AFTER, error, text) for i, (error, text) in sorted(unheld.items())]
            keep = np.setdiff1d(np.arange(rows.num_rows), list(unheld))
            rows, identity, place = picked(rows, keep), identity.take(keep), place[keep]
        counts = window.counts + Counts(derived_filtered=len(skipped), derived_dead=len(dead))
        raw = tuple(outputs) if task.kind == "probe" else ()
        sparse = dicts or self.post.sparse
        own = {name: results.column(name).null_count > 0 for name in results.column_names}
        return Scored(window, rows, place, identity, counts, tuple(names), own, tuple(dead), figures, raw, sparse)

    def _holdable(
        self, task: Task, window: Window, outputs: list[tuple[np.ndarray, pa.Table]], dead: list[DeadRow]
    ) -> list[tuple[np.ndarray, pa.Table]]:
        """Outputs without rows of NaN or infinity in columns planned as another type, such as whole numbers, which
        could not hold these: like all such rows they are dead letters, if that is what they are to be.
        """
        if self._recipe.on_nan != "dead" or task.schema is None:
            return outputs
        planned = {f.name: f.type for f in task.schema}
        found = []
        for index, table in outputs:
            names = [f.name for f in table.schema if not planned.get(f.name, f.type).equals(f.type)]
            bad = self._not_finite(Stage.MODEL, window, table, names, names, index, dead)
            found.append((index[~bad], picked(table, np.flatnonzero(~bad))) if bad.any() else (index, table))
        return found

    def _joined(self, task: Task, outputs: list[tuple[np.ndarray, pa.Table]]) -> pa.Table:
        tables, name = [t for _, t in outputs], self._recipe.model.name
        if not tables:
            return pa.table({})
        every = dict.fromkeys(n for t in tables for n in t.column_names)
        for table in tables:
            if table.num_columns < len(every) and ROWS not in (table.schema.metadata or {}):
                lost = next(n for n in every if n not in table.column_names)
                raise BadOutput(f"{name} returned column {lost!r} for some batches and not for others")
        try:
            lists = not self._recipe.sink_format.tables
            return together([_planned(t, task.schema, lists) for t in tables])
        except Lossy as e:
            raise BadOutput(
                f"{name} returned other types than before: {e}; declare the types of all its columns with returns= "
                "(with --restart, restart=True, if there is a result, whose answers are kept), or take the file with "
                "these rows away"
            ) from e

    def _placed(self, rows: pa.Table, place: np.ndarray, index: np.ndarray, results: pa.Table) -> pa.Table:
        """`rows` at `place` with their results, which are in the order of `index`."""
        if len(place) != rows.num_rows:
            rows = picked(rows, place)
        if results.num_columns == 0:
            return rows
        if place is not index:  # `index` does not ascend
            results = picked(results.combine_chunks(), np.argsort(index, kind="stable"))
        for name in results.column_names:
            if name in rows.column_names:
                rows = rows.drop_columns([name])
            rows = rows.append_column(results.schema.field(name), results.column(name))
        return rows

    def _finite(
        self,
        stage: Stage,
        window: Window,
        rows: pa.Table,
        names: list[str],
        identity: Identity,
        place: np.ndarray,
        dead: list[DeadRow],
        replaced: frozenset[str] = frozenset(),
    ) -> tuple[pa.Table, Identity, np.ndarray]:
        """Drop rows whose answers hold NaN or infinity, if these are to be dead letters: checked are columns that are
        written or given to post steps, and `replaced` columns of the rows where the row had no such value before.
        """
        if self._recipe.on_nan != "dead":
            return rows, identity, place
        written = self._recipe.output.columns(rows.column_names, names)
        given_on = names if stage is Stage.MODEL and self.post else ()
        checked = dict.fromkeys([*given_on, *(n for n in written if n in names or n in replaced)])
        bad = self._not_finite(stage, window, rows, checked, names, place, dead)
        if not bad.any():
            return rows, identity, place
        keep = np.flatnonzero(~bad)
        return picked(rows, keep), identity.take(keep), place[keep]

    def _not_finite(
        self,
        stage: Stage,
        window: Window,
        rows: pa.Table,
        checked: Iterable[str],
        names: Sequence[str],
        place: np.ndarray,
        dead: list[DeadRow],
    ) -> np.ndarray:
        """Rows (bool [rows]) with NaN or infinity in a checked column, each of which becomes a dead letter; `names` are
        answers, in the others it counts where the row had no such value before.
        """
        bad = np.zeros(rows.num_rows, dtype=bool)
        for name in checked:
            found = not_finite(rows.column(name))
            if found is None or not found.any():
                continue
            nan = holds_nan(rows.column(name))
            assert nan is not None
            own = not_finite(window.rows.column(name)) if name in window.rows.column_names else None
            if own is not None and name not in names:
                found = found & ~own[place]
            for i in np.flatnonzero(found & ~bad).tolist():
                error, what = ("NaN", "NaN") if nan[i] else ("Infinite", "an infinite value")
                had = ", which the row's own column already had" if own is not None and own[place[i]] else ""
                message = (
                    f"{self._recipe.model.name} returned {what} in column {name!r}{had}; on_nan keep (--on-nan keep, "
                    "on_nan='keep') publishes such rows: it makes another job, which --restart begins"
                )
                dead.append(DeadRow(int(place[i]), stage, error, message))
            bad |= found
        return bad


def _planned(table: pa.Table, planned: pa.Schema | None, lists: bool) -> pa.Table:
    """`table` with the planned types for planned columns; others are for post steps. Raises Lossy. With `lists`, lists
    stay lists where vectors of one width are planned, so that post steps get the same type as for the first rows, which
    determined the width.
    """
    if planned is None:
        return table

    def bound(f: pa.Field) -> pa.Field:
        kind = planned.field(f.name) if f.name in planned.names else f
        return f if lists and is_list(f.type) and pa.types.is_fixed_size_list(kind.type) else kind

    return fitted(table, pa.schema([bound(f) for f in table.schema]))


def _as_before(table: pa.Table, task: Task) -> pa.Table:
    """Columns in which none of the first rows has a value have the type that the result to be added to gives them."""
    for i, f in enumerate(table.schema):
        if task.base is not None and pa.types.is_null(f.type) and f.name in task.base.names:
            kind = task.base.field(f.name).type
            table = table.set_column(i, pa.field(f.name, kind), pa.nulls(table.num_rows, kind))
    return table


def _with_all(task: Task, results: pa.Table) -> pa.Table:
    """Add nulls for each column of the model that none of a window's dicts has, as if one of them had it: otherwise
    post steps would be given a column of the rows instead.
    """
    planned = task.schema or task.base or pa.schema([])
    for name in (n for n in task.answers if n not in results.column_names):
        kind = planned.field(name).type if name in planned.names else pa.null()
        results = results.append_column(name, pa.nulls(results.num_rows, kind))
    return results

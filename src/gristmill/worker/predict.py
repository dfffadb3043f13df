"""The second stage: score a window. Batches are cut by length, outputs go back to their rows' places, rows that fail
are isolated.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from gristmill.batching.policy import Budget, cut_lazily, padded_tokens
from gristmill.batching.sweep import Sweep
from gristmill.errors import BadOutput
from gristmill.io.lossless import Lossy, fitted, is_list, together
from gristmill.io.picking import picked
from gristmill.models.batches import ROWS
from gristmill.models.given import same
from gristmill.plan.contracts import Model, Prepared, Refusal
from gristmill.plan.counts import Counts
from gristmill.worker.failures import DeadRow, Doubt, Isolation, Stage, length_error
from gristmill.worker.finite import holds_nan, not_finite
from gristmill.worker.identity import Identity, Row, digests_of
from gristmill.worker.prepare import Window
from gristmill.worker.recipe import Recipe, Task
from gristmill.worker.steps import Applied, LoadedStep, post_step

Guard = Callable[[np.ndarray], None]  # is told which rows go to user code next; none where others than those at hand do
PostStep = Callable[[int, LoadedStep, pa.Table, Identity], Applied]


def _post_step(number: int, step: LoadedStep, rows: pa.Table, who: Identity) -> Applied:
    return post_step(step, rows)


@dataclass(frozen=True)
class Scored:
    """A scored window: output rows in source order with their row numbers of the window and who they are, and the dead
    ones (by row number, too). `results` are the columns that the model or a step after it has returned.
    """

    window: Window
    rows: pa.Table
    place: np.ndarray
    identity: Identity
    counts: Counts
    results: tuple[str, ...] = ()
    answers: Mapping[str, bool] = field(default_factory=dict)  # the model's, and whether a row may have none
    dead: tuple[DeadRow, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    raw: tuple[tuple[np.ndarray, pa.Table], ...] = ()  # of a probe: rows of the window, and what the model returned
    sparse: bool = False  # rows came as dicts: a column that none of them has is null


class Predict:
    """Scores windows with one loaded model. Remembers the budget that fits in memory, and a row that worked."""

    def __init__(self, recipe: Recipe, model: Model) -> None:
        from gristmill.models.failures import is_out_of_memory, release_memory

        self._recipe = recipe
        self._model = model
        self._post = [LoadedStep(s, f"post {n}", Stage.AFTER) for n, s in enumerate(recipe.post)]
        self.budget = Budget(recipe.batch.tokens, recipe.batch.rows)
        self._sweep = Sweep(recipe.batch.tries, recipe.batch.longest) if recipe.batch.tries else None
        self._quick = recipe.batch.quick  # None once memory has run out
        self._tried_with: int | None = None  # the budget on trial that the batch at hand was cut with
        self._good: tuple[Prepared, np.ndarray] | None = None
        self._at_hand: Prepared | None = None
        self._before: Guard | None = None  # is told of each call of the model, those that only try it included
        self._doomed: frozenset[int] = frozenset()
        self.unwritten: dict[str, str] = {}  # columns of the rows that a step after the model changes, by its name
        self._doubt = Doubt(self._works_elsewhere)
        # Rows, their positions, digests of what the model was given of them, their outputs.
        self._kept: list[tuple[list[Row], np.ndarray, np.ndarray, pa.Table]] = []
        self._is_out_of_memory = is_out_of_memory
        self._release_memory = release_memory

    def score(
        self,
        task: Task,
        window: Window,
        before: Guard | None = None,
        tick: Callable[[int], None] | None = None,
        apart: Sequence[np.ndarray] = (),
        doomed: Sequence[DeadRow] = (),
        post: PostStep = _post_step,
    ) -> Scored:
        """Outputs for every row of the window that can be scored. Raises ModelBroken and BadOutput.

        Rows in `apart` are scored first, in these batches; those in `doomed` not at all. `post` runs a step after.
        """
        for step in self._post:
            step.begin(task)
        rows = window.rows.num_rows
        refused = {r.row: r for r in window.prepared.refused}
        alive = np.ones(rows, dtype=bool)
        outputs = self._from_probe(task, window)
        for gone in (list(refused), [d.row for d in doomed], *apart, *(index for index, _ in outputs)):
            alive[np.asarray(gone, dtype=np.int64)] = False
        dead: list[DeadRow] = list(doomed)
        figures = {"model_seconds": 0.0, "tokens": 0.0, "padded": 0.0, "batches": 0.0}

        def count_tokens(batch: np.ndarray) -> None:
            if (lengths := window.prepared.lengths) is not None:
                figures["tokens"] += float(lengths[batch].sum())
                figures["padded"] += padded_tokens(lengths, batch)

        for index, _ in outputs:
            count_tokens(index)
        self._doomed = frozenset(d.row for d in doomed)
        isolation = self._isolation(task, window, before)
        sweeps = task.kind == "score" and not task.careful
        for batch in itertools.chain(apart, self._batches(window.prepared, np.flatnonzero(alive), sweeps)):
            started = time.perf_counter()
            found = isolation.score(batch)
            seconds = time.perf_counter() - started
            figures["model_seconds"] += seconds
            figures["batches"] += 1
            count_tokens(batch)
            if sweeps and not found.dead:
                self._grow(len(batch), seconds)
            if self._tried_with is not None and not found.dead:
                for name, value in self._measured(window.prepared, batch, seconds).items():
                    figures[name] = figures.get(name, 0.0) + value
            outputs += found.outputs
            dead += found.dead
            if tick is not None:
                tick(len(batch))
        return self._finished(task, window, refused, outputs, dead, figures, post)

    # ------------------------------------------------ the probe

    def keep(self, task: Task, scored: Scored, anew: bool) -> None:
        """Remember what a probe scored, so that its shard need not score it again. `anew`: in place of what an earlier,
        smaller probe did, whose rows are among these.
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
        """Digests of these rows, which a step may have made anew, and other than before."""
        return digests_of(picked(rows, index)) if self._recipe.steps else np.zeros(len(index), dtype=np.uint32)

    # ------------------------------------------------ batches

    def _batches(self, prepared: Prepared, rows: np.ndarray, sweeps: bool) -> Iterator[np.ndarray]:
        def budget() -> Budget:
            now = self._on_trial() if sweeps else self.budget
            return now if prepared.lengths is not None else Budget(None, now.rows)

        return cut_lazily(prepared.lengths, rows, budget, prepared.apart)

    # ------------------------------------------------ the sweep

    def _on_trial(self) -> Budget:
        """The budget to cut with: one on trial, until the sweep has settled."""
        self._tried_with = None
        if self._sweep is None:
            return self.budget
        settled = self._sweep.settled
        if settled is not None:
            self.budget, self._sweep = self._with(settled), None
            return self.budget
        self._tried_with = self._sweep.next()
        return self._with(self._tried_with)

    def _with(self, budget: int) -> Budget:
        return replace(self.budget, tokens=budget) if self._recipe.batch.by_tokens else Budget(None, budget)

    def _measured(self, prepared: Prepared, batch: np.ndarray, seconds: float) -> dict[str, float]:
        """Tell the sweep of a batch, unless it was small because the window ended."""
        budget = self._tried_with
        assert budget is not None
        if self._sweep is None:
            return {}
        if prepared.lengths is None:
            useful = size = len(batch)
        else:
            useful, size = int(prepared.lengths[batch].sum()), padded_tokens(prepared.lengths, batch)
        return self._sweep.measured(budget, useful, seconds) if size >= budget / 2 else {}

    def _grow(self, rows: int, seconds: float) -> None:
        """A larger budget after a full batch that was quick."""
        if self._quick is not None and seconds < self._quick and rows == self.budget.rows:
            self.budget = self.budget.doubled(self._recipe.batch.window)

    def _isolation(self, task: Task, window: Window, before: Guard | None) -> Isolation:
        prepared = self._at_hand = window.prepared
        self._before = before
        self._doubt.proven = task.proven

        def call(index: np.ndarray) -> pa.Table:
            output = self._model.predict(prepared, index)
            if output.num_rows != len(index):
                raise length_error(self._recipe.model.name, len(index), output.num_rows)
            self._good = (prepared, index[:1])
            return output

        return Isolation(
            call,
            stage=Stage.MODEL,
            out_of_memory=self._is_out_of_memory,
            shrink=self._shrink,
            doubt=self._doubt,
            before=before,
        )

    def _shrink(self, failed_rows: int) -> Budget:
        self._release_memory()
        self._quick = None
        if self._tried_with is not None and self._sweep is not None:
            if not self._sweep.too_much(self._tried_with):
                self.budget, self._sweep = self._with(self._tried_with).halved(), None
            self._tried_with = None
            return Budget(None, max(1, failed_rows // 2))
        while not self.budget.least and self.budget.rows >= failed_rows:
            self.budget = self.budget.halved()
        self.budget = self.budget.halved()
        return Budget(None, max(1, failed_rows // 2))

    def _works_elsewhere(self) -> bool | None:
        """Whether the model still scores a row that it has scored; else True if it scores any of some rows spread over
        the window, or None.
        """
        self._release_memory()
        if self._good is not None:
            return self._tried(*self._good, np.empty(0, dtype=np.int64))  # of another window: no row here is to blame
        prepared = self._at_hand
        assert prepared is not None
        gone = {r.row for r in prepared.refused} | self._doomed
        spread = np.unique(np.linspace(0, prepared.rows - 1, num=min(16, prepared.rows)).astype(np.int64))
        alive = [spread[i : i + 1] for i in range(len(spread)) if int(spread[i]) not in gone]
        return any(self._tried(prepared, row, row) for row in alive) or None

    def _tried(self, prepared: Prepared, index: np.ndarray, suspects: np.ndarray) -> bool:
        if self._before is not None:
            self._before(suspects)
        try:
            self._model.predict(prepared, index)
        except KeyboardInterrupt:
            raise
        except BaseException:  # any failure is the answer to the question asked here
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
        post: PostStep,
    ) -> Scored:
        skipped = [r for r in refused.values() if r.kind == "null" and self._recipe.on_null == "skip"]
        put_aside = {r.row for r in skipped}
        dead += [DeadRow(r.row, Stage.MODEL, r.error, r.message) for r in refused.values() if r.row not in put_aside]
        index = np.concatenate([i for i, _ in outputs]) if outputs else np.empty(0, dtype=np.int64)
        dicts = any(ROWS in (t.schema.metadata or {}) for _, t in outputs)
        results = self._joined(task, outputs)
        results = _with_all(task, results) if dicts else results
        ascending = bool((index[1:] > index[:-1]).all())  # as where rows need no padding and none was put back
        place = index if ascending else np.sort(index)
        rows = self._placed(window.rows, place, index, results)
        identity = window.identity.take(place)
        names, replaced = list(results.column_names), frozenset[str]()
        rows, identity, place = self._finite(Stage.MODEL, window, rows, names, identity, place, dead)
        for number, step in enumerate(self._post):
            before = rows
            found = post(number, step, before, identity)
            dead += [replace(d, row=int(place[d.row])) for d in found.dead]
            rows, identity, place = found.rows, identity.take(found.origin), place[found.origin]
            new, anew = self._answered(task, step, before, found, names)
            names, replaced = [*names, *new], replaced | anew
        if self._post:
            rows, identity, place = self._finite(Stage.AFTER, window, rows, names, identity, place, dead, replaced)
        written = rows.select(self._recipe.output.columns(rows.column_names, names))
        if unheld := self._recipe.sink_format.refused(written, self._recipe.sink.options):
            dead += [DeadRow(int(place[i]), Stage.AFTER, error, text) for i, (error, text) in sorted(unheld.items())]
            keep = np.setdiff1d(np.arange(rows.num_rows), list(unheld))
            rows, identity, place = picked(rows, keep), identity.take(keep), place[keep]
        counts = window.counts + Counts(derived_filtered=len(skipped), derived_dead=len(dead))
        raw = tuple(outputs) if task.kind == "probe" else ()
        sparse = dicts or any(s.sparse for s in self._post)
        own = {name: results.column(name).null_count > 0 for name in results.column_names}
        return Scored(window, rows, place, identity, counts, tuple(names), own, tuple(dead), figures, raw, sparse)

    def made(self) -> dict[str, list[pa.Field]]:
        """The columns that dicts of steps after the model added to rows on trial, by step."""
        return {step.name: list(step.made.values()) for step in self._post if step.made}

    def _answered(
        self, task: Task, step: LoadedStep, before: pa.Table, found: Applied, names: Sequence[str]
    ) -> tuple[list[str], frozenset[str]]:
        """Which columns of a step after the model are answers beside `names`: those that it added, and those of the
        rows that it gave anew. Where it handed back all that it was given, changed or not, the rows' own columns are
        none. And those of the rows that it gave.
        """
        output, rows = self._recipe.output, found.rows
        anew = found.returned.intersection(before.column_names)
        whole = len(anew) == before.num_columns
        if whole and task.schema is None:
            was = picked(before, found.origin)
            lost = [n for n in anew if n not in names and not output.keeps(n) and not _alike(was, rows, n)]
            self.unwritten.update(dict.fromkeys(lost, step.step.name))
        others = [n for n in rows.column_names if n not in names]
        own = {n for n in before.column_names if whole or n not in anew or output.keeps(n)}
        if some := [n for n in others if n in found.partly and n not in own and n in before.column_names]:
            raise BadOutput(
                f"post step {step.step.name} returned column {some[0]!r} for some rows only, and the rows have one of "
                "that name: return it for every row, give it another name, or name it in keep (others have their own)"
            )
        return [n for n in others if n not in own], anew

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
            lists = self._recipe.sink_format.name == "npy"
            return together([_planned(t, task.schema, lists) for t in tables])
        except Lossy as e:
            raise BadOutput(
                f"{name} returned other types than before: {e}; say with returns= which they are, of all its columns"
            ) from e

    def _placed(self, rows: pa.Table, place: np.ndarray, index: np.ndarray, results: pa.Table) -> pa.Table:
        """`rows` at `place` with their results, which are those of `index`."""
        if len(place) != rows.num_rows:
            rows = picked(rows, place)
        if results.num_columns == 0:
            return rows
        if place is not index:  # which does not ascend
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
        """Without the rows whose answers hold NaN or infinity, where these are to be dead letters: in columns that are
        written, or given to steps after the model; in `replaced` columns of the rows where the row had none before.
        """
        if self._recipe.on_nan != "dead":
            return rows, identity, place
        bad = np.zeros(rows.num_rows, dtype=bool)
        written = self._recipe.output.columns(rows.column_names, names)
        given_on = names if stage is Stage.MODEL and self._post else ()
        for name in dict.fromkeys([*given_on, *(n for n in written if n in names or n in replaced)]):
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
                had = ", as the row had in its own before" if own is not None and own[place[i]] else ""
                message = (
                    f"{self._recipe.model.name} returned {what} in column {name!r}{had}; on_nan keep (--on-nan keep, "
                    "on_nan='keep') publishes such rows"
                )
                dead.append(DeadRow(int(place[i]), stage, error, message))
            bad |= found
        if not bad.any():
            return rows, identity, place
        keep = np.flatnonzero(~bad)
        return picked(rows, keep), identity.take(keep), place[keep]


def _alike(one: pa.Table, other: pa.Table, name: str) -> bool:
    return one.schema.field(name).type == other.schema.field(name).type and same(one.column(name), other.column(name))


def _planned(table: pa.Table, planned: pa.Schema | None, lists: bool) -> pa.Table:
    """`table` with the planned types of the columns that are planned; others are for post steps. Raises Lossy. With
    `lists` these stay what they are where vectors of one width are planned, so that post steps are given the same as
    of the first rows, which told the width.
    """
    if planned is None:
        return table

    def bound(f: pa.Field) -> pa.Field:
        kind = planned.field(f.name) if f.name in planned.names else f
        return f if lists and is_list(f.type) and pa.types.is_fixed_size_list(kind.type) else kind

    return fitted(table, pa.schema([bound(f) for f in table.schema]))


def _with_all(task: Task, results: pa.Table) -> pa.Table:
    """Null for each column of the model's that none of a window's dicts have, as where one of them has it: steps after
    the model are not given a column of the rows for it.
    """
    planned = task.schema or task.base or pa.schema([])
    for name in (n for n in task.answers if n not in results.column_names):
        kind = planned.field(name).type if name in planned.names else pa.null()
        results = results.append_column(name, pa.nulls(results.num_rows, kind))
    return results

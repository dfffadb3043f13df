"""A worker that scores sample rows with one batch budget after another, writes nothing, and reports the time taken."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.models.contract import Prepared
from gristmill.process.failure import failure_of
from gristmill.process.messages import Emit, Item, Outcome
from gristmill.values import dataclass
from gristmill.worker.batches import MOST_ROWS, Budget, cut, padded_tokens
from gristmill.worker.prepare import Prepare
from gristmill.worker.recipe import Recipe, Task
from gristmill.worker.stages import ShardStages


@dataclass(frozen=True)
class Trial:
    """A budget to try on the rows of `task`: of padded tokens if rows have lengths, else of rows.

    `shares` select the batches: those that hold the tokens at these shares of all tokens, so that batches of every
    width are sampled in proportion to their tokens. With `full`, no call is made that all rows together do not fill.
    """

    task: Task
    budget: int
    shares: tuple[float, ...]
    full: bool = False


@dataclass(frozen=True)
class TrialStages:
    """What an engine ships for a sweep."""

    stages: ShardStages

    def environment(self, index: int) -> Mapping[str, str]:
        return self.stages.environment(index)

    def open(self, name: str, emit: Emit) -> TrialWorker:
        return TrialWorker(self.stages.recipe, name)


class TrialWorker:
    """Answers trials with {"rate", "padding", "seconds"}; {"rate": 0.0, "failed": "memory"} if memory ran out, and
    {"rate": 0.0, "short": rows} if these do not fill a call that was to be full.
    """

    def __init__(self, recipe: Recipe, name: str) -> None:
        from gristmill.models.kinds import open as open_model
        from gristmill.models.outofmemory import is_out_of_memory, release_memory

        self._name = name
        self._model = open_model(recipe.model, recipe.place)
        self._prepare = Prepare(recipe, self._model)
        self._is_out_of_memory = is_out_of_memory
        self._release_memory = release_memory
        self._stopping = threading.Event()
        self._prepared: dict[int | None, Prepared] = {}  # of the latest sample, by its number of rows

    def stop(self) -> None:
        """Leave after the current batch."""
        self._stopping.set()

    def work(self, items: Iterator[Item], emit: Emit) -> None:
        """Answer trials until there are no more."""
        with contextlib.closing(self._prepare):
            for item in items:
                if self._stopping.is_set():
                    break
                try:
                    emit(Outcome(self._name, item.key, self._tried(item.value)))
                except BaseException as e:  # reported as this trial's outcome, which ends the sweep
                    emit(Outcome(self._name, item.key, None, failure_of(e, "other")))
        self._model.close()

    def _tried(self, trial: Trial) -> dict[str, Any]:
        rows_asked = trial.task.rows
        if rows_asked not in self._prepared:
            self._prepared = {rows_asked: self._rows(trial.task)}
        prepared = self._prepared[rows_asked]
        refused = {r.row for r in prepared.refused}
        rows = np.array([i for i in range(prepared.rows) if i not in refused], dtype=np.int64)
        lengths = prepared.lengths
        budget = Budget(None, trial.budget) if lengths is None else Budget(trial.budget, MOST_ROWS)
        batches = cut(lengths, rows, budget, prepared.apart)
        useful = np.array([len(b) if lengths is None else max(1, int(lengths[b].sum())) for b in batches])
        padded = sum(len(b) if lengths is None else padded_tokens(lengths, b) for b in batches)
        if trial.full and len(batches) == 1 and padded < trial.budget:
            return {"rate": 0.0, "padding": 0.0, "seconds": 0.0, "short": len(rows)}
        ends = np.cumsum(useful)
        picked = np.searchsorted(ends, np.array(trial.shares) * ends[-1], side="right").clip(max=len(batches) - 1)
        seconds = np.zeros(len(picked))
        try:
            for at, number in enumerate(picked.tolist()):
                if self._stopping.is_set():
                    break
                begun = time.perf_counter()
                self._model.predict(prepared, batches[number])
                seconds[at] = time.perf_counter() - begun
        except Exception as e:
            if not self._is_out_of_memory(e):
                raise
            self._release_memory()
            return {"rate": 0.0, "padding": 0.0, "seconds": float(seconds.sum()), "failed": "memory"}
        # The mean over tokens of the seconds that a token takes in its batch: all rows' time over all tokens.
        a_token = float(np.mean(seconds / useful[picked]))
        told = {"rate": 1 / a_token, "padding": 1 - float(ends[-1]) / max(1, padded), "seconds": float(seconds.sum())}
        return {**told, "whole": len(batches) == 1}

    def _rows(self, task: Task) -> Prepared:
        tables = [w.rows for w in self._prepare.windows(task)]
        rows = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
        prepared = self._model.prepare(rows)
        if prepared.rows <= len(prepared.refused):
            from gristmill.errors import BadJob

            raise BadJob("tune: none of the sampled rows can be scored, so there is nothing to measure")
        return replace(prepared)

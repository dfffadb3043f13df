"""Steps after the model: what a window's rows and answers are once they have run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, lossless
from gristmill.arrow.rows import picked
from gristmill.errors import BadOutput
from gristmill.models.passthrough import same
from gristmill.worker.bisection import DeadRow, Stage
from gristmill.worker.identity import Identity
from gristmill.worker.recipe import Recipe, Task
from gristmill.worker.steps import Applied, LoadedStep, post_step

PostStep = Callable[[int, LoadedStep, pa.Table, Identity], Applied]


def run_here(number: int, step: LoadedStep, rows: pa.Table, who: Identity) -> Applied:
    """Run a step in this process."""
    return post_step(step, rows)


class PostSteps:
    """The steps of a recipe that follow the model. `remarks` are what to tell of them, as probed rows showed it."""

    def __init__(self, recipe: Recipe) -> None:
        self._output = recipe.output
        self._steps = [LoadedStep(s, f"post {n}", Stage.AFTER) for n, s in enumerate(recipe.post)]
        self.remarks: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self._steps)

    def begin(self, task: Task) -> None:
        """Before the rows of a window."""
        for step in self._steps:
            step.begin(task)

    @property
    def sparse(self) -> bool:
        """Whether one answered with dicts, which need not have all columns."""
        return any(s.sparse for s in self._steps)

    def made(self) -> dict[str, list[pa.Field]]:
        """The columns that dicts of post steps added to probed rows, by step."""
        return {step.name: list(step.made.values()) for step in self._steps if step.made}

    def after(
        self,
        task: Task,
        rows: pa.Table,
        identity: Identity,
        place: np.ndarray,
        names: list[str],
        dead: list[DeadRow],
        run: PostStep,
    ) -> tuple[pa.Table, Identity, np.ndarray, list[str], frozenset[str]]:
        """The rows after the steps that follow the model, with the names of their answers, and of the rows' columns
        that steps returned.
        """
        replaced, own = frozenset[str](), frozenset[str]()
        left: dict[str, tuple[np.ndarray, pa.Table]] = {}  # answers that a frame left out, and the rows that had them
        for number, step in enumerate(self._steps):
            if not rows.num_rows:  # which may lack the columns that the step reads
                break
            before = rows
            found = run(number, step, before, identity)
            dead += [replace(d, row=int(place[d.row])) for d in found.dead]
            rows, identity, place = found.rows, identity.take(found.origin), place[found.origin]
            new, anew = self._answered(task, step, before, found, names)
            if found.whole:
                gone = [n for n in names if n in found.framed - found.returned]
                left |= {n: (place, rows.select([n])) for n in gone}
                names, rows = [n for n in names if n not in gone], rows.drop_columns(gone)
                own |= anew.difference(names) if len(anew) < before.num_columns else frozenset()
            names, replaced = [*names, *new], replaced | anew
        rows, names = self._as_planned(task, rows, place, names, left, own)
        return rows, identity, place, names, replaced

    def _answered(
        self, task: Task, step: LoadedStep, before: pa.Table, found: Applied, names: Sequence[str]
    ) -> tuple[list[str], frozenset[str]]:
        """Which columns of a post step are answers besides `names`: those that it added, and columns of the rows that
        it returned. If it returned a frame of the rows, or all the columns that it was given, changed or not, the rows'
        own columns are not answers. Also which of the rows' columns it returned.
        """
        output, rows = self._output, found.rows
        anew = found.returned.intersection(before.column_names)
        whole = found.whole or len(anew) == before.num_columns
        if task.schema is None:
            self._remark(step, before, found, [n for n in before.column_names if n in anew and n not in names], whole)
        others = [n for n in rows.column_names if n not in names]
        own = {n for n in before.column_names if whole or n not in anew or output.keeps(n)}
        if some := [n for n in others if n in found.partly and n not in own and n in before.column_names]:
            raise BadOutput(
                f"post step {step.step.name} returned column {some[0]!r} for some rows only, and the source rows have "
                "a column of that name: return it for every row, give it another name, or list it in keep (the other "
                "rows then keep their own value)"
            )
        return [n for n in others if n not in own], anew

    def _remark(self, step: LoadedStep, before: pa.Table, found: Applied, own: Sequence[str], whole: bool) -> None:
        """Note what surprises about a post step that returned these of the rows' `own` columns: changes of them that
        are not written, and those written that it has merely handed back.
        """
        output, was, name = self._output, picked(before, found.origin), step.step.name
        unkept = [n for n in own if not output.keeps(n) and n not in output.drop]
        alike = [n for n in unkept if _alike(was, found.rows, n)]
        if whole:
            texts = [
                f"{name} changes column {n!r} of the rows, which is not written: list it in keep"
                for n in unkept
                if n not in alike
            ]
        elif alike:
            columns, them = ("columns", "them") if len(alike) > 1 else ("column", "it")
            told = f"{columns} {', '.join(map(repr, alike))} of the rows"
            texts = [
                f"post step {name} hands back {told} unchanged: the result "
                f"has {them}, though keep does not; return only what is new, or leave {them} out with drop={alike!r}"
            ]
        else:
            texts = []
        self.remarks.update(dict.fromkeys(texts))

    def _as_planned(
        self,
        task: Task,
        rows: pa.Table,
        place: np.ndarray,
        names: list[str],
        left: Mapping[str, tuple[np.ndarray, pa.Table]],
        own: frozenset[str],
    ) -> tuple[pa.Table, list[str]]:
        """Rows and answers with what the first rows' frames had and the plan has, or the result to be added to: answers
        that these rows' frames `left` out, and `own` columns of the rows that they returned, which results of earlier
        versions may have as answers.
        """
        output, known = self._output, task.base if task.schema is None else task.schema
        for name in () if known is None else known.names:
            if name in names or name in (output.row_id, output.model_version):
                continue
            if name in left and name not in rows.column_names:
                at, column = left[name]
                here = picked(column, np.searchsorted(at, place))  # rows may have died since
                rows, names = rows.append_column(column.schema.field(0), here.column(0)), [*names, name]
            elif name in own and not output.keeps(name):
                names = [*names, name]
                if task.schema is None:
                    text = (
                        f"the result has column {name!r} of the rows, though keep does not; --restart makes one without"
                    )
                    self.remarks[text] = None
        return rows, names


def _alike(one: pa.Table, other: pa.Table, name: str) -> bool:
    """Whether a column has the same values, though perhaps in another type of Arrow for the same, as of texts."""
    try:
        column = lossless(other.column(name), one.schema.field(name).type)
    except Lossy:
        return False
    return same(one.column(name), column)

"""The second phase of a run: which generation it works on, with which backend and batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import field

from gristmill.commit import generation as generations
from gristmill.commit import publish as publishing
from gristmill.commit.generation import Generation, Plan
from gristmill.commit.publication import Publication
from gristmill.driver import backends, budgets, pinning, selection, sourcecheck, updating
from gristmill.driver.opening import Opened
from gristmill.driver.resolved import Resolved
from gristmill.driver.runlog import RunLog
from gristmill.fingerprint.selfwritten import Watch
from gristmill.job.options import BatchPlan
from gristmill.observe import units
from gristmill.values import dataclass


@dataclass(frozen=True)
class Chosen(Opened):
    """The generation that a run works on, the source files that belong to it, and the publication that it adds to.
    `plan` is that of an earlier run which this one resumes; `later` are files left for the next run to append. `watch`
    looks for files that the code itself writes. `updates` is the publication whose answers an update may keep, and
    `carries` are unfinished generations that it gives up and whose answers it may keep, too, the newest first.
    """

    generation: Generation
    base: Publication | None
    plan: Plan | None
    later: tuple[str, ...]
    batch: BatchPlan
    watch: Watch
    updates: Publication | None
    carries: tuple[Generation, ...] = field(default=(), kw_only=True)

    @property
    def retries(self) -> bool:
        """Whether this run scores dead letters again."""
        return self.generation.kind == "retry-dead"


@contextlib.contextmanager
def chosen(at: Opened) -> Iterator[Chosen | None]:
    """What this run works on; None if there is nothing to do. Raises PlanChanged, with a readable difference."""
    choice = _choice(at)
    if choice.warning:
        at.log.note("warning", choice.warning)
    # Only for a result that stays live; the files of one that is being replaced may be gone.
    kept = choice.generation is None or choice.base is not None or choice.generation.kind == "update"
    if kept and (restored := publishing.put_back(at.root, at.files)):
        what = units.plural(len(restored), "published file had gone or was cut", "published files had gone or were cut")
        at.log.note("warning", f"{what}: restored, as their rows were still kept")
    if choice.generation is None:
        yield None
        return
    generation, r, plan = choice.generation, choice.resolved, None
    at.log.begin(generation, at.lease)
    if at.resolved.pins:
        pinning.note(generation, at.resolved.pins)
    if choice.resumed:
        plan = sourcecheck.with_files(generations.read_plan(generation), at.resolved)
        r = sourcecheck.as_planned(r, plan)

    def note_written(paths: list[str]) -> None:
        """Files named by arguments appeared during this run: the code wrote them, unless another run has begun."""
        if at.lease.held():
            generations.note_written(at.root, at.files, paths)

    watch = Watch(r.fingerprint.looked, note_written)
    try:
        with watch:
            r = _on_backend(at, r, generation, plan, choice)
            batch = budgets.chosen(r, None if plan is None else plan.about.batch)
            known = {**vars(at), "resolved": r}
            yield Chosen(
                **known,
                generation=generation,
                base=choice.base,
                plan=plan,
                later=choice.later,
                batch=batch,
                watch=watch,
                updates=choice.updates,
                carries=choice.carries,
            )
    finally:
        tell_written(at.log, watch)


def _choice(at: Opened) -> selection.Choice:
    here, v = (at.files, at.root, at.sink.uri, at.resolved), at.verbs
    if v.retry:
        from gristmill.driver import retrydead as retrying

        return retrying.choose(*here, accept_code_change=v.accept_code_change, tell=at.log.tell_once)
    if at.spec.update is not None and not v.restart:
        return updating.choose(*here, append=at.appends, accept=v.accept, tell=at.log.tell_once)
    return selection.choose(*here, restart=v.restart, append=at.appends, accept=v.accept, tell=at.log.tell_once)


def _on_backend(
    at: Opened, r: Resolved, generation: Generation, plan: Plan | None, choice: selection.Choice
) -> Resolved:
    """The job on the backend of the plan it resumes or of the generation it adds to, or keeps answers of; otherwise on
    one chosen now.
    """
    if plan is None:
        claims = generations.generations(at.root, at.files)
        number = generation.base if choice.updates is None else choice.updates.generation
        number = choice.carries[0].number if choice.carries else number
        plan = next((generations.read_plan(g) for g in claims if g.number == number), None)
    if plan is not None:
        return backends.stored(r, plan.about.runs_on.backend)
    found = backends.settle(r)
    for note in found.notes:
        at.log.tell(note)
    return found.resolved


def tell_written(log: RunLog, watch: Watch) -> None:
    """Report the files that appeared, once: a person may have put them there."""
    if watch.seen:
        files = f"{', '.join(watch.seen[:5])}{' …' if len(watch.seen) > 5 else ''}"
        log.tell(f"appeared during this run, taken for written by the code, and not compared: {files}")
        watch.seen.clear()

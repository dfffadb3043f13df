"""What is about to be published, held against the result before, or another that the job names: which that is, where
its profile comes from, and what follows. The profile of a result is kept beside its plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pyarrow as pa

from gristmill.commit import drift, publication
from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Described, Drifted, ProfileRecord
from gristmill.commit.drift import Finding, Side
from gristmill.commit.generation import Generation, decode_schema, generations, read_plan
from gristmill.commit.ledger import Ledger
from gristmill.commit.publication import Publication
from gristmill.commit.receipt import Receipt
from gristmill.driver.choice import Chosen
from gristmill.driver.resolved import Resolved
from gristmill.errors import BadJob, BadSource, CorruptStore, NewerFormat
from gristmill.files import roots
from gristmill.files.disk import join
from gristmill.job.job import JobSpec
from gristmill.job.options import Gates
from gristmill.profiles.columns import profiled
from gristmill.profiles.profile import Profile, summed
from gristmill.profiles.sketch import library
from gristmill.result import reading
from gristmill.sinks.formats import sink_format
from gristmill.values import dataclass

PROFILE = "profile.json"


@dataclass(frozen=True)
class Staged:
    """All rows of a generation, committed and not published; `base` is the result that they are added to."""

    gates: Gates
    generation: Generation
    receipts: Ledger
    about: Described
    base: Publication | None
    storage: Any

    @staticmethod
    def of(spec: JobSpec, generation: Generation, done: Ledger, about: Described, latest: Publication | None) -> Staged:
        """What a generation has scored; `latest` is the result that it is added to, if it is added to one."""
        base = latest if generation.base is not None else None
        return Staged(spec.gates, generation, done, about, base, _storage(spec))

    @property
    def rows(self) -> int:
        """How many rows were scored."""
        return self.receipts.parts.of("rows").total("rows")

    def own(self) -> Profile | None:
        """The profile of these rows."""
        found = self.receipts.sums.profile
        files, root = self.generation.files, self.generation.root
        parts = self.receipts.parts.of("rows")
        return _completed(
            found, self.gates.drift or (), self.about, self.rows,
            lambda: reading.dataset_of(root, files, parts, self.about),
        )  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """What was found: sentences about what is not as before, the figures of each column, and the profiles; `whole` is
    that of the result as it will be, `own` that of the rows of this run.
    """

    findings: tuple[Finding, ...]
    drift: tuple[Drifted, ...]
    own: Profile | None
    whole: Profile | None

    @property
    def failed(self) -> list[str]:
        """Why nothing may be published."""
        return [found.text for found in self.findings if found.failed]

    def keep(self, generation: Generation) -> None:
        """Keep the profile beside the plan, for the runs to come."""
        if self.whole is not None and self.own is not None:
            record = ProfileRecord(self.whole, self.own, self.drift)
            generation.files.write_over(join(generation.folder, PROFILE), record.dump())


def ready(at: Chosen) -> None:
    """Before any row is scored: whether there is what the gates compare with. Raises BadJob."""
    gates = at.spec.gates
    if gates.drift:
        library()
    named(at.spec)
    if at.plan is not None:
        fitting(at, at.plan.about)


def named(spec: JobSpec) -> Publication | None:
    """The result that the job names to be compared with. Raises BadJob if there is none."""
    return _named(spec.gates, _storage(spec))


def foreseen(r: Resolved) -> None:
    """Before anything is read, as far as is known then: as `ready` and `fitting`. Raises BadJob."""
    job = r.job
    if job.gates.drift:
        library()
    named(job)
    if r.info.outputs is None or job.steps or job.post:
        return
    known: dict[str, Any] = {f.name: f.type for f in r.schema if r.columns is None or f.name in r.columns}
    own = () if job.sink is None else (job.sink.row_id, job.sink.model_version)
    drift.check(job.gates.drift, {**known, **{name: None for name in (*r.info.outputs, *own) if name}})


def fitting(at: Chosen, about: Described, columns: Iterable[str] = ()) -> None:
    """Once the columns are known, see that those that are to be compared are among them; `columns` are those that the
    first rows had, if any was scored. Raises BadJob.
    """
    asked, r = at.spec.gates.drift or {}, at.resolved
    known: dict[str, Any] = dict.fromkeys(columns)
    if not at.spec.steps:
        known |= {f.name: f.type for f in r.schema if r.columns is None or f.name in r.columns}
    if about.unseen or (at.spec.steps and not known):  # what steps and models make is known once they have run
        known |= {name: None for name in asked if name not in known}
    drift.check(asked, {**known, **{f.name: f.type for f in decode_schema(about.output_schema)}})


def compared(t: Staged) -> Compared:
    """Hold what is staged against the result before, or the one that is named."""
    kind = t.generation.kind
    own = t.own()
    base = None if t.base is None else profile_of(t.base, t.gates.drift or ())
    names = decode_schema(t.about.output_schema).names  # of which the base may lack some (evolve)
    whole = own if t.base is None else summed([base and base.read_as(names), own])
    other = None if kind == "retry-dead" else _before(t)
    if other is None:
        return Compared((), (), own, whole)
    before, named = other
    past = base if t.base is not None and not named else profile_of(before, t.gates.drift or ())
    name = f"the result of {t.gates.against}" if named else f"the result before (generation {before.generation})"
    adds = kind == "append" and not named
    then = Side(name, before.body.rows_ok, decode_schema(before.body.output_schema), past, _added(before))
    now = Side("this run", t.rows, decode_schema(t.about.output_schema), own, t.rows if adds else None)
    findings = [
        *drift.of_rows(t.gates, then, now), *drift.of_columns(then, now), *drift.of_nulls(t.gates, then, now),
    ]  # fmt: skip
    figures: tuple[Drifted, ...] = ()
    if t.gates.drift and t.rows:
        past, new = past or Profile(), own or Profile()
        last = _last_added(before, past) if adds else Profile()
        by_last = f"the rows that generation {before.generation} added"
        groups = [tuple(drift.of_values(t.gates, *side)) for side in ((past, new, name), (last, new, by_last))]
        figures = (*groups[0], *groups[1])
        findings += [found for group in groups for found in drift.of_drift(group)]
        if missing := drift.unknown(t.gates, replace(past, columns={**last.columns, **past.columns}), new):
            findings.append(Finding(f"drift of {', '.join(missing)} is not known: {_why(missing, past, new, name)}"))
    return Compared(tuple(findings), figures, own, whole)


def refused(found: Compared, generation: Generation) -> str:
    """Why what is staged is not published, and what to do about it."""
    return (
        f"{'; '.join(found.failed)}; nothing new was published (its rows are staged in {generation.work}; --accept, "
        "accept=True, publishes them once you have looked; other limits are options of gates)"
    )


def _last_added(before: Publication, past: Profile) -> Profile:
    """What is known of the rows that the last run added, of columns of which nothing is known of the whole result: they
    are not written, and were not asked for from the beginning.
    """
    kept = _kept(before)
    own = Profile() if kept is None else kept.own
    return replace(own, columns={n: c for n, c in own.columns.items() if n not in past.columns})


def _why(missing: list[str], past: Profile, new: Profile, name: str) -> str:
    before = f"{name} has no profile of its values, as nothing asked for it then; "
    if missing[0] in new.columns:
        return f"{before}the next run can be compared"
    return (
        f"{before if missing[0] not in past.columns else ''}some rows of this run were scored before it was asked for, "
        "or took over answers without it: --restart (restart=True) profiles all"
    )


def profile_of(result: Publication, columns: Iterable[str]) -> Profile | None:
    """The profile of a published result. What is not known of the values of `columns` is read from its files."""
    found = _kept(result)
    whole = found.whole if found is not None else summed(r.profile for r in _receipts(result))
    return _completed(
        whole, columns, result.body, result.body.rows_ok, lambda: reading.readable_dataset(result, "rows")
    )


def _completed(
    found: Profile | None, columns: Iterable[str], about: Described, rows: int, dataset: Callable[[], Any]
) -> Profile | None:
    """A profile of written rows, with the values of those written `columns` that it has not looked at."""
    names = decode_schema(about.output_schema).names
    missing = [n for n in columns if n in names and (found is None or n not in found.columns)]
    if not missing or not rows or not sink_format(about.sink_format).tables:
        return found
    read = Profile()
    for batch in dataset().to_batches(columns=missing):
        read = read + profiled(pa.Table.from_batches([batch]), missing, read)
    return read if found is None else found.beside(read)


def _before(t: Staged) -> tuple[Publication, bool] | None:
    """The result to compare with, and whether the job names it; None if there is none yet."""
    if (named := _named(t.gates, t.storage)) is not None:
        return named, True
    last = publication.load(t.generation.root, t.generation.predecessor, t.generation.files)
    return None if last is None else (last, False)


def _named(gates: Gates, storage: Any) -> Publication | None:
    if gates.against is None:
        return None
    try:
        root, files = roots.opened(gates.against, storage if "://" in gates.against else {})
        return publication.published(root, files)
    except (BadSource, OSError, CorruptStore) as e:
        raise BadJob(f"gates.against names {gates.against!r}, with which nothing can be compared: {e}") from e


def _storage(spec: JobSpec) -> Any:
    return {} if spec.sink is None else spec.sink.storage


def _generation(result: Publication, number: int) -> Generation | None:
    return next((g for g in generations(result.root, result.files) if g.number == number and not g.lost), None)


def _kept(result: Publication) -> ProfileRecord | None:
    own = _generation(result, result.generation)
    if own is None:
        return None
    try:
        return ProfileRecord.load_from(join(own.folder, PROFILE), result.files)
    except (FileNotFoundError, CorruptStore, NewerFormat):
        return None


def _receipts(result: Publication) -> list[Receipt]:
    """The receipts of a result's shards; one without a profile for each generation of which receipts or the plan are
    lost, damaged, or of a later version: what a restart replaces need not be readable.
    """
    known = {g.number: g for g in generations(result.root, result.files) if not g.lost}
    found = []
    for number in result.generations:
        some: dict[int, Receipt] = {}
        shards = 1
        with contextlib.suppress(NewerFormat, CorruptStore, FileNotFoundError):
            if number in known:
                some = receipts.standing(known[number].receipts, result.files)
                shards = len(read_plan(known[number]).shards)
        found += list(some.values())
        if not some or len(some) < shards:
            found.append(Receipt(0, "", (), ()))
    return found


def _added(result: Publication) -> int | None:
    """How many rows the last run added to a result; None if it made all of it, or if that is not known."""
    own = _generation(result, result.generation)
    kept = _kept(result) if own is not None and own.kind == "append" else None
    return None if kept is None else kept.own.rows

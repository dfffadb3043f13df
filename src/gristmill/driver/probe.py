"""The third phase of a run: the first rows are scored before there is a plan, and the plan is made from the outcome."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import pyarrow as pa

from gristmill.commit import generation as generations
from gristmill.commit import inherited, inspections, publication
from gristmill.commit.documents import RETRIED, PlanDocument, TableRecord
from gristmill.commit.generation import Plan
from gristmill.commit.inherited import Inherited
from gristmill.commit.keptindex import Kept
from gristmill.driver import budgets, delivering, drifting, indexing, shipping, sizes, sourcecheck
from gristmill.driver.choice import Chosen
from gristmill.driver.resolved import Resolved
from gristmill.errors import RunFailed
from gristmill.files.disk import join
from gristmill.observe import units
from gristmill.process.messages import Failure
from gristmill.shards import shard
from gristmill.shards.shard import Selection, Shard
from gristmill.values import dataclass
from gristmill.worker.recipe import Task

PROBE_ROWS = 64  # they determine the output schema
TRIAL_ROWS = 32  # from all over the source, where all of the first rows fail; again times MORE if none says anything
MORE = 4
MOST_PROBED = 16_384  # rows to search for one that can be scored before there is a plan
PROOF_ROWS = 16  # whether a model that has worked works still
SURE_AFTER = 2.0  # seconds: a probe that was shorter may have been a first call, with its imports, and little else
TIMED_ROWS = 16  # if the schema is known, only the rate is needed, while the other workers wait
# On a GPU these take as long as one row does, and tell nothing of its rate; half of them are for what the first call
# takes, which is a second and more.
GPU_TIMED_ROWS = 512


@dataclass(frozen=True)
class Planned(Chosen):
    """A generation whose plan is written."""

    plan: Plan
    inherits: Mapping[int, tuple[Inherited, ...]] = field(default_factory=dict, kw_only=True)  # by shard
    inherited: tuple[str, ...] = field(default=(), kw_only=True)  # folders of the generations that shards inherit of

    @staticmethod
    def made(at: Chosen, plan: Plan) -> Planned:
        """A generation with its plan."""
        inherits = inherited.read(at.generation, plan.about.kept)
        folders = sorted({one.folder for some in inherits.values() for one in some})
        return Planned(**{**vars(at), "plan": plan}, inherits=inherits, inherited=tuple(folders))

    def task(self, number: int) -> Task:
        """What a worker is given to score a shard."""
        g, about = self.generation, self.plan.about
        made = {step: generations.decode_schema(text) for step, text in about.made.items()}
        only = None
        if about.only:
            from gristmill.driver.retrydead import Only

            told_of = about.kept.get(RETRIED)  # an earlier version did not say what it holds
            only = Only(join(g.folder, about.only), "" if told_of is None else told_of.sha256, self.files)
        kept = Kept(g.folder, self.root, about.kept, self.files) if "hi" in about.kept else None
        told = self.plan.schema, tuple(about.answers), made
        inherits = self.inherits.get(number, ())
        where = g.number, g.folder, self.root
        return Task(
            "score",
            self.plan.shards[number],
            *where,
            *told,
            only=only,
            kept=kept,
            inherits=inherits,
            inherited=self.inherited,
        )


def first_rows(at: Chosen) -> int:
    """How many rows a probe scores: one batch at most, and few where they tell little. Of a model that answers row by
    row they are as many as it says, which perhaps is none: it answers one long after another, and all other rows wait.
    """
    info, own = at.resolved.info, bool(at.spec.steps or at.spec.post)
    if info.at_once and info.schema is not None and not own:
        return info.alone if at.generation.schema is None else max(1, info.alone)
    if not info.by_tokens or own:
        return min(PROBE_ROWS, at.batch.rows)
    return min(GPU_TIMED_ROWS if at.resolved.place.gpu else TIMED_ROWS, at.batch.rows)


def proof(at: Chosen, scored: Shard | None) -> Task:
    """Rows from elsewhere, in case the model fails on every row tried: of a shard that was `scored` in this run, or
    from all over the source; a retry's may have been scored before.
    """
    g = at.generation
    everything = replace(at.resolved, selection=Selection.everything(at.resolved.files))
    pieces, some = shipping.spread(everything, TRIAL_ROWS if scored is None else PROOF_ROWS, scored)
    rows = sum(n for n, _ in some)
    return Task("proof", Shard(0, pieces), g.number, g.folder, at.root, rows=rows, some=some)


def trial(at: Chosen, most: int) -> Task:
    """The task that probes rows from all over the source, `most` or fewer."""
    pieces, some = shipping.spread(at.resolved, most)
    return replace(probe(at, 0), shard=Shard(0, pieces), rows=sum(n for n, _ in some), some=some)


def probe(at: Chosen, rows: int) -> Task:
    """The task that probes the first `rows` rows."""
    r, g = at.resolved, at.generation
    base = None if g.schema is None else generations.decode_schema(g.schema)
    first = Shard(0, shipping.pieces(r, max(1, rows) * 64))
    # Only columns that earlier rows may lack: one that every earlier row had is required of these, too.
    fields = {step: generations.decode_schema(text) for step, text in _made(at, {}).items()}
    made = {step: pa.schema([f for f in schema if f.nullable]) for step, schema in fields.items()}
    told = tuple(name for name, optional in _answers(at, {}).items() if optional), made
    return Task("probe", first, g.number, g.folder, at.root, None, *told, base, rows=rows, only=r.only)


def further(at: Chosen, asked: Task, answer: Mapping[str, Any]) -> Task | None:
    """Another probe, if none of the rows that were `asked` was scored; None if the plan can be made. Where the model
    fails on the first rows, these are some from all over the source, which tell whether rows or model are to blame.
    Raises RunFailed if it fails on them, too.
    """
    rows, error = asked.rows or 0, answer.get("error")
    if answer["schema"] is not None or at.generation.schema is not None:
        return None
    if asked.some or answer["failed"]:
        most = rows * MORE if asked.some else TRIAL_ROWS
        if error is not None and asked.some:
            raise RunFailed(_fails(at, asked, error))
        if asked.some and (most > MOST_PROBED or rows >= at.resolved.estimated_rows):
            return None
        return trial(at, most)
    # Rows that are all filtered out cost little: the probe goes on to the next ones, however many that takes. Rows
    # added to a result have its schema, whether or not any of the probed rows can be scored.
    more = rows and answer["rows"] >= rows and (rows < MOST_PROBED or not answer["dead"])
    return probe(at, rows * 16) if more else None


def _fails(at: Chosen, asked: Task, error: Failure) -> str:
    files = len({piece.file.path for piece in asked.shard.pieces})
    rows, of = units.plural(asked.rows or 0, "row", "rows"), units.plural(files, "file", "files")
    return (
        f"{error.who} fails on every one of the first rows: {error.type}: {error.message}\nIt fails on {rows} from all "
        f"over the source, too ({of}): --preview 20, or preview(20), shows rows with their errors\n{error.traceback}"
    ).rstrip()


def planned(at: Chosen, answer: dict[str, Any]) -> Planned:
    """Make and write the plan from the probe's answer, which fixes schema and shards. Raises BadJob, and PlanChanged if
    the rows have other columns than they must.
    """
    r = at.resolved
    if not first_rows(at):
        answer = {**answer, **_known(at)}
    shipping.check_columns(r, at.sink, answer)
    pace = rate(r, answer)
    table = shard.cut(r.files, r.selection, sizes.shard_rows(r, pace), max(1, r.workers))
    about = described(
        at,
        output_schema=_schema(at, answer["schema"]),
        unseen=answer["schema"] is None and at.generation.schema is None and not shipping.foreknown(r),
        answers=_answers(at, answer["answers"]),
        made=_made(at, answer["made"]),
        pace=None if r.only is not None else pace,
    )
    return written(at, about, table, answer.get("columns", ()))


def described(at: Chosen, **known: Any) -> PlanDocument:
    """A plan's description; what is `known` of the rows, and what only some plans have."""
    r = at.resolved
    if r.only is not None:
        known["kept"] = {RETRIED: TableRecord(os.path.basename(r.only.path), r.only.sha256)}
    return PlanDocument(
        fingerprint=r.fingerprint.stored(),
        reads=sourcecheck.described(shipping.reader(r)),
        sink_format=r.sink_format.name,
        partition_by=tuple(at.sink.partition_by),
        model=shipping.model_record(r),
        batch=budgets.stored(at.batch),
        runs_on=shipping.runs_on(r),
        workers=r.workers,
        everything=r.whole and r.only is None,
        only=None if r.only is None else os.path.basename(r.only.path),
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        matched=shipping.matched(r),
        **known,
    )


def written(at: Chosen, about: PlanDocument, table: pa.Table, columns: Iterable[str] = ()) -> Planned:
    """Write a plan with this shard table; `columns` are those that the first rows had. Raises BadJob if the sink's
    index, gates or deliveries do not fit its rows.
    """
    r = at.resolved
    indexing.fitting(at, about)
    delivering.fitting(at, about)
    drifting.fitting(at, about, columns)
    inspected = inspections.as_table(r.files, r.looked_at)
    plan = generations.write_plan(at.files, at.generation, about, list(r.files), table, inspected)
    return Planned.made(at, plan)


def rate(r: Resolved, answer: Mapping[str, Any]) -> float | None:
    """Rows a second of one worker, by a probe's answer. The slower stage sets the pace: without steps that is the
    model, as opening a file must not count as work. What a GPU's first calls took is left out. None where a probe does
    not tell it: an endpoint finds out how many it answers at a time, and may be away for the moment; others that answer
    row by row tell it by as many rows as they answer at a time.
    """
    figures, rows = answer["figures"], answer["ok"]
    if r.info.asks or rows < r.info.at_once:
        return None
    model, warmed = figures.get("model_seconds", 0.0), rows - figures.get("warmup_rows", 0.0)
    each = [figures.get("prepare_seconds", 0.0) / rows] if r.job.steps and rows else []
    if warmed > 0:
        each.append((model - figures.get("warmup_seconds", 0.0)) / warmed)
    elif rows:
        each.append(model / rows)
    return 1 / max(each) if each and max(each) > 0 else None


def sure_rate(r: Resolved, answer: Mapping[str, Any]) -> float | None:
    """The same if it may be told as how long the run takes, which is many times what was measured."""
    figures = answer["figures"]
    warm = figures.get("warmup_rows", 0.0) > 0
    return rate(r, answer) if warm or figures.get("model_seconds", 0.0) >= SURE_AFTER else None


def _known(at: Chosen) -> dict[str, Any]:
    """What a probe would tell of the columns, of a model that needs none."""
    r = at.resolved
    names, known = r.info.outputs or (), shipping.schema_without_rows(r)
    return {
        "schema": generations.encode_schema(r.sink_format.stored(known.empty_table(), at.sink.options)),
        "results": list(names),
        "answers": dict.fromkeys(names, False),
        "columns": list(dict.fromkeys([*(r.schema.names if r.columns is None else r.columns), *names])),
    }


def _answers(at: Chosen, probed: Mapping[str, bool]) -> dict[str, bool]:
    """The columns that the model answered in, for the first rows or those of the result to be added to, and whether
    some rows had null there.
    """
    before: Mapping[str, bool] = {} if at.base is None else at.base.body.answers
    return {name: before.get(name, False) or probed.get(name, False) for name in (*before, *probed)}


def _made(at: Chosen, probed: Mapping[str, Sequence[pa.Field]]) -> dict[str, str]:
    """The columns that dicts of steps added, likewise, as a schema for each step."""
    before = {} if at.base is None else at.base.body.made
    found = {step: {f.name: f for f in generations.decode_schema(text)} for step, text in before.items()}
    for step, fields in probed.items():
        found[step] = {**{f.name: f for f in fields}, **found.get(step, {})}
    return {step: generations.encode_schema(pa.schema(list(fields.values()))) for step, fields in found.items()}


def _schema(at: Chosen, probed: str | None) -> str:
    """The output schema of this generation's plan: its base's, if there is one, which the first rows must fit."""
    base = at.generation.schema
    if base is None:
        form, known = at.resolved.sink_format, shipping.schema_without_rows(at.resolved)
        if probed is None:
            return generations.encode_schema(form.stored(known.empty_table(), at.sink.options))
        return _as_before(at, probed)
    if probed is None:
        return base
    found = generations.decode_schema(base), generations.decode_schema(probed)
    schema = shipping.added_schema(*found, at.sink)
    if at.base is not None:
        shipping.check_exact(at.base, schema, at.sink.uri)
    return generations.encode_schema(schema)


def _as_before(at: Chosen, probed: str) -> str:
    """Columns in which none of the first rows has a value have the type that they have in the result which these rows
    are to take the place of: tonight's first ones may be those that lack it.
    """
    schema, live = generations.decode_schema(probed), publication.latest(at.root, at.files)
    empty = [f for f in schema if pa.types.is_null(f.type)]
    if not empty or live is None or live.body.sink_format != at.resolved.sink_format.name:
        return probed
    before = generations.decode_schema(live.body.output_schema)
    for one in empty:
        if one.name in before.names:
            kind = before.field(one.name).type
            schema = schema.set(schema.get_field_index(one.name), one.with_type(kind))
    return generations.encode_schema(schema)

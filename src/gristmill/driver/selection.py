"""Which generation a run works on: a new one, an unfinished one, or none because there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gristmill.commit import generation as generations
from gristmill.commit import publication
from gristmill.commit import publish as publishing
from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Verb
from gristmill.commit.generation import Generation
from gristmill.commit.ledger import Ledger
from gristmill.commit.publication import Publication
from gristmill.driver import sourcecheck
from gristmill.driver.progressnote import last_said
from gristmill.driver.resolved import Resolved
from gristmill.driver.tally import used
from gristmill.errors import BadSource, CorruptStore, PlanChanged
from gristmill.files.contract import Files
from gristmill.files.disk import META
from gristmill.fingerprint import digests as fingerprint
from gristmill.fingerprint.digests import Fingerprint
from gristmill.fingerprint.loadedmodules import changed
from gristmill.job.job import HELD
from gristmill.models.batches import under_way
from gristmill.observe import units
from gristmill.shards.counts import summed
from gristmill.shards.shard import Selection
from gristmill.values import dataclass

RESTART = "--restart (restart=True) to score everything anew"
ACCEPT = "--accept (accept=True) to publish that run as it is"
LOADED = ", which the code loaded as it ran, has changed"
RETRY = "retry-dead --accept-code-change (accept_code_change=True) to score"


@dataclass(frozen=True)
class Choice:
    """`generation` None: nothing to do. `resumed`: its plan already exists. `resolved` may have fewer files than the
    job (for an append, or an unfinished plan that is finished as it was made). `base` is the publication that the
    generation adds to, `later` are source files left for the next run to append, `warning` is what the user who chose
    this may not know, `updates` the publication whose answers an update that is begun may keep, and `carries` are the
    unfinished generations whose answers it may keep, the newest first.
    """

    generation: Generation | None
    resumed: bool
    resolved: Resolved
    base: Publication | None = None
    later: tuple[str, ...] = ()
    warning: str = ""
    updates: Publication | None = None
    carries: tuple[Generation, ...] = ()


def _quietly(text: str) -> None:
    pass


@dataclass(frozen=True)
class Held:
    """What a sink holds: its latest publication, all claims, and the claim that can still become the next publication,
    if there is one (`generation.pending`). `tell` gets messages, such as which source files are read again.
    """

    root: str
    files: Files
    latest: Publication | None
    claims: tuple[Generation, ...]
    unfinished: Generation | None
    tell: Callable[[str], None] = _quietly

    @staticmethod
    def by(root: str, files: Files, tell: Callable[[str], None] = _quietly) -> Held:
        """The sink at `root`."""
        latest = publication.latest(root, files)
        number = 0 if latest is None else latest.number
        claims = tuple(generations.generations(root, files))
        return Held(root, files, latest, claims, generations.pending(claims, number), tell)

    def claim(self, kind: Verb, r: Resolved, carries: bool = False) -> Generation:
        """Begin the next generation on top of what is published; an unfinished one there is given up for good, and its
        files removed, or, if the new one `carries` its answers on, once that is published. `append` and `retry-dead`
        add to the result, and have to fit its schema if it has rows. Raises BadSource if the files differ in columns
        that it would read.
        """
        if r.differing and kind != "retry-dead":  # a retry's rows were read despite the differences
            raise r.differing
        if carries:
            latest = self.latest
            if self.unfinished is not None:
                publishing.hide(self.unfinished, latest)
        else:
            latest = self.given_up()
        adds = latest if kind in ("append", "retry-dead") else None
        schema = adds.body.output_schema if adds is not None and adds.body.rows_ok else None
        return generations.claim(
            self.files,
            self.root,
            kind,
            base=None if adds is None else adds.generation,
            predecessor=0 if latest is None else latest.number,
            fingerprint=r.fingerprint.stored(),
            schema=schema,
            after=0 if latest is None else max(latest.generations),
            sink=None if latest is None else latest.body.sink,
        )

    def given_up(self) -> Publication | None:
        """The publication to build on, after giving up for good the unfinished generation on top of the latest."""
        begun = self.unfinished
        if begun is not None and (left := _under_way(begun)):
            which = f"{', '.join(left[:5])}{', …' * (len(left) > 5)}"
            self.tell(
                "batches of the run that is given up are under way at the provider, and are left to it, which may "
                f"charge for them: {which}; cancel them there if nobody needs them"
            )
        if begun is not None and (dropped := paid(begun)):
            self.tell(f"the unfinished run that is here (generation {begun.number}) is given up, with {dropped}")
        if self.latest is None or begun is None:
            return self.latest
        self.tell(f"the unfinished {begun.kind} that is here (generation {begun.number}) is given up")
        return publishing.give_up(self.latest)

    def known(self, r: Resolved) -> Resolved:
        """The job as it can be compared with what the sink holds: without what its own runs have written (see
        `fingerprint.without_written`), and with its secrets sealed as those in the sink are.
        """
        now = fingerprint.sealed(r.fingerprint, (g.fingerprint.code for g in self.claims if not g.lost))
        return replace(r, fingerprint=fingerprint.without_written(now, generations.written(self.root, self.files)))

    def members(self, of: Publication | None = None) -> list[Generation]:
        """The generations whose rows the latest publication has. Raises CorruptStore if the claim of one is lost."""
        found = of or self.latest
        numbers = [] if found is None else found.generations
        known = {g.number: g for g in self.claims}
        for number in numbers:
            if number not in known or known[number].lost:
                raise CorruptStore(
                    f"{self.root}: the claim of generation {number} is lost or damaged: put {META}/generations/"
                    f"{number:04d}.json back, or start over with --restart (restart=True)"
                )
        return [known[number] for number in numbers]

    def inputs(self, members: Sequence[Generation], r: Resolved) -> dict[str, str]:
        """Input digests of several generations by path, for comparison with the job's: a file that was touched since,
        but still holds what was read of it, has the job's digest.
        """
        merged: dict[str, str] = {}
        for member in members:
            merged.update(generations.stored_inputs(member))
        return sourcecheck.reconciled(r, members, merged, self.tell)

    def base_of(self, generation: Generation) -> Publication | None:
        """The publication that an unfinished generation adds to."""
        return None if generation.base is None else self.latest


def choose(
    files: Files,
    root: str,
    uri: str,
    r: Resolved,
    *,
    restart: bool,
    append: bool,
    accept: bool,
    tell: Callable[[str], None],
) -> Choice:
    """Compare what the sink holds with the job. Raises PlanChanged, with a readable difference. `tell` gets messages
    about files that are read again for this.
    """
    held = Held.by(root, files, tell)
    if restart:
        r, begun = held.known(r), held.unfinished
        if begun is not None and begun.kind == "restart" and _whole(held, begun, r):
            return Choice(begun, begun.planned, r)
        # Of a sink that is a store the verb counts even where its folder is new: it may have been lost.
        again = held.claims or any(delivery.is_sink for delivery in r.job.deliver)
        return Choice(held.claim("restart" if again else "new", r), False, r)
    return chosen(held, uri, r, append=append, accept=accept)


def chosen(held: Held, uri: str, r: Resolved, *, append: bool, accept: bool) -> Choice:
    """As `choose`, for what a sink holds, without --restart."""
    r, begun = held.known(r), held.unfinished
    if begun is not None and (begun.planned or begun.kind in ("append", "restart")):
        return _unfinished(held, begun, uri, r, append, accept)
    if held.latest is None:  # a claim without a plan has scored nothing, but may have answers that were paid for
        if begun is not None and not r.differing and not _meant(begun, r.fingerprint):
            return Choice(begun, False, r)
        return Choice(held.claim("new", r), False, r)
    return _finished(held, held.latest, uri, r, append)


class Looked(Held):
    """What a sink holds, for those who only look: nothing is claimed, or given up."""

    def claim(self, kind: Verb, r: Resolved, carries: bool = False) -> Generation:
        if r.differing and kind != "retry-dead":
            raise r.differing
        return Generation(self.root, 0, "", kind, lost=True, files=self.files)

    def given_up(self) -> Publication | None:
        return self.latest


def refusal(held: Held, uri: str, r: Resolved, append: bool) -> str:
    """Why a run would be refused, as PlanChanged says it; "" if it would not. Nothing is claimed or written."""
    looked = Looked(held.root, held.files, held.latest, held.claims, held.unfinished)
    try:
        chosen(looked, uri, _comparable(held, r), append=append, accept=False)
    except PlanChanged as e:
        return str(e)
    return ""


def left(held: Held, r: Resolved, append: bool) -> float:
    """About how many source rows a run would score, with what the sink holds; 0 if it would be refused."""
    looked = Looked(held.root, held.files, held.latest, held.claims, held.unfinished)
    try:
        found = chosen(looked, held.root, _comparable(held, r), append=append, accept=False)
    except (PlanChanged, BadSource):
        return 0.0
    begun = found.generation
    if begun is None:
        return 0.0
    if not found.resumed:
        return float(found.resolved.estimated_rows)
    shards = generations.read_plan(begun).shards
    missing = shards.weight_of(Ledger.of(begun).missing(len(shards)))
    return float(found.resolved.estimated_rows) * missing / (shards.total_weight() or 1)


def _comparable(held: Held, r: Resolved) -> Resolved:
    """A job over the first rows of a store, with the rows that the sink knows in their place."""
    if not r.more:
        return r
    begun = held.unfinished
    of = [*held.members(), *([begun] if begun is not None and begun.planned else [])]
    stored = {path: digest for g in of for path, digest in generations.stored_inputs(g).items()}
    return replace(r, fingerprint=replace(r.fingerprint, inputs=stored))


def outlook(held: Held, r: Resolved, append: bool) -> str:
    """What a run would find in the sink, as a line; "" if it holds nothing. Nothing is claimed or written."""
    r, begun = held.known(_comparable(held, r)), held.unfinished
    if begun is not None and begun.planned:
        done = len(Ledger.of(begun))
        shards = len(generations.read_plan(begun).shards)
        kind = "run" if begun.kind == "new" else begun.kind
        return f"an unfinished {kind}, {done} of {shards} shards done, which the next run of the same job resumes"
    if held.latest is None:
        return ""
    found = Difference.result(held, r)
    if not found.lines and r.more:
        return "a result of this job: whether its rows are those that are there now is known once a run has read them"
    if not found.lines:
        return "all rows are published: there is nothing to do"
    if not found.grown:
        return f"a result of a different job, so that a run is refused: {'; '.join(found.lines)}"
    if r.differing:
        raise r.differing
    new = len([path for path in r.fingerprint.inputs if path not in found.stored])
    files = f"{new} new file{'s' if new > 1 else ''}"
    return f"a result, and {files} since: {'a run scores these alone' if append else '--append scores these alone'}"


def paid(begun: Generation) -> str:
    """What an unfinished generation holds that was, or will be, paid for, as text; "" if nothing."""
    from gristmill.commit import journal

    ledger = Ledger.of(begun)
    held = journal.answered(begun.folder, begun.files, ledger)
    done = used([ledger.sums.figures])
    told = []
    kept = held.get("kept", 0.0) + held.get("batched", 0.0)
    if (kept and held.get("requests")) or done.get("requests"):
        answers, total = units.plural(int(kept + done.get("requests", 0)), "answer"), summed([done, held])
        cost = f" for ${total['cost']:.4f}" if total.get("cost") else ""
        where = " in shards that are not committed"
        if done.get("requests"):
            where = f" ({units.count(int(kept))} of them{where})" if kept else ""
        told.append(f"{answers} of an endpoint{cost}{where}")
    if left := _under_way(begun):
        told.append(f"{units.plural(len(left), 'batch', 'batches')} under way at the provider")
    return " and ".join(told)


def _under_way(begun: Generation) -> list[str]:
    """The batches of an unfinished generation that a provider still works on."""
    from gristmill.commit import journal

    return under_way(journal.notes(begun.folder, begun.files))


def _whole(held: Held, begun: Generation, r: Resolved) -> bool:
    """Whether a restart can be resumed: planned for the same job, with no committed file lost."""
    try:
        if not begun.planned:
            return not _meant(begun, r.fingerprint)
        if compared(begun, r.fingerprint, held.inputs([begun], r)):
            return False
    except CorruptStore:
        return False
    works = (work.rpartition("/")[2] for (work,) in Ledger.of(begun).parts.tuples("work"))
    return set(works) <= set(begun.files.names(begun.work))


def _unfinished(held: Held, begun: Generation, uri: str, r: Resolved, append: bool, accept: bool) -> Choice:
    accepts = False
    base = held.base_of(begun)
    before = held.inputs(held.members(base), r) if base is not None else {}
    if begun.planned:
        planned = held.inputs([begun], r)
        known = {**before, **planned}
        members = [] if base is None else held.members(base)
        lines = compared(begun, before_others(r, list(known)).fingerprint, known, members)
        later = tuple(p for p in r.fingerprint.inputs if p not in known)
        accepts = as_it_is(begun, lines)
        if accepts and accept and not _published(held, r):
            return Choice(begun, True, restricted(r, list(planned)), base, later, _by_other_code(lines))
        if not lines and not (later and append and begun.kind == "append" and _refused(begun)):
            return Choice(begun, True, restricted(r, list(planned)), base, later)
        what = "there is an unfinished run of a different job here" + (
            f", with {told}" if (told := paid(begun)) else ""
        )
    else:
        now = restricted(grown(r, list(before)), [p for p in r.fingerprint.inputs if p not in before])
        lines = [*_changed(before, r.fingerprint), *_meant(begun, now.fingerprint)]
        if not lines and base is not None and not now.files:
            return _finished(held, base, uri, r, append)
        if not lines and r.differing:  # because of files that appeared since it was claimed
            raise r.differing
        if not lines:
            return Choice(begun, False, now, base)
        what = f"there is an unfinished --{begun.kind} of a different job here"
    problem = f"{uri}: {what}:\n{fingerprint.listed(lines)}"
    return _otherwise(held, begun, uri, r, append, problem, accepts)


def as_it_is(begun: Generation, lines: Sequence[str]) -> bool:
    """Whether a generation held back by a gate can be accepted although only its code has changed (`lines` are all the
    differences): all its rows are committed, so publishing them runs no code.
    """
    if not (lines and all(line.startswith("code:") for line in lines) and _refused(begun)):
        return False
    return len(Ledger.of(begun)) == len(generations.read_plan(begun).shards)


def _published(held: Held, r: Resolved) -> bool:
    """Whether what is published is the result of exactly this job."""
    return held.latest is not None and not Difference.result(held, r).lines


def _by_other_code(lines: list[str]) -> str:
    return f"what is accepted was scored by the code as it was, not as it is now:\n{fingerprint.listed(lines)}"


def _refused(begun: Generation) -> bool:
    """Whether an unfinished generation is complete except for a gate that did not hold."""
    return (said := last_said(begun)) is not None and said.phase == "gate failed"


def _otherwise(
    held: Held, begun: Generation, uri: str, r: Resolved, append: bool, problem: str, accepts: bool
) -> Choice:
    """What a run does if the sink has an unfinished run of a different job. If nothing is published and that run has
    committed nothing, and has no answers that were paid for, it is replaced. An append gives it up and adds what is new
    to the result, if the result is of this job. If nothing is new, there is nothing to do, and an unfinished run other
    than an append is left for its own job to finish, unless its files are visible in the sink. Raises PlanChanged in
    all other cases.
    """
    if held.latest is None:
        if not receipts.listed(begun.receipts, begun.files) and not paid(begun):
            return Choice(held.claim("new", r), False, r)
    else:
        found = Difference.result(held, r)
        if not found.lines and begun.kind != "append":
            if publishing.linked(begun, held.latest):  # they may be removed only if it can never be published
                return Choice(None, True, r, held.given_up())
            held.tell(
                f"an unfinished {begun.kind} of a different job is here (generation {begun.number}): it is left alone"
            )
            return Choice(None, True, r, held.latest)
        if append and (found.grown or not found.lines):
            return _finished(held, held.latest, uri, r, append)
    raise PlanChanged(f"{problem}\n{_ways(held, begun, r, accepts)}")


@dataclass(frozen=True)
class Difference:
    """The differences between a published result, whose inputs are `stored`, and a job."""

    stored: Mapping[str, str]
    lines: list[str]
    r: Resolved

    @staticmethod
    def result(held: Held, r: Resolved) -> Difference:
        """The difference over all of the source's files."""
        members = held.members()
        stored = held.inputs(members, r)
        return Difference(stored, compared(members[-1], r.fingerprint, stored, members[:-1]), r)

    def known(self, held: Held) -> Difference:
        """The difference over only those source files that the result has rows of."""
        some = before_others(self.r, list(self.stored))
        *before, last = held.members()
        return Difference(self.stored, compared(last, some.fingerprint, self.stored, before), some)

    @property
    def code(self) -> bool:
        """Whether nothing but code differs."""
        return all(line.startswith("code:") for line in self.lines)

    @property
    def grown(self) -> bool:
        """Whether nothing differs except that the source has new files, if that can be told."""
        if not self.lines or not all(line.startswith("input:") for line in self.lines) or self.some:
            return False
        return fingerprint.new_inputs_only(self.stored, self.r.fingerprint)

    @property
    def fresh(self) -> bool:
        """Whether the source has files that the result has no rows of, if that can be told."""
        return not self.some and any(path not in self.stored for path in self.r.fingerprint.inputs)

    @property
    def some(self) -> bool:
        """Whether only some rows of the source are taken, so that which of them are new cannot be told."""
        return self.r.job.source.limit is not None or self.r.job.source.sample is not None


def _ways(held: Held, begun: Generation | None, r: Resolved, accepts: bool = False) -> str:
    """The ways to proceed with a job other than the one in the sink, as a sentence. Each would be accepted as things
    are now; what comes after "then", once the step before it is done.
    """
    kind = None if begun is None else begun.kind
    found = [] if begun is None else [_put_back(begun, accepts)]
    why = ""
    if held.latest is not None:
        result = Difference.result(held, r)
        known = result.known(held)
        # A table in memory, or one that was copied from a store, is one file; other rows make another file.
        if kind is None and result.fresh and not result.grown and not all(p.startswith(HELD) for p in result.stored):
            found.append("put it back, then --append (append=True) to score only the new files")
        if kind is None and result.grown:
            found.append("--append (append=True) to score only the new files")
        if kind is not None and (result.grown or not result.lines):
            found.append("--append (append=True) to give it up and score only what is new")
        if known.code and held.latest.body.rows_dead:
            again = "to begin it anew" if kind == "retry-dead" else "to score the dead rows again"
            found.append(f"{RETRY} only the dead rows with the new code" if known.lines else f"retry-dead {again}")
        if kind == "append" and known.lines and known.code:
            why = "what is published was scored by the code as it was, and one result must not mix the two: "
    drops = "" if begun is None or not paid(begun) else ", which drops these"
    first, *rest = [*found, RESTART + drops]
    return why + ", or ".join([first if first.startswith("put ") else f"use {first}", *rest])


def _put_back(begun: Generation, accepts: bool) -> str:
    """The way back to an unfinished run: resume it or, if a gate did not hold because of its dead rows, accept it."""
    if accepts:
        return f"{ACCEPT}, then {RETRY} its dead rows with the new code"
    if not (_refused(begun) and (said := last_said(begun)) is not None and said.rows_dead):
        return "put it back to go on with that run"
    return f"put it back, then {ACCEPT}"


def _finished(held: Held, latest: Publication, uri: str, r: Resolved, append: bool) -> Choice:
    found = Difference.result(held, r)
    if not found.lines:
        return Choice(None, True, r, held.given_up())
    if append and found.grown:
        fewer = restricted(grown(r, list(found.stored)), [p for p in r.fingerprint.inputs if p not in found.stored])
        return Choice(held.claim("append", fewer), False, fewer, latest)
    problem = f"{uri}: holds a result of a different job:\n{fingerprint.listed(found.lines)}"
    if append and found.some:
        problem += "\nwith limit or sample it cannot be told which rows are new, so nothing is appended"
    if append and r.job.source.data is not None and any(line.startswith("input:") for line in found.lines):
        problem += (
            "\nrows in memory cannot be appended, as new ones cannot be told from changed ones: write them as a file "
            "of their own (to_parquet) into a folder, and give that folder as the source"
        )
    raise PlanChanged(f"{problem}\n{_ways(held, None, r)}")


def compared(
    planned: Generation, now: Fingerprint, inputs: Mapping[str, str], before: Sequence[Generation] = ()
) -> list[str]:
    """What differs between the plan of a generation and a job; `inputs` are those of the whole result, and `before` the
    generations that it adds to.
    """
    old = generations.read_plan(planned).about.fingerprint
    lines = fingerprint.differences(old, now, inputs)
    return lines + [f"code: {entry}{LOADED}" for entry in changed(noted(planned, before))]


def noted(last: Generation, before: Sequence[Generation]) -> dict[str, frozenset[str]]:
    """What code loaded as it ran, from the notes of a generation and of those that it adds to, except those with other
    code. If two of them loaded different versions, which was accepted then (retry-dead --accept-code-change), the later
    one counts.
    """
    found: dict[str, frozenset[str]] = {}
    for member in [*before, last]:
        if member is last or _code_of(member) == _code_of(last):
            notes = generations.loaded(member.folder, member.files)
            found.update({entry: frozenset(digests) for entry, digests in notes.items()})
    return found


def _code_of(member: Generation) -> dict[str, str]:
    return {} if member.lost else fingerprint.compared(member.fingerprint.code)


def _meant(claimed: Generation, now: Fingerprint) -> list[str]:
    """What differs between a claim, which holds its inputs as one digest, and a job. New files are no difference for an
    append. Nor are files that were merely rewritten since: nothing of them has been scored.
    """
    then = claimed.fingerprint
    lines = fingerprint.differences(then, now, now.inputs)
    if claimed.kind != "append" and then.inputs != fingerprint.without_stamps(now.inputs):
        lines.append("input: the source has other files than before")
    return lines


def _changed(inputs: Mapping[str, str], now: Fingerprint) -> list[str]:
    """What differs in the inputs that a base was made from; new ones are ignored."""
    ours = {p: d for p, d in now.inputs.items() if p in inputs}
    return fingerprint.differences(now.stored(), replace(now, inputs=ours), inputs)


def restricted(r: Resolved, paths: Collection[str]) -> Resolved:
    """The same job over only some of its files."""
    wanted = set(paths)
    keep = [i for i, f in enumerate(r.files) if f.file.path in wanted]
    if len(keep) == len(r.files):
        return r
    place = np.full(len(r.files), -1, dtype=np.int64)
    place[keep] = np.arange(len(keep))
    ranges = r.selection.ranges[place[r.selection.ranges[:, 0]] >= 0].copy()
    ranges[:, 0] = place[ranges[:, 0]]
    inputs = {p: d for p, d in r.fingerprint.inputs.items() if p in wanted}
    files = tuple(r.files[i] for i in keep)
    options = fingerprint.in_order(r.fingerprint.options, r.job.source, [f.file.path for f in files])
    return replace(
        r,
        files=files,
        selection=Selection(ranges),
        fingerprint=replace(r.fingerprint, options=options, inputs=inputs),
    )


def grown(r: Resolved, paths: Sequence[str]) -> Resolved:
    """The job as if the files at `paths` had come before the others in its source: columns keep their order, and those
    that only some files have keep the places they had for the function then.
    """
    from gristmill.sources.schema import unify

    place = {path: number for number, path in enumerate(paths)}
    files = sorted(r.files, key=lambda f: place.get(f.file.path, len(place)))
    if not place:
        return r
    schema = unify(files, r.job.sink is not None and r.job.sink.evolve)
    reads = fingerprint.digest_of(list(r.columns or schema.names)) if r.fingerprint.reads else ""
    return replace(r, schema=schema, fingerprint=replace(r.fingerprint, reads=reads))


def before_others(r: Resolved, paths: Sequence[str]) -> Resolved:
    """The same job as it was when its source had only the files at `paths`, in this order: other files may change
    types, and add columns.
    """
    from gristmill.sources.hive import narrowed

    some = grown(restricted(r, paths), paths)
    others = set(r.schema.names).difference(some.schema.names)
    columns, keep = (
        None if names is None else tuple(c for c in names if c not in others) for names in (r.columns, r.keep)
    )
    some = replace(some, columns=columns, keep=keep)
    if not r.folders or not some.files:
        return some
    return some.of_folders(narrowed(some.files, some.schema, some.folders))

"""Which generation a run works on: a new one, an unfinished one, or none because there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gristmill import rereading
from gristmill.commit import generation as generations
from gristmill.commit import publication
from gristmill.commit import publish as publishing
from gristmill.commit import receipt as receipts
from gristmill.commit.generation import Generation, Verb
from gristmill.commit.publication import Publication
from gristmill.errors import CorruptStore, PlanChanged
from gristmill.models.loaded import changed
from gristmill.plan import fingerprint
from gristmill.plan.contracts import Files
from gristmill.plan.fingerprint import Fingerprint
from gristmill.plan.shard import Selection
from gristmill.planning import Resolved

RESTART = "--restart (restart=True) to score everything anew"
ACCEPT = "--accept (accept=True) to publish that run as it is"
RETRY = "retry-dead --accept-code-change (accept_code_change=True) to score"


@dataclass(frozen=True)
class Choice:
    """`generation` None: nothing to do. `resumed`: its plan stands already. `resolved` may be fewer files than the job
    has (append, and an unfinished plan that is finished as it was made). `base` is the publication that the generation
    adds to, `later` are the source's files that this run leaves out and the next one may append, `warning` is what the
    person who chose so may not know.
    """

    generation: Generation | None
    resumed: bool
    resolved: Resolved
    base: Publication | None = None
    later: tuple[str, ...] = ()
    warning: str = ""


def _quietly(text: str) -> None:
    pass


@dataclass(frozen=True)
class Held:
    """What a sink holds: its latest publication, all claims, and the claim that can still become the next publication,
    if there is one (`generation.pending`). `tell` is told which source files are read again.
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

    def claim(self, kind: Verb, r: Resolved) -> Generation:
        """Begin the next generation on top of what is published; one that is unfinished there is given up for good.
        `append` and `retry-dead` add to it, and have to fit its schema if it has rows. Raises BadSource where the files
        differ in columns that it would read.
        """
        if r.differing and kind != "retry-dead":  # whose rows had been read so
            raise r.differing
        latest = self.given_up()
        adds = latest if kind in ("append", "retry-dead") else None
        schema = adds.body["output_schema"] if adds is not None and adds.body["rows_ok"] else None
        return generations.claim(
            self.files,
            self.root,
            kind,
            base=None if adds is None else adds.generation,
            predecessor=0 if latest is None else latest.number,
            fingerprint=r.fingerprint.as_dict(),
            schema=schema,
            after=0 if latest is None else max(latest.generations),
        )

    def given_up(self) -> Publication | None:
        """The publication to build on, once nobody can go on with what is unfinished on top of the latest."""
        if self.latest is None or self.unfinished is None:
            return self.latest
        begun = self.unfinished
        self.tell(f"the unfinished {begun.kind} that is here (generation {begun.number}) is given up")
        return publishing.give_up(self.latest)

    def known(self, r: Resolved) -> Resolved:
        """The job as it can be compared with what is here: without what its own runs have written (see
        `fingerprint.without_written`), and with its secrets sealed as those here are.
        """
        now = fingerprint.sealed(r.fingerprint, (g.fingerprint["code"] for g in self.claims if not g.lost))
        return replace(r, fingerprint=fingerprint.without_written(now, generations.written(self.root, self.files)))

    def members(self, of: Publication | None = None) -> list[Generation]:
        """The generations whose rows the latest publication has. Raises CorruptStore for one whose claim is lost."""
        found = of or self.latest
        numbers = [] if found is None else found.generations
        known = {g.number: g for g in self.claims}
        for number in numbers:
            if number not in known or known[number].lost:
                raise CorruptStore(
                    f"{self.root}: the claim of generation {number} is lost: start anew with --restart (restart=True)"
                )
        return [known[number] for number in numbers]

    def inputs(self, members: Sequence[Generation], r: Resolved) -> dict[str, str]:
        """Input digests of several generations by path, to be compared with those of the job: a file that was touched
        since, and holds what was read of it, has the job's.
        """
        merged: dict[str, str] = {}
        for member in members:
            merged.update(generations.stored_inputs(member))
        return rereading.reconciled(r, members, merged, self.tell)

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
    """Compare what the sink holds with the job. Raises PlanChanged, with a readable difference. `tell` is told which
    files are read again to be compared.
    """
    held = Held.by(root, files, tell)
    r = held.known(r)
    begun = held.unfinished
    if restart:
        if begun is not None and begun.kind == "restart" and _whole(held, begun, r):
            return Choice(begun, begun.planned, r)
        return Choice(held.claim("restart" if held.claims else "new", r), False, r)
    if begun is not None and (begun.planned or begun.kind in ("append", "restart")):
        return _unfinished(held, begun, uri, r, append, accept)
    if held.latest is None:  # a claim without a plan has scored nothing
        return Choice(held.claim("new", r), False, r)
    return _finished(held, held.latest, uri, r, append)


def _whole(held: Held, begun: Generation, r: Resolved) -> bool:
    """Whether a restart can go on: planned for the same, with no committed file lost."""
    try:
        if not begun.planned:
            return not _meant(begun, r.fingerprint)
        if compared(begun, r.fingerprint, held.inputs([begun], r)):
            return False
    except CorruptStore:
        return False
    done = receipts.standing(begun.receipts, begun.files).values()
    works = {p.work.rpartition("/")[2] for d in done for p in d.parts}
    return works <= set(begun.files.names(begun.work))


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
        what = "an unfinished run is here, planned for something else"
    else:
        now = restricted(grown(r, list(before)), [p for p in r.fingerprint.inputs if p not in before])
        lines = [*_changed(before, r.fingerprint), *_meant(begun, now.fingerprint)]
        if not lines and base is not None and not now.files:
            return _finished(held, base, uri, r, append)
        if not lines and r.differing:  # by files that came since it was claimed
            raise r.differing
        if not lines:
            return Choice(begun, False, now, base)
        what = f"a run with --{begun.kind} has begun here, for something else"
    problem = f"{uri}: {what}:\n{fingerprint.listed(lines)}"
    return _otherwise(held, begun, uri, r, append, problem, accepts)


def as_it_is(begun: Generation, lines: Sequence[str]) -> bool:
    """Whether what a gate has held back can be accepted though the code is another, all that differs being `lines`: all
    of its rows are committed, so that to publish them runs none.
    """
    if not (lines and all(line.startswith("code:") for line in lines) and _refused(begun)):
        return False
    return len(receipts.standing(begun.receipts, begun.files)) == len(generations.read_plan(begun).shards)


def _published(held: Held, r: Resolved) -> bool:
    """Whether what is published is of this very job."""
    return held.latest is not None and not Difference.result(held, r).lines


def _by_other_code(lines: list[str]) -> str:
    return (
        "what is accepted was scored by the code as it was, and none of it by the code as it is now:\n"
        f"{fingerprint.listed(lines)}"
    )


def _refused(begun: Generation) -> bool:
    """Whether an unfinished generation is done, but for a gate that did not hold."""
    return (generations.read_progress(begun) or {}).get("phase") == "gate failed"


def _otherwise(
    held: Held, begun: Generation, uri: str, r: Resolved, append: bool, problem: str, accepts: bool
) -> Choice:
    """What a run does beside an unfinished one that is of something else. One that has committed nothing is nothing. An
    append gives it up and adds what is new to the result, if that is of this job. Where nothing is new, nothing is to
    do, and what is not an append is left to be finished by its own job, unless its files stand in the sink. Raises
    PlanChanged in all other cases.
    """
    if held.latest is None:
        if not receipts.listed(begun.receipts, begun.files):
            return Choice(held.claim("new", r), False, r)
    else:
        found = Difference.result(held, r)
        if not found.lines and begun.kind != "append":
            if publishing.linked(begun, held.latest):  # which only what can never be published may lose
                return Choice(None, True, r, held.given_up())
            held.tell(f"an unfinished {begun.kind} of something else is here (generation {begun.number}): it is left")
            return Choice(None, True, r, held.latest)
        if append and (found.grown or not found.lines):
            return _finished(held, held.latest, uri, r, append)
    raise PlanChanged(f"{problem}\n{_ways(held, begun, r, accepts)}")


@dataclass(frozen=True)
class Difference:
    """What differs between a published result, whose inputs are `stored`, and a job."""

    stored: Mapping[str, str]
    lines: list[str]
    r: Resolved

    @staticmethod
    def result(held: Held, r: Resolved) -> Difference:
        """With all of the source's files."""
        members = held.members()
        stored = held.inputs(members, r)
        return Difference(stored, compared(members[-1], r.fingerprint, stored, members[:-1]), r)

    def known(self, held: Held) -> Difference:
        """With those of the source's files alone that the result has rows of."""
        some = before_others(self.r, list(self.stored))
        *before, last = held.members()
        return Difference(self.stored, compared(last, some.fingerprint, self.stored, before), some)

    @property
    def code(self) -> bool:
        """Whether nothing but code differs."""
        return all(line.startswith("code:") for line in self.lines)

    @property
    def grown(self) -> bool:
        """Whether nothing differs but that the source has new files, which can be told."""
        if not self.lines or not all(line.startswith("input:") for line in self.lines) or self.some:
            return False
        return fingerprint.new_inputs_only(self.stored, self.r.fingerprint)

    @property
    def fresh(self) -> bool:
        """Whether the source has files that the result has no rows of, which can be told."""
        return not self.some and any(path not in self.stored for path in self.r.fingerprint.inputs)

    @property
    def some(self) -> bool:
        """Whether only some rows of the source are taken, so that which of them are new cannot be told."""
        return self.r.job.source.limit is not None or self.r.job.source.sample is not None


def _ways(held: Held, begun: Generation | None, r: Resolved, accepts: bool = False) -> str:
    """What can be done about a job that is not that of what is here, as a sentence. Every way is accepted as things
    stand; what comes after "then" once that is done.
    """
    kind = None if begun is None else begun.kind
    found = [] if begun is None else [_put_back(begun, accepts)]
    why = ""
    if held.latest is not None:
        result = Difference.result(held, r)
        known = result.known(held)
        # Tables in memory are one file, and another one for other rows.
        if kind is None and result.fresh and not result.grown and r.job.source.data is None:
            found.append("put it back, then --append (append=True) to score only the new files")
        if kind is None and result.grown:
            found.append("--append (append=True) to score only the new files")
        if kind is not None and (result.grown or not result.lines):
            found.append("--append (append=True) to give it up and score only what is new")
        if known.code and held.latest.body["rows_dead"]:
            again = "to begin it anew" if kind == "retry-dead" else "to score the dead rows again"
            found.append(f"{RETRY} only the dead rows with the new code" if known.lines else f"retry-dead {again}")
        if kind == "append" and known.lines and known.code:
            why = "what is published was scored by the code as it was, and one result is not to be of two: "
    first, *rest = [*found, RESTART]
    return why + ", or ".join([first if first.startswith("put ") else f"use {first}", *rest])


def _put_back(begun: Generation, accepts: bool) -> str:
    """The way back to an unfinished run: on with it, or, where a gate did not hold for its dead rows, to accept it."""
    if accepts:
        return f"{ACCEPT}, then {RETRY} its dead rows with the new code"
    if not (_refused(begun) and (generations.read_progress(begun) or {}).get("rows_dead")):
        return "put it back to go on with that run"
    return f"put it back, then {ACCEPT}"


def _finished(held: Held, latest: Publication, uri: str, r: Resolved, append: bool) -> Choice:
    found = Difference.result(held, r)
    if not found.lines:
        return Choice(None, True, r, held.given_up())
    if append and found.grown:
        fewer = restricted(grown(r, list(found.stored)), [p for p in r.fingerprint.inputs if p not in found.stored])
        return Choice(held.claim("append", fewer), False, fewer, latest)
    problem = f"{uri}: holds a result of something else:\n{fingerprint.listed(found.lines)}"
    if append and found.some:
        problem += "\nof a source with limit or sample it cannot be told which rows are new, and nothing is appended"
    if append and r.job.source.data is not None and any(line.startswith("input:") for line in found.lines):
        problem += (
            "\nrows in memory cannot be appended, as new ones cannot be told from changed ones: write them as a file "
            "of their own (to_parquet) into a folder, and give that folder as the source"
        )
    raise PlanChanged(f"{problem}\n{_ways(held, None, r)}")


def compared(
    planned: Generation, now: Fingerprint, inputs: Mapping[str, str], before: Sequence[Generation] = ()
) -> list[str]:
    """What differs between the plan of a generation and a job, where `inputs` are those that the result stands for, and
    `before` the generations that it adds to.
    """
    old: dict[str, Any] = generations.read_plan(planned).about["fingerprint"]
    lines = fingerprint.differences(old, now, inputs)
    return lines + [
        f"code: {entry}, which the code loaded as it ran, has changed" for entry in changed(noted(planned, before))
    ]


def noted(last: Generation, before: Sequence[Generation]) -> dict[str, frozenset[str]]:
    """What code loaded as it ran, by the notes of a generation and of those that it adds to, unless other code made
    these. Where two of them loaded it otherwise, which was accepted then (retry-dead --accept-code-change), the later
    one counts.
    """
    found: dict[str, frozenset[str]] = {}
    for member in [*before, last]:
        if member is last or _code_of(member) == _code_of(last):
            notes = generations.loaded(member.folder, member.files)
            found.update({entry: frozenset(digests) for entry, digests in notes.items()})
    return found


def _code_of(member: Generation) -> dict[str, str]:
    return {} if member.lost else fingerprint.compared(member.fingerprint["code"])


def _meant(claimed: Generation, now: Fingerprint) -> list[str]:
    """What differs between a claim, which holds its inputs as one digest, and a job. New files are what an append is
    for. Files that were only written again since are no difference: nothing of them had been scored.
    """
    then = claimed.fingerprint
    lines = fingerprint.differences(then, now, now.inputs)
    if claimed.kind != "append" and then["inputs"] != fingerprint.without_stamps(now.inputs):
        lines.append("input: the source's files are not those of then")
    return lines


def _changed(inputs: Mapping[str, str], now: Fingerprint) -> list[str]:
    """What differs in the inputs that a base was made from; new ones are none of its matter."""
    ours = {p: d for p, d in now.inputs.items() if p in inputs}
    return fingerprint.differences(now.as_dict(), replace(now, inputs=ours), inputs)


def restricted(r: Resolved, paths: Collection[str]) -> Resolved:
    """The same job over some of its files alone."""
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
    """The job over a source that had the files at `paths` before the others: columns keep the order, and those that
    only some files have the places, which they had for the function then.
    """
    from gristmill.io.schema import unify

    place = {path: number for number, path in enumerate(paths)}
    files = sorted(r.files, key=lambda f: place.get(f.file.path, len(place)))
    if not place:
        return r
    schema = unify(files, r.job.sink is not None and r.job.sink.evolve)
    reads = fingerprint.digest_of(list(r.columns or schema.names)) if r.fingerprint.reads else ""
    return replace(r, schema=schema, fingerprint=replace(r.fingerprint, reads=reads))


def before_others(r: Resolved, paths: Sequence[str]) -> Resolved:
    """The same job as it was when its source had some of its files alone, in this order: others may make other types,
    and have more columns.
    """
    from gristmill.io.hive import narrowed

    some = grown(restricted(r, paths), paths)
    others = set(r.schema.names).difference(some.schema.names)
    columns, keep = (
        None if names is None else tuple(c for c in names if c not in others) for names in (r.columns, r.keep)
    )
    some = replace(some, columns=columns, keep=keep)
    if not r.folders or not some.files:
        return some
    return some.of_folders(narrowed(some.files, some.schema, some.folders))

"""The first stage: read a shard, run its steps, gather windows, prepare them for the model. CPU only."""

from __future__ import annotations

import base64
import contextlib
import itertools
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, together
from gristmill.arrow.rows import picked
from gristmill.arrow.topython import to_rows
from gristmill.commit import fates
from gristmill.commit.fates import Fates
from gristmill.errors import BadOutput
from gristmill.models.contract import Model, Prepared, Refusal
from gristmill.shards.counts import Counts
from gristmill.shards.shard import Piece
from gristmill.sources import where
from gristmill.sources.contract import BadRow, Block, Reading
from gristmill.sources.rowdigests import Content
from gristmill.values import dataclass
from gristmill.worker.bisection import DeadRow, Stage
from gristmill.worker.clock import Clock
from gristmill.worker.identity import Copies, Copy, Identity
from gristmill.worker.kept import KeptAnswers, KeptRows, counted
from gristmill.worker.matching import Following
from gristmill.worker.pieces import blocks, reading
from gristmill.worker.recipe import Recipe, Task
from gristmill.worker.retried import Lost, Retried, Seeking, refused
from gristmill.worker.steps import LoadedStep
from gristmill.worker.suspects import Suspects, death_of
from gristmill.worker.windows import WindowSize, gather

FIRST_WINDOW = 512  # rows of a worker's first shard: the model starts on these while the next window is read
KEPT_ROWS = (
    8  # rows with kept answers that count as one: a window is a model's, and has few others where little changed
)
_STREAM = re.compile(r"<_io\.\w+ object at 0x[0-9a-fA-F]+>")
_ADDRESS = re.compile(r"(<[^<>]{1,200} object) at 0x[0-9a-fA-F]+>")
SMALL_BLOCK = 1024  # rows: blocks of many small files are joined up to this many before steps see them


@dataclass(frozen=True)
class Letter:
    """A dead letter as it will be written: who the row is, what it held, what went wrong, and where.

    `copy` is the text of a row's copy, `copies` how many were made with it and `digest` (8 hex digits) its content when
    it was made; None for rows of the source.
    """

    source: str
    position: int
    copy: str | None
    copies: int | None
    digest: str | None
    stage: Stage
    step: str
    error: str
    message: str
    traceback: str
    payload: Mapping[str, Any] | None


@dataclass(frozen=True)
class Chunk:
    """Rows after the steps, with identities, counts of the source rows behind them, and the dead ones. Of a job with
    `update` also which source rows they are of, the `fates` of all source rows so far, and the rows of those whose
    answers are `kept` (`sources_kept` source rows).
    """

    rows: pa.Table
    identity: Identity
    counts: Counts
    letters: tuple[Letter, ...] = ()
    origin: np.ndarray | None = None
    fates: Fates | None = None
    kept: KeptRows | None = None
    sources_kept: int = 0

    @property
    def rows_held(self) -> int:
        """Size for windows: rows and dead ones, at least 1, so that a window of only dead letters closes, too."""
        kept = 0 if self.kept is None else len(self.kept.origin) // KEPT_ROWS
        return max(1, int(self.rows.num_rows) + len(self.letters) + kept)

    @property
    def bytes_held(self) -> int:
        """Size for windows: bytes of the columns."""
        kept = 0 if self.kept is None else int(self.kept.source.nbytes) + self.kept.entries.nbytes
        return int(self.rows.nbytes) + kept


@dataclass(frozen=True)
class Window:
    """Rows of one shard prepared for the model, in source order. Also what travels between machines when stages are
    separate. `seconds` were spent on reading, steps and tokenising; `read` are the digests of the pieces that have been
    read to the end, in order: together, a shard's windows have one for each. `made` are the columns that dicts of steps
    have added to probed rows so far, by step. `origin`, `fates` and `kept` are as in Chunk.
    """

    rows: pa.Table
    identity: Identity
    prepared: Prepared
    counts: Counts
    letters: tuple[Letter, ...]
    seconds: float = 0.0
    read: tuple[str, ...] = ()
    made: Mapping[str, Sequence[pa.Field]] = field(default_factory=dict)
    origin: np.ndarray | None = None
    fates: Fates | None = None
    kept: KeptRows | None = None
    sources_kept: int = 0


@dataclass
class _Flow:
    """Rows on their way through the steps; `origin` is each one's row among the block's source rows, whose identities
    are `who`. In a retry, `seeking` says which dead rows are to be made from each row; rows with some to be made do not
    count themselves. `state` and `lost` are what became of the block's source rows (fates.py), and how many rows made
    of each a step has dropped.
    """

    rows: pa.Table
    who: Identity
    paths: list[str]
    origin: np.ndarray
    copies: Copies | None = None
    seeking: Seeking | None = None
    expanded: int = 0
    filtered: int = 0
    dead: int = 0
    derived_filtered: int = 0
    derived_dead: int = 0
    letters: list[Letter] = field(default_factory=list)
    state: np.ndarray | None = None
    lost: np.ndarray | None = None

    def became(self, state: int, rows: np.ndarray) -> None:
        """Note what became of the source rows of these rows."""
        if self.state is not None:
            self.state[self.origin[rows]] = state

    def counted(self) -> tuple[np.ndarray, np.ndarray]:
        """Which rows count as rows of the source, and which as rows made from them."""
        counts = np.ones(len(self.origin), dtype=bool) if self.seeking is None else ~self.seeking.ways
        made = np.zeros(len(self.origin), dtype=bool) if self.copies is None else self.copies.made
        return counts & ~made, counts & made

    def at_hand(self) -> Identity:
        """The identities of the rows."""
        return replace(self.who.take(self.origin), copies=self.copies)

    def place(self, row: int) -> tuple[str, int]:
        """Path and position of a row's source row."""
        at = int(self.origin[row])
        return self.paths[int(self.who.piece[at])], int(self.who.position[at])


class Prepare:
    """Reads shards and turns them into windows. Keeps readers and built step classes between shards."""

    def __init__(self, recipe: Recipe, model: Model, clock: Clock | None = None) -> None:
        """`clock`: that of the thread that reads."""
        self._clock = clock or Clock()
        self._recipe = recipe
        self._model = model
        self._steps = [LoadedStep(s, f"step {n}") for n, s in enumerate(recipe.steps)]
        self._open = contextlib.ExitStack()
        self._readings: dict[str, Reading] = {}  # for files that are read with a schema of their own, by path
        self._kept: tuple[str, KeptAnswers] | None = None  # of the plan that was last worked on
        self._opening = threading.Lock()
        self._begun = False  # whether a shard has been, so that the model has work while the next one is read
        # If preparing takes more than reading, the model need not wait for a full window.
        self._slow = bool(recipe.steps) or recipe.batch.by_tokens
        if recipe.reader.where is not None or any(s.expression for s in recipe.steps):
            where.load()  # not in the first call, which a limit of time is set to

    def close(self) -> None:
        """End what conditions hold open."""
        self._open.close()
        for step in self._steps:
            step.close()

    def windows(self, task: Task, suspects: Suspects | None = None) -> Iterator[Window]:
        """The shard's rows as windows; at least one, even for a shard without rows. With `suspects`, rows are noted
        before steps and model.prepare get them, and those that killed workers are processed separately.
        """
        for step in self._steps:
            step.begin(task)
        read: list[str] = []
        empty, begun = True, time.perf_counter()
        for window in self._windows(task, suspects, read):
            empty = False
            made = {step.name: list(step.made.values()) for step in self._steps if step.made}
            yield replace(window, seconds=time.perf_counter() - begun, read=tuple(read), made=made)
            read.clear()
            begun = time.perf_counter()
        if empty or read:  # the last window may have closed exactly at the end of the last piece
            rows = pa.Table.from_batches([], self._recipe.reader.schema)
            yield Window(rows, Identity.none(), Prepared(0, None), Counts(), (), read=tuple(read))

    def _windows(self, task: Task, suspects: Suspects | None, read: list[str]) -> Iterator[Window]:
        most = self._recipe.batch.window
        first = FIRST_WINDOW if self._slow and not self._begun else most
        self._begun = self._begun or task.kind == "score"
        size = WindowSize(most, self._recipe.running.window_bytes, first)
        following = None
        if self._recipe.matching is not None and task.kind == "score":
            following = Following(self._recipe.matching)
        # Rows read with different schemas never share a call of a step or the model.
        for _, same in itertools.groupby(self._read(task, read), lambda block: block.block.rows.schema):
            for chunks in gather(self._chunks(task, same, suspects, following, min(first, most)), size):
                whole = self._gathered(chunks)
                if suspects is None:
                    yield self._prepared(whole)
                else:
                    yield from self._noted(whole, suspects)

    def _gathered(self, chunks: list[Chunk]) -> Chunk:
        some = [c.rows for c in chunks if c.rows.num_rows]  # no step has added columns to others
        try:
            rows = together(some or [chunks[0].rows]).combine_chunks()
        except Lossy as e:
            raise BadOutput(f"the steps returned different types for different rows: {e}") from e
        counts = sum((c.counts for c in chunks), Counts())
        letters = tuple(x for c in chunks for x in c.letters)
        whole = Chunk(rows, Identity.joined([c.identity for c in chunks]), counts, letters)
        origins = [c.origin for c in chunks if c.origin is not None]
        if not origins:
            return whole
        known = Fates.joined([c.fates for c in chunks if c.fates is not None])
        kept = KeptRows.joined([c.kept for c in chunks if c.kept is not None])
        sources = sum(c.sources_kept for c in chunks)
        return replace(whole, origin=np.concatenate(origins), fates=known, kept=kept, sources_kept=sources)

    def _prepared(self, c: Chunk) -> Window:
        """A window for the model, which is not asked about no rows: those may lack the columns that it reads."""
        self._clock.lap("gather")
        prepared = self._model.prepare(c.rows) if c.rows.num_rows else Prepared(0, None)
        self._clock.lap("convert")
        return _window(c, prepared)

    def _noted(self, whole: Chunk, suspects: Suspects) -> Iterator[Window]:
        """A window in runs of neighbours, each suspect of the tokeniser separate; noted, then prepared."""
        for first, last, killed in suspects.runs("prepare", whole.identity):
            part = _part(whole, first, last - first)
            if killed:
                error, message = death_of(killed)
                prepared = Prepared(
                    1, None, None, (Refusal(0, "invalid", error, f"{message}, while the row was being prepared"),)
                )
                yield _window(part, prepared)
            else:
                yield self._prepared(part)

    # ------------------------------------------------ reading

    def _chunks(
        self, task: Task, read: Iterator[_Read], suspects: Suspects | None, following: Following | None, most: int
    ) -> Iterator[Chunk]:
        """The rows after the steps, the first `most` apart, then four times as many, as windows are gathered."""
        groups: Iterator[list[_Read]] = gather(read, WindowSize(SMALL_BLOCK, 1 << 20, SMALL_BLOCK))
        for group in groups:
            self._clock.lap("gather")
            chunk = self._stepped(task, group, suspects, following)
            self._clock.lap("steps")
            start, rows = 0, chunk.rows.num_rows
            while start < max(1, rows):
                yield chunk if not start and rows <= most else _part(chunk, start, most)
                start, most = start + most, min(most * 4, self._recipe.batch.window)

    def _reading(self, path: str) -> Reading:
        path = path if path in self._recipe.reader.own else ""
        if path not in self._readings:
            self._readings[path] = self._open.enter_context(reading(self._recipe.reader, path))
        return self._readings[path]

    def _read(self, task: Task, read: list[str]) -> Iterator[_Read]:
        """The pieces' blocks; the digest of each piece is appended to `read` once all of it has been read."""
        reader = self._recipe.reader
        left = task.rows
        retried = None if task.only is None or left is not None else Retried(task.only, task.shard.pieces)
        for number, piece in enumerate(task.shard.pieces):
            content, some = Content(), _Some(*task.some[number]) if task.some else None
            for block in blocks(reader, self._reading(piece.file.path), piece):
                self._clock.lap("read")
                content.add(block)
                self._clock.lap("digest")
                if some is not None:
                    block = some.of(block)
                if left is not None:
                    block = _head(block, left)
                    left -= block.rows.num_rows
                if retried is not None:
                    retried.read(number, block)
                yield _Read(number, piece, block)
                if left is not None and left <= 0:
                    return
                if some is not None and some.left <= 0:
                    break  # what follows need not be read
            if some is not None:
                continue
            _refuse_changed(reader.fs, piece)
            read.append(content.hexdigest())
        if retried is not None:
            retried.check()

    # ------------------------------------------------ steps

    def _stepped(self, task: Task, group: list[_Read], suspects: Suspects | None, following: Following | None) -> Chunk:
        rows = pa.concat_tables([r.block.rows for r in group]) if len(group) > 1 else group[0].block.rows
        piece = np.repeat(np.array([r.number for r in group], dtype=np.int32), [r.block.rows.num_rows for r in group])
        who = Identity(piece, np.concatenate([r.block.position for r in group]))
        known = None if following is None else self._known(task, rows, who, following)
        if known is not None:
            rows, who = known.left(rows), known.left_of(who)
        flow = _Flow(rows, who, task.paths, np.arange(rows.num_rows, dtype=np.int64))
        if task.only is not None:
            flow.seeking = Retried(task.only, task.shard.pieces).seeking(who)
        if known is not None:
            known.follow(flow)
        flow.letters += [self._unreadable(r.piece, bad) for r in group for bad in r.block.bad]
        flow.filtered = sum(r.block.filtered for r in group)
        flow.dead = len(flow.letters)
        rows_in = int(flow.counted()[0].sum()) + flow.filtered + flow.dead
        try:
            for number, step in enumerate(self._steps):
                if flow.rows.num_rows:
                    self._advance(flow, number, step, suspects)
            flow.expanded += int(flow.counted()[0].sum())
            if flow.seeking is not None:
                flow.seeking.ended()
        except Lost as lost:
            raise refused(lost, *flow.place(lost.row)) from None
        derived = flow.rows.num_rows + flow.derived_filtered + flow.derived_dead
        counts = Counts(
            rows_in, flow.expanded, flow.filtered, flow.dead, derived, flow.derived_filtered, flow.derived_dead, 0
        )
        chunk = Chunk(flow.rows, flow.at_hand(), counts, tuple(flow.letters))
        return chunk if known is None else known.told(chunk, flow)

    def _known(self, task: Task, rows: pa.Table, who: Identity, following: Following) -> _Known:
        """What a job with `update` knows of source rows before any step gets them."""
        numbers, digests = following.begin(rows, who, task.paths)
        none = _Known(numbers, digests, np.arange(rows.num_rows))
        answers = self.answers(task)
        found = None if answers is None else answers.find(task, rows, who, numbers, digests.digest)
        if found is None:
            return none
        mask, kept = found
        state, made, written = digests.state.copy(), digests.made.copy(), digests.rows.copy()
        for into, name in ((state, "state"), (made, "made"), (written, "rows")):
            into[mask] = kept.entries[name]
        known = replace(digests, state=state, made=made, rows=written)
        return _Known(numbers, known, np.flatnonzero(~mask), kept, counted(kept.entries))

    def answers(self, task: Task) -> KeptAnswers | None:
        """The answers that an update may keep. The thread that commits asks, too."""
        if task.kept is None or self._recipe.matching is None:
            return None
        with self._opening:
            if self._kept is None or self._kept[0] != task.kept.folder:
                self._kept = task.kept.folder, KeptAnswers(task.kept, self._recipe, self._recipe.matching)
            return self._kept[1]

    def _advance(self, flow: _Flow, number: int, step: LoadedStep, suspects: Suspects | None) -> None:
        if suspects is None:
            found = step.apply(flow.rows)
        else:
            found = suspects.apart(f"step {number}", step, flow.at_hand(), flow.rows, step.apply)
        self._bury(flow, found.dead)
        source, derived = flow.counted()
        many = step.step.kind == "flat_map"
        pieces = np.bincount(found.origin, minlength=len(source))
        gone = pieces == 0
        died = np.array([d.row for d in found.dead], dtype=np.int64)
        gone[died] = source[died] = False
        flow.became(fates.DEAD, died)
        if flow.seeking is not None:
            flow.seeking.gone(gone & flow.seeking.ways, step.step.name)
        flow.derived_filtered += int((gone & derived).sum())
        if flow.lost is not None:
            np.add.at(flow.lost, flow.origin[gone & derived], 1)
        if many:
            flow.expanded += int(source.sum())
        else:
            flow.filtered += int((gone & source).sum())
            flow.became(fates.FILTERED, np.flatnonzero(gone & source))
            flow.expanded += int((source & (pieces > 1)).sum())
        rows, origin, copies, seeking = found.rows, found.origin, flow.copies, flow.seeking
        if found.digests is not None:
            copies = Copies.expanded(copies, origin, found.digests, len(source), number, always=many)
            if seeking is not None:
                seeking, kept = seeking.made(origin, copies, step.step.name)
                rows, origin, copies = picked(rows, kept), origin[kept], copies.take(kept)
        else:
            copies = None if copies is None else copies.take(origin)
            seeking = None if seeking is None else seeking.after(origin)
        flow.rows, flow.origin, flow.copies, flow.seeking = rows, flow.origin[origin], copies, seeking

    # ------------------------------------------------ dead letters

    def _bury(self, flow: _Flow, dead: Sequence[DeadRow]) -> None:
        """Count rows that died in a step and make their letters. For a row from which dead rows were to be made, these
        stay dead.
        """
        for row in dead:
            copy = None if flow.copies is None else flow.copies.at(row.row)
            ways: list[Copy | None] = [] if flow.seeking is None else [*flow.seeking.of(row.row)]
            for who in ways or [copy]:
                stage = Stage.BEFORE if who is None else Stage.DERIVED
                flow.letters.append(self.letter(replace(row, stage=stage), flow.rows, *flow.place(row.row), who))
                flow.dead += who is None
                flow.derived_dead += who is not None

    def letter(self, dead: DeadRow, rows: pa.Table, source: str, position: int, copy: Copy | None) -> Letter:
        """A dead row of `rows` as a letter, its payload cut to what the sink keeps."""
        most = self._recipe.sink.dead_payload
        payload = _payload(to_rows(rows.slice(dead.row, 1))[0], most) if most else None
        text, of, digest = (None, None, None) if copy is None else (copy.text, copy.of, f"{copy.digest:08x}")
        message, trace = self._placed(dead.message, source), self._placed(dead.traceback, source)
        return Letter(source, position, text, of, digest, dead.stage, dead.step, dead.error, message, trace, payload)

    def _placed(self, text: str, source: str) -> str:
        """A text with the file in place of a stream of its bytes, if each file is a row, and without where in memory an
        object was: both tell nobody anything, and make two of all errors that are one.
        """
        if " object at 0x" not in text:
            return text
        from gristmill.sources.formats import SOURCES

        if getattr(SOURCES.get(self._recipe.reader.format.name), "whole", False):
            text = _STREAM.sub(lambda _: repr(source), text)
        return _ADDRESS.sub(r"\1>", text)

    def _unreadable(self, piece: Piece, bad: BadRow) -> Letter:
        most = self._recipe.sink.dead_payload
        payload = {"base64": base64.b64encode(bad.payload[:most]).decode()} if most and bad.payload else None
        message = f"{piece.file.path} at {bad.position}: {bad.message}"
        return Letter(
            piece.file.path, bad.position, None, None, None, Stage.READ, "", bad.error, message, "", payload
        )  # fmt: skip


@dataclass(frozen=True)
class _Known:
    """Source rows of a job with `update`: their numbers in the shard, their fates so far, which of them are `open`, and
    the rows and counts of the others, whose answers are kept.
    """

    numbers: np.ndarray
    fates: Fates
    open: np.ndarray
    kept: KeptRows | None = None
    counts: Counts = field(default_factory=Counts)

    def left(self, rows: pa.Table) -> pa.Table:
        """The rows that are open."""
        return rows if len(self.open) == rows.num_rows else picked(rows, self.open)

    def left_of(self, who: Identity) -> Identity:
        """Their identities."""
        return who if len(self.open) == len(who.piece) else who.take(self.open)

    def follow(self, flow: _Flow) -> None:
        """Have the flow note what becomes of them. Rows that a retry makes only some of are never known whole."""
        flow.state, flow.lost = self.fates.state[self.open], self.fates.made[self.open]
        if flow.seeking is not None:
            flow.state[flow.seeking.ways] = fates.DEAD

    def told(self, chunk: Chunk, flow: _Flow) -> Chunk:
        """The chunk with all that is known."""
        assert flow.state is not None and flow.lost is not None
        state, made = self.fates.state.copy(), self.fates.made.copy()
        state[self.open], made[self.open] = flow.state, flow.lost
        known = replace(self.fates, state=state, made=made)
        origin = self.numbers[self.open][flow.origin]
        counts, taken = chunk.counts + self.counts, len(self.numbers) - len(self.open)
        return replace(chunk, counts=counts, origin=origin, fates=known, kept=self.kept, sources_kept=taken)


def _window(c: Chunk, prepared: Prepared) -> Window:
    more = {name: getattr(c, name) for name in ("origin", "fates", "kept", "sources_kept")}
    return Window(c.rows, c.identity, prepared, c.counts, c.letters, **more)


@dataclass(frozen=True)
class _Read:
    number: int
    piece: Piece
    block: Block

    @property
    def rows_held(self) -> int:
        return max(1, int(self.block.rows.num_rows) + len(self.block.bad))

    @property
    def bytes_held(self) -> int:
        return int(self.block.rows.nbytes)


class _Some:
    """Takes a number of rows evenly out of about `of`, in blocks."""

    def __init__(self, rows: int, of: int) -> None:
        self.left = rows
        self._rows, self._of = rows, max(rows, of)
        self._seen = 0

    def of(self, block: Block) -> Block:
        """The rows of a block that are taken."""
        number = np.arange(self._seen, self._seen + block.rows.num_rows)
        self._seen += len(number)
        wanted = np.flatnonzero(-(-(number + 1) * self._rows // self._of) > -(-number * self._rows // self._of))
        wanted = wanted[: self.left]
        self.left -= len(wanted)
        return Block(picked(block.rows, wanted), block.position[wanted], block.filtered, block.bad)


def _head(block: Block, rows: int) -> Block:
    if block.rows.num_rows <= rows:
        return block
    return Block(block.rows.slice(0, rows), block.position[:rows], block.filtered, block.bad)


def _part(chunk: Chunk, start: int, rows: int) -> Chunk:
    """A slice of a chunk; counts, fates and letters go with the first, kept rows with those that they are among."""
    index = np.arange(start, min(start + rows, chunk.rows.num_rows))
    identity, origin, kept = chunk.identity.take(index), chunk.origin, chunk.kept
    if origin is not None:
        edges = [int(origin[at]) if 0 < at < len(origin) else end for at, end in ((start, 0), (start + rows, _LAST))]
        origin, kept = origin[index], None if kept is None else kept.between(*edges)
    first = Chunk(chunk.rows.slice(start, rows), identity, chunk.counts, chunk.letters, origin, chunk.fates, kept)
    if start == 0:
        return replace(first, sources_kept=chunk.sources_kept)
    return replace(first, counts=Counts(), letters=(), fates=None if origin is None else Fates.none())


_LAST = np.iinfo(np.int64).max


def _payload(row: Mapping[str, Any], most: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, (bytes, bytearray)):
            out[name] = {"base64": base64.b64encode(value[:most]).decode()}
        elif isinstance(value, str):
            out[name] = value[:most]
        elif value is None or isinstance(value, (bool, int, float)):
            out[name] = value
        else:
            out[name] = str(value)[:most] if not isinstance(value, (list, dict)) else _plain(value, most)
    return out


def _plain(value: Any, most: int) -> Any:
    import json

    text = json.dumps(value, default=str)
    return value if len(text) <= most and _is_json(value) else text[:most]


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_json(v) for k, v in value.items())
    if isinstance(value, list):
        return all(_is_json(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _refuse_changed(fs: Any, piece: Piece) -> None:
    from gristmill.errors import SourceChanged
    from gristmill.sources.paths import changed

    difference = changed(fs, piece.file)
    if difference is not None:
        raise SourceChanged(f"{piece.file.path}: changed while the run was reading it ({difference})")

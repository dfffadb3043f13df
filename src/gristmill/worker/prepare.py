"""The first stage: read a shard, run its steps, gather windows, make them ready for the model. CPU only."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gristmill.batching.windows import WindowSize, gather
from gristmill.errors import BadOutput, RunFailed
from gristmill.io.content import Content
from gristmill.io.lossless import Lossy, together
from gristmill.plan.contracts import BadRow, Block, Model, Prepared, Refusal
from gristmill.plan.counts import Counts
from gristmill.plan.shard import Piece
from gristmill.worker.failures import DeadRow
from gristmill.worker.reading import blocks, reading
from gristmill.worker.recipe import Recipe, Task
from gristmill.worker.steps import LoadedStep

if TYPE_CHECKING:
    from gristmill.worker.suspects import Applied, Suspects

FIRST_WINDOW = 512  # rows: the model starts on these while the next window is being read
SMALL_BLOCK = 1024  # rows: blocks of many small files are joined up to this many before steps see them


@dataclass(frozen=True)
class Identity:
    """Who a row is: number of its piece in the shard, position in that file, copy made by steps. Arrays of one
    length.
    """

    piece: np.ndarray
    position: np.ndarray
    copy: np.ndarray

    def take(self, index: np.ndarray) -> Identity:
        """The identities at `index`."""
        return Identity(self.piece[index], self.position[index], self.copy[index])

    def places(self) -> list[tuple[int, int, int]]:
        """Each row's piece, position and copy: for looking up single rows, never on the way of all of them."""
        return list(zip(self.piece.tolist(), self.position.tolist(), self.copy.tolist(), strict=True))

    @staticmethod
    def joined(parts: Sequence[Identity]) -> Identity:
        """One after the other."""
        return Identity(*(np.concatenate([getattr(p, n) for p in parts]) for n in ("piece", "position", "copy")))


@dataclass(frozen=True)
class Letter:
    """A dead letter as it will be written: who the row is, what it held, what went wrong, and at which stage."""

    source: str
    position: int
    copy: int
    stage: str
    error: str
    message: str
    traceback: str
    payload: Mapping[str, Any] | None


@dataclass(frozen=True)
class Chunk:
    """Rows after the steps, with identities, the fate of the source rows behind them, and the dead ones."""

    rows: pa.Table
    identity: Identity
    counts: Counts
    letters: tuple[Letter, ...] = ()

    @property
    def rows_held(self) -> int:
        """For windows: rows, never 0, so that a window of nothing but dead letters closes too."""
        return max(1, int(self.rows.num_rows))

    @property
    def bytes_held(self) -> int:
        """For windows: bytes of the columns."""
        return int(self.rows.nbytes)


@dataclass(frozen=True)
class Window:
    """Rows of one shard ready for the model, in source order. Also what travels between machines when stages are
    apart. `seconds` were spent on reading, steps and tokenising; `read` are the digests of pieces whose reading has
    come to its end, in order: together the windows of a shard have one for each.
    """

    rows: pa.Table
    identity: Identity
    prepared: Prepared
    counts: Counts
    letters: tuple[Letter, ...]
    seconds: float = 0.0
    read: tuple[str, ...] = ()


@dataclass
class _Flow:
    """Rows on their way through the steps; `origin` numbers the block's source rows."""

    rows: pa.Table
    origin: np.ndarray
    expanded: int | None = None  # source rows that went on, once a step has made one row many
    filtered: int = 0
    dead: int = 0
    derived_filtered: int = 0
    derived_dead: int = 0
    letters: list[Letter] = field(default_factory=list)


class Prepare:
    """Reads shards and turns them into windows. Keeps readers and built step classes between shards."""

    def __init__(self, recipe: Recipe, model: Model) -> None:
        self._recipe = recipe
        self._model = model
        self._steps = [LoadedStep(s) for s in recipe.steps]
        self._reading = reading(recipe.reader)
        # Where there is more to do than to read, the model need not wait for all of a window.
        self._slow = bool(recipe.steps) or recipe.batch.by_tokens

    def windows(self, task: Task, suspects: Suspects | None = None) -> Iterator[Window]:
        """The shard's rows as windows; at least one, also for a shard without rows. With `suspects`, rows are noted
        before steps and model.prepare get them, and those that killed workers are taken apart.
        """
        read: list[str] = []
        empty, begun = True, time.perf_counter()
        for window in self._windows(task, suspects, read):
            empty = False
            yield replace(window, seconds=time.perf_counter() - begun, read=tuple(read))
            read.clear()
            begun = time.perf_counter()
        if empty or read:  # the last window may have been full just when the last piece ended
            none = np.empty(0, dtype=np.int64)
            rows = self._recipe.reader.schema.empty_table()
            yield Window(rows, Identity(none, none, none), Prepared(0, None), Counts(), (), read=tuple(read))

    def _windows(self, task: Task, suspects: Suspects | None, read: list[str]) -> Iterator[Window]:
        most = self._recipe.batch.window
        size = WindowSize(most, self._recipe.running.window_bytes, FIRST_WINDOW if self._slow else most)
        for chunks in gather(self._chunks(task, suspects, read), size):
            whole = self._gathered(chunks)
            if suspects is None:
                yield self._prepared(whole)
            else:
                yield from self._noted(whole, suspects)

    def _gathered(self, chunks: list[Chunk]) -> Chunk:
        try:
            rows = together([c.rows for c in chunks]).combine_chunks()
        except Lossy as e:
            raise BadOutput(f"the steps returned other types from rows to rows: {e}") from e
        counts = sum((c.counts for c in chunks), Counts())
        letters = tuple(x for c in chunks for x in c.letters)
        return Chunk(rows, Identity.joined([c.identity for c in chunks]), counts, letters)

    def _prepared(self, c: Chunk) -> Window:
        return Window(c.rows, c.identity, self._model.prepare(c.rows), c.counts, c.letters)

    def _noted(self, whole: Chunk, suspects: Suspects) -> Iterator[Window]:
        """A window in runs of neighbours, suspects of the tokeniser each apart; noted, then made ready."""
        for first, last, killed in suspects.runs("prepare", whole.identity):
            part = _part(whole, first, last - first)
            if killed:
                text = f"killed its worker {killed} times, alone, while made ready"
                prepared = Prepared(1, None, None, (Refusal(0, "invalid", "WorkerDied", text),))
                yield Window(part.rows, part.identity, prepared, part.counts, part.letters)
            else:
                yield self._prepared(part)

    # ------------------------------------------------ reading

    def _chunks(self, task: Task, suspects: Suspects | None, read: list[str]) -> Iterator[Chunk]:
        groups: Iterator[list[_Read]] = gather(self._read(task, read), WindowSize(SMALL_BLOCK, 1 << 20, SMALL_BLOCK))
        for group in groups:
            chunk = self._stepped(task, group, suspects)
            most = self._recipe.batch.window
            for start in range(0, max(1, chunk.rows.num_rows), most):
                yield chunk if chunk.rows.num_rows <= most else _part(chunk, start, most)

    def _read(self, task: Task, read: list[str]) -> Iterator[_Read]:
        """The pieces' blocks; to `read` comes the digest of each piece, once all of it has been read."""
        reader = self._recipe.reader
        left = task.rows
        for number, piece in enumerate(task.shard.pieces):
            content = Content()
            for block in blocks(reader, self._reading, piece):
                content.add(block)
                if left is not None:
                    block = _head(block, left)
                    left -= block.rows.num_rows
                yield _Read(number, piece, block)
                if left is not None and left <= 0:
                    return
            _refuse_changed(reader.fs, piece)
            read.append(content.hexdigest())

    # ------------------------------------------------ steps

    def _stepped(self, task: Task, group: list[_Read], suspects: Suspects | None) -> Chunk:
        rows = pa.concat_tables([r.block.rows for r in group]) if len(group) > 1 else group[0].block.rows
        piece = np.repeat(np.array([r.number for r in group], dtype=np.int32), [r.block.rows.num_rows for r in group])
        position = np.concatenate([r.block.position for r in group])
        paths = [p.file.path for p in task.shard.pieces]
        flow = _Flow(rows, np.arange(rows.num_rows, dtype=np.int64))
        flow.letters += [self._unreadable(r.piece, bad) for r in group for bad in r.block.bad]
        flow.filtered = sum(r.block.filtered for r in group)
        flow.dead = len(flow.letters)
        rows_in = rows.num_rows + flow.filtered + flow.dead
        for number, step in enumerate(self._steps):
            step.doubt.proven = task.proven
            apply = step.apply
            if suspects is not None:
                who = Identity(piece[flow.origin], position[flow.origin], _copies(flow.origin))
                apply = partial(suspects.apart, f"step {number}", f"step {step.step.name}", who, apply=step.apply)
            self._advance(flow, step, apply, piece, position, paths)
        copy = _copies(flow.origin) if flow.expanded is not None else np.zeros(len(flow.origin), dtype=np.int32)
        expanded = len(flow.origin) if flow.expanded is None else flow.expanded
        derived = len(flow.origin) + flow.derived_filtered + flow.derived_dead
        counts = Counts(
            rows_in, expanded, flow.filtered, flow.dead, derived, flow.derived_filtered, flow.derived_dead, 0
        )
        identity = Identity(piece[flow.origin], position[flow.origin], copy)
        chunk = Chunk(flow.rows, identity, counts, tuple(flow.letters))
        return chunk if task.only is None else _retried(chunk, task, paths)

    def _advance(
        self,
        flow: _Flow,
        step: LoadedStep,
        apply: Callable[[pa.Table], Applied],
        piece: np.ndarray,
        position: np.ndarray,
        paths: list[str],
    ) -> None:
        if flow.rows.num_rows == 0:
            if step.step.kind == "flat_map" and flow.expanded is None:
                flow.expanded = 0
            return
        before = flow.rows
        after, source, dead = apply(before)
        for row in dead:
            at = int(flow.origin[row.row])
            flow.letters.append(self.letter(row, before, paths[int(piece[at])], int(position[at]), 0))
        if flow.expanded is not None:
            flow.derived_dead += len(dead)
            flow.derived_filtered += before.num_rows - len(dead) - len(np.unique(source))
        else:
            kept = before.num_rows - len(dead)
            flow.dead += len(dead)
            if step.step.kind == "flat_map":
                flow.expanded = kept
            else:
                distinct = len(np.unique(source)) if len(source) != kept else kept
                flow.filtered += kept - distinct
                if len(source) > distinct:
                    flow.expanded = distinct
        flow.rows, flow.origin = after, flow.origin[source]

    # ------------------------------------------------ dead letters

    def letter(self, dead: DeadRow, rows: pa.Table, source: str, position: int, copy: int) -> Letter:
        """A dead row of `rows` as a letter, its payload cut to what the sink keeps."""
        most = self._recipe.sink.dead_payload
        payload = _payload(rows.slice(dead.row, 1).to_pylist()[0], most) if most else None
        return Letter(source, position, copy, dead.stage, dead.error, dead.message, dead.traceback, payload)

    def _unreadable(self, piece: Piece, bad: BadRow) -> Letter:
        most = self._recipe.sink.dead_payload
        payload = {"base64": base64.b64encode(bad.payload[:most]).decode()} if most else None
        message = f"{piece.file.path} at {bad.position}: {bad.message}"
        return Letter(piece.file.path, bad.position, 0, "read", bad.error, message, "", payload)


@dataclass(frozen=True)
class _Read:
    number: int
    piece: Piece
    block: Block

    @property
    def rows_held(self) -> int:
        return max(1, int(self.block.rows.num_rows))

    @property
    def bytes_held(self) -> int:
        return int(self.block.rows.nbytes)


def _head(block: Block, rows: int) -> Block:
    if block.rows.num_rows <= rows:
        return block
    return Block(block.rows.slice(0, rows), block.position[:rows], block.filtered, block.bad)


def _part(chunk: Chunk, start: int, rows: int) -> Chunk:
    """A slice of a chunk; its counts and letters go with the first."""
    index = np.arange(start, min(start + rows, chunk.rows.num_rows))
    identity = chunk.identity.take(index)
    if start == 0:
        return Chunk(chunk.rows.slice(start, rows), identity, chunk.counts, chunk.letters)
    return Chunk(chunk.rows.slice(start, rows), identity, Counts())


def _retried(chunk: Chunk, task: Task, paths: list[str]) -> Chunk:
    """Of a retried shard's rows those that were dead. A source row of which some copies had lived is not counted
    again.
    """
    who = chunk.identity
    wanted = [task.only.wanted(path) for path in paths]
    copies = [wanted[p].get(n, set()) for p, n in zip(who.piece.tolist(), who.position.tolist(), strict=True)]
    keep = np.array([c is None or k in c for c, k in zip(copies, who.copy.tolist(), strict=True)], dtype=bool)
    sources = set(zip(who.piece.tolist(), who.position.tolist(), strict=True))
    partly = sum(wanted[p].get(n) is not None for p, n in sources)
    asked = sum(len(wanted[p].get(n) or ()) for p, n in sources)
    found = int(keep.sum()) - int(sum(c is None for c in copies))
    if found != asked:
        raise RunFailed(
            f"the steps made {found} of the {asked} dead rows anew: they cut rows differently now; use --restart"
        )
    c, index = chunk.counts, np.flatnonzero(keep)
    counts = replace(
        c, rows_in=c.rows_in - partly, expanded=c.expanded - partly, derived=c.derived - int((~keep).sum())
    )
    return Chunk(chunk.rows.take(index), who.take(index), counts, chunk.letters)


def _copies(origin: np.ndarray) -> np.ndarray:
    """For each row its number among the rows of the same origin, in order: 0, 1, …"""
    if len(origin) == 0:
        return np.empty(0, dtype=np.int32)
    order = np.argsort(origin, kind="stable")
    ordered = origin[order]
    starts = np.flatnonzero(np.concatenate([[True], np.diff(ordered) != 0]))
    lengths = np.diff(np.append(starts, len(ordered)))
    copies = np.empty(len(origin), dtype=np.int32)
    copies[order] = np.arange(len(origin)) - np.repeat(starts, lengths)
    return copies


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
    from gristmill.io.paths import changed

    difference = changed(fs, piece.file)
    if difference is not None:
        raise SourceChanged(
            f"{piece.file.path}: changed while the run was reading it ({difference}): put the planned file back "
            "and run again, or begin anew with --restart"
        )

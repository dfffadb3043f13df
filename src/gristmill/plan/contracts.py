"""What crosses the boundaries between layers: frozen values, and the small protocols that each layer implements.

Nothing here does I/O. A position is where a row stands in its file, in the file's own unit: a row number (Parquet),
the byte offset at which the record starts (JSONL, CSV; in the decompressed stream for compressed files), or 0 for
formats with one row a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


# ---------------------------------------------------------------- sources


@dataclass(frozen=True)
class SourceFile:
    """One file of a source as a listing shows it. `path` has no secrets in it; `stamp` changes with the content.

    `touched` changes also when something else about the file does (its owner, a link to it): as long as it is the same,
    what was found in the file before still holds. It is no part of what identifies the content. `folders` are those
    named `name=value` that it lies in, below what the source names, as in `day=2026-01-01/lang=en`.
    """

    path: str
    size: int
    stamp: str
    touched: str = field(default="", compare=False)
    folders: str = ""


@dataclass(frozen=True)
class FileInfo:
    """What planning must know of one file.

    `extent` is the file's length in positions. `cuts` are the positions (sorted int64, first 0, last `extent`) where
    it can be cut at no cost; where `divisible`, any position between will do too. `cut_rows[i]` is the number of rows
    between `cuts[i]` and `cuts[i + 1]`; None where only reading would tell (plain JSONL). `nulls` counts nulls by
    column where the format knows. `layout` is a digest of the file's inner structure that a size and time could miss.
    `row_bytes` is a sampled mean of positions a row, for formats that cannot count without reading.
    """

    file: SourceFile
    extent: int
    cuts: np.ndarray
    divisible: bool
    schema: pa.Schema
    cut_rows: np.ndarray | None = None
    nulls: Mapping[str, int] | None = None
    layout: str = ""
    row_bytes: float | None = None

    @property
    def rows(self) -> int | None:
        """Rows in the file, or None where only reading would tell."""
        return None if self.cut_rows is None else int(self.cut_rows.sum())


@dataclass(frozen=True)
class BadRow:
    """A row that is none: where it stood, its raw bytes, and what was wrong with it."""

    position: int
    payload: bytes
    error: str
    message: str


@dataclass(frozen=True)
class Block:
    """Rows read from one file: `rows` and their `position` (int64, same length), those `where` left out, the bad
    ones.
    """

    rows: pa.Table
    position: np.ndarray
    filtered: int = 0
    bad: tuple[BadRow, ...] = ()


class Where(Protocol):
    """A row condition. `columns` are those it reads; `mask` gives one bool a row, null counting as false."""

    columns: tuple[str, ...]

    def mask(self, rows: pa.Table) -> np.ndarray: ...


@dataclass(frozen=True)
class Reading:
    """What to read of a file: the columns wanted (None: all), their types as planned, a condition, and a block's
    bytes. With `damaged`, rows that a format cannot decode, but count, are bad ones and no error.
    """

    columns: tuple[str, ...] | None
    schema: pa.Schema
    where: Where | None = None
    block_bytes: int = 16 << 20
    options: Mapping[str, Any] = field(default_factory=dict)
    damaged: bool = False


class SourceFormat(Protocol):
    """One file format as a source. `open_file` is any callable that gives a seekable binary file for a path."""

    name: str
    suffixes: tuple[str, ...]

    def inspect(self, file: SourceFile, fs: Any, options: Mapping[str, Any]) -> FileInfo:
        """What planning needs, from metadata where there is some. Raises BadSource, naming the file."""
        ...

    def read(self, info: FileInfo, fs: Any, ranges: np.ndarray, reading: Reading) -> Iterator[Block]:
        """The rows at the positions in `ranges` (int64 [k, 2], sorted, disjoint, half open), in order of position.

        A record belongs to the range in which it starts. Memory is bounded by a few blocks. Every record that starts in
        a range is in exactly one block: as a row, as `filtered`, or as `bad`.
        """
        ...


# ---------------------------------------------------------------- sinks


@dataclass(frozen=True)
class WorkFile:
    """A finished file of a shard: where it was written, the name it is published under, and its rows.

    `role` is "rows" for files that hold output rows (their sum is the shard's ok count), "ids" for npy's aligned ids,
    "dead" for dead letters.
    """

    path: str
    publish: str
    rows: int
    role: str = "rows"


class Writer(Protocol):
    """Writes one shard's output. `close` syncs and returns the finished files, also when there were no rows."""

    def write(self, rows: pa.Table) -> None: ...

    def close(self) -> list[WorkFile]: ...

    def abort(self) -> None:
        """Closes and removes what was written; never raises because of it."""
        ...


class Files(Protocol):
    """The file layer that everything below a sink goes through: a local disk, or an object store. A test can record it
    or stop it at any step.

    Paths begin with the sink's root and use `/`. It can be pickled and is cheap to open in a worker. What fails raises
    OSError, without a secret in its text. Where `free_links`, a second name costs nothing and keeps the file when the
    first one goes; else it is a copy.
    """

    free_links: bool

    # ---- files of a shard, written in pieces

    def create(self, path: str) -> BinaryIO:
        """A new file open for writing and seeking; its folder is made. Raises FileExistsError."""
        ...

    def sync(self, file: BinaryIO) -> None:
        """Flush an open file, and make its content durable where it already stands in its place."""
        ...

    def local(self, path: str) -> AbstractContextManager[str]:
        """A path on this machine with the file's content, for libraries that read it; gone afterwards if it is a copy.
        Raises FileNotFoundError.
        """
        ...

    def digest(self, path: str) -> tuple[int, str]:
        """Bytes and sha256 of a file as it reads back. Raises FileNotFoundError."""
        ...

    def settle(self, paths: Iterable[str]) -> None:
        """Make finished files durable under their names. Files of others (and these, a second time) are left alone."""
        ...

    def link(self, source: str, target: str) -> None:
        """Gives a settled file a second name. Raises FileExistsError if the name is taken, FileNotFoundError if there
        is no such file.
        """
        ...

    def same(self, path: str, source: str, size: int, sha256: str) -> bool:
        """Whether `path` stands and is `source` under another name, or has this content; false if it does not stand."""
        ...

    # ---- small whole files

    def write_new(self, path: str, data: bytes) -> bool:
        """Create `path` with `data`, durable and whole or not at all; False if the name was taken by other data."""
        ...

    def write_over(self, path: str, data: bytes) -> None:
        """Replace `path` by `data` in one durable step."""
        ...

    def note(self, path: str, data: bytes) -> None:
        """Replace `path` by `data` in one step that outlives this process, but maybe not a power failure."""
        ...

    def read(self, path: str) -> bytes:
        """All of a file. Raises FileNotFoundError."""
        ...

    def look(self, path: str) -> tuple[bytes, Mapping[str, Any]]:
        """All of a file, and its version, which `swap` takes. Raises FileNotFoundError."""
        ...

    def swap(self, path: str, data: bytes, version: Mapping[str, Any]) -> bool:
        """Replace `path` by `data`, as `write_over` does, if it still has this version; false if it has another one.

        Of two swaps of one version one wins. On a disk that holds among those that swap: a `write_over` at the same
        moment may be lost, and on Windows a swap too. Raises FileNotFoundError.
        """
        ...

    def remove(self, path: str) -> None:
        """Remove a file; no error if it is not there."""
        ...

    # ---- folders

    def make_folder(self, path: str) -> None:
        """Make a folder with those above it, where folders are something that is made."""
        ...

    def prove(self, folder: str) -> None:
        """Make a folder and show that a run can commit there. Raises OSError; BadJob where a guarantee is missing."""
        ...

    def holds(self, folder: str) -> bool:
        """Whether there is such a folder."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names of the files that stand directly in a folder, in any order; none where there is no such folder."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """`names` with the bytes of each."""
        ...

    def below(self, root: str, skip: str) -> Iterator[str]:
        """All files below a folder, relative to it, but those in its folder named `skip`, and those below folders that
        have a folder of this name themselves.
        """
        ...

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it; what cannot be removed stays."""
        ...

    # ---- the rest

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """`work` of each item, in their order: one after the other on a disk, many at once where each is a request."""
        ...

    def arrow(self, otherwise: Mapping[str, str] | None = None) -> Any:
        """The pyarrow file system that opens these paths; None for a local disk. A file that is gone is looked for
        where `otherwise` says.
        """
        ...

    def lease(self, sink: str, folder: str, tell: Callable[[str], None]) -> Lease:
        """The lease of a sink, kept in `folder`; not yet taken. `tell` is told what is waited for."""
        ...

    def holder(self, folder: str) -> dict[str, Any] | None:
        """Who holds the lease in `folder` now, or None."""
        ...


class Lease(Protocol):
    """Politeness between runs on one sink; safety never rests on it."""

    def __enter__(self) -> Lease:
        """Take the lease. Raises SinkBusy, naming the run that holds it."""
        ...

    def __exit__(self, *_: object) -> None: ...

    def held(self) -> bool:
        """Whether this run still holds the sink: false, and then for ever, once another run may have begun.

        Two system calls on a disk. In a store one request, none within two seconds of the last one, not waited for
        longer than two; a store that does not answer has given the sink to nobody.
        """
        ...

    def say(self, path: str, data: bytes) -> None:
        """Note how far the run is, for whoever looks; soon, not at once, where a note is a request."""
        ...


class SinkFormat(Protocol):
    """One file format as a sink. `stem` is the published name without suffix, for example `part-0000007.g1`."""

    name: str
    suffix: str

    def writer(
        self, files: Files, folder: str, stem: str, nonce: str, schema: pa.Schema, options: Mapping[str, Any]
    ) -> Writer:
        """Opens work files named `<folder>/<stem>…<suffix>.<nonce>.tmp`."""
        ...

    def stored(self, rows: pa.Table, options: Mapping[str, Any]) -> pa.Schema:
        """The schema that its files can hold, which all rows are cast to, by the first ones; there may be none. Raises
        BadJob for a type that it cannot hold.
        """
        ...

    def refused(self, rows: pa.Table, options: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
        """Rows that it cannot hold as they are, with error and message, which are dead letters. `rows` have the columns
        that are written, and others where they are not planned yet.
        """
        ...

    def count(self, path: str, role: str) -> int:
        """Rows in a finished file, read back from it. Raises if it is not whole."""
        ...


# ---------------------------------------------------------------- models


@dataclass(frozen=True)
class Place:
    """Where and how a model runs, decided outside of it. `device` is "cpu", "cuda", "cuda:0", "mps". `keep_nulls`: rows
    with nulls are scored (on_null: keep) and only refused where the model cannot be given one.
    """

    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 1
    backend: str = "auto"
    keep_nulls: bool = False


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model without loading it.

    `columns` it reads (None: whatever there is); `outputs` it adds, where known; `digest` of its files ("" for
    functions); `digests` file by file, for a readable difference; `filled` are the columns whose nulls it refuses,
    `notes` what is said where the source may hold nulls. `weight_bytes` is the size of what is loaded; `flops_a_token`
    what a transformer computes for one (0: not known). `code` are functions and classes that its files only name.
    """

    name: str
    columns: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    schema: pa.Schema | None = None
    digest: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    keeps_columns: bool = False
    filled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    weight_bytes: int = 0
    flops_a_token: float = 0.0
    code: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """A row that a model refuses before scoring it. `kind` is "null" (the job's on_null decides) or "invalid"."""

    row: int
    kind: str
    error: str
    message: str


@dataclass(frozen=True)
class Prepared:
    """Rows made ready for a model on the CPU (tokenised, stacked). `lengths` is int32 [rows] in tokens, or None.

    Refused rows keep their place (with length 0) but are never given to `predict`. Rows that are `apart` (bool [rows])
    are given to it in batches of their own, as what they are given as would change what those beside them are.
    """

    rows: int
    inputs: Any
    lengths: np.ndarray | None = None
    refused: tuple[Refusal, ...] = ()
    apart: np.ndarray | None = None


class Model(Protocol):
    """A loaded model. One thread calls `predict`; another may call `prepare` for later rows at the same time."""

    def prepare(self, rows: pa.Table) -> Prepared:
        """CPU work that needs no model weights: validate, tokenise, convert columns."""
        ...

    def predict(self, prepared: Prepared, index: np.ndarray) -> pa.Table:
        """Output columns for the rows at `index` (int64 [k]), in that order, exactly k of them. Raises for bad rows."""
        ...

    def close(self) -> None: ...


# ---------------------------------------------------------------- engines


@dataclass(frozen=True)
class Item:
    """A piece of work for an engine, which does not look inside `value`.

    `affinity` names a worker that would be quicker at it (a reader that is already there); never a must. `portions`
    are set in a worker where the first stage is placed apart: what that has made of the item, in order; iterating them
    raises `Elsewhere` where the first stage failed.
    """

    key: str
    value: Any
    affinity: str | None = None
    portions: Iterable[bytes | memoryview] | None = None


class _Signal:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


WAIT = _Signal("WAIT")  # nothing now; ask again after the next event
DONE = _Signal("DONE")  # nothing ever again


class Feed(Protocol):
    """Decides what runs next. Called by one thread; never blocks."""

    def take(self, worker: str) -> Any:
        """An Item for this worker, WAIT or DONE."""
        ...

    def wanted(self) -> int:
        """How many workers are worth starting by now; an engine may have fewer."""
        ...


@dataclass(frozen=True)
class Event:
    """Something an engine reports. `at` is seconds on the monotonic clock of the driver."""

    worker: str


@dataclass(frozen=True)
class Started(Event):
    """A worker is ready: its model is loaded. `about` says what it runs on."""

    seconds: float = 0.0
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Alive(Event):
    """A sign of life of a worker, which may be silent for `limit` seconds from now before it is given up."""

    limit: float = math.inf


@dataclass(frozen=True)
class Stopped(Event):
    """A worker's process was stopped by a signal (SIGSTOP); where `over`, it goes on."""

    over: bool = False


@dataclass(frozen=True)
class Tick(Event):
    """How far an attempt at an item is, not yet committed: source rows whose answers are there, as nearly as windows
    tell, and how many of the item's positions lie behind.
    """

    key: str = ""
    rows: int = 0
    passed: int = 0


@dataclass(frozen=True)
class Printed(Event):
    """Text that user code printed: whole lines, but for `stream` "stdout", which is as it was written. Where a worker
    cannot tell the two streams apart, it is "stderr". "warning" is what a worker itself warns of.
    """

    text: str = ""
    stream: str = "stderr"


@dataclass(frozen=True)
class Outcome(Event):
    """An item's end: a value, or an error as `Failure`."""

    key: str = ""
    value: Any = None
    error: Failure | None = None


@dataclass(frozen=True)
class Death(Event):
    """A worker ended without being asked. `keys` are the items it held, the first one was running.

    `lost` says how, where it went with its machine or was taken away: then nothing it ran is to blame. `silent`: it was
    given up since it gave no sign of life.
    """

    keys: tuple[str, ...] = ()
    evidence: str = ""
    exit_code: int | None = None
    signal: int | None = None
    started: bool = True
    lost: str = ""
    silent: bool = False


@dataclass(frozen=True)
class Left(Event):
    """A worker went by itself and wants to be replaced. `keys` are items it was given and gives back, not begun."""

    keys: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Portion(Event):
    """Part of what the first stage made of an item, on its way to the second; the last one has no body."""

    key: str = ""
    number: int = 0
    body: bytes | None = None
    failure: Failure | None = None
    last: bool = False


@dataclass(frozen=True)
class Taken(Event):
    """A worker has taken a portion of this item: there is room for another."""

    key: str = ""


class Elsewhere(Exception):
    """The first stage of an item failed where it was placed; without a failure, that is told by a death."""

    def __init__(self, failure: Failure | None) -> None:
        super().__init__("" if failure is None else failure.message)
        self.failure = failure


@dataclass(frozen=True)
class Waiting(Event):
    """The engine waits for something outside, said aloud."""

    reason: str = ""


@dataclass(frozen=True)
class Failure:
    """An exception as text, so that it crosses any boundary. `kind` is the class of decision it asks for.

    `kind`: "row", "output" (a broken contract), "load" (the model cannot load), "source" (source changed),
    "space" (disk), "io" (a disk that may recover), "model" (every row tried fails), "memory" (as "model"),
    "sick" (a row that worked in this process fails now), "other". `exit_code` is that of a GristmillError, or 1. `step`
    is the name of the step that failed, "" for the model.
    """

    kind: str
    type: str
    message: str
    traceback: str = ""
    exit_code: int = 1
    pickled: bytes | None = None
    step: str = ""

    @property
    def who(self) -> str:
        """The step, or the model."""
        return f"step {self.step}" if self.step else "the model"


Emit = Callable[[Event], None]


class Worker(Protocol):
    """User code at work in one process. Where it has `silence()`, that says for how many seconds it may be silent until
    it is given up (None: give no sign of life now); else it is never given up.
    """

    def work(self, items: Iterator[Item], emit: Emit) -> None:
        """Run items until there are no more, emitting an Outcome for each; may pull one ahead of the one it runs."""
        ...

    def stop(self) -> None:
        """From another thread: finish or drop the batch at hand and let `work` return soon."""
        ...


class Stages(Protocol):
    """What an engine ships to its workers, once a worker: picklable, opaque, opened where the work is done.

    Where it has a number `ahead`, a worker makes use of so many items beyond the one at hand; else of one.
    """

    def open(self, name: str, emit: Emit) -> Worker:
        """Builds what lasts (models, readers). Slow; raises if user code cannot load."""
        ...

    def environment(self, index: int) -> Mapping[str, str]:
        """Variables that must be set before the interpreter of worker number `index` starts."""
        ...


@dataclass(frozen=True)
class Room:
    """What an engine has to place workers on, as planning must know it.

    `workers` fit at once, `gpu_workers` with a GPU (or the share of one that was asked for). `threads` are the cores of
    each; None: those of the machine are divided among them. `gpus` names the GPUs, where the driver is to choose, and
    `per_gpu` are the workers that share one.
    Where it `grows`, more may be asked for than there is.
    """

    where: str
    workers: int
    gpu_workers: int = 0
    threads: int | None = None
    gpus: tuple[str, ...] = ()
    per_gpu: int = 1
    grows: bool = False


class SplitStages(Stages, Protocol):
    """Stages of which the first can be placed apart from the others."""

    def first(self) -> Stages:
        """What to ship to workers of the first stage; they emit Portions instead of outcomes."""
        ...

    def apart(self, item: Item) -> bool:
        """Whether this item may be done in two places."""
        ...


class Engine(Protocol):
    """Moves items to workers that keep their state, and reports. It never retries and decides nothing."""

    def run(self, stages: Stages, feed: Feed) -> Iterator[Event]:
        """Runs until the feed is DONE and everything handed out has ended. Closing the iterator leaves nothing
        running.
        """
        ...


Columns = Sequence[str]

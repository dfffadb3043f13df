"""The contract of a model: what is known of it before it is loaded, and how a loaded one prepares and predicts rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from gristmill.job.specs import Call
    from gristmill.models.encoder import EncoderFiles
    from gristmill.models.gpulibraries import Library
from gristmill.process.messages import Failure
from gristmill.values import dataclass

# What endpoints are asked for, dollars, and the rows whose answer is an error.
USED = ("requests", "prompt_tokens", "completion_tokens", "cost", "refused")


@dataclass(frozen=True)
class Place:
    """Where and how a model runs, decided by the run. `device` is "cpu", "cuda", "cuda:0" or "mps". With `keep_nulls`,
    rows with nulls are scored (on_null: keep), and refused only if the model cannot be given a null. A model that
    answers row by row is asked for `at_once` rows at a time (0: as many as it says), each for up to `limit` seconds;
    `bulk` shards at a time are sent in bulk (see BulkModel). One that asks for several rows in one request asks for
    `rows` of them (0: as many as it says). `run` names the run, if workers share limits.
    """

    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 1
    backend: str = "auto"
    keep_nulls: bool = False
    at_once: int = 0
    limit: float = math.inf
    bulk: int = 0
    rows: int = 0
    run: str = ""

    @property
    def gpu(self) -> bool:
        """Whether the model runs on an NVIDIA GPU, or one that torch names alike."""
        return self.device.startswith("cuda")


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model without loading it.

    `columns` are those it reads (None: whatever there is), `outputs` those it adds, if known; `digest` is that of its
    files ("" for functions), `digests` has one per file, for a readable difference; `filled` are the columns whose
    nulls it refuses, `notes` the notes to show if the source may hold nulls. `weight_bytes` is the size of what is
    loaded, `flops_a_token` the cost of a transformer per token (0: unknown). `code` are functions and classes that its
    files refer to only by name.

    A run decides by these: `by_tokens`, whether prepared rows have lengths by which batches are cut; `call`, whether it
    is the user's own code, whose memory per row is unknown and which is compared as code; `on_gpu`, whether it runs on
    a GPU if there is one, and if the `library` that computes it (None: unknown) can use it; `exportable`, whether its
    spec is a TextSpec and its kind a Transformer, so that ONNX Runtime may replace torch; `at_once`, for how many rows
    a model that answers row by row is asked at a time (0: it answers batches); `alone`, how many of these are answered
    before the others are begun, where its columns are known and all that is left to learn is whether it answers (0: it
    does once it is loaded); `bulk`, how many shards at a time are sent in bulk (0: none; see BulkModel). `asks` says
    whom a model asks that runs elsewhere, without secrets ("": it runs here).
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
    by_tokens: bool = False
    call: Call | None = None
    on_gpu: bool = True
    library: Library | None = None
    exportable: bool = False
    at_once: int = 0
    alone: int = 1
    bulk: int = 0
    asks: str = ""


@dataclass(frozen=True)
class Columns:
    """The columns of a model's answers as planned: their types, as far as known, and which there may be (None: any)."""

    types: pa.Schema
    names: tuple[str, ...] | None


@dataclass(frozen=True)
class Refusal:
    """A row that a model refuses before scoring it. `kind` is "null" (the job's on_null decides) or "invalid"."""

    row: int
    kind: Literal["null", "invalid"]
    error: str
    message: str


@dataclass(frozen=True)
class Prepared:
    """Rows made ready for a model on the CPU (tokenised, stacked). `lengths` is int32 [rows] in tokens, or None.

    Refused rows keep their place (with length 0) but are never given to `predict`. Rows that are `apart` (bool [rows])
    get batches of their own, because they would change how the rows beside them are represented.
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


class Allowance(Protocol):
    """What the workers of a run may spend together."""

    @property
    def claimed(self) -> float:
        """How much is claimed by all, as far as is known here: all of it once a claim was refused."""
        ...

    def claim(self, least: float, total: float) -> float:
        """A part of `total`, in the same unit: `least` or more; 0 if less than that is left."""
        ...

    @property
    def ended(self) -> float:
        """How much of it was spent by those that have ended, as far as is known here."""
        ...

    def give_back(self, part: float, spent: float = 0.0) -> None:
        """What was claimed, and not spent; and what was, of all that its worker has claimed, once that ends."""
        ...


class Once(Protocol):
    """Requests that are asked once, by whichever worker, and their answers, by their digests."""

    def claim(self, request: bytes) -> tuple[str, Any]:
        """What is to be done: "mine" (ask), "wait" (another one asks), or "answer" or "refused", and what was
        answered.
        """
        ...

    def renew(self) -> float:
        """What this worker has claimed is its still. Returns in how many seconds that has to be told again."""
        ...

    def known(self, request: bytes) -> bool:
        """Whether there is an answer."""
        ...

    def put(self, request: bytes, answer: Mapping[str, Any], refused: bool = False) -> None:
        """What was claimed is answered, or `refused`, for these reasons."""
        ...

    def release(self, request: bytes) -> None:
        """What was claimed has no answer: another one may ask."""
        ...

    def forget(self, requests: Sequence[bytes]) -> None:
        """What these were answered is of no use to another run."""
        ...

    def close(self) -> None: ...


class Journal(Protocol):
    """Keeps answers of a shard that is not committed yet, for an attempt that comes after this one."""

    @property
    def allowance(self) -> Allowance | None: ...

    @property
    def once(self) -> Callable[[], Once] | None:
        """Opens what equal requests are asked once by; None where workers share nothing."""
        ...

    @property
    def notes(self) -> Sequence[Any]:
        """What earlier attempts have noted of the shard, in the order in which each noted it."""
        ...

    @property
    def name(self) -> str:
        """Of the shard, among all of all generations."""
        ...

    @property
    def closed(self) -> bool:
        """Whether its attempt is over: what comes now is kept and told nowhere."""
        ...

    @property
    def trouble(self) -> Exception | None:
        """Why what was put here last could not be kept yet; None if all is: it is tried again, and nothing more should
        be paid for meanwhile.
        """
        ...

    def note(self, told: Mapping[str, Any], used: Mapping[str, float] | None = None, once: str = "") -> None:
        """Note something, as JSON, before this returns, so that no death of the process undoes it; and what it has
        taken (USED), which no row tells, and which counts once of all that is noted for that. Raises OSError.
        """
        ...

    def everywhere(self) -> Sequence[Any]:
        """What was noted of all shards that are not committed, by any attempt until now, in this generation or in those
        whose answers it inherits.
        """
        ...

    def held(self, key: bytes) -> int:
        """How many answers of earlier attempts there are for such rows that `earlier` has not given yet."""
        ...

    def key(self, row: Any) -> bytes:
        """A digest of the row that a function is given; empty if it cannot be told from others."""
        ...

    def earlier(self, key: bytes) -> tuple[bool, Any]:
        """Whether an earlier attempt was answered for such a row, and the answer, or EarlierFailure: each serves one
        row.
        """
        ...

    def put(self, key: bytes, answer: Any, used: Mapping[str, float], place: tuple[str, int] | None = None) -> None:
        """Keep an answer, if it has a key and is of plain values, and what it has taken (USED). Called in any thread.
        `place`, the row's file and position, is given for rows that are in no shard yet.
        """
        ...

    def failed(
        self, key: bytes, failure: Failure, used: Mapping[str, float], place: tuple[str, int] | None = None
    ) -> None:
        """Keep that a row failed for itself, and would again, for other attempts of this run. As `put`."""
        ...

    def put_first(self, key: bytes, request: bytes, answer: Any, used: Mapping[str, float]) -> None:
        """Keep the answer to the first request for a row, by that request's digest, of which nothing can be made: it is
        asked for once more. What it has taken is told again with the row's own answer or failure. As `put`.
        """
        ...

    def first(self, key: bytes, request: bytes) -> tuple[Any, Mapping[str, float]] | None:
        """What an earlier attempt kept so, of a row that got no further, and what that took: each serves one row."""
        ...

    def took(self, used: Mapping[str, float]) -> None:
        """Keep what an answer has taken (USED) that is not kept itself. Called in any thread."""
        ...

    def spent(self, used: Mapping[str, float]) -> None:
        """Keep what was taken (USED) before any row of the shard was begun, and no row tells."""
        ...


@dataclass(frozen=True)
class Told:
    """Who is told of the answers of a RowModel, and what is known of them. `answered` is called after each, in any
    thread, or whenever the model got on with some. What `journal` has is not asked for; it is given what is answered;
    without one the rows are a trial: no answer from before is one to them. `places` are those of the rows that are in
    no shard yet, of all in what was prepared. An answer that is not `planned` so is its row's failure. Unless the model
    is `proven` to answer, it may leave rows out after many have failed and none was answered (Unasked).
    """

    answered: Callable[[], None]
    journal: Journal | None = None
    places: Sequence[tuple[str, int]] | None = None
    planned: Columns | None = None
    proven: bool = True


@runtime_checkable
class RowModel(Model, Protocol):
    """A loaded model that answers row by row and mostly waits, for an endpoint or a scheduler of its own: many rows are
    in flight, of more than one batch, so that a slow answer keeps no other row from being asked for.

    `predict` gives the answers to rows that were begun, and asks for others itself; each row is asked for once, however
    often its answer is taken. Rows fail alone: it raises SomeFailed with the exception of each. `by_user`: answers are
    those of the user's code, which may rest on files that nobody named.
    """

    by_user: bool

    def begin(self, prepared: Prepared, rows: np.ndarray, told: Told) -> None:
        """Ask for the rows at `rows` (int64 [k], ascending) after those begun before; called by one thread. What
        `told` says serves `predict`, too, for rows that were not begun.
        """
        ...

    def works(self, prepared: Prepared, index: np.ndarray) -> bool:
        """Whether these rows (int64 [k]), which were answered before, are answered if they are asked for now."""
        ...

    def answered(self, prepared: Prepared, rows: np.ndarray, journal: Journal) -> None:
        """These rows (int64 [k]) have their answers: those that the journal has of them are for no equal row."""
        ...

    def waiting(self, prepared: Prepared, seconds: float) -> int:
        """How many of the rows that were begun have no answer, once all have one or after so many seconds."""
        ...

    @property
    def trouble(self) -> str:
        """What keeps answers away now, for people; "" if nothing does. Rows that end meanwhile have none."""
        ...

    @property
    def most_flying(self) -> int:
        """How many requests were in flight at most; 0 where there are none."""
        ...

    @property
    def put_off(self) -> int:
        """How many requests were refused for the moment, as there were too many (429, 503)."""
        ...

    @property
    def news(self) -> list[str]:
        """What people are to be warned of, each once: whoever tells it takes it out."""
        ...

    def drop(self, prepared: Prepared) -> None:
        """Nobody needs the answers: ask for no more of these rows."""
        ...

    def used(self, prepared: Prepared) -> Mapping[str, float]:
        """What was asked for these rows has taken (USED), without what the journal had; nothing for functions."""
        ...

    def leave(self) -> None:
        """The run is being ended: drop everything. `close` is not called."""
        ...


class Bulk(Protocol):
    """The rows of one shard on their way to somebody who answers all of them together, perhaps hours later. What is
    sent is noted in the journal, so that another attempt waits for the same answers. Called by one thread.
    """

    def add(self, prepared: Prepared, rows: np.ndarray) -> None:
        """The rows at `rows` (int64 [k], ascending) are to be answered."""
        ...

    def send(self) -> None:
        """There are no more rows. Does not wait."""
        ...

    def wait(self, seconds: float) -> bool:
        """Whether the answers are there, at the latest after so many seconds. Raises what ends the run."""
        ...

    @property
    def told(self) -> str:
        """What is waited for, for people."""
        ...

    def close(self) -> None:
        """The shard is done, or given up by this worker: what was sent goes on."""
        ...


@runtime_checkable
class BulkModel(RowModel, Protocol):
    """A RowModel that may have shards answered in bulk before their rows are begun, which then have their answers."""

    def bulk(self, journal: Journal, proven: bool = True) -> Bulk | None:
        """For the shard of this journal; None if its rows are asked for one by one. `proven` as in `begin`: else
        `Bulk.add` may raise Unasked.
        """
        ...


class ModelKind(Protocol):
    """The module that a spec names as its `home`. The driver calls `describe`, a worker `open_model`. It may also have
    `resolve` and `open_preparer`, as a Transformer has, and `estimate(spec, rows)`, which tells what these rows will
    take (USED).
    """

    def describe(self, spec: Any, schema: pa.Schema | None, /) -> ModelInfo:
        """What is known of a model without loading it, after checking that it is a model and fits the source's columns.

        `schema` is what the model will see; None if steps before it may change the columns. Raises BadModel and
        MissingExtra, in one line with the value, what was expected and the way out.
        """
        ...

    def open_model(self, spec: Any, place: Place, /) -> Model:
        """The model, loaded at a place, which gives device and threads; the spec gives backend and dtype. Slow."""
        ...


class Preparer(Protocol):
    """The half of a model that needs no weights."""

    def prepare(self, rows: pa.Table) -> Prepared: ...


class Transformer(ModelKind, Protocol):
    """A kind of transformer over text, with torch weights that can be exported to ONNX."""

    TASK: Literal["embed", "classify"]

    def resolve(self, spec: Any, /) -> Any:
        """The spec with every "auto" that shapes the output (backend, dtype) made explicit, so that it can be recorded.

        Depends on the model's files and on which packages are installed here, nothing else.
        """
        ...

    def open_preparer(self, spec: Any, place: Place, /) -> Preparer:
        """The model's `prepare` without its weights, for a process of its own."""
        ...

    def files_of(self, spec: Any, /) -> EncoderFiles:
        """The files that it will load. Raises BadModel."""
        ...

    def compared(self, spec: Any, /) -> Any:
        """The spec that writes all values, in the last column; labels, if there are any, are in the first column."""
        ...

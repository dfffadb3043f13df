"""What a worker is given: the recipe, once, and a task for each shard. Frozen and picklable; nothing is opened here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Literal

import pyarrow as pa

from gristmill.commit.inherited import Inherited
from gristmill.commit.keptindex import Kept
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL
from gristmill.job.job import Sink
from gristmill.job.options import BatchPlan, Running
from gristmill.job.secret import Secret
from gristmill.job.specs import ModelSpec, Step
from gristmill.models.contract import Place
from gristmill.shards.shard import Shard
from gristmill.sinks.contract import SinkFormat
from gristmill.sources.contract import SourceFormat
from gristmill.values import dataclass
from gristmill.worker.matching import Matching

# Rows in flight and answered ones that wait for an earlier row, per row that is asked for at a time: enough that a row
# that takes a hundred times as long as the others keeps none of them waiting.
BEGUN = 128
LEAST_BEGUN = 1024


def most_begun(at_once: int) -> int:
    """For how many rows a worker has asked, of a model that answers row by row, before the first is handed on."""
    return max(LEAST_BEGUN, BEGUN * at_once)


@dataclass(frozen=True)
class Reader:
    """How to open the source in a worker: its format, file system, columns, planned types and condition, and whether to
    continue if a file is `damaged` (see Reading). Files in `own`, by path, are read with these types.
    """

    format: SourceFormat
    fs: Any
    columns: tuple[str, ...] | None
    schema: pa.Schema
    where: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    damaged: bool = False
    own: Mapping[str, pa.Schema] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """What an output row has: kept columns (None: all but `leave`), the model's, an id, a version; nothing in `drop`.

    Columns of `keep` that are `implied` (by partition_by or sort_by) are kept unless the model answers in a column of
    that name.
    """

    keep: tuple[str, ...] | None
    leave: tuple[str, ...] = ()
    row_id: str | None = None
    key: tuple[str, ...] = ()
    model_version: str | None = None
    digest: str = ""
    drop: tuple[str, ...] = ()
    implied: tuple[str, ...] = ()

    def beside(self, answers: Collection[str]) -> Output:
        """The output for a model that answers in these columns."""
        if self.keep is None or not any(n in answers for n in self.implied):
            return self
        return replace(self, keep=tuple(n for n in self.keep if n not in self.implied or n not in answers))

    def keeps(self, name: str) -> bool:
        """Whether a column of the rows is carried over."""
        return name in self.keep if self.keep is not None else name not in self.leave

    def columns(self, rows: Sequence[str], results: Sequence[str]) -> list[str]:
        """The columns written, without id and version, for rows with columns `rows`, among them the model's
        `results`.
        """
        wanted = self.keep if self.keep is not None else [n for n in rows if self.keeps(n)]
        kept = [n for n in wanted if n in rows and n not in results]
        return [n for n in (*kept, *results) if n not in self.drop]


@dataclass(frozen=True)
class Recipe:
    """Everything about a job that its workers need, whichever shard they are given.

    `files` is the sink's file layer; tests pass one that records, or fails at one of its operations.
    """

    reader: Reader
    steps: tuple[Step, ...]
    model: ModelSpec
    post: tuple[Step, ...]
    output: Output
    sink: Sink
    sink_format: SinkFormat
    place: Place
    running: Running
    on_null: str
    on_nan: str
    batch: BatchPlan
    run: str = ""  # tells this run from others
    secrets: tuple[Secret, ...] = ()  # whose values must not reach a dead letter or an error
    files: Files = LOCAL
    pins: tuple[Any, ...] = ()  # fingerprint.pins: the user's modules as planned
    named: tuple[Any, ...] = ()  # fingerprint.pins.Named: files that arguments name
    held: tuple[Any, ...] = ()  # fingerprint.values.Held: what names in them stood for then
    loaded: Mapping[str, frozenset[str]] = field(default_factory=dict)  # models.loaded: what earlier runs noted
    matching: Matching | None = None  # of a job with `update`
    profiled: tuple[str, ...] = ()  # columns of whose values receipts have a profile


@dataclass(frozen=True)
class Task:
    """One shard to score and commit. `schema` is the planned output schema, `answers` are the columns that the model
    answered in for the first rows, and `made` those that dicts of steps added to them, by step.

    `kind` "probe" scores the first rows, commits nothing and answers with their schema, using the types of `base`, if
    given, for values that fit these; "proof" does the same with rows from anywhere, and keeps nothing. `some` has, for
    each piece, how many rows of it are meant, evenly, of about how many; all of them if it is empty. `attempt` is a
    unique name. `careful` attempts note what they give to user code; `blame` names the attempt whose death its rows
    caused ("": none), and `how` says how it died; `proven` says that the model worked elsewhere, so that rows that fail
    are to blame themselves. `kept` are the answers of an update's result before, and `inherits` shards of runs before
    that were given up, with answers for this one; `inherited` are the folders of all that any shard inherits of.
    """

    kind: Literal["score", "probe", "proof"]
    shard: Shard
    generation: int = 0
    folder: str = ""
    root: str = ""
    schema: pa.Schema | None = None
    answers: tuple[str, ...] = ()
    made: Mapping[str, pa.Schema] = field(default_factory=dict)
    base: pa.Schema | None = None
    attempt: str = ""
    careful: bool = False
    blame: str = ""
    how: str = ""
    proven: bool = False
    rows: int | None = None
    some: tuple[tuple[int, int], ...] = ()
    only: Any = None
    kept: Kept | None = None
    inherits: tuple[Inherited, ...] = ()
    inherited: tuple[str, ...] = ()

    @property
    def paths(self) -> list[str]:
        """The file of each piece. A piece's number has no meaning outside its task: others count other pieces."""
        return [p.file.path for p in self.shard.pieces]

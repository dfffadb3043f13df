"""What a worker is given: the recipe, once, and a task for each shard. Frozen and picklable; nothing is opened here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from gristmill.commit.store import LOCAL
from gristmill.plan.contracts import Files, Place
from gristmill.plan.job import Sink
from gristmill.plan.options import BatchPlan, Running
from gristmill.plan.secret import Secret
from gristmill.plan.shard import Shard
from gristmill.plan.specs import ModelSpec, Step


@dataclass(frozen=True)
class Reader:
    """How to open the source in a worker: its format's name, file system, columns, planned types and condition; and
    whether it goes on where a file is `damaged` (see Reading). Files in `own`, by path, are read with these types.
    """

    format: Any
    fs: Any
    columns: tuple[str, ...] | None
    schema: pa.Schema
    where: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    damaged: bool = False
    own: Mapping[str, pa.Schema] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """What an output row is: kept columns (None: all but `leave`), the model's, an id, a version; nothing of `drop`."""

    keep: tuple[str, ...] | None
    leave: tuple[str, ...] = ()
    row_id: str | None = None
    key: tuple[str, ...] = ()
    model_version: str | None = None
    digest: str = ""
    drop: tuple[str, ...] = ()

    def keeps(self, name: str) -> bool:
        """Whether a column of the rows is carried over."""
        return name in self.keep if self.keep is not None else name not in self.leave

    def columns(self, rows: Sequence[str], results: Sequence[str]) -> list[str]:
        """What is written of rows with columns `rows`, of which the model's are `results`, but for id and version."""
        wanted = self.keep if self.keep is not None else [n for n in rows if self.keeps(n)]
        kept = [n for n in wanted if n in rows and n not in results]
        return [n for n in (*kept, *results) if n not in self.drop]


@dataclass(frozen=True)
class Recipe:
    """Everything about a job that its workers need, whichever shard they are given.

    `files` is the file layer below the sink; tests give one that records, or fails at one of its operations.
    """

    reader: Reader
    steps: tuple[Step, ...]
    model: ModelSpec
    post: tuple[Step, ...]
    output: Output
    sink: Sink
    sink_format: Any
    place: Place
    running: Running
    on_null: str
    on_nan: str
    batch: BatchPlan
    secrets: tuple[Secret, ...] = ()  # whose values must not reach a dead letter or an error
    files: Files = LOCAL
    pins: tuple[Any, ...] = ()  # models.pins: the user's modules as planned
    named: tuple[Any, ...] = ()  # models.pins.Named: files that arguments name
    held: tuple[Any, ...] = ()  # models.values.Held: what names of these stood for then
    loaded: Mapping[str, frozenset[str]] = field(default_factory=dict)  # models.loaded: what runs before this one noted


@dataclass(frozen=True)
class Task:
    """One shard to score and commit. `schema` is the planned output schema, `answers` the columns that the model
    gave the first rows, and `made` those that dicts of a step added to them, by step.

    `kind` "probe" scores the first rows, commits nothing and answers with the schema they have, in which the types of
    `base` are, where given, that they fit; "proof" does so with rows from anywhere, of which nothing is kept. `attempt`
    is a name that no other attempt at anything has. `careful` ones note what they give to user code; `blame` names the
    attempt whose death was its rows' doing ("": none), and `how` it died; `proven` says that the model worked
    elsewhere, so that rows which fail are to blame themselves.
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
    only: Any = None

    @property
    def paths(self) -> list[str]:
        """The file of each piece. A piece's number says nothing outside of its task: another one counts others."""
        return [p.file.path for p in self.shard.pieces]

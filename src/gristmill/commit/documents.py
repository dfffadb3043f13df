"""The documents below a sink's `_gristmill/`, and its `_SUCCESS`: one type each. Receipts are in receipt.py, leases in
files/lease.py, notes of suspects in worker/suspects.py, notes of progress in driver/progressnote.py, the remembered job
in cli/lastjob.py.

The format version of a plan also covers the Arrow tables beside it, that of a publication its table of files, and that
of a receipt the parts and dead letters that it commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from gristmill.files.document import Document
from gristmill.fingerprint.digests import StoredFingerprint
from gristmill.models.versions import Registered
from gristmill.profiles.profile import Profile
from gristmill.shards.counts import Counts
from gristmill.sinks.contract import Role
from gristmill.values import dataclass

Verb = Literal["new", "restart", "append", "retry-dead", "update"]
Seen = tuple[int, str, str]  # size, stamp, touched


@dataclass(frozen=True)
class Claim(Document, what="claim of a generation"):
    """`generations/N.json`; creating it begins a generation: see `generation.Generation`."""

    number: int
    folder: str
    kind: Verb
    base: int | None = None
    predecessor: int = 0
    fingerprint: StoredFingerprint = field(default_factory=StoredFingerprint)
    schema: str | None = None
    sink: str | None = None


# ---------------------------------------------------------------- plans and results


@dataclass(frozen=True)
class ModelRecord:
    """The model of a result: name, digest of its files, and the version that `model_version` writes; what the registry
    says of it that names it, if one does, and of `others` that are arguments beside it.
    """

    name: str
    digest: str
    version: str
    registered: Registered | None = None
    others: tuple[Registered, ...] = ()

    @property
    def named(self) -> tuple[Registered, ...]:
        """All that a registry names."""
        return () if self.registered is None else (self.registered, *self.others)


@dataclass(frozen=True, kw_only=True)
class Described(Document):
    """What a plan and its result both record. Schemas are encoded (`generation.encode_schema`); `answers` are the
    columns that the model answered in, with whether some rows had null there; `made` are those that dicts of steps
    added, by step. `unseen` says that there was no row to score, so that the schema may lack columns that rows will
    have.
    """

    fingerprint: StoredFingerprint
    output_schema: str
    answers: Mapping[str, bool]
    made: Mapping[str, str]
    sink_format: str
    partition_by: tuple[str, ...]
    model: ModelRecord
    unseen: bool = False


@dataclass(frozen=True)
class Reads:
    """How shards read the source; `own` are the schemas of files that are read with another one, each with its files'
    paths.
    """

    format: str
    columns: tuple[str, ...] | None
    schema: str
    where: str | None
    options: Mapping[str, Any]
    own: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class BatchRecord:
    """The batch budget of a plan: see `job.options.BatchPlan`."""

    tokens: int
    rows: int
    tries: tuple[int, ...]
    longest: float | None


@dataclass(frozen=True)
class RunsOn:
    """What the model of a plan runs on: device and threads of a worker; for some kinds also backend and precision."""

    device: str
    threads: int
    backend: str | None = None
    dtype: str | None = None

    def told(self) -> dict[str, str | int]:
        """The values that are known."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class TableRecord:
    """An Arrow table beside a plan."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Matched:
    """How an update tells rows: the columns of its key (none: by their place), and those whose values an answer rests
    on, with types, as `hashing.kinds_of` says them.
    """

    key: tuple[str, ...]
    columns: tuple[str, ...]
    kinds: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class PlanDocument(Described, what="plan"):
    """`plan.json`. `only` names the file with the rows of a retry; `tables` are "files" and "shards". Of a job with
    `update`: how rows are `matched`; the generation's own `kept` are the files by which answers of the result before
    are found (keptindex.py), and those of unfinished runs that shards inherit (inherited.py), and `updates` the number
    of that publication (0: there is none). `kept` has the digest of the file of a retry, too, which earlier versions
    did not record. `pace` is how many rows a worker scored in a second, as the first rows told: None if they did not.
    """

    reads: Reads
    batch: BatchRecord
    runs_on: RunsOn
    workers: int
    everything: bool
    created: str
    only: str | None = None
    tables: Mapping[str, TableRecord] = field(default_factory=dict)
    matched: Matched | None = None
    kept: Mapping[str, TableRecord] = field(default_factory=dict)
    updates: int | None = None
    pace: float | None = None


RETRIED = "retried"  # what `PlanDocument.kept` calls the file that `only` names


@dataclass(frozen=True)
class Live:
    """A live file of a sink: its visible name, the work file that it is a name of (both relative to the root), and what
    it must hold.
    """

    name: str
    work: str
    rows: int
    bytes: int
    sha256: str
    role: Role
    generation: int
    shard: int


@dataclass(frozen=True)
class Indexed:
    """The index of a result: the columns that rows are looked up `by`, and its files, oldest first. Each has the rows
    of the generations up to its own, without those of the files before it. Keys were hashed as values of these `types`,
    one for each column; an earlier version did not say which.
    """

    by: tuple[str, ...]
    files: tuple[Live, ...]
    types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sealed:
    """The Merkle root of a generation, over its plan and its receipts, which are so many `leaves` (see seals.py)."""

    generation: int
    root: str
    leaves: int


@dataclass(frozen=True, kw_only=True)
class ResultRecord(Described):
    """What a published result says of itself, except for its files. `reduced_by` has the "name" of the function that
    made those of the role "reduced", and the digest of its "code"; nothing if there are none. `sink` is what stores
    call its sink (`generation.sink_of`). `updated` has how many source rows were "kept", "scored" and, if that is
    known, "gone", for an update, and `used` what its last generation asked of endpoints (models.contract.USED) for the
    rows that it scored, over all of its runs. `sealed` are the roots of its generations, and `root` that over these;
    None, as earlier versions had none.
    """

    generations: tuple[int, ...]
    counts: Counts
    counts_list: tuple[int, ...]
    rows_in: int
    rows_ok: int
    rows_dead: int
    rows_filtered: int
    shards: int
    published: str
    seconds: float
    errors: Mapping[str, int]
    skipped: tuple[str, ...]
    reduced_by: Mapping[str, str] = field(default_factory=dict)
    sink: str | None = None
    updated: Mapping[str, int] = field(default_factory=dict)
    used: Mapping[str, float] = field(default_factory=dict)
    sealed: tuple[Sealed, ...] = ()
    root: str | None = None


@dataclass(frozen=True, kw_only=True)
class Success(ResultRecord, what="publication"):
    """A publication, and `_SUCCESS`: the live `files`, or where their table is, and the `index` beside them; `before`
    is the number of the last publication of another result.
    """

    publication: int
    generation: int
    before: int | None = None
    files: tuple[Live, ...] | None = None
    files_table: str | None = None
    files_sha256: str | None = None
    index: Indexed | None = None


@dataclass(frozen=True)
class Delivered(Document, what="receipt of a delivery"):
    """`deliveries/….json` of a generation: that its rows are in a store (`to`, without secrets), how, and how long
    that took; `older` were left out, as later ones have their keys. `beyond` is how many other rows the store had then,
    where an upsert leaves them (None: that is not known).
    """

    to: str
    mode: str
    key: tuple[str, ...]
    generation: int
    rows: int
    at: str
    seconds: float
    older: int = 0
    beyond: int | None = None


@dataclass(frozen=True)
class Drifted:
    """A measure of how far a column is from that of the result `against`, its limits, and the verdict. With few rows
    `chance` may be further than the limit: the figure that equal rows exceed once in a thousand times.
    """

    column: str
    measure: str
    figure: float
    warn: float | None
    fail: float | None
    chance: float
    verdict: Literal["held", "warned", "failed"]
    against: str
    about: str = ""


@dataclass(frozen=True)
class ProfileRecord(Document, what="profile of a result"):
    """`profile.json` of a generation: the profile of the `whole` result with its rows, and that of these alone (`own`);
    what was found of its `drift`.
    """

    whole: Profile
    own: Profile
    drift: tuple[Drifted, ...] = ()


# ---------------------------------------------------------------- notes


@dataclass(frozen=True)
class Asked(Document, what="note of the deliveries asked for"):
    """`deliver.json`: the stores (without secrets) that the last run was to deliver to."""

    to: tuple[str, ...]


@dataclass(frozen=True)
class Settled(Document, what="note of what was settled"):
    """`settled.json`: the last publication whose clean-up is done."""

    publication: int
    generation: int


@dataclass(frozen=True)
class WrittenPaths(Document, what="note of files that the code writes"):
    """`written.json`: see `generation.written`."""

    paths: tuple[str, ...]


@dataclass(frozen=True)
class LoadedCode(Document, what="note of loaded code"):
    """A file of `loaded/`: digests of loaded code by entry; see `generation.loaded`."""

    loaded: Mapping[str, str]


@dataclass(frozen=True)
class SeenSame(Document, what="note of source files"):
    """`same.json`: size and stamps of files that were touched, but found still to hold what was read of them."""

    files: Mapping[str, Seen]

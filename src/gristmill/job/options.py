"""The small frozen options of a job: how it runs (never what it answers), its gates, and its engine."""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from gristmill.errors import BadJob
from gristmill.job.annotations import Help, Range, is_of, options_of, size, whole
from gristmill.job.drift import limits_of
from gristmill.job.keywords import EngineOptions, names_of, option_fields, unknown
from gristmill.job.registry import Registry
from gristmill.values import dataclass

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gristmill.engines.contract import EngineKind
    from gristmill.job.keywords import OfLocal, OfRay, OfSpark

Auto = Literal["auto"]

ENGINES: "Registry[EngineKind]" = Registry(
    "engine",
    "gristmill.engines",
    {
        "local": "gristmill.engines.local:Local",
        "ray": "gristmill.engines.ray:Ray",
        "spark": "gristmill.engines.spark:Spark",
    },
    needs=("Options", "here", "room", "open"),
)


_THREADS = Range("give a whole number from 1 to 1024", 1, 1024, whole=True)


def _between(name: str, pair: tuple[Any, ...]) -> None:
    whole = len(pair) == 2 and all(is_of(n, int) for n in pair)
    if not whole or not 1 <= pair[0] <= pair[1]:
        shown = "-".join(str(n) for n in pair)
        raise BadJob(f"{name} is {shown}: give a minimum (at least 1) and a maximum, for example 4-64")


_CUT = "how rows are grouped for a call or a commit: the plan stores it, and an answer is its row's alone"
_AROUND = "how the run behaves, not what it answers"
_PLACE = "where a model runs does not change what it answers"


@option_fields()
@dataclass(frozen=True)
class Running:
    """How a job runs. None of these changes what is computed for a row beyond the last bits of a float."""

    not_shaping: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("batch_tokens", "batch_rows", "shard_rows", "window_bytes"), _CUT),
        **dict.fromkeys(("batch_timeout", "worker_memory", "log", "hour_price"), _AROUND),
    }

    batch_tokens: Annotated[int | Auto, whole(1), Help("Padded tokens per model call, or auto")] = "auto"
    batch_rows: Annotated[
        int | Auto,
        whole(1),
        Help("Rows per model call, or auto: functions begin with 1,024 and get more while calls are quick"),
    ] = "auto"
    shard_rows: Annotated[
        int | Auto, whole(1), Help("Rows per shard (the unit of work, retry and commit), or auto")
    ] = "auto"
    window_bytes: Annotated[
        int, size(16 << 20), Help("Bytes of rows held in memory together, to be sorted by length", flag=None)
    ] = 16 << 20
    # Never under 20 times the slowest call seen, and over half an hour for loading the model, too.
    batch_timeout: Annotated[
        float,
        Range("give seconds, more than 0", above=0),
        Help("Seconds that a model call may take (600); 20 times the slowest so far, if that is longer", "SECONDS"),
    ] = 600.0
    worker_memory: Annotated[
        int | None, size(100 << 20), Help("Bytes at which a worker is replaced by a fresh one", "BYTES")
    ] = None
    log: Annotated[str | None, Help("Also write JSON log lines to this file", "FILE", group="What it shows")] = None
    hour_price: Annotated[
        float | None,
        Range("give dollars, at least 0", 0),
        Help(
            "What an hour of the machines that it runs on costs, in dollars: plan, run and report tell the cost",
            "DOLLARS",
            group="What it shows",
        ),
    ] = None


@option_fields("engine option ")
@dataclass(frozen=True)
class LocalOptions:
    """Options of the local engine."""

    gpus_per_worker: Annotated[
        float | None,
        Range(
            "give a whole number, or the fraction of a GPU that a worker needs (0.5: two workers share one)", above=0
        ),
        Help(
            "GPUs of a worker, or a fraction: with 0.5 two share one (default: that for text models of less than a "
            "gigabyte, which cannot keep one busy alone, else 1); or several, over which vLLM spreads a model"
        ),
    ] = None
    grace: Annotated[
        float,
        Range("give seconds, at least 0", 0),
        Help("Seconds that workers have to stop before they are killed"),
    ] = 10.0

    def __post_init__(self) -> None:
        each = self.gpus_per_worker
        if each is not None and each > 1 and each != int(each):
            raise BadJob(f"engine option gpus_per_worker is {each:g}: give a whole number, or less than 1")


_AMOUNT = Range("give a number of at least 0", 0)


@option_fields("engine option ")
@dataclass(frozen=True)
class RayOptions:
    """Which cluster a job runs on, and the resources of one worker there, as Ray counts them."""

    address: Annotated[
        str | None,
        Help(
            "That of a cluster (auto: the one of this machine or of RAY_ADDRESS); without one, that cluster if there "
            "is one, else a local one for the length of the run"
        ),
    ] = None
    cpus_per_worker: Annotated[float, _AMOUNT, Help("Cores of a worker")] = 1
    gpus_per_worker: Annotated[
        float | None, _AMOUNT, Help("GPUs of a worker, or a fraction (default: 1 for a model that runs on GPUs)")
    ] = None
    memory_per_worker: Annotated[int | None, _AMOUNT, Help("Bytes of memory that are reserved for a worker")] = None
    resources: Annotated[Mapping[str, float], Help("Custom resources of a worker")] = field(default_factory=dict)
    accelerator_type: Annotated[str | None, Help("Ray's name of a type of GPU")] = None
    runtime_env: Annotated[Mapping[str, Any] | None, Help("Passed through to Ray")] = None
    split: Annotated[
        bool,
        Help(
            "Read, run steps and tokenise in actors of their own, on any node, so that a worker with a GPU does "
            "nothing but predict and commit"
        ),
    ] = False
    preparers_per_worker: Annotated[int, whole(1), Help("With split: these actors for each worker, one core each")] = 1

    def __post_init__(self) -> None:
        for name, value in self.resources.items():
            if not _AMOUNT.holds(value):
                raise BadJob(f"engine option {name} is {value!r}: {_AMOUNT.words}")


@option_fields("engine option ")
@dataclass(frozen=True)
class SparkOptions:
    """Which Spark runs a job: a `session`, else the one of this process, else one that is started for the duration of
    the run.
    """

    master: Annotated[
        str | None, Help("Where a session is started (default: what spark-submit says, else this machine)")
    ] = None
    session: Annotated[Any, Help("One that is there; in Python alone")] = None
    cpus_per_task: Annotated[
        int, whole(1), Help("Cores of one worker (spark.task.cpus) in a session that is started")
    ] = 1
    conf: Annotated[Mapping[str, Any], Help("Settings of a session that is started")] = field(default_factory=dict)
    app_name: Annotated[str, Help("The name of a session that is started")] = "gristmill"

    def __post_init__(self) -> None:
        if self.session is not None and (self.master is not None or self.conf):
            raise BadJob("engine spark: a session is given, so master and conf have no effect: leave them out")


@dataclass(frozen=True)
class BatchPlan:
    """What a call of the model may hold, determined for one run: padded `tokens` if rows have lengths, `rows` in any
    case; and the rows of a window that batches are cut from.

    `tries` are budgets to try on the first batches (of tokens if `by_tokens`, else of rows), empty if the budget is
    settled; a larger one is not tried if its call would take over `longest` seconds.

    With `quick`, calls that take under so many seconds are followed by larger ones, up to the rows of a window.
    """

    tokens: int
    rows: int
    window: int
    by_tokens: bool = False
    tries: tuple[int, ...] = ()
    longest: float | None = None
    quick: float | None = None


@option_fields()
@dataclass(frozen=True)
class EngineSpec:
    """Which engine runs a job, and with what. `workers` 0 runs in the calling process, whatever engine is named; a pair
    is (least, most). `options` are the engine's own (address, resources, …).
    """

    not_shaping: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("name", "workers", "gpus", "threads", "steps_workers", "options"), _PLACE
    )

    name: Annotated[str, Help("local, ray or spark", "NAME", "--engine")] = "local"
    workers: Annotated[
        int | Auto | tuple[int, int],
        whole(0),
        Help("Worker processes: a number, auto, or a minimum and maximum; 0 runs in the calling process", usual=True),
    ] = "auto"
    gpus: Annotated[int | Auto, whole(0), Help("GPUs in total: a number, or auto")] = "auto"
    threads: Annotated[int | Auto, _THREADS, Help("CPU threads per worker: a number, or auto")] = "auto"
    steps_workers: Annotated[
        int,
        whole(0),
        Help("Extra processes per worker for reading, steps and tokenising; 0: the worker does it itself"),
    ] = 0
    options: Annotated[Mapping[str, Any], Help("The engine's own", flag=None)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise ENGINES.unknown(self.name)
        pair: Any = self.workers  # a job file gives a list
        if isinstance(pair, list):
            object.__setattr__(self, "workers", tuple(pair))
        if isinstance(self.workers, tuple):
            _between("workers", self.workers)
            object.__setattr__(self, "workers", tuple(map(int, self.workers)))
        if self.steps_workers and self.workers == 0:
            raise BadJob("workers is 0, so everything runs in the calling process: leave steps_workers out")
        if self.options or self.name not in ENGINES.ours:  # else its file would have nothing to check
            self.own()
        if self.workers == 0:
            object.__setattr__(self, "options", self.options if self.name == EngineSpec.name else {})
            object.__setattr__(self, "name", EngineSpec.name)

    def named(self, name: str) -> "EngineSpec":
        """The engine of that name: with this one's options if it is the same; with its workers, if it has any."""
        return self if name == self.name else replace(self, name=name, options={}, workers=self.workers or "auto")

    def own(self) -> Any:
        """The engine's own options, checked. Raises BadJob for an unknown option."""
        made = ENGINES.get(self.name).Options
        for name in self.options:
            if name not in self.own_names:
                common = () if name in options_of(EngineSpec) else names_of(EngineOptions)
                raise unknown(f"engine {self.name}", name, [*self.own_names, *common])
        return made(**self.options)

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of the engine's own options."""
        return tuple(options_of(ENGINES.get(self.name).Options))


def as_engine(value: Any) -> EngineSpec:
    """An EngineSpec from a job's value: a name, one with options, or None for the local engine. Raises BadJob."""
    if isinstance(value, EngineSpec):
        return value
    if value is not None and not isinstance(value, str):
        raise BadJob(f"engine is {value!r}: give {', '.join(ENGINES.names)}, or one with options, as gm.ray(address=…)")
    return EngineSpec(value or EngineSpec.name)


ENGINE = "GRISTMILL_ENGINE"


def default_engine(environ: Mapping[str, str]) -> str:
    """The engine of jobs and maps that name none: GRISTMILL_ENGINE if it is set, else "local". Raises BadJob."""
    name = environ.get(ENGINE) or EngineSpec.name
    if name not in ENGINES:
        raise BadJob(f"the environment variable {ENGINE} is {name!r}: give {', '.join(ENGINES.names)}")
    return name


def local(**options: "Unpack[OfLocal]") -> EngineSpec:
    """The local engine with options: `gm.local(workers=4, gpus_per_worker=0.5)`. See `EngineSpec`, `LocalOptions`."""
    return _engine("local", options)


def ray(**options: "Unpack[OfRay]") -> EngineSpec:
    """The Ray engine with options: `gm.ray(address="auto", gpus_per_worker=1, workers=(4, 64))`. See `EngineSpec`,
    `RayOptions`.
    """
    return _engine("ray", options)


def spark(**options: "Unpack[OfSpark]") -> EngineSpec:
    """The Spark engine with options: `gm.spark(session=spark)`. See `EngineSpec`, `SparkOptions`.

    `workers` is how many partitions run at once, which decides how a source is cut; by default the session decides.
    """
    return _engine("spark", options)


def _engine(name: str, options: Mapping[str, Any]) -> EngineSpec:
    common = {key: value for key, value in options.items() if key in names_of(EngineOptions)}
    return EngineSpec(name, **common, options={k: v for k, v in options.items() if k not in common})


@option_fields("update.")
@dataclass(frozen=True)
class Update:
    """That a later run scores only what changed. A row whose `key`, and whose columns that steps and model read, are
    those of a row of the result keeps that row's answers.
    """

    not_shaping: ClassVar[Mapping[str, str]] = {"key": "which answers are kept, that still hold; not what they are"}

    key: Annotated[
        tuple[str, ...],
        Help(
            "The columns that tell which row is which from one run to the next (default: the sink's key, or else a "
            "row's place in its file)",
            flag=None,
        ),
    ] = ()


def as_update(value: Any) -> Update | None:
    """An Update from what a person writes: true, false, a mapping with `key`, or an Update. Raises BadJob."""
    if value is None or isinstance(value, Update):
        return value
    if isinstance(value, bool):
        return Update() if value else None
    if not isinstance(value, Mapping):
        raise BadJob(f"update is {value!r}: give {{'key': ['id']}}, or True to go by a row's place in its file")
    if extra := [name for name in value if name != "key"]:
        raise unknown("update", extra[0], ["key"])
    return Update(**value)


_BEFORE = "Compared with the result before"
_SHARE = Range("give a share between 0 and 1, for example 0.99", 0, 1)


@option_fields("gates.")
@dataclass(frozen=True)
class Gates:
    """What must hold before anything is published, besides the exact accounting that is always on.

    `min_ok` is a share of the rows that are not filtered. One dead row is always allowed, so that a job of a few rows
    does not fail for it, unless `min_ok` is 1. A share of dead rows over `warn_failed` gives a warning.

    The other gates compare with the result before, or with that of the sink that `against` names; both must have 100
    rows or more. `drift` has a mapping for each column: measures with their limits (`{"score": {"psi": 0.25}}`), or
    nothing for the usual ones; see `job.drift`.
    """

    not_shaping: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("min_ok", "warn_failed", "allow_empty", "min_rows", "warn_rows", "max_nulls", "warn_nulls"),
            *("drift", "against"),
        ),
        "whether the result is published, not what it is",
    )

    min_ok: Annotated[
        float,
        _SHARE,
        Help("The minimum share of rows that must be scored; unless it is 1, one dead row is always allowed"),
    ] = 0.99
    warn_failed: Annotated[float, _SHARE, Help("The share of dead rows above which a run warns")] = 0.001
    allow_empty: Annotated[bool, Help("Let a run succeed of which no row is published: none read, or all left out")] = (
        False
    )
    min_rows: Annotated[
        float,
        _SHARE,
        Help("The fewest rows to publish, as a share of those of the result before (0: any number)", group=_BEFORE),
    ] = 0.1
    warn_rows: Annotated[
        float,
        _SHARE,
        Help("A run warns with fewer rows than this share of those before (0.5: half; or over double)", group=_BEFORE),
    ] = 0.5
    max_nulls: Annotated[
        float, _SHARE, Help("By how much the share of nulls in a column may rise over that before", group=_BEFORE)
    ] = 0.5
    warn_nulls: Annotated[
        float, _SHARE, Help("The rise in the share of nulls above which a run warns", group=_BEFORE)
    ] = 0.05
    drift: Annotated[
        Mapping[str, Any] | None,
        Help("Columns whose values must be like those of the result before, each with measures and limits", flag=None),
    ] = None
    against: Annotated[
        str | None,
        Help("The sink whose result to compare with, instead of the one before", "SINK", group=_BEFORE),
    ] = None

    def __post_init__(self) -> None:
        limits_of(self.drift)

    def allowed(self, rows: int) -> int:
        """How many of this many rows may be dead."""
        from decimal import Decimal

        share = Decimal(str(self.min_ok))  # 0.99 of 100 rows are 99 exactly
        return 0 if share == 1 else max(1, int(rows * (1 - share)))

"""The small frozen options of a job: how it runs (never what it answers), its gates, and its engine."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gristmill.errors import BadJob
from gristmill.plan.keywords import check_names, fields_named

Auto = Literal["auto"]


def _positive(name: str, value: int | str) -> None:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise BadJob(f"{name} is {value!r}: give a whole number of at least 1, or 'auto'")


def _between(name: str, pair: tuple[Any, ...]) -> None:
    whole = len(pair) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
    if not whole or not 1 <= pair[0] <= pair[1]:
        shown = "-".join(str(n) for n in pair)
        raise BadJob(f"{name} is {shown}: give the least and the most, for example 4-64, the first at least 1")


@dataclass(frozen=True)
class Running:
    """How a job runs. None of these changes what is computed for a row beyond the last bits of a float.

    `batch_tokens` is a budget of padded tokens a model call, `batch_rows` one of rows; `shard_rows` fixes the unit of
    work and retry; `batch_timeout` is the least limit, in seconds, for one model call (it is never under 20 times the
    slowest call seen), and over half an hour for loading the model, too; `worker_memory` in bytes recycles a worker
    that has grown past it.
    """

    batch_tokens: int | Auto = "auto"
    batch_rows: int | Auto = "auto"
    shard_rows: int | Auto = "auto"
    window_bytes: int = 16 << 20
    batch_timeout: float = 600.0
    worker_memory: int | None = None
    log: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "batch_rows", "shard_rows"):
            _positive(name, getattr(self, name))
        memory: Any = self.worker_memory  # a job file may give anything, and so
        if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int) or memory < 1):
            raise BadJob(
                f"worker_memory is {memory!r}: give bytes as a whole number, for example {100 << 20} for 100 MB"
            )
        window: Any = self.window_bytes
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise BadJob(f"window_bytes is {window!r}: give bytes as a whole number, for example {16 << 20} for 16 MB")
        limit: Any = self.batch_timeout
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
            raise BadJob(f"batch_timeout is {limit!r}: give seconds, more than 0")


@dataclass(frozen=True)
class LocalOptions:
    """What the local engine can be told: `gpus_per_worker`, 1 or a fraction, so that 0.5 puts two workers on a GPU,
    which small models need to keep it busy; `grace`, the seconds that workers have to stop before they are killed.
    """

    gpus_per_worker: float = 1
    grace: float = 10.0

    def __post_init__(self) -> None:
        share: Any = self.gpus_per_worker  # a job file may give anything, and so
        grace: Any = self.grace
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise BadJob(
                f"engine option gpus_per_worker is {share!r}: give 1, or the fraction of a GPU that a worker needs "
                "(0.5: two workers share one)"
            )
        if isinstance(grace, bool) or not isinstance(grace, (int, float)) or grace < 0:
            raise BadJob(f"engine option grace is {grace!r}: give seconds, at least 0")


@dataclass(frozen=True)
class RayOptions:
    """What a Ray worker is given, and which cluster it runs on.

    `address` is that of a cluster ("auto": the one of this machine or of RAY_ADDRESS); without one, that cluster if
    there is one, else a local one for the length of the run. Resources are those of one worker, as Ray counts them:
    `gpus_per_worker` may be a fraction (None: 1 for a model that runs on GPUs), `memory_per_worker` is in bytes,
    `resources` are custom ones, `accelerator_type` is Ray's name of a GPU type. `runtime_env` is passed through.

    With `split` rows are read, run through the steps and tokenised in actors of their own (`preparers_per_worker`, one
    core each, on any node), so that a worker with a GPU does nothing but predict and commit.
    """

    address: str | None = None
    cpus_per_worker: float = 1
    gpus_per_worker: float | None = None
    memory_per_worker: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    accelerator_type: str | None = None
    runtime_env: Mapping[str, Any] | None = None
    split: bool = False
    preparers_per_worker: int = 1

    def __post_init__(self) -> None:
        _positive("engine option preparers_per_worker", self.preparers_per_worker)
        amounts = {k: getattr(self, k) for k in ("cpus_per_worker", "gpus_per_worker", "memory_per_worker")}
        for name, value in {**amounts, **self.resources}.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0):
                raise BadJob(f"engine option {name} is {value!r}: give a number of at least 0")


@dataclass(frozen=True)
class SparkOptions:
    """Which Spark runs a job. `session` is one that is there; else the one of this process is used; else one is started
    on `master` (None: what spark-submit says, else this machine) with `conf`, for the length of the run.

    `cpus_per_task` are the cores of one worker (`spark.task.cpus`) in a session that is started.
    """

    master: str | None = None
    session: Any = None
    cpus_per_task: int = 1
    conf: Mapping[str, Any] = field(default_factory=dict)
    app_name: str = "gristmill"

    def __post_init__(self) -> None:
        cpus: Any = self.cpus_per_task  # a job file may give anything
        if isinstance(cpus, bool) or not isinstance(cpus, int) or cpus < 1:
            raise BadJob(f"engine option cpus_per_task is {cpus!r}: give a whole number of at least 1")
        if self.session is not None and (self.master is not None or self.conf):
            raise BadJob("engine spark: a session is given, so that master and conf have no effect: leave them out")


@dataclass(frozen=True)
class BatchPlan:
    """What a call of the model may hold, found for one run: padded `tokens` where rows have lengths, `rows` in any
    case; and the rows of a window that batches are cut from.

    `tries` are budgets to try on the first batches (of tokens where `by_tokens`, else of rows), none where the budget
    is settled; a larger one is not tried where its call would take over `longest` seconds.

    With `quick`, calls that take under so many seconds are followed by larger ones, up to the rows of a window.
    """

    tokens: int
    rows: int
    window: int
    by_tokens: bool = False
    tries: tuple[int, ...] = ()
    longest: float | None = None
    quick: float | None = None


@fields_named
@dataclass(frozen=True)
class EngineSpec:
    """Which engine runs a job, and with what. `workers` 0 runs in the calling process, whatever engine was named; a
    pair is (least, most).

    `steps_workers` are processes for each worker that do nothing but read, run steps and tokenise, for steps that take
    longer than the model; with 0 the worker does it itself, beside the model. `options` are the engine's own (address,
    resources, …).
    """

    name: str = "local"
    workers: int | Auto | tuple[int, int] = "auto"
    gpus: int | Auto = "auto"
    threads: int | Auto = "auto"
    steps_workers: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in OPTIONS:
            near = difflib.get_close_matches(str(self.name), OPTIONS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise BadJob(f"engine {self.name!r}: there is {', '.join(OPTIONS)}{hint}")
        pair: Any = self.workers  # a job file gives a list
        if isinstance(pair, list):
            object.__setattr__(self, "workers", tuple(pair))
        if isinstance(self.workers, tuple):
            _between("workers", self.workers)
        elif self.workers != 0:
            _positive("workers", self.workers)
        if self.gpus != 0:
            _positive("gpus", self.gpus)
        _positive("threads", self.threads)
        count: Any = self.steps_workers
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise BadJob(f"steps_workers is {count!r}: give a whole number of at least 0")
        if count and self.workers == 0:
            raise BadJob("workers is 0, so that everything runs in the calling process: leave steps_workers out")
        self.own()
        if self.workers == 0:
            object.__setattr__(self, "options", self.options if self.name == "local" else {})
            object.__setattr__(self, "name", "local")

    def named(self, name: str) -> EngineSpec:
        """The engine of that name: with this one's own options, if it is the same; with its workers, if it has some."""
        return self if name == self.name else replace(self, name=name, options={}, workers=self.workers or "auto")

    def own(self) -> Any:
        """The engine's own options, checked. Raises BadJob for an unknown option."""
        made = OPTIONS[self.name]
        check_names(f"engine {self.name}", self.options, made.__dataclass_fields__)
        return made(**self.options)


ENGINE = "GRISTMILL_ENGINE"


def default_engine(environ: Mapping[str, str]) -> str:
    """The engine of jobs and maps that name none: what GRISTMILL_ENGINE says, else "local". Raises BadJob."""
    name = environ.get(ENGINE) or "local"
    if name not in OPTIONS:
        raise BadJob(f"the environment variable {ENGINE} is {name!r}: give {', '.join(OPTIONS)}")
    return name


OPTIONS: dict[str, Any] = {
    "local": LocalOptions,
    "ray": RayOptions,
    "spark": SparkOptions,
}  # engines with options of their own


def ray(
    *,
    workers: int | Auto | tuple[int, int] = "auto",
    gpus: int | Auto = "auto",
    threads: int | Auto = "auto",
    steps_workers: int = 0,
    **options: Any,
) -> EngineSpec:
    """The Ray engine with options: `gm.ray(address="auto", gpus_per_worker=1, workers=(4, 64))`. See `RayOptions`."""
    return EngineSpec("ray", workers, gpus, threads, steps_workers, options)


@fields_named
@dataclass(frozen=True)
class Gates:
    """What must hold before anything is published, beyond the exact accounting that is always on.

    `min_ok` is the least share of rows scored (of those not filtered); below it nothing is published. One dead row is
    always allowed, so that a job of a few rows does not fail for it, unless `min_ok` is 1. A share of dead rows over
    `warn_failed` warns.
    """

    min_ok: float = 0.99
    warn_failed: float = 0.001
    allow_empty: bool = False

    def __post_init__(self) -> None:
        for name in ("min_ok", "warn_failed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise BadJob(f"gates.{name} is {value!r}: give a share between 0 and 1, for example 0.99")

    def allowed(self, rows: int) -> int:
        """How many of so many rows may be dead."""
        from decimal import Decimal

        share = Decimal(str(self.min_ok))  # 0.99 of 100 rows are 99 exactly
        return 0 if share == 1 else max(1, int(rows * (1 - share)))

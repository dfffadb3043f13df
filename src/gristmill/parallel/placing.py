"""How many calls run at once, and with what: from the request for one call and the resources available."""

from __future__ import annotations

import glob
import os
from typing import Any

from gristmill.engines.contract import Sized
from gristmill.engines.registry import engine_kind
from gristmill.errors import BadJob
from gristmill.job.accelerators import COMMON, OF_RAY, meant
from gristmill.job.options import EngineSpec
from gristmill.parallel.calling import CORES
from gristmill.process import machine
from gristmill.values import dataclass

WORKER = 64 << 20  # bytes that a worker holds, measured with little imported
MOST_GROWN = 1000  # workers to ask of a cluster that may grow, if max_parallelism is not given


@dataclass(frozen=True)
class Request:
    """What one call asks for: cores, GB of memory, a GPU by type, if it is not 0; and the most calls at once."""

    cpu: Any = "dynamic"
    ram: Any = "dynamic"
    gpu: Any = None
    most: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("func_cpu", self.cpu), ("func_ram", self.ram)):
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
            if value != "dynamic" and not number:
                raise BadJob(f"{name} is {value!r}: give a number above 0, or 'dynamic'")
        if isinstance(self.gpu, (int, float)) and not self.gpu:
            object.__setattr__(self, "gpu", None)
        if self.gpu is not None and not (isinstance(self.gpu, str) and self.gpu.strip()):
            raise BadJob(f"func_gpu is {self.gpu!r}: give one type of GPU, such as 'A100', or 0 for none")
        whole = isinstance(self.most, int) and not isinstance(self.most, bool) and self.most >= 1
        if self.most is not None and not whole:
            raise BadJob(f"max_parallelism is {self.most!r}: give a whole number of at least 1")


@dataclass(frozen=True)
class Place:
    """Workers, the cores of each, the GPUs they get one each of, and notes for a person."""

    workers: int
    threads: int
    gpus: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def on_this_machine(request: Request) -> Place:
    """Raises BadJob if the requested GPU is not there. A request for more cores or memory than there is gets one call
    at a time, with all there is.
    """
    notes = []
    cores = int(os.environ.get(CORES) or machine.cores())
    cpu = 1.0 if request.cpu == "dynamic" else float(request.cpu)
    workers = max(1, int(cores / cpu + 1e-9))
    if request.cpu == "dynamic" and request.most is not None and request.most > workers:  # calls that mostly wait
        workers = max(workers, min(request.most, machine.memory() // WORKER))
        if workers < request.most:
            notes.append(f"max_parallelism={request.most}: this machine's memory has room for {workers} calls at once")
    if cpu > cores:
        notes.append(
            f"func_cpu={request.cpu}: this machine has {cores} cores, so calls run one at a time with all of them"
        )
    if request.ram != "dynamic":
        memory = machine.memory() / 1e9
        workers = max(1, min(workers, int(memory // request.ram)))
        if request.ram > memory:
            notes.append(
                f"func_ram={request.ram}: this machine has {memory:.0f} GB of memory, so calls run one at a time"
            )
    gpus: tuple[str, ...] = ()
    if request.gpu is not None:
        gpus = _gpus(request.gpu)
        workers = min(workers, len(gpus))
    if request.most is not None:
        workers = min(workers, request.most)
    threads = max(1, min(cores, int(cpu) if request.cpu != "dynamic" else cores // workers))
    return Place(workers, threads, gpus, tuple(notes))


def _gpus(wanted: str) -> tuple[str, ...]:
    here = machine.gpus()
    names = gpu_names()
    if not here:
        unknown = "" if meant(wanted, (*OF_RAY, *COMMON)) else "no type of GPU that is known here, and "
        ways = "leave func_gpu out, or use engine='ray'"
        raise BadJob(f"func_gpu={wanted!r}: {unknown}this machine shows no GPU: {ways}")
    if names and meant(wanted, names) is None:
        raise BadJob(f"func_gpu={wanted!r}: this machine has {', '.join(sorted(set(names)))}")
    return here


def gpu_names() -> list[str]:
    """The models of this machine's NVIDIA GPUs, as their driver reports them; empty if it does not."""
    names = []
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        with open(path) as file:
            names += [line.partition(":")[2].strip() for line in file if line.startswith("Model")]
    return names


def per_call(kind: Sized, request: Request, image: str | None, spec: EngineSpec) -> EngineSpec:
    """The engine with the request as its own options, except those that were given."""
    cpus = 1 if request.cpu == "dynamic" else request.cpu
    memory = None if request.ram == "dynamic" else int(request.ram * 1e9)
    own = kind.per_call(cpus, memory, request.gpu, image)
    return EngineSpec(spec.name, options={**own, **spec.options})


def on_a_cluster(request: Request, spec: EngineSpec, grow: bool) -> Place:
    """As many workers as the cluster has room for now or, if it may `grow`, will have; on a cluster that is started for
    the map, as many as on this machine.
    """
    cpu = 1 if request.cpu == "dynamic" else request.cpu
    threads, there = max(1, int(cpu)), engine_kind(spec).room(spec.own())
    workers = (
        int(machine.cores() / cpu + 1e-9) if there is None else there.gpu_workers if request.gpu else there.workers
    )
    if grow and there is not None:
        workers = max(workers, MOST_GROWN)
    return Place(max(1, min(workers, request.most or workers)), threads)

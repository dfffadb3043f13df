"""Which device a job's model runs on, and which GPUs its workers have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gristmill.engines.contract import Room
from gristmill.engines.registry import engine_kind
from gristmill.errors import BadJob
from gristmill.job.job import JobSpec
from gristmill.models.contract import ModelInfo
from gristmill.models.gpulibraries import without_gpu
from gristmill.values import dataclass

# A text model whose weights take less than this leaves a GPU idle while its batches are cut and its kernels launched:
# two workers scored 2.0 times the rows of one with MiniLM in bfloat16 on an H200 (docs/benchmarks.md).
SMALL_BYTES = 1 << 30
SMALL_SHARE = 2


@dataclass(frozen=True)
class Devices:
    """`device` is the model's in each worker; `workers` can have a GPU each (or the share of one that the job asks
    for), and `gpus` are these GPUs' names where the driver assigns them. `note` says why a GPU stays unused.
    """

    device: str
    workers: int = 0
    gpus: tuple[str, ...] = ()
    note: str | None = None


def devices(job: JobSpec, model: Any, info: ModelInfo, room: Room) -> Devices:
    """The devices of a job. `auto` is a GPU if there is one that the model and its library can use. Raises BadJob for
    GPUs that are not there, or cannot be used.
    """
    asked = str(getattr(model, "device", "auto"))
    if room.shares and info.by_tokens and info.library and info.weight_bytes < SMALL_BYTES:
        room = replace(room, per_gpu=SMALL_SHARE * room.per_gpu, gpu_workers=SMALL_SHARE * room.gpu_workers)
    unable = without_gpu(info.library) if info.library and room.gpu_workers and engine_kind(job.engine).here else None
    if asked.startswith("cuda"):
        if job.engine.gpus == 0:
            raise BadJob(f"device is {asked!r}, and gpus is 0: leave one of them out")
        if unable:
            raise BadJob(f"device {asked!r}: {unable}; or use device cpu")
        return _named(job, asked, room)
    workers = _workers(job, room) if asked == "auto" else 0
    plain = Devices("cpu" if asked == "auto" else asked, workers, room.gpus[: workers // room.per_gpu])
    if not workers or not info.on_gpu:
        return plain
    if unable:
        if job.engine.gpus != "auto":
            raise BadJob(f"gpus is {job.engine.gpus}, but {unable}")
        return Devices(plain.device, note=f"the GPU of {room.where} is not used: {unable}")
    return Devices("cuda", workers, plain.gpus)


def _named(job: JobSpec, asked: str, room: Room) -> Devices:
    """For a model on "cuda", or on one GPU by its number among those that this process sees."""
    if not room.gpu_workers:
        raise BadJob(f"device {asked!r}: {room.where} shows no GPU; use device cpu")
    _, colon, number = asked.partition(":")
    if not colon:
        workers = _workers(job, room)
        return Devices("cuda", workers, room.gpus[: workers // room.per_gpu])
    if not number.isdecimal() or (room.gpus and int(number) >= len(room.gpus)):
        there = ", ".join(f"cuda:{n}" for n in range(len(room.gpus)))
        raise BadJob(f"device {asked!r}: {room.where} has {there or 'GPUs by number, such as cuda:0'}")
    if not room.gpus and int(number):
        raise BadJob(f"device {asked!r}: {room.where} assigns GPUs to its workers; use device cuda")
    if job.engine.workers == 0:  # this process itself, which sees all of them
        return Devices(asked, room.per_gpu)
    # A worker sees its own GPU alone, as the first.
    return Devices("cuda", room.per_gpu, room.gpus[int(number) : int(number) + 1])


def _workers(job: JobSpec, room: Room) -> int:
    """Workers that can have a GPU. Raises BadJob if more are asked for than there are."""
    wanted = job.engine.gpus
    if wanted == "auto":
        return room.gpu_workers
    there = room.gpu_workers // room.per_gpu * room.per_worker
    if wanted > there and not room.grows:
        raise BadJob(f"gpus is {wanted}, but {room.where} has {there}")
    if wanted % room.per_worker:
        raise BadJob(f"gpus is {wanted}, and each worker has {room.per_worker}: give a multiple of that")
    return wanted // room.per_worker * room.per_gpu
